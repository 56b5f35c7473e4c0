//! Devices of a pod's containers: before they start, and what they get when they are created.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::execute::StepError;
use super::{Job, WorkerContext, claims};
use crate::core::devices::Granted;
use crate::core::pod_actions::{PodActions, policy_of};
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, ContainerRecord, State, Transaction, child_key,
};
use crate::devicemanager::Readiness;
use crate::types::containers::containers_of;
use crate::types::metrics::ReasonLabel;
use crate::types::pod::RestartPolicy;
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{ContainerId, ContainerKind, Event, EventType, PodExt};

/// Reason of a pod that gets no devices; upstream's `ErrorReasonUnexpected`.
const UNEXPECTED: &str = "UnexpectedAdmissionError";

/// Makes sure that the containers that `actions` start have their devices. Returns reason and message, on record, when the
/// pod fails instead.
///
/// # Errors
/// [`StepError::Devices`] when the pod waits for devices; when a commit fails.
pub(super) async fn refused(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) -> Result<Option<(String, String)>, StepError> {
    let pod = &job.pod;
    let running = (status.containers.iter())
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| c.name.as_str());
    context.resources.devices.confirm(pod, running);
    let starting = starting(pod, actions);
    if starting.is_empty() {
        return Ok(None);
    }
    let starting: Vec<&str> = starting.iter().map(String::as_str).collect();
    let state = context.store.snapshot();
    let fresh = is_fresh(&state, pod, status);
    let nodes = |container: &str| context.resources.pinning.nodes_for_devices(pod, container);
    let ready = context
        .resources
        .devices
        .ready(pod, fresh, &starting, &nodes);
    let (reason, message) = match ready.await? {
        Readiness::Ready => return Ok(None),
        Readiness::Waiting(why) => {
            let text = format!("The pod waits for its devices: {why}");
            let event = Event::pod(EventType::Warning, pod, "WaitingForDevices", text);
            context.recorder.record(event);
            return Err(StepError::Devices(why));
        }
        Readiness::Refused(message) => (UNEXPECTED, message),
        Readiness::Unaligned(refusal) => (refusal.reason, refusal.message),
    };
    reject(context, job, reason, &message).await?;
    Ok(Some((reason.to_owned(), message)))
}

/// Returns the containers that run with devices that have changed since: they are restarted, unless their restart policy is
/// Never.
///
/// # Errors
/// When the answer of a plugin cannot be recorded.
pub(super) async fn outdated(
    context: &WorkerContext,
    pod: &Pod,
    status: &PodStatus,
) -> Result<Vec<ContainerId>, StepError> {
    let running = |name: &str| {
        let spec = containers_of(pod).find(|spec| spec.container.name == name)?;
        if policy_of(pod, &spec) == RestartPolicy::Never {
            return None;
        }
        let mut containers = status.containers_named(name);
        let running = containers.find(|c| c.state == ContainerState::Running);
        running.map(|c| c.id.clone())
    };
    Ok(context.resources.devices.outdated(pod, running).await?)
}

/// Says why [`outdated`] containers are stopped.
pub(super) fn explain(actions: &mut PodActions, outdated: &[ContainerId]) {
    for kill in (actions.kill.iter_mut()).filter(|kill| outdated.contains(&kill.id)) {
        kill.message = format!(
            "Devices of container {} have changed, it will be restarted",
            kill.name
        );
        for start in actions.start.iter_mut().filter(|s| s.name == kill.name) {
            start.why.clone_from(&kill.message);
        }
    }
}

/// Names of the containers that start soon: all but ephemeral ones in a new sandbox, so that a pod whose devices are away
/// starts none of them.
fn starting(pod: &Pod, actions: &PodActions) -> Vec<String> {
    if actions.create_sandbox.is_none() {
        return actions.start.iter().map(|s| s.name.clone()).collect();
    }
    let specs = containers_of(pod).filter(|spec| spec.kind != ContainerKind::Ephemeral);
    specs.map(|spec| spec.container.name.clone()).collect()
}

/// Returns whether no container of the pod was ever started.
fn is_fresh(state: &State, pod: &Pod, status: &PodStatus) -> bool {
    let uid = pod.uid();
    let started = |spec: crate::types::ContainerSpec<'_>| {
        let key = child_key(&uid, &spec.container.name);
        let record = state.record::<ContainerRecord>(&key);
        record.is_some_and(|r| r.intent.is_some() || r.last_exit.is_some())
    };
    status.containers.is_empty() && !containers_of(pod).any(started)
}

/// Records that the pod is refused, and emits the event.
async fn reject(
    context: &WorkerContext,
    job: &Job,
    reason: &'static str,
    message: &str,
) -> Result<(), StepError> {
    let (pod, uid) = (&job.pod, &job.uid);
    let seen = context.store.snapshot();
    let known = seen.record::<AdmissionRecord>(uid.as_str());
    let known = known.or(job.admission.as_ref());
    let record = AdmissionRecord {
        decision: AdmissionDecision::Rejected {
            reason: reason.to_owned(),
            message: message.to_owned(),
        },
        allocated: known.map(|r| r.allocated.clone()).unwrap_or_default(),
        at: context.clock.now(),
    };
    let refusal = Transaction::new()
        .expect::<AdmissionRecord>(&seen, uid.as_str())
        .put(uid.as_str(), record)
        .journal(Some(uid), "rejected", format!("{reason}: {message}"));
    context.store.commit(refusal).await?;
    tracing::warn!(reason, message, "pod rejected");
    let label = ReasonLabel {
        reason: reason.to_owned(),
    };
    let metrics = &context.metrics;
    metrics.admission_rejections.get_or_create(&label).inc();
    let event = Event::pod(EventType::Warning, pod, reason, message);
    context.recorder.record(event);
    Ok(())
}

/// Returns what a container gets with its devices and claims, after the plugins of its devices were notified of its
/// start.
///
/// # Errors
/// The reason why it cannot start.
pub(super) async fn granted(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
) -> Result<Granted, String> {
    context
        .resources
        .devices
        .pre_start(pod, &container.name)
        .await?;
    let granted = context.resources.devices.granted(pod, &container.name);
    let mut granted = granted.map_err(|error| error.to_string())?;
    for id in claims::granted(context, pod, container)? {
        if !granted.cdi.contains(&id) {
            granted.cdi.push(id);
        }
    }
    Ok(granted)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_testkit::device_plugin::DevicePlugin;
    use serde_json::json;

    use super::*;
    use crate::cm::pinning::{Pinning, testkit};
    use crate::core::pinning::{Refusal, Settings};
    use crate::devicemanager::{DeviceManager, DeviceManagerOptions};
    use crate::kubeletconfig::{DeviceReadiness, TopologyPolicy, TopologyScope};
    use crate::types::metrics::Metrics;
    use crate::types::{BootId, Clock, SystemClock};

    const GPU: &str = "example.com/gpu";

    fn pod(uid: &str, cpu: &str, gpus: &str) -> Pod {
        let amounts = json!({"cpu": cpu, "memory": "1Gi", GPU: gpus});
        serde_json::from_value(json!({
            "metadata": {"name": uid, "namespace": "ns", "uid": uid},
            "spec": {"containers": [{"name": "a", "resources": {"limits": amounts, "requests": amounts}}]},
        }))
        .unwrap()
    }

    struct Node {
        pinning: Pinning,
        devices: DeviceManager,
        _dir: tempfile::TempDir,
        _plugin: DevicePlugin,
    }

    /// Two nodes with two CPUs each, of which CPU 0 is reserved, and a plugin with these devices.
    async fn node(topology: TopologyPolicy, scope: TopologyScope, ids: &[&str]) -> Node {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
        let (pinning, store) = testkit::pinning(Arc::clone(&clock));
        let devices = DeviceManager::new(DeviceManagerOptions {
            store: store.clone(),
            clock,
            metrics: Metrics::default(),
            readiness: DeviceReadiness::Fail,
        });
        let settings = Settings {
            topology,
            scope,
            ..pinning.settings().clone()
        };
        let asked = devices.clone();
        let hints = Box::new(move |pod: &Pod, container: Option<&Container>| {
            vec![asked.hints(pod, container)]
        });
        let pinning = Pinning::new(settings, store, Metrics::default(), hints);
        let dir = tempfile::tempdir().unwrap();
        let plugin = DevicePlugin::start(dir.path().join("s"), ids).unwrap();
        let versions = ["v1beta1".to_owned()];
        let registered = devices.register(GPU, plugin.socket(), &versions).await;
        registered.unwrap();
        let mut amounts = devices.amounts();
        let listed = amounts.wait_for(|all| all.get(GPU).is_some_and(|a| a.allocatable > 0));
        let listed = tokio::time::timeout(Duration::from_secs(20), listed).await;
        listed.expect("the plugin lists").unwrap();
        Node {
            pinning,
            devices,
            _dir: dir,
            _plugin: plugin,
        }
    }

    impl Node {
        /// Admits a pod and gives it its devices; returns the CPUs and devices of its container.
        async fn admit(&self, pod: &Pod) -> Result<(String, BTreeSet<String>), Refusal> {
            let placed = self.pinning.place(pod, |_| true)?;
            let cpus = placed.cpus.containers.get("a").map(ToString::to_string);
            self.pinning.reserve(&pod.uid(), placed);
            let align = |container: &str| self.pinning.nodes_for_devices(pod, container);
            match self.devices.ready(pod, true, &["a"], &align).await.unwrap() {
                Readiness::Ready => {}
                Readiness::Unaligned(refusal) => return Err(refusal),
                other => panic!("{other:?}"),
            }
            let held = self.devices.held(pod).unwrap();
            let ids = held.ids("a", GPU).cloned().collect();
            Ok((cpus.unwrap_or_default(), ids))
        }
    }

    fn set(ids: &[&str]) -> BTreeSet<String> {
        ids.iter().map(ToString::to_string).collect()
    }

    #[tokio::test]
    async fn devices_and_cpus_are_of_one_numa_node() {
        for scope in [TopologyScope::Container, TopologyScope::Pod] {
            let policy = TopologyPolicy::SingleNumaNode;
            // The CPUs follow the device: without it they would be of node 0.
            let only_there = node(policy, scope, &["b@1"]).await;
            let got = only_there.admit(&pod("u1", "1", "1")).await.unwrap();
            assert_eq!(got.1, set(&["b"]));
            assert!(["2", "3"].contains(&got.0.as_str()), "{got:?}");

            // The device follows the CPUs, of which two are only on node 1; the plugin prefers `c`.
            let node = node(policy, scope, &["a@0", "b@1", "c@0"]).await;
            let got = node.admit(&pod("u1", "2", "1")).await.unwrap();
            assert_eq!(got, ("2-3".to_owned(), set(&["b"])));
            // One CPU is left, and devices near it; two devices are not on one node with any other.
            let refused = node.admit(&pod("u2", "1", "3")).await.unwrap_err();
            assert_eq!(refused.reason, "TopologyAffinityError");
            let got = node.admit(&pod("u3", "1", "2")).await.unwrap();
            assert_eq!(got, ("1".to_owned(), set(&["a", "c"])));
        }
    }

    #[tokio::test]
    async fn devices_that_another_pod_took_after_the_admission_refuse_the_pod() {
        let node = node(
            TopologyPolicy::Restricted,
            TopologyScope::Container,
            &["a@0", "b@1"],
        )
        .await;
        let first = pod("u1", "2", "1");
        let placed = node.pinning.place(&first, |_| true).unwrap();
        node.pinning.reserve(&first.uid(), placed);
        let shared = pod("u2", "500m", "2");
        let any = |_: &str| Ok(None);
        let ready = node.devices.ready(&shared, true, &["a"], &any).await;
        assert_eq!(ready.unwrap(), Readiness::Ready);
        let align = |container: &str| node.pinning.nodes_for_devices(&first, container);
        let ready = node.devices.ready(&first, true, &["a"], &align).await;
        let Readiness::Unaligned(refusal) = ready.unwrap() else {
            panic!("the pod is not aligned");
        };
        assert_eq!(refusal.reason, "TopologyAffinityError");
    }

    #[tokio::test]
    async fn without_a_topology_policy_devices_are_of_any_node() {
        let node = node(
            TopologyPolicy::None,
            TopologyScope::Container,
            &["a@0", "b@1"],
        )
        .await;
        let got = node.admit(&pod("u1", "2", "2")).await.unwrap();
        assert_eq!(got, ("2-3".to_owned(), set(&["a", "b"])));
    }
}

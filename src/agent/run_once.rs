//! `--runonce`: wait until every pod of the sources has come up or is over, and say how it went.
//!
//! A pod has come up when every one of its containers runs at the same moment, or has succeeded and does not
//! run again; one that crashes again and again never does. What becomes of a container that runs is not waited
//! for, whatever the restart policy: a pod that may run for months would never let the command end.
//!
//! **Invariant:** the answer is taken from the statuses on record, so `dump` shows what it was given for.

use k8s_openapi::api::core::v1 as api;
use tokio::time::{Duration, Instant};
use tracing::info;

use crate::config::SourcesReady;
use crate::core::pod_actions::restarts;
use crate::core::state::StatusRecord;
use crate::pod_manager::PodManager;
use crate::pod_workers::PodWorkers;
use crate::store::Store;
use crate::types::containers::{ContainerSpec, containers_of};
use crate::types::{ContainerKind, PodExt};

/// Pods get this long to come up.
const PATIENCE: Duration = Duration::from_secs(300);

/// Waits for the pods. Upstream: `RunOnce` and `isPodRunning`, which no longer exist there. Returns as soon
/// as the answer is known; may be dropped at any time.
///
/// # Errors
/// Text naming the pods that failed, or that did not come up in time and what keeps them.
pub(super) async fn wait(
    store: &Store,
    workers: &PodWorkers,
    pods: &PodManager,
    ready: &SourcesReady,
) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let mut published = store.published();
    loop {
        if ready.all_ready() {
            let Survey { failed, pending } = survey(store, pods);
            let left = workers.known().len();
            if pending.is_empty() && left >= pods.all().len() {
                return if failed.is_empty() {
                    info!("every container runs or has succeeded");
                    Ok(())
                } else {
                    Err(format!("pods failed: {}", failed.join(", ")))
                };
            }
            if Instant::now() >= deadline {
                return Err(format!("pods did not come up: {}", pending.join(", ")));
            }
        }
        // Either something was recorded, or it is time to look at the clock.
        tokio::select! {
            changed = published.changed() => if changed.is_err() {
                return Err("the store was closed".to_owned());
            },
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    }
}

struct Survey {
    /// Pods that failed.
    failed: Vec<String>,
    /// Pods that have not come up yet, and what keeps them.
    pending: Vec<String>,
}

fn survey(store: &Store, pods: &PodManager) -> Survey {
    let state = store.snapshot();
    let (mut failed, mut pending) = (Vec::new(), Vec::new());
    for pod in pods.all() {
        let name = format!("{}/{}", pod.namespace(), pod.name());
        let record = state.record::<StatusRecord>(pod.uid().as_str());
        match fate(&pod, record.map(|r| &*r.status)) {
            Fate::Up => {}
            Fate::Failed(why) if why.is_empty() => failed.push(name),
            Fate::Failed(why) => failed.push(format!("{name} ({why})")),
            Fate::Pending(why) => pending.push(format!("{name} ({why})")),
        }
    }
    Survey { failed, pending }
}

/// State of a pod so far.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// Every container runs, or has succeeded for good.
    Up,
    /// It failed for good; its reason, where it has one.
    Failed(String),
    /// Neither; what it waits for.
    Pending(String),
}

fn fate(pod: &api::Pod, status: Option<&api::PodStatus>) -> Fate {
    let Some(status) = status else {
        return Fate::Pending("not looked at yet".to_owned());
    };
    match status.phase.as_deref() {
        Some("Succeeded") => return Fate::Up,
        Some("Failed") => return Fate::Failed(status.reason.clone().unwrap_or_default()),
        _ => {}
    }
    let statuses = status.container_statuses.as_deref().unwrap_or_default();
    for spec in containers_of(pod).filter(|c| c.kind == ContainerKind::Main) {
        let name = &spec.container.name;
        let found = statuses.iter().find(|s| s.name == *name);
        if let Some(why) = keeps_waiting(pod, &spec, found.and_then(|s| s.state.as_ref())) {
            return Fate::Pending(format!("container {name}: {why}"));
        }
    }
    Fate::Up
}

/// Returns the reason why a container waits; `None` if it runs or has finished.
fn keeps_waiting(
    pod: &api::Pod,
    spec: &ContainerSpec<'_>,
    state: Option<&api::ContainerState>,
) -> Option<String> {
    let Some(state) = state else {
        return Some("not started yet".to_owned());
    };
    if state.running.is_some() {
        return None;
    }
    if let Some(end) = &state.terminated {
        let is_done = end.exit_code == 0 && !restarts(pod, spec, 0);
        return (!is_done).then(|| format!("ended with exit code {}", end.exit_code));
    }
    let waiting = state.waiting.as_ref();
    let reason = waiting.and_then(|w| w.reason.clone());
    Some(reason.unwrap_or_else(|| "not started yet".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(policy: &str) -> api::Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
            "spec": {"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]},
        }))
        .unwrap()
    }

    fn status(phase: &str, states: &[(&str, serde_json::Value)]) -> api::PodStatus {
        let containers: Vec<_> = states
            .iter()
            .map(|(name, state)| {
                serde_json::json!({"name": name, "image": "i", "imageID": "", "ready": false,
                    "restartCount": 0, "state": state})
            })
            .collect();
        serde_json::from_value(serde_json::json!({"phase": phase, "containerStatuses": containers}))
            .unwrap()
    }

    #[test]
    fn a_pod_is_up_when_every_container_runs_or_is_done_for_good() {
        let running = || serde_json::json!({"running": {}});
        let ended = |code: i32| serde_json::json!({"terminated": {"exitCode": code}});
        let waiting = |reason: &str| serde_json::json!({"waiting": {"reason": reason}});
        let pending = |text: &str| Fate::Pending(text.to_owned());
        for (policy, phase, a, b, want) in [
            ("Always", "Running", running(), running(), Fate::Up),
            ("Never", "Running", running(), running(), Fate::Up),
            ("Never", "Running", ended(0), running(), Fate::Up),
            ("OnFailure", "Running", ended(0), running(), Fate::Up),
            ("Never", "Succeeded", ended(0), ended(0), Fate::Up),
            (
                "Never",
                "Failed",
                ended(3),
                ended(0),
                Fate::Failed(String::new()),
            ),
            (
                "Always",
                "Running",
                running(),
                waiting("CrashLoopBackOff"),
                pending("container b: CrashLoopBackOff"),
            ),
            (
                "Always",
                "Running",
                ended(0),
                running(),
                pending("container a: ended with exit code 0"),
            ),
            (
                "Never",
                "Running",
                ended(1),
                running(),
                pending("container a: ended with exit code 1"),
            ),
            (
                "OnFailure",
                "Pending",
                waiting("ContainerCreating"),
                ended(0),
                pending("container a: ContainerCreating"),
            ),
        ] {
            let status = status(phase, &[("a", a), ("b", b)]);
            let got = fate(&pod(policy), Some(&status));
            assert_eq!(got, want, "{policy}: {status:?}");
        }
    }

    #[test]
    fn a_pod_that_nobody_has_reported_on_yet_is_waited_for() {
        let nobody = Fate::Pending("not looked at yet".to_owned());
        assert_eq!(fate(&pod("Always"), None), nobody);
        let half = status("Running", &[("a", serde_json::json!({"running": {}}))]);
        let half = fate(&pod("Always"), Some(&half));
        assert_eq!(
            half,
            Fate::Pending("container b: not started yet".to_owned())
        );
    }

    #[test]
    fn a_pod_that_was_refused_says_why() {
        let mut refused = status("Failed", &[]);
        refused.reason = Some("UnsupportedPodSpec".to_owned());
        let want = Fate::Failed("UnsupportedPodSpec".to_owned());
        assert_eq!(fate(&pod("Never"), Some(&refused)), want);
    }

    #[test]
    fn a_container_is_done_by_its_own_policy() {
        let states = [
            ("a", serde_json::json!({"terminated": {"exitCode": 0}})),
            ("b", serde_json::json!({"running": {}})),
        ];
        let status = status("Running", &states);
        let ended = "container a: ended with exit code 0".to_owned();
        for (policy, own, want) in [
            ("Never", "Always", Fate::Pending(ended)),
            ("Always", "Never", Fate::Up),
        ] {
            let mut pod = pod(policy);
            pod.spec.as_mut().unwrap().containers[0].restart_policy = Some(own.to_owned());
            assert_eq!(fate(&pod, Some(&status)), want, "{policy} {own}");
        }
    }
}

//! Handlers of the loop: what each kind of update means for pod manager and workers. Upstream:
//! `HandlePodAdditions`, `HandlePodUpdates`, `HandlePodRemoves`, `HandlePodReconcile`, `HandlePodSyncs`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use tracing::{debug, info, warn};

use super::{LoopContext, Observed, cleanups, resizes};
use crate::core::admission::{self, AdmissionContext, NodeInfo, Preemption};
use crate::core::claims;
use crate::core::pinning;
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, ContainerRecord, State, Transaction, WorkerPhase,
    WorkerRecord, child_key,
};
use crate::core::supported;
use crate::pod_workers::UpdateOptions;
use crate::types::metrics::ReasonLabel;
use crate::types::{Event, EventType, PodExt, PodSyncType, PodUid};

/// Reads the node again if a new pod of the API server would be refused for the labels or taints that are known: the scheduler may
/// have seen newer ones. Upstream: the second look of `predicateAdmitHandler`.
pub(super) async fn see_node_for(context: &LoopContext, pods: &[Arc<Pod>]) {
    let node = node(context);
    let state = context.store.snapshot();
    let is_unfit = |pod: &Pod| {
        let is_decided = || {
            state
                .record::<AdmissionRecord>(pod.uid().as_str())
                .is_some()
        };
        !pod.is_static()
            && !pod.is_mirror()
            && !pod.phase_is_terminal()
            && !pod.is_deleting()
            && admission::is_unfit(pod, &node, &context.node_name)
            && !is_decided()
    };
    if pods.iter().any(|pod| is_unfit(pod)) {
        context.node.read_again().await;
    }
}

/// New pods: by priority, then oldest first.
pub(super) fn additions(context: &LoopContext, mut pods: Vec<Arc<Pod>>) {
    pods.sort_by_key(|p| {
        let created = p.metadata.creation_timestamp.as_ref();
        let created = created.map(|t| t.0.as_millisecond());
        (Reverse(admission::priority(p)), created)
    });
    let mut admissions = Admissions::new(context);
    for pod in pods {
        context.pods.update(Arc::clone(&pod));
        observe(context, &pod);
        if pod.is_mirror() {
            mirror_changed(context, &pod);
            continue;
        }
        cleanups::stop_replaced(context, &pod);
        admissions.add(pod);
    }
}

/// Admissions that are decided one after the other, without a wait in between. What the pods on the node take is summed up
/// once, when the first decision needs it, and follows each of them from then on: many pods cost no more than each of them.
pub(super) struct Admissions<'a> {
    context: &'a LoopContext,
    others: Option<NodeInfo>,
}

impl<'a> Admissions<'a> {
    pub(super) fn new(context: &'a LoopContext) -> Self {
        Self {
            context,
            others: None,
        }
    }

    /// Admits a new pod and passes it to its worker. A decision of a previous run stands.
    pub(super) fn add(&mut self, pod: Arc<Pod>) {
        let context = self.context;
        let uid = pod.uid();
        let known = context
            .store
            .snapshot()
            .record::<AdmissionRecord>(uid.as_str())
            .cloned();
        let (admission, preemption) = match known {
            Some(record) => (record, None),
            None => self.decide(&pod),
        };
        let mut options = UpdateOptions::new(pod, PodSyncType::Create);
        options.admission = Some(admission);
        options.preemption = preemption;
        options.origin = context.origins.get(&uid);
        context.workers.update(options);
        if let Some(others) = &mut self.others {
            match counted(context, &uid) {
                Some(pod) => others.insert(pod),
                None => others.remove(&uid),
            }
        }
    }

    /// Decides on a new pod. The pods that have to end for it are stopped when the decision is stored: its worker
    /// stores both at once.
    fn decide(&mut self, pod: &Pod) -> (AdmissionRecord, Option<Preemption>) {
        let context = self.context;
        let record = |decision| AdmissionRecord {
            decision,
            allocated: admission::allocated(pod),
            at: context.clock.now(),
        };
        let is_shutting_down = context.runtime_state.is_shutting_down();
        if let Some(decision) = admission::admit_without_room(pod, is_shutting_down) {
            if let AdmissionDecision::Rejected { reason, message } = &decision {
                tell_rejected(context, pod, reason, message);
            }
            return (record(decision), None);
        }
        let uid = pod.uid();
        let others = self.others.get_or_insert_with(|| on_the_node(context));
        others.remove(&uid);
        let refusals: Vec<String> = supported::refused(pod)
            .iter()
            .map(ToString::to_string)
            .collect();
        let node = node(context);
        let pinning = &context.pinning;
        let holds = |uid: &PodUid| context.workers.if_counted_by_admission(uid).is_some();
        let placed = pinning.place(pod, holds);
        let facts = AdmissionContext {
            unplaced: placed.as_ref().err(),
            ..facts(context, &node, &refusals)
        };
        let verdict = admission::admit(pod, others, &facts);
        match &verdict.decision {
            AdmissionDecision::Admitted => {
                info!(pod = %uid, name = pod.name(), "pod admitted");
                pinning.reserve(&uid, placed.unwrap_or_default());
            }
            AdmissionDecision::Rejected { reason, message } => {
                tell_rejected(context, pod, reason, message);
            }
        }
        let (decision, preemption) = verdict.into_parts();
        (record(decision), preemption)
    }
}

/// Returns the pods that take part of the node. A pod that its source does not want any more takes no part, though it
/// may still be stopping: a pod that replaces it is not refused for it.
fn on_the_node(context: &LoopContext) -> NodeInfo {
    let state = context.store.snapshot();
    let counted = context.workers.counted_by_admission().into_iter();
    let wanted = counted.filter(|pod| context.pods.get(&pod.uid()).is_some());
    NodeInfo::of(wanted.map(|pod| resizes::as_allocated(&state, pod)))
}

/// A pod as [`on_the_node`] has it.
fn counted(context: &LoopContext, uid: &PodUid) -> Option<Arc<Pod>> {
    context.pods.get(uid)?;
    let pod = context.workers.if_counted_by_admission(uid)?;
    Some(resizes::as_allocated(&context.store.snapshot(), pod))
}

/// The node as the API server or its checkpoint shows it, else as the agent itself sees it; without devices of device
/// plugins.
pub(super) fn node(context: &LoopContext) -> Arc<Node> {
    let known = context.node.get();
    let node = known.unwrap_or_else(|| context.local_node.load_full());
    let devices = &context.devices;
    let is_device = |resource: &str| resource.contains('/') && devices.knows(resource);
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
    let mut resources = allocatable.into_iter().flat_map(BTreeMap::keys);
    if !resources.any(|resource| is_device(resource)) {
        return node;
    }
    // Whether there are enough of them is decided with the choice, before the pod starts.
    let mut without = Node::clone(&node);
    let status = without.status.get_or_insert_default();
    let allocatable = status.allocatable.get_or_insert_default();
    allocatable.retain(|resource, _| !is_device(resource));
    Arc::new(without)
}

fn facts<'a>(
    context: &'a LoopContext,
    node: &'a Node,
    refusals: &'a [String],
) -> AdmissionContext<'a> {
    AdmissionContext {
        node_name: &context.node_name,
        max_pods: (context.max_pods)(),
        refusals,
        node,
        unsafe_sysctls: &context.unsafe_sysctls,
        apparmor: context.apparmor,
        strict_groups: context.runtime_state.strict_groups(),
        pressure: *context.pressure.borrow(),
        unplaced: None,
    }
}

fn tell_rejected(context: &LoopContext, pod: &Pod, reason: &str, message: &str) {
    warn!(pod = %pod.uid(), name = pod.name(), reason, message, "pod rejected");
    let label = ReasonLabel {
        reason: reason.to_owned(),
    };
    let metrics = &context.metrics;
    metrics.admission_rejections.get_or_create(&label).inc();
    let event = Event::pod(EventType::Warning, pod, reason, message);
    context.recorder.record(event);
}

/// Rejects pods of the API server that do not match this node any more, if they were admitted in a previous run and
/// nothing of them was started. A pod that was started once is never checked again.
pub(super) fn reconsider_unstarted(context: &LoopContext) {
    let state = context.store.snapshot();
    let node = node(context);
    let facts = facts(context, &node, &[]);
    for pod in context.pods.all() {
        let uid = pod.uid();
        if pod.is_static() || pod.is_deleting() || pod.phase_is_terminal() {
            continue;
        }
        let Some(old) = admitted_and_unstarted(context, &state, &pod) else {
            continue;
        };
        let decision = admission::still_fits(&pod, &facts);
        let AdmissionDecision::Rejected { reason, message } = &decision else {
            continue;
        };
        tell_rejected(context, &pod, reason, message);
        let why = format!("{reason}: {message}");
        let mut transaction = Transaction::new()
            .expect::<AdmissionRecord>(&state, uid.as_str())
            .journal(Some(&uid), "rejected", why);
        for container in all_containers(&pod) {
            // A start that was decided meanwhile wins.
            let key = child_key(&uid, container);
            transaction = transaction.expect::<ContainerRecord>(&state, &key);
        }
        let record = AdmissionRecord {
            decision,
            allocated: old.allocated.clone(),
            at: context.clock.now(),
        };
        let pending = context.store.submit(transaction.put(uid.as_str(), record));
        let workers = context.workers.clone();
        tokio::spawn(async move {
            match pending.wait().await {
                Ok(_) => workers.sync(&uid),
                Err(error) => debug!(pod = %uid, %error, "pod is not rejected"),
            }
        });
    }
}

/// Returns whether each pod that runs is wanted by a source, or none wants it for certain. Another one may be wanted by a
/// source that is incomplete, and have what a refused pod needs.
pub(super) fn knows_what_runs(context: &LoopContext) -> bool {
    let cache = context.pleg.cache();
    if context.ready.complete() {
        return cache.is_listed();
    }
    let has_ended = |uid: &PodUid| {
        let status = cache.known(uid);
        status.is_some_and(|s| !s.any_running() && s.ready_sandbox().is_none())
    };
    cache.present().is_some_and(|present| {
        let mut present = present.iter();
        present.all(|uid| context.pods.get(uid).is_some() || has_ended(uid))
    })
}

/// Decides again on static pods that were refused and fit now: a port or processor may be free again, or the node may have
/// other labels. Their manifests do not change, so nobody else would bring them back. Upstream decides again when it starts.
pub(super) fn reconsider_refused(context: &LoopContext) {
    if context.runtime_state.is_shutting_down() {
        return;
    }
    let state = context.store.snapshot();
    let mut others = None;
    for pod in context.pods.all() {
        let uid = pod.uid();
        let record = state.record::<AdmissionRecord>(uid.as_str());
        let Some(AdmissionDecision::Rejected { reason, .. }) = record.map(|r| &r.decision) else {
            continue;
        };
        if !pod.is_static() || depends_on_devices(&pod, reason) {
            continue;
        }
        let others = others.get_or_insert_with(|| on_the_node(context));
        if fits_now(context, &pod, others) && context.workers.admit_again(&uid) {
            let reason = reason.as_str();
            info!(pod = %uid, name = pod.name(), reason, "a static pod that was refused fits now, deciding again");
            // The next one has to fit beside it.
            return;
        }
    }
}

/// Returns whether the choice of devices may be why a pod was refused. They are chosen when it starts, so it cannot be known
/// here whether they are there now.
fn depends_on_devices(pod: &Pod, reason: &str) -> bool {
    let containers = pod.init_containers().iter().chain(pod.containers());
    let limits = containers.filter_map(|c| c.resources.as_ref()?.limits.as_ref());
    let mut names = limits.flat_map(BTreeMap::keys);
    [pinning::UNEXPECTED, pinning::TOPOLOGY_AFFINITY].contains(&reason)
        && names.any(|name| name.contains('/'))
}

/// Returns whether a pod would be admitted now. Decides nothing.
fn fits_now(context: &LoopContext, pod: &Pod, others: &NodeInfo) -> bool {
    let refusals: Vec<String> = supported::refused(pod)
        .iter()
        .map(ToString::to_string)
        .collect();
    let node = node(context);
    let facts = facts(context, &node, &refusals);
    let verdict = admission::admit(pod, others, &facts);
    let holds = |uid: &PodUid| context.workers.if_counted_by_admission(uid).is_some();
    let pinning = &context.pinning;
    verdict.decision == AdmissionDecision::Admitted && pinning.fits(pod, holds)
}

/// The decision about a pod that was admitted, is to run, and of which the records know no start and the
/// runtime no container.
fn admitted_and_unstarted<'a>(
    context: &LoopContext,
    state: &'a State,
    pod: &Pod,
) -> Option<&'a AdmissionRecord> {
    let uid = pod.uid();
    let admission = state.record::<AdmissionRecord>(uid.as_str())?;
    let worker = state.record::<WorkerRecord>(uid.as_str())?;
    let started = all_containers(pod).any(|container| {
        state
            .record::<ContainerRecord>(&child_key(&uid, container))
            .is_some_and(|r| r.intent.is_some() || r.last_exit.is_some())
    });
    let shown = context.pleg.cache().known(&uid);
    (admission.decision == AdmissionDecision::Admitted
        && worker.phase == WorkerPhase::Sync
        && !started
        && shown.is_some_and(|shown| shown.containers.is_empty()))
    .then_some(admission)
}

fn all_containers(pod: &Pod) -> impl Iterator<Item = &str> {
    let init = pod.spec_ref().init_containers.iter().flatten();
    init.chain(pod.containers()).map(|c| c.name.as_str())
}

/// Passes on a pod as the API server has it.
fn observe(context: &LoopContext, pod: &Arc<Pod>) {
    if !pod.is_static() {
        (context.observed)(Observed::Current(Arc::clone(pod)));
    }
}

/// Pods whose desired state changed; deletions come here too, a graceful deletion is an update.
pub(super) fn updates(context: &LoopContext, pods: Vec<Arc<Pod>>) {
    for pod in pods {
        if let Some(before) = context.pods.get(&pod.uid()) {
            resizes::count_requested(&context.metrics, &before, &pod);
        }
        context.pods.update(Arc::clone(&pod));
        observe(context, &pod);
        if pod.is_mirror() {
            mirror_changed(context, &pod);
            continue;
        }
        let mut options = UpdateOptions::new(Arc::clone(&pod), PodSyncType::Update);
        options.origin = context.origins.get(&pod.uid());
        context.workers.update(options);
        resizes::consider(context, &pod, resizes::POD_UPDATED);
    }
}

/// Pods that are gone from their source.
pub(super) fn removes(context: &LoopContext, pods: Vec<Arc<Pod>>) {
    for pod in pods {
        context.pods.remove(&pod);
        if !pod.is_static() {
            (context.observed)(Observed::Gone(Arc::clone(&pod)));
        }
        if pod.is_mirror() {
            mirror_changed(context, &pod);
            continue;
        }
        info!(pod = %pod.uid(), name = pod.name(), "pod removed from its source");
        context
            .workers
            .update(UpdateOptions::new(pod, PodSyncType::Kill));
    }
}

/// Handles pods whose status alone differs from the last one of the source. The status manager gets it and writes its
/// own again where it has to; a worker gets it only if it decides on it: readiness gates, and a phase that another
/// component ended. Upstream: `HandlePodReconcile`.
pub(super) fn reconcile(context: &LoopContext, pods: Vec<Arc<Pod>>) {
    for pod in pods {
        let known = context.pods.get(&pod.uid());
        context.pods.update(Arc::clone(&pod));
        observe(context, &pod);
        if pod.is_mirror() {
            continue;
        }
        let gates = pod.spec_ref().readiness_gates.as_ref();
        let has_claims = known.is_some_and(|known| claims::made_differ(&known, &pod));
        let sync_type = if gates.is_some_and(|gates| !gates.is_empty()) || has_claims {
            // The conditions its gates look at, and the names of the claims made for it, are in the pod.
            PodSyncType::Update
        } else if pod.phase_is_terminal() {
            PodSyncType::Sync
        } else {
            continue;
        };
        if context.workers.knows(&pod.uid()) {
            context.workers.update(UpdateOptions::new(pod, sync_type));
        }
    }
}

/// Pods whose time has come.
pub(super) fn due(context: &LoopContext) {
    let queue = &context.queue;
    for uid in queue.take_due(context.clock.now()) {
        context.workers.sync(&uid);
    }
}

fn mirror_changed(context: &LoopContext, mirror: &Pod) {
    if let Some(pod) = context.pods.pod_of_mirror(mirror) {
        context.workers.sync(&pod.uid());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_reasons_of_devices_keep_a_refused_pod_from_another_decision() {
        let pod = |limits: serde_json::Value| -> Pod {
            let container = json!({"name": "c", "resources": {"limits": limits}});
            serde_json::from_value(json!({"metadata": {}, "spec": {"containers": [container]}}))
                .unwrap()
        };
        let with_device = pod(json!({"example.com/gpu": "1"}));
        for (reason, depends) in [
            ("UnexpectedAdmissionError", true),
            ("TopologyAffinityError", true),
            ("OutOfexample.com/gpu", false),
            ("NodePorts", false),
            ("Evicted", false),
        ] {
            assert_eq!(
                depends_on_devices(&with_device, reason),
                depends,
                "{reason}"
            );
            assert!(
                !depends_on_devices(&pod(json!({"cpu": "1"})), reason),
                "{reason}"
            );
        }
    }
}

//! Handlers of the loop: what each kind of update means for pod manager and workers. Upstream:
//! `HandlePodAdditions`, `HandlePodUpdates`, `HandlePodRemoves`, `HandlePodReconcile`, `HandlePodSyncs`.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tracing::{info, warn};

use super::LoopContext;
use crate::core::admission::{self, AdmissionContext};
use crate::core::state::{AdmissionDecision, AdmissionRecord};
use crate::core::supported;
use crate::pod_workers::UpdateOptions;
use crate::types::metrics::ReasonLabel;
use crate::types::{Event, EventType, PodExt, PodSyncType};

/// New pods, oldest first.
pub(super) fn additions(context: &LoopContext, mut pods: Vec<Arc<Pod>>) {
    pods.sort_by_key(|p| {
        p.metadata
            .creation_timestamp
            .as_ref()
            .map(|t| t.0.as_millisecond())
    });
    for pod in pods {
        context.pods.update(Arc::clone(&pod));
        if pod.is_mirror() {
            mirror_changed(context, &pod);
            continue;
        }
        add(context, pod);
    }
}

/// Admits a pod at first sight and hands it to its worker. A decision of an earlier life stands.
pub(super) fn add(context: &LoopContext, pod: Arc<Pod>) {
    let uid = pod.uid();
    let known = context
        .store
        .snapshot()
        .record::<AdmissionRecord>(uid.as_str())
        .cloned();
    let admission = match known {
        Some(record) => record,
        None => decide(context, &pod),
    };
    let mut options = UpdateOptions::new(pod, PodSyncType::Create);
    options.admission = Some(admission);
    options.origin = context.origins.get(&uid);
    context.workers.update(options);
}

fn decide(context: &LoopContext, pod: &Pod) -> AdmissionRecord {
    let uid = pod.uid();
    let others: Vec<Arc<Pod>> = context
        .workers
        .active()
        .into_iter()
        .filter(|other| other.uid() != uid)
        .collect();
    let others: Vec<&Pod> = others.iter().map(|p| &**p).collect();
    let refusals: Vec<String> = supported::refused(pod)
        .iter()
        .map(ToString::to_string)
        .collect();
    let decision = admission::admit(
        pod,
        &others,
        &AdmissionContext {
            node_name: &context.node_name,
            max_pods: context.max_pods,
            refusals: &refusals,
        },
    );
    match &decision {
        AdmissionDecision::Admitted => info!(pod = %uid, name = pod.name(), "pod admitted"),
        AdmissionDecision::Rejected { reason, message } => {
            warn!(pod = %uid, name = pod.name(), reason, message, "pod rejected");
            let label = ReasonLabel {
                reason: reason.clone(),
            };
            context
                .metrics
                .admission_rejections
                .get_or_create(&label)
                .inc();
            context
                .recorder
                .record(Event::pod(EventType::Warning, pod, reason, message.clone()));
        }
    }
    AdmissionRecord {
        decision,
        allocated: admission::allocated(pod),
        at: context.clock.now(),
    }
}

/// Pods whose desired state changed; deletions come here too, a graceful deletion is an update.
pub(super) fn updates(context: &LoopContext, pods: Vec<Arc<Pod>>) {
    for pod in pods {
        context.pods.update(Arc::clone(&pod));
        if pod.is_mirror() {
            mirror_changed(context, &pod);
            continue;
        }
        let mut options = UpdateOptions::new(Arc::clone(&pod), PodSyncType::Update);
        options.origin = context.origins.get(&pod.uid());
        context.workers.update(options);
    }
}

/// Pods that are gone from their source.
pub(super) fn removes(context: &LoopContext, pods: Vec<Arc<Pod>>) {
    for pod in pods {
        context.pods.remove(&pod);
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

/// Pods whose status alone differs from what the source last said.
pub(super) fn reconcile(context: &LoopContext, pods: Vec<Arc<Pod>>) {
    for pod in pods {
        context.pods.update(Arc::clone(&pod));
        if pod.is_mirror() {
            mirror_changed(context, &pod);
        } else {
            context.workers.sync(&pod.uid());
        }
    }
}

/// Pods whose time has come.
pub(super) fn due(context: &LoopContext) {
    let queue = &context.workers.context().queue;
    for uid in queue.take_due(context.clock.now()) {
        context.workers.sync(&uid);
    }
}

fn mirror_changed(context: &LoopContext, mirror: &Pod) {
    if let Some(pod) = context.pods.pod_of_mirror(mirror) {
        context.workers.sync(&pod.uid());
    }
}

//! Allocation of the resources that pods want since they were admitted. Upstream: the allocation manager.
//!
//! The loop makes the decisions, one at a time; each is stored before the worker acts on it. A resize that finds no
//! room is retried with every clean-up.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tracing::{debug, info};

use super::{LoopContext, handlers};
use crate::core::resize::{
    self, Cause, DEFERRED, Decision, INFEASIBLE, PendingRecord, ResizeRecord, pending_key,
    resize_key, turn_key,
};
use crate::core::state::{AdmissionDecision, AdmissionRecord, State, Transaction};
use crate::types::metrics::{
    Metrics, ResizeCauseLabel, ResizeLabel, ResizeReasonLabel, RetryTriggerLabel,
};
use crate::types::{Event, EventType, PodExt};

/// Occasions of decisions, as `kubelet_pod_deferred_accepted_resizes_total` names them.
pub(super) const POD_UPDATED: &str = "pod_updated";
pub(super) const PERIODIC: &str = "periodic_retry";

/// Returns a pod with the resources that are allocated to it.
pub(super) fn as_allocated(state: &State, pod: Arc<Pod>) -> Arc<Pod> {
    let record = state.record::<AdmissionRecord>(pod.uid().as_str());
    let changed = record.and_then(|record| {
        resize::with_allocation(&pod, &resize::allocated(&pod, &record.allocated))
    });
    changed.map_or(pod, Arc::new)
}

/// Counts what a new version of a pod wants changed.
pub(super) fn count_requested(metrics: &Metrics, before: &Pod, after: &Pod) {
    for (resource, requirement, operation) in resize::requested_changes(before, after) {
        let label = ResizeLabel {
            resource: resource.to_owned(),
            requirement: requirement.to_owned(),
            operation: operation.to_owned(),
        };
        metrics
            .container_requested_resizes
            .get_or_create(&label)
            .inc();
    }
}

/// Sets the numbers of resizes that wait and that are being put in force.
pub(super) fn measure(context: &LoopContext, pods: &[Arc<Pod>]) {
    let state = context.store.snapshot();
    let (mut deferred, mut infeasible, mut started) = (0, 0, 0);
    for pod in pods {
        match PendingRecord::of(&state, pod) {
            Some(pending) if pending.reason == DEFERRED => deferred += 1,
            Some(_) => infeasible += 1,
            None => {}
        }
        started += i64::from(ResizeRecord::of(&state, pod).is_some_and(|r| r.started));
    }
    let metrics = &context.metrics;
    for (reason, count) in [("deferred", deferred), ("infeasible", infeasible)] {
        let label = ResizeReasonLabel {
            reason: reason.to_owned(),
        };
        metrics.pod_pending_resizes.get_or_create(&label).set(count);
    }
    metrics.pod_in_progress_resizes.set(started);
}

/// Counts a decision that is recorded.
fn count(metrics: &Metrics, infeasible: Option<Cause>, accepted: Option<&str>) {
    if let Some(cause) = infeasible {
        let label = ResizeCauseLabel {
            reason_detail: cause.label().to_owned(),
        };
        metrics.pod_infeasible_resizes.get_or_create(&label).inc();
    }
    if let Some(trigger) = accepted {
        let label = RetryTriggerLabel {
            retry_trigger: trigger.to_owned(),
        };
        metrics
            .pod_deferred_accepted_resizes
            .get_or_create(&label)
            .inc();
    }
}

/// Decides about one pod, if it wants anything else than it has.
pub(super) fn consider(context: &LoopContext, pod: &Arc<Pod>, trigger: &'static str) {
    let uid = pod.uid();
    let state = context.store.snapshot();
    let Some(record) = state.record::<AdmissionRecord>(uid.as_str()) else {
        return;
    };
    if record.decision != AdmissionDecision::Admitted
        || pod.is_deleting()
        || pod.phase_is_terminal()
        || pod.is_mirror()
    {
        return;
    }
    if !resize::is_complete(&record.allocated) {
        return complete(context, &state, pod, record);
    }
    let pending = PendingRecord::of(&state, pod);
    if pending.is_none() && !resize::is_wanted(pod, &record.allocated) {
        return;
    }
    let active = context.workers.counted_by_admission();
    let others = active.into_iter().filter(|p| p.uid() != uid);
    let others: Vec<Arc<Pod>> = others.map(|p| as_allocated(&state, p)).collect();
    let others: Vec<&Pod> = others.iter().map(|p| &**p).collect();
    let node = handlers::node(context);
    let transaction = Transaction::new().expect::<AdmissionRecord>(&state, uid.as_str());
    let now = context.clock.now();
    let settings = context.pinning.settings();
    let (cpus, memory) = (settings.cpus.is_some(), settings.memory.is_some());
    let decision = match resize::of_pinned(pod, &record.allocated, cpus, memory) {
        Some((cause, message)) => Decision::Infeasible(cause, message),
        None => resize::decide(pod, &record.allocated, &others, &node),
    };
    let was_deferred = pending.as_ref().is_some_and(|p| p.reason == DEFERRED);
    let (mut infeasible, mut accepted) = (None, None);
    let (transaction, event) = match decision {
        Decision::Unchanged => (transaction.delete_object(&pending_key(pod)), None),
        Decision::Allocate(allocated) => {
            info!(pod = %uid, name = pod.name(), "resize allocated");
            accepted = was_deferred.then_some(trigger);
            let mut transaction = transaction
                .expect_object(&state, &turn_key())
                .put_object(&turn_key(), &ResizeRecord::default(), now)
                .delete_object(&pending_key(pod))
                .journal(Some(&uid), "resize allocated", "the node has room for it");
            let known = ResizeRecord::of(&state, pod);
            let before = resize::before(pod, &record.allocated);
            let former = resize::with_allocation(pod, &resize::allocated(pod, &record.allocated));
            let told = known.clone().unwrap_or_default().and_before(before);
            let told = told.and_unconfirmed(former.as_ref().unwrap_or(pod));
            if known.as_ref() != Some(&told) {
                let key = resize_key(pod);
                transaction = transaction
                    .expect_object(&state, &key)
                    .put_object(&key, &told, now);
            }
            let record = AdmissionRecord {
                allocated,
                ..record.clone()
            };
            (transaction.put(uid.as_str(), record), None)
        }
        Decision::Deferred(message) => match delay(context, pod, DEFERRED, message, &pending) {
            None => return,
            Some((more, event)) => (transaction.and(more), Some(event)),
        },
        Decision::Infeasible(cause, message) => {
            infeasible = Some(cause);
            match delay(context, pod, INFEASIBLE, message, &pending) {
                None => return,
                Some((more, event)) => (transaction.and(more), Some(event)),
            }
        }
    };
    let submitted = context.store.submit(transaction);
    let workers = context.workers.clone();
    let recorder = Arc::clone(&context.recorder);
    let metrics = context.metrics.clone();
    tokio::spawn(async move {
        match submitted.wait().await {
            Ok(_) => {
                count(&metrics, infeasible, accepted);
                if let Some(event) = event {
                    recorder.record(event);
                }
                workers.sync(&uid);
            }
            Err(error) => debug!(pod = %uid, %error, "cannot record the resize, deciding it again"),
        }
    });
}

/// Records what a pod as a whole has, which admissions of earlier versions do not. Until then nothing else is decided.
fn complete(context: &LoopContext, state: &State, pod: &Pod, record: &AdmissionRecord) {
    let uid = pod.uid();
    let whole = resize::allocation_of_pod(pod);
    let mut record = record.clone();
    record.allocated.insert(resize::POD.to_owned(), whole);
    let transaction = Transaction::new()
        .expect::<AdmissionRecord>(state, uid.as_str())
        .put(uid.as_str(), record);
    // A refusal means that it is decided again; a degraded store reports itself.
    drop(context.store.submit(transaction));
}

/// Returns the record and event of a resize that is not allocated; `None` if both exist already.
fn delay(
    context: &LoopContext,
    pod: &Pod,
    reason: &str,
    message: String,
    known: &Option<PendingRecord>,
) -> Option<(Transaction, Event)> {
    let record = PendingRecord {
        reason: reason.to_owned(),
        message,
    };
    if known.as_ref() == Some(&record) {
        return None;
    }
    let why = format!("{reason}: {}", record.message);
    let event_reason = format!("Resize{reason}");
    let text = format!("Pod resize {why}");
    let event = Event::pod(EventType::Warning, pod, &event_reason, text);
    let transaction = Transaction::new()
        .put_object(&pending_key(pod), &record, context.clock.now())
        .journal(Some(&pod.uid()), "resize pending", why);
    Some((transaction, event))
}

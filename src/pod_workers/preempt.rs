//! Ending the pods that make room for a critical one: the events of the victims, and the wake-up of their workers.
//!
//! `core::pod_worker::before_step` records their ends with the critical pod's admission.

use std::collections::HashMap;
use std::sync::MutexGuard;

use tracing::info;

use super::{Handle, Job, PodWorkers, WorkerContext};
use crate::core::pod_status::PREEMPTING;
use crate::core::pod_worker::PREEMPTED;
use crate::core::state::State;
use crate::types::metrics::PreemptionLabel;
use crate::types::{Event, EventType, PodExt, PodUid};

/// Notes at the victims of `job` what they end for, and returns all workers.
pub(super) fn mark<'a>(
    workers: &'a PodWorkers,
    job: &Job,
) -> MutexGuard<'a, HashMap<PodUid, Handle>> {
    let mut handles = workers.handles();
    if let Some(preemption) = &job.preemption {
        for uid in &preemption.victims {
            if let Some(handle) = handles.get_mut(uid) {
                handle.worker.preempted_for = Some(preemption.lacking.clone());
            }
        }
    }
    handles
}

/// Has the victims of `job` stopped, once they are recorded with the admission of its pod. Does not wait for them, as
/// upstream's `evictPodsToFreeRequests` does.
pub(super) fn carry_out(workers: &PodWorkers, job: &Job) {
    let Some(preemption) = &job.preemption else {
        return;
    };
    let context = workers.context();
    let state = context.store.snapshot();
    let mut handles = workers.handles();
    for uid in &preemption.victims {
        if let Some(handle) = handles.get_mut(uid)
            && handle.adopt_recorded_end(context, &state)
        {
            handle.cancel.cancel();
            handle.worker.pending = true;
            handle.notify.notify_one();
        }
    }
    if let Some(handle) = handles.get_mut(&job.uid) {
        handle.worker.preemption = None;
    }
}

impl Handle {
    /// Takes over the end of a pod that a critical one has preempted, and emits it. Returns whether it did.
    pub(super) fn adopt_recorded_end(&mut self, context: &WorkerContext, state: &State) -> bool {
        let Some(preemption_signal) = self.worker.adopt_recorded_end(state) else {
            return false;
        };
        info!(pod = %self.uid, name = self.pod.name(), lacking = preemption_signal, "preempting pod");
        let label = PreemptionLabel { preemption_signal };
        context.metrics.preemptions.get_or_create(&label).inc();
        let event = Event::pod(EventType::Warning, &self.pod, PREEMPTING, PREEMPTED);
        context.recorder.record(event);
        true
    }
}

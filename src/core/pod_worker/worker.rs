//! State of a pod that has a worker, and its changes by updates, the store and its own steps.
//!
//! `pod_workers` keeps one [`Worker`] per pod beside the task that drives it. A step works on a copy of it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::{KillRequest, WorkerUpdate, commit, complete_sync, complete_terminated};
use super::{complete_terminating, update};
use crate::core::admission::Preemption;
use crate::core::state::{AdmissionDecision, AdmissionRecord, State, WorkerPhase, WorkerRecord};
use crate::types::runtime::PodStatus;
use crate::types::{PodExt, PodSource, PodSyncType, PodUid, Stamp};

/// An update for a worker; upstream's `UpdatePodOptions`.
#[derive(Clone, Debug)]
pub struct UpdateOptions {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Why.
    pub sync_type: PodSyncType,
    /// Set for evictions and the like.
    pub kill: Option<KillRequest>,
    /// The pod is known from the runtime only.
    pub runtime_only: bool,
    /// The admission decision, for pods seen first.
    pub admission: Option<AdmissionRecord>,
    /// The pods that end with that decision.
    pub preemption: Option<Preemption>,
    /// Path or URL that the pod's source has it from.
    pub origin: Option<String>,
}

impl UpdateOptions {
    /// An update with nothing special about it.
    pub fn new(pod: Arc<Pod>, sync_type: PodSyncType) -> Self {
        Self {
            pod,
            sync_type,
            kill: None,
            runtime_only: false,
            admission: None,
            preemption: None,
            origin: None,
        }
    }
}

/// A pod that has a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    /// The pod's UID.
    pub uid: PodUid,
    /// The worker's record as it should be; the store may have an older one.
    pub record: WorkerRecord,
    /// The pod.
    pub pod: Arc<Pod>,
    /// The admission decision, for pods seen first.
    pub admission: Option<AdmissionRecord>,
    /// Preemption to store with `admission`.
    pub preemption: Option<Preemption>,
    /// Resource that the critical pod lacks that this one was chosen to end for.
    pub preempted_for: Option<String>,
    /// Path or URL that the pod's source has it from.
    pub origin: Option<String>,
    /// The pod's source.
    pub source: PodSource,
    /// The source has confirmed the pod in the current epoch.
    pub confirmed: bool,
    /// Something is to be done.
    pub pending: bool,
    /// To be forgotten with everything that is recorded of it.
    pub forget: bool,
}

impl Worker {
    /// A worker for a pod that has none. `left` is the record that is left of it, `shown` what the runtime shows.
    pub fn first(
        options: UpdateOptions,
        left: Option<&WorkerRecord>,
        shown: Option<&PodStatus>,
        now: Stamp,
    ) -> Self {
        let decision = update(left, &of(&options, shown), now);
        Self {
            uid: options.pod.uid(),
            record: decision.record,
            source: options.pod.source(),
            pod: options.pod,
            admission: options.admission,
            preemption: options.preemption,
            preempted_for: None,
            origin: options.origin,
            confirmed: true,
            pending: true,
            forget: false,
        }
    }

    /// Takes an update. Returns whether a step in flight works on an outdated decision and has to be cancelled.
    pub fn update(
        &mut self,
        options: UpdateOptions,
        shown: Option<&PodStatus>,
        now: Stamp,
    ) -> bool {
        let decision = update(Some(&self.record), &of(&options, shown), now);
        self.record = decision.record;
        if options.sync_type != PodSyncType::Sync && !options.runtime_only {
            self.pod = options.pod;
        }
        if options.admission.is_some() {
            self.preemption = options.preemption;
        }
        self.admission = options.admission.or(self.admission.take());
        self.origin = options.origin.or(self.origin.take());
        self.pending |= decision.wake || decision.changed;
        self.forget_for_next_life();
        decision.cancel
    }

    /// Requests another step. Returns whether there will be one: a finished pod has none, unless it is to be forgotten
    /// and that has not succeeded yet.
    pub fn wake(&mut self) -> bool {
        let looks = self.forget || !matches!(self.record.phase, WorkerPhase::Finished { .. });
        self.pending |= looks;
        looks
    }

    /// Begins a step with what is pending. Returns whether it is the first one of a pod that is to run.
    pub fn begin_step(&mut self, now: Stamp) -> bool {
        self.pending = false;
        let starts =
            self.record.phase == WorkerPhase::Sync && self.record.started.is_none() && !self.forget;
        if starts {
            self.record.started = Some(now);
        }
        starts
    }

    /// Moves the phase on after a complete step, which worked on `job`. A phase that changed meanwhile stays. Returns
    /// whether there is something to do next.
    pub fn advance(&mut self, job: &Self, now: Stamp) -> bool {
        self.record = match &job.record.phase {
            WorkerPhase::Sync => complete_sync(&self.record, &job.pod, now),
            WorkerPhase::Terminating { .. } => complete_terminating(&self.record, now),
            WorkerPhase::Terminated { .. } => complete_terminated(&self.record, now),
            WorkerPhase::Finished { .. } => return false,
        };
        self.pending = true;
        true
    }

    /// Adopts the phase of a pod that a critical one has preempted, as it is recorded with that pod's admission.
    /// Returns what the critical pod lacked, if it did: nothing happens to a pod that is being stopped already.
    pub fn adopt_recorded_end(&mut self, state: &State) -> Option<String> {
        if self.record.phase != WorkerPhase::Sync || self.forget {
            return None;
        }
        self.record.phase = commit::recorded_end(state, &self.uid)?;
        Some(self.preempted_for.take().unwrap_or_default())
    }

    /// Makes the pod be forgotten with all its records. Returns `false` if that was requested before.
    pub fn begin_forgetting(&mut self) -> bool {
        let is_new = !self.forget;
        self.forget = true;
        self.pending |= is_new;
        is_new
    }

    /// Has a static pod forgotten that is finished and whose manifest was removed and is back: a new life of the same UID
    /// begins when nothing is left of the previous one. Returns whether it did.
    pub fn forget_for_next_life(&mut self) -> bool {
        let is_due = self.source.is_static()
            && matches!(self.record.phase, WorkerPhase::Finished { .. })
            && self.record.restart_requested;
        is_due && self.begin_forgetting()
    }

    /// Has a static pod forgotten that admission refused, and that is finished: it is decided on again. Returns whether it
    /// did.
    pub fn forget_refusal(&mut self, state: &State) -> bool {
        let is_due = self.source.is_static()
            && matches!(self.record.phase, WorkerPhase::Finished { .. })
            && self.is_refused(state);
        is_due && self.begin_forgetting()
    }

    /// Returns whether the worker of a static pod has to wait for others of its name.
    pub fn waits_for_its_name(&self) -> bool {
        self.source.is_static()
            && self.record.phase == WorkerPhase::Sync
            && self.record.started.is_none()
    }

    /// Returns whether admission refused the pod. Uses the record, else the decision that is not committed yet. Without
    /// either, the pod counts as admitted.
    pub fn is_refused(&self, state: &State) -> bool {
        let recorded = state.record::<AdmissionRecord>(self.uid.as_str());
        recorded
            .or(self.admission.as_ref())
            .is_some_and(|record| record.decision != AdmissionDecision::Admitted)
    }

    /// Returns whether the pod is admitted, and that is not stored yet.
    pub fn is_first_admitted(&self, state: &State) -> bool {
        let recorded = state.record::<AdmissionRecord>(self.uid.as_str());
        let decided = self.admission.as_ref();
        recorded.is_none()
            && decided.is_some_and(|record| record.decision == AdmissionDecision::Admitted)
    }

    /// Returns whether the pod holds resources of this node: admitted, and running, to run or being stopped. A pod that was
    /// refused holds none, even while its worker still reports that; nor does one that is over by its source and of which
    /// the runtime `runs_nothing`. Upstream: `GetActivePods`.
    pub fn is_counted_by_admission(
        &self,
        state: &State,
        runs_nothing: impl FnOnce() -> bool,
    ) -> bool {
        let is_active = matches!(
            self.record.phase,
            WorkerPhase::Sync | WorkerPhase::Terminating { .. }
        );
        if !is_active || self.record.runtime_only || self.is_refused(state) {
            return false;
        }
        !(self.pod.phase_is_terminal() && runs_nothing())
    }
}

fn of<'a>(options: &'a UpdateOptions, shown: Option<&'a PodStatus>) -> WorkerUpdate<'a> {
    WorkerUpdate {
        sync_type: options.sync_type,
        pod: &options.pod,
        kill: options.kill.clone(),
        runtime_only: options.runtime_only,
        runtime: shown,
    }
}

//! Records that a worker stores before it acts, and the ends of other pods stored with them. Pure.
//!
//! **Invariant:** the end of a victim and the admission it makes room for are stored together or not at all. A victim's
//! worker takes the end from the record: until then its pod runs as before, also while the store refuses commits.
//!
//! **Invariant:** an admission is stored only with every end that it counts on. Admission counts by the state in
//! memory, where a pod may have been evicted or removed whose record still wants it to run: after a crash it would run
//! again beside the one that took its place.

use super::record::unrecorded;
use super::{KillRequest, Worker, WorkerUpdate, update};
use crate::core::pod_status::PREEMPTING;
use crate::core::state::{
    PodRecord, State, TerminationCause, Transaction, WorkerPhase, WorkerRecord,
};
use crate::types::{PodSyncType, PodUid, Stamp};

/// Message of a pod that makes room for a critical one.
pub const PREEMPTED: &str = "Preempted in order to admit critical pod";

/// Record to commit before a step.
#[derive(Clone, Debug, PartialEq)]
pub enum StepRecord {
    /// The pod is to run: pod, admission and phase as far as they are not stored, and the ends of the pods that it
    /// preempts. The step begins when this is durable.
    Keep(Transaction),
    /// The pod is to stop or has stopped. Empty when that is stored.
    Stop(Transaction),
    /// The pod is to run by its worker, but the admission of another pod has recorded its end: the worker decides
    /// again.
    Ended,
}

/// Returns the record that has to be stored before a step that works on `job`. `others` are the workers of all pods;
/// they are needed only if [`Worker::is_first_admitted`].
pub fn before_step<'a>(
    job: &Worker,
    state: &State,
    epoch: u64,
    now: Stamp,
    others: impl IntoIterator<Item = &'a Worker>,
) -> StepRecord {
    let mut transaction = unrecorded(job, state, epoch, now);
    if job.record.phase != WorkerPhase::Sync {
        return StepRecord::Stop(transaction);
    }
    let recorded = state.record::<WorkerRecord>(job.uid.as_str());
    if recorded.is_some_and(|old| old.phase != WorkerPhase::Sync && !old.runtime_only) {
        return StepRecord::Ended;
    }
    if transaction.is_empty() {
        return StepRecord::Keep(transaction);
    }
    transaction = transaction.expect::<WorkerRecord>(state, job.uid.as_str());
    if job.is_first_admitted(state) {
        let ends = others
            .into_iter()
            .filter_map(|other| end_of(other, job, state, now));
        for ended in ends {
            let uid = ended.uid.as_str();
            transaction = transaction
                .and(unrecorded(&ended, state, epoch, now))
                // Its worker may have come further, and a phase never goes back.
                .expect::<PodRecord>(state, uid)
                .expect::<WorkerRecord>(state, uid);
        }
    }
    StepRecord::Keep(transaction)
}

/// Returns a pod as it has to be recorded with the admission of `job`: a victim that runs ends for it, and one that has
/// ended for another reason may have been counted as gone. Returns `None` for a pod that continues, or whose end is
/// recorded.
fn end_of(other: &Worker, job: &Worker, state: &State, now: Stamp) -> Option<Worker> {
    if other.uid == job.uid || other.forget || other.record.runtime_only {
        return None;
    }
    let recorded = state.record::<WorkerRecord>(other.uid.as_str());
    if recorded.is_some_and(|recorded| recorded.phase != WorkerPhase::Sync) {
        return None;
    }
    let mut ended = other.clone();
    if other.record.phase == WorkerPhase::Sync {
        let preemption = job.preemption.as_ref()?;
        let is_victim = preemption.victims.contains(&other.uid);
        ended.record = is_victim.then(|| preempted(other, now))?;
    }
    // A pod without a record counts as well: that it is to run may be on its way there.
    Some(ended)
}

/// Returns the phase that ends a pod, if a critical pod's admission has recorded it.
pub(super) fn recorded_end(state: &State, uid: &PodUid) -> Option<WorkerPhase> {
    let phase = &state.record::<WorkerRecord>(uid.as_str())?.phase;
    let is_preempted = matches!(
        phase,
        WorkerPhase::Terminating { cause: TerminationCause::Evicted { reason, .. }, .. } if reason == PREEMPTING
    );
    is_preempted.then(|| phase.clone())
}

fn preempted(victim: &Worker, now: Stamp) -> WorkerRecord {
    let kill = KillRequest {
        cause: TerminationCause::Evicted {
            reason: PREEMPTING.to_owned(),
            message: PREEMPTED.to_owned(),
        },
        grace_override: None,
    };
    let kill = WorkerUpdate {
        sync_type: PodSyncType::Kill,
        pod: &victim.pod,
        kill: Some(kill),
        runtime_only: false,
        runtime: None,
    };
    update(Some(&victim.record), &kill, now).record
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::core::admission::Preemption;
    use crate::core::state::{AdmissionDecision, AdmissionRecord};
    use crate::core::testkit::{at, pod};
    use crate::types::PodSource;

    fn worker(uid: &str) -> Worker {
        let mut pod = pod("Always", &["a"]);
        pod.metadata.uid = Some(uid.to_owned());
        Worker {
            uid: PodUid::new(uid),
            record: WorkerRecord {
                full_name: format!("{uid}_ns"),
                queued: at(1),
                started: Some(at(1)),
                phase: WorkerPhase::Sync,
                deleted: false,
                restart_requested: false,
                runtime_only: false,
            },
            pod: Arc::new(pod),
            admission: Some(AdmissionRecord {
                decision: AdmissionDecision::Admitted,
                allocated: Default::default(),
                at: at(1),
            }),
            preemption: None,
            preempted_for: None,
            origin: None,
            source: PodSource::Api,
            confirmed: true,
            pending: false,
            forget: false,
        }
    }

    fn evicted(uid: &str) -> Worker {
        let mut worker = worker(uid);
        worker.record.phase = WorkerPhase::Terminated {
            since: at(2),
            cause: TerminationCause::Evicted {
                reason: "Evicted".to_owned(),
                message: "too large".to_owned(),
            },
        };
        worker
    }

    /// The transaction before a step of a pod that is to run.
    fn kept(job: &Worker, state: &State, others: &[&Worker]) -> Transaction {
        match before_step(job, state, 1, at(2), others.iter().copied()) {
            StepRecord::Keep(transaction) => transaction,
            other => panic!("{other:?}"),
        }
    }

    fn applied(state: &State, version: u64, transaction: &Transaction) -> State {
        let mut next = state.clone();
        for mutation in &transaction.mutations {
            next.apply(mutation, version);
        }
        next
    }

    fn phase(state: &State, uid: &str) -> Option<WorkerPhase> {
        let record = state.record::<WorkerRecord>(uid)?;
        Some(record.phase.clone())
    }

    #[test]
    fn an_admission_comes_with_the_ends_that_it_counts_on() {
        let empty = State::default();
        let running = applied(&empty, 1, &kept(&worker("gone"), &empty, &[]));
        let (gone, stays) = (evicted("gone"), worker("stays"));
        let admission = kept(&worker("new"), &running, &[&gone, &stays]);
        let admitted = applied(&running, 2, &admission);
        assert_eq!(phase(&admitted, "new"), Some(WorkerPhase::Sync));
        assert_eq!(phase(&admitted, "gone"), Some(gone.record.phase.clone()));
        assert_eq!(phase(&admitted, "stays"), None);
        // A step that was taken before.
        let late = before_step(&worker("gone"), &admitted, 1, at(2), []);
        assert_eq!(late, StepRecord::Ended);

        // That the pod is to run gets on record in between.
        let admission = kept(&worker("new"), &empty, &[&gone]);
        assert!(admission.stale_on(&running).is_some());

        let mut refused = worker("new");
        refused.admission.as_mut().unwrap().decision = AdmissionDecision::Rejected {
            reason: "OutOfcpu".to_owned(),
            message: String::new(),
        };
        let refusal = applied(&running, 2, &kept(&refused, &running, &[&gone]));
        assert_eq!(phase(&refusal, "gone"), Some(WorkerPhase::Sync));
    }

    #[test]
    fn a_victim_ends_with_the_admission_it_makes_room_for_and_for_no_other() {
        let empty = State::default();
        let victim = worker("victim");
        let running = applied(&empty, 1, &kept(&victim, &empty, &[]));
        let mut critical = worker("critical");
        critical.preemption = Some(Preemption {
            victims: vec![victim.uid.clone()],
            lacking: "cpu".to_owned(),
        });
        let both = applied(&running, 2, &kept(&critical, &running, &[&victim]));
        assert_eq!(
            recorded_end(&both, &victim.uid),
            phase(&both, "victim"),
            "{both:?}"
        );
        let step = before_step(&victim, &both, 1, at(2), []);
        assert_eq!(step, StepRecord::Ended);

        // A pod that has ended by itself ends as it did.
        let gone = evicted("victim");
        let both = applied(&running, 2, &kept(&critical, &running, &[&gone]));
        assert_eq!(phase(&both, "victim"), Some(gone.record.phase));
    }
}

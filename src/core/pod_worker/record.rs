//! Records of a pod that are stored before its worker acts, and their journal entries. Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Container;

use super::Worker;
use crate::core::deadline;
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, ContainerRecord, CpusRecord, CpusetRecord, MemoryRecord,
    PlegRecord, PodRecord, ProbeRecord, QueueRecord, State, StatusRecord, TerminationCause,
    Transaction, WorkerPhase, WorkerRecord, child_key,
};
use crate::types::pod::RestartPolicy;
use crate::types::{Json, PodExt as _, PodUid, Stamp};

/// The pod, its admission and its phase, as far as `state` does not have them yet. A pod that is finished is not
/// due any more.
pub(super) fn unrecorded(job: &Worker, state: &State, epoch: u64, now: Stamp) -> Transaction {
    let uid = &job.uid;
    let mut transaction = Transaction::new();
    if !job.record.runtime_only {
        let old = state.record::<PodRecord>(uid.as_str());
        let confirmed_epoch = if job.confirmed {
            epoch
        } else {
            old.map_or(0, |r| r.confirmed_epoch)
        };
        let origin = job
            .origin
            .clone()
            .or_else(|| old.map(|r| r.origin.clone()))
            .unwrap_or_default();
        let same = old.is_some_and(|r| {
            (Arc::ptr_eq(&r.pod.0, &job.pod) || *r.pod == *job.pod)
                && r.origin == origin
                && r.confirmed_epoch == confirmed_epoch
        });
        if !same {
            // A durable change without a line in the journal could be lost with the end of the log unnoticed.
            if let Some(old) = old {
                let (what, why) = if old.confirmed_epoch == confirmed_epoch {
                    ("updated", format!("its {} source changed it", job.source))
                } else {
                    ("confirmed", format!("its source names it in epoch {epoch}"))
                };
                transaction = transaction.journal(Some(uid), what, why);
            }
            transaction = transaction.put(
                uid.as_str(),
                PodRecord {
                    source: job.source,
                    origin,
                    pod: Json(Arc::clone(&job.pod)),
                    first_seen: old.map_or(now, |r| r.first_seen),
                    confirmed_epoch,
                },
            );
        }
        if let Some(admission) = &job.admission
            && state.record::<AdmissionRecord>(uid.as_str()).is_none()
        {
            let (what, why) = match &admission.decision {
                AdmissionDecision::Admitted => ("admitted", "first sight".to_owned()),
                AdmissionDecision::Rejected { reason, message } => {
                    ("rejected", format!("{reason}: {message}"))
                }
            };
            transaction =
                transaction
                    .put(uid.as_str(), admission.clone())
                    .journal(Some(uid), what, why);
        }
    }
    let old = state.record::<WorkerRecord>(uid.as_str());
    if old != Some(&job.record) {
        let phase_changed = old.is_none_or(|o| {
            std::mem::discriminant(&o.phase) != std::mem::discriminant(&job.record.phase)
        });
        transaction = transaction.put(uid.as_str(), job.record.clone());
        if phase_changed {
            let admission = state.record::<AdmissionRecord>(uid.as_str());
            let admission = admission.or(job.admission.as_ref());
            let told = state.record::<StatusRecord>(uid.as_str());
            let over_time =
                told.is_some_and(|t| t.status.reason.as_deref() == Some(deadline::REASON));
            transaction = transaction.journal(
                Some(uid),
                format!("worker {}", phase_name(&job.record.phase)),
                phase_reason(&job.record, admission.map(|a| &a.decision), over_time),
            );
            if matches!(job.record.phase, WorkerPhase::Finished { .. }) {
                // The snapshot may not have a due time yet that was queued a moment ago.
                transaction = transaction.delete::<QueueRecord>(uid.as_str());
            }
        }
    }
    transaction
}

/// Deletes the records of a pod: the pod, its admission and its phase, containers, probes and statuses.
pub fn forget(state: &State, pod: &PodUid) -> Transaction {
    let uid = pod.as_str();
    let mut transaction = Transaction::new()
        .delete::<PodRecord>(uid)
        .delete::<AdmissionRecord>(uid)
        .delete::<WorkerRecord>(uid)
        .delete::<QueueRecord>(uid)
        .delete::<PlegRecord>(uid)
        .delete::<StatusRecord>(uid);
    let prefix = child_key(pod, "");
    for (key, _) in state.with_prefix::<ContainerRecord>(&prefix) {
        transaction = transaction.delete::<ContainerRecord>(key);
    }
    for (key, _) in state.with_prefix::<ProbeRecord>(&prefix) {
        transaction = transaction.delete::<ProbeRecord>(key);
    }
    transaction.and(freed(state, pod))
}

/// Frees the CPUs and memory that the containers of a pod have for themselves, as far as they are recorded.
pub fn freed(state: &State, pod: &PodUid) -> Transaction {
    let uid = pod.as_str();
    let mut transaction = Transaction::new();
    if state.record::<CpusRecord>(uid).is_some() {
        transaction = transaction.delete::<CpusRecord>(uid);
    }
    if state.record::<MemoryRecord>(uid).is_some() {
        transaction = transaction.delete::<MemoryRecord>(uid);
    }
    for (key, _) in state.with_prefix::<CpusetRecord>(&child_key(pod, "")) {
        transaction = transaction.delete::<CpusetRecord>(key);
    }
    transaction
}

/// Keeps the restart counts and last ends of the main containers of a static pod that is forgotten because its manifest was
/// removed and is back, with a policy of Always. To be committed after [`forget`]. Upstream finds this in the containers
/// that the runtime still has.
pub fn next_life(job: &Worker, state: &State) -> Transaction {
    let pod = &job.pod;
    let goes_on = job.record.restart_requested
        && pod.is_static()
        && pod.restart_policy() == RestartPolicy::Always;
    let always = |c: &&Container| c.restart_policy.as_deref().is_none_or(|p| p == "Always");
    let containers = pod.containers().iter().filter(always);
    let mut transaction = Transaction::new();
    for container in containers.filter(|_| goes_on) {
        let key = child_key(&job.uid, &container.name);
        let record = state.record::<ContainerRecord>(&key);
        if let Some(record) = record.filter(|record| record.last_exit.is_some()) {
            let next = ContainerRecord {
                restart_count: record.restart_count,
                last_exit: record.last_exit.clone(),
                ..ContainerRecord::new()
            };
            transaction = transaction.put(key, next);
        }
    }
    transaction
}

fn phase_name(phase: &WorkerPhase) -> &'static str {
    match phase {
        WorkerPhase::Sync => "sync",
        WorkerPhase::Terminating { .. } => "terminating",
        WorkerPhase::Terminated { .. } => "terminated",
        WorkerPhase::Finished { .. } => "finished",
    }
}

fn phase_reason(
    record: &WorkerRecord,
    admission: Option<&AdmissionDecision>,
    over_time: bool,
) -> String {
    use TerminationCause as Cause;
    let rejected = matches!(admission, Some(AdmissionDecision::Rejected { .. }));
    let (cause, grace) = match &record.phase {
        WorkerPhase::Sync if rejected => return "to report that it is rejected".to_owned(),
        WorkerPhase::Sync => return "wanted by its source".to_owned(),
        WorkerPhase::Terminating {
            cause,
            grace_seconds,
            ..
        } => (cause, Some(*grace_seconds)),
        WorkerPhase::Terminated { cause, .. } | WorkerPhase::Finished { cause, .. } => {
            (cause, None)
        }
    };
    let cause = match cause {
        Cause::Deleted if record.deleted => "gone from its source".to_owned(),
        Cause::Deleted => "deleted".to_owned(),
        Cause::Completed if rejected => return "rejected at admission".to_owned(),
        Cause::Completed if over_time => "its activeDeadlineSeconds are over".to_owned(),
        Cause::Completed => "its containers are finished".to_owned(),
        Cause::Evicted { reason, message } => format!("{reason}: {message}"),
        Cause::Orphan => "no source wants it".to_owned(),
    };
    match grace {
        Some(grace) => format!("{cause}; grace {grace} s"),
        None => cause,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::core::container_history::History;
    use crate::core::state::Mutation;
    use crate::core::{pod_worker, testkit};
    use crate::types::{BootId, PodSource};

    const NOW: Stamp = Stamp {
        boot: BootId(1),
        boottime_ms: 1_000,
        wall_ms: 1_000,
    };

    fn job(decision: AdmissionDecision) -> Worker {
        let pod = json!({
            "metadata": {"uid": "u1", "namespace": "default", "name": "web"},
            "spec": {"containers": [{"name": "main", "image": "busybox"}]},
        });
        Worker {
            uid: PodUid::new("u1"),
            record: WorkerRecord {
                full_name: "web_default".to_owned(),
                queued: NOW,
                started: Some(NOW),
                phase: WorkerPhase::Sync,
                deleted: false,
                restart_requested: false,
                runtime_only: false,
            },
            pod: Arc::new(serde_json::from_value(pod).unwrap()),
            admission: Some(AdmissionRecord {
                decision,
                allocated: Default::default(),
                at: NOW,
            }),
            preemption: None,
            preempted_for: None,
            origin: None,
            source: PodSource::File,
            confirmed: true,
            pending: false,
            forget: false,
        }
    }

    /// Returns every journal line from first sight to the end, and the last transaction.
    fn life(mut job: Worker) -> (Vec<String>, Transaction) {
        let mut state = State::default();
        let mut told = Vec::new();
        let mut last = Transaction::new();
        for _ in 0..4 {
            last = unrecorded(&job, &state, 1, NOW);
            for mutation in &last.mutations {
                state.apply(mutation, 1);
            }
            told.extend(
                last.journal
                    .iter()
                    .map(|e| format!("{}: {}", e.what, e.why)),
            );
            let old = &job.record;
            job.record = match &old.phase {
                WorkerPhase::Sync => pod_worker::complete_sync(old, &job.pod, NOW),
                WorkerPhase::Terminating { .. } => pod_worker::complete_terminating(old, NOW),
                _ => pod_worker::complete_terminated(old, NOW),
            };
            // As after a restart of the agent: only the store knows the decision.
            job.admission = None;
        }
        (told, last)
    }

    #[test]
    fn a_static_pod_whose_manifest_is_back_goes_on_counting_its_restarts() {
        let job = |source: &str, (policy, own): (&str, Option<&str>), is_back: bool| {
            let mut job = job(AdmissionDecision::Admitted);
            let mut pod = testkit::pod("Always", &["main", "unstarted"]);
            pod.spec.as_mut().unwrap().containers[0].restart_policy = own.map(str::to_owned);
            pod.spec.as_mut().unwrap().restart_policy = Some(policy.to_owned());
            let of = ("kubernetes.io/config.source".to_owned(), source.to_owned());
            pod.metadata.annotations = Some([of].into());
            (job.uid, job.pod) = (pod.uid(), Arc::new(pod));
            job.record.restart_requested = is_back;
            job
        };
        for (job, expected) in [
            (job("file", ("Always", None), true), (2, 3)),
            (job("file", ("Always", None), false), (0, 0)),
            (job("api", ("Always", None), true), (0, 0)),
            (job("file", ("Never", None), true), (0, 0)),
            (job("file", ("Always", Some("Never")), true), (0, 0)),
        ] {
            let [main, other] = ["main", "unstarted"].map(|name| child_key(&job.uid, name));
            let mut state = State::default();
            let apply = |state: &mut State, transaction: Transaction| {
                for mutation in &transaction.mutations {
                    state.apply(mutation, 1);
                }
            };
            let puts = Transaction::new()
                .put(main.clone(), testkit::ended("main", 2, 1))
                .put(other.clone(), testkit::started("unstarted", 0));
            apply(&mut state, puts);
            let done = forget(&state, &job.uid).and(next_life(&job, &state));
            apply(&mut state, done);
            let left = state.record::<ContainerRecord>(&main);
            let status = testkit::runtime(Vec::new());
            let history = History::of("main", &status, left, testkit::at(100), testkit::at(100));
            let found = (history.restart_count, history.next_attempt);
            assert_eq!(found, expected, "{:?}", job.pod);
            assert!(state.record::<ContainerRecord>(&other).is_none());
        }
    }

    #[test]
    fn a_rejected_pod_is_told_as_rejected_and_never_as_admitted_or_run() {
        let (told, _) = life(job(AdmissionDecision::Rejected {
            reason: "Unsupported".to_owned(),
            message: "spec.hostIPC is not supported".to_owned(),
        }));
        assert_eq!(
            told,
            [
                "rejected: Unsupported: spec.hostIPC is not supported",
                "worker sync: to report that it is rejected",
                "worker terminating: rejected at admission",
                "worker terminated: rejected at admission",
                "worker finished: rejected at admission",
            ]
        );
    }

    #[test]
    fn an_admitted_pod_is_told_as_before() {
        let (told, _) = life(job(AdmissionDecision::Admitted));
        assert_eq!(
            told,
            [
                "admitted: first sight",
                "worker sync: wanted by its source",
                "worker terminating: its containers are finished; grace 30 s",
                "worker terminated: its containers are finished",
                "worker finished: its containers are finished",
            ]
        );
    }

    #[test]
    fn a_pod_that_was_active_for_too_long_is_told_as_such() {
        let mut ended = job(AdmissionDecision::Admitted);
        ended.record = pod_worker::complete_sync(&ended.record, &ended.pod, NOW);
        let status = k8s_openapi::api::core::v1::PodStatus {
            reason: Some(deadline::REASON.to_owned()),
            ..Default::default()
        };
        let told = StatusRecord {
            name: "web".to_owned(),
            namespace: "default".to_owned(),
            status: Json::new(status),
            version: 1,
            acknowledged: 0,
            at: NOW,
            finished: false,
        };
        let mut state = State::default();
        for mutation in &Transaction::new().put("u1", told).mutations {
            state.apply(mutation, 1);
        }
        let lines = unrecorded(&ended, &state, 1, NOW).journal;
        let told = lines.iter().any(|l| {
            l.what == "worker terminating"
                && l.why == "its activeDeadlineSeconds are over; grace 30 s"
        });
        assert!(told, "{lines:?}");
    }

    #[test]
    fn a_finished_pod_leaves_the_queue_with_the_decision() {
        let (_, last) = life(job(AdmissionDecision::Admitted));
        let [Mutation::Put { .. }, Mutation::Delete { table, key }] = &last.mutations[..] else {
            panic!("{last:?}");
        };
        assert_eq!((table.name(), &**key), ("queue", "u1"));
    }
}

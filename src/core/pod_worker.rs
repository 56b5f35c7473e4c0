//! The state machine of a pod's worker: Sync → Terminating → Terminated → Finished, one way per UID.
//!
//! The input is the present record and an update; the output is the next record and whether a sync in flight has to be
//! cancelled. Mirrors upstream's `podWorkers.UpdatePod`, `completeSync`, `completeTerminating`, `completeTerminated`
//! and `SyncKnownPods`.
//!
//! **Invariant:** a phase never goes back, and a grace period never grows.

mod commit;
mod record;
mod worker;

pub use commit::{PREEMPTED, StepRecord, before_step};
pub use record::{forget, freed, next_life};
pub use worker::{UpdateOptions, Worker};

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::core::state::{TerminationCause, WorkerPhase, WorkerRecord};
use crate::types::runtime::{ContainerState, PodStatus as RuntimePodStatus};
use crate::types::{PodExt, PodSyncType, PodUid, Stamp};

/// Grace period of a pod that runs but that no source wants, in seconds.
pub const ORPHAN_GRACE_SECONDS: i64 = 1;

/// A request to stop a pod for another reason than its own desired state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillRequest {
    /// Why.
    pub cause: TerminationCause,
    /// Grace period override, in seconds.
    pub grace_override: Option<i64>,
}

/// Update sent to a worker.
#[derive(Clone, Debug)]
pub struct WorkerUpdate<'a> {
    /// Kind of the update.
    pub sync_type: PodSyncType,
    /// The pod; for runtime-only pods a minimal one made from the runtime's labels.
    pub pod: &'a Pod,
    /// Set for kills.
    pub kill: Option<KillRequest>,
    /// The pod is known from the runtime only.
    pub runtime_only: bool,
    /// Runtime's view of it, if it has been listed.
    pub runtime: Option<&'a RuntimePodStatus>,
}

/// Decision about an update.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerDecision {
    /// The record as it should be; equal to the old one when nothing changed.
    pub record: WorkerRecord,
    /// The record differs from what was passed in.
    pub changed: bool,
    /// A sync in flight works on an outdated decision and must be cancelled.
    pub cancel: bool,
    /// The worker has something to do.
    pub wake: bool,
}

/// Decides what an update means for a worker. Upstream: `podWorkers.UpdatePod`.
pub fn update(
    record: Option<&WorkerRecord>,
    update: &WorkerUpdate<'_>,
    now: Stamp,
) -> WorkerDecision {
    let fresh = record.is_none();
    let mut next = match record {
        Some(record) => record.clone(),
        None => first_sight(update, now),
    };
    if update.sync_type == PodSyncType::Kill
        && update
            .kill
            .as_ref()
            .is_none_or(|k| k.cause == TerminationCause::Deleted)
    {
        // Gone from its source: a copy that comes back later is a new life of the same UID.
        next.deleted = true;
        next.restart_requested = false;
    }
    let mut cancel = false;
    match &next.phase {
        WorkerPhase::Finished { .. } => {
            if update.sync_type == PodSyncType::Create && !fresh && !next.restart_requested {
                next.restart_requested = next.deleted;
            }
            let changed = record != Some(&next);
            return WorkerDecision {
                record: next,
                changed,
                cancel: false,
                wake: false,
            };
        }
        WorkerPhase::Terminating { .. } | WorkerPhase::Terminated { .. }
            if update.sync_type == PodSyncType::Create && !fresh =>
        {
            next.restart_requested = true;
        }
        _ => {}
    }
    if let Some(cause) = termination_cause(update) {
        let grace = effective_grace(update, &next.phase);
        match &next.phase {
            WorkerPhase::Sync => {
                next.phase = terminating(now, grace, cause);
                cancel = true;
            }
            WorkerPhase::Terminating {
                since,
                grace_seconds,
                cause,
                ..
            } if grace < *grace_seconds => {
                let elapsed_deadline = since.plus(seconds(grace));
                next.phase = WorkerPhase::Terminating {
                    since: *since,
                    grace_seconds: grace,
                    deadline: elapsed_deadline,
                    cause: cause.clone(),
                };
                cancel = true;
            }
            _ => {}
        }
    }
    let changed = record != Some(&next);
    WorkerDecision {
        record: next,
        changed,
        cancel,
        wake: true,
    }
}

fn first_sight(update: &WorkerUpdate<'_>, now: Stamp) -> WorkerRecord {
    let phase = if update.runtime_only {
        terminating(now, ORPHAN_GRACE_SECONDS, TerminationCause::Orphan)
    } else if update.pod.phase_is_terminal() {
        let idle = update
            .runtime
            .is_some_and(|s| !s.any_running() && s.ready_sandbox().is_none());
        if idle {
            WorkerPhase::Terminated {
                since: now,
                cause: TerminationCause::Completed,
            }
        } else {
            let grace = effective_grace(update, &WorkerPhase::Sync);
            terminating(now, grace, TerminationCause::Completed)
        }
    } else {
        WorkerPhase::Sync
    };
    WorkerRecord {
        full_name: update.pod.full_name().as_str().to_owned(),
        queued: now,
        started: None,
        phase,
        deleted: false,
        restart_requested: false,
        runtime_only: update.runtime_only,
    }
}

fn termination_cause(update: &WorkerUpdate<'_>) -> Option<TerminationCause> {
    if let Some(kill) = &update.kill {
        return Some(kill.cause.clone());
    }
    if update.runtime_only {
        return Some(TerminationCause::Orphan);
    }
    if update.sync_type == PodSyncType::Kill || update.pod.is_deleting() {
        return Some(TerminationCause::Deleted);
    }
    if update.pod.phase_is_terminal() {
        return Some(TerminationCause::Completed);
    }
    None
}

/// Returns the grace period to apply, in seconds: the smallest of those of deletion and an override, else the spec's,
/// never longer than before, at least one. Upstream: `calculateEffectiveGracePeriod`.
fn effective_grace(update: &WorkerUpdate<'_>, phase: &WorkerPhase) -> i64 {
    let mut grace: Option<i64> = match phase {
        WorkerPhase::Terminating { grace_seconds, .. } => Some(*grace_seconds),
        _ => None,
    };
    let mut narrow = |candidate: Option<i64>| {
        if let Some(candidate) = candidate {
            grace = Some(grace.map_or(candidate, |g| g.min(candidate)));
        }
    };
    narrow(update.kill.as_ref().and_then(|k| k.grace_override));
    if update.pod.is_deleting() {
        narrow(update.pod.metadata.deletion_grace_period_seconds);
    }
    let grace = grace.unwrap_or_else(|| {
        i64::try_from(update.pod.termination_grace().as_secs()).unwrap_or(i64::MAX)
    });
    grace.max(1)
}

fn terminating(now: Stamp, grace_seconds: i64, cause: TerminationCause) -> WorkerPhase {
    WorkerPhase::Terminating {
        since: now,
        grace_seconds,
        deadline: now.plus(seconds(grace_seconds)),
        cause,
    }
}

fn seconds(n: i64) -> Duration {
    Duration::from_secs(u64::try_from(n).unwrap_or(0))
}

/// A sync found the pod finished by itself: it is terminated next. Upstream: `completeSync`.
pub fn complete_sync(record: &WorkerRecord, pod: &Pod, now: Stamp) -> WorkerRecord {
    let mut next = record.clone();
    if next.phase == WorkerPhase::Sync {
        let grace = i64::try_from(pod.termination_grace().as_secs())
            .unwrap_or(i64::MAX)
            .max(1);
        next.phase = terminating(now, grace, TerminationCause::Completed);
    }
    next
}

/// Nothing of the pod runs any more. Upstream: `completeTerminating`.
pub fn complete_terminating(record: &WorkerRecord, now: Stamp) -> WorkerRecord {
    let mut next = record.clone();
    if let WorkerPhase::Terminating { cause, .. } = &record.phase {
        next.phase = WorkerPhase::Terminated {
            since: now,
            cause: cause.clone(),
        };
    }
    next
}

/// Everything of the pod is cleaned up. Upstream: `completeTerminated`.
pub fn complete_terminated(record: &WorkerRecord, now: Stamp) -> WorkerRecord {
    let mut next = record.clone();
    if let WorkerPhase::Terminated { cause, .. } = &record.phase {
        next.phase = WorkerPhase::Finished {
            since: now,
            cause: cause.clone(),
        };
    }
    next
}

/// Returns whether the runtime shows something of a finished pod running that must have existed when the pod was
/// finished, but that the runtime did not list then. A younger container shows that the record is outdated, and is left
/// alone.
pub fn is_left_running(record: &WorkerRecord, shown: &RuntimePodStatus) -> bool {
    let WorkerPhase::Finished { since, .. } = &record.phase else {
        return false;
    };
    shown.containers.iter().any(|container| {
        container.state == ContainerState::Running
            && container.created_at_ns / 1_000_000 <= since.wall_ms
    })
}

/// Step that `sync_known` wants for one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnownPod {
    /// Nothing.
    Keep,
    /// The pod is gone from its source and never started: drop everything about it.
    Drop,
    /// The pod is gone from its source: stop it.
    Stop,
    /// The pod is finished and may be forgotten; housekeeping creates it anew if its source wants it.
    Forget,
}

/// Compares a worker with what the sources want. Upstream: `podWorkers.SyncKnownPods`.
pub fn sync_known(record: &WorkerRecord, desired: bool) -> KnownPod {
    match &record.phase {
        WorkerPhase::Finished { .. } => {
            if !desired || record.restart_requested || record.runtime_only {
                KnownPod::Forget
            } else {
                KnownPod::Keep
            }
        }
        WorkerPhase::Sync if !desired && !record.runtime_only => {
            if record.started.is_none() {
                KnownPod::Drop
            } else {
                KnownPod::Stop
            }
        }
        _ => KnownPod::Keep,
    }
}

/// Returns whether a static pod may start now: pods of one full name start in order of arrival, one at a time, after
/// one that runs without a record. `others` are the workers of the same full name, without this one. Upstream:
/// `allowStaticPodStart`.
pub fn may_start_static<'a>(
    uid: &PodUid,
    record: &WorkerRecord,
    others: impl Iterator<Item = (&'a PodUid, &'a WorkerRecord)>,
) -> bool {
    if record.started.is_some() {
        return true;
    }
    for (other_uid, other) in others {
        if other.full_name != record.full_name {
            continue;
        }
        let finished = matches!(other.phase, WorkerPhase::Finished { .. });
        if (other.started.is_some() || other.runtime_only) && !finished {
            return false;
        }
        let waiting = other.started.is_none() && other.phase == WorkerPhase::Sync;
        let earlier = (other.queued.boottime_ms, other_uid.as_str())
            < (record.queued.boottime_ms, uid.as_str());
        if waiting && earlier {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::testkit::{running, runtime};
    use crate::types::BootId;
    use crate::types::runtime::{SandboxState, SandboxStatus};

    fn at(ms: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }

    fn pod(grace: i64) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some("a".into());
        pod.metadata.uid = Some("u1".into());
        pod.spec = Some(k8s_openapi::api::core::v1::PodSpec {
            termination_grace_period_seconds: Some(grace),
            ..Default::default()
        });
        pod
    }

    fn up<'a>(pod: &'a Pod, sync_type: PodSyncType) -> WorkerUpdate<'a> {
        WorkerUpdate {
            sync_type,
            pod,
            kill: None,
            runtime_only: false,
            runtime: None,
        }
    }

    fn evict(grace: i64) -> KillRequest {
        KillRequest {
            cause: TerminationCause::Evicted {
                reason: "Evicted".into(),
                message: "low".into(),
            },
            grace_override: Some(grace),
        }
    }

    #[test]
    fn first_sight_of_a_running_pod_syncs() {
        let p = pod(30);
        let d = update(None, &up(&p, PodSyncType::Create), at(0));
        assert_eq!(d.record.phase, WorkerPhase::Sync);
        assert!(d.changed && d.wake && !d.cancel);
    }

    #[test]
    fn first_sight_with_terminal_phase_depends_on_the_runtime() {
        let mut p = pod(30);
        p.status = Some(k8s_openapi::api::core::v1::PodStatus {
            phase: Some("Failed".into()),
            ..Default::default()
        });
        let d = update(None, &up(&p, PodSyncType::Create), at(0));
        assert!(matches!(d.record.phase, WorkerPhase::Terminating { .. }));

        let mut runtime = RuntimePodStatus::empty(PodUid::new("u1"));
        let mut u = up(&p, PodSyncType::Create);
        u.runtime = Some(&runtime);
        assert!(matches!(
            update(None, &u, at(0)).record.phase,
            WorkerPhase::Terminated { .. }
        ));

        runtime.sandboxes.push(SandboxStatus {
            id: "s".into(),
            attempt: 0,
            state: SandboxState::Ready,
            created_at_ns: 0,
            ips: vec![],
            host_network: None,
            runtime_handler: String::new(),
        });
        let mut u = up(&p, PodSyncType::Create);
        u.runtime = Some(&runtime);
        assert!(matches!(
            update(None, &u, at(0)).record.phase,
            WorkerPhase::Terminating { .. }
        ));
    }

    #[test]
    fn what_runs_of_a_finished_pod_is_left_over_unless_it_is_younger() {
        let record = |phase| WorkerRecord {
            phase,
            ..update(None, &up(&pod(30), PodSyncType::Create), at(0)).record
        };
        let finished = record(WorkerPhase::Finished {
            since: at(5_000),
            cause: TerminationCause::Completed,
        });
        let shown = |state, created_ms: i64| {
            let mut container = running("a", 0);
            container.state = state;
            container.created_at_ns = created_ms * 1_000_000;
            runtime(vec![container])
        };
        let old = shown(ContainerState::Running, 4_000);
        assert!(is_left_running(&finished, &old));
        assert!(!is_left_running(&record(WorkerPhase::Sync), &old));
        for (state, created_ms) in [
            (ContainerState::Running, 6_000),
            (ContainerState::Exited, 4_000),
            (ContainerState::Created, 4_000),
        ] {
            assert!(!is_left_running(&finished, &shown(state, created_ms)));
        }
    }

    #[test]
    fn a_kill_cancels_and_a_longer_grace_never_wins() {
        let p = pod(30);
        let first = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        let d = update(Some(&first), &up(&p, PodSyncType::Kill), at(1_000));
        assert!(d.cancel && d.record.deleted);
        let WorkerPhase::Terminating {
            grace_seconds,
            deadline,
            ..
        } = d.record.phase.clone()
        else {
            panic!("terminating")
        };
        assert_eq!((grace_seconds, deadline), (30, at(31_000)));

        let mut longer = up(&p, PodSyncType::Kill);
        longer.kill = Some(evict(600));
        let unchanged = update(Some(&d.record), &longer, at(2_000));
        assert_eq!(unchanged.record, d.record);
        assert!(!unchanged.cancel);

        let mut shorter = up(&p, PodSyncType::Kill);
        shorter.kill = Some(evict(0));
        let cut = update(Some(&d.record), &shorter, at(2_000));
        assert!(cut.cancel);
        assert!(
            matches!(
                cut.record.phase,
                WorkerPhase::Terminating {
                    grace_seconds: 1,
                    cause: TerminationCause::Deleted,
                    ..
                }
            ),
            "at least one second, and the first cause stays"
        );
    }

    #[test]
    fn deletion_grace_of_the_object_counts() {
        let mut p = pod(30);
        let first = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        p.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            jiff::Timestamp::UNIX_EPOCH,
        ));
        p.metadata.deletion_grace_period_seconds = Some(5);
        let d = update(Some(&first), &up(&p, PodSyncType::Update), at(0));
        assert!(matches!(
            d.record.phase,
            WorkerPhase::Terminating {
                grace_seconds: 5,
                ..
            }
        ));
        assert!(!d.record.deleted, "still in its source");
    }

    #[test]
    fn a_create_while_terminating_asks_for_a_restart() {
        let p = pod(30);
        let first = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        let dying = update(Some(&first), &up(&p, PodSyncType::Kill), at(1)).record;
        let back = update(Some(&dying), &up(&p, PodSyncType::Create), at(2)).record;
        assert!(back.restart_requested);
        let done = complete_terminated(&complete_terminating(&back, at(3)), at(4));
        assert_eq!(sync_known(&done, true), KnownPod::Forget);
    }

    #[test]
    fn an_evicted_pod_stays_finished_while_its_source_wants_it() {
        let p = pod(30);
        let first = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        let mut kill = up(&p, PodSyncType::Kill);
        kill.kill = Some(evict(1));
        let dying = update(Some(&first), &kill, at(1)).record;
        assert!(!dying.deleted);
        let done = complete_terminated(&complete_terminating(&dying, at(2)), at(3));
        assert!(matches!(
            done.phase,
            WorkerPhase::Finished {
                cause: TerminationCause::Evicted { .. },
                ..
            }
        ));
        let again = update(Some(&done), &up(&p, PodSyncType::Create), at(4));
        assert!(!again.wake);
        assert_eq!(sync_known(&again.record, true), KnownPod::Keep);
        assert_eq!(sync_known(&again.record, false), KnownPod::Forget);
    }

    #[test]
    fn a_finished_pod_runs_again_once_its_manifest_was_removed_and_came_back() {
        let p = pod(30);
        let first = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        let over = complete_sync(&first, &p, at(1));
        let done = complete_terminated(&complete_terminating(&over, at(2)), at(3));
        let same = update(Some(&done), &up(&p, PodSyncType::Create), at(4)).record;
        assert_eq!(sync_known(&same, true), KnownPod::Keep);
        let removed = update(Some(&same), &up(&p, PodSyncType::Kill), at(5)).record;
        let back = update(Some(&removed), &up(&p, PodSyncType::Create), at(6)).record;
        assert_eq!(sync_known(&back, true), KnownPod::Forget);
    }

    #[test]
    fn unwanted_pods_are_dropped_before_and_stopped_after_their_start() {
        let p = pod(30);
        let mut record = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        assert_eq!(sync_known(&record, true), KnownPod::Keep);
        assert_eq!(sync_known(&record, false), KnownPod::Drop);
        record.started = Some(at(1));
        assert_eq!(sync_known(&record, false), KnownPod::Stop);
    }

    #[test]
    fn runtime_orphans_get_one_second_and_are_forgotten() {
        let p = pod(30);
        let mut u = up(&p, PodSyncType::Kill);
        u.runtime_only = true;
        let d = update(None, &u, at(0));
        assert!(matches!(
            d.record.phase,
            WorkerPhase::Terminating {
                grace_seconds: 1,
                cause: TerminationCause::Orphan,
                ..
            }
        ));
        let done = complete_terminated(&complete_terminating(&d.record, at(1)), at(2));
        assert_eq!(sync_known(&done, false), KnownPod::Forget);
    }

    #[test]
    fn static_pods_of_one_name_start_one_after_the_other() {
        let p = pod(30);
        let (a, b) = (PodUid::new("a"), PodUid::new("b"));
        let mut first = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        let second = update(None, &up(&p, PodSyncType::Create), at(5)).record;
        assert!(may_start_static(&a, &first, [(&b, &second)].into_iter()));
        assert!(!may_start_static(&b, &second, [(&a, &first)].into_iter()));
        first.started = Some(at(1));
        first.phase = terminating(at(2), 30, TerminationCause::Deleted);
        assert!(!may_start_static(&b, &second, [(&a, &first)].into_iter()));
        first.phase = WorkerPhase::Finished {
            since: at(3),
            cause: TerminationCause::Deleted,
        };
        assert!(may_start_static(&b, &second, [(&a, &first)].into_iter()));
        let mut orphan = up(&p, PodSyncType::Kill);
        orphan.runtime_only = true;
        let orphan = update(None, &orphan, at(6)).record;
        assert!(!may_start_static(&b, &second, [(&a, &orphan)].into_iter()));
    }

    #[test]
    fn a_finished_pod_notes_what_changes_it_and_nothing_else() {
        let p = pod(30);
        let first = update(None, &up(&p, PodSyncType::Create), at(0)).record;
        let over = complete_sync(&first, &p, at(1));
        let done = complete_terminated(&complete_terminating(&over, at(2)), at(3));
        let told = |record: &WorkerRecord, sync_type| {
            let decided = update(Some(record), &up(&p, sync_type), at(4));
            (decided.changed, decided.record.restart_requested)
        };
        assert_eq!(told(&done, PodSyncType::Create), (false, false));
        assert_eq!(told(&done, PodSyncType::Update), (false, false));
        let removed = update(Some(&done), &up(&p, PodSyncType::Kill), at(4));
        assert!(removed.changed && removed.record.deleted);
        // An update is not its coming back.
        assert_eq!(told(&removed.record, PodSyncType::Update), (false, false));
        assert_eq!(told(&removed.record, PodSyncType::Create), (true, true));
    }
}

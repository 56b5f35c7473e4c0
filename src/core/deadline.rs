//! `spec.activeDeadlineSeconds`: limit of the time that a pod is active on the node, whatever its containers do.
//!
//! The input is the pod and the moment its worker first started it. The output is the end of its time, and whether it
//! has passed.
//!
//! Upstream counts from `status.startTime`, measured with the wall clock. Here the moment is a [`Stamp`]
//! (`WorkerRecord.started`, which is stored before the first sandbox is made, in the same step that makes the first
//! status with its startTime). Within a boot the boot-time clock counts; across boots the stamp was rebased by the time
//! that had passed at the last heartbeat. A wall clock that jumps therefore ends no pod early, and a pod is not charged
//! for the time the node was switched off.
//!
//! **Invariants:** a pod that was never started has no deadline; the same pod and start give the same deadline in
//! every run of the agent; a changed `activeDeadlineSeconds` counts from the same start.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::types::{PodExt, Stamp};

/// Reason of the status and of the event of a pod that was active for too long.
pub const REASON: &str = "DeadlineExceeded";
/// Message that goes with [`REASON`].
pub const MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

/// Returns the end of the time of a pod that was started at `started`, when a sync is due. `None` if it has no
/// deadline, or was not started.
pub fn due(pod: &Pod, started: Option<Stamp>) -> Option<Stamp> {
    let seconds = pod.spec_ref().active_deadline_seconds?;
    let allowed = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    Some(started?.plus(allowed))
}

/// Returns whether the time of a pod is over; upstream's `pastActiveDeadline`. `started` is of the boot of `now`.
pub fn exceeded(pod: &Pod, started: Option<Stamp>, now: Stamp) -> bool {
    due(pod, started).is_some_and(|due| due.reached(now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::BootId;

    fn at(boot: u64, seconds: i64, wall: i64) -> Stamp {
        Stamp {
            boot: BootId(boot),
            boottime_ms: seconds * 1000,
            wall_ms: wall * 1000,
        }
    }

    fn pod(deadline: Option<i64>) -> Pod {
        let mut pod = Pod::default();
        pod.spec.get_or_insert_default().active_deadline_seconds = deadline;
        pod
    }

    #[test]
    fn deadline_table() {
        let start = Some(at(1, 100, 5000));
        for (name, deadline, started, now, want) in [
            ("none set", None, start, at(1, 9999, 9999), false),
            ("not started", Some(1), None, at(1, 9999, 9999), false),
            ("before", Some(30), start, at(1, 129, 5029), false),
            ("to the second", Some(30), start, at(1, 130, 5030), true),
            ("after", Some(30), start, at(1, 500, 5400), true),
            (
                "the wall clock jumps ahead",
                Some(30),
                start,
                at(1, 110, 999_999),
                false,
            ),
            (
                "the wall clock jumps back",
                Some(30),
                start,
                at(1, 130, 0),
                true,
            ),
            (
                "a negative one is over at once",
                Some(-5),
                start,
                at(1, 100, 5000),
                true,
            ),
        ] {
            assert_eq!(exceeded(&pod(deadline), started, now), want, "{name}");
        }
    }

    #[test]
    fn the_next_sync_is_due_at_the_deadline() {
        let start = at(1, 100, 5000);
        assert_eq!(due(&pod(Some(30)), Some(start)), Some(at(1, 130, 5030)));
        assert_eq!(due(&pod(None), Some(start)), None);
        assert_eq!(due(&pod(Some(30)), None), None);
    }

    #[test]
    fn a_reboot_with_a_wrong_clock_keeps_the_time_that_was_left() {
        let heartbeat = at(1, 120, 5020);
        let now = at(2, 5, 99_000_000);
        let start = at(1, 100, 5000).rebase(heartbeat, now);
        let left = due(&pod(Some(30)), Some(start)).unwrap().until(now);
        assert_eq!(left, Duration::from_secs(10));
        assert!(!exceeded(&pod(Some(30)), Some(start), now));
        assert!(exceeded(&pod(Some(30)), Some(start), at(2, 15, 0)));
    }
}

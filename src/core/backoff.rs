//! Back-off arithmetic: crashing containers, failing image pulls, and the next check of a pod by its worker.
//!
//! The input is the recorded back-off, the failure, the current [`Stamp`]. The output is whether to go ahead, and the
//! record that has to be committed with it. **Invariant:** durations come from the boot-time clock (see
//! [`Stamp::since`]), so a jump of the wall clock neither shortens nor lengthens a back-off; records of an earlier boot
//! are rebased before they get here. [`early`] ends a back-off before its time.

pub mod early;

use std::time::Duration;

use super::state::BackoffRecord;
use crate::types::Stamp;

/// Factor of a back-off at each failure.
const FACTOR: u32 = 2;

/// Back-off of a crashing container; upstream's `doBackOff` over `flowcontrol.Backoff`.
///
/// The first restart is free and records a back-off of 10 s. Each restart after that waits until the recorded back-off
/// has passed since the container finished, then doubles it. `BackoffRecord::since` is the moment at which the restart
/// was decided (upstream's `lastUpdate`).
pub mod crash {
    use super::{BackoffRecord, Duration, Stamp, grow, length};
    use crate::core::state::ExitRecord;

    /// Length of the first back-off.
    pub const INITIAL: Duration = Duration::from_secs(10);
    /// Longest back-off unless configured (`crashLoopBackOff.maxContainerRestartPeriod`).
    pub const DEFAULT_MAX: Duration = Duration::from_secs(300);
    /// A container that finishes later than this after its start begins anew.
    pub const RESET_AFTER: Duration = Duration::from_secs(600);

    /// Decision about a container that should run again.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Decision {
        /// Start it, and commit `next` with the start.
        StartNow {
            /// The back-off that the next restart has to respect.
            next: BackoffRecord,
        },
        /// Not yet.
        Wait {
            /// End of the back-off.
            until: Stamp,
            /// Current back-off.
            backoff: Duration,
        },
    }

    /// Decides about a restart after `exit`. `max` caps the back-off; one below [`INITIAL`] shortens the
    /// first back-off too. `is_over` says that the back-off ended early ([`super::early`]).
    pub fn next(
        record: Option<BackoffRecord>,
        exit: &ExitRecord,
        is_over: bool,
        now: Stamp,
        max: Duration,
    ) -> Decision {
        // An end before the decision (the start itself failed) gives zero here: not stable.
        let in_force = record.filter(|r| exit.finished.since(r.since) <= RESET_AFTER);
        let Some(record) = in_force else {
            return Decision::StartNow {
                next: grow(None, now, INITIAL, max),
            };
        };
        let backoff = length(&record).min(max);
        let until = exit.finished.plus(backoff);
        if is_over || until.reached(now) {
            Decision::StartNow {
                next: grow(Some(record), now, INITIAL, max),
            }
        } else {
            Decision::Wait { until, backoff }
        }
    }
}

/// Back-off of a failing image pull, upstream's `imageBackOff`: counted from the last failure.
pub mod image {
    use super::{BackoffRecord, Duration, Stamp, grow, length};

    /// Length of the first back-off.
    pub const INITIAL: Duration = Duration::from_secs(10);
    /// Longest back-off.
    pub const MAX: Duration = Duration::from_secs(300);
    /// A failure later than this after the last one begins anew.
    pub const RESET_AFTER: Duration = Duration::from_secs(600);

    /// Returns the end of the back-off; `None` if a pull may be tried now.
    pub fn waiting(record: Option<BackoffRecord>, now: Stamp) -> Option<Stamp> {
        let record = record?;
        let until = record.since.plus(length(&record));
        (!until.reached(now)).then_some(until)
    }

    /// The back-off after a failure at `now`.
    pub fn failed(record: Option<BackoffRecord>, now: Stamp, max: Duration) -> BackoffRecord {
        let in_force = record.filter(|r| now.since(r.since) <= RESET_AFTER);
        grow(in_force, now, INITIAL, max)
    }
}

/// Result of one sync of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncOutcome {
    /// Everything is as desired.
    Success,
    /// The worker moved to its next phase.
    PhaseTransition,
    /// The runtime's network is not ready.
    NetworkNotReady,
    /// Something failed or is backing off.
    Error {
        /// End of the first current back-off of the pod, if there is one.
        earliest_backoff: Option<Stamp>,
    },
}

/// Returns the delay until a worker checks its pod again; upstream's `podWorkers.completeWork`.
///
/// `jitter` in `[0, 1)` lengthens the delay by up to half, so that pods are not synced at the same time. The end of a
/// back-off is not jittered: it is clamped to `[0, 60 s]` and the pod is checked when it comes. `resync` is the
/// configured `syncFrequency`.
pub fn requeue_delay(outcome: SyncOutcome, now: Stamp, resync: Duration, jitter: f64) -> Duration {
    const LONGEST_WAIT: Duration = Duration::from_secs(60);
    let base = match outcome {
        SyncOutcome::Success => resync,
        SyncOutcome::PhaseTransition => return Duration::ZERO,
        SyncOutcome::NetworkNotReady => Duration::from_secs(1),
        SyncOutcome::Error {
            earliest_backoff: Some(end),
        } => return end.until(now).min(LONGEST_WAIT),
        SyncOutcome::Error {
            earliest_backoff: None,
        } => Duration::from_secs(10),
    };
    let jitter = if jitter.is_finite() {
        jitter.clamp(0.0, 1.0)
    } else {
        0.0
    };
    base.mul_f64(1.0 + 0.5 * jitter)
}

/// A duration as Go prints it (`40s`, `1m20s`, `5m0s`), rounded down to whole seconds.
pub fn go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

fn length(record: &BackoffRecord) -> Duration {
    Duration::from_millis(record.duration_ms)
}

fn grow(
    record: Option<BackoffRecord>,
    now: Stamp,
    initial: Duration,
    max: Duration,
) -> BackoffRecord {
    let next = record.map_or(initial, |r| length(&r).saturating_mul(FACTOR));
    BackoffRecord {
        duration_ms: u64::try_from(next.min(max).as_millis()).unwrap_or(u64::MAX),
        since: now,
    }
}

#[cfg(test)]
mod tests {
    use super::crash::Decision;
    use super::*;
    use crate::core::state::ExitRecord;
    use crate::types::{BootId, ContainerId};

    fn at(seconds: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: 1_700_000_000_000 + seconds * 1000,
        }
    }

    fn exit(finished: i64) -> ExitRecord {
        ExitRecord {
            container_id: ContainerId::new("c"),
            attempt: 0,
            image: String::new(),
            image_ref: String::new(),
            started_at_ns: 0,
            finished_at_ns: 0,
            finished: at(finished),
            exit_code: 1,
            reason: "Error".into(),
            message: String::new(),
            inferred: false,
        }
    }

    fn record(seconds: u64, since: i64) -> Option<BackoffRecord> {
        Some(BackoffRecord {
            duration_ms: seconds * 1000,
            since: at(since),
        })
    }

    #[test]
    fn a_container_that_crashes_at_once_waits_0_10_20_40_80_160_300_300() {
        let (mut on_record, mut now, mut waits) = (None, 100, Vec::new());
        for _ in 0..8 {
            let finished = now;
            loop {
                match crash::next(
                    on_record,
                    &exit(finished),
                    false,
                    at(now),
                    crash::DEFAULT_MAX,
                ) {
                    Decision::StartNow { next } => {
                        on_record = Some(next);
                        break;
                    }
                    Decision::Wait { until, .. } => {
                        assert!(!until.reached(at(now)));
                        now += i64::try_from(until.until(at(now)).as_secs()).unwrap();
                    }
                }
            }
            waits.push(now - finished);
        }
        assert_eq!(waits, [0, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn crash_table() {
        // (record length and restart time, finished, now, max) -> wait for, or the next length
        let max = 300;
        for (name, on_record, finished, now, max, want) in [
            ("first exit", None, 50, 50, max, Err(10)),
            ("in back-off", record(40, 100), 101, 120, max, Ok(21)),
            ("last second", record(40, 100), 101, 140, max, Ok(1)),
            ("passed exactly", record(40, 100), 101, 141, max, Err(80)),
            ("caps", record(160, 100), 101, 400, max, Err(300)),
            (
                "stays at the cap",
                record(300, 100),
                101,
                500,
                max,
                Err(300),
            ),
            (
                "ran 600 s: no reset",
                record(300, 100),
                700,
                700,
                max,
                Ok(300),
            ),
            ("ran 601 s: reset", record(300, 100), 701, 701, max, Err(10)),
            ("smaller max", record(300, 100), 110, 112, 4, Ok(2)),
            ("max below the first", None, 110, 110, 4, Err(4)),
            (
                "create failed after the restart was decided",
                record(20, 130),
                100,
                131,
                max,
                Err(40),
            ),
            (
                "ended a day before the restart was decided",
                record(20, 90_000),
                100,
                90_001,
                max,
                Err(40),
            ),
        ] {
            let max = Duration::from_secs(max);
            let got = match crash::next(on_record, &exit(finished), false, at(now), max) {
                Decision::StartNow { next } => {
                    assert_eq!(next.since, at(now), "{name}");
                    Err(next.duration_ms / 1000)
                }
                Decision::Wait { until, .. } => Ok(until.until(at(now)).as_secs()),
            };
            assert_eq!(got, want, "{name}");
        }
    }

    #[test]
    fn wall_clock_jump_does_not_end_a_back_off() {
        let mut now = at(120);
        now.wall_ms += 86_400_000;
        let decision = crash::next(record(40, 100), &exit(101), false, now, crash::DEFAULT_MAX);
        assert!(
            matches!(decision, Decision::Wait { until, .. } if until.until(now).as_secs() == 21)
        );
    }

    #[test]
    fn a_back_off_that_ended_early_is_followed_by_the_next_longer_one() {
        let (exit, now, max) = (exit(101), at(102), crash::DEFAULT_MAX);
        let waits = crash::next(record(40, 100), &exit, false, now, max);
        assert!(matches!(waits, Decision::Wait { .. }));
        let next = BackoffRecord {
            duration_ms: 80_000,
            since: now,
        };
        let starts = crash::next(record(40, 100), &exit, true, now, max);
        assert_eq!(starts, Decision::StartNow { next });
    }

    #[test]
    fn image_pulls_wait_from_the_last_failure_and_forget_after_600_s() {
        let first = image::failed(None, at(0), image::MAX);
        assert_eq!(first.duration_ms, 10_000);
        assert_eq!(image::waiting(Some(first), at(9)), Some(at(10)));
        assert_eq!(image::waiting(Some(first), at(10)), None);
        assert_eq!(image::waiting(None, at(10)), None);
        let mut on_record = first;
        let mut lengths = Vec::new();
        for i in 1..7 {
            on_record = image::failed(Some(on_record), at(i * 300), image::MAX);
            lengths.push(on_record.duration_ms / 1000);
        }
        assert_eq!(lengths, [20, 40, 80, 160, 300, 300]);
        assert_eq!(
            image::failed(Some(on_record), at(1800 + 601), image::MAX).duration_ms,
            10_000
        );
    }

    #[test]
    fn requeue_table() {
        let s = Duration::from_secs;
        let error = |earliest_backoff| SyncOutcome::Error { earliest_backoff };
        for (outcome, jitter, want) in [
            (SyncOutcome::Success, 0.0, s(60)),
            (SyncOutcome::Success, 0.5, s(75)),
            (SyncOutcome::PhaseTransition, 0.9, s(0)),
            (SyncOutcome::NetworkNotReady, 0.0, s(1)),
            (error(None), 0.0, s(10)),
            (error(None), f64::NAN, s(10)),
            (error(Some(at(130))), 0.9, s(30)),
            (error(Some(at(900))), 0.0, s(60)),
            (error(Some(at(5))), 0.0, s(0)),
        ] {
            assert_eq!(
                requeue_delay(outcome, at(100), s(60), jitter),
                want,
                "{outcome:?}"
            );
        }
        let seldom = requeue_delay(SyncOutcome::Success, at(100), s(600), 0.0);
        assert_eq!(seldom, s(600), "as configured");
    }

    #[test]
    fn durations_read_as_in_go() {
        for (seconds, want) in [(10, "10s"), (80, "1m20s"), (300, "5m0s"), (3661, "1h1m1s")] {
            assert_eq!(go_duration(Duration::from_secs(seconds)), want);
        }
    }
}

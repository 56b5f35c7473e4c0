//! Time that survives a reboot: a [`Stamp`] carries the boot it was taken in, the boot-time clock and
//! the wall clock. Within one boot only the boot-time clock counts, so a jump of the wall clock expires
//! nothing; across boots a stamp is *rebased* onto the new boot by what had passed at the last heartbeat.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::boot::BootId;

/// A moment, in milliseconds of two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The boot in which `boottime_ms` was read.
    pub boot: BootId,
    /// CLOCK_BOOTTIME in milliseconds. Negative only after a rebase onto a younger boot.
    pub boottime_ms: i64,
    /// Milliseconds since the Unix epoch, as the wall clock said.
    pub wall_ms: i64,
}

impl Stamp {
    /// The stamp `by` after this one, on both clocks.
    pub fn plus(self, by: Duration) -> Self {
        let ms = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
        Self {
            boot: self.boot,
            boottime_ms: self.boottime_ms.saturating_add(ms),
            wall_ms: self.wall_ms.saturating_add(ms),
        }
    }

    /// The stamp `by` before this one, on both clocks.
    pub fn minus(self, by: Duration) -> Self {
        let ms = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
        Self {
            boot: self.boot,
            boottime_ms: self.boottime_ms.saturating_sub(ms),
            wall_ms: self.wall_ms.saturating_sub(ms),
        }
    }

    /// Time from `earlier` to this stamp by the boot-time clock; zero when `earlier` is later.
    /// Stamps of another boot must be rebased first; unrebased ones fall back to the wall clock.
    pub fn since(self, earlier: Stamp) -> Duration {
        let ms = if self.boot == earlier.boot {
            self.boottime_ms.saturating_sub(earlier.boottime_ms)
        } else {
            self.wall_ms.saturating_sub(earlier.wall_ms)
        };
        Duration::from_millis(u64::try_from(ms).unwrap_or(0))
    }

    /// Time left until this stamp, seen from `now`; zero when it has passed.
    pub fn until(self, now: Stamp) -> Duration {
        self.since(now)
    }

    /// Returns whether `now` has reached this stamp.
    pub fn reached(self, now: Stamp) -> bool {
        self.until(now).is_zero()
    }

    /// Moves a stamp of an earlier boot onto the boot of `now`: it keeps the distance it had to
    /// `heartbeat`, the last sign of life of that boot. A stamp of the current boot is returned as it is.
    pub fn rebase(self, heartbeat: Stamp, now: Stamp) -> Self {
        if self.boot == now.boot {
            return self;
        }
        let distance_ms = if self.boot == heartbeat.boot {
            self.boottime_ms.saturating_sub(heartbeat.boottime_ms)
        } else {
            self.wall_ms.saturating_sub(heartbeat.wall_ms)
        };
        Self {
            boot: now.boot,
            boottime_ms: now.boottime_ms.saturating_add(distance_ms),
            wall_ms: now.wall_ms.saturating_add(distance_ms),
        }
    }

    /// The wall clock as RFC 3339 with second precision, for humans and the API.
    pub fn rfc3339(self) -> String {
        match jiff::Timestamp::from_second(self.wall_ms.div_euclid(1000)) {
            Ok(at) => at.to_string(),
            Err(_) => format!("@{}ms", self.wall_ms),
        }
    }
}

/// A moment of which the age is asked later: the time since then in which the machine was awake. The boot clock counts
/// suspends, and timers do not, so work that was planned with a timer is not late after one.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    at: Stamp,
    awake: Instant,
}

impl Moment {
    /// Makes the moment of `now`.
    pub fn of(now: Stamp) -> Self {
        Self {
            at: now,
            awake: Instant::now(),
        }
    }

    /// Returns the stamp it was made of.
    pub fn at(self) -> Stamp {
        self.at
    }

    /// Returns its age.
    pub fn age(self, now: Stamp) -> Duration {
        now.since(self.at).min(self.awake.elapsed())
    }
}

/// The only way to ask what time it is. Injected, so that tests own time.
pub trait Clock: Send + Sync + 'static {
    /// The current moment.
    fn now(&self) -> Stamp;
}

/// The kernel's clocks.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    boot: BootId,
    wall_offset_ms: i64,
}

impl SystemClock {
    /// A clock that stamps with the given boot.
    pub fn new(boot: BootId) -> Self {
        Self {
            boot,
            wall_offset_ms: wall_offset_ms(),
        }
    }
}

/// Returns the artificial error of the wall clock: zero, except in a crash-test build, which takes the seconds from
/// `HOLDFAST_WALL_OFFSET`.
fn wall_offset_ms() -> i64 {
    #[cfg(feature = "failpoints")]
    if let Some(seconds) = std::env::var("HOLDFAST_WALL_OFFSET")
        .ok()
        .and_then(|text| text.parse::<i64>().ok())
    {
        return seconds.saturating_mul(1000);
    }
    0
}

impl Clock for SystemClock {
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place where the wall clock is read"
    )]
    fn now(&self) -> Stamp {
        let boottime_ms = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)
            .map(|t| t.tv_sec() * 1000 + t.tv_nsec() / 1_000_000)
            .unwrap_or(0);
        let wall_ms = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map(|d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
            .unwrap_or(0);
        Stamp {
            boot: self.boot,
            boottime_ms,
            wall_ms: wall_ms.saturating_add(self.wall_offset_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: u64, boottime_ms: i64, wall_ms: i64) -> Stamp {
        Stamp {
            boot: BootId(boot),
            boottime_ms,
            wall_ms,
        }
    }

    #[test]
    fn wall_clock_jump_within_a_boot_expires_nothing() {
        let deadline = at(1, 60_000, 1_060_000);
        let now = at(1, 10_000, 999_000_000);
        assert_eq!(deadline.until(now), Duration::from_secs(50));
        assert!(!deadline.reached(now));
    }

    #[test]
    fn a_deadline_keeps_the_time_it_had_left_at_the_last_heartbeat() {
        let deadline = at(1, 600_000, 1_600_000);
        let heartbeat = at(1, 570_000, 1_570_000);
        // The node was off for a day, the wall clock says 1970.
        let now = at(2, 5_000, 0);
        let rebased = deadline.rebase(heartbeat, now);
        assert_eq!(rebased.until(now), Duration::from_secs(30));
        assert_eq!(rebased.boot, BootId(2));
    }

    #[test]
    fn elapsed_time_is_kept_across_a_reboot_even_on_a_younger_boot() {
        let finished = at(1, 100_000, 100_000);
        let heartbeat = at(1, 400_000, 400_000);
        let now = at(2, 1_000, 90_000_000);
        let rebased = finished.rebase(heartbeat, now);
        assert_eq!(now.since(rebased), Duration::from_secs(300));
    }
}

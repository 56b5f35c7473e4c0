//! Schedule of an exec plugin: it runs at the start, before its credentials expire, and when the server refuses them.
//! It never runs twice at once, and less and less often while it does not help.

use std::time::Duration;

use tokio::time::Instant;

use super::failure::pause;

/// Before the end of what a plugin gave it is run again, when that lasts long enough.
const AHEAD: i64 = 60;
/// Between a run that helped and the next, when that is refused at once; doubles up to `LONGEST` while it goes on so.
const REFUSED: Duration = Duration::from_secs(1);
/// Between two runs that failed, at first.
const FAILED: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(120);
/// Credentials that the server accepted for so long count as good.
const GOOD: Duration = Duration::from_secs(300);

/// The runs of one plugin.
#[derive(Debug)]
pub(super) struct Turns {
    wanted: bool,
    /// Time at which its credentials are replaced, in seconds since 1970.
    renewal: Option<i64>,
    ran: Option<Instant>,
    /// Runs in a row that gave nothing good.
    failures: u32,
    /// Runs in a row whose result was refused soon.
    refusals: u32,
    not_before: Option<Instant>,
}

impl Turns {
    /// Without a plugin.
    pub(super) fn none() -> Self {
        Self {
            wanted: false,
            renewal: None,
            ran: None,
            failures: 0,
            refusals: 0,
            not_before: None,
        }
    }

    /// With one that was not run yet.
    pub(super) fn first() -> Self {
        Self {
            wanted: true,
            ..Self::none()
        }
    }

    /// Returns whether a run is needed.
    pub(super) fn wanted(&self) -> bool {
        self.wanted
    }

    /// Returns whether a run is due now.
    pub(super) fn due(&self, now: Instant, wall: i64) -> bool {
        (self.wanted || self.renewal.is_some_and(|at| wall >= at))
            && self.not_before.is_none_or(|at| now >= at)
    }

    /// Returns the time until the next run is due, if nothing else happens.
    pub(super) fn rest(&self, now: Instant, wall: i64) -> Duration {
        let until = |at: Instant| at.saturating_duration_since(now);
        let earliest = self.not_before.map_or(Duration::ZERO, until);
        if self.wanted {
            return earliest;
        }
        self.renewal.map_or(Duration::MAX, |at| {
            let seconds = u64::try_from(at.saturating_sub(wall)).unwrap_or(0);
            Duration::from_secs(seconds).max(earliest)
        })
    }

    /// The server refuses what it gave.
    pub(super) fn refused(&mut self, now: Instant) {
        self.wanted = true;
        let lasted = self.ran.map(|ran| now.saturating_duration_since(ran));
        self.refusals = match lasted {
            Some(lasted) if lasted < GOOD => self.refusals.saturating_add(1),
            _ => 0,
        };
        let wait = match self.refusals {
            0 => Duration::ZERO,
            refusals => pause(refusals, REFUSED, LONGEST),
        };
        self.not_before = self.ran.map(|ran| ran + wait);
    }

    /// It has given something that is good until then.
    pub(super) fn gave(&mut self, now: Instant, wall: i64, until: Option<i64>) {
        // Renewed in time: nobody has refused what it gave before.
        if !std::mem::take(&mut self.wanted) {
            self.refusals = 0;
        }
        self.ran = Some(now);
        let left = until.map(|until| until.saturating_sub(wall));
        let wait = if left.is_some_and(|left| left <= 0) {
            // It is over already; asked at once, the plugin says the same.
            self.failures = self.failures.saturating_add(1);
            pause(self.failures, FAILED, LONGEST)
        } else {
            self.failures = 0;
            REFUSED
        };
        self.not_before = Some(now + wait);
        self.renewal = until
            .zip(left)
            .map(|(until, left)| until - (left / 10).clamp(0, AHEAD));
    }

    /// It has given nothing. Returns how long it is left alone.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        self.wanted = true;
        self.failures = self.failures.saturating_add(1);
        let wait = pause(self.failures, FAILED, LONGEST);
        self.not_before = Some(now + wait);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: i64 = 1_800_000_000;

    fn later(now: Instant, seconds: u64) -> Instant {
        now + Duration::from_secs(seconds)
    }

    #[tokio::test]
    async fn a_plugin_is_run_once_and_again_before_the_end_of_what_it_gave() {
        let now = Instant::now();
        assert!(!Turns::none().due(now, NOON));
        assert_eq!(Turns::none().rest(now, NOON), Duration::MAX);
        for (lasts, renewed_after) in [(3600, 3540), (900, 840), (100, 90), (20, 18), (3, 3)] {
            let mut turns = Turns::first();
            assert!(turns.due(now, NOON));
            turns.gave(now, NOON, Some(NOON + lasts));
            for (after, due) in [(renewed_after - 1, false), (renewed_after, true)] {
                let then = later(now, u64::try_from(after).unwrap());
                assert_eq!(turns.due(then, NOON + after), due, "{lasts} {after}");
            }
            let rest = turns.rest(now, NOON).as_secs();
            assert_eq!(i64::try_from(rest).unwrap(), renewed_after, "{lasts}");
        }
        let mut forever = Turns::first();
        forever.gave(now, NOON, None);
        assert!(!forever.due(later(now, 1 << 30), NOON + (1 << 30)));
    }

    #[tokio::test]
    async fn what_is_refused_after_a_good_time_is_replaced_at_once() {
        let now = Instant::now();
        let mut turns = Turns::first();
        turns.gave(now, NOON, None);
        let then = later(now, GOOD.as_secs());
        turns.refused(then);
        assert!(turns.due(then, NOON) && turns.wanted());
        assert_eq!(turns.rest(then, NOON), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_plugin_that_does_not_help_is_run_ever_more_seldom() {
        /// Runs within an hour.
        fn runs(happens: impl Fn(&mut Turns, Instant, i64)) -> usize {
            let begun = Instant::now();
            let mut turns = Turns::first();
            let mut runs = 0;
            for second in 0..3600 {
                let now = later(begun, second);
                let wall = NOON + i64::try_from(second).unwrap();
                if turns.due(now, wall) {
                    runs += 1;
                    happens(&mut turns, now, wall);
                }
            }
            runs
        }
        let failed = runs(|turns, now, _| {
            turns.failed(now);
        });
        let refused = runs(|turns, now, wall| {
            turns.gave(now, wall, None);
            turns.refused(now);
        });
        let expired = runs(|turns, now, wall| turns.gave(now, wall, Some(wall - 1)));
        for runs in [failed, refused, expired] {
            assert!((30..=60).contains(&runs), "{failed} {refused} {expired}");
        }
        // What ends within moments is renewed as often as that, at most once a second.
        let short = runs(|turns, now, wall| turns.gave(now, wall, Some(wall + 1)));
        assert!(short <= 3600);
    }
}

//! Pause for a volume after a failed step; upstream's `exponentialbackoff`.

use std::time::Duration;

use crate::types::Stamp;

/// After the first failure.
pub const INITIAL: Duration = Duration::from_millis(500);
/// At most.
pub const MAX: Duration = Duration::from_secs(122);

/// Current back-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// Length of the pause.
    pub wait: Duration,
    /// End of the back-off.
    pub until: Stamp,
}

impl BackOff {
    /// The back-off after one more failure.
    pub fn after(previous: Option<Self>, now: Stamp) -> Self {
        let wait = previous.map_or(INITIAL, |p| p.wait.saturating_mul(2).min(MAX));
        Self {
            wait,
            until: now.plus(wait),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::BootId;

    #[test]
    fn it_doubles_from_half_a_second_to_two_minutes() {
        let now = Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms: 0,
        };
        let mut last = None;
        let waits: Vec<u128> = (0..10)
            .map(|_| {
                let next = BackOff::after(last, now);
                last = Some(next);
                assert_eq!(next.until, now.plus(next.wait));
                next.wait.as_millis()
            })
            .collect();
        assert_eq!(
            waits,
            [
                500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 122_000, 122_000
            ]
        );
    }
}

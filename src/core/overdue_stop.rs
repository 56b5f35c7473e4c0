//! Steps that are due while the runtime does not answer a stop.
//!
//! The input is the time that the runtime was given. The output is the next step, and its time after the call. A
//! runtime answers soon after the grace period: it has killed the container by then. A process that the kernel does not
//! end can delay the answer, as can a client that does not read the output of a container.

use std::time::Duration;

/// Open streams to the container are ended this long after its grace period: those who read have seen its end by then.
pub const STREAMS_AFTER: Duration = Duration::from_secs(3);
/// The first warning comes this long after the grace period.
pub const WARNING_AFTER: Duration = Duration::from_secs(10);
/// From the first warning to the second. Each gap after that is twice as long.
const FIRST_GAP: Duration = Duration::from_secs(60);

/// Step against a stop without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// End the open streams to what is stopped.
    EndStreams,
    /// Warn that it has not stopped yet.
    Warn,
}

/// Returns what is due, in order, each with the time since the call. `grace` is what the call gave the runtime.
pub fn steps(grace: Duration) -> impl Iterator<Item = (Duration, Overdue)> {
    let first = grace.saturating_add(WARNING_AFTER);
    let warnings = std::iter::successors(Some((first, FIRST_GAP)), |(at, gap)| {
        Some((at.saturating_add(*gap), gap.saturating_mul(2)))
    });
    let streams = (grace.saturating_add(STREAMS_AFTER), Overdue::EndStreams);
    std::iter::once(streams).chain(warnings.map(|(at, _)| (at, Overdue::Warn)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_end_before_the_first_warning_and_warnings_become_seldom() {
        let steps: Vec<(u64, Overdue)> = steps(Duration::from_secs(30))
            .take(5)
            .map(|(at, what)| (at.as_secs(), what))
            .collect();
        let expected = [
            (33, Overdue::EndStreams),
            (40, Overdue::Warn),
            (100, Overdue::Warn),
            (220, Overdue::Warn),
            (460, Overdue::Warn),
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn an_endless_grace_period_overflows_nothing() {
        assert!(
            steps(Duration::MAX)
                .take(100)
                .all(|(at, _)| at == Duration::MAX)
        );
    }
}

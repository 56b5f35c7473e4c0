//! From one set of limits to another, in the order in which nothing inside gets more than the outside has.

use super::{Limits, NO_MEMORY_LIMIT};

impl Limits {
    /// Returns the limits to set before the containers inside are changed, and those to set after: limits grow first
    /// and shrink last. Upstream's `doPodResizeAction`.
    pub fn steps(from: Self, to: Self) -> (Self, Self) {
        let mut first = Self::default();
        let mut last = Self::default();
        if from.shares != to.shares {
            let step = if to.shares > from.shares {
                &mut first
            } else {
                &mut last
            };
            step.shares = to.shares;
        }
        let (had, gets) = (quota(from), quota(to));
        if from.quota != to.quota {
            let period = to
                .quota
                .or(from.quota)
                .map_or(100_000, |(_, period)| period);
            let step = if gets > had { &mut first } else { &mut last };
            step.quota = Some(to.quota.unwrap_or((-1, period)));
        }
        if from.memory != to.memory {
            let gets = to.memory.unwrap_or(NO_MEMORY_LIMIT);
            let step = if gets > from.memory.unwrap_or(NO_MEMORY_LIMIT) {
                &mut first
            } else {
                &mut last
            };
            step.memory = Some(gets);
        }
        (first, last)
    }
}

impl Limits {
    /// Returns the limits with none where there is none, to be set whatever there was.
    pub fn complete(self) -> Self {
        let period = self.quota.map_or(100_000, |(_, period)| period);
        Self {
            shares: self.shares,
            quota: Some(self.quota.unwrap_or((-1, period))),
            memory: Some(self.memory.unwrap_or(NO_MEMORY_LIMIT)),
        }
    }
}

/// The quota as a number to compare by; no limit is the most.
fn quota(of: Limits) -> i64 {
    of.quota
        .map(|(quota, _)| quota)
        .filter(|quota| *quota >= 0)
        .unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_limits_take_away_what_is_none_of_them() {
        let free = Limits::default().complete();
        assert_eq!(free.quota, Some((-1, 100_000)));
        assert_eq!(free.memory, Some(NO_MEMORY_LIMIT));
        let bound = Limits {
            shares: Some(512),
            quota: Some((50_000, 200_000)),
            memory: Some(1 << 20),
        };
        assert_eq!(bound.complete(), bound);
    }

    #[test]
    fn limits_grow_first_and_shrink_last() {
        let of = |shares: u64, quota: Option<i64>, memory: Option<u64>| Limits {
            shares: Some(shares),
            quota: quota.map(|q| (q, 100_000)),
            memory,
        };
        let none = Limits::default();
        let small = of(512, Some(50_000), Some(1 << 20));
        let large = of(1024, Some(100_000), Some(2 << 20));
        let free = of(512, None, None);
        let lifted = Limits {
            shares: None,
            ..of(0, Some(-1), Some(NO_MEMORY_LIMIT))
        };
        let bound = Limits {
            shares: None,
            ..small
        };
        let mixed = of(1024, Some(50_000), Some(1 << 20));
        for (what, from, to, first, last) in [
            ("nothing changes", small, small, none, none),
            ("all grows", small, large, large, none),
            ("all shrinks", large, small, none, small),
            ("limits go away", small, free, lifted, none),
            ("limits come", free, small, none, bound),
            (
                "requests grow alone",
                small,
                mixed,
                Limits {
                    shares: Some(1024),
                    ..none
                },
                none,
            ),
            (
                "requests shrink and limits grow",
                of(1024, Some(50_000), Some(1 << 20)),
                of(512, Some(100_000), Some(1 << 20)),
                Limits {
                    quota: Some((100_000, 100_000)),
                    ..none
                },
                Limits {
                    shares: Some(512),
                    ..none
                },
            ),
        ] {
            assert_eq!(Limits::steps(from, to), (first, last), "{what}");
        }
    }
}

//! Choice of the events to emit: repetitions are counted, floods are cut.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::types::{Event, Stamp};

/// Events that are the same and no further apart than this are one; upstream's aggregation interval.
const WINDOW: Duration = Duration::from_secs(600);
/// Distinct events remembered; upstream's `maxLruCacheEntries`.
const CAPACITY: usize = 4096;

/// Rate limit of the events, without repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRate {
    /// `eventRecordQPS`: events per second in the long run; 0 for no limit.
    pub qps: u32,
    /// `eventBurst`: events at once after a quiet time; means nothing without a limit. 0 is taken for 1.
    pub burst: u32,
}

impl Default for EventRate {
    fn default() -> Self {
        Self {
            qps: 50,
            burst: 100,
        }
    }
}

/// Decision about an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is emitted, as the occurrence `count` in a row.
    Tell { count: u64 },
    /// It is a repetition that is only counted.
    Repeated,
    /// There are too many at once.
    TooMany,
}

struct Seen {
    count: u64,
    last: Stamp,
    turn: u64,
}

/// Remembers recent events, the least recently used ones are forgotten first.
#[derive(Default)]
pub(super) struct Aggregator {
    seen: HashMap<Arc<Event>, Seen>,
    by_turn: BTreeMap<u64, Arc<Event>>,
    turn: u64,
    rate: EventRate,
    tokens: Option<Bucket>,
}

/// Thousandths of tokens, so that none is lost between two calls within one refill period.
struct Bucket {
    milli_tokens: u64,
    filled: Stamp,
}

impl Aggregator {
    /// Limits the emitted events from now on, beginning with a full burst.
    pub(super) fn limit(&mut self, rate: EventRate) {
        self.rate = rate;
        self.tokens = None;
    }

    pub(super) fn take(&mut self, event: &Event, now: Stamp) -> Verdict {
        let count = self.count(event, now);
        if !count.is_power_of_two() {
            return Verdict::Repeated;
        }
        match self.spend(now) {
            true => Verdict::Tell { count },
            false => Verdict::TooMany,
        }
    }

    fn count(&mut self, event: &Event, now: Stamp) -> u64 {
        self.turn += 1;
        let turn = self.turn;
        if let Some(seen) = self.seen.get_mut(event) {
            seen.count = match now.since(seen.last) > WINDOW {
                true => 1,
                false => seen.count + 1,
            };
            seen.last = now;
            if let Some(key) = self.by_turn.remove(&seen.turn) {
                self.by_turn.insert(turn, key);
            }
            seen.turn = turn;
            return seen.count;
        }
        while self.seen.len() >= CAPACITY
            && let Some((_, oldest)) = self.by_turn.pop_first()
        {
            self.seen.remove(&oldest);
        }
        let key = Arc::new(event.clone());
        self.by_turn.insert(turn, Arc::clone(&key));
        let seen = Seen {
            count: 1,
            last: now,
            turn,
        };
        self.seen.insert(key, seen);
        1
    }

    fn spend(&mut self, now: Stamp) -> bool {
        if self.rate.qps == 0 {
            return true;
        }
        let full = u64::from(self.rate.burst.max(1)) * 1000;
        let bucket = self.tokens.get_or_insert(Bucket {
            milli_tokens: full,
            filled: now,
        });
        let passed = u64::try_from(now.since(bucket.filled).as_millis()).unwrap_or(u64::MAX);
        bucket.milli_tokens = bucket
            .milli_tokens
            .saturating_add(passed.saturating_mul(self.rate.qps.into()))
            .min(full);
        bucket.filled = now;
        match bucket.milli_tokens.checked_sub(1000) {
            Some(left) => {
                bucket.milli_tokens = left;
                true
            }
            None => false,
        }
    }

    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        assert_eq!(self.seen.len(), self.by_turn.len());
        self.seen.len()
    }
}

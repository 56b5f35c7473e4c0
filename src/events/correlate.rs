//! Which Event objects the API server gets: repetitions are counted in the object there is, similar events are
//! combined, and one object cannot flood the rest. Upstream: client-go's `EventCorrelator`.
//!
//! Pure over its own memory: time is an argument, and what is remembered is bounded.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use crate::types::{Event, EventType, PodRef, Stamp};

/// Distinct keys that each memory holds; the least recently used are forgotten first.
const CAPACITY: usize = 4096;
/// Events no further apart than this belong together.
const WINDOW: Duration = Duration::from_secs(600);
/// Distinct messages within [`WINDOW`] from which on events of a kind are combined.
const SIMILAR: usize = 10;
/// Events of one object at once, and how long until there is room for one more.
const SPAM: (u32, Duration) = (25, Duration::from_secs(300));
/// What the message of combined events begins with.
const COMBINED: &str = "(combined from similar events): ";

/// A bounded memory.
struct Lru<K, V> {
    entries: HashMap<K, (u64, V)>,
    by_turn: BTreeMap<u64, K>,
    turn: u64,
}

impl<K, V> Default for Lru<K, V> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            by_turn: BTreeMap::new(),
            turn: 0,
        }
    }
}

impl<K: Clone + Eq + Hash, V> Lru<K, V> {
    /// The entry of a key, made by `new` if there is none.
    fn entry(&mut self, key: &K, new: impl FnOnce() -> V) -> &mut V {
        self.turn += 1;
        let turn = self.turn;
        if let Some((old, _)) = self.entries.get(key) {
            self.by_turn.remove(old);
        } else {
            while self.entries.len() >= CAPACITY
                && let Some((_, oldest)) = self.by_turn.pop_first()
            {
                self.entries.remove(&oldest);
            }
        }
        self.by_turn.insert(turn, key.clone());
        let entry = self.entries.entry(key.clone());
        let (used, value) = entry.or_insert_with(|| (turn, new()));
        *used = turn;
        value
    }

    fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|(_, value)| value)
    }
}

/// What makes events the same object of the API server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pod: Option<PodRef>,
    /// `None` when combined.
    container: Option<String>,
    kind: EventType,
    reason: String,
    /// `None` when combined.
    message: Option<String>,
}

/// An Event object as it is to be in the API server.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Told {
    /// What it says; of combined ones the newest.
    pub(super) event: Event,
    /// How often it happened.
    pub(super) count: u32,
    /// The first time.
    pub(super) first: Stamp,
    /// The last time.
    pub(super) last: Stamp,
    /// Name of the object in the API server, once it was made.
    pub(super) name: Option<String>,
}

struct Similar {
    messages: BTreeSet<String>,
    last: Stamp,
}

struct Room {
    tokens: f64,
    at: Stamp,
}

/// Remembers what was told.
#[derive(Default)]
pub(super) struct Correlator {
    similar: Lru<Key, Similar>,
    told: Lru<Key, Told>,
    room: Lru<Option<PodRef>, Room>,
}

impl Correlator {
    /// An event happened. Returns the object to write, or `None` when there are too many of this pod.
    pub(super) fn take(&mut self, mut event: Event, now: Stamp) -> Option<Key> {
        let combined = Key {
            pod: event.pod.clone(),
            container: None,
            kind: event.kind,
            reason: event.reason.clone(),
            message: None,
        };
        let similar = self.similar.entry(&combined, || Similar {
            messages: BTreeSet::new(),
            last: now,
        });
        if now.since(similar.last) > WINDOW {
            similar.messages.clear();
        }
        similar.last = now;
        similar.messages.insert(event.message.clone());
        let key = if similar.messages.len() < SIMILAR {
            Key {
                container: event.container.clone(),
                message: Some(event.message.clone()),
                ..combined
            }
        } else {
            // Bounded; which one goes does not matter.
            similar.messages.pop_first();
            event.message = format!("{COMBINED}{}", event.message);
            super::shorten(&mut event.message);
            combined
        };
        let told = self.told.entry(&key, || Told {
            event: event.clone(),
            count: 0,
            first: now,
            last: now,
            name: None,
        });
        if now.since(told.last) > WINDOW {
            told.count = 0;
            told.first = now;
            told.name = None;
        }
        told.count = told.count.saturating_add(1);
        told.last = now;
        told.event = event;
        self.has_room(&key.pod, now).then_some(key)
    }

    fn has_room(&mut self, pod: &Option<PodRef>, now: Stamp) -> bool {
        let (burst, refill) = SPAM;
        let full = f64::from(burst);
        let room = self.room.entry(pod, || Room {
            tokens: full,
            at: now,
        });
        let gained = now.since(room.at).as_secs_f64() / refill.as_secs_f64();
        room.tokens = (room.tokens + gained).min(full);
        room.at = now;
        if room.tokens < 1.0 {
            return false;
        }
        room.tokens -= 1.0;
        true
    }

    /// The object of a key as it is to be now; `None` when it was forgotten meanwhile.
    pub(super) fn told(&mut self, key: &Key) -> Option<Told> {
        self.told.get_mut(key).map(|told| told.clone())
    }

    /// The object of a key was made, under `name`; `None` when the API server does not have it any more.
    pub(super) fn named(&mut self, key: &Key, name: Option<String>) {
        if let Some(told) = self.told.get_mut(key) {
            told.name = name;
        }
    }

    #[cfg(test)]
    pub(super) fn remembered(&self) -> [usize; 3] {
        [
            self.similar.entries.len(),
            self.told.entries.len(),
            self.room.entries.len(),
        ]
    }
}

#[cfg(test)]
mod tests;

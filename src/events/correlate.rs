//! Correlation of events into Event objects of the API server: repetitions are counted in an existing object, similar
//! events are combined, and one object cannot flood the rest. Upstream: client-go's `EventCorrelator`.
//!
//! Pure over its own memory: time is an argument, and what is remembered is bounded.
//!
//! **Invariant:** an object has its name before it is first sent, and keeps it: an event that this agent or a later one
//! sends again is the same object.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use serde::Serialize;

use super::record::{RoomRecord, ToldRecord};
use crate::types::{Event, EventType, PodRef, Stamp};

/// Distinct keys that each memory holds; the least recently used are forgotten first.
const CAPACITY: usize = 4096;
/// Events no further apart than this belong together.
pub(super) const WINDOW: Duration = Duration::from_secs(600);
/// Distinct messages within [`WINDOW`] from which on events of a kind are combined.
const SIMILAR: usize = 10;
/// Events of one object at once, and how long until there is room for one more.
const SPAM: (u32, Duration) = (25, Duration::from_secs(300));
/// Prefix of the message of combined events.
pub(super) const COMBINED: &str = "(combined from similar events): ";
/// Room from which on it is not worth a record: a pod that starts takes less than what is missing then.
const WORTHLESS_ROOM: f64 = 20.0;

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
    /// The entry of a key, made by `new` if there is none, and what was forgotten for it.
    fn entry(&mut self, key: &K, new: impl FnOnce() -> V) -> (&mut V, Option<(K, V)>) {
        self.turn += 1;
        let turn = self.turn;
        let mut forgotten = None;
        if let Some((old, _)) = self.entries.get(key) {
            self.by_turn.remove(old);
        } else {
            while self.entries.len() >= CAPACITY
                && let Some((_, oldest)) = self.by_turn.pop_first()
            {
                forgotten = self.entries.remove(&oldest).map(|(_, v)| (oldest, v));
            }
        }
        self.by_turn.insert(turn, key.clone());
        let entry = self.entries.entry(key.clone());
        let (used, value) = entry.or_insert_with(|| (turn, new()));
        *used = turn;
        (value, forgotten)
    }

    fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(_, value)| value)
    }

    fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|(_, value)| value)
    }
}

/// Identity of an object of the API server: events with the same key are counted in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub(super) struct Key {
    pub(super) pod: Option<PodRef>,
    /// `None` when combined.
    container: Option<String>,
    kind: EventType,
    reason: String,
    /// `None` when combined.
    message: Option<String>,
}

impl Key {
    /// Returns the key of an event that has an object of its own.
    pub(super) fn of(event: &Event) -> Self {
        Self {
            container: event.container.clone(),
            message: Some(event.message.clone()),
            ..Self::combined(event)
        }
    }

    /// Returns the key of an event that shares an object with similar ones.
    pub(super) fn combined(event: &Event) -> Self {
        Self {
            pod: event.pod.clone(),
            container: None,
            kind: event.kind,
            reason: event.reason.clone(),
            message: None,
        }
    }

    pub(super) fn is_combined(&self) -> bool {
        self.message.is_none()
    }
}

/// An Event object as it is to be in the API server.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Told {
    /// Content of the event; of combined ones the newest.
    pub(super) event: Event,
    /// Number of occurrences.
    pub(super) count: u32,
    /// The first time.
    pub(super) first: Stamp,
    /// The last time.
    pub(super) last: Stamp,
    /// Name of the object in the API server.
    pub(super) name: String,
    /// True if the API server has it.
    pub(super) made: bool,
    /// Its place among those that wait to be written.
    pub(super) place: Option<u64>,
}

impl Told {
    /// Returns whether a later repetition is counted in it.
    fn counts(&self, now: Stamp) -> bool {
        // What the API server was not told yet has no end: it would never be told else.
        self.place.is_some() || now.since(self.last) <= WINDOW
    }
}

struct Similar {
    messages: BTreeSet<String>,
    last: Stamp,
}

struct Room {
    tokens: f64,
    at: Stamp,
}

impl Room {
    fn full() -> f64 {
        f64::from(SPAM.0)
    }

    fn tokens(&self, now: Stamp) -> f64 {
        let gained = now.since(self.at).as_secs_f64() / SPAM.1.as_secs_f64();
        (self.tokens + gained).min(Self::full())
    }
}

/// Longest name of an object, in bytes.
const MAX_NAME: usize = 253;

/// Makes up names of objects, each but once.
struct Names {
    node: String,
    sequence: u32,
}

impl Names {
    /// Upstream's name: what the event is about, and when. Unique as well when many have the same millisecond, and
    /// after the wall clock was set back.
    fn next(&mut self, event: &Event, now: Stamp) -> String {
        let about = event.pod.as_ref().map_or(&self.node, |pod| &pod.name);
        self.sequence = self.sequence.wrapping_add(1) % 1_000_000;
        let nanoseconds = now.wall_ms.saturating_mul(1_000_000) + i64::from(self.sequence);
        let end = format!(".{nanoseconds:x}");
        // Names of pods are ASCII.
        let room = MAX_NAME.saturating_sub(end.len());
        let about = about.get(..room).unwrap_or(about);
        format!("{}{end}", about.trim_end_matches(['.', '-']))
    }
}

/// Memory of the sent events.
pub(super) struct Correlator {
    names: Names,
    similar: Lru<Key, Similar>,
    told: Lru<Key, Told>,
    room: Lru<Option<PodRef>, Room>,
}

/// Result of taking an event.
pub(super) struct Taken {
    /// The object to write, or `None` when there are too many of this pod.
    pub(super) key: Option<Key>,
    /// The object that had to be forgotten for it.
    pub(super) forgotten: Option<(Key, Told)>,
}

impl Correlator {
    /// Remembers nothing yet. Names are counted from `sequence`, which should not be the same each time.
    pub(super) fn new(node: impl Into<String>, sequence: u32) -> Self {
        Self {
            names: Names {
                node: node.into(),
                sequence,
            },
            similar: Lru::default(),
            told: Lru::default(),
            room: Lru::default(),
        }
    }

    /// An event happened.
    pub(super) fn take(&mut self, mut event: Event, now: Stamp) -> Taken {
        let combined = Key::combined(&event);
        let (similar, _) = self.similar.entry(&combined, || Similar {
            messages: BTreeSet::new(),
            last: now,
        });
        if now.since(similar.last) > WINDOW {
            similar.messages.clear();
        }
        similar.last = now;
        similar.messages.insert(event.message.clone());
        let key = if similar.messages.len() < SIMILAR {
            Key::of(&event)
        } else {
            // Bounded; which one goes does not matter.
            similar.messages.pop_first();
            event.message = format!("{COMBINED}{}", event.message);
            super::shorten(&mut event.message);
            combined
        };
        let names = &mut self.names;
        let mut anew = |event: &Event| Told {
            event: event.clone(),
            count: 0,
            first: now,
            last: now,
            name: names.next(event, now),
            made: false,
            place: None,
        };
        let (told, forgotten) = self.told.entry(&key, || anew(&event));
        if !told.counts(now) {
            *told = anew(&event);
        }
        told.count = told.count.saturating_add(1);
        told.last = now;
        told.event = event;
        let has_room = self.has_room(&key.pod, now);
        Taken {
            key: has_room.then_some(key),
            forgotten,
        }
    }

    fn has_room(&mut self, pod: &Option<PodRef>, now: Stamp) -> bool {
        let (room, _) = self.room.entry(pod, || Room {
            tokens: Room::full(),
            at: now,
        });
        room.tokens = room.tokens(now);
        room.at = now;
        if room.tokens < 1.0 {
            return false;
        }
        room.tokens -= 1.0;
        true
    }

    /// The object of a key as it is to be now; `None` when it was forgotten.
    pub(super) fn told(&self, key: &Key) -> Option<&Told> {
        self.told.get(key)
    }

    /// As [`Self::told`], mutable.
    pub(super) fn told_mut(&mut self, key: &Key) -> Option<&mut Told> {
        self.told.get_mut(key)
    }

    /// Returns the record of an object if it is worth keeping: it waits, or the API server counts repetitions in it.
    pub(super) fn record(&self, key: &Key, now: Stamp) -> Option<ToldRecord> {
        let told = self.told.get(key)?;
        let worth = told.place.is_some() || (told.made && told.counts(now));
        worth.then(|| ToldRecord::new(key, told))
    }

    /// Returns the record of the number of events that a pod has caused, if it is worth keeping.
    pub(super) fn room(&self, pod: &Option<PodRef>, now: Stamp) -> Option<RoomRecord> {
        let room = self.room.get(pod)?;
        (room.tokens(now) < WORTHLESS_ROOM).then(|| RoomRecord {
            pod: pod.clone(),
            tokens: room.tokens,
            at: room.at,
        })
    }

    /// Takes over what another agent has kept of an object; from the oldest to the newest.
    pub(super) fn restore(&mut self, key: &Key, told: Told, now: Stamp) {
        if now.since(told.last) <= WINDOW {
            let (similar, _) = self.similar.entry(&Key::combined(&told.event), || Similar {
                messages: BTreeSet::new(),
                last: told.last,
            });
            similar.last = told.last;
            if key.is_combined() {
                // The messages from before they were combined may be forgotten; nothing says what these stand for.
                let missing = (SIMILAR - 1).saturating_sub(similar.messages.len());
                let unknown = (0..missing).map(|n| format!("\0{n}"));
                similar.messages.extend(unknown);
            } else if similar.messages.len() < SIMILAR - 1 {
                similar.messages.insert(told.event.message.clone());
            }
        }
        // There is one record of a key.
        self.told.entry(key, || told);
    }

    /// Takes over what another agent has kept of how many events a pod has caused.
    pub(super) fn restore_room(&mut self, record: RoomRecord) {
        let room = || Room {
            tokens: record.tokens.clamp(0.0, Room::full()),
            at: record.at,
        };
        self.room.entry(&record.pod, room);
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

//! Event objects that wait for the API server, over what the correlator remembers; and which records of both may
//! differ from the store's. Pure over its own memory: time is an argument.
//!
//! The waiting objects are bounded by number ([`PLACES`]) and by size ([`BYTES`]). When there are more, the oldest is
//! dropped: users search for the newest events, and all of them are in the journal. An object keeps its place while it
//! is counted up, so a repetition during an outage takes one place and one request.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use super::correlate::{Correlator, Key, Told};
use super::record::Kept;
use crate::types::{Event, PodRef, Stamp};

/// Objects that wait to be written.
pub(super) const PLACES: usize = 1000;
/// Approximate limit of their size.
pub(super) const BYTES: usize = 1 << 20;
/// Age from which an event is not sent: a reachable API server would have forgotten it by now (upstream's
/// `--event-ttl`).
pub(super) const TOO_OLD: Duration = Duration::from_secs(3600);

struct Place {
    key: Key,
    bytes: usize,
    /// Number of failures of the API server on it; the end of the pause after them follows. Not recorded.
    failures: u32,
    held: Option<Stamp>,
}

/// The object that is being written.
struct Sending {
    key: Key,
    /// It has changed since.
    again: bool,
}

/// Waiting objects, and the correlator's memory.
pub(super) struct Queue {
    correlator: Correlator,
    places: BTreeMap<u64, Place>,
    bytes: usize,
    next: u64,
    sending: Option<Sending>,
    /// Objects whose records may differ.
    changed: HashSet<Key>,
    /// Likewise, how many events there may be.
    spent: HashSet<Option<PodRef>>,
}

/// Objects dropped for an event.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Dropped {
    /// It is one too many of its pod.
    pub(super) spam: bool,
    /// Objects that had to go for it.
    pub(super) full: u64,
}

/// Objects restored from another agent's records.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Restored {
    /// Objects that wait.
    pub(super) waiting: usize,
    /// Number of objects that are too old to be sent.
    pub(super) too_old: u64,
    /// Objects for which there was no room.
    pub(super) full: u64,
}

/// Next object to write.
pub(super) enum Next {
    Nothing,
    /// It happened too long ago; it does not wait any more.
    TooOld,
    /// All that waits is left alone for so long.
    Held(Duration),
    Object(Key),
}

impl Queue {
    pub(super) fn new(correlator: Correlator) -> Self {
        Self {
            correlator,
            places: BTreeMap::new(),
            bytes: 0,
            next: 0,
            sending: None,
            changed: HashSet::new(),
            spent: HashSet::new(),
        }
    }

    /// Takes over what another agent has kept.
    pub(super) fn restore(&mut self, kept: Kept, now: Stamp) -> Restored {
        let mut restored = Restored::default();
        let mut told = kept.told;
        told.sort_by_key(|record| record.last().wall_ms);
        for record in told {
            let (key, mut told) = record.into_told();
            if told.place.is_some() && now.since(told.last) > TOO_OLD {
                told.place = None;
                restored.too_old += 1;
            }
            let place = told.place.take();
            self.correlator.restore(&key, told, now);
            // Written again or deleted, unless it is as it should be.
            self.changed.insert(key.clone());
            if let Some(place) = place {
                let taken = self.places.contains_key(&place);
                self.put(key, if taken { self.next } else { place });
            }
        }
        for room in kept.rooms {
            self.spent.insert(room.pod.clone());
            self.correlator.restore_room(room);
        }
        restored.full = self.make_room();
        restored.waiting = self.places.len();
        restored
    }

    /// An event happened.
    pub(super) fn take(&mut self, event: Event, now: Stamp) -> Dropped {
        let taken = self.correlator.take(event, now);
        let mut dropped = Dropped::default();
        if let Some((key, told)) = taken.forgotten {
            if let Some(place) = told.place {
                self.leave(place);
                dropped.full += 1;
            }
            self.changed.insert(key);
        }
        let Some(key) = taken.key else {
            dropped.spam = true;
            return dropped;
        };
        self.spent.insert(key.pod.clone());
        self.changed.insert(key.clone());
        match &mut self.sending {
            Some(sending) if sending.key == key => sending.again = true,
            _ => self.join(key),
        }
        dropped.full += self.make_room();
        dropped
    }

    /// The object to be written next.
    pub(super) fn next(&mut self, now: Stamp) -> Next {
        let mut held: Option<Duration> = None;
        let mut too_old = None;
        // What the server has not failed on comes first.
        let mut due: Option<(u32, &Key)> = None;
        for (place, waits) in &self.places {
            let told = self.correlator.told(&waits.key);
            if told.is_none_or(|told| now.since(told.last) > TOO_OLD) {
                too_old = Some(*place);
                break;
            }
            match waits.held.filter(|until| !until.reached(now)) {
                None if due.is_none_or(|(failures, _)| waits.failures < failures) => {
                    due = Some((waits.failures, &waits.key));
                }
                None => {}
                Some(until) => {
                    let rest = until.until(now);
                    held = Some(held.map_or(rest, |least| least.min(rest)));
                }
            }
            if matches!(due, Some((0, _))) {
                break;
            }
        }
        if let Some(place) = too_old {
            self.drop_at(place);
            return Next::TooOld;
        }
        if let Some((_, key)) = due {
            return Next::Object(key.clone());
        }
        held.map_or(Next::Nothing, Next::Held)
    }

    /// Begins to write an object, unless it waits no more. From here on a repetition is another change of it, to be written after this one.
    pub(super) fn begin(&mut self, key: &Key) -> Option<Told> {
        let told = self.correlator.told(key).filter(|t| t.place.is_some());
        let told = told?.clone();
        self.sending = Some(Sending {
            key: key.clone(),
            again: false,
        });
        Some(told)
    }

    /// The API server has what was begun.
    pub(super) fn sent(&mut self) {
        self.end(true);
    }

    /// The API server will not have what was begun.
    pub(super) fn refused(&mut self) {
        self.end(false);
    }

    /// Puts the object back after a failed attempt, at its previous place.
    pub(super) fn failed(&mut self) {
        self.put_back();
    }

    /// The API server has failed on what was begun, maybe on nothing else: it is where it was, and left alone until
    /// what `hold` says of how often that was so.
    pub(super) fn postponed(&mut self, hold: impl FnOnce(u32) -> Stamp) {
        let key = self.put_back();
        let told = key.and_then(|key| self.correlator.told(&key)?.place);
        // What had to go meanwhile has no place.
        if let Some(waits) = told.and_then(|place| self.places.get_mut(&place)) {
            waits.failures = waits.failures.saturating_add(1);
            waits.held = Some(hold(waits.failures));
        }
    }

    fn put_back(&mut self) -> Option<Key> {
        let sending = self.sending.take()?;
        if sending.again {
            // It had to go, and has happened again.
            self.join(sending.key.clone());
        }
        Some(sending.key)
    }

    fn end(&mut self, made: bool) {
        let Some(sending) = self.sending.take() else {
            return;
        };
        let Some(told) = self.correlator.told_mut(&sending.key) else {
            return;
        };
        told.made |= made;
        if let Some(place) = told.place.take() {
            self.leave(place);
        }
        self.changed.insert(sending.key.clone());
        if sending.again {
            self.join(sending.key);
        }
    }

    /// To the end of those that wait, unless it waits already.
    fn join(&mut self, key: Key) {
        let waits = self.correlator.told(&key).is_none_or(|t| t.place.is_some());
        if !waits {
            self.put(key, self.next);
        }
    }

    fn put(&mut self, key: Key, place: u64) {
        let Some(told) = self.correlator.told_mut(&key) else {
            return;
        };
        told.place = Some(place);
        let bytes = size(&told.event);
        self.next = self.next.max(place.saturating_add(1));
        self.bytes += bytes;
        let waits = Place {
            key,
            bytes,
            failures: 0,
            held: None,
        };
        self.places.insert(place, waits);
    }

    fn leave(&mut self, place: u64) {
        if let Some(left) = self.places.remove(&place) {
            self.bytes = self.bytes.saturating_sub(left.bytes);
        }
    }

    /// Drops the oldest until there is room, but not what is being written.
    fn make_room(&mut self) -> u64 {
        let mut dropped = 0;
        while self.places.len() > PLACES || self.bytes > BYTES {
            let sending = self.sending.as_ref().map(|s| &s.key);
            let mut oldest = self.places.iter().filter(|(_, p)| Some(&p.key) != sending);
            let Some(place) = oldest.next().map(|(place, _)| *place) else {
                break;
            };
            self.drop_at(place);
            dropped += 1;
        }
        dropped
    }

    fn drop_at(&mut self, place: u64) {
        let Some(key) = self.places.get(&place).map(|p| p.key.clone()) else {
            return;
        };
        self.leave(place);
        if let Some(told) = self.correlator.told_mut(&key) {
            told.place = None;
        }
        self.changed.insert(key);
    }

    // ------------------------------------------------------------------------------------------ records

    /// Returns the correlator's memory.
    pub(super) fn memory(&self) -> &Correlator {
        &self.correlator
    }

    /// Up to `most` objects whose records may differ; they do not any more when they are written.
    pub(super) fn take_changed(&mut self, most: usize) -> Vec<Key> {
        let some: Vec<Key> = self.changed.iter().take(most).cloned().collect();
        some.iter().for_each(|key| {
            self.changed.remove(key);
        });
        some
    }

    /// As [`Self::take_changed`], of how many events there may be.
    pub(super) fn take_spent(&mut self, most: usize) -> Vec<Option<PodRef>> {
        let some: Vec<_> = self.spent.iter().take(most).cloned().collect();
        some.iter().for_each(|pod| {
            self.spent.remove(pod);
        });
        some
    }

    /// Marks these to be written (again).
    pub(super) fn mark(
        &mut self,
        keys: impl IntoIterator<Item = Key>,
        pods: impl IntoIterator<Item = Option<PodRef>>,
    ) {
        self.changed.extend(keys);
        self.spent.extend(pods);
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> (usize, usize) {
        (self.places.len(), self.bytes)
    }
}

/// Returns the approximate size of an object.
fn size(event: &Event) -> usize {
    let pod = event.pod.as_ref();
    let pod = pod.map_or(0, |p| {
        p.name.len() + p.namespace.len() + p.uid.as_str().len()
    });
    let container = event.container.as_ref().map_or(0, String::len);
    256 + pod + container + event.reason.len() + event.message.len()
}

#[cfg(test)]
mod tests;

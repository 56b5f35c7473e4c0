//! Records of Event objects kept across restarts, in table `objects`. `events/<namespace>/<hash>` is an object that
//! waits to be written, or in which the API server counts repetitions. `eventsources/<namespace>/<hash>` is the number
//! of further events that a pod (or the node) may cause. JSON, with nothing in it but the event itself. No part of a
//! key is a pod's UID: events of a pod are sent after the pod is gone, too.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::correlate::{COMBINED, Key, Told};
use crate::core::state::State;
use crate::core::state::kinds::{self, Change, Declared, Kind, Stored};
use crate::types::{Event, PodRef, Stamp};

/// Namespace of events about the node.
pub(super) const NODE_NAMESPACE: &str = "default";

/// An Event object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ToldRecord {
    /// Name of the object in the API server.
    name: String,
    event: Event,
    /// True if it stands for similar ones.
    combined: bool,
    count: u32,
    first: Stamp,
    last: Stamp,
    /// True if the API server has it.
    made: bool,
    /// Its place among those that wait; `null` when the API server knows all of it.
    place: Option<u64>,
}

impl ToldRecord {
    pub(super) fn new(key: &Key, told: &Told) -> Self {
        Self {
            name: told.name.clone(),
            event: told.event.clone(),
            combined: key.is_combined(),
            count: told.count,
            first: told.first,
            last: told.last,
            made: told.made,
            place: told.place,
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.place.is_some()
    }

    pub(super) fn last(&self) -> Stamp {
        self.last
    }

    pub(super) fn into_told(self) -> (Key, Told) {
        let key = self.key();
        let told = Told {
            event: self.event,
            count: self.count,
            first: self.first,
            last: self.last,
            name: self.name,
            made: self.made,
            place: self.place,
        };
        (key, told)
    }

    fn key(&self) -> Key {
        match self.combined {
            true => Key::combined(&self.event),
            false => Key::of(&self.event),
        }
    }
}

/// Number of further events that a pod, or the node, may cause.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RoomRecord {
    /// `None` for the node.
    pub(super) pod: Option<PodRef>,
    pub(super) tokens: f64,
    pub(super) at: Stamp,
}

impl Kind for ToldRecord {
    const DECLARED: Declared = kinds::EVENTS;
}

impl Kind for RoomRecord {
    const DECLARED: Declared = kinds::EVENT_SOURCES;
}

/// Returns the key of an Event object's record.
pub(super) fn told_key(key: &Key) -> kinds::Key<ToldRecord> {
    key_of(key.pod.as_ref(), key)
}

/// Returns the key of the record with a pod's rate-limit tokens for events.
pub(super) fn room_key(pod: &Option<PodRef>) -> kinds::Key<RoomRecord> {
    key_of(pod.as_ref(), pod)
}

fn key_of<K: Kind>(pod: Option<&PodRef>, of: &impl Serialize) -> kinds::Key<K> {
    let namespace = pod.map_or(NODE_NAMESPACE, |pod| &pod.namespace);
    // What is made of strings and choices always is JSON.
    let text = serde_json::to_vec(of).unwrap_or_default();
    let hash = Sha256::digest(text);
    let name: String = hash[..16].iter().map(|b| format!("{b:02x}")).collect();
    kinds::Key::new(namespace, &name)
}

/// Everything that was kept.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Event objects, in no order.
    pub(super) told: Vec<ToldRecord>,
    pub(super) rooms: Vec<RoomRecord>,
    /// The end of records that say nothing.
    pub(super) damaged: Vec<Change>,
}

impl Kept {
    /// Reads the stored records. Damaged ones are reported and left out.
    pub(super) fn read(state: &State) -> Self {
        let mut kept = Self::default();
        for record in state.all_stored::<ToldRecord>() {
            match parse(&record, |told| told_key(&told.key())) {
                Ok(told) => kept.told.push(told),
                Err(why) => kept.damaged(&record.key(), &why),
            }
        }
        for record in state.all_stored::<RoomRecord>() {
            match parse(&record, |room| room_key(&room.pod)) {
                Ok(room) => kept.rooms.push(room),
                Err(why) => kept.damaged(&record.key(), &why),
            }
        }
        kept
    }

    fn damaged<K: Kind>(&mut self, key: &kinds::Key<K>, why: &str) {
        tracing::warn!(
            %key,
            why,
            "cannot read the record of an event, ignoring it"
        );
        self.damaged.push(Change::new(key, None));
    }
}

fn parse<K: Kind>(
    record: &Stored<'_, K>,
    key_of: impl Fn(&K) -> kinds::Key<K>,
) -> Result<K, String> {
    let value = record.read().map_err(|error| error.source.to_string())?;
    match *key_of(&value) == *record.key() {
        true => Ok(value),
        false => Err("it is another one's".to_owned()),
    }
}

/// A stored Event object, for the user.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptEvent {
    /// Key of the record.
    pub key: String,
    /// Content of the event; of combined ones the newest, without the words that mark it as combined.
    pub event: Event,
    /// Namespace of the object in the API server.
    pub namespace: String,
    /// Name of the object in the API server.
    pub name: String,
    /// Number of occurrences, as of the record.
    pub count: u32,
    /// The first time.
    pub first: Stamp,
    /// The last time, as of the record.
    pub last: Stamp,
    /// True if the API server does not know all of it yet.
    pub waiting: bool,
}

/// Returns the stored Event objects; those that wait first, in the order in which they are sent.
pub fn kept_events(state: &State) -> Vec<KeptEvent> {
    let records = state.all_stored::<ToldRecord>();
    let mut found: Vec<_> = records
        .filter_map(|record| Some((record.key().to_string(), record.content()?)))
        .collect();
    found.sort_by_key(|(_, told)| (told.place.is_none(), told.place, told.last.wall_ms));
    found
        .into_iter()
        .map(|(key, told)| {
            let waiting = told.is_waiting();
            let mut event = told.event;
            if let Some(own) = event.message.strip_prefix(COMBINED) {
                event.message = own.to_owned();
            }
            let pod = event.pod.as_ref();
            let namespace = pod.map_or(NODE_NAMESPACE, |pod| &pod.namespace).to_owned();
            KeptEvent {
                key,
                namespace,
                name: told.name,
                count: told.count,
                first: told.first,
                last: told.last,
                waiting,
                event,
            }
        })
        .collect()
}

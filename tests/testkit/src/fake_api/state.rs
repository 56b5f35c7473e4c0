//! What the server stores: objects, and the history of their changes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

/// Resource (index), namespace, name.
pub(super) type Key = (usize, String, String);

pub(super) type Objects = BTreeMap<Key, Arc<Value>>;

/// One write.
pub(super) struct Change {
    pub(super) rv: u64,
    pub(super) resource: usize,
    pub(super) namespace: String,
    pub(super) old: Option<Arc<Value>>,
    /// After a deletion: what was deleted, with the version of its deletion.
    pub(super) new: Arc<Value>,
    pub(super) deleted: bool,
}

/// A token that the server gave out.
pub(super) struct IssuedToken {
    pub(super) namespace: String,
    pub(super) service_account: String,
    pub(super) audiences: Vec<String>,
    pub(super) expires: Timestamp,
    /// Resource index and uid of what it is bound to.
    pub(super) bound: Option<(Key, String)>,
}

/// The rest of a list that is read in pages.
pub(super) struct Page {
    pub(super) rest: Vec<Arc<Value>>,
    pub(super) rv: u64,
}

/// All objects at one moment: see `FakeApi::snapshot`.
#[derive(Clone)]
pub struct Snapshot {
    pub(super) objects: Objects,
    pub(super) rv: u64,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot({} objects at {})", self.objects.len(), self.rv)
    }
}

pub(super) struct State {
    pub(super) objects: Objects,
    pub(super) rv: u64,
    pub(super) history: Vec<Change>,
    /// Watches may not begin before this version.
    pub(super) compacted: u64,
    ids: u64,
    pub(super) pages: HashMap<String, Page>,
    pub(super) tokens: HashMap<String, IssuedToken>,
    /// What reads with `resourceVersion=0` see.
    pub(super) stale: Option<Snapshot>,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            objects: Objects::new(),
            rv: 100,
            history: Vec::new(),
            compacted: 0,
            ids: 0,
            pages: HashMap::new(),
            tokens: HashMap::new(),
            stale: None,
        }
    }

    /// Numbers that are never given twice, not even after a restore.
    pub(super) fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    pub(super) fn uid(&mut self) -> String {
        format!("00000000-0000-4000-8000-{:012x}", self.next_id())
    }

    pub(super) fn suffix(&mut self) -> String {
        const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
        let mut rest = self.next_id().wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (0..5)
            .map(|_| {
                let letter = LETTERS[usize::try_from(rest % LETTERS.len() as u64).unwrap_or(0)];
                rest /= LETTERS.len() as u64;
                char::from(letter)
            })
            .collect()
    }

    pub(super) fn get(&self, key: &Key) -> Option<Arc<Value>> {
        self.objects.get(key).cloned()
    }

    /// Everything of one resource, in one namespace or all.
    pub(super) fn of(objects: &Objects, resource: usize, namespace: &str) -> Vec<Arc<Value>> {
        objects
            .range((resource, namespace.to_owned(), String::new())..)
            .take_while(|((r, n, _), _)| *r == resource && (namespace.is_empty() || n == namespace))
            .map(|(_, object)| Arc::clone(object))
            .collect()
    }

    pub(super) fn put(&mut self, key: &Key, mut object: Value) -> Arc<Value> {
        self.rv += 1;
        object["metadata"]["resourceVersion"] = self.rv.to_string().into();
        let object = Arc::new(object);
        let old = self.objects.insert(key.clone(), Arc::clone(&object));
        self.history.push(Change {
            rv: self.rv,
            resource: key.0,
            namespace: key.1.clone(),
            old,
            new: Arc::clone(&object),
            deleted: false,
        });
        object
    }

    pub(super) fn remove(&mut self, key: &Key) {
        let Some(old) = self.objects.remove(key) else {
            return;
        };
        self.rv += 1;
        let mut last = Value::clone(&old);
        last["metadata"]["resourceVersion"] = self.rv.to_string().into();
        self.history.push(Change {
            rv: self.rv,
            resource: key.0,
            namespace: key.1.clone(),
            old: Some(old),
            new: Arc::new(last),
            deleted: true,
        });
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot {
            objects: self.objects.clone(),
            rv: self.rv,
        }
    }

    /// As after etcd was restored from a backup: versions begin again where they were.
    pub(super) fn restore(&mut self, snapshot: &Snapshot) {
        self.objects = snapshot.objects.clone();
        self.rv = snapshot.rv;
        self.history.retain(|change| change.rv <= snapshot.rv);
        self.compacted = snapshot.rv;
        self.pages.clear();
    }

    pub(super) fn compact(&mut self) {
        self.compacted = self.rv;
        self.pages.clear();
    }
}

//! Answers that count for a while, in bounded memory. Keys are digests: neither tokens nor names are kept.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::Rng;
use sha2::{Digest, Sha256};

use crate::types::{Clock, Stamp};

/// Cache key.
pub(super) type Key = [u8; 32];

/// Makes keys that mean nothing outside of this process.
pub(super) struct Keys([u8; 32]);

impl Keys {
    pub(super) fn new() -> Self {
        let mut salt = [0; 32];
        rand::rng().fill(&mut salt);
        Self(salt)
    }

    /// The key of these parts, in this order.
    pub(super) fn of<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Key {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for part in parts {
            hash.update(part.len().to_le_bytes());
            hash.update(part);
        }
        // Twice, so that nobody who knows one digest can go on from it.
        Sha256::digest(hash.finalize()).into()
    }
}

/// Answers by key.
pub(super) struct Cache<V> {
    clock: Arc<dyn Clock>,
    most: usize,
    entries: Mutex<Entries<V>>,
}

struct Entries<V> {
    by_key: HashMap<Key, (V, Stamp, u64)>,
    /// In the order they came, with the number of the entry: a key that was replaced is there twice.
    order: VecDeque<(Key, u64)>,
    next: u64,
}

impl<V: Clone> Cache<V> {
    /// Keeps `most` answers; the oldest go first.
    pub(super) fn new(clock: Arc<dyn Clock>, most: usize) -> Self {
        let entries = Entries {
            by_key: HashMap::new(),
            order: VecDeque::new(),
            next: 0,
        };
        Self {
            clock,
            most,
            entries: Mutex::new(entries),
        }
    }

    /// The answer, while it counts.
    pub(super) fn get(&self, key: &Key) -> Option<V> {
        let now = self.clock.now();
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let (value, until, _) = entries.by_key.get(key)?;
        (!until.reached(now)).then(|| value.clone())
    }

    /// Keeps an answer for `ttl`.
    pub(super) fn put(&self, key: Key, value: V, ttl: Duration) {
        let now = self.clock.now();
        let mut guard = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = &mut *guard;
        let number = entries.next;
        entries.next += 1;
        entries.by_key.insert(key, (value, now.plus(ttl), number));
        entries.order.push_back((key, number));
        while let Some((oldest, number)) = entries.order.front().copied() {
            let known = entries.by_key.get(&oldest);
            let replaced = known.is_none_or(|(_, _, newest)| *newest != number);
            let over = known.is_some_and(|(_, until, _)| until.reached(now));
            if !replaced && !over && entries.by_key.len() <= self.most {
                break;
            }
            entries.order.pop_front();
            if !replaced {
                entries.by_key.remove(&oldest);
            }
        }
        // Replaced ones behind one that lasts.
        if entries.order.len() > 2 * self.most {
            let by_key = &entries.by_key;
            entries.order.retain(|(key, number)| {
                by_key
                    .get(key)
                    .is_some_and(|(_, _, newest)| newest == number)
            });
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.by_key.len().max(entries.order.len() / 2)
    }
}

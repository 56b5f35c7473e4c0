//! Keeps table `objects` in step with the queue of events.
//!
//! The input is the objects that the queue has marked as changed. The output is relaxed commits, each of all changes
//! within [`SETTLE`]. An event that is sent at once is written once, with the object's name in the API server, and an
//! event that is held back as spam is not written at all. Records are deleted some time after their objects were sent,
//! when nothing is counted in them any more; a node on which nothing happens writes nothing.
//!
//! One task writes all of it, and computes a record when it writes it, so no write overtakes another.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

use super::api::Shared;
use super::correlate::Key;
use super::record::{room_key, told_key};
use crate::core::state::kinds::{self, Change, Kind};
use crate::core::state::{State, Transaction};
use crate::store::{CommitError, Store};
use crate::types::{PodRef, Stamp};

/// Time for which changes are collected.
const SETTLE: Duration = Duration::from_millis(100);
/// Interval at which records that are not worth keeping any more are searched.
const SWEEP: Duration = Duration::from_secs(60);
/// Pause after a commit that failed.
const PAUSE: Duration = Duration::from_secs(1);
/// Most objects, and most pods, of one commit.
const BATCH: usize = 256;
/// Most objects that are kept for what is counted in them, and most pods that are kept for what they have caused; there
/// may be up to [`SLACK`] more until the next sweep.
const KEPT: usize = 512;
/// Number of records above the limit that starts a search for the oldest: a search reads all of them.
const SLACK: usize = 128;

/// Writes what is to be remembered.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    store: Store,
    /// Of these there are records.
    told: HashSet<Key>,
    rooms: HashSet<Option<PodRef>>,
    /// Records that say nothing.
    damaged: Vec<Change>,
    /// Numbers of recorded objects and pods from which on the oldest are removed.
    look_at: (usize, usize),
}

/// Content of one commit.
#[derive(Default)]
struct Batch {
    transaction: Transaction,
    keys: Vec<Key>,
    pods: Vec<Option<PodRef>>,
    damaged: Vec<Change>,
    /// There may be more to write.
    more: bool,
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>, store: Store, damaged: Vec<Change>) -> Self {
        Self {
            shared,
            store,
            told: HashSet::new(),
            rooms: HashSet::new(),
            damaged,
            look_at: (KEPT, KEPT),
        }
    }

    /// Runs until `token` is cancelled; then writes what is left.
    pub(super) async fn run(mut self, token: &CancellationToken) {
        let mut sweep = Instant::now() + SWEEP;
        loop {
            let is_kept = !self.told.is_empty() || !self.rooms.is_empty();
            let pause = tokio::select! {
                () = token.cancelled() => break,
                // Cancel-safe: a permit that was taken leads to a look at every mark.
                () = self.shared.changed.notified() => SETTLE,
                () = tokio::time::sleep_until(sweep), if is_kept => Duration::ZERO,
            };
            tokio::select! {
                () = token.cancelled() => break,
                () = tokio::time::sleep(pause) => {}
            }
            let now = Instant::now();
            if now >= sweep {
                self.sweep();
                sweep = now + SWEEP;
            }
            if !self.flush().await {
                tokio::select! {
                    () = token.cancelled() => break,
                    () = tokio::time::sleep(PAUSE) => {}
                }
                self.shared.changed.notify_one();
            }
        }
        self.flush().await;
    }

    /// Marks what is not worth keeping any more.
    fn sweep(&mut self) {
        self.look_at = (KEPT, KEPT);
        let now = self.shared.clock.now();
        let mut queue = self.shared.lock();
        let memory = queue.memory();
        let told = self.told.iter();
        let over: Vec<_> = told
            .filter(|key| memory.record(key, now).is_none())
            .cloned()
            .collect();
        let rooms = self.rooms.iter();
        let full: Vec<_> = rooms
            .filter(|pod| memory.room(pod, now).is_none())
            .cloned()
            .collect();
        queue.mark(over, full);
    }

    /// Writes what was marked. False when the store refuses; what is left stays marked.
    async fn flush(&mut self) -> bool {
        loop {
            let batch = self.batch();
            let is_last = !batch.more;
            if !batch.transaction.is_empty() {
                match self.store.commit(batch.transaction).await {
                    Ok(_) => {}
                    // Never for what is built here, and no better the next time.
                    Err(why @ (CommitError::Invalid { .. } | CommitError::Stale { .. })) => {
                        error!(error = %why, "cannot record events");
                    }
                    Err(CommitError::Closed) => return true,
                    Err(why @ (CommitError::Unavailable { .. } | CommitError::Unknown { .. })) => {
                        // The store itself logs its troubles.
                        debug!(error = %why, "recording events later");
                        self.damaged.extend(batch.damaged);
                        self.shared.lock().mark(batch.keys, batch.pods);
                        return false;
                    }
                }
            }
            if is_last {
                return true;
            }
        }
    }

    /// Returns the next batch to commit, and remembers its records as written.
    fn batch(&mut self) -> Batch {
        let now = self.shared.clock.now();
        let state = self.store.snapshot();
        let mut queue = self.shared.lock();
        let mut batch = Batch {
            keys: queue.take_changed(BATCH),
            pods: queue.take_spent(BATCH),
            damaged: std::mem::take(&mut self.damaged),
            ..Batch::default()
        };
        batch.more = batch.keys.len() >= BATCH || batch.pods.len() >= BATCH;
        let memory = queue.memory();
        let mut writes = Writes::default();
        for change in &batch.damaged {
            writes.add(change.clone());
        }
        // What is made of texts and numbers always is JSON.
        for key in &batch.keys {
            let record = memory.record(key, now);
            match record.is_some() {
                true => self.told.insert(key.clone()),
                false => self.told.remove(key),
            };
            let content = record.as_ref().map(|record| (record, record.last()));
            writes.set(&told_key(key), content);
        }
        for pod in &batch.pods {
            let record = memory.room(pod, now);
            match record.is_some() {
                true => self.rooms.insert(pod.clone()),
                false => self.rooms.remove(pod),
            };
            let content = record.as_ref().map(|record| (record, record.at));
            writes.set(&room_key(pod), content);
        }
        if self.told.len() > self.look_at.0 {
            // What waits has to be kept.
            let counting = self.told.iter().filter_map(|key| {
                let told = memory.told(key)?;
                told.place.is_none().then_some((told.last.wall_ms, key))
            });
            for key in surplus(counting) {
                writes.set(&told_key(&key), None);
                self.told.remove(&key);
                // If it cannot be written now, it is looked at again.
                batch.keys.push(key);
            }
            self.look_at.0 = self.told.len() + SLACK;
        }
        if self.rooms.len() > self.look_at.1 {
            let pods = self.rooms.iter();
            let pods = pods.filter_map(|pod| Some((memory.room(pod, now)?.at.wall_ms, pod)));
            for pod in surplus(pods) {
                writes.set(&room_key(&pod), None);
                self.rooms.remove(&pod);
                batch.pods.push(pod);
            }
            self.look_at.1 = self.rooms.len() + SLACK;
        }
        batch.transaction = writes.transaction(&state);
        batch
    }
}

/// Desired records; the last write counts.
#[derive(Default)]
struct Writes(BTreeMap<String, Change>);

impl Writes {
    fn set<K: Kind>(&mut self, key: &kinds::Key<K>, content: Option<(&K, Stamp)>) {
        self.add(Change::new(key, content));
    }

    fn add(&mut self, change: Change) {
        self.0.insert(change.key().to_owned(), change);
    }

    /// Of what is not so already.
    fn transaction(self, state: &State) -> Transaction {
        let changes = self.0.into_values();
        changes.fold(Transaction::new(), |all, change| {
            all.change_object(state, change)
        })
    }
}

/// The oldest of those that are more than [`KEPT`].
fn surplus<'a, K: Clone + 'a>(all: impl Iterator<Item = (i64, &'a K)>) -> Vec<K> {
    let mut all: Vec<_> = all.collect();
    let Some(more) = all.len().checked_sub(KEPT).filter(|more| *more > 0) else {
        return Vec::new();
    };
    all.sort_by_key(|(last, _)| *last);
    all.truncate(more);
    all.into_iter().map(|(_, key)| key.clone()).collect()
}

#[cfg(test)]
mod tests;

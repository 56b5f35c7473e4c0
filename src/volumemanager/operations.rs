//! What is under way: never two operations at once on one volume, device or target, and none that ends because
//! nobody waits for it any more; upstream's `nestedpendingoperations`.
//!
//! **Invariant:** a key is taken from before the first commit of an operation until its last effect, whoever
//! goes away in the meantime. An operation that hangs holds its own keys and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::core::volumes::backoff::{BackOff, MAX};
use crate::types::Stamp;

/// What became of the last step on a volume or device that failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) error: super::remote::RemoteError,
    pub(super) backoff: BackOff,
    /// Counts failures, of all keys together.
    pub(super) serial: u64,
}

#[derive(Debug)]
struct Running {
    what: &'static str,
    since: Instant,
}

#[derive(Debug, Default)]
struct Table {
    running: BTreeMap<String, Running>,
    failures: BTreeMap<String, Failure>,
    serial: u64,
}

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    /// Changes whenever an operation ends.
    ended: watch::Sender<u64>,
}

/// Shared handle.
#[derive(Clone, Debug)]
pub(super) struct Operations(Arc<Shared>);

impl Default for Operations {
    fn default() -> Self {
        Self(Arc::new(Shared {
            table: Mutex::default(),
            ended: watch::Sender::new(0),
        }))
    }
}

/// Keys that are taken; given back when dropped.
#[derive(Debug)]
pub(super) struct Taken {
    keys: Vec<String>,
    of: Operations,
}

impl Drop for Taken {
    fn drop(&mut self) {
        {
            let mut table = self.of.table();
            for key in &self.keys {
                table.running.remove(key);
            }
        }
        self.of.0.ended.send_modify(|count| *count += 1);
    }
}

/// The task of an operation ended without a result: it panicked, or the agent ends.
#[derive(Debug, thiserror::Error)]
#[error("an operation on a volume ended early: {0}")]
pub(super) struct Ended(#[source] tokio::task::JoinError);

impl Operations {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Entries are put and removed whole.
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all of the keys, or none when one of them is taken.
    pub(super) fn take(&self, keys: &[&str], what: &'static str) -> Option<Taken> {
        let mut table = self.table();
        if keys.iter().any(|key| table.running.contains_key(*key)) {
            return None;
        }
        let since = Instant::now();
        for key in keys {
            let running = Running { what, since };
            table.running.insert((*key).to_owned(), running);
        }
        Some(Taken {
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            of: self.clone(),
        })
    }

    /// Tells when operations end.
    pub(super) fn ends(&self) -> watch::Receiver<u64> {
        self.0.ended.subscribe()
    }

    /// Has those who wait look again.
    pub(super) fn wake(&self) {
        self.0.ended.send_modify(|count| *count += 1);
    }

    /// Whether a key is taken.
    pub(super) fn is_busy(&self, key: &str) -> bool {
        self.table().running.contains_key(key)
    }

    /// Keys that are taken.
    pub(super) fn busy(&self) -> BTreeSet<String> {
        self.table().running.keys().cloned().collect()
    }

    /// What is done on a key, and for how long.
    pub(super) fn running(&self, key: &str) -> Option<(&'static str, Duration)> {
        let table = self.table();
        let running = table.running.get(key)?;
        Some((running.what, running.since.elapsed()))
    }

    /// Does `work` as a task of its own once the key is free. When dropped before that, nothing was begun;
    /// after that the work goes on to its end.
    ///
    /// # Errors
    /// When it panicked, or the async runtime ends.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        key: &str,
        what: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Ended> {
        let mut ends = self.ends();
        let taken = loop {
            ends.mark_unchanged();
            if let Some(taken) = self.take(&[key], what) {
                break taken;
            }
            // The sender lives as long as `self`.
            drop(ends.changed().await);
        };
        let task = tokio::spawn(async move {
            let done = work.await;
            drop(taken);
            done
        });
        task.await.map_err(Ended)
    }

    /// Notes that a step on a key failed: it is left alone for a while, longer each time.
    pub(super) fn failed(
        &self,
        key: &str,
        error: super::remote::RemoteError,
        now: Stamp,
    ) -> BackOff {
        let mut table = self.table();
        table.serial += 1;
        let serial = table.serial;
        // A device that could not be staged may never be asked for again.
        let forget_after = 2 * MAX;
        table
            .failures
            .retain(|_, f| now.since(f.backoff.until) < forget_after);
        let previous = table.failures.get(key).map(|f| f.backoff);
        let backoff = BackOff::after(previous, now);
        let failure = Failure {
            error,
            backoff,
            serial,
        };
        table.failures.insert(key.to_owned(), failure);
        backoff
    }

    /// Notes that a step on a key succeeded, or that the key is no more.
    pub(super) fn succeeded(&self, key: &str) {
        self.table().failures.remove(key);
    }

    /// The last failure on a key, unless a step succeeded since.
    pub(super) fn failure(&self, key: &str) -> Option<Failure> {
        self.table().failures.get(key).cloned()
    }

    /// The number of the newest failure of all.
    pub(super) fn serial(&self) -> u64 {
        self.table().serial
    }

    /// Until when keys are left alone.
    pub(super) fn held(&self) -> BTreeMap<String, Stamp> {
        let table = self.table();
        let failures = table.failures.iter();
        failures
            .map(|(key, failure)| (key.clone(), failure.backoff.until))
            .collect()
    }
}

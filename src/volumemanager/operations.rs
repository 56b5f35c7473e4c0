//! Operations in progress: never two at once on one volume, staged volume or target. An operation completes even if
//! nothing waits for it any more; upstream's `nestedpendingoperations`.
//!
//! **Invariant:** an operation holds its keys from before its first commit until after its last effect, even if its
//! callers are gone. An operation that hangs holds only its own keys.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::core::volumes::backoff::{BackOff, MAX};
use crate::types::Stamp;

/// Last failed step of a volume or staged volume.
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
    /// Tells those who wait for the key.
    free: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Table {
    running: BTreeMap<String, Running>,
    /// Keys that were taken at any time since [`Operations::look`]; `None` while nobody looks.
    touched: Option<BTreeSet<String>>,
    failures: BTreeMap<String, Failure>,
    serial: u64,
}

/// Shared handle.
#[derive(Clone, Debug, Default)]
pub(super) struct Operations(Arc<Mutex<Table>>);

/// Function that runs when keys are free again.
type After = Box<dyn FnOnce() + Send>;

/// Keys that are taken; given back when dropped.
pub(super) struct Taken {
    keys: Vec<String>,
    of: Operations,
    free: Arc<Notify>,
    after: Option<After>,
}

impl Taken {
    /// Has something done once the keys are free, however the operation ends. It must not wait.
    pub(super) fn then(mut self, after: impl FnOnce() + Send + 'static) -> Self {
        self.after = Some(Box::new(after));
        self
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        {
            let mut table = self.of.table();
            for key in &self.keys {
                table.running.remove(key);
            }
        }
        self.free.notify_waiters();
        if let Some(after) = self.after.take() {
            after();
        }
    }
}

/// The task of an operation ended without a result: it panicked, or the agent ends.
#[derive(Debug, thiserror::Error)]
#[error("an operation on a volume ended early: {0}")]
pub(super) struct Ended(#[source] tokio::task::JoinError);

impl Operations {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Entries are put and removed whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all of the keys, or none when one of them is taken.
    pub(super) fn take(&self, keys: &[&str], what: &'static str) -> Option<Taken> {
        let mut table = self.table();
        if keys.iter().any(|key| table.running.contains_key(*key)) {
            return None;
        }
        Some(self.put(&mut table, keys, what))
    }

    fn put(&self, table: &mut Table, keys: &[&str], what: &'static str) -> Taken {
        let (since, free) = (Instant::now(), Arc::new(Notify::new()));
        for key in keys {
            let running = Running {
                what,
                since,
                free: Arc::clone(&free),
            };
            table.running.insert((*key).to_owned(), running);
            if let Some(touched) = &mut table.touched {
                touched.insert((*key).to_owned());
            }
        }
        Taken {
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            of: self.clone(),
            free,
            after: None,
        }
    }

    /// Begins to note which keys are taken. For the one who looks at what there is, before the looking.
    pub(super) fn look(&self) {
        let mut table = self.table();
        table.touched = Some(table.running.keys().cloned().collect());
    }

    /// Ends what [`Operations::look`] began.
    pub(super) fn looked(&self) {
        self.table().touched = None;
    }

    /// Keys that are taken, or were since [`Operations::look`]: of these, what was seen may not be so any more.
    pub(super) fn touched(&self) -> BTreeSet<String> {
        let table = self.table();
        let running = || table.running.keys().cloned().collect();
        table.touched.clone().unwrap_or_else(running)
    }

    /// Keys that are taken.
    #[cfg(test)]
    pub(super) fn busy(&self) -> BTreeSet<String> {
        self.table().running.keys().cloned().collect()
    }

    /// Returns whether a key is taken.
    pub(super) fn is_busy(&self, key: &str) -> bool {
        self.table().running.contains_key(key)
    }

    /// Returns the operation that holds a key, and its duration so far.
    pub(super) fn running(&self, key: &str) -> Option<(&'static str, Duration)> {
        let table = self.table();
        let running = table.running.get(key)?;
        Some((running.what, running.since.elapsed()))
    }

    /// Takes all of the keys as soon as they are free.
    pub(super) async fn taken(&self, keys: &[&str], what: &'static str) -> Taken {
        loop {
            let free = {
                let mut table = self.table();
                match keys.iter().find_map(|key| table.running.get(*key)) {
                    // Made under the lock, so it hears of this operation's end.
                    Some(running) => Arc::clone(&running.free).notified_owned(),
                    None => return self.put(&mut table, keys, what),
                }
            };
            free.await;
        }
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
        self.run_then(key, what, work, || {}).await
    }

    /// As [`Operations::run`]; does `after` once the key is free again, whether or not anybody waits.
    ///
    /// # Errors
    /// As [`Operations::run`].
    pub(super) async fn run_then<T: Send + 'static>(
        &self,
        key: &str,
        what: &'static str,
        work: impl Future<Output = T> + Send + 'static,
        after: impl FnOnce() + Send + 'static,
    ) -> Result<T, Ended> {
        let taken = self.taken(&[key], what).await.then(after);
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

    /// Ends a back-off before its time, unless it is over or another one is in force. The next one is the next longer one.
    pub(super) fn end_early(&self, key: &str, backoff: BackOff, now: Stamp) {
        if let Some(failure) = self.table().failures.get_mut(key)
            && failure.backoff == backoff
            && !backoff.until.reached(now)
        {
            failure.backoff.until = now;
        }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use super::*;

    #[tokio::test]
    async fn who_waits_for_a_key_is_woken_by_its_end_alone() {
        let operations = Operations::default();
        let first = operations.take(&["a", "b"], "first").unwrap();
        let other = operations.take(&["c"], "other").unwrap();
        assert!(operations.take(&["d", "b"], "second").is_none());
        let mut second = task_of(operations.taken(&["d", "b"], "second"));
        assert!(second.poll().is_none());
        drop(other);
        assert!(!second.is_woken(), "by the end of another operation");
        let told = Arc::new(AtomicBool::new(false));
        let (tell, of) = (Arc::clone(&told), operations.clone());
        let first = first.then(move || tell.store(!of.is_busy("a"), SeqCst));
        drop(first);
        assert!(told.load(SeqCst), "once the keys are free");
        assert!(second.is_woken());
        let second = second.poll().unwrap();
        assert_eq!(
            operations.busy(),
            BTreeSet::from(["b", "d"].map(str::to_owned))
        );
        drop(second);
        assert!(operations.busy().is_empty());
    }

    #[test]
    fn what_had_a_key_since_the_look_is_remembered() {
        let operations = Operations::default();
        let touched = || {
            operations
                .touched()
                .into_iter()
                .collect::<Vec<_>>()
                .concat()
        };
        let [a, b] = ["a", "b"].map(|key| operations.take(&[key], "x").unwrap());
        drop(a);
        operations.look();
        assert_eq!(touched(), "b", "what had ended can be seen");
        drop(b);
        drop(operations.take(&["c"], "x"));
        assert_eq!(touched(), "bc");
        operations.look();
        assert_eq!(touched(), "");
        operations.looked();
        drop(operations.take(&["d"], "x"));
        let e = operations.take(&["e"], "x").unwrap();
        assert_eq!(touched(), "e", "nothing is kept for nobody");
        drop(e);
        assert_eq!(operations.table().touched, None);
    }

    /// A future with a waker of its own.
    struct Task<F: Future> {
        future: std::pin::Pin<Box<F>>,
        woken: Arc<Woken>,
    }

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, SeqCst);
        }
    }

    fn task_of<F: Future>(future: F) -> Task<F> {
        Task {
            future: Box::pin(future),
            woken: Arc::default(),
        }
    }

    impl<F: Future> Task<F> {
        fn poll(&mut self) -> Option<F::Output> {
            let waker = Arc::clone(&self.woken).into();
            let mut context = std::task::Context::from_waker(&waker);
            match self.future.as_mut().poll(&mut context) {
                std::task::Poll::Ready(done) => Some(done),
                std::task::Poll::Pending => None,
            }
        }

        fn is_woken(&self) -> bool {
            self.woken.0.load(SeqCst)
        }
    }
}

//! The work queue: when each pod is due next. In memory ordered by due time, in the store by pod, so that a
//! restart neither forgets a due pod nor syncs all pods at once. Upstream: `queue.WorkQueue`.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::core::state::{QueueRecord, Transaction};
use crate::store::Store;
use crate::types::{PodUid, Stamp};

#[derive(Debug, Default)]
struct Data {
    due: HashMap<PodUid, Stamp>,
    order: BTreeSet<(i64, PodUid)>,
}

/// Shared handle to the queue.
#[derive(Clone, Debug)]
pub struct WorkQueue {
    data: Arc<Mutex<Data>>,
    store: Store,
}

impl WorkQueue {
    /// An empty queue over `store`; restored due times are put back with [`WorkQueue::seed`].
    pub fn new(store: Store) -> Self {
        Self {
            data: Arc::default(),
            store,
        }
    }

    /// Puts a restored due time back without writing it again.
    pub fn seed(&self, uid: &PodUid, due: Stamp) {
        let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        data.put(uid, due);
    }

    /// Sets when a pod is due, replacing what was set before. Written with the next batch; losing it to a
    /// crash costs an early sync, no more.
    pub fn enqueue(&self, uid: &PodUid, now: Stamp, delay: Duration, why: &str) {
        let due = now.plus(delay);
        {
            let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
            data.put(uid, due);
        }
        let record = QueueRecord {
            due,
            why: why.to_owned(),
        };
        // The answer of a relaxed commit says only that it is queued; a degraded store reports itself.
        drop(
            self.store
                .submit(Transaction::new().put(uid.as_str(), record)),
        );
    }

    /// Takes every pod that is due at `now`. Costs nothing while none is.
    pub fn take_due(&self, now: Stamp) -> Vec<PodUid> {
        let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = Vec::new();
        while let Some((at, uid)) = data.order.first().cloned() {
            if at > now.boottime_ms {
                break;
            }
            data.remove(&uid);
            due.push(uid);
        }
        due
    }

    /// Forgets a pod.
    pub fn remove(&self, uid: &PodUid) {
        let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        data.remove(uid);
    }
}

impl Data {
    fn put(&mut self, uid: &PodUid, due: Stamp) {
        self.remove(uid);
        self.due.insert(uid.clone(), due);
        self.order.insert((due.boottime_ms, uid.clone()));
    }

    fn remove(&mut self, uid: &PodUid) {
        if let Some(old) = self.due.remove(uid) {
            self.order.remove(&(old.boottime_ms, uid.clone()));
        }
    }
}

/// Spreads `base` over `[base, base × (1 + factor))`; `random` is in `[0, 1)`. Upstream: `wait.Jitter`.
pub fn jitter(base: Duration, factor: f64, random: f64) -> Duration {
    base.mul_f64(1.0 + factor * random)
}

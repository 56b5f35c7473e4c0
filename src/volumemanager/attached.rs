//! Resources that this agent has attached to the node itself: sessions with iSCSI targets, and loop devices. Others of
//! that kind are foreign: they are used, and left as they were.
//!
//! Input: a name that identifies the resource. Its record is `attached//<hash>`. The record is valid for one boot,
//! since nothing that is attached survives a reboot.
//!
//! **Invariant:** the record is written before attach and deleted after detach.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::remote::RemoteError;
use crate::core::state::Transaction;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::volumes::sha256_hex;
use crate::store::{CommitError, Store};
use crate::types::Clock;

/// Name of something that was attached, as it is stored.
#[derive(Serialize, Deserialize)]
struct Noted {
    attached: String,
}

impl Kind for Noted {
    const DECLARED: Declared = kinds::ATTACHED;
}

/// Records of attached resources. Cheap to clone.
#[derive(Clone)]
pub struct Attached {
    store: Store,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Attached")
    }
}

impl Attached {
    /// Remembers in `store`.
    pub fn new(store: Store, clock: Arc<dyn Clock>) -> Self {
        Self { store, clock }
    }

    /// Notes that it is about to be attached.
    pub(super) async fn note(&self, what: &str) -> Result<(), RemoteError> {
        if self.is_ours(what) {
            return Ok(());
        }
        let record = Noted {
            attached: what.to_owned(),
        };
        let transaction = Transaction::new().put_object(&key(what), &record, self.clock.now());
        let noted = self.store.commit(transaction).await;
        noted.map(drop).map_err(|error| failed(what, &error))
    }

    /// Returns whether this agent attached it in this boot.
    pub(super) fn is_ours(&self, what: &str) -> bool {
        let seen = self.store.snapshot();
        let key = key(what);
        let known = seen.stored(&key);
        known.is_some_and(|known| known.at().boot == self.clock.now().boot)
    }

    /// It is attached no more, or never was.
    pub(super) async fn forget(&self, what: &str) -> Result<(), RemoteError> {
        let key = key(what);
        let seen = self.store.snapshot();
        if seen.stored(&key).is_none() {
            return Ok(());
        }
        let transaction = Transaction::new().delete_object(&key);
        let gone = self.store.commit(transaction).await;
        gone.map(drop).map_err(|error| failed(what, &error))
    }
}

fn key(what: &str) -> Key<Noted> {
    Key::new("", &sha256_hex(&[what]))
}

fn failed(what: &str, error: &CommitError) -> RemoteError {
    RemoteError::Failed(format!("record that {what} is attached: {error}"))
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::types::{BootId, Stamp};

    struct Boots(AtomicU64);

    impl Clock for Boots {
        fn now(&self) -> Stamp {
            Stamp {
                boot: BootId(self.0.load(Ordering::Relaxed)),
                boottime_ms: 1,
                wall_ms: 1,
            }
        }
    }

    /// A node on which nothing was attached yet.
    pub(in crate::volumemanager) fn nothing() -> Attached {
        let clock: Arc<dyn Clock> = Arc::new(Boots(AtomicU64::new(1)));
        Attached::new(Store::in_memory(Arc::clone(&clock)), clock)
    }

    #[tokio::test]
    async fn what_was_attached_is_known_until_it_is_forgotten_or_the_machine_boots() {
        let clock = Arc::new(Boots(AtomicU64::new(1)));
        let store = Store::in_memory(Arc::clone(&clock) as _);
        let attached = Attached::new(store.clone(), Arc::clone(&clock) as _);
        assert!(!attached.is_ours("session a"));
        attached.note("session a").await.unwrap();
        attached.note("session a").await.unwrap();
        let next = Attached::new(store.clone(), Arc::clone(&clock) as _);
        assert!(next.is_ours("session a") && !next.is_ours("session b"));
        clock.0.store(2, Ordering::Relaxed);
        assert!(!next.is_ours("session a"), "nothing outlives a boot");
        next.note("session a").await.unwrap();
        assert!(next.is_ours("session a"));
        next.forget("session a").await.unwrap();
        next.forget("session a").await.unwrap();
        assert!(!next.is_ours("session a"));
        assert_eq!(store.snapshot().objects.len(), 0);
    }
}

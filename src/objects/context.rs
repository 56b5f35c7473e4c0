//! State that all parts of the cache share, and the conversion of objects to records and back.
//!
//! A record of table `objects` has the key `<plural>/<namespace>/<name>` (`services` one per service, `clustertrustbundles` without namespace), or
//! `tokens/<namespace>/<pod uid>/<hash>`. Its data is the object as JSON; of secrets, tokens and certificates of pods what
//! [`super::vault`] makes of that.
//!
//! **Invariants:** a secret or token leaves this module for the store encrypted or not at all, and is taken from a
//! record only if that is encrypted; no error or log line holds one.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, broadcast};
use zeroize::Zeroizing;

use super::ObjectChange;
use super::cache::lock;
use super::vault::Vault;
use crate::apiserver::ApiClient;
use crate::core::state::{ObjectRecord, Record as _, Table};
use crate::store::Store;
use crate::types::metrics::Metrics;
use crate::types::{Clock, EventRecorder};

/// Associated data and errors name the table.
pub(super) const TABLE: &str = "objects";

pub(super) struct Context {
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) api: Option<ApiClient>,
    pub(super) vault: Arc<Vault>,
    pub(super) metrics: Metrics,
    pub(super) events: Option<Arc<dyn EventRecorder>>,
    changes: broadcast::Sender<ObjectChange>,
    /// Keys of records that may differ from what is known.
    dirty: Mutex<BTreeSet<String>>,
    pub(super) wake: Notify,
    /// Number of claims that are polled.
    pub(super) claims: AtomicUsize,
}

impl Context {
    pub(super) fn new(
        store: Store,
        clock: Arc<dyn Clock>,
        api: Option<ApiClient>,
        vault: Arc<Vault>,
        metrics: Metrics,
        events: Option<Arc<dyn EventRecorder>>,
    ) -> Self {
        Self {
            store,
            clock,
            api,
            vault,
            metrics,
            events,
            changes: broadcast::Sender::new(256),
            dirty: Mutex::default(),
            wake: Notify::new(),
            claims: AtomicUsize::new(0),
        }
    }

    pub(super) fn changes(&self) -> broadcast::Receiver<ObjectChange> {
        self.changes.subscribe()
    }

    /// Tells whoever listens.
    pub(super) fn tell(&self, change: ObjectChange) {
        tracing::debug!(
            kind = change.kind,
            namespace = change.namespace,
            name = change.name,
            "object changed"
        );
        // Without a listener nobody has to know.
        drop(self.changes.send(change));
    }

    /// Has the record of `key` brought up to date.
    pub(super) fn mark(&self, key: String) {
        self.mark_all([key]);
    }

    pub(super) fn mark_all(&self, keys: impl IntoIterator<Item = String>) {
        lock(&self.dirty).extend(keys);
        self.wake.notify_one();
    }

    pub(super) fn take_marked(&self) -> BTreeSet<String> {
        std::mem::take(&mut *lock(&self.dirty))
    }

    /// Keys of the records that begin with `prefix`.
    pub(super) fn recorded_keys(&self, prefix: &str) -> Vec<String> {
        let state = self.store.snapshot();
        state
            .with_prefix::<ObjectRecord>(prefix)
            .map(|(key, _)| key.to_string())
            .collect()
    }

    /// The recorded value of `key`. What cannot be read counts as absent, and stays until it is replaced.
    pub(super) fn recorded<T: DeserializeOwned>(&self, key: &str, secret: bool) -> Option<T> {
        let state = self.store.snapshot();
        let record = state.record::<ObjectRecord>(key)?;
        match self.decode(key, record, secret) {
            Ok(value) => Some(value),
            Err(error) => {
                tracing::warn!(
                    key,
                    error,
                    "cannot use the recorded copy of an object, fetching it again"
                );
                None
            }
        }
    }

    fn decode<T: DeserializeOwned>(
        &self,
        key: &str,
        record: &ObjectRecord,
        secret: bool,
    ) -> Result<T, String> {
        let undecodable = || "it does not decode".to_owned();
        if !secret {
            return serde_json::from_slice(&record.data).map_err(|_| undecodable());
        }
        if !record.encrypted {
            return Err("it should be encrypted and is not".to_owned());
        }
        let plain = self.vault.unseal(TABLE, key, &record.data);
        let plain = plain.map_err(|error| error.to_string())?;
        serde_json::from_slice(&plain).map_err(|_| undecodable())
    }

    /// The record of `value`; `None` when the present one says the same, or when it cannot be encrypted.
    pub(super) fn record_of<T: Serialize>(
        &self,
        key: &str,
        resource_version: &str,
        value: &T,
        secret: bool,
    ) -> Option<ObjectRecord> {
        let plain = json(value)?;
        let state = self.store.snapshot();
        let present = state.record::<ObjectRecord>(key);
        let present = present.filter(|record| {
            record.encrypted == secret && record.resource_version == resource_version
        });
        let data = if secret {
            let same = present.is_some_and(|record| {
                super::vault::key_of(&record.data) == self.vault.active()
                    && self
                        .vault
                        .unseal(TABLE, key, &record.data)
                        .is_ok_and(|known| known == plain)
            });
            if same {
                return None;
            }
            // Told once, when the key file could not be used.
            self.vault.seal(TABLE, key, &plain).ok()?
        } else {
            if present.is_some_and(|record| record.data == *plain) {
                return None;
            }
            plain.to_vec()
        };
        Some(ObjectRecord {
            resource_version: resource_version.to_owned(),
            encrypted: secret,
            data,
            at: self.clock.now(),
        })
    }
}

/// JSON in a buffer that is wiped, and large enough from the start that no piece of it stays behind.
fn json<T: Serialize>(value: &T) -> Option<Zeroizing<Vec<u8>>> {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value).ok()?;
    let mut plain = Zeroizing::new(Vec::with_capacity(count.0));
    serde_json::to_writer(&mut *plain, value).ok()?;
    Some(plain)
}

const _: () = assert!(matches!(ObjectRecord::TABLE, Table::Objects));

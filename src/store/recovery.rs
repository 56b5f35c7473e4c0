//! The degraded mode of the writer, and the way out of it.
//!
//! After a failed write the content of the disk is unknown. The writer refuses commits, holds stops in memory (applied
//! to the published state), and tries again and again to open the backend and to read it. It compares the content with
//! the records of the failed write. If they are there to the last byte, the failed group did happen; if not, the state
//! in memory counts, which holds every acknowledged change. The differences are rewritten together with the held stops
//! in one synced batch, and only then are commits accepted again.
//!
//! **Invariant:** every record gets a new version, so decisions made before are stale.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::backend::{BackendError, Op, RawPair};
use super::codec::{self, Loaded, QUARANTINE_PREFIX};
use super::request::{Answer, AnyKey, check};
use super::writer::{Writer, key_of, last_journal_sequence};
use super::{CommitError, SetAside};
use crate::core::state::{Mutation, State, Table, Transaction, Version};

/// State of the writer while it is degraded.
pub(super) struct Degraded {
    pub(super) reason: String,
    /// Transactions held.
    pub(super) held: u64,
    /// Records that the held transactions changed.
    held_keys: HashSet<AnyKey>,
    /// State that the failed write would have led to.
    attempted: Option<State>,
    next_try: Instant,
    backoff: Duration,
}

impl Degraded {
    pub(super) fn is_due(&self) -> bool {
        self.due_in().is_zero()
    }

    pub(super) fn due_in(&self) -> Duration {
        self.next_try.saturating_duration_since(Instant::now())
    }
}

impl Writer {
    /// Enters the degraded mode. `attempted` is the state that the failed write would have led to.
    pub(super) fn degrade(&mut self, error: &BackendError, attempted: Option<State>) {
        let reason = error.full_text();
        tracing::error!(error = %reason, "the store refuses commits until it has recovered");
        self.discard_pending();
        self.degraded = Some(Degraded {
            reason,
            held: 0,
            held_keys: HashSet::new(),
            attempted,
            next_try: Instant::now() + self.options.backoff_min,
            backoff: self.options.backoff_min,
        });
        self.metrics.store_held.set(0);
        self.failed(error);
    }

    /// Holds a stop: visible from now on, written first on recovery.
    pub(super) fn hold(&mut self, transaction: &Transaction) -> Result<Answer, CommitError> {
        if let Err(stale) = check(transaction, &self.state) {
            self.metrics.store_stale.inc();
            return Err(stale);
        }
        let mut next = self.state.clone();
        self.apply(&mut next, transaction, None);
        let journal: Vec<Arc<str>> = next
            .journal
            .keys()
            .rev()
            .take(transaction.journal.len())
            .cloned()
            .collect();
        self.state = next;
        if let Some(degraded) = &mut self.degraded {
            degraded.held += 1;
            degraded
                .held_keys
                .extend(transaction.mutations.iter().map(key_of));
            degraded
                .held_keys
                .extend(journal.into_iter().map(|key| (Table::Journal, key)));
            self.metrics
                .store_held
                .set(i64::try_from(degraded.held).unwrap_or(i64::MAX));
        }
        self.publish();
        Ok(Answer {
            version: self.version,
            held: true,
        })
    }

    /// One try. Afterwards the store is healthy, or the next try is due later.
    pub(super) fn try_recover(&mut self) {
        let Some(degraded) = self.degraded.take() else {
            return;
        };
        match self.recover(&degraded) {
            Ok(()) => {
                tracing::info!(held = degraded.held, "the store has recovered");
                self.metrics.store_recoveries.inc();
                self.metrics.store_held.set(0);
                self.publish();
                self.shared.set_failed(None);
                self.refresh_metrics();
                self.restore_reserve();
            }
            Err(error) => {
                let backoff = degraded.backoff;
                tracing::warn!(error = %error.full_text(), again_in = ?backoff, "the store could not recover");
                self.degraded = Some(Degraded {
                    reason: error.full_text(),
                    next_try: Instant::now() + backoff,
                    backoff: (backoff * 2).min(self.options.backoff_max),
                    ..degraded
                });
                self.failed(&error);
            }
        }
    }

    fn recover(&mut self, degraded: &Degraded) -> Result<(), BackendError> {
        self.backend.reopen()?;
        let mut on_disk: BTreeMap<Vec<u8>, Vec<u8>> =
            self.backend.iter().collect::<Result<_, _>>()?;
        let Loaded {
            quarantined, kept, ..
        } = codec::load(
            on_disk.iter().map(|(k, v)| Ok((k.clone(), v.clone()))),
            self.version,
        );
        // What was set aside, before or just now, is no part of the state.
        let damaged: HashSet<&[u8]> = quarantined.iter().map(|q| q.raw_key.as_slice()).collect();
        on_disk.retain(|key, _| {
            key.first() != Some(&QUARANTINE_PREFIX) && !damaged.contains(key.as_slice())
        });

        let version = self.version + 1;
        let happened = match &degraded.attempted {
            Some(attempted) => encoded(attempted)? == on_disk,
            None => false,
        };
        let target = match &degraded.attempted {
            Some(attempted) if happened => {
                overlaid(attempted, &self.state, &degraded.held_keys, version)
            }
            _ => self.state.clone(),
        };
        let target = renewed(&target, version);
        let wanted = encoded(&target)?;

        self.quarantine_size = kept.len();
        let set_aside = quarantined.iter().chain(&kept).map(SetAside::from);
        self.shared.quarantined.store(Arc::new(set_aside.collect()));
        let mut ops = self.quarantine_ops(&quarantined);
        // A damaged record that is known in memory is written anew by the loop below.
        ops.retain(|op| !matches!(op, Op::Delete { key } if wanted.contains_key(key)));
        let mut rewritten = 0_usize;
        for key in on_disk.keys().filter(|key| !wanted.contains_key(*key)) {
            ops.push(Op::Delete { key: key.clone() });
        }
        for (key, value) in &wanted {
            if on_disk.get(key) != Some(value) {
                rewritten += 1;
                ops.push(Op::Put {
                    key: key.clone(),
                    value: value.clone(),
                });
            }
        }
        tracing::info!(
            happened,
            rewritten,
            records = wanted.len(),
            "read the store again after a failed write"
        );
        if !ops.is_empty() {
            self.backend.apply(&ops)?;
        }
        self.backend.sync()?;

        self.chunks = codec::load(wanted.into_iter().map(Ok), version).chunks;
        self.version = version;
        self.advance_journal(last_journal_sequence(&target));
        self.state = target;
        self.discard_pending();
        Ok(())
    }

    fn failed(&mut self, error: &BackendError) {
        let out_of_space = error.is_out_of_space();
        if out_of_space && let Some(reserve) = &mut self.options.reserve {
            match reserve.release() {
                Ok(()) => self.reserve_released = true,
                Err(error) => {
                    tracing::error!(%error, "cannot release the reserved disk space on a full disk");
                }
            }
        }
        self.shared
            .set_failed(Some((error.full_text(), out_of_space)));
    }

    /// Takes the reserve back if it was released.
    pub(super) fn restore_reserve(&mut self) {
        if !self.reserve_released {
            return;
        }
        if let Some(reserve) = &mut self.options.reserve {
            match reserve.restore() {
                Ok(()) => self.reserve_released = false,
                Err(error) => {
                    tracing::warn!(%error, "cannot reserve disk space for a full disk yet");
                }
            }
        }
    }
}

/// The raw pairs of a state.
fn encoded(state: &State) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, BackendError> {
    codec::encode_state(state)
        .collect::<Result<_, _>>()
        .map(|pairs: Vec<RawPair>| pairs.into_iter().collect())
        .map_err(|e| BackendError::Engine {
            action: "encode the state",
            reason: e.to_string(),
        })
}

/// `base` with the records `keys` as they are in `over`.
fn overlaid(base: &State, over: &State, keys: &HashSet<AnyKey>, version: Version) -> State {
    let mut state = base.clone();
    for (table, key) in keys {
        let mutation = match over.get_any(*table, key) {
            Some(record) => Mutation::Put {
                key: Arc::clone(key),
                record,
            },
            None => Mutation::Delete {
                table: *table,
                key: Arc::clone(key),
            },
        };
        state.apply(&mutation, version);
    }
    state
}

/// The same records, all at `version`.
fn renewed(state: &State, version: Version) -> State {
    let mut renewed = State::default();
    for (_, key, record) in state.iter_all() {
        renewed.apply(&Mutation::Put { key, record }, version);
    }
    renewed
}

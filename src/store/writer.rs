//! The one writer: group commit.
//!
//! A turn takes what is queued, checks each transaction against the newest state, applies it, and adds
//! its journal lines. If anything in the group is durable, everything pending goes to the backend in one
//! batch and is synced before the new state is published and the callers are answered. A group that is
//! relaxed throughout is published and answered at once; its records wait, newest version only, for the
//! next durable group or [`StoreOptions::relaxed_delay`].
//!
//! **Invariant:** while healthy, `state` is what is published, and the backend holds `state` minus `pending`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::backend::{Backend, BackendError, Op};
use super::codec::{self, Encoded, Loaded, QuarantineReason, chunk_key, record_key};
use super::recovery::Degraded;
use super::request::{AnyKey, DoneAnswer, Kind, Request, Waiting, check, unknown};
use super::shared::{Doing, Shared};
use super::{CommitError, StoreOptions};
use crate::core::state::{
    Durability, JournalRecord, Mutation, Record, State, Table, Transaction, Version, journal_key,
};
use crate::types::metrics::{Metrics, TableLabel};
use crate::types::{Clock, causes};

/// Bytes of relaxed changes that are written before their delay is over.
const PENDING_LIMIT: usize = 4 * 1024 * 1024;
/// Interval at which the size on disk is measured, and a missing reserve is made again if possible.
const HOUSEKEEPING: Duration = Duration::from_secs(10);

/// Durability that a batch needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// Safe from the death of the process.
    Flush,
    /// Safe from a power loss.
    Sync,
}

/// Transactions that are written, published and answered together.
pub(super) struct Group {
    next: State,
    waiting: Vec<Waiting>,
}

/// Next step of a group.
pub(super) enum Stage {
    /// Write the batch to the database.
    Write(Group),
    /// Sync it.
    Sync(Group),
    /// Show the new state to readers.
    Publish(Group),
    /// Answer the callers.
    Answer(Vec<Waiting>),
}

pub(super) struct Writer {
    pub(super) backend: Box<dyn Backend>,
    pub(super) shared: Arc<Shared>,
    pub(super) options: StoreOptions,
    pub(super) metrics: Metrics,
    clock: Arc<dyn Clock>,
    /// Published state.
    pub(super) state: State,
    pub(super) version: Version,
    journal_sequence: u64,
    /// Records whose newest version is not in the backend; `None` = deleted.
    pub(super) pending: HashMap<AnyKey, Option<Encoded>>,
    pending_bytes: usize,
    pending_transactions: u32,
    pending_since: Option<Instant>,
    /// Chunks that each record has in the backend, where it has any.
    pub(super) chunks: HashMap<AnyKey, u16>,
    pub(super) degraded: Option<Degraded>,
    pub(super) reserve_released: bool,
    pub(super) quarantine_size: usize,
    table_gauges: Vec<(Table, Gauge)>,
    housekept: Option<Instant>,
}

impl Writer {
    pub(super) fn new(
        backend: Box<dyn Backend>,
        loaded: Loaded,
        options: StoreOptions,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
        shared: Arc<Shared>,
    ) -> Self {
        let table_gauges = Table::ALL
            .iter()
            .map(|table| {
                let label = TableLabel {
                    table: table.name().to_owned(),
                };
                (*table, metrics.store_records.get_or_create_owned(&label))
            })
            .collect();
        let mut writer = Self {
            backend,
            shared,
            options,
            metrics,
            clock,
            journal_sequence: last_journal_sequence(&loaded.state),
            state: loaded.state,
            version: loaded.version,
            pending: HashMap::new(),
            pending_bytes: 0,
            pending_transactions: 0,
            pending_since: None,
            chunks: loaded.chunks,
            degraded: None,
            reserve_released: false,
            quarantine_size: loaded.kept.len(),
            table_gauges,
            housekept: None,
        };
        let ops = writer.quarantine_ops(&loaded.quarantined);
        if !ops.is_empty()
            && let Err(error) = writer
                .backend
                .apply(&ops)
                .and_then(|()| writer.backend.sync())
        {
            writer.degrade(&error, None);
        }
        writer.refresh_metrics();
        writer
    }

    /// The thread's life: until it is closed or the last handle is gone.
    pub(super) fn run(mut self, requests: &Receiver<Request>) {
        let _guard = StoppedGuard(Arc::clone(&self.shared));
        loop {
            let first = match self.wakeup_in() {
                None => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(wait) => requests.recv_timeout(wait),
            };
            let mut group = Vec::new();
            match first {
                Ok(request) => group.push(request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let (answer, _) = oneshot::channel();
                    self.close(answer);
                    return;
                }
            }
            while group.len() < self.options.max_group {
                match requests.try_recv() {
                    Ok(request) => group.push(request),
                    Err(_) => break,
                }
            }
            if let Some(answer) = self.turn(group) {
                self.close(answer);
                return;
            }
        }
    }

    /// Handles a group and what is due. Returns the answer of a close request; requests behind it are
    /// dropped, which their callers see as `Closed`.
    pub(super) fn turn(&mut self, group: Vec<Request>) -> Option<DoneAnswer> {
        if self.recovery_is_due() {
            self.try_recover();
        }
        let (requests, closing) = until_close(group);
        let mut stage = self.begin(requests);
        while let Some(next) = stage {
            stage = self.advance(next);
        }
        self.shared.relieve();
        if closing.is_none() {
            self.tick();
        }
        closing
    }

    pub(super) fn recovery_is_due(&self) -> bool {
        self.degraded.as_ref().is_some_and(|d| d.is_due())
    }

    /// Takes requests on: refuses them, or returns what has to be done for them first.
    pub(super) fn begin(&mut self, requests: Vec<Request>) -> Option<Stage> {
        if requests.is_empty() {
            None
        } else if self.degraded.is_some() {
            self.refuse(requests);
            None
        } else {
            Some(self.gather(requests))
        }
    }

    /// Does what a group has to do next. Returns what is left after that.
    pub(super) fn advance(&mut self, stage: Stage) -> Option<Stage> {
        match stage {
            Stage::Write(group) => match self.write_batch() {
                Ok(()) => Some(Stage::Sync(group)),
                Err(error) => self.fail(group, &error),
            },
            Stage::Sync(group) => match self.reach(Depth::Sync) {
                Ok(()) => {
                    fail::fail_point!("store::flush::before_publish");
                    Some(Stage::Publish(group))
                }
                Err(error) => self.fail(group, &error),
            },
            Stage::Publish(group) => {
                self.state = group.next;
                self.publish();
                fail::fail_point!("store::commit::after_publish");
                Some(Stage::Answer(group.waiting))
            }
            Stage::Answer(waiting) => {
                self.answer(waiting);
                None
            }
        }
    }

    fn fail(&mut self, group: Group, error: &BackendError) -> Option<Stage> {
        self.degrade(error, Some(group.next));
        self.answer_failed(group.waiting, error);
        None
    }

    /// Writes what is pending, closes the backend and answers. The lock of the database is free when the
    /// answer arrives.
    pub(super) fn close(mut self, answer: DoneAnswer) {
        let result = if self.degraded.is_some() {
            self.try_recover();
            match &self.degraded {
                None => Ok(()),
                Some(degraded) => {
                    tracing::error!(
                        held = degraded.held,
                        reason = %degraded.reason,
                        "closing a degraded store, losing its buffered commits"
                    );
                    Err(CommitError::Unavailable {
                        reason: degraded.reason.clone(),
                    })
                }
            }
        } else {
            self.write(Depth::Sync).map_err(|error| {
                tracing::error!(error = %error.full_text(), "closing the store: the last write failed");
                unknown(&error)
            })
        };
        drop(self.backend);
        // Nobody waits when the last handle was dropped.
        drop(answer.send(result));
    }

    /// Checks the transactions of a group in their order, and applies each to what the previous ones left.
    fn gather(&mut self, requests: Vec<Request>) -> Stage {
        let mut next = self.state.clone();
        let mut class = Durability::Relaxed;
        let mut waiting = Vec::with_capacity(requests.len());
        for request in requests {
            match request {
                Request::Commit {
                    transaction,
                    encoded,
                    kind,
                    arrived,
                    room,
                    answer,
                } => {
                    let mut own = Durability::Relaxed;
                    let outcome = match check(&transaction, &next) {
                        Err(stale) => {
                            self.metrics.store_stale.inc();
                            Err(stale)
                        }
                        Ok(()) if transaction.is_empty() => Ok(self.version),
                        Ok(()) => {
                            own = self.apply(&mut next, &transaction, Some(encoded));
                            if kind != Kind::Plain {
                                own = Durability::Durable;
                            }
                            class = class.max(own);
                            Ok(self.version)
                        }
                    };
                    waiting.push(Waiting::Commit {
                        outcome,
                        stop: (kind == Kind::Stop).then_some(transaction),
                        arrived: (own == Durability::Durable).then_some(arrived),
                        room,
                        answer,
                    });
                }
                Request::Sync { answer } => {
                    class = Durability::Durable;
                    waiting.push(Waiting::Sync(answer));
                }
                // Split off before.
                Request::Close { .. } => {}
            }
        }
        let group = Group { next, waiting };
        if class == Durability::Durable {
            return Stage::Write(group);
        }
        if !self.pending.is_empty() && self.pending_since.is_none() {
            self.pending_since = Some(Instant::now());
        }
        Stage::Publish(group)
    }

    /// Applies a transaction to `next` under a new version, with its journal lines, and notes what has
    /// to be written. Without `encoded` nothing is noted: what is held is encoded at recovery.
    pub(super) fn apply(
        &mut self,
        next: &mut State,
        transaction: &Transaction,
        encoded: Option<Vec<Option<Encoded>>>,
    ) -> Durability {
        self.version += 1;
        self.pending_transactions += 1;
        let write = encoded.is_some();
        let mut encoded = encoded.unwrap_or_default().into_iter();
        let mut class = Durability::Relaxed;
        for mutation in &transaction.mutations {
            class = class.max(next.apply(mutation, self.version));
            if let Some(bytes) = encoded.next() {
                self.note(key_of(mutation), bytes);
            }
        }
        if transaction.journal.is_empty() {
            return class;
        }
        let at = self.clock.now();
        let generation = next.meta().map_or(0, |meta| meta.generation);
        for entry in &transaction.journal {
            self.journal_sequence += 1;
            let key: Arc<str> = journal_key(self.journal_sequence).into();
            let record = JournalRecord {
                at,
                generation,
                pod: entry.pod.clone(),
                what: entry.what.clone(),
                why: entry.why.clone(),
            }
            .into_any();
            if write {
                match codec::encode(&key, &record) {
                    Ok(bytes) => self.note((Table::Journal, Arc::clone(&key)), Some(bytes)),
                    Err(error) => {
                        // The length of the text was checked before it was queued.
                        tracing::error!(error = causes(&error), line = %entry.what, "cannot encode a journal line");
                        continue;
                    }
                }
            }
            next.apply(&Mutation::Put { key, record }, self.version);
        }
        while next.journal.len() > self.options.journal_lines {
            let Some(key) = next.journal.get_min().map(|(key, _)| Arc::clone(key)) else {
                break;
            };
            let delete = Mutation::Delete {
                table: Table::Journal,
                key,
            };
            next.apply(&delete, self.version);
            if write {
                self.note(key_of(&delete), None);
            }
        }
        class
    }

    fn note(&mut self, key: AnyKey, bytes: Option<Encoded>) {
        self.pending_bytes += bytes.as_ref().map_or(0, Encoded::size);
        let replaced = self.pending.insert(key, bytes).flatten();
        self.pending_bytes -= replaced.as_ref().map_or(0, Encoded::size);
    }

    /// Forgets what is pending: recovery compares whole states.
    pub(super) fn discard_pending(&mut self) {
        self.pending.clear();
        self.pending_bytes = 0;
        self.pending_transactions = 0;
        self.pending_since = None;
    }

    pub(super) fn advance_journal(&mut self, sequence: u64) {
        self.journal_sequence = self.journal_sequence.max(sequence);
    }

    /// Everything pending in one atomic batch, as far as `depth`.
    fn write(&mut self, depth: Depth) -> Result<(), BackendError> {
        self.write_batch()?;
        self.reach(depth)
    }

    /// Everything pending in one atomic batch.
    fn write_batch(&mut self) -> Result<(), BackendError> {
        fail::fail_point!("store::commit::before_write");
        let mut ops = Vec::with_capacity(self.pending.len());
        for (key, bytes) in self.pending.drain() {
            let old = self.chunks.get(&key).copied().unwrap_or(0);
            let mut new = 0;
            match bytes {
                Some(encoded) => {
                    new = encoded.chunks.len() as u16;
                    ops.extend(
                        encoded
                            .into_pairs(key.0, &key.1)
                            .map(|(key, value)| Op::Put { key, value }),
                    );
                }
                None => ops.push(Op::Delete {
                    key: record_key(key.0, &key.1),
                }),
            }
            ops.extend((new..old).map(|index| Op::Delete {
                key: chunk_key(key.0, &key.1, index),
            }));
            match (old, new) {
                (0, 0) => {}
                (_, 0) => {
                    self.chunks.remove(&key);
                }
                _ => {
                    self.chunks.insert(key, new);
                }
            }
        }
        self.pending_bytes = 0;
        self.pending_since = None;
        if !ops.is_empty() {
            self.shared
                .during(Doing::Write, || self.backend.apply(&ops))?;
        }
        Ok(())
    }

    /// Brings what was written as far as `depth`.
    fn reach(&mut self, depth: Depth) -> Result<(), BackendError> {
        match depth {
            Depth::Flush => self.shared.during(Doing::Flush, || self.backend.flush())?,
            Depth::Sync => self.shared.during(Doing::Sync, || self.backend.sync())?,
        }
        self.shared.count_queue();
        let transactions = std::mem::take(&mut self.pending_transactions);
        if transactions > 0 {
            self.metrics
                .store_batch_size
                .observe(f64::from(transactions));
        }
        Ok(())
    }

    /// Writes relaxed changes that have waited long enough, and does the housekeeping.
    fn tick(&mut self) {
        if self.relaxed_are_due() {
            self.flush_relaxed();
        }
        self.keep_house();
    }

    /// Returns whether relaxed changes have waited long enough.
    pub(super) fn relaxed_are_due(&self) -> bool {
        let waited = |since: Instant| since.elapsed() >= self.options.relaxed_delay;
        self.degraded.is_none()
            && (self.pending_bytes > PENDING_LIMIT
                || self
                    .pending_since
                    .is_some_and(|since| self.options.inline || waited(since)))
    }

    /// Writes the relaxed changes that wait.
    pub(super) fn flush_relaxed(&mut self) {
        if let Err(error) = self.write(Depth::Flush) {
            let published = self.state.clone();
            self.degrade(&error, Some(published));
        }
    }

    /// Measures the store and takes the reserve back, every [`HOUSEKEEPING`].
    pub(super) fn keep_house(&mut self) {
        if self.degraded.is_some() {
            return;
        }
        let now = Instant::now();
        if self
            .housekept
            .is_none_or(|at| now.duration_since(at) >= HOUSEKEEPING)
        {
            self.housekept = Some(now);
            self.refresh_metrics();
            self.restore_reserve();
        }
    }

    /// Returns how long the writer may sleep without a request.
    pub(super) fn wakeup_in(&self) -> Option<Duration> {
        let now = Instant::now();
        if let Some(degraded) = &self.degraded {
            return Some(degraded.due_in());
        }
        if let Some(since) = self.pending_since {
            return Some((since + self.options.relaxed_delay).saturating_duration_since(now));
        }
        self.reserve_released.then_some(HOUSEKEEPING)
    }

    pub(super) fn publish(&self) {
        self.shared.current.store(Arc::new(self.state.clone()));
        self.shared.published.send_replace(self.version);
    }

    /// Moves damaged pairs into the quarantine prefix, as long as there is room; what another schema
    /// wrote is not damaged and stays.
    pub(super) fn quarantine_ops(&mut self, found: &[codec::Quarantined]) -> Vec<Op> {
        let mut ops = Vec::new();
        for quarantined in found {
            tracing::error!(
                table = quarantined.table.map_or("unknown", Table::name),
                key = %quarantined.key,
                reason = %quarantined.reason,
                "moved a damaged record to quarantine"
            );
            let other_schema = quarantined.reason.is_newer()
                || matches!(quarantined.reason, QuarantineReason::OlderVersion { .. });
            if other_schema || self.quarantine_size >= self.options.quarantine_limit {
                continue;
            }
            self.quarantine_size += 1;
            let (key, value) = quarantined.to_pair();
            ops.push(Op::Put { key, value });
            ops.push(Op::Delete {
                key: quarantined.raw_key.clone(),
            });
        }
        ops
    }

    pub(super) fn refresh_metrics(&self) {
        for (table, gauge) in &self.table_gauges {
            gauge.set(i64::try_from(self.state.len_of(*table)).unwrap_or(i64::MAX));
        }
        self.metrics
            .store_quarantined
            .set(i64::try_from(self.shared.quarantined.load().len()).unwrap_or(i64::MAX));
        match self.backend.size_on_disk() {
            Ok(bytes) => {
                self.metrics
                    .store_size
                    .set(i64::try_from(bytes).unwrap_or(i64::MAX));
            }
            Err(error) => {
                tracing::warn!(error = %error.full_text(), "cannot measure the store");
            }
        }
    }
}

/// Splits a group at a request to close: those before it, and its answer.
pub(super) fn until_close(group: Vec<Request>) -> (Vec<Request>, Option<DoneAnswer>) {
    let mut requests = Vec::with_capacity(group.len());
    for request in group {
        if let Request::Close { answer } = request {
            return (requests, Some(answer));
        }
        requests.push(request);
    }
    (requests, None)
}

/// Notifies readers of the end of the writer when it panicked.
struct StoppedGuard(Arc<Shared>);

impl Drop for StoppedGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.set_panicked();
        }
    }
}

pub(super) fn key_of(mutation: &Mutation) -> AnyKey {
    match mutation {
        Mutation::Put { key, record } => (record.table(), Arc::clone(key)),
        Mutation::Delete { table, key } => (*table, Arc::clone(key)),
    }
}

pub(super) fn last_journal_sequence(state: &State) -> u64 {
    state
        .journal
        .get_max()
        .and_then(|(key, _)| u64::from_str_radix(key, 16).ok())
        .unwrap_or(0)
}

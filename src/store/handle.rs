//! Handle of the store, which callers hold.

use std::fmt;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::time::Instant;

use super::backend::{Backend, MemoryBackend};
use super::codec::{self, Encoded, Loaded};
use super::paced::Pace;
use super::request::{Answer, Kind, Request};
use super::shared::Shared;
use super::writer::Writer;
use super::{
    CommitError, Committed, Intent, SetAside, SpaceReserve, StopDecision, StopPermit, StoreError,
    StoreHealth,
};
use crate::core::state::{Mutation, State, Transaction, Version};
use crate::types::{Clock, metrics::Metrics};

/// Longest text of one journal line, in bytes.
const JOURNAL_TEXT_LIMIT: usize = 64 * 1024;

/// Room in the queue that a transaction occupies.
type Room = Option<OwnedSemaphorePermit>;

/// Settings of a store.
pub struct StoreOptions {
    /// Lines the journal keeps; older ones are deleted in the batch that adds new ones.
    pub journal_lines: usize,
    /// Longest time that a relaxed change waits for a batch.
    pub relaxed_delay: Duration,
    /// Most transactions of one batch.
    pub max_group: usize,
    /// Pause after the first failed recovery; doubles with each further one.
    pub backoff_min: Duration,
    /// Longest pause between recoveries.
    pub backoff_max: Duration,
    /// Time limit of a stop on a disk that neither works nor fails; such a disk then counts as hanging.
    pub stall_timeout: Duration,
    /// Most bytes that wait in the queue of the writer, roughly: a transaction counts as twice its encoded records,
    /// its journal lines and a KiB. [`Store::commit`] waits for room, [`Store::submit`] is refused without; stops
    /// take no room, there are only so many of them.
    pub queue_limit: usize,
    /// Number of damaged records that are kept in the store for examination; further ones stay where they are.
    pub quarantine_limit: usize,
    /// Space that is freed when the disk is full.
    pub reserve: Option<Box<dyn SpaceReserve>>,
    /// Work on the calling thread instead of a writer thread, and write relaxed changes at once: for
    /// simulations that own time. `submit` then blocks for as long as the backend does.
    pub inline: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            journal_lines: 20_000,
            relaxed_delay: Duration::from_millis(75),
            max_group: 1024,
            backoff_min: Duration::from_millis(200),
            backoff_max: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(5),
            queue_limit: 32 * 1024 * 1024,
            quarantine_limit: 256,
            reserve: None,
            inline: false,
        }
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions")
            .field("journal_lines", &self.journal_lines)
            .field("relaxed_delay", &self.relaxed_delay)
            .field("inline", &self.inline)
            .finish_non_exhaustive()
    }
}

/// An answer that has not come yet. Dropping it does not cancel the commit.
#[derive(Debug)]
pub struct PendingCommit(oneshot::Receiver<Result<Answer, CommitError>>);

impl PendingCommit {
    /// Waits for the answer. Cancel-safe: the commit happens whether or not anybody waits.
    ///
    /// # Errors
    /// See [`CommitError`].
    pub async fn wait(self) -> Result<Version, CommitError> {
        Ok(self.answer().await?.version)
    }

    async fn answer(self) -> Result<Answer, CommitError> {
        self.0.await.map_err(|_| CommitError::Closed)?
    }
}

enum Driver {
    Thread {
        queue: mpsc::Sender<Request>,
        thread: Mutex<Option<JoinHandle<()>>>,
    },
    Inline(Mutex<Option<Box<Writer>>>),
    Task(UnboundedSender<Request>),
}

struct Inner {
    shared: Arc<Shared>,
    driver: Driver,
}

/// The store: snapshots for readers, one writer for everybody else. Cheap to clone. When the last clone
/// is dropped, what is queued is still written.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}

impl Store {
    /// Starts the writer on an open backend and what was loaded from it. Damaged records are moved aside
    /// within the backend, so that they are kept and block nothing; if that write fails, the store starts
    /// degraded and recovers like after any other failure.
    ///
    /// # Errors
    /// When the writer thread cannot be started.
    pub fn start(
        backend: Box<dyn Backend>,
        loaded: Loaded,
        options: StoreOptions,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Result<Self, StoreError> {
        let inline = options.inline;
        let (shared, writer) = prepare(backend, loaded, options, clock, metrics);
        let driver = if inline {
            Driver::Inline(Mutex::new(Some(Box::new(writer))))
        } else {
            let (queue, requests) = mpsc::channel();
            let thread = std::thread::Builder::new()
                .name("store-writer".to_owned())
                .spawn(move || writer.run(&requests))
                .map_err(StoreError::Spawn)?;
            Driver::Thread {
                queue,
                thread: Mutex::new(Some(thread)),
            }
        };
        Ok(Self(Arc::new(Inner { shared, driver })))
    }

    /// Starts the writer as a task of this runtime that asks `pace` before each step: for simulations.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn start_paced(
        backend: Box<dyn Backend>,
        loaded: Loaded,
        options: StoreOptions,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
        pace: Arc<dyn Pace>,
    ) -> Self {
        let (shared, writer) = prepare(backend, loaded, options, clock, metrics);
        let (queue, requests) = unbounded_channel();
        tokio::spawn(writer.run_paced(requests, pace));
        let driver = Driver::Task(queue);
        Self(Arc::new(Inner { shared, driver }))
    }

    /// A store without a disk, for tests and `--runonce` dry runs. It works on the calling thread.
    pub fn in_memory(clock: Arc<dyn Clock>) -> Self {
        let options = StoreOptions {
            inline: true,
            ..StoreOptions::default()
        };
        let backend = Box::new(MemoryBackend::new());
        let (shared, writer) = prepare(
            backend,
            Loaded::default(),
            options,
            clock,
            Metrics::default(),
        );
        Self(Arc::new(Inner {
            shared,
            driver: Driver::Inline(Mutex::new(Some(Box::new(writer)))),
        }))
    }

    /// The newest published state. Never waits for the writer. It is immutable, so it also serves as a
    /// consistent copy for a backup ([`codec::encode_state`]).
    pub fn snapshot(&self) -> Arc<State> {
        self.0.shared.current.load_full()
    }

    /// Returns the newest published state with its version, once all of it is on the disk. For a backup, which must not be
    /// ahead of its store after a power loss.
    ///
    /// # Errors
    /// `Unavailable`, `Unknown` or `Closed`.
    pub async fn snapshot_on_disk(&self) -> Result<(Arc<State>, Version), CommitError> {
        let state = self.snapshot();
        let version = *self.published().borrow();
        self.sync().await?;
        Ok((state, version))
    }

    /// Commits and waits until the transaction is as durable as its mutations ask. While the queue is full it
    /// waits for room first.
    /// Cancel-safe: a caller that goes away while there is no room has committed nothing; after that the commit
    /// happens without it.
    ///
    /// # Errors
    /// See [`CommitError`].
    pub async fn commit(&self, transaction: Transaction) -> Result<Version, CommitError> {
        self.send_when_room(transaction, Kind::Plain)
            .await
            .wait()
            .await
    }

    /// Queues a commit without waiting; for callers that must not wait for the disk (the sync loop). Transactions are
    /// committed in the order in which they are submitted. When the queue is full, because the disk hangs or does not
    /// keep up, the answer is `Unavailable`, nothing was committed, and the health reports it: submit only changes that
    /// the next observation repeats.
    pub fn submit(&self, transaction: Transaction) -> PendingCommit {
        self.send_transaction(transaction, Kind::Plain, |shared, transaction, encoded| {
            let room = shared.room_now(transaction, encoded);
            room.map(Some).ok_or_else(|| CommitError::Unavailable {
                reason: "the queue of the writer is full, the disk does not keep up".to_owned(),
            })
        })
    }

    /// Commits a decision and returns the receipt that its effect requires. The decision is on the disk
    /// then, whatever the class of its mutations.
    ///
    /// # Errors
    /// See [`CommitError`].
    pub async fn commit_intent<I: Intent>(
        &self,
        intent: I,
        with: Transaction,
    ) -> Result<Committed<I>, CommitError> {
        let transaction = intent.transaction(&self.snapshot()).and(with);
        let pending = self.send_when_room(transaction, Kind::Durable).await;
        let version = pending.wait().await?;
        Ok(Committed::new(intent, version))
    }

    /// Commits a decision to stop something and returns the permit that the stop requires. Stops fail open: see
    /// [`Self::commit_or_hold`].
    ///
    /// # Errors
    /// `Stale`, `Closed` and `Invalid` only.
    pub async fn commit_stop(&self, decision: StopDecision) -> Result<StopPermit, CommitError> {
        let transaction = decision.transaction(&self.snapshot())?;
        let held = self.commit_or_hold(transaction).await?;
        Ok(StopPermit::new(held))
    }

    /// Commits what belongs to a stop, such as the ends of containers and the status of the pod, and must not hold it up.
    /// While the store is degraded the transaction is held in memory, visible to readers, and written first on recovery.
    /// Of a record that is held again only the newest version is kept, so what is held is bounded by the number of
    /// records. If the disk hangs longer than [`StoreOptions::stall_timeout`], the transaction stays in the queue, first
    /// come first served. It never waits for room in the queue. Returns whether it is held, or still in the queue.
    ///
    /// # Errors
    /// `Stale`, `Closed` and `Invalid` only.
    pub async fn commit_or_hold(&self, transaction: Transaction) -> Result<bool, CommitError> {
        let shared = &self.0.shared;
        shared.check();
        if shared.is_stalled() && transaction.is_empty() {
            // Nothing to write later: it need not be queued again and again.
            return Ok(true);
        }
        let pending = self.send_transaction(transaction, Kind::Stop, |_, _, _| Ok(None));
        match tokio::time::timeout(shared.stall_timeout, pending.answer()).await {
            Ok(answer) => Ok(answer?.held),
            Err(_) => {
                shared.check();
                tracing::warn!(
                    "the disk of the store hangs, stopping before the record is written"
                );
                Ok(true)
            }
        }
    }

    /// Waits until everything submitted before is on the disk, relaxed changes included. For the store itself and for tests:
    /// what has to be on the disk before an effect is a durable record (`tests/layers.rs`).
    ///
    /// # Errors
    /// `Unavailable`, `Unknown` or `Closed`.
    pub async fn sync(&self) -> Result<(), CommitError> {
        let (answer, pending) = oneshot::channel();
        self.send(Request::Sync { answer });
        pending.await.map_err(|_| CommitError::Closed)?
    }

    /// Writes and syncs what is queued, closes the backend, and ends the writer. Commits that come later
    /// are answered with `Closed`; snapshots go on working.
    ///
    /// # Errors
    /// When the last write failed, or the store was degraded and could not recover: changes that were
    /// acknowledged as relaxed or held may be lost. `Closed` when it was closed before.
    pub async fn close(self) -> Result<(), CommitError> {
        let (answer, pending) = oneshot::channel();
        self.send(Request::Close { answer });
        let result = pending.await.map_err(|_| CommitError::Closed)?;
        if let Driver::Thread { thread, .. } = &self.0.driver {
            let thread = thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(thread) = thread {
                // The writer has answered as its last act: this does not block for long.
                if thread.join().is_err() {
                    return Err(CommitError::Unknown {
                        reason: "the writer of the store panicked".to_owned(),
                    });
                }
            }
        }
        result
    }

    /// Health, for readiness and events.
    pub fn health(&self) -> watch::Receiver<StoreHealth> {
        self.0.shared.health()
    }

    /// Waits until the writer has panicked. No commit is answered from then on, also none that stops something, so the process must
    /// end: another one opens the store anew. Cancel-safe.
    pub async fn panicked(&self) {
        let mut panicked = self.0.shared.panicked();
        // Its sender lives as long as this handle.
        drop(panicked.wait_for(|panicked| *panicked).await);
    }

    /// Checks whether the disk hangs, and shows it in the health: a call that does not return cannot report itself.
    /// Call it regularly; it costs next to nothing and never blocks on the disk.
    pub fn check_disk(&self) {
        self.0.shared.check();
    }

    /// Raw values that could not be used, as of the last reading of the disk: when the store was opened, or when it
    /// last recovered.
    pub fn set_aside(&self) -> Arc<Vec<SetAside>> {
        self.0.shared.quarantined.load_full()
    }

    /// Changes whenever a new state was published.
    pub fn published(&self) -> watch::Receiver<Version> {
        self.0.shared.published.subscribe()
    }

    /// Queues a transaction as soon as there is room for it.
    async fn send_when_room(&self, transaction: Transaction, kind: Kind) -> PendingCommit {
        let arrived = Instant::now();
        let (answer, pending) = oneshot::channel();
        match encode(&transaction) {
            Ok(encoded) => {
                let room = match self.0.driver {
                    Driver::Thread { .. } | Driver::Task(_) => {
                        self.0.shared.room(&transaction, &encoded).await
                    }
                    Driver::Inline(_) => None,
                };
                self.send(Request::Commit {
                    transaction,
                    encoded,
                    kind,
                    arrived,
                    room,
                    answer,
                });
            }
            // The receiver is right here.
            Err(reason) => drop(answer.send(Err(CommitError::Invalid { reason }))),
        }
        PendingCommit(pending)
    }

    /// Queues a transaction now, or answers why not.
    fn send_transaction(
        &self,
        transaction: Transaction,
        kind: Kind,
        room: impl FnOnce(&Shared, &Transaction, &[Option<Encoded>]) -> Result<Room, CommitError>,
    ) -> PendingCommit {
        let (answer, pending) = oneshot::channel();
        let ready = encode(&transaction)
            .map_err(|reason| CommitError::Invalid { reason })
            .and_then(|encoded| match self.0.driver {
                Driver::Thread { .. } | Driver::Task(_) => {
                    Ok((room(&self.0.shared, &transaction, &encoded)?, encoded))
                }
                Driver::Inline(_) => Ok((None, encoded)),
            });
        match ready {
            Ok((room, encoded)) => self.send(Request::Commit {
                transaction,
                encoded,
                kind,
                arrived: Instant::now(),
                room,
                answer,
            }),
            // The receiver is right here.
            Err(error) => drop(answer.send(Err(error))),
        }
        PendingCommit(pending)
    }

    /// A request that cannot be delivered is dropped with its answer, which the caller sees as `Closed`.
    fn send(&self, request: Request) {
        match &self.0.driver {
            Driver::Thread { queue, .. } => drop(queue.send(request)),
            Driver::Task(queue) => drop(queue.send(request)),
            Driver::Inline(writer) => {
                let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
                let closing = writer.as_mut().and_then(|w| w.turn(vec![request]));
                if let Some(answer) = closing
                    && let Some(writer) = writer.take()
                {
                    writer.close(answer);
                }
            }
        }
    }
}

fn prepare(
    backend: Box<dyn Backend>,
    loaded: Loaded,
    options: StoreOptions,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
) -> (Arc<Shared>, Writer) {
    let shared = Arc::new(Shared::new(&loaded, &options, &metrics));
    let writer = Writer::new(
        backend,
        loaded,
        options,
        clock,
        metrics,
        Arc::clone(&shared),
    );
    (shared, writer)
}

/// Encodes the records of a transaction, on the caller's thread: the writer has better things to do, and
/// what cannot be encoded never reaches it.
fn encode(transaction: &Transaction) -> Result<Vec<Option<codec::Encoded>>, String> {
    for entry in &transaction.journal {
        let length = entry.what.len() + entry.why.len();
        if length > JOURNAL_TEXT_LIMIT {
            return Err(format!(
                "a journal line has {length} bytes, {JOURNAL_TEXT_LIMIT} are allowed"
            ));
        }
    }
    transaction
        .mutations
        .iter()
        .map(|mutation| match mutation {
            Mutation::Put { key, record } => codec::encode(key, record).map(Some).map_err(|e| {
                let cause = std::error::Error::source(&e).map(|c| format!(": {c}"));
                format!(
                    "{} {key}: {e}{}",
                    record.table().name(),
                    cause.unwrap_or_default()
                )
            }),
            Mutation::Delete { .. } => Ok(None),
        })
        .collect()
}

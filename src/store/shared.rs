//! State that the writer and the handles of a store share: the published state, the health, the room in the queue.
//!
//! The input is the writer's results and errors, and the checks of monitors; the output is snapshots and one
//! [`StoreHealth`]. Nothing here blocks on the disk.
//!
//! **Invariant:** a call that does not return is noticed from outside: the writer only notes that it has begun one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use super::codec::{Encoded, Loaded};
use super::{SetAside, StoreHealth, StoreOptions};
use crate::core::state::{State, Transaction, Version};
use crate::types::metrics::Metrics;

/// Unit of the room in the queue, in bytes.
const UNIT: usize = 1024;
/// Bits of a flight that say what is being done; the rest counts.
const DOING: u64 = 0xF;

/// A call of the writer that the disk can keep from returning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    Write = 1,
    Flush = 2,
    Sync = 3,
}

fn name_of(flight: u64) -> &'static str {
    match flight & DOING {
        1 => "writing a batch to the database",
        2 => "flushing the database",
        _ => "syncing the database file",
    }
}

/// Problems that keep the store from working.
#[derive(Debug, Default)]
struct Troubles {
    /// A write failed: the reason, and whether the disk is full.
    failed: Option<(String, bool)>,
    /// A call that does not return, and for how long.
    stalled: Option<(&'static str, Duration)>,
    /// The queue has been full and is not half empty yet.
    saturated: bool,
    /// The flight that was seen last, and when it was seen first.
    seen: Option<(u64, Instant)>,
    /// Kind of the problem that was logged last.
    told: Kind,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    None,
    Failed,
    Stalled,
    Saturated,
}

/// See the module.
pub(super) struct Shared {
    pub(super) current: ArcSwap<State>,
    pub(super) published: watch::Sender<Version>,
    pub(super) quarantined: ArcSwap<Vec<SetAside>>,
    health: watch::Sender<StoreHealth>,
    /// True if the writer has panicked.
    panicked: watch::Sender<bool>,
    troubles: Mutex<Troubles>,
    /// Call the writer is in: a count, and a [`Doing`] or 0.
    flight: AtomicU64,
    /// True if a monitor found that the flight does not end.
    stalled: AtomicBool,
    saturated: AtomicBool,
    room: Arc<Semaphore>,
    room_total: u32,
    pub(super) stall_timeout: Duration,
    degraded: Gauge,
    refused: Counter,
    queue: Gauge,
}

impl Shared {
    pub(super) fn new(loaded: &Loaded, options: &StoreOptions, metrics: &Metrics) -> Self {
        let units = (options.queue_limit / UNIT).clamp(1, Semaphore::MAX_PERMITS);
        let room_total = u32::try_from(units).unwrap_or(u32::MAX);
        let shared = Self {
            current: ArcSwap::from_pointee(loaded.state.clone()),
            published: watch::Sender::new(loaded.version),
            quarantined: ArcSwap::default(),
            health: watch::Sender::new(StoreHealth::Ok),
            panicked: watch::Sender::new(false),
            troubles: Mutex::default(),
            flight: AtomicU64::new(0),
            stalled: AtomicBool::new(false),
            saturated: AtomicBool::new(false),
            room: Arc::new(Semaphore::new(room_total as usize)),
            room_total,
            stall_timeout: options.stall_timeout,
            degraded: metrics.store_degraded.clone(),
            refused: metrics.store_commit_errors.clone(),
            queue: metrics.store_queue.clone(),
        };
        let found = loaded.quarantined.iter().chain(&loaded.kept);
        shared
            .quarantined
            .store(Arc::new(found.map(SetAside::from).collect()));
        shared
    }

    pub(super) fn health(&self) -> watch::Receiver<StoreHealth> {
        self.health.subscribe()
    }

    pub(super) fn panicked(&self) -> watch::Receiver<bool> {
        self.panicked.subscribe()
    }

    /// The writer is gone for good.
    pub(super) fn set_panicked(&self) {
        self.set_failed(Some(("the writer of the store panicked".to_owned(), false)));
        self.panicked.send_replace(true);
    }

    fn troubles(&self) -> MutexGuard<'_, Troubles> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A write failed, or (`None`) the store has recovered.
    pub(super) fn set_failed(&self, failed: Option<(String, bool)>) {
        let mut troubles = self.troubles();
        troubles.failed = failed;
        self.show(&mut troubles);
    }

    /// Watchers are woken when the kind of trouble changes; how long a disk has hung is there to be read.
    fn show(&self, troubles: &mut Troubles) {
        let degraded = |reason, out_of_space| StoreHealth::Degraded {
            reason,
            out_of_space,
        };
        let (kind, health) = if let Some((reason, out_of_space)) = &troubles.failed {
            (Kind::Failed, degraded(reason.clone(), *out_of_space))
        } else if let Some((doing, took)) = troubles.stalled {
            let reason = format!(
                "the disk hangs: {doing} has not returned for {} s",
                took.as_secs()
            );
            (Kind::Stalled, degraded(reason, false))
        } else if troubles.saturated {
            let reason = format!(
                "the disk does not keep up: {} KiB wait in the queue of the writer",
                self.room_total
            );
            (Kind::Saturated, degraded(reason, false))
        } else {
            (Kind::None, StoreHealth::Ok)
        };
        let told = std::mem::replace(&mut troubles.told, kind);
        self.degraded.set(i64::from(kind != Kind::None));
        self.health.send_if_modified(|current| {
            let differs = *current != health;
            *current = health;
            told != kind || (kind == Kind::Failed && differs)
        });
    }

    /// Makes a call of the writer's that the disk may keep from returning.
    pub(super) fn during<T>(&self, doing: Doing, call: impl FnOnce() -> T) -> T {
        let flight = self.enter(doing);
        let result = call();
        self.flight.store(flight, Ordering::SeqCst);
        if self.stalled.swap(false, Ordering::SeqCst) {
            tracing::info!("the disk of the store answers again");
            let mut troubles = self.troubles();
            troubles.stalled = None;
            self.show(&mut troubles);
        }
        result
    }

    /// Notes that the writer is in a call. Returns what it is noted as when it has returned.
    pub(super) fn enter(&self, doing: Doing) -> u64 {
        let before = self.flight.load(Ordering::Relaxed);
        let flight = (before & !DOING).wrapping_add(DOING + 1);
        self.flight.store(flight | doing as u64, Ordering::SeqCst);
        flight
    }

    /// Checks whether the writer has been in one call since an earlier check, for longer than it should.
    pub(super) fn check(&self) {
        self.relieve();
        let flight = self.flight.load(Ordering::SeqCst);
        if flight & DOING == 0 {
            return;
        }
        let now = Instant::now();
        let mut troubles = self.troubles();
        let since = match troubles.seen {
            Some((seen, since)) if seen == flight => since,
            _ => {
                troubles.seen = Some((flight, now));
                return;
            }
        };
        let took = now.duration_since(since);
        if took < self.stall_timeout {
            return;
        }
        if troubles.stalled.is_none() {
            tracing::error!(
                doing = name_of(flight),
                ?took,
                "the disk of the store hangs"
            );
        }
        troubles.stalled = Some((name_of(flight), took));
        self.stalled.store(true, Ordering::SeqCst);
        // It may have returned meanwhile, without seeing the note.
        if self.flight.load(Ordering::SeqCst) != flight {
            self.stalled.store(false, Ordering::SeqCst);
            troubles.stalled = None;
        }
        self.show(&mut troubles);
    }

    /// Returns whether the writer is known to hang.
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::SeqCst)
    }

    /// Room for a transaction, as soon as there is some. First come, first served.
    pub(super) async fn room(
        &self,
        transaction: &Transaction,
        encoded: &[Option<Encoded>],
    ) -> Option<OwnedSemaphorePermit> {
        let units = self.units(transaction, encoded);
        // It is never closed.
        let room = Arc::clone(&self.room).acquire_many_owned(units).await.ok();
        self.count_queue();
        room
    }

    /// Room for a transaction, if there is some now.
    pub(super) fn room_now(
        &self,
        transaction: &Transaction,
        encoded: &[Option<Encoded>],
    ) -> Option<OwnedSemaphorePermit> {
        let units = self.units(transaction, encoded);
        let room = Arc::clone(&self.room).try_acquire_many_owned(units).ok();
        self.count_queue();
        if room.is_none() {
            self.refused.inc();
            self.saturate();
        }
        room
    }

    /// Returns the room that a transaction occupies: the queue holds its records encoded and decoded.
    fn units(&self, transaction: &Transaction, encoded: &[Option<Encoded>]) -> u32 {
        let records: usize = encoded.iter().flatten().map(Encoded::size).sum();
        let lines: usize = transaction
            .journal
            .iter()
            .map(|entry| entry.what.len() + entry.why.len())
            .sum();
        let bytes = 2 * records + lines + UNIT * (1 + encoded.len() / 4);
        // One that is bigger than the queue has it for itself.
        u32::try_from(bytes.div_ceil(UNIT))
            .unwrap_or(u32::MAX)
            .min(self.room_total)
    }

    /// Sets the metric of the bytes that wait for the writer.
    pub(super) fn count_queue(&self) {
        let taken = (self.room_total as usize).saturating_sub(self.room.available_permits());
        let bytes = i64::try_from(taken.saturating_mul(UNIT)).unwrap_or(i64::MAX);
        self.queue.set(bytes);
    }

    fn saturate(&self) {
        {
            let mut troubles = self.troubles();
            if !self.saturated.swap(true, Ordering::SeqCst) {
                tracing::error!("the queue of the store is full: the disk does not keep up");
                troubles.saturated = true;
                self.show(&mut troubles);
            }
        }
        // The room may have come back before the note was there to be seen.
        self.relieve();
    }

    /// Called when there may be room again.
    pub(super) fn relieve(&self) {
        if !self.saturated.load(Ordering::SeqCst)
            || self.room.available_permits() * 2 < self.room_total as usize
        {
            return;
        }
        let mut troubles = self.troubles();
        if self.saturated.swap(false, Ordering::SeqCst) {
            tracing::info!("the queue of the store has room again");
            troubles.saturated = false;
            self.show(&mut troubles);
        }
    }
}

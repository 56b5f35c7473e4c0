//! Layer 4: the event recorder.
//!
//! In: [`Event`]s from every layer below. Out: a log line and a journal line for each event that is told, and,
//! with an API server, its Event object (see [`api_events`], which correlates and bounds on its own, and keeps what
//! waits in table `objects`). In log and journal, events that repeat within ten minutes are counted and told at the 1st,
//! 2nd, 4th, 8th, … time; the rate of what is told is bounded. What is left out there is counted
//! (`holdfast_events_discarded_total`), never queued.
//!
//! **Invariant:** [`JournalRecorder::record`] never waits: its memory and its time are bounded.

mod aggregate;
mod api;
mod correlate;
mod keep;
mod queue;
mod record;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use aggregate::Aggregator;
pub use aggregate::EventRate;
pub use api::{ApiEvents, EventSink, api_events};
pub use record::{KeptEvent, kept_events};

use crate::core::state::Transaction;
use crate::store::{CommitError, Store};
use crate::types::metrics::Metrics;
use crate::types::{Clock, Event, EventRecorder, EventType};

/// The longest message an event keeps, in bytes; the API server refuses longer ones.
const MAX_MESSAGE: usize = 1024;
/// Events kept until [`JournalRecorder::forward`]: an agent opens its store before it has a client.
const MAX_EARLY: usize = 16;

/// Writes events to the log and to the store's journal.
pub struct JournalRecorder {
    store: Store,
    clock: Arc<dyn Clock>,
    aggregator: Mutex<Aggregator>,
    metrics: Metrics,
    api: OnceLock<ApiEvents>,
    /// The first events, for the API server.
    early: Mutex<Vec<Event>>,
}

impl std::fmt::Debug for JournalRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalRecorder")
            .field("dropped", &self.dropped())
            .finish_non_exhaustive()
    }
}

impl JournalRecorder {
    /// A recorder that writes to `store`, and counts in `metrics` what it leaves out.
    pub fn new(store: Store, clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        Self {
            store,
            clock,
            aggregator: Mutex::new(Aggregator::default()),
            metrics,
            api: OnceLock::new(),
            early: Mutex::default(),
        }
    }

    /// Sends events to the API server from now on, including the first few events before this call. Only the first call
    /// counts.
    pub fn forward(&self, api: ApiEvents) {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        if self.api.set(api.clone()).is_err() {
            tracing::warn!("events are forwarded to an API server already");
            return;
        }
        std::mem::take(&mut *early)
            .into_iter()
            .for_each(|event| api.take(event));
    }

    /// For the API server, now or later.
    fn pass_on(&self, event: &Event) {
        if self.api.get().is_none() {
            let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
            // Nothing is put there any more once it was emptied.
            if self.api.get().is_none() {
                if early.len() < MAX_EARLY {
                    early.push(event.clone());
                }
                return;
            }
        }
        if let Some(api) = self.api.get() {
            api.take(event.clone());
        }
    }

    /// Events left out because there were too many at once; repetitions do not count.
    pub fn dropped(&self) -> u64 {
        self.metrics.events_discarded.get()
    }
}

impl EventRecorder for JournalRecorder {
    fn record(&self, mut event: Event) {
        shorten(&mut event.message);
        self.pass_on(&event);
        let now = self.clock.now();
        let verdict = match self.aggregator.lock() {
            Ok(mut aggregator) => aggregator.take(&event, now),
            Err(poisoned) => poisoned.into_inner().take(&event, now),
        };
        let count = match verdict {
            aggregate::Verdict::Tell { count } => count,
            aggregate::Verdict::Repeated => return,
            aggregate::Verdict::TooMany => {
                let dropped = self.metrics.events_discarded.inc() + 1;
                if dropped.is_power_of_two() {
                    tracing::warn!(dropped, "too many events at once, dropping some");
                }
                return;
            }
        };
        log(&event, count);
        let why = describe(&event, count);
        let what = format!("event {}", event.reason);
        let uid = event.pod.as_ref().map(|pod| &pod.uid);
        // The answer is not waited for; a store that fails tells so through its health.
        drop(
            self.store
                .submit(Transaction::new().journal(uid, what, why)),
        );
    }
}

impl JournalRecorder {
    /// Sets the rate of emitted events from now on; [`EventRate::default`] before the first call.
    pub fn limit(&self, rate: EventRate) {
        match self.aggregator.lock() {
            Ok(mut aggregator) => aggregator.limit(rate),
            Err(poisoned) => poisoned.into_inner().limit(rate),
        }
    }
}

/// Forgets what waits for an API server, on a node that has none any more.
///
/// # Errors
/// When the store takes no commits.
pub async fn forget_waiting(store: &Store) -> Result<(), CommitError> {
    let state = store.snapshot();
    let told = state.all_stored::<record::ToldRecord>();
    let gone = told.fold(Transaction::new(), |gone, told| {
        gone.delete_object(&told.key())
    });
    let rooms = state.all_stored::<record::RoomRecord>();
    let gone = rooms.fold(gone, |gone, room| gone.delete_object(&room.key()));
    if !gone.is_empty() {
        store.commit(gone).await?;
    }
    Ok(())
}

/// Cuts a message at the last whole character that fits.
fn shorten(message: &mut String) {
    if message.len() > MAX_MESSAGE {
        let mut ends = (0..=MAX_MESSAGE - 3).rev();
        let end = ends.find(|at| message.is_char_boundary(*at));
        message.truncate(end.unwrap_or(0));
        message.push_str("...");
    }
}

/// `Warning web: message (x4)`
fn describe(event: &Event, count: u64) -> String {
    let kind = kind_name(event.kind);
    let container = match &event.container {
        Some(container) => format!(" {container}"),
        None => String::new(),
    };
    let times = match count {
        1 => String::new(),
        n => format!(" (x{n})"),
    };
    format!("{kind}{container}: {}{times}", event.message)
}

fn kind_name(kind: EventType) -> &'static str {
    match kind {
        EventType::Normal => "Normal",
        EventType::Warning => "Warning",
    }
}

fn log(event: &Event, count: u64) {
    let pod = event.pod.as_ref();
    let namespace = pod.map(|p| p.namespace.as_str());
    let name = pod.map(|p| p.name.as_str());
    let uid = pod.map(|p| p.uid.as_str());
    let container = event.container.as_deref();
    let (reason, message) = (&event.reason, &event.message);
    match event.kind {
        EventType::Normal => {
            tracing::info!(namespace, name, uid, container, %reason, %message, count, "event");
        }
        EventType::Warning => {
            tracing::warn!(namespace, name, uid, container, %reason, %message, count, "event");
        }
    }
}

#[cfg(test)]
mod testkit;
#[cfg(test)]
mod tests;

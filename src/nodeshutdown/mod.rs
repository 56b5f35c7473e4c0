//! Layer 4: stops the pods before the machine goes down; upstream's node shutdown manager.
//!
//! In: what is announced about the machine ([`logind`] in a process), the pods of the node, the record `shutdown//node`.
//! Out: the decision on record, [`RuntimeState::set_shutting_down`] (no new pods, node not Ready), orders to stop pods,
//! events, and at last the word that the machine may go down.
//!
//! **Invariant:** the begin of a shutdown is on record, or held, before the first pod is refused or stopped for it. An agent that
//! is started again during a shutdown goes on with it, within the time that was left.
//!
//! **Invariant:** the machine is let go only after the ends of all pods are on record, or their time is over.

pub mod logind;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::apiserver::{Connection, Reachability};
use crate::core::shutdown::{self, Periods, SETTLE, ShutdownRecord};
use crate::core::state::{State, WorkerPhase, WorkerRecord};
use crate::runtime_state::RuntimeState;
use crate::store::Store;
use crate::types::metrics::Metrics;
use crate::types::{Clock, Event, EventRecorder, EventType, PodExt, PodUid, Stamp};

/// After a restart during a shutdown: how long to wait for the answer whether it was cancelled meanwhile.
const ANSWER: Duration = Duration::from_secs(5);

/// Whether the machine is about to go down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Announced {
    /// Nobody has said yet.
    #[default]
    Unknown,
    /// It stays up.
    Up,
    /// It goes down as soon as it is let go.
    GoesDown,
}

/// The manager's end of the link to what announces shutdowns.
#[derive(Clone, Debug)]
pub struct Link {
    announced: watch::Receiver<Announced>,
    released: Arc<watch::Sender<bool>>,
}

/// The other end.
#[derive(Debug)]
pub struct Announcer {
    /// What is announced; the newest counts.
    pub announced: watch::Sender<Announced>,
    /// Whether the machine may go down.
    pub released: watch::Receiver<bool>,
}

/// Makes a link.
pub fn link() -> (Announcer, Link) {
    let (announced, heard) = watch::channel(Announced::Unknown);
    let (release, released) = watch::channel(false);
    let link = Link {
        announced: heard,
        released: Arc::new(release),
    };
    (
        Announcer {
            announced,
            released,
        },
        link,
    )
}

/// The pods of the node, and who stops them.
pub trait NodePods: Send + Sync {
    /// Returns the pods that were admitted and are not finished.
    fn unfinished(&self) -> Vec<Arc<Pod>>;
    /// Returns whether the pod has a worker, in whatever phase.
    fn has_worker(&self, uid: &PodUid) -> bool;
    /// Stops a pod for the shutdown with this grace period, in seconds, or less. Does not wait; may be repeated.
    fn terminate(&self, pod: &Arc<Pod>, grace_seconds: i64);
}

/// What the manager works with.
pub struct NodeShutdownOptions {
    /// How long the pods have.
    pub periods: Periods,
    /// What announces shutdowns.
    pub link: Link,
    /// The pods.
    pub pods: Arc<dyn NodePods>,
    /// The store.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Told whether the node shuts down.
    pub runtime_state: RuntimeState,
    /// Events.
    pub recorder: Arc<dyn EventRecorder>,
    /// Metrics.
    pub metrics: Metrics,
    /// The API server: statuses are waited for only while it answers. `None` without one.
    pub connection: Option<Connection>,
}

/// The manager.
pub struct NodeShutdown {
    options: NodeShutdownOptions,
    /// The shutdown in force. The record may come later where the disk hangs.
    current: Option<ShutdownRecord>,
}

impl NodeShutdown {
    /// A manager that has not begun. A shutdown of this boot that is on record is in force from here on.
    pub fn new(options: NodeShutdownOptions) -> Self {
        let record = ShutdownRecord::of(&options.store.snapshot());
        let now = options.clock.now();
        let this = Self {
            options,
            current: record.filter(|record| record.is_in_force(now)),
        };
        if let Some(record) = record {
            this.show(&record);
        }
        if this.current.is_some() {
            info!("the node is shutting down, as on record");
        }
        let state = &this.options.runtime_state;
        state.set_shutting_down(this.current.is_some());
        this
    }

    /// Runs until `token` is cancelled. Dropping it in between loses nothing: what was decided is on record.
    pub async fn run(mut self, token: CancellationToken) {
        tokio::select! {
            () = token.cancelled() => {}
            () = self.watch() => {}
        }
    }

    async fn watch(&mut self) {
        loop {
            let announced = *self.options.link.announced.borrow_and_update();
            match (announced, self.current) {
                (Announced::GoesDown, None) => {
                    self.begin().await;
                    continue;
                }
                (Announced::Up, Some(record)) => self.cancel(record).await,
                (Announced::Unknown | Announced::GoesDown, Some(record)) => {
                    self.release_in_time(announced, record).await;
                }
                (Announced::Unknown | Announced::Up, None) => self.release(false),
            }
            if self.options.link.announced.changed().await.is_err() {
                // Nobody is left to announce anything.
                return std::future::pending().await;
            }
        }
    }

    /// Takes a shutdown in force to its end, unless something else is announced meanwhile.
    async fn release_in_time(&mut self, announced: Announced, record: ShutdownRecord) {
        let mut heard = self.options.link.announced.clone();
        let work = async {
            if announced == Announced::Unknown {
                tokio::time::sleep(ANSWER).await;
                warn!("nobody says whether the shutdown on record was cancelled, going on with it");
            }
            let record = match record.ended {
                Some(_) => record,
                None => self.stop_pods(record).await,
            };
            self.release(true);
            record
        };
        let ended = tokio::select! {
            biased;
            Ok(_) = heard.wait_for(|now| *now != announced) => return,
            record = work => record,
        };
        self.current = Some(ended);
    }

    async fn begin(&mut self) {
        let now = self.now();
        let record = ShutdownRecord::begin(&self.options.periods, now);
        info!(
            total_s = self.options.periods.total().as_secs(),
            "the machine is about to go down, stopping the pods"
        );
        self.commit(&record, "the machine is about to go down")
            .await;
        self.options.runtime_state.set_shutting_down(true);
        self.emit(shutdown::BEGUN_MESSAGE);
        self.show(&record);
        self.current = Some(record);
    }

    async fn cancel(&mut self, record: ShutdownRecord) {
        let record = ShutdownRecord {
            cancelled: Some(self.now()),
            ..record
        };
        info!("the shutdown was cancelled, the pods that it stopped stay stopped");
        self.commit(&record, "the machine stays up").await;
        self.options.runtime_state.set_shutting_down(false);
        self.emit(shutdown::CANCELLED_MESSAGE);
        self.release(false);
        self.current = None;
    }

    /// Stops group after group. Upstream: `killPods`.
    async fn stop_pods(&self, record: ShutdownRecord) -> ShutdownRecord {
        let mut all = BTreeSet::new();
        let mut recorded = BTreeSet::new();
        for group in 0..self.options.periods.len() {
            // A pod of a former group that came, or is left, is one of this.
            let mut pods = self.options.pods.unfinished();
            pods.retain(|pod| self.options.periods.group_of(pod) <= group);
            if pods.is_empty() {
                continue;
            }
            let time = self.options.periods.time_for(group, &record, self.now());
            info!(
                group,
                pods = pods.len(),
                time_s = time.as_secs_f64(),
                "stopping a group of pods"
            );
            for pod in &pods {
                self.options
                    .pods
                    .terminate(pod, self.options.periods.grace(pod));
            }
            let uids: BTreeSet<PodUid> = pods.iter().map(|pod| pod.uid()).collect();
            if tokio::time::timeout(time, self.ended(&uids, &mut recorded))
                .await
                .is_err()
            {
                warn!(
                    group,
                    "the time of the group is over, some of its pods are not finished"
                );
            }
            all.extend(uids);
        }
        drop(tokio::time::timeout(SETTLE, self.settled(&all, &mut recorded)).await);
        let record = ShutdownRecord {
            ended: Some(self.now()),
            ..record
        };
        self.commit(&record, "the machine may go down").await;
        self.show(&record);
        record
    }

    /// Waits until the ends of these pods are on record. `recorded`: those of which there was a record since the begin.
    async fn ended(&self, pods: &BTreeSet<PodUid>, recorded: &mut BTreeSet<PodUid>) {
        self.until(|state| {
            let mut is_left = |uid: &PodUid| match state.record::<WorkerRecord>(uid.as_str()) {
                Some(worker) => {
                    recorded.insert(uid.clone());
                    !matches!(worker.phase, WorkerPhase::Finished { .. })
                }
                // Forgotten, unless it has not come to its first record.
                None => !recorded.contains(uid) && self.options.pods.has_worker(uid),
            };
            // Each is looked at, whatever the others are.
            pods.iter().filter(|uid| is_left(uid)).count() == 0
        })
        .await;
    }

    /// Waits until the ends of these pods are on record, and told where the API server answers.
    async fn settled(&self, pods: &BTreeSet<PodUid>, recorded: &mut BTreeSet<PodUid>) {
        self.ended(pods, recorded).await;
        let Some(connection) = &self.options.connection else {
            return;
        };
        if connection.now() == Reachability::Up {
            self.until(|state| shutdown::untold(state, pods).is_empty())
                .await;
        }
    }

    async fn until(&self, mut holds: impl FnMut(&State) -> bool) {
        let mut published = self.options.store.published();
        loop {
            drop(published.borrow_and_update());
            if holds(&self.options.store.snapshot()) {
                return;
            }
            if published.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Puts a decision on record. A store that takes no commits holds it: pods are stopped all the same.
    async fn commit(&self, record: &ShutdownRecord, why: &str) {
        let transaction = record.transaction(why, self.now());
        if let Err(error) = self.options.store.commit_or_hold(transaction).await {
            warn!(%error, "the shutdown is not on record");
        }
    }

    fn release(&self, released: bool) {
        let is_new = |old: &mut bool| std::mem::replace(old, released) != released;
        if self.options.link.released.send_if_modified(is_new) && released {
            info!("the machine may go down");
        }
    }

    fn emit(&self, message: &str) {
        let event = Event::node(EventType::Normal, shutdown::EVENT, message);
        self.options.recorder.record(event);
    }

    /// Upstream: `setMetrics`.
    fn show(&self, record: &ShutdownRecord) {
        let seconds = |stamp: Stamp| {
            Duration::from_millis(u64::try_from(stamp.wall_ms).unwrap_or(0)).as_secs_f64()
        };
        let metrics = &self.options.metrics;
        metrics
            .graceful_shutdown_start_time
            .set(seconds(record.begun));
        metrics
            .graceful_shutdown_end_time
            .set(record.ended.map_or(0.0, seconds));
    }

    fn now(&self) -> Stamp {
        self.options.clock.now()
    }
}

#[cfg(test)]
mod tests;

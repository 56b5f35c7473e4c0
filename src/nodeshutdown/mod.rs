//! Layer 4: stops the pods before the machine goes down; upstream's node shutdown manager.
//!
//! In: what is announced about the machine ([`logind`] in a process), what `holdfast drain-local` orders ([`LocalDrain`]), the
//! pods of the node, the record `shutdown//node`.
//! Out: the decision on record, [`RuntimeState::set_shutting_down`] (no new pods, node not Ready), orders to stop pods,
//! events, and at last the word that the machine may go down.
//!
//! **Invariant:** the begin of a shutdown is recorded, or held, before the first pod is refused or stopped for it. An
//! agent that is started again during a shutdown goes on with it, within the time that was left.
//!
//! **Invariant:** a shutdown that was ordered on the machine ends by an order there alone, or with the boot.
//!
//! **Invariant:** the machine is let go only after the ends of all pods are recorded, or their time is over.

pub mod logind;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::apiserver::{Connection, Reachability};
use crate::core::shutdown::{self, Lock, ManagerRecord, Periods, SETTLE, ShutdownRecord};
use crate::core::state::{State, Transaction, WorkerPhase, WorkerRecord};
use crate::runtime_state::RuntimeState;
use crate::store::{CommitError, Store};
use crate::types::metrics::Metrics;
use crate::types::{Clock, Event, EventRecorder, EventType, PodExt, PodUid, Stamp};

/// After a restart during a shutdown: how long to wait for the answer whether it was cancelled meanwhile.
const ANSWER: Duration = Duration::from_secs(5);

/// Announcement of a machine's shutdown.
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

/// The store has at least this long to bring the ends to its disk.
const SYNC: Duration = Duration::from_secs(1);
/// Pause between attempts to record the end in a store that fails.
const POLL: Duration = Duration::from_millis(100);
/// Time of a drain of a node where no periods are configured, if none is given.
const DRAIN: Duration = Duration::from_secs(30);

/// An order from this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The pods are to be stopped, within this time if it is given.
    Drain(Option<Duration>),
    /// The machine stays up.
    Cancel,
}

/// Orders of `holdfast drain-local`, on machines where nothing announces shutdowns. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct LocalDrain(Arc<watch::Sender<Option<Order>>>);

impl LocalDrain {
    /// Has the manager stop the pods, as for a shutdown of the machine, within `timeout` with everything that belongs to it.
    /// Before the manager runs, the order waits for it. May be repeated.
    pub fn drain(&self, timeout: Option<Duration>) {
        self.0.send_replace(Some(Order::Drain(timeout)));
    }

    /// Has the manager admit and start pods again. Those that were stopped stay stopped.
    pub fn cancel(&self) {
        self.0.send_replace(Some(Order::Cancel));
    }
}

/// Returns what counts: an order of this machine, a shutdown that one began, what is announced. In this order.
fn in_force(announced: Announced, order: Option<Order>, is_local: bool) -> Announced {
    match order {
        Some(Order::Drain(_)) => Announced::GoesDown,
        Some(Order::Cancel) if announced == Announced::GoesDown && !is_local => announced,
        Some(Order::Cancel) => Announced::Up,
        None if is_local => Announced::GoesDown,
        None => announced,
    }
}

/// The manager's end of the link to what announces shutdowns.
#[derive(Clone, Debug)]
pub struct Link {
    announced: watch::Receiver<Announced>,
    lock: watch::Receiver<Lock>,
    delay: watch::Receiver<Option<Duration>>,
    released: Arc<watch::Sender<bool>>,
}

/// The other end.
#[derive(Debug)]
pub struct Announcer {
    /// Newest announcement.
    pub announced: watch::Sender<Announced>,
    /// True once the machine may shut down.
    pub released: watch::Receiver<bool>,
    /// The lock that holds the machine back, for who asks.
    pub lock: watch::Sender<Lock>,
    /// Time for which the machine waits for the node, if that is less than the pods need.
    pub delay: watch::Sender<Option<Duration>>,
}

/// Makes a link.
pub fn link() -> (Announcer, Link) {
    let (announced, heard) = watch::channel(Announced::Unknown);
    let (release, released) = watch::channel(false);
    let (lock, seen) = watch::channel(Lock::default());
    let (delay, allowed) = watch::channel(None);
    let link = Link {
        announced: heard,
        lock: seen,
        delay: allowed,
        released: Arc::new(release),
    };
    (
        Announcer {
            announced,
            released,
            lock,
            delay,
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

/// Dependencies of the manager.
pub struct NodeShutdownOptions {
    /// Grace periods of the pods; `None` if none are configured.
    pub periods: Option<Periods>,
    /// Source of shutdown announcements.
    pub link: Link,
    /// Orders of this machine.
    pub local: LocalDrain,
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
    orders: watch::Receiver<Option<Order>>,
    /// The active shutdown. The record may come later where the disk hangs.
    current: Option<ShutdownRecord>,
}

impl NodeShutdown {
    /// A manager that has not begun. A shutdown of this boot that is recorded is active from here on.
    pub fn new(options: NodeShutdownOptions) -> Self {
        let record = ShutdownRecord::of(&options.store.snapshot());
        let now = options.clock.now();
        let is_known = |record: &ShutdownRecord| is_followed(options.periods.as_ref(), record);
        let current = record.filter(|record| record.is_in_force(now) && is_known(record));
        let this = Self {
            orders: options.local.0.subscribe(),
            options,
            current,
        };
        if let Some(record) = record {
            this.show(&record);
        }
        if this.current.is_some() {
            info!("resuming the recorded shutdown of the node");
        }
        let state = &this.options.runtime_state;
        state.set_shutting_down(this.current.is_some());
        this
    }

    /// Runs until `token` is cancelled. Dropping it in between loses nothing: what was decided is recorded.
    pub async fn run(mut self, token: CancellationToken) {
        tokio::select! {
            () = token.cancelled() => {}
            () = self.watch() => {}
        }
    }

    async fn watch(&mut self) {
        self.end_unfollowed().await;
        loop {
            self.record_manager().await;
            let order = *self.orders.borrow_and_update();
            let announced = *self.options.link.announced.borrow_and_update();
            let is_local = self.current.is_some_and(|record| record.local);
            match (in_force(announced, order, is_local), self.current) {
                (Announced::GoesDown, None) => {
                    self.begin(order).await;
                    continue;
                }
                (_, Some(record)) if is_adopted(order, &record) => {
                    self.uphold(record, true).await;
                    continue;
                }
                // The order is taken back, and the machine goes down all the same.
                (Announced::Up, Some(record)) if announced == Announced::GoesDown => {
                    self.uphold(record, false).await;
                    continue;
                }
                (Announced::Up, Some(record)) => self.cancel(record).await,
                (now @ (Announced::Unknown | Announced::GoesDown), Some(record)) => {
                    self.release_in_time(now, record).await;
                }
                (Announced::Unknown | Announced::Up, None) => self.release(false),
            }
            self.news().await;
        }
    }

    /// Waits until something is announced, ordered, or changes about the lock.
    async fn news(&mut self) {
        async fn changed<T>(heard: &mut watch::Receiver<T>) {
            if heard.changed().await.is_err() {
                // Nobody is left to announce anything.
                std::future::pending::<()>().await;
            }
        }
        let link = &mut self.options.link;
        tokio::select! {
            () = changed(&mut link.announced) => {}
            () = changed(&mut link.lock) => {}
            () = changed(&mut self.orders) => {}
        }
    }

    /// Records the groups and the lock for operators.
    async fn record_manager(&mut self) {
        let lock = self.options.link.lock.borrow_and_update().clone();
        let groups = self.options.periods.iter().flat_map(Periods::groups);
        let manager = ManagerRecord {
            groups: groups.map(|g| (g.priority, g.seconds)).collect(),
            lock,
        };
        let store = &self.options.store;
        let transaction = manager.transaction(&store.snapshot(), self.now());
        if transaction.is_empty() {
            return;
        }
        if let Err(error) = store.commit_or_hold(transaction).await {
            warn!(%error, "cannot record how shutdowns are delayed");
        }
    }

    /// Completes the active shutdown, unless another one becomes active meanwhile.
    async fn release_in_time(&mut self, now: Announced, record: ShutdownRecord) {
        let mut announced = self.options.link.announced.clone();
        let mut orders = self.orders.clone();
        let is_over = |announced: Announced, order: Option<Order>| {
            in_force(announced, order, record.local) != now || is_adopted(order, &record)
        };
        let other = async {
            loop {
                if is_over(*announced.borrow_and_update(), *orders.borrow_and_update()) {
                    return;
                }
                tokio::select! {
                    Ok(()) = announced.changed() => {}
                    Ok(()) = orders.changed() => {}
                    else => return std::future::pending().await,
                }
            }
        };
        let work = async {
            if now == Announced::Unknown {
                tokio::time::sleep(ANSWER).await;
                warn!("cannot find out whether the recorded shutdown was cancelled, continuing it");
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
            () = other => return,
            record = work => record,
        };
        self.current = Some(ended);
    }

    /// Lets an order of this machine uphold a shutdown that was announced, or no longer.
    async fn uphold(&mut self, record: ShutdownRecord, local: bool) {
        let record = ShutdownRecord { local, ..record };
        let why = match local {
            true => "holdfast drain-local upholds it",
            false => "holdfast drain-local upholds it no longer",
        };
        self.commit(&record, why).await;
        self.current = Some(record);
    }

    /// Ends a shutdown on record that nobody can take back. The agent runs, so the machine has not gone down: `systemctl
    /// soft-reboot` starts everything but the kernel again.
    async fn end_unfollowed(&self) {
        let now = self.now();
        let record = ShutdownRecord::of(&self.options.store.snapshot());
        let periods = self.options.periods.as_ref();
        let is_over = |r: &ShutdownRecord| r.is_in_force(now) && !is_followed(periods, r);
        let Some(record) = record.filter(is_over) else {
            return;
        };
        let record = ShutdownRecord {
            cancelled: Some(now),
            ..record
        };
        self.commit(&record, "the agent runs again").await;
    }

    async fn begin(&mut self, order: Option<Order>) {
        let (local, periods) = match order {
            Some(Order::Drain(timeout)) => (true, self.periods_of_drain(timeout)),
            Some(Order::Cancel) | None => (false, self.periods_of_machine()),
        };
        let record = ShutdownRecord {
            local,
            ..ShutdownRecord::begin(&periods, self.now())
        };
        let why = match local {
            true => "holdfast drain-local",
            false => "the machine is about to go down",
        };
        info!(
            total_s = periods.total().as_secs(),
            why, "stopping the pods"
        );
        self.commit(&record, why).await;
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

    /// The groups of a drain: what is left of `timeout` after the last records is theirs.
    fn periods_of_drain(&self, timeout: Option<Duration>) -> Periods {
        let last = SETTLE + SYNC;
        match (timeout, &self.options.periods) {
            (Some(timeout), _) => {
                let time = timeout.saturating_sub(last).max(Duration::from_secs(1));
                self.periods_within(time)
            }
            (None, Some(periods)) => periods.clone(),
            (None, None) => self.periods_within(DRAIN.saturating_sub(last)),
        }
    }

    /// The groups of a shutdown of the machine: in the time for which it waits.
    fn periods_of_machine(&self) -> Periods {
        let delay = *self.options.link.delay.borrow();
        let time = delay.map_or(Duration::MAX, |delay| delay.saturating_sub(SETTLE));
        self.periods_within(time)
    }

    fn periods_within(&self, time: Duration) -> Periods {
        Periods::within(self.options.periods.as_ref(), time)
    }

    /// Stops group after group. Upstream: `killPods`.
    async fn stop_pods(&self, record: ShutdownRecord) -> ShutdownRecord {
        let periods = self.periods_within(record.time());
        let mut all = BTreeSet::new();
        let mut recorded = BTreeSet::new();
        for group in 0..periods.len() {
            // A pod of a former group that came, or is left, is one of this.
            let mut pods = self.options.pods.unfinished();
            pods.retain(|pod| periods.group_of(pod) <= group);
            if pods.is_empty() {
                continue;
            }
            let time = periods.time_for(group, &record, self.now());
            info!(
                group,
                pods = pods.len(),
                time_s = time.as_secs_f64(),
                "stopping a group of pods"
            );
            for pod in &pods {
                self.options.pods.terminate(pod, periods.grace(pod));
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
        self.commit_end(&record).await;
        self.show(&record);
        record
    }

    /// Records the end once it is on the disk: a machine that is let go, by `logind` or by whoever waits for `holdfast
    /// drain-local`, may be cut off. The ends of the pods were committed before it, and are there then, too. A store that
    /// fails or hangs holds them in memory. It has until the time of the shutdown is over to write them.
    ///
    /// A commit of which nobody knows whether it reached the disk is repeated, and changes nothing if it did.
    async fn commit_end(&self, record: &ShutdownRecord) {
        let store = &self.options.store;
        let mut transaction = self.end_of(record);
        // The commit is refused, or has no answer, until what the store holds is written.
        let on_disk = async {
            let mut is_told = false;
            while let Err(error) = store.commit(transaction.clone()).await {
                if let CommitError::Stale { .. } = error {
                    if self.is_on_record(record) {
                        return;
                    }
                    transaction = self.end_of(record);
                }
                if !is_told {
                    warn!(%error, "the store cannot write the exits of the pods, waiting for it");
                }
                is_told = true;
                tokio::time::sleep(POLL).await;
            }
        };
        let time = record.deadline.until(self.now()).max(SYNC);
        let written = tokio::time::timeout(time, on_disk).await;
        if written.is_ok() {
            return;
        }
        error!("the time is over, but the exits of the pods are not on the disk");
        // A store that hangs has it in its queue. Then this one is stale.
        let held = tokio::time::timeout(SYNC, store.commit_or_hold(transaction)).await;
        if let Ok(Err(error)) = held
            && !self.is_on_record(record)
        {
            warn!(%error, "cannot record the end of the shutdown");
        }
    }

    /// Returns the transaction that records the end of a shutdown, once however often it is committed.
    fn end_of(&self, record: &ShutdownRecord) -> Transaction {
        let state = self.options.store.snapshot();
        record
            .transaction("the machine may go down", self.now())
            .expect_object(&state, &ShutdownRecord::key())
    }

    fn is_on_record(&self, record: &ShutdownRecord) -> bool {
        ShutdownRecord::of(&self.options.store.snapshot()).as_ref() == Some(record)
    }

    /// Waits until the ends of these pods are recorded. `recorded`: those of which there was a record since the begin.
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

    /// Waits until the ends of these pods are recorded, and told where the API server answers.
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

    /// Records a decision. A store that takes no commits holds it: pods are stopped all the same.
    async fn commit(&self, record: &ShutdownRecord, why: &str) {
        let transaction = record.transaction(why, self.now());
        if let Err(error) = self.options.store.commit_or_hold(transaction).await {
            warn!(%error, "cannot record the shutdown");
        }
    }

    fn release(&self, released: bool) {
        let is_new = |old: &mut bool| std::mem::replace(old, released) != released;
        if self.options.link.released.send_if_modified(is_new) && released {
            info!("released the shutdown delay lock");
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

/// Returns true if the manager goes on with a shutdown on record. Where no period is configured nothing announces shutdowns. Then
/// one that was not ordered is from the last stop of an agent that ended with its machine.
fn is_followed(periods: Option<&Periods>, record: &ShutdownRecord) -> bool {
    periods.is_some() || record.local
}

/// Returns true if an order makes an announced shutdown one of this machine.
fn is_adopted(order: Option<Order>, record: &ShutdownRecord) -> bool {
    matches!(order, Some(Order::Drain(_))) && !record.local
}

#[cfg(test)]
mod tests;

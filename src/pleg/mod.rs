//! Layer 4: pod lifecycle event generator. Owns the look at the runtime: what comes in are relist ticks,
//! requests for single pods and the runtime's own events; what goes out are the pod cache and
//! [`PodLifecycleEvent`]s for the sync loop.
//!
//! Two modes. *Generic* lists everything each second and inspects what changed. *Evented* listens to
//! GetContainerEvents and lists everything rarely: every 300 s, or every 10 s on containerd before 2.0, whose
//! one shared event channel replays stale events and loses others to a dead subscriber. A pod that could not be
//! inspected is looked at again after a second in both.
//!
//! **Invariant:** events are hints. An event makes its pod be looked at; no status that an event carries is
//! ever stored. **Invariant:** what a worker must act on is computed from the cache and the records, never
//! from a difference that might have been consumed by an agent that died.

mod cache;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

pub use cache::{InspectError, Observed, PodCache};

use crate::core::pleg_diff::{self, PodLifecycleEvent};
use crate::core::state::{PlegRecord, Transaction};
use crate::kuberuntime::cri::{ContainerEvent, CriClient, CriError};
use crate::runtime_state::RuntimeState;
use crate::store::Store;
use crate::types::metrics::{ContainerStateLabel, Metrics};
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{Clock, PodUid};

/// Capacity of the channel to the sync loop.
pub const EVENT_CAPACITY: usize = 1000;
/// Capacity of the queue of single pods to be looked at.
pub const REQUEST_CAPACITY: usize = 200;

const GENERIC_PERIOD: Duration = Duration::from_secs(1);
const EVENTED_PERIOD: Duration = Duration::from_secs(300);
const EVENTED_PERIOD_LOSSY: Duration = Duration::from_secs(10);
/// After this many broken streams in a row, list instead.
const MAX_STREAM_ERRORS: u32 = 5;
/// How long listing lasts before the stream is tried again.
const STREAM_RETRY: Duration = Duration::from_secs(300);
const STREAM_BACKOFF: Duration = Duration::from_secs(1);
/// Inspections under way at once.
const INSPECTIONS: usize = 4;

/// What others hold of the PLEG.
#[derive(Clone, Debug)]
pub struct PlegHandle {
    cache: PodCache,
    requests: mpsc::Sender<PodUid>,
}

impl PlegHandle {
    /// The pod cache.
    pub fn cache(&self) -> &PodCache {
        &self.cache
    }

    /// Asks for an immediate look at one pod. Never blocks: when the queue is full the next full relist
    /// covers the pod. Upstream: `RequestRelist`.
    pub fn request(&self, uid: &PodUid) {
        if self.requests.try_send(uid.clone()).is_err() {
            debug!(pod = %uid, "relist queue is full, the next relist covers the pod");
        }
    }
}

/// What a [`Pleg`] needs.
#[derive(Clone, Debug)]
pub struct PlegOptions {
    /// The runtime.
    pub cri: CriClient,
    /// The store, for the records of what was seen.
    pub store: Store,
    /// Told of each full relist.
    pub runtime_state: RuntimeState,
    /// Time.
    pub metrics: Metrics,
    /// Whether to use the runtime's events where it has them.
    pub evented: bool,
}

/// The generator; [`Pleg::run`] is its task.
pub struct Pleg {
    options: PlegOptions,
    clock: Arc<dyn Clock>,
    cache: PodCache,
    requests: mpsc::Receiver<PodUid>,
    events: mpsc::Sender<PodLifecycleEvent>,
    /// The last inspected status of each pod the runtime knows.
    known: HashMap<PodUid, Arc<PodStatus>>,
    /// Pods whose inspection failed.
    retry: BTreeSet<PodUid>,
    last_relist: Option<Instant>,
    down: bool,
}

enum Stream {
    /// Connected, as far as one can tell.
    Live(BoxStream<'static, Result<ContainerEvent, CriError>>),
    /// Broken; to be opened again at that time.
    Broken(Instant),
    /// Not wanted.
    Off,
}

impl Pleg {
    /// A generator with a cache seeded by `seed`: statuses which the caller knows to be true as of `as_of`,
    /// empty ones included. Of other pods the cache knows nothing before they are looked at.
    pub fn new(
        options: PlegOptions,
        clock: Arc<dyn Clock>,
        seed: impl IntoIterator<Item = Arc<PodStatus>>,
        as_of: Instant,
    ) -> (Self, PlegHandle, mpsc::Receiver<PodLifecycleEvent>) {
        let (requests_tx, requests) = mpsc::channel(REQUEST_CAPACITY);
        let (events, events_rx) = mpsc::channel(EVENT_CAPACITY);
        let cache = PodCache::default();
        let mut known = HashMap::new();
        for status in seed {
            cache.set(&status.uid, Ok(Arc::clone(&status)), as_of);
            if !(status.sandboxes.is_empty() && status.containers.is_empty()) {
                known.insert(status.uid.clone(), status);
            }
        }
        let handle = PlegHandle {
            cache: cache.clone(),
            requests: requests_tx,
        };
        let pleg = Self {
            options,
            clock,
            cache,
            requests,
            events,
            known,
            retry: BTreeSet::new(),
            last_relist: None,
            down: false,
        };
        (pleg, handle, events_rx)
    }

    /// Runs until `token` is cancelled.
    pub async fn run(mut self, token: CancellationToken) {
        let mut stream = if self.options.evented {
            Stream::Broken(Instant::now())
        } else {
            Stream::Off
        };
        let mut stream_errors = 0;
        let mut evented_period = EVENTED_PERIOD_LOSSY;
        let mut next_relist = Instant::now();
        loop {
            let reopen_at = match &stream {
                Stream::Broken(at) => Some(*at),
                _ => None,
            };
            // Every arm is cancel-safe: receiving, waiting for a time and polling a stream lose nothing
            // when another arm wins.
            tokio::select! {
                () = token.cancelled() => return,
                Some(uid) = self.requests.recv() => {
                    let mut pods = BTreeSet::from([uid]);
                    while let Ok(uid) = self.requests.try_recv() {
                        pods.insert(uid);
                    }
                    self.relist_pods(pods).await;
                    next_relist = self.retry_by(next_relist);
                }
                item = next_event(&mut stream) => match item {
                    Some(Ok(event)) => {
                        stream_errors = 0;
                        if let Some(uid) = event.pod_uid {
                            self.relist_pods(BTreeSet::from([uid])).await;
                            next_relist = self.retry_by(next_relist);
                        } else {
                            next_relist = Instant::now();
                        }
                    }
                    ended => {
                        stream_errors += 1;
                        self.options.metrics.evented_pleg_connection_error.inc();
                        let unimplemented = matches!(&ended, Some(Err(e)) if e.is_unimplemented());
                        let retry = if unimplemented || stream_errors >= MAX_STREAM_ERRORS {
                            info!(
                                errors = stream_errors,
                                unimplemented, "no container events from the runtime, listing each second"
                            );
                            stream_errors = 0;
                            STREAM_RETRY
                        } else {
                            STREAM_BACKOFF
                        };
                        if let Some(Err(error)) = ended && !unimplemented {
                            debug!(%error, "container event stream broke");
                        }
                        stream = Stream::Broken(Instant::now() + retry);
                        next_relist = Instant::now();
                    }
                },
                () = tokio::time::sleep_until(reopen_at.unwrap_or(next_relist)), if reopen_at.is_some() => {
                    evented_period = self.evented_period().await;
                    stream = Stream::Live(self.options.cri.container_events());
                    // The subscription takes effect some time after the first poll.
                    next_relist = Instant::now() + GENERIC_PERIOD;
                }
                () = tokio::time::sleep_until(next_relist) => {
                    let ok = self.relist().await;
                    let period = match (&stream, ok) {
                        (Stream::Live(_), true) => evented_period,
                        _ => GENERIC_PERIOD,
                    };
                    if ok {
                        self.options.runtime_state.set_pleg_period(period);
                    }
                    next_relist = self.retry_by(Instant::now() + period);
                }
            }
        }
    }

    /// When to list, where `planned` was meant: a pod that could not be inspected is not told of a second time, so it
    /// does not wait for a plan of minutes.
    fn retry_by(&self, planned: Instant) -> Instant {
        if self.retry.is_empty() {
            return planned;
        }
        planned.min(Instant::now() + GENERIC_PERIOD)
    }

    /// Lists everything, inspects what changed, tells the sync loop. Returns whether the runtime answered.
    /// Upstream: `GenericPLEG.Relist`.
    pub async fn relist(&mut self) -> bool {
        let metrics = &self.options.metrics;
        let as_of = Instant::now();
        if let Some(last) = self.last_relist {
            metrics
                .pleg_relist_interval
                .observe(as_of.duration_since(last).as_secs_f64());
        }
        self.last_relist = Some(as_of);
        let listed = match self.options.cri.list_pods().await {
            Ok(listed) => listed,
            Err(error) => {
                if !self.down {
                    warn!(%error, "cannot list pods of the runtime");
                }
                self.down = true;
                return false;
            }
        };
        if self.down {
            info!("the runtime answers again");
            self.down = false;
        }
        let mut changed: Vec<_> = self
            .known
            .keys()
            .chain(&self.retry)
            .filter(|uid| !listed.contains_key(*uid))
            .map(|uid| (uid.clone(), Look::Gone))
            .collect();
        for (uid, status) in listed {
            let same = self
                .known
                .get(&uid)
                .is_some_and(|known| pleg_diff::same_summary(known, &status));
            if !same || self.retry.contains(&uid) {
                changed.push((uid, Look::At(status)));
            }
        }
        self.inspect(changed, as_of).await;
        self.cache.set_global(as_of);
        let now = self.clock.now();
        self.options.runtime_state.set_pleg_relist(now);
        let metrics = &self.options.metrics;
        metrics
            .pleg_relist_duration
            .observe(as_of.elapsed().as_secs_f64());
        #[expect(clippy::cast_precision_loss, reason = "a gauge in seconds")]
        metrics.pleg_last_seen.set(now.wall_ms as f64 / 1000.0);
        true
    }

    async fn relist_pods(&mut self, pods: BTreeSet<PodUid>) {
        let as_of = Instant::now();
        let pods = pods
            .into_iter()
            .map(|uid| {
                let (name, namespace) = self
                    .known
                    .get(&uid)
                    .map(|s| (s.name.clone(), s.namespace.clone()))
                    .unwrap_or_default();
                (uid, Look::For(name, namespace))
            })
            .collect();
        self.inspect(pods, as_of).await;
    }

    async fn inspect(&mut self, pods: Vec<(PodUid, Look)>, as_of: Instant) {
        if pods.is_empty() {
            return;
        }
        let cri = &self.options.cri;
        let answers: Vec<_> = futures::stream::iter(pods)
            .map(|(uid, look)| async move {
                let answer = match &look {
                    Look::Gone => Ok(PodStatus::empty(uid.clone())),
                    Look::At(listed) => cri.pod_status_of(listed).await,
                    Look::For(name, namespace) => cri.pod_status(&uid, name, namespace).await,
                };
                (uid, answer)
            })
            .buffer_unordered(INSPECTIONS)
            .collect()
            .await;
        for (uid, answer) in answers {
            match answer {
                Ok(status) => self.seen(uid, status, as_of),
                Err(error) => {
                    debug!(pod = %uid, %error, "cannot inspect pod, will be retried");
                    let message = error.to_string();
                    self.cache.set(
                        &uid,
                        Err(InspectError {
                            uid: uid.clone(),
                            message,
                        }),
                        as_of,
                    );
                    self.retry.insert(uid);
                }
            }
        }
        self.count_running();
    }

    fn seen(&mut self, uid: PodUid, mut status: PodStatus, as_of: Instant) {
        self.retry.remove(&uid);
        let old = self.known.get(&uid).cloned();
        if let Some(old) = &old {
            if status.ips.is_empty() {
                status.ips.clone_from(&old.ips);
            }
            if status.name.is_empty() {
                status.name.clone_from(&old.name);
                status.namespace.clone_from(&old.namespace);
            }
        }
        let events = pleg_diff::diff(old.as_deref(), Some(&status));
        let empty = status.sandboxes.is_empty() && status.containers.is_empty();
        let status = Arc::new(status);
        self.cache.set(&uid, Ok(Arc::clone(&status)), as_of);
        let changed = old.as_deref() != Some(&*status);
        let transaction = if empty {
            self.known.remove(&uid);
            Transaction::new().delete::<PlegRecord>(uid.as_str())
        } else {
            self.known.insert(uid.clone(), Arc::clone(&status));
            Transaction::new().put(
                uid.as_str(),
                PlegRecord {
                    status: (*status).clone(),
                },
            )
        };
        if changed && !(empty && old.is_none()) {
            // Relaxed: what the runtime shows it will show again. A degraded store reports itself.
            drop(self.options.store.submit(transaction));
        }
        for event in events {
            if self.events.try_send(event).is_err() {
                self.options.metrics.pleg_discard_events.inc();
                warn!(pod = %uid, "event channel is full, event dropped");
            }
        }
    }

    fn count_running(&self) {
        let metrics = &self.options.metrics;
        let mut states = [0_i64; 4];
        let mut pods = 0;
        for status in self.known.values() {
            pods += i64::from(status.ready_sandbox().is_some());
            for container in &status.containers {
                states[container.state as usize] += 1;
            }
        }
        metrics.running_pods.set(pods);
        for (state, name) in [
            (ContainerState::Created, "created"),
            (ContainerState::Running, "running"),
            (ContainerState::Exited, "exited"),
            (ContainerState::Unknown, "unknown"),
        ] {
            let label = ContainerStateLabel {
                container_state: name.to_owned(),
            };
            metrics
                .running_containers
                .get_or_create(&label)
                .set(states[state as usize]);
        }
    }

    async fn evented_period(&self) -> Duration {
        match self.options.cri.version().await {
            Ok(version) if is_lossy(&version.runtime_name, &version.runtime_version) => {
                EVENTED_PERIOD_LOSSY
            }
            Ok(_) => EVENTED_PERIOD,
            Err(_) => EVENTED_PERIOD_LOSSY,
        }
    }
}

/// How a pod is inspected.
enum Look {
    /// No list shows it any more.
    Gone,
    /// What a list has just shown of it; not listed again.
    At(PodStatus),
    /// By its UID; name and namespace, empty when not known.
    For(String, String),
}

/// containerd before 2.0 serves all subscribers from one channel.
fn is_lossy(name: &str, version: &str) -> bool {
    let major = version
        .trim_start_matches('v')
        .split('.')
        .next()
        .and_then(|m| m.parse::<u32>().ok());
    name == "containerd" && major.is_none_or(|m| m < 2)
}

async fn next_event(stream: &mut Stream) -> Option<Result<ContainerEvent, CriError>> {
    match stream {
        Stream::Live(events) => events.next().await,
        Stream::Broken(_) | Stream::Off => std::future::pending().await,
    }
}

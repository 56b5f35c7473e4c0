//! Layer 4: pod lifecycle event generator. Owns the view of the runtime. The input is relist ticks, requests for single
//! pods and the runtime's own events; the output is the pod cache and [`PodLifecycleEvent`]s for the sync loop.
//!
//! Two modes. *Generic* lists everything each second and inspects the changed pods. *Evented* listens to
//! GetContainerEvents and lists everything rarely: every 300 s, or every 10 s on containerd before 2.0, whose one
//! shared event channel replays stale events and loses others to a dead subscriber. In both, a pod that could not be
//! inspected is inspected again after a second.
//!
//! Calls to the runtime run beside the loop, and each answer is stored when it comes: a call that hangs delays only its
//! own pod (`agenda`).
//!
//! **Invariant:** events are hints. An event leads to an inspection of its pod; no status that an event carries is ever
//! stored. **Invariant:** a worker's actions are computed from the cache and the records, never from a difference that
//! a previous run of the agent might have consumed.

mod agenda;
mod cache;
mod calls;
mod outbox;
mod requests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use agenda::{Agenda, Lane, Look, Step};
pub use cache::{InspectError, Observed, PodCache};
use calls::{Answer, Ask, Calls, Progress, Turn};
use outbox::Outbox;
use requests::Requests;

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
const GENERIC_PERIOD: Duration = Duration::from_secs(1);
/// Period of listing on a runtime whose list takes calls for each pod.
const PARTS_PERIOD: Duration = Duration::from_secs(5);
const EVENTED_PERIOD: Duration = Duration::from_secs(300);
const EVENTED_PERIOD_LOSSY: Duration = Duration::from_secs(10);
/// After this many broken streams in a row, list instead.
const MAX_STREAM_ERRORS: u32 = 5;
/// Time for which listing replaces a broken stream before the stream is tried again.
const STREAM_RETRY: Duration = Duration::from_secs(300);
const STREAM_BACKOFF: Duration = Duration::from_secs(1);
/// Time for which a worker waits for a status that is newer than its own change.
const STATUS_PATIENCE: Duration = Duration::from_secs(30);

/// Handle of the PLEG for other components.
#[derive(Clone, Debug)]
pub struct PlegHandle {
    cache: PodCache,
    requests: Requests,
}

impl PlegHandle {
    /// The pod cache.
    pub fn cache(&self) -> &PodCache {
        &self.cache
    }

    /// Requests an immediate inspection of one pod. Never blocks and is never dropped: many requests for one pod are
    /// one, and many pods are listed together. Upstream: `RequestRelist`.
    pub fn request(&self, uid: &PodUid) {
        self.requests.add(uid);
    }

    /// Returns a status that includes everything up to `than`; requests an inspection of the pod when there is none
    /// yet. Cancel-safe. Upstream: `GetNewerThan`, which waits without a limit.
    ///
    /// # Errors
    /// When the newest attempt to inspect the pod failed, or the runtime shows no such status for 30 s.
    pub async fn status_newer_than(
        &self,
        uid: &PodUid,
        than: Option<Instant>,
    ) -> Result<Observed, InspectError> {
        if !self.cache.is_newer_than(uid, than) {
            self.request(uid);
        }
        let status = self.cache.get_newer_than(uid, than);
        tokio::time::timeout(STATUS_PATIENCE, status)
            .await
            .unwrap_or_else(|_| {
                let waited = humantime::format_duration(STATUS_PATIENCE);
                Err(InspectError {
                    uid: uid.clone(),
                    message: format!(
                        "the container runtime has shown no new status for {waited} (is it hung?)"
                    ),
                })
            })
    }
}

/// Dependencies and settings of a [`Pleg`].
#[derive(Clone, Debug)]
pub struct PlegOptions {
    /// The runtime.
    pub cri: CriClient,
    /// The store, for the records of what was seen.
    pub store: Store,
    /// Notified of each full relist.
    pub runtime_state: RuntimeState,
    /// Time.
    pub metrics: Metrics,
    /// True if the runtime's events are used where it has them.
    pub evented: bool,
}

/// The generator; [`Pleg::run`] is its task.
pub struct Pleg {
    options: PlegOptions,
    clock: Arc<dyn Clock>,
    cache: PodCache,
    requests: Requests,
    outbox: Outbox,
    /// The last inspected status of each pod the runtime knows.
    known: HashMap<PodUid, Known>,
    /// Pods whose inspection failed, and when that began.
    retry: BTreeMap<PodUid, Instant>,
    agenda: Agenda,
    calls: Calls,
    /// Time of the next list of all pods. A list for many requests does not change it.
    next_relist: Option<Instant>,
    evented_period: Duration,
    last_relist: Option<Instant>,
    down: bool,
}

struct Known {
    status: Arc<PodStatus>,
    /// Moment before the request to the runtime.
    as_of: Instant,
}

enum Stream {
    /// Connected, as far as is known.
    Live(BoxStream<'static, Result<ContainerEvent, CriError>>),
    /// Broken; to be opened again at that time.
    Broken(Instant),
    /// Not wanted.
    Off,
}

impl Pleg {
    /// Makes a generator with a cache seeded by `seed`: statuses which the caller knows to be true as of `as_of`, empty
    /// ones included. The cache has no entry of another pod before its first inspection.
    pub fn new(
        mut options: PlegOptions,
        clock: Arc<dyn Clock>,
        seed: impl IntoIterator<Item = Arc<PodStatus>>,
        as_of: Instant,
    ) -> (Self, PlegHandle, mpsc::Receiver<PodLifecycleEvent>) {
        let requests = Requests::default();
        let (events, events_rx) = mpsc::channel(EVENT_CAPACITY);
        let cache = PodCache::default();
        let shown = cache.clone();
        options.cri = options.cri.knowing_pods(move || shown.uids());
        let mut known = HashMap::new();
        for status in seed {
            cache.set(&status.uid, Ok(Arc::clone(&status)), as_of);
            if !(status.sandboxes.is_empty() && status.containers.is_empty()) {
                known.insert(status.uid.clone(), Known { status, as_of });
            }
        }
        let handle = PlegHandle {
            cache: cache.clone(),
            requests: requests.clone(),
        };
        let pleg = Self {
            options,
            clock,
            cache,
            requests,
            outbox: Outbox::new(events),
            known,
            retry: BTreeMap::new(),
            agenda: Agenda::default(),
            calls: Calls::default(),
            next_relist: Some(Instant::now()),
            evented_period: EVENTED_PERIOD_LOSSY,
            last_relist: None,
            down: false,
        };
        (pleg, handle, events_rx)
    }

    /// Runs until `token` is cancelled; calls under way are dropped then.
    pub async fn run(mut self, token: CancellationToken) {
        let mut stream = if self.options.evented {
            Stream::Broken(Instant::now())
        } else {
            Stream::Off
        };
        let mut stream_errors = 0;
        loop {
            self.begin();
            let reopen_at = match &stream {
                Stream::Broken(at) => Some(*at),
                _ => None,
            };
            // Every arm is cancel-safe: receiving, sending, waiting for a time and polling a stream lose nothing
            // when another arm wins.
            tokio::select! {
                () = token.cancelled() => return,
                pods = self.requests.take() => {
                    for uid in pods {
                        self.agenda.ask(uid);
                    }
                }
                () = self.outbox.flush() => {}
                Some(turn) = self.calls.next() => {
                    self.turn(turn, matches!(stream, Stream::Live(_)));
                }
                item = next_event(&mut stream) => match item {
                    Some(Ok(event)) => {
                        stream_errors = 0;
                        match event.pod_uid {
                            Some(uid) => self.agenda.ask(uid),
                            None => self.plan_relist(Duration::ZERO),
                        }
                    }
                    ended => {
                        stream_errors += 1;
                        self.options.metrics.evented_pleg_connection_error.inc();
                        let unimplemented = matches!(&ended, Some(Err(e)) if e.is_unimplemented());
                        let retry = if unimplemented || stream_errors >= MAX_STREAM_ERRORS {
                            info!(
                                errors = stream_errors,
                                unimplemented, "no container events from the runtime, listing every second"
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
                        self.plan_relist(Duration::ZERO);
                    }
                },
                () = sleep_until(reopen_at), if reopen_at.is_some() => {
                    self.evented_period = EVENTED_PERIOD_LOSSY;
                    self.ask_version();
                    stream = Stream::Live(self.options.cri.container_events());
                    // The subscription takes effect some time after the first poll.
                    self.plan_relist(GENERIC_PERIOD);
                }
                () = sleep_until(self.next_relist), if !self.agenda.is_listing() => {
                    self.next_relist = None;
                    self.list();
                }
            }
        }
    }

    /// Begins what there is a turn for.
    fn begin(&mut self) {
        while let Some(step) = self.agenda.next() {
            match step {
                Step::List => self.list(),
                Step::Look(uid, look, lane) => self.look(uid, look, lane),
            }
        }
    }

    /// Lists everything. Upstream: `GenericPLEG.Relist`, whose second half is [`Self::listed`].
    fn list(&mut self) {
        let as_of = Instant::now();
        if let Some(last) = self.last_relist {
            self.options
                .metrics
                .pleg_relist_interval
                .observe(as_of.duration_since(last).as_secs_f64());
        }
        self.last_relist = Some(as_of);
        self.agenda.list_began();
        let cri = self.options.cri.clone();
        let call = async move { Answer::List(cri.list_pods().await) };
        self.calls.begin(Ask::List, as_of, call);
    }

    fn look(&mut self, uid: PodUid, look: Look, lane: Lane) {
        let cri = self.options.cri.clone();
        let as_of = match &look {
            Look::At(_, listed) => *listed,
            Look::Now => Instant::now(),
        };
        let (name, namespace) = match self.known.get(&uid) {
            Some(known) => (known.status.name.clone(), known.status.namespace.clone()),
            None => Default::default(),
        };
        self.agenda.look_began(uid.clone(), as_of, lane);
        let of = uid.clone();
        let call = async move {
            let answer = match look {
                Look::At(listed, _) => cri.pod_status_of(&listed).await,
                Look::Now => cri.pod_status(&of, &name, &namespace).await,
            };
            Answer::Pod(Box::new(answer))
        };
        self.calls.begin(Ask::Pod(uid, lane), as_of, call);
    }

    /// Asks the runtime for its version: the period of listing beside events depends on it.
    fn ask_version(&mut self) {
        let cri = self.options.cri.clone();
        let call = async move {
            Answer::Version(match cri.version().await {
                Ok(version) if !is_lossy(&version.runtime_name, &version.runtime_version) => {
                    EVENTED_PERIOD
                }
                _ => EVENTED_PERIOD_LOSSY,
            })
        };
        self.calls.begin(Ask::Version, Instant::now(), call);
    }

    /// A call was answered, or takes long.
    fn turn(&mut self, turn: Turn, streaming: bool) {
        let Turn {
            ask,
            as_of,
            late,
            progress,
        } = turn;
        if let (Ask::Pod(uid, lane), false) = (&ask, late) {
            let takes_long = matches!(progress, Progress::Slow(_));
            self.agenda.give_turn_back(uid, *lane, takes_long);
        }
        let answer = match progress {
            Progress::Answered(answer) => answer,
            Progress::Slow(call) => {
                match &ask {
                    Ask::List => {
                        self.agenda.list_is_slow();
                        info!("the runtime takes long to list its pods");
                    }
                    Ask::Pod(uid, _) => {
                        info!(pod = %uid, "the runtime takes long to inspect a pod, others proceed");
                    }
                    Ask::Version => {}
                }
                self.calls.go_on(ask, as_of, call);
                return;
            }
        };
        match (ask, answer) {
            (_, Answer::List(answer)) => {
                self.agenda.list_ended(answer.is_ok());
                self.listed(answer, as_of, streaming);
            }
            (Ask::Pod(uid, _), Answer::Pod(answer)) => self.looked(uid, *answer, as_of),
            (_, Answer::Version(period)) => self.evented_period = period,
            (_, Answer::Pod(_)) => {}
        }
    }

    /// Compares the listed pods with the known ones, and plans the inspection of the changed ones.
    fn listed(
        &mut self,
        answer: Result<BTreeMap<PodUid, PodStatus>, CriError>,
        as_of: Instant,
        streaming: bool,
    ) {
        let listed = match answer {
            Ok(listed) => listed,
            Err(error) => {
                if !self.down {
                    warn!(%error, "cannot list pods of the runtime");
                }
                self.down = true;
                self.plan_relist(GENERIC_PERIOD);
                return;
            }
        };
        if self.down {
            info!("the runtime answers again");
            self.down = false;
        }
        let gone: BTreeSet<_> = self
            .known
            .keys()
            .chain(self.retry.keys())
            .filter(|uid| !listed.contains_key(*uid) && !self.is_newer(uid, as_of))
            .cloned()
            .collect();
        for uid in gone {
            self.agenda.gone(&uid, as_of);
            self.seen(uid.clone(), PodStatus::empty(uid), as_of);
        }
        let mut changed = Vec::new();
        for (uid, status) in listed {
            let known = self.known.get(&uid);
            let same = known.is_some_and(|known| pleg_diff::same_summary(&known.status, &status));
            if (!same || self.retry.contains_key(&uid)) && !self.is_newer(&uid, as_of) {
                changed.push(uid.clone());
                self.agenda.changed(uid, status, as_of);
            }
        }
        self.cache.set_global(as_of, changed);
        self.options.runtime_state.set_pleg_relist(self.clock.now());
        let metrics = &self.options.metrics;
        metrics
            .pleg_relist_duration
            .observe(as_of.elapsed().as_secs_f64());
        #[expect(clippy::cast_precision_loss, reason = "a gauge in seconds")]
        metrics
            .pleg_last_seen
            .set(self.clock.now().wall_ms as f64 / 1000.0);
        let period = match (streaming, self.options.cri.lists_in_parts()) {
            (true, _) => self.evented_period,
            (false, true) => PARTS_PERIOD,
            (false, false) => GENERIC_PERIOD,
        };
        self.options.runtime_state.set_pleg_period(period);
        self.plan_relist(period);
        self.retry_soon();
        self.count_running();
    }

    /// A pod was inspected.
    fn looked(&mut self, uid: PodUid, answer: Result<PodStatus, CriError>, as_of: Instant) {
        if !self.agenda.look_ended(&uid, as_of) || self.is_newer(&uid, as_of) {
            return;
        }
        match answer {
            Ok(status) => self.seen(uid, status, as_of),
            Err(error) => {
                debug!(pod = %uid, %error, "cannot inspect pod, will be retried");
                let message = error.to_string();
                let error = InspectError {
                    uid: uid.clone(),
                    message,
                };
                self.cache.set(&uid, Err(error), as_of);
                self.retry.insert(uid, as_of);
            }
        }
        self.retry_soon();
        // With each of many that wait it would cost the square of their number.
        if self.agenda.is_idle() {
            self.count_running();
        }
    }

    /// Returns whether newer facts of a pod are known than those of a call made at `as_of`.
    fn is_newer(&self, uid: &PodUid, as_of: Instant) -> bool {
        let known = self.known.get(uid).map(|known| known.as_of);
        let failed = self.retry.get(uid).copied();
        known.max(failed).is_some_and(|newest| newest > as_of)
    }

    /// Plans the next list soon. A pod that could not be inspected has no second event, so it must not wait for a plan
    /// of minutes.
    fn retry_soon(&mut self) {
        if self.retry.keys().any(|uid| !self.agenda.has(uid)) {
            self.plan_relist(GENERIC_PERIOD);
        }
    }

    /// Everything is listed after this time, or earlier if that is planned already.
    fn plan_relist(&mut self, after: Duration) {
        let at = Instant::now() + after;
        self.next_relist = Some(self.next_relist.map_or(at, |planned| planned.min(at)));
    }

    fn seen(&mut self, uid: PodUid, mut status: PodStatus, as_of: Instant) {
        self.retry.remove(&uid);
        let old = self.known.get(&uid).map(|known| Arc::clone(&known.status));
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
            let known = Known {
                status: Arc::clone(&status),
                as_of,
            };
            self.known.insert(uid.clone(), known);
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
            if !self.outbox.send(event) {
                self.options.metrics.pleg_discard_events.inc();
                debug!(pod = %uid, "the sync loop has ended, event dropped");
            }
        }
    }

    fn count_running(&self) {
        let metrics = &self.options.metrics;
        let mut states = [0_i64; 4];
        let mut pods = 0;
        for Known { status, .. } in self.known.values() {
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

/// Never returns for `None`.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn next_event(stream: &mut Stream) -> Option<Result<ContainerEvent, CriError>> {
    match stream {
        Stream::Live(events) => events.next().await,
        Stream::Broken(_) | Stream::Off => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;

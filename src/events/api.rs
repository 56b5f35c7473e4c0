//! Events as objects of the API server. Upstream: client-go's event broadcaster and `recordToSink`.
//!
//! The input is the events that [`super::JournalRecorder`] forwards. The output is `v1.Event` objects, made or counted
//! up. Events that were not written yet wait in the order in which they happened, but those that the server fails on
//! delay no others ([`super::queue`]). They are stored with the name of their object and with the data to count
//! repetitions in it ([`super::keep`]): a later agent continues where this one ended, in the same objects. The newest
//! state of an object is written, so that a repetition during an outage takes one place and one request.
//!
//! **Invariant:** recording never waits.
//! **Invariant:** an event is not sent twice, whenever the agent is killed: a stored event is sent again under the name
//! it had, and an existing object of that name is the right one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::EventRate;
use super::correlate::{Correlator, Told};
use super::keep::Keeper;
use super::queue::{Next, Queue, Restored};
use super::record::{Kept, NODE_NAMESPACE};
use crate::apiserver::{ApiClient, Failure, Reachability, pause};
use crate::store::Store;
use crate::types::metrics::{Metrics, ReasonLabel};
use crate::types::pace::Pace;
use crate::types::{Clock, Event, Stamp};

/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// First and longest pause of an event that the server fails on.
const HOLD: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// `source.component` and `reportingComponent`.
const COMPONENT: &str = "kubelet";

/// An event could not be written.
#[derive(Debug, thiserror::Error)]
enum SinkError {
    #[error("{verb} event {namespace}/{name}")]
    Request {
        verb: &'static str,
        namespace: String,
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("{verb} event {namespace}/{name}: no answer within 30 s")]
    Timeout {
        verb: &'static str,
        namespace: String,
        name: String,
    },
}

impl SinkError {
    fn failure(&self) -> Failure {
        match self {
            Self::Request { source, .. } => Failure::of(source),
            Self::Timeout { .. } => Failure::Transient,
        }
    }

    /// Returns whether the server answered with a failure, maybe on this event alone, as when an admission webhook of
    /// it fails. An answer without a server behind it (502 to 504) and a missing answer concern all events.
    fn is_of_server(&self) -> bool {
        let Self::Request { source, .. } = self else {
            return false;
        };
        matches!(&**source, kube::Error::Api(status) if status.code >= 500 && !(502..=504).contains(&status.code))
    }
}

/// State shared by the recorder of events, their sender and their keeper.
pub(super) struct Shared {
    queue: Mutex<Queue>,
    /// Something waits.
    woken: Notify,
    /// Records may differ.
    pub(super) changed: Notify,
    pub(super) clock: Arc<dyn Clock>,
    metrics: Metrics,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unsent(&self, reason: &str, count: u64) {
        if count == 0 {
            return;
        }
        let metrics = &self.metrics;
        let label = ReasonLabel {
            reason: reason.to_owned(),
        };
        metrics.events_unsent.get_or_create(&label).inc_by(count);
    }

    /// The oldest had to go.
    fn dropped(&self, count: u64) {
        if count == 0 {
            return;
        }
        self.unsent("queue_full", count);
        let before = self.metrics.events_discarded.inc_by(count);
        let dropped = before + count;
        // Told at powers of two.
        if before.checked_ilog2() != dropped.checked_ilog2() {
            warn!(
                dropped,
                "too many events wait for the API server, dropping the oldest"
            );
        }
    }
}

/// Takes events for the API server.
#[derive(Clone)]
pub struct ApiEvents(Arc<Shared>);

impl ApiEvents {
    /// Takes one event. Never waits.
    pub(super) fn take(&self, event: Event) {
        let now = self.0.clock.now();
        let dropped = self.0.lock().take(event, now);
        if dropped.spam {
            self.0.unsent("spam", 1);
        } else {
            self.0.woken.notify_one();
            self.0.changed.notify_one();
        }
        self.0.dropped(dropped.full);
    }
}

/// Writes events to the API server.
pub struct EventSink {
    shared: Arc<Shared>,
    api: ApiClient,
    node_name: String,
    rate: EventRate,
    keeper: Keeper,
}

/// The two ends of the way to the API server: what takes events, for [`super::JournalRecorder::forward`], and what
/// writes them. What `store` has of an earlier agent comes first.
pub fn api_events(
    api: ApiClient,
    node_name: impl Into<String>,
    rate: EventRate,
    store: Store,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
) -> (ApiEvents, EventSink) {
    let node_name = node_name.into();
    let mut queue = Queue::new(Correlator::new(&*node_name, rand::random()));
    let mut kept = Kept::read(&store.snapshot());
    let damaged = std::mem::take(&mut kept.damaged);
    let restored = queue.restore(kept, clock.now());
    if restored != Restored::default() {
        info!(
            waiting = restored.waiting,
            too_old = restored.too_old,
            "sending events from before the restart to the API server"
        );
    }
    let shared = Arc::new(Shared {
        queue: Mutex::new(queue),
        woken: Notify::new(),
        changed: Notify::new(),
        clock,
        metrics,
    });
    shared.unsent("too_old", restored.too_old);
    shared.dropped(restored.full);
    // What was taken over is looked at first.
    shared.changed.notify_one();
    let sink = EventSink {
        keeper: Keeper::new(Arc::clone(&shared), store, damaged),
        shared: Arc::clone(&shared),
        api,
        node_name,
        rate,
    };
    (ApiEvents(shared), sink)
}

/// Result of an attempt.
enum Written {
    Yes,
    Dropped,
    /// Not this one now; maybe others are.
    Postponed(SinkError),
    /// Nothing is written now.
    Later(SinkError),
}

impl EventSink {
    /// Writes until `token` is cancelled; events that wait then are stored.
    pub async fn run(self, token: CancellationToken) {
        let Self {
            shared,
            api,
            node_name,
            rate,
            keeper,
        } = self;
        let teller = Teller {
            shared,
            api,
            node_name,
            pace: Pace::default(),
        };
        let tell = async {
            tokio::select! {
                () = token.cancelled() => {}
                never = teller.run(rate) => match never {},
            }
        };
        tokio::join!(tell, keeper.run(&token));
    }
}

/// Sender of events to the API server.
struct Teller {
    shared: Arc<Shared>,
    api: ApiClient,
    node_name: String,
    pace: Pace,
}

impl Teller {
    async fn run(&self, rate: EventRate) -> std::convert::Infallible {
        let mut bucket = Bucket::new(rate);
        let mut failures = 0_u32;
        let mut too_old = 0_u64;
        loop {
            let now = self.shared.clock.now();
            let next = self.shared.lock().next(now);
            if too_old > 0 && !matches!(next, Next::TooOld) {
                info!(
                    events = too_old,
                    "dropping events that are too old for the API server"
                );
                self.shared.unsent("too_old", too_old);
                self.shared.changed.notify_one();
                too_old = 0;
            }
            let key = match next {
                Next::Object(key) => key,
                Next::TooOld => {
                    too_old += 1;
                    continue;
                }
                Next::Nothing => {
                    self.shared.woken.notified().await;
                    continue;
                }
                Next::Held(wait) => {
                    // Cancel-safe: whatever woke it, it is looked at what is next.
                    tokio::select! {
                        () = self.shared.woken.notified() => {}
                        () = tokio::time::sleep(wait.max(PAUSE.0)) => {}
                    }
                    continue;
                }
            };
            bucket.wait().await;
            let Some(told) = self.shared.lock().begin(&key) else {
                continue;
            };
            let written = self.write_one(&told).await;
            {
                let mut queue = self.shared.lock();
                match &written {
                    Written::Yes => queue.sent(),
                    Written::Dropped => queue.refused(),
                    Written::Postponed(_) => {
                        let now = self.shared.clock.now();
                        queue.postponed(|failures| now.plus(pause(failures, HOLD.0, HOLD.1)));
                    }
                    Written::Later(_) => queue.failed(),
                }
            }
            match written {
                Written::Yes => {
                    failures = 0;
                    self.shared.changed.notify_one();
                }
                Written::Dropped => {
                    failures = 0;
                    self.shared.unsent("refused", 1);
                    self.shared.changed.notify_one();
                }
                Written::Postponed(error) => {
                    failures = 0;
                    self.tell_of_server(&error);
                    tokio::time::sleep(PAUSE.0).await;
                }
                Written::Later(error) => {
                    failures = failures.saturating_add(1);
                    self.back_off(failures, &error).await;
                }
            }
        }
    }

    /// Says what the server fails with, now and then.
    fn tell_of_server(&self, error: &SinkError) {
        let why = error as &dyn std::error::Error;
        let reason = why.source().map(ToString::to_string).unwrap_or_default();
        if self.pace.is_due("events", &reason, self.shared.clock.now()) {
            warn!(
                error = why,
                "the API server fails on an event, retrying it after others"
            );
        } else {
            debug!(error = why, "the API server fails on an event");
        }
    }

    async fn back_off(&self, failures: u32, error: &SinkError) {
        let connection = self.api.connection();
        let is_down = matches!(connection.now(), Reachability::Down(_));
        tell(failures, is_down, error);
        let pause = tokio::time::sleep(pause(failures, PAUSE.0, PAUSE.1));
        if is_down {
            tokio::select! {
                () = pause => {}
                () = connection.up() => {}
            }
        } else {
            pause.await;
        }
    }

    async fn write_one(&self, told: &Told) -> Written {
        let object = self.object(told);
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let api: Api<core::Event> = Api::namespaced(self.api.kube(), &namespace);
        let mut made = told.made;
        let mut turns = 0;
        loop {
            let result = if made {
                let patch = Patch::Strategic(json!({
                    "count": object.count,
                    "lastTimestamp": object.last_timestamp,
                    "message": object.message,
                }));
                let parameters = PatchParams::default();
                let request = api.patch(&told.name, &parameters, &patch);
                answer("patch", &namespace, &told.name, request).await
            } else {
                let parameters = PostParams::default();
                let request = api.create(&parameters, &object);
                answer("create", &namespace, &told.name, request).await
            };
            turns += 1;
            match result.map_err(|error| (error.failure(), error)) {
                Ok(_) => return Written::Yes,
                // Events do not live long in the API server: it is made again.
                Err((Failure::NotFound, _)) if made && turns < 3 => made = false,
                // Made by an attempt whose answer got lost, maybe of a former agent; it may be counted up since.
                Err((Failure::Conflict, _)) if !made && told.count == 1 => return Written::Yes,
                Err((Failure::Conflict, _)) if !made && turns < 3 => made = true,
                Err((_, error)) => return refused_or_later(error),
            }
        }
    }

    fn object(&self, told: &Told) -> core::Event {
        let event = &told.event;
        let (namespace, involved) = match &event.pod {
            Some(pod) => (
                pod.namespace.as_str(),
                core::ObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    namespace: Some(pod.namespace.clone()),
                    name: Some(pod.name.clone()),
                    uid: Some(pod.uid.to_string()),
                    field_path: event.field_path(),
                    resource_version: None,
                },
            ),
            // The UID is the name: that is how events of nodes are found.
            None => (
                NODE_NAMESPACE,
                core::ObjectReference {
                    kind: Some("Node".to_owned()),
                    name: Some(self.node_name.clone()),
                    uid: Some(self.node_name.clone()),
                    ..core::ObjectReference::default()
                },
            ),
        };
        core::Event {
            metadata: ObjectMeta {
                name: Some(told.name.clone()),
                namespace: Some(namespace.to_owned()),
                annotations: (!event.annotations.is_empty()).then(|| event.annotations.clone()),
                ..ObjectMeta::default()
            },
            involved_object: involved,
            reason: Some(event.reason.clone()),
            message: Some(event.message.clone()),
            type_: Some(super::kind_name(event.kind).to_owned()),
            source: Some(core::EventSource {
                component: Some(COMPONENT.to_owned()),
                host: Some(self.node_name.clone()),
            }),
            reporting_component: Some(COMPONENT.to_owned()),
            reporting_instance: Some(self.node_name.clone()),
            first_timestamp: time(told.first),
            last_timestamp: time(told.last),
            count: Some(i32::try_from(told.count).unwrap_or(i32::MAX)),
            ..core::Event::default()
        }
    }
}

fn time(stamp: Stamp) -> Option<Time> {
    let second = stamp.wall_ms.div_euclid(1000);
    jiff::Timestamp::from_second(second).ok().map(Time)
}

fn tell(failures: u32, is_down: bool, error: &SinkError) {
    let error = error as &dyn std::error::Error;
    if failures == 1 && !is_down {
        warn!(error, "cannot write an event, retrying");
    } else {
        debug!(error, failures, "cannot write an event");
    }
}

fn refused_or_later(error: SinkError) -> Written {
    if error.failure() == Failure::Transient {
        return match error.is_of_server() {
            true => Written::Postponed(error),
            false => Written::Later(error),
        };
    }
    let why = &error as &dyn std::error::Error;
    warn!(error = why, "the API server refuses an event, dropping it");
    Written::Dropped
}

/// Waits for an answer, but not for ever.
async fn answer<T>(
    verb: &'static str,
    namespace: &str,
    name: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, SinkError> {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    match tokio::time::timeout(ANSWER, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(SinkError::Request {
            verb,
            namespace,
            name,
            source: Box::new(source),
        }),
        Err(_) => Err(SinkError::Timeout {
            verb,
            namespace,
            name,
        }),
    }
}

/// Requests that are allowed now.
struct Bucket {
    rate: EventRate,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn new(rate: EventRate) -> Self {
        Self {
            rate,
            tokens: f64::from(rate.burst.max(1)),
            at: Instant::now(),
        }
    }

    /// Waits for a token and takes it. Cancel-safe: a wait that is given up takes none.
    async fn wait(&mut self) {
        if self.rate.qps == 0 {
            return;
        }
        let (qps, full) = (f64::from(self.rate.qps), f64::from(self.rate.burst.max(1)));
        loop {
            let now = Instant::now();
            let gained = now.duration_since(self.at).as_secs_f64() * qps;
            self.tokens = (self.tokens + gained).min(full);
            self.at = now;
            if self.tokens >= 1.0 {
                self.tokens -= 1.0;
                return;
            }
            let missing = Duration::from_secs_f64((1.0 - self.tokens) / qps);
            tokio::time::sleep(missing.max(Duration::from_millis(1))).await;
        }
    }
}

#[cfg(test)]
mod tests;

//! Events as objects of the API server. Upstream: client-go's event broadcaster and `recordToSink`.
//!
//! In: the events that [`super::JournalRecorder`] forwards. Out: `v1.Event` objects, made or counted up. What was
//! not written yet waits in memory, in the order in which it happened: at most [`QUEUE`] objects, of which the oldest
//! goes first when there are more; a restart of the agent forgets them (the journal has them). The newest state of an object is written, so
//! that what repeats during an outage takes one place and one request.
//!
//! **Invariant:** recording never waits.

use std::collections::{HashSet, VecDeque};
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
use tracing::{debug, warn};

use super::EventRate;
use super::correlate::{Correlator, Key, Told};
use crate::apiserver::{ApiClient, Failure, Reachability, pause};
use crate::types::metrics::{Metrics, ReasonLabel};
use crate::types::{Clock, Event, Stamp};

/// Objects that wait to be written.
const QUEUE: usize = 1000;
/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// `source.component` and `reportingComponent`.
const COMPONENT: &str = "kubelet";
/// Namespace of events about the node.
const NODE_NAMESPACE: &str = "default";

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
}

struct Shared {
    waiting: Mutex<Waiting>,
    woken: Notify,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

#[derive(Default)]
struct Waiting {
    correlator: Correlator,
    queue: VecDeque<Key>,
    queued: HashSet<Key>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unsent(&self, reason: &str) {
        let metrics = &self.metrics;
        let label = ReasonLabel {
            reason: reason.to_owned(),
        };
        metrics.events_unsent.get_or_create(&label).inc();
    }
}

/// Takes events for the API server.
#[derive(Clone)]
pub struct ApiEvents(Arc<Shared>);

impl ApiEvents {
    /// Takes one event. Never waits.
    pub(super) fn take(&self, event: Event) {
        let now = self.0.clock.now();
        let mut reasons = Vec::new();
        {
            let mut waiting = self.0.lock();
            match waiting.correlator.take(event, now) {
                None => reasons.push("spam"),
                Some(key) => {
                    if waiting.queued.insert(key.clone()) {
                        waiting.queue.push_back(key);
                    }
                    while waiting.queue.len() > QUEUE
                        && let Some(oldest) = waiting.queue.pop_front()
                    {
                        waiting.queued.remove(&oldest);
                        reasons.push("queue_full");
                    }
                }
            }
        }
        for reason in reasons {
            self.0.unsent(reason);
        }
        self.0.woken.notify_one();
    }
}

/// Writes events to the API server.
pub struct EventSink {
    shared: Arc<Shared>,
    api: ApiClient,
    node_name: String,
    rate: EventRate,
}

/// The two ends of the way to the API server: what takes events, for [`super::JournalRecorder::forward`], and what
/// writes them.
pub fn api_events(
    api: ApiClient,
    node_name: impl Into<String>,
    rate: EventRate,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
) -> (ApiEvents, EventSink) {
    let shared = Arc::new(Shared {
        waiting: Mutex::default(),
        woken: Notify::new(),
        clock,
        metrics,
    });
    let sink = EventSink {
        shared: Arc::clone(&shared),
        api,
        node_name: node_name.into(),
        rate,
    };
    (ApiEvents(shared), sink)
}

/// What became of an attempt.
enum Written {
    Yes,
    Dropped,
    Later(SinkError),
}

impl EventSink {
    /// Writes until `token` is cancelled; what waits then is forgotten.
    pub async fn run(self, token: CancellationToken) {
        tokio::select! {
            () = token.cancelled() => {}
            never = self.write() => match never {},
        }
    }

    async fn write(&self) -> std::convert::Infallible {
        let mut bucket = Bucket::new(self.rate);
        let mut failures = 0_u32;
        let mut sequence = 0_u32;
        loop {
            let next = self.shared.lock().queue.front().cloned();
            let Some(key) = next else {
                self.shared.woken.notified().await;
                continue;
            };
            bucket.wait().await;
            // From here on a repetition is another change of the object, to be written after this one.
            let told = {
                let mut waiting = self.shared.lock();
                waiting.queued.remove(&key);
                if waiting.queue.front() == Some(&key) {
                    waiting.queue.pop_front();
                }
                waiting.correlator.told(&key)
            };
            let Some(told) = told else {
                self.shared.unsent("queue_full");
                continue;
            };
            match self.write_one(&key, &told, sequence).await {
                Written::Yes => {
                    failures = 0;
                    sequence = sequence.wrapping_add(1);
                }
                Written::Dropped => {
                    failures = 0;
                    sequence = sequence.wrapping_add(1);
                    self.shared.unsent("refused");
                }
                Written::Later(error) => {
                    failures = failures.saturating_add(1);
                    self.put_back(key);
                    self.back_off(failures, &error).await;
                }
            }
        }
    }

    /// Back to where it was, unless there is no room any more.
    fn put_back(&self, key: Key) {
        let dropped = {
            let mut waiting = self.shared.lock();
            let is_full = waiting.queue.len() >= QUEUE;
            if is_full {
                !waiting.queued.contains(&key)
            } else {
                if waiting.queued.insert(key.clone()) {
                    waiting.queue.push_front(key);
                }
                false
            }
        };
        if dropped {
            self.shared.unsent("queue_full");
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

    async fn write_one(&self, key: &Key, told: &Told, sequence: u32) -> Written {
        let object = self.object(told, sequence);
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let api: Api<core::Event> = Api::namespaced(self.api.kube(), &namespace);
        if let Some(name) = &told.name {
            let patch = Patch::Strategic(json!({
                "count": object.count,
                "lastTimestamp": object.last_timestamp,
                "message": object.message,
            }));
            let parameters = PatchParams::default();
            let request = api.patch(name, &parameters, &patch);
            match answer("patch", &namespace, name, request).await {
                Ok(_) => return Written::Yes,
                // Events do not live long in the API server: it is made again.
                Err(error) if error.failure() == Failure::NotFound => {
                    self.shared.lock().correlator.named(key, None);
                }
                Err(error) => return refused_or_later(error),
            }
        }
        let name = object.metadata.name.clone().unwrap_or_default();
        let parameters = PostParams::default();
        let request = api.create(&parameters, &object);
        match answer("create", &namespace, &name, request).await {
            Ok(_) => {
                self.shared.lock().correlator.named(key, Some(name));
                Written::Yes
            }
            // Made by an attempt whose answer got lost.
            Err(error) if error.failure() == Failure::Conflict => {
                self.shared.lock().correlator.named(key, Some(name));
                Written::Yes
            }
            Err(error) => refused_or_later(error),
        }
    }

    fn object(&self, told: &Told, sequence: u32) -> core::Event {
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
        let about = involved.name.as_deref().unwrap_or_default();
        // Unique as well when many events have the same millisecond.
        let nanoseconds =
            told.last.wall_ms.saturating_mul(1_000_000) + i64::from(sequence % 1_000_000);
        core::Event {
            metadata: ObjectMeta {
                name: Some(format!("{about}.{nanoseconds:x}")),
                namespace: Some(namespace.to_owned()),
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
        warn!(error, "event not written, trying again");
    } else {
        debug!(error, failures, "event not written");
    }
}

fn refused_or_later(error: SinkError) -> Written {
    if error.failure() == Failure::Transient {
        return Written::Later(error);
    }
    let why = &error as &dyn std::error::Error;
    warn!(
        error = why,
        "the API server refuses an event, it is dropped"
    );
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

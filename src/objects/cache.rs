//! One object, or the services of the cluster, as the API server last showed them: the slot that readers wait on, and
//! the task that fills it.
//!
//! In: answers of a list-watch, a copy from the record. Out: the newest known object, with what is known about it:
//! nothing yet, a recorded copy, or what the API server said in this run of the agent.
//!
//! **Invariants:** an error never replaces what is known; only an answer that says there is none makes an object
//! absent.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceSpec};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::watcher;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::context::Context;
use super::refs::{Kind, ObjectKey};
use super::{ObjectChange, ObjectError};
use crate::apiserver::{ApiClient, Reachability};

/// Shortest time that a reader waits for the API server if a copy is recorded.
const RECORD_PATIENCE: Duration = Duration::from_secs(1);
/// The same, counted from the begin of the watch: after a start everything is asked for at once.
const RECORD_WARMUP: Duration = Duration::from_secs(5);
/// Shortest time that a reader waits if nothing is known.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same, counted from the begin of the watch.
const WARMUP: Duration = Duration::from_secs(10);
/// Interval at which a waiting reader checks for a lost connection.
const LOOK: Duration = Duration::from_millis(250);
/// First and longest pause after a failure. The first is short: the authorizer may not know of a pod yet.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A watch is renewed after this many seconds, at random, as upstream's reflectors do.
pub(super) const WATCH_SECONDS: std::ops::RangeInclusive<u32> = 480..=600;

/// A kind that is watched object by object.
pub(super) trait Watched:
    kube::Resource<DynamicType = ()>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    const KIND: Kind;

    fn api(api: &ApiClient, namespace: &str) -> kube::Api<Self>;

    fn is_immutable(&self) -> bool {
        false
    }

    /// Takes away what no pod sees.
    fn reduce(&mut self) {
        strip(self.meta_mut());
    }

    /// Returns whether both look the same to a pod.
    fn same(&self, other: &Self) -> bool;
}

impl Watched for ConfigMap {
    const KIND: Kind = Kind::ConfigMap;

    fn api(api: &ApiClient, namespace: &str) -> kube::Api<Self> {
        kube::Api::namespaced(api.kube(), namespace)
    }

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }

    fn same(&self, other: &Self) -> bool {
        self.data == other.data && self.binary_data == other.binary_data
    }
}

impl Watched for Secret {
    const KIND: Kind = Kind::Secret;

    fn api(api: &ApiClient, namespace: &str) -> kube::Api<Self> {
        kube::Api::namespaced(api.kube(), namespace)
    }

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }

    fn same(&self, other: &Self) -> bool {
        self.data == other.data && self.type_ == other.type_
    }
}

impl Watched for RuntimeClass {
    const KIND: Kind = Kind::RuntimeClass;

    fn api(api: &ApiClient, _namespace: &str) -> kube::Api<Self> {
        kube::Api::all(api.kube())
    }

    fn same(&self, other: &Self) -> bool {
        self.handler == other.handler
            && self.overhead == other.overhead
            && self.scheduling == other.scheduling
    }
}

/// Takes away what no pod sees: `kubectl apply` keeps a second copy of a secret in an annotation.
pub(super) fn strip(metadata: &mut ObjectMeta) {
    *metadata = ObjectMeta {
        name: metadata.name.take(),
        namespace: metadata.namespace.take(),
        uid: metadata.uid.take(),
        resource_version: metadata.resource_version.take(),
        ..ObjectMeta::default()
    };
}

/// Reason why the newest request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The API server said no.
    Refused(String),
    /// It did not answer, or not to the question.
    Unanswered(String),
}

impl Trouble {
    pub(super) fn of(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status),
            // The text of serde's error may hold a piece of the object.
            kube::Error::SerdeError(_) => {
                Self::Unanswered("the answer of the API server does not decode".to_owned())
            }
            other => Self::Unanswered(other.to_string()),
        }
    }

    fn of_status(status: &kube::core::Status) -> Self {
        let text = format!("{} {}: {}", status.code, status.reason, status.message);
        match status.code {
            408 | 410 | 429 => Self::Unanswered(text),
            400..=499 => Self::Refused(text),
            _ => Self::Unanswered(text),
        }
    }

    pub(super) fn of_watch(error: &watcher::Error) -> Self {
        match error {
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => Self::of(error),
            watcher::Error::WatchError(status) => Self::of_status(status),
            watcher::Error::NoResourceVersion => {
                Self::Unanswered("the API server sent an object without resourceVersion".to_owned())
            }
        }
    }
}

/// Known state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Known<T> {
    /// Nothing yet.
    Nothing,
    /// A copy from a previous run of the agent.
    Recorded(T),
    /// The API server's answer.
    Live(T),
}

struct Slot<T> {
    known: Known<T>,
    trouble: Option<Trouble>,
}

/// Shared state that readers wait for.
pub(super) struct Cell<T> {
    /// For errors: kind and `namespace/name`.
    kind: &'static str,
    name: String,
    slot: watch::Sender<Slot<T>>,
    begun: Instant,
    /// A reader left with an error, so it has to be notified when there is an answer.
    missed: AtomicBool,
    /// Somebody doubts what is known; for kinds that are not watched.
    pub(super) doubt: Notify,
    /// Somebody would like it fresh; for kinds that are not watched.
    pub(super) stale: Notify,
}

impl<T: Clone> Cell<T> {
    pub(super) fn new(kind: &'static str, name: String, recorded: Option<T>) -> Self {
        Self {
            kind,
            name,
            slot: watch::Sender::new(Slot {
                known: recorded.map_or(Known::Nothing, Known::Recorded),
                trouble: None,
            }),
            begun: Instant::now(),
            missed: AtomicBool::new(false),
            doubt: Notify::new(),
            stale: Notify::new(),
        }
    }

    /// Returns the known state, at once.
    pub(super) fn known(&self) -> Known<T> {
        self.slot.borrow().known.clone()
    }

    /// Takes over what another cell knows, for the time until there is an answer.
    pub(super) fn take_over(&self, other: &Self) {
        let known = match other.known() {
            Known::Nothing => return,
            Known::Recorded(value) | Known::Live(value) => Known::Recorded(value),
        };
        self.slot.send_modify(|slot| {
            // The answer may be there already.
            if !matches!(slot.known, Known::Live(_)) {
                slot.known = known;
            }
        });
    }

    pub(super) fn trouble(&self, trouble: Trouble) {
        self.slot.send_modify(|slot| slot.trouble = Some(trouble));
    }

    /// Notes an answer. Returns true if readers have to be notified; `differs` compares it with the known state.
    pub(super) fn answer(&self, value: T, differs: impl FnOnce(&Known<T>, &T) -> bool) -> bool {
        let mut changed = false;
        self.slot.send_modify(|slot| {
            changed = differs(&slot.known, &value);
            slot.known = Known::Live(value);
            slot.trouble = None;
        });
        self.missed.swap(false, Ordering::SeqCst) || changed
    }

    /// The newest value: live, or the recorded one when the API server does not answer in time. Cancel-safe.
    pub(super) async fn read(&self, ctx: &Context) -> Result<T, ObjectError> {
        let result = self.wait(ctx).await;
        if result.is_err() {
            self.missed.store(true, Ordering::SeqCst);
            // The answer may have come just now, to nobody.
            if let Known::Live(value) = self.known() {
                return Ok(value);
            }
        }
        result
    }

    async fn wait(&self, ctx: &Context) -> Result<T, ObjectError> {
        let asked = Instant::now();
        let for_record = (asked + RECORD_PATIENCE).max(self.begun + RECORD_WARMUP);
        let for_nothing = (asked + PATIENCE).max(self.begun + WARMUP);
        let mut slot = self.slot.subscribe();
        loop {
            let (known, trouble) = {
                let slot = slot.borrow_and_update();
                (slot.known.clone(), slot.trouble.clone())
            };
            let now = Instant::now();
            let down = match &ctx.api {
                None => Some(None),
                Some(api) => match api.connection().now() {
                    Reachability::Down(why) => Some(Some(why)),
                    Reachability::Untried | Reachability::Up => None,
                },
            };
            let until = match (known, down, trouble) {
                (Known::Live(value), _, _) => return Ok(value),
                (Known::Recorded(value), Some(_), _) => return Ok(value),
                (Known::Recorded(value), None, _) if now >= for_record => return Ok(value),
                (Known::Recorded(_), None, _) => for_record,
                (Known::Nothing, Some(None), _) => return Err(self.standalone()),
                (Known::Nothing, Some(Some(why)), _) => return Err(self.unreachable(why)),
                (Known::Nothing, None, Some(Trouble::Refused(why))) if now >= asked + PATIENCE => {
                    return Err(ObjectError::Refused {
                        kind: self.kind,
                        key: self.name.clone(),
                        why,
                    });
                }
                (Known::Nothing, None, trouble) if now >= for_nothing => {
                    return Err(self.unreachable(match trouble {
                        Some(Trouble::Refused(why) | Trouble::Unanswered(why)) => why,
                        None => "no answer in time".to_owned(),
                    }));
                }
                (Known::Nothing, None, Some(Trouble::Refused(_))) => asked + PATIENCE,
                (Known::Nothing, None, _) => for_nothing,
            };
            tokio::select! {
                // The sender lives as long as `self`.
                changed = slot.changed() => drop(changed),
                () = tokio::time::sleep_until(until.min(now + LOOK)) => {}
            }
        }
    }

    fn standalone(&self) -> ObjectError {
        ObjectError::Standalone {
            kind: self.kind,
            key: self.name.clone(),
        }
    }

    fn unreachable(&self, why: String) -> ObjectError {
        ObjectError::Unreachable {
            kind: self.kind,
            key: self.name.clone(),
            why,
        }
    }
}

/// One object; `None` inside when there is none.
pub(super) type ObjectCell<K> = Cell<Option<Arc<K>>>;
/// Services by namespace and name.
pub(super) type ServiceMap = BTreeMap<(String, String), Arc<Service>>;

/// The list-watch of one object, forever.
fn events<K: Watched>(
    api: &ApiClient,
    key: &ObjectKey,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + use<K> {
    let config = watcher::Config::default()
        .fields(&format!("metadata.name={}", key.name))
        .timeout(rand::random_range(WATCH_SECONDS));
    watcher::watcher(K::api(api, &key.namespace), config)
}

/// Watches one object until it is dropped, or until the object can change no more.
pub(super) async fn follow_object<K: Watched>(
    ctx: Arc<Context>,
    key: ObjectKey,
    cell: Arc<ObjectCell<K>>,
    remember: bool,
) {
    let Some(api) = ctx.api.clone() else {
        return;
    };
    let mut stream = Box::pin(events::<K>(&api, &key));
    let mut set_back = api.connection().set_back();
    let mut pause = Pause::default();
    let mut listed = None;
    loop {
        // Both are cancel-safe.
        let event = tokio::select! {
            event = stream.next() => event,
            _ = set_back.changed() => {
                stream = Box::pin(events::<K>(&api, &key));
                continue;
            }
        };
        let Some(event) = event else {
            return;
        };
        let object = match event {
            Err(error) => {
                cell.trouble(Trouble::of_watch(&error));
                pause.wait(&api).await;
                continue;
            }
            Ok(watcher::Event::Init) => {
                listed = None;
                continue;
            }
            Ok(watcher::Event::InitApply(object)) => {
                listed = Some(object);
                continue;
            }
            Ok(watcher::Event::InitDone) => listed.take(),
            Ok(watcher::Event::Apply(object)) => Some(object),
            Ok(watcher::Event::Delete(_)) => None,
        };
        pause.reset();
        let is_final = object.as_ref().is_some_and(Watched::is_immutable);
        take_answer(&ctx, &key, &cell, object, remember);
        if is_final {
            return;
        }
    }
}

/// Passes the API server's answer about an object to its readers, and to its record if `remember`.
pub(super) fn take_answer<K: Watched>(
    ctx: &Context,
    key: &ObjectKey,
    cell: &ObjectCell<K>,
    object: Option<K>,
    remember: bool,
) {
    let object = object.map(|mut object| {
        object.reduce();
        Arc::new(object)
    });
    let tell = cell.answer(object, |before, now| match before {
        Known::Nothing => false,
        Known::Recorded(before) | Known::Live(before) => match (before, now) {
            (Some(before), Some(now)) => !before.same(now),
            (None, None) => false,
            _ => true,
        },
    });
    if remember {
        ctx.mark(key.record_key());
    }
    if tell {
        ctx.tell(ObjectChange {
            kind: K::KIND.name(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
        });
    }
}

/// The resourceVersion of an object, if it is known and exists.
pub(super) fn version<K: Watched>(cell: &ObjectCell<K>) -> Option<String> {
    match cell.known() {
        Known::Nothing => None,
        Known::Recorded(object) | Known::Live(object) => object?.meta().resource_version.clone(),
    }
}

/// The part of a service that service variables are made of; `None` without a cluster IP, which makes none.
pub(super) fn strip_service(mut service: Service) -> Option<Service> {
    strip(&mut service.metadata);
    let spec = service.spec.take()?;
    spec.cluster_ip
        .as_deref()
        .filter(|ip| !ip.is_empty() && *ip != "None")?;
    service.status = None;
    service.spec = Some(ServiceSpec {
        cluster_ip: spec.cluster_ip,
        ports: spec.ports,
        ..ServiceSpec::default()
    });
    Some(service)
}

fn service_key(service: &Service) -> (String, String) {
    let metadata = &service.metadata;
    (
        metadata.namespace.clone().unwrap_or_default(),
        metadata.name.clone().unwrap_or_default(),
    )
}

/// Key of the record of a service.
pub(super) fn service_record_key(key: &(String, String)) -> String {
    format!("services/{}/{}", key.0, key.1)
}

/// Services, shared so that one change does not copy the map.
pub(super) type Services = Arc<ServiceMap>;

/// Watches every service.
pub(super) async fn follow_services(ctx: Arc<Context>, cell: Arc<Cell<Services>>) {
    let Some(api) = ctx.api.clone() else {
        return;
    };
    let events = || {
        let config = watcher::Config::default().timeout(rand::random_range(WATCH_SECONDS));
        let services = kube::Api::<Service>::all(api.kube());
        Box::pin(watcher::watcher(services, config))
    };
    let mut stream = events();
    let mut set_back = api.connection().set_back();
    let mut pause = Pause::default();
    let mut listed = ServiceMap::new();
    loop {
        // Both are cancel-safe.
        let event = tokio::select! {
            event = stream.next() => event,
            _ = set_back.changed() => {
                stream = events();
                continue;
            }
        };
        let Some(event) = event else {
            return;
        };
        let mut marked = Vec::new();
        let map = match event {
            Err(error) => {
                cell.trouble(Trouble::of_watch(&error));
                pause.wait(&api).await;
                continue;
            }
            Ok(watcher::Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(watcher::Event::InitApply(service)) => {
                let key = service_key(&service);
                if let Some(service) = strip_service(service) {
                    listed.insert(key, Arc::new(service));
                }
                continue;
            }
            Ok(watcher::Event::InitDone) => {
                marked.extend(ctx.recorded_keys("services/"));
                marked.extend(listed.keys().map(service_record_key));
                std::mem::take(&mut listed)
            }
            Ok(watcher::Event::Apply(service)) => {
                let key = service_key(&service);
                let mut map = cell.live_services();
                marked.push(service_record_key(&key));
                match strip_service(service) {
                    Some(service) => map.insert(key, Arc::new(service)),
                    None => map.remove(&key),
                };
                map
            }
            Ok(watcher::Event::Delete(service)) => {
                let key = service_key(&service);
                let mut map = cell.live_services();
                marked.push(service_record_key(&key));
                map.remove(&key);
                map
            }
        };
        pause.reset();
        // Variables are made when a container starts, so only whoever got nothing has to be told.
        if cell.answer(Arc::new(map), |_, _| false) {
            ctx.tell(ObjectChange {
                kind: "Service",
                namespace: String::new(),
                name: String::new(),
            });
        }
        ctx.mark_all(marked);
    }
}

impl Cell<Services> {
    fn live_services(&self) -> ServiceMap {
        match self.known() {
            Known::Live(map) | Known::Recorded(map) => (*map).clone(),
            Known::Nothing => ServiceMap::new(),
        }
    }
}

/// Pauses after failures: longer and longer, with jitter; over as soon as a lost connection is back.
#[derive(Debug, Default)]
pub(super) struct Pause {
    failures: u32,
    last: Option<Instant>,
}

impl Pause {
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    pub(super) async fn wait(&mut self, api: &ApiClient) {
        // A watch that begins again in good order sends nothing that would tell.
        let now = Instant::now();
        if self.last.is_some_and(|last| now > last + 2 * BACKOFF_MAX) {
            self.reset();
        }
        self.last = Some(now);
        let full = BACKOFF_MIN
            .saturating_mul(2_u32.saturating_pow(self.failures.min(16)))
            .min(BACKOFF_MAX);
        self.failures += 1;
        let pause = full.mul_f64(rand::random_range(0.7..1.3));
        let sleep = tokio::time::sleep(pause);
        if !matches!(api.connection().now(), Reachability::Down(_)) {
            return sleep.await;
        }
        tokio::select! {
            () = sleep => {}
            // Not all of them in the same moment.
            () = async {
                api.connection().up().await;
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..500))).await;
            } => self.reset(),
        }
    }
}

/// Locks, whatever happened to another holder: no holder leaves anything half done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The source of the API server: list and watch of the pods that are bound to this node.
//!
//! Nothing is asked before the node is registered. Each list is a quorum read (without a resourceVersion,
//! so no cache of the API server answers it) and comes in one piece. A watch follows it; bookmarks move the
//! version from which the next watch goes on. A list is made again when the version is too old (410), after
//! an outage, on reload, and when the watch gives reason to doubt it. The full set is sent after each
//! change, several events that come in one go together. Upstream's `config.NewSourceApiserver`.
//!
//! **Invariants.** What is sent is the whole of a list, with everything since: never a part. No answer is
//! not an empty answer: in an outage the pods stay as they are. A pod that cannot be decoded stays as it was
//! and holds up no other. A list that is older than what was seen before, in this run of the agent or a previous one,
//! counts only when a second one, [`STALE_CONFIRMATION`] later, says the same: then the API server was set
//! back to a backup, and wins.
//!
//! On disk: the newest version that was seen, in the table `objects` as [`VERSION_KEY`].

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod outage;
mod wire;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::{ObjectList, Request};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::outage::{Outage, Retry, TOLERATED};
use self::wire::{OfServer, Received, describe, number};
use super::{Reading, Seed, SourceSet, SourcedPod, Surroundings};
use crate::apiserver::{ApiClient, Reachability};
use crate::core::pod_update::same_desired_state;
use crate::core::state::Transaction;
use crate::core::supported::{self, UNSUPPORTED_FIELD};
use crate::types::pod::{CONFIG_SEEN, CONFIG_SOURCE, UNKNOWN_FIELDS};
use crate::types::{Event, EventType, PodExt, PodSource, PodUid};

/// Key of the newest version that was seen of the list of pods, in the table `objects`.
pub const VERSION_KEY: &str = "apisource//pods";
/// Time for which a list that is older than an earlier one is doubted.
pub const STALE_CONFIRMATION: Duration = Duration::from_secs(30);

/// A list that takes longer failed.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// A watch that takes longer to begin failed.
const WATCH_START_TIMEOUT: Duration = Duration::from_secs(30);
/// Length of a watch in seconds, as asked of the server; it differs from node to node.
const WATCH_SECONDS: std::ops::RangeInclusive<u32> = 240..=290;
/// A watch without a sign of life, bookmarks included, may be dead: bookmarks come once a minute.
const IDLE: Duration = Duration::from_secs(150);
/// Events that come within this of each other make one set …
const QUIET: Duration = Duration::from_millis(5);
/// … for this long.
const BURST: Duration = Duration::from_millis(50);
/// The version is recorded at most this often.
const RECORD_PERIOD: Duration = Duration::from_secs(10);

/// The source of the API server.
#[derive(Clone, Debug)]
pub struct ApiSettings {
    /// Client of the API server.
    pub client: ApiClient,
    /// Its URL, for records and messages.
    pub server: String,
    /// Turns true once the node was read from the API server, or registered there. A sender that goes away
    /// before means that it never will be.
    pub registered: watch::Receiver<bool>,
    /// See [`STALE_CONFIRMATION`].
    pub stale_confirmation: Duration,
}

impl ApiSettings {
    /// With the usual patience.
    pub fn new(client: ApiClient, server: String, registered: watch::Receiver<bool>) -> Self {
        Self {
            client,
            server,
            registered,
            stale_confirmation: STALE_CONFIRMATION,
        }
    }
}

pub(super) struct ApiSource {
    settings: ApiSettings,
    selector: String,
    surroundings: Surroundings,
    /// Pods that the API server wants, once they were listed.
    pods: BTreeMap<PodUid, Arc<Pod>>,
    /// The pods of the store, until the first list.
    recorded: BTreeMap<PodUid, Arc<Pod>>,
    /// Pods that cannot be decoded: name and error.
    broken: BTreeMap<PodUid, (String, String)>,
    /// True if a list was applied in this run of the agent.
    listed: bool,
    highest: Highest,
    doubt: Option<Doubt>,
    retry: Retry,
    outage: Option<Outage>,
}

/// The newest version that was seen.
struct Highest {
    version: Option<u128>,
    recorded: Option<Instant>,
}

/// A list that was older than what had been seen.
struct Doubt {
    version: u128,
    since: Instant,
}

/// No task takes sets any more.
struct Closed;

/// End of a watch.
enum End {
    /// In order: the next one goes on where it was.
    Over,
    /// The server has too much to do.
    Busy,
    /// The missed changes are not known: list again.
    Lost(&'static str),
    /// No answer, or a bad one.
    Failed(String),
}

type Events = Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<Received>>> + Send>>;

impl ApiSource {
    pub(super) fn new(
        settings: ApiSettings,
        node_name: &str,
        surroundings: Surroundings,
        seeds: &[Seed],
    ) -> Self {
        let recorded = seeds
            .iter()
            .filter(|seed| seed.source == PodSource::Api)
            .map(|seed| (seed.pod.uid(), Arc::clone(&seed.pod)))
            .collect();
        let snapshot = surroundings.store.snapshot();
        let version = snapshot
            .stored(&OfServer::key())
            .filter(|record| record.is(&OfServer::new(&settings.server)))
            .and_then(|record| number(record.mark()));
        Self {
            selector: format!("spec.nodeName={node_name}"),
            settings,
            surroundings,
            pods: BTreeMap::new(),
            recorded,
            broken: BTreeMap::new(),
            listed: false,
            highest: Highest {
                version,
                recorded: None,
            },
            doubt: None,
            retry: Retry::default(),
            outage: None,
        }
    }

    /// Sends the full set after the first list and after each change, until cancelled or until there is no receiver.
    pub(super) async fn run(
        mut self,
        sets: mpsc::Sender<SourceSet>,
        reload: watch::Receiver<u64>,
        cancel: CancellationToken,
    ) {
        // Dropping a request or a watch half-way loses nothing after cancellation.
        tokio::select! {
            () = cancel.cancelled() => {}
            Err(Closed) = self.work(&sets, reload) => {}
        }
    }

    async fn work(
        &mut self,
        sets: &mpsc::Sender<SourceSet>,
        mut reload: watch::Receiver<u64>,
    ) -> Result<Infallible, Closed> {
        self.registered(sets).await?;
        loop {
            let list = match self.list().await {
                Ok(list) => list,
                Err(error) => {
                    self.failed(error, sets).await?;
                    self.pause().await;
                    continue;
                }
            };
            let mut version = list.metadata.resource_version.clone().unwrap_or_default();
            if let Some(why) = self.doubtful(&version) {
                send(sets, self.set(Reading::Unreadable(why))).await?;
                sleep(self.settings.stale_confirmation).await;
                continue;
            }
            self.take(list.items);
            self.outage = None;
            let set_back = number(&version).is_some_and(|version| self.went_back(version));
            let set = SourceSet {
                set_back,
                ..self.set(Reading::Complete)
            };
            send(sets, set).await?;
            self.seen(&version, true);
            if set_back {
                self.settings.client.connection().was_set_back();
            }
            self.follow(&mut version, sets, &mut reload).await?;
        }
    }

    /// Waits for the node to be registered.
    async fn registered(&mut self, sets: &mpsc::Sender<SourceSet>) -> Result<(), Closed> {
        let mut registered = self.settings.registered.clone();
        let waiting = async {
            if registered.wait_for(|registered| *registered).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::pin!(waiting);
        if timeout(TOLERATED, &mut waiting).await.is_err() {
            let why = match self.settings.client.connection().now() {
                Reachability::Down(error) => error,
                Reachability::Up | Reachability::Untried => {
                    "the node is not registered with the API server yet".to_owned()
                }
            };
            self.tell_outage(why, sets).await?;
            waiting.await;
        }
        Ok(())
    }

    /// All pods of this node, by a quorum read.
    async fn list(&self) -> Result<ObjectList<Received>, String> {
        let params = ListParams::default().fields(&self.selector);
        let request = Request::new("/api/v1/pods")
            .list(&params)
            .map_err(|e| e.to_string())?;
        let client = self.settings.client.kube();
        let list = match timeout(LIST_TIMEOUT, client.request(request)).await {
            Ok(answer) => answer.map_err(|error| describe(&error))?,
            Err(_) => return Err(format!("no list of pods within {LIST_TIMEOUT:?}")),
        };
        let list: ObjectList<Received> = list;
        if list
            .metadata
            .resource_version
            .as_deref()
            .unwrap_or_default()
            == ""
        {
            return Err("the list of pods has no metadata.resourceVersion".to_owned());
        }
        Ok(list)
    }

    /// Returns the reason for which a list must not be applied yet.
    fn doubtful(&mut self, version: &str) -> Option<String> {
        let (version, highest) = (number(version)?, self.highest.version?);
        if version >= highest {
            self.doubt = None;
            return None;
        }
        if let Some(doubt) = &self.doubt
            && version >= doubt.version
            && doubt.since.elapsed() >= self.settings.stale_confirmation
        {
            warn!(
                version,
                seen = highest,
                "the API server was restored to an older state, which a second list confirms: following it"
            );
            self.doubt = None;
            return None;
        }
        let why = format!(
            "the list of pods is older (resourceVersion {version}) than what was seen before ({highest}): \
             it is applied when a second one confirms it, {:?} later",
            self.settings.stale_confirmation
        );
        warn!(
            version,
            seen = highest,
            "ignoring an old list of pods from the API server until a second one confirms it"
        );
        self.doubt = Some(Doubt {
            version,
            since: Instant::now(),
        });
        Some(why)
    }

    /// Takes a whole list in.
    fn take(&mut self, items: Vec<Received>) {
        let mut known = std::mem::take(&mut self.recorded);
        known.append(&mut self.pods);
        self.broken.clear();
        self.listed = true;
        for received in items {
            let uid = received.uid.clone();
            let before = known.remove(&uid);
            if let Some(pod) = self.decoded(received, before) {
                self.pods.insert(uid, pod);
            }
        }
    }

    /// The pod as it is kept: with the node's own annotations, and the very one that is known if it says the
    /// same. One that cannot be decoded stays as it was.
    fn decoded(&mut self, received: Received, before: Option<Arc<Pod>>) -> Option<Arc<Pod>> {
        let mut pod = match received.pod {
            Ok(pod) => *pod,
            Err(error) => {
                let error = format!("{error}; correct the pod or delete it");
                let name = format!("pod {}", received.name);
                self.broken.insert(received.uid, (name, error));
                return before;
            }
        };
        self.broken.remove(&received.uid);
        let seen = before.as_ref().and_then(|b| b.annotation(CONFIG_SEEN));
        let seen = match seen {
            Some(seen) => seen.to_owned(),
            None => self.surroundings.clock.now().rfc3339(),
        };
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(CONFIG_SOURCE.to_owned(), PodSource::Api.as_str().to_owned());
        annotations.insert(CONFIG_SEEN.to_owned(), seen);
        annotations.remove(UNKNOWN_FIELDS);
        if !received.unknown.is_empty() {
            let fields = supported::shown_unknown(&received.unknown);
            if let Some(before) = &before {
                self.tell_unknown(before, &fields);
            }
            annotations.insert(UNKNOWN_FIELDS.to_owned(), fields);
        }
        let same = before.filter(|b| {
            same_desired_state(b, &pod)
                && b.status == pod.status
                && b.is_mirror() == pod.is_mirror()
        });
        Some(same.unwrap_or_else(|| Arc::new(pod)))
    }

    /// Warns once that a known pod has got fields which this version does not know. Admission refuses a new pod with
    /// such fields.
    fn tell_unknown(&self, before: &Pod, fields: &str) {
        if before.annotation(UNKNOWN_FIELDS) == Some(fields) {
            return;
        }
        warn!(pod = before.name(), fields, "a pod has unknown fields");
        let text = format!(
            "not known to this version, and without effect on the running pod: {fields}; a new pod with them is refused"
        );
        let event = Event::pod(EventType::Warning, before, UNSUPPORTED_FIELD, text);
        self.surroundings.recorder.record(event);
    }

    /// Watches from `version` on, until only a list can show the wanted pods.
    async fn follow(
        &mut self,
        version: &mut String,
        sets: &mpsc::Sender<SourceSet>,
        reload: &mut watch::Receiver<u64>,
    ) -> Result<(), Closed> {
        let mut silent = 0;
        loop {
            let before = version.clone();
            match self.watch(version, sets, reload).await? {
                End::Over if *version != before => silent = 0,
                End::Over if silent > 0 => {
                    debug!("the watch of pods was silent for long, listing them again");
                    return Ok(());
                }
                End::Over => {
                    silent += 1;
                    // A server that ends each watch at once is not to be asked all the time.
                    self.pause().await;
                }
                End::Busy => self.pause().await,
                End::Lost(why) => {
                    debug!(why, "listing pods again");
                    if self.retry.0 > 0 {
                        self.pause().await;
                    } else {
                        self.retry.0 = 1;
                    }
                    return Ok(());
                }
                End::Failed(error) => {
                    self.failed(error, sets).await?;
                    self.pause().await;
                    return Ok(());
                }
            }
        }
    }

    /// One watch. Sends a set for whatever came in one go.
    async fn watch(
        &mut self,
        version: &mut String,
        sets: &mpsc::Sender<SourceSet>,
        reload: &mut watch::Receiver<u64>,
    ) -> Result<End, Closed> {
        let mut events = match self.begin(version).await {
            Ok(events) => events,
            Err(end) => return Ok(end),
        };
        let connection = self.settings.client.connection().clone();
        let back = async {
            while !matches!(connection.now(), Reachability::Down(_)) {
                connection.changed().await;
            }
            connection.up().await;
        };
        tokio::pin!(back);
        loop {
            // All are cancel-safe: an event is taken from the stream or is not.
            let first = tokio::select! {
                event = events.next() => event,
                () = sleep(IDLE) => return Ok(End::Over),
                () = &mut back => return Ok(End::Lost("the API server was away")),
                () = reloaded(reload) => return Ok(End::Lost("reload")),
            };
            let mut changed = false;
            let mut end = self.heard(first, version, &mut changed);
            let burst = Instant::now() + BURST;
            while end.is_none() {
                let quiet = (Instant::now() + QUIET).min(burst);
                match timeout_at(quiet, events.next()).await {
                    Ok(event) => end = self.heard(event, version, &mut changed),
                    Err(_) => break,
                }
            }
            if changed {
                send(sets, self.set(Reading::Complete)).await?;
            }
            self.seen(version, false);
            if let Some(end) = end {
                return Ok(end);
            }
        }
    }

    async fn begin(&self, version: &str) -> Result<Events, End> {
        let params = WatchParams::default()
            .fields(&self.selector)
            .timeout(rand::random_range(WATCH_SECONDS));
        let request = Request::new("/api/v1/pods")
            .watch(&params, version)
            .map_err(|e| End::Failed(e.to_string()))?;
        let client = self.settings.client.kube();
        match timeout(WATCH_START_TIMEOUT, client.request_events(request)).await {
            Ok(Ok(events)) => Ok(Box::pin(events)),
            Ok(Err(kube::Error::Api(status))) if status.code == 410 => {
                Err(End::Lost("the version is too old"))
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 429 => Err(End::Busy),
            Ok(Err(error)) => Err(End::Failed(describe(&error))),
            Err(_) => Err(End::Failed(format!(
                "no watch of pods within {WATCH_START_TIMEOUT:?}"
            ))),
        }
    }

    /// Takes one event in; says if it is the last one.
    fn heard(
        &mut self,
        event: Option<kube::Result<WatchEvent<Received>>>,
        version: &mut String,
        changed: &mut bool,
    ) -> Option<End> {
        let event = match event {
            None => return Some(End::Over),
            Some(Err(error)) => {
                debug!(error = describe(&error), "the watch of pods broke");
                return Some(End::Lost("the watch broke off"));
            }
            Some(Ok(event)) => event,
        };
        let (newer, here) = match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                let newer = pod.version.clone();
                (newer, self.put(pod))
            }
            WatchEvent::Deleted(pod) => {
                let broken = self.broken.remove(&pod.uid).is_some();
                (pod.version, self.pods.remove(&pod.uid).is_some() || broken)
            }
            WatchEvent::Bookmark(bookmark) => (bookmark.metadata.resource_version, false),
            WatchEvent::Error(status) if status.code == 410 => {
                return Some(End::Lost("the version is too old"));
            }
            WatchEvent::Error(status) => {
                return Some(End::Failed(describe(&kube::Error::Api(status))));
            }
        };
        *changed |= here;
        if number(&newer) < number(version) {
            return Some(End::Lost("the watch went back in time"));
        }
        if !newer.is_empty() {
            *version = newer;
        }
        self.retry = Retry::default();
        None
    }

    fn put(&mut self, received: Received) -> bool {
        let uid = received.uid.clone();
        let before = self.pods.get(&uid).cloned();
        let broken = self.broken.get(&uid).cloned();
        let now = self.decoded(received, before.clone());
        let same = match (&before, &now) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            (None, None) => true,
            _ => false,
        };
        let same = same && self.broken.get(&uid) == broken.as_ref();
        if let Some(now) = now {
            self.pods.insert(uid, now);
        }
        !same
    }

    fn set(&self, reading: Reading) -> SourceSet {
        let complete = reading == Reading::Complete;
        let broken = self.broken.values().filter(|_| complete).cloned().collect();
        let pods = self.pods.values().filter(|_| complete);
        SourceSet {
            source: PodSource::Api,
            location: self.settings.server.clone(),
            reading,
            broken,
            pods: pods
                .map(|pod| SourcedPod {
                    origin: String::new(),
                    pod: Arc::clone(pod),
                })
                .collect(),
            set_back: false,
        }
    }

    /// Returns whether a list of that version is older than an earlier one.
    fn went_back(&self, version: u128) -> bool {
        let highest = self.highest.version;
        highest.is_some_and(|highest| version < highest)
    }

    /// Remembers the newest version, on disk too. After a list it is the newest one even if it is lower.
    fn seen(&mut self, version: &str, listed: bool) {
        let Some(version) = number(version) else {
            return;
        };
        let went_back = listed && self.went_back(version);
        if self.highest.version.is_none_or(|highest| highest < version) || went_back {
            self.highest.version = Some(version);
        } else if self.highest.recorded.is_some() {
            return;
        }
        let due = self
            .highest
            .recorded
            .is_none_or(|at| at.elapsed() >= RECORD_PERIOD);
        if !due && !listed {
            return;
        }
        self.highest.recorded = Some(Instant::now());
        let (server, now) = (
            OfServer::new(&self.settings.server),
            self.surroundings.clock.now(),
        );
        let version = version.to_string();
        let transaction = Transaction::new().put_marked(&OfServer::key(), version, &server, now);
        // Without it a list is believed more easily: worth a try, not a retry. The store tells of itself.
        drop(self.surroundings.store.submit(transaction));
    }
}

async fn send(sets: &mpsc::Sender<SourceSet>, set: SourceSet) -> Result<(), Closed> {
    sets.send(set).await.map_err(|_| Closed)
}

/// Waits for a request to reload.
async fn reloaded(reload: &mut watch::Receiver<u64>) {
    if reload.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

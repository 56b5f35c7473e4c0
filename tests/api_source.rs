//! The source of the API server, over a hand-written API server, the mux and a store in memory.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "test code fails by panicking"
)]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode};
use holdfast::apiserver::{ApiClient, Connection};
use holdfast::config::{ApiSettings, PodConfig, Seed, SourceSettings, Surroundings, VERSION_KEY};
use holdfast::core::state::{
    FactRecord, PodRecord, SourceRecord, TerminationCause, Transaction, WorkerPhase, WorkerRecord,
};
use holdfast::store::Store;
use holdfast::types::events::MemoryRecorder;
use holdfast::types::pod::{CONFIG_SEEN, CONFIG_SOURCE, UNKNOWN_FIELDS};
use holdfast::types::{BootId, Json, PodExt, PodOp, PodSource, PodUpdate, Stamp, SystemClock};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

/// Of paused time.
const PATIENCE: Duration = Duration::from_secs(600);

type Line = Result<Bytes, std::io::Error>;

#[derive(Default)]
struct Server {
    pods: BTreeMap<String, Value>,
    version: u64,
    /// What was asked for, in order.
    requests: Vec<String>,
    watchers: Vec<mpsc::UnboundedSender<Line>>,
    /// No answer at all.
    down: bool,
    /// Lists are answered with this state instead.
    old: Option<(u64, BTreeMap<String, Value>)>,
}

#[derive(Clone, Default)]
struct Api(Arc<Mutex<Server>>);

impl Api {
    fn lock(&self) -> MutexGuard<'_, Server> {
        self.0.lock().unwrap()
    }

    fn client(&self, connection: &Connection) -> ApiClient {
        let (api, told) = (self.clone(), connection.clone());
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let answer = api.answer(&request.uri().to_string());
            match &answer {
                Ok(_) => told.answered(),
                Err(error) => told.failed(&error.to_string()),
            }
            async move { answer }
        });
        ApiClient::new(kube::Client::new(service, "default"), connection.clone())
    }

    fn answer(&self, uri: &str) -> Result<Response<Body>, std::io::Error> {
        let mut server = self.lock();
        server.requests.push(uri.to_owned());
        if server.down {
            return Err(std::io::Error::other("connection refused"));
        }
        assert!(uri.starts_with("/api/v1/pods?"), "{uri}");
        assert!(uri.contains("fieldSelector=spec.nodeName%3Dn1"), "{uri}");
        if uri.contains("watch=true") {
            let (sender, receiver) = mpsc::unbounded_channel();
            server.watchers.push(sender);
            let body = Body::from_stream(UnboundedReceiverStream::new(receiver));
            return Ok(Response::new(body));
        }
        let (version, pods) = server
            .old
            .clone()
            .unwrap_or_else(|| (server.version, server.pods.clone()));
        let list = json!({
            "kind": "PodList", "apiVersion": "v1",
            "metadata": {"resourceVersion": version.to_string()},
            "items": pods.values().cloned().collect::<Vec<_>>(),
        });
        Ok(Response::new(Body::from(list.to_string())))
    }

    /// Tells all watches.
    fn event(&self, kind: &str, object: &Value) {
        let line = json!({"type": kind, "object": object}).to_string() + "\n";
        let line = Bytes::from(line);
        let watchers = &mut self.lock().watchers;
        watchers.retain(|w| w.send(Ok(line.clone())).is_ok());
    }

    /// Changes the state without telling anybody.
    fn store(&self, mut pod: Value) -> (Value, bool) {
        let mut server = self.lock();
        server.version += 1;
        pod["metadata"]["resourceVersion"] = json!(server.version.to_string());
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let new = server.pods.insert(uid, pod.clone()).is_none();
        (pod, new)
    }

    fn put(&self, pod: Value) {
        let (pod, new) = self.store(pod);
        self.event(if new { "ADDED" } else { "MODIFIED" }, &pod);
    }

    fn forget(&self, uid: &str) -> Value {
        let mut server = self.lock();
        server.version += 1;
        server.pods.remove(uid).unwrap()
    }

    fn delete(&self, uid: &str) {
        let mut pod = self.forget(uid);
        pod["metadata"]["resourceVersion"] = json!(self.lock().version.to_string());
        self.event("DELETED", &pod);
    }

    fn go_away(&self) {
        let mut server = self.lock();
        server.down = true;
        for watcher in server.watchers.drain(..) {
            drop(watcher.send(Err(std::io::Error::other("connection reset"))));
        }
    }

    fn lists(&self) -> usize {
        let server = self.lock();
        server
            .requests
            .iter()
            .filter(|r| !r.contains("watch=true"))
            .count()
    }

    async fn watched(&self) {
        self.until(|server| !server.watchers.is_empty()).await;
    }

    async fn until(&self, reached: impl Fn(&Server) -> bool) {
        timeout(PATIENCE, async {
            while !reached(&self.lock()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("not reached in time");
    }
}

fn pod(name: &str, uid: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": uid,
                     "managedFields": [{"manager": "kubectl", "operation": "Update"}]},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]},
        "status": {"phase": "Pending"},
    })
}

struct Agent {
    config: PodConfig,
    updates: mpsc::Receiver<PodUpdate>,
    store: Store,
    connection: Connection,
    registered: watch::Sender<bool>,
    recorder: MemoryRecorder,
    cancel: CancellationToken,
    seeds: Vec<Seed>,
}

impl Agent {
    fn start(api: &Api) -> Self {
        let store = Store::in_memory(Arc::new(SystemClock::new(BootId(1))));
        let agent = Self::resume(api, Vec::new(), store);
        agent.registered.send_replace(true);
        agent
    }

    fn resume(api: &Api, seeds: Vec<Seed>, store: Store) -> Self {
        let (connection, recorder) = (Connection::default(), MemoryRecorder::default());
        let cancel = CancellationToken::new();
        let registered = watch::Sender::new(false);
        let settings = SourceSettings {
            running: Vec::new(),
            node_name: "n1".to_owned(),
            file: None,
            http: None,
            api: Some(ApiSettings::new(
                api.client(&connection),
                "https://api".to_owned(),
                registered.subscribe(),
            )),
        };
        let surroundings = Surroundings {
            store: store.clone(),
            recorder: Arc::new(recorder.clone()),
            clock: Arc::new(SystemClock::new(BootId(1))),
        };
        let (config, updates) =
            PodConfig::start(settings, seeds.clone(), &surroundings, &cancel).unwrap();
        Self {
            config,
            updates,
            store,
            connection,
            registered,
            recorder,
            cancel,
            seeds,
        }
    }

    /// Ends this agent and starts one that knows what this one knew.
    async fn restart(self, api: &Api) -> Self {
        self.cancel.cancel();
        timeout(PATIENCE, self.config.join())
            .await
            .unwrap()
            .unwrap();
        api.lock().watchers.clear();
        let agent = Self::resume(api, self.seeds, self.store);
        agent.registered.send_replace(true);
        agent
    }

    async fn next_update(&mut self) -> PodUpdate {
        let update = timeout(PATIENCE, self.updates.recv())
            .await
            .expect("no update in time")
            .expect("updates ended");
        assert_eq!(update.source, PodSource::Api);
        for pod in &update.pods {
            self.seeds.retain(|s| s.pod.uid() != pod.uid());
            if update.op != PodOp::Remove {
                self.seeds.push(Seed {
                    source: update.source,
                    origin: self.config.origins().get(&pod.uid()).expect("origin"),
                    pod: Arc::clone(pod),
                });
            }
        }
        self.config.ready().mark_handled(update.source);
        update
    }

    async fn next(&mut self) -> (PodOp, Vec<String>) {
        let update = self.next_update().await;
        (
            update.op,
            update.pods.iter().map(|p| p.uid().to_string()).collect(),
        )
    }

    /// Nothing comes for so long.
    async fn silence(&mut self, long: Duration) {
        let update = timeout(long, self.updates.recv()).await;
        assert!(update.is_err(), "{update:?}");
    }

    /// Waits until the mux has recorded what there is to record.
    async fn written(&self) {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }

    fn source(&self) -> SourceRecord {
        self.store
            .snapshot()
            .record::<SourceRecord>("api")
            .cloned()
            .unwrap()
    }
}

fn uids(uids: &[&str]) -> Vec<String> {
    uids.iter().map(ToString::to_string).collect()
}

#[tokio::test(start_paused = true)]
async fn nothing_is_asked_before_the_node_is_registered() -> Result<(), Infallible> {
    let api = Api::default();
    let store = Store::in_memory(Arc::new(SystemClock::new(BootId(1))));
    let mut agent = Agent::resume(&api, Vec::new(), store);
    agent.silence(Duration::from_secs(300)).await;
    assert!(api.lock().requests.is_empty());
    assert!(agent.source().error.contains("not registered"));
    assert!(!agent.config.ready().all_ready());
    agent.registered.send_replace(true);
    assert_eq!(agent.next().await, (PodOp::Add, uids(&[])));
    assert!(agent.config.ready().complete());
    assert_eq!(agent.source().location, "https://api");
    Ok(())
}

// Invariant API-2.
#[tokio::test(start_paused = true)]
async fn every_list_is_a_quorum_read_in_one_piece() {
    let api = Api::default();
    api.store(pod("a", "1"));
    let mut agent = Agent::start(&api);
    let first = agent.next_update().await;
    assert_eq!(first.op, PodOp::Add);
    let added = &first.pods[0];
    assert_eq!(added.annotation(CONFIG_SOURCE), Some("api"));
    assert!(added.annotation(CONFIG_SEEN).is_some());
    assert!(added.metadata.managed_fields.is_none());
    api.watched().await;
    api.event(
        "ERROR",
        &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"}),
    );
    api.until(|s| s.requests.len() >= 4).await;
    let requests = api.lock().requests.clone();
    for list in requests.iter().filter(|r| !r.contains("watch=true")) {
        assert!(
            !list.contains("resourceVersion") && !list.contains("limit"),
            "{list}"
        );
    }
    let watch = requests.iter().find(|r| r.contains("watch=true")).unwrap();
    assert!(
        watch.contains("allowWatchBookmarks=true") && watch.contains("resourceVersion=1"),
        "{watch}"
    );
    assert!(!watch.contains("sendInitialEvents"), "{watch}");
    assert_eq!(api.lists(), 2, "410 is answered by a list");
}

#[tokio::test(start_paused = true)]
async fn a_watch_brings_additions_updates_reconciles_deletions_and_removals() {
    let api = Api::default();
    let mut agent = Agent::start(&api);
    assert_eq!(agent.next().await, (PodOp::Add, uids(&[])));
    api.watched().await;
    api.put(pod("a", "1"));
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["1"])));
    let mut changed = pod("a", "1");
    changed["status"]["phase"] = json!("Running");
    api.put(changed.clone());
    assert_eq!(agent.next().await, (PodOp::Reconcile, uids(&["1"])));
    changed["metadata"]["labels"] = json!({"k": "v"});
    api.put(changed.clone());
    assert_eq!(agent.next().await, (PodOp::Update, uids(&["1"])));
    changed["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    changed["metadata"]["deletionGracePeriodSeconds"] = json!(5);
    api.put(changed.clone());
    assert_eq!(agent.next().await, (PodOp::Delete, uids(&["1"])));
    changed["metadata"]["managedFields"] = json!([]);
    api.put(changed);
    agent.silence(Duration::from_secs(1)).await;
    api.delete("1");
    assert_eq!(agent.next().await, (PodOp::Remove, uids(&["1"])));
    assert_eq!(api.lists(), 1);
}

#[tokio::test(start_paused = true)]
async fn events_that_come_in_one_go_make_one_set() {
    let api = Api::default();
    let mut agent = Agent::start(&api);
    agent.next().await;
    api.watched().await;
    for n in 0..20 {
        api.put(pod(&format!("p{n}"), &format!("{n:02}")));
    }
    let (op, added) = agent.next().await;
    assert_eq!((op, added.len()), (PodOp::Add, 20));
}

// Invariant API-1.
#[tokio::test(start_paused = true)]
async fn an_outage_empties_nothing_and_what_happened_meanwhile_is_found() {
    let api = Api::default();
    for (name, uid) in [("a", "1"), ("b", "2"), ("c", "3")] {
        api.store(pod(name, uid));
    }
    let mut agent = Agent::start(&api);
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["1", "2", "3"])));
    api.watched().await;
    api.go_away();
    agent.silence(Duration::from_secs(3600)).await;
    assert!(!agent.config.ready().complete() && agent.config.ready().all_ready());
    assert!(agent.source().error.contains("connection refused"));
    let told = agent.recorder.events().len();
    assert_eq!(told, 1, "an outage is told once");
    let asked = api.lock().requests.len();
    assert!(asked < 300, "{asked} attempts in an hour");

    api.forget("1");
    api.forget("2");
    api.store(pod("b", "2b"));
    api.lock().down = false;
    agent.connection.answered();
    assert_eq!(agent.next().await, (PodOp::Remove, uids(&["1", "2"])));
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["2b"])));
    assert!(agent.config.ready().complete());
    agent.silence(Duration::from_secs(60)).await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_in_an_outage_keeps_the_recorded_pods_and_kills_no_orphans() {
    let api = Api::default();
    api.store(pod("a", "1"));
    let mut agent = Agent::start(&api);
    agent.next().await;
    api.go_away();
    let mut agent = agent.restart(&api).await;
    // What it said before is known.
    assert_eq!(agent.next().await, (PodOp::Add, uids(&[])));
    agent.silence(Duration::from_secs(600)).await;
    let ready = agent.config.ready();
    assert!(!ready.complete() && !ready.source_complete(PodSource::Api));
    assert!(ready.static_ready());

    // Deleted while both were away; another one is being deleted.
    api.forget("1");
    api.lock().down = false;
    agent.connection.answered();
    assert_eq!(agent.next().await, (PodOp::Remove, uids(&["1"])));
    assert!(agent.config.ready().complete());
}

// Invariant START-1.
#[tokio::test(start_paused = true)]
async fn a_restart_makes_no_known_pod_an_addition() {
    let api = Api::default();
    api.store(pod("a", "1"));
    api.store(pod("b", "2"));
    let mut agent = Agent::start(&api);
    agent.next().await;
    let mut reported = pod("b", "2");
    reported["status"]["phase"] = json!("Running");
    let seen = agent.seeds[0]
        .pod
        .annotation(CONFIG_SEEN)
        .unwrap()
        .to_owned();
    let (first, lists) = (Arc::clone(&agent.seeds[0].pod), api.lists());
    let mut agent = {
        api.store(reported);
        agent.restart(&api).await
    };
    assert_eq!(
        agent.next().await,
        (PodOp::Add, uids(&[])),
        "marks the source ready"
    );
    assert_eq!(agent.next().await, (PodOp::Reconcile, uids(&["2"])));
    assert_eq!(agent.seeds[0].pod.annotation(CONFIG_SEEN), Some(&*seen));
    assert!(
        Arc::strong_count(&first) > 2,
        "what is known already is shared"
    );
    assert_eq!(api.lists(), lists + 1);
}

// Invariant API-2.
#[tokio::test(start_paused = true)]
async fn a_stale_list_neither_kills_nor_resurrects() {
    let api = Api::default();
    api.store(pod("gone", "0"));
    let backup = {
        let server = api.lock();
        (server.version, server.pods.clone())
    };
    api.forget("0");
    api.store(pod("a", "1"));
    let mut agent = Agent::start(&api);
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["1"])));
    // One answer comes from a server that was left behind; also after a restart.
    api.lock().old = Some(backup.clone());
    let mut agent = agent.restart(&api).await;
    assert_eq!(agent.next().await, (PodOp::Add, uids(&[])));
    agent.silence(Duration::from_secs(20)).await;
    assert!(!agent.config.ready().complete());
    assert!(
        agent.source().error.contains("older"),
        "{}",
        agent.source().error
    );
    api.lock().old = None;
    api.watched().await;
    assert!(agent.config.ready().complete());
    agent.silence(Duration::from_secs(60)).await;

    // The whole cluster is set back: believed once it says so twice.
    api.lock().old = Some(backup);
    agent.config.reload();
    agent.silence(Duration::from_secs(25)).await;
    assert_eq!(agent.next().await, (PodOp::Remove, uids(&["1"])));
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["0"])));
    let snapshot = agent.store.snapshot();
    let record = snapshot.record::<FactRecord>(VERSION_KEY).unwrap();
    assert_eq!(record.mark, "1");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_be_decoded_stays_as_it_was_and_holds_up_no_other() {
    let api = Api::default();
    api.store(pod("a", "1"));
    let mut agent = Agent::start(&api);
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["1"])));
    api.watched().await;
    let mut bad = pod("a", "1");
    bad["spec"]["containers"] = json!("none");
    api.put(bad);
    api.put(pod("b", "2"));
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["2"])));
    agent.silence(Duration::from_millis(10)).await;
    let source = agent.source();
    assert!(
        source.broken["pod default/a"].contains("containers"),
        "{source:?}"
    );
    assert!(!agent.config.ready().complete());
    let events = agent.recorder.events();
    assert!(
        events
            .iter()
            .any(|e| e.reason == "FailedValidation" && e.message.contains("default/a"))
    );

    let mut mended = pod("a", "1");
    mended["metadata"]["labels"] = json!({"k": "v"});
    api.put(mended);
    assert_eq!(agent.next().await, (PodOp::Update, uids(&["1"])));
    assert!(agent.config.ready().complete());
}

#[tokio::test(start_paused = true)]
async fn a_field_that_this_version_does_not_know_is_kept_with_the_pod_and_told_of_once() {
    let api = Api::default();
    let mut newer = pod("a", "1");
    newer["spec"]["newer"] = json!({"mode": "on"});
    api.store(newer);
    let mut spoofed = pod("b", "2");
    spoofed["metadata"]["annotations"] = json!({UNKNOWN_FIELDS: "spec.none"});
    api.store(spoofed);
    let mut agent = Agent::start(&api);
    let update = agent.updates.recv().await.unwrap();
    let kept = |pod: &Pod| pod.annotation(UNKNOWN_FIELDS).map(str::to_owned);
    let of = |name: &str| -> &Pod { update.pods.iter().find(|p| p.name() == name).unwrap() };
    assert_eq!(kept(of("a")).as_deref(), Some("spec.newer"));
    assert_eq!(kept(of("b")), None);
    api.watched().await;
    // The API server is upgraded, and shows a pod that is here with a field of its own.
    let mut b = pod("b", "2");
    b["spec"]["containers"][0]["newer"] = json!(1);
    api.put(b);
    assert_eq!(agent.next().await, (PodOp::Update, uids(&["2"])));
    let events = agent.recorder.events();
    let told: Vec<_> = events
        .iter()
        .filter(|e| e.reason == "UnsupportedField")
        .collect();
    assert_eq!(told.len(), 1, "{events:?}");
    assert!(
        told[0].message.contains("spec.containers[0].newer"),
        "{told:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_refused_list_is_told_and_tried_again_at_growing_intervals() {
    let connection = Connection::default();
    let asked = Arc::new(Mutex::new(0));
    let count = Arc::clone(&asked);
    let service = tower::service_fn(move |_: Request<kube::client::Body>| {
        *count.lock().unwrap() += 1;
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
            "code": 403, "reason": "Forbidden", "message": "pods is forbidden"});
        let mut response = Response::new(Body::from(status.to_string()));
        *response.status_mut() = StatusCode::FORBIDDEN;
        async move { Ok::<_, Infallible>(response) }
    });
    let client = ApiClient::new(kube::Client::new(service, "default"), connection);
    let store = Store::in_memory(Arc::new(SystemClock::new(BootId(1))));
    let surroundings = Surroundings {
        store: store.clone(),
        recorder: Arc::new(MemoryRecorder::default()),
        clock: Arc::new(SystemClock::new(BootId(1))),
    };
    let registered = watch::Sender::new(true);
    let settings = SourceSettings {
        running: Vec::new(),
        node_name: "n1".to_owned(),
        file: None,
        http: None,
        api: Some(ApiSettings::new(
            client,
            "https://api".to_owned(),
            registered.subscribe(),
        )),
    };
    let cancel = CancellationToken::new();
    let (config, _updates) =
        PodConfig::start(settings, Vec::new(), &surroundings, &cancel).unwrap();
    tokio::time::sleep(Duration::from_secs(300)).await;
    let asked = *asked.lock().unwrap();
    assert!((8..40).contains(&asked), "{asked}");
    assert!(!config.ready().all_ready());
    let snapshot = store.snapshot();
    let error = &snapshot.record::<SourceRecord>("api").unwrap().error;
    assert_eq!(
        error,
        "the API server answers 403 Forbidden: pods is forbidden"
    );
}

#[tokio::test(start_paused = true)]
async fn an_idle_minute_asks_for_nothing_and_a_watch_goes_on_from_its_bookmark() {
    let api = Api::default();
    let mut agent = Agent::start(&api);
    agent.next().await;
    api.watched().await;
    let before = api.lock().requests.len();
    agent.silence(Duration::from_secs(60)).await;
    assert_eq!(api.lock().requests.len(), before);
    api.event(
        "BOOKMARK",
        &json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": "77"}}),
    );
    agent.silence(Duration::from_secs(1)).await;
    // The server ends the watch in its time.
    api.lock().watchers.clear();
    api.until(|s| {
        s.requests
            .last()
            .is_some_and(|r| r.contains("resourceVersion=77"))
    })
    .await;
    assert_eq!(api.lists(), 1);
}

// Invariant API-12.
/// By that record, a later start lets pods go that wait for the API server.
#[tokio::test(start_paused = true)]
async fn the_first_word_in_a_boot_is_on_record_after_what_it_takes_away() {
    let api = Api::default();
    for uid in ["gone", "kept"] {
        api.put(pod(uid, uid));
    }
    let mut agent = Agent::start(&api);
    assert_eq!(agent.next().await, (PodOp::Add, uids(&["gone", "kept"])));
    agent.written().await;
    // As the sync loop and the workers leave them, in an earlier boot.
    let earlier = Stamp {
        boot: BootId(9),
        boottime_ms: 1,
        wall_ms: 1,
    };
    let worker = |phase| WorkerRecord {
        full_name: "gone_default".to_owned(),
        queued: earlier,
        started: Some(earlier),
        phase,
        deleted: false,
        restart_requested: false,
        runtime_only: false,
    };
    let mut before = Transaction::new().put(
        "api",
        SourceRecord {
            read: earlier,
            ..agent.source()
        },
    );
    for seed in &agent.seeds {
        let record = PodRecord {
            source: seed.source,
            origin: String::new(),
            pod: Json(Arc::clone(&seed.pod)),
            first_seen: earlier,
            confirmed_epoch: 1,
        };
        let uid = seed.pod.uid();
        before = before
            .put(uid.as_str(), record)
            .put(uid.as_str(), worker(WorkerPhase::Sync));
    }
    agent.store.commit(before).await.unwrap();

    api.forget("gone");
    let mut agent = agent.restart(&api).await;
    assert_eq!(agent.next().await, (PodOp::Remove, uids(&["gone"])));
    agent.written().await;
    assert_eq!(agent.source().read, earlier);
    // The worker has it on record that the pod is being stopped.
    let stopping = worker(WorkerPhase::Terminated {
        since: earlier,
        cause: TerminationCause::Deleted,
    });
    let transaction = Transaction::new().put("gone", stopping);
    agent.store.commit(transaction).await.unwrap();
    agent.written().await;
    assert_eq!(agent.source().read.boot, BootId(1));
}

//! Mirror pods from their making to their end, against a model of the API server.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::*;
use crate::apiserver::testkit::FakeApi;
use crate::status::Observed;
use crate::store::Store;
use crate::types::pod::CONFIG_SOURCE;
use crate::types::{BootId, Clock, Stamp};

struct StillClock;

impl Clock for StillClock {
    fn now(&self) -> Stamp {
        stamp()
    }
}

fn stamp() -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: 0,
        wall_ms: 0,
    }
}

struct Rig {
    api: FakeApi,
    store: Store,
    status: StatusManager,
    pods: PodManager,
    all: Arc<AtomicBool>,
}

impl Rig {
    /// An agent whose mirror pods are kept.
    fn new() -> Self {
        let rig = Self::idle();
        rig.start(node());
        rig
    }

    fn idle() -> Self {
        let store = Store::in_memory(Arc::new(StillClock));
        Self {
            api: FakeApi::new(),
            status: StatusManager::new(store.clone(), Arc::new(StillClock)),
            store,
            pods: PodManager::default(),
            all: Arc::new(AtomicBool::new(true)),
        }
    }

    fn start(&self, node: NodeObject) {
        let all = Arc::clone(&self.all);
        let mirrors = self.status.mirrors(
            self.api.client.clone(),
            self.pods.clone(),
            node,
            move || Spoken {
                api: true,
                all: all.load(Ordering::SeqCst),
            },
        );
        tokio::spawn(mirrors.run(CancellationToken::new()));
    }

    fn want(&self, hash: &str) -> Arc<Pod> {
        let pod = Arc::new(static_pod(hash));
        self.pods.update(Arc::clone(&pod));
        self.status.wake_mirrors();
        pod
    }

    /// Shows the mirror pod as the source would show it now, and returns it.
    fn show(&self) -> Arc<Pod> {
        let mirror = self.api.pod("web-n1").unwrap();
        self.pods.update(Arc::clone(&mirror));
        self.status.observed(Observed::Current(Arc::clone(&mirror)));
        mirror
    }

    fn gone(&self, mirror: Arc<Pod>) {
        self.pods.remove(&mirror);
        self.status.observed(Observed::Gone(mirror));
    }

    fn log(&self) -> Vec<String> {
        self.api.with(|model| {
            let short = |line: &String| line.split(' ').next().unwrap_or_default().to_owned();
            model.log.drain(..).map(|line| short(&line)).collect()
        })
    }

    fn record(&self) -> Option<MirrorRecord> {
        let state = self.store.snapshot();
        state.record::<MirrorRecord>("web-n1_default").cloned()
    }
}

fn node() -> NodeObject {
    let node = NodeObject::default();
    node.set(Arc::new(
        serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "node-uid"}})).unwrap(),
    ));
    node
}

fn static_pod(hash: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {
            "name": "web-n1", "namespace": "default", "uid": hash, "labels": {"app": "web"},
            "annotations": {CONFIG_SOURCE: "file", CONFIG_HASH: hash},
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "i"}]},
    }))
    .unwrap()
}

async fn pass(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

#[test]
fn a_mirror_pod_leaves_its_priority_to_the_api_server() {
    let mut pod = static_pod("h1");
    let spec = pod.spec.as_mut().unwrap();
    spec.priority = Some(1000);
    spec.preemption_policy = Some("Never".to_owned());
    spec.priority_class_name = Some("system-node-critical".to_owned());
    let mirror = mirror_of(&pod, &node().get().unwrap()).unwrap();
    let shown = mirror.spec_ref();
    assert_eq!(
        (shown.priority, shown.preemption_policy.as_deref()),
        (None, None)
    );
    let class = shown.priority_class_name.as_deref();
    assert_eq!(class, Some("system-node-critical"));
    assert_eq!(pod.spec_ref().priority, Some(1000));
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_gets_one_mirror_pod_that_the_node_owns() {
    let rig = Rig::new();
    rig.want("h1");
    pass(100).await;
    assert_eq!(rig.log(), ["POST"]);
    let mirror = rig.show();
    assert_eq!(mirror.annotation(CONFIG_MIRROR), Some("h1"));
    assert_eq!(mirror.annotation(CONFIG_SOURCE), Some("file"));
    assert_eq!(mirror.labels()["app"], "web");
    assert_eq!(mirror.spec_ref().node_name.as_deref(), Some("n1"));
    let owner = &mirror.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.uid.as_str(), owner.controller),
        ("Node", "node-uid", Some(true))
    );
    assert_eq!(rig.record().unwrap().uid, mirror.uid());
    pass(600_000).await;
    assert_eq!(rig.log(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_changed_manifest_replaces_the_mirror_pod() {
    let rig = Rig::new();
    rig.want("h1");
    pass(100).await;
    rig.show();
    rig.log();
    rig.pods.remove(&static_pod("h1"));
    rig.want("h2");
    pass(100).await;
    assert_eq!(rig.log(), ["DELETE", "POST"]);
    let body = rig.api.with(|model| model.bodies[1].clone());
    assert_eq!(body["gracePeriodSeconds"], 0);
    assert!(body["preconditions"]["uid"].is_string());
    assert_eq!(
        rig.api.pod("web-n1").unwrap().annotation(CONFIG_MIRROR),
        Some("h2")
    );
}

#[tokio::test(start_paused = true)]
async fn a_changed_manifest_with_a_uid_of_its_own_replaces_the_mirror_pod() {
    let rig = Rig::new();
    rig.want("9d2c-fixed");
    pass(100).await;
    rig.show();
    rig.log();
    let mut changed = static_pod("9d2c-fixed");
    changed.spec.as_mut().unwrap().containers[0].image = Some("j".to_owned());
    rig.pods.update(Arc::new(changed));
    rig.status.wake_mirrors();
    pass(100).await;
    assert_eq!(rig.log(), ["DELETE", "POST"]);
    let mirror = rig.show();
    assert_eq!(mirror.containers()[0].image.as_deref(), Some("j"));
    pass(100).await;
    assert!(rig.log().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_mirror_pod_that_a_user_deletes_comes_back() {
    let rig = Rig::new();
    rig.want("h1");
    pass(100).await;
    let mirror = rig.show();
    rig.log();
    rig.api.with(|model| model.objects.clear());
    rig.gone(mirror);
    pass(100).await;
    assert_eq!(rig.log(), ["POST"]);

    // With a grace period it is shown with a deletionTimestamp first.
    let mut deleted = (*rig.show()).clone();
    deleted.metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    rig.api.put(&deleted);
    rig.show();
    pass(100).await;
    assert_eq!(rig.log(), ["DELETE", "POST"]);
}

#[tokio::test(start_paused = true)]
async fn an_orphan_is_deleted_once_its_static_pod_is_stopped() {
    let rig = Rig::new();
    let pod = rig.want("h1");
    pass(100).await;
    rig.show();
    rig.log();
    let worker = WorkerRecord {
        full_name: "web-n1_default".into(),
        queued: stamp(),
        started: None,
        phase: WorkerPhase::Terminated {
            since: stamp(),
            cause: crate::core::state::TerminationCause::Deleted,
        },
        deleted: true,
        restart_requested: false,
        runtime_only: false,
    };
    let transaction = Transaction::new().put("h1", worker);
    rig.store.commit(transaction).await.unwrap();
    rig.pods.remove(&pod);
    rig.status.wake_mirrors();
    pass(30_000).await;
    assert_eq!(rig.log(), Vec::<String>::new());
    let transaction = Transaction::new().delete::<WorkerRecord>("h1");
    rig.store.commit(transaction).await.unwrap();
    pass(2_000).await;
    assert_eq!(rig.log(), ["DELETE"]);
    assert_eq!(rig.record(), None);
}

#[tokio::test(start_paused = true)]
async fn the_mirror_pod_of_a_changed_manifest_comes_when_the_former_pod_is_over() {
    let rig = Rig::new();
    rig.want("h1");
    pass(100).await;
    let mirror = rig.show();
    rig.log();
    let worker = |uid: &str, phase| {
        let record = WorkerRecord {
            full_name: "web-n1_default".into(),
            queued: stamp(),
            started: Some(stamp()),
            phase,
            deleted: true,
            restart_requested: false,
            runtime_only: false,
        };
        Transaction::new().put(uid, record)
    };
    let cause = crate::core::state::TerminationCause::Deleted;
    let terminating = WorkerPhase::Terminating {
        since: stamp(),
        grace_seconds: 30,
        deadline: stamp(),
        cause: cause.clone(),
    };
    let since = stamp();
    rig.store.commit(worker("h1", terminating)).await.unwrap();
    rig.pods.remove(&static_pod("h1"));
    rig.want("h2");
    pass(120_000).await;
    assert_eq!(rig.log(), Vec::<String>::new(), "it is being stopped");

    // Nor is one made anew that a user deletes meanwhile.
    rig.api.with(|model| model.objects.clear());
    rig.gone(mirror);
    pass(120_000).await;
    assert_eq!(rig.log(), Vec::<String>::new());

    let finished = WorkerPhase::Finished { since, cause };
    rig.store.commit(worker("h1", finished)).await.unwrap();
    rig.store
        .commit(worker("h2", WorkerPhase::Sync))
        .await
        .unwrap();
    rig.status.wake_mirrors();
    pass(100).await;
    assert_eq!(rig.log(), ["POST"]);
    assert_eq!(
        rig.api.pod("web-n1").unwrap().annotation(CONFIG_MIRROR),
        Some("h2")
    );
}

#[tokio::test(start_paused = true)]
async fn orphans_stay_until_every_source_has_spoken() {
    let rig = Rig::idle();
    rig.all.store(false, Ordering::SeqCst);
    let mut mirror = static_pod("h1");
    let annotations = mirror.metadata.annotations.as_mut().unwrap();
    annotations.insert(CONFIG_MIRROR.to_owned(), "h1".to_owned());
    rig.api.put(&mirror);
    rig.show();
    rig.start(node());
    pass(60_000).await;
    assert_eq!(rig.log(), Vec::<String>::new());
    rig.all.store(true, Ordering::SeqCst);
    pass(10_000).await;
    assert_eq!(rig.log(), ["DELETE"]);
}

#[tokio::test(start_paused = true)]
async fn without_the_node_object_mirror_pods_wait() {
    let rig = Rig::idle();
    let unknown = NodeObject::default();
    rig.start(unknown.clone());
    rig.want("h1");
    pass(60_000).await;
    assert_eq!(rig.log(), Vec::<String>::new());
    unknown.set(node().get().unwrap());
    pass(100).await;
    assert_eq!(rig.log(), ["POST"]);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_another_pod_has_is_not_taken_by_force() {
    let rig = Rig::new();
    let mut other = static_pod("x");
    other.metadata.annotations = None;
    rig.api.put(&other);
    rig.want("h1");
    pass(300_000).await;
    let log = rig.log();
    assert!(
        log.len() < 20 && !log.contains(&"DELETE".to_owned()),
        "{log:?}"
    );
    rig.api.with(|model| model.objects.clear());
    pass(300_000).await;
    assert_eq!(
        rig.api.pod("web-n1").unwrap().annotation(CONFIG_MIRROR),
        Some("h1")
    );
}

#[tokio::test(start_paused = true)]
async fn an_outage_delays_a_mirror_pod() {
    let rig = Rig::new();
    rig.api.set_down(true);
    rig.want("h1");
    pass(60_000).await;
    rig.api.set_down(false);
    pass(11_000).await;
    assert_eq!(rig.log(), ["POST"]);
}

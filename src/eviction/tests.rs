use std::fs;
use std::sync::Mutex;

use holdfast_testkit::fake_cri::FakeCri;
use serde_json::json;
use tokio::sync::mpsc;

use super::*;
use crate::kuberuntime::cri::CriTimeouts;

/// Pods that run, and the evicted ones.
struct Pods {
    running: Mutex<Vec<Arc<Pod>>>,
    evicted: mpsc::UnboundedSender<String>,
}

impl ActivePods for Pods {
    fn running(&self) -> Vec<Arc<Pod>> {
        self.running.lock().unwrap().clone()
    }

    fn evict(&self, _: &Arc<Pod>, eviction: Eviction) {
        assert_eq!(eviction.grace_seconds, 1);
        drop(self.evicted.send(eviction.message));
    }

    fn stopping(&self) -> Vec<Stopping> {
        Vec::new()
    }

    fn evicting(&self) -> Vec<Evicting> {
        Vec::new()
    }
}

/// With a limit of one mebibyte for all, and for a volume.
fn pod() -> Arc<Pod> {
    let spec = json!({
        "volumes": [{"name": "x", "emptyDir": {"sizeLimit": "1Mi"}}],
        "containers": [{"name": "c", "resources": {"limits": {"ephemeral-storage": "1Mi"}}}],
    });
    let metadata = json!({"name": "p", "namespace": "n", "uid": "u"});
    Arc::new(serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap())
}

struct World {
    dir: tempfile::TempDir,
    pods: Arc<Pods>,
    evicted: mpsc::UnboundedReceiver<String>,
    storage: LocalStorage,
    _runtime: FakeCri,
}

fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let mut node = NodeContext::new("n", dir.path());
    node.pod_log_root = dir.path().join("logs");
    let (told, evicted) = mpsc::unbounded_channel();
    let pods = Arc::new(Pods {
        running: Mutex::new(vec![pod()]),
        evicted: told,
    });
    let fake = FakeCri::new();
    let (timeouts, metrics) = (CriTimeouts::default(), Metrics::default());
    let cri = CriClient::over(fake.channel(), "fake", timeouts, metrics.clone());
    World {
        storage: LocalStorage::new(Arc::<Pods>::clone(&pods), cri, node, metrics),
        dir,
        pods,
        evicted,
        _runtime: fake,
    }
}

#[tokio::test]
async fn what_containers_write_to_files_of_the_agent_counts() {
    for file in ["etc-hosts", "containers/c/00000000"] {
        let mut world = world();
        let path = world.dir.path().join("pods/u").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, vec![7; 3 << 20]).unwrap();
        let token = CancellationToken::new();
        let task = tokio::spawn(world.storage.run(token.clone()));
        let message = tokio::time::timeout(Duration::from_secs(20), world.evicted.recv()).await;
        assert_eq!(
            message.expect(file).unwrap(),
            "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. "
        );
        token.cancel();
        task.await.unwrap();
    }
}

#[tokio::test]
async fn what_was_counted_before_the_walk_was_cut_off_counts() {
    let mut world = world();
    let found = |bytes, whole| Found {
        usage: StorageUsage {
            empty_dirs: [("x".to_owned(), bytes)].into(),
            ..StorageUsage::default()
        },
        whole,
    };
    let no = || Whole::No("EmptyDir volume \"x\": it does not end in time".to_owned());
    let mut missed = HashMap::new();
    let mut judge = |bytes, whole| {
        let found = found(bytes, whole);
        world.storage.judge(&pod(), &found, &mut missed);
        world.evicted.try_recv().ok()
    };
    let over = "Usage of EmptyDir volume \"x\" exceeds the limit \"1Mi\". ".to_owned();
    assert_eq!(judge(2 << 20, no()), Some(over.clone()));
    assert_eq!(judge(2 << 20, Whole::Unknown), Some(over));
    // What is not the pod's doing never adds up.
    for _ in 0..10 {
        assert_eq!(judge(0, Whole::Unknown), None);
    }
    for whole in [no(), no(), Whole::Yes, no(), Whole::Unknown, no()] {
        assert_eq!(judge(0, whole), None);
    }
    let told = judge(0, no()).unwrap();
    assert!(
        told.contains("EmptyDir volume \"x\": it does not end in time"),
        "{told}"
    );
    world.pods.running.lock().unwrap().clear();
    assert_eq!(judge(0, no()), None, "it has ended in the meantime");
}

#[tokio::test]
async fn a_pod_is_measured_once_at_a_time() {
    let world = world();
    let mut watched = Watched::default();
    assert_eq!(world.storage.due(&mut watched).len(), 1);
    assert!(world.storage.due(&mut watched).is_empty());
    watched.under_way.clear();
    watched.missed.insert(PodUid::new("gone"), 2);
    assert_eq!(world.storage.due(&mut watched).len(), 1);
    assert!(watched.missed.is_empty());
}

#[test]
fn containers_that_have_ended_count_for_no_limit() {
    let of = |id: &str, name: &str, bytes: u64| v1::ContainerStats {
        attributes: Some(v1::ContainerAttributes {
            id: id.to_owned(),
            labels: [(CONTAINER_NAME.to_owned(), name.to_owned())].into(),
            ..Default::default()
        }),
        writable_layer: Some(v1::FilesystemUsage {
            used_bytes: Some(v1::UInt64Value { value: bytes }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let stats = vec![
        of("c0", "c", 700),
        of("c1", "c", 600),
        of("i0", "init", 500),
    ];
    let running = HashSet::from(["c1".to_owned()]);
    let layers = layers_of(stats, &running);
    assert_eq!(layers, BTreeMap::from([("c".to_owned(), 600)]));
}

#[test]
fn a_pod_that_takes_long_to_measure_rests_in_between() {
    let (mut watched, uid) = (Watched::default(), PodUid::new("u"));
    let begun = Instant::now();
    let at = |seconds| begun + Duration::from_secs(seconds);
    assert!(watched.begin(&uid, begun));
    watched.measured(&uid, Duration::from_secs(4), at(4));
    assert!(!watched.begin(&uid, at(10)) && !watched.begin(&uid, at(43)));
    assert!(watched.begin(&uid, at(44)));
    watched.measured(&uid, Duration::from_secs(600), at(644));
    assert!(!watched.begin(&uid, at(700)));
    assert!(watched.begin(&uid, at(704)));
    watched.measured(&uid, Duration::from_millis(900), at(705));
    assert!(watched.begin(&uid, at(706)));
}

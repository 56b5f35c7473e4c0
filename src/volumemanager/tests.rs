use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;

use nix::mount::MntFlags;
use serde_json::json;

use k8s_openapi::api::core::v1::Pod;

use super::plan::memory_size;
use super::*;
use crate::core::state::{PodRecord, Transaction, VolumePhase, VolumeRecord};
use crate::kuberuntime::sources::Sources;
use crate::types::events::MemoryRecorder;
use crate::types::{BootId, PodExt, PodSource, Stamp};

struct TestClock;

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        }
    }
}

struct World {
    dir: tempfile::TempDir,
    store: Store,
    manager: VolumeManager,
    recorder: MemoryRecorder,
}

fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::in_memory(Arc::new(TestClock));
    World {
        manager: VolumeManager::new(
            dir.path().join("root"),
            Some(1 << 30),
            store.clone(),
            Arc::new(TestClock),
        ),
        store,
        dir,
        recorder: MemoryRecorder::default(),
    }
}

fn pod(uid: &str, volumes: serde_json::Value) -> Pod {
    let mounts: Vec<_> = volumes
        .as_array()
        .unwrap()
        .iter()
        .filter(|v| v["name"] != "unused")
        .map(|v| json!({"name": v["name"], "mountPath": "/x"}))
        .collect();
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": uid},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    }))
    .unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

impl World {
    async fn mount(&self, pod: &Pod) -> Result<BTreeMap<String, PathBuf>, VolumeError> {
        self.mount_with(pod, &Sources::default()).await
    }

    async fn mount_with(
        &self,
        pod: &Pod,
        sources: &Sources,
    ) -> Result<BTreeMap<String, PathBuf>, VolumeError> {
        self.manager.mount(pod, sources, &self.recorder).await
    }

    /// The same node after a restart of the agent.
    fn restarted(&self) -> VolumeManager {
        VolumeManager::new(
            self.dir.path().join("root"),
            Some(1 << 30),
            self.store.clone(),
            Arc::new(TestClock),
        )
    }

    fn phase(&self, key: &str) -> Option<VolumePhase> {
        self.store
            .snapshot()
            .record::<VolumeRecord>(key)
            .map(|r| r.phase)
    }
}

#[tokio::test]
async fn an_empty_dir_lives_as_long_as_its_pod() {
    let world = world();
    let pod = pod(
        "u1",
        json!([{"name": "data", "emptyDir": {}}, {"name": "unused", "secret": {"secretName": "s"}}]),
    );
    let path = world.mount(&pod).await.unwrap()["data"].clone();
    assert!(path.ends_with("pods/u1/volumes/kubernetes.io~empty-dir/data"));
    assert_eq!(
        (mode(&path), mode(&world.manager.pod_dir(&"u1".into()))),
        (0o777, 0o750)
    );
    fs::write(path.join("kept"), "x").unwrap();
    let version = world
        .store
        .snapshot()
        .get::<VolumeRecord>("u1/data")
        .unwrap()
        .version;
    world.mount(&pod).await.unwrap();
    assert!(path.join("kept").exists());
    let again = world
        .store
        .snapshot()
        .get::<VolumeRecord>("u1/data")
        .unwrap()
        .version;
    assert_eq!(version, again, "nothing is written for what is mounted");

    let uid = pod.uid();
    assert!(
        world.manager.remove_pod_dirs(&uid).await.is_err(),
        "volumes are on record"
    );
    world.manager.unmount(&uid).await.unwrap();
    assert!(!path.exists());
    assert_eq!(world.phase("u1/data"), None);
    world.manager.remove_pod_dirs(&uid).await.unwrap();
    assert!(!world.manager.pod_dirs_exist(&uid));
    world.manager.remove_pod_dirs(&uid).await.unwrap();
}

#[tokio::test]
async fn a_host_path_is_checked_once_and_never_removed() {
    let world = world();
    let host = world.dir.path().join("host");
    let pod = pod(
        "u1",
        json!([{"name": "h", "hostPath": {"path": host, "type": "Directory"}}]),
    );
    let error = world.mount(&pod).await.unwrap_err();
    assert!(error.to_string().contains("is not a directory"), "{error}");
    let event = &world.recorder.events()[0];
    assert_eq!(event.reason, "FailedMount");
    assert!(event.message.contains("\"h\""), "{}", event.message);

    fs::create_dir(&host).unwrap();
    fs::write(host.join("precious"), "x").unwrap();
    assert_eq!(world.mount(&pod).await.unwrap()["h"], host);
    world.manager.unmount(&pod.uid()).await.unwrap();
    world.manager.remove_pod_dirs(&pod.uid()).await.unwrap();
    assert!(host.join("precious").exists());
    assert_eq!(world.phase("u1/h"), None);
}

#[tokio::test]
async fn a_host_path_is_made_again_after_a_reboot() {
    let world = world();
    let host = world.dir.path().join("run");
    let pod = pod(
        "u1",
        json!([{"name": "h", "hostPath": {"path": host, "type": "FileOrCreate"}}]),
    );
    world.mount(&pod).await.unwrap();
    fs::remove_file(&host).unwrap();
    world.mount(&pod).await.unwrap();
    assert!(!host.exists(), "it is looked at once");
    let mut record = world
        .store
        .snapshot()
        .record::<VolumeRecord>("u1/h")
        .cloned()
        .unwrap();
    record.at.boot = BootId(0);
    let before = Transaction::new().put("u1/h", record);
    world.store.commit(before).await.unwrap();
    world.mount(&pod).await.unwrap();
    assert!(host.is_file());
    assert_eq!(world.phase("u1/h"), Some(VolumePhase::Mounted));
}

#[tokio::test]
async fn a_host_path_with_a_type_is_looked_at_before_a_container_gets_it() {
    let world = world();
    let uid = PodUid::new("u1");
    let look = async |type_: &str, path: &Path| {
        let path = path.to_str().unwrap();
        let looked = world.manager.look_at_host_path(&uid, "h", path, type_);
        looked.await.map_err(|error| error.to_string())
    };
    let missing = world.dir.path().join("missing");
    for (type_, is_made) in [
        ("", false),
        ("Directory", false),
        ("File", false),
        ("Socket", false),
        ("CharDevice", false),
        ("BlockDevice", false),
        ("FileOrCreate", true),
    ] {
        let looked = look(type_, &missing).await;
        assert_eq!(looked.is_ok(), is_made || type_.is_empty(), "{type_}");
        assert_eq!(missing.exists(), is_made, "{type_}");
        if let Err(error) = looked {
            assert!(error.contains("hostPath type check failed"), "{error}");
        }
    }
    assert!(missing.is_file());
    assert_eq!(look("File", &missing).await, Ok(()));
    assert!(look("Directory", &missing).await.is_err());
    assert_eq!(look("CharDevice", Path::new("/dev/null")).await, Ok(()));
}

#[tokio::test]
async fn what_is_not_supported_is_refused_by_name() {
    let world = world();
    for (volume, word) in [
        (
            json!({"name": "v", "nfs": {"server": "s", "path": "/"}}),
            "its kind",
        ),
        (
            json!({"name": "v", "emptyDir": {"medium": "HugePages"}}),
            "HugePages",
        ),
        (json!({"name": "../v", "emptyDir": {}}), "../v"),
        (
            json!({"name": "v", "hostPath": {"path": "/a/../etc"}}),
            "absolute",
        ),
    ] {
        let error = world.mount(&pod("u1", json!([volume]))).await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    let error = world.mount(&pod("../u", json!([]))).await.unwrap_err();
    assert!(matches!(error, VolumeError::Name { .. }), "{error}");
}

#[test]
fn a_tmpfs_gets_the_least_of_node_pod_and_volume() {
    let with = |limit: Option<&str>, size: Option<&str>, node| {
        let mut pod = pod(
            "u",
            json!([{"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": size}}]),
        );
        let empty = pod.spec_ref().volumes.as_ref().unwrap()[0]
            .empty_dir
            .clone()
            .unwrap();
        if let (Some(limit), Some(spec)) = (limit, pod.spec.as_mut()) {
            spec.containers[0].resources =
                serde_json::from_value(json!({"limits": {"memory": limit}})).unwrap();
        }
        memory_size(&pod, &empty, node).unwrap()
    };
    assert_eq!(with(None, None, None), None);
    assert_eq!(with(None, None, Some(10)), Some(10));
    assert_eq!(with(Some("8"), None, Some(10)), Some(8));
    assert_eq!(with(Some("8"), Some("4"), Some(10)), Some(4));
    assert_eq!(with(Some("8"), Some("20"), None), Some(8));

    // As the pod's cgroup has it.
    let mut pod = pod("u", json!([]));
    if let Some(spec) = pod.spec.as_mut() {
        spec.containers[0].resources =
            serde_json::from_value(json!({"limits": {"memory": "8"}})).unwrap();
        spec.overhead = serde_json::from_value(json!({"memory": "2"})).unwrap();
    }
    let no_limit = Default::default();
    assert_eq!(memory_size(&pod, &no_limit, Some(64)).unwrap(), Some(10));
    assert_eq!(memory_size(&pod, &no_limit, Some(9)).unwrap(), Some(9));
}

#[tokio::test]
async fn volumes_of_a_lost_store_are_adopted_and_orphans_removed() {
    let world = world();
    let (kept, gone) = (
        pod("kept", json!([{"name": "d", "emptyDir": {}}])),
        pod("gone", json!([{"name": "d", "emptyDir": {}}])),
    );
    let path = world.mount(&kept).await.unwrap()["d"].clone();
    fs::write(path.join("data"), "x").unwrap();
    let of_gone = world.mount(&gone).await.unwrap()["d"].clone();
    fs::write(of_gone.join("data"), "x").unwrap();

    let store = Store::in_memory(Arc::new(TestClock));
    let manager = VolumeManager::new(
        world.dir.path().join("root"),
        None,
        store.clone(),
        Arc::new(TestClock),
    );
    assert!(
        manager.remove_pod_dirs(&gone.uid()).await.is_err(),
        "an unrecorded volume is not removed"
    );
    assert_eq!(manager.reconcile().await.unwrap().adopted, 2);
    assert_eq!(manager.reconcile().await.unwrap().adopted, 0);
    let errors = manager
        .cleanup_orphan_dirs(&BTreeSet::from([kept.uid()]))
        .await;
    assert!(errors.is_empty(), "{errors:?}");
    assert!(!manager.pod_dirs_exist(&gone.uid()));
    assert!(path.join("data").exists());
    manager
        .mount(&kept, &Sources::default(), &world.recorder)
        .await
        .unwrap();
    assert!(path.join("data").exists());
}

/// The pods that are known were listed before the disk was looked at.
#[tokio::test]
async fn a_pod_that_came_in_the_meantime_is_no_orphan() {
    let world = world();
    let new = pod("new", json!([{"name": "d", "emptyDir": {}}]));
    let record = PodRecord {
        source: PodSource::Api,
        origin: String::new(),
        pod: Arc::new(new.clone()).into(),
        first_seen: TestClock.now(),
        confirmed_epoch: 1,
    };
    let store = &world.manager.store;
    let transaction = Transaction::new().put("new", record);
    store.commit(transaction).await.unwrap();
    let path = world.mount(&new).await.unwrap()["d"].clone();
    let errors = world.manager.cleanup_orphan_dirs(&BTreeSet::new()).await;
    assert!(errors.is_empty(), "{errors:?}");
    assert!(path.exists());
    assert_eq!(world.phase("new/d"), Some(VolumePhase::Mounted));
    store
        .commit(Transaction::new().delete::<PodRecord>("new"))
        .await
        .unwrap();
    let errors = world.manager.cleanup_orphan_dirs(&BTreeSet::new()).await;
    assert!(errors.is_empty(), "{errors:?}");
    assert!(!world.manager.pod_dirs_exist(&new.uid()));
}

#[tokio::test]
async fn directories_of_unknown_plugins_stay() {
    let world = world();
    let foreign = world
        .dir
        .path()
        .join("root/pods/u9/volumes/kubernetes.io~nfs/share");
    fs::create_dir_all(&foreign).unwrap();
    fs::write(foreign.join("theirs"), "x").unwrap();
    let errors = world.manager.cleanup_orphan_dirs(&BTreeSet::new()).await;
    assert!(
        errors[0].to_string().contains("kubernetes.io~nfs/share"),
        "{errors:?}"
    );
    assert!(foreign.join("theirs").exists());
    // An empty one is where something was to be mounted that never came.
    fs::remove_file(foreign.join("theirs")).unwrap();
    let errors = world.manager.cleanup_orphan_dirs(&BTreeSet::new()).await;
    assert!(errors.is_empty(), "{errors:?}");
    assert!(!world.manager.pod_dirs_exist(&PodUid::new("u9")));
}

// Invariant VOL-1.
#[tokio::test]
async fn a_step_that_was_cut_off_is_on_record_and_taken_up() {
    let world = world();
    let pod = pod(
        "u1",
        json!([{"name": "h", "hostPath": {"path": world.dir.path().join("f"), "type": "File"}}]),
    );
    world.mount(&pod).await.unwrap_err();
    assert_eq!(world.phase("u1/h"), Some(VolumePhase::Mounting));
    fs::write(world.dir.path().join("f"), "").unwrap();
    world.mount(&pod).await.unwrap();
    assert_eq!(world.phase("u1/h"), Some(VolumePhase::Mounted));
}

#[tokio::test]
async fn a_memory_volume_is_mounted_once_and_never_deleted_through() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let world = world();
    let pod = pod(
        "u1",
        json!([{"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}]),
    );
    let path = world.mount(&pod).await.unwrap()["m"].clone();
    let guard = Unmount(path.clone());
    assert_eq!(mounts::at(&path).unwrap().unwrap().fstype, "tmpfs");
    assert_eq!(mode(&path), 0o1777);
    let stat = nix::sys::statvfs::statvfs(&path).unwrap();
    assert_eq!(stat.blocks() * stat.fragment_size(), 1 << 20);
    fs::write(path.join("kept"), "x").unwrap();
    world.mount(&pod).await.unwrap();
    assert!(path.join("kept").exists());
    assert!(
        safety::remove_tree(&path).is_err(),
        "a mount is not deleted through"
    );
    assert!(safety::remove_tree(&world.manager.pod_dir(&pod.uid())).is_err());
    assert!(path.join("kept").exists());

    // As after a reboot: the record says mounted, the kernel says no.
    nix::mount::umount(&path).unwrap();
    world.mount(&pod).await.unwrap();
    assert_eq!(
        mounts::below(&world.dir.path().join("root")).unwrap().len(),
        1
    );
    world.manager.unmount(&pod.uid()).await.unwrap();
    assert!(!path.exists());
    drop(guard);
}

#[tokio::test]
async fn a_volume_in_memory_gets_what_the_node_has_when_it_is_mounted() {
    use std::sync::atomic::{AtomicU64, Ordering};
    let now = Arc::new(AtomicU64::new(1 << 30));
    let seen = Arc::clone(&now);
    let memory: MemoryForPods = Arc::new(move || Some(seen.load(Ordering::Relaxed)));
    let world = world();
    let manager = world.manager.clone().following_memory(memory);
    let pod = pod(
        "u1",
        json!([{"name": "m", "emptyDir": {"medium": "Memory"}}]),
    );
    let volume = &pod.spec.as_ref().unwrap().volumes.as_ref().unwrap()[0];
    for bytes in [1_u64 << 30, 2 << 30] {
        now.store(bytes, Ordering::Relaxed);
        let plan = manager.plan(&pod, volume).unwrap();
        let is_so = matches!(plan, plan::Plan::Memory { size, .. } if size == Some(bytes));
        assert!(is_so, "{bytes}");
    }
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        nix::mount::umount2(&self.0, MntFlags::MNT_DETACH).ok();
    }
}

#[path = "content_tests.rs"]
mod content_tests;
#[path = "copies_tests.rs"]
mod copies_tests;
#[path = "refresh_tests.rs"]
mod refresh_tests;
#[path = "refusals_tests.rs"]
mod refusals_tests;

/// A pod whose volumes belong to a group and whose containers run as one user.
fn pod_of_group(uid: &str, volumes: serde_json::Value) -> Pod {
    let mut pod = pod(uid, volumes);
    pod.spec.as_mut().unwrap().security_context =
        serde_json::from_value(json!({"fsGroup": 54_321, "runAsUser": 1234})).unwrap();
    pod
}

fn owners(path: &Path) -> (u32, u32, u32) {
    use std::os::unix::fs::MetadataExt;
    let found = fs::symlink_metadata(path).unwrap();
    (found.uid(), found.gid(), found.mode() & 0o7777)
}

#[tokio::test]
async fn volumes_belong_to_the_group_of_their_pod() {
    let world = world();
    let host = world.dir.path().join("host");
    fs::create_dir(&host).unwrap();
    let pod = pod_of_group(
        "u1",
        json!([
            {"name": "disk", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            {"name": "host", "hostPath": {"path": host}},
            {"name": "down", "downwardAPI": {"defaultMode": 0o400, "items": [
                {"path": "deep/name", "fieldRef": {"fieldPath": "metadata.name"}},
            ]}},
            {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        ]),
    );
    let wanted = crate::kuberuntime::sources::References::of_volumes(&pod);
    let mut sources = Sources::default();
    for token in wanted.tokens {
        let found = crate::kuberuntime::sources::PodToken {
            token: "secret".to_owned(),
            stale: false,
            expires_ms: 0,
        };
        sources.tokens.insert(token, Ok(found));
    }
    let paths = world.mount_with(&pod, &sources).await.unwrap();
    let at = |name: &str, below: &str| owners(&paths[name].join(below));
    assert_eq!(at("disk", ""), (0, 54_321, 0o2777));
    assert_eq!(at("memory", ""), (0, 54_321, 0o3777));
    assert_ne!(at("host", "").1, 54_321, "a hostPath is the node's");
    assert_eq!(at("down", "").1, 54_321);
    assert_eq!(at("down", "..data/deep"), (0, 54_321, 0o2755));
    assert_eq!(at("down", "..data/deep/name"), (0, 54_321, 0o440));
    assert_eq!(at("token", "..data/token"), (1234, 54_321, 0o640));

    // Nothing is written again, neither now nor by the next agent.
    let data = fs::read_link(paths["token"].join("..data")).unwrap();
    world.mount_with(&pod, &sources).await.unwrap();
    let next = world.restarted();
    next.mount(&pod, &sources, &world.recorder).await.unwrap();
    assert_eq!(fs::read_link(paths["token"].join("..data")).unwrap(), data);
    next.unmount(&PodUid::new("u1")).await.unwrap();
}

#[test]
fn directories_of_pods_are_made_beside_the_async_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = world();
        let pod = pod("u1", json!([]));
        // The only thread that may block is busy.
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || wait.recv());
        let mut mount = std::pin::pin!(world.mount(&pod));
        let begun = futures::FutureExt::now_or_never(&mut mount);
        assert!(begun.is_none());
        assert!(!world.manager.pod_dirs_exist(&PodUid::new("u1")));
        end.send(()).unwrap();
        busy.await.unwrap().unwrap();
        let limit = std::time::Duration::from_secs(30);
        tokio::time::timeout(limit, mount).await.unwrap().unwrap();
        assert!(world.manager.pod_dirs_exist(&PodUid::new("u1")));
    });
}

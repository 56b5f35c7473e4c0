use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, LocalVolumeSource};
use tokio::time::Instant;

use super::*;
use crate::core::state::FactRecord;
use crate::core::volumes::known::{InUse, Known};
use crate::core::volumes::{Csi, LOCAL, NFS};
use crate::kuberuntime::sources::Resolved;
use crate::store::Store;
use crate::types::{BootId, Clock, Stamp};
use crate::volumemanager::mounts::Mount;
use crate::volumemanager::remote::{GroupBy, RemoteError, RemotePlugin, Target};

struct TestClock(Instant);

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap_or(i64::MAX);
        Stamp {
            boot: BootId(1),
            boottime_ms: 1 + ms,
            wall_ms: 1 + ms,
        }
    }
}

/// The mount table, and a plugin that takes away what is in it.
#[derive(Clone, Default)]
struct Kernel {
    mounts: Arc<Mutex<Vec<Mount>>>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl Kernel {
    fn mount(&self, at: &Path, device: &str, fstype: &str, source: &str) {
        fs::create_dir_all(at).unwrap();
        self.mounts.lock().unwrap().push(Mount {
            point: at.to_owned(),
            fstype: fstype.to_owned(),
            source: source.to_owned(),
            device: device.to_owned(),
            root: "/".into(),
            ..Mount::default()
        });
    }

    fn unmount(&self, at: &Path) {
        self.mounts.lock().unwrap().retain(|m| m.point != at);
    }

    fn undo(&self, what: &str, at: &Path) -> BoxFuture<'static, Result<(), RemoteError>> {
        let name = at.iter().nth_back(1).unwrap_or_default().to_string_lossy();
        self.calls.lock().unwrap().push(format!("{what} {name}"));
        self.unmount(at);
        if let Some(parent) = at.parent() {
            fs::remove_file(parent.join("vol_data.json")).ok();
        }
        async { Ok(()) }.boxed()
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl RemotePlugin for Kernel {
    fn stage(&self, _: Arc<Resolved>, _: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.calls.lock().unwrap().push("stage".to_owned());
        async { Ok(()) }.boxed()
    }

    fn publish(
        &self,
        _: Arc<Resolved>,
        _: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        self.calls.lock().unwrap().push("publish".to_owned());
        async { Ok(GroupBy::Nobody) }.boxed()
    }

    fn unpublish(
        &self,
        _: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.undo("unpublish", &path)
    }

    fn unstage(&self, _: Arc<Remote>, at: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.undo("unstage", &at)
    }
}

struct World {
    _dir: tempfile::TempDir,
    root: PathBuf,
    clock: Arc<dyn Clock>,
    kernel: Kernel,
    store: Store,
    manager: VolumeManager,
}

fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap().join("root");
    fs::create_dir_all(&root).unwrap();
    let clock: Arc<dyn Clock> = Arc::new(TestClock(Instant::now()));
    let (kernel, store) = (Kernel::default(), Store::in_memory(Arc::clone(&clock)));
    let manager = manager(&root, &store, &clock, &kernel);
    World {
        _dir: dir,
        root,
        clock,
        kernel,
        store,
        manager,
    }
}

fn manager(root: &Path, store: &Store, clock: &Arc<dyn Clock>, kernel: &Kernel) -> VolumeManager {
    let mut manager = VolumeManager::new(root, None, store.clone(), Arc::clone(clock))
        .taking_over()
        .with_plugin(CSI, Arc::new(kernel.clone()))
        .with_plugin(NFS, Arc::new(kernel.clone()))
        .with_plugin(LOCAL, Arc::new(kernel.clone()));
    let mounts = Arc::clone(&kernel.mounts);
    manager.mounts = mounts::Source::of_mounts(move || mounts.lock().unwrap().clone());
    manager
}

fn csi(handle: &str) -> Remote {
    Remote {
        name: format!("pv-{handle}"),
        claim: Some("ns/claim".to_owned()),
        mode: VolumeMode::Filesystem,
        read_only: false,
        mount_options: Vec::new(),
        terms: crate::core::volumes::Terms::default(),
        unique_name: Some(format!("kubernetes.io/csi/d.example^{handle}")),
        source: Source::Csi(Box::new(Csi {
            source: CSIPersistentVolumeSource {
                driver: "d.example".to_owned(),
                volume_handle: handle.to_owned(),
                ..Default::default()
            },
            ..Csi::default()
        })),
    }
}

fn data(handle: &str) -> String {
    format!(
        r#"{{"driverName":"d.example","volumeHandle":"{handle}","specVolID":"pv-{handle}","volumeLifecycleMode":"Persistent"}}"#
    )
}

impl World {
    /// As the kubelet that was here before has mounted it.
    fn stage(&self, remote: &Remote) -> PathBuf {
        let Source::Csi(csi) = &remote.source else {
            panic!("{remote:?}")
        };
        let at = self.manager.staging(remote).unwrap();
        let handle = &csi.source.volume_handle;
        self.kernel.mount(&at, handle, "ext4", "/dev/x");
        fs::write(at.parent().unwrap().join("vol_data.json"), data(handle)).unwrap();
        at
    }

    fn publish(&self, uid: &str, remote: &Remote) -> PathBuf {
        let Source::Csi(csi) = &remote.source else {
            panic!("{remote:?}")
        };
        let at = self.manager.target(&uid.into(), remote);
        let handle = &csi.source.volume_handle;
        self.kernel.mount(&at, handle, "ext4", "/dev/x");
        fs::write(at.parent().unwrap().join("vol_data.json"), data(handle)).unwrap();
        at
    }

    /// A device on record that no record uses.
    async fn idle(&self, handle: &str) -> String {
        let remote = csi(handle);
        let at = self.stage(&remote);
        let key = remote.device_key().unwrap();
        let found = (at.as_path(), VolumePhase::Mounted, Mark::Mount);
        let manager = &self.manager;
        let transaction = manager.add(Transaction::new(), &"".into(), &key, &remote, found);
        self.store.commit(transaction.unwrap()).await.unwrap();
        key
    }

    fn in_use(&self) -> InUse {
        self.manager.volumes_in_use().borrow().clone()
    }

    fn phase(&self, key: &str) -> Option<VolumePhase> {
        let seen = self.store.snapshot();
        seen.record::<VolumeRecord>(key).map(|r| r.phase)
    }

    fn has(&self, key: &str) -> bool {
        let seen = self.store.snapshot();
        let described = records::description(&seen, key).is_some();
        seen.record::<VolumeRecord>(key).is_some() && described
    }

    /// Waits until every operation that has begun is complete.
    async fn settle(&self) {
        let manager = &self.manager;
        while manager.desk().driving || !manager.operations.busy().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn traces(&self) -> Vec<PathBuf> {
        let found = self.manager.traces().await.unwrap();
        found.into_values().flatten().map(|t| t.path).collect()
    }

    /// The agent starts anew.
    async fn restart(&mut self) {
        self.manager = manager(&self.root, &self.store, &self.clock, &self.kernel);
        self.manager.reconcile().await.unwrap();
    }
}

fn names(handles: &[&str]) -> BTreeSet<String> {
    handles.iter().filter_map(|h| csi(h).unique_name).collect()
}

const ALL: Known = Known::All { strays: false };

#[test]
fn volumes_are_looked_for_beside_the_async_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = world();
        let (uid, remote) = (PodUid::new("pod-a"), csi("used"));
        world.publish("pod-a", &remote);
        // The only thread that may block is busy.
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || wait.recv());
        let mut taken = std::pin::pin!(world.manager.take_over(&uid, "v", &remote));
        assert!((&mut taken).now_or_never().is_none());
        end.send(()).unwrap();
        busy.await.unwrap().unwrap();
        let limit = Duration::from_secs(30);
        assert!(tokio::time::timeout(limit, taken).await.unwrap().unwrap());
    });
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_store_knew_is_recorded_without_a_call_and_nothing_is_unstaged_before() {
    let world = world();
    let used = csi("used");
    let (staged, at) = (world.stage(&used), world.publish("pod-a", &used));
    let idle = world.idle("idle").await;
    world.manager.reconcile().await.unwrap();
    world.settle().await;
    let in_use = world.in_use();
    assert_eq!(in_use.names, names(&["idle", "used"]), "it is staged");
    assert!(!in_use.whole);
    assert_eq!(world.traces().await, std::slice::from_ref(&at));
    assert!(world.has(&idle), "nobody knows whether it is in use");

    let uid = PodUid::new("pod-a");
    let other = csi("other");
    assert!(!world.manager.take_over(&uid, "w", &other).await.unwrap());
    assert!(world.manager.take_over(&uid, "v", &used).await.unwrap());
    assert_eq!(world.phase("pod-a/v"), Some(VolumePhase::Mounted));
    assert_eq!(world.phase("pod-a/w"), None, "nothing of it is there");
    assert_eq!(world.traces().await, Vec::<PathBuf>::new());
    assert!(world.manager.take_over(&uid, "v", &used).await.unwrap());
    assert_eq!(world.kernel.calls(), Vec::<String>::new());
    let described = world.manager.remote_volumes_of(&uid);
    assert_eq!(described[0].claim.as_deref(), Some("ns/claim"));
    assert_eq!(described[0].staged.as_deref(), Some(&*staged));

    world.manager.know(ALL);
    world.settle().await;
    let hash = |at: &Path| {
        at.iter()
            .nth_back(1)
            .unwrap()
            .to_string_lossy()
            .into_owned()
    };
    let unstaged = world.manager.staging(&csi("idle")).unwrap();
    assert_eq!(
        world.kernel.calls(),
        [format!("unstage {}", hash(&unstaged))]
    );
    let all = InUse {
        names: names(&["used"]),
        whole: true,
    };
    assert_eq!(world.in_use(), all);
    world.manager.unmount(&uid).await.unwrap();
    world.settle().await;
    assert_eq!(
        world.kernel.calls(),
        [
            "unpublish pv-used".to_owned(),
            format!("unstage {}", hash(&staged))
        ]
    );
    assert_eq!(
        world.in_use(),
        InUse {
            names: BTreeSet::new(),
            whole: true
        }
    );
    world.manager.remove_pod_dirs(&uid).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_volume_of_other_storage_is_not_taken_for_what_the_claim_says() {
    let world = world();
    let at = world.publish("pod-a", &csi("old"));
    let uid = PodUid::new("pod-a");
    // The persistent volume was made anew, of the same name.
    let new = Remote {
        name: "pv-old".to_owned(),
        ..csi("new")
    };
    assert!(!world.manager.take_over(&uid, "v", &new).await.unwrap());
    assert_eq!(world.traces().await, [at]);
    // What the driver's data says is what it is.
    assert_eq!(world.manager.take_over_by_layout(&uid).await.unwrap(), []);
    let described = world.manager.remote_volumes_of(&uid);
    assert_eq!(
        described[0].remote.device().as_deref(),
        Some("d.example/old")
    );
}

#[tokio::test(start_paused = true)]
async fn volumes_of_pods_that_are_gone_go_as_far_as_it_is_sure_what_they_are() {
    let world = world();
    let used = csi("a");
    world.stage(&used);
    world.publish("gone", &used);
    let pods = world.root.join("pods");
    let export = pods.join("gone/volumes/kubernetes.io~nfs/share");
    world.kernel.mount(&export, "0:9", "nfs4", "server:/export");
    let disk = pods.join("kept/volumes/kubernetes.io~local-volume/pv");
    world.kernel.mount(&disk, "8:1", "ext4", "/dev/sda1");
    let bind = pods.join("kept/volumes/kubernetes.io~nfs/no-nfs");
    world.kernel.mount(&bind, "8:1", "ext4", "/dev/sda1");
    world.manager.reconcile().await.unwrap();
    world.manager.know(ALL);
    let errors = world.manager.cleanup_orphan_dirs(&BTreeSet::new()).await;
    world.settle().await;
    let mut calls = world.kernel.calls();
    calls.sort();
    assert_eq!(calls.len(), 3, "{calls:?}");
    assert_eq!(
        calls[..2],
        ["unpublish kubernetes.io~nfs", "unpublish pv-a"]
    );
    assert!(calls[2].starts_with("unstage "), "{calls:?}");
    assert!(!world.manager.pod_dirs_exist(&"gone".into()));
    assert_eq!(errors.len(), 1);
    assert!(errors[0].to_string().contains("is there but not on record"));
    let left: Vec<PathBuf> = (world.kernel.mounts.lock().unwrap().iter())
        .map(|m| m.point.clone())
        .collect();
    assert_eq!(left, [disk, bind]);
    assert!(world.manager.pod_dirs_exist(&"kept".into()));
}

#[tokio::test(start_paused = true)]
async fn a_device_that_a_mount_of_a_pod_shows_in_use_is_not_unstaged() {
    let world = world();
    let key = world.idle("h").await;
    // Of a kind that tells nothing of itself.
    let at = world.root.join("pods/u/volumes/example.com~other/v");
    world.kernel.mount(&at, "h", "ext4", "/dev/x");
    world.manager.know(Known::All { strays: true });
    world.settle().await;
    assert!(world.has(&key));
    assert_eq!(world.kernel.calls(), Vec::<String>::new());
    assert!(!world.in_use().whole);
    world.kernel.unmount(&at);
    // Nobody tells.
    tokio::time::sleep(Duration::from_secs(61)).await;
    world.settle().await;
    assert!(!world.has(&key));
    assert_eq!(world.kernel.calls().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn one_record_that_is_lost_is_made_whole_or_keeps_every_device() {
    for lost in ["volume", "description", "device", "its description"] {
        let mut world = world();
        let used = csi("used");
        let (_, at) = (world.stage(&used), world.publish("pod-a", &used));
        let (uid, device) = (PodUid::new("pod-a"), used.device_key().unwrap());
        assert!(world.manager.take_over(&uid, "v", &used).await.unwrap());
        let idle = world.idle("idle").await;
        let gone = match lost {
            "volume" => Transaction::new().delete::<VolumeRecord>("pod-a/v"),
            "description" => Transaction::new().delete::<FactRecord>("volumes/pod-a/v"),
            "device" => Transaction::new().delete::<VolumeRecord>(&device),
            _ => Transaction::new().delete::<FactRecord>(device.replace("device/", "devices//")),
        };
        world.store.commit(gone).await.unwrap();
        world.manager.know(ALL);
        world.settle().await;
        if matches!(lost, "volume" | "description") {
            assert!(world.has(&idle), "{lost}: it may be the one that is used");
            assert!(!world.in_use().whole, "{lost}");
        }
        world.restart().await;
        if lost == "description" {
            world.manager.know(ALL);
            world.settle().await;
            assert!(world.has(&idle) && !world.in_use().whole, "{lost}");
            assert_eq!(world.traces().await, [at]);
            assert!(world.manager.take_over(&uid, "v", &used).await.unwrap());
        }
        assert_eq!(world.traces().await, Vec::<PathBuf>::new(), "{lost}");
        world.manager.know(ALL);
        world.settle().await;
        assert_eq!(world.phase("pod-a/v"), Some(VolumePhase::Mounted), "{lost}");
        assert!(world.has("pod-a/v") && world.has(&device), "{lost}");
        assert!(!world.has(&idle), "{lost}");
        let all = InUse {
            names: names(&["used"]),
            whole: true,
        };
        assert_eq!(world.in_use(), all, "{lost}");
        let calls = world.kernel.calls();
        assert!(
            calls.len() == 1 && calls[0].starts_with("unstage"),
            "{lost}: {calls:?}"
        );
        world.manager.unmount(&uid).await.unwrap();
        world.settle().await;
        assert_eq!(world.kernel.calls().len(), 2, "{lost}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_of_which_nothing_is_left_goes_with_its_damage() {
    let mut world = world();
    let remote = Remote {
        source: Source::Local(LocalVolumeSource {
            path: "/mnt/disk".to_owned(),
            fs_type: None,
        }),
        ..csi("x")
    };
    let at = world.manager.target(&"pod-a".into(), &remote);
    world.kernel.mount(&at, "8:1", "ext4", "/dev/sda1");
    let uid = PodUid::new("pod-a");
    assert!(world.manager.take_over(&uid, "v", &remote).await.unwrap());
    let gone = Transaction::new().delete::<FactRecord>("volumes/pod-a/v");
    world.store.commit(gone).await.unwrap();
    world.restart().await;
    world.manager.unmount(&uid).await.unwrap_err();
    assert_eq!(world.phase("pod-a/v"), Some(VolumePhase::Mounted));
    world.kernel.unmount(&at);
    world.restart().await;
    assert_eq!(world.phase("pod-a/v"), None);
    world.manager.unmount(&uid).await.unwrap();
    world.manager.remove_pod_dirs(&uid).await.unwrap();
}

//! Storage that hangs, fails, is busy, is shared, and what users are told of it.

use std::collections::{BTreeSet, VecDeque};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, LocalVolumeSource, NFSVolumeSource, Pod,
};
use serde_json::json;
use tokio::sync::Semaphore;

use super::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use super::*;
use crate::core::state::{FactRecord, PodRecord, Transaction, VolumePhase, VolumeRecord};
use crate::core::volumes::{Csi, LOCAL, Remote, Source, VolumeMode};
use crate::kuberuntime::sources::{Resolved, Sources};
use crate::types::events::{EventType, MemoryRecorder};
use crate::types::{BootId, Json, PodExt, PodSource, Stamp};

/// Moves with the time of the runtime.
struct TestClock(Instant);

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        let ms = self.0.elapsed().as_millis() as i64;
        Stamp {
            boot: BootId(1),
            boottime_ms: 1 + ms,
            wall_ms: 1 + ms,
        }
    }
}

/// Does as it is told, call by call; without a word it succeeds.
#[derive(Default)]
struct Script {
    calls: Mutex<Vec<String>>,
    answers: Mutex<VecDeque<Answer>>,
    /// True if the manager is to give what is published to groups.
    leaves_groups: AtomicBool,
}

enum Answer {
    Fails(RemoteError),
    Hangs(Arc<Semaphore>),
    Panics,
    Succeeds,
}

impl Script {
    fn then(&self, answer: Answer) {
        self.answers.lock().unwrap().push_back(answer);
    }

    fn hang(&self) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        self.then(Answer::Hangs(Arc::clone(&gate)));
        gate
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    fn call<T: Send + 'static>(
        &self,
        what: String,
        good: T,
    ) -> BoxFuture<'static, Result<T, RemoteError>> {
        self.calls.lock().unwrap().push(what);
        let answer = self.answers.lock().unwrap().pop_front();
        Box::pin(async move {
            match answer {
                None | Some(Answer::Succeeds) => Ok(good),
                Some(Answer::Fails(error)) => Err(error),
                Some(Answer::Hangs(gate)) => {
                    drop(gate.acquire().await);
                    Ok(good)
                }
                Some(Answer::Panics) => panic!("of the plugin"),
            }
        })
    }
}

fn last(path: &Path) -> String {
    let parts: Vec<_> = path.iter().filter_map(|p| p.to_str()).collect();
    let pod = parts.iter().find(|p| p.starts_with("pod-"));
    (*pod.unwrap_or(&"device")).to_owned()
}

impl RemotePlugin for Script {
    fn stage(&self, _: Arc<Resolved>, at: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.call(format!("stage {}", last(&at)), ())
    }

    fn publish(
        &self,
        _: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        let text = format!("publish {}", last(&target.path));
        if !self.leaves_groups.load(Ordering::Relaxed) {
            return self.call(text, GroupBy::Nobody);
        }
        std::fs::create_dir_all(&target.path).unwrap();
        self.call(text, GroupBy::Agent)
    }

    fn unpublish(
        &self,
        _: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.call(format!("unpublish {}", last(&path)), ())
    }

    fn unstage(&self, _: Arc<Remote>, at: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.call(format!("unstage {}", last(&at)), ())
    }

    fn wants_republish(&self, volume: &Remote) -> bool {
        matches!(volume.source, Source::Csi(_))
    }
}

struct World {
    _dir: tempfile::TempDir,
    store: Store,
    script: Arc<Script>,
    manager: VolumeManager,
    recorder: MemoryRecorder,
}

fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(TestClock(Instant::now()));
    let store = Store::in_memory(Arc::clone(&clock));
    let script = Arc::new(Script::default());
    let recorder = MemoryRecorder::default();
    let manager = VolumeManager::new(dir.path().join("root"), None, store.clone(), clock)
        .telling(Arc::new(recorder.clone()))
        .with_plugin(NFS, Arc::clone(&script) as _)
        .with_plugin(LOCAL, Arc::clone(&script) as _)
        .with_plugin(CSI, Arc::clone(&script) as _);
    World {
        _dir: dir,
        store,
        script,
        manager,
        recorder,
    }
}

fn remote(source: Source) -> Remote {
    Remote {
        name: "pv".to_owned(),
        claim: Some("ns/claim".to_owned()),
        mode: VolumeMode::Filesystem,
        read_only: false,
        mount_options: Vec::new(),
        unique_name: Some("unique".to_owned()),
        terms: crate::core::volumes::Terms::default(),
        source,
    }
}

fn nfs() -> Remote {
    remote(Source::Nfs(NFSVolumeSource {
        path: "/".to_owned(),
        server: "s".to_owned(),
        read_only: None,
    }))
}

fn local() -> Remote {
    remote(Source::Local(LocalVolumeSource {
        path: "/mnt/disk".to_owned(),
        fs_type: None,
    }))
}

fn csi() -> Remote {
    remote(Source::Csi(Box::new(Csi {
        source: CSIPersistentVolumeSource {
            driver: "d.example".to_owned(),
            volume_handle: "h".to_owned(),
            ..Default::default()
        },
        requires_republish: true,
        ..Default::default()
    })))
}

fn pod(uid: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}],
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/x"}]}],
        },
    }))
    .unwrap()
}

fn sources(remote: Remote) -> Sources {
    let resolved = Resolved {
        remote,
        secrets: BTreeMap::new(),
        tokens: BTreeMap::new(),
        capacity: None,
        missing: None,
    };
    let mut sources = Sources::default();
    sources
        .remotes
        .insert("v".to_owned(), Ok(Arc::new(resolved)));
    sources
}

impl World {
    async fn mount(&self, uid: &str, remote: Remote) -> Result<PathBuf, VolumeError> {
        self.mount_for(&pod(uid), remote).await
    }

    async fn mount_for(&self, pod: &Pod, remote: Remote) -> Result<PathBuf, VolumeError> {
        let sources = sources(remote);
        let paths = self.manager.mount(pod, &sources, &self.recorder);
        Ok(paths.await?.remove("v").unwrap())
    }

    fn told(&self) -> Vec<(String, String)> {
        let all = self.recorder.events().into_iter();
        all.map(|e| (e.reason, e.message)).collect()
    }

    fn in_use(&self) -> Vec<String> {
        let names = self.manager.volumes_in_use();
        names.borrow().names.iter().cloned().collect()
    }

    fn phase(&self, key: &str) -> Option<VolumePhase> {
        let seen = self.store.snapshot();
        seen.record::<VolumeRecord>(key).map(|r| r.phase)
    }
}

// Invariant VOL-4.
#[tokio::test(start_paused = true)]
async fn what_hangs_holds_up_its_own_pod_only() {
    let world = world();
    let gate = world.script.hang();
    let begun = Instant::now();
    let hung = world.mount("pod-a", nfs()).await.unwrap_err();
    assert_eq!(begun.elapsed().as_secs(), 123);
    assert_eq!(
        hung.to_string(),
        "Unable to attach or mount volumes: unmounted volumes=[v], unattached volumes=[], failed to process volumes=[]: timed out waiting for the condition"
    );
    let told = world.told();
    assert_eq!(told[0].0, "WaitingForVolumes");
    assert!(told[0].1.contains("v (volume_mount for 10s)"), "{told:?}");
    assert_eq!(told[1], ("FailedMount".to_owned(), hung.to_string()));
    assert_eq!(told.len(), 2, "{told:?}");

    // Another pod's volume of the same server.
    let begun = Instant::now();
    world.mount("pod-b", nfs()).await.unwrap();
    assert!(begun.elapsed().as_millis() < 100);
    assert_eq!(world.script.calls(), ["publish pod-a", "publish pod-b"]);

    // Nobody calls a second time, neither for a mount nor for its undoing.
    world.mount("pod-a", nfs()).await.unwrap_err();
    let slow = world.manager.unmount(&"pod-a".into()).await.unwrap_err();
    assert!(matches!(slow, VolumeError::Slow { .. }), "{slow}");
    assert!(slow.to_string().contains("v (volume_mount for"), "{slow}");
    assert_eq!(world.script.calls(), Vec::<String>::new());
    assert_eq!(world.phase("pod-a/v"), Some(VolumePhase::Mounting));
    assert!(
        world
            .manager
            .remove_pod_dirs(&"pod-a".into())
            .await
            .is_err()
    );

    gate.add_permits(1);
    world.manager.unmount(&"pod-a".into()).await.unwrap();
    assert_eq!(world.script.calls(), ["unpublish pod-a"]);
    assert_eq!(world.phase("pod-a/v"), None);
    world
        .manager
        .remove_pod_dirs(&"pod-a".into())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_directory_of_the_node_is_given_to_the_group_of_its_first_pod_only() {
    if !nix::unistd::geteuid().is_root() {
        return; // Only root can give files away.
    }
    let world = world();
    world.script.leaves_groups.store(true, Ordering::Relaxed);
    let with_group = |uid: &str, group: i64| {
        let mut pod = pod(uid);
        let context = &mut pod.spec.as_mut().unwrap().security_context;
        context.get_or_insert_default().fs_group = Some(group);
        pod
    };
    let owner = |path: &Path| std::fs::metadata(path).unwrap().gid();
    let first = with_group("pod-a", 1000);
    let path = world.mount_for(&first, local()).await.unwrap();
    assert_eq!(owner(&path), 1000);
    assert_eq!(world.told(), []);

    let path = world.mount_for(&with_group("pod-b", 2000), local()).await;
    let path = path.unwrap();
    assert_eq!(owner(&path), 0, "the first pod works with these files");
    let text = "The requested fsGroup is 2000, but the volume pv has GID 0. The volume may not be shareable.";
    let told = ("AlreadyMountedVolume".to_owned(), text.to_owned());
    assert_eq!(world.told(), [told]);

    // Storage elsewhere is given to each, as upstream does.
    let path = world.mount_for(&with_group("pod-c", 3000), nfs()).await;
    assert_eq!(owner(&path.unwrap()), 3000);
    for uid in ["pod-a", "pod-b"] {
        world.manager.unmount(&uid.into()).await.unwrap();
    }
    let path = world.mount_for(&with_group("pod-d", 4000), local()).await;
    assert_eq!(owner(&path.unwrap()), 4000);
}

#[tokio::test(start_paused = true)]
async fn the_time_until_a_volume_is_mounted_counts_from_the_first_request() {
    let mut world = world();
    let metrics = Metrics::default();
    world.manager = world.manager.clone().measured(metrics.clone());
    let value = |suffix: &str, plugin: &str| -> Option<f64> {
        let text = metrics.encode().unwrap();
        let start = format!(
            "volume_operation_total_seconds_{suffix}{{operation_name=\"overall_volume_mount\",plugin_name=\"{plugin}\"}} "
        );
        let line = text.lines().find_map(|line| line.strip_prefix(&start))?;
        line.parse().ok()
    };
    let failed = Answer::Fails(RemoteError::Failed("no route to host".to_owned()));
    world.script.then(failed);
    world.mount("pod-a", nfs()).await.unwrap_err();
    assert_eq!(value("count", NFS), None, "it is not there yet");
    tokio::time::sleep(Duration::from_secs(20)).await;
    world.mount("pod-a", nfs()).await.unwrap();
    let waited = value("sum", NFS).unwrap();
    assert!((20.0..21.0).contains(&waited), "{waited}");
    // What is there is not waited for.
    world.mount("pod-a", nfs()).await.unwrap();
    assert_eq!(value("count", NFS), Some(1.0));
    world.mount("pod-b", csi()).await.unwrap();
    assert_eq!(value("count", "kubernetes.io/csi:d.example"), Some(1.0));

    let failed = Answer::Fails(RemoteError::Failed("no route to host".to_owned()));
    world.script.then(failed);
    world.mount("pod-c", local()).await.unwrap_err();
    assert_eq!(world.manager.requested().len(), 1);
    world.manager.unmount(&"pod-c".into()).await.unwrap();
    assert!(
        world.manager.requested().is_empty(),
        "nothing is kept of a pod that went away without its volume"
    );
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_what_is_staged_is_told_for_which_step() {
    let world = world();
    let gate = world.script.hang();
    let (one, other) = tokio::join!(world.mount("pod-a", csi()), world.mount("pod-b", csi()));
    one.unwrap_err();
    other.unwrap_err();
    let mut told = world.told();
    told.retain(|(reason, _)| reason == "WaitingForVolumes");
    let expected = "Waiting for volumes: v (mount_device for 10s)";
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told.iter().all(|(_, text)| text == expected), "{told:?}");
    gate.add_permits(1);
    world.mount("pod-a", csi()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_fails_is_told_once_and_left_alone_for_a_while() {
    let world = world();
    let failed = |text: &str| Answer::Fails(RemoteError::Failed(text.to_owned()));
    world.script.then(failed("mount.nfs: no route to host"));
    let error = world.mount("pod-a", nfs()).await.unwrap_err();
    assert!(error.to_string().contains("no route to host"), "{error}");
    assert!(error.retry_at().is_some());
    let expected = (
        "FailedMount".to_owned(),
        "MountVolume.SetUp failed for volume \"pv\" : mount.nfs: no route to host".to_owned(),
    );
    assert_eq!(world.told(), std::slice::from_ref(&expected));
    // Too early.
    let error = world.mount("pod-a", nfs()).await.unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("no retries permitted until") && text.contains("(durationBeforeRetry 500ms)"),
        "{text}"
    );
    assert_eq!(world.script.calls(), ["publish pod-a"]);
    assert_eq!(world.told(), [expected]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    world.mount("pod-a", nfs()).await.unwrap();
    assert_eq!(world.script.calls(), ["publish pod-a"]);

    // Nothing took effect, so there is nothing to undo.
    world.script.then(failed("no"));
    world.mount("pod-b", nfs()).await.unwrap_err();
    world.manager.unmount(&"pod-b".into()).await.unwrap();
    assert_eq!(world.script.calls(), ["publish pod-b"]);
    // Nobody knows what took effect.
    let uncertain = RemoteError::Uncertain("deadline exceeded".to_owned());
    world.script.then(Answer::Fails(uncertain));
    world.mount("pod-c", nfs()).await.unwrap_err();
    world.manager.unmount(&"pod-c".into()).await.unwrap();
    assert_eq!(world.script.calls(), ["publish pod-c", "unpublish pod-c"]);
}

#[tokio::test(start_paused = true)]
async fn a_back_off_that_ends_early_is_over_and_the_next_one_is_longer() {
    let world = world();
    let failed = || Answer::Fails(RemoteError::Failed("no route to host".to_owned()));
    world.script.then(failed());
    world.mount("pod-a", nfs()).await.unwrap_err();
    let held = || async {
        match world.mount("pod-a", nfs()).await.unwrap_err() {
            VolumeError::Remote(failure) if !failure.fresh => failure,
            other => panic!("{other}"),
        }
    };
    let first = held().await;
    world.manager.end_back_off(&first);
    world.script.then(failed());
    world.mount("pod-a", nfs()).await.unwrap_err();
    assert_eq!(world.script.calls(), ["publish pod-a", "publish pod-a"]);
    // That one is over already: it ends no other.
    world.manager.end_back_off(&first);
    let second = held().await;
    assert_eq!(second.backoff.wait, 2 * first.backoff.wait);
    world.manager.end_back_off(&second);
    world.mount("pod-a", nfs()).await.unwrap();
    assert_eq!(world.script.calls(), ["publish pod-a"]);
}

#[tokio::test(start_paused = true)]
async fn an_attachment_that_is_waited_for_has_its_own_reason() {
    let world = world();
    let waiting = RemoteError::Waiting("volume is not attached to this node yet".to_owned());
    world.script.then(Answer::Fails(waiting));
    world.mount("pod-a", csi()).await.unwrap_err();
    let told = world.told();
    assert_eq!(told[0].0, "FailedAttachVolume");
    assert_eq!(
        told[0].1,
        "MountVolume.MountDevice failed for volume \"pv\" : volume is not attached to this node yet"
    );
    // Nothing was staged: no device on record.
    assert_eq!(world.store.snapshot().volumes.len(), 1);
    world.manager.unmount(&"pod-a".into()).await.unwrap();
    assert_eq!(world.script.calls(), ["stage device"]);
    assert_eq!(world.store.snapshot().objects.len(), 0);
    let mut unresolved = Sources::default();
    let why = "PersistentVolumeClaim is not bound".to_owned();
    unresolved.remotes.insert("v".to_owned(), Err(why));
    let pod = pod("pod-a");
    let mounting = world.manager.mount(&pod, &unresolved, &world.recorder);
    mounting.await.unwrap_err();
    let (reason, text) = world.told().pop().unwrap();
    assert_eq!(reason, "FailedMount");
    assert!(
        text.contains("\"v\"") && text.contains("not bound"),
        "{text}"
    );
}

// Invariant VOL-6.
#[tokio::test(start_paused = true)]
async fn pods_share_what_is_staged_and_the_last_one_takes_it_along() {
    let world = world();
    assert_eq!(world.in_use(), Vec::<String>::new());
    let gate = world.script.hang();
    let mounting = tokio::spawn({
        let (manager, recorder) = (world.manager.clone(), world.recorder.clone());
        async move {
            let sources = sources(csi());
            manager.mount(&pod("pod-a"), &sources, &recorder).await
        }
    });
    while world.script.calls.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(world.in_use(), ["unique"], "in use before it is staged");
    gate.add_permits(1);
    let path = mounting.await.unwrap().unwrap().remove("v").unwrap();
    assert!(path.ends_with("pods/pod-a/volumes/kubernetes.io~csi/pv/mount"));
    world.mount("pod-b", csi()).await.unwrap();
    assert_eq!(
        world.script.calls(),
        ["stage device", "publish pod-a", "publish pod-b"]
    );
    let listed = world.manager.remote_volumes();
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[0].path, path);
    assert_eq!(listed[0].claim.as_deref(), Some("ns/claim"));
    let staged = listed[0].staged.clone().unwrap();
    assert!(staged.ends_with("globalmount"), "{}", staged.display());

    world.manager.unmount(&"pod-a".into()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(world.script.calls(), ["unpublish pod-a"]);
    assert_eq!(world.in_use(), ["unique"]);
    // Busy at first: it is tried again until it succeeds, and nobody waits.
    let busy = || Answer::Fails(RemoteError::Uncertain("target is busy".to_owned()));
    world.script.then(Answer::Succeeds);
    world.script.then(busy());
    world.script.then(busy());
    world.manager.unmount(&"pod-b".into()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(world.in_use(), ["unique"], "it is still staged");
    tokio::time::sleep(Duration::from_secs(5)).await;
    let calls = world.script.calls();
    assert_eq!(
        calls,
        [
            "unpublish pod-b",
            "unstage device",
            "unstage device",
            "unstage device"
        ]
    );
    assert_eq!(world.in_use(), Vec::<String>::new());
    assert_eq!(world.store.snapshot().volumes.len(), 0);
    assert_eq!(world.store.snapshot().objects.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_busy_unmount_is_told_and_tried_again() {
    let world = world();
    let pod = pod("pod-a");
    let record = PodRecord {
        source: PodSource::Api,
        origin: String::new(),
        pod: Json(Arc::new(pod.clone())),
        first_seen: world.manager.clock.now(),
        confirmed_epoch: 1,
    };
    let known = Transaction::new().put("pod-a", record);
    world.store.commit(known).await.unwrap();
    world.mount("pod-a", local()).await.unwrap();
    world.script.calls();
    let busy = RemoteError::Failed("umount: target is busy".to_owned());
    world.script.then(Answer::Fails(busy));
    let uid = pod.uid();
    let error = world.manager.unmount(&uid).await.unwrap_err();
    assert_eq!(world.phase("pod-a/v"), Some(VolumePhase::Unmounting));
    let told = world.recorder.events();
    assert_eq!(
        (told[0].kind, told[0].reason.as_str()),
        (EventType::Warning, "FailedUnMount")
    );
    assert!(told[0].message.contains("volume v") && told[0].message.contains("busy"));
    assert!(error.to_string().contains("unmount volume v"), "{error}");
    let now = world.manager.clock.now();
    let due = error.retry_at().map(|due| due.until(now).as_millis());
    assert_eq!(due, Some(500));
    // At once again: left alone, and not told again.
    world.manager.unmount(&uid).await.unwrap_err();
    assert_eq!(world.recorder.events().len(), 1);
    assert_eq!(world.script.calls(), ["unpublish pod-a"]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.manager.unmount(&uid).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.script.calls(), ["unpublish pod-a", "unstage device"]);
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_panics_fails_its_step() {
    let world = world();
    world.script.then(Answer::Panics);
    let error = world.mount("pod-a", nfs()).await.unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.mount("pod-a", nfs()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_wants_so_is_published_again_at_each_sync() {
    let world = world();
    world.mount("pod-a", csi()).await.unwrap();
    world.script.calls();
    let (pod, uid) = (pod("pod-a"), PodUid::new("pod-a"));
    let version = || {
        world
            .store
            .snapshot()
            .get::<VolumeRecord>("pod-a/v")
            .unwrap()
            .version
    };
    let before = version();
    assert!(world.manager.wants_republish(&uid));
    let sources = sources(csi());
    world.mount("pod-a", csi()).await.unwrap();
    assert_eq!(world.script.calls(), Vec::<String>::new());
    let refresh = || world.manager.refresh(&pod, &sources, &world.recorder);
    refresh().await.unwrap();
    assert_eq!(world.script.calls(), ["publish pod-a"]);
    // A failure leaves it mounted.
    let failure = RemoteError::Failed("token expired".to_owned());
    world.script.then(Answer::Fails(failure));
    refresh().await.unwrap_err();
    assert_eq!(world.phase("pod-a/v"), Some(VolumePhase::Mounted));
    assert_eq!(version(), before, "nothing is recorded for it");
}

#[tokio::test(start_paused = true)]
async fn a_restart_calls_no_plugin_and_an_orphan_device_is_unstaged() {
    let world = world();
    world.mount("pod-a", csi()).await.unwrap();
    world.script.calls();
    let clock = Arc::clone(&world.manager.clock);
    let again = || {
        let root = world.manager.root.clone();
        VolumeManager::new(root, None, world.store.clone(), Arc::clone(&clock))
            .with_plugin(CSI, Arc::clone(&world.script) as _)
    };
    let next = again();
    let found = next.reconcile().await.unwrap();
    assert_eq!((found.mounted, found.missing, found.cut_off), (2, 0, 0));
    let sources = sources(csi());
    let pod = pod("pod-a");
    next.mount(&pod, &sources, &world.recorder).await.unwrap();
    assert_eq!(world.script.calls(), Vec::<String>::new());
    // The former managers look for the last time; they would do what the next one is to do.
    drop(next);
    tokio::time::sleep(Duration::from_secs(10)).await;
    // Killed between the last unpublish and the unstage.
    let gone = Transaction::new()
        .delete::<VolumeRecord>("pod-a/v")
        .delete::<FactRecord>("volumes/pod-a/v");
    world.store.commit(gone).await.unwrap();
    let after = again();
    after.reconcile().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.script.calls(), ["unstage device"]);
    assert_eq!(world.store.snapshot().volumes.len(), 0);
    // Orphans: the key of a device is not the UID of a pod.
    world.mount("pod-b", csi()).await.unwrap();
    let known = BTreeSet::from(["pod-a", "pod-b"].map(PodUid::new));
    assert!(world.manager.cleanup_orphan_dirs(&known).await.is_empty());
    assert!(world.phase("pod-b/v").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_volume_for_one_pod_goes_to_the_next_one_when_the_first_has_gone() {
    for volume in [csi(), nfs()] {
        let world = world();
        let mut volume = volume;
        volume.terms.alone = true;
        world.mount("pod-a", volume.clone()).await.unwrap();
        world.mount("pod-a", volume.clone()).await.unwrap();
        world.script.calls();
        let error = world.mount("pod-b", volume.clone()).await.unwrap_err();
        let text =
            "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
        assert!(error.to_string().contains(text), "{error}");
        assert!(error.retry_at().is_some());
        let told = (
            "FailedMount".to_owned(),
            format!("MountVolume.SetUp failed for volume \"pv\" : {text}"),
        );
        assert_eq!(world.told(), [told]);
        assert_eq!(world.script.calls(), Vec::<String>::new());
        tokio::time::sleep(Duration::from_secs(1)).await;
        world.mount("pod-b", volume.clone()).await.unwrap_err();

        // It is not held back any longer than the first one is there.
        world.manager.unmount(&"pod-a".into()).await.unwrap();
        world.mount("pod-b", volume.clone()).await.unwrap();
        assert_eq!(world.script.calls(), ["unpublish pod-a", "publish pod-b"]);
        let error = world.mount("pod-a", volume.clone()).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");

        // Many may have what is not for one alone.
        volume.terms.alone = false;
        volume.name = "shared".to_owned();
        world.mount("pod-c", volume.clone()).await.unwrap();
        world.mount("pod-d", volume).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_pods_that_come_at_once_one_has_the_volume() {
    for volume in [csi(), nfs()] {
        let world = world();
        let mut volume = volume;
        volume.terms.alone = true;
        let both = tokio::join!(
            world.mount("pod-a", volume.clone()),
            world.mount("pod-b", volume.clone())
        );
        let mounted = [both.0.is_ok(), both.1.is_ok()];
        assert!(mounted[0] != mounted[1], "{mounted:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_size_of_a_device_is_on_record_as_long_as_the_device() {
    let world = world();
    let device = csi();
    world.manager.note_size(&device, 5).await.unwrap();
    assert_eq!(world.manager.size_here(&device), None, "it is not staged");
    for uid in ["pod-a", "pod-b"] {
        world.mount(uid, device.clone()).await.unwrap();
    }
    world.manager.note_size(&device, 5).await.unwrap();
    world.manager.note_size(&device, 7).await.unwrap();
    world.manager.unmount(&"pod-a".into()).await.unwrap();
    assert_eq!(world.manager.size_here(&device), Some(7));
    world.manager.unmount(&"pod-b".into()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.manager.size_here(&device), None);
    let seen = world.store.snapshot();
    assert_eq!(seen.with_prefix::<FactRecord>("").count(), 0);
    // What is mounted for each pod by itself has no size of its own.
    world.mount("pod-a", nfs()).await.unwrap();
    world.manager.note_size(&nfs(), 5).await.unwrap();
    assert_eq!(world.manager.size_here(&nfs()), None);
}

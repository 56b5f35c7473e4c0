//! Cost of waiting, and that every waiter is woken.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, mpsc};

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, NFSVolumeSource, Pod};
use serde_json::json;
use tokio::sync::{Semaphore, watch};

use super::mounts::{Kernel, Mount, Table};
use super::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use super::*;
use crate::core::state::{VolumePhase, VolumeRecord};
use crate::core::volumes::{Csi, Remote, Source, Terms, VolumeMode};
use crate::kuberuntime::sources::{Resolved, Sources};
use crate::types::events::MemoryRecorder;
use crate::types::{BootId, Stamp};

/// Time within which a woken task has proceeded, even if other tasks take the slots of blocking work. Nothing else
/// wakes it for two minutes.
const WOKEN: Duration = Duration::from_secs(60);

struct Fixed;

impl Clock for Fixed {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        }
    }
}

/// Storage whose calls each take longer than the one before, so that no two end at once.
#[derive(Default)]
struct Slow {
    mounted: Arc<Mutex<BTreeSet<PathBuf>>>,
    calls: AtomicU64,
    /// Gate that calls for a pod and for expansion wait for.
    gate: Mutex<Option<Arc<Semaphore>>>,
}

impl Slow {
    fn hang(&self) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        *self.gate.lock().unwrap() = Some(Arc::clone(&gate));
        gate
    }

    fn call<T: Send + 'static>(
        &self,
        answer: T,
        deed: impl FnOnce(&mut BTreeSet<PathBuf>) + Send + 'static,
    ) -> BoxFuture<'static, Result<T, RemoteError>> {
        let calls = self.calls.fetch_add(1, SeqCst);
        let mounted = Arc::clone(&self.mounted);
        let gate = self.gate.lock().unwrap().take();
        Box::pin(async move {
            if let Some(gate) = gate {
                drop(gate.acquire().await);
            }
            tokio::time::sleep(Duration::from_millis(calls)).await;
            deed(&mut mounted.lock().unwrap());
            Ok(answer)
        })
    }
}

impl RemotePlugin for Slow {
    fn stage(&self, _: Arc<Resolved>, at: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.call((), |mounted| mounted.extend([at]))
    }

    fn publish(
        &self,
        _: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        let deed = |mounted: &mut BTreeSet<_>| mounted.extend([target.path]);
        self.call(GroupBy::Nobody, deed)
    }

    fn unpublish(
        &self,
        _: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.call((), move |mounted| mounted.retain(|at| *at != path))
    }

    fn unstage(&self, _: Arc<Remote>, at: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        self.call((), move |mounted| mounted.retain(|there| *there != at))
    }

    fn expand(
        &self,
        _: Arc<Resolved>,
        _: Option<PathBuf>,
        _: PathBuf,
        bytes: u64,
    ) -> BoxFuture<'static, Result<Option<u64>, RemoteError>> {
        self.call(Some(bytes), |_| {})
    }
}

/// Mounts of a [`Slow`].
struct Shown {
    mounted: Arc<Mutex<BTreeSet<PathBuf>>>,
    /// True if it reports changes; then also the mounts at its last report.
    tells: bool,
    told: Mutex<BTreeSet<PathBuf>>,
}

impl Kernel for Shown {
    fn read(&self) -> std::io::Result<Table> {
        let mounted = self.mounted.lock().unwrap();
        Ok(Table::of(
            mounted.iter().cloned().map(Mount::fake).collect(),
        ))
    }

    fn changed(&self) -> Option<bool> {
        let now = self.mounted.lock().unwrap().clone();
        let changed = now != *self.told.lock().unwrap();
        *self.told.lock().unwrap() = now;
        self.tells.then_some(changed)
    }
}

struct World {
    _dir: tempfile::TempDir,
    root: PathBuf,
    store: Store,
    slow: Arc<Slow>,
    manager: VolumeManager,
    recorder: MemoryRecorder,
}

fn world(tells: bool) -> World {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap().join("root");
    let store = Store::in_memory(Arc::new(Fixed));
    let slow = Arc::new(Slow::default());
    let mut manager = VolumeManager::new(&root, None, store.clone(), Arc::new(Fixed))
        .with_plugin(NFS, Arc::clone(&slow) as _)
        .with_plugin(CSI, Arc::clone(&slow) as _);
    let shown = Shown {
        mounted: Arc::clone(&slow.mounted),
        tells,
        told: Mutex::default(),
    };
    manager.mounts = mounts::Source::with(&root, shown);
    World {
        _dir: dir,
        root,
        store,
        slow,
        manager,
        recorder: MemoryRecorder::default(),
    }
}

fn remote(name: &str, source: Source) -> Remote {
    Remote {
        name: name.to_owned(),
        claim: None,
        mode: VolumeMode::Filesystem,
        read_only: false,
        mount_options: Vec::new(),
        unique_name: None,
        terms: Terms::default(),
        source,
    }
}

fn nfs(name: &str) -> Remote {
    let source = NFSVolumeSource {
        path: "/".to_owned(),
        server: "s".to_owned(),
        read_only: None,
    };
    remote(name, Source::Nfs(source))
}

fn csi() -> Remote {
    let source = Csi {
        source: CSIPersistentVolumeSource {
            driver: "d".to_owned(),
            volume_handle: "h".to_owned(),
            ..Default::default()
        },
        ..Default::default()
    };
    remote("pv", Source::Csi(Box::new(source)))
}

fn resolved(remote: Remote) -> Arc<Resolved> {
    Arc::new(Resolved {
        remote,
        secrets: BTreeMap::new(),
        tokens: BTreeMap::new(),
        capacity: None,
        missing: None,
    })
}

/// A pod with these volumes, by name.
fn pod(uid: &str, remotes: Vec<Remote>) -> (Pod, Sources) {
    let mut sources = Sources::default();
    let (mut volumes, mut mounts) = (Vec::new(), Vec::new());
    for remote in remotes {
        let name = remote.name.clone();
        volumes.push(json!({"name": name, "persistentVolumeClaim": {"claimName": "x"}}));
        mounts.push(json!({"name": name, "mountPath": "/x"}));
        sources.remotes.insert(name, Ok(resolved(remote)));
    }
    let pod = serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    }));
    (pod.unwrap(), sources)
}

impl World {
    async fn mount(&self, (pod, sources): &(Pod, Sources)) {
        let mounting = self.manager.mount(pod, sources, &self.recorder);
        mounting.await.unwrap();
    }

    /// Returns the cost for pods with four volumes each that all wait at once: number of table reads and of passes, for
    /// mounting and for unmounting.
    async fn cost(&self, pods: usize) -> [u64; 4] {
        let names = ["a", "b", "c", "d"];
        let pods: Vec<_> = (0..pods)
            .map(|n| pod(&format!("pod-{n}"), names.map(nfs).to_vec()))
            .collect();
        let so_far = || (self.manager.mounts.reads(), self.manager.desk().rounds);
        let before = so_far();
        join_all(pods.iter().map(|pod| self.mount(pod))).await;
        let between = so_far();
        let all = self.slow.mounted.lock().unwrap().len();
        assert_eq!(all, pods.len() * names.len());
        let unmounted = join_all(pods.iter().map(|(pod, _)| async {
            let uid = crate::types::PodExt::uid(pod);
            self.manager.unmount(&uid).await
        }));
        assert!(unmounted.await.iter().all(Result::is_ok));
        assert!(self.slow.mounted.lock().unwrap().is_empty());
        let after = so_far();
        [
            between.0 - before.0,
            between.1 - before.1,
            after.0 - between.0,
            after.1 - between.1,
        ]
    }

    fn phase(&self, key: &str) -> Option<VolumePhase> {
        let seen = self.store.snapshot();
        seen.record::<VolumeRecord>(key).map(|r| r.phase)
    }

    /// Waits until there is nothing to look at any more.
    async fn at_rest(&self) {
        while self.manager.desk().driving {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_waiting_costs_grows_with_the_volumes_and_not_with_their_square() {
    for tells in [false, true] {
        let ten = world(tells).cost(10).await;
        let hundred = world(tells).cost(100).await;
        println!(
            "tables read and rounds of 10 and 100 pods (the kernel tells: {tells}): {ten:?}, {hundred:?}"
        );
        // A claim, a mount and the look of who waits; and one look at what was mounted.
        for (cost, volumes) in [(ten, 40), (hundred, 400)] {
            assert!(cost.iter().all(|n| *n <= 4 * volumes), "{cost:?}");
        }
        for (few, many) in ten.into_iter().zip(hundred) {
            // Of few, many happen to end at once.
            assert!(many <= 12 * few.max(40), "{ten:?} {hundred:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_sync_of_what_is_there_reads_the_table_once_or_not_at_all() {
    for tells in [false, true] {
        let world = world(tells);
        let pod = pod("pod-a", ["a", "b", "c", "d"].map(nfs).to_vec());
        world.mount(&pod).await;
        world.at_rest().await;
        let before = world.manager.mounts.reads();
        world.mount(&pod).await;
        let reads = world.manager.mounts.reads() - before;
        assert_eq!(reads, u64::from(!tells), "the kernel tells: {tells}");
    }
}

/// A table that takes until it is let go.
struct Hung {
    begun: watch::Sender<bool>,
    go: Mutex<mpsc::Receiver<()>>,
    late: Arc<AtomicBool>,
}

impl Kernel for Hung {
    fn read(&self) -> std::io::Result<Table> {
        self.begun.send_replace(true);
        let go = self.go.lock().unwrap();
        if let Err(mpsc::RecvTimeoutError::Timeout) = go.recv_timeout(Duration::from_secs(20)) {
            self.late.store(true, SeqCst);
        }
        Ok(Table::default())
    }

    fn changed(&self) -> Option<bool> {
        None
    }
}

// Invariant VOL-5.
#[tokio::test]
async fn nobody_is_held_up_while_the_table_is_read() {
    let mut world = world(false);
    let (go, may_go) = mpsc::channel();
    let (begun, mut has_begun) = watch::channel(false);
    let late = Arc::new(AtomicBool::new(false));
    let hung = Hung {
        begun,
        go: Mutex::new(may_go),
        late: Arc::clone(&late),
    };
    world.manager.mounts = mounts::Source::with(&world.root, hung);
    let mounting = tokio::spawn({
        let (manager, recorder) = (world.manager.clone(), world.recorder.clone());
        let (pod, sources) = pod("pod-a", vec![nfs("v")]);
        async move { manager.mount(&pod, &sources, &recorder).await }
    });
    has_begun.wait_for(|begun| *begun).await.unwrap();
    // All of these need the desk.
    assert!(world.manager.remote_volumes().is_empty());
    assert!(world.manager.volumes_in_use().borrow().names.is_empty());
    world.manager.unmount(&"pod-b".into()).await.unwrap();
    let left = world.manager.leave(&"pod-b".into()).now_or_never();
    assert!(left.is_none(), "it waits for a round");
    drop(go);
    mounting.await.unwrap().unwrap();
    assert!(!late.load(SeqCst), "a thread of the runtime was held up");
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_what_grows_goes_on_when_it_has_grown() {
    let world = world(true);
    world.mount(&pod("pod-a", vec![csi()])).await;
    world.at_rest().await;
    let gate = world.slow.hang();
    let uid = PodUid::new("pod-a");
    let growing = world.manager.expand(&uid, "pv", resolved(csi()), 7);
    let next = pod("pod-b", vec![csi()]);
    let mounting = world.mount(&next);
    let begun = Instant::now();
    let let_go = async {
        while world.phase("pod-b/pv").is_none() {
            tokio::task::yield_now().await;
        }
        world.at_rest().await;
        assert!(
            world
                .manager
                .operations
                .is_busy(&csi().device_key().unwrap())
        );
        assert_eq!(world.phase("pod-b/pv"), Some(VolumePhase::Mounting));
        gate.add_permits(1);
    };
    let (grown, (), ()) = tokio::join!(growing, mounting, let_go);
    assert_eq!(grown.unwrap(), Some(7));
    assert!(begun.elapsed() < WOKEN, "somebody had to wake it");
}

#[tokio::test(start_paused = true)]
async fn each_of_those_who_wait_for_a_volume_is_answered() {
    // Some rounds of the runtime then bring each waiter to where it waits.
    crate::types::blocking::run_in_place_on_this_thread();
    let world = world(true);
    let gate = world.slow.hang();
    let of = pod("pod-a", vec![nfs("v")]);
    let (mut first, mut second) = (Box::pin(world.mount(&of)), Box::pin(world.mount(&of)));
    let mut third = Box::pin(world.mount(&of));
    let mut rounds = 0;
    while world.slow.calls.load(SeqCst) == 0 || rounds < 50 {
        for waiter in [&mut first, &mut second, &mut third] {
            assert!(futures::poll!(waiter).is_pending());
        }
        tokio::task::yield_now().await;
        rounds += 1;
    }
    // The newest goes: the others still wait.
    drop(third);
    gate.add_permits(1);
    let begun = Instant::now();
    tokio::join!(first, second);
    assert!(begun.elapsed() < WOKEN, "one was forgotten");
    assert_eq!(world.slow.calls.load(SeqCst), 1);
}

//! The real manager over a model of the world: storage that can be staged and published, a mount table, plugins that
//! are slow, fail, and fail after the deed; pods come and go, nobody waits to the end, the agent is killed and
//! the machine reboots.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, NFSVolumeSource, Pod};
use proptest::prelude::*;
use serde_json::json;

use super::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use super::*;
use crate::core::state::{VolumePhase, VolumeRecord};
use crate::core::volumes::keys::Mark;
use crate::core::volumes::records;
use crate::core::volumes::{Csi, Remote, Source, VolumeMode};
use crate::kuberuntime::sources::{Resolved, Sources};
use crate::types::events::MemoryRecorder;
use crate::types::{BootId, Stamp};

/// What is there, whoever manages it.
#[derive(Default)]
struct Kernel {
    /// Staging path to the volumes published from it.
    staged: BTreeMap<PathBuf, BTreeSet<PathBuf>>,
    published: BTreeMap<PathBuf, Option<PathBuf>>,
    /// Published with success, and never undone since.
    settled: BTreeSet<PathBuf>,
    /// Paths that a plugin works on.
    running: BTreeSet<PathBuf>,
    alive: BTreeSet<String>,
    /// What must not happen.
    violations: Vec<String>,
    /// Chance of a failure in percent.
    fail: u32,
    random: u64,
    calls: u64,
}

impl Kernel {
    fn next(&mut self, below: u64) -> u64 {
        // Xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn wrong(&mut self, text: String) {
        self.violations.push(text);
    }
}

#[derive(Clone)]
struct Fake {
    kernel: Arc<Mutex<Kernel>>,
    store: Store,
    /// Whether staging shows in the mount table.
    mounts: bool,
}

/// A path that a plugin works on.
struct Working(Arc<Mutex<Kernel>>, PathBuf);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.lock().unwrap().running.remove(&self.1);
    }
}

impl Fake {
    /// One call: a while, maybe the deed, a while, an answer.
    fn call<T: Send + 'static>(
        &self,
        path: PathBuf,
        answer: T,
        check: impl FnOnce(&mut Kernel, &Store) + Send + 'static,
        deed: impl FnOnce(&mut Kernel) + Send + 'static,
        good: impl FnOnce(&mut Kernel) + Send + 'static,
    ) -> BoxFuture<'static, Result<T, RemoteError>> {
        let (kernel, store) = (Arc::clone(&self.kernel), self.store.clone());
        Box::pin(async move {
            let (before, after, fails, kind) = {
                let mut k = kernel.lock().unwrap();
                k.calls += 1;
                if !k.running.insert(path.clone()) {
                    let text = format!("two steps at once on {}", path.display());
                    k.wrong(text);
                }
                check(&mut k, &store);
                let fail = u64::from(k.fail);
                (k.next(4), k.next(4), k.next(100) < fail, k.next(4))
            };
            let _working = Working(Arc::clone(&kernel), path);
            for _ in 0..before {
                tokio::task::yield_now().await;
            }
            if before == 3 {
                tokio::time::sleep(Duration::from_millis(700)).await;
            }
            if fails && kind < 2 {
                let text = "not now".to_owned();
                return Err(match kind {
                    0 => RemoteError::Failed(text),
                    _ => RemoteError::Waiting(text),
                });
            }
            if !fails || kind == 2 {
                deed(&mut kernel.lock().unwrap());
            }
            for _ in 0..after {
                tokio::task::yield_now().await;
            }
            if fails {
                return Err(RemoteError::Uncertain("no answer".to_owned()));
            }
            good(&mut kernel.lock().unwrap());
            Ok(answer)
        })
    }
}

fn at_path<'a>(
    state: &'a crate::core::state::State,
    path: &'a Path,
) -> impl Iterator<Item = (&'a Arc<str>, &'a VolumeRecord)> {
    let all = state.with_prefix::<VolumeRecord>("");
    all.filter(move |(_, r)| Path::new(&r.path) == path)
}

impl RemotePlugin for Fake {
    fn stage(
        &self,
        volume: Arc<Resolved>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let (of, there) = (at.clone(), at.clone());
        let device = volume.remote.device_key().unwrap();
        self.call(
            at,
            (),
            move |k, store| {
                let seen = store.snapshot();
                let phase = seen.record::<VolumeRecord>(&device).map(|r| r.phase);
                if phase != Some(VolumePhase::Mounting) {
                    k.wrong(format!("stage with {phase:?} on record"));
                }
                let used = records::volumes(&seen).map(|found| found.content.unwrap());
                if !used
                    .map(|content| content.device)
                    .any(|key| key.as_deref() == Some(&*device))
                {
                    k.wrong("stage for nobody on record".to_owned());
                }
                if !of.parent().unwrap().is_dir() {
                    k.wrong("no parent to stage in".to_owned());
                }
            },
            move |k| {
                k.staged.entry(there).or_default();
            },
            |_| {},
        )
    }

    fn publish(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        let Target { pod, staged, path } = target;
        drop(pod);
        let (from, of, to) = (staged.clone(), path.clone(), path.clone());
        let needs = volume.remote.device_key().is_some();
        self.call(
            path.clone(),
            GroupBy::Nobody,
            move |k, store| {
                let seen = store.snapshot();
                let begun = at_path(&seen, &of).any(|(key, r)| {
                    let mark = records::description(&seen, key).map(|found| found.mark);
                    r.phase == VolumePhase::Mounting && mark == Some(Mark::Begun)
                });
                if !begun {
                    k.wrong(format!("publish without a record at {}", of.display()));
                }
                if needs != from.is_some() {
                    k.wrong("staging path of what is not staged".to_owned());
                }
                if from.as_ref().is_some_and(|s| !k.staged.contains_key(s)) {
                    k.wrong("publish from what is not staged".to_owned());
                }
                if k.settled.contains(&of) {
                    k.wrong(format!("mounted twice at {}", of.display()));
                }
            },
            move |k| {
                if let Some(users) = staged.as_ref().and_then(|s| k.staged.get_mut(s)) {
                    users.insert(to.clone());
                }
                k.published.insert(to, staged);
            },
            move |k| {
                k.settled.insert(path);
            },
        )
    }

    fn unpublish(
        &self,
        _: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let (of, gone) = (path.clone(), path.clone());
        self.call(
            path,
            (),
            move |k, store| {
                let seen = store.snapshot();
                if !at_path(&seen, &of).any(|(_, r)| r.phase == VolumePhase::Unmounting) {
                    k.wrong("unpublish without a record".to_owned());
                }
                let alive = k.alive.clone();
                if alive
                    .iter()
                    .any(|uid| of.iter().any(|part| part == uid.as_str()))
                {
                    k.wrong(format!("unmount of what is used at {}", of.display()));
                }
                k.settled.remove(&of);
            },
            move |k| {
                if let Some(Some(staged)) = k.published.remove(&gone)
                    && let Some(users) = k.staged.get_mut(&staged)
                {
                    users.remove(&gone);
                }
            },
            |_| {},
        )
    }

    fn unstage(&self, _: Arc<Remote>, at: PathBuf) -> BoxFuture<'static, Result<(), RemoteError>> {
        let (of, gone) = (at.clone(), at.clone());
        self.call(
            at,
            (),
            move |k, store| {
                let seen = store.snapshot();
                if !at_path(&seen, &of).any(|(_, r)| r.phase == VolumePhase::Unmounting) {
                    k.wrong("unstage without a record".to_owned());
                }
                if k.staged.get(&of).is_some_and(|users| !users.is_empty()) {
                    k.wrong(format!("unstage of what is used at {}", of.display()));
                }
            },
            move |k| {
                k.staged.remove(&gone);
            },
            |_| {},
        )
    }
}

/// The mount table.
struct Shown {
    kernel: Arc<Mutex<Kernel>>,
    /// Whether staging shows in it.
    staged: bool,
    /// Whether it says when it has changed, and what it was when it did so.
    tells: bool,
    told: Mutex<Vec<PathBuf>>,
}

impl Shown {
    fn points(&self) -> Vec<PathBuf> {
        let k = self.kernel.lock().unwrap();
        let staged = k.staged.keys().filter(|_| self.staged);
        k.published.keys().chain(staged).cloned().collect()
    }
}

impl mounts::Kernel for Shown {
    fn read(&self) -> io::Result<mounts::Table> {
        let points = self.points().into_iter();
        Ok(mounts::Table::of(points.map(mounts::Mount::fake).collect()))
    }

    fn changed(&self) -> Option<bool> {
        let now = self.points();
        let mut told = self.told.lock().unwrap();
        let changed = now != *told;
        *told = now;
        self.tells.then_some(changed)
    }
}

/// Time that goes on with that of the runtime, and over its end.
struct ModelClock {
    base: Mutex<(i64, Option<Instant>)>,
    boot: Mutex<u64>,
}

impl Clock for ModelClock {
    fn now(&self) -> Stamp {
        let (base, since) = *self.base.lock().unwrap();
        let more = since.map_or(0, |s| s.elapsed().as_millis() as i64);
        Stamp {
            boot: BootId(*self.boot.lock().unwrap()),
            boottime_ms: base + more,
            wall_ms: base + more,
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Add(usize),
    /// One more waits for the mounts of a pod.
    Join(usize),
    /// Who waited first for the mounts of a pod does so no more, and comes back.
    Abandon(usize),
    Remove(usize),
    Yield(u8),
    Wait(u16),
    Fail(u8),
    Crash,
    Reboot,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let one = prop_oneof![
        5 => (0..4_usize).prop_map(Action::Add),
        2 => (0..4_usize).prop_map(Action::Join),
        1 => (0..4_usize).prop_map(Action::Abandon),
        4 => (0..4_usize).prop_map(Action::Remove),
        6 => (1..30_u8).prop_map(Action::Yield),
        3 => (1..3000_u16).prop_map(Action::Wait),
        2 => prop_oneof![Just(0_u8), Just(30), Just(80)].prop_map(Action::Fail),
        2 => Just(Action::Crash),
        1 => Just(Action::Reboot),
    ];
    proptest::collection::vec(one, 1..40)
}

fn csi(name: &str, handle: &str) -> Remote {
    Remote {
        name: name.to_owned(),
        claim: Some("ns/claim".to_owned()),
        mode: VolumeMode::Filesystem,
        read_only: false,
        mount_options: Vec::new(),
        unique_name: Some(format!("kubernetes.io/csi/d^{handle}")),
        terms: crate::core::volumes::Terms::default(),
        source: Source::Csi(Box::new(Csi {
            source: CSIPersistentVolumeSource {
                driver: "d".to_owned(),
                volume_handle: handle.to_owned(),
                ..Default::default()
            },
            ..Default::default()
        })),
    }
}

fn nfs() -> Remote {
    Remote {
        name: "c".to_owned(),
        claim: None,
        mode: VolumeMode::Filesystem,
        read_only: false,
        mount_options: Vec::new(),
        unique_name: None,
        terms: crate::core::volumes::Terms::default(),
        source: Source::Nfs(NFSVolumeSource {
            path: "/".to_owned(),
            server: "s".to_owned(),
            read_only: None,
        }),
    }
}

fn sources(index: usize) -> Sources {
    let volumes = [
        (
            "a",
            csi(&format!("pv-{}", index % 2), &format!("h{}", index % 2)),
        ),
        ("b", csi("shared", "h2")),
        ("c", nfs()),
        // The same volume by another name: one target.
        ("d", csi("shared", "h2")),
    ];
    let mut sources = Sources::default();
    for (name, remote) in volumes {
        let resolved = Resolved {
            remote,
            secrets: BTreeMap::new(),
            tokens: BTreeMap::new(),
            capacity: None,
            missing: None,
        };
        sources
            .remotes
            .insert(name.to_owned(), Ok(Arc::new(resolved)));
    }
    sources
}

fn pod(uid: &str) -> Pod {
    let names = ["a", "b", "c", "d", "own"];
    let volumes: Vec<_> = names
        .iter()
        .map(|name| match *name {
            "own" => json!({"name": name, "emptyDir": {}}),
            _ => json!({"name": name, "persistentVolumeClaim": {"claimName": "x"}}),
        })
        .collect();
    let mounts: Vec<_> = names
        .iter()
        .map(|name| json!({"name": name, "mountPath": "/x"}))
        .collect();
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    }))
    .unwrap()
}

struct Model {
    dir: tempfile::TempDir,
    clock: Arc<ModelClock>,
    store: Store,
    kernel: Arc<Mutex<Kernel>>,
    mounts: bool,
    tells: bool,
    /// Generation of each pod that is wanted.
    pods: BTreeMap<usize, String>,
    gone: BTreeSet<String>,
    generation: usize,
    life: Option<Life>,
}

/// One process.
struct Life {
    runtime: tokio::runtime::Runtime,
    manager: VolumeManager,
    /// Those who wait for the mounts of each pod.
    mounting: BTreeMap<String, Vec<tokio::task::JoinHandle<()>>>,
    mounted: Arc<Mutex<BTreeSet<String>>>,
    leaving: BTreeMap<String, tokio::task::JoinHandle<()>>,
}

impl Model {
    fn new(seed: u64, mounts: bool, tells: bool) -> Self {
        let clock = Arc::new(ModelClock {
            base: Mutex::new((1, None)),
            boot: Mutex::new(1),
        });
        let kernel = Kernel {
            random: seed | 1,
            ..Kernel::default()
        };
        let mut model = Self {
            dir: tempfile::tempdir().unwrap(),
            store: Store::in_memory(Arc::clone(&clock) as _),
            clock,
            kernel: Arc::new(Mutex::new(kernel)),
            mounts,
            tells,
            pods: BTreeMap::new(),
            gone: BTreeSet::new(),
            generation: 0,
            life: None,
        };
        model.start();
        model
    }

    fn start(&mut self) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        let _in = runtime.enter();
        self.clock.base.lock().unwrap().1 = Some(Instant::now());
        let fake = Arc::new(Fake {
            kernel: Arc::clone(&self.kernel),
            store: self.store.clone(),
            mounts: self.mounts,
        });
        let root = self.dir.path().canonicalize().unwrap().join("root");
        let mut manager =
            VolumeManager::new(root, None, self.store.clone(), Arc::clone(&self.clock) as _)
                .with_plugin(CSI, Arc::clone(&fake) as _)
                .with_plugin(NFS, Arc::clone(&fake) as _);
        let kernel = Arc::clone(&self.kernel);
        let shown = Shown {
            kernel,
            staged: fake.mounts,
            tells: self.tells,
            told: Mutex::default(),
        };
        manager.mounts = mounts::Source::with(&manager.root, shown);
        runtime.block_on(manager.reconcile()).unwrap();
        drop(_in);
        self.life = Some(Life {
            runtime,
            manager,
            mounting: BTreeMap::new(),
            mounted: Arc::default(),
            leaving: BTreeMap::new(),
        });
        for (index, uid) in self.pods.clone() {
            self.mount(index, &uid);
        }
        for uid in self.gone.clone() {
            self.unmount(&uid);
        }
    }

    fn mount(&mut self, index: usize, uid: &str) {
        let life = self.life.as_mut().unwrap();
        let (manager, mounted) = (life.manager.clone(), Arc::clone(&life.mounted));
        let (pod, sources, of) = (pod(uid), sources(index), uid.to_owned());
        let task = life.runtime.spawn(async move {
            let recorder = MemoryRecorder::default();
            while manager.mount(&pod, &sources, &recorder).await.is_err() {
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            mounted.lock().unwrap().insert(of);
        });
        life.mounting.entry(uid.to_owned()).or_default().push(task);
    }

    fn unmount(&mut self, uid: &str) {
        let life = self.life.as_mut().unwrap();
        let (manager, of) = (life.manager.clone(), PodUid::new(uid));
        let task = life.runtime.spawn(async move {
            loop {
                if manager.unmount(&of).await.is_ok() && manager.remove_pod_dirs(&of).await.is_ok()
                {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        });
        life.leaving.insert(uid.to_owned(), task);
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::Add(index) => {
                if self.pods.contains_key(index) {
                    return;
                }
                self.generation += 1;
                let uid = format!("pod-{index}-{}", self.generation);
                self.kernel.lock().unwrap().alive.insert(uid.clone());
                self.pods.insert(*index, uid.clone());
                self.mount(*index, &uid);
            }
            Action::Join(index) => {
                if let Some(uid) = self.pods.get(index).cloned() {
                    self.mount(*index, &uid);
                }
            }
            Action::Abandon(index) => {
                let life = self.life.as_mut().unwrap();
                if let Some(uid) = self.pods.get(index)
                    && let Some(tasks) = life.mounting.get_mut(uid)
                {
                    let task = tasks.remove(0);
                    task.abort();
                    life.runtime.block_on(async { task.await.ok() });
                    let uid = uid.clone();
                    self.mount(*index, &uid);
                }
            }
            Action::Remove(index) => {
                let Some(uid) = self.pods.remove(index) else {
                    return;
                };
                let life = self.life.as_mut().unwrap();
                for task in life.mounting.remove(&uid).into_iter().flatten() {
                    task.abort();
                    life.runtime.block_on(async { task.await.ok() });
                }
                // A publish that runs goes on; none begins.
                self.kernel.lock().unwrap().alive.remove(&uid);
                self.gone.insert(uid.clone());
                self.unmount(&uid);
            }
            Action::Yield(times) => {
                let life = self.life.as_ref().unwrap();
                life.runtime.block_on(async {
                    for _ in 0..*times {
                        tokio::task::yield_now().await;
                    }
                });
            }
            Action::Wait(ms) => {
                let life = self.life.as_ref().unwrap();
                let wait = Duration::from_millis(u64::from(*ms));
                life.runtime
                    .block_on(async { tokio::time::sleep(wait).await });
            }
            Action::Fail(percent) => self.kernel.lock().unwrap().fail = u32::from(*percent),
            Action::Crash => self.crash(false),
            Action::Reboot => self.crash(true),
        }
    }

    fn crash(&mut self, reboot: bool) {
        let at = self.clock.now().boottime_ms;
        drop(self.life.take());
        *self.clock.base.lock().unwrap() = (at, None);
        {
            let mut k = self.kernel.lock().unwrap();
            assert!(k.running.is_empty());
            if reboot {
                k.staged.clear();
                k.published.clear();
            }
            // Whether the last publish is on record, nobody can say.
            k.settled.clear();
        }
        if reboot {
            *self.clock.boot.lock().unwrap() += 1;
        }
        self.start();
    }

    /// Lets everything end, and looks whether all is as it should be.
    fn settle(&mut self) {
        self.kernel.lock().unwrap().fail = 0;
        let life = self.life.as_mut().unwrap();
        let (mounting, leaving) = (&mut life.mounting, &mut life.leaving);
        life.runtime.block_on(async {
            let all = async {
                let mounting = mounting.values_mut().flatten();
                for task in mounting.chain(leaving.values_mut()) {
                    task.await.unwrap();
                }
            };
            tokio::time::timeout(Duration::from_secs(3600), all)
                .await
                .expect("it converges");
            // What is unstaged by itself.
            tokio::time::sleep(Duration::from_secs(600)).await;
        });
        life.mounting.clear();
        life.leaving.clear();
        for uid in std::mem::take(&mut self.gone) {
            let dir = self.dir.path().join("root/pods").join(&uid);
            assert!(!dir.exists(), "{uid} is not removed");
        }
        let k = self.kernel.lock().unwrap();
        assert_eq!(k.violations, Vec::<String>::new());
        let seen = self.store.snapshot();
        let mut targets = BTreeSet::new();
        let mut devices = BTreeSet::new();
        let mut names = BTreeSet::new();
        for (index, uid) in &self.pods {
            for (name, resolved) in sources(*index).remotes {
                let remote = &resolved.unwrap().remote;
                let uid = PodUid::new(uid);
                targets.insert(life.manager.target(&uid, remote));
                devices.extend(life.manager.staging(remote));
                names.extend(remote.unique_name.clone());
                let record = seen.record::<VolumeRecord>(&format!("{uid}/{name}"));
                assert_eq!(record.map(|r| r.phase), Some(VolumePhase::Mounted));
            }
        }
        assert_eq!(
            k.published.keys().cloned().collect::<BTreeSet<_>>(),
            targets
        );
        assert_eq!(k.staged.keys().cloned().collect::<BTreeSet<_>>(), devices);
        let on_record = seen.with_prefix::<VolumeRecord>("");
        assert_eq!(
            on_record
                .map(|(_, r)| PathBuf::from(&r.path))
                .filter(|p| !p.ends_with("own"))
                .collect::<BTreeSet<_>>(),
            targets.union(&devices).cloned().collect()
        );
        let described = [
            records::volumes(&seen).count(),
            records::devices(&seen).count(),
        ];
        assert_eq!(described, [self.pods.len() * 4, devices.len()]);
        let in_use = life.manager.volumes_in_use();
        assert_eq!(in_use.borrow().names, names);
        assert!(in_use.borrow().whole);
        assert!(life.manager.operations.busy().is_empty());
    }

    fn end(&mut self) {
        for index in self.pods.keys().copied().collect::<Vec<_>>() {
            self.apply(&Action::Remove(index));
        }
        self.settle();
        assert_eq!(self.store.snapshot().volumes.len(), 0);
        assert_eq!(self.store.snapshot().objects.len(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_it_converges(actions in actions(), seed in any::<u64>(), mounts in any::<bool>(), tells in any::<bool>()) {
        let mut model = Model::new(seed, mounts, tells);
        for action in &actions {
            model.apply(action);
        }
        model.settle();
        let calls = model.kernel.lock().unwrap().calls;
        // A restart of the agent alone touches nothing.
        model.apply(&Action::Crash);
        model.settle();
        prop_assert_eq!(model.kernel.lock().unwrap().calls, calls);
        model.end();
    }
}

fn cases() -> u32 {
    let asked = std::env::var("HOLDFAST_CASES").ok();
    asked.and_then(|n| n.parse().ok()).unwrap_or(96)
}

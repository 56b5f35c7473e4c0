//! A live agent as far as its admin socket goes, a store on disk, and what is in both.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::Arc;

use holdfast::admin::view::Quarantined;
use holdfast::admin::{self, AdminHooks, AdminInfo, BoxError};
use holdfast::core::state::{
    AdmissionDecision, AdmissionRecord, BackoffRecord, ContainerRecord, CpusRecord, CpusetRecord,
    EpochReason, EpochRecord, ExitRecord, ImageRecord, IntentRecord, META_KEY, MemoryBlock,
    MemoryRecord, MetaRecord, MirrorRecord, ObjectRecord, PlegRecord, PodRecord, ProbeRecord,
    QueueRecord, SignalRecord, SourceRecord, StatusRecord, Transaction, VolumePhase, VolumeRecord,
    WorkerPhase, WorkerRecord, child_key,
};
use holdfast::store::backend::SledOptions;
use holdfast::store::layout::Layout;
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions, open};
use holdfast::types::metrics::Metrics;
use holdfast::types::runtime::{PodStatus, SandboxState, SandboxStatus};
use holdfast::types::{BootId, BootIdentity, Clock, Json, PodSource, PodUid, Stamp};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

pub(crate) const WEB: &str = "11111111-aaaa-4000-8000-000000000001";
pub(crate) const DB: &str = "22222222-bbbb-4000-8000-000000000002";

pub(crate) fn holdfast(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(args).env_remove("HOLDFAST_STATE_DIR");
    command
}

pub(crate) fn run(args: &[&str]) -> Output {
    holdfast(args).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[track_caller]
pub(crate) fn stdout_of(args: &[&str]) -> String {
    let output = run(args);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{args:?} failed: {stderr}");
    text(&output.stdout).to_owned()
}

#[track_caller]
pub(crate) fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&stdout_of(args)).unwrap()
}

pub(crate) fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(0x17),
        boottime_ms: seconds * 1000,
        wall_ms: 1_700_000_000_000 + seconds * 1000,
    }
}

pub(crate) struct TickingClock(std::sync::atomic::AtomicI64);

impl Clock for TickingClock {
    fn now(&self) -> Stamp {
        at(self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }
}

pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(TickingClock(100.into()))
}

pub(crate) fn meta(generation: u64) -> Transaction {
    Transaction::new().put(
        META_KEY,
        MetaRecord {
            schema: holdfast::store::migrate::SCHEMA,
            node_name: "node-1".into(),
            machine_id: "m".into(),
            boot: BootIdentity {
                kernel_boot_id: "b".into(),
                pid1_start: 1,
                runtime_state: String::new(),
            },
            generation,
            clean_shutdown: false,
            heartbeat: at(90),
            epoch: EpochRecord {
                number: 1,
                since: at(1),
                reason: EpochReason::Fresh,
            },
        },
    )
}

pub(crate) fn pod(uid: &str, namespace: &str, name: &str, phase: &str) -> Transaction {
    let spec = json!({
        "metadata": {"uid": uid, "namespace": namespace, "name": name},
        "spec": {"containers": [{"name": "main", "image": "busybox",
                 "env": [{"name": "MODE", "value": "0644"}]}]},
    });
    let status = json!({
        "phase": phase,
        "podIP": "10.88.0.7",
        "containerStatuses": [{"name": "main", "ready": true, "restartCount": 3, "image": "busybox",
            "imageID": "", "state": {"running": {}}}],
    });
    Transaction::new()
        .put(
            uid,
            PodRecord {
                source: PodSource::File,
                origin: format!("/etc/manifests/{name}.yaml"),
                pod: Json::new(serde_json::from_value(spec).unwrap()),
                first_seen: at(10),
                confirmed_epoch: 1,
            },
        )
        .put(
            uid,
            StatusRecord {
                name: name.into(),
                namespace: namespace.into(),
                status: Json::new(serde_json::from_value(status).unwrap()),
                version: 2,
                acknowledged: 0,
                at: at(20),
                finished: false,
            },
        )
        .put(
            uid,
            AdmissionRecord {
                decision: AdmissionDecision::Admitted,
                allocated: Default::default(),
                at: at(11),
            },
        )
        .put(
            uid,
            WorkerRecord {
                full_name: format!("{name}_{namespace}"),
                queued: at(11),
                started: Some(at(12)),
                phase: WorkerPhase::Sync,
                deleted: false,
                restart_requested: false,
                runtime_only: false,
            },
        )
        .put(
            uid,
            QueueRecord {
                due: at(70),
                why: "resync".into(),
            },
        )
        .put(
            child_key(&PodUid::new(uid), "main"),
            ContainerRecord {
                restart_count: 3,
                intent: Some(IntentRecord {
                    container_id: "c3".into(),
                    attempt: 3,
                    hash: "h".into(),
                    at: at(15),
                }),
                last_exit: Some(ExitRecord {
                    container_id: "c2".into(),
                    attempt: 2,
                    image: "busybox".into(),
                    image_ref: "sha256:1".into(),
                    started_at_ns: 1_700_000_001_000_000_001,
                    finished_at_ns: 1_700_000_002_000_000_000,
                    finished: at(2),
                    exit_code: 137,
                    reason: "OOMKilled".into(),
                    message: "red\u{1b}[31m".into(),
                    inferred: false,
                }),
                backoff: None,
                hooks_done: Vec::new(),
            },
        )
        .journal(Some(&PodUid::new(uid)), "admitted", "first sight")
}

pub(crate) fn commit(runtime: &tokio::runtime::Runtime, store: &Store, transaction: Transaction) {
    runtime.block_on(store.commit(transaction)).unwrap();
}

pub(crate) fn fill(runtime: &tokio::runtime::Runtime, store: &Store) {
    commit(runtime, store, meta(1));
    commit(runtime, store, pod(WEB, "default", "web", "Running"));
    commit(runtime, store, pod(DB, "data", "db", "Pending"));
    commit(runtime, store, meta(2));
    let web = PodUid::new(WEB);
    let started = Transaction::new().journal(Some(&web), "starting container", "main attempt 3");
    commit(runtime, store, started);
    commit(runtime, store, the_other_tables());
}

/// A row in every table that `pod` leaves empty.
pub(crate) fn the_other_tables() -> Transaction {
    let web = PodUid::new(WEB);
    let backoff = BackoffRecord {
        duration_ms: 10_000,
        since: at(5),
    };
    let status = PodStatus {
        name: "web".into(),
        namespace: "default".into(),
        ips: vec!["10.88.0.7".into()],
        sandboxes: vec![SandboxStatus {
            id: "s1".into(),
            attempt: 0,
            state: SandboxState::Ready,
            created_at_ns: 1_700_000_000_000_000_000,
            ips: vec!["10.88.0.7".into()],
            host_network: Some(false),
            runtime_handler: String::new(),
        }],
        ..PodStatus::empty(web.clone())
    };
    Transaction::new()
        .put(WEB, PlegRecord { status })
        .put(
            "web_default",
            MirrorRecord {
                uid: "m1".into(),
                hash: "h".into(),
            },
        )
        .put(
            format!("{WEB}/main/liveness"),
            ProbeRecord {
                container_id: "c3".into(),
                result: "Success".into(),
                last: "Failure".into(),
                consecutive: 2,
                at: at(30),
            },
        )
        .put(
            child_key(&web, "data"),
            VolumeRecord {
                plugin: "kubernetes.io/empty-dir".into(),
                path: "/var/lib/kubelet/pods/x".into(),
                phase: VolumePhase::Mounted,
                at: at(12),
            },
        )
        .put(
            "busybox",
            ImageRecord {
                pulled_ref: None,
                backoffs: [(web, backoff)].into(),
                first_seen: at(3),
                last_used: at(15),
            },
        )
        .put(
            "secrets/default/s",
            ObjectRecord {
                resource_version: "1".into(),
                encrypted: true,
                data: b"cipher".to_vec(),
                at: at(4),
            },
        )
        .put(
            "memory.available",
            SignalRecord {
                first: at(6),
                last: at(7),
            },
        )
        .put(
            "file",
            SourceRecord {
                location: "/etc/manifests".into(),
                read: at(9),
                error: String::new(),
                broken: [("/etc/manifests/x.yaml".to_owned(), "line 3".to_owned())].into(),
            },
        )
        .put(
            WEB,
            CpusRecord {
                containers: [("main".to_owned(), [1, 5].into_iter().collect())].into(),
            },
        )
        .put(
            WEB,
            MemoryRecord {
                containers: [(
                    "main".to_owned(),
                    vec![MemoryBlock {
                        resource: "memory".to_owned(),
                        nodes: vec![0],
                        bytes: 1 << 30,
                    }],
                )]
                .into(),
            },
        )
        .put(
            format!("{WEB}/main"),
            CpusetRecord {
                container_id: "main-1".into(),
                cpus: [1, 5].into_iter().collect(),
                nodes: [0].into_iter().collect(),
            },
        )
}

pub(crate) struct Hooks {
    backups: PathBuf,
}

impl AdminHooks for Hooks {
    fn quarantined(&self) -> Vec<Quarantined> {
        Vec::new()
    }

    fn write_backup(&self, to: &mut dyn Write) -> Result<(), BoxError> {
        Ok(to.write_all(&[b'x'; 100_000])?)
    }

    fn save_backup(&self) -> Result<PathBuf, BoxError> {
        std::fs::write(&self.backups, b"saved")?;
        Ok(self.backups.clone())
    }
}

/// A live agent, as far as its admin socket goes.
pub(crate) struct Live {
    pub(crate) runtime: tokio::runtime::Runtime,
    pub(crate) store: Store,
    stop: CancellationToken,
    served: Option<tokio::task::JoinHandle<()>>,
    pub(crate) dir: tempfile::TempDir,
}

impl Live {
    pub(crate) fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let store = Store::in_memory(clock());
        let stop = CancellationToken::new();
        let info = AdminInfo {
            credentials: None,
            version: "0.0.0".into(),
            started: at(0),
            drain: Default::default(),
            hooks: Arc::new(Hooks {
                backups: dir.path().join("saved"),
            }),
        };
        let served = {
            let _guard = runtime.enter();
            let listener = admin::bind(dir.path()).unwrap();
            runtime.spawn(admin::serve(listener, store.clone(), info, stop.clone()))
        };
        let live = Self {
            runtime,
            store,
            stop,
            served: Some(served),
            dir,
        };
        fill(&live.runtime, &live.store);
        live
    }

    pub(crate) fn dir(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    pub(crate) fn end(&mut self) {
        self.stop.cancel();
        if let Some(served) = self.served.take() {
            self.runtime.block_on(served).unwrap();
        }
    }
}

/// Ends the command with the test, whatever its outcome.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A store on disk; `None` while it is closed.
pub(crate) struct OnDisk {
    pub(crate) runtime: tokio::runtime::Runtime,
    pub(crate) dir: tempfile::TempDir,
}

impl OnDisk {
    pub(crate) fn filled() -> Self {
        let disk = Self {
            runtime: tokio::runtime::Runtime::new().unwrap(),
            dir: tempfile::tempdir().unwrap(),
        };
        let store = disk.open();
        fill(&disk.runtime, &store);
        disk.runtime.block_on(store.close()).unwrap();
        disk
    }

    pub(crate) fn open(&self) -> Store {
        let clock = clock();
        let opened = open::open(&open::OpenOptions {
            node_was_used: false,
            dir: self.dir.path().to_owned(),
            identity: Identity {
                node_name: "node-1".into(),
                machine_id: "m".into(),
                boot: BootIdentity::read(None, None),
            },
            sled: SledOptions::default(),
            now: clock.now(),
        })
        .unwrap();
        let options = StoreOptions::default();
        let store = Store::start(
            opened.backend,
            opened.loaded,
            options,
            clock,
            Metrics::default(),
        );
        store.unwrap()
    }

    pub(crate) fn path(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    /// Runs `ask` against an agent that serves this store, then closes it.
    pub(crate) fn live<T>(&self, ask: impl FnOnce(&Store) -> T) -> T {
        let store = self.open();
        let layout = Layout::new(self.dir.path());
        let hooks = admin::StoreHooks::new(store.clone(), clock(), layout);
        let info = AdminInfo {
            credentials: None,
            version: "0.0.0".into(),
            started: at(0),
            drain: Default::default(),
            hooks: Arc::new(hooks),
        };
        let stop = CancellationToken::new();
        let served = {
            let _guard = self.runtime.enter();
            let listener = admin::bind(self.dir.path()).unwrap();
            let serving = admin::serve(listener, store.clone(), info, stop.clone());
            self.runtime.spawn(serving)
        };
        let answer = ask(&store);
        stop.cancel();
        self.runtime.block_on(served).unwrap();
        self.runtime.block_on(store.close()).unwrap();
        answer
    }
}

pub(crate) fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push((path.clone(), std::fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

//! Records, clocks, and something to restart a store on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use holdfast::core::state::*;
use holdfast::store::backend::{
    Backend, Faults, FaultyBackend, MemoryBackend, Op, SledBackend, SledOptions,
};
use holdfast::store::codec::{self, Loaded};
use holdfast::store::{Store, StoreHealth, StoreOptions};
use holdfast::types::metrics::Metrics;
use holdfast::types::runtime::PodStatus;
use holdfast::types::{BootId, BootIdentity, Clock, ContainerId, Json, PodSource, PodUid, Stamp};

use super::redb::RedbBackend;

/// A clock that ticks when it is looked at.
#[derive(Default)]
pub struct Ticking(AtomicI64);

impl Clock for Ticking {
    fn now(&self) -> Stamp {
        stamp(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

pub fn stamp(ms: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: ms,
        wall_ms: ms,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Engine {
    Sled,
    Memory,
    Redb,
    Faulty,
}

/// A disk that outlives the stores on it.
pub struct World {
    engine: Engine,
    directory: tempfile::TempDir,
    memory: MemoryBackend,
    pub faults: Faults,
    pub metrics: Metrics,
}

impl World {
    pub fn new(engine: Engine) -> Self {
        Self {
            engine,
            directory: tempfile::tempdir().unwrap(),
            memory: MemoryBackend::new(),
            faults: Faults::new(),
            metrics: Metrics::default(),
        }
    }

    pub fn backend(&self) -> Box<dyn Backend> {
        match self.engine {
            Engine::Sled => Box::new(
                SledBackend::open(self.directory.path().join("s"), SledOptions::default()).unwrap(),
            ),
            Engine::Memory => Box::new(self.memory.clone()),
            Engine::Redb => {
                Box::new(RedbBackend::open(self.directory.path().join("r.redb")).unwrap())
            }
            Engine::Faulty => {
                Box::new(FaultyBackend::new(self.memory.clone(), self.faults.clone()))
            }
        }
    }

    /// What is on the disk, as the next start would see it. The store must be closed.
    pub fn on_disk(&self) -> Loaded {
        codec::load(self.backend().iter(), 1)
    }

    /// What the memory below a faulty backend holds right now.
    pub fn below(&self) -> Loaded {
        codec::load(self.memory.iter(), 1)
    }

    /// Puts a value that is no record below a faulty backend.
    pub fn damage_below(&self, key: &str) {
        let op = Op::Put {
            key: codec::record_key(Table::Volumes, key),
            value: vec![1, 2, 3],
        };
        self.memory.clone().apply(&[op]).unwrap();
    }

    pub fn start(&self) -> Store {
        self.start_with(options())
    }

    pub fn start_with(&self, options: StoreOptions) -> Store {
        let backend = self.backend();
        let loaded = codec::load(backend.iter(), 1);
        assert!(loaded.interrupted.is_none());
        Store::start(
            backend,
            loaded,
            options,
            Arc::new(Ticking::default()),
            self.metrics.clone(),
        )
        .unwrap()
    }
}

/// Quick recoveries; everything else as in real life.
pub fn options() -> StoreOptions {
    StoreOptions {
        backoff_min: Duration::from_millis(5),
        backoff_max: Duration::from_millis(20),
        ..StoreOptions::default()
    }
}

pub async fn healthy(store: &Store) {
    store
        .health()
        .wait_for(|h| *h == StoreHealth::Ok)
        .await
        .unwrap();
}

/// A durable record with a number in it.
pub fn volume(n: u64) -> VolumeRecord {
    VolumeRecord {
        plugin: "kubernetes.io/empty-dir".to_owned(),
        path: n.to_string(),
        phase: VolumePhase::Mounted,
        at: stamp(0),
    }
}

/// A relaxed record of any size.
pub fn object(data: Vec<u8>) -> ObjectRecord {
    ObjectRecord {
        resource_version: String::new(),
        encrypted: true,
        data,
        at: stamp(0),
    }
}

/// Bytes that do not compress.
pub fn noise(length: usize, mut seed: u64) -> Vec<u8> {
    seed |= 1;
    (0..length)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 32) as u8
        })
        .collect()
}

pub fn number(state: &State, key: &str) -> Option<u64> {
    state
        .record::<VolumeRecord>(key)
        .map(|r| r.path.parse().unwrap())
}

/// The content of a state without its versions.
pub fn content(state: &State) -> BTreeMap<(Table, String), AnyRecord> {
    state
        .iter_all()
        .map(|(t, k, r)| ((t, k.to_string()), r))
        .collect()
}

/// A transaction that touches every table except the journal, which it writes a line to.
pub fn every_table() -> Transaction {
    let uid = PodUid::new("uid");
    let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "uid": "uid", "annotations": {"a": "ü"}},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "100m"}}}]}
    }))
    .unwrap();
    let id = ContainerId::new("abc");
    Transaction::new()
        .put(
            META_KEY,
            MetaRecord {
                schema: 1,
                node_name: "node".to_owned(),
                machine_id: "m".to_owned(),
                boot: BootIdentity {
                    kernel_boot_id: "b".to_owned(),
                    pid1_start: 3,
                    runtime_state: "1:2".to_owned(),
                },
                generation: 4,
                clean_shutdown: true,
                heartbeat: stamp(5),
                epoch: EpochRecord {
                    number: 1,
                    since: stamp(6),
                    reason: EpochReason::Fresh,
                },
            },
        )
        .put(
            "uid",
            PodRecord {
                source: PodSource::File,
                origin: "/m/web.yaml".to_owned(),
                pod: Json::new(pod),
                first_seen: stamp(7),
                confirmed_epoch: 1,
            },
        )
        .put(
            "web_default",
            MirrorRecord {
                uid: PodUid::new("mirror"),
                hash: "h".to_owned(),
            },
        )
        .put(
            "uid",
            AdmissionRecord {
                decision: AdmissionDecision::Rejected {
                    reason: "OutOfcpu".to_owned(),
                    message: "no".to_owned(),
                },
                allocated: BTreeMap::from([(
                    "c".to_owned(),
                    BTreeMap::from([("cpu".to_owned(), "100m".to_owned())]),
                )]),
                at: stamp(8),
            },
        )
        .put(
            "uid",
            WorkerRecord {
                full_name: "web_default".to_owned(),
                queued: stamp(9),
                started: Some(stamp(10)),
                phase: WorkerPhase::Terminating {
                    since: stamp(11),
                    grace_seconds: 30,
                    deadline: stamp(12),
                    cause: TerminationCause::Evicted {
                        reason: "Evicted".to_owned(),
                        message: "m".to_owned(),
                    },
                },
                deleted: true,
                restart_requested: false,
                runtime_only: false,
            },
        )
        .put(
            "uid",
            QueueRecord {
                due: stamp(13),
                why: "sync".to_owned(),
            },
        )
        .put(
            child_key(&uid, "c"),
            ContainerRecord {
                restart_count: 2,
                intent: Some(IntentRecord {
                    container_id: id.clone(),
                    attempt: 2,
                    hash: "h".to_owned(),
                    at: stamp(14),
                }),
                last_exit: None,
                backoff: Some(BackoffRecord {
                    duration_ms: 10_000,
                    since: stamp(15),
                }),
                hooks_done: vec!["abc/PostStart".to_owned()],
            },
        )
        .put(
            "uid",
            PlegRecord {
                status: PodStatus::empty(uid.clone()),
            },
        )
        .put(
            "uid",
            StatusRecord {
                name: "web".to_owned(),
                namespace: "default".to_owned(),
                status: Json::new(k8s_openapi::api::core::v1::PodStatus {
                    phase: Some("Running".to_owned()),
                    ..Default::default()
                }),
                version: 3,
                acknowledged: 2,
                at: stamp(16),
                finished: false,
            },
        )
        .put(
            "uid/c/liveness",
            ProbeRecord {
                container_id: id,
                result: "Success".to_owned(),
                last: "Failure".to_owned(),
                consecutive: 2,
                at: stamp(17),
            },
        )
        .put("uid/data", volume(18))
        .put(
            "docker.io/library/busybox:latest",
            ImageRecord {
                pulled_ref: Some("sha256:0".to_owned()),
                backoffs: BTreeMap::from([(
                    uid.clone(),
                    BackoffRecord {
                        duration_ms: 1,
                        since: stamp(19),
                    },
                )]),
                first_seen: stamp(20),
                last_used: stamp(21),
            },
        )
        .put("secret/default/s", object(vec![0, 255, 1]))
        .put(
            "memory.available",
            SignalRecord {
                first: stamp(22),
                last: stamp(23),
            },
        )
        .put(
            "file",
            SourceRecord {
                location: "/m".to_owned(),
                read: stamp(24),
                error: String::new(),
                broken: BTreeMap::from([("/m/x.yaml".to_owned(), "line 3".to_owned())]),
            },
        )
        .put(
            "u1",
            CpusRecord {
                containers: BTreeMap::from([("main".to_owned(), [1, 5].into_iter().collect())]),
            },
        )
        .put(
            "u1",
            MemoryRecord {
                containers: BTreeMap::from([(
                    "main".to_owned(),
                    vec![MemoryBlock {
                        resource: "memory".to_owned(),
                        nodes: vec![0, 1],
                        bytes: 1 << 30,
                    }],
                )]),
            },
        )
        .put(
            "u1/main",
            CpusetRecord {
                container_id: "c1".into(),
                cpus: [1, 5].into_iter().collect(),
                nodes: [0, 1].into_iter().collect(),
            },
        )
        .put(
            "shutdown//node",
            FactRecord {
                layout: 1,
                mark: String::new(),
                data: b"{}".to_vec(),
                at: stamp(1),
            },
        )
        .journal(Some(&uid), "admitted", "because")
}

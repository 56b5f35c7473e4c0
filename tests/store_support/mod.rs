//! What the tests of the store's durability share: an identity, a clock, records, and ways to make a store.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test target uses a part of it"
)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use holdfast::core::state::MirrorRecord;
use holdfast::core::state::{
    AdmissionDecision, AdmissionRecord, AnyRecord, BackoffRecord, ContainerRecord, ExitRecord,
    FactRecord, ImageRecord, IntentRecord, JournalRecord, Mutation, ObjectRecord, PlegRecord,
    PodRecord, ProbeRecord, QueueRecord, Record, SignalRecord, SourceRecord, State, StatusRecord,
    TerminationCause, Transaction, VolumePhase, VolumeRecord, WorkerPhase, WorkerRecord,
};
use holdfast::store::backend::SledOptions;
use holdfast::store::open::{OpenOptions, Opened, open};
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::metrics::Metrics;
use holdfast::types::runtime::{
    ContainerState, ContainerStatus, PodStatus, SandboxState, SandboxStatus,
};
use holdfast::types::{BootId, BootIdentity, Clock, ContainerId, Json, PodSource, PodUid, Stamp};

pub struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> Stamp {
        at(1_000)
    }
}

pub fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(7),
        boottime_ms: seconds * 1000,
        wall_ms: 1_800_000_000_000 + seconds * 1000,
    }
}

pub fn identity() -> Identity {
    Identity {
        node_name: "node-a".to_owned(),
        machine_id: "machine-a".to_owned(),
        boot: BootIdentity {
            kernel_boot_id: "boot".to_owned(),
            pid1_start: 1,
            runtime_state: "1:2".to_owned(),
        },
    }
}

pub fn options(dir: &Path) -> OpenOptions {
    OpenOptions {
        dir: dir.to_owned(),
        identity: identity(),
        node_was_used: false,
        sled: SledOptions::default(),
        now: at(1_000),
    }
}

pub fn open_dir(dir: &Path) -> Opened {
    open(&options(dir)).expect("the store opens")
}

pub fn start(opened: Opened) -> Store {
    Store::start(
        opened.backend,
        opened.loaded,
        StoreOptions {
            inline: true,
            ..StoreOptions::default()
        },
        Arc::new(FixedClock),
        Metrics::default(),
    )
    .expect("the store starts")
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

pub fn pod(index: u64) -> PodRecord {
    let pod = serde_json::from_value(serde_json::json!({
        "metadata": {"name": format!("pod-{index}"), "namespace": "default", "uid": uid(index)},
        "spec": {"containers": [{"name": "main", "image": "busybox", "command": ["sleep", index.to_string()]}]}
    }))
    .expect("a pod");
    PodRecord {
        source: PodSource::File,
        origin: format!("/manifests/pod-{index}.yaml"),
        pod: Json::new(pod),
        first_seen: at(1),
        confirmed_epoch: 1,
    }
}

pub fn uid(index: u64) -> String {
    format!("uid-{index:06}")
}

pub fn container(restarts: u32) -> ContainerRecord {
    ContainerRecord {
        restart_count: restarts,
        intent: Some(IntentRecord {
            container_id: ContainerId::from(format!("container-{restarts}")),
            attempt: restarts,
            hash: "abc".to_owned(),
            at: at(i64::from(restarts)),
        }),
        last_exit: None,
        backoff: None,
        hooks_done: Vec::new(),
    }
}

/// One pod admitted, its container started: two durable records and a line of the journal.
pub fn pod_transaction(index: u64, restarts: u32) -> Transaction {
    Transaction::new()
        .put(uid(index), pod(index))
        .put(format!("{}/main", uid(index)), container(restarts))
        .journal(
            Some(&PodUid::from(uid(index))),
            "container started",
            format!("attempt {restarts}"),
        )
}

/// A record of every table, with every optional field and enum variant that carries data in use.
pub fn one_of_each() -> Vec<(String, AnyRecord)> {
    let mut records: Vec<(String, AnyRecord)> = Vec::new();
    let mut add = |key: &str, record: AnyRecord| records.push((key.to_owned(), record));
    let exit = ExitRecord {
        container_id: ContainerId::from("c1"),
        attempt: 2,
        image: "busybox".to_owned(),
        image_ref: "sha256:1".to_owned(),
        started_at_ns: 5,
        finished_at_ns: 6,
        finished: at(6),
        exit_code: 3,
        reason: "Error".to_owned(),
        message: "boom".to_owned(),
        inferred: true,
    };
    let backoff = BackoffRecord {
        duration_ms: 20_000,
        since: at(6),
    };
    add("u1", pod(1).into_any());
    add(
        "p_ns",
        MirrorRecord {
            uid: PodUid::from("m1"),
            hash: "h".to_owned(),
        }
        .into_any(),
    );
    let allocated = BTreeMap::from([(
        "main".to_owned(),
        BTreeMap::from([("cpu".to_owned(), "100m".to_owned())]),
    )]);
    add(
        "u1",
        AdmissionRecord {
            decision: AdmissionDecision::Admitted,
            allocated,
            at: at(2),
        }
        .into_any(),
    );
    add(
        "u2",
        AdmissionRecord {
            decision: AdmissionDecision::Rejected {
                reason: "OutOfcpu".to_owned(),
                message: "no".to_owned(),
            },
            allocated: BTreeMap::new(),
            at: at(2),
        }
        .into_any(),
    );
    let evicted = TerminationCause::Evicted {
        reason: "Evicted".to_owned(),
        message: "memory".to_owned(),
    };
    for (key, phase) in [
        ("w1", WorkerPhase::Sync),
        (
            "w2",
            WorkerPhase::Terminating {
                since: at(3),
                grace_seconds: 30,
                deadline: at(33),
                cause: TerminationCause::Deleted,
            },
        ),
        (
            "w3",
            WorkerPhase::Terminated {
                since: at(4),
                cause: evicted,
            },
        ),
        (
            "w4",
            WorkerPhase::Finished {
                since: at(5),
                cause: TerminationCause::Orphan,
            },
        ),
    ] {
        let record = WorkerRecord {
            full_name: format!("{key}_ns"),
            queued: at(1),
            started: Some(at(2)),
            phase,
            deleted: true,
            restart_requested: true,
            runtime_only: false,
        };
        add(key, record.into_any());
    }
    add(
        "u1",
        QueueRecord {
            due: at(9),
            why: "sync".to_owned(),
        }
        .into_any(),
    );
    add(
        "u1/main",
        ContainerRecord {
            last_exit: Some(exit),
            backoff: Some(backoff),
            hooks_done: vec!["c1/postStart".to_owned()],
            ..container(3)
        }
        .into_any(),
    );
    add(
        "u1",
        PlegRecord {
            status: PodStatus {
                uid: PodUid::from("u1"),
                name: "p".to_owned(),
                namespace: "ns".to_owned(),
                ips: vec!["10.0.0.1".to_owned()],
                sandboxes: vec![SandboxStatus {
                    id: ContainerId::from("s1"),
                    attempt: 1,
                    state: SandboxState::NotReady,
                    created_at_ns: 1,
                    ips: vec!["10.0.0.1".to_owned()],
                    host_network: Some(false),
                    runtime_handler: "runc".to_owned(),
                }],
                containers: vec![ContainerStatus {
                    id: ContainerId::from("c1"),
                    name: "main".to_owned(),
                    attempt: 3,
                    sandbox_id: ContainerId::from("s1"),
                    state: ContainerState::Exited,
                    created_at_ns: 1,
                    image: "busybox".to_owned(),
                    image_ref: "sha256:1".to_owned(),
                    hash: "abc".to_owned(),
                    started_at_ns: 2,
                    finished_at_ns: 3,
                    exit_code: 1,
                    reason: "Error".to_owned(),
                    message: String::new(),
                    log_path: "/var/log/pods/x".to_owned(),
                    user: None,
                }],
            },
        }
        .into_any(),
    );
    add(
        "u1",
        StatusRecord {
            name: "p".to_owned(),
            namespace: "ns".to_owned(),
            status: Json::new(
                serde_json::from_value(serde_json::json!({"phase": "Running"})).expect("a status"),
            ),
            version: 4,
            acknowledged: 3,
            at: at(7),
            finished: false,
        }
        .into_any(),
    );
    add(
        "u1/main/liveness",
        ProbeRecord {
            container_id: ContainerId::from("c1"),
            result: "Success".to_owned(),
            last: "Failure".to_owned(),
            consecutive: 2,
            at: at(8),
        }
        .into_any(),
    );
    for (key, phase) in [
        ("u1/a", VolumePhase::Mounting),
        ("u1/b", VolumePhase::Mounted),
        ("u1/c", VolumePhase::Unmounting),
    ] {
        let record = VolumeRecord {
            plugin: "kubernetes.io/empty-dir".to_owned(),
            path: "/var/lib/x".to_owned(),
            phase,
            at: at(2),
        };
        add(key, record.into_any());
    }
    add(
        "busybox",
        ImageRecord {
            pulled_ref: Some("sha256:1".to_owned()),
            backoffs: BTreeMap::from([(PodUid::from("u1"), backoff)]),
            first_seen: at(1),
            last_used: at(9),
        }
        .into_any(),
    );
    add(
        "volumes/u1/data",
        FactRecord {
            layout: 1,
            mark: "staged".to_owned(),
            data: br#"{"driver":"d"}"#.to_vec(),
            at: at(3),
        }
        .into_any(),
    );
    add(
        "ConfigMap/ns/big",
        ObjectRecord {
            resource_version: "77".to_owned(),
            encrypted: false,
            data: incompressible(20_000),
            at: at(3),
        }
        .into_any(),
    );
    add(
        "memory.available",
        SignalRecord {
            first: at(1),
            last: at(2),
        }
        .into_any(),
    );
    add(
        "0000000000000001",
        JournalRecord {
            at: at(1),
            generation: 1,
            pod: Some(PodUid::from("u1")),
            what: "admitted".to_owned(),
            why: "fits".to_owned(),
        }
        .into_any(),
    );
    add(
        "file",
        SourceRecord {
            location: "/manifests".to_owned(),
            read: at(1),
            error: String::new(),
            broken: BTreeMap::from([("a.yaml".to_owned(), "line 3".to_owned())]),
        }
        .into_any(),
    );
    records
}

/// Bytes that zstd cannot shrink, the same every time.
pub fn incompressible(len: usize) -> Vec<u8> {
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    (0..len)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 32) as u8
        })
        .collect()
}

/// A transaction that puts any record.
pub fn put_any(key: &str, record: AnyRecord) -> Transaction {
    Transaction {
        mutations: vec![Mutation::Put {
            key: key.into(),
            record,
        }],
        ..Transaction::default()
    }
}

/// The records of a state without meta and journal, as text: comparable whatever their versions are.
pub fn content(state: &State) -> BTreeMap<String, String> {
    state
        .iter_all()
        .filter(|(table, _, _)| !matches!(table.name(), "meta" | "journal"))
        .map(|(table, key, record)| (format!("{}/{key}", table.name()), format!("{record:?}")))
        .collect()
}

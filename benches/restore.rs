//! How long a start takes before the first decision: open the store, load its records, plan.
//!
//! The store is one whose agent was killed: full of records that were written one by one, with sled's log as
//! it was then and a backup beside it. Every sample opens a fresh copy of it, since sled tidies up at its
//! first opening.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "benchmarks"
)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, SamplingMode};
use holdfast::core::container_history::Records;
use holdfast::core::pod_actions::container_hash;
use holdfast::core::pod_status::{self, Stage, StatusInput};
use holdfast::core::restore::{Outcome, RestoreInput, plan_restore};
use holdfast::core::state::*;
use holdfast::store::backend::SledOptions;
use holdfast::store::backup::{self, BackupMeta};
use holdfast::store::open::{OpenOptions, Opened, open};
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::metrics::Metrics;
use holdfast::types::runtime::*;
use holdfast::types::{BootIdentity, Clock, PodExt, PodSource, PodUid, Stamp};
use k8s_openapi::api::core::v1::Pod;
use support::{CONTAINERS, figure, manifest, spread, wanted};
use tokio::runtime::Runtime;
use tokio::time::Instant;

const LIMIT_MS: f64 = 150.0;
/// Lines of the journal that each pod's life has left; a store keeps 20,000.
const LINES_PER_POD: usize = 20;

fn boot() -> BootIdentity {
    BootIdentity {
        kernel_boot_id: "0b9ee1a6-4dd8-4a42-9ac5-2ad5d6d7a0d3".to_owned(),
        pid1_start: 12,
        runtime_state: "0:25".to_owned(),
    }
}

fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: boot().id(),
        boottime_ms: seconds * 1000,
        wall_ms: (1_795_000_000 + seconds) * 1000,
    }
}

struct Fixed;

impl Clock for Fixed {
    fn now(&self) -> Stamp {
        at(1000)
    }
}

fn options(dir: &Path) -> OpenOptions {
    OpenOptions {
        dir: dir.to_owned(),
        identity: Identity {
            node_name: "node-1".to_owned(),
            machine_id: "9f4c9f0d6c1c4a0f8f6f3f0b0f0a0c0d".to_owned(),
            boot: boot(),
        },
        node_was_used: false,
        sled: SledOptions::default(),
        now: at(1000),
    }
}

fn id(kind: &str, n: usize) -> String {
    format!("{kind}{n:0>60}")
}

fn pod(n: usize) -> Pod {
    let mut pod: Pod = serde_json::from_value(manifest(&format!("shop-{n}-node-1"))).unwrap();
    pod.metadata.uid = Some(format!("{n:032x}"));
    pod.annotations_mut().extend([
        ("kubernetes.io/config.source".to_owned(), "file".to_owned()),
        ("kubernetes.io/config.hash".to_owned(), format!("{n:032x}")),
        (
            "kubernetes.io/config.seen".to_owned(),
            "2026-11-21T03:00:00Z".to_owned(),
        ),
    ]);
    pod.spec.as_mut().unwrap().node_name = Some("node-1".to_owned());
    pod
}

trait AnnotationsMut {
    fn annotations_mut(&mut self) -> &mut BTreeMap<String, String>;
}

impl AnnotationsMut for Pod {
    fn annotations_mut(&mut self) -> &mut BTreeMap<String, String> {
        self.metadata.annotations.get_or_insert_default()
    }
}

/// What the runtime shows of a pod that runs in its third attempt.
fn runtime_status(n: usize, pod: &Pod) -> PodStatus {
    let mut status = PodStatus::empty(pod.uid());
    status.name = pod.name().to_owned();
    status.namespace = pod.namespace().to_owned();
    status.ips = vec![format!("10.88.{}.{}", n / 250, n % 250 + 1)];
    status.sandboxes = vec![SandboxStatus {
        id: id("5a", n).into(),
        attempt: 0,
        state: SandboxState::Ready,
        created_at_ns: at(100).wall_ms * 1_000_000,
        ips: status.ips.clone(),
        host_network: Some(false),
        runtime_handler: String::new(),
    }];
    for (index, container) in pod.containers().iter().enumerate() {
        status.containers.push(ContainerStatus {
            id: id("c0", n * 10 + index).into(),
            name: container.name.clone(),
            attempt: 2,
            sandbox_id: id("5a", n).into(),
            state: ContainerState::Running,
            created_at_ns: at(200).wall_ms * 1_000_000 + index as i64,
            image: container.image.clone().unwrap(),
            image_ref: format!("sha256:{}", id("ab", index)),
            hash: container_hash(container),
            started_at_ns: at(201).wall_ms * 1_000_000,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: format!(
                "/var/log/pods/default_shop-{n}-node-1_{n:032x}/{}/2.log",
                container.name
            ),
            user: None,
        });
    }
    status.sort();
    status
}

/// What a list, as opposed to an inspection, shows of it.
fn listed(status: &PodStatus) -> PodStatus {
    let mut listed = status.clone();
    listed.ips.clear();
    for sandbox in &mut listed.sandboxes {
        sandbox.ips.clear();
        sandbox.host_network = None;
    }
    for container in &mut listed.containers {
        container.started_at_ns = 0;
        container.log_path.clear();
    }
    listed
}

fn container_record(status: &ContainerStatus, n: usize) -> ContainerRecord {
    ContainerRecord {
        restart_count: 2,
        intent: Some(IntentRecord {
            container_id: status.id.clone(),
            attempt: 2,
            hash: status.hash.clone(),
            at: at(200),
        }),
        last_exit: Some(ExitRecord {
            container_id: id("c9", n).into(),
            attempt: 1,
            image: status.image.clone(),
            image_ref: status.image_ref.clone(),
            started_at_ns: at(120).wall_ms * 1_000_000,
            finished_at_ns: at(180).wall_ms * 1_000_000,
            finished: at(180),
            exit_code: 1,
            reason: "Error".to_owned(),
            message: "lost the connection to the database".to_owned(),
            inferred: false,
        }),
        backoff: Some(BackoffRecord {
            duration_ms: 20_000,
            since: at(200),
        }),
        hooks_done: Vec::new(),
    }
}

fn pod_records(n: usize, pod: &Arc<Pod>, status: &PodStatus) -> Vec<Transaction> {
    let uid = pod.uid();
    let key = uid.as_str();
    let records: Vec<(String, ContainerRecord)> = status
        .containers
        .iter()
        .map(|c| (c.name.clone(), container_record(c, n)))
        .collect();
    let api_status = pod_status::generate(&StatusInput {
        pod,
        status,
        records: &records
            .iter()
            .map(|(name, record)| (name.as_str(), record))
            .collect::<Records<'_>>(),
        previous: None,
        reasons: &BTreeMap::new(),
        probes: &BTreeMap::new(),
        resize: &Default::default(),
        recursive_read_only: Some(false),
        volume_images: &BTreeMap::new(),
        host_ips: &["192.168.1.10".to_owned()],
        runtime_name: "containerd",
        stage: Stage::Syncing,
        evicted: None,
        deadline_exceeded: false,
        listed_at: at(300),
        now: at(300),
        backoff_max: Duration::from_secs(300),
    });
    let mut all = vec![
        Transaction::new().put(
            key,
            PodRecord {
                source: PodSource::File,
                origin: format!("/etc/holdfast/manifests/shop-{n}.yaml"),
                pod: Arc::clone(pod).into(),
                first_seen: at(90),
                confirmed_epoch: 1,
            },
        ),
        Transaction::new()
            .put(
                key,
                AdmissionRecord {
                    decision: AdmissionDecision::Admitted,
                    allocated: CONTAINERS
                        .iter()
                        .map(|name| {
                            let amounts = [("cpu", "1m"), ("memory", "1Mi")];
                            let amounts = amounts.map(|(k, v)| (k.to_owned(), v.to_owned()));
                            ((*name).to_owned(), amounts.into())
                        })
                        .collect(),
                    at: at(91),
                },
            )
            .put(
                key,
                WorkerRecord {
                    full_name: format!("shop-{n}-node-1_default"),
                    queued: at(91),
                    started: Some(at(92)),
                    phase: WorkerPhase::Sync,
                    deleted: false,
                    restart_requested: false,
                    runtime_only: false,
                },
            ),
    ];
    for volume in ["cache", "zone"] {
        let record = VolumeRecord {
            plugin: "kubernetes.io/empty-dir".to_owned(),
            path: format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/{volume}"),
            phase: VolumePhase::Mounted,
            at: at(93),
        };
        all.push(Transaction::new().put(child_key(&uid, volume), record));
    }
    for (name, record) in records {
        all.push(
            Transaction::new()
                .put(child_key(&uid, &name), record)
                .journal(
                    Some(&uid),
                    format!("start container {name}"),
                    "attempt 2 after exit code 1, the back-off of 20 s is over",
                ),
        );
    }
    all.push(Transaction::new().put(
        key,
        PlegRecord {
            status: status.clone(),
        },
    ));
    all.push(Transaction::new().put(
        key,
        StatusRecord {
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            status: Arc::new(api_status).into(),
            version: 7,
            acknowledged: 0,
            at: at(300),
            finished: false,
        },
    ));
    let mut last = Transaction::new().put(
        key,
        QueueRecord {
            due: at(1060),
            why: "periodic sync".to_owned(),
        },
    );
    for line in CONTAINERS.len()..LINES_PER_POD {
        last = last.journal(
            Some(&uid),
            "container exited",
            format!("exit code 1 (Error) after 60 s, attempt {line}"),
        );
    }
    all.push(last);
    all
}

/// The runtime's listing that belongs to the store.
fn fill(runtime: &Runtime, dir: &Path, pods: usize) -> BTreeMap<PodUid, PodStatus> {
    let Opened {
        backend, loaded, ..
    } = open(&options(dir)).unwrap();
    let mut listing = BTreeMap::new();
    runtime.block_on(async {
        let store = Store::start(
            backend,
            loaded,
            StoreOptions::default(),
            Arc::new(Fixed),
            Metrics::default(),
        )
        .unwrap();
        for n in 0..pods {
            let pod = Arc::new(pod(n));
            let status = runtime_status(n, &pod);
            for transaction in pod_records(n, &pod, &status) {
                drop(store.submit(transaction));
            }
            if n % 20 == 0 {
                store.sync().await.unwrap();
            }
            listing.insert(pod.uid(), listed(&status));
        }
        let meta = MetaRecord {
            generation: 3,
            heartbeat: at(999),
            ..store.snapshot().meta().unwrap().clone()
        };
        store
            .commit(Transaction::new().put(META_KEY, meta))
            .await
            .unwrap();
        store.sync().await.unwrap();
        let state = store.snapshot();
        let meta = BackupMeta::of(&state, 1, at(999));
        let backups = dir.join("backups");
        fs::create_dir_all(&backups).unwrap();
        backup::write(&state, &backups.join(meta.file_name()), &meta).unwrap();
        // From here on the store is what a killed agent leaves: it was synced and never closed.
        copy(dir, &dir.with_extension("killed"));
        store.close().await.unwrap();
    });
    listing
}

/// Copies a directory and waits for the disk.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).unwrap();
            fs::File::open(&target).unwrap().sync_all().unwrap();
        }
    }
}

struct Sample {
    open: Duration,
    plan: Duration,
}

/// One start. Opening and planning are measured, the copy before and the closing after are not.
fn start(killed: &Path, scratch: &Path, listing: &BTreeMap<PodUid, PodStatus>) -> Sample {
    copy(killed, scratch);
    let options = options(scratch);
    let started = Instant::now();
    let opened = open(&options).unwrap();
    let opened_after = started.elapsed();
    let meta = opened.loaded.state.meta().unwrap().clone();
    let plan = plan_restore(&RestoreInput {
        state: &opened.loaded.state,
        runtime: listing,
        listed_at: at(1000),
        meta: &meta,
        boot: &boot(),
        backoff_max: Duration::from_secs(300),
        offline_start: holdfast::kubeletconfig::OfflineStart::Safe,
        cluster_doubted: false,
        now: at(1000),
    });
    let planned_after = started.elapsed();
    assert_eq!(
        opened.report.outcome,
        holdfast::store::open::Outcome::Opened
    );
    assert_eq!(
        plan.counts(),
        BTreeMap::from([(Outcome::Resumed, listing.len())]),
        "every pod is resumed"
    );
    drop((plan, opened));
    fs::remove_dir_all(scratch).unwrap();
    Sample {
        open: opened_after,
        plan: planned_after - opened_after,
    }
}

fn size_of(directory: &Path) -> u64 {
    fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                size_of(&entry.path())
            } else {
                entry.metadata().unwrap().len()
            }
        })
        .sum()
}

fn main() {
    let runtime = Runtime::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut per_pod = Vec::new();
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    for (pods, samples) in [(1_000, 15), (10_000, 5)] {
        let name = format!("restore/{pods}_pods");
        if !wanted(&name) {
            continue;
        }
        let dir = directory.path().join(pods.to_string());
        fs::create_dir_all(&dir).unwrap();
        let listing = fill(&runtime, &dir, pods);
        let killed = dir.with_extension("killed");
        let scratch = dir.with_extension("scratch");
        println!(
            "restore, {pods} pods, {} containers: database of {} KiB",
            pods * CONTAINERS.len(),
            size_of(&killed.join("db")) / 1024
        );
        let (mut opens, mut plans, mut totals) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..samples {
            let sample = start(&killed, &scratch, &listing);
            opens.push(sample.open);
            plans.push(sample.plan);
            totals.push(sample.open + sample.plan);
        }
        let (open, plan, (least, total, most)) = (
            spread(&mut opens).1,
            spread(&mut plans).1,
            spread(&mut totals),
        );
        println!(
            "  p50 of {samples}: open + load {open:.1} ms, plan_restore {plan:.1} ms, together {total:.1} ms \
             (least {least:.1}, most {most:.1})"
        );
        if pods == 1_000 {
            figure(
                "open + load + plan_restore of 1000 pods / 3000 containers",
                total,
                LIMIT_MS,
                "ms",
            );
        }
        per_pod.push(total / pods as f64);
        if pods == 1_000 {
            let mut group = criterion.benchmark_group("restore");
            group.sampling_mode(SamplingMode::Flat);
            group.bench_function("1000_pods", |b| {
                b.iter_custom(|times| {
                    (0..times)
                        .map(|_| {
                            let sample = start(&killed, &scratch, &listing);
                            sample.open + sample.plan
                        })
                        .sum()
                });
            });
            group.finish();
        }
    }
    if let [small, large] = per_pod[..] {
        figure(
            "time per pod with 10000 pods, as a multiple of that with 1000",
            large / small,
            1.25,
            "x",
        );
    }
    criterion.final_summary();
}

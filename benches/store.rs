//! Figures of the store, as ratios to what the engine and the disk below it can do.
//!
//! The comparisons measure their peers in turns within one loop, so that a busy machine slows both.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "benchmarks"
)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use criterion::Criterion;
use holdfast::core::state::*;
use holdfast::store::backend::SledOptions;
use holdfast::store::codec;
use holdfast::store::open::{self, OpenOptions};
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, BootIdentity, Clock, Stamp};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::time::Instant;

struct Zero;

impl Clock for Zero {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(0),
            boottime_ms: 0,
            wall_ms: 0,
        }
    }
}

fn noise(length: usize, mut seed: u64) -> Vec<u8> {
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

/// A durable record of about `length` bytes.
fn durable(length: usize) -> VolumeRecord {
    VolumeRecord {
        plugin: String::new(),
        path: "x".repeat(length),
        phase: VolumePhase::Mounted,
        at: Zero.now(),
    }
}

/// A relaxed record of about `length` bytes.
fn relaxed(length: usize, seed: u64) -> ObjectRecord {
    ObjectRecord {
        resource_version: String::new(),
        encrypted: false,
        data: noise(length, seed),
        at: Zero.now(),
    }
}

fn start(directory: &Path) -> Store {
    let opened = open::open(&OpenOptions {
        dir: directory.to_owned(),
        identity: Identity {
            node_name: "bench".to_owned(),
            machine_id: String::new(),
            boot: BootIdentity::read(Some("bench"), None),
        },
        node_was_used: false,
        sled: SledOptions::default(),
        now: Zero.now(),
    })
    .unwrap();
    Store::start(
        opened.backend,
        opened.loaded,
        StoreOptions::default(),
        Arc::new(Zero),
        Metrics::default(),
    )
    .unwrap()
}

/// A thread that writes what it is sent and syncs it, as the writer does.
fn disk_thread(file: File) -> mpsc::Sender<(u64, oneshot::Sender<()>)> {
    let (sender, requests) = mpsc::channel::<(u64, oneshot::Sender<()>)>();
    thread::spawn(move || {
        for (offset, answer) in requests {
            file.write_all_at(&[b'x'; 4096], offset).unwrap();
            file.sync_data().unwrap();
            answer.send(()).unwrap();
        }
    });
    sender
}

fn p50(samples: &mut [Duration]) -> Duration {
    samples.sort_unstable();
    samples[samples.len() / 2]
}

fn verdict(good: bool) -> &'static str {
    if good { "PASS" } else { "FAIL" }
}

/// One durable commit against bare sled and a bare write.
fn latency(runtime: &Runtime) {
    const ROUNDS: usize = 3000;
    const WARM_UP: usize = 30_000;
    let directory = tempfile::tempdir().unwrap();
    let store = start(&directory.path().join("store"));
    let db = sled::Config::new()
        .path(directory.path().join("sled"))
        .mode(sled::Mode::LowSpace)
        .cache_capacity(4 << 20)
        .flush_every_ms(None)
        .open()
        .unwrap();
    let db_file = File::open(directory.path().join("sled/db")).unwrap();
    let plain = File::create(directory.path().join("plain")).unwrap();
    plain.set_len(4 << 20).unwrap();
    plain.sync_all().unwrap();

    let value = vec![b'x'; 4096];
    let record = durable(4096);
    let (mut ours, mut bare, mut disk) = (Vec::new(), Vec::new(), Vec::new());
    let (mut handed_over, thread) = (Vec::new(), disk_thread(plain.try_clone().unwrap()));
    runtime.block_on(async move {
        tokio::spawn(async move {
            // Until both logs have their size and write where they have written before.
            for n in 0..WARM_UP {
                let key = format!("{:04}", n % 1000);
                db.insert(&key, value.as_slice()).unwrap();
                let pending = store.submit(Transaction::new().put(&key, record.clone()));
                if n % 16 == 0 {
                    db.flush().unwrap();
                    pending.wait().await.unwrap();
                }
            }
            for n in 0..ROUNDS {
                let key = format!("{:04}", n % 1000);

                let started = Instant::now();
                let mut batch = sled::Batch::default();
                batch.insert(key.as_bytes(), value.as_slice());
                db.apply_batch(batch).unwrap();
                db.flush().unwrap();
                db_file.sync_data().unwrap();
                bare.push(started.elapsed());

                let transaction = Transaction::new().put(&key, record.clone());
                let started = Instant::now();
                store.commit(transaction).await.unwrap();
                ours.push(started.elapsed());

                let started = Instant::now();
                plain
                    .write_all_at(&value, ((n % 1000) * 4096) as u64)
                    .unwrap();
                plain.sync_data().unwrap();
                disk.push(started.elapsed());

                let started = Instant::now();
                let (answer, answered) = oneshot::channel();
                thread.send((((n + 500) % 1000 * 4096) as u64, answer)).unwrap();
                answered.await.unwrap();
                handed_over.push(started.elapsed());
            }
            let (ours, bare, disk) = (p50(&mut ours), p50(&mut bare), p50(&mut disk));
            let handed_over = p50(&mut handed_over);
            let to_sled = ours.as_secs_f64() / bare.as_secs_f64();
            let to_disk = ours.as_secs_f64() / disk.as_secs_f64();
            println!(
                "durable commit of 4 KiB, p50: {ours:?}; bare sled {bare:?}: ratio {to_sled:.2} (target <= 1.3) {}; \
                 bare write + fdatasync {disk:?}: ratio {to_disk:.2}; the same by another thread {handed_over:?}",
                verdict(to_sled <= 1.3)
            );
            store.close().await.unwrap();
        })
        .await
        .unwrap();
    });
}

/// Durable commits per second of `writers` tasks.
async fn throughput(store: &Store, writers: usize) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let started = Instant::now();
    let tasks: Vec<_> = (0..writers)
        .map(|w| {
            let (store, stop) = (store.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let record = durable(4096);
                let mut n = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let key = format!("{w}/{}", n % 30);
                    store
                        .commit(Transaction::new().put(key, record.clone()))
                        .await
                        .unwrap();
                    n += 1;
                }
                n
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    stop.store(true, Ordering::Relaxed);
    let mut commits = 0;
    for task in tasks {
        commits += task.await.unwrap();
    }
    commits as f64 / started.elapsed().as_secs_f64()
}

fn group_commit(runtime: &Runtime) {
    let directory = tempfile::tempdir().unwrap();
    runtime.block_on(async {
        let store = start(directory.path());
        // In turns, so that a busy machine slows both.
        let (mut single, mut many) = (0.0, 0.0);
        for _ in 0..4 {
            single += throughput(&store, 1).await / 4.0;
            many += throughput(&store, 32).await / 4.0;
        }
        let ratio = many / single;
        println!(
            "durable commits/s: 1 writer {single:.0}, 32 writers {many:.0}: ratio {ratio:.1} (target >= 5) {}",
            verdict(ratio >= 5.0)
        );
        store.close().await.unwrap();
    });
}

/// Relaxed commits per second, the time until they are in sled included.
fn relaxed_rate(runtime: &Runtime, keys: u64, what: &str) {
    const TASKS: u64 = 4;
    const EACH: u64 = 50_000;
    let directory = tempfile::tempdir().unwrap();
    runtime.block_on(async {
        let store = start(directory.path());
        let started = Instant::now();
        let tasks: Vec<_> = (0..TASKS)
            .map(|t| {
                let store = store.clone();
                tokio::spawn(async move {
                    let record = relaxed(300, t);
                    let mut pending = Vec::new();
                    for n in 0..EACH {
                        let key = format!("{}", (t * EACH + n) % keys);
                        pending.push(store.submit(Transaction::new().put(key, record.clone())));
                        if pending.len() == 64 {
                            for one in pending.drain(..) {
                                one.wait().await.unwrap();
                            }
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        store.sync().await.unwrap();
        let rate = (TASKS * EACH) as f64 / started.elapsed().as_secs_f64();
        println!(
            "relaxed commits/s, written to sled and synced, {what}: {rate:.0} (target >= 30000) {}",
            verdict(rate >= 30_000.0)
        );
        store.close().await.unwrap();
    });
}

/// Latency of a snapshot with a look-up, on an idle store and beside busy writers.
fn readers(runtime: &Runtime) {
    fn read(store: &Store) -> (Duration, Duration) {
        let mut samples: Vec<_> = (0..200_000)
            .map(|_| {
                let started = Instant::now();
                let state = store.snapshot();
                std::hint::black_box(state.version_of(Table::Volumes, "0/1"));
                started.elapsed()
            })
            .collect();
        samples.sort_unstable();
        (
            samples[samples.len() / 2],
            samples[samples.len() * 99 / 100],
        )
    }
    let directory = tempfile::tempdir().unwrap();
    runtime.block_on(async {
        let store = start(directory.path());
        let idle = read(&store);
        let writers = tokio::spawn({
            let store = store.clone();
            async move { throughput(&store, 8).await }
        });
        let reader = store.clone();
        let busy = tokio::task::spawn_blocking(move || {
            // Well after the writers have begun.
            let mut version = reader.published();
            while *version.borrow_and_update() < 100 {
                std::thread::yield_now();
            }
            read(&reader)
        })
        .await
        .unwrap();
        let rate = writers.await.unwrap();
        println!(
            "snapshot + look-up, p50/p99: idle {:?}/{:?}, beside {rate:.0} durable commits/s {:?}/{:?}: \
             a reader never waits for a sync {}",
            idle.0,
            idle.1,
            busy.0,
            busy.1,
            verdict(busy.1 < Duration::from_micros(50))
        );
        store.close().await.unwrap();
    });
}

/// Size on disk after a million overwrites of a thousand records, all of them written.
fn growth(runtime: &Runtime) {
    const RECORDS: u64 = 1000;
    const ROUNDS: u64 = 1000;
    let directory = tempfile::tempdir().unwrap();
    runtime.block_on(async {
        let store = start(directory.path());
        let started = Instant::now();
        let mut largest = 0;
        for round in 0..ROUNDS {
            let record = relaxed(4096, round);
            for n in 0..RECORDS {
                drop(store.submit(Transaction::new().put(n.to_string(), record.clone())));
            }
            store.sync().await.unwrap();
            if round % 50 == 0 {
                largest = largest.max(size_of(directory.path()));
            }
        }
        let took = started.elapsed();
        let live: usize = codec::encode_state(&store.snapshot())
            .map(|pair| pair.map(|(k, v)| k.len() + v.len()).unwrap())
            .sum();
        store.close().await.unwrap();
        let size = size_of(directory.path());
        largest = largest.max(size);
        let ratio = largest as f64 / live as f64;
        println!(
            "1000000 overwrites of {RECORDS} records of 4 KiB in {took:.1?}: live {} KiB, on disk {} KiB, at most {} KiB: \
             ratio {ratio:.1} (target < 10) {}",
            live / 1024,
            size / 1024,
            largest / 1024,
            verdict(ratio < 10.0)
        );
    });
}

/// Bytes that the files in a directory occupy.
fn size_of(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => size_of(&entry.path()),
                Ok(meta) => meta.blocks() * 512,
                // sled replaces its snapshots.
                Err(_) => 0,
            }
        })
        .sum()
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    latency(&runtime);
    group_commit(&runtime);
    relaxed_rate(&runtime, u64::MAX, "200000 keys once each");
    relaxed_rate(&runtime, 10_000, "10000 keys in turn (200000 commits)");
    relaxed_rate(&runtime, 1000, "1000 keys over and over (200000 commits)");
    readers(&runtime);
    growth(&runtime);

    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    let directory = tempfile::tempdir().unwrap();
    let store = start(directory.path());
    let record = durable(4096);
    criterion.bench_function("store/durable_commit_4k", |b| {
        b.iter(|| {
            let transaction = Transaction::new().put("k", record.clone());
            runtime.block_on(store.commit(transaction)).unwrap()
        });
    });
    criterion.bench_function("store/snapshot", |b| b.iter(|| store.snapshot()));
    let any = record.clone().into_any();
    criterion.bench_function("store/encode_4k", |b| {
        b.iter(|| codec::encode("k", &any).unwrap());
    });
    criterion.final_summary();
    runtime.block_on(store.close()).unwrap();
}

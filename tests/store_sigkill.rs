//! A writer process is killed with SIGKILL again and again; what it acknowledged must be there.
//!
//! The test binary starts itself with the directory in an environment variable. The child opens the store, commits and
//! prints one line per acknowledged commit; the parent kills it at a random moment and checks the store.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests"
)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use holdfast::core::state::*;
use holdfast::store::backend::SledOptions;
use holdfast::store::mark::Mark;
use holdfast::store::open::{OpenOptions, Opened, Outcome, open};
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions};
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, BootIdentity, Clock, Stamp};
use rand::Rng;

const DIRECTORY: &str = "HOLDFAST_TEST_SIGKILL_DIR";
/// Kills of each store; the stores are tortured in parallel.
const KILLS: u32 = 50;
const STORES: u32 = 4;
const WRITERS: u64 = 4;

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

fn volume(n: u64) -> VolumeRecord {
    VolumeRecord {
        plugin: "test".to_owned(),
        path: n.to_string(),
        phase: VolumePhase::Mounted,
        at: Zero.now(),
    }
}

/// Sizes from a few bytes to several chunks.
fn object(n: u64) -> ObjectRecord {
    let mut seed = n | 1;
    let length = [10, 1_000, 4_096, 20_000][(n % 4) as usize];
    let data = (0..length)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 32) as u8
        })
        .collect();
    ObjectRecord {
        resource_version: n.to_string(),
        encrypted: false,
        data,
        at: Zero.now(),
    }
}

fn number(state: &State, key: &str) -> u64 {
    state
        .record::<VolumeRecord>(key)
        .map_or(0, |r| r.path.parse().unwrap())
}

fn load(directory: &Path) -> Opened {
    open(&OpenOptions {
        dir: directory.to_owned(),
        identity: Identity {
            node_name: "node".to_owned(),
            machine_id: "machine".to_owned(),
            boot: BootIdentity {
                kernel_boot_id: "boot".to_owned(),
                pid1_start: 1,
                runtime_state: "1:1".to_owned(),
            },
        },
        node_was_used: false,
        sled: SledOptions::default(),
        now: Zero.now(),
    })
    .expect("open the store")
}

/// The child's side; does nothing when the test runs for itself.
#[test]
fn child_commits_until_it_is_killed() {
    let Some(directory) = std::env::var_os(DIRECTORY) else {
        return;
    };
    let opened = load(Path::new(&directory));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let options = StoreOptions {
            relaxed_delay: Duration::from_millis(2),
            journal_lines: 50,
            ..StoreOptions::default()
        };
        let store = Store::start(
            opened.backend,
            opened.loaded,
            options,
            Arc::new(Zero),
            Metrics::default(),
        )
        .unwrap();
        let writers: Vec<_> = (0..WRITERS)
            .map(|w| tokio::spawn(write_forever(store.clone(), w)))
            .collect();
        for writer in writers {
            writer.await.unwrap();
        }
    });
}

/// Each commit counts a pair of records up in one transaction.
async fn write_forever(store: Store, writer: u64) {
    let (left, right) = (format!("{writer}/left"), format!("{writer}/right"));
    let mut n = number(&store.snapshot(), &left);
    loop {
        n += 1;
        drop(store.submit(Transaction::new().put(&left, object(n + 7))));
        store
            .commit(
                Transaction::new()
                    .put(&left, volume(n))
                    .put(&right, volume(n))
                    .put(&right, object(n))
                    .journal(None, "counted", n.to_string()),
            )
            .await
            .unwrap();
        let mut out = std::io::stdout().lock();
        // The parent may be about to kill us and no longer read.
        if writeln!(out, "ack {writer} {n}")
            .and_then(|()| out.flush())
            .is_err()
        {
            return;
        }
    }
}

#[test]
fn no_acknowledged_durable_commit_is_lost_by_sigkill() {
    let stores: Vec<_> = (0..STORES).map(|_| std::thread::spawn(torture)).collect();
    let (mut total, mut amid) = (0, 0);
    for store in stores {
        let (acknowledged, with_work) = store.join().expect("a store lost something");
        total += acknowledged;
        amid += with_work;
    }
    let kills = STORES * KILLS;
    println!("{kills} kills ({amid} amid commits), {total} acknowledged commits, 0 lost");
    assert!(amid >= 200, "only {amid} kills hit work");
}

/// Kills the writer of one store again and again. Returns how many commits were acknowledged, and how many
/// kills came after the first of a run.
fn torture() -> (u64, u32) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let mut acknowledged: BTreeMap<u64, u64> = BTreeMap::new();
    let mut total = 0_u64;
    let mut kills_with_work = 0;
    for round in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child_commits_until_it_is_killed", "--exact", "--nocapture"])
            .args(["--test-threads", "1"])
            .env(DIRECTORY, &path)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let after = rand::rng().random_range(1..25);
        let mut seen = 0;
        for line in out.lines() {
            let line = line.unwrap();
            // The harness may have begun the line.
            let Some(at) = line.find("ack ") else {
                continue;
            };
            let mut words = line[at + 4..].split(' ');
            let parsed = words
                .next()
                .and_then(|w| w.parse().ok())
                .zip(words.next().and_then(|n| n.parse().ok()));
            if let Some((writer, n)) = parsed {
                acknowledged.insert(writer, n);
                seen += 1;
            }
            if seen == after {
                // A moment within the next commits, then go on reading what was acknowledged before the kill.
                let spin = rand::rng().random_range(0..20_000);
                for _ in 0..spin {
                    std::hint::spin_loop();
                }
                child.kill().unwrap();
            }
        }
        if seen < after {
            child.kill().unwrap();
        }
        child.wait().unwrap();
        total += seen;
        kills_with_work += u32::from(seen > 0);

        let mark = Mark::read(&path.join("mark"));
        assert!(mark.is_some() || total == 0, "round {round}: no mark");
        let opened = load(&path);
        if mark.is_some() {
            // A killed process is no reason to doubt the store.
            assert_eq!(
                opened.report.new_epoch, None,
                "round {round}: false alarm: {:?}, mark {mark:?}",
                opened.report
            );
            assert!(
                matches!(
                    opened.report.outcome,
                    Outcome::Opened | Outcome::SnapshotsRemoved
                ),
                "round {round}: {:?}",
                opened.report
            );
        }
        let loaded = opened.loaded;
        drop(opened.backend);
        assert!(loaded.interrupted.is_none(), "round {round}");
        assert_eq!(loaded.quarantined, [], "round {round}");
        for (writer, n) in &acknowledged {
            let left = number(&loaded.state, &format!("{writer}/left"));
            let right = number(&loaded.state, &format!("{writer}/right"));
            assert!(
                left >= *n,
                "round {round}: writer {writer} was told {n}, the store has {left}"
            );
            assert_eq!(left, right, "round {round}: half a transaction");
            let object_n = loaded
                .state
                .record::<ObjectRecord>(&format!("{writer}/right"))
                .unwrap();
            assert_eq!(*object_n, object(right), "round {round}");
        }
        assert!(loaded.state.journal.len() <= 50);
    }
    (total, kills_with_work)
}

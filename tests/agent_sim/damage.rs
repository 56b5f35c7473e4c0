//! A store that is damaged between a crash and the restart. It is on files here, and opened as a process
//! opens it: what a restart keeps must not depend on which part is bad.

use std::fs;
use std::path::{Path, PathBuf};

use holdfast::core::state::{State, Table};
use holdfast::store::backend::{Backend, Op, SledBackend, SledOptions};
use holdfast::store::codec;
use holdfast::store::open::{OpenReport, Outcome};
use holdfast::store::recover::Integrity;
use holdfast_testkit::exploration::stride;
use holdfast_testkit::fake_cri::{Behaviour, Fault};

use crate::node::Disk;
use crate::restart::{assert_nothing_wrong, exits, make_readable, make_unreadable};
use crate::world::{World, spec};

fn database(w: &World) -> PathBuf {
    w.config.state_dir.join("db")
}

/// Pods of every kind, and what they have become.
async fn settled() -> World {
    let mut w = World::on_files();
    w.behave(|pod, _| match pod {
        "once-sim" => exits(0, 1),
        "failed-sim" => exits(2, 1),
        "loop-sim" => exits(3, 1),
        _ => Behaviour::RunForever,
    });
    for (pod, policy) in [
        ("always", "Always"),
        ("never", "Never"),
        ("once", "Never"),
        ("failed", "Never"),
        ("loop", "Always"),
        ("removed", "Always"),
    ] {
        w.manifest(pod, &spec(policy, ""));
    }
    w.start().await;
    w.until("all are what they become", 60, |w| {
        w.phase("always") == "Running"
            && w.phase("never") == "Running"
            && w.phase("once") == "Succeeded"
            && w.phase("failed") == "Failed"
            && w.phase("removed") == "Running"
            && w.waiting("loop") == "CrashLoopBackOff"
    })
    .await;
    let removed = w.uid("removed").to_string();
    w.remove_manifest("removed");
    w.until("the removed one is gone", 60, |w| {
        w.left_of("removed", &removed).is_empty()
    })
    .await;
    w
}

/// What no damage may change.
struct Kept {
    always: Vec<String>,
    never: Vec<String>,
}

impl Kept {
    fn of(w: &World) -> Self {
        Self {
            always: w.running("always"),
            never: w.running("never"),
        }
    }

    #[track_caller]
    fn assert(&self, w: &World, after: &str) {
        let say = || format!("{after}: {:?}\n{}", report(w), w.describe());
        assert_eq!(w.running("always"), self.always, "{}", say());
        assert_eq!(w.running("never"), self.never, "{}", say());
        for pod in ["always", "never", "once", "failed", "removed"] {
            assert_eq!(w.starts(pod).len(), 1, "starts of {pod}, {}", say());
        }
        for (pod, phase) in [
            ("always", "Running"),
            ("never", "Running"),
            ("once", "Succeeded"),
            ("failed", "Failed"),
        ] {
            assert_eq!(w.phase(pod), phase, "{pod}, {}", say());
        }
        assert!(!w.has_record("removed"), "{}", say());
        assert_eq!(w.wrongs(), Vec::<String>::new(), "{}", say());
    }
}

fn report(w: &World) -> &OpenReport {
    &w.opened.as_ref().unwrap().0
}

fn epoch(w: &World) -> u64 {
    w.state().meta().unwrap().epoch.number
}

// Invariant STORE-8.
#[tokio::test(start_paused = true)]
async fn restart_keeps_every_pod_as_it_is_whichever_record_is_damaged() {
    let mut w = settled().await;
    let kept = Kept::of(&w);
    w.crash().await;
    let keys: Vec<(Table, String)> = {
        let state = w.disk.load();
        let all = state
            .iter_all()
            .map(|(table, key, _)| (table, key.to_string()));
        // One line of the journal is like the other.
        let journal = state.journal.keys().next().unwrap().to_string();
        all.filter(|(table, key)| *table != Table::Journal || *key == journal)
            .collect()
    };
    let tables: std::collections::BTreeSet<_> = keys.iter().map(|(t, _)| t.name()).collect();
    for table in [
        "meta",
        "pods",
        "admissions",
        "workers",
        "containers",
        "statuses",
    ] {
        assert!(tables.contains(table), "no record in {table}");
    }
    let mut damaged = 0;
    for (table, key) in keys {
        if !damage_record(&database(&w), table, &key) {
            // It was about to go.
            continue;
        }
        damaged += 1;
        let what = format!("{} {key}", table.name());
        w.start().await;
        w.pass(70).await;
        let lost = Outcome::RecordsLost {
            lost: 1,
            from_backup: 0,
        };
        assert_eq!(report(&w).outcome, lost, "{what}");
        kept.assert(&w, &what);
        w.crash().await;
    }
    println!("{damaged} records damaged");
    assert!(damaged > 20);
}

/// A byte of the record is another one. Returns whether there is such a record.
fn damage_record(db: &Path, table: Table, key: &str) -> bool {
    let mut engine = SledBackend::open(db, SledOptions::default()).unwrap();
    let raw = codec::record_key(table, key);
    let found = engine.iter().map(Result::unwrap).find(|(k, _)| *k == raw);
    let Some((key, mut value)) = found else {
        return false;
    };
    let middle = value.len() / 2;
    value[middle] ^= 0x10;
    engine.apply(&[Op::Put { key, value }]).unwrap();
    engine.sync().unwrap();
    true
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_every_pod_as_it_is_wherever_the_log_is_damaged_or_cut() {
    const POINTS: usize = 24;
    let mut untouched = 0;
    let mut w = settled().await;
    let kept = Kept::of(&w);
    for point in (0..POINTS).step_by(stride()) {
        for cut in [false, true] {
            w.pass(30).await;
            w.crash().await;
            let file = database(&w).join("db");
            let mut bytes = fs::read(&file).unwrap();
            let end = bytes.iter().rposition(|b| *b != 0).unwrap() + 1;
            // Odd steps, so that headers, keys, values and framing are all hit.
            let at = (end * point / POINTS + point * 7) % end;
            if cut {
                bytes.truncate(at);
            } else {
                bytes[at] ^= 0x41;
            }
            fs::write(&file, bytes).unwrap();
            w.disk.settle(false);
            let before = w.disk.load();
            w.start().await;
            let what = format!("{at} of {end}, cut: {cut}");
            let (report, found) = w.opened.as_ref().unwrap();
            if report.new_epoch.is_none() {
                // Nothing was there that had been acknowledged as durable.
                let (found, before) = (durable(found), durable(&before));
                for (found, before) in found.iter().zip(&before) {
                    assert_eq!(
                        fields_apart(found, before),
                        Vec::<(&str, &str)>::new(),
                        "{what}: {report:?}"
                    );
                }
                assert_eq!(found.len(), before.len(), "{what}: {report:?}");
                untouched += 1;
            }
            w.pass(70).await;
            kept.assert(&w, &what);
        }
    }
    println!("{untouched} of {} hit nothing of use", 2 * POINTS);
    assert!(untouched < POINTS);
}

/// The words in which two records differ.
fn fields_apart<'a>(left: &'a str, right: &'a str) -> Vec<(&'a str, &'a str)> {
    let words = left.split(' ').zip(right.split(' '));
    words.filter(|(left, right)| left != right).collect()
}

/// The records that are durable whatever they say.
fn durable(state: &State) -> Vec<String> {
    let all = state.iter_all().filter(|(table, _, _)| {
        matches!(
            table,
            Table::Pods | Table::Admissions | Table::Workers | Table::Containers | Table::Volumes
        )
    });
    all.map(|(table, key, record)| format!("{} {key} {record:?}", table.name()))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_to_what_was_done_since_the_end_that_the_store_lost() {
    let mut w = World::on_files();
    w.behave(|pod, _| match pod {
        "once-sim" => exits(0, 40),
        _ => Behaviour::RunForever,
    });
    for (pod, policy) in [
        ("always", "Always"),
        ("once", "Never"),
        ("dead", "Always"),
        ("removed", "Always"),
    ] {
        w.manifest(pod, &spec(policy, ""));
    }
    w.start().await;
    w.until("all run", 30, |w| {
        ["always", "once", "dead", "removed"]
            .iter()
            .all(|pod| w.phase(pod) == "Running")
    })
    .await;
    w.crash().await;
    let older = w.dir.path().join("older");
    copy(&database(&w), &older);
    w.start().await;

    // All of this is lost: an end that was recorded, a pod that was removed, one that was added.
    w.manifest("late", &spec("Never", ""));
    let removed = w.uid("removed").to_string();
    w.remove_manifest("removed");
    w.until("it is done", 90, |w| {
        w.phase("once") == "Succeeded"
            && w.phase("late") == "Running"
            && w.left_of("removed", &removed).is_empty()
    })
    .await;
    let running = |w: &World| (w.running("always"), w.running("late"));
    let before = running(&w);
    let number = epoch(&w);
    w.crash().await;
    for container in w.of_pod("once") {
        w.fake.remove(&container.id);
    }
    for container in w.of_pod("dead") {
        w.fake.exit(&container.id, 1);
    }
    fs::remove_dir_all(database(&w)).unwrap();
    copy(&older, &database(&w));
    make_unreadable(&w);
    w.fake.clear_calls();
    w.start().await;
    let report = report(&w).clone();
    assert!(
        matches!(report.outcome, Outcome::EndMissing { lines: Some(n) } if n > 0),
        "{report:?}"
    );
    assert_eq!(epoch(&w), number + 1, "{report:?}");

    // Until the source has spoken nothing starts, and nothing that runs ends.
    w.pass(300).await;
    assert_eq!(running(&w), before, "{}", w.describe());
    let begun: Vec<_> = w
        .effects()
        .into_iter()
        .filter(|c| {
            ["run_", "create_", "start_"]
                .iter()
                .any(|p| c.starts_with(p))
        })
        .collect();
    assert_eq!(begun, Vec::<String>::new(), "{}", w.describe());
    make_readable(&w);
    w.until("the confirmed one runs again", 60, |w| {
        w.running("dead").len() == 1
    })
    .await;
    w.until("the removed one is forgotten", 60, |w| {
        !w.has_record("removed")
    })
    .await;
    w.until("the added one is known", 60, |w| {
        w.phase("late") == "Running"
    })
    .await;
    w.pass(120).await;
    assert_eq!(running(&w), before, "{}", w.describe());
    assert_eq!(w.starts("removed").len(), 1, "resurrected");
    assert_eq!(w.starts("once").len(), 1, "ran again");
    assert_eq!(w.starts("late").len(), 1, "started again");
    assert_nothing_wrong(&w);
}

/// The steps of a binary that is one schema ahead come with the fail points.
#[cfg(feature = "failpoints")]
#[tokio::test(start_paused = true)]
async fn restart_keeps_every_pod_as_it_is_through_an_upgrade_and_a_downgrade_of_the_schema() {
    use holdfast::store::migrate::{SCHEMA, migrate_with, migrations::test_step::NEWER};

    let mut w = settled().await;
    let kept = Kept::of(&w);
    w.crash().await;
    w.disk.settle(false);
    let (before, number) = (durable(&w.disk.load()), epoch(&w));
    let migrate = |w: &World, to: u32| {
        let now = holdfast::types::Clock::now(&w.clock);
        migrate_with(NEWER, &w.config.state_dir, to, now).unwrap()
    };

    let report = migrate(&w, SCHEMA + 1);
    let backup = report.backup.expect("a backup was taken first");
    assert!(fs::metadata(backup).unwrap().len() > 0);
    let newer = fs::read(database(&w).join("db")).unwrap();
    w.start().await;
    let found = Some(SCHEMA + 1);
    assert_eq!(self::report(&w).outcome, Outcome::NewerSchema { found });
    w.pass(70).await;
    kept.assert(&w, "older binary, newer store");
    w.crash().await;
    let untouched = fs::read(database(&w).join("db")).unwrap() == newer;
    assert!(untouched, "the newer store was written to");

    migrate(&w, SCHEMA);
    w.start().await;
    let (report, found) = w.opened.as_ref().unwrap();
    assert_eq!(report.outcome, Outcome::Opened);
    assert_eq!(durable(found), before);
    assert_eq!(epoch(&w), number, "no pod has to be confirmed again");
    w.pass(70).await;
    kept.assert(&w, "older binary, older store");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A container that runs is adopted in a new epoch. That is no reason to start another one of its pod, which may be
/// wanted no more.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_pod_that_half_runs_from_starting_the_rest_before_its_source_has_spoken() {
    let mut w = World::new();
    w.behave(|_, _| Behaviour::RunForever);
    let mut two: serde_json::Value = serde_json::from_str(&spec("Always", "")).unwrap();
    let mut other = two["containers"][0].clone();
    other["name"] = "other".into();
    two["containers"].as_array_mut().unwrap().push(other);
    w.manifest("two", &two.to_string());
    w.start().await;
    w.until("both run", 30, |w| {
        w.running("two").len() == 2 && w.phase("two") == "Running"
    })
    .await;
    w.pass(5).await;
    w.crash().await;
    let named = |name: &str| {
        let mut all = w.of_pod("two").into_iter();
        let found = all.find(|c| c.metadata.as_ref().is_some_and(|m| m.name == name));
        found.unwrap().id
    };
    let (main, other) = (named("main"), named("other"));
    w.fake.exit(&other, 1);
    w.integrity = Integrity::Restored;
    make_unreadable(&w);
    w.start().await;
    w.pass(600).await;
    assert_eq!(w.running("two"), std::slice::from_ref(&main));
    let starts = |w: &World| w.starts("two").len();
    assert_eq!(starts(&w), 2, "{}", w.describe());

    make_readable(&w);
    w.until("the confirmed pod is whole", 60, |w| {
        w.running("two").len() == 2
    })
    .await;
    assert_eq!(starts(&w), 3, "{}", w.describe());
    assert!(w.running("two").contains(&main));
    assert_nothing_wrong(&w);
}

/// What cannot be inspected may run: its files are not left over because the store is empty and no source wants it.
#[tokio::test(start_paused = true)]
async fn restart_keeps_the_files_of_a_running_pod_that_cannot_be_inspected_when_the_store_is_lost()
{
    let mut w = World::new();
    w.behave(|_, _| Behaviour::RunForever);
    w.manifest("web", &spec("Always", ""));
    w.start().await;
    w.until("it runs", 30, |w| w.phase("web") == "Running")
        .await;
    let files = w.dir.path().join("root/pods").join(w.uid("web").as_str());
    assert!(files.exists());
    w.crash().await;
    w.disk = Disk::default();
    w.integrity = Integrity::Lost;
    w.remove_manifest("web");
    let broken = Fault::Error(tonic::Code::Unknown, "input/output error".to_owned());
    w.fail_always("podsandbox_status", broken);
    w.start().await;
    w.pass(300).await;
    assert_eq!(w.running("web").len(), 1, "{}", w.describe());
    assert!(files.exists(), "{}", w.describe());

    w.clear_faults();
    w.until("it is stopped", 60, |w| w.running("web").is_empty())
        .await;
    w.until("its files are gone", 300, |_| !files.exists())
        .await;
}

//! Damaged, lost, foreign, full, older and newer stores: each opens, keeps what can be kept, and says so.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

mod store_support;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use holdfast::core::state::{
    ContainerRecord, EpochReason, FactRecord, ObjectRecord, Record as _, State, Table, Transaction,
    kinds,
};
use holdfast::store::backend::{Backend as _, Op, SledBackend, SledOptions};
use holdfast::store::backup::{self, BackupMeta};
use holdfast::store::codec;
use holdfast::store::migrate::migrations::{self, step_0001, step_0002};
use holdfast::store::migrate::{
    self, MigrateError, MigrationSet, Record, Records, SCHEMA, Step, StepError,
};
use holdfast::store::open::{OpenError, Opened, Outcome, open};
use holdfast::store::verify;
use store_support::*;

/// sled's panics on damaged files are expected and caught; they need not fill the output.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let own = info.location().is_some_and(|l| !l.file().contains("sled-"));
            if own {
                before(info);
            }
        }));
    });
}

/// A store with `pods` pods whose containers restarted `rounds` times, closed; its last state.
fn build(dir: &Path, pods: u64, rounds: u32) -> State {
    let store = start(open_dir(dir));
    runtime().block_on(async {
        for round in 1..=rounds {
            for index in 0..pods {
                store.commit(pod_transaction(index, round)).await.unwrap();
            }
        }
        store.sync().await.unwrap();
    });
    let state = (*store.snapshot()).clone();
    drop(store);
    // A second opening leaves a snapshot of sled behind.
    drop(open_dir(dir));
    state
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn back_up(dir: &Path, state: &State) {
    let meta = BackupMeta::of(state, 5, at(2_000));
    let path = dir.join("backups").join(meta.file_name());
    backup::write(state, &path, &meta).unwrap();
}

#[derive(Debug, Default)]
struct Tally {
    cases: usize,
    whole: usize,
    records: usize,
    exact: usize,
    older: usize,
    missing: usize,
    silent: Vec<String>,
}

/// Damages a copy of `template`, opens it, and compares with what was acknowledged.
fn try_damage(
    template: &Path,
    want: &BTreeMap<String, String>,
    tally: &mut BTreeMap<&'static str, Tally>,
    kind: &'static str,
    label: &str,
    damage: impl Fn(&Path),
) -> Opened {
    let dir = tempfile::tempdir().unwrap();
    copy_tree(template, dir.path());
    damage(&dir.path().join("db"));
    let opened = open(&options(dir.path()))
        .unwrap_or_else(|e| panic!("{kind} {label}: refused to open: {e}"));
    let got = content(&opened.loaded.state);
    let tally = tally.entry(kind).or_default();
    tally.cases += 1;
    tally.records += want.len();
    let exact = want.iter().filter(|(k, v)| got.get(*k) == Some(*v)).count();
    let missing = want.keys().filter(|k| !got.contains_key(*k)).count();
    tally.exact += exact;
    tally.missing += missing;
    tally.older += want.len() - exact - missing;
    if exact == want.len() {
        tally.whole += 1;
    } else if opened.report.new_epoch.is_none() {
        tally.silent.push(label.to_owned());
    }
    assert!(
        got.keys().all(|key| want.contains_key(key)),
        "{kind} {label}: a record was invented"
    );
    assert!(opened.loaded.state.meta().is_some(), "{kind} {label}");
    // What was opened can be written, and opens again as it is.
    let content_before = content(&opened.loaded.state);
    let report = opened.report.clone();
    let store = start(opened);
    runtime()
        .block_on(store.commit(pod_transaction(999_999, 1)))
        .unwrap();
    runtime().block_on(store.close()).unwrap();
    let again = open_dir(dir.path());
    let mut content_again = content(&again.loaded.state);
    content_again.retain(|key, _| !key.contains(&uid(999_999)));
    assert_eq!(content_again, content_before, "{kind} {label}: second open");
    Opened { report, ..again }
}

fn print_tally(title: &str, tally: &BTreeMap<&'static str, Tally>) {
    for (kind, t) in tally {
        println!(
            "{title} {kind}: {} cases, {} without any loss; of {} records {} as acknowledged ({:.1} %), {} in an \
             older version, {} missing; {} cases lost something without a new epoch",
            t.cases,
            t.whole,
            t.records,
            t.exact,
            100.0 * t.exact as f64 / t.records.max(1) as f64,
            t.older,
            t.missing,
            t.silent.len()
        );
    }
}

fn file_len(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

fn flip(path: &Path, offset: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[offset as usize] ^= 0x41;
    fs::write(path, bytes).unwrap();
}

fn truncate(path: &Path, len: u64) {
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(len)
        .unwrap();
}

/// End of what was written to the log: the rest of its last segment is filler.
fn log_end(db: &Path) -> u64 {
    let bytes = fs::read(db).unwrap();
    bytes.iter().rposition(|b| *b != 0).unwrap() as u64 + 1
}

fn files(db: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(db)
        .unwrap()
        .map(|entry| PathBuf::from(entry.unwrap().file_name()))
        .filter(|name| db.join(name).is_file())
        .collect();
    found.sort();
    found
}

fn damage_matrix(template: &Path, state: &State, points: u64) -> BTreeMap<&'static str, Tally> {
    quiet();
    let want = content(state);
    let mut tally = BTreeMap::new();
    for name in files(&template.join("db")) {
        let len = file_len(&template.join("db").join(&name));
        let text = name.to_string_lossy().into_owned();
        let (flips, cuts, deletes) = match text.as_str() {
            "db" => ("db: byte flipped", "db: cut off", "db: deleted"),
            "conf" => ("conf: byte flipped", "conf: cut off", "conf: deleted"),
            _ => ("snap: byte flipped", "snap: cut off", "snap: deleted"),
        };
        let points = if text == "db" { points } else { points / 4 };
        let end = if text == "db" {
            log_end(&template.join("db/db"))
        } else {
            len
        };
        for point in 0..points {
            // Odd steps, so that headers, keys, values and framing are all hit.
            let offset = (end * point / points + point * 7) % end;
            let label = format!("{text} at {offset} of {end}");
            try_damage(template, &want, &mut tally, flips, &label, |db| {
                flip(&db.join(&name), offset)
            });
            if point % 2 == 0 {
                let cut = end * point / points;
                let label = format!("{text} at {cut} of {end}");
                try_damage(template, &want, &mut tally, cuts, &label, |db| {
                    truncate(&db.join(&name), cut)
                });
            }
        }
        try_damage(template, &want, &mut tally, deletes, &text, |db| {
            fs::remove_file(db.join(&name)).unwrap();
        });
    }
    tally
}

// Invariant STORE-8.
#[test]
fn restart_keeps_what_a_damaged_store_still_holds() {
    let template = tempfile::tempdir().unwrap();
    let state = build(template.path(), 150, 4);
    let end = log_end(&template.path().join("db/db"));
    let tally = damage_matrix(template.path(), &state, 48);
    print_tally("no backup,", &tally);
    for kind in [
        "snap: byte flipped",
        "snap: cut off",
        "snap: deleted",
        "conf: byte flipped",
        "conf: cut off",
        "conf: deleted",
    ] {
        if let Some(t) = tally.get(kind) {
            assert_eq!(t.whole, t.cases, "{kind}: derived data costs no record");
        }
    }
    for (kind, t) in &tally {
        assert!(
            t.silent.is_empty(),
            "{kind}: loss without a new epoch: {:?}",
            t.silent
        );
    }
    let flipped = &tally["db: byte flipped"];
    assert!(
        flipped.exact * 100 >= flipped.records * 97,
        "one byte costs little"
    );
    // Without the mark only damage to the last two commits looks like a loss of power.
    fs::remove_file(template.path().join("mark")).unwrap();
    let tally = damage_matrix(template.path(), &state, 12);
    print_tally("no backup, no mark,", &tally);
    let tail = end.saturating_sub(4096);
    for label in &tally["db: byte flipped"].silent {
        let offset: u64 = label.split(' ').nth(2).unwrap().parse().unwrap();
        assert!(offset >= tail, "loss without a new epoch: {label}");
    }
}

/// A store whose newest commits are newer than its backup, closed; its last state.
fn build_beyond_backup(dir: &Path) -> State {
    let saved = build(dir, 20, 3);
    back_up(dir, &saved);
    let store = start(open_dir(dir));
    runtime().block_on(async {
        for round in 4..=12 {
            for index in 0..20 {
                store.commit(pod_transaction(index, round)).await.unwrap();
            }
        }
        // What the backup has and the store has not: it must not come back.
        let gone = Transaction::new()
            .delete::<holdfast::core::state::PodRecord>(uid(0))
            .delete::<ContainerRecord>(format!("{}/main", uid(0)));
        store.commit(gone).await.unwrap();
        for round in 13..=30 {
            for index in 1..20 {
                store.commit(pod_transaction(index, round)).await.unwrap();
            }
        }
        store.close().await.unwrap();
    });
    let opened = open_dir(dir);
    assert_eq!(opened.report.outcome, Outcome::Opened);
    opened.loaded.state
}

#[test]
fn a_log_that_lost_its_end_begins_a_new_epoch_wherever_it_was_cut() {
    quiet();
    let template = tempfile::tempdir().unwrap();
    let want = content(&build_beyond_backup(template.path()));
    let end = log_end(&template.path().join("db/db"));
    let far = (1..40).map(|point| end * point / 40);
    let near = (1..60).map(|step| end - step * 97);
    let (mut short, mut unharmed) = (0, 0);
    for cut in far.chain(near) {
        let dir = tempfile::tempdir().unwrap();
        copy_tree(template.path(), dir.path());
        truncate(&dir.path().join("db/db"), cut);
        let opened = open_dir(dir.path());
        let got = content(&opened.loaded.state);
        let report = opened.report.clone();
        let label = format!("cut at {cut} of {end}: {report:?}");
        if got == want && report.new_epoch.is_none() {
            unharmed += 1;
            continue;
        }
        assert_eq!(report.new_epoch, Some(EpochReason::Rebuilt), "{label}");
        let epoch = opened.loaded.state.meta().unwrap().epoch.number;
        assert_eq!(epoch, 2, "{label}");
        if let Outcome::EndMissing { lines } = report.outcome {
            short += 1;
            assert!(lines.is_none_or(|n| n > 0), "{label}");
            let moved = report.quarantined.iter();
            let derived = |p: &PathBuf| p.to_string_lossy().contains("quarantine/snap-");
            assert!(moved.clone().all(derived), "{label}");
            let restarts = opened
                .loaded
                .state
                .record::<ContainerRecord>(&format!("{}/main", uid(1)))
                .unwrap()
                .restart_count;
            assert!(restarts >= 3, "{label}");
            let gone = !got.contains_key(&format!("pods/{}", uid(0)));
            assert!(gone || restarts <= 13, "{label}: a deleted record is back");
        }
        drop(opened);
        let again = open_dir(dir.path());
        assert_eq!(again.report.outcome, Outcome::Opened, "{label}");
        assert_eq!(again.report.new_epoch, None, "told once: {label}");
        assert_eq!(content(&again.loaded.state), got, "{label}");
    }
    println!("{short} cuts were noticed by the mark alone, {unharmed} cut off nothing of use");
    assert!(short >= 50, "{short}");
    assert!(unharmed <= 5, "{unharmed}");
}

// Invariant STORE-5.
#[test]
fn an_older_copy_of_the_database_begins_a_new_epoch_and_one_of_the_whole_directory_does_not() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), 5, 2);
    let copy = tempfile::tempdir().unwrap();
    copy_tree(dir.path(), copy.path());
    let store = start(open_dir(dir.path()));
    runtime().block_on(async {
        store.commit(pod_transaction(3, 9)).await.unwrap();
        store.close().await.unwrap();
    });
    let whole = open_dir(copy.path());
    assert_eq!(
        whole.report.new_epoch, None,
        "with its own mark it is consistent"
    );
    drop(whole);
    let put_back = |from: &Path| {
        fs::remove_dir_all(dir.path().join("db")).unwrap();
        copy_tree(&from.join("db"), &dir.path().join("db"));
    };
    put_back(copy.path());
    let found = verify::verify(dir.path()).unwrap();
    assert!(found.problems[0].contains("older copy"), "{found:?}");
    let opened = open_dir(dir.path());
    assert_eq!(
        opened.report.outcome,
        Outcome::EndMissing { lines: Some(1) }
    );
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    assert!(
        opened.report.messages[0].contains("an end of the database is missing"),
        "{:?}",
        opened.report.messages
    );
    drop(opened);
    assert_eq!(open_dir(dir.path()).report.new_epoch, None);
    // The same copy again: now it is of an older epoch.
    put_back(copy.path());
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::EndMissing { lines: None });
    assert_eq!(opened.loaded.state.meta().unwrap().epoch.number, 3);
}

#[test]
fn a_database_of_which_nothing_can_be_read_is_set_aside_and_told() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), 5, 2);
    for backup in fs::read_dir(dir.path().join("backups")).unwrap() {
        fs::remove_file(backup.unwrap().path()).unwrap();
    }
    let db = dir.path().join("db/db");
    let garbage = vec![0xA5; usize::try_from(fs::metadata(&db).unwrap().len()).unwrap()];
    fs::write(&db, &garbage).unwrap();
    let opened = open_dir(dir.path());
    let nothing = Outcome::Salvaged {
        kept: 0,
        lost: 0,
        from_backup: 0,
    };
    assert_eq!(opened.report.outcome, nothing);
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    let aside = &opened.report.quarantined[0];
    assert_eq!(fs::read(aside.join("db")).unwrap(), garbage);
    assert_eq!(opened.loaded.state.meta().unwrap().epoch.number, 2);
    drop(opened);
    let again = open_dir(dir.path()).report;
    assert_eq!((again.outcome, again.new_epoch), (Outcome::Opened, None));
}

#[test]
fn a_mark_that_is_lost_or_torn_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 5, 2);
    let mark = dir.path().join("mark");
    let calm = |label: &str| {
        let opened = open_dir(dir.path());
        assert_eq!(opened.report.outcome, Outcome::Opened, "{label}");
        assert_eq!(opened.report.new_epoch, None, "{label}");
        assert_eq!(content(&opened.loaded.state), content(&state), "{label}");
    };
    let bytes = fs::read(&mark).unwrap();
    for len in [0, 8, 20, bytes.len() - 1] {
        truncate(&mark, len as u64);
        calm("torn");
        fs::write(&mark, &bytes).unwrap();
    }
    flip(&mark, 25);
    calm("changed");
    fs::remove_file(&mark).unwrap();
    fs::create_dir(&mark).unwrap();
    calm("unreadable");
    let store = start(open_dir(dir.path()));
    runtime()
        .block_on(store.commit(Transaction::new().journal(None, "goes on", "")))
        .unwrap();
    runtime().block_on(store.sync()).unwrap();
    runtime().block_on(store.close()).unwrap();
    fs::remove_dir(&mark).unwrap();
    calm("missing");
}

#[test]
fn a_restored_store_is_not_taken_for_a_short_one_and_the_one_before_it_is() {
    use holdfast::store::restore;
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 5, 2);
    back_up(dir.path(), &state);
    let store = start(open_dir(dir.path()));
    runtime()
        .block_on(store.commit(pod_transaction(3, 9)))
        .unwrap();
    runtime().block_on(store.close()).unwrap();
    let saved = backup::newest(&dir.path().join("backups")).0.unwrap();
    let restored = restore::apply(
        dir.path(),
        &saved,
        &restore::RestoreOptions {
            identity: identity(),
            allow_other_node: false,
            now: at(3_000),
        },
    )
    .unwrap();
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(opened.report.new_epoch, None, "it has begun one already");
    let store = start(opened);
    runtime()
        .block_on(store.commit(pod_transaction(4, 4)))
        .unwrap();
    runtime().block_on(store.close()).unwrap();
    assert_eq!(open_dir(dir.path()).report.new_epoch, None);
    // Undone by hand, with the commits since.
    fs::remove_dir_all(dir.path().join("db")).unwrap();
    fs::rename(restored.previous.unwrap(), dir.path().join("db")).unwrap();
    fs::remove_dir_all(dir.path().join("backups")).unwrap();
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    let meta = opened.loaded.state.meta().unwrap();
    assert_eq!(meta.epoch.number, restored.epoch + 1, "not reused");
}

#[test]
fn a_lost_state_directory_is_told_from_a_new_node() {
    let dir = tempfile::tempdir().unwrap();
    let mut used = options(&dir.path().join("state"));
    used.node_was_used = true;
    let opened = open(&used).unwrap();
    assert_eq!(opened.report.outcome, Outcome::Created);
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    drop(opened);
    assert_eq!(open(&used).unwrap().report.new_epoch, None, "told once");
}

#[test]
fn restart_restores_the_rest_of_a_damaged_store_from_the_backup() {
    let template = tempfile::tempdir().unwrap();
    let state = build(template.path(), 60, 3);
    back_up(template.path(), &state);
    let tally = damage_matrix(template.path(), &state, 24);
    print_tally("with backup,", &tally);
    for (kind, t) in &tally {
        assert_eq!(t.missing, 0, "{kind}: the backup has what the store lost");
        if kind.contains("cut off") || kind.contains("deleted") {
            assert_eq!(t.whole, t.cases, "{kind}");
            assert!(t.silent.is_empty(), "{kind}");
        }
    }
}

#[test]
fn a_torn_snapshot_does_not_keep_the_store_from_opening() {
    quiet();
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 20, 2);
    let torn = dir.path().join("db/snap.00000000DEADBEEF.generating");
    fs::write(&torn, b"half a snapsh").unwrap();
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(content(&opened.loaded.state), content(&state));
    assert!(!torn.exists());
    drop(opened);
    let corrupt = dir.path().join("db/snap.7FFFFFFFFFFFFFF0");
    fs::write(&corrupt, b"no snapshot at all, but long enough").unwrap();
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::SnapshotsRemoved);
    assert_eq!(content(&opened.loaded.state), content(&state));
    assert_eq!(opened.report.new_epoch, None, "no record was lost");
    assert!(
        !opened.report.quarantined.is_empty(),
        "moved aside, not deleted"
    );
}

#[test]
fn an_empty_or_cut_off_snapshot_costs_no_record() {
    quiet();
    for content_of in ["", "ab", "twelve bytes"] {
        let dir = tempfile::tempdir().unwrap();
        let state = build(dir.path(), 20, 2);
        let newest = dir.path().join("db/snap.7FFFFFFFFFFFFFF0");
        fs::write(newest, content_of).unwrap();
        let opened = open_dir(dir.path());
        assert_eq!(opened.report.outcome, Outcome::SnapshotsRemoved);
        assert_eq!(content(&opened.loaded.state), content(&state));
        assert_eq!(opened.report.new_epoch, None);
        drop(opened);
        assert_eq!(open_dir(dir.path()).report.outcome, Outcome::Opened);
    }
}

/// Adds a value of a size that sled keeps in a file of its own. Returns the path of that file.
fn add_blob(dir: &Path) -> PathBuf {
    let db = dir.join("db");
    let mut backend = SledBackend::open(&db, SledOptions::default()).unwrap();
    let big = Op::Put {
        key: codec::record_key(holdfast::core::state::Table::Volumes, "of another program"),
        value: vec![7; 300_000],
    };
    backend.apply(&[big]).unwrap();
    backend.sync().unwrap();
    drop(backend);
    let blobs = fs::read_dir(db.join("blobs")).unwrap();
    let mut blobs: Vec<PathBuf> = blobs.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(blobs.len(), 1, "{blobs:?}");
    blobs.remove(0)
}

#[test]
fn a_damaged_blob_costs_its_own_record_only() {
    quiet();
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 5] = [
        ("deleted", |blob| fs::remove_file(blob).unwrap()),
        ("empty", |blob| fs::write(blob, "").unwrap()),
        ("cut off", |blob| {
            let file = fs::File::options().write(true).open(blob).unwrap();
            file.set_len(1000).unwrap();
        }),
        ("one bit", |blob| {
            let mut bytes = fs::read(blob).unwrap();
            bytes[150_000] ^= 1;
            fs::write(blob, bytes).unwrap();
        }),
        ("a pipe", |blob| {
            fs::remove_file(blob).unwrap();
            nix::unistd::mkfifo(blob, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
    ];
    for (damage, apply) in damages {
        let dir = tempfile::tempdir().unwrap();
        let state = build(dir.path(), 20, 2);
        back_up(dir.path(), &state);
        apply(&add_blob(dir.path()));
        let opened = open_dir(dir.path());
        assert!(
            matches!(opened.report.outcome, Outcome::Salvaged { .. }),
            "{damage}: {:?}",
            opened.report
        );
        assert_eq!(content(&opened.loaded.state), content(&state), "{damage}");
        drop(opened);
        assert_eq!(
            open_dir(dir.path()).report.outcome,
            Outcome::Opened,
            "{damage}"
        );
    }
}

/// Opens a store whose engine may not answer.
fn open_soon(dir: &Path) -> (Opened, Duration) {
    let begin = tokio::time::Instant::now();
    let mut options = options(dir);
    options.sled.open_limit = Duration::from_secs(2);
    (open(&options).unwrap(), begin.elapsed())
}

#[test]
fn an_engine_that_does_not_answer_is_given_up_on() {
    quiet();
    let pipe = |path: &Path| {
        if path.exists() {
            fs::remove_file(path).unwrap();
        }
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    };
    // Before it has locked its file: the file that it waits for is moved aside, and then it opens.
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 20, 2);
    pipe(&dir.path().join("db/conf"));
    let (opened, took) = open_soon(dir.path());
    assert_eq!(opened.report.outcome, Outcome::SnapshotsRemoved);
    let messages = opened.report.messages.join("\n");
    assert!(
        messages.contains("open the database: no answer from sled within 2 s"),
        "{messages}"
    );
    assert_eq!(content(&opened.loaded.state), content(&state));
    assert!(took < Duration::from_secs(20), "{took:?}");
    drop(opened);
    assert_eq!(open_dir(dir.path()).report.outcome, Outcome::Opened);

    // While it loads, with the file locked for good: the records are read from its log.
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 20, 2);
    pipe(&dir.path().join("db/snap.7FFFFFFFFFFFFFF0"));
    let (opened, took) = open_soon(dir.path());
    assert!(
        matches!(opened.report.outcome, Outcome::Salvaged { lost: 0, .. }),
        "{:?}",
        opened.report
    );
    assert_eq!(content(&opened.loaded.state), content(&state));
    assert!(took < Duration::from_secs(20), "{took:?}");
    drop(opened);
    assert_eq!(open_dir(dir.path()).report.outcome, Outcome::Opened);
}

#[test]
fn a_single_bad_record_is_set_aside_and_taken_from_the_backup() {
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 10, 2);
    back_up(dir.path(), &state);
    let key = format!("{}/main", uid(3));
    let damage = || {
        let mut backend = SledBackend::open(dir.path().join("db"), SledOptions::default()).unwrap();
        let raw = codec::record_key(Table::Containers, &key);
        let (_, mut value) = backend
            .iter()
            .map(Result::unwrap)
            .find(|(k, _)| *k == raw)
            .unwrap();
        *value.last_mut().unwrap() ^= 1;
        backend.apply(&[Op::Put { key: raw, value }]).unwrap();
        backend.sync().unwrap();
    };
    damage();
    let opened = open_dir(dir.path());
    let expected = Outcome::RecordsLost {
        lost: 1,
        from_backup: 1,
    };
    assert_eq!(opened.report.outcome, expected);
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    assert_eq!(content(&opened.loaded.state), content(&state));
    assert_eq!(opened.loaded.kept.len(), 1, "kept for a look at it");
    drop(opened);
    fs::remove_dir_all(dir.path().join("backups")).unwrap();
    damage();
    let opened = open_dir(dir.path());
    let expected = Outcome::RecordsLost {
        lost: 1,
        from_backup: 0,
    };
    assert_eq!(opened.report.outcome, expected);
    assert!(
        opened
            .loaded
            .state
            .record::<ContainerRecord>(&key)
            .is_none()
    );
    assert_eq!(
        content(&opened.loaded.state).len(),
        content(&state).len() - 1
    );
}

#[test]
fn a_deleted_store_is_made_anew_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("state");
    let opened = open_dir(&state_dir);
    assert_eq!(opened.report.outcome, Outcome::Created);
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Fresh));
    drop(opened);
    build(&state_dir, 3, 1);
    fs::remove_dir_all(state_dir.join("db")).unwrap();
    let opened = open_dir(&state_dir);
    assert_eq!(opened.report.outcome, Outcome::Created);
    assert_eq!(
        opened.report.new_epoch,
        Some(EpochReason::Rebuilt),
        "there was one"
    );
    drop(opened);
    // With a backup its records are back, in a new epoch.
    let other = dir.path().join("other");
    let state = build(&other, 3, 1);
    back_up(&other, &state);
    fs::remove_dir_all(other.join("db")).unwrap();
    let opened = open_dir(&other);
    assert!(
        matches!(opened.report.outcome, Outcome::Salvaged { from_backup, .. } if from_backup > 0)
    );
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    assert_eq!(content(&opened.loaded.state), content(&state));
    let meta = opened.loaded.state.meta().unwrap();
    assert_eq!(meta.epoch.number, state.meta().unwrap().epoch.number + 1);
}

#[test]
fn another_machine_or_node_name_begins_a_new_epoch_once() {
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 2, 1);
    let mut moved = options(dir.path());
    moved.identity.machine_id = "machine-b".to_owned();
    let opened = open(&moved).unwrap();
    assert_eq!(opened.report.new_epoch, Some(EpochReason::OtherMachine));
    assert_eq!(content(&opened.loaded.state), content(&state));
    drop(opened);
    let opened = open(&moved).unwrap();
    assert_eq!(opened.report.new_epoch, None);
    drop(opened);
    moved.identity.node_name = "node-b".to_owned();
    let opened = open(&moved).unwrap();
    assert_eq!(opened.report.new_epoch, Some(EpochReason::OtherMachine));
}

#[test]
fn a_store_that_another_process_has_open_is_refused_and_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let opened = open_dir(dir.path());
    let refused = open(&options(dir.path())).unwrap_err();
    assert!(matches!(refused, OpenError::Locked { .. }), "{refused}");
    assert!(
        fs::read_dir(dir.path().join("quarantine"))
            .unwrap()
            .next()
            .is_none()
    );
    drop(opened);
    assert_eq!(open_dir(dir.path()).report.outcome, Outcome::Opened);
}

#[test]
fn verify_and_repair_name_the_damage_and_mend_it() {
    quiet();
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 100, 3);
    assert!(verify::verify(dir.path()).unwrap().is_ok());
    let db = dir.path().join("db/db");
    flip(&db, log_end(&db) / 3);
    let before = fs::read(&db).unwrap();
    let report = verify::verify(dir.path()).unwrap();
    assert!(!report.is_ok());
    assert!(
        report.problems[0].contains("damaged at offset"),
        "{:?}",
        report.problems
    );
    assert!(before == fs::read(&db).unwrap(), "verify changed the store");
    let present = verify::read_copy(dir.path()).unwrap();
    let repaired = verify::repair(&options(dir.path()), &present).unwrap();
    assert!(matches!(repaired.open.outcome, Outcome::Salvaged { .. }));
    assert!(verify::verify(dir.path()).unwrap().is_ok());
    let copy = verify::read_copy(dir.path()).unwrap();
    let want = content(&state);
    let got = content(&copy.loaded.state);
    let kept = want.keys().filter(|key| got.contains_key(*key)).count();
    assert!(kept * 100 >= want.len() * 90, "{kept} of {}", want.len());
}

// Schema 3 of these tests: containers gain a counter that is derived from the record on the way up and
// dropped on the way down.

#[derive(serde::Serialize, serde::Deserialize)]
struct ContainerV2 {
    v1: step_0001::records::Container,
    restarts_seen: u64,
}

const CONTAINERS: u8 = 7;

fn set_schema(records: &mut Records, schema: u32) -> Result<(), StepError> {
    let at = (step_0001::META.0, step_0001::META.1.to_owned());
    let meta = records.get_mut(&at).expect("a meta record");
    let mut decoded: step_0001::records::Meta = migrations::codec::decode(&at, meta, 1)?;
    decoded.schema = schema;
    *meta = migrations::codec::encode(&at, &decoded, 1)?;
    Ok(())
}

fn map_containers(
    records: &mut Records,
    map: impl Fn(&(u8, String), &Record) -> Result<Record, StepError>,
) -> Result<(), StepError> {
    for (at, record) in records.iter_mut().filter(|(at, _)| at.0 == CONTAINERS) {
        *record = map(at, record)?;
    }
    Ok(())
}

fn forward_3(mut records: Records) -> Result<Records, StepError> {
    map_containers(&mut records, |at, record| {
        let v1: step_0001::records::Container = migrations::codec::decode(at, record, 1)?;
        let restarts_seen = u64::from(v1.restart_count);
        migrations::codec::encode(at, &ContainerV2 { v1, restarts_seen }, 2)
    })?;
    set_schema(&mut records, 3)?;
    Ok(records)
}

fn backward_3(mut records: Records) -> Result<Records, StepError> {
    map_containers(&mut records, |at, record| {
        let v2: ContainerV2 = migrations::codec::decode(at, record, 2)?;
        migrations::codec::encode(at, &v2.v1, 1)
    })?;
    set_schema(&mut records, 2)?;
    Ok(records)
}

const ONE_AHEAD: MigrationSet = MigrationSet::new(&[
    step_0001::STEP,
    step_0002::STEP,
    Step {
        to: 3,
        name: "count restarts seen (test only)",
        forward: forward_3,
        backward: backward_3,
    },
]);

#[test]
fn upgrade_and_downgrade_by_one_schema_lose_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 30, 3);
    runtime().block_on(async {
        let store = start(open_dir(dir.path()));
        for (key, record) in one_of_each() {
            store.commit(put_any(&key, record)).await.unwrap();
        }
        store.close().await.unwrap();
    });
    let before = open_dir(dir.path()).loaded.state;
    assert!(before.len_of(Table::Containers) > state.containers.len());
    let up = migrate::migrate_with(ONE_AHEAD, dir.path(), 3, at(5_000)).unwrap();
    assert_eq!((up.from, up.to), (2, 3));
    let saved = backup::read(&up.backup.unwrap()).unwrap();
    assert_eq!(
        content(&saved.load().state),
        content(&before),
        "backup first"
    );
    assert!(
        up.previous.unwrap().exists(),
        "the database of before is kept"
    );
    let raw = verify::read_copy(dir.path()).unwrap();
    assert_eq!(raw.schema, Some(3));
    assert!(raw.loaded.newer().is_some());

    let down = migrate::migrate_with(ONE_AHEAD, dir.path(), 2, at(6_000)).unwrap();
    assert_eq!((down.from, down.to, down.records), (3, 2, up.records));
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(opened.report.new_epoch, None, "no pod is disturbed");
    assert_eq!(content(&opened.loaded.state), content(&before));
    assert_eq!(opened.loaded.state.journal.len(), before.journal.len());
    assert_eq!(opened.loaded.state.meta(), before.meta());
}

#[test]
fn an_old_binary_leaves_a_newer_store_untouched_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 10, 2);
    migrate::migrate_with(ONE_AHEAD, dir.path(), 3, at(5_000)).unwrap();
    let bytes = |name: &str| fs::read(dir.path().join("db").join(name)).unwrap();
    let before = (files(&dir.path().join("db")), bytes("db"));
    let opened = open_dir(dir.path());
    assert_eq!(
        opened.report.outcome,
        Outcome::NewerSchema { found: Some(3) }
    );
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    assert!(content(&opened.loaded.state).is_empty(), "a fresh stand-in");
    assert!(opened.report.messages[0].contains("store migrate --to 2"));
    let store = start(opened);
    runtime()
        .block_on(store.commit(pod_transaction(77, 1)))
        .unwrap();
    runtime().block_on(store.close()).unwrap();
    assert_eq!(before.0, files(&dir.path().join("db")));
    assert!(before.1 == bytes("db"), "not a byte changed");
    // Without the schema file the records themselves say it.
    fs::remove_file(dir.path().join("schema")).unwrap();
    let opened = open_dir(dir.path());
    assert_eq!(
        opened.report.outcome,
        Outcome::NewerSchema { found: Some(3) }
    );
    assert!(
        content(&opened.loaded.state).is_empty(),
        "an older stand-in is not used"
    );
    drop(opened);
    migrate::migrate_with(ONE_AHEAD, dir.path(), 2, at(6_000)).unwrap();
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(content(&opened.loaded.state), content(&state));
    assert!(
        !dir.path().join("db.schema-2").exists(),
        "the stand-in is set aside"
    );
}

#[test]
fn repair_of_a_newer_store_changes_nothing() {
    fn all(dir: &Path) -> Vec<(PathBuf, Option<Vec<u8>>)> {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(all(&path));
                found.push((path, None));
            } else {
                let bytes = fs::read(&path).unwrap();
                found.push((path, Some(bytes)));
            }
        }
        found.sort();
        found
    }
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), 10, 2);
    migrate::migrate_with(ONE_AHEAD, dir.path(), 3, at(5_000)).unwrap();
    // With the schema file, and by the records alone.
    for _ in 0..2 {
        let before = all(dir.path());
        let present = verify::read_copy(dir.path()).unwrap();
        let repaired = verify::repair(&options(dir.path()), &present).unwrap();
        assert_eq!(
            repaired.open.outcome,
            Outcome::NewerSchema { found: Some(3) }
        );
        assert!(before == all(dir.path()), "repair changed the store");
        fs::remove_file(dir.path().join("schema")).unwrap_or_default();
    }
}

#[test]
fn migrate_refuses_schemas_it_does_not_know() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), 1, 1);
    for to in [0, 3, 99] {
        let error = migrate::migrate(dir.path(), to, at(1)).unwrap_err();
        assert!(
            matches!(error, MigrateError::UnknownTarget { .. }),
            "{error}"
        );
        assert!(
            error.to_string().contains("knows schemas 1 to 2"),
            "{error}"
        );
    }
    let same = migrate::migrate(dir.path(), 2, at(1)).unwrap();
    assert_eq!(same.backup, None, "nothing to do");
    let empty = tempfile::tempdir().unwrap();
    let error = migrate::migrate(empty.path(), 2, at(1)).unwrap_err();
    assert!(matches!(error, MigrateError::NoSchema { .. }), "{error}");
    migrate::migrate_with(ONE_AHEAD, dir.path(), 3, at(1)).unwrap();
    let error = migrate::migrate(dir.path(), 2, at(1)).unwrap_err();
    assert!(
        matches!(error, MigrateError::NewerStore { found: 3, .. }),
        "{error}"
    );
}

#[test]
fn an_interrupted_replacement_is_finished_or_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let state = build(dir.path(), 3, 1);
    // Crash while building: forgotten.
    fs::create_dir(dir.path().join("db.tmp")).unwrap();
    fs::write(dir.path().join("db.tmp/db"), b"half").unwrap();
    // Crash between the two renames: the new one is complete, the old one has moved.
    fs::rename(dir.path().join("db"), dir.path().join("db.next")).unwrap();
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(content(&opened.loaded.state), content(&state));
    assert!(!dir.path().join("db.tmp").exists() && !dir.path().join("db.next").exists());
}

#[test]
fn the_frozen_records_of_the_newest_schema_are_those_of_the_live_types() {
    assert_eq!(SCHEMA, 2, "a new schema has frozen records of its own");
    let mut tables = std::collections::BTreeSet::new();
    let dir = tempfile::tempdir().unwrap();
    let opened = open_dir(dir.path());
    let store = start(opened);
    runtime().block_on(async {
        for (key, record) in one_of_each() {
            store.commit(put_any(&key, record)).await.unwrap();
        }
    });
    let pairs = codec::encode_state(&store.snapshot()).collect::<Vec<_>>();
    let raw = codec::load_raw(pairs.into_iter().map(|pair| Ok(pair.unwrap())));
    for record in raw.records {
        let again = step_0002::records::round_trip(record.table.tag(), &record.payload).unwrap();
        assert!(
            again == record.payload,
            "{} {}",
            record.table.name(),
            record.key
        );
        tables.insert(record.table);
    }
    let known = Table::ALL.iter().filter(|table| has_frozen_type(**table));
    assert_eq!(tables.len(), known.count(), "every table");
}

/// Tables without a frozen type were added within a schema: earlier agents set their records aside.
fn has_frozen_type(table: Table) -> bool {
    !matches!(table, Table::Cpus | Table::Memory | Table::Cpusets)
}

#[test]
fn the_agents_own_state_moves_to_its_table_and_back() {
    let kinds = kinds::ALL.iter();
    let own: Vec<_> = kinds.filter(|kind| kind.table() == Table::Facts).collect();
    for name in step_0002::KINDS {
        assert!(own.iter().any(|kind| kind.name == *name), "{name}");
    }
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), 3, 2);
    runtime().block_on(async {
        let store = start(open_dir(dir.path()));
        for (n, kind) in kinds::ALL.iter().enumerate() {
            let at = at(n as i64);
            let data = br#"{"a":1}"#.to_vec();
            let record = match kind.table() {
                Table::Facts => FactRecord {
                    layout: 1,
                    mark: format!("mark {n}"),
                    data,
                    at,
                }
                .into_any(),
                _ => ObjectRecord {
                    resource_version: n.to_string(),
                    encrypted: n % 2 == 0,
                    data,
                    at,
                }
                .into_any(),
            };
            store
                .commit(put_any(&kind.key("ns", "x"), record))
                .await
                .unwrap();
        }
        store.close().await.unwrap();
    });
    let before = open_dir(dir.path()).loaded.state;
    assert_eq!(before.facts.len(), own.len());
    migrate::migrate(dir.path(), 1, at(5_000)).unwrap();
    let former = verify::read_copy(dir.path()).unwrap();
    assert_eq!(former.schema, Some(1));
    let raw = raw_of(dir.path());
    assert!(raw.keys().all(|(table, _)| *table != step_0002::FACTS));
    for kind in kinds::ALL {
        let at = (Table::Objects.tag(), kind.key("ns", "x"));
        let object: step_0001::records::Object =
            migrations::codec::decode(&at, &raw[&at], 1).unwrap();
        assert_eq!(object.data, br#"{"a":1}"#, "{}", kind.name);
    }
    // The next start takes it back, without disturbing a pod.
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(opened.report.migrated_from, Some(1));
    assert_eq!(opened.report.new_epoch, None);
    assert_eq!(content(&opened.loaded.state), content(&before));
}

/// A store of schema 1 with a record of the agent's own, and what it has.
fn former_store(dir: &Path) -> BTreeMap<String, String> {
    build(dir, 20, 2);
    let fact = FactRecord {
        layout: 1,
        mark: "mark".to_owned(),
        data: b"{}".to_vec(),
        at: at(1),
    };
    runtime().block_on(async {
        let store = start(open_dir(dir));
        let put = put_any("deviceallocations/ns/u1", fact.into_any());
        store.commit(put).await.unwrap();
        store.close().await.unwrap();
    });
    let before = content(&open_dir(dir).loaded.state);
    migrate::migrate(dir, 1, at(5_000)).unwrap();
    before
}

#[test]
fn a_damaged_store_of_schema_1_is_rebuilt_at_this_one() {
    quiet();
    let dir = tempfile::tempdir().unwrap();
    let before = former_store(dir.path());
    fs::remove_dir_all(dir.path().join("backups")).unwrap();
    // sled never finishes loading it: the records are read from its log.
    let pipe = dir.path().join("db/snap.7FFFFFFFFFFFFFF0");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (opened, _) = open_soon(dir.path());
    assert!(
        matches!(opened.report.outcome, Outcome::Salvaged { lost: 0, .. }),
        "{:?}",
        opened.report
    );
    assert_eq!(content(&opened.loaded.state), before, "{:?}", opened.report);
    assert!(opened.loaded.quarantined.is_empty());
    assert_eq!(opened.loaded.state.facts.len(), 1);
    drop(opened);
    assert_eq!(raw_of(dir.path()).len(), content_size(dir.path()));
}

/// Number of records of a store, the agent's own ones included.
fn content_size(dir: &Path) -> usize {
    open_dir(dir).loaded.state.iter_all().count()
}

/// The records of a store that nobody has open.
fn raw_of(dir: &Path) -> Records {
    let database = SledBackend::open(dir.join("db"), SledOptions::default()).unwrap();
    migrate::to_records(&codec::load_raw(database.iter()))
}

fn golden(schema: u32) -> PathBuf {
    PathBuf::from(format!("migrations/step_{schema:04}/golden.tar.zst"))
}

/// The state that golden stores have. `facts` says whether it has the agent's own state in a table of its own.
fn golden_state(facts: bool) -> BTreeMap<String, String> {
    let mut state = State::default();
    for (key, record) in one_of_each() {
        if facts || record.table() != Table::Facts {
            state.apply(&put_any(&key, record).mutations[0], 1);
        }
    }
    content(&state)
}

fn unpack_golden(schema: u32, to: &Path) {
    let mut plain = Vec::new();
    zstd::Decoder::new(fs::File::open(golden(schema)).unwrap())
        .unwrap()
        .read_to_end(&mut plain)
        .unwrap();
    tar::Archive::new(plain.as_slice()).unpack(to).unwrap();
}

/// Opens a golden store as the agent of its node does.
fn open_golden(dir: &Path) -> Opened {
    let copy = verify::read_copy(dir).unwrap();
    let mut found = options(dir);
    if let Some(meta) = copy.loaded.state.meta() {
        found.identity.node_name.clone_from(&meta.node_name);
        found.identity.machine_id.clone_from(&meta.machine_id);
    }
    open(&found).unwrap()
}

/// It opens as it did before there was a mark, and from then on has a mark.
fn opens_without_a_mark_and_then_with_one(golden: &Path) {
    let dir = tempfile::tempdir().unwrap();
    copy_tree(golden, dir.path());
    let opened = open_golden(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(opened.report.new_epoch, None);
    let store = start(opened);
    runtime()
        .block_on(store.commit(pod_transaction(77, 1)))
        .unwrap();
    runtime().block_on(store.close()).unwrap();
    let opened = open_golden(dir.path());
    assert_eq!(opened.report.new_epoch, None);
    assert!(dir.path().join("mark").exists());
}

#[test]
fn golden_store_of_schema_1_is_taken_over_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    unpack_golden(1, dir.path());
    assert_eq!(verify::read_copy(dir.path()).unwrap().schema, Some(1));
    opens_without_a_mark_and_then_with_one(dir.path());
    let opened = open_golden(dir.path());
    assert_eq!(opened.report.migrated_from, Some(1));
    assert_eq!(content(&opened.loaded.state), golden_state(false));
    drop(opened);
    // And it goes all the way to the newest schema.
    let newest = ONE_AHEAD.newest();
    migrate::migrate_with(ONE_AHEAD, dir.path(), newest, at(1)).unwrap();
    migrate::migrate_with(ONE_AHEAD, dir.path(), 1, at(2)).unwrap();
    assert_eq!(
        content(&open_golden(dir.path()).loaded.state),
        golden_state(false)
    );
}

/// Writes a golden store only when asked to, and never over an existing one.
#[test]
fn golden_store_of_schema_2_reads_back_as_it_was_written() {
    if let Ok(path) = std::env::var("HOLDFAST_WRITE_GOLDEN") {
        let dir = tempfile::tempdir().unwrap();
        let store = start(open_dir(dir.path()));
        runtime().block_on(async {
            for (key, record) in one_of_each() {
                store.commit(put_any(&key, record)).await.unwrap();
            }
            store.close().await.unwrap();
        });
        let mut tar = tar::Builder::new(Vec::new());
        tar.append_dir_all("db", dir.path().join("db")).unwrap();
        let packed = zstd::encode_all(tar.into_inner().unwrap().as_slice(), 19).unwrap();
        let mut file = fs::File::create_new(path).unwrap();
        file.write_all(&packed).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    unpack_golden(2, dir.path());
    let copy = verify::read_copy(dir.path()).unwrap();
    assert_eq!(copy.schema, Some(2));
    assert!(
        copy.loaded.quarantined.is_empty() && copy.notes.is_empty(),
        "{:?}",
        copy.notes
    );
    assert_eq!(content(&copy.loaded.state), golden_state(true));
    opens_without_a_mark_and_then_with_one(dir.path());
    // To both neighbours and back.
    for schema in [1, ONE_AHEAD.newest()] {
        migrate::migrate_with(ONE_AHEAD, dir.path(), schema, at(1)).unwrap();
        migrate::migrate_with(ONE_AHEAD, dir.path(), 2, at(2)).unwrap();
        assert_eq!(
            content(&open_golden(dir.path()).loaded.state),
            golden_state(true)
        );
    }
}

#[test]
fn an_empty_transaction_set_is_no_reason_for_a_new_epoch() {
    let dir = tempfile::tempdir().unwrap();
    drop(open_dir(dir.path()));
    let store = start(open_dir(dir.path()));
    runtime()
        .block_on(store.commit(Transaction::new()))
        .unwrap();
    drop(store);
    let opened = open_dir(dir.path());
    assert_eq!(opened.report.outcome, Outcome::Opened);
    assert_eq!(opened.report.new_epoch, None);
}

/// A file system of its own, small enough to fill. Needs root, as the agent does.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let status = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=6m", "tmpfs"])
            .arg(dir.path())
            .status()
            .unwrap();
        assert!(status.success(), "mounting a small file system needs root");
        Self(dir)
    }

    fn fill(&self) -> PathBuf {
        let path = self.0.path().join("filler");
        let mut file = fs::File::create(&path).unwrap();
        let mut block = 64 * 1024;
        while block > 0 {
            if file.write_all(&vec![1; block]).is_err() {
                block /= 2;
            }
        }
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let status = std::process::Command::new("umount")
            .arg("-l")
            .arg(self.0.path())
            .status();
        assert!(
            status.is_ok_and(|s| s.success()),
            "unmount the small file system"
        );
    }
}

#[test]
fn a_full_disk_is_not_damage_and_heals_without_a_restart() {
    let disk = SmallDisk::new();
    let dir = disk.0.path().join("state");
    let state = build(&dir, 20, 2);
    holdfast::store::ballast::create(&dir, 256 * 1024).unwrap();
    let filler = disk.fill();
    let opened = open(&options(&dir)).unwrap();
    assert!(
        matches!(
            opened.report.outcome,
            Outcome::Unwritable {
                out_of_space: true,
                ..
            } | Outcome::Opened
        ),
        "{:?}",
        opened.report
    );
    println!("full disk: {:?}", opened.report.outcome);
    assert_eq!(
        content(&opened.loaded.state),
        content(&state),
        "nothing is forgotten"
    );
    assert_eq!(opened.report.new_epoch, None);
    assert!(
        fs::read_dir(dir.join("quarantine"))
            .unwrap()
            .next()
            .is_none(),
        "nothing is thrown away"
    );
    let store = holdfast::store::Store::start(
        opened.backend,
        opened.loaded,
        holdfast::store::StoreOptions {
            backoff_max: std::time::Duration::from_millis(50),
            ..Default::default()
        },
        std::sync::Arc::new(FixedClock),
        Default::default(),
    )
    .unwrap();
    runtime().block_on(async {
        let mut number = 1_000;
        // Until the disk has no room at all: every refusal is an error, none is silent.
        while store.commit(pod_transaction(number, 1)).await.is_ok() {
            number += 1;
            assert!(number < 100_000, "the disk never filled up");
        }
        let mut health = store.health();
        health
            .wait_for(|h| *h != holdfast::store::StoreHealth::Ok)
            .await
            .unwrap();
        fs::remove_file(&filler).unwrap();
        health
            .wait_for(|h| *h == holdfast::store::StoreHealth::Ok)
            .await
            .unwrap();
        store.commit(pod_transaction(5, 77)).await.unwrap();
        store.close().await.unwrap();
    });
    let again = open_dir(&dir);
    assert_eq!(again.report.new_epoch, None);
    let key = format!("{}/main", uid(5));
    assert_eq!(
        again
            .loaded
            .state
            .record::<ContainerRecord>(&key)
            .unwrap()
            .restart_count,
        77
    );
    let got = content(&again.loaded.state);
    assert!(content(&state).keys().all(|key| got.contains_key(key)));
    drop(again);
}

#[test]
fn a_store_of_schema_1_on_a_full_disk_is_converted_in_memory_until_there_is_room() {
    let disk = SmallDisk::new();
    let dir = disk.0.path().join("state");
    let before = former_store(&dir);
    holdfast::store::ballast::create(&dir, 256 * 1024).unwrap();
    let filler = disk.fill();
    let opened = open(&options(&dir)).unwrap();
    assert!(
        matches!(
            opened.report.outcome,
            Outcome::Unwritable {
                out_of_space: true,
                ..
            }
        ),
        "{:?}",
        opened.report
    );
    assert_eq!(opened.report.new_epoch, None, "nothing is forgotten");
    assert_eq!(content(&opened.loaded.state), before);
    let store = holdfast::store::Store::start(
        opened.backend,
        opened.loaded,
        holdfast::store::StoreOptions {
            backoff_max: std::time::Duration::from_millis(50),
            ..Default::default()
        },
        std::sync::Arc::new(FixedClock),
        Default::default(),
    )
    .unwrap();
    runtime().block_on(async {
        assert!(store.commit(pod_transaction(5, 77)).await.is_err());
        fs::remove_file(&filler).unwrap();
        let mut health = store.health();
        health
            .wait_for(|h| *h == holdfast::store::StoreHealth::Ok)
            .await
            .unwrap();
        store.commit(pod_transaction(5, 77)).await.unwrap();
        store.close().await.unwrap();
    });
    let again = open_dir(&dir);
    assert_eq!(again.report.outcome, Outcome::Opened);
    assert_eq!(
        (again.report.new_epoch, again.report.migrated_from),
        (None, None)
    );
    assert_eq!(again.loaded.state.facts.len(), 1);
    let got = content(&again.loaded.state);
    assert!(before.keys().all(|key| got.contains_key(key)));
}

#[test]
fn a_damaged_store_on_a_full_disk_is_kept_until_there_is_room() {
    quiet();
    let disk = SmallDisk::new();
    let dir = disk.0.path().join("state");
    let state = build(&dir, 60, 3);
    let db = dir.join("db/db");
    flip(&db, log_end(&db) / 3);
    let before = fs::read(&db).unwrap();
    let filler = disk.fill();
    let opened = open(&options(&dir)).unwrap();
    assert!(
        matches!(
            opened.report.outcome,
            Outcome::Unwritable {
                out_of_space: true,
                ..
            }
        ),
        "{:?}",
        opened.report
    );
    assert!(
        before == fs::read(&db).unwrap(),
        "the damaged database is as it was"
    );
    assert_eq!(opened.report.new_epoch, Some(EpochReason::Rebuilt));
    let got = content(&opened.loaded.state);
    assert!(got.len() * 100 >= content(&state).len() * 90);
    fs::remove_file(filler).unwrap();
    drop(opened);
    let opened = open(&options(&dir)).unwrap();
    assert!(matches!(opened.report.outcome, Outcome::Salvaged { .. }));
    assert_eq!(content(&opened.loaded.state), got);
    drop(opened);
}

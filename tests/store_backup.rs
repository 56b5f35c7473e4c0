//! Backups and restores: what they hold, what they refuse, what they change.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

mod store_support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use holdfast::core::state::{EpochReason, PodRecord, State, Table};
use holdfast::store::backup::{self, BackupError, BackupMeta};
use holdfast::store::restore::{self, RestoreError, RestoreOptions};
use holdfast::types::{BootId, Stamp};
use store_support::*;

/// A store with `pods` pods and one record of each table, closed; its last state.
fn store(dir: &Path, pods: u64) -> State {
    let store = start(open_dir(dir));
    runtime().block_on(async {
        for (key, record) in one_of_each() {
            store.commit(put_any(&key, record)).await.unwrap();
        }
        for index in 0..pods {
            store.commit(pod_transaction(index, 1)).await.unwrap();
        }
        store.sync().await.unwrap();
    });
    (*store.snapshot()).clone()
}

fn back_up(dir: &Path, state: &State) -> PathBuf {
    let meta = BackupMeta::of(state, 5, at(2_000));
    let path = dir.join("backups").join(meta.file_name());
    backup::write(state, &path, &meta).unwrap();
    path
}

fn restore_options() -> RestoreOptions {
    RestoreOptions {
        identity: identity(),
        allow_other_node: false,
        now: at(3_000),
    }
}

#[test]
fn a_backup_holds_every_record_and_only_root_can_read_it() {
    let dir = tempfile::tempdir().unwrap();
    let state = store(dir.path(), 20);
    let path = back_up(dir.path(), &state);
    let read = backup::read(&path).unwrap();
    let loaded = read.load();
    assert!(loaded.quarantined.is_empty());
    assert_eq!(content(&loaded.state), content(&state));
    assert_eq!(loaded.state.journal.len(), state.journal.len());
    assert_eq!(loaded.state.meta(), state.meta());
    assert_eq!(read.meta.node_name, "node-a");
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_backup_with_any_byte_changed_or_cut_off_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let state = store(dir.path(), 3);
    let path = back_up(dir.path(), &state);
    let good = fs::read(&path).unwrap();
    let bad = dir.path().join("bad");
    for offset in (0..good.len()).step_by((good.len() / 400).max(1)) {
        let mut bytes = good.clone();
        bytes[offset] ^= 0x10;
        fs::write(&bad, bytes).unwrap();
        assert!(backup::read(&bad).is_err(), "byte {offset} changed");
        fs::write(&bad, &good[..offset]).unwrap();
        assert!(
            matches!(backup::read(&bad), Err(BackupError::Damaged { .. })),
            "cut at {offset}"
        );
    }
}

#[test]
fn restore_brings_the_records_back_in_a_new_epoch_and_keeps_the_old_store() {
    let dir = tempfile::tempdir().unwrap();
    let saved = store(dir.path(), 5);
    let path = back_up(dir.path(), &saved);
    // Time goes on: a pod goes, one comes, one changes.
    let opened = open_dir(dir.path());
    let epoch = opened.loaded.state.meta().unwrap().epoch.number;
    let live = start(opened);
    runtime().block_on(async {
        live.commit(pod_transaction(7, 1)).await.unwrap();
        live.commit(pod_transaction(2, 9)).await.unwrap();
        live.commit(holdfast::core::state::Transaction::new().delete::<PodRecord>(uid(3)))
            .await
            .unwrap();
        live.sync().await.unwrap();
    });
    let current = (*live.snapshot()).clone();
    drop(live);

    let read = backup::read(&path).unwrap();
    let diff = restore::plan(Some(&current), &read).unwrap();
    let pods = diff.tables.iter().find(|t| t.table == Table::Pods).unwrap();
    assert_eq!(pods.added, [uid(3).as_str().into()]);
    assert_eq!(pods.removed, [uid(7).as_str().into()]);
    assert!(pods.changed.is_empty());
    let containers = diff.tables.iter().find(|t| t.table == Table::Containers);
    let changed = &containers.unwrap().changed;
    assert_eq!(*changed, [format!("{}/main", uid(2)).as_str().into()]);

    let report = restore::apply(dir.path(), &read, &restore_options()).unwrap();
    assert!(report.previous.unwrap().join("db").exists());
    assert!(report.epoch > epoch);
    let opened = open_dir(dir.path());
    assert_eq!(content(&opened.loaded.state), content(&saved));
    let meta = opened.loaded.state.meta().unwrap();
    assert_eq!(meta.epoch.reason, EpochReason::Restored);
    assert_eq!(meta.epoch.number, report.epoch);
    assert_eq!(opened.report.new_epoch, None, "opening begins no other one");
}

#[test]
fn restore_refuses_the_backup_of_another_node_unless_told() {
    let dir = tempfile::tempdir().unwrap();
    let state = store(dir.path(), 2);
    let read = backup::read(&back_up(dir.path(), &state)).unwrap();
    let target = tempfile::tempdir().unwrap();
    let mut options = restore_options();
    options.identity.node_name = "node-b".to_owned();
    options.identity.machine_id = "machine-b".to_owned();
    let refused = restore::apply(target.path(), &read, &options).unwrap_err();
    assert!(matches!(refused, RestoreError::OtherNode { .. }));
    assert!(!target.path().join("db").exists(), "nothing was touched");
    options.allow_other_node = true;
    restore::apply(target.path(), &read, &options).unwrap();
    let opened = holdfast::store::open::open(&holdfast::store::open::OpenOptions {
        identity: options.identity,
        ..store_support::options(target.path())
    })
    .unwrap();
    assert_eq!(content(&opened.loaded.state), content(&state));
    let meta = opened.loaded.state.meta().unwrap();
    assert_eq!(meta.node_name, "node-b");
    assert_eq!(meta.epoch.reason, EpochReason::Restored);
}

#[test]
fn rotation_keeps_the_newest_by_history_not_by_the_wall_clock() {
    let dir = tempfile::tempdir().unwrap();
    let state = store(dir.path(), 1);
    let mut written = Vec::new();
    for step in 0..6_i64 {
        let meta = BackupMeta {
            last_journal: format!("{:016x}", 10 + step),
            // The wall clock runs backwards.
            ..BackupMeta::of(&state, 1, at(100_000 - step * 1_000))
        };
        let path = dir.path().join("backups").join(meta.file_name());
        backup::write(&state, &path, &meta).unwrap();
        written.push(path);
    }
    let unfinished = dir.path().join("backups/backup-x.holdfast.tmp");
    fs::write(&unfinished, b"torn").unwrap();
    backup::rotate(&dir.path().join("backups"), backup::KEPT).unwrap();
    let mut left = backup::list(&dir.path().join("backups")).unwrap();
    left.reverse();
    assert_eq!(left, written[3..]);
    assert!(!unfinished.exists());
}

#[test]
fn a_damaged_newest_backup_is_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let state = store(dir.path(), 1);
    let older = back_up(dir.path(), &state);
    let newer = dir.path().join("backups").join(
        BackupMeta {
            last_journal: "ffffffffffffffff".to_owned(),
            ..BackupMeta::of(&state, 1, at(5_000))
        }
        .file_name(),
    );
    fs::write(&newer, &fs::read(&older).unwrap()[..200]).unwrap();
    let (found, errors) = backup::newest(&dir.path().join("backups"));
    assert_eq!(found.unwrap().meta, backup::read(&older).unwrap().meta);
    assert_eq!(errors.len(), 1);
}

#[test]
fn a_backup_is_due_after_ten_minutes_if_more_than_the_heartbeat_changed() {
    let dir = tempfile::tempdir().unwrap();
    let old = store(dir.path(), 1);
    assert!(backup::due(None, &old, at(0)));
    assert!(
        !backup::due(None, &State::default(), at(0)),
        "nothing to save"
    );
    let mut beat = (*old.meta.get("meta").unwrap()).clone();
    let mut unchanged = old.clone();
    {
        let versioned = std::sync::Arc::make_mut(&mut beat);
        versioned.version += 1;
        versioned.record.heartbeat = at(99_999);
    }
    unchanged.meta.insert("meta".into(), beat);
    assert!(!backup::due(Some((at(0), &old)), &unchanged, at(6_000)));
    let mut changed = unchanged.clone();
    changed.pods.remove(uid(0).as_str());
    assert!(!backup::due(Some((at(0), &old)), &changed, at(599)));
    assert!(backup::due(Some((at(0), &old)), &changed, at(600)));
}

#[test]
fn the_first_backup_of_a_life_is_due_by_the_age_of_the_newest_one_on_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let state = store(dir.path(), 1);
    let taken = |at| BackupMeta::of(&state, 1, at);
    assert!(backup::first_due(None, &state, at(30)), "there is none");
    assert!(!backup::first_due(None, &State::default(), at(30)));
    assert!(!backup::first_due(Some(&taken(at(0))), &state, at(599)));
    assert!(backup::first_due(Some(&taken(at(0))), &state, at(600)));
    let earlier_boot = Stamp {
        boot: BootId(77),
        ..at(590)
    };
    assert!(backup::first_due(
        Some(&taken(earlier_boot)),
        &state,
        at(600)
    ));
}

#[test]
fn a_copy_is_read_without_changing_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let state = store(dir.path(), 5);
    let db = dir.path().join("db");
    let list = || -> Vec<(PathBuf, Vec<u8>)> {
        let mut files: Vec<_> = fs::read_dir(&db)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file())
            .map(|path| (path.clone(), fs::read(path).unwrap()))
            .collect();
        files.sort();
        files
    };
    let before = list();
    let copy = holdfast::store::verify::read_copy(dir.path()).unwrap();
    assert_eq!(content(&copy.loaded.state), content(&state));
    assert_eq!(copy.schema, Some(holdfast::store::migrate::SCHEMA));
    assert!(holdfast::store::verify::verify(dir.path()).unwrap().is_ok());
    let stats = holdfast::store::verify::stats(dir.path()).unwrap();
    assert_eq!(stats.records["pods"], 6);
    assert!(stats.live_bytes > 0 && stats.db_bytes > stats.live_bytes);
    assert!(before == list(), "no file of the store changed");
}

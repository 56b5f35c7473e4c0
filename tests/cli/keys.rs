//! `holdfast keys`: listed, rotated, pruned, beside a live agent and without one.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use holdfast::core::state::{ObjectRecord, Transaction};
use holdfast::objects::keyring::{KeyFile, KeyId};
use holdfast::objects::vault::Vault;

use crate::world::*;

fn key_file(dir: &str) -> KeyFile {
    KeyFile::locate(Path::new(dir), None, None)
}

fn put_secret(disk: &OnDisk, store: &holdfast::store::Store, name: &str) -> KeyId {
    let vault = Vault::open(key_file(disk.path()), at(0));
    let key = format!("secrets/default/{name}");
    let record = ObjectRecord {
        resource_version: "1".into(),
        encrypted: true,
        data: vault.seal("objects", &key, b"{}").unwrap(),
        at: at(1),
    };
    commit(&disk.runtime, store, Transaction::new().put(key, record));
    vault.active().unwrap()
}

fn active(dir: &str) -> String {
    key_file(dir).read().unwrap().active().id().to_string()
}

#[test]
fn without_a_file_every_command_says_where_it_looked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for command in ["list", "rotate", "prune"] {
        let output = run(&["keys", command, "--state-dir", path]);
        assert_eq!(output.status.code(), Some(3), "{command}");
        let said = text(&output.stderr);
        assert!(
            said.contains("keys/secrets.key") && said.contains("--secrets-key-file"),
            "{said}"
        );
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "nothing was made"
    );
}

#[test]
fn a_key_goes_when_neither_the_store_nor_a_backup_needs_it() {
    let disk = OnDisk::filled();
    let first = disk.live(|store| {
        let first = put_secret(&disk, store, "one").to_string();
        stdout_of(&["backup", "--in-state-dir", "--state-dir", disk.path()]);
        first
    });
    let said = stdout_of(&["keys", "rotate", "--state-dir", disk.path()]);
    let second = active(disk.path());
    assert!(said.contains(&second) && said.contains(&first), "{said}");

    let list = stdout_of(&["keys", "list", "--state-dir", disk.path()]);
    let rows: Vec<_> = list.lines().skip(1).collect();
    assert!(
        rows[0].starts_with(&second) && rows[0].contains("active"),
        "{list}"
    );
    assert!(rows[0].trim_end().ends_with('-'), "{list}");
    assert!(
        rows[1].starts_with(&first) && rows[1].contains("store in"),
        "{list}"
    );
    assert!(rows[1].contains("backup-"), "{list}");

    let prune = run(&["keys", "prune", "--state-dir", disk.path()]);
    assert!(prune.status.success() && prune.stdout.is_empty());
    assert!(text(&prune.stderr).contains(&format!("key {first} is kept")));
    let named = run(&["keys", "prune", &first, "--state-dir", disk.path()]);
    assert_eq!(named.status.code(), Some(1));
    assert!(text(&named.stderr).contains("needed by") && text(&named.stderr).contains("backup-"));

    // The agent replaced its record; the backup still has the old one.
    disk.live(|store| {
        put_secret(&disk, store, "one");
        let named = run(&["keys", "prune", &first, "--state-dir", disk.path()]);
        let said = text(&named.stderr);
        assert_eq!(named.status.code(), Some(1), "{said}");
        assert!(
            said.contains("backup-") && !said.contains("store in"),
            "{said}"
        );
    });
    let backups = disk.dir.path().join("backups");
    let backup = std::fs::read_dir(&backups)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let elsewhere = tempfile::tempdir().unwrap();
    let moved = elsewhere.path().join("moved");
    std::fs::copy(&backup, &moved).unwrap();
    std::fs::remove_file(&backup).unwrap();
    let moved = moved.to_str().unwrap();
    let named = run(&[
        "keys",
        "prune",
        &first,
        "--backup",
        moved,
        "--state-dir",
        disk.path(),
    ]);
    assert!(
        text(&named.stderr).contains(moved),
        "{}",
        text(&named.stderr)
    );

    let dry = stdout_of(&["keys", "prune", "--dry-run", "--state-dir", disk.path()]);
    assert_eq!(dry, format!("would remove {first}\n"));
    let pruned = disk.live(|_| stdout_of(&["keys", "prune", "--state-dir", disk.path()]));
    assert_eq!(pruned, format!("removed {first}\n"));
    let left: Vec<_> = key_file(disk.path())
        .read()
        .unwrap()
        .iter()
        .map(|k| k.id().to_string())
        .collect();
    assert_eq!(left, [second]);
    let list = json_of(&[
        "keys",
        "list",
        "-o",
        "json",
        "--backup",
        moved,
        "--state-dir",
        disk.path(),
    ]);
    assert_eq!(list["kind"], "SecretsKeys");
    assert_eq!(list["missing"][0]["id"], first);
    assert_eq!(list["keys"][0]["active"], true);
    assert_eq!(list["keys"][0]["neededBy"][0]["records"], 1);
}

#[test]
fn a_backup_that_cannot_be_read_stops_the_pruning() {
    let disk = OnDisk::filled();
    disk.live(|store| put_secret(&disk, store, "one"));
    stdout_of(&["keys", "rotate", "--state-dir", disk.path()]);
    let backups = disk.dir.path().join("backups");
    std::fs::write(backups.join("backup-0-0-0.holdfast"), "garbage").unwrap();
    let output = run(&["keys", "prune", "--state-dir", disk.path()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("backup-0-0-0.holdfast"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(key_file(disk.path()).read().unwrap().iter().count(), 2);
}

#[test]
fn wrong_ids_and_the_active_key_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    key_file(path).create(at(0)).unwrap();
    let active = active(path);
    for (id, code, what) in [
        ("xyz", 2, "16 hexadecimal"),
        (active.as_str(), 2, "active key"),
        ("0123456789abcdef", 3, "there is no key"),
    ] {
        let output = run(&["keys", "prune", id, "--state-dir", path]);
        assert_eq!(output.status.code(), Some(code), "{id}");
        assert!(
            text(&output.stderr).contains(what),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn another_file_is_used_when_told_and_one_that_others_may_read_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let file = KeyFile::at(dir.path().join("elsewhere"));
    let before = file.create(at(0)).unwrap().active().id();
    let name = file.path().to_str().unwrap();
    let said = stdout_of(&[
        "keys",
        "rotate",
        "--secrets-key-file",
        name,
        "--state-dir",
        path,
    ]);
    let secret = std::fs::read_to_string(file.path()).unwrap();
    for line in secret.lines().filter(|line| !line.starts_with('#')) {
        let secret = line.split(' ').nth(1).unwrap();
        assert!(!said.contains(secret), "no command prints a key");
    }
    assert_ne!(file.read().unwrap().active().id(), before);
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = run(&[
        "keys",
        "list",
        "--secrets-key-file",
        name,
        "--state-dir",
        path,
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("chmod 600"),
        "{}",
        text(&output.stderr)
    );
}

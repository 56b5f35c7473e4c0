//! Stores on disk: looked at, backed up, restored, verified, repaired, migrated.

use std::path::Path;

use holdfast::agent::lock::StateLock;
use holdfast::core::state::{QueueRecord, Table, Transaction};
use holdfast::store::backend::{Backend, Op, SledBackend, SledOptions};
use holdfast::store::codec;
use holdfast::store::mounts::{Directory, Mount};
use serde_json::json;

use crate::world::*;

#[test]
fn a_live_backup_is_private_complete_and_never_overwrites_unasked() {
    use std::os::unix::fs::PermissionsExt;
    let live = Live::start();
    let target = tempfile::tempdir().unwrap();
    let file = target.path().join("b");
    let path = file.to_str().unwrap();
    let said = stdout_of(&["backup", path, "--state-dir", live.dir()]);
    assert_eq!(said, format!("{path} (100000 bytes)\n"));
    let metadata = std::fs::metadata(&file).unwrap();
    assert_eq!(metadata.len(), 100_000);
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);

    let again = run(&["backup", path, "--state-dir", live.dir()]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("--force replaces it"));
    stdout_of(&["backup", path, "--force", "--state-dir", live.dir()]);
    let left = std::fs::read_dir(target.path()).unwrap().count();
    assert_eq!(left, 1, "no drafts are left behind");

    let to_stdout = run(&["backup", "-", "--state-dir", live.dir()]);
    assert_eq!(to_stdout.stdout.len(), 100_000);
    let inside = stdout_of(&["backup", "--in-state-dir", "--state-dir", live.dir()]);
    assert!(Path::new(inside.trim()).exists());
}

#[test]
fn a_backup_without_a_file_says_where_it_is() {
    let live = Live::start();
    let here = tempfile::tempdir().unwrap();
    let here = here.path().canonicalize().unwrap();
    let output = holdfast(&["backup", "--state-dir", live.dir()])
        .current_dir(&here)
        .output()
        .unwrap();
    let said = text(&output.stdout);
    let path = said.strip_suffix(" (100000 bytes)\n").unwrap();
    assert!(Path::new(path).is_file() && Path::new(path).is_absolute());
    assert!(path.starts_with(here.to_str().unwrap()), "{path}");
    let ignored = std::fs::read_to_string(".gitignore").unwrap();
    let (start, end) = ignored
        .lines()
        .find_map(|line| line.split_once('*').filter(|(s, _)| !s.is_empty()))
        .unwrap();
    let name = Path::new(path).file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with(start) && name.ends_with(end), "{name}");
}

#[test]
fn live_and_dead_dumps_of_the_same_state_are_the_same_bytes() {
    let disk = OnDisk::filled();
    let formats: [&[&str]; 5] = [
        &["dump", "-o", "json"],
        &["dump", "-o", "yaml"],
        &["dump", "all", "-o", "name"],
        &["dump", "web", "-o", "json"],
        &["dump", "--history", "web", "-o", "json"],
    ];
    let ask = |source: &str| -> Vec<String> {
        let one = |args: &&[&str]| {
            let output = run(&[args, &["--state-dir", disk.path()][..]].concat());
            let stderr = text(&output.stderr);
            assert!(stderr.contains(source), "{args:?}: {stderr}");
            assert!(output.status.success(), "{args:?}: {stderr}");
            text(&output.stdout).to_owned()
        };
        formats.iter().map(one).collect()
    };
    let live = disk.live(|_| ask("source: live agent"));
    let dead = ask("source: copy of the store");
    for ((format, live), dead) in formats.iter().zip(live).zip(dead) {
        assert_eq!(live, dead, "{format:?}");
        assert!(live.contains("web") && live.len() > 40, "{live}");
    }
}

#[test]
fn looking_at_a_stopped_store_changes_nothing() {
    let disk = OnDisk::filled();
    let before = files(disk.dir.path());
    let target = tempfile::tempdir().unwrap();
    let backup = target.path().join("b");
    let backup = backup.to_str().unwrap();
    for args in [
        &["dump"][..],
        &["dump", "all"],
        &["store", "verify"],
        &["store", "stats"],
        &["backup", backup],
        &["restore", backup, "--dry-run"],
    ] {
        stdout_of(&[args, &["--state-dir", disk.path()]].concat());
        assert!(
            files(disk.dir.path()) == before,
            "{args:?} changed the store"
        );
    }
}

#[test]
fn a_backup_comes_back_and_begins_a_new_epoch() {
    let disk = OnDisk::filled();
    let target = tempfile::tempdir().unwrap();
    let file = target.path().join("b");
    let file = file.to_str().unwrap();
    disk.live(|store| {
        stdout_of(&["backup", file, "--state-dir", disk.path()]);
        let inside = stdout_of(&["backup", "--in-state-dir", "--state-dir", disk.path()]);
        assert!(inside.starts_with(disk.path()), "{inside}");
        commit(
            &disk.runtime,
            store,
            Transaction::new().delete::<QueueRecord>(WEB),
        );
        commit(
            &disk.runtime,
            store,
            pod("3333", "default", "late", "Running"),
        );
    });

    let state_dir = ["--state-dir", disk.path()];
    let plan = stdout_of(&[&["restore", file, "--dry-run"][..], &state_dir].concat());
    assert!(
        plan.contains(&format!(
            "queue: 1 added, 0 changed, 1 removed\n  + {WEB} default/web\n  - 3333 default/late\n"
        )),
        "{plan}"
    );
    assert!(plan.contains("nothing was changed"), "{plan}");

    let restore = [&["restore", file, "--node-name", "node-2"][..], &state_dir].concat();
    let refused = run(&restore);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("--allow-other-node"),
        "{}",
        text(&refused.stderr)
    );
    let said = stdout_of(&[&restore[..], &["--allow-other-node"]].concat());
    assert!(said.contains("the previous store is in "), "{said}");

    let dump = json_of(&[&["dump", "-o", "json"][..], &state_dir].concat());
    let queue = dump["tables"]["queue"].as_array().unwrap();
    assert_eq!(queue.len(), 2, "{queue:?}");
    let epoch = &dump["tables"]["meta"][0]["epoch"];
    assert_eq!(epoch["reason"], "Restored");
    assert!(epoch["number"].as_u64() > Some(1), "{epoch}");
    let missing = run(&[&["dump", "late"][..], &state_dir].concat());
    assert_eq!(missing.status.code(), Some(3));
}

#[test]
fn a_damaged_backup_is_refused_before_anything_is_touched() {
    let disk = OnDisk::filled();
    let target = tempfile::tempdir().unwrap();
    let file = target.path().join("b");
    let path = file.to_str().unwrap();
    stdout_of(&["backup", path, "--state-dir", disk.path()]);
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let empty = target.path().join("state");
    let output = run(&["restore", path, "--state-dir", empty.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("checksum does not match"),
        "{}",
        text(&output.stderr)
    );
    assert!(!empty.exists(), "nothing was made");
}

#[test]
fn a_held_state_directory_is_not_touched() {
    let disk = OnDisk::filled();
    let target = tempfile::tempdir().unwrap();
    let file = target.path().join("b");
    let path = file.to_str().unwrap();
    stdout_of(&["backup", path, "--state-dir", disk.path()]);
    let _lock = StateLock::acquire(disk.dir.path()).unwrap();
    for args in [
        &["restore", path, "--allow-other-node"][..],
        &["store", "repair"],
        &["store", "migrate", "--to", "1"],
    ] {
        let output = run(&[args, &["--state-dir", disk.path()]].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        let holder = format!("(pid {}", std::process::id());
        assert!(stderr.contains(&holder), "{args:?}: {stderr}");
    }
}

#[test]
fn damage_is_shown_verified_and_repaired() {
    let disk = OnDisk::filled();
    let state_dir = ["--state-dir", disk.path()];
    let good = json_of(&[&["store", "verify", "-o", "json"][..], &state_dir].concat());
    assert_eq!(
        (&good["ok"], &good["records"]["pods"]),
        (&json!(true), &json!(2))
    );

    // One record whose bytes changed.
    let mut backend =
        SledBackend::open(disk.dir.path().join("db"), SledOptions::default()).unwrap();
    let key = codec::record_key(Table::Queue, WEB);
    backend
        .apply(&[Op::Put {
            key,
            value: b"not a record".to_vec(),
        }])
        .unwrap();
    backend.sync().unwrap();
    drop(backend);

    let verify = run(&[&["store", "verify"][..], &state_dir].concat());
    assert_eq!(verify.status.code(), Some(1));
    let said = text(&verify.stdout);
    assert!(
        said.contains(&format!("bad record: queue {WEB} (12 bytes): ")),
        "{said}"
    );
    let dump = json_of(&[&["dump", "queue", "-o", "json"][..], &state_dir].concat());
    assert_eq!(dump["tables"]["queue"].as_array().unwrap().len(), 1);
    assert_eq!(dump["quarantined"][0]["table"], "queue");
    assert_eq!(dump["quarantined"][0]["key"], WEB);
    let table = stdout_of(&[&["dump"][..], &state_dir].concat());
    assert!(
        table.contains("quarantined (records that cannot be read):"),
        "{table}"
    );

    stdout_of(&[&["store", "repair"][..], &state_dir].concat());
    let again = stdout_of(&[&["store", "verify"][..], &state_dir].concat());
    assert!(
        again.contains("quarantined before: queue") && again.contains("the store is undamaged"),
        "{again}"
    );
    let later = json_of(&[&["dump", "queue", "-o", "json"][..], &state_dir].concat());
    assert_eq!(later["quarantined"][0]["key"], WEB);
    assert_eq!(later["quarantined"].as_array().unwrap().len(), 1);
    let live = disk.live(|_| json_of(&[&["dump", "queue", "-o", "json"][..], &state_dir].concat()));
    assert_eq!(live, later, "live and dead agree on what is quarantined");
}

#[test]
fn store_stats_and_migrate_report() {
    let disk = OnDisk::filled();
    let state_dir = ["--state-dir", disk.path()];
    let stats = json_of(&[&["store", "stats", "-o", "json"][..], &state_dir].concat());
    assert_eq!(stats["kind"], "StoreStats");
    assert_eq!(stats["records"]["workers"], 2);
    assert!(stats["liveBytes"].as_u64() > Some(1000), "{stats}");
    let text_form = stdout_of(&[&["store", "stats"][..], &state_dir].concat());
    assert!(text_form.contains("  workers: 2\n"), "{text_form}");
    let on_disk = stats["diskBytes"].as_u64().unwrap();
    assert!(
        text_form.contains(&format!("on disk, all of it: {on_disk} bytes\n")),
        "{text_form}"
    );
    // What du says of the directory.
    let du = std::process::Command::new("du")
        .args(["-s", "--block-size=1", disk.path()])
        .output()
        .unwrap();
    let du: u64 = text(&du.stdout)
        .split_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(on_disk, du);

    let same = stdout_of(&[&["store", "migrate", "--to", "2"][..], &state_dir].concat());
    assert!(same.starts_with("schema 2 -> 2"), "{same}");
    let unknown = run(&[&["store", "migrate", "--to", "99"][..], &state_dir].concat());
    assert_eq!(unknown.status.code(), Some(1));
    assert!(text(&unknown.stderr).contains("this binary knows schemas 1 to"));
    let nowhere = run(&["store", "repair", "--state-dir", "/nonexistent/holdfast"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(!Path::new("/nonexistent").exists());
}

#[test]
fn new_disk_accepts_the_file_system_that_a_directory_is_on() {
    let dir = tempfile::tempdir().unwrap();
    let (state, path) = (dir.path().join("state"), dir.path().join("manifests"));
    std::fs::create_dir(&path).unwrap();
    let state_dir = ["--state-dir", state.to_str().unwrap()];
    let new_disk = |name| run(&[&["store", "new-disk", name][..], &state_dir].concat());
    for name in ["root-dir", "manifests", "preload"] {
        let unknown = new_disk(name);
        assert_eq!(unknown.status.code(), Some(3), "{name}");
        assert!(text(&unknown.stderr).contains("check --state-dir"));
    }
    assert!(!state.exists());
    let mount = || Mount::new(Directory::Manifests, &path, &state);
    assert_eq!(mount().missing().unwrap(), None);
    let record = state.join("mounts/manifests");
    let former = json!({"path": path, "fileSystem": {
        "point": path, "type": "ext4", "source": "/dev/sdx1", "uuid": "0a1b",
    }});
    std::fs::write(&record, former.to_string()).unwrap();
    assert!(mount().missing().unwrap().is_some());
    let accepted = new_disk("manifests");
    assert!(accepted.status.success(), "{accepted:?}");
    assert!(text(&accepted.stdout).contains("(manifests) is on "));
    assert_eq!(mount().missing().unwrap(), None);
    // The state directory has no record of its own to be found by.
    assert!(new_disk("state-dir").status.success());
}

#[test]
fn a_broken_database_still_shows_what_its_log_holds() {
    let disk = OnDisk::filled();
    let db = disk.dir.path().join("db/db");
    let mut bytes = std::fs::read(&db).unwrap();
    // Where the first record of a pod was written: sled alone would cut the log off here without a word.
    let uid = bytes.windows(WEB.len()).position(|w| w == WEB.as_bytes());
    let uid = uid.unwrap();
    for byte in &mut bytes[uid..uid + 8] {
        *byte ^= 0xff;
    }
    std::fs::write(&db, &bytes).unwrap();
    let output = run(&["dump", "pods", "-o", "name", "--state-dir", disk.path()]);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("holdfast: warning: "), "{stderr}");
    let stdout = text(&output.stdout);
    assert!(stdout.contains("data/db\n"), "{stdout}");
    assert!(
        std::fs::read(&db).unwrap() == bytes,
        "the store was changed"
    );
    let verify = run(&["store", "verify", "--state-dir", disk.path()]);
    assert_eq!(verify.status.code(), Some(1), "{}", text(&verify.stdout));
}

#[test]
fn an_agent_that_does_not_answer_does_not_hide_its_store() {
    let disk = OnDisk::filled();
    let listener =
        std::os::unix::net::UnixListener::bind(disk.dir.path().join("holdfast.sock")).unwrap();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let hanging_up = std::thread::spawn(move || {
        listener.set_nonblocking(true).unwrap();
        while stopped.try_recv().is_err() {
            drop(listener.accept());
            std::thread::yield_now();
        }
    });
    let output = run(&["dump", "pods", "-o", "name", "--state-dir", disk.path()]);
    stop.send(()).unwrap();
    hanging_up.join().unwrap();
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("talk to the agent on "), "{stderr}");
    assert!(
        stderr.contains("changes that the agent has not written yet are missing"),
        "{stderr}"
    );
    assert_eq!(text(&output.stdout), "default/web\ndata/db\n");
}

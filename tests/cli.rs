//! The real binary against a live admin server in this process, and against stores on disk.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests fail by panicking"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use holdfast::admin::view::Quarantined;
use holdfast::admin::{self, AdminHooks, AdminInfo, BoxError};
use holdfast::agent::lock::StateLock;
use holdfast::core::state::{
    AdmissionDecision, AdmissionRecord, BackoffRecord, ContainerRecord, EpochReason, EpochRecord,
    ExitRecord, ImageRecord, IntentRecord, META_KEY, MetaRecord, MirrorRecord, ObjectRecord,
    PlegRecord, PodRecord, ProbeRecord, QueueRecord, SignalRecord, SourceRecord, StatusRecord,
    Table, Transaction, VolumePhase, VolumeRecord, WorkerPhase, WorkerRecord, child_key,
};
use holdfast::store::backend::{Backend, Op, SledBackend, SledOptions};
use holdfast::store::layout::Layout;
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions, codec, open};
use holdfast::types::metrics::Metrics;
use holdfast::types::runtime::{PodStatus, SandboxState, SandboxStatus};
use holdfast::types::{BootId, BootIdentity, Clock, Json, PodSource, PodUid, Stamp, SystemClock};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const WEB: &str = "11111111-aaaa-4000-8000-000000000001";
const DB: &str = "22222222-bbbb-4000-8000-000000000002";

fn holdfast(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(args).env_remove("HOLDFAST_STATE_DIR");
    command
}

fn run(args: &[&str]) -> Output {
    holdfast(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[track_caller]
fn stdout_of(args: &[&str]) -> String {
    let output = run(args);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{args:?} failed: {stderr}");
    text(&output.stdout).to_owned()
}

#[track_caller]
fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&stdout_of(args)).unwrap()
}

fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(0x17),
        boottime_ms: seconds * 1000,
        wall_ms: 1_700_000_000_000 + seconds * 1000,
    }
}

struct TickingClock(std::sync::atomic::AtomicI64);

impl Clock for TickingClock {
    fn now(&self) -> Stamp {
        at(self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }
}

fn clock() -> Arc<dyn Clock> {
    Arc::new(TickingClock(100.into()))
}

fn meta(generation: u64) -> Transaction {
    Transaction::new().put(
        META_KEY,
        MetaRecord {
            schema: 1,
            node_name: "node-1".into(),
            machine_id: "m".into(),
            boot: BootIdentity {
                kernel_boot_id: "b".into(),
                pid1_start: 1,
                runtime_state: String::new(),
            },
            generation,
            clean_shutdown: false,
            heartbeat: at(90),
            epoch: EpochRecord {
                number: 1,
                since: at(1),
                reason: EpochReason::Fresh,
            },
        },
    )
}

fn pod(uid: &str, namespace: &str, name: &str, phase: &str) -> Transaction {
    let spec = json!({
        "metadata": {"uid": uid, "namespace": namespace, "name": name},
        "spec": {"containers": [{"name": "main", "image": "busybox",
                 "env": [{"name": "MODE", "value": "0644"}]}]},
    });
    let status = json!({
        "phase": phase,
        "podIP": "10.88.0.7",
        "containerStatuses": [{"name": "main", "ready": true, "restartCount": 3, "image": "busybox",
            "imageID": "", "state": {"running": {}}}],
    });
    Transaction::new()
        .put(
            uid,
            PodRecord {
                source: PodSource::File,
                origin: format!("/etc/manifests/{name}.yaml"),
                pod: Json::new(serde_json::from_value(spec).unwrap()),
                first_seen: at(10),
                confirmed_epoch: 1,
            },
        )
        .put(
            uid,
            StatusRecord {
                name: name.into(),
                namespace: namespace.into(),
                status: Json::new(serde_json::from_value(status).unwrap()),
                version: 2,
                acknowledged: 0,
                at: at(20),
                finished: false,
            },
        )
        .put(
            uid,
            AdmissionRecord {
                decision: AdmissionDecision::Admitted,
                allocated: Default::default(),
                at: at(11),
            },
        )
        .put(
            uid,
            WorkerRecord {
                full_name: format!("{name}_{namespace}"),
                queued: at(11),
                started: Some(at(12)),
                phase: WorkerPhase::Sync,
                deleted: false,
                restart_requested: false,
                runtime_only: false,
            },
        )
        .put(
            uid,
            QueueRecord {
                due: at(70),
                why: "resync".into(),
            },
        )
        .put(
            child_key(&PodUid::new(uid), "main"),
            ContainerRecord {
                restart_count: 3,
                intent: Some(IntentRecord {
                    container_id: "c3".into(),
                    attempt: 3,
                    hash: "h".into(),
                    at: at(15),
                }),
                last_exit: Some(ExitRecord {
                    container_id: "c2".into(),
                    attempt: 2,
                    image: "busybox".into(),
                    image_ref: "sha256:1".into(),
                    started_at_ns: 1_700_000_001_000_000_001,
                    finished_at_ns: 1_700_000_002_000_000_000,
                    finished: at(2),
                    exit_code: 137,
                    reason: "OOMKilled".into(),
                    message: "red\u{1b}[31m".into(),
                    inferred: false,
                }),
                backoff: None,
                hooks_done: Vec::new(),
            },
        )
        .journal(Some(&PodUid::new(uid)), "admitted", "first sight")
}

fn commit(runtime: &tokio::runtime::Runtime, store: &Store, transaction: Transaction) {
    runtime.block_on(store.commit(transaction)).unwrap();
}

fn fill(runtime: &tokio::runtime::Runtime, store: &Store) {
    commit(runtime, store, meta(1));
    commit(runtime, store, pod(WEB, "default", "web", "Running"));
    commit(runtime, store, pod(DB, "data", "db", "Pending"));
    commit(runtime, store, meta(2));
    let web = PodUid::new(WEB);
    let started = Transaction::new().journal(Some(&web), "starting container", "main attempt 3");
    commit(runtime, store, started);
    commit(runtime, store, the_other_tables());
}

/// A row in every table that `pod` leaves empty.
fn the_other_tables() -> Transaction {
    let web = PodUid::new(WEB);
    let backoff = BackoffRecord {
        duration_ms: 10_000,
        since: at(5),
    };
    let status = PodStatus {
        name: "web".into(),
        namespace: "default".into(),
        ips: vec!["10.88.0.7".into()],
        sandboxes: vec![SandboxStatus {
            id: "s1".into(),
            attempt: 0,
            state: SandboxState::Ready,
            created_at_ns: 1_700_000_000_000_000_000,
            ips: vec!["10.88.0.7".into()],
            host_network: Some(false),
            runtime_handler: String::new(),
        }],
        ..PodStatus::empty(web.clone())
    };
    Transaction::new()
        .put(WEB, PlegRecord { status })
        .put(
            "web_default",
            MirrorRecord {
                uid: "m1".into(),
                hash: "h".into(),
            },
        )
        .put(
            format!("{WEB}/main/liveness"),
            ProbeRecord {
                container_id: "c3".into(),
                result: "Success".into(),
                last: "Failure".into(),
                consecutive: 2,
                at: at(30),
            },
        )
        .put(
            child_key(&web, "data"),
            VolumeRecord {
                plugin: "kubernetes.io/empty-dir".into(),
                path: "/var/lib/kubelet/pods/x".into(),
                phase: VolumePhase::Mounted,
                at: at(12),
            },
        )
        .put(
            "busybox",
            ImageRecord {
                pulled_ref: None,
                backoffs: [(web, backoff)].into(),
                first_seen: at(3),
                last_used: at(15),
            },
        )
        .put(
            "secrets/default/s",
            ObjectRecord {
                resource_version: "1".into(),
                encrypted: true,
                data: b"cipher".to_vec(),
                at: at(4),
            },
        )
        .put(
            "memory.available",
            SignalRecord {
                first: at(6),
                last: at(7),
            },
        )
        .put(
            "file",
            SourceRecord {
                location: "/etc/manifests".into(),
                read: at(9),
                error: String::new(),
                broken: [("/etc/manifests/x.yaml".to_owned(), "line 3".to_owned())].into(),
            },
        )
}

struct Hooks {
    backups: PathBuf,
}

impl AdminHooks for Hooks {
    fn quarantined(&self) -> Vec<Quarantined> {
        Vec::new()
    }

    fn write_backup(&self, to: &mut dyn Write) -> Result<(), BoxError> {
        Ok(to.write_all(&[b'x'; 100_000])?)
    }

    fn save_backup(&self) -> Result<PathBuf, BoxError> {
        std::fs::write(&self.backups, b"saved")?;
        Ok(self.backups.clone())
    }
}

/// A live agent, as far as its admin socket goes.
struct Live {
    runtime: tokio::runtime::Runtime,
    store: Store,
    stop: CancellationToken,
    served: Option<tokio::task::JoinHandle<()>>,
    dir: tempfile::TempDir,
}

impl Live {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let store = Store::in_memory(clock());
        let stop = CancellationToken::new();
        let info = AdminInfo {
            version: "0.0.0".into(),
            started: at(0),
            hooks: Arc::new(Hooks {
                backups: dir.path().join("saved"),
            }),
        };
        let served = {
            let _guard = runtime.enter();
            let listener = admin::bind(dir.path()).unwrap();
            runtime.spawn(admin::serve(listener, store.clone(), info, stop.clone()))
        };
        let live = Self {
            runtime,
            store,
            stop,
            served: Some(served),
            dir,
        };
        fill(&live.runtime, &live.store);
        live
    }

    fn dir(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    fn end(&mut self) {
        self.stop.cancel();
        if let Some(served) = self.served.take() {
            self.runtime.block_on(served).unwrap();
        }
    }
}

/// Ends the command with the test, whatever its outcome.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn the_overview_looks_like_kubectl_get_pods() {
    let live = Live::start();
    let output = run(&["dump", "--state-dir", live.dir()]);
    assert!(text(&output.stderr).contains("source: live agent (pid "));
    let shown = text(&output.stdout);
    let lines: Vec<Vec<&str>> = shown
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines[0],
        [
            "NAMESPACE",
            "NAME",
            "READY",
            "STATUS",
            "RESTARTS",
            "AGE",
            "IP",
            "SOURCE",
            "WORKER",
            "NEXT-SYNC"
        ]
    );
    assert_eq!(lines[1][..5], ["data", "db", "1/1", "Pending", "3"]);
    assert_eq!(lines[2][..5], ["default", "web", "1/1", "Running", "3"]);
    assert_eq!(lines[2][6..], ["10.88.0.7", "file", "Sync", "now"]);
    assert_eq!(lines.len(), 3);

    let quiet = run(&["dump", "-q", "-o", "name", "--state-dir", live.dir()]);
    assert_eq!(text(&quiet.stderr), "");
    assert_eq!(text(&quiet.stdout), "data/db\ndefault/web\n");
}

#[test]
fn json_has_every_table_with_documented_fields() {
    let live = Live::start();
    let dump = json_of(&["dump", "-o", "json", "--state-dir", live.dir()]);
    assert_eq!(dump["apiVersion"], "holdfast.io/v1");
    assert_eq!(dump["kind"], "Dump");
    assert_eq!(dump["node"], "node-1");
    assert_eq!(dump["quarantined"], json!([]));
    let documented = std::fs::read_to_string("docs/dump.md").unwrap();
    for (table, rows) in dump["tables"].as_object().unwrap() {
        assert_ne!(*rows, json!([]), "{table} has no row to check");
        assert!(
            documented.contains(&format!("### {table}")),
            "{table} is not documented"
        );
        let section = documented.split(&format!("### {table}\n")).nth(1).unwrap();
        let section = section.split("\n### ").next().unwrap();
        for field in rows
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|r| r.as_object().unwrap().keys())
        {
            let common = ["key", "uid", "namespace", "name"].contains(&field.as_str());
            assert!(
                common || section.contains(&format!("`{field}`")),
                "field {field} of {table} is not documented"
            );
        }
    }
    assert_eq!(dump["tables"].as_object().unwrap().len(), 16);
    let container = &dump["tables"]["containers"][0];
    assert_eq!(
        *container,
        json!({
            "key": format!("{WEB}/main"),
            "uid": WEB,
            "namespace": "default",
            "name": "web",
            "container": "main",
            "restartCount": 3,
            "intent": {
                "containerId": "c3",
                "attempt": 3,
                "hash": "h",
                "at": {"time": "2023-11-14T22:13:35.000Z", "boot": "0000000000000017", "bootTimeMs": 15000},
            },
            "lastExit": {
                "containerId": "c2",
                "attempt": 2,
                "image": "busybox",
                "imageRef": "sha256:1",
                "startedAt": "2023-11-14T22:13:21.000000001Z",
                "finishedAt": "2023-11-14T22:13:22Z",
                "finished": {"time": "2023-11-14T22:13:22.000Z", "boot": "0000000000000017", "bootTimeMs": 2000},
                "exitCode": 137,
                "reason": "OOMKilled",
                "message": "red\u{1b}[31m",
                "inferred": false,
            },
            "backoff": null,
            "hooksDone": [],
        })
    );
}

#[test]
fn yaml_says_the_same_as_json() {
    let live = Live::start();
    let yaml = stdout_of(&["dump", "-o", "yaml", "--state-dir", live.dir()]);
    let json = json_of(&["dump", "-o", "json", "--state-dir", live.dir()]);
    let parsed: Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(parsed, json);
    assert!(
        yaml.contains("\"0644\"") || yaml.contains("'0644'"),
        "a string stays one"
    );
}

#[test]
fn tables_and_selectors_narrow_the_output() {
    let live = Live::start();
    let dir = live.dir();
    let names = |args: &[&str]| {
        let mut all = vec!["dump", "-o", "name", "--state-dir", dir];
        all.extend(args);
        stdout_of(&all)
    };
    assert_eq!(names(&["pods", "-n", "data"]), "data/db\n");
    assert_eq!(names(&["pod", "--name", "web"]), "default/web\n");
    assert_eq!(names(&["pods", "--uid", "2222"]), "data/db\n");
    assert_eq!(names(&["pods", "--phase", "Running"]), "default/web\n");
    assert_eq!(
        names(&["pods,queue", "default/web"]),
        format!("default/web\nqueue/{WEB}\n")
    );
    assert_eq!(
        names(&["workers", "11111111-a"]),
        format!("workers/{WEB}\n")
    );
    assert_eq!(names(&["pods", "-n", "nowhere"]), "");

    let one = stdout_of(&["dump", "web", "--state-dir", dir]);
    for section in ["overview:", "pods:", "workers:", "containers:", "journal:"] {
        assert!(one.contains(section), "{section} missing in\n{one}");
    }
    assert!(!one.contains("meta:") && !one.contains("db"), "{one}");
    let wide = stdout_of(&["dump", "containers", "-o", "wide", "--state-dir", dir]);
    assert!(
        wide.contains("CONTAINER-ID") && wide.contains("OOMKilled"),
        "{wide}"
    );
}

#[test]
fn exit_codes_tell_failure_usage_and_not_found_apart() {
    let live = Live::start();
    let check = |args: &[&str], code: i32, message: &str| {
        let output = run(args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(message), "{args:?}: {stderr}");
        assert_eq!(text(&output.stdout), "", "{args:?}");
    };
    let dir = live.dir();
    check(
        &["dump", "nobody", "--state-dir", dir],
        3,
        "holdfast: pod \"nobody\" not found",
    );
    check(
        &["dump", "--uid", "ffff", "--state-dir", dir],
        3,
        "with UID \"ffff\" not found",
    );
    check(
        &["dump", "--history", "nobody", "--state-dir", dir],
        3,
        "pod \"nobody\" not found",
    );
    check(
        &["dump", "podz", "nobody", "--state-dir", dir],
        2,
        "there is no table \"nobody\"",
    );
    check(
        &["dump", "--phase", "Running2", "--state-dir", dir],
        2,
        "possible values",
    );
    check(
        &["dump", "--watch", "pods", "queue", "--state-dir", dir],
        2,
        "-o json",
    );
    check(&["dumb"], 2, "unrecognized subcommand");
    check(
        &["dump", "--state-dir", "/nonexistent/holdfast"],
        1,
        "/nonexistent/holdfast",
    );
    check(
        &["dump", "--watch", "--state-dir", "/nonexistent/holdfast"],
        1,
        "needs a live agent",
    );
}

#[test]
fn history_tells_decisions_and_restarts() {
    let live = Live::start();
    let shown = stdout_of(&[
        "dump",
        "--history",
        "default/web",
        "--state-dir",
        live.dir(),
    ]);
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines.len(), 4, "{shown}");
    assert!(lines[0].starts_with("TIME"), "{shown}");
    assert!(
        lines[1].ends_with("admitted             first sight"),
        "{shown}"
    );
    assert!(
        lines[2].starts_with("---- agent restarted: generation 1 -> 2 at 2023-11-14T22:1"),
        "{shown}"
    );
    assert!(
        lines[3].ends_with("starting container   main attempt 3"),
        "{shown}"
    );

    let history = json_of(&[
        "dump",
        "--history",
        "web",
        "-o",
        "json",
        "--state-dir",
        live.dir(),
    ]);
    assert_eq!(history["kind"], "History");
    assert_eq!(history["pods"], json!([WEB]));
    let types: Vec<_> = history["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|i| &i["type"])
        .collect();
    assert_eq!(types, ["entry", "restart", "entry"]);
    assert_eq!(history["items"][1]["toGeneration"], 2);
}

#[test]
fn watch_streams_changes_as_they_are_published() {
    let mut live = Live::start();
    let mut child = Running(
        holdfast(&[
            "dump",
            "workers",
            "-n",
            "data",
            "-w",
            "-o",
            "json",
            "--state-dir",
            live.dir(),
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap(),
    );
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let first = next();
    assert_eq!(
        (&first["type"], &first["table"]),
        (&json!("ADDED"), &json!("workers"))
    );
    assert_eq!(first["row"]["name"], "db");
    assert_eq!(next()["type"], "BOOKMARK");

    let state = live.store.snapshot();
    let mut worker: WorkerRecord = state.record::<WorkerRecord>(DB).unwrap().clone();
    worker.deleted = true;
    commit(
        &live.runtime,
        &live.store,
        Transaction::new().put(DB, worker),
    );
    let changed = next();
    assert_eq!(changed["type"], "MODIFIED");
    assert_eq!(changed["row"]["deleted"], true);
    commit(
        &live.runtime,
        &live.store,
        Transaction::new().delete::<WorkerRecord>(DB),
    );
    assert_eq!(next()["type"], "DELETED");

    live.end();
    let status = child.0.wait().unwrap();
    assert_eq!(status.code(), Some(1));
    let mut stderr = String::new();
    child
        .0
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert!(stderr.contains("the agent has ended"), "{stderr}");
}

#[test]
fn watch_as_a_table_prints_a_line_per_change() {
    let mut live = Live::start();
    let mut child = Running(
        holdfast(&["dump", "queue", "--watch", "--state-dir", live.dir()])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    assert!(next().starts_with("EVENT   NAMESPACE"));
    assert!(next().starts_with("ADDED   default     web"));
    assert!(next().starts_with("ADDED   data        db"));
    commit(
        &live.runtime,
        &live.store,
        Transaction::new().delete::<QueueRecord>(DB),
    );
    assert!(next().starts_with("DELETED   data"));
    live.end();
}

#[test]
fn a_closed_pipe_ends_a_command_quietly() {
    let live = Live::start();
    for n in 0..500 {
        let uid = format!("{n:08}-cccc-4000-8000-000000000003");
        commit(
            &live.runtime,
            &live.store,
            pod(&uid, "many", &format!("p{n}"), "Running"),
        );
    }
    let mut child = Running(
        holdfast(&["dump", "-q", "-o", "json", "--state-dir", live.dir()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut first = [0; 1];
    let mut stdout = child.0.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let mut stderr = String::new();
    child
        .0
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert_eq!(stderr, "");
    assert!(child.0.wait().unwrap().success());
}

#[test]
fn what_a_terminal_obeys_does_not_reach_it() {
    let live = Live::start();
    let why = "\u{1b}]0;owned\u{7}\nline two";
    let web = PodUid::new(WEB);
    let bad = Transaction::new().journal(Some(&web), "event X", why);
    commit(&live.runtime, &live.store, bad);
    let shown = stdout_of(&["dump", "journal", "--state-dir", live.dir()]);
    assert!(
        shown.contains("\\u{1b}]0;owned\\u{7}\\nline two"),
        "{shown}"
    );
}

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
fn help_lists_every_command_and_every_table() {
    let help = stdout_of(&["--help"]);
    for command in [
        "run",
        "dump",
        "backup",
        "restore",
        "store",
        "version",
        "completions",
        "man",
    ] {
        assert!(
            help.contains(&format!("\n  {command} ")),
            "{command} missing in\n{help}"
        );
    }
    let help = stdout_of(&["dump", "--help"]).replace('\n', " ");
    for table in holdfast::core::state::Table::ALL {
        assert!(
            help.contains(table.name()),
            "{} missing in\n{help}",
            table.name()
        );
    }
    let bare = run(&[]);
    assert_eq!(bare.status.code(), Some(2));
    assert!(text(&bare.stderr).contains("Usage: holdfast <COMMAND>"));
}

#[test]
fn version_completions_and_manual_pages_are_made() {
    assert_eq!(
        stdout_of(&["version"]),
        concat!("holdfast ", env!("CARGO_PKG_VERSION"), "\n")
    );
    let version = json_of(&["version", "-o", "json"]);
    assert_eq!(version["schema"], 1);
    assert_eq!(version["recordVersions"]["pods"], 1);
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            stdout_of(&["completions", shell]).contains("dump"),
            "{shell}"
        );
    }
    assert!(stdout_of(&["man"]).contains(".TH holdfast"));
    let dir = tempfile::tempdir().unwrap();
    stdout_of(&["man", "--dir", dir.path().to_str().unwrap()]);
    for page in ["holdfast.1", "holdfast-dump.1", "holdfast-store-verify.1"] {
        assert!(dir.path().join(page).exists(), "{page}");
    }
}

#[test]
fn the_system_clock_is_not_needed_to_read_a_store_of_another_boot() {
    // Ages are by the wall clock: the stamps of this test carry a boot that never was.
    let live = Live::start();
    let shown = stdout_of(&["dump", "workers", "--state-dir", live.dir()]);
    let now = SystemClock::new(BootId(1)).now().wall_ms;
    let days = (now - at(12).wall_ms) / 86_400_000;
    assert!(shown.contains(&format!("{days}d")), "{shown}");
}

/// A store on disk; `None` while it is closed.
struct OnDisk {
    runtime: tokio::runtime::Runtime,
    dir: tempfile::TempDir,
}

impl OnDisk {
    fn filled() -> Self {
        let disk = Self {
            runtime: tokio::runtime::Runtime::new().unwrap(),
            dir: tempfile::tempdir().unwrap(),
        };
        let store = disk.open();
        fill(&disk.runtime, &store);
        disk.runtime.block_on(store.close()).unwrap();
        disk
    }

    fn open(&self) -> Store {
        let clock = clock();
        let opened = open::open(&open::OpenOptions {
            node_was_used: false,
            dir: self.dir.path().to_owned(),
            identity: Identity {
                node_name: "node-1".into(),
                machine_id: "m".into(),
                boot: BootIdentity::read(None, None),
            },
            sled: SledOptions::default(),
            now: clock.now(),
        })
        .unwrap();
        let options = StoreOptions::default();
        let store = Store::start(
            opened.backend,
            opened.loaded,
            options,
            clock,
            Metrics::default(),
        );
        store.unwrap()
    }

    fn path(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    /// Runs `ask` against an agent that serves this store, then closes it.
    fn live<T>(&self, ask: impl FnOnce(&Store) -> T) -> T {
        let store = self.open();
        let layout = Layout::new(self.dir.path());
        let hooks = admin::StoreHooks::new(store.clone(), clock(), layout);
        let info = AdminInfo {
            version: "0.0.0".into(),
            started: at(0),
            hooks: Arc::new(hooks),
        };
        let stop = CancellationToken::new();
        let served = {
            let _guard = self.runtime.enter();
            let listener = admin::bind(self.dir.path()).unwrap();
            let serving = admin::serve(listener, store.clone(), info, stop.clone());
            self.runtime.spawn(serving)
        };
        let answer = ask(&store);
        stop.cancel();
        self.runtime.block_on(served).unwrap();
        self.runtime.block_on(store.close()).unwrap();
        answer
    }
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

fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push((path.clone(), std::fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
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
            "queue: 1 added, 0 changed, 1 removed\n  + {WEB}\n  - 3333\n"
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
    assert!(said.contains("the store of before is in "), "{said}");

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
        again.contains("set aside before: queue") && again.contains("the store is whole"),
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

    let same = stdout_of(&[&["store", "migrate", "--to", "1"][..], &state_dir].concat());
    assert!(same.starts_with("schema 1 -> 1"), "{same}");
    let unknown = run(&[&["store", "migrate", "--to", "99"][..], &state_dir].concat());
    assert_eq!(unknown.status.code(), Some(1));
    assert!(text(&unknown.stderr).contains("this binary knows schemas 1 to"));
    let nowhere = run(&["store", "repair", "--state-dir", "/nonexistent/holdfast"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(!Path::new("/nonexistent").exists());
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
        stderr.contains("what the agent has not written yet is missing"),
        "{stderr}"
    );
    assert_eq!(text(&output.stdout), "default/web\ndata/db\n");
}

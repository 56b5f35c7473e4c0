//! `holdfast dump` of a live agent: what it prints, selects, streams and refuses.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use holdfast::core::state::{QueueRecord, Transaction, WorkerRecord};
use holdfast::types::{BootId, Clock, PodUid, SystemClock};
use serde_json::{Value, json};

use crate::world::*;

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
            let common =
                ["key", "uid", "namespace", "name", "confirmedBy"].contains(&field.as_str());
            assert!(
                common || section.contains(&format!("`{field}`")),
                "field {field} of {table} is not documented"
            );
        }
    }
    assert_eq!(dump["tables"].as_object().unwrap().len(), 19);
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
            "confirmedBy": "checkpoint",
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
        // What is not there is no source.
        let nowhere = args.iter().any(|arg| arg.starts_with("/nonexistent"));
        assert!(!(nowhere && stderr.contains("source:")), "{stderr}");
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
        "holdfast: no store in /nonexistent/holdfast",
    );
    check(
        &["backup", "-", "--state-dir", "/nonexistent/holdfast"],
        1,
        "holdfast: no store in /nonexistent/holdfast",
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
    assert_eq!(lines.len(), 6, "{shown}");
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
    assert_eq!(lines[4], "", "{shown}");
    assert!(
        lines[5].starts_with("container main: 3 restarts, newest start 2023-")
            && lines[5].ends_with("with code 137, OOMKilled, red\\u{1b}[31m"),
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
    let containers = history["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1, "{history}");
    assert_eq!(containers[0]["container"], "main");
    assert_eq!(containers[0]["restartCount"], 3);
    assert_eq!(containers[0]["lastExit"]["reason"], "OOMKilled");
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
    assert!(stderr.contains("the agent has exited"), "{stderr}");
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
fn the_system_clock_is_not_needed_to_read_a_store_of_another_boot() {
    // Ages are by the wall clock: the stamps of this test carry a boot that never was.
    let live = Live::start();
    let shown = stdout_of(&["dump", "workers", "--state-dir", live.dir()]);
    let now = SystemClock::new(BootId(1)).now().wall_ms;
    let days = (now - at(12).wall_ms) / 86_400_000;
    assert!(shown.contains(&format!("{days}d")), "{shown}");
}

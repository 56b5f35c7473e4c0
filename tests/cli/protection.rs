//! `holdfast dump pressure` and `shutdown`, and `holdfast drain-local`, against an agent that is its admin socket and its store.

use std::process::Stdio;
use std::time::Duration;

use holdfast::core::pressure::report::{self, Reclaim, Report, Victim};
use holdfast::core::pressure::{
    Candidate, Disks, Figure, Observations, Rules, Signal, Standing, Threshold,
};
use holdfast::core::shutdown::{Inhibitor, Lock, ManagerRecord, ShutdownRecord};
use holdfast::core::state::{
    META_KEY, MetaRecord, SignalRecord, Transaction, WorkerPhase, WorkerRecord,
};
use holdfast::kubeletconfig::EvictionThreshold;
use holdfast::types::{PodUid, Stamp};
use serde_json::{Value, json};

use crate::world::*;

/// The fields of every row are in the table's section of the docs.
fn assert_documented(table: &str, rows: &Value) {
    let documented = std::fs::read_to_string("docs/dump.md").unwrap();
    let section = documented.split(&format!("### {table}\n")).nth(1).unwrap();
    let section = section.split("\n### ").next().unwrap();
    let rows = rows.as_array().unwrap();
    for field in rows.iter().flat_map(|row| row.as_object().unwrap().keys()) {
        let is_known = field == "key" || section.contains(&format!("`{field}`"));
        assert!(is_known, "field {field} of {table} is not documented");
    }
}

fn rules() -> Rules {
    let hard = Threshold {
        signal: Signal::Memory,
        value: EvictionThreshold::Quantity(100 << 20),
        grace: None,
        minimum_reclaim: Some(EvictionThreshold::Quantity(50 << 20)),
    };
    let soft = Threshold {
        value: EvictionThreshold::Quantity(200 << 20),
        grace: Some(Duration::from_secs(90)),
        ..hard
    };
    let disk = Threshold {
        signal: Signal::NodeFs,
        value: EvictionThreshold::Fraction(0.1),
        ..hard
    };
    Rules {
        thresholds: vec![hard, soft, disk],
        transition: Duration::from_secs(300),
        max_pod_grace: 0,
    }
}

#[test]
fn pressure_shows_what_is_short_since_when_and_who_went_for_it() {
    let live = Live::start();
    let rules = rules();
    let figure = Figure {
        available: 150 << 20,
        capacity: 1 << 30,
    };
    let mut report = Report::default();
    let observed = Observations {
        figures: [(Signal::Memory, figure)].into(),
        disks: Disks::One,
    };
    report.observe(&rules, &observed, at(50));
    report.last_reclaim = Some(Reclaim {
        threshold: rules.thresholds[2].key(),
        began: at(30),
        ended: Some(at(31)),
        removed: Some(true),
    });
    let pod = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default", "uid": WEB}, "spec": {"containers": []},
    }))
    .unwrap();
    let usage = Default::default();
    let chosen = Candidate {
        pod: &pod,
        usage: &usage,
    };
    let standing = Standing {
        candidates: 2,
        used: 300 << 20,
        request: Some(0),
        priority: 0,
    };
    let victim = Victim::new(
        &rules.thresholds[0],
        figure,
        &chosen,
        &standing,
        (at(32), 1),
    );
    let why = victim.why.clone();
    report.last_victim = Some(victim);
    let signal = |first, last| SignalRecord {
        first: at(first),
        last: at(last),
    };
    let records = report
        .changes(&live.store.snapshot(), true, at(50))
        .put(rules.thresholds[1].key(), signal(20, 50))
        .put("MemoryPressure", signal(20, 50));
    assert_eq!(records.mutations.len(), 3);
    commit(&live.runtime, &live.store, records);

    let dump = json_of(&[
        "dump",
        "pressure",
        "-q",
        "-o",
        "json",
        "--state-dir",
        live.dir(),
    ]);
    let rows = &dump["tables"]["pressure"];
    assert_documented("pressure", rows);
    let row = |key: &str| -> &Value {
        let found = rows
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["key"] == key);
        found.unwrap_or_else(|| panic!("no row {key}"))
    };
    let hard = row("memory.available<100Mi");
    assert_eq!(hard["type"], "Threshold");
    assert_eq!(hard["status"], "NotMet");
    assert_eq!(hard["available"], 150 << 20);
    assert_eq!(hard["minimumReclaim"], "50Mi");
    let soft = row("memory.available<200Mi for 90s");
    assert_eq!(soft["status"], "InGracePeriod");
    assert_eq!(soft["since"]["bootTimeMs"], 20_000);
    assert_eq!(row("nodefs.available<10%")["status"], "Unknown");
    assert_eq!(row("MemoryPressure")["status"], "True");
    assert_eq!(row("PIDPressure")["status"], "False");
    assert_eq!(row("lastReclaim")["status"], "Done");
    let victim = row("lastVictim");
    assert_eq!(victim["pod"]["name"], "web");
    assert_eq!(
        (&victim["why"], &victim["status"]),
        (&json!(why), &json!("Sync"))
    );
    assert_eq!(
        (&victim["used"], &victim["priority"]),
        (&json!(300 << 20), &json!(0))
    );

    let shown = stdout_of(&["dump", "pressure", "--state-dir", live.dir()]);
    assert!(shown.contains("is over its request"), "{shown}");
    let objects = json_of(&[
        "dump",
        "objects",
        "-q",
        "-o",
        "json",
        "--state-dir",
        live.dir(),
    ]);
    let keys = objects["tables"]["objects"].as_array().unwrap().iter();
    assert!(keys.map(|row| &row["key"]).any(|key| key == report::KEY));
}

/// A time of the boot of the store.
fn in_this_boot(live: &Live, seconds: i64) -> Stamp {
    let state = live.store.snapshot();
    let meta: &MetaRecord = state.record(META_KEY).unwrap();
    Stamp {
        boot: meta.boot.id(),
        ..at(seconds)
    }
}

fn drain(live: &Live, change: impl FnOnce(&mut ShutdownRecord)) {
    let mut record = ShutdownRecord {
        begun: in_this_boot(live, 100),
        deadline: in_this_boot(live, 130),
        ended: None,
        cancelled: None,
        local: true,
    };
    change(&mut record);
    let transaction = record.transaction("holdfast drain-local", record.begun);
    commit(&live.runtime, &live.store, transaction);
}

fn finished(pod: &str) -> Transaction {
    let record = WorkerRecord {
        full_name: "x_y".into(),
        queued: at(11),
        started: Some(at(12)),
        phase: WorkerPhase::Finished {
            since: at(40),
            cause: holdfast::core::shutdown::cause(),
        },
        deleted: false,
        restart_requested: false,
        runtime_only: false,
    };
    Transaction::new().put(PodUid::new(pod).as_str(), record)
}

#[test]
fn shutdown_shows_its_state_the_lock_the_groups_and_who_is_left() {
    let live = Live::start();
    let row = || {
        let dump = json_of(&[
            "dump",
            "shutdown",
            "-q",
            "-o",
            "json",
            "--state-dir",
            live.dir(),
        ]);
        dump["tables"]["shutdown"][0].clone()
    };
    let up = row();
    assert_documented("shutdown", &json!([up]));
    assert_eq!(
        (&up["state"], &up["inhibitor"]),
        (&json!("Up"), &json!("Unused"))
    );
    assert_eq!(up["podsLeft"].as_array().unwrap().len(), 2);

    let manager = ManagerRecord {
        groups: vec![(0, 20), (2_000_000_000, 10)],
        lock: Lock {
            state: Inhibitor::Held,
            problem: Some("too short".into()),
        },
    };
    let state = live.store.snapshot();
    commit(
        &live.runtime,
        &live.store,
        manager.transaction(&state, at(60)),
    );
    drain(&live, |_| {});
    commit(&live.runtime, &live.store, finished(DB));
    let down = row();
    assert_eq!(
        (&down["state"], &down["by"]),
        (&json!("ShuttingDown"), &json!("drain-local"))
    );
    assert_eq!(
        (&down["inhibitor"], &down["problem"]),
        (&json!("Held"), &json!("too short"))
    );
    assert_eq!(
        down["periods"][1],
        json!({"priority": 2_000_000_000, "graceSeconds": 10})
    );
    let left = down["podsLeft"].as_array().unwrap();
    assert_eq!((left.len(), &left[0]["name"]), (1, &json!("web")));

    drain(&live, |record| record.begun = at(100));
    assert_eq!(row()["state"], "Up", "that was in another boot");
}

#[test]
fn a_drain_is_waited_for_and_its_exit_code_says_how_it_ended() {
    let no_agent = tempfile::tempdir().unwrap();
    let output = run(&[
        "drain-local",
        "--state-dir",
        no_agent.path().to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no agent listens"));
    let output = run(&["drain-local", "--timeout", "soon"]);
    assert_eq!(output.status.code(), Some(2));

    let live = Live::start();
    for (code, told) in [
        (4, "default/web"),
        (5, "cancelled"),
        (0, "every pod has ended"),
    ] {
        drain(&live, |_| {});
        if code == 0 {
            commit(&live.runtime, &live.store, finished(WEB).and(finished(DB)));
        }
        let mut command = holdfast(&["drain-local", "--timeout", "25s", "--state-dir", live.dir()]);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        let now = in_this_boot(&live, 120);
        drain(&live, |record| match code {
            5 => record.cancelled = Some(now),
            _ => record.ended = Some(now),
        });
        let output = child.wait_with_output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(told), "{stderr}");
    }
}

// Invariant POD-5.
#[test]
fn the_end_of_the_machine_cannot_be_cancelled_by_a_drain() {
    let live = Live::start();
    drain(&live, |record| record.local = false);
    let output = run(&["drain-local", "--cancel", "--state-dir", live.dir()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("the machine itself shuts down"));
    let now = in_this_boot(&live, 120);
    drain(&live, |record| record.cancelled = Some(now));
    let output = run(&["drain-local", "--cancel", "--state-dir", live.dir()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

use serde_json::json;

use super::*;
use crate::core::testkit::at;
use crate::types::BootId;
use ProbeKind::{Liveness, Readiness, Startup};
use ProbeResult::{Failure, Success, Unknown};

fn spec(success_threshold: u32, failure_threshold: u32) -> ProbeSpec {
    ProbeSpec {
        success_threshold,
        failure_threshold,
        ..ProbeSpec::of(&Probe::default())
    }
}

fn id() -> ContainerId {
    ContainerId::new("c1")
}

fn record(result: &str, last: &str, consecutive: u32, second: i64) -> ProbeRecord {
    ProbeRecord {
        container_id: id(),
        result: result.to_owned(),
        last: last.to_owned(),
        consecutive,
        at: at(second),
    }
}

/// Runs a series of `+` and `-`; returns the valid results after each, and the number of changes of the result and of
/// the record.
fn series(state: &mut ProbeState, spec: &ProbeSpec, runs: &str) -> (String, usize, usize) {
    let (mut seen, mut results, mut records) = (String::new(), 0, 0);
    for (second, run) in (0..).step_by(10).zip(runs.chars()) {
        let change = state.apply(spec, run == '+', at(second));
        results += usize::from(change.result);
        records += usize::from(change.record);
        seen.push(match state.result() {
            Success => 'S',
            Failure => 'F',
            Unknown => 'U',
        });
    }
    (seen, results, records)
}

#[test]
fn thresholds_count_results_in_a_row() {
    let cases = [
        // kind, successes, failures, runs, in force, changes of the result, of the record
        (Readiness, 1, 3, "+", "S", 1, 1),
        (Readiness, 1, 3, "++++", "SSSS", 1, 1),
        (Readiness, 1, 3, "-", "F", 0, 1),
        (Readiness, 1, 3, "-----", "FFFFF", 0, 3),
        (Readiness, 1, 3, "+--", "SSS", 1, 3),
        (Readiness, 1, 3, "+---", "SSSF", 2, 4),
        (Readiness, 1, 3, "+--+--", "SSSSSS", 1, 6),
        (Readiness, 1, 3, "+---+", "SSSFS", 3, 5),
        (Readiness, 3, 1, "++", "FF", 0, 2),
        (Readiness, 3, 1, "+++", "FFS", 1, 3),
        (Readiness, 3, 1, "++-+++", "FFFFFS", 1, 6),
        (Readiness, 2, 2, "+++--++", "FSSSFFS", 3, 6),
        (Readiness, 1, 1, "+-+-", "SFSF", 4, 4),
        (Liveness, 1, 3, "++", "SS", 0, 1),
        (Liveness, 1, 3, "--", "SS", 0, 2),
        (Liveness, 1, 3, "---", "SSF", 1, 3),
        (Liveness, 1, 3, "--+--", "SSSSS", 0, 5),
        (Liveness, 1, 3, "--+---", "SSSSSF", 1, 6),
        // What is decided holds until the container is another one.
        (Liveness, 1, 3, "---+++", "SSFFFF", 1, 3),
        (Liveness, 1, 1, "-+", "FF", 1, 1),
        (Startup, 1, 3, "--", "UU", 0, 2),
        (Startup, 1, 3, "--+", "UUS", 1, 3),
        (Startup, 1, 3, "+---", "SSSS", 1, 1),
        (Startup, 1, 3, "---+", "UUFF", 1, 3),
        (Startup, 1, 30, "----+", "UUUUS", 1, 5),
    ];
    for (kind, successes, failures, runs, force, results, records) in cases {
        let mut state = ProbeState::fresh(kind, id());
        let seen = series(&mut state, &spec(successes, failures), runs);
        let want = (force.to_owned(), results, records);
        assert_eq!(seen, want, "{kind:?} {successes}/{failures} {runs}");
    }
}

#[test]
fn initial_results_are_those_of_the_kind() {
    let cases = [
        (Readiness, Failure, false),
        (Liveness, Success, false),
        (Startup, Unknown, false),
    ];
    for (kind, result, hold) in cases {
        let state = ProbeState::fresh(kind, id());
        assert_eq!(
            (state.result(), state.on_hold()),
            (result, hold),
            "{kind:?}"
        );
        assert_eq!(state.record(), None, "{kind:?}");
        assert_eq!(state.failure(), None, "{kind:?}");
    }
}

#[test]
fn only_a_decided_liveness_or_startup_asks_for_a_restart() {
    let cases = [
        (Liveness, "---", Some(ProbeFailure::Liveness), true),
        (Startup, "---", Some(ProbeFailure::Startup), true),
        (Startup, "+", None, true),
        (Readiness, "---", None, false),
        (Liveness, "--", None, false),
        (Startup, "--", None, false),
    ];
    for (kind, runs, failure, hold) in cases {
        let mut state = ProbeState::fresh(kind, id());
        series(&mut state, &spec(1, 3), runs);
        let seen = (state.failure(), state.on_hold());
        assert_eq!(seen, (failure, hold), "{kind:?} {runs}");
    }
}

#[test]
fn a_record_is_resumed_where_it_stood() {
    let cases = [
        // kind, record, age of it, runs, in force
        (Liveness, record("Success", "Failure", 2, 100), 10, "-", "F"),
        (Liveness, record("Success", "Failure", 2, 100), 20, "-", "F"),
        (
            Liveness,
            record("Success", "Failure", 2, 100),
            10,
            "+--",
            "SSS",
        ),
        // Older than two periods: starts over.
        (
            Liveness,
            record("Success", "Failure", 2, 100),
            21,
            "--",
            "SS",
        ),
        (
            Liveness,
            record("Success", "Failure", 2, 100),
            21,
            "---",
            "SSF",
        ),
        (
            Readiness,
            record("Success", "Success", 1, 100),
            10,
            "--",
            "SS",
        ),
        // The result holds, however old it is.
        (
            Readiness,
            record("Success", "Success", 1, 100),
            90_000,
            "--",
            "SS",
        ),
        (Readiness, record("Success", "Failure", 2, 100), 5, "-", "F"),
        (
            Readiness,
            record("Success", "Failure", 2, 100),
            90_000,
            "-",
            "S",
        ),
        (
            Readiness,
            record("Failure", "Failure", 3, 100),
            90_000,
            "+",
            "S",
        ),
        (Startup, record("Unknown", "Failure", 2, 100), 10, "-", "F"),
        (
            Startup,
            record("Success", "Success", 1, 100),
            90_000,
            "-",
            "S",
        ),
        (
            Startup,
            record("Failure", "Failure", 3, 100),
            90_000,
            "+",
            "F",
        ),
        (
            Liveness,
            record("Failure", "Failure", 3, 100),
            90_000,
            "+",
            "F",
        ),
    ];
    for (kind, record, age, runs, force) in cases {
        let spec = spec(1, 3);
        let mut state = ProbeState::resume(kind, &spec, &record, &id(), at(100 + age)).unwrap();
        assert_eq!(state.at(), Some(record.at));
        let seen = series(&mut state, &spec, runs).0;
        assert_eq!(seen, force, "{kind:?} {record:?} after {age} s, {runs}");
    }
}

#[test]
fn a_record_of_another_container_or_without_meaning_is_not_resumed() {
    let now = at(101);
    let resume = |record: &ProbeRecord, container: &str| {
        ProbeState::resume(Liveness, &spec(1, 3), record, &container.into(), now)
    };
    let good = record("Success", "Failure", 2, 100);
    assert!(resume(&good, "c1").is_some());
    assert_eq!(resume(&good, "c2"), None);
    assert_eq!(resume(&record("Perhaps", "Failure", 2, 100), "c1"), None);
    assert_eq!(resume(&record("Success", "", 2, 100), "c1"), None);
}

#[test]
fn what_is_recorded_comes_back_as_it_was() {
    for (kind, runs) in [
        (Readiness, "+--"),
        (Readiness, "+++"),
        (Liveness, "--"),
        (Liveness, "---"),
        (Startup, "-"),
        (Startup, "+"),
    ] {
        let spec = spec(1, 3);
        let mut state = ProbeState::fresh(kind, id());
        series(&mut state, &spec, runs);
        let record = state.record().unwrap();
        let now = record.at.plus(Duration::from_secs(15));
        let again = ProbeState::resume(kind, &spec, &record, &id(), now);
        assert_eq!(again, Some(state), "{kind:?} {runs}");
    }
}

#[test]
fn a_wall_clock_jump_within_a_boot_expires_no_count() {
    let mut now = at(110);
    now.wall_ms += 86_400_000;
    let record = record("Success", "Failure", 2, 100);
    let mut state = ProbeState::resume(Liveness, &spec(1, 3), &record, &id(), now).unwrap();
    assert!(state.apply(&spec(1, 3), false, now).result);
    // And one that is too old stays too old.
    let mut late = at(200);
    late.wall_ms -= 86_400_000;
    let mut state = ProbeState::resume(Liveness, &spec(1, 3), &record, &id(), late).unwrap();
    assert!(!state.apply(&spec(1, 3), false, late).result);
}

#[test]
fn without_a_record_holds_what_was_told_of_that_container() {
    let told = |id: &str, ready: bool, started: bool| -> ApiContainerStatus {
        serde_json::from_value(json!({
            "name": "a", "image": "", "imageID": "", "restartCount": 0,
            "containerID": id, "ready": ready, "started": started,
        }))
        .unwrap()
    };
    let cases = [
        (
            Readiness,
            Some(told("containerd://c1", true, true)),
            Success,
        ),
        (
            Readiness,
            Some(told("containerd://c1", false, true)),
            Failure,
        ),
        (
            Readiness,
            Some(told("containerd://c2", true, true)),
            Failure,
        ),
        (Readiness, Some(told("", true, true)), Failure),
        (Readiness, None, Failure),
        (Startup, Some(told("cri-o://c1", false, true)), Success),
        (Startup, Some(told("cri-o://c1", false, false)), Unknown),
        (Startup, Some(told("cri-o://c0", true, true)), Unknown),
        (Startup, None, Unknown),
        (
            Liveness,
            Some(told("containerd://c1", false, false)),
            Success,
        ),
    ];
    for (kind, told, result) in cases {
        let state = ProbeState::inferred(kind, id(), told.as_ref());
        assert_eq!(state.result(), result, "{kind:?} {told:?}");
        assert_eq!(state.record(), None);
    }
}

#[test]
fn defaults_are_those_of_the_api_server() {
    let of = |probe| ProbeSpec::of(&serde_json::from_value(probe).unwrap());
    let defaults = ProbeSpec {
        initial_delay: Duration::ZERO,
        timeout: Duration::from_secs(1),
        period: Duration::from_secs(10),
        success_threshold: 1,
        failure_threshold: 3,
    };
    assert_eq!(of(json!({})), defaults);
    let zero = json!({"initialDelaySeconds": 0, "timeoutSeconds": 0, "periodSeconds": -1,
        "successThreshold": 0, "failureThreshold": -3});
    assert_eq!(of(zero), defaults);
    let given = json!({"initialDelaySeconds": 5, "timeoutSeconds": 2, "periodSeconds": 3,
        "successThreshold": 4, "failureThreshold": 6});
    let want = ProbeSpec {
        initial_delay: Duration::from_secs(5),
        timeout: Duration::from_secs(2),
        period: Duration::from_secs(3),
        success_threshold: 4,
        failure_threshold: 6,
    };
    assert_eq!(of(given), want);
}

#[test]
fn waits_keep_the_phase_and_make_up_for_nothing() {
    let spec = spec(1, 3);
    let cases = [(0, 10), (3, 7), (9, 1), (10, 10), (12, 8), (3605, 5)];
    for (passed, wait) in cases {
        let seen = spec.wait_in_phase(at(100), at(100 + passed));
        assert_eq!(seen, Duration::from_secs(wait), "{passed} s later");
    }
    // A stamp of the future: a whole period at most.
    assert_eq!(spec.wait_in_phase(at(100), at(50)), spec.period);
}

#[test]
fn the_initial_delay_counts_from_the_start_of_the_container() {
    let spec = ProbeSpec {
        initial_delay: Duration::from_secs(30),
        ..spec(1, 3)
    };
    for (passed, wait) in [(0, 30), (10, 20), (30, 0), (300, 0)] {
        let seen = spec.first_wait(at(100), at(100 + passed));
        assert_eq!(seen, Duration::from_secs(wait), "{passed} s later");
    }
    // The wall clock may say what it wants.
    let mut now = at(110);
    now.wall_ms = 0;
    assert_eq!(spec.first_wait(at(100), now), Duration::from_secs(20));
    let rebased = Stamp {
        boot: BootId(2),
        ..at(0)
    };
    assert_eq!(spec.first_wait(rebased, rebased), spec.initial_delay);
}

#[test]
fn spreading_uses_the_whole_period() {
    let spec = spec(1, 3);
    let mut seconds: Vec<u64> = (0..100)
        .map(|n| spec.spread(&format!("u{n}/c/Readiness")).as_secs())
        .collect();
    assert!(seconds.iter().all(|s| *s < 10), "{seconds:?}");
    assert_eq!(spec.spread("a"), spec.spread("a"));
    seconds.sort_unstable();
    seconds.dedup();
    assert!(seconds.len() >= 9, "{seconds:?}");
    // In every release: whoever starts again probes when the agent before would have.
    for (key, millis) in [("", 5890), ("a", 5665), ("u1/c/Readiness", 5502)] {
        assert_eq!(spec.spread(key), Duration::from_millis(millis), "{key}");
    }
}

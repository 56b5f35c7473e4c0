//! The agent of a cluster's node dies at every step it takes: writes to the disk, calls of the runtime and
//! requests to the API server that change something.
//!
//! Pods are created, run, end, are deleted and replaced; in the end no pod is lost, there twice, or left in the
//! API server. See `crash` for the same without a cluster.

use std::time::Duration;

use holdfast_testkit::exploration::{every_point, is_whole};
use holdfast_testkit::fake_cri::Behaviour;
use tokio::time::Instant;

use crate::node::{Crash, When};
use crate::world::{World, spec};

const PATIENCE: Duration = Duration::from_secs(300);

fn behaviour(pod: &str, attempt: u32) -> Behaviour {
    let exit = |code, after| Behaviour::Exit {
        code,
        after: Duration::from_millis(after),
    };
    match (pod, attempt) {
        ("job", _) => exit(0, 1_500),
        ("failed", _) => exit(3, 1_100),
        ("retry", 0) => exit(1, 900),
        ("deleted", _) => Behaviour::IgnoreTerm,
        _ => Behaviour::RunForever,
    }
}

/// Something that happens in the cluster, and in which second.
type Happening = (u64, fn(&World));

const TIMELINE: [Happening; 3] = [
    (1, |w| {
        w.create("always", &spec("Always", ""));
        w.create("job", &spec("Never", ""));
        w.create("failed", &spec("Never", ""));
        w.create("retry", &spec("Always", ""));
        w.create("deleted", &spec("Always", ""));
        w.create("replaced", &spec("Always", ""));
    }),
    (5, |w| {
        w.delete("deleted", Some(2));
    }),
    (7, |w| {
        w.delete("replaced", Some(0));
        w.create("replaced", &spec("Always", ""));
    }),
];

struct Run {
    writes: usize,
    calls: usize,
    requests: usize,
    died: bool,
}

/// A run in a tokio runtime of its own; the first life ends at `crash`.
fn run(crash: Crash, power: bool) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(lives(crash, power))
}

async fn lives(crash: Crash, power: bool) -> Run {
    let mut w = World::with_api();
    w.behave(behaviour);
    let mut first = None;
    let mut timeline = TIMELINE.into_iter().peekable();
    let mut alive = false;
    loop {
        while let Some((_, happen)) =
            timeline.next_if(|(second, _)| Instant::now() >= w.began + Duration::from_secs(*second))
        {
            happen(&w);
        }
        if !alive {
            let crash = if first.is_none() { crash } else { Crash::Never };
            alive = w.start_until(crash).await;
        }
        if alive {
            alive = w.pass_alive(Duration::from_millis(500)).await;
        }
        if !alive {
            assert!(first.is_none(), "it died again\n{}", w.describe());
            first = Some((w.life.writes(), w.life.calls(), w.life.requests()));
            if power {
                w.lose_power().await;
            } else {
                w.crash().await;
            }
            continue;
        }
        if timeline.peek().is_none() {
            let wrong = wrong_with(&w);
            if wrong.is_empty() {
                break;
            }
            assert!(
                w.began.elapsed() < PATIENCE,
                "{wrong:#?}\n{crash:?} power lost: {power}\n{}",
                w.describe()
            );
        }
    }
    w.pass(5).await;
    let mut wrong = wrong_with(&w);
    wrong.extend(w.wrongs());
    assert!(
        wrong.is_empty(),
        "{wrong:#?}\n{crash:?} power lost: {power}\n{}",
        w.describe()
    );
    let died = first.is_some();
    let (writes, calls, requests) =
        first.unwrap_or_else(|| (w.life.writes(), w.life.calls(), w.life.requests()));
    Run {
        writes,
        calls,
        requests,
        died,
    }
}

/// What is not as it should be in the end.
fn wrong_with(w: &World) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut expect = |holds: bool, what: String| {
        if !holds {
            wrong.push(what);
        }
    };
    for (pod, phase, running, starts, code) in [
        ("always", "Running", 1, 1, None),
        ("job", "Succeeded", 0, 1, Some(0)),
        ("failed", "Failed", 0, 1, Some(3)),
        ("retry", "Running", 1, 2, None),
        ("replaced", "Running", 1, 1, None),
    ] {
        let shown = w.shown(pod);
        let uid = shown["metadata"]["uid"].as_str().unwrap_or_default();
        let found = w.shown_phase(pod);
        expect(
            found == phase,
            format!("{pod} is {found:?} in the API server"),
        );
        let found = w.running(pod).len();
        expect(found == running, format!("{found} containers of {pod} run"));
        let all = w.starts(pod);
        let found = all.iter().filter(|s| s.uid == uid).count();
        expect(found == starts, format!("{pod} was started {found} times"));
        let container = &shown["status"]["containerStatuses"][0];
        let found = container["state"]["terminated"]["exitCode"].as_i64();
        expect(found == code, format!("exit code of {pod}: {found:?}"));
        let found = container["restartCount"].as_u64().unwrap_or_default();
        let restarts = u64::try_from(starts - 1).unwrap();
        expect(found == restarts, format!("restarts of {pod}: {found}"));
        for start in all.iter().filter(|s| s.uid != uid) {
            let left = w.left_of(pod, &start.uid);
            expect(left.is_empty(), format!("{left:?}"));
        }
    }
    expect(
        w.shown("deleted").is_null(),
        "deleted is still there".into(),
    );
    for start in w.starts("deleted") {
        let left = w.left_of("deleted", &start.uid);
        expect(left.is_empty(), format!("{left:?}"));
    }
    let pods = w.api().list_json("pods", "").len();
    expect(pods == 5, format!("{pods} pods in the API server"));
    for (uid, v) in &w.state().statuses {
        let (version, told) = (v.record.version, v.record.acknowledged);
        expect(version == told, format!("{uid}: {version}, told {told}"));
    }
    wrong
}

fn every(point: impl Fn(usize) -> Crash, step: usize, power: impl Fn(usize) -> bool) -> usize {
    let points = every_point(|count| {
        let n = 1 + (count - 1) * step;
        run(point(n), power(n)).died
    });
    println!("{points} crash points");
    points
}

#[test]
fn without_a_crash_pods_of_the_api_come_and_go_as_wanted() {
    let outcome = run(Crash::Never, false);
    assert!(!outcome.died);
    println!(
        "{} writes, {} calls, {} requests",
        outcome.writes, outcome.calls, outcome.requests
    );
    assert!(outcome.writes > 30 && outcome.calls > 15 && outcome.requests > 10);
}

#[test]
fn a_crash_before_any_call_of_the_runtime_loses_no_pod_of_the_api() {
    let points = every(|n| Crash::Call(n, When::Before), 1, |n| n.is_multiple_of(2));
    assert!(!is_whole() || points > 15);
}

#[test]
fn a_crash_after_any_call_of_the_runtime_loses_no_pod_of_the_api() {
    let points = every(|n| Crash::Call(n, When::After), 1, |n| !n.is_multiple_of(2));
    assert!(!is_whole() || points > 15);
}

#[test]
fn a_loss_of_power_before_any_write_to_the_disk_loses_no_pod_of_the_api() {
    let points = every(|n| Crash::Write(n, When::Before), 1, |_| true);
    assert!(!is_whole() || points > 30);
}

#[test]
fn a_crash_after_a_write_to_the_disk_loses_no_pod_of_the_api() {
    let points = every(|n| Crash::Write(n, When::After), 2, |_| false);
    assert!(!is_whole() || points > 15);
}

#[test]
fn a_crash_before_any_request_loses_no_pod_of_the_api() {
    let points = every(|n| Crash::Request(n, When::Before), 1, |_| true);
    assert!(!is_whole() || points > 10);
}

#[test]
fn a_crash_after_any_request_loses_no_pod_of_the_api() {
    let points = every(
        |n| Crash::Request(n, When::After),
        1,
        |n| n.is_multiple_of(2),
    );
    assert!(!is_whole() || points > 10);
}

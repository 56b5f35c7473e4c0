//! The agent dies at every step it takes.
//!
//! A scenario with a pod of every kind is run once to count its steps: writes to the disk and calls of the
//! runtime that change something. Then it is run again for each of them, and the agent dies there: before
//! the step has its effect, or after it with the answer lost. Half of the deaths lose what was not synced as
//! well. It is started again at once, and in the end everything must be as if nothing had happened.

use std::time::Duration;

use holdfast_testkit::exploration::{every_point, is_whole, stride};
use holdfast_testkit::fake_cri::{Behaviour, Fault};
use tokio::time::Instant;

use crate::node::{Crash, When};
use crate::world::{IMAGE, World, spec};

const OTHER_IMAGE: &str = "holdfast.local/other:1";
/// A run has this long to get everything right.
const PATIENCE: Duration = Duration::from_secs(240);

fn behaviour(pod: &str, attempt: u32) -> Behaviour {
    let exit = |code, after| Behaviour::Exit {
        code,
        after: Duration::from_millis(after),
    };
    match (pod, attempt) {
        ("once-sim", _) => exit(0, 1_500),
        ("failed-sim", _) => exit(2, 1_100),
        ("retry-sim", 0) => exit(1, 900),
        ("retry-sim", _) => exit(0, 700),
        ("loop-sim", _) => exit(3, 1_300),
        _ => Behaviour::RunForever,
    }
}

/// Something that happens to the node, and in which second.
type Happening = (u64, fn(&World));

const TIMELINE: [Happening; 3] = [
    (0, |w| {
        w.manifest("always", &spec("Always", ""));
        w.manifest("once", &spec("Never", ""));
        w.manifest("failed", &spec("Never", ""));
        w.manifest("retry", &spec("OnFailure", ""));
        w.manifest("loop", &spec("Always", ""));
        w.manifest("removed", &spec("Always", ""));
        w.manifest("updated", &spec("Always", ""));
        w.manifest("pulled", &spec("Always", "").replace(IMAGE, OTHER_IMAGE));
    }),
    (3, |w| w.remove_manifest("removed")),
    (5, |w| {
        w.manifest(
            "updated",
            &spec("Always", r#","terminationGracePeriodSeconds":7"#),
        );
    }),
];

/// How a run went.
struct Run {
    writes: usize,
    calls: usize,
    died: bool,
}

/// A run in a tokio runtime of its own: what its lives leave behind goes with it.
fn run(crash: impl Fn(usize) -> Crash, power: bool) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(lives(crash, power))
}

/// One life after the other, each ending where `crash` says for its number.
async fn lives(crash: impl Fn(usize) -> Crash, power: bool) -> Run {
    let mut w = World::new();
    w.behave(behaviour);
    w.fail_once(
        "pull_image",
        Fault::Error(tonic::Code::Unavailable, "registry is away".to_owned()),
    );
    let mut lives = 0;
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
            alive = w.start_until(crash(lives)).await;
            lives += 1;
        }
        if alive {
            alive = w.pass_alive(Duration::from_millis(500)).await;
        }
        if !alive {
            assert!(lives < 500, "{}", w.describe());
            first.get_or_insert_with(|| (w.life.writes(), w.life.calls()));
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
                "{wrong:#?}\n{:?} power lost: {power}\n{}",
                crash(0),
                w.describe()
            );
        }
    }
    // It must stay so.
    w.pass(5).await;
    let mut wrong = wrong_with(&w);
    wrong.extend(w.wrongs());
    assert!(
        wrong.is_empty(),
        "{wrong:#?}\n{:?} power lost: {power}\n{}",
        crash(0),
        w.describe()
    );
    let died = first.is_some();
    let (writes, calls) = first.unwrap_or_else(|| (w.life.writes(), w.life.calls()));
    Run {
        writes,
        calls,
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
    for (pod, running, starts) in [
        ("always", 1, Some(1)),
        ("pulled", 1, Some(1)),
        ("updated", 1, Some(2)),
        ("removed", 0, None),
        ("once", 0, Some(1)),
        ("failed", 0, Some(1)),
        ("retry", 0, Some(2)),
    ] {
        let found = w.running(pod).len();
        expect(found == running, format!("{found} containers of {pod} run"));
        let found = w.starts(pod).len();
        expect(
            starts.is_none_or(|n| n == found),
            format!("{pod} was started {found} times"),
        );
    }
    for (pod, phase) in [
        ("always", "Running"),
        ("pulled", "Running"),
        ("updated", "Running"),
        ("once", "Succeeded"),
        ("failed", "Failed"),
        ("retry", "Succeeded"),
    ] {
        let found = w.phase(pod);
        expect(found == phase, format!("{pod} is {found:?}"));
    }
    let loops = w.starts("loop");
    expect(loops.len() >= 3, format!("loop started {}", loops.len()));
    for (n, start) in loops.iter().enumerate() {
        expect(
            usize::try_from(start.attempt).unwrap() == n,
            format!("start {n} of loop has attempt {}", start.attempt),
        );
    }
    if let [_, second, third, ..] = loops.as_slice() {
        let pause = third.at - second.at;
        expect(
            pause >= Duration::from_secs(11),
            format!("loop was started again after {pause:?}"),
        );
    }
    let newest = w.starts("updated").last().map(|s| s.uid.clone());
    for start in w.starts("removed").iter().chain(&w.starts("updated")) {
        if newest.as_ref() != Some(&start.uid) {
            let left = w.left_of(&start.pod, &start.uid);
            expect(left.is_empty(), format!("{left:?}"));
        }
    }
    let sandboxes = w.fake.sandboxes();
    let live = sandboxes
        .iter()
        .filter(|s| s.state() == holdfast::kuberuntime::cri::v1::PodSandboxState::SandboxReady)
        .count();
    expect(live == 4, format!("{live} sandboxes are ready"));
    wrong
}

/// Each of the points, or one of `step`, until a run is over before it comes to it. `power`: whether the
/// death of number n takes along what was not synced.
fn every(point: impl Fn(usize) -> Crash, step: usize, power: impl Fn(usize) -> bool) -> usize {
    let points = every_point(|count| {
        let n = 1 + (count - 1) * step;
        let crash = point(n);
        let at = |life| if life == 0 { crash } else { Crash::Never };
        run(at, power(n)).died
    });
    println!("{points} crash points");
    points
}

#[test]
fn without_a_crash_everything_comes_to_be_as_wanted() {
    let outcome = run(|_| Crash::Never, false);
    assert!(!outcome.died);
    println!("{} writes, {} calls", outcome.writes, outcome.calls);
    assert!(outcome.writes > 50 && outcome.calls > 20);
}

// Invariant CORE-1.
#[test]
fn a_crash_before_any_call_of_the_runtime_changes_nothing() {
    let points = every(|n| Crash::Call(n, When::Before), 1, |n| n.is_multiple_of(2));
    assert!(!is_whole() || points > 40);
}

// Invariant CORE-1.
#[test]
fn a_crash_after_any_call_of_the_runtime_changes_nothing() {
    let points = every(|n| Crash::Call(n, When::After), 1, |n| !n.is_multiple_of(2));
    assert!(!is_whole() || points > 40);
}

#[test]
fn a_loss_of_power_before_any_write_to_the_disk_changes_nothing() {
    let points = every(|n| Crash::Write(n, When::Before), 1, |_| true);
    assert!(!is_whole() || points > 70);
}

/// A death between a write and the next step is much like one before the next step: some stand for all.
#[test]
fn a_crash_after_a_write_to_the_disk_changes_nothing() {
    let points = every(|n| Crash::Write(n, When::After), 3, |_| false);
    assert!(!is_whole() || points > 20);
}

/// It gets one thing done in each life.
#[test]
fn an_agent_that_dies_after_each_call_still_gets_everything_done() {
    for n in 1..=3 {
        let outcome = run(
            |life| {
                if life < 120 {
                    Crash::Call(n, When::After)
                } else {
                    Crash::Never
                }
            },
            n % 2 == 0,
        );
        assert!(outcome.died);
    }
}

/// It dies again while it is coming back.
#[test]
fn a_crash_while_coming_back_from_a_crash_changes_nothing() {
    let mut points = 0;
    for n in (1..40).step_by(6 * stride()) {
        for again in 1..=4 {
            let outcome = run(
                |life| match life {
                    0 => Crash::Call(n, When::After),
                    1 => Crash::Write(again, When::Before),
                    2 => Crash::Write(again, When::After),
                    3 => Crash::Call(again, When::Before),
                    _ => Crash::Never,
                },
                again % 2 == 0,
            );
            points += usize::from(outcome.died);
        }
    }
    println!("{points} crash points");
    assert!(!is_whole() || points > 20);
}

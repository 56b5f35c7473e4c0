//! The agent dies at every step while a pod with init containers, a sidecar and probes comes up, loses containers and
//! recovers: in the end everything is as in a run without a death, and every container has run as often.

use std::time::Duration;

use holdfast::kuberuntime::cri::v1::PodSandboxState;
use holdfast_testkit::exploration::{every_point, is_whole};
use holdfast_testkit::fake_cri::{Behaviour, Restart};
use serde_json::Value;
use tokio::time::Instant;

use crate::node::{Crash, When};
use crate::rich::*;
use crate::rows_ends::alone;
use crate::world::World;

/// Three init containers, a sidecar after the first of them, a main container.
fn staged() -> Value {
    let mut spec = rich("Always");
    let init = spec["initContainers"].as_array_mut().unwrap();
    init.push(plain("i3"));
    spec
}

/// The third init container fails once; the sidecar dies 15 s after its start and the main container after 20 s, each
/// once.
fn behaviour(container: &str, attempt: u32) -> Behaviour {
    let exit = |code, seconds| Behaviour::Exit {
        code,
        after: Duration::from_secs(seconds),
    };
    match (container, attempt) {
        ("i3", 0) => exit(9, 1),
        ("side", 0) => exit(5, 15),
        ("main", 0) => exit(7, 20),
        _ => usual(container),
    }
}

const END: [&str; 6] = [
    UP[0],
    UP[1],
    "side running x1 ready started, before: ended 5 Error",
    UP[3],
    "i3 ended 0 Completed x1 ready, before: ended 9 Error",
    "main running x1 ready started, before: ended 7 Error",
];

/// Calls of a run without a death: a sandbox, eight starts of five containers, and the failed `i3` is removed once the
/// other one has succeeded.
const CALLS: usize = 18;

/// What a life of the first agent did.
struct Life {
    died: bool,
    writes: usize,
    calls: usize,
    requests: usize,
}

/// One pod of the node's own, or of a cluster; the first agent dies at `crash`, the others live.
async fn live(api: bool, crash: Crash, power: bool) -> Life {
    let (mut w, answers) = usual_world(api);
    w.behave_each(|_, container, attempt| behaviour(container, attempt));
    if api {
        w.create("staged", &staged().to_string());
    } else {
        w.manifest("staged", &staged().to_string());
    }
    let mut life = None;
    let mut ready_since = None;
    let mut alive = w.start_until(crash).await;
    let shows = |w: &World| {
        if api {
            w.shown_summary("staged")
        } else {
            w.summary("staged")
        }
    };
    loop {
        if alive {
            alive = w.pass_alive(Duration::from_millis(250)).await;
        }
        if !alive {
            life = Some((w.life.writes(), w.life.calls(), w.life.requests()));
            if power {
                w.lose_power().await;
            } else {
                w.crash().await;
            }
            alive = w.start_until(Crash::Never).await;
            continue;
        }
        let elapsed = w.began.elapsed();
        let at_end = shows(&w) == END;
        // It must stay so.
        let since = if at_end {
            *ready_since.get_or_insert_with(Instant::now)
        } else {
            ready_since = None;
            Instant::now()
        };
        if since.elapsed() > Duration::from_secs(15) {
            break;
        }
        assert!(
            elapsed < Duration::from_secs(240),
            "{crash:?} power lost: {power}\n{:#?}\n{}",
            shows(&w),
            w.describe()
        );
    }
    let context = || format!("{crash:?} power lost: {power}\n{}", w.describe());
    assert_eq!(w.wrongs(), Vec::<String>::new(), "{}", context());
    let times = |name: &str| w.starts_of("staged", name).len();
    let ran = ["i1", "side", "i2", "i3", "main"].map(times);
    assert_eq!(ran, [1, 2, 1, 2, 2], "{}", context());
    let order = w.started("staged");
    let first = |name: &str| order.iter().position(|s| s == name).unwrap();
    let firsts = ["i1", "side", "i2", "i3", "main"].map(first);
    assert!(firsts.is_sorted(), "{order:?} {}", context());
    let last_init = order.iter().rposition(|s| s == "i3").unwrap();
    assert!(last_init < first("main"), "{order:?} {}", context());
    assert_eq!(w.fake.sandboxes().len(), 1, "{}", context());
    // A second sidecar and a second main container, each with a startup of its own; a death may repeat a probe that
    // nobody heard of.
    let extra = usize::from(life.is_some());
    for name in ["side-up", "main-up"] {
        let runs = answers.count(&format!("staged/{name}"));
        assert!(
            (2..=2 + extra).contains(&runs),
            "{name} {runs} {}",
            context()
        );
    }
    let died = life.is_some();
    let (writes, calls, requests) =
        life.unwrap_or_else(|| (w.life.writes(), w.life.calls(), w.life.requests()));
    Life {
        died,
        writes,
        calls,
        requests,
    }
}

#[test]
fn without_a_death_a_pod_with_a_sidecar_comes_to_its_end_state() {
    for api in [false, true] {
        let life = alone(live(api, Crash::Never, false));
        println!(
            "{} writes, {} calls, {} requests",
            life.writes, life.calls, life.requests
        );
        assert!(!life.died);
        assert_eq!(life.calls, CALLS);
    }
}

/// One of `step` points, beginning with `first`, until a run is over before it.
fn every(api: bool, first: usize, step: usize, point: impl Fn(usize) -> Crash) -> usize {
    let points = every_point(|count| {
        let n = first + (count - 1) * step;
        alone(live(api, point(n), count % 2 == 0)).died
    });
    println!("{points} points");
    points
}

/// R12, R1.
#[test]
fn restart_keeps_a_pod_with_a_sidecar_in_order_whichever_call_the_agent_dies_before() {
    let points = every(false, 1, 1, |n| Crash::Call(n, When::Before));
    assert!(!is_whole() || points == CALLS, "{points}");
}

/// R12, R1.
#[test]
fn restart_keeps_a_pod_with_a_sidecar_in_order_whichever_call_the_agent_dies_after() {
    let points = every(false, 1, 1, |n| Crash::Call(n, When::After));
    assert!(!is_whole() || points == CALLS, "{points}");
}

/// R12, R1.
#[test]
fn restart_keeps_a_pod_with_a_sidecar_in_order_whichever_write_the_agent_dies_before() {
    let points = every(false, 1, 1, |n| Crash::Write(n, When::Before));
    assert!(!is_whole() || points > 30, "{points}");
}

/// R12, R1.
#[test]
fn restart_keeps_a_pod_with_a_sidecar_in_order_whichever_write_the_agent_dies_after() {
    let points = every(false, 1, 1, |n| Crash::Write(n, When::After));
    assert!(!is_whole() || points > 30, "{points}");
}

/// R12, R1.
#[test]
fn restart_keeps_a_pod_with_a_sidecar_as_the_api_has_it_whichever_request_the_agent_dies_at() {
    let before = every(true, 1, 1, |n| Crash::Request(n, When::Before));
    let after = every(true, 1, 1, |n| Crash::Request(n, When::After));
    assert!(!is_whole() || before >= 5 && after >= 5, "{before} {after}");
}

/// What has happened to a pod while the agent was away.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// The runtime has forgotten everything.
    Wiped,
    /// The sandbox has died, and with it what was in it.
    Sandbox,
}

/// A pod that was up is brought back by an agent that dies at `crash`, and by the next one. Returns whether it died.
async fn recover(loss: Loss, crash: Crash, power: bool) -> bool {
    let (mut w, _) = usual_world(false);
    w.manifest("web", &rich("Always").to_string());
    w.start().await;
    w.up("web").await;
    w.pass(3).await;
    w.crash().await;
    match loss {
        Loss::Wiped => w.fake.restart(Restart::Wipe).unwrap(),
        Loss::Sandbox => {
            let sandbox = w.fake.sandboxes()[0].id.clone();
            assert!(w.fake.kill_sandbox(&sandbox));
        }
    }
    let ended = match loss {
        Loss::Wiped => "137 ContainerStatusUnknown",
        Loss::Sandbox => "137 Error",
    };
    let side = format!("side running x1 ready started, before: ended {ended}");
    let main = format!("main running x1 ready started, before: ended {ended}");
    let want = [
        UP[0],
        "i1 ended 0 Completed x1 ready, before: ended 0 Completed",
        &side,
        "i2 ended 0 Completed x1 ready, before: ended 0 Completed",
        &main,
    ];
    let mut alive = w.start_until(crash).await;
    let mut died = false;
    let begun = Instant::now();
    while !(alive && w.summary("web") == want) {
        if alive {
            alive = w.pass_alive(Duration::from_millis(250)).await;
        } else {
            assert!(!died, "{crash:?}: once only");
            died = true;
            if power {
                w.lose_power().await;
            } else {
                w.crash().await;
            }
            alive = w.start_until(Crash::Never).await;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "{loss:?} {crash:?} power lost: {power}\n{:#?}\n{}",
            w.summary("web"),
            w.describe()
        );
    }
    w.pass(20).await;
    let context = || format!("{loss:?} {crash:?} power lost: {power}\n{}", w.describe());
    assert_eq!(w.summary("web"), want, "{}", context());
    let names = ["i1", "side", "i2", "main"];
    assert_eq!(w.started("web"), [names, names].concat(), "{}", context());
    assert_eq!(w.wrongs(), Vec::<String>::new(), "{}", context());
    let mut ready = w.fake.sandboxes();
    ready.retain(|s| s.state() == PodSandboxState::SandboxReady);
    assert_eq!(ready.len(), 1, "{}", context());
    died
}

/// Cuts the recovery off at every step. Returns how many there were.
fn every_recovery(loss: Loss) -> usize {
    let mut points = 0;
    for point in [Crash::Call, Crash::Write] {
        for when in [When::Before, When::After] {
            points += every_point(|n| alone(recover(loss, point(n, when), n % 2 == 1)));
        }
    }
    println!("{loss:?}: {points} points");
    points
}

/// R11, R12: init containers run once more, in order, and every count goes on by one, wherever the agent dies while it
/// brings a pod back that the runtime has forgotten.
#[test]
fn restart_keeps_counts_and_order_wherever_the_recovery_of_a_wiped_pod_is_cut_off() {
    let points = every_recovery(Loss::Wiped);
    assert!(!is_whole() || points >= 50, "{points}");
}

/// R11, R12: the same of a pod whose sandbox has died.
#[test]
fn restart_keeps_counts_and_order_wherever_the_recovery_of_a_dead_sandbox_is_cut_off() {
    let points = every_recovery(Loss::Sandbox);
    assert!(!is_whole() || points >= 50, "{points}");
}

//! Restarts of all containers of a pod, which the exit of one asks for: once, in order, wherever the agent dies.

use std::time::Duration;

use holdfast_testkit::exploration::stride;
use holdfast_testkit::fake_cri::Behaviour;
use serde_json::{Value, json};

use crate::cluster::tells_status;
use crate::node::{Crash, When};
use crate::restart::assert_nothing_wrong;
use crate::world::{IMAGE, World};

const POD: &str = "gang";
/// The exit code that `b` restarts all containers with.
const CODE: i32 = 88;

/// Init container `i`, sidecar `side`, main containers `a`, which has a hook, and `b`, whose exit restarts all. Nothing else
/// would run twice.
fn gang() -> String {
    let container = |name: &str| json!({"name": name, "image": IMAGE, "command": ["sh"]});
    let (i, mut side, mut a, mut b) = (
        container("i"),
        container("side"),
        container("a"),
        container("b"),
    );
    side["restartPolicy"] = "Always".into();
    a["lifecycle"] = json!({"preStop": {"exec": {"command": ["preStop"]}}});
    b["restartPolicy"] = "Never".into();
    b["restartPolicyRules"] = json!([
        {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [CODE]}},
    ]);
    json!({
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 60,
        "initContainers": [i, side], "containers": [a, b],
    })
    .to_string()
}

/// The first run of `b` ends with the code, the others run on. The first run of `a` has to be killed.
fn once(container: &str, attempt: u32) -> Behaviour {
    match (container, attempt) {
        ("i", _) => Behaviour::Exit {
            code: 0,
            after: Duration::from_secs(1),
        },
        ("b", 0) => Behaviour::Exit {
            code: CODE,
            after: Duration::from_secs(5),
        },
        ("a", 0) => Behaviour::IgnoreTerm,
        _ => Behaviour::RunForever,
    }
}

const TWICE: [&str; 8] = ["i", "side", "a", "b", "i", "side", "a", "b"];

/// How a life ends where it has to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    /// What was not synced is lost.
    WithoutPower,
}

/// The pod runs, restarts, and runs on; the agent dies where `crash` says, and is started again. Returns how many calls and
/// writes the first life made.
async fn restarts_once(crash: Crash, end: End) -> (usize, usize) {
    let mut w = World::new();
    w.behave_each(|_, container, attempt| once(container, attempt));
    w.manifest(POD, &gang());
    let mut first = None;
    let mut until = Duration::from_secs(40);
    loop {
        let life = if first.is_none() { crash } else { Crash::Never };
        let mut alive = w.start_until(life).await;
        while alive && w.began.elapsed() < until {
            alive = w.pass_alive(Duration::from_millis(500)).await;
        }
        let made = (w.life.calls(), w.life.writes());
        first.get_or_insert(made);
        if alive {
            break;
        }
        until = until.max(w.began.elapsed() + Duration::from_secs(30));
        match end {
            End::Killed => w.crash().await,
            End::WithoutPower => w.lose_power().await,
        }
    }
    let what = format!("{crash:?} {end:?}\n{}", w.describe());
    assert_eq!(w.started(POD), TWICE, "{what}");
    assert_eq!(w.running(POD).len(), 3, "{what}");
    assert_eq!(w.fake.sandboxes().len(), 1, "{what}");
    assert_eq!(w.fake.count("exec_sync"), 0, "no hook runs: {what}");
    for container in ["i", "side", "a", "b"] {
        let record = w.container_of(POD, container);
        assert_eq!(record.restart_count, 1, "{container}: {what}");
    }
    assert_eq!(w.phase(POD), "Running", "{what}");
    assert_eq!(w.wrongs(), Vec::<String>::new(), "{what}");
    first.unwrap_or_default()
}

fn alone(crash: Crash, end: End) -> (usize, usize) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(restarts_once(crash, end))
}

#[test]
fn all_containers_restart_once_and_in_order_wherever_the_agent_calls_the_runtime_when_it_dies() {
    let (calls, _) = alone(Crash::Never, End::Killed);
    assert!(calls >= 19, "{calls} calls");
    for call in (1..=calls).step_by(stride()) {
        for when in [When::Before, When::After] {
            alone(Crash::Call(call, when), End::Killed);
        }
    }
}

#[test]
fn all_containers_restart_once_and_in_order_wherever_the_agent_writes_when_it_dies() {
    let (_, writes) = alone(Crash::Never, End::Killed);
    assert!(writes >= 12, "{writes} writes");
    for write in (1..=writes).step_by(stride()) {
        for when in [When::Before, When::After] {
            alone(Crash::Write(write, when), End::Killed);
        }
    }
}

#[test]
fn all_containers_restart_once_and_in_order_whatever_was_not_synced() {
    let (_, writes) = alone(Crash::Never, End::WithoutPower);
    for write in (1..=writes).step_by(stride()) {
        alone(Crash::Write(write, When::Before), End::WithoutPower);
    }
}

#[tokio::test(start_paused = true)]
async fn containers_are_killed_for_a_restart_of_all_without_their_grace_and_the_pod_says_so() {
    let mut w = World::with_api();
    w.behave_each(|_, container, attempt| once(container, attempt));
    w.start().await;
    w.joined().await;
    w.create(POD, &gang());
    w.until("all run", 60, |w| w.running(POD).len() == 3).await;
    w.until("all run again", 20, |w| {
        w.started(POD) == TWICE && w.running(POD).len() == 3
    })
    .await;
    w.pass(5).await;
    let told: Vec<String> = (w.api().requests().iter())
        .filter(|request| tells_status(request))
        .map(|request| request.body.to_string())
        .collect();
    let says = |reason: &str| told.iter().any(|body| body.contains(reason));
    assert!(says("RestartAllContainersStarted"), "{told:#?}");
    assert!(says("RestartingAllContainers"), "{told:#?}");
    let shown = w.shown(POD);
    let status = &shown["status"];
    let condition = |name: &str| -> Value {
        let all = status["conditions"].as_array().into_iter().flatten();
        let mut found = all.filter(|c| c["type"] == name);
        found.next().map_or(Value::Null, |c| c["status"].clone())
    };
    assert_eq!(condition("AllContainersRestarting"), "False", "{status}");
    assert_eq!(condition("Initialized"), "True", "{status}");
    let b = &status["containerStatuses"][1];
    assert_eq!(b["restartCount"], 1, "{status}");
    assert_eq!(b["lastState"]["terminated"]["exitCode"], CODE, "{status}");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn the_back_off_of_the_container_that_restarts_all_holds_back_all_across_a_restart_of_the_agent()
 {
    let mut w = World::new();
    w.behave_each(|_, container, attempt| match container {
        "b" => Behaviour::Exit {
            code: CODE,
            after: Duration::from_secs(1),
        },
        other => once(other, attempt),
    });
    w.manifest(POD, &gang());
    w.start().await;
    w.until("it runs a second time and is stopped", 60, |w| {
        w.starts_of(POD, "b").len() == 2 && w.running(POD).is_empty()
    })
    .await;
    w.pass(3).await;
    assert_eq!(w.waiting(POD), "RestartingAllContainersCrashLoopBackOff");
    w.restart().await;
    w.until("it runs a third time", 60, |w| {
        w.starts_of(POD, "i").len() == 3
    })
    .await;
    let ended = w.starts_of(POD, "b")[1].at + Duration::from_secs(1);
    let waited = (w.starts_of(POD, "i")[2].at - ended).as_secs();
    assert!((10..=13).contains(&waited), "after {waited} s");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_deleted_while_all_its_containers_restart_is_stopped() {
    let mut w = World::new();
    w.behave_each(|_, container, attempt| once(container, attempt));
    w.manifest(POD, &gang());
    w.start().await;
    w.until("its containers are stopped", 60, |w| {
        w.starts_of(POD, "b").len() == 1 && w.running(POD).len() < 3
    })
    .await;
    let uid = w.uid(POD).to_string();
    w.remove_manifest(POD);
    w.until("nothing of it is left", 120, |w| {
        w.left_of(POD, &uid).is_empty()
    })
    .await;
    assert_eq!(w.starts_of(POD, "b").len(), 1);
    let key = format!("restarts/{uid}/all");
    assert!(!w.state().objects.contains_key(key.as_str()));
    assert_nothing_wrong(&w);
}

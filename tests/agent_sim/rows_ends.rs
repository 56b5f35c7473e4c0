//! How pods with init containers, a sidecar and probes end when the agent is restarted meanwhile: by themselves,
//! evicted, deleted.

use std::time::Duration;

use holdfast::core::state::WorkerPhase;
use holdfast_testkit::exploration::{every_point, is_whole};
use holdfast_testkit::fake_cri::{Behaviour, Restart};
use k8s_openapi::api::core::v1::PodStatus;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::node::{Crash, When};
use crate::restart::{assert_nothing_wrong, evict};
use crate::rich::*;
use crate::world::World;

/// A run in a tokio runtime of its own: what its lives leave behind goes with it.
pub fn alone<T>(run: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(run)
}

/// Every point of a life, before and after: writes, or calls of the runtime.
fn points(n: usize) -> [Crash; 4] {
    [
        Crash::Write(n, When::Before),
        Crash::Write(n, When::After),
        Crash::Call(n, When::Before),
        Crash::Call(n, When::After),
    ]
}

/// Runs `run` for the first, second, … point of each kind until it says that its life did not come to it. Returns
/// how many points there were.
fn at_every_point(run: impl AsyncFn(Crash) -> bool) -> usize {
    let mut count = 0;
    for kind in 0..4 {
        count += every_point(|n| alone(run(points(n)[kind])));
    }
    println!("{count} points");
    count
}

/// Removes from the runtime what does not run.
fn remove_ended(w: &World, pod: &str) {
    let running = w.running(pod);
    for container in w.of_pod(pod) {
        if !running.contains(&container.id) {
            w.fake.remove(&container.id);
        }
    }
}

// ------------------------------------------------------------------------------------------------ R5

const SUCCEEDED: [&str; 5] = [
    "Succeeded Initialized",
    UP[1],
    "side ended 0 Completed x0",
    UP[3],
    "main ended 0 Completed x0",
];
const LOST: [&str; 5] = [
    "Failed Initialized",
    UP[1],
    "side ended 0 Completed x0",
    UP[3],
    "main ended 137 ContainerStatusUnknown x0",
];

/// A pod that runs once is up, its main container ends while the agent is away, and the next agent dies at
/// `crash`; the containers that have ended are gone when the third one looks.
async fn job(crash: Crash) -> (bool, bool) {
    let (mut w, _) = usual_world(false);
    w.manifest("job", &rich("Never").to_string());
    w.start().await;
    w.up("job").await;
    w.pass(3).await;
    w.crash().await;
    w.fake.exit(&w.id("job", "main"), 0);
    let mut alive = w.start_until(crash).await;
    if alive {
        alive = w.pass_alive(Duration::from_secs(100)).await;
    }
    w.crash().await;
    let exit = w.container_of("job", "main").last_exit;
    let recorded = exit.is_some_and(|e| !e.inferred);
    // The sidecar was stopped, and nobody knows with what it ended.
    let side_lost =
        !w.is_running("job", "side") && w.container_of("job", "side").last_exit.is_none();
    remove_ended(&w, "job");
    w.start().await;
    w.until("it is finished", 60, |w| {
        matches!(w.worker("job").phase, WorkerPhase::Finished { .. })
    })
    .await;
    let mut want = if recorded { SUCCEEDED } else { LOST };
    if side_lost {
        want[2] = "side ended 137 ContainerStatusUnknown x0";
    }
    assert_eq!(w.summary("job"), want, "{crash:?}\n{}", w.describe());
    w.pass(100).await;
    assert_eq!(w.summary("job"), want, "{crash:?}\n{}", w.describe());
    assert_eq!(w.started("job"), ["i1", "side", "i2", "main"], "{crash:?}");
    assert_eq!(w.running("job"), Vec::<String>::new(), "{crash:?}");
    assert_nothing_wrong(&w);
    (!alive, recorded)
}

/// R5: whether the end was recorded or not, nothing of the pod runs again, its sidecar ends, and what is told is what
/// could be known.
#[test]
fn restart_keeps_a_pod_that_runs_once_from_running_again_wherever_its_end_is_cut_off() {
    let outcomes = std::cell::RefCell::new([0, 0]);
    at_every_point(async |crash| {
        let (died, recorded) = job(crash).await;
        outcomes.borrow_mut()[usize::from(recorded)] += 1;
        died
    });
    let [lost, recorded] = outcomes.into_inner();
    println!("{lost} ends were lost, {recorded} recorded");
    assert!(
        !is_whole() || lost >= 2 && recorded >= 10,
        "{lost} {recorded}"
    );
}

/// R5: the runtime has forgotten the pod with its sandbox, and nobody has seen how it ended.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_pod_that_runs_once_from_running_again_when_all_of_it_has_vanished() {
    let (mut w, _) = usual_world(false);
    w.manifest("job", &rich("Never").to_string());
    w.start().await;
    w.up("job").await;
    w.crash().await;
    w.fake.restart(Restart::Wipe).unwrap();
    w.start().await;
    let want = [
        "Failed Initialized",
        UP[1],
        "side ended 137 ContainerStatusUnknown x0",
        UP[3],
        "main ended 137 ContainerStatusUnknown x0",
    ];
    w.until("it has failed", 60, |w| w.summary("job") == want)
        .await;
    for _ in 0..2 {
        w.pass(100).await;
        assert_eq!(w.summary("job"), want);
        w.restart().await;
    }
    assert_eq!(w.started("job").len(), 4, "{}", w.describe());
    assert_eq!(w.fake.sandboxes().len(), 0);
    assert_nothing_wrong(&w);
}

/// R5: an init container of a pod that runs once has ended unseen; the pod has failed, and nothing after it starts.
#[tokio::test(start_paused = true)]
async fn restart_keeps_an_init_container_that_vanished_unseen_from_running_again() {
    let (mut w, _) = usual_world(false);
    w.behave_each(|_, container, _| match container {
        "i2" => Behaviour::RunForever,
        other => usual(other),
    });
    w.manifest("job", &rich("Never").to_string());
    w.start().await;
    w.until("i2 runs", 60, |w| w.is_running("job", "i2")).await;
    w.pass(2).await;
    w.crash().await;
    let id = w.id("job", "i2");
    w.fake.exit(&id, 0);
    w.fake.remove(&id);
    w.start().await;
    w.until("it is finished", 60, |w| {
        matches!(w.worker("job").phase, WorkerPhase::Finished { .. })
    })
    .await;
    w.pass(100).await;
    w.assert_summary(
        "job",
        &[
            "Failed",
            UP[1],
            "side ended 0 Completed x0",
            "i2 ended 137 ContainerStatusUnknown x0",
            "main waits PodInitializing x0",
        ],
    );
    assert_eq!(w.started("job"), ["i1", "side", "i2"]);
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------------------ R6

/// R6: an eviction and an exit code, the ends of init containers and sidecars, arrive at the API server although it
/// was away and the runtime has forgotten the containers.
#[tokio::test(start_paused = true)]
async fn restart_keeps_all_ends_of_pods_with_sidecars_for_the_api() {
    for (api_first, events) in [(true, true), (true, false), (false, false)] {
        let (mut w, _) = usual_world(true);
        w.fake.offer_events(events);
        w.start().await;
        w.create("victim", &rich("Always").to_string());
        w.create("job", &rich("Never").to_string());
        w.until("both are up", 60, |w| {
            w.shown_summary("victim") == UP && w.shown_summary("job") == UP
        })
        .await;
        w.set_api(false);
        evict(&w, "victim");
        w.fake.exit(&w.id("job", "main"), 3);
        w.until("both ends are on record", 30, |w| {
            w.phase("victim") == "Failed" && w.phase("job") == "Failed"
        })
        .await;
        assert_eq!(w.shown_summary("victim"), UP, "it knows nothing yet");
        w.crash().await;
        w.fake.restart(Restart::Wipe).unwrap();
        if api_first {
            w.set_api(true);
        }
        w.start().await;
        w.pass(30).await;
        w.set_api(true);
        let evicted = [
            "Failed Evicted Initialized",
            UP[1],
            "side ended 0 Completed x0",
            UP[3],
            "main ended 0 Completed x0",
        ];
        let failed = [
            "Failed Initialized",
            UP[1],
            "side ended 0 Completed x0",
            UP[3],
            "main ended 3 Error x0",
        ];
        w.until("the API server knows", 60, |w| {
            w.shown_phase("victim") == "Failed" && w.shown_phase("job") == "Failed"
        })
        .await;
        for _ in 0..2 {
            assert_eq!(w.shown_summary("victim"), evicted, "{}", w.describe());
            assert_eq!(w.shown_summary("job"), failed, "{}", w.describe());
            w.pass(120).await;
        }
        let status: PodStatus =
            serde_json::from_value(w.shown("victim")["status"].clone()).unwrap();
        let text = status.message.unwrap();
        assert_eq!(text, "The node was low on resource: memory.");
        assert_eq!(w.starts("job").len(), 4);
        assert_eq!(w.starts("victim").len(), 4);
        assert_nothing_wrong(&w);
    }
}

// ----------------------------------------------------------------------------------------------- R10

/// A pod whose containers do not heed the stop signal, with preStop hooks on the main container and the sidecar.
fn stubborn(grace: u64) -> Value {
    let mut spec = rich("Always");
    spec["terminationGracePeriodSeconds"] = grace.into();
    for name in ["side", "main"] {
        let command = format!("{name}-stop");
        member(&mut spec, name)["lifecycle"] = json!({"preStop": {"exec": {"command": [command]}}});
    }
    spec
}

fn stubborn_world() -> (World, Answers) {
    let (w, answers) = usual_world(false);
    w.behave_each(|_, container, _| {
        if is_init(container) {
            usual(container)
        } else {
            Behaviour::IgnoreTerm
        }
    });
    answers.take("slow/main-stop", 5);
    answers.take("slow/side-stop", 7);
    (w, answers)
}

/// Stopping was decided; when.
async fn terminating(w: &World, pod: &str) -> Instant {
    w.until("it is being stopped", 10, |w| {
        matches!(w.worker(pod).phase, WorkerPhase::Terminating { .. })
    })
    .await;
    Instant::now()
}

/// R10: half of the grace period is gone and both hooks have run; after the restart neither runs again, the main
/// container is killed when its grace is over and the sidecar after it, as without the restart.
#[tokio::test(start_paused = true)]
async fn restart_keeps_the_grace_the_hooks_and_the_order_of_a_pod_with_a_sidecar() {
    for restart in [None, Some(30), Some(57)] {
        let (mut w, answers) = stubborn_world();
        w.manifest("slow", &stubborn(60).to_string());
        w.start().await;
        w.up("slow").await;
        let uid = w.uid("slow").to_string();
        w.pass(5).await;
        answers.clear();
        w.remove_manifest("slow");
        let asked = terminating(&w, "slow").await;
        if let Some(after) = restart {
            w.pass(after).await;
            w.restart().await;
        }
        w.until("main is killed", 70, |w| !w.is_running("slow", "main"))
            .await;
        let main = asked.elapsed().as_secs_f64();
        assert!(w.is_running("slow", "side"), "the sidecar goes last");
        w.until("the sidecar is killed", 10, |w| {
            w.running("slow").is_empty()
        })
        .await;
        let side = asked.elapsed().as_secs_f64();
        // StopContainer takes whole seconds, at least two.
        assert!((59.0..=61.5).contains(&main), "{restart:?}: {main} s");
        assert!((61.0..=64.0).contains(&side), "{restart:?}: {side} s");
        assert_eq!(answers.count("slow/main-stop"), 1, "{restart:?}");
        assert_eq!(answers.count("slow/side-stop"), 1, "{restart:?}");
        assert_eq!(answers.count("slow/side-alive"), 0, "{restart:?}");
        w.until("nothing is left", 30, |w| {
            w.left_of("slow", &uid).is_empty()
        })
        .await;
        assert_eq!(w.started("slow").len(), 4);
        assert_nothing_wrong(&w);
    }
}

/// R10: the sidecar's hook was cut off and runs again within what is left; the main container's has completed.
#[tokio::test(start_paused = true)]
async fn restart_keeps_the_rest_of_the_grace_for_the_hook_of_a_sidecar_that_was_cut_off() {
    let (mut w, answers) = stubborn_world();
    answers.take("slow/side-stop", 3_600);
    w.manifest("slow", &stubborn(20).to_string());
    w.start().await;
    w.up("slow").await;
    w.pass(5).await;
    w.remove_manifest("slow");
    let asked = terminating(&w, "slow").await;
    w.pass(10).await;
    assert_eq!(answers.count("slow/side-stop"), 1);
    w.restart().await;
    w.until("it runs again", 5, |_| answers.count("slow/side-stop") == 2)
        .await;
    w.until("all is killed", 20, |w| w.running("slow").is_empty())
        .await;
    let took = asked.elapsed().as_secs_f64();
    assert!((20.0..=24.5).contains(&took), "{took} s");
    assert_eq!(answers.count("slow/main-stop"), 1);
    assert_nothing_wrong(&w);
}

/// The pod is removed while the agent is away, and the next one dies at `crash`. Returns whether it did.
async fn removed(crash: Crash) -> bool {
    let (mut w, answers) = stubborn_world();
    w.manifest("slow", &stubborn(30).to_string());
    w.start().await;
    w.up("slow").await;
    let uid = w.uid("slow").to_string();
    w.crash().await;
    w.remove_manifest("slow");
    answers.clear();
    let asked = Instant::now();
    let mut alive = w.start_until(crash).await;
    let mut died = false;
    let mut done = 0;
    let mut main = None;
    while !w.left_of("slow", &uid).is_empty() {
        if alive {
            alive = w.pass_alive(Duration::from_millis(200)).await;
        }
        if main.is_none() && !w.is_running("slow", "main") {
            main = Some(asked.elapsed().as_secs_f64());
        }
        if !alive {
            assert!(!died, "{crash:?}: once only");
            died = true;
            w.crash().await;
            if w.has_record("slow") {
                done = w.container_of("slow", "main").hooks_done.len();
            }
            alive = w.start_until(Crash::Never).await;
        }
        let late = asked.elapsed() > Duration::from_secs(90);
        assert!(!late, "{crash:?}\n{}", w.describe());
    }
    let main = main.unwrap();
    assert!((29.0..=32.5).contains(&main), "{crash:?}: {main} s");
    let hooks = answers.count("slow/main-stop");
    if done > 0 {
        assert_eq!(hooks, 1, "{crash:?}: it had completed");
    }
    assert!((1..=2).contains(&hooks), "{crash:?}: {hooks}");
    let hooks = answers.count("slow/side-stop");
    assert!((1..=2).contains(&hooks), "{crash:?}: {hooks}");
    assert_eq!(w.started("slow").len(), 4, "{crash:?}");
    assert_nothing_wrong(&w);
    died
}

/// R10: wherever the agent dies while it stops a pod, the grace period is over when it would have been, and nothing
/// is left of the pod.
#[test]
fn restart_keeps_the_grace_of_a_pod_wherever_its_stop_is_cut_off() {
    let points = at_every_point(removed);
    assert!(!is_whole() || points >= 20, "{points}");
}

// ----------------------------------------------------------------------------------------------- R20

const EVICTED: [&str; 5] = [
    "Failed Evicted Initialized",
    UP[1],
    "side ended 137 Error x0",
    UP[3],
    "main ended 137 Error x0",
];

/// A static pod is evicted by an agent that dies at `crash`. Returns whether it did.
async fn evicted(crash: Crash) -> bool {
    let (mut w, _) = stubborn_world();
    w.manifest("slow", &stubborn(60).to_string());
    w.start().await;
    w.up("slow").await;
    w.crash().await;
    let mut alive = w.start_until(crash).await;
    let mut died = false;
    let begun = Instant::now();
    loop {
        if !alive {
            assert!(!died, "{crash:?}: once only");
            died = true;
            w.crash().await;
            alive = w.start_until(Crash::Never).await;
            continue;
        }
        match w.worker("slow").phase {
            // What was not decided before the death is decided after it.
            WorkerPhase::Sync => evict(&w, "slow"),
            WorkerPhase::Finished { .. } => break,
            _ => {}
        }
        alive = w.pass_alive(Duration::from_millis(200)).await;
        let late = begun.elapsed() > Duration::from_secs(60);
        assert!(!late, "{crash:?}\n{}", w.describe());
    }
    let check = |w: &World| {
        assert_eq!(w.summary("slow"), EVICTED, "{crash:?}\n{}", w.describe());
        assert_eq!(w.running("slow"), Vec::<String>::new(), "{crash:?}");
        assert_eq!(w.started("slow").len(), 4, "{crash:?}\n{}", w.describe());
    };
    check(&w);
    w.restart().await;
    w.pass(150).await;
    check(&w);
    assert_nothing_wrong(&w);
    died
}

/// R20: wherever the agent dies while it evicts a static pod, nothing of it runs again.
#[test]
fn restart_keeps_a_pod_with_a_sidecar_evicted_wherever_its_eviction_is_cut_off() {
    let points = at_every_point(evicted);
    assert!(!is_whole() || points >= 10, "{points}");
}

/// R20: not after a reboot either, until the manifest is another one. What is told is what the containers ended with,
/// also where the runtime tells of an end a second late.
#[tokio::test(start_paused = true)]
async fn restart_keeps_a_pod_with_a_sidecar_evicted_until_its_manifest_changes() {
    for events in [true, false] {
        let (mut w, _) = stubborn_world();
        w.fake.offer_events(events);
        w.manifest("slow", &stubborn(60).to_string());
        w.start().await;
        w.up("slow").await;
        evict(&w, "slow");
        w.until("it is finished", 30, |w| {
            matches!(w.worker("slow").phase, WorkerPhase::Finished { .. })
        })
        .await;
        w.assert_summary("slow", &EVICTED);
        let status = w.status("slow").unwrap().status;
        let mut conditions = status.conditions.iter().flatten();
        let sandbox = conditions.find(|c| c.type_ == "PodReadyToStartContainers");
        assert_eq!(sandbox.unwrap().status, "False", "its sandbox is stopped");
        w.reboot().await;
        w.start().await;
        w.pass(200).await;
        w.assert_summary("slow", &EVICTED);
        assert_eq!(w.started("slow").len(), 4, "{}", w.describe());
        w.manifest("slow", &stubborn(59).to_string());
        w.until("the new manifest runs", 60, |w| w.summary("slow") == UP)
            .await;
        assert_eq!(w.started("slow").len(), 8);
        assert_nothing_wrong(&w);
    }
}

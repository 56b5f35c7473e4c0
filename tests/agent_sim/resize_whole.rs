//! Pods as a whole and init containers are resized, and the agent dies meanwhile.

use std::time::Duration;

use holdfast::core::resize::{PendingRecord, ResizeRecord};
use holdfast::core::state::AdmissionRecord;
use holdfast_testkit::fake_cri::{Behaviour, Fault};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::cluster::NODE;
use crate::node::{Crash, When};
use crate::restart::assert_nothing_wrong;
use crate::world::{IMAGE, World};

const PATIENCE: Duration = Duration::from_secs(240);
/// Time in which an agent finishes the resize that the death of another one cut off; pods are synced each minute.
const SOON: Duration = Duration::from_secs(15);

fn container(name: &str) -> Value {
    json!({"name": name, "image": IMAGE, "command": ["sh"]})
}

/// Two containers: one has the limits of its pod, the other its own.
fn whole(requests: &str, cpu: &str, memory: &str) -> Value {
    let mut own = container("own");
    let small = json!({"cpu": "200m", "memory": "64Mi"});
    own["resources"] = json!({"requests": small, "limits": small});
    json!({
        "restartPolicy": "Always",
        "resources": {
            "requests": {"cpu": requests, "memory": "128Mi"},
            "limits": {"cpu": cpu, "memory": memory},
        },
        "containers": [container("main"), own],
    })
}

/// An init container that does not end before the main one may start.
fn with_init(memory: &str) -> Value {
    let mut init = container("init");
    init["resources"] = json!({
        "requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"memory": memory},
    });
    json!({
        "restartPolicy": "Always",
        "initContainers": [init],
        "containers": [container("main")],
    })
}

/// As a patch of `pods/resize`: the resources of another spec.
fn resize(w: &World, name: &str, to: &Value) {
    let to: Pod = serde_json::from_value(json!({"metadata": {}, "spec": to})).unwrap();
    w.api().modify("default", name, |pod: &mut Pod| {
        let (spec, to) = (pod.spec.as_mut().unwrap(), to.spec.unwrap());
        spec.resources = to.resources;
        let init = spec.init_containers.iter_mut().flatten();
        let wanted = to.init_containers.into_iter().flatten();
        let wanted = wanted.chain(to.containers);
        for (container, wanted) in init.chain(&mut spec.containers).zip(wanted) {
            container.resources = wanted.resources;
        }
    });
}

/// What an operation was called with, beside the ID.
fn calls(w: &World, operation: &str) -> Vec<String> {
    let calls = w.fake.calls().into_iter();
    calls
        .filter(|c| c.operation == operation)
        .map(|c| c.object.split_once(' ').unwrap().1.to_owned())
        .collect()
}

fn updates(w: &World) -> Vec<String> {
    calls(w, "update_container")
}

fn pod(w: &World, name: &str) -> Pod {
    w.api().get("default", name).unwrap()
}

/// An amount that is allocated, and the one that was put in force: of the pod under the empty name.
fn amounts(w: &World, pod_name: &str, of: &str, key: &str) -> [String; 2] {
    let (state, pod) = (w.state(), pod(w, pod_name));
    let uid = pod.metadata.uid.clone().unwrap();
    let admission = state.record::<AdmissionRecord>(&uid).unwrap();
    let told = ResizeRecord::of(&state, &pod).unwrap_or_default().actuated;
    [&admission.allocated, &told].map(|all| {
        let of = all.get(of).and_then(|of| of.get(key));
        of.cloned().unwrap_or_default()
    })
}

fn is_settled(w: &World, name: &str, of: &str, key: &str, wanted: &str) -> bool {
    let record = ResizeRecord::of(&w.state(), &pod(w, name));
    record.is_some_and(|r| !r.started && r.error.is_none())
        && amounts(w, name, of, key) == [wanted, wanted]
}

fn condition(w: &World, name: &str, type_: &str) -> Value {
    let status = w.shown(name)["status"].clone();
    let conditions = status["conditions"].as_array().cloned();
    let mut conditions = conditions.unwrap_or_default().into_iter();
    conditions.find(|c| c["type"] == type_).unwrap_or_default()
}

async fn started() -> World {
    let mut w = World::with_api();
    w.behave(|_, _| Behaviour::RunForever);
    w.start().await;
    w.joined().await;
    w
}

async fn running(spec: &Value) -> World {
    let w = started().await;
    w.create("web", &spec.to_string());
    w.until("it runs", 60, |w| w.shown_phase("web") == "Running")
        .await;
    w
}

/// What a container without a limit of its own, and the sandbox, are told of 1 CPU and 512Mi.
const INHERITED: &str = "shares=1024 quota=100000 memory=536870912";
const OF_SANDBOX: &str = "shares=204 quota=100000 memory=536870912";

#[tokio::test(start_paused = true)]
async fn a_pod_is_resized_as_a_whole_with_the_containers_that_have_its_limits() {
    let mut w = running(&whole("100m", "500m", "256Mi")).await;
    let before = w.running("web");
    let resources = w.shown("web")["status"]["resources"].clone();
    assert_eq!(resources["limits"]["memory"], "256Mi");
    resize(&w, "web", &whole("200m", "1", "512Mi"));
    w.until("it is resized", 60, |w| {
        is_settled(w, "web", "", "limits.memory", "512Mi")
    })
    .await;
    assert_eq!(updates(&w), [INHERITED], "the other has its own limits");
    assert_eq!(calls(&w, "update_podsandbox_resources"), [OF_SANDBOX]);
    assert_eq!(w.running("web"), before);
    w.until("it is shown", 60, |w| {
        let status = w.shown("web")["status"].clone();
        status["resources"]["limits"]["memory"] == "512Mi"
            && status["resources"]["requests"]["cpu"] == "200m"
            && status["allocatedResources"]["cpu"] == "200m"
            && condition(w, "web", "PodResizeInProgress") == Value::Null
    })
    .await;
    w.until("its begin and end are told", 60, |w| {
        let events = w.api().list_json("events", "");
        let count = |reason: &str| events.iter().filter(|e| e["reason"] == reason).count();
        count("ResizeStarted") == 1 && count("ResizeCompleted") == 1
    })
    .await;
    w.fake.clear_calls();
    w.restart().await;
    w.pass(200).await;
    assert_eq!(w.effects(), Vec::<String>::new(), "told once, remembered");
    // While nobody looks; a request alone is no matter of the containers.
    w.crash().await;
    resize(&w, "web", &whole("150m", "1", "512Mi"));
    w.start().await;
    w.until("it is resized after the restart", 60, |w| {
        is_settled(w, "web", "", "cpu", "150m")
    })
    .await;
    assert_eq!(updates(&w), Vec::<String>::new());
    assert_eq!(calls(&w, "update_podsandbox_resources").len(), 1);
    assert_eq!(w.running("web"), before);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_container_that_has_its_limit_from_its_pod_restarts_with_it_as_its_policy_says() {
    let with_policy = |memory: &str| {
        let mut spec = whole("100m", "500m", memory);
        for n in 0..2 {
            spec["containers"][n]["resizePolicy"] =
                json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        }
        spec
    };
    let w = running(&with_policy("256Mi")).await;
    resize(&w, "web", &with_policy("512Mi"));
    w.until("it is resized", 60, |w| {
        is_settled(w, "web", "", "limits.memory", "512Mi") && w.running("web").len() == 2
    })
    .await;
    w.pass(120).await;
    let count = |name: &str| {
        let starts = w.starts("web").into_iter();
        starts.filter(|s| s.container == name).count()
    };
    assert_eq!((count("main"), count("own")), (2, 1));
    assert_eq!(updates(&w), Vec::<String>::new());
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_cannot_resize_sandboxes_holds_up_no_resize() {
    for code in [tonic::Code::Unimplemented, tonic::Code::Internal] {
        let mut w = running(&whole("100m", "500m", "256Mi")).await;
        let fault = Fault::Error(code, "no".to_owned());
        w.fail_always("update_podsandbox_resources", fault);
        resize(&w, "web", &whole("200m", "1", "512Mi"));
        w.until("it is resized", 60, |w| {
            is_settled(w, "web", "", "limits.memory", "512Mi")
        })
        .await;
        assert_eq!(updates(&w), [INHERITED], "{code:?}");
        assert_nothing_wrong(&w);
        w.crash().await;
    }
}

/// A pod as a whole that asks for so many hundredths of the node's CPUs.
fn share(w: &World, percent: i64) -> Value {
    let node = w.api().get_json("nodes", "", NODE).unwrap();
    let cpus = node["status"]["allocatable"]["cpu"].as_str().unwrap();
    let all = match cpus.strip_suffix('m') {
        Some(milli) => milli.parse().unwrap(),
        None => cpus.parse::<i64>().unwrap() * 1000,
    };
    json!({
        "restartPolicy": "Always",
        "resources": {"requests": {"cpu": format!("{}m", all * percent / 100)}},
        "containers": [container("main")],
    })
}

#[tokio::test(start_paused = true)]
async fn a_pod_as_a_whole_waits_for_room_and_counts_with_what_it_has() {
    let mut w = started().await;
    let (large, small) = (share(&w, 60), share(&w, 10));
    w.create("other", &large.to_string());
    w.create("web", &small.to_string());
    w.until("both run", 60, |w| {
        ["other", "web"]
            .iter()
            .all(|n| w.shown_phase(n) == "Running")
    })
    .await;
    let had = amounts(&w, "web", "", "cpu")[0].clone();
    resize(&w, "web", &large);
    let pending = |w: &World| PendingRecord::of(&w.state(), &pod(w, "web"));
    w.until("it waits", 60, |w| {
        pending(w).is_some_and(|p| p.reason == "Deferred")
            && condition(w, "web", "PodResizePending")["reason"] == "Deferred"
    })
    .await;
    w.restart().await;
    w.pass(30).await;
    assert!(pending(&w).is_some());
    assert_eq!(amounts(&w, "web", "", "cpu")[0], had);
    // What it wants and has not got is no matter of another's admission.
    w.create("third", &share(&w, 20).to_string());
    w.until("the third runs", 60, |w| {
        w.shown_phase("third") == "Running"
    })
    .await;
    w.delete("other", Some(0));
    let wanted = large["resources"]["requests"]["cpu"].as_str().unwrap();
    w.until("there is room", 120, |w| {
        is_settled(w, "web", "", "cpu", wanted) && pending(w).is_none()
    })
    .await;
    assert_eq!(w.starts("web").len(), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_refused_pod_takes_nothing_from_a_resize() {
    let w = started().await;
    w.create("web", &share(&w, 10).to_string());
    w.until("it runs", 60, |w| w.shown_phase("web") == "Running")
        .await;
    // The decision on the pod that is refused and the one on the resize come at once.
    for n in 0..5 {
        w.create(&format!("greedy-{n}"), &share(&w, 1000).to_string());
    }
    let large = share(&w, 80);
    resize(&w, "web", &large);
    let wanted = large["resources"]["requests"]["cpu"].as_str().unwrap();
    w.until("it is resized", 60, |w| {
        is_settled(w, "web", "", "cpu", wanted)
    })
    .await;
    w.until("the others are refused", 60, |w| {
        (0..5).all(|n| w.shown_phase(&format!("greedy-{n}")) == "Failed")
    })
    .await;
    let events = w.api().list_json("events", "");
    let waited = events.iter().find(|e| e["reason"] == "ResizeDeferred");
    assert_eq!(waited, None);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn an_init_container_is_resized_while_it_runs_and_left_alone_when_it_has_ended() {
    let mut w = started().await;
    w.create("web", &with_init("64Mi").to_string());
    w.until("it is initialised", 60, |w| w.running("web").len() == 1)
        .await;
    let before = w.running("web");
    resize(&w, "web", &with_init("128Mi"));
    w.until("it is resized", 60, |w| {
        is_settled(w, "web", "init", "limits.memory", "128Mi")
    })
    .await;
    assert_eq!(updates(&w), ["shares=102 quota=0 memory=134217728"]);
    assert_eq!(w.running("web"), before);
    w.until("it is shown", 60, |w| {
        let init = w.shown("web")["status"]["initContainerStatuses"][0].clone();
        init["resources"]["limits"]["memory"] == "128Mi"
    })
    .await;
    assert!(w.fake.exit(&before[0], 0));
    w.until("the main container runs", 60, |w| {
        w.shown_phase("web") == "Running"
    })
    .await;
    w.fake.clear_calls();
    resize(&w, "web", &with_init("256Mi"));
    w.until("it is allocated", 60, |w| {
        amounts(w, "web", "init", "limits.memory")[0] == "256Mi"
    })
    .await;
    w.restart().await;
    w.pass(60).await;
    assert_eq!(updates(&w), Vec::<String>::new());
    assert_eq!(condition(&w, "web", "PodResizeInProgress"), Value::Null);
    assert_eq!(w.starts("web").len(), 2);
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------- every crash

/// A resize that agents die in.
struct Case {
    from: Value,
    to: Value,
    /// Container, or the pod under the empty name, with the amount that says that it is done.
    settled: (&'static str, &'static str, &'static str),
    update: &'static str,
    /// The amount and the update that take it back.
    back: (&'static str, &'static str),
    containers: usize,
}

fn of_pod() -> Case {
    Case {
        from: whole("100m", "500m", "256Mi"),
        to: whole("200m", "1", "512Mi"),
        settled: ("", "limits.memory", "512Mi"),
        update: INHERITED,
        back: ("256Mi", "shares=512 quota=50000 memory=268435456"),
        containers: 2,
    }
}

fn of_init_container() -> Case {
    Case {
        from: with_init("64Mi"),
        to: with_init("128Mi"),
        settled: ("init", "limits.memory", "128Mi"),
        update: "shares=102 quota=0 memory=134217728",
        back: ("64Mi", "shares=102 quota=0 memory=67108864"),
        containers: 1,
    }
}

struct Run {
    writes: usize,
    calls: usize,
    died: bool,
}

/// A pod that runs, and was resized since the agent stopped.
async fn resized(case: &Case) -> World {
    let mut w = started().await;
    w.create("web", &case.from.to_string());
    w.until("it runs", 60, |w| w.running("web").len() == case.containers)
        .await;
    w.pass(5).await;
    w.stop().await;
    resize(&w, "web", &case.to);
    w
}

async fn lives(case: &Case, crash: Crash, power: bool) -> Run {
    let mut w = resized(case).await;
    let mut run = Run {
        writes: 0,
        calls: 0,
        died: false,
    };
    let mut alive = w.start_until(crash).await;
    let mut began = Instant::now();
    let (of, key, wanted) = case.settled;
    loop {
        if alive {
            alive = w.pass_alive(Duration::from_millis(500)).await;
        }
        if !alive {
            assert!(!run.died, "it died again");
            run.died = true;
            if power {
                w.lose_power().await;
            } else {
                w.crash().await;
            }
            began = Instant::now();
            alive = w.start_until(Crash::Never).await;
            continue;
        }
        if is_settled(&w, "web", of, key, wanted) {
            break;
        }
        let patience = if run.died { SOON } else { PATIENCE };
        assert!(
            began.elapsed() < patience,
            "{crash:?} {power}\n{}",
            w.describe()
        );
    }
    w.pass(5).await;
    let told = updates(&w);
    assert!(
        (1..=1 + usize::from(run.died)).contains(&told.len()),
        "{crash:?} {power}: {told:?}"
    );
    assert!(told.iter().all(|t| t == case.update), "{crash:?}: {told:?}");
    let started = w.starts("web").len();
    assert_eq!(started, case.containers, "{crash:?} {power}");
    assert_eq!(w.running("web").len(), case.containers, "{crash:?} {power}");
    if !run.died {
        run.writes = w.life.writes();
        run.calls = w.life.calls();
    }
    // Not in order: the crash may still be to come.
    w.crash().await;
    run
}

/// The agent dies in a resize, which is withdrawn before the next one starts. Returns whether it died.
async fn lives_to_see_it_withdrawn(case: &Case, crash: Crash) -> bool {
    let mut w = resized(case).await;
    let mut alive = w.start_until(crash).await;
    let (of, key, wanted) = case.settled;
    let began = Instant::now();
    while alive && !is_settled(&w, "web", of, key, wanted) {
        assert!(began.elapsed() < PATIENCE, "{crash:?}\n{}", w.describe());
        alive = w.pass_alive(Duration::from_millis(500)).await;
    }
    w.crash().await;
    if alive {
        return false;
    }
    resize(&w, "web", &case.from);
    assert!(w.start_until(Crash::Never).await);
    let (amount, update) = case.back;
    w.until("it is allocated again what it had", 120, |w| {
        amounts(w, "web", of, key)[0] == amount
    })
    .await;
    w.pass(30).await;
    let told = updates(&w);
    // Whatever the runtime was told of the resize was taken back.
    if let Some(last) = told.last() {
        // Neither is a limit; -1 also lifts one that an update without a record may have set.
        let last = last.replace("quota=-1", "quota=0");
        assert_eq!(last, update, "{crash:?}: {told:?}");
    }
    assert!(told.len() <= 3, "{crash:?}: {told:?}");
    let record = ResizeRecord::of(&w.state(), &pod(&w, "web"));
    let is_quiet = record.is_none_or(|r| !r.started && r.error.is_none());
    assert!(is_quiet, "{crash:?}\n{}", w.describe());
    assert_eq!(w.running("web").len(), case.containers, "{crash:?}");
    assert_eq!(w.starts("web").len(), case.containers, "{crash:?}");
    w.crash().await;
    true
}

fn in_simulated_time<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(future)
}

fn run(case: &Case, crash: Crash, power: bool) -> Run {
    in_simulated_time(lives(case, crash, power))
}

fn dies_at_every_step(case: &Case) {
    let undisturbed = run(case, Crash::Never, false);
    assert!(undisturbed.writes > 3, "{}", undisturbed.writes);
    let mut deaths = 0;
    for when in [When::Before, When::After] {
        for n in 1..=undisturbed.writes.min(40) {
            deaths += usize::from(run(case, Crash::Write(n, when), n % 2 == 0).died);
        }
        for n in 1..=undisturbed.calls {
            deaths += usize::from(run(case, Crash::Call(n, when), n % 2 == 1).died);
        }
    }
    assert!(deaths >= 6, "{deaths}");
}

#[test]
fn a_resize_of_a_pod_as_a_whole_survives_a_death_at_every_step() {
    dies_at_every_step(&of_pod());
}

#[test]
fn a_resize_of_an_init_container_survives_a_death_at_every_step() {
    dies_at_every_step(&of_init_container());
}

#[test]
fn a_resize_that_is_withdrawn_after_a_death_at_any_step_leaves_nothing() {
    for case in [of_pod(), of_init_container()] {
        let undisturbed = run(&case, Crash::Never, false);
        let mut deaths = 0;
        for when in [When::Before, When::After] {
            let writes = (1..=undisturbed.writes.min(40)).map(|n| Crash::Write(n, when));
            let calls = (1..=undisturbed.calls).map(|n| Crash::Call(n, when));
            for crash in writes.chain(calls) {
                let died = in_simulated_time(lives_to_see_it_withdrawn(&case, crash));
                deaths += usize::from(died);
            }
        }
        assert!(deaths >= 6, "{deaths}");
    }
}

//! Resources of running containers are changed, and the agent dies meanwhile.

use std::time::Duration;

use holdfast::core::resize::{PendingRecord, ResizeRecord};
use holdfast::core::state::AdmissionRecord;
use holdfast_testkit::fake_cri::{Behaviour, ExecResult, Fault};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::node::{Crash, When};
use crate::restart::assert_nothing_wrong;
use crate::world::{IMAGE, World};

const PATIENCE: Duration = Duration::from_secs(240);
/// Time in which an agent finishes the resize that the death of another one cut off; pods are synced each minute.
const SOON: Duration = Duration::from_secs(15);

fn sized(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": "32Mi"}, "limits": {"cpu": "500m", "memory": memory}})
}

fn pod(resources: Value) -> String {
    json!({
        "restartPolicy": "Always",
        "containers": [{"name": "main", "image": IMAGE, "command": ["sh"], "resources": resources}],
    })
    .to_string()
}

/// As a patch of `pods/resize`.
fn resize(w: &World, name: &str, resources: &Value) {
    resize_with(w, name, resources, None);
}

fn resize_with(w: &World, name: &str, resources: &Value, policy: Option<Value>) {
    w.api().modify("default", name, |pod: &mut Pod| {
        let container = &mut pod.spec.as_mut().unwrap().containers[0];
        container.resources = serde_json::from_value(resources.clone()).unwrap();
        if let Some(policy) = policy {
            container.resize_policy = serde_json::from_value(policy).unwrap();
        }
    });
}

fn updates(w: &World) -> Vec<String> {
    let calls = w.fake.calls().into_iter();
    calls
        .filter(|c| c.operation == "update_container")
        .map(|c| c.object.split_once(' ').unwrap().1.to_owned())
        .collect()
}

fn shown(w: &World, name: &str) -> Pod {
    w.api().get("default", name).unwrap()
}

fn allocated(w: &World, name: &str, key: &str) -> String {
    let state = w.state();
    let uid = shown(w, name).metadata.uid.unwrap();
    let admission = state.record::<AdmissionRecord>(&uid).unwrap();
    admission.allocated["main"]
        .get(key)
        .cloned()
        .unwrap_or_default()
}

fn record(w: &World, name: &str) -> Option<ResizeRecord> {
    ResizeRecord::of(&w.state(), &shown(w, name))
}

fn actuated(w: &World, name: &str, key: &str) -> String {
    let record = record(w, name);
    let of = record.and_then(|r| r.actuated.get("main")?.get(key).cloned());
    of.unwrap_or_default()
}

fn is_settled(w: &World, name: &str, cpu: &str) -> bool {
    actuated(w, name, "cpu") == cpu
        && allocated(w, name, "cpu") == cpu
        && record(w, name).is_some_and(|r| !r.started && r.error.is_none())
}

async fn running(spec: &str) -> World {
    let mut w = World::with_api();
    w.behave(|_, _| Behaviour::RunForever);
    w.start().await;
    w.joined().await;
    w.create("web", spec);
    w.until("it runs", 60, |w| w.shown_phase("web") == "Running")
        .await;
    w
}

#[tokio::test(start_paused = true)]
async fn a_resize_changes_the_running_container_and_outlives_restarts() {
    let mut w = running(&pod(sized("100m", "64Mi"))).await;
    let before = w.running("web");
    assert_eq!(
        record(&w, "web"),
        None,
        "nothing is kept of a pod that was never resized"
    );
    resize(&w, "web", &sized("200m", "128Mi"));
    w.until("it is resized", 60, |w| is_settled(w, "web", "200m"))
        .await;
    assert_eq!(updates(&w), ["shares=204 quota=50000 memory=134217728"]);
    assert_eq!(w.running("web"), before);
    assert_eq!(w.restarts("web"), 0);
    let text = w.metrics_text();
    for line in [
        "kubelet_container_requested_resizes_total{resource=\"cpu\",requirement=\"requests\",operation=\"increase\"} 1",
        "kubelet_container_requested_resizes_total{resource=\"memory\",requirement=\"limits\",operation=\"increase\"} 1",
        "kubelet_pod_resize_duration_milliseconds_count{success=\"true\"} 1",
        "kubelet_pod_in_progress_resizes 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}: {text}");
    }
    assert_eq!(allocated(&w, "web", "limits.memory"), "128Mi");
    w.fake.clear_calls();
    w.restart().await;
    w.pass(200).await;
    assert_eq!(w.effects(), Vec::<String>::new());
    assert_eq!(updates(&w), Vec::<String>::new(), "told once, remembered");
    assert!(is_settled(&w, "web", "200m"));
    // While nobody looks.
    w.crash().await;
    resize(&w, "web", &sized("50m", "128Mi"));
    w.start().await;
    w.until("it is resized after the restart", 60, |w| {
        is_settled(w, "web", "50m")
    })
    .await;
    assert_eq!(updates(&w), ["shares=51 quota=50000 memory=134217728"]);
    assert_eq!(w.running("web"), before);
    w.delete("web", Some(0));
    w.until("it is forgotten", 60, |w| !w.has_record("web"))
        .await;
    let state = w.state();
    let left = state.with_prefix::<holdfast::core::state::ObjectRecord>("resizes/default/");
    assert_eq!(left.count(), 0);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_container_whose_policy_says_so_is_restarted_once_without_back_off() {
    let w = running(&pod(sized("100m", "64Mi"))).await;
    let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    resize_with(&w, "web", &sized("100m", "128Mi"), Some(policy));
    w.until("it is resized", 60, |w| {
        actuated(w, "web", "limits.memory") == "128Mi" && w.starts("web").len() == 2
    })
    .await;
    w.pass(120).await;
    assert_eq!(w.starts("web").len(), 2);
    assert_eq!(w.running("web").len(), 1);
    assert_eq!(updates(&w), Vec::<String>::new());
    assert!(is_settled(&w, "web", "100m"));
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_resize_that_the_runtime_refuses_is_on_record_and_tried_again() {
    let w = running(&pod(sized("100m", "64Mi"))).await;
    w.fail_once(
        "update_container",
        Fault::Error(tonic::Code::Internal, "device or resource busy".to_owned()),
    );
    resize(&w, "web", &sized("200m", "64Mi"));
    w.until("it is resized", 200, |w| is_settled(w, "web", "200m"))
        .await;
    let refused = crate::lifecycle::told(&w, "device or resource busy");
    assert!(refused, "it is told");
    assert_eq!(w.restarts("web"), 0);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_liveness_kill_goes_ahead_of_a_resize_that_hangs() {
    let mut spec: Value = serde_json::from_str(&pod(sized("100m", "64Mi"))).unwrap();
    spec["terminationGracePeriodSeconds"] = json!(1);
    spec["containers"][0]["livenessProbe"] = json!({
        "exec": {"command": ["alive"]}, "initialDelaySeconds": 10, "periodSeconds": 5, "failureThreshold": 1,
    });
    let w = running(&spec.to_string()).await;
    w.fake.on_exec(|_, _| ExecResult::default());
    w.pass(30).await;
    let before = w.running("web");
    w.fail_always("update_container", Fault::Hang);
    resize(&w, "web", &sized("200m", "128Mi"));
    w.until("the resize hangs", 60, |w| {
        w.fake.count("update_container") == 1
    })
    .await;
    w.fake.on_exec(|_, _| ExecResult {
        code: 1,
        ..ExecResult::default()
    });
    w.until("it is stopped", 15, |w| w.running("web") != before)
        .await;
    w.fake.on_exec(|_, _| ExecResult::default());
    w.clear_faults();
    w.until("it runs as it was resized", 240, |w| {
        w.running("web").len() == 1 && is_settled(w, "web", "200m")
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_resize_that_changes_the_class_is_told_and_withdrawn() {
    let mut w = running(&pod(sized("100m", "64Mi"))).await;
    let pending = |w: &World| PendingRecord::of(&w.state(), &shown(w, "web"));
    resize(
        &w,
        "web",
        &json!({"limits": {"cpu": "500m", "memory": "64Mi"}}),
    );
    w.until("it is infeasible", 60, |w| {
        pending(w).is_some_and(|p| p.reason == "Infeasible")
    })
    .await;
    let shows = |w: &World, line: &str| w.metrics_text().lines().any(|l| l == line);
    let label = "kubelet_pod_infeasible_resizes_total{reason_detail=\"qos_class_change\"} 1";
    w.until("it is counted", 10, |w| shows(w, label)).await;
    w.restart().await;
    w.pass(60).await;
    assert!(pending(&w).is_some());
    let line = "kubelet_pod_pending_resizes{reason=\"infeasible\"} 1";
    assert!(shows(&w, line), "{}", w.metrics_text());
    assert_eq!(allocated(&w, "web", "cpu"), "100m");
    assert_eq!(updates(&w), Vec::<String>::new());
    // A container that dies meanwhile comes back with what it has.
    resize(&w, "web", &sized("100m", "64Mi"));
    w.until("nothing is pending", 60, |w| pending(w).is_none())
        .await;
    assert_eq!(updates(&w), Vec::<String>::new());
    assert_eq!(w.starts("web").len(), 1);
    assert_nothing_wrong(&w);
}

// ------------------------------------------------------------------------------------- every crash

struct Run {
    writes: usize,
    calls: usize,
    died: bool,
}

async fn lives(crash: Crash, power: bool) -> Run {
    let mut w = World::with_api();
    w.behave(|_, _| Behaviour::RunForever);
    w.start().await;
    w.joined().await;
    w.create("web", &pod(sized("100m", "64Mi")));
    w.until("it runs", 60, |w| w.shown_phase("web") == "Running")
        .await;
    w.stop().await;
    resize(&w, "web", &sized("200m", "128Mi"));
    let mut run = Run {
        writes: 0,
        calls: 0,
        died: false,
    };
    let mut alive = w.start_until(crash).await;
    let mut began = Instant::now();
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
        if is_settled(&w, "web", "200m") {
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
    let last = updates(&w);
    assert_eq!(
        last.last().map(String::as_str),
        Some("shares=204 quota=50000 memory=134217728"),
        "{crash:?} {power}"
    );
    assert!(
        last.len() <= 1 + usize::from(run.died),
        "{crash:?}: {last:?}"
    );
    assert_eq!(w.starts("web").len(), 1, "{crash:?} {power}");
    assert_eq!(w.running("web").len(), 1, "{crash:?} {power}");
    if !run.died {
        run.writes = w.life.writes();
        run.calls = w.life.calls();
    }
    // Not in order: the crash may still be to come.
    w.crash().await;
    run
}

fn run(crash: Crash, power: bool) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(lives(crash, power))
}

// Invariant POD-8.
#[test]
fn a_resize_survives_a_death_at_every_step() {
    let whole = run(Crash::Never, false);
    assert!(whole.writes > 3, "{}", whole.writes);
    let mut deaths = 0;
    for when in [When::Before, When::After] {
        for n in 1..=whole.writes.min(40) {
            deaths += usize::from(run(Crash::Write(n, when), n % 2 == 0).died);
        }
        for n in 1..=whole.calls {
            deaths += usize::from(run(Crash::Call(n, when), n % 2 == 1).died);
        }
    }
    assert!(deaths >= 6, "{deaths}");
}

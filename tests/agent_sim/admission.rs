//! Pods that are refused beside pods that run: who takes part of the node, whenever the agent dies.

use std::time::Duration;

use holdfast::core::state::{AdmissionDecision, AdmissionRecord};
use holdfast_testkit::exploration::stride;
use holdfast_testkit::fake_cri::Behaviour;
use k8s_openapi::api::core::v1::{Node, NodeSwapStatus, Pod};
use serde_json::{Value, json};

use crate::cluster::NODE;
use crate::node::{Crash, When};
use crate::restart::assert_nothing_wrong;
use crate::world::{IMAGE, World};

/// More CPUs than any machine has.
const TOO_MANY: &str = "100000";

fn asking(cpu: &str) -> Value {
    json!({
        "restartPolicy": "Always",
        "containers": [{
            "name": "main", "image": IMAGE, "command": ["sh"], "resources": {"requests": {"cpu": cpu}},
        }],
    })
}

fn on_host_port(mut spec: Value, port: i32) -> Value {
    spec["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": port}]);
    spec
}

fn with_priority(mut spec: Value, priority: i32) -> Value {
    spec["priority"] = priority.into();
    spec
}

fn create(w: &World, name: &str, spec: &Value) {
    w.create(name, &spec.to_string());
}

fn node() -> World {
    let world = World::with_api();
    world.behave(|_, _| Behaviour::RunForever);
    world
}

/// What the API server shows of a pod that was refused.
fn refusal(w: &World, name: &str) -> String {
    let status = w.shown(name)["status"].clone();
    assert_eq!(status["phase"], "Failed", "{name}: {status}");
    assert_eq!(w.starts(name).len(), 0, "{name} was started");
    status["reason"].as_str().unwrap_or_default().to_owned()
}

/// The decision on record.
fn decision(w: &World, name: &str) -> AdmissionDecision {
    let record = w
        .state()
        .record::<AdmissionRecord>(w.uid(name).as_str())
        .cloned();
    record.unwrap().decision
}

async fn settled(w: &World, running: &[&str], failed: &[&str]) {
    w.until("every pod runs or has failed", 120, |w| {
        running.iter().all(|name| w.shown_phase(name) == "Running")
            && failed.iter().all(|name| w.shown_phase(name) == "Failed")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn refused_pods_take_no_resources_from_those_that_come_with_them() {
    let mut w = node();
    let name = |n: usize| format!("p{n:02}");
    for n in 0..30 {
        let cpu = if n % 2 == 0 { TOO_MANY } else { "10m" };
        create(&w, &name(n), &asking(cpu));
    }
    w.start().await;
    w.until("all are decided on", 120, |w| {
        (0..30).all(|n| ["Running", "Failed"].contains(&w.shown_phase(&name(n)).as_str()))
    })
    .await;
    for n in 0..30 {
        if n % 2 == 0 {
            assert_eq!(refusal(&w, &name(n)), "OutOfcpu");
        } else {
            assert_eq!(decision(&w, &name(n)), AdmissionDecision::Admitted);
            assert_eq!(w.shown_phase(&name(n)), "Running");
        }
    }
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_refused_pod_takes_no_host_port() {
    let mut w = node();
    // By their priorities the one that is refused is decided on first.
    create(
        &w,
        "greedy",
        &with_priority(on_host_port(asking(TOO_MANY), 8080), 100),
    );
    create(&w, "web", &on_host_port(asking("10m"), 8080));
    create(
        &w,
        "second",
        &with_priority(on_host_port(asking("10m"), 8080), -100),
    );
    w.start().await;
    settled(&w, &["web"], &["greedy", "second"]).await;
    assert_eq!(refusal(&w, "greedy"), "OutOfcpu");
    assert_eq!(refusal(&w, "second"), "NodePorts");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_refused_pod_takes_no_place_of_max_pods() {
    let mut w = node();
    w.config.kubelet.max_pods = 1;
    create(&w, "greedy", &with_priority(asking(TOO_MANY), 100));
    create(&w, "web", &asking("10m"));
    create(&w, "second", &with_priority(asking("10m"), -100));
    w.start().await;
    settled(&w, &["web"], &["greedy", "second"]).await;
    assert_eq!(refusal(&w, "greedy"), "OutOfcpu");
    assert_eq!(refusal(&w, "second"), "OutOfpods");
}

#[tokio::test(start_paused = true)]
async fn a_refused_pod_makes_no_room_for_a_critical_one() {
    let mut w = node();
    w.start().await;
    w.joined().await;
    create(&w, "web", &asking("10m"));
    settled(&w, &["web"], &[]).await;
    // While nothing can be recorded, the refused pod's worker has not come to its end.
    w.faults.set_out_of_space(true);
    create(&w, "greedy", &asking(TOO_MANY));
    w.pass(2).await;
    create(&w, "system", &with_priority(asking("10m"), 2_000_001_000));
    w.pass(2).await;
    w.faults.set_out_of_space(false);
    settled(&w, &["web", "system"], &["greedy"]).await;
    assert_eq!(refusal(&w, "greedy"), "OutOfcpu");
    let events = w.api().list_json("events", "");
    let preempted = events.iter().filter(|e| e["reason"] == "Preempting");
    assert_eq!(preempted.collect::<Vec<_>>(), Vec::<&Value>::new());
}

/// As after the store was lost: the API server still lists pods that have run here.
#[tokio::test(start_paused = true)]
async fn pods_that_are_over_take_nothing_from_those_that_come_with_them() {
    let mut w = node();
    for n in 0..3 {
        let name = format!("done-{n}");
        let spec = with_priority(on_host_port(asking(TOO_MANY), 8080), 100);
        create(&w, &name, &spec);
        w.api().modify("default", &name, |pod: &mut Pod| {
            pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
        });
    }
    create(&w, "web", &on_host_port(asking("10m"), 8080));
    w.start().await;
    settled(&w, &["web"], &[]).await;
    for n in 0..3 {
        assert_eq!(w.shown_phase(&format!("done-{n}")), "Succeeded");
    }
    assert_nothing_wrong(&w);
}

/// The agent dies at one write after the other, from its first sight of the pods on. What the next life resumes counts
/// what the former one refused as little as what it refuses itself.
#[tokio::test(start_paused = true)]
async fn restart_keeps_refused_pods_from_taking_resources_whenever_the_agent_dies() {
    for at in (1..).step_by(stride()) {
        let mut w = node();
        w.start().await;
        w.joined().await;
        w.crash().await;
        for n in 0..3 {
            let greedy = with_priority(asking(TOO_MANY), 100);
            create(&w, &format!("greedy-{n}"), &greedy);
            create(&w, &format!("web-{n}"), &asking("10m"));
        }
        let alive = w.start_until(Crash::Write(at, When::After)).await
            && w.pass_alive(Duration::from_secs(5)).await;
        if alive {
            assert!(at > 10, "everything was done with {at} writes");
            break;
        }
        w.crash().await;
        w.start().await;
        create(&w, "late", &asking("10m"));
        settled(
            &w,
            &["web-0", "web-1", "web-2", "late"],
            &["greedy-0", "greedy-1", "greedy-2"],
        )
        .await;
        for n in 0..3 {
            assert_eq!(
                refusal(&w, &format!("greedy-{n}")),
                "OutOfcpu",
                "write {at}"
            );
        }
        assert_nothing_wrong(&w);
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_for_another_system_is_refused_for_that_and_for_nothing_else() {
    let mut w = node();
    w.start().await;
    w.joined().await;
    let mut foreign = asking("10m");
    foreign["os"] = json!({"name": "windows"});
    // What this node does not do is no reason of its own where nothing of the pod concerns it.
    foreign["volumes"] =
        json!([{"name": "share", "flexVolume": {"driver": "microsoft.com/smb.cmd"}}]);
    create(&w, "foreign", &foreign);
    settled(&w, &[], &["foreign"]).await;
    assert_eq!(refusal(&w, "foreign"), "PodOSNotSupported");
    let message = w.shown("foreign")["status"]["message"].clone();
    assert_eq!(
        message,
        "Pod was rejected: Failed to admit pod as the OS field doesn't match node OS"
    );
}

#[tokio::test(start_paused = true)]
async fn options_for_windows_are_ignored() {
    let mut w = node();
    w.start().await;
    w.joined().await;
    let mut spec = asking("10m");
    let options =
        json!({"windowsOptions": {"runAsUserName": "ContainerUser", "hostProcess": false}});
    spec["securityContext"] = options.clone();
    spec["containers"][0]["securityContext"] = options.clone();
    spec["initContainers"] = json!([{
        "name": "sidecar", "image": IMAGE, "command": ["sh"], "restartPolicy": "Always", "securityContext": options,
    }]);
    create(&w, "web", &spec);
    settled(&w, &["web"], &[]).await;
    assert_eq!(w.running("web").len(), 2);
}

/// A current server refuses a node that says it has a swap of nothing. One that an older agent has told so is healed.
#[tokio::test(start_paused = true)]
async fn a_node_is_registered_whatever_swap_its_machine_has() {
    let mut w = node();
    w.start().await;
    w.joined().await;
    let swap = |w: &World| {
        w.api().get_json("nodes", "", NODE).unwrap()["status"]["nodeInfo"]["swap"].clone()
    };
    let is_valid =
        |swap: &Value| swap.is_null() || swap["capacity"].as_i64().is_some_and(|bytes| bytes > 0);
    assert!(is_valid(&swap(&w)), "{}", swap(&w));
    w.crash().await;
    w.api().modify("", NODE, |node: &mut Node| {
        let info = node.status.as_mut().unwrap().node_info.as_mut().unwrap();
        info.swap = Some(NodeSwapStatus { capacity: Some(0) });
    });
    w.start().await;
    w.until("the swap of nothing is taken back", 60, |w| {
        is_valid(&swap(w))
    })
    .await;
}

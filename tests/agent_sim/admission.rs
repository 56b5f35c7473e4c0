//! Pods that are refused beside pods that run: who takes part of the node, whenever the agent dies.

use std::time::Duration;

use holdfast::core::state::{AdmissionDecision, AdmissionRecord, WorkerPhase, WorkerRecord};
use holdfast_testkit::exploration::stride;
use holdfast_testkit::fake_api::{Fault, Request};
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

/// Asks for so many hundredths of the node's CPUs.
fn asking_share(w: &World, percent: i64) -> Value {
    let node = w.api().get_json("nodes", "", NODE).unwrap();
    let cpus = node["status"]["allocatable"]["cpu"].as_str().unwrap();
    let all = match cpus.strip_suffix('m') {
        Some(milli) => milli.parse().unwrap(),
        None => cpus.parse::<i64>().unwrap() * 1000,
    };
    asking(&format!("{}m", all * percent / 100))
}

/// A node with two pods that run, and the spec of a critical one that needs the room of both.
async fn full_node() -> (World, Value) {
    let mut w = node();
    w.start().await;
    w.joined().await;
    for name in ["web-0", "web-1"] {
        create(&w, name, &asking_share(&w, 40));
    }
    settled(&w, &["web-0", "web-1"], &[]).await;
    let critical = with_priority(asking_share(&w, 90), 2_000_001_000);
    (w, critical)
}

/// Waits until the critical pod runs and the pods that it preempts have ended; well, as their containers do.
async fn has_room(w: &World) {
    w.until("the critical pod has room", 120, |w| {
        let has_ended = |name| w.shown_phase(name) == "Succeeded" && w.running(name).is_empty();
        w.shown_phase("system") == "Running" && ["web-0", "web-1"].into_iter().all(has_ended)
    })
    .await;
}

/// The pods that a preemption was emitted of.
fn told_of_preemption(w: &World) -> Vec<String> {
    let mut events = w.api().list_json("events", "");
    events.retain(|event| event["reason"] == "Preempting");
    let names = events.iter().map(|e| e["involvedObject"]["name"].as_str());
    names.map(|name| name.unwrap().to_owned()).collect()
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

/// The agent dies at a point of a preemption, which may not be reached. Returns whether it was.
async fn dies_while_a_pod_is_preempted(crash: Crash) -> bool {
    let (mut w, critical) = full_node().await;
    w.crash().await;
    create(&w, "system", &critical);
    let alive = w.start_until(crash).await && w.pass_alive(Duration::from_secs(5)).await;
    w.crash().await;

    let state = w.disk.load();
    let uid = |name: &str| {
        w.shown(name)["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let is_admitted = state
        .record::<AdmissionRecord>(&uid("system"))
        .is_some_and(|record| record.decision == AdmissionDecision::Admitted);
    let is_ended = |name: &str| {
        let worker = state.record::<WorkerRecord>(&uid(name)).unwrap();
        worker.phase != WorkerPhase::Sync
    };
    for name in ["web-0", "web-1"] {
        assert_eq!(is_ended(name), is_admitted, "{crash:?}: {name}");
    }
    let told = told_of_preemption(&w);
    assert!(is_admitted || told.is_empty(), "{crash:?}: {told:?}");

    w.start().await;
    has_room(&w).await;
    for name in ["web-0", "web-1"] {
        assert_eq!(w.starts(name).len(), 1, "{crash:?}: {name} came back");
    }
    assert_nothing_wrong(&w);
    !alive
}

// Invariant API-9.
#[tokio::test(start_paused = true)]
async fn a_preemption_is_on_record_with_the_admission_or_not_at_all_whenever_the_agent_dies() {
    type Point = fn(usize, When) -> Crash;
    for (what, point) in [("write", Crash::Write as Point), ("call", Crash::Call)] {
        for when in [When::Before, When::After] {
            for at in (1..).step_by(stride()) {
                if !dies_while_a_pod_is_preempted(point(at, when)).await {
                    assert!(at > 4, "everything was done with {at} points: {what}");
                    break;
                }
            }
        }
    }
}

// Invariant API-9.
#[tokio::test(start_paused = true)]
async fn nobody_is_preempted_while_the_admission_cannot_be_recorded() {
    let (w, critical) = full_node().await;
    w.faults.set_out_of_space(true);
    create(&w, "system", &critical);
    w.pass(20).await;
    for name in ["web-0", "web-1"] {
        assert_eq!(
            w.running(name).len(),
            1,
            "{name} was stopped for a pod that cannot start"
        );
    }
    assert_eq!(told_of_preemption(&w), Vec::<String>::new());
    w.faults.set_out_of_space(false);
    has_room(&w).await;
    let mut told = told_of_preemption(&w);
    told.sort();
    assert_eq!(told, ["web-0", "web-1"]);
    assert_nothing_wrong(&w);
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

/// Nobody else would bring a static pod back: its manifest does not change.
#[tokio::test(start_paused = true)]
async fn a_static_pod_that_was_refused_starts_once_it_fits() {
    let mut w = node();
    w.start().await;
    w.joined().await;
    create(&w, "web", &on_host_port(asking("10m"), 8080));
    settled(&w, &["web"], &[]).await;
    w.manifest("fixed", &on_host_port(asking("10m"), 8080).to_string());
    let mirror = format!("fixed-{NODE}");
    settled(&w, &["web"], &[&mirror]).await;
    assert_eq!(refusal(&w, &mirror), "NodePorts");
    // It is told once, however often it is looked at, and a restart changes nothing.
    w.pass(90).await;
    w.restart().await;
    w.pass(90).await;
    let events = w.api().list_json("events", "");
    let refusals = events.iter().filter(|e| e["reason"] == "NodePorts");
    assert_eq!(refusals.count(), 1);
    assert_eq!(refusal(&w, &mirror), "NodePorts");
    w.delete("web", Some(1));
    w.until("the static pod runs", 120, |w| {
        w.shown_phase(&mirror) == "Running"
    })
    .await;
    assert_eq!(w.starts("fixed").len(), 1);
    // A pod of the API server that was refused stays so: its controller makes another one.
    create(&w, "late", &on_host_port(asking("10m"), 8080));
    settled(&w, &[], &["late"]).await;
    w.remove_manifest("fixed");
    w.pass(120).await;
    assert_eq!(refusal(&w, "late"), "NodePorts");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_label_that_the_watch_has_not_brought_yet_is_read_before_a_pod_is_refused() {
    let mut w = node();
    w.start().await;
    w.joined().await;
    let mut spec = asking("10m");
    spec["nodeSelector"] = json!({"disk": "fast"});
    // The watch of the node is behind.
    let of_nodes = |r: &Request| r.kind == "nodes" && ["list", "watch"].contains(&&*r.verb);
    w.api()
        .fail_always(of_nodes, Fault::Error("the connection broke".to_owned()));
    w.api().close_watches();
    w.pass(1).await;
    w.api().modify::<Node>("", NODE, |node| {
        let labels = node.metadata.labels.get_or_insert_default();
        labels.insert("disk".to_owned(), "fast".to_owned());
    });
    let is_read = |r: &Request| r.verb == "get" && r.kind == "nodes" && r.name == NODE;
    w.api().take_requests();
    create(&w, "web", &spec);
    settled(&w, &["web"], &[]).await;
    w.pass(2).await;
    spec["nodeSelector"] = json!({"disk": "slow"});
    create(&w, "other", &spec);
    settled(&w, &["web"], &["other"]).await;
    assert_eq!(refusal(&w, "other"), "NodeAffinity");
    assert!(w.api().count(is_read) >= 2);
}

#[tokio::test(start_paused = true)]
async fn a_refused_static_pod_waits_for_no_source() {
    let mut w = node();
    w.start().await;
    w.joined().await;
    create(&w, "web", &asking("10m"));
    settled(&w, &["web"], &[]).await;
    let spec = on_host_port(asking("10m"), 8080).to_string();
    w.manifest("first", &spec);
    settled(&w, &["web", &format!("first-{NODE}")], &[]).await;
    w.manifest("second", &spec);
    let mirror = format!("second-{NODE}");
    settled(&w, &["web"], &[&mirror]).await;
    w.manifest("broken", "{");
    w.set_api(false);
    w.restart().await;
    w.pass(30).await;
    assert!(w.starts("second").is_empty());
    w.remove_manifest("first");
    w.until("the second pod runs", 60, |w| {
        w.running("first").is_empty() && w.running("second").len() == 1
    })
    .await;
    assert_eq!(w.running("web").len(), 1);
}

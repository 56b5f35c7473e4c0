//! What users do with kubectl.

use std::time::Duration;

use crate::agent_process::eventually;
use crate::setup::{Cluster, FOREVER, script};

#[test]
fn get_and_describe_show_a_pod_as_on_any_node() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.create_pod("web", script("Always", FOREVER));
    cluster.wait_running("web");
    let table = cluster.kubectl(&["get", "pods", "-o", "wide"]);
    let line = table.lines().find(|l| l.starts_with("web ")).unwrap();
    for word in ["1/1", "Running", &cluster.node] {
        assert!(line.contains(word), "{word} in {table}");
    }
    cluster.wait_event("web", "Started", "");
    let text = cluster.kubectl(&["describe", "pod", "web"]);
    for word in [
        "State:          Running",
        "Ready:          True",
        "Started",
        "kubelet",
    ] {
        assert!(text.contains(word), "{word} in {text}");
    }
    let text = cluster.kubectl(&["describe", "node", &cluster.node]);
    for word in ["KubeletReady", "Starting", "containerd://"] {
        assert!(text.contains(word), "{word} in {text}");
    }
}

#[test]
fn delete_with_a_grace_period_and_by_force() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    for pod in ["a", "b", "c"] {
        cluster.create_pod(
            pod,
            script("Always", "trap '' TERM; while :; do sleep 1; done"),
        );
    }
    for pod in ["a", "b", "c"] {
        cluster.wait_running(pod);
    }
    cluster.kubectl(&["delete", "pod", "a", "--grace-period=1"]);
    assert!(cluster.try_pod("a").is_none());
    cluster.kubectl(&["delete", "pod", "b", "--force", "--grace-period=0"]);
    // A long grace period, shortened by a second delete.
    cluster.kubectl(&["delete", "pod", "c", "--grace-period=300", "--wait=false"]);
    cluster.kubectl(&["delete", "pod", "c", "--grace-period=1", "--wait=false"]);
    cluster.wait_gone("c", Duration::from_secs(30));
    eventually("nothing runs any more", || {
        match cluster.running().as_slice() {
            [] => Ok(()),
            some => Err(format!("{some:?}")),
        }
    });
}

#[test]
fn cordon_drain_and_taint() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.create_pod("drained", script("Always", FOREVER));
    cluster.wait_running("drained");
    cluster.kubectl(&["cordon", &cluster.node]);
    eventually("the event says so", || {
        let events = cluster
            .env
            .kubectl_ok(&["-n", "default", "get", "events", "-o", "wide"]);
        let found = events
            .lines()
            .any(|l| l.contains("NodeNotSchedulable") && l.contains(&cluster.node));
        if found { Ok(()) } else { Err(events) }
    });
    cluster.kubectl(&[
        "drain",
        &cluster.node,
        "--force",
        "--ignore-daemonsets",
        "--timeout=60s",
    ]);
    assert!(cluster.try_pod("drained").is_none());
    cluster.kubectl(&["uncordon", &cluster.node]);
    cluster.kubectl(&["taint", "node", &cluster.node, "away=now:NoExecute"]);
    eventually("the agent has seen the taint", || {
        let dump = cluster.dump(&["node"]);
        let taints = dump["tables"]["node"][0]["object"]["spec"]["taints"].to_string();
        if taints.contains("away") {
            Ok(())
        } else {
            Err(taints)
        }
    });
    cluster.create_pod("unwelcome", script("Always", FOREVER));
    cluster.wait_pod_phase("unwelcome", "Failed");
    let mut spec = script("Always", FOREVER);
    spec["tolerations"] = serde_json::json!([{"operator": "Exists"}]);
    cluster.create_pod("tolerant", spec);
    cluster.wait_running("tolerant");
}

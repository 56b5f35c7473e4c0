//! What a restart of the agent costs on cgroup v2 under systemd. An emulated processor is slow: figures are ratios.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, PostParams};
use serde_json::{Value, json};

use super::node::{IMAGE, Node, PATIENCE, SLEEP, pod};
use super::reboot::Cluster;

/// Pods of the API server that a restart must leave alone.
const PODS: usize = 20;
const ROUNDS: usize = 5;

/// A pod that writes the machine's uptime to a file when it starts.
fn stopwatch(name: &str) -> Value {
    let script = format!("cut -d' ' -f1 /proc/uptime >/marks/{name}; {SLEEP}");
    let mut pod = pod(name, "Always", &script);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "marks", "mountPath": "/marks"}]);
    pod["spec"]["volumes"] = json!([{"name": "marks", "hostPath": {"path": "/root/marks"}}]);
    pod
}

/// The uptime at which the pod started, in seconds.
fn started(node: &mut Node, name: &str) -> f64 {
    let text = node.eventually(
        &format!("{name} has started"),
        &format!("test -s /root/marks/{name} && cat /root/marks/{name}"),
    );
    text.trim().parse().unwrap()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The time of an event of the unit, in seconds since the boot.
fn unit_time(node: &mut Node, property: &str) -> f64 {
    let micros = node.sh(&format!("systemctl show -P {property} holdfast"));
    micros.trim().parse::<f64>().unwrap() / 1e6
}

/// Processor time of the agent since its start, in seconds.
fn cpu(node: &mut Node) -> f64 {
    let nanos = node.sh("systemctl show -P CPUUsageNSec holdfast");
    nanos.trim().parse::<f64>().unwrap() / 1e9
}

/// The pods of the API server as clients see them: Ready since when, restarts and container IDs.
fn seen(cluster: &Cluster) -> BTreeMap<String, String> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let list = cluster
        .runtime
        .block_on(pods.list(&ListParams::default().labels("figures=yes")))
        .unwrap();
    let row = |pod: Pod| {
        let status = serde_json::to_value(&pod.status).unwrap();
        let ready = status["conditions"]
            .as_array()
            .and_then(|all| all.iter().find(|c| c["type"] == "Ready"))
            .map_or(Value::Null, |c| {
                json!([c["status"], c["lastTransitionTime"]])
            });
        let container = &status["containerStatuses"][0];
        let text = format!(
            "{ready} {} {}",
            container["restartCount"], container["containerID"]
        );
        (pod.metadata.name.unwrap(), text)
    };
    list.items.into_iter().map(row).collect()
}

fn run_pods(cluster: &Cluster) {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    cluster.runtime.block_on(async {
        for n in 0..PODS {
            let pod = serde_json::from_value(json!({
                "metadata": {"name": format!("p{n}"), "labels": {"figures": "yes"}},
                "spec": {
                    "nodeName": "vmnode",
                    "automountServiceAccountToken": false,
                    "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", SLEEP]}],
                },
            }))
            .unwrap();
            pods.create(&PostParams::default(), &pod).await.unwrap();
        }
    });
    let deadline = Instant::now() + 4 * PATIENCE;
    loop {
        let ready = seen(cluster)
            .values()
            .filter(|row| row.contains("\"True\""))
            .count();
        if ready == PODS {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{ready} of {PODS} pods are Ready"
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn a_restart_starts_what_is_new_and_leaves_the_rest_alone() {
    let mut cluster = Cluster::join();
    run_pods(&cluster);
    cluster.node.sh("mkdir -p /root/marks");
    // The first one warms up what the others find.
    let mut running = Vec::new();
    for n in 0..=ROUNDS {
        let name = format!("running-{n}");
        let begun: f64 = cluster
            .node
            .sh("cut -d' ' -f1 /proc/uptime")
            .trim()
            .parse()
            .unwrap();
        cluster.node.manifest(&stopwatch(&name));
        running.push(started(&mut cluster.node, &name) - begun);
    }
    running.remove(0);
    std::thread::sleep(Duration::from_secs(10));
    let begun = cpu(&mut cluster.node);
    std::thread::sleep(Duration::from_secs(40));
    let idle = cpu(&mut cluster.node) - begun;

    let before = seen(&cluster);
    let (mut ready, mut meanwhile) = (Vec::new(), Vec::new());
    for n in 0..ROUNDS {
        let name = format!("meanwhile-{n}");
        cluster
            .node
            .sh("systemctl kill --signal KILL holdfast; systemctl stop holdfast");
        cluster.node.manifest(&stopwatch(&name));
        cluster.proxy.reset();
        cluster.node.start();
        let begun = unit_time(&mut cluster.node, "ExecMainStartTimestampMonotonic");
        ready.push(unit_time(&mut cluster.node, "ActiveEnterTimestampMonotonic") - begun);
        meanwhile.push(started(&mut cluster.node, &name) - begun);
        // What it has to tell is told.
        std::thread::sleep(Duration::from_secs(5));
        let told: Vec<_> = cluster
            .proxy
            .requests()
            .into_iter()
            .filter(|r| r.is("PATCH", "pods/status") && r.path.contains("/pods/p"))
            .collect();
        assert!(
            told.is_empty(),
            "statuses of untouched pods were written: {told:?}"
        );
    }
    std::thread::sleep(Duration::from_secs(35));
    let restarted = cpu(&mut cluster.node);
    assert_eq!(seen(&cluster), before, "a pod was touched");
    let (running, ready, meanwhile) = (median(running), median(ready), median(meanwhile));
    println!(
        "of {ROUNDS}, in the machine's time, beside {PODS} pods: a pod ran {running:.2} s after its manifest was there; \
         after SIGKILL all pods were resumed {ready:.2} s after the agent's start, {:.2} x, and one that was written meanwhile ran after \
         {meanwhile:.2} s, {:.2} x; the agent used {restarted:.2} CPU-s in the 40 s after a start, {idle:.2} in 40 s at rest",
        ready / running,
        meanwhile / running,
    );
    // Where a start costs as much as a few pods, the restart does more than resume.
    assert!(
        meanwhile < 5.0 * running,
        "{meanwhile} s against {running} s"
    );
}

//! Shutdowns in order: the ends of containers are seen, and told, though the machine goes down.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use super::node::{IMAGE, Node, PATIENCE, SLEEP, noting, pod, rows};
use super::reboot::Cluster;

/// A script that ends with this code when it is told to stop.
fn trapped(code: i32) -> String {
    format!("trap 'exit {code}' TERM; while :; do sleep 1; done")
}

fn container(node: &mut Node, pod: &str) -> Value {
    let full = format!("{pod}-vmnode");
    rows(&mut node.machine, "containers")
        .unwrap()
        .into_iter()
        .find(|row| row["name"] == full.as_str())
        .unwrap_or_default()
}

#[test]
fn a_reboot_in_order_leaves_the_exit_codes_of_trapped_stops_on_record() {
    let mut node = Node::started();
    node.manifest(&pod("never", "Never", &trapped(7)));
    node.manifest(&pod("always", "Always", &trapped(0)));
    node.manifest(&pod("job", "OnFailure", &trapped(0)));
    node.manifest(&pod("once", "Never", &trapped(0)));
    for pod in ["never", "always", "job", "once"] {
        node.wait_running(pod);
    }
    node.machine.send("systemctl reboot").unwrap();
    node.machine.rebooted().unwrap();
    node.eventually("the agent is ready", "systemctl is-active --quiet holdfast");
    let never = container(&mut node, "never");
    assert_eq!(never["lastExit"]["exitCode"], 7, "{never}");
    assert_eq!(never["restartCount"], 0, "{never}");
    node.wait_running("always");
    let always = container(&mut node, "always");
    assert_eq!(always["lastExit"]["exitCode"], 0, "{always}");
    assert_eq!(always["restartCount"], 1, "{always}");
    // Their work was not done, whatever their processes said.
    node.wait_running("job");
    let job = container(&mut node, "job");
    assert_eq!(job["lastExit"]["exitCode"], 0, "{job}");
    assert_eq!(job["restartCount"], 1, "{job}");
    let once = container(&mut node, "once");
    assert_eq!(once["lastExit"]["reason"], "NodeShutdown", "{once}");
    assert_eq!(once["restartCount"], 0, "{once}");
    let statuses = rows(&mut node.machine, "statuses").unwrap();
    let once = statuses.iter().find(|row| row["name"] == "once-vmnode");
    let once = once.cloned().unwrap_or_default();
    assert_eq!(once["phase"], "Failed", "{once}");
}

/// A node of a cluster that delays shutdowns, with a pod for each name that runs.
fn delaying(pods: &[(&str, &str, i32)]) -> (Cluster, Api<Pod>) {
    let mut cluster = Cluster::join();
    cluster.node.sh(
        "set -e\nprintf 'shutdownGracePeriod: 20s\\nshutdownGracePeriodCriticalPods: 8s\\n' >>/etc/holdfast/config.yaml\n\
         systemctl restart holdfast",
    );
    cluster.node.eventually(
        "the lock is held",
        "systemd-inhibit --list --no-pager | grep -q holdfast",
    );
    let allowed = cluster.node.sh(
        "busctl get-property org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager InhibitDelayMaxUSec",
    );
    assert_eq!(allowed.trim(), "t 22000000");
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    cluster.runtime.block_on(async {
        for (name, class, code) in pods {
            let pod = serde_json::from_value(json!({
                "metadata": {"name": name},
                "spec": {
                    "nodeName": "vmnode",
                    "priorityClassName": class,
                    "automountServiceAccountToken": false,
                    "terminationGracePeriodSeconds": 10,
                    "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", trapped(*code)]}],
                },
            }))
            .unwrap();
            api.create(&PostParams::default(), &pod).await.unwrap();
        }
    });
    for (name, ..) in pods {
        wait(&mut cluster, &api, name, |pod| {
            pod["status"]["phase"] == "Running"
        });
    }
    (cluster, api)
}

#[track_caller]
fn wait(cluster: &mut Cluster, api: &Api<Pod>, name: &str, holds: impl Fn(&Value) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let pod = cluster.runtime.block_on(api.get(name)).unwrap();
        let pod = serde_json::to_value(pod).unwrap();
        if holds(&pod) {
            return;
        }
        assert!(Instant::now() < deadline, "{name}: {}", pod["status"]);
        std::thread::sleep(Duration::from_millis(300));
    }
}

fn ended_with(code: i32) -> impl Fn(&Value) -> bool {
    move |pod| {
        let status = &pod["status"];
        status["phase"] == "Failed"
            && status["reason"] == "Terminated"
            && status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == code
    }
}

/// Name, priority class, and the code that it ends with.
const PODS: [(&str, &str, i32); 2] = [
    ("regular", "", 5),
    ("critical", "system-cluster-critical", 6),
];

#[test]
fn a_delayed_shutdown_tells_how_pods_ended_before_the_machine_goes_down() {
    let (mut cluster, api) = delaying(&PODS);
    cluster.node.machine.send("systemctl reboot").unwrap();
    for (name, _, code) in PODS {
        wait(&mut cluster, &api, name, ended_with(code));
    }
    cluster.node.machine.rebooted().unwrap();
    cluster.wait_ready();
    for (name, _, code) in PODS {
        wait(&mut cluster, &api, name, ended_with(code));
    }
    let journal = rows(&mut cluster.node.machine, "journal").unwrap();
    let at = |what: &str, text: &str| {
        let found = journal.iter().position(|row| {
            row["what"] == what && row["why"].as_str().is_some_and(|why| why.contains(text))
        });
        found.unwrap_or_else(|| panic!("no line {what} {text} in {journal:#?}"))
    };
    let began = at("shutdown began", "");
    let ended = at("shutdown ended", "");
    assert_ne!(began, ended);
}

#[test]
fn ends_of_a_shutdown_with_the_api_server_away_are_told_after_the_boot() {
    let (mut cluster, api) = delaying(&PODS);
    cluster.node.manifest(&noting("static", "Always", SLEEP));
    cluster.node.wait_starts("static", 1, PATIENCE);
    cluster.proxy.cut();
    // A second one during the first changes nothing.
    cluster
        .node
        .machine
        .send("systemctl reboot; sleep 3; systemctl reboot")
        .unwrap();
    cluster.node.machine.rebooted().unwrap();
    cluster
        .node
        .eventually("the agent is ready", "systemctl is-active --quiet holdfast");
    // What its owner wants runs again, without the API server.
    cluster.node.wait_starts("static", 2, PATIENCE);
    cluster.proxy.heal();
    for (name, _, code) in PODS {
        wait(&mut cluster, &api, name, ended_with(code));
    }
    let journal = rows(&mut cluster.node.machine, "journal").unwrap();
    let begun = journal.iter().filter(|row| row["what"] == "shutdown began");
    assert_eq!(begun.count(), 1, "{journal:#?}");
}

//! The node in the API: what it registers, what it reports, and what a restart does not change.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use serde_json::{Value, json};

use crate::agent_process::{eventually, within};
use crate::setup::{Cluster, condition};

fn lease(cluster: &Cluster) -> Option<Value> {
    let leases: Api<Lease> = Api::namespaced(cluster.client(), "kube-node-lease");
    let lease = cluster.run(leases.get_opt(&cluster.node)).unwrap();
    lease.map(|lease| serde_json::to_value(lease).unwrap())
}

#[test]
fn a_node_registers_with_what_it_has_and_becomes_ready() {
    let cluster = Cluster::new();
    cluster.site.configure(
        "registerWithTaints:\n- {key: edge, value: \"yes\", effect: PreferNoSchedule}\nmaxPods: 77\n\
         systemReserved: {memory: 100Mi}\n",
    );
    let _agent =
        cluster.start_with(&["--node-labels", "zone=cellar", "--provider-id", "metal://7"]);
    let node = cluster.wait_node_ready();
    let (meta, spec, status) = (&node["metadata"], &node["spec"], &node["status"]);
    assert_eq!(meta["labels"]["zone"], "cellar");
    assert_eq!(
        meta["labels"]["kubernetes.io/hostname"],
        cluster.node.as_str()
    );
    assert_eq!(meta["labels"]["kubernetes.io/os"], "linux");
    assert_eq!(spec["providerID"], "metal://7");
    assert_eq!(spec["taints"][0]["key"], "edge");
    assert_eq!(status["capacity"]["pods"], "77");
    assert!(
        status["nodeInfo"]["containerRuntimeVersion"]
            .as_str()
            .unwrap()
            .starts_with("containerd://")
    );
    assert!(
        status["nodeInfo"]["kubeletVersion"]
            .as_str()
            .unwrap()
            .starts_with('v')
    );
    assert_eq!(status["daemonEndpoints"]["kubeletEndpoint"]["Port"], 10250);
    assert_ne!(
        status["capacity"]["memory"],
        status["allocatable"]["memory"]
    );
    for kind in ["MemoryPressure", "DiskPressure", "PIDPressure"] {
        assert_eq!(condition(&node, kind)["status"], "False", "{node}");
    }
    let addresses = status["addresses"].as_array().unwrap();
    assert!(
        addresses.iter().any(|a| a["type"] == "InternalIP"),
        "{addresses:?}"
    );
    let lease = eventually("there is a lease", || {
        lease(&cluster).ok_or_else(|| "none".to_owned())
    });
    assert_eq!(lease["spec"]["holderIdentity"], cluster.node.as_str());
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 40);
    let table = cluster.kubectl(&["get", "nodes", "-o", "wide"]);
    let line = table
        .lines()
        .find(|l| l.starts_with(&format!("{} ", cluster.node)))
        .unwrap();
    assert!(line.contains(" Ready "), "{table}");
}

// Invariant API-3.
#[test]
fn restart_keeps_the_node_ready_and_writes_nothing() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    let before = cluster.get_node().unwrap();
    let renewed = lease(&cluster).unwrap()["spec"]["renewTime"].clone();
    agent.kill9();
    cluster.proxy.reset();
    let _agent = cluster.start();
    within(Duration::from_secs(40), "the lease is renewed", || {
        let now = lease(&cluster).unwrap()["spec"]["renewTime"].clone();
        if now == renewed {
            Err("not yet".to_owned())
        } else {
            Ok(())
        }
    });
    let after = cluster.get_node().unwrap();
    for kind in ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"] {
        let (old, new) = (condition(&before, kind), condition(&after, kind));
        assert_eq!(old["status"], new["status"]);
        assert_eq!(
            old["lastTransitionTime"], new["lastTransitionTime"],
            "{kind}"
        );
    }
    assert_eq!(
        cluster.proxy.count("PATCH", "nodes/status"),
        0,
        "{:?}",
        cluster.proxy.counts()
    );
}

#[test]
fn a_node_that_is_deleted_comes_back() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    let uid = cluster.get_node().unwrap()["metadata"]["uid"].clone();
    cluster.kubectl(&["delete", "node", &cluster.node]);
    within(
        Duration::from_secs(60),
        "the node is back",
        || match cluster.get_node() {
            Some(node)
                if node["metadata"]["uid"] != uid
                    && condition(&node, "Ready")["status"] == "True" =>
            {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        },
    );
}

#[test]
fn a_runtime_that_ends_makes_the_node_not_ready_and_its_return_ready() {
    let cluster = Cluster::new();
    let _agent = cluster.join();
    cluster.world.runtime.stop_daemon().unwrap();
    within(Duration::from_secs(90), "the node is not ready", || {
        let node = cluster.get_node().unwrap();
        match condition(&node, "Ready") {
            ready if ready["status"] == "False" => {
                assert_eq!(ready["reason"], "KubeletNotReady");
                Ok(())
            }
            other => Err(other.to_string()),
        }
    });
    cluster.world.runtime.start_daemon().unwrap();
    cluster.wait_node_ready();
}

#[test]
fn labels_of_a_user_stay_and_those_of_the_node_come_back() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    cluster
        .patch_node(json!({"metadata": {"labels": {"rack": "12", "kubernetes.io/os": "plan9"}}}));
    drop(agent);
    let _agent = cluster.start();
    eventually("the label is right again", || {
        let node = cluster.get_node().unwrap();
        let labels = &node["metadata"]["labels"];
        if labels["kubernetes.io/os"] == "linux" && labels["rack"] == "12" {
            Ok(())
        } else {
            Err(labels.to_string())
        }
    });
}

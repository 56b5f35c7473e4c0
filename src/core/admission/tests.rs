//! Table tests of admission.

use super::*;
use serde_json::json;

fn pod(uid: &str, spec: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": format!("p-{uid}"), "namespace": "ns", "uid": uid}, "spec": spec,
    }))
    .unwrap()
}

fn with_port(uid: &str, port: serde_json::Value, host_network: bool) -> Pod {
    pod(
        uid,
        json!({"hostNetwork": host_network, "containers": [{"name": "c", "ports": [port]}]}),
    )
}

fn reason(pod: &Pod, others: &[&Pod], max_pods: usize, refusals: &[String]) -> String {
    let ctx = AdmissionContext {
        node_name: "n1",
        max_pods,
        refusals,
    };
    match admit(pod, others, &ctx) {
        AdmissionDecision::Admitted => "Admitted".to_owned(),
        AdmissionDecision::Rejected { reason, message } => {
            assert!(!message.is_empty());
            reason
        }
    }
}

#[test]
fn host_ports_conflict_by_protocol_address_and_number() {
    let base = json!({"containerPort": 80, "hostPort": 80});
    for (first, second, host_network, want) in [
        (base.clone(), base.clone(), false, "NodePorts"),
        (
            base.clone(),
            json!({"containerPort": 80, "hostPort": 81}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}),
            false,
            "NodePorts",
        ),
        (
            json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"}),
            json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80}),
            false,
            "Admitted",
        ),
        (
            base.clone(),
            json!({"containerPort": 80}),
            true,
            "NodePorts",
        ),
    ] {
        let one = with_port("1", first.clone(), false);
        let two = with_port("2", second.clone(), host_network);
        assert_eq!(reason(&two, &[&one], 10, &[]), want, "{first} {second}");
    }
}

#[test]
fn a_pod_does_not_compete_with_itself() {
    let one = with_port("1", json!({"containerPort": 80, "hostPort": 80}), false);
    assert_eq!(reason(&one, &[&one], 1, &[]), "Admitted");
}

#[test]
fn unsupported_fields_and_other_nodes_are_refused() {
    let one = pod("1", json!({"containers": []}));
    assert_eq!(
        reason(&one, &[], 1, &["spec.initContainers".to_owned()]),
        "UnsupportedField"
    );
    let elsewhere = pod("2", json!({"containers": [], "nodeName": "n2"}));
    assert_eq!(reason(&elsewhere, &[], 1, &[]), "NodeName");
    let here = pod("3", json!({"containers": [], "nodeName": "n1"}));
    assert_eq!(reason(&here, &[], 1, &[]), "Admitted");
}

#[test]
fn a_full_node_and_a_taken_name_refuse() {
    let one = pod("1", json!({"containers": []}));
    let mut two = pod("2", json!({"containers": []}));
    assert_eq!(reason(&two, &[&one], 1, &[]), "OutOfpods");
    two.metadata.name = one.metadata.name.clone();
    assert_eq!(reason(&two, &[&one], 10, &[]), "DuplicateName");
    let mut leaving = one.clone();
    leaving.metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    assert_eq!(reason(&two, &[&leaving], 10, &[]), "Admitted");
}

#[test]
fn allocation_is_requests_over_limits() {
    let one = pod(
        "1",
        json!({"containers": [
            {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "100m"}}},
            {"name": "b"},
        ]}),
    );
    let of = allocated(&one);
    assert_eq!(of["a"]["cpu"], "100m");
    assert_eq!(of["a"]["memory"], "1Gi");
    assert!(of["b"].is_empty());
}

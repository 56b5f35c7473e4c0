use serde_json::{Value, json};

use super::Table;

fn node() -> Value {
    json!({
        "metadata": {"name": "n1", "labels": {"kubernetes.io/hostname": "n1"}},
        "spec": {
            "podCIDRs": ["10.0.0.0/24", "fd00::/64"], "providerID": "cloud://1",
            "taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}, {"key": "a", "effect": "NoExecute"}],
        },
        "status": {
            "capacity": {"cpu": "1500m", "memory": "1Gi", "pods": "110", "example.com/gpu": "2"},
            "allocatable": {"cpu": "1", "memory": "1Gi", "pods": "110"},
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "10.0.0.1"}],
            "nodeInfo": {"swap": {"capacity": 1}},
            "declaredFeatures": ["A", "A/b", "B"],
        },
    })
}

#[test]
fn a_node_that_registers() {
    let table = Table {
        path: "v1 nodes",
        old: None,
        new: node(),
    };
    table.holds(&[
        (
            "a name",
            &[("/metadata/name", json!("n1.example.com"))],
            &[],
        ),
        (
            "a bad name",
            &[("/metadata/name", json!("n_1"))],
            &["metadata.name Invalid"],
        ),
        (
            "a namespace",
            &[("/metadata/namespace", json!("x"))],
            &["metadata.namespace Forbidden"],
        ),
        (
            "a host name that is no label",
            &[(
                "/metadata/labels/kubernetes.io~1hostname",
                json!("n".repeat(64)),
            )],
            &["metadata.labels Invalid"],
        ),
        (
            "a swap of nothing",
            &[("/status/nodeInfo/swap/capacity", json!(0))],
            &["metadata.nodeSwapStatus.capacity Invalid"],
        ),
        ("no swap", &[("/status/nodeInfo/swap", json!(null))], &[]),
        (
            "a negative resource",
            &[("/status/capacity/memory", json!("-1"))],
            &["status.capacity.memory Invalid"],
        ),
        (
            "half a pod",
            &[("/status/allocatable/pods", json!("500m"))],
            &["status.allocatable.pods Invalid"],
        ),
        (
            "half a device",
            &[("/status/capacity/example.com~1gpu", json!("500m"))],
            &["status.capacity.example.com/gpu Invalid"],
        ),
        (
            "no quantity",
            &[("/status/capacity/cpu", json!("many"))],
            &["status.capacity.cpu Invalid"],
        ),
        (
            "a network with bits of a host",
            &[("/spec/podCIDRs/0", json!("10.0.0.1/24"))],
            &["spec.podCIDRs[0] Invalid"],
        ),
        (
            "two networks of a family",
            &[("/spec/podCIDRs/1", json!("10.0.1.0/24"))],
            &["spec.podCIDRs Invalid"],
        ),
        (
            "a bad taint key",
            &[("/spec/taints/0/key", json!("a b"))],
            &["metadata.taints[0].key Invalid"],
        ),
        (
            "a bad taint value",
            &[("/spec/taints/0/value", json!("a b"))],
            &["metadata.taints[0].value Invalid"],
        ),
        (
            "no effect",
            &[("/spec/taints/0/effect", json!(null))],
            &["metadata.taints[0].effect Required"],
        ),
        (
            "another effect",
            &[("/spec/taints/0/effect", json!("Never"))],
            &["metadata.taints[0].effect NotSupported"],
        ),
        (
            "a taint twice",
            &[("/spec/taints/1/effect", json!("NoSchedule"))],
            &["metadata.taints[1] Duplicate"],
        ),
        (
            "features in disorder",
            &[("/status/declaredFeatures", json!(["B", "A"]))],
            &["status.declaredFeatures[1] Invalid"],
        ),
        (
            "a feature twice",
            &[("/status/declaredFeatures", json!(["A", "A"]))],
            &["status.declaredFeatures[1] Duplicate"],
        ),
        (
            "no feature's name",
            &[("/status/declaredFeatures", json!(["a-b"]))],
            &["status.declaredFeatures[0] Invalid"],
        ),
        // Of updates only.
        (
            "an address twice",
            &[("/status/addresses/1/type", json!("InternalIP"))],
            &[],
        ),
    ]);
}

#[test]
fn a_node_that_is_changed() {
    let table = Table {
        path: "v1 nodes",
        old: Some(node()),
        new: node(),
    };
    table.holds(&[
        ("cordoned", &[("/spec/unschedulable", json!(true))], &[]),
        (
            "a swap of nothing that is there already",
            &[
                ("old/status/nodeInfo/swap/capacity", json!(0)),
                ("/status/nodeInfo/swap/capacity", json!(0)),
            ],
            &["metadata.nodeSwapStatus.capacity Invalid"],
        ),
        (
            "another network",
            &[("/spec/podCIDRs/0", json!("10.0.1.0/24"))],
            &["spec.podCIDRs Forbidden"],
        ),
        (
            "its first network",
            &[("old/spec/podCIDRs", json!(null))],
            &[],
        ),
        (
            "another provider ID",
            &[("/spec/providerID", json!("cloud://2"))],
            &["spec.providerID Forbidden"],
        ),
        (
            "its first provider ID",
            &[("old/spec/providerID", json!(null))],
            &[],
        ),
        (
            "another external ID",
            &[("/spec/externalID", json!("x"))],
            &["spec.externalID Forbidden"],
        ),
        (
            "an address twice",
            &[("/status/addresses/1/type", json!("InternalIP"))],
            &["status.addresses[1] Duplicate"],
        ),
    ]);
}

#[test]
fn the_status_of_a_node() {
    let table = Table {
        path: "v1 nodes status",
        old: Some(node()),
        new: node(),
    };
    table.holds(&[
        (
            "a swap of nothing",
            &[("/status/nodeInfo/swap/capacity", json!(0))],
            &[],
        ),
        (
            "an address twice",
            &[("/status/addresses/1/type", json!("InternalIP"))],
            &["status.addresses[1] Duplicate"],
        ),
        (
            "half a pod",
            &[("/status/allocatable/pods", json!("0.5"))],
            &["status.allocatable.pods Invalid"],
        ),
        (
            "features in disorder",
            &[("/status/declaredFeatures", json!(["B", "A"]))],
            &["status.declaredFeatures[1] Invalid"],
        ),
        (
            "a bad annotation",
            &[("/metadata/annotations", json!({"a b": "c"}))],
            &["metadata.annotations Invalid"],
        ),
    ]);
}

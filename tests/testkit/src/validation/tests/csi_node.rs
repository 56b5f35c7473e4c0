use serde_json::{Value, json};

use super::Table;

fn csi_node() -> Value {
    json!({
        "metadata": {"name": "n1"},
        "spec": {"drivers": [
            {"name": "a.example.com", "nodeID": "1", "topologyKeys": ["a.example.com/zone"], "allocatable": {"count": 0}},
            {"name": "b.example.com", "nodeID": "1"},
        ]},
    })
}

#[test]
fn a_csi_node_that_is_made() {
    let table = Table {
        path: "storage.k8s.io csinodes",
        old: None,
        new: csi_node(),
    };
    table.holds(&[
        ("no drivers", &[("/spec/drivers", json!([]))], &[]),
        (
            "a bad name",
            &[("/spec/drivers/0/name", json!("A"))],
            &["spec.drivers[0].name Invalid"],
        ),
        (
            "a driver twice",
            &[("/spec/drivers/1/name", json!("a.example.com"))],
            &["spec.drivers[1].name Duplicate"],
        ),
        (
            "no ID",
            &[("/spec/drivers/0/nodeID", json!(""))],
            &["spec.drivers[0].nodeID Required"],
        ),
        (
            "an ID",
            &[("/spec/drivers/0/nodeID", json!("x".repeat(256)))],
            &[],
        ),
        (
            "a long ID",
            &[("/spec/drivers/0/nodeID", json!("x".repeat(257)))],
            &["spec.drivers[0].nodeID Invalid"],
        ),
        (
            "a negative count",
            &[("/spec/drivers/0/allocatable/count", json!(-1))],
            &["spec.drivers[0].allocatable.count Invalid"],
        ),
        (
            "a bad key",
            &[("/spec/drivers/0/topologyKeys/0", json!("a b"))],
            &["spec.drivers[0] Invalid"],
        ),
        (
            "a key twice",
            &[(
                "/spec/drivers/0/topologyKeys/1",
                json!("a.example.com/zone"),
            )],
            &["spec.drivers[0] Duplicate"],
        ),
        (
            "an empty key",
            &[("/spec/drivers/0/topologyKeys/0", json!(""))],
            &["spec.drivers[0] Required", "spec.drivers[0] Invalid"],
        ),
    ]);
}

#[test]
fn a_csi_node_that_is_changed() {
    let table = Table {
        path: "storage.k8s.io csinodes",
        old: Some(csi_node()),
        new: csi_node(),
    };
    table.holds(&[
        (
            "another ID",
            &[("/spec/drivers/0/nodeID", json!("2"))],
            &["spec.drivers Invalid"],
        ),
        (
            "another topology",
            &[(
                "/spec/drivers/0/topologyKeys",
                json!(["a.example.com/rack"]),
            )],
            &["spec.drivers Invalid"],
        ),
        (
            "another count",
            &[("/spec/drivers/0/allocatable/count", json!(9))],
            &[],
        ),
        ("one driver less", &[("/spec/drivers", json!([]))], &[]),
        (
            "no ID",
            &[("/spec/drivers/1/nodeID", json!(""))],
            &["spec.drivers[1].nodeID Required", "spec.drivers Invalid"],
        ),
    ]);
}

use serde_json::json;

use super::Table;

#[test]
fn metadata_of_any_object() {
    let lease = Table {
        path: "coordination.k8s.io leases",
        old: None,
        new: json!({
            "metadata": {
                "name": "n1", "namespace": "kube-node-lease",
                "labels": {"example.com/a": "b"}, "annotations": {"example.com/Any": "any text / at all"},
                "finalizers": ["example.com/hold"],
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u", "controller": true}],
            },
            "spec": {},
        }),
    };
    let second =
        json!({"apiVersion": "apps/v1", "kind": "X", "name": "x", "uid": "v", "controller": true});
    lease.holds(&[
        (
            "no name",
            &[("/metadata/name", json!(null))],
            &["metadata.name Required"],
        ),
        (
            "a bad name",
            &[("/metadata/name", json!("N1"))],
            &["metadata.name Invalid"],
        ),
        (
            "no namespace",
            &[("/metadata/namespace", json!(null))],
            &["metadata.namespace Required"],
        ),
        (
            "a bad namespace",
            &[("/metadata/namespace", json!("a.b"))],
            &["metadata.namespace Invalid"],
        ),
        (
            "a bad label key",
            &[("/metadata/labels/a b", json!("c"))],
            &["metadata.labels Invalid"],
        ),
        (
            "a bad label value",
            &[("/metadata/labels/a", json!("b c"))],
            &["metadata.labels Invalid"],
        ),
        (
            "an empty label value",
            &[("/metadata/labels/a", json!(""))],
            &[],
        ),
        (
            "a bad annotation key",
            &[("/metadata/annotations/a b", json!("c"))],
            &["metadata.annotations Invalid"],
        ),
        (
            "annotations of 256 KiB",
            &[(
                "/metadata/annotations",
                json!({"a": "x".repeat(256 * 1024 - 1)}),
            )],
            &[],
        ),
        (
            "annotations of more",
            &[(
                "/metadata/annotations",
                json!({"a": "x".repeat(256 * 1024)}),
            )],
            &["metadata.annotations TooLong"],
        ),
        (
            "a bad finalizer",
            &[("/metadata/finalizers/0", json!("a b"))],
            &["metadata.finalizers Invalid"],
        ),
        (
            "an owner without a UID",
            &[("/metadata/ownerReferences/0/uid", json!(""))],
            &["metadata.ownerReferences.uid Invalid"],
        ),
        (
            "an owner without a version",
            &[("/metadata/ownerReferences/0/apiVersion", json!(""))],
            &["metadata.ownerReferences.apiVersion Invalid"],
        ),
        (
            "an event as owner",
            &[("/metadata/ownerReferences/0/kind", json!("Event"))],
            &["metadata.ownerReferences Invalid"],
        ),
        (
            "two controllers",
            &[("/metadata/ownerReferences/1", second)],
            &["metadata.ownerReferences Invalid"],
        ),
    ]);
}

#[test]
fn metadata_of_an_update() {
    let metadata = json!({
        "name": "n1", "namespace": "kube-node-lease", "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"],
    });
    let lease = Table {
        path: "coordination.k8s.io leases",
        old: Some(json!({"metadata": metadata, "spec": {}})),
        new: json!({"metadata": metadata, "spec": {}}),
    };
    lease.holds(&[
        (
            "another finalizer while it goes",
            &[("/metadata/finalizers/1", json!("c/d"))],
            &["metadata.finalizers Forbidden"],
        ),
        ("one less", &[("/metadata/finalizers", json!(null))], &[]),
        (
            "another finalizer while it stays",
            &[
                ("/metadata/finalizers/1", json!("c/d")),
                ("old/metadata/deletionTimestamp", json!(null)),
            ],
            &[],
        ),
        (
            "a bad label",
            &[("/metadata/labels", json!({"a b": "c"}))],
            &["metadata.labels Invalid"],
        ),
    ]);
}

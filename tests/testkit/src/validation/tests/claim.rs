use serde_json::json;

use super::Table;

#[test]
fn the_status_of_a_claim() {
    let claim = json!({
        "metadata": {"name": "data", "namespace": "shop"},
        "spec": {"accessModes": ["ReadWriteOnce"]},
        "status": {
            "capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": "NodeResizeInProgress"},
        },
    });
    let table = Table {
        path: "v1 persistentvolumeclaims status",
        old: Some(claim.clone()),
        new: claim,
    };
    table.holds(&[
        (
            "grown",
            &[
                ("/status/capacity/storage", json!("2Gi")),
                ("/status/allocatedResourceStatuses", json!(null)),
            ],
            &[],
        ),
        (
            "a negative size",
            &[("/status/capacity/storage", json!("-1"))],
            &["status.capacity[storage] Invalid"],
        ),
        (
            "no size",
            &[("/status/capacity/storage", json!("big"))],
            &["status.capacity[storage] Invalid"],
        ),
        (
            "another step",
            &[(
                "/status/allocatedResourceStatuses/storage",
                json!("Growing"),
            )],
            &["status.allocatedResourceStatuses NotSupported"],
        ),
        (
            "of another resource",
            &[(
                "/status/allocatedResourceStatuses/cpu",
                json!("NodeResizePending"),
            )],
            &["status.allocatedResourceStatuses NotSupported"],
        ),
        (
            "of a resource of others",
            &[(
                "/status/allocatedResourceStatuses/example.com~1iops",
                json!("NodeResizePending"),
            )],
            &[],
        ),
        (
            "of no resource's name",
            &[("/status/allocatedResources/a b", json!("1"))],
            &["status.allocatedResources Invalid"],
        ),
        (
            "without access modes",
            &[("/spec/accessModes", json!([]))],
            &["Spec.accessModes Required"],
        ),
    ]);
}

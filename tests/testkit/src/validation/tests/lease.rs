use serde_json::json;

use super::Table;

#[test]
fn a_lease_that_is_made_and_renewed() {
    let lease = json!({
        "metadata": {"name": "n1", "namespace": "kube-node-lease"},
        "spec": {"holderIdentity": "n1", "leaseDurationSeconds": 40, "leaseTransitions": 0},
    });
    for old in [None, Some(lease.clone())] {
        let table = Table {
            path: "coordination.k8s.io leases",
            old,
            new: lease.clone(),
        };
        table.holds(&[
            (
                "no duration",
                &[("/spec/leaseDurationSeconds", json!(null))],
                &[],
            ),
            (
                "a duration of nothing",
                &[("/spec/leaseDurationSeconds", json!(0))],
                &["spec.leaseDurationSeconds Invalid"],
            ),
            (
                "transitions",
                &[("/spec/leaseTransitions", json!(-1))],
                &["spec.leaseTransitions Invalid"],
            ),
            (
                "a strategy",
                &[("/spec/strategy", json!("OldestEmulationVersion"))],
                &[],
            ),
            (
                "a strategy of others",
                &[("/spec/strategy", json!("example.com/mine"))],
                &[],
            ),
            (
                "a bad one of others",
                &[("/spec/strategy", json!("example.com/a b"))],
                &["spec.strategy.strategy Invalid"],
            ),
            (
                "another strategy",
                &[("/spec/strategy", json!("Newest"))],
                &["spec.strategy.strategy NotSupported"],
            ),
            (
                "a preference without a strategy",
                &[("/spec/preferredHolder", json!("n2"))],
                &["spec.preferredHolder Forbidden"],
            ),
        ]);
    }
}

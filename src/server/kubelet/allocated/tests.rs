//! Pods as they are allocated, as a client reads them.

use serde_json::{Value, json};

use super::super::testkit::TestNode;
use super::*;
use crate::core::admission;
use crate::core::state::Transaction;

fn pod(name: &str, uid: &str, cpu: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "ns", "uid": uid},
        "spec": {
            "resources": {"limits": {"cpu": cpu}},
            "containers": [{
                "name": "main", "image": "example.com/app:1", "resources": {"requests": {"cpu": cpu}},
            }],
        },
        "status": {"phase": "Running"},
    })
}

/// Admits a pod with these resources.
async fn admit(node: &TestNode, pod: Value, decision: AdmissionDecision) {
    let pod: Pod = serde_json::from_value(pod).unwrap();
    let record = AdmissionRecord {
        decision,
        allocated: admission::allocated(&pod),
        at: node.node.clock.now(),
    };
    let transaction = Transaction::new().put(pod.uid().as_str(), record);
    node.node.store.commit(transaction).await.unwrap();
}

fn cpus(pod: &Value) -> (&Value, &Value) {
    let spec = &pod["spec"];
    let main = &spec["containers"][0];
    (
        &spec["resources"]["limits"]["cpu"],
        &main["resources"]["requests"]["cpu"],
    )
}

#[tokio::test]
async fn pods_are_shown_as_allocated_without_their_statuses() {
    let node = TestNode::new();
    for (name, uid, had, wants) in [("a", "u1", "1", "2"), ("b", "u2", "1", "1")] {
        admit(&node, pod(name, uid, had), AdmissionDecision::Admitted).await;
        node.want(pod(name, uid, wants));
    }
    let refused = AdmissionDecision::Rejected {
        reason: "OutOfcpu".to_owned(),
        message: "full".to_owned(),
    };
    admit(&node, pod("c", "u3", "9"), refused).await;
    node.want(pod("c", "u3", "9"));
    node.want(pod("d", "u4", "1"));
    let served = node.serve();
    let answer = served.get("/allocatedPods").await;
    assert_eq!(answer.status, 200);
    let list = answer.json();
    assert_eq!(list["kind"], "PodList");
    let items = list["items"].as_array().unwrap();
    let names: Vec<_> = items.iter().map(|p| &p["metadata"]["name"]).collect();
    assert_eq!(names, ["a", "b"], "neither refused nor undecided pods");
    for item in items {
        assert_eq!(cpus(item), (&json!("1"), &json!("1")));
        assert!(item.get("status").is_none(), "{item}");
    }
    for path in ["/allocatedPods/u1", "/allocatedPods/ns/a"] {
        let answer = served.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        let one = answer.json();
        assert_eq!(one["kind"], "Pod", "{path}");
        assert_eq!(one["metadata"]["uid"], "u1", "{path}");
        assert_eq!(cpus(&one), (&json!("1"), &json!("1")), "{path}");
        assert!(one.get("status").is_none(), "{path}");
    }
    for path in [
        "/allocatedPods/u3",
        "/allocatedPods/u4",
        "/allocatedPods/u9",
        "/allocatedPods/ns/c",
        "/allocatedPods/other/a",
    ] {
        assert_eq!(served.get(path).await.status, 404, "{path}");
    }
}

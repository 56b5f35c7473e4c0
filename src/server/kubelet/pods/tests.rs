//! The two lists, as a client reads them.

use k8s_openapi::List;
use serde_json::json;

use super::super::testkit::TestNode;
use super::*;
use crate::core::state::Transaction;
use crate::types::Json as Stored;

fn pod(name: &str, uid: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "main", "image": "example.com/app:1"}]},
        "status": {"phase": "Pending"},
    })
}

async fn record(node: &TestNode, uid: &str, phase: &str) {
    let record = StatusRecord {
        name: String::new(),
        namespace: String::new(),
        status: Stored::new(PodStatus {
            phase: Some(phase.to_owned()),
            ..PodStatus::default()
        }),
        version: 1,
        acknowledged: 0,
        at: node.node.clock.now(),
        finished: false,
    };
    let transaction = Transaction::new().put(uid, record);
    node.node.store.commit(transaction).await.unwrap();
}

#[tokio::test]
async fn pods_are_not_listed_before_those_of_the_last_run_are_back() {
    let node = TestNode::new();
    node.node.restored.store(false, Ordering::Release);
    let answer = node.serve().get("/pods").await;
    assert_eq!(answer.status, 503);
    assert!(
        answer.text().contains("not resumed yet"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn wanted_pods_have_their_newest_status_and_static_ones_their_annotations() {
    let node = TestNode::new();
    node.want(pod("b", "u2"));
    let mut file = pod("a", "u1");
    file["metadata"]["annotations"] =
        json!({"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "u1"});
    node.want(file);
    let mut mirror = pod("a", "m1");
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "u1"});
    node.want(mirror);
    record(&node, "u1", "Running").await;
    let answer = node.serve().get("/pods").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["content-type"], "application/json");
    let list = answer.json();
    assert_eq!(list["kind"], "PodList");
    assert_eq!(list["apiVersion"], "v1");
    let items = list["items"].as_array().unwrap();
    let seen: Vec<_> = items
        .iter()
        .map(|p| {
            (
                p["metadata"]["name"].as_str(),
                p["status"]["phase"].as_str(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [(Some("a"), Some("Running")), (Some("b"), Some("Pending"))],
        "recorded status, else the pod's own; no mirror pods"
    );
    let annotations = &items[0]["metadata"]["annotations"];
    assert_eq!(annotations["kubernetes.io/config.source"], "file");
    assert!(
        items[0].get("kind").is_none(),
        "items of a list have no kind"
    );
}

#[tokio::test]
async fn a_full_node_is_one_list_in_many_pieces() {
    let node = TestNode::new();
    assert_eq!(
        serde_json::from_slice::<List<Pod>>(&node_list(&node))
            .unwrap()
            .items
            .len(),
        0
    );
    for number in 0..500 {
        node.want(pod(&format!("pod-{number:03}"), &format!("uid-{number}")));
    }
    let items = |node: &TestNode| -> Vec<Item> {
        let pods = node.node.pods.all().into_iter();
        pods.map(|pod| Item { pod, status: None }).collect()
    };
    let pieces: Vec<_> = PodList::new(items(&node)).map(Result::unwrap).collect();
    assert!(pieces.len() > 1, "a piece has {PIECE} bytes");
    assert!(pieces.iter().all(|p| p.len() < 2 * PIECE));
    let answer = node.serve().get("/pods").await;
    let list: List<Pod> = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(list.items.len(), 500);
    assert_eq!(list.items[499].metadata.name.as_deref(), Some("pod-499"));
}

fn node_list(_: &TestNode) -> Vec<u8> {
    let pieces: Vec<_> = PodList::new(Vec::new()).map(Result::unwrap).collect();
    pieces.concat()
}

#[tokio::test]
async fn running_pods_are_what_the_runtime_runs() {
    let node = TestNode::new();
    let ids = node.run("ns", "a", "u1", &["main", "side"]).await;
    node.run("ns", "empty", "u2", &[]).await;
    assert!(node.cri.exit(&ids[1], 0), "the side container has ended");
    node.node.restored.store(false, Ordering::Release);
    let answer = node.serve().get("/runningpods/").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let list = answer.json();
    assert_eq!(list["kind"], "PodList");
    assert_eq!(
        list["items"][0],
        json!({
            "metadata": {"name": "a", "namespace": "ns", "uid": "u1"},
            "spec": {"containers": [
                {"name": "main", "image": "example.com/app:1", "resources": {}}
            ]},
            "status": {},
        })
    );
    assert_eq!(list["items"][1]["metadata"]["name"], "empty");
    let typed: List<Pod> = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(typed.items.len(), 2);
}

#[tokio::test]
async fn a_runtime_that_fails_is_told() {
    let node = TestNode::new();
    let fault =
        holdfast_testkit::fake_cri::Fault::Error(tonic::Code::Internal, "broken".to_owned());
    node.cri.fail_always("list_podsandbox", fault);
    let answer = node.serve().get("/runningpods/").await;
    assert_eq!(answer.status, 500);
    assert!(answer.text().contains("broken"), "{}", answer.text());
}

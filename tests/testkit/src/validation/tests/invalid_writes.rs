//! A write that a current server refuses fails the test that makes it.

use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::fake_api::FakeApi;

fn status_of<T: std::fmt::Debug>(result: kube::Result<T>) -> Value {
    match result {
        Err(kube::Error::Api(status)) => serde_json::to_value(status).unwrap(),
        other => panic!("no refusal: {other:?}"),
    }
}

async fn register_with_a_swap_of_nothing(api: &FakeApi) -> Value {
    let nodes: Api<Node> = Api::all(api.client_as_node("n1"));
    let node = json!({"metadata": {"name": "n1"}, "status": {"nodeInfo": {
        "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
        "kubeletVersion": "", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": "",
        "swap": {"capacity": 0},
    }}});
    let node = serde_json::from_value(node).unwrap();
    status_of(nodes.create(&PostParams::default(), &node).await)
}

#[tokio::test]
#[should_panic(
    expected = "metadata.nodeSwapStatus.capacity: Invalid value: 0: must be greater than zero"
)]
async fn a_test_that_makes_an_invalid_write_fails_at_its_end() {
    let api = FakeApi::new();
    register_with_a_swap_of_nothing(&api).await;
}

#[tokio::test]
async fn a_test_that_means_to_make_it_takes_it() {
    let api = FakeApi::new();
    let status = register_with_a_swap_of_nothing(&api).await;
    assert_eq!(status["code"], 422);
    assert_eq!(status["reason"], "Invalid");
    assert_eq!(
        status["details"]["causes"],
        json!([{
            "reason": "FieldValueInvalid", "message": "Invalid value: 0: must be greater than zero",
            "field": "metadata.nodeSwapStatus.capacity",
        }])
    );
    let taken = api.take_invalid_writes();
    assert_eq!(taken.len(), 1);
    assert!(taken[0].starts_with("create nodes"), "{taken:?}");
    assert_eq!(api.invalid_writes(), [""; 0]);
}

#[tokio::test]
async fn injected_refusals_and_other_conflicts_are_no_invalid_writes() {
    let api = FakeApi::new();
    api.fail_next(|request| request.kind == "nodes", 422, 1);
    register_with_a_swap_of_nothing(&api).await;
    assert_eq!(api.invalid_writes(), [""; 0]);
}

#[tokio::test]
async fn a_field_that_the_type_lacks_is_an_invalid_write() {
    let api = FakeApi::new();
    api.create_json(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default"},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "i"}]},
    }));
    let pods: Api<Pod> = Api::namespaced(api.client_as_node("n1"), "default");
    let patch = Patch::Strategic(json!({"status": {"phase": "Running", "phrase": "Running"}}));
    let refused = pods
        .patch_status("web", &PatchParams::default(), &patch)
        .await;
    assert_eq!(status_of(refused)["code"], 400);
    let taken = api.take_invalid_writes();
    assert!(
        taken[0].contains("unknown field \"status.phrase\""),
        "{taken:?}"
    );
}

#[tokio::test]
async fn a_review_of_nobody_is_an_invalid_write() {
    let api = FakeApi::new();
    let reviews: Api<SubjectAccessReview> = Api::all(api.client_as_node("n1"));
    let review = json!({"metadata": {}, "spec": {"resourceAttributes": {"verb": "get", "resource": "nodes"}}});
    let review = serde_json::from_value(review).unwrap();
    let refused = reviews.create(&PostParams::default(), &review).await;
    assert_eq!(status_of(refused)["code"], 422);
    assert_eq!(api.take_invalid_writes().len(), 1);
}

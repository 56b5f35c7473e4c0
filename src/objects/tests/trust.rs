//! Trust bundles: watched as long as a pod mounts any, in whichever version there is.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::fake::Mode;
use super::{World, pod, settle};
use crate::objects::{ObjectChange, ObjectError};
use crate::types::PodUid;

const BETA: &str = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";

fn bundle(name: &str, text: &str) -> Value {
    json!({
        "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": name, "labels": {"set": "live"}},
        "spec": {"signerName": "s/x", "trustBundle": text},
    })
}

fn trusting(uid: &str) -> Pod {
    pod(
        uid,
        json!({"volumes": [{"name": "v", "projected": {"sources": [
            {"clusterTrustBundle": {"name": "a", "path": "ca.pem"}}]}}]}),
    )
}

fn changed() -> ObjectChange {
    ObjectChange {
        kind: "ClusterTrustBundle",
        namespace: String::new(),
        name: String::new(),
    }
}

#[tokio::test(start_paused = true)]
async fn bundles_are_watched_recorded_and_told_as_long_as_a_pod_mounts_any() {
    let world = World::new();
    world.fake.trust_version(Some("v1beta1"));
    world.fake.put(BETA, bundle("a", "one"));
    let life = world.start();
    let objects = &life.objects;
    objects.register(&pod("plain", json!({})));
    settle().await;
    let asked = world.fake.requests();
    assert!(
        !asked.iter().any(|line| line.contains("certificates")),
        "{asked:?}"
    );

    let mut changes = objects.changes();
    objects.register(&trusting("u"));
    objects.register(&trusting("v"));
    let found = objects.trust_bundles().await.unwrap();
    assert_eq!(
        (found["a"].signer.as_str(), found["a"].pem.as_str()),
        ("s/x", "one")
    );
    assert_eq!(found["a"].labels["set"], "live");
    settle().await;
    assert!(changes.try_recv().is_err(), "the first answer is no change");
    assert_eq!(
        world
            .fake
            .watches()
            .iter()
            .filter(|w| w.contains(BETA))
            .count(),
        1
    );

    world.fake.put(BETA, bundle("b", "two"));
    assert_eq!(changes.recv().await.unwrap(), changed());
    let mut about = objects.pods_referring(&changed());
    about.sort();
    assert_eq!(about, [PodUid::new("u"), PodUid::new("v")]);
    assert_eq!(objects.trust_bundles().await.unwrap().len(), 2);
    world.fake.delete(BETA, "a");
    assert_eq!(changes.recv().await.unwrap(), changed());
    settle().await;
    assert!(world.record("clustertrustbundles//a").is_none());
    assert!(world.record("clustertrustbundles//b").is_some());

    objects.unregister(&PodUid::new("u"));
    settle().await;
    assert!(world.record("clustertrustbundles//b").is_some());
    objects.unregister(&PodUid::new("v"));
    settle().await;
    assert!(world.record("clustertrustbundles//b").is_none());
    assert!(!world.fake.watches().iter().any(|w| w.contains(BETA)));
}

#[tokio::test(start_paused = true)]
async fn a_start_without_the_api_server_has_the_bundles_on_record() {
    let mut world = World::new();
    world.fake.trust_version(Some("v1beta1"));
    world.fake.put(BETA, bundle("a", "one"));
    let life = world.start();
    life.objects.register(&trusting("u"));
    life.objects.trust_bundles().await.unwrap();
    settle().await;
    life.end().await;
    world.fake.set(Mode::Down);
    world.fake.reconnect();
    let life = world.start();
    life.objects.register(&trusting("u"));
    life.objects.sweep();
    settle().await;
    assert_eq!(life.objects.trust_bundles().await.unwrap()["a"].pem, "one");
    // Nobody mounts them any more.
    life.objects.unregister(&PodUid::new("u"));
    life.objects.sweep();
    settle().await;
    assert!(world.record("clustertrustbundles//a").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_server_without_them_is_named_and_asked_again_later() {
    let world = World::new();
    world.fake.put(BETA, bundle("a", "one"));
    let life = world.start();
    life.objects.register(&trusting("u"));
    let mut changes = life.objects.changes();
    let error = life.objects.trust_bundles().await.unwrap_err();
    assert!(matches!(error, ObjectError::Refused { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("does not serve clustertrustbundles"),
        "{text}"
    );
    assert!(text.contains("v1beta1"), "{text}");
    let asked = world.fake.requests();
    let versions =
        ["v1", "v1beta1", "v1alpha1"].map(|v| format!("LIST /apis/certificates.k8s.io/{v}"));
    let asked: Vec<_> = asked
        .into_iter()
        .filter(|line| line.contains("certificates"))
        .collect();
    assert_eq!(asked, versions, "each version once");
    // The cluster is upgraded: whoever was refused is told.
    world.fake.trust_version(Some("v1beta1"));
    let told = tokio::time::timeout(Duration::from_secs(301), changes.recv()).await;
    assert_eq!(told.unwrap().unwrap(), changed());
    assert_eq!(life.objects.trust_bundles().await.unwrap().len(), 1);
}

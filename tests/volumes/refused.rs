//! What cannot be had: the pod waits, its event names the volume and the reason, and it goes on when the reason goes.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::features::{Feature, Scene};
use crate::seen::{deleted, said};

pub const FEATURES: &[Feature] = &[
    ("secret-missing", secret_missing),
    ("secret-too-large", secret_too_large),
    ("empty-dir-full", empty_dir_full),
    ("csi-garbled", csi_garbled),
    ("csi-mute", csi_mute),
];

fn secret_missing(cluster: &Scene) {
    let message = cluster.wait_event(
        "secret-missing",
        "FailedMount",
        "secret \"later\" not found",
    );
    assert!(message.contains("volume \"v\""), "{message}");
    assert_eq!(cluster.pod("secret-missing")["status"]["phase"], "Pending");
    cluster
        .create::<Secret>(json!({"metadata": {"name": "later"}, "stringData": {"word": "come"}}));
    said(cluster, "secret-missing", "main", &["come"]);
}

fn secret_too_large(cluster: &Scene) {
    let secret = |bytes: usize| {
        let data = ByteString(vec![b'x'; bytes]);
        json!({"metadata": {"name": "large"}, "data": {"much": data}})
    };
    // Thirteen files of it are more than the pod has memory for.
    cluster.create::<Secret>(secret(1_000_000));
    let words = "No space left on device";
    let message = cluster.wait_event("secret-too-large", "FailedMount", words);
    assert!(message.contains("volume \"v\""), "{message}");
    assert_eq!(
        cluster.pod("secret-too-large")["status"]["phase"],
        "Pending"
    );
    let (secrets, parameters) = (cluster.api::<Secret>(), PatchParams::default());
    let smaller = Patch::Merge(secret(1_000));
    let patched = cluster.run(secrets.patch("large", &parameters, &smaller));
    patched.expect("patch a secret");
    said(cluster, "secret-too-large", "main", &["files=13 of 1000"]);
}

fn empty_dir_full(cluster: &Scene) {
    let parts = ["size=1024k", "No space left on device", "still here"];
    said(cluster, "empty-dir-full", "main", &parts);
    said(cluster, "empty-dir-full", "other", &["other=goes on"]);
    let pod = cluster.pod("empty-dir-full");
    assert_eq!(pod["status"]["phase"], "Running");
    for container in pod["status"]["containerStatuses"].as_array().unwrap() {
        assert_eq!(container["restartCount"], 0, "{container}");
    }
}

fn csi_garbled(cluster: &Scene) {
    let message = cluster.wait_event("csi-garbled", "FailedMount", "NodeStageVolume");
    let volume = format!("volume \"{}-csi-garbled\"", cluster.namespace);
    assert!(message.contains(&volume), "{message}");
    println!("a driver that answers what is no message: {message}");
    // By itself: the driver's third answer is a good one.
    said(cluster, "csi-garbled", "main", &["word"]);
}

fn csi_mute(cluster: &Scene) {
    let message = cluster.wait_event("csi-mute", "WaitingForVolumes", "");
    println!("a driver that does not answer: {message}");
    assert!(message.contains("v (mount_device for "), "{message}");
    assert_eq!(cluster.pod("csi-mute")["status"]["phase"], "Pending");
    // One volume waits, and not the driver's other ones.
    said(cluster, "csi-mute-other", "main", &["word"]);
    cluster.driver("mute.").restart().expect("start it again");
    said(cluster, "csi-mute", "main", &["word"]);
    deleted(cluster, "csi-mute");
}

//! Certificates of pods, from the request to the files, through the whole agent and its restarts.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use holdfast::core::state::ObjectRecord;
use holdfast::types::Clock;
use holdfast_testkit::fake_api::Request;
use holdfast_testkit::fake_cri::Behaviour;
use holdfast_testkit::pod_signer::PodSigner;
use serde_json::Value;

use crate::api_restart::cluster;
use crate::restart::assert_nothing_wrong;
use crate::world::World;

const SPEC: &str = r#"{
    "volumes": [{"name": "cert", "projected": {"sources": [
        {"podCertificate": {
            "signerName": "example.com/signer", "keyType": "ECDSAP256", "maxExpirationSeconds": 3600,
            "credentialBundlePath": "bundle.pem", "keyPath": "key.pem", "certificateChainPath": "chain.pem"}}]}}],
    "securityContext": {"fsGroup": 54321},
    "containers": [{
        "name": "main", "image": "holdfast.local/busybox:1", "command": ["sh"],
        "volumeMounts": [{"name": "cert", "mountPath": "/cert"}]
    }]
}"#;
const MINUTE: i64 = 60_000;

fn file(w: &World, uid: &str, name: &str) -> PathBuf {
    let volumes = w.dir.path().join("root/pods").join(uid).join("volumes");
    volumes.join("kubernetes.io~projected/cert").join(name)
}

fn content(w: &World, uid: &str, name: &str) -> String {
    std::fs::read_to_string(file(w, uid, name)).unwrap_or_default()
}

fn creates(request: &Request) -> bool {
    request.verb == "create" && request.kind == "podcertificaterequests"
}

fn requests(w: &World) -> Vec<Value> {
    w.api().list_json("podcertificaterequests", "default")
}

async fn waiting(w: &World) -> Value {
    w.until("a certificate is requested", 60, |w| {
        !PodSigner::waiting(w.api()).is_empty()
    })
    .await;
    PodSigner::waiting(w.api()).remove(0)
}

/// Issues for an hour, to be replaced after so many minutes.
fn issue(w: &World, signer: &PodSigner, request: &Value, minutes: i64) -> String {
    let now = w.clock.now().wall_ms;
    let times = (now + minutes * MINUTE, now + 60 * MINUTE);
    signer.issue(w.api(), request, times)
}

/// The pod has its files, and they belong together.
fn check_files(w: &World, uid: &str, chain: &str) {
    let key = content(w, uid, "key.pem");
    assert!(key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!(content(w, uid, "chain.pem"), chain);
    assert_eq!(content(w, uid, "bundle.pem"), format!("{key}{chain}"));
    for name in ["key.pem", "chain.pem", "bundle.pem"] {
        let found = std::fs::metadata(file(w, uid, name)).unwrap();
        assert_eq!(found.mode() & 0o777, 0o640, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_waits_for_its_certificate_through_restarts_and_then_runs() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    let signer = PodSigner::new();
    w.start().await;
    w.joined().await;
    let uid = w.create("web", SPEC);
    let request = waiting(&w).await;
    w.pass(60).await;
    assert!(w.running("web").is_empty(), "it waits");
    w.restart().await;
    w.pass(60).await;
    assert!(w.running("web").is_empty(), "it waits");
    assert_eq!(requests(&w).len(), 1, "the restart asks nobody again");
    let chain = issue(&w, &signer, &request, 30);
    w.until("it runs", 120, |w| w.running("web").len() == 1)
        .await;
    check_files(&w, &uid, &chain);

    // Without a change, nothing is asked and nothing is written.
    let before = std::fs::metadata(file(&w, &uid, "key.pem")).unwrap();
    let asked = w.api().count(creates);
    w.restart().await;
    w.pass(300).await;
    assert_eq!(w.api().count(creates), asked);
    let after = std::fs::metadata(file(&w, &uid, "key.pem")).unwrap();
    assert_eq!(before.ino(), after.ino());
    assert_eq!(w.starts("web").len(), 1);

    // Replaced in time, under the running container.
    w.pass(40 * 60).await;
    let next = waiting(&w).await;
    check_files(&w, &uid, &chain);
    let renewed = issue(&w, &signer, &next, 30);
    w.until("its files are new", 180, |w| {
        content(w, &uid, "chain.pem") == renewed
    })
    .await;
    check_files(&w, &uid, &renewed);
    assert_eq!(w.starts("web").len(), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_reboot_without_the_api_server_starts_a_pod_with_the_certificate_on_record() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    let signer = PodSigner::new();
    w.start().await;
    w.joined().await;
    let uid = w.create("web", SPEC);
    let request = waiting(&w).await;
    let chain = issue(&w, &signer, &request, 30);
    w.until("it runs", 60, |w| {
        w.running("web").len() == 1 && w.shown_phase("web") == "Running"
    })
    .await;
    w.pass(60).await;
    let key = content(&w, &uid, "key.pem");
    w.set_api(false);
    w.reboot().await;
    w.start().await;
    w.until("it runs again", 120, |w| w.running("web").len() == 1)
        .await;
    check_files(&w, &uid, &chain);
    assert_eq!(content(&w, &uid, "key.pem"), key);
    assert_eq!(requests(&w).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_certificate_is_denied_says_so_and_takes_its_records_along() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.joined().await;
    w.create("web", SPEC);
    let request = waiting(&w).await;
    PodSigner::refuse(w.api(), &request, "Denied", "NotForYou");
    w.until("users are told", 120, |w| {
        let events = w.api().events_of("default", "web");
        let has = |reason: &str, text: &str| {
            events
                .iter()
                .any(|(_, found, message, _)| found == reason && message.contains(text))
        };
        has("Denied", "was denied, reason=\"NotForYou\"")
            && has("FailedMount", "permanently denied")
    })
    .await;
    assert!(w.running("web").is_empty());
    assert_eq!(requests(&w).len(), 1);
    let kept = |w: &World| {
        let state = w.state();
        state
            .with_prefix::<ObjectRecord>("podcertificates/")
            .count()
    };
    assert_eq!(kept(&w), 1);
    w.delete("web", Some(1));
    w.until("it is gone", 120, |w| w.shown("web").is_null())
        .await;
    w.until("its records are gone", 60, |w| kept(w) == 0).await;
}

//! What CSIDrivers and persistent volumes ask for: options, groups, tokens, claims of one pod.

use std::collections::BTreeMap;
use std::sync::Mutex;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use holdfast_testkit::csi::{Call, CsiDriver, Fault};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use crate::agent_process::eventually;
use crate::features::{Feature, Scene, driver_name};
use crate::seen::{deleted, said};
use crate::setup::Cluster;
use crate::torture::driver;

pub const FEATURES: &[Feature] = &[
    ("mount-options", mount_options),
    ("csi-tokens", csi_tokens),
    ("ephemeral", ephemeral),
    ("csi-fs-group", csi_fs_group),
    ("csi-sub-path", csi_sub_path),
    ("csi-read-only", csi_read_only),
];

const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// All drivers of the node, by what their names begin with.
pub fn start(cluster: &Cluster) -> BTreeMap<&'static str, Mutex<CsiDriver>> {
    let lives = json!(["Persistent", "Ephemeral"]);
    let tokens = json!([{"audience": "vault", "expirationSeconds": 700}]);
    let all = [
        (
            "",
            json!({"podInfoOnMount": true, "volumeLifecycleModes": lives}),
        ),
        (
            "file.",
            json!({"attachRequired": false, "fsGroupPolicy": "File",
                "tokenRequests": tokens, "requiresRepublish": true}),
        ),
        (
            "none.",
            json!({"attachRequired": false, "fsGroupPolicy": "None"}),
        ),
        (
            "mute.",
            json!({"attachRequired": false, "podInfoOnMount": true, "volumeLifecycleModes": lives}),
        ),
        ("garbled.", json!({"attachRequired": false})),
    ];
    let start = |(prefix, spec): (&'static str, Value)| {
        let name = format!("{prefix}{}", driver_name(cluster));
        (prefix, Mutex::new(driver(cluster, &name, spec)))
    };
    let mut drivers: BTreeMap<_, _> = all.into_iter().map(start).collect();
    for (prefix, rpc, times, fault) in [
        ("mute.", "NodeStageVolume", 1, Fault::Hang),
        ("garbled.", "NodeStageVolume", 2, Fault::Garbage),
    ] {
        let driver = drivers.get_mut(prefix).expect("it was started");
        let driver = driver.get_mut().expect("nobody has it");
        driver.inject(rpc, times, &fault).expect("a fault");
    }
    drivers
}

/// The calls of a driver that are about one volume of the test.
fn calls(cluster: &Scene, prefix: &str, rpc: &str, volume: &str) -> Vec<Call> {
    let volume = format!("{}-{volume}", cluster.namespace);
    let mut calls = cluster.driver(prefix).calls_of(rpc);
    calls.retain(|call| call.volume == volume);
    calls
}

fn mount_options(cluster: &Scene) {
    let parts = [
        "/csi noatime=1 noexec=1",
        "/csi refuses to execute",
        "/local noexec=1 nosuid=1",
        "/local refuses to execute",
    ];
    said(cluster, "mount-options", "main", &parts);
    for rpc in ["NodeStageVolume", "NodePublishVolume"] {
        let calls = calls(cluster, "", rpc, "mount-options");
        assert!(!calls.is_empty(), "{rpc}");
        for call in calls {
            assert_eq!(call.mount_flags, ["noatime", "noexec"], "{rpc}");
        }
    }
}

fn csi_tokens(cluster: &Scene) {
    said(cluster, "csi-tokens", "main", &["word"]);
    let published = || calls(cluster, "file.", "NodePublishVolume", "csi-tokens");
    let token_of = |call: &Call| -> Value {
        let told = call.volume_context.get(TOKENS);
        let told = told.unwrap_or_else(|| panic!("no token was told: {:?}", call.rpc));
        serde_json::from_str(told).expect("JSON")
    };
    let first = published();
    let told = token_of(first.first().expect("it was published"));
    let token = told["vault"]["token"].as_str().expect("a token");
    let payload = token.split('.').nth(1).expect("claims");
    let payload = URL_SAFE_NO_PAD.decode(payload).expect("base64");
    let claims: Value = serde_json::from_slice(&payload).expect("JSON");
    assert_eq!(claims["aud"], json!(["vault"]), "{claims}");
    assert_eq!(
        claims["kubernetes.io"]["pod"]["name"], "csi-tokens",
        "{claims}"
    );
    let expires = told["vault"]["expirationTimestamp"].as_str();
    let expires: jiff::Timestamp = expires.expect("a time").parse().expect("a time");
    // The server reads its clock twice, once for each.
    let claimed = claims["exp"].as_i64().expect("a time");
    assert!(
        (expires.as_second() - claimed).abs() <= 1,
        "{told} {claims}"
    );
    let staged = calls(cluster, "file.", "NodeStageVolume", "csi-tokens");
    assert!(!staged.is_empty());
    for call in staged {
        assert!(!call.volume_context.contains_key(TOKENS), "staged with it");
    }

    // Its pod is looked at again, and so is its volume.
    cluster.kubectl(&["annotate", "pod", "csi-tokens", "looked=again"]);
    eventually("the volume is published again", || {
        let now = published();
        let again = now.get(first.len()..).unwrap_or_default();
        match again.last() {
            Some(call) if call.outcome == "OK" => {
                assert!(token_of(call)["vault"]["token"].is_string());
                Ok(())
            }
            _ => Err(format!("{} and {} calls", first.len(), now.len())),
        }
    });
    let pod = cluster.pod("csi-tokens");
    let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
    assert_eq!(
        (restarts, &pod["status"]["phase"]),
        (&json!(0), &json!("Running"))
    );
    let store = cluster.dump(&["objects"]).to_string();
    assert!(!store.contains(token), "tokens are not shown");
}

fn ephemeral(cluster: &Scene) {
    said(cluster, "ephemeral", "main", &["word"]);
    let owner = {
        let claim = cluster.run(cluster.api::<PersistentVolumeClaim>().get("ephemeral-v"));
        let claim = serde_json::to_value(claim.expect("the pod's claim")).expect("JSON");
        claim["metadata"]["ownerReferences"][0]["uid"].clone()
    };
    assert_eq!(owner, cluster.pod("ephemeral")["metadata"]["uid"]);
    let words = format!(
        "PVC {ns}/ephemeral-taken-v was not created for pod {ns}/ephemeral-taken (pod is not owner)",
        ns = cluster.namespace
    );
    let message = cluster.wait_event("ephemeral-taken", "FailedMount", &words);
    assert!(message.contains("\"v\""), "{message}");
    assert_eq!(cluster.pod("ephemeral-taken")["status"]["phase"], "Pending");
    deleted(cluster, "ephemeral-taken");
    let stolen = calls(cluster, "", "NodeStageVolume", "ephemeral-taken");
    assert_eq!(stolen, [], "what belongs to another is not touched");
}

fn csi_fs_group(cluster: &Scene) {
    // One asks for it although its volume is shared and has no type, one for nothing although it could be.
    let parts = ["file=2000 0", "none=0 0", "groups=1000 2000"];
    said(cluster, "csi-fs-group", "main", &parts);
    for prefix in ["file.", "none."] {
        let volume = format!("{}csi-fs-group", prefix.replace('.', "-"));
        let staged = calls(cluster, prefix, "NodeStageVolume", &volume);
        let group = |call: &Call| call.mount_group.is_empty();
        assert!(!staged.is_empty() && staged.iter().all(group), "{staged:?}");
    }
}

fn csi_sub_path(cluster: &Scene) {
    let parts = [
        "part=one",
        "named=csi-sub-path",
        "whole=./deep/er/word ./of-csi-sub-path/word ",
    ];
    said(cluster, "csi-sub-path", "main", &parts);
    deleted(cluster, "csi-sub-path");
    let volume = format!("{}-csi-sub-path", cluster.namespace);
    let kept = cluster.driver("").volume_dir(&volume).join("deep/er/word");
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "one\n");
}

fn csi_read_only(cluster: &Scene) {
    said(cluster, "csi-read-only", "main", &["Read-only file system"]);
    let published = calls(cluster, "", "NodePublishVolume", "csi-read-only");
    assert!(!published.is_empty());
    assert!(published.iter().all(|call| call.readonly), "{published:?}");
    let volume = format!("{}-csi-read-only", cluster.namespace);
    let dir = cluster.driver("").volume_dir(&volume);
    let count = std::fs::read_dir(dir).unwrap().count();
    assert_eq!(count, 0, "nothing was written");
}

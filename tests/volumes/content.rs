//! Volumes whose files the agent writes.

use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::agent_process::eventually;
use crate::features::{Feature, Scene};
use crate::seen::{logs, said};
use crate::setup::Cluster;

pub const FEATURES: &[Feature] = &[
    ("config-map", config_map),
    ("config-map-missing", config_map_missing),
    ("config-map-missing-key", config_map_missing_key),
    ("config-map-update", config_map_update),
    ("config-map-immutable", config_map_immutable),
    ("secret", secret),
    ("secret-update", secret_update),
    ("downward-api", downward_api),
    ("projected", projected),
    ("token", token),
];

fn config_map(cluster: &Scene) {
    let parts = [
        "all=color raw size ",
        "color=blue size=9 raw=0001ff",
        "link=..data/color",
        "/all/color 644 0:0",
        "/chosen/deep/down/color 400 0:0",
        "/chosen/size 440 0:0",
        "chosen=./deep/down/color ./size ",
        "optional=0,color ",
        "Read-only file system",
    ];
    said(cluster, "config-map", "main", &parts);
}

fn patch_map(cluster: &Cluster, name: &str, data: Value) {
    let patch = Patch::Merge(json!({ "data": data }));
    let maps = cluster.api::<ConfigMap>();
    cluster
        .run(maps.patch(name, &PatchParams::default(), &patch))
        .expect("patch a configMap");
}

fn config_map_missing(cluster: &Scene) {
    let message = cluster.wait_event("config-map-missing", "FailedMount", "later");
    assert!(message.contains("volume \"v\""), "{message}");
    cluster.create::<ConfigMap>(json!({"metadata": {"name": "later"}, "data": {"word": "come"}}));
    said(cluster, "config-map-missing", "main", &["come"]);
}

fn config_map_missing_key(cluster: &Scene) {
    let message = cluster.wait_event("config-map-missing-key", "FailedMount", "there");
    assert!(message.contains("incomplete"), "{message}");
    patch_map(cluster, "incomplete", json!({"there": "complete"}));
    said(cluster, "config-map-missing-key", "main", &["complete"]);
}

fn config_map_update(cluster: &Scene) {
    said(cluster, "config-map-update", "main", &["seen=1-1"]);
    let begin = Instant::now();
    patch_map(cluster, "live", json!({"one": "2", "two": "2"}));
    said(cluster, "config-map-update", "main", &["seen=2-2"]);
    println!("a changed configMap was read after {:?}", begin.elapsed());
    patch_map(cluster, "live", json!({"one": "3", "two": "3"}));
    said(cluster, "config-map-update", "main", &["seen=3-3"]);
    let lines = logs(cluster, "config-map-update", "main");
    let mixed = ["1-2", "2-1", "2-3", "3-2"];
    let mixed = |line: &String| mixed.iter().any(|m| line.contains(m));
    assert!(!lines.iter().any(mixed), "{lines:?}");
}

fn config_map_immutable(cluster: &Scene) {
    said(cluster, "config-map-immutable", "main", &["forever"]);
}

fn secret(cluster: &Scene) {
    let parts = [
        "type=tmpfs",
        "user=admin length=9",
        "/all/password 400",
        "/chosen/me 644",
        "/chosen/pass 600",
        "optional=0",
        "Read-only file system",
    ];
    said(cluster, "secret", "main", &parts);
    let store = cluster.dump(&["objects"]).to_string();
    assert!(!store.contains("swordfish"), "secrets are not shown");
}

fn secret_update(cluster: &Scene) {
    said(
        cluster,
        "secret-update",
        "main",
        &["seen=1-1 stone=forever"],
    );
    let begin = Instant::now();
    let data = json!({"stringData": {"one": "2", "two": "2"}});
    let (secrets, parameters) = (cluster.api::<Secret>(), PatchParams::default());
    let patched = cluster.run(secrets.patch("alive", &parameters, &Patch::Merge(data)));
    patched.expect("patch a secret");
    said(
        cluster,
        "secret-update",
        "main",
        &["seen=2-2 stone=forever"],
    );
    println!("a changed secret was read after {:?}", begin.elapsed());
    let lines = logs(cluster, "secret-update", "main");
    let mixed = |line: &String| line.contains("1-2") || line.contains("2-1");
    assert!(!lines.iter().any(mixed), "{lines:?}");
}

fn downward_api(cluster: &Scene) {
    let namespace = format!("namespace={}", cluster.namespace);
    let uid = cluster.pod("downward-api")["metadata"]["uid"].clone();
    let uid = format!("uid={}", uid.as_str().expect("a UID"));
    let parts = [
        "name=downward-api",
        &namespace,
        &uid,
        "note=\"two words\"",
        "cpu=250",
        "memory=64",
        "/v/name 644",
        "/v/uid 400",
        "labels=color=\"blue\"",
    ];
    said(cluster, "downward-api", "main", &parts);
    let patch = Patch::Merge(json!({"metadata": {"labels": {"color": "red"}}}));
    let pods = cluster.api::<Pod>();
    cluster
        .run(pods.patch("downward-api", &PatchParams::default(), &patch))
        .expect("patch a pod");
    said(cluster, "downward-api", "main", &["labels=color=\"red\""]);
}

fn projected(cluster: &Scene) {
    let parts = [
        "map=map secret=hidden labels=color=\"blue\"",
        "token=eyJ absent=0",
        "/v/from/map 440 2000",
        "/v/from/secret 440 2000",
        "/v/token 2000",
        "type=tmpfs",
    ];
    said(cluster, "projected", "main", &parts);
}

fn token(cluster: &Scene) {
    let claims = eventually("the token is there", || {
        let lines = logs(cluster, "token", "main");
        let token = lines.first().ok_or("nothing was said")?;
        let payload = token.split('.').nth(1).ok_or("no token")?;
        let payload = URL_SAFE_NO_PAD.decode(payload).map_err(|e| e.to_string())?;
        serde_json::from_slice::<Value>(&payload).map_err(|e| e.to_string())
    });
    assert_eq!(claims["aud"], json!(["vault"]), "{claims}");
    assert_eq!(claims["kubernetes.io"]["pod"]["name"], "token", "{claims}");
    let of = |name: &str| claims[name].as_i64().expect("a time");
    assert_eq!(of("exp") - of("iat"), 700, "{claims}");
}

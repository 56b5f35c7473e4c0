//! Files of volumes, from the change of an object to the file, through the whole agent.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_testkit::fake_cri::Behaviour;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use serde_json::json;
use tokio::time::Instant;

use crate::api_restart::cluster;
use crate::restart::{assert_nothing_wrong, exits};
use crate::world::World;

const SPEC: &str = r#"{
    "volumes": [
        {"name": "config", "configMap": {"name": "settings", "optional": OPTIONAL}},
        {"name": "secret", "secret": {"secretName": "password"}},
        {"name": "about", "downwardAPI": {"items": [
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "token", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}}
    ],
    "securityContext": {"fsGroup": 54321},
    "containers": [{
        "name": "main", "image": "holdfast.local/busybox:1", "command": ["sh"],
        "volumeMounts": [
            {"name": "config", "mountPath": "/config"},
            {"name": "secret", "mountPath": "/secret"},
            {"name": "about", "mountPath": "/about"},
            {"name": "token", "mountPath": "/token"}]
    }]
}"#;

fn settings(data: serde_json::Value) -> serde_json::Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "settings", "namespace": "default"}, "data": data,
    })
}

async fn running(optional: bool) -> (World, String) {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.joined().await;
    if !optional {
        w.api()
            .create_json(settings(json!({"level": "7", "more": "x"})));
    }
    w.api().create_json(json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "password", "namespace": "default"}, "data": {"word": "b3Blbg=="},
    }));
    let uid = w.create("web", &SPEC.replace("OPTIONAL", &optional.to_string()));
    w.until("it runs", 60, |w| {
        w.running("web").len() == 1 && w.shown_phase("web") == "Running"
    })
    .await;
    w.pass(10).await;
    (w, uid)
}

fn file(w: &World, uid: &str, path: &str) -> PathBuf {
    let volumes = w.dir.path().join("root/pods").join(uid).join("volumes");
    volumes.join(format!("kubernetes.io~{path}"))
}

fn content(w: &World, uid: &str, path: &str) -> String {
    std::fs::read_to_string(file(w, uid, path)).unwrap_or_default()
}

/// How long it takes until a file holds something, after what is done now.
async fn latency(w: &World, what: &str, holds: impl Fn() -> bool) -> Duration {
    let begun = Instant::now();
    while !holds() {
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "{what}\n{}",
            w.describe()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_changed_object_reaches_its_file_within_one_sync_of_the_event() {
    let (w, uid) = running(false).await;
    let mut slowest = Duration::ZERO;
    for n in 0..5 {
        // Not in step with anything that is periodic.
        w.pass(7).await;
        let level = format!("level {n}");
        w.api()
            .modify("default", "settings", |map: &mut ConfigMap| {
                let data = map.data.get_or_insert_default();
                data.insert("level".to_owned(), level.clone());
            });
        let path = "configmap/config/level";
        slowest = slowest.max(latency(&w, "configMap", || content(&w, &uid, path) == level).await);

        w.api()
            .modify("default", "password", |secret: &mut Secret| {
                let data = secret.data.get_or_insert_default();
                let word = k8s_openapi::ByteString(level.clone().into_bytes());
                data.insert("word".to_owned(), word);
            });
        let path = "secret/secret/word";
        slowest = slowest.max(latency(&w, "secret", || content(&w, &uid, path) == level).await);

        w.api().modify("default", "web", |pod: &mut Pod| {
            let labels = pod.metadata.labels.get_or_insert_default();
            labels.insert("turn".to_owned(), format!("t{n}"));
        });
        let (path, want) = ("downward-api/about/labels", format!("turn=\"t{n}\""));
        slowest = slowest.max(latency(&w, "labels", || content(&w, &uid, path) == want).await);
    }
    println!("from the event to the file: {slowest:?} at most");
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_removed_takes_its_file_and_a_map_that_is_deleted_takes_nothing() {
    let (w, uid) = running(false).await;
    w.api()
        .modify("default", "settings", |map: &mut ConfigMap| {
            map.data.get_or_insert_default().remove("more");
        });
    latency(&w, "the file goes", || {
        !file(&w, &uid, "configmap/config/more").exists()
    })
    .await;
    assert_eq!(content(&w, &uid, "configmap/config/level"), "7");
    w.api().remove::<ConfigMap>("default", "settings");
    w.until("it is told", 60, |w| {
        let events = w.api().events_of("default", "web");
        events
            .iter()
            .any(|e| format!("{e:?}").contains("settings\\\" not found"))
    })
    .await;
    assert_eq!(content(&w, &uid, "configmap/config/level"), "7");
    assert_eq!(w.running("web").len(), 1);
    // It comes back with something else.
    w.api().create_json(settings(json!({"level": "8"})));
    latency(&w, "it is back", || {
        content(&w, &uid, "configmap/config/level") == "8"
    })
    .await;
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn an_optional_map_that_appears_later_is_written_into_the_running_pod() {
    let (w, uid) = running(true).await;
    assert!(!file(&w, &uid, "configmap/config/level").exists());
    w.api().create_json(settings(json!({"level": "7"})));
    let took = latency(&w, "it appears", || {
        content(&w, &uid, "configmap/config/level") == "7"
    })
    .await;
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert_eq!(w.starts("web").len(), 1);
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn the_token_in_the_file_is_replaced_in_time_and_used_until_it_expires() {
    let (w, uid) = running(false).await;
    let token = || content(&w, &uid, "projected/token/token");
    let requests = || {
        w.api()
            .count(|r| r.verb == "create" && r.subresource == "token")
    };
    let (first, asked) = (token(), requests());
    assert!(!first.is_empty());
    // 80 % of 600 s, and at most 10 s before that.
    w.pass(440).await;
    assert_eq!(token(), first);
    assert_eq!(requests(), asked, "nobody asks before");
    let took = latency(&w, "the token is replaced", || token() != first).await;
    assert!(took < Duration::from_secs(40), "{took:?}");
    let second = token();
    assert_eq!(requests(), asked + 1);
    // An outage as it falls due: the old one stays in place, and its end is told.
    w.pass(400).await;
    w.set_api(false);
    w.pass(300).await;
    assert_eq!(token(), second);
    w.set_api(true);
    latency(&w, "the token is replaced", || token() != second).await;
    assert_nothing_wrong(&w);
}

/// Everything below a directory with what any write, rename or change of mode leaves on it.
fn fingerprint(path: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![path.to_owned()];
    while let Some(path) = left.pop() {
        let seen = std::fs::symlink_metadata(&path).unwrap();
        found.push(format!(
            "{} {} {}.{} {}.{}",
            path.display(),
            seen.ino(),
            seen.mtime(),
            seen.mtime_nsec(),
            seen.ctime(),
            seen.ctime_nsec(),
        ));
        if seen.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    found.sort();
    found
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_every_file_of_a_volume_untouched() {
    let (mut w, uid) = running(false).await;
    let volumes = w.dir.path().join("root/pods").join(&uid).join("volumes");
    let before = fingerprint(&volumes);
    assert!(before.len() > 20, "{before:#?}");
    for orderly in [false, true] {
        if orderly {
            w.stop().await;
            w.start().await;
        } else {
            w.restart().await;
        }
        w.pass(150).await;
        assert_eq!(fingerprint(&volumes), before, "orderly: {orderly}");
    }
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn each_change_of_a_config_map_ends_the_back_off_of_a_pod_that_uses_it() {
    let mut w = cluster(|_, _| exits(3, 1)).await;
    w.start().await;
    w.joined().await;
    w.api().create_json(settings(json!({"level": "7"})));
    let spec = r#"{"containers": [{
        "name": "main", "image": "holdfast.local/busybox:1", "command": ["sh"],
        "envFrom": [{"configMapRef": {"name": "settings"}}]
    }]}"#;
    w.create("crash", spec);
    w.until("80 s of back-off", 600, |w| {
        w.waiting("crash") == "CrashLoopBackOff"
            && w.container("crash").backoff.unwrap().duration_ms == 80_000
    })
    .await;
    let before = w.starts("crash").len();
    for (turn, level) in ["8", "9"].into_iter().enumerate() {
        w.api()
            .modify("default", "settings", |map: &mut ConfigMap| {
                let data = map.data.get_or_insert_default();
                data.insert("level".to_owned(), level.to_owned());
            });
        w.until("it is tried", 15, |w| {
            w.starts("crash").len() == before + turn + 1
        })
        .await;
        w.pass(10).await;
    }
    w.restart().await;
    w.pass(60).await;
    assert_eq!(w.starts("crash").len(), before + 2, "{}", w.describe());
    assert_eq!(w.container("crash").backoff.unwrap().duration_ms, 300_000);
    assert_nothing_wrong(&w);
}

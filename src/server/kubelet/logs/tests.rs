//! `/containerLogs` over a store in memory and files in a directory of its own.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request};
use futures::StreamExt;
use k8s_openapi::api::core::v1 as api;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::core::state::{
    ContainerRecord, ExitRecord, IntentRecord, PlegRecord, PodRecord, StatusRecord, Transaction,
    child_key,
};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use crate::types::{BootId, ContainerId, Json, PodSource, PodUid, Stamp};

const NOW: Stamp = Stamp {
    boot: BootId(1),
    boottime_ms: 0,
    wall_ms: 1_767_323_045_000,
};

struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> Stamp {
        NOW
    }
}

#[derive(Clone)]
struct Fixture {
    logs: Logs,
    hub: LogHub,
    _dir: Arc<tempfile::TempDir>,
}

impl FromRef<Fixture> for Logs {
    fn from_ref(fixture: &Fixture) -> Self {
        fixture.logs.clone()
    }
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    text: String,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock: Arc<dyn Clock> = Arc::new(FixedClock);
        Self {
            logs: Logs {
                store: Store::in_memory(Arc::clone(&clock)),
                pods: PodManager::default(),
                clock,
                pod_logs_dir: dir.path().to_owned(),
                enabled: true,
                stop: CancellationToken::new(),
            },
            hub: LogHub::default(),
            _dir: Arc::new(dir),
        }
    }

    /// A pod with a container of each kind that its source wants.
    fn pod(&self) -> api::Pod {
        let pod: api::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1"},
            "spec": {
                "initContainers": [{"name": "init"}, {"name": "side", "restartPolicy": "Always"}],
                "containers": [{"name": "main"}],
                "ephemeralContainers": [{"name": "debug"}],
            },
        }))
        .unwrap();
        self.logs.pods.update(Arc::new(pod.clone()));
        pod
    }

    async fn commit(&self, transaction: Transaction) {
        self.logs.store.commit(transaction).await.unwrap();
    }

    /// The pod's status as it is reported to the API server.
    async fn status(&self, status: Value) {
        let record = StatusRecord {
            name: "web".to_owned(),
            namespace: "shop".to_owned(),
            status: Json::new(serde_json::from_value(status).unwrap()),
            version: 1,
            acknowledged: 0,
            at: NOW,
            finished: false,
        };
        self.commit(Transaction::new().put("u1", record)).await;
    }

    /// Records these containers as the runtime's answer.
    async fn runtime(&self, containers: &[(&str, &str, u32, ContainerState)]) {
        let containers = containers
            .iter()
            .map(|(name, id, attempt, state)| ContainerStatus {
                id: ContainerId::from(*id),
                name: (*name).to_owned(),
                attempt: *attempt,
                sandbox_id: ContainerId::from("s"),
                state: *state,
                created_at_ns: 1,
                image: String::new(),
                image_ref: String::new(),
                hash: String::new(),
                started_at_ns: 1,
                finished_at_ns: 0,
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
                log_path: String::new(),
                user: None,
            });
        let status = PodStatus {
            name: "web".to_owned(),
            namespace: "shop".to_owned(),
            containers: containers.collect(),
            ..PodStatus::empty(PodUid::from("u1"))
        };
        self.commit(Transaction::new().put("u1", PlegRecord { status }))
            .await;
    }

    fn log(&self, container: &str, attempt: u32, lines: &[&str]) -> PathBuf {
        let dir = self.logs.pod_logs_dir.join("shop_web_u1").join(container);
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join(format!("{attempt}.log"));
        let text: String = lines
            .iter()
            .enumerate()
            .map(|(n, line)| format!("2026-01-02T03:04:0{n}Z stdout F {line}\n"))
            .collect();
        fs::write(&path, text).unwrap();
        path
    }

    async fn send(&self, path: &str) -> axum::response::Response {
        let routes = routes_over::<Self>(self.hub.clone()).with_state(self.clone());
        let request = Request::get(format!("/containerLogs/{path}"));
        let request = request.body(Body::empty()).unwrap();
        routes.oneshot(request).await.unwrap()
    }

    async fn get(&self, path: &str) -> Answer {
        let response = self.send(path).await;
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        Answer {
            status,
            headers,
            text: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    async fn says(&self, path: &str, status: u16, text: &str) {
        let answer = self.get(path).await;
        assert_eq!(
            (answer.status, answer.text.as_str()),
            (status, text),
            "{path}"
        );
    }
}

fn running(name: &str, id: &str) -> Value {
    json!({"name": name, "containerID": format!("containerd://{id}"), "restartCount": 0,
        "state": {"running": {}}, "image": "", "imageID": "", "ready": true})
}

fn restarted(state: Value, last: Value) -> Value {
    json!({"containerStatuses": [{"name": "main", "containerID": "containerd://c2", "restartCount": 2,
        "state": state, "lastState": last, "image": "", "imageID": "", "ready": false}]})
}

#[tokio::test]
async fn logs_of_containers_of_every_kind_are_given_as_text() {
    let node = Fixture::new();
    node.pod();
    node.status(json!({
        "initContainerStatuses": [running("init", "i"), running("side", "s")],
        "containerStatuses": [running("main", "m")],
        "ephemeralContainerStatuses": [running("debug", "d")],
    }))
    .await;
    let up = ContainerState::Running;
    node.runtime(&[
        ("init", "i", 0, up),
        ("side", "s", 0, up),
        ("main", "m", 0, up),
        ("debug", "d", 0, up),
    ])
    .await;
    for container in ["init", "side", "main", "debug"] {
        node.log(container, 0, &[container, "more"]);
        let answer = node.get(&format!("shop/web/{container}")).await;
        assert_eq!(
            (answer.status, answer.text),
            (200, format!("{container}\nmore\n"))
        );
        let kind = &answer.headers[header::CONTENT_TYPE];
        assert_eq!(kind, "text/plain; charset=utf-8");
        assert!(!answer.headers.contains_key(header::CONTENT_LENGTH));
    }
    node.says("shop/web/main?tailLines=1", 200, "more\n").await;
    node.says("shop/web/main?limitBytes=3", 200, "mai").await;
    node.says(
        "shop/web/main?sinceTime=2026-01-02T03:04:01Z",
        200,
        "more\n",
    )
    .await;
    let times = "2026-01-02T03:04:01.000000000Z more\n";
    node.says("shop/web/main?timestamps=true&tailLines=1", 200, times)
        .await;
    node.says("shop/web/main?stream=Stderr", 200, "").await;
    node.says(
        "shop/web/main?tailLines=-1",
        422,
        r#"{"message": "Invalid request."}"#,
    )
    .await;
}

#[tokio::test]
async fn what_is_not_there_is_told_as_upstream_does() {
    let node = Fixture::new();
    node.says("shop/web/main", 404, r#"pod "web" does not exist"#)
        .await;
    node.pod();
    node.says(
        "shop/web/other",
        404,
        r#"container "other" not found in pod "web""#,
    )
    .await;
    node.says("other/web/main", 404, r#"pod "web" does not exist"#)
        .await;
    node.says(
        "shop/web/main",
        400,
        r#"container "main" in pod "web" is not available"#,
    )
    .await;
    let waits = r#"container "main" in pod "web" is waiting to start"#;
    for (reason, says) in [
        ("ErrImagePull", ": image can't be pulled"),
        ("ImagePullBackOff", ": trying and failing to pull image"),
        ("ContainerCreating", ": ContainerCreating"),
    ] {
        node.status(restarted(json!({"waiting": {"reason": reason}}), json!({})))
            .await;
        node.says("shop/web/main", 400, &format!("{waits}{says}"))
            .await;
    }
    node.status(restarted(json!({}), json!({}))).await;
    node.says("shop/web/main", 400, &format!("{waits} - no logs yet"))
        .await;
    let previous = r#"previous terminated container "main" in pod "web" not found"#;
    node.says("shop/web/main?previous=true", 400, previous)
        .await;
    let ended = json!({"terminated": {"exitCode": 1}});
    node.status(restarted(ended, json!({}))).await;
    node.says(
        "shop/web/main",
        400,
        r#"container "main" in pod "web" is terminated"#,
    )
    .await;
    let ended = json!({"terminated": {"exitCode": 1, "containerID": "containerd://gone"}});
    node.status(restarted(json!({"waiting": {}}), ended)).await;
    let answer = node.get("shop/web/main").await;
    assert_eq!(answer.status, 400);
    let says = "failed to open log file \"";
    assert!(answer.text.starts_with(says), "{}", answer.text);
    node.status(restarted(ended_as("unknown"), json!({}))).await;
    let text = "unable to retrieve container logs for containerd://unknown";
    node.says("shop/web/main", 400, text).await;
}

fn ended_as(id: &str) -> Value {
    json!({"terminated": {"exitCode": 1, "containerID": format!("containerd://{id}")}})
}

#[tokio::test]
async fn a_handler_that_is_off_says_so() {
    let mut node = Fixture::new();
    node.pod();
    node.logs.enabled = false;
    node.says("shop/web/main", 405, "Debug endpoints are disabled.\n")
        .await;
}

#[tokio::test]
async fn the_previous_container_is_found_by_its_id() {
    let node = Fixture::new();
    node.pod();
    node.log("main", 1, &["first"]);
    node.log("main", 2, &["second"]);
    node.status(restarted(json!({"running": {}}), ended_as("c1")))
        .await;
    let (up, down) = (ContainerState::Running, ContainerState::Exited);
    node.runtime(&[("main", "c2", 2, up), ("main", "c1", 1, down)])
        .await;
    node.says("shop/web/main", 200, "second\n").await;
    node.says("shop/web/main?previous=true", 200, "first\n")
        .await;
    // It waits to be started again: the last one's log is what there is.
    node.status(restarted(
        json!({"waiting": {"reason": "CrashLoopBackOff"}}),
        ended_as("c1"),
    ))
    .await;
    node.says("shop/web/main", 200, "first\n").await;
}

#[tokio::test]
async fn a_container_that_the_runtime_forgot_is_found_by_its_record() {
    let node = Fixture::new();
    node.pod();
    node.log("main", 6, &["sixth"]);
    node.log("main", 7, &["seventh"]);
    node.status(restarted(ended_as("c7"), ended_as("c6"))).await;
    let exit = ExitRecord {
        container_id: ContainerId::from("c6"),
        attempt: 6,
        image: String::new(),
        image_ref: String::new(),
        started_at_ns: 0,
        finished_at_ns: 0,
        finished: NOW,
        exit_code: 1,
        reason: String::new(),
        message: String::new(),
        inferred: false,
    };
    let intent = IntentRecord {
        container_id: ContainerId::from("c7"),
        attempt: 7,
        hash: String::new(),
        at: NOW,
    };
    let record = ContainerRecord {
        restart_count: 7,
        intent: Some(intent),
        last_exit: Some(exit),
        ..ContainerRecord::new()
    };
    let key = child_key(&PodUid::from("u1"), "main");
    node.commit(Transaction::new().put(key, record)).await;
    node.says("shop/web/main", 200, "seventh\n").await;
    node.says("shop/web/main?previous=true", 200, "sixth\n")
        .await;
}

#[tokio::test]
async fn a_pod_that_its_source_forgot_is_read_until_it_is_cleaned_up() {
    let node = Fixture::new();
    let pod = node.pod();
    node.log("main", 0, &["last words"]);
    node.status(json!({"containerStatuses": [running("main", "m")]}))
        .await;
    node.runtime(&[("main", "m", 0, ContainerState::Running)])
        .await;
    node.logs.pods.remove(&pod);
    node.says("shop/web/main", 404, r#"pod "web" does not exist"#)
        .await;
    let record = PodRecord {
        source: PodSource::File,
        origin: String::new(),
        pod: Json::new(pod),
        first_seen: NOW,
        confirmed_epoch: 1,
    };
    node.commit(Transaction::new().put("u1", record)).await;
    node.says("shop/web/main", 200, "last words\n").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn following_gives_each_line_at_once_and_ends_with_the_container() {
    let node = Fixture::new();
    node.pod();
    let path = node.log("main", 0, &["one"]);
    node.status(json!({"containerStatuses": [running("main", "m")]}))
        .await;
    node.runtime(&[("main", "m", 0, ContainerState::Running)])
        .await;
    let response = node.send("shop/web/main?follow=true").await;
    assert_eq!(response.status(), 200);
    let mut body = response.into_body().into_data_stream();
    assert_eq!(body.next().await.unwrap().unwrap(), "one\n");
    let mut file = fs::File::options().append(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, b"2026-01-02T03:04:09Z stderr F two\n").unwrap();
    assert_eq!(body.next().await.unwrap().unwrap(), "two\n");
    node.runtime(&[("main", "m", 0, ContainerState::Exited)])
        .await;
    assert!(body.next().await.is_none());
    drop(body);
    assert_eq!(node.hub.followers(), 0);
    // Of one that has ended there is nothing to wait for.
    node.says("shop/web/main?follow=true&tailLines=1", 200, "two\n")
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_is_forgotten() {
    let node = Fixture::new();
    node.pod();
    node.log("main", 0, &[]);
    node.status(json!({"containerStatuses": [running("main", "m")]}))
        .await;
    node.runtime(&[("main", "m", 0, ContainerState::Running)])
        .await;
    let response = node.send("shop/web/main?follow=true").await;
    assert_eq!(node.hub.followers(), 1);
    drop(response);
    assert_eq!(node.hub.followers(), 0);
}

#[tokio::test]
async fn a_link_in_place_of_a_log_is_not_followed() {
    let node = Fixture::new();
    node.pod();
    let path = node.log("main", 0, &["x"]);
    let secret = node.logs.pod_logs_dir.join("secret");
    fs::rename(&path, &secret).unwrap();
    std::os::unix::fs::symlink(&secret, &path).unwrap();
    node.status(json!({"containerStatuses": [running("main", "m")]}))
        .await;
    node.runtime(&[("main", "m", 0, ContainerState::Running)])
        .await;
    let answer = node.get("shop/web/main").await;
    assert_eq!(answer.status, 400);
    assert!(
        answer.text.starts_with("failed to open log file"),
        "{}",
        answer.text
    );
}

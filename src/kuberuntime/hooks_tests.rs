use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;

use serde_json::json;

use super::*;
use crate::kuberuntime::cri::CriTimeouts;
use crate::kuberuntime::pod_http::testkit::TlsServer;
use crate::types::metrics::Metrics;

fn handler(value: serde_json::Value) -> LifecycleHandler {
    serde_json::from_value(value).unwrap()
}

fn cri() -> CriClient {
    CriClient::new(
        "unix:///nowhere.sock",
        None,
        CriTimeouts::default(),
        Metrics::default(),
    )
    .unwrap()
}

async fn run_it(value: serde_json::Value) -> Result<(), HookError> {
    let ports: Vec<ContainerPort> = Vec::new();
    let id = ContainerId::new("c1");
    let target = HookTarget {
        pod: "web_default(u1)",
        name: "main",
        id: &id,
        ports: &ports,
        ip: Some("127.0.0.1"),
    };
    run(&handler(value), target, &cri()).await
}

/// Answers each of `answers` to one connection, in turn; gives back what was asked.
fn server(answers: &'static [&'static str]) -> (u16, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = std::thread::spawn(move || {
        answers
            .iter()
            .map(|answer| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut buffer = [0; 4096];
                let n = stream.read(&mut buffer).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
                String::from_utf8_lossy(&buffer[..n]).into_owned()
            })
            .collect()
    });
    (port, asked)
}

const FAILURE: &str =
    "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn any_http_answer_is_a_success() {
    let (port, asked) = server(&[FAILURE]);
    let hook = json!({"httpGet": {"port": port, "path": "/quit?now=1",
        "httpHeaders": [{"name": "X-Reason", "value": "stop"}]}});
    run_it(hook).await.unwrap();
    let asked = asked.join().unwrap().remove(0).to_lowercase();
    assert!(asked.starts_with("get /quit?now=1 http/1.1"), "{asked}");
    assert!(asked.contains("x-reason: stop"), "{asked}");
    assert!(asked.contains("user-agent: kube-lifecycle/"), "{asked}");
}

#[tokio::test]
async fn the_path_of_a_hook_reaches_the_server_as_it_is_given() {
    let (port, asked) = server(&[FAILURE]);
    run_it(json!({"httpGet": {"port": port, "path": "/a/../%2e%2E/quit"}}))
        .await
        .unwrap();
    let asked = asked.join().unwrap().remove(0);
    assert!(
        asked.starts_with("GET /a/../%2e%2E/quit HTTP/1.1"),
        "{asked}"
    );
}

#[tokio::test]
async fn no_http_answer_is_a_failure() {
    let port = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let error = run_it(json!({"httpGet": {"port": port, "path": "/quit"}}))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("HTTP lifecycle hook (/quit) for Container \"main\""),
        "{text}"
    );
    let refused = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
    let why = format!("Get \"http://127.0.0.1:{port}/quit\": {refused}");
    assert!(text.ends_with(&why), "{text}");
}

#[tokio::test]
async fn an_https_hook_falls_back_to_plain_http() {
    let (port, asked) = server(&[FAILURE, FAILURE]);
    let hook = json!({"httpGet": {"port": port, "path": "/x", "scheme": "HTTPS",
        "httpHeaders": [{"name": "Authorization", "value": "secret"}]}});
    run_it(hook).await.unwrap();
    let asked = asked.join().unwrap();
    assert!(asked[1].starts_with("GET /x HTTP/1.1"), "{asked:?}");
    assert!(!asked[1].to_lowercase().contains("secret"), "{asked:?}");
}

#[tokio::test]
async fn a_hook_speaks_http2_where_the_server_picks_it() {
    let server = TlsServer::start("h2").await;
    let headers = json!([{"name": "Host", "value": "shop.example"}, {"name": "X-A", "value": "\u{e9}t\u{e9}"}]);
    let hook = json!({"port": server.port, "path": "/500", "scheme": "HTTPS",
        "httpHeaders": headers});
    run_it(json!({"httpGet": hook})).await.unwrap();
    let request = server.requests().await.remove(0);
    assert_eq!(request.uri.to_string(), "https://shop.example/500");
}

#[test]
fn ports_are_numbers_or_names_of_the_container() {
    let ports: Vec<ContainerPort> =
        serde_json::from_value(json!([{"name": "web", "containerPort": 8080}])).unwrap();
    let text = |s: &str| IntOrString::String(s.to_owned());
    for (port, want) in [
        (IntOrString::Int(81), Some(81)),
        (text("82"), Some(82)),
        (text("web"), Some(8080)),
        (text(""), Some(80)),
        (text("other"), None),
        (IntOrString::Int(0), None),
        (IntOrString::Int(65_536), None),
    ] {
        assert_eq!(port_of(&port, &ports).ok(), want, "{port:?}");
    }
}

#[test]
fn an_ipv6_address_gets_its_brackets() {
    let get: HTTPGetAction = serde_json::from_value(json!({"port": 80, "path": "a"})).unwrap();
    let target = target_of(&get, "http", "fd00::1", 8080).unwrap();
    assert_eq!(target.to_string(), "http://[fd00::1]:8080/a");
}

#[tokio::test]
async fn a_tcp_hook_and_an_empty_one_are_errors() {
    for hook in [json!({"tcpSocket": {"port": 80}}), json!({})] {
        let error = run_it(hook).await.unwrap_err();
        assert!(matches!(error, HookError::Handler { .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_sleep_takes_its_time() {
    let begun = tokio::time::Instant::now();
    run_it(json!({"sleep": {"seconds": 7}})).await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 7);
}

#[test]
fn a_hook_that_is_done_is_remembered_for_its_container_only() {
    let (pod, id) = (PodUid::new("u1"), ContainerId::new("c1"));
    let mut state = State::default();
    for _ in 0..2 {
        let done = Hook::PreStop.done(&state, &pod, "main", &id, Ok(()));
        for mutation in &done.mutations {
            state.apply(mutation, 1);
        }
    }
    assert!(Hook::PreStop.is_done(&state, &pod, "main", &id));
    assert!(!Hook::PostStart.is_done(&state, &pod, "main", &id));
    assert!(!Hook::PreStop.is_done(&state, &pod, "main", &ContainerId::new("c2")));
    let record = state.record::<ContainerRecord>("u1/main").unwrap();
    assert_eq!(record.hooks_done, ["c1/preStop"], "once");
}

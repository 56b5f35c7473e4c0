//! The endpoints over HTTP: formats and compression as the reader asks for them.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use flate2::read::GzDecoder;
use holdfast::kubeletconfig::flags::KubeletFlags;
use holdfast::kubeletconfig::resolve;
use holdfast::node_object::NodeObject;
use holdfast::server::kubelet::{DebugHooks, Limits, NodeApi, Server};
use holdfast::server::{HealthChecks, sync_loop_check};
use holdfast::types::events::MemoryRecorder;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::families::families;
use crate::world::World;

async fn get(address: std::net::SocketAddr, path: &str, headers: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
    let body = answer.split_off(end + 4);
    let head = String::from_utf8(answer).unwrap().to_lowercase();
    assert!(head.starts_with("http/1.1 200"), "{path}: {head}");
    (head, body)
}

#[tokio::test]
async fn readers_get_the_format_and_the_compression_they_ask_for() {
    let world = World::new();
    world.run_pod(1).await;
    let dir = world.dir.path();
    let file = dir.join("kubelet.yaml");
    let config = format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\npodLogsDir: {0}/logs\n\
         address: 127.0.0.1\nreadOnlyPort: {1}\n",
        dir.display(),
        free_port(),
    );
    std::fs::write(&file, config).unwrap();
    std::fs::create_dir_all(dir.join("root")).unwrap();
    let flags = KubeletFlags {
        root_dir: Some(dir.join("root")),
        state_dir: Some(dir.join("state")),
        config: Some(file),
        hostname_override: Some("n1".to_owned()),
        ..KubeletFlags::default()
    };
    let stop = CancellationToken::new();
    let node = NodeApi {
        store: world.store.clone(),
        pods: world.pods.clone(),
        cri: world.cri.clone(),
        clock: Arc::clone(&world.clock),
        metrics: world.metrics.clone(),
        addresses: holdfast::types::host_addresses::HostAddresses::fixed(Vec::new()),
        config: Arc::new(resolve(&flags).unwrap().0),
        node: NodeObject::default(),
        health: HealthChecks {
            clock: Arc::clone(&world.clock),
            sync_loop: sync_loop_check(|| None, Duration::from_secs(60)),
            notes: Vec::new(),
            ready: Vec::new(),
        },
        recorder: Arc::new(MemoryRecorder::default()),
        api: None,
        restored: Arc::new(AtomicBool::new(true)),
        volumes: Arc::default(),
        stop: stop.clone(),
        debug: DebugHooks::default(),
    };
    let server = Server::open(node, Limits::default())
        .await
        .unwrap()
        .unwrap();
    let address = server.read_only_address().unwrap();
    let serving = tokio::spawn(server.run());

    for path in [
        "/metrics",
        "/metrics/resource",
        "/metrics/cadvisor",
        "/metrics/probes",
        "/metrics/slis",
    ] {
        let (head, body) = get(address, path, "").await;
        assert!(
            head.contains("content-type: text/plain; version=0.0.4"),
            "{path}: {head}"
        );
        let text = String::from_utf8(body).unwrap();
        drop(families(&text));
        let (head, body) = get(
            address,
            path,
            "Accept: application/openmetrics-text;version=1.0.0\r\n",
        )
        .await;
        assert!(
            head.contains("content-type: application/openmetrics-text; version=1.0.0"),
            "{path}: {head}"
        );
        assert!(body.ends_with(b"# EOF\n"), "{path}");
    }
    let (head, body) = get(address, "/metrics", "Accept-Encoding: gzip\r\n").await;
    assert!(head.contains("content-encoding: gzip"), "{head}");
    let mut text = String::new();
    GzDecoder::new(&body[..]).read_to_string(&mut text).unwrap();
    assert!(
        families(&text).contains_key("kubelet_runtime_operations_total"),
        "{text}"
    );

    let (head, body) = get(address, "/stats/summary", "").await;
    assert!(head.contains("content-type: application/json"), "{head}");
    let summary: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(summary["node"]["nodeName"], "n1");
    assert_eq!(summary["pods"][0]["podRef"]["name"], "pod-1");
    let cpu = &summary["pods"][0]["containers"][0]["cpu"];
    assert_eq!(cpu["usageCoreNanoSeconds"], 1_000_000_000, "{summary}");
    assert!(summary["node"]["fs"]["capacityBytes"].is_u64(), "{summary}");
    let (_, body) = get(address, "/stats/summary?only_cpu_and_memory=true", "").await;
    let summary: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert!(
        summary["node"]["fs"].is_null() && summary["node"]["cpu"].is_object(),
        "{summary}"
    );

    stop.cancel();
    serving.await.unwrap();
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

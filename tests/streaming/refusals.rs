//! What is answered instead of a stream.

use std::time::Duration;

use holdfast::kuberuntime::cri::{CriClient, CriTimeouts};
use holdfast::types::metrics::Metrics;
use holdfast_testkit::fake_cri::{FakeCri, Fault};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_tungstenite::tungstenite::Error;
use tonic::Code;

use super::client::{Answer, Spdy, Ws, request};
use super::runtime;
use super::world::{Server, exec};

const V4: &str = "v4.channel.k8s.io";
const OUT: &str = "output=1";

/// A runtime that runs nothing, with a pod that seems to run.
struct Fake {
    fake: FakeCri,
    server: Server,
    pod: runtime::TestPod,
    _world: runtime::World,
}

async fn fake() -> Fake {
    let fake = FakeCri::new();
    fake.add_image(holdfast_testkit::containerd::BUSYBOX);
    let timeouts = CriTimeouts::from_request(Duration::from_secs(10));
    let cri = CriClient::over(fake.channel(), "memory", timeouts, Metrics::default());
    let mut world = runtime::World::fake();
    world.cri = cri.clone();
    let server = Server::start(cri, Duration::from_secs(60)).await;
    let (pod, _, _) = world.run("sleep 1000").await;
    server.want(&pod, &json!({"name": "main"}));
    Fake {
        fake,
        server,
        pod,
        _world: world,
    }
}

impl Fake {
    async fn spdy(&self, path: &str) -> Answer {
        let connected = Spdy::connect(&self.server.addr, path, V4).await;
        connected.err().expect("a refusal")
    }
}

/// A streaming server that answers everything with the same bytes; what it was sent comes out.
async fn streaming_server(answer: &'static str) -> (String, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/exec/token", listener.local_addr().unwrap());
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        String::from_utf8(head).unwrap()
    });
    (url, served)
}

#[tokio::test]
async fn requests_are_refused_in_upstreams_words() {
    let fake = fake().await;
    let name = &fake.pod.name;
    for (path, status, text) in [
        (
            "/exec/default/none/main?output=1".to_owned(),
            404,
            "pod does not exist",
        ),
        (
            format!("/exec/other/{name}/main?output=1"),
            404,
            "pod does not exist",
        ),
        (
            format!("/exec/default/{name}/none?output=1"),
            404,
            "container not found (\"none\")",
        ),
        (
            format!("/attach/default/{name}/none?output=1"),
            404,
            "container not found (\"none\")",
        ),
        (
            format!("/exec/default/{name}/no-uid/main?output=1"),
            404,
            "pod not found",
        ),
        (
            format!("/portForward/default/{name}/no-uid"),
            404,
            "pod not found",
        ),
        (
            format!("/exec/default/{name}/main?command=ls"),
            400,
            "you must specify at least 1 of stdin, stdout, stderr",
        ),
    ] {
        let answer = fake.spdy(&path).await;
        assert_eq!(
            (answer.status, answer.body.as_str()),
            (status, text),
            "{path}"
        );
    }
    let plain = request(&fake.server.addr, "GET", &exec(&fake.pod, OUT, "ls"), "").await;
    assert_eq!(
        (plain.status, plain.body.as_str()),
        (500, "Upgrade request required")
    );
    assert_eq!(fake.fake.count("exec"), 0, "the runtime was not asked");
}

#[tokio::test]
async fn the_runtimes_refusals_are_passed_on() {
    let fake = fake().await;
    let path = exec(&fake.pod, OUT, "ls");
    for (code, status) in [
        (Code::NotFound, 404),
        (Code::ResourceExhausted, 429),
        (Code::Internal, 500),
    ] {
        fake.fake
            .fail_once("exec", Fault::Error(code, "no".to_owned()));
        let answer = fake.spdy(&path).await;
        assert_eq!(answer.status, status, "{code:?}");
        assert_eq!(
            answer.head.to_lowercase().contains("retry-after"),
            status == 429
        );
    }

    let answer = "HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\n\r\nshort";
    let (url, served) = streaming_server(answer).await;
    fake.fake.stream_at(&url);
    let answer = fake.spdy(&path).await;
    assert_eq!((answer.status, answer.body.as_str()), (418, "short"));
    let head = served.await.unwrap().to_lowercase();
    assert!(head.starts_with("post /exec/token http/1.1"), "{head}");
    assert!(
        head.contains("upgrade: spdy/3.1") && head.contains(V4),
        "{head}"
    );
    assert!(
        !head.contains("secret"),
        "the client's credentials are its own: {head}"
    );

    // What is neither a refusal nor an upgrade is none of the client's business: a redirect could send it anywhere.
    for (status, answer) in [
        ("200", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        (
            "302",
            "HTTP/1.1 302 Found\r\nLocation: http://elsewhere.invalid/\r\nContent-Length: 0\r\n\r\n",
        ),
    ] {
        let (url, _served) = streaming_server(answer).await;
        fake.fake.stream_at(&url);
        let answer = fake.spdy(&path).await;
        assert_eq!(answer.status, 500);
        let wanted = format!("invalid upgrade response: status code {status}");
        assert!(answer.body.contains(&wanted), "{}", answer.body);
        assert!(!answer.head.to_lowercase().contains("location"));
    }

    for url in ["http://127.0.0.1:1/x", "https://127.0.0.1:1/x", "nonsense"] {
        fake.fake.stream_at(url);
        assert_eq!(fake.spdy(&path).await.status, 500, "{url}");
    }
}

#[tokio::test]
async fn a_websocket_client_sees_a_refusal_before_the_upgrade() {
    let fake = fake().await;
    let path = exec(&fake.pod, OUT, "ls");
    let refused = |result: Result<Ws, Error>| match result.err().expect("a refusal") {
        Error::Http(answer) => {
            let body = answer.body().clone().unwrap_or_default();
            (answer.status().as_u16(), String::from_utf8(body).unwrap())
        }
        other => panic!("{other}"),
    };
    let unknown = Ws::connect(&fake.server.addr, &path, &["mqtt"]).await;
    assert_eq!(refused(unknown).0, 403);
    assert_eq!(fake.fake.count("exec"), 0);
    let (url, served) =
        streaming_server("HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy").await;
    fake.fake.stream_at(&url);
    let busy = Ws::connect(&fake.server.addr, &path, &["v5.channel.k8s.io"]).await;
    assert_eq!(refused(busy).0, 503);
    let head = served.await.unwrap().to_lowercase();
    assert!(
        head.contains("upgrade: spdy/3.1") && head.contains(V4),
        "{head}"
    );
    let no_port = format!("/portForward/default/{}", fake.pod.name);
    let no_port = Ws::connect(&fake.server.addr, &no_port, &["v4.channel.k8s.io"]).await;
    assert_eq!(refused(no_port).0, 400);
}

#[tokio::test]
async fn nothing_is_streamed_before_the_pods_are_back() {
    let fake = FakeCri::new();
    let timeouts = CriTimeouts::from_request(Duration::from_secs(10));
    let cri = CriClient::over(fake.channel(), "memory", timeouts, Metrics::default());
    let server = Server::start_unrestored(cri).await;
    let answer = Spdy::connect(&server.addr, "/exec/default/a/b?output=1", V4).await;
    assert_eq!(answer.err().expect("a refusal").status, 503);
}

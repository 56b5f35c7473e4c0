//! HTTP, TCP and gRPC probes of servers on the loopback device, in real time.

use std::convert::Infallible;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::HTTPGetAction;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tonic::codegen::http as wire;
use tonic::server::{NamedService, UnaryService};
use tonic_prost::ProstCodec;

use super::super::grpc::{self, HealthCheckRequest, HealthCheckResponse};
use super::super::handlers::{Handlers, Raw};
use super::super::http;
use super::super::table::{Job, Target};
use super::*;
use crate::kuberuntime::pod_http::Client;
use crate::types::ProbeKind;

const PATIENCE: Duration = Duration::from_secs(10);

/// Answers each connection once, by the path; returns the port and what it was sent.
async fn server(address: &str) -> (u16, Arc<StdMutex<Vec<String>>>) {
    let listener = TcpListener::bind(address).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let requests = Arc::new(StdMutex::new(Vec::new()));
    let seen = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut buffer = [0; 1024];
                    match stream.read(&mut buffer).await {
                        Ok(n) if n > 0 => request.extend_from_slice(&buffer[..n]),
                        _ => return,
                    }
                }
                let request = String::from_utf8(request).unwrap();
                let path = request.split(' ').nth(1).unwrap().to_owned();
                seen.lock().unwrap().push(request);
                let redirect = |to: &str| {
                    format!("302 Found\r\nLocation: {to}\r\nContent-Length: 4\r\n\r\nmove")
                };
                let answer = match path.as_str() {
                    "/slow" => std::future::pending().await,
                    "/here" => redirect("/ok"),
                    "/loop" => redirect("/loop"),
                    "/away" => redirect("http://elsewhere.invalid/"),
                    "/big" => format!(
                        "200 OK\r\nContent-Length: 10000000\r\n\r\n{}",
                        "x".repeat(20_000)
                    ),
                    "/ok" | "/" => "200 OK\r\nContent-Length: 2\r\n\r\nok".to_owned(),
                    "/spaced" => "200 OK\r\nX-A : 1\r\nContent-Length: 2\r\n\r\nok".to_owned(),
                    "/folded" => {
                        "200 OK\r\nX-A: 1,\r\n\t2\r\nContent-Length: 2\r\n\r\nok".to_owned()
                    }
                    "/many" => format!(
                        "200 OK\r\n{}Content-Length: 2\r\n\r\nok",
                        "Set-Cookie: a=b\r\n".repeat(1500)
                    ),
                    "/nonsense" => "200 OK\r\nno header\r\n\r\n".to_owned(),
                    "/304" => "304 Not Modified\r\n\r\n".to_owned(),
                    other => format!("{} X\r\nContent-Length: 0\r\n\r\n", &other[1..]),
                };
                let answer = format!("HTTP/1.1 {answer}");
                drop(stream.write_all(answer.as_bytes()).await);
                // Whoever wants more waits for it.
                drop(stream.read(&mut [0; 1]).await);
            });
        }
    });
    (port, requests)
}

fn action(value: Value) -> HTTPGetAction {
    serde_json::from_value(value).unwrap()
}

#[tokio::test]
async fn http_answers_become_results() {
    let (port, _) = server("127.0.0.1:0").await;
    let client = Client::new().unwrap();
    let failed = |code: u16| Raw::Failure(format!("HTTP probe failed with statuscode: {code}"));
    let moved =
        |body: &str| Raw::Warning(format!("Probe terminated redirects, Response body: {body}"));
    let cases = [
        ("/ok", Raw::Success),
        ("", Raw::Success),
        ("/204", Raw::Success),
        ("/399", moved("")),
        ("/304", moved("")),
        ("/400", failed(400)),
        ("/404", failed(404)),
        ("/500", failed(500)),
        ("/here", Raw::Success),
        ("/away", moved("move")),
        ("/big", Raw::Success),
        (
            "/loop",
            Raw::Failure(format!(
                "Get \"http://127.0.0.1:{port}/loop\": stopped after 10 redirects"
            )),
        ),
    ];
    for (path, want) in cases {
        let get = action(json!({"path": path, "port": port}));
        let got = http::get(&client, &get, "127.0.0.1", port, PATIENCE).await;
        assert_eq!(got, Ok(want), "{path}");
    }
    let get = action(json!({"path": "/slow", "port": port}));
    let short = Duration::from_millis(50);
    let Ok(Raw::Failure(why)) = http::get(&client, &get, "127.0.0.1", port, short).await else {
        panic!("a server that does not answer");
    };
    assert!(why.contains("context deadline exceeded"), "{why}");
}

#[tokio::test]
async fn odd_headers_of_an_answer_are_taken_as_go_takes_them() {
    let (port, _) = server("127.0.0.1:0").await;
    let client = Client::new().unwrap();
    for (path, is_taken) in [
        ("/spaced", true),
        ("/folded", true),
        ("/many", true),
        ("/nonsense", false),
    ] {
        let get = action(json!({"path": path, "port": port}));
        let got = http::get(&client, &get, "127.0.0.1", port, PATIENCE).await;
        assert_eq!(got == Ok(Raw::Success), is_taken, "{path}: {got:?}");
    }
}

#[tokio::test]
async fn http_requests_carry_the_headers_of_a_probe() {
    let (port, requests) = server("127.0.0.1:0").await;
    let client = Client::new().unwrap();
    let send = async |headers: Value| {
        let get = action(json!({"path": "/ok?a=b", "port": port, "httpHeaders": headers}));
        let answer = http::get(&client, &get, "127.0.0.1", port, PATIENCE).await;
        let sent = requests.lock().unwrap().pop().unwrap_or_default();
        (answer, sent.to_lowercase())
    };
    let (_, sent) = send(json!([])).await;
    assert!(sent.starts_with("get /ok?a=b http/1.1\r\n"), "{sent}");
    for header in [
        "user-agent: kube-probe/1.36",
        "accept: */*",
        "connection: close",
        &format!("host: 127.0.0.1:{port}"),
    ] {
        assert!(
            sent.contains(&format!("\r\n{header}\r\n")),
            "{header}: {sent}"
        );
    }
    let given = json!([
        {"name": "Host", "value": "shop.example"},
        {"name": "X-A", "value": "1"},
        {"name": "x-a", "value": "2"},
        {"name": "user-agent", "value": "me"},
        {"name": "Accept", "value": ""},
    ]);
    let (_, sent) = send(given).await;
    for header in ["host: shop.example", "x-a: 1", "x-a: 2", "user-agent: me"] {
        assert!(
            sent.contains(&format!("\r\n{header}\r\n")),
            "{header}: {sent}"
        );
    }
    assert!(
        !sent.contains("accept") && !sent.contains("kube-probe"),
        "{sent}"
    );
    // Anything that Go sends: a name of a shop, a token with bytes beyond ASCII.
    let (answer, sent) = send(json!([{"name": "X-A", "value": "\u{e9}t\u{e9}"}])).await;
    assert!(answer.is_ok(), "{answer:?}");
    assert!(sent.contains("\r\nx-a: \u{e9}t\u{e9}\r\n"), "{sent}");
    let (answer, _) = send(json!([{"name": "a b", "value": "1"}])).await;
    assert!(answer.unwrap_err().contains("header \"a b\""));
}

#[tokio::test]
async fn the_path_of_a_probe_reaches_the_server_as_it_is_given() {
    let (port, requests) = server("127.0.0.1:0").await;
    let client = Client::new().unwrap();
    for path in ["/a/../%2e%2E/./b", "/a%2Fb//c", "/ok?next=/../%2e"] {
        let get = action(json!({"path": path, "port": port}));
        let answer = http::get(&client, &get, "127.0.0.1", port, PATIENCE).await;
        answer.unwrap();
        let sent = requests.lock().unwrap().pop().unwrap();
        assert!(
            sent.starts_with(&format!("GET {path} HTTP/1.1\r\n")),
            "{sent}"
        );
    }
}

#[tokio::test]
async fn nobody_there_is_a_failure_that_names_the_address() {
    let free = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().port()
    };
    let client = Client::new().unwrap();
    let get = action(json!({"path": "/", "port": free}));
    let refused = format!("dial tcp 127.0.0.1:{free}: connect: connection refused");
    let got = http::get(&client, &get, "127.0.0.1", free, PATIENCE).await;
    let want = format!("Get \"http://127.0.0.1:{free}/\": {refused}");
    assert_eq!(got, Ok(Raw::Failure(want)));
    let got = grpc::check(&format!("127.0.0.1:{free}"), "", PATIENCE).await;
    let want = format!("error: failed to connect service at \"127.0.0.1:{free}\": {refused}");
    assert_eq!(got, Raw::Failure(want));
    let got = job(json!({"tcpSocket": {"port": free}}), "127.0.0.1").await;
    assert_eq!(got, Ok(Raw::Failure(refused)));
}

#[tokio::test]
async fn who_does_not_answer_at_once_is_waited_for() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let probe =
        |seconds: u32| json!({"tcpSocket": {"port": address.port()}, "timeoutSeconds": seconds});
    assert_eq!(job(probe(1), "127.0.0.1").await, Ok(Raw::Success));
    // One waits to be accepted, and there is no room for another.
    let got = job(probe(1), "127.0.0.1").await;
    let want = format!("dial tcp {address}: i/o timeout");
    assert_eq!(got, Ok(Raw::Failure(want)));
    let accepting = async { listener.accept().await.unwrap() };
    let (got, _) = tokio::join!(job(probe(20), "127.0.0.1"), accepting);
    assert_eq!(got, Ok(Raw::Success));
}

/// Makes a probe of a container with the port `web` = 8080.
async fn job(probe: Value, ip: &str) -> Result<Raw, String> {
    let pod = json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u1"},
        "spec": {"containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}]},
    });
    let pod: Arc<Pod> = Arc::new(serde_json::from_value(pod).unwrap());
    let probe = serde_json::from_value(probe).unwrap();
    let target = Target::new(&pod, &pod.containers()[0], &probe, ProbeKind::Readiness);
    let job = Job {
        id: 1,
        target: Arc::new(target),
        container_id: ContainerId::new("c"),
        ip: ip.to_owned(),
    };
    let timeouts = CriTimeouts::default();
    let cri = CriClient::new("unix:///nobody", None, timeouts, Metrics::default()).unwrap();
    Handlers::new(cri).probe(&job).await
}

#[tokio::test]
async fn hosts_and_ports_are_found_where_the_spec_says() {
    let (port, requests) = server("127.0.0.1:0").await;
    let ok = [
        json!({"tcpSocket": {"port": port}}),
        json!({"tcpSocket": {"port": port.to_string()}}),
        json!({"tcpSocket": {"port": port, "host": "localhost"}}),
        json!({"httpGet": {"port": port, "path": "/ok"}}),
        json!({"httpGet": {"port": port, "path": "ok", "scheme": "HTTP"}}),
    ];
    for probe in ok {
        let got = job(probe.clone(), "127.0.0.1").await;
        assert_eq!(got, Ok(Raw::Success), "{probe}");
    }
    assert_eq!(requests.lock().unwrap().len(), 2);
    let named = job(json!({"tcpSocket": {"port": "web"}}), "127.0.0.1").await;
    let Ok(Raw::Failure(why)) = named else {
        panic!("{named:?}")
    };
    assert!(why.starts_with("dial tcp 127.0.0.1:8080: "), "{why}");
    for (probe, ip, why) in [
        (
            json!({"tcpSocket": {"port": "no"}}),
            "127.0.0.1",
            "no port named \"no\"",
        ),
        (
            json!({"tcpSocket": {"port": 0}}),
            "127.0.0.1",
            "0 is no port number",
        ),
        (
            json!({"httpGet": {"port": 70000}}),
            "127.0.0.1",
            "70000 is no port number",
        ),
        (
            json!({"httpGet": {"port": 80, "scheme": "FTP"}}),
            "127.0.0.1",
            "\"FTP\"",
        ),
        (json!({"tcpSocket": {"port": 80}}), "", "no IP address yet"),
        (json!({}), "127.0.0.1", "no handler"),
        (
            json!({"exec": {"command": ["x"]}}),
            "127.0.0.1",
            "exec_sync",
        ),
    ] {
        let error = job(probe.clone(), ip).await.unwrap_err();
        assert!(error.contains(why), "{probe}: {error}");
    }
}

#[tokio::test]
async fn ipv6_addresses_get_their_brackets() {
    let Ok(listener) = std::net::TcpListener::bind("[::1]:0") else {
        println!("no IPv6 on this machine");
        return;
    };
    drop(listener);
    let (port, requests) = server("[::1]:0").await;
    let probe = json!({"httpGet": {"port": port, "path": "/ok"}});
    assert_eq!(job(probe, "::1").await, Ok(Raw::Success));
    let sent = requests.lock().unwrap().pop().unwrap().to_lowercase();
    assert!(sent.contains(&format!("host: [::1]:{port}")), "{sent}");
    assert_eq!(
        job(json!({"tcpSocket": {"port": port}}), "::1").await,
        Ok(Raw::Success)
    );
}

/// A health service: `good` serves, `bad` does not, others are not known.
#[derive(Clone)]
struct Health;

impl UnaryService<HealthCheckRequest> for Health {
    type Response = HealthCheckResponse;
    type Future = BoxFuture<'static, Result<tonic::Response<HealthCheckResponse>, tonic::Status>>;

    fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
        let agent = request.metadata().get("user-agent").cloned();
        Box::pin(async move {
            let agent = agent.unwrap().to_str().unwrap().to_owned();
            assert!(agent.starts_with("kube-probe/1.36"), "{agent}");
            let status = match request.into_inner().service.as_str() {
                "" | "good" => 1,
                "bad" => 2,
                "slow" => std::future::pending().await,
                _ => return Err(tonic::Status::not_found("unknown service")),
            };
            Ok(tonic::Response::new(HealthCheckResponse { status }))
        })
    }
}

impl NamedService for Health {
    const NAME: &'static str = "grpc.health.v1.Health";
}

impl tower::Service<wire::Request<tonic::body::Body>> for Health {
    type Response = wire::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: wire::Request<tonic::body::Body>) -> Self::Future {
        let health = self.clone();
        Box::pin(async move {
            assert_eq!(request.uri().path(), "/grpc.health.v1.Health/Check");
            let mut server = tonic::server::Grpc::new(ProstCodec::default());
            Ok(server.unary(health, request).await)
        })
    }
}

/// Has the name of another service, so that the health service is not implemented.
#[derive(Clone)]
struct Other(Health);

impl NamedService for Other {
    const NAME: &'static str = "other.Service";
}

impl tower::Service<wire::Request<tonic::body::Body>> for Other {
    type Response = wire::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: wire::Request<tonic::body::Body>) -> Self::Future {
        tower::Service::call(&mut self.0, request)
    }
}

async fn listen() -> (String, tokio_stream::wrappers::TcpListenerStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (
        address,
        tokio_stream::wrappers::TcpListenerStream::new(listener),
    )
}

#[tokio::test]
async fn grpc_health_becomes_a_result() {
    let (address, incoming) = listen().await;
    let server = tonic::transport::Server::builder().add_service(Health);
    tokio::spawn(server.serve_with_incoming(incoming));
    let failed = |why: &str| Raw::Failure(why.to_owned());
    for (service, want) in [
        ("", Raw::Success),
        ("good", Raw::Success),
        (
            "bad",
            failed("service unhealthy (responded with \"NOT_SERVING\")"),
        ),
        (
            "what",
            failed(
                "error: health rpc probe failed: rpc error: code = NotFound desc = unknown service",
            ),
        ),
    ] {
        let got = grpc::check(&address, service, PATIENCE).await;
        assert_eq!(got, want, "{service}");
    }
    let short = Duration::from_millis(100);
    let Raw::Failure(why) = grpc::check(&address, "slow", short).await else {
        panic!("a server that does not answer");
    };
    assert_eq!(why, "timeout: health rpc did not complete within 100ms");
    let (address, incoming) = listen().await;
    let server = tonic::transport::Server::builder().add_service(Other(Health));
    tokio::spawn(server.serve_with_incoming(incoming));
    let Raw::Failure(why) = grpc::check(&address, "", PATIENCE).await else {
        panic!("a server without the health service");
    };
    assert!(
        why.starts_with("error: this server does not implement the grpc health protocol"),
        "{why}"
    );
}

//! HTTPS probes of servers on the loopback device, in real time.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tonic::codegen::http::Version;

use super::super::handlers::Raw;
use super::super::http;
use super::*;
use crate::kuberuntime::pod_http::Client;
use crate::kuberuntime::pod_http::testkit::{TlsServer, acceptor};

const PATIENCE: Duration = Duration::from_secs(10);
const VERSIONS: [(&str, Version); 2] = [("h2", Version::HTTP_2), ("http/1.1", Version::HTTP_11)];

async fn probe(port: u16, path: &str, headers: Value, timeout: Duration) -> Raw {
    let get = json!({"path": path, "port": port, "scheme": "HTTPS", "httpHeaders": headers});
    let get = serde_json::from_value(get).unwrap();
    let client = Client::new().unwrap();
    let got = http::get(&client, &get, "127.0.0.1", port, timeout).await;
    got.unwrap()
}

#[tokio::test]
async fn the_server_picks_the_version_of_http() {
    for (alpn, version) in VERSIONS {
        let server = TlsServer::start(alpn).await;
        let failed = "HTTP probe failed with statuscode: 500".to_owned();
        let moved = "Probe terminated redirects, Response body: move".to_owned();
        for (path, want, connections) in [
            ("/ok", Raw::Success, 1),
            ("/here", Raw::Success, 2),
            ("/big", Raw::Success, 1),
            ("/away", Raw::Warning(moved), 1),
            ("/500", Raw::Failure(failed), 1),
        ] {
            let got = probe(server.port, path, json!([]), PATIENCE).await;
            assert_eq!(got, want, "{alpn} {path}");
            let requests = server.requests().await;
            assert_eq!(requests.len(), connections, "{alpn} {path}");
            assert!(requests.iter().all(|r| r.version == version), "{alpn}");
        }
    }
}

#[tokio::test]
async fn http2_requests_carry_the_headers_of_a_probe() {
    let server = TlsServer::start("h2").await;
    let port = server.port;
    let given = json!([
        {"name": "Host", "value": "shop.example"},
        {"name": "Connection", "value": "close"},
        {"name": "X-A", "value": "1"},
    ]);
    for (given, authority, x) in [
        (json!([]), format!("127.0.0.1:{port}"), None),
        (given, "shop.example".to_owned(), Some("1")),
    ] {
        assert_eq!(
            probe(port, "/ok?a=b", given, PATIENCE).await,
            Raw::Success,
            "{authority}"
        );
        let request = server.requests().await.remove(0);
        let target = format!("https://{authority}/ok?a=b");
        assert_eq!(request.uri.to_string(), target);
        let header = |name: &str| request.headers.get(name).map(|v| v.to_str().unwrap());
        assert_eq!(header("user-agent"), Some("kube-probe/1.36"));
        assert_eq!(header("accept"), Some("*/*"));
        assert_eq!(header("x-a"), x);
        assert_eq!((header("host"), header("connection")), (None, None));
    }
}

#[tokio::test]
async fn a_probe_says_what_it_waited_for_and_hangs_up() {
    let second = Duration::from_secs(1);
    for (alpn, _) in VERSIONS {
        let server = TlsServer::start(alpn).await;
        let port = server.port;
        for (path, missed) in [
            (
                "/no-headers",
                "Client.Timeout exceeded while awaiting headers",
            ),
            (
                "/no-body",
                "Client.Timeout or context cancellation while reading body",
            ),
        ] {
            let want = format!(
                "Get \"https://127.0.0.1:{port}{path}\": context deadline exceeded ({missed})"
            );
            let got = probe(port, path, json!([]), second).await;
            assert_eq!(got, Raw::Failure(want), "{alpn}");
            assert_eq!(server.requests().await.len(), 1, "{alpn} {path}");
        }
    }
}

/// Returns the result of probing a server that runs `serve` on its connection.
async fn broken<F: Future<Output = ()>>(serve: impl FnOnce(TcpStream) -> F) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = async { serve(listener.accept().await.unwrap().0).await };
    let (got, ()) = tokio::join!(probe(port, "/", json!([]), PATIENCE), serving);
    let Raw::Failure(why) = got else {
        panic!("{got:?}");
    };
    let prefix = format!("Get \"https://127.0.0.1:{port}/\": ");
    why.strip_prefix(&prefix).expect(&why).to_owned()
}

#[tokio::test]
async fn what_breaks_is_told_in_our_own_words() {
    let hangs_up = broken(async |stream| {
        let mut stream = acceptor("http/1.1").accept(stream).await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
    });
    assert_eq!(hangs_up.await, "EOF");
    let stops = broken(async |stream| {
        let mut stream = acceptor("http/1.1").accept(stream).await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        let half = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf";
        stream.write_all(half).await.unwrap();
        stream.flush().await.unwrap();
    });
    assert_eq!(stops.await, "unexpected EOF");
    let plain = broken(async |mut stream| {
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        let refusal = b"HTTP/1.1 400 Bad Request\r\n\r\n";
        stream.write_all(refusal).await.unwrap();
    });
    let want = "tls: first record does not look like a TLS handshake";
    assert_eq!(plain.await, want);
    let picky = broken(async |stream| drop(acceptor("h3").accept(stream).await));
    let want = "remote error: tls: no application protocol";
    assert_eq!(picky.await, want);
    let hangs_up = broken(async |stream| drop(acceptor("h2").accept(stream).await));
    let why = hangs_up.await;
    assert!(
        why == "EOF" || why.ends_with(": connection reset by peer"),
        "{why}"
    );
}

#[tokio::test]
async fn a_body_may_end_with_a_tls_connection_that_ends_unannounced() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = async {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = acceptor("http/1.1").accept(stream).await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        stream
            .write_all(b"HTTP/1.0 200 OK\r\n\r\nok")
            .await
            .unwrap();
        stream.flush().await.unwrap();
    };
    let (got, ()) = tokio::join!(probe(port, "/", json!([]), PATIENCE), serving);
    assert_eq!(got, Raw::Success);
}

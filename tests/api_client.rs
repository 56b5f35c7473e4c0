//! The API client on the wire: whom it trusts, what it says when it is not trusted, how it gets through proxies,
//! how many connections it opens, and where it has its credentials from.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, Uri};
use base64::Engine as _;
use futures::StreamExt;
use holdfast::apiserver::{ApiClient, ApiSettings, Credentials, Reachability, connect};
use holdfast::types::boot::BootId;
use holdfast::types::metrics::Metrics;
use holdfast::types::time::SystemClock;
use holdfast_testkit::envtest::{Authority, DAY, Identity};
use holdfast_testkit::fault_proxy::{FaultProxy, ProxyConfig};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, WatchParams};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(60);

fn base64(text: impl AsRef<[u8]>) -> String {
    base64::engine::general_purpose::STANDARD.encode(text)
}

/// A server over TLS and HTTP/2 that lists no pods, and whose watches say nothing.
struct Server {
    authority: Authority,
    tls: FaultProxy,
    /// The only `Authorization` that is let in; empty: everybody is.
    wanted: Arc<Mutex<String>>,
}

impl Server {
    async fn start() -> Self {
        let authority = Authority::new("here");
        let wanted = Arc::new(Mutex::new(String::new()));
        let known = wanted.clone();
        let answer = move |uri: Uri, headers: HeaderMap| {
            let given = headers.get("authorization").map(|given| given.to_str());
            let given = given.map_or("", Result::unwrap).to_owned();
            let wanted = known.lock().unwrap().clone();
            async move {
                let watches = uri
                    .query()
                    .is_some_and(|query| query.contains("watch=true"));
                let list = json!({
                    "apiVersion": "v1", "kind": "PodList", "items": [],
                    "metadata": { "resourceVersion": "1" },
                });
                if !wanted.is_empty() && wanted != given {
                    (StatusCode::UNAUTHORIZED, Body::from("who?"))
                } else if watches {
                    let silence = futures::stream::pending::<Result<Vec<u8>, std::io::Error>>();
                    (StatusCode::OK, Body::from_stream(silence))
                } else {
                    (StatusCode::OK, Body::from(list.to_string()))
                }
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(answer);
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let tls = FaultProxy::start(ProxyConfig {
            upstream,
            ca_pem: None,
            client: None,
            serve: Some(authority.server("kube-apiserver")),
        });
        Self {
            authority,
            tls: tls.unwrap(),
            wanted,
        }
    }

    fn cluster(&self) -> Value {
        json!({
            "server": self.tls.url(),
            "certificate-authority-data": base64(self.authority.pem()),
        })
    }

    fn lets_in(&self, token: &str) {
        *self.wanted.lock().unwrap() = format!("Bearer {token}");
    }
}

fn write_kubeconfig(dir: &Path, cluster: &Value, user: &Value) -> PathBuf {
    let path = dir.join("kubeconfig");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{ "name": "c", "cluster": cluster }],
        "contexts": [{ "name": "here", "context": { "cluster": "c", "user": "u" } }],
        "users": [{ "name": "u", "user": user }],
    });
    std::fs::write(&path, text.to_string()).unwrap();
    path
}

async fn client(dir: &Path, cluster: &Value, user: &Value) -> (ApiClient, Credentials) {
    let settings = ApiSettings {
        kubeconfig: Some(write_kubeconfig(dir, cluster, user)),
        bootstrap_kubeconfig: None,
        cert_dir: dir.join("pki"),
        node_name: "n1".to_owned(),
        rotate_certificates: false,
        qps: 1000,
        burst: 1000,
    };
    let clock = Arc::new(SystemClock::new(BootId(1)));
    let connected = connect(&settings, clock, Metrics::default()).await;
    connected.unwrap().expect("a client")
}

async fn list(client: &ApiClient) -> kube::Result<usize> {
    let pods: Api<Pod> = Api::all(client.kube());
    let list = pods.list(&ListParams::default()).await?;
    Ok(list.items.len())
}

/// Lists until the server lets the client in.
async fn let_in(client: &ApiClient) {
    let asking = async {
        while let Err(error) = list(client).await {
            // The one error that the credentials' task mends.
            let told = error.to_string();
            assert!(
                matches!(&error, kube::Error::Api(status) if status.code == 401)
                    || told.contains("no client certificate yet"),
                "{told}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let asked = tokio::time::timeout(PATIENCE, asking).await;
    asked.expect("the client is let in");
}

#[track_caller]
fn why_down(client: &ApiClient) -> String {
    match client.connection().now() {
        Reachability::Down(why) => why,
        other => panic!("the server is {other:?}"),
    }
}

fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    let all = CertificateDer::pem_slice_iter(pem.as_bytes());
    all.collect::<Result<_, _>>().unwrap()
}

/// A server that wants a good client certificate; says in an alert what it thinks of each.
fn strict_server(authority: &Authority) -> SocketAddr {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    for certificate in certificates(&authority.pem()) {
        roots.add(certificate).unwrap();
    }
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots),
        provider.clone(),
    );
    let own: Identity = authority.server("kube-apiserver");
    let key = PrivateKeyDer::from_pem_slice(own.key_pem.as_bytes()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(certificates(&own.cert_pem), key)
        .unwrap();
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut tls = rustls::ServerConnection::new(config.clone()).unwrap();
            // The alert is written before the error is returned.
            drop(tls.complete_io(&mut stream));
            drop(stream.shutdown(std::net::Shutdown::Write));
            // Unread bytes would make a reset of the end, which can overtake the alert.
            drop(std::io::copy(&mut stream, &mut std::io::sink()));
        }
    });
    address
}

#[tokio::test]
async fn a_server_of_another_authority_is_not_trusted_and_the_way_out_told() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = server.cluster();
    let stranger = Authority::new("stranger").pem();
    cluster["certificate-authority-data"] = base64(stranger).into();
    let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
    list(&client).await.unwrap_err();
    let why = why_down(&client);
    for part in ["UnknownIssuer", "certificate-authority", "kubeconfig"] {
        assert!(why.contains(part), "{part}: {why}");
    }
    assert_eq!(server.tls.counts().len(), 0, "the token stays here");
}

#[tokio::test]
async fn the_servers_alert_about_a_client_certificate_is_told() {
    let authority = Authority::new("here");
    let address = strict_server(&authority);
    let cluster = json!({
        "server": format!("https://{address}"),
        "certificate-authority-data": base64(authority.pem()),
    });
    let expired = authority.client("system:node:n1", "system:nodes", -DAY);
    let foreign = Authority::new("stranger").client("system:node:n1", "system:nodes", DAY);
    for (identity, alert) in [(expired, "Expired"), (foreign, "alert")] {
        let dir = tempfile::tempdir().unwrap();
        let user = json!({
            "client-certificate-data": base64(&identity.cert_pem),
            "client-key-data": base64(&identity.key_pem),
        });
        let (client, _credentials) = client(dir.path(), &cluster, &user).await;
        list(&client).await.unwrap_err();
        let why = why_down(&client);
        assert!(why.contains(alert), "{alert}: {why}");
        assert!(why.contains("; now 20"), "a hint: {why}");
    }
}

/// How somebody gets through.
#[derive(Clone, Copy)]
enum Proxy {
    Connect,
    Socks5,
}

/// A proxy for `user` with the password `p@ss`. Returns its address and counts its tunnels.
async fn proxy(kind: Proxy) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tunnels = Arc::new(AtomicUsize::new(0));
    let counted = tunnels.clone();
    tokio::spawn(async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            let counted = counted.clone();
            tokio::spawn(async move {
                let target = match kind {
                    Proxy::Connect => connect_target(&mut near).await,
                    Proxy::Socks5 => socks_target(&mut near).await,
                };
                let mut far = TcpStream::connect(target).await.unwrap();
                counted.fetch_add(1, Ordering::SeqCst);
                // An error is a connection that one side has dropped.
                drop(tokio::io::copy_bidirectional(&mut near, &mut far).await);
            });
        }
    });
    (address, tunnels)
}

async fn connect_target(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let wanted = format!("basic {}", base64("user:p@ss"));
    let header = "proxy-authorization: ";
    let given = head
        .lines()
        .find(|line| line.to_lowercase().starts_with(header))
        .unwrap_or_else(|| panic!("no credentials in {head:?}"));
    assert_eq!(given[header.len()..].to_lowercase(), wanted.to_lowercase());
    stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    let target = head.strip_prefix("CONNECT ").expect("CONNECT");
    target.split(' ').next().unwrap().to_owned()
}

async fn socks_target(stream: &mut TcpStream) -> String {
    async fn some(stream: &mut TcpStream) -> Vec<u8> {
        let length = stream.read_u8().await.unwrap();
        let mut bytes = vec![0; usize::from(length)];
        stream.read_exact(&mut bytes).await.unwrap();
        bytes
    }
    assert_eq!(stream.read_u8().await.unwrap(), 5);
    assert!(some(stream).await.contains(&2), "it offers a password");
    stream.write_all(&[5, 2]).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), 1);
    assert_eq!(some(stream).await, b"user");
    assert_eq!(some(stream).await, b"p@ss");
    stream.write_all(&[1, 0]).await.unwrap();
    let mut request = [0; 4];
    stream.read_exact(&mut request).await.unwrap();
    assert_eq!(request[..3], [5, 1, 0]);
    let host = match request[3] {
        1 => {
            let mut ip = [0; 4];
            stream.read_exact(&mut ip).await.unwrap();
            std::net::Ipv4Addr::from(ip).to_string()
        }
        3 => String::from_utf8(some(stream).await).unwrap(),
        other => panic!("address type {other}"),
    };
    let port = stream.read_u16().await.unwrap();
    let done = [5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    stream.write_all(&done).await.unwrap();
    format!("{host}:{port}")
}

#[tokio::test]
async fn proxies_of_the_kubeconfig_are_used_with_their_passwords() {
    for (kind, scheme) in [(Proxy::Connect, "http"), (Proxy::Socks5, "socks5")] {
        let server = Server::start().await;
        let (address, tunnels) = proxy(kind).await;
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = server.cluster();
        cluster["proxy-url"] = format!("{scheme}://user:p%40ss@{address}").into();
        let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
        assert_eq!(list(&client).await.unwrap(), 0, "{scheme}");
        assert_eq!(tunnels.load(Ordering::SeqCst), 1, "{scheme}");
    }
}

#[tokio::test]
async fn hundreds_of_watches_share_few_connections_and_hold_up_nothing() {
    const WATCHES: usize = 200;
    let server = Server::start().await;
    // It counts connections.
    let (address, tunnels) = proxy(Proxy::Socks5).await;
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = server.cluster();
    cluster["proxy-url"] = format!("socks5://user:p%40ss@{address}").into();
    let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
    let pods: Api<Pod> = Api::all(client.kube());
    let (mut open, params) = (Vec::new(), WatchParams::default());
    for _ in 0..WATCHES {
        let watch = pods.watch(&params, "1");
        let watch = tokio::time::timeout(PATIENCE, watch).await;
        open.push(watch.expect("a watch begins").unwrap().boxed());
    }
    assert_eq!(server.tls.open_watches("pods"), WATCHES);
    let listed = tokio::time::timeout(PATIENCE, list(&client)).await;
    assert_eq!(listed.expect("a list beside the watches").unwrap(), 0);
    let connections = tunnels.load(Ordering::SeqCst);
    assert!(connections <= 4, "{connections} connections");
}

#[tokio::test]
async fn a_plugin_gives_the_token_and_is_run_again_when_it_is_refused() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let (script, token) = (dir.path().join("plugin.sh"), dir.path().join("token"));
    let text = format!(
        "printf '{{\"apiVersion\":\"client.authentication.k8s.io/v1beta1\",\"kind\":\"ExecCredential\",\
         \"status\":{{\"token\":\"%s\"}}}}' \"$(cat {})\"\n",
        token.display()
    );
    std::fs::write(&script, text).unwrap();
    std::fs::write(&token, "one").unwrap();
    server.lets_in("one");
    let user = json!({ "exec": {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "/bin/sh",
        "args": [script],
        "interactiveMode": "Never",
    } });
    let (client, credentials) = client(dir.path(), &server.cluster(), &user).await;
    let end = CancellationToken::new();
    let running = tokio::spawn(credentials.run(end.clone()));
    let_in(&client).await;
    std::fs::write(&token, "two").unwrap();
    server.lets_in("two");
    let_in(&client).await;
    end.cancel();
    running.await.unwrap();
}

#[tokio::test]
async fn a_token_file_that_is_exchanged_is_used_over_tls_too() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "one\n").unwrap();
    server.lets_in("one");
    let user = json!({ "tokenFile": token });
    let (client, credentials) = client(dir.path(), &server.cluster(), &user).await;
    assert_eq!(list(&client).await.unwrap(), 0);
    let end = CancellationToken::new();
    let running = tokio::spawn(credentials.run(end.clone()));
    let next = dir.path().join("token.next");
    std::fs::write(&next, "two\n").unwrap();
    std::fs::rename(&next, &token).unwrap();
    server.lets_in("two");
    let_in(&client).await;
    end.cancel();
    running.await.unwrap();
}

//! A server over TLS and HTTP/2 that knows some clients, and the client under test.

use std::collections::BTreeSet;
use std::future::Future;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, Uri};
use base64::Engine as _;
use holdfast::apiserver::{ApiClient, ApiSettings, Credentials, Reachability, connect};
use holdfast::types::boot::BootId;
use holdfast::types::metrics::Metrics;
use holdfast::types::time::SystemClock;
use holdfast_testkit::envtest::{Authority, Identity};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn base64(text: impl AsRef<[u8]>) -> String {
    base64::engine::general_purpose::STANDARD.encode(text)
}

/// Lists no pods; its watches say nothing.
pub(crate) struct Server {
    pub(crate) authority: Arc<Authority>,
    address: SocketAddr,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    /// The values of `Authorization` that are let in.
    bearers: Mutex<BTreeSet<String>>,
    /// The names of client certificates that are let in. With none of both everybody is.
    names: Mutex<BTreeSet<String>>,
    /// `Authorization` of each request.
    given: Mutex<Vec<String>>,
    /// The server's name each connection asked for.
    asked_for: Mutex<Vec<String>>,
    watches: AtomicUsize,
}

/// Counts a watch as long as it is open.
struct Watch(Arc<Seen>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.watches.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::at("127.0.0.1", Arc::new(Authority::new("here"))).await
    }

    /// At an address of this machine, with a certificate for 127.0.0.1 and `kubernetes`.
    pub(crate) async fn at(host: &str, authority: Arc<Authority>) -> Self {
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let mut tls = server_tls(&authority.server("kube-apiserver"), &authority);
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        tokio::spawn({
            let seen = seen.clone();
            async move {
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    let (acceptor, seen) = (acceptor.clone(), seen.clone());
                    tokio::spawn(async move {
                        // Whoever does not trust the server breaks off.
                        let Ok(stream) = acceptor.accept(stream).await else {
                            return;
                        };
                        let (_, connection) = stream.get_ref();
                        let name = connection.peer_certificates().map(|chain| {
                            let (_, leaf) = x509_parser::parse_x509_certificate(&chain[0]).unwrap();
                            leaf.subject().to_string()
                        });
                        let asked_for = connection.server_name().unwrap_or_default().to_owned();
                        seen.asked_for.lock().unwrap().push(asked_for);
                        let router = Router::new().fallback(move |uri: Uri, headers: HeaderMap| {
                            std::future::ready(seen.answer(name.as_deref(), &uri, &headers))
                        });
                        let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                            .serve_connection(
                                TokioIo::new(stream),
                                TowerToHyperService::new(router),
                            );
                        // An error is a client that went away.
                        drop(served.await);
                    });
                }
            }
        });
        Self {
            authority,
            address,
            seen,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn cluster(&self) -> Value {
        self.cluster_at(&self.address.to_string())
    }

    /// As a kubeconfig has it that knows the server by another address.
    pub(crate) fn cluster_at(&self, address: &str) -> Value {
        json!({
            "server": format!("https://{address}"),
            "certificate-authority-data": base64(self.authority.pem()),
        })
    }

    /// These tokens, and nobody else.
    pub(crate) fn lets_in(&self, tokens: &[&str]) {
        let bearers = tokens.iter().map(|token| format!("Bearer {token}"));
        *self.seen.bearers.lock().unwrap() = bearers.collect();
    }

    /// The client certificate of this name, and nobody else's.
    pub(crate) fn lets_in_name(&self, name: &str) {
        let name = format!("O=system:nodes, CN={name}");
        *self.seen.names.lock().unwrap() = BTreeSet::from([name]);
    }

    /// The token of the newest request.
    pub(crate) fn newest(&self) -> String {
        let given = self.seen.given.lock().unwrap();
        given.last().cloned().unwrap_or_default()
    }

    /// Requests so far.
    pub(crate) fn requests(&self) -> usize {
        self.seen.given.lock().unwrap().len()
    }

    /// The names that connections have asked for.
    pub(crate) fn asked_for(&self) -> Vec<String> {
        self.seen.asked_for.lock().unwrap().clone()
    }

    pub(crate) fn open_watches(&self) -> usize {
        self.seen.watches.load(Ordering::SeqCst)
    }
}

impl Seen {
    fn answer(
        self: &Arc<Self>,
        name: Option<&str>,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> (StatusCode, Body) {
        let given = headers.get("authorization").map(|given| given.to_str());
        let given = given.map_or("", Result::unwrap).to_owned();
        self.given.lock().unwrap().push(given.clone());
        let (bearers, names) = (self.bearers.lock().unwrap(), self.names.lock().unwrap());
        let everybody = bearers.is_empty() && names.is_empty();
        if !everybody && !bearers.contains(&given) && !name.is_some_and(|name| names.contains(name))
        {
            return (StatusCode::UNAUTHORIZED, Body::from("who?"));
        }
        if uri
            .query()
            .is_some_and(|query| query.contains("watch=true"))
        {
            self.watches.fetch_add(1, Ordering::SeqCst);
            let open = Watch(self.clone());
            let silence = futures::stream::unfold(open, async |open| {
                let nothing: Option<Result<Vec<u8>, std::io::Error>> = std::future::pending().await;
                nothing.map(|nothing| (nothing, open))
            });
            return (StatusCode::OK, Body::from_stream(silence));
        }
        let list = json!({
            "apiVersion": "v1", "kind": "PodList", "items": [],
            "metadata": { "resourceVersion": "1" },
        });
        (StatusCode::OK, Body::from(list.to_string()))
    }
}

pub(crate) fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    let all = CertificateDer::pem_slice_iter(pem.as_bytes());
    all.collect::<Result<_, _>>().unwrap()
}

/// Serves as `own` and takes clients of `authority`, and those without a certificate.
pub(crate) fn server_tls(own: &Identity, authority: &Authority) -> rustls::ServerConfig {
    let clients = clients_of(authority).allow_unauthenticated().build();
    serving(own, clients.unwrap())
}

pub(crate) fn clients_of(authority: &Authority) -> rustls::server::ClientCertVerifierBuilder {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in certificates(&authority.pem()) {
        roots.add(certificate).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
}

/// Serves as `own` and takes these clients.
pub(crate) fn serving(
    own: &Identity,
    clients: Arc<dyn rustls::server::danger::ClientCertVerifier>,
) -> rustls::ServerConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivateKeyDer::from_pem_slice(own.key_pem.as_bytes()).unwrap();
    rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(clients)
        .with_single_cert(certificates(&own.cert_pem), key)
        .unwrap()
}

pub(crate) fn write_kubeconfig(dir: &Path, cluster: &Value, user: &Value) -> PathBuf {
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

/// A client of the kubeconfig in `dir`.
pub(crate) async fn client_of(dir: &Path) -> Result<(ApiClient, Credentials), String> {
    let settings = ApiSettings {
        kubeconfig: Some(dir.join("kubeconfig")),
        bootstrap_kubeconfig: None,
        lifeline: None,
        cert_dir: dir.join("pki"),
        node_name: "n1".to_owned(),
        rotate_certificates: false,
        waits_for_files: false,
        qps: 1000,
        burst: 1000,
    };
    let clock = Arc::new(SystemClock::new(BootId(1)));
    match connect(&settings, clock, Metrics::default()).await {
        Ok(connected) => Ok(connected.expect("a client")),
        Err(error) => Err(format!("{error} {error:?}")),
    }
}

pub(crate) async fn client(dir: &Path, cluster: &Value, user: &Value) -> (ApiClient, Credentials) {
    write_kubeconfig(dir, cluster, user);
    client_of(dir).await.unwrap()
}

/// Keeps the credentials good as long as it is there.
pub(crate) struct Kept(CancellationToken, JoinHandle<()>);

impl Kept {
    pub(crate) fn new(credentials: Credentials) -> Self {
        let end = CancellationToken::new();
        Self(end.clone(), tokio::spawn(credentials.run(end)))
    }

    pub(crate) async fn end(self) {
        self.0.cancel();
        self.1.await.unwrap();
    }
}

pub(crate) async fn list(client: &ApiClient) -> kube::Result<usize> {
    let pods: Api<Pod> = Api::all(client.kube());
    let list = pods.list(&ListParams::default()).await?;
    Ok(list.items.len())
}

/// Lists until the server lets the client in.
pub(crate) async fn let_in(client: &ApiClient) {
    let asking = async {
        while let Err(error) = list(client).await {
            // The errors that the credentials' task mends.
            let told = error.to_string();
            let refused = matches!(&error, kube::Error::Api(status) if status.code == 401);
            let none = told.contains("no credentials yet");
            // What was in flight when a certificate was exchanged.
            let cut = client_is_cut(&error);
            assert!(refused || none || cut, "{told}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within("the client is let in", asking).await;
}

fn client_is_cut(error: &kube::Error) -> bool {
    !matches!(error, kube::Error::Api(_)) && format!("{error:?}").contains("Closed")
}

/// Asks until it is so.
pub(crate) async fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let asking = async {
        while !so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(what, asking).await;
}

pub(crate) async fn within<T>(what: &str, doing: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, doing).await;
    done.unwrap_or_else(|_| panic!("never: {what}"))
}

#[track_caller]
pub(crate) fn why_down(client: &ApiClient) -> String {
    match client.connection().now() {
        Reachability::Down(why) => why,
        other => panic!("the server is {other:?}"),
    }
}

/// What is logged on this thread, by everybody and in every detail.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Logs until the guard goes.
    pub(crate) fn begin() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The agent's own lines with `words`.
    pub(crate) fn lines(&self, words: &str) -> Vec<String> {
        let text = self.text();
        let lines = text
            .lines()
            .filter(|line| line.contains("holdfast") && line.contains(words));
        lines.map(str::to_owned).collect()
    }
}

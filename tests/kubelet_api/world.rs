//! A server with an API server that only answers reviews, and clients of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use holdfast::apiserver::ApiClient;
use holdfast::kubeletconfig::flags::KubeletFlags;
use holdfast::kubeletconfig::{AgentConfig, resolve};
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts};
use holdfast::node_object::NodeObject;
use holdfast::pod_manager::PodManager;
use holdfast::server::HealthChecks;
use holdfast::server::kubelet::{DebugHooks, Limits, NodeApi, Server};
use holdfast::store::backend::MemoryBackend;
use holdfast::store::{Store, StoreOptions, codec};
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, Clock, Event, EventRecorder, Stamp};
use holdfast_testkit::validation::{Write, violations};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

pub const NODE: &str = "node-1";

/// A clock that moves when it is told to; it starts at the real time, so that certificates are good.
#[derive(Clone)]
pub struct Hand(Arc<AtomicI64>, i64);

impl Hand {
    pub fn new() -> Self {
        let now = jiff::Timestamp::now().as_millisecond();
        Self(Arc::new(AtomicI64::new(0)), now)
    }

    /// A clock that stands there, in seconds since 1970.
    pub fn at(seconds: i64) -> Self {
        Self(Arc::new(AtomicI64::new(0)), seconds * 1000)
    }

    pub fn advance(&self, by: Duration) {
        let ms = i64::try_from(by.as_millis()).unwrap();
        self.0.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now(&self) -> Stamp {
        let ms = self.0.load(Ordering::SeqCst);
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: self.1 + ms,
        }
    }
}

struct Quiet;

impl EventRecorder for Quiet {
    fn record(&self, _: Event) {}
}

/// What the API server says of tokens and rights.
#[derive(Default)]
pub struct Reviews {
    /// User and groups of each token.
    pub tokens: BTreeMap<String, (String, Vec<String>)>,
    /// `user verb subresource`.
    pub rights: BTreeSet<String>,
    pub token_reviews: usize,
    pub access_reviews: Vec<Value>,
    /// It does not answer.
    pub down: bool,
    /// How long an answer takes.
    pub delay: Duration,
}

impl Reviews {
    fn answer(&mut self, path: &str, mut review: Value) -> Option<Value> {
        if self.down {
            return None;
        }
        let (group, resource) = match path.ends_with("/tokenreviews") {
            true => ("authentication.k8s.io", "tokenreviews"),
            false => ("authorization.k8s.io", "subjectaccessreviews"),
        };
        let found = violations(&Write {
            group,
            resource,
            subresource: "",
            namespace: "",
            name: "",
            old: None,
            new: &review,
        });
        assert_eq!(found, [], "a current server refuses it");
        if resource == "tokenreviews" {
            self.token_reviews += 1;
            let token = review["spec"]["token"].as_str().unwrap();
            review["status"] = match self.tokens.get(token) {
                Some((name, groups)) => {
                    json!({"authenticated": true, "user": {"username": name, "groups": groups}})
                }
                None => json!({"authenticated": false, "error": "[invalid bearer token]"}),
            };
            return Some(review);
        }
        assert!(path.ends_with("/subjectaccessreviews"), "{path}");
        let spec = &review["spec"];
        let attributes = &spec["resourceAttributes"];
        assert_eq!(
            (&attributes["resource"], &attributes["name"]),
            (&json!("nodes"), &json!(NODE))
        );
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let right = format!(
            "{} {} {}",
            text(&spec["user"]),
            text(&attributes["verb"]),
            text(&attributes["subresource"])
        );
        let allowed = self.rights.contains(&right);
        self.access_reviews.push(spec.clone());
        review["status"] = json!({"allowed": allowed});
        Some(review)
    }
}

pub type SharedReviews = Arc<Mutex<Reviews>>;

fn client_of(reviews: &SharedReviews, clock: &Hand) -> ApiClient {
    let reviews = Arc::clone(reviews);
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let reviews = Arc::clone(&reviews);
        async move {
            let path = request.uri().path().to_owned();
            let body = request.into_body().collect_bytes().await?;
            let review = serde_json::from_slice(&body)?;
            let delay = reviews.lock().unwrap().delay;
            tokio::time::sleep(delay).await;
            let answer = reviews.lock().unwrap().answer(&path, review);
            match answer {
                Some(answer) => Ok::<_, tower::BoxError>(
                    Response::builder()
                        .status(201)
                        .header("content-type", "application/json")
                        .body(kube::client::Body::from(serde_json::to_vec(&answer)?))?,
                ),
                None => Err("connection refused".into()),
            }
        }
    });
    ApiClient::over(service, (10_000, 10_000), Arc::new(clock.clone()))
}

/// A CA.
pub struct Ca {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    /// Certificate and key, PEM, with these names.
    pub fn sign(&self, params: CertificateParams) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    pub fn serving(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    /// A client's identity.
    pub fn user(&self, name: &str, group: Option<&str>) -> Identity {
        let mut params = CertificateParams::default();
        let mut subject = DistinguishedName::new();
        subject.push(DnType::CommonName, name);
        if let Some(group) = group {
            subject.push(DnType::OrganizationName, group);
        }
        params.distinguished_name = subject;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let (certificate, key) = self.sign(params);
        Identity { certificate, key }
    }

    /// A certificate for what is asked for, good for these seconds since 1970.
    pub fn sign_request(&self, request: &str, good: std::ops::Range<u64>) -> String {
        let mut request = rcgen::CertificateSigningRequestParams::from_pem(request).unwrap();
        let at = |seconds| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        request.params.not_before = at(good.start);
        request.params.not_after = at(good.end);
        request.signed_by(&self.issuer).unwrap().pem()
    }
}

#[derive(Clone)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

pub struct World {
    pub dir: tempfile::TempDir,
    pub clock: Hand,
    pub reviews: SharedReviews,
    pub ca: Ca,
    pub metrics: Metrics,
    pub node: NodeObject,
    pub address: Option<SocketAddr>,
    pub read_only: Option<SocketAddr>,
    pub stop: CancellationToken,
    running: Option<tokio::task::JoinHandle<()>>,
}

/// Short enough for tests.
pub fn limits() -> Limits {
    Limits {
        look: Duration::from_millis(50),
        ..Limits::default()
    }
}

impl World {
    /// A server as it is by default in a cluster, with a client CA.
    pub async fn new() -> Self {
        Self::with(limits(), |_| {}).await
    }

    pub async fn with(limits: Limits, change: impl FnOnce(&mut AgentConfig)) -> Self {
        let clock = Hand::new();
        let reviews = SharedReviews::default();
        let api = client_of(&reviews, &clock);
        Self::over(limits, clock, reviews, Some(api), change)
            .await
            .unwrap()
    }

    pub async fn over(
        limits: Limits,
        clock: Hand,
        reviews: SharedReviews,
        api: Option<ApiClient>,
        change: impl FnOnce(&mut AgentConfig),
    ) -> Result<Self, String> {
        let dir = tempfile::tempdir().unwrap();
        let ca = Ca::new("clients");
        let ca_file = dir.path().join("client-ca.crt");
        std::fs::write(&ca_file, &ca.pem).unwrap();
        let flags = KubeletFlags {
            root_dir: Some(dir.path().join("root")),
            state_dir: Some(dir.path().join("state")),
            hostname_override: Some(NODE.to_owned()),
            ..KubeletFlags::default()
        };
        let mut config = resolve(&flags).unwrap().0;
        config.kubeconfig = api.as_ref().map(|_| dir.path().join("kubeconfig"));
        config.kubelet.address = IpAddr::from([127, 0, 0, 1]);
        config.kubelet.port = 0;
        config.kubelet.authentication.client_ca_file = Some(ca_file);
        change(&mut config);

        let metrics = Metrics::default();
        let backend = MemoryBackend::default();
        let loaded = codec::load(holdfast::store::backend::Backend::iter(&backend), 1);
        let store = Store::start(
            Box::new(backend),
            loaded,
            StoreOptions::default(),
            Arc::new(clock.clone()),
            metrics.clone(),
        )
        .unwrap();
        let socket = format!("unix://{}", dir.path().join("no-runtime.sock").display());
        let cri = CriClient::new(&socket, None, CriTimeouts::default(), metrics.clone()).unwrap();
        let stop = CancellationToken::new();
        let node = NodeObject::default();
        let api = NodeApi {
            store,
            pods: PodManager::default(),
            cri,
            clock: Arc::new(clock.clone()),
            metrics: metrics.clone(),
            addresses: holdfast::types::host_addresses::HostAddresses::fixed(Vec::new()),
            config: Arc::new(config),
            node: node.clone(),
            health: HealthChecks {
                clock: Arc::new(clock.clone()),
                sync_loop: Arc::new(|_| Ok(())),
                notes: Vec::new(),
                ready: Vec::new(),
            },
            recorder: Arc::new(Quiet),
            api,
            restored: Arc::default(),
            volumes: Arc::default(),
            stop: stop.clone(),
            debug: DebugHooks::default(),
        };
        let server = Server::open(api, limits).await.map_err(|error| {
            let mut text = error.to_string();
            let mut source = std::error::Error::source(&error);
            while let Some(inner) = source {
                text = format!("{text}: {inner}");
                source = inner.source();
            }
            text
        })?;
        let addresses = server
            .as_ref()
            .map_or((None, None), |s| (s.address(), s.read_only_address()));
        let running = server.map(|server| tokio::spawn(server.run()));
        Ok(Self {
            dir,
            clock,
            reviews,
            ca,
            metrics,
            node,
            address: addresses.0,
            read_only: addresses.1,
            stop,
            running,
        })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn pki(&self, name: &str) -> PathBuf {
        self.path("root/pki").join(name)
    }

    pub fn token(&self, token: &str, user: &str) {
        let mut reviews = self.reviews.lock().unwrap();
        let who = (user.to_owned(), vec!["testers".to_owned()]);
        reviews.tokens.insert(token.to_owned(), who);
    }

    pub fn allow(&self, user: &str, verb: &str, subresource: &str) {
        let mut reviews = self.reviews.lock().unwrap();
        reviews
            .rights
            .insert(format!("{user} {verb} {subresource}"));
    }

    pub fn review<T>(&self, look: impl FnOnce(&mut Reviews) -> T) -> T {
        look(&mut self.reviews.lock().unwrap())
    }

    /// The sum of a metric's lines that contain all of `parts`.
    pub fn metric(&self, parts: &[&str]) -> f64 {
        let text = self.metrics.encode().unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let lines = lines.filter(|line| parts.iter().all(|part| line.contains(part)));
        lines
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum()
    }

    pub async fn connect(&self) -> Client {
        self.connect_as(None).await
    }

    pub async fn connect_as(&self, identity: Option<&Identity>) -> Client {
        Client::over(self.tls(identity, &[b"http/1.1"]).await.unwrap()).await
    }

    /// A TLS connection that offers these protocols.
    pub async fn tls(
        &self,
        identity: Option<&Identity>,
        protocols: &[&[u8]],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        tls_from(
            IpAddr::from([127, 0, 0, 1]),
            self.address.unwrap(),
            identity,
            protocols,
        )
        .await
    }

    /// Status and body of a request on a connection of its own.
    pub async fn get(&self, path: &str, token: Option<&str>) -> (StatusCode, String) {
        self.ask("GET", path, token, None).await
    }

    pub async fn ask(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        identity: Option<&Identity>,
    ) -> (StatusCode, String) {
        let mut client = self.connect_as(identity).await;
        client.ask(method, path, token).await
    }

    pub async fn end(mut self) {
        self.stop.cancel();
        if let Some(running) = self.running.take() {
            tokio::time::timeout(Duration::from_secs(20), running)
                .await
                .expect("the server ends")
                .unwrap();
        }
    }
}

/// A client from a local address.
pub async fn tls_from(
    local: IpAddr,
    server: SocketAddr,
    identity: Option<&Identity>,
    protocols: &[&[u8]],
) -> std::io::Result<TlsStream<TcpStream>> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(local, 0))?;
    let stream = socket.connect(server).await?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anything(provider)));
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => {
            let chain = CertificateDer::pem_slice_iter(identity.certificate.as_bytes());
            let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
            builder
                .with_client_auth_cert(chain.map(Result::unwrap).collect(), key)
                .unwrap()
        }
    };
    config.alpn_protocols = protocols.iter().map(|one| one.to_vec()).collect();
    TlsConnector::from(Arc::new(config))
        .connect(ServerName::try_from(NODE).unwrap(), stream)
        .await
}

/// Takes every serving certificate; tests look at it themselves.
#[derive(Debug)]
struct Anything(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for Anything {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            cert,
            dss,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            cert,
            dss,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// A connection that can be used again.
pub struct Client(hyper::client::conn::http1::SendRequest<Body>);

impl Client {
    pub async fn over<I>(io: I) -> Self
    where
        I: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io))
            .await
            .unwrap();
        tokio::spawn(async move {
            let _ended: Result<(), hyper::Error> = connection.await;
        });
        Self(sender)
    }

    pub async fn ask(
        &mut self,
        method: &str,
        path: &str,
        token: Option<&str>,
    ) -> (StatusCode, String) {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", NODE);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        self.send(request.body(Body::empty()).unwrap())
            .await
            .unwrap()
    }

    /// Status and body; a body that does not end is read for a second.
    pub async fn send(
        &mut self,
        request: Request<Body>,
    ) -> Result<(StatusCode, String), hyper::Error> {
        // The answer before may still be on its way out of the connection.
        self.0.ready().await?;
        let answer = self.0.send_request(request);
        let answer = tokio::time::timeout(Duration::from_secs(30), answer)
            .await
            .expect("an answer within 30 s")?;
        let status = answer.status();
        let body = axum::body::to_bytes(Body::new(answer.into_body()), 1 << 20);
        let body = tokio::time::timeout(Duration::from_secs(1), body).await;
        let text = match body {
            Ok(Ok(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
            _ => String::new(),
        };
        Ok((status, text))
    }

    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

/// An HTTP/2 connection.
pub async fn http2<I>(io: I) -> hyper::client::conn::http2::SendRequest<Body>
where
    I: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io))
            .await
            .unwrap();
    tokio::spawn(async move {
        let _ended: Result<(), hyper::Error> = connection.await;
    });
    sender
}

/// Waits until `condition` holds.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let until = tokio::time::Instant::now() + Duration::from_secs(30);
    while !condition().await {
        assert!(tokio::time::Instant::now() < until, "{what} within 30 s");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The serving certificate of a new connection.
pub async fn certificate(world: &World) -> Option<Vec<u8>> {
    let stream = world.tls(None, &[]).await.ok()?;
    let (_, session) = stream.get_ref();
    Some(session.peer_certificates()?.first()?.to_vec())
}

pub fn first_of(pem: &Path) -> Vec<u8> {
    let text = std::fs::read(pem).unwrap();
    CertificateDer::from_pem_slice(&text).unwrap().to_vec()
}

/// The process's resident memory in MiB.
pub fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        / 1024
}

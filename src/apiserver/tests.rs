//! The client against small servers of the tests' own: what it says about bad kubeconfigs, how it reports, and
//! how it gets and renews its certificate.

mod awaited;
mod introduced;
mod told;
mod year_off;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use base64::Engine as _;
use holdfast_testkit::validation::{Write, violations};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::connector::Bearer;
use super::*;
use crate::types::boot::BootId;
use crate::types::time::Stamp;

/// A clock that stands where it is put, in seconds since 1970.
#[derive(Clone, Default)]
struct Hand(Arc<AtomicI64>);

impl Clock for Hand {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms: self.0.load(Ordering::SeqCst) * 1000,
        }
    }
}

fn today() -> i64 {
    jiff::Timestamp::now().as_second()
}

fn hand(seconds: i64) -> Hand {
    Hand(Arc::new(AtomicI64::new(seconds)))
}

async fn serve(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}")
}

fn write_config(path: &Path, server: &str, user: Value) {
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": user}],
    });
    std::fs::write(path, text.to_string()).unwrap();
}

fn settings(dir: &Path) -> ApiSettings {
    ApiSettings {
        kubeconfig: Some(dir.join("kubeconfig")),
        bootstrap_kubeconfig: None,
        lifeline: None,
        cert_dir: dir.join("pki"),
        node_name: "n1".to_owned(),
        rotate_certificates: true,
        waits_for_files: false,
        qps: 1000,
        burst: 1000,
    }
}

/// A certificate and its key in one PEM.
fn identity(from: i64, until: i64) -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    set_life(&mut params, from, until);
    let certificate = params.self_signed(&key).unwrap();
    format!("{}{}", certificate.pem(), key.serialize_pem())
}

fn set_life(params: &mut rcgen::CertificateParams, from: i64, until: i64) {
    let day = |seconds: i64| {
        let date = jiff::Timestamp::from_second(seconds)
            .unwrap()
            .to_zoned(jiff::tz::TimeZone::UTC)
            .date();
        rcgen::date_time_ymd(
            i32::from(date.year()),
            date.month().unsigned_abs(),
            date.day().unsigned_abs(),
        )
    };
    params.not_before = day(from);
    params.not_after = day(until);
}

const DAY: i64 = 86_400;

/// Waits until `done` says so; the tests' clock stands still for nothing else.
async fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(tokio::time::Instant::now() < until, "never: {what}");
        tokio::task::yield_now().await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn text(error: &ApiError) -> String {
    transport::explain(error, "", 0)
}

#[tokio::test]
async fn without_a_kubeconfig_there_is_no_client() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(dir.path());
    settings.kubeconfig = None;
    let connected = connect(&settings, Arc::new(hand(0)), Metrics::default())
        .await
        .unwrap();
    assert!(connected.is_none());
}

#[tokio::test]
async fn bad_kubeconfigs_are_told_with_file_name_and_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    let path = settings.kubeconfig.clone().unwrap();
    let cluster = json!([{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}]);
    let contexts = json!([{"name": "here", "context": {"cluster": "c", "user": "u"}}]);
    let config = |user: Value| {
        json!({"current-context": "here", "clusters": cluster, "contexts": contexts,
               "users": [{"name": "u", "user": user}]})
        .to_string()
    };
    let both = json!({"current-context": "here", "contexts": contexts, "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://x", "insecure-skip-tls-verify": true,
            "certificate-authority": "/ca"}}]});
    for (content, says) in [
        (
            None,
            vec![
                "check --kubeconfig",
                "--bootstrap-kubeconfig",
                "No such file",
            ],
        ),
        (Some("{".to_owned()), vec!["parse kubeconfig"]),
        (
            Some(json!({"contexts": contexts, "clusters": cluster}).to_string()),
            vec!["no current-context", "\"here\""],
        ),
        (
            Some(json!({"current-context": "there", "contexts": contexts}).to_string()),
            vec!["context \"there\"", "it has \"here\""],
        ),
        (
            Some(json!({"current-context": "here", "contexts": contexts}).to_string()),
            vec!["cluster \"c\"", "it has none"],
        ),
        (
            Some(config(
                json!({"client-certificate": "/nowhere/c.pem", "client-key": "/nowhere/k"}),
            )),
            vec![
                "context \"here\"",
                "user \"u\"",
                "client-certificate /nowhere/c.pem: No such file",
            ],
        ),
        (
            Some(config(
                json!({"client-certificate-data": "e30=", "client-key-data": "e30="}),
            )),
            vec!["not a certificate in PEM"],
        ),
        (
            Some(config(json!({"tokenFile": "/nowhere/token"}))),
            vec!["tokenFile /nowhere/token: No such file"],
        ),
        (Some(both.to_string()), vec!["exclude each other"]),
    ] {
        match &content {
            Some(content) => std::fs::write(&path, content).unwrap(),
            None => assert!(!path.exists()),
        }
        let error = connect(&settings, Arc::new(hand(0)), Metrics::default())
            .await
            .unwrap_err();
        let told = text(&error);
        assert!(told.contains(path.to_str().unwrap()), "{content:?}: {told}");
        for part in says {
            assert!(told.contains(part), "{content:?}: {told}");
        }
    }
}

#[test]
fn certificates_out_of_their_time_are_told_with_both_dates() {
    let now = today();
    let life = |from, until| {
        let pem = identity(now + from * DAY, now + until * DAY);
        kubeconfig::Life::of_pem(pem.as_bytes()).unwrap()
    };
    assert_eq!(life(-2, 2).complaint(now), None);
    let expired = life(-9, -3).complaint(now).unwrap();
    assert!(
        expired.contains("expired at ") && expired.contains("it is now "),
        "{expired}"
    );
    let early = life(3, 9).complaint(now).unwrap();
    assert!(early.contains("is this machine's clock wrong"), "{early}");
}

#[tokio::test]
async fn a_server_that_is_away_or_an_expired_certificate_keeps_nothing_from_starting() {
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    let path = settings.kubeconfig.clone().unwrap();
    let now = today();
    let pem = identity(now - 9 * DAY, now - 3 * DAY);
    std::fs::write(dir.path().join("id.pem"), pem).unwrap();
    let files = json!({"client-certificate": "id.pem", "client-key": "id.pem"});
    write_config(&path, "https://127.0.0.1:1", files);
    let (client, _credentials) = connect(&settings, Arc::new(hand(now)), Metrics::default())
        .await
        .unwrap()
        .unwrap();
    let error = Api::<Pod>::all(client.kube())
        .list(&ListParams::default())
        .await
        .unwrap_err();
    assert_eq!(Failure::of(&error), Failure::Transient, "{error}");
    let Reachability::Down(why) = client.connection().now() else {
        panic!("{:?}", client.connection().now());
    };
    assert!(why.contains("refused"), "the cause is told: {why}");
}

#[tokio::test]
async fn answers_are_reported_whatever_they_say_and_gateways_are_not_answers() {
    let code = Arc::new(AtomicUsize::new(200));
    let served = code.clone();
    let answer = move || {
        let code = served.load(Ordering::SeqCst);
        async move {
            let status = StatusCode::from_u16(u16::try_from(code).unwrap()).unwrap();
            let mut headers = HeaderMap::new();
            if code == 429 {
                headers.insert("retry-after", "9".parse().unwrap());
                return (status, headers, "Too many requests".to_owned()).into_response();
            }
            let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []});
            (status, headers, list.to_string()).into_response()
        }
    };
    let server = serve(Router::new().route("/api/v1/pods", get(answer))).await;
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    write_config(
        settings.kubeconfig.as_deref().unwrap(),
        &server,
        json!({"token": "t"}),
    );
    let metrics = Metrics::default();
    let (client, _credentials) = connect(&settings, Arc::new(hand(today())), metrics.clone())
        .await
        .unwrap()
        .unwrap();
    let pods: Api<Pod> = Api::all(client.kube());
    for (status, up) in [
        (200, true),
        (503, false),
        (401, true),
        (502, false),
        (403, true),
        (429, true),
    ] {
        code.store(status, Ordering::SeqCst);
        let result = pods.list(&ListParams::default()).await;
        assert_eq!(result.is_ok(), status == 200, "{status}");
        assert_eq!(
            client.connection().now() == Reachability::Up,
            up,
            "{status}"
        );
        if let Err(error) = result.as_ref()
            && status == 429
        {
            assert_eq!(
                retry_after(error),
                Some(Duration::from_secs(9)),
                "the header counts"
            );
        }
    }
    let told = metrics.encode().unwrap();
    let host = server.trim_start_matches("http://");
    for code in [200, 503, 401, 502, 403, 429] {
        let line = format!(
            "rest_client_requests_total{{code=\"{code}\",host=\"{host}\",method=\"GET\"}} 1"
        );
        assert!(told.contains(&line), "{line}: {told}");
    }
}

#[tokio::test]
async fn a_token_file_that_changes_is_used_without_a_restart() {
    let tokens = Arc::new(Mutex::new(Vec::<String>::new()));
    let seen = tokens.clone();
    let answer = move |headers: HeaderMap| {
        let token = headers["authorization"].to_str().unwrap().to_owned();
        seen.lock().unwrap().push(token);
        async {
            json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []}).to_string()
        }
    };
    let server = serve(Router::new().route("/api/v1/pods", get(answer))).await;
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    let file = dir.path().join("token");
    std::fs::write(&file, "one\n").unwrap();
    write_config(
        settings.kubeconfig.as_deref().unwrap(),
        &server,
        json!({"tokenFile": "token"}),
    );
    let (client, credentials) = connect(&settings, Arc::new(hand(today())), Metrics::default())
        .await
        .unwrap()
        .unwrap();
    let pods: Api<Pod> = Api::all(client.kube());
    pods.list(&ListParams::default()).await.unwrap();
    std::fs::write(&file, "another\n").unwrap();
    let token = CancellationToken::new();
    let running = tokio::spawn(credentials.run(token.clone()));
    let until = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        pods.list(&ListParams::default()).await.unwrap();
        if tokens.lock().unwrap().last().unwrap() == "Bearer another" {
            break;
        }
        assert!(tokio::time::Instant::now() < until, "{tokens:?}");
        tokio::task::yield_now().await;
    }
    assert_eq!(
        tokens.lock().unwrap()[0],
        "Bearer one",
        "white space is cut off"
    );
    token.cancel();
    running.await.unwrap();
}

/// An API server that knows certificate signing requests only, and signs those that the test selects.
#[derive(Clone)]
struct Signer(Arc<SignerState>);

struct SignerState {
    requests: Mutex<BTreeMap<String, Value>>,
    creations: AtomicUsize,
    /// `approve`, `deny` or anything else to leave requests waiting.
    verdict: Mutex<&'static str>,
    life: Mutex<(i64, i64)>,
    authority: rcgen::Issuer<'static, rcgen::KeyPair>,
}

struct Public(Vec<u8>);

impl rcgen::PublicKeyData for Public {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

impl Signer {
    fn new(life: (i64, i64)) -> Self {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        Self(Arc::new(SignerState {
            requests: Mutex::default(),
            creations: AtomicUsize::new(0),
            verdict: Mutex::new("wait"),
            life: Mutex::new(life),
            authority: rcgen::Issuer::new(params, rcgen::KeyPair::generate().unwrap()),
        }))
    }

    fn say(&self, verdict: &'static str) {
        *self.0.verdict.lock().unwrap() = verdict;
    }

    fn creations(&self) -> usize {
        self.0.creations.load(Ordering::SeqCst)
    }

    fn sign(&self, object: &Value) -> String {
        let standard = &base64::engine::general_purpose::STANDARD;
        let pem = standard
            .decode(object["spec"]["request"].as_str().unwrap())
            .unwrap();
        let (_, block) = x509_parser::pem::parse_x509_pem(&pem).unwrap();
        use x509_parser::prelude::FromDer;
        let (_, csr) =
            x509_parser::certification_request::X509CertificationRequest::from_der(&block.contents)
                .unwrap();
        let info = &csr.certification_request_info;
        assert_eq!(
            info.subject.to_string(),
            "O=system:nodes, CN=system:node:n1"
        );
        let key = Public(info.subject_pki.subject_public_key.data.to_vec());
        let mut params = rcgen::CertificateParams::default();
        let (from, until) = *self.0.life.lock().unwrap();
        set_life(&mut params, from, until);
        let signed = params.signed_by(&key, &self.0.authority).unwrap();
        standard.encode(signed.pem())
    }

    fn router(&self) -> Router {
        const PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
        Router::new()
            .route(PATH, post(Self::create))
            .route(&format!("{PATH}/{{name}}"), get(Self::get))
            .with_state(self.clone())
    }

    async fn serve(&self) -> String {
        serve(self.router()).await
    }

    async fn create(State(signer): State<Self>, body: String) -> impl IntoResponse {
        let object: Value = serde_json::from_str(&body).unwrap();
        let found = violations(&Write {
            group: "certificates.k8s.io",
            resource: "certificatesigningrequests",
            subresource: "",
            namespace: "",
            name: "",
            old: None,
            new: &object,
        });
        assert_eq!(found, [], "a current server refuses it");
        let spec = &object["spec"];
        assert_eq!(
            spec["signerName"],
            "kubernetes.io/kube-apiserver-client-kubelet"
        );
        assert_eq!(spec["usages"], json!(["digital signature", "client auth"]));
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let mut requests = signer.0.requests.lock().unwrap();
        if requests.contains_key(&name) {
            return status(409);
        }
        signer.0.creations.fetch_add(1, Ordering::SeqCst);
        requests.insert(name, object.clone());
        (StatusCode::CREATED, object.to_string())
    }

    async fn get(State(signer): State<Self>, UrlPath(name): UrlPath<String>) -> impl IntoResponse {
        let Some(mut object) = signer.0.requests.lock().unwrap().get(&name).cloned() else {
            return status(404);
        };
        let verdict = *signer.0.verdict.lock().unwrap();
        match verdict {
            "approve" => object["status"] = json!({"certificate": signer.sign(&object)}),
            "deny" => {
                object["status"] = json!({"conditions": [
                    {"type": "Denied", "status": "True", "reason": "Unknown", "message": "who are you"}]});
            }
            _ => {}
        }
        (StatusCode::OK, object.to_string())
    }
}

fn status(code: u16) -> (StatusCode, String) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "no",
        "reason": if code == 404 { "NotFound" } else { "AlreadyExists" }});
    (StatusCode::from_u16(code).unwrap(), body.to_string())
}

fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn pems(directory: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| !path.is_symlink() && path.extension().is_some_and(|end| end == "pem"))
        .collect();
    found.sort();
    found
}

#[tokio::test]
async fn a_node_gets_its_first_certificate_and_renews_it() {
    let now = today();
    let clock = hand(now);
    let signer = Signer::new((now - DAY, now + 99 * DAY));
    let server = signer.serve().await;
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(dir.path());
    let bootstrap = dir.path().join("bootstrap");
    settings.bootstrap_kubeconfig = Some(bootstrap.clone());
    write_config(&bootstrap, &server, json!({"token": "abc"}));
    let kubeconfig = settings.kubeconfig.clone().unwrap();
    let pending = settings.cert_dir.join("kubelet-client.key.tmp");

    // Nobody approves: the agent starts and waits, and does not ask twice when it is restarted.
    let start = async |settings: &ApiSettings, clock: &Hand| {
        let (client, credentials) = connect(settings, Arc::new(clock.clone()), Metrics::default())
            .await
            .unwrap()
            .unwrap();
        let token = CancellationToken::new();
        (client, token.clone(), tokio::spawn(credentials.run(token)))
    };
    let (client, token, running) = start(&settings, &clock).await;
    let early = Api::<Pod>::all(client.kube())
        .list(&ListParams::default())
        .await
        .unwrap_err();
    assert!(early.to_string().contains("no credentials yet"), "{early}");
    assert_eq!(client.connection().now(), Reachability::Untried);
    eventually("a request", || signer.creations() == 1).await;
    token.cancel();
    running.await.unwrap();
    assert_eq!(mode(&pending), 0o600);
    assert!(!kubeconfig.exists());

    signer.say("approve");
    let (client, token, running) = start(&settings, &clock).await;
    eventually("the kubeconfig", || kubeconfig.exists()).await;
    assert_eq!(signer.creations(), 1, "the pending request was taken up");
    let current = settings.cert_dir.join("kubelet-client-current.pem");
    assert_eq!((mode(&kubeconfig), mode(&current)), (0o600, 0o600));
    assert!(std::fs::symlink_metadata(&current).unwrap().is_symlink());
    assert!(!pending.exists(), "the key is with its certificate");
    let written = std::fs::read_to_string(&kubeconfig).unwrap();
    assert!(
        written.contains(current.to_str().unwrap()) && written.contains(&server),
        "{written}"
    );
    assert!(!written.contains("abc"), "the bootstrap token is not kept");
    let first = std::fs::read(&current).unwrap();
    let csrs: Api<k8s_openapi::api::certificates::v1::CertificateSigningRequest> =
        Api::all(client.kube());
    let until = tokio::time::Instant::now() + Duration::from_secs(30);
    while let Err(error) = csrs.get_opt("x").await {
        assert!(tokio::time::Instant::now() < until, "{error}");
        tokio::task::yield_now().await;
    }
    token.cancel();
    running.await.unwrap();

    // Nothing is due: no request. Then 90 % have passed: one, and the certificate is another.
    *signer.0.life.lock().unwrap() = (now + 80 * DAY, now + 300 * DAY);
    let (_client, token, running) = start(&settings, &clock).await;
    tokio::task::yield_now().await;
    assert_eq!(signer.creations(), 1);
    token.cancel();
    running.await.unwrap();
    clock.0.store(now + 92 * DAY, Ordering::SeqCst);
    let (_client, token, running) = start(&settings, &clock).await;
    eventually("a new certificate", || {
        std::fs::read(&current).unwrap() != first
    })
    .await;
    token.cancel();
    running.await.unwrap();
    assert_eq!(signer.creations(), 2);
    let files = pems(&settings.cert_dir);
    assert_eq!(files.len(), 2, "the old one is kept: {files:?}");
    assert_eq!(mode(&files[1]), 0o600);

    // Expired: introduced again.
    *signer.0.life.lock().unwrap() = (now + 390 * DAY, now + 900 * DAY);
    clock.0.store(now + 400 * DAY, Ordering::SeqCst);
    let (_client, token, running) = start(&settings, &clock).await;
    eventually("a third certificate", || {
        signer.creations() == 3
            && pems(&settings.cert_dir).len() == 3
            && kubeconfig.exists()
            && !pending.exists()
    })
    .await;
    token.cancel();
    running.await.unwrap();
}

/// The user of a kubeconfig that embeds certificate and key, as `kubeadm init` writes it.
fn embedded(pem: &str) -> Value {
    let key = pem.find("-----BEGIN PRIVATE KEY-----").unwrap();
    let base64 = |pem: &str| base64::engine::general_purpose::STANDARD.encode(pem);
    json!({
        "client-certificate-data": base64(&pem[..key]),
        "client-key-data": base64(&pem[key..]),
    })
}

#[tokio::test]
async fn an_embedded_certificate_is_kept_where_renewed_ones_are() {
    let now = today();
    let clock = hand(now);
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    let (kubeconfig, server) = (settings.kubeconfig.clone().unwrap(), "http://127.0.0.1:1");
    let first = identity(now - DAY, now + 99 * DAY);
    write_config(&kubeconfig, server, embedded(&first));
    let start = async |settings: &ApiSettings| {
        let connected = connect(settings, Arc::new(clock.clone()), Metrics::default()).await;
        connected.unwrap().unwrap()
    };

    // Without rotation nothing looks for it.
    let mut fixed = settings.clone();
    fixed.rotate_certificates = false;
    drop(start(&fixed).await);
    assert!(!settings.cert_dir.exists());

    drop(start(&settings).await);
    let current = settings.cert_dir.join("kubelet-client-current.pem");
    assert!(std::fs::symlink_metadata(&current).unwrap().is_symlink());
    assert_eq!(std::fs::read_to_string(&current).unwrap(), first);
    assert_eq!(mode(&current), 0o600);

    // A restart writes nothing, and kubeadm makes the kubeconfig name the file.
    clock.0.store(now + 60, Ordering::SeqCst);
    drop(start(&settings).await);
    assert_eq!(pems(&settings.cert_dir).len(), 1);
    let file = json!({"client-certificate": current, "client-key": current});
    write_config(&kubeconfig, server, file);
    drop(start(&settings).await);
    assert_eq!(pems(&settings.cert_dir).len(), 1);

    // What is good for longer than the embedded pair stays the current one; what is not gives way to it.
    write_config(
        &kubeconfig,
        server,
        embedded(&identity(now - DAY, now + 50 * DAY)),
    );
    drop(start(&settings).await);
    assert_eq!(std::fs::read_to_string(&current).unwrap(), first);
    let longer = identity(now - DAY, now + 200 * DAY);
    write_config(&kubeconfig, server, embedded(&longer));
    clock.0.store(now + 120, Ordering::SeqCst);
    drop(start(&settings).await);
    assert_eq!(std::fs::read_to_string(&current).unwrap(), longer);
}

#[tokio::test]
async fn an_embedded_certificate_that_has_expired_is_not_kept() {
    let now = today();
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    let kubeconfig = settings.kubeconfig.clone().unwrap();
    let expired = identity(now - 9 * DAY, now - 2 * DAY);
    write_config(&kubeconfig, "http://127.0.0.1:1", embedded(&expired));
    let connected = connect(&settings, Arc::new(hand(now)), Metrics::default()).await;
    assert!(connected.unwrap().is_some());
    assert!(!settings.cert_dir.exists());
}

#[tokio::test]
async fn a_denied_request_is_told_and_its_key_forgotten() {
    let now = today();
    let signer = Signer::new((now - DAY, now + DAY));
    signer.say("deny");
    let server = signer.serve().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config");
    write_config(&path, &server, json!({"token": "t"}));
    let loaded = kubeconfig::load(&path, None).unwrap();
    let client = connector::build(&loaded, &Bearer::default(), &CancellationToken::new()).unwrap();
    let cert_dir = dir.path().join("pki");
    let error = csr::obtain(&client, &csr::Purpose::Client, "n1", &cert_dir, || now)
        .await
        .unwrap_err();
    let told = error.to_string();
    assert!(told.contains("was denied: Unknown: who are you"), "{told}");
    let left = std::fs::read_dir(&cert_dir).unwrap().count();
    assert_eq!(left, 0, "a new key makes a new request");
    signer.say("approve");
    csr::obtain(&client, &csr::Purpose::Client, "n1", &cert_dir, || now)
        .await
        .unwrap();
    assert_eq!(signer.creations(), 2);
}

#[tokio::test]
async fn what_is_in_flight_with_exchanged_credentials_ends() {
    let hang = || async {
        let stream = futures::stream::pending::<Result<Vec<u8>, std::io::Error>>();
        axum::body::Body::from_stream(stream)
    };
    let server = serve(Router::new().route("/api/v1/pods", get(hang))).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config");
    write_config(&path, &server, json!({"token": "t"}));
    let loaded = kubeconfig::load(&path, None).unwrap();
    let clock = Arc::new(hand(today()));
    let transport = Transport::new(
        Limiter::new(100, 100),
        Connection::default(),
        clock,
        Metrics::default(),
    );
    transport.install(&loaded).unwrap();
    let pods: Api<Pod> = Api::all(transport.client());
    use futures::StreamExt;
    let mut watch = pods.watch(&Default::default(), "0").await.unwrap().boxed();
    let waiting = tokio::spawn(async move { watch.next().await });
    transport.install(&loaded).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .unwrap()
        .unwrap();
    assert!(ended.is_none_or(|event| event.is_err()), "the watch ended");
}

/// A change of a file during the read of the credentials is never missed, since the fingerprints were taken before.
#[test]
fn what_the_files_looked_like_is_of_before_they_were_read() {
    let dir = tempfile::tempdir().unwrap();
    let (path, token) = (dir.path().join("config"), dir.path().join("token"));
    write_config(&path, "https://127.0.0.1:1", json!({"tokenFile": token}));
    let text = |n: usize| "t".repeat(1 + n % 500);
    let write = |n: usize| {
        // Beside it first: it is never seen half.
        let new = dir.path().join("new");
        std::fs::write(&new, text(n)).unwrap();
        std::fs::rename(&new, &token).unwrap();
    };
    write(0);
    let over = AtomicBool::new(false);
    let mut told = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // An end of its own, for a test that fails.
            for n in 1..20_000 {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                write(n);
                // Now and then they are at rest.
                let rest = if n % 20 == 0 { 5_000 } else { 200 };
                std::thread::sleep(Duration::from_micros(rest));
            }
        });
        for _ in 0..2000 {
            let loaded = kubeconfig::load(&path, None).unwrap();
            let now = kubeconfig::fingerprint(&loaded.files);
            let text = std::fs::read_to_string(&token).unwrap();
            if loaded.seen == now && now == kubeconfig::fingerprint(&loaded.files) {
                told += 1;
                let bearer = loaded.bearer.unwrap();
                assert_eq!(bearer.to_str().unwrap(), format!("Bearer {text}"));
            }
        }
        over.store(true, Ordering::SeqCst);
    });
    assert_ne!(told, 0, "the files were never at rest");
}

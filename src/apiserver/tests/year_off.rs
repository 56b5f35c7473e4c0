//! A node whose client certificate expired while it was off: who asks for the next one, and what is said where nobody
//! can.

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;

use super::*;
use crate::types::EventRecorder;
use crate::types::events::MemoryRecorder;

/// Requests per bearer: method and path.
type Asked = Arc<Mutex<Vec<(String, String)>>>;

/// A signer that knows some bearers only.
async fn serve_known(signer: &Signer, known: &'static [&'static str]) -> (String, Asked) {
    let asked = Asked::default();
    let seen = asked.clone();
    let check = from_fn(move |request: Request, next: Next| {
        let seen = seen.clone();
        async move {
            let bearer = request.headers().get("authorization");
            let bearer = bearer.and_then(|bearer| bearer.to_str().ok());
            let bearer = bearer.unwrap_or_default().trim_start_matches("Bearer ");
            let what = format!("{} {}", request.method(), request.uri().path());
            seen.lock().unwrap().push((bearer.to_owned(), what));
            if !known.contains(&bearer) {
                let (code, body) = refusal();
                return (code, body).into_response();
            }
            next.run(request).await
        }
    });
    let router = signer.router().layer(check);
    (serve(router).await, asked)
}

fn refusal() -> (StatusCode, String) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 401,
        "reason": "Unauthorized", "message": "Unauthorized"});
    (StatusCode::UNAUTHORIZED, body.to_string())
}

/// A certificate of this subject with its key, both in `path`, mode 0600.
fn write_identity(path: &Path, (from, until): (i64, i64), names: &[&str], groups: &[&str]) {
    use std::os::unix::fs::PermissionsExt;
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    set_life(&mut params, from, until);
    let mut subject = rcgen::DistinguishedName::new();
    for group in groups {
        subject.push(rcgen::DnType::OrganizationName, *group);
    }
    for name in names {
        subject.push(rcgen::DnType::CommonName, *name);
    }
    params.distinguished_name = subject;
    let certificate = params.self_signed(&key).unwrap();
    let text = format!("{}{}", certificate.pem(), key.serialize_pem());
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// A user with the certificate in `path`, whom a server without TLS knows by the token.
fn user(path: &Path, token: &str) -> Value {
    json!({"client-certificate": path, "client-key": path, "token": token})
}

fn write_guarded(path: &Path, server: &str, user: Value) {
    use std::os::unix::fs::PermissionsExt;
    write_config(path, server, user);
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// The files of a node.
struct Node {
    dir: tempfile::TempDir,
    settings: ApiSettings,
}

impl Node {
    /// With a certificate that is good from and until these days from `now`.
    fn new(server: &str, now: i64, (from, until): (i64, i64)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let own = dir.path().join("own.pem");
        let life = (now + from * DAY, now + until * DAY);
        write_identity(&own, life, &["system:node:n1"], &["system:nodes"]);
        let kubeconfig = settings.kubeconfig.as_deref().unwrap();
        write_config(kubeconfig, server, user(&own, "own"));
        Self { dir, settings }
    }

    fn with_bootstrap(mut self, server: &str, token: &str) -> Self {
        let path = self.dir.path().join("bootstrap");
        write_config(&path, server, json!({"token": token}));
        self.settings.bootstrap_kubeconfig = Some(path);
        self
    }

    fn with_lifeline(mut self, server: &str, now: i64) -> Self {
        let (path, key) = (
            self.dir.path().join("lifeline"),
            self.dir.path().join("lifeline.pem"),
        );
        let life = (now - 800 * DAY, now + 3000 * DAY);
        write_identity(&key, life, &["system:node:n1"], &["holdfast:lifeline:n1"]);
        write_guarded(&path, server, user(&key, "lifeline"));
        self.settings.lifeline = Some(Lifeline::file(path));
        self
    }

    async fn connect<C: Clock + Clone + 'static>(
        &self,
        clock: &C,
    ) -> (ApiClient, Credentials, MemoryRecorder) {
        let clock = Arc::new(clock.clone());
        let connected = connect(&self.settings, clock, Metrics::default()).await;
        let (client, credentials) = connected.unwrap().unwrap();
        let recorder = MemoryRecorder::default();
        let shared: Arc<dyn EventRecorder> = Arc::new(recorder.clone());
        (client, credentials.recording(shared), recorder)
    }
}

#[tokio::test]
async fn the_lifeline_replaces_an_expired_certificate_when_the_bootstrap_token_is_gone() {
    let now = today();
    for rotate in [true, false] {
        let signer = Signer::new((now - DAY, now + 99 * DAY));
        signer.say("approve");
        let (server, asked) = serve_known(&signer, &["lifeline"]).await;
        let mut node = Node::new(&server, now, (-400, -35))
            .with_bootstrap(&server, "gone")
            .with_lifeline(&server, now);
        node.settings.rotate_certificates = rotate;
        let (client, mut credentials, recorder) = node.connect(&hand(now)).await;
        let replaced = client.standing().replaced();
        credentials.step().await;
        replaced.await;
        let current = node.settings.cert_dir.join("kubelet-client-current.pem");
        assert_eq!((mode(&current), signer.creations()), (0o600, 1), "{rotate}");
        assert_eq!(client.standing().trouble(), None);
        assert_eq!(recorder.events(), []);

        // The lifeline asked for the certificate and for nothing else; the kubeconfig leads where it led.
        let asked = asked.lock().unwrap().clone();
        let by = |who: &str| {
            let all = asked.iter().filter(|(bearer, _)| bearer == who);
            all.map(|(_, what)| what.clone()).collect::<Vec<_>>()
        };
        assert_eq!(by("gone").len(), 1, "{asked:?}");
        let path = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
        let lifeline = by("lifeline");
        assert_eq!(lifeline[0], format!("POST {path}"));
        assert!(
            lifeline[1..]
                .iter()
                .all(|what| what.starts_with(&format!("GET {path}/"))),
            "{lifeline:?}"
        );
        let kubeconfig = node.settings.kubeconfig.as_deref().unwrap();
        let written = std::fs::read_to_string(kubeconfig).unwrap();
        assert!(written.contains(&server), "{written}");
        assert_eq!(written.contains("kubelet-client-current.pem"), !rotate);

        // Nothing is left to do.
        credentials.step().await;
        assert_eq!(signer.creations(), 1);
    }
}

#[tokio::test]
async fn a_bootstrap_kubeconfig_that_works_goes_before_the_lifeline() {
    let now = today();
    let signer = Signer::new((now - DAY, now + 99 * DAY));
    signer.say("approve");
    let (server, asked) = serve_known(&signer, &["good", "lifeline"]).await;
    let node = Node::new(&server, now, (-400, -35))
        .with_bootstrap(&server, "good")
        .with_lifeline(&server, now);
    let (_client, mut credentials, _) = node.connect(&hand(now)).await;
    credentials.step().await;
    assert_eq!(signer.creations(), 1);
    let asked = asked.lock().unwrap().clone();
    assert!(
        asked.iter().all(|(bearer, _)| bearer == "good"),
        "{asked:?}"
    );
}

// Invariant API-7.
#[tokio::test]
async fn nobody_asks_for_a_certificate_because_of_a_clock() {
    let now = today();
    let signer = Signer::new((now - DAY, now + 99 * DAY));
    signer.say("approve");
    let (server, asked) = serve_known(&signer, &["own", "lifeline"]).await;
    let node = Node::new(&server, now, (-10, 300)).with_lifeline(&server, now);
    let clock = hand(600);
    let (client, mut credentials, recorder) = node.connect(&clock).await;

    // The clock was never set: that is said, and nothing else is concluded.
    credentials.step().await;
    let said = client.standing().trouble().unwrap();
    assert!(said.contains("1970-01-01T00:10:00Z"), "{said}");
    assert_eq!(recorder.events(), [], "it may be set in a moment");
    clock.0.store(now, Ordering::SeqCst);
    credentials.step().await;
    assert_eq!(client.standing().trouble(), None);

    // It is a year ahead, and the server has said what time it is.
    clock.0.store(now + 400 * DAY, Ordering::SeqCst);
    let pods: Api<Pod> = Api::all(client.kube());
    pods.list(&ListParams::default()).await.unwrap_err();
    credentials.step().await;
    assert_eq!(client.standing().trouble(), None);
    assert_eq!(signer.creations(), 0);
    let asked = asked.lock().unwrap().clone();
    assert!(asked.iter().all(|(bearer, _)| bearer == "own"), "{asked:?}");
}

#[tokio::test]
async fn a_clock_that_is_set_right_ends_the_trouble_at_once() {
    let now = today();
    let node = Node::new("http://127.0.0.1:1", now, (-10, 300));
    let clock = hand(now + 400 * DAY);
    let (client, mut credentials, recorder) = node.connect(&clock).await;
    credentials.step().await;
    assert_eq!(recorder.events().len(), 1);
    assert!(client.standing().trouble().is_some());
    clock.0.store(now, Ordering::SeqCst);
    credentials.step().await;
    assert_eq!(
        client.standing().trouble(),
        None,
        "whatever pause there was"
    );
}

/// A clock that the test sets.
#[derive(Clone)]
struct Going(Arc<AtomicI64>);

impl Clock for Going {
    fn now(&self) -> Stamp {
        let seconds = self.0.load(Ordering::SeqCst);
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: seconds * 1000,
        }
    }
}

impl Going {
    /// Steps for as long as `seconds` take.
    async fn pass(&self, credentials: &mut Credentials, seconds: i64) {
        for _ in 0..seconds / 10 {
            tokio::time::advance(Duration::from_secs(10)).await;
            self.0.fetch_add(10, Ordering::SeqCst);
            credentials.step().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_needs_hands_says_every_hour_what_they_have_to_do() {
    let now = today();
    let mut node = Node::new("http://127.0.0.1:1", now, (-400, -35));
    node.settings.bootstrap_kubeconfig = Some(node.dir.path().join("bootstrap"));
    let clock = Going(Arc::new(AtomicI64::new(now)));
    let (client, mut credentials, recorder) = node.connect(&clock).await;
    credentials.step().await;
    let said = client.standing().trouble().unwrap();
    for part in [
        "kubeadm token create --print-join-command",
        "No such file",
        "no restart is needed",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    clock.pass(&mut credentials, 3 * 3600 - 60).await;
    let events = recorder.events();
    assert_eq!(events.len(), 3, "{events:?}");
    assert!(
        events.iter().all(|event| event.message == said),
        "{events:?}"
    );

    // What is wrong now is another thing.
    let bootstrap = node.settings.bootstrap_kubeconfig.clone().unwrap();
    std::fs::write(&bootstrap, "{").unwrap();
    clock.pass(&mut credentials, 20).await;
    assert_eq!(recorder.events().len(), 4);
    let said = client.standing().trouble().unwrap();
    assert!(said.contains("it does not parse"), "{said}");
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_nobody_sets_is_named_every_hour() {
    let node = Node::new("http://127.0.0.1:1", today(), (-10, 300));
    let clock = Going(Arc::new(AtomicI64::new(600)));
    let (_client, mut credentials, recorder) = node.connect(&clock).await;
    for (seconds, events) in [(50, 0), (30, 1), (3000, 1), (1000, 2)] {
        clock.pass(&mut credentials, seconds).await;
        assert_eq!(recorder.events().len(), events, "{seconds}");
    }
    let said = recorder.events()[1].message.clone();
    for part in ["timedatectl", "1970-01-01T01:", "no restart"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_needs_nobodys_hands() {
    let now = today();
    let server = "http://127.0.0.1:1";
    let node = Node::new(server, now, (-400, -35))
        .with_bootstrap(server, "t")
        .with_lifeline(server, now);
    let clock = Going(Arc::new(AtomicI64::new(now)));
    let (client, mut credentials, recorder) = node.connect(&clock).await;
    let pods: Api<Pod> = Api::all(client.kube());
    pods.list(&ListParams::default()).await.unwrap_err();
    for _ in 0..3 {
        // Each of both asks for a minute.
        let step = tokio::time::timeout(Duration::from_secs(200), credentials.step());
        step.await.unwrap();
        let said = client.standing().trouble().unwrap();
        let part = "does the API server answer? It does not: ";
        assert!(said.contains(part), "{said}");
        tokio::time::advance(Duration::from_secs(10)).await;
    }
    assert_eq!(recorder.events(), []);
}

#[tokio::test]
async fn a_new_bootstrap_token_is_used_without_a_restart() {
    let now = today();
    let signer = Signer::new((now - DAY, now + 99 * DAY));
    signer.say("approve");
    let (server, _) = serve_known(&signer, &["new"]).await;
    let node = Node::new(&server, now, (-400, -35)).with_bootstrap(&server, "gone");
    let (client, mut credentials, recorder) = node.connect(&hand(now)).await;
    credentials.step().await;
    assert_eq!(recorder.events().len(), 1);
    let said = client.standing().trouble().unwrap();
    assert!(said.contains("refused (401): Unauthorized"), "{said}");
    let bootstrap = node.settings.bootstrap_kubeconfig.clone().unwrap();
    // Beside it first: it is never seen half.
    let new = node.dir.path().join("new");
    write_config(&new, &server, json!({"token": "new"}));
    std::fs::rename(&new, &bootstrap).unwrap();
    credentials.step().await;
    assert_eq!(signer.creations(), 1);
    assert_eq!(client.standing().trouble(), None);
}

#[test]
fn a_lifeline_that_others_may_use_or_that_may_do_more_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, now) = (tempfile::tempdir().unwrap(), today());
    let (path, key) = (dir.path().join("lifeline"), dir.path().join("key.pem"));
    let life = (now - DAY, now + DAY);
    let write = |names: &[&str], groups: &[&str]| {
        write_identity(&key, life, names, groups);
        write_guarded(&path, "https://127.0.0.1:1", user(&key, "t"));
    };
    let load = || match Lifeline::file(path.clone()).load("n1") {
        Ok(_) => String::new(),
        Err(error) => text(&error),
    };
    let chmod = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    write(&["system:node:n1"], &["holdfast:lifeline:n1"]);
    assert_eq!(load(), "");
    for exposed in [&path, &key] {
        chmod(exposed, 0o644);
        let told = load();
        assert!(told.contains("chmod 0600"), "{told}");
        chmod(exposed, 0o600);
    }
    // systemd guards its own.
    let credential = dir.path().join("holdfast.lifeline");
    assert_eq!(Lifeline::credential(Some(dir.path())), None);
    std::fs::copy(&path, &credential).unwrap();
    chmod(&credential, 0o440);
    let credential = Lifeline::credential(Some(dir.path())).unwrap();
    assert!(credential.load("n1").is_ok());

    let lifeline = "holdfast:lifeline:n1";
    for (name, groups, says) in [
        ("system:node:n2", &[lifeline][..], "system:node:n1"),
        ("system:node:n1", &["system:nodes"], "has all rights"),
        ("system:node:n1", &["system:masters"], "system:masters"),
        ("system:node:n1", &[lifeline, "system:masters"], "no other"),
        ("system:node:n1", &["holdfast:lifeline:n2"], "lifeline:n2"),
        ("system:node:n1", &["admins"], "admins"),
        ("system:node:n1", &[], "holdfast:lifeline:n1"),
    ] {
        write(&[name], groups);
        let told = load();
        assert!(told.contains(says), "{groups:?}: {told}");
    }
    write_guarded(&path, "https://127.0.0.1:1", json!({"token": "t"}));
    let told = load();
    assert!(told.contains("bound to a key"), "{told}");
}

#[test]
fn another_time_of_the_server_is_kept_by_the_boot_time_clock() {
    let clock = Going(Arc::new(AtomicI64::new(1_000)));
    let transport = Transport::new(
        Limiter::new(100, 100),
        Connection::default(),
        Arc::new(clock.clone()),
        Metrics::default(),
    );
    assert_eq!(transport.server_now(), None);
    let mut answer = Response::new(kube::client::Body::empty());
    let date = "Mon, 01 Jun 2026 00:00:00 GMT".parse().unwrap();
    answer.headers_mut().insert("date", date);
    transport.check_clock(&answer);
    clock.0.fetch_add(60, Ordering::SeqCst);
    assert_eq!(transport.server_now(), Some(1_780_272_060));
}

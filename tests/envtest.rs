//! The test cluster and the fault proxy keep what they promise: a real API server that authorizes nodes, survives
//! outages, restores old data; a proxy that fails as it is told and counts.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use holdfast_testkit::envtest::{Authority, DAY, EnvTest, client_of, unique_name};
use holdfast_testkit::fault_proxy::{Fault, FaultProxy, ProxyConfig};
use jiff::SignedDuration;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, ServiceAccount};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Client, Error};
use serde_json::json;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(30);

fn node(name: &str) -> Node {
    serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap()
}

fn config_map(name: &str) -> ConfigMap {
    serde_json::from_value(json!({ "metadata": { "name": name }, "data": { "a": "b" } })).unwrap()
}

fn pod(name: &str, node: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": { "nodeName": node, "containers": [{ "name": "c", "image": "i" }] },
    }))
    .unwrap()
}

fn code<T: std::fmt::Debug>(result: Result<T, Error>) -> u16 {
    match result {
        Err(Error::Api(status)) => status.code,
        other => panic!("expected a status, got {other:?}"),
    }
}

fn label(key: &str) -> Patch<serde_json::Value> {
    Patch::Merge(json!({ "metadata": { "labels": { key: "true" } } }))
}

async fn create<K>(api: &Api<K>, object: &K) -> K
where
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    api.create(&PostParams::default(), object).await.unwrap()
}

#[tokio::test]
async fn a_server_writes_maps_as_people_want_to_read_them() {
    let env = EnvTest::shared();
    let client = env.admin_client();
    let namespace = format!("maps-{}", unique_name());
    env.namespace(&namespace);
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    create(&maps, &config_map("read")).await;
    for (query, accept, line) in [
        ("?pretty=true", "application/json", "\n    \"a\": \"b\"\n"),
        ("", "application/yaml", "\n  a: b\n"),
    ] {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/read{query}");
        let request = axum::http::Request::get(path).header("accept", accept);
        let answer = client.request_text(request.body(Vec::new()).unwrap()).await;
        let answer = answer.unwrap_or_else(|error| panic!("{accept}: {error}"));
        assert!(answer.contains(line), "{accept}: {answer}");
    }
}

#[tokio::test]
async fn a_node_has_the_rights_of_a_node_and_no_more() {
    let env = EnvTest::start();
    let client = client_of(&env.node_kubeconfig("n1")).await;
    let nodes: Api<Node> = Api::all(client.clone());

    create(&nodes, &node("n1")).await;
    let patch = label("example.org/mine");
    nodes
        .patch("n1", &PatchParams::default(), &patch)
        .await
        .unwrap();
    // NodeRestriction and the Node authorizer.
    let other = nodes.create(&PostParams::default(), &node("n2")).await;
    assert_eq!(code(other), 403);
    create(&Api::<Node>::all(env.admin_client()), &node("n2")).await;
    let foreign = nodes.patch("n2", &PatchParams::default(), &patch).await;
    assert_eq!(code(foreign), 403);
    let restricted = label("node-restriction.kubernetes.io/x");
    let restricted = nodes
        .patch("n1", &PatchParams::default(), &restricted)
        .await;
    assert_eq!(code(restricted), 403);

    // kubectl, as the administrator and as the node.
    assert_eq!(
        env.kubectl_ok(&["get", "nodes", "-o", "name"]),
        "node/n1\nnode/n2\n"
    );
    let refused = env.kubectl_as(&env.node_kubeconfig("n1"), &["delete", "node", "n2"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Forbidden"));

    // A configMap only once a pod of the node refers to it.
    env.namespace("team");
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "team");
    assert_eq!(code(maps.get("kube-root-ca.crt").await), 403);
    let pods: Api<Pod> = Api::namespaced(env.admin_client(), "team");
    let created = create(&pods, &pod("p", "n1")).await;
    let volumes = created.spec.as_ref().unwrap().volumes.clone().unwrap();
    let projected = volumes[0].projected.as_ref().expect("kube-api-access");
    assert_eq!(projected.sources.as_ref().unwrap().len(), 3);
    let map = eventually(|| maps.get("kube-root-ca.crt")).await;
    assert_eq!(map.data.unwrap()["ca.crt"], env.ca_pem());

    // A token that is bound to the pod.
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "team");
    let bound = |uid: &str| -> TokenRequest {
        serde_json::from_value(json!({ "spec": {
            "audiences": [],
            "expirationSeconds": 3600,
            "boundObjectRef": { "kind": "Pod", "apiVersion": "v1", "name": "p", "uid": uid },
        } }))
        .unwrap()
    };
    let uid = created.metadata.uid.unwrap();
    let request = bound(&uid);
    let params = PostParams::default();
    let answer = accounts
        .create_token_request("default", &params, &request)
        .await
        .unwrap();
    let token = answer.status.unwrap().token.unwrap();
    let as_pod = env.token_kubeconfig(&env.url(), &token);
    let seen = env.kubectl_as(&as_pod, &["get", "pods", "-n", "team"]);
    let said = String::from_utf8_lossy(&seen.stderr).into_owned();
    assert!(
        said.contains(r#"User "system:serviceaccount:team:default" cannot list"#),
        "{said}"
    );
    let unbound: TokenRequest =
        serde_json::from_value(json!({ "spec": { "audiences": [] } })).unwrap();
    let unbound = accounts
        .create_token_request("default", &params, &unbound)
        .await;
    assert_eq!(code(unbound), 403);
    assert!(env.token("team", "default").split('.').count() == 3);
}

/// Authorization follows a watch of the API server's own.
async fn eventually<T, F: Future<Output = Result<T, Error>>>(mut call: impl FnMut() -> F) -> T {
    timeout(SOON, async {
        loop {
            match call().await {
                Ok(value) => return value,
                Err(Error::Api(status)) if status.code == 403 => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    })
    .await
    .expect("allowed in time")
}

#[tokio::test]
async fn a_bootstrap_token_gets_a_signed_certificate_and_bad_certificates_get_nothing() {
    let env = Arc::new(EnvTest::start());
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    let subject = &mut params.distinguished_name;
    subject.push(rcgen::DnType::OrganizationName, "system:nodes");
    subject.push(rcgen::DnType::CommonName, "system:node:n1");
    let request = params.serialize_request(&key).unwrap().pem().unwrap();
    let request = |name: &str| -> CertificateSigningRequest {
        serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": {
                "request": k8s_openapi::ByteString(request.clone().into_bytes()),
                "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
                "usages": ["digital signature", "key encipherment", "client auth"],
            },
        }))
        .unwrap()
    };

    let client = client_of(&env.bootstrap_kubeconfig(&env.url())).await;
    assert_eq!(
        code(
            Api::<Node>::all(client.clone())
                .list(&ListParams::default())
                .await
        ),
        403
    );
    let requests: Api<CertificateSigningRequest> = Api::all(client);
    create(&requests, &request("by-hand")).await;
    env.sign_csr("by-hand", SignedDuration::from_mins(10));
    let signed = requests.get("by-hand").await.unwrap().status.unwrap();
    assert_eq!(signed.conditions.unwrap()[0].type_, "Approved");
    let identity = holdfast_testkit::envtest::Identity {
        cert_pem: String::from_utf8(signed.certificate.unwrap().0).unwrap(),
        key_pem: key.serialize_pem(),
    };
    create(&Api::<Node>::all(env.client(&identity)), &node("n1")).await;

    let signer = env.csr_signer(DAY);
    create(&requests, &request("by-itself")).await;
    timeout(SOON, async {
        loop {
            let status = requests.get("by-itself").await.unwrap().status;
            if status.is_some_and(|status| status.certificate.is_some()) {
                return;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    drop(signer);

    let expired = env.node_kubeconfig_with("n1", &env.url(), SignedDuration::from_hours(-1));
    let expired = env.kubectl_as(&expired, &["get", "node", "n1"]);
    assert!(!expired.status.success());
    let stranger = Authority::new("stranger").client("system:node:n1", "system:nodes", DAY);
    let stranger = Api::<Node>::all(env.client(&stranger)).get("n1").await;
    assert_eq!(code(stranger), 401);
}

#[tokio::test]
async fn the_cluster_goes_away_comes_back_hangs_and_goes_back_in_time() {
    let env = EnvTest::start();
    let client = env.admin_client();
    let maps: Api<ConfigMap> = Api::namespaced(client, "default");
    let before = create(&maps, &config_map("before")).await;

    env.stop_apiserver();
    assert!(matches!(maps.get("before").await, Err(Error::Service(_))));
    env.start_apiserver();
    let after = maps.get("before").await.unwrap();
    assert_eq!(after.metadata.uid, before.metadata.uid);

    env.pause();
    let silent = timeout(Duration::from_millis(500), maps.get("before")).await;
    assert!(silent.is_err(), "a stopped process answered: {silent:?}");
    env.resume();
    timeout(SOON, maps.get("before")).await.unwrap().unwrap();

    let snapshot = env.snapshot_etcd();
    let later = create(&maps, &config_map("later")).await;
    env.restore_etcd(&snapshot);
    assert_eq!(code(maps.get("later").await), 404);
    let listed = maps.list(&ListParams::default()).await.unwrap();
    let version = |text: Option<String>| text.unwrap().parse::<u64>().unwrap();
    // Resource versions are given out a second time.
    assert!(version(before.metadata.resource_version) <= version(listed.metadata.resource_version));
    let again = create(&maps, &config_map("again")).await;
    assert_ne!(again.metadata.uid, later.metadata.uid);
    maps.get("before").await.unwrap();
}

#[tokio::test]
async fn processes_and_files_end_with_the_cluster() {
    let begin = tokio::time::Instant::now();
    let env = EnvTest::start();
    println!(
        "a cluster of 1.{} starts in {:?}",
        env.minor(),
        begin.elapsed()
    );
    let dir = env.dir().to_owned();
    let pid = env.apiserver_pid().unwrap().to_string();
    let etcd = std::fs::read_to_string(dir.join("etcd.pid")).unwrap();
    assert!(Path::new("/proc").join(&pid).exists());
    env.pause();
    drop(env);
    for pid in [pid, etcd] {
        assert!(!Path::new("/proc").join(&pid).exists(), "{pid} lives");
    }
    assert!(!dir.exists());
}

/// A proxy for a node before a cluster, and a client through that.
async fn proxied(env: &EnvTest, of: &str) -> (FaultProxy, Client) {
    create(&Api::<Node>::all(env.admin_client()), &node(of)).await;
    let proxy = env.fault_proxy(of);
    // Whoever connects is that node upstream.
    let client = client_of(&env.node_kubeconfig_with("anybody", &proxy.url(), DAY)).await;
    (proxy, client)
}

#[tokio::test]
async fn the_proxy_counts_and_answers_as_it_is_told() {
    let env = EnvTest::shared();
    let name = format!("proxied-{}", unique_name());
    let (proxy, client) = proxied(&env, &name).await;
    env.namespace(&name);
    let nodes: Api<Node> = Api::all(client.clone());
    let pods: Api<Pod> = Api::namespaced(client, &name);
    create(
        &Api::namespaced(env.admin_client(), &name),
        &pod("p", &name),
    )
    .await;

    nodes.get(&name).await.unwrap();
    let of_node = ListParams::default().fields(&format!("spec.nodeName={name}"));
    assert_eq!(pods.list(&of_node).await.unwrap().items.len(), 1);
    let status = Patch::Strategic(json!({ "status": { "message": "seen" } }));
    pods.patch_status("p", &PatchParams::default(), &status)
        .await
        .unwrap();
    let counts: Vec<_> = proxy.counts().into_iter().collect();
    let count = |verb: &str, resource: &str| ((verb.to_owned(), resource.to_owned()), 1);
    assert_eq!(
        counts,
        [
            count("GET", "nodes"),
            count("LIST", "pods"),
            count("PATCH", "pods/status")
        ]
    );
    assert_eq!(proxy.requests()[2].name, "p");
    assert!(proxy.bytes_sent() > 1000);
    proxy.reset();

    for (fault, expected) in [
        (Fault::status(409), 409),
        (Fault::status(410), 410),
        (Fault::status(500), 500),
    ] {
        proxy.inject_on(1, fault, "GET", "nodes");
        assert_eq!(code(nodes.get(&name).await), expected);
        nodes.get(&name).await.unwrap();
    }
    assert_eq!(proxy.count("GET", "nodes"), 6);
    let slow_down = Fault::Status {
        code: 429,
        reason: "",
        retry_after: Some(1),
    };
    proxy.inject_on(2, slow_down, "GET", "nodes");
    let raw = raw_get(&proxy.url(), &env, &format!("/api/v1/nodes/{name}")).await;
    assert_eq!(raw.status(), 429);
    assert_eq!(raw.headers()["retry-after"], "1");
    let body: serde_json::Value = serde_json::from_slice(&raw.bytes().await.unwrap()).unwrap();
    assert_eq!(body["details"]["retryAfterSeconds"], 1);
    assert_eq!(proxy.rules_left(), 1);
    proxy.clear_rules();
    nodes.get(&name).await.unwrap();

    // The answer breaks off in the middle.
    proxy.inject_on(1, Fault::Truncate(20), "GET", "nodes");
    let raw = raw_get(&proxy.url(), &env, &format!("/api/v1/nodes/{name}")).await;
    assert_eq!(raw.status(), 200);
    assert!(raw.bytes().await.is_err());
    // Done, but nobody is told.
    proxy.inject_on(1, Fault::LoseAnswer, "PATCH", "nodes");
    let params = PatchParams::default();
    let lost = nodes.patch(&name, &params, &label("example.org/x")).await;
    assert!(!matches!(lost, Ok(_) | Err(Error::Api(_))), "{lost:?}");
    let labels = nodes.get(&name).await.unwrap().metadata.labels.unwrap();
    assert_eq!(labels["example.org/x"], "true");
    // Not done.
    proxy.inject_on(1, Fault::Refuse, "PATCH", "nodes");
    let refused = nodes.patch(&name, &params, &label("example.org/y")).await;
    assert!(
        !matches!(refused, Ok(_) | Err(Error::Api(_))),
        "{refused:?}"
    );
    let labels = nodes.get(&name).await.unwrap().metadata.labels.unwrap();
    assert!(!labels.contains_key("example.org/y"));

    let begin = tokio::time::Instant::now();
    proxy.delay(Duration::from_millis(300));
    nodes.get(&name).await.unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(300));
    proxy.heal();
}

async fn raw_get(url: &str, env: &EnvTest, path: &str) -> reqwest::Response {
    drop(rustls::crypto::ring::default_provider().install_default());
    let ca = reqwest::Certificate::from_pem(env.ca_pem().as_bytes()).unwrap();
    let client = reqwest::Client::builder()
        .tls_certs_only([ca])
        .build()
        .unwrap();
    client.get(format!("{url}{path}")).send().await.unwrap()
}

#[tokio::test]
async fn the_proxy_hands_watches_on_at_once_stalls_them_and_cuts() {
    let env = EnvTest::start();
    let (proxy, client) = proxied(&env, "n1").await;
    let pods: Api<Pod> = Api::all(client);
    let params = WatchParams::default()
        .fields("spec.nodeName=n1")
        .timeout(290);
    let admin: Api<Pod> = Api::namespaced(env.admin_client(), "default");

    let mut watch = Box::pin(pods.watch(&params, "0").await.unwrap());
    create(&admin, &pod("a", "n1")).await;
    assert_eq!(next(&mut watch).await, "a");
    assert_eq!(proxy.count("WATCH", "pods"), 1);
    assert!(proxy.wait_for("WATCH", "pods", 1, SOON).await);
    assert_eq!(proxy.open_watches("pods"), 1);

    // The one that is open says no more; a new one does.
    proxy.stall_watches();
    create(&admin, &pod("b", "n1")).await;
    let mut fresh = Box::pin(pods.watch(&params, "0").await.unwrap());
    let mut names = [next(&mut fresh).await, next(&mut fresh).await];
    names.sort();
    assert_eq!(names, ["a", "b"]);
    let silence = timeout(Duration::from_millis(300), watch.next()).await;
    assert!(silence.is_err(), "a stalled watch said {silence:?}");
    proxy.heal();
    assert_eq!(next(&mut watch).await, "b");

    proxy.stall_all();
    let list = ListParams::default().fields("spec.nodeName=n1");
    let hangs = timeout(Duration::from_millis(300), pods.list(&list)).await;
    assert!(hangs.is_err(), "a stalled proxy answered {hangs:?}");
    proxy.heal();
    assert_eq!(pods.list(&list).await.unwrap().items.len(), 2);

    // Cut: open watches end, new connections are refused, until it heals.
    proxy.cut();
    let end = timeout(SOON, async {
        loop {
            match watch.next().await {
                // Newer servers send one now and then.
                Some(Ok(WatchEvent::Bookmark(_))) => {}
                end => break end,
            }
        }
    });
    let end = end.await.expect("the watch ends");
    assert!(!matches!(end, Some(Ok(_))), "{end:?}");
    let gone = pods.list(&list).await;
    assert!(matches!(gone, Err(Error::Service(_))), "{gone:?}");
    let address = proxy.url().replace("https://", "");
    let refused = std::net::TcpStream::connect(&address).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    proxy.heal();
    std::net::TcpStream::connect(&address).unwrap();
    assert_eq!(pods.list(&list).await.unwrap().items.len(), 2);

    // A watch from a time that is forgotten.
    proxy.inject_on(1, Fault::WatchExpired, "WATCH", "pods");
    let mut expired = Box::pin(pods.watch(&params, "1").await.unwrap());
    let told = timeout(SOON, expired.next()).await;
    match told.expect("an event in time") {
        Some(Ok(WatchEvent::Error(status))) => assert_eq!(status.code, 410),
        other => panic!("{other:?}"),
    }

    // An outage behind the proxy breaks connections, too; afterwards all goes on.
    env.stop_apiserver();
    pods.list(&list).await.unwrap_err();
    env.start_apiserver();
    assert_eq!(pods.list(&list).await.unwrap().items.len(), 2);
}

async fn next(
    watch: &mut (impl futures::Stream<Item = Result<WatchEvent<Pod>, Error>> + Unpin),
) -> String {
    loop {
        let event = timeout(SOON, watch.next()).await.expect("an event in time");
        match event {
            Some(Ok(WatchEvent::Added(pod))) => return pod.metadata.name.unwrap(),
            Some(Ok(WatchEvent::Bookmark(_) | WatchEvent::Modified(_))) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn the_proxy_stands_before_plain_http_as_well() {
    let upstream = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = upstream.local_addr().unwrap();
    let router = axum::Router::new().route(
        "/api/v1/nodes/{name}",
        axum::routing::get(
            |axum::extract::Path(name): axum::extract::Path<String>| async move {
                axum::Json(json!({ "metadata": { "name": name } }))
            },
        ),
    );
    let server = tokio::spawn(async move { axum::serve(upstream, router).await });
    let proxy = FaultProxy::start(ProxyConfig {
        upstream: format!("http://{address}"),
        ca_pem: None,
        client: None,
        serve: None,
    })
    .unwrap();
    assert!(proxy.url().starts_with("http://127.0.0.1:"));
    let config = kube::Config::new(proxy.url().parse().unwrap());
    let nodes: Api<Node> = Api::all(Client::try_from(config).unwrap());
    assert_eq!(
        nodes.get("n7").await.unwrap().metadata.name.as_deref(),
        Some("n7")
    );
    proxy.inject_on(1, Fault::status(500), "GET", "nodes");
    assert_eq!(code(nodes.get("n7").await), 500);
    assert_eq!(proxy.count("GET", "nodes"), 2);
    server.abort();
}

/// A kubeconfig for `user` that only its owner may read.
fn write_kubeconfig(path: &Path, env: &EnvTest, user: &holdfast_testkit::envtest::Identity) {
    use base64::Engine as _;
    use std::os::unix::fs::PermissionsExt;
    let base64 = |pem: &str| base64::engine::general_purpose::STANDARD.encode(pem);
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "c", "cluster": {
            "server": env.url(), "certificate-authority-data": base64(&env.ca_pem()),
        }}],
        "users": [{"name": "u", "user": {
            "client-certificate-data": base64(&user.cert_pem), "client-key-data": base64(&user.key_pem),
        }}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(path, config.to_string()).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

#[derive(Clone)]
struct RealTime;

impl holdfast::types::Clock for RealTime {
    fn now(&self) -> holdfast::types::Stamp {
        let now = jiff::Timestamp::now().as_millisecond();
        holdfast::types::Stamp {
            boot: holdfast::types::BootId(1),
            boottime_ms: now,
            wall_ms: now,
        }
    }
}

// Invariant API-7.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lifeline_gets_the_certificate_of_its_node_and_has_no_other_right() {
    use holdfast::apiserver::{ApiSettings, Lifeline, connect};
    const NODE: &str = "asleep";
    let env = Arc::new(EnvTest::start());
    let manifest = include_str!("../contrib/cluster/lifeline.yaml").replace("<name>", NODE);
    env.apply(&manifest);
    let dir = tempfile::tempdir().unwrap();
    let (own, lifeline) = (dir.path().join("kubeconfig"), dir.path().join("lifeline"));
    let user = format!("system:node:{NODE}");
    let group = format!("holdfast:lifeline:{NODE}");
    let identity = env.authority().client(&user, &group, DAY * 3650);
    write_kubeconfig(&lifeline, &env, &identity);

    // What a node may do, it may not.
    let client = env.client(&identity);
    let nodes: Api<Node> = Api::all(client.clone());
    assert_eq!(code(nodes.get(NODE).await), 403);
    assert_eq!(
        code(nodes.create(&PostParams::default(), &node(NODE)).await),
        403
    );
    let pods: Api<Pod> = Api::all(client.clone());
    assert_eq!(code(pods.list(&ListParams::default()).await), 403);
    let requests: Api<CertificateSigningRequest> = Api::all(client);
    assert_eq!(code(requests.list(&ListParams::default()).await), 403);
    // What the approving controller asks: its own certificate, not that of any node.
    let may = |subresource: &str| {
        let requests = "certificatesigningrequests.certificates.k8s.io";
        let part = format!("--subresource={subresource}");
        let asked = ["auth", "can-i", "create", requests, &part];
        env.kubectl_as(&lifeline, &asked).status.success()
    };
    assert!(may("selfnodeclient") && !may("nodeclient"));

    // The node has been off for a year.
    let expired = env.node_identity(NODE, SignedDuration::from_hours(-35 * 24));
    write_kubeconfig(&own, &env, &expired);
    let settings = ApiSettings {
        kubeconfig: Some(own),
        bootstrap_kubeconfig: None,
        lifeline: Some(Lifeline::file(lifeline)),
        cert_dir: dir.path().join("pki"),
        node_name: NODE.to_owned(),
        rotate_certificates: true,
        waits_for_files: false,
        qps: 50,
        burst: 100,
    };
    let metrics = holdfast::types::metrics::Metrics::default();
    let connected = connect(&settings, Arc::new(RealTime), metrics).await;
    let (client, credentials) = connected.unwrap().unwrap();
    let nodes: Api<Node> = Api::all(client.kube());
    assert_eq!(code(nodes.get(NODE).await), 401);
    let token = tokio_util::sync::CancellationToken::new();
    let running = tokio::spawn(credentials.run(token.clone()));
    let all: Api<CertificateSigningRequest> = Api::all(env.admin_client());
    let request = timeout(SOON, async {
        loop {
            let list = all.list(&ListParams::default()).await.unwrap();
            if let Some(request) = list.items.into_iter().next() {
                return request;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    // By this the controller takes it for a node's request for itself.
    assert_eq!(request.spec.username.as_deref(), Some(&*user));
    assert!(request.spec.groups.unwrap().contains(&group));
    let replaced = client.standing().replaced();
    let name = request.metadata.name.unwrap();
    let signer = Arc::clone(&env);
    tokio::task::spawn_blocking(move || signer.sign_csr(&name, DAY))
        .await
        .unwrap();
    timeout(SOON, replaced).await.unwrap();
    create(&nodes, &node(NODE)).await;
    token.cancel();
    running.await.unwrap();
}

//! The reviews and the serving certificate of a real kube-apiserver, asked with a node's own rights.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use holdfast::apiserver::{ApiSettings, connect};
use holdfast::types::metrics::Metrics;
use holdfast_testkit::envtest::{DAY, EnvTest};
use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeStatus};
use tokio_util::sync::CancellationToken;

use crate::world::{Hand, Identity, NODE, SharedReviews, World, certificate, eventually, limits};

const RIGHTS: &str = r#"
apiVersion: v1
kind: ServiceAccount
metadata: {name: scraper, namespace: default}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: other, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: scraper}
rules:
- {apiGroups: [""], resources: ["nodes/healthz", "nodes/metrics"], verbs: ["get"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: scraper}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: scraper}
subjects:
- {kind: ServiceAccount, name: scraper, namespace: default}
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_api_server_says_who_it_is_and_what_they_may_and_signs_the_certificate() {
    let env = Arc::new(EnvTest::start());
    env.apply(RIGHTS);
    let clock = Hand::new();
    let pki = tempfile::tempdir().unwrap();
    let settings = ApiSettings {
        kubeconfig: Some(env.node_kubeconfig(NODE)),
        bootstrap_kubeconfig: None,
        lifeline: None,
        cert_dir: pki.path().to_owned(),
        node_name: NODE.to_owned(),
        rotate_certificates: false,
        waits_for_files: false,
        qps: 50,
        burst: 100,
    };
    let (api, credentials) = connect(&settings, Arc::new(clock.clone()), Metrics::default())
        .await
        .unwrap()
        .unwrap();
    let token = CancellationToken::new();
    let _ends = token.clone().drop_guard();
    tokio::spawn(credentials.run(token));
    let ca = env.ca_pem();
    let world = World::over(
        limits(),
        clock,
        SharedReviews::default(),
        Some(api),
        |config| {
            config.kubelet.server_tls_bootstrap = true;
            let file = config.kubelet.authentication.client_ca_file.as_ref();
            std::fs::write(file.unwrap(), &ca).unwrap();
        },
    )
    .await
    .unwrap();

    // The certificate: asked for with the node's rights, as a real server checks such requests.
    let addresses = [("Hostname", NODE), ("InternalIP", "127.0.0.1")];
    let addresses = addresses.map(|(kind, address)| NodeAddress {
        type_: kind.to_owned(),
        address: address.to_owned(),
    });
    world.node.set(Arc::new(Node {
        status: Some(NodeStatus {
            addresses: Some(addresses.to_vec()),
            ..NodeStatus::default()
        }),
        ..Node::default()
    }));
    let signer = env.csr_signer(DAY);
    eventually("the serving certificate", async || {
        certificate(&world).await.is_some()
    })
    .await;
    drop(signer);

    let masters = env
        .authority()
        .client("kube-apiserver-kubelet-client", "system:masters", DAY);
    let masters = Identity {
        certificate: masters.cert_pem,
        key: masters.key_pem,
    };
    let answer = world.ask("GET", "/healthz", None, Some(&masters)).await;
    assert_eq!(answer, (StatusCode::OK, "ok".to_owned()));

    let scraper = env.token("default", "scraper");
    let other = env.token("default", "other");
    let ask = async |path, token: &str| world.get(path, Some(token)).await;
    let answer = ask("/healthz", &scraper).await;
    assert_eq!(answer.0, StatusCode::OK, "{}", answer.1);
    let answer = ask("/exec/a/b/c", &scraper).await;
    assert_eq!(
        answer,
        (
            StatusCode::FORBIDDEN,
            "Forbidden (user=system:serviceaccount:default:scraper, verb=get, resource=nodes, subresource(s)=[proxy])"
                .to_owned()
        )
    );
    assert_eq!(ask("/healthz", &other).await.0, StatusCode::FORBIDDEN);
    assert_eq!(ask("/healthz", "made-up").await.0, StatusCode::UNAUTHORIZED);

    // A right that is given counts when the no has run out, one that is taken when the yes has.
    env.kubectl_ok(&[
        "create",
        "clusterrolebinding",
        "other",
        "--clusterrole=scraper",
        "--serviceaccount=default:other",
    ]);
    env.kubectl_ok(&["delete", "clusterrolebinding", "scraper"]);
    assert_eq!(ask("/healthz", &scraper).await.0, StatusCode::OK);
    world.clock.advance(Duration::from_secs(301));
    eventually("the changes of rights", async || {
        // A real server's own view of roles lags behind.
        world.clock.advance(Duration::from_secs(301));
        (
            ask("/healthz", &other).await.0,
            ask("/healthz", &scraper).await.0,
        ) == (StatusCode::OK, StatusCode::FORBIDDEN)
    })
    .await;

    // Away: what was answered counts for its time.
    env.stop_apiserver();
    assert_eq!(ask("/healthz", &other).await.0, StatusCode::OK);
    world.clock.advance(Duration::from_secs(301));
    let (status, text) = world.ask("GET", "/healthz", None, Some(&masters)).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(
        text.starts_with("Authorization error (user=kube-apiserver-kubelet-client, verb=get,"),
        "{text}"
    );
    assert_eq!(ask("/healthz", &other).await.0, StatusCode::UNAUTHORIZED);
    env.start_apiserver();
    eventually("it is back", async || {
        world.ask("GET", "/healthz", None, Some(&masters)).await.0 == StatusCode::OK
    })
    .await;
    world.end().await;
}

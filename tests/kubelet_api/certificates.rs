//! The serving certificate: given, made, asked for, changed.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast::apiserver::ApiClient;
use holdfast::kubeletconfig::TlsVersion;
use holdfast::types::Clock;
use holdfast_testkit::fake_api::{FakeApi, Identity};
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition,
};
use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeStatus};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::world::{
    Ca, Hand, NODE, SharedReviews, World, certificate, eventually, first_of, limits,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_certificate_one_is_made_and_kept() {
    let world = World::new().await;
    let (file, key) = (world.pki("kubelet.crt"), world.pki("kubelet.key"));
    let served = certificate(&world).await.unwrap();
    assert_eq!(served, first_of(&file));
    for path in [&file, &key] {
        let mode = std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", path.display());
    }
    let (_, parsed) = X509Certificate::from_der(&served).unwrap();
    let names = parsed.subject_alternative_name().unwrap().unwrap();
    assert!(format!("{:?}", names.value.general_names).contains(NODE));

    // Damage is repaired, and what is there is used again.
    let again = World::with(limits(), |config| {
        let pki = &config.cert_dir;
        std::fs::create_dir_all(pki).unwrap();
        std::fs::copy(&file, pki.join("kubelet.crt")).unwrap();
        std::fs::copy(&key, pki.join("kubelet.key")).unwrap();
    })
    .await;
    assert_eq!(certificate(&again).await.unwrap(), served);
    let damaged = World::with(limits(), |config| {
        let pki = &config.cert_dir;
        std::fs::create_dir_all(pki).unwrap();
        std::fs::copy(&file, pki.join("kubelet.crt")).unwrap();
        std::fs::write(pki.join("kubelet.key"), "half a").unwrap();
    })
    .await;
    assert_ne!(certificate(&damaged).await.unwrap(), served);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_self_signed_certificate_is_replaced_before_it_ends() {
    let world = World::new().await;
    let first = certificate(&world).await.unwrap();
    let until = world.metric(&["kubelet_certificate_manager_server_ttl_seconds"]);
    assert!((360.0..=366.0).contains(&(until / 86_400.0)), "{until}");
    world.clock.advance(Duration::from_secs(360 * 86_400));
    eventually("another certificate", async || {
        certificate(&world).await.unwrap() != first
    })
    .await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_self_signed_certificate_outlives_no_absence_and_no_wrong_clock() {
    let now = jiff::Timestamp::now().as_second();
    let days = |days: i64| days * 86_400;
    // (clock when it was made, clock at the next start, whether another is made)
    for (made, next, is_other) in [
        (now, now + days(1), false),
        (now, now + days(400), true),
        // It is good from a moment that is far ahead.
        (now + days(9000), now, true),
        // The clock is not set yet: that says nothing about the certificate.
        (now, 600, false),
        (600, now, true),
    ] {
        let pki = tempfile::tempdir().unwrap();
        let start = async |seconds: i64| {
            let (clock, reviews) = (Hand::at(seconds), SharedReviews::default());
            let world = World::over(limits(), clock, reviews, Some(nobody()), |config| {
                config.cert_dir = pki.path().to_owned();
            });
            let world = world.await.unwrap();
            let served = certificate(&world).await.unwrap();
            world.end().await;
            served
        };
        let (first, second) = (start(made).await, start(next).await);
        assert_eq!(first != second, is_other, "{made} {next}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_change_are_used_without_a_restart_and_only_when_they_fit() {
    let ca = Ca::new("serving");
    let (first, first_key) = ca.serving(NODE);
    let (second, second_key) = ca.serving(NODE);
    let world = World::with(limits(), |config| {
        let dir = config.root_dir.parent().unwrap().to_owned();
        std::fs::write(dir.join("tls.crt"), &first).unwrap();
        std::fs::write(dir.join("tls.key"), &first_key).unwrap();
        config.kubelet.tls_cert_file = Some(dir.join("tls.crt"));
        config.kubelet.tls_private_key_file = Some(dir.join("tls.key"));
    })
    .await;
    let (file, key) = (world.path("tls.crt"), world.path("tls.key"));
    let before = first_of(&file);
    assert_eq!(certificate(&world).await.unwrap(), before);
    let mut client = world.connect().await;
    client.ask("GET", "/healthz", None).await;
    // Half of the change: certificate and key do not go together.
    std::fs::write(&file, &second).unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(certificate(&world).await.unwrap(), before);
    std::fs::write(&key, &second_key).unwrap();
    let after = first_of(&file);
    eventually("the new certificate", async || {
        certificate(&world).await.unwrap() == after
    })
    .await;
    client.ask("GET", "/healthz", None).await;
    assert!(!client.is_closed(), "open connections go on");
    std::fs::remove_file(&key).unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(certificate(&world).await.unwrap(), after);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_is_missing_or_broken_at_the_start_is_used_once_it_is_whole() {
    for at_start in ["missing", "rubbish", "pair"] {
        let ca = Ca::new("serving");
        let (certificate_pem, key_pem) = ca.serving(NODE);
        let (_, other) = ca.serving(NODE);
        let world = World::with(limits(), |config| {
            let dir = config.root_dir.parent().unwrap().to_owned();
            let (file, key) = (dir.join("tls.crt"), dir.join("tls.key"));
            match at_start {
                "missing" => {}
                "rubbish" => std::fs::write(&file, "rubbish").unwrap(),
                _ => std::fs::write(&file, &certificate_pem).unwrap(),
            }
            if at_start != "missing" {
                std::fs::write(&key, &other).unwrap();
            }
            config.kubelet.tls_cert_file = Some(file);
            config.kubelet.tls_private_key_file = Some(key);
        })
        .await;
        assert_eq!(certificate(&world).await, None, "{at_start}");
        let file = world.path("tls.crt");
        std::fs::write(&file, &certificate_pem).unwrap();
        std::fs::write(world.path("tls.key"), &key_pem).unwrap();
        let wanted = Some(first_of(&file));
        eventually("the certificate", async || {
            certificate(&world).await == wanted
        })
        .await;
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_client_certificate_is_accepted_before_the_client_ca_exists() {
    let world = World::with(limits(), |config| {
        let file = config.kubelet.authentication.client_ca_file.as_ref();
        std::fs::remove_file(file.unwrap()).unwrap();
        config.kubelet.authentication.anonymous = false;
    })
    .await;
    world.allow("alice", "get", "healthz");
    let alice = world.ca.user("alice", None);
    let ask = async || world.ask("GET", "/healthz", None, Some(&alice)).await;
    let (status, text) = ask().await;
    assert_eq!(status, 401, "{text}");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(ask().await.0, 401);
    std::fs::write(world.path("client-ca.crt"), &world.ca.pem).unwrap();
    eventually("the client CA", async || ask().await.0 == 200).await;
    world.end().await;
}

fn nobody() -> ApiClient {
    let fake = FakeApi::new();
    ApiClient::over(
        fake.service_as(Identity::Node(NODE.to_owned())),
        (100, 100),
        Arc::new(Hand::new()),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_is_taken_is_served_once_it_is_free() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let mut world = World::with(limits(), |config| {
        config.kubelet.port = address.port();
    })
    .await;
    assert_eq!(world.address, None);
    drop(taken);
    world.address = Some(address);
    eventually("the server", async || certificate(&world).await.is_some()).await;
    world.end().await;
}

fn node(addresses: &[(&str, &str)]) -> Arc<Node> {
    let addresses = addresses.iter().map(|(kind, address)| NodeAddress {
        type_: (*kind).to_owned(),
        address: (*address).to_owned(),
    });
    Arc::new(Node {
        status: Some(NodeStatus {
            addresses: Some(addresses.collect()),
            ..NodeStatus::default()
        }),
        ..Node::default()
    })
}

const DAY: Duration = Duration::from_secs(86_400);

fn requests(fake: &FakeApi) -> Vec<CertificateSigningRequest> {
    fake.list("")
}

/// The one request that is not answered, when there are more than `already`.
async fn asked(fake: &FakeApi, already: usize) -> CertificateSigningRequest {
    eventually("a request", async || requests(fake).len() > already).await;
    let unanswered = |request: &CertificateSigningRequest| {
        let status = request.status.as_ref();
        status.is_none_or(|status| status.certificate.is_none() && status.conditions.is_none())
    };
    requests(fake).into_iter().find(unanswered).unwrap()
}

/// Signs what is asked for, once; for a hundred days from now.
async fn sign(fake: &FakeApi, ca: &Ca, clock: &Hand, already: usize) -> CertificateSigningRequest {
    let request = asked(fake, already).await;
    let pem = String::from_utf8(request.spec.request.0.clone()).unwrap();
    let now = u64::try_from(clock.now().wall_ms / 1000).unwrap();
    let signed = ca.sign_request(&pem, now..now + 100 * DAY.as_secs());
    fake.sign(request.metadata.name.as_ref().unwrap(), signed.as_bytes());
    request
}

/// A node that asks for its certificate and keeps it in `pki`.
async fn asking(fake: &FakeApi, clock: &Hand, pki: &Path) -> World {
    let api = ApiClient::over(
        fake.service_as(Identity::Node(NODE.to_owned())),
        (1000, 1000),
        Arc::new(clock.clone()),
    );
    let reviews = SharedReviews::default();
    let world = World::over(limits(), clock.clone(), reviews, Some(api), |config| {
        config.kubelet.server_tls_bootstrap = true;
        config.cert_dir = pki.to_owned();
    });
    world.await.unwrap()
}

/// Long enough for the end of the certificate to have been looked at some times.
async fn some_looks() {
    tokio::time::sleep(limits().look * 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_was_asked_for_is_renewed_in_time_and_kept_while_it_is_not_signed() {
    let (fake, clock, ca) = (FakeApi::new(), Hand::new(), Ca::new("cluster"));
    let pki = tempfile::tempdir().unwrap();
    let world = asking(&fake, &clock, pki.path()).await;
    world.node.set(node(&[("InternalIP", "10.1.2.3")]));
    sign(&fake, &ca, &clock, 0).await;
    eventually("the certificate", async || {
        certificate(&world).await.is_some()
    })
    .await;
    let first = certificate(&world).await.unwrap();
    let mut client = world.connect().await;
    client.ask("GET", "/healthz", None).await;

    // Between 70 and 90 % of its life.
    clock.advance(69 * DAY);
    some_looks().await;
    assert_eq!(requests(&fake).len(), 1, "it is too early");
    clock.advance(22 * DAY);
    let denied = asked(&fake, 1).await;
    let name = denied.metadata.name.unwrap();
    fake.modify("", &name, |request: &mut CertificateSigningRequest| {
        let condition = CertificateSigningRequestCondition {
            type_: "Denied".to_owned(),
            status: "True".to_owned(),
            ..CertificateSigningRequestCondition::default()
        };
        let status = request.status.get_or_insert_default();
        status.conditions = Some(vec![condition]);
    });
    eventually("the refusal is counted", async || {
        world.metric(&["kubelet_server_expiration_renew_errors"]) >= 1.0
    })
    .await;
    assert_eq!(certificate(&world).await.unwrap(), first, "it is kept");
    // Not even its end takes it away: a client that looks says so better than a handshake that fails.
    clock.advance(10 * DAY);
    some_looks().await;
    assert_eq!(certificate(&world).await.unwrap(), first);
    let ttl = || world.metric(&["kubelet_certificate_manager_server_ttl_seconds "]);
    eventually("its end is in the metrics", async || ttl() < 0.0).await;

    // Asked again with another key, and signed.
    let again = sign(&fake, &ca, &clock, 2).await;
    assert_ne!(again.metadata.name.as_deref(), Some(name.as_str()));
    eventually("the new certificate", async || {
        certificate(&world).await.unwrap() != first
    })
    .await;
    let second = certificate(&world).await.unwrap();
    assert_eq!(
        second,
        first_of(&pki.path().join("kubelet-server-current.pem"))
    );
    client.ask("GET", "/healthz", None).await;
    assert!(!client.is_closed(), "open connections go on");
    eventually("its time to live is told", async || {
        (99.0..=100.0).contains(&(ttl() / DAY.as_secs_f64()))
    })
    .await;
    let used = world.metric(&["kubelet_certificate_manager_server_rotation_seconds_sum"]);
    assert!(
        (100.0..=102.0).contains(&(used / DAY.as_secs_f64())),
        "the first was in use for {used} s"
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_keeps_the_certificate_and_takes_up_a_request_that_waits() {
    let (fake, clock, ca) = (FakeApi::new(), Hand::new(), Ca::new("cluster"));
    let pki = tempfile::tempdir().unwrap();
    let address = || node(&[("InternalIP", "10.1.2.3")]);
    let world = asking(&fake, &clock, pki.path()).await;
    world.node.set(address());
    sign(&fake, &ca, &clock, 0).await;
    eventually("the certificate", async || {
        certificate(&world).await.is_some()
    })
    .await;
    let first = certificate(&world).await.unwrap();
    world.end().await;

    // Served from the start, before the node's object is there.
    clock.advance(10 * DAY);
    let world = asking(&fake, &clock, pki.path()).await;
    assert_eq!(certificate(&world).await.unwrap(), first);
    world.node.set(address());
    some_looks().await;
    assert_eq!(requests(&fake).len(), 1, "nothing is asked again");

    // The agent ends while its request for the next one waits.
    clock.advance(82 * DAY);
    let waiting = asked(&fake, 1).await;
    world.end().await;
    let world = asking(&fake, &clock, pki.path()).await;
    world.node.set(address());
    assert_eq!(certificate(&world).await.unwrap(), first);
    let signed = sign(&fake, &ca, &clock, 1).await;
    assert_eq!(signed.metadata.name, waiting.metadata.name);
    eventually("the second certificate", async || {
        certificate(&world).await.unwrap() != first
    })
    .await;
    assert_eq!(requests(&fake).len(), 2, "it was not asked twice");
    let second = certificate(&world).await.unwrap();
    world.end().await;

    // Off for longer than a certificate lasts: it is of no use to anybody.
    clock.advance(101 * DAY);
    let world = asking(&fake, &clock, pki.path()).await;
    assert_eq!(certificate(&world).await, None);
    world.node.set(address());
    sign(&fake, &ca, &clock, 2).await;
    eventually("the third certificate", async || {
        certificate(&world)
            .await
            .is_some_and(|third| third != second)
    })
    .await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_certificate_is_asked_of_the_api_server_for_the_addresses_of_the_node() {
    let fake = FakeApi::new();
    let clock = Hand::new();
    let pki = tempfile::tempdir().unwrap();
    let world = asking(&fake, &clock, pki.path()).await;
    assert_eq!(certificate(&world).await, None, "there is none yet");
    assert!(!pki.path().join("kubelet.crt").exists(), "none is made");
    let ca = Ca::new("cluster");
    world
        .node
        .set(node(&[("Hostname", NODE), ("InternalIP", "10.1.2.3")]));
    let request = sign(&fake, &ca, &clock, 0).await;
    assert_eq!(request.spec.signer_name, "kubernetes.io/kubelet-serving");
    let usages = request.spec.usages.clone().unwrap();
    assert_eq!(
        usages,
        ["digital signature", "key encipherment", "server auth"]
    );
    eventually("the certificate", async || {
        certificate(&world).await.is_some()
    })
    .await;
    let served = certificate(&world).await.unwrap();
    assert_eq!(
        served,
        first_of(&pki.path().join("kubelet-server-current.pem"))
    );
    let (_, parsed) = X509Certificate::from_der(&served).unwrap();
    assert_eq!(
        parsed.subject().to_string(),
        format!("O=system:nodes, CN=system:node:{NODE}")
    );
    let names = parsed.subject_alternative_name().unwrap().unwrap();
    let names = format!("{:?}", names.value.general_names);
    assert!(
        names.contains(NODE) && names.contains("[10, 1, 2, 3]"),
        "{names}"
    );

    // Another address: another certificate.
    world
        .node
        .set(node(&[("Hostname", NODE), ("InternalIP", "10.1.2.4")]));
    sign(&fake, &ca, &clock, 1).await;
    eventually("another", async || {
        certificate(&world).await.unwrap() != served
    })
    .await;
    assert_eq!(fake.list::<CertificateSigningRequest>("").len(), 2);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_exchanged_in_the_groups_configured() {
    let world = World::with(limits(), |config| {
        config.kubelet.tls_curve_preferences = vec![24];
    })
    .await;
    // A client that has all agrees on the one that is left; it is asked to begin anew with it.
    let stream = world.tls(None, &[b"h2"]).await.unwrap();
    let group = stream.get_ref().1.negotiated_key_exchange_group().unwrap();
    assert_eq!(group.name(), rustls::NamedGroup::secp384r1);
    // One that does not have it is refused, with either version.
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let mut provider = rustls::crypto::ring::default_provider();
        provider
            .kx_groups
            .retain(|group| group.name() != rustls::NamedGroup::secp384r1);
        let config = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let stream = tokio::net::TcpStream::connect(world.address.unwrap())
            .await
            .unwrap();
        let name = rustls::pki_types::ServerName::try_from(NODE).unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let error = connector.connect(name, stream).await.unwrap_err();
        let error = error.to_string();
        assert!(error.contains("HandshakeFailure"), "{error}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_and_cipher_suites_are_those_configured() {
    let world = World::with(limits(), |config| {
        config.kubelet.tls_min_version = TlsVersion::Tls13;
    })
    .await;
    let stream = world.tls(None, &[b"h2", b"http/1.1"]).await.unwrap();
    let session = stream.get_ref().1;
    assert_eq!(session.alpn_protocol(), Some(&b"h2"[..]));
    assert_eq!(
        session.protocol_version(),
        Some(rustls::ProtocolVersion::TLSv1_3)
    );
    let old = |world: &World| {
        let address = world.address.unwrap();
        async move {
            let provider = rustls::crypto::ring::default_provider();
            let config = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
                .with_protocol_versions(&[&rustls::version::TLS12])
                .unwrap()
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let name = rustls::pki_types::ServerName::try_from(NODE).unwrap();
            tokio_rustls::TlsConnector::from(Arc::new(config))
                .connect(name, stream)
                .await
                .unwrap_err()
                .to_string()
        }
    };
    // It fails for the version, before the certificate is looked at.
    let error = old(&world).await;
    assert!(error.contains("ProtocolVersion"), "{error}");
    world.end().await;

    let suites = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        World::with(limits(), move |config| {
            config.kubelet.tls_cipher_suites = names
        })
    };
    // The key is ECDSA, so that this one leaves nothing for TLS 1.2.
    let world = suites(&["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"]).await;
    let error = old(&world).await;
    assert!(error.contains("HandshakeFailure"), "{error}");
    world.end().await;
    let world = suites(&["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]).await;
    let error = old(&world).await;
    assert!(
        error.contains("UnknownIssuer"),
        "only now the certificate: {error}"
    );
    world.end().await;
}

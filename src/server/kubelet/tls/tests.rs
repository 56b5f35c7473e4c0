//! Unit tests; certificates that change under a running server are in `tests/kubelet_api`.
#![allow(clippy::unwrap_used, reason = "tests")]

use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeStatus};

use super::*;
use crate::apiserver::testkit::FakeApi;
use crate::server::kubelet::testkit::TestNode;

fn pair(name: &str) -> (String, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let params =
        rcgen::CertificateParams::new(vec![name.to_owned(), "10.0.0.1".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    (certificate.pem(), key.serialize_pem())
}

#[test]
fn a_certificate_is_taken_with_its_key_only() {
    let ((certificate, key), (_, other)) = (pair("n"), pair("n"));
    let parsed = Certificate::parse(certificate.as_bytes(), key.as_bytes()).unwrap();
    assert_eq!(parsed.names, ["n"]);
    let address: IpAddr = [10, 0, 0, 1].into();
    assert!(parsed.is_for(&["n".to_owned()], &[address]));
    assert!(!parsed.is_for(&["m".to_owned()], &[address]));
    assert!(!parsed.is_for(&[], &[[10, 0, 0, 2].into()]));
    // Both in one file, as a certificate that was asked for is kept.
    let both = format!("{certificate}{key}");
    assert!(Certificate::parse(both.as_bytes(), both.as_bytes()).is_ok());
    for (chain, key, says) in [
        (certificate.as_str(), other.as_str(), "do not go together"),
        ("", key.as_str(), "no certificate"),
        (
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            key.as_str(),
            "does not parse",
        ),
        (certificate.as_str(), "", "key does not parse"),
    ] {
        let problem = Certificate::parse(chain.as_bytes(), key.as_bytes()).unwrap_err();
        assert!(problem.contains(says), "{problem}");
    }
}

#[test]
fn files_are_used_when_they_change_and_not_while_they_are_bad() {
    let dir = tempfile::tempdir().unwrap();
    let (file, key_file) = (dir.path().join("c"), dir.path().join("k"));
    let (certificate, key) = pair("n");
    std::fs::write(&file, &certificate).unwrap();
    std::fs::write(&key_file, &key).unwrap();
    let mut files = files::Files::new(file.clone(), key_file.clone());
    assert!(files.read().unwrap().is_some());
    assert!(files.read().unwrap().is_none());
    let (next, next_key) = pair("n");
    std::fs::write(&file, &next).unwrap();
    assert!(files.read().is_err(), "half of a change");
    assert!(files.read().is_err(), "it stays wrong");
    std::fs::write(&key_file, &next_key).unwrap();
    assert!(files.read().unwrap().is_some());
}

#[test]
fn the_names_of_a_node_are_those_of_its_addresses() {
    let address = |kind: &str, address: &str| NodeAddress {
        type_: kind.to_owned(),
        address: address.to_owned(),
    };
    let node = Node {
        status: Some(NodeStatus {
            addresses: Some(vec![
                address("Hostname", "n"),
                address("InternalIP", "10.0.0.2"),
                address("InternalIP", "10.0.0.1"),
                address("ExternalIP", "fd00::1"),
                address("InternalIP", "10.0.0.1"),
                address("InternalDNS", "n.internal"),
                address("ExternalDNS", ""),
                address("Other", "x"),
            ]),
            ..NodeStatus::default()
        }),
        ..Node::default()
    };
    let (names, addresses) = bootstrap::names_of(&node);
    assert_eq!(names, ["n", "n.internal"]);
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.0.0.1", "10.0.0.2", "fd00::1"]);
    assert_eq!(
        bootstrap::names_of(&Node::default()),
        (Vec::new(), Vec::new())
    );
}

#[tokio::test(start_paused = true)]
async fn who_was_refused_asks_again_as_soon_as_it_has_other_credentials() {
    let api = FakeApi::new();
    api.with(|model| model.fails = Some(401));
    let mut world = TestNode::new();
    let pki = tempfile::tempdir().unwrap();
    let mut config = (*world.node.config).clone();
    config.cert_dir = pki.path().to_owned();
    world.node.config = Arc::new(config);
    world.node.api = Some(api.client.clone());
    let object = |addresses: &[(&str, &str)]| {
        let address = |(kind, address): &(&str, &str)| NodeAddress {
            type_: (*kind).to_owned(),
            address: (*address).to_owned(),
        };
        Arc::new(Node {
            status: Some(NodeStatus {
                addresses: Some(addresses.iter().map(address).collect()),
                ..NodeStatus::default()
            }),
            ..Node::default()
        })
    };
    world.node.node.set(object(&[("Hostname", "n")]));
    let node: Shared = Arc::new(world.node);
    let serving = Serving::default();
    let look = Duration::from_secs(10);
    let asked = || api.with(|model| model.log.len());
    let work = bootstrap::run(&node, &serving, look);
    let scenario = async {
        tokio::time::sleep(Duration::from_secs(7200)).await;
        assert_eq!(asked(), 0, "without an address nobody signs");
        node.node
            .set(object(&[("Hostname", "n"), ("InternalIP", "10.0.0.1")]));
        // By now it asks every ten minutes or so.
        tokio::time::sleep(Duration::from_secs(7200)).await;
        let before = asked();
        assert!((8..40).contains(&before), "{before}");
        api.client.standing().taken();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(asked() > before, "it waits for its turn");
    };
    tokio::select! {
        () = work => unreachable!(),
        () = scenario => {}
    }
}

#[test]
fn cipher_suites_go_by_their_names_in_go() {
    for name in crate::kubeletconfig::CIPHER_SUITES {
        let k = KubeletConfiguration {
            tls_cipher_suites: vec![name.to_owned()],
            ..KubeletConfiguration::default()
        };
        let config = server_config(&k, Serving::default()).unwrap();
        let suites = &config.crypto_provider().cipher_suites;
        let old: Vec<_> = suites
            .iter()
            .filter(|suite| suite.tls13().is_none())
            .collect();
        assert_eq!(old.len(), 1, "{name}: {old:?}");
        assert!(suites.len() > 1, "those of TLS 1.3 stay");
    }
}

#[test]
fn groups_for_key_exchange_go_by_their_numbers() {
    let groups = |curves: &[i32]| -> Vec<u16> {
        let k = KubeletConfiguration {
            tls_curve_preferences: curves.to_vec(),
            ..KubeletConfiguration::default()
        };
        let config = server_config(&k, Serving::default()).unwrap();
        let groups = config.crypto_provider().kx_groups.iter();
        groups.map(|group| u16::from(group.name())).collect()
    };
    let all = groups(&[]);
    // A new version of the library may bring more: they are then to be supported.
    assert_eq!(all.len(), crate::kubeletconfig::CURVES.len(), "{all:?}");
    for curve in crate::kubeletconfig::CURVES {
        assert_eq!(groups(&[curve]), [u16::try_from(curve).unwrap()]);
    }
    let order: Vec<_> = all.iter().copied().filter(|one| *one != 24).collect();
    assert_eq!(groups(&[23, 29]), order, "the library's order stays");
}

/// Moves what both have to say, until the handshake has ended.
fn shake_hands(client: &mut rustls::ClientConnection, server: &mut rustls::ServerConnection) {
    while client.is_handshaking() || server.is_handshaking() {
        let mut sent = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut sent).unwrap();
        }
        let mut rest = sent.as_slice();
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets().unwrap();
        }
        let mut sent = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut sent).unwrap();
        }
        let mut rest = sent.as_slice();
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets().unwrap();
        }
    }
}

#[tokio::test]
async fn a_client_with_a_certificate_of_version_1_shows_it_in_every_version_of_tls() {
    let mut k = TestNode::new().node.config.kubelet.clone();
    k.authentication.client_ca_file = Some("/ca".into());
    let (certificate, key) = pair("n");
    let serving = Serving::default();
    serving.set(Certificate::parse(certificate.as_bytes(), key.as_bytes()).unwrap());
    let config = server_config(&k, serving).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    let own = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
    roots.add(own).unwrap();
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let identity = rustls::sign::SingleCertAndKey::from(certificates::tests::old_pair());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_client_cert_resolver(Arc::new(identity));
        let mut client =
            rustls::ClientConnection::new(Arc::new(client), "n".try_into().unwrap()).unwrap();
        let mut server = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
        shake_hands(&mut client, &mut server);
        let shown = server.peer_certificates().map(<[_]>::len);
        assert_eq!(shown, Some(1), "{version:?}");
    }
}

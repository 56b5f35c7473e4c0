//! Servers whose certificates only Go takes, and identities of version 1.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use base64::Engine as _;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::json;

use super::*;
use crate::types::certificates::tests::{CA, OLD, OLD_KEY, moment};

fn ask(trusted: &[Vec<u8>], shown: &[u8], name: &str) -> Result<(), Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Verifier::new(trusted, &provider).unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let shown = CertificateDer::from(shown.to_vec());
    let verified = verifier.verify_server_cert(&shown, &[], &name, &[], moment());
    verified.map(|_| ())
}

#[test]
fn a_server_is_known_by_its_own_certificate_in_the_bundle() {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = Issuer::new(params, KeyPair::generate().unwrap());
    let params = || CertificateParams::new(vec!["api".to_owned()]).unwrap();
    let by_another = params()
        .signed_by(&KeyPair::generate().unwrap(), &authority)
        .unwrap();
    let mut as_ca = params();
    as_ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let as_ca = as_ca.self_signed(&KeyPair::generate().unwrap()).unwrap();
    for shown in [by_another.der(), as_ca.der()] {
        let bundle = [shown.to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(shown.clone()).unwrap();
        let chains = WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::new(rustls::crypto::ring::default_provider()),
        );
        let name = ServerName::try_from("api").unwrap();
        let strict = chains.build().unwrap();
        let strict = strict.verify_server_cert(shown, &[], &name, &[], moment());
        assert!(strict.is_err(), "rustls takes it by now");
        ask(&bundle, shown, "api").unwrap();
        assert!(ask(&bundle, shown, "another").is_err(), "its name counts");
        let stranger = params().self_signed(&KeyPair::generate().unwrap());
        let stranger = [stranger.unwrap().der().to_vec()];
        assert!(ask(&stranger, shown, "api").is_err());
    }
}

/// Base64 as `base64` prints it, in lines of 76 characters.
fn wrapped(text: &str) -> String {
    let whole = base64::engine::general_purpose::STANDARD.encode(text);
    let lines = whole.as_bytes().chunks(76);
    let lines: Vec<_> = lines.map(String::from_utf8_lossy).collect();
    format!("{}\n", lines.join("\n"))
}

fn load(dir: &Path, server: &str, cluster: serde_json::Value) -> kubeconfig::Loaded {
    let mut cluster = cluster;
    cluster["server"] = json!(server);
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {
            "client-certificate-data": wrapped(OLD), "client-key-data": wrapped(OLD_KEY),
        }}],
    });
    let path = dir.join("kubeconfig");
    std::fs::write(&path, text.to_string()).unwrap();
    kubeconfig::load(&path, None).unwrap()
}

#[test]
fn a_kubeconfig_is_read_as_go_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let bundle = format!("{damaged}caf\u{e9}\n{CA}");
    let authority = json!({"certificate-authority-data": wrapped(&bundle)});
    let loaded = load(dir.path(), "10.0.0.1:6443", authority);
    assert_eq!(
        loaded.config.cluster_url.to_string(),
        "https://10.0.0.1:6443/",
        "an address alone"
    );
    let trusted = loaded.config.root_cert.as_ref().map(Vec::len);
    assert_eq!(trusted, Some(1), "without what is no certificate");
    let tls = client_config(&loaded.config).unwrap();
    assert!(
        tls.client_auth_cert_resolver.has_certs(),
        "a certificate of version 1 in wrapped lines"
    );
}

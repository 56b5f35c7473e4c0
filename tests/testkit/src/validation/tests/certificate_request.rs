use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;

use super::Table;

#[test]
fn a_certificate_signing_request() {
    let key = KeyPair::generate().unwrap();
    let made = CertificateParams::default()
        .serialize_request(&key)
        .unwrap();
    let pem = made.pem().unwrap();
    let mut broken = made.der().to_vec();
    // The last byte is of the signature.
    *broken.last_mut().unwrap() ^= 1;
    let body = STANDARD.encode(broken);
    let broken =
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{body}\n-----END CERTIFICATE REQUEST-----\n");
    let table = Table {
        path: "certificates.k8s.io certificatesigningrequests",
        old: None,
        new: json!({
            "metadata": {"name": "Any name"},
            "spec": {
                "request": STANDARD.encode(&pem), "signerName": "kubernetes.io/kubelet-serving",
                "usages": ["digital signature", "server auth"], "expirationSeconds": 600,
            },
        }),
    };
    table.holds(&[
        (
            "no request",
            &[("/spec/request", json!(""))],
            &["spec.request Invalid"],
        ),
        (
            "not in base64",
            &[("/spec/request", json!(pem))],
            &["spec.request Invalid"],
        ),
        (
            "a bad signature",
            &[("/spec/request", json!(STANDARD.encode(broken)))],
            &["spec.request Invalid"],
        ),
        (
            "no usages",
            &[("/spec/usages", json!([]))],
            &["spec.usages Required"],
        ),
        (
            "another usage",
            &[("/spec/usages/0", json!("any use"))],
            &["spec.usages[0] NotSupported"],
        ),
        (
            "a usage twice",
            &[("/spec/usages/0", json!("server auth"))],
            &["spec.usages[1] Duplicate"],
        ),
        (
            "no signer",
            &[("/spec/signerName", json!(""))],
            &["spec.signerName Required"],
        ),
        (
            "the old signer",
            &[("/spec/signerName", json!("kubernetes.io/legacy-unknown"))],
            &["spec.signerName Invalid"],
        ),
        (
            "a signer without a path",
            &[("/spec/signerName", json!("kubernetes.io"))],
            &["spec.signerName Invalid"],
        ),
        (
            "a signer without a domain",
            &[("/spec/signerName", json!("local/signer"))],
            &["spec.signerName Invalid"],
        ),
        ("no life", &[("/spec/expirationSeconds", json!(null))], &[]),
        (
            "a short life",
            &[("/spec/expirationSeconds", json!(599))],
            &["spec.expirationSeconds Invalid"],
        ),
        (
            "a path as name",
            &[("/metadata/name", json!("a/b"))],
            &["metadata.name Invalid"],
        ),
    ]);
}

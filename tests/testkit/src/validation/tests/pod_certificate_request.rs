use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};

use super::Table;

#[test]
fn a_pod_certificate_request() {
    let key = KeyPair::generate().unwrap();
    let made = CertificateParams::default()
        .serialize_request(&key)
        .unwrap();
    let mut broken = made.der().to_vec();
    // The last byte is of the signature.
    *broken.last_mut().unwrap() ^= 1;
    let table = Table {
        path: "certificates.k8s.io podcertificaterequests",
        old: None,
        new: json!({
            "apiVersion": "certificates.k8s.io/v1",
            "metadata": {"name": "req-1", "namespace": "default"},
            "spec": {
                "signerName": "example.com/signer", "podName": "web", "podUID": "u1",
                "serviceAccountName": "default", "serviceAccountUID": "u2",
                "nodeName": "node", "nodeUID": "u3", "maxExpirationSeconds": 3600,
                "stubPKCS10Request": STANDARD.encode(made.der()),
            },
        }),
    };
    let proof = json!("cHJvb2Y=");
    table.holds(&[
        (
            "no node UID",
            &[("/spec/nodeUID", Value::Null)],
            &["spec.nodeUID Required"],
        ),
        (
            "another signer name",
            &[("/spec/signerName", json!("signer"))],
            &["spec.signerName Invalid"],
        ),
        (
            "a short life",
            &[("/spec/maxExpirationSeconds", json!(3599))],
            &["spec.maxExpirationSeconds Invalid"],
        ),
        (
            "a bad signature",
            &[("/spec/stubPKCS10Request", json!(STANDARD.encode(broken)))],
            &["spec.stubPKCS10Request Invalid"],
        ),
        (
            "no key",
            &[("/spec/stubPKCS10Request", Value::Null)],
            &["spec.stubPKCS10Request Required"],
        ),
        (
            "a proof, before v1",
            &[
                ("/apiVersion", json!("certificates.k8s.io/v1beta1")),
                ("/spec/stubPKCS10Request", Value::Null),
                ("/spec/pkixPublicKey", proof.clone()),
                ("/spec/proofOfPossession", proof.clone()),
            ],
            &[],
        ),
        (
            "a request and a proof",
            &[
                ("/apiVersion", json!("certificates.k8s.io/v1beta1")),
                ("/spec/pkixPublicKey", proof.clone()),
                ("/spec/proofOfPossession", proof),
            ],
            &["spec.stubPKCS10Request Required"],
        ),
    ]);
}

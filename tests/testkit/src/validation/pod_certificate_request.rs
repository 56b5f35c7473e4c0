//! PodCertificateRequests. Upstream: `ValidatePodCertificateRequestCreate`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::certificate_request::signer;
use super::formats::{dns_subdomain, is_set, text};
use super::metadata;
use super::violation::Violations;

/// Shortest and longest life that may be asked for, in seconds.
const LIFE: (i64, i64) = (3600, 7_862_400);

/// A request that is made.
pub(super) fn create(object: &Value, found: &mut Violations) {
    metadata::create(object, true, dns_subdomain, found);
    let spec = &object["spec"];
    signer(&spec["signerName"], found);
    for (field, is_name) in [
        ("podName", true),
        ("podUID", false),
        ("serviceAccountName", true),
        ("serviceAccountUID", false),
        ("nodeName", true),
        ("nodeUID", false),
    ] {
        let (value, path) = (&spec[field], format!("spec.{field}"));
        match text(value) {
            "" => found.required(path, ""),
            name if is_name => found.format(&path, value, dns_subdomain(name)),
            _ => {}
        }
    }
    let life = &spec["maxExpirationSeconds"];
    if let Some(seconds) = life.as_i64()
        && !(LIFE.0..=LIFE.1).contains(&seconds)
    {
        let why = format!("must be in the range [{}, {}]", LIFE.0, LIFE.1);
        found.invalid("spec.maxExpirationSeconds", life, why);
    }
    key(object, found);
}

/// Either a request that its key has signed, or, before `v1`, a key and a proof.
fn key(object: &Value, found: &mut Violations) {
    let spec = &object["spec"];
    let (stub, public, proof) = (
        &spec["stubPKCS10Request"],
        &spec["pkixPublicKey"],
        &spec["proofOfPossession"],
    );
    let is_v1 = object["apiVersion"] == "certificates.k8s.io/v1";
    if is_v1 {
        for (field, value) in [("pkixPublicKey", public), ("proofOfPossession", proof)] {
            if is_set(value) {
                found.unknown(&format!("spec.{field}"));
            }
        }
    }
    match (is_set(stub), is_set(public) && is_set(proof)) {
        (true, false) => {
            let der = STANDARD.decode(text(stub)).unwrap_or_default();
            if let Err(why) = rcgen::CertificateSigningRequestParams::from_der(&der.into()) {
                found.invalid("spec.stubPKCS10Request", stub, why);
            }
        }
        (false, true) => {}
        _ => found.required(
            "spec.stubPKCS10Request",
            "exactly one of stubPKCS10Request or pkixPublicKey and proofOfPossession must be set",
        ),
    }
}

//! CertificateSigningRequests. Upstream: `ValidateCertificateSigningRequestCreate`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::formats::{dns_subdomain, items, path_segment, text};
use super::metadata;
use super::violation::Violations;

/// Shortest life of a certificate that may be asked for, in seconds.
const LIFE: i64 = 600;

/// `KeyUsage`.
const USAGES: [&str; 23] = [
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];

/// A request that is made.
pub(super) fn create(object: &Value, found: &mut Violations) {
    metadata::create(object, false, path_segment, found);
    let spec = &object["spec"];
    if let Err(why) = signed(text(&spec["request"])) {
        found.invalid("spec.request", &spec["request"], why);
    }
    let usages = items(&spec["usages"]);
    if usages.is_empty() {
        found.required("spec.usages", "");
    }
    for (index, usage) in usages.iter().enumerate() {
        let field = format!("spec.usages[{index}]");
        if !USAGES.contains(&text(usage)) {
            found.not_supported(&field, usage, &USAGES);
        }
        if usages[..index].contains(usage) {
            found.duplicate(field, usage);
        }
    }
    signer(&spec["signerName"], found);
    let life = &spec["expirationSeconds"];
    if life.as_i64().is_some_and(|seconds| seconds < LIFE) {
        let why = "may not specify a duration less than 600 seconds (10 minutes)";
        found.invalid("spec.expirationSeconds", life, why);
    }
}

/// `validateCSR`: a PKCS #10 request in PEM, in base64, signed by its own key.
fn signed(request: &str) -> Result<(), String> {
    let pem = STANDARD.decode(request).map_err(|e| e.to_string())?;
    let pem = String::from_utf8(pem).map_err(|e| e.to_string())?;
    if !pem.contains("-----BEGIN CERTIFICATE REQUEST-----") {
        return Err("PEM block type must be CERTIFICATE REQUEST".to_owned());
    }
    let parsed = rcgen::CertificateSigningRequestParams::from_pem(&pem);
    parsed.map(drop).map_err(|e| e.to_string())
}

/// `ValidateSignerName`: a domain and a path.
pub(super) fn signer(signer: &Value, found: &mut Violations) {
    const FIELD: &str = "spec.signerName";
    let name = text(signer);
    if name.is_empty() {
        return found.required(FIELD, "");
    }
    if name == "kubernetes.io/legacy-unknown" {
        let why = "the legacy signerName is not allowed via this API version";
        return found.invalid(FIELD, signer, why);
    }
    let Some((domain, path)) = name.split_once('/').filter(|(_, path)| !path.contains('/')) else {
        let why = "must be a fully qualified domain and path of the form 'example.com/signer-name'";
        return found.invalid(FIELD, signer, why);
    };
    found.format(FIELD, signer, dns_subdomain(domain));
    if domain.split('.').count() < 2 {
        let why = "should be a domain with at least two segments separated by dots";
        found.invalid(FIELD, signer, why);
    }
    found.format(FIELD, signer, dns_subdomain(path));
}

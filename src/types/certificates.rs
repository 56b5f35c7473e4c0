//! Certificates that Go takes and rustls does not. Users made them for clusters whose programs are all written in Go.
//!
//! - The certificate of a peer that is in the bundle of CAs itself, as that of an API server that nobody signed.
//! - The certificate of a peer that says that it is a CA: `openssl req -x509` writes that.
//! - A certificate of version 1: `openssl x509 -req` without extensions writes such.
//!
//! rustls judges first. What it refuses is judged here as Go's `x509.Certificate.Verify` does, for chains of one or two
//! certificates: the peer's own, and a trusted one that has signed it.
//!
//! **Invariant:** nothing counts as good that is out of date, for another purpose, signed by nobody who is trusted, or limited
//! in a way that is not understood here.

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, SubjectPublicKeyInfoDer, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, DigitallySignedStruct, Error, InconsistentKeys};
use x509_parser::extensions::{GeneralName, ParsedExtension, X509Extension};
use x509_parser::oid_registry::OID_PKCS1_RSASSAPSS;
use x509_parser::prelude::{FromDer, X509Certificate, X509Version};
use x509_parser::x509::SubjectPublicKeyInfo;

/// The purpose that a certificate is shown for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A client connects with it.
    Client,
    /// A server answers with it. Its name is to be checked by the caller.
    Server,
}

/// Joins a key with its certificates, also where the first one is of version 1.
///
/// # Errors
/// When the key cannot be used, or is not that of the first certificate.
pub fn certified_key(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, Error> {
    let key = provider.key_provider.load_private_key(key)?;
    let certified = CertifiedKey::new(chain, key);
    match certified.keys_match() {
        Ok(()) | Err(Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(certified),
        Err(Error::InvalidCertificate(_)) if is_of_first(&certified) => Ok(certified),
        Err(error) => Err(error),
    }
}

/// Returns whether the key is that of the first certificate, whatever its version is.
fn is_of_first(certified: &CertifiedKey) -> bool {
    let own = certified.key.public_key();
    let first = certified.cert.first().and_then(|first| parse(first).ok());
    matches!((own, first), (Some(own), Some(first)) if own.as_ref() == first.public_key().raw)
}

/// Verifies the certificate of a peer that rustls has refused: that it is one of `trusted`, or was signed by one of them.
///
/// # Errors
/// The reason why it is not valid.
pub fn verify(
    certificate: &[u8],
    trusted: &[CertificateDer<'static>],
    purpose: Purpose,
    now: UnixTime,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<(), Error> {
    let shown = parse(certificate)?;
    check(&shown, purpose, now)?;
    if trusted.iter().any(|one| one.as_ref() == certificate) {
        return Ok(());
    }
    let mut reason = CertificateError::UnknownIssuer;
    for issuer in trusted.iter().filter_map(|one| parse(one).ok()) {
        if issuer.subject().as_raw() != shown.issuer().as_raw() || !may_sign(&issuer) {
            continue;
        }
        match check(&issuer, purpose, now) {
            Err(Error::InvalidCertificate(why)) => reason = why,
            Err(error) => return Err(error),
            Ok(()) if is_signed(&shown, issuer.public_key(), algorithms) => return Ok(()),
            Ok(()) => reason = CertificateError::BadSignature,
        }
    }
    Err(reason.into())
}

/// Verifies that a peer has the key of its certificate. Certificates of version 1 are not taken apart by rustls.
///
/// # Errors
/// When the signature is not by that key.
pub fn verify_handshake(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
    algorithms: &WebPkiSupportedAlgorithms,
    is_tls13: bool,
) -> Result<HandshakeSignatureValid, Error> {
    let shown = parse(certificate).ok();
    let key = shown
        .as_ref()
        .filter(|shown| shown.version() == X509Version::V1)
        .map(|shown| shown.public_key());
    match (key, is_tls13) {
        (None, true) => {
            rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
        }
        (None, false) => {
            rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
        }
        (Some(key), true) => {
            let key = SubjectPublicKeyInfoDer::from(key.raw);
            rustls::crypto::verify_tls13_signature_with_raw_key(message, &key, signed, algorithms)
        }
        (Some(key), false) => {
            let scheme = algorithms.mapping.iter().find(|(s, _)| *s == signed.scheme);
            let candidates = scheme.map(|(_, all)| *all).unwrap_or_default();
            let is_good = candidates.iter().any(|algorithm| {
                is_of(
                    key.algorithm.algorithm.as_bytes(),
                    &algorithm.public_key_alg_id(),
                ) && verifies(key, message, signed.signature(), *algorithm)
            });
            match is_good {
                true => Ok(HandshakeSignatureValid::assertion()),
                false => Err(CertificateError::BadSignature.into()),
            }
        }
    }
}

fn parse(der: &[u8]) -> Result<X509Certificate<'_>, Error> {
    match X509Certificate::from_der(der) {
        Ok(([], parsed)) => Ok(parsed),
        _ => Err(CertificateError::BadEncoding.into()),
    }
}

/// Checks dates, purpose and extensions.
fn check(certificate: &X509Certificate<'_>, purpose: Purpose, now: UnixTime) -> Result<(), Error> {
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    if now < certificate.validity().not_before.timestamp() {
        return Err(CertificateError::NotValidYet.into());
    }
    if now > certificate.validity().not_after.timestamp() {
        return Err(CertificateError::Expired.into());
    }
    let extensions = certificate.extensions();
    let is_broken = |one: &X509Extension<'_>| one.parsed_extension().error().is_some();
    if extensions.iter().any(is_broken) {
        return Err(CertificateError::BadEncoding.into());
    }
    if extensions
        .iter()
        .any(|one| one.critical && !is_understood(one))
    {
        return Err(CertificateError::UnhandledCriticalExtension.into());
    }
    let usage = certificate
        .extended_key_usage()
        .map_err(|_| CertificateError::BadEncoding)?;
    let fits = usage.is_none_or(|usage| {
        let usage = usage.value;
        let named = match purpose {
            Purpose::Client => usage.client_auth,
            Purpose::Server => usage.server_auth,
        };
        usage.any || named
    });
    if !fits {
        return Err(CertificateError::InvalidPurpose.into());
    }
    Ok(())
}

/// Returns whether an extension is heeded here. Alternative names are where one is of a kind that Go reads.
fn is_understood(extension: &X509Extension<'_>) -> bool {
    match extension.parsed_extension() {
        ParsedExtension::BasicConstraints(_)
        | ParsedExtension::KeyUsage(_)
        | ParsedExtension::ExtendedKeyUsage(_) => true,
        ParsedExtension::SubjectAlternativeName(names) => names.general_names.iter().any(|name| {
            matches!(
                name,
                GeneralName::DNSName(_)
                    | GeneralName::RFC822Name(_)
                    | GeneralName::IPAddress(_)
                    | GeneralName::URI(_)
            )
        }),
        _ => false,
    }
}

/// Returns whether other certificates may be signed by this one, which names whom it may sign for in no way.
fn may_sign(issuer: &X509Certificate<'_>) -> bool {
    let is_old = issuer.version() == X509Version::V1 && issuer.extensions().is_empty();
    let is_ca = is_old || issuer.is_ca();
    let usage = issuer.key_usage();
    let may = usage.is_ok_and(|usage| usage.is_none_or(|usage| usage.value.key_cert_sign()));
    is_ca && may && matches!(issuer.name_constraints(), Ok(None))
}

/// Returns whether a certificate is signed by this key. One whose algorithm depends on its parameters counts as not signed.
fn is_signed(
    certificate: &X509Certificate<'_>,
    key: &SubjectPublicKeyInfo<'_>,
    algorithms: &WebPkiSupportedAlgorithms,
) -> bool {
    let by = &certificate.signature_algorithm;
    if *by != certificate.tbs_certificate.signature || by.algorithm == OID_PKCS1_RSASSAPSS {
        return false;
    }
    let signed = certificate.tbs_certificate.as_ref();
    let signature: &[u8] = &certificate.signature_value.data;
    algorithms.all.iter().any(|algorithm| {
        is_of(by.algorithm.as_bytes(), &algorithm.signature_alg_id())
            && is_of(
                key.algorithm.algorithm.as_bytes(),
                &algorithm.public_key_alg_id(),
            )
            && verifies(key, signed, signature, *algorithm)
    })
}

fn verifies(
    key: &SubjectPublicKeyInfo<'_>,
    message: &[u8],
    signature: &[u8],
    algorithm: &dyn rustls::pki_types::SignatureVerificationAlgorithm,
) -> bool {
    let key: &[u8] = &key.subject_public_key.data;
    algorithm.verify_signature(key, message, signature).is_ok()
}

/// Returns whether the identifier of an algorithm, `06 <length> <object identifier> …`, has this object identifier.
fn is_of(object: &[u8], identifier: &[u8]) -> bool {
    match identifier {
        [6, length, rest @ ..] => rest.get(..usize::from(*length)) == Some(object),
        _ => false,
    }
}

#[cfg(test)]
#[path = "certificates_tests.rs"]
pub(crate) mod tests;

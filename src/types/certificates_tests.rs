//! Certificates that Go takes: of openssl, and of rcgen.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject as _;

use super::*;

/// A CA of `openssl req -x509`, from 2026 to 2126.
pub(crate) const CA: &str = "-----BEGIN CERTIFICATE-----
MIIBcDCCARegAwIBAgIUbbkjgeroIjH4JGnFaWipV5RdI38wCgYIKoZIzj0EAwIw
DTELMAkGA1UEAwwCY2EwIBcNMjYxMTI3MDY1MTQ0WhgPMjEyNjExMDMwNjUxNDRa
MA0xCzAJBgNVBAMMAmNhMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEGzlZLoZg
AGSNlrEDPIwQQvkGpX7p0A+4Ln1kfLJhNiv8OlLnQoddquTTXnFDHZVhQnSSAjFx
ZQ3Dk7SW1Qm79aNTMFEwHQYDVR0OBBYEFDWWnSWFdh/s0+cIqHa6+AHKOD/MMB8G
A1UdIwQYMBaAFDWWnSWFdh/s0+cIqHa6+AHKOD/MMA8GA1UdEwEB/wQFMAMBAf8w
CgYIKoZIzj0EAwIDRwAwRAIgCcZDLI20mY0U7I2BA04TBcWPNaPSVKsNv9rCpd+Q
k/MCIAfHWpKWMHoK6H3IRhKRRsDx5HuAXkZzuzR9bkQAthkS
-----END CERTIFICATE-----
";
/// A certificate of version 1, which `openssl x509 -req` makes with it and without extensions, of user `admin` in
/// `system:masters`.
pub(crate) const OLD: &str = "-----BEGIN CERTIFICATE-----
MIIBHzCBxgIBBTAKBggqhkjOPQQDAjANMQswCQYDVQQDDAJjYTAgFw0yNjExMjcw
NjUxNDRaGA8yMTI2MTEwMzA2NTE0NFowKTEXMBUGA1UECgwOc3lzdGVtOm1hc3Rl
cnMxDjAMBgNVBAMMBWFkbWluMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEHWxA
jF3PuSDmylf9eMI+p98pvJvC4ld0762lU4vhjwcHebjZNhJz00fEZmEqmUlMgU8E
nDpgr7M26dkOUeJI6jAKBggqhkjOPQQDAgNIADBFAiAP/LruaWSm5qHJc9pzAPmz
NBYxXMOE2uxNJy3NaodIxgIhAPPT4idH3FIGa5GTrSOlHHKHHfUHFazmbr2Vt0Lr
AJKx
-----END CERTIFICATE-----
";
/// Its key.
pub(crate) const OLD_KEY: &str = "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgEMDmj6TPuWQAIZav
dRJds4ztMQz9+k/IWSkLcRuHfo6hRANCAAQdbECMXc+5IObKV/14wj6n3ym8m8Li
V3TvraVTi+GPBwd5uNk2EnPTR8RmYSqZSUyBTwScOmCvszbp2Q5R4kjq
-----END PRIVATE KEY-----
";

/// A moment in 2030, in seconds since 1970.
pub(crate) const MOMENT: u64 = 1_893_456_000;

pub(crate) fn moment() -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(MOMENT))
}

pub(crate) fn old_pair() -> CertifiedKey {
    let provider = rustls::crypto::ring::default_provider();
    certified_key(vec![der(OLD)], key_of(OLD_KEY), &provider).unwrap()
}

fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

fn key_of(pem: &str) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap()
}

fn judge(
    certificate: &CertificateDer<'static>,
    trusted: &[CertificateDer<'static>],
    purpose: Purpose,
    now: UnixTime,
) -> Result<(), CertificateError> {
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
    match verify(certificate, trusted, purpose, now, &algorithms) {
        Ok(()) => Ok(()),
        Err(Error::InvalidCertificate(why)) => Err(why),
        Err(other) => panic!("{other}"),
    }
}

/// A CA of this name, and a certificate that it has signed.
fn signed(name: &str, adjust: impl Fn(&mut CertificateParams)) -> [CertificateDer<'static>; 2] {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.distinguished_name.push(DnType::CommonName, name);
    let key = KeyPair::generate().unwrap();
    let ca = params.self_signed(&key).unwrap();
    let issuer = Issuer::new(params, key);
    let mut params = CertificateParams::new(vec!["api".to_owned()]).unwrap();
    adjust(&mut params);
    let leaf = params
        .signed_by(&KeyPair::generate().unwrap(), &issuer)
        .unwrap();
    [ca.der().clone(), leaf.der().clone()]
}

#[test]
fn a_certificate_of_version_1_is_joined_with_its_key_and_with_no_other() {
    let provider = rustls::crypto::ring::default_provider();
    let both = CertifiedKey::from_der(vec![der(OLD)], key_of(OLD_KEY), &provider);
    assert!(both.is_err(), "rustls takes it by now: this module may go");
    assert_eq!(old_pair().cert.len(), 1);
    let other = KeyPair::generate().unwrap().serialize_pem();
    assert!(certified_key(vec![der(OLD)], key_of(&other), &provider).is_err());
    assert!(certified_key(vec![der(CA)], key_of(&other), &provider).is_err());
}

#[test]
fn a_certificate_of_version_1_is_good_where_its_ca_is_trusted() {
    let (ca, old) = (der(CA), der(OLD));
    let client =
        |trusted: &[CertificateDer<'static>]| judge(&old, trusted, Purpose::Client, moment());
    assert_eq!(client(std::slice::from_ref(&ca)), Ok(()));
    assert_eq!(
        client(std::slice::from_ref(&old)),
        Ok(()),
        "trusted by itself"
    );
    assert_eq!(client(&[]), Err(CertificateError::UnknownIssuer));
    let [stranger, _] = signed("another", |_| ());
    assert_eq!(client(&[stranger]), Err(CertificateError::UnknownIssuer));
    // Of the same name, with another key.
    let [other, _] = signed("ca", |_| ());
    assert_eq!(
        client(std::slice::from_ref(&other)),
        Err(CertificateError::BadSignature),
        "a CA of that name with another key"
    );
    assert_eq!(client(&[other, ca.clone()]), Ok(()));
    for (seconds, why) in [
        (1, CertificateError::NotValidYet),
        (MOMENT * 3, CertificateError::Expired),
    ] {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let found = judge(&old, std::slice::from_ref(&ca), Purpose::Client, now);
        assert_eq!(found, Err(why));
    }
    // One bit of the signature.
    let mut bytes = old.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    let forged = CertificateDer::from(bytes);
    let found = judge(&forged, &[ca], Purpose::Client, moment());
    assert_eq!(found, Err(CertificateError::BadSignature));
}

#[test]
fn what_says_that_it_is_a_ca_is_good_where_it_or_its_issuer_is_trusted() {
    let as_ca = |params: &mut CertificateParams| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    };
    let [ca, leaf] = signed("one", as_ca);
    let server =
        |trusted: &[CertificateDer<'static>]| judge(&leaf, trusted, Purpose::Server, moment());
    assert_eq!(server(&[ca]), Ok(()));
    assert_eq!(server(std::slice::from_ref(&leaf)), Ok(()));
    // Of the same name, with another key.
    let [namesake, _] = signed("one", as_ca);
    assert_eq!(server(&[namesake]), Err(CertificateError::BadSignature));
}

#[test]
fn a_critical_extension_that_is_not_heeded_is_refused() {
    // A name of a kind of its own, which Go does not read; an extension that nobody knows; not even DER.
    let names: &[u8] = b"\x30\x0b\xa0\x09\x06\x02\x2a\x03\xa0\x03\x0c\x01x";
    for (oid, content, why) in [
        (
            &[2_u64, 5, 29, 17],
            names,
            CertificateError::UnhandledCriticalExtension,
        ),
        (
            &[1, 2, 3, 4],
            b"\x05\x00".as_slice(),
            CertificateError::UnhandledCriticalExtension,
        ),
        (
            &[2, 5, 29, 37],
            b"\x30\x7f".as_slice(),
            CertificateError::BadEncoding,
        ),
    ] {
        let [ca, leaf] = signed("one", |params| {
            let mut extension = rcgen::CustomExtension::from_oid_content(oid, content.to_vec());
            extension.set_criticality(true);
            params.subject_alt_names.clear();
            params.custom_extensions = vec![extension];
        });
        let found = judge(&leaf, &[ca], Purpose::Client, moment());
        assert_eq!(found, Err(why), "{oid:?}");
    }
}

#[test]
fn purposes_and_issuers_count() {
    let for_clients = |params: &mut CertificateParams| {
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    };
    let [ca, leaf] = signed("one", for_clients);
    let trusted = [ca, leaf.clone()];
    let found = |purpose| judge(&leaf, &trusted, purpose, moment());
    assert_eq!(found(Purpose::Client), Ok(()));
    assert_eq!(
        found(Purpose::Server),
        Err(CertificateError::InvalidPurpose)
    );
    // What is no CA signs nothing.
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["no-ca".to_owned()]).unwrap();
    let no_ca = params.self_signed(&key).unwrap().der().clone();
    let issuer = Issuer::new(params, key);
    let params = CertificateParams::new(vec!["api".to_owned()]).unwrap();
    let leaf = params
        .signed_by(&KeyPair::generate().unwrap(), &issuer)
        .unwrap();
    let found = judge(leaf.der(), &[no_ca], Purpose::Server, moment());
    assert_eq!(found, Err(CertificateError::UnknownIssuer));
}

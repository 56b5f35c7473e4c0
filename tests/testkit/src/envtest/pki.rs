//! The certificates of a test cluster: one authority for servers and clients alike, what it signs, and the key of
//! the service account issuer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

/// A certificate with its key, in PEM.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate.
    pub cert_pem: String,
    /// Its key, PKCS#8.
    pub key_pem: String,
}

impl Identity {
    /// Writes `<stem>.crt` and `<stem>.key`.
    pub(super) fn write(&self, dir: &Path, stem: &str) -> (PathBuf, PathBuf) {
        let (cert, key) = (
            dir.join(format!("{stem}.crt")),
            dir.join(format!("{stem}.key")),
        );
        super::write(&cert, &self.cert_pem);
        super::write(&key, &self.key_pem);
        (cert, key)
    }
}

/// A certificate authority.
#[derive(Debug)]
pub struct Authority {
    own: Identity,
    der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
}

/// A day, what certificates of the tests are valid for when nothing else is asked.
pub const DAY: SignedDuration = SignedDuration::from_hours(24);

impl Authority {
    /// A new one. Another than the cluster's, it is the wrong authority.
    ///
    /// # Panics
    /// When keys cannot be made.
    pub fn new(common_name: &str) -> Self {
        let mut params = params(common_name, None, DAY * 365);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let key = key();
        let certificate = params.self_signed(&key).expect("sign the authority");
        Self {
            own: Identity {
                cert_pem: certificate.pem(),
                key_pem: key.serialize_pem(),
            },
            der: certificate.der().to_vec(),
            issuer: Issuer::new(params, key),
        }
    }

    /// The one that [`Authority::write`] wrote there.
    pub(super) fn read(dir: &Path) -> Self {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read_to_string(&path)
                .unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
        };
        let own = Identity {
            cert_pem: read("ca.crt"),
            key_pem: read("ca.key"),
        };
        let key = KeyPair::from_pem(&own.key_pem).expect("read the authority's key");
        let der = CertificateDer::from_pem_slice(own.cert_pem.as_bytes());
        let issuer = Issuer::from_ca_cert_pem(&own.cert_pem, key);
        Self {
            issuer: issuer.expect("read the authority's certificate"),
            der: der.expect("the authority's certificate is PEM").to_vec(),
            own,
        }
    }

    /// Writes `ca.crt` and `ca.key`.
    pub(super) fn write(&self, dir: &Path) {
        self.own.write(dir, "ca");
    }

    /// Its certificate in PEM.
    pub fn pem(&self) -> String {
        self.own.cert_pem.clone()
    }

    pub(super) fn der(&self) -> Vec<u8> {
        self.der.clone()
    }

    /// A serving certificate for 127.0.0.1 and localhost.
    ///
    /// # Panics
    /// When keys cannot be made.
    pub fn server(&self, common_name: &str) -> Identity {
        let mut params = params(common_name, None, DAY * 30);
        let names = [
            "127.0.0.1",
            "::1",
            "localhost",
            "kubernetes",
            "kubernetes.default.svc",
        ];
        params.subject_alt_names = CertificateParams::new(names.map(str::to_owned))
            .expect("subject alternative names")
            .subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    /// A client certificate that expires after `expires_in` from now; a negative one has expired.
    ///
    /// # Panics
    /// When keys cannot be made.
    pub fn client(
        &self,
        common_name: &str,
        organization: &str,
        expires_in: SignedDuration,
    ) -> Identity {
        let mut params = params(common_name, Some(organization), expires_in);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    /// Signs a PKCS#10 request as it stands, for a client or for a server; the certificate in PEM.
    ///
    /// # Panics
    /// When the request cannot be read: a test's agent asked for nonsense.
    pub fn sign_request(
        &self,
        request_pem: &str,
        usage: ExtendedKeyUsagePurpose,
        expires_in: SignedDuration,
    ) -> String {
        let mut request = CertificateSigningRequestParams::from_pem(request_pem)
            .expect("read the certificate signing request");
        set_validity(&mut request.params, expires_in);
        request.params.is_ca = IsCa::NoCa;
        request.params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        request.params.extended_key_usages = vec![usage];
        let signed = request.signed_by(&self.issuer);
        signed.expect("sign the certificate request").pem()
    }

    fn sign(&self, mut params: CertificateParams) -> Identity {
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        let key = key();
        let certificate = params.signed_by(&key, &self.issuer);
        Identity {
            cert_pem: certificate.expect("sign a certificate").pem(),
            key_pem: key.serialize_pem(),
        }
    }
}

/// The key pair of the service account issuer: private key and public key in PEM.
pub(super) fn service_account_key() -> (String, String) {
    let key = key();
    (key.serialize_pem(), key.public_key_pem())
}

fn key() -> KeyPair {
    KeyPair::generate().expect("generate a key")
}

fn params(
    common_name: &str,
    organization: Option<&str>,
    expires_in: SignedDuration,
) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    name.push(DnType::CommonName, common_name);
    params.distinguished_name = name;
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, expires_in);
    params
}

/// From an hour before now, or before the end where that is past, until `expires_in` after now.
fn set_validity(params: &mut CertificateParams, expires_in: SignedDuration) {
    let now = Timestamp::now();
    let until = now + expires_in;
    let from = now.min(until) - SignedDuration::from_hours(1);
    let date = |at: Timestamp| {
        let since_epoch = u64::try_from(at.as_second()).expect("after 1970");
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(since_epoch)
    };
    params.not_before = date(from);
    params.not_after = date(until);
}

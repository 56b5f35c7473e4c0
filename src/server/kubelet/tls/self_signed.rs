//! A certificate that the node signs itself: `kubelet.crt` and `kubelet.key`, as upstream's.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType,
};

use super::{Certificate, Serving, TlsError, wall_seconds};
use crate::apiserver::csr::write_whole;
use crate::core::credentials::EARLIEST;
use crate::server::kubelet::Shared;
use crate::types::{blocking, causes};

const DAY: i64 = 86_400;
/// Validity of the certificate, in seconds.
const LIFE: i64 = 365 * DAY;
/// Time before its expiry at which another one is made, in seconds.
const MARGIN: i64 = 7 * DAY;

/// Paths and content of the certificate.
pub(in super::super) struct SelfSigned {
    certificate: PathBuf,
    key: PathBuf,
    node: String,
    addresses: Vec<IpAddr>,
    now: i64,
}

impl SelfSigned {
    pub(super) fn new(node: &Shared) -> Self {
        let directory = &node.config.cert_dir;
        Self {
            certificate: directory.join("kubelet.crt"),
            key: directory.join("kubelet.key"),
            node: node.config.node_name.clone(),
            addresses: node.addresses.find().unwrap_or_default(),
            now: wall_seconds(node),
        }
    }

    /// The certificate that is there, or a new one. One that cannot be written is used all the same where
    /// `unkept`: a full disk does not keep the agent from starting. Blocking.
    pub(super) fn ensure(self, unkept: bool) -> Result<Certificate, TlsError> {
        if let Some(certificate) = self.existing()? {
            // A clock that was never set says nothing about what was made before.
            let is_early = certificate.from > self.now && self.now >= EARLIEST;
            let is_good = certificate.until - MARGIN > self.now && !is_early;
            let fits = !self.made(&certificate) || certificate.is_for(&[], &self.addresses);
            if is_good && fits {
                return Ok(certificate);
            }
            let why = if is_good {
                "the node has another address"
            } else {
                "it ends or was made with a wrong clock"
            };
            tracing::info!(path = %self.certificate.display(), why, "replacing the self-signed serving certificate");
        }
        self.make(unkept)
    }

    /// Returns whether the agent made `certificate`, rather than somebody who put it there.
    fn made(&self, certificate: &Certificate) -> bool {
        let name = certificate.self_signed.as_deref().unwrap_or_default();
        let time = name
            .strip_prefix(&self.node)
            .and_then(|n| n.strip_prefix('@'));
        time.is_some_and(|time| time.parse::<i64>().is_ok())
    }

    /// Returns the existing certificate, if both files exist and are valid. Invalid files are replaced; unreadable
    /// files are an error.
    fn existing(&self) -> Result<Option<Certificate>, TlsError> {
        let read = |path: &PathBuf| match std::fs::read(path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(TlsError::Read {
                path: path.clone(),
                setting: "--cert-dir",
                source,
            }),
        };
        let (Some(certificate), Some(key)) = (read(&self.certificate)?, read(&self.key)?) else {
            return Ok(None);
        };
        match Certificate::parse(&certificate, &key) {
            Ok(certificate) => Ok(Some(certificate)),
            Err(problem) => {
                tracing::warn!(
                    path = %self.certificate.display(),
                    problem,
                    "cannot use the serving certificate, making another one"
                );
                Ok(None)
            }
        }
    }

    fn make(&self, unkept: bool) -> Result<Certificate, TlsError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(TlsError::Make)?;
        let mut params = CertificateParams::default();
        let mut subject = DistinguishedName::new();
        subject.push(DnType::CommonName, format!("{}@{}", self.node, self.now));
        params.distinguished_name = subject;
        // The type is that of a crate that only rcgen knows.
        let date = |seconds| {
            let at = jiff::Timestamp::from_second(seconds).unwrap_or_default();
            let day = at.to_zoned(jiff::tz::TimeZone::UTC).date();
            let (month, day_of_month) = (day.month().unsigned_abs(), day.day().unsigned_abs());
            rcgen::date_time_ymd(day.year().into(), month, day_of_month)
        };
        params.not_before = date(self.now - DAY);
        params.not_after = date(self.now + LIFE);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let name = match self.node.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => SanType::DnsName(self.node.as_str().try_into().map_err(TlsError::Make)?),
        };
        params.subject_alt_names = vec![name];
        let addresses = self.addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names.extend(addresses);
        let certificate = params.self_signed(&key).map_err(TlsError::Make)?.pem();
        let key_text = zeroize::Zeroizing::new(key.serialize_pem());
        // The key first: without its certificate it is replaced at the next start.
        for (path, text) in [
            (&self.key, key_text.as_str()),
            (&self.certificate, &certificate),
        ] {
            match write_whole(path, text.as_bytes()) {
                Ok(()) => {}
                Err(error) if unkept => {
                    tracing::warn!(
                        path = %path.display(),
                        %error,
                        "cannot store the serving certificate, the next start makes another one"
                    );
                    break;
                }
                Err(source) => {
                    return Err(TlsError::Write {
                        path: path.clone(),
                        source,
                    });
                }
            }
        }
        tracing::info!(path = %self.certificate.display(), "made a self-signed serving certificate");
        Certificate::parse(certificate.as_bytes(), key_text.as_bytes()).map_err(|problem| {
            TlsError::Unusable {
                path: self.certificate.clone(),
                problem,
            }
        })
    }
}

/// Makes another before the certificate ends, and takes one over that somebody else put there.
pub(super) async fn watch(node: &Shared, serving: &Serving, look: Duration) {
    let mut told = false;
    loop {
        tokio::time::sleep(look).await;
        let again = SelfSigned::new(node);
        // Without one, any is better than none.
        let unkept = serving.current().is_none();
        let Ok(found) = blocking::run(move || again.ensure(unkept)).await else {
            return;
        };
        match found {
            Ok(certificate) => {
                told = false;
                let same = serving
                    .current()
                    .is_some_and(|current| current.key.cert == certificate.key.cert);
                if !same {
                    tracing::info!(until = certificate.until, "using a new serving certificate");
                    serving.set(certificate);
                }
            }
            Err(error) if !told => {
                told = true;
                tracing::warn!(
                    error = causes(&error),
                    "cannot check the serving certificate, keeping the current one"
                );
            }
            Err(_) => {}
        }
    }
}

//! Users that show a certificate: the CAs, read again when their file changes, and who a certificate is of.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::User;
use crate::types::certificates::{self, Purpose};
use crate::types::{Clock, Pace, Stamp, blocking, causes};

/// Reason why the CAs of the API's clients cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientCaError {
    /// The file cannot be read.
    #[error("read {} of authentication.x509.clientCAFile (--client-ca-file)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// There is nothing in it that can be used.
    #[error("use {} of authentication.x509.clientCAFile (--client-ca-file): {problem}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Description of the error.
        problem: String,
    },
}

/// The CAs of the API's clients. No certificate is good before the file could be read.
pub(super) struct ClientCas {
    path: PathBuf,
    verifier: ArcSwapOption<Verifier>,
    pace: Pace,
}

struct Verifier {
    seen: Vec<u8>,
    verifier: Arc<dyn ClientCertVerifier>,
    cas: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    /// Verifies what a client shows: certificates that lead to a CA, or one that Go takes by itself.
    fn verify(
        &self,
        first: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let verified = self.verifier.verify_client_cert(first, others, now);
        let algorithms = &self.provider.signature_verification_algorithms;
        match verified {
            Ok(_) => Ok(()),
            Err(refused) => {
                certificates::verify(first, &self.cas, Purpose::Client, now, algorithms)
                    // That of the chain says more.
                    .map_err(|_| refused)
            }
        }
    }
}

impl ClientCas {
    /// Reads the file. If it cannot be used, logs why; [`Self::watch`] reads it again.
    pub(super) async fn open(path: PathBuf, clock: &dyn Clock) -> Self {
        let cas = Self {
            path,
            verifier: ArcSwapOption::empty(),
            pace: Pace::default(),
        };
        cas.look(clock).await;
        cas
    }

    /// Takes changes of the file over for ever.
    pub(super) async fn watch(&self, look: Duration, clock: &dyn Clock) {
        loop {
            tokio::time::sleep(look).await;
            self.look(clock).await;
        }
    }

    /// Reads the file and uses what has changed in it. Those before stay in use if it cannot be read.
    async fn look(&self, clock: &dyn Clock) {
        let (path, before) = (self.path.clone(), self.verifier.load_full());
        let seen = move || read(&path, before.as_ref().map(|before| before.seen.as_slice()));
        // Only a runtime that is shutting down cancels blocking work.
        let Ok(found) = blocking::run(seen).await else {
            return;
        };
        match found {
            Ok(None) => self.pace.over("file"),
            Ok(Some(verifier)) => {
                self.pace.over("file");
                tracing::info!(path = %self.path.display(), "using the CAs of clients");
                self.verifier.store(Some(Arc::new(verifier)));
            }
            Err(error) => {
                let error = causes(&error);
                if self.pace.is_due("file", &error, clock.now()) {
                    let until_then = match self.verifier.load().is_some() {
                        true => "those before stay in use",
                        false => "until then no client certificate is accepted",
                    };
                    tracing::warn!(
                        error,
                        until_then,
                        "cannot use the CAs of clients; put the file there, it is read again every 10 s"
                    );
                }
            }
        }
    }

    /// Returns the user of these certificates. `Ok(None)`: the certificate is good and names nobody.
    ///
    /// # Errors
    /// The reason why the certificate is not valid.
    pub(super) fn user(
        &self,
        chain: &[CertificateDer<'static>],
        now: Stamp,
    ) -> Result<Option<User>, String> {
        let Some((first, others)) = chain.split_first() else {
            return Ok(None);
        };
        let seconds = u64::try_from(now.wall_ms.div_euclid(1000)).unwrap_or(0);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let verifier = self.verifier.load();
        let Some(verifier) = verifier.as_ref() else {
            return Err(format!(
                "the CAs in {} are not known yet",
                self.path.display()
            ));
        };
        verifier
            .verify(first, others, now)
            .map_err(|error| error.to_string())?;
        user_of(first)
    }
}

/// Reads the file, unless it is as `before`. Blocking.
fn read(path: &Path, before: Option<&[u8]>) -> Result<Option<Verifier>, ClientCaError> {
    let seen = std::fs::read(path).map_err(|source| ClientCaError::Read {
        path: path.to_owned(),
        source,
    })?;
    if before == Some(seen.as_slice()) {
        return Ok(None);
    }
    let unusable = |problem: String| ClientCaError::Unusable {
        path: path.to_owned(),
        problem,
    };
    let (mut roots, mut cas) = (RootCertStore::empty(), Vec::new());
    for certificate in CertificateDer::pem_slice_iter(&seen) {
        let certificate = certificate
            .map_err(|error| unusable(format!("a certificate does not parse: {error}")))?;
        cas.push(certificate.clone());
        roots
            .add(certificate)
            .map_err(|error| unusable(format!("a certificate is no CA: {error}")))?;
    }
    if roots.is_empty() {
        return Err(unusable("there is no certificate in it".to_owned()));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let verifier = builder
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    Ok(Some(Verifier {
        seen,
        verifier,
        cas,
        provider,
    }))
}

/// Upstream's `CommonNameUserConversion`.
fn user_of(certificate: &CertificateDer<'static>) -> Result<Option<User>, String> {
    let (_, parsed) = X509Certificate::from_der(certificate)
        .map_err(|error| format!("the certificate does not parse: {error}"))?;
    let subject = parsed.subject();
    let text = |value: &x509_parser::x509::AttributeTypeAndValue<'_>| {
        value.as_str().map(str::to_owned).ok()
    };
    let Some(name) = subject.iter_common_name().filter_map(text).last() else {
        return Ok(None);
    };
    if name.is_empty() {
        return Ok(None);
    }
    let digest: String = Sha256::digest(certificate)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    Ok(Some(User {
        name,
        uid: String::new(),
        groups: subject.iter_organization().filter_map(text).collect(),
        extra: [(
            "authentication.kubernetes.io/credential-id".to_owned(),
            vec![format!("X509SHA256={digest}")],
        )]
        .into(),
    }))
}

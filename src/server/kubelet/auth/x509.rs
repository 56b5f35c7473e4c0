//! Users that show a certificate: the CAs, read again when their file changes, and who a certificate is of.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::User;
use crate::types::{Stamp, blocking, causes};

/// Why the CAs of the API's clients cannot be used.
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
        /// What is wrong.
        problem: String,
    },
    /// The agent is ending.
    #[error("the agent is ending")]
    Interrupted,
}

/// The CAs of the API's clients.
pub(super) struct ClientCas {
    path: PathBuf,
    verifier: ArcSwap<Verifier>,
}

struct Verifier {
    seen: Vec<u8>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl ClientCas {
    /// Reads the file.
    pub(super) async fn open(path: PathBuf) -> Result<Self, ClientCaError> {
        let at = path.clone();
        let verifier = blocking::run(move || read(&at, None))
            .await
            .map_err(|_| ClientCaError::Interrupted)??;
        let Some(verifier) = verifier else {
            return Err(ClientCaError::Interrupted);
        };
        Ok(Self {
            path,
            verifier: ArcSwap::from_pointee(verifier),
        })
    }

    /// Takes changes of the file over for ever.
    pub(super) async fn watch(&self, look: Duration) {
        let mut told = String::new();
        loop {
            tokio::time::sleep(look).await;
            let (path, before) = (self.path.clone(), self.verifier.load_full());
            match blocking::run(move || read(&path, Some(&before.seen))).await {
                Ok(Ok(None)) => told.clear(),
                Ok(Ok(Some(verifier))) => {
                    told.clear();
                    tracing::info!(path = %self.path.display(), "the CAs of clients changed, using the new ones");
                    self.verifier.store(Arc::new(verifier));
                }
                Ok(Err(error)) => {
                    let text = causes(&error);
                    if text != told {
                        tracing::warn!(
                            error = text,
                            "cannot use the CAs of clients that have changed, going on with those before"
                        );
                        told = text;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Who shows these certificates. `Ok(None)`: the certificate is good and names nobody.
    ///
    /// # Errors
    /// Why it is not good.
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
        verifier
            .verifier
            .verify_client_cert(first, others, now)
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
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&seen) {
        let certificate = certificate
            .map_err(|error| unusable(format!("a certificate does not parse: {error}")))?;
        roots
            .add(certificate)
            .map_err(|error| unusable(format!("a certificate is no CA: {error}")))?;
    }
    if roots.is_empty() {
        return Err(unusable("there is no certificate in it".to_owned()));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    Ok(Some(Verifier { seen, verifier }))
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

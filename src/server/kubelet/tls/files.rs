//! A certificate that somebody else puts into files.

use std::path::PathBuf;
use std::time::Duration;

use super::{Certificate, Serving, TlsError, read_file};
use crate::types::blocking;

/// The two files and what was in them when they were last looked at.
pub(in super::super) struct Files {
    certificate: PathBuf,
    key: PathBuf,
    seen: (Vec<u8>, zeroize::Zeroizing<Vec<u8>>),
}

impl Files {
    pub(super) fn new(certificate: PathBuf, key: PathBuf) -> Self {
        Self {
            certificate,
            key,
            seen: Default::default(),
        }
    }

    /// Reads the certificate at start. Blocking.
    pub(super) fn first(mut self) -> Result<(Self, Certificate), TlsError> {
        match self.look()? {
            Some(certificate) => Ok((self, certificate)),
            None => Err(TlsError::Unusable {
                path: self.certificate,
                problem: "the file is empty".to_owned(),
            }),
        }
    }

    /// The certificate, if the files have changed. Blocking.
    pub(super) fn look(&mut self) -> Result<Option<Certificate>, TlsError> {
        let certificate = read_file(&self.certificate, "tlsCertFile (--tls-cert-file)")?;
        let key = read_file(&self.key, "tlsPrivateKeyFile (--tls-private-key-file)")?;
        let now = (certificate, zeroize::Zeroizing::new(key));
        if now == self.seen {
            return Ok(None);
        }
        // Told once: what cannot be used is looked at again when it changes.
        self.seen = now;
        match Certificate::parse(&self.seen.0, &self.seen.1) {
            Ok(certificate) => Ok(Some(certificate)),
            Err(problem) => Err(TlsError::Unusable {
                path: self.certificate.clone(),
                problem,
            }),
        }
    }
}

/// Takes changes over for ever.
pub(super) async fn watch(mut files: Files, serving: &Serving, look: Duration) {
    let mut told = String::new();
    loop {
        tokio::time::sleep(look).await;
        let looked = blocking::run(move || {
            let found = files.look();
            (files, found)
        });
        let Ok((back, found)) = looked.await else {
            return;
        };
        files = back;
        match found {
            Ok(None) => {}
            Ok(Some(certificate)) => {
                told.clear();
                tracing::info!(
                    path = %files.certificate.display(),
                    until = certificate.until,
                    "serving certificate changed, using the new one"
                );
                serving.set(certificate);
            }
            Err(error) => {
                let text = error_text(&error);
                if text != told {
                    tracing::warn!(
                        error = text,
                        "cannot use the serving certificate that has changed, going on with the one before"
                    );
                    told = text;
                }
            }
        }
    }
}

fn error_text(error: &TlsError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

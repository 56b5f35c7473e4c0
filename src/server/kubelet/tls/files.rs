//! A certificate that somebody else puts into files.

use std::path::PathBuf;
use std::time::Duration;

use super::{Certificate, Serving, TlsError, read_file};
use crate::types::{Clock, Pace, blocking, causes};

/// Certificate and key as they were read.
#[derive(PartialEq, Eq)]
struct Seen(Vec<u8>, zeroize::Zeroizing<Vec<u8>>);

/// The two files.
pub(in super::super) struct Files {
    certificate: PathBuf,
    key: PathBuf,
    /// Their content when they were last read; `None` before it could be used.
    seen: Option<Seen>,
    /// The reason why they cannot be used.
    problem: Option<String>,
    pace: Pace,
}

impl Files {
    pub(super) fn new(certificate: PathBuf, key: PathBuf) -> Self {
        Self {
            certificate,
            key,
            seen: None,
            problem: None,
            pace: Pace::default(),
        }
    }

    /// Reads the files and uses what has changed in them. The certificate before stays in use if they cannot be used.
    ///
    /// # Errors
    /// When the agent is ending.
    pub(super) async fn look(
        mut self,
        serving: &Serving,
        clock: &dyn Clock,
    ) -> Result<Self, TlsError> {
        let looked = blocking::run(move || {
            let found = self.read();
            (self, found)
        });
        let (mut files, found) = looked.await.map_err(|_| TlsError::Interrupted)?;
        match found {
            Ok(None) => files.problem = None,
            Ok(Some(certificate)) => {
                files.problem = None;
                tracing::info!(
                    path = %files.certificate.display(),
                    until = certificate.until,
                    "using this serving certificate"
                );
                serving.set(certificate);
            }
            Err(error) => files.problem = Some(causes(&error)),
        }
        files.warn(serving, clock);
        Ok(files)
    }

    /// Logs what is wrong: when it is new, and again from time to time.
    fn warn(&self, serving: &Serving, clock: &dyn Clock) {
        let Some(error) = &self.problem else {
            return self.pace.over("files");
        };
        if self.pace.is_due("files", error, clock.now()) {
            let until_then = match serving.current().is_some() {
                true => "the one before stays in use",
                false => "until then, connections to the kubelet's API fail",
            };
            tracing::warn!(
                error,
                until_then,
                "cannot use the serving certificate; put both files there, they are read again every 10 s"
            );
        }
    }

    /// The certificate, if the files have changed. Blocking.
    pub(super) fn read(&mut self) -> Result<Option<Certificate>, TlsError> {
        let certificate = read_file(&self.certificate, "tlsCertFile (--tls-cert-file)")?;
        let key = read_file(&self.key, "tlsPrivateKeyFile (--tls-private-key-file)")?;
        let now = Seen(certificate, zeroize::Zeroizing::new(key));
        if self.seen.as_ref() == Some(&now) {
            return Ok(None);
        }
        let parsed = Certificate::parse(&now.0, &now.1);
        // What cannot be used is parsed again, so that it stays a problem.
        self.seen = parsed.is_ok().then_some(now);
        match parsed {
            Ok(certificate) => Ok(Some(certificate)),
            Err(problem) => Err(TlsError::Unusable {
                path: self.certificate.clone(),
                problem,
            }),
        }
    }
}

/// Takes changes over for ever.
pub(super) async fn watch(mut files: Files, serving: &Serving, look: Duration, clock: &dyn Clock) {
    loop {
        tokio::time::sleep(look).await;
        match files.look(serving, clock).await {
            Ok(back) => files = back,
            Err(_) => return,
        }
    }
}

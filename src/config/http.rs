//! The http source: a URL that serves a Pod or a PodList.
//!
//! GET every `check_frequency` and on reload; a body that did not change is not parsed again. An answer
//! that is not a manifest keeps the pods of the URL as they are. Upstream's `sourceURL`; unlike there, an empty body
//! is an error and not an empty list, and a redirect to another origin is not followed.
//!
//! **Invariant:** requests, and the headers of the configuration with them, go to one origin: scheme, host and port of the URL.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::redirect::Policy;
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::adoption::Adoptions;
use super::manifest::{self, MAX_MANIFEST_BYTES, ManifestError, StaticOrigin};
use super::{HttpSettings, Reading, SourceError, SourceSet, SourcedPod};
use crate::types::{Clock, PodSource};

/// There is nothing to delete behind a URL.
const EMPTY: &str = "the answer is empty; serve a v1 Pod or PodList, and a PodList without items where no pods are wanted";
/// Most redirects that are followed for one answer, as Go's client does.
const MAX_REDIRECTS: usize = 10;

/// Reason for which a redirect is not followed. Shows origins, since paths and queries may hold secrets.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum RedirectError {
    #[error(
        "redirects to {to}, which is not {from}; configure the URL that serves the manifests, redirects may change its path only"
    )]
    OtherOrigin { from: String, to: String },
    #[error("redirects more than {max} times", max = MAX_REDIRECTS)]
    TooMany,
}

pub(super) struct HttpSource {
    client: reqwest::Client,
    url: Url,
    location: String,
    timeout: Duration,
    check_frequency: Duration,
    node_name: String,
    clock: Arc<dyn Clock>,
    adoptions: Arc<Adoptions>,
    last: Option<([u8; 32], SourceSet)>,
}

impl HttpSource {
    pub(super) fn new(
        settings: HttpSettings,
        node_name: &str,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, SourceError> {
        let bad_url = |why: String| SourceError::Url {
            url: settings.url.clone(),
            why,
        };
        let url: Url = settings.url.parse().map_err(|e| bad_url(format!("{e}")))?;
        if !["http", "https"].contains(&url.scheme()) {
            return Err(bad_url(format!("scheme {} is not supported", url.scheme())));
        }
        // An error means that a provider is installed already, which serves as well.
        if rustls::crypto::ring::default_provider()
            .install_default()
            .is_err()
        {
            debug!("a TLS provider is installed already");
        }
        let client = reqwest::Client::builder()
            .timeout(settings.timeout)
            .user_agent(concat!("holdfast/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers(&settings.headers)?)
            .redirect(Policy::custom(|attempt| {
                match check_redirect(attempt.previous(), attempt.url()) {
                    Ok(()) => attempt.follow(),
                    Err(refusal) => attempt.error(refusal),
                }
            }))
            .build()
            .map_err(SourceError::Client)?;
        Ok(Self {
            client,
            location: without_password(&url),
            url,
            timeout: settings.timeout,
            check_frequency: settings.check_frequency.max(Duration::from_millis(10)),
            node_name: node_name.to_owned(),
            clock,
            last: None,
            adoptions: Arc::default(),
        })
    }

    /// Gives pods the UIDs under which they run.
    pub(super) fn adopting(mut self, adoptions: Arc<Adoptions>) -> Self {
        self.adoptions = adoptions;
        self
    }

    /// Sends the full set at once and after each change, until cancelled or until there is no receiver.
    pub(super) async fn run(
        mut self,
        sets: mpsc::Sender<SourceSet>,
        mut reload: watch::Receiver<u64>,
        cancel: CancellationToken,
    ) {
        let mut sent: Option<SourceSet> = None;
        loop {
            // Dropping a request half-way loses nothing.
            let set = tokio::select! {
                () = cancel.cancelled() => return,
                set = self.read() => set,
            };
            if sent.as_ref() != Some(&set) {
                sent = Some(set.clone());
                tokio::select! {
                    () = cancel.cancelled() => return,
                    answer = sets.send(set) => if answer.is_err() { return },
                }
            }
            let next = Instant::now() + self.check_frequency;
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep_until(next) => {}
                changed = reload.changed() => {
                    if changed.is_err() {
                        // Nobody can ask for a reload any more.
                        tokio::select! {
                            () = cancel.cancelled() => return,
                            () = tokio::time::sleep_until(next) => {}
                        }
                    }
                }
            }
        }
    }

    /// Asks the URL once.
    pub(super) async fn read(&mut self) -> SourceSet {
        let body = match self.get().await {
            Ok(body) => body,
            Err(error) => return self.set(Reading::Unreadable(error)),
        };
        let digest: [u8; 32] = Sha256::digest(&body).into();
        if let Some((last, set)) = &self.last
            && *last == digest
        {
            return set.clone();
        }
        let set = self.parse(&body);
        self.last = Some((digest, set.clone()));
        set
    }

    fn parse(&self, body: &[u8]) -> SourceSet {
        if looks_like_html(body) {
            return self.set(Reading::Unreadable(
                "serves HTML, not a v1 Pod or PodList; check the address, a login page or a proxy may be in between"
                    .to_owned(),
            ));
        }
        let origin = StaticOrigin {
            source: PodSource::Http,
            location: &self.location,
            node_name: &self.node_name,
        };
        let mut set = self.set(Reading::Complete);
        match manifest::read(body, &origin, &self.clock.now().rfc3339()) {
            Ok(pods) => {
                let sourced = pods.into_iter().map(|mut pod| {
                    self.adoptions.apply(&mut pod);
                    SourcedPod {
                        origin: self.location.clone(),
                        pod: Arc::new(pod),
                    }
                });
                set.pods.extend(sourced);
            }
            Err(error) => {
                let message = match error {
                    ManifestError::Empty => EMPTY.to_owned(),
                    other => other.to_string(),
                };
                set.broken.insert(self.location.clone(), message);
            }
        }
        set
    }

    fn set(&self, reading: Reading) -> SourceSet {
        SourceSet {
            source: PodSource::Http,
            location: self.location.clone(),
            reading,
            broken: BTreeMap::new(),
            pods: Vec::new(),
            set_back: false,
        }
    }

    async fn get(&self) -> Result<Vec<u8>, String> {
        let request = self.client.get(self.url.clone());
        let mut response = request.send().await.map_err(|e| self.failure(e))?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!(
                "answers {status}; it has to answer 200 with a v1 Pod or PodList"
            ));
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.failure(e))? {
            body.extend_from_slice(&chunk);
            let size = u64::try_from(body.len()).unwrap_or(u64::MAX);
            if size > MAX_MANIFEST_BYTES {
                return Err(ManifestError::TooLarge {
                    size: MAX_MANIFEST_BYTES + 1,
                }
                .to_string());
            }
        }
        Ok(body)
    }

    fn failure(&self, error: reqwest::Error) -> String {
        if error.is_timeout() {
            return format!(
                "did not answer within {}; check the server and the network",
                humantime::format_duration(self.timeout)
            );
        }
        let error = error.without_url();
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        text
    }
}

/// Checks that a redirect stays with the origin of the first request. `previous`: what was requested so far, oldest first.
///
/// # Errors
/// When it leads elsewhere, to the same host without TLS for example, or there were too many.
fn check_redirect(previous: &[Url], next: &Url) -> Result<(), RedirectError> {
    if previous.len() > MAX_REDIRECTS {
        return Err(RedirectError::TooMany);
    }
    let to = next.origin();
    match previous.first().map(Url::origin) {
        Some(from) if from != to => Err(RedirectError::OtherOrigin {
            from: from.ascii_serialization(),
            to: to.ascii_serialization(),
        }),
        Some(_) | None => Ok(()),
    }
}

fn headers(wanted: &[(String, String)]) -> Result<HeaderMap, SourceError> {
    let mut headers = HeaderMap::new();
    for (name, value) in wanted {
        let bad = |why: String| SourceError::Header {
            name: name.clone(),
            why,
        };
        let key: HeaderName = name.parse().map_err(|e| bad(format!("{e}")))?;
        let value = HeaderValue::from_bytes(value.as_bytes());
        let mut value = value.map_err(|e| bad(format!("{e}")))?;
        value.set_sensitive(true);
        headers.append(key, value);
    }
    Ok(headers)
}

/// The URL as it may be stored and logged.
fn without_password(url: &Url) -> String {
    let mut shown = url.clone();
    if shown.password().is_some() && shown.set_password(Some("***")).is_err() {
        return shown.host_str().unwrap_or_default().to_owned();
    }
    shown.to_string()
}

fn looks_like_html(body: &[u8]) -> bool {
    let start = body.trim_ascii_start();
    let start: Vec<u8> = start.iter().take(15).map(u8::to_ascii_lowercase).collect();
    start.starts_with(b"<!doctype") || start.starts_with(b"<html") || start.starts_with(b"<")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_may_change_the_path_only() {
        let url = |text: &str| -> Url { text.parse().unwrap() };
        let from = url("https://pods.example/list?token=secret");
        let check = |to: &str| check_redirect(std::slice::from_ref(&from), &url(to));
        for fine in [
            "https://pods.example/v2/list",
            "https://pods.example:443/list",
            "https://PODS.example/",
        ] {
            assert_eq!(check(fine), Ok(()), "{fine}");
        }
        for (elsewhere, shown) in [
            (
                "http://pods.example/list?token=secret",
                "http://pods.example",
            ),
            ("https://pods.example:8443/", "https://pods.example:8443"),
            ("https://user:secret@evil.example/", "https://evil.example"),
            (
                "https://pods.example.evil.example/",
                "https://pods.example.evil.example",
            ),
            ("file:///etc/shadow", "null"),
        ] {
            let refusal = check(elsewhere).unwrap_err();
            let wanted = format!("redirects to {shown}, which is not https://pods.example;");
            let text = refusal.to_string();
            assert!(text.starts_with(&wanted), "{text}");
            assert!(!text.contains("secret"), "{text}");
        }
        // A chain that comes to another origin at its end.
        let chain = [from.clone(), url("https://pods.example/2")];
        let refusal = check_redirect(&chain, &url("http://pods.example/3"));
        assert!(matches!(refusal, Err(RedirectError::OtherOrigin { .. })));

        let followed = vec![from.clone(); MAX_REDIRECTS];
        assert_eq!(check_redirect(&followed, &from), Ok(()));
        let followed = vec![from.clone(); MAX_REDIRECTS + 1];
        assert_eq!(
            check_redirect(&followed, &from),
            Err(RedirectError::TooMany)
        );
    }
}

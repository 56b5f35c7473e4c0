//! Layer 4: makes sure that the image of a container is there; upstream's `imageManager`.
//!
//! Comes in: a container, the runtime's image service. Goes out: the reference to create the container
//! from, or the reason it has to wait. Pulls of one image by several pods at once are one pull; how many
//! run beside each other is configured.
//!
//! **Invariant:** a pull that failed is on record, with its back-off, before the error is returned, so the
//! back-off goes on after a restart. Its key is pod UID and image.

mod credentials;
mod keyring;
mod pulls;
mod reference;

use std::future::Future;
use std::sync::Arc;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, Pod, Secret};

pub use credentials::{CredentialError, CredentialProviders, CredentialSettings};
pub use keyring::{Credentials, Keyring, KeyringError};
pub use pulls::ImageConfig;
pub use reference::{InvalidImageName, normalize};

use crate::core::backoff;
use crate::core::state::{BackoffRecord, ImageRecord, Transaction};
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::store::{CommitError, Store};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::metrics::Metrics;
use crate::types::{Clock, PodExt, PodUid, Stamp};
use pulls::{Pulls, Wanted};

const COMMIT_TRIES: u32 = 8;

/// The part of the runtime that keeps images.
pub trait ImageService: Clone + Send + Sync + 'static {
    /// An image by name; `None` = not there.
    fn image_status(
        &self,
        image: &str,
    ) -> impl Future<Output = Result<Option<v1::Image>, CriError>> + Send;

    /// Pulls an image and returns its reference. Dropping the future cancels the pull.
    fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox: Option<v1::PodSandboxConfig>,
    ) -> impl Future<Output = Result<String, CriError>> + Send;
}

impl ImageService for CriClient {
    async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError> {
        CriClient::image_status(self, image).await
    }

    async fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox: Option<v1::PodSandboxConfig>,
    ) -> Result<String, CriError> {
        CriClient::pull_image(self, image, auth, sandbox).await
    }
}

/// Why a container waits for its image; the values are upstream's waiting reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageErrorReason {
    /// The pull failed.
    ErrImagePull,
    /// A pull failed a short while ago.
    ImagePullBackOff,
    /// `imagePullPolicy: Never`, and it is not there.
    ErrImageNeverPull,
    /// The name is none.
    InvalidImageName,
    /// The runtime cannot say whether it is there.
    ImageInspectError,
    /// The runtime cannot reach the registry.
    RegistryUnavailable,
    /// The runtime does not trust its signature.
    SignatureValidationFailed,
}

impl ImageErrorReason {
    /// `state.waiting.reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ErrImagePull => "ErrImagePull",
            Self::ImagePullBackOff => "ImagePullBackOff",
            Self::ErrImageNeverPull => "ErrImageNeverPull",
            Self::InvalidImageName => "InvalidImageName",
            Self::ImageInspectError => "ImageInspectError",
            Self::RegistryUnavailable => "RegistryUnavailable",
            Self::SignatureValidationFailed => "SignatureValidationFailed",
        }
    }
}

/// A container has to wait for its image.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}", reason.as_str())]
pub struct ImageError {
    /// `state.waiting.reason`.
    pub reason: ImageErrorReason,
    /// `state.waiting.message`.
    pub message: String,
    /// When the back-off ends, if one is in force.
    pub retry_at: Option<Stamp>,
    /// The record of this could not be committed.
    #[source]
    pub store: Option<CommitError>,
}

impl ImageError {
    fn new(reason: ImageErrorReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            retry_at: None,
            store: None,
        }
    }
}

/// `imagePullPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

/// The policy of a container; where it says none, the tag `latest` means Always as in the API server's
/// defaults.
fn pull_policy(container: &Container, image: &str) -> PullPolicy {
    match container.image_pull_policy.as_deref() {
        Some("Always") => PullPolicy::Always,
        Some("Never") => PullPolicy::Never,
        Some("IfNotPresent") => PullPolicy::IfNotPresent,
        _ if reference::tag_of(image) == Some("latest") => PullPolicy::Always,
        _ => PullPolicy::IfNotPresent,
    }
}

/// What a pull may need besides the image.
#[derive(Clone, Copy, Debug, Default)]
pub struct PullInputs<'a> {
    /// The sandbox the image is for.
    pub sandbox: Option<&'a v1::PodSandboxConfig>,
    /// The pod's pull secrets, as far as they were found.
    pub secrets: &'a PullSecrets,
}

/// A pod's `imagePullSecrets`.
#[derive(Clone, Default)]
pub struct PullSecrets {
    /// Those that exist.
    pub found: Vec<Arc<Secret>>,
    /// Names of those that could not be had.
    pub missing: Vec<String>,
}

impl std::fmt::Debug for PullSecrets {
    // Their content is secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PullSecrets")
            .field("found", &self.found.len())
            .field("missing", &self.missing)
            .finish()
    }
}

static NO_SECRETS: PullSecrets = PullSecrets {
    found: Vec::new(),
    missing: Vec::new(),
};

impl Default for &PullSecrets {
    fn default() -> Self {
        &NO_SECRETS
    }
}

/// Pulls images. Shared by all workers.
pub struct ImageManager {
    pulls: Pulls,
    providers: Option<Arc<CredentialProviders>>,
    pulled: Option<Arc<dyn Fn() + Send + Sync>>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

/// Events about one container.
struct Reporter<'a> {
    pod: &'a Pod,
    container: &'a Container,
    recorder: &'a dyn EventRecorder,
}

impl Reporter<'_> {
    fn normal(&self, reason: &str, message: String) {
        self.record(EventType::Normal, reason, message);
    }

    fn warning(&self, reason: &str, message: String) {
        self.record(EventType::Warning, reason, message);
    }

    fn record(&self, kind: EventType, reason: &str, message: String) {
        let event = Event::pod(kind, self.pod, reason, message).container(&self.container.name);
        self.recorder.record(event);
    }
}

impl ImageManager {
    /// A manager without pulls in flight.
    pub fn new(config: ImageConfig, clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        Self {
            pulls: Pulls::new(config),
            providers: None,
            pulled: None,
            clock,
            metrics,
        }
    }

    /// Asks these programs for credentials before each pull.
    #[must_use]
    pub fn with_credential_providers(mut self, providers: Arc<CredentialProviders>) -> Self {
        self.providers = Some(providers);
        self
    }

    /// Calls `tell` after each pull; it must not wait.
    #[must_use]
    pub fn telling(mut self, tell: Arc<dyn Fn() + Send + Sync>) -> Self {
        self.pulled = Some(tell);
        self
    }

    /// Makes sure the image is there; upstream's `EnsureImageExists`. Returns what to create the container
    /// from. When dropped, the pull goes on as long as another container waits for it.
    ///
    /// # Errors
    /// See [`ImageErrorReason`]. A failed pull has been recorded, unless [`ImageError::store`] says why not.
    pub async fn ensure<S: ImageService>(
        &self,
        pod: &Pod,
        container: &Container,
        inputs: PullInputs<'_>,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<String, ImageError> {
        let report = Reporter {
            pod,
            container,
            recorder,
        };
        let named = container.image.as_deref().unwrap_or_default();
        let image = normalize(named).map_err(|error| {
            report.warning(
                "InspectFailed",
                format!("Failed to apply default image tag \"{named}\": {error}"),
            );
            ImageError::new(ImageErrorReason::InvalidImageName, error.to_string())
        })?;
        let policy = pull_policy(container, &image);
        if policy != PullPolicy::Always {
            let found = service.image_status(&image).await.map_err(|error| {
                let message = format!("Failed to inspect image \"{image}\": {error}");
                report.warning("InspectFailed", message.clone());
                ImageError::new(ImageErrorReason::ImageInspectError, message)
            })?;
            match found {
                Some(found) => {
                    let text = format!("Container image \"{image}\" already present on machine");
                    report.normal("Pulled", text);
                    self.used(store, &image).await?;
                    return Ok(found.id);
                }
                None if policy == PullPolicy::Never => {
                    let text = format!(
                        "Container image \"{image}\" is not present with pull policy of Never"
                    );
                    report.warning("ErrImageNeverPull", text.clone());
                    return Err(ImageError::new(ImageErrorReason::ErrImageNeverPull, text));
                }
                None => {}
            }
        }
        self.heed_backoff(pod, &image, store, &report)?;
        let credentials = self.credentials(&image, inputs.secrets, &report).await;
        let want = Wanted {
            image,
            credentials,
            sandbox: inputs.sandbox.cloned(),
        };
        self.pull(want, service, store, &report).await
    }

    /// What the pull secrets and the programs have for an image, in this order; upstream's
    /// `MakeDockerKeyring`. A secret that cannot be used is told and left out.
    async fn credentials(
        &self,
        image: &str,
        secrets: &PullSecrets,
        report: &Reporter<'_>,
    ) -> Vec<Credentials> {
        if !secrets.missing.is_empty() {
            report.warning(
                "FailedToRetrieveImagePullSecret",
                format!(
                    "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                    secrets.missing.join(", ")
                ),
            );
        }
        let mut keyring = Keyring::default();
        for secret in &secrets.found {
            if let Err(error) = keyring.add_secret(secret) {
                let name = secret.metadata.name.as_deref().unwrap_or_default();
                report.warning(
                    "FailedToRetrieveImagePullSecret",
                    format!("Unable to use image pull secret {name}: {error}"),
                );
            }
        }
        let repository = keyring::repository(image);
        let mut found = keyring.lookup(&repository);
        if let Some(providers) = &self.providers {
            found.extend(providers.lookup(&repository).await);
        }
        found
    }

    /// Drops the back-offs of a pod that is gone.
    ///
    /// # Errors
    /// When they cannot be recorded as dropped.
    pub async fn forget_pod(&self, store: &Store, uid: &PodUid) -> Result<(), CommitError> {
        let seen = store.snapshot();
        let mut transaction = Transaction::new();
        for (image, record) in seen.with_prefix::<ImageRecord>("") {
            if record.backoffs.contains_key(uid) {
                let mut record = record.clone();
                record.backoffs.remove(uid);
                transaction = transaction
                    .expect::<ImageRecord>(&seen, image)
                    .put(image, record);
            }
        }
        if transaction.is_empty() {
            return Ok(());
        }
        store.commit(transaction).await.map(drop)
    }

    fn heed_backoff(
        &self,
        pod: &Pod,
        image: &str,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), ImageError> {
        let seen = store.snapshot();
        let record = seen
            .record::<ImageRecord>(image)
            .and_then(|r| r.backoffs.get(&pod.uid()).copied());
        let Some(until) = backoff::image::waiting(record, self.clock.now()) else {
            return Ok(());
        };
        let text = format!("Back-off pulling image \"{image}\"");
        report.normal("BackOff", text.clone());
        let mut error = ImageError::new(ImageErrorReason::ImagePullBackOff, text);
        error.retry_at = Some(until);
        Err(error)
    }

    async fn pull<S: ImageService>(
        &self,
        want: Wanted,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<String, ImageError> {
        let image = want.image.clone();
        let image = image.as_str();
        report.normal("Pulling", format!("Pulling image \"{image}\""));
        let begun = tokio::time::Instant::now();
        match self.pulls.pull(service, want).await {
            Ok(pulled) => {
                self.metrics
                    .image_pull_duration
                    .observe(pulled.took.as_secs_f64());
                report.normal(
                    "Pulled",
                    format!(
                        "Successfully pulled image \"{image}\" in {:.3}s ({:.3}s including waiting). Image size: {} bytes.",
                        pulled.took.as_secs_f64(),
                        begun.elapsed().as_secs_f64(),
                        pulled.size
                    ),
                );
                let uid = report.pod.uid();
                self.change(store, image, |record| {
                    record.pulled_ref = Some(pulled.reference.clone());
                    record.backoffs.remove(&uid);
                })
                .await?;
                if let Some(tell) = &self.pulled {
                    tell();
                }
                Ok(pulled.reference)
            }
            Err(error) => {
                let (reason, message) = classify(image, &error);
                report.warning(
                    "Failed",
                    format!("Failed to pull image \"{image}\": {message}"),
                );
                Err(self
                    .pull_failed(store, image, report.pod, reason, message)
                    .await)
            }
        }
    }

    /// Records the back-off, then gives the error.
    async fn pull_failed(
        &self,
        store: &Store,
        image: &str,
        pod: &Pod,
        reason: ImageErrorReason,
        message: String,
    ) -> ImageError {
        let (uid, now) = (pod.uid(), self.clock.now());
        let next = |record: &ImageRecord| -> BackoffRecord {
            backoff::image::failed(record.backoffs.get(&uid).copied(), now, backoff::image::MAX)
        };
        let committed = self
            .change(store, image, |record| {
                record.backoffs.insert(uid.clone(), next(record));
            })
            .await;
        let mut error = ImageError::new(reason, message);
        match committed {
            Ok(record) => {
                error.retry_at = backoff::image::waiting(record.backoffs.get(&uid).copied(), now);
            }
            Err(failed) => {
                error
                    .message
                    .push_str("; the back-off could not be recorded");
                error.store = failed.store;
            }
        }
        error
    }

    async fn used(&self, store: &Store, image: &str) -> Result<(), ImageError> {
        self.change(store, image, |_| {}).await.map(drop)
    }

    /// Changes an image's record and marks it used; decides again when it changed meanwhile.
    async fn change(
        &self,
        store: &Store,
        image: &str,
        edit: impl Fn(&mut ImageRecord),
    ) -> Result<ImageRecord, ImageError> {
        let now = self.clock.now();
        let mut tries = 0;
        loop {
            let seen = store.snapshot();
            let mut record = seen
                .record::<ImageRecord>(image)
                .cloned()
                .unwrap_or_else(|| ImageRecord {
                    pulled_ref: None,
                    backoffs: std::collections::BTreeMap::new(),
                    first_seen: now,
                    last_used: now,
                });
            record.last_used = now;
            edit(&mut record);
            let transaction = Transaction::new()
                .expect::<ImageRecord>(&seen, image)
                .put(image, record.clone());
            match store.commit(transaction).await {
                Ok(_) => return Ok(record),
                Err(CommitError::Stale { .. }) if tries < COMMIT_TRIES => tries += 1,
                Err(source) => {
                    let text = format!("record image {image}: {source}");
                    let mut error = ImageError::new(ImageErrorReason::ErrImagePull, text);
                    error.store = Some(source);
                    return Err(error);
                }
            }
        }
    }
}

/// Reason and message of a pull that failed; upstream's `evalCRIPullErr`.
fn classify(image: &str, error: &CriError) -> (ImageErrorReason, String) {
    let text = error.message.as_str();
    let detail = |marker: &str| {
        text.split_once(marker)
            .map(|(_, rest)| rest.to_owned())
            .unwrap_or_default()
    };
    if text.contains("RegistryUnavailable") {
        let detail = detail("RegistryUnavailable");
        (
            ImageErrorReason::RegistryUnavailable,
            format!("image pull failed for {image} because the registry is unavailable{detail}"),
        )
    } else if text.contains("SignatureValidationFailed") {
        let detail = detail("SignatureValidationFailed");
        (
            ImageErrorReason::SignatureValidationFailed,
            format!(
                "image pull failed for {image} because the signature validation failed{detail}"
            ),
        )
    } else {
        (ImageErrorReason::ErrImagePull, text.to_owned())
    }
}

#[cfg(test)]
mod tests;

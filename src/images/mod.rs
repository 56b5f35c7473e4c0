//! Layer 4: makes sure that the image of a container is there; upstream's `imageManager`.
//!
//! Comes in: a container, the runtime's image service. Goes out: the reference to create the container
//! from, or the reason it has to wait. Pulls of one image by several pods at once are one pull; how many
//! run beside each other is configured.
//!
//! An image that is there is handed to a pod only if the pod may have it: `records` remember by which pull
//! secrets images came.
//!
//! **Invariant:** a pull that failed is on record, with its back-off, before the error is returned, so the
//! back-off goes on after a restart. Its key is pod UID and image.

mod credentials;
mod error;
mod inputs;
mod keyring;
mod prune;
mod pulls;
mod records;
mod reference;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, ImageVolumeSource, Pod};

pub use credentials::{CredentialError, CredentialProviders, CredentialSettings};
pub use error::{ImageError, ImageErrorReason};
pub use inputs::{PullInputs, PullSecrets};
pub use keyring::{Credentials, Keyring, KeyringError, SecretSource};
pub use prune::{prune, run_pruning};
pub use pulls::ImageConfig;
pub use records::{PULL_ERRORS, VerificationPolicy};
pub use reference::{InvalidImageName, normalize};

use crate::core::backoff;
use crate::core::state::{BackoffRecord, ImageRecord, State, Transaction};
use crate::kubeletconfig::format_duration;
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::kuberuntime::security::ImageUser;
use crate::store::{CommitError, Store};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::metrics::{ImageSizeLabel, Metrics};
use crate::types::{Clock, PodExt, PodUid, Stamp};
use error::classify;
use pulls::{PullResult, Pulls, Wanted};
use records::{Permission, PullRecords};

const COMMIT_TRIES: u32 = 8;
/// How often a pull that takes long is told to go on.
const STILL_PULLING: Duration = Duration::from_secs(60);

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

/// `imagePullPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

/// The policy as written; where there is none, the tag `latest` means Always as in the API server's defaults.
fn pull_policy(written: Option<&str>, image: &str) -> PullPolicy {
    match written {
        Some("Always") => PullPolicy::Always,
        Some("Never") => PullPolicy::Never,
        Some("IfNotPresent") => PullPolicy::IfNotPresent,
        _ if reference::tag_of(image) == Some("latest") => PullPolicy::Always,
        _ => PullPolicy::IfNotPresent,
    }
}

/// Pulls images. Shared by all workers.
pub struct ImageManager {
    pulls: Pulls,
    records: PullRecords,
    providers: Option<Arc<CredentialProviders>>,
    pulled: Option<Arc<dyn Fn() + Send + Sync>>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

/// An image that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// What to create the container from.
    pub reference: String,
    /// The user that it is made for, where the runtime told while it was looked for.
    pub user: Option<ImageUser>,
}

/// An image as a pod asks for it.
#[derive(Clone, Copy)]
struct Asked<'a> {
    image: &'a str,
    policy: Option<&'a str>,
}

/// Events about one container, or about the pod.
struct Reporter<'a> {
    pod: &'a Pod,
    container: Option<&'a str>,
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
        let event = Event::pod(kind, self.pod, reason, message);
        self.recorder.record(match self.container {
            Some(name) => event.container(name),
            None => event,
        });
    }
}

impl ImageManager {
    /// A manager without pulls in flight.
    pub fn new(config: ImageConfig, clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        Self {
            pulls: Pulls::new(config),
            records: PullRecords::default(),
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

    /// Which images that are there need credentials; otherwise those that were pulled by the agent.
    #[must_use]
    pub fn verifying(mut self, policy: VerificationPolicy) -> Self {
        self.records = PullRecords::new(policy);
        self
    }

    /// Calls `tell` after each pull; it must not wait.
    #[must_use]
    pub fn telling(mut self, tell: Arc<dyn Fn() + Send + Sync>) -> Self {
        self.pulled = Some(tell);
        self
    }

    /// Makes sure the image is there; upstream's `EnsureImageExists`. When dropped, the pull goes on as long as
    /// another container waits for it.
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
    ) -> Result<Present, ImageError> {
        let asked = Asked {
            image: container.image.as_deref().unwrap_or_default(),
            policy: container.image_pull_policy.as_deref(),
        };
        let report = Reporter {
            pod,
            container: Some(&container.name),
            recorder,
        };
        self.ensure_asked(asked, inputs, service, store, &report)
            .await
    }

    /// As [`Self::ensure`], for a volume of kind `image`; its events are about the pod.
    ///
    /// # Errors
    /// As [`Self::ensure`].
    pub async fn ensure_volume<S: ImageService>(
        &self,
        pod: &Pod,
        volume: &ImageVolumeSource,
        inputs: PullInputs<'_>,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<String, ImageError> {
        let asked = Asked {
            image: volume.reference.as_deref().unwrap_or_default(),
            policy: volume.pull_policy.as_deref(),
        };
        let report = Reporter {
            pod,
            container: None,
            recorder,
        };
        self.ensure_asked(asked, inputs, service, store, &report)
            .await
            .map(|present| present.reference)
    }

    async fn ensure_asked<S: ImageService>(
        &self,
        asked: Asked<'_>,
        inputs: PullInputs<'_>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<Present, ImageError> {
        let named = asked.image;
        let image = normalize(named).map_err(|error| {
            let message = format!("Failed to apply default image tag \"{named}\": {error}");
            report.warning("InspectFailed", message.clone());
            ImageError::new(ImageErrorReason::InvalidImageName, message)
        })?;
        self.records
            .recover(service, store, self.clock.now())
            .await
            .map_err(|error| unrecorded(&image, error))?;
        let policy = pull_policy(asked.policy, &image);
        let mut credentials = None;
        if policy != PullPolicy::Always {
            let found = service.image_status(&image).await.map_err(|error| {
                let message = format!("Failed to inspect image \"{image}\": {error}");
                report.warning("InspectFailed", message.clone());
                ImageError::new(ImageErrorReason::ImageInspectError, message)
            })?;
            if let Some(found) = found {
                let seen = store.snapshot();
                let granted = match self.records.permission(&seen, &image, &found.id) {
                    Permission::Granted => Some(None),
                    Permission::MustPull => None,
                    Permission::ByCredentials(record) => {
                        let shown = self.credentials(&image, inputs.secrets, report).await;
                        let granted = record.grants(&image, &shown);
                        credentials = Some(shown);
                        granted
                    }
                };
                if let Some(changed) = granted {
                    report.normal(
                        "Pulled",
                        format!(
                            "Container image \"{named}\" already present on machine and can be accessed by the pod"
                        ),
                    );
                    self.change(store, &image, |seen, _, transaction| match &changed {
                        Some(record) => {
                            records::record_changed(seen, transaction, record, self.clock.now())
                        }
                        None => transaction,
                    })
                    .await?;
                    return Ok(Present {
                        user: Some(ImageUser::of(&found)),
                        reference: found.id,
                    });
                }
                tracing::info!(
                    image,
                    "the image is there, but the pod must show that it may have it"
                );
            }
            // Whether it is there is not for those to know who may not have it.
            if policy == PullPolicy::Never {
                let text =
                    format!("Container image \"{named}\" is not present with pull policy of Never");
                report.warning("ErrImageNeverPull", text.clone());
                return Err(ImageError::new(ImageErrorReason::ErrImageNeverPull, text));
            }
        }
        self.heed_backoff(&image, store, report)?;
        let credentials = match credentials {
            Some(credentials) => credentials,
            None => self.credentials(&image, inputs.secrets, report).await,
        };
        let want = Wanted {
            image,
            credentials,
            sandbox: inputs.sandbox.cloned(),
        };
        self.pull(want, service, store, report).await
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
        let mut transaction = records::forget_pod(&seen, Transaction::new(), uid);
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
        image: &str,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), ImageError> {
        let (seen, uid) = (store.snapshot(), report.pod.uid());
        let record = seen
            .record::<ImageRecord>(image)
            .and_then(|r| r.backoffs.get(&uid).copied());
        let Some(until) = backoff::image::waiting(record, self.clock.now()) else {
            return Ok(());
        };
        let mut text = format!("Back-off pulling image \"{image}\"");
        report.normal("BackOff", text.clone());
        if let Some(last) = records::last_error(&seen, &uid, image) {
            text = format!("{text}: {last}");
        }
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
    ) -> Result<Present, ImageError> {
        let (image, credentials) = (want.image.clone(), want.credentials.clone());
        let image = image.as_str();
        let begun = tokio::time::Instant::now();
        let under_way = self
            .records
            .begin(store, image, self.clock.now())
            .await
            .map_err(|error| unrecorded(image, error))?;
        report.normal("Pulling", format!("Pulling image \"{image}\""));
        let uid = report.pod.uid();
        match self.pull_telling(want, service, report).await {
            Ok(pulled) => {
                let label = ImageSizeLabel {
                    image_size_in_bytes: size_step(pulled.size).to_owned(),
                };
                self.metrics
                    .image_pull_duration
                    .get_or_create(&label)
                    .observe(pulled.took.as_secs_f64());
                report.normal(
                    "Pulled",
                    format!(
                        "Successfully pulled image \"{image}\" in {} ({} including waiting). Image size: {} bytes.",
                        milliseconds(pulled.took),
                        milliseconds(begun.elapsed()),
                        pulled.size
                    ),
                );
                let used = pulled.used.and_then(|index| credentials.get(index));
                self.change(store, image, |seen, record, transaction| {
                    record.pulled_ref = Some(pulled.reference.clone());
                    record.backoffs.remove(&uid);
                    let now = self.clock.now();
                    let t = records::record_pulled(seen, transaction, image, &pulled.id, used, now);
                    let t = records::record_error(seen, t, &uid, image, None, now);
                    under_way.end(seen, t)
                })
                .await?;
                if let Some(tell) = &self.pulled {
                    tell();
                }
                Ok(Present {
                    reference: pulled.reference,
                    user: None,
                })
            }
            Err(error) => {
                let (reason, message) = classify(image, &error);
                report.warning(
                    "Failed",
                    format!("Failed to pull image \"{image}\": {}", error.message),
                );
                let now = self.clock.now();
                let told = format!("{}: {message}", reason.as_str());
                let next = |record: &ImageRecord| -> BackoffRecord {
                    let last = record.backoffs.get(&uid).copied();
                    backoff::image::failed(last, now, backoff::image::MAX)
                };
                let committed = self
                    .change(store, image, |seen, record, transaction| {
                        record.backoffs.insert(uid.clone(), next(record));
                        let t =
                            records::record_error(seen, transaction, &uid, image, Some(&told), now);
                        under_way.end(seen, t)
                    })
                    .await;
                Err(backing_off(reason, message, committed, &uid, now))
            }
        }
    }

    /// Pulls, and tells each minute that it still does.
    async fn pull_telling<S: ImageService>(
        &self,
        want: Wanted,
        service: &S,
        report: &Reporter<'_>,
    ) -> PullResult {
        let image = want.image.clone();
        let begun = tokio::time::Instant::now();
        let mut minutes = tokio::time::interval_at(begun + STILL_PULLING, STILL_PULLING);
        let mut pull = std::pin::pin!(self.pulls.pull(service, want));
        loop {
            tokio::select! {
                biased;
                result = &mut pull => return result,
                _ = minutes.tick() => {
                    let took = format_duration(Duration::from_secs(begun.elapsed().as_secs()));
                    tracing::info!(image, pod = %report.pod.uid(), took, "still pulling");
                    report.normal("Pulling", format!("Still pulling image \"{image}\" after {took}"));
                }
            }
        }
    }

    /// Changes an image's record, and what `edit` adds to it, and marks it used; decides again when something
    /// changed meanwhile.
    async fn change(
        &self,
        store: &Store,
        image: &str,
        edit: impl Fn(&State, &mut ImageRecord, Transaction) -> Transaction,
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
            let transaction = edit(&seen, &mut record, Transaction::new())
                .expect::<ImageRecord>(&seen, image)
                .put(image, record.clone());
            match store.commit(transaction).await {
                Ok(_) => return Ok(record),
                Err(CommitError::Stale { .. }) if tries < COMMIT_TRIES => tries += 1,
                Err(source) => return Err(unrecorded(image, source)),
            }
        }
    }
}

/// The error of a pull whose failure was, or could not be, recorded.
fn backing_off(
    reason: ImageErrorReason,
    message: String,
    committed: Result<ImageRecord, ImageError>,
    uid: &PodUid,
    now: Stamp,
) -> ImageError {
    let mut error = ImageError::new(reason, message);
    match committed {
        Ok(record) => {
            error.retry_at = backoff::image::waiting(record.backoffs.get(uid).copied(), now);
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

/// Upstream's step of an image's size; `N/A` when the runtime does not say.
fn size_step(bytes: u64) -> &'static str {
    const MIB: u64 = 1 << 20;
    const STEPS: [(u64, &str); 12] = [
        (10, "0-10MB"),
        (100, "10MB-100MB"),
        (500, "100MB-500MB"),
        (1 << 10, "500MB-1GB"),
        (5 << 10, "1GB-5GB"),
        (10 << 10, "5GB-10GB"),
        (20 << 10, "10GB-20GB"),
        (30 << 10, "20GB-30GB"),
        (40 << 10, "30GB-40GB"),
        (60 << 10, "40GB-60GB"),
        (100 << 10, "60GB-100GB"),
        (u64::MAX / MIB, "GT100GB"),
    ];
    if bytes == 0 {
        return "N/A";
    }
    let step = STEPS.iter().find(|(most, _)| bytes / MIB < *most);
    step.map_or("GT100GB", |(_, name)| name)
}

fn unrecorded(image: &str, source: CommitError) -> ImageError {
    let text = format!("record image {image}: {source}");
    let mut error = ImageError::new(ImageErrorReason::ErrImagePull, text);
    error.store = Some(source);
    error
}

/// A duration as events tell it, in whole milliseconds.
fn milliseconds(duration: Duration) -> String {
    let whole = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    format_duration(Duration::from_millis(whole))
}

#[cfg(test)]
mod tests;

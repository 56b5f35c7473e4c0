//! From the request of a container for an image to the image: may the pod have the one that is there, or does it have to be
//! pulled. Upstream: `EnsureImageExists`.

use std::sync::Arc;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, ImageVolumeSource, Pod};

use super::records::{self, Permission};
use super::repair::Wish;
use super::{
    Credentials, ImageError, ImageErrorReason, ImageManager, ImageService, Keyring, Present,
    PullInputs, PullSecrets, Reporter, files, keyring, normalize, reference, unrecorded,
};
use crate::core::images::Standing;
use crate::kubeletconfig::PullFallback;
use crate::kuberuntime::security::ImageUser;
use crate::store::Store;
use crate::types::blocking;
use crate::types::events::EventRecorder;
use crate::types::metrics::EnsureImageLabel;

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

/// An image as a pod asks for it.
#[derive(Clone, Copy)]
struct Asked<'a> {
    image: &'a str,
    policy: Option<&'a str>,
}

impl ImageManager {
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
            pod: Some(pod),
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
            pod: Some(pod),
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
        let mut policy = pull_policy(asked.policy, &image);
        let mut credentials = None;
        if self.needs_look(store, &image) {
            let shown = self.credentials(&image, inputs.secrets, report).await;
            let wish = Wish {
                image: &image,
                credentials: &shown,
                sandbox: inputs.sandbox,
                may_pull: policy != PullPolicy::Never,
            };
            let standing = self
                .make_usable(wish, service, store, report)
                .await
                .map_err(|error| unrecorded(&image, error))?;
            if standing == Standing::Owed && policy == PullPolicy::Never {
                // It was there, and the agent has removed it.
                policy = PullPolicy::IfNotPresent;
            }
            credentials = Some(shown);
        }
        let mut present = None;
        if policy != PullPolicy::Always {
            let mut found = match inspect(&image, service, report).await {
                Ok(found) => found,
                Err(error) => {
                    self.count_ensured(policy, None, None);
                    return Err(error);
                }
            };
            if found.is_none()
                && self
                    .bring_from_archive(&image, service, store, report)
                    .await
                    .map_err(|error| unrecorded(&image, error))?
            {
                found = inspect(&image, service, report).await?;
            }
            present = Some(found.is_some());
            if let Some(found) = found {
                let seen = store.snapshot();
                let granted = match self.records.permission(&seen, &image, &found.id) {
                    Permission::Granted => Some(None),
                    Permission::MustPull => None,
                    Permission::ByCredentials(record)
                        if self.is_account_known(&image, &record, report).await =>
                    {
                        Some(None)
                    }
                    Permission::ByCredentials(record) => {
                        let shown = match credentials.take() {
                            Some(shown) => shown,
                            None => self.credentials(&image, inputs.secrets, report).await,
                        };
                        let granted = record.grants(&image, &shown);
                        credentials = Some(shown);
                        granted
                    }
                };
                if let Some(changed) = granted {
                    self.count_ensured(policy, present, Some(false));
                    report.normal(
                        "Pulled",
                        format!(
                            "Container image \"{named}\" already present on machine and can be accessed by the pod"
                        ),
                    );
                    let now = self.clock.now();
                    self.change(store, &image, |seen, _, transaction| {
                        let transaction = files::noticed(seen, transaction, &image, &found.id, now);
                        match &changed {
                            Some(record) => records::record_changed(seen, transaction, record, now),
                            None => transaction,
                        }
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
                self.count_ensured(policy, present, Some(false));
                let text =
                    format!("Container image \"{named}\" is not present with pull policy of Never");
                report.warning("ErrImageNeverPull", text.clone());
                return Err(ImageError::new(ImageErrorReason::ErrImageNeverPull, text));
            }
        }
        self.count_ensured(policy, present, Some(true));
        let may_fall_back = policy == PullPolicy::Always && self.fallback == PullFallback::Offline;
        let inputs = PullInputs {
            ran_with: inputs.ran_with.filter(|_| may_fall_back),
            ..inputs
        };
        self.pull_or_fall_back(image, credentials, inputs, (service, store), report)
            .await
    }

    /// Counts a request for an image. With the policy Always it is not looked for.
    fn count_ensured(&self, policy: PullPolicy, present: Option<bool>, pull: Option<bool>) {
        let shown = |known: Option<bool>| match known {
            Some(known) => known.to_string(),
            None => "unknown".to_owned(),
        };
        let label = EnsureImageLabel {
            present_locally: shown(present),
            pull_policy: format!("{policy:?}").to_ascii_lowercase(),
            pull_required: shown(pull),
        };
        self.metrics.ensured_images.get_or_create(&label).inc();
    }

    /// Returns whether the image was pulled for the service account of the pod. Runs no program: it would need a registry that may
    /// be away.
    pub(super) async fn is_account_known(
        &self,
        image: &str,
        record: &records::PulledImage,
        report: &Reporter<'_>,
    ) -> bool {
        let (Some(pod), Some(providers)) = (report.pod, &self.providers) else {
            return false;
        };
        if !record.has_accounts(image) {
            return false;
        }
        let repository = keyring::repository(image);
        let accounts = providers.accounts_of(&repository, pod).await;
        accounts
            .iter()
            .any(|account| record.grants_account(image, account))
    }

    /// The credentials that the pull secrets, the programs and the node's own logins have for an image, in this order; upstream's
    /// `MakeDockerKeyring`. A secret that cannot be used is left out; a pull that fails reports it.
    pub(super) async fn credentials(
        &self,
        image: &str,
        secrets: &PullSecrets,
        report: &Reporter<'_>,
    ) -> Vec<Credentials> {
        let (keyring, _) = Keyring::of(&secrets.found);
        let repository = keyring::repository(image);
        let mut found = keyring.lookup(&repository);
        if let Some(providers) = &self.providers {
            let (answers, failures) = providers.find(&repository, report.pod).await;
            found.extend(answers);
            for failure in failures {
                report.warning(
                    "FailedToGetCredentials",
                    format!("{failure}; attempting to pull the image may not succeed."),
                );
            }
        }
        if !self.logins.is_empty() {
            let logins = Arc::clone(&self.logins);
            if let Ok(node) = blocking::run(move || logins.read()).await {
                found.extend(node.lookup(&repository));
            }
        }
        found
    }
}

/// An image by name, for a pod that is told when the runtime cannot say.
async fn inspect<S: ImageService>(
    image: &str,
    service: &S,
    report: &Reporter<'_>,
) -> Result<Option<v1::Image>, ImageError> {
    service.image_status(image).await.map_err(|error| {
        let message = format!("Failed to inspect image \"{image}\": {error}");
        report.warning("InspectFailed", message.clone());
        ImageError::new(ImageErrorReason::ImageInspectError, message)
    })
}

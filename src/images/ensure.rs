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
        let policy = pull_policy(asked.policy, &image);
        let mut request = Request {
            images: self,
            named,
            image,
            policy,
            inputs,
            shown: None,
            is_here: None,
            service,
            store,
            report,
        };
        request.repair().await?;
        if request.policy != PullPolicy::Always {
            if let Some(present) = request.present().await? {
                return Ok(present);
            }
            // Whether it is there is not for those to know who may not have it.
            if request.policy == PullPolicy::Never {
                request.count(Some(false));
                let text =
                    format!("Container image \"{named}\" is not present with pull policy of Never");
                report.warning("ErrImageNeverPull", text.clone());
                return Err(ImageError::new(ImageErrorReason::ErrImageNeverPull, text));
            }
        }
        request.pull().await
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

    /// Returns the credentials for an image from the pull secrets, the credential providers and the node's own logins,
    /// in this order. Leaves out secrets that cannot be used; a failed pull reports them.
    /// Upstream: `MakeDockerKeyring`.
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

/// One request for an image, and its steps in their order.
struct Request<'a, S> {
    images: &'a ImageManager,
    /// The image as the pod names it.
    named: &'a str,
    /// Its full name.
    image: String,
    policy: PullPolicy,
    inputs: PullInputs<'a>,
    /// The credentials that the pod has for the image, once they were looked up.
    shown: Option<Vec<Credentials>>,
    /// True if the image was found on the node or in an archive; `None` before it was looked for.
    is_here: Option<bool>,
    service: &'a S,
    store: &'a Store,
    report: &'a Reporter<'a>,
}

impl<S: ImageService> Request<'_, S> {
    /// Counts the request. `pull` says whether the image has to be pulled, if that is known.
    fn count(&self, pull: Option<bool>) {
        let shown = |known: Option<bool>| match known {
            Some(known) => known.to_string(),
            None => "unknown".to_owned(),
        };
        let label = EnsureImageLabel {
            present_locally: shown(self.is_here),
            pull_policy: format!("{:?}", self.policy).to_ascii_lowercase(),
            pull_required: shown(pull),
        };
        let metrics = &self.images.metrics;
        metrics.ensured_images.get_or_create(&label).inc();
    }

    /// Removes an image whose files may be damaged, and pulls or imports it again.
    async fn repair(&mut self) -> Result<(), ImageError> {
        if !self.images.needs_look(self.store, &self.image) {
            return Ok(());
        }
        let shown = self.take_credentials().await;
        let wish = Wish {
            image: &self.image,
            credentials: &shown,
            sandbox: self.inputs.sandbox,
            may_pull: self.policy != PullPolicy::Never,
        };
        let standing = self
            .images
            .make_usable(wish, self.service, self.store, self.report)
            .await
            .map_err(|error| unrecorded(&self.image, error))?;
        if standing == Standing::Owed && self.policy == PullPolicy::Never {
            // It was there, and the agent has removed it.
            self.policy = PullPolicy::IfNotPresent;
        }
        self.shown = Some(shown);
        Ok(())
    }

    /// Returns the image if it is on the node, or in an archive, and the pod may have it.
    async fn present(&mut self) -> Result<Option<Present>, ImageError> {
        let found = self.find().await?;
        self.is_here = Some(found.is_some());
        let Some(found) = found else {
            return Ok(None);
        };
        let Some(changed) = self.grant(&found).await else {
            tracing::info!(
                image = self.image,
                "the image is there, but the pod must show that it may have it"
            );
            return Ok(None);
        };
        self.count(Some(false));
        self.report.normal(
            "Pulled",
            format!(
                "Container image \"{}\" already present on machine and can be accessed by the pod",
                self.named
            ),
        );
        let now = self.images.clock.now();
        self.images
            .change(self.store, &self.image, |seen, _, transaction| {
                let transaction = files::noticed(seen, transaction, &self.image, &found.id, now);
                match &changed {
                    Some(record) => records::record_changed(seen, transaction, record, now),
                    None => transaction,
                }
            })
            .await?;
        Ok(Some(Present {
            user: Some(ImageUser::of(&found)),
            reference: found.id,
        }))
    }

    /// Looks for the image on the node, then in the archives.
    async fn find(&self) -> Result<Option<v1::Image>, ImageError> {
        let (image, report) = (&self.image, self.report);
        let found = inspect(image, self.service, report)
            .await
            .inspect_err(|_| self.count(None))?;
        if found.is_none()
            && self
                .images
                .bring_from_archive(image, self.service, self.store, report)
                .await
                .map_err(|error| unrecorded(image, error))?
        {
            return inspect(image, self.service, report).await;
        }
        Ok(found)
    }

    /// Returns whether the pod may have an image that is on the node; `Some` with the record that says so, if that
    /// changed.
    async fn grant(&mut self, found: &v1::Image) -> Option<Option<records::PulledImage>> {
        let seen = self.store.snapshot();
        let records = &self.images.records;
        match records.permission(&seen, &self.image, &found.id) {
            Permission::Granted => Some(None),
            Permission::MustPull => None,
            Permission::ByCredentials(record) => {
                let known = self
                    .images
                    .is_account_known(&self.image, &record, self.report);
                if known.await {
                    return Some(None);
                }
                let shown = self.take_credentials().await;
                let granted = record.grants(&self.image, &shown);
                self.shown = Some(shown);
                granted
            }
        }
    }

    async fn take_credentials(&mut self) -> Vec<Credentials> {
        match self.shown.take() {
            Some(shown) => shown,
            None => {
                let secrets = self.inputs.secrets;
                self.images
                    .credentials(&self.image, secrets, self.report)
                    .await
            }
        }
    }

    async fn pull(self) -> Result<Present, ImageError> {
        self.count(Some(true));
        let may_fall_back =
            self.policy == PullPolicy::Always && self.images.fallback == PullFallback::Offline;
        let inputs = PullInputs {
            ran_with: self.inputs.ran_with.filter(|_| may_fall_back),
            ..self.inputs
        };
        let with = (self.service, self.store);
        self.images
            .pull_or_fall_back(self.image, self.shown, inputs, with, self.report)
            .await
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

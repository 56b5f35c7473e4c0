//! Layer 4: makes sure that the image of a container is there; upstream's `imageManager`.
//!
//! Comes in: a container, the runtime's image service. Goes out: the reference to create the container
//! from, or the reason it has to wait. Pulls of one image by several pods at once are one pull; how many
//! run beside each other is configured.
//!
//! An image that is there is handed to a pod only if the pod may have it: `records` remember by which pull
//! secrets images came.
//!
//! An image is handed to a pod only if its files can be believed: `files` remember how far each pull got, `sync` brings
//! the files to the disk after it, `repair` removes what a power loss may have damaged and pulls or imports it again,
//! from its registry or from an archive of the preload directory (`preload`, `archive`, `import`).
//!
//! A container of policy Always whose registry does not answer may start from the image it ran with before: `fallback`.
//!
//! **Invariant:** a pull that failed is recorded, with its back-off, before the error is returned, so the
//! back-off goes on after a restart. Its key is pod UID and image.
//!
//! **Invariant:** that an image is whole is on the disk after its files, and before a pod that waited for its pull gets
//! it. A suspect is removed only while sources of all its names answer.

mod account;
mod archive;
mod collect;
mod credentials;
mod ensure;
mod error;
mod fallback;
mod fetch;
mod files;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod heal;
mod import;
mod inputs;
mod keyring;
mod node_login;
mod preload;
mod provider_config;
mod prune;
mod pulls;
mod records;
mod reference;
mod repair;
mod rounds;
mod sync;
mod unreadable;

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once};

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::Semaphore;

pub use account::ServiceAccounts;
pub use archive::{ArchiveError, images_in};
pub use collect::{CollectError, Collection, KnowsPods, WantedImages, images_named, is_over};
pub use credentials::{CredentialError, CredentialProviders, CredentialSettings};
pub use error::{ImageError, ImageErrorReason};
pub use files::{archive_of, qualified};
pub use import::{ImportError, Importer, RuntimeTool};
pub use inputs::{PullInputs, PullSecrets};
pub use keyring::{
    CredentialSource, Credentials, Keyring, KeyringError, SecretSource, ServiceAccountSource,
};
pub use node_login::NodeLogins;
pub use prune::prune;
pub use pulls::ImageConfig;
pub use records::{VerificationPolicy, refusals, shown_access};
pub use reference::{InvalidImageName, normalize};
pub use sync::{ImageDisk, OpenedDisk};

use crate::core::backoff;
use crate::core::state::{ImageRecord, State, Transaction};
use crate::kubeletconfig::PullFallback;
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::kuberuntime::security::ImageUser;
use crate::store::mounts::Mount;
use crate::store::{CommitError, Committed, RemoveContainer, RemoveEmptySandbox, Store};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::metrics::Metrics;
use crate::types::runtime::{PodStatus, SandboxState};
use crate::types::{Clock, ContainerId, PodExt, PodUid};
use fallback::Outages;
use files::Works;
use heal::Unanswered;
use preload::Preload;
use pulls::Pulls;
use records::PullRecords;
use sync::{KernelDisk, Syncs};

const COMMIT_TRIES: u32 = 8;
/// Limit of concurrent requests to registries about images on the node.
const ASKS: usize = 8;
/// Those that have a limit of their own: [`ASKS`], or slots by registry.
const EACH_ITS_SLOT: ImageConfig = ImageConfig {
    serialize_pulls: false,
    max_parallel: None,
};

/// The part of the runtime that keeps images.
pub trait ImageService: Clone + Send + Sync + 'static {
    /// An image by name; `None` = not there.
    fn image_status(
        &self,
        image: &str,
    ) -> impl Future<Output = Result<Option<v1::Image>, CriError>> + Send;

    /// Digests of the layers of an image, the lowest first; empty where the runtime does not say.
    fn image_layers(
        &self,
        image: &str,
    ) -> impl Future<Output = Result<Vec<String>, CriError>> + Send;

    /// Pulls an image and returns its reference. Dropping the future cancels the pull.
    fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox: Option<v1::PodSandboxConfig>,
    ) -> impl Future<Output = Result<String, CriError>> + Send;

    /// Lists all images.
    fn list_images(&self) -> impl Future<Output = Result<Vec<v1::Image>, CriError>> + Send;

    /// Removes an image by name or ID. One that is gone counts as removed.
    fn remove_image(&self, image: &str) -> impl Future<Output = Result<(), CriError>> + Send;

    /// Waits until an image, or an archive of images, may be pulled or imported.
    ///
    /// # Errors
    /// When it is not known that it may. The next call tries again.
    fn before_pulls(&self, _image: &str) -> impl Future<Output = Result<(), CriError>> + Send {
        std::future::ready(Ok(()))
    }

    /// Removes what unfinished pulls have brought that are not under way: to make room, and before a possibly corrupt image is
    /// removed, of which they may have layers. They start from nothing then.
    fn release_pulls(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// IDs and names of the images that containers of any state were made of, and of those that the runtime makes
    /// sandboxes of.
    fn images_in_use(&self) -> impl Future<Output = Result<HashSet<String>, CriError>> + Send;

    /// Names of the images that the runtime makes sandboxes of, as far as it says so; those that it has pinned where it does not.
    fn sandbox_images(&self) -> impl Future<Output = Result<Vec<String>, CriError>> + Send;

    /// Directories on the file systems that hold images.
    fn image_directories(&self) -> impl Future<Output = Result<Vec<PathBuf>, CriError>> + Send;

    /// Pods with containers of an image, inspected, and the containers.
    fn containers_of(
        &self,
        image_id: &str,
    ) -> impl Future<Output = Result<Vec<(PodStatus, Vec<ContainerId>)>, CriError>> + Send;

    /// Removes a container. One that is gone counts as removed.
    fn remove_container(
        &self,
        intent: &Committed<RemoveContainer>,
    ) -> impl Future<Output = Result<(), CriError>> + Send;

    /// All pods, inspected, with the image of each of their sandboxes.
    fn sandboxes(
        &self,
    ) -> impl Future<Output = Result<Vec<(PodStatus, Vec<SandboxImage>)>, CriError>> + Send;

    /// Removes a sandbox. One that is gone counts as removed.
    fn remove_sandbox(
        &self,
        intent: &Committed<RemoveEmptySandbox>,
    ) -> impl Future<Output = Result<(), CriError>> + Send;
}

/// A sandbox and the image that it was made from.
#[derive(Clone, Debug)]
pub struct SandboxImage {
    /// The sandbox.
    pub id: ContainerId,
    /// True if it runs.
    pub is_ready: bool,
    /// Name of the image; `None` where the runtime does not say.
    pub image: Option<String>,
}

impl ImageService for CriClient {
    async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError> {
        CriClient::image_status(self, image).await
    }

    async fn image_layers(&self, image: &str) -> Result<Vec<String>, CriError> {
        CriClient::image_layers(self, image).await
    }

    async fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox: Option<v1::PodSandboxConfig>,
    ) -> Result<String, CriError> {
        CriClient::pull_image(self, image, auth, sandbox).await
    }

    async fn list_images(&self) -> Result<Vec<v1::Image>, CriError> {
        CriClient::list_images(self, None).await
    }

    async fn remove_image(&self, image: &str) -> Result<(), CriError> {
        CriClient::remove_image(self, image).await
    }

    async fn before_pulls(&self, image: &str) -> Result<(), CriError> {
        CriClient::before_pulls(self, image).await
    }

    async fn release_pulls(&self) {
        CriClient::release_pulls(self).await;
    }

    async fn images_in_use(&self) -> Result<HashSet<String>, CriError> {
        let mut used = HashSet::new();
        for container in self.list_containers(None).await? {
            let named = container
                .image
                .map(|spec| [spec.image, spec.user_specified_image]);
            used.extend(named.into_iter().flatten());
            used.extend([container.image_ref, container.image_id]);
        }
        used.remove("");
        used.extend(sandbox_image_of(&self.status(true).await?.info));
        Ok(used)
    }

    async fn sandbox_images(&self) -> Result<Vec<String>, CriError> {
        if let Some(image) = sandbox_image_of(&self.status(true).await?.info) {
            return Ok(vec![image]);
        }
        let images = CriClient::list_images(self, None).await?.into_iter();
        Ok(images
            .filter(|image| image.pinned)
            .flat_map(|image| image.repo_tags)
            .collect())
    }

    async fn image_directories(&self) -> Result<Vec<PathBuf>, CriError> {
        let answer = self.image_fs_info().await?;
        let ids = answer.image_filesystems.into_iter().filter_map(|f| f.fs_id);
        Ok(ids.map(|id| PathBuf::from(id.mountpoint)).collect())
    }

    async fn containers_of(
        &self,
        image_id: &str,
    ) -> Result<Vec<(PodStatus, Vec<ContainerId>)>, CriError> {
        let mut found = Vec::new();
        for listed in self.list_pods().await?.into_values() {
            let of_image = listed
                .containers
                .iter()
                .filter(|c| c.image_ref == image_id || c.image == image_id);
            let ids: Vec<ContainerId> = of_image.map(|c| c.id.clone()).collect();
            if !ids.is_empty() {
                found.push((self.pod_status_of(&listed).await?, ids));
            }
        }
        Ok(found)
    }

    async fn remove_container(&self, intent: &Committed<RemoveContainer>) -> Result<(), CriError> {
        CriClient::remove_container(self, intent).await
    }

    async fn sandboxes(&self) -> Result<Vec<(PodStatus, Vec<SandboxImage>)>, CriError> {
        let mut found = Vec::new();
        for listed in self.list_pods().await?.into_values() {
            let mut sandboxes = Vec::new();
            for sandbox in &listed.sandboxes {
                match self.sandbox_image(&sandbox.id).await {
                    Ok(image) => sandboxes.push(SandboxImage {
                        id: sandbox.id.clone(),
                        is_ready: sandbox.state == SandboxState::Ready,
                        image,
                    }),
                    Err(error) if error.is_not_found() => {}
                    Err(error) => return Err(error),
                }
            }
            found.push((self.pod_status_of(&listed).await?, sandboxes));
        }
        Ok(found)
    }

    async fn remove_sandbox(&self, intent: &Committed<RemoveEmptySandbox>) -> Result<(), CriError> {
        CriClient::remove_pod_sandbox(self, intent).await
    }
}

/// The image that sandboxes are made of, where the runtime's configuration says so. Those that do not say it have it
/// pinned.
fn sandbox_image_of(info: &HashMap<String, String>) -> Option<String> {
    let config: serde_json::Value = serde_json::from_str(info.get("config")?).ok()?;
    config["sandboxImage"].as_str().map(str::to_owned)
}

/// Hears the name of an image that changed.
pub type ImageChanged = Arc<dyn Fn(&str) + Send + Sync>;

/// Pulls images. Shared by all workers.
pub struct ImageManager {
    pulls: Pulls,
    records: PullRecords,
    syncs: Arc<Syncs>,
    /// Images whose files were not written to the disk, by qualified name. No later sync makes them whole.
    lost: Mutex<HashSet<String>>,
    /// Those that an earlier run of this boot has recorded were added.
    recalled: Once,
    works: Works,
    /// Questions to registries about what is there already.
    asks: Pulls,
    /// Limits the number of concurrent requests of that kind.
    asking: Semaphore,
    /// Pulls that no pod waits for.
    owed_pulls: Pulls,
    /// Limits their number, by registry.
    owed_slots: Mutex<HashMap<String, Arc<Semaphore>>>,
    /// One removal of suspects at a time. Nobody waits for a registry in it.
    healing: tokio::sync::Mutex<()>,
    /// Wakes the task that pulls or imports removed images again.
    owing: tokio::sync::Notify,
    /// Wakes the task that checks suspects that no pod waits for.
    doubting: tokio::sync::Notify,
    /// True while sandboxes wait for the repair of their image; see [`Self::sandbox_failed`].
    sandboxes_wait: tokio::sync::watch::Sender<bool>,
    /// IDs of the images that were needed when garbage was last collected.
    needed: Mutex<HashSet<String>>,
    /// Sources that have not answered, by who asked for what, and images that are in use.
    unanswered: Mutex<HashMap<String, Unanswered>>,
    preload: Option<Preload>,
    /// Set once the leases of pulls and imports from previous boots were released.
    released: tokio::sync::OnceCell<()>,
    /// True once archives and suspects were checked; see [`Self::first_round`].
    round: tokio::sync::watch::Sender<bool>,
    /// Registries that do not answer.
    outages: Arc<Outages>,
    fallback: PullFallback,
    providers: Option<Arc<CredentialProviders>>,
    logins: Arc<NodeLogins>,
    pulled: Option<Arc<dyn Fn() + Send + Sync>>,
    changed: Option<ImageChanged>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

/// An image that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// Image reference to create the container from.
    pub reference: String,
    /// The user that it is made for, where the runtime told while it was looked for.
    pub user: Option<ImageUser>,
}

/// Events about one container, about the pod, or about the node.
struct Reporter<'a> {
    /// `None` for the node.
    pod: Option<&'a Pod>,
    container: Option<&'a str>,
    recorder: &'a dyn EventRecorder,
}

impl Reporter<'_> {
    fn normal(&self, reason: &str, message: String) {
        self.record(EventType::Normal, reason, message);
    }

    fn uid(&self) -> Option<PodUid> {
        self.pod.map(PodExt::uid)
    }

    /// Tells the pod, and where none waits those who look at the node.
    fn tell(&self, kind: EventType, reason: &str, message: String) {
        if self.pod.is_some() {
            self.record(kind, reason, message);
        } else {
            self.recorder.record(Event::node(kind, reason, message));
        }
    }

    fn warning(&self, reason: &str, message: String) {
        self.record(EventType::Warning, reason, message);
    }

    fn record(&self, kind: EventType, reason: &str, message: String) {
        let Some(pod) = self.pod else {
            // Of no interest to those who look at the node.
            tracing::debug!(reason, message, "for the node");
            return;
        };
        let event = Event::pod(kind, pod, reason, message);
        self.recorder.record(match self.container {
            Some(name) => event.container(name),
            None => event,
        });
    }
}

impl ImageManager {
    /// Returns a future that keeps the pulls in flight going for a minute when the step that waits for them is given up: the next
    /// step joins them.
    pub fn keep_pulls(&self) -> impl Future<Output = ()> + Send + use<> {
        self.pulls.keep()
    }

    /// A manager without pulls in flight.
    pub fn new(config: ImageConfig, clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        let outages = Arc::<Outages>::default();
        Self {
            pulls: Pulls::new(config, Arc::clone(&outages)),
            fallback: PullFallback::default(),
            records: PullRecords::default(),
            syncs: Arc::new(Syncs::new(Arc::new(KernelDisk))),
            lost: Mutex::default(),
            recalled: Once::new(),
            works: Works::default(),
            asks: Pulls::new(EACH_ITS_SLOT, Arc::clone(&outages)),
            asking: Semaphore::new(ASKS),
            owed_pulls: Pulls::new(EACH_ITS_SLOT, Arc::clone(&outages)),
            owed_slots: Mutex::default(),
            healing: tokio::sync::Mutex::default(),
            owing: tokio::sync::Notify::new(),
            doubting: tokio::sync::Notify::new(),
            sandboxes_wait: tokio::sync::watch::Sender::new(false),
            needed: Mutex::default(),
            unanswered: Mutex::default(),
            preload: None,
            released: tokio::sync::OnceCell::new(),
            round: tokio::sync::watch::Sender::new(false),
            providers: None,
            logins: Arc::default(),
            pulled: None,
            changed: None,
            clock,
            metrics,
            outages,
        }
    }

    /// Uses the registry logins of the node, behind those of pull secrets and programs.
    #[must_use]
    pub fn with_node_logins(mut self, logins: NodeLogins) -> Self {
        self.logins = Arc::new(logins);
        self
    }

    /// Syncs images through this disk instead of the kernel's.
    #[must_use]
    pub fn syncing(mut self, disk: Arc<dyn ImageDisk>) -> Self {
        self.syncs = Arc::new(Syncs::new(disk));
        self
    }

    /// Asks these programs for credentials before each pull.
    #[must_use]
    pub fn with_credential_providers(mut self, providers: Arc<CredentialProviders>) -> Self {
        self.providers = Some(providers);
        self
    }

    /// Imports the archives of this directory with `importer`; see [`Self::run`].
    #[must_use]
    pub fn preloading(mut self, dir: PathBuf, importer: Arc<dyn Importer>) -> Self {
        self.preload = Some(Preload::new(dir, importer));
        self
    }

    /// Believes the directory of [`Self::preloading`] only while its file system is mounted.
    #[must_use]
    pub fn preloading_when_mounted(mut self, mount: Mount) -> Self {
        if let Some(preload) = &mut self.preload {
            preload.mount = Some(Arc::new(mount));
        }
        self
    }

    /// Sets the policy for existing images that need credentials. The default covers the images that the agent pulled.
    #[must_use]
    pub fn verifying(mut self, policy: VerificationPolicy) -> Self {
        self.records = PullRecords::new(policy);
        self
    }

    /// Sets the fallback for containers of policy Always whose registry does not answer.
    #[must_use]
    pub fn falling_back(mut self, fallback: PullFallback) -> Self {
        self.outages.enable(fallback == PullFallback::Offline);
        self.fallback = fallback;
        self
    }

    /// Calls `tell` after each pull; it must not wait.
    #[must_use]
    pub fn telling(mut self, tell: Arc<dyn Fn() + Send + Sync>) -> Self {
        self.pulled = Some(tell);
        self
    }

    /// Calls `tell` with each image whose content was pulled or imported anew, or repaired; it must not wait.
    #[must_use]
    pub fn announcing(mut self, tell: ImageChanged) -> Self {
        self.changed = Some(tell);
        self
    }

    fn announce(&self, image: &str) {
        if let Some(tell) = &self.changed {
            tell(image);
        }
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
        let Some(uid) = report.uid() else {
            return Ok(());
        };
        let seen = store.snapshot();
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

fn unrecorded(image: &str, source: CommitError) -> ImageError {
    let text = format!("record image {image}: {source}");
    let mut error = ImageError::new(ImageErrorReason::ErrImagePull, text);
    error.store = Some(source);
    error
}

#[cfg(test)]
mod tests;

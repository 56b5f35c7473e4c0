//! A container of policy Always whose registry does not answer starts from the image it ran with before, where the node
//! allows that (`PullFallback::Offline`).
//!
//! Comes in: the image of the container's previous attempt, errors of pulls, what arrives in the runtime's content store. Goes
//! out: that image, with an event. The decision is made in `core::pull_fallback`.
//!
//! A pull that fails without an answer counts. A pull under way counts only where the agent can see that nothing
//! arrives: CRI does not report the progress of a pull, so the agent looks at containerd's content store. With any
//! other runtime it waits for the pull to fail.
//!
//! **Invariant:** a container falls back to an image only if its pod may use it, and no record makes it a suspect.

use std::collections::HashMap;
use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use k8s_cri::v1;
use tokio::time::Instant;

use super::keyring::{self, Credentials, Keyring};
use super::pulls::Wanted;
use super::records::{self, Permission, PulledImage};
use super::repair::shortened;
use super::{
    ImageError, ImageErrorReason, ImageManager, ImageService, Present, PullInputs, PullSecrets,
    Reporter,
};
use crate::core::images::{self, Standing};
use crate::core::pull_fallback::{Next, PATIENCE, after_silence, is_unanswered};
use crate::kubeletconfig::format_duration;
use crate::kuberuntime::cri::CriError;
use crate::kuberuntime::security::ImageUser;
use crate::store::Store;
use crate::types::{Stamp, blocking};

/// Poll interval: of the content store during a pull, and of a registry's silence while a pull waits.
const LOOK: Duration = Duration::from_secs(1);
/// A registry that nobody has asked for so long has its time anew.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// Registries that were asked and have not answered since.
#[derive(Debug, Default)]
pub(super) struct Outages {
    is_enabled: AtomicBool,
    /// Content store of the runtime, where blobs arrive.
    content: tokio::sync::OnceCell<Content>,
    /// By host.
    silent: Mutex<HashMap<String, Outage>>,
}

#[derive(Clone, Copy, Debug)]
struct Outage {
    since: Instant,
    /// Time of the last request, or of its failure.
    last: Instant,
    /// True if the newest request is observed while it runs, so that an answer would be noticed.
    is_watched: bool,
}

impl Outages {
    pub(super) fn enable(&self, is_enabled: bool) {
        self.is_enabled.store(is_enabled, Ordering::Relaxed);
    }

    /// Makes a pull, and notes whether the registry answers it.
    pub(super) async fn watch<S: ImageService, T>(
        &self,
        image: &str,
        service: &S,
        pull: impl Future<Output = Result<T, CriError>> + Send,
    ) -> Result<T, CriError> {
        if !self.is_enabled.load(Ordering::Relaxed) {
            return pull.await;
        }
        let registry = registry(image);
        let content = self.content(service).await;
        let at_first = content.seen().await;
        self.asked(&registry, at_first.is_some());
        let mut pull = std::pin::pin!(pull);
        let mut looks = tokio::time::interval_at(Instant::now() + LOOK, LOOK);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut is_silent = at_first.is_some();
        loop {
            tokio::select! {
                biased;
                result = &mut pull => {
                    match &result {
                        Err(error) if is_unanswered(&error.message) => self.failed(&registry),
                        _ => self.answered(&registry),
                    }
                    return result;
                }
                _ = looks.tick(), if is_silent => {
                    if content.seen().await != at_first {
                        is_silent = false;
                        self.answered(&registry);
                    }
                }
            }
        }
    }

    async fn content<S: ImageService>(&self, service: &S) -> Content {
        let found = self.content.get_or_try_init(|| Content::of(service));
        found.await.cloned().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot find the runtime's content store");
            Content(None)
        })
    }

    fn asked(&self, registry: &str, is_watched: bool) {
        let now = Instant::now();
        let mut silent = self.silent();
        silent.retain(|_, outage| now.duration_since(outage.last) < FORGOTTEN);
        let since = silent.get(registry).map_or(now, |outage| outage.since);
        let last = now;
        silent.insert(
            registry.to_owned(),
            Outage {
                since,
                last,
                is_watched,
            },
        );
    }

    fn failed(&self, registry: &str) {
        let now = Instant::now();
        self.silent()
            .entry(registry.to_owned())
            .or_insert(Outage {
                since: now,
                last: now,
                is_watched: false,
            })
            .last = now;
    }

    fn answered(&self, registry: &str) {
        self.silent().remove(registry);
    }

    fn of(&self, registry: &str) -> Option<Outage> {
        let outage = self.silent().get(registry).copied();
        outage.filter(|outage| outage.last.elapsed() < FORGOTTEN)
    }

    /// Returns how long a registry has been silent; `None` if it has answered or had no recent request.
    fn silent_for(&self, registry: &str) -> Option<Duration> {
        Some(self.of(registry)?.since.elapsed())
    }

    /// Returns once nothing has come of a registry for [`PATIENCE`], counted from this call at the earliest. Does not
    /// return where that cannot be seen.
    async fn until_hung(&self, registry: &str) {
        tokio::time::sleep(PATIENCE).await;
        loop {
            if self
                .of(registry)
                .is_some_and(|o| o.is_watched && o.since.elapsed() >= PATIENCE)
            {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn silent(&self) -> MutexGuard<'_, HashMap<String, Outage>> {
        // Entries are put and removed whole.
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host of an image's registry.
fn registry(image: &str) -> String {
    let repository = keyring::repository(image);
    match repository.split_once('/') {
        Some((host, _)) => host.to_owned(),
        None => repository,
    }
}

/// containerd's content store, where the parts of images arrive.
#[derive(Clone, Debug)]
struct Content(Option<PathBuf>);

/// Changes whenever data arrives: modification times of the directories of blobs and of downloads, and the bytes of the
/// downloads.
type Arrivals = (SystemTime, SystemTime, u64);

impl Content {
    /// Next to the snapshots, whose directory the runtime names.
    async fn of<S: ImageService>(service: &S) -> Result<Self, CriError> {
        let directories = service.image_directories().await?;
        let roots = directories.iter().filter_map(|d| d.parent());
        let stores = roots.map(|root| root.join("io.containerd.content.v1.content"));
        let found = blocking::run({
            let stores: Vec<PathBuf> = stores.collect();
            move || stores.into_iter().find(|store| arrivals(store).is_some())
        });
        Ok(Self(found.await.ok().flatten()))
    }

    /// `None` where it cannot be seen.
    async fn seen(&self) -> Option<Arrivals> {
        let store = self.0.clone()?;
        blocking::run(move || arrivals(&store)).await.ok().flatten()
    }
}

fn arrivals(store: &Path) -> Option<Arrivals> {
    let changed = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let downloads = store.join("ingest");
    let blobs = changed(&store.join("blobs").join("sha256"))?;
    let bytes = fs::read_dir(&downloads)
        .ok()?
        .flatten()
        .filter_map(|download| fs::metadata(download.path().join("data")).ok())
        .map(|data| data.len())
        .sum();
    Some((blobs, changed(&downloads)?, bytes))
}

/// Emits events about pull secrets that could not be used, after a pull that failed: one that succeeds did not need them.
fn report_unusable(secrets: &PullSecrets, report: &Reporter<'_>) {
    const REASON: &str = "FailedToRetrieveImagePullSecret";
    if !secrets.missing.is_empty() {
        let missing = secrets.missing.join(", ");
        let text = format!(
            "Unable to retrieve some image pull secrets ({missing}); attempting to pull the image may not succeed."
        );
        report.warning(REASON, text);
    }
    for (name, problem) in Keyring::of(&secrets.found).1 {
        let text = format!("Unable to use image pull secret {name}: {problem}");
        report.warning(REASON, text);
    }
}

/// An image that a container may fall back to.
struct StandIn {
    id: String,
    user: ImageUser,
    /// The record of the pod's right, where that changes with the use.
    changed: Option<PulledImage>,
}

impl ImageManager {
    /// Pulls an image once its back-off is over. A container that ran before and whose registry does not answer gets the image
    /// of `inputs.ran_with` instead; its back-off is no reason to wait longer for that.
    ///
    /// # Errors
    /// As [`ImageManager::ensure`].
    pub(super) async fn pull_or_fall_back<S: ImageService>(
        &self,
        image: String,
        credentials: Option<Vec<Credentials>>,
        inputs: PullInputs<'_>,
        (service, store): (&S, &Store),
        report: &Reporter<'_>,
    ) -> Result<Present, ImageError> {
        let backoff = self.heed_backoff(&image, store, report);
        let registry = registry(&image);
        if let Err(waits) = backoff {
            if inputs.ran_with.is_none() {
                return Err(waits);
            }
            self.shorten(&image, waits, &registry, store, report)?;
        }
        let credentials = match credentials {
            Some(credentials) => credentials,
            None => self.credentials(&image, inputs.secrets, report).await,
        };
        let stand_in = match inputs.ran_with {
            Some(ran_with) => {
                self.stand_in(ran_with, &image, &credentials, (service, store), report)
                    .await
            }
            None => None,
        };
        let want = Wanted {
            image: image.clone(),
            credentials,
            sandbox: inputs.sandbox.cloned(),
        };
        let pull = async {
            let pulled = self.pull(want, service, store, report).await;
            if pulled.is_err() {
                report_unusable(inputs.secrets, report);
            }
            pulled
        };
        let Some(stand_in) = stand_in else {
            return pull.await;
        };
        let hung = self.outages.until_hung(&registry);
        let cause = tokio::select! {
            biased;
            pulled = pull => match pulled {
                Err(error) if is_silence(&error) => {
                    let silent = self.outages.silent_for(&registry).unwrap_or_default();
                    if let Next::AskAgain(after) = after_silence(silent) {
                        return Err(self.sooner(error, after));
                    }
                    error.message
                }
                pulled => return pulled,
            },
            () = hung => format!("nothing has arrived for {}", format_duration(PATIENCE)),
        };
        self.fall_back(&image, stand_in, &cause, (service, store), report)
            .await
    }

    /// Shortens the back-off of a container that may fall back. It is over (`Ok`) if the last pull got no answer and
    /// the registry had its time; otherwise the returned error ends no later than that time.
    fn shorten(
        &self,
        image: &str,
        waits: ImageError,
        registry: &str,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), ImageError> {
        let last = report
            .uid()
            .and_then(|uid| records::last_error(&store.snapshot(), &uid, image));
        if !last.is_some_and(|last| is_unanswered(&last)) {
            return Err(waits);
        }
        // What an earlier run of the agent knew of the registry is asked again.
        match self.outages.silent_for(registry).map(after_silence) {
            Some(Next::AskAgain(after)) => Err(self.sooner(waits, after)),
            Some(Next::FallBack) | None => Ok(()),
        }
    }

    fn sooner(&self, mut error: ImageError, after: Duration) -> ImageError {
        let now = self.clock.now();
        let at = now.plus(after);
        let is_later = |until: &Stamp| until.until(now) > after;
        if error.retry_at.as_ref().is_none_or(is_later) {
            error.retry_at = Some(at);
        }
        error
    }

    /// The image that a container ran with, if it is there and the pod may use it. Asked before the pull, which begins a
    /// record of its own.
    async fn stand_in<S: ImageService>(
        &self,
        ran_with: &str,
        image: &str,
        credentials: &[Credentials],
        (service, store): (&S, &Store),
        report: &Reporter<'_>,
    ) -> Option<StandIn> {
        let found = self.sound(ran_with, image, service, store).await?;
        let permission = self.records.permission(&store.snapshot(), image, &found.id);
        let changed = match permission {
            Permission::Granted => None,
            Permission::MustPull => return None,
            Permission::ByCredentials(record)
                if self.is_account_known(image, &record, report).await =>
            {
                None
            }
            Permission::ByCredentials(record) => record.grants(image, credentials)?,
        };
        Some(StandIn {
            user: ImageUser::of(&found),
            id: found.id,
            changed,
        })
    }

    /// An image that is there and that no record makes a suspect, also not that of the name.
    async fn sound<S: ImageService>(
        &self,
        reference: &str,
        name: &str,
        service: &S,
        store: &Store,
    ) -> Option<v1::Image> {
        let found = match service.image_status(reference).await {
            Ok(found) => found?,
            Err(error) => {
                tracing::warn!(image = reference, %error, "cannot check the image of the container's previous attempt");
                return None;
            }
        };
        let (seen, boot) = (store.snapshot(), self.clock.now().boot);
        let named = self.standing(&seen, name, Some(&found));
        let is_sound = !matches!(named, Standing::Suspect | Standing::Owed)
            && images::is_sound(&seen, &found.id, boot);
        is_sound.then_some(found)
    }

    async fn fall_back<S: ImageService>(
        &self,
        image: &str,
        stand_in: StandIn,
        cause: &str,
        (service, store): (&S, &Store),
        report: &Reporter<'_>,
    ) -> Result<Present, ImageError> {
        let StandIn { id, user, changed } = stand_in;
        if self.sound(&id, image, service, store).await.is_none() {
            let text = format!("image {id} cannot be used any more, and {cause}");
            return Err(ImageError::new(ImageErrorReason::ErrImagePull, text));
        }
        let (now, uid) = (self.clock.now(), report.uid());
        self.change(store, image, |seen, record, transaction| {
            let mut t = transaction;
            if let Some(uid) = &uid {
                // The next start asks the registry at once.
                record.backoffs.remove(uid);
                t = records::record_error(seen, t, uid, image, None, now);
            }
            match &changed {
                Some(changed) => records::record_changed(seen, t, changed, now),
                None => t,
            }
        })
        .await?;
        let silent = format_duration(PATIENCE);
        report.warning(
            "ImagePullFallback",
            format!(
                "The registry of image \"{image}\" has not answered for {silent}, starting from image {id} that the container ran with before: {}",
                shortened(cause)
            ),
        );
        Ok(Present {
            reference: id,
            user: Some(user),
        })
    }
}

/// Returns whether a pull failed because the registry has not answered.
fn is_silence(error: &ImageError) -> bool {
    error.store.is_none()
        && (error.reason == ImageErrorReason::RegistryUnavailable || is_unanswered(&error.message))
}

//! Removes images that nothing needs, when they are too old or their disk is nearly full. Upstream:
//! `realImageGCManager`.
//!
//! An image is needed while a container of any state was made of it, while a pod that is wanted names it, while the
//! runtime has it pinned or makes its sandboxes of it, while an archive of the preload directory holds it, and while it
//! is being brought. Upstream removes what no container was made of, so a node without its registry may lose images that
//! its pods need again.
//!
//! When an image was first seen and last used is recorded, so a restart makes no image younger or older. An image that
//! no pod of this agent has used yet has a record under its ID.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;

use super::files::{self, archive_of, qualified};
use super::{ImageManager, ImageService, normalize, prune};
use crate::core::image_gc::report::{Judged, Report};
use crate::core::image_gc::{self, Ages, Disk, Policy, Unused};
use crate::core::images::{self, FilesState};
use crate::core::state::{ImageRecord, State, Transaction, WorkerPhase, WorkerRecord};
use crate::kuberuntime::cri::{CriError, CriErrorKind};
use crate::store::{CommitError, Store};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::metrics::ReasonLabel;
use crate::types::{PodExt, Stamp, blocking, causes};

/// Upstream's `ImageGCPeriod`.
const PERIOD: Duration = Duration::from_secs(300);
/// The shortest pause between two rounds.
const PAUSE: Duration = Duration::from_secs(5);

/// The reason to keep an image that a container was made of, or that sandboxes are made of.
const IN_USE: &str = "a container or a sandbox uses it";

/// Reason why images were not removed although they should have been.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// The runtime does not say which images there are, or which are used.
    #[error("list the images that may be removed")]
    Runtime(#[from] CriError),
    /// It cannot be recorded.
    #[error("record which images are used")]
    Store(#[from] CommitError),
    /// There are not enough images that nothing needs.
    #[error(
        "Failed to garbage collect required amount of images. Attempted to free {wanted} bytes, but only found {freed} bytes eligible to free."
    )]
    TooFew {
        /// In bytes.
        wanted: u64,
        /// In bytes.
        freed: u64,
    },
}

/// The images that wanted pods name which are not over, as they are written there.
pub type WantedImages = Arc<dyn Fn() -> HashSet<String> + Send + Sync>;

/// Returns whether the wanted pods are known.
pub type KnowsPods = Arc<dyn Fn() -> bool + Send + Sync>;

/// Dependencies of garbage collection.
pub struct Collection {
    /// The settings.
    pub policy: Policy,
    /// Asked again before each removal.
    pub wanted: WantedImages,
    /// Before that nothing is removed: a source may name an image that nothing else does.
    pub knows_pods: KnowsPods,
    /// For events about the node.
    pub recorder: Arc<dyn EventRecorder>,
    /// Records.
    pub store: Store,
}

/// Returns whether a pod needs its images no more: it is over, for all time. A static pod is not: its manifest may be changed
/// or the machine rebooted.
pub fn is_over(pod: &Pod, seen: &State) -> bool {
    let finished = || {
        let record = seen.record::<WorkerRecord>(pod.uid().as_str());
        record.is_some_and(|worker| matches!(worker.phase, WorkerPhase::Finished { .. }))
    };
    !pod.is_static() && (pod.phase_is_terminal() || finished())
}

/// Returns the images that these pods name: of containers of all kinds and of image volumes.
pub fn images_named<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> HashSet<String> {
    let mut images = HashSet::new();
    for pod in pods {
        let containers = pod.init_containers().iter().chain(pod.containers());
        images.extend(containers.filter_map(|c| c.image.clone()));
        let ephemeral = pod.ephemeral_containers().iter();
        images.extend(ephemeral.filter_map(|c| c.image.clone()));
        let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
        let sources = volumes
            .into_iter()
            .flatten()
            .filter_map(|v| v.image.as_ref());
        images.extend(sources.filter_map(|source| source.reference.clone()));
    }
    images
}

/// Result of a round.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// After how long an image will be too old.
    pub(super) next_due: Option<Duration>,
}

/// State of one round.
struct Look<'a, S> {
    collection: &'a Collection,
    service: &'a S,
    images: &'a [v1::Image],
    /// IDs of the images that wanted pods name, by those names; `None` for one that the runtime does not have.
    wanted: HashMap<String, Option<String>>,
    /// Images that could not be removed, or need not be: not tried again in this round.
    stayed: HashSet<String>,
}

impl ImageManager {
    /// Forgets images that are gone and removes those that nothing needs: at once, every five minutes, and when one
    /// becomes too old. Runs until cancelled.
    pub async fn run_collection<S: ImageService>(
        self: Arc<Self>,
        collection: Collection,
        service: S,
        token: CancellationToken,
    ) {
        let mut failed = 0;
        let mut pause = Duration::ZERO;
        loop {
            tokio::select! {
                () = token.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            let round = tokio::select! {
                () = token.cancelled() => return,
                round = self.collect(&collection, &service) => round,
            };
            pause = PERIOD;
            match round {
                Ok(round) => {
                    failed = 0;
                    if let Some(due) = round.next_due {
                        pause = due.clamp(PAUSE, PERIOD);
                    }
                }
                Err(error) => {
                    failed += 1;
                    let text = causes(&error);
                    tracing::warn!(error = text, "some unused images may not have been removed");
                    // A single failure after the start may be the runtime that comes up: upstream tells of the second.
                    if failed > 1 {
                        warn(&collection, "ImageGCFailed", text);
                    }
                }
            }
        }
    }

    pub(super) async fn collect<S: ImageService>(
        &self,
        collection: &Collection,
        service: &S,
    ) -> Result<Round, CollectError> {
        let now = self.clock.now();
        let images = service.list_images().await?;
        prune(&collection.store, &images, now).await?;
        let used = service.images_in_use().await?;
        let (unused, seen) = self.sort(collection, &images, &used, now);
        if !seen.is_empty() {
            collection.store.commit(seen).await?;
        }
        let policy = &collection.policy;
        if !(collection.knows_pods)() {
            return Ok(Round {
                next_due: image_gc::next_due(&unused, policy, now),
            });
        }
        let mut look = Look {
            collection,
            service,
            images: &images,
            wanted: HashMap::new(),
            stayed: HashSet::new(),
        };
        let mut gone = HashSet::new();
        for image in image_gc::too_old(&unused, policy, now) {
            if self.remove_unused(&mut look, image, "age").await? {
                gone.insert(image.id.clone());
            }
        }
        gone.extend(look.stayed.iter().cloned());
        let left = without(unused, &gone);
        let freed = self.free_space(&mut look, &left, now).await?;
        let left = without(without(left, &freed), &look.stayed);
        Ok(Round {
            next_due: image_gc::next_due(&left, policy, now),
        })
    }

    /// Removes the images that nothing needs and that are past the minimum age, however full their disk is. Returns how
    /// many; none before it is known which pods are wanted. Upstream: `DeleteUnusedImages`.
    ///
    /// # Errors
    /// See [`CollectError`].
    pub async fn remove_all_unused<S: ImageService>(
        &self,
        collection: &Collection,
        service: &S,
    ) -> Result<usize, CollectError> {
        let now = self.clock.now();
        let images = service.list_images().await?;
        let used = service.images_in_use().await?;
        let (unused, seen) = self.sort(collection, &images, &used, now);
        if !seen.is_empty() {
            collection.store.commit(seen).await?;
        }
        if !(collection.knows_pods)() {
            return Ok(0);
        }
        let mut look = Look {
            collection,
            service,
            images: &images,
            wanted: HashMap::new(),
            stayed: HashSet::new(),
        };
        service.release_pulls().await;
        let mut removed = 0;
        for image in image_gc::to_free_space(&unused, &collection.policy, now) {
            let is_gone = self.remove_unused(&mut look, image, "space");
            removed += usize::from(is_gone.await?);
        }
        Ok(removed)
    }

    /// Removes images until enough of their disk is free. Returns those that are gone.
    async fn free_space<S: ImageService>(
        &self,
        look: &mut Look<'_, S>,
        unused: &[Unused],
        now: Stamp,
    ) -> Result<HashSet<String>, CollectError> {
        let mut gone = HashSet::new();
        let policy = &look.collection.policy;
        // `nodestatus` reports one without a size.
        let needed = disk_of(look.service)
            .await?
            .and_then(|disk| policy.needed(disk));
        let Some((wanted, used)) = needed else {
            return Ok(gone);
        };
        tracing::info!(
            used_percent = used,
            high_threshold = policy.high,
            bytes = wanted,
            low_threshold = policy.low,
            "Disk usage on image filesystem is over the high threshold, trying to free bytes down to the low threshold"
        );
        look.service.release_pulls().await;
        let mut freed = 0;
        for image in image_gc::to_free_space(unused, policy, now) {
            if freed >= wanted {
                break;
            }
            if self.remove_unused(look, image, "space").await? {
                freed = image.size.saturating_add(freed);
                gone.insert(image.id.clone());
            }
        }
        if freed < wanted {
            let error = CollectError::TooFew { wanted, freed };
            warn(look.collection, "FreeDiskSpaceFailed", error.to_string());
            return Err(error);
        }
        Ok(gone)
    }

    /// Sorts out the images that nothing needs. The second result records what is needed as used now, what was never seen
    /// before, and why each is kept.
    fn sort(
        &self,
        collection: &Collection,
        images: &[v1::Image],
        used: &HashSet<String>,
        now: Stamp,
    ) -> (Vec<Unused>, Transaction) {
        let seen = collection.store.snapshot();
        let wanted = wanted_names(collection);
        let known = ages(&seen, now);
        let exact = exactness(&collection.policy);
        let mut needed = lock(&self.needed);
        let before = std::mem::take(&mut *needed);
        let mut unused = Vec::new();
        let mut judged = Vec::new();
        let mut transaction = Transaction::new();
        for image in images {
            let of_names = names(image).filter_map(|name| known.get(&qualified(name)).copied());
            let by_id = known.get(&image.id).copied();
            let told = of_names.chain(by_id).reduce(|a, b| a.and(b, now));
            let kept = self.need(&seen, image, used, &wanted);
            let is_needed = kept.is_some();
            judged.push(Judged {
                id: image.id.clone(),
                names: names(image).map(qualified).collect(),
                size: image.size,
                pinned: image.pinned,
                kept,
                order: None,
            });
            if is_needed {
                needed.insert(image.id.clone());
            }
            let last_used = match told {
                Some(told) if is_needed => (now.since(told.last_used) >= exact).then_some(now),
                Some(_) if !before.contains(&image.id) => None,
                // Needed until now, or never seen before.
                _ => Some(now),
            };
            if let Some(last_used) = last_used {
                let record = ImageRecord {
                    pulled_ref: None,
                    backoffs: std::collections::BTreeMap::new(),
                    first_seen: told.map_or(now, |told| told.first_seen),
                    last_used,
                };
                transaction = transaction
                    .expect::<ImageRecord>(&seen, &image.id)
                    .put(&image.id, record);
            }
            if let (Some(told), false) = (told, is_needed) {
                unused.push(Unused {
                    id: image.id.clone(),
                    size: image.size,
                    first_seen: told.first_seen,
                    last_used: last_used.unwrap_or(told.last_used),
                });
            }
        }
        let report = Report::new(&collection.policy, judged, &unused, now);
        (unused, transaction.and(report.changes(&seen, now)))
    }

    /// Returns why an image is kept; `None` if nothing needs it.
    fn need(
        &self,
        seen: &State,
        image: &v1::Image,
        used: &HashSet<String>,
        wanted: &HashSet<String>,
    ) -> Option<String> {
        if image.pinned {
            return Some("the runtime has it pinned".to_owned());
        }
        if used.contains(&image.id) {
            return Some(IN_USE.to_owned());
        }
        names(image).find_map(|name| {
            let qualified = qualified(name);
            let files = images::files_of(seen, &qualified).map(|(files, _)| files.state);
            // Pulls, imports and repairs see to the others.
            let is_settled = matches!(files, None | Some(FilesState::Whole | FilesState::Trusted));
            if used.contains(name) {
                Some(IN_USE.to_owned())
            } else if wanted.contains(&qualified) {
                Some("a pod names it".to_owned())
            } else if !is_settled || self.works.is_busy(name) {
                Some("it is being pulled, imported or repaired".to_owned())
            } else {
                let archive = archive_of(seen, name)?;
                Some(format!("archive {archive} of the preload directory has it"))
            }
        })
    }

    /// Removes an image, unless something needs it by now. Returns whether it is gone.
    async fn remove_unused<S: ImageService>(
        &self,
        look: &mut Look<'_, S>,
        image: &Unused,
        reason: &str,
    ) -> Result<bool, CollectError> {
        look.stayed.insert(image.id.clone());
        let (collection, service) = (look.collection, look.service);
        if look.is_wanted(&image.id).await? {
            return Ok(false);
        }
        let seen = collection.store.snapshot();
        let entries: Vec<&v1::Image> = look.images.iter().filter(|i| i.id == image.id).collect();
        let name = entries.iter().flat_map(|entry| names(entry)).next();
        let name = name.unwrap_or(&image.id).to_owned();
        let why = format!(
            "{name} ({}, {} bytes): {reason}, last used {}",
            image.id,
            image.size,
            image.last_used.rfc3339()
        );
        let mut decision = Transaction::new().journal(None, "removing an unused image", why);
        for name in entries.iter().flat_map(|entry| names(entry)) {
            // What is brought again must not be taken for what was there before.
            decision = files::forget(&seen, decision, name);
        }
        match collection.store.commit(decision).await {
            Ok(_) => {}
            Err(CommitError::Stale { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        // A pod may have come meanwhile, and started a container.
        let used = service.images_in_use().await?;
        let (seen, wanted) = (collection.store.snapshot(), wanted_names(collection));
        let is_needed = entries
            .iter()
            .any(|entry| self.need(&seen, entry, &used, &wanted).is_some());
        if is_needed || look.is_wanted(&image.id).await? {
            return Ok(false);
        }
        if let Err(error) = service.remove_image(&image.id).await {
            tracing::warn!(image = name, %error, "cannot remove an unused image");
            return Ok(false);
        }
        look.stayed.remove(&image.id);
        // Only now: an image that stays keeps its age. If the agent dies before this, `prune` does it.
        let forgotten = Transaction::new().delete::<ImageRecord>(&image.id);
        collection.store.commit(forgotten).await?;
        let label = ReasonLabel {
            reason: reason.to_owned(),
        };
        self.metrics.images_collected.get_or_create(&label).inc();
        tracing::info!(
            image = name,
            id = image.id,
            size = image.size,
            reason,
            "removed an image"
        );
        if let Some(changed) = &self.pulled {
            changed();
        }
        Ok(true)
    }
}

impl<S: ImageService> Look<'_, S> {
    /// Returns whether a wanted pod names an image, in any spelling that the runtime understands.
    async fn is_wanted(&mut self, id: &str) -> Result<bool, CollectError> {
        for name in (self.collection.wanted)() {
            if !self.wanted.contains_key(&name) {
                match self.service.image_status(&name).await {
                    Ok(found) => {
                        let id = found.map(|found| found.id);
                        self.wanted.insert(name.clone(), id);
                    }
                    Err(error) if is_momentary(&error) => return Err(error.into()),
                    // The pod cannot start from an image that the runtime does not find by this name. It is asked for again
                    // before each removal.
                    Err(error) => {
                        tracing::debug!(image = name, %error, "the runtime does not know an image by the name that a pod has for it");
                    }
                }
            }
            let found = self.wanted.get(&name).and_then(|found| found.as_deref());
            if found == Some(id) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns whether an error says nothing about the name that was asked for.
fn is_momentary(error: &CriError) -> bool {
    use CriErrorKind::{DeadlineExceeded, ResourceExhausted};
    error.is_unavailable() || [DeadlineExceeded, ResourceExhausted].contains(&error.kind)
}

fn without(images: Vec<Unused>, ids: &HashSet<String>) -> Vec<Unused> {
    let left = images.into_iter().filter(|image| !ids.contains(&image.id));
    left.collect()
}

/// Returns how old the recorded last use of an image in use may become before it is recorded again. The end of its use
/// is recorded at once.
fn exactness(policy: &Policy) -> Duration {
    const MOST: Duration = Duration::from_secs(1800);
    if policy.maximum_age.is_zero() {
        return MOST;
    }
    (policy.maximum_age / 10).min(MOST)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn warn(collection: &Collection, reason: &str, text: impl Into<String>) {
    let event = Event::node(EventType::Warning, reason, text);
    collection.recorder.record(event);
}

/// Tags and digests.
fn names(image: &v1::Image) -> impl Iterator<Item = &str> {
    let names = image.repo_tags.iter().chain(&image.repo_digests);
    names.map(String::as_str)
}

fn wanted_names(collection: &Collection) -> HashSet<String> {
    let wanted = (collection.wanted)();
    let spelt = |name: &String| {
        let full = normalize(name).ok().map(|full| qualified(&full));
        [Some(qualified(name)), full].into_iter().flatten()
    };
    wanted.iter().flat_map(spelt).collect()
}

/// Returns the recorded times of images, by qualified name and by ID.
fn ages(seen: &State, now: Stamp) -> HashMap<String, Ages> {
    let mut known: HashMap<String, Ages> = HashMap::new();
    for (name, record) in seen.with_prefix::<ImageRecord>("") {
        let ages = Ages {
            first_seen: record.first_seen,
            last_used: record.last_used,
        };
        for key in [qualified(name), name.to_string()] {
            let told = known.get(&key).map_or(ages, |known| known.and(ages, now));
            known.insert(key, told);
        }
    }
    known
}

/// The file system that holds images; `None` while the runtime names none. Blocking work runs elsewhere.
async fn disk_of<S: ImageService>(service: &S) -> Result<Option<Disk>, CollectError> {
    let Some(directory) = service.image_directories().await?.into_iter().next() else {
        return Ok(None);
    };
    Ok(blocking::run(move || measure(&directory))
        .await
        .ok()
        .flatten())
}

fn measure(directory: &PathBuf) -> Option<Disk> {
    match nix::sys::statvfs::statvfs(directory) {
        Ok(found) => Some(Disk {
            capacity: found.blocks().saturating_mul(found.fragment_size()),
            available: found
                .blocks_available()
                .saturating_mul(found.fragment_size()),
        }),
        Err(error) => {
            tracing::warn!(path = %directory.display(), %error, "cannot measure the images' file system");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_about_a_name_says_that_there_is_no_such_image() {
        let of = |kind| CriError {
            operation: "image_status",
            object: "x".to_owned(),
            kind,
            message: String::new(),
            source: None,
        };
        let socket = "/run/c.sock".to_owned();
        for (kind, momentary) in [
            (CriErrorKind::Unavailable { socket }, true),
            (CriErrorKind::DeadlineExceeded, true),
            (CriErrorKind::ResourceExhausted, true),
            (CriErrorKind::Other, false),
        ] {
            assert_eq!(is_momentary(&of(kind.clone())), momentary, "{kind:?}");
        }
    }
}

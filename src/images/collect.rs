//! Removes images that nothing needs, when they are too old or their disk is nearly full. Upstream:
//! `realImageGCManager`.
//!
//! An image is needed while a container of any state was made of it, while a pod that is wanted names it, while the
//! runtime has it pinned or makes its sandboxes of it, while an archive of the preload directory holds it, and while it
//! is being brought. Upstream removes what no container was made of, so a node without its registry may lose images that
//! its pods need again.
//!
//! When an image was first seen and last used is on record, so a restart makes no image younger or older. An image that
//! no pod of this agent has used yet has a record under its ID.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;

use super::files::{archive_of, qualified};
use super::{ImageManager, ImageService, prune};
use crate::core::image_gc::{self, Ages, Disk, Policy, Unused};
use crate::core::images::{self, FilesState};
use crate::core::state::{ImageRecord, State, Transaction};
use crate::kuberuntime::cri::CriError;
use crate::store::{CommitError, Store};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::metrics::ReasonLabel;
use crate::types::{PodExt, Stamp, blocking, causes};

/// Upstream's `ImageGCPeriod`.
const PERIOD: Duration = Duration::from_secs(300);
/// The shortest pause between two rounds.
const PAUSE: Duration = Duration::from_secs(5);

/// Why images were not removed that should have been.
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

/// The images that wanted pods name, as they are written there.
pub type WantedImages = Arc<dyn Fn() -> HashSet<String> + Send + Sync>;

/// What garbage collection works with.
pub struct Collection {
    /// The settings.
    pub policy: Policy,
    /// Asked again before each removal.
    pub wanted: WantedImages,
    /// For events about the node.
    pub recorder: Arc<dyn EventRecorder>,
    /// Records.
    pub store: Store,
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

/// What a round came to.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// After how long an image will be too old.
    pub(super) next_due: Option<Duration>,
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
                    tracing::warn!(error = text, "images that nothing needs may have stayed");
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
        let mut gone = HashSet::new();
        for image in image_gc::too_old(&unused, policy, now) {
            if self
                .remove_unused(collection, &images, image, "age", service)
                .await?
            {
                gone.insert(image.id.clone());
            }
        }
        let left: Vec<Unused> = unused
            .into_iter()
            .filter(|i| !gone.contains(&i.id))
            .collect();
        let freed = self
            .free_space(collection, &images, &left, service, now)
            .await?;
        let left: Vec<Unused> = left
            .into_iter()
            .filter(|i| !freed.contains(&i.id))
            .collect();
        Ok(Round {
            next_due: image_gc::next_due(&left, policy, now),
        })
    }

    /// Removes images until enough of their disk is free. Returns those that are gone.
    async fn free_space<S: ImageService>(
        &self,
        collection: &Collection,
        images: &[v1::Image],
        unused: &[Unused],
        service: &S,
        now: Stamp,
    ) -> Result<HashSet<String>, CollectError> {
        let mut gone = HashSet::new();
        let Some(disk) = disk_of(service).await? else {
            return Ok(gone);
        };
        if disk.capacity == 0 {
            let text = "invalid capacity 0 on image filesystem";
            warn(collection, "InvalidDiskCapacity", text);
            return Ok(gone);
        }
        let policy = &collection.policy;
        let Some((wanted, used)) = policy.needed(disk) else {
            return Ok(gone);
        };
        tracing::info!(
            used_percent = used,
            high_threshold = policy.high,
            bytes = wanted,
            low_threshold = policy.low,
            "Disk usage on image filesystem is over the high threshold, trying to free bytes down to the low threshold"
        );
        let mut freed = 0;
        for image in image_gc::to_free_space(unused, policy, now) {
            if freed >= wanted {
                break;
            }
            if self
                .remove_unused(collection, images, image, "space", service)
                .await?
            {
                freed = image.size.saturating_add(freed);
                gone.insert(image.id.clone());
            }
        }
        if freed < wanted {
            let error = CollectError::TooFew { wanted, freed };
            warn(collection, "FreeDiskSpaceFailed", error.to_string());
            return Err(error);
        }
        Ok(gone)
    }

    /// Sorts out the images that nothing needs. The second result records what is needed as used now, and what was never
    /// seen before.
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
        let mut unused = Vec::new();
        let mut transaction = Transaction::new();
        for image in images {
            let of_names = names(image).filter_map(|name| known.get(&qualified(name)).copied());
            let by_id = known.get(&image.id).copied();
            let told = of_names.chain(by_id).reduce(|a, b| a.and(b, now));
            let is_needed = self.is_needed(&seen, image, used, &wanted);
            match told {
                Some(told) if !is_needed => unused.push(Unused {
                    id: image.id.clone(),
                    size: image.size,
                    first_seen: told.first_seen,
                    last_used: told.last_used,
                }),
                _ => {
                    let record = ImageRecord {
                        pulled_ref: None,
                        backoffs: std::collections::BTreeMap::new(),
                        first_seen: told.map_or(now, |told| told.first_seen),
                        last_used: now,
                    };
                    transaction = transaction
                        .expect::<ImageRecord>(&seen, &image.id)
                        .put(&image.id, record);
                }
            }
        }
        (unused, transaction)
    }

    fn is_needed(
        &self,
        seen: &State,
        image: &v1::Image,
        used: &HashSet<String>,
        wanted: &HashSet<String>,
    ) -> bool {
        if image.pinned || used.contains(&image.id) {
            return true;
        }
        names(image).any(|name| {
            let qualified = qualified(name);
            let files = images::files_of(seen, &qualified).map(|(files, _)| files.state);
            let is_under_way = matches!(
                files,
                Some(FilesState::Pulling { .. } | FilesState::Removed)
            );
            used.contains(name)
                || wanted.contains(&qualified)
                || is_under_way
                || self.works.is_busy(name)
                || archive_of(seen, name).is_some()
        })
    }

    /// Removes an image, unless a pod has come that names it. Returns whether it is gone.
    async fn remove_unused<S: ImageService>(
        &self,
        collection: &Collection,
        images: &[v1::Image],
        image: &Unused,
        reason: &str,
        service: &S,
    ) -> Result<bool, CollectError> {
        let Some(listed) = images.iter().find(|listed| listed.id == image.id) else {
            return Ok(false);
        };
        let seen = collection.store.snapshot();
        if self.is_needed(&seen, listed, &HashSet::new(), &wanted_names(collection)) {
            return Ok(false);
        }
        let name = names(listed).next().unwrap_or(&image.id);
        let why = format!(
            "{name} ({}, {} bytes): {reason}, last used {}",
            image.id,
            image.size,
            image.last_used.rfc3339()
        );
        let decision = Transaction::new().delete::<ImageRecord>(&image.id).journal(
            None,
            "removing an unused image",
            why,
        );
        collection.store.commit(decision).await?;
        if let Err(error) = service.remove_image(&image.id).await {
            tracing::warn!(image = name, %error, "cannot remove an image that nothing needs");
            return Ok(false);
        }
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
    (collection.wanted)()
        .iter()
        .map(|name| qualified(name))
        .collect()
}

/// What the records tell, by qualified name and by ID.
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
            tracing::warn!(path = %directory.display(), %error, "cannot read how full the images' file system is");
            None
        }
    }
}

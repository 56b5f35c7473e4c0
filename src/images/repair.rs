//! Images whose files cannot be believed: found, removed while a source of them answers, pulled or imported again.
//!
//! Comes in: the records of the earlier boot, failures of containers. Goes out: RemoveImage, and a pull or an import
//! that unpacks anew. What is a suspect is decided in `core::images`.
//!
//! `heal` removes suspects, `rounds` schedules the checks of images.
//!
//! **Invariant:** every step can be made again: what was begun in another life is found by the records, and an image that
//! was removed is pulled or imported again.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;

use super::fetch::Synced;
use super::heal::LOOK_AGAIN;
use super::keyring::{self, Credentials};
use super::{ImageManager, ImageService, Reporter, files, normalize, qualified};
use crate::core::images::{self, AfterFailure, Evidence, FilesState, ImageFiles, Standing};
use crate::core::state::{State, Transaction};
use crate::kuberuntime::cri::CriError;
use crate::store::{CommitError, Store};
use crate::types::Stamp;
use crate::types::containers::container_of;
use crate::types::events::{EventRecorder, EventType};

/// Time that the runtime has to complete a pull without a waiter.
const PULL_KEPT: Duration = Duration::from_secs(3600);
/// Longest text of an error in an event.
const MAX_WHY: usize = 512;

/// An image that a pod wants.
#[derive(Clone, Copy)]
pub(super) struct Wish<'a> {
    pub(super) image: &'a str,
    pub(super) credentials: &'a [Credentials],
    pub(super) sandbox: Option<&'a v1::PodSandboxConfig>,
    /// True if its registry may be asked.
    pub(super) may_pull: bool,
}

impl ImageManager {
    /// Returns whether the records require a check of the image before its use. Cheap.
    pub(super) fn needs_look(&self, store: &Store, image: &str) -> bool {
        let seen = store.snapshot();
        let is_open = files::of(&seen, image).is_some_and(|(files, _)| is_open(&files.state));
        is_open && !self.works.is_busy(image)
    }

    /// Looks at an image whose record is open, and removes it if it is a suspect of which a source answers. Returns what
    /// it stands for now; a runtime that does not answer leaves it as it is.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub(super) async fn make_usable<S: ImageService>(
        &self,
        wish: Wish<'_>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<Standing, CommitError> {
        self.settle(Some(wish.image), service, store, report)
            .await?;
        let told = |error: CriError| {
            tracing::warn!(image = wish.image, %error, "cannot check whether the image is complete");
            Standing::Trusted
        };
        let before = match self.look(wish.image, service, store).await {
            Ok((standing, _)) => standing,
            Err(error) => return Ok(told(error)),
        };
        if before != Standing::Suspect {
            return Ok(before);
        }
        self.heal(Some(wish), service, store, report).await?;
        // The question to its registry may have brought another image under this name.
        self.settle(Some(wish.image), service, store, report)
            .await?;
        Ok(match self.look(wish.image, service, store).await {
            Ok((standing, _)) => standing,
            Err(error) => told(error),
        })
    }

    /// Notes that a container could not be made or started. If `error` points to the files of its image, the image is a
    /// suspect from now on, and is removed and pulled or imported again at its next use. Anything else does nothing.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub async fn container_failed<S: ImageService>(
        &self,
        pod: &Pod,
        (container, image): (&str, &str),
        error: &str,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<(), CommitError> {
        let Some(evidence) = images::evidence(error) else {
            return Ok(());
        };
        let spec = container_of(pod, container);
        let is_own = spec.is_some_and(|spec| images::runs_own_program(&spec.container));
        if evidence == Evidence::Format && !is_own {
            return Ok(());
        }
        let Ok(image) = normalize(image) else {
            return Ok(());
        };
        let report = Reporter {
            pod: Some(pod),
            container: Some(container),
            recorder,
        };
        self.doubt(&image, (evidence, error), service, store, &report)
            .await
            .map(drop)
    }

    /// Notes that a sandbox could not be made. If `error` points to the files of the image that sandboxes are made of,
    /// that image is a suspect, is removed while a source of it answers, and pulled or imported again; sandboxes wait
    /// for that. Anything else does nothing.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub async fn sandbox_failed<S: ImageService>(
        &self,
        pod: &Pod,
        error: &str,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<(), CommitError> {
        // A sandbox whose program fails has been made.
        let Some(evidence @ Evidence::Storage) = images::evidence(error) else {
            return Ok(());
        };
        let report = Reporter {
            pod: Some(pod),
            container: None,
            recorder,
        };
        let mut is_doubted = false;
        for image in self.sandbox_images(service, store).await {
            is_doubted |= self
                .doubt(&image, (evidence, error), service, store, &report)
                .await?;
        }
        if is_doubted {
            self.sandboxes_wait.send_replace(true);
            self.doubting.notify_one();
        }
        Ok(())
    }

    /// The images that sandboxes are made of. Where the runtime only says which images are pinned, those of archives are none,
    /// unless they are named as such images are.
    async fn sandbox_images<S: ImageService>(&self, service: &S, store: &Store) -> Vec<String> {
        let mut images = match service.sandbox_images().await {
            Ok(images) => images,
            Err(error) => {
                tracing::warn!(%error, "the runtime does not report the image of a sandbox");
                return Vec::new();
            }
        };
        let seen = store.snapshot();
        if images.len() > 1 {
            images.retain(|image| {
                let is_pause = keyring::repository(image).rsplit('/').next() == Some("pause");
                is_pause || files::archive_of(&seen, image).is_none()
            });
        }
        images
    }

    /// Makes an image that is there a suspect, if the evidence counts. Returns whether it did.
    async fn doubt<S: ImageService>(
        &self,
        image: &str,
        (evidence, error): (Evidence, &str),
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<bool, CommitError> {
        let (standing, found) = match self.look(image, service, store).await {
            Ok(looked) => looked,
            Err(error) => {
                tracing::warn!(image, %error, "cannot check the image of a container that failed");
                return Ok(false);
            }
        };
        let (Some(found), boot) = (found, self.clock.now().boot) else {
            return Ok(false);
        };
        let suspected = files::of(&store.snapshot(), image).and_then(|(files, _)| files.suspected);
        if images::may_share_damage(evidence, standing, suspected, boot) {
            return self
                .doubt_shared_layers(image, &found.id, service, store, report)
                .await;
        }
        if !images::makes_suspect(evidence, standing, suspected, boot) {
            return Ok(false);
        }
        let why = match evidence {
            Evidence::Storage => "the runtime misses files of it",
            Evidence::Format => "its program is in no format that the kernel knows",
            Evidence::Program => "its program does not exist",
        };
        let why = format!("{why}: {}", shortened(error));
        let now = self.clock.now();
        files::commit(store, |seen| {
            let old = files::of(seen, image).map(|(files, _)| files);
            let next = images::suspect(old.as_ref(), image, &found.id, &why, Some(boot));
            files::put(seen, Transaction::new(), &next, now)
        })
        .await?;
        self.tell_suspect(image, &why, report);
        Ok(true)
    }

    /// Makes suspects of an image whose repair has not helped and of those that have its lowest layer, so that all of them are
    /// removed together. Only if one of the others was no suspect in this boot: otherwise the cause is elsewhere. Returns
    /// whether it did.
    async fn doubt_shared_layers<S: ImageService>(
        &self,
        image: &str,
        id: &str,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<bool, CommitError> {
        let siblings = match siblings(image, id, service).await {
            Ok(siblings) => siblings,
            Err(error) => {
                tracing::warn!(image, %error, "cannot list images that share layers with a suspect image");
                return Ok(false);
            }
        };
        let now = self.clock.now();
        let why = format!("a repair of {image} has not helped, which has layers of it");
        let own = "its repair has not helped, other images have layers of it";
        let mut doubted = Vec::new();
        for (name, id) in siblings {
            let is_new = files::commit(store, |seen| {
                let old = files::of(seen, &name).map(|(files, _)| files);
                let is_open = old.as_ref().is_some_and(|old| {
                    old.suspected == Some(now.boot.0)
                        || matches!(old.state, FilesState::Suspect { .. } | FilesState::Removed)
                });
                if is_open || self.works.is_busy(&name) {
                    return Transaction::new();
                }
                let next = images::suspect(old.as_ref(), &name, &id, &why, Some(now.boot));
                files::put(seen, Transaction::new(), &next, now)
            });
            if is_new.await? {
                doubted.push(name);
            }
        }
        if doubted.is_empty() {
            return Ok(false);
        }
        files::commit(store, |seen| {
            let old = files::of(seen, image).map(|(files, _)| files);
            let next = images::suspect(old.as_ref(), image, id, own, Some(now.boot));
            files::put(seen, Transaction::new(), &next, now)
        })
        .await?;
        self.tell_suspect(image, own, report);
        // They are none of the pod's business.
        let report = Reporter {
            pod: None,
            container: None,
            recorder: report.recorder,
        };
        for name in doubted {
            self.tell_suspect(&name, &why, &report);
        }
        Ok(true)
    }

    /// Notes that files of an image which is there were not written to the disk, see [`images::lost`].
    pub(super) async fn files_lost(
        &self,
        image: &str,
        id: &str,
        error: &str,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        self.lost().insert(qualified(image));
        let now = self.clock.now();
        let why = format!("its files were not written: {}", shortened(error));
        let is_new = AtomicBool::new(false);
        files::commit(store, |seen| {
            let old = files::of(seen, image).map(|(files, _)| files);
            let next = images::lost(old.as_ref(), image, id, &why, now.boot);
            if old.as_ref() == Some(&next) {
                return Transaction::new();
            }
            let was_suspected = old.and_then(|old| old.suspected) == Some(now.boot.0);
            is_new.store(!was_suspected, Ordering::Relaxed);
            files::put(seen, Transaction::new(), &next, now)
        })
        .await?;
        if is_new.load(Ordering::Relaxed) {
            self.tell_suspect(image, &why, report);
        }
        Ok(())
    }

    /// Brings the files of an image to the disk that was pulled before, and tells whether that worked. It does not where
    /// files were lost: the kernel reports that once.
    async fn is_synced_late<S: ImageService>(&self, image: &str, service: &S) -> bool {
        let is_lost = self.is_lost(image);
        !is_lost && self.bring_to_disk(image, None, service).await == Synced::Yes
    }

    /// Adds, once, the images of which an earlier run of the agent has recorded in this boot that files were not written.
    pub(super) fn recall_lost(&self, store: &Store) {
        self.recalled.call_once(|| {
            let boot = self.clock.now().boot.0;
            let state = store.snapshot();
            let lost = images::all_files(&state).filter(|(files, _)| files.lost == Some(boot));
            self.lost()
                .extend(lost.map(|(files, _)| qualified(&files.image)));
        });
    }

    /// Returns whether files of an image that is there were not written in this boot.
    pub(super) fn is_lost(&self, image: &str) -> bool {
        self.lost().contains(&qualified(image))
    }

    /// Notes that an image is gone, so that a pull or import unpacks it anew.
    pub(super) fn forget_lost(&self, image: &str) {
        self.lost().remove(&qualified(image));
    }

    fn lost(&self) -> MutexGuard<'_, HashSet<String>> {
        // Names are put and removed one by one.
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn look_at_suspects<S: ImageService>(
        &self,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        self.settle(None, service, store, report).await?;
        self.heal(None, service, store, report).await
    }

    /// The standing of an image, and the image where it is there.
    pub(super) async fn look<S: ImageService>(
        &self,
        image: &str,
        service: &S,
        store: &Store,
    ) -> Result<(Standing, Option<v1::Image>), CriError> {
        let found = service.image_status(image).await?;
        let seen = store.snapshot();
        let standing = self.standing(&seen, image, found.as_ref());
        Ok((standing, found))
    }

    pub(super) fn standing(
        &self,
        seen: &State,
        image: &str,
        found: Option<&v1::Image>,
    ) -> Standing {
        let record = files::of(seen, image);
        let record = record.as_ref().map(|(files, at)| (files, *at));
        let id = found.map(|found| found.id.as_str());
        let is_whole = id.is_some_and(|id| images::is_whole(seen, id));
        images::standing(record, self.clock.now().boot, id, is_whole)
    }

    /// Has the runtime let go, once in each run of the agent, of what pulls of an earlier boot held.
    async fn release(&self) {
        let Some(preload) = &self.preload else {
            return;
        };
        let released = self.released.get_or_try_init(|| async {
            let count = preload.release(self.clock.now()).await?;
            tracing::info!(count, "released the runtime's leases of interrupted pulls");
            Ok::<(), super::ImportError>(())
        });
        if let Err(error) = released.await {
            tracing::warn!(%error, "cannot release the leases of interrupted pulls, the runtime may take partial images for complete");
        }
    }

    /// Gives pulls that nobody works on any more their outcome: whole after a sync, a suspect after a power loss, or
    /// nothing. A suspect that somebody else removed or replaced is none. Of one image, or of all.
    pub(super) async fn settle<S: ImageService>(
        &self,
        only: Option<&str>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        self.recall_lost(store);
        let seen = store.snapshot();
        let only = only.map(qualified);
        let left: Vec<(ImageFiles, Stamp)> = images::all_files(&seen)
            .filter(|(files, _)| {
                matches!(
                    files.state,
                    FilesState::Pulling { .. } | FilesState::Suspect { .. } | FilesState::Removed
                )
            })
            .filter(|(files, _)| only.as_ref().is_none_or(|o| *o == qualified(&files.image)))
            .filter(|(files, _)| !self.works.is_busy(&files.image))
            .collect();
        let boot = self.clock.now().boot;
        let is_cut_off = |(files, at): &(ImageFiles, Stamp)| {
            matches!(files.state, FilesState::Pulling { .. }) && at.boot != boot
        };
        if left.iter().any(is_cut_off) {
            self.release().await;
        }
        for (files, at) in left {
            let image = files.image.as_str();
            let found = match service.image_status(image).await {
                Ok(found) => found,
                Err(error) => {
                    tracing::warn!(image, %error, "cannot find out how an interrupted pull ended");
                    continue;
                }
            };
            let now = self.clock.now();
            // The runtime may still be at it.
            let is_over = at.boot != now.boot || now.since(at) >= PULL_KEPT;
            if !matches!(files.state, FilesState::Pulling { .. }) {
                self.settle_suspect((&files, at), found, service, store, report)
                    .await?;
                continue;
            }
            let standing = self.standing(&store.snapshot(), image, found.as_ref());
            match (standing, found) {
                (Standing::Unsynced, Some(found)) => {
                    if self.is_synced_late(image, service).await {
                        self.record_whole(image, &found.id, store, report).await?;
                    }
                }
                (Standing::Suspect, Some(found)) => {
                    let why = "the machine went down before its files were known to be on the disk";
                    let is_new = files::commit(store, |seen| match files::of(seen, image) {
                        Some((old, since)) if old == files && since == at => {
                            let next = images::suspect(Some(&old), image, &found.id, why, None);
                            files::put(seen, Transaction::new(), &next, now)
                        }
                        _ => Transaction::new(),
                    })
                    .await?;
                    if is_new {
                        self.tell_suspect(image, why, report);
                    }
                }
                _ if !is_over => {}
                _ => {
                    files::commit(store, |seen| match files::of(seen, image) {
                        Some((old, since))
                            if old == files
                                && since == at
                                && images::failed(Some(&old)) != AfterFailure::Keep =>
                        {
                            files::failed(seen, Transaction::new(), image, now)
                        }
                        _ => Transaction::new(),
                    })
                    .await?;
                }
            }
        }
        Ok(())
    }

    /// Gives all pulls of an earlier boot their outcome, before a pull brings one of their images by another name.
    pub(super) async fn settle_earlier<S: ImageService>(
        &self,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        let boot = self.clock.now().boot;
        let is_left = |(files, at): (ImageFiles, Stamp)| {
            matches!(files.state, FilesState::Pulling { .. }) && at.boot != boot
        };
        if !images::all_files(&store.snapshot()).any(is_left) {
            return Ok(());
        }
        let report = Reporter {
            pod: None,
            container: None,
            recorder: report.recorder,
        };
        self.settle(None, service, store, &report).await
    }

    /// Gives a suspect that somebody removed or replaced its outcome. `found` is what the runtime has under its name.
    async fn settle_suspect<S: ImageService>(
        &self,
        (files, at): (&ImageFiles, Stamp),
        found: Option<v1::Image>,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        let (image, now) = (files.image.as_str(), self.clock.now());
        let Some(found) = found else {
            if files.state == FilesState::Removed {
                return Ok(());
            }
            let forget = |seen: &State| files::forget(seen, Transaction::new(), image);
            return change(store, (files, at), forget).await;
        };
        if found.id == files.id {
            if self.standing(&store.snapshot(), image, Some(&found)) != Standing::Whole {
                return Ok(());
            }
            let next = ImageFiles {
                state: FilesState::Whole,
                ..files.clone()
            };
            let put = |seen: &State| files::put(seen, Transaction::new(), &next, now);
            change(store, (files, at), put).await?;
            self.tell_repaired(image, "there again by another name", report);
            return Ok(());
        }
        if at.boot == now.boot {
            // The agent may have brought it, by asking the registry about the suspect.
            if !self.is_synced_late(image, service).await {
                self.note(&qualified(image), LOOK_AGAIN);
                return Ok(());
            }
            return self.record_whole(image, &found.id, store, report).await;
        }
        tracing::info!(image, id = found.id, "a suspect image was replaced");
        let next = images::replaced(files, &found.id);
        let put = |seen: &State| files::put(seen, Transaction::new(), &next, now);
        change(store, (files, at), put).await
    }

    /// Records that an image which is there is on the disk.
    async fn record_whole(
        &self,
        image: &str,
        id: &str,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        let now = self.clock.now();
        let (_, repaired) = files::outcome(&store.snapshot(), image, id);
        files::commit(store, |seen| {
            files::finished(seen, Transaction::new(), image, id, now).0
        })
        .await?;
        if repaired {
            self.tell_repaired(image, "there again", report);
        }
        Ok(())
    }

    pub(super) fn tell_suspect(&self, image: &str, why: &str, report: &Reporter<'_>) {
        tracing::warn!(image, why, "image is suspect");
        self.metrics.image_suspects.inc();
        let text = format!("Image \"{image}\" is suspect: {why}");
        report.tell(EventType::Warning, "ImageSuspect", text);
    }

    pub(super) fn tell_repaired(&self, image: &str, how: &str, report: &Reporter<'_>) {
        tracing::info!(image, how, "image was repaired");
        self.metrics.image_repairs.inc();
        self.announce(image);
        let text = format!("Image \"{image}\" was repaired: it was removed and is {how}");
        report.tell(EventType::Normal, "ImageRepaired", text);
    }
}

/// Names and IDs of the other images that have the lowest layer of an image. Runtimes unpack a layer on top of those below
/// it: images without that one share none.
async fn siblings<S: ImageService>(
    image: &str,
    id: &str,
    service: &S,
) -> Result<Vec<(String, String)>, CriError> {
    let Some(lowest) = service.image_layers(image).await?.into_iter().next() else {
        return Ok(Vec::new());
    };
    let mut siblings = Vec::new();
    for other in service.list_images().await? {
        if other.id == id || service.image_layers(&other.id).await?.first() != Some(&lowest) {
            continue;
        }
        let names = if other.repo_tags.is_empty() {
            other.repo_digests
        } else {
            other.repo_tags
        };
        siblings.extend(names.into_iter().map(|name| (name, other.id.clone())));
    }
    Ok(siblings)
}

/// Returns whether an image in that state may have to be checked before its use.
pub(super) fn is_open(state: &FilesState) -> bool {
    !matches!(state, FilesState::Trusted | FilesState::Whole)
}

/// Changes the record of an image, unless somebody else has.
async fn change(
    store: &Store,
    (files, at): (&ImageFiles, Stamp),
    decide: impl Fn(&State) -> Transaction,
) -> Result<(), CommitError> {
    files::commit(store, |seen| match files::of(seen, &files.image) {
        Some((old, since)) if old == *files && since == at => decide(seen),
        _ => Transaction::new(),
    })
    .await
    .map(drop)
}

pub(super) fn shortened(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_WHY))
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0);
    &text[..end]
}

//! The preload directory: archives of images that are imported at the start and whenever they change, and pinned.
//!
//! Comes in: files in the directory, what the runtime has. Goes out: imports, records of them (`imagearchives` in the
//! table of objects), events about archives that cannot be imported. Whether a file is to be read or imported is decided
//! in `core::images`. An archive is a source for the repair of its images, and it keeps them from being collected.
//!
//! **Invariant:** an unchanged archive is imported again only when the runtime lacks one of its images.
//!
//! **Invariant:** no archive counts as gone while the file system of the directory is not mounted.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::{OwnedMutexGuard, Semaphore, watch};

use super::archive::images_in;
use super::fetch::Synced;
use super::files::{self, Work};
use super::import::Importer;
use super::{ImageManager, ImageService, Reporter, qualified};
use crate::core::images::{self, ArchiveRecord, ArchiveStamp, ArchiveStep, Evidence};
use crate::core::state::{ImageRecord, State, Transaction};
use crate::store::mounts::Mount;
use crate::store::{CommitError, Store};
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::{Pace, Stamp, blocking, text};

/// Ends of the names of archives. Those with a compression that is not supported are logged.
const ENDINGS: [&str; 8] = [
    ".tar",
    ".tar.gz",
    ".tgz",
    ".tar.zst",
    ".tar.zstd",
    ".tar.xz",
    ".tar.bz2",
    ".tar.lz4",
];
/// A file that changed this shortly ago may still be written.
const QUIET: Duration = Duration::from_secs(2);
/// One archive is read at a time: that may take long, and must not take the turns of what pods wait for.
static READS: Semaphore = Semaphore::const_new(1);
/// Time that a pod waits for the first listing of the directory after the start.
const FIRST_LOOK: Duration = Duration::from_secs(30);
/// Timeout and poll interval for the CRI part of the runtime to show an imported image.
const SEEN: (u32, Duration) = (50, Duration::from_millis(100));

/// The preload directory.
pub(super) struct Preload {
    dir: PathBuf,
    /// Tells whether its file system is missing.
    pub(super) mount: Option<Arc<Mount>>,
    /// Limits how often a missing file system is logged.
    pace: Pace,
    importer: Arc<dyn Importer>,
    /// Archives that can be imported, by file name.
    known: Mutex<BTreeMap<String, Archive>>,
    /// One import of an image at a time, by qualified name.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// True once the directory was listed. Also wakes waiters when an archive becomes known.
    looked: watch::Sender<bool>,
    hints: watch::Sender<u64>,
    watcher: Mutex<Option<RecommendedWatcher>>,
}

/// An archive in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Archive {
    name: String,
    path: PathBuf,
    stamp: ArchiveStamp,
    /// As they are written in it.
    images: Vec<String>,
}

impl Preload {
    pub(super) fn new(dir: PathBuf, importer: Arc<dyn Importer>) -> Self {
        Self {
            dir,
            mount: None,
            pace: Pace::default(),
            importer,
            known: Mutex::default(),
            turns: Mutex::default(),
            looked: watch::Sender::new(false),
            hints: watch::Sender::new(0),
            watcher: Mutex::default(),
        }
    }

    /// Changes when the directory may have changed.
    pub(super) fn hints(&self) -> watch::Receiver<u64> {
        self.hints.subscribe()
    }

    pub(super) async fn release(&self, now: Stamp) -> Result<usize, super::ImportError> {
        self.importer.release(now).await
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Archive>> {
        // Entries are put and removed whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this version of an archive was read and not refused.
    fn knows(&self, name: &str, stamp: ArchiveStamp) -> bool {
        let known = self.known();
        known.get(name).is_some_and(|known| known.stamp == stamp)
    }

    fn holding(&self, image: &str) -> Option<Archive> {
        let image = qualified(image);
        let known = self.known();
        let mut archives = known.values();
        archives
            .find(|archive| archive.images.iter().any(|i| qualified(i) == image))
            .cloned()
    }

    /// Adds an archive that can be imported, and wakes those who wait for one of its images.
    fn add(&self, archive: Archive) {
        self.known().insert(archive.name.clone(), archive);
        self.looked.send_modify(|_| {});
    }

    /// Waits for the turn to import an archive: until nobody imports one of its images.
    async fn turn(&self, archive: &Archive) -> Vec<OwnedMutexGuard<()>> {
        // In one order, so that nobody waits for each other.
        let names: BTreeSet<String> = archive.images.iter().map(|i| qualified(i)).collect();
        let mut turn = Vec::new();
        for name in names {
            let of_image = {
                let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
                turns.retain(|_, of_image| Arc::strong_count(of_image) > 1);
                Arc::clone(turns.entry(name).or_default())
            };
            turn.push(of_image.lock_owned().await);
        }
        turn
    }

    /// Waits until the directory was looked at once, but not for ever.
    pub(super) async fn first_look(&self) {
        self.look_for(|| false).await;
    }

    /// As [`Self::first_look`], and not longer than until `is_found`.
    async fn look_for(&self, is_found: impl Fn() -> bool) {
        let mut looked = self.looked.subscribe();
        let seen = looked.wait_for(|looked| *looked || is_found());
        if tokio::time::timeout(FIRST_LOOK, seen).await.is_err() {
            tracing::warn!(path = %self.dir.display(), "the preload directory is not listed yet, a pod proceeds without it");
        }
    }

    /// Takes the pins off those of these images that no archive holds any more.
    async fn unpin(&self, archive: &str, images: &[String]) {
        let mut unpinned = images.to_vec();
        unpinned.retain(|image| self.holding(image).is_none());
        if unpinned.is_empty() {
            return;
        }
        if let Err(error) = self.importer.unpin(&unpinned).await {
            tracing::warn!(archive, %error, "cannot unpin images in the runtime");
        }
    }

    /// Returns whether the file system of the directory is not mounted, and logs that. The watcher saw another directory then.
    async fn is_missing(&self, now: Stamp) -> bool {
        let Some(mount) = self.mount.clone() else {
            return false;
        };
        let path = self.dir.display();
        let missing = match blocking::run(move || mount.missing()).await {
            Ok(Ok(missing)) => missing,
            Ok(Err(error)) => {
                tracing::warn!(%path, %error, "cannot check whether the file system of the preload directory is mounted");
                None
            }
            Err(error) => {
                tracing::warn!(%path, %error, "checking the preload directory failed");
                None
            }
        };
        let why = missing.as_deref();
        let is_due = self.pace.due("preload", why.as_slice(), now);
        if let Some(why) = why {
            *self.watcher() = None;
            if is_due == [true] {
                tracing::warn!(
                    reason = why,
                    "not listing the preload directory, keeping the records of archives"
                );
            }
        }
        why.is_some()
    }

    /// Makes the directory and watches it. Without a watcher it is looked at periodically.
    async fn watch(&self) {
        if self.watcher().is_some() {
            return;
        }
        let (dir, hints) = (self.dir.clone(), self.hints.clone());
        let made = blocking::run(move || watched(&dir, hints)).await;
        match made.unwrap_or_else(|error| Err(notify::Error::io(io::Error::other(error)))) {
            Ok(made) => *self.watcher() = Some(made),
            Err(error) => {
                tracing::debug!(path = %self.dir.display(), %error, "cannot watch the preload directory, polling it");
            }
        }
    }

    fn watcher(&self) -> MutexGuard<'_, Option<RecommendedWatcher>> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes the directory and a watcher of it that changes `hints`. Blocking.
fn watched(dir: &Path, hints: watch::Sender<u64>) -> notify::Result<RecommendedWatcher> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(notify::Error::io)?;
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if event.map_or(true, |e| !matches!(e.kind, EventKind::Access(_))) {
            hints.send_modify(|count| *count = count.wrapping_add(1));
        }
    })?;
    watcher.watch(dir, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

impl ImageManager {
    /// Returns whether an archive can restore an image: the archive contains it and was imported in its current
    /// version.
    pub(super) fn has_archive(&self, image: &str, seen: &State) -> bool {
        let archive = self.preload.as_ref().and_then(|p| p.holding(image));
        archive.is_some_and(|archive| {
            let record = record_of(seen, &archive.name);
            record.is_some_and(|r| r.error.is_empty() && r.stamp == archive.stamp)
        })
    }

    /// Returns whether an image can be imported from an archive now: the file is the version that was imported, and is
    /// readable to its end.
    pub(super) async fn can_import(&self, image: &str, seen: &State) -> bool {
        let Some(preload) = self
            .preload
            .as_ref()
            .filter(|_| self.has_archive(image, seen))
        else {
            return false;
        };
        let Some(archive) = preload.holding(image) else {
            return false;
        };
        let (wanted, path, stamp) = (qualified(image), archive.path, archive.stamp);
        let read = blocking::run(move || {
            let is_same = std::fs::metadata(&path).is_ok_and(|m| stamp_of(&m) == stamp);
            let images = is_same.then(|| images_in(&path).ok()).flatten();
            images.is_some_and(|images| images.iter().any(|i| qualified(i) == wanted))
        });
        let is_sound = read.await.unwrap_or_else(|error| {
            tracing::warn!(archive = archive.name, %error, "cannot read an archive");
            false
        });
        if !is_sound {
            tracing::warn!(
                image,
                archive = archive.name,
                "cannot repair a suspect image from an archive: it is gone, has changed or is damaged"
            );
        }
        is_sound
    }

    /// Imports the archive that holds an image which is not there. An import that fails is reported, and leaves the
    /// image to a pull. Returns whether an archive holds it, so that it may be there now.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub(super) async fn bring_from_archive<S: ImageService>(
        &self,
        image: &str,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<bool, CommitError> {
        let Some(preload) = &self.preload else {
            return Ok(false);
        };
        preload.look_for(|| preload.holding(image).is_some()).await;
        let Some(archive) = preload.holding(image) else {
            return Ok(false);
        };
        let _turn = preload.turn(&archive).await;
        // It may have been replaced meanwhile.
        let Some(archive) = preload.holding(image).filter(|now| *now == archive) else {
            return Ok(preload.holding(image).is_some());
        };
        // Another pod may have brought it meanwhile; a runtime that does not answer imports nothing either.
        if matches!(service.image_status(image).await, Ok(None)) {
            self.import(preload, &archive, service, store, report)
                .await?;
        }
        Ok(true)
    }

    /// Looks at the directory, and imports what is new or missing. Returns whether another look is due soon: a file may
    /// still be written, the directory is not mounted, or the runtime is not ready to import.
    ///
    /// # Errors
    /// When it cannot be recorded; the next look goes on.
    pub(super) async fn look_at_archives<S: ImageService>(
        &self,
        is_first: bool,
        service: &S,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<bool, CommitError> {
        let Some(preload) = &self.preload else {
            return Ok(false);
        };
        let report = Reporter {
            pod: None,
            container: None,
            recorder,
        };
        let found = match self.list_archives(preload).await {
            Look::Listed(found) => found,
            Look::NotMounted => {
                preload.looked.send_replace(true);
                return Ok(true);
            }
            Look::Unreadable => {
                preload.looked.send_replace(true);
                return Ok(false);
            }
        };
        self.forget_gone(preload, &found, store).await?;
        if found.is_empty() {
            preload.looked.send_replace(true);
            return Ok(false);
        }
        let present = names_present(service).await;
        let is_present = |image: &str| {
            present
                .as_ref()
                .is_none_or(|p| p.contains(&qualified(image)))
        };
        let (mut due, mut is_due) = (Vec::new(), false);
        for listed in found {
            let record = record_of(&store.snapshot(), &listed.name);
            // One that waits for the runtime is tried again, also if it was refused in an earlier run.
            let is_again = is_first || preload.knows(&listed.name, listed.stamp);
            match images::archive_step(record.as_ref(), listed.stamp, is_again, is_present) {
                ArchiveStep::Read if is_young(listed.stamp, self.clock.now()) => is_due = true,
                ArchiveStep::Read => {
                    due.extend(self.read_archive(preload, listed, store, recorder).await?);
                }
                step => {
                    let Some(record) = record.filter(|record| record.error.is_empty()) else {
                        continue;
                    };
                    let archive = listed.with(record.images);
                    preload.add(archive.clone());
                    if step == ArchiveStep::Import {
                        due.push(archive);
                    }
                }
            }
        }
        preload.looked.send_replace(true);
        for archive in due {
            let _turn = preload.turn(&archive).await;
            // A pod may have had it imported meanwhile.
            let record = record_of(&store.snapshot(), &archive.name);
            let is_done = record.is_some_and(|r| r.stamp == archive.stamp && r.error.is_empty());
            if is_done && self.has_all(&archive, service).await {
                continue;
            }
            let done = self
                .import(preload, &archive, service, store, &report)
                .await?;
            is_due |= done == Import::Postponed;
        }
        Ok(is_due)
    }

    /// Lists the directory, and watches it from then on.
    async fn list_archives(&self, preload: &Preload) -> Look {
        if preload.is_missing(self.clock.now()).await {
            return Look::NotMounted;
        }
        preload.watch().await;
        let found = match list(&preload.dir).await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(path = %preload.dir.display(), %error, "cannot look at the preload directory");
                return Look::Unreadable;
            }
        };
        // What is listed between two looks at the mount was mounted all the time.
        if preload.is_missing(self.clock.now()).await {
            return Look::NotMounted;
        }
        Look::Listed(found)
    }

    /// Reads which images an archive holds. Returns it for its import; `None` for one that cannot be used.
    ///
    /// # Errors
    /// When the refusal of a damaged one cannot be recorded.
    async fn read_archive(
        &self,
        preload: &Preload,
        mut listed: Listed,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<Option<Archive>, CommitError> {
        if preload.knows(&listed.name, listed.stamp) {
            // It was read, and waits for the runtime.
            return Ok(preload.known().get(&listed.name).cloned());
        }
        let (path, problem) = (listed.path.clone(), listed.problem.take());
        let read = blocking::run_in(&READS, move || match problem {
            Some(problem) => Err(problem),
            None => images_in(&path).map_err(|error| error.to_string()),
        });
        match read.await {
            Ok(Ok(images)) => {
                let archive = listed.with(images);
                preload.add(archive.clone());
                Ok(Some(archive))
            }
            Ok(Err(error)) => {
                let of = (listed.name.as_str(), listed.stamp);
                self.refuse(preload, of, error, store, recorder).await?;
                Ok(None)
            }
            Err(error) => {
                tracing::warn!(archive = listed.name, %error, "cannot read an archive");
                Ok(None)
            }
        }
    }

    async fn has_all<S: ImageService>(&self, archive: &Archive, service: &S) -> bool {
        for image in &archive.images {
            if !matches!(service.image_status(image).await, Ok(Some(_))) {
                return false;
            }
        }
        true
    }

    /// Imports an archive; the caller has the turn. One that cannot be imported is refused and recorded; one that the runtime is
    /// not ready for stays as it is.
    ///
    /// # Errors
    /// When it cannot be recorded.
    async fn import<S: ImageService>(
        &self,
        preload: &Preload,
        archive: &Archive,
        service: &S,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<Import, CommitError> {
        if let Err(error) = service.before_pulls(&archive.name).await {
            let text = error.to_string();
            if preload.pace.is_due(&archive.name, &text, self.clock.now()) {
                tracing::warn!(archive = archive.name, %error, "cannot import an archive yet, retrying");
            }
            return Ok(Import::Postponed);
        }
        preload.pace.over(&archive.name);
        // What a power cut left behind must not pass for what this import brings: the runtime believes it.
        for image in &archive.images {
            self.settle(Some(image.as_str()), service, store, report)
                .await?;
        }
        let mut works: Vec<(&String, Work)> = Vec::new();
        for image in &archive.images {
            works.push((image, self.begin_work(image).await));
        }
        self.begin_import(archive, service, store).await?;
        let opened = self.open_disk(service).await;
        fail::fail_point!("images::preload::after_begin");
        tracing::info!(archive = archive.name, images = ?archive.images, "importing an archive");
        let import = || async {
            let imported = preload.importer.import(&archive.path, &archive.images);
            imported.await.map_err(|error| error.to_string())
        };
        let mut imported = import().await;
        if let Err(why) = &imported
            && images::evidence(why) == Some(Evidence::Storage)
            && self
                .remove_suspects(&archive.images, service, store, report)
                .await?
        {
            tracing::info!(archive = archive.name, why, "importing an archive again");
            self.begin_import(archive, service, store).await?;
            imported = import().await;
        }
        if let Err(why) = &imported
            && self
                .remove_unreadable(
                    (&archive.path, &archive.images),
                    why,
                    &*preload.importer,
                    service,
                    (store, report),
                )
                .await?
        {
            tracing::info!(archive = archive.name, why, "importing an archive again");
            self.begin_import(archive, service, store).await?;
            imported = import().await;
        }
        let ids = match imported {
            Ok(()) => self.ids_of(&archive.images, service).await,
            Err(why) => Err(why),
        };
        match ids {
            Ok(ids) => {
                let synced = self.bring_to_disk(&archive.name, opened, service).await;
                if let Some(former) = record_of(&store.snapshot(), &archive.name) {
                    preload.unpin(&archive.name, &former.images).await;
                }
                let is_lost = archive.images.iter().any(|image| self.is_lost(image));
                let is_synced = synced == Synced::Yes && !is_lost;
                // First: an agent that starts again would sync what is left, and take it for whole.
                if let Synced::Lost(why) = &synced {
                    for (image, id) in archive.images.iter().zip(&ids) {
                        self.files_lost(image, id, why, store, report).await?;
                    }
                }
                self.record_import(archive, &ids, is_synced, store, report)
                    .await?;
            }
            Err(why) => {
                self.record_failure(works, service, store).await?;
                let of = (archive.name.as_str(), archive.stamp);
                self.refuse(preload, of, why, store, report.recorder)
                    .await?;
            }
        }
        Ok(Import::Decided)
    }

    /// Records that the images of an archive are about to come.
    async fn begin_import<S: ImageService>(
        &self,
        archive: &Archive,
        service: &S,
        store: &Store,
    ) -> Result<(), CommitError> {
        let mut before = Vec::new();
        for image in &archive.images {
            before.push((image, self.present(image, service, store).await));
        }
        let now = self.clock.now();
        files::commit(store, |seen| {
            let images = before.iter();
            images.fold(Transaction::new(), |transaction, (image, found)| {
                files::begun(seen, transaction, image, found.as_presence(), now)
            })
        })
        .await
        .map(drop)
    }

    /// The IDs of images that were just imported. containerd's CRI hears of them by events.
    async fn ids_of<S: ImageService>(
        &self,
        images: &[String],
        service: &S,
    ) -> Result<Vec<String>, String> {
        let mut ids = Vec::new();
        for image in images {
            let mut tries = 0;
            let id = loop {
                match service.image_status(image).await {
                    Ok(Some(found)) => break found.id,
                    Ok(None) if tries < SEEN.0 => tries += 1,
                    Ok(None) => {
                        return Err(format!(
                            "it was imported, but the runtime does not show {image}"
                        ));
                    }
                    Err(error) => return Err(error.to_string()),
                }
                tokio::time::sleep(SEEN.1).await;
            };
            ids.push(id);
        }
        Ok(ids)
    }

    async fn record_import(
        &self,
        archive: &Archive,
        ids: &[String],
        is_synced: bool,
        store: &Store,
        report: &Reporter<'_>,
    ) -> Result<(), CommitError> {
        let now = self.clock.now();
        let seen = store.snapshot();
        let all = || archive.images.iter().zip(ids);
        let repaired =
            |(image, id): &(&String, &String)| is_synced && files::outcome(&seen, image, id).1;
        let repaired: Vec<&String> = all().filter(repaired).map(|(image, _)| image).collect();
        let record = ArchiveRecord {
            name: archive.name.clone(),
            stamp: archive.stamp,
            images: archive.images.clone(),
            error: String::new(),
        };
        files::commit(store, |seen| {
            let key = images::archive_key(&archive.name);
            let mut transaction = Transaction::new().put_object(&key, &record, now);
            for (image, id) in all() {
                if is_synced {
                    (transaction, _) = files::finished(seen, transaction, image, id, now);
                }
                if seen.record::<ImageRecord>(image).is_none() {
                    let record = ImageRecord {
                        pulled_ref: None,
                        backoffs: BTreeMap::new(),
                        first_seen: now,
                        last_used: now,
                    };
                    transaction = transaction
                        .expect::<ImageRecord>(seen, image)
                        .put(image, record);
                }
            }
            transaction
        })
        .await?;
        tracing::info!(archive = archive.name, "archive imported");
        for (image, _) in all() {
            if repaired.contains(&image) {
                self.tell_repaired(image, "imported", report);
            } else {
                self.announce(image);
            }
        }
        if let Some(tell) = &self.pulled {
            tell();
        }
        Ok(())
    }

    /// Restores the records of images that a failed import did not deliver. The next pass over the records finds those
    /// that it did deliver.
    async fn record_failure<S: ImageService>(
        &self,
        works: Vec<(&String, Work)>,
        service: &S,
        store: &Store,
    ) -> Result<(), CommitError> {
        for (image, work) in works {
            if work.is_shared() || !matches!(service.image_status(image).await, Ok(None)) {
                continue;
            }
            let now = self.clock.now();
            files::commit(store, |seen| {
                files::failed(seen, Transaction::new(), image, now)
            })
            .await?;
        }
        Ok(())
    }

    /// Records and reports once that an archive cannot be imported as it is.
    async fn refuse(
        &self,
        preload: &Preload,
        (name, stamp): (&str, ArchiveStamp),
        error: String,
        store: &Store,
        recorder: &dyn EventRecorder,
    ) -> Result<(), CommitError> {
        preload.known().remove(name);
        let path = preload.dir.join(name);
        tracing::warn!(archive = %path.display(), error, "cannot import an archive of images");
        let text = format!("Cannot import {}: {error}", path.display());
        let event = Event::node(EventType::Warning, "ImageImportFailed", text);
        recorder.record(event);
        let now = self.clock.now();
        files::commit(store, |seen| {
            let images = record_of(seen, name).map(|record| record.images);
            let record = ArchiveRecord {
                name: name.to_owned(),
                stamp,
                images: images.unwrap_or_default(),
                error: error.clone(),
            };
            Transaction::new().put_object(&images::archive_key(name), &record, now)
        })
        .await
        .map(drop)
    }

    /// Forgets archives that are gone; their images are pinned no more.
    async fn forget_gone(
        &self,
        preload: &Preload,
        found: &[Listed],
        store: &Store,
    ) -> Result<(), CommitError> {
        let seen = store.snapshot();
        let is_there = |name: &str| found.iter().any(|f| f.name == name);
        // One that was never imported is not on record.
        preload.known().retain(|name, _| is_there(name));
        let gone: Vec<ArchiveRecord> = images::all_archives(&seen)
            .filter(|archive| !is_there(&archive.name))
            .collect();
        for gone in gone {
            tracing::info!(
                archive = gone.name,
                "an archive was removed, unpinned its images"
            );
            preload.unpin(&gone.name, &gone.images).await;
            let key = images::archive_key(&gone.name);
            files::commit(store, |seen| {
                if seen.stored(&key).is_none() {
                    return Transaction::new();
                }
                Transaction::new().delete_object(&key)
            })
            .await?;
        }
        Ok(())
    }
}

fn record_of(seen: &State, name: &str) -> Option<ArchiveRecord> {
    seen.object(&images::archive_key(name))
}

/// Returns whether a file may still be written to. A file with a time in the future counts as finished.
fn is_young(stamp: ArchiveStamp, now: Stamp) -> bool {
    let age = now.wall_ms.saturating_sub(stamp.modified_ns / 1_000_000);
    u64::try_from(age).is_ok_and(|age| Duration::from_millis(age) < QUIET)
}

fn stamp_of(metadata: &std::fs::Metadata) -> ArchiveStamp {
    let seconds = metadata.mtime();
    ArchiveStamp {
        inode: metadata.ino(),
        size: metadata.size(),
        modified_ns: seconds
            .saturating_mul(1_000_000_000)
            .saturating_add(metadata.mtime_nsec()),
    }
}

/// A file in the directory that is named as an archive.
#[derive(Debug)]
struct Listed {
    name: String,
    path: PathBuf,
    /// Of a link that cannot be followed, that of the link.
    stamp: ArchiveStamp,
    /// Reason not to read it.
    problem: Option<String>,
}

impl Listed {
    fn with(self, images: Vec<String>) -> Archive {
        Archive {
            name: self.name,
            path: self.path,
            stamp: self.stamp,
            images,
        }
    }
}

/// Result of an import.
#[derive(PartialEq, Eq)]
enum Import {
    /// It is imported or refused.
    Decided,
    /// The runtime is not ready.
    Postponed,
}

/// Result of listing the directory.
enum Look {
    NotMounted,
    /// The cause is logged.
    Unreadable,
    Listed(Vec<Listed>),
}

/// The names of the images that the runtime has; `None` if it does not answer.
async fn names_present<S: ImageService>(service: &S) -> Option<HashSet<String>> {
    match service.list_images().await {
        Ok(images) => {
            let names = images.iter().flat_map(|i| &i.repo_tags);
            Some(names.map(|name| qualified(name)).collect())
        }
        Err(error) => {
            tracing::warn!(%error, "which images are missing is not known, archives are imported later");
            None
        }
    }
}

/// The archives in a directory, by name. One that is not there has none.
async fn list(dir: &Path) -> io::Result<Vec<Listed>> {
    let dir = dir.to_owned();
    let listed = blocking::run(move || {
        let mut found = Vec::new();
        let entries = match std::fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let name = text::of_name(entry.file_name());
            if name.starts_with('.') || !ENDINGS.iter().any(|end| name.ends_with(end)) {
                continue;
            }
            found.extend(listed(&dir, name, entry.path()));
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    });
    listed.await.map_err(io::Error::other)?
}

/// A file that is named as an archive; `None` for what is no file. A link is followed within the directory only: what it leads
/// to elsewhere may be on a disk that is not mounted yet, and would count as gone. Blocking.
fn listed(dir: &Path, name: String, path: PathBuf) -> Option<Listed> {
    let own = std::fs::symlink_metadata(&path).ok()?;
    let target = std::fs::metadata(&path);
    let problem = if own.is_symlink() {
        problem_of_link(dir, &path)
    } else {
        None
    };
    let metadata = match (&problem, target) {
        (Some(_), _) => own,
        (None, target) => target.ok().filter(std::fs::Metadata::is_file)?,
    };
    Some(Listed {
        name,
        path,
        stamp: stamp_of(&metadata),
        problem,
    })
}

fn problem_of_link(dir: &Path, path: &Path) -> Option<String> {
    let leads = match (dir.canonicalize(), path.canonicalize()) {
        (Ok(dir), Ok(to)) if to.starts_with(&dir) => return None,
        (Ok(_), Ok(to)) => format!("out of the directory, to {}", to.display()),
        (Err(error), _) | (_, Err(error)) => format!("nowhere: {error}"),
    };
    Some(format!(
        "it is a link that leads {leads}; copy the archive into the directory"
    ))
}

#[cfg(test)]
mod tests;

//! Records of the files of images in the store, and which images are being worked on; what they mean is decided in
//! `core::images`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::keyring;
use crate::core::images::{self, AfterFailure, ImageFiles, Presence};
use crate::core::state::{State, Transaction};
use crate::store::{CommitError, Store};
use crate::types::Stamp;

/// Most tries of a commit that conflicts with changes of the same record by others.
const COMMIT_TRIES: u32 = 8;

/// A name with its registry, and with tag or digest, as runtimes list it.
pub fn qualified(image: &str) -> String {
    let rest = image.rsplit('/').next().unwrap_or(image);
    let end = rest.find(['@', ':']).map_or("", |at| &rest[at..]);
    format!("{}{end}", keyring::repository(image))
}

/// The file name of the archive of the preload directory that holds an image, by any spelling of its name. Such an image
/// is pinned: whoever removes unused images leaves it.
pub fn archive_of(state: &State, image: &str) -> Option<String> {
    let image = qualified(image);
    images::archive_of(state, |name| qualified(name) == image)
}

/// The record of an image by any of its spellings.
pub(super) fn of(state: &State, image: &str) -> Option<(ImageFiles, Stamp)> {
    images::files_of(state, &qualified(image))
}

/// Replaces the record of an image.
pub(super) fn put(
    seen: &State,
    transaction: Transaction,
    files: &ImageFiles,
    now: Stamp,
) -> Transaction {
    let key = images::files_key(&qualified(&files.image));
    transaction
        .expect_object(seen, &key)
        .put_object(&key, files, now)
}

/// Adds that a pull or import begins. `present` is what the runtime says of the name now.
pub(super) fn begun(
    seen: &State,
    transaction: Transaction,
    image: &str,
    present: Presence<'_>,
    now: Stamp,
) -> Transaction {
    let old = of(seen, image).map(|(files, _)| files);
    match images::begun(old.as_ref(), image, present) {
        Some(files) => put(seen, transaction, &files, now),
        None => transaction,
    }
}

/// Adds that an image is there and its files are on the disk. Returns whether that repaired a suspect as well.
pub(super) fn finished(
    seen: &State,
    transaction: Transaction,
    image: &str,
    id: &str,
    now: Stamp,
) -> (Transaction, bool) {
    let (files, repaired) = outcome(seen, image, id);
    (put(seen, transaction, &files, now), repaired)
}

/// The record of an image that is there and whose files are on the disk, and whether that repaired a suspect.
pub(super) fn outcome(seen: &State, image: &str, id: &str) -> (ImageFiles, bool) {
    let old = of(seen, image).map(|(files, _)| files);
    let is_doubted = images::is_doubted(seen, &qualified(image), id);
    images::finished(old.as_ref(), image, id, is_doubted)
}

/// Adds that a pull or import has certainly brought nothing.
pub(super) fn failed(
    seen: &State,
    transaction: Transaction,
    image: &str,
    now: Stamp,
) -> Transaction {
    let old = of(seen, image).map(|(files, _)| files);
    match images::failed(old.as_ref()) {
        AfterFailure::Keep => transaction,
        AfterFailure::Put(files) => put(seen, transaction, &files, now),
        AfterFailure::Forget => forget(seen, transaction, image),
    }
}

/// Adds the end of the record of an image.
pub(super) fn forget(seen: &State, transaction: Transaction, image: &str) -> Transaction {
    let key = images::files_key(&qualified(image));
    transaction.expect_object(seen, &key).delete_object(&key)
}

/// Adds that an image is there which the agent did not bring.
pub(super) fn noticed(
    seen: &State,
    transaction: Transaction,
    image: &str,
    id: &str,
    now: Stamp,
) -> Transaction {
    let old = of(seen, image).map(|(files, _)| files);
    match images::noticed(old.as_ref(), image, id) {
        Some(files) => put(seen, transaction, &files, now),
        None => transaction,
    }
}

/// Commits what `decide` makes of the newest state. The kinds of records that it puts are durable, so it is on the disk when
/// this returns. Nothing to change is no commit. Returns whether there was one.
///
/// # Errors
/// When it cannot be committed.
pub(super) async fn commit(
    store: &Store,
    decide: impl Fn(&State) -> Transaction,
) -> Result<bool, CommitError> {
    let mut tries = 0;
    loop {
        let seen = store.snapshot();
        let transaction = decide(&seen);
        if transaction.is_empty() {
            return Ok(false);
        }
        match store.commit(transaction).await {
            Ok(_) => return Ok(true),
            Err(CommitError::Stale { .. }) if tries < COMMIT_TRIES => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Images that are being pulled or imported by this process, by qualified name.
#[derive(Clone, Debug, Default)]
pub(super) struct Works(Arc<Mutex<HashMap<String, usize>>>);

/// One pull or import, until it is dropped.
#[derive(Debug)]
pub(super) struct Work {
    works: Works,
    image: String,
}

impl Works {
    fn counts(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        // Counts are changed whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, image: &str) -> Work {
        let image = qualified(image);
        *self.counts().entry(image.clone()).or_default() += 1;
        Work {
            works: self.clone(),
            image,
        }
    }

    pub(super) fn is_busy(&self, image: &str) -> bool {
        self.counts().contains_key(&qualified(image))
    }
}

impl Work {
    /// Returns whether another task works on the same image.
    pub(super) fn is_shared(&self) -> bool {
        self.works
            .counts()
            .get(&self.image)
            .is_some_and(|count| *count > 1)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut counts = self.works.counts();
        if let Some(count) = counts.get_mut(&self.image) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.image);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_image_have_one_record() {
        for (name, want) in [
            ("busybox:1", "docker.io/library/busybox:1"),
            ("docker.io/busybox:1", "docker.io/library/busybox:1"),
            ("docker.io/library/busybox:1", "docker.io/library/busybox:1"),
            ("localhost:5000/a/b:1", "localhost:5000/a/b:1"),
            ("r.example/a@sha256:ab", "r.example/a@sha256:ab"),
        ] {
            assert_eq!(qualified(name), want, "{name}");
        }
    }

    #[test]
    fn work_on_an_image_is_counted_until_it_is_dropped() {
        let works = Works::default();
        let first = works.begin("busybox:1");
        assert!(!first.is_shared());
        let second = works.begin("docker.io/library/busybox:1");
        assert!(first.is_shared());
        drop(second);
        assert!(!first.is_shared() && works.is_busy("busybox:1"));
        drop(first);
        assert!(!works.is_busy("busybox:1"));
    }
}

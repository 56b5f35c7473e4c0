//! Forgetting images that are gone.

use std::collections::HashSet;
use std::time::Duration;

use k8s_cri::v1;

use super::files::{archive_of, qualified};
use super::records;
use crate::core::images::{self, FilesState};
use crate::core::state::{ImageRecord, State, Transaction};
use crate::store::{CommitError, Store};
use crate::types::Stamp;

/// Time for which the use of a removed image is remembered.
const KEPT: Duration = Duration::from_secs(3600);

/// Drops the records of pulls of images that are gone, and of their names. `images` are all images of the runtime as of
/// `listed_at`, which is before the list was asked for. Upstream's `PruneUnknownRecords`.
///
/// # Errors
/// When it cannot be recorded; a record that changed meanwhile is left for the next time.
pub async fn prune(
    store: &Store,
    images: &[v1::Image],
    listed_at: Stamp,
) -> Result<(), CommitError> {
    let ids: Vec<&str> = images.iter().map(|i| i.id.as_str()).collect();
    let seen = store.snapshot();
    let transaction = records::prune(&seen, &ids, listed_at).and(unused(&seen, images, listed_at));
    if transaction.is_empty() {
        return Ok(());
    }
    match store.commit(transaction).await {
        Ok(_) | Err(CommitError::Stale { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The end of the records of names whose image is gone, for which no pod waits and that were not used for
/// [`KEPT`].
fn unused(seen: &State, images: &[v1::Image], listed_at: Stamp) -> Transaction {
    let there: HashSet<&str> = images
        .iter()
        .flat_map(|i| i.repo_tags.iter().chain(&i.repo_digests).chain([&i.id]))
        .map(String::as_str)
        .collect();
    let names: HashSet<String> = there.iter().map(|name| qualified(name)).collect();
    let mut transaction = Transaction::new();
    for (image, record) in seen.with_prefix::<ImageRecord>("") {
        let pulled = record.pulled_ref.as_deref();
        let is_there =
            pulled.is_some_and(|p| there.contains(p)) || names.contains(&qualified(image));
        let is_old = listed_at.since(record.last_used) >= KEPT;
        if !is_there && is_old && record.backoffs.is_empty() && !is_awaited(seen, image) {
            let files = images::files_key(&qualified(image));
            transaction = transaction
                .expect::<ImageRecord>(seen, image)
                .delete::<ImageRecord>(image)
                .expect_object(seen, &files)
                .delete_object(&files);
        }
    }
    transaction
}

/// Returns whether a missing image is expected: it is being pulled, was removed to be pulled or imported again, or is
/// in an archive of the preload directory.
fn is_awaited(seen: &State, image: &str) -> bool {
    let name = qualified(image);
    let is_under_way = images::files_of(seen, &name).is_some_and(|(files, _)| {
        matches!(
            files.state,
            FilesState::Pulling { .. } | FilesState::Removed
        )
    });
    is_under_way || archive_of(seen, image).is_some()
}

//! Forgetting images that are gone.

use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1;
use tokio_util::sync::CancellationToken;

use super::records;
use crate::kuberuntime::cri::CriClient;
use crate::store::{CommitError, Store};
use crate::types::{Clock, Stamp};

/// Upstream's `ImageGCPeriod`.
const PERIOD: Duration = Duration::from_secs(300);

/// Drops the records of pulls of images that are gone. `images` are all images of the runtime as of
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
    let transaction = records::prune(&store.snapshot(), &ids, listed_at);
    if transaction.is_empty() {
        return Ok(());
    }
    match store.commit(transaction).await {
        Ok(_) | Err(CommitError::Stale { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// [`prune`]s every five minutes until cancelled.
pub async fn run_pruning(
    cri: CriClient,
    store: Store,
    clock: Arc<dyn Clock>,
    token: CancellationToken,
) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let listed_at = clock.now();
        let listed = tokio::select! {
            () = token.cancelled() => return,
            listed = cri.list_images(None) => listed,
        };
        let pruned = match listed {
            Ok(images) => prune(&store, &images, listed_at).await,
            Err(error) => {
                tracing::debug!(%error, "records of pulls are not pruned, the images are not known");
                continue;
            }
        };
        if let Err(error) = pruned {
            tracing::warn!(%error, "records of pulls are not pruned");
        }
    }
}

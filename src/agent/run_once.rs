//! `--runonce`: wait until every pod of the sources runs or is over, and say how it went.

use tokio::time::{Duration, Instant};
use tracing::info;

use crate::config::SourcesReady;
use crate::core::state::StatusRecord;
use crate::pod_manager::PodManager;
use crate::pod_workers::PodWorkers;
use crate::store::Store;
use crate::types::PodExt;

/// Pods get this long to come up.
const PATIENCE: Duration = Duration::from_secs(300);

/// Waits for the pods. Upstream: `RunOnce`, which no longer exists there.
///
/// # Errors
/// Text naming the pods that failed or did not come up in time.
pub(super) async fn wait(
    store: &Store,
    workers: &PodWorkers,
    pods: &PodManager,
    ready: &SourcesReady,
) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let mut published = store.published();
    loop {
        if ready.all_ready() {
            let (failed, pending) = survey(store, pods);
            let left = workers.known().len();
            if pending.is_empty() && left >= pods.all().len() {
                return if failed.is_empty() {
                    info!("every pod runs or has succeeded");
                    Ok(())
                } else {
                    Err(format!("pods failed: {}", failed.join(", ")))
                };
            }
            if Instant::now() >= deadline {
                return Err(format!("pods did not come up: {}", pending.join(", ")));
            }
        }
        // Either something was recorded, or it is time to look at the clock.
        tokio::select! {
            changed = published.changed() => if changed.is_err() {
                return Err("the store was closed".to_owned());
            },
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    }
}

fn survey(store: &Store, pods: &PodManager) -> (Vec<String>, Vec<String>) {
    let state = store.snapshot();
    let (mut failed, mut pending) = (Vec::new(), Vec::new());
    for pod in pods.all() {
        let name = format!("{}/{}", pod.namespace(), pod.name());
        let status = state.record::<StatusRecord>(pod.uid().as_str());
        match status.and_then(|s| s.status.phase.as_deref()) {
            Some("Running" | "Succeeded") => {}
            Some("Failed") => failed.push(name),
            _ => pending.push(name),
        }
    }
    (failed, pending)
}

//! For crash tests only: decisions that nothing in this build takes by itself.

use std::path::PathBuf;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::core::pod_worker::KillRequest;
use crate::core::state::TerminationCause;
use crate::pod_manager::PodManager;
use crate::pod_workers::{PodWorkers, UpdateOptions};
use crate::types::{PodExt, PodSyncType};

/// Evicts the pods whose names are in the file `HOLDFAST_EVICT`, one per line, as soon as it is there.
pub(super) async fn evictions(workers: PodWorkers, pods: PodManager, token: CancellationToken) {
    let Some(file) = std::env::var_os("HOLDFAST_EVICT").map(PathBuf::from) else {
        return token.cancelled().await;
    };
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(Duration::from_millis(100)) => {}
        }
        let names = tokio::fs::read_to_string(&file).await;
        // An empty one is about to be written.
        let Some(names) = names.ok().filter(|names| !names.is_empty()) else {
            continue;
        };
        for pod in pods.all() {
            if !names.lines().any(|name| name == pod.name()) {
                continue;
            }
            warn!(pod = %pod.uid(), name = pod.name(), "evicting a pod as a drill");
            let mut options = UpdateOptions::new(pod, PodSyncType::Kill);
            options.kill = Some(KillRequest {
                cause: TerminationCause::Evicted {
                    reason: "Evicted".to_owned(),
                    message: "The node was low on resource: memory.".to_owned(),
                },
                grace_override: Some(1),
            });
            workers.update(options);
        }
        return token.cancelled().await;
    }
}

//! Stopping pods for the eviction of those that use too much.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::{PodWorkers, UpdateOptions};
use crate::core::pod_worker::KillRequest;
use crate::core::state::{TerminationCause, WorkerPhase};
use crate::eviction::ActivePods;
use crate::types::{Event, EventType, PodSyncType};

/// Grace of a pod over a limit of local storage, in seconds; upstream's
/// `immediateEvictionGracePeriodSeconds`.
const GRACE: i64 = 1;

impl ActivePods for PodWorkers {
    fn running(&self) -> Vec<Arc<Pod>> {
        let handles = self.handles();
        let wanted = handles
            .values()
            .filter(|h| !h.record.runtime_only && h.record.phase == WorkerPhase::Sync);
        wanted.map(|h| Arc::clone(&h.pod)).collect()
    }

    fn evict(&self, pod: &Arc<Pod>, reason: &str, message: &str) {
        let event = Event::pod(EventType::Warning, pod, reason, message);
        self.context().recorder.record(event);
        let mut options = UpdateOptions::new(Arc::clone(pod), PodSyncType::Kill);
        options.kill = Some(KillRequest {
            cause: TerminationCause::Evicted {
                reason: reason.to_owned(),
                message: message.to_owned(),
            },
            grace_override: Some(GRACE),
        });
        self.update(options);
    }
}

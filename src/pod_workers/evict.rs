//! Stopping pods that are evicted.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::{PodWorkers, UpdateOptions};
use crate::core::eviction::EVICTED;
use crate::core::pod_worker::KillRequest;
use crate::core::state::{TerminationCause, WorkerPhase};
use crate::eviction::{ActivePods, Evicting, Eviction, Stopping};
use crate::types::{Event, EventType, PodSyncType};

impl ActivePods for PodWorkers {
    fn running(&self) -> Vec<Arc<Pod>> {
        let handles = self.handles();
        let wanted = handles
            .values()
            .filter(|h| !h.record.runtime_only && h.record.phase == WorkerPhase::Sync);
        wanted.map(|h| Arc::clone(&h.pod)).collect()
    }

    fn stopping(&self) -> Vec<Stopping> {
        let handles = self.handles();
        let stopping = handles.values().filter(|h| !h.record.runtime_only);
        let stopping = stopping.filter_map(|handle| match &handle.record.phase {
            WorkerPhase::Terminating { deadline, .. } => Some(Stopping {
                pod: Arc::clone(&handle.pod),
                deadline: *deadline,
            }),
            _ => None,
        });
        stopping.collect()
    }

    fn evict(&self, pod: &Arc<Pod>, eviction: Eviction) {
        let Eviction {
            message,
            annotations,
            grace_seconds,
        } = eviction;
        let event = Event::pod(EventType::Warning, pod, EVICTED, message.clone());
        self.context().recorder.record(event.annotated(annotations));
        let mut options = UpdateOptions::new(Arc::clone(pod), PodSyncType::Kill);
        options.kill = Some(KillRequest {
            cause: TerminationCause::Evicted {
                reason: EVICTED.to_owned(),
                message,
            },
            grace_override: Some(grace_seconds),
        });
        self.update(options);
    }

    fn evicting(&self) -> Vec<Evicting> {
        let is_eviction = |cause: &TerminationCause| matches!(cause, TerminationCause::Evicted { reason, .. } if reason == EVICTED);
        let handles = self.handles();
        let under_way = handles
            .values()
            .filter_map(|handle| match &handle.record.phase {
                WorkerPhase::Terminating {
                    since,
                    grace_seconds,
                    cause,
                    ..
                } if is_eviction(cause) => Some(Evicting {
                    since: *since,
                    grace_seconds: *grace_seconds,
                }),
                WorkerPhase::Terminated { since, cause } if is_eviction(cause) => Some(Evicting {
                    since: *since,
                    grace_seconds: 0,
                }),
                _ => None,
            });
        under_way.collect()
    }
}

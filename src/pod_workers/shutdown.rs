//! Stopping pods because the machine goes down: as the manager of graceful shutdowns orders it, and at the very end.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use tracing::{Instrument, info, info_span, warn};

use super::{PodWorkers, UpdateOptions, WorkerContext};
use crate::core::container_history;
use crate::core::pod_worker::KillRequest;
use crate::core::shutdown::{self, ShutdownRecord};
use crate::core::state::WorkerPhase;
use crate::kuberuntime::cri::CriError;
use crate::kuberuntime::kill::{grace_of, stop_timeout};
use crate::nodeshutdown::NodePods;
use crate::store::{CommitError, StopDecision, StopPermit};
use crate::types::runtime::{ContainerState, ContainerStatus};
use crate::types::{ContainerId, PodExt, PodSyncType, PodUid};

impl NodePods for PodWorkers {
    fn unfinished(&self) -> Vec<Arc<Pod>> {
        let state = self.context().store.snapshot();
        let handles = self.handles();
        let unfinished = handles.iter().filter(|(_, handle)| {
            !handle.record.runtime_only
                && !matches!(handle.record.phase, WorkerPhase::Finished { .. })
                && !handle.is_refused(&state)
        });
        unfinished
            .map(|(_, handle)| Arc::clone(&handle.pod))
            .collect()
    }

    fn has_worker(&self, uid: &PodUid) -> bool {
        self.knows(uid)
    }

    fn terminate(&self, pod: &Arc<Pod>, grace_seconds: i64) {
        let mut options = UpdateOptions::new(Arc::clone(pod), PodSyncType::Kill);
        options.kill = Some(KillRequest {
            cause: shutdown::cause(),
            grace_override: Some(grace_seconds),
        });
        self.update(options);
    }
}

/// Reason why the exit of a container is not recorded.
#[derive(Debug, thiserror::Error)]
enum LastStopError {
    #[error(transparent)]
    Cri(#[from] CriError),
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl PodWorkers {
    /// Stops the containers that are still running and records their ends, because the machine takes them down next and
    /// nobody would see how they ended. To be called after [`Self::drain`]. Pods stay what they are: after the boot they go
    /// on as their policies say. preStop hooks are not run. Returns after `limit` at the latest; containers that need
    /// longer are left to the machine. Upstream has no counterpart.
    pub async fn stop_containers(&self, limit: Duration) {
        let context = self.context();
        let now = context.clock.now();
        let current = ShutdownRecord::of(&context.store.snapshot());
        let record = current.filter(|record| record.is_in_force(now));
        let record = record.unwrap_or(ShutdownRecord {
            begun: now,
            deadline: now.plus(limit),
            ended: None,
            cancelled: None,
            local: false,
        });
        let transaction = record.transaction("systemd takes the machine down", now);
        let permit = match StopDecision::recorded_by(transaction) {
            Ok(decision) => context.store.commit_stop(decision).await,
            Err(error) => Err(error),
        };
        let permit = match permit {
            Ok(permit) => permit,
            Err(error) => {
                warn!(%error, "cannot stop containers, leaving them to the shutdown");
                return;
            }
        };
        let pods: Vec<(PodUid, Arc<Pod>)> = {
            let handles = self.handles();
            let unfinished = handles.iter().filter(|(_, handle)| {
                !handle.record.runtime_only
                    && !matches!(handle.record.phase, WorkerPhase::Finished { .. })
            });
            unfinished
                .map(|(uid, handle)| (uid.clone(), Arc::clone(&handle.pod)))
                .collect()
        };
        info!(
            pods = pods.len(),
            "the machine shuts down, stopping containers"
        );
        let work = pods.iter().map(|(uid, pod)| {
            let span = info_span!("last_stop", pod = %uid, name = pod.name());
            stop_pod(context, uid, pod, &permit).instrument(span)
        });
        if tokio::time::timeout(limit, join_all(work)).await.is_err() {
            warn!("some containers need longer, leaving them to the shutdown");
        }
    }
}

async fn stop_pod(context: &WorkerContext, uid: &PodUid, pod: &Pod, permit: &StopPermit) {
    let shown = context
        .cri
        .pod_status(uid, pod.name(), pod.namespace())
        .await;
    let shown = match shown {
        Ok(shown) => shown,
        Err(error) => {
            warn!(%error, "cannot inspect the pod, leaving it to the shutdown");
            return;
        }
    };
    let running = shown
        .containers
        .iter()
        .filter(|container| container.state == ContainerState::Running);
    let stopped: Vec<ContainerId> = running.clone().map(|c| c.id.clone()).collect();
    let stopped = &*stopped;
    let stops = running.map(|container| async move {
        let stopped = stop_container(context, uid, pod, container, stopped, permit).await;
        if let Err(error) = stopped {
            warn!(container = container.name, %error, "cannot stop the container and record its exit");
        }
    });
    join_all(stops).await;
}

async fn stop_container(
    context: &WorkerContext,
    uid: &PodUid,
    pod: &Pod,
    container: &ContainerStatus,
    stopped: &[ContainerId],
    permit: &StopPermit,
) -> Result<(), LastStopError> {
    let timeout = stop_timeout(grace_of(pod, None));
    context
        .cri
        .stop_container(&container.id, timeout, permit)
        .await?;
    loop {
        let listed_at = context.clock.now();
        let mut status = context
            .cri
            .pod_status(uid, pod.name(), pod.namespace())
            .await?;
        shutdown::mark_stopped(pod, stopped, &mut status);
        let seen = context.store.snapshot();
        let now = context.clock.now();
        let ends = container_history::observe_exits(&seen, uid, &status, listed_at, now);
        if ends.is_empty() {
            return Ok(());
        }
        match context.store.commit_or_hold(ends).await {
            Ok(_) => return Ok(()),
            // Another container of the pod ended meanwhile: once more with that.
            Err(CommitError::Stale { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

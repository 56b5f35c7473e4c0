//! Stopping containers and pods; upstream's `killPodWithSyncResult` and `killContainer`.
//!
//! Comes in: what the runtime shows, the grace that is left, the store's permit to stop. Goes out:
//! StopContainer for all running containers at once, then StopPodSandbox; an event per container. Every
//! call may be repeated: stopping what is stopped succeeds. Removal is left to [`super::gc`].

use std::time::Duration;

use futures::future::join_all;

use super::cri::{CriClient, CriError};
use crate::store::StopPermit;
use crate::types::events::{Event, EventRecorder, EventType, PodRef};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};

/// The least a container gets between SIGTERM and SIGKILL; upstream's `minimumGracePeriodInSeconds`.
pub const MIN_STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Grace of a pod whose spec says nothing.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// Something of a pod could not be stopped.
#[derive(Debug, thiserror::Error)]
pub enum KillError {
    /// A container.
    #[error("stop container {container} of pod {pod}")]
    Container {
        /// `<namespace>/<name>`.
        pod: String,
        /// Name of the container.
        container: String,
        /// Why.
        #[source]
        source: CriError,
    },
    /// A sandbox.
    #[error("stop sandbox {sandbox} of pod {pod}")]
    Sandbox {
        /// `<namespace>/<name>`.
        pod: String,
        /// Id of the sandbox.
        sandbox: String,
        /// Why.
        #[source]
        source: CriError,
    },
}

/// The grace period of a pod that is to be stopped: an override (eviction, shutdown, what is left of a
/// grace period that has begun) over `deletionGracePeriodSeconds` over the spec's.
pub fn kill_grace(
    over: Option<Duration>,
    deletion_seconds: Option<i64>,
    spec_seconds: Option<i64>,
) -> Duration {
    let seconds = |s: i64| Duration::from_secs(u64::try_from(s).unwrap_or(0));
    over.or(deletion_seconds.map(seconds))
        .or(spec_seconds.map(seconds))
        .unwrap_or(DEFAULT_GRACE)
}

/// What StopContainer is given of a grace period: whole seconds, rounded up, at least two.
pub fn stop_timeout(grace: Duration) -> i64 {
    let grace = grace.max(MIN_STOP_TIMEOUT);
    let seconds = grace.as_secs() + u64::from(grace.subsec_nanos() > 0);
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

/// The pod of a runtime status, for events.
pub fn pod_ref(status: &PodStatus) -> PodRef {
    PodRef {
        uid: status.uid.clone(),
        name: status.name.clone(),
        namespace: status.namespace.clone(),
    }
}

/// Stops one container. `message` is the event's text, by default that it is being stopped.
/// Dropping the future cancels the wait, not the stop.
///
/// # Errors
/// When the runtime does not confirm that it stopped.
pub async fn kill_container(
    pod: &PodRef,
    container: &ContainerStatus,
    grace: Duration,
    message: Option<&str>,
    cri: &CriClient,
    permit: &StopPermit,
    recorder: &dyn EventRecorder,
) -> Result<(), KillError> {
    recorder.record(Event {
        pod: Some(pod.clone()),
        container: Some(container.name.clone()),
        kind: EventType::Normal,
        reason: "Killing".to_owned(),
        message: message.map_or_else(
            || format!("Stopping container {}", container.name),
            str::to_owned,
        ),
    });
    let timeout = stop_timeout(grace);
    tracing::info!(pod = %pod.uid, container = %container.name, id = %container.id, timeout, "stopping container");
    cri.stop_container(&container.id, timeout, permit)
        .await
        .map_err(|source| KillError::Container {
            pod: format!("{}/{}", pod.namespace, pod.name),
            container: container.name.clone(),
            source,
        })
}

/// Stops every container that may run, all at once, then every sandbox. Sandboxes are stopped even when a
/// container could not be: that ends it as well.
///
/// # Errors
/// The first thing that could not be stopped; everything else was tried.
pub async fn kill_pod(
    status: &PodStatus,
    grace: Duration,
    cri: &CriClient,
    permit: &StopPermit,
    recorder: &dyn EventRecorder,
) -> Result<(), KillError> {
    let pod = pod_ref(status);
    let containers = join_all(
        to_stop(status)
            .map(|container| kill_container(&pod, container, grace, None, cri, permit, recorder)),
    )
    .await;
    let sandboxes = join_all(status.sandboxes.iter().map(|sandbox| async {
        cri.stop_pod_sandbox(&sandbox.id, permit)
            .await
            .map_err(|source| KillError::Sandbox {
                pod: format!("{}/{}", pod.namespace, pod.name),
                sandbox: sandbox.id.to_string(),
                source,
            })
    }))
    .await;
    containers.into_iter().chain(sandboxes).collect()
}

/// Containers that may run: not those that only exist, nor those that have ended.
fn to_stop(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status
        .containers
        .iter()
        .filter(|c| matches!(c.state, ContainerState::Running | ContainerState::Unknown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_wins_over_deletion_over_spec() {
        let s = Duration::from_secs;
        for (over, deletion, spec, want) in [
            (Some(s(3)), Some(10), Some(20), s(3)),
            (Some(s(60)), Some(10), Some(20), s(60)),
            (None, Some(10), Some(20), s(10)),
            (None, Some(0), Some(20), s(0)),
            (None, None, Some(20), s(20)),
            (None, None, Some(-5), s(0)),
            (None, None, None, s(30)),
        ] {
            assert_eq!(
                kill_grace(over, deletion, spec),
                want,
                "{over:?} {deletion:?} {spec:?}"
            );
        }
    }

    #[test]
    fn stop_timeout_is_whole_seconds_and_at_least_two() {
        for (ms, want) in [(0, 2), (1_999, 2), (2_000, 2), (2_001, 3), (30_000, 30)] {
            assert_eq!(stop_timeout(Duration::from_millis(ms)), want, "{ms} ms");
        }
    }
}

//! Resource claims of a pod: prepared before it starts, unprepared after its containers have stopped.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::WorkerContext;
use super::execute::StepError;
use crate::core::claims::cdi_devices;
use crate::core::pod_actions::PodActions;
use crate::types::{Event, EventType, PodUid};

/// Makes sure that the claims of a pod that is about to start are prepared. Emits an event about what it waits for.
///
/// # Errors
/// [`StepError::Claims`] when the pod waits.
pub(super) async fn prepare(
    context: &WorkerContext,
    pod: &Pod,
    actions: &PodActions,
) -> Result<(), StepError> {
    let in_sandbox = actions.create_sandbox.is_none();
    let prepared = context.resources.claims.prepare(pod, in_sandbox).await;
    prepared.map_err(|error| {
        let text =
            format!("Failed to prepare dynamic resources: prepare dynamic resources: {error}");
        let event = Event::pod(
            EventType::Warning,
            pod,
            "FailedPrepareDynamicResources",
            text,
        );
        context.recorder.record(event);
        StepError::Claims(error).told()
    })
}

/// Ends the use of its claims by a pod whose containers have stopped.
///
/// # Errors
/// [`StepError::Claims`] when a driver does not answer or refuses: the pod stays until it does.
pub(super) async fn unprepare(context: &WorkerContext, pod: &PodUid) -> Result<(), StepError> {
    let unprepared = context.resources.claims.unprepare(pod).await;
    unprepared.map_err(StepError::Claims)
}

/// Returns the CDI devices that a container has by its pod's claims.
///
/// # Errors
/// The reason why it cannot start.
pub(super) fn granted(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
) -> Result<Vec<String>, String> {
    let claims = context.resources.claims.of_container(pod, container);
    let claims = claims.map_err(|error| error.to_string())?;
    Ok(cdi_devices(&claims))
}

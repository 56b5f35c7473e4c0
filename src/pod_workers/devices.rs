//! Devices of a pod's containers: before they start, and what they get when they are created.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::execute::StepError;
use super::{Job, WorkerContext};
use crate::core::devices::Granted;
use crate::core::pod_actions::PodActions;
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, ContainerRecord, State, Transaction, child_key,
};
use crate::devicemanager::Readiness;
use crate::types::containers::containers_of;
use crate::types::metrics::ReasonLabel;
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{ContainerKind, Event, EventType, PodExt};

/// Reason of a pod that gets no devices; upstream's `ErrorReasonUnexpected`.
const UNEXPECTED: &str = "UnexpectedAdmissionError";

/// Makes sure that the containers that `actions` start have their devices. Returns reason and message, on record, when the
/// pod fails instead.
///
/// # Errors
/// [`StepError::Devices`] when the pod waits for devices; when a commit fails.
pub(super) async fn refused(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) -> Result<Option<(String, String)>, StepError> {
    let pod = &job.pod;
    let running = (status.containers.iter())
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| c.name.as_str());
    context.devices.confirm(pod, running);
    let starting = starting(pod, actions);
    if starting.is_empty() {
        return Ok(None);
    }
    let starting: Vec<&str> = starting.iter().map(String::as_str).collect();
    let state = context.store.snapshot();
    let fresh = is_fresh(&state, pod, status);
    let message = match context.devices.ready(pod, fresh, &starting).await? {
        Readiness::Ready => return Ok(None),
        Readiness::Waiting(why) => {
            let text = format!("The pod waits for its devices: {why}");
            let event = Event::pod(EventType::Warning, pod, "WaitingForDevices", text);
            context.recorder.record(event);
            return Err(StepError::Devices(why));
        }
        Readiness::Refused(message) => message,
    };
    reject(context, job, &message).await?;
    Ok(Some((UNEXPECTED.to_owned(), message)))
}

/// Names of the containers that start soon: all but ephemeral ones in a new sandbox, so that a pod whose devices are away
/// starts none of them.
fn starting(pod: &Pod, actions: &PodActions) -> Vec<String> {
    if actions.create_sandbox.is_none() {
        return actions.start.iter().map(|s| s.name.clone()).collect();
    }
    let specs = containers_of(pod).filter(|spec| spec.kind != ContainerKind::Ephemeral);
    specs.map(|spec| spec.container.name.clone()).collect()
}

/// Returns whether no container of the pod was ever started.
fn is_fresh(state: &State, pod: &Pod, status: &PodStatus) -> bool {
    let uid = pod.uid();
    let started = |spec: crate::types::ContainerSpec<'_>| {
        let key = child_key(&uid, &spec.container.name);
        let record = state.record::<ContainerRecord>(&key);
        record.is_some_and(|r| r.intent.is_some() || r.last_exit.is_some())
    };
    status.containers.is_empty() && !containers_of(pod).any(started)
}

/// Records that the pod is refused, and emits the event.
async fn reject(context: &WorkerContext, job: &Job, message: &str) -> Result<(), StepError> {
    let (pod, uid) = (&job.pod, &job.uid);
    let seen = context.store.snapshot();
    let known = seen.record::<AdmissionRecord>(uid.as_str());
    let known = known.or(job.admission.as_ref());
    let record = AdmissionRecord {
        decision: AdmissionDecision::Rejected {
            reason: UNEXPECTED.to_owned(),
            message: message.to_owned(),
        },
        allocated: known.map(|r| r.allocated.clone()).unwrap_or_default(),
        at: context.clock.now(),
    };
    let refusal = Transaction::new()
        .expect::<AdmissionRecord>(&seen, uid.as_str())
        .put(uid.as_str(), record)
        .journal(Some(uid), "rejected", format!("{UNEXPECTED}: {message}"));
    context.store.commit(refusal).await?;
    tracing::warn!(reason = UNEXPECTED, message, "pod rejected");
    let label = ReasonLabel {
        reason: UNEXPECTED.to_owned(),
    };
    let metrics = &context.metrics;
    metrics.admission_rejections.get_or_create(&label).inc();
    let event = Event::pod(EventType::Warning, pod, UNEXPECTED, message);
    context.recorder.record(event);
    Ok(())
}

/// Returns what a container gets with its devices, after their plugins were told that it starts.
///
/// # Errors
/// Why it cannot start.
pub(super) async fn granted(
    context: &WorkerContext,
    pod: &Pod,
    container: &Container,
) -> Result<Granted, String> {
    context.devices.pre_start(pod, &container.name).await?;
    let granted = context.devices.granted(pod, &container.name);
    granted.map_err(|error| error.to_string())
}

//! Container states, and the times and texts in them.

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::core::container_history::{STATUS_UNKNOWN, STATUS_UNKNOWN_EXIT_CODE};
use crate::core::state::ExitRecord;
use crate::types::{PodExt, Stamp};

/// Waiting reason of a container that was not started yet.
pub const CONTAINER_CREATING: &str = "ContainerCreating";
/// Waiting reason of every container of a pod with init containers that was not started yet.
pub const POD_INITIALIZING: &str = "PodInitializing";

/// The state of a status.
pub(super) fn state(status: &api::ContainerStatus) -> &api::ContainerState {
    static NONE: api::ContainerState = api::ContainerState {
        running: None,
        terminated: None,
        waiting: None,
    };
    status.state.as_ref().unwrap_or(&NONE)
}

/// The end before the present state.
pub(super) fn last_end(status: &api::ContainerStatus) -> Option<&api::ContainerStateTerminated> {
    status.last_state.as_ref()?.terminated.as_ref()
}

/// Returns whether the runtime does not know the state of the container, so that it may run.
pub(super) fn is_unknown(status: &api::ContainerStatus) -> bool {
    let waiting = state(status).waiting.as_ref();
    waiting.is_some_and(|w| w.reason.as_deref() == Some(STATUS_UNKNOWN))
}

/// Not started yet.
pub(super) fn waiting(pod: &Pod) -> api::ContainerState {
    if pod.init_containers().is_empty() {
        waiting_for(CONTAINER_CREATING, "")
    } else {
        waiting_for(POD_INITIALIZING, "")
    }
}

pub(super) fn waiting_for(reason: &str, message: &str) -> api::ContainerState {
    api::ContainerState {
        waiting: Some(api::ContainerStateWaiting {
            reason: some_if(reason),
            message: some_if(message),
        }),
        ..api::ContainerState::default()
    }
}

pub(super) fn terminated(end: api::ContainerStateTerminated) -> api::ContainerState {
    api::ContainerState {
        terminated: Some(end),
        ..api::ContainerState::default()
    }
}

/// Returns the state of a recorded end.
pub(super) fn end_state(exit: &ExitRecord, runtime_name: &str) -> api::ContainerStateTerminated {
    api::ContainerStateTerminated {
        container_id: Some(format!("{runtime_name}://{}", exit.container_id)),
        exit_code: exit.exit_code,
        reason: some_if(&exit.reason),
        message: some_if(&exit.message),
        started_at: time_of_ns(exit.started_at_ns),
        finished_at: time_of_ns(exit.finished_at_ns),
        signal: None,
    }
}

/// Returns the state of an end that was not observed.
pub(super) fn unlocated() -> api::ContainerStateTerminated {
    unlocated_at(
        "The container could not be located in the runtime. The container used to be Running",
    )
}

/// The end of a container that nothing is known of when its pod has ended.
pub(super) fn unlocated_when_terminated() -> api::ContainerStateTerminated {
    unlocated_at("The container could not be located when the pod was terminated")
}

fn unlocated_at(message: &str) -> api::ContainerStateTerminated {
    api::ContainerStateTerminated {
        exit_code: STATUS_UNKNOWN_EXIT_CODE,
        reason: Some(STATUS_UNKNOWN.to_owned()),
        message: Some(message.to_owned()),
        ..api::ContainerStateTerminated::default()
    }
}

/// The end of an init container that left no trace in a pod that got beyond it.
pub(super) fn completed() -> api::ContainerStateTerminated {
    api::ContainerStateTerminated {
        exit_code: 0,
        reason: Some("Completed".to_owned()),
        message: Some(
            "Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally"
                .to_owned(),
        ),
        ..api::ContainerStateTerminated::default()
    }
}

/// Cuts a text to at most `limit` bytes without splitting a character.
pub(super) fn shorten(text: &mut String, limit: usize) {
    let mut end = limit.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

pub(super) fn some_if(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

pub(super) fn some_if_any<T>(items: impl Iterator<Item = T>) -> Option<Vec<T>> {
    let items: Vec<T> = items.collect();
    (!items.is_empty()).then_some(items)
}

/// The wall clock of a stamp, to the second.
pub(super) fn time(stamp: Stamp) -> Time {
    Time(jiff_second(stamp.wall_ms.div_euclid(1000)).unwrap_or_default())
}

pub(super) fn time_of_ns(ns: i64) -> Option<Time> {
    if ns <= 0 {
        return None;
    }
    jiff_second(ns.div_euclid(1_000_000_000)).map(Time)
}

fn jiff_second(second: i64) -> Option<jiff::Timestamp> {
    jiff::Timestamp::from_second(second).ok()
}

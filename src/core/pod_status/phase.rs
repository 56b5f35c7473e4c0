//! The phase of a pod; upstream's `getPhase`.

use k8s_openapi::api::core::v1::ContainerStatus;

use super::containers::Statuses;
use super::states::{is_unknown, last_end, state};
use super::{Stage, StatusInput};
use crate::core::container_history::{STATUS_UNKNOWN_EXIT_CODE, judged_end};
use crate::core::pod_actions::policy_restarts as restarts;
use crate::types::containers::containers_of;
use crate::types::{ContainerKind, PodExt};

/// Number of containers by state.
#[derive(Debug, Default)]
struct Count {
    pending_init: usize,
    failed_init: usize,
    pending_sidecars: usize,
    waiting: usize,
    running: usize,
    stopped: usize,
    succeeded: usize,
    stopped_for_good: usize,
}

/// The phase that containers in these states make. Ephemeral containers have no say, nor have ends of sidecars.
pub(super) fn of(input: &StatusInput<'_>, statuses: &Statuses) -> &'static str {
    let pod = input.pod;
    let mut count = Count::default();
    for spec in containers_of(pod) {
        let Some(status) = statuses.get(&spec.container.name) else {
            continue;
        };
        let end = ended(status);
        let again = statuses.restarting.contains(&spec.container.name);
        let for_good = |code: i32| !again && !restarts(pod, &spec, code);
        // Of one that the runtime cannot tell, nothing may be concluded: it may run.
        let runs = state(status).running.is_some() || is_unknown(status);
        match spec.kind {
            ContainerKind::Ephemeral => {}
            ContainerKind::Init => match end {
                _ if runs || again => count.pending_init += 1,
                Some(_) => {
                    let failed = failure_of_init(status);
                    count.failed_init += usize::from(failed.is_some_and(for_good));
                }
                None => count.pending_init += 1,
            },
            ContainerKind::Sidecar if runs => {
                count.running += 1;
                count.pending_sidecars += usize::from(status.started != Some(true));
            }
            ContainerKind::Sidecar if end.is_some() => {}
            ContainerKind::Sidecar => {
                count.pending_sidecars += 1;
                count.waiting += 1;
            }
            ContainerKind::Main => match end {
                _ if runs => count.running += 1,
                Some((code, is_state)) => {
                    count.stopped += 1;
                    count.stopped_for_good += usize::from(for_good(code));
                    count.succeeded += usize::from(is_state && code == 0);
                }
                None => count.waiting += 1,
            },
        }
    }
    decide(input, &count)
}

fn decide(input: &StatusInput<'_>, count: &Count) -> &'static str {
    let uninitialised = count.pending_sidecars > 0 && !has_main_in_sandbox(input);
    if count.failed_init > 0 {
        return "Failed";
    }
    if count.pending_init > 0 || uninitialised || count.waiting > 0 {
        return "Pending";
    }
    if count.running > 0 {
        return "Running";
    }
    if count.stopped == 0 {
        return "Pending";
    }
    let is_over = input.stage == Stage::Terminated && !input.pod.is_static();
    if !is_over && count.stopped != count.stopped_for_good {
        return "Running";
    }
    if count.stopped == count.succeeded {
        "Succeeded"
    } else {
        "Failed"
    }
}

/// The exit code of a container that has ended and does not run, and whether that is its present state.
fn ended(status: &ContainerStatus) -> Option<(i32, bool)> {
    let present = state(status)
        .terminated
        .as_ref()
        .map(|t| (judged_end(t), true));
    present.or_else(|| last_end(status).map(|t| (judged_end(t), false)))
}

/// The code of an init container's failed end, as [`crate::core::pod_actions`] sees it: one that was killed for lack of
/// memory has failed even with exit code 0, since what it was to prepare is not there.
fn failure_of_init(status: &ContainerStatus) -> Option<i32> {
    let end = state(status).terminated.as_ref();
    let end = end.or_else(|| last_end(status))?;
    match (judged_end(end), end.reason.as_deref()) {
        (0, Some("OOMKilled")) => Some(STATUS_UNKNOWN_EXIT_CODE),
        (0, _) => None,
        (code, _) => Some(code),
    }
}

/// Returns whether the present sandbox has a main container, so that its init containers are done; upstream's
/// `HasAnyActiveRegularContainerStarted`.
fn has_main_in_sandbox(input: &StatusInput<'_>) -> bool {
    let Some(sandbox) = input.status.sandboxes.first() else {
        return false;
    };
    let mains = input.pod.containers();
    let mut inside = input.status.containers.iter();
    inside.any(|c| c.sandbox_id == sandbox.id && mains.iter().any(|m| m.name == c.name))
}

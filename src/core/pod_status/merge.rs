//! Merge of a new status into the recorded one, which the API server gets; upstream's `updateStatusInternal`.

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::Pod;

use super::{all_statuses, is_terminal};
use crate::core::container_history::judged_end;
use crate::core::pod_actions::{all_may_restart, policy_restarts as restarts};
use crate::types::containers::container_of;
use crate::types::pod::RestartPolicy;
use crate::types::{ContainerKind, PodExt};

/// A status that would take back a reported one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "refused status: container {container} ended with {exit_code}, which its restart policy makes final, and is now said not to have ended"
)]
pub struct IllegalTransition {
    /// The container.
    pub container: String,
    /// Exit code.
    pub exit_code: i32,
}

/// Merges a generated status onto the one before: keeps startTime, the transition times of conditions
/// that did not change, the higher restart counts, and a terminal phase. `Ok(None)` = nothing changed.
///
/// # Errors
/// [`IllegalTransition`] when a container that ended for good is said not to have ended.
pub fn merge_for_update(
    pod: &Pod,
    old: Option<&api::PodStatus>,
    new: api::PodStatus,
) -> Result<Option<api::PodStatus>, IllegalTransition> {
    let mut new = normalised(new);
    let Some(old) = old else {
        return Ok(Some(new));
    };
    check_container_transitions(pod, old, &new)?;
    if old.start_time.is_some() {
        new.start_time.clone_from(&old.start_time);
    }
    if is_terminal(old) && new.phase != old.phase {
        new.phase.clone_from(&old.phase);
        new.reason.clone_from(&old.reason);
        new.message.clone_from(&old.message);
    }
    for condition in new.conditions.iter_mut().flatten() {
        let before = old.conditions.iter().flatten();
        let same = before
            .filter(|c| c.type_ == condition.type_ && c.status == condition.status)
            .find_map(|c| c.last_transition_time.clone());
        if same.is_some() {
            condition.last_transition_time = same;
        }
    }
    for status in all_statuses_mut(&mut new) {
        let before = all_statuses(old).filter(|s| s.name == status.name);
        let count = before.map(|s| s.restart_count);
        status.restart_count = count.fold(status.restart_count, i32::max);
    }
    if comparable(&new) == comparable(&normalised(old.clone())) {
        return Ok(None);
    }
    Ok(Some(new))
}

fn all_statuses_mut(
    status: &mut api::PodStatus,
) -> impl Iterator<Item = &mut api::ContainerStatus> {
    let init = status.init_container_statuses.iter_mut().flatten();
    let main = status.container_statuses.iter_mut().flatten();
    let ephemeral = status.ephemeral_container_statuses.iter_mut().flatten();
    init.chain(main).chain(ephemeral)
}

/// Upstream's `checkContainerStateTransition`, for all kinds of containers.
fn check_container_transitions(
    pod: &Pod,
    old: &api::PodStatus,
    new: &api::PodStatus,
) -> Result<(), IllegalTransition> {
    for before in all_statuses(old) {
        let Some(end) = before.state.as_ref().and_then(|s| s.terminated.as_ref()) else {
            continue;
        };
        if may_be_undone(pod, &before.name, judged_end(end)) {
            continue;
        }
        let taken_back = all_statuses(new)
            .filter(|s| s.name == before.name)
            .any(|s| s.state.as_ref().is_none_or(|s| s.terminated.is_none()));
        if taken_back {
            return Err(IllegalTransition {
                container: before.name.clone(),
                exit_code: end.exit_code,
            });
        }
    }
    Ok(())
}

/// Returns whether a container may run again after this exit: by its policy, because it is an init container of a pod
/// that may get another sandbox, or because another container may restart all.
fn may_be_undone(pod: &Pod, name: &str, exit_code: i32) -> bool {
    container_of(pod, name).is_some_and(|spec| {
        let again = spec.kind == ContainerKind::Init
            && exit_code == 0
            && (pod.restart_policy() != RestartPolicy::Never
                || pod.containers().iter().any(|c| c.restart_policy.is_some()));
        let with_all = spec.kind != ContainerKind::Ephemeral && all_may_restart(pod);
        again || with_all || restarts(pod, &spec, exit_code)
    })
}

/// Empty lists and texts are absent ones.
fn normalised(mut status: api::PodStatus) -> api::PodStatus {
    fn list<T>(list: &mut Option<Vec<T>>) {
        if list.as_ref().is_some_and(Vec::is_empty) {
            *list = None;
        }
    }
    fn text(text: &mut Option<String>) {
        if text.as_ref().is_some_and(String::is_empty) {
            *text = None;
        }
    }
    list(&mut status.conditions);
    list(&mut status.container_statuses);
    list(&mut status.init_container_statuses);
    list(&mut status.ephemeral_container_statuses);
    list(&mut status.host_ips);
    list(&mut status.pod_ips);
    text(&mut status.reason);
    text(&mut status.message);
    text(&mut status.host_ip);
    text(&mut status.pod_ip);
    for condition in status.conditions.iter_mut().flatten() {
        text(&mut condition.reason);
        text(&mut condition.message);
    }
    for container in all_statuses_mut(&mut status) {
        for state in [&mut container.state, &mut container.last_state] {
            if state.as_ref() == Some(&api::ContainerState::default()) {
                *state = None;
            }
        }
    }
    status
}

/// Without what does not make a difference: the order of conditions.
fn comparable(status: &api::PodStatus) -> api::PodStatus {
    let mut status = status.clone();
    if let Some(conditions) = &mut status.conditions {
        conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
    }
    status
}

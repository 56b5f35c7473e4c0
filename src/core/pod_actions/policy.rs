//! Decision whether a container runs again after its end: the pod's restart policy, the container's own, its rules.

use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, Pod};

use crate::types::containers::ContainerSpec;
use crate::types::pod::RestartPolicy;
use crate::types::{ContainerKind, PodExt};

/// Action of a restart rule that starts the container again. Rules with unknown actions leave it to the policy.
const RESTART: &str = "Restart";
/// Action of a restart rule that starts all containers of the pod again.
const RESTART_ALL: &str = "RestartAllContainers";

/// Returns the restart policy of a container: its own, else the pod's. A sidecar's is Always, an ephemeral container's
/// Never; Always means OnFailure for an init container, which runs to success once.
pub fn policy_of(pod: &Pod, spec: &ContainerSpec<'_>) -> RestartPolicy {
    let policy = own_policy(&spec.container).unwrap_or_else(|| pod.restart_policy());
    match (spec.kind, policy) {
        (ContainerKind::Ephemeral, _) => RestartPolicy::Never,
        (ContainerKind::Sidecar, _) => RestartPolicy::Always,
        (ContainerKind::Init, RestartPolicy::Always) => RestartPolicy::OnFailure,
        (ContainerKind::Init | ContainerKind::Main, policy) => policy,
    }
}

/// Returns whether a container that ended with `exit_code` runs again by its rules, then by [`policy_of`]; upstream's
/// `ContainerShouldRestart`. No container of a pod that is being deleted runs again, no init container that succeeded,
/// and no ephemeral container.
pub fn restarts(pod: &Pod, spec: &ContainerSpec<'_>, exit_code: i32) -> bool {
    !pod.is_deleting() && policy_restarts(pod, spec, exit_code)
}

/// [`restarts`] by the policy alone, as statuses see it: that a pod is being deleted does not make the ends
/// before final.
pub fn policy_restarts(pod: &Pod, spec: &ContainerSpec<'_>, exit_code: i32) -> bool {
    let by_rule = match spec.kind {
        ContainerKind::Main => matches_rule(&spec.container, exit_code),
        ContainerKind::Init => {
            (exit_code != 0 && matches_rule(&spec.container, exit_code))
                || restarts_all(&spec.container, exit_code)
        }
        ContainerKind::Sidecar | ContainerKind::Ephemeral => false,
    };
    by_rule
        || match policy_of(pod, spec) {
            RestartPolicy::Always => true,
            RestartPolicy::OnFailure => exit_code != 0,
            RestartPolicy::Never => false,
        }
}

/// Returns whether the API server takes a status that reverts the end of a container with `exit_code`. It has one rule
/// for all containers: an init container may leave an end with 0 where its policy is Always or a rule says so. Where all
/// containers may restart, any of them may leave its end. Upstream: `ContainerShouldRestart` and
/// `AllContainersCouldRestart`, as `ValidateInitContainerStateTransition` uses them.
pub fn may_leave_its_end(pod: &Pod, spec: &ContainerSpec<'_>, exit_code: i32) -> bool {
    if spec.kind != ContainerKind::Ephemeral && all_may_restart(pod) {
        return true;
    }
    let policy = own_policy(&spec.container).unwrap_or_else(|| pod.restart_policy());
    let by_the_one_rule = spec.kind == ContainerKind::Init
        && (policy == RestartPolicy::Always || matches_rule(&spec.container, exit_code));
    by_the_one_rule || policy_restarts(pod, spec, exit_code)
}

/// Returns whether there is an exit code after which a container runs again; upstream's `IsContainerRestartable`.
pub fn is_restartable(pod: &Pod, spec: &ContainerSpec<'_>) -> bool {
    policy_of(pod, spec) != RestartPolicy::Never || has_restart_rule(&spec.container)
}

/// Returns whether some exit of a container restarts all containers of the pod; upstream's `AllContainersCouldRestart`.
pub fn all_may_restart(pod: &Pod) -> bool {
    let mut containers = pod.init_containers().iter().chain(pod.containers());
    containers.any(may_restart_all)
}

/// Returns whether an exit with this code restarts all containers of the pod.
pub fn restarts_all(container: &Container, exit_code: i32) -> bool {
    first_rule(container, exit_code).is_some_and(|rule| rule.action == RESTART_ALL)
}

/// Returns whether some exit of this container restarts all containers of the pod.
pub(super) fn may_restart_all(container: &Container) -> bool {
    let mut rules = rules(container).iter();
    rules.any(|rule| rule.action == RESTART_ALL)
}

fn has_restart_rule(container: &Container) -> bool {
    let mut rules = rules(container).iter();
    rules.any(restarts_it)
}

/// Returns whether the first rule that matches the exit code restarts the container.
fn matches_rule(container: &Container, exit_code: i32) -> bool {
    first_rule(container, exit_code).is_some_and(restarts_it)
}

fn restarts_it(rule: &ContainerRestartRule) -> bool {
    [RESTART, RESTART_ALL].contains(&rule.action.as_str())
}

/// The first rule that the exit code meets; upstream's `FindMatchingContainerRestartRule`.
fn first_rule(container: &Container, exit_code: i32) -> Option<&ContainerRestartRule> {
    rules(container).iter().find(|r| is_met(r, exit_code))
}

/// Rules count only beside a policy of the container's own.
fn rules(container: &Container) -> &[ContainerRestartRule] {
    match own_policy(container) {
        Some(_) => container.restart_policy_rules.as_deref().unwrap_or(&[]),
        None => &[],
    }
}

fn is_met(rule: &ContainerRestartRule, exit_code: i32) -> bool {
    rule.exit_codes.as_ref().is_some_and(|codes| {
        let listed = codes.values.iter().flatten().any(|v| *v == exit_code);
        match codes.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            _ => false,
        }
    })
}

fn own_policy(container: &Container) -> Option<RestartPolicy> {
    match container.restart_policy.as_deref()? {
        "Always" => Some(RestartPolicy::Always),
        "OnFailure" => Some(RestartPolicy::OnFailure),
        "Never" => Some(RestartPolicy::Never),
        _ => None,
    }
}

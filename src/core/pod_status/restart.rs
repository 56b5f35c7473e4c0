//! Whether the end of a container is its last.

use k8s_openapi::api::core::v1::Pod;

use crate::types::containers::ContainerSpec;
use crate::types::pod::RestartPolicy;
use crate::types::{ContainerKind, PodExt};

/// Whether its policy lets a container that ended with `exit_code` run again; upstream's `ContainerShouldRestart`.
/// The policy alone decides: a pod that is being deleted does not undo the ends before.
pub(super) fn restarts(pod: &Pod, spec: &ContainerSpec<'_>, exit_code: i32) -> bool {
    match spec.kind {
        ContainerKind::Sidecar => return true,
        ContainerKind::Ephemeral => return false,
        ContainerKind::Init if exit_code == 0 => return false,
        ContainerKind::Init | ContainerKind::Main => {}
    }
    let own = spec.container.restart_policy.as_deref();
    if own.is_some() {
        let rules = spec.container.restart_policy_rules.iter().flatten();
        let matching = rules.into_iter().find(|rule| {
            rule.exit_codes.as_ref().is_some_and(|on| {
                let listed = on.values.iter().flatten().any(|v| *v == exit_code);
                match on.operator.as_str() {
                    "In" => listed,
                    "NotIn" => !listed,
                    _ => false,
                }
            })
        });
        if let Some(rule) = matching {
            return matches!(rule.action.as_str(), "Restart" | "RestartAllContainers");
        }
    }
    match own {
        Some("Always") => true,
        Some("OnFailure") => exit_code != 0,
        Some("Never") => false,
        _ => match pod.restart_policy() {
            RestartPolicy::Always => true,
            RestartPolicy::OnFailure => exit_code != 0,
            RestartPolicy::Never => false,
        },
    }
}

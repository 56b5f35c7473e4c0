//! The conditions a kubelet owns; upstream's `status.Generate*Condition`.

use k8s_openapi::api::core::v1 as api;

use super::{StatusInput, state, time};
use crate::core::pod_actions::sandbox_to_create;
use crate::types::PodExt;

const READY_TO_START: &str = "PodReadyToStartContainers";
const INITIALIZED: &str = "Initialized";
const READY: &str = "Ready";
const CONTAINERS_READY: &str = "ContainersReady";
const SCHEDULED: &str = "PodScheduled";
const DISRUPTION_TARGET: &str = "DisruptionTarget";

/// Conditions that [`generate`] makes anew each time.
const OWNED: [&str; 5] = [
    READY_TO_START,
    INITIALIZED,
    READY,
    CONTAINERS_READY,
    SCHEDULED,
];

struct Verdict {
    status: &'static str,
    reason: Option<&'static str>,
    message: Option<String>,
}

impl Verdict {
    const TRUE: Self = Self {
        status: "True",
        reason: None,
        message: None,
    };

    fn not(reason: &'static str, message: Option<String>) -> Self {
        Self {
            status: "False",
            reason: Some(reason),
            message,
        }
    }
}

/// All conditions: others' first, then the kubelet's own. A condition whose status did not change keeps
/// its transition time.
pub(super) fn generate(
    input: &StatusInput<'_>,
    previous: Option<&api::PodStatus>,
    statuses: &[api::ContainerStatus],
    phase: &str,
) -> Vec<api::PodCondition> {
    let before = previous
        .and_then(|p| p.conditions.as_deref())
        .unwrap_or_default();
    let from_api = input
        .pod
        .status
        .as_ref()
        .and_then(|s| s.conditions.as_deref())
        .unwrap_or_default();
    let make = |type_: &str, verdict: Verdict| {
        let old = [before, from_api]
            .iter()
            .find_map(|all| all.iter().find(|c| c.type_ == type_));
        let kept = old.filter(|c| c.status == verdict.status);
        api::PodCondition {
            type_: type_.to_owned(),
            status: verdict.status.to_owned(),
            reason: verdict.reason.map(str::to_owned),
            message: verdict.message,
            last_transition_time: kept
                .and_then(|c| c.last_transition_time.clone())
                .or_else(|| Some(time(input.now))),
            observed_generation: input.pod.metadata.generation,
            last_probe_time: None,
        }
    };

    let mut conditions: Vec<_> = from_api
        .iter()
        .filter(|c| !OWNED.contains(&c.type_.as_str()) && c.type_ != DISRUPTION_TARGET)
        .cloned()
        .collect();
    if let Some((_, message)) = input.evicted {
        let verdict = Verdict {
            status: "True",
            reason: Some("TerminationByKubelet"),
            message: Some(message.to_owned()),
        };
        conditions.push(make(DISRUPTION_TARGET, verdict));
    } else {
        let kept = [before, from_api]
            .iter()
            .find_map(|all| all.iter().find(|c| c.type_ == DISRUPTION_TARGET));
        conditions.extend(kept.cloned());
    }

    let has_sandbox = sandbox_to_create(input.pod, input.status).is_none();
    let ready_to_start = Verdict {
        status: if has_sandbox { "True" } else { "False" },
        reason: None,
        message: None,
    };
    let initialized = Verdict {
        reason: (phase == "Succeeded").then_some("PodCompleted"),
        ..Verdict::TRUE
    };
    let ready = readiness(input, statuses, phase, &conditions);
    let containers_ready = containers_ready(input, statuses, phase);
    conditions.push(make(READY_TO_START, ready_to_start));
    conditions.push(make(INITIALIZED, initialized));
    conditions.push(make(READY, ready));
    conditions.push(make(CONTAINERS_READY, containers_ready));
    conditions.push(make(SCHEDULED, Verdict::TRUE));
    conditions
}

fn containers_ready(
    input: &StatusInput<'_>,
    statuses: &[api::ContainerStatus],
    phase: &str,
) -> Verdict {
    match phase {
        "Succeeded" => return Verdict::not("PodCompleted", None),
        "Failed" => return Verdict::not("PodFailed", None),
        _ => {}
    }
    let mut unknown = Vec::new();
    let mut unready = Vec::new();
    for container in input.pod.containers() {
        match statuses.iter().find(|s| s.name == container.name) {
            None => unknown.push(container.name.as_str()),
            Some(status) if !(status.ready && state(status).running.is_some()) => {
                unready.push(container.name.as_str());
            }
            Some(_) => {}
        }
    }
    let mut parts = Vec::new();
    if !unknown.is_empty() {
        parts.push(format!(
            "containers with unknown status: [{}]",
            unknown.join(" ")
        ));
    }
    if !unready.is_empty() {
        parts.push(format!(
            "containers with unready status: [{}]",
            unready.join(" ")
        ));
    }
    if parts.is_empty() {
        Verdict::TRUE
    } else {
        Verdict::not("ContainersNotReady", Some(parts.join(", ")))
    }
}

fn readiness(
    input: &StatusInput<'_>,
    statuses: &[api::ContainerStatus],
    phase: &str,
    others: &[api::PodCondition],
) -> Verdict {
    let containers = containers_ready(input, statuses, phase);
    if containers.status != "True" {
        return containers;
    }
    let gates = input
        .pod
        .spec_ref()
        .readiness_gates
        .as_deref()
        .unwrap_or_default();
    let closed: Vec<String> = gates
        .iter()
        .filter_map(|gate| {
            let name = &gate.condition_type;
            match others.iter().find(|c| c.type_ == *name) {
                None => Some(format!(
                    "corresponding condition of pod readiness gate \"{name}\" does not exist."
                )),
                Some(c) if c.status != "True" => Some(format!(
                    "the status of pod readiness gate \"{name}\" is not \"True\", but {}",
                    c.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    if closed.is_empty() {
        Verdict::TRUE
    } else {
        Verdict::not("ReadinessGatesNotReady", Some(closed.join(", ")))
    }
}

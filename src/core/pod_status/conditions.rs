//! The conditions a kubelet owns; upstream's `status.Generate*Condition`.

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::Pod;

use super::containers::Statuses;
use super::states::{last_end, some_if, state, time};
use super::{PREEMPTING, StatusInput};
use crate::core::pod_actions::{all_may_restart, sandbox_to_create};
use crate::core::restart_all::{CONDITION as ALL_RESTARTING, STARTED};
use crate::types::containers::is_sidecar;
use crate::types::{PodExt, Stamp};

const READY_TO_START: &str = "PodReadyToStartContainers";
const INITIALIZED: &str = "Initialized";
const READY: &str = "Ready";
const CONTAINERS_READY: &str = "ContainersReady";
const SCHEDULED: &str = "PodScheduled";
const DISRUPTION_TARGET: &str = "DisruptionTarget";
/// Message of the condition of a preempted pod; that of its status is another one.
const PREEMPTED: &str = "Pod was preempted by Kubelet to accommodate a critical pod.";
const RESIZE_PENDING: &str = "PodResizePending";
const RESIZE_IN_PROGRESS: &str = "PodResizeInProgress";

/// Conditions that [`generate`] makes anew each time.
const OWNED: [&str; 8] = [
    READY_TO_START,
    INITIALIZED,
    READY,
    CONTAINERS_READY,
    SCHEDULED,
    RESIZE_PENDING,
    RESIZE_IN_PROGRESS,
    ALL_RESTARTING,
];

struct Verdict {
    status: &'static str,
    reason: Option<String>,
    message: Option<String>,
}

impl Verdict {
    const TRUE: Self = Self {
        status: "True",
        reason: None,
        message: None,
    };

    fn not(reason: &str, message: Option<String>) -> Self {
        Self {
            status: "False",
            reason: Some(reason.to_owned()),
            message,
        }
    }

    fn holds(reason: &str, message: &str) -> Self {
        Self {
            status: "True",
            reason: some_if(reason),
            message: some_if(message),
        }
    }
}

/// All conditions: others' first, then the kubelet's own. A condition whose status did not change keeps
/// its transition time.
pub(super) fn generate(
    input: &StatusInput<'_>,
    previous: Option<&api::PodStatus>,
    statuses: &Statuses,
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
            reason: verdict.reason,
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
    if !super::is_terminal_phase(Some(phase)) {
        // An end settles every resize.
        let resizes = [
            (RESIZE_PENDING, &input.resize.pending),
            (RESIZE_IN_PROGRESS, &input.resize.in_progress),
        ];
        for (type_, resize) in resizes {
            let verdict = resize.as_ref().map(|(why, text)| Verdict::holds(why, text));
            conditions.extend(verdict.map(|verdict| make(type_, verdict)));
        }
    }
    if let Some((reason, message)) = input.evicted {
        let message = if reason == PREEMPTING {
            PREEMPTED
        } else {
            message
        };
        let verdict = Verdict::holds("TerminationByKubelet", message);
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
    let initialized = initialized(input, statuses, phase);
    let ready = readiness(input, statuses, phase, &conditions);
    let containers_ready = containers_ready(input, statuses, phase);
    conditions.push(make(READY_TO_START, ready_to_start));
    conditions.push(make(INITIALIZED, initialized));
    conditions.push(make(READY, ready));
    conditions.push(make(CONTAINERS_READY, containers_ready));
    conditions.push(make(SCHEDULED, Verdict::TRUE));
    if all_may_restart(input.pod) {
        conditions.push(make(ALL_RESTARTING, all_restarting(statuses, phase)));
    }
    conditions
}

/// `conditions` with PodReadyToStartContainers as true; `false` = it was so already.
pub(super) fn set_ready_to_start(
    conditions: &mut Vec<api::PodCondition>,
    pod: &Pod,
    now: Stamp,
) -> bool {
    let ready = api::PodCondition {
        type_: READY_TO_START.to_owned(),
        status: "True".to_owned(),
        last_transition_time: Some(time(now)),
        observed_generation: pod.metadata.generation,
        ..api::PodCondition::default()
    };
    match conditions.iter_mut().find(|c| c.type_ == READY_TO_START) {
        Some(condition) if condition.status == ready.status => return false,
        Some(condition) => *condition = ready,
        None => conditions.push(ready),
    }
    true
}

/// Upstream's `GeneratePodInitializedCondition`: true for good once a main container has started, since sidecars may
/// be restarting, or init containers running again in a new sandbox.
fn initialized(input: &StatusInput<'_>, statuses: &Statuses, phase: &str) -> Verdict {
    if phase == "Succeeded" {
        return Verdict::holds("PodCompleted", "");
    }
    let has_started = |s: &api::ContainerStatus| {
        state(s).running.is_some() || state(s).terminated.is_some() || last_end(s).is_some()
    };
    if statuses.main.iter().any(has_started) {
        return Verdict::TRUE;
    }
    let specs = input.pod.init_containers().iter();
    let incomplete = specs.zip(&statuses.init).filter(|(spec, status)| {
        if is_sidecar(spec) {
            status.started != Some(true)
        } else {
            !status.ready
        }
    });
    let incomplete: Vec<_> = incomplete.map(|(spec, _)| spec.name.as_str()).collect();
    if incomplete.is_empty() {
        return Verdict::TRUE;
    }
    let message = format!(
        "containers with incomplete status: [{}]",
        incomplete.join(" ")
    );
    Verdict::not("ContainersNotInitialized", Some(message))
}

/// Upstream's `GenerateAllContainersRestartingCondition`: true while containers are stopped for a restart of all.
fn all_restarting(statuses: &Statuses, phase: &str) -> Verdict {
    match (phase, &statuses.stopping) {
        ("Succeeded", _) => Verdict::not("PodCompleted", None),
        ("Failed", _) => Verdict::not("PodFailed", None),
        (_, Some(why)) => Verdict::holds(STARTED, why),
        (_, None) => Verdict {
            status: "False",
            reason: None,
            message: None,
        },
    }
}

/// Upstream's `GenerateContainersReadyCondition`: sidecars count like main containers.
fn containers_ready(input: &StatusInput<'_>, statuses: &Statuses, phase: &str) -> Verdict {
    match phase {
        "Succeeded" => return Verdict::not("PodCompleted", None),
        "Failed" => return Verdict::not("PodFailed", None),
        _ => {}
    }
    let inits = input.pod.init_containers().iter();
    let counted = inits
        .filter(|c| is_sidecar(c))
        .chain(input.pod.containers());
    let is_ready = |name: &str| statuses.get(name).is_some_and(|s| s.ready);
    let unready: Vec<_> = counted
        .map(|c| c.name.as_str())
        .filter(|name| !is_ready(name))
        .collect();
    if unready.is_empty() {
        return Verdict::TRUE;
    }
    let message = format!("containers with unready status: [{}]", unready.join(" "));
    Verdict::not("ContainersNotReady", Some(message))
}

fn readiness(
    input: &StatusInput<'_>,
    statuses: &Statuses,
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

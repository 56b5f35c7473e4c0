//! The node's conditions.

use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Resources that the node is short of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Memory.
    pub memory: bool,
    /// Disk space or inodes.
    pub disk: bool,
    /// Process ids.
    pub pid: bool,
}

impl Pressure {
    /// Names of the conditions that are True, in the order in which the node shows them.
    pub fn conditions(self) -> Vec<&'static str> {
        let all = [self.memory, self.disk, self.pid];
        let named = OWN.into_iter().zip(all);
        named
            .filter_map(|(name, is_true)| is_true.then_some(name))
            .collect()
    }
}

/// Readiness of the node to work on pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Reasons for which it is not ready.
    pub errors: Vec<String>,
    /// The agent has just started and may not know yet: errors change nothing that was there before.
    pub starting: bool,
}

/// Conditions that this node writes; other components write all others.
pub(super) const OWN: [&str; 4] = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"];

/// Resources without which no pod can be placed.
const REQUIRED: [&str; 3] = ["cpu", "memory", "pods"];
/// Another one, where local storage is counted.
const LOCAL_STORAGE: &str = "ephemeral-storage";

pub(super) struct Told {
    /// Reasons of events.
    pub(super) events: Vec<&'static str>,
    /// Conditions that the API server does not show yet.
    pub(super) pending: Vec<NodeCondition>,
}

struct Wanted {
    condition: NodeCondition,
    event: &'static str,
}

/// Sets the conditions of `status`, which holds what the API server shows; `pending` are those it has not heard of.
pub(super) fn set(
    status: &mut NodeStatus,
    local_storage: bool,
    pressure: Pressure,
    readiness: &Readiness,
    pending: &[NodeCondition],
    now: Time,
) -> Told {
    let mut errors = readiness.errors.clone();
    let has = |name: &&str| (status.capacity.as_ref()).is_some_and(|c| c.contains_key(*name));
    let storage = local_storage.then_some(LOCAL_STORAGE);
    let required = REQUIRED.into_iter().chain(storage);
    let missing: Vec<_> = required.filter(|name| !has(name)).collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        errors.push(format!("missing node capacity for resources: {missing}"));
    }
    let mut told = Told {
        events: Vec::new(),
        pending: Vec::new(),
    };
    let conditions = status.conditions.get_or_insert_default();
    for type_ in OWN {
        let at = conditions.iter().position(|c| c.type_ == type_);
        if type_ == "Ready"
            && readiness.starting
            && !errors.is_empty()
            && let Some(at) = at
        {
            conditions[at].last_heartbeat_time = Some(now.clone());
            continue;
        }
        let Wanted {
            mut condition,
            event,
        } = wanted(type_, pressure, &errors);
        condition.last_heartbeat_time = Some(now.clone());
        let shown = at.map(|at| &conditions[at]);
        let unheard = pending.iter().find(|c| c.type_ == type_);
        if let Some(shown) = shown.filter(|c| c.status == condition.status) {
            condition
                .last_transition_time
                .clone_from(&shown.last_transition_time);
            // What the API server never heard of is over.
            if unheard.is_some_and(|c| c.status != condition.status) {
                told.events.push(event);
            }
        } else {
            match unheard.filter(|c| c.status == condition.status) {
                Some(unheard) => condition
                    .last_transition_time
                    .clone_from(&unheard.last_transition_time),
                None => {
                    condition.last_transition_time = Some(now.clone());
                    // The first Ready of a node is told by its registration.
                    if type_ != "Ready" || shown.is_some() {
                        told.events.push(event);
                    }
                }
            }
            told.pending.push(condition.clone());
        }
        match at {
            Some(at) => conditions[at] = condition,
            None => conditions.push(condition),
        }
    }
    told
}

fn wanted(type_: &'static str, pressure: Pressure, errors: &[String]) -> Wanted {
    let choose = |on: bool, yes: [&'static str; 3], no: [&'static str; 3]| {
        let [reason, message, event] = if on { yes } else { no };
        Wanted {
            condition: condition(type_, on, reason, message.to_owned()),
            event,
        }
    };
    match type_ {
        "MemoryPressure" => choose(
            pressure.memory,
            [
                "KubeletHasInsufficientMemory",
                "kubelet has insufficient memory available",
                "NodeHasInsufficientMemory",
            ],
            [
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
                "NodeHasSufficientMemory",
            ],
        ),
        "DiskPressure" => choose(
            pressure.disk,
            [
                "KubeletHasDiskPressure",
                "kubelet has disk pressure",
                "NodeHasDiskPressure",
            ],
            [
                "KubeletHasNoDiskPressure",
                "kubelet has no disk pressure",
                "NodeHasNoDiskPressure",
            ],
        ),
        "PIDPressure" => choose(
            pressure.pid,
            [
                "KubeletHasInsufficientPID",
                "kubelet has insufficient PID available",
                "NodeHasInsufficientPID",
            ],
            [
                "KubeletHasSufficientPID",
                "kubelet has sufficient PID available",
                "NodeHasSufficientPID",
            ],
        ),
        _ => match joined(errors) {
            None => choose(
                true,
                [
                    "KubeletReady",
                    "kubelet is posting ready status",
                    "NodeReady",
                ],
                [""; 3],
            ),
            Some(errors) => Wanted {
                condition: condition(type_, false, "KubeletNotReady", errors),
                event: "NodeNotReady",
            },
        },
    }
}

fn condition(type_: &str, on: bool, reason: &str, message: String) -> NodeCondition {
    NodeCondition {
        type_: type_.to_owned(),
        status: if on { "True" } else { "False" }.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_heartbeat_time: None,
        last_transition_time: None,
    }
}

/// Upstream's aggregate: one error as it is, several in brackets, each once.
fn joined(errors: &[String]) -> Option<String> {
    let mut each: Vec<&str> = Vec::new();
    for error in errors {
        if !each.contains(&error.as_str()) {
            each.push(error);
        }
    }
    match each.as_slice() {
        [] => None,
        [one] => Some((*one).to_owned()),
        several => Some(format!("[{}]", several.join(", "))),
    }
}

//! Patch of a pod's status for the API server: the difference between the status it shows and this node's, as a
//! strategic merge patch. Upstream: `mergePodStatus`, `PatchPodStatus` and `isPodStatusByKubeletEqual`.
//!
//! **Invariants:** conditions and fields of others are never written. A patch is never empty. A server that drops
//! fields it does not know (an older one) does not get the same patch again and again. Fields that every supported
//! server knows decide by themselves, a newer field decides only where the server shows that it keeps it. Whenever a
//! patch is made it carries the newer fields as well.

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

use super::pod_actions::may_leave_its_end;
use super::pod_status::is_terminal;
use super::resources::amount;
use crate::types::containers::container_of;

const SCHEDULED: &str = "PodScheduled";
const DISRUPTION_TARGET: &str = "DisruptionTarget";
const EPHEMERAL: &str = "ephemeralContainerStatuses";
/// Conditions that make no sense on a pod whose phase is terminal.
const READINESS: [&str; 2] = ["Ready", "ContainersReady"];

/// Condition types a kubelet owns; upstream's `PodConditionsByKubelet`.
const OWNED: [&str; 8] = [
    SCHEDULED,
    "Ready",
    "Initialized",
    "ContainersReady",
    "PodReadyToStartContainers",
    "PodResizeInProgress",
    "PodResizePending",
    "AllContainersRestarting",
];

/// Top-level fields of a status that a kubelet writes, lists that merge by key apart. Lists of container statuses have
/// no merge key: they are replaced as a whole.
const FIELDS: [&str; 12] = [
    "phase",
    "reason",
    "message",
    "startTime",
    "hostIP",
    "podIP",
    "observedGeneration",
    "allocatedResources",
    "resources",
    "containerStatuses",
    "initContainerStatuses",
    EPHEMERAL,
];

/// Mappings of the pod as a whole among [`FIELDS`]. They merge: what is gone has to be named.
const OF_POD: [&str; 2] = ["allocatedResources", "resources"];

/// Lists that merge by `ip`.
const ADDRESSES: [&str; 2] = ["podIPs", "hostIPs"];

/// Fields that every supported server keeps (1.20 and later), wherever they occur.
const KEPT_BY_ALL: [&str; 30] = [
    "phase",
    "reason",
    "message",
    "startTime",
    "hostIP",
    "podIP",
    "podIPs",
    "ip",
    "containerStatuses",
    "initContainerStatuses",
    "name",
    "state",
    "lastState",
    "ready",
    "restartCount",
    "image",
    "imageID",
    "containerID",
    "started",
    "waiting",
    "running",
    "terminated",
    "exitCode",
    "signal",
    "startedAt",
    "finishedAt",
    "type",
    "status",
    "lastTransitionTime",
    "conditions",
];

/// Mappings of quantities. The server writes them in its own way, `500m` for `0.5`.
const AMOUNTS: [&str; 3] = ["allocatedResources", "limits", "requests"];

/// Input of a patch.
#[derive(Clone, Copy, Debug)]
pub struct PatchInput<'a> {
    /// The UID the API server has for the pod: the mirror pod's for a static pod. The patch applies to no other.
    pub uid: &'a str,
    /// The pod as the API server has it: the mirror pod of a static pod. By its policies the server judges a status.
    pub pod: &'a Pod,
    /// The newest status the API server is known to have.
    pub shown: Option<&'a api::PodStatus>,
    /// This node's status.
    pub ours: &'a api::PodStatus,
    /// The API server's own object of the pod has ephemeral containers, so it keeps their statuses.
    pub has_ephemeral: bool,
    /// Containers may still run: a terminal phase is held back, others would reuse what the pod holds.
    pub may_run: bool,
}

/// Returns whether the phase of `ours` is held back: it is terminal, the API server does not know yet, and containers
/// may still run.
pub fn is_withheld(input: &PatchInput<'_>) -> bool {
    input.may_run && is_terminal(input.ours) && !input.shown.is_some_and(is_terminal)
}

/// The patch of `pods/<name>/status`, or `None` when the API server shows what it has to.
pub fn status_patch(input: &PatchInput<'_>) -> Option<Value> {
    let shown = object(input.shown);
    let ours = told(input);
    let mut patch = Map::new();
    let mut needed = false;
    let mut fields = FIELDS.to_vec();
    if absent(shown.get("qosClass")) {
        // Immutable once it is set.
        fields.push("qosClass");
    }
    for field in fields {
        let (old, new) = (shown.get(field), ours.get(field));
        if !same(old, new) {
            let kept = field == EPHEMERAL && input.has_ephemeral;
            needed |= kept || matters(field, old, new);
            let value = match OF_POD.contains(&field) {
                true => replacing(old, new),
                false => new.cloned().unwrap_or(Value::Null),
            };
            patch.insert(field.to_owned(), value);
        }
    }
    for field in ADDRESSES {
        let (old, new) = (shown.get(field), ours.get(field));
        if !same(old, new) {
            needed |= matters(field, old, new);
            patch.insert(field.to_owned(), addresses(old, new));
        }
    }
    let conditions = conditions(&shown, &ours, is_terminal(input.ours), &mut needed);
    if !conditions.is_empty() {
        patch.insert("conditions".to_owned(), Value::Array(conditions));
    }
    needed.then(|| json!({"metadata": {"uid": input.uid}, "status": patch}))
}

/// Returns what makes a mapping another one where patches are merged.
fn replacing(old: Option<&Value>, new: Option<&Value>) -> Value {
    let (Some(Value::Object(old)), Some(Value::Object(new))) = (old, new) else {
        return new.cloned().unwrap_or(Value::Null);
    };
    let gone = old.keys().filter(|key| !new.contains_key(*key));
    let gone = gone.map(|key| (key.clone(), Value::Null));
    let kept = new.iter();
    let kept = kept.map(|(key, value)| (key.clone(), replacing(old.get(key), Some(value))));
    Value::Object(kept.chain(gone).collect())
}

/// This node's status as it is to be shown now.
fn told(input: &PatchInput<'_>) -> Map<String, Value> {
    let mut ours = input.ours.clone();
    if is_withheld(input) {
        let shown = input.shown;
        let pending = Some("Pending".to_owned());
        ours.phase = shown.and_then(|s| s.phase.clone()).or(pending);
        ours.reason = shown.and_then(|s| s.reason.clone());
        ours.message = shown.and_then(|s| s.message.clone());
        if let Some(conditions) = &mut ours.conditions {
            conditions.retain(|c| c.type_ != DISRUPTION_TARGET);
        }
    } else if is_terminal(&ours) {
        let why = match ours.phase.as_deref() {
            Some("Succeeded") => "PodCompleted",
            _ => "PodFailed",
        };
        for condition in ours.conditions.iter_mut().flatten() {
            if READINESS.contains(&condition.type_.as_str()) && condition.status == "True" {
                condition.status = "False".to_owned();
                condition.reason = Some(why.to_owned());
                condition.message = None;
            }
        }
    }
    keep_final_ends(input, &mut ours);
    object(Some(&ours))
}

/// Shows a container as ended for as long as the API server would refuse anything else: it ended for good by the restart
/// policy that the server knows, and runs again nevertheless, as init containers do in another sandbox. A single such
/// state makes the server refuse the whole status. Upstream (`checkContainerStateTransition`) holds all of it back instead.
fn keep_final_ends(input: &PatchInput<'_>, ours: &mut api::PodStatus) {
    let Some(shown) = input.shown else { return };
    let keep = |shown: &Option<Vec<api::ContainerStatus>>,
                ours: &mut Option<Vec<api::ContainerStatus>>| {
        for old in shown.iter().flatten() {
            let Some(end) = old.state.as_ref().and_then(|s| s.terminated.as_ref()) else {
                continue;
            };
            let is_final = container_of(input.pod, &old.name)
                .is_some_and(|spec| !may_leave_its_end(input.pod, &spec, end.exit_code));
            let mut ours = ours.iter_mut().flatten();
            if is_final
                && let Some(new) = ours.find(|new| new.name == old.name)
                && new.state.as_ref().is_none_or(|s| s.terminated.is_none())
            {
                // A later end may be followed by anything that its own exit code allows.
                let last = new.last_state.as_ref();
                let later = last.filter(|last| {
                    last.terminated
                        .as_ref()
                        .is_some_and(|last| last.container_id != end.container_id)
                });
                new.state = later.or(old.state.as_ref()).cloned();
            }
        }
    };
    keep(
        &shown.init_container_statuses,
        &mut ours.init_container_statuses,
    );
    keep(&shown.container_statuses, &mut ours.container_statuses);
    keep(
        &shown.ephemeral_container_statuses,
        &mut ours.ephemeral_container_statuses,
    );
}

/// The elements of `conditions` that differ and are ours to write.
fn conditions(
    shown: &Map<String, Value>,
    ours: &Map<String, Value>,
    terminal: bool,
    needed: &mut bool,
) -> Vec<Value> {
    let list = |status: &Map<String, Value>| -> Vec<Value> {
        let list = status.get("conditions").and_then(Value::as_array);
        list.cloned().unwrap_or_default()
    };
    let type_of = |c: &Value| c.get("type").and_then(Value::as_str).map(str::to_owned);
    let (shown, ours) = (list(shown), list(ours));
    let mut patch = Vec::new();
    for new in &ours {
        let Some(type_) = type_of(new) else { continue };
        let shared = terminal && type_ == DISRUPTION_TARGET;
        if !shared && !OWNED.contains(&type_.as_str()) {
            continue;
        }
        let old = shown
            .iter()
            .find(|c| type_of(c).as_ref() == Some(&type_))
            .map(without_probe_time);
        let new = without_probe_time(new);
        if same(old.as_ref(), Some(&new)) {
            continue;
        }
        *needed |= matters("conditions", old.as_ref(), Some(&new));
        let mut element = new;
        let left = old.as_ref().and_then(Value::as_object);
        if let (Some(element), Some(left)) = (element.as_object_mut(), left) {
            for key in left.keys() {
                if !element.contains_key(key) {
                    element.insert(key.clone(), Value::Null);
                }
            }
        }
        patch.push(element);
    }
    if ours.is_empty() {
        return patch;
    }
    for old in &shown {
        let Some(type_) = type_of(old) else { continue };
        let is_left = OWNED.contains(&type_.as_str()) && type_ != SCHEDULED;
        if is_left && !ours.iter().any(|c| type_of(c).as_ref() == Some(&type_)) {
            *needed = true;
            patch.push(json!({"$patch": "delete", "type": type_}));
        }
    }
    patch
}

fn without_probe_time(condition: &Value) -> Value {
    let mut condition = condition.clone();
    if let Some(fields) = condition.as_object_mut() {
        fields.remove("lastProbeTime");
    }
    condition
}

/// A list that merges by key is replaced as a whole; the directive is only understood where there is a list.
fn addresses(old: Option<&Value>, new: Option<&Value>) -> Value {
    let mut list = Vec::new();
    if !absent(old) {
        list.push(json!({"$patch": "replace"}));
    }
    if let Some(new) = new.and_then(Value::as_array) {
        list.extend(new.iter().cloned());
    }
    Value::Array(list)
}

/// A status as JSON without what is null or empty.
fn object(status: Option<&api::PodStatus>) -> Map<String, Value> {
    // A status always has a representation: its keys are strings and it holds no numbers but integers.
    let mut value = status
        .and_then(|s| serde_json::to_value(s).ok())
        .unwrap_or_default();
    prune(&mut value);
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn prune(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(prune);
            fields.retain(|_, v| !absent(Some(v)));
        }
        Value::Array(items) => items.iter_mut().for_each(prune),
        _ => {}
    }
}

/// Absent, null and empty are the same thing to the API server.
fn absent(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => true,
        Some(Value::String(text)) => text.is_empty(),
        Some(Value::Array(items)) => items.is_empty(),
        Some(Value::Object(fields)) => fields.is_empty(),
        Some(_) => false,
    }
}

fn same(old: Option<&Value>, new: Option<&Value>) -> bool {
    old == new || (absent(old) && absent(new))
}

/// Returns an amount in thousandths, rounded up as the server does it.
fn amount_of(value: &Value) -> Option<i128> {
    const MILLI: i128 = 1_000_000;
    let text = value.as_str()?;
    let nanos = amount(&Quantity(text.to_owned()));
    Some(nanos.div_euclid(MILLI) + i128::from(nanos.rem_euclid(MILLI) != 0))
}

/// Returns whether a difference is worth a request; see the module.
fn matters(field: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    let Some((old_value, new_value)) = old.zip(new) else {
        return !(absent(old) && absent(new)) && KEPT_BY_ALL.contains(&field);
    };
    match (old_value, new_value) {
        (Value::Object(old), Value::Object(new)) if AMOUNTS.contains(&field) => {
            old.len() != new.len()
                || old.iter().any(|(name, old)| {
                    new.get(name)
                        .is_none_or(|new| amount_of(old) != amount_of(new))
                })
        }
        (Value::Object(old), Value::Object(new)) => {
            let keys = old
                .keys()
                .chain(new.keys().filter(|k| !old.contains_key(*k)));
            keys.into_iter()
                .any(|k| !same(old.get(k), new.get(k)) && matters(k, old.get(k), new.get(k)))
        }
        (Value::Array(old), Value::Array(new)) => {
            old.len() != new.len()
                || old
                    .iter()
                    .zip(new)
                    .any(|(o, n)| matters(field, Some(o), Some(n)))
        }
        (old, new) => old != new,
    }
}

#[cfg(test)]
mod tests;

//! The API status of a pod; upstream's `generateAPIPodStatus` and the merge in its status manager.
//!
//! The input is the desired pod, the runtime's facts, the container records, the previous status, the stage of the
//! worker. The output is a `v1.PodStatus`. `containers` makes the three lists of container statuses, `phase` and
//! `conditions` read them, `addresses` picks the pod's addresses, `merge` compares with the reported status.
//!
//! **Invariants:** a terminal phase never changes; restart counts, exit codes and lastState never go back,
//! also when the runtime has forgotten them; statuses of init containers are in the order of the spec, others
//! in that of their names; times have a precision of seconds; equal input gives an equal status, so that
//! nothing is sent when nothing changed.

mod addresses;
mod conditions;
mod containers;
mod merge;
mod phase;
mod qos;
mod states;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::Pod;

pub use crate::types::ProbeView;
pub use addresses::{first_of, in_node_order};
pub use merge::{IllegalTransition, merge_for_update};
pub use qos::{QosClass, qos_class};

use super::container_history::Records;
use super::deadline;
use super::pod_actions::CRASH_LOOP_BACK_OFF;
use super::resize::ResizeView;
use super::shutdown;
use crate::types::runtime::PodStatus;
use crate::types::{PodExt, Stamp};
pub use states::{CONTAINER_CREATING, POD_INITIALIZING};
use states::{some_if_any, time};

/// Reason of a pod that makes room for a critical one.
pub const PREEMPTING: &str = "Preempting";

/// Stage of the pod's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Containers are started and restarted.
    Syncing,
    /// Containers are being stopped; none is started any more.
    Terminating,
    /// All containers are stopped. What is not known to have ended is reported as ended with 137, and the
    /// phase of a pod that is not static becomes terminal; upstream's `TerminatePod`.
    Terminated,
}

/// Input of [`generate`].
#[derive(Clone, Copy, Debug)]
pub struct StatusInput<'a> {
    /// Desired state; its status counts as the previous one where `previous` is absent.
    pub pod: &'a Pod,
    /// The runtime's facts, from an inspection.
    pub status: &'a PodStatus,
    /// Records of the pod's containers.
    pub records: &'a Records<'a>,
    /// The newest status this agent generated.
    pub previous: Option<&'a api::PodStatus>,
    /// Reasons for which containers could not be started: reason and message by container name; upstream's reason
    /// cache. CrashLoopBackOff needs no entry, it follows from the records.
    pub reasons: &'a BTreeMap<String, (String, String)>,
    /// Probe results by container name.
    pub probes: &'a BTreeMap<String, ProbeView>,
    /// Allocated and applied resources.
    pub resize: &'a ResizeView,
    /// True if the pod's runtime handler can mount read-only recursively; `None` = not known now, keeps the reported
    /// value.
    pub recursive_read_only: Option<bool>,
    /// Images of the volumes of kind `image`, by volume; one that is missing keeps the reported value.
    pub volume_images: &'a BTreeMap<String, String>,
    /// The node's addresses, primary first.
    pub host_ips: &'a [String],
    /// Scheme of container ids, as `containerd`.
    pub runtime_name: &'a str,
    /// Stage of the worker.
    pub stage: Stage,
    /// Reason and message of an eviction or a preemption. An evicted pod fails. A preempted one ([`PREEMPTING`])
    /// succeeds when all its containers end well, and then shows neither reason nor message.
    pub evicted: Option<(&'a str, &'a str)>,
    /// `activeDeadlineSeconds` has passed; see [`deadline::exceeded`].
    pub deadline_exceeded: bool,
    /// Moment before the request to the runtime for `status`.
    pub listed_at: Stamp,
    /// The current time.
    pub now: Stamp,
    /// Longest crash back-off.
    pub backoff_max: Duration,
}

/// Returns whether the phase of a status is Succeeded or Failed.
pub fn is_terminal(status: &api::PodStatus) -> bool {
    is_terminal_phase(status.phase.as_deref())
}

fn is_terminal_phase(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The API status of a pod.
pub fn generate(input: &StatusInput<'_>) -> api::PodStatus {
    let pod = input.pod;
    let previous = input.previous.or(pod.status.as_ref());
    let mut statuses = containers::generate(input, previous);
    let mut phase = phase::of(input, &statuses).to_owned();
    if input.stage == Stage::Terminated {
        statuses.finish(pod);
        if !is_terminal_phase(Some(&phase)) {
            phase = phase::of(input, &statuses).to_owned();
        }
        // Nothing of it runs any more, so it cannot stay what it was.
        if !pod.is_static() && !is_terminal_phase(Some(&phase)) {
            phase = "Failed".to_owned();
        }
    }
    statuses.cap_messages();

    let settled = [previous, pod.status.as_ref()]
        .into_iter()
        .flatten()
        .filter_map(|s| s.phase.as_deref())
        .find(|p| is_terminal_phase(Some(p)));
    let (mut reason, mut message) = (None, None);
    if let Some((why, text)) = input.evicted {
        let over = input.stage == Stage::Terminated;
        let stopped = if why == PREEMPTING {
            // The override of a preemption precedes the kill. A pod whose containers then all end well has succeeded.
            over && phase != "Succeeded"
        } else {
            (reason, message) = (Some(why.to_owned()), Some(text.to_owned()));
            // Withheld while something may still run: others may reuse what a terminal pod has freed.
            over || !statuses.any_running()
        };
        if stopped {
            phase = "Failed".to_owned();
            (reason, message) = (Some(why.to_owned()), Some(text.to_owned()));
        }
    } else if input.deadline_exceeded && settled.is_none() && !is_terminal_phase(Some(&phase)) {
        // A pod that came to its own end is active no longer, however late that was found out.
        phase = "Failed".to_owned();
        (reason, message) = (
            Some(deadline::REASON.to_owned()),
            Some(deadline::MESSAGE.to_owned()),
        );
    }
    if phase == "Failed" && reason.is_none() && statuses.any_stopped_by_shutdown() {
        (reason, message) = (
            Some(shutdown::TERMINATED.to_owned()),
            Some(shutdown::TERMINATED_MESSAGE.to_owned()),
        );
    }
    if let Some(settled) = settled {
        phase = settled.to_owned();
    }
    if (input.evicted.is_none() || reason.is_none())
        && let Some(previous) = previous.filter(|p| p.phase.as_deref() == Some(&phase))
    {
        reason = previous.reason.clone();
        message = previous.message.clone();
    }

    let conditions = conditions::generate(input, previous, &statuses, &phase);
    let pod_ips = addresses::of_pod(pod, &input.status.ips, input.host_ips, previous);
    let host_ips = addresses::of_host(input.host_ips, previous);
    api::PodStatus {
        phase: Some(phase),
        reason,
        message,
        conditions: Some(conditions),
        init_container_statuses: some_if_any(statuses.init.into_iter()),
        container_statuses: Some(statuses.main),
        ephemeral_container_statuses: some_if_any(statuses.ephemeral.into_iter()),
        host_ip: host_ips.first().cloned(),
        host_ips: some_if_any(host_ips.into_iter().map(|ip| api::HostIP { ip })),
        pod_ip: pod_ips.first().cloned(),
        pod_ips: listed(pod_ips),
        start_time: previous
            .and_then(|p| p.start_time.clone())
            .or_else(|| Some(time(input.now))),
        qos_class: Some(qos_class(pod).as_str().to_owned()),
        allocated_resources: input.resize.pod.allocated.clone(),
        resources: input.resize.pod.actual.clone(),
        observed_generation: pod.metadata.generation,
        ..carried_over(pod, previous)
    }
}

fn listed(pod_ips: Vec<String>) -> Option<Vec<api::PodIP>> {
    some_if_any(pod_ips.into_iter().map(|ip| api::PodIP { ip }))
}

/// Returns the status of a pod whose sandbox has just become ready, with these addresses, and whose volumes are
/// mounted: the reported status `told` with the condition PodReadyToStartContainers and the addresses; `None` when it
/// has the condition already. Upstream: `OnPodSandboxReady`, which leaves the addresses to a later status.
pub fn sandbox_became_ready(
    pod: &Pod,
    told: &api::PodStatus,
    ips: &[String],
    host_ips: &[String],
    now: Stamp,
) -> Option<api::PodStatus> {
    let mut status = told.clone();
    let conditions = status.conditions.get_or_insert_default();
    if !conditions::set_ready_to_start(conditions, pod, now) {
        return None;
    }
    let pod_ips = addresses::of_pod(pod, ips, host_ips, Some(told));
    status.pod_ip = pod_ips.first().cloned();
    status.pod_ips = listed(pod_ips);
    Some(status)
}

/// The status of a pod that was refused at admission; upstream's `rejectPod`.
pub fn rejected(
    pod: &Pod,
    previous: Option<&api::PodStatus>,
    reason: &str,
    message: &str,
    now: Stamp,
) -> api::PodStatus {
    let previous = previous.or(pod.status.as_ref());
    api::PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(format!("Pod was rejected: {message}")),
        conditions: previous.and_then(|p| p.conditions.clone()),
        start_time: previous
            .and_then(|p| p.start_time.clone())
            .or_else(|| Some(time(now))),
        qos_class: Some(qos_class(pod).as_str().to_owned()),
        observed_generation: pod.metadata.generation,
        ..api::PodStatus::default()
    }
}

/// The container statuses of all kinds.
pub fn all_statuses(status: &api::PodStatus) -> impl Iterator<Item = &api::ContainerStatus> {
    let init = status.init_container_statuses.iter().flatten();
    let main = status.container_statuses.iter().flatten();
    let ephemeral = status.ephemeral_container_statuses.iter().flatten();
    init.chain(main).chain(ephemeral)
}

/// Returns the containers whose crash back-off is in `new` and not in `told`: one per back-off, since each follows
/// another end. The reported status is stored, so a restart of the agent does not repeat the report.
pub fn new_crash_loops(told: Option<&api::PodStatus>, new: &api::PodStatus) -> Vec<String> {
    let back_off = |s: &api::ContainerStatus| {
        let waiting = s.state.as_ref()?.waiting.as_ref()?;
        let end = s.last_state.as_ref()?.terminated.as_ref()?;
        let is_crash_loop = waiting.reason.as_deref() == Some(CRASH_LOOP_BACK_OFF);
        is_crash_loop.then(|| (s.name.clone(), end.container_id.clone()))
    };
    let back_offs =
        |status: &api::PodStatus| -> Vec<_> { all_statuses(status).filter_map(back_off).collect() };
    let told = told.map(back_offs).unwrap_or_default();
    let mut new = back_offs(new);
    new.retain(|one| !told.contains(one));
    new.into_iter().map(|(name, _)| name).collect()
}

/// Fields that others own.
fn carried_over(pod: &Pod, previous: Option<&api::PodStatus>) -> api::PodStatus {
    let from = pod.status.as_ref().or(previous);
    api::PodStatus {
        nominated_node_name: from.and_then(|s| s.nominated_node_name.clone()),
        resource_claim_statuses: from.and_then(|s| s.resource_claim_statuses.clone()),
        extended_resource_claim_status: from.and_then(|s| s.extended_resource_claim_status.clone()),
        ..api::PodStatus::default()
    }
}

#[cfg(test)]
mod tests;

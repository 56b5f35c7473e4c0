//! The API status of a pod; upstream's `generateAPIPodStatus` and the merge in its status manager.
//!
//! In: the desired pod, the runtime's facts, the container records, the status before, the stage of the
//! worker. Out: a `v1.PodStatus`. Main containers only.
//!
//! **Invariants:** a terminal phase never changes; restart counts, exit codes and lastState never go back,
//! also when the runtime has forgotten them; statuses are in the order of the spec; times have a
//! precision of seconds; equal input gives an equal status, so that nothing is sent when nothing changed.

mod conditions;
mod merge;
mod qos;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub use crate::types::ProbeView;
pub use merge::{IllegalTransition, merge_for_update};
pub use qos::{QosClass, qos_class};

use super::container_history::{
    History, Latest, Records, STATUS_UNKNOWN, STATUS_UNKNOWN_EXIT_CODE,
};
use super::pod_actions::{CRASH_LOOP_BACK_OFF, crash_wait, restarts_after, sandbox_to_create};
use super::resize::ResizeView;
use super::state::ExitRecord;
use crate::types::pod::RestartPolicy;
use crate::types::runtime::PodStatus;
use crate::types::{ContainerId, PodExt, Stamp};

/// Waiting reason of a container that was not started yet.
pub const CONTAINER_CREATING: &str = "ContainerCreating";
/// Waiting reason while init containers are left to run.
pub const POD_INITIALIZING: &str = "PodInitializing";
/// Longest termination message of one container, in bytes.
const MAX_MESSAGE: usize = 4096;
/// Longest sum of the termination messages of one pod, in bytes.
const MAX_POD_MESSAGES: usize = 12 * 1024;

/// Where the pod's worker stands.
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

/// What [`generate`] works on.
#[derive(Clone, Copy, Debug)]
pub struct StatusInput<'a> {
    /// Desired state; its status counts as the previous one where `previous` is absent.
    pub pod: &'a Pod,
    /// The runtime's facts, from an inspection.
    pub status: &'a PodStatus,
    /// What is on record of the pod's containers.
    pub records: &'a Records<'a>,
    /// The newest status this agent generated.
    pub previous: Option<&'a api::PodStatus>,
    /// Why a container could not be started: reason and message by container name; upstream's reason
    /// cache. CrashLoopBackOff needs no entry, it follows from the records.
    pub reasons: &'a BTreeMap<String, (String, String)>,
    /// Probe results by container name.
    pub probes: &'a BTreeMap<String, ProbeView>,
    /// Resources allocated and in force.
    pub resize: &'a ResizeView,
    /// The node's addresses, primary first.
    pub host_ips: &'a [String],
    /// Scheme of container ids, as `containerd`.
    pub runtime_name: &'a str,
    /// Where the worker stands.
    pub stage: Stage,
    /// Reason and message of an eviction.
    pub evicted: Option<(&'a str, &'a str)>,
    /// A moment before the runtime was asked for `status`.
    pub listed_at: Stamp,
    /// The current time.
    pub now: Stamp,
    /// Longest crash back-off.
    pub backoff_max: Duration,
}

/// Whether a status says Succeeded or Failed.
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
    let mut statuses = container_statuses(input, previous);
    cap_messages(&mut statuses);
    let any_running = statuses.iter().any(|s| state(s).running.is_some());

    let mut phase = phase_of(pod, &statuses, input.stage == Stage::Terminated).to_owned();
    let (mut reason, mut message) = (None, None);
    if let Some((why, text)) = input.evicted {
        (reason, message) = (Some(why.to_owned()), Some(text.to_owned()));
        // Withheld while something may still run: others may reuse what a terminal pod has freed.
        if input.stage == Stage::Terminated || !any_running {
            phase = "Failed".to_owned();
        }
    }
    let settled = [previous, pod.status.as_ref()]
        .into_iter()
        .flatten()
        .filter_map(|s| s.phase.as_deref())
        .find(|p| is_terminal_phase(Some(p)));
    if let Some(settled) = settled {
        phase = settled.to_owned();
    }
    if input.evicted.is_none()
        && let Some(previous) = previous.filter(|p| p.phase.as_deref() == Some(&phase))
    {
        reason = previous.reason.clone();
        message = previous.message.clone();
    }

    let conditions = conditions::generate(input, previous, &statuses, &phase);
    let pod_ips = pod_ips(input, previous);
    api::PodStatus {
        phase: Some(phase),
        reason,
        message,
        conditions: Some(conditions),
        container_statuses: Some(statuses),
        host_ip: input.host_ips.first().cloned(),
        host_ips: some_if_any(
            input
                .host_ips
                .iter()
                .map(|ip| api::HostIP { ip: ip.clone() }),
        ),
        pod_ip: pod_ips.first().cloned(),
        pod_ips: some_if_any(pod_ips.into_iter().map(|ip| api::PodIP { ip })),
        start_time: previous
            .and_then(|p| p.start_time.clone())
            .or_else(|| Some(time(input.now))),
        qos_class: Some(qos_class(pod).as_str().to_owned()),
        observed_generation: pod.metadata.generation,
        ..carried_over(pod, previous)
    }
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

/// Containers whose crash back-off is in `new` and not in `told`: one per back-off, since each follows
/// another end. What was told is on record, so a restart of the agent is no reason to tell it again.
pub fn new_crash_loops(told: Option<&api::PodStatus>, new: &api::PodStatus) -> Vec<String> {
    let back_off = |s: &api::ContainerStatus| {
        let waiting = s.state.as_ref()?.waiting.as_ref()?;
        let end = s.last_state.as_ref()?.terminated.as_ref()?;
        let is_crash_loop = waiting.reason.as_deref() == Some(CRASH_LOOP_BACK_OFF);
        is_crash_loop.then(|| (s.name.clone(), end.container_id.clone()))
    };
    let back_offs = |status: &api::PodStatus| -> Vec<_> {
        let statuses = status.container_statuses.iter().flatten();
        statuses.filter_map(back_off).collect()
    };
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

fn container_statuses(
    input: &StatusInput<'_>,
    previous: Option<&api::PodStatus>,
) -> Vec<api::ContainerStatus> {
    let pod = input.pod;
    let histories: Vec<_> = pod
        .containers()
        .iter()
        .map(|c| {
            let record = input.records.get(&c.name);
            History::of(&c.name, input.status, record, input.listed_at, input.now)
        })
        .collect();
    let lost_for_good = is_lost_for_good(input, &histories);
    pod.containers()
        .iter()
        .zip(histories)
        .map(|(container, history)| {
            let old = previous
                .and_then(|p| p.container_statuses.as_ref())
                .and_then(|all| all.iter().find(|s| s.name == container.name));
            container_status(input, container, &history, old, lost_for_good)
        })
        .collect()
}

/// A pod that may start at most once has lost its sandbox after some container ran: those that did not run
/// never will (see `pod_actions`), so that they must not keep the pod waiting.
fn is_lost_for_good(input: &StatusInput<'_>, histories: &[History<'_>]) -> bool {
    let in_flight = |h: &History<'_>| {
        matches!(
            h.latest,
            Latest::Running(_) | Latest::Starting | Latest::Unknown(_)
        )
    };
    input.pod.restart_policy() == RestartPolicy::Never
        && sandbox_to_create(input.pod, input.status).is_some()
        && histories.iter().any(History::may_have_run)
        && !histories.iter().any(in_flight)
}

fn container_status(
    input: &StatusInput<'_>,
    container: &Container,
    history: &History<'_>,
    old: Option<&api::ContainerStatus>,
    lost_for_good: bool,
) -> api::ContainerStatus {
    let mut status = api::ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        restart_count: i32::try_from(history.restart_count)
            .unwrap_or(i32::MAX)
            .max(old.map_or(0, |o| o.restart_count)),
        ..api::ContainerStatus::default()
    };
    let id = |id: &ContainerId| format!("{}://{id}", input.runtime_name);
    let syncing = input.stage == Stage::Syncing && !input.pod.is_deleting();
    let mut restarts = syncing;
    match &history.latest {
        Latest::NeverRan if lost_for_good => {
            status.state = Some(terminated(unlocated()));
            restarts = false;
        }
        Latest::NeverRan => restarts = never_ran(input, &mut status, old, syncing),
        Latest::Starting => status.state = Some(waiting(input.pod)),
        Latest::Running(current) => {
            status.container_id = Some(id(&current.id));
            status.image = current.image.clone();
            status.image_id = current.image_ref.clone();
            status.state = Some(api::ContainerState {
                running: Some(api::ContainerStateRunning {
                    started_at: time_of_ns(current.started_at_ns),
                }),
                ..api::ContainerState::default()
            });
            restarts = false;
        }
        Latest::Unknown(current) => {
            status.container_id = Some(id(&current.id));
            status.image = current.image.clone();
            status.image_id = current.image_ref.clone();
            status.state = Some(waiting_for(
                STATUS_UNKNOWN,
                "The runtime cannot tell the state of the container",
            ));
            restarts = false;
        }
        Latest::Exited(exit) => {
            status.container_id = Some(id(&exit.container_id));
            if !exit.image.is_empty() {
                status.image = exit.image.clone();
                status.image_id = exit.image_ref.clone();
            }
            status.state = Some(terminated(end_state(exit, input.runtime_name)));
            restarts = syncing && restarts_after(input.pod, exit.exit_code);
        }
    }
    if status.last_state.is_none() {
        status.last_state = last_state(input, history, &status, old);
    }
    if restarts && let Some((reason, message)) = why_not_started(input, container, history) {
        if state(&status).terminated.is_some() {
            status.last_state = status.state.take();
        }
        status.state = Some(waiting_for(&reason, &message));
    }
    if input.stage == Stage::Terminated && state(&status).terminated.is_none() {
        let container_id = status.container_id.clone();
        status.state = Some(terminated(api::ContainerStateTerminated {
            container_id,
            message: Some(
                "The container could not be located when the pod was terminated".to_owned(),
            ),
            ..unlocated()
        }));
    }
    let running = state(&status).running.is_some();
    let probes = input
        .probes
        .get(&container.name)
        .copied()
        .unwrap_or_default();
    let started = running && (container.startup_probe.is_none() || probes.started == Some(true));
    status.started = Some(started);
    status.ready = started && (container.readiness_probe.is_none() || probes.ready == Some(true));
    status
}

/// Neither the runtime nor the records know of a run: what the API was told before still holds.
/// Returns whether the container is to be started.
fn never_ran(
    input: &StatusInput<'_>,
    status: &mut api::ContainerStatus,
    old: Option<&api::ContainerStatus>,
    syncing: bool,
) -> bool {
    let old_state = old.and_then(|o| o.state.clone()).unwrap_or_default();
    if let (Some(old), Some(end)) = (old, &old_state.terminated) {
        status.container_id.clone_from(&old.container_id);
        status.image.clone_from(&old.image);
        status.image_id.clone_from(&old.image_id);
        status.last_state.clone_from(&old.last_state);
        let restarts = syncing && restarts_after(input.pod, end.exit_code);
        status.state = Some(old_state);
        return restarts;
    }
    if let (Some(old), Some(_)) = (old, &old_state.running) {
        let end = api::ContainerStateTerminated {
            container_id: old.container_id.clone(),
            ..unlocated()
        };
        if syncing && restarts_after(input.pod, STATUS_UNKNOWN_EXIT_CODE) {
            status.state = Some(waiting(input.pod));
            status.last_state = Some(terminated(end));
            status.restart_count = status.restart_count.saturating_add(1);
            return true;
        }
        status.state = Some(terminated(end));
        return false;
    }
    status.state = Some(waiting(input.pod));
    syncing
}

/// The reason to show for a container that should run and does not.
fn why_not_started(
    input: &StatusInput<'_>,
    container: &Container,
    history: &History<'_>,
) -> Option<(String, String)> {
    if let Some(cached) = input.reasons.get(&container.name) {
        return Some(cached.clone());
    }
    let Latest::Exited(exit) = &history.latest else {
        return None;
    };
    let record = input.records.get(&container.name);
    crash_wait(
        input.pod,
        container,
        record,
        exit,
        input.now,
        input.backoff_max,
    )
    .map(|w| (w.reason, w.message))
}

/// The end before the current state: from runtime and records, else from what the API was told.
fn last_state(
    input: &StatusInput<'_>,
    history: &History<'_>,
    status: &api::ContainerStatus,
    old: Option<&api::ContainerStatus>,
) -> Option<api::ContainerState> {
    if let Some(exit) = &history.previous_exit {
        return Some(terminated(end_state(exit, input.runtime_name)));
    }
    let is_other = |state: &&api::ContainerState| {
        state
            .terminated
            .as_ref()
            .is_some_and(|t| status.container_id.is_none() || t.container_id != status.container_id)
    };
    let old = old?;
    old.state
        .as_ref()
        .filter(is_other)
        .or(old.last_state.as_ref().filter(is_other))
        .filter(|s| status.state.as_ref() != Some(*s))
        .cloned()
}

/// The phase that containers in these states make; upstream's `getPhase`.
fn phase_of(pod: &Pod, statuses: &[api::ContainerStatus], is_terminated: bool) -> &'static str {
    let (mut waiting, mut running, mut stopped, mut succeeded) = (0, 0, 0, 0);
    for status in statuses {
        let state = state(status);
        let last_ended = status
            .last_state
            .as_ref()
            .is_some_and(|s| s.terminated.is_some());
        let unknown = state
            .waiting
            .as_ref()
            .is_some_and(|w| w.reason.as_deref() == Some(STATUS_UNKNOWN));
        // Of one that the runtime cannot tell, nothing may be concluded: it may run.
        if state.running.is_some() || unknown {
            running += 1;
        } else if let Some(end) = &state.terminated {
            stopped += 1;
            succeeded += usize::from(end.exit_code == 0);
        } else if last_ended {
            stopped += 1;
        } else {
            waiting += 1;
        }
    }
    if is_terminated && running == 0 && !pod.is_static() {
        return if waiting == 0 && stopped > 0 && stopped == succeeded {
            "Succeeded"
        } else {
            "Failed"
        };
    }
    if waiting > 0 {
        return "Pending";
    }
    if running > 0 {
        return "Running";
    }
    if stopped == 0 {
        return "Pending";
    }
    match pod.restart_policy() {
        RestartPolicy::Always => "Running",
        _ if stopped == succeeded => "Succeeded",
        RestartPolicy::Never => "Failed",
        RestartPolicy::OnFailure => "Running",
    }
}

fn pod_ips(input: &StatusInput<'_>, previous: Option<&api::PodStatus>) -> Vec<String> {
    if !input.status.ips.is_empty() {
        return input.status.ips.clone();
    }
    if input.pod.host_network() {
        return input.host_ips.to_vec();
    }
    previous
        .and_then(|p| p.pod_ips.as_ref())
        .map(|ips| ips.iter().map(|ip| ip.ip.clone()).collect())
        .unwrap_or_default()
}

/// Shortens termination messages to what one container and one pod may say.
fn cap_messages(statuses: &mut [api::ContainerStatus]) {
    let limit = MAX_MESSAGE.min(MAX_POD_MESSAGES / statuses.len().max(1));
    for status in statuses {
        for state in [&mut status.state, &mut status.last_state] {
            let end = state.as_mut().and_then(|s| s.terminated.as_mut());
            if let Some(message) = end.and_then(|t| t.message.as_mut()) {
                shorten(message, limit);
            }
        }
    }
}

/// Cuts a text to at most `limit` bytes without splitting a character.
fn shorten(text: &mut String, limit: usize) {
    let mut end = limit.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

fn state(status: &api::ContainerStatus) -> &api::ContainerState {
    static NONE: api::ContainerState = api::ContainerState {
        running: None,
        terminated: None,
        waiting: None,
    };
    status.state.as_ref().unwrap_or(&NONE)
}

fn waiting(pod: &Pod) -> api::ContainerState {
    let has_init = pod
        .spec_ref()
        .init_containers
        .as_ref()
        .is_some_and(|c| !c.is_empty());
    api::ContainerState {
        waiting: Some(api::ContainerStateWaiting {
            reason: Some(
                if has_init {
                    POD_INITIALIZING
                } else {
                    CONTAINER_CREATING
                }
                .to_owned(),
            ),
            message: None,
        }),
        ..api::ContainerState::default()
    }
}

fn waiting_for(reason: &str, message: &str) -> api::ContainerState {
    api::ContainerState {
        waiting: Some(api::ContainerStateWaiting {
            reason: Some(reason.to_owned()),
            message: some_if(message),
        }),
        ..api::ContainerState::default()
    }
}

fn terminated(end: api::ContainerStateTerminated) -> api::ContainerState {
    api::ContainerState {
        terminated: Some(end),
        ..api::ContainerState::default()
    }
}

fn end_state(exit: &ExitRecord, runtime_name: &str) -> api::ContainerStateTerminated {
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

/// An end that nobody saw.
fn unlocated() -> api::ContainerStateTerminated {
    api::ContainerStateTerminated {
        exit_code: STATUS_UNKNOWN_EXIT_CODE,
        reason: Some(STATUS_UNKNOWN.to_owned()),
        message: Some(
            "The container could not be located in the runtime. The container used to be Running"
                .to_owned(),
        ),
        ..api::ContainerStateTerminated::default()
    }
}

fn some_if(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn some_if_any<T>(items: impl Iterator<Item = T>) -> Option<Vec<T>> {
    let items: Vec<T> = items.collect();
    (!items.is_empty()).then_some(items)
}

/// The wall clock of a stamp, to the second.
fn time(stamp: Stamp) -> Time {
    Time(jiff_second(stamp.wall_ms.div_euclid(1000)).unwrap_or_default())
}

fn time_of_ns(ns: i64) -> Option<Time> {
    if ns <= 0 {
        return None;
    }
    jiff_second(ns.div_euclid(1_000_000_000)).map(Time)
}

fn jiff_second(second: i64) -> Option<jiff::Timestamp> {
    jiff::Timestamp::from_second(second).ok()
}

#[cfg(test)]
mod tests;

//! The statuses of a pod's containers of all kinds; upstream's `convertToAPIContainerStatuses` together with the
//! prober's `UpdatePodStatus` and the defaults of `TerminatePod`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};

use super::states::{
    completed, end_state, is_unknown, last_end, shorten, some_if_any, state, terminated,
    time_of_ns, unlocated, unlocated_when_terminated, waiting, waiting_for,
};
use super::{Stage, StatusInput};
use crate::core::container_history::{
    History, Latest, NODE_SHUTDOWN, STATUS_UNKNOWN, STATUS_UNKNOWN_EXIT_CODE, judged, judged_end,
};
use crate::core::pod_actions::{
    CRASH_LOOP_BACK_OFF, crash_wait, is_restartable, policy_restarts as restarts, sandbox_to_create,
};
use crate::core::restart_all::{self, RESTARTING, Restart, Seen};
use crate::core::state::ExitRecord;
use crate::core::volume_mounts::recursive_read_only;
use crate::types::containers::{ContainerSpec, containers_of, is_sidecar};
use crate::types::pod::RestartPolicy;
use crate::types::runtime::ContainerState as RuntimeState;
use crate::types::{ContainerId, ContainerKind, PodExt};

/// Longest termination message of one container, in bytes.
const MAX_MESSAGE: usize = 4096;
/// Longest sum of the termination messages of one pod, in bytes.
const MAX_POD_MESSAGES: usize = 12 * 1024;

/// The three lists of container statuses.
#[derive(Debug, Default)]
pub(super) struct Statuses {
    /// In the order of the spec.
    pub(super) init: Vec<api::ContainerStatus>,
    /// In the order of their names.
    pub(super) main: Vec<api::ContainerStatus>,
    /// In the order of their names.
    pub(super) ephemeral: Vec<api::ContainerStatus>,
    /// Names of containers that have ended and run again because of a restart of all.
    pub(super) restarting: BTreeSet<String>,
    /// The cause of the restart of all containers that they are being stopped for.
    pub(super) stopping: Option<String>,
}

impl Statuses {
    /// The status of that name, of whatever kind.
    pub(super) fn get(&self, name: &str) -> Option<&api::ContainerStatus> {
        let mut all = self.init.iter().chain(&self.main).chain(&self.ephemeral);
        all.find(|s| s.name == name)
    }

    /// Returns whether any container runs.
    pub(super) fn any_running(&self) -> bool {
        let mut all = self.init.iter().chain(&self.main).chain(&self.ephemeral);
        all.any(|s| state(s).running.is_some())
    }

    /// Returns whether a main container has ended only because the machine went down.
    pub(super) fn any_stopped_by_shutdown(&self) -> bool {
        let ends = self
            .main
            .iter()
            .filter_map(|s| state(s).terminated.as_ref());
        let mut reasons = ends.map(|end| end.reason.as_deref());
        reasons.any(|reason| reason == Some(NODE_SHUTDOWN))
    }

    /// Reports every container that is not known to have ended as ended with 137, once nothing of the pod runs: init
    /// containers up to the last one that was tried, main ones if the pod got that far. Upstream: `TerminatePod`.
    pub(super) fn finish(&mut self, pod: &Pod) {
        if self.is_initialised(pod) {
            self.main.iter_mut().for_each(finish);
        }
        // The first one counts as tried.
        let tried = self.init.iter().rposition(was_tried).unwrap_or(0);
        self.init.iter_mut().take(tried + 1).for_each(finish);
    }

    /// Returns whether main containers were or should have been started; upstream's `hasPodInitialized`.
    fn is_initialised(&self, pod: &Pod) -> bool {
        let Some(last) = self.init.last() else {
            return true;
        };
        if self.main.iter().any(was_tried) {
            return true;
        }
        if pod.init_containers().last().is_some_and(is_sidecar) {
            return state(last).running.is_some() && last.started == Some(true);
        }
        let end = state(last).terminated.as_ref().or_else(|| last_end(last));
        end.is_some_and(|end| judged_end(end) == 0)
    }

    /// Shortens termination messages to what one container and one pod may say.
    pub(super) fn cap_messages(&mut self) {
        let count = self.init.len() + self.main.len() + self.ephemeral.len();
        let limit = MAX_MESSAGE.min(MAX_POD_MESSAGES / count.max(1));
        let all = self.init.iter_mut().chain(&mut self.main);
        for status in all.chain(&mut self.ephemeral) {
            for state in [&mut status.state, &mut status.last_state] {
                let end = state.as_mut().and_then(|s| s.terminated.as_mut());
                if let Some(message) = end.and_then(|t| t.message.as_mut()) {
                    shorten(message, limit);
                }
            }
        }
    }
}

/// Returns whether a container ran or was about to.
fn was_tried(status: &api::ContainerStatus) -> bool {
    state(status).waiting.is_none() || last_end(status).is_some() || status.container_id.is_some()
}

fn finish(status: &mut api::ContainerStatus) {
    if state(status).terminated.is_some() {
        return;
    }
    status.state = Some(terminated(api::ContainerStateTerminated {
        container_id: status.container_id.clone(),
        ..unlocated_when_terminated()
    }));
    status.ready = false;
    if status.started.is_some() {
        status.started = Some(false);
    }
}

/// One container and what is known of it.
struct View<'a> {
    spec: &'a ContainerSpec<'a>,
    history: History<'a>,
    /// An init container whose end belongs to a previous sandbox: it is to run again.
    forgotten: Option<ExitRecord>,
    /// It has ended and runs again because of a restart of all containers.
    again: bool,
}

/// Facts about the containers together.
struct Together {
    /// A pod that may start at most once has lost its sandbox after some container ran: those that did not run never
    /// will (see `pod_actions`), so that they must not keep the pod waiting.
    lost_for_good: bool,
    /// The init container that did not succeed, so that its pod failed with it and none after it had its turn.
    stopped_at: Option<String>,
    /// The runtime has a main container that was created or runs: all init containers are done.
    main_made: bool,
    /// A main container ran at some time.
    main_ran: bool,
}

/// The statuses of all containers of the spec.
pub(super) fn generate(input: &StatusInput<'_>, previous: Option<&api::PodStatus>) -> Statuses {
    let specs: Vec<_> = containers_of(input.pod).collect();
    let views: Vec<_> = specs.iter().map(|spec| view(input, spec)).collect();
    let together = together(input, &views);
    let restart = restart_all::stopping(&seen(input)).filter(|_| is_syncing(input));
    let again = views.iter().filter(|v| v.again);
    let mut statuses = Statuses {
        restarting: again.map(|v| v.spec.container.name.clone()).collect(),
        stopping: restart.map(|r| {
            let Restart {
                trigger, exit_code, ..
            } = r;
            format!("container {trigger} exited with {exit_code}, all containers restart")
        }),
        ..Statuses::default()
    };
    for view in &views {
        let old = previous.and_then(|p| match view.spec.kind {
            ContainerKind::Init | ContainerKind::Sidecar => p.init_container_statuses.as_ref(),
            ContainerKind::Main => p.container_statuses.as_ref(),
            ContainerKind::Ephemeral => p.ephemeral_container_statuses.as_ref(),
        });
        let name = &view.spec.container.name;
        let old = old.and_then(|all| all.iter().find(|s| s.name == *name));
        let status = container_status(input, view, &together, old);
        match view.spec.kind {
            ContainerKind::Init | ContainerKind::Sidecar => statuses.init.push(status),
            ContainerKind::Main => statuses.main.push(status),
            ContainerKind::Ephemeral => statuses.ephemeral.push(status),
        }
    }
    statuses.main.sort_by(|a, b| a.name.cmp(&b.name));
    statuses.ephemeral.sort_by(|a, b| a.name.cmp(&b.name));
    statuses
}

/// Returns whether ended containers may be started again.
fn is_syncing(input: &StatusInput<'_>) -> bool {
    input.stage == Stage::Syncing && !input.pod.is_deleting()
}

fn seen<'a>(input: &StatusInput<'a>) -> Seen<'a> {
    Seen {
        pod: input.pod,
        status: input.status,
        records: input.records,
        listed_at: input.listed_at,
        now: input.now,
    }
}

fn view<'a>(input: &StatusInput<'a>, spec: &'a ContainerSpec<'a>) -> View<'a> {
    let name = &spec.container.name;
    let record = input.records.get(name);
    let history = History::of(name, input.status, record, input.listed_at, input.now);
    let is_left = input
        .status
        .containers_named(name)
        .any(|c| c.state != RuntimeState::Created);
    let forgotten = record
        .filter(|r| spec.kind == ContainerKind::Init && r.intent.is_none() && !is_left)
        .and_then(|r| r.last_exit.clone());
    let again = is_syncing(input) && restart_all::runs_again(&seen(input), spec, &history.latest);
    View {
        spec,
        history,
        forgotten,
        again,
    }
}

fn together(input: &StatusInput<'_>, views: &[View<'_>]) -> Together {
    let of_kind = |kind| views.iter().filter(move |v| v.spec.kind == kind);
    let in_flight = |v: &View<'_>| {
        matches!(
            v.history.latest,
            Latest::Running(_) | Latest::Starting | Latest::Unknown(_)
        )
    };
    // As `pod_actions` has it: a policy of a container's own that is Never as well changes nothing.
    let once_only = input.pod.restart_policy() == RestartPolicy::Never
        && !of_kind(ContainerKind::Main).any(|v| is_restartable(input.pod, v.spec));
    let of_spec = |v: &&View<'_>| v.spec.kind != ContainerKind::Ephemeral;
    let is_made = |v: &View<'_>| {
        let name = &v.spec.container.name;
        let newest = input.status.container(name).map(|c| c.state);
        matches!(newest, Some(RuntimeState::Created | RuntimeState::Running))
    };
    let main_ran = of_kind(ContainerKind::Main).any(|v| v.history.may_have_run());
    let succeeded =
        |v: &View<'_>| matches!(&v.history.latest, Latest::Exited(exit) if judged(exit) == 0);
    let stopped_at = of_kind(ContainerKind::Init).find(|v| !main_ran && !succeeded(v));
    Together {
        lost_for_good: once_only
            && sandbox_to_create(input.pod, input.status).is_some()
            && views
                .iter()
                .filter(of_spec)
                .any(|v| v.history.may_have_run())
            && !views.iter().any(in_flight)
            && !views.iter().any(|v| v.again),
        stopped_at: stopped_at.map(|v| v.spec.container.name.clone()),
        main_made: of_kind(ContainerKind::Main).any(is_made),
        main_ran,
    }
}

/// Returns the user of the container that the status is about: as the runtime reports it, and once it has removed the
/// container, as it was shown. Upstream: `convertContainerStatusUser`.
fn user(
    input: &StatusInput<'_>,
    status: &api::ContainerStatus,
    old: Option<&api::ContainerStatus>,
) -> Option<api::ContainerUser> {
    let shown = status.container_id.as_ref()?;
    let (_, id) = shown.split_once("://")?;
    let mut containers = input.status.containers.iter();
    match containers.find(|container| container.id.as_str() == id) {
        Some(container) => container.user.as_ref().map(|user| api::ContainerUser {
            linux: Some(api::LinuxContainerUser {
                uid: user.uid,
                gid: user.gid,
                supplemental_groups: some_if_any(user.supplemental_groups.iter().copied()),
            }),
        }),
        None => {
            let old = old.filter(|old| old.container_id.as_ref() == Some(shown));
            old.and_then(|old| old.user.clone())
        }
    }
}

fn container_status(
    input: &StatusInput<'_>,
    view: &View<'_>,
    together: &Together,
    old: Option<&api::ContainerStatus>,
) -> api::ContainerStatus {
    let View { spec, history, .. } = view;
    let container = &*spec.container;
    let mut status = api::ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        restart_count: i32::try_from(history.restart_count)
            .unwrap_or(i32::MAX)
            .max(old.map_or(0, |o| o.restart_count)),
        ..api::ContainerStatus::default()
    };
    let id = |id: &ContainerId| format!("{}://{id}", input.runtime_name);
    let syncing = is_syncing(input);
    let its_turn = |at: &String| *at == container.name;
    let never_starts = together.lost_for_good
        && spec.kind != ContainerKind::Ephemeral
        && together.stopped_at.as_ref().is_none_or(its_turn);
    let may_restart = match (&history.latest, &view.forgotten) {
        (_, Some(exit)) => {
            status.state = Some(waiting(input.pod));
            status.last_state = Some(terminated(end_state(exit, input.runtime_name)));
            syncing
        }
        (Latest::NeverRan, None) if never_starts => {
            status.state = Some(terminated(unlocated()));
            false
        }
        (Latest::NeverRan, None) => never_ran(input, spec, &mut status, old, syncing),
        (Latest::Starting, None) => {
            status.state = Some(waiting(input.pod));
            syncing
        }
        (Latest::Running(current), None) => {
            status.container_id = Some(id(&current.id));
            status.image = current.image.clone();
            status.image_id = current.image_ref.clone();
            status.state = Some(api::ContainerState {
                running: Some(api::ContainerStateRunning {
                    started_at: time_of_ns(current.started_at_ns),
                }),
                ..api::ContainerState::default()
            });
            false
        }
        (Latest::Unknown(current), None) => {
            status.container_id = Some(id(&current.id));
            status.image = current.image.clone();
            status.image_id = current.image_ref.clone();
            status.state = Some(waiting_for(
                STATUS_UNKNOWN,
                "The runtime does not know the state of the container",
            ));
            false
        }
        (Latest::Exited(exit), None) => {
            status.container_id = Some(id(&exit.container_id));
            if !exit.image.is_empty() {
                status.image = exit.image.clone();
                status.image_id = exit.image_ref.clone();
            }
            let end = terminated(end_state(exit, input.runtime_name));
            let again = syncing && (view.again || restarts(input.pod, spec, judged(exit)));
            // The API server lets no container leave an end with 0 that its policy counts as success.
            match again && judged(exit) != exit.exit_code {
                true => (status.state, status.last_state) = (Some(waiting(input.pod)), Some(end)),
                false => status.state = Some(end),
            }
            again
        }
    };
    let passed = is_passed(input, view, together, &status);
    if passed {
        status.state = Some(terminated(passed_end(input, view)));
        if view.forgotten.is_some() {
            status.last_state = None;
        }
    }
    status.user = user(input, &status, old);
    if status.last_state.is_none() {
        status.last_state = last_state(input, history, &status, old);
    }
    if may_restart
        && !passed
        && let Some((reason, message)) = why_not_started(input, container, view, &status, old)
    {
        if state(&status).terminated.is_some() {
            status.last_state = status.state.take();
        }
        status.state = Some(waiting_for(&reason, &message));
    }
    probed(input, spec, &mut status);
    described(input, container, old, &mut status);
    status
}

/// Returns whether an init container that neither runs nor is known to have ended must have ended well, since a main
/// container was made after it.
fn is_passed(
    input: &StatusInput<'_>,
    view: &View<'_>,
    together: &Together,
    status: &api::ContainerStatus,
) -> bool {
    let beyond = together.main_made || (together.lost_for_good && together.main_ran);
    let is_gone = input.status.container(&view.spec.container.name).is_none();
    let inferred = match &view.history.latest {
        Latest::Exited(exit) => exit.inferred,
        Latest::NeverRan => state(status)
            .terminated
            .as_ref()
            .is_none_or(|end| end.reason.as_deref() == Some(STATUS_UNKNOWN)),
        _ => false,
    };
    view.spec.kind == ContainerKind::Init
        && !view.again
        && beyond
        && is_gone
        && (inferred || view.forgotten.is_some())
}

fn passed_end(input: &StatusInput<'_>, view: &View<'_>) -> api::ContainerStateTerminated {
    match &view.forgotten {
        Some(exit) if judged(exit) == 0 => end_state(exit, input.runtime_name),
        _ => completed(),
    }
}

/// Keeps the reported status of a container without a run in the runtime and the records. Returns whether the container
/// is to be started.
fn never_ran(
    input: &StatusInput<'_>,
    spec: &ContainerSpec<'_>,
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
        let restarts = syncing && restarts(input.pod, spec, judged_end(end));
        status.state = Some(old_state);
        return restarts;
    }
    if let (Some(old), Some(_)) = (old, &old_state.running) {
        let end = api::ContainerStateTerminated {
            container_id: old.container_id.clone(),
            ..unlocated()
        };
        if syncing && restarts(input.pod, spec, STATUS_UNKNOWN_EXIT_CODE) {
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

/// Returns the reason to show for a container that should run and does not. While it is held back after a crash, that
/// is the reason, whatever its newest start ended with; otherwise it is the error of its newest start. A back-off that
/// is over is shown until the start that ends it, also by an agent that has not waited for it itself.
fn why_not_started(
    input: &StatusInput<'_>,
    container: &Container,
    view: &View<'_>,
    status: &api::ContainerStatus,
    old: Option<&api::ContainerStatus>,
) -> Option<(String, String)> {
    // A container that another one has restarted did not crash.
    let restart = input.records.restart().filter(|_| view.again);
    let own = restart.is_none_or(|restart| restart.trigger == container.name);
    let held_back = match (&view.history.latest, &view.forgotten) {
        (Latest::Exited(exit), None) if own => crash_wait(
            input.pod,
            container,
            input.records,
            exit,
            input.now,
            input.backoff_max,
        ),
        _ => None,
    };
    let told = || {
        let old = old.filter(|old| old.container_id == status.container_id)?;
        let waiting = state(old).waiting.as_ref()?;
        let reason = waiting
            .reason
            .as_deref()
            .filter(|r| *r == CRASH_LOOP_BACK_OFF)?;
        Some((
            reason.to_owned(),
            waiting.message.clone().unwrap_or_default(),
        ))
    };
    let has_ended = matches!(&view.history.latest, Latest::Exited(_)) && view.forgotten.is_none();
    held_back
        .map(|w| (w.reason, w.message))
        .or_else(|| input.reasons.get(&container.name).cloned())
        .or_else(|| told().filter(|_| has_ended && own))
        .or_else(|| {
            let text = "The container restarts with all others of the pod";
            view.again.then(|| (RESTARTING.to_owned(), text.to_owned()))
        })
}

/// Returns the end before the current state: from runtime and records, else from the reported status.
fn last_state(
    input: &StatusInput<'_>,
    history: &History<'_>,
    status: &api::ContainerStatus,
    old: Option<&api::ContainerStatus>,
) -> Option<api::ContainerState> {
    if let Some(exit) = &history.previous_exit {
        let mut end = end_state(exit, input.runtime_name);
        if end.message.is_none() {
            end.message = told_message(&end, old);
        }
        return Some(terminated(end));
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

/// Returns the message at the end of a container as reported to the API server. By now its message file is that of a
/// later attempt.
fn told_message(
    end: &api::ContainerStateTerminated,
    old: Option<&api::ContainerStatus>,
) -> Option<String> {
    let old = old?;
    let ends = [old.state.as_ref(), old.last_state.as_ref()];
    let told = ends
        .into_iter()
        .flatten()
        .filter_map(|s| s.terminated.as_ref());
    told.filter(|told| told.container_id == end.container_id)
        .find_map(|told| told.message.clone())
}

/// `started` and `ready`: an init container is ready once it has succeeded, an ephemeral one never.
fn probed(input: &StatusInput<'_>, spec: &ContainerSpec<'_>, status: &mut api::ContainerStatus) {
    let container = &*spec.container;
    let probes = input
        .probes
        .get(&container.name)
        .copied()
        .unwrap_or_default();
    let running = state(status).running.is_some();
    let started = running && (container.startup_probe.is_none() || probes.started == Some(true));
    let ready = started && (container.readiness_probe.is_none() || probes.ready == Some(true));
    let succeeded = state(status)
        .terminated
        .as_ref()
        .is_some_and(|end| end.exit_code == 0);
    (status.started, status.ready) = match spec.kind {
        ContainerKind::Init => (Some(started), succeeded),
        ContainerKind::Sidecar | ContainerKind::Main => (Some(started), ready),
        ContainerKind::Ephemeral => (None, false),
    };
}

/// Returns the status as far as it follows from the spec and the resources of the container. Volume mounts are reported
/// from the start, the rest once there is a container.
fn described(
    input: &StatusInput<'_>,
    container: &Container,
    old: Option<&api::ContainerStatus>,
    status: &mut api::ContainerStatus,
) {
    let mounts = container.volume_mounts.iter().flatten();
    status.volume_mounts = some_if_any(mounts.map(|mount| mounted(input, mount, old)));
    if status.container_id.is_none() && !is_unknown(status) {
        return;
    }
    let lifecycle = container.lifecycle.as_ref();
    status.stop_signal = lifecycle.and_then(|l| l.stop_signal.clone());
    let view = input.resize.containers.get(&container.name);
    let mut wanted = container.resources.clone().unwrap_or_default();
    if let Some(allocated) = view.and_then(|v| v.allocated.clone()) {
        wanted.requests = Some(allocated);
    }
    wanted.requests = wanted.requests.filter(|r| !r.is_empty());
    status.allocated_resources.clone_from(&wanted.requests);
    // What is in force is told of a running container only.
    let actual = view
        .and_then(|v| v.actual.clone())
        .filter(|_| state(status).running.is_some());
    status.resources = Some(actual.map_or(wanted, |actual| ResourceRequirements {
        claims: container.resources.as_ref().and_then(|r| r.claims.clone()),
        ..actual
    }));
}

fn mounted(
    input: &StatusInput<'_>,
    mount: &api::VolumeMount,
    old: Option<&api::ContainerStatus>,
) -> api::VolumeMountStatus {
    let before = old.and_then(|o| o.volume_mounts.as_ref());
    let before = before.and_then(|all| {
        all.iter()
            .find(|m| m.name == mount.name && m.mount_path == mount.mount_path)
    });
    let read_only = mount.read_only == Some(true);
    let recursively = match input.recursive_read_only {
        Some(supported) => recursive_read_only(mount, supported) == Ok(true),
        None => before.is_some_and(|b| b.recursive_read_only.as_deref() == Some("Enabled")),
    };
    let mode = if recursively { "Enabled" } else { "Disabled" };
    let image = input.volume_images.get(&mount.name);
    api::VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: read_only.then_some(true),
        recursive_read_only: read_only.then(|| mode.to_owned()),
        volume_status: match image {
            Some(image) => Some(api::VolumeStatus {
                image: Some(api::ImageVolumeStatus {
                    image_ref: image.clone(),
                }),
            }),
            None => before.and_then(|b| b.volume_status.clone()),
        },
    }
}

//! Steps of one sync of a pod; upstream's `computePodActions` together with `doBackOff`.
//!
//! The input is the desired pod, the runtime's view, the records, failed probes, the time. The output is
//! [`PodActions`], a list for the executor. [`compute`] puts it together; the rules are in `init` (init containers and
//! sidecars), `view` (the common part, main and ephemeral containers) and `policy`.
//!
//! # What the executor has to do
//!
//! It works the fields of [`PodActions`] off in their order and stops at the first step that fails. Starts
//! are different: one that fails does not keep the others from being made, for containers that depend on
//! each other are never in one list. A container that completed or started lets the next one start in a
//! later sync, which therefore has to follow soon.
//!
//! 1. `kill_pod`: every container, then every sandbox. What follows is done as well.
//! 2. `kill`, each with its `grace` if it has one. A container may be in `kill` and in `start`.
//! 3. `remove_created`, each with the record of its end (`container_history::record_end`).
//! 4. `forget_init`: commit `container_history::forget_init`, made from a snapshot taken after step 3, then
//!    remove what the runtime has left of these containers. Better inspect the pod before, so that the ends
//!    that step 1 brought about are recorded; if not, they are concluded (137).
//! 5. `post_start`: run the hook again; when it succeeded, record `<container id>/postStart`
//!    ([`post_start_key`]) in `hooks_done`; when it failed, kill the container.
//! 6. `create_sandbox`.
//! 7. `start`: ephemeral, init and sidecar, main containers. The same hook record after each start.
//!
//! With `look_again`, another sync follows at once, on a status that is newer than this one.
//!
//! A restart of all containers ([`restart_all`]) comes before everything else: as long as its containers are stopped,
//! nothing starts and no sandbox is made; nothing starts either before the exit that asks for it is recorded as its
//! cause.
//!
//! **Invariants:** the same input gives the same actions; nothing is started while it may still run;
//! a policy of Never starts a container at most once, even when records are all that is left of it; no
//! main container starts before every init container has completed, and every sidecar has started, in the
//! sandbox it starts in; an action list that was cut off at any point is completed by computing it again.
//!
//! Stricter than upstream: with policy Never a container in state Unknown is killed and not
//! started again, since it may have run; a created container that was never started is started instead of
//! a second one being made; a container that is killed for a probe is started again in the same list only
//! when its policy is not Never, its restart rules are asked when its exit code is known.

mod actions;
mod hash;
mod init;
mod policy;
mod view;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};

pub use crate::types::{ProbeFailure, ProbeView};
pub use actions::{
    KillContainer, KillPod, KillReason, PodActions, PostStart, StartContainer, Waiting,
};
pub use hash::container_hash;
pub use policy::{
    all_may_restart, is_restartable, may_leave_its_end, policy_of, policy_restarts, restarts,
    restarts_all,
};
pub use view::post_start_key;

use super::backoff::{crash, go_duration};
use super::container_history::{Latest, Records};
use super::restart_all::{self, Restart, Seen};
use super::state::ExitRecord;
use crate::types::containers::containers_of;
use crate::types::pod::RestartPolicy;
use crate::types::runtime::{ContainerState, PodStatus, SandboxState};
use crate::types::{ContainerKind, PodExt, Stamp};
use view::{Sync, View};

/// Waiting reason of a container in crash back-off.
pub const CRASH_LOOP_BACK_OFF: &str = "CrashLoopBackOff";

/// Input of [`compute`].
#[derive(Clone, Copy, Debug)]
pub struct PodActionInput<'a> {
    /// Desired state.
    pub pod: &'a Pod,
    /// The runtime's facts, from an inspection.
    pub status: &'a PodStatus,
    /// Records of the pod's containers.
    pub records: &'a Records<'a>,
    /// Failed probes of the running containers, by container name.
    pub probe_failures: &'a BTreeMap<String, ProbeFailure>,
    /// Probe results of the running containers, by container name: whether a sidecar has started.
    pub probes: &'a BTreeMap<String, ProbeView>,
    /// Moment before the request to the runtime for `status`.
    pub listed_at: Stamp,
    /// The current time.
    pub now: Stamp,
    /// Longest crash back-off.
    pub backoff_max: Duration,
}

impl<'a> PodActionInput<'a> {
    fn seen(&self) -> Seen<'a> {
        Seen {
            pod: self.pod,
            status: self.status,
            records: self.records,
            listed_at: self.listed_at,
            now: self.now,
        }
    }
}

/// Returns the attempt of the new sandbox that a pod needs; `None` if it needs none. Upstream's `PodSandboxChanged`.
/// Network facts count only if the newest sandbox was inspected.
pub fn sandbox_to_create(pod: &Pod, status: &PodStatus) -> Option<u32> {
    let newest = match status.sandboxes.first() {
        None => return Some(0),
        Some(newest) => newest,
    };
    let ready = status
        .sandboxes
        .iter()
        .filter(|s| s.state == SandboxState::Ready)
        .count();
    let network_changed = newest.host_network.is_some_and(|host_network| {
        host_network != pod.host_network() || (!host_network && newest.ips.is_empty())
    });
    if ready > 1 || newest.state != SandboxState::Ready || network_changed {
        return Some(newest.attempt.saturating_add(1));
    }
    None
}

/// Decides what one sync has to do.
pub fn compute(input: &PodActionInput<'_>) -> PodActions {
    let stopping = restart_all::stopping(&input.seen());
    let mut actions = if stopping.is_some() || restart_all::pending(&input.seen()).is_some() {
        before_restart(input, stopping)
    } else {
        match sandbox_to_create(input.pod, input.status) {
            Some(attempt) => with_new_sandbox(input, attempt),
            None => in_current_sandbox(input),
        }
    };
    actions.next_due = actions
        .waiting
        .iter()
        .map(|w| w.until)
        .min_by_key(|until| until.until(input.now));
    actions
}

/// Decides while all containers are to restart. `restart`: it is recorded, so that everything is stopped; otherwise
/// only what a probe wants stopped is.
fn before_restart(input: &PodActionInput<'_>, restart: Option<&Restart>) -> PodActions {
    let mut sync = Sync::new(input);
    sync.actions.sandbox_id = input.status.sandboxes.first().map(|s| s.id.clone());
    for spec in containers_of(input.pod).filter(|s| s.kind != ContainerKind::Ephemeral) {
        let view = View::of(input, spec);
        match (restart, &view.history.latest) {
            (Some(restart), _) => sync.stop_for_restart(&view, restart),
            (None, Latest::Running(current)) => sync.check_running(&view, current),
            (None, _) => {}
        }
    }
    PodActions {
        sandbox_id: sync.actions.sandbox_id,
        kill: sync.actions.kill,
        remove_created: sync.actions.remove_created,
        keep: (input.pod.containers().iter())
            .map(|c| c.name.clone())
            .collect(),
        look_again: true,
        restart_all: true,
        ..PodActions::default()
    }
}

fn with_new_sandbox(input: &PodActionInput<'_>, attempt: u32) -> PodActions {
    let pod = input.pod;
    let views: Vec<_> = containers_of(pod)
        .map(|spec| View::of(input, spec))
        .collect();
    let mut sync = Sync::new(input);
    if views.iter().any(|v| v.history.latest == Latest::Starting) {
        // The listing is older than the newest start, and so is what it says of the sandbox.
        sync.actions.look_again = true;
        sync.actions.keep = pod.containers().iter().map(|c| c.name.clone()).collect();
        return sync.actions;
    }
    // Everything of the old sandbox goes; nothing in it can be adopted.
    for view in &views {
        sync.drop_created(view);
    }
    let mains = |v: &&View<'_>| v.spec.kind == ContainerKind::Main;
    let candidates: Vec<_> = views
        .iter()
        .filter(mains)
        .filter(|v| v.runs_in_a_new_sandbox(pod))
        .collect();
    let once_only = pod.restart_policy() == RestartPolicy::Never
        && views.iter().any(|v| v.history.may_have_run())
        && !views.iter().any(|v| v.again)
        && !views
            .iter()
            .filter(mains)
            .any(|v| policy::is_restartable(pod, &v.spec));
    let init_failed = views.iter().any(|v| v.failed_for_good(input));
    if once_only || init_failed || candidates.is_empty() || pod.is_deleting() {
        if is_alive(input.status) {
            sync.actions.kill_pod = Some(KillPod {
                reason: "the sandbox is gone and nothing of the pod may start again".to_owned(),
            });
        }
        return sync.actions;
    }
    let undecided = |v: &View<'_>| {
        v.waits_for_its_code(pod)
            && matches!(v.history.latest, Latest::Running(_) | Latest::Unknown(_))
    };
    if views.iter().any(undecided) {
        sync.actions.kill_pod = Some(KillPod {
            reason: "Pod sandbox changed, it will be killed; restart rules decide what runs again."
                .to_owned(),
        });
        return sync.actions;
    }
    if !input.status.sandboxes.is_empty() || !input.status.containers.is_empty() {
        sync.actions.kill_pod = Some(KillPod {
            reason: "Pod sandbox changed, it will be killed and re-created.".to_owned(),
        });
    }
    sync.actions.create_sandbox = Some(attempt);
    let to_forget = views.iter().filter(|v| v.is_to_be_forgotten(input.status));
    sync.actions.forget_init = to_forget.map(|v| v.spec.container.name.clone()).collect();

    let why = "pod sandbox changed";
    for view in &views {
        if view.spec.kind == ContainerKind::Ephemeral && !view.history.may_have_run() {
            sync.start(view, None, why);
        }
    }
    match views.iter().find(|v| v.spec.kind.is_init()) {
        Some(first) => sync.start(first, None, why),
        None => {
            for view in candidates {
                sync.start(view, None, why);
            }
        }
    }
    sync.actions
}

fn in_current_sandbox(input: &PodActionInput<'_>) -> PodActions {
    let views: Vec<_> = containers_of(input.pod)
        .map(|spec| View::of(input, spec))
        .collect();
    let of_kind = |wanted: fn(ContainerKind) -> bool| {
        let of_kind = views.iter().filter(move |v| wanted(v.spec.kind));
        of_kind.collect::<Vec<_>>()
    };
    let mut sync = Sync::new(input);
    sync.actions.sandbox_id = input.status.sandboxes.first().map(|s| s.id.clone());
    sync.actions.look_again = views.iter().any(|v| v.history.latest == Latest::Starting);
    for view in of_kind(|kind| kind == ContainerKind::Ephemeral) {
        sync.decide_ephemeral(view);
    }
    let mains = of_kind(|kind| kind == ContainerKind::Main);
    // When no main container is to run again, nothing before them is.
    let was_initialised =
        mains.iter().any(|v| sync.is_active(v)) || mains.iter().all(|v| v.is_at_its_end(input.pod));
    let init = of_kind(ContainerKind::is_init);
    match sync.decide_init(&init, was_initialised) {
        init::Progress::Initialised => {
            // Sidecars alone do not keep a pod.
            sync.goes_on = false;
            for view in &mains {
                sync.decide_main(view);
            }
            if !sync.goes_on {
                sync.finish("all containers are finished".to_owned());
            }
        }
        progress => {
            for view in &mains {
                sync.drop_created(view);
            }
            if let init::Progress::Failed(name) = progress {
                sync.finish(format!("init container {name} failed"));
            } else if !sync.goes_on {
                sync.finish("nothing of the pod may start any more".to_owned());
            }
        }
    }
    sync.actions
}

/// Returns whether there is anything left to stop.
fn is_alive(status: &PodStatus) -> bool {
    let sandbox = |s: &SandboxState| *s == SandboxState::Ready;
    let container =
        |s: &ContainerState| matches!(s, ContainerState::Running | ContainerState::Unknown);
    status.sandboxes.iter().any(|s| sandbox(&s.state))
        || status.containers.iter().any(|c| container(&c.state))
}

/// The crash back-off a container waits for, if it does: for statuses, which are also made when no sync
/// is under way.
pub fn crash_wait(
    pod: &Pod,
    container: &Container,
    records: &Records<'_>,
    exit: &ExitRecord,
    now: Stamp,
    backoff_max: Duration,
) -> Option<Waiting> {
    let record = records.get(&container.name)?;
    let hash = container_hash(container);
    let same = record.intent.as_ref().is_none_or(|i| i.hash == hash);
    let is_over = records.is_back_off_over(&container.name, exit);
    let back_off = record.backoff.filter(|_| same);
    match crash::next(back_off, exit, is_over, now, backoff_max) {
        crash::Decision::StartNow { .. } => None,
        crash::Decision::Wait { until, backoff } => {
            Some(crash_loop(pod, &container.name, until, backoff))
        }
    }
}

fn crash_loop(pod: &Pod, name: &str, until: Stamp, backoff: Duration) -> Waiting {
    Waiting {
        name: name.to_owned(),
        reason: CRASH_LOOP_BACK_OFF.to_owned(),
        message: format!(
            "back-off {} restarting failed container={name} pod={}({})",
            go_duration(backoff),
            pod.full_name(),
            pod.uid()
        ),
        until,
    }
}

#[cfg(test)]
mod tests;

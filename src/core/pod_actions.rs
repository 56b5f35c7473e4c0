//! What one sync of a pod has to do; upstream's `computePodActions` together with `doBackOff`.
//!
//! In: the desired pod, what the runtime shows, what is on record, failed probes, the time. Out:
//! [`PodActions`], a list that the executor works off in its documented order. Main containers only.
//!
//! **Invariants:** the same input gives the same actions; nothing is started while it may still run;
//! restart policy Never starts a container at most once, even when records are all that is left of it;
//! an action list that was cut off at any point is completed by computing it again.
//!
//! Where this is stricter than upstream: with policy Never a container in state Unknown is killed and not
//! started again, since it may have run; a created container that was never started is started instead of
//! a second one being made.

mod hash;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};

pub use crate::types::{ProbeFailure, ProbeView};
pub use hash::container_hash;

use super::backoff::{crash, go_duration};
use super::container_history::{History, Latest, Records};
use super::state::{BackoffRecord, ContainerRecord, ExitRecord};
use crate::types::pod::RestartPolicy;
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus, SandboxState};
use crate::types::{ContainerId, ContainerKind, PodExt, Stamp};

/// Waiting reason of a container in crash back-off.
pub const CRASH_LOOP_BACK_OFF: &str = "CrashLoopBackOff";

/// What [`compute`] decides on.
#[derive(Clone, Copy, Debug)]
pub struct PodActionInput<'a> {
    /// Desired state.
    pub pod: &'a Pod,
    /// The runtime's facts, from an inspection.
    pub status: &'a PodStatus,
    /// What is on record of the pod's containers.
    pub records: &'a Records<'a>,
    /// Failed probes of the running containers, by container name.
    pub probe_failures: &'a BTreeMap<String, ProbeFailure>,
    /// What the probes say of the running containers, by container name: whether a sidecar has started.
    pub probes: &'a BTreeMap<String, ProbeView>,
    /// A moment before the runtime was asked for `status`.
    pub listed_at: Stamp,
    /// The current time.
    pub now: Stamp,
    /// Longest crash back-off.
    pub backoff_max: Duration,
}

/// Stop every container, then every sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillPod {
    /// Why, for events and the journal.
    pub reason: String,
}

/// Why a container is killed; upstream's `containerKillReason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// Its spec changed.
    SpecChanged,
    /// Its liveness probe failed.
    LivenessProbe,
    /// Its startup probe failed.
    StartupProbe,
    /// The runtime cannot tell whether it runs.
    Unknown,
    /// A newer attempt of the same container runs.
    Duplicate,
}

/// Stop one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillContainer {
    /// Which.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
    /// Why.
    pub reason: KillReason,
    /// Text of the `Killing` event.
    pub message: String,
    /// Grace of the probe that wants it stopped; `None` = the pod's.
    pub grace: Option<Duration>,
}

/// Start one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartContainer {
    /// Its name in the spec.
    pub name: String,
    /// What it is for.
    pub kind: ContainerKind,
    /// CRI attempt, which becomes the restart count.
    pub attempt: u32,
    /// [`container_hash`] of its spec.
    pub hash: String,
    /// A created container to be started; `None` = create one.
    pub adopt: Option<ContainerId>,
    /// Crash back-off to be committed with the start.
    pub backoff: Option<BackoffRecord>,
    /// Why, for the journal.
    pub why: String,
}

/// Run the postStart hook of one running container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostStart {
    /// Which.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
}

/// A container that should run and may not yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Its name in the spec.
    pub name: String,
    /// CamelCase reason.
    pub reason: String,
    /// For a human.
    pub message: String,
    /// When it may start.
    pub until: Stamp,
}

/// What to do, to be worked off in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodActions {
    /// Stop everything first.
    pub kill_pod: Option<KillPod>,
    /// Containers to stop.
    pub kill: Vec<KillContainer>,
    /// Created containers that are of no use. Removed before anything starts: they hold names.
    pub remove_created: Vec<ContainerId>,
    /// Init containers whose ends belong to a former sandbox: their start intents are dropped and what is
    /// left of them in the runtime is removed (see `container_history::forget_init`) before anything is made.
    pub forget_init: Vec<String>,
    /// Running containers whose postStart hook was cut off, to be run again.
    pub post_start: Vec<PostStart>,
    /// Attempt of the sandbox to create.
    pub create_sandbox: Option<u32>,
    /// The sandbox to start in, unless one is created.
    pub sandbox_id: Option<ContainerId>,
    /// Containers to start.
    pub start: Vec<StartContainer>,
    /// Containers that run as they should.
    pub keep: Vec<String>,
    /// Containers that should run and may not yet.
    pub waiting: Vec<Waiting>,
    /// When the first of `waiting` may start.
    pub next_due: Option<Stamp>,
}

impl PodActions {
    /// Whether there is nothing to execute.
    pub fn is_empty(&self) -> bool {
        self.kill_pod.is_none()
            && self.kill.is_empty()
            && self.remove_created.is_empty()
            && self.forget_init.is_empty()
            && self.post_start.is_empty()
            && self.create_sandbox.is_none()
            && self.start.is_empty()
    }

    /// Whether no container of the pod runs or will run.
    pub fn is_done(&self) -> bool {
        self.keep.is_empty() && self.start.is_empty() && self.waiting.is_empty()
    }
}

/// Whether a pod needs a new sandbox, and with which attempt; upstream's `PodSandboxChanged`.
/// Network facts count only where the newest sandbox was inspected.
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

/// Whether a container that ended with `exit_code` runs again; upstream's
/// `ShouldContainerBeRestarted` for exited containers.
pub fn restarts_after(pod: &Pod, exit_code: i32) -> bool {
    !pod.is_deleting()
        && match pod.restart_policy() {
            RestartPolicy::Always => true,
            RestartPolicy::OnFailure => exit_code != 0,
            RestartPolicy::Never => false,
        }
}

/// Decides what one sync has to do.
pub fn compute(input: &PodActionInput<'_>) -> PodActions {
    let mut actions = match sandbox_to_create(input.pod, input.status) {
        Some(attempt) => with_new_sandbox(input, attempt),
        None => in_current_sandbox(input),
    };
    actions.next_due = actions
        .waiting
        .iter()
        .map(|w| w.until)
        .min_by_key(|until| until.until(input.now));
    actions
}

fn with_new_sandbox(input: &PodActionInput<'_>, attempt: u32) -> PodActions {
    let pod = input.pod;
    let mut actions = PodActions::default();
    let mut started_before = false;
    let mut candidates = Vec::new();
    let views: Vec<_> = pod
        .containers()
        .iter()
        .map(|c| View::of(input, c))
        .collect();
    if views.iter().any(|v| v.history.latest == Latest::Starting) {
        // The listing is older than the newest start, and so is what it says of the sandbox.
        actions.keep = pod.containers().iter().map(|c| c.name.clone()).collect();
        return actions;
    }
    for view in views {
        started_before |= view.history.may_have_run();
        // Everything of the old sandbox goes; nothing in it can be adopted.
        actions
            .remove_created
            .extend(view.history.created.iter().map(|c| c.id.clone()));
        let succeeded = matches!(&view.history.latest, Latest::Exited(e) if e.exit_code == 0);
        if !(succeeded && pod.restart_policy() == RestartPolicy::OnFailure) {
            candidates.push(view);
        }
    }
    let once_only = pod.restart_policy() == RestartPolicy::Never && started_before;
    if once_only || candidates.is_empty() || pod.is_deleting() {
        if is_alive(input.status) {
            actions.kill_pod = Some(KillPod {
                reason: "the sandbox is gone and nothing of the pod may start again".to_owned(),
            });
        }
        return actions;
    }
    if !input.status.sandboxes.is_empty() || !input.status.containers.is_empty() {
        actions.kill_pod = Some(KillPod {
            reason: "Pod sandbox changed, it will be killed and re-created.".to_owned(),
        });
    }
    actions.create_sandbox = Some(attempt);
    for view in candidates {
        view.start(input, &mut actions, None, "pod sandbox changed");
    }
    actions
}

fn in_current_sandbox(input: &PodActionInput<'_>) -> PodActions {
    let sandbox_id = input.status.sandboxes.first().map(|s| s.id.clone());
    let mut actions = PodActions {
        sandbox_id,
        ..PodActions::default()
    };
    for container in input.pod.containers() {
        View::of(input, container).decide(input, &mut actions);
    }
    if actions.is_done() && is_alive(input.status) {
        actions.kill.clear();
        actions.kill_pod = Some(KillPod {
            reason: "all containers are finished".to_owned(),
        });
    }
    actions
}

/// Whether there is anything left to stop.
fn is_alive(status: &PodStatus) -> bool {
    let sandbox = |s: &SandboxState| *s == SandboxState::Ready;
    let container =
        |s: &ContainerState| matches!(s, ContainerState::Running | ContainerState::Unknown);
    status.sandboxes.iter().any(|s| sandbox(&s.state))
        || status.containers.iter().any(|c| container(&c.state))
}

/// One container of the spec and what is known of it.
struct View<'a> {
    container: &'a Container,
    hash: String,
    record: Option<&'a ContainerRecord>,
    history: History<'a>,
}

impl<'a> View<'a> {
    fn of(input: &PodActionInput<'a>, container: &'a Container) -> Self {
        let record = input.records.get(&container.name);
        Self {
            container,
            hash: container_hash(container),
            record,
            history: History::of(
                &container.name,
                input.status,
                record,
                input.listed_at,
                input.now,
            ),
        }
    }

    fn decide(self, input: &PodActionInput<'_>, actions: &mut PodActions) {
        let name = &self.container.name;
        for duplicate in &self.history.duplicates {
            actions.kill.push(KillContainer {
                id: duplicate.id.clone(),
                name: name.clone(),
                reason: KillReason::Duplicate,
                message: format!("Container {name} runs twice, the older one is stopped"),
                grace: None,
            });
        }
        match &self.history.latest {
            Latest::Starting => {
                self.drop_created(actions);
                actions.keep.push(name.clone());
            }
            Latest::NeverRan if input.pod.is_deleting() => self.drop_created(actions),
            Latest::NeverRan => self.start_or_adopt(input, actions, "first start"),
            Latest::Running(current) => {
                let current = *current;
                self.drop_created(actions);
                self.check_running(input, actions, current);
            }
            Latest::Unknown(current) => {
                actions.kill.push(KillContainer {
                    id: current.id.clone(),
                    name: name.clone(),
                    reason: KillReason::Unknown,
                    message: "Container is in \"unknown\" state, try killing it before restart"
                        .to_owned(),
                    grace: None,
                });
                if input.pod.restart_policy() == RestartPolicy::Never || input.pod.is_deleting() {
                    self.drop_created(actions);
                } else {
                    self.start_or_adopt(input, actions, "was in an unknown state");
                }
            }
            Latest::Exited(exit) if !restarts_after(input.pod, exit.exit_code) => {
                self.drop_created(actions);
            }
            Latest::Exited(exit) => {
                let why = format!("ended with {} ({})", exit.exit_code, exit.reason);
                self.start_or_adopt(input, actions, &why);
            }
        }
    }

    fn check_running(
        &self,
        input: &PodActionInput<'_>,
        actions: &mut PodActions,
        current: &ContainerStatus,
    ) {
        let name = &self.container.name;
        let failure = input.probe_failures.get(name);
        let (reason, mut message) = if !current.hash.is_empty() && current.hash != self.hash {
            (
                KillReason::SpecChanged,
                format!("Container {name} definition changed"),
            )
        } else if failure == Some(&ProbeFailure::Liveness) {
            (
                KillReason::LivenessProbe,
                format!("Container {name} failed liveness probe"),
            )
        } else if failure == Some(&ProbeFailure::Startup) {
            (
                KillReason::StartupProbe,
                format!("Container {name} failed startup probe"),
            )
        } else {
            actions.keep.push(name.clone());
            return;
        };
        let restart = !input.pod.is_deleting()
            && (reason == KillReason::SpecChanged
                || input.pod.restart_policy() != RestartPolicy::Never);
        if restart {
            self.start(input, actions, None, &message);
            message.push_str(", will be restarted");
        }
        actions.kill.push(KillContainer {
            id: current.id.clone(),
            name: name.clone(),
            reason,
            message,
            grace: None,
        });
    }

    fn drop_created(&self, actions: &mut PodActions) {
        actions
            .remove_created
            .extend(self.history.created.iter().map(|c| c.id.clone()));
    }

    /// Starts the container, with the created one that fits if there is one; the others are removed.
    fn start_or_adopt(&self, input: &PodActionInput<'_>, actions: &mut PodActions, why: &str) {
        let fits = self
            .history
            .created
            .iter()
            .copied()
            .find(|c| self.can_adopt(c, actions.sandbox_id.as_ref()));
        let others = self
            .history
            .created
            .iter()
            .filter(|c| Some(c.id.as_str()) != fits.map(|f| f.id.as_str()));
        actions.remove_created.extend(others.map(|c| c.id.clone()));
        self.start(input, actions, fits, why);
    }

    fn can_adopt(&self, created: &ContainerStatus, sandbox: Option<&ContainerId>) -> bool {
        created.hash == self.hash
            && Some(&created.sandbox_id) == sandbox
            && (self.is_intended(created) || created.attempt >= self.history.next_attempt)
    }

    /// Whether the start of this created container is on record already.
    fn is_intended(&self, created: &ContainerStatus) -> bool {
        self.record
            .and_then(|r| r.intent.as_ref())
            .is_some_and(|i| i.container_id == created.id)
    }

    fn start(
        &self,
        input: &PodActionInput<'_>,
        actions: &mut PodActions,
        adopt: Option<&ContainerStatus>,
        why: &str,
    ) {
        let name = &self.container.name;
        let on_record = self.backoff_on_record();
        let decided = adopt.is_some_and(|c| self.is_intended(c));
        let backoff = match self.last_exit() {
            Some(exit) if !decided => {
                match crash::next(on_record, exit, input.now, input.backoff_max) {
                    crash::Decision::StartNow { next } => Some(next),
                    crash::Decision::Wait { until, backoff } => {
                        actions
                            .waiting
                            .push(crash_loop(input.pod, name, until, backoff));
                        return;
                    }
                }
            }
            _ => on_record,
        };
        actions.start.push(StartContainer {
            name: name.clone(),
            kind: ContainerKind::Main,
            attempt: adopt.map_or(self.history.next_attempt, |c| c.attempt),
            hash: self.hash.clone(),
            adopt: adopt.map(|c| c.id.clone()),
            backoff,
            why: why.to_owned(),
        });
    }

    /// The back-off is keyed by what runs: another image starts afresh.
    fn backoff_on_record(&self) -> Option<BackoffRecord> {
        let record = self.record?;
        let same = record.intent.as_ref().is_none_or(|i| i.hash == self.hash);
        record.backoff.filter(|_| same)
    }

    /// The newest end, whatever came after it.
    fn last_exit(&self) -> Option<&ExitRecord> {
        match &self.history.latest {
            Latest::Exited(exit) => Some(exit),
            _ => self.history.previous_exit.as_ref(),
        }
    }
}

/// The crash back-off a container waits for, if it does: for statuses, which are also made when no sync
/// is under way.
pub fn crash_wait(
    pod: &Pod,
    container: &Container,
    record: Option<&ContainerRecord>,
    exit: &ExitRecord,
    now: Stamp,
    backoff_max: Duration,
) -> Option<Waiting> {
    let record = record?;
    let hash = container_hash(container);
    let same = record.intent.as_ref().is_none_or(|i| i.hash == hash);
    match crash::next(record.backoff.filter(|_| same), exit, now, backoff_max) {
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

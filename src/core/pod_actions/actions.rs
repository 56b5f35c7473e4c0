//! Decisions of one sync of a pod, as data.

use std::time::Duration;

use crate::core::state::BackoffRecord;
use crate::types::{ContainerId, ContainerKind, Stamp};

/// Stop every container, then every sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillPod {
    /// Why, for events and the journal.
    pub reason: String,
}

/// Reason for which a container is killed; upstream's `containerKillReason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// Its spec changed.
    SpecChanged,
    /// Its liveness probe failed.
    LivenessProbe,
    /// Its startup probe failed.
    StartupProbe,
    /// The runtime does not know whether it runs.
    Unknown,
    /// A newer attempt of the same container runs.
    Duplicate,
    /// All containers of the pod are restarted.
    RestartAll,
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
    /// Grace of the probe that wants it stopped, none for a restart of all containers; `None` = the pod's.
    pub grace: Option<Duration>,
}

/// Start one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartContainer {
    /// Its name in the spec.
    pub name: String,
    /// Kind of the container.
    pub kind: ContainerKind,
    /// CRI attempt, which becomes the restart count.
    pub attempt: u32,
    /// [`container_hash`](super::container_hash) of its spec.
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
    /// End of the back-off.
    pub until: Stamp,
}

/// Steps to execute in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodActions {
    /// Stop everything first.
    pub kill_pod: Option<KillPod>,
    /// Containers to stop.
    pub kill: Vec<KillContainer>,
    /// Created containers that are of no use. Removed before anything starts: they hold names.
    pub remove_created: Vec<ContainerId>,
    /// Init containers whose ends belong to a previous sandbox: their start intents are dropped and what is
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
    /// Earliest start of one of `waiting`.
    pub next_due: Option<Stamp>,
    /// True if the status may be older than a recorded start, so that nothing was decided about that container: inspect
    /// the pod again and decide anew at once.
    pub look_again: bool,
    /// All containers are to restart: they are stopped, or that decision has to be recorded first.
    pub restart_all: bool,
}

impl PodActions {
    /// Returns whether there is nothing to execute.
    pub fn is_empty(&self) -> bool {
        self.kill_pod.is_none()
            && self.kill.is_empty()
            && self.remove_created.is_empty()
            && self.forget_init.is_empty()
            && self.post_start.is_empty()
            && self.create_sandbox.is_none()
            && self.start.is_empty()
    }

    /// Returns whether something is stopped, which comes before everything else.
    pub fn stops(&self) -> bool {
        self.kill_pod.is_some() || !self.kill.is_empty()
    }

    /// Returns the part of it that is done for a pod that runs, but that its source has not confirmed in this epoch:
    /// running containers continue, and are stopped where they must be. Nothing starts, and nothing is stopped for
    /// another to start in its place.
    pub fn unconfirmed(mut self) -> Self {
        if self.create_sandbox.take().is_some() {
            self.kill_pod = None;
        }
        self.kill.retain(|kill| {
            !matches!(
                kill.reason,
                KillReason::SpecChanged | KillReason::RestartAll
            )
        });
        if self.restart_all {
            // The source brings the pod back here.
            self.look_again = false;
        }
        // Both are done for what would start next.
        self.remove_created.clear();
        self.forget_init.clear();
        self.start.clear();
        self
    }

    /// Returns whether no container of the pod is to run.
    pub fn is_done(&self) -> bool {
        self.keep.is_empty() && self.start.is_empty() && self.waiting.is_empty()
    }
}

//! Restart of all containers of a pod in place, which a container's exit asks for: rules with action
//! `RestartAllContainers`. Upstream: `ShouldAllContainersRestart` and `computePodActions` with `restartAllContainers`.
//!
//! In: the pod, the runtime's facts, the records. Out: the next step as a transaction ([`advance`]), and what the newest step
//! means for a container. The restart has two steps, and each is on the disk before anything is done for it:
//!
//! 1. **Stopping.** The exit is recorded as the cause. Running containers are stopped without grace and without hooks;
//!    nothing starts.
//! 2. **Ended.** Nothing runs any more. The newest attempt of each container is recorded; everything up to it runs again,
//!    init containers first, whatever its restart policy.
//!
//! Sandbox, volumes and ephemeral containers stay. The back-off of the container that caused the restart holds back all
//! of them.
//!
//! **Invariants:** an exit restarts the containers at most once, since its attempt is among those that have ended; a
//! restart that was cut off goes on where it was; a container that was started after the second step is an ordinary one.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::container_history::{History, Latest, Records};
use super::pod_actions::{all_may_restart, restarts_all};
use super::state::kinds::{self, Declared, Key, Kind};
use super::state::{ContainerRecord, ExitRecord, State, Transaction, child_key};
use crate::types::containers::{ContainerSpec, container_of, containers_of};
use crate::types::runtime::PodStatus;
use crate::types::{ContainerKind, PodExt, PodUid, Stamp};

/// Last part of the keys, after the pod's UID.
const NAME: &str = "all";
/// Condition of a pod whose containers are stopped for a restart of all; upstream's `AllContainersRestarting`.
pub const CONDITION: &str = "AllContainersRestarting";
/// Reason of [`CONDITION`] while it is true.
pub const STARTED: &str = "RestartAllContainersStarted";
/// Waiting reason of a container that has ended and runs again because of a restart of all.
pub const RESTARTING: &str = "RestartingAllContainers";

/// The newest restart of all containers of a pod. Stored as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Restart {
    /// Name of the container whose exit caused it.
    pub trigger: String,
    /// ID of that container.
    pub container_id: String,
    /// Exit code of that container.
    pub exit_code: i32,
    /// Newest attempt of each container when nothing ran any more; `None` while containers are stopped.
    pub ended: Option<BTreeMap<String, u32>>,
}

impl Kind for Restart {
    const DECLARED: Declared = kinds::RESTARTS;
}

impl Restart {
    /// Reads the restart on record. An unreadable record counts as none: the rules then apply to the newest exits again.
    pub fn of(state: &State, pod: &PodUid) -> Option<Self> {
        state.object(&key(pod))
    }

    /// Returns the exit that caused the restart, as long as its container was not started again.
    pub fn cause<'a>(&self, records: &Records<'a>) -> Option<&'a ExitRecord> {
        let record = records.get(&self.trigger)?;
        let is_it = |id: &str| id == self.container_id;
        let intent = record.intent.as_ref();
        let exit = record.last_exit.as_ref()?;
        (is_it(exit.container_id.as_str())
            && intent.is_none_or(|intent| is_it(intent.container_id.as_str())))
        .then_some(exit)
    }
}

/// A pod at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Desired state.
    pub pod: &'a Pod,
    /// The runtime's facts.
    pub status: &'a PodStatus,
    /// Records of the pod's containers.
    pub records: &'a Records<'a>,
    /// A moment before the runtime was asked for `status`.
    pub listed_at: Stamp,
    /// The current time.
    pub now: Stamp,
}

impl Seen<'_> {
    fn history(&self, name: &str) -> History<'_> {
        let record = self.records.get(name);
        History::of(name, self.status, record, self.listed_at, self.now)
    }

    /// Containers that are restarted: all but the ephemeral ones.
    fn restarted(&self) -> impl Iterator<Item = ContainerSpec<'_>> {
        containers_of(self.pod).filter(|spec| spec.kind != ContainerKind::Ephemeral)
    }
}

/// Returns the restart whose first step is recorded and whose second is not. A record of an older state of the node, as
/// a backup has it, is none: its container has been started again since.
pub fn stopping<'a>(seen: &Seen<'a>) -> Option<&'a Restart> {
    let restart = seen.records.restart()?;
    if restart.ended.is_some() || seen.pod.is_deleting() {
        return None;
    }
    let history = seen.history(&restart.trigger);
    let is_cause = matches!(&history.latest, Latest::Exited(exit)
        if exit.container_id.as_str() == restart.container_id);
    is_cause.then_some(restart)
}

/// Returns the container and the exit that a rule restarts all containers for, if that is not recorded yet. The first
/// in the order of the spec.
pub fn pending(seen: &Seen<'_>) -> Option<(String, ExitRecord)> {
    if seen.pod.is_deleting() || !all_may_restart(seen.pod) || stopping(seen).is_some() {
        return None;
    }
    let ended = seen.records.restart().and_then(|r| r.ended.as_ref());
    seen.restarted().find_map(|spec| {
        let name = &spec.container.name;
        let Latest::Exited(exit) = seen.history(name).latest else {
            return None;
        };
        let is_used = ended
            .and_then(|ended| ended.get(name))
            .is_some_and(|attempt| exit.attempt <= *attempt);
        let causes = !is_used && restarts_all(&spec.container, exit.exit_code);
        causes.then(|| (name.clone(), exit))
    })
}

/// Returns whether a container that has ended, or whose state is unknown, runs again because of a restart of all, also of
/// one that is not recorded yet.
pub fn runs_again(seen: &Seen<'_>, spec: &ContainerSpec<'_>, latest: &Latest<'_>) -> bool {
    let attempt = match latest {
        Latest::Exited(exit) => exit.attempt,
        Latest::Unknown(current) => current.attempt,
        Latest::NeverRan | Latest::Starting | Latest::Running(_) => return false,
    };
    if spec.kind == ContainerKind::Ephemeral || seen.pod.is_deleting() {
        return false;
    }
    let ended = seen.records.restart().and_then(|r| r.ended.as_ref());
    ended
        .and_then(|ended| ended.get(&spec.container.name))
        .is_some_and(|last| attempt <= *last)
        || stopping(seen).is_some()
        || pending(seen).is_some()
}

/// Decides the next step of a restart; `None` when there is none, or when containers still have to be stopped. Commit it
/// before anything is done for it. Exits have to be recorded already.
pub fn advance(state: &State, seen: &Seen<'_>) -> Option<Transaction> {
    if let Some(restart) = stopping(seen) {
        let mut ended = BTreeMap::new();
        for spec in seen.restarted() {
            let name = &spec.container.name;
            let history = seen.history(name);
            if !history.duplicates.is_empty() || !history.created.is_empty() {
                return None;
            }
            let attempt = match &history.latest {
                Latest::Running(_) | Latest::Starting => return None,
                Latest::NeverRan => continue,
                Latest::Exited(exit) => exit.attempt,
                Latest::Unknown(current) => current.attempt,
            };
            ended.insert(name.clone(), attempt);
        }
        let next = Restart {
            ended: Some(ended),
            ..restart.clone()
        };
        let why = "nothing runs any more, init containers run first".to_owned();
        return Some(put(state, seen, &next, "all containers stopped", why));
    }
    let (trigger, exit) = pending(seen)?;
    let why = format!(
        "{trigger} attempt {} exited with {}",
        exit.attempt, exit.exit_code
    );
    let next = Restart {
        trigger,
        container_id: exit.container_id.to_string(),
        exit_code: exit.exit_code,
        ended: None,
    };
    Some(put(state, seen, &next, "restarting all containers", why))
}

/// Returns why a container is stopped, for its event.
pub(super) fn why_stopped(restart: &Restart, name: &str) -> String {
    format!(
        "Container {name} is stopped, all containers restart because {} exited with {}",
        restart.trigger, restart.exit_code
    )
}

fn key(pod: &PodUid) -> Key<Restart> {
    Key::new(pod.as_str(), NAME)
}

fn put(state: &State, seen: &Seen<'_>, restart: &Restart, what: &str, why: String) -> Transaction {
    let pod = seen.pod.uid();
    let (key, own) = (key(&pod), child_key(&pod, &restart.trigger));
    Transaction::new()
        .expect_object(state, &key)
        .expect::<ContainerRecord>(state, &own)
        .put_object(&key, restart, seen.now)
        .journal(Some(&pod), what, why)
}

/// Returns the container that caused the restart, with its exit, as long as it was not started again: its back-off holds
/// back all others.
pub(super) fn cause_of<'a>(seen: &Seen<'a>) -> Option<(ContainerSpec<'a>, &'a ExitRecord)> {
    let restart = seen.records.restart()?;
    let exit = restart.cause(seen.records)?;
    Some((container_of(seen.pod, &restart.trigger)?, exit))
}

#[cfg(test)]
mod tests;

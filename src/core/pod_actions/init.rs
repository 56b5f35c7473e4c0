//! Init containers and sidecars; upstream's `computeInitContainerActions`.
//!
//! They are checked backwards: the last one that did anything in the present sandbox determines the progress of the
//! pod, whatever happened to the ones before it. Their runs in a previous sandbox do not count.

use super::view::{self, Sync, View};
use super::{KillReason, ProbeFailure, policy};
use crate::core::container_history::{Latest, STATUS_UNKNOWN_EXIT_CODE, judged};
use crate::core::state::ExitRecord;
use crate::types::ContainerKind;
use crate::types::runtime::{ContainerStatus, PodStatus};

/// Progress of the init containers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Main containers may start.
    Initialised,
    /// Not yet.
    Initialising,
    /// Never: this one failed and may not run again.
    Failed(String),
}

impl Sync<'_, '_> {
    /// Decides about all init containers. `was_initialised`: a main container is active, so that each of
    /// them did what it had to.
    pub(super) fn decide_init(&mut self, init: &[&View<'_>], was_initialised: bool) -> Progress {
        let current = init.iter().rposition(|v| self.is_touched(v));
        let passed = match (was_initialised, current) {
            (true, _) => init.len(),
            (false, None) => 0,
            (false, Some(current)) => current,
        };
        for view in &init[..passed] {
            match view.spec.kind {
                ContainerKind::Sidecar => {
                    self.decide_sidecar(view);
                }
                _ => self.leave_completed(view),
            }
        }
        let Some(view) = init.get(passed) else {
            return Progress::Initialised;
        };
        let passes = match (current, view.spec.kind) {
            (None, _) => {
                self.run_in_this_sandbox(view, "first start");
                false
            }
            (Some(_), ContainerKind::Sidecar) => self.decide_sidecar(view),
            (Some(_), _) => match self.decide_current(view) {
                Some(passes) => passes,
                None => return Progress::Failed(view.spec.container.name.clone()),
            },
        };
        let later = init.get(passed + 1..).unwrap_or_default();
        match later.first() {
            None if passes => return Progress::Initialised,
            Some(next) if passes => self.run_in_this_sandbox(next, "its turn has come"),
            _ => {}
        }
        for view in later.iter().skip(usize::from(passes)) {
            self.drop_created(view);
        }
        Progress::Initialising
    }

    /// Returns whether a container did anything in the present sandbox.
    fn is_touched(&self, view: &View<'_>) -> bool {
        let here = |c: &&ContainerStatus| Some(&c.sandbox_id) == self.actions.sandbox_id.as_ref();
        self.is_of_this_sandbox(view) || view.history.created.iter().any(here)
    }

    fn is_of_this_sandbox(&self, view: &View<'_>) -> bool {
        let sandbox = self.actions.sandbox_id.as_ref();
        // What came before a restart of all containers counts as little as what was in another sandbox.
        !view.again
            && sandbox.is_some_and(|s| {
                view.history
                    .is_of_sandbox(s, self.input.status, view.record)
            })
    }

    /// An init container that is behind: nothing of it is needed.
    fn leave_completed(&mut self, view: &View<'_>) {
        self.kill_duplicates(view);
        self.drop_created(view);
        if matches!(view.history.latest, Latest::Running(_) | Latest::Starting) {
            self.keep(view);
        }
    }

    /// Starts a container that did not run in this sandbox yet. What still runs in another one is stopped.
    fn run_in_this_sandbox(&mut self, view: &View<'_>, why: &str) {
        self.kill_duplicates(view);
        if let Latest::Running(stray) | Latest::Unknown(stray) = view.history.latest {
            let name = &view.spec.container.name;
            let message = format!("Container {name} runs in a previous sandbox");
            self.kill(view, stray, KillReason::Duplicate, message);
        }
        if !self.is_deleting() {
            self.start_or_adopt(view, why);
        } else {
            self.drop_created(view);
        }
    }

    /// The init container whose turn it is. `Some(true)`: it completed. `None`: it failed for good.
    fn decide_current(&mut self, view: &View<'_>) -> Option<bool> {
        if !self.is_of_this_sandbox(view) {
            self.run_in_this_sandbox(view, "created and not started");
            return Some(false);
        }
        self.kill_duplicates(view);
        let pod = self.input.pod;
        match &view.history.latest {
            Latest::NeverRan => self.run_in_this_sandbox(view, "first start"),
            Latest::Starting => {
                self.drop_created(view);
                self.keep(view);
            }
            Latest::Running(current) => {
                self.drop_created(view);
                if view.is_outdated(current) {
                    self.replace_outdated(view, current);
                } else {
                    self.keep(view);
                }
            }
            Latest::Unknown(current) => {
                self.kill_unknown(view, current);
                if view.waits_for_its_code(pod) {
                    self.drop_created(view);
                    self.goes_on = true;
                } else if policy::restarts(pod, &view.spec, STATUS_UNKNOWN_EXIT_CODE) {
                    self.start_or_adopt(view, "was in an unknown state");
                } else {
                    self.drop_created(view);
                    return None;
                }
            }
            Latest::Exited(exit) => match failure(exit) {
                None => {
                    self.drop_created(view);
                    return Some(true);
                }
                Some(code) if policy::restarts(pod, &view.spec, code) => {
                    self.start_or_adopt(view, &view::ended(exit));
                }
                Some(_) => {
                    self.drop_created(view);
                    return None;
                }
            },
        }
        Some(false)
    }

    /// Keeps a sidecar running. Whether it has started, so that the next container may.
    fn decide_sidecar(&mut self, view: &View<'_>) -> bool {
        if !self.is_of_this_sandbox(view) {
            self.run_in_this_sandbox(view, "a sidecar is to run");
            return false;
        }
        self.kill_duplicates(view);
        match &view.history.latest {
            Latest::NeverRan => self.run_in_this_sandbox(view, "first start"),
            Latest::Starting => {
                self.drop_created(view);
                self.keep(view);
            }
            Latest::Running(current) => {
                self.drop_created(view);
                self.check_running(view, current);
                return self.has_started(view, current);
            }
            Latest::Unknown(current) => {
                self.kill_unknown(view, current);
                if self.is_deleting() {
                    self.drop_created(view);
                } else if view.waits_for_its_code(self.input.pod) {
                    self.drop_created(view);
                    self.goes_on = true;
                } else {
                    self.start_or_adopt(view, "was in an unknown state");
                }
            }
            Latest::Exited(_) if self.is_deleting() => self.drop_created(view),
            Latest::Exited(exit) => self.start_or_adopt(view, &view::ended(exit)),
        }
        false
    }

    /// Startup succeeded, or there is no startup probe, and the postStart hook is done. Liveness does not
    /// matter.
    fn has_started(&self, view: &View<'_>, current: &ContainerStatus) -> bool {
        let container = &view.spec.container;
        let probed = container.startup_probe.is_none() || {
            let probe = self.input.probes.get(&container.name);
            let failed = self.input.probe_failures.get(&container.name);
            probe.and_then(|p| p.started) == Some(true) && failed != Some(&ProbeFailure::Startup)
        };
        probed && !view.owes_post_start(current)
    }
}

impl View<'_> {
    /// Returns whether this init container failed in the newest sandbox, or will have once that is stopped, and may not
    /// run again: the pod failed, and no new sandbox changes that.
    pub(super) fn failed_for_good(&self, input: &super::PodActionInput<'_>) -> bool {
        if self.spec.kind != ContainerKind::Init || self.again {
            return false;
        }
        let newest = input.status.sandboxes.first();
        let intended = |exit: &ExitRecord| {
            let intent = self.record.and_then(|r| r.intent.as_ref());
            intent.is_some_and(|i| i.container_id == exit.container_id)
        };
        let counts = match (newest, &self.history.latest) {
            (Some(newest), _) => self
                .history
                .is_of_sandbox(&newest.id, input.status, self.record),
            (None, Latest::Exited(exit)) => intended(exit),
            (None, _) => false,
        };
        let code = match &self.history.latest {
            Latest::Running(_) | Latest::Unknown(_) => Some(STATUS_UNKNOWN_EXIT_CODE),
            Latest::Exited(exit) => failure(exit),
            Latest::NeverRan | Latest::Starting => None,
        };
        counts && code.is_some_and(|code| !policy::restarts(input.pod, &self.spec, code))
    }

    /// Returns whether an intent or anything in the runtime shows that this one ran in a sandbox that is given up.
    pub(super) fn is_to_be_forgotten(&self, status: &PodStatus) -> bool {
        let created = |id: &str| self.history.created.iter().any(|c| c.id.as_str() == id);
        let intent = self.record.and_then(|r| r.intent.as_ref());
        let named = || status.containers_named(&self.spec.container.name);
        let stuck = |id: &str| named().any(|c| c.is_stuck() && c.id.as_str() == id);
        let ran = |id: &str| !created(id) && !stuck(id);
        self.spec.kind.is_init()
            && (intent.is_some_and(|i| ran(i.container_id.as_str()))
                || named().any(|c| ran(c.id.as_str())))
    }
}

/// The code of an init container's failed end; killed for lack of memory counts as 137.
pub(super) fn failure(exit: &ExitRecord) -> Option<i32> {
    match judged(exit) {
        0 if exit.reason == "OOMKilled" => Some(STATUS_UNKNOWN_EXIT_CODE),
        0 => None,
        code => Some(code),
    }
}

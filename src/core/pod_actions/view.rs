//! One container of the spec, what is known of it, and the rules that all kinds share.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Probe};

use super::{
    KillContainer, KillPod, KillReason, PodActionInput, PodActions, PostStart, ProbeFailure,
    StartContainer, Waiting, container_hash, crash_loop, crash_wait, init, policy,
};
use crate::core::backoff::crash;
use crate::core::container_history::{History, Latest, STATUS_UNKNOWN_EXIT_CODE, judged};
use crate::core::restart_all::{self, Restart};
use crate::core::state::{BackoffRecord, ContainerRecord, ExitRecord};
use crate::types::containers::ContainerSpec;
use crate::types::pod::RestartPolicy;
use crate::types::runtime::ContainerStatus;
use crate::types::{ContainerId, ContainerKind, PodExt};

/// Returns the name of a container's completed postStart hook in `ContainerRecord::hooks_done`.
pub fn post_start_key(container: &ContainerId) -> String {
    format!("{container}/postStart")
}

/// Returns the reason for which a container is started again, for the journal.
pub(super) fn ended(exit: &ExitRecord) -> String {
    format!("ended with {} ({})", exit.exit_code, exit.reason)
}

/// One container of the spec and what is known of it.
pub(super) struct View<'a> {
    pub(super) spec: ContainerSpec<'a>,
    pub(super) record: Option<&'a ContainerRecord>,
    pub(super) history: History<'a>,
    /// It has ended and runs again because of a restart of all containers, whatever its policy.
    pub(super) again: bool,
    hash: String,
}

impl<'a> View<'a> {
    pub(super) fn of(input: &PodActionInput<'a>, spec: ContainerSpec<'a>) -> Self {
        let record = input.records.get(&spec.container.name);
        let history = History::of(
            &spec.container.name,
            input.status,
            record,
            input.listed_at,
            input.now,
        );
        Self {
            hash: container_hash(&spec.container),
            again: restart_all::runs_again(&input.seen(), &spec, &history.latest),
            record,
            history,
            spec,
        }
    }

    /// Returns whether a main container is among those that a new sandbox is made for. A container that runs now ends
    /// with the old sandbox.
    pub(super) fn runs_in_a_new_sandbox(&self, pod: &Pod) -> bool {
        match &self.history.latest {
            Latest::NeverRan => {
                !self.history.may_have_run() || policy::is_restartable(pod, &self.spec)
            }
            Latest::Exited(exit) => self.restarts(pod, judged(exit)),
            Latest::Starting | Latest::Running(_) | Latest::Unknown(_) => {
                self.restarts(pod, STATUS_UNKNOWN_EXIT_CODE)
            }
        }
    }

    /// Returns whether it runs again after this end: by its policy and rules, or because all containers restart.
    pub(super) fn restarts(&self, pod: &Pod, exit_code: i32) -> bool {
        self.again || policy::restarts(pod, &self.spec, exit_code)
    }

    /// Returns whether its restart depends on the exit code: only its restart rules can restart it, or they can restart
    /// all containers. If so, nothing is decided while the exit code is unknown.
    pub(super) fn waits_for_its_code(&self, pod: &Pod) -> bool {
        let by_its_rules = policy::policy_of(pod, &self.spec) == RestartPolicy::Never
            && policy::is_restartable(pod, &self.spec);
        let of_all = self.spec.kind != ContainerKind::Ephemeral
            && policy::may_restart_all(&self.spec.container);
        !pod.is_deleting() && !self.again && (by_its_rules || of_all)
    }

    /// Returns whether it ended and does not run again.
    pub(super) fn is_at_its_end(&self, pod: &Pod) -> bool {
        matches!(&self.history.latest, Latest::Exited(exit) if !self.restarts(pod, judged(exit)))
    }

    /// Returns whether a running container differs from its spec.
    pub(super) fn is_outdated(&self, current: &ContainerStatus) -> bool {
        !current.hash.is_empty() && current.hash != self.hash
    }

    /// Returns whether the postStart hook of a running container did not complete. If no start of the container is
    /// recorded (the store was lost, another agent made it), this is unknown: the container is adopted as it is, since
    /// a hook that fails when it is run twice would have it killed.
    pub(super) fn owes_post_start(&self, current: &ContainerStatus) -> bool {
        let lifecycle = self.spec.container.lifecycle.as_ref();
        lifecycle.is_some_and(|l| l.post_start.is_some()) && self.is_intended(current) && {
            let key = post_start_key(&current.id);
            self.record.is_some_and(|r| !r.hooks_done.contains(&key))
        }
    }

    fn can_adopt(&self, created: &ContainerStatus, sandbox: Option<&ContainerId>) -> bool {
        created.hash == self.hash
            && Some(&created.sandbox_id) == sandbox
            && (self.is_intended(created) || created.attempt >= self.history.next_attempt)
    }

    /// Returns whether the start of this container is recorded.
    fn is_intended(&self, container: &ContainerStatus) -> bool {
        self.record
            .and_then(|r| r.intent.as_ref())
            .is_some_and(|i| i.container_id == container.id)
    }

    /// The back-off is keyed by what runs: another image starts afresh.
    fn backoff_on_record(&self) -> Option<BackoffRecord> {
        let record = self.record?;
        let same = record.intent.as_ref().is_none_or(|i| i.hash == self.hash);
        record.backoff.filter(|_| same)
    }

    /// The newest end, whatever came after it, if it is one to be backed off from: an init container that
    /// completed and runs again in a new sandbox did not crash. One that restarts all containers by completing is backed
    /// off from like one that failed, since nothing else slows it down.
    fn last_exit(&self) -> Option<&ExitRecord> {
        let exit = match &self.history.latest {
            Latest::Exited(exit) => Some(exit),
            _ => self.history.previous_exit.as_ref(),
        };
        let once = self.spec.kind == ContainerKind::Init;
        exit.filter(|exit| !once || self.again || init::failure(exit).is_some())
    }
}

/// An action list in the making.
pub(super) struct Sync<'i, 'a> {
    pub(super) input: &'i PodActionInput<'a>,
    pub(super) actions: PodActions,
    /// Something runs or will run that the pod is there for.
    pub(super) goes_on: bool,
}

impl<'i, 'a> Sync<'i, 'a> {
    pub(super) fn new(input: &'i PodActionInput<'a>) -> Self {
        Self {
            input,
            actions: PodActions::default(),
            goes_on: false,
        }
    }

    pub(super) fn is_deleting(&self) -> bool {
        self.input.pod.is_deleting()
    }

    /// Returns whether a main container shows that the pod was initialised in this sandbox.
    pub(super) fn is_active(&self, main: &View<'_>) -> bool {
        let here = |c: &&ContainerStatus| Some(&c.sandbox_id) == self.actions.sandbox_id.as_ref();
        matches!(main.history.latest, Latest::Running(_) | Latest::Starting)
            || main.history.created.iter().any(here)
    }

    pub(super) fn decide_main(&mut self, view: &View<'_>) {
        let pod = self.input.pod;
        self.kill_duplicates(view);
        match &view.history.latest {
            Latest::Starting => {
                self.drop_created(view);
                self.keep(view);
            }
            Latest::NeverRan if pod.is_deleting() => self.drop_created(view),
            Latest::NeverRan => self.start_or_adopt(view, "first start"),
            Latest::Running(current) => {
                self.drop_created(view);
                self.check_running(view, current);
            }
            Latest::Unknown(current) => {
                self.kill_unknown(view, current);
                if view.waits_for_its_code(pod) {
                    self.drop_created(view);
                    self.goes_on = true;
                } else if view.restarts(pod, STATUS_UNKNOWN_EXIT_CODE) {
                    self.start_or_adopt(view, "was in an unknown state");
                } else {
                    self.drop_created(view);
                }
            }
            Latest::Exited(exit) if !view.restarts(pod, judged(exit)) => {
                self.drop_created(view);
            }
            Latest::Exited(exit) => self.start_or_adopt(view, &ended(exit)),
        }
    }

    /// Ephemeral containers run once, in whatever sandbox there is.
    pub(super) fn decide_ephemeral(&mut self, view: &View<'_>) {
        let goes_on = self.goes_on;
        self.kill_duplicates(view);
        match &view.history.latest {
            Latest::NeverRan if !view.history.may_have_run() && !self.is_deleting() => {
                self.start_or_adopt(view, "added to the pod");
            }
            Latest::Running(_) | Latest::Starting => {
                self.drop_created(view);
                self.keep(view);
            }
            Latest::NeverRan | Latest::Unknown(_) | Latest::Exited(_) => self.drop_created(view),
        }
        self.goes_on = goes_on;
    }

    /// A running container: kept, unless its spec changed or a probe wants it restarted.
    pub(super) fn check_running(&mut self, view: &View<'_>, current: &ContainerStatus) {
        if view.is_outdated(current) {
            return self.replace_outdated(view, current);
        }
        let name = &view.spec.container.name;
        let (reason, mut message, probe) = match self.input.probe_failures.get(name) {
            Some(ProbeFailure::Liveness) => (
                KillReason::LivenessProbe,
                format!("Container {name} failed liveness probe"),
                &view.spec.container.liveness_probe,
            ),
            Some(ProbeFailure::Startup) => (
                KillReason::StartupProbe,
                format!("Container {name} failed startup probe"),
                &view.spec.container.startup_probe,
            ),
            None => {
                self.keep(view);
                if view.owes_post_start(current) {
                    self.actions.post_start.push(PostStart {
                        id: current.id.clone(),
                        name: name.clone(),
                    });
                }
                return;
            }
        };
        let pod = self.input.pod;
        if view.waits_for_its_code(pod) {
            self.goes_on = true;
        } else if policy::restarts(pod, &view.spec, STATUS_UNKNOWN_EXIT_CODE) {
            self.start(view, None, &message);
            message.push_str(", will be restarted");
        }
        self.kill_with(view, current, reason, message, probe_grace(probe.as_ref()));
    }

    /// Stops a container that restarts with all others: at once, and without its hook.
    pub(super) fn stop_for_restart(&mut self, view: &View<'_>, restart: &Restart) {
        self.drop_created(view);
        let history = &view.history;
        let current = match &history.latest {
            Latest::Running(current) | Latest::Unknown(current) => Some(*current),
            Latest::NeverRan | Latest::Starting | Latest::Exited(_) => None,
        };
        for container in current
            .into_iter()
            .chain(history.duplicates.iter().copied())
        {
            let message = restart_all::why_stopped(restart, &container.name);
            let grace = Some(Duration::ZERO);
            self.kill_with(view, container, KillReason::RestartAll, message, grace);
        }
    }

    /// The back-off that a restart of all containers waits for.
    fn restart_wait(&self) -> Option<Waiting> {
        let input = self.input;
        let (spec, exit) = restart_all::cause_of(&input.seen())?;
        let (container, now, max) = (&spec.container, input.now, input.backoff_max);
        crash_wait(input.pod, container, input.records, exit, now, max)
    }

    /// A changed spec is followed whatever the policy.
    pub(super) fn replace_outdated(&mut self, view: &View<'_>, current: &ContainerStatus) {
        let mut message = format!("Container {} definition changed", view.spec.container.name);
        if !self.is_deleting() {
            self.start(view, None, &message);
            message.push_str(", will be restarted");
        }
        self.kill(view, current, KillReason::SpecChanged, message);
    }

    /// Nothing of the pod is to run any more: stops what is left of it.
    pub(super) fn finish(&mut self, reason: String) {
        let adopted = self.actions.start.drain(..).filter_map(|s| s.adopt);
        self.actions.remove_created.extend(adopted);
        self.actions = PodActions {
            sandbox_id: self.actions.sandbox_id.take(),
            remove_created: std::mem::take(&mut self.actions.remove_created),
            ..PodActions::default()
        };
        if super::is_alive(self.input.status) {
            self.actions.kill_pod = Some(KillPod { reason });
        }
    }

    pub(super) fn keep(&mut self, view: &View<'_>) {
        self.actions.keep.push(view.spec.container.name.clone());
        self.goes_on = true;
    }

    pub(super) fn kill(
        &mut self,
        view: &View<'_>,
        current: &ContainerStatus,
        reason: KillReason,
        message: String,
    ) {
        self.kill_with(view, current, reason, message, None);
    }

    fn kill_with(
        &mut self,
        view: &View<'_>,
        current: &ContainerStatus,
        reason: KillReason,
        message: String,
        grace: Option<Duration>,
    ) {
        self.actions.kill.push(KillContainer {
            id: current.id.clone(),
            name: view.spec.container.name.clone(),
            reason,
            message,
            grace,
        });
    }

    pub(super) fn kill_unknown(&mut self, view: &View<'_>, current: &ContainerStatus) {
        let message = "Container is in \"unknown\" state, try killing it before restart".to_owned();
        self.kill(view, current, KillReason::Unknown, message);
    }

    pub(super) fn kill_duplicates(&mut self, view: &View<'_>) {
        let name = &view.spec.container.name;
        for duplicate in &view.history.duplicates {
            let message = format!("Container {name} runs twice, the older one is stopped");
            self.kill(view, duplicate, KillReason::Duplicate, message);
        }
    }

    pub(super) fn drop_created(&mut self, view: &View<'_>) {
        let created = view.history.created.iter().map(|c| c.id.clone());
        self.actions.remove_created.extend(created);
        self.drop_stale(view);
    }

    /// Removes what the runtime takes for created and has ended.
    fn drop_stale(&mut self, view: &View<'_>) {
        let stale = view.history.stale.iter().map(|c| c.id.clone());
        self.actions.remove_created.extend(stale);
    }

    /// Starts the container, with the created one that fits if there is one; the others are removed.
    pub(super) fn start_or_adopt(&mut self, view: &View<'_>, why: &str) {
        let created = &view.history.created;
        let sandbox = self.actions.sandbox_id.as_ref();
        let fits = created.iter().copied().find(|c| view.can_adopt(c, sandbox));
        let others = created.iter().filter(|c| fits.is_none_or(|f| f.id != c.id));
        let others = others.map(|c| c.id.clone());
        self.actions.remove_created.extend(others);
        self.drop_stale(view);
        self.start(view, fits, why);
    }

    /// Starts the container, or has it wait for its crash back-off.
    pub(super) fn start(&mut self, view: &View<'_>, adopt: Option<&ContainerStatus>, why: &str) {
        self.goes_on = true;
        let input = self.input;
        let name = &view.spec.container.name;
        if view.again
            && let Some(waiting) = self.restart_wait()
        {
            if self.actions.waiting.iter().all(|w| w.name != waiting.name) {
                self.actions.waiting.push(waiting);
            }
            return;
        }
        let on_record = view.backoff_on_record();
        let decided = adopt.is_some_and(|c| view.is_intended(c));
        // A container that another one has restarted did not crash.
        let restart = input.records.restart().filter(|_| view.again);
        let own = restart.is_none_or(|restart| restart.trigger == *name);
        let backoff = match view.last_exit().filter(|_| own) {
            Some(exit) if !decided => {
                let is_over = input.records.is_back_off_over(name, exit);
                match crash::next(on_record, exit, is_over, input.now, input.backoff_max) {
                    crash::Decision::StartNow { next } => Some(next),
                    crash::Decision::Wait { until, backoff } => {
                        let waiting = crash_loop(input.pod, name, until, backoff);
                        self.actions.waiting.push(waiting);
                        return;
                    }
                }
            }
            _ => on_record,
        };
        self.actions.start.push(StartContainer {
            name: name.clone(),
            kind: view.spec.kind,
            attempt: adopt.map_or(view.history.next_attempt, |c| c.attempt),
            hash: view.hash.clone(),
            adopt: adopt.map(|c| c.id.clone()),
            backoff,
            why: why.to_owned(),
        });
    }
}

/// The grace a probe asks for.
fn probe_grace(probe: Option<&Probe>) -> Option<Duration> {
    let seconds = probe?.termination_grace_period_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}

//! Stopping containers and pods; upstream's `killPodWithSyncResult` and `killContainer`.
//!
//! Comes in: what the runtime shows, the pod's spec where it is known, the grace that is left, the store's
//! permit to stop. Goes out: an event per container, its preStop hook, StopContainer, at last StopPodSandbox.
//! Containers are stopped side by side, but a sidecar waits until the main containers and the sidecars after it
//! have ended. Hooks and waiting take their time from the grace period. A hook that has used it up goes on beside
//! StopContainer, which gives the container the two seconds that each one gets, and ends with the container. Every
//! call may be repeated: stopping what is stopped succeeds, and a preStop hook that has come to its end is not run
//! again. Removal is left to [`super::gc`].
//!
//! A failure is logged when it happens, and so is a stop that the runtime does not answer ([`overdue_stop`]). Streams
//! that clients have open to what is stopped end with it, or soon after its grace period: a client that does not read
//! keeps the runtime from telling the end.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::{ContainerPort, LifecycleHandler, Pod};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::Instrument;

use super::cri::{CriClient, CriError};
use super::hooks::{self, Hook, HookError, HookTarget};
use super::labels;
use crate::core::overdue_stop::{self, Overdue};
use crate::store::{CommitError, StopPermit, Store};
use crate::types::containers::{container_of, is_sidecar};
use crate::types::events::{Event, EventRecorder, EventType, PodRef};
use crate::types::runtime::{
    ContainerState, ContainerStatus, PodStatus, SandboxState, SandboxStatus,
};
use crate::types::{Clock, ContainerId, Pace, PodExt, PodUid, Stamp};

/// The least a container gets between SIGTERM and SIGKILL; upstream's `minimumGracePeriodInSeconds`.
pub const MIN_STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Grace of a pod whose spec says nothing.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// Time that a sandbox may take to stop, with its network, before the stop counts as late.
const SANDBOX_PATIENCE: Duration = Duration::from_secs(20);

/// Something of a pod could not be stopped.
#[derive(Debug, thiserror::Error)]
pub enum KillError {
    /// A container.
    #[error("stop container {container} of pod {pod}: {source}")]
    Container {
        /// `<namespace>/<name>`.
        pod: String,
        /// Name of the container.
        container: String,
        /// Why.
        #[source]
        source: CriError,
    },
    /// A sandbox.
    #[error("stop sandbox {sandbox} of pod {pod}: {source}")]
    Sandbox {
        /// `<namespace>/<name>`.
        pod: String,
        /// Id of the sandbox.
        sandbox: String,
        /// Why.
        #[source]
        source: CriError,
    },
    /// The end of a hook could not be recorded.
    #[error("record the preStop hook of container {container} of pod {pod}: {source}")]
    Commit {
        /// `<namespace>/<name>`.
        pod: String,
        /// Name of the container.
        container: String,
        /// Why.
        #[source]
        source: CommitError,
    },
}

/// The grace period of a container that is to be stopped: an override (eviction, shutdown, what is left of a
/// grace period that has begun) over `deletionGracePeriodSeconds` over that of the probe that wants it stopped
/// over the spec's. Upstream: `setTerminationGracePeriod`.
pub fn kill_grace(
    over: Option<Duration>,
    deletion_seconds: Option<i64>,
    probe: Option<Duration>,
    spec_seconds: Option<i64>,
) -> Duration {
    let seconds = |s: i64| Duration::from_secs(u64::try_from(s).unwrap_or(0));
    over.or(deletion_seconds.map(seconds))
        .or(probe)
        .or(spec_seconds.map(seconds))
        .unwrap_or(DEFAULT_GRACE)
}

/// [`kill_grace`] of a container of `pod`, without an override.
pub fn grace_of(pod: &Pod, probe: Option<Duration>) -> Duration {
    let spec = pod.spec.as_ref();
    kill_grace(
        None,
        pod.metadata.deletion_grace_period_seconds,
        probe,
        spec.and_then(|s| s.termination_grace_period_seconds),
    )
}

/// Returns the timeout for StopContainer from a grace period: whole seconds, rounded up, at least two.
pub fn stop_timeout(grace: Duration) -> i64 {
    let grace = grace.max(MIN_STOP_TIMEOUT);
    let seconds = grace.as_secs() + u64::from(grace.subsec_nanos() > 0);
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

/// Returns the [`Pace`] key of a stop without an answer.
fn late(id: &ContainerId) -> String {
    format!("late stop of {id}")
}

/// Returns the [`Pace`] key of a stop that fails.
fn failed(id: &ContainerId) -> String {
    format!("failed stop of {id}")
}

/// Returns whether a sandbox that does not run was made before this boot. `boot`: the boot that it was made in, as its annotation
/// says. One that another agent has made has none, and is judged by the wall clock.
fn is_of_earlier_boot(sandbox: &SandboxStatus, boot: Option<&str>, now: Stamp) -> bool {
    let made = sandbox.created_at_ns / 1_000_000;
    sandbox.state == SandboxState::NotReady
        && match boot {
            Some(boot) => boot != now.boot.0.to_string(),
            None => made < now.wall_ms - now.boottime_ms,
        }
}

/// Stops containers; borrowed, cheap to make.
#[derive(Clone, Copy)]
pub struct Killer<'a> {
    /// The runtime.
    pub cri: &'a CriClient,
    /// Store with the records of completed hooks.
    pub store: &'a Store,
    /// Events.
    pub recorder: &'a dyn EventRecorder,
    /// Decisions are recorded, or held.
    pub permit: &'a StopPermit,
    /// Identifies leftovers of previous boots, and times the log back-off.
    pub clock: &'a dyn Clock,
    /// Log back-off of a stop that fails or has no answer.
    pub pace: &'a Pace,
    /// Tells when containers end by themselves; `None` if nobody looks.
    pub ends: Option<&'a dyn Ends>,
}

/// Tells when a container ends.
pub trait Ends: Sync {
    /// Returns once the container is seen not to run any more.
    fn ended<'a>(&'a self, pod: &'a PodUid, id: &'a ContainerId) -> BoxFuture<'a, ()>;
}

/// Pod whose containers are stopped.
#[derive(Clone, Copy)]
pub struct Condemned<'a> {
    /// The pod's status from the runtime.
    pub status: &'a PodStatus,
    /// The pod; `None` when it is known from the runtime only. Then hooks come from the annotations of the
    /// containers, and it is not remembered which have run.
    pub pod: Option<&'a Pod>,
    /// Addresses of pods on the node's network, for their hooks.
    pub host_ips: &'a [String],
}

impl<'a> Condemned<'a> {
    fn pod_ref(&self) -> PodRef {
        match self.pod {
            Some(pod) => PodRef::of(pod),
            None => PodRef {
                uid: self.status.uid.clone(),
                name: self.status.name.clone(),
                namespace: self.status.namespace.clone(),
            },
        }
    }

    fn full_name(&self) -> String {
        let PodRef {
            uid,
            name,
            namespace,
        } = self.pod_ref();
        format!("{name}_{namespace}({uid})")
    }

    /// Returns the address for an HTTP hook without a host. For a pod with a network of its own that is never the
    /// node's.
    pub fn ip(&self) -> Option<&'a str> {
        let of_node = self.host_ips.first();
        let of_node = of_node.filter(|_| self.pod.is_none_or(PodExt::host_network));
        let first = self.status.ips.first().or(of_node);
        first.map(String::as_str)
    }
}

impl Killer<'_> {
    /// Stops one container: its preStop hook, then StopContainer with what is left of `grace`. `message` is the
    /// event's text, by default that it is being stopped. Dropping the future cancels the wait, not the stop.
    ///
    /// # Errors
    /// When the runtime does not confirm that it stopped.
    pub async fn container(
        &self,
        of: Condemned<'_>,
        container: &ContainerStatus,
        grace: Duration,
        message: Option<&str>,
    ) -> Result<(), KillError> {
        self.stop(of, container, grace, message, None).await
    }

    /// Stops every container that may run, each in its turn, then every sandbox. Sandboxes are stopped even when
    /// a container could not be: that ends it as well. A sandbox that an earlier boot has left is only told of when it
    /// cannot be stopped: nothing of it runs, and its network went with that boot.
    ///
    /// # Errors
    /// The first thing that could not be stopped; everything else was tried.
    pub async fn pod(&self, of: Condemned<'_>, grace: Duration) -> Result<(), KillError> {
        let turns = Turns::new(of.pod, of.status);
        let containers = join_all(
            to_stop(of.status).map(|container| self.stop(of, container, grace, None, Some(&turns))),
        )
        .await;
        let pod = of.pod_ref();
        let sandboxes = join_all(of.status.sandboxes.iter().map(|sandbox| async {
            let call = self.cri.stop_pod_sandbox(&sandbox.id, self.permit);
            let what = format!("sandbox {}", sandbox.id);
            let stopped = self
                .watch(of, &what, &sandbox.id, SANDBOX_PATIENCE, call)
                .await;
            let error = stopped.map_err(|source| KillError::Sandbox {
                pod: format!("{}/{}", pod.namespace, pod.name),
                sandbox: sandbox.id.to_string(),
                source,
            });
            match error {
                Err(error) if self.is_of_earlier_boot(sandbox).await => {
                    tracing::warn!(%error, "cannot clean up a sandbox from a previous boot, ignoring it");
                    let text = format!("error killing pod: {error}. The sandbox is from a previous boot; ignoring it");
                    self.recorder.record(Event {
                        pod: Some(pod.clone()),
                        container: None,
                        kind: EventType::Warning,
                        reason: "FailedKillPod".to_owned(),
                        message: text,
                        annotations: Default::default(),
                    });
                    Ok(())
                }
                Err(error) => {
                    self.tell_failure(of, &sandbox.id, &error);
                    Err(error)
                }
                Ok(()) => Ok(()),
            }
        }))
        .await;
        let all: Result<(), KillError> = containers.into_iter().chain(sandboxes).collect();
        if all.is_ok() {
            self.nothing_is_late(of.status);
        }
        all
    }

    /// As the function of this name. A sandbox whose annotations cannot be read counts as one of this boot.
    async fn is_of_earlier_boot(&self, sandbox: &SandboxStatus) -> bool {
        if sandbox.state != SandboxState::NotReady {
            return false;
        }
        match self.cri.pod_sandbox_status(&sandbox.id).await {
            Ok(status) => {
                let boot = status.annotations.get(labels::SANDBOX_BOOT);
                is_of_earlier_boot(sandbox, boot.map(String::as_str), self.clock.now())
            }
            Err(error) => {
                tracing::debug!(sandbox = %sandbox.id, %error, "cannot find out in which boot a sandbox was made");
                false
            }
        }
    }

    /// Forgets the logged failures of a pod of which nothing runs any more.
    fn nothing_is_late(&self, status: &PodStatus) {
        let containers = status.containers.iter().map(|c| &c.id);
        for id in containers.chain(status.sandboxes.iter().map(|s| &s.id)) {
            self.pace.over(&late(id));
            self.pace.over(&failed(id));
        }
    }

    async fn stop(
        &self,
        of: Condemned<'_>,
        container: &ContainerStatus,
        grace: Duration,
        message: Option<&str>,
        turns: Option<&Turns<'_>>,
    ) -> Result<(), KillError> {
        let span = tracing::info_span!("kill_container", pod = %of.status.uid, container = %container.name, id = %container.id, grace_s = grace.as_secs_f64());
        async {
            let stopped = self.stop_inside(of, container, grace, message, turns).await;
            if let Err(error) = &stopped {
                self.tell_failure(of, &container.id, error);
            }
            stopped
        }
        .instrument(span)
        .await
    }

    async fn stop_inside(
        &self,
        of: Condemned<'_>,
        container: &ContainerStatus,
        grace: Duration,
        message: Option<&str>,
        turns: Option<&Turns<'_>>,
    ) -> Result<(), KillError> {
        let begun = Instant::now();
        let left = || grace.saturating_sub(begun.elapsed());
        let name = &container.name;
        let text = message.map_or_else(|| format!("Stopping container {name}"), str::to_owned);
        self.tell(of, name, EventType::Normal, "Killing", &text);
        let hook = if grace.is_zero() {
            None
        } else {
            self.pre_stop(of, container).await
        };
        let mut hooked = pin!(async {
            match &hook {
                Some(hook) => self.run_pre_stop(of, container, hook).await,
                None => Ok(()),
            }
        });
        let mut remembered = tokio::time::timeout(left(), &mut hooked).await.ok();
        let stop = self.stop_in_turn(of, container, left, turns);
        let stopped = if remembered.is_some() {
            stop.await
        } else {
            tracing::info!("the preStop hook has used up the grace period, stopping its container");
            // The call stays: to give it up would end the command at once, before the container has to.
            let mut stop = pin!(stop);
            tokio::select! {
                biased;
                outcome = &mut hooked => {
                    remembered = Some(outcome);
                    stop.await
                }
                stopped = &mut stop => stopped,
            }
        };
        stopped?;
        if remembered.is_none() && hook.as_ref().is_some_and(PreStop::ends_with_its_container) {
            tracing::info!("the preStop hook ended with its container");
            self.tell_failed_pre_stop(of, name);
        }
        // A store that refuses is told of, and has not kept the container running.
        remembered
            .unwrap_or(Ok(()))
            .map_err(|source| KillError::Commit {
                pod: format!("{}/{}", of.status.namespace, of.status.name),
                container: name.clone(),
                source,
            })
    }

    /// Waits for the container's turn as long as there is grace, then stops it. `left` returns the remaining grace
    /// period.
    async fn stop_in_turn(
        &self,
        of: Condemned<'_>,
        container: &ContainerStatus,
        left: impl Fn() -> Duration,
        turns: Option<&Turns<'_>>,
    ) -> Result<(), KillError> {
        let name = &container.name;
        if let Some(turns) = turns
            && tokio::time::timeout(left(), turns.come(name))
                .await
                .is_err()
        {
            tracing::info!("no grace period is left to wait for other containers");
        }
        let timeout = stop_timeout(left());
        tracing::info!(timeout, "stopping container");
        let call = self.cri.stop_container(&container.id, timeout, self.permit);
        let grace = Duration::from_secs(timeout.unsigned_abs());
        self.watch(of, &format!("container {name}"), &container.id, grace, call)
            .await
            .map_err(|source| KillError::Container {
                pod: format!("{}/{}", of.status.namespace, of.status.name),
                container: name.clone(),
                source,
            })?;
        if let Some(turns) = turns {
            turns.ended(name);
        }
        Ok(())
    }

    /// Waits for the answer to a `call` that gives the runtime `grace`. When it is late, ends the streams that are open to
    /// what is stopped, and warns.
    async fn watch(
        &self,
        of: Condemned<'_>,
        what: &str,
        id: &ContainerId,
        grace: Duration,
        call: impl Future<Output = Result<(), CriError>>,
    ) -> Result<(), CriError> {
        let begun = Instant::now();
        let stopping = self.cri.open_streams().stopping(id);
        let mut call = pin!(call);
        for (at, step) in overdue_stop::steps(grace) {
            let left = at.saturating_sub(begun.elapsed());
            if let Ok(answer) = tokio::time::timeout(left, &mut call).await {
                if answer.is_ok() {
                    stopping.ended();
                    self.pace.over(&late(id));
                    self.pace.over(&failed(id));
                }
                return answer;
            }
            match step {
                Overdue::EndStreams => stopping.cut(),
                Overdue::Warn => self.tell_late(of, what, id, begun.elapsed()),
            }
        }
        // There is always a next step.
        call.await
    }

    fn tell_late(&self, of: Condemned<'_>, what: &str, id: &ContainerId, waited: Duration) {
        let waited_s = waited.as_secs();
        let text = format!(
            "{what} has not stopped: no answer from the container runtime for {waited_s} s"
        );
        if self.pace.is_due(&late(id), &text, self.clock.now()) {
            tracing::warn!(pod = %of.status.uid, what, waited_s, "the container runtime does not answer a stop");
            self.tell_kill(of, &text);
        }
    }

    fn tell_failure(&self, of: Condemned<'_>, id: &ContainerId, error: &KillError) {
        let text = error.to_string();
        if self.pace.is_due(&failed(id), &text, self.clock.now()) {
            tracing::warn!(pod = %of.status.uid, %error, "cannot stop a part of the pod yet");
            self.tell_kill(of, &text);
        }
    }

    /// Emits `FailedKillPod`, for a pod that is known from more than the runtime.
    fn tell_kill(&self, of: Condemned<'_>, text: &str) {
        if let Some(pod) = of.pod {
            let text = format!("error killing pod: {text}");
            let event = Event::pod(EventType::Warning, pod, "FailedKillPod", text);
            self.recorder.record(event);
        }
    }

    fn tell(&self, of: Condemned<'_>, name: &str, kind: EventType, reason: &str, text: &str) {
        let event = Event {
            pod: Some(of.pod_ref()),
            container: None,
            kind,
            reason: reason.to_owned(),
            message: text.to_owned(),
            annotations: Default::default(),
        };
        self.recorder.record(match of.pod {
            Some(pod) => event.container_of(pod, name),
            None => event.container(name),
        });
    }

    /// Without the error, which may contain secrets.
    fn tell_failed_pre_stop(&self, of: Condemned<'_>, name: &str) {
        let (reason, text) = ("FailedPreStopHook", "PreStopHook failed");
        self.tell(of, name, EventType::Warning, reason, text);
    }

    /// The preStop hook that is still to be run.
    async fn pre_stop(&self, of: Condemned<'_>, container: &ContainerStatus) -> Option<PreStop> {
        if container.state != ContainerState::Running {
            return None;
        }
        let hook = match of.pod.and_then(|pod| container_of(pod, &container.name)) {
            Some(spec) => {
                let spec = &*spec.container;
                PreStop {
                    handler: spec.lifecycle.as_ref()?.pre_stop.clone()?,
                    ports: spec.ports.clone().unwrap_or_default(),
                }
            }
            None => match self.cri.container_status(&container.id).await {
                Ok(told) => PreStop::of_annotations(&told.annotations)?,
                Err(error) => {
                    tracing::warn!(%error, "cannot read the preStop hook from the runtime, skipping it");
                    return None;
                }
            },
        };
        let seen = self.store.snapshot();
        let done = Hook::PreStop.is_done(&seen, &of.status.uid, &container.name, &container.id);
        (!done).then_some(hook)
    }

    async fn run_pre_stop(
        &self,
        of: Condemned<'_>,
        container: &ContainerStatus,
        hook: &PreStop,
    ) -> Result<(), CommitError> {
        let name = &container.name;
        let pod = of.full_name();
        let target = HookTarget {
            pod: &pod,
            name,
            id: &container.id,
            ports: &hook.ports,
            ip: of.ip(),
        };
        tracing::debug!("running the preStop hook");
        let run = hooks::run(&hook.handler, target, self.cri);
        let outcome = if let (Some(_), Some(ends)) = (&hook.handler.sleep, self.ends) {
            // It waits for nobody else.
            tokio::select! {
                outcome = run => outcome,
                () = ends.ended(&of.status.uid, &container.id) => {
                    tracing::info!(container = name, "the container has ended, its preStop hook need not sleep any more");
                    Ok(())
                }
            }
        } else {
            run.await
        };
        if let Err(error) = &outcome {
            tracing::warn!(%error, "preStop hook failed");
            self.tell_failed_pre_stop(of, name);
        }
        if of.pod.is_none() {
            return Ok(());
        }
        self.remember(of, container, outcome.as_ref().copied())
            .await
    }

    async fn remember(
        &self,
        of: Condemned<'_>,
        container: &ContainerStatus,
        outcome: Result<(), &HookError>,
    ) -> Result<(), CommitError> {
        let (uid, name) = (&of.status.uid, &container.name);
        loop {
            let seen = self.store.snapshot();
            let done = Hook::PreStop.done(&seen, uid, name, &container.id, outcome);
            match self.store.commit_or_hold(done).await {
                Ok(_) => return Ok(()),
                // Somebody recorded its end: once more with that.
                Err(CommitError::Stale { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A preStop hook and what it needs of its container.
struct PreStop {
    handler: LifecycleHandler,
    ports: Vec<ContainerPort>,
}

impl PreStop {
    /// Returns whether the hook fails when the container ends. A command does, and so does a request that the container
    /// has to answer.
    fn ends_with_its_container(&self) -> bool {
        self.handler.sleep.is_none()
    }

    /// Upstream: `restoreSpecsFromContainerLabels`.
    fn of_annotations(annotations: &HashMap<String, String>) -> Option<Self> {
        let text = annotations.get(labels::CONTAINER_PRE_STOP_HANDLER)?;
        let handler = match serde_json::from_str(text) {
            Ok(handler) => handler,
            Err(error) => {
                tracing::warn!(%error, "cannot parse the preStop hook in a container's annotation");
                return None;
            }
        };
        let ports = annotations
            .get(labels::CONTAINER_PORTS)
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        Some(Self { handler, ports })
    }
}

/// Order of stops: a sidecar stops after the main containers and the sidecars that follow it have ended, any other
/// container stops at once. Upstream: `terminationOrdering`.
struct Turns<'a> {
    /// Number of running containers per name.
    left: watch::Sender<BTreeMap<&'a str, usize>>,
    /// Names of the containers that must end before each sidecar.
    after: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Turns<'a> {
    fn new(pod: Option<&'a Pod>, status: &'a PodStatus) -> Self {
        let mut left: BTreeMap<&str, usize> = BTreeMap::new();
        for container in to_stop(status) {
            *left.entry(&container.name).or_default() += 1;
        }
        let mut after = BTreeMap::new();
        if let Some(pod) = pod {
            let mains = pod.containers().iter().map(|c| c.name.as_str());
            let mut later: Vec<&str> = mains.filter(|name| left.contains_key(name)).collect();
            for init in pod.init_containers().iter().rev() {
                if is_sidecar(init) && left.contains_key(init.name.as_str()) {
                    after.insert(init.name.as_str(), later.clone());
                    later.push(&init.name);
                }
            }
        }
        let (left, _) = watch::channel(left);
        Self { left, after }
    }

    /// Waits for the turn of a container.
    async fn come(&self, name: &str) {
        let Some(after) = self.after.get(name) else {
            return;
        };
        let mut left = self.left.subscribe();
        let ended = left.wait_for(|left| {
            let gone = |name: &&str| left.get(name).is_none_or(|n| *n == 0);
            after.iter().all(gone)
        });
        // Nobody drops the sender before this ends.
        drop(ended.await);
    }

    fn ended(&self, name: &str) {
        self.left.send_modify(|left| {
            if let Some(n) = left.get_mut(name) {
                *n = n.saturating_sub(1);
            }
        });
    }
}

/// Containers that may run: not those that only exist, nor those that have ended.
fn to_stop(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status
        .containers
        .iter()
        .filter(|c| matches!(c.state, ContainerState::Running | ContainerState::Unknown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_dead_sandbox_that_is_older_than_the_boot_is_of_an_earlier_one() {
        // Booted a minute ago.
        let now = Stamp {
            boot: crate::types::BootId(2),
            boottime_ms: 60_000,
            wall_ms: 1_800_000_060_000,
        };
        let sandbox = |state, made_ms: i64| SandboxStatus {
            id: crate::types::ContainerId::new("s"),
            attempt: 0,
            state,
            created_at_ns: made_ms * 1_000_000,
            ips: Vec::new(),
            host_network: None,
            runtime_handler: String::new(),
        };
        let (before, after) = (1_799_999_999_999, 1_800_000_000_000);
        let (this, other) = (Some("2"), Some("1"));
        for (state, made, boot, expected) in [
            // The clock was set after the sandbox was made, or before.
            (SandboxState::NotReady, before, this, false),
            (SandboxState::NotReady, after, other, true),
            (SandboxState::Ready, before, other, false),
            // Of another agent.
            (SandboxState::NotReady, before, None, true),
            (SandboxState::NotReady, after, None, false),
            (SandboxState::Ready, before, None, false),
        ] {
            let found = is_of_earlier_boot(&sandbox(state, made), boot, now);
            assert_eq!(found, expected, "{state:?} {made} {boot:?}");
        }
    }

    #[test]
    fn an_override_wins_over_deletion_over_the_probe_over_the_spec() {
        let s = Duration::from_secs;
        let probe = Some(s(15));
        for (over, deletion, probe, spec, want) in [
            (Some(s(3)), Some(10), probe, Some(20), s(3)),
            (Some(s(60)), Some(10), None, Some(20), s(60)),
            (None, Some(10), probe, Some(20), s(10)),
            (None, Some(0), probe, Some(20), s(0)),
            (None, None, probe, Some(20), s(15)),
            (None, None, None, Some(20), s(20)),
            (None, None, None, Some(-5), s(0)),
            (None, None, None, None, s(30)),
        ] {
            assert_eq!(
                kill_grace(over, deletion, probe, spec),
                want,
                "{over:?} {deletion:?} {probe:?} {spec:?}"
            );
        }
    }

    #[test]
    fn a_hook_asks_the_node_only_for_a_pod_on_its_network() {
        let pod = |host_network: bool| -> Pod {
            serde_json::from_value(serde_json::json!({
                "spec": {"hostNetwork": host_network, "containers": []},
            }))
            .unwrap()
        };
        let (own, on_node) = (pod(false), pod(true));
        let without = PodStatus::empty("u1".into());
        let mut with = without.clone();
        with.ips = vec!["10.0.0.7".to_owned()];
        let host_ips = ["192.0.2.1".to_owned()];
        for (pod, status, want) in [
            (&own, &with, Some("10.0.0.7")),
            (&own, &without, None),
            (&on_node, &without, Some("192.0.2.1")),
        ] {
            let of = Condemned {
                status,
                pod: Some(pod),
                host_ips: &host_ips,
            };
            assert_eq!(of.ip(), want);
        }
    }

    #[test]
    fn stop_timeout_is_whole_seconds_and_at_least_two() {
        for (ms, want) in [(0, 2), (1_999, 2), (2_000, 2), (2_001, 3), (30_000, 30)] {
            assert_eq!(stop_timeout(Duration::from_millis(ms)), want, "{ms} ms");
        }
    }
}

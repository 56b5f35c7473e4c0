//! Carrying out what `pod_actions` decided, in its order: kill, remove what never ran, forget init containers of a
//! previous sandbox, hooks that were cut off, sandbox, containers (ephemeral ones, then init containers, then the
//! others).
//!
//! **Invariant:** a container is started only with the receipt of its start intent, and removed only with
//! the receipt of the record of its end; the runtime client takes nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::container_start::{ContainerStart, StartError};
use super::sandbox::{ordered, report_sandbox, sandbox};
use super::start::Failure;
use super::{Job, StartFailure, WorkerContext, grow, resolve, start, stop};
use crate::core::pod_actions::{PodActions, StartContainer};
use crate::core::state::Transaction;
use crate::dra::DraError;
use crate::kuberuntime::cri::CriError;
use crate::kuberuntime::sources::Sources;
use crate::kuberuntime::{gc, kill, logs};
use crate::pleg::InspectError;
use crate::status::StatusError;
use crate::store::{CommitError, RemoveContainer};
use crate::types::containers::container_of;
use crate::types::metrics::ContainerErrorLabel;
use crate::types::runtime::PodStatus;
use crate::types::{ContainerId, ContainerKind, Event, EventType, PodExt, PodUid, Stamp, causes};

/// Longest text of a line in the journal that is not about a decision.
const MAX_NOTE: usize = 1024;

/// Reason why a step was not completed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error("a decision was based on records that have changed since")]
    Stale,
    #[error("commit a decision about the pod")]
    Commit(#[source] CommitError),
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error(transparent)]
    Inspect(#[from] InspectError),
    #[error(transparent)]
    Cri(#[from] CriError),
    #[error(transparent)]
    Kill(#[from] kill::KillError),
    #[error(transparent)]
    Gc(#[from] gc::GcError),
    #[error(transparent)]
    Volume(#[from] crate::volumemanager::VolumeError),
    #[error(transparent)]
    Cgroup(#[from] crate::cm::CgroupError),
    #[error(transparent)]
    Log(#[from] logs::LogError),
    #[error("configure the sandbox: {0}")]
    Sandbox(String),
    #[error("network is not ready: {0}")]
    NetworkNotReady(String),
    #[error(
        "the container runtime lists nothing of the pod, but its processes run ({}); bring back the runtime that started \
         them, or end them",
        pids_of(.0)
    )]
    NotListed(Vec<i32>),
    #[error("container {0} still runs")]
    StillRunning(String),
    #[error("the start of container {0} that was under way has ended without a running container")]
    StartUndone(ContainerId),
    #[error("the pod waits for its devices: {0}")]
    Devices(String),
    #[error("resource claims of the pod: {0}")]
    Claims(DraError),
    #[error("{0}")]
    Start(String),
    /// An error of which an event was emitted where it occurred.
    #[error(transparent)]
    Told(Box<StepError>),
}

impl StepError {
    /// The error, of which an event was emitted.
    pub(super) fn told(self) -> Self {
        Self::Told(Box::new(self))
    }
}

/// The first of some processes, for a human.
fn pids_of(pids: &[i32]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<String> = pids.iter().take(SHOWN).map(i32::to_string).collect();
    let more = if pids.len() > SHOWN { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}

impl From<CommitError> for StepError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Stale { .. } => Self::Stale,
            other => Self::Commit(other),
        }
    }
}

/// Result of executing the actions of one sync.
pub(super) struct Executed {
    /// Containers that could not be started, with the reason for their Waiting state.
    pub(super) failures: BTreeMap<String, StartFailure>,
    /// Earliest time at which one of them may be tried again.
    pub(super) retry_at: Option<Stamp>,
    /// Every container that was to be started was started.
    pub(super) started_all: bool,
    /// Time spent pulling images, or waiting for pulls.
    pub(super) pulling: Duration,
}

impl Executed {
    fn fail(&mut self, context: &WorkerContext, kind: ContainerKind, name: &str, failure: Failure) {
        self.started_all = false;
        self.retry_at = match (self.retry_at, failure.retry_at) {
            (Some(a), Some(b)) if b.boottime_ms < a.boottime_ms => Some(b),
            (None, b) => b,
            (a, _) => a,
        };
        let label = ContainerErrorLabel {
            container_type: container_type(kind).to_owned(),
            code: failure.reason.clone(),
        };
        context
            .metrics
            .started_containers_errors
            .get_or_create(&label)
            .inc();
        self.failures.insert(
            name.to_owned(),
            StartFailure {
                reason: failure.reason,
                message: failure.message,
            },
        );
    }
}

/// Upstream's label of a container's kind, sidecars among the init containers.
pub(super) fn container_type(kind: ContainerKind) -> &'static str {
    match kind {
        ContainerKind::Init | ContainerKind::Sidecar => "init_container",
        ContainerKind::Main => "container",
        ContainerKind::Ephemeral => "ephemeral_container",
    }
}

/// Tells the journal what came of a decision. It may be lost; the decision itself was recorded before.
pub(super) fn note(context: &WorkerContext, pod: &PodUid, what: &str, mut why: String) {
    if why.len() > MAX_NOTE {
        let mut end = MAX_NOTE;
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        why.truncate(end);
    }
    let line = Transaction::new().journal(Some(pod), what, why);
    // A degraded store reports itself.
    drop(context.store.submit(line));
}

/// Prepares what a pod needs before its first container: cgroup, directories, volumes. Returns the host path of each
/// volume by the volume's name.
pub(super) async fn prepare(
    context: &WorkerContext,
    job: &Job,
) -> Result<BTreeMap<String, PathBuf>, StepError> {
    let pod = &job.pod;
    let for_cgroups = Arc::clone(pod);
    let limited = context.with_cgroups(move |cgroups| {
        if cgroups.exists(&for_cgroups) {
            return cgroups.limit_pids(&for_cgroups);
        }
        cgroups.ensure(&for_cgroups)
    });
    limited.await.map_err(|error| {
        let what = "unable to ensure pod container exists";
        record_failure(context, pod, "FailedToCreatePodContainer", what, &error);
        StepError::from(error).told()
    })?;
    let made = context.content.volumes.make_pod_dirs(&job.uid).await;
    made.inspect_err(|error| {
        let what = "error making pod data directories";
        record_failure(context, pod, "FailedToMakePodDataDirectories", what, error);
    })?;
    let of = Arc::clone(pod);
    let made = logs::beside(&context.node, move |node| {
        logs::create_pod_log_dir(node, &of)
    });
    made.await.inspect_err(|error| {
        let what = "Failed to create pod sandbox";
        record_failure(context, pod, "FailedCreatePodSandBox", what, error);
    })?;
    let sources = resolve::volumes(context, pod).await;
    let paths = mount(context, job, &sources).await?;
    grow::volumes(context, pod, &sources).await;
    Ok(paths)
}

/// Mounts the volumes of a pod. One whose back-off has ended early is tried again at once.
async fn mount(
    context: &WorkerContext,
    job: &Job,
    sources: &Sources,
) -> Result<BTreeMap<String, PathBuf>, StepError> {
    loop {
        let mounted = context
            .content
            .volumes
            .mount(&job.pod, sources, &*context.recorder)
            .await;
        let error = match mounted {
            Ok(paths) => return Ok(paths),
            Err(error) => error,
        };
        // Each cause is used once, so this ends.
        if !super::causes::end_mount_back_off(context, job, &error).await? {
            return Err(error.into());
        }
    }
}

/// Stops what must go. Comes before everything else, so that no volume or image is waited for.
pub(super) async fn stop(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) -> Result<(), StepError> {
    if !actions.stops() {
        return Ok(());
    }
    tell_sandbox_changed(context, job, status, actions);
    stop::kill_what_must_go(context, job, status, actions).await
}

fn tell_sandbox_changed(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) {
    if actions.create_sandbox.is_some() && !status.sandboxes.is_empty() {
        let text = "Pod sandbox changed, it will be killed and re-created.";
        let event = Event::pod(EventType::Normal, &job.pod, "SandboxChanged", text);
        context.recorder.record(event);
    }
}

/// Carries out the actions but for the stops, which [`stop()`] has done.
pub(super) async fn execute(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
    volumes: &BTreeMap<String, PathBuf>,
) -> Result<Executed, StepError> {
    if !actions.stops() {
        tell_sandbox_changed(context, job, status, actions);
    }
    for id in &actions.remove_created {
        let Some(intent) = RemoveContainer::new(status, id, context.clock.now()) else {
            continue;
        };
        let receipt = context
            .store
            .commit_intent(intent, Transaction::new())
            .await?;
        context.cri.remove_container(&receipt).await?;
    }
    stop::forget_init(context, job, actions).await?;
    let mut executed = Executed {
        failures: BTreeMap::new(),
        retry_at: None,
        started_all: !actions.start.is_empty(),
        pulling: Duration::ZERO,
    };
    for hook in &actions.post_start {
        let Some(spec) = container_of(&job.pod, &hook.name) else {
            continue;
        };
        let attempt = status.containers.iter().find(|c| c.id == hook.id);
        let attempt = attempt.map_or(0, |c| c.attempt);
        let ips = ordered(context, status.ips.clone());
        let ran = start::post_start(context, job, &spec, &hook.id, attempt, &ips).await;
        match ran {
            Ok(()) => {}
            Err(StartError::Waits(failure)) => {
                executed.fail(context, spec.kind, &hook.name, failure);
            }
            Err(StartError::Step(error)) => return Err(error),
        }
    }
    if actions.create_sandbox.is_none() && actions.start.is_empty() {
        return Ok(executed);
    }
    let sandbox = sandbox(context, job, status, actions).await?;
    // One without an address is to be replaced.
    let has_address = job.pod.host_network() || !sandbox.ips.is_empty();
    if actions.create_sandbox.is_some() && has_address {
        report_sandbox(context, job, &sandbox.ips).await?;
    }
    for start in in_order(&actions.start) {
        let Some(spec) = container_of(&job.pod, &start.name) else {
            continue;
        };
        if spec.kind == ContainerKind::Init {
            stop::prune_init(context, status, &start.name).await?;
        }
        let container = ContainerStart {
            context,
            job,
            status,
            sandbox: &sandbox,
            spec: &spec,
            start,
            volumes,
        };
        match container.run().await {
            Ok(()) => {}
            Err(StartError::Waits(failure)) => {
                executed.fail(context, spec.kind, &start.name, failure);
                if spec.kind == ContainerKind::Init {
                    // What comes after it waits for its end.
                    break;
                }
            }
            Err(StartError::Step(error)) => return Err(error),
        }
    }
    executed.pulling = Duration::from_millis(sandbox.pull_ms.load(Ordering::Relaxed));
    Ok(executed)
}

/// Ephemeral containers first, then init containers and sidecars, then the others.
fn in_order(start: &[StartContainer]) -> Vec<&StartContainer> {
    let mut order: Vec<_> = start.iter().collect();
    order.sort_by_key(|s| match s.kind {
        ContainerKind::Ephemeral => 0,
        ContainerKind::Init | ContainerKind::Sidecar => 1,
        ContainerKind::Main => 2,
    });
    order
}

/// Emits an event about a step that failed before anything of the pod runs. Reasons are upstream's.
fn record_failure(
    context: &WorkerContext,
    pod: &Pod,
    reason: &'static str,
    what: &str,
    error: &(dyn std::error::Error + 'static),
) {
    let text = format!("{what}: {}", causes(error));
    let event = Event::pod(EventType::Warning, pod, reason, text);
    context.recorder.record(event);
}

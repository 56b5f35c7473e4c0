//! Carrying out what `pod_actions` decided, in its order: kill, remove what never ran, forget init containers of a
//! former sandbox, hooks that were cut off, sandbox, containers (ephemeral ones, then init containers, then the
//! others).
//!
//! **Invariant:** a container is started only with the receipt of its start intent, and removed only with
//! the receipt of the record of its end; the runtime client takes nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use futures::future::join_all;
use tracing::{info, warn};

use super::start::Failure;
use super::{Job, StartFailure, WorkerContext, resolve, start, sync_pod};
use crate::core::container_history;
use crate::core::pod_actions::{self, PodActions, StartContainer};
use crate::core::state::Transaction;
use crate::kuberuntime::cri::{CriError, convert, v1};
use crate::kuberuntime::kill::{self, Condemned, Killer};
use crate::kuberuntime::{gc, logs, sandbox_config};
use crate::pleg::InspectError;
use crate::status::StatusError;
use crate::store::{CommitError, RemoveIntent};
use crate::types::containers::container_of;
use crate::types::metrics::ReasonLabel;
use crate::types::runtime::{ContainerState, PodStatus, SandboxState};
use crate::types::{ContainerId, ContainerKind, Event, EventType, PodExt, PodUid, Stamp};

/// Longest text of a line in the journal that is not about a decision.
const MAX_NOTE: usize = 1024;

/// Why a step could not be completed.
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
    #[error("container {0} still runs")]
    StillRunning(String),
    #[error("{0}")]
    Start(String),
}

impl From<CommitError> for StepError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Stale { .. } => Self::Stale,
            other => Self::Commit(other),
        }
    }
}

/// What became of the actions.
pub(super) struct Executed {
    /// Containers that could not be started, with the reason for their Waiting state.
    pub(super) failures: BTreeMap<String, StartFailure>,
    /// When the earliest of them may be tried again.
    pub(super) retry_at: Option<Stamp>,
    /// Every container that was to be started was started.
    pub(super) started_all: bool,
}

impl Executed {
    fn fail(&mut self, context: &WorkerContext, name: &str, failure: Failure) {
        self.started_all = false;
        self.retry_at = match (self.retry_at, failure.retry_at) {
            (Some(a), Some(b)) if b.boottime_ms < a.boottime_ms => Some(b),
            (None, b) => b,
            (a, _) => a,
        };
        let label = ReasonLabel {
            reason: failure.reason.clone(),
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

/// A sandbox to start containers in.
pub(super) struct Sandbox {
    pub(super) id: ContainerId,
    pub(super) ips: Vec<String>,
    pub(super) config: v1::PodSandboxConfig,
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

/// What a pod needs before its first container: cgroup, directories, volumes. Returns the host path of
/// each volume.
pub(super) async fn prepare(
    context: &WorkerContext,
    job: &Job,
) -> Result<BTreeMap<String, PathBuf>, StepError> {
    let pod = &job.pod;
    let for_cgroups = Arc::clone(pod);
    context
        .with_cgroups(move |cgroups| {
            if cgroups.exists(&for_cgroups) {
                return cgroups.limit_pids(&for_cgroups);
            }
            cgroups.ensure(&for_cgroups)
        })
        .await?;
    context.volumes.make_pod_dirs(&job.uid)?;
    logs::create_pod_log_dir(&context.node, pod)?;
    let sources = resolve::volumes(context, pod).await;
    Ok(context
        .volumes
        .mount(pod, &sources, &*context.recorder)
        .await?)
}

pub(super) async fn execute(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
    volumes: &BTreeMap<String, PathBuf>,
) -> Result<Executed, StepError> {
    kill_what_must_go(context, job, status, actions).await?;
    for id in &actions.remove_created {
        let seen = context.store.snapshot();
        let record_end =
            container_history::record_end(&seen, &job.uid, status, id, context.clock.now());
        let intent = RemoveIntent {
            id: id.clone(),
            record_end,
        };
        let receipt = context
            .store
            .commit_intent(intent, Transaction::new())
            .await?;
        context.cri.remove_container(&receipt).await?;
    }
    forget_init(context, job, actions).await?;
    let mut executed = Executed {
        failures: BTreeMap::new(),
        retry_at: None,
        started_all: !actions.start.is_empty(),
    };
    for hook in &actions.post_start {
        let Some(spec) = container_of(&job.pod, &hook.name) else {
            continue;
        };
        let attempt = status.containers.iter().find(|c| c.id == hook.id);
        let attempt = attempt.map_or(0, |c| c.attempt);
        if let Err(failure) =
            start::post_start(context, job, &spec, &hook.id, attempt, &status.ips).await?
        {
            executed.fail(context, &hook.name, failure);
        }
    }
    if actions.create_sandbox.is_none() && actions.start.is_empty() {
        return Ok(executed);
    }
    let sandbox = sandbox(context, job, status, actions).await?;
    for start in in_order(&actions.start) {
        let Some(spec) = container_of(&job.pod, &start.name) else {
            continue;
        };
        if spec.kind == ContainerKind::Init {
            prune_init(context, status, &start.name).await?;
        }
        if let Err(failure) =
            start::container(context, job, status, &sandbox, &spec, start, volumes).await?
        {
            executed.fail(context, &start.name, failure);
            if spec.kind == ContainerKind::Init {
                // What comes after it waits for its end.
                break;
            }
        }
    }
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

async fn kill_what_must_go(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) -> Result<(), StepError> {
    let pod = &job.pod;
    let condemned = Condemned {
        status,
        pod: Some(pod),
        host_ips: &context.node.host_ips,
    };
    let mut decision = Transaction::new();
    if let Some(kill_pod) = &actions.kill_pod {
        decision = decision.journal(Some(&job.uid), "stopping pod", &kill_pod.reason);
    } else if actions.kill.is_empty() {
        return Ok(());
    } else {
        for victim in &actions.kill {
            let why = format!("{}: {}", victim.name, victim.message);
            decision = decision.journal(Some(&job.uid), "stopping container", why);
        }
    }
    let permit = context.store.commit_stop(decision).await?;
    let killer = Killer {
        cri: &context.cri,
        store: &context.store,
        recorder: &*context.recorder,
        permit: &permit,
    };
    if actions.kill_pod.is_some() {
        return Ok(killer.pod(condemned, kill::grace_of(pod, None)).await?);
    }
    let killed = join_all(actions.kill.iter().filter_map(|victim| {
        let container = status.containers.iter().find(|c| c.id == victim.id)?;
        let grace = kill::grace_of(pod, victim.grace);
        Some(killer.container(condemned, container, grace, Some(&victim.message)))
    }))
    .await;
    killed
        .into_iter()
        .collect::<Result<(), _>>()
        .map_err(StepError::from)
}

/// The ends of these init containers count no more: a new sandbox is made, and they run again in it.
async fn forget_init(
    context: &WorkerContext,
    job: &Job,
    actions: &PodActions,
) -> Result<(), StepError> {
    if actions.forget_init.is_empty() {
        return Ok(());
    }
    // What was killed since the pod was looked at has ended in a way that is worth recording.
    let listed_at = context.clock.now();
    let status = context
        .cri
        .pod_status(&job.uid, job.pod.name(), job.pod.namespace())
        .await?;
    sync_pod::record_exits(context, job, &status, listed_at, context.clock.now()).await?;
    let seen = context.store.snapshot();
    let forgotten = container_history::forget_init(&seen, &job.uid, &actions.forget_init);
    if !forgotten.is_empty() {
        context.store.commit(forgotten).await?;
    }
    fail::fail_point!("pod_workers::forget_init::after_commit");
    let remover = context.remover();
    let doomed = status
        .containers
        .iter()
        .filter(|c| actions.forget_init.contains(&c.name));
    for container in doomed {
        if container.state == ContainerState::Running {
            return Err(StepError::StillRunning(container.name.clone()));
        }
        remover.container(&status, &container.id).await?;
    }
    Ok(())
}

/// Leaves one dead container of an init container's former attempts. Upstream:
/// `pruneInitContainersBeforeStart`.
async fn prune_init(
    context: &WorkerContext,
    status: &PodStatus,
    name: &str,
) -> Result<(), StepError> {
    let dead = status
        .containers_named(name)
        .filter(|c| matches!(c.state, ContainerState::Exited | ContainerState::Unknown));
    for container in dead.skip(1) {
        if let Err(error) = context.remover().container(status, &container.id).await {
            match error {
                gc::GcError::Commit { .. } => return Err(error.into()),
                gc::GcError::Runtime { .. } => {
                    warn!(%error, "a dead init container stays");
                }
            }
        }
    }
    Ok(())
}

/// Why a new sandbox is made.
fn why_sandbox(job: &Job, status: &PodStatus) -> String {
    let Some(newest) = status.sandboxes.first() else {
        return "the pod has none".to_owned();
    };
    let ready = status.sandboxes.iter();
    let ready = ready.filter(|s| s.state == SandboxState::Ready).count();
    if ready > 1 {
        format!("the pod has {ready} that are ready")
    } else if newest.state != SandboxState::Ready {
        format!("{} is not ready any more", newest.id)
    } else if newest
        .host_network
        .is_some_and(|h| h != job.pod.host_network())
    {
        format!("{} is on another network than the pod asks for", newest.id)
    } else if pod_actions::sandbox_to_create(&job.pod, status).is_some() {
        format!("{} has no address", newest.id)
    } else {
        format!("{} cannot be used", newest.id)
    }
}

async fn sandbox(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) -> Result<Sandbox, StepError> {
    let pod = &job.pod;
    let attempt = actions.create_sandbox.unwrap_or_else(|| {
        actions
            .sandbox_id
            .as_ref()
            .and_then(|id| status.sandboxes.iter().find(|s| s.id == *id))
            .map_or(0, |s| s.attempt)
    });
    let (dns, events) = context
        .node
        .dns
        .pod_dns(pod)
        .map_err(|e| StepError::Sandbox(e.to_string()))?;
    if actions.create_sandbox.is_some() {
        for event in events {
            context.recorder.record(event);
        }
    }
    let parent = context.cgroups.pod_cgroup_parent(pod)?;
    let config = sandbox_config::build(pod, attempt, &parent, dns, &context.node)
        .map_err(|e| StepError::Sandbox(e.to_string()))?;
    if let (None, Some(id)) = (actions.create_sandbox, &actions.sandbox_id) {
        return Ok(Sandbox {
            id: id.clone(),
            ips: status.ips.clone(),
            config,
        });
    }
    let failed = |why: &dyn std::fmt::Display| {
        context.metrics.started_pods_errors.inc();
        context.recorder.record(Event::pod(
            EventType::Warning,
            pod,
            "FailedCreatePodSandBox",
            format!("Failed to create pod sandbox: {why}"),
        ));
    };
    let handler = match resolve::runtime_handler(context, pod).await {
        Ok(handler) => handler,
        Err(error) => {
            let why = format!("failed to get sandbox runtime: {error}");
            failed(&why);
            return Err(StepError::Sandbox(why));
        }
    };
    let id = match context.cri.run_pod_sandbox(config.clone(), &handler).await {
        Ok(id) => id,
        Err(error) => {
            failed(&error);
            return Err(error.into());
        }
    };
    context.metrics.started_pods.inc();
    let why = why_sandbox(job, status);
    info!(sandbox = %id, attempt, why, "sandbox created");
    let line = format!("{id} attempt {attempt}: {why}");
    note(context, &job.uid, "sandbox created", line);
    let for_cgroups = Arc::clone(pod);
    context
        .with_cgroups(move |cgroups| cgroups.reassert(&for_cgroups))
        .await?;
    let inspected = convert::inspected_sandbox(&context.cri.pod_sandbox_status(&id).await?);
    Ok(Sandbox {
        id,
        ips: inspected.ips,
        config,
    })
}

//! Carrying out what `pod_actions` decided, in its order: kill, remove what never ran, forget init containers of a
//! previous sandbox, hooks that were cut off, sandbox, containers (ephemeral ones, then init containers, then the
//! others).
//!
//! **Invariant:** a container is started only with the receipt of its start intent, and removed only with
//! the receipt of the record of its end; the runtime client takes nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::Instant;
use tracing::info;

use super::start::{
    Failure, InPod, clear_message, refused, sharing_processes, target_of, under_way,
};
use super::{
    Job, StartFailure, WorkerContext, devices, grow, image_volumes, isolation, mounts, pinning,
    resize, resolve, start, stop, stop_signal,
};
use crate::core::container_history;
use crate::core::pod_actions::{self, PodActions, StartContainer};
use crate::core::pod_status;
use crate::core::state::{ContainerRecord, IntentRecord, Transaction, child_key};
use crate::dra::DraError;
use crate::images::PullInputs;
use crate::kuberuntime::attempt_files::{self, Owner};
use crate::kuberuntime::container_config::{self, ContainerInputs};
use crate::kuberuntime::cri::{CriError, convert, v1};
use crate::kuberuntime::devices::{with_devices_of, with_env_of};
use crate::kuberuntime::dns::{DnsConfigurer, ResolvConf};
use crate::kuberuntime::env::{self, EnvInputs};
use crate::kuberuntime::security::Isolation;
use crate::kuberuntime::sources::Sources;
use crate::kuberuntime::{gc, kill, labels, logs, sandbox_config};
use crate::pleg::InspectError;
use crate::status::{CommitMode, StatusError};
use crate::store::{CommitError, Committed, RemoveContainer, StartIntent};
use crate::types::containers::container_of;
use crate::types::metrics::{ContainerErrorLabel, ContainerTypeLabel, RuntimeHandlerLabel};
use crate::types::runtime::{PodStatus, SandboxState};
use crate::types::{
    ContainerId, ContainerKind, ContainerSpec, Event, EventType, PodExt, PodUid, Stamp, blocking,
    causes,
};

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

/// A sandbox to start containers in.
pub(super) struct Sandbox {
    pub(super) id: ContainerId,
    pub(super) ips: Vec<String>,
    pub(super) config: v1::PodSandboxConfig,
    /// Milliseconds spent pulling images for the containers that start in it.
    pub(super) pull_ms: AtomicU64,
}

/// Upstream's label of a container's kind, sidecars among the init containers.
fn container_type(kind: ContainerKind) -> &'static str {
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
    let made = context.volumes.make_pod_dirs(&job.uid).await;
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
        if let Err(failure) =
            start::post_start(context, job, &spec, &hook.id, attempt, &status.ips).await?
        {
            executed.fail(context, spec.kind, &hook.name, failure);
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
        if let Err(failure) =
            start::container(context, job, status, &sandbox, &spec, start, volumes).await?
        {
            executed.fail(context, spec.kind, &start.name, failure);
            if spec.kind == ContainerKind::Init {
                // What comes after it waits for its end.
                break;
            }
        }
    }
    executed.pulling = Duration::from_millis(sandbox.pull_ms.load(Ordering::Relaxed));
    Ok(executed)
}

/// Reports that the pod has what its containers start in, before their images are pulled: that may take long.
async fn report_sandbox(
    context: &WorkerContext,
    job: &Job,
    ips: &[String],
) -> Result<(), StepError> {
    let told = context.status.get(&job.uid);
    let (host_ips, now) = (context.node.addresses.reported(), context.clock.now());
    let ready = told.and_then(|told| {
        pod_status::sandbox_became_ready(&job.pod, &told.status, ips, &host_ips, now)
    });
    if let Some(status) = ready {
        let mode = CommitMode::Normal;
        context.status.set(&job.pod, status, mode).await?;
    }
    Ok(())
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

/// Returns the reason for a new sandbox, for the journal.
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

/// The pod's DNS settings, by the node's resolver configuration as it is now; `is_new`: of a sandbox that is to be made.
async fn dns_of(
    context: &WorkerContext,
    pod: &Pod,
    is_new: bool,
) -> Result<(v1::DnsConfig, Vec<Event>), String> {
    let dns = &context.node.dns;
    let host = if DnsConfigurer::needs_host(pod) {
        let of = dns.clone();
        let read = blocking::run(move || of.read_host()).await;
        read.map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())?
    } else {
        ResolvConf::default()
    };
    let made = match is_new {
        true => dns.sandbox_dns(pod, &host, context.clock.now()),
        false => dns.pod_dns(pod, &host),
    };
    made.map_err(|error| error.to_string())
}

/// Counts a sandbox that could not be made, and emits the event.
fn sandbox_failed(context: &WorkerContext, pod: &Pod, why: &dyn std::fmt::Display) {
    context.metrics.started_pods_errors.inc();
    context.recorder.record(Event::pod(
        EventType::Warning,
        pod,
        "FailedCreatePodSandBox",
        format!("Failed to create pod sandbox: {why}"),
    ));
}

/// Returns the sandbox that the containers of this step start in; makes it if `actions` say so.
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
    let failed = |why: &dyn std::fmt::Display| sandbox_failed(context, pod, why);
    let (dns, events) = match dns_of(context, pod, actions.create_sandbox.is_some()).await {
        Ok(dns) => dns,
        // A sandbox that runs has its settings already: its containers need none of the node.
        Err(_) if actions.create_sandbox.is_none() => Default::default(),
        Err(why) => {
            failed(&why);
            return Err(StepError::Sandbox(why).told());
        }
    };
    if actions.create_sandbox.is_some() {
        for event in events {
            context.recorder.record(event);
        }
    }
    let parent = context.cgroups.pod_cgroup_parent(pod)?;
    let built = sandbox_config::build(pod, attempt, &parent, dns, &context.node);
    let built = built.map(|config| pinning::quota_of_sandbox(context, job, config));
    if let (None, Some(id)) = (actions.create_sandbox, &actions.sandbox_id) {
        let mut config = built.map_err(|e| StepError::Sandbox(e.to_string()))?;
        isolation::complete(context, pod, &mut config, None).await?;
        return Ok(Sandbox {
            id: id.clone(),
            ips: status.ips.clone(),
            config,
            pull_ms: AtomicU64::new(0),
        });
    }
    let mut config = match built {
        Ok(config) => config,
        Err(error) => {
            failed(&error);
            return Err(StepError::Sandbox(error.to_string()).told());
        }
    };
    let handler = match resolve::runtime_handler(context, pod).await {
        Ok(handler) => handler,
        Err(error) => {
            let why = format!("failed to get sandbox runtime: {error}");
            failed(&why);
            return Err(StepError::Sandbox(why).told());
        }
    };
    if let Err(error) = isolation::complete(context, pod, &mut config, Some(&handler)).await {
        if let StepError::Sandbox(why) = &error {
            failed(why);
            return Err(error.told());
        }
        return Err(error);
    }
    run_sandbox(context, job, status, config, handler, attempt).await
}

/// Has the runtime make the sandbox, and reads its addresses.
async fn run_sandbox(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    mut config: v1::PodSandboxConfig,
    handler: String,
    attempt: u32,
) -> Result<Sandbox, StepError> {
    let pod = &job.pod;
    let label = RuntimeHandlerLabel {
        runtime_handler: handler.clone(),
    };
    let boot = context.clock.now().boot.0.to_string();
    config
        .annotations
        .insert(labels::SANDBOX_BOOT.to_owned(), boot);
    context.images.first_round(&context.store).await;
    context.images.sandbox_image_repaired().await;
    let begun = Instant::now();
    let made = context.cri.run_pod_sandbox(config.clone(), &handler).await;
    context
        .metrics
        .run_podsandbox_duration
        .get_or_create(&label)
        .observe(begun.elapsed().as_secs_f64());
    let id = match made {
        Ok(id) => id,
        Err(error) => {
            context
                .metrics
                .run_podsandbox_errors
                .get_or_create(&label)
                .inc();
            sandbox_failed(context, pod, &error);
            let (cri, store, recorder) = (&context.cri, &context.store, &*context.recorder);
            context
                .images
                .sandbox_failed(pod, &error.message, cri, store, recorder)
                .await?;
            return Err(StepError::from(error).told());
        }
    };
    fail::fail_point!("pod_workers::sandbox::after_run");
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
        pull_ms: AtomicU64::new(0),
    })
}

/// Pulls, creates, records the intent, starts.
pub(super) async fn start_container(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    sandbox: &Sandbox,
    spec: &ContainerSpec<'_>,
    start: &StartContainer,
    volumes: &BTreeMap<String, PathBuf>,
) -> Result<Result<ContainerId, Failure>, StepError> {
    let created = match &start.adopt {
        Some(id) => Ok(id.clone()),
        None => {
            start::unmount_shown(context, job, &spec.container, status).await;
            create_container(context, job, status, sandbox, spec, start, volumes).await?
        }
    };
    let container_id = match created {
        Ok(id) => id,
        Err(failure) => return Ok(Err(failure)),
    };
    let now = context.clock.now();
    let seen = context.store.snapshot();
    let record = IntentRecord {
        container_id: container_id.clone(),
        attempt: start.attempt,
        hash: start.hash.clone(),
        at: now,
    };
    let on_record =
        container_history::record_start(&seen, &job.uid, &start.name, record, start.backoff)
            .ok_or(StepError::Stale)?;
    let intent = StartIntent {
        pod: job.uid.clone(),
        container: start.name.clone(),
        container_id: container_id.clone(),
        attempt: start.attempt,
        hash: start.hash.clone(),
        why: start.why.clone(),
        at: now,
    };
    let of_resize = match &start.adopt {
        None => resize::started(&seen, &job.pod, &start.name, now),
        // It was made with what was allocated then.
        Some(_) => Transaction::new(),
    };
    let confined = pinning::started(context, &seen, job, &start.name, &container_id);
    let receipt = context
        .store
        .commit_intent(intent, of_resize.and(confined).and(on_record))
        .await?;
    pinning::before_start(context, job, &start.name, &container_id).await;
    fail::fail_point!("pod_workers::start::after_intent");
    let intended = seen
        .record::<ContainerRecord>(&child_key(&job.uid, &start.name))
        .and_then(|record| record.intent.as_ref())
        .filter(|intent| intent.container_id == container_id)
        .map(|intent| intent.at);
    if let Err(failure) = run_container(context, job, spec, start, &receipt, intended).await? {
        return Ok(Err(failure));
    }
    fail::fail_point!("pod_workers::start::after_start");
    let label = ContainerTypeLabel {
        container_type: container_type(spec.kind).to_owned(),
    };
    context
        .metrics
        .started_containers
        .get_or_create(&label)
        .inc();
    context.recorder.record(
        Event::pod(
            EventType::Normal,
            &job.pod,
            "Started",
            format!("Container started: {}", start.name),
        )
        .container_of(&job.pod, &start.name),
    );
    let (name, id, attempt) = (start.name.clone(), container_id.clone(), start.attempt);
    let owner = Owner {
        uid: job.uid.clone(),
        namespace: job.pod.namespace().to_owned(),
        name: job.pod.name().to_owned(),
    };
    let linked = logs::beside(&context.node, move |node| {
        attempt_files::link(node, &owner, &name, &id, attempt)
    });
    if let Err(error) = linked.await {
        info!(%error, container = start.name, "cannot link the container's log");
    }
    info!(container = start.name, attempt = start.attempt, id = %container_id, why = start.why, adopted = start.adopt.is_some(), previous = status.container(&start.name).is_some(), "container started");
    Ok(Ok(container_id))
}

/// Starts a container whose start is on record. `intended` is when a start of it was recorded before.
async fn run_container(
    context: &WorkerContext,
    job: &Job,
    spec: &ContainerSpec<'_>,
    start: &StartContainer,
    receipt: &Committed<StartIntent>,
    intended: Option<Stamp>,
) -> Result<Result<(), Failure>, StepError> {
    let failed = |message: &str| {
        let text = format!("Error: {message}");
        let event = Event::pod(EventType::Warning, &job.pod, "Failed", text);
        context
            .recorder
            .record(event.container_of(&job.pod, &start.name));
    };
    if let Err(message) = clear_message(context, job, &spec.container, intended).await {
        failed(&message);
        return Ok(Err(Failure::new("RunContainerError", message)));
    }
    let started = match context.cri.start_container(receipt).await {
        Err(error) if start.adopt.is_some() => under_way(context, receipt, error).await?,
        started => started,
    };
    let Err(error) = started else {
        return Ok(Ok(()));
    };
    let message = error.to_string();
    failed(&message);
    let image = spec.container.image.as_deref().unwrap_or_default();
    image_failed(context, &job.pod, &start.name, image, &error.message).await?;
    Ok(Err(Failure::new("RunContainerError", message)))
}

/// A container could not be made or started: its image may be at fault.
pub(super) async fn image_failed(
    context: &WorkerContext,
    pod: &Arc<Pod>,
    container: &str,
    image: &str,
    error: &str,
) -> Result<(), StepError> {
    context
        .images
        .container_failed(
            pod,
            (container, image),
            error,
            &context.cri,
            &context.store,
            &InPod::new(context, pod),
        )
        .await?;
    Ok(())
}

async fn create_container(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    sandbox: &Sandbox,
    spec: &ContainerSpec<'_>,
    start: &StartContainer,
    volumes: &BTreeMap<String, PathBuf>,
) -> Result<Result<ContainerId, Failure>, StepError> {
    let pod = &job.pod;
    let container: &Container = &spec.container;
    let warn = |reason: &str, message: &str| {
        context.recorder.record(
            Event::pod(EventType::Warning, pod, reason, message.to_owned())
                .container_of(pod, &container.name),
        );
    };
    if let Some(message) = refused(pod, spec) {
        warn("Failed", &format!("Error: {message}"));
        return Ok(Err(Failure::new("CreateContainerConfigError", message)));
    }
    let target = match target_of(status, spec) {
        Ok(target) => target,
        Err(message) => {
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerConfigError", message)));
        }
    };
    start::look_at_log(context, job, spec, start, status).await?;
    let secrets = resolve::pull_secrets(context, pod).await;
    let ran_with = start::ran_with(context, job, start, status);
    let pull = PullInputs {
        sandbox: Some(&sandbox.config),
        secrets: &secrets,
        ran_with: ran_with.as_deref(),
    };
    let begun = Instant::now();
    let ensured = context
        .images
        .ensure(
            pod,
            container,
            pull,
            &context.cri,
            &context.store,
            &InPod::new(context, pod),
        )
        .await;
    let took = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    sandbox.pull_ms.fetch_add(took, Ordering::Relaxed);
    let image = match ensured {
        Ok(image) => image,
        Err(error) => {
            return Ok(Err(Failure {
                reason: error.reason.as_str().to_owned(),
                message: error.message,
                retry_at: error.retry_at,
            }));
        }
    };
    let image_mounts = match image_volumes::mounts(context, pod, container, pull).await {
        Ok(mounts) => mounts,
        Err(error) => {
            if !error.told {
                warn("Failed", &format!("Error: {}", error.message));
            }
            return Ok(Err(Failure {
                reason: error.reason,
                message: error.message,
                retry_at: error.retry_at,
            }));
        }
    };
    let files =
        match container_config::prepare_files_beside(pod, container, &sandbox.ips, &context.node)
            .await
        {
            Ok(files) => files,
            Err(error) => {
                let message = error.to_string();
                warn("Failed", &format!("Error: {message}"));
                return Ok(Err(Failure::new("CreateContainerError", message)));
            }
        };
    let env = {
        let sources = resolve::environment(context, pod, container, volumes).await;
        let inputs = EnvInputs {
            pod,
            container,
            pod_ips: &sandbox.ips,
            sources: &sources,
        };
        match env::make_env(&inputs, &context.node) {
            Ok(env) => env,
            Err(error) => {
                let message = error.to_string();
                warn("Failed", &format!("Error: {message}"));
                return Ok(Err(Failure::new("CreateContainerConfigError", message)));
            }
        }
    };
    let image_mounts = match image_volumes::with_parts(image_mounts, &env) {
        Ok(mounts) => mounts,
        Err(message) => {
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerConfigError", message)));
        }
    };
    let mounts = match mounts::prepare(context, pod, container, &env, volumes).await {
        Ok(mounts) => mounts,
        Err(message) => {
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerConfigError", message)));
        }
    };
    let image_ref = image.reference.clone();
    let image_user = match isolation::image_user(context, pod, container, image).await {
        Ok(user) => user,
        Err(message) => {
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerConfigError", message)));
        }
    };
    if let Err(message) = stop_signal::check(context, container).await {
        warn("Failed", &format!("Error: {message}"));
        return Ok(Err(Failure::new("CreateContainerConfigError", message)));
    }
    let granted = match devices::granted(context, pod, container).await {
        Ok(granted) => granted,
        Err(message) => {
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerConfigError", message)));
        }
    };
    let env = with_env_of(env, &granted);
    let inputs = ContainerInputs {
        pod,
        container,
        attempt: start.attempt,
        hash: &start.hash,
        image_ref: &image_ref,
        env: &env,
        volumes,
        remotes: &mounts.remotes,
        sub_paths: &mounts.sub_paths,
        recursive_read_only: mounts.recursive_read_only,
        files: &files,
        isolation: Isolation {
            image_user: image_user.as_ref(),
            target: None,
            user_namespace: isolation::user_namespace(&sandbox.config),
        },
    };
    let config = match container_config::build(&inputs, &context.node) {
        Ok(mut config) => {
            config.images = image_mounts;
            with_devices_of(config, granted)
        }
        Err(error) => {
            let message = error.to_string();
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerConfigError", message)));
        }
    };
    let mut config = sharing_processes(config, target);
    let confined = pinning::confine(context, job, &container.name, &mut config);
    let id = match context
        .cri
        .create_container(&sandbox.id, config, sandbox.config.clone())
        .await
    {
        Ok(id) => id,
        Err(error) => {
            let message = env.explained(error.to_string());
            warn("Failed", &format!("Error: {message}"));
            let image = container.image.as_deref().unwrap_or_default();
            image_failed(context, pod, &container.name, image, &error.message).await?;
            return Ok(Err(Failure::new("CreateContainerError", message)));
        }
    };
    context.pinning.created(&id, confined);
    fail::fail_point!("pod_workers::start::after_create");
    context.recorder.record(
        Event::pod(
            EventType::Normal,
            pod,
            "Created",
            format!("Container created: {}", container.name),
        )
        .container_of(pod, &container.name),
    );
    Ok(Ok(id))
}

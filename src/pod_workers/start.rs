//! Making and starting one container: target, image, files, environment, create, start intent, start, postStart
//! hook. Upstream: `startContainer`.
//!
//! **Invariant:** whatever keeps a container from running is a [`Failure`], told as the reason of its Waiting
//! state; only what the agent cannot do at all (a commit, a call that must succeed) is an error.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use tracing::{Instrument, info, info_span, warn};

use super::execute::{Sandbox, StepError, note};
use super::{Job, WorkerContext, resolve};
use crate::core::container_history;
use crate::core::pod_actions::StartContainer;
use crate::core::state::{ContainerRecord, IntentRecord, Transaction, child_key};
use crate::images::PullInputs;
use crate::kuberuntime::container_config::{self, ContainerInputs};
use crate::kuberuntime::cri::v1;
use crate::kuberuntime::env::{self, EnvInputs};
use crate::kuberuntime::hooks::{self, Hook, HookTarget};
use crate::kuberuntime::kill::{self, Condemned, Killer};
use crate::kuberuntime::logs;
use crate::store::{CommitError, StartIntent};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use crate::types::{ContainerId, ContainerSpec, Event, EventRecorder, EventType, PodExt, Stamp};

/// Longest message of a failure.
const MAX_MESSAGE: usize = 4096;
/// Waiting reason and upstream's error of a container whose postStart hook failed.
const POST_START_HOOK_ERROR: &str = "PostStartHookError";

/// A container that could not be started: not an error of the sync, but a reason to wait.
pub(super) struct Failure {
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) retry_at: Option<Stamp>,
}

impl Failure {
    pub(super) fn new(reason: &str, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > MAX_MESSAGE {
            let mut end = MAX_MESSAGE;
            while !message.is_char_boundary(end) {
                end -= 1;
            }
            message.truncate(end);
        }
        Self {
            reason: reason.to_owned(),
            message,
            retry_at: None,
        }
    }
}

/// Names containers in events by the list they stand in.
struct InPod {
    pod: Arc<Pod>,
    inner: Arc<dyn EventRecorder>,
}

impl EventRecorder for InPod {
    fn record(&self, event: Event) {
        let event = match event.container.clone() {
            Some(name) => event.container_of(&self.pod, &name),
            None => event,
        };
        self.inner.record(event);
    }
}

/// Starts a container in a sandbox and runs its postStart hook.
pub(super) async fn container(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    sandbox: &Sandbox,
    spec: &ContainerSpec<'_>,
    start: &StartContainer,
    volumes: &BTreeMap<String, PathBuf>,
) -> Result<Result<(), Failure>, StepError> {
    let span = info_span!("start_container", container = start.name, kind = ?start.kind, attempt = start.attempt, why = start.why);
    let work = async {
        let id = match start_container(context, job, status, sandbox, spec, start, volumes).await? {
            Ok(id) => id,
            Err(failure) => {
                let why = format!(
                    "{} attempt {}: {}: {}",
                    start.name, start.attempt, failure.reason, failure.message
                );
                note(context, &job.uid, "container not started", why);
                return Ok(Err(failure));
            }
        };
        post_start(context, job, spec, &id, start.attempt, &sandbox.ips).await
    };
    work.instrument(span).await
}

/// Pulls, creates, records the intent, starts.
async fn start_container(
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
        None => create_container(context, job, status, sandbox, spec, start, volumes).await?,
    };
    let container_id = match created {
        Ok(id) => id,
        Err(failure) => return Ok(Err(failure)),
    };
    let now = context.clock.now();
    let seen = context.store.snapshot();
    let key = child_key(&job.uid, &start.name);
    let record = container_history::start_record(
        seen.record::<ContainerRecord>(&key),
        IntentRecord {
            container_id: container_id.clone(),
            attempt: start.attempt,
            hash: start.hash.clone(),
            at: now,
        },
        start.backoff,
    );
    let intent = StartIntent {
        pod: job.uid.clone(),
        container: start.name.clone(),
        container_id: container_id.clone(),
        attempt: start.attempt,
        hash: start.hash.clone(),
        why: start.why.clone(),
        at: now,
    };
    let receipt = context
        .store
        .commit_intent(intent, Transaction::new().put(&key, record))
        .await?;
    fail::fail_point!("pod_workers::start::after_intent");
    match context.cri.start_container(&receipt).await {
        Ok(()) => {}
        Err(error) => {
            let message = error.to_string();
            context.recorder.record(
                Event::pod(
                    EventType::Warning,
                    &job.pod,
                    "Failed",
                    format!("Error: {message}"),
                )
                .container_of(&job.pod, &start.name),
            );
            return Ok(Err(Failure::new("RunContainerError", message)));
        }
    }
    fail::fail_point!("pod_workers::start::after_start");
    context.metrics.started_containers.inc();
    context.recorder.record(
        Event::pod(
            EventType::Normal,
            &job.pod,
            "Started",
            format!("Container started: {}", start.name),
        )
        .container_of(&job.pod, &start.name),
    );
    if let Err(error) = logs::link_container_log(
        &context.node,
        &job.pod,
        &start.name,
        &container_id,
        &container_config::log_path(&start.name, start.attempt),
    ) {
        info!(%error, container = start.name, "cannot link the container's log");
    }
    info!(container = start.name, attempt = start.attempt, id = %container_id, why = start.why, adopted = start.adopt.is_some(), previous = status.container(&start.name).is_some(), "container started");
    Ok(Ok(container_id))
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
    let target = match spec.target {
        None => None,
        Some(name) => {
            let found = status
                .containers_named(name)
                .find(|c| c.state == ContainerState::Running);
            let Some(found) = found else {
                let message = format!("unable to find target container {name}");
                warn("Failed", &format!("Error: {message}"));
                return Ok(Err(Failure::new("CreateContainerConfigError", message)));
            };
            Some(found.id.clone())
        }
    };
    let secrets = resolve::pull_secrets(context, pod).await;
    let image_ref = match context
        .images
        .ensure(
            pod,
            container,
            PullInputs {
                sandbox: Some(&sandbox.config),
                secrets: &secrets,
            },
            &context.cri,
            &context.store,
            &InPod {
                pod: Arc::clone(pod),
                inner: Arc::clone(&context.recorder),
            },
        )
        .await
    {
        Ok(image_ref) => image_ref,
        Err(error) => {
            return Ok(Err(Failure {
                reason: error.reason.as_str().to_owned(),
                message: error.message,
                retry_at: error.retry_at,
            }));
        }
    };
    let files = match container_config::prepare_files(
        pod,
        container,
        start.attempt,
        &sandbox.ips,
        &context.node,
    ) {
        Ok(files) => files,
        Err(error) => {
            let message = error.to_string();
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerError", message)));
        }
    };
    let env = {
        let sources = resolve::environment(context, pod, container).await;
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
    for message in &env.skipped {
        warn(env::INVALID_NAMES, message);
    }
    let inputs = ContainerInputs {
        pod,
        container,
        attempt: start.attempt,
        hash: &start.hash,
        image_ref: &image_ref,
        env: &env,
        volumes,
        files: &files,
    };
    let mut config = match container_config::build(&inputs, &context.node) {
        Ok(config) => config,
        Err(error) => {
            let message = error.to_string();
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerConfigError", message)));
        }
    };
    if let Some(target) = target {
        share_processes(&mut config, &target);
    }
    let id = match context
        .cri
        .create_container(&sandbox.id, config, sandbox.config.clone())
        .await
    {
        Ok(id) => id,
        Err(error) => {
            let message = error.to_string();
            warn("Failed", &format!("Error: {message}"));
            return Ok(Err(Failure::new("CreateContainerError", message)));
        }
    };
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

/// Puts a container into the PID namespace of another one.
fn share_processes(config: &mut v1::ContainerConfig, target: &ContainerId) {
    let linux = config.linux.get_or_insert_default();
    let security = linux.security_context.get_or_insert_default();
    let namespaces = security.namespace_options.get_or_insert_default();
    namespaces.pid = v1::NamespaceMode::Target.into();
    namespaces.target_id = target.to_string();
}

/// Runs the postStart hook of a running container, if it has one that has not run yet. It may take as long as it
/// likes; the step is cancelled when the pod is to be stopped. A container whose hook fails is killed.
pub(super) async fn post_start(
    context: &WorkerContext,
    job: &Job,
    spec: &ContainerSpec<'_>,
    id: &ContainerId,
    attempt: u32,
    ips: &[String],
) -> Result<Result<(), Failure>, StepError> {
    let (pod, uid) = (&job.pod, &job.uid);
    let container: &Container = &spec.container;
    let name = &container.name;
    let lifecycle = container.lifecycle.as_ref();
    let Some(handler) = lifecycle.and_then(|l| l.post_start.as_ref()) else {
        return Ok(Ok(()));
    };
    if Hook::PostStart.is_done(&context.store.snapshot(), uid, name, id) {
        return Ok(Ok(()));
    }
    fail::fail_point!("pod_workers::hook::before_post_start");
    let mut shown = PodStatus::empty(uid.clone());
    shown.name = pod.name().to_owned();
    shown.namespace = pod.namespace().to_owned();
    shown.ips = ips.to_vec();
    let condemned = Condemned {
        status: &shown,
        pod: Some(pod),
        host_ips: &context.node.host_ips,
    };
    let target = HookTarget {
        pod: &format!("{}({uid})", pod.full_name()),
        name,
        id,
        ports: container.ports.as_deref().unwrap_or_default(),
        ip: condemned.ip(),
    };
    let outcome = hooks::run(handler, target, &context.cri).await;
    let Err(error) = outcome else {
        fail::fail_point!("pod_workers::hook::after_post_start");
        remember_post_start(context, job, name, id).await?;
        return Ok(Ok(()));
    };
    warn!(container = name, %error, "postStart hook failed");
    context.recorder.record(
        // Without the message, which may tell secrets.
        Event::pod(
            EventType::Warning,
            pod,
            "FailedPostStartHook",
            "PostStartHook failed",
        )
        .container_of(pod, name),
    );
    let permit = context
        .store
        .commit_stop(
            Transaction::new()
                .journal(
                    Some(uid),
                    "hook failed",
                    format!("{name}: postStart: {}", error.kind()),
                )
                .journal(
                    Some(uid),
                    "stopping container",
                    format!("{name}: its postStart hook failed"),
                ),
        )
        .await?;
    let killer = Killer {
        cri: &context.cri,
        store: &context.store,
        recorder: &*context.recorder,
        permit: &permit,
    };
    let victim = running(name, id, attempt);
    let grace = kill::grace_of(pod, None);
    killer
        .container(condemned, &victim, grace, Some("FailedPostStartHook"))
        .await?;
    Ok(Err(Failure::new(POST_START_HOOK_ERROR, error.to_string())))
}

async fn remember_post_start(
    context: &WorkerContext,
    job: &Job,
    name: &str,
    id: &ContainerId,
) -> Result<(), StepError> {
    loop {
        let seen = context.store.snapshot();
        let done = Hook::PostStart.done(&seen, &job.uid, name, id, Ok(()));
        match context.store.commit(done).await {
            Ok(_) => return Ok(()),
            Err(CommitError::Stale { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A container that was just started, as far as it matters for stopping it.
fn running(name: &str, id: &ContainerId, attempt: u32) -> ContainerStatus {
    ContainerStatus {
        id: id.clone(),
        name: name.to_owned(),
        attempt,
        sandbox_id: ContainerId::new(""),
        state: ContainerState::Running,
        created_at_ns: 0,
        image: String::new(),
        image_ref: String::new(),
        hash: String::new(),
        started_at_ns: 0,
        finished_at_ns: 0,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        log_path: String::new(),
    }
}

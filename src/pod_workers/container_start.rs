//! The start of one container: its image, files and environment, its creation, the record of the intent, its start.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::Instant;
use tracing::info;

use super::execute::{StepError, container_type};
use super::sandbox::Sandbox;
use super::start::{
    Failure, InPod, clear_message, refused, sharing_processes, target_of, under_way,
};
use super::{
    Job, WorkerContext, devices, image_volumes, isolation, mounts, pinning, resize, resolve, start,
    stop_signal,
};
use crate::core::container_history;
use crate::core::pod_actions::StartContainer;
use crate::core::state::{ContainerRecord, IntentRecord, Transaction, child_key};
use crate::images::PullInputs;
use crate::kuberuntime::attempt_files::{self, Owner};
use crate::kuberuntime::container_config::{self, ContainerInputs};
use crate::kuberuntime::devices::{with_devices_of, with_env_of};
use crate::kuberuntime::env::{self, EnvInputs};
use crate::kuberuntime::logs;
use crate::kuberuntime::security::Isolation;
use crate::store::{Committed, StartIntent};
use crate::types::metrics::ContainerTypeLabel;
use crate::types::runtime::PodStatus;
use crate::types::{ContainerId, ContainerSpec, Event, EventType, PodExt, Stamp};

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

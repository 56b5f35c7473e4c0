//! The start of one container: its image, files and environment, its creation, the record of the intent, its start.
//!
//! **Invariant:** a step that fails only returns the [`StartError`]; [`ContainerStart::run`] alone emits the event, looks for
//! evidence against the image, and adds the line to the journal.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use k8s_openapi::api::core::v1::{Container, Pod, VolumeMount};
use tokio::time::Instant;
use tracing::{Instrument, info, info_span};

use super::execute::{StepError, container_type, note};
use super::sandbox::Sandbox;
use super::start::{
    Failure, InPod, clear_message, post_start, refused, sharing_processes, target_of, under_way,
};
use super::{
    Job, WorkerContext, devices, image_volumes, isolation, mounts, pinning, resize, resolve, start,
    stop_signal,
};
use crate::core::container_history;
use crate::core::pod_actions::StartContainer;
use crate::core::state::{ContainerRecord, IntentRecord, State, Transaction, child_key};
use crate::images::{Present, PullInputs};
use crate::kuberuntime::attempt_files::{self, Owner};
use crate::kuberuntime::container_config::{self, ContainerInputs};
use crate::kuberuntime::cri::{ContainerConfig, v1};
use crate::kuberuntime::devices::{with_devices_of, with_env_of};
use crate::kuberuntime::env::{self, EnvInputs, Environment};
use crate::kuberuntime::logs;
use crate::kuberuntime::security::Isolation;
use crate::store::{Committed, StartIntent};
use crate::types::metrics::ContainerTypeLabel;
use crate::types::runtime::PodStatus;
use crate::types::{ContainerId, ContainerSpec, Event, EventType, PodExt, Stamp};

/// Reason for which a container was not started.
pub(super) enum StartError {
    /// It waits.
    Waits(Failure),
    /// The agent cannot do at all what has to be done: the whole step fails.
    Step(StepError),
}

impl StartError {
    /// The container waits with `CreateContainerConfigError`.
    fn config(message: impl Into<String>) -> Self {
        Self::Waits(Failure::new("CreateContainerConfigError", message))
    }
}

impl<E: Into<StepError>> From<E> for StartError {
    fn from(error: E) -> Self {
        Self::Step(error.into())
    }
}

/// A container that is to be started, with what that takes.
pub(super) struct ContainerStart<'a> {
    pub(super) context: &'a WorkerContext,
    pub(super) job: &'a Job,
    pub(super) status: &'a PodStatus,
    pub(super) sandbox: &'a Sandbox,
    pub(super) spec: &'a ContainerSpec<'a>,
    pub(super) start: &'a StartContainer,
    /// Host path of each volume.
    pub(super) volumes: &'a BTreeMap<String, PathBuf>,
}

impl ContainerStart<'_> {
    /// Starts the container and runs its postStart hook. Returns after whatever keeps it from running has been reported.
    pub(super) async fn run(&self) -> Result<(), StartError> {
        let (context, start) = (self.context, self.start);
        let span = info_span!("start_container", container = start.name, kind = ?start.kind, attempt = start.attempt, why = start.why);
        let work = async {
            let id = match self.start().await {
                Ok(id) => id,
                Err(StartError::Waits(failure)) => {
                    let failure = self.report(failure).await?;
                    return Err(StartError::Waits(failure));
                }
                Err(error) => return Err(error),
            };
            let ips = &self.sandbox.ips;
            post_start(context, self.job, self.spec, &id, start.attempt, ips).await
        };
        work.instrument(span).await
    }

    fn container(&self) -> &Container {
        &self.spec.container
    }

    /// Emits an event about the container.
    fn emit(&self, kind: EventType, reason: &'static str, text: String) {
        let pod = &self.job.pod;
        let event = Event::pod(kind, pod, reason, text).container_of(pod, &self.start.name);
        self.context.recorder.record(event);
    }

    /// Reports why the container waits, and returns it as its status has it.
    async fn report(&self, failure: Failure) -> Result<Failure, StepError> {
        let (context, start) = (self.context, self.start);
        if !failure.told {
            let text = format!("Error: {}", failure.message);
            self.emit(EventType::Warning, "Failed", text);
        }
        if let Some(answer) = &failure.answer {
            let image = self.container().image.as_deref().unwrap_or_default();
            image_failed(context, &self.job.pod, &start.name, image, answer).await?;
        }
        // The status of a container that waits for its image has the whole error, as its event.
        let failure = match failure.told {
            true => failure,
            false => failure.shortened(),
        };
        let why = format!(
            "{} attempt {}: {}: {}",
            start.name, start.attempt, failure.reason, failure.message
        );
        note(context, &self.job.uid, "container not started", why);
        Ok(failure)
    }

    /// Creates the container unless it exists, records the intent, starts it.
    async fn start(&self) -> Result<ContainerId, StartError> {
        let (context, job, start) = (self.context, self.job, self.start);
        let id = match &start.adopt {
            Some(id) => id.clone(),
            None => {
                start::unmount_shown(context, job, self.container(), self.status).await;
                self.create().await?
            }
        };
        let seen = context.store.snapshot();
        let receipt = self.record_intent(&seen, &id).await?;
        pinning::before_start(context, job, &start.name, &id).await;
        fail::fail_point!("pod_workers::start::after_intent");
        let intended = seen
            .record::<ContainerRecord>(&child_key(&job.uid, &start.name))
            .and_then(|record| record.intent.as_ref())
            .filter(|intent| intent.container_id == id)
            .map(|intent| intent.at);
        self.request_start(&receipt, intended).await?;
        fail::fail_point!("pod_workers::start::after_start");
        self.started(&id).await;
        Ok(id)
    }

    /// Commits that the container is about to be started.
    async fn record_intent(
        &self,
        seen: &State,
        id: &ContainerId,
    ) -> Result<Committed<StartIntent>, StepError> {
        let (context, job, start) = (self.context, self.job, self.start);
        let now = context.clock.now();
        let record = IntentRecord {
            container_id: id.clone(),
            attempt: start.attempt,
            hash: start.hash.clone(),
            at: now,
        };
        let on_record =
            container_history::record_start(seen, &job.uid, &start.name, record, start.backoff)
                .ok_or(StepError::Stale)?;
        let intent = StartIntent {
            pod: job.uid.clone(),
            container: start.name.clone(),
            container_id: id.clone(),
            attempt: start.attempt,
            hash: start.hash.clone(),
            why: start.why.clone(),
            at: now,
        };
        let of_resize = match &start.adopt {
            None => resize::started(seen, &job.pod, &start.name, now),
            // It was made with what was allocated then.
            Some(_) => Transaction::new(),
        };
        let confined = pinning::started(context, seen, job, &start.name, id);
        let commit = of_resize.and(confined).and(on_record);
        Ok(context.store.commit_intent(intent, commit).await?)
    }

    /// Has the runtime start the container, whose start is on record. `intended` is when a start of it was recorded before.
    async fn request_start(
        &self,
        receipt: &Committed<StartIntent>,
        intended: Option<Stamp>,
    ) -> Result<(), StartError> {
        const REASON: &str = "RunContainerError";
        let context = self.context;
        clear_message(context, self.job, self.container(), intended)
            .await
            .map_err(|message| StartError::Waits(Failure::new(REASON, message)))?;
        let started = match context.cri.start_container(receipt).await {
            Err(error) if self.start.adopt.is_some() => under_way(context, receipt, error).await?,
            started => started,
        };
        started.map_err(|error| {
            let failure = Failure::new(REASON, error.to_string());
            StartError::Waits(failure.by_runtime(error.message))
        })
    }

    /// Reports that the container runs.
    async fn started(&self, id: &ContainerId) {
        let (context, job, start) = (self.context, self.job, self.start);
        let label = ContainerTypeLabel {
            container_type: container_type(self.spec.kind).to_owned(),
        };
        context
            .metrics
            .started_containers
            .get_or_create(&label)
            .inc();
        let text = format!("Container started: {}", start.name);
        self.emit(EventType::Normal, "Started", text);
        let (name, of, attempt) = (start.name.clone(), id.clone(), start.attempt);
        let owner = Owner {
            uid: job.uid.clone(),
            namespace: job.pod.namespace().to_owned(),
            name: job.pod.name().to_owned(),
        };
        let linked = logs::beside(&context.node, move |node| {
            attempt_files::link(node, &owner, &name, &of, attempt)
        });
        if let Err(error) = linked.await {
            info!(%error, container = start.name, "cannot link the container's log");
        }
        info!(container = start.name, attempt = start.attempt, %id, why = start.why, adopted = start.adopt.is_some(), previous = self.status.container(&start.name).is_some(), "container started");
    }

    /// Creates the container.
    async fn create(&self) -> Result<ContainerId, StartError> {
        let (context, job, container) = (self.context, self.job, self.container());
        let pod = &job.pod;
        if let Some(message) = refused(pod, self.spec) {
            return Err(StartError::config(message));
        }
        let target = target_of(self.status, self.spec).map_err(StartError::config)?;
        start::look_at_log(context, job, self.spec, self.start, self.status).await?;
        let (image, image_mounts) = self.images().await?;
        let ips = &self.sandbox.ips;
        let files = container_config::prepare_files_beside(pod, container, ips, &context.node);
        let files = files.await.map_err(|error| {
            StartError::Waits(Failure::new("CreateContainerError", error.to_string()))
        })?;
        let env = self.environment().await?;
        let image_mounts =
            image_volumes::with_parts(image_mounts, &env).map_err(StartError::config)?;
        let mounts = mounts::prepare(context, pod, container, &env, self.volumes)
            .await
            .map_err(StartError::config)?;
        let image_ref = image.reference.clone();
        let image_user = isolation::image_user(context, pod, container, image)
            .await
            .map_err(StartError::config)?;
        stop_signal::check(context, container)
            .await
            .map_err(StartError::config)?;
        let granted = devices::granted(context, pod, container)
            .await
            .map_err(StartError::config)?;
        let env = with_env_of(env, &granted);
        let inputs = ContainerInputs {
            pod,
            container,
            attempt: self.start.attempt,
            hash: &self.start.hash,
            image_ref: &image_ref,
            env: &env,
            volumes: self.volumes,
            remotes: &mounts.remotes,
            sub_paths: &mounts.sub_paths,
            without_labels: &mounts.without_labels,
            recursive_read_only: mounts.recursive_read_only,
            files: &files,
            isolation: Isolation {
                image_user: image_user.as_ref(),
                target: None,
                user_namespace: isolation::user_namespace(&self.sandbox.config),
            },
        };
        let mut config = container_config::build(&inputs, &context.node)
            .map_err(|error| StartError::config(error.to_string()))?;
        config.images = image_mounts;
        let mut config = with_devices_of(config, granted);
        if let Some(users) = isolation::user_namespace(&self.sandbox.config) {
            isolation::map_mounts(&mut config, users);
        }
        self.request_creation(sharing_processes(config, target), &env)
            .await
    }

    /// Makes sure that the image of the container is there, and those of its volumes.
    async fn images(&self) -> Result<(Present, Vec<(v1::Mount, VolumeMount)>), StartError> {
        let (context, job, container) = (self.context, self.job, self.container());
        let secrets = resolve::pull_secrets(context, &job.pod).await;
        let ran_with = start::ran_with(context, job, self.start, self.status);
        let pull = PullInputs {
            sandbox: Some(&self.sandbox.config),
            secrets: &secrets,
            ran_with: ran_with.as_deref(),
        };
        let (cri, store, recorder) = (&context.cri, &context.store, InPod::new(context, &job.pod));
        let begun = Instant::now();
        let images = &context.content.images;
        let ensured = images
            .ensure(&job.pod, container, pull, cri, store, &recorder)
            .await;
        let took = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.sandbox.pull_ms.fetch_add(took, Ordering::Relaxed);
        let image = ensured.map_err(|error| {
            StartError::Waits(Failure {
                reason: error.reason.as_str().to_owned(),
                message: error.message,
                retry_at: error.retry_at,
                told: true,
                answer: None,
            })
        })?;
        let mounts = image_volumes::mounts(context, &job.pod, container, pull)
            .await
            .map_err(|error| {
                StartError::Waits(Failure {
                    reason: error.reason,
                    message: error.message,
                    retry_at: error.retry_at,
                    told: error.told,
                    answer: None,
                })
            })?;
        Ok((image, mounts))
    }

    /// The environment of the container, without what its devices add.
    async fn environment(&self) -> Result<Environment, StartError> {
        let (context, pod, container) = (self.context, &self.job.pod, self.container());
        let sources = resolve::environment(context, pod, container, self.volumes).await;
        let inputs = EnvInputs {
            pod,
            container,
            pod_ips: &self.sandbox.ips,
            sources: &sources,
        };
        env::make_env(&inputs, &context.node).map_err(|error| StartError::config(error.to_string()))
    }

    /// Has the runtime create the container.
    async fn request_creation(
        &self,
        mut config: ContainerConfig,
        env: &Environment,
    ) -> Result<ContainerId, StartError> {
        let (context, sandbox) = (self.context, self.sandbox);
        let name = &self.container().name;
        let confined = pinning::confine(context, self.job, name, &mut config);
        let id = context
            .cri
            .create_container(&sandbox.id, config, sandbox.config.clone())
            .await
            .map_err(|error| {
                let message = env.explained(error.to_string());
                let failure = Failure::new("CreateContainerError", message);
                StartError::Waits(failure.by_runtime(error.message))
            })?;
        context.resources.pinning.created(&id, confined);
        fail::fail_point!("pod_workers::start::after_create");
        let text = format!("Container created: {name}");
        self.emit(EventType::Normal, "Created", text);
        Ok(id)
    }
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
        .content
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

//! Parts of a container's start other than its creation: the container whose process namespace it shares, its postStart
//! hook, its name in events, and its trace span.
//!
//! **Invariant:** whatever keeps a container from running is a [`Failure`], reported as the reason of its Waiting
//! state. Only an operation that the agent itself cannot do (a commit, a call that must succeed) is an error.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::container_start::{StartError, image_failed};
use super::execute::StepError;
use super::{Job, WorkerContext};
use crate::core::container_history::Records;
use crate::core::images;
use crate::core::pod_actions::StartContainer;
use crate::core::pull_fallback;
use crate::core::state::Transaction;
use crate::core::supported;
use crate::core::volume_mounts::shows_mounts_to_node;
use crate::kuberuntime::attempt_files;
use crate::kuberuntime::cri::{ContainerConfig, CriError, convert, v1};
use crate::kuberuntime::hooks::{self, Hook, HookTarget};
use crate::kuberuntime::kill::{self, Condemned, Ends, Killer};
use crate::kuberuntime::logs;
use crate::kuberuntime::node_context::is_path_component;
use crate::store::{CommitError, Committed, StartIntent, StopDecision};
use crate::types::containers::container_of;
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use crate::types::{
    ContainerId, ContainerKind, ContainerSpec, Event, EventRecorder, EventType, PodExt, PodUid,
    Stamp, blocking, causes,
};

/// Longest message of a failure.
const MAX_MESSAGE: usize = 4096;
/// Timeout of a container start that a previous run of the agent requested.
const UNDER_WAY: Duration = Duration::from_secs(10);
/// Waiting reason and upstream's error of a container whose postStart hook failed.
const POST_START_HOOK_ERROR: &str = "PostStartHookError";

/// A container that could not be started: not an error of the sync, but a reason to wait.
pub(super) struct Failure {
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) retry_at: Option<Stamp>,
    /// An event was emitted where it occurred.
    pub(super) told: bool,
    /// The answer of the runtime, if it refused the container: the image may be at fault.
    pub(super) answer: Option<String>,
}

impl Failure {
    pub(super) fn new(reason: &str, message: impl Into<String>) -> Self {
        Self {
            reason: reason.to_owned(),
            message: message.into(),
            retry_at: None,
            told: false,
            answer: None,
        }
    }

    /// A failure that follows from an answer of the runtime.
    pub(super) fn by_runtime(self, answer: String) -> Self {
        Self {
            answer: Some(answer),
            ..self
        }
    }

    /// The failure with as much of its message as a status has.
    pub(super) fn shortened(mut self) -> Self {
        if self.message.len() > MAX_MESSAGE {
            let mut end = MAX_MESSAGE;
            while !self.message.is_char_boundary(end) {
                end -= 1;
            }
            self.message.truncate(end);
        }
        self
    }
}

/// Names containers in events by the list they stand in.
pub(super) struct InPod {
    pod: Arc<Pod>,
    inner: Arc<dyn EventRecorder>,
}

impl InPod {
    pub(super) fn new(context: &WorkerContext, pod: &Arc<Pod>) -> Self {
        Self {
            pod: Arc::clone(pod),
            inner: Arc::clone(&context.recorder),
        }
    }
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

/// Looks for evidence against the image of a container that failed at once, again and again. runc starts such a container and
/// reports in its log that the kernel refuses the program. A log that cannot be read is no evidence.
pub(super) async fn look_at_log(
    context: &WorkerContext,
    job: &Job,
    spec: &ContainerSpec<'_>,
    start: &StartContainer,
    status: &PodStatus,
) -> Result<(), StepError> {
    let container: &Container = &spec.container;
    // A neighbour may write to its output.
    if job.pod.spec_ref().share_process_namespace == Some(true) {
        return Ok(());
    }
    let newest = status.container(&start.name);
    let Some(ended) = newest.filter(|c| {
        c.hash == start.hash && images::is_log_of_interest(container, c, start.attempt)
    }) else {
        return Ok(());
    };
    let root = context.node.pod_log_root.clone();
    let log = logs::file_of(&root, status, ended);
    let read = logs::beside(&context.node, move |_| {
        logs::short_log(&root, &log, images::SHORT_LOG)
    });
    let log = match read.await {
        Ok(log) => log.unwrap_or_default(),
        Err(error) => {
            debug!(%error, container = start.name, "cannot read the log of a failed container");
            return Ok(());
        }
    };
    let Some(said) = images::evidence_in_log(&log) else {
        return Ok(());
    };
    let image = container.image.as_deref().unwrap_or_default();
    image_failed(context, &job.pod, &start.name, image, said).await
}

/// The image that the previous attempt of a container ran with, as far as the start asks for the same one.
pub(super) fn ran_with(
    context: &WorkerContext,
    job: &Job,
    start: &StartContainer,
    status: &PodStatus,
) -> Option<String> {
    let seen = context.store.snapshot();
    let records = Records::of(&seen, &job.uid);
    pull_fallback::ran_with(&start.name, &start.hash, status, &records)
}

/// Waits, at most [`UNDER_WAY`], for the outcome of an existing container's start that the runtime refused with
/// `error`. A start that a previous run of the agent requested may still be under way. Until the runtime has completed
/// or undone that one, it refuses every other. `Ok(Ok(()))` when the container runs.
///
/// # Errors
/// [`StepError::StartUndone`]: the container has not run and never will; another one may be created at once.
pub(super) async fn under_way(
    context: &WorkerContext,
    receipt: &Committed<StartIntent>,
    mut error: CriError,
) -> Result<Result<(), CriError>, StepError> {
    let id = &receipt.get().container_id;
    let end = Instant::now() + UNDER_WAY;
    let mut pause = Duration::from_millis(50);
    loop {
        // What became of it is for the next sync to find; why it was not started is known.
        let Ok(status) = context.cri.container_status(id).await else {
            return Ok(Err(error));
        };
        match status.state() {
            v1::ContainerState::ContainerRunning => return Ok(Ok(())),
            v1::ContainerState::ContainerCreated if Instant::now() < end => {}
            _ if convert::start_was_cut_off(&status) => {
                return Err(StepError::StartUndone(id.clone()));
            }
            _ => return Ok(Err(error)),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
        match context.cri.start_container(receipt).await {
            Ok(()) => return Ok(Ok(())),
            Err(again) => error = again,
        }
    }
}

/// Unmounts what earlier attempts of a container have left of its files in volumes, before the next is created. Files that
/// all containers share stay as long as another one runs that may have mounted them: its own mounts would go with them.
pub(super) async fn unmount_shown(
    context: &WorkerContext,
    job: &Job,
    container: &Container,
    status: &PodStatus,
) {
    if !shows_mounts_to_node(container) || !is_path_component(&container.name) {
        return;
    }
    let volumes = &context.content.volumes;
    let own = volumes.unmount_shown_files(&job.uid, &container.name).await;
    let shared = match others_show(&job.pod, container, status) {
        true => Ok(()),
        false => volumes.unmount_shown_shared(&job.uid).await,
    };
    for error in own.err().into_iter().chain(shared.err()) {
        warn!(container = container.name, error = %causes(&error), "cannot unmount files of previous attempts");
    }
}

/// Returns whether another container of the pod may run that propagates its mounts to the node.
fn others_show(pod: &Pod, container: &Container, status: &PodStatus) -> bool {
    let is_up =
        |c: &ContainerStatus| matches!(c.state, ContainerState::Running | ContainerState::Unknown);
    let mut others = (status.containers.iter()).filter(|c| c.name != container.name && is_up(c));
    others.any(|other| {
        let spec = container_of(pod, &other.name);
        spec.is_none_or(|spec| shows_mounts_to_node(&spec.container))
    })
}

/// Empties the termination message file of a container for an attempt whose start is recorded, and with it the message
/// of the attempt before. `intended` is when a start of the very same attempt was recorded before: what was written
/// since is kept.
///
/// # Errors
/// The reason why the file is not available, and the remedy.
pub(super) async fn clear_message(
    context: &WorkerContext,
    job: &Job,
    container: &Container,
    intended: Option<Stamp>,
) -> Result<(), String> {
    let name = &container.name;
    if !is_path_component(name) {
        return Ok(());
    }
    let path = attempt_files::message_path(&context.node, &job.uid, name);
    let since = intended.map(|at| {
        let wall = Duration::from_millis(u64::try_from(at.wall_ms).unwrap_or(0));
        std::time::UNIX_EPOCH + wall
    });
    let shown = path.display().to_string();
    let cleared = blocking::run(move || attempt_files::clear_message(&path, since)).await;
    let cause = match cleared {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    Err(format!(
        "empty the termination message file {shown}: {cause}; it has to be a file that the agent can write"
    ))
}

/// Returns why the agent refuses to start an ephemeral container: a field that is not supported. It was added after the
/// pod's admission, so nothing has checked it yet.
pub(super) fn refused(pod: &Pod, spec: &ContainerSpec<'_>) -> Option<String> {
    if spec.kind != ContainerKind::Ephemeral {
        return None;
    }
    let own = format!("spec.ephemeralContainers[{}].", spec.index);
    let mut refusals = supported::refused(pod);
    refusals.retain(|r| r.field.starts_with(&own));
    (!refusals.is_empty()).then(|| supported::summary(&refusals))
}

/// The running container whose PID namespace an ephemeral container asks for.
///
/// # Errors
/// The message for a container that does not run.
pub(super) fn target_of(
    status: &PodStatus,
    spec: &ContainerSpec<'_>,
) -> Result<Option<ContainerId>, String> {
    let Some(name) = spec.target else {
        return Ok(None);
    };
    let mut found = status.containers_named(name);
    match found.find(|c| c.state == ContainerState::Running) {
        Some(found) => Ok(Some(found.id.clone())),
        None => Err(format!("unable to find target container {name}")),
    }
}

/// Puts a container into the PID namespace of another one.
pub(super) fn sharing_processes(
    mut config: ContainerConfig,
    target: Option<ContainerId>,
) -> ContainerConfig {
    if let Some(target) = target {
        let linux = config.message.linux.get_or_insert_default();
        let security = linux.security_context.get_or_insert_default();
        let namespaces = security.namespace_options.get_or_insert_default();
        namespaces.pid = v1::NamespaceMode::Target.into();
        namespaces.target_id = target.to_string();
    }
    config
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
) -> Result<(), StartError> {
    let (pod, uid) = (&job.pod, &job.uid);
    let container: &Container = &spec.container;
    let name = &container.name;
    let lifecycle = container.lifecycle.as_ref();
    let Some(handler) = lifecycle.and_then(|l| l.post_start.as_ref()) else {
        return Ok(());
    };
    if Hook::PostStart.is_done(&context.store.snapshot(), uid, name, id) {
        return Ok(());
    }
    fail::fail_point!("pod_workers::hook::before_post_start");
    let mut shown = PodStatus::empty(uid.clone());
    shown.name = pod.name().to_owned();
    shown.namespace = pod.namespace().to_owned();
    shown.ips = ips.to_vec();
    let node_ip = [context.node.addresses.reachable().to_string()];
    let condemned = Condemned {
        status: &shown,
        pod: Some(pod),
        host_ips: &node_ip,
    };
    let target = HookTarget {
        pod: &format!("{}({uid})", pod.full_name()),
        name,
        id,
        ports: container.ports.as_deref().unwrap_or_default(),
        ip: condemned.ip(),
    };
    let outcome = tokio::select! {
        outcome = hooks::run(handler, target, &context.cri) => outcome,
        () = ended(context, uid, id) => {
            info!(container = name, "the container has ended, giving up its postStart hook");
            return Ok(());
        }
    };
    let Err(error) = outcome else {
        fail::fail_point!("pod_workers::hook::after_post_start");
        remember_post_start(context, job, name, id).await?;
        return Ok(());
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
    let decision = Transaction::new()
        .journal(
            Some(uid),
            "hook failed",
            format!("{name}: postStart: {}", error.kind()),
        )
        .journal(
            Some(uid),
            "stopping container",
            format!("{name}: its postStart hook failed"),
        );
    let decision = StopDecision::recorded_by(decision)?;
    let permit = context.store.commit_stop(decision).await?;
    let killer = Killer {
        cri: &context.cri,
        store: &context.store,
        recorder: &*context.recorder,
        permit: &permit,
        clock: &*context.clock,
        pace: context.content.volumes.pace(),
        ends: Some(context),
    };
    let victim = running(name, id, attempt);
    let grace = kill::grace_of(pod, None);
    killer
        .container(condemned, &victim, grace, Some("FailedPostStartHook"))
        .await?;
    let failure = Failure::new(POST_START_HOOK_ERROR, error.to_string());
    Err(StartError::Waits(failure.shortened()))
}

impl Ends for WorkerContext {
    fn ended<'a>(&'a self, pod: &'a PodUid, id: &'a ContainerId) -> BoxFuture<'a, ()> {
        Box::pin(ended(self, pod, id))
    }
}

/// Returns when a started container is seen not to run any more: a hook that goes on without it (a sleep, a request to
/// somebody else) must not keep it from being started again.
async fn ended(context: &WorkerContext, uid: &PodUid, id: &ContainerId) {
    let cache = context.pleg.cache();
    let mut than = Instant::now();
    loop {
        let seen = cache.get_newer_than(uid, Some(than)).await;
        // Goes round once per look at the runtime.
        than = Instant::now() + Duration::from_millis(1);
        match seen {
            Ok(seen) => {
                let mut containers = seen.status.containers.iter();
                let found = containers.find(|c| c.id == *id);
                if found.is_none_or(|c| c.state == ContainerState::Exited) {
                    return;
                }
            }
            Err(error) => debug!(%error, "cannot check whether the container still runs"),
        }
    }
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
        user: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::types::containers::containers_of;

    #[test]
    fn an_ephemeral_container_is_looked_at_when_it_is_started() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "containers": [{"name": "m", "volumeDevices": [{"name": "d", "devicePath": "/d"}]}],
            "ephemeralContainers": [
                {"name": "good", "image": "i"},
                {"name": "bad", "image": "i", "volumeMounts": [
                    {"name": "v", "mountPath": "/v", "recursiveReadOnly": "Always"}]},
            ],
        }}))
        .unwrap();
        let told: Vec<_> = containers_of(&pod).map(|c| refused(&pod, &c)).collect();
        assert_eq!(told[..2], [None, None], "admission has looked at the first");
        let told = told[2].as_deref().unwrap();
        assert!(
            told.contains("spec.ephemeralContainers[1].volumeMounts[0].recursiveReadOnly"),
            "{told}"
        );
    }

    #[test]
    fn shared_files_stay_while_another_container_may_show_them() {
        let mount =
            json!([{"name": "v", "mountPath": "/etc", "mountPropagation": "Bidirectional"}]);
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [
                {"name": "a", "volumeMounts": mount}, {"name": "b", "volumeMounts": mount},
                {"name": "c"},
            ]},
        }))
        .unwrap();
        let of = |name: &str, state| ContainerStatus {
            id: name.into(),
            name: name.to_owned(),
            attempt: 0,
            sandbox_id: "s".into(),
            state,
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
            user: None,
        };
        use ContainerState::{Exited, Running, Unknown};
        for (name, state, is) in [
            ("a", Running, false),
            ("b", Running, true),
            ("b", Unknown, true),
            ("b", Exited, false),
            ("c", Running, false),
            ("gone", Running, true),
        ] {
            let mut status = PodStatus::empty(PodUid::new("u"));
            status.containers = vec![of(name, state)];
            let own = &pod.spec_ref().containers[0];
            assert_eq!(others_show(&pod, own, &status), is, "{name} {state:?}");
        }
    }
}

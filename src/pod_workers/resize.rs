//! Applies what a resize has allocated. Upstream: `doPodResizeAction`.
//!
//! In: the pod with what is allocated to it, the resources last sent to the runtime, what runs. Out: the runtime
//! notified of the sandbox's new resources, the pod's cgroup grown, containers updated, the cgroup shrunk, each
//! container's new resources on record after the runtime took them, and those of the pod as a whole at the end;
//! containers that have to be restarted for it are named to the caller.
//!
//! **Invariant:** cut off anywhere, the next sync finds the same difference or a smaller one: all that is
//! done here may be done twice. An allocation that comes meanwhile marks what may be done and not recorded, and
//! the record of a worker that has not seen it is refused.

use std::sync::Arc;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, Pod};
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use super::execute::StepError;
use super::{Job, WorkerContext};
use crate::cm::{Limits, NO_MEMORY_LIMIT};
use crate::core::pod_actions::PodActions;
use crate::core::resize::{self, Change, PendingRecord, ResizeRecord, ResizeView};
use crate::core::state::{AdmissionRecord, State, Transaction};
use crate::kuberuntime::cri::CriErrorKind;
use crate::kuberuntime::{resources, sandbox_config};
use crate::types::metrics::SuccessLabel;
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{ContainerId, Event, EventType, PodExt, Stamp, causes};

/// The job with the resources that are allocated to its pod; `None` when it has them.
pub(super) fn as_allocated(context: &WorkerContext, job: &Job) -> Option<Job> {
    let state = context.store.snapshot();
    let record = admission(&state, job)?;
    let allocations = resize::allocated(&job.pod, &record.allocated);
    let pod = resize::with_allocation(&job.pod, &allocations)?;
    let mut job = job.clone();
    job.worker.pod = Arc::new(pod);
    Some(job)
}

fn admission<'a>(state: &'a State, job: &'a Job) -> Option<&'a AdmissionRecord> {
    let known = state.record::<AdmissionRecord>(job.uid.as_str());
    known.or(job.admission.as_ref())
}

/// Returns the pod's resources for its status.
pub(super) fn view(state: &State, job: &Job, status: &PodStatus) -> ResizeView {
    let Some(admission) = admission(state, job) else {
        return ResizeView::default();
    };
    resize::view(
        &job.pod,
        &admission.allocated,
        ResizeRecord::of(state, &job.pod).as_ref(),
        PendingRecord::of(state, &job.pod).as_ref(),
        &running(status),
    )
}

fn running(status: &PodStatus) -> Vec<&str> {
    let running = status.containers.iter();
    running
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| c.name.as_str())
        .collect()
}

/// To be committed with the start of a container that was made with the pod's resources.
pub(super) fn started(state: &State, pod: &Pod, container: &str, now: Stamp) -> Transaction {
    let transaction = Transaction::new();
    let Some(record) = ResizeRecord::of(state, pod) else {
        return transaction;
    };
    let Some(container) = resize::resizable(pod).find(|c| c.name == container) else {
        return transaction;
    };
    let record = record.with(&container.name, resize::made_with(pod, container));
    let key = resize::resize_key(pod);
    transaction
        .expect_object(state, &key)
        .put_object(&key, &record, now)
}

/// Shows the containers that a resize restarts as made from another spec: they are stopped and started.
pub(super) fn outdated(status: &PodStatus, restarts: &[ContainerId]) -> Option<PodStatus> {
    if restarts.is_empty() {
        return None;
    }
    let mut status = status.clone();
    for container in &mut status.containers {
        if restarts.contains(&container.id) {
            container.hash = "resized".to_owned();
        }
    }
    Some(status)
}

/// Says why [`outdated`] containers are stopped.
pub(super) fn explain(actions: &mut PodActions, restarts: &[ContainerId]) {
    for kill in &mut actions.kill {
        if restarts.contains(&kill.id) {
            kill.message = format!("Container {} resize requires restart", kill.name);
            for start in actions.start.iter_mut().filter(|s| s.name == kill.name) {
                start.why.clone_from(&kill.message);
            }
        }
    }
}

/// Brings running containers to what is allocated. Returns those that have to be restarted for it; they get
/// it when they are made again. What the kernel or the runtime refuses is recorded for the status, and is
/// tried again with the next sync.
pub(super) async fn actuate(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
) -> Result<Vec<ContainerId>, StepError> {
    let state = context.store.snapshot();
    let Some(stored) = ResizeRecord::of(&state, &job.pod) else {
        return Ok(Vec::new());
    };
    let mut progress = Progress::from(stored);
    let record = &mut progress.record;
    let changes = resize::changes(&job.pod, &record.actuated, &running(status));
    let of_pod = resize::pod_changes(&job.pod, &record.actuated);
    if changes.is_empty() && !of_pod {
        if record.started || record.error.is_some() {
            complete(context, job, &mut progress).await?;
        }
        return Ok(Vec::new());
    }
    if !record.started {
        record.started = true;
        let why = changed_names(&changes, of_pod);
        progress.keep(context, job, "resizing", &why).await?;
        let text = format!("Pod resize started: {}", shown(&job.pod));
        tell(context, job, EventType::Normal, "ResizeStarted", &text);
    }
    fail::fail_point!("pod_workers::resize::before_cgroups");
    let begun = tokio::time::Instant::now();
    let outcome = put_in_force(context, job, status, &changes, &mut progress).await?;
    let label = SuccessLabel {
        success: outcome.is_ok().to_string(),
    };
    let took = begun.elapsed().as_secs_f64() * 1000.0;
    let durations = &context.metrics.pod_resize_duration;
    durations.get_or_create(&label).observe(took);
    match outcome {
        Ok(()) => {}
        Err(why) => {
            warn!(error = why, "cannot apply a resize");
            if progress.record.error.as_ref() != Some(&why) {
                progress.record.error = Some(why.clone());
                progress.keep(context, job, "resize failed", &why).await?;
                let text = format!("Pod resize error: {why}");
                tell(context, job, EventType::Warning, "ResizeError", &text);
            }
            return Ok(Vec::new());
        }
    }
    let restarts = changes.iter().filter(|c| c.restart);
    let ids = restarts.filter_map(|c| Some(find(status, &c.name)?.id.clone()));
    let ids: Vec<ContainerId> = ids.collect();
    if ids.is_empty() {
        complete(context, job, &mut progress).await?;
    } else if of_pod {
        let why = "its containers follow";
        progress.keep(context, job, "resized pod", why).await?;
    }
    Ok(ids)
}

/// Records and reports that the allocated resources are applied.
async fn complete(
    context: &WorkerContext,
    job: &Job,
    progress: &mut Progress,
) -> Result<(), StepError> {
    progress.record.started = false;
    progress.record.error = None;
    let why = "what is allocated is in force";
    progress.keep(context, job, "resized", why).await?;
    let text = completed(&job.pod);
    tell(context, job, EventType::Normal, "ResizeCompleted", &text);
    Ok(())
}

/// The outer result is the store's, the inner one the kernel's and the runtime's.
async fn put_in_force(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    changes: &[Change],
    progress: &mut Progress,
) -> Result<Result<(), String>, StepError> {
    let pod = &job.pod;
    let actuated = &progress.record.actuated;
    let before = resize::with_allocation(pod, actuated).map_or_else(|| Arc::clone(pod), Arc::new);
    let is_unconfirmed =
        resize::is_pod_unconfirmed(actuated) || changes.iter().any(Change::is_unconfirmed);
    notify_sandbox(context, pod, status).await;
    fail::fail_point!("pod_workers::resize::after_sandbox");
    let cgroups = &context.resources.cgroups;
    // What is changed below is the difference to what was in force before.
    if let Err(error) = cgroups.adopt(&before) {
        return Ok(Err(causes(&error)));
    }
    let (first, last) = match (cgroups.limits_of(&before), cgroups.limits_of(pod)) {
        (Ok(_), Ok(to)) if is_unconfirmed => (to.complete(), to.complete()),
        (Ok(from), Ok(to)) => Limits::steps(from, to),
        (Err(error), _) | (_, Err(error)) => return Ok(Err(causes(&error))),
    };
    if let Err(why) = check_memory(context, pod, status, changes, last).await {
        return Ok(Err(why));
    }
    match set_limits(context, pod, first).await {
        // What the containers have is not known: they may have to shrink first.
        Err(why) if is_unconfirmed => {
            debug!(
                error = why,
                "cannot change the pod's cgroup first, changing it after its containers"
            )
        }
        Err(why) => return Ok(Err(why)),
        Ok(()) => {}
    }
    fail::fail_point!("pod_workers::resize::after_grow");
    for change in changes.iter().filter(|c| !c.restart) {
        let Some(running) = find(status, &change.name) else {
            continue;
        };
        let wanted = match linux(context, pod, change) {
            Ok(Some(wanted)) => wanted,
            Ok(None) => continue,
            Err(why) => return Ok(Err(why)),
        };
        if let Err(error) = context
            .cri
            .update_container_resources(&running.id, wanted)
            .await
        {
            return Ok(Err(error.to_string()));
        }
        fail::fail_point!("pod_workers::resize::after_update");
        let to = change.to.clone();
        let record = &mut progress.record;
        record.actuated.insert(change.name.clone(), to);
        let what = "resized container";
        progress.keep(context, job, what, &change.name).await?;
        info!(container = change.name, "container resized");
    }
    if let Err(why) = set_limits(context, pod, last).await {
        return Ok(Err(why));
    }
    fail::fail_point!("pod_workers::resize::after_shrink");
    let whole = resize::allocation_of_pod(pod);
    let actuated = &mut progress.record.actuated;
    actuated.insert(resize::POD.to_owned(), whole);
    Ok(Ok(()))
}

/// Tells the runtime what the sandbox's pod has from now on. Nothing depends on it: runtimes pass it on to plugins, and
/// older ones do not know the call. Upstream: `updatePodSandboxResources`.
async fn notify_sandbox(context: &WorkerContext, pod: &Pod, status: &PodStatus) {
    let Some(sandbox) = status.ready_sandbox() else {
        return;
    };
    let (overhead, mut resources) = match sandbox_config::resources_of(pod, &context.node) {
        Ok(found) => found,
        Err(error) => return debug!(%error, "cannot send the resize to the runtime"),
    };
    if context.resources.pinning.has_cpus(&pod.uid(), None) {
        resources::lift_quota(&mut resources);
    }
    let told = context
        .cri
        .update_pod_sandbox_resources(&sandbox.id, overhead, resources);
    match told.await {
        Ok(()) => {}
        Err(error) if error.kind == CriErrorKind::Unimplemented => {
            debug!("the runtime does not support the resize of sandboxes");
        }
        Err(error) => warn!(%error, "the runtime refused the resize of the sandbox"),
    }
}

fn linux(
    context: &WorkerContext,
    pod: &Pod,
    change: &Change,
) -> Result<Option<v1::LinuxContainerResources>, String> {
    let Some(container) = resize::resizable(pod).find(|c| c.name == change.name) else {
        return Ok(None);
    };
    let mut wanted = resources::container_linux_resources(pod, container, &context.node)
        .map_err(|error| error.to_string())?;
    if context
        .resources
        .pinning
        .has_cpus(&pod.uid(), Some(&change.name))
    {
        resources::lift_quota(&mut wanted);
    }
    // Not part of a resize, and set when the container was made.
    wanted.hugepage_limits.clear();
    let (cpu, memory) = change.lifted();
    if cpu && wanted.cpu_quota == 0 {
        wanted.cpu_quota = -1;
    }
    if memory && wanted.memory_limit_in_bytes == 0 {
        wanted.memory_limit_in_bytes = -1;
        if wanted.memory_swap_limit_in_bytes == 0 && context.node.swap_controller {
            wanted.memory_swap_limit_in_bytes = -1;
        }
    }
    Ok(Some(wanted))
}

/// A limit below what is used would have the kernel kill for it. Upstream: `validateMemoryResizeAction`.
async fn check_memory(
    context: &WorkerContext,
    pod: &Arc<Pod>,
    status: &PodStatus,
    changes: &[Change],
    last: Limits,
) -> Result<(), String> {
    if let Some(limit) = last.memory.filter(|limit| *limit != NO_MEMORY_LIMIT) {
        let for_cgroups = Arc::clone(pod);
        let used = context
            .with_cgroups(move |cgroups| Ok(cgroups.memory_usage(&for_cgroups)))
            .await
            .map_err(|error| causes(&error))?;
        if let Some(used) = used.filter(|used| *used > limit) {
            return Err(format!(
                "attempting to set pod memory limit ({limit}) below current usage ({used})"
            ));
        }
    }
    for change in changes.iter().filter(|c| !c.restart) {
        let (Some(limit), Some(running)) = (change.memory_shrinks_to(), find(status, &change.name))
        else {
            continue;
        };
        let filter = v1::ContainerStatsFilter {
            id: running.id.to_string(),
            ..Default::default()
        };
        let stats = context.cri.list_container_stats(Some(filter)).await;
        let stats = stats.map_err(|error| error.to_string())?;
        let of = stats.into_iter().filter(|s| {
            let attributes = s.attributes.as_ref();
            attributes.is_some_and(|a| a.id == running.id.as_str())
        });
        let memory = of.filter_map(|s| s.memory).next_back();
        let used = memory.and_then(|m| m.usage_bytes.or(m.working_set_bytes));
        if let Some(used) = used.map(|u| u.value).filter(|used| *used > limit) {
            return Err(format!(
                "attempting to set container {:?} memory limit ({limit}) below current usage ({used})",
                change.name
            ));
        }
    }
    Ok(())
}

/// Sets limits of the pod's cgroup. One that is not there yet is made with what is allocated, when the pod starts.
async fn set_limits(context: &WorkerContext, pod: &Arc<Pod>, limits: Limits) -> Result<(), String> {
    let pod = Arc::clone(pod);
    context
        .with_cgroups(move |cgroups| match cgroups.exists(&pod) {
            true => cgroups.set_limits(&pod, limits),
            false => Ok(()),
        })
        .await
        .map_err(|error| causes(&error))
}

fn find<'a>(
    status: &'a PodStatus,
    name: &str,
) -> Option<&'a crate::types::runtime::ContainerStatus> {
    let mut running = status.containers.iter();
    running.find(|c| c.name == name && c.state == ContainerState::Running)
}

/// A record that a resize changes step by step.
struct Progress {
    record: ResizeRecord,
    /// As it was stored last.
    stored: ResizeRecord,
}

impl From<ResizeRecord> for Progress {
    fn from(stored: ResizeRecord) -> Self {
        Self {
            record: stored.clone(),
            stored,
        }
    }
}

impl Progress {
    /// Stores the record. `Stale` when another allocation has changed it meanwhile.
    async fn keep(
        &mut self,
        context: &WorkerContext,
        job: &Job,
        what: &str,
        why: &str,
    ) -> Result<(), StepError> {
        let state = context.store.snapshot();
        if ResizeRecord::of(&state, &job.pod).as_ref() != Some(&self.stored) {
            return Err(StepError::Stale);
        }
        let key = resize::resize_key(&job.pod);
        let transaction = Transaction::new()
            .expect_object(&state, &key)
            .put_object(&key, &self.record, context.clock.now())
            .journal(Some(&job.uid), what, why);
        context.store.commit(transaction).await?;
        self.stored = self.record.clone();
        Ok(())
    }
}

fn tell(context: &WorkerContext, job: &Job, kind: EventType, reason: &str, text: &str) {
    let event = Event::pod(kind, &job.pod, reason, text);
    context.recorder.record(event);
}

fn changed_names(changes: &[Change], of_pod: bool) -> String {
    let mut names: Vec<&str> = changes.iter().map(|c| c.name.as_str()).collect();
    if of_pod {
        names.insert(0, "the pod as a whole");
    }
    names.join(", ")
}

fn completed(pod: &Pod) -> String {
    format!("Pod resize completed: {}", shown(pod))
}

/// Resources of the pod and of its containers, and its generation, as upstream's resize events carry them.
fn shown(pod: &Pod) -> String {
    let of = |containers: &[Container]| -> Vec<Value> {
        let containers = containers.iter();
        containers
            .map(|c| json!({"name": c.name, "resources": c.resources}))
            .collect()
    };
    let mut shown =
        json!({"containers": of(pod.containers()), "generation": pod.metadata.generation});
    if !pod.init_containers().is_empty() {
        shown["initContainers"] = of(pod.init_containers()).into();
    }
    if let Some(resources) = &pod.spec_ref().resources {
        shown["resources"] = json!(resources);
    }
    shown.to_string()
}

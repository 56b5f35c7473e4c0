//! Puts in force what a resize has allocated. Upstream: `doPodResizeAction`.
//!
//! In: the pod with what is allocated to it, what the runtime was told last, what runs. Out: the pod's
//! cgroup grown, containers updated, the cgroup shrunk, each container's new resources on record after the
//! runtime took them; containers that have to be restarted for it are named to the caller.
//!
//! **Invariant:** cut off anywhere, the next sync finds the same difference or a smaller one: all that is
//! done here may be done twice.

use std::sync::Arc;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tracing::{info, warn};

use super::execute::StepError;
use super::{Job, WorkerContext};
use crate::cm::{Limits, NO_MEMORY_LIMIT};
use crate::core::pod_actions::PodActions;
use crate::core::resize::{self, Change, PendingRecord, ResizeRecord, ResizeView};
use crate::core::state::{AdmissionRecord, State, Transaction};
use crate::kuberuntime::resources;
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

/// What the status says of the pod's resources.
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
    let record = record.with(&container.name, resize::allocation_of(container));
    transaction.put_object(&resize::resize_key(pod), &record, now)
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
/// it when they are made again. What the kernel or the runtime refuses is on record for the status, and is
/// tried again with the next sync.
pub(super) async fn actuate(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
) -> Result<Vec<ContainerId>, StepError> {
    let state = context.store.snapshot();
    let Some(mut record) = ResizeRecord::of(&state, &job.pod) else {
        return Ok(Vec::new());
    };
    let changes = resize::changes(&job.pod, &record.actuated, &running(status));
    if changes.is_empty() {
        if record.started || record.error.is_some() {
            complete(context, job, record).await?;
        }
        return Ok(Vec::new());
    }
    if !record.started {
        record.started = true;
        let why = changed_names(&changes);
        keep(context, job, &record, "resizing", &why).await?;
        let text = format!("Pod resize started: {}", shown(&job.pod));
        tell(context, job, EventType::Normal, "ResizeStarted", &text);
    }
    fail::fail_point!("pod_workers::resize::before_cgroups");
    match put_in_force(context, job, status, &changes, &mut record).await? {
        Ok(()) => {}
        Err(why) => {
            warn!(error = why, "a resize cannot be put in force");
            if record.error.as_ref() != Some(&why) {
                record.error = Some(why.clone());
                keep(context, job, &record, "resize failed", &why).await?;
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
        complete(context, job, record).await?;
    }
    Ok(ids)
}

/// What is allocated is in force: remembers and tells it.
async fn complete(
    context: &WorkerContext,
    job: &Job,
    mut record: ResizeRecord,
) -> Result<(), StepError> {
    record.started = false;
    record.error = None;
    let why = "what is allocated is in force";
    keep(context, job, &record, "resized", why).await?;
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
    record: &mut ResizeRecord,
) -> Result<Result<(), String>, StepError> {
    let pod = &job.pod;
    let before =
        resize::with_allocation(pod, &record.actuated).map_or_else(|| Arc::clone(pod), Arc::new);
    let cgroups = &context.cgroups;
    // What is changed below is the difference to what was in force before.
    if let Err(error) = cgroups.adopt(&before) {
        return Ok(Err(causes(&error)));
    }
    let (first, last) = match (cgroups.limits_of(&before), cgroups.limits_of(pod)) {
        (Ok(from), Ok(to)) => Limits::steps(from, to),
        (Err(error), _) | (_, Err(error)) => return Ok(Err(causes(&error))),
    };
    if let Err(why) = check_memory(context, pod, status, changes, last).await {
        return Ok(Err(why));
    }
    if let Err(why) = set_limits(context, pod, first).await {
        return Ok(Err(why));
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
        record.actuated.insert(change.name.clone(), to);
        keep(context, job, record, "resized container", &change.name).await?;
        info!(container = change.name, "container resized");
    }
    if let Err(why) = set_limits(context, pod, last).await {
        return Ok(Err(why));
    }
    fail::fail_point!("pod_workers::resize::after_shrink");
    Ok(Ok(()))
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
    if context.pinning.has_cpus(&pod.uid(), Some(&change.name)) {
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

async fn set_limits(context: &WorkerContext, pod: &Arc<Pod>, limits: Limits) -> Result<(), String> {
    let pod = Arc::clone(pod);
    context
        .with_cgroups(move |cgroups| cgroups.set_limits(&pod, limits))
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

async fn keep(
    context: &WorkerContext,
    job: &Job,
    record: &ResizeRecord,
    what: &str,
    why: &str,
) -> Result<(), StepError> {
    let key = resize::resize_key(&job.pod);
    let transaction = Transaction::new()
        .put_object(&key, record, context.clock.now())
        .journal(Some(&job.uid), what, why);
    context.store.commit(transaction).await?;
    Ok(())
}

fn tell(context: &WorkerContext, job: &Job, kind: EventType, reason: &str, text: &str) {
    let event = Event::pod(kind, &job.pod, reason, text);
    context.recorder.record(event);
}

fn changed_names(changes: &[Change]) -> String {
    let names: Vec<&str> = changes.iter().map(|c| c.name.as_str()).collect();
    names.join(", ")
}

fn completed(pod: &Pod) -> String {
    format!("Pod resize completed: {}", shown(pod))
}

/// Resources of the pod's containers and its generation, as upstream's resize events carry them.
fn shown(pod: &Pod) -> String {
    let containers: Vec<_> = resize::resizable(pod)
        .map(|c| json!({"name": c.name, "resources": c.resources}))
        .collect();
    json!({"containers": containers, "generation": pod.metadata.generation}).to_string()
}

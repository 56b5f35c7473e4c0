//! Forgetting a pod: what is left of it in the runtime and on disk goes first, its records go last and in
//! one transaction, so that a crash in between only repeats the work.

use std::sync::Arc;

use tracing::warn;

use super::execute::StepError;
use super::{Job, WorkerContext, claims};
use crate::core::pod_actions::policy_of;
use crate::core::pod_worker;
use crate::core::state::{Transaction, kinds};
use crate::kuberuntime::gc::{self, GcError};
use crate::kuberuntime::logs;
use crate::store::StopDecision;
use crate::types::containers::containers_of;
use crate::types::pod::RestartPolicy;
use crate::types::runtime::{ContainerState, SandboxState};
use crate::types::{ContainerKind, PodExt};

/// Removes everything of a finished or never started pod. Idempotent.
pub(super) async fn purge(context: &WorkerContext, job: &Job) -> Result<(), StepError> {
    let uid = &job.uid;
    let mut status = context
        .cri
        .pod_status(uid, job.pod.name(), job.pod.namespace())
        .await?;
    let remover = context.remover();
    let waits_for_none = waits_for_no_leftover(job);
    let mut left = Vec::new();
    for container in &status.containers {
        if container.state == ContainerState::Running {
            return Err(StepError::StillRunning(container.name.clone()));
        }
        match remover.container(&status, &container.id).await {
            Err(error @ GcError::Runtime { .. }) if waits_for_none => {
                warn!(%error, "cannot remove a dead container, leaving it to garbage collection");
                left.push(container.clone());
            }
            done => done?,
        }
    }
    // A sandbox with a container that stays is left alone.
    let removed = std::mem::replace(&mut status.containers, left);
    if !status.sandboxes.is_empty() {
        let decision = StopDecision::unrecorded_leftovers();
        let permit = context.store.commit_stop(decision).await?;
        for sandbox in &status.sandboxes {
            let evictable = gc::EvictableSandbox {
                pod: uid.clone(),
                id: sandbox.id.clone(),
                ready: sandbox.state == SandboxState::Ready,
            };
            match remover.sandbox(&status, &evictable, &permit).await {
                Err(error @ (GcError::Runtime { .. } | GcError::InUse { .. }))
                    if waits_for_none && !evictable.ready =>
                {
                    warn!(%error, "cannot remove a dead sandbox, leaving it to garbage collection");
                }
                done => done?,
            }
        }
    }
    if !removed.is_empty() || !status.sandboxes.is_empty() {
        context.pleg.request(uid);
    }
    claims::unprepare(context, uid).await?;
    context.content.volumes.unmount(uid).await?;
    context.content.volume_images.remove(uid);
    context.content.objects.unregister(uid);
    context
        .content
        .images
        .forget_pod(&context.store, uid)
        .await
        .map_err(StepError::from)?;
    context.reports.prober.remove_pod(uid);
    context.resources.devices.forget(uid);
    let pod = uid.clone();
    context
        .with_cgroups(move |cgroups| cgroups.destroy(&pod))
        .await?;
    context.content.volumes.remove_pod_dirs(uid).await?;
    let (pod, of) = (Arc::clone(&job.pod), uid.clone());
    logs::beside(&context.node, move |node| {
        logs::remove_pod_logs(node, pod.namespace(), pod.name(), &of)
    })
    .await?;
    context
        .store
        .commit(forget_records(context, job))
        .await
        .map(drop)
        .map_err(StepError::from)
}

/// Returns whether a next life of the pod waits that begins although dead containers and sandboxes of this one are left, which
/// the runtime does not remove: as with the kubelet, unless an end of this life would count as one of the next.
fn waits_for_no_leftover(job: &Job) -> bool {
    let pod = &job.pod;
    let mut mains = containers_of(pod).filter(|spec| spec.kind == ContainerKind::Main);
    job.record.restart_requested
        && pod.is_static()
        && mains.all(|spec| policy_of(pod, &spec) == RestartPolicy::Always)
}

fn forget_records(context: &WorkerContext, job: &Job) -> Transaction {
    let state = context.store.snapshot();
    let (namespace, name) = (job.pod.namespace(), job.pod.name());
    pod_worker::forget(&state, &job.uid)
        .and(pod_worker::next_life(job, &state))
        .and(kinds::forget_pod(&state, namespace, &job.uid))
        .journal(
            Some(&job.uid),
            "forgotten",
            format!("{namespace}/{name} is gone and cleaned up"),
        )
}

//! Forgetting a pod: what is left of it in the runtime and on disk goes first, its records go last and in
//! one transaction, so that a crash in between only repeats the work.

use std::sync::Arc;

use super::execute::StepError;
use super::{Job, WorkerContext, claims};
use crate::core::pod_worker;
use crate::core::state::{Transaction, kinds};
use crate::kuberuntime::{gc, logs};
use crate::store::StopDecision;
use crate::types::PodExt;
use crate::types::runtime::{ContainerState, SandboxState};

/// Removes everything of a finished or never started pod. Idempotent.
pub(super) async fn purge(context: &WorkerContext, job: &Job) -> Result<(), StepError> {
    let uid = &job.uid;
    let mut status = context
        .cri
        .pod_status(uid, job.pod.name(), job.pod.namespace())
        .await?;
    let remover = context.remover();
    for container in &status.containers {
        if container.state == ContainerState::Running {
            return Err(StepError::StillRunning(container.name.clone()));
        }
        remover.container(&status, &container.id).await?;
    }
    let removed = std::mem::take(&mut status.containers);
    if !status.sandboxes.is_empty() {
        let decision = StopDecision::unrecorded_leftovers();
        let permit = context.store.commit_stop(decision).await?;
        for sandbox in &status.sandboxes {
            let evictable = gc::EvictableSandbox {
                pod: uid.clone(),
                id: sandbox.id.clone(),
                ready: sandbox.state == SandboxState::Ready,
            };
            remover.sandbox(&status, &evictable, &permit).await?;
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

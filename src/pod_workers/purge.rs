//! Forgetting a pod: what is left of it in the runtime and on disk goes first, its records go last and in
//! one transaction, so that a crash in between only repeats the work.

use super::execute::StepError;
use super::{Job, WorkerContext, resize};
use crate::core::state::{
    AdmissionRecord, ContainerRecord, ObjectRecord, PlegRecord, PodRecord, ProbeRecord,
    QueueRecord, StatusRecord, Transaction, WorkerRecord,
};
use crate::kuberuntime::{gc, logs, userns};
use crate::types::PodExt;
use crate::types::runtime::{ContainerState, SandboxState};

/// Removes everything of a finished or never started pod. Idempotent.
pub(super) async fn purge(context: &WorkerContext, job: &Job) -> Result<(), StepError> {
    let uid = &job.uid;
    let status = context
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
    if !status.sandboxes.is_empty() {
        let permit = context.store.commit_stop(Transaction::new()).await?;
        for sandbox in &status.sandboxes {
            let evictable = gc::EvictableSandbox {
                pod: uid.clone(),
                id: sandbox.id.clone(),
                ready: sandbox.state == SandboxState::Ready,
            };
            remover.sandbox(&evictable, &permit).await?;
        }
    }
    if !status.containers.is_empty() || !status.sandboxes.is_empty() {
        context.pleg.request(uid);
    }
    context.volumes.unmount(uid).await?;
    context.volume_images.remove(uid);
    context.objects.unregister(uid);
    context
        .images
        .forget_pod(&context.store, uid)
        .await
        .map_err(StepError::from)?;
    context.prober.remove_pod(uid);
    let pod = uid.clone();
    context
        .with_cgroups(move |cgroups| cgroups.destroy(&pod))
        .await?;
    context.volumes.remove_pod_dirs(uid).await?;
    logs::remove_pod_logs(&context.node, job.pod.namespace(), job.pod.name(), uid)?;
    context
        .store
        .commit(forget_records(context, job))
        .await
        .map(drop)
        .map_err(StepError::from)
}

fn forget_records(context: &WorkerContext, job: &Job) -> Transaction {
    let state = context.store.snapshot();
    let uid = job.uid.as_str();
    let prefix = format!("{uid}/");
    let mut transaction = Transaction::new()
        .delete::<PodRecord>(uid)
        .delete::<AdmissionRecord>(uid)
        .delete::<WorkerRecord>(uid)
        .delete::<QueueRecord>(uid)
        .delete::<PlegRecord>(uid)
        .delete::<StatusRecord>(uid)
        .journal(
            Some(&job.uid),
            "forgotten",
            format!(
                "{}/{} is gone and cleaned up",
                job.pod.namespace(),
                job.pod.name()
            ),
        );
    transaction = transaction.and(resize::forget(&job.pod));
    for (key, _) in state.with_prefix::<ContainerRecord>(&prefix) {
        transaction = transaction.delete::<ContainerRecord>(key);
    }
    let users = userns::key(job.pod.namespace(), &job.uid);
    if state.record::<ObjectRecord>(&users).is_some() {
        transaction = transaction.delete::<ObjectRecord>(users);
    }
    for (key, _) in state.with_prefix::<ProbeRecord>(&prefix) {
        transaction = transaction.delete::<ProbeRecord>(key);
    }
    transaction
}

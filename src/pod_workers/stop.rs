//! Stops and removals that precede every start: containers that must no longer run, and leftovers of init containers
//! that have to run again.

use futures::future::join_all;
use tracing::warn;

use super::execute::StepError;
use super::{Job, WorkerContext, sync_pod};
use crate::core::container_history;
use crate::core::pod_actions::PodActions;
use crate::core::state::Transaction;
use crate::kuberuntime::gc;
use crate::kuberuntime::kill::{self, Condemned, Killer};
use crate::store::StopDecision;
use crate::types::PodExt;
use crate::types::runtime::{ContainerState, PodStatus};

/// Stops what the actions want stopped: the whole pod, or single containers side by side.
pub(super) async fn kill_what_must_go(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: &PodActions,
) -> Result<(), StepError> {
    let pod = &job.pod;
    let node_ip = [context.node.addresses.reachable().to_string()];
    let condemned = Condemned {
        status,
        pod: Some(pod),
        host_ips: &node_ip,
    };
    let mut decision = Transaction::new();
    if let Some(kill_pod) = &actions.kill_pod {
        decision = decision.journal(Some(&job.uid), "stopping pod", &kill_pod.reason);
    } else if actions.kill.is_empty() {
        return Ok(());
    } else {
        for victim in &actions.kill {
            let why = format!("{}: {}", victim.name, victim.message);
            decision = decision.journal(Some(&job.uid), "stopping container", why);
        }
    }
    let _stopping = job.stopping.lock().await;
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
    if actions.kill_pod.is_some() {
        return Ok(killer.pod(condemned, kill::grace_of(pod, None)).await?);
    }
    let killed = join_all(actions.kill.iter().filter_map(|victim| {
        let container = status.containers.iter().find(|c| c.id == victim.id)?;
        let grace = kill::grace_of(pod, victim.grace);
        Some(killer.container(condemned, container, grace, Some(&victim.message)))
    }))
    .await;
    killed
        .into_iter()
        .collect::<Result<(), _>>()
        .map_err(StepError::from)
}

/// The ends of these init containers count no more: a new sandbox is made, and they run again in it.
pub(super) async fn forget_init(
    context: &WorkerContext,
    job: &Job,
    actions: &PodActions,
) -> Result<(), StepError> {
    if actions.forget_init.is_empty() {
        return Ok(());
    }
    // What was killed since the pod was looked at has ended in a way that is worth recording.
    let listed_at = context.clock.now();
    let status = context
        .cri
        .pod_status(&job.uid, job.pod.name(), job.pod.namespace())
        .await?;
    sync_pod::record_exits(context, job, &status, listed_at, context.clock.now()).await?;
    let seen = context.store.snapshot();
    let forgotten = container_history::forget_init(&seen, &job.uid, &actions.forget_init);
    if !forgotten.is_empty() {
        context.store.commit(forgotten).await?;
    }
    fail::fail_point!("pod_workers::forget_init::after_commit");
    let remover = context.remover();
    let doomed = status
        .containers
        .iter()
        .filter(|c| actions.forget_init.contains(&c.name) && !c.is_stuck());
    for container in doomed {
        if container.state == ContainerState::Running {
            return Err(StepError::StillRunning(container.name.clone()));
        }
        // Its end counts no more, with it or without it.
        match remover.container(&status, &container.id).await {
            Err(error) if is_left_to_gc(&error) => {
                warn!(%error, "cannot remove a dead init container");
            }
            done => done?,
        }
    }
    Ok(())
}

/// Returns whether a dead container whose removal failed so is left to the next garbage collection, since nothing depends on
/// it.
fn is_left_to_gc(error: &gc::GcError) -> bool {
    match error {
        gc::GcError::Commit { .. } => false,
        gc::GcError::Runtime { .. } | gc::GcError::InUse { .. } | gc::GcError::Links(_) => true,
    }
}

/// Leaves one dead container of an init container's previous attempts. Upstream:
/// `pruneInitContainersBeforeStart`.
pub(super) async fn prune_init(
    context: &WorkerContext,
    status: &PodStatus,
    name: &str,
) -> Result<(), StepError> {
    let dead = status
        .containers_named(name)
        .filter(|c| matches!(c.state, ContainerState::Exited | ContainerState::Unknown));
    for container in dead.skip(1) {
        match context.remover().container(status, &container.id).await {
            Err(error) if is_left_to_gc(&error) => {
                warn!(%error, "cannot remove a dead init container");
            }
            done => done?,
        }
    }
    Ok(())
}

//! Stopping a pod and cleaning up after it. Upstream: `SyncTerminatingPod`, `SyncTerminatingRuntimePod`,
//! `SyncTerminatedPod`.
//!
//! Stops fail open: everything here goes on while the store is degraded, held in memory and written first
//! on recovery. Only the removal of what the runtime knows of a container needs a store.

use tracing::warn;

use super::execute::StepError;
use super::sync_pod::{
    Times, api_status, check_listing, having_acted, observe_probes, observed, record_exits,
    rejection, stamp_of,
};
use super::worker::{StepFailure, StepOutcome};
use super::{Job, WorkerContext, claims};
use crate::core::pod_status::Stage;
use crate::core::pod_worker;
use crate::core::state::{StatusRecord, WorkerPhase};
use crate::kuberuntime::kill::{self, Condemned, Killer};
use crate::status::CommitMode;
use crate::store::StopPermit;
use crate::types::runtime::PodStatus;
use crate::types::{PodExt, Stamp};

pub(super) async fn sync_terminating(
    context: &WorkerContext,
    job: &Job,
    permit: &StopPermit,
) -> Result<StepOutcome, StepFailure> {
    let WorkerPhase::Terminating { deadline, .. } = &job.record.phase else {
        return Ok(StepOutcome::idle());
    };
    let before = inspect(context, job, *deadline).await?;
    if !job.record.runtime_only {
        observe_probes(context, job, &before);
        context.reports.prober.stop_liveness_and_startup(&job.uid);
    }
    report(context, job, &before, Stage::Terminating).await?;
    let grace = deadline.until(context.clock.now());
    let killer = Killer {
        cri: &context.cri,
        store: &context.store,
        recorder: &*context.recorder,
        permit,
        clock: &*context.clock,
        pace: context.content.volumes.pace(),
        ends: Some(context),
    };
    let node_ip = [context.node.addresses.reachable().to_string()];
    let condemned = Condemned {
        status: &before,
        pod: (!job.record.runtime_only).then_some(&*job.pod),
        host_ips: &node_ip,
    };
    killer
        .pod(condemned, grace)
        .await
        .map_err(|error| having_acted(StepError::from(error)))?;
    fail::fail_point!("pod_workers::terminating::after_kill");
    let after = inspect(context, job, *deadline).await?;
    if let Some(running) = after
        .containers
        .iter()
        .find(|c| c.state == crate::types::runtime::ContainerState::Running)
    {
        return Err(having_acted(StepError::StillRunning(running.name.clone())));
    }
    claims::unprepare(context, &job.uid)
        .await
        .map_err(having_acted)?;
    report(context, job, &after, Stage::Terminated).await?;
    context.reports.prober.remove_pod(&job.uid);
    Ok(StepOutcome::done(true))
}

pub(super) async fn sync_terminated(
    context: &WorkerContext,
    job: &Job,
) -> Result<StepOutcome, StepFailure> {
    let uid = &job.uid;
    fail::fail_point!("pod_workers::terminated::before_cleanup");
    context
        .content
        .volumes
        .unmount(uid)
        .await
        .map_err(StepError::from)?;
    fail::fail_point!("pod_workers::terminated::unmounted");
    let pod = uid.clone();
    context
        .with_cgroups(move |cgroups| cgroups.destroy(&pod))
        .await
        .map_err(StepError::from)?;
    if !job.record.runtime_only {
        // One from before the containers were stopped would show them running, and their ends as lost.
        let observed = observed(context, job).await?;
        let now = context.clock.now();
        let times = Times {
            listed_at: stamp_of(&observed, now),
            now,
        };
        let status = &observed.status;
        let state = context.store.snapshot();
        let previous = state.record::<StatusRecord>(uid.as_str());
        let stage = Stage::Terminated;
        let final_status = match (rejection(context, job), previous) {
            (Some(_), Some(previous)) => (*previous.status).clone(),
            _ => api_status(context, job, &state, status, stage, times),
        };
        context
            .reports
            .status
            .terminate(&job.pod, final_status, CommitMode::Stop)
            .await
            .map_err(StepError::from)?;
    }
    context.runtime_state.set_not_listed(uid, false);
    context.reports.reasons.remove(uid);
    context.content.volume_images.remove(uid);
    context.content.objects.unregister(uid);
    context.reports.prober.remove_pod(uid);
    Ok(StepOutcome::done(false))
}

/// Stops what runs of a pod that is finished: the runtime did not list it when the pod was stopped. What is recorded
/// and was told of the pod stays.
pub(super) async fn stop_left_running(
    context: &WorkerContext,
    job: &Job,
    permit: &StopPermit,
) -> Result<(), StepError> {
    let is_left = |status: &PodStatus| pod_worker::is_left_running(&job.record, status);
    let shown = context.pleg.cache().known(&job.uid);
    if !shown.is_some_and(|status| is_left(&status)) {
        return Ok(());
    }
    let (name, namespace) = (job.pod.name(), job.pod.namespace());
    let status = context.cri.pod_status(&job.uid, name, namespace).await?;
    if is_left(&status) {
        warn!("stopping containers of a pod that is finished");
        let killer = Killer {
            cri: &context.cri,
            store: &context.store,
            recorder: &*context.recorder,
            permit,
            clock: &*context.clock,
            pace: context.content.volumes.pace(),
            ends: Some(context),
        };
        let node_ip = [context.node.addresses.reachable().to_string()];
        let condemned = Condemned {
            status: &status,
            pod: (!job.record.runtime_only).then_some(&*job.pod),
            host_ips: &node_ip,
        };
        killer
            .pod(condemned, kill::grace_of(&job.pod, None))
            .await?;
    }
    context.pleg.request(&job.uid);
    Ok(())
}

/// Asks the runtime itself: what stops a pod must not rely on a cache. Processes of a pod of which it lists nothing are killed
/// at the pod's `deadline`; until then it may list them again.
async fn inspect(
    context: &WorkerContext,
    job: &Job,
    deadline: Stamp,
) -> Result<PodStatus, StepError> {
    let listed_at = context.clock.now();
    let status = context
        .cri
        .pod_status(&job.uid, job.pod.name(), job.pod.namespace())
        .await?;
    match check_listing(context, job, &status).await {
        Err(StepError::NotListed(_)) if deadline.reached(context.clock.now()) => {
            // The runtime cannot stop what it does not know, and volumes are unmounted next.
            let uid = job.uid.clone();
            context
                .with_cgroups(move |cgroups| cgroups.destroy(&uid))
                .await?;
        }
        listed => listed?,
    }
    if !job.record.runtime_only {
        record_exits(context, job, &status, listed_at, context.clock.now()).await?;
    }
    Ok(status)
}

async fn report(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    stage: Stage,
) -> Result<(), StepError> {
    if job.record.runtime_only || rejection(context, job).is_some() {
        return Ok(());
    }
    let now = context.clock.now();
    let state = context.store.snapshot();
    let times = Times {
        listed_at: now,
        now,
    };
    let api_status = api_status(context, job, &state, status, stage, times);
    context
        .reports
        .status
        .set(&job.pod, api_status, CommitMode::Stop)
        .await?;
    Ok(())
}

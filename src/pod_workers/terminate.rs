//! Stopping a pod and cleaning up after it. Upstream: `SyncTerminatingPod`, `SyncTerminatingRuntimePod`,
//! `SyncTerminatedPod`.
//!
//! Stops fail open: everything here goes on while the store is degraded, held in memory and written first
//! on recovery. Only the removal of what the runtime knows of a container needs a store.

use super::execute::StepError;
use super::sync_pod::{api_status, observe_probes, record_exits, rejection, stamp_of};
use super::worker::{StepFailure, StepOutcome};
use super::{Job, WorkerContext};
use crate::core::pod_status::Stage;
use crate::core::state::{StatusRecord, WorkerPhase};
use crate::kuberuntime::kill::{Condemned, Killer};
use crate::status::CommitMode;
use crate::store::StopPermit;
use crate::types::runtime::PodStatus;
use crate::types::{Event, EventType, PodExt};

pub(super) async fn sync_terminating(
    context: &WorkerContext,
    job: &Job,
    permit: &StopPermit,
) -> Result<StepOutcome, StepFailure> {
    let WorkerPhase::Terminating { deadline, .. } = &job.record.phase else {
        return Ok(StepOutcome::idle());
    };
    let before = inspect(context, job).await?;
    if !job.record.runtime_only {
        observe_probes(context, job, &before);
        context.prober.stop_liveness_and_startup(&job.uid);
    }
    report(context, job, &before, Stage::Terminating).await?;
    let grace = deadline.until(context.clock.now());
    let killer = Killer {
        cri: &context.cri,
        store: &context.store,
        recorder: &*context.recorder,
        permit,
        now: context.clock.now(),
    };
    let condemned = Condemned {
        status: &before,
        pod: (!job.record.runtime_only).then_some(&*job.pod),
        host_ips: &context.node.host_ips,
    };
    killer.pod(condemned, grace).await.map_err(|error| {
        if !job.record.runtime_only {
            let text = format!("error killing pod: {error}");
            let event = Event::pod(EventType::Warning, &job.pod, "FailedKillPod", text);
            context.recorder.record(event);
        }
        StepFailure {
            acted: true,
            ..StepFailure::from(StepError::from(error))
        }
    })?;
    fail::fail_point!("pod_workers::terminating::after_kill");
    let after = inspect(context, job).await?;
    if let Some(running) = after
        .containers
        .iter()
        .find(|c| c.state == crate::types::runtime::ContainerState::Running)
    {
        return Err(StepFailure {
            acted: true,
            ..StepFailure::from(StepError::StillRunning(running.name.clone()))
        });
    }
    report(context, job, &after, Stage::Terminated).await?;
    context.prober.remove_pod(&job.uid);
    Ok(StepOutcome::done(true))
}

pub(super) async fn sync_terminated(
    context: &WorkerContext,
    job: &Job,
) -> Result<StepOutcome, StepFailure> {
    let uid = &job.uid;
    fail::fail_point!("pod_workers::terminated::before_cleanup");
    context
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
        let cache = context.pleg.cache();
        if !cache.is_newer_than(uid, job.acted) {
            context.pleg.request(uid);
        }
        // One from before the containers were stopped would show them running, and their ends as lost.
        let observed = cache.get_newer_than(uid, job.acted).await;
        let observed = observed.map_err(StepError::from)?;
        let now = context.clock.now();
        let listed_at = stamp_of(&observed, now);
        let status = &observed.status;
        let state = context.store.snapshot();
        let previous = state.record::<StatusRecord>(uid.as_str());
        let stage = Stage::Terminated;
        let final_status = match (rejection(context, job), previous) {
            (Some(_), Some(previous)) => (*previous.status).clone(),
            _ => api_status(context, job, &state, status, stage, listed_at, now),
        };
        context
            .status
            .terminate(&job.pod, final_status, CommitMode::Stop)
            .await
            .map_err(StepError::from)?;
    }
    context.reasons.remove(uid);
    context.volume_images.remove(uid);
    context.objects.unregister(uid);
    context.prober.remove_pod(uid);
    Ok(StepOutcome::done(false))
}

/// Asks the runtime itself: what stops a pod must not rely on a cache.
async fn inspect(context: &WorkerContext, job: &Job) -> Result<PodStatus, StepError> {
    let listed_at = context.clock.now();
    let status = context
        .cri
        .pod_status(&job.uid, job.pod.name(), job.pod.namespace())
        .await?;
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
    let api_status = api_status(context, job, &state, status, stage, now, now);
    context
        .status
        .set(&job.pod, api_status, CommitMode::Stop)
        .await?;
    Ok(())
}

//! One sync of a pod that is to run. Upstream: `Kubelet.SyncPod`.
//!
//! The order is upstream's: status first, then whatever the pod needs before containers (network, cgroups,
//! directories, volumes), then the container actions. Exits that nobody has recorded yet are recorded
//! before anything is decided on them.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, info};

use super::execute::{self, StepError};
use super::worker::{StepFailure, StepOutcome};
use super::{Job, StartFailure, WorkerContext, grow, mounts, resize, resolve};
use crate::core::backoff::SyncOutcome;
use crate::core::container_history::{self, Records};
use crate::core::deadline;
use crate::core::pod_actions::{self, PodActionInput, PodActions};
use crate::core::pod_status::{self, Stage, StatusInput};
use crate::core::state::{AdmissionDecision, AdmissionRecord, State, StatusRecord, WorkerPhase};
use crate::pleg::Observed;
use crate::status::CommitMode;
use crate::types::runtime::PodStatus;
use crate::types::{Event, EventType, PodExt, Stamp};
use crate::volumemanager::{VolumeError, VolumeManager};

pub(super) async fn sync_pod(
    context: &WorkerContext,
    job: &Job,
) -> Result<StepOutcome, StepFailure> {
    let uid = &job.uid;
    if let Some((reason, message)) = rejection(context, job) {
        let previous = context.status.get(uid);
        let status = pod_status::rejected(
            &job.pod,
            previous.as_ref().map(|r| &*r.status),
            &reason,
            &message,
            context.clock.now(),
        );
        context
            .status
            .set(&job.pod, status, CommitMode::Normal)
            .await
            .map_err(StepError::from)?;
        return Ok(StepOutcome::done(false));
    }
    if !job.pod.is_static() {
        context.objects.register(&job.pod);
    }
    let allocated = resize::as_allocated(context, job);
    let job = allocated.as_ref().unwrap_or(job);
    let cache = context.pleg.cache();
    if !cache.is_newer_than(uid, job.acted) {
        context.pleg.request(uid);
    }
    let observed = cache
        .get_newer_than(uid, job.acted)
        .await
        .map_err(StepError::from)?;
    let status = &observed.status;
    let now = context.clock.now();
    let listed_at = stamp_of(&observed, now);
    record_exits(context, job, status, listed_at, now).await?;
    observe_probes(context, job, status);
    let restarts = resize::actuate(context, job, status).await?;
    // What its cgroup is to have is remembered from here on, also of a pod that was resumed.
    context.cgroups.adopt(&job.pod).map_err(StepError::from)?;

    let state = context.store.snapshot();
    let api_status = api_status(context, job, &state, status, Stage::Syncing, listed_at, now);
    let too_long = deadline::exceeded(&job.pod, job.record.started, now);
    let terminal = pod_status::is_terminal(&api_status) || too_long;
    let backing_off = {
        let told = context.status.get(uid);
        if too_long {
            tell_deadline(context, job, told.as_ref().map(|r| &*r.status));
        }
        pod_status::new_crash_loops(told.as_ref().map(|r| &*r.status), &api_status)
    };
    // What a probe wants stopped is stopped with or without a store.
    let mode = if context.prober.failures(&job.pod, status).is_empty() {
        CommitMode::Normal
    } else {
        CommitMode::Stop
    };
    context
        .status
        .set(&job.pod, api_status, mode)
        .await
        .map_err(StepError::from)?;
    for container in backing_off {
        let text = format!(
            "Back-off restarting failed container {container} in pod {}({uid})",
            job.pod.full_name()
        );
        let event = Event::pod(EventType::Warning, &job.pod, "BackOff", text);
        context
            .recorder
            .record(event.container_of(&job.pod, &container));
    }
    if terminal {
        return Ok(StepOutcome::done(false));
    }
    if !job.confirmed && !status.any_running() {
        debug!("waiting for the source to confirm the pod in this epoch");
        return Ok(StepOutcome::idle());
    }
    if !job.pod.host_network()
        && let Some(error) = context.runtime_state.network_error()
    {
        context.recorder.record(Event::pod(
            EventType::Warning,
            &job.pod,
            "NetworkNotReady",
            format!("network is not ready: {error}"),
        ));
        return Err(StepError::NetworkNotReady(error).into());
    }

    let outdated = resize::outdated(status, &restarts);
    let mut actions = {
        let status = outdated.as_ref().unwrap_or(status);
        let probe_failures = context.prober.failures(&job.pod, status);
        let probes = context.prober.views(&job.pod, status);
        let records = Records::of(&state, uid);
        pod_actions::compute(&PodActionInput {
            pod: &job.pod,
            status,
            records: &records,
            probe_failures: &probe_failures,
            probes: &probes,
            listed_at,
            now,
            backoff_max: context.backoff_max,
        })
    };
    resize::explain(&mut actions, &restarts);
    let starts = !actions.start.is_empty() || actions.create_sandbox.is_some();
    if !starts {
        refresh_volumes(context, job, status).await?;
    }
    if actions.is_empty() {
        return finish(context, job, &actions, BTreeMap::new(), None, false);
    }
    let executed = if starts {
        let turn = async {
            let volumes = execute::prepare(context, job).await?;
            execute::execute(context, job, status, &actions, &volumes)
                .await
                .map_err(having_acted)
        };
        context.starts.pass(turn).await?
    } else {
        execute::execute(context, job, status, &actions, &BTreeMap::new())
            .await
            .map_err(having_acted)?
    };
    if executed.started_all && !starts_before(status) {
        context
            .metrics
            .pod_start_duration
            .observe(job.seen.elapsed().as_secs_f64());
        let own = since_start_was_possible(job, status, now).saturating_sub(executed.pulling);
        context
            .metrics
            .pod_start_sli_duration
            .observe(own.as_secs_f64());
    }
    finish(
        context,
        job,
        &actions,
        executed.failures,
        executed.retry_at,
        true,
    )
}

/// Says once that a pod was active for too long.
fn tell_deadline(
    context: &WorkerContext,
    job: &Job,
    told: Option<&k8s_openapi::api::core::v1::PodStatus>,
) {
    if told.is_some_and(pod_status::is_terminal) {
        return;
    }
    info!("the pod was active for longer than its activeDeadlineSeconds");
    context.recorder.record(Event::pod(
        EventType::Normal,
        &job.pod,
        deadline::REASON,
        "Pod was active on the node longer than specified deadline",
    ));
}

/// Brings the content of a running pod's volumes up to date. What cannot be had leaves the former content:
/// the pod runs on, users are told by an event, and the next sync tries again.
async fn refresh_volumes(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
) -> Result<(), StepError> {
    let wanted =
        VolumeManager::wants_refresh(&job.pod) || context.volumes.wants_republish(&job.uid);
    if !status.any_running() || !(wanted || grow::may(&job.pod)) {
        return Ok(());
    }
    let sources = resolve::volumes(context, &job.pod).await;
    grow::volumes(context, &job.pod, &sources).await;
    let refreshed = context
        .volumes
        .refresh(&job.pod, &sources, &*context.recorder);
    match refreshed.await {
        Err(error @ VolumeError::Commit { .. }) => Err(error.into()),
        Err(error) => {
            debug!(%error, "a volume keeps its former content");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

fn having_acted(error: StepError) -> StepFailure {
    StepFailure {
        acted: true,
        ..StepFailure::from(error)
    }
}

/// Time since nothing but the agent and the runtime kept the main containers from running: the pod was seen, and
/// its init containers had ended.
fn since_start_was_possible(job: &Job, status: &PodStatus, now: Stamp) -> Duration {
    let init: Vec<&str> = (job.pod.init_containers().iter())
        .map(|c| c.name.as_str())
        .collect();
    let ended = (status.containers.iter())
        .filter(|c| init.contains(&c.name.as_str()))
        .map(|c| c.finished_at_ns / 1_000_000)
        .max();
    let seen = job.seen.elapsed();
    let since_end = ended.map(|at| now.wall_ms.saturating_sub(at));
    match since_end.and_then(|ms| u64::try_from(ms).ok()) {
        Some(ms) => seen.min(Duration::from_millis(ms)),
        None => seen,
    }
}

fn starts_before(status: &PodStatus) -> bool {
    !status.containers.is_empty()
}

/// Fills the reason cache and says when to look again.
fn finish(
    context: &WorkerContext,
    job: &Job,
    actions: &PodActions,
    mut failures: BTreeMap<String, StartFailure>,
    retry_at: Option<Stamp>,
    acted: bool,
) -> Result<StepOutcome, StepFailure> {
    for waiting in &actions.waiting {
        failures.insert(
            waiting.name.clone(),
            StartFailure {
                reason: waiting.reason.clone(),
                message: waiting.message.clone(),
            },
        );
    }
    let first = failures.iter().next().map(|(name, failure)| {
        StepError::Start(format!(
            "container {name}: {}: {}",
            failure.reason, failure.message
        ))
    });
    context.reasons.set(&job.uid, failures);
    if actions.look_again {
        // Nothing may change in the runtime that would bring the pod back here, and a back-off of another container is
        // no reason to wait.
        return Ok(StepOutcome {
            done: false,
            acted: true,
            requeue: SyncOutcome::PhaseTransition,
        });
    }
    match first {
        None => Ok(StepOutcome {
            done: false,
            acted,
            requeue: SyncOutcome::Success,
        }),
        Some(error) => {
            let earliest_backoff = match (actions.next_due, retry_at) {
                (Some(a), Some(b)) if b.boottime_ms < a.boottime_ms => Some(b),
                (Some(a), _) => Some(a),
                (None, b) => b,
            };
            Err(StepFailure {
                error: Box::new(error),
                acted,
                requeue: SyncOutcome::Error { earliest_backoff },
            })
        }
    }
}

/// Lets the prober know what runs.
pub(super) fn observe_probes(context: &WorkerContext, job: &Job, status: &PodStatus) {
    let told = context.status.get(&job.uid);
    let told = told.as_ref().map(|r| &*r.status);
    context.prober.observe(&job.pod, status, told);
}

/// Reason and message of a pod that was refused at first sight.
pub(super) fn rejection(context: &WorkerContext, job: &Job) -> Option<(String, String)> {
    let state = context.store.snapshot();
    let record = state
        .record::<AdmissionRecord>(job.uid.as_str())
        .or(job.admission.as_ref())?;
    match &record.decision {
        AdmissionDecision::Admitted => None,
        AdmissionDecision::Rejected { reason, message } => Some((reason.clone(), message.clone())),
    }
}

/// Records exits that were not recorded yet; durable when this returns, or held by a store that takes no commits when
/// something is to be stopped.
pub(super) async fn record_exits(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    listed_at: Stamp,
    now: Stamp,
) -> Result<(), StepError> {
    let seen = context.store.snapshot();
    let exits = container_history::observe_exits(&seen, &job.uid, status, listed_at, now);
    if exits.is_empty() {
        return Ok(());
    }
    info!("recording container exits");
    // What is stopped is stopped with or without a store, and nothing that ended beside it holds that up.
    let stops = job.record.phase != WorkerPhase::Sync
        || !context.prober.failures(&job.pod, status).is_empty();
    if stops {
        context.store.commit_stop(exits).await?;
    } else {
        context.store.commit(exits).await?;
    }
    Ok(())
}

/// Computes the API status from the runtime, the records and the reason cache.
pub(super) fn api_status(
    context: &WorkerContext,
    job: &Job,
    state: &State,
    status: &PodStatus,
    stage: Stage,
    listed_at: Stamp,
    now: Stamp,
) -> k8s_openapi::api::core::v1::PodStatus {
    use crate::core::state::TerminationCause;
    let records = Records::of(state, &job.uid);
    let reasons = context
        .reasons
        .get(&job.uid)
        .into_iter()
        .map(|(name, f)| (name, (f.reason, f.message)))
        .collect();
    let previous = state.record::<StatusRecord>(job.uid.as_str());
    let evicted = match &job.record.phase {
        WorkerPhase::Terminating { cause, .. }
        | WorkerPhase::Terminated { cause, .. }
        | WorkerPhase::Finished { cause, .. } => match cause {
            TerminationCause::Evicted { reason, message } => {
                Some((reason.as_str(), message.as_str()))
            }
            _ => None,
        },
        WorkerPhase::Sync => None,
    };
    pod_status::generate(&StatusInput {
        pod: &job.pod,
        status,
        records: &records,
        previous: previous.map(|r| &*r.status),
        reasons: &reasons,
        probes: &context.prober.views(&job.pod, status),
        resize: &resize::view(state, job, status),
        recursive_read_only: mounts::mounts_recursively(context, &job.pod),
        volume_images: &context.volume_images.of(&job.uid),
        host_ips: &context.node.host_ips,
        runtime_name: &context.runtime_name,
        stage,
        evicted,
        deadline_exceeded: deadline::exceeded(&job.pod, job.record.started, now),
        listed_at,
        now,
        backoff_max: context.backoff_max,
    })
}

/// The moment before the runtime was asked, on the agent's clocks.
pub(super) fn stamp_of(observed: &Observed, now: Stamp) -> Stamp {
    now.minus(Instant::now().saturating_duration_since(observed.as_of))
}

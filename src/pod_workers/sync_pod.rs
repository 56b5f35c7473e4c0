//! One sync of a pod that is to run. Upstream: `Kubelet.SyncPod`.
//!
//! The order is upstream's: status first, then whatever the pod needs before containers (network, cgroups,
//! directories, volumes), then the container actions. Exits that nobody has recorded yet are recorded
//! before anything is decided on them.
//!
//! **Invariant:** no end is concluded, and nothing starts, from a runtime that lists nothing of a pod as long as the
//! pod's cgroup has processes.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;
use tracing::{debug, info};

use super::execute::{self, StepError};
use super::worker::{StepFailure, StepOutcome};
use super::{
    Job, StartFailure, WorkerContext, causes, claims, devices, grow, mounts, resize, resolve,
    restart_all,
};
use crate::core::backoff::SyncOutcome;
use crate::core::container_history::{self, Records};
use crate::core::deadline;
use crate::core::pod_actions::{self, PodActionInput, PodActions};
use crate::core::pod_status::{self, Stage, StatusInput};
use crate::core::state::{AdmissionDecision, AdmissionRecord, State, StatusRecord, WorkerPhase};
use crate::pleg::Observed;
use crate::status::CommitMode;
use crate::types::containers::ContainerKind;
use crate::types::runtime::PodStatus;
use crate::types::{Event, EventType, PodExt, Stamp, causes as causes_of};
use crate::volumemanager::{VolumeError, VolumeManager};

pub(super) async fn sync_pod(
    context: &WorkerContext,
    job: &Job,
) -> Result<StepOutcome, StepFailure> {
    let uid = &job.uid;
    if let Some((reason, message)) = rejection(context, job) {
        return reject(context, job, &reason, &message).await;
    }
    if !job.pod.is_static() {
        context.content.objects.register(&job.pod);
    }
    let allocated = resize::as_allocated(context, job);
    let job = allocated.as_ref().unwrap_or(job);
    let observed = observed(context, job).await?;
    let status = &observed.status;
    check_listing(context, job, status).await?;
    let now = context.clock.now();
    let listed_at = stamp_of(&observed, now);
    record_exits(context, job, status, listed_at, now).await?;
    observe_probes(context, job, status);
    // What a probe or the deadline wants stopped waits for nothing else.
    let too_long = deadline::exceeded(&job.pod, job.record.started, now);
    let urgent = too_long || !context.reports.prober.failures(&job.pod, status).is_empty();
    let restarts = match urgent {
        true => Vec::new(),
        false => resize::actuate(context, job, status).await?,
    };
    // What its cgroup is to have is remembered from here on, also of a pod that was resumed.
    context
        .resources
        .cgroups
        .adopt(&job.pod)
        .map_err(StepError::from)?;

    // A probe's victim goes first. Until the source has confirmed the pod nothing starts, so nothing restarts either.
    if !urgent && job.confirmed {
        restart_all::advance(context, job, status, listed_at, now).await?;
    }
    let state = context.store.snapshot();
    let times = Times { listed_at, now };
    let api_status = api_status(context, job, &state, status, Stage::Syncing, times);
    let terminal = pod_status::is_terminal(&api_status) || too_long;
    let backing_off = {
        let told = context.reports.status.get(uid);
        if too_long {
            tell_deadline(context, job, told.as_ref().map(|r| &*r.status));
        }
        pod_status::new_crash_loops(told.as_ref().map(|r| &*r.status), &api_status)
    };
    // It is stopped with or without a store.
    let mode = if urgent {
        CommitMode::Stop
    } else {
        CommitMode::Normal
    };
    context
        .reports
        .status
        .set(&job.pod, api_status, mode)
        .await
        .map_err(StepError::from)?;
    emit_back_offs(context, job, &backing_off);
    if terminal {
        return Ok(StepOutcome::done(false));
    }
    if !job.confirmed && !status.any_running() {
        debug!("waiting for the source to confirm the pod in this epoch");
        return Ok(StepOutcome::idle());
    }
    check_network(context, job)?;

    let replaced = match urgent {
        true => Vec::new(),
        false => devices::outdated(context, &job.pod, status).await?,
    };
    let outdated = resize::outdated(status, &[&restarts[..], &replaced].concat());
    let shown = outdated.as_ref().unwrap_or(status);
    let mut actions = decide(context, job, &state, shown, times);
    resize::explain(&mut actions, &restarts);
    devices::explain(&mut actions, &replaced);
    if !job.confirmed {
        actions = actions.unconfirmed();
    }
    if causes::end_back_offs(context, job, &state, &actions).await? {
        return Ok(StepOutcome {
            done: false,
            acted: false,
            requeue: SyncOutcome::PhaseTransition,
        });
    }
    act(context, job, status, actions, urgent, now).await
}

/// Decides which containers are stopped and started.
fn decide(
    context: &WorkerContext,
    job: &Job,
    state: &State,
    status: &PodStatus,
    Times { listed_at, now }: Times,
) -> PodActions {
    let reports = &context.reports;
    pod_actions::compute(&PodActionInput {
        pod: &job.pod,
        status,
        records: &Records::of(state, &job.uid),
        probe_failures: &reports.prober.failures(&job.pod, status),
        probes: &reports.prober.views(&job.pod, status),
        listed_at,
        now,
        backoff_max: reports.backoff_max,
    })
}

/// Stops and starts the containers that `actions` name. What is urgent to stop waits for nothing.
async fn act(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
    actions: PodActions,
    urgent: bool,
    now: Stamp,
) -> Result<StepOutcome, StepFailure> {
    let stop = || execute::stop(context, job, status, &actions);
    if urgent {
        stop().await.map_err(having_acted)?;
    }
    let starts = !actions.start.is_empty() || actions.create_sandbox.is_some();
    let stopped = |error: StepError| StepFailure {
        acted: actions.stops(),
        ..StepFailure::from(error)
    };
    let refused = devices::refused(context, job, status, &actions).await;
    if let Some((reason, message)) = refused.map_err(stopped)? {
        return reject(context, job, &reason, &message).await;
    }
    if starts {
        let prepared = claims::prepare(context, &job.pod, &actions).await;
        prepared.map_err(stopped)?;
    }
    // What is stopped for another to start in its place runs on until the devices are there.
    if !urgent {
        stop().await.map_err(having_acted)?;
    }
    if !starts && !actions.stops() {
        refresh_volumes(context, job, status).await?;
    }
    if actions.is_empty() {
        return finish(context, job, &actions, BTreeMap::new(), None, false);
    }
    let executed = if starts {
        let turn = async {
            let volumes = execute::prepare(context, job).await.map_err(stopped)?;
            execute::execute(context, job, status, &actions, &volumes)
                .await
                .map_err(having_acted)
        };
        context.schedule.starts.pass(turn).await?
    } else {
        execute::execute(context, job, status, &actions, &BTreeMap::new())
            .await
            .map_err(having_acted)?
    };
    if executed.started_all && completes_first_start(&job.pod, status, &actions) {
        let own = since_start_was_possible(job, status, now).saturating_sub(executed.pulling);
        let metrics = &context.metrics;
        metrics
            .pod_start_duration
            .observe(job.seen.elapsed().as_secs_f64());
        metrics.pod_start_sli_duration.observe(own.as_secs_f64());
        if let Some(whole) = since_creation(&job.pod, context.clock.now()) {
            metrics
                .pod_start_total_duration
                .observe(whole.as_secs_f64());
        }
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

/// Emits the event of each container that has begun to wait for its back-off.
fn emit_back_offs(context: &WorkerContext, job: &Job, containers: &[String]) {
    for container in containers {
        let text = format!(
            "Back-off restarting failed container {container} in pod {}({})",
            job.pod.full_name(),
            job.uid
        );
        let event = Event::pod(EventType::Warning, &job.pod, "BackOff", text);
        context
            .recorder
            .record(event.container_of(&job.pod, container));
    }
}

/// Returns an error, with an event, when the pod needs a network that is not ready.
fn check_network(context: &WorkerContext, job: &Job) -> Result<(), StepFailure> {
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
    Ok(())
}

/// Sets the status of a pod that is refused, which ends it.
async fn reject(
    context: &WorkerContext,
    job: &Job,
    reason: &str,
    message: &str,
) -> Result<StepOutcome, StepFailure> {
    let previous = context.reports.status.get(&job.uid);
    let previous = previous.as_ref().map(|r| &*r.status);
    let now = context.clock.now();
    let status = pod_status::rejected(&job.pod, previous, reason, message, now);
    let set = context
        .reports
        .status
        .set(&job.pod, status, CommitMode::Normal);
    set.await.map_err(StepError::from)?;
    Ok(StepOutcome::done(false))
}

/// Fails when the runtime lists nothing of a pod whose processes run: it was started on other data, or has lost its own. If that
/// were believed, containers that run would be recorded as ended, and started a second time.
pub(super) async fn check_listing(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
) -> Result<(), StepError> {
    let is_listed = !(status.sandboxes.is_empty() && status.containers.is_empty());
    let pids = if is_listed {
        Vec::new()
    } else {
        let uid = job.uid.clone();
        context
            .with_cgroups(move |cgroups| cgroups.processes(&uid))
            .await?
    };
    let doubted = !pids.is_empty();
    context.runtime_state.set_not_listed(&job.uid, doubted);
    if !doubted {
        return Ok(());
    }
    let error = StepError::NotListed(pids);
    let event = Event::pod(
        EventType::Warning,
        &job.pod,
        "NotListedByRuntime",
        error.to_string(),
    );
    context.recorder.record(event);
    Err(error)
}

/// The status of a pod, newer than what was last done to it. A missing one is logged.
pub(super) async fn observed(context: &WorkerContext, job: &Job) -> Result<Observed, StepError> {
    let observed = context.pleg.status_newer_than(&job.uid, job.acted).await;
    observed.map_err(|error| {
        let text = format!("error determining status: {error}");
        let event = Event::pod(EventType::Warning, &job.pod, "FailedSync", text);
        context.recorder.record(event);
        StepError::from(error)
    })
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

/// Brings the content of a running pod's volumes up to date. What cannot be had leaves the previous content:
/// the pod runs on, users get an event, and the next sync tries again.
async fn refresh_volumes(
    context: &WorkerContext,
    job: &Job,
    status: &PodStatus,
) -> Result<(), StepError> {
    let wanted =
        VolumeManager::wants_refresh(&job.pod) || context.content.volumes.wants_republish(&job.uid);
    if !status.any_running() || !(wanted || grow::may(&job.pod)) {
        return Ok(());
    }
    let sources = resolve::volumes(context, &job.pod).await;
    grow::volumes(context, &job.pod, &sources).await;
    let refreshed = context
        .content
        .volumes
        .refresh(&job.pod, &sources, &*context.recorder);
    match refreshed.await {
        Err(error @ VolumeError::Commit { .. }) => Err(error.into()),
        Err(error) => {
            debug!(
                error = causes_of(&error),
                "cannot refresh a volume, keeping its previous content"
            );
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

pub(super) fn having_acted(error: StepError) -> StepFailure {
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

/// Returns whether these starts complete the first start of every main container of a pod.
fn completes_first_start(pod: &Pod, status: &PodStatus, actions: &PodActions) -> bool {
    let start_of = |name: &str| {
        let mut starts = actions.start.iter();
        starts.find(|s| s.kind == ContainerKind::Main && s.name == name)
    };
    let is_known = |name: &str| status.containers.iter().any(|c| c.name == name);
    let mains = || pod.spec_ref().containers.iter().map(|c| c.name.as_str());
    mains().all(|name| is_known(name) || start_of(name).is_some())
        && mains().filter_map(start_of).any(|start| start.attempt == 0)
}

/// Returns the age of a pod of the API server; `None` for a static pod, whose creation nobody waits for. Upstream:
/// `podStartupLatencyTracker`.
fn since_creation(pod: &Pod, now: Stamp) -> Option<Duration> {
    let created = pod.metadata.creation_timestamp.as_ref()?;
    let age = now.wall_ms.saturating_sub(created.0.as_millisecond());
    // A clock that is behind the API server's makes nothing younger than new.
    (!pod.is_static()).then(|| Duration::from_millis(u64::try_from(age).unwrap_or(0)))
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
    context.reports.reasons.set(&job.uid, failures);
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
                acted,
                requeue: SyncOutcome::Error { earliest_backoff },
                ..StepFailure::from(error)
            })
        }
    }
}

/// Lets the prober know what runs.
pub(super) fn observe_probes(context: &WorkerContext, job: &Job, status: &PodStatus) {
    let told = context.reports.status.get(&job.uid);
    let told = told.as_ref().map(|r| &*r.status);
    context.reports.prober.observe(&job.pod, status, told);
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
        || deadline::exceeded(&job.pod, job.record.started, now)
        || !context.reports.prober.failures(&job.pod, status).is_empty();
    if stops {
        context.store.commit_or_hold(exits).await?;
    } else {
        context.store.commit(exits).await?;
    }
    Ok(())
}

/// When a status is computed, and of when the containers are that it shows.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) listed_at: Stamp,
    pub(super) now: Stamp,
}

/// Computes the API status from the runtime, the records and the reason cache.
pub(super) fn api_status(
    context: &WorkerContext,
    job: &Job,
    state: &State,
    status: &PodStatus,
    stage: Stage,
    Times { listed_at, now }: Times,
) -> k8s_openapi::api::core::v1::PodStatus {
    use crate::core::state::TerminationCause;
    let records = Records::of(state, &job.uid);
    let reasons = context
        .reports
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
    let mut generated = pod_status::generate(&StatusInput {
        pod: &job.pod,
        status,
        records: &records,
        previous: previous.map(|r| &*r.status),
        reasons: &reasons,
        probes: &context.reports.prober.views(&job.pod, status),
        resize: &resize::view(state, job, status),
        recursive_read_only: mounts::mounts_recursively(context, &job.pod),
        volume_images: &context.content.volume_images.of(&job.uid),
        host_ips: &context.node.addresses.reported(),
        runtime_name: &context.reports.runtime_name,
        stage,
        evicted,
        deadline_exceeded: deadline::exceeded(&job.pod, job.record.started, now),
        listed_at,
        now,
        backoff_max: context.reports.backoff_max,
    });
    context.resources.devices.report(&job.pod, &mut generated);
    context.resources.claims.report(&job.pod, &mut generated);
    generated
}

/// The moment before the runtime was asked, on the agent's clocks.
pub(super) fn stamp_of(observed: &Observed, now: Stamp) -> Stamp {
    now.minus(Instant::now().saturating_duration_since(observed.as_of))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::core::pod_actions::StartContainer;
    use crate::types::runtime::{ContainerState, ContainerStatus};
    use crate::types::{BootId, PodUid};

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "p", "namespace": "ns", "uid": "u",
                "creationTimestamp": "2026-01-02T03:04:05Z",
            },
            "spec": {
                "initContainers": [{"name": "init", "image": "i"}],
                "containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}],
            },
        }))
        .unwrap()
    }

    fn status(containers: &[&str]) -> PodStatus {
        let mut status = PodStatus::empty(PodUid::new("u"));
        let of = |name: &&str| ContainerStatus {
            id: (*name).into(),
            name: (*name).to_owned(),
            attempt: 0,
            sandbox_id: "s".into(),
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
        };
        status.containers = containers.iter().map(of).collect();
        status
    }

    fn starts(containers: &[(&str, ContainerKind, u32)]) -> PodActions {
        let of = |(name, kind, attempt): &(&str, ContainerKind, u32)| StartContainer {
            name: (*name).to_owned(),
            kind: *kind,
            attempt: *attempt,
            hash: String::new(),
            adopt: None,
            backoff: None,
            why: String::new(),
        };
        PodActions {
            start: containers.iter().map(of).collect(),
            ..PodActions::default()
        }
    }

    /// Name of the case, containers that run, containers that start, and whether that completes the pod's first start.
    type Case<'a> = (
        &'a str,
        &'a [&'a str],
        &'a [(&'a str, ContainerKind, u32)],
        bool,
    );

    #[test]
    fn a_pod_has_started_once_each_of_its_main_containers_has() {
        use ContainerKind::{Ephemeral, Init, Main};
        let both = [("a", Main, 0), ("b", Main, 0)];
        let cases: [Case<'_>; 7] = [
            ("its init container only", &[], &[("init", Init, 0)], false),
            ("all at once", &["init"], &both, true),
            ("the first of two", &["init"], &both[..1], false),
            ("the second, later", &["init", "a"], &both[1..], true),
            ("a restart", &["init", "a", "b"], &[("a", Main, 1)], false),
            (
                "a restart of one that was removed",
                &["init", "b"],
                &[("a", Main, 3)],
                false,
            ),
            (
                "something beside them",
                &["init", "a", "b"],
                &[("debug", Ephemeral, 0)],
                false,
            ),
        ];
        for (what, known, started, expected) in cases {
            let done = completes_first_start(&pod(), &status(known), &starts(started));
            assert_eq!(done, expected, "{what}");
        }
    }

    #[test]
    fn the_age_of_a_pod_is_by_the_wall_clock_and_never_below_zero() {
        let at = |wall_ms| Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms,
        };
        let created = 1_767_323_045_000;
        let age = |pod: &Pod, wall_ms| since_creation(pod, at(wall_ms));
        let seconds = |s| Some(Duration::from_secs(s));
        assert_eq!(age(&pod(), created + 7000), seconds(7));
        assert_eq!(age(&pod(), created - 7000), seconds(0));
        let mut static_pod = pod();
        let source = [("kubernetes.io/config.source", "file")];
        let source = source.map(|(key, value)| (key.to_owned(), value.to_owned()));
        static_pod.metadata.annotations = Some(source.into());
        assert_eq!(age(&static_pod, created + 7000), None);
    }
}

//! The task of one worker: take the newest update, commit what it says, do one step, set the next due time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{Instrument, debug, info, info_span, warn};

use super::execute::StepError;
use super::{Job, PodWorkers, WorkerContext, failures, preempt, purge, sync_pod, terminate};
use crate::core::backoff::{SyncOutcome, requeue_delay};
use crate::core::pod_worker::StepRecord;
use crate::core::state::{Table, WorkerPhase};
use crate::core::{deadline, pod_worker};
use crate::store::{CommitError, StopDecision, StopPermit};
use crate::types::metrics::WorkLabel;
use crate::types::{PodExt, PodUid, causes};
use crate::volumemanager::VolumeError;

/// A static pod that has to wait for another of its name is woken when that one is over, and asks again after this long.
const STATIC_POD_WAIT: Duration = Duration::from_secs(10);
/// A refused commit is tried again after this long.
const STORE_RETRY: Duration = Duration::from_secs(1);
/// A pod whose time is over and that could not be ended is looked at again after this long.
const DEADLINE_RETRY: Duration = Duration::from_secs(1);
/// A pod whose time is over waits this long for the record of its last update.
const RECORD_PATIENCE: Duration = Duration::from_secs(1);

pub(super) async fn run(workers: PodWorkers, uid: PodUid, notify: Arc<Notify>) {
    let stop = workers.0.stop.clone();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = notify.notified() => {}
        }
        while let Some(job) = take(&workers, &uid) {
            if stop.is_cancelled() {
                return;
            }
            let span = info_span!("sync_pod", pod = %uid, name = job.pod.name(), namespace = job.pod.namespace());
            // Boxed: there is a worker for every pod, and nearly all of them are between two steps.
            if Box::pin(step(&workers, job)).instrument(span).await == Next::Gone {
                return;
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Wait for the next update.
    Wait,
    /// The worker has removed itself.
    Gone,
}

/// Takes what is pending, unless the pod has to wait for another one of its name.
fn take(workers: &PodWorkers, uid: &PodUid) -> Option<Job> {
    let now = workers.0.context.clock.now();
    let state = workers.0.context.store.snapshot();
    let mut handles = workers.handles();
    let handle = handles.get_mut(uid)?;
    if !handle.pending {
        return None;
    }
    handle.adopt_recorded_end(&workers.0.context, &state);
    let handle = handles.get(uid)?;
    let waits = handle.source.is_static()
        && handle.record.phase == WorkerPhase::Sync
        && !handle.forget
        && !pod_worker::may_start_static(
            uid,
            &handle.record,
            handles
                .iter()
                .filter(|(other, _)| *other != uid)
                .map(|(other, h)| (other, &h.record)),
        );
    let handle = handles.get_mut(uid)?;
    if waits {
        handle.worker.pending = false;
        let queue = &workers.0.context.schedule.queue;
        queue.enqueue(
            uid,
            now,
            STATIC_POD_WAIT,
            "another pod of this name is still there",
        );
        return None;
    }
    if handle.worker.begin_step(now) {
        let metrics = &workers.0.context.metrics;
        metrics
            .pod_worker_start_duration
            .observe(handle.seen.elapsed().as_secs_f64());
    }
    Some(handle.begin())
}

async fn step(workers: &PodWorkers, job: Job) -> Next {
    let context = &workers.0.context;
    if job.forget {
        return forget(workers, &job).await;
    }
    let Some(committed) = committed(workers, &job).await else {
        debug!("leaving a commit under way for a newer decision");
        return Next::Wait;
    };
    let permit = match committed {
        Ok(permit) => permit,
        Err(CommitError::Stale { .. }) => {
            debug!("its records have changed, deciding again");
            workers.sync(&job.uid);
            return Next::Wait;
        }
        Err(error) => {
            warn!(%error, "cannot record the pod, waiting");
            requeue(workers, &job.uid, STORE_RETRY, "the store refused a commit");
            return Next::Wait;
        }
    };
    if matches!(job.record.phase, WorkerPhase::Finished { .. }) {
        // Nothing is due any more; the store was told with the phase.
        context.schedule.queue.remove(&job.uid);
        workers.pod_finished(&job.uid);
        if let Some(permit) = &permit {
            stop_left_running(context, &job, permit).await;
        }
        return Next::Wait;
    }
    let start = Instant::now();
    let work = async {
        match &job.record.phase {
            WorkerPhase::Sync => sync_pod::sync_pod(context, &job).await,
            WorkerPhase::Terminating { .. } => match &permit {
                Some(permit) => terminate::sync_terminating(context, &job, permit).await,
                None => Ok(StepOutcome::idle()),
            },
            WorkerPhase::Terminated { .. } => terminate::sync_terminated(context, &job).await,
            WorkerPhase::Finished { .. } => Ok(StepOutcome::idle()),
        }
    };
    let result = tokio::select! {
        biased;
        () = job.cancel.cancelled() => {
            debug!("step cancelled by a newer decision");
            mark_acted(workers, &job.uid);
            return Next::Wait;
        }
        kept = interrupted(context, &job) => {
            info!("a probe has failed, giving up the current sync for the stop");
            let abort = workers.0.abort.clone();
            workers.0.tasks.spawn(async move { abort.run_until_cancelled(kept).await });
            mark_acted(workers, &job.uid);
            return Next::Wait;
        }
        () = its_deadline(context, &job) => {
            info!("activeDeadlineSeconds are over, giving up the current sync");
            mark_acted(workers, &job.uid);
            workers.sync(&job.uid);
            return Next::Wait;
        }
        result = work => result,
    };
    let label = WorkLabel {
        operation_type: operation(&job.record.phase).to_owned(),
    };
    context
        .metrics
        .pod_worker_duration
        .get_or_create(&label)
        .observe(start.elapsed().as_secs_f64());
    match result {
        Ok(outcome) => {
            context
                .schedule
                .causes
                .note(&job.pod, outcome.requeue, None);
            failures::over(context, &job.uid);
            if outcome.acted {
                mark_acted(workers, &job.uid);
            }
            advance(workers, &job, outcome.done);
            if !outcome.done {
                let jitter = rand::random::<f64>();
                let (now, resync) = (context.clock.now(), context.schedule.resync);
                let delay = requeue_delay(outcome.requeue, now, resync, jitter);
                requeue_in_time(workers, &job, delay, "periodic sync");
            }
        }
        Err(failure) => failed(workers, &job, &failure),
    }
    Next::Wait
}

/// Tells of a step that could not do everything, and says when to try again.
fn failed(workers: &PodWorkers, job: &Job, failure: &StepFailure) {
    let context = &workers.0.context;
    let device = match &*failure.error {
        StepError::Volume(VolumeError::Remote(failure)) => failure.device.as_deref(),
        _ => None,
    };
    context
        .schedule
        .causes
        .note(&job.pod, failure.requeue, device);
    if failure.acted {
        mark_acted(workers, &job.uid);
    }
    let error = causes(&*failure.error);
    match &*failure.error {
        StepError::Stale => debug!("decided on outdated records, deciding again"),
        _ => info!(error, "pod sync failed, retrying"),
    }
    failures::tell(context, job, failure);
    let (now, jitter) = (context.clock.now(), rand::random::<f64>());
    let delay = requeue_delay(failure.requeue, now, context.schedule.resync, jitter);
    let delay = if matches!(*failure.error, StepError::Stale) {
        Duration::ZERO
    } else {
        delay
    };
    requeue_in_time(workers, job, delay, &error);
}

/// Outcome of a step.
pub(super) struct StepOutcome {
    /// The phase is complete.
    pub(super) done: bool,
    /// The runtime was changed, or its status may be too old: the next step wants a newer one.
    pub(super) acted: bool,
    /// Outcome, which determines the time of the next sync.
    pub(super) requeue: SyncOutcome,
}

impl StepOutcome {
    pub(super) fn idle() -> Self {
        Self {
            done: false,
            acted: false,
            requeue: SyncOutcome::Success,
        }
    }

    pub(super) fn done(acted: bool) -> Self {
        Self {
            done: true,
            acted,
            requeue: SyncOutcome::PhaseTransition,
        }
    }
}

/// A step that could not do everything.
pub(super) struct StepFailure {
    pub(super) error: Box<StepError>,
    /// An event was emitted where the error occurred.
    pub(super) is_told: bool,
    pub(super) acted: bool,
    pub(super) requeue: SyncOutcome,
}

impl From<StepError> for StepFailure {
    fn from(error: StepError) -> Self {
        let (error, is_told) = match error {
            StepError::Told(error) => (error, true),
            error => (Box::new(error), false),
        };
        let requeue = match &*error {
            StepError::NetworkNotReady(_) => SyncOutcome::NetworkNotReady,
            StepError::StartUndone(_) => SyncOutcome::PhaseTransition,
            StepError::Volume(error) => SyncOutcome::Error {
                earliest_backoff: error.retry_at(),
            },
            _ => SyncOutcome::Error {
                earliest_backoff: None,
            },
        };
        Self {
            error,
            is_told,
            acted: false,
            requeue,
        }
    }
}

fn operation(phase: &WorkerPhase) -> &'static str {
    match phase {
        WorkerPhase::Sync => "sync",
        WorkerPhase::Terminating { .. } => "terminating",
        WorkerPhase::Terminated { .. } | WorkerPhase::Finished { .. } => "terminated",
    }
}

/// Stops what runs of a pod that is finished. Housekeeping asks for it again as long as something does.
async fn stop_left_running(context: &WorkerContext, job: &Job, permit: &StopPermit) {
    let (pace, what) = (
        context.content.volumes.pace(),
        format!("left running of {}", job.uid),
    );
    match terminate::stop_left_running(context, job, permit).await {
        Ok(()) => pace.over(&what),
        Err(error) => {
            let error = causes(&error);
            if pace.is_due(&what, &error, context.clock.now()) {
                warn!(error, "cannot stop the containers of a finished pod yet");
            }
        }
    }
}

/// Returns what [`commit`] returns. The worker of a pod that is to run stops waiting when a newer decision comes, and `None` is
/// returned: that may be the pod's end, which a disk that hangs must not hold up. The commit goes on without it, and the
/// stop's own record comes after it in the store's queue.
async fn committed(
    workers: &PodWorkers,
    job: &Job,
) -> Option<Result<Option<StopPermit>, CommitError>> {
    if job.record.phase != WorkerPhase::Sync {
        return Some(commit(workers, job).await);
    }
    if job.preemption.is_none() {
        let commit = commit_in_time(workers, job);
        return job.cancel.run_until_cancelled(commit).await;
    }
    // Once on record, the ends of the victims are carried out, whoever waits.
    let abort = workers.0.abort.clone();
    let (workers, in_task) = (workers.clone(), job.clone());
    let commit =
        tokio::spawn(async move { abort.run_until_cancelled(commit(&workers, &in_task)).await });
    match job.cancel.run_until_cancelled(commit).await? {
        Ok(committed) => committed,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that is shutting down cancels tasks.
            Err(_) => None,
        },
    }
}

/// As [`commit`], but a pod whose activeDeadlineSeconds are over ends although the disk hangs. It was started, so its admission
/// is recorded, and nothing starts any more.
async fn commit_in_time(
    workers: &PodWorkers,
    job: &Job,
) -> Result<Option<StopPermit>, CommitError> {
    let Some(left) = time_left(&workers.0.context, job) else {
        return commit(workers, job).await;
    };
    let patience = left.saturating_add(RECORD_PATIENCE);
    match tokio::time::timeout(patience, commit(workers, job)).await {
        Ok(committed) => committed,
        Err(_) => {
            info!("activeDeadlineSeconds are over, stopping the pod before its update is recorded");
            Ok(None)
        }
    }
}

/// Records what [`pod_worker::before_step`] says, with an admission the ends of other pods that it counts on. Durable when
/// this returns; a phase that stops the pod may be held in memory, and comes with the permit to stop it. `Stale` when the
/// pod's end got on record, or records of those others changed, meanwhile.
async fn commit(workers: &PodWorkers, job: &Job) -> Result<Option<StopPermit>, CommitError> {
    let WorkerContext { store, clock, .. } = &workers.0.context;
    let epoch = &workers.0.context.schedule.epoch;
    let (state, now) = (store.snapshot(), clock.now());
    let record = {
        let handles = job
            .is_first_admitted(&state)
            .then(|| preempt::mark(workers, job));
        let others = handles.iter().flat_map(|handles| handles.values());
        let others = others.map(|handle| &handle.worker);
        pod_worker::before_step(job, &state, epoch.number, now, others)
    };
    match record {
        StepRecord::Stop(mut transaction) => {
            let frees = matches!(
                job.record.phase,
                WorkerPhase::Terminated { .. } | WorkerPhase::Finished { .. }
            );
            if frees {
                transaction = transaction.and(pod_worker::freed(&state, &job.uid));
            }
            let decision = StopDecision::recorded_by(transaction)
                .unwrap_or_else(|_| StopDecision::on_record(&job.uid));
            let permit = store.commit_stop(decision).await?;
            if frees {
                workers.0.context.resources.pinning.settled(&job.uid);
            }
            return Ok(Some(permit));
        }
        StepRecord::Ended => {
            return Err(CommitError::Stale {
                table: Table::Workers,
                key: job.uid.to_string(),
            });
        }
        StepRecord::Keep(transaction) if transaction.is_empty() => {}
        StepRecord::Keep(transaction) => {
            let assigned = workers.0.context.resources.pinning.unrecorded(&job.uid);
            store.commit(transaction.and(assigned)).await?;
            workers.0.context.resources.pinning.settled(&job.uid);
        }
    }
    preempt::carry_out(workers, job);
    Ok(None)
}

/// Moves the phase on after a complete step.
fn advance(workers: &PodWorkers, job: &Job, done: bool) {
    if !done {
        return;
    }
    let now = workers.0.context.clock.now();
    let mut handles = workers.handles();
    let Some(handle) = handles.get_mut(&job.uid) else {
        return;
    };
    if !handle.worker.advance(job, now) {
        return;
    }
    handle.notify.notify_one();
    drop(handles);
    workers.mark_moved();
}

fn mark_acted(workers: &PodWorkers, uid: &PodUid) {
    if let Some(handle) = workers.handles().get_mut(uid) {
        handle.acted = Some(Instant::now());
    }
    workers.0.context.pleg.request(uid);
}

/// Returns the remaining time of a running pod's `activeDeadlineSeconds`.
fn time_left(context: &WorkerContext, job: &Job) -> Option<Duration> {
    let due = deadline::due(&job.pod, job.record.started)?;
    (job.record.phase == WorkerPhase::Sync).then(|| due.until(context.clock.now()))
}

/// Returns when a pod's time is over that is not yet: a hook that never returns or an image that does not come must
/// not outlast it.
async fn its_deadline(context: &WorkerContext, job: &Job) {
    match time_left(context, job).filter(|left| !left.is_zero()) {
        Some(left) => tokio::time::sleep(left).await,
        None => std::future::pending().await,
    }
}

/// Returns when a probe wants something stopped that the step does not stop. What it stops at that moment is waited for. A pull
/// that the step waits for goes on in the future that is returned.
async fn interrupted(
    context: &WorkerContext,
    job: &Job,
) -> impl Future<Output = ()> + Send + use<> {
    job.interrupt.cancelled().await;
    drop(job.stopping.lock().await);
    context.content.images.keep_pulls()
}

/// Like [`requeue`], but not later than the pod's activeDeadlineSeconds ask for. The time may also have come during
/// the step.
fn requeue_in_time(workers: &PodWorkers, job: &Job, delay: Duration, why: &str) {
    let left = time_left(&workers.0.context, job).map(|left| left.max(DEADLINE_RETRY));
    match left.filter(|left| *left < delay) {
        Some(left) => requeue(workers, &job.uid, left, "activeDeadlineSeconds are over"),
        None => requeue(workers, &job.uid, delay, why),
    }
}

fn requeue(workers: &PodWorkers, uid: &PodUid, delay: Duration, why: &str) {
    if delay.is_zero() {
        workers.sync(uid);
        return;
    }
    let context = &workers.0.context;
    context
        .schedule
        .queue
        .enqueue(uid, context.clock.now(), delay, why);
}

async fn forget(workers: &PodWorkers, job: &Job) -> Next {
    let context = &workers.0.context;
    let (pace, what) = (
        context.content.volumes.pace(),
        format!("records of {}", job.uid),
    );
    if let Err(error) = purge::purge(context, job).await {
        let text = causes(&error);
        if pace.is_due(&what, &text, context.clock.now()) {
            warn!(error = text, "cannot forget the pod yet");
        } else {
            debug!(error = text, "still cannot forget the pod");
        }
        let failure = StepFailure::from(error);
        let (now, jitter) = (context.clock.now(), rand::random::<f64>());
        let delay = requeue_delay(failure.requeue, now, context.schedule.resync, jitter);
        requeue(workers, &job.uid, delay, "purge failed");
        // Keep `forget` set: the next turn tries again.
        return Next::Wait;
    }
    pace.over(&what);
    context.schedule.queue.remove(&job.uid);
    context.reports.reasons.remove(&job.uid);
    context.schedule.causes.forget(&job.uid);
    failures::over(context, &job.uid);
    workers.remove(&job.uid);
    Next::Gone
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{BootId, Stamp};
    use crate::volumemanager::remote::RemoteError;

    #[test]
    fn an_unmount_that_failed_is_tried_again_when_its_back_off_ends() {
        let at = |ms| Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        };
        let error = VolumeError::Unpublish {
            pod: PodUid::new("u"),
            volume: "v".to_owned(),
            fresh: true,
            until: at(10_500),
            source: RemoteError::Failed("busy".to_owned()),
        };
        let failure = StepFailure::from(StepError::from(error));
        let delay = requeue_delay(failure.requeue, at(10_000), Duration::from_secs(60), 0.9);
        assert_eq!(delay, Duration::from_millis(500));
    }
}

//! Plan for the records of the store at start: one pure function of (state, runtime, boot, now).
//!
//! The runtime shows the running containers, the records hold the decisions. A pod whose records and runtime agree is
//! resumed where it stopped, with its previous due time; one that needs something is synced at once.
//!
//! **Invariant:** nothing is planned from a difference between two listings of the runtime; actions come from the fresh
//! listing and the records alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use super::container_history::{self, History, Latest, Records};
use super::deadline;
use super::offline;
use super::pleg_diff;
use super::pod_actions::{self, PodActionInput};
use super::pod_worker::{self, Worker, WorkerUpdate};
use super::resize::{self, ResizeRecord};
use super::shutdown::{self, AfterShutdown, ShutdownRecord};
use super::state::kinds::Key;
use super::state::{
    AdmissionDecision, AdmissionRecord, ContainerRecord, EpochRecord, ExitRecord, ImageRecord,
    META_KEY, MetaRecord, PlegRecord, PodRecord, QueueRecord, SignalRecord, SourceRecord, State,
    StatusRecord, Transaction, WorkerPhase, WorkerRecord,
};
use crate::kubeletconfig::OfflineStart;
use crate::types::runtime::{ContainerState, PodStatus as RuntimePodStatus};
use crate::types::{BootIdentity, ContainerId, PodExt, PodSource, PodSyncType, PodUid, Stamp};

/// Longest time until a resumed pod is checked again, whatever was recorded.
const LONGEST_PAUSE: Duration = Duration::from_secs(90);
/// Largest difference between the runtime's times and the agent's.
const CLOCK_SKEW: Duration = Duration::from_secs(1);

/// Facts known at start.
#[derive(Clone, Copy, Debug)]
pub struct RestoreInput<'a> {
    /// State of the store.
    pub state: &'a State,
    /// Pods that the runtime lists.
    pub runtime: &'a BTreeMap<PodUid, RuntimePodStatus>,
    /// Moment before the request to the runtime.
    pub listed_at: Stamp,
    /// Meta record the store was opened with: this node, the current epoch, and boot, generation and heartbeat of the
    /// previous agent.
    pub meta: &'a MetaRecord,
    /// This boot.
    pub boot: &'a BootIdentity,
    /// Longest crash back-off.
    pub backoff_max: Duration,
    /// Policy for the API server's pods after a reboot, before it has answered.
    pub offline_start: OfflineStart,
    /// True if the API server may be that of another cluster than the store's.
    pub cluster_doubted: bool,
    /// Now.
    pub now: Stamp,
}

/// State of a restored pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Records and runtime agree: nothing to do before its due time.
    Resumed,
    /// Something has to be done at once.
    Repaired,
    /// It is being stopped, or cleaned up after.
    Ending,
    /// It is over; remembered so that it does not start again.
    Finished,
}

impl Outcome {
    /// Label value of `holdfast_restore_pods`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resumed => "resumed",
            Self::Repaired => "repaired",
            Self::Ending => "ending",
            Self::Finished => "finished",
        }
    }
}

/// One pod that is brought back.
#[derive(Clone, Debug, PartialEq)]
pub struct RestoredPod {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Its source.
    pub source: PodSource,
    /// Path or URL its source has it from.
    pub origin: String,
    /// Its worker, rebased onto this boot.
    pub record: WorkerRecord,
    /// Its source still wants it, as far as is known.
    pub desired: bool,
    /// It may start before its source has synced: the source has confirmed it in this epoch, and it is not held.
    pub confirmed: bool,
    /// Reason for which it is not started before the API server has answered in this boot.
    pub held: Option<String>,
    /// Time of the next sync; `None` = at once, or never for finished pods.
    pub due: Option<Stamp>,
    /// State after the restore.
    pub outcome: Outcome,
}

impl RestoredPod {
    /// Returns its worker.
    pub fn worker(&self) -> Worker {
        Worker {
            uid: self.pod.uid(),
            record: self.record.clone(),
            pod: Arc::clone(&self.pod),
            admission: None,
            preemption: None,
            preempted_for: None,
            origin: None,
            source: self.source,
            confirmed: self.confirmed,
            pending: matches!(self.outcome, Outcome::Repaired | Outcome::Ending),
            forget: false,
        }
    }
}

/// The plan.
#[derive(Clone, Debug, PartialEq)]
pub struct RestorePlan {
    /// To be committed before anything else.
    pub transaction: Transaction,
    /// The machine, or at least everything that ran on it, was started anew.
    pub rebooted: bool,
    /// Current epoch.
    pub epoch: EpochRecord,
    /// Pods to be brought back.
    pub pods: Vec<RestoredPod>,
    /// Statuses that are known to be current, empty ones included: the pod cache starts with them.
    pub current: Vec<Arc<RuntimePodStatus>>,
    /// Pods the runtime knows and the records do not: adopted when a source wants them.
    pub unrecorded: BTreeSet<PodUid>,
}

impl RestorePlan {
    /// Pods per outcome.
    pub fn counts(&self) -> BTreeMap<Outcome, usize> {
        let mut counts = BTreeMap::new();
        for pod in &self.pods {
            *counts.entry(pod.outcome).or_default() += 1;
        }
        counts
    }
}

/// Plans a start.
pub fn plan_restore(input: &RestoreInput<'_>) -> RestorePlan {
    let meta = input.meta;
    let first = meta.generation == 0;
    let rebooted = !first && !input.boot.same_boot(&meta.boot);
    let epoch = meta.epoch.clone();
    let heartbeat = meta.heartbeat;
    let (state, mut transaction) = rebase(
        input.state,
        input.runtime,
        heartbeat,
        input.listed_at,
        input.now,
    );

    let mut pods = Vec::new();
    let mut current = Vec::new();
    let mut seen = BTreeSet::new();
    for (key, versioned) in &state.pods {
        let uid = PodUid::new(key);
        let (restored, status) = restore_pod(input, &state, &epoch, &uid, &versioned.record);
        let worker = state.record::<WorkerRecord>(key);
        if restored.record.phase == WorkerPhase::Sync
            && worker.is_some_and(|old| old.phase != WorkerPhase::Sync)
        {
            // Its terminal status would stay for good; what is on record of its containers counts.
            transaction = transaction
                .put(key, restored.record.clone())
                .delete::<StatusRecord>(key)
                .journal(
                    Some(&uid),
                    "worker sync",
                    "the shutdown that stopped it is over",
                );
        }
        current.extend(status);
        if let Some(why) = &restored.held {
            transaction = transaction.journal(
                Some(&uid),
                "held",
                format!("waits for the API server: {why}"),
            );
        }
        seen.insert(uid);
        pods.push(restored);
    }
    transaction = drop_runtime_only(&state, transaction);
    let unrecorded = input
        .runtime
        .keys()
        .filter(|uid| !seen.contains(*uid))
        .cloned()
        .collect();
    for (key, versioned) in &state.pleg {
        let uid = PodUid::new(key);
        if seen.contains(&uid) {
            continue;
        }
        match input.runtime.get(&uid) {
            Some(listed) if pleg_diff::same_summary(&versioned.record.status, listed) => {
                current.push(Arc::new(versioned.record.status.clone()));
            }
            Some(_) => {}
            None => transaction = transaction.delete::<PlegRecord>(key),
        }
    }
    transaction = begin_generation(input, rebooted, pods.len(), transaction);
    RestorePlan {
        transaction,
        rebooted,
        epoch,
        pods,
        current,
        unrecorded,
    }
}

/// Drops the workers of pods that only the runtime knew.
fn drop_runtime_only(state: &State, mut transaction: Transaction) -> Transaction {
    for (key, versioned) in &state.workers {
        if versioned.record.runtime_only {
            transaction = transaction.delete::<WorkerRecord>(key).journal(
                Some(&PodUid::new(key)),
                "worker dropped",
                "known from the runtime only; found again if it still runs",
            );
        }
    }
    transaction
}

/// Records this start of the agent.
fn begin_generation(
    input: &RestoreInput<'_>,
    rebooted: bool,
    pods: usize,
    transaction: Transaction,
) -> Transaction {
    let meta = input.meta;
    let generation = meta.generation + 1;
    let why = match (meta.generation == 0, rebooted) {
        (true, _) => "first start with this store",
        (false, true) => "the machine was started anew",
        (false, false) if meta.clean_shutdown => "after an orderly stop",
        (false, false) => "the last agent did not end in order",
    };
    transaction
        .put(
            META_KEY,
            MetaRecord {
                boot: input.boot.clone(),
                generation,
                clean_shutdown: false,
                heartbeat: input.now,
                ..meta.clone()
            },
        )
        .journal(
            None,
            "agent started",
            format!("generation {generation}, {pods} pods: {why}"),
        )
}

fn restore_pod(
    input: &RestoreInput<'_>,
    state: &State,
    epoch: &EpochRecord,
    uid: &PodUid,
    pod_record: &PodRecord,
) -> (RestoredPod, Option<Arc<RuntimePodStatus>>) {
    let pod = Arc::clone(&pod_record.pod.0);
    let listed = input.runtime.get(uid);
    let known = state.record::<PlegRecord>(uid.as_str()).map(|r| &r.status);
    let current = match (listed, known) {
        (Some(listed), Some(known)) if pleg_diff::same_summary(known, listed) => {
            Some(Arc::new(known.clone()))
        }
        (None, _) => Some(Arc::new(RuntimePodStatus::empty(uid.clone()))),
        _ => None,
    };
    let mut record = match state.record::<WorkerRecord>(uid.as_str()) {
        Some(record) => record.clone(),
        None => {
            let update = WorkerUpdate {
                sync_type: PodSyncType::Create,
                pod: &pod,
                kill: None,
                runtime_only: false,
                runtime: listed,
            };
            pod_worker::update(None, &update, input.now).record
        }
    };
    let after = shutdown::after_shutdown(
        pod_record.source,
        &record,
        state.record::<AdmissionRecord>(uid.as_str()),
        ShutdownRecord::of(state).as_ref(),
        input.now,
    );
    match after {
        Some(AfterShutdown::Resume) => record.phase = WorkerPhase::Sync,
        Some(AfterShutdown::AdmitAgain) => record.restart_requested = true,
        None => {}
    }
    if let WorkerPhase::Finished { since, cause } = &record.phase
        && !record.runtime_only
        && state.record::<StatusRecord>(uid.as_str()).is_none()
    {
        // Its status was lost, and what is over is not looked at again: the last phase makes it anew.
        record.phase = WorkerPhase::Terminated {
            since: *since,
            cause: cause.clone(),
        };
    }
    let (outcome, due) = match &record.phase {
        WorkerPhase::Finished { .. } => (Outcome::Finished, None),
        WorkerPhase::Terminating { .. } | WorkerPhase::Terminated { .. } => (Outcome::Ending, None),
        WorkerPhase::Sync if after.is_some() => (Outcome::Repaired, None),
        WorkerPhase::Sync => match &current {
            None => (Outcome::Repaired, None),
            Some(status) => sync_outcome(input, state, uid, &pod, &record, status),
        },
    };
    let held = match record.phase {
        WorkerPhase::Sync => held(input, pod_record),
        _ => None,
    };
    let restored = RestoredPod {
        desired: !record.deleted || record.restart_requested,
        confirmed: pod_record.confirmed_epoch >= epoch.number && held.is_none(),
        held,
        pod,
        source: pod_record.source,
        origin: pod_record.origin.clone(),
        record,
        due,
        outcome,
    };
    (restored, current)
}

/// Returns the reason for which a pod of the API server does not start before the server has answered. Either the machine
/// was restarted since the server's last answer and `offlineStart` does not let the pod start, or it may be a pod of
/// another cluster.
fn held(input: &RestoreInput<'_>, pod_record: &PodRecord) -> Option<String> {
    if input.cluster_doubted && pod_record.source == PodSource::Api {
        return Some("the API server may be that of another cluster".to_owned());
    }
    let this_boot = |stamp: Stamp| stamp.boot == input.now.boot;
    let spoke = input
        .state
        .record::<SourceRecord>(PodSource::Api.as_str())
        .is_some_and(|source| this_boot(source.read));
    if pod_record.source != PodSource::Api || spoke || this_boot(pod_record.first_seen) {
        return None;
    }
    let pod = &*pod_record.pod;
    let access_modes = |claim: &str| {
        let key = Key::<PersistentVolumeClaim>::new(pod.namespace(), claim);
        input.state.object(&key)?.spec?.access_modes
    };
    offline::may_start(pod, input.offline_start, &access_modes).err()
}

/// Returns whether a pod that is to run needs something now.
fn sync_outcome(
    input: &RestoreInput<'_>,
    state: &State,
    uid: &PodUid,
    pod: &Pod,
    record: &WorkerRecord,
    status: &RuntimePodStatus,
) -> (Outcome, Option<Stamp>) {
    let admission = state.record::<AdmissionRecord>(uid.as_str());
    let rejected =
        admission.is_some_and(|a| matches!(a.decision, AdmissionDecision::Rejected { .. }));
    let unreported = state.record::<StatusRecord>(uid.as_str()).is_none();
    if record.started.is_none() || rejected || unreported {
        return (Outcome::Repaired, None);
    }
    let unrecorded_exit =
        !container_history::observe_exits(state, uid, status, input.listed_at, input.now)
            .is_empty();
    let records = Records::of(state, uid);
    let actions = pod_actions::compute(&PodActionInput {
        pod,
        status,
        records: &records,
        probe_failures: &BTreeMap::new(),
        probes: &BTreeMap::new(),
        listed_at: input.listed_at,
        now: input.now,
        backoff_max: input.backoff_max,
    });
    let acts = !actions.is_empty() || actions.restart_all;
    let resizes = ResizeRecord::of(state, pod).is_some_and(|told| {
        admission.is_some_and(|a| resize::is_unfinished(pod, &a.allocated, &told, &running(status)))
    });
    if unrecorded_exit || acts || resizes || has_untold_container(input, state, uid, status) {
        return (Outcome::Repaired, None);
    }
    let latest = input.now.plus(LONGEST_PAUSE);
    let due = [
        state.record::<QueueRecord>(uid.as_str()).map(|q| q.due),
        actions.next_due,
        // The queue is written behind: a pod's end of time must not hang on it.
        deadline::due(pod, record.started),
        Some(latest),
    ]
    .into_iter()
    .flatten()
    .min_by_key(|s| s.boottime_ms);
    (Outcome::Resumed, due)
}

fn running(status: &RuntimePodStatus) -> Vec<&str> {
    let running = status.containers.iter();
    running
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| c.name.as_str())
        .collect()
}

/// Returns whether the pod's status lacks the newest start or end of a container: the agent ended before it reported
/// it, with the machine for example.
fn has_untold_container(
    input: &RestoreInput<'_>,
    state: &State,
    uid: &PodUid,
    status: &RuntimePodStatus,
) -> bool {
    let Some(told) = state.record::<StatusRecord>(uid.as_str()) else {
        return false;
    };
    let records = Records::of(state, uid);
    let of_all_kinds = [
        &told.status.container_statuses,
        &told.status.init_container_statuses,
        &told.status.ephemeral_container_statuses,
    ];
    of_all_kinds.into_iter().flatten().flatten().any(|told| {
        let record = records.get(&told.name);
        let history = History::of(&told.name, status, record, input.listed_at, input.now);
        let runs = told.state.as_ref().is_some_and(|s| s.running.is_some());
        // With the runtime's name before it.
        let is_told = |id: &ContainerId| {
            let told = told.container_id.as_deref();
            told.and_then(|told| told.split_once("://"))
                .is_some_and(|(_, told)| told == id.as_str())
        };
        match &history.latest {
            Latest::Running(current) => !runs || !is_told(&current.id),
            Latest::Exited(exit) => runs || !is_told(&exit.container_id),
            Latest::NeverRan | Latest::Starting | Latest::Unknown(_) => false,
        }
    })
}

/// Moves every stamp that is the start or end of a duration onto the boot of `now`. Stamps that only record a time stay
/// as they are. Events after the last heartbeat of an earlier boot happened before the runtime was listed in this one,
/// however they are moved.
///
/// Containers whose start the runtime has forgotten get their end here, where their records still have the boot in
/// which that start was decided.
fn rebase(
    state: &State,
    runtime: &BTreeMap<PodUid, RuntimePodStatus>,
    heartbeat: Stamp,
    listed_at: Stamp,
    now: Stamp,
) -> (State, Transaction) {
    let mut transaction = Transaction::new();
    let move_due = |s: Stamp| s.rebase(heartbeat, now);
    let before_listing = listed_at.minus(Duration::from_millis(1));
    let move_stamp = |s: Stamp| {
        let moved = s.rebase(heartbeat, now);
        if s.boot != now.boot && moved.boottime_ms > before_listing.boottime_ms {
            before_listing
        } else {
            moved
        }
    };
    for (key, v) in &state.workers {
        let mut record = v.record.clone();
        record.queued = move_stamp(record.queued);
        record.started = record.started.map(move_stamp);
        if let WorkerPhase::Terminating {
            since, deadline, ..
        } = &mut record.phase
        {
            *since = move_stamp(*since);
            *deadline = move_due(*deadline);
        }
        if record != v.record {
            transaction = transaction.put(key, record);
        }
    }
    for (key, v) in &state.queue {
        let mut record = v.record.clone();
        record.due = move_due(record.due);
        if record != v.record {
            transaction = transaction.put(key, record);
        }
    }
    let shutdown = ShutdownRecord::of(state);
    for (key, v) in &state.containers {
        if !has_foreign_stamp(&v.record, now) {
            continue;
        }
        let is_stopped = shutdown.is_some_and(|shutdown| stopped_by(&shutdown, &v.record));
        let mut record = rebase_container(&v.record, is_stopped, move_stamp);
        if let Some((pod, end)) = end_before_reboot(runtime, key, &v.record, now) {
            transaction = transaction.journal(
                Some(&pod),
                "container ended",
                format!(
                    "{key} attempt {}: it may have run before the machine was started anew",
                    end.attempt
                ),
            );
            record.last_exit = Some(end);
        }
        if record != v.record {
            transaction = transaction.put(key, record);
        }
    }
    for (key, v) in &state.images {
        let mut record: ImageRecord = v.record.clone();
        for backoff in record.backoffs.values_mut() {
            backoff.since = move_stamp(backoff.since);
        }
        record.first_seen = move_stamp(record.first_seen);
        record.last_used = move_stamp(record.last_used);
        if record != v.record {
            transaction = transaction.put(key, record);
        }
    }
    for (key, v) in &state.probes {
        let mut record = v.record.clone();
        record.at = move_stamp(record.at);
        if record != v.record {
            transaction = transaction.put(key, record);
        }
    }
    for (key, v) in &state.signals {
        let record = SignalRecord {
            first: move_stamp(v.record.first),
            last: move_stamp(v.record.last),
        };
        if record != v.record {
            transaction = transaction.put(key, record);
        }
    }
    let mut rebased = state.clone();
    for mutation in &transaction.mutations {
        // The version does not matter: this copy is read here and dropped.
        rebased.apply(mutation, 0);
    }
    (rebased, transaction)
}

/// [`container_history::end_before_reboot`] of the container with record `key`, with its pod.
fn end_before_reboot(
    runtime: &BTreeMap<PodUid, RuntimePodStatus>,
    key: &str,
    record: &ContainerRecord,
    now: Stamp,
) -> Option<(PodUid, ExitRecord)> {
    let (pod, _) = key.rsplit_once('/')?;
    let pod = PodUid::new(pod);
    let listed = runtime.get(&pod)?;
    let end = container_history::end_before_reboot(record, listed, now)?;
    Some((pod, end))
}

/// Returns whether a record has a stamp of another boot than `now`: only such a record moves.
fn has_foreign_stamp(record: &ContainerRecord, now: Stamp) -> bool {
    let intent = record.intent.as_ref().map(|intent| intent.at);
    let exit = record.last_exit.as_ref().map(|exit| exit.finished);
    let backoff = record.backoff.map(|backoff| backoff.since);
    [intent, exit, backoff]
        .into_iter()
        .flatten()
        .any(|stamp| stamp.boot != now.boot)
}

/// Returns whether a container ended while the machine was shutting down. The end is by the runtime's clock: one that
/// seems to be a moment before the shutdown counts as well.
fn stopped_by(shutdown: &ShutdownRecord, record: &ContainerRecord) -> bool {
    let end = record.last_exit.as_ref().map(|exit| exit.finished);
    let from = shutdown.begun.minus(CLOCK_SKEW);
    end.is_some_and(|end| shutdown.is_in_force(end) && end.boottime_ms >= from.boottime_ms)
}

/// A container that ran when the machine went down, or that was stopped for it, starts without a back-off; one that had
/// ended before keeps what is left of its own.
fn rebase_container(
    record: &ContainerRecord,
    is_stopped: bool,
    move_stamp: impl Fn(Stamp) -> Stamp,
) -> ContainerRecord {
    let mut record = record.clone();
    if let Some(intent) = &mut record.intent {
        let moved = move_stamp(intent.at);
        let ended = record
            .last_exit
            .as_ref()
            .is_some_and(|exit| exit.container_id == intent.container_id);
        if moved.boot != intent.at.boot && (!ended || is_stopped) {
            // It ran when the machine went down: that is no crash of its own.
            record.backoff = None;
        }
        intent.at = moved;
    }
    if let Some(exit) = &mut record.last_exit {
        exit.finished = move_stamp(exit.finished);
    }
    if let Some(backoff) = &mut record.backoff {
        backoff.since = move_stamp(backoff.since);
    }
    record
}

#[cfg(test)]
mod tests;

//! History of a container: the runtime's facts and the agent's records, read together.
//!
//! The input is the [`PodStatus`] of the runtime and the [`ContainerRecord`]s. The output is a [`History`] per
//! container name that decisions are made on, and the mutations that keep ends which the runtime may forget.
//!
//! **Invariants:** a container that was `Created` and has no start intent never ran. An intent whose container is gone
//! from the runtime may have run and counts as ended with 137. So does an intent of an earlier boot whose container is
//! `Created`: a power loss may turn the runtime's state back, never the intent. A container with a recorded end is not
//! started, whatever the runtime shows. Restart counts only grow. An init container's end counts for the sandbox it ran
//! in only. A number whose container is known never to have run is given to the next start, so that no number is left
//! out. Each end is recorded once per container id.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ContainerStateTerminated;

use super::backoff::early::{self, Ends};
use super::restart_all::Restart;
use super::state::{
    BackoffRecord, ContainerRecord, ExitRecord, IntentRecord, State, Transaction, WorkerPhase,
    WorkerRecord, child_key,
};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use crate::types::{ContainerId, PodUid, Stamp};

/// Reason of an end that was not observed; upstream's `ContainerReasonStatusUnknown`.
pub const STATUS_UNKNOWN: &str = "ContainerStatusUnknown";
/// Exit code of an end that was not observed.
pub const STATUS_UNKNOWN_EXIT_CODE: i32 = 137;
/// Reason of an end with exit code 0 of a container that the agent stopped because the machine goes down, and that had work
/// left: it has not completed.
pub const NODE_SHUTDOWN: &str = "NodeShutdown";

/// Returns the exit code by which restarts and phases are decided. It differs from the container's own where it ended with
/// 0 because the machine went down.
pub fn judged_code(exit_code: i32, reason: Option<&str>) -> i32 {
    match reason {
        Some(NODE_SHUTDOWN) if exit_code == 0 => STATUS_UNKNOWN_EXIT_CODE,
        _ => exit_code,
    }
}

/// [`judged_code`] of a recorded end.
pub fn judged(exit: &ExitRecord) -> i32 {
    judged_code(exit.exit_code, Some(&exit.reason))
}

/// [`judged_code`] of an end in a status.
pub fn judged_end(end: &ContainerStateTerminated) -> i32 {
    judged_code(end.exit_code, end.reason.as_deref())
}
/// Message of the end of a container that is gone.
const LOST: &str =
    "The container could not be located in the runtime. The container used to be Running";
/// Message of the end of a container whose start the runtime has forgotten.
const TURNED_BACK: &str = "The node was restarted after the container's start, and the runtime does not know of that start";

/// The container records of one pod, by container name, which of their back-offs ended early, and the newest restart of
/// all containers.
#[derive(Clone, Debug, Default)]
pub struct Records<'a> {
    containers: BTreeMap<&'a str, &'a ContainerRecord>,
    ends: BTreeMap<&'a str, Ends>,
    restart: Option<Restart>,
}

impl<'a> Records<'a> {
    /// The records of a pod in a snapshot.
    pub fn of(state: &'a State, pod: &PodUid) -> Self {
        let prefix = child_key(pod, "");
        let containers = super::state::Record::table(state)
            .range(std::sync::Arc::<str>::from(prefix.as_str())..)
            .take_while(|(key, _)| key.starts_with(&prefix))
            .map(|(key, versioned): (&'a std::sync::Arc<str>, _)| {
                (&key[prefix.len()..], &versioned.record)
            })
            .collect();
        Self {
            containers,
            ends: early::all_of(state, pod),
            restart: Restart::of(state, pod),
        }
    }

    /// The same with another restart of all containers.
    #[must_use]
    pub fn with_restart(mut self, restart: Option<Restart>) -> Self {
        self.restart = restart;
        self
    }

    /// The newest restart of all containers.
    pub fn restart(&self) -> Option<&Restart> {
        self.restart.as_ref()
    }

    /// The record of one container.
    pub fn get(&self, name: &str) -> Option<&'a ContainerRecord> {
        self.containers.get(name).copied()
    }

    /// Returns whether the back-off after this end of a container ended early.
    pub fn is_back_off_over(&self, name: &str, exit: &ExitRecord) -> bool {
        let ends = self.ends.get(name);
        ends.is_some_and(|ends| ends.is_of(&exit.container_id))
    }

    /// Names that have a record.
    pub fn names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.containers.keys().copied()
    }
}

impl<'a> FromIterator<(&'a str, &'a ContainerRecord)> for Records<'a> {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a ContainerRecord)>>(iter: I) -> Self {
        Self {
            containers: iter.into_iter().collect(),
            ends: BTreeMap::new(),
            restart: None,
        }
    }
}

/// The newest attempt of a container that did or may have run.
#[derive(Clone, Debug, PartialEq)]
pub enum Latest<'a> {
    /// None ever ran.
    NeverRan,
    /// A start was decided after the runtime was listed; what came of it is not known yet.
    Starting,
    /// Running.
    Running(&'a ContainerStatus),
    /// The runtime does not know its state.
    Unknown(&'a ContainerStatus),
    /// Ended, seen or concluded (`ExitRecord::inferred`).
    Exited(ExitRecord),
}

/// Everything that is known of one container name.
#[derive(Clone, Debug, PartialEq)]
pub struct History<'a> {
    /// Newest attempt that did or may have run.
    pub latest: Latest<'a>,
    /// The end before `latest`.
    pub previous_exit: Option<ExitRecord>,
    /// Containers that were created and never started, newest first, without those that cannot be removed.
    pub created: Vec<&'a ContainerStatus>,
    /// Containers that the runtime shows as created although their end is recorded. They are removed and never started.
    pub stale: Vec<&'a ContainerStatus>,
    /// Running containers besides `latest`; there should be none.
    pub duplicates: Vec<&'a ContainerStatus>,
    /// Restart count as of now.
    pub restart_count: u32,
    /// CRI attempt, and restart count, of the next container to be created. `created` is removed before; one that
    /// cannot be removed keeps its number.
    pub next_attempt: u32,
}

impl<'a> History<'a> {
    /// Reads the history of `name`. `listed_at` is a moment before the runtime was listed: an intent decided at or
    /// after it proves nothing when its container is missing.
    pub fn of(
        name: &str,
        status: &'a PodStatus,
        record: Option<&ContainerRecord>,
        listed_at: Stamp,
        now: Stamp,
    ) -> Self {
        let (stuck, created): (Vec<_>, Vec<_>) = named(status, name)
            .filter(|c| c.state == ContainerState::Created)
            .partition(|c| c.is_stuck());
        let (stale, created): (Vec<_>, Vec<_>) =
            created.into_iter().partition(|c| has_ended(record, &c.id));
        let mut running: Vec<_> = named(status, name)
            .filter(|c| c.state == ContainerState::Running)
            .collect();
        running.sort_by_key(|c| std::cmp::Reverse((c.attempt, c.created_at_ns)));
        let unknown = named(status, name).find(|c| c.state == ContainerState::Unknown);
        let exits = exits(name, status, record, listed_at, now);
        let starting = record
            .and_then(|r| r.intent.as_ref())
            .is_some_and(|i| is_undecided(i, status, record, listed_at));

        let ran_attempt = named(status, name)
            .filter(|c| c.state != ContainerState::Created)
            .map(|c| c.attempt)
            .chain(exits.iter().map(|e| e.attempt))
            .max();
        let recorded = record.map_or(0, |r| r.restart_count);
        let restart_count = recorded.max(ran_attempt.unwrap_or(0));
        let ran = ran_attempt.is_some() || recorded > 0 || starting;
        let next_attempt = match ran {
            true if is_unused(record, &created, ran_attempt) => restart_count,
            true => restart_count.saturating_add(1),
            false => 0,
        };
        let taken = stuck.iter().map(|c| c.attempt.saturating_add(1)).max();
        let next_attempt = next_attempt.max(taken.unwrap_or(0));

        let mut exits = exits.into_iter();
        // An unknown one that is older than a known end has no say.
        let newest_exit = exits.as_slice().first().map(|e| e.attempt);
        let (latest, previous_exit) = if let Some(current) = running.first().copied() {
            (
                Latest::Running(current),
                exits.find(|e| e.container_id != current.id),
            )
        } else if starting {
            (Latest::Starting, exits.next())
        } else if let Some(current) =
            unknown.filter(|c| newest_exit.is_none_or(|attempt| attempt <= c.attempt))
        {
            (Latest::Unknown(current), exits.next())
        } else {
            match exits.next() {
                Some(newest) => (Latest::Exited(newest), exits.next()),
                None => (Latest::NeverRan, None),
            }
        };
        Self {
            latest,
            previous_exit,
            created,
            stale,
            duplicates: running.into_iter().skip(1).collect(),
            restart_count,
            next_attempt,
        }
    }

    /// Returns whether any attempt did or may have run.
    pub fn may_have_run(&self) -> bool {
        self.latest != Latest::NeverRan || self.restart_count > 0
    }

    /// Returns whether `latest` belongs to `sandbox`, the newest one. An init container's end counts for the sandbox it
    /// ran in only: [`forget_init`] drops the intents before a sandbox is made, so that a stored intent was decided for
    /// the newest one, even when the runtime has forgotten the container.
    pub fn is_of_sandbox(
        &self,
        sandbox: &ContainerId,
        status: &PodStatus,
        record: Option<&ContainerRecord>,
    ) -> bool {
        match &self.latest {
            Latest::NeverRan => false,
            Latest::Starting => true,
            Latest::Running(current) | Latest::Unknown(current) => current.sandbox_id == *sandbox,
            Latest::Exited(exit) => {
                let intended = record.and_then(|r| r.intent.as_ref());
                let of_sandbox =
                    |c: &ContainerStatus| c.id == exit.container_id && c.sandbox_id == *sandbox;
                intended.is_some_and(|i| i.container_id == exit.container_id)
                    || status.containers.iter().any(of_sandbox)
            }
        }
    }
}

fn named<'a>(status: &'a PodStatus, name: &str) -> impl Iterator<Item = &'a ContainerStatus> {
    status.containers.iter().filter(move |c| c.name == name)
}

/// Returns whether the recorded restart count was taken by a start that is known not to have happened. For this the
/// newest attempt that ran has to be the one before. In addition, its container is still in state `Created` (a start
/// that takes another one instead removes it first), or [`record_end`] dropped the intent with it ([`forget_init`]
/// drops it with a recorded end).
fn is_unused(
    record: Option<&ContainerRecord>,
    created: &[&ContainerStatus],
    ran_attempt: Option<u32>,
) -> bool {
    record.is_some_and(|r| {
        let never_ran = match &r.intent {
            None => true,
            Some(intent) => created.iter().any(|c| c.id == intent.container_id),
        };
        never_ran && ran_attempt.is_some_and(|ran| ran.checked_add(1) == Some(r.restart_count))
    })
}

/// Every known end of `name`, newest attempt first, one per container.
fn exits(
    name: &str,
    status: &PodStatus,
    record: Option<&ContainerRecord>,
    listed_at: Stamp,
    now: Stamp,
) -> Vec<ExitRecord> {
    let recorded = record.and_then(|r| r.last_exit.as_ref());
    let mut exits: Vec<ExitRecord> = named(status, name)
        .filter(|c| c.state == ContainerState::Exited)
        .map(|c| match recorded {
            Some(exit) if exit.container_id == c.id && !exit.inferred => exit.clone(),
            _ => observed(c, record, now),
        })
        .collect();
    if let Some(exit) = recorded
        && !status
            .containers
            .iter()
            .any(|c| c.id == exit.container_id && c.state != ContainerState::Created)
    {
        exits.push(exit.clone());
    }
    if let Some(exit) = vanished(status, record, listed_at, now) {
        exits.push(exit);
    }
    // Stable: of two with the same attempt the runtime's newest stays first.
    exits.sort_by_key(|e| std::cmp::Reverse(e.attempt));
    exits
}

/// An exited container of the runtime as a record.
fn observed(
    container: &ContainerStatus,
    record: Option<&ContainerRecord>,
    now: Stamp,
) -> ExitRecord {
    let not_before = record
        .and_then(|r| r.intent.as_ref())
        .filter(|i| i.container_id == container.id)
        .map(|i| i.at);
    ExitRecord {
        container_id: container.id.clone(),
        attempt: container.attempt,
        image: container.image.clone(),
        image_ref: container.image_ref.clone(),
        started_at_ns: container.started_at_ns,
        finished_at_ns: container.finished_at_ns,
        finished: exit_stamp(container.finished_at_ns, not_before, now),
        exit_code: container.exit_code,
        reason: if container.reason.is_empty() {
            if container.exit_code == 0 {
                "Completed".to_owned()
            } else {
                "Error".to_owned()
            }
        } else {
            container.reason.clone()
        },
        message: container.message.clone(),
        inferred: false,
    }
}

/// Returns whether an intent's container is missing only because the runtime was listed before it was started.
fn is_undecided(
    intent: &IntentRecord,
    status: &PodStatus,
    record: Option<&ContainerRecord>,
    listed_at: Stamp,
) -> bool {
    is_missing(intent, status, record) && intent.at.boot == listed_at.boot && {
        intent.at.boottime_ms >= listed_at.boottime_ms
    }
}

/// Returns whether the end of container `id` is recorded.
fn has_ended(record: Option<&ContainerRecord>, id: &ContainerId) -> bool {
    let exit = record.and_then(|r| r.last_exit.as_ref());
    exit.is_some_and(|exit| exit.container_id == *id)
}

fn is_missing(intent: &IntentRecord, status: &PodStatus, record: Option<&ContainerRecord>) -> bool {
    !has_ended(record, &intent.container_id)
        && !status
            .containers
            .iter()
            .any(|c| c.id == intent.container_id)
}

/// The end of a container that may have run and is gone.
fn vanished(
    status: &PodStatus,
    record: Option<&ContainerRecord>,
    listed_at: Stamp,
    now: Stamp,
) -> Option<ExitRecord> {
    let intent = record?.intent.as_ref()?;
    if !is_missing(intent, status, record) || is_undecided(intent, status, record, listed_at) {
        return None;
    }
    Some(unseen_end(intent, now, LOST))
}

/// Returns the end of a container that was to be started in an earlier boot and that the runtime shows as created in
/// this one. The intent is on the disk before the start is requested; the runtime's own state may not have reached the
/// disk before the power loss. So the container may have run, and if so it ended with its boot. `None` when the intent
/// is of the boot of `now`, when its end is recorded, or when the runtime shows anything else.
///
/// `record` must still have its stamps of that boot: [`Stamp::rebase`] makes them look like those of this one.
pub fn end_before_reboot(
    record: &ContainerRecord,
    status: &PodStatus,
    now: Stamp,
) -> Option<ExitRecord> {
    let intent = record.intent.as_ref()?;
    let turned_back = |c: &ContainerStatus| {
        c.id == intent.container_id && c.state == ContainerState::Created && !c.is_stuck()
    };
    let is_cut_off = intent.at.boot != now.boot
        && !has_ended(Some(record), &intent.container_id)
        && status.containers.iter().any(turned_back);
    is_cut_off.then(|| unseen_end(intent, now, TURNED_BACK))
}

fn unseen_end(intent: &IntentRecord, finished: Stamp, message: &str) -> ExitRecord {
    ExitRecord {
        container_id: intent.container_id.clone(),
        attempt: intent.attempt,
        image: String::new(),
        image_ref: String::new(),
        started_at_ns: 0,
        finished_at_ns: 0,
        finished,
        exit_code: STATUS_UNKNOWN_EXIT_CODE,
        reason: STATUS_UNKNOWN.to_owned(),
        message: message.to_owned(),
        inferred: true,
    }
}

/// Puts the runtime's end time, which is wall clock, onto the agent's clocks: never after `now`, never
/// before `not_before` (the start), however the wall clock jumped in between.
pub fn exit_stamp(finished_at_ns: i64, not_before: Option<Stamp>, now: Stamp) -> Stamp {
    if finished_at_ns <= 0 {
        return now;
    }
    let age_ms = now
        .wall_ms
        .saturating_sub(finished_at_ns.div_euclid(1_000_000));
    let age = std::time::Duration::from_millis(u64::try_from(age_ms).unwrap_or(0));
    let longest = not_before.map(|start| now.since(start));
    now.minus(longest.map_or(age, |longest| age.min(longest)))
}

/// Records every end that was not recorded yet, and the ends of containers that vanished.
///
/// `listed_at` is a moment before the runtime was listed. An empty transaction means nothing new. What
/// [`History`] says does not depend on whether this was committed; it keeps the ends for when the runtime
/// has forgotten them.
pub fn observe_exits(
    seen: &State,
    pod: &PodUid,
    status: &PodStatus,
    listed_at: Stamp,
    now: Stamp,
) -> Transaction {
    let records = Records::of(seen, pod);
    let names: BTreeSet<&str> = status
        .containers
        .iter()
        .map(|c| c.name.as_str())
        .chain(records.names())
        .collect();
    let mut transaction = Transaction::new();
    for name in names {
        let record = records.get(name);
        let Some(newest) = exits(name, status, record, listed_at, now)
            .into_iter()
            .next()
        else {
            continue;
        };
        if record.and_then(|r| r.last_exit.as_ref()) == Some(&newest) {
            continue;
        }
        transaction = transaction.and(put_exit(seen, pod, name, record, newest));
    }
    transaction
}

/// [`end_of`] a container by its ID; empty when `status` does not show it.
pub fn record_end(
    seen: &State,
    pod: &PodUid,
    status: &PodStatus,
    id: &ContainerId,
    now: Stamp,
) -> Transaction {
    let container = status.containers.iter().find(|c| c.id == *id);
    container.map_or_else(Transaction::new, |container| {
        end_of(seen, pod, container, now)
    })
}

/// Returns the facts to record before a container is removed from the runtime: the end of an exited one; that a created
/// one with a start intent never ran, unless its end is recorded. Empty when there is nothing to keep. The restart
/// count stays, for it was already reported; the next start has the same.
pub fn end_of(seen: &State, pod: &PodUid, container: &ContainerStatus, now: Stamp) -> Transaction {
    let id = &container.id;
    let key = child_key(pod, &container.name);
    let record = seen.record::<ContainerRecord>(&key);
    match container.state {
        ContainerState::Created => match record {
            Some(old)
                if old.intent.as_ref().is_some_and(|i| i.container_id == *id)
                    && !has_ended(record, id) =>
            {
                let mut new = old.clone();
                new.intent = None;
                Transaction::new()
                    .expect::<ContainerRecord>(seen, &key)
                    .put(&key, new)
            }
            _ => Transaction::new(),
        },
        ContainerState::Exited => {
            let newer_known = record.and_then(|r| r.last_exit.as_ref()).is_some_and(|e| {
                (e.container_id == *id && !e.inferred) || e.attempt > container.attempt
            });
            if newer_known {
                return Transaction::new();
            }
            put_exit(
                seen,
                pod,
                &container.name,
                record,
                observed(container, record, now),
            )
        }
        ContainerState::Running | ContainerState::Unknown => Transaction::new(),
    }
}

fn put_exit(
    seen: &State,
    pod: &PodUid,
    name: &str,
    record: Option<&ContainerRecord>,
    exit: ExitRecord,
) -> Transaction {
    let key = child_key(pod, name);
    let mut next = record.cloned().unwrap_or_default();
    next.restart_count = next.restart_count.max(exit.attempt);
    let why = format!(
        "{name} attempt {}: exit code {} ({})",
        exit.attempt, exit.exit_code, exit.reason
    );
    next.last_exit = Some(exit);
    Transaction::new()
        .expect::<ContainerRecord>(seen, &key)
        .put(&key, next)
        .journal(Some(pod), "container ended", why)
}

/// Makes init containers count as not yet run, before a new sandbox is made: their start intents are dropped, restart
/// counts and ends stay. Commit it when the old sandbox is stopped and created containers are removed, before their
/// left-overs in the runtime are removed and before the new sandbox is made. An intent without a known end gets an
/// unknown one: the runtime's own replaces it as long as the runtime has it. Empty when there is nothing to forget.
pub fn forget_init(seen: &State, pod: &PodUid, names: &[String]) -> Transaction {
    let mut transaction = Transaction::new();
    for name in names {
        let key = child_key(pod, name);
        let Some(record) = seen.record::<ContainerRecord>(&key) else {
            continue;
        };
        let Some(intent) = &record.intent else {
            continue;
        };
        let mut next = record.clone();
        next.intent = None;
        let ended = record
            .last_exit
            .as_ref()
            .is_some_and(|e| e.container_id == intent.container_id || e.attempt >= intent.attempt);
        if !ended {
            // The last moment at which it is known to have been alive.
            next.last_exit = Some(unseen_end(intent, intent.at, LOST));
        }
        transaction = transaction
            .expect::<ContainerRecord>(seen, &key)
            .put(&key, next)
            .journal(
                Some(pod),
                "init container forgotten",
                format!("{name} runs again in a new sandbox"),
            );
    }
    transaction
}

/// Records a start of container `name`, to be committed before it. Returns `None` when the pod's end is recorded: a
/// critical pod's admission may have recorded it while the start was under way. The commit is refused when the end is
/// recorded first.
pub fn record_start(
    seen: &State,
    pod: &PodUid,
    name: &str,
    intent: IntentRecord,
    backoff: Option<BackoffRecord>,
) -> Option<Transaction> {
    let worker = seen.record::<WorkerRecord>(pod.as_str());
    if worker.is_some_and(|worker| worker.phase != WorkerPhase::Sync) {
        return None;
    }
    let key = child_key(pod, name);
    let record = start_record(seen.record::<ContainerRecord>(&key), intent, backoff);
    let transaction = Transaction::new()
        .expect::<WorkerRecord>(seen, pod.as_str())
        .expect::<ContainerRecord>(seen, &key)
        .put(&key, record);
    Some(transaction)
}

/// Returns the record of a start: the restart count grows to the attempt, the intent is replaced, the back-off is the
/// one decided with the start. The last end is kept, and completed hooks of this container.
fn start_record(
    record: Option<&ContainerRecord>,
    intent: IntentRecord,
    backoff: Option<BackoffRecord>,
) -> ContainerRecord {
    let mut next = record.cloned().unwrap_or_default();
    next.restart_count = next.restart_count.max(intent.attempt);
    let own = format!("{}/", intent.container_id);
    next.hooks_done.retain(|hook| hook.starts_with(&own));
    next.intent = Some(intent);
    next.backoff = backoff;
    next
}

#[cfg(test)]
mod tests;

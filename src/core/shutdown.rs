//! Graceful shutdown of the node: the order and times of stops, and the record. Upstream: `nodeshutdown`.
//!
//! The input is the configured periods, priorities of pods, the record, the time. The output is groups, grace periods,
//! the next record, and the settings for `logind`. Pure.
//!
//! **Invariant:** a stored shutdown is valid in its own boot, until it is cancelled. One of an earlier boot is over.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::container_history::NODE_SHUTDOWN;
use super::pod_actions::policy_of;
use super::state::kinds::{self, Declared, Key, Kind};
use super::state::{
    AdmissionDecision, AdmissionRecord, PodRecord, State, StatusRecord, TerminationCause,
    Transaction, WorkerPhase, WorkerRecord,
};
use crate::kubeletconfig::PriorityPeriod;
use crate::types::containers::container_of;
use crate::types::pod::RestartPolicy;
use crate::types::runtime::{ContainerState, PodStatus};
use crate::types::{ContainerId, PodExt, PodSource, PodUid, Stamp};

/// Reason of a pod that comes while the node shuts down.
pub const NOT_ADMITTED: &str = "NodeShutdown";
/// Message of such a pod.
pub const NOT_ADMITTED_MESSAGE: &str = "Pod was rejected as the node is shutting down.";
/// Reason of a pod that was stopped by the shutdown.
pub const TERMINATED: &str = "Terminated";
/// Message of such a pod.
pub const TERMINATED_MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// Message of the node's Ready condition during a shutdown.
pub const NOT_READY: &str = "node is shutting down";
/// Reason of the events about it.
pub const EVENT: &str = "Shutdown";
/// Event message at the start.
pub const BEGUN_MESSAGE: &str = "Shutdown manager detected shutdown event";
/// Event message when it is cancelled.
pub const CANCELLED_MESSAGE: &str = "Shutdown manager detected shutdown cancellation";
/// Priority from which `shutdownGracePeriodCriticalPods` counts; upstream's `SystemCriticalPriority`.
const CRITICAL: i32 = 2_000_000_000;
/// After the last group: how long ends of killed containers are waited for, and statuses to be acknowledged. The
/// machine is asked to wait that much longer than the groups take.
pub const SETTLE: Duration = Duration::from_secs(2);

/// Times for the groups of pods, in the order in which they are stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Periods(Vec<PriorityPeriod>);

impl Periods {
    /// Makes the groups: `by_priority`, or two of `total` and the part of it that is kept for critical pods. `None` when
    /// nothing is configured. Periods count in whole seconds. Upstream: `newPodManager`, `migrateConfig`.
    pub fn new(
        total: Duration,
        critical: Duration,
        by_priority: &[PriorityPeriod],
    ) -> Option<Self> {
        let mut groups = by_priority.to_vec();
        if groups.is_empty() {
            let regular = total
                .checked_sub(critical)
                .filter(|_| !total.is_zero())?
                .as_secs();
            let seconds = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
            let group = |priority, n| PriorityPeriod {
                priority,
                seconds: seconds(n),
            };
            groups = vec![group(0, regular), group(CRITICAL, critical.as_secs())];
        }
        groups.sort_by_key(|group| group.priority);
        Some(Self(groups))
    }

    /// Returns the number of groups.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no group.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the time that all groups take together.
    pub fn total(&self) -> Duration {
        self.0.iter().map(period).sum()
    }

    /// Returns the index of a pod's group: the highest that its priority reaches, else the lowest. Upstream:
    /// `groupByPriority`.
    pub fn group_of(&self, pod: &Pod) -> usize {
        let priority = pod.spec_ref().priority.unwrap_or(0);
        let reached = self.0.iter().filter(|group| group.priority <= priority);
        reached.count().saturating_sub(1)
    }

    /// Returns the grace period of a pod in seconds: its own, at most its group's.
    pub fn grace(&self, pod: &Pod) -> i64 {
        let group = self
            .0
            .get(self.group_of(pod))
            .map_or(0, |group| group.seconds);
        let own = pod.spec_ref().termination_grace_period_seconds;
        own.map_or(group, |own| own.min(group))
    }

    /// Returns how long a group may take from `now`: its period, at most what is left of the shutdown.
    pub fn time_for(&self, group: usize, record: &ShutdownRecord, now: Stamp) -> Duration {
        let period = self.0.get(group).map_or(Duration::ZERO, period);
        period.min(record.deadline.until(now))
    }
}

impl Periods {
    /// Returns these groups in `time` together: each has the same part of it as before. Longer than configured, and
    /// without a configured time, they stay as they are. Groups count in whole seconds.
    #[must_use]
    pub fn fitted(&self, time: Duration) -> Self {
        let total = i128::from(self.total().as_secs());
        let time = i128::from(time.as_secs());
        if time >= total || total == 0 {
            return self.clone();
        }
        let fit = |group: &PriorityPeriod| PriorityPeriod {
            priority: group.priority,
            seconds: i64::try_from(i128::from(group.seconds) * time / total).unwrap_or(0),
        };
        Self(self.0.iter().map(fit).collect())
    }

    /// Returns the groups of a shutdown that may take `time`: those that are configured, fitted to it, else two of which
    /// the critical pods have a third.
    pub fn within(configured: Option<&Self>, time: Duration) -> Self {
        match configured {
            Some(periods) => periods.fitted(time),
            None => {
                let time = Duration::from_secs(time.as_secs().max(1));
                let critical = Duration::from_secs(time.as_secs() / 3);
                Self::new(time, critical, &[]).unwrap_or(Self(Vec::new()))
            }
        }
    }

    /// Returns the groups in their order.
    pub fn groups(&self) -> &[PriorityPeriod] {
        &self.0
    }
}

fn period(group: &PriorityPeriod) -> Duration {
    Duration::from_secs(u64::try_from(group.seconds).unwrap_or(0))
}

/// A shutdown on record, in table `objects`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShutdownRecord {
    /// Start of the shutdown.
    pub begun: Stamp,
    /// End of the last group's time.
    pub deadline: Stamp,
    /// Time at which the last group had ended.
    pub ended: Option<Stamp>,
    /// Time of the cancellation.
    pub cancelled: Option<Stamp>,
    /// Ordered by `holdfast drain-local`, so only that cancels it.
    #[serde(default)]
    pub local: bool,
}

impl Kind for ShutdownRecord {
    const DECLARED: Declared = kinds::SHUTDOWN;
}

impl ShutdownRecord {
    /// Returns its key.
    pub fn key() -> Key<Self> {
        Key::new("", "node")
    }

    /// Begins a shutdown.
    pub fn begin(periods: &Periods, now: Stamp) -> Self {
        Self {
            begun: now,
            deadline: now.plus(periods.total()),
            ended: None,
            cancelled: None,
            local: false,
        }
    }

    /// Returns how long its groups have together.
    pub fn time(&self) -> Duration {
        self.deadline.since(self.begun)
    }

    /// Returns the one in `state`. One that cannot be read counts as none: `logind` reports whether there is one.
    pub fn of(state: &State) -> Option<Self> {
        state.object(&Self::key())
    }

    /// Returns whether the node shuts down now.
    pub fn is_in_force(&self, now: Stamp) -> bool {
        self.begun.boot == now.boot && self.cancelled.is_none()
    }

    /// Stores it, with a line in the journal.
    pub fn transaction(&self, why: &str, now: Stamp) -> Transaction {
        let what = match self {
            Self {
                cancelled: Some(_), ..
            } => "shutdown cancelled",
            Self { ended: Some(_), .. } => "shutdown ended",
            _ => "shutdown began",
        };
        Transaction::new()
            .put_object(&Self::key(), self, now)
            .journal(None, what, why.to_owned())
    }
}

/// The state of the lock with which the machine's shutdowns wait for the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Inhibitor {
    /// No period is configured, or systemd is not PID 1: nothing announces shutdowns.
    #[default]
    Unused,
    /// There is no lock, against the configuration.
    Missing,
    /// A lock delays shutdowns.
    Held,
    /// The pods have ended: the machine may go down.
    Released,
}

/// A lock that delays shutdowns, with what is wrong with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// Its state.
    pub state: Inhibitor,
    /// The reason why there is none, or why it may be too short.
    pub problem: Option<String>,
}

/// The manager on record in table `objects`, for `holdfast dump shutdown`. Nothing is decided by it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagerRecord {
    /// Priority and seconds of each group; empty where none is configured.
    pub groups: Vec<(i32, i64)>,
    /// The lock.
    pub lock: Lock,
}

impl Kind for ManagerRecord {
    const DECLARED: Declared = kinds::SHUTDOWN_MANAGER;
}

impl ManagerRecord {
    /// Returns its key.
    pub fn key() -> Key<Self> {
        Key::new("", "node")
    }

    /// Returns the one in `state`, with its time.
    pub fn of(state: &State) -> Option<(Self, Stamp)> {
        let key = Self::key();
        let record = state.stored(&key)?;
        Some((record.content()?, record.at()))
    }

    /// Stores it; empty if it is stored already.
    pub fn transaction(&self, state: &State, now: Stamp) -> Transaction {
        let stored = Self::of(state);
        if stored.is_some_and(|(stored, at)| stored == *self && at.boot == now.boot) {
            return Transaction::new();
        }
        Transaction::new().put_object(&Self::key(), self, now)
    }
}

/// Returns why pods are stopped, for the record of their workers.
pub fn cause() -> TerminationCause {
    TerminationCause::Evicted {
        reason: TERMINATED.to_owned(),
        message: TERMINATED_MESSAGE.to_owned(),
    }
}

/// Marks the ends with exit code 0 of containers that were stopped because the machine goes down. One that would otherwise
/// have run on has not completed: a job that ends well when it is told to has not done its work.
pub fn mark_stopped(pod: &Pod, stopped: &[ContainerId], status: &mut PodStatus) {
    for container in &mut status.containers {
        let is_cut_short = || {
            let spec = container_of(pod, &container.name);
            spec.is_some_and(|spec| policy_of(pod, &spec) != RestartPolicy::Always)
        };
        if container.state == ContainerState::Exited
            && container.exit_code == 0
            && stopped.contains(&container.id)
            && is_cut_short()
        {
            container.reason = NODE_SHUTDOWN.to_owned();
        }
    }
}

/// Returns whether a worker stops, or has stopped, its pod for a shutdown.
pub fn is_stopped_by_shutdown(phase: &WorkerPhase) -> bool {
    match phase {
        WorkerPhase::Sync => false,
        WorkerPhase::Terminating { cause, .. }
        | WorkerPhase::Terminated { cause, .. }
        | WorkerPhase::Finished { cause, .. } => {
            matches!(cause, TerminationCause::Evicted { reason, .. } if reason == TERMINATED)
        }
    }
}

/// Treatment of a static pod at a start after the shutdown that ended it. Its manifest has no status, so it is as
/// wanted as before; the terminal status of a pod of the API server stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterShutdown {
    /// Continues: the records of its containers count.
    Resume,
    /// Was refused and never started: admitted anew.
    AdmitAgain,
}

/// Decides what becomes of a pod of `source` that a shutdown has stopped or refused. `None` = nothing special.
pub fn after_shutdown(
    source: PodSource,
    worker: &WorkerRecord,
    admission: Option<&AdmissionRecord>,
    shutdown: Option<&ShutdownRecord>,
    now: Stamp,
) -> Option<AfterShutdown> {
    let is_over = !shutdown.is_some_and(|record| record.is_in_force(now));
    if !source.is_static() || worker.deleted || !is_over {
        return None;
    }
    let refused = |record: &AdmissionRecord| matches!(&record.decision, AdmissionDecision::Rejected { reason, .. } if reason == NOT_ADMITTED);
    if admission.is_some_and(refused) {
        return Some(AfterShutdown::AdmitAgain);
    }
    is_stopped_by_shutdown(&worker.phase).then_some(AfterShutdown::Resume)
}

/// Returns the pods of the API server whose newest status it has not acknowledged.
pub fn untold<'a>(state: &State, pods: impl IntoIterator<Item = &'a PodUid>) -> Vec<&'a PodUid> {
    let is_untold = |uid: &PodUid| {
        let of_api = state
            .record::<PodRecord>(uid.as_str())
            .is_some_and(|pod| pod.source == PodSource::Api);
        let status = state.record::<StatusRecord>(uid.as_str());
        of_api && status.is_some_and(|status| status.acknowledged < status.version)
    };
    pods.into_iter().filter(|uid| is_untold(uid)).collect()
}

/// Returns how long `logind` has to let the node delay a shutdown when `current` is too short. Upstream: the condition
/// of `start`.
pub fn delay_to_ask_for(periods: &Periods, current: Duration) -> Option<Duration> {
    let wanted = periods.total() + SETTLE;
    (wanted > current).then_some(wanted)
}

/// Returns the drop-in for `logind.conf` that allows such a delay, in whole seconds.
pub fn delay_drop_in(delay: Duration) -> String {
    format!(
        "# Written by holdfast: shutdownGracePeriod is longer than InhibitDelayMaxSec was.\n\
         [Login]\nInhibitDelayMaxSec={}\n",
        delay.as_secs()
    )
}

/// Returns whether systemd's `SystemState` means that the machine is shutting down.
pub fn is_going_down(system_state: &str) -> bool {
    system_state == "stopping"
}

#[cfg(test)]
mod tests;

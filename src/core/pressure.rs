//! Pressure of the node: whether it is short of memory, disk or process ids, and which pod is evicted for it; the
//! decisions of upstream's `managerImpl.synchronize`.
//!
//! In: the configured thresholds, an observation of the node, the records, the time, the pods with their usage. Out:
//! the new records, the node's conditions, the thresholds to act on, the pod to evict with its message. Pure.
//!
//! **Invariant:** the records hold all that a decision needs of the past: since when a threshold has been met, and when
//! a condition was last seen. So a restart neither restarts a grace period nor changes a condition.
//!
//! **Invariant:** no pod is chosen without a threshold that is met, and never a static, mirror or critical one, or one
//! whose usage is unknown.

mod rank;
pub mod report;
#[cfg(test)]
mod tests;
mod texts;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::node_status::Pressure;
use super::state::{SignalRecord, State, Transaction};
use crate::kubeletconfig::{EvictionThreshold, KubeletConfiguration};
use crate::types::Stamp;

pub use rank::{Candidate, ContainerUse, PodUse, Space, Standing, ranked, standing, victim};
pub use texts::{annotations, attempting, message, why};

/// Pause between two observations; upstream's `evictionMonitoringPeriod`.
pub const PERIOD: Duration = Duration::from_secs(10);
/// A longer time without an observation does not count towards a grace period.
const MAX_GAP: Duration = Duration::from_secs(60);
/// Grace period of a hard eviction in seconds, and the least of a soft one; upstream's
/// `immediateEvictionGracePeriodSeconds`.
const LEAST_GRACE: i64 = 1;

/// A figure of the node that thresholds are set for. The order is that of the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Signal {
    /// `allocatableMemory.available`: what pods have left of the memory that they may use together.
    AllocatableMemory,
    /// `imagefs.available`.
    ImageFs,
    /// `imagefs.inodesFree`.
    ImageFsInodes,
    /// `memory.available`.
    Memory,
    /// `nodefs.available`: the file system of the root directory.
    NodeFs,
    /// `nodefs.inodesFree`.
    NodeFsInodes,
    /// `pid.available`.
    Pid,
}

impl Signal {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::AllocatableMemory,
        Self::ImageFs,
        Self::ImageFsInodes,
        Self::Memory,
        Self::NodeFs,
        Self::NodeFsInodes,
        Self::Pid,
    ];

    /// Upstream's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllocatableMemory => "allocatableMemory.available",
            Self::ImageFs => "imagefs.available",
            Self::ImageFsInodes => "imagefs.inodesFree",
            Self::Memory => "memory.available",
            Self::NodeFs => "nodefs.available",
            Self::NodeFsInodes => "nodefs.inodesFree",
            Self::Pid => "pid.available",
        }
    }

    /// The resource that messages name; upstream's `signalToResource`.
    pub const fn resource(self) -> &'static str {
        match self {
            Self::AllocatableMemory | Self::Memory => "memory",
            Self::ImageFs | Self::NodeFs => "ephemeral-storage",
            Self::ImageFsInodes | Self::NodeFsInodes => "inodes",
            Self::Pid => "pids",
        }
    }

    /// Returns whether the signal is about a disk.
    pub const fn is_of_disk(self) -> bool {
        matches!(self.condition(), Condition::Disk)
    }

    /// Returns the garbage that lies on the file system of the signal; `None` if there is none. Upstream:
    /// `buildSignalToNodeReclaimFuncs`.
    pub const fn garbage(self, disks: Disks) -> Option<Waste> {
        let (containers, images) = match (disks, self.is_of_images()) {
            _ if !self.is_of_disk() => (false, false),
            (Disks::One, _) | (Disks::Dedicated, true) => (true, true),
            (Disks::Dedicated, false) => (false, false),
            (Disks::Split, of_images) => (!of_images, of_images),
        };
        if !containers && !images {
            return None;
        }
        Some(Waste { containers, images })
    }

    /// True if writable layers lie on the file system of the signal.
    pub const fn has_layers(self, disks: Disks) -> bool {
        matches!(
            self.garbage(disks),
            Some(Waste {
                containers: true,
                ..
            })
        )
    }

    const fn is_of_images(self) -> bool {
        matches!(self, Self::ImageFs | Self::ImageFsInodes)
    }

    const fn is_of_inodes(self) -> bool {
        matches!(self, Self::ImageFsInodes | Self::NodeFsInodes)
    }

    /// True if its quantities are bytes.
    const fn is_of_bytes(self) -> bool {
        !self.is_of_inodes() && !matches!(self, Self::Pid)
    }

    const fn condition(self) -> Condition {
        match self {
            Self::AllocatableMemory | Self::Memory => Condition::Memory,
            Self::Pid => Condition::Pid,
            _ => Condition::Disk,
        }
    }
}

/// A condition of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Condition {
    Memory,
    Disk,
    Pid,
}

impl Condition {
    const ALL: [Self; 3] = [Self::Memory, Self::Disk, Self::Pid];

    const fn name(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pid => "PIDPressure",
        }
    }
}

/// The layout of the node's file systems.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Disks {
    /// Images and writable layers lie on the file system of the root directory.
    #[default]
    One,
    /// Images and writable layers lie on another one.
    Dedicated,
    /// Images lie on another one, writable layers on that of the root directory. Upstream: `KubeletSeparateDiskGC`.
    Split,
}

impl Disks {
    /// Returns the layout by the devices of the root directory, of images, and of writable layers where they are known.
    pub fn of(root: u64, images: u64, layers: Option<u64>) -> Self {
        match layers {
            _ if root == images => Self::One,
            Some(layers) if layers == root => Self::Split,
            _ => Self::Dedicated,
        }
    }
}

/// Garbage that is removed before a pod is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waste {
    /// Dead containers and sandboxes.
    pub containers: bool,
    /// Images that nothing needs.
    pub images: bool,
}

impl Waste {
    /// Returns true if all of `other` is part of it.
    pub const fn covers(self, other: Self) -> bool {
        (self.containers || !other.containers) && (self.images || !other.images)
    }
}

/// One observed figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Available.
    pub available: u64,
    /// In all.
    pub capacity: u64,
}

/// One observation of the node. A figure that could not be read is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observations {
    /// By signal.
    pub figures: BTreeMap<Signal, Figure>,
    /// The layout of file systems.
    pub disks: Disks,
}

/// A configured threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    /// The signal.
    pub signal: Signal,
    /// The threshold is met while less than this is available.
    pub value: EvictionThreshold,
    /// Time for which it has to be met before pods are evicted; `None` for a hard threshold.
    pub grace: Option<Duration>,
    /// Amount that has to be available beyond the threshold after an eviction.
    pub minimum_reclaim: Option<EvictionThreshold>,
}

impl Threshold {
    /// Key of the threshold's record. A changed threshold has another one, so that its grace period starts anew.
    pub fn key(&self) -> String {
        let (signal, value) = (self.signal.name(), self.value);
        match self.grace {
            None => format!("{signal}<{value}"),
            Some(grace) => format!("{signal}<{value} for {}s", grace.as_secs()),
        }
    }

    fn is_soft(&self) -> bool {
        self.grace.is_some()
    }

    /// Returns whether less than the threshold is available; if it was `acted_on`, less than the threshold and its
    /// minimum reclaim.
    pub fn is_met(&self, figure: Figure, acted_on: bool) -> bool {
        let reclaim = self.minimum_reclaim.filter(|_| acted_on);
        let more = reclaim.map_or(0, |reclaim| reclaim.of(figure.capacity));
        figure.available < self.value.of(figure.capacity).saturating_add(more)
    }

    /// Returns whether the threshold was past its grace period when it was last observed.
    fn was_acted_on(&self, record: &SignalRecord) -> bool {
        record.last.since(record.first) >= self.grace.unwrap_or_default()
    }

    /// Grace period in seconds of a pod that is evicted for this threshold. `max` is `evictionMaxPodGracePeriod`, `own`
    /// the pod's.
    pub fn pod_grace(&self, max: i64, own: Option<i64>) -> i64 {
        if self.is_soft() {
            own.map_or(max, |own| own.min(max)).max(LEAST_GRACE)
        } else {
            LEAST_GRACE
        }
    }

    /// Memory first, then hard before soft, then by name. Upstream's `byEvictionPriority` orders memory alone.
    fn order(&self) -> (bool, bool, Signal, Duration) {
        let is_other = self.signal.condition() != Condition::Memory;
        let grace = self.grace.unwrap_or_default();
        (is_other, self.is_soft(), self.signal, grace)
    }
}

/// Eviction settings of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Thresholds.
    pub thresholds: Vec<Threshold>,
    /// `evictionPressureTransitionPeriod`: how long a condition outlives its last observation.
    pub transition: Duration,
    /// `evictionMaxPodGracePeriod`, in seconds.
    pub max_pod_grace: i64,
}

impl Rules {
    /// The thresholds of a configuration. A threshold of 0 is none, and a soft one needs a grace period. The memory of
    /// all pods together has the hard threshold of `memory.available` while it is enforced. Upstream:
    /// `ParseThresholdConfig` with `addAllocatableThresholds`.
    pub fn of(kubelet: &KubeletConfiguration) -> Self {
        let mut thresholds = Vec::new();
        let none = EvictionThreshold::Quantity(0);
        for signal in Signal::ALL {
            let name = signal.name();
            let minimum_reclaim = kubelet.eviction_minimum_reclaim.get(name).copied();
            let given = |of: &BTreeMap<String, EvictionThreshold>| {
                of.get(name).copied().filter(|value| *value != none)
            };
            let threshold = |value, grace| Threshold {
                signal,
                value,
                grace,
                minimum_reclaim,
            };
            let hard = given(&kubelet.eviction_hard);
            thresholds.extend(hard.map(|value| threshold(value, None)));
            let grace = kubelet.eviction_soft_grace_period.get(name).copied();
            if let (Some(value), Some(grace)) = (given(&kubelet.eviction_soft), grace) {
                thresholds.push(threshold(value, Some(grace)));
            }
        }
        if kubelet.enforce_node_allocatable.iter().any(|e| e == "pods") {
            let memory = thresholds
                .iter()
                .find(|t| t.signal == Signal::Memory && !t.is_soft());
            let copy = memory.map(|memory| Threshold {
                signal: Signal::AllocatableMemory,
                ..*memory
            });
            let is_given = |t: &Threshold| t.signal == Signal::AllocatableMemory;
            if !thresholds.iter().any(is_given) {
                thresholds.extend(copy);
            }
        }
        Self {
            thresholds,
            transition: kubelet.eviction_pressure_transition_period,
            max_pod_grace: i64::from(kubelet.eviction_max_pod_grace_period),
        }
    }

    /// Returns whether less than twice a hard threshold of memory is available, so that the next observation should
    /// come soon.
    pub fn is_close(&self, observed: &Observations) -> bool {
        let memory = |t: &&Threshold| t.signal.condition() == Condition::Memory && !t.is_soft();
        self.thresholds.iter().filter(memory).any(|threshold| {
            observed
                .figures
                .get(&threshold.signal)
                .is_some_and(|figure| {
                    let least = threshold.value.of(figure.capacity);
                    figure.available < least.saturating_mul(2)
                })
        })
    }
}

/// The records of table `signals`: of thresholds by [`Threshold::key`], of conditions by their names. A condition is True
/// while it has a record.
pub type Signals = BTreeMap<String, SignalRecord>;

/// Returns the records of a state.
pub fn on_record(state: &State) -> Signals {
    let records = state.with_prefix::<SignalRecord>("");
    records
        .map(|(key, record)| (key.to_string(), record.clone()))
        .collect()
}

/// Returns the records that an agent starts with, moved to this boot. `heartbeat` is the last sign of life of the
/// previous agent. A condition that was last seen the transition period ago or earlier is over, however long the node
/// was not observed.
pub fn at_start(state: &State, transition: Duration, heartbeat: Stamp, now: Stamp) -> Signals {
    let rebased = on_record(state).into_iter().map(|(key, record)| {
        let first = record.first.rebase(heartbeat, now);
        let last = record.last.rebase(heartbeat, now);
        (key, SignalRecord { first, last })
    });
    let is_condition = |key: &str| Condition::ALL.iter().any(|of| of.name() == key);
    rebased
        .filter(|(key, record)| !is_condition(key) || now.since(record.last) < transition)
        .collect()
}

/// Returns the conditions that the records hold: they stand until the node was observed again.
pub fn pressure_of(signals: &Signals) -> Pressure {
    let has = |condition: Condition| signals.contains_key(condition.name());
    Pressure {
        memory: has(Condition::Memory),
        disk: has(Condition::Disk),
        pid: has(Condition::Pid),
    }
}

/// Result of an observation.
#[derive(Clone, Debug, PartialEq)]
pub struct Assessment {
    /// The new records.
    pub signals: Signals,
    /// The node's conditions.
    pub pressure: Pressure,
    /// Thresholds that are past their grace period, the most urgent first.
    pub acting: Vec<Threshold>,
}

/// Compares an observation with the thresholds. A threshold whose figure is absent keeps its record and its condition and
/// is not acted on. Upstream: `thresholdsMet`, `thresholdsFirstObservedAt`, `nodeConditionsLastObservedAt`,
/// `thresholdsMetGracePeriod`.
pub fn assess(rules: &Rules, known: &Signals, observed: &Observations, now: Stamp) -> Assessment {
    let mut signals = Signals::new();
    let mut acting = Vec::new();
    let (mut met, mut unknown) = (BTreeSet::new(), BTreeSet::new());
    for threshold in &rules.thresholds {
        let key = threshold.key();
        let before = known.get(&key);
        let Some(figure) = observed.figures.get(&threshold.signal) else {
            if let Some(before) = before {
                signals.insert(key, before.clone());
                unknown.insert(threshold.signal.condition());
            }
            continue;
        };
        let before = before.filter(|record| now.since(record.last) <= MAX_GAP);
        let acted_on = before.is_some_and(|record| threshold.was_acted_on(record));
        if !threshold.is_met(*figure, acted_on) {
            continue;
        }
        let first = before.map_or(now, |record| record.first);
        signals.insert(key, SignalRecord { first, last: now });
        met.insert(threshold.signal.condition());
        if now.since(first) >= threshold.grace.unwrap_or_default() {
            acting.push(*threshold);
        }
    }
    for condition in Condition::ALL {
        let before = known.get(condition.name());
        let record = if met.contains(&condition) {
            Some(SignalRecord {
                first: before.map_or(now, |record| record.first),
                last: now,
            })
        } else {
            let is_recent = |r: &&SignalRecord| now.since(r.last) < rules.transition;
            let stays = |r: &&SignalRecord| unknown.contains(&condition) || is_recent(r);
            before.filter(stays).cloned()
        };
        signals.extend(record.map(|record| (condition.name().to_owned(), record)));
    }
    acting.sort_by_key(Threshold::order);
    Assessment {
        pressure: pressure_of(&signals),
        signals,
        acting,
    }
}

/// Returns what has to be committed for the records in `state` to become `signals`, as observed at `now`. The time of the
/// last observation is written once a [`PERIOD`], and at once when it is the last one for now or ends a grace period.
pub fn changes(rules: &Rules, state: &State, signals: &Signals, now: Stamp) -> Transaction {
    let stored = on_record(state);
    let graces: BTreeMap<String, &Threshold> =
        rules.thresholds.iter().map(|t| (t.key(), t)).collect();
    let mut transaction = Transaction::new();
    for (key, record) in signals {
        let was_acted_on = |of: &SignalRecord| graces.get(key).is_some_and(|t| t.was_acted_on(of));
        let is_current = |old: &SignalRecord| {
            let is_exact = old.last == record.last;
            let is_recent = record.last.since(old.last) < PERIOD && record.last == now;
            old.first == record.first
                && (is_exact || (is_recent && was_acted_on(old) == was_acted_on(record)))
        };
        if !stored.get(key).is_some_and(is_current) {
            transaction = transaction.put(key, record.clone());
        }
    }
    for key in stored.keys().filter(|key| !signals.contains_key(*key)) {
        transaction = transaction.delete::<SignalRecord>(key);
    }
    transaction
}

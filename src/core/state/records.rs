//! The records, as they are on disk: plain structs, no optional serde attributes, Kubernetes objects as
//! JSON bytes. Any change of a struct here means a new record version and a step in `migrations/`.
//!
//! Each record has a `class`: the durability that a change of it needs. Facts that a later decision must not contradict
//! are durable, facts that the runtime or the next tick repeats are relaxed.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as api;
use serde::{Deserialize, Serialize};

use super::Durability::{self, Durable, Relaxed};
use crate::types::cpu_set::CpuSet;
use crate::types::runtime::PodStatus as RuntimePodStatus;
use crate::types::{BootIdentity, ContainerId, Json, PodSource, PodUid, Stamp};

/// Facts about the store itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetaRecord {
    /// Schema step the store is at.
    pub schema: u32,
    /// Node the store belongs to.
    pub node_name: String,
    /// `/etc/machine-id` of the machine the store belongs to.
    pub machine_id: String,
    /// Boot of the last agent that wrote here.
    pub boot: BootIdentity,
    /// Counts starts of the agent.
    pub generation: u64,
    /// True if the last agent exited cleanly.
    pub clean_shutdown: bool,
    /// Last sign of life, every 10 s.
    pub heartbeat: Stamp,
    /// Epoch, see [`EpochRecord`].
    pub epoch: EpochRecord,
}

impl MetaRecord {
    pub(super) fn class(previous: Option<&Self>, next: Option<&Self>) -> Durability {
        match (previous, next) {
            (Some(old), Some(new)) => {
                let mut aged = old.clone();
                aged.heartbeat = new.heartbeat;
                if aged == *new { Relaxed } else { Durable }
            }
            _ => Durable,
        }
    }
}

/// A store that came from a backup, from another machine, or was rebuilt starts a new epoch: what runs is
/// adopted, nothing else starts until its source confirms the UID.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochRecord {
    /// Counts up.
    pub number: u64,
    /// Start time.
    pub since: Stamp,
    /// Reason for its beginning.
    pub reason: EpochReason,
}

/// Reason for which an epoch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EpochReason {
    /// The first store of this node.
    Fresh,
    /// The store was lost or could not be opened and was rebuilt.
    Rebuilt,
    /// The store comes from a backup.
    Restored,
    /// The store was made on another machine.
    OtherMachine,
}

/// A pod as its source wants it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    /// Source of the pod.
    pub source: PodSource,
    /// File path or URL for static pods, empty for the API.
    pub origin: String,
    /// Desired pod as received, with the source's annotations.
    pub pod: Json<api::Pod>,
    /// First seen by this node.
    pub first_seen: Stamp,
    /// Epoch in which the source last confirmed it.
    pub confirmed_epoch: u64,
}

impl PodRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Durable
    }
}

/// A mirror pod in the API server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MirrorRecord {
    /// UID of the mirror pod.
    pub uid: PodUid,
    /// Hash of the static pod it stands for.
    pub hash: String,
}

impl MirrorRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// Admission decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdmissionRecord {
    /// Decision of the admission.
    pub decision: AdmissionDecision,
    /// Resources allocated per container: name → resource → quantity.
    pub allocated: BTreeMap<String, BTreeMap<String, String>>,
    /// When, and in which boot.
    pub at: Stamp,
}

/// The decision of [`AdmissionRecord`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdmissionDecision {
    /// It may run here.
    Admitted,
    /// It may not.
    Rejected {
        /// CamelCase reason.
        reason: String,
        /// For a human.
        message: String,
    },
}

impl AdmissionRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Durable
    }
}

/// State of a pod's worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// `<name>_<namespace>`, for the FIFO of static pods.
    pub full_name: String,
    /// First sight by a worker; orders the FIFO.
    pub queued: Stamp,
    /// Time of the pod's first start (its sandbox was about to be made); `None` = not yet started.
    pub started: Option<Stamp>,
    /// The phase.
    pub phase: WorkerPhase,
    /// The pod is gone from its source.
    pub deleted: bool,
    /// The same UID came back while terminating.
    pub restart_requested: bool,
    /// Known from the runtime only.
    pub runtime_only: bool,
}

/// Phase of a worker: one way per UID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerPhase {
    /// Keeps the pod running.
    Sync,
    /// Stops the pod.
    Terminating {
        /// Since when.
        since: Stamp,
        /// Current grace period, in seconds; only shrinks.
        grace_seconds: i64,
        /// Time at which the remaining containers are killed.
        deadline: Stamp,
        /// Why.
        cause: TerminationCause,
    },
    /// Nothing runs any more; cleans up.
    Terminated {
        /// Since when.
        since: Stamp,
        /// Cause of the termination.
        cause: TerminationCause,
    },
    /// Cleaned up; remembered so that it is not started again.
    Finished {
        /// Since when.
        since: Stamp,
        /// Cause of the termination.
        cause: TerminationCause,
    },
}

/// Cause of a pod's termination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminationCause {
    /// deletionTimestamp, or gone from its source.
    Deleted,
    /// Its own containers are finished.
    Completed,
    /// Evicted; reason and message go to the API status.
    Evicted {
        /// CamelCase reason.
        reason: String,
        /// For a human.
        message: String,
    },
    /// Runs, but no source wants it.
    Orphan,
}

impl WorkerRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Durable
    }
}

/// Next due time of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueueRecord {
    /// When.
    pub due: Stamp,
    /// Why.
    pub why: String,
}

impl QueueRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// One container of a pod spec, across its restarts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// Restart count of the newest attempt.
    pub restart_count: u32,
    /// The newest start that was decided. Committed between Create and Start.
    pub intent: Option<IntentRecord>,
    /// The newest end that was seen.
    pub last_exit: Option<ExitRecord>,
    /// Crash back-off.
    pub backoff: Option<BackoffRecord>,
    /// Hooks that completed, as `<container id>/<hook>`.
    pub hooks_done: Vec<String>,
}

impl ContainerRecord {
    /// A container that was never started.
    pub fn new() -> Self {
        Self {
            restart_count: 0,
            intent: None,
            last_exit: None,
            backoff: None,
            hooks_done: Vec::new(),
        }
    }

    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Durable
    }
}

impl Default for ContainerRecord {
    fn default() -> Self {
        Self::new()
    }
}

/// The decision to start one container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IntentRecord {
    /// The created container.
    pub container_id: ContainerId,
    /// CRI attempt it was created with.
    pub attempt: u32,
    /// Hash of the container spec.
    pub hash: String,
    /// Time of the decision.
    pub at: Stamp,
}

/// The end of one container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// The container.
    pub container_id: ContainerId,
    /// Its attempt.
    pub attempt: u32,
    /// Image as the spec named it.
    pub image: String,
    /// Image reference the runtime resolved.
    pub image_ref: String,
    /// Runtime's start time, nanoseconds since the Unix epoch.
    pub started_at_ns: i64,
    /// Runtime's end time, nanoseconds since the Unix epoch.
    pub finished_at_ns: i64,
    /// The end on the agent's clocks; what back-offs count from.
    pub finished: Stamp,
    /// Exit code.
    pub exit_code: i32,
    /// CamelCase reason.
    pub reason: String,
    /// Termination message.
    pub message: String,
    /// The end was concluded, not observed: the container vanished.
    pub inferred: bool,
}

/// Current back-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackoffRecord {
    /// Its length, in milliseconds.
    pub duration_ms: u64,
    /// Of an image: the failure it counts from. Of a container: when the restart it allowed was decided;
    /// the wait itself counts from the container's end.
    pub since: Stamp,
}

/// Runtime's last view of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlegRecord {
    /// The status.
    pub status: RuntimePodStatus,
}

impl PlegRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// The API status of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusRecord {
    /// Name of the pod, for when its spec is gone.
    pub name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// The status.
    pub status: Json<api::PodStatus>,
    /// Counts changes.
    pub version: u64,
    /// Version the API server acknowledged last.
    pub acknowledged: u64,
    /// Time of the last change.
    pub at: Stamp,
    /// The pod is finished on this node: nothing of it is left.
    pub finished: bool,
}

impl StatusRecord {
    fn is_terminal(&self) -> bool {
        self.finished
            || matches!(
                self.status.phase.as_deref(),
                Some("Succeeded") | Some("Failed")
            )
    }

    pub(super) fn class(_: Option<&Self>, next: Option<&Self>) -> Durability {
        match next {
            Some(new) if new.is_terminal() => Durable,
            _ => Relaxed,
        }
    }
}

/// A probe's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeRecord {
    /// Container the counters are about.
    pub container_id: ContainerId,
    /// Valid result: `Success`, `Failure` or `Unknown`.
    pub result: String,
    /// Newest raw result.
    pub last: String,
    /// Number of times in a row that `last` was seen.
    pub consecutive: u32,
    /// Time of the newest probe.
    pub at: Stamp,
}

impl ProbeRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// A volume of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Plugin, as `kubernetes.io/empty-dir`.
    pub plugin: String,
    /// Path on the host that containers get.
    pub path: String,
    /// Phase.
    pub phase: VolumePhase,
    /// Start of the phase.
    pub at: Stamp,
}

/// Phase of a volume, recorded before each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumePhase {
    /// A mount was begun.
    Mounting,
    /// Usable.
    Mounted,
    /// An unmount was begun.
    Unmounting,
}

impl VolumeRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Durable
    }
}

/// An image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Reference the runtime resolved at the last pull by this agent.
    pub pulled_ref: Option<String>,
    /// Pull back-offs by pod UID (upstream's key is UID + image).
    pub backoffs: BTreeMap<PodUid, BackoffRecord>,
    /// First seen on this node.
    pub first_seen: Stamp,
    /// Last used by a container.
    pub last_used: Stamp,
}

impl ImageRecord {
    pub(super) fn class(previous: Option<&Self>, next: Option<&Self>) -> Durability {
        match (previous, next) {
            (Some(old), Some(new))
                if old.backoffs == new.backoffs && old.pulled_ref == new.pulled_ref =>
            {
                Relaxed
            }
            (None, Some(new)) if new.backoffs.is_empty() && new.pulled_ref.is_none() => Relaxed,
            (_, None) => Relaxed,
            _ => Durable,
        }
    }
}

/// An API object that is needed offline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectRecord {
    /// resourceVersion.
    pub resource_version: String,
    /// True if `data` is ciphertext.
    pub encrypted: bool,
    /// JSON, or nonce and ciphertext of it.
    pub data: Vec<u8>,
    /// Time of receipt.
    pub at: Stamp,
}

impl ObjectRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// State of a part of the agent. Its kind declares how durable it is, and with whom it is deleted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FactRecord {
    /// Version of the layout of `data`, which the kind declares.
    pub layout: u16,
    /// Text that is read without `data`; empty for most kinds.
    pub mark: String,
    /// JSON.
    pub data: Vec<u8>,
    /// Time of the change.
    pub at: Stamp,
}

impl FactRecord {
    /// Returns a record of layout 1, as JSON.
    #[cfg(test)]
    pub(crate) fn of<T: Serialize + ?Sized>(fact: &T, at: Stamp) -> Self {
        Self {
            layout: 1,
            mark: String::new(),
            data: serde_json::to_vec(fact).unwrap_or_default(),
            at,
        }
    }

    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// An eviction signal over its threshold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SignalRecord {
    /// First observed.
    pub first: Stamp,
    /// Last observed.
    pub last: Stamp,
}

impl SignalRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JournalRecord {
    /// When.
    pub at: Stamp,
    /// Agent generation that wrote it; a change between two lines is a restart.
    pub generation: u64,
    /// The pod, if it is about one.
    pub pod: Option<PodUid>,
    /// Description of the change.
    pub what: String,
    /// Why.
    pub why: String,
}

impl JournalRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// Last state of a configuration source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// Path or URL.
    pub location: String,
    /// Last successful read.
    pub read: Stamp,
    /// Error of the newest read, empty when it succeeded.
    pub error: String,
    /// Origins (files) whose newest content is broken, with the error; their pods are kept as they are.
    pub broken: BTreeMap<String, String>,
}

impl SourceRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Relaxed
    }
}

/// CPUs that the containers of a pod have for themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusRecord {
    /// CPUs by container.
    pub containers: BTreeMap<String, CpuSet>,
}

impl CpusRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Durable
    }
}

/// Memory that the containers of a pod have on NUMA nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRecord {
    /// Blocks by container.
    pub containers: BTreeMap<String, Vec<MemoryBlock>>,
}

/// Memory of one type on some NUMA nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBlock {
    /// `memory` or `hugepages-<size>`.
    pub resource: String,
    /// The nodes, sorted.
    pub nodes: Vec<u32>,
    /// Amount; bytes that a later container of the pod reuses count there.
    pub bytes: u64,
}

impl MemoryRecord {
    pub(super) fn class(_: Option<&Self>, _: Option<&Self>) -> Durability {
        Durable
    }
}

/// CPUs and NUMA nodes that a container may use: those last applied to it and, while others are sent, those as well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusetRecord {
    /// The container.
    pub container_id: ContainerId,
    /// CPUs; empty when none were sent.
    pub cpus: CpuSet,
    /// NUMA nodes; empty when none were sent.
    pub nodes: CpuSet,
}

impl CpusetRecord {
    /// CPUs that a container gets are on the disk before the runtime gets them. A record that it has fewer may be lost.
    pub(super) fn class(previous: Option<&Self>, next: Option<&Self>) -> Durability {
        match (previous, next) {
            (Some(old), Some(new))
                if old.container_id == new.container_id
                    && new.cpus.without(&old.cpus).is_empty() =>
            {
                Relaxed
            }
            (_, None) => Relaxed,
            _ => Durable,
        }
    }
}

/// Key of a container or volume record.
pub fn child_key(uid: &PodUid, name: &str) -> String {
    format!("{uid}/{name}")
}

/// Key of a journal record.
pub fn journal_key(sequence: u64) -> String {
    format!("{sequence:016x}")
}

//! The records of schema 1, frozen. Kubernetes objects are JSON bytes, pod UIDs and container ids strings.
//! A test compares them with the live types for as long as the live schema is 1.

#![allow(missing_docs, reason = "the live record types document the fields")]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub boot: u64,
    pub boottime_ms: i64,
    pub wall_ms: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    pub kernel_boot_id: String,
    pub pid1_start: u64,
    pub runtime_state: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    pub schema: u32,
    pub node_name: String,
    pub machine_id: String,
    pub boot: Boot,
    pub generation: u64,
    pub clean_shutdown: bool,
    pub heartbeat: Stamp,
    pub epoch: Epoch,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Epoch {
    pub number: u64,
    pub since: Stamp,
    pub reason: EpochReason,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EpochReason {
    Fresh,
    Rebuilt,
    Restored,
    OtherMachine,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    File,
    Http,
    Api,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    pub source: Source,
    pub origin: String,
    pub pod: Vec<u8>,
    pub first_seen: Stamp,
    pub confirmed_epoch: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mirror {
    pub uid: String,
    pub hash: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    pub decision: Decision,
    pub allocated: BTreeMap<String, BTreeMap<String, String>>,
    pub at: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decision {
    Admitted,
    Rejected { reason: String, message: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    pub full_name: String,
    pub queued: Stamp,
    pub started: Option<Stamp>,
    pub phase: Phase,
    pub deleted: bool,
    pub restart_requested: bool,
    pub runtime_only: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    Sync,
    Terminating {
        since: Stamp,
        grace_seconds: i64,
        deadline: Stamp,
        cause: Cause,
    },
    Terminated {
        since: Stamp,
        cause: Cause,
    },
    Finished {
        since: Stamp,
        cause: Cause,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    Deleted,
    Completed,
    Evicted { reason: String, message: String },
    Orphan,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    pub due: Stamp,
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    pub restart_count: u32,
    pub intent: Option<Intent>,
    pub last_exit: Option<Exit>,
    pub backoff: Option<Backoff>,
    pub hooks_done: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    pub container_id: String,
    pub attempt: u32,
    pub hash: String,
    pub at: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    pub container_id: String,
    pub attempt: u32,
    pub image: String,
    pub image_ref: String,
    pub started_at_ns: i64,
    pub finished_at_ns: i64,
    pub finished: Stamp,
    pub exit_code: i32,
    pub reason: String,
    pub message: String,
    pub inferred: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff {
    pub duration_ms: u64,
    pub since: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContainerState {
    Created,
    Running,
    Exited,
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxState {
    Ready,
    NotReady,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxStatus {
    pub id: String,
    pub attempt: u32,
    pub state: SandboxState,
    pub created_at_ns: i64,
    pub ips: Vec<String>,
    pub host_network: Option<bool>,
    pub runtime_handler: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerStatus {
    pub id: String,
    pub name: String,
    pub attempt: u32,
    pub sandbox_id: String,
    pub state: ContainerState,
    pub created_at_ns: i64,
    pub image: String,
    pub image_ref: String,
    pub hash: String,
    pub started_at_ns: i64,
    pub finished_at_ns: i64,
    pub exit_code: i32,
    pub reason: String,
    pub message: String,
    pub log_path: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pleg {
    pub uid: String,
    pub name: String,
    pub namespace: String,
    pub ips: Vec<String>,
    pub sandboxes: Vec<SandboxStatus>,
    pub containers: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub name: String,
    pub namespace: String,
    pub status: Vec<u8>,
    pub version: u64,
    pub acknowledged: u64,
    pub at: Stamp,
    pub finished: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    pub container_id: String,
    pub result: String,
    pub last: String,
    pub consecutive: u32,
    pub at: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    pub plugin: String,
    pub path: String,
    pub phase: VolumePhase,
    pub at: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumePhase {
    Mounting,
    Mounted,
    Unmounting,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    pub pulled_ref: Option<String>,
    pub backoffs: BTreeMap<String, Backoff>,
    pub first_seen: Stamp,
    pub last_used: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    pub resource_version: String,
    pub encrypted: bool,
    pub data: Vec<u8>,
    pub at: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    pub first: Stamp,
    pub last: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    pub at: Stamp,
    pub generation: u64,
    pub pod: Option<String>,
    pub what: String,
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRead {
    pub location: String,
    pub read: Stamp,
    pub error: String,
    pub broken: BTreeMap<String, String>,
}

/// Decodes a payload of schema 1 and encodes it again with the frozen types: equal bytes mean that the
/// frozen types still describe them.
///
/// # Errors
/// When the payload is not a record of that table.
pub fn round_trip(table: u8, payload: &[u8]) -> Result<Vec<u8>, super::StepError> {
    use super::super::{Record, codec};
    let at = (table, String::new());
    let record = Record {
        version: 1,
        payload: payload.to_vec(),
    };
    macro_rules! by_table {
        ($($tag:literal => $type:ty),+ $(,)?) => {
            match table {
                $( $tag => codec::encode(&at, &codec::decode::<$type>(&at, &record, 1)?, 1).map(|r| r.payload), )+
                _ => Err(super::StepError::Version { table, key: String::new(), found: 0, expected: 1 }),
            }
        };
    }
    by_table!(
        1 => Meta, 2 => Pod, 3 => Mirror, 4 => Admission, 5 => Worker, 6 => Queue, 7 => Container,
        8 => Pleg, 9 => Status, 10 => Probe, 11 => Volume, 12 => Image, 13 => Object, 14 => Signal,
        15 => Journal, 16 => SourceRead,
    )
}

//! The records that schema 2 changes or adds, frozen.
#![allow(
    missing_docs,
    reason = "frozen: the live types say what the fields mean"
)]

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::step_0001::records::{ContainerState, SandboxStatus, Stamp};
use super::super::{Record, StepError, codec, step_0001};

/// State of a part of the agent, table `facts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    pub layout: u16,
    pub mark: String,
    pub data: Vec<u8>,
    pub at: Stamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinuxUser {
    pub uid: i64,
    pub gid: i64,
    pub supplemental_groups: Vec<i64>,
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
    pub user: Option<LinuxUser>,
}

/// Table `pleg`, version 2.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pleg {
    pub uid: String,
    pub name: String,
    pub namespace: String,
    pub ips: Vec<String>,
    pub sandboxes: Vec<SandboxStatus>,
    pub containers: Vec<ContainerStatus>,
}

/// [`step_0001::records::round_trip`] for schema 2.
///
/// # Errors
/// When the payload is not a record of that table.
pub fn round_trip(table: u8, payload: &[u8]) -> Result<Vec<u8>, StepError> {
    fn again<R: Serialize + DeserializeOwned>(
        table: u8,
        payload: &[u8],
        version: u16,
    ) -> Result<Vec<u8>, StepError> {
        let at = (table, String::new());
        let record = Record {
            version,
            payload: payload.to_vec(),
        };
        let decoded: R = codec::decode(&at, &record, version)?;
        codec::encode(&at, &decoded, version).map(|record| record.payload)
    }
    match table {
        super::PLEG => again::<Pleg>(table, payload, 2),
        super::FACTS => again::<Fact>(table, payload, 1),
        _ => step_0001::records::round_trip(table, payload),
    }
}

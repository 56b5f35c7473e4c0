//! Whether the agent mounted something at the path of a volume of its own, so that teardown tells it from what
//! somebody else mounted over it.
//!
//! For most plugins that goes without saying. An emptyDir is on disk or in memory, and has an [`ObjectRecord`]
//! `media/<uid>/<volume>` that is written with its first record and goes with its last.

use crate::core::state::{ObjectRecord, State, Transaction};
use crate::core::volumes::keys::MEDIA;
use crate::types::{PodUid, Stamp};

use super::{CONFIG_MAP, EMPTY_DIR};

const MOUNT: &str = "mount";
const PLAIN: &str = "plain";

/// What is the agent's at the path of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// A directory.
    Plain,
    /// A file system of memory.
    Mount,
    /// One of both: it is on record since before this was noted, or was taken over from the disk.
    Unknown,
}

/// Key of what is known of an emptyDir.
pub(super) fn key(uid: &PodUid, volume: &str) -> String {
    format!("{MEDIA}{uid}/{volume}")
}

/// Notes with the record of an emptyDir whether it is a mount.
pub(super) fn note(
    transaction: Transaction,
    uid: &PodUid,
    volume: &str,
    mounts: bool,
    at: Stamp,
) -> Transaction {
    let object = ObjectRecord {
        resource_version: if mounts { MOUNT } else { PLAIN }.to_owned(),
        encrypted: false,
        data: b"{}".to_vec(),
        at,
    };
    transaction.put(key(uid, volume), object)
}

/// What is known of a volume.
pub(super) fn of(seen: &State, uid: &PodUid, volume: &str, plugin: &str) -> Own {
    match plugin {
        CONFIG_MAP => Own::Plain,
        EMPTY_DIR => {
            let object = seen.record::<ObjectRecord>(&key(uid, volume));
            match object.map(|object| object.resource_version.as_str()) {
                Some(MOUNT) => Own::Mount,
                Some(PLAIN) => Own::Plain,
                _ => Own::Unknown,
            }
        }
        _ => Own::Mount,
    }
}

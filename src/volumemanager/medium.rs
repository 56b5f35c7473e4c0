//! Whether the agent mounted something at the path of a volume of its own, so that teardown tells it from what
//! somebody else mounted over it.
//!
//! For most plugins that goes without saying. An emptyDir is on disk or in memory, and has a record
//! `media/<uid>/<volume>` that is written with its first record and goes with its last.

use serde::{Deserialize, Serialize};

use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{State, Transaction};
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

/// Content of the record of an emptyDir; its version says what it is.
#[derive(Serialize, Deserialize)]
pub(super) struct Medium {}

impl Kind for Medium {
    const DECLARED: Declared = kinds::MEDIA;
}

/// Key of what is known of an emptyDir.
pub(super) fn key(uid: &PodUid, volume: &str) -> Key<Medium> {
    Key::new(uid.as_str(), volume)
}

/// Notes with the record of an emptyDir whether it is a mount.
pub(super) fn note(
    transaction: Transaction,
    uid: &PodUid,
    volume: &str,
    mounts: bool,
    at: Stamp,
) -> Transaction {
    let version = if mounts { MOUNT } else { PLAIN };
    transaction.put_version(&key(uid, volume), version, &Medium {}, at)
}

/// What is known of a volume.
pub(super) fn of(seen: &State, uid: &PodUid, volume: &str, plugin: &str) -> Own {
    match plugin {
        CONFIG_MAP => Own::Plain,
        EMPTY_DIR => {
            let key = key(uid, volume);
            match seen.stored(&key).map(|record| record.version()) {
                Some(MOUNT) => Own::Mount,
                Some(PLAIN) => Own::Plain,
                _ => Own::Unknown,
            }
        }
        _ => Own::Mount,
    }
}

//! Detects directories whose file system is not mounted.
//!
//! A disk that is mounted late leaves its mount point empty, and an empty directory looks wiped. So the file system of
//! each directory that the agent takes facts from is recorded. The input is that record and the present file system.
//! The output is the state of the recorded one. Pure.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::types::file_system::FileSystem;

/// A directory and the file system that it was on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its path.
    pub path: String,
    /// Its file system.
    #[serde(rename = "fileSystem")]
    pub file_system: FileSystem,
}

/// State of the file system that a directory was on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It is there, or nothing says otherwise.
    Same,
    /// Nothing is mounted where it was.
    NotMounted,
    /// Another one is there, which is mounted for this directory.
    Other,
}

/// Compares the record of a directory with its present file system. `accepted` is the file system that an operator has
/// declared to be the directory's from now on.
///
/// The root file system is always mounted, so another one there does not mean that one is missing.
pub fn presence(
    recorded: Option<&Place>,
    path: &str,
    found: &FileSystem,
    accepted: Option<&FileSystem>,
) -> Presence {
    let Some(recorded) = recorded.filter(|recorded| recorded.path == path) else {
        return Presence::Same;
    };
    if accepted.is_some_and(|accepted| is_same(accepted, found)) {
        return Presence::Same;
    }
    let before = Path::new(&recorded.file_system.point);
    let now = Path::new(&found.point);
    if before != now && before.starts_with(now) {
        Presence::NotMounted
    } else if is_same(&recorded.file_system, found) || (before == now && before == Path::new("/")) {
        Presence::Same
    } else {
        Presence::Other
    }
}

/// Compares two file systems by their mount points, and by their UUIDs or else their types.
fn is_same(one: &FileSystem, other: &FileSystem) -> bool {
    one.point == other.point
        && match (&one.uuid, &other.uuid) {
            (Some(one), Some(other)) => one == other,
            _ => one.fstype == other.fstype,
        }
}

/// Returns whether the agent has to wait for the store. `has_store`: the state directory has one.
pub fn waits_for_store(presence: Presence, has_store: bool) -> bool {
    match presence {
        Presence::Same => false,
        Presence::NotMounted => true,
        Presence::Other => !has_store,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(point: &str, fstype: &str, uuid: Option<&str>) -> FileSystem {
        FileSystem {
            point: point.to_owned(),
            fstype: fstype.to_owned(),
            source: "/dev/sda1".to_owned(),
            uuid: uuid.map(str::to_owned),
        }
    }

    #[test]
    fn a_file_system_is_missing_where_its_mount_point_shows_the_one_below() {
        use Presence::{NotMounted, Other, Same};
        let disk = || on("/data", "ext4", Some("d"));
        let root = || on("/", "ext4", Some("r"));
        let volatile = || on("/data", "tmpfs", None);
        for (name, before, now, expected) in [
            ("unchanged", disk(), disk(), Same),
            ("late", disk(), root(), NotMounted),
            (
                "late, of a parent",
                disk(),
                on("/", "xfs", None),
                NotMounted,
            ),
            ("exchanged", disk(), on("/data", "ext4", Some("e")), Other),
            (
                "without a UUID now",
                disk(),
                on("/data", "ext4", None),
                Same,
            ),
            (
                "without a UUID now, other type",
                disk(),
                on("/data", "xfs", None),
                Other,
            ),
            ("never with a UUID", volatile(), volatile(), Same),
            ("mounted since", root(), disk(), Other),
            ("another root", root(), on("/", "overlay", Some("s")), Same),
            (
                "mounted below",
                disk(),
                on("/data/kubelet", "xfs", None),
                Other,
            ),
            (
                "behind another link",
                disk(),
                on("/data2", "ext4", Some("e")),
                Other,
            ),
        ] {
            let place = Place {
                path: "/data/kubelet".to_owned(),
                file_system: before,
            };
            let path = "/data/kubelet";
            assert_eq!(presence(Some(&place), path, &now, None), expected, "{name}");
            // Nothing is known of it, it was configured elsewhere, or somebody said that it is right.
            assert_eq!(presence(None, path, &now, None), Same, "{name}");
            assert_eq!(presence(Some(&place), "/x", &now, None), Same, "{name}");
            let accepted = presence(Some(&place), path, &now, Some(&now));
            assert_eq!(accepted, Same, "{name}");
            // That was said of another one.
            let other = on("/elsewhere", "ext4", None);
            let accepted = presence(Some(&place), path, &now, Some(&other));
            assert_eq!(accepted, expected, "{name}");
        }
    }

    #[test]
    fn a_copy_of_the_store_below_the_mount_point_is_not_the_store() {
        for (presence, has_store, waits) in [
            (Presence::Same, true, false),
            (Presence::Same, false, false),
            (Presence::NotMounted, true, true),
            (Presence::NotMounted, false, true),
            (Presence::Other, true, false),
            (Presence::Other, false, true),
        ] {
            let found = waits_for_store(presence, has_store);
            assert_eq!(found, waits, "{presence:?} {has_store}");
        }
    }
}

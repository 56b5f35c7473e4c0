//! What was mounted for a volume whose storage is elsewhere, as the mount table showed it then. So teardown tells it from
//! what somebody else has mounted at its path since.
//!
//! It is a record `mounts/<uid>/<volume>`, of a device `mounts/device/<id>`, that is written and goes with the
//! record of the volume. A volume that was mounted before there was such a thing has none, and neither has one of a CSI
//! driver, which may mount it anew whenever it likes.

use serde::{Deserialize, Serialize};

use super::mounts::Mount;
use crate::core::state::Transaction;
use crate::core::state::kinds::{self, Declared, Key, Kind, Stored};
use crate::core::volumes::{Remote, Source};
use crate::types::Stamp;

/// A mount, by what tells it from others.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Noted {
    id: String,
    device: String,
    root: String,
    fstype: String,
    source: String,
}

impl Kind for Noted {
    const DECLARED: Declared = kinds::MOUNTS;
}

impl From<&Mount> for Noted {
    fn from(mount: &Mount) -> Self {
        Self {
            id: mount.id.clone(),
            device: mount.device.clone(),
            root: mount.root.to_string_lossy().into_owned(),
            fstype: mount.fstype.clone(),
            source: mount.source.clone(),
        }
    }
}

/// Key of what was mounted for a volume record.
pub(super) fn key(record: &str) -> Key<Noted> {
    let (of, name) = record.split_once('/').unwrap_or((record, ""));
    Key::new(of, name)
}

/// Whether what is mounted for a volume is noted.
pub(super) fn is_noted(remote: &Remote) -> bool {
    !matches!(remote.source, Source::Csi(_))
}

/// Notes with the record of a volume what is mounted for it.
pub(super) fn note(
    transaction: Transaction,
    record: &str,
    mount: &Mount,
    at: Stamp,
) -> Transaction {
    transaction.put_object(&key(record), &Noted::from(mount), at)
}

/// Whether a mount is the one that was noted. What cannot be read says nothing against it.
pub(super) fn is_it(noted: &Stored<'_, Noted>, mount: &Mount, now: Stamp) -> bool {
    match noted.content() {
        Some(known) => is_same(known, noted.at(), mount, now),
        None => true,
    }
}

fn is_same(noted_mount: Noted, at: Stamp, mount: &Mount, now: Stamp) -> bool {
    let found = Noted::from(mount);
    // Numbers of mounts are given again, and the directory that is bound may be renamed.
    let same_number =
        at.boot == now.boot && (&noted_mount.id, &noted_mount.device) == (&found.id, &found.device);
    let id = found.id.clone();
    same_number || Noted { id, ..noted_mount } == found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::BootId;

    #[test]
    fn a_mount_is_known_by_its_number_or_by_all_else() {
        let at = |boot| Stamp {
            boot: BootId(boot),
            boottime_ms: 1,
            wall_ms: 1,
        };
        let ours = Mount {
            id: "40".to_owned(),
            device: "8:1".to_owned(),
            root: "/data".into(),
            fstype: "ext4".to_owned(),
            source: "/dev/sda1".to_owned(),
            ..Mount::default()
        };
        let is_it = |mount: &Mount, now| is_same(Noted::from(&ours), at(1), mount, now);
        let with = |change: &dyn Fn(&mut Mount)| {
            let mut mount = ours.clone();
            change(&mut mount);
            mount
        };
        assert!(is_it(&ours, at(1)));
        let renamed = with(&|m| m.root = "/renamed".into());
        assert!(is_it(&renamed, at(1)));
        assert!(!is_it(&renamed, at(2)), "numbers of another boot");
        assert!(is_it(&with(&|m| m.id = "41".to_owned()), at(1)));
        for other in [
            with(&|m| (m.id, m.root) = ("41".to_owned(), "/theirs".into())),
            with(&|m| (m.id, m.source) = ("41".to_owned(), "/dev/sdb1".to_owned())),
            with(&|m| m.device = "8:2".to_owned()),
        ] {
            assert!(!is_it(&other, at(1)), "{other:?}");
        }
    }
}

//! Check that a store still belongs to the node's root directory.
//!
//! `kubeadm reset` wipes the root directory and stops everything that ran, and leaves the state directory alone. The
//! records of the store are then of no node any more. So both have the same random identity: the root directory in a
//! file of its own, the store in a record. A disk that is not mounted takes the file along, so the file system counts
//! too. The input is the state of both, the output the consequence. Pure.

use super::mounts::Presence;

/// Record of the root directory that a store is kept for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The identity that its marker has.
    pub identity: String,
    /// Its path.
    pub path: String,
}

/// Consequence for the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It belongs to the root directory.
    Same,
    /// It belongs to the root directory from now on, by this identity or else a new one. Nothing that it remembers
    /// is in doubt.
    Claim(Option<String>),
    /// It was kept for a root directory that is gone. Another store begins, for this one, by this identity or else a
    /// new one.
    Replaced(Option<String>),
    /// Another file system hides it, or its own is not mounted. That proves nothing about the store, and the agent
    /// waits.
    Wait,
}

/// Judges by the record, if there is one, the identity in the marker of the root directory `path`, if it has one,
/// whether the root directory has directories of pods, and the state of its file system.
///
/// Only certain facts take a store away from its node. A root directory at another path was configured, and a missing
/// marker alone proves nothing while there are pods. A directory below the mount point of a disk is not the root
/// directory, whatever it has: it may be an old copy that the disk hides.
pub fn judge(
    recorded: Option<&Recorded>,
    marker: Option<&str>,
    path: &str,
    has_pods: bool,
    presence: Presence,
) -> Verdict {
    let owned = |identity: &str| Some(identity.to_owned());
    let Some(recorded) = recorded else {
        return Verdict::Claim(marker.and_then(owned));
    };
    match marker {
        _ if path != recorded.path => Verdict::Claim(owned(marker.unwrap_or(&recorded.identity))),
        _ if presence == Presence::NotMounted => Verdict::Wait,
        Some(found) if found == recorded.identity => Verdict::Same,
        None if has_pods => Verdict::Claim(owned(&recorded.identity)),
        _ if presence == Presence::Other => Verdict::Wait,
        other => Verdict::Replaced(other.and_then(owned)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Invariant STORE-6.
    #[test]
    fn only_a_root_directory_that_is_gone_takes_its_store_along() {
        let recorded = Recorded {
            identity: "a".to_owned(),
            path: "/root".to_owned(),
        };
        let some = |identity: &str| Some(identity.to_owned());
        for (is_recorded, marker, path, has_pods, verdict) in [
            // The first start, and the first one of an agent that knows of markers.
            (false, None, "/root", false, Verdict::Claim(None)),
            (false, None, "/root", true, Verdict::Claim(None)),
            // The store was lost or moved away.
            (false, Some("a"), "/root", true, Verdict::Claim(some("a"))),
            (true, Some("a"), "/root", true, Verdict::Same),
            (true, Some("a"), "/root", false, Verdict::Same),
            // Wiped; and wiped and used by another store since.
            (true, None, "/root", false, Verdict::Replaced(None)),
            (
                true,
                Some("b"),
                "/root",
                false,
                Verdict::Replaced(some("b")),
            ),
            (true, Some("b"), "/root", true, Verdict::Replaced(some("b"))),
            // The marker alone is gone.
            (true, None, "/root", true, Verdict::Claim(some("a"))),
            // Another --root-dir.
            (true, None, "/other", false, Verdict::Claim(some("a"))),
            (true, Some("b"), "/other", true, Verdict::Claim(some("b"))),
            (true, Some("a"), "/other", true, Verdict::Claim(some("a"))),
        ] {
            let recorded = is_recorded.then_some(&recorded);
            let found = judge(recorded, marker, path, has_pods, Presence::Same);
            assert_eq!(found, verdict, "{is_recorded} {marker:?} {path} {has_pods}");
        }
    }

    #[test]
    fn a_root_directory_whose_disk_is_missing_is_waited_for() {
        use Presence::{NotMounted, Other};
        let recorded = Recorded {
            identity: "a".to_owned(),
            path: "/root".to_owned(),
        };
        let some = |identity: &str| Some(identity.to_owned());
        for (is_recorded, marker, path, has_pods, presence, verdict) in [
            (true, None, "/root", false, NotMounted, Verdict::Wait),
            // An agent has worked on the directory below, or the disk began as a copy of it.
            (true, None, "/root", true, NotMounted, Verdict::Wait),
            (true, Some("b"), "/root", true, NotMounted, Verdict::Wait),
            (true, Some("a"), "/root", true, NotMounted, Verdict::Wait),
            // Another disk: new, of another node, or with what was on the former one.
            (true, None, "/root", false, Other, Verdict::Wait),
            (true, Some("b"), "/root", true, Other, Verdict::Wait),
            (true, Some("a"), "/root", false, Other, Verdict::Same),
            (true, None, "/root", true, Other, Verdict::Claim(some("a"))),
            // Nothing is known, or another path was configured.
            (
                false,
                None,
                "/root",
                false,
                NotMounted,
                Verdict::Claim(None),
            ),
            (
                true,
                None,
                "/other",
                false,
                NotMounted,
                Verdict::Claim(some("a")),
            ),
        ] {
            let recorded = is_recorded.then_some(&recorded);
            let found = judge(recorded, marker, path, has_pods, presence);
            assert_eq!(found, verdict, "{marker:?} {path} {has_pods} {presence:?}");
        }
    }
}

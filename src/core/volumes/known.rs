//! Knowledge of the volumes of live pods, and its consequence for volumes that others may detach.
//!
//! **Invariant:** unknown volumes count as in use: as long as a pod may have volumes that are not known, no list of the
//! volumes in use is complete.

use std::collections::BTreeSet;

use crate::types::PodUid;

/// Completeness of the knowledge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    /// Nothing was read yet.
    Nothing,
    /// These pods have, or may have, volumes that are not recorded.
    Living(BTreeSet<PodUid>),
    /// Every volume of a live pod is recorded.
    All {
        /// True if something is mounted for pods that are gone, and its storage is unknown.
        strays: bool,
    },
}

impl Known {
    /// Returns whether a device that no record uses is unused, except for the mount table.
    pub fn is_settled(&self) -> bool {
        matches!(self, Self::All { .. })
    }

    /// Returns whether the recorded names are all that are in use.
    pub fn is_whole(&self) -> bool {
        *self == Self::All { strays: false }
    }
}

/// Names of volumes that must not be detached from this node (`status.volumesInUse`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Those that are known.
    pub names: BTreeSet<String>,
    /// There are no others. Else what the node has shown so far stays as well.
    pub whole: bool,
}

impl InUse {
    /// Returns the names that the node has to show, given those it shows `so_far`.
    pub fn shown(&self, so_far: Option<&[String]>) -> Vec<String> {
        let mut names = self.names.clone();
        if !self.whole {
            names.extend(so_far.into_iter().flatten().cloned());
        }
        names.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_shrinks_only_when_it_is_whole() {
        let names = BTreeSet::from(["b".to_owned()]);
        let so_far = ["c".to_owned(), "a".to_owned()];
        let mut in_use = InUse {
            names,
            whole: false,
        };
        assert_eq!(in_use.shown(Some(&so_far)), ["a", "b", "c"]);
        assert_eq!(in_use.shown(None), ["b"]);
        in_use.whole = true;
        assert_eq!(in_use.shown(Some(&so_far)), ["b"]);
    }

    #[test]
    fn what_nobody_can_tell_keeps_the_list_and_not_the_devices() {
        let living = Known::Living(BTreeSet::from([PodUid::new("u")]));
        for (known, settled, whole) in [
            (Known::Nothing, false, false),
            (living, false, false),
            (Known::All { strays: true }, true, false),
            (Known::All { strays: false }, true, true),
        ] {
            let found = (known.is_settled(), known.is_whole());
            assert_eq!(found, (settled, whole), "{known:?}");
        }
    }
}

//! Volumes that one pod may use at a time (`ReadWriteOncePod`). The scheduler sees to it; pods that it has not placed,
//! and two of the same name one after the other, meet on the node. Upstream: the check in `GenerateMountVolumeFunc`.
//!
//! **Invariant:** of two pods with such a volume the second one has nothing mounted before the first one's record is
//! gone.

use super::remote::RemoteError;
use crate::core::state::State;
use crate::core::volumes::keys::{self, Mark};
use crate::core::volumes::{Remote, records};

/// What users are told, in upstream's words.
const IN_USE: &str =
    "volume uses the ReadWriteOncePod access mode and is already in use by another pod";

/// Returns the key that is taken while such a volume is mounted for a pod or unmounted; `None` for other volumes.
pub(super) fn key(remote: &Remote) -> Option<String> {
    (remote.terms.alone).then(|| format!("alone/{}/{}", remote.plugin(), remote.name))
}

/// Checks that a pod may have the volume now.
///
/// # Errors
/// Another pod has it, or it is unknown whether one does.
pub(super) fn check(seen: &State, volume: &str, remote: &Remote) -> Result<(), RemoteError> {
    if !remote.terms.alone {
        return Ok(());
    }
    let in_use = sharers(seen, volume, remote).any(|(_, mark)| mark != Mark::Claimed);
    match in_use {
        true => Err(RemoteError::Waiting(IN_USE.to_owned())),
        false => Ok(()),
    }
}

/// Volumes of other pods with the same storage.
pub(super) fn others(seen: &State, volume: &str, remote: &Remote) -> Vec<String> {
    sharers(seen, volume, remote).map(|(key, _)| key).collect()
}

/// Returns whether another pod has the storage mounted, or is about to.
pub(super) fn is_in_use(seen: &State, volume: &str, remote: &Remote) -> bool {
    sharers(seen, volume, remote).any(|(_, mark)| mark != Mark::Claimed)
}

fn sharers<'a>(
    seen: &'a State,
    volume: &'a str,
    remote: &'a Remote,
) -> impl Iterator<Item = (String, Mark)> + 'a {
    let own = keys::split(volume).map(|(uid, _)| uid);
    records::volumes(seen).filter_map(move |found| {
        if keys::split(&found.key).map(|(uid, _)| uid) == own {
            return None;
        }
        let other = found.content.ok()?.remote;
        let same = (other.plugin(), &other.name) == (remote.plugin(), &remote.name);
        same.then(|| (found.key.into_owned(), found.mark))
    })
}

//! The record of manifests that went away a moment ago (kind `leftmanifests` in the table of objects): one that comes back is the
//! source of its pod again, also after a restart of the agent.

use crate::core::pod_update::LeftManifest;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{State, Transaction};
use crate::types::{PodSource, Stamp};

impl Kind for Vec<LeftManifest> {
    const DECLARED: Declared = kinds::LEFT_MANIFESTS;
}

/// Returns the recorded manifests of a source. A record that cannot be read counts as absent; the next reading of the source
/// replaces it.
pub(super) fn left_of(state: &State, source: PodSource) -> Vec<LeftManifest> {
    state.object(&key(source)).unwrap_or_default()
}

/// Adds to a transaction what the record of a source's manifests lacks. Without a manifest there is no record.
pub(super) fn record(
    state: &State,
    transaction: Transaction,
    source: PodSource,
    left: &Vec<LeftManifest>,
    at: Stamp,
) -> Transaction {
    let key = key(source);
    let known = state.stored(&key);
    if left.is_empty() {
        return match known {
            Some(_) => transaction.delete_object(&key),
            None => transaction,
        };
    }
    if known.is_some_and(|known| known.is(left)) {
        return transaction;
    }
    transaction.put_object(&key, left, at)
}

fn key(source: PodSource) -> Key<Vec<LeftManifest>> {
    Key::new("", source.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::state::FactRecord;
    use crate::types::BootId;

    fn apply(state: &mut State, transaction: &Transaction) {
        for mutation in &transaction.mutations {
            state.apply(mutation, 1);
        }
    }

    #[test]
    fn manifests_that_went_away_are_recorded_until_there_is_none() {
        let at = Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        };
        let left = vec![LeftManifest {
            namespace: "ns".to_owned(),
            name: "web".to_owned(),
            origin: "/m/web.yaml".to_owned(),
            at,
        }];
        let mut state = State::default();
        let none = record(&state, Transaction::new(), PodSource::File, &Vec::new(), at);
        assert!(none.is_empty());
        let put = record(&state, Transaction::new(), PodSource::File, &left, at);
        apply(&mut state, &put);
        assert_eq!(left_of(&state, PodSource::File), left);
        assert_eq!(left_of(&state, PodSource::Http), Vec::new());
        let same = record(&state, Transaction::new(), PodSource::File, &left, at);
        assert!(same.is_empty());
        let broken = FactRecord {
            mark: String::new(),
            layout: 1,
            data: b"{".to_vec(),
            at,
        };
        let broken = Transaction::new().put(
            kinds::LEFT_MANIFESTS.key("", PodSource::File.as_str()),
            broken,
        );
        apply(&mut state, &broken);
        assert_eq!(left_of(&state, PodSource::File), Vec::new());
        let gone = record(&state, Transaction::new(), PodSource::File, &Vec::new(), at);
        apply(&mut state, &gone);
        let again = record(&state, Transaction::new(), PodSource::File, &Vec::new(), at);
        assert!(again.is_empty());
    }
}

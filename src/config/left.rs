//! The record of manifests that went away a moment ago (kind `leftmanifests` in the table of objects): one that comes back is the
//! source of its pod again, also after a restart of the agent.

use crate::core::pod_update::LeftManifest;
use crate::core::state::{ObjectRecord, State, Transaction};
use crate::types::{PodSource, Stamp};

/// Begin of the key of a source's manifests; the source follows.
const PREFIX: &str = "leftmanifests//";

/// Returns the recorded manifests of a source. A record that cannot be read counts as absent; the next reading of the source
/// replaces it.
pub(super) fn left_of(state: &State, source: PodSource) -> Vec<LeftManifest> {
    state
        .record::<ObjectRecord>(&key(source))
        .and_then(|record| serde_json::from_slice(&record.data).ok())
        .unwrap_or_default()
}

/// Adds to a transaction what the record of a source's manifests lacks. Without a manifest there is no record.
pub(super) fn record(
    state: &State,
    transaction: Transaction,
    source: PodSource,
    left: &[LeftManifest],
    at: Stamp,
) -> Transaction {
    let key = key(source);
    let known = state.record::<ObjectRecord>(&key);
    if left.is_empty() {
        return match known {
            Some(_) => transaction.delete::<ObjectRecord>(key),
            None => transaction,
        };
    }
    let data = serde_json::json!(left).to_string().into_bytes();
    if known.is_some_and(|record| record.data == data) {
        return transaction;
    }
    let record = ObjectRecord {
        resource_version: String::new(),
        encrypted: false,
        data,
        at,
    };
    transaction.put(key, record)
}

fn key(source: PodSource) -> String {
    format!("{PREFIX}{}", source.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let left = [LeftManifest {
            namespace: "ns".to_owned(),
            name: "web".to_owned(),
            origin: "/m/web.yaml".to_owned(),
            at,
        }];
        let mut state = State::default();
        let none = record(&state, Transaction::new(), PodSource::File, &[], at);
        assert!(none.is_empty());
        let put = record(&state, Transaction::new(), PodSource::File, &left, at);
        apply(&mut state, &put);
        assert_eq!(left_of(&state, PodSource::File), left);
        assert_eq!(left_of(&state, PodSource::Http), []);
        let same = record(&state, Transaction::new(), PodSource::File, &left, at);
        assert!(same.is_empty());
        let broken = ObjectRecord {
            resource_version: String::new(),
            encrypted: false,
            data: b"{".to_vec(),
            at,
        };
        let broken = Transaction::new().put(key(PodSource::File), broken);
        apply(&mut state, &broken);
        assert_eq!(left_of(&state, PodSource::File), []);
        let gone = record(&state, Transaction::new(), PodSource::File, &[], at);
        apply(&mut state, &gone);
        let again = record(&state, Transaction::new(), PodSource::File, &[], at);
        assert!(again.is_empty());
    }
}

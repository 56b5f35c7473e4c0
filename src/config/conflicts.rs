//! Pods that are not taken because another one has their name or UID.
//!
//! The input is the duplicates of each set. The output is those to report now, and their record for `holdfast dump
//! sources` (kind `sourceconflicts` in the table of objects).

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::core::pod_update::Duplicate;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{State, Transaction};
use crate::types::{PodSource, Stamp};

/// A conflict that lasts is reported again this often: later than events count as repetitions of each other, and
/// sooner than the API server forgets them.
const REPEAT: Duration = Duration::from_secs(15 * 60);

/// Conflicts of a source as they are stored: origin of each refused pod, and why it is refused.
#[derive(Default, Serialize, Deserialize)]
#[serde(transparent)]
struct Texts(BTreeMap<String, String>);

impl Kind for Texts {
    const DECLARED: Declared = kinds::SOURCE_CONFLICTS;
}

/// The conflicts of all sources.
#[derive(Debug, Default)]
pub(super) struct Conflicts(BTreeMap<PodSource, Vec<Reported>>);

/// A conflict that was reported.
#[derive(Debug)]
struct Reported {
    duplicate: Duplicate,
    /// Time of the next report.
    due: Instant,
}

impl Conflicts {
    /// Replaces the conflicts of a source. Returns the new ones, which are to be reported.
    pub(super) fn replace(
        &mut self,
        source: PodSource,
        duplicates: &[Duplicate],
        now: Instant,
    ) -> Vec<Duplicate> {
        let known = self.0.remove(&source).unwrap_or_default();
        let (mut next, mut new) = (Vec::new(), Vec::new());
        for duplicate in duplicates {
            let before = known
                .iter()
                .find(|reported| reported.duplicate.message == duplicate.message);
            if before.is_none() {
                new.push(duplicate.clone());
            }
            next.push(Reported {
                duplicate: duplicate.clone(),
                due: before.map_or(now + REPEAT, |reported| reported.due),
            });
        }
        self.0.insert(source, next);
        new
    }

    /// Waits until a conflict is to be reported again. Cancel-safe.
    pub(super) async fn due(&self) {
        match self.0.values().flatten().map(|reported| reported.due).min() {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Returns the conflicts that are to be reported again, and puts off their next report.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<(PodSource, Duplicate)> {
        let mut taken = Vec::new();
        for (source, conflicts) in &mut self.0 {
            for reported in conflicts.iter_mut().filter(|reported| reported.due <= now) {
                reported.due = now + REPEAT;
                taken.push((*source, reported.duplicate.clone()));
            }
        }
        taken
    }

    /// Origin of each refused pod of a source → why it is refused.
    pub(super) fn texts(&self, source: PodSource) -> BTreeMap<String, String> {
        let mut texts: BTreeMap<String, String> = BTreeMap::new();
        for Reported { duplicate, .. } in self.0.get(&source).into_iter().flatten() {
            let text = texts.entry(duplicate.origin.clone()).or_default();
            if !text.is_empty() {
                text.push_str("; ");
            }
            text.push_str(&duplicate.message);
        }
        texts
    }
}

/// Returns the recorded conflicts of a source: file or URL → why its pod is not taken. A record that cannot be read counts
/// as absent; the next reading of the source replaces it.
pub fn conflicts_of(state: &State, source: &str) -> BTreeMap<String, String> {
    let texts: Texts = state.object(&Key::new("", source)).unwrap_or_default();
    texts.0
}

/// Adds to a transaction what the record of a source's conflicts lacks. Without a conflict there is no record.
pub(super) fn record(
    state: &State,
    transaction: Transaction,
    source: PodSource,
    texts: &BTreeMap<String, String>,
    at: Stamp,
) -> Transaction {
    let key = Key::new("", source.as_str());
    let known = state.stored::<Texts>(&key);
    if texts.is_empty() {
        return match known {
            Some(_) => transaction.delete_object(&key),
            None => transaction,
        };
    }
    let texts = Texts(texts.clone());
    if known.is_some_and(|record| record.is(&texts)) {
        return transaction;
    }
    transaction.put_object(&key, &texts, at)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod;

    use super::*;
    use crate::types::BootId;

    fn duplicate(origin: &str) -> Duplicate {
        Duplicate {
            origin: origin.to_owned(),
            pod: Arc::new(Pod::default()),
            kept: None,
            message: format!("{origin} is already defined by /m/web.yaml"),
        }
    }

    #[test]
    fn a_conflict_is_reported_when_it_is_new_and_every_15_minutes() {
        let (mut conflicts, start) = (Conflicts::default(), Instant::now());
        let (a, b) = (duplicate("/m/a"), duplicate("/m/b"));
        let mut take = |set: &[Duplicate], seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            let mut told = conflicts.replace(PodSource::File, set, now);
            let again = conflicts.take_due(now).into_iter();
            told.extend(again.map(|(_, duplicate)| duplicate));
            told.into_iter().map(|d| d.origin).collect::<Vec<_>>()
        };
        assert_eq!(take(std::slice::from_ref(&a), 0), ["/m/a"]);
        assert_eq!(take(&[a.clone(), b.clone()], 60), ["/m/b"]);
        assert!(take(&[a.clone(), b.clone()], 899).is_empty());
        assert_eq!(take(&[a.clone(), b.clone()], 900), ["/m/a"]);
        assert_eq!(take(&[a, b], 1_799), ["/m/b"]);
        assert!(take(&[], 9_999).is_empty());
    }

    #[test]
    fn the_record_lasts_as_long_as_the_conflict() {
        let at = Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        };
        let mut conflicts = Conflicts::default();
        let mut state = State::default();
        let mut write = |set: &[Duplicate]| {
            conflicts.replace(PodSource::File, set, Instant::now());
            let texts = conflicts.texts(PodSource::File);
            let transaction = record(&state, Transaction::new(), PodSource::File, &texts, at);
            for mutation in &transaction.mutations {
                state.apply(mutation, 1);
            }
            (transaction.is_empty(), conflicts_of(&state, "file"))
        };
        let a = [duplicate("/m/a")];
        let texts = BTreeMap::from([("/m/a".to_owned(), a[0].message.clone())]);
        assert_eq!(write(&a), (false, texts.clone()));
        assert_eq!(write(&a), (true, texts), "nothing is written twice");
        assert_eq!(write(&[]), (false, BTreeMap::new()));
    }
}

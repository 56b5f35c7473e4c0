//! Readiness of the sources, and origins of the pods: small shared facts about the mux.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::types::{PodSource, PodUid};

/// Sources that have synced; upstream's `config.SourcesReady`.
///
/// A source is ready once every update of its first set was *handled* by the sync loop. A source whose pods keep their
/// last valid version is ready too when pods are recorded from it: its wanted pods are known.
#[derive(Clone, Debug, Default)]
pub struct SourcesReady(Arc<Mutex<Readiness>>);

#[derive(Debug, Default)]
struct Readiness {
    configured: BTreeSet<PodSource>,
    /// Updates of the first set that are sent and not handled yet.
    first: BTreeMap<PodSource, usize>,
    ready: BTreeSet<PodSource>,
    incomplete: BTreeSet<PodSource>,
}

impl SourcesReady {
    pub(super) fn new(configured: impl IntoIterator<Item = PodSource>) -> Self {
        let ready = Self::default();
        ready.lock().configured.extend(configured);
        ready
    }

    /// Announces a source whose sets come through `PodConfig::sets`.
    pub fn configure(&self, source: PodSource) {
        self.lock().configured.insert(source);
    }

    /// To be called by the sync loop after it has handled an update of `source`.
    pub fn mark_handled(&self, source: PodSource) {
        let mut readiness = self.lock();
        if let Some(left) = readiness.first.get_mut(&source) {
            *left = left.saturating_sub(1);
            if *left == 0 {
                readiness.first.remove(&source);
                readiness.ready.insert(source);
            }
        }
    }

    /// Returns whether one source has synced; a removal needs this of its own source.
    pub fn ready(&self, source: PodSource) -> bool {
        self.lock().ready.contains(&source)
    }

    /// Returns whether a configured source of static pods has synced, or there is none; gates housekeeping. A source that
    /// cannot be reached must not keep finished pods of another from coming back: what is done about the pods of
    /// a source waits for that source alone, and what is done about strangers waits for
    /// [`SourcesReady::complete`].
    pub fn any_static_ready(&self) -> bool {
        let readiness = self.lock();
        let mut wanted = readiness
            .configured
            .iter()
            .filter(|s| s.is_static())
            .peekable();
        wanted.peek().is_none() || wanted.any(|source| readiness.ready.contains(source))
    }

    /// Returns whether every configured source of static pods has synced.
    pub fn static_ready(&self) -> bool {
        let readiness = self.lock();
        let mut wanted = readiness.configured.iter().filter(|s| s.is_static());
        wanted.all(|source| readiness.ready.contains(source))
    }

    /// Returns whether one source has synced and its newest reading was complete: it wants these pods and no others.
    pub fn source_complete(&self, source: PodSource) -> bool {
        let readiness = self.lock();
        readiness.ready.contains(&source) && !readiness.incomplete.contains(&source)
    }

    /// Returns whether every configured source has synced.
    pub fn all_ready(&self) -> bool {
        let readiness = self.lock();
        readiness.configured.is_subset(&readiness.ready)
    }

    /// Returns whether every configured source has synced and the newest reading of each was complete: nothing broken,
    /// vanished or unreadable. A running pod that no source wants may be killed when this holds, even after a rebuild
    /// of the store.
    pub fn complete(&self) -> bool {
        let readiness = self.lock();
        readiness.configured.is_subset(&readiness.ready) && readiness.incomplete.is_empty()
    }

    /// The first set of a source is about to be sent as `updates` updates.
    pub(super) fn expect(&self, source: PodSource, updates: usize) {
        self.lock().first.insert(source, updates);
    }

    pub(super) fn set_complete(&self, source: PodSource, complete: bool) {
        let mut readiness = self.lock();
        if complete {
            readiness.incomplete.remove(&source);
        } else {
            readiness.incomplete.insert(source);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Readiness> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Origin (file path or URL) of each pod that a source wants, for `PodRecord::origin`.
///
/// A pod's origin is there before its ADD or UPDATE is sent and until its REMOVE is sent.
#[derive(Clone, Debug, Default)]
pub struct Origins(Arc<Mutex<BTreeMap<PodUid, String>>>);

impl Origins {
    /// The origin of a pod; `None` when no source wants it, empty for the API server.
    pub fn get(&self, uid: &PodUid) -> Option<String> {
        self.lock().get(uid).cloned()
    }

    pub(super) fn insert(&self, uid: PodUid, origin: String) {
        self.lock().insert(uid, origin);
    }

    pub(super) fn remove(&self, uid: &PodUid) {
        self.lock().remove(uid);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PodUid, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_is_ready_once_its_whole_first_set_was_handled() {
        let ready = SourcesReady::new([PodSource::File]);
        ready.mark_handled(PodSource::File);
        assert!(!ready.all_ready(), "nothing was sent yet");
        ready.expect(PodSource::File, 2);
        ready.mark_handled(PodSource::File);
        assert!(!ready.ready(PodSource::File));
        ready.mark_handled(PodSource::File);
        assert!(ready.ready(PodSource::File) && ready.all_ready());
    }

    #[test]
    fn without_sources_everything_has_spoken() {
        assert!(SourcesReady::new([]).all_ready());
    }

    #[test]
    fn one_source_of_static_pods_is_enough_for_housekeeping() {
        assert!(SourcesReady::new([PodSource::Api]).any_static_ready());
        let ready = SourcesReady::new([PodSource::File, PodSource::Http, PodSource::Api]);
        assert!(!ready.any_static_ready());
        ready.expect(PodSource::Api, 1);
        ready.mark_handled(PodSource::Api);
        assert!(!ready.any_static_ready());
        ready.expect(PodSource::File, 1);
        ready.mark_handled(PodSource::File);
        assert!(ready.any_static_ready() && !ready.static_ready());
    }

    #[test]
    fn a_broken_source_is_ready_but_not_complete() {
        let ready = SourcesReady::new([PodSource::File]);
        ready.expect(PodSource::File, 1);
        ready.set_complete(PodSource::File, false);
        ready.mark_handled(PodSource::File);
        assert!(ready.all_ready() && !ready.complete());
        ready.set_complete(PodSource::File, true);
        assert!(ready.complete());
    }
}

//! The merge task: full sets in, operations out.
//!
//! Keeps the known pods of each source, starting from the store's. Reports problems once per change, as events, log
//! lines and in the `sources` table, and [`Conflicts`] again while they last; a second small task writes that table, so
//! that a stalled disk never delays the pods.
//!
//! **Invariant:** the first answer of the API server in a boot is recorded after its removals
//! (`core::offline::has_taken_effect`): because of that record the next start starts pods that wait for the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::conflicts::{self, Conflicts};
use super::left;
use super::manifest;
use super::{
    FAILED_VALIDATION, MANIFEST_WARNING, Origins, Reading, SOURCE_UNREADABLE, Seed, SourceSet,
    SourcedPod, SourcesReady, Surroundings,
};
use crate::core::offline;
use crate::core::pod_update::{Duplicate, LeftManifest, Merged, SourcePods, merge};
use crate::core::state::{EpochReason, SourceRecord, State, Transaction};
use crate::store::Store;
use crate::types::{BootId, Event, EventType, PodExt, PodOp, PodSource, PodUid, PodUpdate, Stamp};

/// First and longest pause between attempts to write the `sources` table.
const RECORD_RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The boot in the time of reading of a source that was never read. No boot has it.
const NEVER: BootId = BootId(0);

/// Desired content of the `sources` table.
#[derive(Debug, Default)]
struct Records {
    sources: BTreeMap<PodSource, SourceRecord>,
    /// Pods that are not taken, by source: origin → why.
    conflicts: BTreeMap<PodSource, BTreeMap<String, String>>,
    /// Manifests that went away a moment ago, by source.
    left: BTreeMap<PodSource, Vec<LeftManifest>>,
    /// The pods that the API server wants and does not delete.
    of_api: BTreeSet<PodUid>,
}

pub(super) struct Mux {
    known: BTreeMap<PodSource, SourcePods>,
    /// Sources that are not configured any more, whose pods go.
    dropped: Vec<PodSource>,
    /// Sources whose first set was sent on.
    spoken: BTreeSet<PodSource>,
    /// Sources that have sent a set since the start.
    heard: BTreeSet<PodSource>,
    conflicts: Conflicts,
    records: watch::Sender<Records>,
    ready: SourcesReady,
    origins: Origins,
    updates: mpsc::Sender<PodUpdate>,
    surroundings: Surroundings,
}

/// The receiver of the updates is gone.
struct Closed;

impl Mux {
    pub(super) fn new(
        seeds: Vec<Seed>,
        configured: &[PodSource],
        ready: SourcesReady,
        origins: Origins,
        updates: mpsc::Sender<PodUpdate>,
        surroundings: Surroundings,
    ) -> Self {
        let mut by_source: BTreeMap<PodSource, Vec<SourcedPod>> = BTreeMap::new();
        for Seed {
            source,
            origin,
            pod,
        } in seeds
        {
            origins.insert(pod.uid(), origin.clone());
            let pods = by_source.entry(source).or_default();
            pods.push(SourcedPod { origin, pod });
        }
        let dropped = by_source
            .keys()
            .copied()
            .filter(|s| s.is_static() && !configured.contains(s))
            .collect();
        let mut known: BTreeMap<PodSource, SourcePods> = by_source
            .into_iter()
            .map(|(source, pods)| (source, SourcePods::seeded(pods)))
            .collect();
        let snapshot = surroundings.store.snapshot();
        for source in [PodSource::File, PodSource::Http] {
            let left = left::left_of(&snapshot, source);
            if !left.is_empty() {
                let pods = known.remove(&source).unwrap_or_default();
                known.insert(source, pods.with_left(left));
            }
        }
        let sources = [PodSource::File, PodSource::Http, PodSource::Api]
            .into_iter()
            .filter_map(|s| Some((s, snapshot.record::<SourceRecord>(s.as_str())?.clone())))
            .collect();
        Self {
            known,
            dropped,
            spoken: BTreeSet::new(),
            heard: BTreeSet::new(),
            conflicts: Conflicts::default(),
            records: watch::Sender::new(Records {
                sources,
                conflicts: BTreeMap::new(),
                left: BTreeMap::new(),
                of_api: BTreeSet::new(),
            }),
            ready,
            origins,
            updates,
            surroundings,
        }
    }

    /// Runs until cancelled, or until there is no receiver.
    pub(super) async fn run(
        mut self,
        mut incoming: mpsc::Receiver<SourceSet>,
        cancel: CancellationToken,
    ) {
        let store = self.surroundings.store.clone();
        let recording = record_sources(store, self.records.subscribe(), cancel.clone());
        let merging = async {
            for source in std::mem::take(&mut self.dropped) {
                info!(%source, "source is not configured any more, removing its pods");
                let empty = SourceSet {
                    source,
                    location: String::new(),
                    reading: Reading::Complete,
                    broken: BTreeMap::new(),
                    pods: Vec::new(),
                    set_back: false,
                };
                if self.handle(empty).await.is_err() {
                    return;
                }
                // Nothing of it comes back.
                self.records.send_modify(|records| {
                    records.left.insert(source, Vec::new());
                });
            }
            loop {
                // Both are cancel-safe; a set that was received is sent on whole unless everything ends.
                let set = tokio::select! {
                    set = incoming.recv() => set,
                    () = self.conflicts.due() => {
                        for (source, duplicate) in self.conflicts.take_due(Instant::now()) {
                            self.tell_of_conflict(source, &duplicate);
                        }
                        continue;
                    }
                };
                let Some(set) = set else {
                    return;
                };
                if self.handle(set).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = cancel.cancelled() => {}
            () = merging => {}
            () = recording => {}
        }
    }

    async fn handle(&mut self, mut set: SourceSet) -> Result<(), Closed> {
        let source = set.source;
        if set.reading == Reading::Absent && self.absence_says_nothing(&set) {
            set.reading = Reading::Unreadable(format!(
                "{} does not exist, and the records of the pods that came from there were lost; \
                 bring it back, or create it empty if no pods are wanted from there",
                set.location
            ));
        }
        let merged = self.merge(&set);
        self.tell(&set, &merged);

        let first = merged.ready && self.spoken.insert(source);
        let complete = merged.frozen.is_none() && set.broken.is_empty();
        self.ready.set_complete(source, complete);

        let updates = operations(source, &merged, first);
        if first {
            self.ready.expect(source, updates.len());
        }
        for update in &updates {
            let gone = update.op == PodOp::Remove;
            for uid in update.pods.iter().map(|p| p.uid()).filter(|_| !gone) {
                if let Some(sourced) = merged.pods.get(uid.as_str()) {
                    self.origins.insert(uid, sourced.origin.clone());
                }
            }
            if source.is_static() && matches!(update.op, PodOp::Add | PodOp::Update) {
                self.warn(&update.pods);
            }
        }
        self.known.insert(source, merged.pods);
        for update in updates {
            let removed: Vec<_> = match update.op {
                PodOp::Remove => update.pods.iter().map(|p| p.uid()).collect(),
                _ => Vec::new(),
            };
            self.updates.send(update).await.map_err(|_| Closed)?;
            removed.iter().for_each(|uid| self.origins.remove(uid));
        }
        Ok(())
    }

    /// Returns whether an absent path may have had pods: this epoch began with records lost or replaced by those of a
    /// backup, none of them is about a pod from there, and the path has not been seen since. Killing the running pods
    /// would turn a lost store and a missing mount into "no pods".
    fn absence_says_nothing(&self, set: &SourceSet) -> bool {
        let snapshot = self.surroundings.store.snapshot();
        let Some(epoch) = snapshot.meta().map(|meta| &meta.epoch) else {
            return false;
        };
        let lost = match epoch.reason {
            EpochReason::Rebuilt | EpochReason::Restored => true,
            EpochReason::Fresh | EpochReason::OtherMachine => false,
        };
        let known = self.known.get(&set.source);
        let records = self.records.borrow();
        let seen = records.sources.get(&set.source).is_some_and(|r| {
            r.location == set.location && r.error.is_empty() && epoch.since.reached(r.read)
        });
        lost && !seen && !known.is_some_and(|pods| pods.any_from(&set.location))
    }

    fn merge(&self, set: &SourceSet) -> Merged {
        let nothing = SourcePods::default();
        let known = self.known.get(&set.source).unwrap_or(&nothing);
        let taken = |uid: &str| {
            self.known
                .iter()
                .any(|(source, pods)| *source != set.source && pods.get(uid).is_some())
        };
        merge(known, set, &taken, self.surroundings.clock.now())
    }

    /// Reports the problems of a set, and the ones that are solved.
    fn tell(&mut self, set: &SourceSet, merged: &Merged) {
        let source = set.source;
        let before = self.records.borrow().sources.get(&source).cloned();
        let first_look = self.heard.insert(source);
        let was_broken = before.as_ref().map(|r| r.broken.clone());
        let was_broken = was_broken.unwrap_or_default();

        let unread = merged.frozen.is_some();
        for (origin, error) in &set.broken {
            let news = was_broken.get(origin) != Some(error);
            if news || first_look {
                warn!(%source, %origin, %error, "manifest is invalid, keeping its pods as they are");
            }
            if news {
                self.event(
                    self.frozen_pod(source, origin),
                    format!("{origin}: {error}"),
                );
            }
        }
        if !unread {
            for origin in was_broken.keys().filter(|o| !set.broken.contains_key(*o)) {
                info!(%source, %origin, "invalid manifest was corrected or removed");
            }
        }

        if !unread {
            let now = Instant::now();
            for duplicate in self.conflicts.replace(source, &merged.duplicates, now) {
                self.tell_of_conflict(source, &duplicate);
            }
        }

        let error = merged.frozen.clone().unwrap_or_default();
        let old_error = before.as_ref().map(|r| r.error.clone()).unwrap_or_default();
        if unread && (error != old_error || first_look) {
            warn!(%source, location = %set.location, %error, "cannot read the source, keeping its pods as they are");
        }
        if unread && error != old_error {
            self.surroundings.recorder.record(Event::node(
                EventType::Warning,
                SOURCE_UNREADABLE,
                format!("{source} source {}: {error}", set.location),
            ));
        }
        if !unread && !old_error.is_empty() {
            info!(%source, location = %set.location, "the source is readable again");
        }
        self.record(set, error, before, &merged.pods);
    }

    /// Hands the source's record to the recording task.
    fn record(
        &self,
        set: &SourceSet,
        error: String,
        before: Option<SourceRecord>,
        pods: &SourcePods,
    ) {
        let is_read = error.is_empty();
        let record = record_of(set, error, before, self.surroundings.clock.now());
        self.records.send_modify(|records| {
            records.sources.insert(set.source, record);
            if is_read {
                let conflicts = self.conflicts.texts(set.source);
                records.conflicts.insert(set.source, conflicts);
                records.left.insert(set.source, pods.left_manifests());
            }
            if set.source == PodSource::Api {
                let stay = pods
                    .iter()
                    .filter(|(_, sourced)| sourced.pod.metadata.deletion_timestamp.is_none());
                records.of_api = stay.map(|(uid, _)| uid.clone()).collect();
            }
        });
    }

    /// Emits the warnings that an API server would return to the creator of a pod.
    fn warn(&self, pods: &[Arc<Pod>]) {
        for pod in pods {
            for (field, message) in manifest::warnings(pod) {
                let text = format!("{field}: {message}");
                warn!(pod = pod.name(), warning = text, "doubtful manifest");
                let event = Event::pod(EventType::Warning, pod, MANIFEST_WARNING, text);
                self.surroundings.recorder.record(event);
            }
        }
    }

    /// Reports a pod that is not taken, on the pod that is kept.
    fn tell_of_conflict(&self, source: PodSource, duplicate: &Duplicate) {
        warn!(%source, origin = %duplicate.origin, reason = %duplicate.message, "ignoring a pod that conflicts with another one");
        let pod = duplicate.kept.as_ref().unwrap_or(&duplicate.pod);
        self.event(Some(pod), duplicate.message.clone());
    }

    fn frozen_pod(&self, source: PodSource, origin: &str) -> Option<&Pod> {
        let pods = self.known.get(&source)?;
        pods.of_origin(origin).next().map(|p| &**p)
    }

    fn event(&self, pod: Option<&Pod>, message: String) {
        let event = match pod {
            Some(pod) => Event::pod(EventType::Warning, pod, FAILED_VALIDATION, message),
            None => Event::node(EventType::Warning, FAILED_VALIDATION, message),
        };
        self.surroundings.recorder.record(event);
    }
}

/// The updates of a difference, in upstream's order. The first one of a ready source is never nothing.
fn operations(source: PodSource, merged: &Merged, first: bool) -> Vec<PodUpdate> {
    let mut updates = Vec::new();
    let mut push = |op: PodOp, pods: &[Arc<Pod>]| {
        if !pods.is_empty() {
            updates.push(PodUpdate {
                op,
                source,
                pods: pods.to_vec(),
            });
        }
    };
    push(PodOp::Remove, &merged.removes);
    push(PodOp::Add, &merged.adds);
    push(PodOp::Update, &merged.updates);
    push(PodOp::Delete, &merged.deletes);
    if first && updates.is_empty() {
        updates.push(PodUpdate {
            op: PodOp::Add,
            source,
            pods: Vec::new(),
        });
    }
    if !merged.reconciles.is_empty() {
        updates.push(PodUpdate {
            op: PodOp::Reconcile,
            source,
            pods: merged.reconciles.clone(),
        });
    }
    updates
}

/// Returns the record of a source after a set. A failed reading keeps the previous facts.
fn record_of(
    set: &SourceSet,
    error: String,
    before: Option<SourceRecord>,
    now: Stamp,
) -> SourceRecord {
    let (read, broken) = match (error.is_empty(), before) {
        (true, _) => (now, set.broken.clone()),
        (false, Some(before)) => (before.read, before.broken),
        (false, None) => (Stamp { boot: NEVER, ..now }, set.broken.clone()),
    };
    SourceRecord {
        location: set.location.clone(),
        read,
        error,
        broken,
    }
}

/// Writes the `sources` table whenever it differs from what is wanted; retries what the store refuses.
async fn record_sources(
    store: Store,
    mut wanted: watch::Receiver<Records>,
    cancel: CancellationToken,
) {
    let mut pause = RECORD_RETRY.0;
    let mut published = store.published();
    loop {
        // What is published after this look ends the wait below.
        published.mark_unchanged();
        let (transaction, waits) = differing(&store.snapshot(), &wanted.borrow_and_update());
        if transaction.is_empty() {
            pause = RECORD_RETRY.0;
            // Both are cancel-safe, and what is left to write is found by looking again.
            let changed = tokio::select! {
                changed = wanted.changed() => changed,
                changed = published.changed(), if waits => changed,
            };
            if changed.is_err() {
                return;
            }
            continue;
        }
        let Err(error) = store.commit(transaction).await else {
            continue;
        };
        warn!(%error, retry_in = ?pause, "cannot record the sources");
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(RECORD_RETRY.1),
        }
    }
}

/// Returns the part of the wanted records that can be written now, and whether another part has to wait for other
/// records.
fn differing(state: &State, wanted: &Records) -> (Transaction, bool) {
    let (mut transaction, mut waits) = (Transaction::new(), false);
    for (source, record) in &wanted.sources {
        let known = state.record::<SourceRecord>(source.as_str());
        if known == Some(record) {
            continue;
        }
        let is_first = known.is_none_or(|known| known.read.boot != record.read.boot);
        if *source == PodSource::Api
            && is_first
            && !offline::has_taken_effect(state, &wanted.of_api)
        {
            waits = true;
            continue;
        }
        transaction = transaction.put(source.as_str(), record.clone());
    }
    for (source, texts) in &wanted.conflicts {
        if let Some(record) = wanted.sources.get(source) {
            transaction = conflicts::record(state, transaction, *source, texts, record.read);
        }
    }
    for (source, manifests) in &wanted.left {
        if let Some(record) = wanted.sources.get(source) {
            transaction = left::record(state, transaction, *source, manifests, record.read);
        }
    }
    (transaction, waits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_was_never_read_has_not_spoken_in_this_boot() {
        let now = Stamp {
            boot: BootId(7),
            boottime_ms: 5_000,
            wall_ms: 1_000_000,
        };
        let set = SourceSet {
            source: PodSource::Api,
            location: "https://api".to_owned(),
            reading: Reading::Complete,
            broken: BTreeMap::new(),
            pods: Vec::new(),
            set_back: false,
        };
        let refused = || "connection refused".to_owned();
        let never = record_of(&set, refused(), None, now);
        assert_ne!(never.read.boot, now.boot);
        let still = record_of(&set, refused(), Some(never.clone()), now);
        assert_eq!(still, never);
        let read = record_of(&set, String::new(), Some(never), now);
        assert_eq!(read.read, now);
        let later = now.plus(Duration::from_secs(9));
        let away = record_of(&set, refused(), Some(read), later);
        assert_eq!((away.read, away.error), (now, refused()));
    }
}

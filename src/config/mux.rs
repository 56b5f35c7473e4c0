//! The merge task: full sets in, operations out.
//!
//! Keeps the pods known of each source, starting from the store's. Tells what is wrong once per change,
//! as events, log lines and in the `sources` table; a second small task writes that table, so that a
//! stalled disk never holds up the pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    FAILED_VALIDATION, Origins, Reading, SOURCE_UNREADABLE, Seed, SourceSet, SourcedPod,
    SourcesReady, Surroundings,
};
use crate::core::pod_update::{Merged, SourcePods, merge};
use crate::core::state::{EpochReason, SourceRecord, Transaction};
use crate::store::Store;
use crate::types::{Event, EventType, PodExt, PodOp, PodSource, PodUpdate};

/// First and longest pause between attempts to write the `sources` table.
const RECORD_RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

type Records = BTreeMap<PodSource, SourceRecord>;

pub(super) struct Mux {
    known: BTreeMap<PodSource, SourcePods>,
    /// Sources that are not configured any more, whose pods go.
    dropped: Vec<PodSource>,
    /// Sources whose first set was sent on.
    spoken: BTreeSet<PodSource>,
    /// Duplicates that were told, by source.
    told: BTreeMap<PodSource, BTreeSet<String>>,
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
        let known = by_source
            .into_iter()
            .map(|(source, pods)| (source, SourcePods::seeded(pods)))
            .collect();
        let snapshot = surroundings.store.snapshot();
        let recorded = [PodSource::File, PodSource::Http, PodSource::Api]
            .into_iter()
            .filter_map(|s| Some((s, snapshot.record::<SourceRecord>(s.as_str())?.clone())))
            .collect();
        Self {
            known,
            dropped,
            spoken: BTreeSet::new(),
            told: BTreeMap::new(),
            records: watch::Sender::new(recorded),
            ready,
            origins,
            updates,
            surroundings,
        }
    }

    /// Runs until cancelled, or until nobody receives any more.
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
                };
                if self.handle(empty).await.is_err() {
                    return;
                }
            }
            // Receiving is cancel-safe; a set that was received is sent on whole unless everything ends.
            while let Some(set) = incoming.recv().await {
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

    /// Whether an absent path may have had pods: this epoch began with records lost or replaced by those of
    /// a backup, none tells of a pod from there, and the path has not been seen since. Killing what runs
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
        let seen = records.get(&set.source).is_some_and(|r| {
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
        merge(known, set, &taken)
    }

    /// Tells what is wrong with a set, and what was wrong and is no more.
    fn tell(&mut self, set: &SourceSet, merged: &Merged) {
        let source = set.source;
        let before = self.records.borrow().get(&source).cloned();
        let first_look = !self.told.contains_key(&source);
        let was_broken = before.as_ref().map(|r| r.broken.clone());
        let was_broken = was_broken.unwrap_or_default();

        let unread = merged.frozen.is_some();
        for (origin, error) in &set.broken {
            let news = was_broken.get(origin) != Some(error);
            if news || first_look {
                warn!(%source, %origin, %error, "manifest is broken, its pods stay as they are");
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
                info!(%source, %origin, "broken manifest is mended or gone");
            }
        }

        let mut told = BTreeSet::new();
        let known = self.told.remove(&source).unwrap_or_default();
        for duplicate in &merged.duplicates {
            if !known.contains(&duplicate.message) {
                warn!(%source, origin = %duplicate.origin, reason = %duplicate.message, "pod is not taken");
                self.event(Some(&duplicate.pod), duplicate.message.clone());
            }
            told.insert(duplicate.message.clone());
        }
        self.told.insert(source, if unread { known } else { told });

        let error = merged.frozen.clone().unwrap_or_default();
        let old_error = before.as_ref().map(|r| r.error.clone()).unwrap_or_default();
        if unread && (error != old_error || first_look) {
            warn!(%source, location = %set.location, %error, "source cannot be read, its pods stay as they are");
        }
        if unread && error != old_error {
            self.surroundings.recorder.record(Event::node(
                EventType::Warning,
                SOURCE_UNREADABLE,
                format!("{source} source {}: {error}", set.location),
            ));
        }
        if !unread && !old_error.is_empty() {
            info!(%source, location = %set.location, "source can be read again");
        }
        self.record(set, error, before);
    }

    /// Hands the source's record to the recording task; a failed reading keeps what was known before.
    fn record(&self, set: &SourceSet, error: String, before: Option<SourceRecord>) {
        let (read, broken) = match (error.is_empty(), before) {
            (false, Some(before)) => (before.read, before.broken),
            _ => (self.surroundings.clock.now(), set.broken.clone()),
        };
        let record = SourceRecord {
            location: set.location.clone(),
            read,
            error,
            broken,
        };
        self.records.send_modify(|records| {
            records.insert(set.source, record);
        });
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

/// Writes the `sources` table whenever it differs from what is wanted; retries what the store refuses.
async fn record_sources(
    store: Store,
    mut wanted: watch::Receiver<Records>,
    cancel: CancellationToken,
) {
    let mut pause = RECORD_RETRY.0;
    while wanted.changed().await.is_ok() {
        loop {
            let transaction = differing(&store, &wanted.borrow_and_update());
            if transaction.is_empty() {
                break;
            }
            match store.commit(transaction).await {
                Ok(_) => break,
                Err(error) => {
                    warn!(%error, retry_in = ?pause, "cannot record the sources");
                }
            }
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(RECORD_RETRY.1),
            }
        }
        pause = RECORD_RETRY.0;
    }
}

fn differing(store: &Store, wanted: &Records) -> Transaction {
    let snapshot = store.snapshot();
    let mut transaction = Transaction::new();
    for (source, record) in wanted {
        if snapshot.record::<SourceRecord>(source.as_str()) != Some(record) {
            transaction = transaction.put(source.as_str(), record.clone());
        }
    }
    transaction
}

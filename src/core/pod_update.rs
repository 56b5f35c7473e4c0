//! Merges the sets of the sources.
//!
//! The input is the pods known of one source, and the full set that the source now sends. The output is the difference,
//! as the operations the sync loop handles, and the pods known from then on. Upstream's `podStorage.merge` with
//! `checkAndUpdatePod`.
//!
//! **Invariants.** A pod is removed only by a set that its source could read completely at the pod's origin: a broken
//! or unreadable origin keeps the last valid version of the pods recorded from it. A pod that is known is never an
//! addition, so seeding [`SourcePods`] from the store makes a restart invisible. Of several manifests of one pod, the
//! one that it was read from first stays its source, also when it goes away for a moment ([`RETURN`]): editors and
//! scripts move a manifest aside and write it anew.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::types::pod::{CONFIG_HASH, CONFIG_MIRROR, CONFIG_SEEN, CONFIG_SOURCE, MANIFEST_HASH};
use crate::types::{PodExt, PodSource, PodUid, Stamp};

/// A manifest that comes back within this time is the source of its pod again, although a copy has taken its place.
pub const RETURN: Duration = Duration::from_secs(300);

/// Annotations that belong to this node; a change of them is not a change of the pod.
const LOCAL_ANNOTATIONS: [&str; 5] = [
    CONFIG_SOURCE,
    CONFIG_SEEN,
    CONFIG_MIRROR,
    CONFIG_HASH,
    MANIFEST_HASH,
];

/// A pod and where within its source it comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct SourcedPod {
    /// File path or URL; empty for the API server.
    pub origin: String,
    /// The pod.
    pub pod: Arc<Pod>,
}

/// The pods known of one source, by UID. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourcePods {
    pods: OrdMap<PodUid, SourcedPod>,
    /// Manifests that went away, by namespace and name of the pod that they defined.
    left: BTreeMap<(String, String), Left>,
}

/// A manifest that went away.
#[derive(Clone, Debug, PartialEq)]
struct Left {
    origin: String,
    at: Stamp,
}

/// A manifest that went away a moment ago, as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftManifest {
    /// Namespace of the pod that it defined.
    pub namespace: String,
    /// Name of that pod.
    pub name: String,
    /// File path or URL.
    pub origin: String,
    /// Time of its removal.
    pub at: Stamp,
}

impl SourcePods {
    /// Pods as recorded in the store.
    pub fn seeded(pods: impl IntoIterator<Item = SourcedPod>) -> Self {
        Self {
            pods: pods.into_iter().map(|p| (p.pod.uid(), p)).collect(),
            left: BTreeMap::new(),
        }
    }

    /// Adds the manifests that went away before a restart of the agent.
    #[must_use]
    pub fn with_left(mut self, left: impl IntoIterator<Item = LeftManifest>) -> Self {
        let left = left.into_iter().map(|of| {
            let LeftManifest { origin, at, .. } = of;
            ((of.namespace, of.name), Left { origin, at })
        });
        self.left.extend(left);
        self
    }

    /// Returns the manifests that went away a moment ago, by namespace and name of their pods.
    pub fn left_manifests(&self) -> Vec<LeftManifest> {
        let left = self.left.iter();
        left.map(|((namespace, name), left)| LeftManifest {
            namespace: namespace.clone(),
            name: name.clone(),
            origin: left.origin.clone(),
            at: left.at,
        })
        .collect()
    }

    /// One pod.
    pub fn get(&self, uid: &str) -> Option<&SourcedPod> {
        self.pods.get(uid)
    }

    /// All pods, by UID.
    pub fn iter(&self) -> impl Iterator<Item = (&PodUid, &SourcedPod)> {
        self.pods.iter()
    }

    /// The pods of one origin.
    pub fn of_origin<'a>(&'a self, origin: &str) -> impl Iterator<Item = &'a Arc<Pod>> {
        self.pods
            .values()
            .filter(move |p| p.origin == origin)
            .map(|p| &p.pod)
    }

    /// Returns whether no pod is known.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// Returns the manifest that went away a moment ago and defined the pod of this name.
    fn left(&self, pod: &Pod) -> Option<&str> {
        if self.left.is_empty() {
            return None;
        }
        let left = self.left.get(&full_name(pod))?;
        Some(&left.origin)
    }

    /// Forgets the manifests that went away too long ago. One that is there but broken is not forgotten.
    fn forget_left(&mut self, set: &SourceSet, now: Stamp) {
        self.left.retain(|_, left| {
            let is_recent = left.at.boot == now.boot && now.since(left.at) < RETURN;
            is_recent || set.broken.contains_key(&left.origin)
        });
    }

    /// Remembers the manifests that `gone` pods came from, and forgets those that define their pod again.
    fn remember_left(&mut self, gone: &[&SourcedPod], wanted: &[&SourcedPod], now: Stamp) {
        if gone.is_empty() && self.left.is_empty() {
            return;
        }
        let there: HashSet<_> = wanted.iter().map(|pod| place(pod)).collect();
        let mut back = HashSet::new();
        self.left.retain(|name, left| {
            let is_back = there.contains(&(name.0.as_str(), name.1.as_str(), left.origin.as_str()));
            if is_back {
                back.insert(name.clone());
            }
            !is_back
        });
        // Pods of the API server have no origin.
        let gone = gone.iter().filter(|pod| !pod.origin.is_empty());
        for pod in gone.filter(|pod| !there.contains(&place(pod))) {
            let name = full_name(&pod.pod);
            // What took the place of the manifest meanwhile is not one to come back.
            if back.contains(&name) {
                continue;
            }
            self.left.entry(name).or_insert_with(|| Left {
                origin: pod.origin.clone(),
                at: now,
            });
        }
    }

    /// Returns whether a pod is known from `location` or from a file below it.
    pub fn any_from(&self, location: &str) -> bool {
        let below = format!("{}/", location.trim_end_matches('/'));
        self.pods
            .values()
            .any(|p| p.origin == location || p.origin.starts_with(&below))
    }
}

/// Completeness of a reading of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reading {
    /// All of it; files that are broken are in [`SourceSet::broken`].
    Complete,
    /// Its path does not exist. Empty when no pods are recorded from there, otherwise vanished.
    Absent,
    /// Not at all, with the error.
    Unreadable(String),
}

/// Complete set of the pods that a source wants, sent each time (undelta).
#[derive(Clone, Debug, PartialEq)]
pub struct SourceSet {
    /// The source.
    pub source: PodSource,
    /// Its path or URL.
    pub location: String,
    /// Completeness of the reading.
    pub reading: Reading,
    /// Origins that are there but broken, with the error; their recorded pods are kept as they are.
    pub broken: BTreeMap<String, String>,
    /// The pods that could be read.
    pub pods: Vec<SourcedPod>,
    /// The source went back to an older state, as one restored from a backup: it may have forgotten the statuses of all pods.
    pub set_back: bool,
}

/// A pod that is not taken because another one has its name or UID.
#[derive(Clone, Debug, PartialEq)]
pub struct Duplicate {
    /// Origin of the refused pod.
    pub origin: String,
    /// The refused pod.
    pub pod: Arc<Pod>,
    /// The pod that has the name or UID; `None` when it is of another source.
    pub kept: Option<Arc<Pod>>,
    /// For a human: what it collides with and what to do.
    pub message: String,
}

/// The difference between two sets, in the order in which it is to be sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    /// The pods known from now on.
    pub pods: SourcePods,
    /// Pods that are gone.
    pub removes: Vec<Arc<Pod>>,
    /// New pods.
    pub adds: Vec<Arc<Pod>>,
    /// Pods whose desired state, or origin, changed.
    pub updates: Vec<Arc<Pod>>,
    /// Pods whose desired state changed and which have a deletionTimestamp.
    pub deletes: Vec<Arc<Pod>>,
    /// Pods whose status alone differs.
    pub reconciles: Vec<Arc<Pod>>,
    /// Pods that were not taken.
    pub duplicates: Vec<Duplicate>,
    /// True if the source counts as synced: it could be read, or its earlier pods are known.
    pub ready: bool,
    /// Reason for which all pods of the source keep their last valid version, if they do.
    pub frozen: Option<String>,
}

fn full_name(pod: &Pod) -> (String, String) {
    (pod.namespace().to_owned(), pod.name().to_owned())
}

/// Namespace, name and origin.
fn place(pod: &SourcedPod) -> (&str, &str, &str) {
    (pod.pod.namespace(), pod.pod.name(), &pod.origin)
}

/// Computes the difference. `taken` has the UIDs of the pods of *other* sources.
pub fn merge(
    known: &SourcePods,
    set: &SourceSet,
    taken: &dyn Fn(&str) -> bool,
    now: Stamp,
) -> Merged {
    let frozen = match &set.reading {
        Reading::Complete => None,
        Reading::Absent if known.any_from(&set.location) => Some(format!(
            "{} has vanished; bring it back, or empty it before removing it",
            set.location
        )),
        Reading::Absent => None,
        Reading::Unreadable(error) => Some(error.clone()),
    };
    if frozen.is_some() {
        return Merged {
            pods: known.clone(),
            ready: !known.is_empty(),
            frozen,
            ..Merged::default()
        };
    }
    let mut before = known.clone();
    before.forget_left(set, now);
    let known = &before;
    let mut merged = Merged {
        pods: known.clone(),
        ready: true,
        ..Merged::default()
    };
    let wanted = wanted(known, set, taken, &mut merged.duplicates);
    let mut found = HashSet::with_capacity(known.pods.len());
    // Those that are not, or not there, any more.
    let mut left = Vec::new();
    for candidate in &wanted {
        let uid = uid(candidate);
        let kept = match known.pods.get(uid) {
            None => {
                merged.adds.push(Arc::clone(&candidate.pod));
                (*candidate).clone()
            }
            Some(recorded) => {
                found.insert(uid);
                if recorded.origin != candidate.origin {
                    left.push(recorded);
                }
                let changed = (set.set_back || !is_same(recorded, candidate))
                    .then(|| update(recorded, candidate, set.set_back, &mut merged))
                    .flatten();
                let Some(changed) = changed else {
                    continue;
                };
                changed
            }
        };
        merged.pods.pods.insert(PodUid::new(uid), kept);
    }
    if found.len() < known.pods.len() {
        let gone = known.pods.iter();
        for (uid, pod) in gone.filter(|(uid, _)| !found.contains(uid.as_str())) {
            left.push(pod);
            merged.removes.push(Arc::clone(&pod.pod));
            merged.pods.pods.remove(uid);
        }
    }
    merged.pods.remember_left(&left, &wanted, now);
    merged
}

fn uid(sourced: &SourcedPod) -> &str {
    sourced.pod.metadata.uid.as_deref().unwrap_or_default()
}

/// Returns whether a source has sent the same pod again. That is so for nearly all pods of a set, so it compares
/// pointers instead of contents.
fn is_same(recorded: &SourcedPod, sent: &SourcedPod) -> bool {
    Arc::ptr_eq(&recorded.pod, &sent.pod) && recorded.origin == sent.origin
}

/// Returns the pods that the source wants: those it sent and those that keep their last valid version, by origin,
/// without duplicates.
fn wanted<'a>(
    known: &'a SourcePods,
    set: &'a SourceSet,
    taken: &dyn Fn(&str) -> bool,
    duplicates: &mut Vec<Duplicate>,
) -> Vec<&'a SourcedPod> {
    let frozen = known
        .pods
        .values()
        .filter(|p| set.broken.contains_key(&p.origin));
    let mut candidates: Vec<&SourcedPod> = frozen.chain(&set.pods).collect();
    candidates.sort_by(|a, b| a.origin.cmp(&b.origin));
    put_holders_first(known, &mut candidates);

    let mut names = HashMap::with_capacity(candidates.len());
    let mut uids = HashMap::with_capacity(candidates.len());
    candidates.retain(|&candidate| {
        let uid = uid(candidate);
        let (namespace, name) = (candidate.pod.namespace(), candidate.pod.name());
        let origin = &candidate.origin;
        let same_name: Option<&SourcedPod> = names.get(&(namespace, name)).copied();
        let same_uid: Option<&SourcedPod> = uids.get(uid).copied();
        let message = match (same_name, same_uid) {
            (Some(kept), _) => format!(
                "pod {namespace}/{name} of {origin} is already defined by {}; remove one of the two or rename it",
                kept.origin
            ),
            (None, Some(kept)) => format!(
                "pod {namespace}/{name} of {origin} has the UID {uid} of another pod, that of {}; change or remove metadata.uid",
                kept.origin
            ),
            (None, None) if taken(uid) => format!(
                "pod {namespace}/{name} of {origin} has the UID {uid} of another pod; change or remove metadata.uid"
            ),
            (None, None) => match broken_source(known, set, candidate) {
                Some(source) => format!(
                    "pod {namespace}/{name} of {origin} is defined by {source}, which cannot be used as it is; repair or \
                     remove {source}, or rename the pod of {origin}"
                ),
                None => {
                    names.insert((namespace, name), candidate);
                    uids.insert(uid, candidate);
                    return true;
                }
            },
        };
        let kept = same_name.or(same_uid).map(|kept| Arc::clone(&kept.pod));
        duplicates.push(Duplicate {
            origin: origin.clone(),
            pod: Arc::clone(&candidate.pod),
            kept,
            message,
        });
        false
    });
    candidates
}

/// Returns the manifest that defined a pod a moment ago and is back but broken: a copy of it does not take its place
/// meanwhile, unless it has done so already.
fn broken_source<'a>(
    known: &'a SourcePods,
    set: &SourceSet,
    candidate: &SourcedPod,
) -> Option<&'a str> {
    let source = known.left(&candidate.pod)?;
    let holds = || {
        known
            .pods
            .values()
            .any(|pod| place(pod) == place(candidate))
    };
    (source != candidate.origin && set.broken.contains_key(source) && !holds()).then_some(source)
}

/// Moves, where two candidates have one name or UID, the one to the front that has it already, by its origin. A copy of
/// a manifest takes nothing from the pod that runs, wherever its name is in the order, and an edit of the original
/// still counts.
fn put_holders_first(known: &SourcePods, candidates: &mut [&SourcedPod]) {
    let mut names = HashSet::with_capacity(candidates.len());
    let mut uids = HashSet::with_capacity(candidates.len());
    let is_alone = candidates
        .iter()
        .all(|pod| names.insert((pod.pod.namespace(), pod.pod.name())) && uids.insert(uid(pod)));
    if is_alone {
        return;
    }
    let holders: HashSet<_> = known.pods.values().map(place).collect();
    candidates.sort_by_key(|pod| {
        let of_uid = known.get(uid(pod));
        if (known.left(&pod.pod)).is_some_and(|origin| origin == pod.origin) {
            0
        } else if of_uid.is_some_and(|known| place(known) == place(pod)) {
            1
        } else if holders.contains(&place(pod)) {
            2
        } else if of_uid.is_some_and(|known| known.origin == pod.origin) {
            3
        } else {
            4
        }
    });
}

/// Sorts a pod that was known already into its operation, and says what is known of it from now on; `None` when nothing
/// of it has changed. The status of a pod of a source that was `set_back` counts as changed.
fn update(
    recorded: &SourcedPod,
    wanted: &SourcedPod,
    set_back: bool,
    merged: &mut Merged,
) -> Option<SourcedPod> {
    let changed = differs(&recorded.pod, &wanted.pod);
    let moved = recorded.origin != wanted.origin;
    let status_changed =
        (set_back || recorded.pod.status != wanted.pod.status) && !wanted.pod.is_static();
    if !changed && !moved && !status_changed {
        return None;
    }
    let pod = if same_local_annotations(&wanted.pod, &recorded.pod) {
        Arc::clone(&wanted.pod)
    } else {
        Arc::new(with_local_annotations(&wanted.pod, &recorded.pod))
    };
    let operation = match (changed, moved) {
        (true, _) if pod.is_deleting() => &mut merged.deletes,
        (false, false) => &mut merged.reconciles,
        _ => &mut merged.updates,
    };
    operation.push(Arc::clone(&pod));
    Some(SourcedPod {
        origin: wanted.origin.clone(),
        pod,
    })
}

/// Returns whether two pods want the same of this node; only annotations that the node itself sets may differ.
pub fn same_desired_state(a: &Pod, b: &Pod) -> bool {
    !differs(a, b)
}

/// Returns whether the desired state differs; upstream's `podsDifferSemantically`.
fn differs(a: &Pod, b: &Pod) -> bool {
    a.spec != b.spec
        || a.labels() != b.labels()
        || a.metadata.deletion_timestamp != b.metadata.deletion_timestamp
        || a.metadata.deletion_grace_period_seconds != b.metadata.deletion_grace_period_seconds
        || !foreign_annotations(a).eq(foreign_annotations(b))
}

fn foreign_annotations(pod: &Pod) -> impl Iterator<Item = (&String, &String)> {
    pod.annotations()
        .iter()
        .filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(&key.as_str()))
}

/// Returns whether `pod` has the local annotations of `recorded` already.
fn same_local_annotations(pod: &Pod, recorded: &Pod) -> bool {
    LOCAL_ANNOTATIONS.iter().all(|key| {
        let wanted = recorded.annotation(key);
        wanted.is_none() || wanted == pod.annotation(key)
    })
}

/// `pod` with the local annotations that the node gave it when it first saw it.
fn with_local_annotations(pod: &Pod, recorded: &Pod) -> Pod {
    let mut pod = pod.clone();
    for key in LOCAL_ANNOTATIONS {
        if let Some(value) = recorded.annotation(key) {
            pod.metadata
                .annotations
                .get_or_insert_default()
                .insert(key.to_owned(), value.to_owned());
        }
    }
    pod
}

#[cfg(test)]
mod tests;

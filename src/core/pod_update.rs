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
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::{PodSpec, PodStatus};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

    fn pod(name: &str, uid: &str) -> Pod {
        Pod {
            metadata: ObjectMeta {
                name: Some(name.into()),
                uid: Some(uid.into()),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec::default()),
            status: None,
        }
    }

    fn from(origin: &str, pod: Pod) -> SourcedPod {
        SourcedPod {
            origin: origin.into(),
            pod: Arc::new(pod),
        }
    }

    fn set(pods: Vec<SourcedPod>) -> SourceSet {
        SourceSet {
            source: PodSource::File,
            location: "/m".into(),
            reading: Reading::Complete,
            broken: BTreeMap::new(),
            pods,
            set_back: false,
        }
    }

    const NOW: Stamp = Stamp {
        boot: crate::types::BootId(1),
        boottime_ms: 1_000,
        wall_ms: 1_000,
    };

    fn free(_: &str) -> bool {
        false
    }

    fn names(pods: &[Arc<Pod>]) -> Vec<&str> {
        pods.iter().map(|p| p.name()).collect()
    }

    #[test]
    fn difference_of_full_sets() {
        let known = SourcePods::seeded([from("/m/a", pod("a", "1")), from("/m/b", pod("b", "2"))]);
        let mut changed = pod("b", "2");
        changed.metadata.labels = Some([("k".to_owned(), "v".to_owned())].into());
        let merged = merge(
            &known,
            &set(vec![from("/m/b", changed), from("/m/c", pod("c", "3"))]),
            &free,
            NOW,
        );
        assert_eq!(names(&merged.removes), ["a"]);
        assert_eq!(names(&merged.adds), ["c"]);
        assert_eq!(names(&merged.updates), ["b"]);
        assert!(merged.deletes.is_empty() && merged.reconciles.is_empty() && merged.ready);
        let again = merge(
            &merged.pods,
            &set(merged.pods.pods.values().cloned().collect()),
            &free,
            NOW,
        );
        assert_eq!(again.pods, merged.pods);
        assert!(again.removes.is_empty() && again.adds.is_empty() && again.updates.is_empty());
    }

    #[test]
    fn seeded_pod_keeps_what_the_node_gave_it() {
        let mut recorded = pod("a", "1");
        recorded.metadata.annotations = Some([(CONFIG_SEEN.to_owned(), "then".to_owned())].into());
        let known = SourcePods::seeded([from("/m/a", recorded)]);
        let mut again = pod("a", "1");
        again.metadata.annotations = Some([(CONFIG_SEEN.to_owned(), "now".to_owned())].into());
        let merged = merge(&known, &set(vec![from("/m/a", again.clone())]), &free, NOW);
        assert!(merged.updates.is_empty() && merged.adds.is_empty());
        assert_eq!(merged.pods, known);

        again.spec = None;
        let merged = merge(&known, &set(vec![from("/m/a", again)]), &free, NOW);
        assert_eq!(merged.updates.len(), 1);
        assert_eq!(merged.updates[0].annotation(CONFIG_SEEN), Some("then"));
    }

    #[test]
    fn deletion_and_status_have_their_own_operations() {
        let known = SourcePods::seeded([from("", pod("a", "1")), from("", pod("b", "2"))]);
        let mut deleted = pod("a", "1");
        deleted.metadata.deletion_timestamp = Some(Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH));
        let mut reported = pod("b", "2");
        reported.status = Some(PodStatus::default());
        let merged = merge(
            &known,
            &set(vec![from("", deleted), from("", reported)]),
            &free,
            NOW,
        );
        assert_eq!(names(&merged.deletes), ["a"]);
        assert_eq!(names(&merged.reconciles), ["b"]);
        assert!(merged.updates.is_empty());
    }

    #[test]
    fn a_source_that_was_set_back_has_every_status_looked_at() {
        let known = SourcePods::seeded([from("", pod("a", "1"))]);
        let again = |set_back| SourceSet {
            set_back,
            ..set(vec![from("", pod("a", "1"))])
        };
        assert!(
            merge(&known, &again(false), &free, NOW)
                .reconciles
                .is_empty()
        );
        let merged = merge(&known, &again(true), &free, NOW);
        assert_eq!(names(&merged.reconciles), ["a"]);
        assert!(merged.updates.is_empty() && merged.adds.is_empty());
    }

    #[test]
    fn moved_pod_is_an_update_so_that_its_new_origin_is_recorded() {
        let known = SourcePods::seeded([from("/m/a", pod("a", "1"))]);
        let merged = merge(&known, &set(vec![from("/m/b", pod("a", "1"))]), &free, NOW);
        assert_eq!(names(&merged.updates), ["a"]);
        assert!(merged.removes.is_empty() && merged.adds.is_empty());
        assert_eq!(merged.pods.get("1").unwrap().origin, "/m/b");
    }

    #[test]
    fn broken_origin_freezes_its_own_pods_only() {
        let known = SourcePods::seeded([from("/m/a", pod("a", "1")), from("/m/b", pod("b", "2"))]);
        let mut sent = set(vec![from("/m/c", pod("c", "3"))]);
        sent.broken.insert("/m/a".into(), "bad".into());
        let merged = merge(&known, &sent, &free, NOW);
        assert_eq!(names(&merged.removes), ["b"]);
        assert_eq!(names(&merged.adds), ["c"]);
        assert!(merged.pods.get("1").is_some());
    }

    #[test]
    fn absent_path_is_empty_unless_pods_are_recorded_from_it() {
        let mut sent = set(Vec::new());
        sent.reading = Reading::Absent;
        let merged = merge(&SourcePods::default(), &sent, &free, NOW);
        assert!(merged.ready && merged.frozen.is_none());

        let here = SourcePods::seeded([from("/m/a", pod("a", "1"))]);
        let merged = merge(&here, &sent, &free, NOW);
        assert!(merged.removes.is_empty() && merged.frozen.is_some() && merged.ready);
        assert_eq!(merged.pods, here);

        let elsewhere = SourcePods::seeded([from("/other/a", pod("a", "1"))]);
        let merged = merge(&elsewhere, &sent, &free, NOW);
        assert_eq!(names(&merged.removes), ["a"]);
    }

    #[test]
    fn unreadable_source_without_records_is_not_ready() {
        let mut sent = set(Vec::new());
        sent.reading = Reading::Unreadable("permission denied".into());
        assert!(!merge(&SourcePods::default(), &sent, &free, NOW).ready);
    }

    #[test]
    fn first_origin_wins_a_name_and_the_second_waits_for_it() {
        let both = set(vec![
            from("/m/b", pod("a", "2")),
            from("/m/a", pod("a", "1")),
        ]);
        let merged = merge(&SourcePods::default(), &both, &free, NOW);
        assert_eq!(merged.adds[0].uid(), "1".into());
        assert_eq!(merged.duplicates.len(), 1);
        assert_eq!(merged.duplicates[0].origin, "/m/b");
        assert!(merged.duplicates[0].message.contains("/m/a"));

        let second = merge(
            &merged.pods,
            &set(vec![from("/m/b", pod("a", "2"))]),
            &free,
            NOW,
        );
        assert_eq!(second.removes[0].uid(), "1".into());
        assert_eq!(second.adds[0].uid(), "2".into());
    }

    #[test]
    fn a_copy_of_a_manifest_takes_no_name_from_the_pod_that_has_it() {
        let known = SourcePods::seeded([from("/m/web.yaml", pod("web", "1"))]);
        // `/m/web-old.yaml` comes first by name. Identical or edited, the original counts.
        for original in [pod("web", "1"), pod("web", "2")] {
            let both = set(vec![
                from("/m/web-old.yaml", pod("web", "3")),
                from("/m/web.yaml", original.clone()),
            ]);
            let merged = merge(&known, &both, &free, NOW);
            let uid = original.uid();
            assert!(merged.pods.get(uid.as_str()).is_some(), "{uid}");
            assert!(merged.pods.get("3").is_none());
            assert_eq!(merged.duplicates.len(), 1);
            assert_eq!(merged.duplicates[0].origin, "/m/web-old.yaml");
            assert!(merged.duplicates[0].message.contains("/m/web.yaml"));
            let kept = merged.duplicates[0].kept.as_ref();
            assert_eq!(kept.map(|pod| pod.uid()), Some(uid));
        }
        // The copy waits until the original is gone.
        let copy = set(vec![from("/m/web-old.yaml", pod("web", "3"))]);
        let merged = merge(&known, &copy, &free, NOW);
        assert_eq!(names(&merged.removes), ["web"]);
        assert_eq!(merged.adds[0].uid(), "3".into());
    }

    #[test]
    fn a_manifest_that_comes_back_after_a_restart_of_the_agent_is_the_source_of_its_pod() {
        let (original, copy) = ("/m/web.yaml", "/m/web-old.yaml");
        let known = SourcePods::seeded([from(original, pod("web", "1"))]);
        let moved = set(vec![from(copy, pod("web", "2"))]);
        let merged = merge(&known, &moved, &free, NOW);
        // As the store has it: the pods, and the manifests that went away.
        let pods = merged.pods.iter().map(|(_, pod)| pod.clone());
        let left = serde_json::to_vec(&merged.pods.left_manifests()).unwrap();
        let left: Vec<LeftManifest> = serde_json::from_slice(&left).unwrap();
        assert_eq!((left.len(), left[0].origin.as_str()), (1, original));
        let restarted = SourcePods::seeded(pods).with_left(left);
        let both = set(vec![
            from(copy, pod("web", "2")),
            from(original, pod("web", "3")),
        ]);
        for (later, uid) in [(Duration::from_secs(60), "3"), (RETURN, "2")] {
            let merged = merge(&restarted, &both, &free, NOW.plus(later));
            assert!(merged.pods.get(uid).is_some(), "{later:?}");
            assert_eq!(merged.duplicates.len(), 1, "{later:?}");
        }
    }

    /// The manifests at one moment: file, name of the pod, UID; no pod for one that is broken.
    type Listing<'a> = &'a [(&'a str, Option<(&'a str, &'a str)>)];

    /// Merges listings a second apart, the first one as known. Returns the file and UID of each pod in the end, and the files
    /// that are refused.
    fn in_sequence(listings: &[Listing<'_>]) -> (Vec<(String, String)>, Vec<String>) {
        let (mut known, mut refused) = (SourcePods::default(), Vec::new());
        for (n, listing) in (0..).zip(listings) {
            let pods = listing.iter();
            let pods = pods.filter_map(|(file, p)| p.map(|(name, uid)| from(file, pod(name, uid))));
            let mut sent = set(pods.collect());
            let broken = listing.iter().filter(|(_, pod)| pod.is_none());
            sent.broken = broken
                .map(|(file, _)| ((*file).to_owned(), "bad".to_owned()))
                .collect();
            let merged = merge(&known, &sent, &free, NOW.plus(Duration::from_secs(n)));
            (known, refused) = (merged.pods, merged.duplicates);
        }
        let pods = known
            .iter()
            .map(|(uid, pod)| (pod.origin.clone(), uid.to_string()));
        (
            pods.collect(),
            refused.into_iter().map(|d| d.origin).collect(),
        )
    }

    /// A case: what was done, what was listed, the file and UID of the pod in the end, the files that are refused then.
    type Sequence<'a> = (
        &'a str,
        &'a [Listing<'a>],
        (&'a str, &'a str),
        &'a [&'a str],
    );

    #[test]
    fn the_manifest_that_a_pod_came_from_stays_its_source_whatever_wrote_it() {
        const WEB: &str = "/m/web.yaml";
        const COPY: &str = "/m/web-old.yaml";
        let (old, new) = (Some(("web", "old")), Some(("web", "new")));
        let copy = Some(("web", "copy"));
        let cases: [Sequence<'_>; 11] = [
            (
                "cp",
                &[&[(WEB, old)], &[(COPY, copy), (WEB, old)]],
                (WEB, "old"),
                &[COPY],
            ),
            (
                "mv and cp, each seen",
                &[&[(WEB, old)], &[(COPY, copy)], &[(COPY, copy), (WEB, new)]],
                (WEB, "new"),
                &[COPY],
            ),
            (
                "mv and cp in one burst",
                &[&[(WEB, old)], &[], &[(COPY, copy), (WEB, new)]],
                (WEB, "new"),
                &[COPY],
            ),
            (
                "mv and a cp that is half done",
                &[
                    &[(WEB, old)],
                    &[],
                    &[(COPY, copy), (WEB, None)],
                    &[(COPY, copy), (WEB, new)],
                ],
                (WEB, "new"),
                &[COPY],
            ),
            (
                "mv, seen, and a cp that is half done",
                &[
                    &[(WEB, old)],
                    &[(COPY, copy)],
                    &[(COPY, copy), (WEB, None)],
                    &[(COPY, copy), (WEB, new)],
                ],
                (WEB, "new"),
                &[COPY],
            ),
            (
                "sed -i.bak with its temporary file",
                &[
                    &[(WEB, old)],
                    &[("/m/sedXyz", new), (WEB, old)],
                    &[("/m/sedXyz", new), ("/m/web.yaml.bak", copy)],
                    &[(WEB, new), ("/m/web.yaml.bak", copy)],
                ],
                (WEB, "new"),
                &["/m/web.yaml.bak"],
            ),
            (
                "vim with a backup that it removes",
                &[&[(WEB, old)], &[("/m/web.yaml~", copy)], &[(WEB, new)]],
                (WEB, "new"),
                &[],
            ),
            (
                "vim twice, the second time in one burst",
                &[
                    &[(WEB, old)],
                    &[("/m/web.yaml~", copy)],
                    &[(WEB, new)],
                    &[],
                    &[(WEB, old), ("/m/web.yaml~", copy)],
                ],
                (WEB, "old"),
                &["/m/web.yaml~"],
            ),
            (
                "a rename",
                &[
                    &[(WEB, old)],
                    &[("/m/new.yaml", new)],
                    &[("/m/new.yaml", new)],
                ],
                ("/m/new.yaml", "new"),
                &[],
            ),
            (
                "a copy under another name with the same metadata.uid",
                &[&[(WEB, old)], &[(COPY, Some(("web2", "old"))), (WEB, old)]],
                (WEB, "old"),
                &[COPY],
            ),
            (
                "a rename of the pod beside a copy, both with the same metadata.uid",
                &[&[(WEB, old)], &[(COPY, old), (WEB, Some(("web2", "old")))]],
                (WEB, "old"),
                &[COPY],
            ),
        ];
        for (what, listings, (file, uid), refused) in cases {
            let (pods, not_taken) = in_sequence(listings);
            assert_eq!(pods, [(file.to_owned(), uid.to_owned())], "{what}");
            assert_eq!(not_taken, refused, "{what}");
        }
    }

    #[test]
    fn a_copy_waits_for_a_manifest_that_is_half_written_and_says_so() {
        let known = SourcePods::seeded([from("/m/web.yaml", pod("web", "1"))]);
        let known = merge(&known, &set(Vec::new()), &free, NOW).pods;
        let mut half = set(vec![from("/m/a.yaml", pod("web", "2"))]);
        half.broken.insert("/m/web.yaml".into(), "bad".into());
        let merged = merge(&known, &half, &free, NOW.plus(RETURN * 2));
        assert_eq!(names(&merged.adds), [""; 0]);
        let message = &merged.duplicates[0].message;
        assert!(
            message.contains("/m/a.yaml") && message.contains("/m/web.yaml"),
            "{message}"
        );
        // It is gone for good.
        let only = set(vec![from("/m/a.yaml", pod("web", "2"))]);
        assert_eq!(names(&merge(&merged.pods, &only, &free, NOW).adds), ["web"]);
    }

    #[test]
    fn a_manifest_that_comes_back_late_takes_nothing_from_what_runs() {
        let known = SourcePods::seeded([from("/m/web.yaml", pod("web", "1"))]);
        let copy = || from("/m/z.yaml", pod("web", "2"));
        let moved = merge(&known, &set(vec![copy()]), &free, NOW).pods;
        let both = set(vec![copy(), from("/m/web.yaml", pod("web", "3"))]);
        let at = |after| {
            merge(&moved, &both, &free, NOW.plus(after)).duplicates[0]
                .origin
                .clone()
        };
        assert_eq!(at(RETURN - Duration::from_millis(1)), "/m/z.yaml");
        assert_eq!(at(RETURN), "/m/web.yaml");
    }

    #[test]
    fn uid_of_another_source_is_refused() {
        let taken = |uid: &str| uid == "1";
        let merged = merge(
            &SourcePods::default(),
            &set(vec![from("/m/a", pod("a", "1"))]),
            &taken,
            NOW,
        );
        assert!(merged.adds.is_empty());
        assert!(merged.duplicates[0].message.contains("UID"));
    }

    #[test]
    fn an_equal_copy_is_nothing_new_and_is_not_copied_again() {
        let mut reported = pod("a", "1");
        reported.status = Some(PodStatus::default());
        let known = SourcePods::seeded([from("", reported.clone())]);
        let merged = merge(&known, &set(vec![from("", reported.clone())]), &free, NOW);
        assert_eq!(merged.pods, known);
        let of = |pods: &SourcePods| Arc::clone(&pods.get("1").unwrap().pod);
        assert!(Arc::ptr_eq(&of(&merged.pods), &of(&known)));
        assert!(merged.updates.is_empty() && merged.reconciles.is_empty());
        assert!(same_desired_state(&reported, &pod("a", "1")));

        let mut wanted = from("", reported);
        Arc::make_mut(&mut wanted.pod).metadata.labels =
            Some([("k".to_owned(), "v".to_owned())].into());
        let merged = merge(&known, &set(vec![wanted.clone()]), &free, NOW);
        assert!(Arc::ptr_eq(&merged.updates[0], &wanted.pod));
    }

    /// The status of a static pod in its manifest changes nothing.
    #[test]
    fn the_status_in_a_manifest_is_nothing_new() {
        let mut manifest = pod("a", "1");
        manifest.metadata.annotations =
            Some([(CONFIG_SOURCE.to_owned(), "file".to_owned())].into());
        let known = SourcePods::seeded([from("/m/a", manifest.clone())]);
        manifest.status = Some(PodStatus::default());
        let merged = merge(&known, &set(vec![from("/m/a", manifest)]), &free, NOW);
        assert!(merged.reconciles.is_empty() && merged.updates.is_empty());
    }

    #[test]
    fn each_part_of_the_wish_makes_a_difference_alone() {
        let changes: [fn(&mut Pod); 5] = [
            |pod| pod.spec.as_mut().unwrap().priority = Some(1),
            |pod| pod.metadata.labels = Some([("k".to_owned(), "v".to_owned())].into()),
            |pod| {
                let epoch = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
                pod.metadata.deletion_timestamp = Some(Time(epoch));
            },
            |pod| pod.metadata.deletion_grace_period_seconds = Some(5),
            |pod| pod.metadata.annotations = Some([("k".to_owned(), "v".to_owned())].into()),
        ];
        for (n, change) in changes.iter().enumerate() {
            let mut changed = pod("a", "1");
            change(&mut changed);
            assert!(!same_desired_state(&pod("a", "1"), &changed), "change {n}");
        }
    }

    /// A pod that keeps its last valid version at its origin is also sent from another one, which comes before or after
    /// it.
    #[test]
    fn a_frozen_pod_that_another_origin_sends_stays_with_its_own() {
        for other in ["/m/a", "/m/z"] {
            let known =
                SourcePods::seeded([from("/m/b", pod("p", "1")), from("/m/c", pod("q", "2"))]);
            let mut sent = set(vec![from(other, pod("p", "1"))]);
            sent.broken.insert("/m/b".into(), "bad".into());
            let merged = merge(&known, &sent, &free, NOW);
            assert_eq!(names(&merged.removes), ["q"], "{other}");
            assert_eq!(merged.pods.get("1").unwrap().origin, "/m/b");
            assert_eq!(
                (merged.pods.get("2"), merged.pods.iter().count()),
                (None, 1)
            );
            assert_eq!(merged.duplicates.len(), 1, "{other}");
            assert_eq!(names(&merged.updates), [""; 0], "{other}");
        }
    }
}

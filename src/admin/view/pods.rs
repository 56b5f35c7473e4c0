//! Names of pods by UID, from every table that knows one: a pod whose spec is gone still has a name, and one
//! that was forgotten has the name from its last journal line.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::state::{JournalRecord, State};
use crate::core::volumes::keys;
use crate::types::{PodExt, PodUid};

/// Namespace and name of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNames {
    /// Namespace, empty when no table knows it.
    pub namespace: String,
    /// Name, empty when no table knows it.
    pub name: String,
}

/// Every pod the state mentions.
#[derive(Clone, Debug, Default)]
pub struct PodIndex(BTreeMap<PodUid, PodNames>);

impl PodIndex {
    /// Reads all tables; the spec's name wins over the status', over the runtime's, over the worker's, over the
    /// journal's.
    pub fn of(state: &State) -> Self {
        let mut index = Self::default();
        for (uid, v) in &state.pods {
            let pod = &v.record.pod;
            index.learn(uid, pod.namespace(), pod.name());
        }
        for (uid, v) in &state.statuses {
            index.learn(uid, &v.record.namespace, &v.record.name);
        }
        for (uid, v) in &state.pleg {
            let status = &v.record.status;
            index.learn(uid, &status.namespace, &status.name);
        }
        for (uid, v) in &state.workers {
            // Neither a name nor a namespace contains an underscore.
            let (name, namespace) = v.record.full_name.split_once('_').unwrap_or_default();
            index.learn(uid, namespace, name);
        }
        for uid in state.admissions.keys().chain(state.queue.keys()) {
            index.learn(uid, "", "");
        }
        let children = state.containers.keys();
        let volumes = state.volumes.keys();
        let children = children.chain(volumes.filter(|key| keys::split(key).is_some()));
        for key in children.chain(state.probes.keys()) {
            let (uid, _) = key.split_once('/').unwrap_or((key, ""));
            index.learn(uid, "", "");
        }
        for v in state.journal.values() {
            if let Some(uid) = &v.record.pod {
                let (namespace, name) = forgotten_name(&v.record).unwrap_or_default();
                index.learn(uid.as_str(), namespace, name);
            }
        }
        index
    }

    /// Names of one pod.
    pub fn get(&self, uid: &str) -> Option<&PodNames> {
        self.0.get(&PodUid::new(uid))
    }

    /// Every pod, by UID.
    pub fn iter(&self) -> impl Iterator<Item = (&PodUid, &PodNames)> {
        self.0.iter()
    }

    /// UIDs of the pod with this `namespace/name`; else of the pods with this name; else of those whose
    /// UID begins so. A name can have several UIDs: a static pod gets a new one with every change.
    pub fn find(&self, pod: &str) -> BTreeSet<PodUid> {
        if pod.is_empty() {
            return BTreeSet::new();
        }
        if let Some((namespace, name)) = pod.split_once('/') {
            return self.matching(|_, names| names.namespace == namespace && names.name == name);
        }
        let by_name = self.matching(|_, names| names.name == pod);
        if !by_name.is_empty() {
            return by_name;
        }
        self.matching(|uid, _| uid.as_str().starts_with(pod))
    }

    fn matching(&self, test: impl Fn(&PodUid, &PodNames) -> bool) -> BTreeSet<PodUid> {
        let found = self.0.iter().filter(|(uid, names)| test(uid, names));
        found.map(|(uid, _)| uid.clone()).collect()
    }

    fn learn(&mut self, uid: &str, namespace: &str, name: &str) {
        let names = self.0.entry(PodUid::new(uid)).or_default();
        if names.name.is_empty() && !name.is_empty() {
            names.namespace = namespace.to_owned();
            names.name = name.to_owned();
        }
    }
}

/// Namespace and name in the line that is written when a pod's records are deleted: `namespace/name is gone …`.
fn forgotten_name(line: &JournalRecord) -> Option<(&str, &str)> {
    if line.what != "forgotten" {
        return None;
    }
    line.why.split_whitespace().next()?.split_once('/')
}

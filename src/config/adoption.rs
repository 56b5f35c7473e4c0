//! Static pods that another agent started on this node, or that this one started and has no record of.
//!
//! The UID of a static pod is a hash that its agent makes of the manifest, and every agent has its own. A pod that runs
//! under another agent's hash would be stopped and started again when this agent replaces that one. So a manifest
//! adopts the UID of the running pod of its name, if that pod has the containers of the manifest and is not recorded
//! otherwise. The hash of the manifest is kept as an annotation: the manifest has that UID until it changes, across
//! restarts, and also when the previous agent comes back, to which it is the UID it would have chosen itself.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use tracing::info;

use super::Seed;
use crate::core::pod_actions::container_hash;
use crate::types::pod::{CONFIG_HASH, MANIFEST_HASH};
use crate::types::{FullName, PodExt, PodSource, PodUid};

/// A static pod that runs and is not recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningStatic {
    /// Its UID.
    pub uid: PodUid,
    /// The source that its sandbox names.
    pub source: PodSource,
    /// Its name, with the node's.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Hash of the manifest, when this agent has made its sandbox.
    pub manifest: Option<String>,
    /// Hashes of its containers by name.
    pub containers: BTreeMap<String, String>,
}

impl RunningStatic {
    /// Its name and namespace.
    pub fn full_name(&self) -> FullName {
        FullName::of(&self.name, &self.namespace)
    }
}

#[derive(Default)]
struct Known {
    /// Hash of a manifest → UID it has.
    by_manifest: HashMap<String, PodUid>,
    /// Static pods that run under another agent's UID.
    running: Vec<RunningStatic>,
}

/// Manifests that have the UID of a pod that ran already.
#[derive(Default)]
pub(super) struct Adoptions(Mutex<Known>);

impl Adoptions {
    pub(super) fn new(seeds: &[Seed], running: Vec<RunningStatic>) -> Self {
        let mut known = Known::default();
        for seed in seeds {
            if let Some(manifest) = seed.pod.annotation(MANIFEST_HASH) {
                known
                    .by_manifest
                    .insert(manifest.to_owned(), seed.pod.uid());
            }
        }
        for pod in running {
            match &pod.manifest {
                Some(manifest) => {
                    let uid = known.by_manifest.entry(manifest.clone());
                    uid.or_insert(pod.uid);
                }
                None => known.running.push(pod),
            }
        }
        Self(Mutex::new(known))
    }

    /// Gives a pod that was read from a manifest the UID under which it runs, if it does.
    pub(super) fn apply(&self, pod: &mut Pod) {
        let Some(manifest) = pod.annotation(MANIFEST_HASH).map(str::to_owned) else {
            return;
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let uid = match known.by_manifest.get(&manifest) {
            Some(uid) => uid.clone(),
            None => {
                let same = |running: &RunningStatic| {
                    running.full_name() == pod.full_name() && has_its_containers(pod, running)
                };
                let Some(at) = known.running.iter().position(same) else {
                    return;
                };
                let uid = known.running.swap_remove(at).uid;
                info!(pod = %uid, name = pod.name(), "adopted a running static pod with its UID");
                known.by_manifest.insert(manifest, uid.clone());
                uid
            }
        };
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(CONFIG_HASH.to_owned(), uid.to_string());
        pod.metadata.uid = Some(uid.to_string());
    }
}

/// Returns whether the running containers are those of the manifest, with the images it names now.
fn has_its_containers(pod: &Pod, running: &RunningStatic) -> bool {
    running.containers.iter().all(|(name, hash)| {
        crate::types::containers::container_of(pod, name)
            .is_some_and(|spec| container_hash(&spec.container) == *hash)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn pod(manifest: &str, image: &str) -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {
                "name": "web-node1", "uid": manifest,
                "annotations": {CONFIG_HASH: manifest, MANIFEST_HASH: manifest},
            },
            "spec": {"containers": [{"name": "c", "image": image}]},
        }))
        .unwrap()
    }

    fn running(uid: &str, manifest: Option<&str>, of: &Pod) -> RunningStatic {
        RunningStatic {
            uid: PodUid::new(uid),
            source: PodSource::File,
            name: of.name().to_owned(),
            namespace: of.namespace().to_owned(),
            manifest: manifest.map(str::to_owned),
            containers: [("c".to_owned(), container_hash(&of.containers()[0]))].into(),
        }
    }

    fn uid_of(adoptions: &Adoptions, mut pod: Pod) -> String {
        adoptions.apply(&mut pod);
        assert_eq!(pod.annotation(CONFIG_HASH), pod.metadata.uid.as_deref());
        pod.uid().to_string()
    }

    #[test]
    fn a_running_pod_of_the_name_gives_its_uid_once() {
        let old = running("theirs", None, &pod("ours", "a"));
        let adoptions = Adoptions::new(&[], vec![old]);
        assert_eq!(uid_of(&adoptions, pod("ours", "a")), "theirs");
        assert_eq!(
            uid_of(&adoptions, pod("ours", "a")),
            "theirs",
            "at each reading"
        );
        let edited = uid_of(&adoptions, pod("edited", "a"));
        assert_eq!(edited, "edited", "a changed manifest is another pod");
    }

    #[test]
    fn other_containers_or_another_name_are_another_pod() {
        let adoptions = Adoptions::new(&[], vec![running("theirs", None, &pod("x", "a"))]);
        assert_eq!(uid_of(&adoptions, pod("ours", "b")), "ours");
        let mut other = pod("ours", "a");
        other.metadata.name = Some("api-node1".to_owned());
        assert_eq!(uid_of(&adoptions, other), "ours");
    }

    #[test]
    fn the_records_and_the_sandbox_remember_what_was_taken_over() {
        let mut taken = pod("ours", "a");
        taken.metadata.uid = Some("theirs".to_owned());
        let seed = Seed {
            source: PodSource::File,
            origin: "/m/web.yaml".to_owned(),
            pod: Arc::new(taken),
        };
        let adoptions = Adoptions::new(&[seed], Vec::new());
        assert_eq!(uid_of(&adoptions, pod("ours", "a")), "theirs");

        let own = running("theirs", Some("ours"), &pod("ours", "a"));
        let adoptions = Adoptions::new(&[], vec![own]);
        assert_eq!(uid_of(&adoptions, pod("ours", "a")), "theirs");
        assert_eq!(
            uid_of(&adoptions, pod("edited", "a")),
            "edited",
            "with the same images, but another manifest than it was made of"
        );
    }
}

//! Layer 4: the pods the sources want, by UID and by full name. Upstream: `pod.Manager`.
//!
//! Owns the desired pods in memory; the `pods` table holds the same pods for the next start and is written
//! by the pods' workers before they act. Seeded from that table at start, so that a pod the store knows
//! never looks new.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use k8s_openapi::api::core::v1::Pod;

use crate::types::{FullName, PodExt, PodUid};

#[derive(Debug, Default)]
struct Data {
    by_uid: HashMap<PodUid, Arc<Pod>>,
    by_full_name: HashMap<FullName, PodUid>,
    mirrors_by_uid: HashMap<PodUid, Arc<Pod>>,
    mirrors_by_full_name: HashMap<FullName, PodUid>,
}

/// Shared handle.
#[derive(Clone, Debug, Default)]
pub struct PodManager(Arc<RwLock<Data>>);

impl PodManager {
    fn read<T>(&self, f: impl FnOnce(&Data) -> T) -> T {
        f(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, f: impl FnOnce(&mut Data) -> T) -> T {
        f(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds or replaces a pod; mirror pods are kept apart.
    pub fn update(&self, pod: Arc<Pod>) {
        self.write(|d| {
            let (uid, full_name) = (pod.uid(), pod.full_name());
            let (pods, names) = if pod.is_mirror() {
                (&mut d.mirrors_by_uid, &mut d.mirrors_by_full_name)
            } else {
                (&mut d.by_uid, &mut d.by_full_name)
            };
            names.insert(full_name, uid.clone());
            pods.insert(uid, pod);
        });
    }

    /// Removes a pod or mirror pod. A newer pod of the same full name keeps its name.
    pub fn remove(&self, pod: &Pod) {
        self.write(|d| {
            let (uid, full_name) = (pod.uid(), pod.full_name());
            let (pods, names) = if pod.is_mirror() {
                (&mut d.mirrors_by_uid, &mut d.mirrors_by_full_name)
            } else {
                (&mut d.by_uid, &mut d.by_full_name)
            };
            pods.remove(&uid);
            if names.get(&full_name) == Some(&uid) {
                names.remove(&full_name);
            }
        });
    }

    /// A pod by UID, mirror pods excluded.
    pub fn get(&self, uid: &PodUid) -> Option<Arc<Pod>> {
        self.read(|d| d.by_uid.get(uid).cloned())
    }

    /// The newest pod of that name and namespace, mirror pods excluded.
    pub fn by_full_name(&self, name: &FullName) -> Option<Arc<Pod>> {
        self.read(|d| {
            let uid = d.by_full_name.get(name);
            uid.and_then(|uid| d.by_uid.get(uid)).cloned()
        })
    }

    /// The static pod a mirror pod stands for.
    pub fn pod_of_mirror(&self, mirror: &Pod) -> Option<Arc<Pod>> {
        self.read(|d| {
            d.by_full_name
                .get(&mirror.full_name())
                .and_then(|uid| d.by_uid.get(uid))
                .cloned()
        })
    }

    /// The mirror pod of a static pod.
    pub fn mirror_of(&self, pod: &Pod) -> Option<Arc<Pod>> {
        self.read(|d| {
            d.mirrors_by_full_name
                .get(&pod.full_name())
                .and_then(|uid| d.mirrors_by_uid.get(uid))
                .cloned()
        })
    }

    /// All pods, mirror pods excluded, in no order.
    pub fn all(&self) -> Vec<Arc<Pod>> {
        self.read(|d| d.by_uid.values().cloned().collect())
    }

    /// Number of (pods that are static, other pods, mirror pods).
    pub fn counts(&self) -> (usize, usize, usize) {
        self.read(|d| {
            let statics = d.by_uid.values().filter(|p| p.is_static()).count();
            (statics, d.by_uid.len() - statics, d.mirrors_by_uid.len())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, uid: &str, mirror: bool) -> Arc<Pod> {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.into());
        pod.metadata.uid = Some(uid.into());
        if mirror {
            pod.metadata.annotations = Some(
                [(crate::types::pod::CONFIG_MIRROR.to_owned(), "h".to_owned())]
                    .into_iter()
                    .collect(),
            );
        }
        Arc::new(pod)
    }

    #[test]
    fn a_mirror_pod_finds_its_static_pod_and_back() {
        let manager = PodManager::default();
        let (real, mirror) = (pod("a", "u1", false), pod("a", "m1", true));
        manager.update(Arc::clone(&real));
        manager.update(Arc::clone(&mirror));
        assert_eq!(manager.pod_of_mirror(&mirror), Some(Arc::clone(&real)));
        assert_eq!(manager.mirror_of(&real), Some(mirror));
        assert_eq!(manager.all().len(), 1);
    }

    #[test]
    fn removing_the_old_uid_leaves_the_new_pod_of_that_name() {
        let manager = PodManager::default();
        let (old, new) = (pod("a", "u1", false), pod("a", "u2", false));
        manager.update(Arc::clone(&old));
        manager.update(Arc::clone(&new));
        manager.remove(&old);
        let mirror = pod("a", "m1", true);
        assert_eq!(manager.pod_of_mirror(&mirror), Some(new));
        assert!(manager.get(&"u1".into()).is_none());
    }
}

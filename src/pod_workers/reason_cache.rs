//! Why a container is not running, for the Waiting state of the API status. Upstream: `ReasonCache`.
//!
//! Kept in memory: every reason in it follows from a durable record (a back-off, a refusal) or from the
//! next try. A restart begins with the reasons of the recorded statuses, so that none is untold before the
//! first sync.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use crate::types::PodUid;

/// Reason and message of a container that could not be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartFailure {
    /// CamelCase reason: `CrashLoopBackOff`, `ErrImagePull`, ….
    pub reason: String,
    /// For a human.
    pub message: String,
}

/// Shared handle; the last failure per pod and container.
#[derive(Clone, Debug, Default)]
pub struct ReasonCache(Arc<Mutex<HashMap<PodUid, BTreeMap<String, StartFailure>>>>);

impl ReasonCache {
    /// Replaces what is known of a pod by what its newest sync found.
    pub fn set(&self, uid: &PodUid, failures: BTreeMap<String, StartFailure>) {
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.is_empty() {
            cache.remove(uid);
        } else {
            cache.insert(uid.clone(), failures);
        }
    }

    /// What is known of a pod.
    pub fn get(&self, uid: &PodUid) -> BTreeMap<String, StartFailure> {
        let cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cache.get(uid).cloned().unwrap_or_default()
    }

    /// Forgets a pod.
    pub fn remove(&self, uid: &PodUid) {
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cache.remove(uid);
    }
}

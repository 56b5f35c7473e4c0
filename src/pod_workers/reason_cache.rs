//! Reasons why containers are not running, for the Waiting state of the API status. Upstream: `ReasonCache`.
//!
//! Kept in memory: every reason in it follows from a durable record (a back-off, a refusal) or from the next try. After
//! a restart the cache begins with the reasons of the recorded statuses, so each is reported before the first sync.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1 as api;

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
    /// Returns the reason and message of each waiting container in a status, of any kind; those without a message are
    /// left out.
    pub fn told(status: &api::PodStatus) -> BTreeMap<String, StartFailure> {
        let lists = [
            &status.init_container_statuses,
            &status.container_statuses,
            &status.ephemeral_container_statuses,
        ];
        let waiting = |container: &api::ContainerStatus| {
            let waiting = container.state.as_ref()?.waiting.as_ref()?;
            let failure = StartFailure {
                reason: waiting.reason.clone()?,
                message: waiting.message.clone()?,
            };
            Some((container.name.clone(), failure))
        };
        let all = lists.into_iter().flat_map(|list| list.iter().flatten());
        all.filter_map(waiting).collect()
    }

    /// Replaces what is known of a pod by what its newest sync found.
    pub fn set(&self, uid: &PodUid, failures: BTreeMap<String, StartFailure>) {
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.is_empty() {
            cache.remove(uid);
        } else {
            cache.insert(uid.clone(), failures);
        }
    }

    /// Returns the last failures of a pod's containers, by container name.
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_containers_of_every_kind_wait_for_was_told() {
        let container = |name: &str, state: serde_json::Value| {
            json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": state})
        };
        let waiting = |name: &str| {
            container(
                name,
                json!({"waiting": {"reason": "ImagePullBackOff", "message": name}}),
            )
        };
        let silent = container("silent", json!({"waiting": {"reason": "PodInitializing"}}));
        let running = container("running", json!({"running": {}}));
        let status = serde_json::from_value(json!({
            "initContainerStatuses": [waiting("init")],
            "containerStatuses": [waiting("main"), silent, running],
            "ephemeralContainerStatuses": [waiting("debug")],
        }))
        .unwrap();
        let told = ReasonCache::told(&status);
        let told: Vec<_> = told
            .iter()
            .map(|(name, f)| (&**name, &*f.message))
            .collect();
        assert_eq!(
            told,
            [("debug", "debug"), ("init", "init"), ("main", "main")]
        );
    }
}

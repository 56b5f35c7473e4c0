//! Updates from the sources of pods, and the messages that the mux makes of them.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

/// Source of a pod's desired state; upstream's `kubetypes.*Source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PodSource {
    /// `--pod-manifest-path` / `staticPodPath`.
    File,
    /// `--manifest-url` / `staticPodURL`.
    Http,
    /// The API server.
    Api,
}

impl PodSource {
    /// The value of the annotation `kubernetes.io/config.source`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Http => "http",
            Self::Api => "api",
        }
    }

    /// Returns whether pods of this source exist without the API server (static pods).
    pub fn is_static(self) -> bool {
        !matches!(self, Self::Api)
    }
}

impl fmt::Display for PodSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Kind of change of the pods in an update; upstream's `kubetypes.PodOperation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PodOp {
    /// New pods.
    Add,
    /// Pods whose desired state changed.
    Update,
    /// Pods that are gone from their source.
    Remove,
    /// Pods that got a deletionTimestamp.
    Delete,
    /// Pods whose status alone differs.
    Reconcile,
}

/// One message of the updates channel (capacity 50).
#[derive(Clone, Debug)]
pub struct PodUpdate {
    /// Kind of change.
    pub op: PodOp,
    /// To pods of which source.
    pub source: PodSource,
    /// The pods. An empty `Add` marks its source ready.
    pub pods: Vec<Arc<Pod>>,
}

/// Reason why a worker is to sync its pod; upstream's `kubetypes.SyncPodType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PodSyncType {
    /// First sight, or resumed from the store.
    Create,
    /// Desired state changed.
    Update,
    /// Something else changed: runtime, probe, timer.
    Sync,
    /// The pod is to be stopped.
    Kill,
}

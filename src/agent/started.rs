//! Handles of the running agent, for the tasks that follow its start.

use std::sync::Arc;

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::Node;

use crate::config::{PodConfig, SourcesReady};
use crate::pod_manager::PodManager;
use crate::pod_workers::PodWorkers;

/// Handles of the running agent.
pub(super) struct Started {
    pub(super) config: PodConfig,
    pub(super) workers: PodWorkers,
    pub(super) pods: PodManager,
    pub(super) ready: SourcesReady,
    /// See [`crate::sync_loop::LoopContext::local_node`].
    pub(super) local_node: Arc<ArcSwap<Node>>,
}

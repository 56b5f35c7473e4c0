//! Parts of the node that work before the runtime has answered: its object, cgroups, evictions, objects of pods.

use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::Node;
use tokio_util::sync::CancellationToken;

use super::base::Base;
use super::known_pods::known_pods;
use super::{AgentError, Tasks, addresses, api, eviction, node};
use crate::cm::CgroupManager;
use crate::eviction::Remedies;
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::node_context::NodeContext;
use crate::nodestatus::NodeStatusHandle;
use crate::objects::Objects;
use crate::status::StatusManager;

/// Parts of the node that need no runtime.
pub(super) struct NodeParts {
    /// Client of the runtime, which may not answer yet.
    pub(super) cri: CriClient,
    /// Handle of the node's status; `None` without an API server.
    pub(super) reported: Option<NodeStatusHandle>,
    /// Cgroups of all pods.
    pub(super) cgroups: CgroupManager,
    /// Means of the manager of evictions; it evicts once they are set.
    pub(super) remedies: Arc<OnceLock<Remedies>>,
    /// Facts that configurations of containers depend on.
    pub(super) context: NodeContext,
    /// Node as the agent itself sees it.
    pub(super) local: Arc<ArcSwap<Node>>,
    /// API objects that pods refer to.
    pub(super) objects: Objects,
    /// Statuses of pods.
    pub(super) statuses: StatusManager,
}

impl NodeParts {
    /// Builds the parts. The node lives on in the API server while the runtime is away.
    ///
    /// # Errors
    /// When the cgroups or a setting cannot be used on this machine.
    pub(super) async fn build(
        config: &AgentConfig,
        base: &Base,
        cri: CriClient,
        tasks: &mut Tasks,
        token: &CancellationToken,
    ) -> Result<Self, AgentError> {
        let cri = cri
            .knowing_pods(known_pods(config, base.store.clone()))
            .resuming_pulls(&base.boot.kernel_boot_id, Arc::clone(&base.clock));
        let reported = api::report_node(config, base, &cri, tasks, token);
        addresses::find(config, base, tasks, token);
        api::forget_events(base).await;
        let cgroups = node::cgroups(config, base).await?;
        let remedies = eviction::watch(config, base, cri.clone(), tasks, token);
        let context = node::context(config, &cgroups, base.addresses.clone())?;
        node::check_resolver(base, &context);
        let local = Arc::new(ArcSwap::new(api::local_node(config, base).await));
        let objects = api::objects(config, base).await;
        let statuses = StatusManager::new(base.store.clone(), Arc::clone(&base.clock));
        Ok(Self {
            cri,
            reported,
            cgroups,
            remedies,
            context,
            local,
            objects,
            statuses,
        })
    }
}

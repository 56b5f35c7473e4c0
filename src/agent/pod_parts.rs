//! Parts that pod workers act with, seeded from the plan of this start.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::base::Base;
use super::node_parts::NodeParts;
use super::resume::Restored;
use super::{AgentError, Tasks, devices, early_ends, images, pinning, pleg, probes, volumes};
use crate::cm::pinning::Pinning;
use crate::core::pleg_diff::PodLifecycleEvent;
use crate::images::ImageManager;
use crate::kubeletconfig::AgentConfig;
use crate::pleg::{Pleg, PlegHandle};
use crate::pod_workers::WorkQueue;
use crate::prober::Prober;
use crate::types::probe::ProbeReceivers;
use crate::volumemanager::VolumeManager;

/// Parts that pod workers act with.
pub(super) struct PodParts {
    /// CPUs and NUMA nodes of containers.
    pub(super) pinning: Pinning,
    /// Generator of lifecycle events, to be run.
    pub(super) pleg: Pleg,
    /// Handle of the generator.
    pub(super) pleg_handle: PlegHandle,
    /// Lifecycle events.
    pub(super) pleg_events: mpsc::Receiver<PodLifecycleEvent>,
    /// Due times of pods.
    pub(super) queue: WorkQueue,
    /// Volumes of pods.
    pub(super) volumes: VolumeManager,
    /// Probes, to be run.
    pub(super) prober: Prober,
    /// Results of probes.
    pub(super) probe_results: ProbeReceivers,
    /// Images, to be run.
    pub(super) images: Arc<ImageManager>,
    /// Changes that may end back-offs early.
    pub(super) signals: early_ends::Signals,
}

impl PodParts {
    /// Builds the parts, and restores devices, CPUs and volumes from their records.
    ///
    /// # Errors
    /// When a setting cannot be used on this machine, or the store refuses a commit.
    pub(super) async fn build(
        config: &AgentConfig,
        base: &Base,
        node: &NodeParts,
        restored: &Restored,
        tasks: &mut Tasks,
        token: &CancellationToken,
    ) -> Result<Self, AgentError> {
        devices::resume(config, &base.devices, &restored.plan.current).await?;
        let memory = node.context.machine.get().memory();
        let pinning = pinning::managers(config, base, &node.cgroups, memory).await?;
        let (pleg, pleg_handle, pleg_events) = pleg::build(base, &node.cri, restored);
        let queue = WorkQueue::new(base.store.clone());
        let memory = volumes::following(&node.local, &node.context.machine);
        let (volumes, drivers) = volumes::build(config, base, memory, tasks, token).await;
        let (prober, probe_results) = probes::build(base, &node.cri);
        let (name, reported) = (&restored.runtime_name, node.reported.clone());
        let (images, changes) = images::build(config, base, &node.objects, name, reported);
        Ok(Self {
            pinning,
            pleg,
            pleg_handle,
            pleg_events,
            queue,
            volumes,
            prober,
            probe_results,
            images,
            signals: early_ends::Signals {
                images: changes,
                drivers,
            },
        })
    }
}

//! Setup of the pod workers.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::base::Base;
use super::early_ends;
use super::node_parts::NodeParts;
use super::pod_parts::PodParts;
use super::resume::{Restored, reported_reasons};
use crate::kubeletconfig::AgentConfig;
use crate::nodestatus::cpus;
use crate::pod_workers::{PodWorkers, StartGate, WorkerContext};

/// Pods that are started at a time, for each processor; the runtime itself is no faster with more.
const STARTS_OF_CORE: usize = 2;
/// And however few processors there are: a start waits for the disk and the network, too.
const LEAST_STARTS: usize = 4;

/// Builds the workers, which have no pods yet.
pub(super) fn build(
    config: &AgentConfig,
    base: &Base,
    node: &NodeParts,
    pods: &PodParts,
    restored: &Restored,
    token: &CancellationToken,
) -> PodWorkers {
    PodWorkers::new(
        WorkerContext {
            store: base.store.clone(),
            clock: Arc::clone(&base.clock),
            cri: node.cri.clone(),
            pleg: pods.pleg_handle.clone(),
            status: node.statuses.clone(),
            images: Arc::clone(&pods.images),
            volumes: pods.volumes.clone(),
            devices: base.devices.clone(),
            claims: base.dra.clone(),
            objects: node.objects.clone(),
            node_object: base.node.clone(),
            cgroups: Arc::new(node.cgroups.clone().with_pinning(pods.pinning.clone())),
            pinning: pods.pinning.clone(),
            node: node.context.clone(),
            recorder: Arc::clone(&base.recorder) as _,
            reasons: reported_reasons(&base.store.snapshot()),
            causes: early_ends::causes(config),
            volume_images: Default::default(),
            runtime_state: base.runtime_state.clone(),
            queue: pods.queue.clone(),
            metrics: base.metrics.clone(),
            runtime_name: restored.runtime_name.clone(),
            resync: config.kubelet.sync_frequency,
            backoff_max: config.kubelet.max_container_restart_period,
            starts: StartGate::new(starts_at_once(cpus())),
            prober: pods.prober.clone(),
            epoch: restored.plan.epoch.clone(),
        },
        token.child_token(),
    )
}

fn starts_at_once(cpus: u64) -> usize {
    let cpus = usize::try_from(cpus).unwrap_or(usize::MAX);
    cpus.saturating_mul(STARTS_OF_CORE).max(LEAST_STARTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_more_processors_start_more_pods_at_a_time() {
        let starts = [1, 2, 3, 8, u64::MAX].map(starts_at_once);
        assert_eq!(starts, [4, 4, 6, 16, usize::MAX]);
    }
}

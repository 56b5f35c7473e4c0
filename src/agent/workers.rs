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
use crate::pod_workers::{
    Content, PodWorkers, Reports, Resources, Schedule, StartGate, WorkerContext,
};

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
            recorder: Arc::clone(&base.recorder) as _,
            metrics: base.metrics.clone(),
            cri: node.cri.clone(),
            node: node.context.clone(),
            pleg: pods.pleg_handle.clone(),
            runtime_state: base.runtime_state.clone(),
            content: Content {
                images: Arc::clone(&pods.images),
                volumes: pods.volumes.clone(),
                objects: node.objects.clone(),
                node_object: base.node.clone(),
                volume_images: Default::default(),
            },
            resources: Resources {
                cgroups: Arc::new(node.cgroups.clone().with_pinning(pods.pinning.clone())),
                pinning: pods.pinning.clone(),
                devices: base.devices.clone(),
                claims: base.dra.clone(),
            },
            reports: Reports {
                status: node.statuses.clone(),
                reasons: reported_reasons(&base.store.snapshot()),
                prober: pods.prober.clone(),
                runtime_name: restored.runtime_name.clone(),
                backoff_max: config.kubelet.max_container_restart_period,
            },
            schedule: Schedule {
                queue: pods.queue.clone(),
                starts: StartGate::new(starts_at_once(cpus())),
                causes: early_ends::causes(config),
                resync: config.kubelet.sync_frequency,
                epoch: restored.plan.epoch.clone(),
            },
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

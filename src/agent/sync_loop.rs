//! Setup of the sync loop and its janitor.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::base::Base;
use super::node_parts::NodeParts;
use crate::config::{PodConfig, RunningStatic};
use crate::core::node_status::pod_capacity;
use crate::kubeletconfig::{AgentConfig, KubeletConfiguration};
use crate::kuberuntime::gc::GcPolicy;
use crate::nodestatus::cpus;
use crate::pod_workers::PodWorkers;
use crate::sync_loop::{Janitor, LoopContext, MaxPods, SyncLoop};

/// Capacity of the channel to the janitor.
const JANITOR_CAPACITY: usize = 50;

/// Builds the sync loop and the janitor that it gives orders to. `unrecorded` are the static pods that run without a record.
pub(super) fn build(
    config: &AgentConfig,
    base: &Base,
    node: &NodeParts,
    workers: &PodWorkers,
    sources: &PodConfig,
    unrecorded: Arc<[RunningStatic]>,
) -> (SyncLoop, Janitor) {
    let (orders, janitor_orders) = mpsc::channel(JANITOR_CAPACITY);
    let janitor = Janitor::new(workers.clone(), container_policy(config), janitor_orders);
    let statuses = node.statuses.clone();
    let parts = workers.context();
    let sync_loop = SyncLoop::new(
        LoopContext {
            pods: base.pods.clone(),
            workers: workers.clone(),
            pleg: parts.pleg.clone(),
            queue: parts.schedule.queue.clone(),
            pinning: parts.resources.pinning.clone(),
            devices: parts.resources.devices.clone(),
            apparmor: parts.node.apparmor,
            ready: sources.ready(),
            origins: sources.origins(),
            unrecorded,
            store: base.store.clone(),
            runtime_state: base.runtime_state.clone(),
            clock: Arc::clone(&base.clock),
            recorder: Arc::clone(&base.recorder) as _,
            metrics: base.metrics.clone(),
            node_name: config.node_name.clone(),
            node: base.node.clone(),
            local_node: Arc::clone(&node.local),
            max_pods: max_pods(&config.kubelet, cpus),
            unsafe_sysctls: config.kubelet.allowed_unsafe_sysctls.clone().into(),
            pressure: base.pressure.subscribe(),
            observed: Arc::new(move |seen| statuses.observed(seen)),
            janitor: orders,
        },
        base.monitor.clone(),
    );
    (sync_loop, janitor)
}

/// Returns how many pods the node may run. `cpus` counts the processors, of which some may be added while the agent runs; it is
/// asked each time that they matter.
fn max_pods(
    kubelet: &KubeletConfiguration,
    cpus: impl Fn() -> u64 + Send + Sync + 'static,
) -> MaxPods {
    let (most, of_core) = (kubelet.max_pods, kubelet.pods_per_core);
    Arc::new(move || {
        let cpus = if of_core == 0 { 0 } else { cpus() };
        usize::try_from(pod_capacity(most, of_core, cpus)).unwrap_or(usize::MAX)
    })
}

/// Returns the rules by which dead containers are removed.
pub(super) fn container_policy(config: &AgentConfig) -> GcPolicy {
    let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let gc = &config.container_gc;
    GcPolicy {
        max_per_container: gc.max_per_container.map_or(usize::MAX, count).max(1),
        max_total: gc.max_total.map(count),
        min_age: gc.min_age,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_that_is_added_brings_its_pods() {
        let kubelet = KubeletConfiguration {
            max_pods: 50,
            pods_per_core: 10,
            ..KubeletConfiguration::default()
        };
        let online = Arc::new(std::sync::atomic::AtomicU64::new(2));
        let of = Arc::clone(&online);
        let most = max_pods(&kubelet, move || {
            of.load(std::sync::atomic::Ordering::Relaxed)
        });
        assert_eq!(most(), 20);
        for (cpus, pods) in [(4, 40), (8, 50)] {
            online.store(cpus, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(most(), pods);
        }
    }
}

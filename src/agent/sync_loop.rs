//! Setup of the sync loop and its janitor.

use std::sync::Arc;

use crate::core::node_status::pod_capacity;
use crate::kubeletconfig::{AgentConfig, KubeletConfiguration};
use crate::kuberuntime::gc::GcPolicy;
use crate::sync_loop::MaxPods;

/// Capacity of the channel to the janitor.
pub(super) const JANITOR_CAPACITY: usize = 50;

/// Returns how many pods the node may run. `cpus` counts the processors, of which some may be added while the agent runs; it is
/// asked each time that they matter.
pub(super) fn max_pods(
    kubelet: &KubeletConfiguration,
    cpus: impl Fn() -> u64 + Send + Sync + 'static,
) -> MaxPods {
    let (most, of_core) = (kubelet.max_pods, kubelet.pods_per_core);
    Arc::new(move || {
        let cpus = if of_core == 0 { 0 } else { cpus() };
        usize::try_from(pod_capacity(most, of_core, cpus)).unwrap_or(usize::MAX)
    })
}

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

//! Fuzz targets of what is made of pods and of the runtime's answers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;

pub(crate) use super::cri::fuzzing::cri_answers;
use super::node_context::{MachineFacts, MemorySize, NodeContext};
use super::security::{self, Isolation};
use super::{resources, sandbox_config};
use crate::core::{resources as amounts, supported};
use crate::types::PodExt as _;

/// Makes of a pod every message to the runtime about it. The pod is what an API server might show: nothing about it was
/// checked but its types.
///
/// Panics when something of it makes no sense to the runtime: an amount below zero, a name that is too long.
pub(crate) fn convert_pod(pod: &Pod) {
    let ctx = NodeContext {
        cgroup_v2: true,
        ..NodeContext::new("node", "/var/lib/kubelet")
    };
    let memory = 16 << 30;
    ctx.machine.set(MachineFacts {
        size: Some(MemorySize { memory, swap: 0 }),
        ..MachineFacts::default()
    });
    let refusals = supported::refused(pod);
    assert!(refusals.is_empty() || !supported::summary(&refusals).is_empty());
    for amount in amounts::pod_requests(pod).into_values() {
        // Sums of amounts of which each is in range.
        assert!(amount.checked_mul(2).is_some());
    }
    amounts::pod_limits(pod);
    amounts::ephemeral_storage_limit(pod);
    let dns = v1::DnsConfig::default();
    if let Ok(config) = sandbox_config::build(pod, 0, "/kubepods", dns, &ctx) {
        assert!(config.hostname.len() <= 64);
    }
    for container in pod.containers().iter().chain(pod.init_containers()) {
        security::container_context(pod, container, &Isolation::default(), &ctx).ok();
        if let Ok(score) = resources::oom_score_adj(pod, container, Some(memory)) {
            assert!((-1000..=1000).contains(&score), "{score}");
        }
        if let Ok(linux) = resources::container_linux_resources(pod, container, &ctx) {
            assert!(linux.cpu_shares >= 2 && linux.memory_limit_in_bytes >= 0);
        }
    }
    resources::pod_huge_pages(pod).ok();
}

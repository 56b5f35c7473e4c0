//! Setup of the rotation of container logs.

use crate::container_logs::RotationPolicy;
use crate::kubeletconfig::{AgentConfig, NEVER_ROTATE};

pub(super) fn rotation_policy(config: &AgentConfig) -> RotationPolicy {
    let kubelet = &config.kubelet;
    let size = kubelet.container_log_max_size;
    RotationPolicy {
        max_size: (size != NEVER_ROTATE).then_some(size),
        max_files: kubelet.container_log_max_files,
        workers: usize::try_from(kubelet.container_log_max_workers).unwrap_or(usize::MAX),
        interval: kubelet.container_log_monitor_interval,
    }
}

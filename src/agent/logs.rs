//! Setup of the rotation of container logs.

use std::sync::Arc;

use super::base::Base;
use crate::container_logs::{LogRotator, RotationPolicy};
use crate::kubeletconfig::{AgentConfig, NEVER_ROTATE};
use crate::kuberuntime::cri::CriClient;

/// Builds the rotator of the logs of all containers.
pub(super) fn build(config: &AgentConfig, base: &Base, cri: CriClient) -> LogRotator {
    LogRotator::new(
        base.store.clone(),
        cri,
        Arc::clone(&base.clock),
        rotation_policy(config),
        config.pod_logs_dir().to_owned(),
    )
}

fn rotation_policy(config: &AgentConfig) -> RotationPolicy {
    let kubelet = &config.kubelet;
    let size = kubelet.container_log_max_size;
    RotationPolicy {
        max_size: (size != NEVER_ROTATE).then_some(size),
        max_files: kubelet.container_log_max_files,
        workers: usize::try_from(kubelet.container_log_max_workers).unwrap_or(usize::MAX),
        interval: kubelet.container_log_monitor_interval,
    }
}

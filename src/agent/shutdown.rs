//! Shutdowns of the machine: who announces them, and the manager that stops the pods in time.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Tasks;
use super::start::Base;
use crate::core::shutdown::Periods;
use crate::kubeletconfig::AgentConfig;
use crate::nodeshutdown::logind::Logind;
use crate::nodeshutdown::{self, NodeShutdown, NodeShutdownOptions};
use crate::pod_workers::PodWorkers;

/// How long containers get at the end of an agent that ends with its machine. With the other parts of the end it is less
/// than `TimeoutStopSec` of the unit.
pub(super) const LAST_STOP: Duration = Duration::from_secs(20);

/// Starts the manager of graceful shutdowns, and what announces them. Does nothing where no period is configured.
pub(super) fn watch(
    config: &AgentConfig,
    base: &Base,
    workers: &PodWorkers,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let kubelet = &config.kubelet;
    let Some(periods) = Periods::new(
        kubelet.shutdown_grace_period,
        kubelet.shutdown_grace_period_critical_pods,
        &kubelet.shutdown_grace_period_by_pod_priority,
    ) else {
        return;
    };
    let link = match &base.shutdown {
        Some(link) => link.clone(),
        None => {
            let (announcer, link) = nodeshutdown::link();
            let Some(logind) = Logind::of_this_machine(periods.clone(), announcer) else {
                warn!("shutdownGracePeriod has no effect: systemd is not PID 1 of this machine");
                return;
            };
            tasks.add("logind", logind.run(token.clone()));
            link
        }
    };
    let manager = NodeShutdown::new(NodeShutdownOptions {
        periods,
        link,
        pods: Arc::new(workers.clone()),
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        runtime_state: base.runtime_state.clone(),
        recorder: Arc::clone(&base.recorder) as _,
        metrics: base.metrics.clone(),
        connection: base.api.as_ref().map(|api| api.connection().clone()),
    });
    tasks.add("node shutdown", manager.run(token.clone()));
}

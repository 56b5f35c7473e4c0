//! Shutdowns of the machine: who announces them, and the manager that stops the pods in time.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Tasks;
use super::base::Base;
use crate::core::shutdown::Periods;
use crate::kubeletconfig::AgentConfig;
use crate::nodeshutdown::logind::Logind;
use crate::nodeshutdown::{self, NodeShutdown, NodeShutdownOptions};
use crate::pod_workers::PodWorkers;

/// Grace period of containers when the agent exits because its machine shuts down. Together with the other steps of the
/// exit it is shorter than `TimeoutStopSec` of the unit.
pub(super) const LAST_STOP: Duration = Duration::from_secs(20);

/// Starts the manager of graceful shutdowns, and what announces them where a period is configured.
pub(super) fn watch(
    config: &AgentConfig,
    base: &Base,
    workers: &PodWorkers,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let kubelet = &config.kubelet;
    let periods = Periods::new(
        kubelet.shutdown_grace_period,
        kubelet.shutdown_grace_period_critical_pods,
        &kubelet.shutdown_grace_period_by_pod_priority,
    );
    let link = match (&periods, &base.shutdown) {
        (Some(_), Some(link)) => link.clone(),
        (Some(periods), None) => {
            let (announcer, link) = nodeshutdown::link();
            match Logind::of_this_machine(periods.clone(), announcer) {
                Some(logind) => tasks.add("logind", logind.run(token.clone())),
                None => warn!(
                    "cannot watch for shutdowns, since systemd is not PID 1 of this machine: shutdownGracePeriod \
                     only affects `holdfast drain-local`; have the init system run that before it stops the agent"
                ),
            }
            link
        }
        (None, _) => nodeshutdown::link().1,
    };
    let manager = NodeShutdown::new(NodeShutdownOptions {
        periods,
        link,
        local: base.local_drain.clone(),
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

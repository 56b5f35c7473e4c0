//! Layer 4: probes of running containers. Upstream: `prober.Manager` and its workers.
//!
//! The input is pods with their running containers ([`Prober::observe`]). The output is results for the sync loop,
//! events, and the probe results that statuses and decisions use ([`Prober::views`], [`Prober::failures`]).
//!
//! One task ([`Prober::run`]) owns all due times and all runs under way; a probe that waits costs an entry in a sorted
//! set. A bounded number of probes runs at once, exec probes apart from the others. The pods get slots one after the
//! other, and a slow probe continues in its pod's own share ([`crate::core::turns`]), so that no pod keeps the probes
//! of another one waiting. Each probe has at most one run under way.
//!
//! Results are recorded (relaxed) when the valid result or a count changes, never for a probe that only confirms. After
//! a restart, the agent continues from the record of the same container, with its schedule offset, and sends a decided
//! failure again.
//!
//! **Invariant:** a result counts for the container id that was probed, and only while that one runs.

mod grpc;
mod handlers;
mod http;
mod run;
mod table;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Pod, PodStatus as ApiPodStatus};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::kuberuntime::cri::CriClient;
use crate::store::Store;
use crate::types::host_addresses::HostAddresses;
use crate::types::metrics::Metrics;
use crate::types::runtime::PodStatus;
use crate::types::{
    Clock, EventRecorder, PodExt, PodUid, ProbeFailure, ProbeSenders, ProbeView, Stamp,
};
use table::Table;

/// Dependencies of the prober.
pub struct ProberContext {
    /// Store of results and counters.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// For exec probes.
    pub cri: CriClient,
    /// Events.
    pub recorder: Arc<dyn EventRecorder>,
    /// Metrics.
    pub metrics: Metrics,
    /// Receivers of new results.
    pub results: ProbeSenders,
    /// The node's addresses: where pods on the host network are probed.
    pub addresses: HostAddresses,
}

struct Inner {
    context: ProberContext,
    table: Mutex<Table>,
    /// The table has commands for the task.
    changed: Notify,
    /// Time of the agent's start: containers that run since before it were started by a previous run.
    began: Stamp,
}

/// A handle on the prober; cheap to clone.
#[derive(Clone)]
pub struct Prober(Arc<Inner>);

impl Prober {
    /// A prober that has no pods yet and resumes each from its records when it is first observed.
    pub fn new(context: ProberContext) -> Self {
        let began = context.clock.now();
        Self(Arc::new(Inner {
            context,
            table: Mutex::default(),
            changed: Notify::new(),
            began,
        }))
    }

    /// Probes the running containers of a pod from now on. Called at every sync; does nothing when nothing changed.
    /// `told` is the newest recorded API status, or else that of the API server: a container that was reported ready,
    /// and of which no record is left, stays so until a probe fails. Upstream: `AddPod`, `UpdatePodStatus`.
    pub fn observe(&self, pod: &Arc<Pod>, status: &PodStatus, told: Option<&ApiPodStatus>) {
        if !table::has_probes(pod) {
            // Most pods are of this kind.
            self.remove_pod(&pod.uid());
            return;
        }
        let seen = table::Seen {
            pod,
            status,
            told: told.or(pod.status.as_ref()),
            context: &self.0.context,
            began: self.0.began,
        };
        self.change(|table| table.observe(&seen));
    }

    /// The pod terminates: only readiness is probed from now on. Upstream: `StopLivenessAndStartup`.
    pub fn stop_liveness_and_startup(&self, pod: &PodUid) {
        self.change(|table| table.stop_liveness_and_startup(pod));
    }

    /// Ends all probes of a pod and forgets their results. Upstream: `RemovePod`.
    pub fn remove_pod(&self, pod: &PodUid) {
        self.change(|table| table.remove_pod(pod, &self.0.context));
    }

    /// Returns the probe results of the running containers of a pod, by container name.
    pub fn views(&self, pod: &Pod, status: &PodStatus) -> BTreeMap<String, ProbeView> {
        self.table().views(&pod.uid(), status)
    }

    /// Running containers that a probe wants restarted, by container name. None of a pod that terminates.
    pub fn failures(&self, pod: &Pod, status: &PodStatus) -> BTreeMap<String, ProbeFailure> {
        self.table().failures(&pod.uid(), status)
    }

    /// Probes until `token` is cancelled. What is under way then is abandoned.
    pub async fn run(self, token: CancellationToken) {
        run::run(&self.0, token).await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table()
    }

    fn change(&self, change: impl FnOnce(&mut Table)) {
        let mut table = self.table();
        change(&mut table);
        let commands = table.has_commands();
        drop(table);
        if commands {
            self.0.changed.notify_one();
        }
    }
}

impl Inner {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;

//! Layer 4: probes of running containers. Upstream: `prober.Manager` and its workers.
//!
//! What comes in: pods with what runs of them ([`Prober::observe`]). What goes out: results to the sync
//! loop, events, and what statuses and decisions see of a container ([`Prober::views`],
//! [`Prober::failures`]).

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus as ApiPodStatus};
use tokio_util::sync::CancellationToken;

use crate::kuberuntime::cri::CriClient;
use crate::store::Store;
use crate::types::metrics::Metrics;
use crate::types::runtime::PodStatus;
use crate::types::{Clock, EventRecorder, PodUid, ProbeFailure, ProbeSenders, ProbeView};

/// What the prober works with.
pub struct ProberContext {
    /// Where results and counters are kept.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// For exec probes.
    pub cri: CriClient,
    /// Events.
    pub recorder: Arc<dyn EventRecorder>,
    /// Metrics.
    pub metrics: Metrics,
    /// Where new results go.
    pub results: ProbeSenders,
}

struct Inner {
    context: ProberContext,
}

/// A handle on the prober; cheap to clone.
#[derive(Clone)]
pub struct Prober(Arc<Inner>);

impl Prober {
    /// A prober that has no pods yet and resumes each from its records when it is first observed.
    pub fn new(context: ProberContext) -> Self {
        Self(Arc::new(Inner { context }))
    }

    /// Probes what runs of a pod from now on. Called at every sync; does nothing when nothing changed.
    /// `told` is the newest API status on record: a container that was told to be ready, and of which no
    /// record is left, stays so until a probe says otherwise. Upstream: `AddPod`, `UpdatePodStatus`.
    pub fn observe(&self, _pod: &Arc<Pod>, _status: &PodStatus, _told: Option<&ApiPodStatus>) {}

    /// The pod terminates: only readiness is probed from now on. Upstream: `StopLivenessAndStartup`.
    pub fn stop_liveness_and_startup(&self, _pod: &PodUid) {}

    /// Ends all probes of a pod. Upstream: `RemovePod`.
    pub fn remove_pod(&self, _pod: &PodUid) {}

    /// Ends the probes of all other pods. Upstream: `CleanupPods`.
    pub fn retain(&self, _wanted: &HashSet<PodUid>) {}

    /// What the probes say of the running containers of a pod, by container name.
    pub fn views(&self, _pod: &Pod, _status: &PodStatus) -> BTreeMap<String, ProbeView> {
        BTreeMap::new()
    }

    /// Running containers that a probe wants restarted, by container name.
    pub fn failures(&self, _pod: &Pod, _status: &PodStatus) -> BTreeMap<String, ProbeFailure> {
        BTreeMap::new()
    }

    /// Probes until `token` is cancelled.
    pub async fn run(self, token: CancellationToken) {
        token.cancelled().await;
        drop(self.0.context.results.clone());
    }
}

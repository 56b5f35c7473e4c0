//! The kubelet's API: HTTPS on `address:port` (10250), for the API server, kubectl through it, and scrapers of metrics.
//!
//! Each submodule has some of the routes and gives them as a `Router` over [`NodeApi`]; `auth` decides before any of
//! them who may see it. Handlers read the store's snapshot, the pod manager and the runtime; what changes something
//! is refused unless the handler says so.
//!
//! **Invariant:** nothing a client does or leaves undone holds up the agent: time, memory and connections are bounded.

mod allocated;
mod auth;
mod connections;
mod debug;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod host_logs;
pub mod inherited;
mod listener;
mod logs;
mod metrics;
mod pods;
mod requests;
mod stats;
pub mod streaming;
#[cfg(test)]
mod testkit;
mod tls;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::{Extension, Router, middleware};
use tokio_util::sync::CancellationToken;

pub use self::auth::ClientCaError;
pub use self::debug::{DebugHooks, SetVerbosity};
pub use self::listener::{Limits, Server};
pub use self::tls::TlsError;
use super::HealthChecks;
use crate::apiserver::ApiClient;
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::cri::CriClient;
use crate::node_object::NodeObject;
use crate::pod_manager::PodManager;
use crate::stats::{StatsOptions, StatsProvider, VolumesSlot};
use crate::store::Store;
use crate::types::host_addresses::HostAddresses;
use crate::types::metrics::Metrics;
use crate::types::{Clock, EventRecorder};

/// Dependencies of the handlers.
pub struct NodeApi {
    /// Records.
    pub store: Store,
    /// The pods that are wanted; empty until [`NodeApi::restored`].
    pub pods: PodManager,
    /// The runtime; it may not answer yet.
    pub cri: CriClient,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// The agent's metrics.
    pub metrics: Metrics,
    /// The active configuration.
    pub config: Arc<AgentConfig>,
    /// The addresses of the machine, for the certificate that the node makes itself.
    pub addresses: HostAddresses,
    /// The node object, once known.
    pub node: NodeObject,
    /// Health of the agent.
    pub health: HealthChecks,
    /// Events.
    pub recorder: Arc<dyn EventRecorder>,
    /// The API server, for the webhooks of authentication and authorization and for serving certificates.
    pub api: Option<ApiClient>,
    /// True once the pods of the previous run are restored.
    pub restored: Arc<AtomicBool>,
    /// The volumes of pods, once they are available.
    pub volumes: VolumesSlot,
    /// Cancelled when the agent ends: streams that are open are closed then.
    pub stop: CancellationToken,
    /// For `/statusz` and `/debug`.
    pub debug: DebugHooks,
}

/// As handlers have it: `State(node): State<Shared>`.
pub(crate) type Shared = Arc<NodeApi>;

/// Every route, without authentication: [`Server::run`] adds that.
fn routes(node: Shared) -> Router {
    let stats = StatsProvider::new(
        StatsOptions::of(&node.config),
        node.store.clone(),
        node.pods.clone(),
        node.cri.clone(),
        Arc::clone(&node.clock),
    )
    .with_volumes(Arc::clone(&node.volumes) as _);
    Router::new()
        .merge(pods::routes())
        .merge(allocated::routes())
        .merge(logs::routes())
        .merge(host_logs::routes())
        .merge(streaming::routes())
        .merge(stats::routes().layer(Extension(stats.clone())))
        .merge(metrics::routes().layer(Extension(stats)))
        .merge(debug::routes())
        .layer(middleware::from_fn_with_state(
            Arc::clone(&node),
            debug::gate,
        ))
        .with_state(Arc::clone(&node))
        .merge(super::health_routes(
            node.health.clone(),
            node.metrics.clone(),
        ))
}

//! Layer 6: the Pods API on `<root-dir>/pods-api/pods-api.sock`: the node's pods with their newest statuses, also while the
//! API server is away. Upstream: `pkg/kubelet/apis/pods` (KEP-4188), `v1alpha1`.
//!
//! Receives the wanted pods and their stored statuses from memory. Returns gRPC answers; the socket is that of
//! `podresources` with another name.
//!
//! **Invariant:** a watch holds no event of its own back: it compares what it has sent with the pods as they are, so that
//! a slow client misses states in between and never the last one.

pub mod encode;
pub mod proto;
mod service;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::service::Routes;

use self::service::PodsService;
use crate::core::state::{StatusRecord, Versioned};
use crate::podresources::{self, Limiter, SocketError};
use crate::types::{Clock, PodExt, PodUid};

/// Most watches at a time.
const MAX_WATCHES: usize = 64;

/// A wanted pod and its stored status.
#[derive(Clone)]
pub struct ShownPod {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Its status; `None` before there is one.
    pub status: Option<Arc<Versioned<StatusRecord>>>,
}

impl ShownPod {
    /// Returns whether both are the very same objects.
    fn is_same(&self, other: &Self) -> bool {
        let same_status = match (&self.status, &other.status) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        same_status && Arc::ptr_eq(&self.pod, &other.pod)
    }

    fn bytes(&self) -> Result<Vec<u8>, Status> {
        let status = self.status.as_ref().map(|s| (*s.record.status).clone());
        let pod = Pod {
            metadata: self.pod.metadata.clone(),
            spec: self.pod.spec.clone(),
            status: status.or_else(|| self.pod.status.clone()),
        };
        encode::pod(&pod).map_err(|error| Status::internal(error.to_string()))
    }

    /// Name, namespace and UID alone.
    fn identity(&self) -> Result<Vec<u8>, Status> {
        let metadata = &self.pod.metadata;
        let pod = Pod {
            metadata: ObjectMeta {
                name: metadata.name.clone(),
                namespace: metadata.namespace.clone(),
                uid: metadata.uid.clone(),
                ..ObjectMeta::default()
            },
            ..Pod::default()
        };
        encode::pod(&pod).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Returns the wanted pods, in any order. Must not block.
pub type WantedPods = Arc<dyn Fn() -> Vec<ShownPod> + Send + Sync>;

/// Answers of the API. Cheap to clone.
#[derive(Clone)]
pub struct PodsApi {
    wanted: WantedPods,
    limiter: Arc<Limiter>,
    watches: Arc<Semaphore>,
    stop: CancellationToken,
}

impl PodsApi {
    /// Shows the pods that `wanted` returns; `clock` limits the rate of requests. Watches end when `stop` is cancelled.
    pub fn new(wanted: WantedPods, clock: Arc<dyn Clock>, stop: CancellationToken) -> Self {
        Self {
            wanted,
            limiter: Arc::new(Limiter::new(clock)),
            watches: Arc::new(Semaphore::new(MAX_WATCHES)),
            stop,
        }
    }

    fn by_uid(&self) -> BTreeMap<PodUid, ShownPod> {
        let pods = (self.wanted)();
        pods.into_iter().map(|one| (one.pod.uid(), one)).collect()
    }

    fn list(&self, _: proto::ListPodsRequest) -> Result<proto::ListPodsResponse, Status> {
        let shown = self.by_uid();
        let pods: Result<_, Status> = shown.values().map(ShownPod::bytes).collect();
        Ok(proto::ListPodsResponse { pods: pods? })
    }

    fn get(&self, request: proto::GetPodRequest) -> Result<proto::GetPodResponse, Status> {
        let uid = PodUid::new(request.pod_uid);
        match self.by_uid().get(&uid) {
            Some(found) => Ok(proto::GetPodResponse {
                pod: found.bytes()?,
            }),
            None => Err(Status::not_found(format!("pod with UID {uid} not found"))),
        }
    }
}

/// Returns the path of the socket below `root_dir`.
pub fn socket_path(root_dir: &Path) -> PathBuf {
    root_dir.join("pods-api/pods-api.sock")
}

/// Makes the socket as `podresources::bind` does.
///
/// # Errors
/// When directory or socket cannot be made; the path may be too long for a socket.
pub fn bind(root_dir: &Path) -> Result<UnixListener, SocketError> {
    podresources::bind_at(&socket_path(root_dir))
}

/// Serves until the API's `stop` is cancelled; requests in flight may finish (at most two seconds).
pub async fn serve(listener: UnixListener, api: PodsApi) {
    let stop = api.stop.clone();
    let routes = Routes::new(PodsService::new(api));
    podresources::serve_routes(listener, routes, stop).await;
}

#[cfg(test)]
mod tests;

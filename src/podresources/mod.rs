//! Layer 6: the pod-resources API on `<root-dir>/pod-resources/kubelet.sock`: which container has which devices, CPUs
//! and memory for itself. Monitoring agents (of GPUs, of topology) ask it. Upstream: `pkg/kubelet/apis/podresources`.
//!
//! In: the active pods, from whoever knows them, and what their containers have for themselves. Out: gRPC, v1 whole and List
//! of v1alpha1. Without devices and without static policies those lists are empty.
//!
//! **Invariant:** a request is answered from memory, and no client keeps others from being answered: connections,
//! requests of a connection and requests per second are bounded.

mod authority;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod limit;
pub mod proto;
mod service;

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tracing::{debug, warn};

pub(crate) use self::limit::Limiter;
use self::service::{Lister, V1, V1Alpha1};
use crate::cm::pinning::Pinning;
use crate::core::claims::{ClaimDevice, ContainerClaim};
use crate::devicemanager::DeviceManager;
use crate::dra::DraManager;
use crate::types::containers::{ContainerKind, containers_of};
use crate::types::cpu_set::CpuSet;
use crate::types::metrics::Metrics;
use crate::types::{Clock, PodExt};

/// Connections at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// A connection whose peer does not answer is closed.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// A request that takes longer is given up.
const TIMEOUT: Duration = Duration::from_secs(10);
/// After an accept failed: no descriptors are left, most likely.
const PAUSE: Duration = Duration::from_millis(100);
/// Requests in flight may go on for so long after the end was asked for.
const DRAIN: Duration = Duration::from_secs(2);

/// The socket cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}: {source}", path.display())]
pub struct SocketError {
    action: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Gives the active pods, in any order. Must not block.
pub type ActivePods = Arc<dyn Fn() -> Vec<Arc<Pod>> + Send + Sync>;

/// Data that the service returns. Cheap to clone.
#[derive(Clone)]
pub struct PodResources {
    active: ActivePods,
    claims: Option<DraManager>,
    devices: Option<DeviceManager>,
    limiter: Arc<Limiter>,
    metrics: Metrics,
    pinning: Option<Pinning>,
}

impl PodResources {
    /// Tells of the pods that `active` gives; `clock` limits the rate. What is answered is counted in `metrics`.
    pub fn new(active: ActivePods, clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        Self {
            active,
            claims: None,
            devices: None,
            limiter: Arc::new(Limiter::new(clock)),
            metrics,
            pinning: None,
        }
    }

    /// Tells of devices as well.
    #[must_use]
    pub fn with_devices(mut self, devices: DeviceManager) -> Self {
        self.devices = Some(devices);
        self
    }

    /// Tells of resource claims as well.
    #[must_use]
    pub fn with_claims(mut self, claims: DraManager) -> Self {
        self.claims = Some(claims);
        self
    }

    /// Tells of the CPUs and the memory that containers have for themselves.
    #[must_use]
    pub fn telling_assignments(mut self, pinning: Pinning) -> Self {
        self.pinning = Some(pinning);
        self
    }

    fn list(
        &self,
        _: proto::ListPodResourcesRequest,
    ) -> Result<proto::ListPodResourcesResponse, Status> {
        let mut pods: Vec<_> = (self.active)()
            .iter()
            .map(|pod| self.resources(pod))
            .collect();
        pods.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        Ok(proto::ListPodResourcesResponse {
            pod_resources: pods,
        })
    }

    /// v1alpha1 knows devices only, without their topology.
    fn list_alpha(
        &self,
        request: proto::ListPodResourcesRequest,
    ) -> Result<proto::ListPodResourcesResponse, Status> {
        let mut answer = self.list(request)?;
        let containers = answer
            .pod_resources
            .iter_mut()
            .flat_map(|p| &mut p.containers);
        for container in containers {
            for devices in &mut container.devices {
                devices.topology = None;
            }
            *container = proto::ContainerResources {
                name: std::mem::take(&mut container.name),
                devices: std::mem::take(&mut container.devices),
                ..Default::default()
            };
        }
        Ok(answer)
    }

    fn get(
        &self,
        request: proto::GetPodResourcesRequest,
    ) -> Result<proto::GetPodResourcesResponse, Status> {
        let (name, namespace) = (request.pod_name, request.pod_namespace);
        let active = (self.active)();
        let pod = active
            .iter()
            .find(|pod| pod.name() == name && pod.namespace() == namespace);
        let Some(pod) = pod else {
            return Err(Status::not_found(format!(
                "pod {name} in namespace {namespace} not found"
            )));
        };
        Ok(proto::GetPodResourcesResponse {
            pod_resources: Some(self.resources(pod)),
        })
    }

    /// Healthy devices of connected plugins, and the CPUs and the memory that a container can get for itself; none of the latter
    /// without a static policy.
    fn allocatable(
        &self,
        _: proto::AllocatableResourcesRequest,
    ) -> Result<proto::AllocatableResourcesResponse, Status> {
        let resources = self.devices.as_ref().map(DeviceManager::healthy);
        let mut devices = Vec::new();
        for (resource, healthy) in resources.into_iter().flatten() {
            for (id, device) in healthy {
                devices.extend(container_devices(&resource, &id, &device.numa));
            }
        }
        let mut answer = proto::AllocatableResourcesResponse {
            devices,
            ..Default::default()
        };
        let Some(settings) = self.pinning.as_ref().map(Pinning::settings) else {
            return Ok(answer);
        };
        if let Some(policy) = &settings.cpus {
            let free = settings.machine.online().without(&policy.reserved);
            answer.cpu_ids = ids(&free);
        }
        if let Some(policy) = &settings.memory {
            for (node, bytes) in policy.allocatable(&settings.machine) {
                let blocks = bytes.into_iter().filter(|(_, size)| *size > 0);
                answer
                    .memory
                    .extend(blocks.map(|(name, size)| memory(name, size, &[node])));
            }
        }
        Ok(answer)
    }

    /// Returns the claims of a container; none while they are not prepared.
    fn dynamic_resources(&self, pod: &Pod, container: &Container) -> Vec<proto::DynamicResource> {
        let claims = self.claims.as_ref();
        let claims = claims.map(|claims| claims.of_container(pod, container));
        let claims = claims.and_then(Result::ok).unwrap_or_default();
        claims.into_iter().map(dynamic_resource).collect()
    }

    /// A pod with its sidecars and main containers; other init containers are left out, as upstream.
    fn resources(&self, pod: &Pod) -> proto::PodResources {
        let told = [ContainerKind::Sidecar, ContainerKind::Main];
        let recorded = self.pinning.as_ref().map(|p| p.recorded(&pod.uid()));
        let (cpus, blocks) = recorded.unwrap_or_default();
        let cpus_of = |name: &str| cpus.as_ref()?.containers.get(name).map(ids);
        let memory_of = |name: &str| {
            let blocks = blocks.as_ref()?.containers.get(name)?.iter();
            let told = blocks.map(|b| memory(b.resource.clone(), b.bytes, &b.nodes));
            Some(told.collect())
        };
        let held = self.devices.as_ref().map(|devices| devices.held(pod));
        // A pod whose record cannot be read starts nothing, and nobody can tell what it has.
        let held = held.and_then(Result::ok).unwrap_or_default();
        let devices_of = |name: &str| {
            let resources = held.containers.get(name).into_iter().flatten();
            let devices = resources.flat_map(|(resource, allocation)| {
                let ids = allocation.ids.iter();
                ids.flat_map(|(id, nodes)| container_devices(resource, id, nodes))
            });
            devices.collect()
        };
        proto::PodResources {
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            containers: containers_of(pod)
                .filter(|c| told.contains(&c.kind))
                .map(|c| proto::ContainerResources {
                    name: c.container.name.clone(),
                    devices: devices_of(&c.container.name),
                    cpu_ids: cpus_of(&c.container.name).unwrap_or_default(),
                    memory: memory_of(&c.container.name).unwrap_or_default(),
                    dynamic_resources: self.dynamic_resources(pod, &c.container),
                })
                .collect(),
        }
    }
}

/// A claim of a container, as it is listed.
fn dynamic_resource(claim: ContainerClaim) -> proto::DynamicResource {
    let resource = |(driver_name, device): (String, ClaimDevice)| {
        let names = device.cdi.into_iter();
        proto::ClaimResource {
            cdi_devices: names.map(|name| proto::CdiDevice { name }).collect(),
            driver_name,
            pool_name: device.pool,
            device_name: device.device,
        }
    };
    proto::DynamicResource {
        claim_name: claim.id.name,
        claim_namespace: claim.id.namespace,
        claim_resources: claim.devices.into_iter().map(resource).collect(),
    }
}

fn ids(cpus: &CpuSet) -> Vec<i64> {
    cpus.iter().map(i64::from).collect()
}

fn memory(memory_type: String, size: u64, nodes: &[u32]) -> proto::ContainerMemory {
    let nodes = nodes.iter().map(|node| proto::NumaNode {
        id: i64::from(*node),
    });
    proto::ContainerMemory {
        memory_type,
        size,
        topology: Some(proto::TopologyInfo {
            nodes: nodes.collect(),
        }),
    }
}

/// A device, once for each NUMA node that it is near to.
fn container_devices(resource: &str, id: &str, nodes: &[i64]) -> Vec<proto::ContainerDevices> {
    let one = |topology| proto::ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology,
    };
    if nodes.is_empty() {
        return vec![one(None)];
    }
    let near = |id: &i64| proto::TopologyInfo {
        nodes: vec![proto::NumaNode { id: *id }],
    };
    nodes.iter().map(|node| one(Some(near(node)))).collect()
}

/// The socket below `root_dir`.
pub fn socket_path(root_dir: &Path) -> PathBuf {
    root_dir.join("pod-resources/kubelet.sock")
}

/// Makes the socket, for root alone, in the place of that of an earlier agent: it appears whole. Blocking, shortly.
/// Must be called inside a tokio runtime.
///
/// # Errors
/// When directory or socket cannot be made; the path may be too long for a socket.
pub fn bind(root_dir: &Path) -> Result<UnixListener, SocketError> {
    bind_at(&socket_path(root_dir))
}

/// As [`bind`], at a path.
pub(crate) fn bind_at(path: &Path) -> Result<UnixListener, SocketError> {
    let fresh = path.with_file_name("new.sock");
    let failed = |action: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| SocketError {
            action,
            path,
            source,
        }
    };
    let directory = path.parent().unwrap_or(path);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(directory)
        .map_err(failed("create directory", directory))?;
    match fs::remove_file(&fresh) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("remove the old socket", &fresh)(error)),
    }
    let listener = UnixListener::bind(&fresh).map_err(failed("listen on", &fresh))?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))
        .map_err(failed("set the mode of", &fresh))?;
    fs::rename(&fresh, path).map_err(failed("move the socket to", path))?;
    Ok(listener)
}

/// Serves until `stop` is cancelled; requests in flight may finish (at most two seconds).
pub async fn serve(listener: UnixListener, pods: PodResources, stop: CancellationToken) {
    let routes =
        Routes::new(Lister::<V1>::new(pods.clone())).add_service(Lister::<V1Alpha1>::new(pods));
    serve_routes(listener, routes, stop).await;
}

/// Serves services as [`serve`] does, with the same limits.
pub(crate) async fn serve_routes(listener: UnixListener, routes: Routes, stop: CancellationToken) {
    let router = server(TIMEOUT).add_routes(routes);
    serve_router(&listener, router, &stop).await;
}

/// A server whose requests may take so long, with the bounds of this API.
pub(crate) fn server(timeout: Duration) -> Server {
    Server::builder()
        .concurrency_limit_per_connection(16)
        .timeout(timeout)
        .max_concurrent_streams(64)
        .http2_keepalive_interval(Some(KEEPALIVE))
}

/// Serves services on a socket as [`serve`] does; also those of other sockets whose clients are written in Go.
pub(crate) async fn serve_router(
    listener: &UnixListener,
    router: Router,
    stop: &CancellationToken,
) {
    let (accepted, connections) = mpsc::channel(1);
    let tasks = TaskTracker::new();
    let served = router.serve_with_incoming_shutdown(
        ReceiverStream::new(connections).map(Ok::<_, io::Error>),
        stop.clone().cancelled_owned(),
    );
    let accept = accept(listener, &accepted, &tasks, stop);
    let drained = async {
        stop.cancelled().await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        (served, ()) = async { tokio::join!(served, accept) } => {
            if let Err(error) = served {
                warn!(%error, "the server of a socket ended");
            }
        }
        () = drained => debug!("requests on a socket were still open"),
    }
    drop(accepted);
    tasks.close();
}

async fn accept(
    listener: &UnixListener,
    accepted: &mpsc::Sender<tokio::io::DuplexStream>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // Both are cancel-safe: a slot or a connection is had or not.
        let next = async {
            let slot = Arc::clone(&slots).acquire_owned().await.ok();
            (slot, listener.accept().await)
        };
        let (slot, stream) = tokio::select! {
            next = next => next,
            () = stop.cancelled() => return,
        };
        match stream {
            Ok((stream, _)) => {
                let (ours, servers) = tokio::io::duplex(32 * 1024);
                let relayed = authority::relay(stream, ours);
                let stop = stop.clone();
                tasks.spawn(async move {
                    tokio::select! {
                        result = relayed => if let Err(error) = result {
                            debug!(%error, "connection on a socket ended");
                        },
                        () = async { stop.cancelled().await; tokio::time::sleep(DRAIN).await } => {}
                    }
                    drop(slot);
                });
                if accepted.send(servers).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection on a socket");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;

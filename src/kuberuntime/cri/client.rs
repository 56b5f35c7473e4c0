//! The runtime service.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use k8s_cri::v1;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use tonic::client::Grpc;
use tonic::transport::Channel;

use super::create::{self, ContainerConfig, CreateContainerRequest};
use super::error::CriError;
use super::leases::PullLeases;
use super::list::Parts;
use super::operation::{Operation, count_call};
use super::resize::{self, UpdatePodSandboxResourcesRequest};
use super::trace::{TracedChannel, traced};
use super::{CriTimeouts, channel, sandboxes};
use crate::kuberuntime::open_streams::OpenStreams;
use crate::store::{Committed, RemoveContainer, RemoveEmptySandbox, StartIntent, StopPermit};
use crate::types::metrics::Metrics;
use crate::types::{ContainerId, PodUid};

/// Most seconds that are sent to a runtime: more overflow an `int64` of nanoseconds there, and a grace period becomes none.
const MAX_SECONDS: i64 = i64::MAX / 1_000_000_000;

/// Lists of a full node exceed tonic's 4 MiB. What runtimes send has the same limit; beyond it see `list`.
const MAX_MESSAGE: usize = 16 << 20;

/// The client of one runtime. Cheap to clone; clones share the connections.
#[derive(Clone)]
pub struct CriClient {
    runtime: RuntimeServiceClient<TracedChannel>,
    /// For calls with messages of our own.
    raw: Grpc<TracedChannel>,
    pub(super) images: ImageServiceClient<TracedChannel>,
    /// For calls of other services on the socket of the image service.
    pub(super) raw_images: Grpc<TracedChannel>,
    pub(super) leases: PullLeases,
    pub(super) runtime_endpoint: String,
    pub(super) image_endpoint: String,
    pub(super) timeouts: CriTimeouts,
    pub(super) metrics: Metrics,
    pub(super) parts: Parts,
    open_streams: OpenStreams,
}

impl fmt::Debug for CriClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CriClient")
            .field("runtime_endpoint", &self.runtime_endpoint)
            .field("image_endpoint", &self.image_endpoint)
            .field("timeouts", &self.timeouts)
            .finish_non_exhaustive()
    }
}

/// Event of a container from the event stream: a hint to list that pod, never a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerEvent {
    /// The container, or the sandbox when the event is about the sandbox.
    pub container_id: ContainerId,
    /// Kind of event.
    pub kind: ContainerEventKind,
    /// When, nanoseconds since the Unix epoch, by the runtime's clock.
    pub created_at_ns: i64,
    /// The pod, when the event says so.
    pub pod_uid: Option<PodUid>,
}

/// Kinds of container events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerEventKind {
    /// Created.
    Created,
    /// Started.
    Started,
    /// Exited.
    Stopped,
    /// Removed.
    Deleted,
}

impl CriClient {
    /// A client of the runtime on `runtime_endpoint` (`unix:///…`) and of the image service on
    /// `image_endpoint`, which is the same socket when `None`. Connects at the first call and again after
    /// each broken connection. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// Only for an endpoint that is not a unix socket path.
    pub fn new(
        runtime_endpoint: &str,
        image_endpoint: Option<&str>,
        timeouts: CriTimeouts,
        metrics: Metrics,
    ) -> Result<Self, CriError> {
        let image_endpoint = image_endpoint
            .filter(|e| !e.is_empty())
            .unwrap_or(runtime_endpoint);
        let runtime = channel::lazy(runtime_endpoint)?;
        let images = if image_endpoint == runtime_endpoint {
            runtime.clone()
        } else {
            channel::lazy(image_endpoint)?
        };
        let mut client = Self::over(runtime, runtime_endpoint, timeouts, metrics);
        client.raw_images = Grpc::new(traced(images.clone()));
        client.images =
            ImageServiceClient::new(traced(images)).max_decoding_message_size(MAX_MESSAGE);
        client.image_endpoint = image_endpoint.to_owned();
        Ok(client)
    }

    /// A client over a channel somebody else made; `endpoint` is what errors call it. For transports
    /// without sockets.
    pub fn over(channel: Channel, endpoint: &str, timeouts: CriTimeouts, metrics: Metrics) -> Self {
        Self {
            runtime: RuntimeServiceClient::new(traced(channel.clone()))
                .max_decoding_message_size(MAX_MESSAGE),
            raw: Grpc::new(traced(channel.clone())).max_decoding_message_size(MAX_MESSAGE),
            raw_images: Grpc::new(traced(channel.clone())),
            images: ImageServiceClient::new(traced(channel)).max_decoding_message_size(MAX_MESSAGE),
            leases: PullLeases::default(),
            runtime_endpoint: endpoint.to_owned(),
            image_endpoint: endpoint.to_owned(),
            timeouts,
            metrics,
            parts: Parts::default(),
            open_streams: OpenStreams::default(),
        }
    }

    /// Returns the streams that clients have open to this runtime's containers and sandboxes.
    pub fn open_streams(&self) -> &OpenStreams {
        &self.open_streams
    }

    /// The runtime's endpoint, as given.
    pub fn runtime_endpoint(&self) -> &str {
        &self.runtime_endpoint
    }

    /// Name, version and API version of the runtime.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn version(&self) -> Result<v1::VersionResponse, CriError> {
        let call = self.operation("version", "");
        call.read(|| {
            let mut client = self.runtime.clone();
            let request = v1::VersionRequest {
                version: "0.1.0".to_owned(),
            };
            async move { client.version(request).await }
        })
        .await
    }

    /// Returns the status of runtime and network. `verbose` asks for the runtime's configuration as well.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn status(&self, verbose: bool) -> Result<v1::StatusResponse, CriError> {
        let call = self.operation("status", "");
        call.read(|| {
            let mut client = self.runtime.clone();
            async move { client.status(v1::StatusRequest { verbose }).await }
        })
        .await
    }

    /// Configuration the runtime wants the agent to follow (cgroup driver); `None` when the runtime does
    /// not offer the call (containerd before 2.0).
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn runtime_config(&self) -> Result<Option<v1::RuntimeConfigResponse>, CriError> {
        let call = self.operation("runtime_config", "");
        let answer = call
            .read(|| {
                let mut client = self.runtime.clone();
                async move { client.runtime_config(v1::RuntimeConfigRequest {}).await }
            })
            .await;
        match answer {
            Err(error) if error.is_unimplemented() => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Tells the runtime the pod CIDR of the node.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn update_runtime_config(&self, pod_cidr: &str) -> Result<(), CriError> {
        let request = v1::UpdateRuntimeConfigRequest {
            runtime_config: Some(v1::RuntimeConfig {
                network_config: Some(v1::NetworkConfig {
                    pod_cidr: pod_cidr.to_owned(),
                }),
            }),
        };
        let mut client = self.runtime.clone();
        self.operation("update_runtime_config", pod_cidr)
            .once(client.update_runtime_config(request))
            .await?;
        Ok(())
    }

    /// Creates and starts a sandbox with its network; upstream's `RunPodSandbox`.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]. `AlreadyExists` or an `Other` that says the name is reserved: a sandbox with
    /// this name, namespace, UID and attempt is there or being made.
    pub async fn run_pod_sandbox(
        &self,
        config: v1::PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<ContainerId, CriError> {
        let object = config.metadata.as_ref().map_or_else(String::new, |m| {
            format!("{}/{} attempt {}", m.namespace, m.name, m.attempt)
        });
        let request = v1::RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: runtime_handler.to_owned(),
        };
        let mut client = self.runtime.clone();
        let answer = self
            .operation("run_podsandbox", &object)
            .within(Some(self.timeouts.run_pod_sandbox))
            .once(client.run_pod_sandbox(request))
            .await?;
        Ok(ContainerId::from(answer.pod_sandbox_id))
    }

    /// Stops everything in a sandbox and gives its network back. One that is gone counts as stopped.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn stop_pod_sandbox(
        &self,
        id: &ContainerId,
        _permit: &StopPermit,
    ) -> Result<(), CriError> {
        let request = v1::StopPodSandboxRequest {
            pod_sandbox_id: id.to_string(),
        };
        let mut client = self.runtime.clone();
        let answer = self
            .operation("stop_podsandbox", id.as_str())
            .once(client.stop_pod_sandbox(request))
            .await;
        gone_is_done(answer.map(drop))
    }

    /// Removes a sandbox; the runtime would remove containers in it, too. One that is gone counts as removed.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn remove_pod_sandbox(
        &self,
        intent: &Committed<RemoveEmptySandbox>,
    ) -> Result<(), CriError> {
        let id = intent.get().id();
        let request = v1::RemovePodSandboxRequest {
            pod_sandbox_id: id.to_string(),
        };
        let mut client = self.runtime.clone();
        let answer = self
            .operation("remove_podsandbox", id.as_str())
            .once(client.remove_pod_sandbox(request))
            .await;
        gone_is_done(answer.map(drop))
    }

    /// Inspects a sandbox.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn pod_sandbox_status(
        &self,
        id: &ContainerId,
    ) -> Result<v1::PodSandboxStatus, CriError> {
        let call = self.operation("podsandbox_status", id.as_str());
        let answer = call
            .read(|| {
                let mut client = self.runtime.clone();
                let request = v1::PodSandboxStatusRequest {
                    pod_sandbox_id: id.to_string(),
                    verbose: false,
                };
                async move { client.pod_sandbox_status(request).await }
            })
            .await?;
        answer
            .status
            .ok_or_else(|| call.incomplete("the answer holds no sandbox status"))
    }

    /// Returns the name of the image that a sandbox was made of, where the runtime says so in its verbose status
    /// (containerd, CRI-O); the field is no part of the CRI.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn sandbox_image(&self, id: &ContainerId) -> Result<Option<String>, CriError> {
        let call = self.operation("podsandbox_status", id.as_str());
        let answer = call
            .read(|| {
                let mut client = self.runtime.clone();
                let request = v1::PodSandboxStatusRequest {
                    pod_sandbox_id: id.to_string(),
                    verbose: true,
                };
                async move { client.pod_sandbox_status(request).await }
            })
            .await?;
        let info = answer.info.get("info");
        let info = info.and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
        Ok(info.and_then(|info| Some(info.get("image")?.as_str()?.to_owned())))
    }

    /// Lists sandboxes without their annotations; `None` = all.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn list_pod_sandboxes(
        &self,
        filter: Option<v1::PodSandboxFilter>,
    ) -> Result<Vec<v1::PodSandbox>, CriError> {
        let call = self.operation("list_podsandbox", "");
        let answer = call
            .read(|| {
                let request = v1::ListPodSandboxRequest {
                    filter: filter.clone(),
                };
                sandboxes::list(self.raw.clone(), request)
            })
            .await?;
        Ok(answer.sandboxes())
    }

    /// Creates a container in a sandbox. It does not run yet: see [`Self::start_container`].
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn create_container(
        &self,
        sandbox_id: &ContainerId,
        config: impl Into<ContainerConfig>,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Result<ContainerId, CriError> {
        let config = config.into();
        let object = config
            .message
            .metadata
            .as_ref()
            .map_or_else(String::new, |m| {
                format!("{} attempt {} in sandbox {sandbox_id}", m.name, m.attempt)
            });
        let request = CreateContainerRequest::new(sandbox_id, config, sandbox_config);
        let answer = self
            .operation("create_container", &object)
            .once(create::send(self.raw.clone(), request))
            .await?;
        Ok(ContainerId::from(answer.container_id))
    }

    /// Starts the created container the intent names. The receipt proves that attempt and restart count
    /// are on disk.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]. After a failure with unknown outcome the container may run.
    pub async fn start_container(&self, intent: &Committed<StartIntent>) -> Result<(), CriError> {
        let id = &intent.get().container_id;
        let request = v1::StartContainerRequest {
            container_id: id.to_string(),
        };
        let mut client = self.runtime.clone();
        self.operation("start_container", id.as_str())
            .once(client.start_container(request))
            .await?;
        Ok(())
    }

    /// Stops a container: the stop signal, then SIGKILL after `timeout_s` seconds (0 = at once). One that
    /// is gone or has ended counts as stopped.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn stop_container(
        &self,
        id: &ContainerId,
        timeout_s: i64,
        _permit: &StopPermit,
    ) -> Result<(), CriError> {
        let request = v1::StopContainerRequest {
            container_id: id.to_string(),
            timeout: timeout_s.min(MAX_SECONDS),
        };
        let grace = Duration::from_secs(u64::try_from(timeout_s).unwrap_or(0));
        let mut client = self.runtime.clone();
        let answer = self
            .operation("stop_container", id.as_str())
            .within(Some(self.timeouts.request.saturating_add(grace)))
            .once(client.stop_container(request))
            .await;
        gone_is_done(answer.map(drop))
    }

    /// Removes a container. One that is gone counts as removed.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn remove_container(
        &self,
        intent: &Committed<RemoveContainer>,
    ) -> Result<(), CriError> {
        let id = intent.get().id();
        let request = v1::RemoveContainerRequest {
            container_id: id.to_string(),
        };
        let mut client = self.runtime.clone();
        let answer = self
            .operation("remove_container", id.as_str())
            .once(client.remove_container(request))
            .await;
        gone_is_done(answer.map(drop))
    }

    /// Lists containers in any state; `None` = all.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn list_containers(
        &self,
        filter: Option<v1::ContainerFilter>,
    ) -> Result<Vec<v1::Container>, CriError> {
        let call = self.operation("list_containers", "");
        let answer = call
            .read(|| {
                let mut client = self.runtime.clone();
                let request = v1::ListContainersRequest {
                    filter: filter.clone(),
                };
                async move { client.list_containers(request).await }
            })
            .await?;
        Ok(answer.containers)
    }

    /// Inspects a container.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn container_status(
        &self,
        id: &ContainerId,
    ) -> Result<v1::ContainerStatus, CriError> {
        let call = self.operation("container_status", id.as_str());
        let answer = call
            .read(|| {
                let mut client = self.runtime.clone();
                let request = v1::ContainerStatusRequest {
                    container_id: id.to_string(),
                    verbose: false,
                };
                async move { client.container_status(request).await }
            })
            .await?;
        answer
            .status
            .ok_or_else(|| call.incomplete("the answer holds no container status"))
    }

    /// Runs a command in a running container and waits for its end. `timeout` is enforced by the runtime;
    /// zero = no limit, neither there nor here.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]; a command that ends with another code than 0 is not an error.
    pub async fn exec_sync(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        timeout: Duration,
    ) -> Result<v1::ExecSyncResponse, CriError> {
        let patience = self.timeouts.request;
        self.exec_sync_within(id, command, timeout, patience).await
    }

    /// As [`Self::exec_sync`]; the runtime has `patience` after the end of `timeout` to say so.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]; a runtime that says nothing in that time is `DeadlineExceeded` too.
    pub async fn exec_sync_within(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        timeout: Duration,
        patience: Duration,
    ) -> Result<v1::ExecSyncResponse, CriError> {
        // The wire knows whole seconds; a fraction must not become "no limit".
        let seconds = timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0);
        let request = v1::ExecSyncRequest {
            container_id: id.to_string(),
            cmd: command,
            timeout: i64::try_from(seconds).map_or(MAX_SECONDS, |s| s.min(MAX_SECONDS)),
        };
        let deadline = (!timeout.is_zero()).then(|| patience.saturating_add(timeout));
        let mut client = self.runtime.clone();
        self.operation("exec_sync", id.as_str())
            .within(deadline)
            .once(client.exec_sync(request))
            .await
    }

    /// Changes the resource limits of a container.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn update_container_resources(
        &self,
        id: &ContainerId,
        linux: v1::LinuxContainerResources,
    ) -> Result<(), CriError> {
        let request = v1::UpdateContainerResourcesRequest {
            container_id: id.to_string(),
            linux: Some(linux),
            windows: None,
            annotations: HashMap::new(),
        };
        let mut client = self.runtime.clone();
        self.operation("update_container", id.as_str())
            .once(client.update_container_resources(request))
            .await?;
        Ok(())
    }

    /// Notifies the runtime of what a sandbox's pod has as a whole. The pod's cgroup is not its business.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]; runtimes before CRI 1.33 do not offer the call.
    pub async fn update_pod_sandbox_resources(
        &self,
        id: &ContainerId,
        overhead: v1::LinuxContainerResources,
        resources: v1::LinuxContainerResources,
    ) -> Result<(), CriError> {
        let request = UpdatePodSandboxResourcesRequest::new(id, overhead, resources);
        self.operation("update_podsandbox_resources", id.as_str())
            .once(resize::send(self.raw.clone(), request))
            .await?;
        Ok(())
    }

    /// Makes the runtime open the log file of a running container anew, after it was rotated.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn reopen_container_log(&self, id: &ContainerId) -> Result<(), CriError> {
        let request = v1::ReopenContainerLogRequest {
            container_id: id.to_string(),
        };
        let mut client = self.runtime.clone();
        self.operation("reopen_container_log", id.as_str())
            .once(client.reopen_container_log(request))
            .await?;
        Ok(())
    }

    /// Has the state of a running container, its memory included, written to the file `location`. `timeout` comes on
    /// top of `runtimeRequestTimeout`; zero leaves it to the runtime.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]; `Unimplemented` when the runtime has no checkpoints (containerd before 2.0).
    pub async fn checkpoint_container(
        &self,
        id: &ContainerId,
        location: &str,
        timeout: Duration,
    ) -> Result<(), CriError> {
        let request = v1::CheckpointContainerRequest {
            container_id: id.to_string(),
            location: location.to_owned(),
            timeout: i64::try_from(timeout.as_secs()).map_or(MAX_SECONDS, |s| s.min(MAX_SECONDS)),
        };
        let mut client = self.runtime.clone();
        self.operation("checkpoint_container", id.as_str())
            .within(Some(self.timeouts.request.saturating_add(timeout)))
            .once(client.checkpoint_container(request))
            .await?;
        Ok(())
    }

    /// Resource use of containers; `None` = all.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn list_container_stats(
        &self,
        filter: Option<v1::ContainerStatsFilter>,
    ) -> Result<Vec<v1::ContainerStats>, CriError> {
        let call = self.operation("list_container_stats", "");
        let answer = call
            .read(|| {
                let mut client = self.runtime.clone();
                let request = v1::ListContainerStatsRequest {
                    filter: filter.clone(),
                };
                async move { client.list_container_stats(request).await }
            })
            .await?;
        Ok(answer.stats)
    }

    /// Resource use of sandboxes, their network above all; `None` = all.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]; `Unimplemented` by runtimes that know containers only.
    pub async fn list_pod_sandbox_stats(
        &self,
        filter: Option<v1::PodSandboxStatsFilter>,
    ) -> Result<Vec<v1::PodSandboxStats>, CriError> {
        let call = self.operation("list_podsandbox_stats", "");
        let answer = call
            .read(|| {
                let mut client = self.runtime.clone();
                let request = v1::ListPodSandboxStatsRequest {
                    filter: filter.clone(),
                };
                async move { client.list_pod_sandbox_stats(request).await }
            })
            .await?;
        Ok(answer.stats)
    }

    /// The container events of the runtime. Subscribes when it is first polled; has no deadline.
    ///
    /// A runtime in Go sends nothing at all before its first event, so there is no telling when the
    /// subscription has taken effect: list everything once after the first poll, and again from time to
    /// time. The stream ends after its first error; one of kind `Unimplemented` means the runtime has no
    /// events (containerd before 1.7). Dropping it unsubscribes.
    pub fn container_events(&self) -> BoxStream<'static, Result<ContainerEvent, CriError>> {
        let this = self.clone();
        let wrap = move |status| {
            CriError::from_status("get_container_events", "", &this.runtime_endpoint, status)
        };
        let mut client = self.runtime.clone();
        let metrics = self.metrics.clone();
        stream::once(async move {
            count_call(&metrics, "get_container_events");
            let answer = client.get_container_events(v1::GetEventsRequest {}).await;
            if answer.is_ok() {
                metrics.evented_pleg_connection_success.inc();
            }
            answer
        })
        .flat_map(|answer| match answer {
            Ok(events) => events.into_inner().boxed(),
            Err(status) => stream::once(async move { Err(status) }).boxed(),
        })
        .map(move |item| item.map(event).map_err(&wrap))
        .scan(false, |ended, item| {
            let next = (!*ended).then_some(item);
            *ended = next.as_ref().is_none_or(Result::is_err);
            std::future::ready(next)
        })
        .boxed()
    }

    pub(super) fn runtime(&self) -> RuntimeServiceClient<TracedChannel> {
        self.runtime.clone()
    }

    pub(super) fn operation<'a>(
        &'a self,
        operation: &'static str,
        object: &'a str,
    ) -> Operation<'a> {
        Operation::new(self, operation, object)
    }
}

fn gone_is_done(answer: Result<(), CriError>) -> Result<(), CriError> {
    match answer {
        Err(error) if error.is_not_found() => Ok(()),
        answer => answer,
    }
}

fn event(message: v1::ContainerEventResponse) -> ContainerEvent {
    let kind = match message.container_event_type() {
        v1::ContainerEventType::ContainerCreatedEvent => ContainerEventKind::Created,
        v1::ContainerEventType::ContainerStartedEvent => ContainerEventKind::Started,
        v1::ContainerEventType::ContainerStoppedEvent => ContainerEventKind::Stopped,
        v1::ContainerEventType::ContainerDeletedEvent => ContainerEventKind::Deleted,
    };
    let pod_uid = message
        .pod_sandbox_status
        .and_then(|s| s.metadata)
        .map(|m| m.uid)
        .filter(|uid| !uid.is_empty())
        .map(PodUid::from);
    ContainerEvent {
        container_id: ContainerId::from(message.container_id),
        kind,
        created_at_ns: message.created_at,
        pod_uid,
    }
}

//! The runtime service.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_cri::v1;
use k8s_cri::v1::runtime_service_server::RuntimeService;
use tokio_stream::wrappers::BroadcastStream;
use tonic::{Request, Response, Status};

use super::create::{Environment, UpdatePodSandboxResourcesResponse};
use super::{Behaviour, Service, Shared};

impl Shared {
    fn announce_all(&self, events: Vec<v1::ContainerEventResponse>) {
        for event in events {
            self.announce(Some(event));
        }
    }
}

fn condition(kind: &str, ready: bool) -> v1::RuntimeCondition {
    v1::RuntimeCondition {
        r#type: kind.to_owned(),
        status: ready,
        reason: if ready { "" } else { "NotReady" }.to_owned(),
        message: if ready { "" } else { "told to be not ready" }.to_owned(),
    }
}

fn pod_name(config: Option<&v1::PodSandboxConfig>) -> String {
    config
        .and_then(|c| c.metadata.as_ref())
        .map_or_else(String::new, |m| format!("{}/{}", m.namespace, m.name))
}

impl Service {
    /// Makes a container.
    pub(super) async fn create(
        &self,
        sandbox_id: String,
        config: v1::ContainerConfig,
        environment: Environment,
    ) -> Result<Response<v1::CreateContainerResponse>, Status> {
        let metadata = config.metadata.as_ref();
        let name = metadata.map_or_else(String::new, |m| m.name.clone());
        self.call("create_container", name, async {
            let shared = &self.0;
            let (container_id, event) =
                shared
                    .model()
                    .create_container(sandbox_id, config, environment)?;
            shared.announce(Some(event));
            Ok(v1::CreateContainerResponse { container_id })
        })
        .await
    }

    /// Takes the resources of a sandbox's pod.
    pub(super) async fn resize_sandbox(
        &self,
        sandbox_id: String,
        linux: v1::LinuxContainerResources,
    ) -> Result<Response<UpdatePodSandboxResourcesResponse>, Status> {
        let object = format!(
            "{sandbox_id} shares={} quota={} memory={}",
            linux.cpu_shares, linux.cpu_quota, linux.memory_limit_in_bytes
        );
        self.call("update_podsandbox_resources", object, async {
            self.0.model().sandbox_status(&sandbox_id)?;
            Ok(UpdatePodSandboxResourcesResponse {})
        })
        .await
    }

    fn stream_url(&self, method: &str) -> Result<String, Status> {
        let url = self.0.control().stream_url.clone();
        url.ok_or_else(|| not_offered(method))
    }
}

fn not_offered(method: &str) -> Status {
    Status::unimplemented(format!("the fake runtime does not offer {method}"))
}

#[tonic::async_trait]
impl RuntimeService for Service {
    type GetContainerEventsStream = BoxStream<'static, Result<v1::ContainerEventResponse, Status>>;

    async fn get_container_events(
        &self,
        _: Request<v1::GetEventsRequest>,
    ) -> Result<Response<Self::GetContainerEventsStream>, Status> {
        self.call("get_container_events", "", async {
            if !self.0.control().events {
                return Err(Status::unimplemented(
                    "unknown method GetContainerEvents for service runtime.v1.RuntimeService",
                ));
            }
            let events = BroadcastStream::new(self.0.events.subscribe());
            // A subscriber that lags loses events, as a full channel does anywhere.
            Ok(events.filter_map(async |event| event.ok().map(Ok)).boxed())
        })
        .await
    }

    async fn version(
        &self,
        _: Request<v1::VersionRequest>,
    ) -> Result<Response<v1::VersionResponse>, Status> {
        self.call("version", "", async {
            let release = self.0.control().release.clone();
            let (runtime_name, runtime_version) =
                release.unwrap_or_else(|| ("fake".to_owned(), "1.0.0".to_owned()));
            Ok(v1::VersionResponse {
                version: "0.1.0".to_owned(),
                runtime_name,
                runtime_version,
                runtime_api_version: "v1".to_owned(),
            })
        })
        .await
    }

    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        self.call("status", "", async {
            let shared = &self.0;
            let (runtime, network, user_namespaces) = {
                let control = shared.control();
                let ready = (control.runtime_ready, control.network_ready);
                (ready.0, ready.1, control.user_namespaces)
            };
            let default = v1::RuntimeHandler {
                name: String::new(),
                features: Some(v1::RuntimeHandlerFeatures {
                    recursive_read_only_mounts: false,
                    user_namespaces: true,
                }),
            };
            Ok(v1::StatusResponse {
                status: Some(v1::RuntimeStatus {
                    conditions: vec![
                        condition("RuntimeReady", runtime),
                        condition("NetworkReady", network),
                    ],
                }),
                runtime_handlers: user_namespaces.then_some(default).into_iter().collect(),
                ..Default::default()
            })
        })
        .await
    }

    async fn run_pod_sandbox(
        &self,
        request: Request<v1::RunPodSandboxRequest>,
    ) -> Result<Response<v1::RunPodSandboxResponse>, Status> {
        let request = request.into_inner();
        self.call("run_podsandbox", pod_name(request.config.as_ref()), async {
            let shared = &self.0;
            let config = request.config.unwrap_or_default();
            let (pod_sandbox_id, events) = shared
                .model()
                .run_sandbox(config, request.runtime_handler)?;
            shared.announce_all(events);
            Ok(v1::RunPodSandboxResponse { pod_sandbox_id })
        })
        .await
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<v1::StopPodSandboxRequest>,
    ) -> Result<Response<v1::StopPodSandboxResponse>, Status> {
        let request = request.into_inner();
        self.call("stop_podsandbox", request.pod_sandbox_id.clone(), async {
            let shared = &self.0;
            let events = shared.model().stop_sandbox(&request.pod_sandbox_id, 137);
            shared.announce_all(events);
            Ok(v1::StopPodSandboxResponse {})
        })
        .await
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<v1::RemovePodSandboxRequest>,
    ) -> Result<Response<v1::RemovePodSandboxResponse>, Status> {
        let request = request.into_inner();
        self.call("remove_podsandbox", request.pod_sandbox_id.clone(), async {
            let shared = &self.0;
            let events = shared.model().remove_sandbox(&request.pod_sandbox_id);
            shared.announce_all(events);
            Ok(v1::RemovePodSandboxResponse {})
        })
        .await
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<v1::PodSandboxStatusRequest>,
    ) -> Result<Response<v1::PodSandboxStatusResponse>, Status> {
        let request = request.into_inner();
        self.call("podsandbox_status", request.pod_sandbox_id.clone(), async {
            let shared = &self.0;
            let status = shared.model().sandbox_status(&request.pod_sandbox_id)?;
            Ok(v1::PodSandboxStatusResponse {
                status: Some(status),
                ..Default::default()
            })
        })
        .await
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<v1::ListPodSandboxRequest>,
    ) -> Result<Response<v1::ListPodSandboxResponse>, Status> {
        let request = request.into_inner();
        self.call("list_podsandbox", "", async {
            let shared = &self.0;
            let items = shared.model().list_sandboxes(request.filter.as_ref());
            shared.fits(v1::ListPodSandboxResponse { items })
        })
        .await
    }

    async fn create_container(
        &self,
        request: Request<v1::CreateContainerRequest>,
    ) -> Result<Response<v1::CreateContainerResponse>, Status> {
        let request = request.into_inner();
        let config = request.config.unwrap_or_default();
        let envs = config.envs.iter();
        let environment = envs
            .map(|var| (var.key.clone(), var.value.clone().into_bytes()))
            .collect();
        self.create(request.pod_sandbox_id, config, environment)
            .await
    }

    async fn start_container(
        &self,
        request: Request<v1::StartContainerRequest>,
    ) -> Result<Response<v1::StartContainerResponse>, Status> {
        let request = request.into_inner();
        self.call("start_container", request.container_id.clone(), async {
            let shared = &self.0;
            let id = request.container_id;
            let config = shared.model().config(&id).unwrap_or_default();
            let on_start = shared.control().on_start.clone();
            let behaviour = on_start(&config);
            if let Behaviour::SlowStart { takes, undone } = behaviour
                && shared.model().begin_start(&id)
            {
                let (shared, id) = (shared.clone(), id.clone());
                let start = tokio::spawn(async move {
                    tokio::time::sleep(takes).await;
                    let event = shared.model().end_start(&id, undone)?;
                    shared.announce(Some(event));
                    Ok(v1::StartContainerResponse {})
                });
                return start.await.map_err(|e| Status::internal(e.to_string()))?;
            }
            let (event, end) = shared.model().start_container(&id, behaviour)?;
            shared.announce(Some(event));
            if let Some((code, after)) = end {
                let shared = shared.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    let event = shared.model().exit(&id, code, None);
                    shared.announce(event);
                });
            }
            Ok(v1::StartContainerResponse {})
        })
        .await
    }

    async fn stop_container(
        &self,
        request: Request<v1::StopContainerRequest>,
    ) -> Result<Response<v1::StopContainerResponse>, Status> {
        let request = request.into_inner();
        self.call("stop_container", request.container_id.clone(), async {
            let shared = &self.0;
            let id = request.container_id;
            let grace = Duration::from_secs(u64::try_from(request.timeout).unwrap_or(0));
            let behaviour = shared.model().running(&id);
            let (code, takes) = match behaviour {
                None => return Ok(v1::StopContainerResponse {}),
                Some(_) if grace.is_zero() => (137, grace),
                Some(Behaviour::IgnoreTerm) => (137, grace),
                Some(Behaviour::SlowTerm(takes)) if takes >= grace => (137, grace),
                Some(Behaviour::SlowTerm(takes)) => (0, takes),
                Some(_) => (0, Duration::ZERO),
            };
            if !takes.is_zero() {
                tokio::time::sleep(takes).await;
            }
            let event = shared.model().exit(&id, code, None);
            shared.announce(event);
            Ok(v1::StopContainerResponse {})
        })
        .await
    }

    async fn remove_container(
        &self,
        request: Request<v1::RemoveContainerRequest>,
    ) -> Result<Response<v1::RemoveContainerResponse>, Status> {
        let request = request.into_inner();
        self.call("remove_container", request.container_id.clone(), async {
            let shared = &self.0;
            let stopped = shared.model().exit(&request.container_id, 137, None);
            shared.announce(stopped);
            let removed = shared.model().remove_container(&request.container_id);
            shared.announce(removed);
            Ok(v1::RemoveContainerResponse {})
        })
        .await
    }

    async fn list_containers(
        &self,
        request: Request<v1::ListContainersRequest>,
    ) -> Result<Response<v1::ListContainersResponse>, Status> {
        let request = request.into_inner();
        self.call("list_containers", "", async {
            let shared = &self.0;
            let containers = shared.model().list_containers(request.filter.as_ref());
            shared.fits(v1::ListContainersResponse { containers })
        })
        .await
    }

    async fn container_status(
        &self,
        request: Request<v1::ContainerStatusRequest>,
    ) -> Result<Response<v1::ContainerStatusResponse>, Status> {
        let request = request.into_inner();
        self.call("container_status", request.container_id.clone(), async {
            let shared = &self.0;
            let status = shared.model().container_status(&request.container_id)?;
            Ok(v1::ContainerStatusResponse {
                status: Some(status),
                ..Default::default()
            })
        })
        .await
    }

    async fn update_container_resources(
        &self,
        request: Request<v1::UpdateContainerResourcesRequest>,
    ) -> Result<Response<v1::UpdateContainerResourcesResponse>, Status> {
        let request = request.into_inner();
        let linux = request.linux.unwrap_or_default();
        let mut object = format!(
            "{} shares={} quota={} memory={}",
            request.container_id, linux.cpu_shares, linux.cpu_quota, linux.memory_limit_in_bytes
        );
        if !linux.cpuset_cpus.is_empty() {
            // Nothing else was asked for.
            object = format!("{} cpus={}", request.container_id, linux.cpuset_cpus);
        }
        self.call("update_container", object, async {
            let shared = &self.0;
            shared.model().container_status(&request.container_id)?;
            Ok(v1::UpdateContainerResourcesResponse {})
        })
        .await
    }

    async fn reopen_container_log(
        &self,
        request: Request<v1::ReopenContainerLogRequest>,
    ) -> Result<Response<v1::ReopenContainerLogResponse>, Status> {
        let request = request.into_inner();
        self.call(
            "reopen_container_log",
            request.container_id.clone(),
            async {
                let shared = &self.0;
                shared.model().reopen_log(&request.container_id)?;
                Ok(v1::ReopenContainerLogResponse {})
            },
        )
        .await
    }

    async fn exec_sync(
        &self,
        request: Request<v1::ExecSyncRequest>,
    ) -> Result<Response<v1::ExecSyncResponse>, Status> {
        let request = request.into_inner();
        self.call("exec_sync", request.container_id.clone(), async {
            let shared = &self.0;
            let id = request.container_id;
            shared.model().container_status(&id)?;
            if shared.model().running(&id).is_none() {
                return Err(Status::unknown(format!(
                    "failed to exec in container: container \"{id}\" is not running"
                )));
            }
            let config = shared.model().config(&id).unwrap_or_default();
            let on_exec = shared.control().on_exec.clone();
            let result = on_exec(&config, &request.cmd);
            let limit = Duration::from_secs(u64::try_from(request.timeout).unwrap_or(0));
            if !limit.is_zero() && result.takes > limit {
                tokio::time::sleep(limit).await;
                return Err(Status::deadline_exceeded(format!(
                    "failed to exec in container: timeout {limit:?} exceeded: context deadline exceeded"
                )));
            }
            if !result.takes.is_zero() {
                tokio::time::sleep(result.takes).await;
            }
            Ok(v1::ExecSyncResponse {
                stdout: result.stdout.into_bytes(),
                stderr: result.stderr.into_bytes(),
                exit_code: result.code,
            })
        })
        .await
    }

    async fn list_container_stats(
        &self,
        request: Request<v1::ListContainerStatsRequest>,
    ) -> Result<Response<v1::ListContainerStatsResponse>, Status> {
        let request = request.into_inner();
        self.call("list_container_stats", "", async {
            let shared = &self.0;
            let filter = request.filter.map(|f| v1::ContainerFilter {
                id: f.id,
                pod_sandbox_id: f.pod_sandbox_id,
                label_selector: f.label_selector,
                ..Default::default()
            });
            let containers = shared.model().list_containers(filter.as_ref());
            let timestamp = shared.model().now_ns();
            let value = |value| Some(v1::UInt64Value { value });
            let stats = containers
                .into_iter()
                .map(|c| v1::ContainerStats {
                    attributes: Some(v1::ContainerAttributes {
                        id: c.id,
                        metadata: c.metadata,
                        labels: c.labels,
                        annotations: c.annotations,
                    }),
                    // Every container has used a second of processor time and a MiB of memory.
                    cpu: Some(v1::CpuUsage {
                        timestamp,
                        usage_core_nano_seconds: value(1_000_000_000),
                        ..Default::default()
                    }),
                    memory: Some(v1::MemoryUsage {
                        timestamp,
                        working_set_bytes: value(1 << 20),
                        ..Default::default()
                    }),
                    ..Default::default()
                })
                .collect();
            Ok(v1::ListContainerStatsResponse { stats })
        })
        .await
    }

    async fn update_runtime_config(
        &self,
        request: Request<v1::UpdateRuntimeConfigRequest>,
    ) -> Result<Response<v1::UpdateRuntimeConfigResponse>, Status> {
        let config = request.into_inner().runtime_config;
        let network = config.and_then(|config| config.network_config);
        let cidr = network.map(|network| network.pod_cidr).unwrap_or_default();
        self.call("update_runtime_config", &cidr, async {
            Ok(v1::UpdateRuntimeConfigResponse {})
        })
        .await
    }

    async fn exec(
        &self,
        _: Request<v1::ExecRequest>,
    ) -> Result<Response<v1::ExecResponse>, Status> {
        self.call("exec", "", async {
            let url = self.stream_url("exec")?;
            Ok(v1::ExecResponse { url })
        })
        .await
    }

    async fn attach(
        &self,
        _: Request<v1::AttachRequest>,
    ) -> Result<Response<v1::AttachResponse>, Status> {
        self.call("attach", "", async {
            let url = self.stream_url("attach")?;
            Ok(v1::AttachResponse { url })
        })
        .await
    }

    async fn port_forward(
        &self,
        _: Request<v1::PortForwardRequest>,
    ) -> Result<Response<v1::PortForwardResponse>, Status> {
        self.call("port_forward", "", async {
            let url = self.stream_url("port_forward")?;
            Ok(v1::PortForwardResponse { url })
        })
        .await
    }

    async fn container_stats(
        &self,
        _: Request<v1::ContainerStatsRequest>,
    ) -> Result<Response<v1::ContainerStatsResponse>, Status> {
        self.call("container_stats", "", async {
            Err(not_offered("container_stats"))
        })
        .await
    }

    async fn pod_sandbox_stats(
        &self,
        _: Request<v1::PodSandboxStatsRequest>,
    ) -> Result<Response<v1::PodSandboxStatsResponse>, Status> {
        self.call("podsandbox_stats", "", async {
            Err(not_offered("pod_sandbox_stats"))
        })
        .await
    }

    async fn list_pod_sandbox_stats(
        &self,
        _: Request<v1::ListPodSandboxStatsRequest>,
    ) -> Result<Response<v1::ListPodSandboxStatsResponse>, Status> {
        self.call("list_podsandbox_stats", "", async {
            Err(not_offered("list_pod_sandbox_stats"))
        })
        .await
    }

    async fn checkpoint_container(
        &self,
        request: Request<v1::CheckpointContainerRequest>,
    ) -> Result<Response<v1::CheckpointContainerResponse>, Status> {
        let request = request.into_inner();
        let offered = self.0.control().checkpoints;
        self.call("checkpoint_container", request.container_id, async move {
            if !offered {
                return Err(not_offered("checkpoint_container"));
            }
            std::fs::write(request.location, "state of the container")
                .map_err(|error| Status::internal(error.to_string()))?;
            Ok(v1::CheckpointContainerResponse {})
        })
        .await
    }

    async fn list_metric_descriptors(
        &self,
        _: Request<v1::ListMetricDescriptorsRequest>,
    ) -> Result<Response<v1::ListMetricDescriptorsResponse>, Status> {
        self.call("list_metric_descriptors", "", async {
            Err(not_offered("list_metric_descriptors"))
        })
        .await
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _: Request<v1::ListPodSandboxMetricsRequest>,
    ) -> Result<Response<v1::ListPodSandboxMetricsResponse>, Status> {
        self.call("list_podsandbox_metrics", "", async {
            Err(not_offered("list_pod_sandbox_metrics"))
        })
        .await
    }

    async fn runtime_config(
        &self,
        _: Request<v1::RuntimeConfigRequest>,
    ) -> Result<Response<v1::RuntimeConfigResponse>, Status> {
        self.call("runtime_config", "", async {
            let driver = self.0.control().cgroup_driver;
            let Some(driver) = driver else {
                return Err(not_offered("runtime_config"));
            };
            Ok(v1::RuntimeConfigResponse {
                linux: Some(v1::LinuxRuntimeConfiguration {
                    cgroup_driver: driver.into(),
                }),
            })
        })
        .await
    }
}

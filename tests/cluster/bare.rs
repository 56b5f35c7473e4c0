//! What the runtime takes for the same pods when nobody stands between: straight over CRI, a few in flight.
//!
//! The runtime decides how fast a node starts pods, and machines differ and are noisy: figures of the agent are told
//! beside these, measured in the same run.

use std::time::{Duration, Instant};

use futures::stream::{StreamExt, TryStreamExt};
use holdfast::kuberuntime::cri::v1;
use holdfast_testkit::containerd::BUSYBOX;
use tonic::transport::{Channel, Endpoint};
use v1::runtime_service_client::RuntimeServiceClient;

use crate::setup::Cluster;

/// Pods that are started at the same time.
const IN_FLIGHT: usize = 4;

fn sandbox(cluster: &Cluster, n: usize) -> v1::PodSandboxConfig {
    let logs = cluster.pod_logs().join(format!("bare-{n}"));
    std::fs::create_dir_all(&logs).expect("make a log directory");
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: format!("bare-{n}"),
            uid: format!("bare-{n}"),
            namespace: "bare".to_owned(),
            attempt: 0,
        }),
        hostname: format!("bare-{n}"),
        log_directory: logs.display().to_string(),
        linux: Some(v1::LinuxPodSandboxConfig {
            cgroup_parent: format!("{}/bare/pod{n}", cluster.cgroup()),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn container(script: &str) -> v1::ContainerConfig {
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: "main".to_owned(),
            attempt: 0,
        }),
        image: Some(v1::ImageSpec {
            image: BUSYBOX.to_owned(),
            ..Default::default()
        }),
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        log_path: "main.log".to_owned(),
        linux: Some(v1::LinuxContainerConfig::default()),
        ..Default::default()
    }
}

async fn start(
    mut runtime: RuntimeServiceClient<Channel>,
    sandbox: v1::PodSandboxConfig,
    container: v1::ContainerConfig,
) -> Result<String, tonic::Status> {
    let request = v1::RunPodSandboxRequest {
        config: Some(sandbox.clone()),
        runtime_handler: String::new(),
    };
    let pod = runtime.run_pod_sandbox(request).await?;
    let pod = pod.into_inner().pod_sandbox_id;
    let request = v1::CreateContainerRequest {
        pod_sandbox_id: pod.clone(),
        config: Some(container),
        sandbox_config: Some(sandbox),
    };
    let container_id = runtime.create_container(request).await?;
    let request = v1::StartContainerRequest {
        container_id: container_id.into_inner().container_id,
    };
    runtime.start_container(request).await?;
    Ok(pod)
}

async fn remove(
    mut runtime: RuntimeServiceClient<Channel>,
    pod: String,
) -> Result<(), tonic::Status> {
    let pod_sandbox_id = pod.clone();
    let stop = v1::StopPodSandboxRequest { pod_sandbox_id };
    runtime.stop_pod_sandbox(stop).await?;
    let request = v1::RemovePodSandboxRequest {
        pod_sandbox_id: pod,
    };
    runtime.remove_pod_sandbox(request).await?;
    Ok(())
}

async fn runtime(cluster: &Cluster) -> RuntimeServiceClient<Channel> {
    let endpoint = Endpoint::from_shared(cluster.runtime.endpoint()).expect("a socket");
    RuntimeServiceClient::new(endpoint.connect().await.expect("connect to containerd"))
}

/// Starts as many pods that run `script`, and removes them. Returns how long it took until each ran, in order.
pub fn start_pods(cluster: &Cluster, count: usize, script: &str) -> Vec<Duration> {
    cluster.run(async {
        let runtime = runtime(cluster).await;
        let all: Vec<_> = (0..count).map(|n| sandbox(cluster, n)).collect();
        let begun = Instant::now();
        let (times, pods): (Vec<_>, Vec<_>) = futures::stream::iter(all)
            .map(|config| start(runtime.clone(), config, container(script)))
            .buffered(IN_FLIGHT)
            .map_ok(|pod| (begun.elapsed(), pod))
            .try_collect::<Vec<_>>()
            .await
            .expect("the runtime starts pods")
            .into_iter()
            .unzip();
        futures::stream::iter(pods)
            .map(|pod| remove(runtime.clone(), pod))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>()
            .await
            .expect("the runtime removes pods");
        times
    })
}

/// Starts a pod that runs `script`, and removes it. Returns how long each took.
pub fn one_pod(cluster: &Cluster, script: &str) -> (Duration, Duration) {
    cluster.run(async {
        let runtime = runtime(cluster).await;
        let begun = Instant::now();
        let pod = start(runtime.clone(), sandbox(cluster, 0), container(script)).await;
        let pod = pod.expect("the runtime starts a pod");
        let started = begun.elapsed();
        let begun = Instant::now();
        let removed = remove(runtime, pod).await;
        removed.expect("the runtime removes a pod");
        (started, begun.elapsed())
    })
}

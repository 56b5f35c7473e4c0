//! A runtime, pods in it, and the routes of the agent on a port.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::Extension;
use holdfast::kuberuntime::cri::{CriClient, v1};
use holdfast::pod_manager::PodManager;
use holdfast::server::kubelet::streaming::{self, Streaming};
use holdfast::types::ContainerId;
use holdfast_testkit::containerd::Version;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::runtime::{self, TestPod};

/// The routes, served without TLS and without authentication.
pub(crate) struct Server {
    pub(crate) addr: String,
    pub(crate) pods: PodManager,
    pub(crate) stop: CancellationToken,
    pub(crate) streams: TaskTracker,
}

impl Server {
    pub(crate) async fn start(cri: CriClient, idle_timeout: Duration) -> Self {
        Self::serve(cri, idle_timeout, true).await
    }

    /// One that does not know its pods yet.
    pub(crate) async fn start_unrestored(cri: CriClient) -> Self {
        Self::serve(cri, streaming::IDLE_TIMEOUT, false).await
    }

    async fn serve(cri: CriClient, idle_timeout: Duration, restored: bool) -> Self {
        let pods = PodManager::default();
        let stop = CancellationToken::new();
        let streams = TaskTracker::new();
        let routes = streaming::router(Streaming {
            pods: pods.clone(),
            cri,
            restored: Arc::new(AtomicBool::new(restored)),
            stop: stop.clone(),
            idle_timeout,
        })
        .layer(Extension(streams.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let connection = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .serve_connection(
                        TokioIo::new(stream),
                        TowerToHyperService::new(routes.clone()),
                    )
                    .with_upgrades();
                tokio::spawn(connection);
            }
        });
        Self {
            addr,
            pods,
            stop,
            streams,
        }
    }

    pub(crate) fn want(&self, pod: &TestPod, container: &serde_json::Value) {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": pod.name, "namespace": "default", "uid": pod.uid.to_string()},
            "spec": {"containers": [container]},
        }))
        .unwrap();
        self.pods.update(Arc::new(pod));
    }
}

/// A containerd and a server.
pub(crate) struct World {
    pub(crate) runtime: runtime::World,
    pub(crate) server: Server,
}

impl World {
    pub(crate) async fn start() -> Self {
        Self::on(Version::Installed, streaming::IDLE_TIMEOUT).await
    }

    pub(crate) async fn on(version: Version, idle_timeout: Duration) -> Self {
        let runtime = runtime::World::containerd(version);
        let server = Server::start(runtime.cri.clone(), idle_timeout).await;
        Self { runtime, server }
    }

    /// A pod whose container `main` runs a shell script.
    pub(crate) async fn pod(&self, script: &str) -> (TestPod, ContainerId) {
        let (pod, _, id) = self.runtime.run(script).await;
        self.server.want(&pod, &json!({"name": "main"}));
        (pod, id)
    }

    /// The same with stdin, and a terminal.
    pub(crate) async fn interactive_pod(&self, script: &str, tty: bool) -> TestPod {
        let (pod, sandbox_config, sandbox) = self.runtime.sandbox().await;
        let config = v1::ContainerConfig {
            stdin: true,
            tty,
            ..pod.container("main", 0, &["sh", "-c", script])
        };
        let created = self
            .runtime
            .cri
            .create_container(&sandbox, config, sandbox_config);
        let id = created.await.unwrap();
        let intent = self.runtime.start_intent(&pod.uid, &id).await;
        self.runtime.cri.start_container(&intent).await.unwrap();
        self.server
            .want(&pod, &json!({"name": "main", "stdin": true, "tty": tty}));
        pod
    }

    pub(crate) fn addr(&self) -> &str {
        &self.server.addr
    }
}

/// The path of an exec that runs a shell script.
pub(crate) fn exec(pod: &TestPod, streams: &str, script: &str) -> String {
    let script: String = form_urlencoded::byte_serialize(script.as_bytes()).collect();
    format!(
        "/exec/default/{}/main?{streams}&command=sh&command=-c&command={script}",
        pod.name
    )
}

//! A node to try handlers on: a store in memory, a fake runtime, and the real configuration.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request};
use holdfast_testkit::fake_cri::FakeCri;
use k8s_cri::v1;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::{DebugHooks, NodeApi, routes};
use crate::kubeletconfig::flags::KubeletFlags;
use crate::kubeletconfig::resolve;
use crate::kuberuntime::cri::{CriClient, CriTimeouts};
use crate::node_object::NodeObject;
use crate::pod_manager::PodManager;
use crate::server::HealthChecks;
use crate::store::Store;
use crate::types::events::MemoryRecorder;
use crate::types::host_addresses::HostAddresses;
use crate::types::metrics::Metrics;
use crate::types::{BootId, Clock, Stamp};

/// A clock that stands still until it is moved.
pub(super) struct StoppedClock(Mutex<Stamp>);

impl StoppedClock {
    pub(super) fn advance(&self, by: Duration) {
        let mut now = self.0.lock().unwrap();
        *now = now.plus(by);
    }
}

impl Clock for StoppedClock {
    fn now(&self) -> Stamp {
        *self.0.lock().unwrap()
    }
}

/// 2026-01-02T03:04:05Z.
const NOW_MS: i64 = 1_767_323_045_000;

/// A node, and what it looks at.
pub(super) struct TestNode {
    pub(super) node: NodeApi,
    pub(super) cri: FakeCri,
    pub(super) clock: Arc<StoppedClock>,
    pub(super) root: tempfile::TempDir,
}

impl TestNode {
    /// A node that has resumed its pods.
    pub(super) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("kubelet.yaml");
        std::fs::write(
            &file,
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nresolvConf: \"\"\n",
        )
        .unwrap();
        let flags = KubeletFlags {
            root_dir: Some(root.path().join("root")),
            state_dir: Some(root.path().join("state")),
            config: Some(file),
            hostname_override: Some("node-1".to_owned()),
            ..KubeletFlags::default()
        };
        let (config, _) = resolve(&flags).unwrap();
        let cri = FakeCri::new();
        let metrics = Metrics::default();
        let clock = Arc::new(StoppedClock(Mutex::new(Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms: NOW_MS,
        })));
        let timeouts = CriTimeouts::default();
        let node = NodeApi {
            store: Store::in_memory(Arc::clone(&clock) as _),
            pods: PodManager::default(),
            cri: CriClient::over(cri.channel(), "fake", timeouts, metrics.clone()),
            clock: Arc::clone(&clock) as _,
            metrics,
            addresses: HostAddresses::fixed(vec![std::net::Ipv4Addr::LOCALHOST.into()]),
            config: Arc::new(config),
            node: NodeObject::default(),
            health: HealthChecks {
                clock: Arc::clone(&clock) as _,
                sync_loop: Arc::new(|_| Ok(())),
                notes: Vec::new(),
                ready: Vec::new(),
            },
            recorder: Arc::new(MemoryRecorder::default()),
            api: None,
            restored: Arc::new(AtomicBool::new(true)),
            volumes: Arc::default(),
            stop: CancellationToken::new(),
            debug: DebugHooks::default(),
        };
        Self {
            node,
            cri,
            clock,
            root,
        }
    }

    /// Adds a pod that a source wants.
    pub(super) fn want(&self, pod: Value) -> Arc<Pod> {
        let pod: Arc<Pod> = Arc::new(serde_json::from_value(pod).unwrap());
        self.node.pods.update(Arc::clone(&pod));
        pod
    }

    /// Runs a sandbox with these containers; gives their ids.
    pub(super) async fn run(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        containers: &[&str],
    ) -> Vec<String> {
        let mut runtime = RuntimeServiceClient::new(self.cri.channel());
        let labels = |container: Option<&str>| {
            let pod = [
                ("io.kubernetes.pod.name", name),
                ("io.kubernetes.pod.namespace", namespace),
                ("io.kubernetes.pod.uid", uid),
            ];
            let container = container.map(|c| ("io.kubernetes.container.name", c));
            let all = pod.into_iter().chain(container);
            all.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
        };
        let sandbox = v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: name.to_owned(),
                uid: uid.to_owned(),
                namespace: namespace.to_owned(),
                attempt: 0,
            }),
            labels: labels(None),
            ..Default::default()
        };
        let id = runtime
            .run_pod_sandbox(v1::RunPodSandboxRequest {
                config: Some(sandbox.clone()),
                runtime_handler: String::new(),
            })
            .await
            .unwrap()
            .into_inner()
            .pod_sandbox_id;
        let mut ids = Vec::new();
        for container in containers {
            self.cri.add_image("example.com/app:1");
            let config = v1::ContainerConfig {
                metadata: Some(v1::ContainerMetadata {
                    name: (*container).to_owned(),
                    attempt: 0,
                }),
                image: Some(v1::ImageSpec {
                    image: "example.com/app:1".to_owned(),
                    ..Default::default()
                }),
                labels: labels(Some(container)),
                ..Default::default()
            };
            let created = runtime
                .create_container(v1::CreateContainerRequest {
                    pod_sandbox_id: id.clone(),
                    config: Some(config),
                    sandbox_config: Some(sandbox.clone()),
                })
                .await
                .unwrap()
                .into_inner();
            let container_id = created.container_id;
            let start = v1::StartContainerRequest {
                container_id: container_id.clone(),
            };
            runtime.start_container(start).await.unwrap();
            ids.push(container_id);
        }
        ids
    }

    /// Ends the making of the node: from now on it is asked.
    pub(super) fn serve(self) -> Served {
        Served {
            routes: routes(Arc::new(self.node)),
            cri: self.cri,
            clock: self.clock,
            _root: self.root,
        }
    }
}

/// The routes of a node.
pub(super) struct Served {
    routes: axum::Router,
    #[expect(dead_code, reason = "the runtime lives as long as it may be asked")]
    cri: FakeCri,
    pub(super) clock: Arc<StoppedClock>,
    _root: tempfile::TempDir,
}

/// Response to a test's request.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl Answer {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

impl Served {
    pub(super) async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap())
            .await
    }

    pub(super) async fn send(&self, request: Request<Body>) -> Answer {
        let answer = self.routes.clone().oneshot(request).await.unwrap();
        let (parts, body) = answer.into_parts();
        Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: to_bytes(body, usize::MAX).await.unwrap().to_vec(),
        }
    }
}

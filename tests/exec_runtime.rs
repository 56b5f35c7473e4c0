//! Containers and sandboxes made from a pod, stopped and removed over CRI, against the fake runtime.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test may fail loudly"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use holdfast::core::state::{ContainerRecord, Transaction, child_key};
use holdfast::images::{ImageConfig, ImageErrorReason, ImageManager, PullInputs};
use holdfast::kuberuntime::container_config::{self, ContainerInputs};
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts, v1};
use holdfast::kuberuntime::env::{self, EnvInputs};
use holdfast::kuberuntime::gc::{GcPolicy, Remover};
use holdfast::kuberuntime::kill;
use holdfast::kuberuntime::node_context::NodeContext;
use holdfast::kuberuntime::sandbox_config;
use holdfast::kuberuntime::security::Isolation;
use holdfast::kuberuntime::sources::Sources;
use holdfast::store::{StartIntent, Store};
use holdfast::types::events::MemoryRecorder;
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, Clock, ContainerId, PodExt, Stamp};
use holdfast_testkit::fake_cri::{Behaviour, FakeCri, Fault, Pull};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tonic::Code;

const IMAGE: &str = "holdfast.local/busybox:1";

/// Tokio's clock, which the fake runtime runs on as well.
struct TokioClock(tokio::time::Instant);

impl Clock for TokioClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: 1_800_000_000_000 + ms,
        }
    }
}

struct World {
    fake: FakeCri,
    cri: CriClient,
    store: Store,
    clock: Arc<dyn Clock>,
    ctx: NodeContext,
    recorder: MemoryRecorder,
    _dir: tempfile::TempDir,
}

fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeCri::new();
    fake.add_image(IMAGE);
    let clock: Arc<dyn Clock> = Arc::new(TokioClock(tokio::time::Instant::now()));
    let mut ctx = NodeContext::new("n1", dir.path().join("root"));
    ctx.pod_log_root = dir.path().join("pods");
    ctx.container_log_root = dir.path().join("containers");
    World {
        cri: CriClient::over(
            fake.channel(),
            "unix:///sim",
            CriTimeouts::default(),
            Metrics::default(),
        ),
        fake,
        store: Store::in_memory(clock.clone()),
        clock,
        ctx,
        recorder: MemoryRecorder::default(),
        _dir: dir,
    }
}

fn pod(uid: &str, containers: &[&str]) -> Pod {
    let containers: Vec<_> = containers
        .iter()
        .map(|name| json!({"name": name, "image": IMAGE, "command": ["sleep", "3600"]}))
        .collect();
    serde_json::from_value(json!({
        "metadata": {"name": format!("p-{uid}"), "namespace": "ns", "uid": uid},
        "spec": {"containers": containers},
    }))
    .unwrap()
}

impl World {
    async fn sandbox(&self, pod: &Pod, attempt: u32) -> (ContainerId, v1::PodSandboxConfig) {
        let (dns, _) = self.ctx.dns.pod_dns(pod).unwrap();
        let config = sandbox_config::build(pod, attempt, "", dns, &self.ctx).unwrap();
        let id = self.cri.run_pod_sandbox(config.clone(), "").await.unwrap();
        (id, config)
    }

    async fn start(
        &self,
        pod: &Pod,
        name: &str,
        attempt: u32,
        sandbox: &(ContainerId, v1::PodSandboxConfig),
    ) -> ContainerId {
        let container = pod.container(name).unwrap();
        let files =
            container_config::prepare_files(pod, container, attempt, &[], &self.ctx).unwrap();
        let env = env::make_env(
            &EnvInputs {
                pod,
                container,
                pod_ips: &[],
                sources: &Sources {
                    services: Some(Vec::new()),
                    ..Default::default()
                },
            },
            &self.ctx,
        )
        .unwrap();
        let config = container_config::build(
            &ContainerInputs {
                pod,
                container,
                attempt,
                hash: "h",
                image_ref: IMAGE,
                env: &env,
                volumes: &BTreeMap::new(),
                files: &files,
                isolation: Isolation::default(),
            },
            &self.ctx,
        )
        .unwrap();
        let id = self
            .cri
            .create_container(&sandbox.0, config, sandbox.1.clone())
            .await
            .unwrap();
        let intent = StartIntent {
            pod: pod.uid(),
            container: name.to_owned(),
            container_id: id.clone(),
            attempt,
            hash: "h".to_owned(),
            why: "test".to_owned(),
            at: self.clock.now(),
        };
        let receipt = self
            .store
            .commit_intent(intent, Transaction::new())
            .await
            .unwrap();
        self.cri.start_container(&receipt).await.unwrap();
        id
    }

    fn remover(&self) -> Remover<'_> {
        Remover {
            cri: &self.cri,
            store: &self.store,
            clock: &*self.clock,
            ctx: &self.ctx,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_listed_by_its_labels_and_stopped_whole() {
    let world = world();
    let pod = pod("u1", &["a", "b"]);
    let sandbox = world.sandbox(&pod, 0).await;
    world.start(&pod, "a", 0, &sandbox).await;
    world.start(&pod, "b", 0, &sandbox).await;
    let status = world
        .cri
        .pod_status(&pod.uid(), pod.name(), pod.namespace())
        .await
        .unwrap();
    assert_eq!((status.name.as_str(), status.containers.len()), ("p-u1", 2));
    assert!(status.containers.iter().all(|c| c.hash == "h"));

    let permit = world.store.commit_stop(Transaction::new()).await.unwrap();
    kill::kill_pod(
        &status,
        Duration::from_secs(5),
        &world.cri,
        &permit,
        &world.recorder,
    )
    .await
    .unwrap();
    assert!(world.fake.running("p-u1", "a").is_empty());
    assert_eq!(world.fake.count("stop_podsandbox"), 1);
    let events = world.recorder.events();
    let said: BTreeSet<_> = events
        .iter()
        .map(|e| (e.reason.as_str(), e.message.as_str()))
        .collect();
    assert_eq!(
        said,
        [
            ("Killing", "Stopping container a"),
            ("Killing", "Stopping container b")
        ]
        .into()
    );
}

#[tokio::test(start_paused = true)]
async fn containers_are_stopped_side_by_side() {
    let world = world();
    world
        .fake
        .on_start(|_| Behaviour::SlowTerm(Duration::from_secs(10)));
    let pod = pod("u1", &["a", "b", "c"]);
    let sandbox = world.sandbox(&pod, 0).await;
    for name in ["a", "b", "c"] {
        world.start(&pod, name, 0, &sandbox).await;
    }
    let status = world
        .cri
        .pod_status(&pod.uid(), pod.name(), pod.namespace())
        .await
        .unwrap();
    let permit = world.store.commit_stop(Transaction::new()).await.unwrap();
    let begun = tokio::time::Instant::now();
    kill::kill_pod(
        &status,
        Duration::from_secs(30),
        &world.cri,
        &permit,
        &world.recorder,
    )
    .await
    .unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(15),
        "took {:?}",
        begun.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn the_sandbox_is_stopped_even_when_a_container_cannot_be() {
    let world = world();
    let pod = pod("u1", &["a"]);
    let sandbox = world.sandbox(&pod, 0).await;
    world.start(&pod, "a", 0, &sandbox).await;
    let status = world
        .cri
        .pod_status(&pod.uid(), pod.name(), pod.namespace())
        .await
        .unwrap();
    world.fake.fail_once(
        "stop_container",
        Fault::Error(Code::Internal, "no".to_owned()),
    );
    let permit = world.store.commit_stop(Transaction::new()).await.unwrap();
    let error = kill::kill_pod(
        &status,
        Duration::from_secs(5),
        &world.cri,
        &permit,
        &world.recorder,
    )
    .await
    .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("stop container a of pod ns/p-u1"),
        "{error}"
    );
    assert_eq!(world.fake.count("stop_podsandbox"), 1);
}

#[tokio::test(start_paused = true)]
async fn ends_are_on_record_before_containers_leave_the_runtime() {
    let world = world();
    let (kept, gone) = (pod("kept", &["a"]), pod("gone", &["a"]));
    let sandbox = world.sandbox(&kept, 0).await;
    for attempt in 0..3 {
        let id = world.start(&kept, "a", attempt, &sandbox).await;
        if attempt < 2 {
            world.fake.exit(id.as_str(), 3);
        }
    }
    let gone_sandbox = world.sandbox(&gone, 0).await;
    let last = world.start(&gone, "a", 0, &gone_sandbox).await;
    world.fake.exit(last.as_str(), 7);

    let pods: Vec<_> = world.cri.list_pods().await.unwrap().into_values().collect();
    let permit = world.store.commit_stop(Transaction::new()).await.unwrap();
    let doomed = BTreeSet::from([gone.uid()]);
    let report = world
        .remover()
        .collect(&pods, GcPolicy::default(), &doomed, &permit)
        .await;
    assert!(report.errors.is_empty(), "{:?}", report.errors);
    assert_eq!((report.containers, report.sandboxes), (2, 1));
    let left: Vec<u32> = world
        .fake
        .containers()
        .iter()
        .map(|c| c.metadata.as_ref().unwrap().attempt)
        .collect();
    assert_eq!(
        left.len(),
        2,
        "the running one and the newest dead one stay: {left:?}"
    );
    assert!(left.contains(&1) && left.contains(&2));
    assert_eq!(world.fake.sandboxes().len(), 1);
    let seen = world.store.snapshot();
    let record = seen
        .record::<ContainerRecord>(&child_key(&gone.uid(), "a"))
        .unwrap();
    assert_eq!(record.last_exit.as_ref().map(|e| e.exit_code), Some(7));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_inspected_stays() {
    let world = world();
    let pod = pod("gone", &["a"]);
    let sandbox = world.sandbox(&pod, 0).await;
    let id = world.start(&pod, "a", 0, &sandbox).await;
    world.fake.exit(id.as_str(), 1);
    let pods: Vec<_> = world.cri.list_pods().await.unwrap().into_values().collect();
    let permit = world.store.commit_stop(Transaction::new()).await.unwrap();
    world.fake.fail_always(
        "container_status",
        Fault::Error(Code::Internal, "no".to_owned()),
    );
    let report = world
        .remover()
        .collect(
            &pods,
            GcPolicy::default(),
            &BTreeSet::from([pod.uid()]),
            &permit,
        )
        .await;
    assert_eq!(report.errors.len(), 1);
    assert_eq!(
        (world.fake.containers().len(), world.fake.sandboxes().len()),
        (1, 1)
    );
    assert_eq!(world.fake.count("remove_container"), 0);
}

#[tokio::test(start_paused = true)]
async fn images_are_pulled_over_cri() {
    let world = world();
    let manager = ImageManager::new(
        ImageConfig::default(),
        world.clock.clone(),
        Metrics::default(),
    );
    let mut pod = pod("u1", &["a"]);
    let ensure = async |pod: &Pod| {
        let container = &pod.containers()[0];
        manager
            .ensure(
                pod,
                container,
                PullInputs::default(),
                &world.cri,
                &world.store,
                &world.recorder,
            )
            .await
    };
    ensure(&pod).await.unwrap();
    assert_eq!(world.fake.count("pull_image"), 0);
    if let Some(spec) = pod.spec.as_mut() {
        spec.containers[0].image = Some("example.com/none:1".to_owned());
    }
    world.fake.pull(
        "example.com/none:1",
        Pull::Fails(Code::NotFound, "not found".to_owned()),
    );
    let error = ensure(&pod).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ErrImagePull);
    assert!(error.message.contains("not found"), "{}", error.message);
    let error = ensure(&pod).await.unwrap_err();
    assert_eq!(error.reason, ImageErrorReason::ImagePullBackOff);
    tokio::time::advance(Duration::from_secs(11)).await;
    world.fake.pull("example.com/none:1", Pull::Succeeds);
    ensure(&pod).await.unwrap();
}

//! Containers and sandboxes made from a pod, stopped and removed over CRI, against the fake runtime.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test may fail loudly"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::core::state::{ContainerRecord, Transaction, child_key};
use holdfast::images::{ImageConfig, ImageErrorReason, ImageManager, PullInputs};
use holdfast::kuberuntime::container_config::{self, ContainerInputs};
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts, v1};
use holdfast::kuberuntime::dns::ResolvConf;
use holdfast::kuberuntime::env::{self, EnvInputs};
use holdfast::kuberuntime::gc::{GcError, GcPolicy, Remover};
use holdfast::kuberuntime::kill::{Condemned, KillError, Killer};
use holdfast::kuberuntime::node_context::NodeContext;
use holdfast::kuberuntime::open_streams::Until;
use holdfast::kuberuntime::sandbox_config;
use holdfast::kuberuntime::security::Isolation;
use holdfast::kuberuntime::sources::Sources;
use holdfast::store::backend::{Faults, FaultyBackend, MemoryBackend};
use holdfast::store::codec::Loaded;
use holdfast::store::{StartIntent, StopDecision, Store, StoreOptions};
use holdfast::types::containers::container_of;
use holdfast::types::events::MemoryRecorder;
use holdfast::types::metrics::Metrics;
use holdfast::types::runtime::{ContainerState, PodStatus};
use holdfast::types::{BootId, Clock, ContainerId, Pace, PodExt, Stamp};
use holdfast_testkit::fake_cri::{Behaviour, ExecResult, FakeCri, Fault, Pull};
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
    pace: Pace,
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
        pace: Pace::default(),
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
        let (dns, _) = self.ctx.dns.pod_dns(pod, &ResolvConf::default()).unwrap();
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
        let spec = container_of(pod, name).unwrap();
        let container = &*spec.container;
        let files = container_config::prepare_files(pod, container, &[], &self.ctx).unwrap();
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
                remotes: &BTreeMap::new(),
                sub_paths: &BTreeMap::new(),
                without_labels: &std::collections::BTreeSet::new(),
                recursive_read_only: false,
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

    async fn kill(
        &self,
        pod: Option<&Pod>,
        status: &PodStatus,
        grace: Duration,
    ) -> Result<(), KillError> {
        let permit = self
            .store
            .commit_stop(StopDecision::unrecorded_leftovers())
            .await
            .unwrap();
        let killer = Killer {
            cri: &self.cri,
            store: &self.store,
            recorder: &self.recorder,
            permit: &permit,
            clock: &*self.clock,
            pace: &self.pace,
            ends: None,
        };
        let condemned = Condemned {
            status,
            pod,
            host_ips: &[],
        };
        killer.pod(condemned, grace).await
    }

    /// When each container was asked to stop, by name, in seconds from now.
    fn stops(&self, pod: &Pod) -> Arc<Mutex<BTreeMap<String, u64>>> {
        let stops: Arc<Mutex<BTreeMap<String, u64>>> = Arc::default();
        let (seen, fake, begun) = (
            Arc::clone(&stops),
            self.fake.clone(),
            tokio::time::Instant::now(),
        );
        let uid = pod.uid();
        self.fake.on_call(move |call| {
            if call.operation == "stop_container"
                && let Some(config) = fake.config(&call.object)
                && config.labels["io.kubernetes.pod.uid"] == uid.as_str()
            {
                let name = config.metadata.unwrap().name;
                let seconds = begun.elapsed().as_secs();
                seen.lock().unwrap().insert(name, seconds);
            }
            None
        });
        stops
    }

    async fn status(&self, pod: &Pod) -> PodStatus {
        self.cri
            .pod_status(&pod.uid(), pod.name(), pod.namespace())
            .await
            .unwrap()
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

    world
        .kill(Some(&pod), &status, Duration::from_secs(5))
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
    let begun = tokio::time::Instant::now();
    world
        .kill(Some(&pod), &status, Duration::from_secs(30))
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
    let error = world
        .kill(Some(&pod), &status, Duration::from_secs(5))
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

impl World {
    /// A pod with a container, and what the runtime shows of it.
    async fn one_container(&self) -> (Pod, ContainerId, PodStatus) {
        let pod = pod("u1", &["a"]);
        let sandbox = self.sandbox(&pod, 0).await;
        let id = self.start(&pod, "a", 0, &sandbox).await;
        let (uid, name, namespace) = (pod.uid(), pod.name(), pod.namespace());
        let status = self.cri.pod_status(&uid, name, namespace).await.unwrap();
        (pod, id, status)
    }

    /// Texts of the events `FailedKillPod`.
    fn failures(&self) -> Vec<String> {
        let mut events = self.recorder.events();
        events.retain(|event| event.reason == "FailedKillPod");
        events.into_iter().map(|event| event.message).collect()
    }
}

const GRACE: Duration = Duration::from_secs(5);

#[tokio::test(start_paused = true)]
async fn a_container_that_cannot_be_stopped_is_told_while_its_sandbox_is_being_stopped() {
    let world = world();
    let (pod, _, status) = world.one_container().await;
    let no = Fault::Error(Code::Internal, "no".to_owned());
    world.fake.fail_always("stop_container", no);
    world.fake.fail_once("stop_podsandbox", Fault::Hang);
    let kill = world.kill(Some(&pod), &status, GRACE);
    let kill = tokio::time::timeout(Duration::from_secs(1), kill).await;
    assert!(kill.is_err(), "the sandbox is not stopped yet");
    let said = world.failures();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].starts_with("error killing pod: stop container a of pod ns/p-u1"),
        "{said:?}"
    );
    // The same again says nothing new.
    world.kill(Some(&pod), &status, GRACE).await.unwrap_err();
    assert_eq!(world.failures().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stop_without_an_answer_is_warned_about_and_seldom_again() {
    let world = world();
    let (pod, _, status) = world.one_container().await;
    world.fake.fail_once("stop_container", Fault::Hang);
    let mut kill = std::pin::pin!(world.kill(Some(&pod), &status, GRACE));
    let seconds = |s| Duration::from_secs(s);
    assert!(tokio::time::timeout(seconds(14), &mut kill).await.is_err());
    assert!(world.failures().is_empty(), "it is not late yet");
    assert!(tokio::time::timeout(seconds(2), &mut kill).await.is_err());
    let text = "error killing pod: container a has not stopped: no answer from the container runtime for 15 s";
    assert_eq!(world.failures(), [text]);
    assert!(tokio::time::timeout(seconds(58), &mut kill).await.is_err());
    assert_eq!(world.failures().len(), 1, "once a minute at most");
    assert!(tokio::time::timeout(seconds(2), &mut kill).await.is_err());
    let said = world.failures();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[1].ends_with("for 75 s"), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn streams_end_soon_after_the_grace_period_of_a_container_that_does_not_stop() {
    let world = world();
    let (pod, id, status) = world.one_container().await;
    let stream = world.cri.open_streams().open(&id);
    let other = world.cri.open_streams().open(&ContainerId::new("other"));
    world.fake.fail_once("stop_container", Fault::Hang);
    let begun = tokio::time::Instant::now();
    tokio::select! {
        killed = world.kill(Some(&pod), &status, GRACE) => panic!("{killed:?}"),
        () = other.cut() => panic!("nobody stops it"),
        until = stream.closing() => assert_eq!(until, Until::Now),
    }
    assert_eq!(begun.elapsed().as_secs(), 8);
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_container_that_has_stopped_may_be_delivered() {
    let world = world();
    let (pod, id, status) = world.one_container().await;
    let streams = world.cri.open_streams();
    let open = [&id, &status.sandboxes[0].id].map(|id| streams.open(id));
    world.kill(Some(&pod), &status, GRACE).await.unwrap();
    for stream in open {
        assert_eq!(stream.closing().await, Until::Delivered);
    }
    assert!(world.failures().is_empty());
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
    let permit = world
        .store
        .commit_stop(StopDecision::unrecorded_leftovers())
        .await
        .unwrap();
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
    let permit = world
        .store
        .commit_stop(StopDecision::unrecorded_leftovers())
        .await
        .unwrap();
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

#[tokio::test]
async fn a_container_whose_records_changed_is_inspected_again_before_its_removal() {
    let mut world = world();
    let faults = Faults::new();
    let store = Store::start(
        Box::new(FaultyBackend::new(MemoryBackend::new(), faults.clone())),
        Loaded::default(),
        StoreOptions::default(),
        Arc::clone(&world.clock),
        Metrics::default(),
    );
    world.store = store.unwrap();
    let pod = pod("u1", &["a"]);
    let sandbox = world.sandbox(&pod, 0).await;
    let id = world.start(&pod, "a", 0, &sandbox).await;
    // It was inspected before it started.
    let mut inspected = world.status(&pod).await;
    inspected.containers[0].state = ContainerState::Created;

    // Its record changes after the removal was decided.
    let key = child_key(&pod.uid(), "a");
    let seen = world.store.snapshot();
    let mut record = seen.record::<ContainerRecord>(&key).unwrap().clone();
    record.hooks_done.push(format!("{id}/post-start"));
    faults.set_hang(true);
    let other = (world.store).submit(Transaction::new().put(&key, record.clone()));
    let hanging = faults.clone();
    tokio::task::spawn_blocking(move || hanging.wait_until_hanging())
        .await
        .unwrap();
    let remover = world.remover();
    let removal = remover.container(&inspected, &id);
    let (removed, ()) = tokio::join!(removal, async { faults.set_hang(false) });
    assert!(matches!(removed, Err(GcError::InUse { .. })), "{removed:?}");
    other.wait().await.unwrap();
    assert_eq!(world.fake.running("p-u1", "a").len(), 1);
    let seen = world.store.snapshot();
    assert_eq!(seen.record::<ContainerRecord>(&key), Some(&record));
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

/// A pod with sidecars `s1` and `s2`, in this order, and the main containers `m1` and `m2`.
fn with_sidecars() -> Pod {
    let container =
        |name: &str| json!({"name": name, "image": IMAGE, "command": ["sleep", "3600"]});
    let sidecar = |name: &str| {
        let mut sidecar = container(name);
        sidecar["restartPolicy"] = "Always".into();
        sidecar
    };
    serde_json::from_value(json!({
        "metadata": {"name": "p-u1", "namespace": "ns", "uid": "u1"},
        "spec": {
            "initContainers": [sidecar("s1"), sidecar("s2")],
            "containers": [container("m1"), container("m2")],
        },
    }))
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn sidecars_are_stopped_after_the_main_containers_the_last_one_first() {
    let world = world();
    world.fake.on_start(|config| {
        let seconds = match config.metadata.as_ref().unwrap().name.as_str() {
            "m1" => 3,
            "s2" => 2,
            _ => 1,
        };
        Behaviour::SlowTerm(Duration::from_secs(seconds))
    });
    let pod = with_sidecars();
    let sandbox = world.sandbox(&pod, 0).await;
    for name in ["s1", "s2", "m1", "m2"] {
        world.start(&pod, name, 0, &sandbox).await;
    }
    let status = world.status(&pod).await;
    let stops = world.stops(&pod);
    world
        .kill(Some(&pod), &status, Duration::from_secs(30))
        .await
        .unwrap();
    let want = [("m1", 0), ("m2", 0), ("s2", 3), ("s1", 5)];
    let want: BTreeMap<_, _> = want.map(|(n, s)| (n.to_owned(), s)).into();
    assert_eq!(*stops.lock().unwrap(), want);
    let paths: BTreeSet<_> = world
        .recorder
        .events()
        .iter()
        .filter_map(|e| e.field_path())
        .collect();
    let want = [
        "spec.containers{m1}",
        "spec.containers{m2}",
        "spec.initContainers{s1}",
        "spec.initContainers{s2}",
    ];
    assert_eq!(paths, want.map(str::to_owned).into());
}

#[tokio::test(start_paused = true)]
async fn a_sidecar_waits_no_longer_than_the_grace_period() {
    let world = world();
    world.fake.on_start(|_| Behaviour::IgnoreTerm);
    let pod = with_sidecars();
    let sandbox = world.sandbox(&pod, 0).await;
    for name in ["s1", "m1"] {
        world.start(&pod, name, 0, &sandbox).await;
    }
    let status = world.status(&pod).await;
    let stops = world.stops(&pod);
    let begun = tokio::time::Instant::now();
    world
        .kill(Some(&pod), &status, Duration::from_secs(5))
        .await
        .unwrap();
    assert_eq!(stops.lock().unwrap()["s1"], 5);
    // It still gets the two seconds that every container gets.
    assert_eq!(begun.elapsed().as_secs(), 7);
}

fn with_pre_stop() -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p-u1", "namespace": "ns", "uid": "u1"},
        "spec": {"containers": [{
            "name": "a", "image": IMAGE, "command": ["sleep", "3600"],
            "lifecycle": {"preStop": {"exec": {"command": ["drain"]}}},
        }]},
    }))
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_pre_stop_hook_takes_its_time_from_the_grace_period_and_runs_once() {
    // How long the hook takes, how long the container lives that ignores its stop signal. One that has used up the
    // grace period goes on for the two seconds that the container still gets.
    for (takes, lives, done) in [(4, 10, true), (11, 12, true), (3600, 12, false)] {
        let world = world();
        world.fake.on_start(|_| Behaviour::IgnoreTerm);
        world.fake.on_exec(move |_, command| {
            assert_eq!(command, ["drain"]);
            ExecResult {
                takes: Duration::from_secs(takes),
                ..Default::default()
            }
        });
        let pod = with_pre_stop();
        let sandbox = world.sandbox(&pod, 0).await;
        let id = world.start(&pod, "a", 0, &sandbox).await;
        let status = world.status(&pod).await;
        let begun = tokio::time::Instant::now();
        let grace = Duration::from_secs(10);
        world.kill(Some(&pod), &status, grace).await.unwrap();
        assert_eq!(begun.elapsed().as_secs(), lives, "hook of {takes} s");
        let key = child_key(&pod.uid(), "a");
        let state = world.store.snapshot();
        let hooks = &state.record::<ContainerRecord>(&key).unwrap().hooks_done;
        assert_eq!(hooks.contains(&format!("{id}/preStop")), done);
        let events = world.recorder.events();
        let failed = events.iter().filter(|e| e.reason == "FailedPreStopHook");
        assert_eq!(failed.count(), usize::from(!done), "hook of {takes} s");
        // As after a restart of the agent that knows nothing of the stop.
        world.kill(Some(&pod), &status, grace).await.unwrap();
        let times = if done { 1 } else { 2 };
        assert_eq!(world.fake.count("exec_sync"), times, "hook of {takes} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_pre_stop_hook_is_told_and_stops_nothing() {
    let world = world();
    world.fake.on_exec(|_, _| ExecResult {
        code: 3,
        stdout: "secret".to_owned(),
        ..Default::default()
    });
    let pod = with_pre_stop();
    let sandbox = world.sandbox(&pod, 0).await;
    world.start(&pod, "a", 0, &sandbox).await;
    let status = world.status(&pod).await;
    let grace = Duration::from_secs(10);
    world.kill(Some(&pod), &status, grace).await.unwrap();
    assert!(world.fake.running("p-u1", "a").is_empty());
    let events = world.recorder.events();
    let failed: Vec<_> = events
        .iter()
        .filter(|e| e.reason == "FailedPreStopHook")
        .map(|e| e.message.as_str())
        .collect();
    assert_eq!(failed, ["PreStopHook failed"]);
    let state = world.store.snapshot();
    let told = state.journal.values();
    let told: Vec<_> = told.map(|v| v.record.why.clone()).collect();
    assert!(
        told.iter().any(|why| why.contains("exited with 3")),
        "{told:?}"
    );
    assert!(!told.iter().any(|why| why.contains("secret")), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn no_hook_runs_without_grace_and_that_of_an_orphan_comes_from_its_annotations() {
    for (known, grace, hooks) in [(true, 0, 0), (false, 1, 1)] {
        let world = world();
        let pod = with_pre_stop();
        let sandbox = world.sandbox(&pod, 0).await;
        world.start(&pod, "a", 0, &sandbox).await;
        let status = world.status(&pod).await;
        world.fake.on_exec(|_, _| ExecResult::default());
        world
            .kill(known.then_some(&pod), &status, Duration::from_secs(grace))
            .await
            .unwrap();
        assert_eq!(world.fake.count("exec_sync"), hooks, "known: {known}");
        assert!(world.fake.running("p-u1", "a").is_empty());
    }
}

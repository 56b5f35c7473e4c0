//! Probes against a runtime that runs nothing, on paused time; handlers against real sockets in `handlers`.

mod handlers;
mod https;

use std::collections::BTreeMap;
use std::sync::Mutex as StdMutex;
use std::time::Duration;

use holdfast_testkit::fake_cri::{ExecResult, FakeCri, Fault};
use k8s_cri::v1;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;
use crate::core::state::{ProbeRecord, Table as StoreTable, Transaction};
use crate::kuberuntime::cri::CriTimeouts;
use crate::store::StartIntent;
use crate::types::events::MemoryRecorder;
use crate::types::host_addresses::HostAddresses;
use crate::types::probe::{self, ProbeReceivers};
use crate::types::runtime::{ContainerState, ContainerStatus};
use crate::types::{BootId, ContainerId, Event};

/// A clock that the runtime's paused time moves.
#[derive(Clone)]
struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Stamp {
        let ms = 1_000_000 + i64::try_from(self.0.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

/// Results of commands by their first word, and the times of their runs.
#[derive(Clone, Default)]
struct Script {
    codes: Arc<StdMutex<BTreeMap<String, (i32, Duration)>>>,
    runs: Arc<StdMutex<Vec<(String, Instant)>>>,
}

impl Script {
    fn set(&self, command: &str, code: i32) {
        self.slow(command, code, Duration::ZERO);
    }

    fn slow(&self, command: &str, code: i32, takes: Duration) {
        let mut codes = self.codes.lock().unwrap();
        codes.insert(command.to_owned(), (code, takes));
    }

    fn runs(&self, command: &str) -> usize {
        let runs = self.runs.lock().unwrap();
        runs.iter().filter(|(name, _)| name == command).count()
    }

    fn exec(&self, command: &[String]) -> ExecResult {
        let name = command.first().cloned().unwrap_or_default();
        let codes = self.codes.lock().unwrap();
        let (code, takes) = codes.get(&name).copied().unwrap_or_default();
        let mut runs = self.runs.lock().unwrap();
        runs.push((name, Instant::now()));
        ExecResult {
            code,
            stdout: format!("said {code}"),
            takes,
            ..ExecResult::default()
        }
    }
}

struct World {
    fake: FakeCri,
    script: Script,
    cri: CriClient,
    clock: TokioClock,
    store: Store,
    recorder: MemoryRecorder,
    metrics: Metrics,
    sandbox: ContainerId,
    attempts: u32,
    life: Option<(Prober, CancellationToken, JoinHandle<()>)>,
    results: ProbeReceivers,
}

impl World {
    async fn new() -> Self {
        let fake = FakeCri::new();
        fake.add_image("img");
        let script = Script::default();
        let scripted = script.clone();
        fake.on_exec(move |_, command| scripted.exec(command));
        let timeouts = CriTimeouts::default();
        let cri = CriClient::over(fake.channel(), "unix:///fake", timeouts, Metrics::default());
        let clock = TokioClock(Instant::now());
        let sandbox = cri.run_pod_sandbox(v1::PodSandboxConfig::default(), "");
        let sandbox = sandbox.await.unwrap();
        let mut world = Self {
            fake,
            script,
            cri,
            store: Store::in_memory(Arc::new(clock.clone())),
            clock,
            recorder: MemoryRecorder::default(),
            metrics: Metrics::default(),
            sandbox,
            attempts: 0,
            life: None,
            results: probe::channels().1,
        };
        world.start();
        world
    }

    /// A new run of the agent.
    fn start(&mut self) {
        let (results, receivers) = probe::channels();
        self.results = receivers;
        let prober = Prober::new(ProberContext {
            store: self.store.clone(),
            clock: Arc::new(self.clock.clone()),
            cri: self.cri.clone(),
            recorder: Arc::new(self.recorder.clone()),
            metrics: self.metrics.clone(),
            results,
            addresses: HostAddresses::fixed(vec![std::net::Ipv4Addr::LOCALHOST.into()]),
        });
        let token = CancellationToken::new();
        let task = tokio::spawn(prober.clone().run(token.clone()));
        self.life = Some((prober, token, task));
    }

    /// As SIGKILL ends it.
    fn kill(&mut self) {
        let (_, _, task) = self.life.take().unwrap();
        task.abort();
    }

    fn prober(&self) -> &Prober {
        &self.life.as_ref().unwrap().0
    }

    /// A running container of the runtime.
    async fn container(&mut self, name: &str) -> ContainerStatus {
        self.attempts += 1;
        let config = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata {
                name: name.to_owned(),
                attempt: self.attempts,
            }),
            image: Some(v1::ImageSpec {
                image: "img".to_owned(),
                ..Default::default()
            }),
            command: vec!["sleep".to_owned(), "100000000".to_owned()],
            ..Default::default()
        };
        let sandbox = v1::PodSandboxConfig::default();
        let id = self.cri.create_container(&self.sandbox, config, sandbox);
        let id = id.await.unwrap();
        let intent = StartIntent {
            pod: PodUid::new("elsewhere"),
            container: name.to_owned(),
            container_id: id.clone(),
            attempt: 0,
            hash: String::new(),
            why: String::new(),
            at: self.clock.now(),
        };
        let intent = self.store.commit_intent(intent, Transaction::new()).await;
        self.cri.start_container(&intent.unwrap()).await.unwrap();
        ContainerStatus {
            id,
            name: name.to_owned(),
            attempt: self.attempts,
            sandbox_id: self.sandbox.clone(),
            state: ContainerState::Running,
            created_at_ns: 1,
            image: String::new(),
            image_ref: String::new(),
            hash: String::new(),
            started_at_ns: self.clock.now().wall_ms * 1_000_000,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            user: None,
        }
    }

    fn record(&self, key: &str) -> Option<ProbeRecord> {
        self.store.snapshot().record::<ProbeRecord>(key).cloned()
    }

    fn events(&self, reason: &str) -> Vec<Event> {
        let mut events = self.recorder.events();
        events.retain(|e| e.reason == reason);
        events
    }
}

/// A pod whose one container has these probes.
fn pod(uid: &str, probes: Value) -> Arc<Pod> {
    let mut container = json!({"name": "c", "image": "img"});
    for (kind, probe) in probes.as_object().unwrap() {
        container[kind.as_str()] = probe.clone();
    }
    let pod = json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {"containers": [container]},
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn exec(command: &str) -> Value {
    json!({"exec": {"command": [command]}})
}

fn status(pod: &Pod, containers: &[&ContainerStatus]) -> PodStatus {
    let mut status = PodStatus::empty(pod.uid());
    status.ips = vec!["127.0.0.1".to_owned()];
    status.containers = containers.iter().map(|c| (*c).clone()).collect();
    status
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

fn ready(world: &World, pod: &Pod, status: &PodStatus) -> Option<bool> {
    world
        .prober()
        .views(pod, status)
        .get("c")
        .and_then(|v| v.ready)
}

#[tokio::test(start_paused = true)]
async fn readiness_follows_the_probe_with_its_thresholds() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod("u1", json!({"readinessProbe": exec("r")}));
    let status = status(&pod, &[&container]);
    world.prober().observe(&pod, &status, None);
    assert_eq!(
        ready(&world, &pod, &status),
        Some(false),
        "before any probe"
    );
    seconds(1).await;
    assert_eq!(ready(&world, &pod, &status), Some(true));
    let update = world.results.readiness.try_recv().unwrap();
    assert!(update.success && update.container == container.id);

    world.script.set("r", 1);
    seconds(20).await;
    assert_eq!(ready(&world, &pod, &status), Some(true), "2 of 3 failures");
    seconds(10).await;
    assert_eq!(ready(&world, &pod, &status), Some(false));
    assert!(!world.results.readiness.try_recv().unwrap().success);
    assert!(world.results.readiness.try_recv().is_err(), "changes only");
    assert_eq!(world.prober().failures(&pod, &status).len(), 0);
    let events = world.events("Unhealthy");
    assert_eq!(events.len(), 3);
    assert_eq!(events[0].message, "Readiness probe failed: said 1");
    assert_eq!(events[0].container.as_deref(), Some("c"));
    // A status of another container says nothing, nor does one that does not run.
    let mut other = status.clone();
    other.containers[0].state = ContainerState::Exited;
    assert_eq!(ready(&world, &pod, &other), None);
    other.containers[0].state = ContainerState::Running;
    other.containers[0].id = ContainerId::new("other");
    assert_eq!(ready(&world, &pod, &other), None);
}

#[tokio::test(start_paused = true)]
async fn runs_that_are_due_at_about_the_same_time_are_made_together_and_keep_their_phases() {
    let mut world = World::new().await;
    for (uid, command, later) in [("u1", "a", 0), ("u2", "b", 30), ("u3", "c", 200)] {
        tokio::time::sleep(Duration::from_millis(later)).await;
        let container = world.container("c").await;
        let pod = pod(uid, json!({"readinessProbe": exec(command)}));
        let status = status(&pod, &[&container]);
        world.prober().observe(&pod, &status, None);
    }
    seconds(55).await;
    let runs = world.script.runs.lock().unwrap().clone();
    let times = |command: &str| -> Vec<u128> {
        let of = runs.iter().filter(|(name, _)| name == command);
        of.map(|(_, at)| (*at - runs[0].1).as_millis()).collect()
    };
    assert_eq!(times("a"), [0, 10_000, 20_000, 30_000, 40_000, 50_000]);
    // The first one has its delay, the others are no reason to wake up.
    assert_eq!(times("b"), [30, 10_000, 20_000, 30_000, 40_000, 50_000]);
    assert_eq!(times("c"), [230, 10_230, 20_230, 30_230, 40_230, 50_230]);
}

#[tokio::test(start_paused = true)]
async fn the_startup_probe_gates_the_others_and_then_ends() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let probes =
        json!({"startupProbe": exec("s"), "livenessProbe": exec("l"), "readinessProbe": exec("r")});
    let pod = pod("u1", probes);
    let status = status(&pod, &[&container]);
    world.script.set("s", 1);
    world.prober().observe(&pod, &status, None);
    seconds(15).await;
    let view = world.prober().views(&pod, &status)["c"];
    assert_eq!((view.started, view.ready), (None, Some(false)));
    assert_eq!((world.script.runs("l"), world.script.runs("r")), (0, 0));
    world.script.set("s", 0);
    // The third startup probe is due at 20 s; the others follow at once.
    seconds(6).await;
    let view = world.prober().views(&pod, &status)["c"];
    assert_eq!((view.started, view.ready), (Some(true), Some(true)));
    assert_eq!((world.script.runs("l"), world.script.runs("r")), (1, 1));
    assert!(world.results.startup.try_recv().unwrap().success);
    seconds(100).await;
    assert_eq!(world.script.runs("s"), 3, "started is started");
}

// Invariant POD-7.
#[tokio::test(start_paused = true)]
async fn a_liveness_failure_holds_until_the_container_is_another_one() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod("u1", json!({"livenessProbe": exec("l")}));
    let before = status(&pod, &[&container]);
    world.script.set("l", 1);
    world.prober().observe(&pod, &before, None);
    seconds(25).await;
    assert_eq!(
        world.prober().failures(&pod, &before).get("c"),
        Some(&ProbeFailure::Liveness)
    );
    assert!(!world.results.liveness.try_recv().unwrap().success);
    seconds(100).await;
    world.prober().observe(&pod, &before, None);
    seconds(100).await;
    assert_eq!(world.script.runs("l"), 3, "on hold");

    let next = world.container("c").await;
    let after = status(&pod, &[&next, &container]);
    assert!(world.prober().failures(&pod, &after).is_empty());
    world.prober().observe(&pod, &after, None);
    seconds(1).await;
    assert_eq!(world.script.runs("l"), 4);
    assert!(world.prober().failures(&pod, &after).is_empty());
}

#[tokio::test(start_paused = true)]
async fn counts_survive_a_restart_and_one_more_failure_decides() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod(
        "u1",
        json!({"livenessProbe": exec("l"), "readinessProbe": exec("r")}),
    );
    let status = status(&pod, &[&container]);
    world.script.set("l", 1);
    world.prober().observe(&pod, &status, None);
    seconds(13).await;
    assert_eq!(world.record("u1/c/Liveness").unwrap().consecutive, 2);
    world.kill();
    seconds(3).await;
    world.start();
    world.prober().observe(&pod, &status, None);
    assert_eq!(ready(&world, &pod, &status), Some(true), "as it was");
    assert!(world.prober().failures(&pod, &status).is_empty());
    seconds(3).await;
    assert_eq!(world.script.runs("l"), 2, "due at 20 s, not before");
    seconds(2).await;
    assert_eq!(world.script.runs("l"), 3);
    assert_eq!(world.prober().failures(&pod, &status).len(), 1);
    assert!(world.results.readiness.try_recv().is_err(), "nothing new");

    // Killed before the failure was acted on: it is sent again, and not probed again.
    world.kill();
    seconds(300).await;
    world.start();
    world.prober().observe(&pod, &status, None);
    seconds(60).await;
    assert!(!world.results.liveness.try_recv().unwrap().success);
    assert_eq!(world.prober().failures(&pod, &status).len(), 1);
    assert_eq!(world.script.runs("l"), 3);

    // The record is about that container; another one begins anew.
    world.kill();
    world.start();
    let next = world.container("c").await;
    let after = self::status(&pod, &[&next]);
    world.prober().observe(&pod, &after, None);
    assert!(world.prober().failures(&pod, &after).is_empty());
    assert_eq!(ready(&world, &pod, &after), Some(false));
}

#[tokio::test(start_paused = true)]
async fn counts_that_were_not_continued_for_two_periods_start_over() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod("u1", json!({"livenessProbe": exec("l")}));
    let status = status(&pod, &[&container]);
    world.script.set("l", 1);
    world.prober().observe(&pod, &status, None);
    seconds(13).await;
    world.kill();
    seconds(30).await;
    world.start();
    world.prober().observe(&pod, &status, None);
    seconds(20).await;
    assert_eq!(world.script.runs("l"), 4);
    assert!(world.prober().failures(&pod, &status).is_empty(), "2 of 3");
    seconds(10).await;
    assert_eq!(world.prober().failures(&pod, &status).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_restart_causes_no_burst() {
    for recorded in [true, false] {
        let mut world = World::new().await;
        let container = world.container("c").await;
        let pods: Vec<_> = (0..60)
            .map(|n| pod(&format!("u{n}"), json!({"readinessProbe": exec("r")})))
            .collect();
        let statuses: Vec<_> = pods.iter().map(|pod| status(pod, &[&container])).collect();
        if recorded {
            for (pod, status) in pods.iter().zip(&statuses) {
                world.prober().observe(pod, status, None);
                tokio::time::sleep(Duration::from_millis(170)).await;
            }
        }
        seconds(100).await;
        world.kill();
        seconds(33).await;
        world.script.runs.lock().unwrap().clear();
        world.start();
        let start = Instant::now();
        for (pod, status) in pods.iter().zip(&statuses) {
            world.prober().observe(pod, status, None);
        }
        tokio::time::sleep(Duration::from_millis(10_100)).await;
        let runs = world.script.runs.lock().unwrap().clone();
        assert!((60..=64).contains(&runs.len()), "{}: each once", runs.len());
        let mut each_second = [0; 11];
        for (_, at) in runs {
            let second = usize::try_from((at - start).as_secs()).unwrap();
            each_second[second] += 1;
        }
        assert!(each_second.iter().all(|n| *n <= 15), "{each_second:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_records_a_container_stays_as_it_was_told_to_be() {
    // By the status on record, or by the one the API server shows when the store was lost.
    for shown in [false, true] {
        let mut world = World::new().await;
        let container = world.container("c").await;
        world.kill();
        seconds(60).await;
        world.start();
        let pod = pod(
            "u1",
            json!({"readinessProbe": exec("r"), "startupProbe": exec("s")}),
        );
        let status = status(&pod, &[&container]);
        let told: ApiPodStatus = serde_json::from_value(json!({"containerStatuses": [{
            "name": "c", "image": "", "imageID": "", "restartCount": 0,
            "containerID": format!("containerd://{}", container.id), "ready": true, "started": true,
        }]}))
        .unwrap();
        if shown {
            let mut pod = (*pod).clone();
            pod.status = Some(told);
            world.prober().observe(&Arc::new(pod), &status, None);
        } else {
            world.prober().observe(&pod, &status, Some(&told));
        }
        let view = world.prober().views(&pod, &status)["c"];
        assert_eq!((view.ready, view.started), (Some(true), Some(true)));
        world.script.set("r", 1);
        seconds(40).await;
        assert_eq!(world.script.runs("s"), 0);
        assert_eq!(ready(&world, &pod, &status), Some(false));
    }
}

#[tokio::test(start_paused = true)]
async fn termination_stops_liveness_and_startup_and_removal_stops_all() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod(
        "u1",
        json!({"livenessProbe": exec("l"), "readinessProbe": exec("r")}),
    );
    let status = status(&pod, &[&container]);
    world.prober().observe(&pod, &status, None);
    seconds(1).await;
    world.script.set("l", 1);
    world.prober().stop_liveness_and_startup(&pod.uid());
    world.prober().observe(&pod, &status, None);
    seconds(50).await;
    assert_eq!((world.script.runs("l"), world.script.runs("r")), (1, 6));
    assert!(world.prober().failures(&pod, &status).is_empty());
    assert_eq!(ready(&world, &pod, &status), Some(true));
    let text = world.metrics.encode_probes().unwrap();
    let series = "prober_probe_total{probe_type=\"Readiness\",result=\"successful\",container=\"c\",pod=\"u1\",namespace=\"ns\",pod_uid=\"u1\"} 6";
    assert!(text.contains(series), "{text}");
    assert!(
        text.contains("prober_probe_duration_seconds_count"),
        "{text}"
    );
    assert!(world.record("u1/c/Readiness").is_some());

    world.prober().remove_pod(&pod.uid());
    seconds(50).await;
    assert_eq!(world.script.runs("r"), 6);
    assert_eq!(world.record("u1/c/Readiness"), None);
    assert_eq!(ready(&world, &pod, &status), None);
    assert!(
        !world
            .metrics
            .encode_probes()
            .unwrap()
            .contains("pod_uid=\"u1\"")
    );
}

#[tokio::test(start_paused = true)]
async fn results_that_find_no_room_wait_and_stop_nobody() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pods: Vec<_> = (0..50)
        .map(|n| {
            pod(
                &format!("u{n}"),
                json!({"livenessProbe": exec("l"), "readinessProbe": exec("r")}),
            )
        })
        .collect();
    world.script.set("l", 1);
    for pod in &pods {
        let status = status(pod, &[&container]);
        world.prober().observe(pod, &status, None);
    }
    seconds(65).await;
    assert_eq!(world.script.runs("r"), 50 * 7, "probing goes on");
    let mut failed = std::collections::HashSet::new();
    while let Ok(Some(update)) =
        tokio::time::timeout(Duration::from_secs(1), world.results.liveness.recv()).await
    {
        assert!(!update.success);
        assert!(failed.insert(update.pod.clone()), "{} twice", update.pod);
    }
    assert_eq!(failed.len(), 50);
}

#[tokio::test(start_paused = true)]
async fn a_slow_probe_delays_no_other_and_is_under_way_once() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let mut slow = exec("slow");
    slow["timeoutSeconds"] = json!(3600);
    slow["periodSeconds"] = json!(1);
    // As many as there are turns but one.
    for n in 1..run::EXEC_LIMIT {
        let pod = pod(&format!("s{n}"), json!({"readinessProbe": slow.clone()}));
        let status = status(&pod, &[&container]);
        world.prober().observe(&pod, &status, None);
    }
    world.script.slow("slow", 0, Duration::from_secs(1000));
    let quick = pod("u1", json!({"readinessProbe": exec("quick")}));
    let quick_status = status(&quick, &[&container]);
    world.prober().observe(&quick, &quick_status, None);
    seconds(95).await;
    assert_eq!(world.script.runs("slow"), run::EXEC_LIMIT - 1);
    assert_eq!(world.script.runs("quick"), 10);
    // One more than there are turns: everybody gets one in the end.
    let last = pod("s0", json!({"readinessProbe": slow.clone()}));
    let last_status = status(&last, &[&container]);
    world.prober().observe(&last, &last_status, None);
    seconds(3000).await;
    assert_eq!(ready(&world, &quick, &quick_status), Some(true));
    assert_eq!(ready(&world, &last, &last_status), Some(true));
}

/// Two hundred of ten pods, of one pod, of two hundred pods; commands that hang.
#[tokio::test(start_paused = true)]
async fn two_hundred_probes_that_hang_keep_no_other_pod_waiting_for_longer_than_a_period() {
    for (pods, each) in [(10, 20), (1, 200), (200, 1)] {
        let mut world = World::new().await;
        let container = world.container("c").await;
        world.script.slow("hangs", 0, Duration::from_secs(100_000));
        let hanging = json!({"exec": {"command": ["hangs"]}, "timeoutSeconds": 3600});
        for n in 0..pods {
            let containers: Vec<_> = (0..each)
                .map(|c| json!({"name": format!("c{c}"), "readinessProbe": hanging}))
                .collect();
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": format!("h{n}"), "namespace": "ns", "uid": format!("h{n}")},
                "spec": {"containers": containers},
            }))
            .unwrap();
            let mut status = PodStatus::empty(pod.uid());
            status.containers = (0..each)
                .map(|c| ContainerStatus {
                    name: format!("c{c}"),
                    ..container.clone()
                })
                .collect();
            world.prober().observe(&Arc::new(pod), &status, None);
        }
        seconds(1).await;
        let quick = pod("quick", json!({"readinessProbe": exec("quick")}));
        let quick_status = status(&quick, &[&container]);
        let asked = Instant::now();
        world.prober().observe(&quick, &quick_status, None);
        seconds(300).await;
        let runs = world.script.runs.lock().unwrap().clone();
        let runs: Vec<_> = runs
            .into_iter()
            .filter(|(name, _)| name == "quick")
            .collect();
        assert_eq!(ready(&world, &quick, &quick_status), Some(true));
        assert!((29..=31).contains(&runs.len()), "{}: {pods}", runs.len());
        for (n, (_, at)) in runs.iter().enumerate() {
            let due = asked + Duration::from_secs(10) * u32::try_from(n).unwrap();
            let late = at.saturating_duration_since(due);
            assert!(late <= Duration::from_secs(10), "run {n} is {late:?} late");
        }
        let at_once = world.fake.count("exec_sync") - runs.len();
        let bound = run::EXEC_LIMIT + pods * run::EXEC_SHARE;
        // Each that was called off has begun once.
        assert!(at_once <= 200 + bound, "{at_once}");
        world.kill();
    }
}

#[tokio::test(start_paused = true)]
async fn slow_probes_of_a_pod_wait_for_each_other_and_all_of_them_come_to_their_end() {
    let mut world = World::new().await;
    let mut containers = Vec::new();
    for n in 0..10 {
        containers.push(world.container(&format!("c{n}")).await);
    }
    world.script.slow("slow", 0, Duration::from_secs(20));
    let spec: Vec<_> = containers
        .iter()
        .map(|c| {
            json!({"name": c.name, "readinessProbe": {
                "exec": {"command": ["slow"]}, "timeoutSeconds": 30, "periodSeconds": 600,
            }, "livenessProbe": {"exec": {"command": ["quick"]}}})
        })
        .collect();
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u1"},
        "spec": {"containers": spec},
    }))
    .unwrap();
    let pod = Arc::new(pod);
    let containers: Vec<_> = containers.iter().collect();
    let status = status(&pod, &containers);
    world.prober().observe(&pod, &status, None);
    // Four at a time, 20 s each.
    seconds(19).await;
    assert_eq!(world.script.runs("quick"), 20, "its quick ones do not wait");
    seconds(45).await;
    let views = world.prober().views(&pod, &status);
    assert_eq!(views.len(), 10);
    assert!(
        views.values().all(|view| view.ready == Some(true)),
        "{views:?}"
    );
    assert!(world.events("Unhealthy").is_empty());

    // A pod that goes leaves nothing that runs or waits.
    seconds(560).await;
    world.prober().remove_pod(&pod.uid());
    let begun = world.script.runs("slow");
    seconds(600).await;
    assert_eq!(world.script.runs("slow"), begun);
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_cannot_be_made_is_tried_three_times_and_counts_for_nothing() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod(
        "u1",
        json!({"livenessProbe": exec("l"), "readinessProbe": exec("r")}),
    );
    let status = status(&pod, &[&container]);
    world.prober().observe(&pod, &status, None);
    seconds(1).await;
    let fault = Fault::Error(tonic::Code::Unknown, "the shim is gone".to_owned());
    world.fake.fail_always("exec_sync", fault);
    world.fake.clear_calls();
    seconds(50).await;
    assert_eq!(world.fake.count("exec_sync"), 2 * 5 * 3);
    assert_eq!(ready(&world, &pod, &status), Some(true));
    assert!(world.prober().failures(&pod, &status).is_empty());
    let events = world.events("Unhealthy");
    assert_eq!(events.len(), 10);
    assert!(
        events[0].message.contains("probe errored: exec_sync")
            && events[0].message.contains("the shim is gone"),
        "{}",
        events[0].message
    );
    let text = world.metrics.encode_probes().unwrap();
    assert!(
        text.contains("probe_type=\"Liveness\",result=\"unknown\""),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_command_that_takes_too_long_is_a_failure() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod("u1", json!({"livenessProbe": exec("l")}));
    let status = status(&pod, &[&container]);
    world.script.slow("l", 0, Duration::from_secs(5));
    world.prober().observe(&pod, &status, None);
    seconds(23).await;
    assert_eq!(world.prober().failures(&pod, &status).len(), 1);
    let events = world.events("Unhealthy");
    assert_eq!(
        events[0].message,
        "Liveness probe failed: command timed out: \"l\" timed out after 1s"
    );
}

#[tokio::test(start_paused = true)]
async fn a_command_that_never_ends_fails_unless_the_runtime_is_away() {
    for away in [false, true] {
        let mut world = World::new().await;
        let container = world.container("c").await;
        let pod = pod("u1", json!({"livenessProbe": exec("l")}));
        let status = status(&pod, &[&container]);
        world.fake.fail_always("exec_sync", Fault::Hang);
        if away {
            world.fake.fail_always("container_status", Fault::Hang);
        }
        world.prober().observe(&pod, &status, None);
        seconds(120).await;
        let failed = world.prober().failures(&pod, &status).len();
        assert_eq!(failed, usize::from(!away));
        // It is not made again at once.
        assert!(world.fake.count("exec_sync") <= 4);
        let events = world.events("Unhealthy");
        let wanted = if away {
            "the runtime does not answer"
        } else {
            "command timed out"
        };
        assert!(events[0].message.contains(wanted), "{events:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_container_that_runs_is_probed_though_the_clock_was_set_back() {
    let mut world = World::new().await;
    let mut former = world.container("c").await;
    former.state = ContainerState::Exited;
    former.created_at_ns = 9_000;
    let container = world.container("c").await;
    let pod = pod("u1", json!({"readinessProbe": exec("r")}));
    let mut status = status(&pod, &[&former, &container]);
    status.sort();
    world.prober().observe(&pod, &status, None);
    seconds(15).await;
    assert!(world.script.runs("r") > 0);
    assert_eq!(ready(&world, &pod, &status), Some(true));
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_only_confirms_writes_nothing() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let pod = pod(
        "u1",
        json!({"readinessProbe": exec("r"), "livenessProbe": exec("l")}),
    );
    let status = status(&pod, &[&container]);
    world.prober().observe(&pod, &status, None);
    seconds(1).await;
    let version = |key| world.store.snapshot().version_of(StoreTable::Probes, key);
    let before = (version("u1/c/Readiness"), version("u1/c/Liveness"));
    assert!(before.0.is_some() && before.1.is_some());
    seconds(300).await;
    assert_eq!(world.script.runs("r"), 31);
    let after = (version("u1/c/Readiness"), version("u1/c/Liveness"));
    assert_eq!(after, before);
}

#[tokio::test(start_paused = true)]
async fn sidecars_are_probed_and_other_init_containers_are_not() {
    let mut world = World::new().await;
    let (side, init) = (world.container("side").await, world.container("init").await);
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u1"},
        "spec": {
            "initContainers": [
                {"name": "side", "restartPolicy": "Always", "startupProbe": exec("s")},
                {"name": "init", "startupProbe": exec("i")},
            ],
            "containers": [{"name": "c"}],
        },
    }))
    .unwrap();
    let pod = Arc::new(pod);
    let status = status(&pod, &[&init, &side]);
    world.prober().observe(&pod, &status, None);
    seconds(20).await;
    assert_eq!((world.script.runs("s"), world.script.runs("i")), (1, 0));
    let views = world.prober().views(&pod, &status);
    assert_eq!(views.len(), 1);
    assert_eq!(views["side"].started, Some(true));
}

#[tokio::test(start_paused = true)]
async fn the_initial_delay_passes_first_and_a_stopped_container_is_not_probed() {
    let mut world = World::new().await;
    let container = world.container("c").await;
    let mut probe = exec("r");
    probe["initialDelaySeconds"] = json!(30);
    let pod = pod("u1", json!({"readinessProbe": probe}));
    let running = status(&pod, &[&container]);
    seconds(10).await;
    world.prober().observe(&pod, &running, None);
    seconds(19).await;
    assert_eq!(world.script.runs("r"), 0);
    seconds(2).await;
    assert_eq!(world.script.runs("r"), 1);
    let mut stopped = running.clone();
    stopped.containers[0].state = ContainerState::Exited;
    world.prober().observe(&pod, &stopped, None);
    seconds(60).await;
    assert_eq!(world.script.runs("r"), 1);
}

#[test]
fn messages_are_cut_between_characters() {
    assert_eq!(run::truncated("aé".to_owned(), 2), "a");
    assert_eq!(run::truncated("aé".to_owned(), 3), "aé");
    assert_eq!(run::truncated("x".repeat(5000), 1024).len(), 1024);
}

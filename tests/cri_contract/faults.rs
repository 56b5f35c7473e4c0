//! What only a runtime with faults can show.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use holdfast::kuberuntime::cri::{ContainerEventKind, CriClient, CriErrorKind, CriTimeouts, v1};
use holdfast::kuberuntime::labels;
use holdfast::store::{StopDecision, StopPermit, Store};
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, ContainerId, PodUid, SystemClock};
use holdfast_testkit::fake_cri::{Behaviour, FakeCri, Fault, Pull, Restart};
use tokio::time::Instant;
use tonic::Code;

use super::world::start_intent;

const IMAGE: &str = "image:1";

/// A client without a socket in between, so that a paused clock can be trusted.
struct Sim {
    fake: FakeCri,
    cri: CriClient,
    metrics: Metrics,
    store: Store,
    clock: SystemClock,
}

impl Sim {
    fn new() -> Self {
        let fake = FakeCri::new();
        fake.add_image(IMAGE);
        let metrics = Metrics::default();
        let clock = SystemClock::new(BootId(1));
        Self {
            cri: CriClient::over(
                fake.channel(),
                "unix:///sim",
                CriTimeouts::default(),
                metrics.clone(),
            ),
            metrics,
            fake,
            store: Store::in_memory(Arc::new(clock)),
            clock,
        }
    }

    async fn permit(&self) -> StopPermit {
        let decision = StopDecision::unrecorded_leftovers();
        self.store.commit_stop(decision).await.unwrap()
    }

    async fn created(&self) -> ContainerId {
        let sandbox = self.cri.run_pod_sandbox(sandbox("a"), "").await.unwrap();
        self.cri
            .create_container(&sandbox, container(), sandbox_config())
            .await
            .unwrap()
    }

    async fn start(&self, id: &ContainerId) -> Result<(), holdfast::kuberuntime::cri::CriError> {
        let intent = start_intent(&self.store, &self.clock, &PodUid::from("a"), id).await;
        self.cri.start_container(&intent).await
    }
}

fn sandbox_config() -> v1::PodSandboxConfig {
    sandbox("a")
}

fn sandbox(uid: &str) -> v1::PodSandboxConfig {
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: uid.to_owned(),
            uid: uid.to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        labels: HashMap::from([(labels::POD_UID.to_owned(), uid.to_owned())]),
        ..Default::default()
    }
}

fn container() -> v1::ContainerConfig {
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: "main".to_owned(),
            attempt: 0,
        }),
        image: Some(v1::ImageSpec {
            image: IMAGE.to_owned(),
            ..Default::default()
        }),
        labels: HashMap::from([(labels::POD_UID.to_owned(), "a".to_owned())]),
        ..Default::default()
    }
}

fn image_spec() -> v1::ImageSpec {
    v1::ImageSpec {
        image: "far/away:1".to_owned(),
        ..Default::default()
    }
}

fn client(endpoint: &str) -> CriClient {
    CriClient::new(endpoint, None, CriTimeouts::default(), Metrics::default()).unwrap()
}

#[tokio::test]
async fn absent_socket_is_told_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nobody.sock");
    let endpoint = format!("unix://{}", socket.display());
    let error = client(&endpoint).version().await.unwrap_err();
    assert!(error.is_unavailable());
    let text = error.to_string();
    let wanted = format!("version: no container runtime answers on {endpoint}");
    assert!(text.starts_with(&wanted), "{text}");
    assert!(text.contains("does not exist"), "{text}");
    assert!(text.contains("--container-runtime-endpoint"), "{text}");

    // A socket file nobody listens on, as a killed runtime leaves it.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let text = client(&endpoint).version().await.unwrap_err().to_string();
    assert!(text.contains("nothing listens"), "{text}");
}

#[tokio::test]
async fn runtime_may_appear_after_the_client() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("cri.sock");
    let cri = client(&socket.display().to_string());
    assert!(cri.version().await.unwrap_err().is_unavailable());
    let fake = FakeCri::new();
    fake.serve(&socket).unwrap();
    assert_eq!(cri.version().await.unwrap().runtime_name, "fake");
}

#[tokio::test]
async fn client_finds_back_to_a_restarted_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("cri.sock");
    let fake = FakeCri::new();
    fake.serve(&socket).unwrap();
    let cri = client(&socket.display().to_string());
    cri.run_pod_sandbox(sandbox("a"), "").await.unwrap();
    for round in 0..20 {
        fake.restart(Restart::Keep).unwrap();
        let pods = cri.list_pods().await;
        assert_eq!(pods.unwrap().len(), 1, "restart {round}");
    }
    fake.restart(Restart::Wipe).unwrap();
    assert!(cri.list_pods().await.unwrap().is_empty());
    fake.stop();
    assert!(cri.list_pods().await.unwrap_err().is_unavailable());
    fake.start().unwrap();
    assert!(cri.list_pods().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn call_under_way_when_the_runtime_restarts_has_an_unknown_outcome() {
    let sim = Sim::new();
    sim.fake.fail_once("run_podsandbox", Fault::HangAfterEffect);
    let cut = async {
        while sim.fake.sandboxes().is_empty() {
            tokio::task::yield_now().await;
        }
        sim.fake.restart(Restart::Keep).unwrap();
    };
    let (answer, ()) = tokio::join!(sim.cri.run_pod_sandbox(sandbox("a"), ""), cut);
    let error = answer.unwrap_err();
    assert!(error.is_unavailable() && error.outcome_unknown());
    assert!(error.to_string().contains("restarted"), "{error}");
    assert_eq!(sim.fake.count("run_podsandbox"), 1, "must not be repeated");
    assert_eq!(sim.fake.sandboxes().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn hung_call_ends_at_its_deadline() {
    let sim = Sim::new();
    sim.fake.fail_always("status", Fault::Hang);
    let start = Instant::now();
    let error = sim.cri.status(false).await.unwrap_err();
    assert_eq!(error.kind, CriErrorKind::DeadlineExceeded);
    assert_eq!(start.elapsed().as_secs(), 120);
    assert!(error.to_string().contains("within 2m"), "{error}");
    assert_eq!(sim.fake.count("status"), 1, "a hung read is not repeated");

    sim.fake.fail_always("run_podsandbox", Fault::Hang);
    let start = Instant::now();
    let error = sim.cri.run_pod_sandbox(sandbox("a"), "").await.unwrap_err();
    assert!(error.outcome_unknown());
    assert_eq!(start.elapsed().as_secs(), 240);
    let text = error.to_string();
    assert!(
        text.contains("within 4m") && text.contains("runtimeRequestTimeout is 2m"),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn stop_waits_for_the_grace_period_and_then_some() {
    let sim = Sim::new();
    sim.fake
        .on_start(|_| Behaviour::SlowTerm(Duration::from_secs(500)));
    let id = sim.created().await;
    sim.start(&id).await.unwrap();
    let permit = sim.permit().await;
    let start = Instant::now();
    sim.cri.stop_container(&id, 600, &permit).await.unwrap();
    assert_eq!(start.elapsed().as_secs(), 500);
    sim.fake.fail_once("stop_container", Fault::Hang);
    let start = Instant::now();
    let error = sim.cri.stop_container(&id, 30, &permit).await.unwrap_err();
    assert_eq!(error.kind, CriErrorKind::DeadlineExceeded);
    assert_eq!(start.elapsed().as_secs(), 150);
}

#[tokio::test(start_paused = true)]
async fn pull_takes_as_long_as_the_runtime_works_on_it() {
    let sim = Sim::new();
    sim.fake
        .pull("far/away:1", Pull::Takes(Duration::from_secs(7200)));
    let pulled = sim.cri.pull_image(image_spec(), None, None).await.unwrap();
    assert!(pulled.starts_with("sha256:"), "{pulled}");

    sim.fake.pull("far/away:1", Pull::Hangs);
    sim.fake.fail_always("image_status", Fault::Hang);
    let start = Instant::now();
    let error = sim.cri.pull_image(image_spec(), None, None).await;
    assert_eq!(error.unwrap_err().kind, CriErrorKind::DeadlineExceeded);
    assert_eq!(start.elapsed().as_secs(), 2 * (30 + 120));
}

#[tokio::test(start_paused = true)]
async fn lost_reply_leaves_the_effect_and_tells_that_it_may() {
    let sim = Sim::new();
    let id = sim.created().await;
    sim.fake.fail_once("start_container", Fault::LoseReply);
    let error = sim.start(&id).await.unwrap_err();
    assert!(error.outcome_unknown(), "{error:?}");
    assert_eq!(sim.fake.count("start_container"), 1);
    let status = sim.cri.container_status(&id).await.unwrap();
    assert_eq!(status.state(), v1::ContainerState::ContainerRunning);
}

#[tokio::test(start_paused = true)]
async fn broken_read_is_repeated_once_and_no_more() {
    let sim = Sim::new();
    let broken = || Fault::Error(Code::Unavailable, "going down".to_owned());
    sim.fake.fail_once("version", broken());
    sim.cri.version().await.unwrap();
    assert_eq!(sim.fake.count("version"), 2);
    sim.fake.clear_calls();
    sim.fake.fail_always("version", broken());
    assert!(sim.cri.version().await.unwrap_err().is_unavailable());
    assert_eq!(sim.fake.count("version"), 2);
    let text = sim.metrics.encode().unwrap();
    let calls = "kubelet_runtime_operations_total{operation_type=\"version\"} 4";
    assert!(text.contains(calls), "{text}");
    let errors = "kubelet_runtime_operations_errors_total{operation_type=\"version\"} 3";
    assert!(text.contains(errors), "{text}");
}

#[tokio::test(start_paused = true)]
async fn other_errors_keep_the_runtimes_words_and_kind() {
    let sim = Sim::new();
    for (code, kind) in [
        (Code::NotFound, CriErrorKind::NotFound),
        (Code::AlreadyExists, CriErrorKind::AlreadyExists),
        (Code::Unimplemented, CriErrorKind::Unimplemented),
        (Code::Unknown, CriErrorKind::Other),
        (Code::Internal, CriErrorKind::Other),
    ] {
        let fault = Fault::Error(code, "its own words".to_owned());
        sim.fake.fail_once("list_containers", fault);
        let error = sim.cri.list_containers(None).await.unwrap_err();
        assert_eq!(error.kind, kind);
        assert_eq!(error.to_string(), "list_containers: its own words");
    }
}

#[tokio::test(start_paused = true)]
async fn runtime_that_is_still_starting_is_unavailable() {
    let sim = Sim::new();
    let words = "server is not initialized yet".to_owned();
    sim.fake
        .fail_always("status", Fault::Error(Code::Unknown, words));
    let error = sim.cri.status(false).await.unwrap_err();
    assert!(error.is_unavailable());
    assert!(error.to_string().contains("still starting"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn container_removed_between_list_and_inspection_is_left_out() {
    let sim = Sim::new();
    sim.created().await;
    let gone = || Fault::Error(Code::NotFound, "gone".to_owned());
    sim.fake.fail_once("container_status", gone());
    let uid = PodUid::from("a");
    let seen = sim.cri.pod_status(&uid, "a", "default").await.unwrap();
    assert_eq!((seen.sandboxes.len(), seen.containers.len()), (1, 0));
    sim.fake.fail_once("podsandbox_status", gone());
    let seen = sim.cri.pod_status(&uid, "a", "default").await.unwrap();
    assert_eq!((seen.sandboxes.len(), seen.containers.len()), (0, 1));
    let broken = Fault::Error(Code::Internal, "broken".to_owned());
    sim.fake.fail_once("container_status", broken);
    assert!(sim.cri.pod_status(&uid, "a", "default").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn event_stream_shows_what_comes_and_ends_with_the_connection() {
    let sim = Sim::new();
    let mut events = sim.cri.container_events();
    // The first poll subscribes.
    let subscribed = async {
        while sim.fake.event_subscribers() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = subscribed => {}
        event = events.next() => panic!("nothing happened yet: {event:?}"),
    }
    sim.fake.lose_events(1);
    let id = sim.created().await;
    let mut told = Vec::new();
    for _ in 0..2 {
        let event = events.next().await.unwrap().unwrap();
        assert_eq!(event.pod_uid, Some(PodUid::from("a")));
        told.push((event.container_id, event.kind));
    }
    assert_eq!(told[0].1, ContainerEventKind::Started, "the first was lost");
    assert_eq!(told[1], (id, ContainerEventKind::Created));
    sim.fake.restart(Restart::Keep).unwrap();
    let end = events.next().await.unwrap().unwrap_err();
    assert!(end.is_unavailable(), "{end:?}");
    assert!(events.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn lists_may_exceed_four_mebibytes() {
    let sim = Sim::new();
    for n in 0..110 {
        let mut config = sandbox(&format!("pod-{n}"));
        let ballast = "x".repeat(60_000);
        config.annotations.insert("ballast".to_owned(), ballast);
        sim.cri.run_pod_sandbox(config, "").await.unwrap();
    }
    assert_eq!(sim.cri.list_pods().await.unwrap().len(), 110);
}

#[tokio::test(start_paused = true)]
async fn pods_whose_annotations_do_not_fit_into_one_list_are_listed_one_by_one() {
    const PODS: usize = 70;
    let sim = Sim::new();
    for n in 0..PODS {
        let mut config = sandbox(&format!("pod-{n}"));
        // What the API server lets a pod have.
        let ballast = "x".repeat(256 << 10);
        config.annotations.insert("ballast".to_owned(), ballast);
        sim.cri.run_pod_sandbox(config, "").await.unwrap();
    }
    sim.created().await;
    assert!(sim.cri.list_pods().await.unwrap_err().is_too_large());

    let named = |of: std::ops::Range<usize>| {
        move || {
            let uids = of.clone().map(|n| PodUid::from(format!("pod-{n}")));
            uids.collect::<std::collections::BTreeSet<_>>()
        }
    };
    let cri = sim.cri.clone().knowing_pods(named(0..50));
    let cri = cri.knowing_pods(named(40..PODS + 5));
    let pods = cri.list_pods().await.unwrap();
    // The one that nobody names has a container, and the list of those is whole.
    assert_eq!(pods.len(), PODS + 1);
    assert!(pods.values().all(|pod| pod.sandboxes.len() == 1));
    assert_eq!(pods[&PodUid::from("a")].containers.len(), 1);
    assert!(cri.lists_in_parts());

    sim.fake.limit_lists(1 << 30);
    let error = sim.cri.list_pods().await.unwrap_err();
    assert!(error.is_too_large(), "this side has a limit, too: {error}");
    assert_eq!(cri.list_pods().await.unwrap().len(), PODS + 1);
}

#[tokio::test(start_paused = true)]
async fn fake_program_ends_when_the_clock_says_so() {
    let sim = Sim::new();
    sim.fake.on_start(|_| Behaviour::Exit {
        code: 9,
        after: Duration::from_secs(3600),
    });
    let id = sim.created().await;
    sim.start(&id).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3599)).await;
    let status = sim.cri.container_status(&id).await.unwrap();
    assert_eq!(status.state(), v1::ContainerState::ContainerRunning);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let status = sim.cri.container_status(&id).await.unwrap();
    assert_eq!(status.exit_code, 9);
    let ran = status.finished_at - status.started_at;
    assert_eq!((ran + 500_000_000) / 1_000_000_000, 3600);
}

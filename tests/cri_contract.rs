//! One contract of the runtime client, met on the fake runtime, on the installed containerd, on 1.7 and on
//! containerd 2; and what only a runtime with faults can show.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

#[path = "cri_contract/contract.rs"]
mod contract;
#[path = "cri_contract/faults.rs"]
mod faults;
#[path = "cri_contract/world.rs"]
mod world;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use holdfast::kuberuntime::cri::{CriClient, CriErrorKind, CriTimeouts, v1};
use holdfast::types::metrics::Metrics;
use holdfast_testkit::containerd::Version;
use nix::sys::signal::Signal;
use world::World;

#[tokio::test]
async fn fake_runtime_meets_the_contract() {
    contract::run(World::fake()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn installed_containerd_meets_the_contract() {
    contract::run(World::containerd(Version::Installed)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn containerd_1_7_meets_the_contract() {
    contract::run(World::containerd(Version::V1_7)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn containerd_2_meets_the_contract() {
    contract::run(World::containerd(Version::V2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_containerd_comes_back_to_its_containers() {
    let world = World::containerd(Version::Installed);
    let containerd = world.containerd.as_ref().unwrap();
    let (_, _, lasting) = world.run("while :; do sleep 3600; done").await;
    let (_, _, ending) = world
        .run("until [ -e /go ]; do sleep 0.1; done; exit 6")
        .await;

    containerd.signal_daemon(Signal::SIGKILL).unwrap();
    let error = loop {
        match world.cri.version().await {
            Ok(_) => tokio::task::yield_now().await,
            Err(error) => break error,
        }
    };
    assert!(error.is_unavailable(), "{error:?}");
    containerd.start_daemon().unwrap();

    let status = loop {
        match world.cri.container_status(&lasting).await {
            // The runtime is reading its state back in.
            Err(error) if error.is_unavailable() => tokio::task::yield_now().await,
            answer => break answer.unwrap(),
        }
    };
    assert_eq!(status.state(), v1::ContainerState::ContainerRunning);
    let touch = ["touch", "/go"].map(str::to_owned).to_vec();
    let minute = Duration::from_secs(60);
    world.cri.exec_sync(&ending, touch, minute).await.unwrap();
    assert_eq!(world.exited(&ending).await.exit_code, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_containerd_ends_calls_at_their_deadline() {
    let world = World::containerd(Version::Installed);
    let containerd = world.containerd.as_ref().unwrap();
    let timeouts = CriTimeouts::from_request(Duration::from_secs(1));
    let endpoint = containerd.endpoint();
    let cri = CriClient::new(&endpoint, None, timeouts, Metrics::default()).unwrap();
    cri.version().await.unwrap();
    containerd.signal_daemon(Signal::SIGSTOP).unwrap();
    let error = cri.list_pods().await.unwrap_err();
    assert_eq!(error.kind, CriErrorKind::DeadlineExceeded);
    containerd.signal_daemon(Signal::SIGCONT).unwrap();
    cri.list_pods().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn private_containerd_leaves_nothing_behind() {
    for killed in [false, true] {
        let world = World::containerd(Version::Installed);
        let containerd = world.containerd.as_ref().unwrap();
        let dir = containerd.dir().to_owned();
        let bridge = std::fs::read_to_string(dir.join("bridge")).unwrap();
        let bridge = Path::new("/sys/class/net").join(bridge.trim());
        let mut config = world.pod().sandbox(0, v1::NamespaceMode::Pod);
        config.port_mappings = vec![v1::PortMapping {
            container_port: 80,
            host_port: 30_080 + i32::from(killed),
            ..Default::default()
        }];
        world.cri.run_pod_sandbox(config, "").await.unwrap();
        let network = bridge.file_name().unwrap().to_str().unwrap();
        let rules = || {
            let output = Command::new("iptables-save").args(["-t", "nat"]).output();
            String::from_utf8(output.unwrap().stdout).unwrap()
        };
        assert!(rules().contains(network), "{}", rules());
        let (_, _, id) = world.run("while :; do sleep 3600; done").await;
        let processes = containerd.ctr(&["tasks", "ls"]).unwrap();
        let pid = processes
            .lines()
            .find(|line| line.starts_with(id.as_str()))
            .and_then(|line| line.split_whitespace().nth(1))
            .map(|pid| Path::new("/proc").join(pid))
            .unwrap();
        assert!(pid.exists() && bridge.exists());
        if killed {
            containerd.signal_daemon(Signal::SIGKILL).unwrap();
        }
        drop(world);
        assert!(!pid.exists(), "the container still runs (killed: {killed})");
        assert!(
            !bridge.exists(),
            "the bridge is still there (killed: {killed})"
        );
        assert!(!dir.exists(), "{} is still there", dir.display());
        assert!(!rules().contains(network), "{}", rules());
        let mounts =
            String::from_utf8_lossy(&std::fs::read("/proc/self/mountinfo").unwrap()).into_owned();
        assert!(!mounts.contains(&dir.display().to_string()), "{mounts}");
    }
}

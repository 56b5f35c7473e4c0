//! Containers that are stopped while clients are attached to them, on every containerd there is for tests: what a client does
//! or leaves undone does not keep them from ending.

use std::path::Path;
use std::time::Duration;

use holdfast::kuberuntime::kill::{Condemned, Killer};
use holdfast::server::kubelet::streaming::IDLE_TIMEOUT;
use holdfast::types::Pace;
use holdfast::types::events::MemoryRecorder;
use holdfast_testkit::containerd::Version;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::client::{Spdy, Ws};
use super::runtime::TestPod;
use super::world::World;

const V4: &str = "v4.channel.k8s.io";
const V5: &str = "v5.channel.k8s.io";
const OUT: &str = "output=1&error=1";
const GRACE: Duration = Duration::from_secs(2);
/// The grace period, what follows it until streams are ended, and time for a machine that is busy.
const ENDED_WITHIN: Duration = Duration::from_secs(30);
/// Each of its lines is long: what is between a container and its client is full sooner than the disk.
const SPEAKS: &str = "exec yes $(printf %02000d 0)";
/// A client that leaves at once meets the moment in question now and then.
const VISITS: usize = 50;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_keeps_no_container() {
    who_does_not_read(Version::Installed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_keeps_no_container_of_containerd_1_7() {
    who_does_not_read(Version::V1_7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_keeps_no_container_of_containerd_2() {
    who_does_not_read(Version::V2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_at_once_keeps_no_container() {
    who_leaves_at_once(Version::Installed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_at_once_keeps_no_container_of_containerd_1_7() {
    who_leaves_at_once(Version::V1_7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_at_once_keeps_no_container_of_containerd_2() {
    who_leaves_at_once(Version::V2).await;
}

async fn who_does_not_read(version: Version) {
    let world = World::on(version, IDLE_TIMEOUT).await;
    for tty in [false, true] {
        for websocket in [false, true] {
            let pod = world.interactive_pod(SPEAKS, tty).await;
            let path = attach(&pod);
            let (mut spdy, mut ws) = (None, None);
            if websocket {
                ws = Some(Ws::connect(world.addr(), &path, &[V5]).await.unwrap());
            } else {
                let mut client = Spdy::connect(world.addr(), &path, V4).await.ok().unwrap();
                client.open_all(streams(tty)).await;
                spdy = Some(client);
            }
            writes_no_more(&pod.logs.join("main-0.log")).await;
            stop(&world, &pod).await;
            drop((spdy, ws));
        }
    }
}

async fn who_leaves_at_once(version: Version) {
    let world = World::on(version, IDLE_TIMEOUT).await;
    let (pod, _) = world.pod("sleep 1000").await;
    for visit in 0..VISITS {
        if visit % 2 == 0 {
            let ws = Ws::connect(world.addr(), &attach(&pod), &[V5]).await;
            drop(ws.unwrap());
        } else {
            let spdy = Spdy::connect(world.addr(), &attach(&pod), V4).await;
            let mut spdy = spdy.ok().unwrap();
            spdy.open_all(streams(false)).await;
        }
    }
    let gone = async {
        while !world.server.streams.is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(ENDED_WITHIN, gone).await.expect("streams that end");
    stop(&world, &pod).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_sees_the_end_of_a_container_that_has_to_be_killed() {
    let world = World::start().await;
    let script = "trap 'echo the end' TERM; echo begun; while :; do sleep 0.1; done";
    let (pod, _) = world.pod(script).await;
    let ws = Ws::connect(world.addr(), &attach(&pod), &[V5]).await;
    let seen = tokio::spawn(ws.unwrap().rest());
    stop(&world, &pod).await;
    let seen = seen.await.unwrap();
    assert!(seen.stdout.ends_with(b"the end\n"), "{seen:?}");
    assert_eq!(seen.status()["status"], "Success", "{seen:?}");
    assert_eq!(seen.close.unwrap().code, CloseCode::Normal);
}

fn attach(pod: &TestPod) -> String {
    format!("/attach/default/{}/main?{OUT}", pod.name)
}

fn streams(tty: bool) -> &'static [&'static str] {
    match tty {
        true => &["error", "stdout", "resize"],
        false => &["error", "stdout", "stderr"],
    }
}

/// Waits until a container's log has stopped to grow: everything between it and its client is full.
async fn writes_no_more(log: &Path) {
    let (mut before, mut since) = (0, Instant::now());
    let give_up = Instant::now() + ENDED_WITHIN;
    while before == 0 || since.elapsed() < Duration::from_secs(5) {
        assert!(Instant::now() < give_up, "{before} bytes and more");
        let now = std::fs::metadata(log).map_or(0, |file| file.len());
        if now != before {
            (before, since) = (now, Instant::now());
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Stops a pod as its worker does; it has to end.
async fn stop(world: &World, pod: &TestPod) {
    let runtime = &world.runtime;
    let status = runtime.cri.pod_status(&pod.uid, &pod.name, "default");
    let status = status.await.unwrap();
    let (recorder, pace) = (MemoryRecorder::default(), Pace::default());
    let permit = runtime.permit().await;
    let killer = Killer {
        cri: &runtime.cri,
        store: &runtime.store,
        recorder: &recorder,
        permit: &permit,
        clock: &runtime.clock,
        pace: &pace,
        ends: None,
    };
    let condemned = Condemned {
        status: &status,
        pod: None,
        host_ips: &[],
    };
    let killed = timeout(ENDED_WITHIN, killer.pod(condemned, GRACE)).await;
    killed.expect("an answer of the runtime").unwrap();
}

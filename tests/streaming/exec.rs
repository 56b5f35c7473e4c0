//! exec, attach and run on containerd.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use holdfast::kuberuntime::cri::v1::ContainerState;
use holdfast::server::kubelet::streaming::IDLE_TIMEOUT;
use holdfast::server::kubelet::streaming::spdy::Frame;
use holdfast_testkit::containerd::Version;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::client::{Spdy, Ws, request};
use super::world::{World, exec};

const V4: &str = "v4.channel.k8s.io";
const V5: &str = "v5.channel.k8s.io";
const OUT: &str = "output=1&error=1";
const ALL: &str = "input=1&output=1&error=1";
const BULK: usize = 100 << 20;

fn exit_code(status: &Value) -> String {
    assert_eq!(status["status"], "Failure", "{status}");
    assert_eq!(status["reason"], "NonZeroExitCode", "{status}");
    let cause = &status["details"]["causes"][0];
    assert_eq!(cause["reason"], "ExitCode");
    cause["message"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_end_as_they_end_by_every_protocol() {
    commands(World::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn containerd_1_7_does_the_same() {
    commands(World::on(Version::V1_7, IDLE_TIMEOUT).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn containerd_2_does_the_same() {
    commands(World::on(Version::V2, IDLE_TIMEOUT).await).await;
}

async fn commands(world: World) {
    let (pod, _) = world.pod("sleep 1000").await;
    let fails = exec(&pod, OUT, "echo out; echo err >&2; exit 7");
    let succeeds = exec(&pod, OUT, "echo fine");

    for (version, told) in [
        (V4, true),
        ("v3.channel.k8s.io", false),
        ("v2.channel.k8s.io", false),
    ] {
        let mut spdy = Spdy::connect(world.addr(), &fails, version)
            .await
            .ok()
            .unwrap();
        let streams = spdy.open_all(&["error", "stdout", "stderr"]).await;
        let carried = spdy.rest(&streams).await;
        assert_eq!(carried[&streams[1]], b"out\n", "{version}");
        assert_eq!(carried[&streams[2]], b"err\n", "{version}");
        let error = String::from_utf8_lossy(&carried[&streams[0]]).into_owned();
        if told {
            assert_eq!(exit_code(&serde_json::from_str(&error).unwrap()), "7");
        } else {
            assert!(error.contains("exit code 7"), "{version}: {error}");
        }
    }

    for protocol in [V5, V4, "v4.base64.channel.k8s.io"] {
        let mut ws = Ws::connect(world.addr(), &fails, &[protocol])
            .await
            .unwrap();
        assert_eq!(ws.protocol.as_deref(), Some(protocol));
        let (mut out, mut err, mut status) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((channel, data)) = ws.next().await {
            [&mut Vec::new(), &mut out, &mut err, &mut status][usize::from(channel)].extend(data);
        }
        assert_eq!(
            (&out[..], &err[..]),
            (&b"out\n"[..], &b"err\n"[..]),
            "{protocol}"
        );
        assert_eq!(exit_code(&serde_json::from_slice(&status).unwrap()), "7");
    }

    for protocols in [&["channel.k8s.io"][..], &[]] {
        let ws = Ws::connect(world.addr(), &fails, protocols).await.unwrap();
        assert_eq!(ws.protocol.as_deref(), protocols.first().copied());
        let seen = ws.rest().await;
        assert_eq!(
            (&seen.stdout[..], &seen.stderr[..]),
            (&b"out\n"[..], &b"err\n"[..])
        );
        let error = String::from_utf8_lossy(&seen.error).into_owned();
        assert!(error.contains("exit code 7"), "{error}");
    }

    let seen = Ws::connect(world.addr(), &succeeds, &[V5])
        .await
        .unwrap()
        .rest()
        .await;
    assert_eq!(seen.stdout, b"fine\n");
    assert_eq!(seen.status()["status"], "Success");
    assert_eq!(seen.close.unwrap().code, CloseCode::Normal);
}

#[tokio::test(flavor = "multi_thread")]
async fn run_answers_with_the_output() {
    let world = World::start().await;
    let (pod, _) = world.pod("sleep 1000").await;
    let path = format!("/run/default/{}/main", pod.name);
    let answer = request(world.addr(), "POST", &format!("{path}?cmd=echo+a+b"), "").await;
    assert_eq!(
        (answer.status, answer.body.as_str()),
        (200, "a b\n"),
        "{}",
        answer.head
    );
    let answer = request(world.addr(), "POST", &path, "cmd=echo%20form").await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "form\n"));
    let answer = request(world.addr(), "POST", &format!("{path}?cmd=cat+/none"), "").await;
    assert_eq!(answer.status, 500);
    assert_eq!(
        answer.body,
        "command 'cat /none' exited with 1: cat: can't open '/none': No such file or directory\n"
    );
    let with_uid = format!("/run/default/{}/{}/main?cmd=id+-u", pod.name, pod.uid);
    let answer = request(world.addr(), "POST", &with_uid, "").await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "0\n"));
    assert_eq!(
        request(world.addr(), "GET", &with_uid, "").await.status,
        405
    );
}

/// Bytes that tell where they belong.
fn pattern(from: usize, length: usize) -> Vec<u8> {
    (from..from + length)
        .map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_mebibytes_go_both_ways_by_spdy() {
    let world = World::start().await;
    let (pod, _) = world.pod("sleep 1000").await;
    let path = exec(&pod, ALL, "cat; echo done >&2");
    let mut spdy = Spdy::connect(world.addr(), &path, V4).await.ok().unwrap();
    let streams = spdy.open_all(&["error", "stdin", "stdout", "stderr"]).await;
    let (mut writer, mut reader) = (spdy.writer, spdy.reader);
    let stdin = streams[1];
    let sending = tokio::spawn(async move {
        let mut sum = Sha256::new();
        for at in (0..BULK).step_by(1 << 20) {
            let chunk = pattern(at, 1 << 20);
            sum.update(&chunk);
            writer.data(stdin, &chunk).await.unwrap();
        }
        writer.finish(stdin).await.unwrap();
        (sum.finalize(), writer)
    });
    let (mut sum, mut length, mut stderr, mut status) =
        (Sha256::new(), 0, Vec::<u8>::new(), Vec::<u8>::new());
    while let Some(frame) = reader.next().await.unwrap() {
        match frame {
            Frame::Data {
                stream, payload, ..
            } if stream == streams[2] => {
                length += payload.len();
                sum.update(&payload);
            }
            Frame::Data {
                stream, payload, ..
            } if stream == streams[3] => stderr.extend(payload),
            Frame::Data {
                stream, payload, ..
            } if stream == streams[0] => status.extend(payload),
            Frame::Reset { stream, .. } if stream == streams[0] => break,
            _ => {}
        }
    }
    let (sent, _writer) = sending.await.unwrap();
    assert_eq!(length, BULK);
    assert_eq!(sum.finalize(), sent, "checksum");
    assert_eq!(stderr, b"done\n");
    let status: Value = serde_json::from_slice(&status).unwrap();
    assert_eq!(status["status"], "Success");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_mebibytes_go_both_ways_by_websocket() {
    let world = World::start().await;
    let (pod, _) = world.pod("sleep 1000").await;
    let path = exec(&pod, ALL, "cat; echo done >&2");
    let ws = Ws::connect(world.addr(), &path, &[V5]).await.unwrap();
    let (mut send, mut receive) = ws.socket.split();
    let sending = tokio::spawn(async move {
        let mut sum = Sha256::new();
        for at in (0..BULK).step_by(1 << 18) {
            let chunk = pattern(at, 1 << 18);
            sum.update(&chunk);
            let message = [&[0], &chunk[..]].concat();
            send.send(Message::Binary(message.into())).await.unwrap();
        }
        // Only this version of the protocol can end the input, without which cat would wait for ever.
        send.send(Message::Binary(vec![255, 0].into()))
            .await
            .unwrap();
        (sum.finalize(), send)
    });
    let (mut sum, mut length, mut stderr, mut status) =
        (Sha256::new(), 0, Vec::<u8>::new(), Vec::<u8>::new());
    while let Some(Ok(message)) = receive.next().await {
        let Message::Binary(bytes) = message else {
            continue;
        };
        match bytes[0] {
            1 => {
                length += bytes.len() - 1;
                sum.update(&bytes[1..]);
            }
            2 => stderr.extend(&bytes[1..]),
            3 => status.extend(&bytes[1..]),
            channel => panic!("data on channel {channel}"),
        }
    }
    let (sent, _send) = sending.await.unwrap();
    assert_eq!(length, BULK);
    assert_eq!(sum.finalize(), sent, "checksum");
    assert_eq!(stderr, b"done\n");
    let status: Value = serde_json::from_slice(&status).unwrap();
    assert_eq!(status["status"], "Success");
}

const WAIT_FOR_SIZE: &str =
    "tty; until [ \"$(stty size)\" = '33 91' ]; do sleep 0.05; done; read x; echo sized $x";

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_has_the_size_it_is_told() {
    let world = World::start().await;
    let (pod, _) = world.pod("sleep 1000").await;
    let path = exec(&pod, "input=1&output=1&error=1&tty=1", WAIT_FOR_SIZE);
    let size = br#"{"Width":91,"Height":33}"#;

    let mut ws = Ws::connect(world.addr(), &path, &[V5]).await.unwrap();
    ws.send(4, size).await;
    ws.send(0, b"ws\n").await;
    let seen = ws.rest().await;
    let out = String::from_utf8_lossy(&seen.stdout).into_owned();
    assert!(
        out.contains("/dev/pts/") && out.contains("sized ws"),
        "{out}"
    );
    assert_eq!(seen.status()["status"], "Success");

    let mut spdy = Spdy::connect(world.addr(), &path, V4).await.ok().unwrap();
    let streams = spdy.open_all(&["error", "stdin", "stdout", "resize"]).await;
    spdy.writer.data(streams[3], size).await.unwrap();
    spdy.writer.data(streams[1], b"spdy\n").await.unwrap();
    let carried = spdy.rest(&[streams[0], streams[2]]).await;
    let out = String::from_utf8_lossy(&carried[&streams[2]]).into_owned();
    assert!(out.contains("sized spdy"), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn attaching_joins_the_first_process() {
    let world = World::start().await;
    let script = "while read line; do echo got $line; done";
    let pod = world.interactive_pod(script, false).await;
    let path = format!("/attach/default/{}/main?{ALL}", pod.name);

    let mut ws = Ws::connect(world.addr(), &path, &[V5]).await.unwrap();
    ws.send(0, b"one\n").await;
    let mut out = Vec::new();
    while !out.ends_with(b"got one\n") {
        let (channel, data) = ws.next().await.unwrap();
        assert_eq!(channel, 1);
        out.extend(data);
    }
    // Leaving does not end it.
    ws.socket.close(None).await.unwrap();

    let mut spdy = Spdy::connect(world.addr(), &path, V4).await.ok().unwrap();
    let streams = spdy.open_all(&["error", "stdin", "stdout", "stderr"]).await;
    spdy.writer.data(streams[1], b"two\n").await.unwrap();
    let mut out = Vec::new();
    while !out.ends_with(b"got two\n") {
        if let Frame::Data {
            stream, payload, ..
        } = spdy.reader.next().await.unwrap().unwrap()
        {
            assert_eq!(stream, streams[2]);
            out.extend(payload);
        }
    }

    let pod = world.interactive_pod("read x; echo $x; tty", true).await;
    // stderr is asked for, but a terminal has none.
    let path = format!("/attach/default/{}/{}/main?{ALL}", pod.name, pod.uid);
    let mut ws = Ws::connect(world.addr(), &path, &[V4]).await.unwrap();
    ws.send(0, b"three\n").await;
    let mut out = Vec::new();
    while let Some((_, data)) = ws.next().await {
        out.extend(data);
    }
    let out = String::from_utf8_lossy(&out).into_owned();
    assert!(out.contains("/dev/"), "{out}");
}

/// With input as well, containerd ends all of an attachment when the container closes its errors (docs/streaming.md).
#[tokio::test(flavor = "multi_thread")]
async fn who_only_listens_sees_what_is_written_last() {
    let world = World::start().await;
    let script =
        "until [ -e /go ]; do echo ready; sleep 0.1; done; exec 2>&-; sleep 1; echo the end";
    let (pod, _) = world.pod(script).await;
    let path = format!("/attach/default/{}/main?{OUT}", pod.name);
    let mut spdy = Spdy::connect(world.addr(), &path, V4).await.ok().unwrap();
    let streams = spdy.open_all(&["error", "stdout", "stderr"]).await;
    while !matches!(
        spdy.reader.next().await.unwrap().unwrap(),
        Frame::Data { .. }
    ) {}
    let mut ws = Ws::connect(world.addr(), &path, &[V5]).await.unwrap();
    assert_eq!(ws.next().await.unwrap().0, 1);

    let go = exec(&pod, OUT, "touch /go");
    let go = Ws::connect(world.addr(), &go, &[V5]).await.unwrap();
    go.rest().await;
    let carried = spdy.rest(&streams).await;
    let by_spdy = &carried[&streams[1]];
    assert!(by_spdy.ends_with(b"the end\n"), "{by_spdy:?}");
    let by_ws = ws.rest().await;
    assert!(by_ws.stdout.ends_with(b"the end\n"), "{by_ws:?}");
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_do_not_read_harm_nobody() {
    let world = World::start().await;
    let (pod, _) = world.pod("sleep 1000").await;
    let flood = exec(&pod, OUT, "yes");
    let before = resident_bytes();
    let mut stuck = Vec::new();
    for _ in 0..4 {
        stuck.push(Ws::connect(world.addr(), &flood, &[V5]).await.unwrap());
    }
    let mut spdy = Spdy::connect(world.addr(), &flood, V4).await.ok().unwrap();
    spdy.open_all(&["error", "stdout", "stderr"]).await;

    for number in 0..10 {
        let path = exec(&pod, OUT, &format!("echo {number}"));
        let started = tokio::time::Instant::now();
        let seen = Ws::connect(world.addr(), &path, &[V5])
            .await
            .unwrap()
            .rest()
            .await;
        assert_eq!(seen.stdout, format!("{number}\n").as_bytes());
        assert!(started.elapsed() < Duration::from_secs(20));
    }
    let grown = resident_bytes().saturating_sub(before);
    println!("five clients that do not read: {grown} bytes more resident");
    assert!(grown < 48 << 20, "{grown} bytes gathered");
    // What is read late is there all the same.
    let (channel, data) = stuck[0].next().await.unwrap();
    assert_eq!((channel, data.is_empty()), (1, true));
    let (channel, data) = stuck[0].next().await.unwrap();
    assert_eq!((channel, &data[..4]), (1, &b"y\ny\n"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agents_end_closes_streams_and_nothing_else() {
    let world = World::start().await;
    let (pod, id) = world.pod("sleep 1000").await;
    let path = exec(&pod, ALL, "echo ready; cat");
    let mut ws = Ws::connect(world.addr(), &path, &[V5]).await.unwrap();
    while ws.next().await.unwrap().1 != b"ready\n" {}
    let mut spdy = Spdy::connect(world.addr(), &path, V4).await.ok().unwrap();
    let streams = spdy.open_all(&["error", "stdin", "stdout", "stderr"]).await;
    while !matches!(
        spdy.reader.next().await.unwrap().unwrap(),
        Frame::Data { .. }
    ) {}
    assert_eq!(world.server.streams.len(), 2);

    world.server.stop.cancel();
    let started = tokio::time::Instant::now();
    let seen = ws.rest().await;
    assert_eq!(seen.close.as_ref().unwrap().code, CloseCode::Away);
    assert_eq!(seen.status()["reason"], "InternalError");
    let carried = spdy.rest(&streams).await;
    assert!(carried.values().all(Vec::is_empty), "ended between frames");
    world.server.streams.close();
    world.server.streams.wait().await;
    assert!(started.elapsed() < Duration::from_secs(5));
    let status = world.runtime.cri.container_status(&id).await.unwrap();
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    let refused = Spdy::connect(world.addr(), &path, V4).await.err().unwrap();
    assert_eq!(refused.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_carries_nothing_is_closed() {
    let world = World::on(Version::Installed, Duration::from_secs(1)).await;
    let (pod, _) = world.pod("sleep 1000").await;
    let path = exec(&pod, OUT, "sleep 1000");
    let seen = Ws::connect(world.addr(), &path, &[V5])
        .await
        .unwrap()
        .rest()
        .await;
    assert_eq!(seen.close.unwrap().code, CloseCode::Away);
    let mut spdy = Spdy::connect(world.addr(), &path, V4).await.ok().unwrap();
    spdy.open_all(&["error", "stdout", "stderr"]).await;
    while spdy.reader.next().await.unwrap().is_some() {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_leaves_nothing_behind() {
    let world = World::start().await;
    let (pod, _) = world.pod("sleep 1000").await;
    let path = exec(&pod, ALL, "echo ready; cat");
    for _ in 0..5 {
        let mut ws = Ws::connect(world.addr(), &path, &[V5]).await.unwrap();
        while ws.next().await.unwrap().1 != b"ready\n" {}
        // Without a goodbye.
        drop(ws);
    }
    world.server.streams.close();
    let gone = tokio::time::timeout(Duration::from_secs(20), world.server.streams.wait());
    gone.await.unwrap();
}

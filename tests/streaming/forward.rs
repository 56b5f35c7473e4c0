//! port-forward on containerd.

use std::collections::HashMap;
use std::time::Duration;

use futures::{SinkExt, StreamExt};
use holdfast::server::kubelet::streaming::spdy::{Frame, Reader, StreamId, Writer};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex, split};
use tokio_tungstenite::tungstenite::Message;

use super::client::{Spdy, Ws};
use super::runtime::TestPod;
use super::world::World;

/// Port 7000 echoes, 7001 to 7008 answer a line with that line. Eight, because such a listener lets only two wait.
const ECHO: &str = "nc -ll -p 7000 -e cat & \
    for n in 1 2 3 4 5 6 7 8; do nc -ll -p 700$n -e sh -c 'read x; echo $x' & done; \
    until [ \"$(netstat -ltn | grep -c ':700[0-8] ')\" = 9 ]; do sleep 0.05; done; echo up; sleep 1000";
const PORT_FORWARD: &str = "portforward.k8s.io";
const BULK: usize = 256 << 20;
const BLOCK: usize = 1 << 16;

async fn echo_pod(world: &World) -> TestPod {
    let (pod, _) = world.pod(ECHO).await;
    let log = pod.logs.join("main-0.log");
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while !std::fs::read_to_string(&log)
        .unwrap_or_default()
        .contains("up")
    {
        assert!(
            tokio::time::Instant::now() < deadline,
            "the pod does not listen"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    pod
}

fn path(pod: &TestPod, query: &str) -> String {
    format!("/portForward/default/{}{query}", pod.name)
}

async fn open<W: tokio::io::AsyncWrite + Unpin>(
    writer: &mut Writer<W>,
    number: u32,
    port: &str,
) -> (StreamId, StreamId) {
    let (error, data) = (number * 4 + 1, number * 4 + 3);
    let id = number.to_string();
    for (stream, kind) in [(error, "error"), (data, "data")] {
        let headers = [("streamtype", kind), ("port", port), ("requestid", &id)];
        writer.open(stream, &headers).await.unwrap();
    }
    writer.finish(error).await.unwrap();
    (error, data)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_short_connections_share_one_stream() {
    const CONNECTIONS: u32 = 1000;
    const AT_ONCE: u32 = 16;
    let world = World::start().await;
    let pod = echo_pod(&world).await;
    let spdy = Spdy::connect(world.addr(), &path(&pod, ""), PORT_FORWARD)
        .await
        .ok()
        .unwrap();
    let (mut writer, mut reader) = (spdy.writer, spdy.reader);
    let started = tokio::time::Instant::now();
    let mut carried: HashMap<StreamId, Vec<u8>> = HashMap::new();
    let (mut opened, mut done) = (0, 0);
    while done < CONNECTIONS {
        while opened < CONNECTIONS && opened - done < AT_ONCE {
            let port = (7001 + opened % 8).to_string();
            let (_, data) = open(&mut writer, opened, &port).await;
            let text = format!("connection {opened}\n");
            writer.data(data, text.as_bytes()).await.unwrap();
            opened += 1;
        }
        let stream = match reader.next().await.unwrap().unwrap() {
            Frame::Data {
                stream,
                payload,
                fin,
            } => {
                let seen = carried.entry(stream).or_default();
                seen.extend(payload);
                if seen.ends_with(b"\n") && !fin {
                    writer.finish(stream).await.unwrap();
                }
                if !fin {
                    continue;
                }
                stream
            }
            Frame::Reset { stream, .. } => stream,
            _ => continue,
        };
        let seen = carried.remove(&stream).unwrap_or_default();
        if stream % 4 == 3 && !seen.is_empty() {
            let expected = format!("connection {}\n", (stream - 3) / 4);
            assert_eq!(String::from_utf8_lossy(&seen), expected);
            done += 1;
        } else {
            // The stream of errors, or the end of one whose end was seen.
            assert!(seen.is_empty(), "{}", String::from_utf8_lossy(&seen));
        }
    }
    println!("{CONNECTIONS} connections in {:?}", started.elapsed());
}

fn block(number: usize) -> Vec<u8> {
    (0..BLOCK)
        .map(|at| (at ^ (at >> 8) ^ number) as u8)
        .collect()
}

/// Sends [`BULK`] bytes through the echo and compares checksums.
async fn bulk<R, W>(mut reader: Reader<R>, mut writer: Writer<W>)
where
    R: tokio::io::AsyncRead + Unpin,
    W: tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let started = tokio::time::Instant::now();
    let (_, data) = open(&mut writer, 0, "7000").await;
    let sending = tokio::spawn(async move {
        let mut sum = Sha256::new();
        for number in 0..BULK / BLOCK {
            let block = block(number);
            sum.update(&block);
            writer.data(data, &block).await.unwrap();
        }
        writer.finish(data).await.unwrap();
        (sum.finalize(), writer)
    });
    let (mut sum, mut length) = (Sha256::new(), 0);
    while length < BULK {
        if let Frame::Data {
            stream, payload, ..
        } = reader.next().await.unwrap().unwrap()
        {
            assert_eq!(stream, data, "{}", String::from_utf8_lossy(&payload));
            length += payload.len();
            sum.update(&payload);
        }
    }
    let (sent, _writer) = sending.await.unwrap();
    assert_eq!(sum.finalize(), sent, "checksum");
    println!("{length} bytes both ways in {:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_big_transfer_arrives_whole_by_spdy() {
    let world = World::start().await;
    let pod = echo_pod(&world).await;
    let spdy = Spdy::connect(world.addr(), &path(&pod, ""), PORT_FORWARD)
        .await
        .ok()
        .unwrap();
    bulk(spdy.reader, spdy.writer).await;
}

/// The bytes within the messages of a tunnel.
async fn tunnelled(world: &World, pod: &TestPod) -> DuplexStream {
    let ws = Ws::connect(
        world.addr(),
        &path(pod, ""),
        &["SPDY/3.1+portforward.k8s.io"],
    )
    .await;
    let ws = ws.unwrap();
    assert_eq!(ws.protocol.as_deref(), Some("SPDY/3.1+portforward.k8s.io"));
    let (ours, theirs) = duplex(64 * 1024);
    let (mut read, mut write) = split(theirs);
    let (mut send, mut receive) = ws.socket.split();
    tokio::spawn(async move {
        let mut buffer = vec![0; 32 * 1024];
        while let Ok(length @ 1..) = read.read(&mut buffer).await {
            let message = Message::Binary(buffer[..length].to_vec().into());
            if send.send(message).await.is_err() {
                return;
            }
        }
    });
    tokio::spawn(async move {
        while let Some(Ok(Message::Binary(bytes))) = receive.next().await {
            if write.write_all(&bytes).await.is_err() {
                return;
            }
        }
    });
    ours
}

#[tokio::test(flavor = "multi_thread")]
async fn a_big_transfer_arrives_whole_through_a_tunnel() {
    let world = World::start().await;
    let pod = echo_pod(&world).await;
    let (read, write) = split(tunnelled(&world, &pod).await);
    bulk(Reader::new(read), Writer::new(write).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn channels_reach_several_ports() {
    let world = World::start().await;
    let pod = echo_pod(&world).await;
    let path = path(&pod, "?port=7000,7001&port=7009");
    let mut ws = Ws::connect(world.addr(), &path, &["v4.channel.k8s.io"])
        .await
        .unwrap();
    for port in [7000u16, 7001, 7009] {
        for _ in ["data", "error"] {
            let (channel, data) = ws.next().await.unwrap();
            assert_eq!(data, port.to_le_bytes(), "channel {channel}");
        }
    }
    ws.send(0, b"first").await;
    ws.send(2, b"second\n").await;
    let mut seen: HashMap<u8, Vec<u8>> = HashMap::new();
    // Nobody listens on the third.
    while seen.len() < 3 {
        let (channel, data) = ws.next().await.unwrap();
        seen.entry(channel).or_default().extend(data);
    }
    assert_eq!(seen[&0], b"first");
    assert_eq!(seen[&2], b"second\n");
    let error = String::from_utf8_lossy(&seen[&5]).into_owned();
    assert!(error.contains("7009"), "{error}");
}

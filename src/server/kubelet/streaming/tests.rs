//! Parameters, negotiation and carrying, over connections in memory.

use std::time::Duration;

use axum::http::header::{HeaderMap, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::response::IntoResponse;
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::task::JoinHandle;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::channels::{Encoding, Incoming, Messages};
use super::frames::Data;
use super::relay::{End, relay};
use super::runtime_io::RuntimeIo;
use super::session::{Limits, plan};
use super::spdy::{Frame, Reader, Writer};
use super::translate::{Plan, Stream, translate};
use super::tunnel::tunnel;
use super::websocket::{Agreed, Channels};
use super::*;
use crate::kuberuntime::cri::Streams;
use crate::kuberuntime::open_streams::OpenStreams;
use crate::types::ContainerId;

fn text(error: StreamError) -> (StatusCode, String) {
    let message = error.to_string();
    (error.into_response().status(), message)
}

#[test]
fn streams_are_asked_for_by_upstreams_names() {
    let streams = parameters::streams("command=ls&input=1&output=1&error=1&tty=0").unwrap();
    assert_eq!(
        streams,
        Streams {
            stdin: true,
            stdout: true,
            stderr: true,
            tty: false
        }
    );
    let with_tty = parameters::streams("output=1&error=1&tty=1").unwrap();
    assert!(with_tty.tty && !with_tty.stderr, "a terminal has no stderr");
    assert_eq!(
        text(parameters::streams("input=true&tty=1").unwrap_err()),
        (
            StatusCode::BAD_REQUEST,
            "you must specify at least 1 of stdin, stdout, stderr".to_owned()
        )
    );
    assert_eq!(
        parameters::all("command=sh&command=-c&x=1&command=a+b%20c", "command"),
        ["sh", "-c", "a b c"]
    );
}

#[test]
fn ports_are_numbers_with_and_without_commas() {
    assert_eq!(
        parameters::ports("port=80,443&port=1").unwrap(),
        [80, 443, 1]
    );
    assert_eq!(parameters::ports("ports=8080").unwrap(), [8080]);
    for (query, expected) in [
        ("", "query parameter \"port\" is required"),
        ("port=", "query parameter \"port\" cannot be empty"),
        ("port=0", "port \"0\" must be > 0"),
        ("port=80,x", "unable to parse \"80,x\" as a port"),
        ("port=65536", "unable to parse \"65536\" as a port"),
    ] {
        let (status, message) = text(parameters::ports(query).unwrap_err());
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(message.starts_with(expected), "{query}: {message}");
    }
    let many = vec!["1"; 33].join(",");
    assert!(parameters::ports(&format!("port={many}")).is_err());
}

fn offering(protocols: &[&'static str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(
        "connection",
        HeaderValue::from_static("keep-alive, Upgrade"),
    );
    headers.insert("upgrade", HeaderValue::from_static("WebSocket"));
    for protocol in protocols {
        headers.append("sec-websocket-protocol", HeaderValue::from_static(protocol));
    }
    headers
}

#[test]
fn the_first_protocol_of_the_clients_that_is_known_is_taken() {
    assert!(websocket::wants(&offering(&[]), "websocket"));
    let agreed = |protocols: &[&'static str]| websocket::channels(&offering(protocols)).unwrap();
    let (name, Agreed::Channels(v5)) =
        agreed(&["v9.channel.k8s.io, v5.channel.k8s.io", "v4.channel.k8s.io"])
    else {
        panic!("not channels");
    };
    assert_eq!(name.as_deref(), Some("v5.channel.k8s.io"));
    assert!(v5.half_close && v5.resizes() && v5.has_status());
    let (name, Agreed::Channels(none)) = agreed(&[]) else {
        panic!("not channels");
    };
    assert_eq!(name, None);
    assert!(!none.half_close && none.resizes() && !none.has_status());
    let (_, Agreed::Channels(v2)) = agreed(&["v2.channel.k8s.io"]) else {
        panic!("not channels");
    };
    assert!(!v2.resizes());
    let (_, Agreed::Channels(v4)) = agreed(&["v4.base64.channel.k8s.io"]) else {
        panic!("not channels");
    };
    assert_eq!(v4.encoding, Encoding::Base64);
    let refused = websocket::channels(&offering(&["mqtt"])).unwrap_err();
    assert_eq!(text(refused).0, StatusCode::FORBIDDEN);
}

#[test]
fn port_forward_is_tunnelled_or_has_channels() {
    let tunnel = offering(&["SPDY/3.1+portforward.k8s.io"]);
    assert!(!websocket::is_channels(&tunnel));
    assert_eq!(websocket::forward(&tunnel).unwrap().1, Agreed::Tunnel);
    let channels = offering(&["v4.channel.k8s.io"]);
    assert!(websocket::is_channels(&channels));
    let (_, Agreed::Channels(agreed)) = websocket::forward(&channels).unwrap() else {
        panic!("not channels");
    };
    assert_eq!(agreed.streams, "portforward.k8s.io");
    assert!(!agreed.has_status());
    assert!(websocket::forward(&offering(&["v5.channel.k8s.io"])).is_err());
}

#[test]
fn a_handshake_is_answered_as_the_standard_says() {
    let mut headers = offering(&[]);
    let bad = |headers: &HeaderMap| websocket::accept(&Method::GET, headers, None).is_err();
    assert!(bad(&headers));
    headers.insert("sec-websocket-version", HeaderValue::from_static("13"));
    assert!(bad(&headers));
    let key = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");
    headers.insert("sec-websocket-key", key);
    let answer = websocket::accept(&Method::GET, &headers, Some("v5.channel.k8s.io")).unwrap();
    assert_eq!(answer.status(), StatusCode::SWITCHING_PROTOCOLS);
    // The example of RFC 6455.
    assert_eq!(
        answer.headers()["sec-websocket-accept"],
        "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    );
    assert_eq!(
        answer.headers()["sec-websocket-protocol"],
        "v5.channel.k8s.io"
    );
    assert!(websocket::accept(&Method::POST, &headers, None).is_err());
}

/// Returns the input that a message in these pieces decodes to.
fn taken(encoding: Encoding, half_close: bool, pieces: &[&[u8]]) -> Vec<Incoming> {
    let mut messages = Messages::new(encoding, half_close);
    let pieces = pieces.iter().enumerate().map(|(at, bytes)| Data {
        bytes: bytes::Bytes::copy_from_slice(bytes),
        first: at == 0,
        last: at + 1 == pieces.len(),
        text: encoding == Encoding::Base64,
    });
    let taken = pieces.map(|piece| messages.take(piece));
    taken.filter(|taken| *taken != Incoming::Nothing).collect()
}

#[test]
fn messages_name_their_channel_first() {
    let sent = Encoding::Binary.encode(1, b"ab");
    assert_eq!(sent.payload(), b"\x01ab");
    let sent = Encoding::Base64.encode(1, b"ab");
    assert_eq!(sent.payload(), b"1YWI=");
    let data = |channel, data: &'static [u8]| Incoming::Data(channel, data.into());
    let binary = |half_close, pieces: &[&[u8]]| taken(Encoding::Binary, half_close, pieces);
    assert_eq!(binary(true, &[b"\0x"]), [data(0, b"x")]);
    let cut: [&[u8]; 4] = [b"", b"\0", b"xy", b"\xff"];
    let both = [data(0, b"xy"), data(0, b"\xff")];
    assert_eq!(binary(true, &cut), both);
    assert_eq!(binary(true, &[b"\xff\0"]), [Incoming::Ended(0)]);
    assert_eq!(
        binary(true, &[b"\xff", b"\x01", b"z"]),
        [Incoming::Ended(1)]
    );
    assert_eq!(binary(false, &[b"\xff\0"]), [data(255, b"\0")]);
    for nothing in [&b""[..], b"\0", b"\xff"] {
        assert!(binary(true, &[nothing]).is_empty());
    }
    let base64 = |pieces: &[&[u8]]| taken(Encoding::Base64, false, pieces);
    assert_eq!(base64(&[b"0YWI="]), [data(0, b"ab")]);
    let cut: [&[u8]; 4] = [b"0YW", b"JjZ", b"", b"A=="];
    assert_eq!(base64(&cut), [data(0, b"abc"), data(0, b"d")]);
    for nothing in ["", "0", "0?", "0YWI", "\n0"] {
        assert!(base64(&[nothing.as_bytes()]).is_empty(), "{nothing:?}");
    }
    for broken in [&b"????"[..], b"Y", b"YQ==YQ=="] {
        let taken = base64(&[b"0YWJj", broken]);
        assert_eq!(taken, [data(0, b"abc"), Incoming::Broken]);
    }
}

/// Returns the plan of an exec with every stream, without a terminal.
fn exec_plan() -> Plan {
    let streams = [
        ("error", 3, false),
        ("stdin", 0, true),
        ("stdout", 1, false),
        ("stderr", 2, false),
    ];
    Plan {
        streams: streams
            .map(|(kind, channel, input)| Stream {
                headers: vec![("streamtype", kind.to_owned())],
                channel,
                input,
                output: !input,
            })
            .into(),
        encoding: Encoding::Binary,
        half_close: true,
        greeting: vec![(1, Vec::new())],
        status: Some(3),
    }
}

/// A client, the runtime's end, and what is between them.
struct Rig {
    client: WebSocketStream<DuplexStream>,
    from: Reader<ReadHalf<DuplexStream>>,
    to: Writer<WriteHalf<DuplexStream>>,
    limits: Arc<Limits>,
    streams: OpenStreams,
    task: JoinHandle<End>,
}

/// ID of the container that the streams lead to.
const TARGET: &str = "c1";
const PIPE: usize = 16 * 1024;

fn limits() -> Limits {
    Limits {
        stop: CancellationToken::new(),
        idle_timeout: IDLE_TIMEOUT,
        open: OpenStreams::default().open(&ContainerId::new(TARGET)),
    }
}

async fn rig(plan: Plan) -> Rig {
    let (client, ours) = duplex(PIPE);
    let (theirs, runtime) = duplex(PIPE);
    let streams = OpenStreams::default();
    let limits = Arc::new(Limits {
        open: streams.open(&ContainerId::new(TARGET)),
        ..limits()
    });
    let task = tokio::spawn({
        let limits = Arc::clone(&limits);
        async move { translate(ours, RuntimeIo::new(theirs), &plan, &limits).await }
    });
    let (read, write) = split(runtime);
    Rig {
        client: WebSocketStream::from_raw_socket(client, Role::Client, None).await,
        from: Reader::new(read),
        to: Writer::new(write).unwrap(),
        limits,
        streams,
        task,
    }
}

async fn exec_rig() -> Rig {
    let mut rig = rig(exec_plan()).await;
    for _ in 0..4 {
        let frame = rig.from.next().await.unwrap().unwrap();
        assert!(matches!(frame, Frame::SynStream { .. }), "{frame:?}");
    }
    assert_eq!(rig.message().await, [1]);
    rig
}

impl Rig {
    async fn message(&mut self) -> Vec<u8> {
        loop {
            match self.client.next().await.unwrap().unwrap() {
                Message::Binary(bytes) => return bytes.to_vec(),
                Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn send(&mut self, bytes: &[u8]) {
        let message = Message::Binary(bytes.to_vec().into());
        self.client.send(message).await.unwrap();
    }

    async fn frame(&mut self) -> Frame {
        self.from.next().await.unwrap().unwrap()
    }

    async fn closed(&mut self) -> CloseCode {
        loop {
            match self.client.next().await.unwrap().unwrap() {
                Message::Close(frame) => return frame.unwrap().code,
                Message::Binary(_) | Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

fn data(stream: u32, payload: &'static [u8], fin: bool) -> Frame {
    Frame::Data {
        stream,
        payload: payload.into(),
        fin,
    }
}

#[tokio::test]
async fn channels_become_streams_and_streams_channels() {
    let mut rig = exec_rig().await;
    rig.send(&[0, b'i', b'n']).await;
    assert_eq!(rig.frame().await, data(3, b"in", false));
    // Channels that are not the client's to write on.
    rig.send(&[1, b'x']).await;
    rig.send(&[9, b'x']).await;
    rig.send(&[255, 0]).await;
    assert_eq!(rig.frame().await, data(3, b"", true));
    rig.to.data(5, b"out").await.unwrap();
    assert_eq!(rig.message().await, b"\x01out");
    rig.to.data(7, b"err").await.unwrap();
    assert_eq!(rig.message().await, b"\x02err");
    rig.to.ping(2).await.unwrap();
    assert_eq!(rig.frame().await, Frame::Ping(2));
    rig.to.data(1, b"{\"status\":\"Success\"}").await.unwrap();
    assert_eq!(rig.message().await, b"\x03{\"status\":\"Success\"}");
    rig.to.finish(5).await.unwrap();
    rig.to.reset(7, 5).await.unwrap();
    rig.to.reset(1, 5).await.unwrap();
    assert_eq!(rig.closed().await, CloseCode::Normal);
    drop(rig.client);
    assert_eq!(rig.task.await.unwrap(), End::Finished);
}

#[tokio::test]
async fn an_end_the_runtime_does_not_tell_is_a_failure() {
    let mut rig = exec_rig().await;
    rig.to.shutdown().await.unwrap();
    let status = rig.message().await;
    assert_eq!(status[0], 3);
    let status: serde_json::Value = serde_json::from_slice(&status[1..]).unwrap();
    assert_eq!(status["status"], "Failure");
    assert_eq!(status["reason"], "InternalError");
    assert_eq!(rig.closed().await, CloseCode::Error);
}

#[tokio::test]
async fn the_agents_end_is_told() {
    let mut rig = exec_rig().await;
    rig.limits.stop.cancel();
    assert_eq!(rig.message().await[0], 3);
    assert_eq!(rig.closed().await, CloseCode::Away);
    assert_eq!(rig.task.await.unwrap(), End::Stopped);
    assert!(rig.from.next().await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_stops_the_runtime_and_not_the_end() {
    let Rig {
        client,
        mut to,
        limits,
        task,
        ..
    } = exec_rig().await;
    let sent = tokio::spawn(async move {
        let (chunk, mut sent) = (vec![7; 8 * 1024], 0);
        while let Ok(Ok(())) =
            tokio::time::timeout(Duration::from_secs(30), to.data(5, &chunk)).await
        {
            sent += chunk.len();
        }
        sent
    });
    let sent = sent.await.unwrap();
    assert!(
        sent < 256 * 1024,
        "{sent} bytes gathered for a client that does not read"
    );
    assert!(!task.is_finished());
    limits.stop.cancel();
    let before = tokio::time::Instant::now();
    assert_eq!(task.await.unwrap(), End::Stopped);
    assert!(before.elapsed() < Duration::from_secs(2));
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_takes_no_input_stops_the_client_and_not_the_output() {
    let Rig {
        client,
        mut to,
        from: _from,
        limits: _limits,
        task: _task,
        ..
    } = exec_rig().await;
    let (mut send, mut receive) = client.split();
    let writer = tokio::spawn(async move {
        let mut sent = 0;
        loop {
            let message = Message::Binary(vec![0; 8 * 1024].into());
            match tokio::time::timeout(Duration::from_secs(30), send.send(message)).await {
                Ok(Ok(())) => sent += 8 * 1024,
                _ => return sent,
            }
        }
    });
    let sent = writer.await.unwrap();
    assert!(
        sent < 256 * 1024,
        "{sent} bytes gathered for a runtime that does not read"
    );
    to.ping(4).await.unwrap();
    to.data(5, b"still").await.unwrap();
    loop {
        match receive.next().await.unwrap().unwrap() {
            Message::Binary(bytes) => {
                assert_eq!(&bytes[..], b"\x01still");
                return;
            }
            Message::Ping(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// The head of a message of a client's with so many bytes, and the mask that changes nothing.
fn long_message(length: u64) -> Vec<u8> {
    let mut head = vec![0x82, 0xff];
    head.extend(length.to_be_bytes());
    head.extend([0; 4]);
    head
}

#[tokio::test(start_paused = true)]
async fn a_long_message_is_carried_as_it_comes() {
    let mut rig = exec_rig().await;
    let client = rig.client.get_mut();
    let mut sent = long_message(16 << 20);
    sent.extend(b"\0the beginning");
    client.write_all(&sent).await.unwrap();
    let carried = tokio::time::timeout(Duration::from_secs(30), rig.frame()).await;
    let carried = carried.expect("the message is waited for as a whole");
    assert_eq!(carried, data(3, b"the beginning", false));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_takes_no_input_stops_a_long_message() {
    let mut rig = exec_rig().await;
    let client = rig.client.get_mut();
    let mut sent = long_message(16 << 20);
    sent.resize(8 * 1024, 0);
    let mut taken = 0;
    while let Ok(Ok(())) =
        tokio::time::timeout(Duration::from_secs(30), client.write_all(&sent)).await
    {
        taken += sent.len();
        assert!(
            taken < 256 * 1024,
            "a message gathers for a runtime that does not read"
        );
        sent.fill(0);
    }
    assert!(!rig.task.is_finished());
}

#[tokio::test]
async fn a_ping_of_the_client_is_answered_also_within_a_message() {
    let mut rig = exec_rig().await;
    let frames = [
        &[0x02, 0x82, 0, 0, 0, 0, 0, b'a'][..],
        &[0x89, 0x81, 0, 0, 0, 0, b'?'],
        &[0x80, 0x81, 0, 0, 0, 0, b'b'],
    ];
    rig.client
        .get_mut()
        .write_all(&frames.concat())
        .await
        .unwrap();
    assert_eq!(rig.frame().await, data(3, b"a", false));
    assert_eq!(rig.frame().await, data(3, b"b", false));
    let pong = rig.client.next().await.unwrap().unwrap();
    assert_eq!(pong, Message::Pong("?".into()));
}

#[tokio::test(start_paused = true)]
async fn silence_ends_a_stream_and_data_keeps_it() {
    let mut rig = exec_rig().await;
    for _ in 0..3 {
        tokio::time::sleep(IDLE_TIMEOUT - Duration::from_secs(60)).await;
        rig.to.data(5, b"x").await.unwrap();
        assert_eq!(rig.message().await, b"\x01x");
    }
    assert_eq!(rig.message().await[0], 3);
    assert_eq!(rig.closed().await, CloseCode::Away);
    drop(rig.client);
    assert_eq!(rig.task.await.unwrap(), End::Idle);
}

#[tokio::test]
async fn a_message_that_is_too_long_is_refused() {
    let mut rig = exec_rig().await;
    let (mut send, mut receive) = rig.client.split();
    let huge = Message::Binary(vec![0; (32 << 20) + 1].into());
    let sending = tokio::spawn(async move { send.send(huge).await });
    let code = loop {
        match receive.next().await.unwrap().unwrap() {
            Message::Close(frame) => break frame.unwrap().code,
            Message::Binary(_) => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(code, CloseCode::Size);
    drop(sending);
    rig.limits.stop.cancel();
    assert!(rig.from.next().await.is_ok_and(|frame| frame.is_none()));
}

#[test]
fn streams_are_those_that_were_asked_for() {
    let v5 = Channels {
        encoding: Encoding::Binary,
        streams: "v4.channel.k8s.io",
        half_close: true,
    };
    let kinds = |streams, channels| -> Vec<String> {
        plan(&Call::Exec(streams, Vec::new()), channels)
            .streams
            .into_iter()
            .map(|stream| stream.headers[0].1.clone())
            .collect()
    };
    let tty = Streams {
        stdin: true,
        stdout: true,
        stderr: false,
        tty: true,
    };
    let no_tty = Streams {
        stderr: true,
        tty: false,
        ..tty
    };
    assert_eq!(kinds(no_tty, v5), ["error", "stdin", "stdout", "stderr"]);
    assert_eq!(kinds(tty, v5), ["error", "stdin", "stdout", "resize"]);
    let v2 = Channels {
        streams: "v2.channel.k8s.io",
        ..v5
    };
    assert_eq!(kinds(tty, v2), ["error", "stdin", "stdout"]);
}

#[tokio::test]
async fn ports_have_two_channels_each() {
    let channels = Channels {
        encoding: Encoding::Binary,
        streams: "portforward.k8s.io",
        half_close: false,
    };
    let mut rig = rig(plan(&Call::PortForward(vec![80, 8080]), channels)).await;
    let mut opened = Vec::new();
    for _ in 0..4 {
        let Frame::SynStream {
            stream, headers, ..
        } = rig.frame().await
        else {
            panic!("not opened");
        };
        let values: Vec<_> = headers.into_iter().map(|(_, value)| value).collect();
        opened.push((stream, values.join(" ")));
    }
    let expected = [
        (1, "error 80 0"),
        (3, "data 80 0"),
        (5, "error 8080 1"),
        (7, "data 8080 1"),
    ];
    assert_eq!(opened, expected.map(|(id, text)| (id, text.to_owned())));
    for (channel, port) in [(0, 80u16), (1, 80), (2, 8080), (3, 8080)] {
        let [low, high] = port.to_le_bytes();
        assert_eq!(rig.message().await, [channel, low, high]);
    }
    rig.send(&[2, b'x']).await;
    assert_eq!(rig.frame().await, data(7, b"x", false));
    rig.to.data(3, b"y").await.unwrap();
    assert_eq!(rig.message().await, [0, b'y']);
    rig.to.data(5, b"refused").await.unwrap();
    assert_eq!(rig.message().await, b"\x03refused");
    for stream in [1, 3, 5, 7] {
        rig.to.finish(stream).await.unwrap();
    }
    assert_eq!(rig.closed().await, CloseCode::Normal);
}

#[tokio::test]
async fn a_tunnel_carries_bytes_in_messages() {
    let (client, ours) = duplex(PIPE);
    let (theirs, mut runtime) = duplex(PIPE);
    let limits = limits();
    let stop = limits.stop.clone();
    let task = tokio::spawn(async move { tunnel(ours, RuntimeIo::new(theirs), &limits).await });
    let mut client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
    client.send(Message::Binary("ping".into())).await.unwrap();
    let mut bytes = [0; 4];
    runtime.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"ping");
    runtime.write_all(b"pong").await.unwrap();
    assert_eq!(
        client.next().await.unwrap().unwrap(),
        Message::Binary("pong".into())
    );
    stop.cancel();
    let Message::Close(Some(frame)) = client.next().await.unwrap().unwrap() else {
        panic!("not closed");
    };
    assert_eq!(frame.code, CloseCode::Away);
    assert_eq!(task.await.unwrap(), End::Stopped);
}

#[tokio::test]
async fn a_relay_delivers_everything_before_it_ends() {
    let (mut client, ours) = duplex(PIPE);
    let (theirs, mut runtime) = duplex(PIPE);
    let task = tokio::spawn(async move { relay(ours, RuntimeIo::new(theirs), &limits()).await });
    client.write_all(b"head").await.unwrap();
    let mut head = [0; 4];
    runtime.read_exact(&mut head).await.unwrap();
    let sender = tokio::spawn(async move {
        runtime.write_all(&vec![7; 1 << 20]).await.unwrap();
        // Gone with everything under way.
    });
    let mut all = Vec::new();
    client.read_to_end(&mut all).await.unwrap();
    sender.await.unwrap();
    assert_eq!(all.len(), 1 << 20);
    drop(client);
    assert_eq!(task.await.unwrap(), End::Finished);
}

#[tokio::test]
async fn a_relay_ends_with_its_client_and_with_the_agent() {
    for by_client in [true, false] {
        let (client, ours) = duplex(PIPE);
        let (theirs, mut runtime) = duplex(PIPE);
        let limits = limits();
        let stop = limits.stop.clone();
        let task = tokio::spawn(async move { relay(ours, RuntimeIo::new(theirs), &limits).await });
        let mut kept = None;
        if by_client {
            drop(client);
        } else {
            kept = Some(client);
            stop.cancel();
        }
        assert_eq!(runtime.read(&mut [0]).await.unwrap(), 0);
        drop(runtime);
        if let Some(mut client) = kept {
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
            assert_eq!(task.await.unwrap(), End::Stopped);
        } else {
            task.await.unwrap();
        }
    }
}

/// Some runtimes do not end a stream whose client has ended its side.
#[tokio::test(start_paused = true)]
async fn a_relay_ends_soon_after_its_client_whatever_the_runtime_does() {
    let (mut client, ours) = duplex(PIPE);
    let (theirs, mut runtime) = duplex(PIPE);
    let task = tokio::spawn(async move { relay(ours, RuntimeIo::new(theirs), &limits()).await });
    client.shutdown().await.unwrap();
    assert_eq!(runtime.read(&mut [0]).await.unwrap(), 0);
    // What comes meanwhile is delivered.
    runtime.write_all(b"late").await.unwrap();
    let mut late = [0; 4];
    client.read_exact(&mut late).await.unwrap();
    let end = tokio::time::timeout(Duration::from_secs(15), task).await;
    assert_eq!(end.expect("no end").unwrap(), End::ClientGone);
    assert!(runtime.write_all(b"too late").await.is_err());
}

/// A client that reads nothing, and a runtime that has more than the pipes hold.
#[tokio::test(start_paused = true)]
async fn a_stopped_container_ends_the_streams_of_clients_that_do_not_read() {
    let streams = OpenStreams::default();
    let id = ContainerId::new(TARGET);
    let limits = Arc::new(Limits {
        open: streams.open(&id),
        ..limits()
    });
    let (client, ours) = duplex(PIPE);
    let (theirs, mut runtime) = duplex(PIPE);
    let task = tokio::spawn({
        let limits = Arc::clone(&limits);
        async move { relay(ours, RuntimeIo::new(theirs), &limits).await }
    });
    let second = Duration::from_secs(1);
    let all = vec![b'y'; 1 << 20];
    let stuck = tokio::time::timeout(second, runtime.write_all(&all)).await;
    assert!(stuck.is_err());
    let stopping = streams.stopping(&id);
    stopping.cut();
    let written = tokio::time::timeout(second, runtime.write_all(&all)).await;
    assert!(written.expect("no end").is_err(), "its connection is gone");
    assert_eq!(task.await.unwrap(), End::TargetStopped);
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn who_reads_is_told_that_the_container_is_stopped() {
    let mut rig = exec_rig().await;
    for stream in [1, 3, 5, 7] {
        rig.to.accept(stream).await.unwrap();
    }
    rig.to.data(5, b"last words").await.unwrap();
    assert_eq!(rig.message().await, b"\x01last words");
    let stopping = rig.streams.stopping(&ContainerId::new(TARGET));
    stopping.ended();
    // What is on its way still comes.
    rig.to.data(5, b"and more").await.unwrap();
    assert_eq!(rig.message().await, b"\x01and more");
    let status = rig.message().await;
    let text = String::from_utf8_lossy(&status).into_owned();
    assert!(text.contains("is stopped"), "{text}");
    assert_eq!(rig.closed().await, CloseCode::Away);
    drop(rig.client);
    assert_eq!(rig.task.await.unwrap(), End::TargetStopped);
}

/// A runtime that is late with its answers to the streams: the client leaves before them.
#[tokio::test(start_paused = true)]
async fn the_runtimes_connection_stays_until_it_has_answered_every_stream() {
    let mut rig = exec_rig().await;
    drop(rig.client);
    let second = Duration::from_secs(1);
    let early = tokio::time::timeout(second, rig.from.next()).await;
    assert!(early.is_err(), "closed before the answers: {early:?}");
    for stream in [1, 3, 5, 7] {
        rig.to.accept(stream).await.unwrap();
    }
    assert!(rig.from.next().await.unwrap().is_none());
    assert_eq!(rig.task.await.unwrap(), End::ClientGone);
}

//! WebSocket clients: our own on the node's port, and kube's through the API server.

use futures::{SinkExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, AttachParams};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_tungstenite::tungstenite::Message;

use crate::client::{noise, sha256};
use crate::direct::{CLOSE, Direct, ERROR, RESIZE, STDIN, STDOUT, command};
use crate::node::{Node, shared};
use crate::setup::{FOREVER, script};

const V5: &str = "v5.channel.k8s.io";
const V4: &str = "v4.channel.k8s.io";

fn path(node: &Node, verb: &str, pod: &str, query: &str) -> String {
    format!("/{verb}/{}/{pod}/main?{query}", node.namespace)
}

#[test]
fn version_5_ends_stdin_alone_and_gives_the_status() {
    let node = shared();
    node.create_pod("sockets", script("Always", FOREVER));
    node.wait_running("sockets");
    let direct = Direct::admin(&node);
    node.run(async {
        // Nothing comes before the input has ended: the sum is of all of it.
        let data = noise(5, 8 * 1024 * 1024);
        let query = format!(
            "input=1&output=1&error=1&{}",
            command(&["sh", "-c", "sha256sum; echo done >&2; exit 3"])
        );
        let mut socket = direct
            .websocket(&path(&node, "exec", "sockets", &query), V5)
            .await
            .expect("a socket");
        for chunk in data.chunks(30_000) {
            socket.send(STDIN, chunk).await;
        }
        socket.send(CLOSE, &[STDIN]).await;
        let (out, err, status) = socket.rest().await;
        assert_eq!(
            String::from_utf8_lossy(&out),
            format!("{}  -\n", sha256(&data))
        );
        assert_eq!(String::from_utf8_lossy(&err), "done\n");
        assert_eq!(status["status"], "Failure", "{status}");
        assert_eq!(status["reason"], "NonZeroExitCode", "{status}");
        assert_eq!(
            status["details"]["causes"][0]["reason"], "ExitCode",
            "{status}"
        );
        assert_eq!(status["details"]["causes"][0]["message"], "3", "{status}");

        // Version 4 knows no half end.
        let query = format!("output=1&error=1&{}", command(&["echo", "hello"]));
        for protocol in [V4, V5] {
            let mut socket = direct
                .websocket(&path(&node, "exec", "sockets", &query), protocol)
                .await
                .expect("a socket");
            let (out, _, status) = socket.rest().await;
            assert_eq!(out, b"hello\n");
            assert_eq!(status["status"], "Success", "{status}");
        }
    });
}

#[test]
fn a_terminal_is_resized() {
    let node = shared();
    node.create_pod("resized", script("Always", FOREVER));
    node.wait_running("resized");
    let direct = Direct::admin(&node);
    node.run(async {
        let query = format!("input=1&output=1&tty=1&{}", command(&["sh"]));
        let mut socket = direct
            .websocket(&path(&node, "exec", "resized", &query), V5)
            .await
            .expect("a socket");
        for (width, height) in [(100, 40), (80, 25)] {
            let size = format!("{{\"Width\":{width},\"Height\":{height}}}");
            socket.send(RESIZE, size.as_bytes()).await;
            let mut text = String::new();
            while !text.contains(&format!("{height} {width}\r\n")) {
                socket.send(STDIN, b"stty size; sleep 0.2\n").await;
                text += &String::from_utf8_lossy(&socket.next_on(STDOUT).await);
            }
        }
        socket.send(STDIN, b"exit 0\n").await;
        let (_, _, status) = socket.rest().await;
        assert_eq!(status["status"], "Success", "{status}");
    });
}

#[test]
fn logs_and_a_running_container_are_seen_as_well() {
    let node = shared();
    let ticks = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.3; done";
    node.create_pod("seen", script("Always", ticks));
    node.wait_running("seen");
    let direct = Direct::admin(&node);
    node.run(async {
        let mut socket = direct
            .websocket(&path(&node, "attach", "seen", "output=1"), V5)
            .await
            .expect("a socket");
        let text = socket.next_on(STDOUT).await;
        assert!(text.starts_with(b"tick "), "{text:?}");
        drop(socket);
        let (status, text) = direct
            .ask(
                "GET",
                &format!("/containerLogs/{}/seen/main?limitBytes=7", node.namespace),
            )
            .await
            .expect("logs");
        assert_eq!((status, text.as_str()), (200, "tick 1\n"));
        // What runs once and is done: no stream at all.
        let path = format!("/run/{}/seen/main?cmd=echo%20once", node.namespace);
        let (status, text) = direct.ask("POST", &path).await.expect("a run");
        assert_eq!((status, text.as_str()), (200, "once\n"));
        // Streams need a client that can stream.
        let query = command(&["echo", "no"]);
        let plain = direct
            .ask(
                "GET",
                &format!("/exec/{}/seen/main?output=1&{query}", node.namespace),
            )
            .await;
        assert_eq!(
            plain.expect("a refusal"),
            (500, "Upgrade request required".to_owned())
        );
        // What is not there.
        for (pod, container) in [("missing", "main"), ("seen", "missing")] {
            let path = format!(
                "/exec/{}/{pod}/{container}?output=1&{query}",
                node.namespace
            );
            let refused = direct.websocket(&path, V5).await.err();
            assert_eq!(refused, Some(404), "{path}");
        }
    });
}

#[test]
fn reading_and_writing_at_the_same_time_neither_stalls_nor_mixes() {
    let node = shared();
    node.create_pod("duplex", script("Always", FOREVER));
    node.wait_running("duplex");
    let direct = Direct::admin(&node);
    node.run(async {
        let data = noise(77, 16 * 1024 * 1024);
        let query = format!("input=1&output=1&{}", command(&["cat"]));
        let socket = direct
            .websocket(&path(&node, "exec", "duplex", &query), V5)
            .await
            .expect("a socket");
        let (mut writer, mut reader) = socket.into_inner().split();
        let writing = async {
            for chunk in data.chunks(100_000) {
                let message = [&[STDIN], chunk].concat();
                writer.send(Message::binary(message)).await.expect("send");
            }
            let end = Message::binary(vec![CLOSE, STDIN]);
            writer.send(end).await.expect("send");
        };
        let reading = async {
            let mut back = Vec::new();
            while let Some(Ok(message)) = reader.next().await {
                if let Message::Binary(bytes) = message {
                    match bytes[0] {
                        STDOUT => back.extend_from_slice(&bytes[1..]),
                        ERROR => assert!(bytes.windows(7).any(|w| w == b"Success"), "{bytes:?}"),
                        other => assert_eq!(bytes.len(), 1, "channel {other}"),
                    }
                }
            }
            back
        };
        let ((), back) = futures::join!(writing, reading);
        assert!(back == data, "{} bytes of {}", back.len(), data.len());
    });
}

#[test]
fn kubes_own_client_comes_through_the_api_server() {
    let node = shared();
    node.create_pod("library", script("Always", FOREVER));
    node.wait_running("library");
    let pods: Api<Pod> = node.api();
    node.run(async {
        let params = AttachParams::default()
            .stdin(true)
            .stdout(true)
            .stderr(false);
        let mut process = pods
            .exec("library", ["head", "-c", "11"], &params)
            .await
            .expect("exec");
        let mut stdin = process.stdin().expect("stdin");
        let mut stdout = process.stdout().expect("stdout");
        let status = process.take_status().expect("a status to come");
        stdin
            .write_all(b"hello there, and more")
            .await
            .expect("write");
        let mut text = String::new();
        stdout.read_to_string(&mut text).await.expect("read");
        assert_eq!(text, "hello there");
        assert_eq!(
            status.await.expect("a status").status.as_deref(),
            Some("Success")
        );
    });
}

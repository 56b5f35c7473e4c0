//! `kubectl port-forward`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::agent_process::eventually;
use crate::client::{Kubectl, noise, sha256};
use crate::node::{Node, shared};
use crate::setup::script;

/// Connections at the same time. The pod's server of pages keeps 9 that it has not accepted yet; what comes on top the
/// kernel may reset, and a reset connection on which data is under way holds up all others of its kubectl: neither
/// kubectl 1.20 nor containerd 1.6 reads on what nobody wants any more.
const AT_ONCE: u16 = 8;

/// A pod that serves a page on 8080, echoes on 7000 and the ports after it, which take one connection at a time each,
/// and gives a gibibyte on 9000: one block of 1 MiB from standard input of the test, again and again.
fn serve(node: &Node, pod: &str) {
    node.create_pod(
        pod,
        script(
            "Always",
            "mkdir /www; echo hello from afar > /www/index.html; httpd -p 127.0.0.1:8080 -h /www
             printf '#!/bin/sh\\ni=0; while [ $i -lt 1024 ]; do cat /tmp/block; i=$((i+1)); done\\n' > /give
             chmod +x /give
             i=0; while [ $i -lt 16 ]; do nc -ll -p $((7000+i)) -e cat & i=$((i+1)); done
             nc -ll -p 9000 -e /give &
             until [ $(cat /proc/net/tcp /proc/net/tcp6 | grep -c ' 0A ') = 18 ]; do sleep 0.1; done
             echo all listen; wait",
        ),
    );
    node.wait_running(pod);
    eventually("the pod listens", || {
        match node.ok(&["logs", pod]).contains("all listen") {
            true => Ok(()),
            false => Err("not yet".to_owned()),
        }
    });
}

/// Begins to forward; returns the local ports in the order of the remote ones.
fn forward(node: &Node, pod: &str, ports: &[&str]) -> (Kubectl, Vec<u16>) {
    let mut arguments = vec!["port-forward", pod];
    arguments.extend(ports);
    let mut kubectl = node.start_kubectl(&arguments);
    let local = ports
        .iter()
        .map(|port| {
            let port = port.trim_start_matches(':');
            let arrow = format!(" -> {port}\n");
            let text = kubectl.wait_stdout(&arrow);
            let line = text.lines().find(|l| format!("{l}\n").ends_with(&arrow));
            let local = line.and_then(|l| l.split("127.0.0.1:").nth(1)?.split(' ').next());
            local.expect("a local port").parse().expect("a port")
        })
        .collect();
    (kubectl, local)
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("connect to kubectl");
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a limit");
    stream
}

const PAGE: &str = "hello from afar\n";

/// Asks for the page and goes as soon as it is there: the runtime waits half a second for a client that stays.
fn page(port: u16) -> String {
    let mut stream = connect(port);
    stream
        .write_all(b"GET /index.html HTTP/1.0\r\n\r\n")
        .expect("ask");
    let mut answer = Vec::new();
    let mut buffer = [0; 1024];
    while !answer.ends_with(PAGE.as_bytes()) {
        match stream.read(&mut buffer).expect("an answer") {
            0 => break,
            count => answer.extend_from_slice(&buffer[..count]),
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_thousand_short_connections_are_all_answered() {
    let node = shared();
    serve(&node, "page");
    let (_kubectl, ports) = forward(&node, "page", &[":8080"]);
    let begin = Instant::now();
    let next = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while next.fetch_add(1, Ordering::Relaxed) < 1000 {
                    let answer = page(ports[0]);
                    assert!(answer.starts_with("HTTP/1"), "{answer:?}");
                    assert!(answer.ends_with(PAGE), "{answer:?}");
                }
            });
        }
    });
    println!("port-forward: 1000 connections in {:.1?}", begin.elapsed());
}

#[test]
fn a_gibibyte_arrives_unharmed() {
    const BLOCK: usize = 1024 * 1024;
    let node = shared();
    serve(&node, "giver");
    let block = noise(9, BLOCK);
    // With an `echo` after it: containerd closes standard input as soon as standard output is closed, which the
    // redirection would do.
    let arguments = [
        "exec",
        "-i",
        "giver",
        "--",
        "sh",
        "-c",
        "cat > /tmp/block; echo written",
    ];
    let outcome = node.run_kubectl_with(&arguments, block.clone());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let sum = node.ok(&["exec", "giver", "--", "sha256sum", "/tmp/block"]);
    assert!(sum.starts_with(&sha256(&block)), "{sum}");
    let (_kubectl, ports) = forward(&node, "giver", &[":9000"]);
    let begin = Instant::now();
    let mut stream = connect(ports[0]);
    let mut buffer = vec![0; BLOCK];
    for number in 0..1024 {
        stream.read_exact(&mut buffer).expect("a block");
        if buffer != block {
            let at = buffer.iter().zip(&block).position(|(a, b)| a != b);
            let there = at.and_then(|at| {
                let piece = &buffer[at..buffer.len().min(at + 64)];
                block
                    .windows(piece.len())
                    .position(|window| window == piece)
            });
            panic!("block {number} differs at {at:?}; there comes what is at {there:?}");
        }
    }
    assert_eq!(
        stream.read(&mut buffer).expect("the end"),
        0,
        "there is more"
    );
    println!("port-forward: 1 GiB in {:.1?}", begin.elapsed());
}

#[test]
fn connections_at_the_same_time_do_not_mix() {
    let node = shared();
    let (mut kubectl, page_port, nobody) = side_by_side(&node);
    // That connection ends, others go on. A newer kubectl gives up then.
    let mut refused = connect(nobody);
    let mut nothing = Vec::new();
    drop(refused.write_all(b"anybody?"));
    drop(refused.read_to_end(&mut nothing));
    assert!(nothing.is_empty(), "{nothing:?}");
    assert!(!kubectl.ended(), "{}", kubectl.stderr());
    let answer = page(page_port);
    assert!(answer.ends_with(PAGE), "{answer:?}");
    assert!(kubectl.stderr().contains("refused"), "{}", kubectl.stderr());
}

/// Leaves a kubectl that forwards, and its ports for the page and for one on which nobody listens.
pub fn side_by_side(node: &Node) -> (Kubectl, u16, u16) {
    serve(node, "echo");
    let echoes: Vec<String> = (7000..7016).map(|port| format!(":{port}")).collect();
    let mut wanted: Vec<&str> = echoes.iter().map(String::as_str).collect();
    wanted.extend([":8080", ":1"]);
    let (kubectl, ports) = forward(node, "echo", &wanted);
    let (echoes, others) = ports.split_at(echoes.len());
    std::thread::scope(|scope| {
        for (n, port) in (0..).zip(echoes) {
            scope.spawn(move || {
                let data = noise(n + 1000, 500_000);
                let stream = connect(*port);
                let mut writer = stream.try_clone().expect("share the stream");
                let sent = data.clone();
                let writing = std::thread::spawn(move || {
                    writer.write_all(&sent).expect("send");
                });
                let mut stream = stream;
                let mut back = vec![0; data.len()];
                stream.read_exact(&mut back).expect("receive");
                writing.join().expect("send");
                assert!(back == data, "{n} got something else");
            });
        }
    });
    let answer = page(others[0]);
    assert!(answer.ends_with(PAGE), "{answer:?}");
    (kubectl, others[0], others[1])
}

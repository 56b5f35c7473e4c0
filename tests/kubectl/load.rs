//! Many clients at once: nothing is lost, memory stays bounded, and pods start as before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use futures::StreamExt;
use serde_json::json;

use crate::agent_process::eventually;
use crate::direct::{Direct, STDIN, STDOUT, command};
use crate::node::Node;
use crate::setup::{FOREVER, container, script};

const FOLLOWERS: usize = 200;
const EXECS: usize = 50;
const PODS: usize = 4;
const LINES: usize = 3000;

/// Resident memory of the agent in KiB: all of it, and what is not its own code.
fn resident(node: &Node) -> (u64, u64) {
    let pid = node.agent().as_ref().expect("an agent").pid();
    let status = procfs::process::Process::new(i32::try_from(pid).unwrap())
        .and_then(|p| p.status())
        .expect("the agent runs");
    let anonymous = status.rssanon.expect("memory");
    (status.vmrss.expect("memory"), anonymous)
}

/// How long static pods take from their manifest to their first command, one after another.
fn starts(node: &Node, stem: &str) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..3)
        .map(|n| {
            let name = format!("{stem}-{n}");
            let text = format!("echo here >> /starts/{name}; {FOREVER}");
            let spec = node.marked(json!({
                "restartPolicy": "Always",
                "terminationGracePeriodSeconds": 1,
                "containers": [container("main", &text)],
            }));
            let begin = Instant::now();
            node.add_static(&name, spec);
            eventually(&format!("{name} has started"), || {
                if node.lines(&name).is_empty() {
                    Err("not yet".to_owned())
                } else {
                    Ok(())
                }
            });
            begin.elapsed()
        })
        .collect();
    times.sort();
    times
}

/// Follows a log from its first line to its last; returns what was wrong.
async fn follow(direct: Direct, path: String) -> Result<(), String> {
    let answer = direct.send("GET", &path).await?;
    if answer.status() != 200 {
        return Err(format!("{path}: {}", answer.status()));
    }
    let mut body = Body::new(answer.into_body()).into_data_stream();
    let (mut next, mut rest) = (0, Vec::new());
    while next < LINES {
        let chunk = tokio::time::timeout(Duration::from_secs(120), body.next()).await;
        let chunk = chunk.map_err(|_| format!("{path}: nothing comes after line {next}"))?;
        let chunk = chunk.ok_or(format!("{path}: ended after line {next}"))?;
        rest.extend(chunk.map_err(|e| format!("{path}: after line {next}: {e}"))?);
        let mut begin = 0;
        while let Some(length) = rest[begin..].iter().position(|&b| b == b'\n') {
            let line = &rest[begin..begin + length];
            if line != format!("line {next} of the load").as_bytes() {
                return Err(format!(
                    "{path}: not line {next}: {:?}",
                    String::from_utf8_lossy(line)
                ));
            }
            next += 1;
            begin += length + 1;
        }
        rest.drain(..begin);
    }
    Ok(())
}

/// Sends lines to a `cat` and awaits each; returns the longest wait.
async fn talk(
    direct: Direct,
    path: String,
    stop: Arc<AtomicBool>,
    talks: Arc<AtomicU64>,
) -> Duration {
    let mut socket = direct
        .websocket(&path, "v5.channel.k8s.io")
        .await
        .expect("a socket");
    let mut longest = Duration::ZERO;
    for number in 0.. {
        let line = format!("word {number}\n");
        let begin = Instant::now();
        socket.send(STDIN, line.as_bytes()).await;
        let mut back = Vec::new();
        while back.len() < line.len() {
            back.extend(socket.next_on(STDOUT).await);
        }
        assert_eq!(back, line.as_bytes());
        longest = longest.max(begin.elapsed());
        talks.fetch_add(1, Ordering::Relaxed);
        if stop.load(Ordering::Relaxed) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    longest
}

#[test]
fn many_followers_and_execs_lose_nothing_and_hold_nothing_up() {
    let node = Node::with_usual_logs();
    // A hundred lines, then a pause: 3000 lines in some fifteen seconds.
    let writes = format!(
        "i=0; while [ $i -lt {LINES} ]; do echo line $i of the load; i=$((i+1)); \
         [ $((i % 100)) -ne 0 ] || sleep 0.5; done; {FOREVER}"
    );
    node.create_pod("target", script("Always", FOREVER));
    node.wait_running("target");
    let quiet = starts(&node, "quiet");
    let direct = Direct::admin(&node);
    let at_rest = resident(&node);

    let clients = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime for the clients");
    let stop = Arc::new(AtomicBool::new(false));
    let talks = Arc::new(AtomicU64::new(0));
    let begin = Instant::now();
    let execs: Vec<_> = (0..EXECS)
        .map(|_| {
            let query = format!("input=1&output=1&{}", command(&["cat"]));
            let path = format!("/exec/{}/target/main?{query}", node.namespace);
            clients.spawn(talk(
                direct.clone(),
                path,
                Arc::clone(&stop),
                Arc::clone(&talks),
            ))
        })
        .collect();
    eventually("all execs talk", || {
        let count = talks.load(Ordering::Relaxed);
        if count >= EXECS as u64 {
            Ok(())
        } else {
            Err(count.to_string())
        }
    });
    println!("load: {EXECS} execs talk after {:.1?}", begin.elapsed());
    for n in 0..PODS {
        node.create_pod(&format!("writer-{n}"), script("Always", &writes));
    }
    for n in 0..PODS {
        node.wait_started(&format!("writer-{n}"));
    }
    let followers: Vec<_> = (0..FOLLOWERS)
        .map(|n| {
            let path = format!(
                "/containerLogs/{}/writer-{}/main?follow=true",
                node.namespace,
                n % PODS
            );
            clients.spawn(follow(direct.clone(), path))
        })
        .collect();
    let busy = starts(&node, "busy");
    let (mut most, mut most_anonymous) = (0, 0);
    while followers.iter().any(|f| !f.is_finished()) {
        let (all, anonymous) = resident(&node);
        most = most.max(all);
        most_anonymous = most_anonymous.max(anonymous);
        std::thread::sleep(Duration::from_millis(100));
    }
    for follower in followers {
        let result = clients.block_on(follower).expect("a follower");
        result.unwrap_or_else(|wrong| panic!("{wrong}"));
    }
    let talked = talks.load(Ordering::Relaxed);
    stop.store(true, Ordering::Relaxed);
    let waits: Vec<Duration> = execs
        .into_iter()
        .map(|exec| clients.block_on(exec).expect("an exec"))
        .collect();
    let longest = waits.into_iter().max().expect("execs");
    println!(
        "load: {} lines and {talked} exchanges in {:.1?}; longest exchange {longest:.1?}; \
         resident {} MiB, at most {} MiB ({} MiB and {} MiB without code); a static pod's start {:.1?} at rest, {:.1?} under load",
        FOLLOWERS * LINES,
        begin.elapsed(),
        at_rest.0 / 1024,
        most / 1024,
        at_rest.1 / 1024,
        most_anonymous / 1024,
        quiet[1],
        busy[1],
    );
    // Code differs by build, data hardly; the whole counts for a release build (HOLDFAST_BIN).
    assert!(
        most_anonymous <= 76 * 1024,
        "the agent holds {} MiB beside its code",
        most_anonymous / 1024
    );
    if std::env::var_os("HOLDFAST_BIN").is_some() {
        assert!(most <= 80 * 1024, "the agent holds {} MiB", most / 1024);
    }
    assert!(
        longest < Duration::from_secs(30),
        "an exec waited {longest:?}"
    );
    assert!(
        busy[1] < quiet[1] + Duration::from_secs(20),
        "starts take {busy:?} instead of {quiet:?}"
    );
    // What is gone leaves nothing behind.
    eventually("connections are gone", || {
        let pid = node.agent().as_ref().expect("an agent").pid();
        let count = std::fs::read_dir(format!("/proc/{pid}/fd"))
            .expect("open files")
            .count();
        if count < 150 {
            Ok(())
        } else {
            Err(format!("{count} open files"))
        }
    });
}

//! The newest kubectl and the newest runtime there are for tests: a user does the same and sees the same. This kubectl asks
//! for WebSockets first, which an old API server hands through to the node. (It adds containers, `kubectl debug`, by an API
//! that servers have from 1.23 on.)

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::eventually;
use crate::direct::Direct;
use crate::node::Node;
use crate::setup::{FOREVER, script};
use crate::{attach, copy, exec, forward, logs, top};

/// What users do, by its name.
type Doing = (&'static str, fn(&Node));

#[test]
fn the_newest_kubectl_and_runtime_do_the_same() {
    let node = Node::newest();
    let node = &node;
    who_is_who(node);
    // Beside each other: most of them wait.
    let paths: [Doing; 11] = [
        ("attach::come_and_go", attach::come_and_go),
        ("attach::given_once", attach::given_once),
        ("attach::console", attach::console),
        ("copy::there_and_back", copy::there_and_back),
        ("exec::cannot_be_run", exec::cannot_be_run),
        ("exec::codes_and_outputs", exec::codes_and_outputs),
        ("exec::many", exec::many),
        ("exec::shell", exec::shell),
        ("forward::side_by_side", |node| {
            drop(forward::side_by_side(node))
        }),
        ("logs::followed", logs::followed),
        ("logs::run_before", logs::run_before),
    ];
    let failed: Vec<&str> = std::thread::scope(|scope| {
        let running = paths.map(|(name, path)| {
            let timed = move || {
                let begin = Instant::now();
                path(node);
                println!("{name} took {:.1?}", begin.elapsed());
            };
            (name, scope.spawn(timed))
        });
        let ended = running.into_iter().map(|(name, run)| (name, run.join()));
        let failed = ended.filter(|(_, end)| end.is_err());
        failed.map(|(name, _)| name).collect()
    });
    assert!(failed.is_empty(), "failed: {failed:?}");
    // It measures what a container uses: alone.
    top::what_is_used(node);
    by_websocket(node);
    a_checkpoint_takes_criu(node);
    shown_and_drained(node);
}

/// Both are what they are said to be.
fn who_is_who(node: &Node) {
    let version: Value = serde_json::from_str(&node.ok(&["version", "-o", "json"])).unwrap();
    let minor = version["clientVersion"]["minor"].as_str().unwrap();
    let minor: u32 = minor.trim_end_matches('+').parse().unwrap();
    assert!(minor >= 36, "{version}");
    let shown = node.get_node().unwrap();
    let runtime = &shown["status"]["nodeInfo"]["containerRuntimeVersion"];
    let runtime = runtime.as_str().unwrap();
    let number = runtime
        .trim_start_matches("containerd://")
        .trim_start_matches('v');
    assert!(number.starts_with("2."), "{runtime}");
}

/// The first thing it tries succeeds: neither API server nor node send it to SPDY.
fn by_websocket(node: &Node) {
    node.create_pod("sockets", script("Always", FOREVER));
    node.wait_running("sockets");
    let outcome = node.run_kubectl(&["exec", "-v=8", "sockets", "--", "echo", "hello"]);
    assert_eq!(outcome.stdout(), "hello\n", "{outcome:?}");
    let spoken = |said: &str, protocol: &str| {
        assert!(!said.to_lowercase().contains("fallback"), "{said}");
        assert!(said.contains(protocol), "{said}");
    };
    spoken(&outcome.stderr(), "v5.channel.k8s.io");
    let mut forwarding = node.start_kubectl(&["port-forward", "-v=8", "sockets", ":80"]);
    forwarding.wait_stdout("Forwarding from 127.0.0.1");
    let protocol = "SPDY/3.1+portforward.k8s.io";
    eventually("the protocol is told", || {
        let said = forwarding.stderr();
        said.contains(protocol).then_some(()).ok_or(said)
    });
    spoken(&forwarding.stderr(), protocol);
}

/// This containerd makes checkpoints, with a program that is not installed; which is what it says.
fn a_checkpoint_takes_criu(node: &Node) {
    let direct = Direct::admin(node);
    let path = format!("/checkpoint/{}/sockets/main", node.namespace);
    let (status, text) = node.run(direct.ask("POST", &path)).expect("an answer");
    assert_eq!(status, 500, "{text}");
    assert!(text.contains("CRIU"), "{text}");
}

fn shown_and_drained(node: &Node) {
    for pod in ["shown", "forced"] {
        node.create_pod(pod, script("Always", FOREVER));
    }
    for pod in ["shown", "forced"] {
        node.wait_running(pod);
    }
    let table = node.ok(&["get", "pods", "-o", "wide"]);
    let line = table.lines().find(|l| l.starts_with("shown ")).unwrap();
    for word in ["1/1", "Running", &node.node] {
        assert!(line.contains(word), "{word} in {table}");
    }
    node.wait_event("shown", "Started", "");
    let text = node.ok(&["describe", "pod", "shown"]);
    for word in ["State:          Running", "Started", "kubelet"] {
        assert!(text.contains(word), "{word} in {text}");
    }
    let text = node.ok(&["describe", "node", &node.node]);
    for word in ["KubeletReady", "containerd://"] {
        assert!(text.contains(word), "{word} in {text}");
    }
    node.ok(&["delete", "pod", "forced", "--force", "--grace-period=0"]);
    node.wait_gone("forced", Duration::from_secs(30));
    let drain = ["drain", &node.node, "--force", "--delete-emptydir-data"];
    node.ok(&drain);
    assert!(node.try_pod("shown").is_none());
    node.ok(&["uncordon", &node.node]);
}

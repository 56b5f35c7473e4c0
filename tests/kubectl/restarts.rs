//! The agent ends while it serves: its streams end with it, and nothing else does.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::client::Kubectl;
use crate::node::Node;
use crate::setup::{FOREVER, script};

/// How long a client may take to notice.
const NOTICED: Duration = Duration::from_secs(15);

#[test]
fn open_streams_end_with_the_agent_and_nothing_else_does() {
    let node = Node::with_usual_logs();
    let ticks = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.2; done";
    node.create_pod("ticking", script("Always", ticks));
    let mut spec = script(
        "Always",
        "nc -ll -p 7000 -e cat & while read x; do echo \"got $x\"; done",
    );
    spec["containers"][0]["stdin"] = json!(true);
    node.create_pod("listening", spec);
    node.create_pod("working", script("Always", FOREVER));
    for pod in ["ticking", "listening", "working"] {
        node.wait_running(pod);
    }
    let before = node.running_containers();

    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut logs = node.start_kubectl(&["logs", "-f", "--tail=1", "ticking"]);
        logs.wait_stdout("tick ");
        let work = "echo begun; while read x; do echo $x; done; sleep 1000";
        let mut exec = node.start_kubectl(&["exec", "-i", "working", "--", "sh", "-c", work]);
        exec.wait_stdout("begun");
        let mut attach = node.start_kubectl(&["attach", "-i", "listening"]);
        attach.write(&format!("{signal}\n"));
        attach.wait_stdout(&format!("got {signal}\n"));
        let mut forward = node.start_kubectl(&["port-forward", "listening", ":7000"]);
        let text = forward.wait_stdout(" -> 7000\n");
        let port = text
            .split("127.0.0.1:")
            .nth(1)
            .and_then(|t| t.split(' ').next());
        let port: u16 = port.unwrap().parse().unwrap();
        let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
        connection.set_read_timeout(Some(NOTICED)).unwrap();
        connection.write_all(b"echo").unwrap();
        let mut echo = [0; 4];
        connection.read_exact(&mut echo).unwrap();
        assert_eq!(&echo, b"echo");

        let mut agent = node.agent().take().unwrap();
        let begin = Instant::now();
        if signal == Signal::SIGKILL {
            agent.kill9();
        } else {
            let (status, took) = agent.terminate();
            assert!(status.success(), "{status}");
            // Streams do not hold it up.
            assert!(took < Duration::from_secs(10), "it took {took:?} to end");
        }
        let ends = |what: &str, kubectl: Kubectl| {
            let outcome = kubectl.wait_within(NOTICED);
            println!(
                "{signal}: {what} ended {:.1?} later with {:?}: {}",
                begin.elapsed(),
                outcome.code,
                outcome.stderr().trim()
            );
            outcome
        };
        // Input of the exec stays open: its client must notice by itself.
        let seen = ends("logs -f", logs).stdout();
        let whole = seen.lines().all(|l| l.starts_with("tick ")) && seen.ends_with('\n');
        assert!(whole, "lines are whole: {seen:?}");
        ends("exec", exec);
        ends("attach", attach);
        ends("port-forward", forward);
        let mut rest = Vec::new();
        drop(connection.read_to_end(&mut rest));
        assert!(rest.is_empty(), "{rest:?}");

        let begin = Instant::now();
        *node.agent() = Some(node.start());
        assert_eq!(
            node.ok(&["exec", "working", "--", "echo", "again"]),
            "again\n"
        );
        println!(
            "{signal}: the agent was back and ran something within {:.1?}",
            begin.elapsed()
        );
        node.ok(&["logs", "--tail=1", "ticking"]);
        assert_eq!(
            node.running_containers(),
            before,
            "{signal}: the same containers run"
        );
    }
    for pod in ["ticking", "listening", "working"] {
        let pod = node.pod(pod);
        assert_eq!(
            pod["status"]["containerStatuses"][0]["restartCount"], 0,
            "{pod}"
        );
    }
}

//! The API server verifies the node: the agent asks the cluster for its serving certificate.

use std::time::{Duration, Instant};

use holdfast_testkit::envtest::DAY;
use jiff::SignedDuration;

use crate::agent_process::eventually;
use crate::node::Node;
use crate::setup::{FOREVER, script};

#[test]
fn a_node_is_trusted_once_its_certificate_is_signed() {
    let node = Node::with_signed_certificate();
    node.create_pod(
        "trusted",
        script("Always", &format!("echo hello; {FOREVER}")),
    );
    node.wait_running("trusted");
    // Nobody has signed yet: the pod runs, and there is no way to its logs.
    let outcome = node.run_kubectl(&["logs", "trusted"]);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");

    let _signer = node.env.csr_signer(DAY);
    eventually("the logs are seen", || {
        let outcome = node.run_kubectl(&["logs", "trusted"]);
        if outcome.code == Some(0) && outcome.stdout() == "hello\n" {
            Ok(())
        } else {
            Err(format!("{outcome:?}"))
        }
    });
    assert_eq!(
        node.ok(&["exec", "trusted", "--", "echo", "inside"]),
        "inside\n"
    );
    assert_eq!(node.raw("healthz").trim(), "ok");
    // Kept: after a restart nobody need sign again.
    drop(_signer);
    drop(node.agent().take());
    *node.agent() = Some(node.start());
    assert_eq!(
        node.ok(&["exec", "trusted", "--", "echo", "inside"]),
        "inside\n"
    );
    let requests = node.env.kubectl_ok(&["get", "csr", "-o", "name"]);
    assert_eq!(requests.lines().count(), 1, "{requests}");
}

/// Certificates that the signer dates back by an hour, and that end in a minute: one after the other is due at once.
#[test]
fn certificates_are_replaced_under_open_streams_without_anybody_noticing() {
    let node = Node::with_signed_certificate();
    let _signer = node.env.csr_signer(SignedDuration::from_secs(60));
    let ticks = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.2; done";
    node.create_pod("ticking", script("Always", ticks));
    node.wait_running("ticking");
    let follow = eventually("the logs are seen", || {
        let outcome = node.run_kubectl(&["logs", "--tail=1", "ticking"]);
        if outcome.code == Some(0) {
            Ok(node.start_kubectl(&["logs", "-f", "--tail=1", "ticking"]))
        } else {
            Err(format!("{outcome:?}"))
        }
    });
    // By the API server, which looks at the dates of each, and at who signed it.
    let requests = || node.env.kubectl_ok(&["get", "csr", "-o", "name"]);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(70) || requests().lines().count() < 4 {
        assert_eq!(
            node.ok(&["exec", "ticking", "--", "echo", "inside"]),
            "inside\n"
        );
        assert!(begin.elapsed() < Duration::from_secs(300), "{}", requests());
    }
    let asked = requests().lines().count();
    println!("{asked} certificates in {:.0?}", begin.elapsed());
    // One each time that the agent looks, and no storm of them.
    let looks = begin.elapsed().as_secs() / 10 + 2;
    assert!(u64::try_from(asked).unwrap() <= looks, "{asked}");
    let seen = follow.stdout();
    let whole = seen.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let numbers: Vec<u32> = whole
        .lines()
        .map(|line| line.strip_prefix("tick ").unwrap().parse().unwrap())
        .collect();
    assert!(numbers.len() > 100, "{} lines", numbers.len());
    assert!(
        numbers.windows(2).all(|two| two[1] == two[0] + 1),
        "no line is missing"
    );
}

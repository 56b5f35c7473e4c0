//! The API server verifies the node: the agent asks the cluster for its serving certificate.

use holdfast_testkit::envtest::DAY;

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

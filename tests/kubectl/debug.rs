//! `kubectl debug`: ephemeral containers.

use holdfast_testkit::containerd::BUSYBOX;

use crate::agent_process::eventually;
use crate::node::shared;
use crate::setup::{FOREVER, script};

#[test]
fn a_container_is_added_to_a_running_pod_and_attached_to() {
    let node = shared();
    if node.env.minor() < 20 {
        return;
    }
    node.create_pod("patient", script("Always", FOREVER));
    let before = node.wait_running("patient");
    let image = format!("--image={BUSYBOX}");
    let mut kubectl = node.start_kubectl(&[
        "debug",
        "patient",
        "-i",
        "--quiet",
        "-c",
        "doctor",
        &image,
        "--target=main",
        "--",
        "sh",
        "-c",
        "read x; echo \"saw $x\"; tr '\\0' ' ' < /proc/1/cmdline; echo; hostname; read y; exit 4",
    ]);
    kubectl.write("the patient\n");
    // Input stays open until then: its end would detach the client. The container waits as well: containerd may lose
    // what it writes right before its end (docs/streaming.md).
    kubectl.wait_stdout("\npatient\n");
    kubectl.write("it is well\n");
    let outcome = kubectl.wait();
    let text = outcome.stdout();
    assert!(text.contains("saw the patient\n"), "{outcome:?}");
    // In the target's process namespace and the pod's others.
    assert!(text.contains("while :; do sleep 1; done"), "{outcome:?}");
    assert!(text.contains("\npatient\n"), "{outcome:?}");
    let after = eventually("its end is shown", || {
        let pod = node.pod("patient");
        let state = &pod["status"]["ephemeralContainerStatuses"][0]["state"];
        if state["terminated"]["exitCode"] == 4 {
            Ok(pod)
        } else {
            Err(pod["status"].to_string())
        }
    });
    assert_eq!(node.ok(&["logs", "patient", "-c", "doctor"]), text);
    // Neither is the pod harmed, nor is the container started again.
    assert_eq!(
        before["status"]["containerStatuses"][0]["containerID"],
        after["status"]["containerStatuses"][0]["containerID"]
    );
    let mut more = node.start_kubectl(&[
        "debug", "patient", "--quiet", "-c", "nurse", &image, "--", "sh", "-c", FOREVER,
    ]);
    eventually("a second one runs", || {
        let outcome = node.run_kubectl(&["exec", "patient", "-c", "nurse", "--", "echo", "here"]);
        if outcome.stdout() == "here\n" {
            Ok(())
        } else {
            Err(format!("{outcome:?}"))
        }
    });
    more.write_and_close(Vec::new());
    more.wait();
    let pod = node.pod("patient");
    let statuses = pod["status"]["ephemeralContainerStatuses"]
        .as_array()
        .unwrap();
    for status in statuses {
        assert_eq!(status["restartCount"], 0, "{status}");
    }
    assert_eq!(statuses.len(), 2, "{pod}");
}

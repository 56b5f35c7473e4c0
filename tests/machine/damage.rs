//! Data of the container runtime that cannot be read after a boot: its database, and the image of which sandboxes are made.

use std::time::Duration;

use serde_json::Value;

use super::node::{IMAGE, Node, PATIENCE, SLEEP, noting};
use super::reboot::wait_ended;

/// The image that containerd makes sandboxes of.
const PAUSE: &str = "holdfast.local/pause:1";
/// containerd's own database.
const DATABASE: &str = "/var/lib/containerd/io.containerd.metadata.v1.bolt/meta.db";
/// The directories with unpacked layers, and those of containers.
const SNAPSHOTS: &str = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots";
/// How soon wanted pods run on a machine that is not emulated, and with the factor of one that is.
const RUN_WITHIN_S: f64 = 120.0 * 8.0;
const LONG: Duration = Duration::from_secs(480);

/// A node with the images in its preload directory, a pod that has ended with 7 and is not to run again, and one that runs.
fn with_pods() -> Node {
    let mut node = Node::installed();
    node.preload();
    node.start();
    node.manifest(&noting("once", "Never", "exit 7"));
    node.manifest(&noting("stays", "Always", SLEEP));
    node.wait_starts("stays", 1, PATIENCE);
    node.wait_exit("once", 7);
    node.eventually(
        "the archive was imported",
        "journalctl -u holdfast --no-pager -o cat | grep -q 'archive imported'",
    );
    node
}

/// Waits until `stays` runs for the `nth` time, and returns how many seconds after `since`, by the uptime of the machine.
#[track_caller]
fn runs_again(node: &mut Node, nth: usize, since: f64, what: &str) {
    let took = node.wait_starts("stays", nth, LONG) - since;
    println!("{what}: the pod ran again after {took:.1} s");
    assert!(took <= RUN_WITHIN_S, "{what}: {took} s");
    node.wait_running("stays");
    assert_eq!(node.starts("stays"), nth, "{what}");
    assert_eq!(node.starts("once"), 1, "{what}");
    let once = node.container("once");
    assert_eq!(once["lastExit"]["exitCode"], 7, "{what}: {once}");
}

/// When the agent of this boot was started, by the uptime of the machine.
fn agent_started(node: &mut Node) -> f64 {
    let micros = node.sh("systemctl show -P ExecMainStartTimestampMonotonic holdfast");
    micros.parse::<f64>().unwrap() / 1e6
}

#[test]
fn containerd_that_does_not_start_is_moved_aside_and_wanted_pods_run_again() {
    let mut node = with_pods();
    node.manifest(&noting("long", "Never", SLEEP));
    node.wait_starts("long", 1, PATIENCE);
    node.wait_running("long");
    node.sh(&format!(
        "systemctl stop containerd\nhead -c 300000 /dev/urandom >{DATABASE}"
    ));
    node.reboot_at_once();

    // The agent waits for the runtime, and answers from its store. Nothing runs.
    node.eventually(
        "the agent waits",
        "journalctl -u holdfast -b --no-pager -o cat | grep -q 'waiting for the container runtime'",
    );
    std::thread::sleep(Duration::from_secs(20));
    let once = node.container("once");
    assert_eq!(once["lastExit"]["exitCode"], 7, "{once}");
    for pod in ["once", "long", "stays"] {
        assert_eq!(node.starts(pod), 1, "{pod}");
    }
    node.sh("! ctr -n k8s.io images ls -q 2>/dev/null | grep -q .");

    // docs/runbook.md, "The container runtime does not start".
    let since = node.uptime();
    node.sh(
        "set -e\nsystemctl stop containerd\n! grep -q /run/containerd/ /proc/mounts\n\
         mv /var/lib/containerd /var/lib/containerd.unreadable\nsystemctl start containerd",
    );
    runs_again(&mut node, 2, since, "containerd's data moved aside");
    wait_ended(&mut node, "long");
    assert_eq!(node.starts("long"), 1);
    assert_eq!(node.container("long")["restartCount"], 0);
    let stays = node.container("stays");
    assert!(stays["restartCount"].as_u64() >= Some(1), "{stays}");
    for image in [IMAGE, PAUSE] {
        node.sh(&format!("ctr -n k8s.io images ls -q | grep -qx {image}"));
    }
    // Once more in good order: what was imported anew stays.
    node.reboot_at_once();
    node.wait_starts("stays", 3, LONG);
    for pod in ["once", "long"] {
        assert_eq!(node.starts(pod), 1, "{pod}");
    }
}

/// The file in containerd's store with the configuration of an image.
fn config_of(node: &mut Node, image: &str) -> String {
    let manifest = node.sh(&format!(
        "ctr -n k8s.io content get $(ctr -n k8s.io images ls name=={image} | awk 'NR == 2 {{ print $3 }}')"
    ));
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    let digest = manifest["config"]["digest"].as_str().unwrap();
    let hex = digest.strip_prefix("sha256:").unwrap();
    format!("/var/lib/containerd/io.containerd.content.v1.content/blobs/sha256/{hex}")
}

#[test]
fn a_damaged_pause_image_keeps_no_pod_from_running_after_a_reboot() {
    let mut node = with_pods();
    let config = config_of(&mut node, PAUSE);
    node.sh(&format!("test -s {config}"));
    for (n, (what, damage)) in [
        (
            "its configuration is empty",
            format!("truncate -s 0 {config}"),
        ),
        (
            "its configuration is cut off",
            format!("truncate -s 100 {config}"),
        ),
        ("its configuration is missing", format!("rm {config}")),
        // The layer of all images of this machine. Directories of containers have no programs.
        (
            "its unpacked files are missing",
            format!("rm -rf $(ls -d {SNAPSHOTS}/*/fs/bin | sed 's,/bin$,,')"),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        node.sh(&damage);
        node.reboot_at_once();
        node.eventually(
            "the agent was started",
            "test $(systemctl show -P ExecMainPID holdfast) != 0",
        );
        let since = agent_started(&mut node);
        runs_again(&mut node, n + 2, since, what);
        node.sh(&format!("test -s {config}"));
    }
}

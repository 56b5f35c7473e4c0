//! A device plugin that comes later than the agent after a boot: what a pod that holds its device does meanwhile, with both
//! policies.

use std::process::Command;
use std::time::{Duration, Instant};

use holdfast_testkit::machine::payload;
use serde_json::{Value, json};

use super::node::{Node, PATIENCE, SLEEP, noting, rows};

const GPU: &str = "example.com/gpu";
/// Where pods and the plugin note what happens.
const CALLS: &str = "/data/calls";
/// How much later than the agent the plugin comes.
const LATE: Duration = Duration::from_secs(60);
/// The plugin comes when this file is there: it is gone with each boot.
const COME: &str = "touch /run/plugin-may-come";
const UNIT: &str = "[Unit]
Description=A device plugin that comes late
[Service]
ExecStartPre=/bin/sh -c 'until test -e /run/plugin-may-come; do sleep 1; done'
ExecStart=/root/plugin/device-plugin /var/lib/kubelet/device-plugins example.com/gpu /data/calls a b
TimeoutStartSec=infinity
Restart=always
[Install]
WantedBy=multi-user.target
";

/// The program of the plugin, which cargo makes with the tests, without what only debuggers need.
fn program(to: &std::path::Path) {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().unwrap().with_file_name("device-plugin");
    let status = Command::new("strip")
        .arg("-o")
        .arg(to)
        .arg(&program)
        .status();
    let is_made = status.is_ok_and(|status| status.success());
    assert!(
        is_made,
        "no {}: cargo build --workspace --bins makes it",
        program.display()
    );
}

/// A pod that notes its device with each start.
fn holding(name: &str) -> Value {
    let end = format!("echo $IDS >>/data/{name}-has; sync; {SLEEP}");
    let mut pod = noting(name, "Always", &end);
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {GPU: "1"}});
    pod
}

/// The agent knows the plugin's devices.
#[track_caller]
fn wait_listed(node: &mut Node) {
    node.eventually(
        "the plugin is registered and has listed its devices to this run of the agent",
        "holdfast dump devices -o json 2>/dev/null | grep -q '\"Registered\"' && \
         journalctl -u holdfast -o cat _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID holdfast) | \
         grep -q 'a device plugin has listed its devices'",
    );
}

fn status_of(node: &mut Node, pod: &str) -> Value {
    let full = format!("{pod}-vmnode");
    let all = rows(&mut node.machine, "overview").unwrap();
    let row = all.into_iter().find(|row| row["name"] == full.as_str());
    row.unwrap_or_default()
}

/// Boots anew, waits until another pod runs for the `nth` time and this one is said to wait or to have failed, and looks at it
/// for as long as the plugin is late.
#[track_caller]
fn boots_without_plugin(node: &mut Node, nth: usize, reason: &str, phase: &str) {
    let starts = node.starts("holds");
    node.reboot_at_once();
    node.wait_starts("other", nth, 3 * PATIENCE);
    let begun = Instant::now();
    node.eventually(
        &format!("it has the event {reason}"),
        &format!("holdfast dump events -o json 2>/dev/null | grep -q {reason}"),
    );
    while begun.elapsed() < LATE {
        assert_eq!(
            node.starts("holds"),
            starts,
            "it started without its device"
        );
        std::thread::sleep(Duration::from_secs(2));
    }
    let row = status_of(node, "holds");
    assert_eq!(row["phase"], phase, "{row}");
    node.is_healthy();
    node.sh(COME);
    wait_listed(node);
}

#[test]
fn r28_devices_that_are_late_after_a_reboot_are_waited_for_or_fail_the_pod() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("payload");
    let files = dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    program(&files.join("device-plugin"));
    payload(&files, &archive).unwrap();
    let mut node = Node::with(|spec| spec.payload = Some(archive));
    node.machine.unpack_payload("/root/plugin").unwrap();
    node.sh(&format!(
        "set -e\nmkdir -p /data\ncat >/etc/systemd/system/plugin.service <<'END_OF_FILE'\n{UNIT}END_OF_FILE\n\
         systemctl enable -q plugin\nsystemctl start --no-block plugin\n{COME}"
    ));
    node.start();
    wait_listed(&mut node);
    node.manifest(&holding("holds"));
    node.manifest(&noting("other", "Always", SLEEP));
    node.wait_starts("holds", 1, PATIENCE);
    node.wait_starts("other", 1, PATIENCE);
    node.wait_running("holds");
    assert_eq!(node.sh("cat /data/holds-has"), "b");
    assert_eq!(node.sh(&format!("cat {CALLS}")), "Allocate b\nPreStart b");

    // Restarts of the agent: the same device, and nothing is asked again.
    for action in [
        "systemctl restart holdfast",
        "systemctl kill -s KILL --kill-whom=main holdfast; sleep 1; systemctl start holdfast",
    ] {
        node.sh(action);
        wait_listed(&mut node);
        std::thread::sleep(Duration::from_secs(15));
        node.wait_running("holds");
        assert_eq!(node.starts("holds"), 1, "{action}");
        assert_eq!(node.sh(&format!("cat {CALLS}")), "Allocate b\nPreStart b");
    }

    // The pod waits, and has the device that it had. Two boots: what is on record is kept while it waits.
    node.sh("echo HOLDFAST_FLAGS=--device-readiness=Wait >/etc/default/holdfast");
    for nth in 2..4 {
        // Its container has run, so that its phase stays Running, as with a kubelet.
        boots_without_plugin(&mut node, nth, "WaitingForDevices", "Running");
        node.wait_starts("holds", nth, PATIENCE);
        node.wait_running("holds");
        assert_eq!(node.sh("tail -n 1 /data/holds-has"), "b");
        let calls = node.sh(&format!("cat {CALLS}"));
        let wanted = format!("Allocate b{}", "\nPreStart b".repeat(nth));
        assert_eq!(calls, wanted, "boot {nth}");
    }

    // As upstream: the pod fails, and its device is for others.
    node.sh("rm /etc/default/holdfast");
    boots_without_plugin(&mut node, 4, "UnexpectedAdmissionError", "Failed");
    node.manifest(&holding("next"));
    node.wait_starts("next", 1, PATIENCE);
    assert_eq!(node.sh("cat /data/next-has"), "b");
    assert_eq!(node.starts("holds"), 3);
    let row = status_of(&mut node, "holds");
    assert_eq!(row["phase"], "Failed", "{row}");
}

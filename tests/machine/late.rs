//! A disk that is mounted late, or not at all in one boot: nothing on it is forgotten.

use std::time::Duration;

use serde_json::json;

use super::node::{Node, SLEEP, pod, rows};

/// The disk with the agent's root directory.
const DISK: &str = "/var/rootdisk.img";
const MOUNT: &str = "mount -o loop /var/rootdisk.img /var/lib/kubelet";

/// Mounts the disk as many seconds after the boot as `/etc/late` says, or not at all. Nothing is ordered after it, as with
/// `nofail` or a script of the operator's.
const UNIT: &str = "[Unit]
Description=The disk with the root directory
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'late=$(cat /etc/late); [ $late = never ] || { sleep $late; exec mount -o loop /var/rootdisk.img /var/lib/kubelet; }'
TimeoutStartSec=300
[Install]
WantedBy=multi-user.target
";

/// A pod that writes a line to a file of the machine with each start.
fn noting(name: &str, policy: &str, end: &str) -> serde_json::Value {
    let mut pod = pod(
        name,
        policy,
        &format!("echo started >>/data/{name}; sync; {end}"),
    );
    pod["spec"]["volumes"] = json!([
        {"name": "data", "hostPath": {"path": "/data", "type": "DirectoryOrCreate"}},
        {"name": "scratch", "emptyDir": {}},
    ]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([
        {"name": "data", "mountPath": "/data"},
        {"name": "scratch", "mountPath": "/scratch"},
    ]);
    pod
}

fn starts(node: &mut Node, pod: &str) -> usize {
    let count = node.sh(&format!("grep -c started /data/{pod} || true"));
    count.parse().unwrap()
}

/// The pods are as they were: one has ended with 7 and never runs again, the other runs, for the `nth` time.
fn is_as_before(node: &mut Node, nth: usize) {
    node.eventually("the agent is ready", "systemctl is-active --quiet holdfast");
    node.wait_running("stays");
    assert_eq!(starts(node, "stays"), nth);
    assert_eq!(starts(node, "once"), 1);
    let all = rows(&mut node.machine, "containers").unwrap();
    let once = all.iter().find(|row| row["name"] == "once-vmnode");
    let once = once.expect("it is on record");
    assert_eq!(once["lastExit"]["exitCode"], 7, "{once}");
    // A store that was set aside is a store that was forgotten.
    assert_eq!(
        node.sh("ls /var/lib/holdfast/quarantine 2>/dev/null || true"),
        ""
    );
}

#[test]
fn a_root_directory_that_is_mounted_late_is_waited_for_and_nothing_is_forgotten() {
    let mut node = Node::installed();
    node.sh(&format!(
        "set -e\ntruncate -s 300M {DISK}\nmkfs.ext4 -q {DISK}\nmkdir -p /var/lib/kubelet\necho 0 >/etc/late\n\
         cat >/etc/systemd/system/late-root.service <<'END_OF_FILE'\n{UNIT}END_OF_FILE\n\
         systemctl enable -q late-root\nsystemctl start late-root"
    ));
    node.start();
    node.manifest(&noting("once", "Never", "exit 7"));
    node.manifest(&noting("stays", "Always", SLEEP));
    node.wait_running("stays");
    node.eventually(
        "the other has ended",
        "holdfast dump containers -o json 2>/dev/null | grep -q '\"exitCode\": *7'",
    );

    // A minute late, not at all, and in time again.
    for (nth, late) in [(2, "60"), (3, "never"), (4, "0")] {
        node.sh(&format!("echo {late} >/etc/late; sync"));
        node.machine.send("sync; reboot -f").unwrap();
        node.machine.rebooted().unwrap();
        if late != "0" {
            std::thread::sleep(Duration::from_secs(20));
            assert_eq!(
                starts(&mut node, "stays"),
                nth - 1,
                "{late}: started without its disk"
            );
            assert_eq!(starts(&mut node, "once"), 1, "{late}");
            let log = node.sh("journalctl -u holdfast -b --no-pager -o cat");
            assert!(
                log.contains("/var/lib/kubelet"),
                "{late}: nothing is said:\n{log}"
            );
        }
        if late == "never" {
            node.sh(MOUNT);
        }
        is_as_before(&mut node, nth);
    }
}

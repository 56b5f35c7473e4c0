//! A disk that is mounted late, or not at all in one boot: nothing on it is forgotten.

use std::time::{Duration, Instant};

use serde_json::json;

use super::node::{MOUNT_ROOT_DISK, Node, PATIENCE, SLEEP, noting};

/// Mounts the disk as many seconds after the boot as `/etc/late` says, or not at all. Nothing is ordered after it, as with
/// `nofail` or a script of the operator's.
const SCRIPT: &str = "#!/bin/sh
late=$(cat /etc/late)
[ $late != never ] || exit 0
sleep $late
exec mount -o loop /var/rootdisk.img /var/lib/kubelet
";
const UNIT: &str = "[Unit]
Description=The disk with the root directory
[Service]
ExecStart=/bin/sh /root/late.sh
RemainAfterExit=yes
[Install]
WantedBy=multi-user.target
";
/// The agent waits for the disk, and says so.
const WAITS: &str = "journalctl -u holdfast -b --no-pager -o cat | grep 'waiting for the file system' | grep -q /var/lib/kubelet";
const IS_MOUNTED: &str = "mountpoint -q /var/lib/kubelet";
/// Longer than the disk of a boot is late.
const LATEST: Duration = Duration::from_secs(300);

/// As long as the disk is not mounted, `pod` does not start another time: looked at for `time`, or until the disk is mounted.
fn waits_for_its_disk(node: &mut Node, pod: &str, starts: usize, time: Duration) {
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        // Counted before it is seen that the disk is still missing.
        let count = node.starts(pod);
        if node.machine.run(IS_MOUNTED).unwrap().code == 0 {
            return;
        }
        assert_eq!(count, starts, "{pod} has started without its disk");
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// The pods are as they were: one has ended with 7 and never runs again, the other runs, for the `nth` time.
fn is_as_before(node: &mut Node, nth: usize) {
    node.wait_starts("stays", nth, LATEST);
    node.eventually("the agent is ready", "systemctl is-active --quiet holdfast");
    node.wait_running("stays");
    assert_eq!(node.starts("stays"), nth);
    assert_eq!(node.starts("once"), 1);
    let once = node.container("once");
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
    node.make_root_disk("");
    node.sh(&format!(
        "set -e\necho 0 >/etc/late\n\
         cat >/root/late.sh <<'END_OF_FILE'\n{SCRIPT}END_OF_FILE\n\
         cat >/etc/systemd/system/late-root.service <<'END_OF_FILE'\n{UNIT}END_OF_FILE\n\
         systemctl enable -q late-root\n{MOUNT_ROOT_DISK}"
    ));
    node.start();
    node.manifest(&noting("once", "Never", "exit 7"));
    // Its volume is on the disk.
    let mut stays = noting("stays", "Always", SLEEP);
    let spec = &mut stays["spec"];
    let scratch = json!({"name": "scratch", "emptyDir": {}});
    spec["volumes"].as_array_mut().unwrap().push(scratch);
    let mount = json!({"name": "scratch", "mountPath": "/scratch"});
    let mounts = &mut spec["containers"][0]["volumeMounts"];
    mounts.as_array_mut().unwrap().push(mount);
    node.manifest(&stays);
    node.wait_starts("stays", 1, PATIENCE);
    node.wait_exit("once", 7);

    // A minute and a half late, not at all, and in time again. The machine does not count as up while the agent waits.
    for (nth, late) in [(2, "90"), (3, "never"), (4, "0")] {
        node.sh(&format!("echo {late} >/etc/late; sync"));
        node.reboot_at_once();
        if late != "0" {
            node.eventually(
                "the agent waits",
                &format!("{WAITS} || {{ test {late} = 90 && {IS_MOUNTED}; }}"),
            );
            waits_for_its_disk(&mut node, "stays", nth - 1, Duration::from_secs(20));
            assert_eq!(node.starts("once"), 1, "{late}");
        }
        if late == "never" {
            node.sh(MOUNT_ROOT_DISK);
        }
        is_as_before(&mut node, nth);
    }
}

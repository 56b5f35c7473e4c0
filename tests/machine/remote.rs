//! Volumes of servers, which run in the same machine: NFS and iSCSI, with servers that hang, and reboots.

use serde_json::{Value, json};

use super::node::{Node, SLEEP, pod};

/// A pod that writes a line into its volume and waits.
fn writing(name: &str, volume: &Value) -> Value {
    let script = format!("echo {name} >>/data/lines; fsync /data/lines; {SLEEP}");
    let mut pod = pod(name, "Always", &script);
    let mut volume = volume.clone();
    volume["name"] = json!("data");
    pod["spec"]["volumes"] = json!([volume]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pod
}

/// While a server hangs: pods without its volumes start and end, the agent restarts, and stays ready.
fn others_go_on(node: &mut Node, name: &str) {
    node.manifest(&pod(name, "Always", SLEEP));
    node.wait_running(name);
    // The agent says that it is ready once it has resumed all pods, those with the volume among them.
    node.sh("systemctl restart holdfast");
    node.wait_running(name);
    node.remove_manifest(name);
    node.wait_gone(name);
    node.is_healthy();
}

#[test]
fn an_nfs_server_that_hangs_keeps_nobody_but_its_own_pods_waiting() {
    let mut node = Node::installed();
    node.sh(
        "mkdir -p /srv/nfs && chmod 777 /srv/nfs && \
         echo '/srv/nfs *(rw,fsid=0,no_root_squash,insecure,no_subtree_check)' >/etc/exports && systemctl start nfs-server",
    );
    node.start();
    let volume = json!({"nfs": {"server": "127.0.0.1", "path": "/"}});
    node.manifest(&writing("one", &volume));
    node.wait_running("one");
    node.eventually("it has written", "grep -qx one /srv/nfs/lines");
    assert_eq!(
        node.sh("grep -c 'kubernetes.io~nfs/data nfs' /proc/mounts"),
        "1"
    );

    // Gone, as far as a client can tell: it asks for ever.
    node.sh("systemctl stop nfs-server");
    node.remove_manifest("one");
    others_go_on(&mut node, "other");
    node.manifest(&writing("two", &volume));
    others_go_on(&mut node, "another");

    // Back: what had to wait comes to its end.
    node.sh("systemctl start nfs-server");
    node.wait_gone("one");
    node.wait_running("two");
    node.eventually("it has written", "grep -qx two /srv/nfs/lines");
    assert_eq!(
        node.sh("grep -c 'kubernetes.io~nfs/data nfs' /proc/mounts"),
        "1"
    );
    node.remove_manifest("two");
    node.wait_gone("two");
    node.sh("! grep 'kubernetes.io~nfs' /proc/mounts");
    assert_eq!(node.sh("cat /srv/nfs/lines"), "one\ntwo");
}

#[test]
fn a_disk_of_an_iscsi_target_follows_its_pod_through_restarts_and_a_reboot() {
    const TARGET: &str = "iqn.2026-11.local.vmnode:disk";
    // There is one pod with such a volume at a time.
    const DISK: &str = "/var/lib/kubelet/pods/*/volumes/kubernetes.io~iscsi/data";
    // The target is a service of the machine, so that it is there after the reboot.
    let target = format!(
        "systemctl start tgt iscsid && tgtadm --lld iscsi --op new --mode target --tid 1 -T {TARGET} && \
         tgtadm --lld iscsi --op new --mode logicalunit --tid 1 --lun 1 -b /srv/disk && \
         tgtadm --lld iscsi --op bind --mode target --tid 1 -I ALL"
    );
    let sessions = "iscsiadm -m session 2>/dev/null | grep -c disk || true";
    let mut node = Node::installed();
    node.sh("truncate -s 64M /srv/disk");
    node.sh(&target);
    node.start();
    let volume = json!({"iscsi": {
        "targetPortal": "127.0.0.1:3260", "iqn": TARGET, "lun": 1, "fsType": "ext4",
    }});
    node.manifest(&writing("one", &volume));
    node.wait_running("one");
    node.eventually("it has written", &format!("grep -qx one {DISK}/lines"));
    assert_eq!(node.sh(sessions), "1");

    // A target that hangs for a while.
    node.sh("pkill -STOP tgtd");
    others_go_on(&mut node, "other");
    node.sh("pkill -CONT tgtd");

    // The agent was restarted, the pod has gone on, and the disk is mounted as often as it was.
    assert_eq!(node.sh(&format!("cat {DISK}/lines")), "one");
    assert_eq!(node.sh(sessions), "1");

    // No record of the runtime and no session outlives a reset; the disk does.
    node.machine.send("sync; reboot -f").unwrap();
    node.machine.rebooted().unwrap();
    node.sh(&target);
    node.wait_running("one");
    node.eventually(
        "the pod has written again, to the same disk",
        &format!("test \"$(cat {DISK}/lines)\" = \"$(printf 'one\\none')\""),
    );
    assert_eq!(node.sh(sessions), "1");

    // A pod that ends leaves no session, and the next one finds its files.
    node.remove_manifest("one");
    node.wait_gone("one");
    node.eventually("the session has ended", &format!("test $({sessions}) = 0"));
    node.sh("! grep kubernetes.io~iscsi /proc/mounts");
    node.manifest(&writing("two", &volume));
    node.wait_running("two");
    node.eventually(
        "it sees what was written before",
        &format!("test \"$(cat {DISK}/lines)\" = \"$(printf 'one\\none\\ntwo')\""),
    );
}

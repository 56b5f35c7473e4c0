//! A machine with eight processors in two NUMA nodes: what a container has for itself stays, until the machine has it no more.

use std::time::Duration;

use serde_json::{Value, json};

use super::node::{Node, PATIENCE, SLEEP, noting};

/// A processor is kept from pods (100m of `systemReserved`); so is the memory of `systemReserved` and of the default `evictionHard`.
const CONFIG: &str = "cpuManagerPolicy: static
cpuManagerReconcilePeriod: 5s
memoryManagerPolicy: Static
reservedMemory: [{numaNode: 0, limits: {memory: 228Mi}}]
topologyManagerPolicy: single-numa-node
";
/// Eight emulated processors share those of the host.
const LONG: Duration = Duration::from_secs(480);

fn guaranteed(name: &str, cpus: u32) -> Value {
    let mut pod = noting(name, "Always", SLEEP);
    pod["spec"]["containers"][0]["resources"] =
        json!({"limits": {"cpu": cpus.to_string(), "memory": "48Mi"}});
    pod
}

/// Which processors and NUMA nodes the container of the pod may use, by the files of its cgroup; by its name the processes of the
/// pod are found.
fn cpuset(pod: &str) -> String {
    format!(
        "dir=/sys/fs/cgroup$(cut -d: -f3 /proc/$(pgrep -of /data/{pod})/cgroup); \
         found=$(echo $(cat $dir/cpuset.cpus.effective) on $(cat $dir/cpuset.mems.effective)); echo $found"
    )
}

/// Waits until the container may use just these processors on these nodes: `4-5 on 1`.
#[track_caller]
fn wait_cpuset(node: &mut Node, pod: &str, wanted: &str) {
    node.eventually(
        &format!("{pod} has {wanted}"),
        &format!("{}; test \"$found\" = '{wanted}'", cpuset(pod)),
    );
}

#[test]
fn numa_nodes_and_exclusive_cpus_are_kept_and_a_smaller_machine_has_others() {
    let mut node = Node::booted(|spec| (spec.cpus, spec.numa_nodes) = (8, 2));
    assert_eq!(node.sh("cat /sys/devices/system/node/node1/cpulist"), "4-7");
    node.sh(&format!(
        "cat >>/etc/holdfast/config.yaml <<'END_OF_FILE'\n{CONFIG}END_OF_FILE\nsystemctl restart holdfast"
    ));
    node.manifest(&noting("shared", "Always", SLEEP));
    // Takes all of the first node but the processor that is reserved, so that the other pod gets some of the second.
    node.manifest(&guaranteed("first", 3));
    node.wait_starts("shared", 1, LONG);
    node.wait_starts("first", 1, LONG);
    wait_cpuset(&mut node, "first", "1-3 on 0");
    node.manifest(&guaranteed("second", 2));
    node.wait_starts("second", 1, LONG);
    wait_cpuset(&mut node, "second", "4-5 on 1");
    wait_cpuset(&mut node, "shared", "0,6-7 on 0-1");
    node.remove_manifest("first");
    node.wait_gone("first");
    wait_cpuset(&mut node, "shared", "0-3,6-7 on 0-1");

    for action in [
        "systemctl restart holdfast",
        "systemctl kill -s KILL --kill-whom=main holdfast; sleep 1; systemctl start holdfast",
        "systemctl restart containerd",
    ] {
        node.sh(action);
        // Longer than it takes to compare what containers may use with what they are to.
        std::thread::sleep(Duration::from_secs(15));
        node.wait_running("second");
        wait_cpuset(&mut node, "second", "4-5 on 1");
        wait_cpuset(&mut node, "shared", "0-3,6-7 on 0-1");
        assert_eq!(node.starts("second"), 1, "{action}");
    }

    // The same machine boots: the first node has room for the pod now, and it keeps what it has.
    node.machine.send("sync; reboot -f").unwrap();
    node.machine.rebooted().unwrap();
    node.wait_starts("second", 2, LONG);
    wait_cpuset(&mut node, "second", "4-5 on 1");
    node.wait_starts("shared", 2, LONG);
    wait_cpuset(&mut node, "shared", "0-3,6-7 on 0-1");
    let changes = "holdfast dump events | grep -c ResourceAssignmentChanged || true";
    let before = node.sh(changes);

    // Half of the machine is gone. The agent starts, the pod gets others, and the event says so.
    node.boot_as(|spec| spec.cpus = 4);
    node.wait_starts("second", 3, LONG);
    node.wait_running("second");
    wait_cpuset(&mut node, "second", "1-2 on 0");
    node.wait_starts("shared", 3, PATIENCE);
    wait_cpuset(&mut node, "shared", "0,3 on 0");
    node.is_healthy();
    let log = node
        .sh("journalctl -u holdfast -b --no-pager -o cat | grep ResourceAssignmentChanged || true");
    let after = node.sh(changes);
    assert_ne!(after, before, "no event of the change:\n{log}");
    for said in ["lost CPUs 4-5", "got CPUs 1-2"] {
        node.sh(&format!("holdfast dump events -o json | grep -q '{said}'"));
    }
}

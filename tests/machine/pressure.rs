//! A node that runs out of memory or of disk: who is evicted, how soon, and what restarts and a reboot change about it.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event, Node as NodeObject, Pod};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use super::node::{IMAGE, MOUNT_ROOT_DISK, Node, PATIENCE, SLEEP};
use super::reboot::Cluster;

/// Mebibytes that have to stay available. Memory of the kernel does not count as used, as in a kubelet: of a machine with one GiB it
/// takes so much that 100 MiB are never all that is left before the kernel kills.
const LEFT_MIB: i64 = 300;
/// Between the moment that the threshold is crossed and the end of the process. It is 2 s on a machine that is not emulated.
const EVICTED_WITHIN: Duration = Duration::from_secs(16);
/// What a command of a shell on the node may take all the while. It is 1 s on a machine that is not emulated.
const SHELL_ANSWERS_WITHIN: Duration = Duration::from_secs(8);

/// Writes into /run/watch, five times a second: the time in ms, the MiB of memory that are available, and how many processes leak.
/// What is available is what docs/eviction.md says, from the kernel's own numbers.
const WATCH: &str = r#"cat >/run/watch.sh <<'END_OF_FILE'
while :; do
    left=$(awk '{ kib[$1] = $2 } END {
        used = kib["AnonPages:"] + kib["Cached:"] + kib["Buffers:"] + kib["SwapCached:"] - kib["Inactive(file):"] + kib["Hugetlb:"]
        print int((kib["MemTotal:"] - used) / 1024) }' /proc/meminfo)
    set -- $(pidof dd)
    echo "$(date +%s%3N) $left $#"
    sleep 0.2
done >/run/watch
END_OF_FILE
setsid sh /run/watch.sh </dev/null >/dev/null 2>&1 &"#;

fn object(name: &str, script: &str, more: &Value) -> Pod {
    let mut pod = json!({
        "metadata": {"name": name},
        "spec": {
            "nodeName": "vmnode",
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", script]}],
        },
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        pod["spec"]["containers"][0][field] = value.clone();
    }
    if more.get("volumeMounts").is_some() {
        pod["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    }
    serde_json::from_value(pod).unwrap()
}

struct Site {
    cluster: Cluster,
    pods: Api<Pod>,
}

impl Site {
    /// A node with these lines in its configuration.
    fn with(config: &str) -> Self {
        Self::prepared(config, |_| ())
    }

    /// The same; `prepare` changes the machine before the agent starts for the first time.
    fn prepared(config: &str, prepare: impl FnOnce(&mut Node)) -> Self {
        Self::of(Cluster::join_with(prepare), config)
    }

    fn of(cluster: Cluster, config: &str) -> Self {
        let pods = Api::namespaced(cluster.client.clone(), "default");
        let mut site = Self { cluster, pods };
        site.configure(config);
        site
    }

    /// Adds lines to the configuration.
    fn configure(&mut self, config: &str) {
        self.node().sh(&format!(
            "cat >>/etc/holdfast/config.yaml <<'END_OF_FILE'\n{config}END_OF_FILE\nsystemctl restart holdfast"
        ));
        self.cluster.wait_ready();
    }

    fn node(&mut self) -> &mut Node {
        &mut self.cluster.node
    }

    fn create(&self, pod: &Pod) {
        let params = PostParams::default();
        let created = self.pods.create(&params, pod);
        self.cluster.runtime.block_on(created).unwrap();
    }

    fn get(&self, name: &str) -> Value {
        let pod = self.cluster.runtime.block_on(self.pods.get(name)).unwrap();
        serde_json::to_value(pod).unwrap()
    }

    #[track_caller]
    fn wait(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let pod = self.get(name);
            if holds(&pod) {
                return pod;
            }
            assert!(
                Instant::now() < deadline,
                "{name} {what}: {}",
                pod["status"]
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    fn wait_running(&self, name: &str) -> Value {
        self.wait(name, "runs", |pod| pod["status"]["phase"] == "Running")
    }

    /// The status of the node's condition.
    fn condition(&self, type_: &str) -> String {
        let nodes: Api<NodeObject> = Api::all(self.cluster.client.clone());
        let node = self.cluster.runtime.block_on(nodes.get("vmnode")).unwrap();
        let conditions = node.status.and_then(|s| s.conditions).unwrap_or_default();
        let found = conditions.into_iter().find(|c| c.type_ == type_);
        found.map(|c| c.status).unwrap_or_default()
    }

    #[track_caller]
    fn wait_condition(&self, type_: &str, status: &str) {
        let deadline = Instant::now() + 3 * PATIENCE;
        while self.condition(type_) != status {
            assert!(Instant::now() < deadline, "{type_} is not {status}");
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// How often the event was emitted for the pod.
    fn events(&self, reason: &str, pod: &str) -> i32 {
        let events: Api<Event> = Api::namespaced(self.cluster.client.clone(), "default");
        let params = ListParams::default();
        let list = events.list(&params);
        let list = self.cluster.runtime.block_on(list).unwrap();
        let of_pod = list.items.iter().filter(|event| {
            event.reason.as_deref() == Some(reason)
                && event.involved_object.name.as_deref() == Some(pod)
        });
        of_pod.map(|event| event.count.unwrap_or(1)).sum()
    }

    fn kill_agent(&mut self) {
        self.node().sh(
            "systemctl kill -s KILL --kill-whom=main holdfast; sleep 1; systemctl start holdfast",
        );
    }
}

fn is_evicted(pod: &Value) -> bool {
    pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Evicted"
}

/// Which container runs, and how often it was started again.
fn running(pod: &Value) -> (Value, Value) {
    let container = &pod["status"]["containerStatuses"][0];
    (
        container["containerID"].clone(),
        container["restartCount"].clone(),
    )
}

#[test]
fn r25_a_pod_that_leaks_is_evicted_in_time_and_no_restart_evicts_another() {
    // Without a limit for all pods together: `allocatableMemory.available` would be short first on a node whose own processes use
    // less than `systemReserved`. The condition has to outlive three starts of the agent.
    let mut site = Site::with(&format!(
        "evictionHard: {{memory.available: {LEFT_MIB}Mi}}\nevictionPressureTransitionPeriod: 240s\n\
         enforceNodeAllocatable: [none]\n"
    ));
    let small =
        json!({"resources": {"requests": {"memory": "16Mi"}, "limits": {"memory": "32Mi"}}});
    site.create(&object("burstable", SLEEP, &small));
    site.create(&object("besteffort", SLEEP, &json!({})));
    let quiet: Vec<_> = ["burstable", "besteffort"]
        .into_iter()
        .map(|name| (name, running(&site.wait_running(name))))
        .collect();
    assert_eq!(site.condition("MemoryPressure"), "False");
    leaks_and_is_evicted(&mut site, LEFT_MIB, 16);
    site.wait_condition("MemoryPressure", "True");

    // The condition outlives the agent and the machine. A pod that the first life would not have taken is not taken either.
    for _ in 0..3 {
        site.kill_agent();
        site.cluster.wait_ready();
        assert_eq!(site.condition("MemoryPressure"), "True");
    }
    site.create(&object("late", SLEEP, &json!({})));
    let late = site.wait("late", "is refused", is_evicted);
    let message = late["status"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("MemoryPressure"), "{message}");
    for (name, before) in &quiet {
        assert_eq!(running(&site.get(name)), *before, "{name}");
    }
    site.node().machine.send("sync; reboot -f").unwrap();
    site.node().machine.rebooted().unwrap();
    for (name, before) in &quiet {
        site.wait(name, "runs again", |pod| {
            let (id, _) = running(pod);
            id != before.0 && !pod["status"]["containerStatuses"][0]["state"]["running"].is_null()
        });
    }
    site.wait_condition("MemoryPressure", "False");
    assert!(is_evicted(&site.get("leaks")));
    assert_eq!(site.node().sh("pidof dd || true"), "");
    assert_eq!(site.events("Evicted", "leaks"), 1);
    for (name, _) in &quiet {
        assert_eq!(site.events("Evicted", name), 0, "{name}");
    }
}

/// Creates a pod that leaks blocks of so many MiB, and waits until it is evicted: in time after less than `left_mib` were available,
/// while a shell on the node answers.
#[track_caller]
fn leaks_and_is_evicted(site: &mut Site, left_mib: i64, block_mib: i64) {
    site.node().sh(WATCH);
    // Each `dd` keeps a block that nobody reads. With two processes for each, podPidsLimit leaves room for 98 of them, which is
    // more than the machine has. Near the threshold it leaks slowly: an emulated processor needs time to kill, and when memory is
    // gone it is the kernel that kills.
    let leak = format!(
        "while :; do dd if=/dev/zero bs={block_mib}M 2>/dev/null | sleep 100000 & sleep 1; \
         left=$(awk '$1 == \"MemAvailable:\" {{ print int($2 / 1024) }}' /proc/meminfo); test $left -gt {} || sleep 3; done",
        left_mib + 20
    );
    site.create(&object("leaks", &leak, &json!({})));
    let mut slowest = Duration::ZERO;
    let deadline = Instant::now() + 2 * PATIENCE;
    let evicted = loop {
        let asked = Instant::now();
        site.node().sh("true");
        slowest = slowest.max(asked.elapsed());
        let pod = site.get("leaks");
        if is_evicted(&pod) {
            break pod;
        }
        if Instant::now() > deadline {
            let told = "tail -n 5 /run/watch; holdfast dump pressure -o wide; journalctl -u holdfast -n 40 --no-pager; dmesg | tail -n 20";
            let told = site.node().sh(told);
            panic!("it leaks on: {}\n{told}", pod["status"]);
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    let message = evicted["status"]["message"].as_str().unwrap_or_default();
    let begin = format!(
        "The node was low on resource: memory. Threshold quantity: {left_mib}Mi, available: "
    );
    assert!(message.starts_with(&begin), "{message}");
    site.node()
        .eventually("it has ended", "! pidof dd >/dev/null && sleep 1");
    let watched = site.node().sh("cat /run/watch");
    let (within, lowest) = judge(&watched, left_mib);
    println!(
        "evicted {within} ms after the threshold was crossed, {lowest} MiB were left; a shell answered within {slowest:?}"
    );
    assert!(
        within <= EVICTED_WITHIN.as_millis(),
        "{within} ms\n{watched}"
    );
    assert!(slowest <= SHELL_ANSWERS_WITHIN, "{slowest:?}");
}

/// Milliseconds between the crossing of the threshold and the end of the process, and the fewest MiB that were available.
#[track_caller]
fn judge(watched: &str, left_mib: i64) -> (u128, i64) {
    let lines: Vec<(u128, i64, u32)> = watched
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some((
                words.next()?.parse().ok()?,
                words.next()?.parse().ok()?,
                words.next()?.parse().ok()?,
            ))
        })
        .collect();
    let crossed = lines.iter().position(|(_, left, _)| *left < left_mib);
    let crossed = crossed.unwrap_or_else(|| panic!("never below the threshold\n{watched}"));
    let ended = lines[crossed..].iter().find(|(.., leak)| *leak == 0);
    let ended = ended.unwrap_or_else(|| panic!("it leaks on\n{watched}"));
    let lowest = lines.iter().map(|(_, left, _)| *left).min();
    (ended.0 - lines[crossed].0, lowest.unwrap())
}

/// Mebibytes that have to stay available on the small machine.
const LEFT_OF_512_MIB: i64 = 160;

#[test]
fn a_machine_of_512_mib_evicts_the_pod_that_leaks_and_no_other() {
    let node = Node::booted(|spec| spec.memory_mib = 512);
    let config = format!(
        "evictionHard: {{memory.available: {LEFT_OF_512_MIB}Mi}}\nenforceNodeAllocatable: [none]\n"
    );
    let mut site = Site::of(Cluster::join_as(node, |_| ()), &config);
    let small =
        json!({"resources": {"requests": {"memory": "16Mi"}, "limits": {"memory": "32Mi"}}});
    site.create(&object("burstable", SLEEP, &small));
    site.create(&object("besteffort", SLEEP, &json!({})));
    let quiet: Vec<_> = ["burstable", "besteffort"]
        .into_iter()
        .map(|name| (name, running(&site.wait_running(name))))
        .collect();
    assert_eq!(site.condition("MemoryPressure"), "False");
    let before = site.node().sh(SERVICES);
    leaks_and_is_evicted(&mut site, LEFT_OF_512_MIB, 8);
    for (name, before) in &quiet {
        assert_eq!(running(&site.get(name)), *before, "{name}");
        assert_eq!(site.events("Evicted", name), 0, "{name}");
    }
    assert_eq!(site.events("Evicted", "leaks"), 1);
    // The kernel has killed nobody, and both services are the same processes.
    assert_eq!(
        site.node().sh("dmesg | grep -ci 'out of memory' || true"),
        "0"
    );
    assert_eq!(site.node().sh(SERVICES), before);
}

/// The processes of agent and runtime.
const SERVICES: &str = "systemctl show -P MainPID holdfast containerd";

#[test]
fn a_node_that_runs_out_of_memory_keeps_its_agent_and_other_pods() {
    // The agent evicts nobody: the kernel is quicker than any threshold could be.
    let mut site =
        Site::with("evictionHard: {memory.available: \"0%\"}\nenforceNodeAllocatable: [none]\n");
    let small =
        json!({"resources": {"requests": {"memory": "32Mi"}, "limits": {"memory": "32Mi"}}});
    site.create(&object("quiet", SLEEP, &small));
    let quiet = running(&site.wait_running("quiet"));
    let before = site.node().sh(SERVICES);
    let leak = "while :; do dd if=/dev/zero bs=32M 2>/dev/null | sleep 100000 & sleep 0.5; done";
    site.create(&object("leaks", leak, &json!({})));
    let killed = site.wait("leaks", "is killed", |pod| {
        let container = &pod["status"]["containerStatuses"][0];
        let ends = [&container["state"], &container["lastState"]];
        ends.iter()
            .any(|end| end["terminated"]["reason"] == "OOMKilled")
    });
    // It is not this node's decision that it ends.
    assert_ne!(killed["status"]["phase"], "Failed", "{killed}");
    let params = DeleteParams::default();
    let deleted = site.pods.delete("leaks", &params);
    site.cluster.runtime.block_on(deleted).unwrap();
    site.node()
        .eventually("it is gone", "! pidof dd >/dev/null");
    site.node().eventually(
        "the node has the event",
        "holdfast dump events -o json 2>/dev/null | grep -q SystemOOM",
    );
    assert_eq!(site.node().sh(SERVICES), before);
    site.node().is_healthy();
    site.cluster.wait_ready();
    assert_eq!(running(&site.get("quiet")), quiet);
}

/// Gives containerd's data a disk of its own, of which about 400 MiB are free.
const IMAGE_DISK: &str = "set -e
systemctl stop containerd
truncate -s 600M /var/imagedisk.img
mkfs.ext4 -q -m 0 /var/imagedisk.img
mkdir /mnt/new
mount -o loop /var/imagedisk.img /mnt/new
cp -a /var/lib/containerd/. /mnt/new/
umount /mnt/new
rm -rf /var/lib/containerd/*
echo '/var/imagedisk.img /var/lib/containerd ext4 loop 0 0' >>/etc/fstab
systemctl daemon-reload
mount /var/lib/containerd
systemctl start containerd";

/// Kibibytes that may be written to the disk of images.
const IMAGE_DISK_FREE: &str = "sync; df -k --output=avail /var/lib/containerd | tail -n 1";

#[test]
fn imagefs_on_a_second_disk_loses_unused_images_and_then_the_pod_that_fills_it() {
    let mut site = Site::prepared("evictionPressureTransitionPeriod: 20s\n", |node| {
        node.sh(IMAGE_DISK);
    });
    let mount = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    site.create(&object("quiet", SLEEP, &mount));
    // Most of all on the other disk, which is not the one that is full.
    let elsewhere =
        format!("dd if=/dev/zero of=/data/own bs=1M count=120 2>/dev/null; : >/data/done; {SLEEP}");
    site.create(&object("elsewhere", &elsewhere, &mount));
    let others = ["quiet", "elsewhere"].map(|name| (name, running(&site.wait_running(name))));
    site.node().eventually(
        "the pod has all that it wants",
        "ls /var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/data/done",
    );
    let unused = "holdfast.local/unused:1";
    super::registry::archive(site.node(), "unused");
    site.node()
        .sh("ctr -n k8s.io images import /root/unused.tar >/dev/null");
    let free: u64 = site.node().sh(IMAGE_DISK_FREE).trim().parse().unwrap();
    let threshold = free - 80 * 1024;
    site.configure(&format!(
        "evictionHard: {{imagefs.available: {threshold}Ki}}\nimageMinimumGCAge: 1s\n"
    ));
    assert_eq!(site.condition("DiskPressure"), "False");

    // Into its writable layer.
    let fill = "mkdir /fill; n=0; while :; do dd if=/dev/zero of=/fill/$n bs=1M count=4 2>/dev/null; n=$((n + 1)); sleep 1; done";
    site.create(&object("fills", fill, &mount));
    site.wait_running("fills");
    site.wait_condition("DiskPressure", "True");
    site.kill_agent();
    let fills = site.wait("fills", "is evicted", is_evicted);
    let message = fills["status"]["message"].as_str().unwrap_or_default();
    let begin = "The node was low on resource: ephemeral-storage. Threshold quantity: ";
    assert!(message.starts_with(begin), "{message}");
    site.wait_condition("DiskPressure", "False");
    let left: u64 = site.node().sh(IMAGE_DISK_FREE).trim().parse().unwrap();
    assert!(left > threshold, "{left} of {threshold}");
    let images = site.node().sh("ctr -n k8s.io images ls -q");
    assert!(!images.contains(unused), "{images}");
    assert!(images.contains(IMAGE), "{images}");
    for (name, before) in &others {
        assert_eq!(running(&site.get(name)), *before, "{name}");
    }

    // Across a reboot the others run again, and nobody else is evicted.
    site.node().reboot_at_once();
    for (name, before) in &others {
        site.wait(name, "runs again", |pod| {
            let (id, _) = running(pod);
            id != before.0 && !pod["status"]["containerStatuses"][0]["state"]["running"].is_null()
        });
        assert_eq!(site.events("Evicted", name), 0, "{name}");
    }
    assert!(is_evicted(&site.get("fills")));
    assert_eq!(site.events("Evicted", "fills"), 1);
}

#[test]
fn a_pod_that_fills_the_disk_is_evicted_and_the_disk_has_room_again() {
    let mut site = Site::with("evictionPressureTransitionPeriod: 20s\n");
    // 100 MiB more than now may be written.
    let threshold: u64 = site
        .node()
        .sh("sync; df -k --output=avail /var/lib/kubelet | tail -n 1")
        .trim()
        .parse::<u64>()
        .unwrap()
        - 100 * 1024;
    site.node().sh(&format!(
        "echo 'evictionHard: {{nodefs.available: {threshold}Ki}}' >>/etc/holdfast/config.yaml; systemctl restart holdfast"
    ));
    site.cluster.wait_ready();
    site.create(&object("quiet", SLEEP, &json!({})));
    let quiet = running(&site.wait_running("quiet"));
    assert_eq!(site.condition("DiskPressure"), "False");
    let fill = "n=0; while :; do dd if=/dev/zero of=/data/$n bs=1M count=4 2>/dev/null; n=$((n + 1)); sleep 0.2; done";
    let mount = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    site.create(&object("fills", fill, &mount));
    site.wait_running("fills");
    site.wait_condition("DiskPressure", "True");
    site.kill_agent();
    let fills = site.wait("fills", "is evicted", is_evicted);
    let message = fills["status"]["message"].as_str().unwrap_or_default();
    assert!(
        message.starts_with("The node was low on resource: ephemeral-storage. "),
        "{message}"
    );
    // Its volume goes with it.
    site.node().eventually(
        "the disk has room",
        &format!("test $(df -k --output=avail /var/lib/kubelet | tail -n 1) -gt {threshold}"),
    );
    site.wait_condition("DiskPressure", "False");
    assert_eq!(running(&site.get("quiet")), quiet);
    assert_eq!(site.events("Evicted", "fills"), 1);
    assert_eq!(site.events("Evicted", "quiet"), 0);
}

/// A pod that writes 8 MiB and 30 files into its volume, has 30 processes, and says so in the volume.
const MODEST: &str = "dd if=/dev/zero of=/data/own bs=1M count=8 2>/dev/null; n=0; \
                      while [ $n -lt 30 ]; do : >/data/f$n; sleep 100000 & n=$((n + 1)); done; : >/data/done; \
                      while :; do sleep 1; done";

/// Pods that take what the node is short of then: which condition says so, and the resource of the message. Each is slow enough
/// for the agent, which looks every ten seconds, to see it before nothing is left.
const HOGS: [(&str, &str, &str, &str); 3] = [
    (
        "bytes",
        "DiskPressure",
        "ephemeral-storage",
        "n=0; while :; do dd if=/dev/zero of=/data/$n bs=1M count=4 2>/dev/null; n=$((n + 1)); sleep 1; done",
    ),
    (
        "files",
        "DiskPressure",
        "inodes",
        "n=0; while :; do k=0; while [ $k -lt 40 ]; do : >/data/$n-$k; k=$((k + 1)); done; n=$((n + 1)); sleep 1; done",
    ),
    (
        "forks",
        "PIDPressure",
        "pids",
        "n=0; while [ $n -lt 170 ]; do sleep 100000 & n=$((n + 1)); [ $((n % 5)) -gt 0 ] || sleep 0.3; done; while :; do sleep 1; done",
    ),
];

#[test]
fn nodefs_inodes_pids_take_the_pod_that_uses_most_and_no_other_while_the_agent_is_killed() {
    // The root directory has a disk of its own, with few inodes.
    let mut site = Site::prepared("evictionPressureTransitionPeriod: 20s\n", |node| {
        node.make_root_disk("-m 0 -N 2048");
        node.sh(MOUNT_ROOT_DISK);
    });
    let mount = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    site.create(&object("quiet", SLEEP, &mount));
    site.create(&object("modest", MODEST, &mount));
    let others = ["quiet", "modest"].map(|name| (name, running(&site.wait_running(name))));
    site.node().eventually(
        "the pod has all that it wants",
        "ls /var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/data/done",
    );
    // As the agent counts them; a hundred more may begin.
    let processes: u64 = site
        .node()
        .sh(
            "most=$(sort -n /proc/sys/kernel/pid_max /proc/sys/kernel/threads-max | head -n 1)\n\
             now=$(cut -d' ' -f4 /proc/loadavg | cut -d/ -f2)\necho $((most - now - 100))",
        )
        .parse()
        .unwrap();
    site.configure(&format!(
        "evictionHard: {{nodefs.available: 60Mi, nodefs.inodesFree: \"900\", pid.available: \"{processes}\"}}\n"
    ));
    for condition in ["DiskPressure", "PIDPressure"] {
        site.wait_condition(condition, "False");
    }

    for (name, condition, resource, script) in HOGS {
        site.create(&object(name, script, &mount));
        site.wait_condition(condition, "True");
        site.kill_agent();
        let hog = site.wait(name, "is evicted", is_evicted);
        let message = hog["status"]["message"].as_str().unwrap_or_default();
        let begin = format!("The node was low on resource: {resource}. Threshold quantity: ");
        assert!(message.starts_with(&begin), "{name}: {message}");
        site.wait_condition(condition, "False");
        for (other, before) in &others {
            assert_eq!(running(&site.get(other)), *before, "{other} beside {name}");
        }
    }
    for (name, ..) in HOGS {
        assert_eq!(site.events("Evicted", name), 1, "{name}");
    }
    for (other, _) in &others {
        assert_eq!(site.events("Evicted", other), 0, "{other}");
    }
}

//! cgroup v2 with the systemd driver: limits, weights and numbers of processes of every level.

use std::collections::BTreeMap;

use serde_json::json;

use super::node::{Node, SLEEP, pod, rows};

/// Value of each file, by its path below the top.
type Limits = BTreeMap<String, String>;

fn limits(node: &mut Node) -> Limits {
    limits_below(node, "kubepods.slice")
}

fn limits_below(node: &mut Node, top: &str) -> Limits {
    let text = node.sh(&format!(
        "cd /sys/fs/cgroup && find {top} \\( -name memory.max -o -name memory.min -o -name memory.low \
         -o -name cpu.max -o -name cpu.weight -o -name pids.max -o -name 'hugetlb.*.max' \\) \
         -exec sh -c 'for f; do echo \"$f=$(cat \"$f\")\"; done' sh {{}} +"
    ));
    text.lines()
        .filter_map(|line| line.split_once('='))
        .map(|(file, value)| (file.to_owned(), value.to_owned()))
        .collect()
}

/// The value of the only file whose path has these parts.
#[track_caller]
fn of<'a>(limits: &'a Limits, slice: &str, file: &str) -> &'a str {
    let end = format!("{slice}.slice/{file}");
    let mut found = limits.iter().filter(|(path, _)| path.ends_with(&end));
    let (Some((_, value)), None) = (found.next(), found.next()) else {
        panic!("no single {end} in {limits:#?}")
    };
    value
}

/// `kubepods-<class>-pod<UID>`, by the name of the pod.
fn slice_of(node: &mut Node, class: &str, pod: &str) -> String {
    let uid = node.sh(&format!(
        "ctr -n k8s.io containers list -q 'labels.\"io.kubernetes.pod.name\"=={pod}-vmnode' | head -n 1 | \
         xargs ctr -n k8s.io containers info | sed -n 's/.*\"io.kubernetes.pod.uid\": \"\\(.*\\)\".*/\\1/p' | head -n 1"
    ));
    format!("kubepods{class}-pod{}", uid.replace('-', "_"))
}

#[test]
fn limits_of_every_level_stay_whatever_is_reloaded_or_restarted() {
    let mut node = Node::started();
    let with = |name: &str, resources: serde_json::Value| {
        let mut pod = pod(name, "Always", SLEEP);
        pod["spec"]["containers"][0]["resources"] = resources;
        pod
    };
    let guaranteed = json!({"limits": {"cpu": "200m", "memory": "48Mi"}});
    let burstable = json!({"requests": {"cpu": "100m", "memory": "16Mi"}, "limits": {"cpu": "300m", "memory": "64Mi"}});
    node.manifest(&with("guaranteed", guaranteed));
    node.manifest(&with("burstable", burstable));
    node.manifest(&with("least", json!({})));
    for pod in ["guaranteed", "burstable", "least"] {
        node.wait_running(pod);
    }
    let guaranteed = slice_of(&mut node, "", "guaranteed");
    let burstable = slice_of(&mut node, "-burstable", "burstable");
    let least = slice_of(&mut node, "-besteffort", "least");

    let before = limits(&mut node);
    let total: u64 = node
        .sh("awk '$1 == \"MemTotal:\" { print $2 * 1024 }' /proc/meminfo")
        .parse()
        .unwrap();
    let all = (total - (128 << 20)) / 4096 * 4096;
    for (slice, file, value) in [
        ("kubepods", "memory.max", all.to_string().as_str()),
        // 1,900 thousandths of a processor.
        ("kubepods", "cpu.weight", "75"),
        ("kubepods-besteffort", "cpu.weight", "1"),
        (&guaranteed, "memory.max", "50331648"),
        (&guaranteed, "cpu.max", "20000 100000"),
        (&guaranteed, "pids.max", "200"),
        (&guaranteed, "hugetlb.2MB.max", "0"),
        (&burstable, "memory.max", "67108864"),
        (&burstable, "cpu.max", "30000 100000"),
        (&burstable, "pids.max", "200"),
        (&least, "memory.max", "max"),
        (&least, "cpu.weight", "1"),
        (&least, "pids.max", "200"),
    ] {
        assert_eq!(of(&before, slice, file), value, "{slice}/{file}");
    }

    for action in [
        "systemctl daemon-reload",
        "systemctl restart holdfast",
        "systemctl daemon-reload",
        "systemctl restart containerd",
        "systemctl daemon-reexec",
        "systemctl restart dbus",
        "systemctl daemon-reload",
    ] {
        node.sh(action);
        assert_eq!(limits(&mut node), before, "after {action}");
    }

    // A pod that starts after all that has its limits, and takes nothing from the others.
    node.manifest(&with(
        "late",
        json!({"limits": {"cpu": "100m", "memory": "32Mi"}}),
    ));
    node.wait_running("late");
    let late = slice_of(&mut node, "", "late");
    node.sh("systemctl daemon-reload");
    let mut after = limits(&mut node);
    assert_eq!(of(&after, &late, "memory.max"), "33554432");
    assert_eq!(of(&after, &late, "cpu.max"), "10000 100000");
    after.retain(|path, _| !path.contains(&late));
    assert_eq!(after, before);

    // What somebody else changes is corrected within a minute, and told once.
    let file = before
        .keys()
        .find(|path| path.ends_with(&format!("{burstable}.slice/memory.max")));
    let file = file.unwrap().clone();
    node.sh(&format!("echo max >/sys/fs/cgroup/{file}"));
    node.eventually(
        "the limit is corrected",
        &format!("grep -qx 67108864 /sys/fs/cgroup/{file}"),
    );
    let told = node.sh("journalctl -u holdfast -o cat | grep -c CgroupLimitsCorrected");
    assert_eq!(told, "1");

    // A pod that goes leaves no unit.
    node.sh("rm /etc/kubernetes/manifests/late.json");
    node.eventually(
        "its slice is gone",
        &format!("! systemctl list-units --all --no-legend | grep -q {late}"),
    );
}

/// The only value of the file in the directory of the pod, below the one of its class.
#[track_caller]
fn of_pod<'a>(limits: &'a Limits, class: &str, file: &str) -> &'a str {
    let mut found = limits.iter().filter(|(path, _)| {
        let pod = path
            .strip_prefix(class)
            .and_then(|p| p.strip_prefix("/pod"));
        pod.and_then(|pod| pod.split_once('/'))
            .is_some_and(|(_, f)| f == file)
    });
    let (Some((_, value)), None) = (found.next(), found.next()) else {
        panic!("no single {class}/pod*/{file} in {limits:#?}")
    };
    value
}

#[test]
fn the_cgroupfs_driver_with_containerd_2_keeps_the_same_limits() {
    let mut node = Node::installed();
    node.sh(
        // The runtime's driver counts, which is another one than the configured.
        "grep -q 'cgroupDriver: systemd' /etc/holdfast/config.yaml && \
         sed -i 's/SystemdCgroup = true/SystemdCgroup = false/' /etc/containerd/config-2.toml && machine-containerd 2 && \
         ctr version | grep -A 1 Server | grep -q 'Version: *2'",
    );
    node.start();
    for (name, resources) in [
        (
            "guaranteed",
            json!({"limits": {"cpu": "200m", "memory": "48Mi"}}),
        ),
        (
            "burstable",
            json!({"requests": {"cpu": "100m", "memory": "16Mi"}, "limits": {"cpu": "300m", "memory": "64Mi"}}),
        ),
        ("least", json!({})),
    ] {
        let mut pod = pod(name, "Always", SLEEP);
        pod["spec"]["containers"][0]["resources"] = resources;
        node.manifest(&pod);
        node.wait_running(name);
    }
    let before = limits_below(&mut node, "kubepods");
    for (class, file, value) in [
        ("kubepods", "memory.max", "50331648"),
        ("kubepods", "cpu.max", "20000 100000"),
        ("kubepods", "pids.max", "200"),
        ("kubepods/burstable", "memory.max", "67108864"),
        ("kubepods/burstable", "cpu.max", "30000 100000"),
        ("kubepods/besteffort", "memory.max", "max"),
        ("kubepods/besteffort", "cpu.weight", "1"),
        ("kubepods/besteffort", "pids.max", "200"),
    ] {
        assert_eq!(of_pod(&before, class, file), value, "{class}: {file}");
    }
    assert_eq!(
        node.sh("test -e /sys/fs/cgroup/kubepods.slice || echo none"),
        "none"
    );
    for action in [
        "systemctl daemon-reload",
        "systemctl daemon-reexec",
        "systemctl restart holdfast",
        "systemctl restart containerd",
        "systemctl daemon-reload",
    ] {
        node.sh(action);
        assert_eq!(
            limits_below(&mut node, "kubepods"),
            before,
            "after {action}"
        );
    }
    node.remove_manifest("burstable");
    node.wait_gone("burstable");
    node.eventually(
        "its cgroup is gone",
        "! ls -d /sys/fs/cgroup/kubepods/burstable/pod*",
    );
    node.is_healthy();
}

/// The value of a file in the cgroup of the container's process.
fn of_container(node: &mut Node, pod: &str, file: &str) -> String {
    node.sh(&format!(
        "id=$(ctr -n k8s.io containers list -q \
           'labels.\"io.kubernetes.pod.name\"=={pod}-vmnode,labels.\"io.cri-containerd.kind\"==container' | head -n 1) && \
         process=$(ctr -n k8s.io tasks list | awk -v id=$id '$1 == id {{ print $2 }}') && \
         cat /sys/fs/cgroup$(sed 's/^0:://' /proc/$process/cgroup)/{file}"
    ))
}

#[test]
fn swap_huge_pages_and_a_container_that_takes_too_much_memory_are_as_on_any_node() {
    let mut node = Node::installed();
    node.sh(
        "truncate -s 0 /swap && chmod 600 /swap && dd if=/dev/zero of=/swap bs=1M count=128 status=none && \
         mkswap -q /swap && swapon /swap && echo 16 >/proc/sys/vm/nr_hugepages && \
         test $(cat /proc/sys/vm/nr_hugepages) = 16",
    );
    node.start();

    // No pod swaps, and what a pod may have of huge pages is limited.
    let mut huge = pod("huge", "Always", SLEEP);
    huge["spec"]["containers"][0]["resources"] =
        json!({"limits": {"cpu": "100m", "memory": "32Mi", "hugepages-2Mi": "4Mi"}});
    huge["spec"]["volumes"] = json!([{"name": "pages", "emptyDir": {"medium": "HugePages"}}]);
    huge["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "pages", "mountPath": "/pages"}]);
    node.manifest(&huge);
    node.wait_running("huge");
    let slice = slice_of(&mut node, "", "huge");
    // The container's own is the runtime's, and containerd does without (`disable_hugetlb_controller`).
    assert_eq!(of(&limits(&mut node), &slice, "hugetlb.2MB.max"), "4194304");
    for (file, value) in [
        ("memory.swap.max", "0"),
        ("memory.oom.group", "1"),
        ("memory.max", "33554432"),
    ] {
        assert_eq!(of_container(&mut node, "huge", file), value, "{file}");
    }
    node.sh(
        "grep -q '/volumes/kubernetes.io~empty-dir/pages hugetlbfs .*pagesize=2M' /proc/mounts",
    );

    // Reloads of systemd take none of it.
    node.sh("systemctl daemon-reload; systemctl daemon-reexec");
    assert_eq!(of(&limits(&mut node), &slice, "hugetlb.2MB.max"), "4194304");
    assert_eq!(of_container(&mut node, "huge", "memory.swap.max"), "0");

    // The kernel ends a container that takes more than it may, with all of its processes; the node lives.
    let mut greedy = pod("greedy", "Never", "tail /dev/zero & wait; sleep 1000");
    greedy["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "24Mi"}});
    node.manifest(&greedy);
    let deadline = std::time::Instant::now() + super::node::PATIENCE;
    let ended = loop {
        let all = rows(&mut node.machine, "containers").unwrap();
        let row = all.into_iter().find(|row| row["name"] == "greedy-vmnode");
        let ended = row
            .map(|mut row| row["lastExit"].take())
            .unwrap_or_default();
        if !ended.is_null() {
            break ended;
        }
        assert!(std::time::Instant::now() < deadline, "it goes on");
        std::thread::sleep(std::time::Duration::from_millis(300));
    };
    assert_eq!(
        (&ended["reason"], &ended["exitCode"]),
        (&json!("OOMKilled"), &json!(137)),
        "{ended}"
    );
    node.is_healthy();
}

//! What the agent tells of containers on real containerd: a busy one shows its processor time, one that holds memory its
//! memory, a pod its traffic, and the disks what was written. Needs root and containerd (`hack/deps.sh runtime`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

#[path = "support/agent_process.rs"]
mod agent_process;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use agent_process::{Site, eventually, free_port};
use holdfast_testkit::containerd::{BUSYBOX, PrivateContainerd, Version};
use serde_json::{Value, json};

/// GET from the port that only reads.
fn get(port: u16, path: &str) -> Result<String, String> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect(address).map_err(|e| e.to_string())?;
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .map_err(|e| e.to_string())?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n"
    )
    .map_err(|e| e.to_string())?;
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .map_err(|e| e.to_string())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    if head.starts_with("HTTP/1.1 200") {
        Ok(body.to_owned())
    } else {
        Err(answer)
    }
}

fn summary(port: u16) -> Result<Value, String> {
    serde_json::from_str(&get(port, "/stats/summary")?).map_err(|e| e.to_string())
}

/// Without disks, which are measured once a minute.
fn cpu_and_memory(port: u16) -> Result<Value, String> {
    let told = get(port, "/stats/summary?only_cpu_and_memory=true")?;
    serde_json::from_str(&told).map_err(|e| e.to_string())
}

/// Whether a container of the pod has said that it is done.
fn done(site: &Site) -> Result<(), String> {
    let pods = std::fs::read_dir(site.pod_logs()).map_err(|e| e.to_string())?;
    let said = pods.flatten().any(|pod| {
        let log = std::fs::read_to_string(pod.path().join("holds/0.log"));
        log.is_ok_and(|log| log.contains(" done"))
    });
    said.then_some(())
        .ok_or_else(|| "it has not written everything yet".to_owned())
}

/// The pod's statistics and those of its container `name`.
fn container<'a>(summary: &'a Value, pod: &str, name: &str) -> Option<(&'a Value, &'a Value)> {
    let pods = summary["pods"].as_array()?;
    let of = |p: &&Value| {
        p["podRef"]["name"]
            .as_str()
            .is_some_and(|n| n.starts_with(pod))
    };
    let pod = pods.iter().find(of)?;
    let containers = pod["containers"].as_array()?;
    Some((pod, containers.iter().find(|c| c["name"] == name)?))
}

/// The value of the series that has all of these in it.
fn series(text: &str, parts: &[&str]) -> Option<f64> {
    let line = text
        .lines()
        .find(|line| !line.starts_with('#') && parts.iter().all(|part| line.contains(part)))?;
    let (_, values) = line.rsplit_once('}')?;
    values.split_whitespace().next()?.parse().ok()
}

/// Waits until the series of `/metrics/cadvisor` that has all of these in it is as great.
#[track_caller]
fn at_least(port: u16, parts: &[&str], least: f64) {
    eventually(&format!("{parts:?} of at least {least}"), || {
        let cadvisor = get(port, "/metrics/cadvisor")?;
        match series(&cadvisor, parts) {
            Some(value) if value >= least => Ok(()),
            value => Err(format!("{value:?}")),
        }
    });
}

/// The disks of this machine that its cgroups have figures of are shown, all in all and for containers alike.
fn disks(port: u16) {
    let kept = std::fs::read_to_string("/sys/fs/cgroup/io.stat")
        .or_else(|_| {
            std::fs::read_to_string(
                "/sys/fs/cgroup/blkio/blkio.throttle.io_service_bytes_recursive",
            )
        })
        .unwrap_or_default();
    if !kept.contains(':') {
        println!("the kernel keeps no account of this machine's disks");
        return;
    }
    for name in [
        "container_fs_reads_total{",
        "container_fs_reads_bytes_total{",
        "container_fs_writes_total{",
        "container_fs_writes_bytes_total{",
    ] {
        at_least(port, &[name, "id=\"/\"", "device=\"/dev/"], 0.0);
    }
}

/// What the agent tells of itself once a pod runs.
fn agent_metrics(port: u16) {
    for parts in [
        ["kubelet_cgroup_manager_duration_seconds_count{", "create"],
        [
            "volume_operation_total_seconds_count{",
            "kubernetes.io/empty-dir",
        ],
        ["kubernetes_feature_enabled{", "KubeletPSI"],
    ] {
        let metrics = get(port, "/metrics").unwrap();
        let value = series(&metrics, &parts);
        assert!(
            value.is_some_and(|value| value >= 1.0),
            "{parts:?}: {metrics}"
        );
    }
    let metrics = get(port, "/metrics").unwrap();
    assert!(
        metrics.contains("\nkubelet_containers_per_pod_count_bucket{le=\"2.0\"} 1\n"),
        "{metrics}"
    );
    // Nobody created a static pod.
    assert!(
        metrics.contains("\nkubelet_pod_start_total_duration_seconds_count 0\n"),
        "{metrics}"
    );
    get(port, "/healthz").unwrap();
    let slis = get(port, "/metrics/slis").unwrap();
    for line in [
        "kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 1",
        "kubernetes_healthchecks_total{name=\"syncloop\",status=\"success\",type=\"healthz\"} ",
    ] {
        assert!(slis.lines().any(|l| l.starts_with(line)), "{line}: {slis}");
    }
}

#[test]
fn busy_containers_show_what_they_use() {
    let runtime =
        PrivateContainerd::start(Version::Installed).expect("hack/deps.sh runtime installs it");
    let site = Site::new(&runtime.endpoint());
    // Dropped before the site: its cgroups go when nothing is in them any more.
    let _runtime = runtime;
    let port = free_port();
    site.configure(&format!("address: 127.0.0.1\nreadOnlyPort: {port}\n"));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "busy", "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "ram", "emptyDir": {"medium": "Memory"}}],
            "containers": [
                {
                    "name": "spins", "image": BUSYBOX, "command": ["sh", "-c", "while true; do :; done"],
                    "resources": {"limits": {"cpu": "200m", "memory": "64Mi"}},
                },
                {
                    "name": "holds", "image": BUSYBOX,
                    "command": ["sh", "-c",
                        "dd if=/dev/zero of=/ram/f bs=1M count=24; dd if=/dev/zero of=/scratch/f bs=1M count=8; \
                         dd if=/dev/zero of=/written bs=1M count=4; echo done; sync; \
                         (while true; do echo x | nc -w 1 127.0.0.1 9; ping -c 1 -w 1 10.255.255.1 >/dev/null 2>&1; sleep 1; done) & \
                         exec sleep 100000"],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}, {"name": "ram", "mountPath": "/ram"}],
                },
            ],
        },
    });
    site.write_manifest("busy.json", &pod.to_string());
    let agent = site.start_with(&["--enable-server=true"]);
    site.wait_phase("busy", "Running");

    // The first answer has no rate yet; the second has, and more time in all.
    let first = eventually("a busy container", || {
        let told = cpu_and_memory(port)?;
        let (_, spins) = container(&told, "busy", "spins").ok_or("not there yet")?;
        let spent = spins["cpu"]["usageCoreNanoSeconds"]
            .as_u64()
            .ok_or("no CPU yet")?;
        (spent > 0)
            .then_some(spent)
            .ok_or_else(|| "nothing spent yet".to_owned())
    });
    let (told, rate) = eventually("its rate", || {
        std::thread::sleep(Duration::from_secs(2));
        let told = cpu_and_memory(port)?;
        let (_, spins) = container(&told, "busy", "spins").ok_or("gone")?;
        let rate = spins["cpu"]["usageNanoCores"].as_u64().ok_or("no rate")?;
        // The limit is a fifth of a core; a machine that is busy gives less.
        let moves = (10_000_000..400_000_000).contains(&rate);
        moves
            .then(|| (told.clone(), rate))
            .ok_or_else(|| format!("rate {rate}"))
    });
    let (busy, spins) = container(&told, "busy", "spins").unwrap();
    assert!(spins["cpu"]["usageCoreNanoSeconds"].as_u64().unwrap() > first);
    println!(
        "a container that spins at 200m: {} thousandths of a core",
        rate / 1_000_000
    );
    assert!(
        spins["memory"]["availableBytes"].as_u64().unwrap() < 64 << 20,
        "{spins}"
    );
    assert!(
        busy["cpu"]["usageCoreNanoSeconds"].as_u64().unwrap() >= first,
        "{busy}"
    );
    assert!(busy["startTime"].is_string() && spins["startTime"].is_string());

    eventually("everything written", || done(&site));
    let (busy, holds) = eventually("memory, disks and traffic", || {
        let told = summary(port)?;
        let (busy, holds) = container(&told, "busy", "holds").ok_or("gone")?;
        let memory = holds["memory"]["workingSetBytes"].as_u64().unwrap_or(0);
        let layer = holds["rootfs"]["usedBytes"].as_u64().unwrap_or(0);
        let sent = busy["network"]["txBytes"].as_u64().unwrap_or(0);
        let found = memory >= 24 << 20 && layer >= 4 << 20 && sent > 0;
        found
            .then(|| (busy.clone(), holds.clone()))
            .ok_or_else(|| format!("{busy} {holds}"))
    });
    assert_eq!(busy["network"]["name"], "eth0", "{busy}");
    assert!(holds["logs"]["usedBytes"].as_u64().unwrap() > 0, "{holds}");
    let volume = |name: &str| {
        let volumes = busy["volume"].as_array().unwrap();
        let found = volumes.iter().find(|v| v["name"] == name).unwrap();
        found["usedBytes"].as_u64().unwrap()
    };
    assert!(
        volume("scratch") >= 8 << 20 && volume("ram") >= 24 << 20,
        "{busy}"
    );
    let on_disk = busy["ephemeral-storage"]["usedBytes"].as_u64().unwrap();
    assert!(
        (12 << 20..24 << 20).contains(&on_disk),
        "what is in memory is not on disk: {busy}"
    );

    let node = &summary(port).unwrap()["node"];
    for (what, value) in [
        ("cpu", &node["cpu"]["usageCoreNanoSeconds"]),
        ("memory", &node["memory"]["workingSetBytes"]),
        ("available memory", &node["memory"]["availableBytes"]),
        ("fs", &node["fs"]["capacityBytes"]),
        ("imageFs", &node["runtime"]["imageFs"]["usedBytes"]),
        ("rlimit", &node["rlimit"]["curproc"]),
    ] {
        assert!(value.as_u64().is_some_and(|v| v > 0), "{what}: {node}");
    }
    let parts: Vec<_> = node["systemContainers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["name"])
        .collect();
    assert_eq!(parts, ["kubelet", "runtime", "pods"], "{node}");

    // The same as metrics.
    let resource = get(port, "/metrics/resource").unwrap();
    let at = ["container=\"holds\"", "namespace=\"default\"", "pod=\"busy"];
    let memory = series(
        &resource,
        &[&["container_memory_working_set_bytes{"], &at[..]].concat(),
    )
    .unwrap();
    assert!(memory >= f64::from(24 << 20), "{resource}");
    let spins = ["container=\"spins\"", "pod=\"busy"];
    for (name, least) in [
        ("container_cpu_usage_seconds_total{", 0.01),
        // On a machine that is busy the container seldom gets as much as it may have.
        ("container_cpu_cfs_throttled_periods_total{", 1.0),
        ("container_spec_memory_limit_bytes{", f64::from(64 << 20)),
        ("container_spec_cpu_quota{", 20_000.0),
        ("container_processes{", 1.0),
        // Its output and what the shell reads from.
        ("container_file_descriptors{", 3.0),
        ("container_sockets{", 0.0),
        ("container_tasks_state{", 0.0),
    ] {
        at_least(port, &[&[name], &spins[..]].concat(), least);
    }
    disks(port);
    agent_metrics(port);
    let traffic = [
        "container_network_transmit_bytes_total{",
        "interface=\"eth0\"",
        "pod=\"busy",
    ];
    at_least(port, &traffic, 1.0);

    let begun = Instant::now();
    std::thread::sleep(Duration::from_millis(1100));
    let before = begun.elapsed();
    get(port, "/metrics/resource").unwrap();
    println!(
        "a scrape of /metrics/resource on containerd: {:?}",
        begun.elapsed() - before
    );
    drop(agent);
}

//! Fixed trees of cgroups and `/proc`, and fixed answers of the runtime.

use std::path::Path;

use holdfast_testkit::fake_cri::{FakeCri, Fault};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::model::{Descriptors, DiskIo, Fs, Limits, Throttling};
use super::*;
use crate::core::pressure::{Disks, Rules, Signal, Space};
use crate::core::state::Transaction;
use crate::eviction::{DiskUsage, Figures as _, UsageQuery};
use crate::kuberuntime::cri::CriTimeouts;
use crate::types::metrics::{Metrics, OperationLabel};
use crate::types::runtime::{ContainerStatus, PodStatus, SandboxState, SandboxStatus};
use crate::types::{BootId, Stamp};

const UID: &str = "11111111-2222-3333-4444-555555555555";
const CONTAINER: &str = "c0ffee";
const SANDBOX: &str = "5a4db0";
/// 2023-11-14T22:13:20Z.
const NOW_MS: i64 = 1_700_000_000_000;

struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Stamp {
        let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: NOW_MS + ms,
        }
    }
}

fn write(root: &Path, files: &[(&str, &str)]) {
    for (path, text) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

fn proc(root: &Path) -> Proc {
    write(
        root,
        &[
            (
                "meminfo",
                "MemTotal:        4000000 kB\nMemFree:         1000000 kB\nCached:           800000 kB\n\
                 Buffers:           40000 kB\nSwapCached:        10000 kB\nHugetlb:          200000 kB\n\
                 Inactive(file):   500000 kB\nAnonPages:        700000 kB\nMapped:           100000 kB\n\
                 SwapTotal:        200000 kB\nSwapFree:         150000 kB\n",
            ),
            (
                "stat",
                "cpu  1000 200 300 99999 50 10 20 5 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\nbtime 1690000000\n",
            ),
            ("vmstat", "pgfault 5000\npgmajfault 60\noom_kill 2\n"),
            ("loadavg", "0.10 0.20 0.30 2/345 6789\n"),
            ("sys/kernel/pid_max", "32768\n"),
            ("sys/kernel/threads-max", "30000\n"),
            (
                "pressure/cpu",
                "some avg10=1.50 avg60=0.50 avg300=0.25 total=2000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
            ),
            (
                "1/net/route",
                "Iface\tDestination\tGateway\nens3\t0000000A\t0\nens4\t00000000\t0100000A\n",
            ),
            (
                "1/net/dev",
                "Inter-|   Receive\n face |bytes\n    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n\
                 veth1: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n  ens3: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n\
                 ens4:1000 11 1 2 0 0 0 0 2000 22 3 4 0 0 0 0\n",
            ),
            (
                "diskstats",
                "   7       0 loop0 1 0 2 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n 254       0 vda 9 0 9 9 9 9 9 9 0 9 9 0 0 0 0 9 9\n",
            ),
            (
                "777/net/dev",
                "a\nb\n    lo: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0\n  eth0: 300 3 0 0 0 0 0 0 400 4 0 1 0 0 0 0\n",
            ),
        ],
    );
    for (process, files) in [
        ("901", ["/dev/null", "socket:[11]", "pipe:[12]"].as_slice()),
        (
            "902",
            ["socket:[13]", "socketpair", "anon_inode:[eventpoll]"].as_slice(),
        ),
    ] {
        let dir = root.join(process).join("fd");
        std::fs::create_dir_all(&dir).unwrap();
        for (number, target) in files.iter().enumerate() {
            std::os::unix::fs::symlink(target, dir.join(number.to_string())).unwrap();
        }
    }
    Proc(root.to_path_buf())
}

const POD: &str = "kubepods/besteffort/pod11111111-2222-3333-4444-555555555555";

#[test]
fn processes_that_crun_puts_one_level_deeper_are_found() {
    let root = tempfile::tempdir().unwrap();
    let hierarchies = v2(root.path());
    let cgroup = format!("{POD}/{CONTAINER}");
    write(
        root.path(),
        &[
            (&format!("{cgroup}/cgroup.procs"), ""),
            (&format!("{cgroup}/container/cgroup.procs"), "17\n18\n"),
        ],
    );
    assert_eq!(hierarchies.processes(&cgroup), [17, 18]);
    let usage = hierarchies.read(&cgroup, 0, true).unwrap();
    assert_eq!(usage.processes, Some(2));
}

fn v2(root: &Path) -> Hierarchies {
    for (cgroup, scale) in [
        ("kubepods".to_owned(), 3_u64),
        (POD.to_owned(), 2),
        (format!("{POD}/{CONTAINER}"), 1),
    ] {
        let at = |file: &str| format!("{cgroup}/{file}");
        write(
            root,
            &[
                (
                    &at("cpu.stat"),
                    &format!(
                        "usage_usec {}\nuser_usec 600000\nsystem_usec 400000\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500\n",
                        scale * 1_000_000
                    ),
                ),
                (&at("cpu.max"), "50000 100000\n"),
                (&at("cpu.weight"), "39\n"),
                (&at("memory.current"), &format!("{}\n", scale * 10_000_000)),
                (
                    &at("memory.max"),
                    if scale == 1 { "20000000\n" } else { "max\n" },
                ),
                (&at("memory.peak"), "15000000\n"),
                (&at("memory.swap.current"), "4096\n"),
                (&at("memory.swap.max"), "max\n"),
                (
                    &at("memory.events"),
                    "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n",
                ),
                (
                    &at("memory.stat"),
                    "anon 6000000\nfile 3000000\nkernel 50000\nfile_mapped 1000000\ninactive_file 2000000\npgfault 900\npgmajfault 9\n",
                ),
                (
                    &at("memory.pressure"),
                    "some avg10=0.00 avg60=0.00 avg300=0.00 total=123\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=45\n",
                ),
                (&at("pids.current"), "3\n"),
                (&at("pids.max"), "max\n"),
                (
                    &at("io.stat"),
                    &format!(
                        "254:0 rbytes={} wbytes=8192 rios=5 wios=6 dbytes=0 dios=0\n9:9 rbytes=1\n",
                        scale * 4096
                    ),
                ),
                (
                    &at("cgroup.procs"),
                    if scale == 1 { "901\n902\n" } else { "" },
                ),
            ],
        );
    }
    write(
        root,
        &[
            (&format!("{POD}/{SANDBOX}/cgroup.procs"), "777\n"),
            ("io.stat", "254:0 rbytes=1000 wbytes=2000 rios=30 wios=40\n"),
        ],
    );
    Hierarchies {
        v2: true,
        mounts: vec![(root.to_path_buf(), Default::default())],
    }
}

fn v1(root: &Path) -> Hierarchies {
    let of = |controller: &str, file: &str| format!("{controller}/{POD}/{CONTAINER}/{file}");
    write(
        root,
        &[
            (&of("cpuacct", "cpuacct.usage"), "5000000000\n"),
            (&of("cpuacct", "cpuacct.stat"), "user 300\nsystem 200\n"),
            (&of("cpu", "cpu.shares"), "512\n"),
            (&of("cpu", "cpu.cfs_quota_us"), "-1\n"),
            (&of("cpu", "cpu.cfs_period_us"), "100000\n"),
            (
                &of("cpu", "cpu.stat"),
                "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
            ),
            (&of("memory", "memory.usage_in_bytes"), "1000000\n"),
            (
                &of("memory", "memory.limit_in_bytes"),
                "9223372036854771712\n",
            ),
            (
                &of("memory", "memory.memsw.limit_in_bytes"),
                "9223372036854771712\n",
            ),
            (
                &of("memory", "memory.stat"),
                "cache 1\nrss 1\ninactive_file 1\ntotal_cache 400000\ntotal_rss 600000\ntotal_mapped_file 70000\n\
                 total_swap 8192\ntotal_pgfault 50\ntotal_pgmajfault 5\ntotal_inactive_file 300000\n",
            ),
            (&of("memory", "memory.failcnt"), "3\n"),
            (
                &of("memory", "memory.oom_control"),
                "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            ),
            (&of("memory", "cgroup.procs"), "0\n901\n"),
            (&of("pids", "pids.current"), "6\n"),
            (&of("pids", "pids.max"), "100\n"),
            (&of("pids", "cgroup.procs"), "901\n902\n903\n"),
            (&of("blkio", "blkio.bfq.io_serviced_recursive"), "Total 0\n"),
            (
                &of("blkio", "blkio.throttle.io_serviced_recursive"),
                "254:0 Read 7\n254:0 Write 8\n254:0 Total 15\nTotal 15\n",
            ),
            (
                &of("blkio", "blkio.throttle.io_service_bytes_recursive"),
                "254:0 Read 700\n254:0 Write 800\n254:0 Total 1500\nTotal 1500\n",
            ),
        ],
    );
    let mount = |name: &str| (root.join(name), [name.to_owned()].into());
    Hierarchies {
        v2: false,
        mounts: ["blkio", "cpu", "cpuacct", "memory", "pids"]
            .map(mount)
            .to_vec(),
    }
}

#[test]
fn a_cgroup_of_version_2_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let tree = v2(dir.path());
    let usage = tree.read(&format!("/{POD}/{CONTAINER}"), 7, true).unwrap();
    let cpu = usage.cpu.unwrap();
    assert_eq!(cpu.total_ns, 1_000_000_000);
    assert_eq!(
        (cpu.user_ns, cpu.system_ns),
        (Some(600_000_000), Some(400_000_000))
    );
    let throttling = Throttling {
        periods: 10,
        throttled: 4,
        throttled_ns: 2_500_000,
    };
    assert_eq!(cpu.throttling, Some(throttling));
    let memory = usage.memory.unwrap();
    assert_eq!(
        memory.working_set,
        Some(8_000_000),
        "without inactive file pages"
    );
    assert_eq!(
        (memory.rss, memory.failcnt, memory.oom_kills),
        (Some(6_000_000), Some(7), Some(1))
    );
    assert_eq!(
        (memory.page_faults, memory.major_page_faults),
        (Some(900), Some(9))
    );
    assert_eq!(
        usage.swap,
        Some(Swap {
            usage: 4096,
            limit: None
        })
    );
    assert_eq!(
        (usage.threads, usage.threads_max, usage.processes),
        (Some(3), None, Some(2))
    );
    assert_eq!(usage.pressure.memory.unwrap().full.total_us, 45);
    assert_eq!(
        usage.pressure.cpu, None,
        "a kernel without it tells nothing"
    );
    let limits = Limits {
        cpu_shares: Some(998),
        cpu_quota_us: Some(50_000),
        cpu_period_us: Some(100_000),
        memory: Some(20_000_000),
    };
    assert_eq!(usage.limits, limits);
    let vda = DiskIo {
        device: (254, 0),
        reads: 5,
        read_bytes: 4096,
        writes: 6,
        written_bytes: 8192,
    };
    assert_eq!(usage.disks[1], vda);
    assert_eq!(tree.disks("/")[0].reads, 30, "of all cgroups together");
    assert_eq!(tree.read("/kubepods/gone", 7, true), None);
    assert_eq!(tree.processes(&format!("/{POD}/{SANDBOX}")), [777]);
}

#[test]
fn a_cgroup_of_version_1_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let tree = v1(dir.path());
    let path = format!("/{POD}/{CONTAINER}");
    let usage = tree.read(&path, 7, true).unwrap();
    let cpu = usage.cpu.unwrap();
    assert_eq!(cpu.total_ns, 5_000_000_000);
    assert_eq!(cpu.throttling, None, "there is no quota");
    let memory = usage.memory.unwrap();
    assert_eq!(
        (memory.usage, memory.working_set),
        (Some(1_000_000), Some(700_000))
    );
    assert_eq!((memory.rss, memory.cache), (Some(600_000), Some(400_000)));
    assert_eq!((memory.page_faults, memory.oom_kills), (Some(50), Some(2)));
    assert_eq!(
        usage.swap,
        Some(Swap {
            usage: 8192,
            limit: None
        })
    );
    assert_eq!(
        usage.limits.memory, None,
        "the kernel's way to say: no limit"
    );
    assert_eq!(
        (usage.limits.cpu_quota_us, usage.limits.cpu_shares),
        (None, Some(512))
    );
    assert_eq!(
        (usage.threads, usage.threads_max, usage.processes),
        (Some(6), Some(100), Some(3))
    );
    assert_eq!(
        tree.processes(&path),
        [901],
        "0 is of another PID namespace"
    );
    assert_eq!(tree.children(&format!("/{POD}")), [CONTAINER]);
    let vda = DiskIo {
        device: (254, 0),
        reads: 7,
        read_bytes: 700,
        writes: 8,
        written_bytes: 800,
    };
    assert_eq!(usage.disks, [vda]);
    let shallow = tree.read(&path, 7, false).unwrap();
    assert_eq!(
        (shallow.threads, shallow.disks),
        (None, Vec::new()),
        "nothing more is read than was asked for"
    );
}

#[test]
fn the_nodes_swap_is_what_the_root_cgroup_of_version_1_is_charged_for() {
    let dir = tempfile::tempdir().unwrap();
    let tree = v1(dir.path());
    assert_eq!(tree.swap_of_root(), None, "no figures");
    let root = |name: &str, text: &str| {
        std::fs::write(dir.path().join("memory").join(name), text).unwrap();
    };
    root("memory.stat", "swap 4096\ntotal_swap 12288\n");
    root("memory.use_hierarchy", "0\n");
    assert_eq!(tree.swap_of_root(), Some(4096));
    root("memory.use_hierarchy", "1\n");
    assert_eq!(tree.swap_of_root(), Some(12288));
    root("memory.stat", "total_rss 1\n");
    assert_eq!(
        tree.swap_of_root(),
        Some(0),
        "the kernel does not account it"
    );
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(v2(dir.path()).swap_of_root(), None, "by /proc/meminfo");
}

#[test]
fn the_machine_is_read_from_proc() {
    let dir = tempfile::tempdir().unwrap();
    let proc = proc(dir.path());
    let machine = proc.machine(7, true).unwrap();
    assert_eq!(machine.boot_ms, 1_690_000_000_000);
    assert_eq!(machine.memory_capacity, 4_000_000 * 1024);
    assert_eq!(machine.processes, Some((30_000, 345)));
    let memory = machine.usage.memory.unwrap();
    assert_eq!(memory.usage, Some(3_000_000 * 1024));
    let (anonymous, files, huge) = (700_000, 800_000 + 40_000 + 10_000 - 500_000, 200_000);
    assert_eq!(
        memory.working_set,
        Some((anonymous + files + huge) * 1024),
        "neither slabs nor what files left behind"
    );
    assert_eq!(
        machine.usage.swap,
        Some(Swap {
            usage: 50_000 * 1024,
            limit: Some(200_000 * 1024)
        })
    );
    // User, nice, system, interrupts: neither idle nor waiting.
    let ticks = 1000 + 200 + 300 + 10 + 20;
    let per_second = procfs::ticks_per_second();
    assert_eq!(
        machine.usage.cpu.unwrap().total_ns,
        ticks * (1_000_000_000 / per_second)
    );
    assert!((machine.usage.pressure.cpu.unwrap().some.avg10 - 1.5).abs() < 1e-9);
    let names: Vec<_> = proc
        .network(1)
        .unwrap()
        .into_iter()
        .map(|i| i.name)
        .collect();
    assert_eq!(names, ["ens3", "ens4"], "neither loopback nor ends of pods");
    assert_eq!(proc.default_interface(1).as_deref(), Some("ens4"));
    assert_eq!(proc.machine(7, true).unwrap().usage.threads, Some(345));
}

#[test]
fn what_the_runtime_tells_of_containers_and_pods_is_taken() {
    let value = |value| Some(v1::UInt64Value { value });
    let attributes = |id: &str| {
        Some(v1::ContainerAttributes {
            id: id.to_owned(),
            ..Default::default()
        })
    };
    let stats = v1::ContainerStats {
        attributes: attributes("c1"),
        cpu: Some(v1::CpuUsage {
            usage_core_nano_seconds: value(123),
            usage_nano_cores: value(4),
            ..Default::default()
        }),
        memory: Some(v1::MemoryUsage {
            working_set_bytes: value(50),
            ..Default::default()
        }),
        ..Default::default()
    };
    // containerd 1.6 says nothing of a container that has just ended.
    let silent = v1::ContainerStats {
        attributes: attributes("c2"),
        ..Default::default()
    };
    let usage = by_container(9, vec![stats, silent]);
    let told = &usage[&ContainerId::new("c1")];
    assert_eq!(told.at_ms, 9);
    let cpu = told.cpu.as_ref().unwrap();
    assert_eq!((cpu.total_ns, cpu.nano_cores), (123, Some(4)));
    assert_eq!(told.memory.as_ref().unwrap().working_set, Some(50));
    assert_eq!(usage[&ContainerId::new("c2")].cpu, None);

    let eth0 = v1::NetworkInterfaceUsage {
        name: "eth0".to_owned(),
        rx_bytes: value(10),
        tx_bytes: value(20),
        ..Default::default()
    };
    let sandbox = v1::PodSandboxStats {
        attributes: Some(v1::PodSandboxAttributes {
            metadata: Some(v1::PodSandboxMetadata {
                uid: "u1".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        linux: Some(v1::LinuxPodSandboxStats {
            network: Some(v1::NetworkUsage {
                default_interface: Some(eth0.clone()),
                interfaces: vec![eth0],
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let network = by_pod(vec![sandbox]);
    let interfaces = &network[&PodUid::new("u1")];
    assert_eq!(interfaces.len(), 1, "the default interface is told twice");
    assert_eq!((interfaces[0].rx.bytes, interfaces[0].tx.bytes), (10, 20));
}

struct World {
    dir: tempfile::TempDir,
    fake: FakeCri,
    metrics: Metrics,
    stats: StatsProvider,
}

fn pod_status(uid: &str, name: &str) -> PodStatus {
    let mut status = PodStatus::empty(PodUid::new(uid));
    status.name = name.to_owned();
    status.namespace = "shop".to_owned();
    status.sandboxes.push(SandboxStatus {
        id: SANDBOX.into(),
        attempt: 0,
        state: SandboxState::Ready,
        created_at_ns: (NOW_MS - 60_000) * 1_000_000,
        ips: Vec::new(),
        host_network: None,
        runtime_handler: String::new(),
    });
    let container = |name: &str, id: &str, state| ContainerStatus {
        id: id.into(),
        name: name.to_owned(),
        attempt: 0,
        sandbox_id: SANDBOX.into(),
        state,
        created_at_ns: (NOW_MS - 50_000) * 1_000_000,
        image: "registry/web:1".to_owned(),
        image_ref: String::new(),
        hash: String::new(),
        started_at_ns: 0,
        finished_at_ns: 0,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        log_path: String::new(),
        user: None,
    };
    status.containers = vec![
        container("web", CONTAINER, ContainerState::Running),
        container("setup", "0ld", ContainerState::Exited),
    ];
    status
}

fn pod(uid: &str, name: &str) -> Arc<Pod> {
    let pod = json!({
        "metadata": {"uid": uid, "name": name, "namespace": "shop"},
        "spec": {"containers": [{"name": "web", "image": "registry/web:1"}]},
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

/// One pod with a container that runs, and its cgroups where `tree` makes them.
async fn world(tree: Option<fn(&Path) -> Hierarchies>) -> World {
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeCri::new();
    let metrics = Metrics::default();
    let timeouts = CriTimeouts::default();
    let cri = CriClient::over(fake.channel(), "unix:///fake", timeouts, metrics.clone());
    let clock: Arc<dyn Clock> = Arc::new(TokioClock(Instant::now()));
    let store = Store::in_memory(Arc::clone(&clock));
    let record = PlegRecord {
        status: pod_status(UID, "web-0"),
    };
    store
        .commit(Transaction::new().put(UID, record))
        .await
        .unwrap();
    let pods = PodManager::default();
    pods.update(pod(UID, "web-0"));
    let root = dir.path();
    std::fs::create_dir_all(root.join("kubelet")).unwrap();
    let options = StatsOptions {
        node_name: "n1".to_owned(),
        root_dir: root.join("kubelet"),
        pod_logs_dir: root.join("logs"),
        runtime_socket: root.join("none.sock"),
        cgroups: CgroupConfig::default(),
        proc: proc(&root.join("proc")),
        hierarchies: Some(match tree {
            Some(tree) => tree(&root.join("cgroup")),
            None => Hierarchies::default(),
        }),
    };
    World {
        stats: StatsProvider::new(options, store, pods, cri, clock),
        fake,
        metrics,
        dir,
    }
}

impl World {
    /// Calls of the runtime so far.
    fn calls(&self) -> u64 {
        [
            "list_container_stats",
            "list_podsandbox_stats",
            "image_fs_info",
            "list_containers",
            "list_podsandbox",
        ]
        .iter()
        .map(|operation| {
            let label = OperationLabel {
                operation_type: (*operation).to_owned(),
            };
            self.metrics.runtime_operations.get_or_create(&label).get()
        })
        .sum()
    }

    /// With figures of this machine replaced by fixed ones.
    async fn fixed(&self) -> Snapshot {
        let mut snapshot = (*self.stats.snapshot(Depth::Full).await).clone();
        let fs = |used| Fs {
            at_ms: NOW_MS,
            device: "/dev/vda1".to_owned(),
            available: Some(600),
            capacity: Some(1000),
            used: Some(used),
            inodes_free: Some(80),
            inodes: Some(100),
            inodes_used: Some(20),
        };
        snapshot.node.cpus = 4;
        snapshot.node.fs = Some(fs(400));
        let mut storage = Storage {
            images: Some(fs(300)),
            ..Storage::default()
        };
        let of_container = ContainerStorage {
            rootfs: Some((40, Some(4))),
            logs: Some((5, 2)),
        };
        storage.containers.insert(CONTAINER.into(), of_container);
        let volume = |name: &str, memory| VolumeUsage {
            name: name.to_owned(),
            memory,
            fs: fs(100),
            ..VolumeUsage::default()
        };
        let volumes = vec![volume("cache", false), volume("token", true)];
        storage.volumes.insert(UID.into(), volumes);
        snapshot.storage = Some(Arc::new(storage));
        snapshot.remotes = ["p0ther", UID]
            .map(|pod| RemoteUsage {
                pod: pod.into(),
                volume: VolumeUsage {
                    claim: Some(("shop".to_owned(), "claim".to_owned())),
                    abnormal: Some(false),
                    ..volume("data", false)
                },
            })
            .to_vec();
        snapshot
    }
}

#[tokio::test(start_paused = true)]
async fn the_summary_is_upstreams() {
    let world = world(Some(v2)).await;
    let summary = summary::Summary::of(&world.fixed().await);
    insta::assert_snapshot!(serde_json::to_string_pretty(&summary).unwrap());
    let shallow = summary::Summary::of(&world.fixed().await.cpu_and_memory());
    let shallow: Value = serde_json::to_value(&shallow).unwrap();
    let keys = |of: &Value| of.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        keys(&shallow["pods"][0]),
        ["podRef", "startTime", "containers", "cpu", "memory", "swap"]
    );
    assert_eq!(
        keys(&shallow["node"]),
        [
            "nodeName",
            "systemContainers",
            "startTime",
            "cpu",
            "memory",
            "swap"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn the_resource_metrics_are_upstreams() {
    let world = world(Some(v2)).await;
    let snapshot = world.stats.snapshot(Depth::CpuAndMemory).await;
    let text = exposition::Format::Text.of(resource::encode(&snapshot));
    insta::assert_snapshot!(text);
    assert_eq!(world.calls(), 0, "cgroups tell all of it");
}

#[tokio::test(start_paused = true)]
async fn the_cadvisor_metrics_are_cadvisors() {
    let world = world(Some(v2)).await;
    let machine = cadvisor::MachineFacts {
        boot_id: "b".to_owned(),
        machine_id: "m".to_owned(),
        system_uuid: "s".to_owned(),
        kernel_version: "6.1".to_owned(),
        os_version: "Debian".to_owned(),
    };
    let text = cadvisor::encode(&world.fixed().await, &machine);
    insta::assert_snapshot!(exposition::Format::Text.of(text));
}

#[tokio::test(start_paused = true)]
async fn nobody_asks_nothing_is_read_and_many_share_one_collection() {
    let world = world(None).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(world.calls(), 0);
    let ask = || world.stats.snapshot(Depth::CpuAndMemory);
    let all = futures::future::join_all((0..50).map(|_| ask())).await;
    assert!(all.iter().all(|s| Arc::ptr_eq(s, &all[0])));
    assert_eq!(world.calls(), 1, "one list of containers without cgroups");
    tokio::time::sleep(MAX_AGE).await;
    let next = ask().await;
    assert!(
        !Arc::ptr_eq(&next, &all[0]),
        "too old to be handed out again"
    );
    assert_eq!(world.calls(), 2);
    // What has more in it serves those who want less, not the other way round.
    let full = world.stats.snapshot(Depth::Full).await;
    assert!(!Arc::ptr_eq(&full, &next));
    assert!(Arc::ptr_eq(&full, &ask().await));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_or_fails_costs_its_figures_only() {
    let world = world(None).await;
    world.fake.fail_always("list_container_stats", Fault::Hang);
    world.fake.fail_always("image_fs_info", Fault::Hang);
    let snapshot = world.stats.snapshot(Depth::Full).await;
    assert!(snapshot.failed, "and tells that it is not complete");
    assert_eq!(snapshot.pods[0].containers[0].usage.cpu, None);
    assert!(snapshot.node.usage.cpu.is_some());
    assert!(snapshot.storage.is_none(), "the disks were not waited for");
}

#[tokio::test(start_paused = true)]
async fn statistics_of_sandboxes_are_not_asked_for_again_where_there_are_none() {
    let world = world(None).await;
    let asked = || world.fake.count("list_podsandbox_stats");
    world.stats.snapshot(Depth::Full).await;
    assert_eq!(asked(), 1);
    tokio::time::sleep(Duration::from_secs(5)).await;
    world.stats.snapshot(Depth::Full).await;
    assert_eq!(asked(), 1, "the fake runtime does not offer them");
}

#[tokio::test(start_paused = true)]
async fn disks_are_measured_once_a_minute() {
    let world = world(None).await;
    let asked = || world.fake.count("image_fs_info");
    let first = world
        .stats
        .snapshot(Depth::Full)
        .await
        .storage
        .clone()
        .unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    let again = world
        .stats
        .snapshot(Depth::Full)
        .await
        .storage
        .clone()
        .unwrap();
    assert!(Arc::ptr_eq(&first, &again));
    assert_eq!(asked(), 1);
    tokio::time::sleep(Duration::from_secs(40)).await;
    world.stats.snapshot(Depth::Full).await;
    assert_eq!(asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn open_files_are_counted_once_a_minute_and_at_once_for_a_new_container() {
    let world = world(Some(v2)).await;
    let counted = async || {
        let snapshot = world.stats.snapshot(Depth::Full).await;
        let of = |usage: &Usage| usage.descriptors.map(|d| (d.open, d.sockets.unwrap()));
        let pod = &snapshot.pods[0];
        (of(&pod.usage), of(&pod.containers[0].usage))
    };
    assert_eq!(
        counted().await,
        (Some((0, 0)), Some((6, 2))),
        "a pod has no processes beside those of its containers"
    );
    std::fs::remove_file(world.dir.path().join("proc/901/fd/1")).unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(counted().await.1, Some((6, 2)), "half a minute old");
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(counted().await.1, Some((5, 1)));
    // One that has ended meanwhile is counted without its files.
    std::fs::remove_dir_all(world.dir.path().join("proc/902")).unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(counted().await.1, Some((2, 0)));
    let shallow = world.stats.snapshot(Depth::Full).await.cpu_and_memory();
    let usage = &shallow.pods[0].containers[0].usage;
    assert_eq!(usage.descriptors, None::<Descriptors>);
    assert!(usage.disks.is_empty() && shallow.devices.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_rate_is_that_between_two_collections() {
    let world = world(Some(v2)).await;
    let rate = |snapshot: &Snapshot| {
        let cpu = snapshot.pods[0].containers[0].usage.cpu.clone();
        cpu.unwrap().nano_cores
    };
    let first = world.stats.snapshot(Depth::CpuAndMemory).await;
    assert_eq!(rate(&first), None, "one sample is no rate");
    let stat = world
        .dir
        .path()
        .join("cgroup")
        .join(format!("{POD}/{CONTAINER}/cpu.stat"));
    tokio::time::sleep(Duration::from_secs(10)).await;
    // Five seconds of work in ten.
    std::fs::write(&stat, "usage_usec 6000000\n").unwrap();
    let second = world.stats.snapshot(Depth::CpuAndMemory).await;
    assert_eq!(rate(&second), Some(500_000_000));
    // Another container under the same ID, as it were: no rate of less than nothing.
    tokio::time::sleep(Duration::from_secs(10)).await;
    std::fs::write(&stat, "usage_usec 1000\n").unwrap();
    let third = world.stats.snapshot(Depth::CpuAndMemory).await;
    assert_eq!(rate(&third), None);
}

#[tokio::test(start_paused = true)]
async fn a_container_whose_cgroup_is_gone_is_told_without_figures() {
    let world = world(Some(v2)).await;
    let gone = world
        .dir
        .path()
        .join("cgroup")
        .join(format!("{POD}/{CONTAINER}"));
    std::fs::remove_dir_all(gone).unwrap();
    let snapshot = world.stats.snapshot(Depth::Full).await;
    let container = &snapshot.pods[0].containers[0];
    assert_eq!(
        (container.usage.cpu.clone(), container.cgroup.as_str()),
        (None, "")
    );
    let text = resource::encode(&snapshot);
    assert!(
        !text.contains("container_cpu_usage_seconds_total{"),
        "{text}"
    );
}

#[test]
fn an_interface_with_an_odd_name_hides_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let proc = proc(dir.path());
    let table = b"a\nb\n caf\xe9: 1 1 0 0 0 0 0 0 2 2 0 0 0 0 0 0\n ens3: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n";
    std::fs::write(dir.path().join("1/net/dev"), table).unwrap();
    let found = proc.network(1).unwrap();
    assert_eq!((found.len(), found[1].name.as_str()), (2, "ens3"));
}

#[tokio::test]
async fn an_observation_asks_the_runtime_where_images_are_once() {
    let world = world(Some(v2)).await;
    let figures = NodeFigures::new(world.stats.clone());
    for _ in 0..3 {
        let found = figures.observe().await.figures;
        assert_eq!(found[&Signal::Memory].available, 2_750_000 * 1024);
        assert_eq!(found[&Signal::Memory].capacity, 4_000_000 * 1024);
        assert_eq!(found[&Signal::Pid].available, 30_000 - 345);
        assert!(found[&Signal::NodeFs].capacity > 0);
    }
    assert_eq!(world.calls(), 1);
}

#[tokio::test]
async fn an_observation_gives_cgroup_v1_the_thresholds_of_memory_if_that_is_configured() {
    let world = world(Some(v1)).await;
    let memory = world.dir.path().join("cgroup/memory");
    let control = memory.join("cgroup.event_control");
    std::fs::write(memory.join("memory.usage_in_bytes"), "2048000000\n").unwrap();
    std::fs::write(&control, "").unwrap();
    let figures = NodeFigures::new(world.stats.clone());
    figures.observe().await;
    assert_eq!(std::fs::read_to_string(&control).unwrap(), "");
    let rules = Rules::of(&kubeletconfig::KubeletConfiguration::default());
    let figures = figures.with_notifications(&rules.thresholds);
    figures.observe().await;
    let given = std::fs::read_to_string(&control).unwrap();
    // What is used and available together, less 100Mi.
    let level = 2_048_000_000_u64 + 2_750_000 * 1024 - (100 << 20);
    assert_eq!(given.split(' ').nth(2), Some(level.to_string().as_str()));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_holds_up_one_observation_by_a_moment() {
    let world = world(Some(v2)).await;
    world.fake.fail_always("image_fs_info", Fault::Hang);
    let figures = NodeFigures::new(world.stats.clone());
    for most in [1100, 100, 100] {
        let start = Instant::now();
        let found = figures.observe().await.figures;
        assert!(found.contains_key(&Signal::Memory) && found.contains_key(&Signal::NodeFs));
        assert!(start.elapsed() <= Duration::from_millis(most));
    }
    assert_eq!(world.fake.count("image_fs_info"), 1);
}

#[tokio::test]
async fn disks_of_pods_count_if_they_were_walked_and_layers_are_known() {
    let snapshot = world(Some(v2)).await.fixed().await;
    let mut storage = (**snapshot.storage.as_ref().unwrap()).clone();
    let none = pressure::on_disk(&snapshot.pods, &storage);
    assert!(none.is_empty(), "nobody was walked");
    let on_disk = |bytes, inodes| DiskUsage { bytes, inodes };
    let walked = Walked {
        logs: [(CONTAINER.into(), on_disk(5, 2))].into(),
        volumes: on_disk(100, 20),
    };
    storage.walked.insert(UID.into(), walked);
    let used = &pressure::on_disk(&snapshot.pods, &storage)[&PodUid::new(UID)];
    let space = |bytes, inodes| Space { bytes, inodes };
    assert_eq!(used.volumes, space(100, 20));
    let container = used.containers["web"];
    let of_container = (container.rootfs, container.logs);
    assert_eq!(of_container, (Some(space(40, 4)), Some(space(5, 2))));
}

#[test]
fn a_container_of_a_sandbox_that_runs_elsewhere_is_told_from_an_idle_one() {
    let usage = |processes: u64, total_ns: u64, rss: u64| Usage {
        processes: Some(processes),
        cpu: Some(Cpu {
            total_ns,
            ..Cpu::default()
        }),
        memory: Some(Memory {
            rss: Some(rss),
            ..Memory::default()
        }),
        ..Usage::default()
    };
    for (processes, cpu, rss, wanted) in [
        (0, 0, 0, true),
        (1, 0, 0, false),
        (0, 5, 0, false),
        (0, 0, 4096, false),
    ] {
        assert_eq!(is_elsewhere(&usage(processes, cpu, rss)), wanted);
    }
    assert!(!is_elsewhere(&Usage::default()), "nothing was read");
}

#[tokio::test]
async fn a_runtime_in_trouble_costs_the_usage_of_disks_and_not_that_of_memory() {
    let world = world(Some(v2)).await;
    let trouble = Fault::Error(tonic::Code::Unavailable, "gone".to_owned());
    world.fake.fail_always("list_container_stats", trouble);
    let figures = NodeFigures::new(world.stats.clone());
    let usage = async |signal, disks| {
        let query = UsageQuery {
            signal,
            disks,
            max_age: Duration::MAX,
        };
        figures.usage(query).await
    };
    let memory = usage(Signal::Memory, Disks::One).await.unwrap();
    assert!(memory[&PodUid::new(UID)].memory.is_some());
    assert_eq!(usage(Signal::NodeFs, Disks::One).await, None, "no layers");
    assert_eq!(
        usage(Signal::NodeFs, Disks::Dedicated).await.unwrap().len(),
        1
    );
}

#[tokio::test]
async fn processes_are_counted_without_a_look_at_disks() {
    let world = world(Some(v2)).await;
    let figures = NodeFigures::new(world.stats.clone());
    let query = UsageQuery {
        signal: Signal::Pid,
        disks: Disks::One,
        max_age: Duration::MAX,
    };
    let usage = figures.usage(query).await.unwrap();
    assert!(usage[&PodUid::new(UID)].processes.is_some());
    assert_eq!(world.calls(), 0, "the runtime is asked for disks only");
}

//! Limits by class, version and driver; names that are refused.

use std::path::Path;

use super::settings::settings;
use super::*;
use crate::kuberuntime::resources::CpuMemory;
use crate::types::{BootId, Clock, SystemClock};

#[test]
fn limits_follow_the_class() {
    let sum = CpuMemory {
        cpu_request: Some(500),
        cpu_limit: Some(1_000),
        memory_request: None,
        memory_limit: Some(64 << 20),
    };
    let mut config = CgroupConfig::default();
    let burstable = pod_limits(QosClass::Burstable, sum, &config);
    assert_eq!(
        burstable,
        Limits {
            shares: Some(512),
            quota: Some((100_000, 100_000)),
            memory: Some(64 << 20),
        }
    );
    config.cpu_cfs_quota = false;
    assert_eq!(
        pod_limits(QosClass::Guaranteed, sum, &config).quota,
        Some((-1, 100_000))
    );
    let least = pod_limits(QosClass::BestEffort, CpuMemory::default(), &config);
    assert_eq!(
        (least.shares, least.quota, least.memory),
        (Some(2), None, None)
    );
}

#[test]
fn limits_become_the_files_of_each_version() {
    let limits = Limits {
        shares: Some(1024),
        quota: Some((25_000, 100_000)),
        memory: Some(4096),
    };
    let of = |version| {
        settings(version, limits)
            .into_iter()
            .map(|(_, file, value)| format!("{file}={value}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of(CgroupVersion::V1 { hybrid: false }),
        [
            "cpu.shares=1024",
            "cpu.cfs_period_us=100000",
            "cpu.cfs_quota_us=25000",
            "memory.limit_in_bytes=4096"
        ]
    );
    assert_eq!(
        of(CgroupVersion::V2),
        ["cpu.weight=39", "cpu.max=25000 100000", "memory.max=4096"]
    );
    let unlimited = Limits {
        quota: Some((-1, 100_000)),
        ..Limits::default()
    };
    assert_eq!(settings(CgroupVersion::V2, unlimited)[0].2, "max 100000");
}

/// A manager on a directory with these hierarchies instead of cgroupfs.
fn manager_on(
    mount: &Path,
    config: CgroupConfig,
    version: CgroupVersion,
    hierarchies: &[(&str, &[&str])],
) -> CgroupManager {
    let hierarchies = hierarchies.iter().map(|(dir, controllers)| Hierarchy {
        path: mount.join(dir),
        controllers: controllers.iter().map(|c| (*c).to_owned()).collect(),
    });
    CgroupManager {
        config,
        version,
        hierarchies: hierarchies.collect(),
        top: CgroupName::parse("/").child("kubepods"),
        systemd: None,
        wanted: Arc::default(),
        resized_memory: Arc::default(),
        resized_huge_pages: Arc::default(),
        metrics: None,
        pinning: None,
    }
}

#[tokio::test]
async fn the_quota_of_a_pod_follows_what_is_assigned_to_it() {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
    let (pinning, _store) = super::pinning::testkit::pinning(clock);
    let mount = tempfile::tempdir().unwrap();
    let manager = manager_on(
        mount.path(),
        CgroupConfig::default(),
        CgroupVersion::V2,
        &[],
    );
    let manager = manager.with_pinning(pinning.clone());
    let amounts = serde_json::json!({"cpu": "1", "memory": "1Gi"});
    let pod: Pod = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": amounts, "requests": amounts}}]},
    }))
    .unwrap();
    let quota = || manager.limits_of(&pod).unwrap().quota.unwrap().0;
    assert_eq!(quota(), 100_000, "it shares CPUs");
    let placed = pinning.place(&pod, |_| true).unwrap();
    pinning.reserve(&pod.uid(), placed);
    assert_eq!(quota(), -1);
}

#[test]
fn pods_may_use_the_cpus_of_the_nearest_cgroup_that_has_some() {
    const DIRS: &[(&str, &[&str])] = &[("", &["cpu", "cpuset"])];
    let mount = tempfile::tempdir().unwrap();
    let top = mount.path().join("kubepods");
    std::fs::create_dir(&top).unwrap();
    let config = CgroupConfig::default();
    let manager = manager_on(mount.path(), config, CgroupVersion::V2, DIRS);
    let cpus = || manager.cpus_for_pods().map(|cpus| cpus.to_string());
    assert_eq!(cpus(), None);
    std::fs::write(mount.path().join("cpuset.cpus.effective"), "0-7\n").unwrap();
    std::fs::write(top.join("cpuset.cpus.effective"), "\n").unwrap();
    assert_eq!(cpus().as_deref(), Some("0-7"));
    std::fs::write(top.join("cpuset.cpus.effective"), "2-3\n").unwrap();
    assert_eq!(cpus().as_deref(), Some("2-3"));
}

fn best_effort() -> Pod {
    serde_json::from_value(serde_json::json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
        "spec": {"containers": [{"name": "c"}]},
    }))
    .unwrap()
}

#[test]
fn the_process_limit_goes_to_the_same_file_everywhere() {
    const V1: CgroupVersion = CgroupVersion::V1 { hybrid: true };
    const V1_DIRS: &[(&str, &[&str])] = &[("cpu", &["cpu"]), ("pids", &["pids"]), ("unified", &[])];
    const V2_DIRS: &[(&str, &[&str])] = &[("", &["cpu", "memory", "pids"])];
    const FS: &str = "kubepods/besteffort/podu-1/pids.max";
    const SLICE: &str =
        "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podu_1.slice/pids.max";
    use CgroupDriver::{Cgroupfs, Systemd};
    for (version, dirs, driver, file) in [
        (V1, V1_DIRS, Cgroupfs, format!("pids/{FS}")),
        (V1, V1_DIRS, Systemd, format!("pids/{SLICE}")),
        (CgroupVersion::V2, V2_DIRS, Cgroupfs, FS.to_owned()),
        (CgroupVersion::V2, V2_DIRS, Systemd, SLICE.to_owned()),
    ] {
        for (limit, before, after) in [
            (Some(100), "max", "100"),
            (Some(100), "250", "100"),
            (None, "250", "max"),
            (Some(settings::MAX_PIDS + 1), "250", "max"),
        ] {
            let mount = tempfile::tempdir().unwrap();
            let file = mount.path().join(&file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, before).unwrap();
            let config = CgroupConfig {
                driver,
                pod_pids_limit: limit,
                ..CgroupConfig::default()
            };
            let manager = manager_on(mount.path(), config, version, dirs);
            manager.limit_pids(&best_effort()).unwrap();
            let found = std::fs::read_to_string(&file).unwrap();
            assert_eq!(found, after, "{version:?} {driver:?} {limit:?}");
        }
    }
}

#[test]
fn a_cgroup_that_stays_keeps_no_other_from_its_limits() {
    const DIRS: &[(&str, &[&str])] = &[("", &["cpu", "memory", "pids"])];
    let mount = tempfile::tempdir().unwrap();
    let class = mount.path().join("kubepods/besteffort");
    for pod in ["podu-1", "podu-a", "podu-b"] {
        std::fs::create_dir_all(class.join(pod)).unwrap();
    }
    std::fs::write(class.join("podu-1/pids.max"), "max").unwrap();
    // As a process that does not end keeps it.
    std::fs::write(class.join("podu-a/held"), "").unwrap();
    let config = CgroupConfig {
        pod_pids_limit: Some(100),
        ..CgroupConfig::default()
    };
    let manager = manager_on(mount.path(), config, CgroupVersion::V2, DIRS);
    let active = [Arc::new(best_effort())];
    let keep = [PodUid::new("u-1")].into();
    let errors = manager.sweep(Some(&keep), &active);
    let about = |error: &CgroupError| error.to_string().contains("podu-a");
    assert!(errors.iter().any(about), "{errors:?}");
    assert!(class.join("podu-a").exists() && !class.join("podu-b").exists());
    let limit = std::fs::read_to_string(class.join("podu-1/pids.max")).unwrap();
    assert_eq!(limit, "100");
    // Without a list of pods to keep nothing is an orphan.
    std::fs::create_dir(class.join("podu-b")).unwrap();
    manager.sweep(None, &active);
    assert!(class.join("podu-b").exists());
}

#[test]
fn all_pods_together_are_held_to_their_share_of_the_node() {
    const V1_DIRS: &[(&str, &[&str])] = &[("cpu", &["cpu"]), ("memory", &["memory"])];
    const V2_DIRS: &[(&str, &[&str])] = &[("", &["cpu", "memory"])];
    for (version, dirs, shares, memory) in [
        (
            CgroupVersion::V1 { hybrid: true },
            V1_DIRS,
            ("cpu/kubepods/cpu.shares", "1280"),
            ("memory/kubepods/memory.limit_in_bytes", "4096"),
        ),
        (
            CgroupVersion::V2,
            V2_DIRS,
            ("kubepods/cpu.weight", "49"),
            ("kubepods/memory.max", "4096"),
        ),
    ] {
        let mount = tempfile::tempdir().unwrap();
        let at = |file: &str| mount.path().join(file);
        for (dir, controllers) in dirs {
            for child in ["", "kubepods", "kubepods/burstable", "kubepods/besteffort"] {
                let dir = at(dir).join(child);
                std::fs::create_dir_all(&dir).unwrap();
                let all = controllers.join(" ");
                std::fs::write(dir.join("cgroup.controllers"), &all).unwrap();
                std::fs::write(dir.join("cgroup.subtree_control"), &all).unwrap();
                for file in [
                    "cpu.shares",
                    "cpu.weight",
                    "memory.limit_in_bytes",
                    "memory.max",
                ] {
                    std::fs::write(dir.join(file), "").unwrap();
                }
            }
        }
        let config = CgroupConfig {
            allocatable_cpu_milli: Some(1250),
            allocatable_memory: Some(4096),
            ..CgroupConfig::default()
        };
        let manager = manager_on(mount.path(), config, version, dirs);
        manager.setup().unwrap();
        let read = |file: &str| std::fs::read_to_string(at(file)).unwrap();
        assert_eq!(read(shares.0), shares.1, "{version:?}");
        assert_eq!(read(memory.0), "", "a limit that is refused keeps no agent");
        manager.limit_all().unwrap();
        assert_eq!(read(memory.0), memory.1, "{version:?}");
        // Twice the machine.
        let none = BTreeMap::new();
        manager.resize_all(Some(2500), Some(8192), &none).unwrap();
        assert_ne!(read(shares.0), shares.1, "{version:?}");
        assert_eq!(read(memory.0), "8192", "{version:?}");
        // What is kept each minute is the new size.
        manager.limit_all().unwrap();
        assert_eq!(read(memory.0), "8192", "{version:?}");
        manager.resize_all(Some(1250), Some(4096), &none).unwrap();
        let both = (read(shares.0), read(memory.0));
        assert_eq!(both, (shares.1.to_owned(), memory.1.to_owned()));
        // Less than the pods use waits until they use less.
        let used = match version {
            CgroupVersion::V1 { .. } => "memory.usage_in_bytes",
            CgroupVersion::V2 => "memory.current",
        };
        let used = at(memory.0).with_file_name(used);
        std::fs::write(&used, "3000").unwrap();
        for error in [
            manager.resize_all(None, Some(2999), &none),
            manager.limit_all(),
        ] {
            assert!(matches!(error, Err(CgroupError::AboveLimit { .. })));
        }
        assert_eq!(read(memory.0), memory.1);
        std::fs::write(&used, "2000").unwrap();
        manager.limit_all().unwrap();
        assert_eq!(read(memory.0), "2999", "{version:?}");
    }
}

#[test]
fn huge_pages_that_are_reserved_are_kept_from_all_pods_together() {
    const DIRS: &[(&str, &[&str])] = &[("", &["cpu", "memory", "hugetlb"])];
    for (version, file, unlimited) in [
        (
            CgroupVersion::V1 { hybrid: false },
            "hugetlb.2MB.limit_in_bytes",
            "-1",
        ),
        (CgroupVersion::V2, "hugetlb.2MB.max", "max"),
    ] {
        let mount = tempfile::tempdir().unwrap();
        let all = ["", "kubepods", "kubepods/burstable", "kubepods/besteffort"];
        for child in all {
            let dir = mount.path().join(child);
            std::fs::create_dir_all(&dir).unwrap();
            let controllers = ["cgroup.controllers", "cgroup.subtree_control"];
            for controllers in controllers {
                std::fs::write(dir.join(controllers), "cpu memory hugetlb").unwrap();
            }
            for other in [
                "cpu.shares",
                "cpu.weight",
                "memory.max",
                "memory.limit_in_bytes",
                file,
            ] {
                // A kubelet that ran before has left it.
                std::fs::write(dir.join(other), "0").unwrap();
            }
        }
        let config = CgroupConfig {
            hugepage_sizes: vec![2 << 20],
            allocatable_huge_pages: BTreeMap::from([(2 << 20, 8 << 20)]),
            ..CgroupConfig::default()
        };
        let manager = manager_on(mount.path(), config, version, DIRS);
        let limits =
            || all.map(|dir| std::fs::read_to_string(mount.path().join(dir).join(file)).unwrap());
        manager.setup().unwrap();
        manager.limit_all().unwrap();
        assert_eq!(limits(), ["0", "8388608", unlimited, unlimited]);
        let more = BTreeMap::from([(2 << 20, 16 << 20)]);
        manager.resize_all(None, None, &more).unwrap();
        assert_eq!(limits()[1], "16777216");
        manager.limit_all().unwrap();
        assert_eq!(
            limits()[1],
            "16777216",
            "what is kept each minute is the new size"
        );
        manager.resize_all(None, None, &BTreeMap::new()).unwrap();
        assert_eq!(limits()[1], unlimited, "nothing is reserved");
    }
}

#[test]
fn a_process_limit_needs_the_pids_controller_and_no_limit_does_not() {
    let mount = tempfile::tempdir().unwrap();
    let dirs: &[(&str, &[&str])] = &[("", &["cpu", "memory"])];
    let with = |limit, per_qos| {
        let config = CgroupConfig {
            pod_pids_limit: limit,
            per_qos,
            ..CgroupConfig::default()
        };
        manager_on(mount.path(), config, CgroupVersion::V2, dirs)
    };
    let error = with(Some(10), true).check_pids_controller().unwrap_err();
    assert_eq!(
        error.to_string(),
        "limit the processes of pods below /sys/fs/cgroup: the pids controller is missing; enable it in the kernel, or leave podPidsLimit out"
    );
    with(Some(10), false).check_pids_controller().unwrap();
    let unlimited = with(None, true);
    unlimited.check_pids_controller().unwrap();
    unlimited.limit_pids(&best_effort()).unwrap();
}

#[test]
fn a_controller_that_is_not_enabled_for_a_pod_matters_only_with_a_limit() {
    let mount = tempfile::tempdir().unwrap();
    let pod = mount.path().join("kubepods/besteffort/podu-1");
    std::fs::create_dir_all(&pod).unwrap();
    for (limit, matters) in [(None, false), (Some(10), true)] {
        let config = CgroupConfig {
            pod_pids_limit: limit,
            ..CgroupConfig::default()
        };
        let manager = manager_on(mount.path(), config, CgroupVersion::V2, &[("", &["pids"])]);
        assert_eq!(manager.limit_pids(&best_effort()).is_err(), matters);
    }
}

#[test]
fn huge_pages_can_be_limited_only_where_the_controller_is() {
    for (has, controllers) in [(true, "cpu memory hugetlb"), (false, "cpu memory pids")] {
        let mount = tempfile::tempdir().unwrap();
        let top = mount.path().join("kubepods");
        std::fs::create_dir(&top).unwrap();
        std::fs::write(top.join("cgroup.controllers"), controllers).unwrap();
        let v2 = [("", &[][..])];
        let manager = manager_on(
            mount.path(),
            CgroupConfig::default(),
            CgroupVersion::V2,
            &v2,
        );
        assert_eq!(manager.has_hugetlb_controller(), has, "v2: {controllers}");
        let listed: Vec<&str> = controllers.split(' ').collect();
        let v1 = [("", &listed[..])];
        let version = CgroupVersion::V1 { hybrid: false };
        let manager = manager_on(mount.path(), CgroupConfig::default(), version, &v1);
        assert_eq!(manager.has_hugetlb_controller(), has, "v1: {controllers}");
    }
}

#[test]
fn a_uid_that_leaves_the_directory_is_refused() {
    for uid in ["", "../x", "a/b"] {
        assert!(pod_component(&uid.into()).is_err(), "{uid}");
    }
}

#[test]
fn huge_pages_and_lifted_limits_become_files() {
    let config = CgroupConfig {
        hugepage_sizes: vec![2 << 20, 1 << 30],
        ..CgroupConfig::default()
    };
    let pages = BTreeMap::from([(2 << 20, 4 << 20)]);
    let named = |version| {
        huge_page_settings(version, &config, &pages)
            .into_iter()
            .map(|(file, value)| format!("{file}={value}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        named(CgroupVersion::V1 { hybrid: true }),
        [
            "hugetlb.2MB.limit_in_bytes=4194304",
            "hugetlb.1GB.limit_in_bytes=0"
        ]
    );
    assert_eq!(
        named(CgroupVersion::V2),
        ["hugetlb.2MB.max=4194304", "hugetlb.1GB.max=0"]
    );
    let none = Limits {
        quota: Some((-1, 100_000)),
        memory: Some(NO_MEMORY_LIMIT),
        ..Limits::default()
    };
    let of = |version| {
        settings(version, none)
            .into_iter()
            .map(|(_, file, value)| format!("{file}={value}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of(CgroupVersion::V1 { hybrid: true }),
        [
            "cpu.cfs_period_us=100000",
            "cpu.cfs_quota_us=-1",
            "memory.limit_in_bytes=-1"
        ]
    );
    assert_eq!(
        of(CgroupVersion::V2),
        ["cpu.max=max 100000", "memory.max=max"]
    );
}

#[test]
fn processes_of_a_pod_are_found_in_whatever_hierarchy_the_runtime_has_put_them() {
    const V1: &[(&str, &[&str])] = &[("cpu", &["cpu"]), ("freezer", &["freezer"])];
    const V2: &[(&str, &[&str])] = &[("", &["cpu", "memory", "pids"])];
    let v1 = CgroupVersion::V1 { hybrid: false };
    for (version, dirs, below) in [(v1, V1, "freezer/"), (CgroupVersion::V2, V2, "")] {
        let mount = tempfile::tempdir().unwrap();
        let manager = manager_on(mount.path(), CgroupConfig::default(), version, dirs);
        let uid = best_effort().uid();
        assert_eq!(manager.processes(&uid).unwrap(), Vec::<i32>::new());
        let pod = mount
            .path()
            .join(format!("{below}kubepods/besteffort/podu-1"));
        for (container, pids) in [("sandbox", "30\n"), ("main", "0\n7\n"), ("old", "")] {
            std::fs::create_dir_all(pod.join(container)).unwrap();
            std::fs::write(pod.join(container).join("cgroup.procs"), pids).unwrap();
        }
        assert_eq!(manager.processes(&uid).unwrap(), [0, 7, 30], "{version:?}");
        let other = PodUid::new("u-2");
        assert_eq!(manager.processes(&other).unwrap(), Vec::<i32>::new());
        let without = CgroupConfig {
            per_qos: false,
            ..CgroupConfig::default()
        };
        let manager = manager_on(mount.path(), without, version, dirs);
        assert_eq!(manager.processes(&uid).unwrap(), Vec::<i32>::new());
    }
}

#[test]
fn pods_and_their_limits_are_found_by_paths_of_the_kernels_log() {
    use CgroupDriver::{Cgroupfs, Systemd};
    const V1: CgroupVersion = CgroupVersion::V1 { hybrid: false };
    let dir = tempfile::tempdir().unwrap();
    let manager = |driver, version, at: &str| {
        let config = CgroupConfig {
            driver,
            ..CgroupConfig::default()
        };
        manager_on(dir.path(), config, version, &[(at, &["memory"])])
    };
    let slice = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_ab.slice";
    for (driver, path, uid) in [
        (Cgroupfs, "/kubepods/pod12-ab", Some("12-ab")),
        (
            Cgroupfs,
            "/kubepods/besteffort/pod12-ab/c1/init",
            Some("12-ab"),
        ),
        (
            Cgroupfs,
            "/docker/x/kubepods/burstable/pod12-ab/c1",
            Some("12-ab"),
        ),
        (
            Cgroupfs,
            "/kubepods/burstable/pod12-ab/c1/kubepods/pod9",
            Some("12-ab"),
        ),
        (Cgroupfs, "/kubepods/burstable", None),
        (Cgroupfs, "/system.slice/pod12-ab", None),
        (Systemd, slice, Some("12-ab")),
        (
            Systemd,
            &format!("{slice}/cri-containerd-c1.scope"),
            Some("12-ab"),
        ),
        (
            Systemd,
            "/kubepods.slice/kubepods-pod12_ab.slice/crio-c1.scope",
            Some("12-ab"),
        ),
        (Systemd, "/kubepods.slice/kubepods-burstable.slice", None),
    ] {
        let found = manager(driver, CgroupVersion::V2, "").pod_at(path);
        assert_eq!(found, uid.map(PodUid::from), "{path}");
    }
    for (version, at, file, none) in [
        (CgroupVersion::V2, "", "kubepods/memory.max", "max"),
        (
            V1,
            "memory",
            "memory/kubepods/memory.limit_in_bytes",
            "9223372036854771712",
        ),
    ] {
        let (manager, file) = (manager(Cgroupfs, version, at), dir.path().join(file));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for (text, limit) in [("4096\n", Some(4096)), (none, None)] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(manager.memory_limit_at("/kubepods"), limit, "{text}");
        }
        assert_eq!(manager.memory_limit_at("/kubepods/gone"), None);
    }
}

#[test]
fn limits_are_compared_as_the_kernel_keeps_them() {
    use super::settings::{Comparison, compare};
    let exbi = (8_u64 << 60).to_string();
    let most = i64::MAX.to_string();
    for (page, file, found, wanted, comparison) in [
        (4096, "memory.max", "max", exbi.as_str(), Comparison::Same),
        (4096, "memory.max", "max", &most, Comparison::Same),
        (4096, "memory.low", "max", &exbi, Comparison::Same),
        (
            4096,
            "memory.max",
            "max",
            "9223372036854767616",
            Comparison::Other,
        ),
        (4096, "memory.max", "8192", "12287", Comparison::Same),
        (4096, "memory.max", "8192", "12288", Comparison::Other),
        (65536, "memory.max", "65536", "131071", Comparison::Same),
        (65536, "memory.max", "65536", "131072", Comparison::Other),
        (
            4096,
            "memory.limit_in_bytes",
            "9223372036854771712",
            &exbi,
            Comparison::Same,
        ),
        (
            4096,
            "memory.limit_in_bytes",
            "9223372036854771712",
            "-1",
            Comparison::Same,
        ),
        (
            65536,
            "memory.limit_in_bytes",
            "9223372036854710272",
            "-1",
            Comparison::Same,
        ),
        (
            4096,
            "memory.limit_in_bytes",
            "8192",
            "-1",
            Comparison::Other,
        ),
        (4096, "memory.max", "8192", "max", Comparison::Other),
        // The kernel rounds its greatest number down to huge pages, too.
        (
            4096,
            "hugetlb.2MB.limit_in_bytes",
            "9223372036852678656",
            "-1",
            Comparison::Same,
        ),
        (
            4096,
            "hugetlb.1GB.max",
            "1073741824",
            "1073741824",
            Comparison::Same,
        ),
        (4096, "hugetlb.1GB.max", "0", "max", Comparison::Other),
        (4096, "hugetlb.1XB.max", "0", "1", Comparison::Other),
        (4096, "memory.max", "", "8192", Comparison::Other),
    ] {
        assert_eq!(
            compare(file, found, wanted, page),
            comparison,
            "{file} {found} {wanted}"
        );
    }
}

#[test]
fn a_cgroup_that_cannot_be_corrected_does_not_hide_the_others() {
    const V1: CgroupVersion = CgroupVersion::V1 { hybrid: false };
    const DIRS: &[(&str, &[&str])] = &[("", &["cpu", "pids"])];
    let mount = tempfile::tempdir().unwrap();
    let config = CgroupConfig {
        driver: CgroupDriver::Cgroupfs,
        pod_pids_limit: Some(100),
        ..CgroupConfig::default()
    };
    let manager = manager_on(mount.path(), config, V1, DIRS);
    let pod = |uid: &str| {
        let mut pod = best_effort();
        pod.metadata.uid = Some(uid.to_owned());
        pod
    };
    let dir = |uid: &str| {
        let parent = mount.path().join("kubepods/besteffort");
        parent.join(format!("pod{uid}"))
    };
    let uids = ["u-1", "u-2", "u-3"];
    for uid in uids {
        std::fs::create_dir_all(dir(uid)).unwrap();
        manager.adopt(&pod(uid)).unwrap();
        std::fs::write(dir(uid).join("cpu.shares"), "2").unwrap();
        std::fs::write(dir(uid).join("pids.max"), "max").unwrap();
    }
    std::fs::remove_file(dir("u-2").join("pids.max")).unwrap();
    std::fs::create_dir(dir("u-2").join("pids.max")).unwrap();
    let done = manager.mend();
    assert_eq!((done.mended.len(), done.failed.len()), (2, 1), "{done:?}");
    for uid in ["u-1", "u-3"] {
        let found = std::fs::read_to_string(dir(uid).join("pids.max")).unwrap();
        assert_eq!(found, "100", "{uid}");
    }
}

//! Reserves, as numbers and as files.

use std::sync::Arc;

use super::*;
use crate::cm::CgroupConfig;

const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

fn manager(mount: &Path, config: CgroupConfig) -> CgroupManager {
    CgroupManager {
        config,
        version: CgroupVersion::V2,
        hierarchies: vec![Hierarchy {
            path: mount.to_owned(),
            controllers: CONTROLLERS.map(str::to_owned).into(),
        }],
        top: CgroupName::parse("/").child("kubepods"),
        systemd: None,
        wanted: Arc::default(),
        resized_memory: Arc::default(),
        resized_huge_pages: Arc::default(),
        pinning: None,
        metrics: None,
    }
}

/// A cgroup as the kernel makes it.
fn make(mount: &Path, path: &str) {
    for dir in Path::new(path).ancestors() {
        let dir = mount.join(dir);
        fs::create_dir_all(&dir).unwrap();
        for (file, text) in [
            ("cgroup.controllers", "cpu memory pids"),
            ("cgroup.subtree_control", "cpu memory pids"),
            ("cgroup.procs", ""),
            ("cpu.weight", "100"),
            ("cpu.max", "max 100000"),
            ("memory.max", "max"),
            ("memory.min", "0"),
            ("memory.low", "0"),
            ("memory.current", "1000"),
            ("pids.max", "max"),
        ] {
            if !dir.join(file).exists() {
                fs::write(dir.join(file), text).unwrap();
            }
        }
    }
}

#[test]
fn settings_name_cgroups_as_each_driver_spells_them() {
    use CgroupDriver::{Cgroupfs, Systemd};
    for (driver, given, path, unit) in [
        (Cgroupfs, "/system.slice", "/system.slice", None),
        (Cgroupfs, "kube/agent", "/kube/agent", None),
        (Systemd, "/system", "/system.slice", Some("system.slice")),
        (
            Systemd,
            "system.slice",
            "/system.slice",
            Some("system.slice"),
        ),
        (
            Systemd,
            "/kube.slice/kube-agent.slice",
            "/kube.slice/kube-agent.slice",
            Some("kube-agent.slice"),
        ),
        (
            Systemd,
            "kube-agent.slice",
            "/kube.slice/kube-agent.slice",
            Some("kube-agent.slice"),
        ),
        (
            Systemd,
            "kubelet.service",
            "/system.slice/kubelet.service",
            Some("kubelet.service"),
        ),
        (
            Systemd,
            "/kube.slice/kubelet.service",
            "/kube.slice/kubelet.service",
            Some("kubelet.service"),
        ),
    ] {
        let found = named(driver, given);
        let wanted = Named {
            path: path.to_owned(),
            unit: unit.map(str::to_owned),
        };
        assert_eq!(found, wanted, "{driver:?} {given}");
    }
}

#[test]
fn classes_keep_a_share_of_their_requests_from_the_others() {
    let requests = Requests {
        guaranteed: 400,
        burstable: 200,
    };
    for (for_pods, percent, wanted) in [
        (1000, 50, (800, 700)),
        (1000, 100, (600, 400)),
        (1000, 0, (1000, 1000)),
        (300, 100, (0, 0)),
    ] {
        assert_eq!(requests.memory_limits(for_pods, percent), wanted);
    }
}

#[test]
fn a_compressible_reservation_is_of_cpu_alone() {
    let of = |is_compressible| {
        let (limits, pids) = reserved_limits(Some(500), Some(4096), Some(7), is_compressible);
        (limits.shares, limits.memory, pids)
    };
    assert_eq!(of(false), (Some(512), Some(4096), Some(7)));
    assert_eq!(of(true), (Some(512), None, None));
}

#[test]
fn units_of_others_get_only_what_is_limited() {
    let whole = Whole {
        limits: reserved_limits(Some(500), None, None, false).0,
        protection: Some(Protection { min: 3, low: 2 }),
        ..Whole::default()
    };
    assert_eq!(
        some_properties(CgroupVersion::V2, &whole),
        [
            ("CPUWeight", Property::Number(20)),
            ("MemoryMin", Property::Number(3)),
            ("MemoryLow", Property::Number(2)),
        ]
    );
}

#[test]
fn processes_are_moved_once_and_systemd_makes_its_cgroups_itself() {
    let mount = tempfile::tempdir().unwrap();
    let of = |driver| {
        manager(
            mount.path(),
            CgroupConfig {
                driver,
                ..CgroupConfig::default()
            },
        )
    };
    let field = "kubeletCgroups";
    let error = of(CgroupDriver::Systemd)
        .move_into(field, "/kube.slice", &[7])
        .unwrap_err();
    assert!(matches!(error, CgroupError::Missing { .. }));
    make(mount.path(), "agent");
    let manager = of(CgroupDriver::Cgroupfs);
    assert_eq!(manager.move_into(field, "/agent", &[7]).unwrap(), 1);
    assert_eq!(manager.move_into(field, "/agent", &[7]).unwrap(), 0);
    let procs = fs::read_to_string(mount.path().join("agent/cgroup.procs")).unwrap();
    assert_eq!(procs, "7");
}

#[test]
fn a_reserved_cgroup_is_limited_once_it_exists_and_never_below_its_use() {
    let mount = tempfile::tempdir().unwrap();
    let manager = manager(mount.path(), CgroupConfig::default());
    let (limits, pids) = reserved_limits(Some(500), Some(4096), Some(7), false);
    let mut reserve = Reserve {
        field: "systemReservedCgroup",
        cgroup: "/system.slice".to_owned(),
        limits,
        pids,
    };
    let error = manager.enforce(&reserve).unwrap_err().to_string();
    assert!(
        error.starts_with("systemReservedCgroup: there is no cgroup /system.slice"),
        "{error}"
    );
    assert!(!mount.path().join("system.slice").exists(), "none is made");
    make(mount.path(), "system.slice");
    manager.enforce(&reserve).unwrap();
    let read = |file: &str| fs::read_to_string(mount.path().join("system.slice").join(file));
    let read = |file: &str| read(file).unwrap();
    assert_eq!(
        (read("cpu.weight"), read("memory.max"), read("pids.max")),
        ("20".to_owned(), "4096".to_owned(), "7".to_owned())
    );
    reserve.limits.memory = Some(999);
    let error = manager.enforce(&reserve).unwrap_err();
    assert!(matches!(error, CgroupError::AboveLimit { used: 1000, .. }));
    assert_eq!(read("memory.max"), "4096");
    // Files that nobody needs are no use.
    let stat = mount.path().join("system.slice/memory.stat");
    fs::write(stat, "active_file 5\ninactive_file 2\n").unwrap();
    manager.enforce(&reserve).unwrap();
    assert_eq!(read("memory.max"), "999");

    for cgroup in ["/", "/kubepods", "/kubepods/burstable"] {
        make(mount.path(), cgroup.trim_start_matches('/'));
        reserve.cgroup = cgroup.to_owned();
        let error = manager.enforce(&reserve).unwrap_err();
        assert!(matches!(error, CgroupError::OfPods { .. }), "{cgroup}");
    }
    let moved = manager.move_into("kubeletCgroups", "/kubepods/agent", &[7]);
    assert!(matches!(moved, Err(CgroupError::OfPods { .. })));
}

fn pods() -> Vec<Arc<k8s_openapi::api::core::v1::Pod>> {
    let pod = |uid: &str, resources: serde_json::Value| {
        let pod = serde_json::json!({
            "metadata": {"name": uid, "namespace": "ns", "uid": uid},
            "spec": {"containers": [{"name": "c", "resources": resources}]},
        });
        Arc::new(serde_json::from_value(pod).unwrap())
    };
    let all = serde_json::json!({"cpu": "1", "memory": "3000"});
    vec![
        pod("g", serde_json::json!({"limits": all, "requests": all})),
        pod("b", serde_json::json!({"requests": {"memory": "2000"}})),
    ]
}

#[test]
fn requests_are_protected_at_every_level_and_no_longer_when_that_is_switched_off() {
    let mount = tempfile::tempdir().unwrap();
    for path in [
        "kubepods/burstable/podb",
        "kubepods/besteffort",
        "kubepods/podg",
    ] {
        make(mount.path(), path);
    }
    let with = |tiered| {
        manager(
            mount.path(),
            CgroupConfig {
                tiered,
                ..CgroupConfig::default()
            },
        )
    };
    let read = |path: &str| {
        ["memory.min", "memory.low"]
            .map(|file| fs::read_to_string(mount.path().join(path).join(file)).unwrap())
            .join(" ")
    };
    let all = || {
        [
            "kubepods",
            "kubepods/burstable",
            "kubepods/podg",
            "kubepods/burstable/podb",
        ]
        .map(read)
    };
    let tiered = with(true);
    tiered.setup().unwrap();
    for pod in pods() {
        tiered.ensure(&pod).unwrap();
    }
    tiered.refresh_qos(&pods()).unwrap();
    let wanted = ["3000 2000", "0 2000", "3000 0", "0 2000"];
    assert_eq!(all(), wanted);
    with(true).setup().unwrap();
    assert_eq!(all(), wanted, "a restart takes nothing back");
    with(false).setup().unwrap();
    assert_eq!(all(), ["0 0"; 4]);
}

/// Of a pod as a whole whose request alone changes no limit follows, but what is protected does.
#[test]
fn protected_memory_follows_a_resize_of_the_pod_as_a_whole() {
    let mount = tempfile::tempdir().unwrap();
    for path in ["kubepods/burstable/podw", "kubepods/besteffort"] {
        make(mount.path(), path);
    }
    let config = CgroupConfig {
        tiered: true,
        ..CgroupConfig::default()
    };
    let manager = manager(mount.path(), config);
    let pod = |request: &str, limit: &str| -> k8s_openapi::api::core::v1::Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "w", "namespace": "ns", "uid": "w"},
            "spec": {
                "resources": {"requests": {"memory": request}, "limits": {"memory": limit}},
                "containers": [{"name": "c"}],
            },
        }))
        .unwrap()
    };
    let shown = || {
        ["memory.low", "memory.max"].map(|file| {
            let path = mount.path().join("kubepods/burstable/podw").join(file);
            fs::read_to_string(path).unwrap().trim().to_owned()
        })
    };
    manager.ensure(&pod("2000", "8192")).unwrap();
    assert_eq!(shown(), ["2000", "8192"]);
    let mut had = pod("2000", "8192");
    for (request, limit) in [
        ("3000", "8192"),
        ("3000", "12288"),
        ("3000", "4096"),
        ("1000", "4096"),
    ] {
        let wants = pod(request, limit);
        let limits = |pod| manager.limits_of(pod).unwrap();
        let (first, last) = crate::cm::Limits::steps(limits(&had), limits(&wants));
        manager.set_limits(&wants, first).unwrap();
        manager.set_limits(&wants, last).unwrap();
        assert_eq!(shown(), [request, limit]);
        had = wants;
    }
}

#[test]
fn classes_are_limited_but_not_below_their_use_and_set_free_when_that_is_switched_off() {
    let mount = tempfile::tempdir().unwrap();
    for path in ["kubepods/burstable", "kubepods/besteffort"] {
        make(mount.path(), path);
    }
    let with = |percent| {
        manager(
            mount.path(),
            CgroupConfig {
                allocatable_memory: Some(5000),
                qos_reserved_memory: percent,
                ..CgroupConfig::default()
            },
        )
    };
    let read = |class: &str| {
        let file = mount.path().join("kubepods").join(class).join("memory.max");
        fs::read_to_string(file).unwrap()
    };
    let manager = with(Some(100));
    manager.setup().unwrap();
    manager.refresh_qos(&pods()).unwrap();
    // 5000 - 3000, and less 2000 of Burstable, but 1000 are used.
    assert_eq!(
        (read("burstable"), read("besteffort")),
        ("2000".into(), "1000".into())
    );
    with(None).setup().unwrap();
    assert_eq!(
        (read("burstable"), read("besteffort")),
        ("max".into(), "max".into())
    );
}

//! Cgroups of pods on the machine's own cgroupfs, below a private root.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test may fail loudly"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use holdfast::cm::reserves::{Reserve, reserved_limits};
use holdfast::cm::{CgroupConfig, CgroupDriver, CgroupError, CgroupManager, CgroupVersion};
use holdfast::types::PodUid;
use holdfast::types::metrics::Metrics;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

/// Removes the private root from every hierarchy, also when a test fails.
struct PrivateRoot {
    name: String,
    mounts: Vec<PathBuf>,
}

impl Drop for PrivateRoot {
    fn drop(&mut self) {
        for mount in &self.mounts {
            for top in [
                mount.join(&self.name),
                mount.join(format!("{}.slice", self.name.replace('-', "_"))),
            ] {
                remove(&top);
            }
        }
    }
}

fn remove(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove(&entry.path());
        }
    }
    if dir.exists() {
        fs::remove_dir(dir).unwrap();
    }
}

/// `None`, with a word why, where cgroups cannot be written.
fn manager(driver: CgroupDriver, test: &str) -> Option<(CgroupManager, PrivateRoot)> {
    limited_manager(driver, test, None)
}

fn limited_manager(
    driver: CgroupDriver,
    test: &str,
    pod_pids_limit: Option<u64>,
) -> Option<(CgroupManager, PrivateRoot)> {
    let name = format!("holdfast-test-{}-{test}", std::process::id());
    let config = CgroupConfig {
        driver,
        root: format!("/{name}"),
        allocatable_cpu_milli: Some(2_000),
        pod_pids_limit,
        ..CgroupConfig::default()
    };
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: cgroups are changed by root only");
        return None;
    }
    let manager = match CgroupManager::detect(config) {
        Ok(manager) => manager,
        Err(error) => {
            eprintln!("skipped: {error}");
            return None;
        }
    };
    let mounts = manager.describe().into_keys().collect();
    Some((manager, PrivateRoot { name, mounts }))
}

fn pod(uid: &str, resources: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "c", "resources": resources}]},
    }))
    .unwrap()
}

fn mount_of(manager: &CgroupManager, controller: &str) -> PathBuf {
    manager
        .describe()
        .into_iter()
        .find(|(_, controllers)| controllers.iter().any(|c| c == controller))
        .map(|(mount, _)| mount)
        .unwrap()
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(&path)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        .trim()
        .to_owned()
}

#[test]
fn a_cgroup_that_a_setting_names_gets_processes_and_limits() {
    let Some((manager, root)) = manager(CgroupDriver::Cgroupfs, "reserved") else {
        return;
    };
    let cgroup = format!("/{}/reserved", root.name);
    let (limits, pids) = reserved_limits(Some(500), Some(64 << 20), None, false);
    let reserve = Reserve {
        field: "kubeReservedCgroup",
        cgroup: cgroup.clone(),
        limits,
        pids,
    };
    let missing = manager.enforce(&reserve).unwrap_err();
    assert!(matches!(missing, CgroupError::Missing { .. }), "{missing}");
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let moved = manager.move_into("kubeletCgroups", &cgroup, &[pid]);
    let at = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    moved.unwrap();
    assert!(at.contains(&cgroup), "{at}");
    manager.enforce(&reserve).unwrap();
    let file = match manager.version() {
        CgroupVersion::V1 { .. } => "memory.limit_in_bytes",
        CgroupVersion::V2 => "memory.max",
    };
    let dir = mount_of(&manager, "memory")
        .join(&root.name)
        .join("reserved");
    assert_eq!(read(dir.join(file)), (64 << 20).to_string());
}

#[test]
fn pod_cgroups_are_made_with_their_limits_and_removed() {
    let Some((manager, root)) = manager(CgroupDriver::Cgroupfs, "limits") else {
        return;
    };
    manager.setup().unwrap();
    let burstable = pod(
        "u-1",
        json!({"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "64Mi"}}),
    );
    let guaranteed = pod("u-2", json!({"limits": {"cpu": "250m", "memory": "32Mi"}}));
    let best_effort = pod("u-3", json!({}));
    for pod in [&burstable, &guaranteed, &best_effort] {
        assert!(!manager.exists(pod));
        manager.ensure(pod).unwrap();
        manager.ensure(pod).unwrap();
        assert!(manager.exists(pod));
    }
    manager
        .refresh_qos(&[Arc::new(burstable.clone()), Arc::new(guaranteed.clone())])
        .unwrap();
    let parent = manager.pod_cgroup_parent(&burstable).unwrap();
    assert_eq!(parent, format!("/{}/kubepods/burstable/podu-1", root.name));
    let at = |controller: &str, below: &str, file: &str| {
        read(
            mount_of(&manager, controller)
                .join(&root.name)
                .join("kubepods")
                .join(below)
                .join(file),
        )
    };
    if manager.version() == CgroupVersion::V2 {
        assert_eq!(at("cpu", "burstable/podu-1", "cpu.max"), "100000 100000");
        assert_eq!(
            at("memory", "burstable/podu-1", "memory.max"),
            (64 << 20).to_string()
        );
        assert_eq!(at("cpu", "podu-2", "cpu.max"), "25000 100000");
        assert_eq!(at("cpu", "besteffort/podu-3", "cpu.weight"), "1");
    } else {
        assert_eq!(at("cpu", "", "cpu.shares"), "2048");
        assert_eq!(at("cpu", "burstable", "cpu.shares"), "512");
        assert_eq!(at("cpu", "besteffort", "cpu.shares"), "2");
        assert_eq!(at("cpu", "burstable/podu-1", "cpu.shares"), "512");
        assert_eq!(at("cpu", "burstable/podu-1", "cpu.cfs_quota_us"), "100000");
        assert_eq!(
            at("memory", "burstable/podu-1", "memory.limit_in_bytes"),
            (64 << 20).to_string()
        );
        assert_eq!(at("cpu", "podu-2", "cpu.cfs_quota_us"), "25000");
        assert_eq!(
            at("memory", "podu-2", "memory.limit_in_bytes"),
            (32 << 20).to_string()
        );
        assert_eq!(at("cpu", "besteffort/podu-3", "cpu.shares"), "2");
    }
    let listed = manager.list_pods().unwrap();
    assert_eq!(listed, ["u-1", "u-2", "u-3"].map(PodUid::from).into());
    for uid in &listed {
        manager.destroy(uid).unwrap();
        manager.destroy(uid).unwrap();
    }
    assert!(manager.list_pods().unwrap().is_empty());
    assert!(!manager.exists(&burstable));
}

#[test]
fn changes_are_measured_by_what_they_do() {
    let Some((manager, _root)) = manager(CgroupDriver::Cgroupfs, "measured") else {
        return;
    };
    let metrics = Metrics::default();
    let manager = manager.measured(metrics.clone());
    let count = |operation: &str| -> u64 {
        let text = metrics.encode().unwrap();
        let start = format!(
            "kubelet_cgroup_manager_duration_seconds_count{{operation_type=\"{operation}\"}} "
        );
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |count| count.parse().unwrap())
    };
    let counts = || ["create", "update", "destroy"].map(count);
    manager.setup().unwrap();
    assert_eq!(counts(), [3, 0, 0], "all pods, and two classes of them");
    let pod = pod("u-1", json!({"requests": {"cpu": "500m"}}));
    manager.ensure(&pod).unwrap();
    assert_eq!(counts(), [4, 0, 0]);
    manager.ensure(&pod).unwrap();
    manager.refresh_qos(&[Arc::new(pod.clone())]).unwrap();
    assert_eq!(counts(), [4, 2, 0]);
    for _ in 0..2 {
        manager.destroy(&PodUid::new("u-1")).unwrap();
        assert_eq!(counts(), [4, 2, 1], "one that is not there is not removed");
    }
}

#[test]
fn systemd_slices_nest_and_are_found_again() {
    let Some((manager, root)) = manager(CgroupDriver::Systemd, "slices") else {
        return;
    };
    manager.setup().unwrap();
    let pod = pod("12-ab", json!({"requests": {"cpu": "100m"}}));
    manager.ensure(&pod).unwrap();
    let own = root.name.replace('-', "_");
    let slice = format!("{own}-kubepods-burstable-pod12_ab.slice");
    assert_eq!(manager.pod_cgroup_parent(&pod).unwrap(), slice);
    let dir = mount_of(&manager, "cpu")
        .join(format!(
            "{own}.slice/{own}-kubepods.slice/{own}-kubepods-burstable.slice"
        ))
        .join(&slice);
    assert!(dir.is_dir(), "{}", dir.display());
    assert_eq!(manager.list_pods().unwrap(), [PodUid::from("12-ab")].into());
    manager.destroy(&"12-ab".into()).unwrap();
    assert!(!dir.exists());
}

/// Whether a shell in this cgroup can start another process.
fn can_fork(cgroup: &Path) -> bool {
    let script = "echo $$ > \"$0/cgroup.procs\" && (true) && echo yes";
    let shell = Command::new("sh")
        .args(["-c", script])
        .arg(cgroup)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&shell.stderr);
    let forked = shell.stdout == b"yes\n";
    assert!(
        forked || stderr.to_lowercase().contains("fork"),
        "failed otherwise: {stderr}"
    );
    forked
}

#[test]
fn the_process_limit_holds_below_the_pod_and_follows_the_configuration() {
    for (driver, below) in [
        (CgroupDriver::Cgroupfs, "kubepods/besteffort/podu-7"),
        (
            CgroupDriver::Systemd,
            "R-kubepods.slice/R-kubepods-besteffort.slice/R-kubepods-besteffort-podu_7.slice",
        ),
    ] {
        let test = format!("pids-{driver:?}").to_lowercase();
        let pod = pod("u-7", json!({}));
        let with = |limit| limited_manager(driver, &test, limit);
        let Some((manager, root)) = with(Some(1)) else {
            return;
        };
        manager.setup().unwrap();
        manager.limit_pids(&pod).unwrap();
        assert!(!manager.exists(&pod), "a limit makes no cgroup");
        let (top, below) = match driver {
            CgroupDriver::Cgroupfs => (root.name.clone(), below.to_owned()),
            CgroupDriver::Systemd => {
                let own = root.name.replace('-', "_");
                (format!("{own}.slice"), below.replace('R', &own))
            }
        };
        let dir = mount_of(&manager, "pids").join(top).join(below);
        manager.ensure(&pod).unwrap();
        let container = dir.join("container");
        fs::create_dir(&container).unwrap();
        let max = || read(dir.join("pids.max"));
        assert_eq!(max(), "1");
        assert!(!can_fork(&container), "{driver:?}: the shell is the one");

        // Set anew by somebody else, like systemd.
        fs::write(dir.join("pids.max"), "max").unwrap();
        manager.reassert(&pod).unwrap();
        let reset = ["max", "1"][usize::from(driver == CgroupDriver::Systemd)];
        assert_eq!(max(), reset, "{driver:?}");
        manager.limit_pids(&pod).unwrap();
        manager.limit_pids(&pod).unwrap();
        assert_eq!(max(), "1");

        for (limit, value, forks) in [
            (Some(2), "2", true),
            (Some(1), "1", false),
            (Some(u64::MAX), "max", true),
            (Some(4_194_304), "4194304", true),
            (None, "max", true),
        ] {
            let (manager, other) = with(limit).unwrap();
            std::mem::forget(other); // the first one removes the tree
            manager.ensure(&pod).unwrap();
            assert_eq!(max(), value, "{driver:?}");
            assert_eq!(can_fork(&container), forks, "{driver:?}: {limit:?}");
        }
        manager.destroy(&"u-7".into()).unwrap();
        assert!(!dir.exists());
    }
}

struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn destroying_a_pods_cgroup_ends_what_is_left_inside() {
    let Some((manager, root)) = manager(CgroupDriver::Cgroupfs, "kill") else {
        return;
    };
    manager.setup().unwrap();
    let pod = pod("u-9", json!({}));
    manager.ensure(&pod).unwrap();
    let dir = mount_of(&manager, "cpu")
        .join(&root.name)
        .join("kubepods/besteffort/podu-9");
    fs::create_dir(dir.join("left-over")).unwrap();
    let child = Command::new("sleep")
        .arg("600")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut sleeper = Sleeper(child);
    fs::write(
        dir.join("left-over/cgroup.procs"),
        sleeper.0.id().to_string(),
    )
    .unwrap();
    // Somebody has to reap it, as a container's shim would.
    let reaper = std::thread::spawn(move || {
        let status = sleeper.0.wait().unwrap();
        std::os::unix::process::ExitStatusExt::signal(&status)
    });
    manager.destroy(&"u-9".into()).unwrap();
    assert!(!dir.exists());
    assert_eq!(reaper.join().unwrap(), Some(9));
}

#[test]
fn without_qos_cgroups_nothing_is_touched() {
    let config = CgroupConfig {
        per_qos: false,
        pod_pids_limit: Some(5),
        root: format!("/holdfast-test-{}-off", std::process::id()),
        ..CgroupConfig::default()
    };
    let Ok(manager) = CgroupManager::detect(config.clone()) else {
        return;
    };
    let pod = pod("u", json!({}));
    manager.setup().unwrap();
    manager.ensure(&pod).unwrap();
    manager.limit_pids(&pod).unwrap();
    manager.destroy(&"u".into()).unwrap();
    assert_eq!(manager.pod_cgroup_parent(&pod).unwrap(), "");
    for mount in manager.describe().into_keys() {
        assert!(!mount.join(config.root.trim_start_matches('/')).exists());
    }
}

#[test]
fn cgroup_v1_is_refused_only_when_asked() {
    let config = CgroupConfig {
        fail_v1: true,
        ..CgroupConfig::default()
    };
    let Ok(plain) = CgroupManager::detect(CgroupConfig::default()) else {
        return;
    };
    let refused = CgroupManager::detect(config).is_err();
    assert_eq!(refused, plain.version() != CgroupVersion::V2);
}

#[test]
fn limits_of_a_pod_cgroup_grow_shrink_and_go_while_a_process_runs_in_it() {
    use holdfast::cm::{Limits, NO_MEMORY_LIMIT};
    let Some((manager, root)) = manager(CgroupDriver::Cgroupfs, "resize") else {
        return;
    };
    manager.setup().unwrap();
    let small = pod(
        "u-1",
        json!({"requests": {"cpu": "100m"}, "limits": {"cpu": "200m", "memory": "64Mi"}}),
    );
    let large = pod(
        "u-1",
        json!({"requests": {"cpu": "300m"}, "limits": {"cpu": "500m", "memory": "128Mi"}}),
    );
    let free = pod("u-1", json!({"requests": {"cpu": "300m"}}));
    manager.ensure(&small).unwrap();
    assert!(manager.memory_usage(&small).is_some());
    let at = |controller: &str, file: &str| {
        let top = mount_of(&manager, controller).join(&root.name);
        read(top.join("kubepods/burstable/podu-1").join(file))
    };
    let shown = || match manager.version() {
        CgroupVersion::V2 => [
            at("cpu", "cpu.max").split(' ').next().unwrap().to_owned(),
            at("memory", "memory.max"),
        ],
        CgroupVersion::V1 { .. } => [
            at("cpu", "cpu.cfs_quota_us"),
            at("memory", "memory.limit_in_bytes"),
        ],
    };
    let small_limits = ["20000".to_owned(), (64 << 20).to_string()];
    let large_limits = ["50000".to_owned(), (128 << 20).to_string()];
    assert_eq!(shown(), small_limits);
    let of = |pod: &Pod| manager.limits_of(pod).unwrap();
    let (first, last) = Limits::steps(of(&small), of(&large));
    assert_eq!(last, Limits::default());
    manager.set_limits(&large, first).unwrap();
    assert_eq!(shown(), large_limits);
    let (first, last) = Limits::steps(of(&large), of(&free));
    assert_eq!(first.memory, Some(NO_MEMORY_LIMIT));
    manager.set_limits(&free, first).unwrap();
    manager.set_limits(&free, last).unwrap();
    let unlimited = shown();
    assert!(
        ["-1", "max"].contains(&unlimited[0].as_str()),
        "{unlimited:?}"
    );
    assert_ne!(unlimited[1], large_limits[1]);
    let (first, last) = Limits::steps(of(&free), of(&small));
    assert_eq!(first, Limits::default());
    manager.set_limits(&small, last).unwrap();
    assert_eq!(shown(), small_limits);
}

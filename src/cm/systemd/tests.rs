//! Against a manager that speaks D-Bus over a socket: what it is told, when it is gone, and that limits put back are whole.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

use tokio::net::UnixListener;
use zbus::zvariant::{OwnedObjectPath, OwnedValue};

use super::*;
use crate::cm::{CgroupConfig, CgroupDriver, CgroupManager, Hierarchy, Limits, Mended};
use crate::types::PodExt as _;

type Properties = BTreeMap<String, String>;

/// Calls that the manager received.
#[derive(Debug, Default)]
struct Told {
    calls: Vec<(String, Properties)>,
    units: BTreeSet<String>,
    /// Properties that this version does not know.
    lacks: BTreeSet<&'static str>,
}

#[derive(Debug, zbus::DBusError)]
#[zbus(prefix = "org.freedesktop.systemd1")]
enum Refusal {
    #[zbus(error)]
    ZBus(zbus::Error),
    UnitExists(String),
    NoSuchUnit(String),
    PropertyReadOnly(String),
}

struct FakeManager(Arc<std::sync::Mutex<Told>>);

impl FakeManager {
    fn note(&self, call: &str, unit: &str, properties: Vec<(String, OwnedValue)>) {
        let properties = properties
            .into_iter()
            .map(|(name, value)| (name, format!("{:?}", Value::from(value))))
            .collect();
        let mut told = self.0.lock().unwrap();
        told.calls.push((format!("{call} {unit}"), properties));
    }
}

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl FakeManager {
    fn start_transient_unit(
        &self,
        name: String,
        mode: String,
        properties: Vec<(String, OwnedValue)>,
        _aux: Vec<(String, Vec<(String, OwnedValue)>)>,
    ) -> Result<OwnedObjectPath, Refusal> {
        assert_eq!(mode, "replace");
        let lacks = self.0.lock().unwrap().lacks.clone();
        if let Some((name, _)) = properties.iter().find(|(name, _)| lacks.contains(&**name)) {
            let text = format!("Cannot set property {name}, or unknown property.");
            return Err(Refusal::PropertyReadOnly(text));
        }
        if !self.0.lock().unwrap().units.insert(name.clone()) {
            return Err(Refusal::UnitExists(name));
        }
        self.note("start", &name, properties);
        Ok(OwnedObjectPath::try_from("/job/1").unwrap())
    }

    fn set_unit_properties(
        &self,
        name: String,
        runtime: bool,
        properties: Vec<(String, OwnedValue)>,
    ) {
        assert!(runtime, "nothing is to be left on the disk");
        self.note("set", &name, properties);
    }

    fn stop_unit(&self, name: String, _mode: String) -> Result<OwnedObjectPath, Refusal> {
        if !self.0.lock().unwrap().units.remove(&name) {
            return Err(Refusal::NoSuchUnit(name));
        }
        self.note("stop", &name, Vec::new());
        Ok(OwnedObjectPath::try_from("/job/2").unwrap())
    }

    fn reset_failed_unit(&self, name: String) -> Result<(), Refusal> {
        Err(Refusal::NoSuchUnit(name))
    }
}

/// A directory as cgroup v2, and a systemd that makes nothing in it.
struct World {
    dir: tempfile::TempDir,
    told: Arc<std::sync::Mutex<Told>>,
    server: tokio::task::JoinHandle<()>,
}

const CONTROLLERS: &str = "cpu memory pids hugetlb cpuset";

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let told = Arc::default();
        let server = serve(&dir.path().join("bus"), &told);
        Self { dir, told, server }
    }

    fn manager(&self) -> CgroupManager {
        let config = CgroupConfig {
            driver: CgroupDriver::Systemd,
            pod_pids_limit: Some(64),
            hugepage_sizes: vec![2 << 20],
            cpus: Some(10),
            ..CgroupConfig::default()
        };
        let socket = self.dir.path().join("bus");
        let mut manager = CgroupManager {
            top: CgroupName::parse("/").child("kubepods"),
            config,
            version: CgroupVersion::V2,
            hierarchies: vec![Hierarchy {
                path: self.dir.path().join("cgroup"),
                controllers: CONTROLLERS.split(' ').map(str::to_owned).collect(),
            }],
            systemd: None,
            wanted: Arc::default(),
            resized_memory: Arc::default(),
            resized_huge_pages: Arc::default(),
            pinning: None,
            metrics: None,
        };
        manager = manager.with_systemd(Some(Systemd::at(&socket, Handle::current())));
        manager
    }

    /// The files of a cgroup, as the kernel makes them.
    fn cgroup(&self, path: &str) -> PathBuf {
        let dir = self.dir.path().join("cgroup").join(path);
        let mut at = self.dir.path().join("cgroup");
        for part in std::iter::once("").chain(path.split('/')) {
            at.push(part);
            fs::create_dir_all(&at).unwrap();
            fs::write(at.join("cgroup.controllers"), CONTROLLERS).unwrap();
            fs::write(at.join("cgroup.subtree_control"), CONTROLLERS).unwrap();
            for (file, value) in [
                ("cpu.weight", "100"),
                ("cpu.max", "max 100000"),
                ("memory.max", "max"),
                ("pids.max", "max"),
                ("hugetlb.2MB.max", "max"),
                ("cgroup.procs", ""),
            ] {
                if !at.join(file).exists() {
                    fs::write(at.join(file), value).unwrap();
                }
            }
        }
        dir
    }

    fn take(&self) -> Vec<(String, Properties)> {
        std::mem::take(&mut self.told.lock().unwrap().calls)
    }
}

fn serve(socket: &Path, told: &Arc<std::sync::Mutex<Told>>) -> tokio::task::JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    let told = Arc::clone(told);
    tokio::spawn(async move {
        let mut connections = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            let connection = Builder::unix_stream(stream)
                .server(zbus::Guid::generate())
                .unwrap()
                .p2p()
                .serve_at(MANAGER_PATH, FakeManager(Arc::clone(&told)))
                .unwrap()
                .build()
                .await
                .unwrap();
            connections.push(connection);
        }
    })
}

async fn on<T: Send + 'static>(
    manager: &CgroupManager,
    work: impl FnOnce(&CgroupManager) -> T + Send + 'static,
) -> T {
    let manager = manager.clone();
    tokio::task::spawn_blocking(move || work(&manager))
        .await
        .unwrap()
}

async fn mend(manager: &CgroupManager) -> Vec<Mended> {
    let done = on(manager, CgroupManager::mend).await;
    assert!(done.failed.is_empty(), "{:?}", done.failed);
    done.mended
}

fn pod() -> Arc<k8s_openapi::api::core::v1::Pod> {
    Arc::new(
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
            "spec": {"containers": [{"name": "c", "resources": {
                "requests": {"cpu": "500m", "memory": "32Mi"},
                "limits": {"cpu": "125m", "memory": "64Mi", "hugepages-2Mi": "4Mi"},
            }}]},
        }))
        .unwrap(),
    )
}

const PARENT: &str = "kubepods.slice/kubepods-burstable.slice";
const SLICE: &str = "kubepods-burstable-podu_1.slice";

fn read(dir: &Path, file: &str) -> String {
    fs::read_to_string(dir.join(file)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_slice_is_a_unit_with_all_of_its_limits() {
    let world = World::new();
    let dir = world.cgroup(&format!("{PARENT}/{SLICE}"));
    let manager = world.manager();
    on(&manager, |m| m.ensure(&pod())).await.unwrap();
    let calls = world.take();
    let [(call, properties)] = calls.as_slice() else {
        panic!("{calls:?}")
    };
    assert_eq!(call, &format!("start {SLICE}"));
    for (name, value) in [
        ("CPUWeight", "U64(20)"),
        ("MemoryMax", "U64(67108864)"),
        // systemd keeps whole percents; less than the containers have would hold them back.
        ("CPUQuotaPerSecUSec", "U64(130000)"),
        ("CPUQuotaPeriodUSec", "U64(100000)"),
        ("TasksMax", "U64(64)"),
        ("DefaultDependencies", "Bool(false)"),
        ("TasksAccounting", "Bool(true)"),
    ] {
        assert_eq!(
            properties.get(name).map(String::as_str),
            Some(value),
            "{name}"
        );
    }
    assert!(
        properties["Wants"].contains("kubepods-burstable.slice"),
        "{properties:?}"
    );
    for (file, value) in [
        ("cpu.max", "12500 100000"),
        ("memory.max", "67108864"),
        ("pids.max", "64"),
        ("hugetlb.2MB.max", "4194304"),
    ] {
        assert_eq!(read(&dir, file), value, "{file}");
    }

    // Nothing is told twice, and a change is told as a whole.
    on(&manager, |m| m.ensure(&pod())).await.unwrap();
    assert_eq!(world.take(), []);
    let less = Limits {
        memory: Some(32 << 20),
        ..Limits::default()
    };
    on(&manager, move |m| m.set_limits(&pod(), less))
        .await
        .unwrap();
    let calls = world.take();
    let [(call, properties)] = calls.as_slice() else {
        panic!("{calls:?}")
    };
    assert_eq!(call, &format!("set {SLICE}"));
    assert_eq!(properties["MemoryMax"], "U64(33554432)");
    assert_eq!(properties["TasksMax"], "U64(64)");
    assert_eq!(properties["CPUQuotaPerSecUSec"], "U64(130000)");

    for file in fs::read_dir(&dir).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    on(&manager, |m| m.destroy(&pod().uid())).await.unwrap();
    assert_eq!(world.take(), [(format!("stop {SLICE}"), Properties::new())]);
    assert!(!dir.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_systemd_that_is_older_than_a_property_is_done_without_it() {
    let world = World::new();
    let dir = world.cgroup(&format!("{PARENT}/{SLICE}"));
    world.told.lock().unwrap().lacks = ["CPUQuotaPeriodUSec", "IOAccounting"].into();
    let manager = world.manager();
    on(&manager, |m| m.ensure(&pod())).await.unwrap();
    let calls = world.take();
    let [(call, properties)] = calls.as_slice() else {
        panic!("{calls:?}")
    };
    assert_eq!(call, &format!("start {SLICE}"));
    for (name, is_set) in [
        ("CPUQuotaPerSecUSec", true),
        ("CPUQuotaPeriodUSec", false),
        ("IOAccounting", false),
        ("MemoryMax", true),
    ] {
        assert_eq!(properties.contains_key(name), is_set, "{name}");
    }
    assert_eq!(read(&dir, "cpu.max"), "12500 100000");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_that_somebody_else_changed_are_put_back_and_told_once() {
    let world = World::new();
    let dir = world.cgroup(&format!("{PARENT}/{SLICE}"));
    on(&world.manager(), |m| m.ensure(&pod())).await.unwrap();
    world.take();

    // A second life of the agent, which was not told what the first one did.
    let manager = world.manager();
    on(&manager, |m| m.adopt(&pod())).await.unwrap();
    assert_eq!(mend(&manager).await, []);
    assert_eq!(world.take(), [], "an idle pod costs nothing");
    // What systemd rounded is no news.
    fs::write(dir.join("cpu.max"), "13000 100000").unwrap();
    assert_eq!(mend(&manager).await, []);
    assert_eq!(read(&dir, "cpu.max"), "12500 100000");

    for (file, changed, right) in [
        ("memory.max", "max", "67108864"),
        ("cpu.max", "max 100000", "12500 100000"),
        ("cpu.weight", "100", "20"),
        ("pids.max", "max", "64"),
        ("hugetlb.2MB.max", "max", "4194304"),
    ] {
        fs::write(dir.join(file), changed).unwrap();
        let mended = mend(&manager).await;
        let [one] = mended.as_slice() else {
            panic!("{file}: {mended:?}")
        };
        assert_eq!(
            (one.file.as_str(), one.found.as_deref(), one.wanted.as_str()),
            (file, Some(changed), right)
        );
        assert_eq!(read(&dir, file), right);
        let calls = world.take();
        assert_eq!(
            calls.last().map(|c| c.0.as_str()),
            Some(&*format!("set {SLICE}"))
        );
        assert_eq!(mend(&manager).await, [], "{file}");
    }
    // A cgroup that is gone is not made.
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(mend(&manager).await, []);
    assert!(!dir.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slice_that_was_stopped_is_made_again_with_its_limits() {
    const BURSTABLE: &str = "kubepods-burstable.slice";
    const BEST_EFFORT: &str = "kubepods-besteffort.slice";
    let world = World::new();
    let below = |unit: &str| format!("kubepods.slice/{unit}");
    world.cgroup(&below(BURSTABLE));
    world.cgroup(&below(BEST_EFFORT));
    let manager = world.manager();
    on(&manager, CgroupManager::setup).await.unwrap();
    on(&manager, |m| m.refresh_qos(&[])).await.unwrap();
    world.take();
    // As `systemctl stop` does: neither the unit nor its cgroup is left. Moved away, it keeps its number from the next one.
    let stop = |unit: &str| {
        assert!(world.told.lock().unwrap().units.remove(unit));
        let gone = world.dir.path().join(unit);
        let path = world.dir.path().join("cgroup").join(below(unit));
        fs::rename(path, gone).unwrap();
    };
    let calls = || -> Vec<String> { world.take().into_iter().map(|call| call.0).collect() };

    // The slice of a pod has brought back that of its class, and nobody has told systemd of its limits.
    stop(BURSTABLE);
    world.cgroup(&below(BURSTABLE));
    on(&manager, |m| m.refresh_qos(&[])).await.unwrap();
    assert_eq!(calls(), [format!("start {BURSTABLE}")]);
    on(&manager, |m| m.refresh_qos(&[])).await.unwrap();
    assert_eq!(calls(), [""; 0], "once is enough");

    // Nothing has brought it back. systemd, and not a test's directory, would make its files.
    stop(BEST_EFFORT);
    let done = on(&manager, CgroupManager::mend).await;
    assert_eq!(calls(), [format!("start {BEST_EFFORT}")], "{done:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_systemd_that_was_restarted_is_found_again_and_one_that_is_gone_is_an_error() {
    let world = World::new();
    world.cgroup(PARENT);
    world.cgroup("kubepods.slice/kubepods-besteffort.slice");
    let manager = world.manager();
    on(&manager, CgroupManager::setup).await.unwrap();
    let calls = world.take();
    let units: Vec<&str> = calls.iter().map(|call| call.0.as_str()).collect();
    assert_eq!(
        units,
        [
            "start kubepods.slice",
            "start kubepods-besteffort.slice",
            "start kubepods-burstable.slice"
        ]
    );
    assert!(calls[0].1["AllowedCPUs"].contains("255"), "{:?}", calls[0]);

    let socket = world.dir.path().join("bus");
    world.server.abort();
    assert!(world.server.await.unwrap_err().is_cancelled());
    fs::remove_file(&socket).unwrap();
    let less = |memory| Limits {
        memory: Some(memory),
        ..Limits::default()
    };
    let error = on(&manager, move |m| {
        m.make(&m.top.clone(), |w| w.merge(less(4096)))
    })
    .await;
    let error = error.unwrap_err();
    assert_eq!(
        error.to_string(),
        "have systemd keep cgroup /kubepods.slice"
    );

    let server = serve(&socket, &world.told);
    on(&manager, move |m| {
        m.make(&m.top.clone(), |w| w.merge(less(8192)))
    })
    .await
    .unwrap();
    assert_eq!(
        world.told.lock().unwrap().calls.last().unwrap().1["MemoryMax"],
        "U64(8192)"
    );
    server.abort();
}

#[test]
fn quotas_are_rounded_up_to_what_systemd_keeps() {
    for (quota, period, per_second) in [
        (100_000, 100_000, 1_000_000),
        (12_500, 100_000, 130_000),
        (1_000, 100_000, 10_000),
        (-1, 100_000, INFINITY),
    ] {
        assert_eq!(quota_per_second(quota, period), per_second, "{quota}");
    }
}

#[test]
fn processors_are_bits_the_lowest_first() {
    assert_eq!(mask(2), [0b11]);
    assert_eq!(mask(8), [0xff]);
    assert_eq!(mask(10), [0xff, 0b11]);
}

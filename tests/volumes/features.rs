//! All manifests on one node at the same time, and at the end nothing of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use holdfast_testkit::csi::CsiDriver;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::agent_process::eventually;
use crate::controllers::Controllers;
use crate::setup::Cluster;
use crate::{claims, content, drivers, node_local, refused};

/// Name of the manifest, and what has to be seen of it.
pub type Feature = (&'static str, fn(&Scene));

/// The cluster with its drivers.
pub struct Scene {
    drivers: BTreeMap<&'static str, Mutex<CsiDriver>>,
    cluster: Cluster,
}

impl Deref for Scene {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl Scene {
    /// A driver by what its name begins with; `""` is the one of most manifests.
    pub fn driver(&self, prefix: &str) -> MutexGuard<'_, CsiDriver> {
        let driver = &self.drivers[prefix];
        driver.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn features() -> Vec<Feature> {
    [
        node_local::FEATURES,
        content::FEATURES,
        claims::FEATURES,
        drivers::FEATURES,
        refused::FEATURES,
    ]
    .concat()
}

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/volumes")
}

#[test]
fn every_manifest_has_an_assertion() {
    let named: BTreeSet<String> = features().iter().map(|(n, _)| (*n).to_owned()).collect();
    assert_eq!(named.len(), features().len(), "a name is used twice");
    let files = fs::read_dir(manifests()).expect("list the manifests");
    let files = files.map(|entry| entry.expect("a file").path());
    let there: BTreeSet<String> = files
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(named, there);
}

#[test]
fn every_type_and_semantic_of_volumes_is_seen_by_users() {
    let wanted = std::env::var("HOLDFAST_E2E").unwrap_or_default();
    let wanted: BTreeSet<&str> = wanted.split(',').filter(|w| !w.is_empty()).collect();
    let mut chosen = features();
    chosen.retain(|(name, _)| wanted.is_empty() || wanted.contains(name));
    assert!(!chosen.is_empty(), "no such feature: {wanted:?}");

    let mut scene = Scene {
        drivers: BTreeMap::new(),
        cluster: Cluster::new(),
    };
    furnish(&host(&scene));
    let agent = scene.join();
    scene.drivers = drivers::start(&scene);
    let cluster = &scene.cluster;
    let _controllers = Controllers::start(cluster);
    for (name, _) in &chosen {
        let path = manifests().join(format!("{name}.yaml"));
        let text = fs::read_to_string(path).expect("read a manifest");
        apply(cluster, name, &text);
    }
    let mut failed = Vec::new();
    for (name, assertion) in chosen {
        if catch_unwind(AssertUnwindSafe(|| assertion(&scene))).is_err() {
            let events = cluster.kubectl(&["get", "events", "--sort-by=.lastTimestamp"]);
            let told: Vec<&str> = events.lines().filter(|l| l.contains(name)).collect();
            eprintln!("{name} failed; its events:\n{}", told.join("\n"));
            failed.push(name);
        }
    }
    cluster.kubectl(&["delete", "pods", "--all", "--wait=false"]);
    eventually("nothing is left of any volume", || left(cluster));
    agent.kill9();
    assert!(failed.is_empty(), "failed: {failed:?}");
    for (prefix, driver) in &scene.drivers {
        let driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
        let broken = driver.violations();
        assert_eq!(broken, Vec::<String>::new(), "of driver {prefix:?}");
        let truth = driver.truth().expect("what the driver remembers");
        assert!(truth.is_clean(), "{prefix:?}: {truth:?}");
    }
    let kept = fs::read_to_string(host(cluster).join("dir/inside")).expect("the node's file");
    assert_eq!(kept, "kept\n", "what a hostPath leads to stays");
}

/// What belongs to the node, for hostPath volumes.
pub fn host(cluster: &Cluster) -> PathBuf {
    cluster.dir().join("host")
}

/// Name of the driver of most manifests, and what the names of the others end with.
pub fn driver_name(cluster: &Cluster) -> String {
    format!("{}.holdfast.io", cluster.namespace)
}

fn furnish(host: &Path) {
    fs::create_dir_all(host.join("local")).expect("make a directory");
    fs::create_dir_all(host.join("options")).expect("make a directory");
    fs::write(host.join("local/before"), "of the node\n").expect("write a file");
    let mut disk = b"a disk of the node".to_vec();
    disk.resize(1 << 20, 0);
    fs::write(host.join("disk"), disk).expect("write a disk");
    fs::create_dir_all(host.join("dir")).expect("make a directory");
    fs::write(host.join("dir/inside"), "kept\n").expect("write a file");
    fs::write(host.join("file"), "a file of the node\n").expect("write a file");
    // It stays when the listener goes.
    drop(std::os::unix::net::UnixListener::bind(host.join("socket")).expect("make a socket"));
    let mode = Mode::from_bits_truncate(0o600);
    mknod(&host.join("char"), SFlag::S_IFCHR, mode, makedev(1, 3)).expect("make a device");
    mknod(&host.join("block"), SFlag::S_IFBLK, mode, makedev(7, 99)).expect("make a device");
}

/// Creates what a manifest says in the test's namespace.
pub fn apply(cluster: &Cluster, name: &str, text: &str) {
    let text = text
        .replace("@NODE@", &cluster.node)
        .replace("@NS@", &cluster.namespace)
        .replace("@DRIVER@", &driver_name(cluster))
        .replace("@HOST@", &host(cluster).display().to_string());
    let file = cluster.dir().join(format!("{name}.yaml"));
    fs::write(&file, text).expect("write a manifest");
    cluster.kubectl(&["create", "-f", &file.display().to_string()]);
}

/// Whether anything of the agent's volumes is still there.
pub fn left(cluster: &Cluster) -> Result<(), String> {
    let pods: Vec<String> = cluster.pods().iter().map(name_of).collect();
    if !pods.is_empty() {
        return Err(format!("pods {pods:?}"));
    }
    let mounts = mounts_below(&cluster.root_dir());
    if !mounts.is_empty() {
        return Err(format!("mounts {mounts:?}"));
    }
    let dirs = fs::read_dir(cluster.root_dir().join("pods")).map_err(|e| e.to_string())?;
    let dirs: Vec<PathBuf> = dirs.flatten().map(|entry| entry.path()).collect();
    if !dirs.is_empty() {
        return Err(format!("directories {dirs:?}"));
    }
    let dump = cluster.try_dump(&["volumes"])?;
    match dump["tables"]["volumes"].as_array().map(Vec::as_slice) {
        Some([]) => Ok(()),
        _ => Err(format!("records {}", dump["tables"]["volumes"])),
    }
}

fn name_of(pod: &serde_json::Value) -> String {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    let (status, deleted) = (
        &pod["status"]["phase"],
        &pod["metadata"]["deletionTimestamp"],
    );
    format!("{name} ({status}, deleted {deleted})")
}

/// Mount points at or below a directory, outermost first.
pub fn mounts_below(dir: &Path) -> Vec<String> {
    let table =
        String::from_utf8_lossy(&fs::read("/proc/self/mountinfo").expect("read the mount table"))
            .into_owned();
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| Path::new(point).starts_with(dir))
        .map(str::to_owned)
        .collect()
}

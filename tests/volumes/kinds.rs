//! A pod with a volume of every kind that a machine without servers can have, and what is behind them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use holdfast_testkit::csi::CsiDriver;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use nix::mount::{MsFlags, mount, umount};
use serde_json::{Value, json};

use crate::agent_process::eventually;
use crate::controllers::Controllers;
use crate::planted::{Planted, Tree, assert_same, look, plant};
use crate::setup::{Cluster, FOREVER, script};
use crate::torture::{claim, csi_claim, driver};

pub const POD: &str = "rich";

/// Volumes whose files are users' and outlive the pod, which its container adds to.
const LASTING: [&str; 6] = ["host", "claimed", "local", "disk-claim", "nfs", "csi"];
/// Volumes with parts for the container, and which.
const PARTS: [(&str, &str); 9] = [
    ("host", "deep"),
    ("local", "deep"),
    ("disk-claim", "deep"),
    ("nfs", "deep"),
    ("csi", "deep"),
    ("disk", "part"),
    ("memory", "part"),
    ("map", "a"),
    ("secret", "b"),
];
/// Volumes that the container has as devices.
const DEVICES: [&str; 2] = ["local-block", "csi-block"];

/// A node with a CSI driver and a disk, and claims on what is there, whose files are users'.
pub struct Storage {
    _controllers: Controllers,
    pub driver: CsiDriver,
    pub disk: Disk,
    tools: PathBuf,
}

impl Storage {
    pub fn new(cluster: &Cluster, planted: &mut Planted) -> Self {
        let controllers = Controllers::start(cluster);
        let name = format!("{}.holdfast.io", cluster.namespace);
        let lives = ["Persistent", "Ephemeral"];
        let spec = json!({
            "attachRequired": false, "podInfoOnMount": true, "volumeLifecycleModes": lives,
        });
        let driver = driver(cluster, &name, spec);
        let files = driver.volume_dir(&csi_claim(cluster, "csi", &name));
        plant(&files);
        planted.watch(&files);
        let handle = format!("{}-csi-block", cluster.namespace);
        let source = json!({
            "csi": {"driver": name, "volumeHandle": handle}, "volumeMode": "Block",
        });
        claim(cluster, "csi-block", source);
        // Where the driver keeps what is behind its devices.
        let blocks = files.parent().and_then(Path::parent).unwrap();
        let block = blocks.join("blocks").join(&handle);
        bytes(&block);
        planted.watch(&block);

        let disk = Disk::new(&cluster.dir().join("disk.img"));
        let local = |path: &Path| {
            json!({
                "local": {"path": path},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.node]},
                ]}]}},
            })
        };
        claim(cluster, "local", local(&planted.tree("local")));
        claim(cluster, "disk-claim", local(&disk.device));
        let file = planted.dir().join("block");
        bytes(&file);
        let mut block = local(&file);
        block["volumeMode"] = json!("Block");
        claim(cluster, "local-block", block);
        let path = planted.tree("claimed");
        claim(cluster, "claimed", json!({"hostPath": {"path": path}}));
        planted.tree("host");
        planted.tree("export");
        cluster.create::<ConfigMap>(json!({"metadata": {"name": "settings"}, "data": {"a": "1"}}));
        cluster.create::<Secret>(json!({"metadata": {"name": "keys"}, "stringData": {"b": "2"}}));
        Self {
            _controllers: controllers,
            driver,
            disk,
            tools: tools(&cluster.dir().join("tools")),
        }
    }

    /// What agents need in their environment: which variable, and its value.
    pub fn environment(&self) -> (&'static str, String) {
        ("HOLDFAST_TOOLS", self.tools.display().to_string())
    }
}

/// What is behind a raw device.
fn bytes(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).expect("make a directory");
    let mut bytes = b"a disk of users".to_vec();
    bytes.resize(1 << 20, 7);
    fs::write(path, bytes).expect("write a disk");
}

/// A machine that reaches an NFS server: its exports are directories here.
fn tools(dir: &Path) -> PathBuf {
    let mount = r#"#!/bin/sh
if [ "$1 $2" = "-t nfs" ]; then
    while [ "$1" != -- ]; do shift; done
    mount --bind -- "${2#*:}" "$3" && exec mount --make-private "$3"
fi
exec mount "$@"
"#;
    fs::create_dir_all(dir).expect("make a directory");
    for (name, text) in [("mount", mount), ("mount.nfs", "#!/bin/sh\nexit 1\n")] {
        let path = dir.join(name);
        fs::write(&path, text).expect("write a stand-in");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("let it run");
    }
    dir.to_owned()
}

/// A disk of the node with a file system on it and files of a user.
pub struct Disk {
    device: PathBuf,
    at: PathBuf,
    /// As the user saw it last, by paths on the disk.
    noted: Tree,
}

impl Disk {
    fn new(image: &Path) -> Self {
        let file = fs::File::create(image).expect("make a disk");
        file.set_len(16 << 20).expect("make a disk");
        run(Command::new("mkfs.ext4").arg("-q").arg(image));
        let device = run(Command::new("losetup").args(["-f", "--show"]).arg(image));
        let this = Self {
            device: PathBuf::from(device.trim()),
            at: image.with_extension("seen"),
            noted: Tree::new(),
        };
        fs::create_dir_all(&this.at).expect("make a mount point");
        this.mounted(plant);
        this
    }

    /// Does something with its files. Nobody else has it mounted.
    fn mounted<T>(&self, work: impl FnOnce(&Path) -> T) -> T {
        let none = None::<&str>;
        mount(
            Some(&self.device),
            &self.at,
            Some("ext4"),
            MsFlags::empty(),
            none,
        )
        .expect("mount a disk");
        let done = work(&self.at);
        umount(&self.at).expect("unmount a disk");
        done
    }

    /// Notes what is on it, as it is seen at a mount of it.
    pub fn note(&mut self, at: &Path) {
        self.noted = relative(at);
    }

    /// Fails when anything on it is not as it was noted. Nobody has it mounted.
    #[track_caller]
    pub fn assert_untouched(&self, when: &str) {
        let found = self.mounted(relative);
        assert_same(&self.noted, &found, when);
    }
}

fn relative(at: &Path) -> Tree {
    let below = |path: PathBuf| path.strip_prefix(at).map(Path::to_owned).expect("below");
    let tree = look(at).into_iter();
    tree.map(|(path, seen)| (below(path), seen)).collect()
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("run a tool");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Detached by the kernel when the last mount of it goes.
        let done = Command::new("losetup").arg("-d").arg(&self.device).status();
        if !done.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("cannot detach {}: {done:?}", self.device.display());
        }
    }
}

/// Creates the pod and waits until its container has written what it writes. Returns its UID.
pub fn rich(cluster: &Cluster, storage: &Storage, users: &Path) -> String {
    let labels =
        json!({"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]});
    let mut volumes = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "over", "emptyDir": {}},
        {"name": "over-too", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "host", "hostPath": {"path": users.join("host"), "type": "Directory"}},
        {"name": "host-file", "hostPath": {"path": users.join("host/file"), "type": "File"}},
        {"name": "map", "configMap": {"name": "settings"}},
        {"name": "secret", "secret": {"secretName": "keys"}},
        {"name": "labels", "downwardAPI": labels},
        {"name": "all", "projected": {"sources": [
            {"configMap": {"name": "settings"}},
            {"serviceAccountToken": {"path": "token"}},
        ]}},
        {"name": "nfs", "nfs": {"server": "127.0.0.1", "path": users.join("export")}},
        {"name": "inline", "csi": {"driver": storage.driver.name()}},
    ]);
    let volumes_of = volumes.as_array_mut().expect("volumes");
    for name in [
        "csi",
        "csi-block",
        "local",
        "local-block",
        "disk-claim",
        "claimed",
    ] {
        volumes_of.push(json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
    }
    let mut spec = script("Always", &format!("{}\n{FOREVER}", writes()));
    spec["hostNetwork"] = json!(true);
    spec["terminationGracePeriodSeconds"] = json!(1);
    if huge_pages() {
        volumes_of.push(json!({"name": "huge", "emptyDir": {"medium": "HugePages-2Mi"}}));
        let limits = json!({"hugepages-2Mi": "2Mi", "memory": "64Mi", "cpu": "1"});
        spec["containers"][0]["resources"] = json!({"limits": limits});
    }
    let names = volumes_of
        .iter()
        .map(|v| v["name"].as_str().expect("a name"));
    let mut mounts: Vec<Value> = names
        .filter(|name| !DEVICES.contains(name))
        .map(|name| json!({"name": name, "mountPath": format!("/v/{name}")}))
        .collect();
    for (name, part) in PARTS {
        mounts.push(json!({"name": name, "mountPath": format!("/p/{name}"), "subPath": part}));
    }
    spec["containers"][0]["volumeMounts"] = json!(mounts);
    let devices = DEVICES.map(|name| json!({"name": name, "devicePath": format!("/dev/{name}")}));
    spec["containers"][0]["volumeDevices"] = json!(devices);
    spec["volumes"] = volumes;
    let uid = cluster.create_pod(POD, spec);
    cluster.wait_running(POD);
    cluster.wait_told(&[POD]);
    let written = volume(cluster, &uid, "empty-dir", "disk").join("written");
    eventually("the container has written its files", || {
        written.exists().then_some(()).ok_or_else(String::new)
    });
    uid
}

/// A container's files, where there are none yet.
fn writes() -> String {
    let lasting = LASTING.join(" ");
    format!(
        "for v in {lasting}; do d=/v/$v/made; [ -e $d ] && continue
mkdir -m 2750 $d && echo by the pod > $d/file && ln -s /etc $d/link
chmod 640 $d/file && chown 12:34 $d/file
done
mkdir -p /v/disk/of/the/pod /v/memory/of/the/pod /v/inline/of/the/pod
ln -s /v/host/deep /v/disk/to-users
touch /v/disk/written"
    )
}

/// Whether the machine has huge pages; nobody else gives it some.
fn huge_pages() -> bool {
    let free = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free = fs::read_to_string(free).unwrap_or_default();
    free.trim().parse::<u64>().is_ok_and(|free| free > 0)
}

/// Where the volumes of the pod are.
pub fn volume(cluster: &Cluster, uid: &str, plugin: &str, name: &str) -> PathBuf {
    let dir = format!("pods/{uid}/volumes/kubernetes.io~{plugin}/{name}");
    let path = cluster.root_dir().join(dir);
    assert!(path.is_dir(), "{}", path.display());
    path
}

/// Where the parts of volumes that are directories are bound for the container.
pub fn places(cluster: &Cluster, uid: &str) -> Vec<(String, PathBuf)> {
    let dir = format!("pods/{uid}/volume-subpaths");
    let dir = cluster.root_dir().join(dir);
    let place = |name: &str| {
        let indices = fs::read_dir(dir.join(name).join("main")).expect("places of parts");
        let indices = indices.map(|entry| entry.expect("a place").path());
        indices.collect::<Vec<_>>().pop().expect("a place")
    };
    let directories = PARTS.iter().filter(|(_, part)| part.len() > 1);
    directories
        .map(|(name, _)| ((*name).to_owned(), place(name)))
        .collect()
}

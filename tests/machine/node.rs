//! A machine with the package installed, and what the stories need of it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use holdfast_testkit::fixture::{self, Fixture};
use holdfast_testkit::machine::{Base, Disk, Machine, Snapshot, Spec, payload};
use serde_json::{Value, json};

/// Eight times what a pod takes to run on a quiet machine.
pub const PATIENCE: Duration = Duration::from_secs(120);
pub const IMAGE: &str = "holdfast.local/busybox:1";

/// Where archives are imported from.
pub const PRELOAD: &str = "/var/lib/holdfast/images";
/// Mounts the disk that [`Node::make_root_disk`] makes.
pub const MOUNT_ROOT_DISK: &str = "mount -o loop /var/rootdisk.img /var/lib/kubelet";

/// The package under test, which is installed, in the machine.
pub const PACKAGE: &str = "/root/payload/holdfast.deb";
/// The same, as version 0.2.0-1.
pub const PACKAGE_NEWER: &str = "/root/payload/newer.deb";

const CONFIG: &str = "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
staticPodPath: /etc/kubernetes/manifests
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: systemd
systemReserved: {memory: 128Mi, cpu: 100m}
podPidsLimit: 200
syncFrequency: 10s
";

/// Where a crash scenario has its disks and its log of writes. When the test fails, all of it is kept: no other run need show the
/// same loss.
#[derive(Debug)]
pub struct CrashDir {
    dir: tempfile::TempDir,
    scenario: &'static str,
}

impl CrashDir {
    /// Makes one for the scenario, whose name names what is kept.
    pub fn new(scenario: &'static str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { dir, scenario }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for CrashDir {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let keep = std::env::var_os("HOLDFAST_TEST_KEEP").map_or_else(
            || std::env::temp_dir().join("hf-test-failed"),
            PathBuf::from,
        );
        let to = keep.join(self.scenario);
        drop(fs::remove_dir_all(&to));
        drop(fs::create_dir_all(&keep));
        // Most of a disk is holes.
        let copied = Command::new("cp")
            .args(["--archive", "--sparse=always"])
            .arg(self.dir.path())
            .arg(&to)
            .status();
        match copied {
            Ok(status) if status.success() => {
                eprintln!("disks and log of writes are kept in {}", to.display());
            }
            other => eprintln!("disks and log of writes cannot be kept: {other:?}"),
        }
    }
}

/// A machine with a node on it.
pub struct Node {
    pub machine: Machine,
    base: Base,
    disk: Disk,
    /// The disk of this machine, and what else it needs on the host.
    _dir: tempfile::TempDir,
    /// The machine that it began as.
    _installed: Fixture,
}

impl Node {
    /// The machine in which the package is installed and configured, and the agent has never run.
    pub fn installed() -> Self {
        Self::with(|_| ())
    }

    /// The same, with changes of what the machine is made of: those that a snapshot allows.
    pub fn with(change: impl FnOnce(&mut Spec)) -> Self {
        Self::switched_on(change, |base, snapshot, spec| {
            Machine::resume(base, snapshot, spec).unwrap()
        })
    }

    /// A machine with the disk of [`Self::installed`] that boots, so that it may have other processors and memory than a
    /// snapshot. Its agent starts with it.
    pub fn booted(change: impl FnOnce(&mut Spec)) -> Self {
        let mut node =
            Self::switched_on(change, |base, _, spec| Machine::boot(base, spec).unwrap());
        node.machine.wait_until_up().unwrap();
        node
    }

    fn switched_on(
        change: impl FnOnce(&mut Spec),
        start: impl FnOnce(&Base, &Snapshot, &Spec) -> Machine,
    ) -> Self {
        let base = Base::provide().unwrap();
        let installed = with_package(&base);
        let snapshot = Snapshot::in_dir(installed.path());
        let dir = tempfile::tempdir().unwrap();
        let disk = snapshot.disk().overlay(&dir.path().join("disk")).unwrap();
        let mut spec = Spec::new(disk);
        change(&mut spec);
        let machine = start(&base, &snapshot, &spec);
        Self {
            machine,
            base,
            disk: spec.disk,
            _dir: dir,
            _installed: installed,
        }
    }

    /// Switches the machine off and boots another one with its disk.
    pub fn boot_as(&mut self, change: impl FnOnce(&mut Spec)) {
        self.machine.send("sync; poweroff -f").unwrap();
        self.machine.powered_off().unwrap();
        let mut spec = Spec::new(self.disk.clone());
        change(&mut spec);
        self.machine = Machine::boot(&self.base, &spec).unwrap();
        self.machine.wait_until_up().unwrap();
    }

    /// Cuts the machine off without an end of its services, and waits until it takes commands again.
    pub fn reboot_at_once(&mut self) {
        self.machine.send("sync; reboot -f").unwrap();
        self.machine.switched_on().unwrap();
    }

    /// [`Self::installed`], and the agent has started.
    pub fn started() -> Self {
        let mut node = Self::installed();
        node.start();
        node
    }

    /// Makes the disk of the root directory, a file of 160 MiB with a file system made with these options.
    pub fn make_root_disk(&mut self, options: &str) {
        self.sh(&format!(
            "set -e\ntruncate -s 160M /var/rootdisk.img\nmkfs.ext4 -q {options} /var/rootdisk.img\nmkdir -p /var/lib/kubelet"
        ));
    }

    /// Copies the archive with the images of the machine to where the agent imports it from.
    pub fn preload(&mut self) {
        self.sh(&format!(
            "mkdir -p -m 700 {PRELOAD} && cp /root/images.tar {PRELOAD}/images.tar"
        ));
    }

    /// How often the container of a [`noting`] pod has started.
    #[track_caller]
    pub fn starts(&mut self, pod: &str) -> usize {
        let count = self.sh(&format!("grep -c started /data/{pod} 2>/dev/null || true"));
        count.parse().unwrap_or(0)
    }

    /// Waits until the container of a [`noting`] pod has started so often. Returns the uptime of the machine then, in seconds.
    #[track_caller]
    pub fn wait_starts(&mut self, pod: &str, count: usize, limit: Duration) -> f64 {
        let what = format!("{pod} has started {count} times");
        let script = format!(
            "n=$(grep -c started /data/{pod}); echo \"it has started $n times\"; test \"$n\" = {count}"
        );
        if let Err(error) = self.machine.wait_until(&what, limit, &script) {
            panic!("{error}\n{}", self.tell());
        }
        self.uptime()
    }

    /// Seconds since the machine booted.
    #[track_caller]
    pub fn uptime(&mut self) -> f64 {
        self.sh("cut -d' ' -f1 /proc/uptime").parse().unwrap()
    }

    /// The row of the pod's container in `holdfast dump containers`; null if there is none.
    #[track_caller]
    pub fn container(&mut self, pod: &str) -> Value {
        let full = format!("{pod}-vmnode");
        let all = rows(&mut self.machine, "containers").unwrap();
        let row = all.into_iter().find(|row| row["name"] == full.as_str());
        row.unwrap_or_default()
    }

    /// Waits until the agent has recorded how a container ended.
    #[track_caller]
    pub fn wait_exit(&mut self, pod: &str, code: i64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let row = self.container(pod);
            if row["lastExit"]["exitCode"] == code {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{pod} has not ended with {code}: {row}\n{}",
                self.tell()
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// Starts the agent and waits until it says that it is ready.
    pub fn start(&mut self) {
        self.sh("systemctl start holdfast");
    }

    /// Runs a script that has to succeed, and returns what it printed.
    #[track_caller]
    pub fn sh(&mut self, script: &str) -> String {
        match self.machine.sh(script) {
            Ok(text) => text,
            Err(error) => panic!("{error}\n{}", self.tell()),
        }
    }

    /// Repeats a script until it succeeds.
    #[track_caller]
    pub fn eventually(&mut self, what: &str, script: &str) -> String {
        match self.machine.wait_until(what, PATIENCE, script) {
            Ok(text) => text,
            Err(error) => panic!("{error}\n{}", self.tell()),
        }
    }

    /// What the agent logged last, for a failure.
    fn tell(&mut self) -> String {
        let output = self
            .machine
            .run("journalctl -u holdfast --no-pager -o cat -n 60");
        output.map_or_else(|error| error.to_string(), |output| output.text)
    }

    /// Writes the manifest of a static pod.
    pub fn manifest(&mut self, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let file = format!("/etc/kubernetes/manifests/{name}.json");
        self.sh(&format!(
            "cat >/etc/kubernetes/new <<'END_OF_FILE' && mv /etc/kubernetes/new {file}\n{pod}\nEND_OF_FILE"
        ));
    }

    /// Takes the manifest of a static pod away.
    pub fn remove_manifest(&mut self, name: &str) {
        self.sh(&format!("rm /etc/kubernetes/manifests/{name}.json"));
    }

    /// Waits until the agent has forgotten the pod of that name.
    #[track_caller]
    pub fn wait_gone(&mut self, pod: &str) {
        self.eventually(
            &format!("{pod} is gone"),
            &format!("holdfast dump pods -o json 2>/dev/null >/run/pods && ! grep -q {pod}-vmnode /run/pods"),
        );
    }

    /// The agent says that it is well.
    #[track_caller]
    pub fn is_healthy(&mut self) {
        self.eventually(
            "/healthz answers 200",
            "exec 3<>/dev/tcp/127.0.0.1/10248 && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && head -n 1 <&3 | grep -q ' 200 '",
        );
    }

    /// Waits until the pod of that name runs.
    #[track_caller]
    pub fn wait_running(&mut self, pod: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let full = format!("{pod}-vmnode");
            let all = rows(&mut self.machine, "overview").unwrap();
            let row = all.iter().find(|row| row["name"] == full.as_str());
            if row.is_some_and(|row| row["status"] == "Running") {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{pod} does not run: {row:?}\n{}",
                self.tell()
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the agent's log ends:\n{}", self.tell());
        }
        if std::env::var_os("HOLDFAST_MACHINE_KEEP").is_some() {
            self.machine.shell();
        }
    }
}

/// The rows of a table of `holdfast dump`.
///
/// # Errors
/// When the agent does not answer.
pub fn rows(machine: &mut Machine, table: &str) -> io::Result<Vec<Value>> {
    let text = machine.sh(&format!("holdfast dump {table} -o json 2>/dev/null"))?;
    let mut dump: Value = serde_json::from_str(&text).map_err(io::Error::other)?;
    match dump["tables"][table].take() {
        Value::Array(rows) => Ok(rows),
        other => Err(io::Error::other(format!("table {table} is {other}"))),
    }
}

/// A pod of one container with busybox.
pub fn pod(name: &str, policy: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "restartPolicy": policy,
            "terminationGracePeriodSeconds": 2,
            "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", script]}],
        },
    })
}

/// A container that does nothing until it is told to end.
pub const SLEEP: &str = "trap 'exit 0' TERM; while :; do sleep 1; done";

/// A pod that writes a line to a file of the machine with each start: see [`Node::starts`].
pub fn noting(name: &str, policy: &str, end: &str) -> Value {
    let mut pod = pod(
        name,
        policy,
        &format!("echo started >>/data/{name}; sync; {end}"),
    );
    pod["spec"]["volumes"] =
        json!([{"name": "data", "hostPath": {"path": "/data", "type": "DirectoryOrCreate"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pod
}

/// The machine with the package, made once for all tests of a run.
fn with_package(base: &Base) -> Fixture {
    let made = fixture::once("machine", |dir| {
        let files = dir.join("files");
        fs::create_dir(&files).unwrap();
        package(&files.join("holdfast.deb"), None);
        package(&files.join("newer.deb"), Some("0.2.0-1"));
        let archive = dir.join("payload");
        payload(&files, &archive).unwrap();
        let booted = base.booted().unwrap();
        let mut spec = Spec::new(booted.disk().overlay(&dir.join("disk")).unwrap());
        spec.payload = Some(archive);
        let mut machine = Machine::resume(base, &booted, &spec).unwrap();
        machine.unpack_payload("/root/payload").unwrap();
        let manifests = "/etc/kubernetes/manifests";
        machine
            .sh(&format!(
                "set -e\nctr -n k8s.io images import /root/images.tar >/dev/null\n\
                 dpkg -i {PACKAGE} >/dev/null\nmkdir -p {manifests}\n\
                 cat >/etc/holdfast/config.yaml <<'END_OF_FILE'\n{CONFIG}END_OF_FILE\n"
            ))
            .unwrap();
        machine.save(dir).unwrap();
    });
    made.expect("make a directory for the machine")
}

/// The Debian package of the binary under test: `HOLDFAST_MACHINE_BINARY`, which `make vmtest` sets to the release, else the one
/// that cargo built for the tests. `version`: another than the tree's.
fn package(to: &Path, version: Option<&str>) {
    let binary = std::env::var_os("HOLDFAST_MACHINE_BINARY").map_or_else(
        || PathBuf::from(env!("CARGO_BIN_EXE_holdfast")),
        PathBuf::from,
    );
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/deb.sh"))
        .arg(&binary)
        .arg(to)
        .args(version)
        // A development build writes a newer schema of the store when it is told to. A release ignores it.
        .envs(version.map(|_| ("HOLDFAST_NEWER_SCHEMA", "1")))
        .env("FAST", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "hack/deb.sh {}: {}",
        binary.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}

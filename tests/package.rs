//! The Debian package on a clean Debian: what it installs, what its scripts do and leave alone, and the unit under a real
//! systemd, which is PID 1 of namespaces of its own. Root directories come from `hack/debroot.sh`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "child processes live in real time"
)]

#[path = "package/booted.rs"]
mod booted;
#[path = "package/root.rs"]
mod root;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use booted::{Booted, eventually};
use holdfast::core::state::{ObjectRecord, Transaction};
use holdfast::kuberuntime::cri::v1;
use holdfast::objects::keyring::KeyFile;
use holdfast::objects::vault::Vault;
use holdfast::store::backend::SledOptions;
use holdfast::store::recover::Identity;
use holdfast::store::{Store, StoreOptions, open};
use holdfast::types::metrics::Metrics;
use holdfast::types::{BootId, BootIdentity, Clock, SystemClock};
use holdfast_testkit::fake_cri::{Behaviour, FakeCri};
use root::{NEWER, Packages, Root, attempt, run, script};

const UNIT: &str = "/usr/lib/systemd/system/holdfast.service";
const CONFIG: &str = "/etc/holdfast/config.yaml";
const STATE: &str = "/var/lib/holdfast";
const IMAGE: &str = "holdfast.local/busybox:1";
const SBOM: &str = "/usr/share/doc/holdfast/holdfast.cdx.json";

/// What the SBOM names is in Cargo.lock in this version, what Cargo.toml names is in the SBOM, and neither tests nor the directory of the
/// build are.
fn sbom_is_of_the_lock_file(text: &str) {
    let sbom: serde_json::Value = serde_json::from_str(text).unwrap();
    assert_eq!(sbom["bomFormat"], "CycloneDX");
    assert_eq!(sbom["metadata"]["component"]["name"], "holdfast");
    let named: BTreeSet<(&str, &str)> = sbom["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| {
            let text = |key: &str| part[key].as_str().unwrap();
            (text("name"), text("version"))
        })
        .collect();
    let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    let lock = fs::read_to_string(tree.join("Cargo.lock")).unwrap();
    for (name, version) in &named {
        let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
        assert!(lock.contains(&entry), "{name} {version}");
    }
    let manifest = fs::read_to_string(tree.join("Cargo.toml")).unwrap();
    let (_, rest) = manifest.split_once("\n[dependencies]\n").unwrap();
    let (dependencies, _) = rest.split_once("\n[").unwrap();
    let wanted: Vec<&str> = dependencies
        .lines()
        .filter_map(|line| line.split_once(" = "))
        .filter(|(_, what)| !what.contains("optional = true"))
        .map(|(name, _)| name)
        .collect();
    assert!(wanted.contains(&"sled"), "{wanted:?}");
    for name in wanted {
        assert!(named.iter().any(|(found, _)| *found == name), "{name}");
    }
    assert!(!named.iter().any(|(name, _)| *name == "proptest"));
    assert!(!text.contains(tree.to_str().unwrap()));
}

#[test]
fn the_package_is_complete_on_a_clean_debian_and_starts_nothing() {
    let root = Root::new("minbase");
    let said = root.install(&Packages::get().current());
    assert!(
        said.contains("not started, there is no /etc/holdfast/config.yaml"),
        "{said}"
    );
    let version = run(&mut root.chroot(&["holdfast", "--version"]));
    assert_eq!(
        version.trim(),
        concat!("holdfast ", env!("CARGO_PKG_VERSION"))
    );

    // Files, their modes and owners.
    let listed = run(&mut root.chroot(&["dpkg", "--listfiles", "holdfast"]));
    let files: BTreeSet<&str> = listed
        .lines()
        .filter(|file| root.path(file).is_file())
        .collect();
    for file in &files {
        let found = fs::metadata(root.path(file)).unwrap();
        let mode = found.permissions().mode() & 0o7777;
        let wanted = if *file == "/usr/bin/holdfast" {
            0o755
        } else {
            0o644
        };
        assert_eq!((mode, found.uid(), found.gid()), (wanted, 0, 0), "{file}");
    }
    for file in [
        "/usr/bin/holdfast",
        UNIT,
        "/etc/default/holdfast",
        "/etc/logrotate.d/holdfast",
        "/usr/share/bash-completion/completions/holdfast",
        "/usr/share/zsh/vendor-completions/_holdfast",
        "/usr/share/fish/vendor_completions.d/holdfast.fish",
        "/usr/share/man/man1/holdfast.1.gz",
        "/usr/share/man/man1/holdfast-run.1.gz",
        "/usr/share/doc/holdfast/copyright",
        SBOM,
        "/usr/share/doc/holdfast/changelog.Debian.gz",
        "/usr/share/doc/holdfast/docs/install.md",
        "/usr/share/doc/holdfast/examples/config/complete.yaml",
        "/usr/share/doc/holdfast/examples/systemd/kubeadm.conf",
        "/usr/share/doc/holdfast/examples/systemd/kubelet.conf",
        "/usr/share/doc/holdfast/examples/systemd/holdfast.socket",
    ] {
        assert!(files.contains(file), "{file} is missing among {files:#?}");
    }
    let conffiles = root.read("/var/lib/dpkg/info/holdfast.conffiles");
    assert_eq!(
        conffiles,
        "/etc/default/holdfast\n/etc/logrotate.d/holdfast\n"
    );

    sbom_is_of_the_lock_file(&root.read(SBOM));

    // It is enabled, and does nothing without a configuration.
    assert!(
        fs::symlink_metadata(
            root.path("/etc/systemd/system/multi-user.target.wants/holdfast.service")
        )
        .is_ok_and(|link| link.is_symlink())
    );
    assert!(
        root.read(UNIT)
            .contains("\nConditionPathExists=/etc/holdfast/config.yaml\n")
    );
    assert!(!root.path(CONFIG).exists() && !root.path(STATE).exists());

    // Manual pages are well-formed and have text in them.
    let pages: Vec<_> = files
        .iter()
        .filter(|file| file.contains("/man/man1/"))
        .collect();
    assert!(pages.len() > 10, "{pages:?}");
    for page in pages {
        let path = root.path(page);
        run(Command::new("mandoc")
            .args(["-T", "lint", "-W", "error"])
            .arg(&path));
        // Bold is a letter, a backspace, and the letter again.
        let text = run(Command::new("mandoc").args(["-T", "ascii"]).arg(&path));
        let letters: Vec<&str> = text.split('\u{8}').collect();
        let text: String = letters
            .iter()
            .enumerate()
            .map(|(n, part)| {
                if n == 0 {
                    part
                } else {
                    part.get(1..).unwrap_or("")
                }
            })
            .collect();
        assert!(
            text.contains("SYNOPSIS") && text.contains("holdfast"),
            "{page}: {text}"
        );
    }

    // Completions: bash reads its own, and it completes.
    run(&mut root.chroot(&[
        "bash",
        "-ec",
        "bash -n /usr/share/bash-completion/completions/holdfast
         . /usr/share/bash-completion/completions/holdfast
         COMP_WORDS=(holdfast ba) COMP_CWORD=1
         _holdfast holdfast ba holdfast
         [ \"${COMPREPLY[*]}\" = backup ] || { echo \"${COMPREPLY[*]}\" >&2; exit 1; }",
    ]));
    zsh_and_fish_complete(&root);

    // Every configuration that is shipped is one that the binary takes.
    for example in files
        .iter()
        .filter(|file| file.contains("/examples/config/"))
    {
        let said = run(&mut root.chroot(&["holdfast", "run", "--validate", "--config", example]));
        assert_eq!(said, "the configuration is valid\n", "{example}");
    }
    root.write(
        "/tmp/bad.yaml",
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPod: 1\n",
    );
    let (valid, said) =
        attempt(&mut root.chroot(&["holdfast", "run", "--validate", "--config", "/tmp/bad.yaml"]));
    assert!(
        !valid && said.contains("did you mean \"maxPods\""),
        "{said}"
    );
}

/// The shells of this machine read the installed completions, and complete a command that is typed.
fn zsh_and_fish_complete(root: &Root) {
    let home = tempfile::tempdir().unwrap();
    let path = format!("{}:/usr/bin:/bin", root.path("/usr/bin").display());
    let shell = |arguments: &[&str]| {
        let mut command = Command::new("timeout");
        command.arg("60").args(arguments).env_clear();
        command
            .env("PATH", &path)
            .env("HOME", home.path())
            .env("TERM", "dumb");
        run(&mut command)
    };
    let zsh = root.path("/usr/share/zsh/vendor-completions/_holdfast");
    let (file, dir) = (zsh.to_str().unwrap(), zsh.parent().unwrap());
    shell(&["zsh", "-f", "-n", file]);
    // Typed into a shell on a terminal of its own.
    let script = home.path().join("type.zsh");
    fs::write(
        &script,
        r#"zmodload zsh/zpty
zpty shell zsh -f -i
expect() { zpty -r -m shell said "*$1*" && print -r -- "$said" }
zpty -w -n shell "PS1=READY'-'HERE; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D"$'\n'
expect READY-HERE
zpty -w -n shell $'holdfast du\t'
expect 'holdfast dump'
zpty -w -n shell $'--histo\t'
expect '--history'
"#,
    )
    .unwrap();
    let script = script.to_str().unwrap();
    shell(&["zsh", "-f", script, dir.to_str().unwrap()]);

    let fish = root.path("/usr/share/fish/vendor_completions.d/holdfast.fish");
    let (file, dir) = (fish.to_str().unwrap(), fish.parent().unwrap());
    shell(&["fish", "--no-config", "--no-execute", file]);
    let complete = |typed: &str| {
        let asked = format!(
            "set -g fish_complete_path {}; complete -C '{typed}'",
            dir.display()
        );
        shell(&["fish", "--no-config", "-c", &asked])
    };
    let said = complete("holdfast du");
    assert!(
        said.starts_with("dump\t") && said.lines().count() == 1,
        "{said}"
    );
    let said = complete("holdfast dump --histo");
    assert!(said.starts_with("--history\t"), "{said}");
}

#[test]
fn the_unit_is_verified_and_its_exposure_is_what_the_documents_say() {
    // The units and programs that it names are looked up below the root.
    let root = Root::new("systemd");
    root.install(&Packages::get().current());
    let verify = |unit: &str| {
        attempt(
            Command::new("systemd-analyze")
                .arg(format!("--root={}", root.dir().display()))
                .args(["--man=no", "verify", unit]),
        )
    };
    let (good, said) = verify("holdfast.service");
    assert!(good && said.is_empty(), "{said}");
    // The drop-in for kubeadm's nodes, too.
    root.write(
        "/etc/systemd/system/holdfast.service.d/kubeadm.conf",
        &root.read("/usr/share/doc/holdfast/examples/systemd/kubeadm.conf"),
    );
    let (good, said) = verify("holdfast.service");
    assert!(good && said.is_empty(), "{said}");
    // It would tell a mistake.
    root.write(
        "/etc/systemd/system/holdfast.service.d/wrong.conf",
        "[Service]\nWatchdogSecs=1\n",
    );
    let (_, said) = verify("holdfast.service");
    assert!(said.contains("WatchdogSecs"), "{said}");

    let said = run(Command::new("systemd-analyze")
        .args(["security", "--no-pager", "--offline=true"])
        .arg(root.path(UNIT)));
    let line = said
        .lines()
        .find(|line| line.contains("Overall exposure level"))
        .unwrap_or_else(|| panic!("{said}"));
    let score = line
        .split_whitespace()
        .find(|word| word.parse::<f32>().is_ok())
        .unwrap();
    let documented = fs::read_to_string("docs/install.md").unwrap();
    assert!(
        documented.contains(&format!("exposure level of {score}")),
        "docs/install.md should say: an exposure level of {score}"
    );

    // Secrets in the agent's memory stay there.
    let unit = root.read(UNIT);
    for line in ["LimitCORE=0", "MemorySwapMax=0"] {
        assert!(unit.lines().any(|l| l == line), "{line}");
    }
    // What a disk has is not looked for below its mount point.
    assert!(
        unit.contains("\nRequiresMountsFor=/var/lib/kubelet "),
        "{unit}"
    );
    // Nothing gives the agent a mount namespace of its own: its mounts would not be the host's.
    for line in unit.lines().filter(|line| !line.starts_with('#')) {
        for directive in [
            "ProtectSystem=",
            "ProtectHome=",
            "PrivateTmp=",
            "PrivateDevices=",
            "PrivateMounts=",
            "ProtectKernelTunables=",
            "ProtectKernelModules=",
            "ProtectKernelLogs=",
            "ProtectControlGroups=",
            "ProtectProc=",
            "ProcSubset=",
            "PrivateIPC=",
            "MountFlags=",
            "ReadWritePaths=",
            "ReadOnlyPaths=",
            "InaccessiblePaths=",
            "BindPaths=",
            "TemporaryFileSystem=",
            "RootDirectory=",
            "DynamicUser=",
            "LogNamespace=",
        ] {
            assert!(!line.starts_with(directive), "{line}");
        }
    }
}

#[test]
fn what_is_installed_from_source_is_uninstalled_again() {
    let dir = tempfile::tempdir().unwrap();
    let destdir = dir.path().to_str().unwrap();
    let files = || -> BTreeSet<String> {
        let found = run(Command::new("find").args([destdir, "-type", "f", "-printf", "%m %P\n"]));
        found.lines().map(str::to_owned).collect()
    };
    run(script("hack/install.sh").args([root::BINARY, destdir, "/opt/holdfast"]));
    let installed = files();
    for file in [
        "755 opt/holdfast/bin/holdfast",
        "644 opt/holdfast/lib/systemd/system/holdfast.service",
        "644 opt/holdfast/share/bash-completion/completions/holdfast",
        "644 opt/holdfast/share/zsh/site-functions/_holdfast",
        "644 opt/holdfast/share/fish/vendor_completions.d/holdfast.fish",
        "644 opt/holdfast/share/man/man1/holdfast.1",
        "644 opt/holdfast/share/doc/holdfast/docs/install.md",
        "644 opt/holdfast/share/doc/holdfast/examples/config/complete.yaml",
        "644 opt/holdfast/share/doc/holdfast/examples/logrotate",
    ] {
        assert!(
            installed.contains(file),
            "{file} is missing among {installed:#?}"
        );
    }
    let unit = dir
        .path()
        .join("opt/holdfast/lib/systemd/system/holdfast.service");
    let unit = fs::read_to_string(unit).unwrap();
    assert!(
        unit.contains("\nExecStart=/opt/holdfast/bin/holdfast run "),
        "{unit}"
    );

    let others = dir.path().join("opt/holdfast/share/man/man1/other.1");
    fs::write(others, "").unwrap();
    run(script("hack/install.sh").args(["uninstall", destdir, "/opt/holdfast"]));
    let left: Vec<_> = files().into_iter().collect();
    assert_eq!(left, ["644 opt/holdfast/share/man/man1/other.1"]);
}

/// Has the installed binary make a store, and end.
fn make_store(root: &Root) {
    root.write(
        CONFIG,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nhealthzPort: 0\n\
         containerRuntimeEndpoint: unix:///run/none.sock\ncgroupsPerQOS: false\n",
    );
    // It looks at itself in /proc and for cgroups in /sys, which a bare root does not have.
    let mut agent = Command::new("unshare");
    agent.args(["--mount", "--pid", "--fork", "--kill-child"]);
    agent.args(["sh", "-ec"]);
    agent.arg("mount -t proc proc $0/proc; mount --rbind /sys $0/sys; exec chroot $0 \"$@\"");
    agent.arg(root.dir());
    root::clean(agent.args([
        "holdfast",
        "run",
        "--config",
        CONFIG,
        // The machine is not the test's: neither its rules nor the settings of its kernel.
        "--make-iptables-util-chains=false",
        "--protect-kernel-defaults",
    ]));
    let log = fs::File::create(root.path("/root/agent.log")).unwrap();
    let mut agent = agent
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    eventually("there is a store, with keys", || {
        let files = ["schema", "keys/secrets.key"];
        let missing = files
            .iter()
            .find(|file| !root.path(STATE).join(file).exists());
        missing.map_or(Ok(()), |file| {
            Err(format!("no {file}\n{}", root.read("/root/agent.log")))
        })
    });
    eventually("the agent answers", || {
        match attempt(&mut root.chroot(&["holdfast", "dump", "meta"])) {
            (true, _) => Ok(()),
            (false, said) => Err(said),
        }
    });
    agent.kill().unwrap();
    agent.wait().unwrap();
    eventually("the agent is gone", || {
        let lock = fs::File::open(root.path("/var/lib/holdfast/LOCK")).unwrap();
        lock.try_lock().map_err(|error| error.to_string())
    });
}

#[test]
fn a_downgrade_has_the_newer_binary_convert_the_store_back() {
    let packages = Packages::get();
    let root = Root::new("minbase");
    root.install(&packages.newer());
    assert_eq!(root.version(), NEWER);
    make_store(&root);
    let migrate = ["holdfast", "store", "migrate", "--to", "3"];
    run(root.chroot(&migrate).env("HOLDFAST_NEWER_SCHEMA", "1"));
    assert_eq!(root.read("/var/lib/holdfast/schema"), "3\n");
    let keys = root.read("/var/lib/holdfast/keys/secrets.key");

    // The store is in use, here by a lock: it cannot be converted, and the newer version stays.
    let lock = fs::File::open(root.path("/var/lib/holdfast/LOCK")).unwrap();
    lock.try_lock().unwrap();
    let current = root.offer(&packages.current());
    let downgrade = || {
        let mut command = root.chroot(&["dpkg", "--install", &current]);
        // The binary of the newer package is the one that plays a newer one.
        attempt(command.env("HOLDFAST_NEWER_SCHEMA", "1"))
    };
    let (done, said) = downgrade();
    assert!(
        !done && said.contains("the installed version stays"),
        "{said}"
    );
    assert_eq!(root.version(), NEWER);
    assert_eq!(root.read("/var/lib/holdfast/schema"), "3\n");
    drop(lock);

    let (done, said) = downgrade();
    assert!(done && said.contains("from schema 3 to 2"), "{said}");
    assert_eq!(root.version(), "0.1.0-1");
    assert_eq!(root.read("/var/lib/holdfast/schema"), "2\n");
    assert_eq!(root.read("/var/lib/holdfast/keys/secrets.key"), keys);
    run(&mut root.chroot(&["holdfast", "store", "verify"]));

    // And up again: nothing is converted by the package, the agent does that itself.
    let said = root.install(&packages.newer());
    assert!(!said.contains("converting"), "{said}");
    assert_eq!(root.version(), NEWER);
    run(&mut root.chroot(&["holdfast", "store", "verify"]));
}

#[test]
fn removal_keeps_everything_and_a_purge_deletes_state_only_when_told_and_without_pods() {
    let root = Root::new("minbase");
    let package = Packages::get().current();
    root.install(&package);
    make_store(&root);
    let volume = "/var/lib/kubelet/pods/1234/volumes/kubernetes.io~empty-dir/data/file";
    root.write(volume, "precious");
    root.write("/etc/default/holdfast", "HOLDFAST_FLAGS=--v=2\n");
    let answer = |root: &Root| {
        run(&mut root.chroot(&[
            "sh",
            "-c",
            "echo holdfast holdfast/purge-state boolean true | debconf-set-selections",
        ]));
    };
    let purge = || run(&mut root.chroot(&["dpkg", "--purge", "holdfast"]));
    let store = "/var/lib/holdfast/db";

    run(&mut root.chroot(&["dpkg", "--remove", "holdfast"]));
    assert!(!root.path("/usr/bin/holdfast").exists());
    assert!(root.path(store).exists() && root.path(CONFIG).exists());
    assert_eq!(root.read("/etc/default/holdfast"), "HOLDFAST_FLAGS=--v=2\n");
    // Back again, with everything that was there.
    root.install(&package);
    run(&mut root.chroot(&["holdfast", "store", "verify"]));
    assert_eq!(root.read("/etc/default/holdfast"), "HOLDFAST_FLAGS=--v=2\n");

    // Nobody answers: kept.
    let said = purge();
    assert!(said.contains("kept /var/lib/holdfast"), "{said}");
    assert!(root.path(store).exists() && root.path(CONFIG).exists());
    assert!(!root.path("/etc/default/holdfast").exists());
    assert!(
        !root
            .path("/etc/systemd/system/multi-user.target.wants/holdfast.service")
            .exists()
    );

    // Told to, but a pod runs: kept.
    root.install(&package);
    answer(&root);
    let pod = "/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/x/cgroup.procs";
    root.write(pod, "4711\n");
    let said = purge();
    assert!(said.contains("pods are running"), "{said}");
    assert!(root.path(store).exists());

    // Told to, and nothing runs: the state goes, volumes do not.
    root.install(&package);
    answer(&root);
    root.write(pod, "");
    fs::remove_file(root.path(CONFIG)).unwrap();
    purge();
    assert!(!root.path(STATE).exists() && !root.path("/etc/holdfast").exists());
    assert_eq!(root.read(volume), "precious");
}

/// A fake runtime whose socket is in the root directory.
struct Runtime {
    fake: FakeCri,
    _tokio: tokio::runtime::Runtime,
}

impl Runtime {
    fn new(root: &Root) -> Self {
        let tokio = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let guard = tokio.enter();
        let fake = FakeCri::new();
        fake.add_image(IMAGE);
        fake.on_start(|_| Behaviour::RunForever);
        fake.serve(root.path("/srv/cri.sock")).unwrap();
        drop(guard);
        Self {
            fake,
            _tokio: tokio,
        }
    }

    fn running(&self) -> Vec<String> {
        let containers = self.fake.containers().into_iter();
        containers
            .filter(|c| c.state() == v1::ContainerState::ContainerRunning)
            .map(|c| c.id)
            .collect()
    }

    /// Calls that changed something since they were cleared.
    fn changes(&self) -> Vec<&'static str> {
        let changing = [
            "run_podsandbox",
            "stop_podsandbox",
            "remove_podsandbox",
            "create_container",
            "start_container",
            "stop_container",
            "remove_container",
        ];
        let calls = self.fake.calls().into_iter().map(|call| call.operation);
        calls
            .filter(|operation| changing.contains(operation))
            .collect()
    }
}

#[test]
fn systemd_runs_the_agent_and_pods_outlive_crash_upgrade_and_removal() {
    let packages = Packages::get();
    let machine = Booted::new();
    let root = &machine.root;
    let runtime = Runtime::new(root);

    // Without a configuration: enabled, not started, not failed.
    machine.install(&packages.current());
    assert_eq!(
        machine.run(&["systemctl", "is-enabled", "holdfast"]).trim(),
        "enabled"
    );
    machine.run(&["systemctl", "start", "holdfast"]);
    assert_eq!(machine.property("ActiveState"), "inactive");
    assert_eq!(machine.property("ConditionResult"), "no");

    root.write(
        CONFIG,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
         containerRuntimeEndpoint: unix:///srv/cri.sock\nstaticPodPath: /etc/kubernetes/manifests\n\
         cgroupsPerQOS: false\nevictionHard: {memory.available: 100Mi}\n",
    );
    root.write(
        "/etc/kubernetes/manifests/web.yaml",
        &format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers:\n  - name: main\n    image: {IMAGE}\n    \
             volumeMounts: [{{name: memory, mountPath: /memory}}]\n  volumes:\n  - name: memory\n    emptyDir: {{medium: Memory}}\n"
        ),
    );
    // Returns when the agent has said that it is ready.
    machine.run(&["systemctl", "start", "holdfast"]);
    assert_eq!(
        machine.property("ActiveState"),
        "active",
        "{}",
        machine.journal()
    );
    let running = eventually("the pod runs", || match runtime.running() {
        ids if ids.len() == 1 => Ok(ids),
        ids => Err(format!("{ids:?}, {}", machine.journal())),
    });

    // The mount is the host's, although the unit is confined.
    let mount = "/volumes/kubernetes.io~empty-dir/memory ";
    assert!(machine.mounts().contains(mount), "{}", machine.mounts());
    let agent = machine.property("MainPID");
    let status = machine.run(&["cat", &format!("/proc/{agent}/status")]);
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line} is not in {status}");
    }
    assert_eq!(machine.property("LimitCORE"), "0");
    assert_eq!(machine.property("MemorySwapMax"), "0");
    assert_eq!(
        machine.run(&["readlink", &format!("/proc/{agent}/ns/mnt")]),
        machine.run(&["readlink", "/proc/1/ns/mnt"])
    );
    assert_ne!(machine.property("WatchdogTimestampMonotonic"), "0");
    let state = fs::metadata(root.path(STATE)).unwrap();
    assert_eq!(state.permissions().mode() & 0o7777, 0o700);

    // A crash: systemd starts it again, the pod is left alone.
    let ready_again = |old: &str| {
        eventually("the agent is back", || {
            let now = machine.property("MainPID");
            match machine.property("ActiveState").as_str() {
                "active" if now != old => Ok(now),
                other => Err(format!("{other}, {now}")),
            }
        })
    };
    runtime.fake.clear_calls();
    machine.run(&["sh", "-c", &format!("kill -KILL {agent}")]);
    let agent = ready_again(&agent);
    assert_eq!(machine.property("NRestarts"), "1");

    // An upgrade restarts it; the pod is left alone.
    machine.install(&packages.newer());
    let agent = ready_again(&agent);
    assert_eq!(runtime.running(), running);
    assert_eq!(runtime.changes(), [""; 0]);
    assert!(machine.mounts().contains(mount));

    // Runtimes may be gone while packages are installed: nobody waits for the agent to be ready.
    assert_ne!(agent, "0");
    machine.run(&["systemctl", "stop", "holdfast"]);
    machine.install(&packages.newer());
    assert_eq!(
        machine.property("ActiveState"),
        "inactive",
        "who stopped it wants it stopped"
    );

    // Not beside a kubelet.
    root.write(
        "/etc/systemd/system/kubelet.service",
        "[Service]\nExecStart=/bin/sleep infinity\n",
    );
    machine.run(&["systemctl", "daemon-reload"]);
    machine.run(&["systemctl", "start", "kubelet"]);
    machine.run(&["systemctl", "start", "holdfast"]);
    assert_eq!(machine.property("ActiveState"), "inactive");
    eventually("it is told why", || {
        let journal = machine.journal();
        let told = journal.contains("kubelet.service is active");
        if told { Ok(()) } else { Err(journal) }
    });
    machine.run(&["systemctl", "stop", "kubelet"]);
    machine.run(&["systemctl", "start", "holdfast"]);
    assert_eq!(
        machine.property("ActiveState"),
        "active",
        "{}",
        machine.journal()
    );
    assert_eq!(runtime.running(), running);

    // A removal stops the agent and nothing else.
    machine.run(&["dpkg", "--remove", "holdfast"]);
    assert_eq!(machine.property("ActiveState"), "inactive");
    assert_eq!(runtime.running(), running);
    assert_eq!(runtime.changes(), [""; 0]);
    assert!(machine.mounts().contains(mount));

    // The package that comes back starts it.
    machine.run(&["systemctl", "stop", "kubelet"]);
    machine.install(&packages.newer());
    ready_again("0");
    assert_eq!(runtime.running(), running);
}

/// Records a secret on a node whose agent does not run, encrypted with the key in `keys`.
fn record_a_secret(state: &Path, keys: &Path) {
    let tokio = tokio::runtime::Runtime::new().unwrap();
    let _guard = tokio.enter();
    let clock = Arc::new(SystemClock::new(BootId(1)));
    let opened = open::open(&open::OpenOptions {
        node_was_used: true,
        dir: state.to_owned(),
        identity: Identity {
            node_name: "node-1".to_owned(),
            // Not known: any.
            machine_id: String::new(),
            boot: BootIdentity::read(None, None),
        },
        sled: SledOptions::default(),
        now: clock.now(),
    })
    .unwrap();
    let store = Store::start(
        opened.backend,
        opened.loaded,
        StoreOptions::default(),
        Arc::clone(&clock) as _,
        Metrics::default(),
    )
    .unwrap();
    let vault = Vault::open(KeyFile::at(keys), clock.now());
    // A kind of its own: secrets that no pod refers to are forgotten at the start.
    let key = "sealed/default/login";
    let record = ObjectRecord {
        resource_version: "1".to_owned(),
        encrypted: true,
        data: vault.seal("objects", key, b"{}").unwrap(),
        at: clock.now(),
    };
    let transaction = Transaction::new().put(key, record);
    tokio.block_on(store.commit(transaction)).unwrap();
    tokio.block_on(store.close()).unwrap();
}

#[test]
fn systemd_hands_the_agent_its_key_as_a_credential() {
    let machine = Booted::new();
    let root = &machine.root;
    let _runtime = Runtime::new(root);
    machine.install(&Packages::get().current());
    root.write(
        CONFIG,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
         containerRuntimeEndpoint: unix:///srv/cri.sock\ncgroupsPerQOS: false\n",
    );
    root.write(
        "/etc/default/holdfast",
        "HOLDFAST_FLAGS=--hostname-override=node-1\n",
    );
    let (made, source) = (
        "/var/lib/holdfast/keys/secrets.key",
        "/etc/holdfast/secrets.key",
    );
    machine.run(&["systemctl", "start", "holdfast"]);
    assert!(root.path(made).exists(), "{}", machine.journal());
    machine.run(&["systemctl", "stop", "holdfast"]);

    // As the documents say; and a secret is on record.
    machine.run(&["mv", made, source]);
    record_a_secret(&root.path(STATE), &root.path(source));
    let drop_in = "/etc/systemd/system/holdfast.service.d/key.conf";
    let restart = |text: Option<&str>| {
        match text {
            Some(text) => root.write(drop_in, text),
            None => fs::remove_file(root.path(drop_in)).unwrap(),
        }
        machine.run(&["systemctl", "daemon-reload"]);
        attempt(&mut machine.inside(&["systemctl", "restart", "holdfast"]))
    };
    let loaded = "[Service]\nLoadCredential=holdfast.secrets-key:/etc/holdfast/secrets.key\n";
    let unreadable = |wanted: &str| {
        let line = format!("\nholdfast_secrets_unreadable_records {wanted}\n");
        eventually(&line, || {
            let asked = "exec 3<>/dev/tcp/127.0.0.1/10248; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3";
            let (_, said) = attempt(&mut machine.inside(&["bash", "-c", asked]));
            match said.contains(&line) {
                true => Ok(()),
                false => Err(machine.journal()),
            }
        });
    };
    let (started, said) = restart(Some(loaded));
    assert!(started, "{said}{}", machine.journal());
    let agent = machine.property("MainPID");
    let environment = machine.run(&["cat", &format!("/proc/{agent}/environ")]);
    let directory = environment
        .split('\0')
        .find_map(|line| line.strip_prefix("CREDENTIALS_DIRECTORY="))
        .unwrap_or_else(|| panic!("{environment:?}"));
    assert_eq!(
        machine.run(&["cat", &format!("{directory}/holdfast.secrets-key")]),
        root.read(source)
    );
    assert_eq!(
        machine.run(&["readlink", &format!("/proc/{agent}/ns/mnt")]),
        machine.run(&["readlink", "/proc/1/ns/mnt"]),
        "its mounts are still the host's"
    );
    unreadable("0");
    assert!(!root.path(made).exists(), "no other key is made");
    let list = ["holdfast", "keys", "list", "--secrets-key-file", source];
    let said = machine.run(&list);
    assert!(said.contains("store in"), "the secret is on record: {said}");

    // After a rotation a restart encrypts the record with the new key, for which it had to read it with the old one.
    machine.run(&["holdfast", "keys", "rotate", "--secrets-key-file", source]);
    machine.run(&["systemctl", "restart", "holdfast"]);
    eventually("the record is encrypted anew", || {
        let journal = machine.journal();
        let done = journal.contains("encrypted recorded secrets with the active key");
        if done { Ok(()) } else { Err(journal) }
    });
    unreadable("0");
    machine.run(&["systemctl", "restart", "holdfast"]);
    unreadable("0");

    // Bound to the machine.
    let sealed = "/etc/holdfast/secrets.key.cred";
    machine.run(&[
        "systemd-creds",
        "encrypt",
        "--with-key=host",
        "--name=holdfast.secrets-key",
        source,
        sealed,
    ]);
    let keys = root.read(source);
    let key = keys.lines().last().expect("a key");
    assert!(!root.read(sealed).contains(key), "it is readable");
    let (started, said) = restart(Some(&format!(
        "[Service]\nLoadCredentialEncrypted=holdfast.secrets-key:{sealed}\n"
    )));
    assert!(started, "{said}{}", machine.journal());
    unreadable("0");
    assert!(!root.path(made).exists(), "no other key is made");

    // Without the credential: another key is made, and it is told what is missing and what to do.
    let (started, said) = restart(None);
    assert!(started, "{said}{}", machine.journal());
    unreadable("1");
    assert!(root.path(made).exists());
    eventually("it is told what is missing", || {
        let journal = machine.journal();
        let told = journal.contains("LoadCredential=holdfast.secrets-key:FILE");
        if told { Ok(()) } else { Err(journal) }
    });
    let (started, _) = restart(Some(loaded));
    assert!(started);
    unreadable("0");

    // The file that is named is missing: the agent does not start without it, and starts by itself when it is back.
    machine.run(&["mv", source, "/root/elsewhere"]);
    let (started, said) = attempt(&mut machine.inside(&["systemctl", "restart", "holdfast"]));
    assert!(!started, "{said}");
    eventually("it is told why", || {
        let journal = machine.journal();
        let told = journal.contains("CREDENTIALS");
        if told { Ok(()) } else { Err(journal) }
    });
    machine.run(&["mv", "/root/elsewhere", source]);
    eventually("the agent starts", || {
        match machine.property("ActiveState").as_str() {
            "active" => Ok(()),
            other => Err(format!("{other}: {}", machine.journal())),
        }
    });
    unreadable("0");
}

//! A node that is not as the authors of an agent picture it: names that are no UTF-8, files that come late or change, an odd umask.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, umask};

use super::*;

/// A mount whose point has a byte that no UTF-8 text has.
struct OddMount(PathBuf);

impl OddMount {
    fn new(dir: &Path) -> Self {
        let point = dir.join(OsStr::from_bytes(b"caf\xe9 mount"));
        fs::create_dir(&point).unwrap();
        let none: Option<&str> = None;
        mount(Some("odd"), &point, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        Self(point)
    }
}

impl Drop for OddMount {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).ok();
    }
}

/// Waits until an event of the pod has all these words.
pub(crate) fn wait_event(node: &Node, pod: &str, words: &[&str]) {
    eventually(&format!("an event of {pod} says {words:?}"), || {
        let journal = node.site.journal(pod);
        let says = |(what, why): &(String, String)| {
            let text = format!("{what} {why}");
            words.iter().all(|word| text.contains(word))
        };
        let found = journal.iter().any(says);
        found.then_some(()).ok_or_else(|| format!("{journal:?}"))
    });
}

/// The servers that the pod's newest sandbox resolves with.
fn servers(node: &Node, pod: &str) -> Vec<String> {
    let full = format!("{pod}-{}", agent_process::NODE);
    let sandboxes = node.fake.sandboxes();
    let of_pod = |s: &&v1::PodSandbox| s.metadata.as_ref().is_some_and(|m| m.name == full);
    let newest = sandboxes.iter().filter(of_pod).max_by_key(|s| s.created_at);
    let config = node.fake.sandbox_config(&newest.unwrap().id).unwrap();
    config.dns_config.unwrap().servers
}

#[test]
fn what_the_node_lacks_at_boot_keeps_only_those_waiting_that_need_it() {
    umask(Mode::from_bits_truncate(0o077));
    let node = Node::new(|_| Behaviour::RunForever);
    let site = &node.site;
    let _mount = OddMount::new(site.dir());
    let resolver = site.dir().join("resolv.conf");
    let disk = site.dir().join("late-disk");
    symlink(&disk, site.pod_logs()).unwrap();
    // With cgroups, for which the table of mounts is read.
    site.configure(&format!("resolvConf: {}\n", resolver.display()));
    node.manifest("web", "Always");
    let mut agent = site.spawn(&[]);
    agent.wait_ready();
    wait_event(&node, "web", &["FailedCreatePodSandBox", "podlogs"]);
    assert_eq!(node.running(), [""; 0]);

    fs::create_dir(&disk).unwrap();
    let missing = ["FailedCreatePodSandBox", "resolv.conf", "No such file"];
    wait_event(&node, "web", &missing);
    assert_eq!(node.running(), [""; 0]);

    fs::write(&resolver, b"# caf\xe9\nnameserver 192.0.2.1\n").unwrap();
    let running = node.wait_running(1);
    assert_eq!(servers(&node, "web"), ["192.0.2.1"]);

    // The newest file counts for new sandboxes, and changes nothing for those that run.
    fs::write(&resolver, b"nameserver 192.0.2.2\n").unwrap();
    node.manifest("later", "Always");
    let both = node.wait_running(2);
    assert!(both.contains(&running[0]), "{running:?} {both:?}");
    assert_eq!(servers(&node, "later"), ["192.0.2.2"]);
    assert_eq!(servers(&node, "web"), ["192.0.2.1"]);

    // Nor does a container need it that starts again in its sandbox.
    fs::remove_file(&resolver).unwrap();
    assert!(node.fake.exit(&running[0], 1));
    eventually("it has started again", || {
        let now = node.running();
        let is_back = now.len() == 2 && !now.contains(&running[0]);
        is_back.then_some(()).ok_or_else(|| format!("{now:?}"))
    });
    assert_eq!(servers(&node, "web"), ["192.0.2.1"]);

    // Other programs read logs and links, whatever the umask of whoever has started the agent.
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&site.container_logs()), 0o755);
    for dir in fs::read_dir(&disk).unwrap().flatten() {
        assert_eq!(mode(&dir.path()), 0o755, "{:?}", dir.path());
    }
}

#[test]
fn a_directory_below_the_root_directory_that_cannot_be_made_keeps_only_those_waiting_that_need_it()
{
    let node = Node::new(|_| Behaviour::RunForever);
    let site = &node.site;
    let root = site.root_dir();
    fs::create_dir_all(&root).unwrap();
    let disk = site.dir().join("late-disk");
    symlink(&disk, root.join("pods")).unwrap();
    // Files where directories belong.
    for name in ["plugins_registry", "device-plugins", "pod-resources"] {
        fs::write(root.join(name), "").unwrap();
    }
    node.manifest("web", "Always");
    let mut agent = site.spawn(&[]);
    agent.wait_ready();
    wait_event(&node, "web", &["FailedToMakePodDataDirectories"]);
    assert_eq!(node.running(), [""; 0]);
    let log = site.logs();
    assert!(log.contains("cannot make a directory"), "{log}");

    fs::create_dir(&disk).unwrap();
    node.wait_running(1);
    for name in ["plugins_registry", "device-plugins", "pod-resources"] {
        fs::remove_file(root.join(name)).unwrap();
    }
    eventually("the sockets are served", || {
        let dirs = ["device-plugins", "pod-resources"];
        let missing: Vec<_> = (dirs.iter())
            .map(|dir| root.join(dir).join("kubelet.sock"))
            .filter(|socket| !socket.exists())
            .collect();
        let all = missing.is_empty() && root.join("plugins_registry").is_dir();
        all.then_some(()).ok_or_else(|| format!("{missing:?}"))
    });
}

#[test]
fn a_kubeconfig_that_is_missing_keeps_no_pod_of_a_node_in_use_from_starting() {
    let node = Node::new(|_| Behaviour::RunForever);
    let site = &node.site;
    let kubeconfig = site.dir().join("kubeconfig");
    let flags = [
        format!("--kubeconfig={}", kubeconfig.display()),
        "--enable-server=false".to_owned(),
    ];
    let flags = flags.each_ref().map(String::as_str);
    node.manifest("web", "Always");
    let agent = site.start();
    let before = node.wait_running(1);
    site.wait_phase("web", "Running");
    agent.kill9();

    node.manifest("later", "Always");
    let agent = site.start_with(&flags);
    let both = node.wait_running(2);
    assert!(both.contains(&before[0]), "{before:?} {both:?}");
    let path = kubeconfig.display().to_string();
    eventually("the log names the file", || {
        let log = agent.log();
        let says = |line: &str| line.contains("no API server yet") && line.contains(&path);
        log.lines().any(says).then_some(()).ok_or(log)
    });
}

#[test]
fn cgroup_v1_notifies_of_memory_thresholds_if_that_is_configured() {
    let node = Node::new(|_| Behaviour::RunForever);
    let site = &node.site;
    let is_v1 = Path::new("/sys/fs/cgroup/memory/cgroup.event_control").exists();
    for is_on in [false, true] {
        // With cgroups, of which all pods together have a threshold of their own.
        site.configure(&format!("kernelMemcgNotification: {is_on}\n"));
        let mut agent = site.spawn(&[]);
        agent.wait_ready();
        let armed = || {
            let log = agent.log();
            let signals = [
                "memory.available<100Mi",
                "allocatableMemory.available<100Mi",
            ];
            let is_armed = |line: &str, signal: &str| {
                line.contains("the kernel notifies of a memory threshold") && line.contains(signal)
            };
            let found = signals
                .iter()
                .filter(|signal| log.lines().any(|line| is_armed(line, signal)));
            (found.count(), log)
        };
        if is_on && is_v1 {
            eventually("the kernel has both thresholds", || match armed() {
                (2, _) => Ok(()),
                (_, log) => Err(log),
            });
        }
        let (count, log) = armed();
        assert!(is_on || count == 0, "{log}");
        assert!(!log.contains("does not notify"), "{log}");
        agent.terminate();
    }
}

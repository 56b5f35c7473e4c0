//! The disk of a directory is not mounted when the agent starts.

use std::path::PathBuf;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::*;

/// A directory that is mounted at another place while it is "plugged in".
struct Disk {
    from: PathBuf,
    point: PathBuf,
}

impl Disk {
    fn at(point: PathBuf) -> Self {
        let from = point.with_extension("disk");
        fs::create_dir_all(&from).unwrap();
        fs::create_dir_all(&point).unwrap();
        let disk = Self { from, point };
        disk.mount();
        disk
    }

    fn mount(&self) {
        let (none, from) = (None::<&str>, Some(&self.from));
        mount(from, &self.point, none, MsFlags::MS_BIND, none).unwrap();
    }

    fn unmount(&self) {
        umount2(&self.point, MntFlags::MNT_DETACH).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        umount2(&self.point, MntFlags::MNT_DETACH).ok();
    }
}

fn entries(path: &std::path::Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

fn waits(agent: &Agent, directory: &str) {
    eventually("the agent says what it waits for", || {
        let (log, remedy) = (agent.log(), format!("store new-disk {directory}"));
        log.contains(&remedy).then_some(()).ok_or(log)
    });
}

// Invariant STORE-9.
/// At two starts, and for as long as it takes.
#[test]
fn a_late_disk_is_waited_for_and_nothing_is_forgotten() {
    let node = Node::new(|_| Behaviour::RunForever);
    let (root, state) = (node.site.root_dir(), node.site.state_dir());
    let disks = [
        ("root-dir", Disk::at(root)),
        ("state-dir", Disk::at(state.clone())),
    ];
    node.manifest("a", "Never");
    let mut agent = node.site.start();
    let running = node.wait_running(1);
    node.site.wait_phase("a", "Running");
    for (name, disk) in &disks {
        agent.kill9();
        disk.unmount();
        node.fake.clear_calls();
        for _ in 0..2 {
            let waiting = node.site.spawn(&[]);
            waits(&waiting, name);
            waiting.kill9();
        }
        assert_eq!(entries(&disk.point), 0, "{name}: nothing is made below it");
        agent = node.site.spawn(&[]);
        waits(&agent, name);
        disk.mount();
        agent.wait_ready();
        node.site.wait_phase("a", "Running");
        assert_eq!(node.running(), running, "{name}: {}", agent.log());
        assert_eq!(node.starts(), Vec::<String>::new(), "{name}");
        let meta = node.site.dump(&["meta"]);
        let epoch = &meta["tables"]["meta"][0]["epoch"];
        assert_eq!(epoch["number"], 1, "{name}: {meta}");
        assert_eq!(entries(&state.join("quarantine")), 0, "{name}");
    }
    agent.kill9();
}

#[test]
fn manifests_on_a_late_disk_are_not_gone_and_a_disk_that_is_gone_can_be_given_up() {
    let node = Node::new(|_| Behaviour::RunForever);
    let disk = Disk::at(node.site.manifests());
    node.manifest("a", "Always");
    let agent = node.site.start();
    let running = node.wait_running(1);
    node.site.wait_phase("a", "Running");
    agent.kill9();
    disk.unmount();
    let agent = node.site.start();
    waits(&agent, "manifests");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(node.running(), running, "{}", agent.log());
    let output = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["store", "new-disk", "manifests", "--state-dir"])
        .arg(node.site.state_dir())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    agent.signal(Signal::SIGHUP);
    node.wait_running(0);
    agent.kill9();
}

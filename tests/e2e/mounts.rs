//! What mounts are in a container: parts of volumes, read-only ones, propagation.

use std::fs;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::agent_process::NODE;
use crate::seen::{Feature, container, deleted, event, logs, phase, said, soon, status};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("sub-path", sub_path),
    ("sub-path-expr", sub_path_expr),
    ("sub-path-escape", sub_path_escape),
    ("mounts", mounts),
    ("recursive-read-only", recursive_read_only),
    ("propagation", propagation),
];

/// A directory of the node whose mounts are shared with those who ask for it.
pub struct Shared(PathBuf);

impl Shared {
    pub fn new(starts: &Path) -> Self {
        let dir = starts.join("shared");
        fs::create_dir_all(&dir).expect("a directory");
        let none = None::<&str>;
        mount(Some(&dir), &dir, none, MsFlags::MS_BIND, none).expect("bind it");
        mount(none, &dir, none, MsFlags::MS_SHARED, none).expect("share it");
        Self(dir)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let gone = umount2(&self.0, MntFlags::MNT_DETACH);
        if let Err(error) = gone {
            eprintln!("unmount {}: {error}", self.0.display());
        }
    }
}

fn sub_path(world: &World) {
    phase(world, "sub-path", "Succeeded");
    let whole = "html=index conf=conf linked=index labels=app=\"parts\"";
    let parts = [whole, "made=777", "the link is read-only", "and again"];
    said(world, "sub-path", "main", &parts);
    let ended = world.status("sub-path").expect("a status");
    assert_eq!(container(&ended, "main")["restartCount"], 1, "{ended}");
    let table = || {
        String::from_utf8_lossy(&fs::read("/proc/self/mountinfo").expect("the mount table"))
            .into_owned()
    };
    let uid = world.row("pods", "sub-path").expect("a pod")["uid"].clone();
    let place = format!("/{}/volume-subpaths/", uid.as_str().expect("a UID"));
    deleted(world, "sub-path");
    soon("nothing of it is mounted any more", || {
        let left: Vec<String> = table()
            .lines()
            .filter(|line| line.contains(&place))
            .map(str::to_owned)
            .collect();
        left.is_empty()
            .then_some(())
            .ok_or_else(|| format!("{left:?}"))
    });
}

fn sub_path_expr(world: &World) {
    let name = format!("sub-path-expr-{NODE}");
    let mark = world.starts().join(&name).join("logs/mark");
    soon("the container writes into its part", || {
        let text = fs::read_to_string(&mark).map_err(|e| e.to_string())?;
        (text == format!("from {name}\n")).then_some(()).ok_or(text)
    });
    let waiting = status(world, "sub-path-expr", "waits for a variable", |s| {
        container(s, "nobody")["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    });
    let message = &container(&waiting, "nobody")["state"]["waiting"]["message"];
    assert!(
        message.to_string().contains("missing value for NOBODY"),
        "{waiting}"
    );
    event(world, "sub-path-expr", "Failed", "missing value for NOBODY");
}

fn sub_path_escape(world: &World) {
    for name in ["absolute", "relative"] {
        let waiting = status(world, "sub-path-escape", "does not follow the link", |s| {
            container(s, name)["state"]["waiting"]["reason"] == "CreateContainerConfigError"
        });
        let message = container(&waiting, name)["state"]["waiting"]["message"].to_string();
        let want = "failed to prepare subPath for volumeMount";
        assert!(
            message.contains(want) && message.contains("leads out"),
            "{message}"
        );
        event(
            world,
            "sub-path-escape",
            "Failed",
            &format!("of container \"{name}\": it leads out"),
        );
        assert_eq!(logs(world, "sub-path-escape", name), Vec::<String>::new());
    }
    deleted(world, "sub-path-escape");
}

fn mounts(world: &World) {
    let parts = [
        "again=twice",
        "inner=tmpfs outer=",
        "again is read-only",
        "the file is read-only",
        "hosts=# Kubernetes-managed hosts file.",
        "a part is made",
        "the runtime makes a hostPath without a type",
    ];
    said(world, "mounts", "main", &parts);
}

fn recursive_read_only(world: &World) {
    said(
        world,
        "recursive-read-only",
        "if-possible",
        &["it is read-only"],
    );
    let waiting = status(world, "recursive-read-only", "needs another runtime", |s| {
        container(s, "enabled")["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    });
    let message = &container(&waiting, "enabled")["state"]["waiting"]["message"];
    let want = "requested recursive read-only mode, but it is not supported by the runtime";
    assert!(message.to_string().contains(want), "{waiting}");
    let mount = &container(&waiting, "if-possible")["volumeMounts"][0];
    assert_eq!(mount["recursiveReadOnly"], "Disabled", "{waiting}");
    assert_eq!(
        logs(world, "recursive-read-only", "enabled"),
        Vec::<String>::new()
    );
}

fn propagation(world: &World) {
    let shared = world.starts().join("shared");
    status(world, "propagation", "runs", |s| {
        let running = |name| container(s, name)["state"]["running"].is_object();
        ["both", "from-host", "none"].into_iter().all(running)
    });
    soon("the container's mount appears on the node", || {
        let mark = shared.join("from-pod/mark");
        mark.exists()
            .then_some(())
            .ok_or_else(|| "no mark".to_owned())
    });
    let disk = shared.join("from-host");
    fs::create_dir_all(&disk).expect("a directory");
    let none = None::<&str>;
    mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), none).expect("mount a tmpfs");
    fs::write(disk.join("mark"), "").expect("a mark");
    said(world, "propagation", "from-host", &["seen"]);
    said(world, "propagation", "none", &["not seen"]);
    deleted(world, "propagation");
    assert!(
        disk.join("mark").exists(),
        "what the node has mounted stays"
    );
}

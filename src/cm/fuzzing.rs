//! Fuzz target of cgroup names.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use super::name::{CgroupDriver, CgroupName};

/// Names the cgroup of a pod below a root, and reads the names of children. The first line is the root, the second the
/// pod's UID, the third a directory in it.
///
/// Asserts that no name leaves its root, and that the pod is found by the name of its directory.
pub(crate) fn cgroup_names(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let mut lines = text.lines();
    let root = CgroupName::parse(lines.next().unwrap_or_default());
    let (uid, entry) = (
        lines.next().unwrap_or_default(),
        lines.next().unwrap_or_default(),
    );
    for driver in [CgroupDriver::Cgroupfs, CgroupDriver::Systemd] {
        root.pod_of_child(entry, driver);
    }
    assert!(
        !root
            .cgroupfs()
            .split('/')
            .any(|part| part == ".." || part == ".")
    );
    assert_eq!(CgroupName::parse(&root.cgroupfs()), root);
    // UIDs of pods are checked before they name anything.
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if uid.is_empty() || !uid.chars().all(plain) {
        return;
    }
    let child = root.child(&format!("pod{uid}"));
    assert_eq!(child.parent().unwrap_or(CgroupName::parse("/")), root);
    for (path, driver) in [
        (child.cgroupfs(), CgroupDriver::Cgroupfs),
        (child.systemd(), CgroupDriver::Systemd),
    ] {
        let name = path.rsplit('/').next().unwrap();
        let found = root.pod_of_child(name, driver).unwrap();
        assert_eq!(found.as_str(), uid);
    }
}

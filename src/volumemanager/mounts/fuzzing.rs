//! Fuzz target of the mount table.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::os::unix::ffi::OsStrExt as _;

use super::*;

/// More mounts show nothing new.
const MOUNTS: usize = 64;

/// Reads a mount table, and asks it about the point of its first and of its last mount.
///
/// Asserts that each mount reads back as it was written, and that every answer ends and is about the path that was
/// asked for, whatever the table says about parents and peers.
pub(crate) fn mountinfo(data: &[u8]) {
    let mut mounts = parse(data);
    for mount in &mounts {
        assert_eq!(parse(&line(mount)), std::slice::from_ref(mount));
    }
    mounts.truncate(MOUNTS);
    let table = Table::of(mounts.clone());
    for mount in mounts.first().into_iter().chain(mounts.last()) {
        let path = &mount.point;
        let stack = table.stack(path);
        assert!(stack.len() <= mounts.len());
        for pair in stack.windows(2) {
            assert_eq!(pair[0].id, pair[1].parent);
        }
        assert!(stack.iter().all(|m| m.point == *path && table.is_seen(m)));
        assert!(
            table
                .holding(path.clone())
                .all(|m| m.point.starts_with(path))
        );
        if let Some(holder) = table.holder(path) {
            assert!(path.starts_with(&holder.point));
        }
        if table.alone(path).is_ok() {
            assert!(stack.len() < 2);
        }
    }
    assert_eq!(table.into_all(), mounts);
}

/// The mount as the kernel writes it.
fn line(mount: &Mount) -> Vec<u8> {
    let mut line = Vec::new();
    let mut put = |prefix: &str, text: &[u8]| {
        line.extend_from_slice(prefix.as_bytes());
        for byte in text {
            match byte {
                b' ' | b'\t' | b'\n' | b'\\' => line.extend(format!("\\{byte:03o}").bytes()),
                byte => line.push(*byte),
            }
        }
    };
    put("", mount.id.as_bytes());
    put(" ", mount.parent.as_bytes());
    put(" ", mount.device.as_bytes());
    put(" ", mount.root.as_os_str().as_bytes());
    put(" ", mount.point.as_os_str().as_bytes());
    put(if mount.read_only { " ro" } else { " rw" }, b"");
    for (name, peers) in [(" shared:", &mount.shared), (" master:", &mount.master)] {
        if let Some(peers) = peers {
            put(name, peers.as_bytes());
        }
    }
    put(" - ", mount.fstype.as_bytes());
    put(" ", mount.source.as_bytes());
    put(" rw", b"");
    line
}

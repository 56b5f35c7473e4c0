//! Finds the names in a directory at which a file system is mounted. The device number does not say: on an overlay over several
//! file systems, files have other numbers than their directory.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};
use rustix::path::Arg;

/// Returns whether something is mounted at `name` in `dir`, with a single system call; `None` if the kernel does not say (before
/// 5.8) or there is nothing. Contacts no server.
pub fn is_mount_root(dir: impl AsFd, name: impl Arg) -> Option<bool> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let seen = statx(dir, name, flags, StatxFlags::empty()).ok()?;
    let says = seen
        .stx_attributes_mask
        .contains(StatxAttributes::MOUNT_ROOT);
    says.then(|| seen.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

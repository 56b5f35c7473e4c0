//! Who may use a volume: `fsGroup` of a pod becomes the group of its volumes; upstream's
//! `SetVolumeOwnership`.
//!
//! Everything gets the group and, by [`Access`], what a group needs; directories get setgid, so that what
//! is made in them later belongs to the group as well. Nobody loses a permission.
//!
//! **Invariant:** a link is given itself, never what it leads to, and nothing that is mounted below the
//! volume is touched: every file is opened by its name in the directory that holds it, without following
//! links, and changed through that handle.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::{Gid, fchownat};

use super::mounts;
use crate::types::PodExt;

const SETGID: u32 = 0o2000;
const EXECUTE: u32 = 0o110;
const PERMISSIONS: u32 = 0o7777;

/// What containers may do with a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    ReadWrite,
    ReadOnly,
}

impl Access {
    fn mode(self, is_dir: bool) -> u32 {
        let files = match self {
            Self::ReadWrite => 0o660,
            Self::ReadOnly => 0o440,
        };
        if is_dir { files | EXECUTE } else { files }
    }
}

/// `fsGroupChangePolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChangePolicy {
    Always,
    /// Not when the volume's root directory is as it should be.
    OnRootMismatch,
}

impl ChangePolicy {
    /// The policy of a pod.
    pub(super) fn of(pod: &Pod) -> Self {
        let context = pod.spec_ref().security_context.as_ref();
        match context.and_then(|c| c.fs_group_change_policy.as_deref()) {
            Some("OnRootMismatch") => Self::OnRootMismatch,
            _ => Self::Always,
        }
    }
}

/// Gives a directory, and all in it on the same mount, to a group. Blocking.
///
/// # Errors
/// When the file system refuses; part of it may be done.
pub(super) fn give(dir: &Path, group: u32, access: Access, policy: ChangePolicy) -> io::Result<()> {
    let root = open_root(dir)?;
    let seen = fstat(&root)?;
    if policy == ChangePolicy::OnRootMismatch && is_given(&seen, group, access) {
        return Ok(());
    }
    let canonical = fs::canonicalize(dir)?;
    let walk = Walk {
        group,
        access,
        device: seen.st_dev,
        mounts: mounts::below(dir)?
            .into_iter()
            .map(|m| m.point)
            .filter(|point| *point != canonical)
            .collect(),
    };
    walk.inside(root.as_fd(), &canonical)?;
    // Last, as its state is what OnRootMismatch goes by.
    change(&root, &seen, group, access)
}

/// Gives one directory to a group, and nothing in it. Blocking.
///
/// # Errors
/// When the file system refuses.
pub(super) fn give_one(dir: &Path, group: u32, access: Access) -> io::Result<()> {
    let root = open_root(dir)?;
    let seen = fstat(&root)?;
    if is_given(&seen, group, access) {
        return Ok(());
    }
    change(&root, &seen, group, access)
}

fn open_root(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(open(dir, flags, Mode::empty())?)
}

fn is_given(seen: &FileStat, group: u32, access: Access) -> bool {
    let wanted = access.mode(true) | SETGID;
    seen.st_gid == group && seen.st_mode & wanted == wanted
}

struct Walk {
    group: u32,
    access: Access,
    device: u64,
    /// What is mounted below the volume.
    mounts: BTreeSet<PathBuf>,
}

impl Walk {
    /// Everything in a directory. `path` is where it was found, only to tell mounts.
    fn inside(&self, dir: std::os::fd::BorrowedFd<'_>, path: &Path) -> io::Result<()> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut entries = Dir::openat(dir, c".", flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in entries.iter() {
            let name = entry?.file_name().to_owned();
            if name.as_c_str() != c"." && name.as_c_str() != c".." {
                names.push(name);
            }
        }
        for name in names {
            self.entry(dir, &name, path)?;
        }
        Ok(())
    }

    fn entry(
        &self,
        dir: std::os::fd::BorrowedFd<'_>,
        name: &CStr,
        parent: &Path,
    ) -> io::Result<()> {
        let path = parent.join(OsStr::from_bytes(name.to_bytes()));
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match openat(dir, name, flags, Mode::empty()) {
            // Removed since the directory was read.
            Err(nix::errno::Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        let seen = fstat(&file)?;
        if seen.st_dev != self.device || self.mounts.contains(&path) {
            return Ok(());
        }
        if kind(&seen) == SFlag::S_IFDIR {
            self.inside(file.as_fd(), &path)?;
        }
        change(&file, &seen, self.group, self.access)
    }
}

fn kind(seen: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(seen.st_mode) & SFlag::S_IFMT
}

/// Changes what a handle of [`OFlag::O_PATH`] stands for.
fn change(file: &OwnedFd, seen: &FileStat, group: u32, access: Access) -> io::Result<()> {
    if seen.st_gid != group {
        let group = Some(Gid::from_raw(group));
        fchownat(file, c"", None, group, AtFlags::AT_EMPTY_PATH)?;
    }
    let kind = kind(seen);
    if kind == SFlag::S_IFLNK {
        return Ok(());
    }
    let is_dir = kind == SFlag::S_IFDIR;
    let own = seen.st_mode & PERMISSIONS;
    let setgid = if is_dir { SETGID } else { 0 };
    let wanted = own | access.mode(is_dir) | setgid;
    // A change of the group takes setuid and setgid from files.
    if wanted == own && seen.st_gid == group {
        return Ok(());
    }
    let handle = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::set_permissions(handle, fs::Permissions::from_mode(wanted))
}

#[cfg(test)]
#[path = "ownership_tests.rs"]
mod tests;

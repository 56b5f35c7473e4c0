//! Gives a pod's volumes to its `fsGroup`; upstream's `SetVolumeOwnership`.
//!
//! Everything gets the group and, by [`Access`], what a group needs; directories get setgid, so that what
//! is made in them later belongs to the group as well. Nobody loses a permission.
//!
//! What the file system refuses to change stays as it is, as upstream: servers that map root to nobody, immutable files. The
//! containers may have access all the same.
//!
//! **Invariant:** a link is given itself, never what it leads to, and nothing that is mounted below the
//! volume is touched: every file is opened by its name in the directory that holds it, without following
//! links, and changed through that handle.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use k8s_openapi::api::core::v1::Pod;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::{Gid, fchownat};

use super::mounts;
use crate::types::PodExt;
use crate::types::mount_root::is_mount_root;

const SETGID: u32 = 0o2000;
const EXECUTE: u32 = 0o110;
const PERMISSIONS: u32 = 0o7777;

/// Access of containers to a volume.
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
/// When the file system fails; part of it may be done.
pub(super) fn give(dir: &Path, group: u32, access: Access, policy: ChangePolicy) -> io::Result<()> {
    let counts = Counts::default();
    give_counting(dir, group, access, policy, &counts)?;
    counts.tell(dir, group);
    Ok(())
}

/// Progress so far. Others may read it meanwhile.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Files and directories looked at.
    pub(super) seen: AtomicU64,
    /// Those that were not as they should be, and are now.
    pub(super) changed: AtomicU64,
    /// Those that the file system refused to change.
    pub(super) refused: AtomicU64,
    /// The cause of the first refusal.
    pub(super) reason: OnceLock<io::Error>,
}

impl Counts {
    /// Counts the outcome of a change.
    ///
    /// # Errors
    /// When it failed for another reason than that the file system refuses.
    fn count(&self, outcome: io::Result<()>) -> io::Result<()> {
        match outcome {
            Ok(()) => {
                self.changed.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Err(error) if is_refusal(&error) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                self.reason.get_or_init(|| error);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Logs what was refused, where no event says so.
    fn tell(&self, dir: &Path, group: u32) {
        if let Some((refused, error)) = self.refusals() {
            tracing::warn!(
                path = %dir.display(),
                group,
                refused,
                %error,
                "the file system refuses to give files of a volume to the pod's fsGroup"
            );
        }
    }

    /// Returns how many changes were refused, and why the first one was; `None` for none.
    pub(super) fn refusals(&self) -> Option<(u64, &io::Error)> {
        let refused = self.refused.load(Ordering::Relaxed);
        self.reason.get().map(|reason| (refused, reason))
    }
}

/// Returns whether a file system does not permit the group or mode of a file to change, rather than fail.
fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(
            Errno::EPERM
                | Errno::EACCES
                | Errno::EROFS
                | Errno::EOPNOTSUPP
                | Errno::EINVAL
                | Errno::ENOSYS
                | Errno::EDQUOT
        )
    )
}

/// As [`give`]. What is as it should be costs one look and is not written.
///
/// # Errors
/// As [`give`].
pub(super) fn give_counting(
    dir: &Path,
    group: u32,
    access: Access,
    policy: ChangePolicy,
    counts: &Counts,
) -> io::Result<()> {
    let root = open_root(dir)?;
    let seen = fstat(&root)?;
    if policy == ChangePolicy::OnRootMismatch && is_given(&seen, group, access) {
        return Ok(());
    }
    let canonical = fs::canonicalize(dir)?;
    let mounts = mounts::below(dir)?.into_iter();
    let walk = Walk {
        group,
        access,
        device: seen.st_dev,
        mounts: mounts
            .filter_map(|m| Some(m.point.strip_prefix(&canonical).ok()?.to_owned()))
            .filter(|point| !point.as_os_str().is_empty())
            .collect(),
        counts,
    };
    walk.all(&root)?;
    // Last, as its state is what OnRootMismatch goes by.
    counts.seen.fetch_add(1, Ordering::Relaxed);
    walk.settle(&root, &seen)
}

/// Gives one directory to a group, and nothing in it. Blocking.
///
/// # Errors
/// When the file system fails.
pub(super) fn give_one(dir: &Path, group: u32, access: Access) -> io::Result<()> {
    let root = open_root(dir)?;
    let seen = fstat(&root)?;
    if is_given(&seen, group, access) {
        return Ok(());
    }
    let counts = Counts::default();
    counts.count(change(&root, &seen, group, access))?;
    counts.tell(dir, group);
    Ok(())
}

fn open_root(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(open(dir, flags, Mode::empty())?)
}

fn is_given(seen: &FileStat, group: u32, access: Access) -> bool {
    let wanted = access.mode(true) | SETGID;
    seen.st_gid == group && seen.st_mode & wanted == wanted
}

struct Walk<'a> {
    group: u32,
    access: Access,
    device: u64,
    /// Mount points below the volume, relative to it.
    mounts: BTreeSet<PathBuf>,
    counts: &'a Counts,
}

impl Walk<'_> {
    /// Everything below the root, however deep: directories that are left are kept by name, not open.
    fn all(&self, root: &OwnedFd) -> io::Result<()> {
        let mut left = vec![PathBuf::new()];
        while let Some(path) = left.pop() {
            if let Some(dir) = descend(root, &path)? {
                self.inside(&dir, &path, &mut left)?;
            }
        }
        Ok(())
    }

    /// Everything in a directory; the directories among it are added to those that are left.
    fn inside(&self, dir: &OwnedFd, path: &Path, left: &mut Vec<PathBuf>) -> io::Result<()> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut entries = Dir::openat(dir, c".", flags, Mode::empty())?;
        for entry in entries.iter() {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.entry(dir, name, path, left)?;
        }
        Ok(())
    }

    fn entry(
        &self,
        dir: &OwnedFd,
        name: &CStr,
        parent: &Path,
        left: &mut Vec<PathBuf>,
    ) -> io::Result<()> {
        let seen = match fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            // Removed since the directory was read.
            Err(Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        let path = || parent.join(OsStr::from_bytes(name.to_bytes()));
        let is_mount = !self.mounts.is_empty() && self.mounts.contains(&path());
        let is_other = || seen.st_dev != self.device && is_mount_root(dir, name).unwrap_or(true);
        if is_mount || is_other() {
            return Ok(());
        }
        let device = seen.st_dev;
        self.counts.seen.fetch_add(1, Ordering::Relaxed);
        if kind(&seen) == SFlag::S_IFDIR {
            left.push(path());
        }
        if is_settled(&seen, self.group, self.access) {
            return Ok(());
        }
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match openat(dir, name, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        // It may be another one by now.
        let seen = fstat(&file)?;
        match seen.st_dev == device {
            true => self.settle(&file, &seen),
            false => Ok(()),
        }
    }

    fn settle(&self, file: &OwnedFd, seen: &FileStat) -> io::Result<()> {
        if is_settled(seen, self.group, self.access) {
            return Ok(());
        }
        let outcome = change(file, seen, self.group, self.access);
        self.counts.count(outcome)
    }
}

/// Opens a directory below the root; `None` when it is gone, no directory any more, or on another mount.
fn descend(root: &OwnedFd, path: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    if path.as_os_str().is_empty() {
        return Ok(Some(root.try_clone()?));
    }
    let how = OpenHow::new().flags(flags).resolve(
        ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_XDEV,
    );
    let opened = loop {
        match openat2(root, path, how) {
            // Something was renamed in the meantime.
            Err(Errno::EAGAIN) => {}
            // Kernels before 5.6.
            Err(Errno::ENOSYS) => break step_by_step(root, path, flags),
            other => break other,
        }
    };
    match opened {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV) => Ok(None),
        Err(error) => Err(io::Error::new(
            io::Error::from(error).kind(),
            format!("open directory {} in it: {error}", path.display()),
        )),
    }
}

fn step_by_step(root: &OwnedFd, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    let mut components = path.components();
    let first = components.next().ok_or(Errno::ENOENT)?;
    let mut dir = openat(root, first.as_os_str(), flags, Mode::empty())?;
    for component in components {
        dir = openat(&dir, component.as_os_str(), flags, Mode::empty())?;
    }
    Ok(dir)
}

/// Returns whether nothing has to change.
fn is_settled(seen: &FileStat, group: u32, access: Access) -> bool {
    seen.st_gid == group && (kind(seen) == SFlag::S_IFLNK || wanted(seen, access) == own(seen))
}

fn own(seen: &FileStat) -> u32 {
    seen.st_mode & PERMISSIONS
}

/// The mode it is to have.
fn wanted(seen: &FileStat, access: Access) -> u32 {
    let is_dir = kind(seen) == SFlag::S_IFDIR;
    let setgid = if is_dir { SETGID } else { 0 };
    own(seen) | access.mode(is_dir) | setgid
}

fn kind(seen: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(seen.st_mode) & SFlag::S_IFMT
}

/// Changes what a handle of [`OFlag::O_PATH`] stands for. The mode is changed also where the group cannot be.
fn change(file: &OwnedFd, seen: &FileStat, group: u32, access: Access) -> io::Result<()> {
    let is_of_group = seen.st_gid == group;
    let mut given = Ok(());
    if !is_of_group {
        let group = Some(Gid::from_raw(group));
        given = fchownat(file, c"", None, group, AtFlags::AT_EMPTY_PATH).map_err(io::Error::from);
    }
    let wanted = wanted(seen, access);
    // A change of the group takes setuid and setgid from files.
    if kind(seen) == SFlag::S_IFLNK || (wanted == own(seen) && is_of_group) {
        return given;
    }
    let handle = format!("/proc/self/fd/{}", file.as_raw_fd());
    let changed = fs::set_permissions(handle, fs::Permissions::from_mode(wanted));
    match (given, changed) {
        // A refusal must not hide a failure.
        (Err(refused), Err(failed)) if is_refusal(&refused) => Err(failed),
        (given, changed) => given.and(changed),
    }
}

#[cfg(test)]
#[path = "ownership_tests.rs"]
mod tests;

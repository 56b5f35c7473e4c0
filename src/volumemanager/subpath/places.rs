//! Paths of subPath mounts, and their removal.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};

use super::dir_of;
use super::lookup::{Lookup, Trouble, io, kind, open_part};
use crate::types::PodUid;
use crate::volumemanager::mounts::{self, Table};

/// A place is `<volume>/<container>/<index>` below the pod's directory of places.
const DEPTH: usize = 3;

/// Binds a part of the volume at `root` to `target`. Blocking.
pub(super) fn prepare(
    root: &Path,
    path: &str,
    target: &Path,
    lookup: Lookup,
) -> Result<(), Trouble> {
    let part = open_part(root, Path::new(path), lookup)?;
    let seen = fstat(&part)?;
    let parent = target.parent().unwrap_or(target);
    let mut new = fs::DirBuilder::new();
    let made = new.recursive(true).mode(0o750).create(parent);
    made.map_err(io("make a directory for it"))?;
    // The parent is the agent's own, the target itself may lead to storage that does not answer.
    let parent = fs::canonicalize(parent).map_err(io("make a directory for it"))?;
    let target = parent.join(target.file_name().unwrap_or_default());
    let mounted = mounts::at(&target).map_err(io("read the mount table"))?;
    if mounted.is_some() {
        match is_same(&target, &seen) {
            Ok(true) => return Ok(()),
            Ok(false) => unmount(&target, "unmount what was there")?,
            // The volume may be mounted anew since; what is bound here is not.
            Err(error) if is_gone(error) => {
                tracing::info!(place = %target.display(), %error, "the storage behind a part of a volume is gone, binding it anew");
                unmount_gone(&target)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    make_target(&target, &seen).map_err(io("make a place for it"))?;
    let source = format!("/proc/self/fd/{}", part.as_raw_fd());
    mount(
        Some(source.as_str()),
        &target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .map_err(|error| Trouble::Io("mount it", error.into()))?;
    if is_same(&target, &seen)? {
        return Ok(());
    }
    unmount(&target, "unmount what was mounted instead of it")?;
    Err(Trouble::Races)
}

/// Returns whether an error shows that the storage behind a mount is gone: a server that has forgotten the file, a daemon of FUSE
/// that has ended, a disk that was removed. Upstream: `prepareSubpathTarget`.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(
        error,
        Errno::ESTALE
            | Errno::ENOTCONN
            | Errno::ENOENT
            | Errno::EIO
            | Errno::ENODEV
            | Errno::ENXIO
            | Errno::EHOSTDOWN
            | Errno::EACCES
    )
}

/// Unmounts a part whose storage is gone, also while somebody uses it: no use of it does anything any more.
pub(super) fn unmount_gone(target: &Path) -> Result<(), Trouble> {
    let verb = "unmount what was there";
    match mounts::unmount_own(target) {
        Ok(_) => Ok(()),
        // The kernel's; what somebody else has mounted over it or in it stays.
        Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {
            let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
            umount2(target, flags).map_err(|error| Trouble::Io(verb, error.into()))
        }
        Err(error) => Err(Trouble::Io(verb, error)),
    }
}

/// Returns whether the file at a path, seen through the mount there, is this one.
fn is_same(target: &Path, wanted: &FileStat) -> Result<bool, Errno> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let seen = fstat(&open(target, flags, Mode::empty())?)?;
    Ok((seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino))
}

/// A directory or an empty file for what is to be mounted. Only an empty one is replaced.
fn make_target(target: &Path, part: &FileStat) -> io::Result<()> {
    let is_dir = kind(part) == SFlag::S_IFDIR;
    match fs::symlink_metadata(target) {
        Ok(seen) if is_dir && seen.is_dir() => return Ok(()),
        Ok(seen) if !is_dir && seen.is_file() => return Ok(()),
        Ok(seen) if seen.is_dir() => fs::remove_dir(target)?,
        Ok(_) => remove_empty_file(target)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if is_dir {
        return fs::DirBuilder::new().mode(0o750).create(target);
    }
    let mut new = fs::OpenOptions::new();
    new.write(true).create_new(true).mode(0o640);
    new.open(target).map(drop)
}

fn remove_empty_file(path: &Path) -> io::Result<()> {
    let seen = fs::symlink_metadata(path)?;
    if !seen.is_file() || seen.len() != 0 {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "something that the agent did not make is in its place; remove it",
        ));
    }
    fs::remove_file(path)
}

/// Unmounts what the agent has bound at the places of a pod, and returns how many there were. All are tried. What
/// somebody else has mounted there, over a place or inside of it, stays, and keeps it.
fn unmount_places(dir: &Path) -> io::Result<usize> {
    let table = Table::read()?;
    let is_place = |point: &Path| {
        let rest = point.strip_prefix(dir);
        rest.is_ok_and(|rest| rest.components().count() == DEPTH)
    };
    let places: BTreeSet<&Path> = (table.below(dir)?)
        .map(|m| m.point.as_path())
        .filter(|point| is_place(point))
        .collect();
    let (mut count, mut failed) = (0, None);
    for place in places {
        match mounts::unmount_own(place) {
            Ok(was) => {
                count += usize::from(was);
                fail::fail_point!("volumemanager::subpath::unmounted");
            }
            Err(error) => {
                let text = format!("{}: {error}", place.display());
                failed.get_or_insert(io::Error::new(error.kind(), text));
            }
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    match mounts::below(dir)?.first() {
        Some(left) => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!("{} is mounted; unmount it first", left.point.display()),
        )),
        None => Ok(count),
    }
}

/// Unmounts the mount at a place. The error has no paths that only operators may know.
fn unmount(target: &Path, verb: &'static str) -> Result<(), Trouble> {
    match mounts::unmount_own(target) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            tracing::warn!(place = %target.display(), %error, "a part of a volume cannot be replaced");
            let text = "something else is mounted there, or somebody uses it";
            Err(Trouble::Io(verb, io::Error::new(error.kind(), text)))
        }
        Err(error) => Err(Trouble::Io(verb, error)),
    }
}

/// Unmounts all parts of volumes that are bound for a pod and removes their empty places. Returns how many mounts
/// there were. Blocking.
///
/// # Errors
/// When something cannot be unmounted, somebody has mounted something there, or a place is not empty; nothing that
/// has content is removed.
pub fn clean(root: &Path, uid: &PodUid) -> io::Result<usize> {
    let place = dir_of(root, uid);
    let (Some(pod), Some(name)) = (place.parent(), place.file_name()) else {
        return Ok(0);
    };
    let dir = match fs::canonicalize(pod) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        other => other?.join(name),
    };
    let device = match fs::symlink_metadata(&dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Ok(seen) if seen.is_dir() => seen.dev(),
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::NotADirectory,
                "something else is in place of the directory; remove it",
            ));
        }
        Err(error) => return Err(error),
    };
    let count = unmount_places(&dir)?;
    remove_places(&dir, device, DEPTH)?;
    Ok(count)
}

/// Removes a directory of places, volumes and containers deep; empty ones only.
fn remove_places(dir: &Path, device: u64, depth: usize) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        let seen = entry.metadata()?;
        if !seen.is_dir() {
            remove_empty_file(&path)?;
        } else if seen.dev() != device {
            return Err(io::Error::new(
                io::ErrorKind::CrossesDevices,
                "a file system is still mounted there",
            ));
        } else if depth > 1 {
            remove_places(&path, device, depth - 1)?;
        } else {
            fs::remove_dir(&path)?;
        }
    }
    fs::remove_dir(dir)
}

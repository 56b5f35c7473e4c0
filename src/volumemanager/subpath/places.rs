//! Where parts of volumes are bound to, and how they go.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};

use super::dir_of;
use super::lookup::{Lookup, Trouble, io, kind, open_part};
use crate::types::PodUid;
use crate::volumemanager::mounts;

/// Mounts on top of each other at one place that are undone.
const STACKED: usize = 64;

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
        if is_same(&target, &seen)? {
            return Ok(());
        }
        unmount_all(&target).map_err(io("unmount what was there"))?;
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
    unmount_all(&target).map_err(io("unmount what was mounted instead of it"))?;
    Err(Trouble::Races)
}

/// Whether the file at a path, seen through what is mounted there, is this one.
fn is_same(target: &Path, wanted: &FileStat) -> Result<bool, Trouble> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let seen = match open(target, flags, Mode::empty()) {
        Ok(file) => fstat(&file)?,
        // A server that has forgotten it: mount it anew.
        Err(Errno::ESTALE) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
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

/// Unmounts what is mounted at places at a path or below it, and returns how many there were. Storage that is
/// mounted elsewhere as well stays mounted there.
fn unmount_all(at: &Path) -> io::Result<usize> {
    let mut count = 0;
    for _ in 0..STACKED {
        let points: Vec<PathBuf> = mounts::below(at)?.into_iter().map(|m| m.point).collect();
        if points.is_empty() {
            return Ok(count);
        }
        // What lies inside of a place is named by whoever writes there: no path may lead through it.
        let is_place = |point: &&PathBuf| {
            let inside = |of: &PathBuf| point.starts_with(of) && *point != of;
            !points.iter().any(inside)
        };
        for point in points.iter().filter(is_place) {
            unmount(point)?;
            count += 1;
        }
    }
    Err(io::Error::new(
        io::ErrorKind::ResourceBusy,
        "mounts come back as often as they are unmounted",
    ))
}

fn unmount(point: &Path) -> io::Result<()> {
    match umount2(point, MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => return Ok(()),
        Err(Errno::EBUSY) => {}
        Err(error) => return Err(error.into()),
    }
    // Mounts have appeared inside, by propagation. They go along, and are cut off from their peers first, so that
    // nothing is unmounted where they came from.
    let none = None::<&str>;
    let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
    mount(none, point, none, private, none)?;
    umount2(point, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH)?;
    Ok(())
}

/// Unmounts all parts of volumes that are mounted for a pod and removes their empty places. Returns how many mounts
/// there were. Blocking.
///
/// # Errors
/// When something cannot be unmounted, or a place is not empty; nothing that has content is removed.
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
    let count = unmount_all(&dir)?;
    remove_places(&dir, device, 3)?;
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

//! Measures the disk usage of a file or directory.
//!
//! In: a path, and a [`Stop`] by which somebody else ends the walk. Out: what was counted, and why that is not all.
//!
//! **Invariant:** the walk follows no link and enters no mount: every directory is opened by its name in the one that
//! holds it. No depth is too deep for it. It holds `OPEN` open files and a few more, and `HELD` bytes.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};

use crate::types::beneath;
use crate::types::mount_root::is_mount_root;

/// Bytes of a block as `st_blocks` counts them.
const BLOCK: u64 = 512;
/// Number of directories on the way down that stay open. From deeper ones the walk returns by `..`.
const OPEN: usize = 64;
/// Bytes that may be taken by the names of directories that are yet to be measured, and by the hard links that were counted.
const HELD: usize = 64 << 20;
/// Approximate cost of a directory on the way down, in bytes of `HELD`.
const LEVEL: usize = 128;
/// Cost of a hard link, in bytes of `HELD`.
const LINK: usize = 32;

/// Disk usage of a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files and directories, itself included.
    pub inodes: u64,
}

/// Result of a walk.
#[derive(Debug, Default)]
pub struct Measured {
    /// All there is, or a part of it when something was missed.
    pub usage: DiskUsage,
    /// The first reason why it is a part only.
    pub missed: Option<Missed>,
}

/// Reason why something was not counted.
#[derive(Debug, thiserror::Error)]
pub enum Missed {
    /// The file system refuses. No container brings that about: a device or the agent itself is in trouble.
    #[error("the file system cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The walk was ended from outside.
    #[error("it does not end in time")]
    Stopped,
    /// More would have to be remembered than there is room for.
    #[error("it has too many directories or hard links")]
    TooMuch,
    /// A directory far down was moved to where the way back is not known.
    #[error("its directories are moved meanwhile")]
    Moved,
}

impl From<Errno> for Missed {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

impl Missed {
    /// Returns whether containers can cause it.
    pub fn is_of_the_pod(&self) -> bool {
        !matches!(self, Self::Io(_))
    }
}

/// Ends a walk that goes on elsewhere, at its next step.
#[derive(Debug, Default)]
pub struct Stop(AtomicBool);

impl Stop {
    /// Ends the walks that look at it.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether walks must end.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Measures a directory with all below it, or a file, on its own mount alone. A file with several names counts once; what
/// vanishes meanwhile counts nothing, and so does a path that is not there. Blocks for as long as the walk takes.
pub fn measure(path: &Path, stop: &Stop) -> Measured {
    measure_within(path, stop, HELD)
}

fn measure_within(path: &Path, stop: &Stop, limit: usize) -> Measured {
    let mut walk = Walk {
        stop,
        limit,
        held: 0,
        device: 0,
        links: HashSet::new(),
        found: Measured::default(),
    };
    if let Err(missed) = walk.all(path) {
        walk.miss(missed);
    }
    walk.found
}

struct Walk<'a> {
    stop: &'a Stop,
    limit: usize,
    held: usize,
    device: u64,
    /// Files with several names that were counted.
    links: HashSet<(u64, u64)>,
    found: Measured,
}

/// The directory that the walk is in.
struct Level {
    dir: OwnedFd,
    id: (u64, u64),
    /// Directories in it that are yet to be measured.
    left: Vec<CString>,
}

/// A directory that the walk comes back to.
struct Above {
    /// `None` far down.
    dir: Option<OwnedFd>,
    id: (u64, u64),
    left: Vec<CString>,
}

impl Walk<'_> {
    fn all(&mut self, path: &Path) -> Result<(), Missed> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let top = match open(path, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        let seen = fstat(&top)?;
        self.device = seen.st_dev;
        if !is_dir(&seen) {
            self.count(&seen);
            return Ok(());
        }
        let top = openat(&top, c".", readable(), Mode::empty())?;
        let mut level = self.level(top)?;
        let mut above = Vec::new();
        loop {
            if self.stop.is_set() {
                return Err(Missed::Stopped);
            }
            let Some(name) = level.left.pop() else {
                match self.back(&level, &mut above) {
                    Some(next) => level = next,
                    None => return Ok(()),
                }
                continue;
            };
            self.release(cost(&name));
            let Some(below) = self.enter(&level.dir, &name)? else {
                continue;
            };
            if below.left.is_empty() {
                continue;
            }
            if !self.hold(LEVEL) {
                self.forget(&below.left);
                continue;
            }
            let Level { dir, id, left } = std::mem::replace(&mut level, below);
            let dir = (above.len() < OPEN).then_some(dir);
            above.push(Above { dir, id, left });
        }
    }

    /// Counts a directory below and the files in it. `None` when there is nothing to enter.
    fn enter(&mut self, parent: &OwnedFd, name: &CStr) -> Result<Option<Level>, Missed> {
        let error = match beneath::enter(parent.as_fd(), name) {
            Ok(dir) => match self.level(dir) {
                Err(Missed::Stopped) => return Err(Missed::Stopped),
                Err(missed) => {
                    self.miss(missed);
                    return Ok(None);
                }
                Ok(level) => return Ok(Some(level)),
            },
            Err(error) => error,
        };
        match error.kind() {
            // Gone by now, or somebody else's.
            io::ErrorKind::NotFound | io::ErrorKind::CrossesDevices => {}
            io::ErrorKind::NotADirectory => self.file(parent, name),
            _ => self.miss(Missed::Io(error)),
        }
        Ok(None)
    }

    fn level(&mut self, dir: OwnedFd) -> Result<Level, Missed> {
        let seen = fstat(&dir)?;
        self.count(&seen);
        let mut left = Vec::new();
        match self.list(&dir, &mut left) {
            Err(Missed::Stopped) => return Err(Missed::Stopped),
            Err(missed) => self.miss(missed),
            Ok(()) => {}
        }
        let id = id(&seen);
        Ok(Level { dir, id, left })
    }

    /// Counts the files in a directory; the directories among them are left.
    fn list(&mut self, dir: &OwnedFd, left: &mut Vec<CString>) -> Result<(), Missed> {
        let mut entries = Dir::from_fd(dir.try_clone()?)?;
        for entry in entries.iter() {
            if self.stop.is_set() {
                return Err(Missed::Stopped);
            }
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            match entry.file_type() {
                // Some file systems do not tell: it is tried.
                Some(Type::Directory) | None => {
                    if self.hold(cost(name)) {
                        left.push(name.to_owned());
                    }
                }
                Some(_) => self.file(dir, name),
            }
        }
        Ok(())
    }

    fn file(&mut self, dir: &OwnedFd, name: &CStr) {
        let seen = match fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(seen) => seen,
            Err(Errno::ENOENT) => return,
            Err(error) => return self.miss(error.into()),
        };
        let is_other = || seen.st_dev != self.device && is_mount_root(dir, name).unwrap_or(true);
        if is_dir(&seen) || is_other() {
            return;
        }
        if seen.st_nlink > 1 {
            if self.links.contains(&(seen.st_dev, seen.st_ino)) || !self.hold(LINK) {
                return;
            }
            self.links.insert((seen.st_dev, seen.st_ino));
        }
        self.count(&seen);
    }

    /// Goes back to the nearest directory above with a way to it.
    fn back(&mut self, below: &Level, above: &mut Vec<Above>) -> Option<Level> {
        while let Some(Above { dir, id, left }) = above.pop() {
            self.release(LEVEL);
            let dir = match dir {
                Some(dir) => Ok(dir),
                None => up(&below.dir, id),
            };
            match dir {
                Ok(dir) => return Some(Level { dir, id, left }),
                Err(missed) => {
                    self.miss(missed);
                    self.forget(&left);
                }
            }
        }
        None
    }

    fn count(&mut self, seen: &FileStat) {
        let usage = &mut self.found.usage;
        let blocks = u64::try_from(seen.st_blocks).unwrap_or(0);
        usage.bytes = usage.bytes.saturating_add(blocks.saturating_mul(BLOCK));
        usage.inodes = usage.inodes.saturating_add(1);
    }

    fn miss(&mut self, missed: Missed) {
        self.found.missed.get_or_insert(missed);
    }

    /// Reserves bytes of the walk's memory. Returns whether they fit; if not, the result is marked incomplete.
    fn hold(&mut self, bytes: usize) -> bool {
        let fits = self.held.saturating_add(bytes) <= self.limit;
        if fits {
            self.held += bytes;
        } else {
            self.miss(Missed::TooMuch);
        }
        fits
    }

    fn release(&mut self, bytes: usize) {
        self.held = self.held.saturating_sub(bytes);
    }

    fn forget(&mut self, names: &[CString]) {
        self.release(names.iter().map(|name| cost(name)).sum());
    }
}

/// Opens the parent of a directory, if it is the expected one.
fn up(dir: &OwnedFd, expected: (u64, u64)) -> Result<OwnedFd, Missed> {
    let parent = openat(dir, c"..", readable(), Mode::empty())?;
    match id(&fstat(&parent)?) == expected {
        true => Ok(parent),
        false => Err(Missed::Moved),
    }
}

fn readable() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC
}

fn id(seen: &FileStat) -> (u64, u64) {
    (seen.st_dev, seen.st_ino)
}

fn is_dir(seen: &FileStat) -> bool {
    SFlag::from_bits_truncate(seen.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR
}

/// Returns the memory that a name takes, with the overhead of its allocation.
fn cost(name: &CStr) -> usize {
    name.count_bytes() + 48
}

#[cfg(test)]
#[path = "usage_tests.rs"]
mod tests;

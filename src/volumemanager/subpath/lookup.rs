//! Looking up a part of a volume, and making it where it is missing, without ever leaving the volume.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, mkdirat};

/// Tries when a lookup says that something was renamed meanwhile.
const RACES: usize = 64;
/// Most links of one lookup, as the kernel has it.
const MAX_LINKS: usize = 40;
/// Most directories that a lookup by hand keeps open.
const MAX_DEPTH: usize = 256;
const SETGID: u32 = 0o2000;
/// Permissions, set-user-ID, set-group-ID and sticky bit.
const MODE_BITS: u32 = 0o7777;

/// Method of name lookups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// By the kernel, below the volume's root; by hand where it cannot.
    Kernel,
    /// By hand.
    #[cfg(test)]
    Hand,
}

/// Error of a lookup, without paths of the node.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("the volume cannot be opened: {0}")]
    Volume(Errno),
    #[error("it leads out of the volume, which a link in it may not")]
    Escapes,
    #[error("it changed again and again while it was looked at")]
    Races,
    #[error("a part of it is a file or a link that leads nowhere")]
    NotADirectory,
    #[error("it does not exist and cannot be made: {0}")]
    Make(Errno),
    #[error("{0}: {1}")]
    Io(&'static str, io::Error),
}

impl From<Errno> for Trouble {
    fn from(error: Errno) -> Self {
        match error {
            Errno::EXDEV => Self::Escapes,
            Errno::EAGAIN => Self::Races,
            Errno::ENOTDIR | Errno::ELOOP => Self::NotADirectory,
            other => Self::Io("look it up", other.into()),
        }
    }
}

pub(super) fn io(verb: &'static str) -> impl FnOnce(io::Error) -> Trouble {
    move |error| Trouble::Io(verb, error)
}

/// Opens a part below the root of its volume, and makes it first when it is not there.
pub(super) fn open_part(root: &Path, path: &Path, lookup: Lookup) -> Result<OwnedFd, Trouble> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let root = open(root, flags, Mode::empty()).map_err(Trouble::Volume)?;
    let names = names(path);
    for _ in 0..RACES {
        if let Some(found) = find(root.as_fd(), &names, lookup)? {
            return Ok(found);
        }
        match make(root.as_fd(), &names, lookup) {
            // Removed again meanwhile, or a link took its place.
            Err(Trouble::Races) => {}
            other => return other,
        }
    }
    Err(Trouble::Races)
}

/// Opens a file or directory below the root of its volume as a handle without access to its content (`O_PATH`).
/// Returns `None` when it does not exist.
///
/// # Errors
/// The text for users, for a path that leads out of the volume or cannot be looked up.
pub(in crate::volumemanager) fn open_existing(
    root: &Path,
    path: &Path,
) -> Result<Option<OwnedFd>, String> {
    let open_root = || open(root, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty());
    let found = open_root()
        .map_err(Trouble::Volume)
        .and_then(|root| find(root.as_fd(), &names(path), Lookup::Kernel));
    found.map_err(|trouble| trouble.to_string())
}

/// The names in a path, without `.` and the like.
fn names(path: &Path) -> Vec<&OsStr> {
    path.components()
        .filter_map(|c| match c {
            Component::Normal(name) => Some(name),
            _ => None,
        })
        .collect()
}

/// Returns the file with these names; `None` if there is none.
fn find(
    root: BorrowedFd<'_>,
    names: &[&OsStr],
    lookup: Lookup,
) -> Result<Option<OwnedFd>, Trouble> {
    let path: PathBuf = if names.is_empty() {
        PathBuf::from(".")
    } else {
        names.iter().collect()
    };
    let by_kernel = match lookup {
        Lookup::Kernel => beneath(root, &path),
        #[cfg(test)]
        Lookup::Hand => Err(Errno::ENOSYS),
    };
    match by_kernel {
        Ok(found) => Ok(Some(found)),
        Err(Errno::ENOENT) => Ok(None),
        // A link with an absolute target may still lead to the volume itself; and some filters know no openat2.
        Err(Errno::EXDEV | Errno::ELOOP | Errno::ENOSYS | Errno::EPERM | Errno::E2BIG) => {
            by_hand(root, &path)
        }
        Err(other) => Err(other.into()),
    }
}

fn beneath(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    for _ in 0..RACES {
        match openat2(root, path, how) {
            // Something was renamed somewhere meanwhile.
            Err(Errno::EAGAIN) => {}
            other => return other,
        }
    }
    Err(Errno::EAGAIN)
}

/// Opens name by name and resolves each link itself. An absolute link leads into the volume if its target begins with the
/// path of the volume. It asks the node about no other path: a container cannot find out what exists there.
fn by_hand(root: BorrowedFd<'_>, path: &Path) -> Result<Option<OwnedFd>, Trouble> {
    let base = fs::read_link(format!("/proc/self/fd/{}", root.as_raw_fd()))
        .map_err(io("find the path of the volume"))?;
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut at = openat(root, ".", flags, Mode::empty())?;
    // What `..` leads back to.
    let mut above: Vec<OwnedFd> = Vec::new();
    let mut left = Steps::default();
    left.put(path)?;
    let mut links = 0;
    while let Some(name) = left.0.pop() {
        if name == ".." {
            at = above.pop().ok_or(Trouble::Escapes)?;
            continue;
        }
        let found = match openat(&at, name.as_os_str(), flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            other => other?,
        };
        if kind(&fstat(&found)?) != SFlag::S_IFLNK {
            if above.len() == MAX_DEPTH {
                return Err(Errno::ENAMETOOLONG.into());
            }
            above.push(std::mem::replace(&mut at, found));
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Trouble::NotADirectory);
        }
        let target = PathBuf::from(readlinkat(&found, "")?);
        if target.is_absolute() {
            left.put(target.strip_prefix(&base).map_err(|_| Trouble::Escapes)?)?;
            at = openat(root, ".", flags, Mode::empty())?;
            above.clear();
        } else {
            left.put(&target)?;
        }
    }
    Ok(Some(at))
}

/// Steps of a lookup that are left, the next one last: a name, or `..` for the directory above.
#[derive(Debug, Default)]
struct Steps(Vec<OsString>);

impl Steps {
    /// Puts a relative path before all others.
    fn put(&mut self, path: &Path) -> Result<(), Trouble> {
        for part in path.components().rev() {
            match part {
                Component::Normal(_) | Component::ParentDir => {
                    self.0.push(part.as_os_str().to_owned());
                }
                Component::CurDir => {}
                Component::RootDir | Component::Prefix(_) => return Err(Trouble::Escapes),
            }
        }
        Ok(())
    }
}

/// Makes the directories that are missing; upstream's `SafeMakeDir`. They get all mode bits of the volume's root
/// (permissions, set-user-ID, set-group-ID, sticky), whatever the umask, and its group where that is inherited:
/// members of an fsGroup may use them, and may not remove each other's files where the root forbids it.
fn make(root: BorrowedFd<'_>, names: &[&OsStr], lookup: Lookup) -> Result<OwnedFd, Trouble> {
    let seen = fstat(root)?;
    let mode = seen.st_mode & MODE_BITS;
    let mut missing = names.len();
    let mut at = loop {
        missing = missing.checked_sub(1).ok_or(Trouble::Races)?;
        if let Some(found) = find(root, &names[..missing], lookup)? {
            break found;
        }
    };
    for name in &names[missing..] {
        let made = match mkdirat(&at, *name, Mode::from_bits_truncate(0o750)) {
            Ok(()) => true,
            Err(Errno::EEXIST) => false,
            Err(Errno::ENOENT) => return Err(Trouble::Races),
            Err(Errno::ENOTDIR) => return Err(Trouble::NotADirectory),
            Err(error) => return Err(Trouble::Make(error)),
        };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let child = match openat(&at, *name, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Err(Trouble::Races),
            other => other?,
        };
        if made {
            if mode & SETGID != 0 {
                let group = nix::unistd::Gid::from_raw(seen.st_gid);
                nix::unistd::fchown(&child, None, Some(group)).map_err(Trouble::Make)?;
            }
            let mode = Mode::from_bits_truncate(mode);
            nix::sys::stat::fchmod(&child, mode).map_err(Trouble::Make)?;
        }
        at = child;
    }
    Ok(at)
}

pub(super) fn kind(seen: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(seen.st_mode) & SFlag::S_IFMT
}

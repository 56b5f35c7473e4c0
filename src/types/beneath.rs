//! Opening a directory by its name in another one, so that nobody can lead the agent elsewhere in between.

use std::ffi::CStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{Mode, fstat};

/// Opens a directory in another one, on the same mount (a bind mount of the same file system is another one). What is
/// mounted on the name is not asked. Blocking.
///
/// # Errors
/// `NotADirectory` for anything else, a link included; `CrossesDevices` for a mount; `NotFound`, or what the file system says.
pub fn enter(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let how = OpenHow::new().flags(flags).resolve(
        ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_XDEV
            | ResolveFlag::RESOLVE_NO_SYMLINKS,
    );
    match openat2(parent, name, how) {
        Ok(opened) => Ok(opened),
        Err(Errno::EXDEV) => Err(crosses()),
        Err(Errno::ENOTDIR | Errno::ELOOP) => Err(not_a_directory()),
        // Kernels before 5.6, and sandboxes that do not know the call: device numbers have to do.
        Err(Errno::ENOSYS | Errno::EPERM) => {
            let opened = match openat(parent, name, flags, Mode::empty()) {
                Err(Errno::ENOTDIR | Errno::ELOOP) => return Err(not_a_directory()),
                other => other?,
            };
            if fstat(&opened)?.st_dev == fstat(parent)?.st_dev {
                Ok(opened)
            } else {
                Err(crosses())
            }
        }
        Err(error) => Err(error.into()),
    }
}

fn crosses() -> io::Error {
    let text = "it lies on another file system; unmount it first";
    io::Error::new(io::ErrorKind::CrossesDevices, text)
}

fn not_a_directory() -> io::Error {
    io::Error::new(io::ErrorKind::NotADirectory, "it is not a directory")
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_a_directory_of_that_name_is_entered() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("sub", dir.path().join("link")).unwrap();
        let parent = File::open(dir.path()).unwrap();
        let entered = |name: &CStr| enter(parent.as_fd(), name).map_err(|e| e.kind());
        assert!(entered(c"sub").is_ok());
        for (name, kind) in [
            (c"file", io::ErrorKind::NotADirectory),
            (c"link", io::ErrorKind::NotADirectory),
            (c"none", io::ErrorKind::NotFound),
        ] {
            assert_eq!(entered(name).unwrap_err(), kind, "{name:?}");
        }
    }
}

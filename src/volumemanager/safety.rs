//! Removal of directories that stays where it was sent.
//!
//! **Invariant:** nothing is removed through a mount or a link: every directory is opened by its name in the one that
//! holds it, and the kernel is told not to cross into another mount (a bind mount of the same file system
//! included). Something mounted below is found in the mount table before anything is removed.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::mounts;
use crate::types::beneath::enter;

/// Directories deeper than this are moved up first: each level costs an open file and a stack frame.
const DEPTH: usize = 64;
/// Names taken from a directory at a time.
const BATCH: usize = 4096;

/// Removes a directory with all it holds; nothing to do when it is not there. Refuses when it is a link, when
/// anything is mounted at or below it, or when it lies on another mount than its parent. Links inside are
/// removed, not followed. Blocking.
///
/// # Errors
/// As said, or when the file system refuses; part of it may be gone then.
pub(super) fn remove_tree(dir: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
        let text = "it is not a directory in another one";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    };
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let parent = match open(parent, flags, Mode::empty()) {
        Err(Errno::ENOENT) => return Ok(()),
        other => other?,
    };
    if let Some(mount) = mounts::below(dir)?.first() {
        return Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!("{} is mounted; unmount it first", mount.point.display()),
        ));
    }
    let name = CString::new(name.as_bytes())?;
    let opened = match enter(parent.as_fd(), &name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut removal = Removal {
        root: opened.try_clone()?,
        moved: 0,
    };
    removal
        .empty(opened, 0)
        .map_err(|(inside, e)| io::Error::new(e.kind(), format!("{inside}: {e}")))?;
    match unlinkat(&parent, name.as_c_str(), UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes an empty directory; nothing to do when it is not there or holds something. Blocking.
///
/// # Errors
/// When the file system refuses for another reason.
pub(super) fn remove_empty(dir: &Path) -> io::Result<()> {
    match fs::remove_dir(dir) {
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// An error with the name of what it is about.
type Inside = (String, io::Error);

struct Removal {
    /// The directory that is removed.
    root: OwnedFd,
    /// Directories that were moved up into it.
    moved: u64,
}

impl Removal {
    fn empty(&mut self, dir: OwnedFd, depth: usize) -> Result<(), Inside> {
        let here = |e: io::Error| (".".to_owned(), e);
        loop {
            let copy = dir.try_clone().map_err(here)?;
            let batch = names(copy).map_err(here)?;
            if batch.is_empty() {
                return Ok(());
            }
            for (name, kind) in batch {
                self.remove(dir.as_fd(), &name, kind, depth)
                    .map_err(|(inside, e)| within(&name, &inside, e))?;
            }
        }
    }

    fn remove(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        kind: Option<Type>,
        depth: usize,
    ) -> Result<(), Inside> {
        let here = |e: io::Error| (String::new(), e);
        if kind != Some(Type::Directory) {
            match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => return Ok(()),
                // A directory after all.
                Err(Errno::EISDIR) => {}
                Err(Errno::EPERM) if kind.is_none() => {}
                Err(error) => return Err(here(error.into())),
            }
        }
        let below = match enter(dir, name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(here)?,
        };
        fail::fail_point!("volumemanager::remove_tree::entered");
        if depth >= DEPTH {
            drop(below);
            return self.move_up(dir, name).map_err(here);
        }
        self.empty(below, depth + 1)?;
        match unlinkat(dir, name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(error) => Err(here(error.into())),
        }
    }

    /// Moves a directory to where its removal begins anew.
    fn move_up(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        loop {
            self.moved += 1;
            let new = CString::new(format!(".removed-{}", self.moved))?;
            match renameat(dir, name, self.root.as_fd(), new.as_c_str()) {
                Err(Errno::EEXIST | Errno::ENOTEMPTY | Errno::ENOTDIR) => {}
                other => return Ok(other?),
            }
        }
    }
}

fn within(name: &CStr, inside: &str, error: io::Error) -> Inside {
    let name = Path::new(OsStr::from_bytes(name.to_bytes())).display();
    match inside {
        "" | "." => (name.to_string(), error),
        _ => (format!("{name}/{inside}"), error),
    }
}

/// Names in a directory, some of them when there are many.
fn names(dir: OwnedFd) -> io::Result<Vec<(CString, Option<Type>)>> {
    let mut dir = Dir::from_fd(dir)?;
    let mut found = Vec::new();
    // The position is shared with the handle this one is a copy of; the iterator begins anew when it ends.
    for entry in dir.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            found.push((name.to_owned(), entry.file_type()));
        }
        if found.len() == BATCH {
            break;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_takes_links_but_not_what_they_lead_to() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("keep"), "").unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("a/b")).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists() && outside.join("keep").exists());
        remove_tree(&tree).unwrap();
        std::os::unix::fs::symlink(&outside, &tree).unwrap();
        assert!(remove_tree(&tree).is_err(), "a link in place of the tree");
        assert!(outside.join("keep").exists());
    }

    #[test]
    fn deep_and_wide_trees_go_whole() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        let mut deep = tree.clone();
        for n in 0..300 {
            deep.push(format!("d{n}"));
        }
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("file"), "x").unwrap();
        // In the way of what is moved up.
        fs::create_dir(tree.join(".removed-1")).unwrap();
        fs::write(tree.join(".removed-1/file"), "x").unwrap();
        fs::write(tree.join(".removed-2"), "x").unwrap();
        let wide = tree.join("wide");
        fs::create_dir(&wide).unwrap();
        for n in 0..=BATCH {
            fs::write(wide.join(n.to_string()), "").unwrap();
        }
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
    }

    #[test]
    fn nothing_is_removed_when_something_is_mounted_below() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        use nix::mount::{MntFlags, MsFlags, mount, umount2};
        let dir = tempfile::tempdir().unwrap();
        let (tree, outside) = (dir.path().join("tree"), dir.path().join("outside"));
        let point = tree.join("a/point");
        fs::create_dir_all(&point).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("precious"), "x").unwrap();
        fs::write(tree.join("a/file"), "x").unwrap();
        let none: Option<&str> = None;
        // The same file system: device numbers do not tell.
        mount(Some(&outside), &point, none, MsFlags::MS_BIND, none).unwrap();
        let refused = remove_tree(&tree);
        let parent = fs::File::open(tree.join("a")).unwrap();
        let entered = enter(parent.as_fd(), c"point");
        umount2(&point, MntFlags::MNT_DETACH).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        // Had the mount table not told, the kernel would have.
        assert_eq!(entered.unwrap_err().kind(), io::ErrorKind::CrossesDevices);
        assert!(tree.join("a/file").exists() && outside.join("precious").exists());
        remove_tree(&tree).unwrap();
        assert!(!tree.exists() && outside.join("precious").exists());
    }
}

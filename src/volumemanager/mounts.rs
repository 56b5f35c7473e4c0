//! What is mounted, and removal of directories that stays on one file system.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// Where.
    pub(super) point: PathBuf,
    /// File system type.
    pub(super) fstype: String,
}

/// All mounts of this mount namespace.
pub(super) fn list() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read("/proc/self/mountinfo")?))
}

fn parse(table: &[u8]) -> Vec<Mount> {
    table
        .split(|b| *b == b'\n')
        .filter_map(|line| {
            let mut fields = line.split(|b| *b == b' ');
            let point = unescape(fields.nth(4)?);
            let fstype = fields.skip_while(|f| *f != b"-").nth(1)?;
            Some(Mount {
                point: PathBuf::from(OsString::from_vec(point)),
                fstype: String::from_utf8_lossy(fstype).into_owned(),
            })
        })
        .collect()
}

/// Spaces, tabs, line feeds and backslashes are written as `\` and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let digits = tail
            .get(..3)
            .filter(|d| d.iter().all(|b| (b'0'..=b'7').contains(b)));
        match digits {
            Some(digits) if *first == b'\\' => {
                let value = digits
                    .iter()
                    .fold(0_u32, |v, d| v * 8 + u32::from(d - b'0'));
                out.push(u8::try_from(value & 0xff).unwrap_or(b'?'));
                rest = &tail[3..];
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

/// The mount exactly at `path`, the topmost if there are several.
pub(super) fn at(path: &Path) -> io::Result<Option<Mount>> {
    let path = match fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    Ok(list()?.into_iter().rfind(|m| m.point == path))
}

/// Mounts at or below `path`.
pub(super) fn below(path: &Path) -> io::Result<Vec<Mount>> {
    let path = match fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    Ok(list()?
        .into_iter()
        .filter(|m| m.point.starts_with(&path))
        .collect())
}

/// Removes a directory with all it holds. Refuses when anything is mounted at or below it, when it is a
/// link, or when it lies on another file system than its parent. Links inside are removed, not followed.
pub(super) fn remove_tree(dir: &Path) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !metadata.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::NotADirectory,
            "it is not a directory",
        ));
    }
    let parent = dir.parent().unwrap_or(dir);
    if fs::metadata(parent)?.dev() != metadata.dev() {
        return Err(io::Error::new(
            io::ErrorKind::CrossesDevices,
            "it lies on another file system; unmount it first",
        ));
    }
    let mounts = below(dir)?;
    if let Some(mount) = mounts.first() {
        return Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!("{} is mounted; unmount it first", mount.point.display()),
        ));
    }
    one_device(dir, metadata.dev())?;
    // Opens each directory relative to its parent without following links.
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn one_device(dir: &Path, device: u64) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        // Does not follow a link.
        let metadata = match entry.metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        if metadata.is_dir() {
            if metadata.dev() != device {
                return Err(io::Error::new(
                    io::ErrorKind::CrossesDevices,
                    format!("{} lies on another file system", entry.path().display()),
                ));
            }
            one_device(&entry.path(), device)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_read_with_its_escapes() {
        let table = b"36 35 98:0 /mnt1 /mnt\\0402/a\\134b rw,noatime master:1 shared:2 - ext3 /dev/root rw\ngarbage\n31 23 0:28 / /sys rw - tmpfs tmpfs rw\n";
        assert_eq!(
            parse(table),
            [
                Mount {
                    point: "/mnt 2/a\\b".into(),
                    fstype: "ext3".to_owned()
                },
                Mount {
                    point: "/sys".into(),
                    fstype: "tmpfs".to_owned()
                },
            ]
        );
    }

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
}

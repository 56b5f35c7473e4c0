//! What is mounted, as the kernel tells it. No path is looked at that may lead to a server that is gone: a
//! path is found by its name in a directory of the agent's own.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// Where.
    pub(super) point: PathBuf,
    /// File system type.
    pub(super) fstype: String,
    /// A device, `server:path`, or whatever the file system goes by.
    pub(super) source: String,
    /// `major:minor` of the file system.
    pub(super) device: String,
    /// The directory of it that is mounted.
    pub(super) root: PathBuf,
}

/// All mounts of this mount namespace at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Table(Vec<Mount>);

impl Table {
    /// Reads it.
    pub(super) fn read() -> io::Result<Self> {
        Ok(Self(parse(&fs::read("/proc/self/mountinfo")?)))
    }

    /// The mount on top of `path`, if `path` is a mount point. Its parent must be the agent's own.
    pub(super) fn at(&self, path: &Path) -> io::Result<Option<&Mount>> {
        let found = resolve(path)?;
        Ok(found.and_then(|path| {
            self.0
                .iter()
                .rfind(|m| m.point.as_os_str() == path.as_os_str())
        }))
    }

    /// All mounts whose point is `path`, each over the one before.
    fn all_at(&self, path: &Path) -> io::Result<Vec<&Mount>> {
        let Some(path) = resolve(path)? else {
            return Ok(Vec::new());
        };
        let is_it = |m: &&Mount| m.point.as_os_str() == path.as_os_str();
        Ok(self.0.iter().filter(is_it).collect())
    }

    /// Where something is mounted below `root`, a directory of the agent's own, in terms of `root`.
    pub(super) fn points_below(&self, root: &Path) -> io::Result<BTreeSet<PathBuf>> {
        let resolved = match fs::canonicalize(root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            other => other?,
        };
        let below = self
            .0
            .iter()
            .filter_map(|m| m.point.strip_prefix(&resolved).ok());
        Ok(below.map(|rest| root.join(rest)).collect())
    }

    /// Whether what is mounted at `path` is also mounted, whole or in part, at or below one of `dirs`, directories of
    /// the agent's own. Upstream: `GetDeviceMountRefs`.
    pub(super) fn is_shown_below(&self, path: &Path, dirs: &[PathBuf]) -> io::Result<bool> {
        let Some(here) = self.at(path)? else {
            return Ok(false);
        };
        let of_it = |m: &Mount| m.device == here.device && m.root.starts_with(&here.root);
        for dir in dirs {
            if self.below(dir)?.any(of_it) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Mounts at or below `path`, whose parent must be the agent's own.
    pub(super) fn below(&self, path: &Path) -> io::Result<impl Iterator<Item = &Mount>> {
        let path = resolve(path)?;
        let all = self.0.iter();
        Ok(all.filter(move |m| path.as_ref().is_some_and(|p| m.point.starts_with(p))))
    }
}

/// Where the table is read from: the kernel, but in tests.
#[derive(Clone)]
pub(super) struct Source(Arc<dyn Fn() -> io::Result<Table> + Send + Sync>);

impl Default for Source {
    fn default() -> Self {
        Self(Arc::new(Table::read))
    }
}

impl Source {
    /// A table of one's own.
    #[cfg(test)]
    pub(super) fn of(points: impl Fn() -> Vec<PathBuf> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move || {
            let mounts = points().into_iter().map(|point| Mount {
                fstype: "fake".to_owned(),
                source: "fake".to_owned(),
                device: "0:1".to_owned(),
                root: point.clone(),
                point,
            });
            Ok(Table(mounts.collect()))
        }))
    }

    /// The same, with all there is to a mount.
    #[cfg(test)]
    pub(super) fn of_mounts(mounts: impl Fn() -> Vec<Mount> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move || Ok(Table(mounts()))))
    }

    /// Reads it.
    pub(super) fn read(&self) -> io::Result<Table> {
        (self.0)()
    }

    /// As [`Table::at`], of the table as it is now.
    pub(super) fn is_mounted(&self, path: &Path) -> io::Result<bool> {
        Ok(self.read()?.at(path)?.is_some())
    }
}

/// The path as the kernel knows it; the last part is taken as it is written and not looked at. `None` when the
/// directory it is in is not there.
fn resolve(path: &Path) -> io::Result<Option<PathBuf>> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(Some(path.to_owned()));
    };
    match fs::canonicalize(parent) {
        Ok(parent) => Ok(Some(parent.join(name))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// As [`Table::all_at`], of the table as it is now.
pub(super) fn all_at(path: &Path) -> io::Result<Vec<Mount>> {
    Ok(Table::read()?.all_at(path)?.into_iter().cloned().collect())
}

/// A mount below `path`, if there is one, of the table as it is now.
pub(super) fn inside(path: &Path) -> io::Result<Option<Mount>> {
    let Some(path) = resolve(path)? else {
        return Ok(None);
    };
    let is_inside = |m: &&Mount| m.point != path && m.point.starts_with(&path);
    Ok(Table::read()?.0.iter().find(is_inside).cloned())
}

/// As [`Table::at`], of the table as it is now.
pub(super) fn at(path: &Path) -> io::Result<Option<Mount>> {
    Ok(Table::read()?.at(path)?.cloned())
}

/// As [`Table::below`], of the table as it is now.
pub(super) fn below(path: &Path) -> io::Result<Vec<Mount>> {
    Ok(Table::read()?.below(path)?.cloned().collect())
}

fn parse(table: &[u8]) -> Vec<Mount> {
    table
        .split(|b| *b == b'\n')
        .filter_map(|line| {
            let mut fields = line.split(|b| *b == b' ');
            let path = |field: &[u8]| PathBuf::from(OsString::from_vec(unescape(field)));
            let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
            let device = text(fields.nth(2)?);
            let (root, point) = (path(fields.next()?), path(fields.next()?));
            let mut about = fields.skip_while(|f| *f != b"-").skip(1);
            Some(Mount {
                point,
                fstype: text(about.next()?),
                source: text(&unescape(about.next()?)),
                device,
                root,
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
                    fstype: "ext3".to_owned(),
                    source: "/dev/root".to_owned(),
                    device: "98:0".to_owned(),
                    root: "/mnt1".into(),
                },
                Mount {
                    point: "/sys".into(),
                    fstype: "tmpfs".to_owned(),
                    source: "tmpfs".to_owned(),
                    device: "0:28".to_owned(),
                    root: "/".into(),
                },
            ]
        );
    }

    #[test]
    fn what_may_hang_is_not_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().canonicalize().unwrap();
        // Whoever follows it fails.
        let point = own.join("point");
        std::os::unix::fs::symlink(&point, &point).unwrap();
        let mount = |point: PathBuf| Mount {
            point,
            fstype: "nfs4".to_owned(),
            source: "server:/".to_owned(),
            device: "0:7".to_owned(),
            root: "/".into(),
        };
        let table = Table(vec![mount(point.clone()), mount(point.join("inside"))]);
        // The agent's own directories may be reached through links.
        let link = own.join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        for point in [point.clone(), link.join("point")] {
            assert_eq!(table.at(&point).unwrap().unwrap().fstype, "nfs4");
            assert_eq!(table.below(&point).unwrap().count(), 2);
        }
        let below = table.points_below(&link).unwrap();
        assert!(below.contains(&link.join("point/inside")), "{below:?}");
        assert!(table.at(&own.join("no/such")).unwrap().is_none());
    }
}

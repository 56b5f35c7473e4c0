//! What is mounted, as the kernel tells it. No path is looked at that may lead to a server that is gone: a
//! path is found by its name in a directory of the agent's own.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mount {
    /// Its number.
    pub(super) id: String,
    /// Number of the mount it is mounted on.
    pub(super) parent: String,
    /// `major:minor` of the file system.
    pub(super) device: String,
    /// The directory of it that is mounted.
    pub(super) root: PathBuf,
    /// Where.
    pub(super) point: PathBuf,
    /// File system type.
    pub(super) fstype: String,
    /// A device, `server:path`, or whatever the file system goes by.
    pub(super) source: String,
    /// Whether this mount, or the file system itself, can only be read.
    pub(super) read_only: bool,
    /// Number of its peers, with which it shares what is mounted in it.
    pub(super) shared: Option<String>,
    /// Number of the peers it takes after.
    pub(super) master: Option<String>,
}

/// All mounts of this mount namespace at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Table(Vec<Mount>);

impl Table {
    /// Reads it.
    pub(super) fn read() -> io::Result<Self> {
        Ok(Self(parse(&fs::read("/proc/self/mountinfo")?)))
    }

    /// All of them, in the kernel's order.
    pub(super) fn into_all(self) -> Vec<Mount> {
        self.0
    }

    /// The mount on top of `path`, if `path` is a mount point. Its parent must be the agent's own.
    pub(super) fn at(&self, path: &Path) -> io::Result<Option<&Mount>> {
        Ok(self.all_at(path)?.pop())
    }

    /// What is mounted at `path`, each over the one before. Where mounts are shared the kernel lists copies of one
    /// mount at one path, in what is covered by another mount: those are not seen there, and not told.
    pub(super) fn all_at(&self, path: &Path) -> io::Result<Vec<&Mount>> {
        Ok(resolve(path)?.map_or_else(Vec::new, |path| self.stack(&path)))
    }

    /// As [`Table::all_at`], of a path as the kernel knows it.
    fn stack(&self, path: &Path) -> Vec<&Mount> {
        let is_it = |m: &&Mount| m.point.as_os_str() == path.as_os_str() && self.is_seen(m);
        let mut left: Vec<&Mount> = self.0.iter().filter(is_it).collect();
        let mut stack: Vec<&Mount> = Vec::with_capacity(left.len());
        let next = |left: &[&Mount], top: Option<&Mount>| match top {
            Some(top) => left.iter().position(|m| m.parent == top.id),
            None => left.iter().position(|m| {
                let is_below = |o: &&Mount| !std::ptr::eq(*o, *m) && o.id == m.parent;
                !left.iter().any(is_below)
            }),
        };
        while let Some(index) = next(&left, stack.last().copied()) {
            stack.push(left.swap_remove(index));
        }
        stack
    }

    /// Where something is mounted below `root`, a directory of the agent's own, in terms of `root`.
    pub(super) fn points_below(&self, root: &Path) -> io::Result<BTreeSet<PathBuf>> {
        let resolved = match fs::canonicalize(root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            other => other?,
        };
        let below = (self.0.iter())
            .filter_map(|m| Some((m, m.point.strip_prefix(&resolved).ok()?)))
            .filter(|(m, _)| self.is_seen(m));
        Ok(below.map(|(_, rest)| root.join(rest)).collect())
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

    /// Mounts at or below `path`, whose parent must be the agent's own. What is covered there by another file system
    /// is not below it; what is covered by a copy of the same one still holds its directories.
    pub(super) fn below(&self, path: &Path) -> io::Result<impl Iterator<Item = &Mount>> {
        let path = resolve(path)?;
        Ok(path.into_iter().flat_map(|path| self.holding(path)))
    }

    /// As [`Table::below`], of a path as the kernel knows it.
    fn holding(&self, path: PathBuf) -> impl Iterator<Item = &Mount> {
        let holder = path.parent().and_then(|parent| self.holder(parent));
        let device = holder.map(|holder| holder.device.as_str());
        self.0.iter().filter(move |m| {
            let is_held = || self.by_id(&m.parent).map(|parent| parent.device.as_str()) == device;
            m.point.starts_with(&path) && (self.is_seen(m) || is_held())
        })
    }

    /// Whether the mount at `path` has nothing to do with others but copies of mounts elsewhere that have come into
    /// it by propagation. The parent of `path` must be the agent's own.
    ///
    /// # Errors
    /// What somebody has mounted over it or in it.
    pub(super) fn check_alone(&self, path: &Path) -> io::Result<()> {
        resolve(path)?.map_or(Ok(()), |path| self.alone(&path))
    }

    /// As [`Table::check_alone`], of a path as the kernel knows it.
    fn alone(&self, path: &Path) -> io::Result<()> {
        let stack = self.stack(path);
        if let [_, .., top] = stack.as_slice() {
            return Err(busy(format!(
                "{} ({}) is mounted over it; whoever mounted that is to unmount it",
                top.source, top.fstype
            )));
        }
        let mut strangers = self.inside(path).filter(|m| !self.is_copy(m, path));
        match strangers.next() {
            Some(stranger) => Err(busy(format!(
                "{} is mounted; unmount it first",
                stranger.point.display()
            ))),
            None => Ok(()),
        }
    }

    /// What is mounted inside of what is mounted at a path.
    fn inside(&self, path: &Path) -> impl Iterator<Item = &Mount> {
        let is_inside = move |m: &&Mount| m.point != path && m.point.starts_with(path);
        self.0.iter().filter(is_inside).filter(|m| self.is_seen(m))
    }

    /// Whether the very same is mounted outside of a path too, at the same directory: by propagation, as they are
    /// peers. That one stays when this one goes.
    fn is_copy(&self, mount: &Mount, path: &Path) -> bool {
        let Some(place) = self.place(mount) else {
            return false;
        };
        let is_peer = |o: &&Mount| {
            o.shared.is_some() && (o.shared == mount.shared || o.shared == mount.master)
        };
        let is_same = |o: &&Mount| (&o.device, &o.root) == (&mount.device, &mount.root);
        (self.0.iter())
            .filter(|o| !o.point.starts_with(path))
            .filter(is_same)
            .filter(is_peer)
            .any(|o| self.place(o).as_ref() == Some(&place) && self.is_seen(o))
    }

    /// The directory that is mounted on: the file system, and the path in it.
    fn place(&self, mount: &Mount) -> Option<(&str, PathBuf)> {
        let parent = self.by_id(&mount.parent)?;
        let rest = mount.point.strip_prefix(&parent.point).ok()?;
        Some((&parent.device, parent.root.join(rest)))
    }

    fn by_id(&self, id: &str) -> Option<&Mount> {
        self.0.iter().find(|m| m.id == id)
    }

    /// The mount that holds a path without links.
    fn holder(&self, path: &Path) -> Option<&Mount> {
        let holding = self.0.iter().filter(|m| path.starts_with(&m.point));
        // Of those at one point the one that no other one covers.
        (holding.filter(|m| self.is_seen(m))).max_by_key(|m| {
            let covers = self
                .0
                .iter()
                .any(|o| o.parent == m.id && o.point == m.point);
            (m.point.components().count(), !covers)
        })
    }

    /// Whether a path leads to a mount, through what is mounted on the way.
    fn is_seen(&self, mount: &Mount) -> bool {
        let mut mount = mount;
        // No longer than the table, whatever it says.
        for _ in 0..self.0.len() {
            let covers = |o: &&Mount| {
                o.parent == mount.parent
                    && o.id != mount.id
                    && o.point != mount.point
                    && mount.point.starts_with(&o.point)
            };
            if self.0.iter().any(|o| covers(&o)) {
                return false;
            }
            match self.by_id(&mount.parent) {
                Some(parent) if !std::ptr::eq(parent, mount) => mount = parent,
                _ => return true,
            }
        }
        true
    }
}

fn busy(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, text)
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
                device: "0:1".to_owned(),
                root: point.clone(),
                point,
                ..Mount::default()
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

/// Unmounts the mount at `path`, which is the agent's own, and nothing else. Copies of mounts elsewhere that have
/// come into it by propagation go with it; what they are copies of stays. Says whether there was one. The parent of
/// `path` must be the agent's own. Blocking.
///
/// # Errors
/// Something else is mounted over it or in it, or somebody uses it: then nothing is unmounted.
pub(super) fn unmount_own(path: &Path) -> io::Result<bool> {
    let table = Table::read()?;
    if table.at(path)?.is_none() {
        return Ok(false);
    }
    table.check_alone(path)?;
    match umount2(path, MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => Ok(true),
        Err(Errno::EBUSY) if detach_with_copies(path)? => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Unmounts the agent's own mount at `path` if it is kept by copies of mounts elsewhere that are in it; see
/// [`unmount_own`]. No path leads through it: whoever writes there names what is in it. Blocking.
///
/// # Errors
/// As there.
pub(super) fn detach_with_copies(path: &Path) -> io::Result<bool> {
    let table = Table::read()?;
    let Some(point) = resolve(path)? else {
        return Ok(false);
    };
    if table.inside(&point).next().is_none() {
        return Ok(false);
    }
    table.check_alone(path)?;
    let none = None::<&str>;
    // From now on nothing comes into it, and what is in it is cut off from what it is a copy of, so that nothing is
    // unmounted there.
    mount(none, path, none, MsFlags::MS_PRIVATE, none)?;
    Table::read()?.check_alone(path)?;
    let all = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
    mount(none, path, none, all, none)?;
    umount2(path, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH)?;
    Ok(true)
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
    let line = |line: &[u8]| {
        let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
        let path = |field: &[u8]| PathBuf::from(OsString::from_vec(unescape(field)));
        let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
        let dash = fields.iter().position(|f| *f == b"-")?;
        let read_only = |options: &[u8]| options.split(|b| *b == b',').any(|o| o == b"ro");
        let tag = |name: &[u8]| {
            let tags = fields.get(6..dash)?;
            tags.iter().find_map(|f| Some(text(f.strip_prefix(name)?)))
        };
        Some(Mount {
            id: text(fields.first()?),
            parent: text(fields.get(1)?),
            device: text(fields.get(2)?),
            root: path(fields.get(3)?),
            point: path(fields.get(4)?),
            fstype: text(fields.get(dash + 1)?),
            source: text(fields.get(dash + 2)?),
            read_only: read_only(fields.get(5)?) || read_only(fields.get(dash + 3)?),
            shared: tag(b"shared:"),
            master: tag(b"master:"),
        })
    };
    table.split(|b| *b == b'\n').filter_map(line).collect()
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
        let table = b"36 35 98:0 /a /mnt\\0402/a\\134b rw,noatime master:1 shared:2 - nfs4 [fd00::1]:/x\\040y rw,vers=4.2\n\
            garbage\n37 35 0:9 / /ro ro - tmpfs tmpfs rw\n38 35 0:9 / /sb rw - tmpfs tmpfs ro\n";
        let all = parse(table);
        assert_eq!(
            all[0],
            Mount {
                id: "36".to_owned(),
                parent: "35".to_owned(),
                device: "98:0".to_owned(),
                root: "/a".into(),
                point: "/mnt 2/a\\b".into(),
                fstype: "nfs4".to_owned(),
                source: "[fd00::1]:/x y".to_owned(),
                read_only: false,
                shared: Some("2".to_owned()),
                master: Some("1".to_owned()),
            }
        );
        let read_only: Vec<_> = all.iter().map(|m| m.read_only).collect();
        assert_eq!(read_only, [false, true, true]);
    }

    /// A table with `/` (1), its agent's directory bound on itself (2), and these.
    fn table(more: &str) -> Table {
        let base = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw\n2 1 8:1 /k /k rw shared:1 - ext4 /dev/sda rw\n";
        Table(parse(format!("{base}{more}").as_bytes()))
    }

    fn ids(mounts: &[&Mount]) -> Vec<String> {
        mounts.iter().map(|m| m.id.clone()).collect()
    }

    #[test]
    fn a_mount_over_another_is_told_from_a_copy_in_what_is_covered() {
        // The copy in `/` first, and last.
        for copies in [
            "5 1 0:9 / /k/v rw shared:7 - tmpfs x rw\n6 2 0:9 / /k/v rw shared:7 - tmpfs x rw\n",
            "6 2 0:9 / /k/v rw shared:7 - tmpfs x rw\n5 1 0:9 / /k/v rw shared:7 - tmpfs x rw\n",
        ] {
            let copies = table(copies);
            assert_eq!(ids(&copies.stack(Path::new("/k/v"))), ["6"]);
            copies.alone(Path::new("/k/v")).unwrap();
            let holding = copies.holding("/k/v".into()).count();
            assert_eq!(holding, 2, "both hold the directory");
        }
        let stacked = table(
            "7 6 0:10 / /k/v rw - tmpfs y rw\n6 2 0:9 / /k/v rw - nfs4 s:/x rw\n5 1 0:9 / /k/v rw - nfs4 s:/x rw\n",
        );
        assert_eq!(ids(&stacked.stack(Path::new("/k/v"))), ["6", "7"]);
        let error = stacked.alone(Path::new("/k/v")).unwrap_err();
        assert!(error.to_string().contains("y (tmpfs) is mounted over it"));
    }

    #[test]
    fn what_another_file_system_covers_is_not_there() {
        let covered = Table(parse(
            b"1 0 8:1 / / rw - ext4 /dev/sda rw\n5 1 0:9 / /k/v rw - tmpfs x rw\n2 1 8:2 / /k rw - ext4 /dev/sdb rw\n",
        ));
        assert_eq!(ids(&covered.stack(Path::new("/k/v"))), [""; 0]);
        assert_eq!(covered.holding("/k/v".into()).count(), 0);
    }

    #[test]
    fn a_copy_of_a_mount_elsewhere_is_no_stranger_and_the_only_one_is() {
        // A disk's directory `/data` bound for a pod, and a mount in it.
        let inside = |tags: &str, more: &str| {
            table(&format!(
                "5 2 8:1 /data /k/v rw shared:1 - ext4 /dev/sda rw\n6 5 0:9 / /k/v/usb rw {tags} - tmpfs x rw\n{more}"
            ))
            .alone(Path::new("/k/v"))
        };
        let origin = "8 1 0:9 / /data/usb rw shared:9 - tmpfs x rw\n";
        inside("shared:9", origin).unwrap();
        inside("master:9", origin).unwrap();
        for (tags, more) in [
            ("", ""),
            // The same file system, but mounted by somebody on its own, or at another place.
            ("", origin),
            (
                "shared:9",
                "8 1 0:9 / /other/usb rw shared:9 - tmpfs x rw\n",
            ),
            (
                "shared:9",
                "8 1 0:9 /part /data/usb rw shared:9 - tmpfs x rw\n",
            ),
        ] {
            let error = inside(tags, more).unwrap_err().to_string();
            assert_eq!(
                error, "/k/v/usb is mounted; unmount it first",
                "{tags} {more}"
            );
        }
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
            ..Mount::default()
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

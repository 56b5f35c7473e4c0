//! What is mounted, as the kernel tells it. No path is looked at that may lead to a server that is gone: a
//! path is found by its name in a directory of the agent's own.
//!
//! Reading the table costs more with each mount of the node, and the kernel tells for nothing whether it has changed
//! (`poll` on it). So the last one is kept, and read again when it is not the newest any more; see [`Source`].

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::fs::CWD;
use tokio::sync::Semaphore;

use crate::core::volumes::records::OwnMount;
use crate::types::blocking;
use crate::types::mount_root::is_mount_root;
use crate::types::mountinfo::{self, TABLE};

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

/// Directories of the agent that volumes are mounted in; each may be a link to another disk.
const BASES: [&str; 3] = ["pods", "plugins", ""];

/// Reading the table takes the place of no other work, and none that hangs holds it up.
static TURNS: Semaphore = Semaphore::const_new(2);

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
    /// The file system has SELinux labels of files, and they can be changed.
    pub(super) has_labels: bool,
}

impl Mount {
    /// Returns its description for the record of a volume.
    pub(super) fn noted(&self) -> OwnMount {
        OwnMount {
            id: self.id.clone(),
            device: self.device.clone(),
            root: self.root.to_string_lossy().into_owned(),
            fstype: self.fstype.clone(),
            source: self.source.clone(),
        }
    }
}

#[cfg(test)]
impl Mount {
    /// One that is known by its point only.
    pub(super) fn fake(point: PathBuf) -> Self {
        Self {
            fstype: "fake".to_owned(),
            device: "0:1".to_owned(),
            root: point.clone(),
            point,
            ..Self::default()
        }
    }
}

/// All mounts of this mount namespace at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    mounts: Vec<Mount>,
    /// Places in `mounts`, by mount point, and of one point in the order of the kernel.
    by_point: Vec<usize>,
    /// Places in `mounts`, by number.
    by_id: Vec<usize>,
}

impl Table {
    /// Reads it.
    pub(super) fn read() -> io::Result<Self> {
        Ok(Self::of(parse(&fs::read(TABLE)?)))
    }

    pub(super) fn of(mounts: Vec<Mount>) -> Self {
        let mut by_point: Vec<usize> = (0..mounts.len()).collect();
        let mut by_id = by_point.clone();
        // Stable, so that mounts of one point stay in order.
        by_point.sort_by(|a, b| {
            let [a, b] = [a, b].map(|place| mounts[*place].point.as_os_str());
            a.cmp(b)
        });
        by_id.sort_by(|a, b| mounts[*a].id.cmp(&mounts[*b].id));
        Self {
            mounts,
            by_point,
            by_id,
        }
    }

    /// All of them, in the kernel's order.
    pub(super) fn into_all(self) -> Vec<Mount> {
        self.mounts
    }

    /// Those whose point is this one, seen or not, in the kernel's order.
    fn points(&self, point: &Path) -> impl Iterator<Item = &Mount> {
        let name = point.as_os_str();
        let point_of = |place: &usize| self.mounts[*place].point.as_os_str();
        let from = self.by_point.partition_point(|at| point_of(at) < name);
        let from = self.by_point[from..].iter().map(|at| &self.mounts[*at]);
        from.take_while(move |m| m.point.as_os_str() == name)
    }

    fn by_id(&self, id: &str) -> Option<&Mount> {
        let after = (self.by_id).partition_point(|at| *self.mounts[*at].id < *id);
        let mount = &self.mounts[*self.by_id.get(after)?];
        (mount.id == id).then_some(mount)
    }

    /// The mount on top of `path`, if `path` is a mount point. Its parent must be the agent's own.
    pub(super) fn at(&self, path: &Path) -> io::Result<Option<&Mount>> {
        Ok(self.all_at(path)?.pop())
    }

    /// Returns the mounts at `path`, each over the previous one. With shared mounts the kernel lists copies of one
    /// mount at one path, inside a mount that another one covers. Those are not visible at the path, and are left out.
    pub(super) fn all_at(&self, path: &Path) -> io::Result<Vec<&Mount>> {
        Ok(resolve(path)?.map_or_else(Vec::new, |path| self.stack(&path)))
    }

    /// As [`Table::all_at`], of a path as the kernel knows it.
    fn stack(&self, path: &Path) -> Vec<&Mount> {
        let mut left: Vec<&Mount> = self.points(path).filter(|m| self.is_seen(m)).collect();
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

    /// Returns the mount points below `root`, a directory of the agent, as paths that begin with `root`.
    pub(super) fn points_below(&self, root: &Path) -> io::Result<BTreeSet<PathBuf>> {
        let resolved = match fs::canonicalize(root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            other => other?,
        };
        let below = (self.mounts.iter())
            .filter_map(|m| Some((m, m.point.strip_prefix(&resolved).ok()?)))
            .filter(|(m, _)| self.is_seen(m));
        Ok(below.map(|(_, rest)| root.join(rest)).collect())
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
        self.mounts.iter().filter(move |m| {
            let is_held = || self.by_id(&m.parent).map(|parent| parent.device.as_str()) == device;
            m.point.starts_with(&path) && (self.is_seen(m) || is_held())
        })
    }

    /// Every mount, in the order of the table.
    pub(super) fn all(&self) -> impl Iterator<Item = &Mount> {
        self.mounts.iter()
    }

    /// Mounts of a file or directory of the agent's own, and of what is in it, wherever they are.
    pub(super) fn rooted_in(&self, dir: &Path) -> io::Result<Vec<&Mount>> {
        let dir = match fs::canonicalize(dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let holder = self.holder(&dir);
        let root = holder.and_then(|h| Some((h, dir.strip_prefix(&h.point).ok()?)));
        let Some((holder, rest)) = root else {
            return Ok(Vec::new());
        };
        let root = holder.root.join(rest);
        let is_of_it = |m: &&Mount| m.device == holder.device && m.root.starts_with(&root);
        Ok(self.mounts.iter().filter(is_of_it).collect())
    }

    /// Checks that nothing is mounted over or in the mount at `path`, except copies of mounts elsewhere that came by
    /// propagation. The parent of `path` must belong to the agent.
    ///
    /// # Errors
    /// The foreign mount over it or in it.
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

    /// Returns the mounts inside the mount at a path.
    fn inside(&self, path: &Path) -> impl Iterator<Item = &Mount> {
        let is_inside = move |m: &&Mount| m.point != path && m.point.starts_with(path);
        self.mounts
            .iter()
            .filter(is_inside)
            .filter(|m| self.is_seen(m))
    }

    /// Returns whether an identical mount exists outside of a path, at the same directory: a peer by propagation. That
    /// one stays when this one is unmounted.
    fn is_copy(&self, mount: &Mount, path: &Path) -> bool {
        let Some(place) = self.place(mount) else {
            return false;
        };
        let is_peer = |o: &&Mount| {
            o.shared.is_some() && (o.shared == mount.shared || o.shared == mount.master)
        };
        let is_same = |o: &&Mount| (&o.device, &o.root) == (&mount.device, &mount.root);
        (self.mounts.iter())
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

    /// The mount that holds a path without links.
    fn holder(&self, path: &Path) -> Option<&Mount> {
        path.ancestors().find_map(|dir| {
            let here = self.points(dir).filter(|m| self.is_seen(m));
            // Of those at one point the one that no other one covers.
            here.max_by_key(|m| !self.points(dir).any(|o| o.parent == m.id))
        })
    }

    /// Returns whether a path lookup reaches a mount, and no other mount on the way covers it.
    fn is_seen(&self, mount: &Mount) -> bool {
        let mut mount = mount;
        // No longer than the table, whatever it says.
        for _ in 0..self.mounts.len() {
            let is_beside = |o: &Mount| o.parent == mount.parent && o.id != mount.id;
            let covers = |dir: &Path| self.points(dir).any(is_beside);
            if mount.point.ancestors().skip(1).any(covers) {
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
/// A table, and what the kernel calls the agent's directories. Cheap to clone, and looks at no path.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    table: Arc<Table>,
    bases: Bases,
}

/// Directories as they are written, and as the kernel knows them.
type Bases = Arc<[(PathBuf, PathBuf)]>;

impl View {
    /// As [`Table::at`], and nothing is looked up.
    pub(super) fn mount_at(&self, path: &Path) -> Option<&Mount> {
        self.table.stack(&self.known(path)).pop()
    }

    /// Returns whether the content of the mount at `path` is also mounted, whole or in part, at or below one of `dirs`,
    /// directories of the agent. Accesses no path. Upstream: `GetDeviceMountRefs`.
    pub(super) fn is_shown_below(&self, path: &Path, dirs: &[PathBuf]) -> bool {
        let Some(here) = self.mount_at(path) else {
            return false;
        };
        let of_it = |m: &Mount| m.device == here.device && m.root.starts_with(&here.root);
        let mut dirs = dirs.iter().map(|dir| self.known(dir).into_owned());
        dirs.any(|dir| self.table.holding(dir).any(of_it))
    }

    /// The kernel's name of a path.
    fn known<'p>(&self, path: &'p Path) -> Cow<'p, Path> {
        let mut bases = self.bases.iter();
        let below =
            bases.find_map(|(written, known)| Some((known, path.strip_prefix(written).ok()?)));
        match below {
            Some((known, rest)) if rest.as_os_str().is_empty() => known.clone().into(),
            Some((known, rest)) => known.join(rest).into(),
            None => path.into(),
        }
    }
}

impl Deref for View {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

/// What knows of mounts.
pub(super) trait Kernel: Send + Sync {
    /// All of them, now.
    ///
    /// # Errors
    /// When it does not tell.
    fn read(&self) -> io::Result<Table>;

    /// Returns whether mounts were added or removed since the previous call; `None` if that is unknown.
    fn changed(&self) -> Option<bool>;
}

/// The kernel itself.
struct Proc(Option<fs::File>);

impl Kernel for Proc {
    fn read(&self) -> io::Result<Table> {
        Table::read()
    }

    fn changed(&self) -> Option<bool> {
        // As long as it is open, the file remembers which change it told of last.
        let mut asked = [PollFd::new(self.0.as_ref()?.as_fd(), PollFlags::POLLPRI)];
        poll(&mut asked, PollTimeout::ZERO).ok()?;
        let told = asked[0].revents()?;
        Some(told.intersects(PollFlags::POLLPRI | PollFlags::POLLERR))
    }
}

/// Where the table is had from, never older than the question. Cheap to clone; clones share what was read.
///
/// What was read answers all who asked before the reading began, and those who ask later as long as the kernel says
/// that nothing has changed. It is believed once it has told of a change: what only looks like Linux may never do so,
/// and is read each time.
#[derive(Clone)]
pub(super) struct Source(Arc<Shared>);

struct Shared {
    kernel: Box<dyn Kernel>,
    root: PathBuf,
    asked: AtomicU64,
    reads: AtomicU64,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    view: Option<View>,
    bases: Bases,
    /// How many had asked when its reading began.
    answers: u64,
    /// The kernel has told of a change.
    tells: bool,
}

impl Kept {
    /// Returns the kept table if it answers the request without reading.
    fn answer(&mut self, asked: u64, kernel: &dyn Kernel) -> Option<View> {
        if asked < self.answers
            && let Some(view) = &self.view
        {
            return Some(view.clone());
        }
        match kernel.changed() {
            Some(true) => {
                self.tells = true;
                // It is told once.
                self.view = None;
                None
            }
            Some(false) if self.tells => self.view.clone(),
            _ => None,
        }
    }
}

impl Source {
    /// Returns a source that reads the kernel's table. `root` is the parent of the directories of pods and plugins.
    pub(super) fn new(root: &Path) -> Self {
        Self::with(root, Proc(fs::File::open(TABLE).ok()))
    }

    /// Returns a source with another kernel.
    pub(super) fn with(root: &Path, kernel: impl Kernel + 'static) -> Self {
        Self(Arc::new(Shared {
            kernel: Box::new(kernel),
            root: root.to_owned(),
            asked: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            kept: Mutex::default(),
        }))
    }

    /// A table of one's own.
    #[cfg(test)]
    pub(super) fn of_mounts(mounts: impl Fn() -> Vec<Mount> + Send + Sync + 'static) -> Self {
        struct Given<F>(F);
        impl<F: Fn() -> Vec<Mount> + Send + Sync> Kernel for Given<F> {
            fn read(&self) -> io::Result<Table> {
                Ok(Table::of(self.0()))
            }

            fn changed(&self) -> Option<bool> {
                None
            }
        }
        Self::with(Path::new("/does/not/exist"), Given(mounts))
    }

    /// Returns the number of reads of the table.
    #[cfg(test)]
    pub(super) fn reads(&self) -> u64 {
        self.0.reads.load(SeqCst)
    }

    /// Returns the current mounts. Blocking.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub(super) fn read(&self) -> io::Result<View> {
        self.answer(self.ask())
    }

    /// As [`Source::read`], on a thread where it may block, if it has to.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub(super) async fn current(&self) -> io::Result<View> {
        let asked = self.ask();
        if let Ok(mut kept) = self.0.kept.try_lock()
            && let Some(view) = kept.answer(asked, &*self.0.kernel)
        {
            return Ok(view);
        }
        let source = self.clone();
        match blocking::run_in(&TURNS, move || source.answer(asked)).await {
            Ok(view) => view,
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn ask(&self) -> u64 {
        self.0.asked.fetch_add(1, SeqCst)
    }

    fn answer(&self, asked: u64) -> io::Result<View> {
        let shared = &*self.0;
        // What is kept is replaced whole.
        let mut kept = shared.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = kept.answer(asked, &*shared.kernel) {
            return Ok(view);
        }
        let answers = shared.asked.load(SeqCst);
        shared.reads.fetch_add(1, SeqCst);
        let table = Arc::new(shared.kernel.read()?);
        if kept.bases.len() < BASES.len() {
            kept.bases = bases(&shared.root)?.into();
        }
        let bases = Arc::clone(&kept.bases);
        let view = View { table, bases };
        kept.answers = answers;
        kept.view = Some(view.clone());
        Ok(view)
    }
}

/// Returns the directories with volumes, each with the kernel's name for it. A directory that does not exist has no
/// mounts. It is looked up again when the table has changed.
fn bases(root: &Path) -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let mut bases = Vec::new();
    for name in BASES {
        let written = match name {
            "" => root.to_owned(),
            name => root.join(name),
        };
        match fs::canonicalize(&written) {
            Ok(known) => bases.push((written, known)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bases)
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

/// Returns whether `path` itself is a mount point, with a single system call, since the table is long on a node with
/// many pods. Contacts no server. `None` if the kernel does not say (before 5.8), or nothing exists at the path.
pub(super) fn is_point(path: &Path) -> Option<bool> {
    is_mount_root(CWD, path)
}

/// As [`Table::at`], of the table as it is now.
pub(super) fn at(path: &Path) -> io::Result<Option<Mount>> {
    Ok(Table::read()?.at(path)?.cloned())
}

/// As [`Table::below`], of the table as it is now.
pub(super) fn below(path: &Path) -> io::Result<Vec<Mount>> {
    Ok(Table::read()?.below(path)?.cloned().collect())
}

/// Returns which of these are mounts of file systems whose files have no SELinux labels of their own, or have one by the mount
/// (`context=`). Upstream: `GetSELinuxSupport`.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn without_labels<'a>(
    paths: impl IntoIterator<Item = (&'a String, &'a PathBuf)>,
) -> io::Result<BTreeSet<String>> {
    let table = Table::read()?;
    let mut found = BTreeSet::new();
    for (name, path) in paths {
        if table.at(path)?.is_some_and(|mount| !mount.has_labels) {
            found.insert(name.clone());
        }
    }
    Ok(found)
}

fn parse(table: &[u8]) -> Vec<Mount> {
    let has = |options: &[u8], name: &[u8]| options.split(|b| *b == b',').any(|o| o == name);
    let mount = |line: mountinfo::Line<'_>| {
        let tag = |name: &[u8]| {
            let mut tags = line.tags.split(|b| *b == b' ');
            tags.find_map(|tag| Some(mountinfo::text(tag.strip_prefix(name)?)))
        };
        Mount {
            id: mountinfo::text(line.id),
            parent: mountinfo::text(line.parent),
            device: mountinfo::text(line.device),
            root: mountinfo::path(line.root),
            point: mountinfo::path(line.point),
            fstype: mountinfo::text(line.fstype),
            source: mountinfo::text(line.source),
            read_only: has(line.options, b"ro") || has(line.super_options, b"ro"),
            shared: tag(b"shared:"),
            master: tag(b"master:"),
            has_labels: has(line.options, b"seclabel") || has(line.super_options, b"seclabel"),
        }
    };
    mountinfo::lines(table).map(mount).collect()
}

#[cfg(test)]
mod tests;

//! What is mounted, as the kernel tells it. No path is looked at that may lead to a server that is gone: a
//! path is found by its name in a directory of the agent's own.
//!
//! Reading the table costs more with each mount of the node, and the kernel tells for nothing whether it has changed
//! (`poll` on it). So the last one is kept, and read again when it is not the newest any more; see [`Source`].

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::Semaphore;

use crate::types::blocking;

/// Where the kernel tells of mounts.
const TABLE: &str = "/proc/self/mountinfo";
/// Directories of the agent that volumes are mounted in; each may be a link to another disk.
const BASES: [&str; 3] = ["pods", "plugins", ""];

/// Reading the table takes the place of no other work, and none that hangs holds it up.
static TURNS: Semaphore = Semaphore::const_new(2);

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// Where.
    pub(super) point: PathBuf,
    /// File system type.
    pub(super) fstype: String,
}

/// All mounts of this mount namespace at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    mounts: Vec<Mount>,
    /// Places in `mounts`, by mount point, and of one point in the order of the kernel.
    by_point: Vec<usize>,
}

impl Table {
    /// Reads it.
    pub(super) fn read() -> io::Result<Self> {
        Ok(Self::of(parse(&fs::read(TABLE)?)))
    }

    pub(super) fn of(mounts: Vec<Mount>) -> Self {
        let mut by_point: Vec<usize> = (0..mounts.len()).collect();
        // Stable, so that of one point the topmost stays the last.
        by_point.sort_by(|a, b| {
            let [a, b] = [a, b].map(|place| mounts[*place].point.as_os_str());
            a.cmp(b)
        });
        Self { mounts, by_point }
    }

    /// The mount on top of `point`, by the kernel's name of it.
    fn top(&self, point: &Path) -> Option<&Mount> {
        let name = point.as_os_str();
        let after =
            (self.by_point).partition_point(|at| self.mounts[*at].point.as_os_str() <= name);
        let mount = &self.mounts[*self.by_point.get(after.checked_sub(1)?)?];
        (mount.point.as_os_str() == name).then_some(mount)
    }

    /// The mount on top of `path`, if `path` is a mount point. Its parent must be the agent's own.
    pub(super) fn at(&self, path: &Path) -> io::Result<Option<&Mount>> {
        Ok(resolve(path)?.and_then(|path| self.top(&path)))
    }

    /// All mounts whose point is `path`, each over the one before.
    fn all_at(&self, path: &Path) -> io::Result<Vec<&Mount>> {
        let Some(path) = resolve(path)? else {
            return Ok(Vec::new());
        };
        let is_it = |m: &&Mount| m.point.as_os_str() == path.as_os_str();
        Ok(self.mounts.iter().filter(is_it).collect())
    }

    /// Where something is mounted below `root`, a directory of the agent's own, in terms of `root`.
    pub(super) fn points_below(&self, root: &Path) -> io::Result<BTreeSet<PathBuf>> {
        let resolved = match fs::canonicalize(root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            other => other?,
        };
        let below = self
            .mounts
            .iter()
            .filter_map(|m| m.point.strip_prefix(&resolved).ok());
        Ok(below.map(|rest| root.join(rest)).collect())
    }

    /// Mounts at or below `path`, whose parent must be the agent's own.
    pub(super) fn below(&self, path: &Path) -> io::Result<impl Iterator<Item = &Mount>> {
        let path = resolve(path)?;
        let all = self.mounts.iter();
        Ok(all.filter(move |m| path.as_ref().is_some_and(|p| m.point.starts_with(p))))
    }
}

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
        let mut bases = self.bases.iter();
        let below =
            bases.find_map(|(written, known)| Some((known, path.strip_prefix(written).ok()?)));
        match below {
            Some((known, rest)) if rest.as_os_str().is_empty() => self.table.top(known),
            Some((known, rest)) => self.table.top(&known.join(rest)),
            None => self.table.top(path),
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

    /// Whether any has come or gone since this was asked last; `None` when it cannot tell.
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
    /// What can be answered without reading.
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
    /// What the kernel says. `root` is the directory that pods' and plugins' are in.
    pub(super) fn new(root: &Path) -> Self {
        Self::with(root, Proc(fs::File::open(TABLE).ok()))
    }

    /// What somebody else says.
    pub(super) fn with(root: &Path, kernel: impl Kernel + 'static) -> Self {
        Self(Arc::new(Shared {
            kernel: Box::new(kernel),
            root: root.to_owned(),
            asked: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            kept: Mutex::default(),
        }))
    }

    /// How often the table was read.
    #[cfg(test)]
    pub(super) fn reads(&self) -> u64 {
        self.0.reads.load(SeqCst)
    }

    /// What is mounted now. Blocking.
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

/// What the kernel calls the directories that volumes are mounted in. What is not there yet holds no mount, and is
/// looked for when the table has changed.
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
    Ok(Table::read()?.mounts.iter().find(is_inside).cloned())
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
    fn what_may_hang_is_not_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().canonicalize().unwrap();
        // Whoever follows it fails.
        let point = own.join("point");
        std::os::unix::fs::symlink(&point, &point).unwrap();
        let mount = |point: PathBuf| Mount {
            point,
            fstype: "nfs4".to_owned(),
        };
        let table = Table::of(vec![mount(point.clone()), mount(point.join("inside"))]);
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

    /// A kernel by hand: what it has mounted, and whether it says so.
    #[derive(Default)]
    struct Fake {
        points: Mutex<Vec<PathBuf>>,
        changed: Mutex<Option<bool>>,
        /// Held while the table is read.
        reading: Mutex<()>,
    }

    impl Kernel for Arc<Fake> {
        fn read(&self) -> io::Result<Table> {
            let _reading = self.reading.lock().unwrap();
            let points = self.points.lock().unwrap();
            let mounts = points.iter().map(|point| Mount {
                point: point.clone(),
                fstype: "fake".to_owned(),
            });
            Ok(Table::of(mounts.collect()))
        }

        fn changed(&self) -> Option<bool> {
            let mut changed = self.changed.lock().unwrap();
            let told = *changed;
            // It is told once.
            *changed = told.map(|_| false);
            told
        }
    }

    fn fake(root: &Path) -> (Arc<Fake>, Source) {
        let fake = Arc::new(Fake::default());
        (Arc::clone(&fake), Source::with(root, fake))
    }

    #[test]
    fn a_table_is_kept_as_long_as_the_kernel_says_that_it_is_the_newest() {
        let (kernel, source) = fake(Path::new("/"));
        let point = Path::new("/a");
        let look = || {
            (
                source.read().unwrap().mount_at(point).is_some(),
                source.reads(),
            )
        };
        let says = |changed| *kernel.changed.lock().unwrap() = changed;
        // It cannot tell.
        assert_eq!((look(), look()), ((false, 1), (false, 2)));
        // It says nothing has changed, but never told of anything: nobody knows that it would.
        says(Some(false));
        assert_eq!((look(), look()), ((false, 3), (false, 4)));
        kernel.points.lock().unwrap().push(point.into());
        assert_eq!(look(), (true, 5));
        says(Some(true));
        assert_eq!((look(), look(), look()), ((true, 6), (true, 6), (true, 6)));
        kernel.points.lock().unwrap().clear();
        says(Some(true));
        assert_eq!((look(), look()), ((false, 7), (false, 7)));
        // It cannot tell any more.
        says(None);
        assert_eq!((look(), look()), ((false, 8), (false, 9)));
    }

    #[test]
    fn a_table_answers_all_who_asked_before_it_was_read() {
        let (kernel, source) = fake(Path::new("/"));
        let reading = kernel.reading.lock().unwrap();
        let ask = || {
            let source = source.clone();
            let is_there = move || source.read().unwrap().mount_at(Path::new("/a")).is_some();
            std::thread::spawn(is_there)
        };
        let first = ask();
        while source.reads() < 1 {
            std::thread::yield_now();
        }
        // What was read before it came does not answer these.
        kernel.points.lock().unwrap().push("/a".into());
        let others: Vec<_> = (0..20).map(|_| ask()).collect();
        while source.0.asked.load(SeqCst) < 21 {
            std::thread::yield_now();
        }
        drop(reading);
        first.join().unwrap();
        for other in others {
            assert!(other.join().unwrap());
        }
        assert_eq!(source.reads(), 2);
    }

    #[test]
    fn the_directories_of_the_agent_are_looked_up_once_and_may_be_links() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().canonicalize().unwrap();
        let (root, disk) = (own.join("root"), own.join("disk"));
        let (kernel, source) = fake(&root);
        assert!(
            source
                .read()
                .unwrap()
                .mount_at(&root.join("pods/p/v"))
                .is_none()
        );
        for dir in [&root, &disk, &root.join("plugins")] {
            fs::create_dir(dir).unwrap();
        }
        std::os::unix::fs::symlink(&disk, root.join("pods")).unwrap();
        let points = [disk.join("p/v"), root.join("plugins/d"), own.join("other")];
        kernel.points.lock().unwrap().extend(points);
        let seen = source.read().unwrap();
        for path in [
            root.join("pods/p/v"),
            root.join("plugins/d"),
            own.join("other"),
        ] {
            assert!(seen.mount_at(&path).is_some(), "{}", path.display());
        }
        assert!(seen.mount_at(&root.join("pods/p")).is_none());
        // No path is looked at any more.
        fs::remove_file(root.join("pods")).unwrap();
        assert!(
            source
                .read()
                .unwrap()
                .mount_at(&root.join("pods/p/v"))
                .is_some()
        );
    }

    #[test]
    fn the_kernel_tells_of_mounts() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        use nix::mount::{MntFlags, MsFlags, mount, umount2};
        let dir = tempfile::tempdir().unwrap();
        let point = dir.path().canonicalize().unwrap();
        let source = Source::new(&point);
        let is_there = || source.read().unwrap().mount_at(&point).is_some();
        assert!(!is_there());
        for _ in 0..3 {
            let none: Option<&str> = None;
            mount(Some("tmpfs"), &point, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            let mounted = is_there();
            umount2(&point, MntFlags::MNT_DETACH).unwrap();
            assert!(mounted && !is_there());
        }
        assert!(source.0.kept.lock().unwrap().tells);
    }

    #[test]
    fn the_topmost_of_several_mounts_at_one_point_counts() {
        let mount = |point: &str, fstype: &str| Mount {
            point: point.into(),
            fstype: fstype.to_owned(),
        };
        let table = Table::of(vec![
            mount("/b", "lower"),
            mount("/a", "a"),
            mount("/b", "upper"),
            mount("/b/c", "c"),
        ]);
        let top = |point: &str| table.top(Path::new(point)).map(|m| m.fstype.as_str());
        assert_eq!(
            [top("/a"), top("/b"), top("/b/c")],
            [Some("a"), Some("upper"), Some("c")]
        );
        assert_eq!([top("/"), top("/aa"), top("/c")], [None; 3]);
    }
}

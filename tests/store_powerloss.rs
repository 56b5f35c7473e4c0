//! Power loss: every acknowledged durable commit is there, whichever of the later writes reached the disk.
//!
//! A child process commits through the real store on real sled files while `strace` records its writes,
//! syncs and directory changes; acknowledgements are writes to a file of their own, so the trace orders
//! them. For many moments the disk is then rebuilt as a power loss could have left it: what a finished
//! `fsync` or `fdatasync` covers is there, of later writes any subset, in any order, torn at 512 bytes.
//! `sync_file_range` is no barrier. Names need an `fsync` of their directory. Each such disk is opened
//! the way the agent opens it.
//!
//! A second recording, made with the backend's `sync_data` left out, must fail the same check.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

mod store_support;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use holdfast::core::state::{ContainerRecord, ObjectRecord, Record as _, Transaction};
use holdfast::store::backend::{Backend, BackendError, Op, RawIter};
use holdfast::store::mark::Mark;
use holdfast::store::open::{Outcome, open};
use holdfast::store::{Store, StoreOptions};
use holdfast::types::metrics::Metrics;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use store_support::*;

const CHILD_DIR: &str = "HOLDFAST_POWERLOSS_DIR";
const CHILD_NO_SYNC: &str = "HOLDFAST_POWERLOSS_NO_SYNC";
const COMMITS: u32 = 240;
const PODS: u64 = 12;
const SECTOR: usize = 512;

/// A backend whose `sync` stops at sled's own flush.
struct NoSyncData(Box<dyn Backend>);

impl Backend for NoSyncData {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        self.0.apply(batch)
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.0.flush()
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.0.flush()
    }

    fn iter(&self) -> RawIter<'_> {
        self.0.iter()
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        self.0.size_on_disk()
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        self.0.reopen()
    }

    fn name(&self) -> &'static str {
        self.0.name()
    }
}

/// Does nothing unless the parent test started it.
#[test]
fn child_commits_and_acknowledges() {
    let Ok(dir) = std::env::var(CHILD_DIR) else {
        return;
    };
    let dir = PathBuf::from(dir);
    let mut acks = fs::File::create(dir.join("acks")).unwrap();
    let mut next = 1;
    // Two lives: the second opens what the first closed, with sled's snapshot and recovery writes.
    for end in [COMMITS / 2, COMMITS] {
        let opened = open(&options(&dir.join("state"))).unwrap();
        let backend: Box<dyn Backend> = if std::env::var_os(CHILD_NO_SYNC).is_some() {
            Box::new(NoSyncData(opened.backend))
        } else {
            opened.backend
        };
        let store = Store::start(
            backend,
            opened.loaded,
            StoreOptions::default(),
            Arc::new(FixedClock),
            Metrics::default(),
        )
        .unwrap();
        runtime().block_on(async {
            while next <= end {
                // A relaxed change of some size in between; nobody is told that it is safe.
                let object = ObjectRecord {
                    resource_version: next.to_string(),
                    encrypted: false,
                    data: incompressible(2_500),
                    at: at(1),
                };
                let relaxed = put_any(&format!("ConfigMap/ns/{}", next % 9), object.into_any());
                store.commit(relaxed).await.unwrap();
                let durable: Transaction = pod_transaction(u64::from(next) % PODS, next);
                store.commit(durable).await.unwrap();
                acks.write_all(format!("{next}\n").as_bytes()).unwrap();
                next += 1;
            }
            store.close().await.unwrap();
        });
    }
}

/// A position in the trace.
type Moment = usize;

#[derive(Clone, Debug)]
enum Change {
    Write { offset: u64, data: Vec<u8> },
    Truncate { len: u64 },
}

#[derive(Clone, Debug)]
struct FileChange {
    begun: Moment,
    ended: Moment,
    change: Change,
}

#[derive(Debug, Default)]
struct Inode {
    is_dir: bool,
    changes: Vec<FileChange>,
    /// Begin and end of each barrier.
    barriers: Vec<(Moment, Moment)>,
}

#[derive(Clone, Debug)]
enum NameChange {
    Link { path: PathBuf, inode: usize },
    Unlink { path: PathBuf },
    Rename { from: PathBuf, to: PathBuf },
}

#[derive(Debug, Default)]
struct Trace {
    inodes: Vec<Inode>,
    /// In order, with when they ended.
    names: Vec<(Moment, NameChange)>,
    /// When the acknowledgement of each commit began.
    acks: Vec<(Moment, u32)>,
    /// Barriers of directories, by path.
    dir_barriers: Vec<(PathBuf, Moment, Moment)>,
    /// Files that replaced others by name.
    replaced: usize,
    /// Those of them whose content had not been synced before.
    replaced_unsynced: Vec<PathBuf>,
    end: Moment,
}

/// Runs the child under strace and reads what it did to the files below its directory.
fn record(no_sync: bool) -> Trace {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("state")).unwrap();
    let log = dir.path().join("trace");
    let mut command = Command::new("strace");
    command
        .args(["-f", "-qq", "-xx", "-s", "10000000", "-e", "signal=none", "-o"])
        .arg(&log)
        .args(["-e", "trace=openat,open,creat,close,write,writev,pwrite64,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,dup,dup2,dup3"])
        .arg("--")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "child_commits_and_acknowledges", "--test-threads=1"])
        .env(CHILD_DIR, dir.path());
    if no_sync {
        command.env(CHILD_NO_SYNC, "1");
    }
    let output = command
        .output()
        .expect("this test records system calls: install strace (apt-get install strace)");
    assert!(
        output.status.success(),
        "the recorded child failed: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let text = fs::read_to_string(&log).unwrap();
    let trace = Parser::new(dir.path()).parse(&text);
    assert_eq!(
        trace.acks.len(),
        COMMITS as usize,
        "every acknowledgement is in the trace"
    );
    trace
}

struct Parser {
    root: PathBuf,
    trace: Trace,
    by_path: HashMap<PathBuf, usize>,
    /// Open files: inode, path, position.
    fds: HashMap<i64, (usize, PathBuf, u64)>,
    acks_fd: Option<i64>,
}

impl Parser {
    fn new(root: &Path) -> Self {
        let mut parser = Self {
            root: root.to_owned(),
            trace: Trace::default(),
            by_path: HashMap::new(),
            fds: HashMap::new(),
            acks_fd: None,
        };
        // There before the recording began, and durable.
        parser.inode_of(&root.join("state"), true);
        parser
    }

    fn inode_of(&mut self, path: &Path, is_dir: bool) -> usize {
        if let Some(inode) = self.by_path.get(path) {
            return *inode;
        }
        self.trace.inodes.push(Inode {
            is_dir,
            ..Inode::default()
        });
        let inode = self.trace.inodes.len() - 1;
        self.by_path.insert(path.to_owned(), inode);
        inode
    }

    fn parse(mut self, text: &str) -> Trace {
        let mut unfinished: HashMap<&str, (Moment, &str)> = HashMap::new();
        for (moment, line) in text.lines().enumerate() {
            let Some((pid, rest)) = line.split_once(' ') else {
                continue;
            };
            let rest = rest.trim_start();
            if let Some(begin) = rest.strip_suffix("<unfinished ...>") {
                unfinished.insert(pid, (moment, begin.trim_end()));
                // The kernel may act at once: an acknowledgement counts from here.
            } else if rest.starts_with("<... ") {
                let end = rest.split_once("resumed>").unwrap().1;
                let (begun, begin) = unfinished.remove(pid).unwrap();
                self.call(begun, moment, &format!("{begin}{end}"));
            } else {
                self.call(moment, moment, rest);
            }
            self.trace.end = moment;
        }
        // Calls are noted when they end; order them by when they began.
        for inode in &mut self.trace.inodes {
            inode.changes.sort_by_key(|c| c.begun);
        }
        self.trace
    }

    fn call(&mut self, begun: Moment, ended: Moment, text: &str) {
        let Some((name, rest)) = text.split_once('(') else {
            return;
        };
        let Some((arguments, result)) = rest.rsplit_once(" = ") else {
            return;
        };
        let result: i64 = match result.split(' ').next().unwrap().parse() {
            Ok(result) if result >= 0 => result,
            _ => return,
        };
        let arguments = arguments.trim_end().strip_suffix(')').unwrap_or(arguments);
        let args: Vec<&str> = arguments.split(", ").collect();
        match name {
            "open" | "openat" | "creat" => self.opened(ended, name, &args, result),
            "close" => {
                self.fds.remove(&fd(args[0]));
            }
            "dup" | "dup2" | "dup3" => {
                if let Some(open) = self.fds.get(&fd(args[0])).cloned() {
                    self.fds.insert(result, open);
                }
            }
            "write" => self.write(begun, ended, fd(args[0]), None, unhex(args[1])),
            "pwrite64" => {
                let offset = args[3].parse().unwrap();
                self.write(begun, ended, fd(args[0]), Some(offset), unhex(args[1]));
            }
            "writev" | "pwritev" | "pwritev2" | "fallocate" => {
                assert!(
                    !self.fds.contains_key(&fd(args[0])),
                    "{name} on a file of the store: teach it to this test"
                );
            }
            "ftruncate" => {
                if let Some((inode, _, _)) = self.fds.get(&fd(args[0])) {
                    let len = args[1].parse().unwrap();
                    let change = Change::Truncate { len };
                    self.trace.inodes[*inode].changes.push(FileChange {
                        begun,
                        ended,
                        change,
                    });
                }
            }
            "fsync" | "fdatasync" => {
                if let Some((inode, path, _)) = self.fds.get(&fd(args[0])) {
                    let inode = &mut self.trace.inodes[*inode];
                    inode.barriers.push((begun, ended));
                    if inode.is_dir {
                        self.trace.dir_barriers.push((path.clone(), begun, ended));
                    }
                }
            }
            // Starts writing back and waits for it, but the device may keep it in its cache.
            "sync_file_range" => {}
            "rename" => self.renamed(ended, &unpath(args[0]), &unpath(args[1])),
            "renameat" | "renameat2" => self.renamed(ended, &unpath(args[1]), &unpath(args[3])),
            "unlink" | "rmdir" => self.unlinked(ended, &unpath(args[0])),
            "unlinkat" => {
                let path = unpath(args[1]);
                assert!(path.is_absolute() || !args[0].contains("CWD"), "{text}");
                let path = match self.fds.get(&fd(args[0])) {
                    Some((_, dir, _)) => dir.join(path),
                    None => path,
                };
                self.unlinked(ended, &path);
            }
            "mkdir" => self.made(ended, &unpath(args[0])),
            "mkdirat" => self.made(ended, &unpath(args[1])),
            other => panic!("unexpected call {other}"),
        }
    }

    fn opened(&mut self, ended: Moment, name: &str, args: &[&str], result: i64) {
        let (path, flags) = if name == "openat" {
            (unpath(args[1]), args[2])
        } else {
            (unpath(args[0]), args.get(1).copied().unwrap_or(""))
        };
        self.fds.remove(&result);
        if !path.starts_with(&self.root) {
            return;
        }
        if path == self.root.join("acks") {
            self.acks_fd = Some(result);
            return;
        }
        if !self.by_path.contains_key(&path) {
            assert!(
                flags.contains("O_CREAT") || flags.contains("O_RDONLY"),
                "{path:?} {flags}"
            );
            let inode = self.inode_of(&path, flags.contains("O_DIRECTORY"));
            let path = path.clone();
            self.trace
                .names
                .push((ended, NameChange::Link { path, inode }));
        }
        let inode = self.by_path[&path];
        if flags.contains("O_TRUNC") {
            self.trace.inodes[inode].changes.push(FileChange {
                begun: ended,
                ended,
                change: Change::Truncate { len: 0 },
            });
        }
        self.fds.insert(result, (inode, path, 0));
    }

    fn write(&mut self, begun: Moment, ended: Moment, fd: i64, at: Option<u64>, data: Vec<u8>) {
        if self.acks_fd == Some(fd) && at.is_none() {
            let number = String::from_utf8(data).unwrap().trim().parse().unwrap();
            self.trace.acks.push((begun, number));
            return;
        }
        let Some((inode, _, position)) = self.fds.get_mut(&fd) else {
            return;
        };
        let offset = at.unwrap_or(*position);
        if at.is_none() {
            *position += data.len() as u64;
        }
        self.trace.inodes[*inode].changes.push(FileChange {
            begun,
            ended,
            change: Change::Write { offset, data },
        });
    }

    fn made(&mut self, ended: Moment, path: &Path) {
        if path.starts_with(&self.root) {
            let inode = self.inode_of(path, true);
            let path = path.to_owned();
            self.trace
                .names
                .push((ended, NameChange::Link { path, inode }));
        }
    }

    fn renamed(&mut self, ended: Moment, from: &Path, to: &Path) {
        if !from.starts_with(&self.root) {
            return;
        }
        if from.extension().is_some_and(|end| end == "tmp") {
            let inode = &self.trace.inodes[self.by_path[from]];
            let written = inode.changes.iter().map(|change| change.ended).max();
            let synced = inode.barriers.iter().map(|(begun, _)| *begun).max();
            self.trace.replaced += 1;
            if synced < written {
                self.trace.replaced_unsynced.push(to.to_owned());
            }
        }
        let moved: Vec<PathBuf> = self
            .by_path
            .keys()
            .filter(|path| path.starts_with(from))
            .cloned()
            .collect();
        for path in moved {
            let inode = self.by_path.remove(&path).unwrap();
            let target = join(to, path.strip_prefix(from).unwrap());
            self.by_path.insert(target, inode);
        }
        let (from, to) = (from.to_owned(), to.to_owned());
        self.trace
            .names
            .push((ended, NameChange::Rename { from, to }));
    }

    fn unlinked(&mut self, ended: Moment, path: &Path) {
        if self.by_path.remove(path).is_some() {
            let path = path.to_owned();
            self.trace.names.push((ended, NameChange::Unlink { path }));
        }
    }
}

fn join(to: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() {
        to.to_owned()
    } else {
        to.join(rest)
    }
}

fn fd(text: &str) -> i64 {
    text.parse().unwrap_or(-1)
}

/// A string of `\xNN`, as `strace -xx` prints them.
fn unhex(text: &str) -> Vec<u8> {
    let inner = text.strip_prefix('"').and_then(|t| t.strip_suffix('"'));
    let inner = inner.unwrap_or_else(|| panic!("cut off or no string: {:.80}", text));
    inner
        .as_bytes()
        .chunks(4)
        .map(|c| u8::from_str_radix(std::str::from_utf8(&c[2..]).unwrap(), 16).unwrap())
        .collect()
}

fn unpath(text: &str) -> PathBuf {
    PathBuf::from(String::from_utf8(unhex(text)).unwrap())
}

/// How writes fare that no barrier covers.
#[derive(Clone, Copy, Debug)]
enum Fate {
    AllLost,
    AllKept,
    SomeLost,
    TornPrefix,
    TornSectors,
    Reordered,
    /// All of the database's are lost, those of the high-water mark are kept.
    MarkKept,
}

const FATES: [Fate; 7] = [
    Fate::AllLost,
    Fate::AllKept,
    Fate::SomeLost,
    Fate::TornPrefix,
    Fate::TornSectors,
    Fate::Reordered,
    Fate::MarkKept,
];

/// Lays out in `target` a disk as a loss of power at `cut` could leave it.
fn disk_after(
    trace: &Trace,
    root: &Path,
    cut: Moment,
    fate: Fate,
    rng: &mut StdRng,
    target: &Path,
) {
    let mut names: BTreeMap<PathBuf, usize> = BTreeMap::from([(root.join("state"), 0)]);
    for (ended, change) in trace.names.iter().filter(|(ended, _)| *ended <= cut) {
        let is_durable = parents(change).iter().all(|dir| {
            trace
                .dir_barriers
                .iter()
                .any(|(path, begun, done)| path == dir && ended <= begun && *done <= cut)
        });
        let keep = match fate {
            _ if is_durable => true,
            Fate::AllKept => true,
            Fate::AllLost => false,
            Fate::MarkKept => is_of_mark(change),
            _ => rng.random_bool(0.5),
        };
        if keep {
            apply_name(&mut names, change);
        }
    }
    for (path, inode) in &names {
        let to = target.join(path.strip_prefix(root).unwrap());
        if !names.contains_key(path.parent().unwrap()) && path != &root.join("state") {
            continue;
        }
        let inode = &trace.inodes[*inode];
        if inode.is_dir {
            fs::create_dir_all(&to).unwrap();
        } else {
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            let fate = match fate {
                Fate::MarkKept if path.ends_with("state/mark") => Fate::AllKept,
                Fate::MarkKept => Fate::AllLost,
                other => other,
            };
            fs::write(&to, content_after(inode, cut, fate, rng)).unwrap();
        }
    }
}

fn is_of_mark(change: &NameChange) -> bool {
    matches!(change, NameChange::Link { path, .. } if path.ends_with("state/mark"))
}

fn parents(change: &NameChange) -> Vec<PathBuf> {
    let of = |path: &Path| path.parent().unwrap().to_owned();
    match change {
        NameChange::Link { path, .. } | NameChange::Unlink { path } => vec![of(path)],
        NameChange::Rename { from, to } => vec![of(from), of(to)],
    }
}

fn apply_name(names: &mut BTreeMap<PathBuf, usize>, change: &NameChange) {
    match change {
        NameChange::Link { path, inode } => {
            names.insert(path.clone(), *inode);
        }
        NameChange::Unlink { path } => {
            names.remove(path);
        }
        NameChange::Rename { from, to } => {
            let moved: Vec<PathBuf> = names
                .keys()
                .filter(|path| path.starts_with(from))
                .cloned()
                .collect();
            for path in moved {
                let inode = names.remove(&path).unwrap();
                names.insert(join(to, path.strip_prefix(from).unwrap()), inode);
            }
        }
    }
}

fn content_after(inode: &Inode, cut: Moment, fate: Fate, rng: &mut StdRng) -> Vec<u8> {
    let covered = inode
        .barriers
        .iter()
        .filter(|(_, ended)| *ended <= cut)
        .map(|(begun, _)| *begun)
        .max();
    let mut content = Vec::new();
    let mut loose = Vec::new();
    for change in inode.changes.iter().filter(|c| c.begun <= cut) {
        if covered.is_some_and(|begun| change.ended <= begun) {
            apply_change(&mut content, &change.change, None);
        } else {
            loose.push(&change.change);
        }
    }
    if matches!(fate, Fate::Reordered) {
        for index in (1..loose.len()).rev() {
            loose.swap(index, rng.random_range(0..=index));
        }
    }
    for change in loose {
        match fate {
            Fate::AllLost | Fate::MarkKept => {}
            Fate::AllKept | Fate::Reordered => apply_change(&mut content, change, None),
            Fate::SomeLost => {
                if rng.random_bool(0.5) {
                    apply_change(&mut content, change, None);
                }
            }
            Fate::TornPrefix | Fate::TornSectors => {
                let prefix = matches!(fate, Fate::TornPrefix);
                apply_change(&mut content, change, Some((prefix, rng)));
            }
        }
    }
    content
}

fn apply_change(content: &mut Vec<u8>, change: &Change, torn: Option<(bool, &mut StdRng)>) {
    match change {
        Change::Truncate { len } => {
            if torn.is_none() {
                content.resize(usize::try_from(*len).unwrap(), 0);
            }
        }
        Change::Write { offset, data } => {
            let offset = usize::try_from(*offset).unwrap();
            // Pieces up to the next boundary of a sector of the disk.
            let mut pieces = Vec::new();
            let mut at = 0;
            while at < data.len() {
                let end = data.len().min(at + SECTOR - (offset + at) % SECTOR);
                pieces.push(at..end);
                at = end;
            }
            let kept: Vec<bool> = match torn {
                None => vec![true; pieces.len()],
                Some((true, rng)) => {
                    let kept = rng.random_range(0..=pieces.len());
                    (0..pieces.len()).map(|index| index < kept).collect()
                }
                Some((false, rng)) => pieces.iter().map(|_| rng.random_bool(0.5)).collect(),
            };
            for (piece, _) in pieces.into_iter().zip(kept).filter(|(_, kept)| *kept) {
                let end = offset + piece.end;
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[offset + piece.start..end].copy_from_slice(&data[piece]);
            }
        }
    }
}

#[derive(Debug, Default)]
struct Verdict {
    disks: usize,
    loose_disks: usize,
    /// Disks with a mark that can be read.
    marks: usize,
    lost: Vec<String>,
    disturbed: Vec<String>,
}

/// Cuts the power at many moments and looks for acknowledged commits that are gone.
fn check(trace: &Trace, root: &Path, cuts: usize, seed: u64, enough: usize) -> Verdict {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut verdict = Verdict::default();
    for number in 0..cuts {
        // Spread over the trace, at a random place of each stretch.
        let stretch = trace.end / cuts;
        let cut = number * stretch + rng.random_range(0..stretch.max(1));
        let fate = FATES[number % FATES.len()];
        let dir = tempfile::tempdir().unwrap();
        disk_after(trace, root, cut, fate, &mut rng, dir.path());
        let label = format!("power lost at {cut} of {}, {fate:?}", trace.end);
        verdict.marks += usize::from(Mark::read(&dir.path().join("state/mark")).is_some());
        let opened = open(&options(&dir.path().join("state")))
            .unwrap_or_else(|e| panic!("{label}: the store does not open: {e}"));
        verdict.disks += 1;
        let mut want: BTreeMap<u64, u32> = BTreeMap::new();
        for (_, acknowledged) in trace.acks.iter().filter(|(begun, _)| *begun <= cut) {
            want.insert(u64::from(*acknowledged) % PODS, *acknowledged);
        }
        verdict.loose_disks += usize::from(!matches!(fate, Fate::AllKept));
        for (index, restarts) in &want {
            let key = format!("{}/main", uid(*index));
            let found = opened
                .loaded
                .state
                .record::<ContainerRecord>(&key)
                .map(|record| record.restart_count);
            if found.is_none_or(|found| found < *restarts) {
                verdict.lost.push(format!(
                    "{label}: commit {restarts} was acknowledged, {key} has {found:?}"
                ));
            }
        }
        let calm = matches!(
            opened.report.outcome,
            Outcome::Opened | Outcome::SnapshotsRemoved
        ) && opened.report.new_epoch.is_none();
        if !want.is_empty() && !calm {
            verdict
                .disturbed
                .push(format!("{label}: {:?}", opened.report.outcome));
        }
        if verdict.lost.len() >= enough {
            break;
        }
    }
    verdict
}

/// The directory the child had; paths in the trace begin with it.
fn root_of(trace: &Trace) -> PathBuf {
    let (_, first) = &trace.names[0];
    let path = match first {
        NameChange::Link { path, .. } | NameChange::Unlink { path } => path,
        NameChange::Rename { from, .. } => from,
    };
    path.ancestors()
        .find(|dir| dir.ends_with("state"))
        .and_then(Path::parent)
        .unwrap()
        .to_owned()
}

#[test]
fn every_acknowledged_durable_commit_survives_a_loss_of_power() {
    let started = tokio::time::Instant::now();
    let trace = record(false);
    let recorded = started.elapsed();
    let verdict = check(&trace, &root_of(&trace), 300, 1, usize::MAX);
    println!(
        "{} calls, {} acknowledgements recorded in {recorded:?}; {} disks ({} with unsynced writes at risk, {} with \
         a readable mark) in {:?}: {} commits lost, {} disks opened with more than a log",
        trace.end,
        trace.acks.len(),
        verdict.disks,
        verdict.loose_disks,
        verdict.marks,
        started.elapsed(),
        verdict.lost.len(),
        verdict.disturbed.len()
    );
    assert!(trace.replaced > 0, "the schema is written to a file");
    assert!(
        trace.replaced_unsynced.is_empty(),
        "replaced by files that may be empty after a loss of power: {:?}",
        trace.replaced_unsynced
    );
    assert!(verdict.disks >= 200);
    assert!(
        verdict.marks >= 100,
        "the check of false alarms needs marks, {} disks had one",
        verdict.marks
    );
    assert!(verdict.lost.is_empty(), "{:#?}", verdict.lost);
    assert!(
        verdict.disturbed.is_empty(),
        "a loss of power is not damage: {:#?}",
        verdict.disturbed
    );
}

// Invariant STORE-4.
#[test]
fn the_check_notices_when_the_database_file_is_not_synced() {
    let trace = record(true);
    let verdict = check(&trace, &root_of(&trace), 60, 2, 1);
    println!(
        "without sync_data: lost after {} disks: {:?}",
        verdict.disks,
        verdict.lost.first()
    );
    assert!(
        !verdict.lost.is_empty(),
        "without sync_data acknowledged commits must be lost on some of {} disks",
        verdict.disks
    );
}

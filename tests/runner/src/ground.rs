//! What tests leave on the machine when they are killed: processes, mounts, loop devices, cgroups, network
//! namespaces, bridges and files. Finds and removes it, and touches nothing of anybody else's.
//!
//! Whose something is: a run has a directory `hfrun-<pid>` in the temporary directory, whose file `lock` is locked as
//! long as the run lives, and each of its tests has one below that as its `TMPDIR`. Tests that are run without the
//! runner name their directories and cgroups for their process id (`hf-test-<pid>-<n>`). What belongs to a run or
//! process that lives is left alone.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::unistd::Pid;

/// In the directory of a run: what guards note.
pub(crate) const RECORDS: &str = "records";
/// In the directory of a run: what its tests share.
pub(crate) const SHARED: &str = "shared";
/// In the directory of a run: locked while the run lives.
const LOCK: &str = "lock";
/// A file system in memory, on most machines.
const MEMORY: &str = "/dev/shm";
const RUN_PREFIX: &str = "hfrun-";
/// Directories and cgroups that carry the process id of their test.
const PID_PREFIXES: [&str; 3] = ["hf-test-", "holdfast-ctrd-", "holdfast-envtest-"];
const CGROUPS: &str = "/sys/fs/cgroup";
/// Where the CNI plugins note what they have set up.
const CNI_RESULTS: &str = "/var/lib/cni/results";

/// The directory of a run, whose lock is held until the value is dropped.
#[derive(Debug)]
pub(crate) struct RunDir {
    pub(crate) path: PathBuf,
    /// A second one in memory, for tests to which no disk matters; where there is such a place.
    pub(crate) in_memory: Option<PathBuf>,
    _lock: File,
}

impl RunDir {
    /// Makes one, with a short path since tests make sockets below.
    ///
    /// # Errors
    /// When it cannot be made or locked.
    pub(crate) fn new() -> Result<Self> {
        let path = temp_dir().join(format!("{RUN_PREFIX}{}", std::process::id()));
        let make = || -> io::Result<File> {
            fs::create_dir_all(path.join(SHARED))?;
            let lock = File::create(path.join(LOCK))?;
            lock.try_lock()?;
            Ok(lock)
        };
        let lock =
            make().with_context(|| format!("make the run's directory {}", path.display()))?;
        let in_memory = path
            .file_name()
            .map(|name| Path::new(MEMORY).join(name))
            .filter(|_| is_memory(Path::new(MEMORY)));
        if let Some(dir) = &in_memory {
            fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        }
        Ok(Self {
            path,
            in_memory,
            _lock: lock,
        })
    }
}

/// Removes what runs and test processes left that do not live any more. Returns what was found.
pub(crate) fn sweep() -> Vec<String> {
    let mut found = Vec::new();
    let temp = temp_dir();
    let mut dead: BTreeSet<PathBuf> = BTreeSet::new();
    for place in [temp.as_path(), Path::new(MEMORY)] {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let gone = if name.starts_with(RUN_PREFIX) {
                !is_run_alive(&entry.path(), &name)
            } else {
                owner(&name).is_some_and(|pid| !lives(pid))
            };
            if gone {
                dead.insert(entry.path());
            }
        }
    }
    // A process may have outlived its directory.
    for pid in processes() {
        dead.extend(named_directories(&command_line(pid), &temp));
    }
    for dir in &dead {
        found.push(format!("directory {}", dir.display()));
        found.extend(clear(dir));
    }
    found.extend(clear_cgroups());
    found
}

/// Removes a directory and all that lives in it or on it. Returns what there was besides files.
pub(crate) fn clear(dir: &Path) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    if fs::remove_dir(dir).is_ok() {
        return found;
    }
    // Agents first, which would start again what is removed; a runtime is needed to end its containers in order.
    let runtimes: Vec<PathBuf> = containerd_dirs(dir);
    found.extend(kill_all(dir, |line| !is_runtime(line)));
    for runtime in &runtimes {
        let mut command = Command::new(hack("containerd.sh"));
        let stopped = command
            .arg("stop")
            .arg(runtime)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status();
        if !stopped.is_ok_and(|status| status.success()) {
            found.push(format!("containerd in {} does not stop", runtime.display()));
        }
    }
    found.extend(kill_all(dir, |_| true));
    found.extend(unmount_below(dir));
    found.extend(detach_loops(dir));
    found.extend(remove_networks(dir));
    if let Err(error) = fs::remove_dir_all(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        found.push(format!("cannot remove {}: {error}", dir.display()));
    }
    found
}

/// The directories of private containerds, at any depth that tests use.
fn containerd_dirs(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![(dir.to_owned(), 0)];
    while let Some((at, depth)) = open.pop() {
        if at.join("config.toml").exists() && at.join("containerd.log").exists() {
            found.push(at);
        } else if depth < 3 {
            let entries = fs::read_dir(&at).into_iter().flatten().flatten();
            open.extend(
                entries
                    .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                    .map(|entry| (entry.path(), depth + 1)),
            );
        }
    }
    found
}

fn is_runtime(command_line: &str) -> bool {
    let program = command_line.split(' ').next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default();
    name.starts_with("containerd")
}

/// Kills the processes of a directory that are chosen by their command line. Returns them.
fn kill_all(dir: &Path, chosen: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let begin = now();
    loop {
        let living: Vec<i32> = processes()
            .into_iter()
            .filter(|&pid| pid != own_pid() && belongs(pid, dir) && chosen(&command_line(pid)))
            .collect();
        if living.is_empty() || begin.elapsed() > Duration::from_secs(20) {
            return found;
        }
        for pid in living {
            let what = format!("process {pid}: {}", command_line(pid));
            if !found.contains(&what) {
                found.push(what);
            }
            kill_hard(pid);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process was started with the directory as its `TMPDIR`, names it, or is in it.
fn belongs(pid: i32, dir: &Path) -> bool {
    let proc = Path::new("/proc").join(pid.to_string());
    let below = |link: &str| fs::read_link(proc.join(link)).is_ok_and(|path| path.starts_with(dir));
    let text = dir.to_string_lossy();
    let environment = fs::read(proc.join("environ")).unwrap_or_default();
    let marked = environment
        .split(|byte| *byte == 0)
        .filter_map(|variable| variable.strip_prefix(b"TMPDIR="))
        .any(|value| Path::new(&*String::from_utf8_lossy(value)).starts_with(dir));
    // A zombie has neither; whoever started it waits for it.
    marked || names(&command_line(pid), &text) || below("cwd") || below("root")
}

/// Whether a command line names a path at or below `dir`.
fn names(command_line: &str, dir: &str) -> bool {
    command_line.match_indices(dir).any(|(at, _)| {
        let next = command_line[at + dir.len()..].chars().next();
        next.is_none_or(|c| !(c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.'))
    })
}

/// Directories of test processes that are gone, as they are named in a command line.
fn named_directories(command_line: &str, temp: &Path) -> Vec<PathBuf> {
    let start = format!("{}/", temp.display());
    command_line
        .match_indices(&start)
        .filter_map(|(at, _)| {
            let rest = &command_line[at + start.len()..];
            let name = rest.split(['/', ' ', ',', ':', '=']).next()?;
            owner(name).filter(|pid| !lives(*pid))?;
            Some(temp.join(name))
        })
        .collect()
}

/// The process id in a name such as `hf-test-<pid>-<n>`.
fn owner(name: &str) -> Option<i32> {
    let rest = PID_PREFIXES
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))?;
    rest.split('-').next()?.parse().ok()
}

fn unmount_below(dir: &Path) -> Vec<String> {
    // Bytes: one mount point on the machine that is no UTF-8 must not hide all others.
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mut points: Vec<PathBuf> = table
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(|point| PathBuf::from(OsString::from_vec(unescape(point))))
        .filter(|point| point.starts_with(dir))
        .collect();
    points.sort();
    let mut found = Vec::new();
    for point in points.iter().rev() {
        let error = umount2(point, MntFlags::MNT_DETACH).err();
        found.push(match error {
            None => format!("mount {}", point.display()),
            Some(error) => format!("mount {}, which stays: {error}", point.display()),
        });
    }
    found
}

/// The kernel writes a space in a mount table as `\040`.
fn unescape(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((first, tail)) = rest.split_first() {
        match rest.strip_prefix(b"\\040") {
            Some(after) => {
                out.push(b' ');
                rest = after;
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

fn detach_loops(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        if !Path::new(file.trim_end()).starts_with(dir) {
            continue;
        }
        let device = Path::new("/dev").join(entry.file_name());
        let detached = Command::new("losetup").arg("-d").arg(&device).status();
        found.push(format!("loop device {}", device.display()));
        if !detached.is_ok_and(|status| status.success()) {
            found.push(format!("{} does not detach", device.display()));
        }
    }
    found
}

/// Bridges that `hack/containerd.sh` made for a directory, and the network namespaces on them.
fn remove_networks(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten()
    {
        let alias = fs::read_to_string(entry.path().join("ifalias")).unwrap_or_default();
        let alias = alias.trim_end();
        if alias.is_empty() || !Path::new(alias).starts_with(dir) {
            continue;
        }
        let bridge = entry.file_name().to_string_lossy().into_owned();
        found.push(format!("bridge {bridge}"));
        for (file, space) in spaces_on(&bridge) {
            found.push(format!("network namespace {}", space.display()));
            if umount2(&space, MntFlags::MNT_DETACH).is_err() {
                found.push(format!("{} was not mounted", space.display()));
            }
            drop(fs::remove_file(&space));
            drop(fs::remove_file(&file));
        }
        if let Err(error) = Command::new("ip").args(["link", "del", &bridge]).status() {
            found.push(format!("cannot delete {bridge}: {error}"));
        }
    }
    found
}

/// What the CNI plugins have noted of a network: their files, and the namespaces in those.
fn spaces_on(bridge: &str) -> Vec<(PathBuf, PathBuf)> {
    let prefix = format!("{bridge}-");
    let entries = fs::read_dir(CNI_RESULTS).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        .filter_map(|entry| {
            let text = fs::read_to_string(entry.path()).ok()?;
            let at = text.find("/run/netns/cni-")?;
            let name = text[at..].split('"').next()?;
            Some((entry.path(), PathBuf::from(name)))
        })
        .collect()
}

/// Removes the cgroups of tests that are gone, and ends what is in them.
pub(crate) fn clear_cgroups() -> Vec<String> {
    clear_cgroups_of(|pid| !lives(pid))
}

/// Removes the cgroups of those tests that are chosen by their process id, and ends what is in them.
pub(crate) fn clear_cgroups_of(chosen: impl Fn(i32) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let top = Path::new(CGROUPS);
    let hierarchies = fs::read_dir(top).into_iter().flatten().flatten();
    let mut roots = vec![top.to_owned()];
    roots.extend(hierarchies.map(|entry| entry.path()));
    for root in roots {
        for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().is_ok_and(|kind| kind.is_dir())
                && owner(&name).is_some_and(&chosen)
            {
                found.push(format!("cgroup {}", entry.path().display()));
                if let Err(error) = remove_cgroup(&entry.path()) {
                    found.push(format!("{} stays: {error}", entry.path().display()));
                }
            }
        }
    }
    found
}

fn remove_cgroup(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove_cgroup(&entry.path())?;
        }
    }
    let begin = now();
    loop {
        let members = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        for pid in members.lines().filter_map(|line| line.parse().ok()) {
            kill_hard(pid);
        }
        match fs::remove_dir(dir) {
            Err(error)
                if error.raw_os_error() == Some(nix::libc::EBUSY)
                    && begin.elapsed() < Duration::from_secs(10) =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            result => return result,
        }
    }
}

/// All processes, kernel threads included.
fn processes() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// The processes below this one, zombies left out.
pub(crate) fn descendants() -> Vec<i32> {
    let mut parents: Vec<(i32, i32)> = Vec::new();
    for pid in processes() {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name in parentheses may hold anything.
        let Some((_, rest)) = stat.rsplit_once(") ") else {
            continue;
        };
        let mut fields = rest.split(' ');
        let (Some(state), Some(parent)) = (fields.next(), fields.next()) else {
            continue;
        };
        if let Ok(parent) = parent.parse()
            && state != "Z"
        {
            parents.push((pid, parent));
        }
    }
    let mut below = vec![own_pid()];
    let mut next = 0;
    while let Some(&parent) = below.get(next) {
        below.extend(
            parents
                .iter()
                .filter(|(_, p)| *p == parent)
                .map(|(pid, _)| *pid),
        );
        next += 1;
    }
    below.split_off(1)
}

/// A process's program and arguments.
pub(crate) fn command_line(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    text.trim_end().to_owned()
}

/// Sends SIGKILL; a process that is gone already is no error.
pub(crate) fn kill_hard(pid: i32) {
    if kill(Pid::from_raw(pid), Signal::SIGKILL) == Err(nix::errno::Errno::EPERM) {
        eprintln!("process {pid} is not ours to end: {}", command_line(pid));
    }
}

fn lives(pid: i32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or_default()
}

fn is_run_alive(run: &Path, name: &str) -> bool {
    match File::open(run.join(LOCK)) {
        Ok(lock) => lock.try_lock().is_err(),
        // Not made yet, or removed already.
        Err(_) => name
            .strip_prefix(RUN_PREFIX)
            .and_then(|pid| pid.parse().ok())
            .is_some_and(lives),
    }
}

fn is_memory(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|system| system.filesystem_type() == TMPFS_MAGIC)
}

fn temp_dir() -> PathBuf {
    std::env::temp_dir()
}

#[expect(
    clippy::disallowed_methods,
    reason = "how long to wait for processes of the machine"
)]
fn now() -> Instant {
    Instant::now()
}

/// A script of the project.
pub(crate) fn hack(script: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../hack")
        .join(script)
}

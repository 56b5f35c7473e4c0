//! The files that belong to attempts of containers: who makes, keeps, restores and removes them.
//!
//! - The **message file** `<pod dir>/containers/<name>/message`, mounted at `terminationMessagePath`. A container has one,
//!   however often it restarts. [`prepare_message`] makes it before an attempt is created, [`clear_message`] empties it before
//!   the attempt is started.
//! - The **log** `<pod log dir>/<name>/<attempt>.log` and its rotated files, which the runtime and the rotator write.
//! - The **link** to the log in `/var/log/containers`, by which log collectors find pod, namespace and container.
//!
//! [`PodFiles::of`] says, purely, what a pod may have of them, by what the runtime lists and what is recorded.
//! [`tidy`] compares that with the disk: it restores links and removes what is of attempts that the runtime no longer has and that
//! no recorded end or start is about. Earlier versions had a message file per attempt, named by its number in eight
//! hexadecimal digits: those are removed with their containers.
//!
//! **Invariant:** the message of an attempt is recorded before the file is emptied for the next one: the start intent,
//! which is durable, is of the record that has the last end, and the file is emptied after it.
//!
//! **Invariant:** as in [`logs`], nothing below the roots of the logs is followed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::logs::{self, LogError, error, open_below, remove_file};
use super::node_context::{NodeContext, is_path_component};
use crate::core::container_history::Records;
use crate::core::state::ContainerRecord;
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use crate::types::{ContainerId, PodUid};

/// Name of the message file in the container's directory.
const MESSAGE: &str = "message";
/// Length of the names that earlier versions gave to message files.
const OLD_NAME: usize = 8;
/// Longest file name of a link; upstream cuts what comes before the id.
const MAX_LINK_NAME: usize = 251;

/// The pod that files belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// UID.
    pub uid: PodUid,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Owner {
    /// The pod of a status.
    pub fn of(status: &PodStatus) -> Self {
        Self {
            uid: status.uid.clone(),
            namespace: status.namespace.clone(),
            name: status.name.clone(),
        }
    }

    fn log_dir(&self, ctx: &NodeContext) -> PathBuf {
        ctx.pod_log_dir(&self.namespace, &self.name, &self.uid)
    }

    fn link(&self, container: &str, id: &ContainerId) -> String {
        link_name(&self.name, &self.namespace, container, id)
    }
}

/// Log file below the pod's log directory; upstream's `BuildContainerLogsPath`.
pub fn log_path(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

/// Returns the path of a container's termination message, which is the same for every attempt.
pub fn message_path(ctx: &NodeContext, uid: &PodUid, container: &str) -> PathBuf {
    ctx.container_dir(uid, container).join(MESSAGE)
}

/// Makes the message file, if need be. What is in it stays: it may be of the attempt before. Blocking.
///
/// # Errors
/// When it cannot be made, or something that is not a file is in its place.
pub fn prepare_message(path: &Path) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o750))?;
    }
    open_message(path).map(drop)
}

/// Empties the message file for an attempt whose start is recorded. When a start of the very same attempt was recorded
/// before, at `intended`, the agent may have died after it: what was written since is kept. Blocking.
///
/// # Errors
/// As [`prepare_message`].
pub fn clear_message(path: &Path, intended: Option<SystemTime>) -> io::Result<()> {
    prepare_message(path)?;
    let file = open_message(path)?;
    let written = file.metadata()?.modified()?;
    if intended.is_some_and(|intended| written > intended) {
        return Ok(());
    }
    file.set_len(0)
}

fn open_message(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(flags.bits())
        .open(path)?;
    if !file.metadata()?.is_file() {
        let text = "something that is not a file is in its place";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    file.set_permissions(fs::Permissions::from_mode(0o666))?;
    Ok(file)
}

/// Name of a container's link; upstream's `LogSymlink`.
pub fn link_name(pod: &str, namespace: &str, container: &str, id: &ContainerId) -> String {
    let suffix = format!("-{id}.log");
    let mut name = format!("{pod}_{namespace}_{container}");
    let mut end = name.len().min(MAX_LINK_NAME.saturating_sub(suffix.len()));
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.truncate(end);
    name + &suffix
}

/// Links a container's log by name. A link that is there already is replaced.
///
/// # Errors
/// When it cannot be made. A container runs without it.
pub fn link(
    ctx: &NodeContext,
    owner: &Owner,
    container: &str,
    id: &ContainerId,
    attempt: u32,
) -> Result<PathBuf, LogError> {
    let target = owner.log_dir(ctx).join(log_path(container, attempt));
    make_link(ctx, &owner.link(container, id), &target)
}

fn make_link(ctx: &NodeContext, name: &str, target: &Path) -> Result<PathBuf, LogError> {
    let link = ctx.container_log_root.join(name);
    fs::create_dir_all(&ctx.container_log_root)
        .map_err(error("create log directory", &ctx.container_log_root))?;
    match symlink(target, &link) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            if fs::read_link(&link).is_ok_and(|t| t == target) {
                return Ok(link);
            }
            fs::remove_file(&link).map_err(error("replace log link", &link))?;
            symlink(target, &link).map_err(error("create log link", &link))?;
        }
        other => other.map_err(error("create log link", &link))?,
    }
    Ok(link)
}

/// Removes the files of a container that the runtime no longer has: link, log with rotated files, and the message file if it
/// was this attempt's own. What is not there counts as removed.
///
/// # Errors
/// When something cannot be removed.
pub fn remove(
    ctx: &NodeContext,
    owner: &Owner,
    container: &ContainerStatus,
) -> Result<(), LogError> {
    let link = owner.link(&container.name, &container.id);
    remove_file(&ctx.container_log_root.join(link))?;
    let log = Path::new(&container.log_path);
    if let (Ok(below), Some(name)) = (log.strip_prefix(&ctx.pod_log_root), log.file_name()) {
        let below = below.parent().unwrap_or(Path::new(""));
        // Rotated files are `<N>.log.<time>[.gz]` beside it.
        let is_of_log = |file: &[u8]| {
            let rest = file.strip_prefix(name.as_bytes());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
        };
        remove_logs(ctx, below, is_of_log)?;
    }
    if is_path_component(&container.name) {
        let dir = ctx.container_dir(&owner.uid, &container.name);
        remove_file(&dir.join(format!("{:08x}", container.attempt)))?;
    }
    Ok(())
}

/// Removes the files of a directory below the root of the logs that `is_old` names; returns how many.
fn remove_logs(
    ctx: &NodeContext,
    below: &Path,
    is_old: impl Fn(&[u8]) -> bool,
) -> Result<usize, LogError> {
    let dir = ctx.pod_log_root.join(below);
    let opened = match open_below(&ctx.pod_log_root, Some(below)) {
        Err(Errno::ENOENT) => return Ok(0),
        other => other.map_err(error("open log directory", &dir))?,
    };
    let copy = opened
        .try_clone()
        .map_err(error("list log directory", &dir))?;
    let mut entries = Dir::from_fd(copy).map_err(error("list log directory", &dir))?;
    let mut removed = 0;
    for entry in entries.iter() {
        let entry = entry.map_err(error("list log directory", &dir))?;
        let file = entry.file_name();
        if is_old(file.to_bytes()) {
            match unlinkat(&opened, file, UnlinkatFlags::NoRemoveDir) {
                Ok(()) => removed += 1,
                Err(Errno::ENOENT) => {}
                Err(e) => return Err(error("remove log in", &dir)(e)),
            }
        }
    }
    Ok(removed)
}

/// Attempts of one container that files may be of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Attempts {
    /// In the runtime.
    listed: BTreeSet<u32>,
    /// Of the recorded start and the recorded end: their logs are served.
    recorded: BTreeSet<u32>,
    /// No older than any that is known. One that is made right now is newer.
    newest: u32,
    /// A start is recorded whose container the runtime did not list and whose end is not recorded.
    is_open: bool,
}

impl Attempts {
    fn add(&mut self, record: &ContainerRecord) {
        let ends = record.last_exit.iter().map(|exit| exit.attempt);
        let starts = record.intent.iter().map(|intent| intent.attempt);
        self.recorded.extend(ends.chain(starts));
        let known = self.recorded.last().copied().unwrap_or(0);
        self.newest = self.newest.max(record.restart_count).max(known);
    }

    /// Returns whether a file in the log directory belongs to an attempt that nothing needs.
    fn is_old_log(&self, file: &[u8]) -> bool {
        let Some(attempt) = attempt_of_log(file) else {
            return false;
        };
        let is_kept = self.listed.contains(&attempt) || self.recorded.contains(&attempt);
        attempt < self.newest && !is_kept
    }

    /// Returns whether a file in the container's directory is the message of an attempt that the runtime does not list.
    fn is_old_message(&self, file: &[u8]) -> bool {
        let attempt = std::str::from_utf8(file)
            .ok()
            .filter(|name| name.len() == OLD_NAME)
            .and_then(|name| u32::from_str_radix(name, 16).ok());
        attempt.is_some_and(|attempt| !self.is_open && !self.listed.contains(&attempt))
    }
}

/// The number in the name of a log or of a rotated one.
fn attempt_of_log(file: &[u8]) -> Option<u32> {
    let (number, rest) = std::str::from_utf8(file).ok()?.split_once('.')?;
    let is_log = rest == "log" || rest.starts_with("log.");
    number.parse().ok().filter(|_| is_log)
}

/// Files that one pod may have on disk for the attempts of its containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFiles {
    owner: Owner,
    /// Targets of the links, by their names.
    links: BTreeMap<String, PathBuf>,
    /// Containers whose links are not touched.
    present: BTreeSet<ContainerId>,
    containers: BTreeMap<String, Attempts>,
}

impl PodFiles {
    /// Returns the files that a pod may have, by its runtime status and its records. `None` if the status does not name
    /// the pod.
    pub fn of(ctx: &NodeContext, status: &PodStatus, records: &Records<'_>) -> Option<Self> {
        if status.name.is_empty() || status.uid.as_str().is_empty() {
            return None;
        }
        let mut files = Self {
            owner: Owner::of(status),
            links: BTreeMap::new(),
            present: status.containers.iter().map(|c| c.id.clone()).collect(),
            containers: BTreeMap::new(),
        };
        for container in &status.containers {
            let attempts = files.containers.entry(container.name.clone()).or_default();
            attempts.listed.insert(container.attempt);
            attempts.newest = attempts.newest.max(container.attempt);
            let target = logs::file_of(&ctx.pod_log_root, status, container);
            let has_run = container.state != ContainerState::Created;
            if has_run && target.starts_with(&ctx.pod_log_root) {
                let name = files.owner.link(&container.name, &container.id);
                files.links.insert(name, target);
            }
        }
        for name in records.names() {
            let Some(record) = records.get(name) else {
                continue;
            };
            let attempts = files.containers.entry(name.to_owned()).or_default();
            attempts.add(record);
            let ended = record.last_exit.as_ref().map(|exit| &exit.container_id);
            let open = record.intent.iter().map(|intent| &intent.container_id);
            for id in open.filter(|id| Some(*id) != ended) {
                attempts.is_open |= !status.containers.iter().any(|c| c.id == *id);
                files.present.insert(id.clone());
            }
        }
        files.containers.retain(|name, _| is_path_component(name));
        Some(files)
    }

    /// The pod.
    pub fn uid(&self) -> &PodUid {
        &self.owner.uid
    }

    /// Returns whether every recorded start has a container that the runtime lists, or a recorded exit. If not, some
    /// files may have to be removed later.
    pub fn is_settled(&self) -> bool {
        !self.containers.values().any(|attempts| attempts.is_open)
    }

    /// Returns whether a link with this name before the ID can belong to the pod; the name may be cut.
    fn may_have_link(&self, stem: &str) -> bool {
        let begin = format!("{}_{}_", self.owner.name, self.owner.namespace);
        stem.starts_with(&begin) || begin.starts_with(stem)
    }

    /// Returns whether a path is the log of a known attempt. An attempt that began after the status was requested is
    /// unknown.
    fn knows_log(&self, ctx: &NodeContext, path: &Path) -> bool {
        let below = path.strip_prefix(self.owner.log_dir(ctx)).ok();
        let parts = below.and_then(|below| Some((below.parent()?.to_str()?, below.file_name()?)));
        parts.is_some_and(|(container, file)| {
            let attempts = self.containers.get(container);
            let attempt = attempt_of_log(file.as_bytes());
            attempts
                .zip(attempt)
                .is_some_and(|(known, attempt)| attempt <= known.newest)
        })
    }

    /// Removes logs and message files of attempts that nobody needs; returns how many.
    fn remove_old(&self, ctx: &NodeContext) -> Result<usize, LogError> {
        let logs = self.owner.log_dir(ctx);
        let mut removed = 0;
        for (name, attempts) in &self.containers {
            if let Ok(below) = logs.join(name).strip_prefix(&ctx.pod_log_root) {
                removed += remove_logs(ctx, below, |file| attempts.is_old_log(file))?;
            }
            let dir = ctx.container_dir(&self.owner.uid, name);
            for file in names_in(&dir)? {
                if attempts.is_old_message(file.as_bytes()) {
                    remove_file(&dir.join(file))?;
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }
}

/// Result of [`tidy`].
#[derive(Debug, Default)]
pub struct Tidied {
    /// Links that were restored.
    pub restored: usize,
    /// Files and links that were removed.
    pub removed: usize,
    /// Errors. Everything else was done.
    pub errors: Vec<LogError>,
}

impl Tidied {
    fn note(&mut self, done: Result<(usize, usize), LogError>) {
        match done {
            Ok((restored, removed)) => {
                self.restored += restored;
                self.removed += removed;
            }
            Err(error) => self.errors.push(error),
        }
    }
}

/// Scope of [`tidy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The links: one directory, however many pods there are.
    Links,
    /// The links, and the directories of each container.
    Everything,
}

/// Brings what is on disk of pods in line with what they may have: links that are missing are made, and what is of attempts that
/// are gone is removed. Blocking.
pub fn tidy(ctx: &NodeContext, pods: &[PodFiles], extent: Extent) -> Tidied {
    let mut tidied = Tidied::default();
    let found = match names_in(&ctx.container_log_root) {
        Ok(found) => found,
        Err(error) => {
            tidied.errors.push(error);
            return tidied;
        }
    };
    for (name, target) in pods.iter().flat_map(|pod| &pod.links) {
        let is_lost = !found.contains(name) && fs::symlink_metadata(target).is_ok();
        if is_lost {
            tidied.note(make_link(ctx, name, target).map(|_| (1, 0)));
        }
    }
    for name in found.iter().filter(|name| is_old_link(ctx, pods, name)) {
        let link = ctx.container_log_root.join(name);
        tidied.note(remove_file(&link).map(|()| (0, 1)));
    }
    if extent == Extent::Everything {
        for pod in pods {
            tidied.note(pod.remove_old(ctx).map(|removed| (0, removed)));
        }
    }
    tidied
}

/// Returns whether a link leads to the logs of one of the pods and belongs to a container that is gone.
fn is_old_link(ctx: &NodeContext, pods: &[PodFiles], name: &str) -> bool {
    let parts = name.strip_suffix(".log").and_then(|n| n.rsplit_once('-'));
    let Some((stem, id)) = parts else {
        return false;
    };
    let id = ContainerId::new(id);
    if pods.iter().any(|pod| pod.present.contains(&id)) {
        return false;
    }
    let mut owners = pods.iter().filter(|pod| pod.may_have_link(stem)).peekable();
    // A link is read only when it may be of one of the pods.
    owners.peek().is_some()
        && fs::read_link(ctx.container_log_root.join(name))
            .is_ok_and(|target| owners.any(|pod| pod.knows_log(ctx, &target)))
}

/// Returns the time of the last change of the directory of links; `None` if it does not exist. Blocking.
///
/// # Errors
/// When its metadata cannot be read.
pub fn links_changed(ctx: &NodeContext) -> Result<Option<SystemTime>, LogError> {
    let root = &ctx.container_log_root;
    match fs::metadata(root).and_then(|found| found.modified()) {
        Ok(at) => Ok(Some(at)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(error("look at log directory", root)(e)),
    }
}

/// Removes links whose log is gone; returns how many.
///
/// # Errors
/// When the directory cannot be listed or a link not removed.
pub fn remove_dead_links(ctx: &NodeContext) -> Result<usize, LogError> {
    let mut removed = 0;
    for name in names_in(&ctx.container_log_root)? {
        let link = ctx.container_log_root.join(name);
        let Ok(target) = fs::read_link(&link) else {
            continue;
        };
        let is_dead = || fs::metadata(&link).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        // A log the runtime has not opened yet has its directory.
        let is_starting = || target.parent().is_some_and(Path::exists);
        if target.starts_with(&ctx.pod_log_root) && is_dead() && !is_starting() {
            remove_file(&link)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Names in a directory, of those that are text; none when it is not there.
fn names_in(dir: &Path) -> Result<BTreeSet<String>, LogError> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        other => other.map_err(error("list directory", dir))?,
    };
    let mut names = BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(error("list directory", dir))?.file_name();
        names.extend(name.into_string().ok());
    }
    Ok(names)
}

#[cfg(test)]
#[path = "attempt_files_tests.rs"]
mod tests;

//! File systems on devices, bind mounts, and taking both away: what plugins for storage of this node and of
//! elsewhere share.
//!
//! In: a device or a directory, and where it is to appear. Out: the mount, made by the system's tools where a
//! file system's options have to be understood, else by the kernel.
//!
//! **Invariant:** a device is formatted only when it can be read and `blkid` finds nothing on it: no file system,
//! no partition table, no member of a RAID, volume group or encrypted disk, nothing it is in doubt about.
//!
//! **Invariant:** what is mounted is asked of the mount table, by names alone: a dead server behind a mount point
//! is never looked at. What is taken away is a mount, then an empty directory or a link, never a file.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::command::{self, Call, CommandError, Tools};
use super::mounts::{self, Mount, Table};
use super::remote::RemoteError;
use crate::types::blocking;

/// File system that an empty device gets when nothing else is asked for.
const DEFAULT_FS: &str = "ext4";
/// Longest wait for an unmount by force, which goes on.
const FORCE: Duration = Duration::from_secs(10);
/// Looking at a large disk and repairing it may take long.
const FSCK_PATIENCE: Duration = Duration::from_secs(3600);
const MKFS_PATIENCE: Duration = Duration::from_secs(3600);
/// Exit code of `blkid` that has found nothing.
const NOTHING_FOUND: i32 = 2;
/// Bit of the exit code of `fsck` that has left errors.
const UNCORRECTED: i32 = 4;

/// All mounts of this mount namespace.
pub(super) fn table() -> io::Result<Vec<Mount>> {
    Ok(Table::read()?.into_all())
}

/// Returns the topmost mount exactly at `path`. Only the parents of the path are accessed, not the path itself.
pub(super) fn mounted_at(path: &Path) -> io::Result<Option<Mount>> {
    mounts::at(path)
}

/// Runs file system work on a thread of its own; it goes on when the future is dropped.
pub(super) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RemoteError> + Send + 'static,
) -> Result<T, RemoteError> {
    match blocking::run(work).await {
        Ok(result) => result,
        Err(error) => Err(RemoteError::Uncertain(format!(
            "finish work on a volume: {error}"
        ))),
    }
}

/// A step on a path that failed.
pub(super) fn failed(verb: &str, path: &Path) -> impl FnOnce(io::Error) -> RemoteError {
    let what = format!("{verb} {}", path.display());
    move |error| RemoteError::Failed(format!("{what}: {error}"))
}

/// A tool that failed; `Uncertain` when it may have done its work all the same.
pub(super) fn tool_failed(what: &str, error: &CommandError) -> RemoteError {
    let text = format!("{what}: {error}");
    match error {
        // A tool that a signal has ended may have made its mount before.
        CommandError::Late { .. }
        | CommandError::StillRuns { .. }
        | CommandError::Failed { code: None, .. } => RemoteError::Uncertain(text),
        _ => RemoteError::Failed(text),
    }
}

/// The error of a step that failed after another one had taken effect: that one is to be undone.
pub(super) fn begun(error: RemoteError) -> RemoteError {
    match error {
        RemoteError::Failed(text) => RemoteError::Uncertain(text),
        other => other,
    }
}

/// Joins mount options as upstream's `JoinMountOptions`: each once, in order of their letters.
///
/// # Errors
/// One that is empty, begins with `-`, or holds a line feed or NUL.
pub(super) fn join_options(own: &[String], more: &[&str]) -> Result<String, RemoteError> {
    let mut all: Vec<&str> = own
        .iter()
        .map(String::as_str)
        .chain(more.iter().copied())
        .collect();
    for option in &all {
        if let Some(why) = command::refused(option) {
            return Err(RemoteError::Failed(format!(
                "mount option {option:?} cannot be used: {why}"
            )));
        }
    }
    all.sort_unstable();
    all.dedup();
    Ok(all.join(","))
}

/// Makes a directory for a mount; its parents too. One that is there keeps its mode.
pub(super) fn make_mount_point(path: &Path) -> Result<(), RemoteError> {
    let make = || {
        match fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => return Ok(()),
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "something that is not a directory is in its place",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        fs::create_dir_all(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o750))
    };
    make().map_err(failed("create mount point", path))
}

/// Makes a directory appear at another one. `Ok` when it does already. Blocking.
pub(super) fn bind(from: &Path, at: &Path, read_only: bool) -> Result<(), RemoteError> {
    let wanted = fs::metadata(from).map_err(failed("look at", from))?;
    if let Some(found) = mounted_at(at).map_err(failed("look for mount at", at))? {
        let there = fs::metadata(at).map_err(failed("look at", at))?;
        if (there.dev(), there.ino()) != (wanted.dev(), wanted.ino()) {
            return Err(RemoteError::Failed(format!(
                "mount {} at {}: {} is mounted there already; unmount it",
                from.display(),
                at.display(),
                found.source
            )));
        }
        return if read_only && !found.read_only {
            remount_read_only(at)
        } else {
            Ok(())
        };
    }
    make_mount_point(at)?;
    let none: Option<&str> = None;
    mount(Some(from), at, none, MsFlags::MS_BIND, none)
        .map_err(io::Error::from)
        .map_err(failed(&format!("bind mount {} at", from.display()), at))?;
    if read_only && let Err(error) = remount_read_only(at) {
        // Nobody may write to it meanwhile.
        umount2(at, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).map_err(|why| {
            let at = at.display();
            RemoteError::Uncertain(format!(
                "unmount what could not be made read-only at {at}: {why}"
            ))
        })?;
        return Err(error);
    }
    Ok(())
}

/// The kernel takes `ro` for a bind mount in a second step alone, which must keep the flags that there are.
fn remount_read_only(at: &Path) -> Result<(), RemoteError> {
    let error = failed("make read-only the mount at", at);
    let remount = || {
        let now = statvfs(at)?.flags();
        let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        for (is, keep) in [
            (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
            (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
            (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
            (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
            (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
            (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
        ] {
            if now.contains(is) {
                flags |= keep;
            }
        }
        let none: Option<&str> = None;
        mount(none, at, none, flags, none)
    };
    remount().map_err(io::Error::from).map_err(error)
}

/// Unmounts what is mounted at `path` by `umount`, and removes the empty directory. `Ok` when there is nothing.
/// Nothing behind the mount is looked at, nor is its server told. Copies of mounts elsewhere that have come into it
/// by propagation go with it.
///
/// # Errors
/// It is busy, or does not answer: `about` names whose it is. Something is mounted over it or in it, by somebody
/// else: then nothing is unmounted.
pub(super) async fn unmount(tools: &Tools, path: &Path, about: &str) -> Result<(), RemoteError> {
    let what = format!("unmount {about} from {}", path.display());
    if !is_alone(path, &what).await? {
        return remove_mount_point_of(path).await;
    }
    let call = Call::new("umount").flags(["-c", "-i", "--"]).path(path);
    match tools.succeed(call).await {
        Ok(_) => {}
        Err(error @ (CommandError::Late { .. } | CommandError::StillRuns { .. })) => {
            return Err(RemoteError::Uncertain(format!(
                "{what}: {about} does not answer; it is tried again until it does or is unmounted by force: {error}"
            )));
        }
        Err(error) => {
            let (at, step) = (path.to_owned(), what.clone());
            let detach = move || {
                let detached = mounts::detach_with_copies(&at);
                detached.map_err(|error| RemoteError::Failed(format!("{step}: {error}")))
            };
            if !run(detach).await? {
                return Err(tool_failed(&what, &error));
            }
        }
    }
    fail::fail_point!("volumemanager::disk::unmounted");
    if is_alone(path, &what).await? {
        return Err(RemoteError::Failed(format!(
            "{what}: something else is mounted there meanwhile; whoever mounted it is to unmount it"
        )));
    }
    remove_mount_point_of(path).await
}

/// Unmounts what is mounted at `path` although its server does not answer: requests that wait for it fail. One call at a time for
/// a path: the kernel may hold it up. Returns whether nothing is mounted there any more. Upstream: `CleanupMountWithForce`.
pub(super) async fn unmount_by_force(path: &Path) -> bool {
    static UNDER_WAY: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let under_way = || UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    match is_alone(path, "unmount by force").await {
        Ok(true) => {}
        Ok(false) => return true,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot unmount by force");
            return false;
        }
    }
    if !under_way().insert(path.to_owned()) {
        return false;
    }
    let (at, (done, ended)) = (path.to_owned(), tokio::sync::oneshot::channel());
    // Its own thread: it may never come back.
    let thread = std::thread::Builder::new().name("umount".to_owned());
    let spawned = thread.spawn(move || {
        let flags = MntFlags::MNT_FORCE | MntFlags::UMOUNT_NOFOLLOW;
        let result = umount2(&at, flags);
        under_way().remove(&at);
        if done.send(result).is_err() {
            tracing::debug!(path = %at.display(), "an unmount by force has come back");
        }
    });
    if let Err(error) = spawned {
        under_way().remove(path);
        tracing::warn!(path = %path.display(), %error, "cannot unmount by force");
        return false;
    }
    match tokio::time::timeout(FORCE, ended).await {
        Ok(Ok(Ok(()))) => true,
        Ok(Ok(Err(error))) => {
            tracing::warn!(path = %path.display(), %error, "cannot unmount by force");
            false
        }
        _ => false,
    }
}

/// Removes the mount point of what was unmounted.
///
/// # Errors
/// When it cannot be removed.
pub(super) async fn unmounted(path: &Path) -> Result<(), RemoteError> {
    remove_mount_point_of(path).await
}

/// Returns whether `path` is a mount. It is an error if a foreign mount is over it or in it.
async fn is_alone(path: &Path, what: &str) -> Result<bool, RemoteError> {
    let (at, what) = (path.to_owned(), what.to_owned());
    run(move || {
        let look = || {
            let table = Table::read()?;
            table.check_alone(&at)?;
            Ok::<_, io::Error>(table.at(&at)?.is_some())
        };
        look().map_err(|error| RemoteError::Failed(format!("{what}: {error}")))
    })
    .await
}

async fn remove_mount_point_of(path: &Path) -> Result<(), RemoteError> {
    let path = path.to_owned();
    run(move || remove_mount_point(&path)).await
}

/// Removes the directory that was mounted on, if it is empty, or the link to a device.
pub(super) fn remove_mount_point(path: &Path) -> Result<(), RemoteError> {
    let remove = || {
        let found = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        if found.is_symlink() {
            fs::remove_file(path)
        } else {
            fs::remove_dir(path)
        }
    };
    remove().map_err(failed("remove mount point", path))
}

/// Content of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing that anybody knows.
    Nothing,
    /// A file system, or a member of something, of this type.
    Type(String),
    /// Partitions or something else that has no type.
    Other(String),
}

/// Looks at a device; upstream's `GetDiskFormat`.
///
/// # Errors
/// When it cannot be read, or `blkid` is in doubt.
pub(super) async fn content(tools: &Tools, device: &Path) -> Result<Content, RemoteError> {
    // To blkid, a device that it cannot read is one with nothing on it.
    let of = device.to_owned();
    run(move || {
        let mut first = [0_u8; 4096];
        let mut file = fs::File::open(&of).map_err(failed("open device", &of))?;
        file.read_exact(&mut first)
            .map_err(failed("read device", &of))
    })
    .await?;
    let call = || {
        Call::new("blkid")
            .flags(["-p", "-o", "export", "--"])
            .path(device)
    };
    let what = format!("look at what is on {}", device.display());
    let output = tools
        .run(call())
        .await
        .map_err(|e| tool_failed(&what, &e))?;
    match output.code {
        Some(NOTHING_FOUND) if output.stdout.trim().is_empty() => Ok(Content::Nothing),
        Some(0) => Ok(content_of(&output.stdout)),
        _ => Err(tool_failed(&what, &output.failed(call().to_string()))),
    }
}

fn content_of(told: &str) -> Content {
    let value = |key: &str| {
        let mut lines = told.lines().filter_map(|line| line.split_once('='));
        lines
            .find(|(k, v)| *k == key && !v.is_empty())
            .map(|(_, v)| v.to_owned())
    };
    // Partitions first: upstream does not tell a file system beside a partition table from partitions.
    if let Some(table) = value("PTTYPE") {
        return Content::Other(format!("unknown data, probably partitions ({table})"));
    }
    match value("TYPE") {
        Some(type_) => Content::Type(type_),
        None => Content::Other("unknown data".to_owned()),
    }
}

/// A file system to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Its type; empty for what is there, or ext4.
    pub(super) fs_type: String,
    /// Options, joined.
    pub(super) options: String,
}

impl Wanted {
    /// # Errors
    /// When the type cannot be one, or an option.
    pub(super) fn new(
        fs_type: Option<&str>,
        options: &[String],
        read_only: bool,
    ) -> Result<Self, RemoteError> {
        let fs_type = fs_type.unwrap_or_default().to_owned();
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        if !fs_type.chars().all(fits) {
            return Err(RemoteError::Failed(format!(
                "fsType {fs_type:?} is no file system; use ext4, xfs or another that mkfs makes"
            )));
        }
        let more: &[&str] = if read_only {
            &["defaults", "ro"]
        } else {
            &["defaults"]
        };
        Ok(Self {
            fs_type,
            options: join_options(options, more)?,
        })
    }

    fn is_read_only(&self) -> bool {
        self.options.split(',').any(|o| o == "ro")
    }
}

/// Mounts a device. One with nothing on it gets a file system first, unless it is read-only; one with a file
/// system is checked and mended. `Ok` when it is mounted there already. Upstream's `formatAndMount`.
///
/// # Errors
/// What is on the device is something else, or broken beyond mending.
pub(super) async fn format_and_mount(
    tools: &Tools,
    device: &Path,
    at: &Path,
    wanted: &Wanted,
) -> Result<(), RemoteError> {
    if is_mounted(device, at).await? {
        return Ok(());
    }
    let found = content(tools, device).await?;
    let shown = device.display();
    let fs_type = match &found {
        Content::Nothing if wanted.is_read_only() => {
            return Err(RemoteError::Failed(format!(
                "cannot mount unformatted disk {shown} as we are manipulating it in read-only mode"
            )));
        }
        Content::Nothing => format(tools, device, &wanted.fs_type).await?,
        Content::Type(type_) => {
            if !wanted.is_read_only() {
                check(tools, device).await?;
            }
            if wanted.fs_type.is_empty() {
                type_.clone()
            } else {
                wanted.fs_type.clone()
            }
        }
        Content::Other(what) => {
            return Err(RemoteError::Failed(format!(
                "failed to mount the volume {shown}: it already contains {what}; nothing is formatted that holds something: erase it (wipefs) if it is not needed"
            )));
        }
    };
    let to = at.to_owned();
    run(move || make_mount_point(&to)).await?;
    let call = Call::new("mount")
        .flags(["-t"])
        .data("fsType", &fs_type)
        .flags(["-o"])
        .data("mountOptions", &wanted.options)
        .flags(["--"])
        .path(device)
        .path(at);
    let Err(error) = tools.succeed(call).await else {
        return Ok(());
    };
    let what = match found {
        Content::Type(type_) if type_ != fs_type => format!(
            "failed to mount the volume {shown} as {fs_type:?}, it already contains {type_}"
        ),
        _ => format!("failed to mount the volume {shown} as {fs_type:?}"),
    };
    Err(tool_failed(&what, &error))
}

/// Returns whether a device is mounted at `at`.
async fn is_mounted(device: &Path, at: &Path) -> Result<bool, RemoteError> {
    let (device, at) = (device.to_owned(), at.to_owned());
    run(move || {
        let Some(found) = mounted_at(&at).map_err(failed("look for mount at", &at))? else {
            return Ok(false);
        };
        let number = fs::metadata(&device)
            .map_err(failed("look at", &device))?
            .rdev();
        let same = found.device == device_number(number)
            // A file system over several devices has a number of its own.
            || fs::metadata(&found.source).is_ok_and(|m| m.rdev() == number && number != 0);
        if same {
            return Ok(true);
        }
        Err(RemoteError::Failed(format!(
            "mount {} at {}: {} is mounted there already; unmount it",
            device.display(),
            at.display(),
            found.source
        )))
    })
    .await
}

/// `major:minor` as the mount table and `/sys` write it.
pub(super) fn device_number(number: u64) -> String {
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    format!("{major}:{minor}")
}

/// Makes a file system on a device with nothing on it; its type.
async fn format(tools: &Tools, device: &Path, fs_type: &str) -> Result<String, RemoteError> {
    let fs_type = if fs_type.is_empty() {
        DEFAULT_FS
    } else {
        fs_type
    };
    let call = Call::new(format!("mkfs.{fs_type}"));
    let call = match fs_type {
        // Forced: a whole disk is not taken otherwise. No blocks are set aside for root.
        "ext3" | "ext4" => call.flags(["-F", "-m0"]),
        _ => call,
    };
    let call = call.path(device).patient(MKFS_PATIENCE).never_killed();
    tracing::info!(device = %device.display(), fs_type, "disk appears to be unformatted, formatting it");
    let what = format!("format {} as {fs_type}", device.display());
    tools
        .succeed(call)
        .await
        .map_err(|e| tool_failed(&what, &e))?;
    Ok(fs_type.to_owned())
}

/// Checks a file system and mends it; upstream's `checkAndRepairFilesystem`.
async fn check(tools: &Tools, device: &Path) -> Result<(), RemoteError> {
    let call = Call::new("fsck")
        .flags(["-a"])
        .path(device)
        .patient(FSCK_PATIENCE);
    let shown = device.display();
    match tools.run(call).await {
        Err(CommandError::Missing { tool, .. }) => {
            tracing::warn!(tool, device = %shown, "the file system cannot be checked");
            Ok(())
        }
        Err(error) => Err(tool_failed(&format!("check {shown}"), &error)),
        Ok(output) => match output.code {
            Some(code) if code & UNCORRECTED != 0 => Err(RemoteError::Failed(format!(
                "'fsck' found errors on device {shown} but could not correct them: {}",
                output.stdout.trim().replace('\n', "; ")
            ))),
            Some(0) => Ok(()),
            code => {
                tracing::warn!(device = %shown, ?code, said = output.stderr.trim(), "fsck did not just pass");
                Ok(())
            }
        },
    }
}

/// Returns whether a path leads to a block device. Blocking.
pub(super) fn is_block_device(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.file_type().is_block_device())
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;

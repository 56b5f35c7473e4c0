//! Raw devices for pods: links below the pod's `volumeDevices` that lead to a block device, and loop devices
//! for files that stand for one.
//!
//! In: a device or a file, and the path of the link. Out: the link, which the container's configuration hands to
//! the runtime. What a link leads to is looked up again each time it is made: device numbers change with a reboot.
//!
//! **Invariant:** a loop device is detached only when it is on record that the agent has attached it, and the kernel
//! says that it is of the very file.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use super::attached::Attached;
use super::command::{Call, Tools};
use super::disk::{device_number, failed, is_block_device, run, tool_failed};
use super::remote::RemoteError;

/// Makes `link` lead to a device; a link that is there is replaced when it leads elsewhere. Blocking.
pub(super) fn link(device: &Path, link: &Path) -> Result<(), RemoteError> {
    let is_device = is_block_device(device).map_err(failed("look at device", device))?;
    if !is_device {
        return Err(RemoteError::Failed(format!(
            "{} is not a block device; use volumeMode Filesystem for files",
            device.display()
        )));
    }
    lead_to(device, link)
}

/// As [`link`], to anything. Blocking.
fn lead_to(target: &Path, link: &Path) -> Result<(), RemoteError> {
    let make = || {
        match fs::symlink_metadata(link) {
            Ok(found) if found.is_symlink() => {
                if fs::read_link(link)? == target {
                    return Ok(());
                }
                fs::remove_file(link)?;
            }
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "something that is not a link is in its place",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent)?;
        }
        symlink(target, link)
    };
    make().map_err(failed(
        &format!("make a link to {} at", target.display()),
        link,
    ))
}

/// Removes a link to a device; `Ok` when there is none. Anything else that is there stays. Blocking.
///
/// # Errors
/// When something else is there.
pub(super) fn unlink(link: &Path) -> Result<(), RemoteError> {
    let remove = || match fs::symlink_metadata(link) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if found.is_symlink() => fs::remove_file(link),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "it is not a link to a device",
        )),
    };
    remove().map_err(failed("remove the link at", link))
}

/// The loop device of a file: the one there is, else a new one, which is noted as the agent's own. Upstream's
/// `AttachFileDevice`.
///
/// # Errors
/// No loop device can be had.
pub(super) async fn attach_loop(
    tools: &Tools,
    attached: &Attached,
    file: &Path,
) -> Result<PathBuf, RemoteError> {
    if let Some(device) = loop_of(tools, file).await? {
        return Ok(device);
    }
    let what = format!("attach {} to a loop device", file.display());
    attached.note(&name_of(file)).await?;
    let call = Call::new("losetup")
        .flags(["-f", "--show", "--"])
        .path(file);
    let output = match tools.succeed(call).await {
        Ok(output) => output,
        Err(error) => {
            let error = tool_failed(&what, &error);
            // What may have taken effect stays on record.
            if matches!(error, RemoteError::Failed(_)) {
                attached.forget(&name_of(file)).await?;
            }
            return Err(error);
        }
    };
    let device = PathBuf::from(output.stdout.trim());
    if !device.starts_with("/dev") {
        return Err(RemoteError::Uncertain(format!(
            "{what}: losetup does not tell which, but {:?}",
            output.stdout
        )));
    }
    tracing::info!(file = %file.display(), device = %device.display(), "attached loop device");
    Ok(device)
}

/// Detaches the loop device of a file, which `link` leads to if it was handed out. `Ok` when there is none, and when it
/// is not the agent's own: somebody else has attached it, or it is of another file by now.
///
/// # Errors
/// It is in use.
pub(super) async fn detach_loop(
    tools: &Tools,
    attached: &Attached,
    file: &Path,
    link: &Path,
) -> Result<(), RemoteError> {
    let name = name_of(file);
    if !attached.is_ours(&name) {
        return attached.forget(&name).await;
    }
    let link = link.to_owned();
    let linked = run(move || match fs::read_link(&link) {
        Ok(device) => Ok(Some(device)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("follow", &link)(error)),
    });
    let linked = linked.await?;
    let found = loop_of(tools, file).await?;
    let Some(device) = found.filter(|found| linked.as_ref().is_none_or(|l| l == found)) else {
        return attached.forget(&name).await;
    };
    detach(tools, file, &device).await?;
    fail::fail_point!("volumemanager::block::detached");
    attached.forget(&name).await
}

/// Detaches the loop device of a file in a directory of the agent's own, where a kubelet was before: whatever is attached
/// there is of that volume. `Ok` when there is none.
///
/// # Errors
/// It is in use.
pub(super) async fn detach_former_loop(tools: &Tools, file: &Path) -> Result<(), RemoteError> {
    match loop_of(tools, file).await? {
        Some(device) => detach(tools, file, &device).await,
        None => Ok(()),
    }
}

async fn detach(tools: &Tools, file: &Path, device: &Path) -> Result<(), RemoteError> {
    let what = format!("detach {} from {}", file.display(), device.display());
    let of = device.to_owned();
    if run(move || is_used(&of).map_err(failed("look at", &of))).await? {
        return Err(RemoteError::Failed(format!(
            "{what}: it is mounted, or another device is made of it"
        )));
    }
    let call = Call::new("losetup").flags(["-d"]).path(device);
    tools
        .succeed(call)
        .await
        .map_err(|e| tool_failed(&what, &e))?;
    tracing::info!(file = %file.display(), device = %device.display(), "detached loop device");
    Ok(())
}

/// Returns the name of a file's loop device in [`Attached`].
fn name_of(file: &Path) -> String {
    format!("loop device of {}", file.display())
}

/// The loop device of a file: of that very one, or when there is none any more, of the one that was there.
async fn loop_of(tools: &Tools, file: &Path) -> Result<Option<PathBuf>, RemoteError> {
    let of = file.to_owned();
    let (candidates, identity) = run(move || {
        let look = || Ok((loops_named(&of)?, identity(&of)?));
        look().map_err(failed("list loop devices of", &of))
    })
    .await?;
    for device in candidates {
        let Some(identity) = &identity else {
            return Ok(Some(device));
        };
        // Names alone do not tell: the file may have been replaced, or its file system be covered by another one.
        let call = Call::new("losetup")
            .flags(["-l", "-n", "-O", "BACK-INO,BACK-MAJ:MIN"])
            .path(&device);
        let what = format!("look at loop device {}", device.display());
        let told = tools.succeed(call).await;
        let told = told.map_err(|e| tool_failed(&what, &e))?;
        let told: Vec<&str> = told.stdout.split_whitespace().collect();
        if told == [identity.0.as_str(), identity.1.as_str()] {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// Number of a file, and of the file system it is in; `None` when it is not there.
fn identity(file: &Path) -> io::Result<Option<(String, String)>> {
    match fs::metadata(file) {
        Ok(found) => Ok(Some((found.ino().to_string(), device_number(found.dev())))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The file of a loop device as the kernel tells it. Other programs' files have any names.
fn backing_file(told: &[u8]) -> &Path {
    let told = told.strip_suffix(b"\n").unwrap_or(told);
    Path::new(OsStr::from_bytes(
        told.strip_suffix(b" (deleted)").unwrap_or(told),
    ))
}

/// Loop devices whose file has this name, as the kernel tells it, or had it before it was removed.
fn loops_named(file: &Path) -> io::Result<Vec<PathBuf>> {
    let dir = Path::new("/sys/block");
    // A file that is gone may still have one.
    let wanted = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        match fs::read(dir.join(&name).join("loop/backing_file")) {
            Ok(told) => {
                if backing_file(&told) == wanted {
                    found.push(Path::new("/dev").join(name));
                }
            }
            // Free, or no loop device at all.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Returns whether a device is mounted, or another device is built on it. Blocking.
pub(super) fn is_used(device: &Path) -> io::Result<bool> {
    let number = device_number(fs::metadata(device)?.rdev());
    if super::disk::table()?.iter().any(|m| m.device == number) {
        return Ok(true);
    }
    let holders = Path::new("/sys/dev/block").join(number).join("holders");
    match fs::read_dir(holders) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[path = "block_tests.rs"]
pub(super) mod tests;

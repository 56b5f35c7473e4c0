//! Raw devices for pods: links below the pod's `volumeDevices` that lead to a block device, and loop devices
//! for files that stand for one.
//!
//! In: a device or a file, and the path of the link. Out: the link, which the container's configuration hands to
//! the runtime. What a link leads to is looked up again each time it is made: device numbers change with a reboot.
//!
//! **Invariant:** a loop device is only ever detached when the kernel says that it is of the very file.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

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

/// The loop device of a file: the one there is, else a new one. Upstream's `AttachFileDevice`.
///
/// # Errors
/// No loop device can be had.
pub(super) async fn attach_loop(tools: &Tools, file: &Path) -> Result<PathBuf, RemoteError> {
    if let Some(device) = loop_of(file).await? {
        return Ok(device);
    }
    let what = format!("attach {} to a loop device", file.display());
    let call = Call::new("losetup")
        .flags(["-f", "--show", "--"])
        .path(file);
    let output = tools
        .succeed(call)
        .await
        .map_err(|e| tool_failed(&what, &e))?;
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

/// Detaches the loop device of a file; `Ok` when there is none.
///
/// # Errors
/// It is in use.
pub(super) async fn detach_loop(tools: &Tools, file: &Path) -> Result<(), RemoteError> {
    let Some(device) = loop_of(file).await? else {
        return Ok(());
    };
    let what = format!("detach {} from {}", file.display(), device.display());
    let of = device.clone();
    if run(move || is_used(&of).map_err(failed("look at", &of))).await? {
        return Err(RemoteError::Failed(format!(
            "{what}: it is mounted, or another device is made of it"
        )));
    }
    let call = Call::new("losetup").flags(["-d"]).path(&device);
    tools
        .succeed(call)
        .await
        .map_err(|e| tool_failed(&what, &e))?;
    tracing::info!(file = %file.display(), device = %device.display(), "detached loop device");
    Ok(())
}

/// The loop device of a file, as the kernel tells it.
async fn loop_of(file: &Path) -> Result<Option<PathBuf>, RemoteError> {
    let file = file.to_owned();
    run(move || {
        let dir = Path::new("/sys/block");
        // A file that is gone may still have one.
        let wanted = fs::canonicalize(&file).unwrap_or(file);
        let find = || {
            for entry in fs::read_dir(dir)? {
                let name = entry?.file_name();
                let told = dir.join(&name).join("loop/backing_file");
                match fs::read_to_string(told) {
                    Ok(told) => {
                        let told = told.trim_end_matches('\n');
                        let told = told.strip_suffix(" (deleted)").unwrap_or(told);
                        if Path::new(told) == wanted {
                            return Ok(Some(Path::new("/dev").join(name)));
                        }
                    }
                    // Free, or no loop device at all.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(None)
        };
        find().map_err(failed("list loop devices in", dir))
    })
    .await
}

/// Whether a device is mounted, or another one is made of it. Blocking.
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

//! Directories and files beside a driver's mounts.
//!
//! `vol_data.json` lies next to the directory that a driver mounts on, written before the driver is called: it is how
//! another kubelet that takes the node over knows what is mounted there.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use serde_json::{Value, json};

use crate::core::volumes::{Csi, Remote};
use crate::volumemanager::mounts;

const DATA: &str = "vol_data.json";

/// State of the path where a volume is published.
pub(super) struct Prepared {
    /// No driver was called for it before.
    pub(super) fresh: bool,
}

/// Data of a staged volume.
pub(super) fn device_data(driver: &str, handle: &str) -> Value {
    json!({"driverName": driver, "volumeHandle": handle})
}

/// Data of a published volume.
pub(super) fn volume_data(volume: &Remote, csi: &Csi, node: &str) -> Value {
    let (driver, handle) = (&csi.source.driver, &csi.source.volume_handle);
    let lifecycle = match csi.ephemeral {
        true => "Ephemeral",
        false => "Persistent",
    };
    json!({
        "attachmentID": format!("csi-{}", crate::core::volumes::sha256_hex(&[handle, driver, node])),
        "driverName": driver,
        "nodeName": node,
        "specVolID": volume.name,
        "volumeHandle": handle,
        "volumeLifecycleMode": lifecycle,
    })
}

/// Makes a directory and those above it, 0750; whether it was there.
pub(super) fn make_dir(dir: &Path) -> io::Result<bool> {
    if fs::symlink_metadata(dir).is_ok_and(|m| m.is_dir()) {
        return Ok(true);
    }
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(dir);
    made.map(|()| false).map_err(named("create directory", dir))
}

pub(super) fn write_beside(at: &Path, data: &Value) -> io::Result<()> {
    let Some(dir) = at.parent() else {
        return Err(io::Error::other("the path has no parent"));
    };
    make_dir(dir)?;
    write_data(dir, data)
}

/// Writes the data whole or not at all; not again when it says the same.
pub(super) fn write_data(dir: &Path, data: &Value) -> io::Result<()> {
    let path = dir.join(DATA);
    let text = data.to_string();
    if fs::read(&path).is_ok_and(|known| known == text.as_bytes()) {
        return Ok(());
    }
    let fresh = dir.join(format!(".{DATA}"));
    let write = || {
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o644)
            .open(&fresh)?;
        io::Write::write_all(&mut file, text.as_bytes())?;
        fs::rename(&fresh, &path)
    };
    write().map_err(named("write", &path))
}

pub(super) fn has_data(dir: &Path) -> bool {
    exists(&dir.join(DATA))
}

pub(super) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

pub(super) fn is_mounted(path: &Path) -> io::Result<bool> {
    let mounted = mounts::at(path).map_err(named("look at", path))?;
    Ok(mounted.is_some())
}

/// Removes the directory a driver has mounted on, the data beside it and the directory of both.
pub(super) fn remove_mount_dir(at: &Path) -> io::Result<()> {
    check_unmounted(at)?;
    match fs::symlink_metadata(at) {
        Ok(found) if found.is_dir() => gone(fs::remove_dir(at)).map_err(named("remove", at))?,
        Ok(_) => gone(fs::remove_file(at)).map_err(named("remove", at))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(named("look at", at)(error)),
    }
    let Some(dir) = at.parent() else {
        return Ok(());
    };
    remove_data(dir)?;
    gone(fs::remove_dir(dir)).map_err(named("remove", dir))
}

/// Removes the directory that a volume was to be mounted in, if it is empty.
pub(super) fn remove_empty_parent(path: &Path) -> io::Result<()> {
    let Some(dir) = path.parent() else {
        return Ok(());
    };
    match fs::remove_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        other => gone(other).map_err(named("remove", dir)),
    }
}

/// Makes `link` lead to the device file.
pub(super) fn link(link: &Path, device: &Path) -> io::Result<()> {
    match fs::read_link(link) {
        Ok(target) if target == device => return Ok(()),
        Ok(_) => fs::remove_file(link).map_err(named("remove", link))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(named("look at", link)(error)),
    }
    std::os::unix::fs::symlink(device, link).map_err(named("create link", link))
}

pub(super) fn remove_data(dir: &Path) -> io::Result<()> {
    for name in [DATA, ".vol_data.json"] {
        let path = dir.join(name);
        gone(fs::remove_file(&path)).map_err(named("remove", &path))?;
    }
    Ok(())
}

pub(super) fn check_unmounted(path: &Path) -> io::Result<()> {
    match is_mounted(path)? {
        false => Ok(()),
        true => Err(io::Error::other(format!(
            "{} is still mounted: it is left alone",
            path.display()
        ))),
    }
}

/// Whoever was there before us does no harm.
pub(super) fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

pub(super) fn named(
    verb: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> io::Error + use<> {
    let path = path.display().to_string();
    move |error| io::Error::new(error.kind(), format!("{verb} {path}: {error}"))
}

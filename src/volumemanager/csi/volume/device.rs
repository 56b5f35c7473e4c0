//! Paths of drivers' raw devices below `plugins/kubernetes.io/csi/volumeDevices`, as upstream has them (`csi_block`),
//! so that one of the two may take a node over from the other:
//!
//! - `staging/<volume>`: where the driver stages it;
//! - `publish/<volume>/<pod>`: where it publishes it, and where the pod's link leads;
//! - `<volume>/data`: `vol_data.json`;
//! - `<volume>/dev`: upstream binds the device there as `<pod>`, with a loop device on it that keeps it open. This agent
//!   makes the directory, since upstream lists it, and undoes what upstream left in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::files::{self, gone, named};
use super::{run, text};
use crate::volumemanager::block;
use crate::volumemanager::command::{Call, Tools};
use crate::volumemanager::remote::RemoteError;

/// The directories of one volume.
pub(super) struct Places {
    root: PathBuf,
    name: String,
}

impl Places {
    pub(super) fn new(root: &Path, name: &str) -> Self {
        Self {
            root: root.join("plugins/kubernetes.io/csi/volumeDevices"),
            name: name.to_owned(),
        }
    }

    pub(super) fn staging(&self) -> PathBuf {
        self.root.join("staging").join(&self.name)
    }

    /// Of all pods.
    pub(super) fn published(&self) -> PathBuf {
        self.root.join("publish").join(&self.name)
    }

    pub(super) fn own(&self) -> PathBuf {
        self.root.join(&self.name)
    }

    pub(super) fn data(&self) -> PathBuf {
        self.own().join("data")
    }

    pub(super) fn dev(&self) -> PathBuf {
        self.own().join("dev")
    }
}

/// Undoes what a kubelet has made at `dev/<pod>`; `Ok` when there is nothing.
pub(super) async fn release(tools: &Tools, at: &Path) -> Result<(), RemoteError> {
    let looked = at.to_owned();
    if !run(move || Ok(files::exists(&looked))).await? {
        return Ok(());
    }
    block::detach_former_loop(tools, at).await?;
    let looked = at.to_owned();
    if run(move || files::is_mounted(&looked)).await? {
        let shown = text(at)?;
        let call = Call::new("umount").flags(["-c", "-i", "--"]).path(at);
        let done = tools.succeed(call).await;
        done.map_err(|error| RemoteError::Failed(format!("unmount {shown}: {error}")))?;
    }
    let at = at.to_owned();
    run(move || remove_empty_file(&at)).await
}

/// Removes the link to a device, the file that the driver has bound it on, and what lies beside when no other pod has
/// it.
pub(super) fn remove(link: &Path, at: &Path, places: &Places) -> io::Result<()> {
    files::check_unmounted(at)?;
    if fs::symlink_metadata(link).is_ok_and(|m| m.is_symlink()) {
        gone(fs::remove_file(link)).map_err(named("remove", link))?;
    }
    match fs::symlink_metadata(at) {
        Ok(found) if found.is_dir() => gone(fs::remove_dir(at)).map_err(named("remove", at))?,
        _ => remove_empty_file(at)?,
    }
    let published = places.published();
    match fs::remove_dir(&published) {
        // Another pod has it.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(()),
        other => gone(other).map_err(named("remove", &published))?,
    }
    let dev = places.dev();
    match fs::remove_dir(&dev) {
        // Somebody else has made something there for a pod that this agent does not know.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(()),
        other => gone(other).map_err(named("remove", &dev))?,
    }
    let (data, own) = (places.data(), places.own());
    files::remove_data(&data)?;
    gone(fs::remove_dir(&data)).map_err(named("remove", &data))?;
    gone(fs::remove_dir(&own)).map_err(named("remove", &own))
}

/// Removes the directory that a device was staged in; others lie beside it.
pub(super) fn remove_staging(at: &Path) -> io::Result<()> {
    files::check_unmounted(at)?;
    match fs::symlink_metadata(at) {
        Ok(found) if found.is_dir() => gone(fs::remove_dir(at)).map_err(named("remove", at)),
        _ => remove_empty_file(at),
    }
}

fn remove_empty_file(at: &Path) -> io::Result<()> {
    files::check_unmounted(at)?;
    match fs::symlink_metadata(at) {
        Ok(found) if found.is_symlink() || (found.is_file() && found.len() == 0) => {
            gone(fs::remove_file(at)).map_err(named("remove", at))
        }
        Ok(_) => Err(io::Error::other(format!(
            "{} is no empty file: it is left alone",
            at.display()
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(named("look at", at)(error)),
    }
}

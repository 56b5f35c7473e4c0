//! The directories of pods.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::{VolumeError, io_error};
use super::plan::make_dir;
use super::{VolumeManager, all_dirs_in, check_name, dirs_in, is_component, run_blocking, safety};
use crate::core::state::{VolumeRecord, child_key};
use crate::types::PodUid;

impl VolumeManager {
    /// Returns whether a pod has recorded volumes.
    pub fn has_volumes(&self, uid: &PodUid) -> bool {
        let seen = self.store.snapshot();
        seen.with_prefix::<VolumeRecord>(&child_key(uid, ""))
            .next()
            .is_some()
    }

    /// Makes a pod's directories; upstream's `makePodDataDirs`. It goes on when the future is dropped.
    ///
    /// # Errors
    /// When one cannot be made.
    pub async fn make_pod_dirs(&self, uid: &PodUid) -> Result<(), VolumeError> {
        check_name(uid, uid.as_str())?;
        let (pod, uid) = (self.pod_dir(uid), uid.clone());
        run_blocking(move || {
            for dir in [pod.clone(), pod.join("volumes"), pod.join("plugins")] {
                if dir.is_dir() {
                    continue;
                }
                make_dir(&dir, 0o750).map_err(io_error("create directory", &uid, &dir))?;
            }
            Ok(())
        })
        .await
    }

    /// Returns whether a pod has a directory.
    pub fn pod_dirs_exist(&self, uid: &PodUid) -> bool {
        is_component(uid.as_str()) && self.pod_dir(uid).is_dir()
    }

    /// Removes a pod's directory. Its volumes must be unmounted.
    ///
    /// # Errors
    /// `InUse` when volumes are on record or on disk, or something is mounted there. Users are told.
    pub async fn remove_pod_dirs(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let done = self.remove_dirs(uid).await;
        let what = format!("directory of {uid}");
        match &done {
            Ok(()) => self.pace.over(&what),
            Err(error) => self.tell_stuck(uid, &what, &[error]),
        }
        done
    }

    async fn remove_dirs(&self, uid: &PodUid) -> Result<(), VolumeError> {
        check_name(uid, uid.as_str())?;
        let path = self.pod_dir(uid);
        if self.has_volumes(uid) {
            let what = "it has volumes that are mounted".to_owned();
            return Err(in_use(uid, &path, what));
        }
        let of = uid.clone();
        run_blocking(move || {
            remove_mount_points(&of, &path)?;
            fail::fail_point!("volumemanager::remove_pod_dirs::begun");
            safety::remove_tree(&path).map_err(io_error("remove directory", &of, &path))
        })
        .await?;
        fail::fail_point!("volumemanager::remove_pod_dirs::removed");
        Ok(())
    }

    pub(super) fn pod_dir(&self, uid: &PodUid) -> PathBuf {
        self.root.join("pods").join(uid.as_str())
    }

    pub(super) fn plugin_dir(&self, uid: &PodUid, plugin: &str) -> PathBuf {
        let dir = plugin.replace('/', "~");
        self.pod_dir(uid).join("volumes").join(dir)
    }

    pub(super) fn pods_on_disk(&self) -> Result<BTreeSet<PodUid>, VolumeError> {
        let pods = self.root.join("pods");
        let none = PodUid::new("");
        let names = dirs_in(&pods).map_err(io_error("list pod directories in", &none, &pods))?;
        Ok(names.into_iter().map(PodUid::from).collect())
    }
}

fn in_use(uid: &PodUid, path: &Path, what: String) -> VolumeError {
    VolumeError::InUse {
        pod: uid.clone(),
        path: path.to_owned(),
        what,
    }
}

/// Removes the directories where something was to be mounted that never came. What is mounted or holds something stays. It is
/// not looked at: a server behind it may be gone.
fn remove_mount_points(uid: &PodUid, path: &Path) -> Result<(), VolumeError> {
    let volumes = path.join("volumes");
    for plugin in all_dirs_in(&volumes).map_err(io_error("list volumes in", uid, &volumes))? {
        let dir = volumes.join(&plugin);
        let left = all_dirs_in(&dir).map_err(io_error("list volumes in", uid, &dir))?;
        for volume in left {
            match fs::remove_dir(dir.join(&volume)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(_) => {
                    let volume = Path::new(&plugin).join(volume);
                    let what = format!("volume {} is there but not on record", volume.display());
                    return Err(in_use(uid, path, what));
                }
            }
        }
    }
    Ok(())
}

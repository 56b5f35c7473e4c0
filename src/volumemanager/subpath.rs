//! Parts of volumes: what `subPath` and `subPathExpr` of a volumeMount lead to; upstream's `subpath` package.
//!
//! Containers write into volumes, so any name in one may become a link to anywhere at any moment. A part is
//! therefore looked up below the opened root of its volume (`openat2` with `RESOLVE_BENEATH`; name by name,
//! following nothing, where the kernel or a filter does not have that), made there where it is missing, and what
//! was opened is bound to `<root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>`: the runtime is given a
//! path that no container can change, and that leads to the very file that was looked at.
//!
//! **Invariant:** a bound part is on record (`subpaths/<uid>/<volume>/<container>/<index>` in table `objects`)
//! before it is mounted. [`clean()`] unmounts all that is mounted there for a pod, on record or not, and removes empty
//! directories and empty files alone; what was mounted is never touched, neither by hand nor by propagation.

mod lookup;
mod places;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{VolumeError, io_error};
use super::{POD_WAIT, VolumeManager, is_component, run_blocking};
use crate::core::state::Transaction;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::store::CommitError;
use crate::types::PodUid;
pub(super) use lookup::open_existing;
use lookup::{Lookup, Trouble};
pub use places::clean;

const DIR: &str = "volume-subpaths";

/// A part of a volume that a container mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubPath {
    /// Name of the volume.
    pub volume: String,
    /// Host path of the volume.
    pub root: PathBuf,
    /// Name of the container.
    pub container: String,
    /// Place of the mount in the container's `volumeMounts`.
    pub index: usize,
    /// `subPath`, or what `subPathExpr` came to. Not empty.
    pub path: String,
}

/// A part of a volume that cannot be had. The texts begin as upstream's do, and name no path of the node.
#[derive(Debug, thiserror::Error)]
pub enum SubPathError {
    /// It begins with a slash.
    #[error(
        "error SubPath `{path}` must not be an absolute path (volumeMount {volume:?} of container {container:?})"
    )]
    Absolute {
        /// As written, or what its variables made of it.
        path: String,
        /// The volume.
        volume: String,
        /// The container.
        container: String,
    },
    /// It climbs.
    #[error(
        "unable to provision SubPath `{path}`: must not contain '..' (volumeMount {volume:?} of container {container:?})"
    )]
    Backsteps {
        /// As written, or what its variables made of it.
        path: String,
        /// The volume.
        volume: String,
        /// The container.
        container: String,
    },
    /// It does not exist and could not be made.
    #[error(
        "failed to create subPath directory for volumeMount {volume:?} of container {container:?}: {why}"
    )]
    Create {
        /// The volume.
        volume: String,
        /// The container.
        container: String,
        /// Description of the error.
        why: String,
    },
    /// It leads elsewhere, or could not be mounted.
    #[error(
        "failed to prepare subPath for volumeMount {volume:?} of container {container:?}: {why}"
    )]
    Prepare {
        /// The volume.
        volume: String,
        /// The container.
        container: String,
        /// Description of the error.
        why: String,
    },
    /// It could not be recorded; nothing was done.
    #[error("record subPath of volumeMount {volume:?} of container {container:?}")]
    Commit {
        /// The volume.
        volume: String,
        /// The container.
        container: String,
        /// Why.
        #[source]
        source: CommitError,
    },
}

/// Record of a subPath mount.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bound {
    volume_path: String,
    sub_path: String,
}

impl Kind for Bound {
    const DECLARED: Declared = kinds::SUB_PATHS;
}

/// Returns the key under which no two operations run on the parts of a pod's volumes.
fn turn_of(uid: &PodUid) -> String {
    format!("{}{uid}", kinds::SUB_PATHS.prefix)
}

/// Checks what is written in a spec, or what its variables came to; upstream's checks in `makeMounts`.
///
/// # Errors
/// `Absolute` or `Backsteps`.
pub fn validate(part: &SubPath) -> Result<(), SubPathError> {
    let named = || {
        (
            part.path.clone(),
            part.volume.clone(),
            part.container.clone(),
        )
    };
    if part.path.starts_with('/') {
        let (path, volume, container) = named();
        return Err(SubPathError::Absolute {
            path,
            volume,
            container,
        });
    }
    if part.path.split('/').any(|item| item == "..") {
        let (path, volume, container) = named();
        return Err(SubPathError::Backsteps {
            path,
            volume,
            container,
        });
    }
    Ok(())
}

impl VolumeManager {
    /// Makes a part of a mounted volume ready for a container, and gives the path on the host that stands for it.
    /// A part that does not exist becomes a directory with the volume's mode and group. One that is mounted there
    /// already is kept when it is still the same file. When dropped, what was begun is on record.
    ///
    /// # Errors
    /// See [`SubPathError`]; nothing is left mounted.
    pub async fn sub_path(&self, uid: &PodUid, part: SubPath) -> Result<PathBuf, SubPathError> {
        validate(&part)?;
        let (volume, container) = (part.volume.clone(), part.container.clone());
        if ![uid.as_str(), &volume, &container]
            .into_iter()
            .all(is_component)
        {
            return Err(SubPathError::Prepare {
                why: "its names cannot be names of directories".to_owned(),
                volume,
                container,
            });
        }
        let target = dir_of(&self.root, uid)
            .join(&volume)
            .join(&container)
            .join(part.index.to_string());
        let (manager, of, at) = (self.clone(), uid.clone(), target.clone());
        let work = async move { manager.bind(&of, part, at).await };
        let turn = turn_of(uid);
        let done = self.operations.run(&turn, "subpath_mount", work);
        let failed = |why: String| {
            let (volume, container) = (volume.clone(), container.clone());
            SubPathError::Prepare {
                volume,
                container,
                why,
            }
        };
        match tokio::time::timeout(POD_WAIT, done).await {
            Ok(Ok(done)) => done.map(|()| target),
            Ok(Err(ended)) => Err(failed(ended.to_string())),
            Err(_) => Err(failed(format!(
                "it takes more than {} s, as with storage that does not answer",
                POD_WAIT.as_secs()
            ))),
        }
    }

    /// Records and binds, one at a time of a pod.
    async fn bind(&self, uid: &PodUid, part: SubPath, at: PathBuf) -> Result<(), SubPathError> {
        let (volume, container) = (part.volume.clone(), part.container.clone());
        self.remember(uid, &part)
            .await
            .map_err(|source| SubPathError::Commit {
                volume: volume.clone(),
                container: container.clone(),
                source,
            })?;
        fail::fail_point!("volumemanager::subpath::after_record");
        let work = move || Ok(places::prepare(&part.root, &part.path, &at, Lookup::Kernel));
        let done = run_blocking(work).await;
        let done =
            done.unwrap_or_else(|error| Err(Trouble::Io("prepare it", io::Error::other(error))));
        fail::fail_point!("volumemanager::subpath::after_mount");
        let Err(trouble) = done else {
            return Ok(());
        };
        tracing::warn!(pod = %uid, volume, container, error = %trouble, "cannot prepare a part of a volume");
        let why = trouble.to_string();
        Err(match trouble {
            Trouble::Make(_) => SubPathError::Create {
                volume,
                container,
                why,
            },
            _ => SubPathError::Prepare {
                volume,
                container,
                why,
            },
        })
    }

    async fn remember(&self, uid: &PodUid, part: &SubPath) -> Result<(), CommitError> {
        let place = format!("{}/{}/{}", part.volume, part.container, part.index);
        let key = Key::new(uid.as_str(), &place);
        let bound = Bound {
            volume_path: part.root.to_string_lossy().into_owned(),
            sub_path: part.path.clone(),
        };
        let seen = self.store.snapshot();
        if seen.stored(&key).is_some_and(|known| known.is(&bound)) {
            return Ok(());
        }
        let put = Transaction::new().put_object(&key, &bound, self.clock.now());
        self.store.commit(put).await.map(drop)
    }

    /// As [`VolumeManager::clean_sub_paths`], as the only one who works on the pod's parts, and for so long at most. What
    /// has begun goes on to its end.
    pub(super) async fn clean_sub_paths_within(
        &self,
        uid: &PodUid,
        patience: Duration,
    ) -> Result<(), VolumeError> {
        let (manager, of) = (self.clone(), uid.clone());
        let work = async move { manager.clean_sub_paths(&of).await };
        let turn = turn_of(uid);
        let done = self.operations.run(&turn, "subpath_unmount", work);
        match tokio::time::timeout(patience, done).await {
            Ok(Ok(done)) => done,
            Ok(Err(ended)) => Err(VolumeError::Io {
                verb: "unmount parts of volumes in",
                pod: uid.clone(),
                path: dir_of(&self.root, uid),
                source: io::Error::other(ended),
            }),
            Err(_) => Err(VolumeError::Slow {
                pod: uid.clone(),
                volumes: "their parts that containers had".to_owned(),
                seconds: patience.as_secs(),
            }),
        }
    }

    /// Unmounts all parts of a pod's volumes that containers had; upstream's `CleanSubPaths`. Its containers must have
    /// ended. To be called before its volumes are unmounted. Nothing happens when there are none.
    ///
    /// # Errors
    /// When something cannot be unmounted or the record not be removed; the rest was tried.
    pub async fn clean_sub_paths(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let dir = dir_of(&self.root, uid);
        let (root, of) = (self.root.clone(), uid.clone());
        run_blocking(move || {
            clean(&root, &of).map_err(io_error("unmount parts of volumes in", &of, &dir))
        })
        .await
        .map(|count| {
            if count > 0 {
                tracing::info!(pod = %uid, count, "unmounted parts of volumes");
            }
        })?;
        fail::fail_point!("volumemanager::subpath::after_clean");
        let seen = self.store.snapshot();
        let mut transaction = Transaction::new();
        let mut any = false;
        for bound in seen.stored_below::<Bound>(uid.as_str()) {
            transaction = transaction.delete_object(&bound.key());
            any = true;
        }
        if any {
            self.commit(uid, DIR, transaction).await?;
        }
        Ok(())
    }
}

fn dir_of(root: &Path, uid: &PodUid) -> PathBuf {
    root.join("pods").join(uid.as_str()).join(DIR)
}

#[cfg(test)]
#[path = "subpath/tests.rs"]
mod tests;

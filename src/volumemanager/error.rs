//! What can go wrong with volumes.

use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;

use super::chain;
use super::host_path::HostPathError;
use super::payload::PayloadError;
use crate::kuberuntime::resources::QuantityError;
use crate::store::CommitError;
use crate::types::PodUid;
use crate::types::events::{Event, EventType};

/// A volume could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// It is of a kind, or in a medium, that is not supported.
    #[error(
        "mount volume {volume} of pod {pod}: {what} is not supported; use emptyDir, hostPath, configMap, secret, downwardAPI or projected"
    )]
    Unsupported {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// What is not.
        what: String,
    },
    /// A name that cannot be part of a path.
    #[error("mount volumes of pod {pod}: {name:?} cannot name a directory")]
    Name {
        /// UID.
        pod: PodUid,
        /// Volume name or UID.
        name: String,
    },
    /// A hostPath is not what the volume says.
    #[error("mount volume {volume} of pod {pod}: {source}")]
    HostPath {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Why.
        source: HostPathError,
    },
    /// What it should hold cannot be had.
    #[error("mount volume {volume} of pod {pod}: {source}")]
    Content {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Why.
        source: Box<PayloadError>,
    },
    /// A size does not parse.
    #[error("size volume {volume} of pod {pod}")]
    Quantity {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Why.
        #[source]
        source: QuantityError,
    },
    /// The file system refuses.
    #[error("{verb} {} of pod {pod}", path.display())]
    Io {
        /// What was tried.
        verb: &'static str,
        /// UID.
        pod: PodUid,
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A phase could not be recorded; nothing was done.
    #[error("record volume {volume} of pod {pod}")]
    Commit {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Why.
        #[source]
        source: CommitError,
    },
    /// Something keeps a pod's directory from being removed.
    #[error("remove directory {} of pod {pod}: {what}", path.display())]
    InUse {
        /// UID.
        pod: PodUid,
        /// The directory.
        path: PathBuf,
        /// What is in the way.
        what: String,
    },
}

impl VolumeError {
    /// Reason of the event.
    pub fn reason(&self) -> &'static str {
        "FailedMount"
    }

    /// The event that tells users of it.
    pub(super) fn event(&self, pod: &Pod, volume: &str) -> Event {
        let why = match self {
            Self::Content { source, .. } => source.to_string(),
            other => chain(other),
        };
        let text = format!("MountVolume.SetUp failed for volume \"{volume}\" : {why}");
        Event::pod(EventType::Warning, pod, self.reason(), text)
    }
}

/// Names what was tried, on what, for which pod.
pub(super) fn io_error(
    verb: &'static str,
    uid: &PodUid,
    path: &Path,
) -> impl FnOnce(io::Error) -> VolumeError + use<> {
    let (pod, path) = (uid.clone(), path.to_owned());
    move |source| VolumeError::Io {
        verb,
        pod,
        path,
        source,
    }
}

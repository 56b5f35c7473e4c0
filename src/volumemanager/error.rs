//! Errors of volumes.

use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;

use super::chain;
use super::host_path::HostPathError;
use super::huge_pages::HugePagesError;
use super::payload::PayloadError;
use super::remote::RemoteError;
use crate::core::volumes::VolumeMode;
use crate::core::volumes::backoff::BackOff;
use crate::kuberuntime::resources::QuantityError;
use crate::store::CommitError;
use crate::types::events::{Event, EventRecorder, EventType};
use crate::types::{PodUid, Stamp};

/// A volume could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// It is of a kind, or in a medium, that is not supported.
    #[error(
        "mount volume {volume} of pod {pod}: {what} is not supported; use emptyDir, hostPath, configMap, secret, downwardAPI, projected, nfs, iscsi or a claim"
    )]
    Unsupported {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Invalid item.
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
    /// Huge pages cannot be had.
    #[error("mount volume {volume} of pod {pod}: {source}")]
    HugePages {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Why.
        source: HugePagesError,
    },
    /// Its content is not available.
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
        /// Verb of the failed operation.
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
    /// A volume cannot be resolved: its claim, what it is bound to, or what that is attached by.
    #[error("mount volume {volume} of pod {pod}: {why}")]
    Unresolved {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Why, for users.
        why: String,
    },
    /// A volume whose storage is elsewhere cannot be mounted.
    #[error(transparent)]
    Remote(Box<RemoteFailure>),
    /// A volume whose storage is elsewhere cannot be unmounted.
    #[error("unmount volume {volume} of pod {pod}")]
    Unpublish {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// It has just failed; else it is left alone after a former failure.
        fresh: bool,
        /// Until when it is left alone; the first of them, if there are more.
        until: Stamp,
        /// Why.
        #[source]
        source: RemoteError,
    },
    /// Volumes are not there after a long time.
    #[error(
        "Unable to attach or mount volumes: unmounted volumes=[{unmounted}], unattached volumes=[{unattached}], failed to process volumes=[]: timed out waiting for the condition"
    )]
    TimedOut {
        /// UID.
        pod: PodUid,
        /// Their names.
        unmounted: String,
        /// Those that nobody has attached.
        unattached: String,
    },
    /// Unmounts take long.
    #[error(
        "unmount volumes of pod {pod}: {volumes} did not end within {seconds} s; what hangs goes on, and nothing of the pod is removed before it ends"
    )]
    Slow {
        /// UID.
        pod: PodUid,
        /// Volumes, and what is done to them.
        volumes: String,
        /// Seconds waited so far.
        seconds: u64,
    },
    /// The description of a volume on record is gone.
    #[error(
        "unmount volume {volume} of pod {pod}: how {plugin} mounted it is not on record any more; unmount {path} by hand, then remove the directory"
    )]
    Lost {
        /// UID.
        pod: PodUid,
        /// The volume.
        volume: String,
        /// Plugin.
        plugin: String,
        /// Path of the mount.
        path: String,
    },
    /// Something keeps a pod's directory from being removed.
    #[error("remove directory {} of pod {pod}: {what}", path.display())]
    InUse {
        /// UID.
        pod: PodUid,
        /// The directory.
        path: PathBuf,
        /// Description of the obstacle.
        what: String,
    },
}

/// A step of a mount that failed, or that is held back since it failed.
#[derive(Clone, Debug)]
pub struct RemoteFailure {
    /// UID.
    pub pod: PodUid,
    /// As the pod names it.
    pub volume: String,
    /// As its directory is named: the persistent volume's name.
    pub name: String,
    /// Files or a device.
    pub mode: VolumeMode,
    /// It is about what all pods share.
    pub staging: bool,
    /// It has just failed; else it is left alone after a former failure.
    pub fresh: bool,
    /// Until when it is left alone.
    pub backoff: BackOff,
    /// Key of what is left alone: the volume, or what all pods share.
    pub key: String,
    /// The device file that it is on, if the node has to have one.
    pub device: Option<PathBuf>,
    /// The CSI driver that mounts it, if one does.
    pub driver: Option<String>,
    /// Why.
    pub source: RemoteError,
}

impl std::fmt::Display for RemoteFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pod, volume, .. } = self;
        write!(f, "mount volume {volume} of pod {pod}: {}", self.source)?;
        if !self.fresh {
            let until = self.backoff.until.rfc3339();
            let wait = self.backoff.wait;
            write!(
                f,
                "; no retries permitted until {until} (durationBeforeRetry {wait:?})"
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for RemoteFailure {}

impl RemoteFailure {
    fn event(&self, pod: &Pod) -> Event {
        let step = match (self.mode, self.staging) {
            (VolumeMode::Filesystem, true) => "MountVolume.MountDevice",
            (VolumeMode::Filesystem, false) => "MountVolume.SetUp",
            (VolumeMode::Block, true) => "MapVolume.SetUpDevice",
            (VolumeMode::Block, false) => "MapVolume.MapPodDevice",
        };
        let reason = match (&self.source, self.mode) {
            (RemoteError::Waiting(why), _) if is_attach(why) => FAILED_ATTACH,
            (_, VolumeMode::Filesystem) => FAILED_MOUNT,
            (_, VolumeMode::Block) => "FailedMapVolume",
        };
        let (name, why) = (&self.name, &self.source);
        let text = format!("{step} failed for volume \"{name}\" : {why}");
        Event::pod(EventType::Warning, pod, reason, text)
    }
}

const FAILED_MOUNT: &str = "FailedMount";
const FAILED_ATTACH: &str = "FailedAttachVolume";

/// Returns whether the volume waits to be attached.
fn is_attach(why: &str) -> bool {
    why.contains("attach")
}

impl VolumeError {
    /// Reason of the event.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unresolved { why, .. } if is_attach(why) => FAILED_ATTACH,
            _ => FAILED_MOUNT,
        }
    }

    /// When what is left alone after a failure may be tried again.
    pub fn retry_at(&self) -> Option<Stamp> {
        match self {
            Self::Remote(failure) => Some(failure.backoff.until),
            Self::Unpublish { until, .. } => Some(*until),
            _ => None,
        }
    }

    /// Volumes of a pod that are not there after a long time.
    pub(super) fn timed_out(pod: &PodUid, unmounted: &[String]) -> Self {
        Self::TimedOut {
            pod: pod.clone(),
            unmounted: unmounted.join(" "),
            unattached: String::new(),
        }
    }

    /// Tells users of it, unless they know.
    pub(super) fn tell(&self, pod: &Pod, volume: &str, recorder: &dyn EventRecorder) {
        let event = match self {
            Self::Remote(failure) if !failure.fresh => return,
            Self::Remote(failure) => failure.event(pod),
            Self::TimedOut { .. } => self.pod_event(pod),
            _ => self.event(pod, volume),
        };
        recorder.record(event);
    }

    /// The event that tells users of what is not about a single volume.
    pub(super) fn pod_event(&self, pod: &Pod) -> Event {
        Event::pod(EventType::Warning, pod, self.reason(), chain(self))
    }

    fn event(&self, pod: &Pod, volume: &str) -> Event {
        let why = match self {
            Self::Content { source, .. } => source.to_string(),
            Self::Unresolved { why, .. } => why.clone(),
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

//! Plugins for remote volumes: CSI drivers, NFS, iSCSI, disks of this node.
//!
//! The manager decides, records the phase and calls. A plugin performs one step and keeps no state. A call that is
//! dropped may have taken effect: each step can be repeated, whatever the outcome of the previous try.

use std::path::PathBuf;
use std::sync::Arc;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;

use crate::core::volumes::Remote;
use crate::kuberuntime::sources::Resolved;

/// Reason why a step did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError {
    /// Something has to come first: an attachment, a driver that registers. Nothing was begun.
    #[error("{0}")]
    Waiting(String),
    /// It failed, and took no effect.
    #[error("{0}")]
    Failed(String),
    /// It failed, took no effect, and never will: the storage cannot have that size. Of [`RemotePlugin::expand`] alone.
    #[error("{0}")]
    Infeasible(String),
    /// It failed, and nobody knows whether it took effect: it is undone when its pod goes.
    #[error("{0}")]
    Uncertain(String),
}

/// Party that gives a mounted volume to the pod's fsGroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupBy {
    /// The manager, file by file.
    Agent,
    /// The storage has done so, or it is not wanted.
    Nobody,
}

/// A mount for a pod.
#[derive(Clone, Debug)]
pub struct Target {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Path where the storage was staged; `None` for volumes without staging ([`Remote::device`]).
    pub staged: Option<PathBuf>,
    /// Path to mount at: a directory, or with [`crate::core::volumes::VolumeMode::Block`] a file that leads to the
    /// device. The plugin makes it; its parent exists (0750).
    pub path: PathBuf,
}

/// One kind of storage. Calls may hang (a dead server, a driver that does not answer): the manager gives
/// each a deadline, and never two at a time for one device or one target.
pub trait RemotePlugin: Send + Sync + 'static {
    /// Makes the storage reachable at `at`, once for all pods (CSI `NodeStageVolume`; iSCSI: log in, make the
    /// file system if there is none, mount). `at` is for the plugin to make; its parent exists.
    fn stage(
        &self,
        volume: Arc<Resolved>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>>;

    /// Mounts it for a pod (`NodePublishVolume`, a bind mount, `mount -t nfs`). Also called again for a mounted
    /// volume that wants so ([`RemotePlugin::wants_republish`]).
    fn publish(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>>;

    /// Undoes `publish`, by the record alone; `Ok` as well when there is nothing. Removes what it made at `path`.
    fn unpublish(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>>;

    /// Undoes `stage`, by the record alone; `Ok` as well when there is nothing.
    fn unstage(
        &self,
        volume: Arc<Remote>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>>;

    /// Returns whether a mounted volume must be published again at each sync.
    fn wants_republish(&self, volume: &Remote) -> bool {
        let _ = volume;
        false
    }

    /// Grows the file system, or tells the driver that the volume has grown (`NodeExpandVolume`), to `bytes`.
    /// `Ok(None)` when there is nothing to do; else the size it has now.
    fn expand(
        &self,
        volume: Arc<Resolved>,
        staged: Option<PathBuf>,
        path: PathBuf,
        bytes: u64,
    ) -> BoxFuture<'static, Result<Option<u64>, RemoteError>> {
        drop((volume, staged, path));
        Box::pin(async move {
            let _ = bytes;
            Ok(None)
        })
    }

    /// Returns the usage; `None` if only the file system itself has it.
    fn usage(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<Option<Usage>, RemoteError>> {
        drop((volume, path));
        Box::pin(async { Ok(None) })
    }
}

/// Usage and capacity of a volume, in bytes and inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Size.
    pub capacity: Option<u64>,
    /// In use.
    pub used: Option<u64>,
    /// Left for pods.
    pub available: Option<u64>,
    /// Inodes there are.
    pub inodes: Option<u64>,
    /// Inodes in use.
    pub inodes_used: Option<u64>,
    /// Inodes left.
    pub inodes_free: Option<u64>,
    /// True if the driver reports a problem with the volume.
    pub abnormal: bool,
}

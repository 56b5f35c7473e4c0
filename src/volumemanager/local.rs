//! Disks and directories of this node: `local` persistent volumes; upstream's `pkg/volume/local`.
//!
//! A directory is bind-mounted for the pod. A disk is formatted if it is empty, mounted once at its global path,
//! and bind-mounted for each pod; as a raw device it is linked. A file that stands for a disk gets a loop device.
//!
//! **Invariant:** nothing is ever made or removed at the volume's own path.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::LocalVolumeSource;

use super::attached::Attached;
use super::block;
use super::command::{Call, Tools};
use super::disk::{self, Wanted, begun, bind, failed, join_options, mounted_at, run, tool_failed};
use super::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use super::turns::Turns;
use crate::core::volumes::{Remote, Source, VolumeMode};
use crate::kuberuntime::sources::Resolved;

/// Mounts and links what is on this node.
#[derive(Clone, Debug)]
pub struct LocalPlugin {
    tools: Tools,
    attached: Attached,
    turns: Turns,
}

/// Type of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Directory,
    Disk,
    File,
    Other,
}

impl LocalPlugin {
    /// Formats and mounts by these tools; `attached` knows its loop devices.
    pub fn new(tools: Tools, attached: Attached) -> Self {
        Self {
            tools,
            attached,
            turns: Turns::default(),
        }
    }

    async fn stage_here(&self, volume: &Remote, at: PathBuf) -> Result<(), RemoteError> {
        let local = local_of(volume)?;
        let path = path_of(local)?;
        let kind = kind_of(path.clone()).await?;
        match (volume.mode, kind) {
            (VolumeMode::Filesystem, Kind::Directory) => Ok(()),
            (VolumeMode::Filesystem, Kind::Disk) => {
                let fs_type = local.fs_type.as_deref();
                let wanted = Wanted::new(fs_type, &volume.mount_options, false)?;
                disk::format_and_mount(&self.tools, &path, &at, &wanted).await
            }
            (VolumeMode::Filesystem, _) => Err(RemoteError::Failed(format!(
                "only directory and block device are supported, {} is neither; use volumeMode Block for a file that holds a disk",
                path.display()
            ))),
            (VolumeMode::Block, Kind::Disk | Kind::File) => {
                let device = self.device(&path, kind).await?;
                // There may be a loop device now.
                let done = run(move || block::link(&device, &at)).await;
                done.map_err(begun)
            }
            (VolumeMode::Block, _) => Err(not_a_device(&path)),
        }
    }

    /// The device to hand out: of a file its loop device.
    async fn device(&self, path: &Path, kind: Kind) -> Result<PathBuf, RemoteError> {
        match kind {
            Kind::Disk => Ok(path.to_owned()),
            Kind::File => block::attach_loop(&self.tools, &self.attached, path).await,
            Kind::Directory | Kind::Other => Err(not_a_device(path)),
        }
    }

    async fn publish_here(&self, volume: &Remote, target: &Target) -> Result<GroupBy, RemoteError> {
        let to = target.path.clone();
        let path = path_of(local_of(volume)?)?;
        if let (VolumeMode::Block, Some(staged)) = (volume.mode, target.staged.clone()) {
            let done = run(move || {
                let device = fs::read_link(&staged).map_err(failed("follow", &staged))?;
                block::link(&device, &to)
            });
            done.await?;
            return Ok(GroupBy::Nobody);
        }
        let kind = kind_of(path.clone()).await?;
        let staged = target.staged.clone();
        let read_only = volume.read_only;
        let options = join_options(&volume.mount_options, &[])?;
        run(move || {
            let from = match (kind, staged) {
                (Kind::Directory, _) => path,
                (Kind::Disk, Some(staged)) => {
                    let found =
                        mounted_at(&staged).map_err(failed("look for mount at", &staged))?;
                    if found.is_none() {
                        return Err(RemoteError::Failed(format!(
                            "{} is not mounted at {}; it has to be first",
                            path.display(),
                            staged.display()
                        )));
                    }
                    staged
                }
                _ => return Err(not_a_device(&path)),
            };
            bind(&from, &to, read_only)
        })
        .await?;
        // Those of a disk are its own mount's.
        if kind == Kind::Directory && !options.is_empty() {
            self.restrict(&target.path, &options, read_only).await?;
        }
        Ok(if read_only {
            GroupBy::Nobody
        } else {
            GroupBy::Agent
        })
    }

    /// Gives a bind mount options of its own (`noexec` and the like), beside those that it has.
    async fn restrict(&self, at: &Path, options: &str, read_only: bool) -> Result<(), RemoteError> {
        let end = if read_only { ",ro" } else { "" };
        let options = format!("remount,bind,{options}{end}");
        let call = Call::new("mount")
            .flags(["-o"])
            .data("mountOptions", &options)
            .flags(["--"])
            .path(at);
        let what = format!("mount with options at {}", at.display());
        let done = self.tools.succeed(call).await;
        done.map(drop)
            .map_err(|error| begun(tool_failed(&what, &error)))
    }

    async fn unstage_here(&self, volume: &Remote, at: PathBuf) -> Result<(), RemoteError> {
        if volume.mode == VolumeMode::Filesystem {
            return disk::unmount(&self.tools, &at, &format!("volume {}", volume.name)).await;
        }
        let path = path_of(local_of(volume)?)?;
        // A file that is gone may still have a loop device; a disk never has one of ours.
        let kind = kind_of(path.clone()).await;
        if !matches!(kind, Ok(Kind::Disk)) {
            block::detach_loop(&self.tools, &self.attached, &path, &at).await?;
        }
        run(move || block::unlink(&at)).await
    }

    /// Grows a file system to its device's size; upstream's `resizefs`.
    async fn grow(
        &self,
        volume: &Remote,
        staged: Option<PathBuf>,
        bytes: u64,
    ) -> Result<Option<u64>, RemoteError> {
        let path = path_of(local_of(volume)?)?;
        let (Some(staged), VolumeMode::Filesystem) = (staged, volume.mode) else {
            return Ok(None);
        };
        if kind_of(path.clone()).await? != Kind::Disk {
            return Ok(None);
        }
        let at = staged.clone();
        let found = run(move || mounted_at(&at).map_err(failed("look for mount at", &at))).await?;
        let Some(found) = found else {
            return Ok(None);
        };
        let call = match found.fstype.as_str() {
            "ext2" | "ext3" | "ext4" => Call::new("resize2fs").path(&path),
            "xfs" => Call::new("xfs_growfs").flags(["-d"]).path(&staged),
            "btrfs" => Call::new("btrfs")
                .flags(["filesystem", "resize", "max"])
                .path(&staged),
            other => {
                return Err(RemoteError::Failed(format!(
                    "resize of format {other} is not supported for device {} mounted at {}",
                    path.display(),
                    staged.display()
                )));
            }
        };
        let what = format!("grow the file system of {}", path.display());
        let done = self.tools.succeed(call.never_killed()).await;
        done.map_err(|e| tool_failed(&what, &e))?;
        Ok(Some(bytes))
    }
}

fn not_a_device(path: &Path) -> RemoteError {
    RemoteError::Failed(format!(
        "{} is neither a block device nor a file that could stand for one",
        path.display()
    ))
}

fn local_of(volume: &Remote) -> Result<&LocalVolumeSource, RemoteError> {
    match &volume.source {
        Source::Local(local) => Ok(local),
        _ => Err(RemoteError::Failed(format!(
            "volume {} is not of this node",
            volume.name
        ))),
    }
}

fn path_of(local: &LocalVolumeSource) -> Result<PathBuf, RemoteError> {
    let path = &local.path;
    let climbs = Path::new(path)
        .components()
        .any(|c| c == Component::ParentDir);
    if climbs || !path.starts_with('/') || path.contains(['\0', '\n']) {
        return Err(RemoteError::Failed(format!(
            "invalid path: {path:?} must be absolute and may not contain '..'"
        )));
    }
    Ok(PathBuf::from(path))
}

/// Returns the type of a path; links are followed, as for `/dev/disk/by-id`.
async fn kind_of(path: PathBuf) -> Result<Kind, RemoteError> {
    run(move || match fs::metadata(&path) {
        Ok(found) if found.is_dir() => Ok(Kind::Directory),
        Ok(found) if found.file_type().is_block_device() => Ok(Kind::Disk),
        Ok(found) if found.is_file() => Ok(Kind::File),
        Ok(_) => Ok(Kind::Other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(RemoteError::Failed(format!(
            "path {:?} does not exist",
            path.display().to_string()
        ))),
        Err(error) => Err(failed("look at", &path)(error)),
    })
    .await
}

impl RemotePlugin for LocalPlugin {
    fn stage(
        &self,
        volume: Arc<Resolved>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let this = self.clone();
        async move {
            let name = volume.remote.device().unwrap_or_default();
            let work = this.clone();
            let work = async move { work.stage_here(&volume.remote, at).await };
            this.turns.take(&name, work).await
        }
        .boxed()
    }

    fn publish(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        let this = self.clone();
        async move { this.publish_here(&volume.remote, &target).await }.boxed()
    }

    fn unpublish(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let this = self.clone();
        async move {
            if volume.mode == VolumeMode::Block {
                return run(move || block::unlink(&path)).await;
            }
            disk::unmount(&this.tools, &path, &format!("volume {}", volume.name)).await
        }
        .boxed()
    }

    fn unstage(
        &self,
        volume: Arc<Remote>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let this = self.clone();
        async move {
            let name = volume.device().unwrap_or_default();
            let work = this.clone();
            let work = async move { work.unstage_here(&volume, at).await };
            this.turns.take(&name, work).await
        }
        .boxed()
    }

    fn expand(
        &self,
        volume: Arc<Resolved>,
        staged: Option<PathBuf>,
        _path: PathBuf,
        bytes: u64,
    ) -> BoxFuture<'static, Result<Option<u64>, RemoteError>> {
        let this = self.clone();
        async move {
            let name = volume.remote.device().unwrap_or_default();
            let work = this.clone();
            let work = async move { work.grow(&volume.remote, staged, bytes).await };
            this.turns.take(&name, work).await
        }
        .boxed()
    }
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;

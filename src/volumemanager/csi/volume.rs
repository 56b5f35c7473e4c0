//! Volumes of CSI drivers: each step of [`RemotePlugin`] as calls to the driver. Upstream: `csi_attacher`,
//! `csi_mounter`, `csi_block`, `expander`.
//!
//! In: what was resolved, or what is on record. Out: mounts that the driver has made. Beside each lies a file
//! `vol_data.json` ([`files`]) that names driver and handle as upstream's does.
//!
//! **Invariant:** nothing is removed that is not an empty directory, a link or an empty file of this module's own
//! making, and nothing at all while it is mounted.

mod device;
mod files;
mod request;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;
use tonic::Code;

use self::device::Places;
use super::client::{CsiClient, CsiError, NodeCapabilities};
use super::proto::{
    CapacityRange, NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
};
use super::registry::Drivers;
use crate::core::volumes::{Csi, Remote, Source, VolumeMode, sha256_hex};
use crate::kuberuntime::security;
use crate::kuberuntime::sources::Resolved;
use crate::types::blocking;
use crate::volumemanager::command::Tools;
use crate::volumemanager::remote::{GroupBy, RemoteError, RemotePlugin, Target, Usage};

/// Mounts volumes of CSI drivers. Cheap to clone.
#[derive(Clone)]
pub struct CsiPlugin {
    drivers: Drivers,
    root: Arc<Path>,
    node_name: Arc<str>,
    tools: Tools,
}

/// A volume and its driver, ready to be called.
struct Call {
    client: CsiClient,
    can: NodeCapabilities,
    csi: Csi,
}

impl CsiPlugin {
    /// A plugin for the drivers that are registered. `root` is the agent's directory, as `/var/lib/kubelet`.
    pub fn new(drivers: Drivers, root: impl AsRef<Path>, node_name: &str) -> Self {
        Self {
            drivers,
            root: Arc::from(root.as_ref()),
            node_name: Arc::from(node_name),
            tools: Tools::default(),
        }
    }

    /// Returns the staging path of a raw device; `name` is that of its persistent volume. Upstream: `getStagingPath`.
    pub fn device_staging_path(root: &Path, name: &str) -> PathBuf {
        Places::new(root, name).staging()
    }

    /// Returns the staging path of a volume with files. Upstream: `makeDeviceMountPath`.
    pub fn staging_path(root: &Path, driver: &str, handle: &str) -> PathBuf {
        root.join("plugins/kubernetes.io/csi")
            .join(driver)
            .join(sha256_hex(&[handle]))
            .join("globalmount")
    }

    fn client(&self, csi: &Csi) -> Result<CsiClient, RemoteError> {
        let driver = &csi.source.driver;
        self.drivers.client(driver).ok_or_else(|| {
            RemoteError::Waiting(format!(
                "driver name {driver} not found in the list of registered CSI drivers"
            ))
        })
    }

    async fn call(&self, csi: Csi) -> Result<Call, RemoteError> {
        let client = self.client(&csi)?;
        // Nothing was begun, whatever becomes of this.
        let can =
            client
                .node_get_capabilities()
                .await
                .map_err(|error| match error.is_unreachable() {
                    true => RemoteError::Waiting(error.to_string()),
                    false => RemoteError::Failed(error.to_string()),
                })?;
        Ok(Call { client, can, csi })
    }

    async fn stage(self, volume: Arc<Resolved>, at: PathBuf) -> Result<(), RemoteError> {
        let call = self.call(csi_of(&volume.remote)?).await?;
        let (driver, handle) = (
            call.csi.source.driver.clone(),
            call.csi.source.volume_handle.clone(),
        );
        let secret = call.csi.source.node_stage_secret_ref.as_ref();
        let secrets = request::secrets(&volume, secret)?;
        if volume.remote.mode == VolumeMode::Filesystem {
            let data = files::device_data(&driver, &handle);
            let at = at.clone();
            run(move || files::write_beside(&at, &data)).await?;
        }
        let existed = {
            let at = at.clone();
            // What an earlier call mounted may hang: the mount table is asked, and not the mount.
            run(move || Ok(files::is_mounted(&at)? || files::make_dir(&at)?)).await?
        };
        if !call.can.stage {
            return Ok(());
        }
        let group = call.csi.fs_group.filter(|_| call.can.mount_group);
        let request = NodeStageVolumeRequest {
            volume_id: handle,
            publish_context: call.csi.publish_context.clone(),
            staging_target_path: text(&at)?,
            volume_capability: Some(request::capability(
                &volume.remote,
                &call.csi,
                call.can,
                group,
            )),
            secrets,
            volume_context: call
                .csi
                .source
                .volume_attributes
                .clone()
                .unwrap_or_default(),
        };
        let staged = call.client.node_stage_volume(request).await;
        self.note_exhausted(&staged);
        if let Err(error) = &staged
            && error.is_final()
            && !existed
        {
            // It took no effect: nothing is left behind. What cannot be removed now is by the unstaging.
            let mode = volume.remote.mode;
            let removed = run(move || remove_staged(mode, &at)).await;
            note_leftover(removed);
        }
        Ok(staged?)
    }

    async fn publish(self, volume: Arc<Resolved>, target: Target) -> Result<GroupBy, RemoteError> {
        let path = target.path.clone();
        let files = volume.remote.mode == VolumeMode::Filesystem;
        let published = self.publish_whole(volume, target).await;
        if files
            && matches!(
                published,
                Err(RemoteError::Waiting(_) | RemoteError::Failed(_))
            )
        {
            // Made for this volume alone; it stays when there is anything in it.
            note_leftover(run(move || files::remove_empty_parent(&path)).await);
        }
        published
    }

    async fn publish_whole(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> Result<GroupBy, RemoteError> {
        let remote = &volume.remote;
        let call = self.call(csi_of(remote)?).await?;
        let at = self.published(remote, &target.path)?;
        let staged = match &target.staged {
            Some(staged) if call.can.stage => text(staged)?,
            _ => String::new(),
        };
        let group = security::fs_group(&target.pod).map(i64::from);
        let mut context = call
            .csi
            .source
            .volume_attributes
            .clone()
            .unwrap_or_default();
        if call.csi.pod_info {
            context.extend(request::pod_info(&target.pod, call.csi.ephemeral));
        }
        let publish_secret = call.csi.source.node_publish_secret_ref.as_ref();
        let mut secrets = request::secrets(&volume, publish_secret)?;
        if let Some((key, tokens)) = request::tokens(&volume) {
            let into = match call.csi.tokens_in_secrets {
                true => &mut secrets,
                false => &mut context,
            };
            into.insert(key, tokens);
        }
        let capability = request::capability(
            remote,
            &call.csi,
            call.can,
            group.filter(|_| call.can.mount_group),
        );
        let request = NodePublishVolumeRequest {
            volume_id: call.csi.source.volume_handle.clone(),
            publish_context: call.csi.publish_context.clone(),
            staging_target_path: staged,
            target_path: text(&at)?,
            volume_capability: Some(capability),
            readonly: remote.read_only,
            secrets,
            volume_context: context,
        };
        let prepared = self.prepare(remote, &call.csi, &target.path, &at).await?;
        let published = call.client.node_publish_volume(request).await;
        self.note_exhausted(&published);
        if let Err(error) = published {
            // What was published before stays, and so does what may have taken effect, now or earlier.
            if error.is_final() && prepared.fresh {
                let removed = self.remove_published(remote, target.path, at).await;
                note_leftover(removed);
            }
            return Err(error.into());
        }
        if remote.mode == VolumeMode::Block {
            let link = target.path;
            let linked = run(move || files::link(&link, &at)).await;
            // The driver has published it by now: that is to be undone.
            linked.map_err(|error| RemoteError::Uncertain(error.to_string()))?;
            return Ok(GroupBy::Nobody);
        }
        let by_agent = !call.can.mount_group && request::wants_group(remote, &call.csi, group);
        Ok(match by_agent {
            true => GroupBy::Agent,
            false => GroupBy::Nobody,
        })
    }

    async fn unpublish(self, volume: Arc<Remote>, path: PathBuf) -> Result<(), RemoteError> {
        let csi = csi_of(&volume)?;
        let at = self.published(&volume, &path)?;
        let begun = {
            let (path, at, data) = (path.clone(), at.clone(), self.data_dir(&volume, &path)?);
            run(move || Ok(files::has_data(&data) || files::exists(&path) || files::exists(&at)))
                .await?
        };
        // The data is written before the driver is called. It is looked for first: what is mounted may hang.
        if !begun {
            return Ok(());
        }
        let client = self.client(&csi)?;
        if volume.mode == VolumeMode::Block {
            let bound = self.places(&volume).dev().join(pod_of(&path)?);
            device::release(&self.tools, &bound).await?;
        }
        let done = client
            .node_unpublish_volume(&csi.source.volume_handle, &text(&at)?)
            .await;
        self.undone(done, &at).await?;
        fail::fail_point!("volumemanager::csi::unpublished");
        self.remove_published(&volume, path, at).await
    }

    async fn unstage(self, volume: Arc<Remote>, at: PathBuf) -> Result<(), RemoteError> {
        let csi = csi_of(&volume)?;
        let begun = {
            let at = at.clone();
            run(move || Ok(at.parent().is_some_and(files::has_data) || files::exists(&at))).await?
        };
        if !begun {
            return Ok(());
        }
        let call = self.call(csi).await?;
        if call.can.stage {
            let handle = &call.csi.source.volume_handle;
            let done = call.client.node_unstage_volume(handle, &text(&at)?).await;
            self.undone(done, &at).await?;
            fail::fail_point!("volumemanager::csi::unstaged");
        }
        run(move || remove_staged(volume.mode, &at)).await
    }

    /// A driver without a slot for the volume is asked how many it has.
    fn note_exhausted(&self, done: &Result<(), CsiError>) {
        if let Err(error) = done
            && error.code == Code::ResourceExhausted
        {
            self.drivers.exhausted(&error.driver);
        }
    }

    /// A driver that does not know the volume any more has nothing mounted, if the mount table says so too.
    async fn undone(&self, done: Result<(), CsiError>, at: &Path) -> Result<(), RemoteError> {
        let at = at.to_owned();
        let shown = at.display().to_string();
        let Err(error) = done else {
            return match run(move || files::is_mounted(&at)).await? {
                false => Ok(()),
                true => Err(RemoteError::Failed(format!(
                    "the driver says that it is done, and {shown} is still mounted"
                ))),
            };
        };
        if error.code == Code::NotFound && error.is_final() {
            let mounted = run(move || files::is_mounted(&at)).await?;
            if !mounted {
                tracing::info!(path = shown, %error, "the driver does not know a volume that is not mounted any more");
                return Ok(());
            }
        }
        Err(error.into())
    }

    async fn expand(
        self,
        volume: Arc<Resolved>,
        staged: Option<PathBuf>,
        path: PathBuf,
        bytes: u64,
    ) -> Result<Option<u64>, RemoteError> {
        let call = self.call(csi_of(&volume.remote)?).await?;
        if !call.can.expand {
            return Ok(None);
        }
        let at = self.published(&volume.remote, &path)?;
        let staging_target_path = match staged {
            Some(staged) if call.can.stage => text(&staged)?,
            _ => String::new(),
        };
        let group = call.csi.fs_group.filter(|_| call.can.mount_group);
        let secret = call.csi.source.node_expand_secret_ref.as_ref();
        let required_bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let request = NodeExpandVolumeRequest {
            volume_id: call.csi.source.volume_handle.clone(),
            volume_path: text(&at)?,
            capacity_range: Some(CapacityRange {
                required_bytes,
                limit_bytes: 0,
            }),
            staging_target_path,
            volume_capability: Some(request::capability(
                &volume.remote,
                &call.csi,
                call.can,
                group,
            )),
            secrets: request::secrets(&volume, secret)?,
        };
        let grown = call.client.node_expand_volume(request).await;
        let grown = grown.map_err(|error| match error.code {
            // Upstream: isInfeasibleError.
            Code::InvalidArgument | Code::OutOfRange | Code::NotFound if error.is_final() => {
                RemoteError::Infeasible(error.to_string())
            }
            _ => error.into(),
        });
        Ok(Some(grown?.unwrap_or(bytes)))
    }

    async fn usage(self, volume: Arc<Remote>, path: PathBuf) -> Result<Option<Usage>, RemoteError> {
        let call = self.call(csi_of(&volume)?).await?;
        if !call.can.stats {
            return Ok(None);
        }
        let source = &call.csi.source;
        let (driver, handle) = (&source.driver, &source.volume_handle);
        let staged = match (call.can.stage && !call.csi.ephemeral, volume.mode) {
            (true, VolumeMode::Filesystem) => {
                text(&Self::staging_path(&self.root, driver, handle))?
            }
            (true, VolumeMode::Block) => text(&self.places(&volume).staging())?,
            (false, _) => String::new(),
        };
        let at = self.published(&volume, &path)?;
        let stats = call
            .client
            .node_get_volume_stats(&source.volume_handle, &text(&at)?, &staged)
            .await?;
        if stats.usage.abnormal {
            tracing::debug!(
                driver = source.driver,
                handle = source.volume_handle,
                condition = stats.condition,
                "a driver says that something is wrong with a volume"
            );
        }
        Ok(Some(stats.usage))
    }

    /// Returns the path where the driver publishes: the target itself, or for a device the file that the target leads
    /// to.
    fn published(&self, volume: &Remote, path: &Path) -> Result<PathBuf, RemoteError> {
        if volume.mode == VolumeMode::Filesystem {
            return Ok(path.to_owned());
        }
        Ok(self.places(volume).published().join(pod_of(path)?))
    }

    fn places(&self, volume: &Remote) -> Places {
        Places::new(&self.root, &volume.name)
    }

    /// Returns the directory with the data file of a published volume.
    fn data_dir(&self, volume: &Remote, path: &Path) -> Result<PathBuf, RemoteError> {
        if volume.mode == VolumeMode::Block {
            return Ok(self.places(volume).data());
        }
        let parent = path.parent().map(Path::to_owned);
        parent.ok_or_else(|| bad_path(path))
    }

    async fn prepare(
        &self,
        volume: &Remote,
        csi: &Csi,
        path: &Path,
        at: &Path,
    ) -> Result<files::Prepared, RemoteError> {
        let data = files::volume_data(volume, csi, &self.node_name);
        let dir = self.data_dir(volume, path)?;
        let at = at.to_owned();
        let dev = self.places(volume).dev();
        let dev = (volume.mode == VolumeMode::Block).then_some(dev);
        run(move || {
            files::make_dir(&dir)?;
            if let Some(dev) = dev {
                files::make_dir(&dev)?;
            }
            if let Some(parent) = at.parent() {
                files::make_dir(parent)?;
            }
            let fresh = !files::has_data(&dir) && !files::is_mounted(&at)?;
            files::write_data(&dir, &data)?;
            Ok(files::Prepared { fresh })
        })
        .await
    }

    async fn remove_published(
        &self,
        volume: &Remote,
        path: PathBuf,
        at: PathBuf,
    ) -> Result<(), RemoteError> {
        if volume.mode == VolumeMode::Filesystem {
            return run(move || files::remove_mount_dir(&at)).await;
        }
        let places = self.places(volume);
        run(move || device::remove(&path, &at, &places)).await
    }
}

impl RemotePlugin for CsiPlugin {
    fn stage(
        &self,
        volume: Arc<Resolved>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        Box::pin(self.clone().stage(volume, at))
    }

    fn publish(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        Box::pin(self.clone().publish(volume, target))
    }

    fn unpublish(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        Box::pin(self.clone().unpublish(volume, path))
    }

    fn unstage(
        &self,
        volume: Arc<Remote>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        Box::pin(self.clone().unstage(volume, at))
    }

    fn wants_republish(&self, volume: &Remote) -> bool {
        matches!(&volume.source, Source::Csi(csi) if csi.requires_republish)
    }

    fn expand(
        &self,
        volume: Arc<Resolved>,
        staged: Option<PathBuf>,
        path: PathBuf,
        bytes: u64,
    ) -> BoxFuture<'static, Result<Option<u64>, RemoteError>> {
        Box::pin(self.clone().expand(volume, staged, path, bytes))
    }

    fn usage(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<Option<Usage>, RemoteError>> {
        Box::pin(self.clone().usage(volume, path))
    }
}

/// Removes what a volume was staged at.
fn remove_staged(mode: VolumeMode, at: &Path) -> io::Result<()> {
    match mode {
        VolumeMode::Filesystem => files::remove_mount_dir(at),
        VolumeMode::Block => device::remove_staging(at),
    }
}

fn csi_of(volume: &Remote) -> Result<Csi, RemoteError> {
    match &volume.source {
        Source::Csi(csi) => Ok((**csi).clone()),
        _ => Err(RemoteError::Failed(format!(
            "volume {} is not one of a CSI driver",
            volume.name
        ))),
    }
}

/// The pod a path belongs to: `pods/<uid>/volumeDevices/<plugin>/<volume>`.
fn pod_of(path: &Path) -> Result<&std::ffi::OsStr, RemoteError> {
    let pod = path.ancestors().nth(3).and_then(Path::file_name);
    pod.ok_or_else(|| bad_path(path))
}

fn bad_path(path: &Path) -> RemoteError {
    RemoteError::Failed(format!(
        "{} is not the path of a pod's volume",
        path.display()
    ))
}

fn text(path: &Path) -> Result<String, RemoteError> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| {
        RemoteError::Failed(format!(
            "{} cannot be told to a driver: it is not UTF-8",
            path.display()
        ))
    })
}

/// File system work beside the runtime's threads; what it does can be done again.
async fn run<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, RemoteError> {
    match blocking::run(work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(RemoteError::Failed(error.to_string())),
        Err(error) => Err(RemoteError::Uncertain(error.to_string())),
    }
}

fn note_leftover(removed: Result<(), RemoteError>) {
    if let Err(error) = removed {
        tracing::debug!(%error, "what a failed step left behind stays until it is undone");
    }
}

/// Names and values that go to a driver.
type Pairs = BTreeMap<String, String>;

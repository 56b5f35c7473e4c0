//! Usage of remote volumes.

use futures::future::BoxFuture;

use super::remote::{RemoteError, Usage};
use super::{RemoteVolume, VolumeManager};

impl VolumeManager {
    /// Returns the usage that a volume's driver reports; `Ok(None)` if only the file system has it. Nobody waits for
    /// other steps on the volume.
    ///
    /// # Errors
    /// What the driver answers. It may never answer.
    pub fn usage(
        &self,
        volume: &RemoteVolume,
    ) -> BoxFuture<'static, Result<Option<Usage>, RemoteError>> {
        match self.plugins.get(volume.plugin) {
            Some(plugin) => plugin.usage(volume.remote.clone(), volume.path.clone()),
            None => Box::pin(async { Ok(None) }),
        }
    }
}

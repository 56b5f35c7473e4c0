//! What volumes use whose storage is elsewhere.

use futures::future::BoxFuture;

use super::remote::{RemoteError, Usage};
use super::{RemoteVolume, VolumeManager};

impl VolumeManager {
    /// What the driver of a volume says that it uses; `Ok(None)` when only the file system can tell. Nobody waits for
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

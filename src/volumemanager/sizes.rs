//! The size that shared storage has on this node. Each node that has it mounted grows its own file system, while the
//! claim tells of one of them: what this node did is on record as `sizes//<device>`, JSON, and goes with the device.
//! Upstream keeps it in the actual state of the world, in memory.

use crate::core::state::{Transaction, VolumeRecord};
use crate::core::volumes::Remote;
use crate::core::volumes::keys;
use crate::store::CommitError;

use super::VolumeManager;

impl VolumeManager {
    /// How many bytes a device has here; `None` when that is not on record.
    pub fn size_here(&self, remote: &Remote) -> Option<u64> {
        let key = keys::size_of(&remote.device_key()?)?;
        let seen = self.store.snapshot();
        // What cannot be read counts as not known: it is written anew.
        seen.object(&key).map(|keys::Size(bytes)| bytes)
    }

    /// Records how many bytes a device has here; nothing of what is not staged.
    ///
    /// # Errors
    /// It is not on record.
    pub async fn note_size(&self, remote: &Remote, bytes: u64) -> Result<(), CommitError> {
        let Some(device) = remote.device_key() else {
            return Ok(());
        };
        let staged = self
            .store
            .snapshot()
            .record::<VolumeRecord>(&device)
            .is_some();
        let Some(key) = keys::size_of(&device).filter(|_| staged) else {
            return Ok(());
        };
        let put = Transaction::new().put_object(&key, &keys::Size(bytes), self.clock.now());
        self.store.commit(put).await.map(drop)
    }
}

//! The hooks of an agent whose store is on disk.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use super::view::Quarantined;
use super::{AdminHooks, BoxError};
use crate::store::Store;
use crate::store::backup::{self, BackupMeta};
use crate::store::layout::Layout;
use crate::types::Clock;

/// Backups of the newest snapshot; the quarantined records as the store has them.
pub struct StoreHooks {
    store: Store,
    clock: Arc<dyn Clock>,
    layout: Layout,
}

impl StoreHooks {
    /// Hooks of `store`, which lives in `layout`.
    pub fn new(store: Store, clock: Arc<dyn Clock>, layout: Layout) -> Self {
        Self {
            store,
            clock,
            layout,
        }
    }
}

impl AdminHooks for StoreHooks {
    fn quarantined(&self) -> Vec<Quarantined> {
        let set_aside = self.store.set_aside();
        set_aside.iter().map(Quarantined::from).collect()
    }

    fn write_backup(&self, to: &mut dyn Write) -> Result<(), BoxError> {
        let state = self.store.snapshot();
        let version = *self.store.published().borrow();
        let meta = BackupMeta::of(&state, version, self.clock.now());
        // Not in the state directory: a backup to another disk is wanted most when this one is full.
        let temporary = tempfile::tempdir()?;
        let path = temporary.path().join("backup");
        backup::write(&state, &path, &meta)?;
        io::copy(&mut fs::File::open(&path)?, to)?;
        Ok(())
    }

    fn save_backup(&self) -> Result<PathBuf, BoxError> {
        let on_disk = self.store.snapshot_on_disk();
        let (state, version) = tokio::runtime::Handle::current().block_on(on_disk)?;
        let meta = BackupMeta::of(&state, version, self.clock.now());
        let path = self.layout.backups().join(meta.file_name());
        backup::write(&state, &path, &meta)?;
        Ok(path)
    }
}

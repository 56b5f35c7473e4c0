//! A backend that is not open yet, for a node that has to work while its disk does not.
//!
//! It refuses every operation until a `reopen` succeeds; from then on it is the database. The store that uses
//! it holds everything the database holds (it was read from the log), and writes what differs after the
//! `reopen`.

use super::backend::{Backend, BackendError, Op, RawIter, SledBackend, SledOptions};
use super::engine::is_damage;
use super::layout::Layout;
use super::migrate::SCHEMA;
use crate::types::Stamp;

/// A backend that could not be opened yet. Its `reopen` opens the database; one that turns out to be damaged
/// then goes to quarantine, because the store writes everything it knows from memory after a `reopen`.
pub(super) struct ClosedBackend {
    layout: Layout,
    sled: SledOptions,
    now: Stamp,
    reason: String,
    out_of_space: bool,
    inner: Option<SledBackend>,
}

impl ClosedBackend {
    /// One for the database of `layout`, which could not be opened because of `error`.
    pub(super) fn new(layout: Layout, sled: SledOptions, now: Stamp, error: &BackendError) -> Self {
        Self {
            layout,
            sled,
            now,
            reason: error.full_text(),
            out_of_space: error.is_out_of_space(),
            inner: None,
        }
    }

    fn current(&mut self, action: &'static str) -> Result<&mut SledBackend, BackendError> {
        let closed = self.closed(action);
        self.inner.as_mut().ok_or(closed)
    }

    fn closed(&self, action: &'static str) -> BackendError {
        if self.out_of_space {
            return BackendError::OutOfSpace { action };
        }
        BackendError::Engine {
            action,
            reason: self.reason.clone(),
        }
    }

    /// Returns whether it opens the stand-in, because `db` has a newer schema.
    pub(super) fn stands_in(&self) -> bool {
        self.layout.schema().is_some_and(|found| found > SCHEMA) && self.layout.db().exists()
    }

    fn open(&self) -> Result<SledBackend, BackendError> {
        let io = |source| BackendError::io("prepare the state directory", source);
        self.layout.create().map_err(io)?;
        self.layout.settle().map_err(io)?;
        let db = self.layout.db();
        if self.stands_in() {
            return SledBackend::open(self.layout.stand_in(SCHEMA), self.sled.clone());
        }
        match SledBackend::open(&db, self.sled.clone()) {
            Err(error) if is_damage(&error) => {
                self.layout.set_aside(&db, "db", self.now).map_err(io)?;
                SledBackend::open(&db, self.sled.clone())
            }
            other => other,
        }
    }
}

impl Backend for ClosedBackend {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        self.current("write a batch to the database")?.apply(batch)
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.current("flush the database")?.flush()
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.current("sync the database file")?.sync()
    }

    fn iter(&self) -> RawIter<'_> {
        match &self.inner {
            Some(backend) => backend.iter(),
            None => Box::new(std::iter::once(Err(self.closed("read the database")))),
        }
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        match &self.inner {
            Some(backend) => backend.size_on_disk(),
            None => Err(self.closed("measure the database")),
        }
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        match &mut self.inner {
            Some(backend) => backend.reopen(),
            None => {
                self.inner = Some(self.open()?);
                Ok(())
            }
        }
    }

    fn name(&self) -> &'static str {
        "sled"
    }
}

//! Errors of the store, and its health report.

use std::io;

use super::codec::Quarantined;
use crate::core::state::Table;

/// Reason for which a commit did not happen.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// A record the decision was based on has changed; decide again on a fresh snapshot.
    #[error("stale decision: {} {key} changed since it was read", table.name())]
    Stale {
        /// Table of the record.
        table: Table,
        /// Key of the record.
        key: String,
    },
    /// The transaction can never be stored; it is the caller's fault.
    #[error("invalid transaction: {reason}")]
    Invalid {
        /// Description of the problem.
        reason: String,
    },
    /// The store refuses commits until it has recovered; see `StoreHealth`.
    #[error("the store is unavailable: {reason}")]
    Unavailable {
        /// Description of the failure.
        reason: String,
    },
    /// The write or its sync failed; whether it reached the disk is not known.
    #[error("commit failed with unknown outcome: {reason}")]
    Unknown {
        /// Description of the failure.
        reason: String,
    },
    /// The store is shut down.
    #[error("the store is closed")]
    Closed,
}

/// Health of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreHealth {
    /// Commits are accepted.
    Ok,
    /// A write failed: commits are refused and recovery is being tried. Or the disk hangs or does not keep up:
    /// commits wait. Either ends by itself.
    Degraded {
        /// Description of the failure.
        reason: String,
        /// True if the disk is full.
        out_of_space: bool,
    },
}

/// A raw value that could not be used and was moved to quarantine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// Its table, if known.
    pub table: Option<Table>,
    /// Its key, as far as it is text.
    pub key: String,
    /// Description of the problem.
    pub reason: String,
    /// Its length in bytes.
    pub bytes: u64,
}

impl From<&Quarantined> for SetAside {
    fn from(bad: &Quarantined) -> Self {
        Self {
            table: bad.table,
            key: bad.key.clone(),
            reason: bad.reason.to_string(),
            bytes: bad.raw.len() as u64,
        }
    }
}

/// Failure to start a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused a thread.
    #[error("start the writer thread of the store")]
    Spawn(#[source] io::Error),
}

/// Reserved space on the store's file system, for the moment it is full.
///
/// Called on the writer thread. Both calls are idempotent.
pub trait SpaceReserve: Send + 'static {
    /// Frees the space: the disk is full, and the stops that are held must be written.
    ///
    /// # Errors
    /// When the space could not be freed.
    fn release(&mut self) -> io::Result<()>;

    /// Takes the space back after a recovery. Called again every now and then until it succeeds, so it
    /// must not take the last free space of the disk.
    ///
    /// # Errors
    /// When there is not enough space yet.
    fn restore(&mut self) -> io::Result<()>;
}

//! Input and output of opening a store: the vocabulary of [`super::open`].

use std::io;
use std::path::PathBuf;

use super::backend::{Backend, SledOptions};
use super::codec::Loaded;
use super::recover::Identity;
use crate::core::state::EpochReason;
use crate::types::Stamp;

/// Settings for opening a store.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// State directory; made when it is not there.
    pub dir: PathBuf,
    /// Identity of the node that opens it.
    pub identity: Identity,
    /// Something outside of the state directory shows that an agent has worked on this node before: a store
    /// that is not there was lost then.
    pub node_was_used: bool,
    /// Options of the engine.
    pub sled: SledOptions,
    /// Now.
    pub now: Stamp,
}

/// An open store, for [`super::Store::start`].
pub struct Opened {
    /// The engine. After [`Outcome::Unwritable`] it refuses everything until its `reopen` succeeds.
    pub backend: Box<dyn Backend>,
    /// Its records, with a meta record of this node and the right epoch.
    pub loaded: Loaded,
    /// Report of the findings and repairs.
    pub report: OpenReport,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened")
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

/// Outcome of opening a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It opened as it was.
    Opened,
    /// There was none.
    Created,
    /// sled's snapshots or its configuration file were damaged and were moved aside; no record was lost.
    SnapshotsRemoved,
    /// It was damaged. The database went to quarantine and was rebuilt.
    Salvaged {
        /// Records read from the damaged database.
        kept: usize,
        /// Records found there but unusable. Those that left no trace are not counted.
        lost: usize,
        /// Records taken from the newest backup.
        from_backup: usize,
    },
    /// Single records were damaged and were moved to quarantine.
    RecordsLost {
        /// Number of damaged records.
        lost: usize,
        /// Number of them that the newest backup had.
        from_backup: usize,
    },
    /// It opened, without the newest of the commits that had been acknowledged: its end was cut off, or it is an
    /// older copy of itself.
    EndMissing {
        /// Number of missing lines of the journal, if known.
        lines: Option<u64>,
    },
    /// The store has a newer schema than this binary. It is untouched; a stand-in is used.
    NewerSchema {
        /// Its schema, if known.
        found: Option<u32>,
    },
    /// Its records were read, but the database cannot be opened for writing now (a full disk, …). The
    /// node works from memory; commits are refused until the backend's `reopen` succeeds.
    Unwritable {
        /// Why.
        reason: String,
        /// True if freeing space would help.
        out_of_space: bool,
    },
}

/// Findings and repairs of an opening.
#[derive(Clone, Debug)]
pub struct OpenReport {
    /// In short.
    pub outcome: Outcome,
    /// Paths moved to quarantine.
    pub quarantined: Vec<PathBuf>,
    /// The reason of the epoch if this opening began one.
    pub new_epoch: Option<EpochReason>,
    /// A migration that ran before.
    pub migrated_from: Option<u32>,
    /// For the log, events and the operator.
    pub messages: Vec<String>,
}

/// Reason for which a store cannot be opened now. None of these changes the store; the caller tries again.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error("open the store in {}: another process has it open ({reason}); stop that agent first", dir.display())]
    Locked {
        /// State directory.
        dir: PathBuf,
        /// Message of the engine.
        reason: String,
    },
    /// Its directory or files cannot be read, for a reason that is not damage (permissions, too many open
    /// files, a device that fails to read).
    #[error("open the store in {}: its files cannot be read; running pods are not touched", dir.display())]
    Unreadable {
        /// State directory.
        dir: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

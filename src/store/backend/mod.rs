//! Interface between the writer and a key-value engine.
//!
//! The input is batches of raw operations on raw keys (see [`super::codec`] for their meaning); the output is raw
//! pairs. One thread at a time uses a backend.
//!
//! **Invariant:** a batch is applied whole or not at all, also across a crash.
//! **Invariant:** operations applied before a `sync` that returned `Ok` survive a power loss; operations applied before
//! a `flush` that returned `Ok` survive the death of the process.
//! **Invariant:** after any error the outcome of everything since the last `sync` is unknown until
//! [`Backend::reopen`] has succeeded.

mod faulty;
mod memory;
mod sled;

use std::io;

pub use faulty::{Faults, FaultyBackend};
pub use memory::MemoryBackend;
pub use sled::{SledBackend, SledOptions};

/// A raw key with its raw value.
pub type RawPair = (Vec<u8>, Vec<u8>);

/// Raw pairs in key order. After an error the iteration is over.
pub type RawIter<'a> = Box<dyn Iterator<Item = Result<RawPair, BackendError>> + 'a>;

/// One operation of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Create or replace.
    Put {
        /// Raw key.
        key: Vec<u8>,
        /// Raw value.
        value: Vec<u8>,
    },
    /// Remove; removing what is not there is not an error.
    Delete {
        /// Raw key.
        key: Vec<u8>,
    },
}

/// Failure of a backend operation.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The file system is full.
    #[error("{action}: no space left on the device")]
    OutOfSpace {
        /// Operation that failed.
        action: &'static str,
    },
    /// Another process has the store open.
    #[error("{action}: another process has the store open ({reason})")]
    Locked {
        /// Operation that failed.
        action: &'static str,
        /// Message of the engine.
        reason: String,
    },
    /// A read or write failed.
    #[error("{action}")]
    Io {
        /// Operation that failed.
        action: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The engine found its own files damaged.
    #[error("{action}: the database files are damaged: {reason}")]
    Corrupt {
        /// Operation that failed.
        action: &'static str,
        /// Message of the engine.
        reason: String,
    },
    /// The engine failed in a way of its own (it panicked, reported a bug, or is not open).
    #[error("{action}: {reason}")]
    Engine {
        /// Operation that failed.
        action: &'static str,
        /// Message of the engine.
        reason: String,
    },
}

impl BackendError {
    /// Sorts an I/O error.
    pub fn io(action: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::OutOfSpace { action }
            }
            _ => Self::Io { action, source },
        }
    }

    /// Returns whether freeing space would help.
    pub fn is_out_of_space(&self) -> bool {
        matches!(self, Self::OutOfSpace { .. })
    }

    /// The whole chain of causes in one line.
    pub fn full_text(&self) -> String {
        match self {
            Self::Io { source, .. } => format!("{self}: {source}"),
            _ => self.to_string(),
        }
    }
}

/// A key-value engine. Every call may block for as long as the disk does.
pub trait Backend: Send + 'static {
    /// Applies a batch atomically. It is not yet safe from anything.
    ///
    /// # Errors
    /// The outcome is unknown then.
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError>;

    /// Hands everything applied so far to the operating system: safe from the death of the process.
    ///
    /// # Errors
    /// The outcome is unknown then.
    fn flush(&mut self) -> Result<(), BackendError>;

    /// Flushes, and waits until the device has the data: safe from a power loss.
    ///
    /// # Errors
    /// The outcome is unknown then.
    fn sync(&mut self) -> Result<(), BackendError>;

    /// Every raw pair in key order.
    fn iter(&self) -> RawIter<'_>;

    /// Size of the files in bytes.
    ///
    /// # Errors
    /// When the engine cannot report it.
    fn size_on_disk(&self) -> Result<u64, BackendError>;

    /// Closes the engine and opens it again from what is on the disk. After an error the backend is
    /// closed; the call may be repeated.
    ///
    /// # Errors
    /// When the engine cannot be opened.
    fn reopen(&mut self) -> Result<(), BackendError>;

    /// Name for logs.
    fn name(&self) -> &'static str;
}

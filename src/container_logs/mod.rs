//! Layer 4: the log files of containers, as the runtime writes them: read, followed and rotated. Upstream: `ReadLogs` of the
//! CRI client and `containerLogManager`.
//!
//! A container's log is a chain of files in one directory: `<attempt>.log`, which the runtime appends to, and the
//! rotated ones beside it, `<attempt>.log.<YYYYMMDD-hhmmss>` (UTC), all but the newest as `….gz`. Each line is
//! `<RFC 3339 time> stdout|stderr P|F <bytes>`; `P` marks a part of a line that goes on in the next entry.
//!
//! In: a path and [`LogOptions`]; the store's snapshot tells the rotator which containers run. Out: the bytes containers
//! wrote, in order, each once. Nothing is kept in the store: the names of the files say all.
//!
//! **Invariants:** a reader holds no thread while it waits, for the log or for its client, and at most some hundred
//! KiB; it follows names that are regular files only, never a link. The rotator never overwrites a file and removes a
//! file only when its compressed copy is on the disk or there are more files than may be kept.

mod chain;
mod entry;
mod files;
mod follow;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod hub;
mod reader;
mod rotate;
mod rotator;
mod tail;

#[cfg(test)]
mod load_tests;
#[cfg(test)]
mod tests;

use tokio::sync::Semaphore;

pub use self::entry::{LogOptions, Streams};
pub use self::follow::{follow, open, snapshot};
pub use self::hub::{Ended, LogHub, Subscription};
pub use self::reader::{LogReader, Step};
pub use self::rotate::{RotateError, Rotated, clean_up, rename_away, rename_back};
pub use self::rotator::{LogRotator, RotationPolicy};

/// Reads and rotations that run at once; pods' own work has turns of its own.
static TURNS: Semaphore = Semaphore::const_new(4);

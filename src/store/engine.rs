//! One database: opening it with sled, with the derived files that sled can do without moved out of the way
//! when they are what keeps it from opening.
//!
//! sled panics on some damaged files, and its documentation does not promise that it never hangs on one:
//! every attempt runs on a thread of its own with a time limit, and a panic is an error like any other.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::backend::{Backend as _, BackendError, SledBackend, SledOptions};
use super::codec::{self, Loaded};
use super::layout::{Layout, remove_tree};
use crate::core::state::Version;
use crate::types::Stamp;

/// Version of everything that was loaded.
pub(super) const VERSION: Version = 1;
/// Number of attempts to get a lock that this process may still hold, and the pause between them.
const LOCK_TRIES: u32 = 25;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Files that had to be moved aside to open a database.
#[derive(Debug, Default)]
pub(super) struct Mended {
    /// Their new paths.
    pub(super) moved: Vec<PathBuf>,
    /// Why, for a human.
    pub(super) messages: Vec<String>,
}

/// An open database with everything that was read from it.
pub(super) type Found = (SledBackend, Loaded);

/// Opens and reads a database; when that fails, once more without sled's snapshots, and once more without
/// its configuration file. Both are derived data.
///
/// # Errors
/// `Locked` when another process has it open, at the first attempt only: after a panic sled may keep its
/// lock, and that is no other process.
pub(super) fn open_database(
    sled: &SledOptions,
    layout: &Layout,
    db: &Path,
    now: Stamp,
    done: &mut Mended,
) -> Result<Found, BackendError> {
    let mut error = match attempt(sled, db) {
        Ok(found) => return Ok(found),
        Err(error) => error,
    };
    for derived in [Derived::Snapshots, Derived::Conf] {
        if !is_damage(&error) {
            return Err(error);
        }
        done.messages
            .push(format!("the database does not open: {}", error.full_text()));
        let moved = match move_derived(layout, db, derived, now) {
            Ok(moved) => moved,
            Err(source) => return Err(BackendError::io("move derived files aside", source)),
        };
        if moved.is_empty() {
            continue;
        }
        done.moved.extend(moved);
        match attempt(sled, db) {
            Ok(found) => {
                return Ok(found);
            }
            Err(BackendError::Locked { action, reason }) => {
                error = BackendError::Engine { action, reason };
            }
            Err(next) => error = next,
        }
    }
    Err(error)
}

/// One opening, with all records read. On a thread of its own: sled on a damaged file may panic (which the
/// backend turns into an error) and might hang.
fn attempt(sled: &SledOptions, db: &Path) -> Result<Found, BackendError> {
    const ACTION: &str = "open the database";
    let (sender, receiver) = mpsc::channel();
    let path = db.to_owned();
    let limit = sled.open_limit;
    let sled = sled.clone();
    let work = move || {
        let result = open_unlocked(&path, &sled).and_then(|(backend, mut loaded)| {
            match loaded.interrupted.take() {
                Some(error) => Err(error),
                None => Ok((backend, loaded)),
            }
        });
        // Nobody listens after the time limit.
        drop(sender.send(result));
    };
    std::thread::Builder::new()
        .name("store-open".to_owned())
        .spawn(work)
        .map_err(|source| BackendError::io(ACTION, source))?;
    receiver.recv_timeout(limit).unwrap_or_else(|error| {
        let reason = match error {
            RecvTimeoutError::Timeout => {
                format!("no answer from sled within {} s", limit.as_secs())
            }
            RecvTimeoutError::Disconnected => "the thread that opens it ended".to_owned(),
        };
        Err(BackendError::Engine {
            action: ACTION,
            reason,
        })
    })
}

/// Opens a database, giving an earlier instance of this process a moment to let go of its lock: sled's worker
/// threads keep the file open a little longer than the database. Another agent keeps it for good.
fn open_unlocked(path: &Path, sled: &SledOptions) -> Result<Found, BackendError> {
    let load = |backend: &SledBackend| codec::load(backend.iter(), VERSION);
    let mut tries = LOCK_TRIES;
    loop {
        match SledBackend::open_while(path, sled.clone(), load) {
            Err(BackendError::Locked { .. }) if tries > 0 => tries -= 1,
            other => return other,
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Returns whether an error means that the files are bad, not that the system refuses to work on them.
pub(super) fn is_damage(error: &BackendError) -> bool {
    match error {
        BackendError::Corrupt { .. } | BackendError::Engine { .. } => true,
        BackendError::OutOfSpace { .. } | BackendError::Locked { .. } => false,
        // What a cut-off or mangled file leads to; anything else is the system's.
        BackendError::Io { source, .. } => matches!(
            source.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::InvalidData
                | io::ErrorKind::InvalidInput
                | io::ErrorKind::NotFound
                | io::ErrorKind::IsADirectory
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::AlreadyExists
                | io::ErrorKind::Other
        ),
    }
}

#[derive(Clone, Copy)]
enum Derived {
    Snapshots,
    Conf,
}

fn move_derived(
    layout: &Layout,
    db: &Path,
    derived: Derived,
    now: Stamp,
) -> io::Result<Vec<PathBuf>> {
    let (found, label) = match derived {
        Derived::Snapshots => (snapshots(db)?, "snap"),
        Derived::Conf => (vec![db.join("conf")], "conf"),
    };
    let mut moved = Vec::new();
    for path in found.into_iter().filter(|path| path.exists()) {
        moved.push(layout.set_aside(&path, label, now)?);
    }
    Ok(moved)
}

fn snapshots(db: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(db)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("snap.") {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Moves the snapshots of a database out of the way. Returns how many there were.
pub(super) fn remove_snapshots(db: &Path) -> io::Result<usize> {
    let mut removed = 0;
    for path in snapshots(db)? {
        remove_tree(&path)?;
        removed += 1;
    }
    Ok(removed)
}

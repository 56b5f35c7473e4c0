//! The high-water mark: distinguishes a database that lost its end from one that only saw a power loss.
//!
//! After a batch with a line of the journal has been synced, the number of the line is also written to a small file
//! beside the database, in place and without a sync of its own. Since the file is written last, a crash or a power loss
//! leaves it at or behind the database, whatever order the disk writes in. A database that is behind the file has lost
//! commits that were acknowledged (it was cut off, or is an older copy). Admissions, phases of workers, starts and ends
//! of containers have a line; a lost end without any line (records of volumes, statuses or images only) is not noticed.
//!
//! ```text
//! file `mark`, little endian:
//!   0  "HFMARK1\n"   8  epoch   16  number of the line   24  crc32 over bytes 0..24
//! ```
//!
//! **Invariant:** a file that is missing or torn, or of an older epoch, proves nothing.
//! **Invariant:** an error here never fails a commit.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::backend::{Backend, BackendError, Op, RawIter};
use super::codec::Loaded;
use super::writer::last_journal_sequence;
use crate::core::state::Table;

const MAGIC: &[u8; 8] = b"HFMARK1\n";
const LENGTH: usize = 28;

/// Content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Number of the epoch the line belongs to.
    pub epoch: u64,
    /// A line of the journal that had reached the disk.
    pub line: u64,
}

impl Mark {
    /// Reads a file; `None` when it does not say anything reliable.
    pub fn read(path: &Path) -> Option<Self> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(%error, path = %path.display(), "cannot read the high-water mark of the store");
                }
                return None;
            }
        };
        let (content, crc) = bytes.get(..LENGTH)?.split_at(LENGTH - 4);
        if !content.starts_with(MAGIC) || crc != crc32fast::hash(content).to_le_bytes() {
            return None;
        }
        Some(Self {
            epoch: u64_at(content, 8)?,
            line: u64_at(content, 16)?,
        })
    }

    /// Writes the file in place.
    pub(super) fn write(self, path: &Path) -> io::Result<()> {
        write(&mut None, path, &self.to_bytes())
    }

    fn to_bytes(self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.line.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..24]);
        bytes[24..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let eight = bytes.get(at..at + 8)?;
    Some(u64::from_le_bytes(eight.try_into().ok()?))
}

/// Acknowledged commits that a database lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Number of missing lines of the journal, if known.
    pub lines: Option<u64>,
}

/// Compares a database of epoch `epoch` whose journal ends at `line` with the mark. Returns the commits that it lacks
/// although the mark shows them on the disk. A database of an older epoch than the mark's is an older copy.
pub fn missing(epoch: u64, line: u64, mark: Option<Mark>) -> Option<Missing> {
    let mark = mark?;
    if epoch < mark.epoch {
        return Some(Missing { lines: None });
    }
    let lines = mark.line.checked_sub(line)?;
    (epoch == mark.epoch && lines > 0).then_some(Missing { lines: Some(lines) })
}

/// Returns the last line of a database's journal, damaged lines included; 0 without one.
pub fn last_line(loaded: &Loaded) -> u64 {
    let damaged = loaded.quarantined.iter().chain(&loaded.kept);
    let damaged = damaged
        .filter(|bad| bad.table == Some(Table::Journal))
        .filter_map(|bad| line_of(&bad.key));
    damaged.fold(last_journal_sequence(&loaded.state), u64::max)
}

fn line_of(key: &str) -> Option<u64> {
    u64::from_str_radix(key, 16).ok()
}

/// The newest line of the journal in a batch.
fn line_in(batch: &[Op]) -> Option<u64> {
    batch
        .iter()
        .filter_map(|op| match op {
            Op::Put { key, .. } => key.strip_prefix(&[Table::Journal.tag()]),
            Op::Delete { .. } => None,
        })
        .filter_map(|key| line_of(std::str::from_utf8(key).ok()?))
        .max()
}

/// A backend that writes the mark.
pub(super) struct Marked {
    inner: Box<dyn Backend>,
    path: PathBuf,
    epoch: u64,
    /// Newest line that was applied, if nothing has failed since.
    applied: Option<u64>,
    /// Line in the file, as far as this process wrote it.
    marked: Option<u64>,
    file: Option<File>,
    /// True if the last attempt failed, which was logged.
    failed: bool,
}

impl Marked {
    /// Marks what is applied from now on, in the epoch `epoch`.
    pub(super) fn new(inner: Box<dyn Backend>, path: PathBuf, epoch: u64) -> Self {
        Self {
            inner,
            path,
            epoch,
            applied: None,
            marked: None,
            file: None,
            failed: false,
        }
    }

    fn write_mark(&mut self, line: u64) {
        let epoch = self.epoch;
        let bytes = Mark { epoch, line }.to_bytes();
        match write(&mut self.file, &self.path, &bytes) {
            Ok(()) => {
                self.marked = Some(line);
                self.failed = false;
            }
            Err(error) => {
                // What is in the file stays true. It is tried again after the next batch.
                self.file = None;
                if !self.failed {
                    tracing::warn!(%error, path = %self.path.display(), "cannot write the high-water mark of the store");
                }
                self.failed = true;
            }
        }
    }
}

fn write(file: &mut Option<File>, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = match file {
        Some(file) => file,
        None => {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600);
            file.insert(options.open(path)?)
        }
    };
    file.write_all_at(bytes, 0)
}

impl Backend for Marked {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        if let Err(error) = self.inner.apply(batch) {
            self.applied = None;
            return Err(error);
        }
        self.applied = self.applied.max(line_in(batch));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        let result = self.inner.flush();
        if result.is_err() {
            self.applied = None;
        }
        result
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        if let Err(error) = self.inner.sync() {
            self.applied = None;
            return Err(error);
        }
        if let Some(line) = self.applied.filter(|line| Some(*line) > self.marked) {
            self.write_mark(line);
        }
        Ok(())
    }

    fn iter(&self) -> RawIter<'_> {
        self.inner.iter()
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        self.inner.size_on_disk()
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        // What was applied may be gone: only what is applied from now on may be marked.
        self.applied = None;
        self.inner.reopen()
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::backend::{Faults, FaultyBackend, MemoryBackend};

    fn mark(epoch: u64, line: u64) -> Option<Mark> {
        Some(Mark { epoch, line })
    }

    fn line(number: u64) -> Op {
        let mut key = vec![Table::Journal.tag()];
        key.extend(crate::core::state::journal_key(number).bytes());
        Op::Put { key, value: vec![] }
    }

    #[test]
    fn a_database_is_short_only_of_what_its_own_mark_has_seen() {
        let short = |lines| Some(Missing { lines });
        assert_eq!(missing(1, 9, None), None, "nothing is known");
        assert_eq!(missing(1, 9, mark(1, 9)), None);
        assert_eq!(missing(1, 10, mark(1, 9)), None, "crash before the mark");
        assert_eq!(missing(1, 5, mark(1, 9)), short(Some(4)));
        assert_eq!(missing(2, 1, mark(1, 9)), None, "rebuilt or restored since");
        assert_eq!(missing(1, 99, mark(2, 9)), short(None), "from before that");
        assert_eq!(missing(0, 0, mark(1, 9)), short(None), "nothing is left");
    }

    #[test]
    fn a_torn_or_changed_file_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        assert_eq!(Mark::read(&path), None);
        let whole = mark(3, 77).unwrap();
        let bytes = whole.to_bytes();
        fs::write(&path, bytes).unwrap();
        assert_eq!(Mark::read(&path), Some(whole));
        for len in 0..LENGTH {
            fs::write(&path, &bytes[..len]).unwrap();
            assert_eq!(Mark::read(&path), None, "{len} bytes");
        }
        for at in 0..LENGTH {
            let mut changed = bytes;
            changed[at] ^= 4;
            fs::write(&path, changed).unwrap();
            assert_eq!(Mark::read(&path), None, "byte {at}");
        }
    }

    // Invariant STORE-5.
    #[test]
    fn the_mark_never_runs_ahead_of_what_was_synced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        let (memory, faults) = (MemoryBackend::new(), Faults::new());
        let inner = FaultyBackend::new(memory.clone(), faults.clone());
        let mut backend = Marked::new(Box::new(inner), path.clone(), 1);
        let marked = || Mark::read(&path).map_or(0, |mark| mark.line);
        let below = || {
            let keys = memory.iter().map(|pair| pair.unwrap().0);
            let ops: Vec<Op> = keys.map(|key| Op::Put { key, value: vec![] }).collect();
            line_in(&ops).unwrap_or(0)
        };
        faults.set_buffer_until_sync(true);

        backend.apply(&[line(1)]).unwrap();
        backend.flush().unwrap();
        assert_eq!(marked(), 0, "a flush does not reach the disk");
        backend.sync().unwrap();
        assert_eq!((marked(), below()), (1, 1));
        assert_eq!(
            std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap()) & 0o777,
            0o600
        );

        backend.apply(&[line(2)]).unwrap();
        faults.fail_sync(1);
        backend.sync().unwrap_err();
        faults.crash();
        backend.reopen().unwrap();
        // The recovery found nothing to write: what was applied before is gone and must not be marked.
        backend.sync().unwrap();
        assert_eq!((marked(), below()), (1, 1));
        backend.apply(&[line(3)]).unwrap();
        backend.apply(&[]).unwrap();
        backend.sync().unwrap();
        assert_eq!((marked(), below()), (3, 3));
    }

    #[test]
    fn a_mark_that_cannot_be_written_fails_no_commit_and_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("later/mark");
        let mut backend = Marked::new(Box::new(MemoryBackend::new()), path.clone(), 1);
        backend.apply(&[line(1)]).unwrap();
        backend.sync().unwrap();
        fs::create_dir(dir.path().join("later")).unwrap();
        backend.apply(&[line(2)]).unwrap();
        backend.sync().unwrap();
        assert_eq!(Mark::read(&path).unwrap().line, 2);
    }
}

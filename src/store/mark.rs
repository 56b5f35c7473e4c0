//! The high-water mark: how a database that lost its end is told from one that lost power.
//!
//! Every batch carries a number in the database. After a batch has been synced, its number is also written to a
//! small file beside the database, in place and without a sync of its own. Since the file is written last, a
//! crash or a loss of power leaves it at or behind the database, whatever order the disk writes in; a database
//! that is behind the file has lost commits that were acknowledged (it was cut off, or is an older copy).
//!
//! ```text
//! file `mark`, little endian:
//!   0  "HFMARK1\n"   8  epoch   16  id of the database   24  number of the batch   32  crc32 over bytes 0..32
//!
//! value of the key [0xFD][0xFF]"sequence" in the database:
//!   0  length of the text u16   2  text   …  id of the database u64   number u64   crc32 over id and number
//! ```
//!
//! The key lies among the quarantined ones and its value has their form: a binary that does not know it keeps it,
//! through migrations as well, and uses it for nothing. Backups do not contain it.
//!
//! **Invariant:** a file that is missing, torn or about another database means that nothing is known.
//! **Invariant:** nothing that fails here fails a commit.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::backend::{Backend, BackendError, Op, RawIter, RawPair};
use super::codec::QUARANTINE_PREFIX;

const MAGIC: &[u8; 8] = b"HFMARK1\n";
const LENGTH: usize = 36;
const KEY: &[u8] = b"\xFD\xFFsequence";
const TEXT: &[u8] = b"not damaged: the number of the newest batch";

/// Where a database is: which one it is, and its newest batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Drawn when the database, or a new line of it after a loss, began.
    pub database: u64,
    /// Counts batches, relaxed ones included.
    pub number: u64,
}

impl Sequence {
    /// The beginning of a new line.
    pub(super) fn begin() -> Self {
        Self {
            database: rand::random(),
            number: 0,
        }
    }

    /// Whether a raw key is the one it is stored under.
    pub(super) fn is_key(raw_key: &[u8]) -> bool {
        debug_assert_eq!(KEY.first(), Some(&QUARANTINE_PREFIX));
        raw_key == KEY
    }

    /// What is stored, `None` when it is damaged.
    pub(super) fn from_value(value: &[u8]) -> Option<Self> {
        let (len, rest) = value.split_first_chunk::<2>()?;
        let (_, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
        let (content, crc) = rest.split_first_chunk::<16>()?;
        if crc != crc32fast::hash(content).to_le_bytes() {
            return None;
        }
        Some(Self {
            database: u64_at(content, 0)?,
            number: u64_at(content, 8)?,
        })
    }

    /// The raw pair it is stored as.
    pub(super) fn to_pair(self) -> RawPair {
        let mut content = [0; 16];
        content[..8].copy_from_slice(&self.database.to_le_bytes());
        content[8..].copy_from_slice(&self.number.to_le_bytes());
        let mut value = Vec::with_capacity(2 + TEXT.len() + 20);
        value.extend_from_slice(&(TEXT.len() as u16).to_le_bytes());
        value.extend_from_slice(TEXT);
        value.extend_from_slice(&content);
        value.extend_from_slice(&crc32fast::hash(&content).to_le_bytes());
        (KEY.to_vec(), value)
    }
}

/// What the file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Number of the epoch the batch belongs to.
    pub epoch: u64,
    /// A batch that had reached the disk.
    pub sequence: Sequence,
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
            sequence: Sequence {
                database: u64_at(content, 16)?,
                number: u64_at(content, 24)?,
            },
        })
    }

    fn to_bytes(self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.database.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.sequence.number.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..32]);
        bytes[32..].copy_from_slice(&crc.to_le_bytes());
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
    /// Batches that are missing, where it can be told.
    pub batches: Option<u64>,
}

/// Whether a database of epoch `epoch` that ends at `found` lacks something the mark had seen on the disk.
///
/// A database of an older epoch than the mark's is an older copy. One of the same epoch without a number lost
/// the batch that brought it: a mark of an epoch is written after a batch of that epoch with a number.
pub fn missing(epoch: u64, found: Option<Sequence>, mark: Option<Mark>) -> Option<Missing> {
    let mark = mark?;
    match found {
        Some(found) if found.database == mark.sequence.database => {
            let batches = mark.sequence.number.checked_sub(found.number)?;
            (batches > 0).then_some(Missing {
                batches: Some(batches),
            })
        }
        Some(_) => (epoch < mark.epoch).then_some(Missing { batches: None }),
        None => (epoch <= mark.epoch).then_some(Missing { batches: None }),
    }
}

/// A backend that numbers its batches and writes the mark.
pub(super) struct Marked {
    inner: Box<dyn Backend>,
    path: PathBuf,
    epoch: u64,
    /// Of the newest batch that was tried.
    sequence: Sequence,
    /// Number of the newest batch if it was applied and nothing has failed since.
    applied: Option<u64>,
    /// Number in the file.
    marked: u64,
    file: Option<File>,
    /// The last attempt failed, and that was told.
    failed: bool,
}

impl Marked {
    /// Goes on from `found`, what the database behind `inner` ends with; without, as a new database.
    pub(super) fn new(
        inner: Box<dyn Backend>,
        path: PathBuf,
        epoch: u64,
        found: Option<Sequence>,
    ) -> Self {
        Self {
            inner,
            path,
            epoch,
            sequence: found.unwrap_or_else(Sequence::begin),
            applied: None,
            marked: 0,
            file: None,
            failed: false,
        }
    }

    fn write_mark(&mut self, number: u64) {
        let mark = Mark {
            epoch: self.epoch,
            sequence: Sequence {
                number,
                ..self.sequence
            },
        };
        match write(&mut self.file, &self.path, &mark.to_bytes()) {
            Ok(()) => {
                self.marked = number;
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
        self.applied = None;
        self.sequence.number += 1;
        let (key, value) = self.sequence.to_pair();
        let mut ops = Vec::with_capacity(batch.len() + 1);
        ops.extend_from_slice(batch);
        ops.push(Op::Put { key, value });
        self.inner.apply(&ops)?;
        self.applied = Some(self.sequence.number);
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
        if let Some(number) = self.applied.filter(|number| *number > self.marked) {
            self.write_mark(number);
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
    use crate::store::codec;

    fn mark(epoch: u64, database: u64, number: u64) -> Option<Mark> {
        let sequence = Sequence { database, number };
        Some(Mark { epoch, sequence })
    }

    fn found(database: u64, number: u64) -> Option<Sequence> {
        Some(Sequence { database, number })
    }

    #[test]
    fn a_database_is_short_only_of_what_its_own_mark_has_seen() {
        let short = |batches| Some(Missing { batches });
        assert_eq!(missing(1, found(7, 9), None), None, "nothing is known");
        assert_eq!(missing(1, found(7, 9), mark(1, 7, 9)), None);
        assert_eq!(
            missing(1, found(7, 10), mark(1, 7, 9)),
            None,
            "crash before the mark"
        );
        assert_eq!(missing(1, found(7, 5), mark(1, 7, 9)), short(Some(4)));
        assert_eq!(
            missing(2, found(8, 1), mark(1, 7, 9)),
            None,
            "rebuilt or restored since"
        );
        assert_eq!(
            missing(2, found(8, 1), mark(2, 7, 9)),
            None,
            "another database"
        );
        assert_eq!(
            missing(1, found(8, 1), mark(2, 7, 9)),
            short(None),
            "from before a rebuild"
        );
        assert_eq!(
            missing(1, None, mark(1, 7, 9)),
            short(None),
            "cut before its first number"
        );
        assert_eq!(
            missing(2, None, mark(1, 7, 9)),
            None,
            "rebuilt, nothing written since"
        );
    }

    #[test]
    fn a_torn_or_changed_file_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        assert_eq!(Mark::read(&path), None);
        let whole = mark(3, 0xAB_CDEF, 77).unwrap();
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

    #[test]
    fn the_number_in_the_database_looks_like_quarantine_to_a_binary_that_does_not_know_it() {
        let sequence = found(5, 6).unwrap();
        let (key, value) = sequence.to_pair();
        assert_eq!(key.first(), Some(&codec::QUARANTINE_PREFIX));
        assert_eq!(Sequence::from_value(&value), Some(sequence));
        let text = usize::from(u16::from_le_bytes([value[0], value[1]]));
        assert_eq!(&value[2..2 + text], TEXT);
        let loaded = codec::load([Ok((key, value.clone()))], 1);
        assert_eq!(loaded.sequence, Some(sequence));
        assert!(loaded.kept.is_empty() && loaded.quarantined.is_empty());
        for at in 2 + text..value.len() {
            let mut changed = value.clone();
            changed[at] ^= 1;
            assert_eq!(Sequence::from_value(&changed), None);
        }
    }

    #[test]
    fn the_mark_never_runs_ahead_of_what_was_synced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        let (memory, faults) = (MemoryBackend::new(), Faults::new());
        let inner = FaultyBackend::new(memory.clone(), faults.clone());
        let mut backend = Marked::new(Box::new(inner), path.clone(), 1, None);
        let number = || Mark::read(&path).map_or(0, |mark| mark.sequence.number);
        let below = || {
            codec::load(memory.iter(), 1)
                .sequence
                .map_or(0, |s| s.number)
        };
        faults.set_buffer_until_sync(true);

        backend.apply(&[]).unwrap();
        backend.flush().unwrap();
        assert_eq!(number(), 0, "a flush does not reach the disk");
        backend.sync().unwrap();
        assert_eq!((number(), below()), (1, 1));
        assert_eq!(
            std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap()) & 0o777,
            0o600
        );

        backend.apply(&[]).unwrap();
        faults.fail_sync(1);
        backend.sync().unwrap_err();
        faults.crash();
        backend.reopen().unwrap();
        // The recovery found nothing to write: what was applied before is gone and must not be marked.
        backend.sync().unwrap();
        assert_eq!((number(), below()), (1, 1));
        backend.apply(&[]).unwrap();
        backend.sync().unwrap();
        assert_eq!((number(), below()), (3, 3));
    }

    #[test]
    fn a_mark_that_cannot_be_written_fails_no_commit_and_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("later/mark");
        let mut backend = Marked::new(Box::new(MemoryBackend::new()), path.clone(), 1, None);
        backend.apply(&[]).unwrap();
        backend.sync().unwrap();
        fs::create_dir(dir.path().join("later")).unwrap();
        backend.apply(&[]).unwrap();
        backend.sync().unwrap();
        assert_eq!(Mark::read(&path).unwrap().sequence.number, 2);
    }
}

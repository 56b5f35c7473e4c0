//! Every write and flush of a machine's disk, and the disk as a power cut could have left it.
//!
//! QEMU's driver `blklogwrites` writes the log, in the format of the kernel's dm-log-writes: a header of one sector with a magic
//! number, a version, the number of entries and the size of a sector, then for each entry a sector with its place, length
//! and flags (1 flush, 2 through to the platter, 4 discard), followed by its data. All numbers are little-endian.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use imbl::OrdMap;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

use super::Disk;
use crate::programs::run;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const SECTOR: u64 = 512;
const BLOCK: u64 = 4096;
const FLUSH: u64 = 1;
const THROUGH: u64 = 2;
const DISCARD: u64 = 4;

/// What a power cut takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing that was written: the host was killed.
    Nothing,
    /// All that was written since the last flush.
    Unflushed,
    /// Of what was written since the last flush, any part; what stayed did so in any order. The number picks one of the ways.
    Some(u64),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    sector: u64,
    sectors: u64,
    flags: u64,
    /// Where its data is in the log.
    at: u64,
}

impl Entry {
    fn is(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    fn blocks(&self) -> std::ops::Range<u64> {
        let begin = self.sector * SECTOR;
        begin / BLOCK..(begin + self.bytes()).div_ceil(BLOCK)
    }

    fn bytes(&self) -> u64 {
        if self.is(DISCARD) {
            0
        } else {
            self.sectors * SECTOR
        }
    }
}

/// A recorded log.
#[derive(Debug)]
pub struct WriteLog {
    file: File,
    entries: Vec<Entry>,
}

impl WriteLog {
    /// Reads the entries of a log. A machine may still be writing it: the entries it has then.
    ///
    /// # Errors
    /// When it cannot be read, or is no log.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let no_log = |why: &str| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is no log of writes: {why}", path.display()),
            )
        };
        let mut header = [0; 32];
        file.read_exact_at(&mut header, 0)?;
        if number(&header, 0) != MAGIC {
            return Err(no_log("it begins with another number"));
        }
        let count = number(&header, 16);
        if number(&header, 24) & 0xffff_ffff != SECTOR {
            return Err(no_log("its sectors do not have 512 bytes"));
        }
        let mut entries = Vec::new();
        let mut at = SECTOR;
        let size = file.metadata()?.len();
        while (entries.len() as u64) < count && at + SECTOR <= size {
            file.read_exact_at(&mut header, at)?;
            let entry = Entry {
                sector: number(&header, 0),
                sectors: number(&header, 8),
                flags: number(&header, 16),
                at: at + SECTOR,
            };
            at += SECTOR + entry.bytes();
            if at > size {
                break;
            }
            entries.push(entry);
        }
        Ok(Self { file, entries })
    }

    /// The number of entries in a log that is being written.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn count(path: &Path) -> io::Result<u64> {
        let mut count = [0; 8];
        File::open(path)?.read_exact_at(&mut count, 16)?;
        Ok(u64::from_le_bytes(count))
    }

    /// The number of entries: a cut before entry 0 leaves the disk as it was, one at `len` comes after everything.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true without entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entries that were flushes.
    pub fn flushes(&self) -> Vec<usize> {
        (0..self.len())
            .filter(|index| self.entries[*index].is(FLUSH))
            .collect()
    }
}

/// The blocks that were read of a disk.
pub type Reads = Rc<RefCell<BTreeSet<u64>>>;

/// Goes through a log from its beginning, and builds the disk at any moment on the way.
#[derive(Debug)]
pub struct Replay {
    log: WriteLog,
    /// The next entry.
    cut: usize,
    /// The first entry that no flush covers.
    open: usize,
    written: Platter,
    flushed: Platter,
}

impl Replay {
    /// Begins with the raw disk that the machine had when the log began.
    ///
    /// # Errors
    /// When the disk cannot be opened.
    pub fn new(base: &Path, log: WriteLog) -> io::Result<Self> {
        let base = Platter {
            base: Arc::new(File::open(base)?),
            blocks: OrdMap::new(),
        };
        Ok(Self {
            log,
            cut: 0,
            open: 0,
            written: base.clone(),
            flushed: base,
        })
    }

    /// The log.
    pub fn log(&self) -> &WriteLog {
        &self.log
    }

    /// Goes on until just before entry `cut`.
    ///
    /// # Errors
    /// When the log cannot be read.
    ///
    /// # Panics
    /// When that lies behind.
    pub fn advance(&mut self, cut: usize) -> io::Result<()> {
        assert!(self.cut <= cut, "at {}, {cut} is over", self.cut);
        while self.cut < cut.min(self.log.len()) {
            let entry = self.log.entries[self.cut];
            // A flush covers what was written before it; QEMU logs one with data after the data.
            self.written.write(&self.log.file, entry, |_| true)?;
            self.cut += 1;
            if entry.is(FLUSH) {
                self.flushed = self.written.clone();
                self.open = self.cut;
            }
        }
        Ok(())
    }

    /// The blocks of what was written since the last flush.
    pub fn open_blocks(&self) -> BTreeSet<u64> {
        self.log.entries[self.open..self.cut]
            .iter()
            .flat_map(Entry::blocks)
            .collect()
    }

    /// The blocks that entry `index` writes.
    ///
    /// # Panics
    /// When there is no such entry.
    pub fn blocks_of(&self, index: usize) -> impl Iterator<Item = u64> + use<> {
        self.log.entries[index].blocks()
    }

    /// The disk after a cut here.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn platter(&self, loss: Loss) -> io::Result<Platter> {
        let seed = match loss {
            Loss::Nothing => return Ok(self.written.clone()),
            Loss::Unflushed => return Ok(self.flushed.clone()),
            Loss::Some(seed) => seed,
        };
        let mut random = StdRng::seed_from_u64(seed);
        let mut open = self.log.entries[self.open..self.cut].to_vec();
        open.shuffle(&mut random);
        let mut platter = self.flushed.clone();
        for entry in open {
            let through = entry.is(THROUGH);
            platter.write(&self.log.file, entry, |_| {
                through || random.random_bool(0.5)
            })?;
        }
        Ok(platter)
    }
}

/// A disk as a power cut left it: another disk, and the blocks that are different.
#[derive(Clone, Debug)]
pub struct Platter {
    base: Arc<File>,
    blocks: OrdMap<u64, Arc<[u8]>>,
}

impl Platter {
    /// Reads from a place on.
    ///
    /// # Errors
    /// When the disk below cannot be read, or ends before.
    pub fn read_at(&self, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let (block, skip) = (at / BLOCK, (at % BLOCK) as usize);
            let take = into.len().min(BLOCK as usize - skip);
            let (part, rest) = into.split_at_mut(take);
            match self.blocks.get(&block) {
                Some(data) => part.copy_from_slice(&data[skip..skip + take]),
                None => self.base.read_exact_at(part, at)?,
            }
            at += take as u64;
            into = rest;
        }
        Ok(())
    }

    /// Writes it as a disk that a machine can boot from.
    ///
    /// # Errors
    /// When `base`, which is the disk the replay began with, cannot be copied, or `path` not written.
    pub fn write_to(&self, base: &Path, path: &Path) -> io::Result<Disk> {
        run(Command::new("cp")
            .args(["--sparse=always", "--reflink=auto"])
            .args([base, path]))?;
        let file = fs::OpenOptions::new().write(true).open(path)?;
        for (block, data) in &self.blocks {
            file.write_all_at(data, block * BLOCK)?;
        }
        Ok(Disk::raw(path.to_owned()))
    }

    /// Opens the ext4 file system on it. Its journal counts, and nothing is written.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn ext4(&self) -> Result<ext4_view::Ext4, ext4_view::Ext4Error> {
        ext4_view::Ext4::load(Box::new(self.clone()))
    }

    /// As [`Self::ext4`]; what is read of the disk is noted from here on. A write to other blocks changes nothing of what was
    /// read.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn ext4_watched(&self) -> Result<(ext4_view::Ext4, Reads), ext4_view::Ext4Error> {
        let reads = Reads::default();
        let watched = Watched {
            platter: self.clone(),
            reads: Rc::clone(&reads),
        };
        Ok((ext4_view::Ext4::load(Box::new(watched))?, reads))
    }

    /// Puts the data of an entry there, block by block as `keep` says.
    fn write(
        &mut self,
        log: &File,
        entry: Entry,
        mut keep: impl FnMut(u64) -> bool,
    ) -> io::Result<()> {
        let (mut at, end) = (entry.sector * SECTOR, entry.sector * SECTOR + entry.bytes());
        let mut from = entry.at;
        while at < end {
            let (block, skip) = (at / BLOCK, (at % BLOCK) as usize);
            let take = ((end - at) as usize).min(BLOCK as usize - skip);
            if keep(block) {
                let mut data = vec![0; BLOCK as usize];
                if take < data.len() {
                    self.read_at(block * BLOCK, &mut data)?;
                }
                log.read_exact_at(&mut data[skip..skip + take], from)?;
                self.blocks.insert(block, data.into());
            }
            at += take as u64;
            from += take as u64;
        }
        Ok(())
    }
}

impl ext4_view::Ext4Read for Platter {
    fn read(
        &mut self,
        start_byte: u64,
        dst: &mut [u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync + 'static>> {
        Ok(self.read_at(start_byte, dst)?)
    }
}

struct Watched {
    platter: Platter,
    reads: Reads,
}

impl ext4_view::Ext4Read for Watched {
    fn read(
        &mut self,
        start_byte: u64,
        dst: &mut [u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync + 'static>> {
        let end = start_byte + dst.len() as u64;
        self.reads
            .borrow_mut()
            .extend(start_byte / BLOCK..end.div_ceil(BLOCK));
        Ok(self.platter.read_at(start_byte, dst)?)
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of entries: place and length in sectors, flags, the byte it is filled with.
    fn log(entries: &[(u64, u64, u64, u8)]) -> Vec<u8> {
        let mut log = Vec::new();
        let sector = |log: &mut Vec<u8>, numbers: [u64; 4]| {
            let begin = log.len();
            log.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
            log.resize(begin + SECTOR as usize, 0);
        };
        sector(&mut log, [MAGIC, 1, entries.len() as u64, SECTOR]);
        for (place, length, flags, byte) in entries {
            sector(&mut log, [*place, *length, *flags, 0]);
            if flags & DISCARD == 0 {
                log.resize(log.len() + (length * SECTOR) as usize, *byte);
            }
        }
        log
    }

    fn replay(dir: &Path, entries: &[(u64, u64, u64, u8)]) -> Replay {
        fs::write(dir.join("disk"), vec![b'.'; 8 * BLOCK as usize]).unwrap();
        fs::write(dir.join("log"), log(entries)).unwrap();
        let log = WriteLog::open(&dir.join("log")).unwrap();
        Replay::new(&dir.join("disk"), log).unwrap()
    }

    /// The first byte of each sector of the first two blocks.
    fn sectors(platter: &Platter) -> String {
        let mut all = vec![0; 2 * BLOCK as usize];
        platter.read_at(0, &mut all).unwrap();
        all.iter()
            .step_by(SECTOR as usize)
            .map(|b| *b as char)
            .collect()
    }

    #[test]
    fn a_cut_leaves_what_its_kind_of_loss_says() {
        let dir = tempfile::tempdir().unwrap();
        let entries = [
            (0, 8, 0, b'a'),
            (0, 0, FLUSH, 0),
            (2, 1, 0, b'b'),
            (8, 8, THROUGH, b'c'),
            (0, 16, DISCARD, 0),
        ];
        let mut replay = replay(dir.path(), &entries);
        assert_eq!(replay.log().flushes(), [1]);
        replay.advance(1).unwrap();
        assert_eq!(
            sectors(&replay.platter(Loss::Nothing).unwrap()),
            "aaaaaaaa........"
        );
        assert_eq!(
            sectors(&replay.platter(Loss::Unflushed).unwrap()),
            "................"
        );
        replay.advance(5).unwrap();
        assert_eq!(
            sectors(&replay.platter(Loss::Nothing).unwrap()),
            "aabaaaaacccccccc"
        );
        assert_eq!(
            sectors(&replay.platter(Loss::Unflushed).unwrap()),
            "aaaaaaaa........"
        );
        let ways: std::collections::BTreeSet<String> = (0..20)
            .map(|seed| sectors(&replay.platter(Loss::Some(seed)).unwrap()))
            .collect();
        // What went through to the platter stays; of the other write both happens.
        assert_eq!(
            ways.into_iter().collect::<Vec<_>>(),
            ["aaaaaaaacccccccc", "aabaaaaacccccccc"]
        );
    }

    #[test]
    fn a_platter_becomes_a_disk() {
        let dir = tempfile::tempdir().unwrap();
        let mut replay = replay(dir.path(), &[(9, 1, 0, b'x')]);
        replay.advance(1).unwrap();
        let platter = replay.platter(Loss::Nothing).unwrap();
        let disk = platter
            .write_to(&dir.path().join("disk"), &dir.path().join("new"))
            .unwrap();
        let bytes = fs::read(&disk.path).unwrap();
        assert_eq!(bytes.len() as u64, 8 * BLOCK);
        assert_eq!(
            (bytes[9 * 512], bytes[10 * 512 - 1], bytes[10 * 512]),
            (b'x', b'x', b'.')
        );
    }

    #[test]
    fn a_log_that_is_cut_off_has_its_whole_entries() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = log(&[(0, 1, 0, b'a'), (1, 4, 0, b'b')]);
        bytes.truncate(bytes.len() - 1);
        fs::write(dir.path().join("log"), &bytes).unwrap();
        let log = WriteLog::open(&dir.path().join("log")).unwrap();
        assert_eq!(log.len(), 1);
        fs::write(dir.path().join("log"), vec![1; 4096]).unwrap();
        let error = WriteLog::open(&dir.path().join("log"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("no log of writes"), "{error}");
    }
}

//! Reads sled's log without sled: what is left when the database no longer opens, and whether an
//! openable one has been damaged in a place that sled would pass over in silence.
//!
//! In comes the directory of a database that nobody writes to; out go the key/value pairs its intact
//! messages add up to, and a list of gaps. Nothing is ever written here.
//!
//! On disk (sled 0.34, written by this project with default segment size and without compression), all
//! numbers little endian:
//! - `db` is a row of segments of 512 KiB. A segment begins with 20 bytes: inverted CRC-32 of the rest, its
//!   log sequence number (LSN) and the highest stable LSN, both XORed with `i64::MAX`.
//! - A message is: inverted CRC-32 of body and header, kind, then body length, segment number and page id
//!   as variable-length integers, then the body. The segment number distinguishes a live message from the rest of
//!   an older segment that was overwritten.
//! - Bodies over a quarter of a segment lie in `blobs/<lsn>`: CRC-32, kind, data.
//!
//! **Invariant:** a message counts only when its checksum and its segment number are right, so damage loses
//! records and never invents them. A page whose newest base lies in a gap falls back to its older base: a
//! salvaged store may be stale, which is why it starts a new epoch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt as _};
use std::path::Path;

use crate::core::state::Table;

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

/// sled's default segment size.
pub(super) const SEGMENT: usize = 512 * 1024;
const SEGMENT_HEADER: usize = 20;
/// Space at the end of a segment in which sled never begins a message.
const RED_ZONE: usize = 32;
/// Batches with durable changes that must follow a gap before it counts as damage. The writer begins such
/// a batch only after the one before it has been synced, so the first of two proves that everything
/// before it, the gap included, had reached the disk: no power loss can explain it.
const PROOF: usize = 2;

/// A stretch of the log that could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// Offset in the file.
    pub(super) offset: u64,
    /// Length in bytes.
    pub(super) len: u64,
    lsn: i64,
    /// Part of a segment that was being reused when the machine stopped: its content was superseded.
    reused: bool,
}

/// Raw pairs by raw key.
pub(super) type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Content of the intact part of a log.
#[derive(Debug, Default)]
pub(super) struct Salvage {
    /// Newest readable value of each key.
    pub(super) pairs: Pairs,
    /// Keys whose newest readable mention is their removal.
    pub(super) deleted: BTreeSet<Vec<u8>>,
    /// Unreadable stretches.
    pub(super) gaps: Vec<Gap>,
    /// Blobs that are missing or fail their checksum.
    pub(super) bad_blobs: usize,
    /// LSNs of batches with a durable change.
    durable_batches: BTreeSet<i64>,
    /// Segments whose header is damaged and whose messages are not.
    headless: usize,
    /// There is content, and none of it is a log.
    pub(super) is_unreadable: bool,
}

impl Salvage {
    /// Returns whether all of the log can be read, also by sled, which then cuts nothing off.
    pub(super) fn is_whole(&self) -> bool {
        self.gaps.is_empty() && self.bad_blobs == 0 && self.headless == 0
    }

    /// Gaps in data that had been synced: evidence of damage rather than of a power loss.
    pub(super) fn damage(&self) -> impl Iterator<Item = &Gap> {
        self.gaps.iter().filter(|gap| {
            let later = self.durable_batches.range(gap.lsn..).take(PROOF).count();
            !gap.reused && later == PROOF
        })
    }

    /// Number of damaged places. No value of ours is in a blob, so that one is missing is no trace of a power loss.
    pub(super) fn damages(&self) -> usize {
        self.damage().count() + self.bad_blobs
    }

    /// Applies the messages of the next segment to `pages`. `blob` reads what a pointer leads to.
    fn replay(
        &mut self,
        pages: &mut Pages,
        segment: &[u8],
        place: Place,
        blob: impl Fn(&[u8]) -> Option<(Kind, Vec<u8>)>,
    ) {
        let walk = walk(segment, place.lsn, |message| match message.kind {
            Kind::BatchManifest => pages.batch = message.lsn,
            Kind::Blob => match blob(message.body) {
                Some((kind, body)) => pages.replay(kind, message.pid, message.lsn, &body),
                None => self.bad_blobs += 1,
            },
            kind => pages.replay(kind, message.pid, message.lsn, message.body),
        });
        for (start, end) in walk.gaps {
            let open_ended = end == SEGMENT || end == segment.len();
            if open_ended && place.is_last {
                continue;
            }
            self.gaps.push(Gap {
                offset: place.offset + start as u64,
                len: (end - start) as u64,
                lsn: place.lsn.saturating_add(start as i64),
                reused: walk.reused,
            });
        }
    }

    /// Takes over what all segments add up to.
    fn finish(mut self, mut pages: Pages) -> Self {
        self.durable_batches = std::mem::take(&mut pages.durable_batches);
        (self.pairs, self.deleted) = pages.finish();
        self
    }
}

/// Reads the log in `db_dir` and replays what is intact.
///
/// # Errors
/// When the file cannot be read at all; damage inside it is no error. A missing file is an empty log.
pub(super) fn read_log(db_dir: &Path) -> io::Result<Salvage> {
    read(db_dir, true)
}

/// As [`read_log`], for the gaps alone: pairs and deletions stay empty. What every start can afford.
///
/// # Errors
/// As [`read_log`].
pub(super) fn check_log(db_dir: &Path) -> io::Result<Salvage> {
    read(db_dir, false)
}

fn read(db_dir: &Path, keep: bool) -> io::Result<Salvage> {
    let mut salvage = Salvage::default();
    let file = match File::open(db_dir.join("db")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(salvage),
        Err(error) => return Err(error),
    };
    let mut pages = Pages {
        keep,
        ..Pages::default()
    };
    let mut buffer = Vec::new();
    let segments = find_segments(&file, &mut buffer)?;
    salvage.headless = segments.without_header;
    salvage.is_unreadable = segments.found.is_empty() && segments.unknown > 0;
    let last = segments.found.keys().next_back().copied();
    for (lsn, offset) in segments.found {
        read_segment(&file, offset, &mut buffer)?;
        let place = Place {
            lsn,
            offset,
            is_last: Some(lsn) == last,
        };
        salvage.replay(&mut pages, &buffer, place, |pointer| {
            read_blob(db_dir, pointer)
        });
    }
    Ok(salvage.finish(pages))
}

/// Place of a segment.
struct Place {
    lsn: i64,
    /// In the file.
    offset: u64,
    /// No segment is younger.
    is_last: bool,
}

/// Segments by LSN, and how many of them have a damaged header: those are found by their first intact message.
fn find_segments(file: &File, buffer: &mut Vec<u8>) -> io::Result<Segments> {
    let len = file.metadata()?.len();
    let mut found = BTreeMap::new();
    let mut headless = Vec::new();
    let mut offset = 0;
    while offset + (SEGMENT_HEADER as u64) <= len {
        let mut header = [0_u8; SEGMENT_HEADER];
        file.read_exact_at(&mut header, offset)?;
        match parse_header(&header) {
            // Of two segments with one LSN the later copy cannot be told from the earlier; keep the first.
            Some(lsn) => {
                found.entry(lsn).or_insert(offset);
            }
            None => headless.push(offset),
        }
        offset += SEGMENT as u64;
    }
    let (mut without_header, mut unknown) = (0, 0);
    for offset in headless {
        read_segment(file, offset, buffer)?;
        if buffer.iter().all(|byte| *byte == 0) {
            continue;
        }
        let first = (SEGMENT_HEADER..buffer.len()).find_map(|at| parse(buffer, at, None));
        let lsn = first.and_then(|(header, _)| {
            i64::try_from(header.segment)
                .ok()?
                .checked_mul(SEGMENT as i64)
        });
        if let Some(lsn) = lsn {
            without_header += 1;
            found.entry(lsn).or_insert(offset);
        } else {
            unknown += 1;
        }
    }
    Ok(Segments {
        found,
        without_header,
        unknown,
    })
}

/// Places of the segments of a log.
struct Segments {
    /// Offsets in the file, by log sequence number.
    found: BTreeMap<i64, u64>,
    /// Number of them that were found by their content.
    without_header: usize,
    /// Places that hold something else.
    unknown: usize,
}

fn read_segment(file: &File, offset: u64, buffer: &mut Vec<u8>) -> io::Result<()> {
    buffer.resize(SEGMENT, 0);
    let mut filled = 0;
    while filled < SEGMENT {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buffer.truncate(filled);
    Ok(())
}

fn parse_header(header: &[u8; SEGMENT_HEADER]) -> Option<i64> {
    let crc = u32::from_le_bytes(header[..4].try_into().ok()?) ^ u32::MAX;
    if crc32fast::hash(&header[4..]) != crc {
        return None;
    }
    let lsn = i64::from_le_bytes(header[4..12].try_into().ok()?) ^ i64::MAX;
    (lsn >= 0 && lsn % SEGMENT as i64 == 0).then_some(lsn)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cap,
    BatchManifest,
    Free,
    Node,
    Link,
    Blob,
    /// Meta page, counter, cancelled reservation: nothing of ours.
    Other,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            2 => Self::Cap,
            3 => Self::BatchManifest,
            4 => Self::Free,
            8 => Self::Node,
            10 => Self::Link,
            9 | 11 => Self::Blob,
            1 | 5 | 6 | 7 => Self::Other,
            _ => return None,
        })
    }
}

struct Header {
    kind: Kind,
    segment: u64,
    pid: u64,
}

struct Message<'a> {
    kind: Kind,
    pid: u64,
    lsn: i64,
    body: &'a [u8],
}

#[derive(Default)]
struct Walk {
    gaps: Vec<(usize, usize)>,
    reused: bool,
}

/// Visits the intact messages of one segment, resuming after a damaged one at the next intact one.
fn walk<'a>(segment: &'a [u8], lsn: i64, mut visit: impl FnMut(Message<'a>)) -> Walk {
    let number = u64::try_from(lsn).unwrap_or(0) / SEGMENT as u64;
    let mut walk = Walk::default();
    let mut at = SEGMENT_HEADER;
    while at + RED_ZONE <= SEGMENT {
        let Some((header, body)) = parse(segment, at, Some(number)) else {
            let (next, reused) = resync(segment, at + 1, number);
            walk.reused |= reused;
            let end = next.unwrap_or(segment.len().max(at));
            walk.gaps.push((at, end));
            match next {
                Some(next) => at = next,
                None => break,
            }
            continue;
        };
        if header.kind == Kind::Cap {
            break;
        }
        let end = body.end;
        visit(Message {
            kind: header.kind,
            pid: header.pid,
            lsn: lsn.saturating_add(at as i64),
            body: &segment[body],
        });
        at = end;
    }
    walk
}

/// The next intact message of segment `number`, and whether messages of a younger segment lie there.
fn resync(segment: &[u8], from: usize, number: u64) -> (Option<usize>, bool) {
    let mut reused = false;
    for at in from..segment.len() {
        if segment[at..].len() < 8 {
            break;
        }
        if let Some((header, _)) = parse(segment, at, None) {
            if header.segment == number {
                return (Some(at), reused);
            }
            reused |= header.segment > number;
        }
    }
    (None, reused)
}

/// An intact message at `at`: its header and where its body lies.
fn parse(
    segment: &[u8],
    at: usize,
    number: Option<u64>,
) -> Option<(Header, std::ops::Range<usize>)> {
    let mut reader = Reader(segment.get(at..)?);
    let crc = u32::from_le_bytes(reader.take(4)?.try_into().ok()?) ^ u32::MAX;
    let kind_byte = reader.byte()?;
    let kind = Kind::from_byte(kind_byte)?;
    let len = usize::try_from(reader.varint()?).ok()?;
    let found = reader.varint()?;
    let pid = reader.varint()?;
    if number.is_some_and(|number| number != found) || len > reader.0.len() {
        return None;
    }
    let start = segment.len() - reader.0.len();
    let body = start..start + len;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&segment[body.clone()]);
    hasher.update(&segment[at + 4..start]);
    (hasher.finalize() == crc).then_some((
        Header {
            kind,
            segment: found,
            pid,
        },
        body,
    ))
}

/// Content of a regular file; nothing of a pipe, which would keep its reader for good.
fn read_regular(path: &Path) -> Option<Vec<u8>> {
    let mut file = File::options()
        .read(true)
        .custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits())
        .open(path)
        .ok()?;
    let metadata = file.metadata().ok().filter(Metadata::is_file)?;
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).ok()?);
    file.read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn read_blob(db_dir: &Path, pointer: &[u8]) -> Option<(Kind, Vec<u8>)> {
    let id = i64::from_le_bytes(pointer.try_into().ok()?);
    let bytes = read_regular(&db_dir.join("blobs").join(id.to_string()))?;
    let (crc, rest) = bytes.split_first_chunk::<4>()?;
    if crc32fast::hash(rest) != u32::from_le_bytes(*crc) {
        return None;
    }
    let (kind, data) = rest.split_first()?;
    // sled notes the message's kind there, which is the one that points at the blob.
    let kind = match *kind {
        8 | 9 => Kind::Node,
        10 | 11 => Kind::Link,
        _ => return None,
    };
    Some((kind, data.to_vec()))
}

/// Leaf pages as the replay has them so far.
#[derive(Default)]
struct Pages {
    /// True if entries are kept; otherwise only the data for [`Salvage::damage`] is.
    keep: bool,
    leaves: HashMap<u64, Leaf>,
    deleted: BTreeMap<Vec<u8>, i64>,
    batch: i64,
    durable_batches: BTreeSet<i64>,
}

#[derive(Default)]
struct Leaf {
    prefix: Vec<u8>,
    entries: BTreeMap<Vec<u8>, (i64, Vec<u8>)>,
}

impl Pages {
    fn replay(&mut self, kind: Kind, pid: u64, lsn: i64, body: &[u8]) {
        match kind {
            Kind::Node => {
                self.leaves.remove(&pid);
                if let Some(leaf) = parse_leaf(body, lsn, self.keep) {
                    self.leaves.insert(pid, leaf);
                }
            }
            Kind::Link => {
                // Without its base a page's key prefix is unknown: such a link cannot be used.
                if let Some(leaf) = self.leaves.get_mut(&pid)
                    && let Some((key, value)) = parse_link(body)
                {
                    if is_durable(leaf.prefix.first().or(key.first())) {
                        self.durable_batches.insert(self.batch);
                    }
                    if !self.keep {
                        return;
                    }
                    let key = [&leaf.prefix, key].concat();
                    match value {
                        Some(value) => {
                            leaf.entries.insert(key, (lsn, value.to_vec()));
                        }
                        None => {
                            leaf.entries.remove(&key);
                            self.deleted.insert(key, lsn);
                        }
                    }
                }
            }
            Kind::Free => {
                self.leaves.remove(&pid);
            }
            Kind::Cap | Kind::BatchManifest | Kind::Blob | Kind::Other => {}
        }
    }

    /// Unites the pages. After damage two pages may hold one key: the younger mention wins.
    fn finish(self) -> (Pairs, BTreeSet<Vec<u8>>) {
        let mut newest: BTreeMap<Vec<u8>, (i64, Vec<u8>)> = BTreeMap::new();
        for (key, (lsn, value)) in self.leaves.into_values().flat_map(|leaf| leaf.entries) {
            if newest.get(&key).is_none_or(|(old, _)| *old < lsn) {
                newest.insert(key, (lsn, value));
            }
        }
        let mut deleted = BTreeSet::new();
        for (key, at) in self.deleted {
            if newest.get(&key).is_none_or(|(lsn, _)| *lsn < at) {
                newest.remove(&key);
                deleted.insert(key);
            }
        }
        let pairs = newest.into_iter().map(|(k, (_, v))| (k, v)).collect();
        (pairs, deleted)
    }
}

/// Returns whether every change of a key that begins with this byte is of the durable class.
fn is_durable(tag: Option<&u8>) -> bool {
    matches!(
        tag.copied().and_then(Table::from_tag),
        Some(Table::Pods | Table::Admissions | Table::Workers | Table::Containers | Table::Volumes)
    )
}

fn parse_leaf(body: &[u8], lsn: i64, keep: bool) -> Option<Leaf> {
    let mut reader = Reader(body);
    reader.varint()?; // next
    reader.varint()?; // merging child
    reader.byte()?; // merging
    let prefix_len = usize::from(reader.byte()?);
    let lo = reader.bytes()?;
    reader.bytes()?; // hi
    if reader.byte()? != 0 {
        return None;
    }
    let count = reader.varint()?;
    let prefix = lo.get(..prefix_len)?.to_vec();
    if !keep {
        let entries = BTreeMap::new();
        return Some(Leaf { prefix, entries });
    }
    let mut keys = Vec::new();
    for _ in 0..count {
        keys.push([&prefix, reader.bytes()?].concat());
    }
    let mut entries = BTreeMap::new();
    for key in keys {
        entries.insert(key, (lsn, reader.bytes()?.to_vec()));
    }
    Some(Leaf { prefix, entries })
}

/// Key and new value, `None` = removed.
fn parse_link(body: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    let mut reader = Reader(body);
    match reader.byte()? {
        0 => Some((reader.bytes()?, Some(reader.bytes()?))),
        1 => Some((reader.bytes()?, None)),
        _ => None,
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn varint(&mut self) -> Option<u64> {
        let first = self.byte()?;
        Some(match first {
            0..=240 => u64::from(first),
            241..=248 => 240 + 256 * (u64::from(first) - 241) + u64::from(self.byte()?),
            249 => 2288 + 256 * u64::from(self.byte()?) + u64::from(self.byte()?),
            _ => {
                let len = usize::from(first) - 247;
                let mut bytes = [0; 8];
                bytes[..len].copy_from_slice(self.take(len)?);
                u64::from_le_bytes(bytes)
            }
        })
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.varint()?).ok()?;
        self.take(len)
    }
}

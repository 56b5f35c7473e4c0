//! Format of records on disk: raw keys, the envelope around a record, chunks; encoding and decoding.
//!
//! ```text
//! record key      [table tag][key bytes]
//! chunk key       [0xFE][table tag][key bytes][0x00][index u16 BE]
//! quarantine key  [0xFD][raw key of the damaged record]
//!
//! envelope (little endian), value of a record key:
//!   0  "HF"            2  format = 1        3  table tag
//!   4  record version  6  flags (1 = zstd)  8  number of chunks, 0 = the payload follows
//!  10  length of the payload uncompressed  14  length as stored
//!  18  crc32 over bytes 0..18, the key bytes and the payload as stored
//!  22  payload
//!
//! chunk, value of a chunk key:
//!   0  "HC"  2  format = 1  3  table tag  4  index  6  number of chunks
//!   8  crc32 of the owning envelope  12  crc32 over bytes 0..12, the key bytes and the piece
//!  16  piece of the payload
//!
//! quarantine, value of a quarantine key:
//!   0  length of the reason u16   2  reason   then the raw value
//! ```
//!
//! The payload is bincode (fixed-width integers, little endian) of one record struct. Payloads above
//! [`INLINE_LIMIT`] are compressed; what is still above it is cut into chunks. A chunk carries the
//! checksum of its owner, so a missing, stale or foreign chunk is noticed.
//!
//! **Invariant:** no raw value is longer than [`INLINE_LIMIT`] plus a header, and no key than [`KEY_LIMIT`]:
//! sled then never moves a leaf into a blob file.
//! **Invariant:** one damaged record costs that record only.

mod envelope;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bincode::Options;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use envelope::seal;

use self::envelope::{HEADER, Header, u16_at};
use super::backend::{BackendError, RawPair};
use crate::core::state::{AnyRecord, RecordDecoder, RecordEncoder, State, Table, Version};

/// Longest payload that is stored as it is, in one value.
pub const INLINE_LIMIT: usize = 5 * 1024;
/// Longest key of a record, in bytes.
pub const KEY_LIMIT: usize = 512;
/// Longest record, in bytes before compression.
pub const RECORD_LIMIT: usize = 16 * 1024 * 1024;
/// First byte of chunk keys.
pub const CHUNK_PREFIX: u8 = 0xFE;
/// First byte of quarantine keys.
pub const QUARANTINE_PREFIX: u8 = 0xFD;

const REASON_LIMIT: usize = 256;

/// Failure to encode a record or decode a payload.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The key is empty or too long.
    #[error("encode {} record: the key has {length} bytes, 1 to {KEY_LIMIT} are allowed", table.name())]
    Key {
        /// Table.
        table: Table,
        /// Its length.
        length: usize,
    },
    /// The record is too big.
    #[error("encode {} {key}: the record has {length} bytes, {RECORD_LIMIT} are allowed", table.name())]
    TooBig {
        /// Table.
        table: Table,
        /// Key.
        key: String,
        /// Its length.
        length: usize,
    },
    /// bincode refused.
    #[error("encode or decode a record")]
    Bincode(#[source] bincode::Error),
    /// zstd refused.
    #[error("compress a record")]
    Compress(#[source] std::io::Error),
}

/// Reason for which a raw value was moved to quarantine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuarantineReason {
    /// Shorter than its header or other than its header says.
    #[error("the value is cut off or has the wrong length")]
    Length,
    /// Not an envelope.
    #[error("the value does not begin like a record")]
    Magic,
    /// Bytes changed.
    #[error("the checksum does not match")]
    Checksum,
    /// A chunk is missing.
    #[error("chunk {index} of {count} is missing or belongs to another version of the record")]
    Chunk {
        /// Which.
        index: u16,
        /// Of how many.
        count: u16,
    },
    /// A chunk without a record.
    #[error("a chunk without a record")]
    OrphanChunk,
    /// The key is not text, or not of a known kind.
    #[error("the key is not one this store writes")]
    Key,
    /// The payload does not decode.
    #[error("the record does not decode: {0}")]
    Decode(String),
    /// Written by a newer binary.
    #[error("record version {found} is newer than {known}, which this binary knows")]
    NewerVersion {
        /// On disk.
        found: u16,
        /// Of this binary.
        known: u16,
    },
    /// Written by an older binary and not migrated.
    #[error("record version {found} is older than {known} and was not migrated")]
    OlderVersion {
        /// On disk.
        found: u16,
        /// Of this binary.
        known: u16,
    },
    /// A table or envelope format that this binary does not know.
    #[error("table {table} or format {format} is not known to this binary")]
    NewerFormat {
        /// Table tag.
        table: u8,
        /// Envelope format.
        format: u8,
    },
    /// Quarantined by an earlier run.
    #[error("{0}")]
    Earlier(String),
}

impl QuarantineReason {
    /// Returns whether a newer binary could read it: the schema or format is newer, nothing is damaged.
    pub fn is_newer(&self) -> bool {
        matches!(self, Self::NewerVersion { .. } | Self::NewerFormat { .. })
    }
}

/// A raw pair that could not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// Its table, if known.
    pub table: Option<Table>,
    /// Its key, as far as it is text.
    pub key: String,
    /// Raw key.
    pub raw_key: Vec<u8>,
    /// Raw value.
    pub raw: Vec<u8>,
    /// Why.
    pub reason: QuarantineReason,
}

impl Quarantined {
    fn new(raw_key: Vec<u8>, raw: Vec<u8>, reason: QuarantineReason) -> Self {
        let (tag, key) = match raw_key.split_first() {
            Some((&CHUNK_PREFIX, rest)) => (
                rest.first().copied(),
                rest.get(1..rest.len().saturating_sub(3))
                    .unwrap_or_default(),
            ),
            Some((tag, rest)) => (Some(*tag), rest),
            None => (None, &[][..]),
        };
        Self {
            table: tag.and_then(Table::from_tag),
            key: String::from_utf8_lossy(key).into_owned(),
            raw_key,
            raw,
            reason,
        }
    }

    /// The pair under which it is kept.
    pub fn to_pair(&self) -> RawPair {
        let mut key = Vec::with_capacity(self.raw_key.len() + 1);
        key.push(QUARANTINE_PREFIX);
        key.extend_from_slice(&self.raw_key);
        let mut reason = self.reason.to_string();
        let mut end = reason.len().min(REASON_LIMIT);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        reason.truncate(end);
        let mut value = Vec::with_capacity(2 + reason.len() + self.raw.len());
        value.extend_from_slice(&(reason.len() as u16).to_le_bytes());
        value.extend_from_slice(reason.as_bytes());
        value.extend_from_slice(&self.raw);
        (key, value)
    }

    fn from_pair(raw_key: &[u8], value: &[u8]) -> Self {
        let length = u16_at(value, 0).map_or(0, usize::from);
        let reason = value.get(2..2 + length).unwrap_or_default();
        let raw = value.get(2 + length..).unwrap_or_default();
        Self::new(
            raw_key.get(1..).unwrap_or_default().to_vec(),
            raw.to_vec(),
            QuarantineReason::Earlier(String::from_utf8_lossy(reason).into_owned()),
        )
    }
}

/// A record as it goes to disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Value of the record key.
    pub value: Vec<u8>,
    /// Values of the chunk keys, by index.
    pub chunks: Vec<Vec<u8>>,
}

impl Encoded {
    /// Bytes it takes.
    pub fn size(&self) -> usize {
        self.value.len() + self.chunks.iter().map(Vec::len).sum::<usize>()
    }

    /// The raw pairs of it.
    pub fn into_pairs(self, table: Table, key: &str) -> impl Iterator<Item = RawPair> + use<> {
        let key: Arc<str> = Arc::from(key);
        let main = (record_key(table, &key), self.value);
        std::iter::once(main).chain(
            (0_u16..)
                .zip(self.chunks)
                .map(move |(index, chunk)| (chunk_key(table, &key, index), chunk)),
        )
    }
}

/// A record that has been taken out of its envelope but not been decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawRecord {
    /// Table.
    pub table: Table,
    /// Key.
    pub key: Arc<str>,
    /// Version of its layout.
    pub record_version: u16,
    /// bincode of the record.
    pub payload: Vec<u8>,
    /// Number of chunks it occupies.
    pub chunks: u16,
}

/// Result of [`load_raw`].
#[derive(Debug, Default)]
pub struct RawLoaded {
    /// Records whose envelope is whole, in key order except for chunked ones, which come last.
    pub records: Vec<RawRecord>,
    /// Damaged values.
    pub quarantined: Vec<Quarantined>,
    /// Values that earlier runs moved to quarantine.
    pub kept: Vec<Quarantined>,
    /// The error that ended the iteration early, if one did.
    pub interrupted: Option<BackendError>,
}

/// Result of [`load`].
#[derive(Debug, Default)]
pub struct Loaded {
    /// The records, all at `version`.
    pub state: State,
    /// The version.
    pub version: Version,
    /// Damaged or unknown, newly found. [`super::Store::start`] moves them into the quarantine prefix, save those
    /// of a newer schema.
    pub quarantined: Vec<Quarantined>,
    /// Values that earlier runs moved to quarantine.
    pub kept: Vec<Quarantined>,
    /// Number of chunks of each record that has any.
    pub chunks: HashMap<(Table, Arc<str>), u16>,
    /// The error that ended the reading early, if one did.
    pub interrupted: Option<BackendError>,
}

impl Loaded {
    /// The first thing that only a newer binary understands: the store has a newer schema.
    pub fn newer(&self) -> Option<&Quarantined> {
        self.quarantined.iter().find(|q| q.reason.is_newer())
    }
}

/// Raw key of a record.
pub fn record_key(table: Table, key: &str) -> Vec<u8> {
    let mut raw = Vec::with_capacity(1 + key.len());
    raw.push(table.tag());
    raw.extend_from_slice(key.as_bytes());
    raw
}

/// Raw key of a chunk.
pub fn chunk_key(table: Table, key: &str, index: u16) -> Vec<u8> {
    let mut raw = Vec::with_capacity(5 + key.len());
    raw.push(CHUNK_PREFIX);
    raw.push(table.tag());
    raw.extend_from_slice(key.as_bytes());
    raw.push(0);
    raw.extend_from_slice(&index.to_be_bytes());
    raw
}

/// bincode of one record struct.
///
/// # Errors
/// When it is longer than [`RECORD_LIMIT`].
pub fn encode_payload<R: Serialize>(record: &R) -> Result<Vec<u8>, CodecError> {
    options().serialize(record).map_err(CodecError::Bincode)
}

/// The record struct of a payload. Trailing bytes are an error.
///
/// # Errors
/// When the bytes are not a record of that type.
pub fn decode_payload<R: DeserializeOwned>(payload: &[u8]) -> Result<R, CodecError> {
    options().deserialize(payload).map_err(CodecError::Bincode)
}

fn options() -> impl Options {
    bincode::DefaultOptions::new()
        .with_fixint_encoding()
        .reject_trailing_bytes()
        .with_limit(RECORD_LIMIT as u64)
}

struct Bincode;

impl RecordEncoder for Bincode {
    type Error = CodecError;

    fn encode<R: Serialize>(&self, record: &R) -> Result<Vec<u8>, CodecError> {
        encode_payload(record)
    }
}

impl RecordDecoder for Bincode {
    type Error = CodecError;

    fn decode<R: DeserializeOwned>(&self, bytes: &[u8]) -> Result<R, CodecError> {
        decode_payload(bytes)
    }
}

/// Encodes a record of the current version.
///
/// # Errors
/// When the key or the record is too long.
pub fn encode(key: &str, record: &AnyRecord) -> Result<Encoded, CodecError> {
    let table = record.table();
    let payload = record.encode_with(&Bincode)?;
    seal(table, key, table.record_version(), payload)
}

/// Every raw pair of a state, as a store or a backup holds them.
pub fn encode_state(state: &State) -> impl Iterator<Item = Result<RawPair, CodecError>> + '_ {
    state
        .iter_all()
        .flat_map(|(table, key, record)| match encode(&key, &record) {
            Ok(encoded) => encoded.into_pairs(table, &key).map(Ok).collect(),
            Err(e) => vec![Err(e)],
        })
}

/// Decodes a whole store of the current schema, from a backend or a backup. A bad record is moved to quarantine and
/// never keeps the others from being loaded; every record gets `version`.
pub fn load(
    pairs: impl IntoIterator<Item = Result<RawPair, BackendError>>,
    version: Version,
) -> Loaded {
    let mut loaded = Loaded {
        version,
        ..Loaded::default()
    };
    let mut raw = RawLoaded::default();
    read(pairs, &mut raw, |record, pairs, quarantined| {
        let known = record.table.record_version();
        let found = record.record_version;
        let decoded = if found > known {
            Err(QuarantineReason::NewerVersion { found, known })
        } else if found < known {
            Err(QuarantineReason::OlderVersion { found, known })
        } else {
            AnyRecord::decode_with(record.table, &record.payload, &Bincode)
                .map_err(|e| QuarantineReason::Decode(root_cause(&e)))
        };
        match decoded {
            Ok(decoded) => {
                if record.chunks > 0 {
                    loaded
                        .chunks
                        .insert((record.table, Arc::clone(&record.key)), record.chunks);
                }
                loaded.state.load(record.key, decoded, version);
            }
            Err(reason) => quarantined.extend(
                pairs
                    .into_iter()
                    .map(|(k, v)| Quarantined::new(k, v, reason.clone())),
            ),
        }
    });
    loaded.quarantined = raw.quarantined;
    loaded.kept = raw.kept;
    loaded.interrupted = raw.interrupted;
    loaded
}

/// Takes every record of a store, of whatever record version, out of its envelope: for migrations, and to examine a
/// store that this binary cannot load.
pub fn load_raw(pairs: impl IntoIterator<Item = Result<RawPair, BackendError>>) -> RawLoaded {
    let mut raw = RawLoaded::default();
    let mut records = Vec::new();
    read(pairs, &mut raw, |record, _, _| records.push(record));
    raw.records = records;
    raw
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// Chunks by index, with their raw values, of one record.
type Pieces = BTreeMap<u16, Vec<u8>>;

fn read(
    pairs: impl IntoIterator<Item = Result<RawPair, BackendError>>,
    out: &mut RawLoaded,
    mut found: impl FnMut(RawRecord, Vec<RawPair>, &mut Vec<Quarantined>),
) {
    let mut chunked: Vec<(Header, RawPair)> = Vec::new();
    let mut pieces: BTreeMap<Vec<u8>, Pieces> = BTreeMap::new();
    for pair in pairs {
        let (raw_key, value) = match pair {
            Ok(pair) => pair,
            Err(e) => {
                out.interrupted = Some(e);
                break;
            }
        };
        match raw_key.first() {
            Some(&QUARANTINE_PREFIX) => out.kept.push(Quarantined::from_pair(&raw_key, &value)),
            Some(&CHUNK_PREFIX) => match chunk_owner(&raw_key) {
                Some((owner, index)) => {
                    pieces.entry(owner).or_default().insert(index, value);
                }
                None => {
                    out.quarantined
                        .push(Quarantined::new(raw_key, value, QuarantineReason::Key))
                }
            },
            _ => match Header::parse(&raw_key, &value) {
                Ok(header) if header.chunks > 0 => chunked.push((header, (raw_key, value))),
                Ok(header) => {
                    let stored = value.get(HEADER..).unwrap_or_default();
                    match header.unwrap(&value, stored) {
                        Ok(record) => {
                            found(record, vec![(raw_key, value)], &mut out.quarantined);
                        }
                        Err(reason) => out
                            .quarantined
                            .push(Quarantined::new(raw_key, value, reason)),
                    }
                }
                Err(reason) => out
                    .quarantined
                    .push(Quarantined::new(raw_key, value, reason)),
            },
        }
    }
    for (header, (raw_key, value)) in chunked {
        let mut mine = pieces.remove(&raw_key).unwrap_or_default();
        // Chunks beyond the count are left-overs of an older, longer version.
        let surplus = mine.split_off(&header.chunks);
        let joined = header.join(&mine);
        let mut all = vec![(raw_key, value)];
        let key = Arc::clone(&header.key);
        let table = header.table;
        all.extend(
            mine.into_iter()
                .map(|(index, chunk)| (chunk_key(table, &key, index), chunk)),
        );
        let result = joined.and_then(|stored| header.unwrap(&all[0].1, &stored));
        match result {
            Ok(record) => found(record, all, &mut out.quarantined),
            Err(reason) => out.quarantined.extend(
                all.into_iter()
                    .map(|(k, v)| Quarantined::new(k, v, reason.clone())),
            ),
        }
        orphans(&record_key(table, &key), surplus, &mut out.quarantined);
    }
    for (owner, chunks) in pieces {
        orphans(&owner, chunks, &mut out.quarantined);
    }
}

/// The record key of a chunk's owner, and the chunk's index; `None` for what [`chunk_key`] does not write.
fn chunk_owner(raw_key: &[u8]) -> Option<(Vec<u8>, u16)> {
    let (rest, index) = raw_key.split_last_chunk::<2>()?;
    let owner = rest.strip_prefix(&[CHUNK_PREFIX])?.strip_suffix(&[0])?;
    // A table tag and a key.
    (owner.len() > 1).then(|| (owner.to_vec(), u16::from_be_bytes(*index)))
}

fn orphans(owner: &[u8], chunks: Pieces, quarantined: &mut Vec<Quarantined>) {
    for (index, chunk) in chunks {
        let mut raw_key = vec![CHUNK_PREFIX];
        raw_key.extend_from_slice(owner);
        raw_key.push(0);
        raw_key.extend_from_slice(&index.to_be_bytes());
        quarantined.push(Quarantined::new(
            raw_key,
            chunk,
            QuarantineReason::OrphanChunk,
        ));
    }
}

#[cfg(test)]
mod tests;

//! The envelope around one record: made by [`seal`], checked by [`Header`].

use std::sync::Arc;

use super::{
    CodecError, Encoded, INLINE_LIMIT, KEY_LIMIT, Pieces, QuarantineReason, RECORD_LIMIT, RawRecord,
};
use crate::core::state::Table;

const MAGIC: [u8; 2] = *b"HF";
const CHUNK_MAGIC: [u8; 2] = *b"HC";
const FORMAT: u8 = 1;
pub(super) const HEADER: usize = 22;
pub(super) const CHUNK_HEADER: usize = 16;
pub(super) const FLAG_ZSTD: u16 = 1;

/// Puts a payload of any record version into an envelope.
///
/// # Errors
/// When the key or the payload is too long.
pub fn seal(
    table: Table,
    key: &str,
    record_version: u16,
    payload: Vec<u8>,
) -> Result<Encoded, CodecError> {
    if key.is_empty() || key.len() > KEY_LIMIT {
        return Err(CodecError::Key {
            table,
            length: key.len(),
        });
    }
    let raw_length = payload.len();
    if raw_length > RECORD_LIMIT {
        return Err(CodecError::TooBig {
            table,
            key: key.to_owned(),
            length: raw_length,
        });
    }
    let mut flags = 0;
    let mut stored = payload;
    if raw_length > INLINE_LIMIT {
        let compressed = zstd::bulk::compress(&stored, 1).map_err(CodecError::Compress)?;
        if compressed.len() < raw_length {
            flags |= FLAG_ZSTD;
            stored = compressed;
        }
    }
    let count = if stored.len() > INLINE_LIMIT {
        // At most RECORD_LIMIT / INLINE_LIMIT = 3277 chunks.
        stored.len().div_ceil(INLINE_LIMIT) as u16
    } else {
        0
    };

    let mut value = Vec::with_capacity(HEADER + if count == 0 { stored.len() } else { 0 });
    value.extend_from_slice(&MAGIC);
    value.push(FORMAT);
    value.push(table.tag());
    value.extend_from_slice(&record_version.to_le_bytes());
    value.extend_from_slice(&u16::to_le_bytes(flags));
    value.extend_from_slice(&count.to_le_bytes());
    value.extend_from_slice(&(raw_length as u32).to_le_bytes());
    value.extend_from_slice(&(stored.len() as u32).to_le_bytes());
    let crc = checksum(&value, key.as_bytes(), &stored);
    value.extend_from_slice(&crc.to_le_bytes());
    if count == 0 {
        value.extend_from_slice(&stored);
        return Ok(Encoded {
            value,
            chunks: Vec::new(),
        });
    }
    let chunks = (0_u16..)
        .zip(stored.chunks(INLINE_LIMIT))
        .map(|(index, piece)| {
            let mut chunk = Vec::with_capacity(CHUNK_HEADER + piece.len());
            chunk.extend_from_slice(&CHUNK_MAGIC);
            chunk.push(FORMAT);
            chunk.push(table.tag());
            chunk.extend_from_slice(&index.to_le_bytes());
            chunk.extend_from_slice(&count.to_le_bytes());
            chunk.extend_from_slice(&crc.to_le_bytes());
            let own = checksum(&chunk, key.as_bytes(), piece);
            chunk.extend_from_slice(&own.to_le_bytes());
            chunk.extend_from_slice(piece);
            chunk
        })
        .collect();
    Ok(Encoded { value, chunks })
}

/// The header of an envelope, with the key it was found under.
pub(super) struct Header {
    pub(super) table: Table,
    pub(super) key: Arc<str>,
    record_version: u16,
    flags: u16,
    pub(super) chunks: u16,
    raw_length: usize,
    stored_length: usize,
    crc: u32,
}

impl Header {
    /// Reads the header; does not check the checksum yet.
    pub(super) fn parse(raw_key: &[u8], value: &[u8]) -> Result<Self, QuarantineReason> {
        use QuarantineReason as Reason;
        let (&tag, key) = raw_key.split_first().ok_or(Reason::Key)?;
        if value.len() < HEADER {
            return Err(Reason::Length);
        }
        if value[..2] != MAGIC {
            return Err(Reason::Magic);
        }
        let format = value[2];
        let table = match Table::from_tag(tag) {
            Some(table) if format == FORMAT => table,
            // Every format keeps the header's length and its checksum where they are: a value of a
            // newer binary can be told from a damaged one.
            _ if value[3] == tag
                && u32_at(value, 18)
                    == Some(checksum(&value[..HEADER - 4], key, &value[HEADER..])) =>
            {
                return Err(Reason::NewerFormat { table: tag, format });
            }
            _ => return Err(Reason::Key),
        };
        let key = std::str::from_utf8(key).map_err(|_| Reason::Key)?;
        if key.is_empty() || value[3] != tag {
            return Err(Reason::Key);
        }
        let length = || Reason::Length;
        Ok(Self {
            table,
            key: Arc::from(key),
            record_version: u16_at(value, 4).ok_or_else(length)?,
            flags: u16_at(value, 6).ok_or_else(length)?,
            chunks: u16_at(value, 8).ok_or_else(length)?,
            raw_length: u32_at(value, 10).ok_or_else(length)? as usize,
            stored_length: u32_at(value, 14).ok_or_else(length)? as usize,
            crc: u32_at(value, 18).ok_or_else(length)?,
        })
    }

    /// Joins the chunks to the payload as stored.
    pub(super) fn join(&self, pieces: &Pieces) -> Result<Vec<u8>, QuarantineReason> {
        let mut stored = Vec::with_capacity(self.stored_length.min(RECORD_LIMIT));
        for index in 0..self.chunks {
            let chunk = pieces.get(&index);
            let piece = chunk.and_then(|chunk| self.piece(chunk, index));
            stored.extend_from_slice(piece.ok_or(QuarantineReason::Chunk {
                index,
                count: self.chunks,
            })?);
        }
        Ok(stored)
    }

    fn piece<'a>(&self, chunk: &'a [u8], index: u16) -> Option<&'a [u8]> {
        let (head, piece) = chunk.split_at_checked(CHUNK_HEADER)?;
        let whole = head[..2] == CHUNK_MAGIC
            && head[2] == FORMAT
            && head[3] == self.table.tag()
            && u16_at(head, 4)? == index
            && u16_at(head, 6)? == self.chunks
            && u32_at(head, 8)? == self.crc
            && u32_at(head, 12)? == checksum(&head[..12], self.key.as_bytes(), piece);
        whole.then_some(piece)
    }

    /// Checks and decompresses the payload. `value` is the envelope.
    pub(super) fn unwrap(
        &self,
        value: &[u8],
        stored: &[u8],
    ) -> Result<RawRecord, QuarantineReason> {
        if stored.len() != self.stored_length || self.raw_length > RECORD_LIMIT {
            return Err(QuarantineReason::Length);
        }
        if checksum(&value[..HEADER - 4], self.key.as_bytes(), stored) != self.crc {
            return Err(QuarantineReason::Checksum);
        }
        let payload = if self.flags & FLAG_ZSTD == 0 {
            stored.to_vec()
        } else {
            zstd::bulk::decompress(stored, self.raw_length)
                .map_err(|e| QuarantineReason::Decode(e.to_string()))?
        };
        if payload.len() != self.raw_length {
            return Err(QuarantineReason::Length);
        }
        Ok(RawRecord {
            table: self.table,
            key: Arc::clone(&self.key),
            record_version: self.record_version,
            payload,
            chunks: self.chunks,
        })
    }
}

pub(super) fn checksum(head: &[u8], key: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(key);
    hasher.update(payload);
    hasher.finalize()
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let two = bytes.get(at..at + 2)?;
    Some(u16::from_le_bytes([two[0], two[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
}

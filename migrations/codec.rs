//! bincode as every schema so far has used it: fixed-width little-endian integers, no trailing bytes.

use bincode::Options as _;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Record, StepError};

const LIMIT: u64 = 16 * 1024 * 1024;

/// Decodes a record that must have layout `version`.
///
/// # Errors
/// When it has another version or other bytes.
pub fn decode<R: DeserializeOwned>(
    at: &(u8, String),
    record: &Record,
    version: u16,
) -> Result<R, StepError> {
    if record.version != version {
        return Err(StepError::Version {
            table: at.0,
            key: at.1.clone(),
            found: record.version,
            expected: version,
        });
    }
    options()
        .deserialize(&record.payload)
        .map_err(|source| codec(at, source))
}

/// Encodes a record with layout `version`.
///
/// # Errors
/// When it is too big.
pub fn encode<R: Serialize>(
    at: &(u8, String),
    record: &R,
    version: u16,
) -> Result<Record, StepError> {
    let payload = options()
        .serialize(record)
        .map_err(|source| codec(at, source))?;
    Ok(Record { version, payload })
}

fn codec(at: &(u8, String), source: bincode::Error) -> StepError {
    StepError::Codec {
        table: at.0,
        key: at.1.clone(),
        source,
    }
}

fn options() -> impl bincode::Options {
    bincode::DefaultOptions::new()
        .with_fixint_encoding()
        .reject_trailing_bytes()
        .with_limit(LIMIT)
}

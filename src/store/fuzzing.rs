//! Fuzz targets of the store: its format on disk, migrations, salvage and backups.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::backup::{self, BackupMeta};
use super::codec;
pub(crate) use super::codec::fuzzing::{store_envelope, store_record};
use super::migrate::migrations::test_step::NEWER;
use super::migrate::{self, Record, Records};
pub(crate) use super::salvage::fuzzing::salvage;
use crate::core::state::{META_KEY, Table};
use crate::types::{BootId, Stamp};

/// Migrates records. The input is a list of them: tag, record version, length of the key, length of the payload
/// (16 bits, little endian), key, payload. A record without a key is the meta record.
///
/// Asserts that steps up and down again give the records of before, and that a store keeps all of them.
pub(crate) fn store_migration(data: &[u8]) {
    let records = records_of(data);
    let dir = Path::new("fuzz");
    let Some(from) = migrate::schema_of(&records) else {
        let refused = migrate::convert(NEWER, records, 1, NEWER.newest(), dir);
        refused.unwrap_err();
        return;
    };
    for to in 0..=NEWER.newest() + 1 {
        let Ok(converted) = migrate::convert(NEWER, records.clone(), from, to, dir) else {
            continue;
        };
        assert_eq!(migrate::schema_of(&converted), Some(to));
        // On the way down a step may drop what the older schema has no place for.
        if to >= from {
            let back = migrate::convert(NEWER, converted.clone(), to, from, dir).unwrap();
            assert_eq!(back, records);
        }
        if let Ok(pairs) = migrate::to_pairs(&converted) {
            let raw = codec::load_raw(pairs.into_iter().map(Ok));
            assert!(raw.quarantined.is_empty() && raw.kept.is_empty());
            let known = |tag| Table::from_tag(tag).is_some();
            let stored: Records = converted
                .into_iter()
                .filter(|(at, _)| known(at.0))
                .collect();
            assert_eq!(migrate::to_records(&raw), stored);
        }
    }
}

fn records_of(mut data: &[u8]) -> Records {
    let mut records = Records::new();
    while let [tag, version, key_length, a, b, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*a, *b]));
        let (key, rest) = rest.split_at(usize::from(*key_length).min(rest.len()));
        let (payload, rest) = rest.split_at(length.min(rest.len()));
        data = rest;
        let at = match String::from_utf8_lossy(key).into_owned() {
            key if key.is_empty() => (Table::Meta.tag(), META_KEY.to_owned()),
            key => (*tag, key),
        };
        let record = Record {
            version: u16::from(*version),
            payload: payload.to_vec(),
        };
        records.insert(at, record);
    }
    records
}

/// Reads a backup. By the first byte the rest is: a file; a file without its checksum; pairs (length of the key,
/// length of the value, key, value) that are written and damaged at a place that the second byte chooses.
///
/// Asserts that a backup reads back, that no damage passes, and that what does not verify is not read.
pub(crate) fn backup(data: &[u8]) {
    let path = Path::new("fuzz.holdfast");
    match data {
        [0, file @ ..] => read_backup(path, file),
        [1, file @ ..] => {
            let mut file = file.to_vec();
            let digest = Sha256::digest(&file);
            file.extend_from_slice(&digest);
            read_backup(path, &file);
        }
        [_, at, rest @ ..] => {
            let pairs = pairs_of(rest);
            let meta = meta();
            let mut file = backup::serialize(&pairs, &meta, path).unwrap();
            assert_eq!(backup::parse(path, &file, UNPACKED).unwrap(), (meta, pairs));
            let place = usize::from(*at) * file.len() / 256;
            file[place] ^= 1 << (at % 8);
            backup::parse(path, &file, UNPACKED).unwrap_err();
            file[place] ^= 1 << (at % 8);
            file.truncate(place);
            backup::parse(path, &file, UNPACKED).unwrap_err();
        }
        _ => {}
    }
}

/// Longest body of a backup here, bytes.
const UNPACKED: u64 = 1 << 20;

fn read_backup(path: &Path, file: &[u8]) {
    let verified = backup::verify(path, file).map(|(meta, _)| meta);
    let Ok((meta, pairs)) = backup::parse(path, file, UNPACKED) else {
        return;
    };
    assert_eq!(verified.unwrap(), meta);
    assert!(meta.file_name().starts_with("backup-"));
    let unpacked: usize = pairs
        .iter()
        .map(|(key, value)| 8 + key.len() + value.len())
        .sum();
    assert!(unpacked as u64 <= UNPACKED);
    let written = backup::serialize(&pairs, &meta, path).unwrap();
    assert_eq!(
        backup::parse(path, &written, UNPACKED).unwrap(),
        (meta, pairs)
    );
}

fn meta() -> BackupMeta {
    let now = Stamp {
        boot: BootId(1),
        boottime_ms: 2,
        wall_ms: 3,
    };
    BackupMeta::of(&Default::default(), 4, now)
}

fn pairs_of(mut data: &[u8]) -> Vec<super::backend::RawPair> {
    let mut pairs = Vec::new();
    while let [key_length, value_length, rest @ ..] = data {
        let (key, rest) = rest.split_at(usize::from(*key_length).min(rest.len()));
        let (value, rest) = rest.split_at(usize::from(*value_length).min(rest.len()));
        data = rest;
        pairs.push((key.to_vec(), value.to_vec()));
    }
    pairs
}

//! Fuzz targets of the format on disk: envelopes with their chunks, and the records in them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};

use super::envelope::{CHUNK_HEADER, FLAG_ZSTD, checksum};
use super::*;

/// Loads a store. The input is a list of raw pairs: flags, length of the key, length of the value (16 bits, little
/// endian), key, value. The first flag makes the checksum right, the second makes a chunk belong to the envelope
/// before it.
///
/// Asserts that every raw pair is a record, part of one, or in quarantine under its own key, and that loaded and
/// quarantined values read back.
pub(crate) fn store_envelope(data: &[u8]) {
    let Some(pairs) = pairs_of(data) else {
        return;
    };
    let there: BTreeSet<Vec<u8>> = pairs.keys().cloned().collect();
    let all = || pairs.clone().into_iter().map(Ok);

    let raw = load_raw(all());
    let mut found: Vec<Vec<u8>> = Vec::new();
    for record in &raw.records {
        assert!(record.payload.len() <= RECORD_LIMIT);
        found.push(record_key(record.table, &record.key));
        found.extend((0..record.chunks).map(|index| chunk_key(record.table, &record.key, index)));
    }
    found.extend(set_aside(&raw.quarantined, &raw.kept));
    assert_same(&there, found);

    let loaded = load(all(), 1);
    let mut found = set_aside(&loaded.quarantined, &loaded.kept);
    for (table, key, _) in loaded.state.iter_all() {
        found.push(record_key(table, &key));
        let chunks = loaded.chunks.get(&(table, Arc::clone(&key)));
        found.extend((0..chunks.copied().unwrap_or(0)).map(|index| chunk_key(table, &key, index)));
    }
    assert_same(&there, found);

    let again: Result<Vec<_>, _> = encode_state(&loaded.state).collect();
    // A key may be longer than one that is written.
    if let Ok(again) = again {
        let again = load(again.into_iter().map(Ok), 1);
        assert!(again.quarantined.is_empty() && again.kept.is_empty());
        assert_eq!(again.state.counts(), loaded.state.counts());
    }
    for one in &loaded.quarantined {
        let kept = load_raw([Ok(one.to_pair())]).kept;
        let [kept] = &kept[..] else {
            panic!("{kept:?}");
        };
        assert_eq!((&kept.raw_key, &kept.raw), (&one.raw_key, &one.raw));
    }
}

fn set_aside(quarantined: &[Quarantined], kept: &[Quarantined]) -> Vec<Vec<u8>> {
    let new = quarantined.iter().map(|one| one.raw_key.clone());
    let old = kept
        .iter()
        .map(|one| [&[QUARANTINE_PREFIX], &one.raw_key[..]].concat());
    new.chain(old).collect()
}

fn assert_same(there: &BTreeSet<Vec<u8>>, found: Vec<Vec<u8>>) {
    let count = found.len();
    let found: BTreeSet<Vec<u8>> = found.into_iter().collect();
    assert_eq!(count, found.len(), "something was found twice");
    assert_eq!(*there, found);
}

/// `None` for records that would unpack to more than one record may have.
fn pairs_of(mut data: &[u8]) -> Option<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut pairs = BTreeMap::new();
    let mut owner = 0_u32;
    let mut unpacked = 0;
    while let [flags, key_length, a, b, rest @ ..] = data {
        let value_length = usize::from(u16::from_le_bytes([*a, *b]));
        let (key, rest) = rest.split_at(usize::from(*key_length).min(rest.len()));
        let (value, rest) = rest.split_at(value_length.min(rest.len()));
        data = rest;
        let mut value = value.to_vec();
        if key.first() == Some(&CHUNK_PREFIX) {
            if value.len() >= CHUNK_HEADER && key.len() > 5 {
                if flags & 2 != 0 {
                    value[8..12].copy_from_slice(&owner.to_le_bytes());
                }
                if flags & 1 != 0 {
                    let (head, piece) = value.split_at(CHUNK_HEADER);
                    let crc = checksum(&head[..12], &key[2..key.len() - 3], piece);
                    value[12..16].copy_from_slice(&crc.to_le_bytes());
                }
            }
        } else if value.len() >= HEADER && !key.is_empty() {
            if flags & 1 != 0 {
                let (head, stored) = value.split_at(HEADER);
                let crc = checksum(&head[..HEADER - 4], &key[1..], stored);
                value[18..22].copy_from_slice(&crc.to_le_bytes());
            }
            owner = u32::from_le_bytes([value[18], value[19], value[20], value[21]]);
            if u16::from_le_bytes([value[6], value[7]]) & FLAG_ZSTD != 0 {
                let length = u32::from_le_bytes([value[10], value[11], value[12], value[13]]);
                unpacked += usize::try_from(length)
                    .unwrap_or(RECORD_LIMIT)
                    .min(RECORD_LIMIT);
            }
        }
        pairs.insert(key.to_vec(), value);
    }
    (unpacked <= RECORD_LIMIT).then_some(pairs)
}

/// Decodes a record. The first byte is the tag of its table.
///
/// Asserts that a record that was decoded is encoded to the same record, and comes back out of its envelope.
pub(crate) fn store_record(data: &[u8]) {
    let Some((tag, payload)) = data.split_first() else {
        return;
    };
    let Some(table) = Table::from_tag(*tag) else {
        return;
    };
    let Ok(record) = AnyRecord::decode_with(table, payload, &Bincode) else {
        return;
    };
    assert_eq!(record.table(), table);
    let encoded = record.encode_with(&Bincode).unwrap();
    let again = AnyRecord::decode_with(table, &encoded, &Bincode).unwrap();
    // Bytes, since some numbers are not equal to themselves.
    assert_eq!(again.encode_with(&Bincode).unwrap(), encoded);
    let pairs = encode("key", &record).unwrap().into_pairs(table, "key");
    let loaded = load(pairs.map(Ok), 1);
    assert!(loaded.quarantined.is_empty());
    let loaded = loaded.state.get_any(table, "key").unwrap();
    assert_eq!(loaded.encode_with(&Bincode).unwrap(), encoded);
}

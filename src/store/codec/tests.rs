use super::*;
use crate::core::state::{AnyRecord, ImageRecord, ObjectRecord, Record};
use crate::types::{BootId, Stamp};

fn stamp() -> Stamp {
    Stamp {
        boot: BootId(7),
        boottime_ms: 1,
        wall_ms: 2,
    }
}

fn object(data: Vec<u8>) -> ObjectRecord {
    ObjectRecord {
        resource_version: "1".to_owned(),
        encrypted: false,
        data,
        at: stamp(),
    }
}

/// Bytes that zstd cannot make smaller.
fn noise(length: usize) -> Vec<u8> {
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    (0..length)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 32) as u8
        })
        .collect()
}

fn pairs(key: &str, record: AnyRecord) -> Vec<RawPair> {
    let table = record.table();
    encode(key, &record)
        .unwrap()
        .into_pairs(table, key)
        .collect()
}

fn reload(pairs: Vec<RawPair>) -> Loaded {
    load(pairs.into_iter().map(Ok), 5)
}

#[test]
fn small_big_and_incompressible_records_come_back_in_values_sled_keeps_inline() {
    for data in [
        vec![],
        vec![1; 4096],
        vec![1; 100_000],
        noise(INLINE_LIMIT),
        noise(300_000),
    ] {
        let record = object(data);
        let raw = pairs("secret/default/a", record.clone().into_any());
        for (key, value) in &raw {
            assert!(value.len() < 7 * 1024, "value of {} bytes", value.len());
            assert!(key.len() < 1024);
        }
        let loaded = reload(raw);
        assert_eq!(loaded.quarantined, []);
        let found = loaded
            .state
            .get::<ObjectRecord>("secret/default/a")
            .unwrap();
        assert_eq!(found.record, record);
        assert_eq!(found.version, 5);
    }
}

#[test]
fn small_records_are_not_compressed() {
    let encoded = encode("k", &object(vec![0; 4096]).into_any()).unwrap();
    assert!(encoded.value.len() > 4096);
}

#[test]
fn any_flipped_bit_or_cut_quarantines_that_record_and_no_other() {
    let good = pairs("good", object(vec![1, 2, 3]).into_any());
    let bad = pairs("bad", object(vec![4, 5, 6]).into_any());
    let mut damaged = Vec::new();
    for byte in 0..bad[0].1.len() {
        for bit in 0..8 {
            let mut value = bad[0].1.clone();
            value[byte] ^= 1 << bit;
            damaged.push(value);
        }
        damaged.push(bad[0].1[..byte].to_vec());
    }
    for value in damaged {
        let mut all = good.clone();
        all.push((bad[0].0.clone(), value));
        let loaded = reload(all);
        assert_eq!(loaded.quarantined.len(), 1);
        assert_eq!(loaded.quarantined[0].key, "bad");
        assert_eq!(loaded.quarantined[0].table, Some(Table::Objects));
        assert!(
            loaded.newer().is_none(),
            "damage must not look like a newer schema"
        );
        assert!(loaded.state.record::<ObjectRecord>("good").is_some());
        assert!(loaded.state.record::<ObjectRecord>("bad").is_none());
    }
}

#[test]
fn a_value_under_another_key_is_quarantined() {
    let raw = pairs("a", object(vec![1]).into_any());
    let moved = vec![(record_key(Table::Objects, "b"), raw[0].1.clone())];
    let loaded = reload(moved);
    assert_eq!(loaded.quarantined[0].reason, QuarantineReason::Checksum);
}

#[test]
fn a_missing_damaged_or_stale_chunk_is_noticed() {
    let old = pairs("k", object(noise(20_000)).into_any());
    let mut other = noise(20_000);
    other[0] ^= 1;
    let new = pairs("k", object(other).into_any());
    assert_eq!(old.len(), new.len());

    for chunk in 1..new.len() {
        let mut missing = new.clone();
        missing.remove(chunk);
        let mut stale = new.clone();
        stale[chunk] = old[chunk].clone();
        let mut damaged = new.clone();
        damaged[chunk].1[100] ^= 1;
        for raw in [missing, stale, damaged] {
            let loaded = reload(raw.clone());
            assert!(loaded.state.record::<ObjectRecord>("k").is_none());
            assert_eq!(
                loaded.quarantined.len(),
                raw.len(),
                "the record is set aside with its chunks"
            );
            assert!(matches!(
                loaded.quarantined[0].reason,
                QuarantineReason::Chunk { .. }
            ));
        }
    }
}

#[test]
fn left_over_chunks_do_not_harm_the_record() {
    let mut raw = pairs("k", object(noise(6_000)).into_any());
    raw.push((chunk_key(Table::Objects, "k", 40), vec![1, 2, 3]));
    raw.push((chunk_key(Table::Objects, "gone", 0), vec![1, 2, 3]));
    let loaded = reload(raw);
    assert!(loaded.state.record::<ObjectRecord>("k").is_some());
    assert_eq!(loaded.quarantined.len(), 2);
    assert!(
        loaded
            .quarantined
            .iter()
            .all(|q| q.reason == QuarantineReason::OrphanChunk)
    );
}

#[test]
fn a_chunk_key_of_another_shape_is_set_aside_under_its_own_key() {
    let key = chunk_key(Table::Objects, "a", 0);
    let mut other = key.clone();
    let separator = other.len() - 3;
    other[separator] = 1;
    let loaded = reload(vec![(key.clone(), vec![1]), (other.clone(), vec![2])]);
    let mut found: Vec<_> = loaded.quarantined.iter().collect();
    found.sort_by(|a, b| a.raw_key.cmp(&b.raw_key));
    let [orphan, stranger] = found[..] else {
        panic!("{found:?}");
    };
    assert_eq!((&orphan.raw_key, &orphan.raw), (&key, &vec![1]));
    assert_eq!((&stranger.raw_key, &stranger.raw), (&other, &vec![2]));
    assert_eq!(stranger.reason, QuarantineReason::Key);
}

#[test]
fn a_newer_record_version_or_table_is_not_damage() {
    let payload = encode_payload(&object(vec![1])).unwrap();
    let newer = seal(Table::Objects, "k", 99, payload.clone()).unwrap();
    let loaded = reload(newer.into_pairs(Table::Objects, "k").collect());
    assert_eq!(
        loaded.newer().unwrap().reason,
        QuarantineReason::NewerVersion {
            found: 99,
            known: ObjectRecord::RECORD_VERSION
        }
    );

    let mut value = seal(Table::Objects, "k", 1, payload).unwrap().value;
    value[3] = 200;
    let crc = {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&value[..18]);
        hasher.update(b"k");
        hasher.update(&value[22..]);
        hasher.finalize()
    };
    value[18..22].copy_from_slice(&crc.to_le_bytes());
    let loaded = reload(vec![(vec![200, b'k'], value)]);
    assert!(loaded.newer().is_some());
}

#[test]
fn raw_loading_gives_every_record_version_to_migrations() {
    let payload = encode_payload(&object(noise(20_000))).unwrap();
    let sealed = seal(Table::Objects, "k", 99, payload.clone()).unwrap();
    let raw = load_raw(sealed.into_pairs(Table::Objects, "k").map(Ok));
    assert_eq!(raw.records.len(), 1);
    assert_eq!(raw.records[0].record_version, 99);
    assert_eq!(raw.records[0].payload, payload);
}

#[test]
fn trailing_bytes_are_refused() {
    let mut payload = encode_payload(&object(vec![1])).unwrap();
    payload.push(0);
    let sealed = seal(Table::Objects, "k", 1, payload).unwrap();
    let loaded = reload(sealed.into_pairs(Table::Objects, "k").collect());
    assert!(matches!(
        loaded.quarantined[0].reason,
        QuarantineReason::Decode(_)
    ));
}

#[test]
fn quarantined_bytes_survive_in_their_own_prefix() {
    let mut raw = pairs("k", object(vec![1, 2, 3]).into_any());
    raw[0].1[30] ^= 1;
    let found = reload(raw.clone()).quarantined.remove(0);
    let kept = reload(vec![found.to_pair()]).kept.remove(0);
    assert_eq!(kept.raw_key, raw[0].0);
    assert_eq!(kept.raw, raw[0].1);
    assert_eq!(kept.key, "k");
    assert_eq!(
        kept.reason,
        QuarantineReason::Earlier(found.reason.to_string())
    );
}

#[test]
fn keys_that_sled_could_not_hold_inline_are_refused() {
    let image = ImageRecord {
        pulled_ref: None,
        backoffs: BTreeMap::new(),
        first_seen: stamp(),
        last_used: stamp(),
    };
    for key in [String::new(), "x".repeat(KEY_LIMIT + 1)] {
        assert!(matches!(
            encode(&key, &image.clone().into_any()),
            Err(CodecError::Key { .. })
        ));
    }
    assert!(encode(&"x".repeat(KEY_LIMIT), &image.into_any()).is_ok());
}

#[test]
fn an_error_of_the_backend_ends_the_load_and_is_told() {
    let good = pairs("good", object(vec![1]).into_any());
    let broken = BackendError::Engine {
        action: "read",
        reason: "test".to_owned(),
    };
    let loaded = load(
        good.into_iter().map(Ok).chain(std::iter::once(Err(broken))),
        1,
    );
    assert!(loaded.interrupted.is_some());
    assert!(loaded.state.record::<ObjectRecord>("good").is_some());
}

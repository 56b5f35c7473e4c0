//! Fuzz target of the reading of sled's log.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use super::*;
use crate::store::codec;

/// Salvages a log. The input is a list of instructions that make the segments of it: messages with right checksums
/// whose body is any bytes, a leaf or a link; bytes that are no message; the next segment.
///
/// Asserts that no value is invented, that no key is both there and deleted, that a log without damage has no gaps.
/// Asserts also that the check of every start finds the same damage as the salvage, and that each pair loads or is
/// moved to quarantine.
pub(crate) fn salvage(data: &[u8]) {
    let log = Log::of(data);
    let salvage = log.read(true);
    for (key, value) in &salvage.pairs {
        assert!(!salvage.deleted.contains(key));
        assert!(memchr::memmem::find(data, value).is_some(), "{value:?}");
    }
    if !log.is_damaged && log.segments.len() == 1 {
        assert!(salvage.gaps.is_empty(), "{:?}", salvage.gaps);
    }
    let check = log.read(false);
    assert_eq!(check.gaps, salvage.gaps);
    assert!(check.damage().eq(salvage.damage()));
    assert_eq!(check.is_whole(), salvage.is_whole());
    assert!(check.pairs.is_empty() && check.deleted.is_empty());

    let count = salvage.pairs.len();
    let loaded = codec::load(salvage.pairs.into_iter().map(Ok), 1);
    let chunks: usize = loaded
        .chunks
        .values()
        .map(|count| usize::from(*count))
        .sum();
    let records: usize = loaded.state.counts().values().sum();
    let set_aside = loaded.quarantined.len() + loaded.kept.len();
    assert_eq!(records + chunks + set_aside, count);
}

/// More segments say nothing new.
const SEGMENTS: usize = 4;
const KINDS: [u8; 11] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];

struct Log {
    segments: Vec<Vec<u8>>,
    is_damaged: bool,
}

impl Log {
    fn of(mut data: &[u8]) -> Self {
        let mut log = Self {
            segments: vec![vec![0; SEGMENT_HEADER]],
            is_damaged: false,
        };
        while let [instruction, pid, length, rest @ ..] = data {
            let (bytes, rest) = rest.split_at(usize::from(*length).min(rest.len()));
            data = rest;
            let count = log.segments.len();
            let number = count - 1;
            let segment = &mut log.segments[number];
            match instruction {
                0..=15 => {
                    let kind = KINDS[usize::from(*instruction) % KINDS.len()];
                    message(segment, kind, number, *pid, bytes);
                }
                16..=23 => message(segment, 8, number, *pid, &leaf(bytes)),
                24..=31 => message(segment, 10, number, *pid, &link(bytes)),
                32 => {
                    segment.extend_from_slice(bytes);
                    log.is_damaged = true;
                }
                33 if count < SEGMENTS => {
                    log.segments.push(vec![0; SEGMENT_HEADER]);
                }
                // A message of another segment.
                34 => {
                    message(segment, 8, usize::from(*pid), *pid, bytes);
                    log.is_damaged = true;
                }
                _ => {}
            }
        }
        log
    }

    fn read(&self, keep: bool) -> Salvage {
        let mut salvage = Salvage::default();
        let mut pages = Pages {
            keep,
            ..Pages::default()
        };
        for (index, segment) in self.segments.iter().enumerate() {
            let place = Place {
                lsn: (index * SEGMENT) as i64,
                offset: (index * SEGMENT) as u64,
                is_last: index + 1 == self.segments.len(),
            };
            salvage.replay(&mut pages, segment, place, |pointer| {
                // Every second blob is there, and holds its own number.
                let kind = match pointer.first()? % 4 {
                    0 => Kind::Node,
                    1 => Kind::Link,
                    _ => return None,
                };
                Some((kind, pointer.to_vec()))
            });
        }
        salvage.finish(pages)
    }
}

fn message(segment: &mut Vec<u8>, kind: u8, number: usize, pid: u8, body: &[u8]) {
    let mut head = vec![kind];
    varint(&mut head, body.len());
    varint(&mut head, number);
    head.push(pid % 8);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(body);
    hasher.update(&head);
    segment.extend_from_slice(&(hasher.finalize() ^ u32::MAX).to_le_bytes());
    segment.extend_from_slice(&head);
    segment.extend_from_slice(body);
}

/// Numbers up to 2287 in the engine's encoding.
fn varint(out: &mut Vec<u8>, number: usize) {
    match number {
        0..=240 => out.push(number as u8),
        _ => {
            let rest = number - 240;
            out.push((241 + rest / 256) as u8);
            out.push((rest % 256) as u8);
        }
    }
}

/// A leaf whose keys and values are the halves of the lines in `bytes`; the first line is its prefix.
fn leaf(bytes: &[u8]) -> Vec<u8> {
    let mut lines = bytes.split(|b| *b == b'\n');
    let prefix = lines.next().unwrap_or_default();
    let mut body = vec![0, 0, 0, prefix.len() as u8];
    for text in [prefix, &[]] {
        varint(&mut body, text.len());
        body.extend_from_slice(text);
    }
    body.push(0);
    let halves: Vec<_> = lines.map(|line| line.split_at(line.len() / 2)).collect();
    varint(&mut body, halves.len());
    for text in halves
        .iter()
        .map(|(key, _)| key)
        .chain(halves.iter().map(|(_, value)| value))
    {
        varint(&mut body, text.len());
        body.extend_from_slice(text);
    }
    body
}

/// A link that sets or removes a key; the first byte says which.
fn link(bytes: &[u8]) -> Vec<u8> {
    let Some((is_removal, rest)) = bytes.split_first() else {
        return Vec::new();
    };
    let (key, value) = rest.split_at(rest.len() / 2);
    let mut body = vec![is_removal % 2];
    varint(&mut body, key.len());
    body.extend_from_slice(key);
    if is_removal % 2 == 0 {
        varint(&mut body, value.len());
        body.extend_from_slice(value);
    }
    body
}

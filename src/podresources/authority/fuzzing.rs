//! Fuzz target of the relay that rewrites `:authority`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use futures::FutureExt as _;

use super::*;

/// A header as its decoder gives it.
type Header = (Vec<u8>, Vec<u8>);

/// Carries what a client sends. The first byte says whether the rest is a stream of frames behind the preface, or
/// header blocks, each behind its length (16 bits, little endian), that are put into frames.
///
/// Asserts that the server gets the same frames with the same headers, but for the authority, and that each of them
/// keeps its limit.
pub(crate) fn hpack_authority(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else {
        return;
    };
    let sent = if mode % 2 == 0 {
        [PREFACE, rest].concat()
    } else {
        let mut sent = PREFACE.to_vec();
        for frame in blocks(rest).flat_map(|block| frames(1, mode >> 1, block)) {
            sent.extend(frame.bytes());
        }
        sent
    };
    let mut carried = Vec::new();
    // All of it is there: nothing waits.
    let done = requests(&mut sent.as_slice(), &mut carried)
        .now_or_never()
        .unwrap();
    let wanted = messages(&sent, false);
    let got = messages(&carried, true);
    match done {
        Ok(()) => assert!(wanted == got),
        Err(_) => assert!(wanted.starts_with(&got)),
    }
}

fn blocks(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, after) = rest.split_first_chunk()?;
        let length = usize::from(u16::from_le_bytes(*length));
        let (block, after) = after.split_at(length.min(after.len()));
        rest = after;
        Some(block)
    })
}

#[derive(Debug, PartialEq)]
enum Message {
    Headers(u32, u8, Vec<Header>),
    Other(Frame),
}

/// Parses a connection up to its first error. `is_plain`: its header blocks must have the form that the relay writes.
fn messages(mut bytes: &[u8], is_plain: bool) -> Vec<Message> {
    let mut found = Vec::new();
    if !bytes.starts_with(PREFACE) {
        assert!(!is_plain || bytes.is_empty());
        return found;
    }
    bytes = &bytes[PREFACE.len()..];
    let mut decoder = Decoder::with_dynamic_size(TABLE_SIZE);
    let mut next = || {
        let frame = Frame::read(&mut bytes).now_or_never().unwrap();
        frame.ok().flatten()
    };
    while let Some(frame) = next() {
        assert!(frame.payload.len() <= MAX_FRAME);
        if frame.kind != HEADERS {
            found.push(Message::Other(frame));
            continue;
        }
        let Ok(mut block) = frame.fragment() else {
            return found;
        };
        let mut flags = frame.flags;
        while flags & END_HEADERS == 0 {
            let Some(more) = next() else {
                return found;
            };
            if more.kind != CONTINUATION || more.stream != frame.stream {
                return found;
            }
            flags |= more.flags & END_HEADERS;
            block.extend_from_slice(&more.payload);
        }
        if whole(&block).is_none() {
            return found;
        }
        let mut headers = Vec::new();
        if decoder.decode(&mut block, &mut headers).is_err() {
            return found;
        }
        let headers = headers.into_iter().map(|(name, value, _)| {
            if name != b":authority" {
                return (name, value);
            }
            assert!(!is_plain || value == b"localhost");
            (name, b"localhost".to_vec())
        });
        found.push(Message::Headers(
            frame.stream,
            frame.flags & END_STREAM,
            headers.collect(),
        ));
    }
    found
}

//! Fuzz target of the header blocks.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use bytes::BytesMut;

use super::header::{Deflater, Headers, Inflater, MAX_BLOCK};

/// Expands header blocks. An even first byte: the rest is a block as a peer might send it. An odd one: the rest is a
/// list of texts, each behind its length, of which blocks are made; the second byte says which bit of them is damaged.
///
/// Asserts that a block keeps its limit and that a block that is not damaged reads back, also as the second one of a
/// connection.
pub(crate) fn spdy_headers(data: &[u8]) {
    match data {
        [mode, packed @ ..] if mode % 2 == 0 => {
            let mut inflater = Inflater::new();
            // The second block finds what the first one left behind.
            for _ in 0..2 {
                match inflater.block(packed) {
                    Ok(headers) => check(&headers),
                    Err(_) => return,
                }
            }
        }
        [_, at, rest @ ..] => round_trip(*at, rest),
        _ => {}
    }
}

fn round_trip(at: u8, rest: &[u8]) {
    let headers = list(rest);
    let (mut deflater, mut inflater) = (Deflater::new().unwrap(), Inflater::new());
    let mut damaged = Inflater::new();
    for _ in 0..2 {
        let mut packed = BytesMut::new();
        if deflater.block(&headers, &mut packed).is_err() {
            return;
        }
        assert_eq!(inflater.block(&packed).unwrap(), headers);
        let place = usize::from(at) % packed.len();
        packed[place] ^= 1 << (at % 8);
        match damaged.block(&packed) {
            Ok(headers) => check(&headers),
            Err(_) => return,
        }
    }
}

fn check(headers: &Headers) {
    let size: usize = headers.iter().map(|(n, v)| 8 + n.len() + v.len()).sum();
    assert!(size <= MAX_BLOCK, "{size}");
}

fn list(mut rest: &[u8]) -> Headers {
    let mut texts = Vec::new();
    while let Some((length, after)) = rest.split_first() {
        let (text, after) = after.split_at(usize::from(*length).min(after.len()));
        texts.push(String::from_utf8_lossy(text).into_owned());
        rest = after;
    }
    let pairs = texts.chunks_exact(2);
    pairs
        .map(|pair| (pair[0].clone(), pair[1].clone()))
        .collect()
}

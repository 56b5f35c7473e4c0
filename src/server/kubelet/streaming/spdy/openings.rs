//! Finds the streams that are opened and answered, by reading only the heads of passing frames.

use super::StreamId;
use super::frame::{CONTROL, HEAD, RST_STREAM, STREAM_MASK, SYN_REPLY, SYN_STREAM};

/// A frame that opens a stream, or answers one that did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// The stream is opened.
    Asked(StreamId),
    /// The stream is accepted or given up.
    Answered(StreamId),
}

/// Follows one direction of a connection, without reading headers and data.
#[derive(Debug, Default)]
pub struct Openings {
    /// The head of the frame that passes, and the number of its stream.
    start: [u8; HEAD + 4],
    /// Number of bytes of `start` that have passed.
    known: usize,
    /// Number of bytes that follow the head and have not passed yet.
    left: usize,
}

impl Openings {
    /// Takes what passes next; `found` gets each opening whose frame has passed whole.
    pub fn take(&mut self, mut bytes: &[u8], mut found: impl FnMut(Opening)) {
        while !bytes.is_empty() {
            if self.known < HEAD {
                let head = HEAD - self.known;
                bytes = self.keep(bytes, head);
                if self.known < HEAD {
                    return;
                }
                let [_, _, _, _, _, a, b, c, ..] = self.start;
                self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            }
            let (body, rest) = bytes.split_at(self.left.min(bytes.len()));
            let number = self.start.len() - self.known;
            self.keep(body, number);
            self.left -= body.len();
            bytes = rest;
            if self.left == 0 {
                if let Some(opening) = self.opening() {
                    found(opening);
                }
                self.known = 0;
            }
        }
    }

    /// Keeps up to `most` bytes; returns what follows them.
    fn keep<'a>(&mut self, bytes: &'a [u8], most: usize) -> &'a [u8] {
        let (kept, rest) = bytes.split_at(most.min(bytes.len()));
        for (place, byte) in self.start.iter_mut().skip(self.known).zip(kept) {
            *place = *byte;
        }
        self.known += kept.len();
        rest
    }

    fn opening(&self) -> Option<Opening> {
        let [a, _, c, d, _, _, _, _, number @ ..] = self.start;
        if a & CONTROL == 0 || self.known < self.start.len() {
            return None;
        }
        let stream = u32::from_be_bytes(number) & STREAM_MASK;
        match u16::from_be_bytes([c, d]) {
            SYN_STREAM => Some(Opening::Asked(stream)),
            SYN_REPLY | RST_STREAM => Some(Opening::Answered(stream)),
            _ => None,
        }
    }
}

//! Clients in Go put the path of the socket, percent-encoded, into `:authority`. That is no authority, and h2 refuses
//! such requests before anybody sees them. So the frames of a client pass through here: header blocks are read and
//! written anew with `localhost` as the authority, all other frames and all that the server says go through as they are.
//!
//! In: bytes of an HTTP/2 client on a unix socket. Out: the same requests.
//!
//! **Invariant:** a header block is at most [`MAX_BLOCK`] bytes; what is no HTTP/2 ends the connection, and the decoder
//! sees no block that breaks off.

use std::io;

use httlib_hpack::Decoder;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

/// First bytes of a client.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// SETTINGS_MAX_FRAME_SIZE and SETTINGS_HEADER_TABLE_SIZE, of which the server's settings say nothing else.
const MAX_FRAME: usize = 16 * 1024;
const TABLE_SIZE: u32 = 4096;
/// Of a header block and all that continues it.
const MAX_BLOCK: usize = 64 * 1024;

const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Carries a connection until either side ends it.
///
/// # Errors
/// When one of them breaks, or the client speaks something else.
pub(super) async fn relay<C, S>(client: C, server: S) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite,
    S: AsyncRead + AsyncWrite,
{
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let requests = async {
        requests(&mut from_client, &mut to_server).await?;
        to_server.shutdown().await
    };
    let answers = async {
        tokio::io::copy(&mut from_server, &mut to_client).await?;
        to_client.shutdown().await
    };
    // The server ends a connection; a client that has nothing more to ask still waits for answers.
    tokio::pin!(requests, answers);
    tokio::select! {
        result = &mut answers => result,
        result = &mut requests => {
            result?;
            answers.await
        }
    }
}

async fn requests(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut preface = [0; PREFACE.len()];
    from.read_exact(&mut preface).await?;
    if preface != *PREFACE {
        return Err(invalid("the client does not speak HTTP/2"));
    }
    to.write_all(&preface).await?;
    let mut decoder = Decoder::with_dynamic_size(TABLE_SIZE);
    while let Some(frame) = Frame::read(from).await? {
        if frame.kind != HEADERS {
            to.write_all(&frame.bytes()).await?;
            continue;
        }
        let mut block = frame.fragment()?;
        let mut ended = frame.flags & END_HEADERS != 0;
        while !ended {
            let next = Frame::read(from).await?;
            let next = next.filter(|next| next.kind == CONTINUATION && next.stream == frame.stream);
            let next = next.ok_or_else(|| invalid("a header block does not end"))?;
            if block.len() + next.payload.len() > MAX_BLOCK {
                return Err(invalid("a header block is too long"));
            }
            block.extend_from_slice(&next.payload);
            ended = next.flags & END_HEADERS != 0;
        }
        let block = rewritten(&mut decoder, block)?;
        for frame in frames(frame.stream, frame.flags & END_STREAM, &block) {
            to.write_all(&frame.bytes()).await?;
        }
    }
    Ok(())
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The block with another authority, each header on its own: no later block depends on it.
fn rewritten(decoder: &mut Decoder<'_>, mut block: Vec<u8>) -> io::Result<Vec<u8>> {
    // The decoder takes it for granted that what has begun also ends.
    whole(&block).ok_or_else(|| invalid("a header block is damaged"))?;
    let mut headers = Vec::new();
    // A block may name long headers by a byte each, and do other work by a byte each.
    let mut size = 0;
    while !block.is_empty() {
        let mut one = Vec::with_capacity(1);
        (decoder.decode_exact(&mut block, &mut one))
            .map_err(|_| invalid("a header block is damaged"))?;
        size += 32;
        size += one
            .iter()
            .map(|(name, value, _)| name.len() + value.len())
            .sum::<usize>();
        if size > MAX_BLOCK {
            return Err(invalid("a header block is too long"));
        }
        headers.append(&mut one);
    }
    let mut written = Vec::new();
    for (name, value, _) in &headers {
        let value: &[u8] = match name.as_slice() {
            b":authority" => b"localhost",
            _ => value,
        };
        // Literal without indexing, with a new name.
        written.push(0);
        for text in [name.as_slice(), value] {
            length(text.len(), &mut written);
            written.extend_from_slice(text);
        }
    }
    Ok(written)
}

/// Returns whether every header in the block is complete, regardless of the meaning of its indexes and strings.
fn whole(mut block: &[u8]) -> Option<()> {
    while let Some(first) = block.first() {
        // The bits of its first integer, and whether strings follow.
        let (prefix, literal) = match first {
            0x80.. => (7, false),
            0x40..=0x7f => (6, true),
            0x20..=0x3f => (5, false),
            _ => (4, true),
        };
        let index = integer(&mut block, prefix)?;
        let strings = match (literal, index) {
            (false, _) => 0,
            // The name is one of its own.
            (true, 0) => 2,
            (true, _) => 1,
        };
        for _ in 0..strings {
            let length = integer(&mut block, 7)?;
            block = block.get(length..)?;
        }
    }
    Some(())
}

/// An integer of at most five bytes, which is what the decoder takes.
fn integer(block: &mut &[u8], prefix: u32) -> Option<usize> {
    let (first, mut rest) = block.split_first()?;
    let most = (1_usize << prefix) - 1;
    let mut value = usize::from(*first) & most;
    if value == most {
        for at in 0..4 {
            let (next, after) = rest.split_first()?;
            rest = after;
            value += usize::from(next & 0x7f) << (7 * at);
            if next & 0x80 == 0 {
                *block = rest;
                return Some(value);
            }
        }
        return None;
    }
    *block = rest;
    Some(value)
}

/// The length of a string that is not Huffman-encoded: an integer with a prefix of 7 bits.
fn length(mut length: usize, into: &mut Vec<u8>) {
    const PREFIX: usize = 0x7f;
    let byte = |value: usize| u8::try_from(value & 0xff).unwrap_or_default();
    if length < PREFIX {
        into.push(byte(length));
        return;
    }
    into.push(byte(PREFIX));
    length -= PREFIX;
    while length >= 0x80 {
        into.push(byte(length & 0x7f | 0x80));
        length >>= 7;
    }
    into.push(byte(length));
}

/// The frames of a header block.
fn frames(stream: u32, end_stream: u8, block: &[u8]) -> Vec<Frame> {
    let mut pieces: Vec<&[u8]> = block.chunks(MAX_FRAME).collect();
    if pieces.is_empty() {
        pieces.push(&[]);
    }
    let last = pieces.len() - 1;
    let frame = |(index, payload): (usize, &[u8])| Frame {
        kind: if index == 0 { HEADERS } else { CONTINUATION },
        flags: if index == 0 { end_stream } else { 0 }
            | if index == last { END_HEADERS } else { 0 },
        stream,
        payload: payload.to_vec(),
    };
    pieces.into_iter().enumerate().map(frame).collect()
}

#[derive(Debug, PartialEq, Eq)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl Frame {
    /// The next frame; `None` when the client has ended.
    async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let mut head = [0; 9];
        if from.read(&mut head[..1]).await? == 0 {
            return Ok(None);
        }
        from.read_exact(&mut head[1..]).await?;
        let [a, b, c, kind, flags, stream @ ..] = head;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        if length > MAX_FRAME {
            return Err(invalid("a frame is too long"));
        }
        let mut payload = vec![0; length];
        from.read_exact(&mut payload).await?;
        Ok(Some(Self {
            kind,
            flags,
            stream: u32::from_be_bytes(stream),
            payload,
        }))
    }

    fn bytes(&self) -> Vec<u8> {
        let length = u32::try_from(self.payload.len()).unwrap_or_default();
        let mut bytes = Vec::with_capacity(9 + self.payload.len());
        bytes.extend_from_slice(&length.to_be_bytes()[1..]);
        bytes.extend_from_slice(&[self.kind, self.flags]);
        bytes.extend_from_slice(&self.stream.to_be_bytes());
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// The part of the header block in a HEADERS frame, without padding and priority.
    fn fragment(&self) -> io::Result<Vec<u8>> {
        let mut payload = self.payload.as_slice();
        if self.flags & PADDED != 0 {
            let (padding, rest) = payload
                .split_first()
                .ok_or_else(|| invalid("a frame lacks its padding"))?;
            let end = rest.len().checked_sub(usize::from(*padding));
            payload = end.and_then(|end| rest.get(..end)).unwrap_or_default();
        }
        if self.flags & PRIORITY != 0 {
            payload = payload.get(5..).unwrap_or_default();
        }
        Ok(payload.to_vec())
    }
}

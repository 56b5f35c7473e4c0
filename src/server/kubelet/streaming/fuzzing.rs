//! Fuzz targets of the streaming protocols: SPDY frames and headers, WebSocket frames and channels, query parameters.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use bytes::{Bytes, BytesMut};

use super::channels::{Encoding, Incoming, Messages};
use super::frames::{self, Data, Piece};
use super::parameters;
use super::spdy::{Decoder, Encoder, Frame, MAX_CONTROL, fuzzing as spdy_headers};

pub(crate) use spdy_headers::spdy_headers;

/// The highest channel that a connection uses: two for each of at most 32 ports.
const CHANNELS: u8 = 64;

/// Reads SPDY frames. The first byte says how many bytes arrive at a time.
///
/// Asserts that the frames do not depend on how the bytes arrive, that header blocks keep their limit, and that what
/// the encoder writes reads back.
pub(crate) fn spdy(data: &[u8]) {
    let Some((step, data)) = data.split_first() else {
        return;
    };
    let at_once = spdy_frames(data, data.len().max(1));
    assert_eq!(at_once, spdy_frames(data, usize::from(*step) + 1));

    let mut encoder = Encoder::new().unwrap();
    let mut written = BytesMut::new();
    let mut expected = Vec::new();
    for frame in &at_once.frames {
        if spdy_write(&mut encoder, frame, &mut written) {
            merge(&mut expected, frame.clone());
        }
    }
    let read = spdy_frames(&written, written.len().max(1));
    assert_eq!(read.frames, expected);
    assert_eq!((read.left, read.error), (0, None));
}

/// Frames of a connection up to its end or its first error.
#[derive(Debug, PartialEq)]
struct SpdyRead {
    /// Data frames that follow each other on one stream are joined.
    frames: Vec<Frame>,
    between_frames: bool,
    left: usize,
    error: Option<String>,
}

fn spdy_frames(data: &[u8], step: usize) -> SpdyRead {
    let mut decoder = Decoder::default();
    let mut input = BytesMut::new();
    let mut frames = Vec::new();
    let mut error = None;
    'connection: for chunk in data.chunks(step) {
        input.extend_from_slice(chunk);
        loop {
            match decoder.decode(&mut input) {
                Ok(Some(frame)) => {
                    if let Frame::SynStream { headers, .. }
                    | Frame::SynReply { headers, .. }
                    | Frame::Headers { headers, .. } = &frame
                    {
                        let size: usize = headers.iter().map(|(n, v)| 8 + n.len() + v.len()).sum();
                        assert!(size <= MAX_CONTROL, "{size}");
                    }
                    merge(&mut frames, frame);
                }
                Ok(None) => break,
                Err(failure) => {
                    error = Some(failure.to_string());
                    break 'connection;
                }
            }
        }
    }
    SpdyRead {
        frames,
        between_frames: decoder.between_frames(),
        // What stands behind an error depends on how much had arrived.
        left: if error.is_none() { input.len() } else { 0 },
        error,
    }
}

fn merge(frames: &mut Vec<Frame>, frame: Frame) {
    if let (
        Some(Frame::Data {
            stream,
            payload,
            fin,
        }),
        Frame::Data {
            stream: next,
            payload: more,
            fin: ends,
        },
    ) = (frames.last_mut(), &frame)
        && stream == next
    {
        *payload = [&payload[..], more].concat().into();
        *fin |= ends;
    } else {
        frames.push(frame);
    }
}

/// Returns whether the encoder writes frames of this kind.
fn spdy_write(encoder: &mut Encoder, frame: &Frame, out: &mut BytesMut) -> bool {
    match frame {
        Frame::SynStream {
            stream,
            fin,
            headers,
        } => encoder.syn_stream(*stream, headers, *fin, out).is_ok(),
        Frame::SynReply {
            stream,
            fin,
            headers,
        } => encoder.syn_reply(*stream, headers, *fin, out).is_ok(),
        Frame::Data {
            stream,
            payload,
            fin,
        } => {
            out.extend_from_slice(&Encoder::data_head(*stream, payload.len(), *fin));
            out.extend_from_slice(payload);
            true
        }
        Frame::Reset { stream, status } => {
            Encoder::reset(*stream, *status, out);
            true
        }
        Frame::Ping(id) => {
            Encoder::ping(*id, out);
            true
        }
        Frame::GoAway { last, status } => {
            Encoder::go_away(*last, *status, out);
            true
        }
        Frame::Headers { .. }
        | Frame::Settings
        | Frame::WindowUpdate { .. }
        | Frame::Unknown(_) => false,
    }
}

/// Reads the WebSocket frames of a client. The first byte says how many bytes arrive at a time, the first two bits of
/// the second one how messages are written.
///
/// Asserts that frames and messages do not depend on how the bytes arrive, and that a message keeps its limit.
pub(crate) fn websocket(data: &[u8]) {
    let [step, mode, data @ ..] = data else {
        return;
    };
    let at_once = websocket_pieces(data, data.len().max(1));
    let in_steps = websocket_pieces(data, usize::from(*step) + 1);
    assert_eq!(joined(&at_once.0), joined(&in_steps.0));
    assert_eq!(at_once.1, in_steps.1);
    let mut length = 0;
    for piece in &at_once.0 {
        if let Piece::Data(data) = piece {
            length = data.bytes.len() + if data.first { 0 } else { length };
            assert!(length as u64 <= frames::MAX_MESSAGE);
        }
    }
    // The messages are read on: nothing that a client sends may panic there.
    let encoding = if mode & 1 == 0 {
        Encoding::Binary
    } else {
        Encoding::Base64
    };
    let mut messages = Messages::new(encoding, mode & 2 != 0);
    for piece in in_steps.0 {
        if let Piece::Data(data) = piece {
            messages.take(data);
        }
    }
}

fn websocket_pieces(data: &[u8], step: usize) -> (Vec<Piece>, Option<String>) {
    let mut decoder = frames::Decoder::default();
    let mut buffer = BytesMut::new();
    let mut pieces = Vec::new();
    for chunk in data.chunks(step) {
        buffer.extend_from_slice(chunk);
        loop {
            match decoder.decode(&mut buffer) {
                Ok(Some(Piece::Close)) => {
                    pieces.push(Piece::Close);
                    return (pieces, None);
                }
                Ok(Some(piece)) => pieces.push(piece),
                Ok(None) => break,
                Err(error) => return (pieces, Some(error.to_string())),
            }
        }
    }
    (pieces, None)
}

/// Joins the parts of a message that nothing stands between.
fn joined(pieces: &[Piece]) -> Vec<Piece> {
    let mut all: Vec<Piece> = Vec::new();
    for piece in pieces {
        if let (Some(Piece::Data(data)), Piece::Data(more)) = (all.last_mut(), piece)
            && !data.last
        {
            assert_eq!((more.first, more.text), (false, data.text));
            data.bytes = [&data.bytes[..], &more.bytes].concat().into();
            data.last = more.last;
        } else {
            all.push(piece.clone());
        }
    }
    all
}

/// Reads one message of the channel protocols. The first byte says how it is written, the second where it is cut.
///
/// Asserts that what the message means does not depend on the cut, and that what is written reads back.
pub(crate) fn websocket_channels(data: &[u8]) {
    let [mode, cut, message @ ..] = data else {
        return;
    };
    let encoding = if mode & 1 == 0 {
        Encoding::Binary
    } else {
        Encoding::Base64
    };
    let half_close = mode & 2 != 0;
    let piece = |bytes: &[u8], first, last| Data {
        bytes: Bytes::copy_from_slice(bytes),
        first,
        last,
        text: encoding == Encoding::Base64,
    };
    let at_once = Messages::new(encoding, half_close).take(piece(message, true, true));
    assert_ne!(at_once, Incoming::Broken);

    let size = usize::from(*cut) + 1;
    let mut messages = Messages::new(encoding, half_close);
    let mut in_pieces = Incoming::Nothing;
    let count = message.len().div_ceil(size);
    for (index, bytes) in message.chunks(size).enumerate() {
        let (first, last) = (index == 0, index + 1 == count);
        in_pieces = match (in_pieces, messages.take(piece(bytes, first, last))) {
            (Incoming::Broken, _) | (_, Incoming::Broken) => Incoming::Broken,
            (Incoming::Data(channel, data), Incoming::Data(also, more)) => {
                assert_eq!(channel, also);
                Incoming::Data(channel, [&data[..], &more].concat().into())
            }
            (so_far, Incoming::Nothing) => so_far,
            (_, next) => next,
        };
    }
    // A message in base64 that goes wrong late has had its beginning carried.
    match (&at_once, &in_pieces) {
        (Incoming::Nothing, Incoming::Data(..) | Incoming::Broken) => {
            assert_eq!(encoding, Encoding::Base64);
        }
        _ => assert_eq!(at_once, in_pieces),
    }

    if let Some((channel, data)) = message.split_first()
        && !data.is_empty()
    {
        let channel = channel % CHANNELS;
        let frame = encoding.encode(channel, data);
        let read = Messages::new(encoding, half_close).take(piece(frame.payload(), true, true));
        assert_eq!(read, Incoming::Data(channel, Bytes::copy_from_slice(data)));
    }
}

/// Reads the query of a streaming request.
///
/// Asserts that no port is 0 and that the channels of all ports have numbers.
pub(crate) fn stream_parameters(data: &[u8]) {
    let Ok(query) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(streams) = parameters::streams(query) {
        assert!(streams.stdin || streams.stdout || streams.stderr);
        assert!(!(streams.tty && streams.stderr));
    }
    if let Ok(ports) = parameters::ports(query) {
        assert!(!ports.is_empty() && !ports.contains(&0));
        assert!(ports.len() * 2 <= usize::from(CHANNELS));
    }
}

//! The WebSocket frames that a client sends, and those that it is sent.
//!
//! A client may send 32 MiB in one message. They come out in pieces as they come in, so that nothing gathers here and
//! who takes the pieces stops the client.
//!
//! **Invariant:** a reader holds at most [`CHUNK`] bytes of data, and a control frame.

use std::io::{self, Cursor};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Control, Data as DataKind, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{Frame, FrameHeader};

/// Bytes taken off the connection at a time, and so the longest piece.
const CHUNK: usize = 32 * 1024;
/// The longest message a client may send.
pub(super) const MAX_MESSAGE: u64 = 32 << 20;
/// The longest control frame.
const MAX_CONTROL: u64 = 125;

/// Error of a client's connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    /// The connection broke.
    #[error("read or write a WebSocket connection: {0}")]
    Io(#[from] io::Error),
    /// A message, or what there is of it, is longer than [`MAX_MESSAGE`].
    #[error("a message is longer than {} bytes", MAX_MESSAGE)]
    TooBig,
    /// The client breaks the rules of RFC 6455.
    #[error("not WebSocket: {0}")]
    Protocol(&'static str),
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Data {
    pub(super) bytes: Bytes,
    /// The message begins with it.
    pub(super) first: bool,
    /// The message ends with it.
    pub(super) last: bool,
    /// The message is text. Nobody has looked whether it is UTF-8.
    pub(super) text: bool,
}

/// Piece of the client's input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Data.
    Data(Data),
    /// A ping, to be answered with this.
    Ping(Bytes),
    /// The client ends the connection.
    Close,
}

/// The half that reads.
pub(super) struct Reader<R> {
    io: R,
    buffer: BytesMut,
    decoder: Decoder,
    /// The client has ended the connection.
    closed: bool,
    /// Set after an error: further input is ignored.
    broken: bool,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Over the bytes that follow the upgrade.
    pub(super) fn new(io: R) -> Self {
        Self {
            io,
            buffer: BytesMut::new(),
            decoder: Decoder::default(),
            closed: false,
            broken: false,
        }
    }

    /// Returns the next piece; `None` once the client has ended the connection. Cancel-safe.
    ///
    /// # Errors
    /// When the connection breaks, or the client breaks the rules.
    pub(super) async fn next(&mut self) -> Result<Option<Piece>, FrameError> {
        while !self.closed {
            match self.decoder.decode(&mut self.buffer) {
                Ok(Some(piece)) => {
                    self.closed = piece == Piece::Close;
                    return Ok(Some(piece));
                }
                Ok(None) => self.closed = self.fill().await? == 0,
                Err(error) => {
                    self.broken = true;
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// Reads until the client has ended the connection, whatever it still sends. Cancel-safe.
    pub(super) async fn drain(&mut self) {
        while !self.broken {
            match self.next().await {
                Ok(None | Some(Piece::Close)) | Err(FrameError::Io(_)) => return,
                Ok(Some(_)) | Err(_) => {}
            }
        }
        loop {
            self.buffer.clear();
            if !matches!(self.fill().await, Ok(1..)) {
                return;
            }
        }
    }

    /// Cancel-safe: what was read is in the buffer.
    async fn fill(&mut self) -> io::Result<usize> {
        self.buffer.reserve(CHUNK);
        let mut limited = (&mut self.io).take(CHUNK as u64);
        limited.read_buf(&mut self.buffer).await
    }
}

/// Takes frames apart.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    frame: Option<OpenFrame>,
    message: Option<OpenMessage>,
}

/// A frame of which something is still to come.
#[derive(Clone, Copy, Debug)]
struct OpenFrame {
    opcode: OpCode,
    /// The message ends with it.
    last: bool,
    /// Begins with the byte for the next one.
    mask: [u8; 4],
    left: u64,
}

/// A message of which something is still to come.
#[derive(Clone, Copy, Debug)]
struct OpenMessage {
    text: bool,
    /// Bytes of all its frames so far.
    length: u64,
    /// Some of it came out.
    begun: bool,
}

impl Decoder {
    /// Takes the next piece out of `buffer`; `None` when more has to be read for it.
    pub(super) fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<Piece>, FrameError> {
        loop {
            let frame = match self.frame.take() {
                Some(frame) => frame,
                None => match self.head(buffer)? {
                    Some(frame) => frame,
                    None => return Ok(None),
                },
            };
            let there = usize::try_from(frame.left).unwrap_or(usize::MAX);
            let there = there.min(buffer.len());
            let is_complete = there as u64 == frame.left;
            if !is_complete && (there == 0 || matches!(frame.opcode, OpCode::Control(_))) {
                self.frame = Some(frame);
                return Ok(None);
            }
            let mut bytes = buffer.split_to(there);
            unmask(&mut bytes, frame.mask);
            let bytes = bytes.freeze();
            let piece = match frame.opcode {
                OpCode::Control(Control::Ping) => Some(Piece::Ping(bytes)),
                OpCode::Control(Control::Close) => Some(Piece::Close),
                OpCode::Control(_) => None,
                OpCode::Data(_) => self.data(frame, bytes).map(Piece::Data),
            };
            if piece.is_some() {
                return Ok(piece);
            }
        }
    }

    /// Takes the head of the next frame; `None` when it is not there as a whole.
    fn head(&mut self, buffer: &mut BytesMut) -> Result<Option<OpenFrame>, FrameError> {
        let broken = |rule| Err(FrameError::Protocol(rule));
        let mut cursor = Cursor::new(buffer.as_ref());
        let Ok(parsed) = FrameHeader::parse(&mut cursor) else {
            return broken("an unknown kind of frame");
        };
        let Some((head, length)) = parsed else {
            return Ok(None);
        };
        let consumed = usize::try_from(cursor.position()).unwrap_or(usize::MAX);
        buffer.advance(consumed.min(buffer.len()));
        let Some(mask) = head.mask else {
            return broken("a client's frame is not masked");
        };
        if head.rsv1 || head.rsv2 || head.rsv3 {
            return broken("an extension that was not agreed upon");
        }
        let message = match (head.opcode, self.message) {
            (OpCode::Control(_), _) if length > MAX_CONTROL || !head.is_final => {
                return broken("a control frame that is too long or not whole");
            }
            (OpCode::Control(_), message) => message,
            (OpCode::Data(DataKind::Continue), None) => return broken("goes on with no message"),
            (OpCode::Data(DataKind::Continue), Some(message)) => Some(OpenMessage {
                length: message.length.saturating_add(length),
                ..message
            }),
            (OpCode::Data(_), Some(_)) => return broken("a message begins within another"),
            (OpCode::Data(kind), None) => Some(OpenMessage {
                text: kind == DataKind::Text,
                length,
                begun: false,
            }),
        };
        if message.is_some_and(|message| message.length > MAX_MESSAGE) {
            return Err(FrameError::TooBig);
        }
        self.message = message;
        Ok(Some(OpenFrame {
            opcode: head.opcode,
            last: head.is_final,
            mask,
            left: length,
        }))
    }

    /// Makes a piece of these bytes of `frame`; `None` when they say nothing.
    fn data(&mut self, mut frame: OpenFrame, bytes: Bytes) -> Option<Data> {
        let mut message = self.message.take()?;
        frame.left -= bytes.len() as u64;
        frame.mask.rotate_left(bytes.len() % 4);
        let last = frame.last && frame.left == 0;
        let piece = Data {
            first: !message.begun,
            last,
            text: message.text,
            bytes,
        };
        let says_something = last || !piece.bytes.is_empty();
        message.begun |= says_something;
        self.message = (!last).then_some(message);
        self.frame = (frame.left > 0).then_some(frame);
        says_something.then_some(piece)
    }
}

fn unmask(bytes: &mut [u8], mask: [u8; 4]) {
    for four in bytes.chunks_mut(4) {
        for (byte, key) in four.iter_mut().zip(mask) {
            *byte ^= key;
        }
    }
}

/// The half that writes.
pub(super) struct Writer<W> {
    io: W,
    /// Bytes that the connection has not accepted yet.
    buffer: BytesMut,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    /// Over the connection after its upgrade.
    pub(super) fn new(io: W) -> Self {
        Self {
            io,
            buffer: BytesMut::new(),
        }
    }

    /// Sends a frame; waits until the connection has taken it. When the future is dropped, the rest of the frame goes
    /// out before the next one.
    ///
    /// # Errors
    /// When the connection breaks.
    pub(super) async fn send(&mut self, frame: Frame) -> Result<(), FrameError> {
        let formatted = frame.format(&mut (&mut self.buffer).writer());
        formatted.map_err(io::Error::other)?;
        self.io.write_all_buf(&mut self.buffer).await?;
        Ok(self.io.flush().await?)
    }

    /// Ends this side of the connection.
    ///
    /// # Errors
    /// When the connection breaks.
    pub(super) async fn shutdown(&mut self) -> io::Result<()> {
        self.io.shutdown().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: [u8; 4] = [1, 2, 3, 4];

    /// A frame of a client's: the first byte of its head, and what it carries.
    fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![first];
        match u8::try_from(payload.len()) {
            Ok(length @ ..126) => bytes.push(0x80 | length),
            _ => {
                bytes.push(0x80 | 127);
                bytes.extend((payload.len() as u64).to_be_bytes());
            }
        }
        bytes.extend(MASK);
        let begin = bytes.len();
        bytes.extend(payload);
        unmask(&mut bytes[begin..], MASK);
        bytes
    }

    fn data(bytes: &'static [u8], first: bool, last: bool) -> Piece {
        Piece::Data(Data {
            bytes: bytes.into(),
            first,
            last,
            text: false,
        })
    }

    fn decoded(bytes: &[u8]) -> Result<Vec<Piece>, FrameError> {
        let mut buffer = BytesMut::from(bytes);
        let mut decoder = Decoder::default();
        let mut pieces = Vec::new();
        while let Some(piece) = decoder.decode(&mut buffer)? {
            pieces.push(piece);
        }
        Ok(pieces)
    }

    #[test]
    fn fragments_are_parts_of_one_message_and_control_frames_come_between() {
        let all = [
            frame(0x02, b""),
            frame(0x00, b"ab"),
            frame(0x89, b"ping"),
            frame(0x8a, b"pong"),
            frame(0x00, b""),
            frame(0x80, b"c"),
            frame(0x81, b""),
            frame(0x88, b""),
        ];
        let empty = Piece::Data(Data {
            bytes: Bytes::new(),
            first: true,
            last: true,
            text: true,
        });
        assert_eq!(
            decoded(&all.concat()).unwrap(),
            [
                data(b"ab", true, false),
                Piece::Ping("ping".into()),
                data(b"c", false, true),
                empty,
                Piece::Close,
            ]
        );
    }

    #[tokio::test]
    async fn a_message_is_the_same_however_it_is_cut() {
        let payload: Vec<u8> = (0..=255).cycle().take(3 * CHUNK).collect();
        let sent = [
            frame(0x02, &payload),
            frame(0x89, b"x"),
            frame(0x80, &payload),
        ]
        .concat();
        for at_once in [1, 7, 1000, CHUNK, sent.len()] {
            let (read, mut write) = tokio::io::duplex(at_once);
            let bytes = sent.clone();
            tokio::spawn(async move { write.write_all(&bytes).await });
            let mut reader = Reader::new(read);
            let (mut taken, mut pings, mut lasts) = (Vec::new(), 0, 0);
            while let Some(piece) = reader.next().await.unwrap() {
                match piece {
                    Piece::Data(data) => {
                        assert_eq!(data.first, taken.is_empty());
                        assert!(data.bytes.len() <= CHUNK, "{}", data.bytes.len());
                        taken.extend(data.bytes);
                        lasts += usize::from(data.last);
                    }
                    Piece::Ping(_) => pings += 1,
                    Piece::Close => panic!("not closed"),
                }
            }
            assert!(taken == [&payload[..], &payload[..]].concat(), "{at_once}");
            assert_eq!((pings, lasts), (1, 1));
        }
    }

    #[test]
    fn what_breaks_the_rules_is_refused() {
        let long = vec![0; 126];
        for (bytes, rule) in [
            (vec![0x82, 1, b'x'], "not masked"),
            (frame(0xc2, b"x"), "extension"),
            (frame(0x83, b"x"), "unknown kind"),
            (frame(0x8b, b"x"), "unknown kind"),
            (frame(0x80, b"x"), "goes on with no message"),
            (
                [frame(0x02, b"x"), frame(0x82, b"y")].concat(),
                "within another",
            ),
            (frame(0x09, b"x"), "control frame"),
            (frame(0x89, &long), "control frame"),
        ] {
            let error = decoded(&bytes).unwrap_err().to_string();
            assert!(error.contains(rule), "{error}");
        }
    }

    #[test]
    fn a_length_that_is_too_long_is_refused_before_its_data() {
        let announcing = |first: u8, length: u64| {
            let mut bytes = vec![first, 0xff];
            bytes.extend(length.to_be_bytes());
            bytes.extend(MASK);
            bytes
        };
        for length in [MAX_MESSAGE + 1, u64::MAX] {
            let refused = decoded(&announcing(0x82, length));
            assert!(matches!(refused, Err(FrameError::TooBig)));
        }
        assert!(decoded(&announcing(0x82, MAX_MESSAGE)).unwrap().is_empty());
        let grows = [frame(0x02, b"x"), announcing(0x80, MAX_MESSAGE)].concat();
        assert!(matches!(decoded(&grows), Err(FrameError::TooBig)));
    }

    #[tokio::test]
    async fn a_frame_whose_sending_was_given_up_is_sent_to_its_end() {
        let (client, server) = tokio::io::duplex(4);
        let mut writer = Writer::new(server);
        let frame = |text: &'static str| Frame::message(text, OpCode::Data(DataKind::Text), true);
        let mut given_up = Box::pin(writer.send(frame("hello")));
        assert!(futures::poll!(given_up.as_mut()).is_pending());
        drop(given_up);
        let reading = tokio::spawn(async move {
            let (mut client, mut all) = (client, Vec::new());
            client.read_to_end(&mut all).await.map(|_| all)
        });
        writer.send(frame("you")).await.unwrap();
        drop(writer);
        let all = reading.await.unwrap().unwrap();
        assert_eq!(all, b"\x81\x05hello\x81\x03you");
    }
}

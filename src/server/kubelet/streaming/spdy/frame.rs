//! Frames: 8 bytes of head, then the payload. The first bit distinguishes control frames from data.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::SpdyError;
use super::header::{Deflater, Headers, Inflater};

/// Number of a stream: odd when the client opened it.
pub type StreamId = u32;

/// The longest control frame that is read.
pub const MAX_CONTROL: usize = 64 * 1024;
/// The longest data frame that is written: 24 bits of length.
pub const MAX_DATA: usize = (1 << 24) - 1;

pub(super) const HEAD: usize = 8;
const VERSION: u16 = 3;
pub(super) const CONTROL: u8 = 0x80;
const FIN: u8 = 0x01;
pub(super) const STREAM_MASK: u32 = 0x7fff_ffff;

pub(super) const SYN_STREAM: u16 = 1;
pub(super) const SYN_REPLY: u16 = 2;
pub(super) const RST_STREAM: u16 = 3;
const SETTINGS: u16 = 4;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const WINDOW_UPDATE: u16 = 9;

/// Frame of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A stream is opened; `fin`: the opener sends no data.
    SynStream {
        /// The stream.
        stream: StreamId,
        /// Half-closed from the start.
        fin: bool,
        /// Headers that state its purpose.
        headers: Headers,
    },
    /// The stream is accepted.
    SynReply {
        /// The stream.
        stream: StreamId,
        /// Half-closed from the start.
        fin: bool,
        /// The answer.
        headers: Headers,
    },
    /// More headers.
    Headers {
        /// The stream.
        stream: StreamId,
        /// The last frame of this side.
        fin: bool,
        /// The headers.
        headers: Headers,
    },
    /// A piece of data, not necessarily a whole frame of the peer's.
    Data {
        /// The stream.
        stream: StreamId,
        /// The bytes; may be empty.
        payload: Bytes,
        /// The last frame of this side.
        fin: bool,
    },
    /// The stream is given up, both ways.
    Reset {
        /// The stream.
        stream: StreamId,
        /// Why, by the protocol's numbers; 5 = cancel.
        status: u32,
    },
    /// To be sent back as it is.
    Ping(u32),
    /// No streams are accepted any more.
    GoAway {
        /// The last one that was.
        last: StreamId,
        /// 0 = all is well.
        status: u32,
    },
    /// Window sizes and the like, which nobody here goes by.
    Settings,
    /// More room for data of a stream, which nobody here goes by.
    WindowUpdate {
        /// The stream.
        stream: StreamId,
        /// Bytes.
        delta: u32,
    },
    /// A control frame of a type that is not known; skipped.
    Unknown(u16),
}

/// The data frame that is arriving.
#[derive(Clone, Copy, Debug)]
struct Arriving {
    stream: StreamId,
    left: usize,
    fin: bool,
}

/// Makes frames of bytes.
#[derive(Debug)]
pub struct Decoder {
    inflater: Inflater,
    arriving: Option<Arriving>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            inflater: Inflater::new(),
            arriving: None,
        }
    }
}

impl Decoder {
    /// Takes one frame, or a piece of a data frame, off the front of `input`; `None` when there is not enough.
    ///
    /// # Errors
    /// For what no peer that is well sends. The connection is of no use then.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, SpdyError> {
        if let Some(arriving) = self.arriving {
            return Ok(self.piece(arriving, input));
        }
        let Some(head) = input.first_chunk::<HEAD>().copied() else {
            return Ok(None);
        };
        let [a, b, c, d, flags, e, f, g] = head;
        let length = usize::from(e) << 16 | usize::from(f) << 8 | usize::from(g);
        let fin = flags & FIN != 0;
        if a & CONTROL == 0 {
            input.advance(HEAD);
            let arriving = Arriving {
                stream: u32::from_be_bytes([a, b, c, d]),
                left: length,
                fin,
            };
            if length == 0 {
                return Ok(Some(arriving.whole(Bytes::new())));
            }
            self.arriving = Some(arriving);
            return Ok(self.piece(arriving, input));
        }
        let version = u16::from_be_bytes([a & !CONTROL, b]);
        let kind = u16::from_be_bytes([c, d]);
        if version != VERSION {
            return Err(SpdyError::Version(version));
        }
        if length > MAX_CONTROL {
            return Err(SpdyError::Length { kind, length });
        }
        if input.len() < HEAD + length {
            return Ok(None);
        }
        input.advance(HEAD);
        let body = input.split_to(length).freeze();
        self.control(kind, fin, body).map(Some)
    }

    /// Returns whether the input ends between two frames, so that the connection may end here.
    pub fn between_frames(&self) -> bool {
        self.arriving.is_none()
    }

    fn piece(&mut self, arriving: Arriving, input: &mut BytesMut) -> Option<Frame> {
        if input.is_empty() {
            return None;
        }
        let payload = input.split_to(arriving.left.min(input.len())).freeze();
        let left = arriving.left - payload.len();
        self.arriving = (left > 0).then_some(Arriving { left, ..arriving });
        Some(Frame::Data {
            stream: arriving.stream,
            payload,
            fin: arriving.fin && left == 0,
        })
    }

    fn control(&mut self, kind: u16, fin: bool, mut body: Bytes) -> Result<Frame, SpdyError> {
        let length = body.len();
        let least = match kind {
            SYN_STREAM => 10,
            SYN_REPLY | HEADERS | PING => 4,
            RST_STREAM | GOAWAY | WINDOW_UPDATE => 8,
            _ => 0,
        };
        let fixed = matches!(kind, PING | RST_STREAM | GOAWAY | WINDOW_UPDATE);
        if length < least || (fixed && length != least) {
            return Err(SpdyError::Length { kind, length });
        }
        Ok(match kind {
            SYN_STREAM => {
                let stream = body.get_u32() & STREAM_MASK;
                // The associated stream, the priority and the credential slot.
                body.advance(6);
                Frame::SynStream {
                    stream,
                    fin,
                    headers: self.inflater.block(&body)?,
                }
            }
            SYN_REPLY => Frame::SynReply {
                stream: body.get_u32() & STREAM_MASK,
                fin,
                headers: self.inflater.block(&body)?,
            },
            HEADERS => Frame::Headers {
                stream: body.get_u32() & STREAM_MASK,
                fin,
                headers: self.inflater.block(&body)?,
            },
            RST_STREAM => Frame::Reset {
                stream: body.get_u32() & STREAM_MASK,
                status: body.get_u32(),
            },
            PING => Frame::Ping(body.get_u32()),
            GOAWAY => Frame::GoAway {
                last: body.get_u32() & STREAM_MASK,
                status: body.get_u32(),
            },
            WINDOW_UPDATE => Frame::WindowUpdate {
                stream: body.get_u32() & STREAM_MASK,
                delta: body.get_u32() & STREAM_MASK,
            },
            SETTINGS => Frame::Settings,
            kind => Frame::Unknown(kind),
        })
    }
}

impl Arriving {
    fn whole(self, payload: Bytes) -> Frame {
        Frame::Data {
            stream: self.stream,
            payload,
            fin: self.fin,
        }
    }
}

/// Makes bytes of frames.
#[derive(Debug)]
pub struct Encoder {
    /// `None` once no more headers are to come. It takes some 300 KiB, whatever it has to compress.
    deflater: Option<Deflater>,
}

impl Encoder {
    /// For one direction of one connection.
    ///
    /// # Errors
    /// When the compressor does not take the dictionary.
    pub fn new() -> Result<Self, SpdyError> {
        Ok(Self {
            deflater: Some(Deflater::new()?),
        })
    }

    /// Frees what only headers need. A frame with headers is an error from now on.
    pub fn end_headers(&mut self) {
        self.deflater = None;
    }

    /// Opens a stream. Names of headers must be lowercase.
    ///
    /// # Errors
    /// When the headers are too long.
    pub fn syn_stream<N: AsRef<str>, V: AsRef<str>>(
        &mut self,
        stream: StreamId,
        headers: &[(N, V)],
        fin: bool,
        out: &mut BytesMut,
    ) -> Result<(), SpdyError> {
        self.with_headers(SYN_STREAM, stream, &[0; 6], headers, fin, out)
    }

    /// Accepts a stream.
    ///
    /// # Errors
    /// When the headers are too long.
    pub fn syn_reply<N: AsRef<str>, V: AsRef<str>>(
        &mut self,
        stream: StreamId,
        headers: &[(N, V)],
        fin: bool,
        out: &mut BytesMut,
    ) -> Result<(), SpdyError> {
        self.with_headers(SYN_REPLY, stream, &[], headers, fin, out)
    }

    fn with_headers<N: AsRef<str>, V: AsRef<str>>(
        &mut self,
        kind: u16,
        stream: StreamId,
        fixed: &[u8],
        headers: &[(N, V)],
        fin: bool,
        out: &mut BytesMut,
    ) -> Result<(), SpdyError> {
        let mut block = BytesMut::new();
        let deflater = self.deflater.as_mut();
        let deflater = deflater.ok_or(SpdyError::Headers("no more were to come"))?;
        deflater.block(headers, &mut block)?;
        let length = 4 + fixed.len() + block.len();
        if length > MAX_CONTROL {
            return Err(SpdyError::Length { kind, length });
        }
        control_head(kind, if fin { FIN } else { 0 }, length, out);
        out.put_u32(stream & STREAM_MASK);
        out.put_slice(fixed);
        out.put_slice(&block);
        Ok(())
    }

    /// The head of a data frame; `length` bytes must follow. More than [`MAX_DATA`] are cut off the length.
    pub fn data_head(stream: StreamId, length: usize, fin: bool) -> [u8; HEAD] {
        let [a, b, c, d] = (stream & STREAM_MASK).to_be_bytes();
        let [.., e, f, g] = length.min(MAX_DATA).to_be_bytes();
        [a, b, c, d, if fin { FIN } else { 0 }, e, f, g]
    }

    /// Gives a stream up.
    pub fn reset(stream: StreamId, status: u32, out: &mut BytesMut) {
        control_head(RST_STREAM, 0, 8, out);
        out.put_u32(stream & STREAM_MASK);
        out.put_u32(status);
    }

    /// A ping, or the answer to one.
    pub fn ping(id: u32, out: &mut BytesMut) {
        control_head(PING, 0, 4, out);
        out.put_u32(id);
    }

    /// No more streams are accepted.
    pub fn go_away(last: StreamId, status: u32, out: &mut BytesMut) {
        control_head(GOAWAY, 0, 8, out);
        out.put_u32(last & STREAM_MASK);
        out.put_u32(status);
    }
}

fn control_head(kind: u16, flags: u8, length: usize, out: &mut BytesMut) {
    out.put_u16(VERSION | u16::from(CONTROL) << 8);
    out.put_u16(kind);
    out.put_u8(flags);
    let [.., e, f, g] = length.to_be_bytes();
    out.put_slice(&[e, f, g]);
}

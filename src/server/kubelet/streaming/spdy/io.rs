//! Frames over a byte stream.

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{Decoder, Encoder, Frame, SpdyError, StreamId};

/// Bytes taken off the connection at a time, and the longest data frame written.
const CHUNK: usize = 32 * 1024;

/// The half that reads.
#[derive(Debug)]
pub struct Reader<R> {
    io: R,
    buffer: BytesMut,
    decoder: Decoder,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Over the bytes that follow the upgrade.
    pub fn new(io: R) -> Self {
        Self {
            io,
            buffer: BytesMut::new(),
            decoder: Decoder::default(),
        }
    }

    /// The next frame or piece of data; `None` at the end of the connection. Cancel-safe.
    ///
    /// # Errors
    /// When the connection breaks, or the peer speaks something else.
    pub async fn next(&mut self) -> Result<Option<Frame>, SpdyError> {
        loop {
            if let Some(frame) = self.decoder.decode(&mut self.buffer)? {
                return Ok(Some(frame));
            }
            self.buffer.reserve(CHUNK);
            // Cancel-safe: what was read is in the buffer.
            if self.io.read_buf(&mut self.buffer).await? == 0 {
                return match self.buffer.is_empty() && self.decoder.between_frames() {
                    true => Ok(None),
                    false => Err(SpdyError::Truncated),
                };
            }
        }
    }
}

/// The half that writes. No method is cancel-safe: a frame that is half written ends the connection.
#[derive(Debug)]
pub struct Writer<W> {
    io: W,
    encoder: Encoder,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    /// Over the bytes that follow the upgrade.
    ///
    /// # Errors
    /// See [`Encoder::new`].
    pub fn new(io: W) -> Result<Self, SpdyError> {
        Ok(Self {
            io,
            encoder: Encoder::new()?,
        })
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn open<N: AsRef<str>, V: AsRef<str>>(
        &mut self,
        stream: StreamId,
        headers: &[(N, V)],
    ) -> Result<(), SpdyError> {
        let mut out = BytesMut::new();
        self.encoder.syn_stream(stream, headers, false, &mut out)?;
        self.send(&out).await
    }

    /// Accepts a stream.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn accept(&mut self, stream: StreamId) -> Result<(), SpdyError> {
        let mut out = BytesMut::new();
        let none: [(&str, &str); 0] = [];
        self.encoder.syn_reply(stream, &none, false, &mut out)?;
        self.send(&out).await
    }

    /// Says that no more streams are opened or accepted: what compresses their headers is freed.
    pub fn end_headers(&mut self) {
        self.encoder.end_headers();
    }

    /// Sends data; waits until the connection has taken all of it.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn data(&mut self, stream: StreamId, payload: &[u8]) -> Result<(), SpdyError> {
        for chunk in payload.chunks(CHUNK) {
            let head = Encoder::data_head(stream, chunk.len(), false);
            let mut frame = Buf::chain(head.as_slice(), chunk);
            self.io.write_all_buf(&mut frame).await?;
        }
        Ok(self.io.flush().await?)
    }

    /// Ends this side of a stream.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn finish(&mut self, stream: StreamId) -> Result<(), SpdyError> {
        self.send(&Encoder::data_head(stream, 0, true)).await
    }

    /// Gives a stream up.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn reset(&mut self, stream: StreamId, status: u32) -> Result<(), SpdyError> {
        let mut out = BytesMut::new();
        Encoder::reset(stream, status, &mut out);
        self.send(&out).await
    }

    /// A ping, or the answer to one.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn ping(&mut self, id: u32) -> Result<(), SpdyError> {
        let mut out = BytesMut::new();
        Encoder::ping(id, &mut out);
        self.send(&out).await
    }

    /// Says that no more streams are wanted, and ends this side of the connection.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn shutdown(&mut self) -> Result<(), SpdyError> {
        let mut out = BytesMut::new();
        Encoder::go_away(0, 0, &mut out);
        self.send(&out).await?;
        Ok(self.io.shutdown().await?)
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), SpdyError> {
        self.io.write_all(bytes).await?;
        Ok(self.io.flush().await?)
    }
}

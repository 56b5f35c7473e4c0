//! The connection to the runtime's streaming server.
//!
//! A client may leave at any time, but the connection behind it is not closed before the runtime has answered every stream
//! that was opened over it. containerd (1.6 to 2.1) takes a stream that it could not answer for one that it still has to
//! answer: what it writes to the stream waits for ever. When the stream is one of `attach`, so does the container's output,
//! and then its end, which StopContainer waits for.
//!
//! In: the bytes of both directions, of which the heads of the frames are read. Out: the same bytes.

use std::collections::HashSet;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

use super::spdy::{Opening, Openings, StreamId};

/// More streams without an answer than this are not waited for: no client opens that many at once, and memory is bounded.
const MOST: usize = 1024;
/// Taken off the connection at a time while answers are waited for.
const SCRAP: usize = 4096;

/// A connection that knows which of its streams the runtime has not answered.
#[derive(Debug)]
pub(super) struct RuntimeIo<T> {
    io: T,
    sent: Openings,
    received: Openings,
    unanswered: HashSet<StreamId>,
    /// This side is to be closed when every stream is answered.
    shutdown_due: bool,
}

impl<T> RuntimeIo<T> {
    /// Over a connection after its upgrade.
    pub(super) fn new(io: T) -> Self {
        Self {
            io,
            sent: Openings::default(),
            received: Openings::default(),
            unanswered: HashSet::new(),
            shutdown_due: false,
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> RuntimeIo<T> {
    /// Discards what the runtime sends until it has answered every stream, then closes the connection.
    pub(super) async fn close(mut self) {
        let mut scrap = vec![0; SCRAP];
        while !self.unanswered.is_empty() {
            match self.read(&mut scrap).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for RuntimeIo<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buffer))?;
        let bytes = buffer.filled().get(before..).unwrap_or_default();
        let unanswered = &mut this.unanswered;
        this.received.take(bytes, |opening| match opening {
            Opening::Answered(stream) => drop(unanswered.remove(&stream)),
            Opening::Asked(_) => {}
        });
        if bytes.is_empty() {
            // No answer comes any more.
            this.unanswered.clear();
        }
        if this.shutdown_due && this.unanswered.is_empty() {
            this.shutdown_due = Pin::new(&mut this.io).poll_shutdown(cx)?.is_pending();
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for RuntimeIo<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, bytes))?;
        let unanswered = &mut this.unanswered;
        let bytes = bytes.get(..written).unwrap_or_default();
        this.sent.take(bytes, |opening| match opening {
            Opening::Asked(stream) if unanswered.len() < MOST => {
                unanswered.insert(stream);
            }
            Opening::Asked(_) | Opening::Answered(_) => {}
        });
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    /// Closes this side, at once or when the last answer is read.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.unanswered.is_empty() {
            return Pin::new(&mut this.io).poll_shutdown(cx);
        }
        this.shutdown_due = true;
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

    use super::super::spdy::{Encoder, Reader, Writer};
    use super::*;

    const NONE: [(&str, &str); 0] = [];

    fn pair() -> (RuntimeIo<DuplexStream>, DuplexStream) {
        let (near, far) = duplex(1024);
        (RuntimeIo::new(near), far)
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_closed_when_every_stream_is_answered() {
        let (mut io, mut far) = pair();
        let mut writer = Writer::new(&mut io).unwrap();
        writer.open(1, &[("streamtype", "error")]).await.unwrap();
        writer.open(3, &[("streamtype", "stdout")]).await.unwrap();
        io.shutdown().await.unwrap();
        let mut closing = tokio::spawn(io.close());
        let second = Duration::from_secs(1);
        let mut reader = Reader::new(&mut far);
        for _ in 0..2 {
            assert!(reader.next().await.unwrap().is_some());
        }
        let end = tokio::time::timeout(second, reader.next()).await;
        assert!(end.is_err(), "neither half is closed: {end:?}");
        let mut answers = Writer::new(&mut far).unwrap();
        answers.accept(3).await.unwrap();
        // What a container writes meanwhile does not hold the rest up.
        answers.data(3, &[b'y'; 100_000]).await.unwrap();
        let waits = tokio::time::timeout(second, &mut closing).await;
        assert!(waits.is_err());
        // A stream that is given up is answered as well.
        answers.reset(1, 3).await.unwrap();
        closing.await.unwrap();
        assert_eq!(far.read(&mut [0; 8]).await.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_frame_opens_no_stream() {
        let (mut io, far) = pair();
        let mut frame = bytes::BytesMut::new();
        let mut encoder = Encoder::new().unwrap();
        encoder.syn_stream(1, &NONE, false, &mut frame).unwrap();
        io.write_all(&frame[..frame.len() - 1]).await.unwrap();
        assert!(io.unanswered.is_empty());
        io.write_all(&frame[frame.len() - 1..]).await.unwrap();
        assert_eq!(io.unanswered, HashSet::from([1]));
        drop(far);
        io.close().await;
    }

    #[tokio::test(start_paused = true)]
    async fn one_side_may_end_when_all_are_answered() {
        let (mut io, mut far) = pair();
        Writer::new(&mut io).unwrap().open(1, &NONE).await.unwrap();
        io.shutdown().await.unwrap();
        Writer::new(&mut far).unwrap().accept(1).await.unwrap();
        assert!(io.read(&mut [0; 1024]).await.unwrap() > 0);
        let mut reader = Reader::new(&mut far);
        assert!(reader.next().await.unwrap().is_some());
        assert!(reader.next().await.unwrap().is_none(), "its end came");
    }
}

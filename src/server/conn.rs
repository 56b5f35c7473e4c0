//! One HTTP/1 connection with bounded patience; shared by the health server and the admin socket.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

/// Longest wait for a request's head, also for the first one on an idle connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that requests in flight have to end after `stop`.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves `routes` on `io` until the peer leaves, is too slow, or `stop` is cancelled and what was being
/// answered is finished (at most two seconds later).
pub(crate) async fn serve_connection<I>(io: I, routes: Router, stop: CancellationToken)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(io), TowerToHyperService::new(routes));
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => Ok(result),
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(DRAIN_TIMEOUT, connection).await
        }
    };
    match result {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "connection ended early"),
        Err(_) => tracing::debug!("connection dropped: still busy after shutdown"),
    }
}

/// A peer that has to read: writing fails once an answer has waited for it for so long.
///
/// The time runs from the first write that has to wait until everything is written, so that reading a little now and
/// then does not prolong it.
pub(crate) struct Impatient<I> {
    io: I,
    patience: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<I> Impatient<I> {
    pub(crate) fn new(io: I, patience: Duration) -> Self {
        Self {
            io,
            patience,
            waiting: None,
        }
    }
}

impl<I: AsyncWrite + Unpin> Impatient<I> {
    fn write<T>(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut I>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.is_over(cx) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let written = write(Pin::new(&mut self.io), cx);
        if written.is_pending() && self.waiting.is_none() {
            self.waiting = Some(Box::pin(sleep(self.patience)));
            if self.is_over(cx) {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        written
    }

    /// Returns whether the time is over. If not, registers the task to be woken then.
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        let waiting = self.waiting.as_mut();
        waiting.is_some_and(|waiting| waiting.as_mut().poll(cx).is_ready())
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Impatient<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Impatient<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |io, cx| io.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |io, cx| io.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    // Hyper flushes when it has written all that it has.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = self.write(cx, |io, cx| io.poll_flush(cx));
        if matches!(flushed, Poll::Ready(Ok(()))) {
            self.waiting = None;
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::{Instant, timeout};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);
    const ANSWER: usize = 1 << 20;

    fn routes() -> Router {
        Router::new().route("/", get(|| async { vec![b'x'; ANSWER] }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_too_slowly_is_left() {
        for reads in [false, true] {
            let (mut client, server) = duplex(4096);
            let served = tokio::spawn(serve_connection(
                Impatient::new(server, PATIENCE),
                routes(),
                CancellationToken::new(),
            ));
            client
                .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                .await
                .unwrap();
            let before = Instant::now();
            let mut bytes = vec![0; 4096];
            while before.elapsed() < 3 * PATIENCE && !served.is_finished() {
                tokio::time::sleep(Duration::from_secs(1)).await;
                if reads {
                    let read = client.read(&mut bytes);
                    drop(timeout(Duration::from_secs(1), read).await);
                }
            }
            assert!(served.is_finished(), "reads: {reads}");
            assert!(before.elapsed() >= PATIENCE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_answer_has_its_own_time() {
        let (mut client, server) = duplex(4096);
        let io = Impatient::new(server, PATIENCE);
        tokio::spawn(serve_connection(io, routes(), CancellationToken::new()));
        for _ in 0..4 {
            let request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
            client.write_all(request).await.unwrap();
            tokio::time::sleep(PATIENCE / 2).await;
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                answer.push(client.read_u8().await.unwrap());
            }
            answer.resize(ANSWER, 0);
            client.read_exact(&mut answer).await.unwrap();
        }
    }
}

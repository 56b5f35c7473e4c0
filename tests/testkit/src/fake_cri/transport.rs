//! Connections to the fake: from a unix socket or from memory, all cut at once when the "runtime" stops.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Uri};

#[derive(Clone)]
pub(super) struct Transport(Arc<Mutex<Inner>>);

struct Inner {
    connections: mpsc::UnboundedSender<Connection>,
    socket: Option<PathBuf>,
    /// Cancelled when the runtime stops; `None` while it is stopped.
    life: Option<CancellationToken>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(life) = &self.life {
            life.cancel();
        }
    }
}

impl Transport {
    pub(super) fn new() -> (Self, impl Stream<Item = io::Result<Connection>>) {
        let (connections, incoming) = mpsc::unbounded_channel();
        let inner = Inner {
            connections,
            socket: None,
            life: Some(CancellationToken::new()),
        };
        let incoming = UnboundedReceiverStream::new(incoming).map(Ok);
        (Self(Arc::new(Mutex::new(inner))), incoming)
    }

    pub(super) fn listen(&self, socket: &Path) -> io::Result<()> {
        let mut inner = self.inner();
        inner.socket = Some(socket.to_owned());
        inner.bind()
    }

    pub(super) fn socket(&self) -> Option<PathBuf> {
        self.inner().socket.clone()
    }

    pub(super) fn stop(&self) {
        let mut inner = self.inner();
        if let Some(life) = inner.life.take() {
            life.cancel();
        }
        if let Some(socket) = &inner.socket {
            // Already gone is fine.
            drop(std::fs::remove_file(socket));
        }
    }

    pub(super) fn start(&self) -> io::Result<()> {
        let mut inner = self.inner();
        inner.life = Some(CancellationToken::new());
        inner.bind()
    }

    pub(super) fn channel(&self) -> Channel {
        let inner = Arc::downgrade(&self.0);
        Endpoint::from_static("http://localhost").connect_with_connector_lazy(tower::service_fn(
            move |_: Uri| {
                let inner = inner.upgrade();
                async move {
                    let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
                    let inner = inner.ok_or_else(refused)?;
                    let inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
                    let life = inner.life.clone().ok_or_else(refused)?;
                    let (ours, theirs) = tokio::io::duplex(256 << 10);
                    let connection = Connection::new(Io::Memory(theirs), life);
                    inner.connections.send(connection).map_err(|_| refused())?;
                    Ok::<_, io::Error>(TokioIo::new(ours))
                }
            },
        ))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn bind(&mut self) -> io::Result<()> {
        let (Some(socket), Some(life)) = (&self.socket, &self.life) else {
            return Ok(());
        };
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(socket)?;
        let (life, connections) = (life.clone(), self.connections.clone());
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = life.cancelled() => return,
                };
                let Ok((stream, _)) = accepted else { continue };
                let connection = Connection::new(Io::Unix(stream), life.clone());
                if connections.send(connection).is_err() {
                    return;
                }
            }
        });
        Ok(())
    }
}

enum Io {
    Unix(UnixStream),
    Memory(DuplexStream),
}

/// A connection that breaks when the runtime stops.
pub(super) struct Connection {
    io: Io,
    end: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn new(io: Io, life: CancellationToken) -> Self {
        Self {
            io,
            end: Box::pin(life.cancelled_owned()),
        }
    }

    fn broken(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::Error::from(io::ErrorKind::ConnectionReset)),
            Poll::Pending => Ok(()),
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.broken(cx)?;
        match &mut self.io {
            Io::Unix(io) => Pin::new(io).poll_read(cx, buf),
            Io::Memory(io) => Pin::new(io).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.broken(cx)?;
        match &mut self.io {
            Io::Unix(io) => Pin::new(io).poll_write(cx, buf),
            Io::Memory(io) => Pin::new(io).poll_write(cx, buf),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Unix(io) => Pin::new(io).poll_flush(cx),
            Io::Memory(io) => Pin::new(io).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Unix(io) => Pin::new(io).poll_shutdown(cx),
            Io::Memory(io) => Pin::new(io).poll_shutdown(cx),
        }
    }
}

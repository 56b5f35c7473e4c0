//! The bytes of a SPDY connection within WebSocket messages.

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};

use super::activity::Activity;
use super::frames::{Piece, Reader, Writer};
use super::relay::{End, close_runtime, in_time};
use super::runtime_io::RuntimeIo;
use super::session::Limits;
use super::translate::{ANSWERS, client_error, close, close_reason};

/// The longest message sent.
const BUFFER: usize = 32 * 1024;

/// Carries bytes until one side is done, then closes the client's connection in order.
pub(super) async fn tunnel<C, R>(client: C, mut runtime: RuntimeIo<R>, limits: &Limits) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite + Unpin,
{
    let (read, write) = tokio::io::split(client);
    let (mut from_client, mut to_client) = (Reader::new(read), Writer::new(write));
    let activity = Activity::new(limits.idle_timeout);
    let (pongs, wanted) = mpsc::channel(ANSWERS);
    let end = {
        let (read, write) = tokio::io::split(&mut runtime);
        tokio::select! {
            end = send(&mut from_client, write, &pongs, &activity) => end,
            end = receive(read, &mut to_client, wanted, &activity) => end,
            () = activity.expired() => End::Idle,
            end = limits.reached() => end,
        }
    };
    let goodbye = async {
        let (code, reason) = close_reason(end);
        close(&mut to_client, code, reason).await;
        from_client.drain().await;
        drop(to_client.shutdown().await);
    };
    // The runtime's end of it must not wait for a client that does not read.
    let closed = close_runtime(runtime, limits);
    let (in_time, ()) = tokio::join!(in_time(goodbye, limits), closed);
    if !in_time {
        tracing::debug!("dropping a tunnel whose client does not read");
    }
    end
}

async fn send<C>(
    from_client: &mut Reader<C>,
    mut write: impl AsyncWrite + Unpin,
    pongs: &mpsc::Sender<Bytes>,
    activity: &Activity,
) -> End
where
    C: AsyncRead + Unpin,
{
    let mut open = true;
    loop {
        let data = match from_client.next().await {
            Ok(Some(Piece::Data(data))) => data,
            Ok(Some(Piece::Ping(payload))) => {
                // Those that wait are enough: a client that reads nothing now reads no answer either.
                let _full = pongs.try_send(payload);
                continue;
            }
            Ok(Some(Piece::Close) | None) => return End::ClientGone,
            Err(error) => return client_error(&error),
        };
        if data.text {
            return End::ClientBroken;
        }
        if open && let Err(error) = write.write_all(&data.bytes).await {
            tracing::debug!(%error, "the container runtime accepts no more data of a tunnel");
            open = false;
        }
        activity.touch();
    }
}

async fn receive<C>(
    mut read: impl AsyncRead + Unpin,
    to_client: &mut Writer<C>,
    mut pongs: mpsc::Receiver<Bytes>,
    activity: &Activity,
) -> End
where
    C: AsyncWrite + Unpin,
{
    let mut buffer = vec![0; BUFFER];
    loop {
        // Cancel-safe both.
        let read = tokio::select! {
            read = read.read(&mut buffer) => read,
            Some(payload) = pongs.recv() => {
                if let Err(error) = to_client.send(Frame::pong(payload)).await {
                    return client_error(&error);
                }
                continue;
            }
        };
        let bytes = match read {
            Ok(0) => return End::Finished,
            Ok(read) => Bytes::copy_from_slice(buffer.get(..read).unwrap_or_default()),
            Err(error) => {
                tracing::debug!(%error, "the tunnel to the container runtime broke");
                return End::RuntimeBroken;
            }
        };
        let message = Frame::message(bytes, OpCode::Data(Data::Binary), true);
        if let Err(error) = to_client.send(message).await {
            return client_error(&error);
        }
        activity.touch();
    }
}

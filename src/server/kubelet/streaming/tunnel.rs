//! The bytes of a SPDY connection within WebSocket messages.

use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::activity::Activity;
use super::relay::{End, in_time};
use super::session::Limits;
use super::translate::{client_error, close, close_reason};
use super::websocket;

/// The longest message sent.
const BUFFER: usize = 32 * 1024;

/// Carries bytes until one side is done, then closes the client's connection in order.
pub(super) async fn tunnel<C, R>(client: C, runtime: R, limits: &Limits) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite,
{
    let socket =
        WebSocketStream::from_raw_socket(client, Role::Server, Some(websocket::config())).await;
    let (mut to_client, mut from_client) = socket.split();
    let (read, write) = tokio::io::split(runtime);
    let activity = Activity::new(limits.idle_timeout);
    let end = tokio::select! {
        end = send(&mut from_client, write, &activity) => end,
        end = receive(read, &mut to_client, &activity) => end,
        () = activity.expired() => End::Idle,
        () = limits.stop.cancelled() => End::Stopped,
    };
    let goodbye = async {
        let (code, reason) = close_reason(end);
        close(&mut to_client, code, reason).await;
        while let Some(Ok(_)) = from_client.next().await {}
        if let Ok(mut socket) = to_client.reunite(from_client) {
            drop(socket.get_mut().shutdown().await);
        }
    };
    if !in_time(goodbye, limits).await {
        tracing::debug!("dropping a tunnel whose client does not read");
    }
    end
}

async fn send<C>(
    from_client: &mut SplitStream<WebSocketStream<C>>,
    mut write: impl AsyncWrite + Unpin,
    activity: &Activity,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let mut open = true;
    loop {
        let bytes = match from_client.next().await {
            Some(Ok(Message::Binary(bytes))) => bytes,
            Some(Ok(Message::Text(_))) => return End::ClientBroken,
            Some(Ok(Message::Close(_))) | None => return End::ClientGone,
            Some(Ok(_)) => continue,
            Some(Err(error)) => return client_error(&error),
        };
        if open && let Err(error) = write.write_all(&bytes).await {
            tracing::debug!(%error, "the container runtime takes no more of a tunnel");
            open = false;
        }
        activity.touch();
    }
}

async fn receive<C>(
    mut read: impl AsyncRead + Unpin,
    to_client: &mut SplitSink<WebSocketStream<C>, Message>,
    activity: &Activity,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let mut buffer = vec![0; BUFFER];
    loop {
        let bytes = match read.read(&mut buffer).await {
            Ok(0) => return End::Finished,
            Ok(read) => Bytes::copy_from_slice(buffer.get(..read).unwrap_or_default()),
            Err(error) => {
                tracing::debug!(%error, "the tunnel to the container runtime broke");
                return End::RuntimeBroken;
            }
        };
        if let Err(error) = to_client.send(Message::Binary(bytes)).await {
            return client_error(&error);
        }
        activity.touch();
    }
}

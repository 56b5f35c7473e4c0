//! Channels of a WebSocket client to SPDY streams of the runtime and back.

use std::time::Duration;

use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::CapacityError;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};
use tokio_tungstenite::tungstenite::{Error as WsError, Message};

use super::activity::Activity;
use super::channels::{Encoding, Incoming};
use super::relay::{End, in_time};
use super::session::Limits;
use super::spdy::{Frame, Reader, SpdyError, StreamId, Writer};
use super::websocket;

/// A client is sent a ping after this much silence, so that one that is gone is noticed.
const PING: Duration = Duration::from_secs(60);
/// Answers to the runtime's pings that wait for the writer; more are left out.
const ANSWERS: usize = 8;

/// What becomes what.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// The streams, opened in this order.
    pub(super) streams: Vec<Stream>,
    /// How messages are written.
    pub(super) encoding: Encoding,
    /// The client can end a channel.
    pub(super) half_close: bool,
    /// What the client is sent first, by channel.
    pub(super) greeting: Vec<(u8, Vec<u8>)>,
    /// The channel on which a `Status` tells how it ended.
    pub(super) status: Option<u8>,
}

/// A stream of the runtime's and its channel.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// What the runtime knows it by.
    pub(super) headers: Vec<(&'static str, String)>,
    /// The channel.
    pub(super) channel: u8,
    /// Carries what the client sends.
    pub(super) input: bool,
    /// Carries what the runtime sends; all of these must end for the whole to end.
    pub(super) output: bool,
}

impl Plan {
    fn id(index: usize) -> StreamId {
        u32::try_from(index).unwrap_or(u32::MAX / 2) * 2 + 1
    }

    fn input(&self, channel: u8) -> Option<StreamId> {
        let mut streams = self.streams.iter();
        let index = streams.position(|stream| stream.input && stream.channel == channel)?;
        Some(Self::id(index))
    }

    fn output(&self, id: StreamId) -> Option<(usize, u8)> {
        let index = usize::try_from(id.checked_sub(1)? / 2).ok()?;
        let stream = self.streams.get(index).filter(|stream| stream.output)?;
        (Self::id(index) == id).then_some((index, stream.channel))
    }
}

/// Carries data until both sides are done, then closes the client's connection in order.
pub(super) async fn translate<C, R>(client: C, runtime: R, plan: &Plan, limits: &Limits) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite,
{
    let socket =
        WebSocketStream::from_raw_socket(client, Role::Server, Some(websocket::config())).await;
    let (mut to_client, mut from_client) = socket.split();
    let mut told = false;
    let end = {
        let activity = Activity::new(limits.idle_timeout);
        let (read, write) = tokio::io::split(runtime);
        let (answers, wanted) = mpsc::channel(ANSWERS);
        let carry = async {
            let mut writer = match open(write, plan).await {
                Ok(writer) => writer,
                Err(error) => return broken(&error),
            };
            tokio::select! {
                end = send(&mut from_client, &mut writer, plan, wanted, &activity) => end,
                end = receive(read, &mut to_client, plan, &answers, &activity, &mut told) => end,
            }
        };
        tokio::select! {
            end = carry => end,
            () = activity.expired() => End::Idle,
            () = limits.stop.cancelled() => End::Stopped,
        }
    };
    let status = plan.status.filter(|_| !told);
    let goodbye = goodbye(to_client, from_client, end, plan.encoding, status);
    if !in_time(goodbye, limits).await {
        tracing::debug!("dropping a stream whose client does not read");
    }
    end
}

fn broken(error: &SpdyError) -> End {
    tracing::debug!(%error, "the stream to the container runtime broke");
    End::RuntimeBroken
}

async fn open<W>(write: W, plan: &Plan) -> Result<Writer<W>, SpdyError>
where
    W: AsyncWrite + Unpin,
{
    let mut writer = Writer::new(write)?;
    for (index, stream) in plan.streams.iter().enumerate() {
        writer.open(Plan::id(index), &stream.headers).await?;
    }
    Ok(writer)
}

/// Client to runtime. Returns when the client is done; a runtime that takes no more has the rest discarded, for it
/// may still have something to say.
async fn send<C, W>(
    from_client: &mut SplitStream<WebSocketStream<C>>,
    writer: &mut Writer<W>,
    plan: &Plan,
    mut answers: mpsc::Receiver<u32>,
    activity: &Activity,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut open = true;
    loop {
        // Cancel-safe: both give an item or nothing.
        let message = tokio::select! {
            message = from_client.next() => message,
            Some(ping) = answers.recv() => {
                open = open && writer.ping(ping).await.is_ok();
                continue;
            }
        };
        let bytes: Bytes = match message {
            Some(Ok(Message::Binary(bytes))) => bytes,
            Some(Ok(Message::Text(text))) => text.into(),
            Some(Ok(Message::Close(_))) | None => return End::ClientGone,
            Some(Ok(_)) => continue,
            Some(Err(error)) => return client_error(&error),
        };
        activity.touch();
        let sent = match plan.encoding.decode(&bytes, plan.half_close) {
            Incoming::Data(channel, data) => match plan.input(channel) {
                Some(stream) if open => writer.data(stream, &data).await,
                _ => Ok(()),
            },
            Incoming::Ended(channel) => match plan.input(channel) {
                Some(stream) if open => writer.finish(stream).await,
                _ => Ok(()),
            },
            Incoming::Nothing => Ok(()),
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "the container runtime takes no more input");
            open = false;
        }
        activity.touch();
    }
}

pub(super) fn client_error(error: &WsError) -> End {
    tracing::debug!(%error, "a WebSocket client broke off");
    match error {
        WsError::Capacity(CapacityError::MessageTooLong { .. }) => End::TooBig,
        WsError::Capacity(_) | WsError::Protocol(_) | WsError::Utf8(_) => End::ClientBroken,
        _ => End::ClientGone,
    }
}

/// Runtime to client. Returns when every stream of output has ended.
async fn receive<C, R>(
    read: R,
    to_client: &mut SplitSink<WebSocketStream<C>, Message>,
    plan: &Plan,
    answers: &mpsc::Sender<u32>,
    activity: &Activity,
    told: &mut bool,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + Unpin,
{
    for (channel, bytes) in &plan.greeting {
        let message = plan.encoding.encode(*channel, bytes);
        if let Err(error) = to_client.send(message).await {
            return client_error(&error);
        }
    }
    let mut reader = Reader::new(read);
    let mut running: Vec<bool> = plan.streams.iter().map(|stream| stream.output).collect();
    while running.contains(&true) {
        let frame = tokio::select! {
            frame = reader.next() => frame,
            () = tokio::time::sleep(PING) => {
                if let Err(error) = to_client.send(Message::Ping(Bytes::new())).await {
                    return client_error(&error);
                }
                continue;
            }
        };
        let ended = match frame {
            Ok(Some(Frame::Data {
                stream,
                payload,
                fin,
            })) => {
                let Some((_, channel)) = plan.output(stream) else {
                    continue;
                };
                if !payload.is_empty() {
                    *told = *told || plan.status == Some(channel);
                    let message = plan.encoding.encode(channel, &payload);
                    if let Err(error) = to_client.send(message).await {
                        return client_error(&error);
                    }
                    activity.touch();
                }
                fin.then_some(stream)
            }
            Ok(Some(Frame::SynReply { stream, fin, .. } | Frame::Headers { stream, fin, .. })) => {
                fin.then_some(stream)
            }
            Ok(Some(Frame::Reset { stream, .. })) => Some(stream),
            // One that waits is enough: a runtime that takes no input now cannot take the answer either.
            Ok(Some(Frame::Ping(id))) => {
                let _full = answers.try_send(id);
                None
            }
            Ok(Some(_)) => None,
            Ok(None) => break,
            // The status is written last: nothing is missing.
            Err(error) if *told => {
                tracing::debug!(%error, "the container runtime broke off after it had told the end");
                break;
            }
            Err(error) => return broken(&error),
        };
        let index = ended.and_then(|stream| plan.output(stream));
        if let Some(running) = index.and_then(|(index, _)| running.get_mut(index)) {
            *running = false;
        }
    }
    match plan.status {
        // Where an end is always told, silence is none.
        Some(_) if !*told => End::RuntimeBroken,
        _ => End::Finished,
    }
}

/// Says why, and waits for the client to have read it.
async fn goodbye<C>(
    mut to_client: SplitSink<WebSocketStream<C>, Message>,
    mut from_client: SplitStream<WebSocketStream<C>>,
    end: End,
    encoding: Encoding,
    status: Option<u8>,
) where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let (code, reason) = close_reason(end);
    if let Some(channel) = status
        && end != End::ClientGone
    {
        let message = encoding.encode(channel, failure(reason).as_bytes());
        if to_client.send(message).await.is_err() {
            return;
        }
    }
    close(&mut to_client, code, reason).await;
    while let Some(Ok(_)) = from_client.next().await {}
    if let Ok(mut socket) = to_client.reunite(from_client) {
        drop(socket.get_mut().shutdown().await);
    }
}

/// Sends a close frame.
pub(super) async fn close<C>(
    to_client: &mut SplitSink<WebSocketStream<C>, Message>,
    code: CloseCode,
    reason: &'static str,
) where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let frame = CloseFrame {
        code,
        reason: reason.into(),
    };
    if let Err(error) = to_client.send(Message::Close(Some(frame))).await {
        tracing::debug!(%error, "a WebSocket client was gone before it was told the end");
    }
}

/// How a WebSocket client is told the end.
pub(super) fn close_reason(end: End) -> (CloseCode, &'static str) {
    match end {
        End::Finished | End::ClientGone => (CloseCode::Normal, ""),
        End::ClientBroken => (CloseCode::Protocol, "not the agreed protocol"),
        End::TooBig => (CloseCode::Size, "a message is longer than 32 MiB"),
        End::RuntimeBroken => (
            CloseCode::Error,
            "the container runtime ended the stream early",
        ),
        End::Idle => (CloseCode::Away, "nothing was carried for the idle timeout"),
        End::Stopped => (CloseCode::Away, "the node agent stops or restarts"),
    }
}

/// A `Status` for an end the runtime did not tell.
fn failure(reason: &str) -> String {
    serde_json::json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": format!("Internal error occurred: {reason}"),
        "reason": "InternalError",
        "details": {"causes": [{"message": reason}]},
        "code": 500,
    })
    .to_string()
}

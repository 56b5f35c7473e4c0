//! Channels of a WebSocket client to SPDY streams of the runtime and back.

use std::time::Duration;

use bytes::Bytes;
use futures::future::Either;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::Frame as WsFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::activity::Activity;
use super::channels::{Encoding, Incoming, Messages};
use super::frames::{self, FrameError, Piece};
use super::relay::{End, close_runtime, in_time};
use super::runtime_io::RuntimeIo;
use super::session::Limits;
use super::spdy::{Frame, Reader, SpdyError, StreamId, Writer};

/// A client is sent a ping after this much silence, so that one that is gone is noticed.
const PING: Duration = Duration::from_secs(60);
/// Answers to pings that wait for the writer; more are left out.
pub(super) const ANSWERS: usize = 8;

/// Mapping of channels to streams.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// The streams, opened in this order.
    pub(super) streams: Vec<Stream>,
    /// Encoding of messages.
    pub(super) encoding: Encoding,
    /// The client can end a channel.
    pub(super) half_close: bool,
    /// Data that the client gets first, by channel.
    pub(super) greeting: Vec<(u8, Vec<u8>)>,
    /// The channel on which a `Status` reports the end.
    pub(super) status: Option<u8>,
}

/// A stream of the runtime's and its channel.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// Headers that identify it to the runtime.
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
pub(super) async fn translate<C, R>(
    client: C,
    mut runtime: RuntimeIo<R>,
    plan: &Plan,
    limits: &Limits,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite + Unpin,
{
    let (read, write) = tokio::io::split(client);
    let (mut from_client, mut to_client) = (frames::Reader::new(read), frames::Writer::new(write));
    let mut told = false;
    let end = {
        let activity = Activity::new(limits.idle_timeout);
        let (read, write) = tokio::io::split(&mut runtime);
        let (answers, wanted) = mpsc::channel(ANSWERS);
        let (pongs, wanted_pongs) = mpsc::channel(ANSWERS);
        let carried = Carried {
            plan,
            activity: &activity,
        };
        let carry = async {
            let mut writer = match open(write, plan).await {
                Ok(writer) => writer,
                Err(error) => return broken(&error),
            };
            tokio::select! {
                end = send(&mut from_client, &mut writer, carried, wanted, &pongs) => end,
                end = receive(read, &mut to_client, carried, &answers, wanted_pongs, &mut told) => end,
            }
        };
        tokio::select! {
            end = carry => end,
            () = activity.expired() => End::Idle,
            end = limits.reached() => end,
        }
    };
    let status = plan.status.filter(|_| !told);
    let goodbye = goodbye(&mut to_client, &mut from_client, end, plan.encoding, status);
    // The runtime's end of it must not wait for a client that does not read.
    let closed = close_runtime(runtime, limits);
    let (in_time, ()) = tokio::join!(in_time(goodbye, limits), closed);
    if !in_time {
        tracing::debug!("dropping a stream whose client does not read");
    }
    end
}

/// State that both directions of a stream share.
#[derive(Clone, Copy)]
struct Carried<'a> {
    plan: &'a Plan,
    activity: &'a Activity,
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
    // A client that does not read keeps the rest for hours.
    writer.end_headers();
    Ok(writer)
}

/// Client to runtime. Returns when the client is done; a runtime that takes no more has the rest discarded, for it
/// may still have something to say.
async fn send<C, W>(
    from_client: &mut frames::Reader<C>,
    writer: &mut Writer<W>,
    Carried { plan, activity }: Carried<'_>,
    mut answers: mpsc::Receiver<u32>,
    pongs: &mpsc::Sender<Bytes>,
) -> End
where
    C: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut open = true;
    let mut messages = Messages::new(plan.encoding, plan.half_close);
    loop {
        // Cancel-safe: both give an item or nothing.
        let piece = tokio::select! {
            piece = from_client.next() => piece,
            Some(ping) = answers.recv() => {
                open = open && writer.ping(ping).await.is_ok();
                continue;
            }
        };
        let data = match piece {
            Ok(Some(Piece::Data(data))) => data,
            Ok(Some(Piece::Ping(payload))) => {
                // Those that wait are enough: a client that reads nothing now reads no answer either.
                let _full = pongs.try_send(payload);
                continue;
            }
            Ok(Some(Piece::Close) | None) => return End::ClientGone,
            Err(error) => return client_error(&error),
        };
        activity.touch();
        let sent = match messages.take(data) {
            Incoming::Data(channel, data) => match plan.input(channel) {
                Some(stream) if open => writer.data(stream, &data).await,
                _ => Ok(()),
            },
            Incoming::Ended(channel) => match plan.input(channel) {
                Some(stream) if open => writer.finish(stream).await,
                _ => Ok(()),
            },
            Incoming::Nothing => Ok(()),
            Incoming::Broken => return End::ClientBroken,
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "the container runtime accepts no more input");
            open = false;
        }
        activity.touch();
    }
}

pub(super) fn client_error(error: &FrameError) -> End {
    tracing::debug!(%error, "the connection of a WebSocket client broke");
    match error {
        FrameError::TooBig => End::TooBig,
        FrameError::Protocol(_) => End::ClientBroken,
        FrameError::Io(_) => End::ClientGone,
    }
}

/// Runtime to client. Returns when every stream of output has ended.
async fn receive<C, R>(
    read: R,
    to_client: &mut frames::Writer<C>,
    Carried { plan, activity }: Carried<'_>,
    answers: &mpsc::Sender<u32>,
    mut pongs: mpsc::Receiver<Bytes>,
    told: &mut bool,
) -> End
where
    C: AsyncWrite + Unpin,
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
        // Cancel-safe all three.
        let next = tokio::select! {
            frame = reader.next() => Either::Left(frame),
            Some(payload) = pongs.recv() => Either::Right(WsFrame::pong(payload)),
            () = tokio::time::sleep(PING) => Either::Right(WsFrame::ping(Bytes::new())),
        };
        let frame = match next {
            Either::Left(frame) => frame,
            Either::Right(control) => {
                if let Err(error) = to_client.send(control).await {
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
                tracing::debug!(%error, "the connection to the container runtime broke after the end of the stream");
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
async fn goodbye<R, W>(
    to_client: &mut frames::Writer<W>,
    from_client: &mut frames::Reader<R>,
    end: End,
    encoding: Encoding,
    status: Option<u8>,
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
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
    close(to_client, code, reason).await;
    from_client.drain().await;
    drop(to_client.shutdown().await);
}

/// Sends a close frame.
pub(super) async fn close<W>(
    to_client: &mut frames::Writer<W>,
    code: CloseCode,
    reason: &'static str,
) where
    W: AsyncWrite + Unpin,
{
    let frame = CloseFrame {
        code,
        reason: reason.into(),
    };
    if let Err(error) = to_client.send(WsFrame::close(Some(frame))).await {
        tracing::debug!(%error, "a WebSocket client was gone before the close message");
    }
}

/// Returns the close code and reason for a WebSocket client.
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
        End::TargetStopped => (CloseCode::Away, "the container or its pod is stopped"),
        End::Stopped => (CloseCode::Away, "the node agent stops or restarts"),
    }
}

/// A `Status` for an end that the runtime did not report.
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

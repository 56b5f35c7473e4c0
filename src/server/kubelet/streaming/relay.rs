//! Bytes both ways, as they are: for clients that speak SPDY themselves.

use std::pin::pin;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};

use super::activity::Activity;
use super::runtime_io::RuntimeIo;
use super::session::Limits;

/// Bytes under way in one direction.
const BUFFER: usize = 32 * 1024;
/// Time that one side has to end after the other has ended. Closing at once would discard bytes that the client has not
/// read yet.
pub(super) const LINGER: Duration = Duration::from_secs(10);
/// Time for the closing handshake when the agent exits.
const GOODBYE: Duration = Duration::from_secs(1);

/// Says goodbye to a peer; whether it was done in time. The end of the agent, before or meanwhile, leaves less of it.
pub(super) async fn in_time(goodbye: impl Future<Output = ()>, limits: &Limits) -> bool {
    let stopped = async {
        limits.stop.cancelled().await;
        tokio::time::sleep(GOODBYE).await;
    };
    tokio::select! {
        done = tokio::time::timeout(LINGER, goodbye) => done.is_ok(),
        () = stopped => false,
    }
}

/// Reason why a stream ended, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The runtime ended it, and everything was delivered.
    Finished,
    /// The client went away.
    ClientGone,
    /// The client broke the rules.
    ClientBroken,
    /// The client sent more at once than is taken.
    TooBig,
    /// The connection to the runtime broke.
    RuntimeBroken,
    /// Nothing was carried for the idle timeout.
    Idle,
    /// The container or its sandbox is stopped.
    TargetStopped,
    /// The agent ends.
    Stopped,
}

/// Result of copying in one direction.
enum PumpEnd {
    Eof,
    ReadFailed,
    WriteFailed,
}

/// Carries bytes until both sides are done.
pub(super) async fn relay<C, R>(client: C, mut runtime: RuntimeIo<R>, limits: &Limits) -> End
where
    C: AsyncRead + AsyncWrite,
    R: AsyncRead + AsyncWrite + Unpin,
{
    let (client_read, mut client_write) = split(client);
    let activity = Activity::new(limits.idle_timeout);
    let end = {
        let (runtime_read, mut runtime_write) = split(&mut runtime);
        tokio::select! {
            end = both(
                (client_read, &mut runtime_write),
                (runtime_read, &mut client_write),
                &activity,
            ) => end,
            () = activity.expired() => End::Idle,
            end = limits.reached() => end,
        }
    };
    // What ends here must not wait for a client that does not read.
    let goodbye = async {
        if tokio::time::timeout(GOODBYE, client_write.shutdown())
            .await
            .is_err()
        {
            tracing::debug!("dropping a stream whose client does not read");
        }
    };
    tokio::join!(goodbye, close_runtime(runtime, limits));
    end
}

/// Closes the connection to the runtime when it has answered what was opened over it.
pub(super) async fn close_runtime<R>(runtime: RuntimeIo<R>, limits: &Limits)
where
    R: AsyncRead + AsyncWrite + Unpin,
{
    if !in_time(runtime.close(), limits).await {
        tracing::warn!("the container runtime has not answered the streams of a closed connection");
    }
}

async fn both(
    input: (
        impl AsyncRead + Unpin,
        &mut (impl AsyncWrite + Unpin + ?Sized),
    ),
    output: (
        impl AsyncRead + Unpin,
        &mut (impl AsyncWrite + Unpin + ?Sized),
    ),
    activity: &Activity,
) -> End {
    let mut input = pin!(pump(input.0, input.1, activity));
    let mut output = pin!(pump(output.0, output.1, activity));
    let delivered = tokio::select! {
        delivered = &mut output => delivered,
        sent = &mut input => match sent {
            PumpEnd::ReadFailed => return End::ClientGone,
            // A client may end its side and listen on for a while. Mostly it is gone, and not every runtime ends its side then.
            PumpEnd::Eof => {
                let rest = tokio::time::timeout(LINGER, output).await;
                return rest.map_or(End::ClientGone, |delivered| ended(&delivered));
            }
            // A runtime that takes no more may have more to say.
            PumpEnd::WriteFailed => return ended(&output.await),
        },
    };
    // The client has everything: it ends its side, or time does.
    if !matches!(delivered, PumpEnd::WriteFailed) {
        drop(tokio::time::timeout(LINGER, input).await);
    }
    ended(&delivered)
}

fn ended(output: &PumpEnd) -> End {
    match output {
        PumpEnd::Eof => End::Finished,
        PumpEnd::ReadFailed => End::RuntimeBroken,
        PumpEnd::WriteFailed => End::ClientGone,
    }
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    to: &mut (impl AsyncWrite + Unpin + ?Sized),
    activity: &Activity,
) -> PumpEnd {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = match from.read(&mut buffer).await {
            Ok(read) => read,
            Err(error) => {
                tracing::debug!(%error, "a side of a stream broke");
                // What the other side has been sent so far is all there is.
                drop(to.shutdown().await);
                return PumpEnd::ReadFailed;
            }
        };
        let written = match buffer.get(..read) {
            Some(bytes) if read > 0 => {
                async {
                    to.write_all(bytes).await?;
                    to.flush().await
                }
                .await
            }
            _ => {
                return match to.shutdown().await {
                    Ok(()) => PumpEnd::Eof,
                    Err(_) => PumpEnd::WriteFailed,
                };
            }
        };
        activity.touch();
        if let Err(error) = written {
            tracing::debug!(%error, "one side of a stream accepts no more data");
            return PumpEnd::WriteFailed;
        }
    }
}

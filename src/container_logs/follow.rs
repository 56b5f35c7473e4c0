//! A log as a stream of bytes, which reads only as fast as it is polled.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use futures::stream;
use tokio_util::sync::CancellationToken;

use super::TURNS;
use super::entry::LogOptions;
use super::hub::Subscription;
use super::reader::{LogReader, Step};
use crate::types::blocking;

/// [`LogReader::open`] on a thread where it may block.
///
/// # Errors
/// As [`LogReader::open`], and when the async runtime is shutting down.
pub async fn open(path: PathBuf, options: LogOptions) -> io::Result<LogReader> {
    let opened = blocking::run_in(&TURNS, move || LogReader::open(&path, &options));
    opened.await.map_err(io::Error::other)?
}

struct Following {
    reader: LogReader,
    subscription: Option<Subscription>,
    stop: CancellationToken,
}

/// Streams the present content of a log. Ends early when `stop` is cancelled. Holds only open files while it is not
/// polled.
pub fn snapshot(
    reader: LogReader,
    stop: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> + Send + use<> {
    read(reader, None, stop)
}

/// As [`snapshot`], and what is written later, until the container has ended.
pub fn follow(
    reader: LogReader,
    subscription: Subscription,
    stop: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> + Send + use<> {
    read(reader, Some(subscription), stop)
}

fn read(
    reader: LogReader,
    subscription: Option<Subscription>,
    stop: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> + Send + use<> {
    let following = Following {
        reader,
        subscription,
        stop,
    };
    stream::try_unfold(following, next)
}

/// The next bytes; `None` at the end.
async fn next(mut following: Following) -> io::Result<Option<(Bytes, Following)>> {
    loop {
        if following.stop.is_cancelled() {
            return Ok(None);
        }
        let ended = match &mut following.subscription {
            Some(subscription) => subscription.look(),
            None => true,
        };
        let mut reader = following.reader;
        let (reader, step) = blocking::run_in(&TURNS, move || {
            let step = reader.step(ended);
            (reader, step)
        })
        .await
        .map_err(io::Error::other)?;
        following.reader = reader;
        match step? {
            Step::Data(data) if data.is_empty() => {}
            Step::Data(data) => return Ok(Some((Bytes::from(data), following))),
            Step::End => return Ok(None),
            Step::Wait(again) => following.wait(again).await,
        }
    }
}

impl Following {
    async fn wait(&mut self, again: Option<Duration>) {
        let changed = async {
            match &mut self.subscription {
                Some(subscription) => subscription.changed().await,
                None => std::future::pending().await,
            }
        };
        let again = async {
            match again {
                Some(again) => tokio::time::sleep(again).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed => {}
            () = again => {}
            () = self.stop.cancelled() => {}
        }
    }
}

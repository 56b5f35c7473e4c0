//! Bodies that are made while they are sent: watches and backups.

use std::io;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::BoxError;
use super::view::{Change, Query, changes};
use crate::core::state::State;
use crate::store::Store;

/// Chunks that may wait for a slow reader.
const WAITING_CHUNKS: usize = 16;
/// Bytes collected before they are handed on.
const CHUNK: usize = 64 * 1024;
/// Changes this close together are looked at as one, so that a busy store costs a watch little.
const COALESCE: Duration = Duration::from_millis(100);

type Chunk = Result<Bytes, io::Error>;

/// Streams the present rows, a bookmark, then the changes, as JSON lines. A reader that is slower than the store misses
/// states in between, never the newest. Ends with `stop` or with the store.
pub(super) fn watch(
    store: Store,
    query: Query,
    stop: CancellationToken,
) -> impl Stream<Item = Chunk> {
    let (tx, rx) = mpsc::channel(WAITING_CHUNKS);
    tokio::spawn(async move {
        tokio::select! {
            () = follow(&store, query, &tx) => {}
            () = stop.cancelled() => {}
            () = tx.closed() => {}
        }
    });
    ReceiverStream::new(rx)
}

async fn follow(store: &Store, query: Query, tx: &mpsc::Sender<Chunk>) {
    let query = Arc::new(query);
    let mut published = store.published();
    let mut before = Arc::new(State::default());
    let mut first = true;
    loop {
        published.mark_unchanged();
        let after = store.snapshot();
        let compared = tokio::task::spawn_blocking({
            let (query, before, after) = (Arc::clone(&query), before, Arc::clone(&after));
            move || encode(&before, &after, &query, first)
        });
        let chunk = match compared.await {
            Ok(chunk) => chunk,
            Err(error) => Err(io::Error::other(error)),
        };
        let broken = chunk.is_err();
        let empty = chunk.as_ref().is_ok_and(Bytes::is_empty);
        if (!empty && tx.send(chunk).await.is_err()) || broken {
            return;
        }
        (before, first) = (after, false);
        if published.changed().await.is_err() {
            return;
        }
        tokio::time::sleep(COALESCE).await;
    }
}

fn encode(before: &State, after: &State, query: &Query, first: bool) -> Chunk {
    let mut lines = Vec::new();
    let bookmark = first.then(Change::bookmark);
    for change in changes(before, after, query).into_iter().chain(bookmark) {
        serde_json::to_writer(&mut lines, &change)?;
        lines.push(b'\n');
    }
    Ok(lines.into())
}

/// Streams the output of `write`, which runs on a thread of its own. A failure breaks the body off, so that a reader
/// cannot mistake a part for the whole.
pub(super) fn written(
    write: impl FnOnce(&mut dyn Write) -> Result<(), BoxError> + Send + 'static,
) -> impl Stream<Item = Chunk> {
    let (tx, rx) = mpsc::channel(WAITING_CHUNKS);
    tokio::task::spawn_blocking(move || {
        let mut out = ChannelWriter {
            tx,
            pending: Vec::with_capacity(CHUNK),
        };
        let result = write(&mut out).and_then(|()| Ok(out.flush()?));
        if let Err(error) = result {
            tracing::warn!(%error, "cannot send a backup");
            if out.tx.blocking_send(Err(io::Error::other(error))).is_err() {
                tracing::debug!("the client of a backup is gone");
            }
        }
    });
    ReceiverStream::new(rx)
}

struct ChannelWriter {
    tx: mpsc::Sender<Chunk>,
    pending: Vec<u8>,
}

impl Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let chunk = Bytes::from(std::mem::take(&mut self.pending));
        self.tx
            .blocking_send(Ok(chunk))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

//! The connections that are open, and which of them goes when there are too many.
//!
//! A connection is busy while it has an authorized request, and from an upgrade (exec, attach, port-forward) to
//! its end. Everything else is idle, also handshakes, half requests, and requests of nobody: of these the address
//! with the most connections gives one up, the one that was quiet for longest.
//!
//! **Invariant:** a slot is taken until the socket is closed, wherever the socket went.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// All of them. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    open: HashMap<u64, Entry>,
    by_address: HashMap<IpAddr, Arc<AtomicUsize>>,
    next: u64,
}

struct Entry {
    address: IpAddr,
    /// Number of connections of its address.
    neighbours: Arc<AtomicUsize>,
    /// Authorized requests, and upgrades.
    busy: usize,
    /// Start of its current state, idle or busy.
    since: Instant,
    served: bool,
    close: Close,
}

/// Signals that end a connection.
#[derive(Clone, Default)]
pub(super) struct Close {
    /// Now.
    pub(super) now: CancellationToken,
    /// Close it once nothing is in flight.
    pub(super) politely: CancellationToken,
}

/// One connection's place in the table; it is freed when the last of these is dropped.
#[derive(Clone)]
pub(super) struct Slot(Arc<SlotInner>);

struct SlotInner {
    id: u64,
    table: Connections,
    pub(super) close: Close,
}

impl Drop for SlotInner {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        table.remove(self.id);
    }
}

/// A request of the connection is being answered, or it was upgraded, as long as this lives.
pub(super) struct Busy(Slot);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.change(|entry| {
            entry.busy = entry.busy.saturating_sub(1);
            entry.since = Instant::now();
        });
    }
}

impl Slot {
    pub(super) fn close(&self) -> Close {
        self.0.close.clone()
    }

    /// Marks the connection busy.
    pub(super) fn busy(&self) -> Busy {
        self.change(|entry| {
            entry.busy += 1;
            entry.served = true;
            entry.since = Instant::now();
        });
        Busy(self.clone())
    }

    /// A request arrived that is not authorized yet: a connection that was good before is not idle.
    pub(super) fn asked(&self) {
        self.change(|entry| {
            if entry.served {
                entry.since = Instant::now();
            }
        });
    }

    /// A stream was made of the connection: it is busy until it is closed.
    pub(super) fn upgraded(&self) {
        self.change(|entry| entry.busy += 1);
    }

    fn change(&self, change: impl FnOnce(&mut Entry)) {
        let mut table = self.0.table.lock();
        if let Some(entry) = table.open.get_mut(&self.0.id) {
            change(entry);
        }
    }
}

impl Table {
    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.open.remove(&id)?;
        if entry.neighbours.fetch_sub(1, Relaxed) == 1 {
            self.by_address.remove(&entry.address);
        }
        Some(entry)
    }

    /// Returns the idle connection to close: one of the address with the most connections, and of these the one that
    /// has been idle longest.
    fn victim(&self) -> Option<u64> {
        let idle = self.open.iter().filter(|(_, entry)| entry.busy == 0);
        idle.max_by_key(|(id, entry)| {
            (
                entry.neighbours.load(Relaxed),
                std::cmp::Reverse((entry.since, **id)),
            )
        })
        .map(|(id, _)| *id)
    }
}

impl Connections {
    fn lock(&self) -> std::sync::MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self) -> usize {
        self.lock().open.len()
    }

    /// Closes an idle connection. Its slot counts as free at once: it is given back before anything else happens to
    /// its socket. False when all are busy.
    pub(super) fn evict(&self) -> bool {
        let mut table = self.lock();
        let Some(entry) = table.victim().and_then(|id| table.remove(id)) else {
            return false;
        };
        entry.close.now.cancel();
        true
    }

    /// A slot for a connection from `peer`.
    pub(super) fn open(&self, peer: SocketAddr) -> Slot {
        let close = Close::default();
        let mut table = self.lock();
        let id = table.next;
        table.next += 1;
        let address = peer.ip();
        let neighbours = Arc::clone(table.by_address.entry(address).or_default());
        neighbours.fetch_add(1, Relaxed);
        table.open.insert(
            id,
            Entry {
                address,
                neighbours,
                busy: 0,
                since: Instant::now(),
                served: false,
                close: close.clone(),
            },
        );
        Slot(Arc::new(SlotInner {
            id,
            table: self.clone(),
            close,
        }))
    }

    /// Ends what was idle for too long: `first` for a connection whose first request did not come, `idle` for
    /// others. How many of each.
    pub(super) fn sweep(&self, first: Duration, idle: Duration) -> (usize, usize) {
        let now = Instant::now();
        let table = self.lock();
        let stale = table.open.values().filter(|entry| {
            let patience = if entry.served { idle } else { first };
            entry.busy == 0 && now.duration_since(entry.since) > patience
        });
        let (mut silent, mut done) = (0, 0);
        for entry in stale {
            if !entry.close.politely.is_cancelled() {
                entry.close.politely.cancel();
                if entry.served {
                    done += 1;
                } else {
                    silent += 1;
                }
            }
        }
        (silent, done)
    }
}

/// A socket that holds its slot.
pub(super) struct Counted<I> {
    io: I,
    _slot: Slot,
}

impl<I> Counted<I> {
    pub(super) fn new(io: I, slot: Slot) -> Self {
        Self { io, _slot: slot }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Counted<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Counted<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn peer(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 1))
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_of_the_address_with_the_most_goes_first() {
        let table = Connections::default();
        let lone = table.open(peer(1));
        let mut crowd = Vec::new();
        for _ in 0..3 {
            tokio::time::advance(Duration::from_secs(1)).await;
            crowd.push(table.open(peer(2)));
        }
        let busy = crowd[0].busy();
        assert!(table.evict());
        assert!(
            crowd[1].close().now.is_cancelled(),
            "the oldest that is idle"
        );
        assert!(!crowd[0].close().now.is_cancelled() && !lone.close().now.is_cancelled());
        assert_eq!(table.count(), 3);
        drop(busy);
        drop(crowd);
        assert_eq!(table.count(), 1);
        let streams = lone.busy();
        assert!(!table.evict(), "all are busy");
        drop(streams);
        assert!(table.evict());
        drop(lone);
        assert_eq!(table.count(), 0);
        assert!(table.lock().by_address.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn idle_ones_are_ended_and_busy_ones_never() {
        let table = Connections::default();
        let (silent, served, stream) = (
            table.open(peer(1)),
            table.open(peer(1)),
            table.open(peer(1)),
        );
        drop(served.busy());
        stream.upgraded();
        let sweep = || table.sweep(Duration::from_secs(30), Duration::from_secs(90));
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(sweep(), (1, 0));
        assert!(silent.close().politely.is_cancelled());
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!((sweep(), sweep()), ((0, 1), (0, 0)), "each is told once");
        assert!(served.close().politely.is_cancelled());
        assert!(!stream.close().politely.is_cancelled());
    }

    #[tokio::test]
    async fn a_socket_holds_its_slot() {
        let table = Connections::default();
        let socket = Counted::new(tokio::io::empty(), table.open(peer(1)));
        assert_eq!(table.count(), 1);
        drop(socket);
        assert_eq!(table.count(), 0);
    }
}

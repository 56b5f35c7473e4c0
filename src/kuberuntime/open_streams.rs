//! The streams that clients have open to containers and sandboxes: attach, exec, port-forward.
//!
//! In: the server opens streams; [`super::kill`] says when what they go to is being stopped, and has ended. Out: each
//! stream is notified when to end. A container runtime hands out a container's output and reports its end one after the
//! other, so a client that does not read would hold the end.
//!
//! **Invariant:** there is an entry only while a stream or a stop is under way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use crate::types::ContainerId;

/// Lifetime that remains for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Until one of its sides ends it.
    TheyEnd,
    /// The container or sandbox has ended. The stream stays open while a client reads the remaining data.
    Delivered,
    /// Not any longer.
    Now,
}

/// The open streams of one runtime, by the container or sandbox that they go to. Cheap to clone; clones share them.
#[derive(Clone, Debug, Default)]
pub struct OpenStreams(Arc<Mutex<HashMap<ContainerId, Entry>>>);

#[derive(Debug)]
struct Entry {
    until: watch::Sender<Until>,
    /// Streams and stops under way.
    holders: usize,
}

/// Keeps an entry.
#[derive(Debug)]
struct Hold {
    streams: OpenStreams,
    id: ContainerId,
}

/// One open stream.
#[derive(Debug)]
pub struct OpenStream {
    until: watch::Receiver<Until>,
    _hold: Hold,
}

/// A stop under way. Until this is dropped, a stream that is opened gets the same notice as those before it.
#[derive(Debug)]
pub struct Stopping(Hold);

impl OpenStreams {
    /// Registers a stream to a container or sandbox.
    pub fn open(&self, id: &ContainerId) -> OpenStream {
        let (until, hold) = self.hold(id);
        OpenStream { until, _hold: hold }
    }

    /// Registers a stop.
    pub fn stopping(&self, id: &ContainerId) -> Stopping {
        Stopping(self.hold(id).1)
    }

    fn hold(&self, id: &ContainerId) -> (watch::Receiver<Until>, Hold) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.entry(id.clone()).or_insert_with(|| Entry {
            until: watch::channel(Until::TheyEnd).0,
            holders: 0,
        });
        entry.holders += 1;
        let hold = Hold {
            streams: self.clone(),
            id: id.clone(),
        };
        (entry.until.subscribe(), hold)
    }
}

impl Stopping {
    /// Reports that the container or sandbox has ended. Its streams end when everything is delivered.
    pub fn ended(&self) {
        self.tell(Until::Delivered);
    }

    /// Ends the streams.
    pub fn cut(&self) {
        self.tell(Until::Now);
    }

    fn tell(&self, new: Until) {
        let entries = self.0.streams.0.lock();
        let entries = entries.unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get(&self.0.id) {
            // A stream that was told to end at once has nothing to deliver any more.
            entry.until.send_if_modified(|until| {
                let goes_on = *until != Until::Now && *until != new;
                if goes_on {
                    *until = new;
                }
                goes_on
            });
        }
    }
}

impl OpenStream {
    /// Waits until what the stream goes to has ended, or the stream has to. Cancel-safe.
    pub async fn closing(&self) -> Until {
        self.wait_for(|until| *until != Until::TheyEnd).await
    }

    /// Waits until the stream has to end. Cancel-safe.
    pub async fn cut(&self) {
        self.wait_for(|until| *until == Until::Now).await;
    }

    async fn wait_for(&self, condition: impl FnMut(&Until) -> bool) -> Until {
        let mut until = self.until.clone();
        match until.wait_for(condition).await {
            Ok(until) => *until,
            // The entry is kept as long as this is.
            Err(_) => Until::Now,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let entries = self.streams.0.lock();
        let mut entries = entries.unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get_mut(&self.id) {
            entry.holders -= 1;
            if entry.holders == 0 {
                entries.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn streams_of_what_is_stopped_end_and_no_others() {
        let streams = OpenStreams::default();
        let (stopped, other) = (ContainerId::new("stopped"), ContainerId::new("other"));
        let before = streams.open(&stopped);
        let others = streams.open(&other);
        let stopping = streams.stopping(&stopped);
        assert_eq!(before.closing().now_or_never(), None, "it has its grace");
        stopping.cut();
        stopping.ended();
        let after = streams.open(&stopped);
        for stream in [&before, &after] {
            assert_eq!(stream.closing().now_or_never(), Some(Until::Now));
            assert_eq!(stream.cut().now_or_never(), Some(()));
        }
        assert_eq!(others.closing().now_or_never(), None);
    }

    #[test]
    fn streams_of_what_has_ended_may_deliver() {
        let streams = OpenStreams::default();
        let id = ContainerId::new("c");
        let stream = streams.open(&id);
        let stopping = streams.stopping(&id);
        stopping.ended();
        drop(stopping);
        assert_eq!(stream.closing().now_or_never(), Some(Until::Delivered));
        assert_eq!(stream.cut().now_or_never(), None);
    }

    #[test]
    fn nothing_is_kept_of_what_is_over() {
        let streams = OpenStreams::default();
        let id = ContainerId::new("c");
        let (stream, stopping) = (streams.open(&id), streams.stopping(&id));
        stopping.cut();
        drop((stream, stopping));
        assert!(streams.0.lock().unwrap().is_empty());
        assert_eq!(streams.open(&id).closing().now_or_never(), None);
    }
}

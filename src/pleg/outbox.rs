//! Events for the sync loop. Those that its channel has no room for wait here.

use std::collections::{BTreeMap, VecDeque};

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::core::pleg_diff::PodLifecycleEvent;
use crate::types::PodUid;

/// Sending end of the channel. Holds at most one event of each kind for a pod, so nothing has to be dropped.
pub(super) struct Outbox {
    channel: mpsc::Sender<PodLifecycleEvent>,
    waiting: BTreeMap<PodUid, VecDeque<PodLifecycleEvent>>,
}

impl Outbox {
    pub(super) fn new(channel: mpsc::Sender<PodLifecycleEvent>) -> Self {
        Self {
            channel,
            waiting: BTreeMap::new(),
        }
    }

    /// Sends an event now, or by [`Self::flush`] when there is room. Returns `false` when the sync loop has ended. Never
    /// blocks.
    pub(super) fn send(&mut self, event: PodLifecycleEvent) -> bool {
        if let Some(of_pod) = self.waiting.get_mut(&event.pod) {
            // A hint like one that waits adds nothing.
            if of_pod.iter().all(|waiting| waiting.kind != event.kind) {
                of_pod.push_back(event);
            }
            return true;
        }
        match self.channel.try_send(event) {
            Ok(()) => true,
            Err(TrySendError::Full(event)) => {
                let of_pod = self.waiting.entry(event.pod.clone());
                of_pod.or_default().push_back(event);
                true
            }
            Err(TrySendError::Closed(_)) => false,
        }
    }

    /// Sends the waiting events as there is room for them. Never returns. Cancel-safe: an event is taken in the poll that
    /// sends it.
    pub(super) async fn flush(&mut self) {
        while !self.waiting.is_empty() {
            let Ok(room) = self.channel.reserve().await else {
                // The sync loop has ended.
                self.waiting.clear();
                break;
            };
            let Some(mut of_pod) = self.waiting.first_entry() else {
                break;
            };
            if let Some(event) = of_pod.get_mut().pop_front() {
                room.send(event);
            }
            if of_pod.get().is_empty() {
                of_pod.remove();
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;
    use crate::core::pleg_diff::PodLifecycleEventKind::{self as Kind, ContainerDied, SandboxDied};

    fn event(pod: &str, kind: Kind, id: &str) -> PodLifecycleEvent {
        PodLifecycleEvent {
            pod: pod.into(),
            kind,
            id: id.into(),
        }
    }

    #[tokio::test]
    async fn events_of_a_pod_wait_for_room_in_order_and_once_for_each_kind() {
        let (channel, mut received) = mpsc::channel(1);
        let mut outbox = Outbox::new(channel);
        let sent = [
            event("a", ContainerDied, "1"),
            event("b", SandboxDied, "s"),
            event("b", ContainerDied, "2"),
        ];
        for event in sent.clone() {
            assert!(outbox.send(event));
        }
        assert!(outbox.send(event("b", ContainerDied, "3")));
        for expected in sent {
            assert_eq!(received.recv().await, Some(expected));
            assert!(outbox.flush().now_or_never().is_none());
        }
        assert!(received.try_recv().is_err());
        drop(received);
        assert!(!outbox.send(event("a", ContainerDied, "4")));
    }
}

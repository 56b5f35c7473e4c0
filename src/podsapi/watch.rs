//! Watches: the pods as they are, then each change.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;

use super::proto::{EventType, WatchPodsEvent};
use super::{PodsApi, ShownPod};
use crate::types::PodUid;

/// Time between two comparisons of a watch. They read memory alone.
const INTERVAL: Duration = Duration::from_millis(500);

/// The events of a watch.
pub(super) type Events = Pin<Box<dyn Stream<Item = Result<WatchPodsEvent, Status>> + Send>>;

struct Watch {
    api: PodsApi,
    sent: BTreeMap<PodUid, ShownPod>,
    queue: VecDeque<Change>,
    _slot: OwnedSemaphorePermit,
}

enum Change {
    Pod(EventType, ShownPod),
    Synced,
}

impl Change {
    fn event(self) -> Result<WatchPodsEvent, Status> {
        let (kind, pod) = match self {
            Self::Synced => (EventType::InitialSyncComplete, Vec::new()),
            Self::Pod(EventType::Deleted, pod) => (EventType::Deleted, pod.identity()?),
            Self::Pod(kind, pod) => (kind, pod.bytes()?),
        };
        Ok(WatchPodsEvent {
            r#type: kind.into(),
            pod,
        })
    }
}

/// Starts a watch.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when there are too many.
pub(super) fn start(api: PodsApi) -> Result<Events, Status> {
    let slot = std::sync::Arc::clone(&api.watches).try_acquire_owned();
    let slot = slot.map_err(|_| Status::resource_exhausted("too many watches"))?;
    let sent = api.by_uid();
    let added = sent.values().cloned();
    let mut queue: VecDeque<_> = added
        .map(|pod| Change::Pod(EventType::Added, pod))
        .collect();
    queue.push_back(Change::Synced);
    let watch = Watch {
        api,
        sent,
        queue,
        _slot: slot,
    };
    Ok(Box::pin(futures::stream::unfold(watch, Watch::next)))
}

impl Watch {
    /// Waits for the next event; `None` when the agent ends.
    async fn next(mut self) -> Option<(Result<WatchPodsEvent, Status>, Self)> {
        loop {
            if let Some(change) = self.queue.pop_front() {
                return Some((change.event(), self));
            }
            tokio::select! {
                () = self.api.stop.cancelled() => return None,
                () = tokio::time::sleep(INTERVAL) => {}
            }
            let now = self.api.by_uid();
            self.queue = changes(&self.sent, &now).into();
            self.sent = now;
        }
    }
}

/// The changes that lead from one state to another: what is gone first, as a new pod may have the name of an old one.
fn changes(before: &BTreeMap<PodUid, ShownPod>, now: &BTreeMap<PodUid, ShownPod>) -> Vec<Change> {
    let gone = before.iter().filter(|(uid, _)| !now.contains_key(*uid));
    let gone = gone.map(|(_, pod)| Change::Pod(EventType::Deleted, pod.clone()));
    let changed = now.iter().filter_map(|(uid, pod)| {
        let kind = match before.get(uid) {
            None => EventType::Added,
            Some(old) if !old.is_same(pod) => EventType::Modified,
            Some(_) => return None,
        };
        Some(Change::Pod(kind, pod.clone()))
    });
    gone.chain(changed).collect()
}

//! Requests for inspections of single pods, from any component: one for each pod, however often it is requested.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::types::PodUid;

/// Shared handle. Holds no more than there are pods, so nothing has to be dropped.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    pods: Mutex<BTreeSet<PodUid>>,
    more: Notify,
}

impl Requests {
    /// Requests an inspection of a pod that begins after this call. Never blocks.
    pub(super) fn add(&self, uid: &PodUid) {
        if self.pods().insert(uid.clone()) {
            self.0.more.notify_one();
        }
    }

    /// Waits for requests and takes all there are. Cancel-safe: they are taken in the poll that returns them.
    pub(super) async fn take(&self) -> BTreeSet<PodUid> {
        loop {
            let pods = std::mem::take(&mut *self.pods());
            if !pods.is_empty() {
                return pods;
            }
            self.0.more.notified().await;
        }
    }

    fn pods(&self) -> MutexGuard<'_, BTreeSet<PodUid>> {
        self.0.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_pod_that_is_asked_for_often_is_handed_out_once() {
        let requests = Requests::default();
        for n in 0..1000 {
            requests.add(&PodUid::from(format!("u{}", n % 500)));
        }
        assert_eq!(requests.take().await.len(), 500);
        // What was asked for again, after it was taken, is asked for anew.
        requests.add(&PodUid::from("u1"));
        assert_eq!(requests.take().await.len(), 1);
    }
}

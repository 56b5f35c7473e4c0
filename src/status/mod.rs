//! Layer 4: the status manager. Owns the `statuses` table: the newest API status of each pod, its version,
//! the version the API server acknowledged, and whether the pod is finished on this node; and the `mirrors`
//! table. Upstream: `status.Manager` and `pod.MirrorClient`.
//!
//! The input is the statuses computed by a pod's worker, and the pods of the API server as the sync loop sees them. The
//! output is the record, and from it, by the [`Syncer`], the status of the pod in the API server and the last step of a
//! graceful deletion; [`Mirrors`] keeps the mirror pods of static pods.
//!
//! **Invariants:** a terminated container never becomes non-terminated unless it may restart, `startTime` never
//! changes, a version grows exactly when the status differs. A status that the API server has not acknowledged is
//! stored, so that neither an outage nor a restart loses it.

mod mirror;
mod queue;
mod shared;
mod syncer;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tracing::{debug, warn};

use crate::core::pod_status;
use crate::core::state::{StatusRecord, Transaction};
use crate::store::{CommitError, Store};
use crate::types::{Clock, PodExt, PodUid};
pub use mirror::{Mirrors, Spoken};
pub use shared::Observed;
use shared::Shared;
pub use syncer::Syncer;

/// A status could not be recorded.
#[derive(Debug, thiserror::Error)]
#[error("commit status of pod {uid}")]
pub struct StatusError {
    uid: PodUid,
    #[source]
    source: CommitError,
}

/// Mode in which a status is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitMode {
    /// Refused while the store is degraded.
    Normal,
    /// Part of a stop: held in memory while the store is degraded.
    Stop,
}

/// Shared handle.
#[derive(Clone)]
pub struct StatusManager {
    store: Store,
    clock: Arc<dyn Clock>,
    shared: Arc<Shared>,
}

impl StatusManager {
    /// A manager over `store`.
    pub fn new(store: Store, clock: Arc<dyn Clock>) -> Self {
        Self {
            store,
            clock,
            shared: Arc::default(),
        }
    }

    /// Takes a pod or mirror pod as the API source shows it: to be called for each one it adds, updates, deletes,
    /// reconciles or removes, after the update of the pod manager. Never waits.
    pub fn observed(&self, observed: Observed) {
        self.shared.observe(observed);
    }

    /// Waits for pods whose workers have to compute the status anew, since the API server shows another one than an earlier
    /// run of the agent recorded. For one caller. Cancel-safe.
    pub async fn outdated(&self) -> BTreeSet<PodUid> {
        self.shared.take_outdated().await
    }

    /// Forgets a pod whose worker and records are gone.
    pub fn forget(&self, uid: &PodUid) {
        self.shared.forget(uid);
    }

    /// The newest status of a pod.
    pub fn get(&self, uid: &PodUid) -> Option<StatusRecord> {
        self.store
            .snapshot()
            .record::<StatusRecord>(uid.as_str())
            .cloned()
    }

    /// Records a status if it differs from the last one. Returns whether it did. A terminal status is
    /// durable when this returns. Cancel-safe. Upstream: `SetPodStatus`.
    ///
    /// # Errors
    /// When the store refuses the commit.
    pub async fn set(
        &self,
        pod: &Pod,
        status: PodStatus,
        mode: CommitMode,
    ) -> Result<bool, StatusError> {
        self.update(pod, status, false, mode).await
    }

    /// Says that nothing of the pod is left on this node. Upstream: `TerminatePod` together with
    /// `PodIsFinished`.
    ///
    /// # Errors
    /// When the store refuses the commit.
    pub async fn terminate(
        &self,
        pod: &Pod,
        status: PodStatus,
        mode: CommitMode,
    ) -> Result<bool, StatusError> {
        self.update(pod, status, true, mode).await
    }

    async fn update(
        &self,
        pod: &Pod,
        status: PodStatus,
        finished: bool,
        mode: CommitMode,
    ) -> Result<bool, StatusError> {
        let changed = self.commit(pod, status, finished, mode).await?;
        self.shared.computed(&pod.uid(), pod.is_static(), changed);
        Ok(changed)
    }

    async fn commit(
        &self,
        pod: &Pod,
        status: PodStatus,
        finished: bool,
        mode: CommitMode,
    ) -> Result<bool, StatusError> {
        let uid = pod.uid();
        let mut queued = false;
        loop {
            let state = self.store.snapshot();
            let old = state.record::<StatusRecord>(uid.as_str());
            let merged =
                match pod_status::merge_for_update(pod, old.map(|r| &*r.status), status.clone()) {
                    Ok(merged) => merged,
                    Err(error) => {
                        warn!(pod = %uid, %error, "status refused");
                        None
                    }
                };
            let was_finished = old.is_some_and(|r| r.finished);
            let Some(next) = merged.map_or_else(
                || {
                    (finished && !was_finished).then(|| match old {
                        Some(old) => old.clone(),
                        None => self.record(pod, status.clone(), 0),
                    })
                },
                |merged| Some(self.record(pod, merged, old.map_or(0, |r| r.version))),
            ) else {
                return Ok(queued);
            };
            let next = StatusRecord {
                finished: finished || was_finished,
                acknowledged: old.map_or(0, |r| r.acknowledged),
                ..next
            };
            let transaction = Transaction::new()
                .expect::<StatusRecord>(&state, uid.as_str())
                .put(uid.as_str(), next);
            let answer = match mode {
                CommitMode::Normal => self.store.commit(transaction).await.map(drop),
                CommitMode::Stop => self.store.commit_or_hold(transaction).await.map(drop),
            };
            match answer {
                // It waits in the queue of a disk that hangs, and may be refused there. That a pod is finished is said once,
                // by a worker that then ends; nothing is left to be stopped that could not wait.
                Ok(()) if finished && !self.is_finished(&uid) => {
                    queued = true;
                    // An empty commit has its answer after everything that was queued before it.
                    let passed = self.store.commit(Transaction::new()).await;
                    passed.map_err(|source| StatusError {
                        uid: uid.clone(),
                        source,
                    })?;
                }
                Ok(()) => return Ok(true),
                Err(CommitError::Stale { .. }) => {
                    debug!(pod = %uid, "status changed meanwhile, merging again");
                }
                Err(source) => return Err(StatusError { uid, source }),
            }
        }
    }

    fn is_finished(&self, uid: &PodUid) -> bool {
        self.get(uid).is_some_and(|record| record.finished)
    }

    fn record(&self, pod: &Pod, status: PodStatus, version: u64) -> StatusRecord {
        StatusRecord {
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            status: crate::types::Json::new(status),
            version: version + 1,
            acknowledged: 0,
            at: self.clock.now(),
            finished: false,
        }
    }
}

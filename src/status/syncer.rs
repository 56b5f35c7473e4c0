//! Patches the statuses of pods in the API server. Upstream: `syncPod` and `syncBatch` of the status manager.
//!
//! In: wakes from [`Shared`], and once at the start the statuses that were not acknowledged. Out: patches of
//! `pods/<name>/status` with a UID precondition, the final DELETE of a graceful deletion, and `acknowledged`.
//!
//! A pod is handled when its status or the pod in the API server changed, never because time passed. The patch is the
//! difference between the newest status and the newest pod of the API server: nothing is sent when nothing differs, and
//! a pod is read only when this agent has not seen it since it started.
//!
//! **Invariants:** at most one request per pod and eight in all are in flight; the newest version wins;
//! what was not acknowledged is tried again until the pod is gone; a pod is deleted only after its terminal status
//! was acknowledged.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::StatusManager;
use super::queue::Queue;
use super::shared::{Shared, Wake};
use crate::apiserver::{ApiClient, Failure};
use crate::core::pod_status::is_terminal;
use crate::core::state::{
    EpochReason, State, StatusRecord, Transaction, WorkerPhase, WorkerRecord,
};
use crate::core::status_patch::{PatchInput, is_withheld, status_patch};
use crate::pod_manager::PodManager;
use crate::store::CommitError;
use crate::types::metrics::Metrics;
use crate::types::{PodExt, PodUid};

/// Interval at which pods that wait for something else are checked again.
const CATCH_UP: Duration = Duration::from_secs(10);
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);

/// Reason for which the status of a pod could not be sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyncError {
    #[error("{verb} {namespace}/{name}")]
    Request {
        verb: &'static str,
        namespace: String,
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("{verb} {namespace}/{name}: no answer within 30 s")]
    Timeout {
        verb: &'static str,
        namespace: String,
        name: String,
    },
    #[error("commit that the API server acknowledged the status of pod {uid}")]
    Commit {
        uid: PodUid,
        #[source]
        source: CommitError,
    },
}

impl SyncError {
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Request { source, .. } => Failure::of(source),
            Self::Timeout { .. } | Self::Commit { .. } => Failure::Transient,
        }
    }
}

/// Next step after a pod was handled.
#[derive(Debug)]
pub(super) enum Next {
    /// Nothing until it changes.
    Done,
    /// Check again in a second.
    Hold,
    /// Check again in [`CATCH_UP`], or when it changes.
    Park,
    /// Try again.
    Failed(SyncError),
}

/// Task that patches the API server. Made by [`StatusManager::syncer`].
pub struct Syncer {
    api: ApiClient,
    status: StatusManager,
    pods: PodManager,
    metrics: Metrics,
    /// Pods that the API server does not have any more though the source has not shown it yet, with the last known
    /// version: when another version is shown after all, their status is sent again.
    gone: Mutex<HashMap<PodUid, Option<String>>>,
}

impl StatusManager {
    /// Makes the task that patches the API server; there is to be one at most, made before the first worker runs.
    pub fn syncer(&self, api: ApiClient, pods: PodManager, metrics: Metrics) -> Syncer {
        self.shared.attach();
        Syncer {
            api,
            status: self.clone(),
            pods,
            metrics,
            gone: Mutex::default(),
        }
    }
}

impl Syncer {
    /// Works until `token` is cancelled. A request that is cut off then is found to have had its effect, or is
    /// sent again, after the next start.
    pub async fn run(self, token: CancellationToken) {
        let mut queue = Queue::default();
        for uid in self.left_over() {
            queue.add(uid);
        }
        let mut jobs = FuturesUnordered::new();
        let mut tick = tokio::time::interval(CATCH_UP);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            queue.connection(&self.api.connection().now());
            while let Some((uid, held)) = queue.start(Instant::now()) {
                let this = &self;
                jobs.push(async move {
                    let next = this.sync_one(&uid, held).await;
                    (uid, next)
                });
            }
            let due = queue.next_due();
            tokio::select! {
                () = token.cancelled() => return,
                () = self.shared().woken() => self.take_wakes(&mut queue),
                Some((uid, next)) = jobs.next() => queue.finish(&uid, next),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
                () = self.api.connection().changed() => {}
                _ = tick.tick() => {
                    self.shared().take_behind();
                    queue.unpark();
                }
            }
        }
    }

    fn shared(&self) -> &Shared {
        &self.status.shared
    }

    /// Statuses that were not acknowledged before this start, and graceful deletions that lack their last step.
    fn left_over(&self) -> Vec<PodUid> {
        let state = self.status.store.snapshot();
        let mut left = Vec::new();
        for (key, versioned) in &state.statuses {
            let record = &versioned.record;
            let uid = PodUid::new(key);
            let unsent = record.version > record.acknowledged;
            if unsent || record.finished && self.pods.get(&uid).is_some_and(|p| p.is_deleting()) {
                left.push(uid);
            }
        }
        left
    }

    fn take_wakes(&self, queue: &mut Queue) {
        for wake in self.shared().take() {
            match wake {
                Wake::Status(uid) => queue.add(uid),
                Wake::Api(uid) => {
                    let mirror = self.shared().api_pod(&uid).filter(|p| p.is_mirror());
                    match mirror {
                        None => queue.add(uid),
                        Some(mirror) => {
                            if let Some(pod) = self.pods.pod_of_mirror(&mirror) {
                                queue.add(pod.uid());
                            }
                        }
                    }
                }
                Wake::Gone(uid) => {
                    self.gone().remove(&uid);
                    queue.remove(&uid);
                }
            }
        }
    }

    fn gone(&self) -> MutexGuard<'_, HashMap<PodUid, Option<String>>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_gone(&self, uid: &PodUid) -> bool {
        let shown = self.shared().api_pod(uid);
        match self.gone().get(uid) {
            Some(known) => shown.is_none_or(|pod| pod.metadata.resource_version == *known),
            None => false,
        }
    }

    fn mark_gone(&self, uid: &PodUid) {
        if self.shared().went(uid) {
            // The source was faster, and does not say so again.
            return;
        }
        let shown = self.shared().api_pod(uid);
        let version = shown.and_then(|pod| pod.metadata.resource_version.clone());
        self.gone().insert(uid.clone(), version);
    }

    fn tell_gone(&self, pod: &Pod, uid: &PodUid) {
        self.mark_gone(uid);
        info!(pod = %uid, name = pod.name(), namespace = pod.namespace(),
            "the pod is gone from the API server, dropping its status");
    }

    async fn sync_one(&self, uid: &PodUid, held: bool) -> Next {
        match self.try_sync(uid, held).await {
            Ok(next) => next,
            Err(error) => Next::Failed(error),
        }
    }

    async fn try_sync(&self, uid: &PodUid, held: bool) -> Result<Next, SyncError> {
        let state = self.status.store.snapshot();
        let Some(record) = state.record::<StatusRecord>(uid.as_str()) else {
            self.shared().forget(uid);
            return Ok(Next::Done);
        };
        // A pod that no source wants any more is gone from the API server, too.
        let Some(pod) = self.pods.get(uid) else {
            return Ok(Next::Done);
        };
        if !self.may_be_told(&state, uid, record) {
            return Ok(Next::Park);
        }
        // A mirror pod wakes its static pod.
        let Some(api_uid) = self.api_uid(&pod).filter(|uid| !self.is_gone(uid)) else {
            return Ok(Next::Done);
        };
        let known = self.shared().api_pod(&api_uid);
        if known.is_none() && !held {
            return Ok(Next::Hold);
        }
        let mut fresh = known.is_none();
        let mut shown = match known {
            Some(pod) => pod,
            None => match self.read(&pod, &api_uid).await? {
                Some(pod) => pod,
                None => return Ok(Next::Done),
            },
        };
        let may_run = !record.finished && may_run(&state, uid);
        loop {
            let input = PatchInput {
                uid: api_uid.as_str(),
                pod: &shown,
                shown: shown.status.as_ref(),
                ours: &record.status,
                has_ephemeral: !shown.ephemeral_containers().is_empty(),
                may_run,
            };
            let withheld = is_withheld(&input);
            if withheld && !held {
                return Ok(Next::Hold);
            }
            let Some(patch) = status_patch(&input) else {
                return self.synced(uid, record, withheld, &pod, &shown).await;
            };
            // Before a crash the API server may have been told more than what reached the disk.
            if record.version <= record.acknowledged
                && !record.finished
                && !self.shared().is_computed(uid)
            {
                self.shared().add_outdated(uid);
                return Ok(Next::Park);
            }
            match self.patch(&shown, &patch).await {
                Ok(answer) => return self.synced(uid, record, withheld, &pod, &answer).await,
                Err(error) => match error.failure() {
                    Failure::NotFound => {
                        self.tell_gone(&pod, &api_uid);
                        return Ok(Next::Done);
                    }
                    // Another pod of that name, or a difference from something that is not so any more.
                    Failure::Conflict | Failure::Refused if !fresh => {
                        self.shared().doubt(&api_uid);
                        match self.read(&pod, &api_uid).await? {
                            Some(pod) => shown = pod,
                            None => return Ok(Next::Done),
                        }
                        fresh = true;
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    /// The UID that a pod has in the API server; `None` for a static pod without a mirror pod.
    fn api_uid(&self, pod: &Pod) -> Option<PodUid> {
        match pod.is_static() {
            true => self.pods.mirror_of(pod).map(|mirror| mirror.uid()),
            false => Some(pod.uid()),
        }
    }

    /// Records that the API server has the status of a pod, unless a part was `withheld`, and deletes a pod whose graceful
    /// deletion is over. `shown` is the pod in the API server.
    async fn synced(
        &self,
        uid: &PodUid,
        record: &StatusRecord,
        withheld: bool,
        pod: &Pod,
        shown: &Pod,
    ) -> Result<Next, SyncError> {
        if withheld {
            return Ok(Next::Park);
        }
        if record.version > record.acknowledged {
            self.acknowledge(uid, record.version).await?;
            let since = self.status.clock.now().since(record.at);
            let metrics = &self.metrics;
            metrics
                .pod_status_sync_duration
                .observe(since.as_secs_f64());
        }
        if record.finished
            && !pod.is_static()
            && !shown.is_mirror()
            && shown.is_deleting()
            && is_terminal(&record.status)
        {
            self.delete(shown).await?;
        }
        Ok(Next::Done)
    }

    /// Returns whether a status may be sent. One from a backup, or from the store of another machine, may be older than
    /// the one of the API server: it has to be computed anew first. The status of a finished pod does not change any
    /// more.
    fn may_be_told(&self, state: &State, uid: &PodUid, record: &StatusRecord) -> bool {
        let Some(meta) = state.meta() else {
            return true;
        };
        meta.epoch.reason == EpochReason::Fresh
            || record.finished
            || meta.epoch.since.since(record.at).is_zero()
            || self.shared().is_computed(uid)
    }

    fn pods_of(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.api.kube(), pod.namespace())
    }

    /// The pod as the API server has it, `None` when it is gone or another one has its name.
    async fn read(&self, pod: &Pod, uid: &PodUid) -> Result<Option<Arc<Pod>>, SyncError> {
        let api = self.pods_of(pod);
        let found = match answer("get pod", pod, api.get(pod.name())).await {
            Ok(found) => found,
            Err(error) if error.failure() == Failure::NotFound => {
                self.tell_gone(pod, uid);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if found.uid() != *uid {
            self.mark_gone(uid);
            info!(pod = %uid, other = %found.uid(), name = pod.name(), namespace = pod.namespace(),
                "another pod has the name now, dropping the status of the old one");
            return Ok(None);
        }
        Ok(Some(self.keep(found)))
    }

    async fn patch(&self, pod: &Pod, patch: &serde_json::Value) -> Result<Arc<Pod>, SyncError> {
        let api = self.pods_of(pod);
        let parameters = PatchParams::default();
        let patch = Patch::Strategic(patch);
        let request = api.patch_status(pod.name(), &parameters, &patch);
        let told = answer("patch status of pod", pod, request).await?;
        debug!(pod = %told.uid(), name = pod.name(), namespace = pod.namespace(), "pod status sent");
        Ok(self.keep(told))
    }

    /// Remembers an answer until the source has shown it, or something newer.
    fn keep(&self, mut pod: Pod) -> Arc<Pod> {
        pod.metadata.managed_fields = None;
        let pod = Arc::new(pod);
        self.shared().answered(Arc::clone(&pod));
        pod
    }

    /// The last step of a graceful deletion.
    async fn delete(&self, pod: &Pod) -> Result<(), SyncError> {
        let uid = pod.uid();
        let api = self.pods_of(pod);
        let parameters = DeleteParams::default()
            .grace_period(0)
            .preconditions(Preconditions {
                uid: Some(uid.to_string()),
                resource_version: None,
            });
        match answer("delete pod", pod, api.delete(pod.name(), &parameters)).await {
            Ok(_) => {
                info!(pod = %uid, name = pod.name(), namespace = pod.namespace(), "pod deleted from the API server");
            }
            // Somebody was faster.
            Err(error) if matches!(error.failure(), Failure::NotFound | Failure::Conflict) => {
                debug!(pod = %uid, name = pod.name(), namespace = pod.namespace(), "pod was gone already");
            }
            Err(error) => return Err(error),
        }
        self.mark_gone(&uid);
        Ok(())
    }

    async fn acknowledge(&self, uid: &PodUid, version: u64) -> Result<(), SyncError> {
        loop {
            let state = self.status.store.snapshot();
            let Some(record) = state.record::<StatusRecord>(uid.as_str()) else {
                return Ok(());
            };
            // A lower version is the record of a static pod's next life, of which nothing was sent yet.
            if record.acknowledged >= version || record.version < version {
                return Ok(());
            }
            let next = StatusRecord {
                acknowledged: version,
                ..record.clone()
            };
            let transaction = Transaction::new()
                .expect::<StatusRecord>(&state, uid.as_str())
                .put(uid.as_str(), next);
            match self.status.store.commit(transaction).await {
                Ok(_) => return Ok(()),
                Err(CommitError::Stale { .. }) => {}
                Err(source) => {
                    let uid = uid.clone();
                    return Err(SyncError::Commit { uid, source });
                }
            }
        }
    }
}

/// Returns whether a pod's worker has not yet recorded that nothing runs any more.
fn may_run(state: &State, uid: &PodUid) -> bool {
    state
        .record::<WorkerRecord>(uid.as_str())
        .is_some_and(|worker| {
            matches!(
                worker.phase,
                WorkerPhase::Sync | WorkerPhase::Terminating { .. }
            )
        })
}

/// Waits for an answer, but not for ever.
async fn answer<T>(
    verb: &'static str,
    pod: &Pod,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, SyncError> {
    let (namespace, name) = (pod.namespace().to_owned(), pod.name().to_owned());
    match tokio::time::timeout(ANSWER, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(SyncError::Request {
            verb,
            namespace,
            name,
            source: Box::new(source),
        }),
        Err(_) => Err(SyncError::Timeout {
            verb,
            namespace,
            name,
        }),
    }
}

#[cfg(test)]
mod tests;

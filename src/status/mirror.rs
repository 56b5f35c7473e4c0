//! Mirror pods: the API server's view of the pods that come from files and URLs. Upstream: `pod.MirrorClient`,
//! `tryReconcileMirrorPods` and `deleteOrphanedMirrorPods`.
//!
//! The input is the static pods of the pod manager, the mirror pods that the API source has shown, and this node's
//! object. Missing mirror pods are made, orphans are deleted, and the `mirrors` table lists the existing ones. Nothing
//! is done before the API source has synced: a mirror pod that was not seen yet is not missing. Orphans are left alone
//! until every source has synced: a static pod that was not read yet is not gone.
//!
//! **Invariants:** a mirror pod is deleted with its UID as a precondition only; it is an orphan only when neither a
//! source wants its static pod nor a worker is still stopping it. When a static pod follows another of its name, its
//! mirror pod is made, and the previous mirror pod is deleted, once the previous static pod is over.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::StatusManager;
use crate::apiserver::{ApiClient, Failure, Reachability, pause};
use crate::core::state::{MirrorRecord, PodRecord, Transaction, WorkerPhase, WorkerRecord};
use crate::core::volumes::sha256_hex;
use crate::node_object::NodeObject;
use crate::pod_manager::PodManager;
use crate::store::CommitError;
use crate::types::pod::{CONFIG_HASH, CONFIG_MIRROR, CONFIG_SEEN, MIRROR_DIGEST};
use crate::types::{FullName, PodExt, PodUid};

/// Interval at which everything is checked, without a change.
const CATCH_UP: Duration = Duration::from_secs(10);
/// Interval at which a mirror pod is checked whose static pod is still being stopped, as nothing reports the end.
const STOPPING: Duration = Duration::from_secs(1);
/// Time within which the API source has to show a new mirror pod.
const SHOWN: Duration = Duration::from_secs(60);
/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// First and longest pause after the server refused a mirror pod.
const REFUSED: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);

/// A mirror pod could not be made or deleted.
#[derive(Debug, thiserror::Error)]
enum MirrorError {
    #[error("{verb} mirror pod {pod}")]
    Request {
        verb: &'static str,
        pod: FullName,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("{verb} mirror pod {pod}: no answer within 30 s")]
    Timeout { verb: &'static str, pod: FullName },
    #[error(
        "create mirror pod {pod}: another pod has its name; delete that one or rename the static pod"
    )]
    NameTaken { pod: FullName },
    #[error("commit mirror pod {pod}")]
    Commit {
        pod: FullName,
        #[source]
        source: CommitError,
    },
}

impl MirrorError {
    fn failure(&self) -> Failure {
        match self {
            Self::Request { source, .. } => Failure::of(source),
            Self::NameTaken { .. } => Failure::Refused,
            Self::Timeout { .. } | Self::Commit { .. } => Failure::Transient,
        }
    }
}

/// Sources whose pods are known and handled by the sync loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spoken {
    /// The API server.
    pub api: bool,
    /// Every source.
    pub all: bool,
}

/// Keeps the mirror pods. Made by [`StatusManager::mirrors`].
pub struct Mirrors {
    api: ApiClient,
    status: StatusManager,
    pods: PodManager,
    node: NodeObject,
    spoken: Box<dyn Fn() -> Spoken + Send + Sync>,
    work: Work,
}

/// Operations under way, by full name.
#[derive(Default)]
struct Work {
    /// Mirror pods that were made and not shown yet.
    made: HashMap<FullName, (PodUid, Instant)>,
    /// Mirror pods that were deleted and may still be shown.
    deleted: HashSet<PodUid>,
    /// Failures in a row, and when it is tried again.
    failed: HashMap<FullName, (u32, Instant)>,
}

/// A static pod and its mirror pod, as far as there are any.
type Pair = (Option<Arc<Pod>>, Option<Arc<Pod>>);

/// Next operation for one full name.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Create,
    Delete,
    /// The mirror pod does not stand for the static pod (any more).
    Replace,
    /// The static pod that the mirror pod stands for is still being stopped, or was not read yet.
    Wait,
}

impl StatusManager {
    /// Makes the task that keeps the mirror pods; there is to be one at most, next to a [`super::Syncer`].
    pub fn mirrors(
        &self,
        api: ApiClient,
        pods: PodManager,
        node: NodeObject,
        spoken: impl Fn() -> Spoken + Send + Sync + 'static,
    ) -> Mirrors {
        self.shared.attach();
        Mirrors {
            api,
            status: self.clone(),
            pods,
            node,
            spoken: Box::new(spoken),
            work: Work::default(),
        }
    }

    /// Makes the mirror pods be checked soon, since the static pods may have changed. Never waits.
    pub fn wake_mirrors(&self) {
        self.shared.wake_mirrors();
    }
}

impl Mirrors {
    /// Works until `token` is cancelled; what is cut off then is found done, or done again, after the next start.
    pub async fn run(mut self, token: CancellationToken) {
        let shared = Arc::clone(&self.status.shared);
        let mut node = self.node.subscribe();
        loop {
            let next = tokio::select! {
                () = token.cancelled() => return,
                next = self.pass() => next,
            };
            tokio::select! {
                () = token.cancelled() => return,
                () = shared.mirrors_woken() => {}
                Ok(()) = node.changed(), if self.node.get().is_none() => {}
                () = tokio::time::sleep(next) => {}
            }
        }
    }

    /// Checks every static pod and mirror pod once. Returns the time of the next check at the latest.
    async fn pass(&mut self) -> Duration {
        let spoken = (self.spoken)();
        if !spoken.api {
            return STOPPING;
        }
        let mut names: BTreeMap<String, Pair> = BTreeMap::new();
        for pod in self.pods.all() {
            if pod.is_static() {
                let name = pod.full_name().to_string();
                names.entry(name).or_default().0 = Some(pod);
            }
        }
        let mut shown = HashSet::new();
        for mirror in self.status.shared.mirrors() {
            shown.insert(mirror.uid());
            if !self.work.deleted.contains(&mirror.uid()) {
                let entry = names.entry(mirror.full_name().to_string()).or_default();
                // Of two with the same name the older one is about to be shown as gone.
                let is_newer = entry.1.as_ref().is_none_or(|other| {
                    other.metadata.creation_timestamp <= mirror.metadata.creation_timestamp
                });
                if is_newer {
                    entry.1 = Some(mirror);
                }
            }
        }
        self.work.deleted.retain(|uid| shown.contains(uid));
        self.work
            .failed
            .retain(|name, _| names.contains_key(name.as_str()));
        let now = Instant::now();
        let gone = self.status.shared.take_gone_mirrors();
        self.work.made.retain(|_, (uid, at)| {
            let is_awaited = now.duration_since(*at) < SHOWN;
            is_awaited && !shown.contains(uid) && !gone.contains(uid)
        });
        let alive = self.alive();
        let mut next = CATCH_UP;
        for (name, (pod, mirror)) in names {
            let name = FullName::from(name);
            let lives = Lives {
                unread: !spoken.all,
                other: alive.get(&name).is_some_and(|uids| {
                    let own = pod.as_ref().map(|pod| pod.uid());
                    uids.iter().any(|uid| own.as_ref() != Some(uid))
                }),
            };
            let step = decide(pod.as_deref(), mirror.as_deref(), lives);
            if step == Step::Wait {
                next = next.min(STOPPING);
            }
            if let Some((_, until)) = self.work.failed.get(&name) {
                let left = until.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    next = next.min(left);
                    continue;
                }
            }
            match self
                .act(&name, &step, pod.as_deref(), mirror.as_deref())
                .await
            {
                Ok(()) => {
                    self.work.failed.remove(&name);
                }
                Err(error) => {
                    let pause = self.failed(&name, &error);
                    next = next.min(pause);
                }
            }
        }
        next
    }

    /// The static pods that are not over, by full name.
    fn alive(&self) -> HashMap<FullName, Vec<PodUid>> {
        let state = self.status.store.snapshot();
        let mut alive: HashMap<FullName, Vec<PodUid>> = HashMap::new();
        for (uid, worker) in &state.workers {
            let worker: &WorkerRecord = &worker.record;
            let is_static = (state.record::<PodRecord>(uid)).is_none_or(|p| p.source.is_static());
            let is_over = matches!(worker.phase, WorkerPhase::Finished { .. });
            if is_static && !is_over && !worker.runtime_only {
                let name = FullName::from(worker.full_name.as_str());
                alive.entry(name).or_default().push(PodUid::new(uid));
            }
        }
        alive
    }

    async fn act(
        &mut self,
        name: &FullName,
        step: &Step,
        pod: Option<&Pod>,
        mirror: Option<&Pod>,
    ) -> Result<(), MirrorError> {
        if let (Step::Delete | Step::Replace, Some(mirror)) = (step, mirror) {
            self.delete(name, mirror).await?;
        }
        if let (Step::Create | Step::Replace, Some(pod)) = (step, pod) {
            self.create(name, pod).await?;
        }
        if let (Step::Nothing, Some(mirror)) = (step, mirror) {
            self.record(name, Some(mirror)).await?;
        }
        Ok(())
    }

    async fn create(&mut self, name: &FullName, pod: &Pod) -> Result<(), MirrorError> {
        if self.work.made.contains_key(name) {
            return Ok(());
        }
        let Some(node) = self.node.get() else {
            debug!(pod = %name, "the node is unknown yet, its mirror pod waits");
            return Ok(());
        };
        if node.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let Some(wanted) = mirror_of(pod, &node) else {
            return Ok(());
        };
        let api: Api<Pod> = Api::namespaced(self.api.kube(), pod.namespace());
        let parameters = PostParams::default();
        let made = match answer("create", name, api.create(&parameters, &wanted)).await {
            Ok(made) => made,
            Err(error) if error.failure() == Failure::Conflict => {
                let there = answer("get", name, api.get(pod.name())).await?;
                if hash_of_mirror(&there) != hash_of(pod) {
                    let pod = name.clone();
                    return Err(MirrorError::NameTaken { pod });
                }
                there
            }
            Err(error) => return Err(error),
        };
        info!(pod = %name, uid = %made.uid(), "mirror pod made");
        let made_at = (made.uid(), Instant::now());
        self.work.made.insert(name.clone(), made_at);
        self.record(name, Some(&made)).await
    }

    async fn delete(&mut self, name: &FullName, mirror: &Pod) -> Result<(), MirrorError> {
        let api: Api<Pod> = Api::namespaced(self.api.kube(), mirror.namespace());
        let parameters = DeleteParams::default()
            .grace_period(0)
            .preconditions(Preconditions {
                uid: Some(mirror.uid().to_string()),
                resource_version: None,
            });
        match answer("delete", name, api.delete(mirror.name(), &parameters)).await {
            Ok(_) => info!(pod = %name, uid = %mirror.uid(), "mirror pod deleted"),
            Err(error) if matches!(error.failure(), Failure::NotFound | Failure::Conflict) => {
                debug!(pod = %name, uid = %mirror.uid(), "mirror pod was gone already");
            }
            Err(error) => return Err(error),
        }
        self.work.deleted.insert(mirror.uid());
        self.record(name, None).await
    }

    /// Brings the record of a mirror pod up to date.
    async fn record(&self, name: &FullName, mirror: Option<&Pod>) -> Result<(), MirrorError> {
        let record = mirror.map(|mirror| MirrorRecord {
            uid: mirror.uid(),
            hash: hash_of_mirror(mirror).unwrap_or_default().to_owned(),
        });
        let store = &self.status.store;
        let key = name.as_str();
        if store.snapshot().record::<MirrorRecord>(key) == record.as_ref() {
            return Ok(());
        }
        let transaction = match record {
            Some(record) => Transaction::new().put(key, record),
            None => Transaction::new().delete::<MirrorRecord>(key),
        };
        match store.commit(transaction).await {
            Ok(_) => Ok(()),
            Err(source) => {
                let pod = name.clone();
                Err(MirrorError::Commit { pod, source })
            }
        }
    }

    /// Remembers and logs a failure. Returns the pause before the next try.
    fn failed(&mut self, name: &FullName, error: &MirrorError) -> Duration {
        let now = Instant::now();
        let failures = self.work.failed.get(name).map_or(0, |(n, _)| *n) + 1;
        let (first, longest) = match error.failure() {
            Failure::Transient => PAUSE,
            _ => REFUSED,
        };
        let pause = pause(failures, first, longest);
        self.work
            .failed
            .insert(name.clone(), (failures, now + pause));
        let why = error as &dyn std::error::Error;
        let down = matches!(self.api.connection().now(), Reachability::Down(_));
        if failures == 1 && !down {
            warn!(pod = %name, error = why, "cannot make or correct a mirror pod, retrying");
        } else {
            debug!(pod = %name, error = why, failures, "cannot make or correct a mirror pod");
        }
        pause
    }
}

/// Static pods that may still need a mirror pod beside the wanted one.
#[derive(Clone, Copy, Debug)]
struct Lives {
    /// A static pod of a source that has not spoken yet.
    unread: bool,
    /// Another static pod of the name, which is not over.
    other: bool,
}

/// Upstream: `tryReconcileMirrorPods`, which the sync of a static pod calls and so not before the previous pod of its
/// name is over, and `deleteOrphanedMirrorPods` with `IsPodForMirrorPodTerminatingByFullName`.
fn decide(pod: Option<&Pod>, mirror: Option<&Pod>, lives: Lives) -> Step {
    let step = match (pod, mirror) {
        (None, None) => Step::Nothing,
        (None, Some(_)) if lives.unread => Step::Wait,
        (None, Some(_)) => Step::Delete,
        (Some(_), None) => Step::Create,
        (Some(pod), Some(mirror)) => {
            let shown = mirror.annotation(MIRROR_DIGEST);
            let is_other = || digest_of(pod).is_some_and(|d| shown != Some(&*d));
            if mirror.is_deleting() || hash_of_mirror(mirror) != hash_of(pod) || is_other() {
                Step::Replace
            } else {
                Step::Nothing
            }
        }
    };
    if lives.other && step != Step::Nothing {
        return Step::Wait;
    }
    step
}

fn hash_of(pod: &Pod) -> Option<&str> {
    pod.annotation(CONFIG_HASH)
}

fn hash_of_mirror(mirror: &Pod) -> Option<&str> {
    mirror.annotation(CONFIG_MIRROR)
}

/// A digest of a static pod whose manifest has a UID of its own; `None` for all others: their UID is one.
fn digest_of(pod: &Pod) -> Option<String> {
    let hash = hash_of(pod)?;
    if hash.len() == 32 && hash.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut annotations = pod.annotations().clone();
    annotations.remove(CONFIG_SEEN);
    let content = serde_json::json!([pod.metadata.labels, annotations, pod.spec]);
    let digest = sha256_hex(&[&content.to_string()]);
    digest.get(..32).map(str::to_owned)
}

/// The mirror pod of a static pod; `None` when the pod or the node lacks what makes one.
fn mirror_of(pod: &Pod, node: &Node) -> Option<Pod> {
    let hash = hash_of(pod)?.to_owned();
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone()?,
        uid: node.metadata.uid.clone()?,
        controller: Some(true),
        block_owner_deletion: None,
    };
    let mut annotations = pod.annotations().clone();
    annotations.insert(CONFIG_MIRROR.to_owned(), hash);
    if let Some(digest) = digest_of(pod) {
        annotations.insert(MIRROR_DIGEST.to_owned(), digest);
    }
    let spec = pod.spec.clone().map(|spec| PodSpec {
        // The API server computes both from the priority class, and refuses others.
        priority: None,
        preemption_policy: None,
        ..spec
    });
    Some(Pod {
        metadata: ObjectMeta {
            name: pod.metadata.name.clone(),
            namespace: Some(pod.namespace().to_owned()),
            labels: pod.metadata.labels.clone(),
            annotations: Some(annotations),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    })
}

/// Waits for an answer, but not for ever.
async fn answer<T>(
    verb: &'static str,
    pod: &FullName,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, MirrorError> {
    let pod = pod.clone();
    match tokio::time::timeout(ANSWER, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(MirrorError::Request {
            verb,
            pod,
            source: Box::new(source),
        }),
        Err(_) => Err(MirrorError::Timeout { verb, pod }),
    }
}

#[cfg(test)]
mod tests;

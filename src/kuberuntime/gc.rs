//! Removal of dead containers and sandboxes; upstream's `containerGC`.
//!
//! [`evictable_containers`] and [`evictable_sandboxes`] decide, purely, from what the runtime lists.
//! [`Remover::collect`] acts: it inspects the pod, commits what is known of each end, and removes against the
//! receipt.
//!
//! **Invariant:** nothing leaves the runtime before its end is recorded. A container that cannot be
//! inspected, or whose record cannot be committed, stays.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::attempt_files::{self, Owner};
use super::cri::{CriClient, CriError};
use super::logs::{self, LogError};
use super::node_context::NodeContext;
use crate::core::state::Transaction;
use crate::store::{CommitError, RemoveContainer, RemoveEmptySandbox, StopPermit, Store};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus, SandboxState};
use crate::types::{Clock, ContainerId, PodUid};

/// Number and minimum age of the dead containers that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcPolicy {
    /// Dead containers kept per pod UID and container name.
    pub max_per_container: usize,
    /// Dead containers kept in all; `None` for no limit.
    pub max_total: Option<usize>,
    /// A younger container is left alone.
    pub min_age: Duration,
}

impl Default for GcPolicy {
    fn default() -> Self {
        Self {
            max_per_container: 1,
            max_total: None,
            min_age: Duration::ZERO,
        }
    }
}

/// A container that may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictableContainer {
    /// Its pod.
    pub pod: PodUid,
    /// The container.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
}

/// A sandbox that may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictableSandbox {
    /// Its pod.
    pub pod: PodUid,
    /// The sandbox.
    pub id: ContainerId,
    /// It may still be running and has to be stopped first.
    pub ready: bool,
}

/// Returns the containers that may go: the dead ones but the newest `max_per_container` of each name, and all dead ones of a pod
/// that is `gone` (deleted, and every source has spoken). If more than `max_total` stay, each name keeps an equal share of the
/// newest, and then the oldest of all go. The oldest comes first: if not all can be removed, the newest logs stay. `now_ns` is
/// wall-clock time. Upstream: `evictContainers`.
pub fn evictable_containers(
    pods: &[PodStatus],
    policy: GcPolicy,
    gone: &BTreeSet<PodUid>,
    now_ns: i64,
) -> Vec<EvictableContainer> {
    let min_age = i64::try_from(policy.min_age.as_nanos()).unwrap_or(i64::MAX);
    let newest_allowed = now_ns.saturating_sub(min_age);
    let mut evictable = Vec::new();
    // Dead containers that stay and are old enough to go, by pod and name, newest first.
    let mut kept = Vec::new();
    for pod in pods {
        let keep = if gone.contains(&pod.uid) {
            0
        } else {
            policy.max_per_container
        };
        for mut dead in dead_by_name(pod, keep == 0) {
            let old = |c: &&ContainerStatus| {
                policy.min_age.is_zero() || c.created_at_ns <= newest_allowed
            };
            let of = |c: &ContainerStatus| (c.created_at_ns, evictable_of(pod, c));
            let rest = dead.split_off(keep.min(dead.len()));
            evictable.extend(rest.into_iter().filter(old).map(of));
            kept.push(dead.into_iter().filter(old).map(of).collect());
        }
    }
    if let Some(max) = policy.max_total {
        evictable.extend(above_total(kept, max));
    }
    evictable.sort_by_key(|(created, _)| *created);
    evictable
        .into_iter()
        .map(|(_, container)| container)
        .collect()
}

/// Dead containers of a pod, one list for each name, newest first. One that never started may be about to: its removal is
/// the worker's decision, unless the pod is gone.
fn dead_by_name(pod: &PodStatus, is_gone: bool) -> Vec<Vec<&ContainerStatus>> {
    let mut by_name: BTreeMap<&str, Vec<&ContainerStatus>> = BTreeMap::new();
    for container in &pod.containers {
        let is_dead = match container.state {
            ContainerState::Exited | ContainerState::Unknown => true,
            ContainerState::Created => is_gone,
            ContainerState::Running => false,
        };
        if is_dead {
            by_name.entry(&container.name).or_default().push(container);
        }
    }
    let mut all: Vec<_> = by_name.into_values().collect();
    for dead in &mut all {
        // By attempt first: the clock may have been set back meanwhile.
        dead.sort_by_key(|c| std::cmp::Reverse((c.attempt, c.created_at_ns)));
    }
    all
}

fn evictable_of(pod: &PodStatus, container: &ContainerStatus) -> EvictableContainer {
    EvictableContainer {
        pod: pod.uid.clone(),
        id: container.id.clone(),
        name: container.name.clone(),
    }
}

/// Returns the containers to remove so that no more than `max` remain. Each has its creation time with it.
fn above_total(
    mut kept: Vec<Vec<(i64, EvictableContainer)>>,
    max: usize,
) -> Vec<(i64, EvictableContainer)> {
    kept.retain(|of_name| !of_name.is_empty());
    let total: usize = kept.iter().map(Vec::len).sum();
    if total <= max {
        return Vec::new();
    }
    let share = (max / kept.len()).max(1);
    let mut above = Vec::new();
    for of_name in &mut kept {
        above.extend(of_name.split_off(share.min(of_name.len())));
    }
    let mut left: Vec<_> = kept.into_iter().flatten().collect();
    left.sort_by_key(|(created, _)| std::cmp::Reverse(*created));
    above.extend(left.split_off(max.min(left.len())));
    above
}

/// Returns the sandboxes that may be removed: those that are not ready, have no container, and are not the newest of
/// their pod. Of a pod that is `gone`, all that have no container.
pub fn evictable_sandboxes(pods: &[PodStatus], gone: &BTreeSet<PodUid>) -> Vec<EvictableSandbox> {
    let mut evictable = Vec::new();
    for pod in pods {
        let holding: BTreeSet<&ContainerId> =
            pod.containers.iter().map(|c| &c.sandbox_id).collect();
        let newest = pod
            .sandboxes
            .iter()
            .max_by_key(|s| (s.attempt, s.created_at_ns))
            .map(|s| &s.id);
        let is_gone = gone.contains(&pod.uid);
        for sandbox in &pod.sandboxes {
            let ready = sandbox.state == SandboxState::Ready;
            let old = !ready && newest != Some(&sandbox.id);
            if !holding.contains(&sandbox.id) && (old || is_gone) {
                evictable.push(EvictableSandbox {
                    pod: pod.uid.clone(),
                    id: sandbox.id.clone(),
                    ready,
                });
            }
        }
    }
    evictable
}

/// Reason why something was not removed.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// A call to the runtime.
    #[error("{verb} {id} of pod {pod}: {source}")]
    Runtime {
        /// Verb of the failed call.
        verb: &'static str,
        /// Container or sandbox.
        id: String,
        /// UID.
        pod: PodUid,
        /// Why.
        #[source]
        source: CriError,
    },
    /// It is in use.
    #[error("remove {id} of pod {pod}: {why}")]
    InUse {
        /// Container or sandbox.
        id: String,
        /// UID.
        pod: PodUid,
        /// Reason why it must stay.
        why: &'static str,
    },
    /// Its end could not be recorded.
    #[error("record the end of {id} of pod {pod} before its removal: {source}")]
    Commit {
        /// Container or sandbox.
        id: String,
        /// UID.
        pod: PodUid,
        /// Why.
        #[source]
        source: CommitError,
    },
    /// Links whose logs are gone stay.
    #[error("remove links to logs that are gone: {0}")]
    Links(#[source] LogError),
}

/// Removes containers and sandboxes; borrowed, cheap to make.
#[derive(Clone, Copy)]
pub struct Remover<'a> {
    /// The runtime.
    pub cri: &'a CriClient,
    /// The store.
    pub store: &'a Store,
    /// Time.
    pub clock: &'a dyn Clock,
    /// Paths of the containers' files.
    pub ctx: &'a NodeContext,
}

/// Result of a collection.
#[derive(Debug, Default)]
pub struct GcReport {
    /// Containers removed.
    pub containers: usize,
    /// Sandboxes removed.
    pub sandboxes: usize,
    /// Errors, each for something that stayed.
    pub errors: Vec<GcError>,
}

impl Remover<'_> {
    /// Records the end of a container and removes it with its files. `status` must come from an
    /// inspection, not from a list, or the exit code is not known. One that it does not show is gone.
    /// When its records change meanwhile, the pod is inspected again, for the container may have been started.
    /// Not removed when dropped before the commit; removed twice does no harm.
    ///
    /// # Errors
    /// See [`GcError`]; a stale decision is made again once.
    pub async fn container(&self, status: &PodStatus, id: &ContainerId) -> Result<(), GcError> {
        match self.as_inspected(status, id).await {
            Err(GcError::Commit {
                source: CommitError::Stale { .. },
                ..
            }) => {
                let status = self.inspect(status, id.to_string()).await?;
                self.as_inspected(&status, id).await
            }
            done => done,
        }
    }

    /// Inspects a pod before `id` of it is removed.
    async fn inspect(&self, pod: &PodStatus, id: String) -> Result<PodStatus, GcError> {
        self.cri
            .pod_status(&pod.uid, &pod.name, &pod.namespace)
            .await
            .map_err(|source| GcError::Runtime {
                verb: "inspect containers before removal:",
                id,
                pod: pod.uid.clone(),
                source,
            })
    }

    /// Records the end of a container as `status` shows it, and removes it with its files.
    async fn as_inspected(&self, status: &PodStatus, id: &ContainerId) -> Result<(), GcError> {
        let pod = &status.uid;
        let Some(intent) = RemoveContainer::new(status, id, self.clock.now()) else {
            if !status.containers.iter().any(|c| c.id == *id) {
                return Ok(());
            }
            return Err(GcError::InUse {
                id: id.to_string(),
                pod: pod.clone(),
                why: "the container runs",
            });
        };
        let receipt = self
            .store
            .commit_intent(intent, Transaction::new())
            .await
            .map_err(|source| GcError::Commit {
                id: id.to_string(),
                pod: pod.clone(),
                source,
            })?;
        self.cri
            .remove_container(&receipt)
            .await
            .map_err(|source| GcError::Runtime {
                verb: "remove container",
                id: id.to_string(),
                pod: pod.clone(),
                source,
            })?;
        if let Some(container) = status.containers.iter().find(|c| c.id == *id) {
            let (owner, of) = (Owner::of(status), container.clone());
            let removed =
                logs::beside(self.ctx, move |ctx| attempt_files::remove(ctx, &owner, &of));
            if let Err(error) = removed.await {
                tracing::warn!(pod = %pod, container = %container.name, %error, "cannot remove files of a removed container");
            }
        }
        Ok(())
    }

    /// Stops (when it may still run) and removes a sandbox. `status` shows the pod without the containers that were
    /// removed: one that is left in the sandbox would be removed with it, unrecorded.
    ///
    /// # Errors
    /// See [`GcError`].
    pub async fn sandbox(
        &self,
        status: &PodStatus,
        sandbox: &EvictableSandbox,
        permit: &StopPermit,
    ) -> Result<(), GcError> {
        let error = |verb| {
            move |source| GcError::Runtime {
                verb,
                id: sandbox.id.to_string(),
                pod: sandbox.pod.clone(),
                source,
            }
        };
        let Some(intent) = RemoveEmptySandbox::new(status, &sandbox.id) else {
            return Err(GcError::InUse {
                id: sandbox.id.to_string(),
                pod: sandbox.pod.clone(),
                why: "the sandbox holds containers",
            });
        };
        // Also one that is not ready: its network may not have been taken down.
        self.cri
            .stop_pod_sandbox(&sandbox.id, permit)
            .await
            .map_err(error("stop sandbox"))?;
        let receipt = self
            .store
            .commit_intent(intent, Transaction::new())
            .await
            .map_err(|source| GcError::Commit {
                id: sandbox.id.to_string(),
                pod: sandbox.pod.clone(),
                source,
            })?;
        self.cri
            .remove_pod_sandbox(&receipt)
            .await
            .map_err(error("remove sandbox"))
    }

    /// Removes what may go of the listed pods. One failure does not keep the rest.
    pub async fn collect(
        &self,
        pods: &[PodStatus],
        policy: GcPolicy,
        gone: &BTreeSet<PodUid>,
        permit: &StopPermit,
    ) -> GcReport {
        let mut report = GcReport::default();
        let now_ns = self.clock.now().wall_ms.saturating_mul(1_000_000);
        let mut doomed: BTreeMap<PodUid, Vec<ContainerId>> = BTreeMap::new();
        for container in evictable_containers(pods, policy, gone, now_ns) {
            doomed.entry(container.pod).or_default().push(container.id);
        }
        let mut left: Vec<PodStatus> = pods.to_vec();
        for pod in &mut left {
            let Some(ids) = doomed.get(&pod.uid) else {
                continue;
            };
            let inspected = match self.inspect(pod, ids.len().to_string()).await {
                Ok(status) => status,
                Err(error) => {
                    report.errors.push(error);
                    continue;
                }
            };
            for id in ids {
                match self.container(&inspected, id).await {
                    Ok(()) => {
                        report.containers += 1;
                        pod.containers.retain(|c| c.id != *id);
                    }
                    Err(error) => report.errors.push(error),
                }
            }
        }
        for sandbox in evictable_sandboxes(&left, gone) {
            let Some(status) = left.iter().find(|pod| pod.uid == sandbox.pod) else {
                continue;
            };
            match self.sandbox(status, &sandbox, permit).await {
                Ok(()) => report.sandboxes += 1,
                Err(error) => report.errors.push(error),
            }
        }
        if let Err(source) = logs::beside(self.ctx, attempt_files::remove_dead_links).await {
            report.errors.push(GcError::Links(source));
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StopDecision;
    use crate::types::runtime::SandboxStatus;

    fn container(id: &str, name: &str, attempt: u32, state: ContainerState) -> ContainerStatus {
        ContainerStatus {
            id: id.into(),
            name: name.to_owned(),
            attempt,
            sandbox_id: "s0".into(),
            state,
            created_at_ns: i64::from(attempt) * 1_000,
            image: String::new(),
            image_ref: String::new(),
            hash: String::new(),
            started_at_ns: 0,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            user: None,
        }
    }

    fn sandbox(id: &str, attempt: u32, state: SandboxState) -> SandboxStatus {
        SandboxStatus {
            id: id.into(),
            attempt,
            state,
            created_at_ns: 0,
            ips: Vec::new(),
            host_network: None,
            runtime_handler: String::new(),
        }
    }

    fn pod(
        uid: &str,
        sandboxes: Vec<SandboxStatus>,
        containers: Vec<ContainerStatus>,
    ) -> PodStatus {
        PodStatus {
            sandboxes,
            containers,
            ..PodStatus::empty(uid.into())
        }
    }

    struct AtBoot;

    impl Clock for AtBoot {
        fn now(&self) -> crate::types::Stamp {
            crate::types::Stamp {
                boot: crate::types::BootId(1),
                boottime_ms: 1,
                wall_ms: 1,
            }
        }
    }

    #[test]
    fn the_newest_dead_container_stays_though_the_clock_was_set_back() {
        for former in [9_000, 20_000] {
            let mut containers = vec![
                container("a0", "c", 0, ContainerState::Exited),
                container("a1", "c", 1, ContainerState::Exited),
            ];
            containers[0].created_at_ns = former;
            let pods = [pod("u", Vec::new(), containers)];
            let policy = GcPolicy::default();
            let go = evictable_containers(&pods, policy, &BTreeSet::new(), 10_000);
            let go: Vec<_> = go.iter().map(|c| c.id.as_str()).collect();
            assert_eq!(go, ["a0"], "created at {former}");
        }
    }

    #[test]
    fn files_are_removed_beside_the_async_threads() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(1)
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut ctx = NodeContext::new("n", dir.path());
        ctx.pod_log_root = dir.path().join("pods");
        ctx.container_log_root = dir.path().join("containers");
        std::fs::create_dir(&ctx.container_log_root).unwrap();
        let link = ctx.container_log_root.join("web_shop_c-abc.log");
        std::os::unix::fs::symlink(ctx.pod_log_root.join("gone/c/0.log"), &link).unwrap();
        runtime.block_on(async {
            let fake = holdfast_testkit::fake_cri::FakeCri::new();
            let cri = CriClient::over(
                fake.channel(),
                "fake",
                crate::kuberuntime::cri::CriTimeouts::default(),
                crate::types::metrics::Metrics::default(),
            );
            let store = Store::in_memory(std::sync::Arc::new(AtBoot));
            let permit = store
                .commit_stop(StopDecision::unrecorded_leftovers())
                .await
                .unwrap();
            let remover = Remover {
                cri: &cri,
                store: &store,
                clock: &AtBoot,
                ctx: &ctx,
            };
            // The only thread that may block is busy.
            let (end, wait) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || wait.recv());
            let gone = BTreeSet::new();
            let collection = remover.collect(&[], GcPolicy::default(), &gone, &permit);
            let mut collection = std::pin::pin!(collection);
            let begun = futures::FutureExt::now_or_never(&mut collection);
            assert!(begun.is_none());
            assert!(link.is_symlink());
            end.send(()).unwrap();
            busy.await.unwrap().unwrap();
            let limit = Duration::from_secs(30);
            let report = tokio::time::timeout(limit, collection).await.unwrap();
            assert!(report.errors.is_empty());
            assert!(!link.is_symlink());
        });
    }

    fn ids(pods: &[PodStatus], policy: GcPolicy, gone: &[&str], now: i64) -> Vec<String> {
        let gone = gone.iter().map(|u| PodUid::from(*u)).collect();
        evictable_containers(pods, policy, &gone, now)
            .into_iter()
            .map(|c| c.id.to_string())
            .collect()
    }

    #[test]
    fn the_newest_dead_container_of_each_name_stays() {
        use ContainerState::{Created, Exited, Running, Unknown};
        let pods = [pod(
            "u",
            Vec::new(),
            vec![
                container("a0", "a", 0, Exited),
                container("a1", "a", 1, Unknown),
                container("a2", "a", 2, Exited),
                container("a3", "a", 3, Running),
                container("b0", "b", 0, Exited),
                container("b1", "b", 1, Created),
            ],
        )];
        let policy = GcPolicy::default();
        assert_eq!(ids(&pods, policy, &[], 10_000), ["a0", "a1"]);
        assert_eq!(
            ids(&pods, policy, &["u"], 10_000),
            ["a0", "b0", "a1", "b1", "a2"]
        );
        let two = GcPolicy {
            max_per_container: 2,
            ..policy
        };
        assert_eq!(ids(&pods, two, &[], 10_000), ["a0"]);
        let aged = GcPolicy {
            min_age: Duration::from_nanos(9_500),
            ..policy
        };
        assert_eq!(
            ids(&pods, aged, &[], 10_000),
            ["a0"],
            "a1 was created 9000 ns ago"
        );
    }

    #[test]
    fn no_more_dead_containers_stay_than_the_total_allows() {
        use ContainerState::{Exited, Running};
        let dead = |id: &str, name: &str, attempt| container(id, name, attempt, Exited);
        let pods = [
            pod(
                "u",
                Vec::new(),
                vec![
                    dead("a1", "a", 1),
                    dead("a2", "a", 2),
                    dead("a3", "a", 3),
                    container("a4", "a", 4, Running),
                ],
            ),
            pod(
                "v",
                Vec::new(),
                vec![dead("b5", "b", 5), dead("b6", "b", 6)],
            ),
            pod("w", Vec::new(), vec![dead("c9", "c", 9)]),
        ];
        let of = |max_per_container, max_total, now| {
            let policy = GcPolicy {
                max_per_container,
                max_total,
                min_age: Duration::from_nanos(1_000),
            };
            ids(&pods, policy, &[], now)
        };
        let now = 100_000;
        assert!(of(3, None, now).is_empty());
        assert!(of(3, Some(6), now).is_empty());
        // One of each name.
        assert_eq!(of(3, Some(5), now), ["a1", "a2", "b5"]);
        assert_eq!(of(3, Some(3), now), ["a1", "a2", "b5"]);
        // The oldest of what is left go, too.
        assert_eq!(of(3, Some(2), now), ["a1", "a2", "a3", "b5"]);
        assert_eq!(of(1, Some(2), now), ["a1", "a2", "a3", "b5"]);
        assert_eq!(of(3, Some(0), now).len(), 6);
        // The newest is too young to go, and is not counted: two of each other name.
        assert!(of(3, Some(5), 9_500).is_empty());
        assert_eq!(of(3, Some(4), 9_500), ["a1"]);
    }

    #[test]
    fn sandboxes_that_hold_containers_or_are_newest_stay() {
        use SandboxState::{NotReady, Ready};
        let of = |gone: &[&str]| {
            let pods = [
                pod(
                    "u",
                    vec![
                        sandbox("s0", 0, NotReady),
                        sandbox("s1", 1, NotReady),
                        sandbox("s2", 2, NotReady),
                    ],
                    vec![container("a0", "a", 0, ContainerState::Exited)],
                ),
                pod(
                    "v",
                    vec![sandbox("t0", 0, Ready), sandbox("t1", 1, Ready)],
                    Vec::new(),
                ),
            ];
            let gone = gone.iter().map(|u| PodUid::from(*u)).collect();
            evictable_sandboxes(&pods, &gone)
                .into_iter()
                .map(|s| s.id.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), ["s1"]);
        assert_eq!(of(&["u"]), ["s1", "s2"]);
        assert_eq!(of(&["v"]), ["s1", "t0", "t1"]);
    }
}

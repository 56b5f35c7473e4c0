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

use super::cri::{CriClient, CriError};
use super::logs;
use super::node_context::NodeContext;
use crate::core::container_history::record_end;
use crate::core::state::Transaction;
use crate::store::{CommitError, RemoveIntent, StopPermit, Store};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus, SandboxState};
use crate::types::{Clock, ContainerId, PodUid};

/// How many dead containers are kept, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcPolicy {
    /// Dead containers kept per pod UID and container name.
    pub max_per_container: usize,
    /// A younger container is left alone.
    pub min_age: Duration,
}

impl Default for GcPolicy {
    fn default() -> Self {
        Self {
            max_per_container: 1,
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

/// What may go of the containers: the dead ones but the newest `max_per_container` of each name; all dead
/// ones of a pod that is `gone` (deleted, and every source has spoken). `now_ns` is wall-clock time.
pub fn evictable_containers(
    pods: &[PodStatus],
    policy: GcPolicy,
    gone: &BTreeSet<PodUid>,
    now_ns: i64,
) -> Vec<EvictableContainer> {
    let min_age = i64::try_from(policy.min_age.as_nanos()).unwrap_or(i64::MAX);
    let newest_allowed = now_ns.saturating_sub(min_age);
    let mut evictable = Vec::new();
    for pod in pods {
        let keep = if gone.contains(&pod.uid) {
            0
        } else {
            policy.max_per_container
        };
        let mut by_name: BTreeMap<&str, Vec<&ContainerStatus>> = BTreeMap::new();
        for container in &pod.containers {
            // A created one may be about to start; its removal is the worker's decision.
            let dead = matches!(
                container.state,
                ContainerState::Exited | ContainerState::Unknown
            ) || (container.state == ContainerState::Created && keep == 0);
            if dead {
                by_name.entry(&container.name).or_default().push(container);
            }
        }
        for (_, mut dead) in by_name {
            dead.sort_by_key(|c| std::cmp::Reverse((c.created_at_ns, c.attempt)));
            evictable.extend(
                dead.into_iter()
                    .skip(keep)
                    .filter(|c| c.created_at_ns <= newest_allowed)
                    .map(|c| EvictableContainer {
                        pod: pod.uid.clone(),
                        id: c.id.clone(),
                        name: c.name.clone(),
                    }),
            );
        }
    }
    evictable
}

/// What may go of the sandboxes: those that are not ready, hold no container and are not the newest of
/// their pod; of a pod that is `gone` all that hold no container.
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

/// Why something was not removed.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// A call to the runtime.
    #[error("{verb} {id} of pod {pod}")]
    Runtime {
        /// What was tried.
        verb: &'static str,
        /// Container or sandbox.
        id: String,
        /// UID.
        pod: PodUid,
        /// Why.
        #[source]
        source: CriError,
    },
    /// Its end could not be recorded.
    #[error("record the end of {id} of pod {pod} before its removal")]
    Commit {
        /// Container or sandbox.
        id: String,
        /// UID.
        pod: PodUid,
        /// Why.
        #[source]
        source: CommitError,
    },
}

/// What removal needs; borrowed, cheap to make.
#[derive(Clone, Copy)]
pub struct Remover<'a> {
    /// The runtime.
    pub cri: &'a CriClient,
    /// The store.
    pub store: &'a Store,
    /// Time.
    pub clock: &'a dyn Clock,
    /// Where logs are.
    pub ctx: &'a NodeContext,
}

/// What a collection did.
#[derive(Debug, Default)]
pub struct GcReport {
    /// Containers removed.
    pub containers: usize,
    /// Sandboxes removed.
    pub sandboxes: usize,
    /// What stayed, and why.
    pub errors: Vec<GcError>,
}

impl Remover<'_> {
    /// Records the end of a container and removes it with its logs. `status` must come from an
    /// inspection, not from a list, or the exit code is not known.
    /// Not removed when dropped before the commit; removed twice does no harm.
    ///
    /// # Errors
    /// See [`GcError`]; a stale decision is taken again once.
    pub async fn container(&self, status: &PodStatus, id: &ContainerId) -> Result<(), GcError> {
        let pod = &status.uid;
        let mut tried = false;
        let receipt = loop {
            let seen = self.store.snapshot();
            let intent = RemoveIntent {
                id: id.clone(),
                record_end: record_end(&seen, pod, status, id, self.clock.now()),
            };
            match self.store.commit_intent(intent, Transaction::new()).await {
                Err(CommitError::Stale { .. }) if !tried => tried = true,
                other => {
                    break other.map_err(|source| GcError::Commit {
                        id: id.to_string(),
                        pod: pod.clone(),
                        source,
                    })?;
                }
            }
        };
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
            let names = (status.name.as_str(), status.namespace.as_str());
            let log = &container.log_path;
            if let Err(error) =
                logs::remove_container_log(self.ctx, names, &container.name, id, log)
            {
                tracing::warn!(pod = %pod, container = %container.name, %error, "log of a removed container stays");
            }
        }
        Ok(())
    }

    /// Stops (when it may still run) and removes a sandbox. Its containers must be gone: the runtime
    /// would remove them with it, unrecorded.
    ///
    /// # Errors
    /// See [`GcError`].
    pub async fn sandbox(
        &self,
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
        // Also one that is not ready: its network may not have been taken down.
        self.cri
            .stop_pod_sandbox(&sandbox.id, permit)
            .await
            .map_err(error("stop sandbox"))?;
        let intent = RemoveIntent {
            id: sandbox.id.clone(),
            record_end: Transaction::new(),
        };
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
            let inspected = match self
                .cri
                .pod_status(&pod.uid, &pod.name, &pod.namespace)
                .await
            {
                Ok(status) => status,
                Err(source) => {
                    report.errors.push(GcError::Runtime {
                        verb: "inspect containers before removal:",
                        id: format!("{}", ids.len()),
                        pod: pod.uid.clone(),
                        source,
                    });
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
            match self.sandbox(&sandbox, permit).await {
                Ok(()) => report.sandboxes += 1,
                Err(error) => report.errors.push(error),
            }
        }
        if let Err(error) = logs::remove_dead_links(self.ctx) {
            tracing::warn!(%error, "dead log links stay");
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        assert_eq!(ids(&pods, policy, &[], 10_000), ["a1", "a0"]);
        assert_eq!(
            ids(&pods, policy, &["u"], 10_000),
            ["a2", "a1", "a0", "b1", "b0"]
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

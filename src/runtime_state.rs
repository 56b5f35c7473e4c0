//! Layer 4: whether the node can work on pods at all. Upstream: `runtimeState`.
//!
//! Owns the moments at which the runtime, its network and the PLEG were last well, and what its handlers can. Errors here make the
//! sync loop skip its turn and show up in `/readyz`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::kuberuntime::container_mounts::handler_mounts_recursively;
use crate::kuberuntime::cri::v1;
use crate::types::{Moment, PodUid, Stamp};

/// The runtime counts as down after not answering for this long.
pub const RUNTIME_UP_THRESHOLD: Duration = Duration::from_secs(30);
/// The PLEG counts as unhealthy after no relist for this long, or for two of its periods where they are
/// longer.
pub const PLEG_RELIST_THRESHOLD: Duration = Duration::from_secs(180);

#[derive(Debug, Default)]
struct Data {
    runtime_ok: Option<Moment>,
    runtime_error: Option<String>,
    network_error: Option<String>,
    pleg_relist: Option<Moment>,
    pleg_period: Duration,
    storage_error: Option<String>,
    handlers: Option<Vec<v1::RuntimeHandler>>,
    strict_groups: Option<bool>,
    not_listed: BTreeSet<PodUid>,
}

/// Shared handle.
#[derive(Clone, Debug, Default)]
pub struct RuntimeState {
    data: Arc<Mutex<Data>>,
    shutting_down: Arc<watch::Sender<bool>>,
}

impl RuntimeState {
    fn with<T>(&self, f: impl FnOnce(&mut Data) -> T) -> T {
        f(&mut self.data.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets whether the node shuts down. It takes no new pods then and is not Ready; the sync loop goes on. Upstream:
    /// `nodeShuttingDownNow`.
    pub fn set_shutting_down(&self, is: bool) {
        self.shutting_down
            .send_if_modified(|was| std::mem::replace(was, is) != is);
    }

    /// Returns whether the node shuts down. Upstream: `ShutdownStatus`.
    pub fn is_shutting_down(&self) -> bool {
        *self.shutting_down.borrow()
    }

    /// Returns what changes when a shutdown begins or is cancelled.
    pub fn shutting_down(&self) -> watch::Receiver<bool> {
        self.shutting_down.subscribe()
    }

    /// The runtime answered at `now` and said it is ready.
    pub fn set_runtime_ok(&self, now: Stamp) {
        self.with(|d| {
            d.runtime_ok = Some(Moment::of(now));
            d.runtime_error = None;
        });
    }

    /// The runtime did not answer, or said it is not ready.
    pub fn set_runtime_error(&self, error: impl Into<String>) {
        self.with(|d| d.runtime_error = Some(error.into()));
    }

    /// Sets whether pod networking is ready, or the reason why not.
    pub fn set_network(&self, network: Result<(), String>) {
        self.with(|d| d.network_error = network.err());
    }

    /// A relist of all pods finished at `now`.
    pub fn set_pleg_relist(&self, now: Stamp) {
        self.with(|d| d.pleg_relist = Some(Moment::of(now)));
    }

    /// The next relist of all pods is planned this long after the last.
    pub fn set_pleg_period(&self, period: Duration) {
        self.with(|d| d.pleg_period = period);
    }

    /// Directories or volumes could not be set up.
    pub fn set_storage(&self, storage: Result<(), String>) {
        self.with(|d| d.storage_error = storage.err());
    }

    /// Sets the features of the runtime's handlers.
    pub fn set_handlers(&self, handlers: Vec<v1::RuntimeHandler>) {
        self.with(|d| d.handlers = Some(handlers));
    }

    /// Sets whether the runtime supports `supplementalGroupsPolicy: Strict`.
    pub fn set_strict_groups(&self, is: bool) {
        self.with(|d| d.strict_groups = Some(is));
    }

    /// Returns whether the runtime supports `supplementalGroupsPolicy: Strict`; `None` while it has not answered yet.
    pub fn strict_groups(&self) -> Option<bool> {
        self.with(|d| d.strict_groups)
    }

    /// Sets whether processes of a pod run of which the runtime lists nothing.
    pub fn set_not_listed(&self, pod: &PodUid, is: bool) {
        self.with(|d| {
            if is {
                d.not_listed.insert(pod.clone());
            } else {
                d.not_listed.remove(pod);
            }
        });
    }

    /// Returns a message about pods that run and that the runtime does not list; `None` without such pods.
    pub fn not_listed(&self) -> Option<String> {
        self.with(|d| {
            let first = d.not_listed.first()?;
            Some(format!(
                "the container runtime lists nothing of {} pods whose processes run, among them {first}",
                d.not_listed.len()
            ))
        })
    }

    /// Returns whether a handler of the runtime can mount read-only recursively; an empty name is its default handler.
    /// `None` while the runtime has not answered yet.
    pub fn mounts_recursively(&self, handler: &str) -> Option<bool> {
        self.with(|d| {
            let handlers = d.handlers.as_deref()?;
            Some(handler_mounts_recursively(handlers, handler))
        })
    }

    /// Returns the reason why pods on the pod network cannot start; `None` if they can.
    pub fn network_error(&self) -> Option<String> {
        self.with(|d| d.network_error.clone())
    }

    /// Returns the errors that keep the sync loop from working. Upstream: `runtimeErrors` and `storageErrors`.
    pub fn errors(&self, now: Stamp) -> Vec<String> {
        self.with(|d| {
            let mut errors = Vec::new();
            match d.runtime_ok {
                None => errors.push(match &d.runtime_error {
                    Some(error) => {
                        format!("container runtime status check has not succeeded yet: {error}")
                    }
                    None => "container runtime status check has not completed yet".to_owned(),
                }),
                Some(ok) if ok.age(now) > RUNTIME_UP_THRESHOLD => errors.push(format!(
                    "container runtime is down: {}",
                    d.runtime_error.as_deref().unwrap_or("no answer")
                )),
                Some(_) => {}
            }
            let threshold = PLEG_RELIST_THRESHOLD.max(d.pleg_period * 2);
            match d.pleg_relist {
                None => {
                    errors.push("PLEG is not healthy: pleg has yet to be successful".to_owned())
                }
                Some(at) if at.age(now) > threshold => errors.push(format!(
                    "PLEG is not healthy: pleg was last seen active {} ago; threshold is {}",
                    humantime::format_duration(at.age(now)),
                    humantime::format_duration(threshold)
                )),
                Some(_) => {}
            }
            errors.extend(d.storage_error.clone());
            errors
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::BootId;

    fn at(s: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: s * 1000,
            wall_ms: 0,
        }
    }

    async fn awake(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn runtime_is_down_after_thirty_seconds_of_silence_and_back_at_once() {
        let state = RuntimeState::default();
        assert_eq!(state.errors(at(0)).len(), 2);
        state.set_runtime_ok(at(0));
        state.set_pleg_relist(at(0));
        awake(30).await;
        assert!(state.errors(at(30)).is_empty());
        state.set_runtime_error("connection refused");
        awake(1).await;
        assert!(state.errors(at(31))[0].contains("connection refused"));
        state.set_runtime_ok(at(32));
        assert!(state.errors(at(32)).is_empty());
    }

    #[test]
    fn pods_that_the_runtime_does_not_list_are_told_until_it_does() {
        let state = RuntimeState::default();
        assert_eq!(state.not_listed(), None);
        let (a, b) = (PodUid::new("a"), PodUid::new("b"));
        state.set_not_listed(&b, true);
        state.set_not_listed(&a, true);
        let text = state.not_listed().unwrap();
        assert!(text.contains("2 pods") && text.ends_with(" a"), "{text}");
        state.set_not_listed(&a, false);
        state.set_not_listed(&b, false);
        assert_eq!(state.not_listed(), None);
    }

    #[test]
    fn what_a_handler_can_is_known_once_the_runtime_has_said_so() {
        let state = RuntimeState::default();
        assert_eq!(state.mounts_recursively(""), None);
        let handler = |name: &str, recursive_read_only_mounts| v1::RuntimeHandler {
            name: name.to_owned(),
            features: Some(v1::RuntimeHandlerFeatures {
                recursive_read_only_mounts,
                user_namespaces: false,
            }),
        };
        state.set_handlers(vec![handler("", true), handler("kata", false)]);
        for (name, can) in [("", true), ("kata", false), ("none", false)] {
            assert_eq!(state.mounts_recursively(name), Some(can), "{name}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_was_suspended_has_not_been_silent() {
        let state = RuntimeState::default();
        state.set_runtime_ok(at(0));
        state.set_pleg_relist(at(0));
        awake(1).await;
        assert!(state.errors(at(36_000)).is_empty());
        awake(180).await;
        let errors = state.errors(at(36_180));
        assert!(errors[0].starts_with("container runtime is down"));
        assert!(
            errors[1].contains("last seen active 3m 1s ago"),
            "{errors:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn pleg_is_unhealthy_after_three_minutes_without_a_relist() {
        let state = RuntimeState::default();
        state.set_pleg_relist(at(0));
        awake(181).await;
        state.set_runtime_ok(at(181));
        assert!(state.errors(at(181))[0].starts_with("PLEG is not healthy"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pleg_that_lists_rarely_because_it_is_told_is_healthy() {
        let state = RuntimeState::default();
        state.set_pleg_relist(at(0));
        state.set_pleg_period(Duration::from_secs(300));
        awake(600).await;
        state.set_runtime_ok(at(600));
        assert!(state.errors(at(600)).is_empty());
        awake(1).await;
        assert!(state.errors(at(601))[0].starts_with("PLEG is not healthy"));
    }
}

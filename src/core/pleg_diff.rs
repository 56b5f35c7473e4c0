//! Changes between two listings of the runtime; upstream's `GenericPLEG.generateEvents`.
//!
//! In: two listings of one pod. Out: events, one or two per container or sandbox that changed. Events are
//! hints to look, never facts to act on. Nothing here needs inspected fields.

use std::collections::BTreeMap;

use crate::types::runtime::{ContainerState, PodStatus, SandboxState};
use crate::types::{ContainerId, PodUid};

/// Kind of a [`PodLifecycleEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodLifecycleEventKind {
    /// A container runs.
    ContainerStarted,
    /// A container ended.
    ContainerDied,
    /// A container is gone from the runtime.
    ContainerRemoved,
    /// A container is in a state that says little.
    ContainerChanged,
    /// A sandbox is ready.
    SandboxStarted,
    /// A sandbox is not ready any more.
    SandboxDied,
    /// A sandbox is gone from the runtime.
    SandboxRemoved,
}

impl PodLifecycleEventKind {
    /// Returns whether the pod is worth a sync; upstream's `isSyncPodWorthy`.
    pub fn wants_sync(self) -> bool {
        !matches!(self, Self::ContainerRemoved | Self::SandboxRemoved)
    }
}

/// Something happened to a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodLifecycleEvent {
    /// The pod.
    pub pod: PodUid,
    /// Kind of the event.
    pub kind: PodLifecycleEventKind,
    /// To which container or sandbox.
    pub id: ContainerId,
}

/// The events between two listings of a pod; `None` = the runtime knew nothing of it.
pub fn diff(old: Option<&PodStatus>, new: Option<&PodStatus>) -> Vec<PodLifecycleEvent> {
    let Some(pod) = new.or(old).map(|s| s.uid.clone()) else {
        return Vec::new();
    };
    let (before, after) = (Summary::of(old), Summary::of(new));
    let mut events = Vec::new();
    let mut push = |kind, id: &ContainerId| {
        events.push(PodLifecycleEvent {
            pod: pod.clone(),
            kind,
            id: id.clone(),
        });
    };
    use PodLifecycleEventKind as Kind;
    for (id, state) in changed(&before.sandboxes, &after.sandboxes) {
        match (state, before.sandboxes.get(id)) {
            (Some(SandboxState::Ready), _) => push(Kind::SandboxStarted, id),
            (Some(SandboxState::NotReady), _) => push(Kind::SandboxDied, id),
            (None, Some(SandboxState::NotReady)) => push(Kind::SandboxRemoved, id),
            (None, _) => {
                push(Kind::SandboxDied, id);
                push(Kind::SandboxRemoved, id);
            }
        }
    }
    for (id, state) in changed(&before.containers, &after.containers) {
        match (state, before.containers.get(id)) {
            (Some(ContainerState::Running), _) => push(Kind::ContainerStarted, id),
            (Some(ContainerState::Exited), _) => push(Kind::ContainerDied, id),
            (Some(ContainerState::Created | ContainerState::Unknown), _) => {
                push(Kind::ContainerChanged, id);
            }
            (None, Some(ContainerState::Exited)) => push(Kind::ContainerRemoved, id),
            (None, _) => {
                push(Kind::ContainerDied, id);
                push(Kind::ContainerRemoved, id);
            }
        }
    }
    events
}

/// Returns whether two listings of a pod are the same, so that it need not be inspected again. Order and inspected
/// fields do not count.
pub fn same_summary(old: &PodStatus, new: &PodStatus) -> bool {
    Summary::of(Some(old)) == Summary::of(Some(new))
}

#[derive(PartialEq)]
struct Summary<'a> {
    sandboxes: BTreeMap<&'a ContainerId, SandboxState>,
    containers: BTreeMap<&'a ContainerId, ContainerState>,
}

impl<'a> Summary<'a> {
    fn of(status: Option<&'a PodStatus>) -> Self {
        let sandboxes = status.map(|s| s.sandboxes.as_slice()).unwrap_or_default();
        let containers = status.map(|s| s.containers.as_slice()).unwrap_or_default();
        Self {
            sandboxes: sandboxes.iter().map(|s| (&s.id, s.state)).collect(),
            containers: containers.iter().map(|c| (&c.id, c.state)).collect(),
        }
    }
}

/// Returns the entries that differ, with their new values.
fn changed<'m, S: Copy + PartialEq>(
    old: &'m BTreeMap<&ContainerId, S>,
    new: &'m BTreeMap<&ContainerId, S>,
) -> impl Iterator<Item = (&'m ContainerId, Option<S>)> {
    let appeared_or_changed = new
        .iter()
        .filter(|(id, state)| old.get(*id) != Some(*state))
        .map(|(id, state)| (&**id, Some(*state)));
    let gone = old
        .keys()
        .filter(|id| !new.contains_key(*id))
        .map(|id| (&**id, None));
    appeared_or_changed.chain(gone)
}

#[cfg(test)]
mod tests {
    use super::PodLifecycleEventKind::{self as Kind, *};
    use super::*;
    use crate::types::runtime::{ContainerStatus, SandboxStatus};

    fn pod(sandbox: Option<SandboxState>, container: Option<ContainerState>) -> PodStatus {
        let mut status = PodStatus::empty(PodUid::new("u"));
        status.sandboxes.extend(sandbox.map(|state| SandboxStatus {
            id: "s".into(),
            attempt: 0,
            state,
            created_at_ns: 1,
            ips: Vec::new(),
            host_network: None,
            runtime_handler: String::new(),
        }));
        status
            .containers
            .extend(container.map(|state| ContainerStatus {
                id: "c".into(),
                name: "app".into(),
                attempt: 0,
                sandbox_id: "s".into(),
                state,
                created_at_ns: 1,
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
            }));
        status
    }

    #[test]
    fn every_container_transition_has_its_events() {
        use ContainerState::{Created, Exited, Running, Unknown};
        let table: [(Option<ContainerState>, Option<ContainerState>, &[Kind]); 13] = [
            (None, Some(Created), &[ContainerChanged]),
            (None, Some(Running), &[ContainerStarted]),
            (None, Some(Exited), &[ContainerDied]),
            (None, Some(Unknown), &[ContainerChanged]),
            (Some(Created), Some(Running), &[ContainerStarted]),
            (Some(Running), Some(Running), &[]),
            (Some(Running), Some(Exited), &[ContainerDied]),
            (Some(Running), Some(Unknown), &[ContainerChanged]),
            (Some(Running), None, &[ContainerDied, ContainerRemoved]),
            (Some(Created), None, &[ContainerDied, ContainerRemoved]),
            (Some(Exited), None, &[ContainerRemoved]),
            (Some(Exited), Some(Exited), &[]),
            (None, None, &[]),
        ];
        for (old, new, want) in table {
            let events = diff(Some(&pod(None, old)), Some(&pod(None, new)));
            let kinds: Vec<_> = events.iter().map(|e| e.kind).collect();
            assert_eq!(kinds, want, "{old:?} -> {new:?}");
        }
    }

    #[test]
    fn every_sandbox_transition_has_its_events() {
        use SandboxState::{NotReady, Ready};
        let table: [(Option<SandboxState>, Option<SandboxState>, &[Kind]); 6] = [
            (None, Some(Ready), &[SandboxStarted]),
            (Some(Ready), Some(NotReady), &[SandboxDied]),
            (Some(Ready), None, &[SandboxDied, SandboxRemoved]),
            (Some(NotReady), None, &[SandboxRemoved]),
            (Some(NotReady), Some(Ready), &[SandboxStarted]),
            (Some(Ready), Some(Ready), &[]),
        ];
        for (old, new, want) in table {
            let events = diff(Some(&pod(old, None)), Some(&pod(new, None)));
            let kinds: Vec<_> = events.iter().map(|e| e.kind).collect();
            assert_eq!(kinds, want, "{old:?} -> {new:?}");
        }
    }

    #[test]
    fn a_pod_that_appears_or_goes_is_diffed_against_nothing() {
        let there = pod(Some(SandboxState::Ready), Some(ContainerState::Running));
        assert_eq!(diff(None, Some(&there)).len(), 2);
        assert_eq!(diff(Some(&there), None).len(), 4);
        assert!(diff(None, None).is_empty());
    }

    #[test]
    fn removals_alone_are_not_worth_a_sync() {
        assert!(!ContainerRemoved.wants_sync() && !SandboxRemoved.wants_sync());
        assert!(ContainerDied.wants_sync() && ContainerChanged.wants_sync());
    }

    #[test]
    fn inspected_fields_and_order_do_not_make_a_difference() {
        let old = pod(Some(SandboxState::Ready), Some(ContainerState::Running));
        let mut new = old.clone();
        new.ips.push("10.0.0.1".into());
        new.sandboxes[0].ips.push("10.0.0.1".into());
        new.containers[0].started_at_ns = 5;
        assert!(same_summary(&old, &new));
        new.containers[0].state = ContainerState::Exited;
        assert!(!same_summary(&old, &new));
    }
}

//! Records of a resize, in table `objects` as JSON.
//!
//! `resizes/<namespace>/<pod UID>`: the resources last sent to the runtime. Written first in the transaction that
//! allocates the first resize of a pod, so that a crash in between leaves the difference recorded.
//! `resizepending/<namespace>/<pod UID>`: the reason for which a resize was not allocated.

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::pod_level::as_made;
use super::{
    Allocation, Allocations, POD, UNCONFIRMED, allocation_of_pod, made_with, resizable, same,
};
use crate::core::state::State;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::types::PodExt;

/// Applied resources of a pod that was resized.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeRecord {
    /// Resources last sent to the runtime, by container; those of the pod as a whole under [`super::POD`].
    pub actuated: Allocations,
    /// Error of sending the later allocation to the runtime.
    pub error: Option<String>,
    /// True if a resize is under way that has had its event.
    pub started: bool,
}

impl Kind for ResizeRecord {
    const DECLARED: Declared = kinds::RESIZES;
}

/// Reason why a resize was not allocated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingRecord {
    /// `Deferred` or `Infeasible`.
    pub reason: String,
    /// For a human.
    pub message: String,
}

impl Kind for PendingRecord {
    const DECLARED: Declared = kinds::PENDING_RESIZES;
}

/// Key of a pod's [`ResizeRecord`].
pub fn resize_key(pod: &Pod) -> Key<ResizeRecord> {
    Key::new(pod.namespace(), pod.uid().as_str())
}

/// Returns the key of the record that each allocation of a resize writes, so that of two that were decided on the same facts one
/// is refused. It is empty and of no pod.
pub fn turn_key() -> Key<ResizeRecord> {
    Key::new("", "turn")
}

/// Key of a pod's [`PendingRecord`].
pub fn pending_key(pod: &Pod) -> Key<PendingRecord> {
    Key::new(pod.namespace(), pod.uid().as_str())
}

impl ResizeRecord {
    /// The record of a pod; `None` when it was never resized. One that cannot be read counts as absent: the allocation is
    /// recorded elsewhere, and stands.
    pub fn of(state: &State, pod: &Pod) -> Option<Self> {
        state.object(&resize_key(pod))
    }

    /// Adds the resources from before a resize for those that are not recorded yet. Containers that were recorded
    /// before pods could be resized as a whole get the limits that they have from their pod, so that they are not told
    /// again.
    #[must_use]
    pub fn and_before(mut self, before: Allocations) -> Self {
        let is_earlier = !self.actuated.contains_key(POD);
        if let Some(of_pod) = before.get(POD).filter(|_| is_earlier) {
            for told in self.actuated.values_mut() {
                *told = as_made(told, of_pod);
            }
        }
        for (name, of) in before {
            self.actuated.entry(name).or_insert(of);
        }
        self
    }

    /// Marks what a resize under way may have changed without a record of it, before another allocation follows the
    /// `former` one. It is told again, even if it is to have what it had before.
    #[must_use]
    pub fn and_unconfirmed(mut self, former: &Pod) -> Self {
        let containers = resizable(former);
        let made = containers.map(|c| (c.name.as_str(), made_with(former, c)));
        for (name, made) in made.chain([(POD, allocation_of_pod(former))]) {
            let told = self.actuated.get_mut(name);
            if let Some(told) = told.filter(|told| !same(told, &made)) {
                told.insert(UNCONFIRMED.to_owned(), "true".to_owned());
            }
        }
        self
    }

    /// A container has just been made with what was allocated.
    #[must_use]
    pub fn with(mut self, container: &str, of: Allocation) -> Self {
        self.actuated.insert(container.to_owned(), of);
        self
    }
}

impl PendingRecord {
    /// The record of a pod; `None` when nothing is pending.
    pub fn of(state: &State, pod: &Pod) -> Option<Self> {
        state.object(&pending_key(pod))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::state::Transaction;
    use crate::core::testkit::{at, pod};

    /// Keys are on disk: what one release has written the next one finds.
    #[test]
    fn what_is_remembered_is_found_again() {
        let pod = pod("Always", &["a"]);
        assert_eq!(resize_key(&pod), "resizes/ns/u1");
        assert_eq!(pending_key(&pod), "resizepending/ns/u1");
        assert_eq!(turn_key(), "resizes//turn");
        let of: Allocation = [("cpu".to_owned(), "1".to_owned())].into();
        let record = ResizeRecord {
            error: Some("why".to_owned()),
            ..ResizeRecord::default()
        };
        let record = record.with("a", of.clone());
        assert_eq!(record.actuated, [("a".to_owned(), of)].into());
        assert_eq!(record.error.as_deref(), Some("why"));
        let pending = PendingRecord {
            reason: "Deferred".to_owned(),
            message: "later".to_owned(),
        };
        let mut state = State::default();
        assert_eq!(ResizeRecord::of(&state, &pod), None);
        let put = Transaction::new()
            .put_object(&resize_key(&pod), &record, at(1))
            .put_object(&pending_key(&pod), &pending, at(1));
        for mutation in &put.mutations {
            state.apply(mutation, 1);
        }
        assert_eq!(ResizeRecord::of(&state, &pod), Some(record));
        assert_eq!(PendingRecord::of(&state, &pod), Some(pending));
    }
}

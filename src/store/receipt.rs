//! Receipts: values that only the store makes, and that effects take as an argument. Forgetting the
//! checkpoint before the effect does not compile.

use crate::core::state::{ContainerRecord, IntentRecord, State, Transaction, Version, child_key};
use crate::types::{ContainerId, PodUid, Stamp};

/// Proof that the transaction which carried `T` is on disk. Only the store makes one.
#[derive(Clone, Debug)]
pub struct Committed<T> {
    value: T,
    version: Version,
}

impl<T> Committed<T> {
    pub(super) fn new(value: T, version: Version) -> Self {
        Self { value, version }
    }

    /// What was committed.
    pub fn get(&self) -> &T {
        &self.value
    }

    /// Version of the commit.
    pub fn version(&self) -> Version {
        self.version
    }
}

/// Permission to stop something: the decision is on disk, or the store is degraded and holds it in memory
/// to be written first on recovery. Only the store makes one.
#[derive(Clone, Debug)]
pub struct StopPermit {
    held: bool,
}

impl StopPermit {
    pub(super) fn new(held: bool) -> Self {
        Self { held }
    }

    /// Whether the decision is held in memory only.
    pub fn is_held(&self) -> bool {
        self.held
    }
}

/// A decision whose record must be safe before its effect: it knows the mutations that record it.
pub trait Intent: Clone + Send + 'static {
    /// The transaction that records the decision, given the state it was decided on.
    fn transaction(&self, seen: &State) -> Transaction;
}

/// Starting a created container. Upstream has no counterpart.
#[derive(Clone, Debug, PartialEq)]
pub struct StartIntent {
    /// The pod.
    pub pod: PodUid,
    /// Name of the container in the spec.
    pub container: String,
    /// The created container.
    pub container_id: ContainerId,
    /// Its attempt, which is the restart count from now on.
    pub attempt: u32,
    /// Hash of its spec.
    pub hash: String,
    /// Why it is started; goes to the journal.
    pub why: String,
    /// When it was decided.
    pub at: Stamp,
}

impl Intent for StartIntent {
    fn transaction(&self, seen: &State) -> Transaction {
        let key = child_key(&self.pod, &self.container);
        let mut record = seen
            .record::<ContainerRecord>(&key)
            .cloned()
            .unwrap_or_default();
        record.restart_count = record.restart_count.max(self.attempt);
        record.intent = Some(IntentRecord {
            container_id: self.container_id.clone(),
            attempt: self.attempt,
            hash: self.hash.clone(),
            at: self.at,
        });
        Transaction::new()
            .expect::<ContainerRecord>(seen, &key)
            .put(&key, record)
            .journal(
                Some(&self.pod),
                "starting container",
                format!("{} attempt {}: {}", self.container, self.attempt, self.why),
            )
    }
}

/// Removing a container (or a whole sandbox with its containers) from the runtime: what the runtime knows
/// of its end must be recorded first.
#[derive(Clone, Debug)]
pub struct RemoveIntent {
    /// The container or sandbox to be removed.
    pub id: ContainerId,
    /// Records the end; empty when it is recorded already or was never started.
    pub record_end: Transaction,
}

impl Intent for RemoveIntent {
    fn transaction(&self, _: &State) -> Transaction {
        self.record_end.clone()
    }
}

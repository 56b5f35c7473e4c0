//! Receipts: values that only the store makes, and that effects take as an argument. Forgetting the
//! checkpoint before the effect does not compile.
//!
//! **Invariant:** there is no receipt for a transaction that a caller left empty. What is recorded follows from what is
//! done, and the two cases in which nothing is say so by their names: [`RemoveEmptySandbox`] and
//! [`StopDecision::unrecorded_leftovers`].

use super::CommitError;
use crate::core::container_history;
use crate::core::state::{
    ContainerRecord, IntentRecord, State, Transaction, Version, WorkerPhase, WorkerRecord,
    child_key,
};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
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

    /// Returns the committed value.
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

    /// Returns whether the decision is held in memory only.
    pub fn is_held(&self) -> bool {
        self.held
    }
}

/// A decision to stop something, for [`super::Store::commit_stop`].
#[derive(Clone, Debug)]
pub struct StopDecision(Decided);

#[derive(Clone, Debug)]
enum Decided {
    By(Transaction),
    OnRecord(PodUid),
    Leftovers,
}

impl StopDecision {
    /// Returns the decision that this transaction records.
    ///
    /// # Errors
    /// `Invalid` when it changes no record and adds no line to the journal.
    pub fn recorded_by(transaction: Transaction) -> Result<Self, CommitError> {
        if transaction.is_empty() {
            return Err(CommitError::Invalid {
                reason: "a decision to stop something records nothing".to_owned(),
            });
        }
        Ok(Self(Decided::By(transaction)))
    }

    /// Returns the decision that the record of a pod's worker holds: the pod is being stopped, or is over. The commit is
    /// `Invalid` when the record says otherwise.
    pub fn on_record(pod: &PodUid) -> Self {
        Self(Decided::OnRecord(pod.clone()))
    }

    /// Returns the decision to stop what is left in the runtime of pods that are over or unknown, and of sandboxes that
    /// were replaced. Nothing is recorded, because no record would be read later; and stops fail open.
    pub fn unrecorded_leftovers() -> Self {
        Self(Decided::Leftovers)
    }

    /// The transaction that is to be committed, given the published state.
    pub(super) fn transaction(self, published: &State) -> Result<Transaction, CommitError> {
        let pod = match self.0 {
            Decided::By(transaction) => return Ok(transaction),
            Decided::Leftovers => return Ok(Transaction::new()),
            Decided::OnRecord(pod) => pod,
        };
        let worker = published.record::<WorkerRecord>(pod.as_str());
        if worker.is_none_or(|worker| worker.phase == WorkerPhase::Sync) {
            return Err(CommitError::Invalid {
                reason: format!("no record says that pod {pod} is stopped"),
            });
        }
        Ok(Transaction::new())
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
    /// Reason for the start, for the journal.
    pub why: String,
    /// Time of the decision.
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

/// Removal of a container from the runtime: the end that the runtime knows is recorded first, unless an end is
/// recorded.
#[derive(Clone, Debug)]
pub struct RemoveContainer {
    pod: PodUid,
    shown: ContainerStatus,
    at: Stamp,
}

impl RemoveContainer {
    /// Returns the intent to remove a container that `status` shows; `None` for one that it does not show or that runs.
    /// The status must come from an inspection, not from a list, or the exit code is not known.
    pub fn new(status: &PodStatus, id: &ContainerId, at: Stamp) -> Option<Self> {
        let shown = status.containers.iter().find(|c| c.id == *id)?;
        (shown.state != ContainerState::Running).then(|| Self {
            pod: status.uid.clone(),
            shown: shown.clone(),
            at,
        })
    }

    /// The container.
    pub fn id(&self) -> &ContainerId {
        &self.shown.id
    }
}

impl Intent for RemoveContainer {
    fn transaction(&self, seen: &State) -> Transaction {
        container_history::end_of(seen, &self.pod, &self.shown, self.at)
    }
}

/// Removing a sandbox that holds no container. Nothing is recorded of sandboxes: the receipt proves that the store takes
/// commits, and so that all the ends that were recorded before are safe.
#[derive(Clone, Debug)]
pub struct RemoveEmptySandbox {
    id: ContainerId,
}

impl RemoveEmptySandbox {
    /// Returns the intent to remove a sandbox that `status` shows; `None` when it does not, or when it shows a container
    /// in it, which the runtime would remove with it.
    pub fn new(status: &PodStatus, id: &ContainerId) -> Option<Self> {
        let is_shown = status.sandboxes.iter().any(|s| s.id == *id);
        let is_empty = !status.containers.iter().any(|c| c.sandbox_id == *id);
        (is_shown && is_empty).then(|| Self { id: id.clone() })
    }

    /// The sandbox.
    pub fn id(&self) -> &ContainerId {
        &self.id
    }
}

impl Intent for RemoveEmptySandbox {
    fn transaction(&self, _: &State) -> Transaction {
        Transaction::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::state::TerminationCause;
    use crate::types::BootId;
    use crate::types::runtime::{SandboxState, SandboxStatus};

    const NOW: Stamp = Stamp {
        boot: BootId(1),
        boottime_ms: 1_000,
        wall_ms: 1_000,
    };

    fn container(id: &str, state: ContainerState) -> ContainerStatus {
        ContainerStatus {
            id: id.into(),
            name: "main".to_owned(),
            attempt: 0,
            sandbox_id: "held".into(),
            state,
            created_at_ns: 0,
            image: String::new(),
            image_ref: String::new(),
            hash: String::new(),
            started_at_ns: 1,
            finished_at_ns: 2,
            exit_code: 7,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            user: None,
        }
    }

    fn status() -> PodStatus {
        let sandbox = |id: &str| SandboxStatus {
            id: id.into(),
            attempt: 0,
            state: SandboxState::NotReady,
            created_at_ns: 0,
            ips: Vec::new(),
            host_network: None,
            runtime_handler: String::new(),
        };
        PodStatus {
            sandboxes: vec![sandbox("held"), sandbox("empty")],
            containers: vec![
                container("ended", ContainerState::Exited),
                container("runs", ContainerState::Running),
            ],
            ..PodStatus::empty("u1".into())
        }
    }

    #[test]
    fn a_container_is_removed_with_the_record_of_its_end_and_not_while_it_runs() {
        let intent = |id: &str| RemoveContainer::new(&status(), &id.into(), NOW);
        assert!(intent("runs").is_none());
        assert!(intent("unknown").is_none());
        let ended = intent("ended").unwrap();
        let mut state = State::default();
        let transaction = ended.transaction(&state);
        assert_eq!(transaction.mutations.len(), 1, "{transaction:?}");
        state.apply(&transaction.mutations[0], 1);
        let record = state.record::<ContainerRecord>("u1/main").unwrap();
        assert_eq!(record.last_exit.as_ref().unwrap().exit_code, 7);
        assert!(ended.transaction(&state).is_empty(), "it is on record");
    }

    // Invariant CORE-4.
    #[test]
    fn a_sandbox_is_removed_when_it_holds_nothing() {
        let intent = |id: &str| RemoveEmptySandbox::new(&status(), &id.into());
        assert!(intent("held").is_none());
        assert!(intent("unknown").is_none());
        assert_eq!(intent("empty").unwrap().id().as_str(), "empty");
    }

    // Invariant CORE-4.
    #[test]
    fn a_stop_is_decided_by_what_is_recorded_or_on_record() {
        let nothing = StopDecision::recorded_by(Transaction::new());
        assert!(matches!(nothing, Err(CommitError::Invalid { .. })));
        let line = Transaction::new().journal(None, "stopping container", "main: it is old");
        assert!(StopDecision::recorded_by(line).is_ok());

        let worker = |phase| WorkerRecord {
            full_name: "web_default".to_owned(),
            queued: NOW,
            started: Some(NOW),
            phase,
            deleted: false,
            restart_requested: false,
            runtime_only: false,
        };
        let finished = WorkerPhase::Finished {
            since: NOW,
            cause: TerminationCause::Deleted,
        };
        let transaction = Transaction::new()
            .put("runs", worker(WorkerPhase::Sync))
            .put("over", worker(finished));
        let mut state = State::default();
        for mutation in &transaction.mutations {
            state.apply(mutation, 1);
        }
        for (pod, is_on_record) in [("runs", false), ("over", true), ("unknown", false)] {
            let decision = StopDecision::on_record(&pod.into());
            assert_eq!(decision.transaction(&state).is_ok(), is_on_record, "{pod}");
        }
    }
}

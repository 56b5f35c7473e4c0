//! Content of a commit: mutations, the versions they were decided on, and their journal lines.

use std::sync::Arc;

use super::{AnyRecord, Record, State, Table, Version};
use crate::types::PodUid;

/// One change of one record.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "puts are the common case; boxing them would cost an allocation each"
)]
pub enum Mutation {
    /// Create or replace.
    Put {
        /// Key within the record's table.
        key: Arc<str>,
        /// The new record.
        record: AnyRecord,
    },
    /// Remove; removing what is not there is not an error.
    Delete {
        /// Table.
        table: Table,
        /// Key within the table.
        key: Arc<str>,
    },
}

/// A record as the decision saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expectation {
    /// Table.
    pub table: Table,
    /// Key.
    pub key: Arc<str>,
    /// Version at the time of the decision, `None` = the record was absent.
    pub version: Option<Version>,
}

/// A line for the journal; the store adds time, sequence and agent generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// The pod it is about.
    pub pod: Option<PodUid>,
    /// Kind of the change, a short stable phrase: `admitted`, `container started`, ….
    pub what: String,
    /// Why, for a human.
    pub why: String,
}

/// A set of changes that becomes visible and durable as one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transaction {
    /// Changes, applied in order.
    pub mutations: Vec<Mutation>,
    /// Versions the changes were decided on; one mismatch refuses the whole transaction.
    pub expectations: Vec<Expectation>,
    /// Lines for the journal, written in the same batch.
    pub journal: Vec<JournalEntry>,
}

impl Transaction {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a put.
    #[must_use]
    pub fn put<R: Record>(mut self, key: impl AsRef<str>, record: R) -> Self {
        self.mutations.push(Mutation::Put {
            key: Arc::from(key.as_ref()),
            record: record.into_any(),
        });
        self
    }

    /// Adds a delete.
    #[must_use]
    pub fn delete<R: Record>(mut self, key: impl AsRef<str>) -> Self {
        self.mutations.push(Mutation::Delete {
            table: R::TABLE,
            key: Arc::from(key.as_ref()),
        });
        self
    }

    /// Refuses the transaction unless the record is still what it is in `seen`.
    #[must_use]
    pub fn expect<R: Record>(mut self, seen: &State, key: impl AsRef<str>) -> Self {
        let key = key.as_ref();
        self.expectations.push(Expectation {
            table: R::TABLE,
            key: Arc::from(key),
            version: seen.version_of(R::TABLE, key),
        });
        self
    }

    /// Adds a journal line about a pod.
    #[must_use]
    pub fn journal(
        mut self,
        pod: Option<&PodUid>,
        what: impl Into<String>,
        why: impl Into<String>,
    ) -> Self {
        self.journal.push(JournalEntry {
            pod: pod.cloned(),
            what: what.into(),
            why: why.into(),
        });
        self
    }

    /// Appends everything `other` holds.
    #[must_use]
    pub fn and(mut self, other: Transaction) -> Self {
        self.mutations.extend(other.mutations);
        self.expectations.extend(other.expectations);
        self.journal.extend(other.journal);
        self
    }

    /// Returns whether there is nothing to commit.
    pub fn is_empty(&self) -> bool {
        self.mutations.is_empty() && self.journal.is_empty()
    }

    /// The first expectation that `state` does not meet.
    pub fn stale_on(&self, state: &State) -> Option<&Expectation> {
        self.expectations
            .iter()
            .find(|e| state.version_of(e.table, &e.key) != e.version)
    }
}

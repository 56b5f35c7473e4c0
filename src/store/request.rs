//! Requests in the queue of the writer, and their answers.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::CommitError;
use super::backend::BackendError;
use super::codec::Encoded;
use super::writer::Writer;
use crate::core::state::{State, Table, Transaction, Version};

/// A record of any table.
pub(super) type AnyKey = (Table, Arc<str>);

/// Requirement of a commit beyond its mutations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing.
    Plain,
    /// To be on the disk, whatever the class of its mutations.
    Durable,
    /// To be held rather than refused, and durable.
    Stop,
}

/// The good answer to a commit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) version: Version,
    pub(super) held: bool,
}

pub(super) type CommitAnswer = oneshot::Sender<Result<Answer, CommitError>>;
pub(super) type DoneAnswer = oneshot::Sender<Result<(), CommitError>>;

/// Request in the queue.
pub(super) enum Request {
    /// See `Store::commit`.
    Commit {
        transaction: Transaction,
        /// By position of the mutation; `None` for deletes.
        encoded: Vec<Option<Encoded>>,
        kind: Kind,
        arrived: Instant,
        /// Room that it occupies in the queue; stops take none.
        room: Option<OwnedSemaphorePermit>,
        answer: CommitAnswer,
    },
    /// See `Store::sync`.
    Sync { answer: DoneAnswer },
    /// See `Store::close`.
    Close { answer: DoneAnswer },
}

/// An answer that waits for the outcome of its group.
pub(super) enum Waiting {
    Commit {
        outcome: Result<Version, CommitError>,
        /// Of a stop: to be held if the group fails.
        stop: Option<Transaction>,
        /// Of a durable commit.
        arrived: Option<Instant>,
        /// Free once it is answered.
        room: Option<OwnedSemaphorePermit>,
        answer: CommitAnswer,
    },
    Sync(DoneAnswer),
}

impl Writer {
    /// The group is published.
    pub(super) fn answer(&self, waiting: Vec<Waiting>) {
        for one in waiting {
            match one {
                Waiting::Commit {
                    outcome,
                    stop,
                    arrived,
                    room,
                    answer,
                } => {
                    drop(room);
                    if outcome.is_ok() {
                        self.metrics.store_commits.inc();
                        if let Some(arrived) = arrived {
                            let took = arrived.elapsed();
                            self.metrics
                                .store_commit_duration
                                .observe(took.as_secs_f64());
                        }
                    }
                    let answered = answer.send(outcome.map(|version| Answer {
                        version,
                        held: false,
                    }));
                    if let (Err(Err(error)), Some(_)) = (answered, stop) {
                        tracing::error!(%error, "the record of a stop that was made ahead of it was refused");
                    }
                }
                Waiting::Sync(answer) => drop(answer.send(Ok(()))),
            }
        }
    }

    /// The group failed: stops are held, everybody else learns that the outcome is unknown.
    pub(super) fn answer_failed(&mut self, waiting: Vec<Waiting>, error: &BackendError) {
        for one in waiting {
            match one {
                Waiting::Commit {
                    outcome: Err(stale),
                    answer,
                    ..
                } => drop(answer.send(Err(stale))),
                Waiting::Commit {
                    stop: Some(transaction),
                    answer,
                    ..
                } => {
                    let held = self.hold(&transaction);
                    drop(answer.send(held));
                }
                Waiting::Commit { answer, .. } => {
                    self.metrics.store_commit_errors.inc();
                    drop(answer.send(Err(unknown(error))));
                }
                Waiting::Sync(answer) => drop(answer.send(Err(unknown(error)))),
            }
        }
    }

    /// Requests that come while the store is degraded: stops are held, everything else is refused.
    pub(super) fn refuse(&mut self, requests: Vec<Request>) {
        let reason = self
            .degraded
            .as_ref()
            .map(|d| d.reason.clone())
            .unwrap_or_default();
        for request in requests {
            match request {
                Request::Commit {
                    transaction,
                    kind: Kind::Stop,
                    answer,
                    ..
                } => {
                    let held = self.hold(&transaction);
                    drop(answer.send(held));
                }
                Request::Commit { answer, .. } => {
                    self.metrics.store_commit_errors.inc();
                    drop(answer.send(Err(CommitError::Unavailable {
                        reason: reason.clone(),
                    })));
                }
                Request::Sync { answer } | Request::Close { answer } => {
                    drop(answer.send(Err(CommitError::Unavailable {
                        reason: reason.clone(),
                    })));
                }
            }
        }
    }
}

pub(super) fn check(transaction: &Transaction, state: &State) -> Result<(), CommitError> {
    match transaction.stale_on(state) {
        None => Ok(()),
        Some(stale) => Err(CommitError::Stale {
            table: stale.table,
            key: stale.key.to_string(),
        }),
    }
}

pub(super) fn unknown(error: &BackendError) -> CommitError {
    CommitError::Unknown {
        reason: error.full_text(),
    }
}

//! Layer 2: the only way to change what the agent remembers.
//!
//! Owns the database, its one writer, and the newest [`State`](crate::core::state::State). In come transactions; out go answers, immutable
//! snapshots for readers, and receipts ([`Committed`], [`StopPermit`]) that effects require.
//!
//! ```text
//! submit ──encode──▶ queue ──▶ writer: check, apply, journal ─▶ one batch ─▶ sync ─▶ publish ─▶ answer
//!                                                     └ relaxed only: publish ─▶ answer … batch, flush
//! ```
//!
//! **Invariant:** a snapshot never shows a durable change that is not on the disk; the one exception are
//! stops that are held while the store is degraded, see [`Store::commit_or_hold`].
//! **Invariant:** changes reach the disk in the order in which they were published.
//! **Invariant:** after a failed write nothing is committed until the disk has been read again.
//! **Invariant:** what is queued is bounded, whatever the disk does, see [`StoreOptions::queue_limit`].
//!
//! The parts: [`codec`] is the format on disk, [`backend`] the engines, `request` its queue, `writer` the group commit and
//! `recovery` the way out of the degraded mode, `paced` the writer of simulations, `shared` what the writer and the handles share, `receipt` the receipts, `health` errors and health,
//! `handle` what callers hold, [`mounts`] what is recorded of the file systems that directories are on.

pub mod backend;
pub mod backup;
pub mod ballast;
mod closed;
pub mod codec;
mod engine;
pub mod former;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod handle;
mod health;
pub mod layout;
pub mod mark;
pub mod migrate;
pub mod mounts;
pub mod open;
mod outcome;
mod paced;
mod receipt;
pub mod recover;
mod recovery;
mod request;
pub mod restore;
mod salvage;
mod shared;
pub mod verify;
mod writer;

pub use handle::{PendingCommit, Store, StoreOptions};
pub use health::{CommitError, SetAside, SpaceReserve, StoreError, StoreHealth};
pub use paced::{Pace, Step};
pub use receipt::{
    Committed, Intent, RemoveContainer, RemoveEmptySandbox, StartIntent, StopDecision, StopPermit,
};

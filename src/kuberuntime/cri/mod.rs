//! The gRPC client of the container runtime.
//!
//! Owns the connection to the runtime's and the image service's unix socket, a deadline for every call,
//! the metrics per call, and the errors a human can act on. In come CRI v1 messages and receipts of the
//! store; out go CRI v1 messages, or what [`convert`] makes of them (`types::runtime`).
//!
//! **Invariant:** a container is started, and a container or sandbox removed, only against a receipt that
//! its record is on disk; something is stopped only with the store's permit.
//!
//! **Invariant:** only reads are repeated, once, when the connection broke; a call that changes something
//! is sent once, and its outcome is read back by the caller.
//!
//! Every future may be dropped at any time: the call is cancelled on the wire, its effect may happen all
//! the same.

mod channel;
mod client;
pub mod convert;
mod create;
mod error;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod images;
mod leases;
mod list;
mod operation;
mod resize;
mod sandboxes;
pub mod stop_signal;
mod streams;
mod termination;
mod trace;

use std::time::Duration;

pub use client::{ContainerEvent, ContainerEventKind, CriClient};
pub use create::{ContainerConfig, ImageMount};
pub use error::{CriError, CriErrorKind};
pub use k8s_cri::v1;
pub use leases::PULL_LEASES;
pub use streams::Streams;
pub use trace::TRACE_TARGET;

/// Deadlines of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CriTimeouts {
    /// Every call without a rule of its own, and the margin on top of a grace period
    /// (`runtimeRequestTimeout`).
    pub request: Duration,
    /// Starting a sandbox: the network plugins are slow, so twice the request timeout as upstream.
    pub run_pod_sandbox: Duration,
    /// Interval at which the runtime is checked during a pull. A pull itself has no deadline. It is given up when the
    /// runtime leaves two such checks in a row unanswered for `request`.
    pub pull_check: Duration,
}

impl CriTimeouts {
    /// The deadlines that follow from `runtimeRequestTimeout`.
    pub fn from_request(request: Duration) -> Self {
        Self {
            request,
            run_pod_sandbox: request.saturating_mul(2),
            pull_check: Duration::from_secs(30),
        }
    }
}

impl Default for CriTimeouts {
    fn default() -> Self {
        Self::from_request(Duration::from_secs(120))
    }
}

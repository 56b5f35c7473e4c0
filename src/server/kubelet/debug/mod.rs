//! Endpoints for operators and support: `/configz`, `/statusz`, `/flagz`, `/checkpoint`, `/debug`.
//!
//! In: the active configuration, and [`DebugHooks`] of the composition root. Nothing here changes what pods do;
//! a checkpoint writes a file, a profile costs CPU while it is taken, and the verbosity of the logs can be set.
//!
//! **Invariant:** no answer holds a secret: header values and passwords in URLs are left out.

mod checkpoint;
mod configz;
mod flagz;
mod gate;
mod loglevel;
mod pprof;
mod profile;
mod statusz;
mod zpage;

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::routing::{any, get, post};

pub(super) use self::gate::gate;
use super::Shared;
use crate::types::Stamp;

/// Sets klog's verbosity; an error says what is wrong.
pub type SetVerbosity = Arc<dyn Fn(u32) -> Result<(), String> + Send + Sync>;

/// Facts and functions that the composition root gives these handlers.
#[derive(Clone, Default)]
pub struct DebugHooks {
    /// Start time of the agent.
    pub started: Option<Stamp>,
    /// Changes the verbosity of the log, for the rest of the agent's run.
    pub set_verbosity: Option<SetVerbosity>,
}

impl fmt::Debug for DebugHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DebugHooks")
            .field("started", &self.started)
            .finish_non_exhaustive()
    }
}

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/configz", get(configz::configz))
        .route("/statusz", get(statusz::statusz))
        .route("/flagz", get(flagz::flagz))
        .route(
            "/checkpoint/{namespace}/{pod}/{container}",
            post(checkpoint::checkpoint),
        )
        .route("/debug/flags/v", any(loglevel::verbosity))
        .merge(profile::routes())
}

#[cfg(test)]
mod tests;

//! `/logs/`: files of the host's log directory, and the query of the journal.

use axum::Router;

use super::Shared;

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
}

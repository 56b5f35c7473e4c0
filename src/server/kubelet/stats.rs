//! `/stats/summary`.

use axum::Router;

use super::Shared;

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
}

//! `/stats/summary`.

use axum::extract::RawQuery;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Json, Router, response::IntoResponse};

use super::Shared;
use crate::stats::summary::Summary;
use crate::stats::{Depth, StatsProvider};

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    // Upstream answers both methods, with and without the slash.
    Router::new()
        .route("/stats/summary", get(summary).post(summary))
        .route("/stats/summary/", get(summary).post(summary))
}

/// Upstream's `handleSummary`.
async fn summary(
    Extension(stats): Extension<StatsProvider>,
    RawQuery(query): RawQuery,
) -> Response {
    let query = query.unwrap_or_default();
    let only = form_urlencoded::parse(query.as_bytes())
        .find(|(key, _)| key == "only_cpu_and_memory")
        .is_some_and(|(_, value)| matches!(&*value, "1" | "t" | "T" | "true" | "TRUE" | "True"));
    let depth = if only {
        Depth::CpuAndMemory
    } else {
        Depth::Full
    };
    let snapshot = stats.snapshot(depth).await;
    // A deeper one may have been at hand.
    let summary = if only {
        Summary::of(&snapshot.cpu_and_memory())
    } else {
        Summary::of(&snapshot)
    };
    Json(summary).into_response()
}

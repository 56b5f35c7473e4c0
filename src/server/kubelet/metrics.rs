//! `/metrics` and what is below it.

use std::convert::Infallible;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};

use super::super::scrape;
use super::Shared;
use crate::stats::{Depth, StatsProvider, cadvisor, own, resource};

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/metrics", get(agent))
        .route("/metrics/resource", get(resources))
        .route("/metrics/cadvisor", get(cgroups))
        .route("/metrics/probes", get(probes))
}

async fn agent(
    State(node): State<Shared>,
    Extension(stats): Extension<StatsProvider>,
    headers: HeaderMap,
) -> Response {
    let volumes = stats.remote_volumes().await;
    let (metrics, now) = (node.metrics.clone(), node.clock.now());
    scrape::answer(&headers, move || own::encode_with(&metrics, now, &volumes)).await
}

async fn resources(Extension(stats): Extension<StatsProvider>, headers: HeaderMap) -> Response {
    let snapshot = stats.snapshot(Depth::CpuAndMemory).await;
    let encode = move || Ok::<_, Infallible>(resource::encode(&snapshot));
    scrape::answer(&headers, encode).await
}

async fn cgroups(Extension(stats): Extension<StatsProvider>, headers: HeaderMap) -> Response {
    let snapshot = stats.snapshot(Depth::Full).await;
    let encode = move || {
        let facts = cadvisor::MachineFacts::read();
        Ok::<_, Infallible>(cadvisor::encode(&snapshot, &facts))
    };
    scrape::answer(&headers, encode).await
}

async fn probes(State(node): State<Shared>, headers: HeaderMap) -> Response {
    let metrics = node.metrics.clone();
    scrape::answer(&headers, move || metrics.encode_probes()).await
}

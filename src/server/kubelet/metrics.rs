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
        .route("/metrics/slis", get(slis).delete(reset_slis))
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

async fn slis(State(node): State<Shared>, headers: HeaderMap) -> Response {
    let metrics = node.metrics.clone();
    scrape::answer(&headers, move || metrics.encode_slis()).await
}

/// Lets the counts begin anew. Upstream: `SLIMetricsWithReset`.
async fn reset_slis(State(node): State<Shared>) -> &'static str {
    node.metrics.healthcheck.clear();
    node.metrics.healthchecks.clear();
    "metrics reset\n"
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use axum::body::Body;
    use axum::http::Request;

    use super::super::testkit::TestNode;

    #[tokio::test]
    async fn counts_of_health_checks_begin_anew_when_they_are_deleted() {
        let node = TestNode::new().serve();
        let counted = async || {
            let text = node.get("/metrics/slis").await.text();
            text.contains("kubernetes_healthchecks_total{name=\"ping\",")
        };
        assert_eq!(node.get("/healthz").await.status, 200);
        assert!(counted().await);
        let reset = Request::delete("/metrics/slis").body(Body::empty());
        let answer = node.send(reset.unwrap()).await;
        assert_eq!((answer.status, &*answer.text()), (200, "metrics reset\n"));
        assert!(!counted().await);
        let other = Request::delete("/metrics").body(Body::empty());
        assert_eq!(node.send(other.unwrap()).await.status, 405);
    }
}

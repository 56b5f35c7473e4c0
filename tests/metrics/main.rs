//! Every metric that the agent shows: accepted by promtool and by the OpenMetrics parser of Prometheus' Python client,
//! named as dashboards expect, documented, and known to our own dashboard and alerts.
//!
//! `HOLDFAST_UPDATE_DOCS=1 cargo test --test metrics` writes the tables of `docs/metrics.md` anew.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod cost;
mod dashboards;
mod families;
mod filled;
mod formats;
mod http;
mod names;
mod tools;
mod world;

//! `/statusz`: which agent this is, since when, and what it serves.

use std::fmt::Write as _;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::json;

use super::super::Shared;
use super::zpage;

/// Paths that `/statusz` lists, without parameters, as upstream.
const PATHS: &[&str] = &[
    "/allocatedPods",
    "/checkpoint",
    "/configz",
    "/debug/flags/v",
    "/debug/pprof",
    "/flagz",
    "/healthz",
    "/metrics",
    "/metrics/cadvisor",
    "/metrics/probes",
    "/metrics/resource",
    "/metrics/slis",
    "/pods",
    "/runningpods",
    "/stats/summary",
    "/statusz",
];

pub(super) async fn statusz(State(node): State<Shared>, headers: HeaderMap) -> Response {
    let now = node.clock.now();
    let started = node.debug.started.unwrap_or(now);
    let up = now.since(started).as_secs();
    let version = env!("CARGO_PKG_VERSION");
    zpage::answer(
        &headers,
        "Statusz",
        || {
            let mut text = String::new();
            let lines = [
                ("Started", started.rfc3339()),
                (
                    "Up",
                    format!(
                        "{} hr {:02} min {:02} sec",
                        up / 3600,
                        up / 60 % 60,
                        up % 60
                    ),
                ),
                ("Binary version", version.to_owned()),
                ("Paths", PATHS.join(" ")),
            ];
            for (name, value) in lines {
                // Writing to a string does not fail.
                writeln!(text, "{name}: {value}").unwrap_or_default();
            }
            text
        },
        || {
            json!({
                "startTime": started.rfc3339(),
                "uptimeSeconds": up,
                "binaryVersion": version,
                "paths": PATHS,
            })
        },
    )
}

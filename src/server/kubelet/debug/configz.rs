//! `/configz`: the active configuration, as an equivalent file. Upstream: `configz.InstallHandler`.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::super::Shared;
use crate::kubeletconfig::encode;

pub(super) async fn configz(State(node): State<Shared>) -> Response {
    let mut config = node.config.kubelet.clone();
    // What the flags made of it.
    config.container_runtime_endpoint = node.config.runtime_endpoint.to_string();
    Json(json!({"kubeletconfig": encode(&config)})).into_response()
}

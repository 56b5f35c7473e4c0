//! `/allocatedPods`: pods with the resources that this node has allocated to them, without their statuses.
//!
//! The wanted and the allocated resources of a pod differ while a resize waits. Upstream: the gate `KubeletAllocatedPodsEndpoint`. One pod
//! is found by its UID, also that of its mirror pod, or by namespace and name.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use k8s_openapi::api::core::v1::Pod;

use super::Shared;
use super::pods::{self, require_restored};
use crate::core::resize;
use crate::core::state::{self, AdmissionDecision, AdmissionRecord};
use crate::types::PodExt;

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/allocatedPods", get(all))
        .route("/allocatedPods/{key}", get(by_uid))
        .route("/allocatedPods/{key}/{name}", get(by_name))
}

/// Returns a pod with what is allocated to it; `None` before it is admitted, and when it was refused.
fn allocated(state: &state::State, pod: &Arc<Pod>) -> Option<Arc<Pod>> {
    let record = state.record::<AdmissionRecord>(pod.uid().as_str())?;
    if record.decision != AdmissionDecision::Admitted {
        return None;
    }
    let allocations = resize::allocated(pod, &record.allocated);
    let changed = resize::with_allocation(pod, &allocations);
    Some(changed.map_or_else(|| Arc::clone(pod), Arc::new))
}

async fn all(State(node): State<Shared>) -> Response {
    if let Err(refusal) = require_restored(&node) {
        return refusal;
    }
    let state = node.store.snapshot();
    let pods = node.pods.all();
    let pods = pods.iter().filter_map(|pod| allocated(&state, pod));
    pods::without_statuses(pods.collect())
}

async fn by_uid(State(node): State<Shared>, Path(uid): Path<String>) -> Response {
    one(&node, |pod| {
        let is_mirror = || {
            let mirror = node.pods.mirror_of(pod);
            mirror.is_some_and(|mirror| mirror.uid().as_str() == uid)
        };
        pod.uid().as_str() == uid || is_mirror()
    })
}

async fn by_name(
    State(node): State<Shared>,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    one(&node, |pod| {
        pod.namespace() == namespace && pod.name() == name
    })
}

/// Answers with the one pod that is meant; with the one that stays, when another of its name still ends.
fn one(node: &Shared, is_meant: impl Fn(&Pod) -> bool) -> Response {
    if let Err(refusal) = require_restored(node) {
        return refusal;
    }
    let state = node.store.snapshot();
    let mut found: Vec<Arc<Pod>> = node.pods.all();
    found.retain(|pod| is_meant(pod));
    found.sort_by_key(|pod| pod.is_deleting());
    let Some(pod) = found.iter().find_map(|pod| allocated(&state, pod)) else {
        return (StatusCode::NOT_FOUND, "no such pod is allocated here\n").into_response();
    };
    let bare = Pod {
        status: None,
        ..Pod::clone(&pod)
    };
    Json(bare).into_response()
}

#[cfg(test)]
mod tests;

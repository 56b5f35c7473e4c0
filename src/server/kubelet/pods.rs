//! `/pods` and `/runningpods/`: what is wanted, and what runs.
//!
//! `/pods` is a `v1.PodList` of the pods the sources want, each with its newest status on record; it is written
//! out piece by piece, so that a full node costs no second copy of its pods. `/runningpods/` is made from the
//! runtime alone. Upstream: `getPods` and `getRunningPods`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::vec;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde_json::{Value, json};

use super::{NodeApi, Shared};
use crate::core::state::{StatusRecord, Versioned};
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::kuberuntime::labels;
use crate::types::PodExt;

/// The body is handed over in pieces of about this many bytes.
const PIECE: usize = 32 * 1024;

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/pods", get(pods))
        .route("/runningpods", get(running_pods))
        .route("/runningpods/", get(running_pods))
}

/// Refuses while the pods of the last run are not back: an empty list would say that nothing is wanted.
#[expect(
    clippy::result_large_err,
    reason = "the error is the answer, and comes once in the life of an agent"
)]
pub(super) fn require_restored(node: &NodeApi) -> Result<(), Response> {
    if node.restored.load(Ordering::Acquire) {
        return Ok(());
    }
    let text = "the pods of this node are not resumed yet: the agent waits for the container runtime, see /readyz\n";
    Err((StatusCode::SERVICE_UNAVAILABLE, text).into_response())
}

async fn pods(State(node): State<Shared>) -> Response {
    if let Err(refusal) = require_restored(&node) {
        return refusal;
    }
    let state = node.store.snapshot();
    let mut pods: Vec<Item> = (node.pods.all().into_iter())
        .map(|pod| Item {
            status: state.statuses.get(pod.uid().as_str()).cloned(),
            pod,
        })
        .collect();
    drop(state);
    in_order(&mut pods);
    PodList::new(pods).answer()
}

/// Answers with these pods, and none of their statuses.
pub(super) fn without_statuses(pods: Vec<Arc<Pod>>) -> Response {
    let mut pods: Vec<Item> = pods
        .into_iter()
        .map(|pod| Item { pod, status: None })
        .collect();
    in_order(&mut pods);
    let list = PodList {
        bare: true,
        ..PodList::new(pods)
    };
    list.answer()
}

fn in_order(pods: &mut [Item]) {
    pods.sort_by(|a, b| {
        let key = |item: &Item| (item.pod.namespace().to_owned(), item.pod.name().to_owned());
        key(a).cmp(&key(b))
    });
}

/// A pod and its newest status, shared with whoever else has them.
struct Item {
    pod: Arc<Pod>,
    status: Option<Arc<Versioned<StatusRecord>>>,
}

/// An item of a typed list: without kind and version of its own.
#[derive(Serialize)]
struct ListedPod<'a> {
    metadata: &'a ObjectMeta,
    #[serde(skip_serializing_if = "Option::is_none")]
    spec: Option<&'a PodSpec>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a PodStatus>,
}

impl Item {
    fn write(&self, into: &mut Vec<u8>, bare: bool) -> Result<(), serde_json::Error> {
        let recorded = self.status.as_ref().map(|r| &*r.record.status);
        let status = recorded.or(self.pod.status.as_ref());
        let listed = ListedPod {
            metadata: &self.pod.metadata,
            spec: self.pod.spec.as_ref(),
            status: status.filter(|_| !bare),
        };
        serde_json::to_writer(into, &listed)
    }
}

/// The list as JSON, in pieces.
struct PodList {
    pods: vec::IntoIter<Item>,
    place: Place,
    /// Without statuses.
    bare: bool,
}

enum Place {
    Head,
    First,
    Later,
    End,
}

impl PodList {
    fn new(pods: Vec<Item>) -> Self {
        Self {
            pods: pods.into_iter(),
            place: Place::Head,
            bare: false,
        }
    }

    fn answer(self) -> Response {
        let body = Body::from_stream(futures::stream::iter(self));
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }

    fn piece(&mut self) -> Result<Vec<u8>, serde_json::Error> {
        let mut piece = Vec::with_capacity(PIECE);
        if matches!(self.place, Place::Head) {
            piece.extend_from_slice(
                br#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#,
            );
            self.place = Place::First;
        }
        while piece.len() < PIECE {
            let Some(item) = self.pods.next() else {
                piece.extend_from_slice(b"]}\n");
                self.place = Place::End;
                break;
            };
            if matches!(self.place, Place::Later) {
                piece.push(b',');
            }
            self.place = Place::Later;
            item.write(&mut piece, self.bare)?;
        }
        Ok(piece)
    }
}

impl Iterator for PodList {
    type Item = Result<Bytes, serde_json::Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if matches!(self.place, Place::End) {
            return None;
        }
        let piece = self.piece();
        if piece.is_err() {
            // The connection is cut: half a list must not look like a whole one.
            self.place = Place::End;
        }
        Some(piece.map(Bytes::from))
    }
}

async fn running_pods(State(node): State<Shared>) -> Response {
    match running(&node.cri).await {
        Ok(list) => Json(list).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// Ready sandboxes and running containers of pods, as upstream's `ToAPIPod` makes pods of them.
async fn running(cri: &CriClient) -> Result<Value, CriError> {
    let sandboxes = cri
        .list_pod_sandboxes(Some(v1::PodSandboxFilter {
            state: Some(v1::PodSandboxStateValue {
                state: v1::PodSandboxState::SandboxReady.into(),
            }),
            ..Default::default()
        }))
        .await?;
    let mut containers = cri
        .list_containers(Some(v1::ContainerFilter {
            state: Some(v1::ContainerStateValue {
                state: v1::ContainerState::ContainerRunning.into(),
            }),
            ..Default::default()
        }))
        .await?;
    containers.sort_by(|a, b| a.created_at.cmp(&b.created_at).then(a.id.cmp(&b.id)));
    // By namespace, name, UID.
    let mut pods: BTreeMap<[String; 3], Vec<Value>> = BTreeMap::new();
    let key = |of: &std::collections::HashMap<String, String>| {
        let label = |name: &str| of.get(name).cloned();
        Some([
            label(labels::POD_NAMESPACE)?,
            label(labels::POD_NAME)?,
            label(labels::POD_UID)?,
        ])
    };
    for sandbox in &sandboxes {
        if let Some(key) = key(&sandbox.labels) {
            pods.entry(key).or_default();
        }
    }
    for container in &containers {
        let (Some(key), Some(name)) = (
            key(&container.labels),
            container.labels.get(labels::CONTAINER_NAME),
        ) else {
            continue;
        };
        let image = container.image.as_ref().map_or("", |i| i.image.as_str());
        (pods.entry(key).or_default()).push(json!({"name": name, "image": image, "resources": {}}));
    }
    let items: Vec<Value> = (pods.into_iter())
        .map(|([namespace, name, uid], containers)| {
            json!({
                "metadata": {"name": name, "namespace": namespace, "uid": uid},
                "spec": {"containers": containers},
                "status": {},
            })
        })
        .collect();
    Ok(json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
}

#[cfg(test)]
mod tests;

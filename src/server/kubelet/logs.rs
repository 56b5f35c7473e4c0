//! `/containerLogs/{namespace}/{pod}/{container}`. Upstream: `getContainerLogs`, `GetKubeletContainerLogs`.
//!
//! The pod's status selects the container. The path of its log comes from the runtime's last status, or from its record
//! once the runtime has forgotten it. Nothing here calls the runtime: logs can be read while it is away.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod query;
mod target;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, FromRef, Path, RawQuery, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use self::query::{Query, parse};
use self::target::{Target, find, has_ended};
use super::Shared;
use crate::container_logs::{self, LogHub, LogOptions, LogReader, follow, snapshot};
use crate::pod_manager::PodManager;
use crate::store::Store;
use crate::types::Clock;

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    routes_over(LogHub::default())
}

fn routes_over<S>(hub: LogHub) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    Logs: FromRef<S>,
{
    Router::new()
        .route(
            "/containerLogs/{namespace}/{pod}/{container}",
            get(container_logs),
        )
        .layer(Extension(hub))
}

/// Dependencies of this module.
#[derive(Clone)]
struct Logs {
    store: Store,
    pods: PodManager,
    clock: Arc<dyn Clock>,
    pod_logs_dir: PathBuf,
    /// `enableDebuggingHandlers`.
    enabled: bool,
    stop: CancellationToken,
}

impl FromRef<Shared> for Logs {
    fn from_ref(node: &Shared) -> Self {
        Self {
            store: node.store.clone(),
            pods: node.pods.clone(),
            clock: Arc::clone(&node.clock),
            pod_logs_dir: node.config.pod_logs_dir().to_owned(),
            enabled: node.config.kubelet.enable_debugging_handlers,
            stop: node.stop.clone(),
        }
    }
}

/// Response that refuses a log.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    status: StatusCode,
    text: String,
}

impl Refusal {
    fn new(status: StatusCode, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, text }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, self.text).into_response()
    }
}

async fn container_logs(
    State(logs): State<Logs>,
    Extension(hub): Extension<LogHub>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refusal> {
    if !logs.enabled {
        let text = "Debug endpoints are disabled.\n";
        return Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text));
    }
    let now = logs.clock.now();
    let Query { options, previous } = parse(query.as_deref().unwrap_or_default(), now)?;
    let target = find(&logs, &namespace, &pod, &container, previous)?;
    // Subscribed before the log is looked at: what is written from then on is told of.
    let subscription = options.follow.then(|| {
        let (store, uid, id) = (logs.store.clone(), target.uid.clone(), target.id.clone());
        let ended = Box::new(move || has_ended(&store.snapshot(), &uid, &id));
        hub.subscribe(&target.path, ended)
    });
    let reader = open(target, options).await?;
    let stop = logs.stop.clone();
    let body = match subscription {
        Some(subscription) => Body::from_stream(follow(reader, subscription, stop)),
        None => Body::from_stream(snapshot(reader, stop)),
    };
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, text)], body).into_response())
}

async fn open(target: Target, options: LogOptions) -> Result<LogReader, Refusal> {
    let Target { path, id, .. } = target;
    let shown = path.display().to_string();
    container_logs::open(path, options).await.map_err(|error| {
        debug!(container = %id, path = shown, %error, "a log cannot be read");
        let text = format!("failed to open log file {shown:?}: {error}");
        Refusal::new(StatusCode::BAD_REQUEST, text)
    })
}

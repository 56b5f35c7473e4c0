//! `/logs/`: files of the host's log directory, and the query of the journal. Upstream: `getLogs`, `ServeLogs`.
//!
//! Serves `/var/log` when `enableSystemLogHandler` is on; with `enableSystemLogQuery`, also what
//! `?query=<service>` finds in the journal or in a file of that name.
//!
//! **Invariant:** nothing outside the directory is read, and nothing but regular files and directories is opened.

mod files;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod journal;
mod query;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRef, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use self::query::NodeLogQuery;
use super::Shared;

const ROOT: &str = "/var/log";
const JOURNALCTL: &str = "journalctl";

/// The routes of this module.
pub(super) fn routes() -> Router<Shared> {
    routes_over()
}

fn routes_over<S>() -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    HostLogs: FromRef<S>,
{
    Router::new()
        .route("/logs", get(logs))
        .route("/logs/", get(logs))
        .route("/logs/{*path}", get(logs))
}

/// Settings of this module.
#[derive(Clone)]
struct HostLogs {
    root: Arc<PathBuf>,
    /// `enableDebuggingHandlers`.
    enabled: bool,
    /// `enableSystemLogHandler`.
    handler: bool,
    /// `enableSystemLogQuery`.
    query: bool,
    journalctl: Arc<PathBuf>,
    stop: CancellationToken,
}

impl FromRef<Shared> for HostLogs {
    fn from_ref(node: &Shared) -> Self {
        Self {
            root: Arc::new(PathBuf::from(ROOT)),
            enabled: node.config.kubelet.enable_debugging_handlers,
            handler: node.config.kubelet.enable_system_log_handler,
            query: node.config.kubelet.enable_system_log_query,
            journalctl: Arc::new(PathBuf::from(JOURNALCTL)),
            stop: node.stop.clone(),
        }
    }
}

/// As Go's `http.Error`.
fn error(status: StatusCode, text: impl Into<String>) -> Response {
    let mut response = (status, text.into() + "\n").into_response();
    let nosniff = header::HeaderValue::from_static("nosniff");
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}

async fn logs(
    State(host): State<HostLogs>,
    uri: Uri,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Response {
    if !host.enabled {
        return error(
            StatusCode::METHOD_NOT_ALLOWED,
            "Debug endpoints are disabled.",
        );
    }
    if !host.handler {
        return error(StatusCode::METHOD_NOT_ALLOWED, "logs endpoint is disabled.");
    }
    let path = uri.path().strip_prefix("/logs").unwrap_or_default();
    let raw = path.strip_prefix('/').unwrap_or_default();
    if host.query {
        match NodeLogQuery::parse(query.as_deref().unwrap_or_default()) {
            Err(problems) => return error(StatusCode::BAD_REQUEST, problems.to_string()),
            Ok(None) => {}
            Ok(Some(query)) => return answer(&host, query, raw, headers).await,
        }
    }
    files::serve(&host.root, raw, &headers, &host.stop).await
}

/// Answers a query of the journal.
async fn answer(host: &HostLogs, query: NodeLogQuery, raw: &str, headers: HeaderMap) -> Response {
    if !raw.is_empty() {
        return error(StatusCode::NOT_ACCEPTABLE, "path not allowed in query mode");
    }
    if let Err(problems) = query.validate() {
        return error(StatusCode::NOT_ACCEPTABLE, problems.to_string());
    }
    match query.file() {
        Some(file) => files::serve_named(&host.root, file, &headers, &host.stop).await,
        None => journal::serve(host, query),
    }
}

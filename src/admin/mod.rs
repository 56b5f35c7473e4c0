//! Layer 6: the local socket through which operators look inside a live agent.
//!
//! Owns `<state-dir>/holdfast.sock` (mode 0600 in a directory of mode 0700). Protocol: HTTP/1.1 with JSON:
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/info` | [`Info`] |
//! | `GET /v1/dump?tables=&pod=&namespace=&name=&uid=&phase=` | [`view::Dump`] |
//! | `GET /v1/history?pod=` | [`view::History`] |
//! | `GET /v1/watch?…` (as dump) | one [`view::Change`] per line, until the agent ends |
//! | `GET /v1/backup` | a backup file |
//! | `POST /v1/drain?seconds=` | has the pods stopped as for a shutdown of the node: `{}` once that is recorded |
//! | `DELETE /v1/drain` | takes it back: `{}` once that is recorded |
//! | `POST /v1/backup` | writes a backup below the state directory: `{"path": …}` |
//!
//! An error is `{"error": …}` with status 400 (a bad query), 403 (not root), 404 (no such pod), 409 (a drain that
//! cannot be taken back), 503 (not yet) or 500.
//!
//! **Invariant:** only root and the agent's own user get an answer, by the kernel's word for the peer.
//! **Invariant:** nothing here writes outside the state directory's backups, and nothing but a drain changes the store.

pub mod client;
mod drain;
mod hooks;
mod stream;
pub mod view;

use std::fmt;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use hooks::StoreHooks;

use crate::apiserver::Standing;
use crate::nodeshutdown::LocalDrain;
use crate::server::conn::serve_connection;
use crate::store::{Store, StoreHealth};
use crate::types::Stamp;
use view::{Quarantined, Query, QueryError};

/// File name of the socket within the state directory.
pub const SOCKET_NAME: &str = "holdfast.sock";
/// Connections served at the same time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 32;
/// Longest path a unix socket address holds, without the final zero.
const MAX_SOCKET_PATH: usize = 107;

/// Reason why the admin socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The path does not fit into a socket address.
    #[error("listen on {}: a socket's path has at most {MAX_SOCKET_PATH} bytes; choose a shorter --state-dir", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// A file operation or the bind failed.
    #[error("{action} {}", path.display())]
    Io {
        /// Verb of the failed operation.
        action: &'static str,
        /// To which path.
        path: PathBuf,
        /// Error of the kernel.
        #[source]
        source: std::io::Error,
    },
}

/// An error of what the composition root supplies.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Functions that the admin server needs from the rest of the agent. Called on threads that may block.
pub trait AdminHooks: Send + Sync + 'static {
    /// Records in quarantine.
    fn quarantined(&self) -> Vec<Quarantined>;
    /// Writes a backup of the present state.
    ///
    /// # Errors
    /// When the state cannot be encoded or `to` cannot be written.
    fn write_backup(&self, to: &mut dyn Write) -> Result<(), BoxError>;
    /// Writes a backup below the state directory, as the automatic ones are, and names it.
    ///
    /// # Errors
    /// When the backup cannot be written.
    fn save_backup(&self) -> Result<PathBuf, BoxError>;
}

/// Facts about the running agent, and its hooks. Cheap to clone.
#[derive(Clone)]
pub struct AdminInfo {
    /// Version of the binary.
    pub version: String,
    /// Start time of the agent.
    pub started: Stamp,
    /// Status of the node's credentials; `None` without an API server.
    pub credentials: Option<Standing>,
    /// See [`AdminHooks`].
    pub hooks: Arc<dyn AdminHooks>,
    /// Takes orders to drain the node.
    pub drain: LocalDrain,
}

impl fmt::Debug for AdminInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminInfo")
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// The answer to `GET /v1/info`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    /// Process ID of the agent.
    pub pid: u32,
    /// Version of its binary.
    pub version: String,
    /// Generation of the agent; counts its starts.
    pub generation: u64,
    /// Node it serves.
    pub node: String,
    /// Start time of the agent, RFC 3339.
    pub started: String,
    /// `ok`, or why the store refuses commits.
    pub store: String,
    /// True if the disk is full.
    pub out_of_space: bool,
    /// Error of the node's credentials, and the commands that fix it. Absent from agents that do not know the field.
    #[serde(default)]
    pub credentials: Option<String>,
}

/// The socket's path in a state directory.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join(SOCKET_NAME)
}

/// Binds the socket of a state directory, replacing what a dead agent left. The caller holds the state
/// directory's lock; the directory is created, or narrowed to mode 0700.
///
/// # Errors
/// See [`AdminError`].
pub fn bind(state_dir: &Path) -> Result<UnixListener, AdminError> {
    let path = socket_path(state_dir);
    if path.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(AdminError::TooLong { path });
    }
    let failed = |action: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| AdminError::Io {
            action,
            path,
            source,
        }
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state_dir)
        .map_err(failed("create directory", state_dir))?;
    // Nobody else may enter before the socket exists, so its own mode has no race.
    fs::set_permissions(state_dir, fs::Permissions::from_mode(0o700))
        .map_err(failed("set the mode of", state_dir))?;
    match fs::remove_file(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("remove the old socket", &path)(error)),
    }
    let listener = UnixListener::bind(&path).map_err(failed("listen on", &path))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
        .map_err(failed("set the mode of", &path))?;
    Ok(listener)
}

/// Serves until `stop` is cancelled; then the socket is removed, watches end, other requests in flight may finish
/// (at most 2 s). The caller holds the state directory's lock until this returns.
pub async fn serve(listener: UnixListener, store: Store, info: AdminInfo, stop: CancellationToken) {
    let routes = routes(store, info, stop.clone());
    let refusal = Router::new()
        .fallback(async || error_response(StatusCode::FORBIDDEN, "only root may ask a live agent"));
    let own_uid = nix::unistd::geteuid().as_raw();
    let tasks = TaskTracker::new();
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            break;
        };
        // Cancel-safe: accept gives a connection or nothing.
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let routes = match is_trusted(&stream, own_uid) {
                    true => routes.clone(),
                    false => refusal.clone(),
                };
                let stop = stop.clone();
                tasks.spawn(async move {
                    serve_connection(stream, routes, stop).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the admin socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    remove(&listener);
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// A missing socket shows the next client that no agent runs.
fn remove(listener: &UnixListener) {
    let address = listener.local_addr();
    if let Some(path) = address.as_ref().ok().and_then(|a| a.as_pathname())
        && let Err(error) = fs::remove_file(path)
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove the admin socket");
    }
}

/// SO_PEERCRED: root, or whoever runs the agent.
fn is_trusted(stream: &UnixStream, own_uid: u32) -> bool {
    match stream.peer_cred() {
        Ok(peer) => may_ask(peer.uid(), own_uid),
        Err(error) => {
            tracing::warn!(%error, "cannot identify the client of the admin socket, refusing it");
            false
        }
    }
}

fn may_ask(peer_uid: u32, own_uid: u32) -> bool {
    peer_uid == 0 || peer_uid == own_uid
}

#[derive(Clone)]
struct Shared {
    store: Store,
    info: AdminInfo,
    stop: CancellationToken,
}

fn routes(store: Store, info: AdminInfo, stop: CancellationToken) -> Router {
    Router::new()
        .route("/v1/info", get(get_info))
        .route("/v1/dump", get(get_dump))
        .route("/v1/history", get(get_history))
        .route("/v1/watch", get(get_watch))
        .route("/v1/drain", post(drain::order).delete(drain::take_back))
        .route("/v1/backup", get(get_backup).post(post_backup))
        .fallback(async || error_response(StatusCode::NOT_FOUND, "no such endpoint"))
        .with_state(Shared { store, info, stop })
}

fn error_response(status: StatusCode, message: impl fmt::Display) -> Response {
    let body = json!({"error": message.to_string()}).to_string();
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn query_error(error: &QueryError) -> Response {
    let status = match error {
        QueryError::NotFound { .. } => StatusCode::NOT_FOUND,
        QueryError::NoTable { .. } | QueryError::NoParameter { .. } => StatusCode::BAD_REQUEST,
    };
    error_response(status, error)
}

fn json_response(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => error_response(StatusCode::INTERNAL_SERVER_ERROR, error),
    }
}

/// Runs `work` where it may take long without holding up the agent.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Response> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.map_err(|error| error_response(StatusCode::INTERNAL_SERVER_ERROR, error))
}

async fn get_info(State(shared): State<Shared>) -> Response {
    let state = shared.store.snapshot();
    let (store, out_of_space) = match &*shared.store.health().borrow() {
        StoreHealth::Ok => ("ok".to_owned(), false),
        StoreHealth::Degraded {
            reason,
            out_of_space,
        } => (reason.clone(), *out_of_space),
    };
    json_response(&Info {
        pid: std::process::id(),
        version: shared.info.version.clone(),
        generation: state.meta().map_or(0, |m| m.generation),
        node: state
            .meta()
            .map(|m| m.node_name.clone())
            .unwrap_or_default(),
        started: shared.info.started.rfc3339(),
        store,
        out_of_space,
        credentials: shared
            .info
            .credentials
            .and_then(|standing| standing.trouble()),
    })
}

async fn get_dump(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let answer = blocking(move || {
        let query = Query::from_query_string(query.as_deref().unwrap_or_default())?;
        let quarantined = shared.info.hooks.quarantined();
        view::dump(&shared.store.snapshot(), quarantined, &query)
    });
    match answer.await {
        Ok(Ok(dump)) => json_response(&dump),
        Ok(Err(error)) => query_error(&error),
        Err(response) => response,
    }
}

async fn get_history(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let answer = blocking(move || {
        let query = Query::from_query_string(query.as_deref().unwrap_or_default())?;
        let pod = query.selector.pod.unwrap_or_default();
        view::history(&shared.store.snapshot(), &pod)
    });
    match answer.await {
        Ok(Ok(history)) => json_response(&history),
        Ok(Err(error)) => query_error(&error),
        Err(response) => response,
    }
}

async fn get_watch(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    match Query::from_query_string(query.as_deref().unwrap_or_default()) {
        Ok(query) => {
            let lines = stream::watch(shared.store, query, shared.stop);
            let kind = [(header::CONTENT_TYPE, "application/jsonl")];
            (kind, Body::from_stream(lines)).into_response()
        }
        Err(error) => query_error(&error),
    }
}

async fn get_backup(State(shared): State<Shared>) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    let bytes = stream::written(move |to| shared.info.hooks.write_backup(to));
    (kind, Body::from_stream(bytes)).into_response()
}

async fn post_backup(State(shared): State<Shared>) -> Response {
    match blocking(move || shared.info.hooks.save_backup()).await {
        Ok(Ok(path)) => json_response(&json!({"path": path})),
        Ok(Err(error)) => error_response(StatusCode::INTERNAL_SERVER_ERROR, error),
        Err(response) => response,
    }
}

#[cfg(test)]
mod tests;

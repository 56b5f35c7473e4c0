//! exec, attach, port-forward and run: streams between a client and a process or port of a pod.
//!
//! The container runtime does the work: it is asked for a URL of its streaming server, and what the client sends is
//! carried there. A client that speaks SPDY is connected through as it is. One that speaks WebSocket is translated to
//! SPDY, which every runtime speaks: all versions of the channel protocols, half-closing ones too. The client never
//! learns the URL and is never redirected.
//!
//! In: requests, the pods that are wanted, the runtime's list of what runs. Out: bytes. Nothing is remembered.
//!
//! **Invariant:** a stream holds a few fixed buffers and no queue, however long a client's messages are: who does not
//! read stops who writes, and nobody else. `slots` bounds how many there are, on the node and to each pod.
//! **Invariant:** every stream ends with its client, with the runtime's end of it, after the idle timeout, when its
//! container is stopped, or with the agent, whichever comes first. The runtime's connection outlives the client until
//! the runtime has answered what was opened over it.

mod activity;
mod channels;
mod dial;
mod error;
mod frames;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod lookup;
mod parameters;
mod relay;
mod run;
mod runtime_io;
mod session;
mod slots;
pub mod spdy;
mod translate;
mod tunnel;
mod websocket;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::{FromRef, Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use tokio_util::sync::CancellationToken;

use self::error::StreamError;
use self::lookup::Target;
use self::session::Call;
use self::slots::Slots;
use super::Shared;
use crate::kuberuntime::cri::CriClient;
use crate::pod_manager::PodManager;
use crate::types::PodExt;

/// Default of `streamingConnectionIdleTimeout`.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(4 * 3600);

/// Dependencies of the handlers.
#[derive(Clone)]
pub struct Streaming {
    /// The pods that are wanted; empty until `restored`.
    pub pods: PodManager,
    /// The runtime.
    pub cri: CriClient,
    /// True once the pods of the previous run are restored.
    pub restored: Arc<AtomicBool>,
    /// Closes every stream.
    pub stop: CancellationToken,
    /// Time without any data after which a stream is closed.
    pub idle_timeout: Duration,
}

impl FromRef<Shared> for Streaming {
    fn from_ref(node: &Shared) -> Self {
        Self {
            pods: node.pods.clone(),
            cri: node.cri.clone(),
            restored: Arc::clone(&node.restored),
            stop: node.stop.clone(),
            idle_timeout: node.config.kubelet.streaming_connection_idle_timeout,
        }
    }
}

/// The routes of this module. Streams are spawned on the `TaskTracker` in the request's extensions, if there is one.
pub(super) fn routes() -> Router<Shared> {
    routes_for()
}

/// The routes by themselves, without authentication: for tests.
pub fn router(streaming: Streaming) -> Router {
    routes_for().with_state(streaming)
}

fn routes_for<S>() -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    Streaming: FromRef<S>,
{
    let exec = || get(exec).post(exec);
    let attach = || get(attach).post(attach);
    let port_forward = || get(port_forward).post(port_forward);
    Router::new()
        .route("/exec/{namespace}/{pod}/{container}", exec())
        .route("/exec/{namespace}/{pod}/{uid}/{container}", exec())
        .route("/attach/{namespace}/{pod}/{container}", attach())
        .route("/attach/{namespace}/{pod}/{uid}/{container}", attach())
        .route("/portForward/{namespace}/{pod}", port_forward())
        .route("/portForward/{namespace}/{pod}/{uid}", port_forward())
        .route("/run/{namespace}/{pod}/{container}", post(run))
        .route("/run/{namespace}/{pod}/{uid}/{container}", post(run))
        .layer(Extension(Slots::default()))
}

type Names = Path<HashMap<String, String>>;

async fn exec(State(node): State<Streaming>, Path(names): Names, request: Request) -> Response {
    answer(async {
        let query = request.uri().query().unwrap_or_default();
        let streams = parameters::streams(query)?;
        let command = parameters::all(query, "command");
        let target = node.target(names)?;
        session::open(node, Call::Exec(streams, command), target, request).await
    })
    .await
}

async fn attach(State(node): State<Streaming>, Path(names): Names, request: Request) -> Response {
    answer(async {
        let streams = parameters::streams(request.uri().query().unwrap_or_default())?;
        let target = node.target(names)?;
        session::open(node, Call::Attach(streams), target, request).await
    })
    .await
}

async fn port_forward(
    State(node): State<Streaming>,
    Path(names): Names,
    request: Request,
) -> Response {
    answer(async {
        let ports = match websocket::is_channels(request.headers()) {
            true => parameters::ports(request.uri().query().unwrap_or_default())?,
            false => Vec::new(),
        };
        let target = node.target(names)?;
        session::open(node, Call::PortForward(ports), target, request).await
    })
    .await
}

async fn run(
    State(node): State<Streaming>,
    Path(names): Names,
    Extension(slots): Extension<Slots>,
    request: Request,
) -> Response {
    answer(async {
        let target = node.target(names)?;
        let slot = slots.take_run(&target.pod.uid())?;
        run::run(&node, &target, request, slot).await
    })
    .await
}

async fn answer(result: impl Future<Output = Result<Response, StreamError>>) -> Response {
    result.await.unwrap_or_else(IntoResponse::into_response)
}

impl Streaming {
    fn target(&self, names: HashMap<String, String>) -> Result<Target, StreamError> {
        if !self.restored.load(Ordering::Relaxed) {
            return Err(StreamError::Starting);
        }
        lookup::find(&self.pods, names)
    }
}

#[cfg(test)]
mod tests;

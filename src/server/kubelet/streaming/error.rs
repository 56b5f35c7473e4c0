//! Reasons to refuse a stream, with upstream's texts and codes.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::kuberuntime::cri::{CriError, CriErrorKind};

/// Seconds after which the runtime has forgotten URLs that nobody used.
const RETRY_AFTER: &str = "60";

/// Reason why a stream is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    /// A parameter.
    #[error("{0}")]
    BadRequest(String),
    /// No pod of that name.
    #[error("pod does not exist")]
    NoPod,
    /// The pod of that name is another one.
    #[error("pod not found")]
    OtherPod,
    /// No such container, or it does not run.
    #[error("container not found ({0:?})")]
    NoContainer(String),
    /// The pod has no sandbox that runs.
    #[error("failed to find sandboxID for pod {0}")]
    NoSandbox(String),
    /// The pods are not known yet.
    #[error("the node agent is starting: the pods of this node are not resumed yet; try again")]
    Starting,
    /// The limit is reached.
    #[error("too many streams are open on this node; close some")]
    Busy,
    /// The pod's share is taken.
    #[error("too many streams to this pod are open; close some")]
    PodBusy,
    /// The client asked for no upgrade.
    #[error("Upgrade request required")]
    UpgradeRequired,
    /// None of the protocols a WebSocket client offers is known.
    #[error("requested protocol(s) are not supported: {0:?}; supports {1:?}")]
    Protocols(Vec<String>, &'static [&'static str]),
    /// The runtime refused.
    #[error("{0}")]
    Cri(#[from] CriError),
    /// The runtime's streaming server.
    #[error("{0}")]
    Runtime(String),
    /// A command of `/run` that failed.
    #[error("command '{command}' exited with {code}: {stderr}")]
    Exit {
        /// The command.
        command: String,
        /// Its exit code.
        code: i32,
        /// Its error output.
        stderr: String,
    },
    /// The agent ends.
    #[error("the node agent is stopping")]
    Stopping,
}

impl StreamError {
    fn status(&self) -> StatusCode {
        match self {
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::NoPod | Self::OtherPod | Self::NoContainer(_) => StatusCode::NOT_FOUND,
            Self::Starting | Self::Busy | Self::PodBusy | Self::Stopping => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Protocols(..) => StatusCode::FORBIDDEN,
            Self::Cri(error) => match error.kind {
                CriErrorKind::NotFound => StatusCode::NOT_FOUND,
                CriErrorKind::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            },
            Self::NoSandbox(_) | Self::UpgradeRequired | Self::Runtime(_) | Self::Exit { .. } => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }
}

impl IntoResponse for StreamError {
    fn into_response(self) -> Response {
        let status = self.status();
        let text = self.to_string();
        if status == StatusCode::TOO_MANY_REQUESTS {
            return (status, [(header::RETRY_AFTER, RETRY_AFTER)], text).into_response();
        }
        (status, text).into_response()
    }
}

//! Errors of requests about the node.

use std::error::Error as _;
use std::future::Future;

use super::REQUEST_TIMEOUT;

/// A request about the node or its lease failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum NodeError {
    /// The API server refused, or could not be reached.
    #[error("{verb} {object}")]
    Request {
        verb: &'static str,
        object: String,
        #[source]
        source: kube::Error,
    },
    /// There was no answer in time.
    #[error("{verb} {object}: no answer within {} s", REQUEST_TIMEOUT.as_secs())]
    TimedOut { verb: &'static str, object: String },
    /// There is no such node, and this agent may not make one.
    #[error(
        "get node {name}: it does not exist; create it, or let the agent do so (registerNode: true)"
    )]
    Absent { name: String },
}

impl NodeError {
    fn code(&self) -> u16 {
        match self {
            Self::Request {
                source: kube::Error::Api(status),
                ..
            } => status.code,
            _ => 0,
        }
    }

    pub(super) fn is_conflict(&self) -> bool {
        self.code() == 409
    }

    pub(super) fn is_not_found(&self) -> bool {
        self.code() == 404
    }

    /// The API server answered with something that a person has to look at; the connection logs an outage.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Absent { .. })
            || matches!(self.code(), 400..=499) && !matches!(self.code(), 408 | 409 | 429)
    }

    /// With all that caused it.
    pub(super) fn text(&self) -> String {
        let mut text = self.to_string();
        let mut source = self.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    }
}

/// Makes a request, and gives it up when it takes too long.
pub(super) async fn request<T>(
    verb: &'static str,
    object: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, NodeError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(NodeError::Request {
            verb,
            object: object.to_owned(),
            source,
        }),
        Err(_) => Err(NodeError::TimedOut {
            verb,
            object: object.to_owned(),
        }),
    }
}

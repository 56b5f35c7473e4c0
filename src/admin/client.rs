//! The other end of the admin socket, for the command line.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, StatusCode};
use futures::StreamExt;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::view::{Dump, History, Query};
use super::{Info, socket_path};

/// Time that a live agent has to accept, and then to begin its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest answer that is taken at once.
const MAX_ANSWER: usize = 1 << 30;

/// Reason why a live agent gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No agent listens.
    #[error("no agent listens on {}", path.display())]
    NotRunning {
        /// The socket.
        path: PathBuf,
    },
    /// The caller may not use the socket.
    #[error("connect to {}: only root may ask a live agent; try with sudo", path.display())]
    Denied {
        /// The socket.
        path: PathBuf,
    },
    /// The agent does not answer in time.
    #[error("the agent on {} does not answer", path.display())]
    Hangs {
        /// The socket.
        path: PathBuf,
    },
    /// The connection broke.
    #[error("talk to the agent on {}", path.display())]
    Broken {
        /// The socket.
        path: PathBuf,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The agent says that what was asked for does not exist.
    #[error("{message}")]
    NotFound {
        /// The agent's words.
        message: String,
    },
    /// The agent refused or failed.
    #[error("the agent answers {status}: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// The agent's words.
        message: String,
    },
}

/// A live agent.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// The agent that holds `state_dir`, if one listens there.
    ///
    /// # Errors
    /// [`ClientError::NotRunning`] when none does; others if that is unknown.
    pub async fn connect(state_dir: &Path) -> Result<Self, ClientError> {
        let client = Self {
            path: socket_path(state_dir),
        };
        client.open().await.map(|_| client)
    }

    /// `GET /v1/info`
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn info(&self) -> Result<Info, ClientError> {
        self.get("/v1/info").await
    }

    /// `GET /v1/dump`
    ///
    /// # Errors
    /// See [`ClientError`]; `NotFound` when a pod that the query names does not exist.
    pub async fn dump(&self, query: &Query) -> Result<Dump, ClientError> {
        self.get(&format!("/v1/dump?{}", query.to_query_string()))
            .await
    }

    /// `GET /v1/history`
    ///
    /// # Errors
    /// See [`ClientError`]; `NotFound` when the pod does not exist.
    pub async fn history(&self, pod: &str) -> Result<History, ClientError> {
        let mut query = form_urlencoded::Serializer::new(String::new());
        let query = query.append_pair("pod", pod).finish();
        self.get(&format!("/v1/history?{query}")).await
    }

    /// `GET /v1/watch`
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn watch(&self, query: &Query) -> Result<Download, ClientError> {
        let path = format!("/v1/watch?{}", query.to_query_string());
        self.request(Method::GET, &path).await
    }

    /// `GET /v1/backup`
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn backup(&self) -> Result<Download, ClientError> {
        self.request(Method::GET, "/v1/backup").await
    }

    /// `POST /v1/backup`: the agent writes a backup below its state directory and names it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn save_backup(&self) -> Result<PathBuf, ClientError> {
        #[derive(Deserialize)]
        struct Saved {
            path: PathBuf,
        }
        let answer = self.request(Method::POST, "/v1/backup").await?;
        let saved: Saved = self.decode(answer).await?;
        Ok(saved.path)
    }

    /// `POST /v1/drain`: the agent stops the pods as for a shutdown of the node, within `timeout` if one is given.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drain(&self, timeout: Option<Duration>) -> Result<(), ClientError> {
        let query = timeout.map_or(String::new(), |of| format!("?seconds={}", of.as_secs()));
        let path = format!("/v1/drain{query}");
        self.request(Method::POST, &path).await.map(drop)
    }

    /// `DELETE /v1/drain`: the agent admits and starts pods again.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cancel_drain(&self) -> Result<(), ClientError> {
        self.request(Method::DELETE, "/v1/drain").await.map(drop)
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let answer = self.request(Method::GET, path).await?;
        self.decode(answer).await
    }

    async fn decode<T: DeserializeOwned>(&self, answer: Download) -> Result<T, ClientError> {
        let bytes = axum::body::to_bytes(answer.body, MAX_ANSWER)
            .await
            .map_err(|source| self.broken(source))?;
        serde_json::from_slice(&bytes).map_err(|source| self.broken(source))
    }

    async fn request(&self, method: Method, path: &str) -> Result<Download, ClientError> {
        let stream = self.open().await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|source| self.broken(source))?;
        // Ends by itself when the answer has been read or dropped.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to the agent ended early");
            }
        });
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "holdfast")
            .body(Body::empty())
            .map_err(|source| self.broken(source))?;
        let response = tokio::time::timeout(PATIENCE, sender.send_request(request))
            .await
            .map_err(|_| self.hangs())?
            .map_err(|source| self.broken(source))?;
        let status = response.status();
        let answer = Download {
            body: Body::new(response.into_body()),
        };
        if status.is_success() {
            return Ok(answer);
        }
        #[derive(Deserialize)]
        struct Refusal {
            error: String,
        }
        let message = self.decode::<Refusal>(answer).await?.error;
        Err(match status {
            StatusCode::NOT_FOUND => ClientError::NotFound { message },
            _ => ClientError::Refused {
                status: status.as_u16(),
                message,
            },
        })
    }

    async fn open(&self) -> Result<UnixStream, ClientError> {
        let connected = tokio::time::timeout(PATIENCE, UnixStream::connect(&self.path))
            .await
            .map_err(|_| self.hangs())?;
        connected.map_err(|error| {
            let path = self.path.clone();
            match error.kind() {
                io::ErrorKind::NotFound
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::InvalidInput => ClientError::NotRunning { path },
                io::ErrorKind::PermissionDenied => ClientError::Denied { path },
                _ => self.broken(error),
            }
        })
    }

    fn hangs(&self) -> ClientError {
        ClientError::Hangs {
            path: self.path.clone(),
        }
    }

    fn broken(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
        ClientError::Broken {
            path: self.path.clone(),
            source: source.into(),
        }
    }
}

/// An answer that is read piece by piece.
#[derive(Debug)]
pub struct Download {
    body: Body,
}

impl Download {
    /// The pieces, until the agent has sent all of them; an error means that the rest is missing.
    pub fn pieces(self) -> impl futures::Stream<Item = Result<Bytes, axum::Error>> + Unpin {
        self.body.into_data_stream().map(|piece| piece)
    }
}

//! Layer 3: the API server. Owns how it is reached: credentials, limits, retries, and whether it answers.
//!
//! In: a kubeconfig, perhaps one to bootstrap with. Out: [`ApiClient`], which every module that talks to the API
//! server shares, and [`Credentials`], the task that keeps it good.
//!
//! Invariants:
//! - Neither a server that is away nor an expired certificate keeps the agent from starting. On a node that was in use,
//!   no file of the credentials does.
//! - Every request reports whether the server answered to [`Connection`]; an outage is logged once.
//! - Leases never wait behind other requests, and no request waits behind watches.
//! - Credentials that change on disk or are renewed are used without a restart. What was in flight with the old
//!   ones fails then, unless only the token is another: that is exchanged under what is in flight.
//! - The lifeline makes no request but that for the certificate of this node, and only when the node's has expired.
//! - An exec plugin is run by one task, not by requests: never twice at once, however many of them are refused.

mod cluster;
mod connection;
mod connector;
mod credentials;
pub mod csr;
mod failure;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod kubeconfig;
mod lifeline;
mod limit;
mod plugin;
mod proxy;
mod refusals;
mod standing;
#[cfg(test)]
pub(crate) mod testkit;
mod tls;
mod transport;
mod tunnel;
mod turns;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use hyper::body::{Body as HttpBody, Bytes};
use hyper::http::{Request, Response};
use kube::client::Body;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, Service};

pub use cluster::{cluster_of, shown_node};
pub use connection::{Connection, Reachability};
pub use credentials::Credentials;
pub use failure::{Failure, pause, retry_after};
pub use lifeline::Lifeline;
pub use standing::Standing;

use crate::kubeletconfig::AgentConfig;
use crate::types::metrics::Metrics;
use crate::types::time::Clock;
use limit::Limiter;
use plugin::Missing;
use transport::Transport;

/// A client of the API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiClient {
    client: kube::Client,
    connection: Connection,
    standing: Standing,
}

impl std::fmt::Debug for ApiClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiClient")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

impl ApiClient {
    /// A client whose requests report to `connection`.
    pub fn new(client: kube::Client, connection: Connection) -> Self {
        Self {
            client,
            connection,
            standing: Standing::default(),
        }
    }

    /// A client that sends through `service` what it would send over connections: everything else is as with
    /// [`connect`]. For simulations. `qps` and `burst` as in [`ApiSettings`].
    pub fn over<S, B>(service: S, (qps, burst): (u32, u32), clock: Arc<dyn Clock>) -> Self
    where
        S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        let connection = Connection::default();
        let transport = Transport::new(
            Limiter::new(qps, burst),
            connection.clone(),
            clock,
            Metrics::default(),
        );
        transport.install_service(service);
        Self::new(transport.client(), connection)
    }

    /// For `kube::Api`.
    pub fn kube(&self) -> kube::Client {
        self.client.clone()
    }

    /// Returns the reachability of the API server.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Returns the status of the node's credentials.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }
}

/// Settings for the connection to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiSettings {
    /// `--kubeconfig`; none for static pods only.
    pub kubeconfig: Option<PathBuf>,
    /// `--bootstrap-kubeconfig`.
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// `--lifeline-kubeconfig`, or the systemd credential.
    pub lifeline: Option<Lifeline>,
    /// `--cert-dir`.
    pub cert_dir: PathBuf,
    /// Name of the node whose certificate is requested.
    pub node_name: String,
    /// True if the certificate is renewed before it expires.
    pub rotate_certificates: bool,
    /// Requests per second, without leases.
    pub qps: u32,
    /// Requests at once after a quiet time.
    pub burst: u32,
    /// Wait for files that are missing or broken at the start, as on a node that has pods to look after.
    pub waits_for_files: bool,
}

impl From<&AgentConfig> for ApiSettings {
    fn from(config: &AgentConfig) -> Self {
        Self {
            kubeconfig: config.kubeconfig.clone(),
            bootstrap_kubeconfig: config.bootstrap_kubeconfig.clone(),
            lifeline: config.lifeline_kubeconfig.clone().map(Lifeline::file),
            cert_dir: config.cert_dir.clone(),
            node_name: config.node_name.clone(),
            rotate_certificates: config.kubelet.rotate_certificates,
            qps: config.kubelet.kube_api_qps,
            burst: config.kubelet.kube_api_burst,
            waits_for_files: false,
        }
    }
}

/// Reason why the node's files give no access to the API server.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The file is not there or may not be read.
    #[error("read kubeconfig {}; check --kubeconfig, or give --bootstrap-kubeconfig to have it made", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no kubeconfig.
    #[error("parse kubeconfig {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<kube::config::KubeconfigError>,
    },
    /// It does not say which of its contexts counts.
    #[error("kubeconfig {} has no current-context; name one of its contexts there: {known}", path.display())]
    NoContext {
        /// The file.
        path: PathBuf,
        /// The contexts in it.
        known: String,
    },
    /// It refers to something that is not in it.
    #[error("kubeconfig {} refers to the {what} {name:?}, but {known}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// `context` or `cluster`.
        what: &'static str,
        /// The name.
        name: String,
        /// Those in it.
        known: String,
    },
    /// A value in it cannot be used.
    #[error("kubeconfig {names}: {problem}")]
    Unusable {
        /// File, context, cluster and user.
        names: String,
        /// Description of the error.
        problem: String,
    },
    /// Its exec plugin gives no credentials.
    #[error("get credentials for kubeconfig {names}")]
    Plugin {
        /// File, context, cluster and user.
        names: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No connection can be made of it: keys or certificates.
    #[error("make a client of kubeconfig {names}")]
    Client {
        /// File, context, cluster and user.
        names: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// The kubeconfig could not be written after the bootstrap.
    #[error("write kubeconfig {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No client certificate was given.
    #[error("get a client certificate")]
    Certificate(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The agent is ending.
    #[error("the agent is ending")]
    Interrupted,
}

/// Gives the client, whose requests `metrics` counts, and the task that keeps its credentials good ([`Credentials::run`]; without it no
/// certificate is asked for, renewed or reloaded, and an exec plugin is not run). `None` without a kubeconfig.
///
/// Reads files only: it does not wait for the server. Until the node has credentials (bootstrap, exec plugin, files that
/// are missing or broken), requests fail at once. Call it within the async runtime the client is used in.
///
/// # Errors
/// When what was given cannot be used: a file that is missing, does not parse or contradicts itself. With
/// [`ApiSettings::waits_for_files`], [`Credentials::run`] reads it again until it can be used.
pub async fn connect(
    settings: &ApiSettings,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
) -> Result<Option<(ApiClient, Credentials)>, ApiError> {
    let Some(kubeconfig) = settings.kubeconfig.clone() else {
        return Ok(None);
    };
    let connection = Connection::default();
    let limiter = Limiter::new(settings.qps, settings.burst);
    let transport = Transport::new(limiter, connection.clone(), clock.clone(), metrics);
    let client = ApiClient::new(transport.client(), connection);
    let standing = client.standing().clone();
    let credentials =
        Credentials::new(settings.clone(), kubeconfig, transport, standing, clock).await?;
    Ok(Some((client, credentials)))
}

/// Returns the server of the kubeconfig at `path`, as it is written there. Blocking.
pub fn server_of(path: &Path) -> Option<String> {
    kubeconfig::server_of(path)
}

/// Does with the kubeconfig at `path` what [`connect`] does, makes no connection, runs no plugin, and returns what is
/// doubtful about it at `now`, in seconds since 1970. `content` is used in place of the file's, with paths relative to
/// the working directory.
///
/// Reads the files that it names. Blocking. Call it within an async runtime.
///
/// # Errors
/// When it can never be used, or its exec plugin cannot be run.
pub fn check(path: &Path, content: Option<&str>, now: i64) -> Result<Vec<String>, ApiError> {
    let loaded = match content {
        None => kubeconfig::load(path, None)?,
        Some(text) => kubeconfig::of_text(path, text)?,
    };
    let bearer = loaded.bearer.clone().map(Arc::new);
    let closed = CancellationToken::new();
    connector::build(&loaded, &Arc::new(ArcSwapOption::new(bearer)), &closed).map_err(
        |source| ApiError::Client {
            names: loaded.names.clone(),
            source: Box::new(source),
        },
    )?;
    let mut doubts = Vec::new();
    if let Some(complaint) = loaded.life.and_then(|life| life.complaint(now)) {
        doubts.push(format!("its client certificate {complaint}"));
    }
    if loaded.config.accept_invalid_certs {
        doubts.push(
            "insecure-skip-tls-verify trusts whoever answers; give a certificate-authority"
                .to_owned(),
        );
    }
    if let Some(plugin) = &loaded.plugin {
        let problem = plugin.missing(std::env::var_os("PATH"));
        match problem {
            Some(Missing::Program(problem)) => {
                let names = loaded.names.clone();
                return Err(ApiError::Unusable { names, problem });
            }
            Some(Missing::InPath(doubt)) => doubts.push(doubt),
            None => {}
        }
    }
    Ok(doubts)
}

#[cfg(test)]
mod tests;

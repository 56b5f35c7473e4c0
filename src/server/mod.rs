//! Layer 6: healthz, readyz, livez and metrics over HTTP.
//!
//! Owns the health server on `healthzBindAddress:healthzPort`. In: [`HealthChecks`], closures that look at
//! the rest of the agent, and [`Metrics`]. Out: nothing; every request is answered from memory.
//!
//! **Invariant:** a request changes nothing but counts, waits for nothing, and takes bounded time and memory.

pub(crate) mod conn;
pub mod device_plugins;
mod door;
pub mod kubelet;
mod scrape;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::door::{Door, Service};
use crate::stats::own;
use crate::types::metrics::{HealthcheckLabel, HealthcheckResultLabel, Metrics};
use crate::types::{Clock, Stamp};

/// Connections served at the same time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// Longest wait of a response for its reader. Silent readers must not keep others from `/healthz`.
const READER_PATIENCE: Duration = Duration::from_secs(10);
/// The least time the sync loop may stand still; upstream's `SyncLoopHealthCheck` has two sync periods.
const MIN_SYNC_LOOP_PATIENCE: Duration = Duration::from_secs(300);

/// Error that keeps a port from being served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be bound.
    #[error("{}", bind_message(*addr, source))]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Error of the kernel.
        #[source]
        source: std::io::Error,
    },
    /// An address of the kubelet's API cannot be bound.
    #[error("{}", api_bind_message(*addr, flag, source))]
    BindApi {
        /// The address.
        addr: SocketAddr,
        /// The flag that gives the port.
        flag: &'static str,
        /// Error of the kernel.
        #[source]
        source: std::io::Error,
    },
    /// A port is taken, and a kubelet runs on this node.
    #[error(
        "port {} is in use and a kubelet runs (process {pid}): two agents would stop each other's pods; stop the kubelet \
         (systemctl disable --now kubelet)", address.port()
    )]
    Kubelet {
        /// The address that cannot be bound.
        address: SocketAddr,
        /// Process ID.
        pid: u32,
    },
    /// The kubelet's API has no certificate.
    #[error(transparent)]
    Tls(#[from] kubelet::TlsError),
}

fn api_bind_message(addr: SocketAddr, flag: &str, source: &std::io::Error) -> String {
    let port = addr.port();
    match source.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            "serve the kubelet's API on {addr}: port {port} is in use (by another agent or a kubelet?); stop its \
             holder, or choose another port with {flag} (--enable-server=false turns the API off)"
        ),
        std::io::ErrorKind::AddrNotAvailable => format!(
            "serve the kubelet's API on {addr}: this machine does not have that address; choose another with --address"
        ),
        _ => format!("serve the kubelet's API on {addr}; see --address and {flag}"),
    }
}

fn bind_message(addr: SocketAddr, source: &std::io::Error) -> String {
    let port = addr.port();
    match source.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            "serve healthz on {addr}: port {port} is in use (by another agent or a kubelet?); stop its \
             holder, or choose another port with --healthz-port (0 turns the health server off)"
        ),
        std::io::ErrorKind::AddrNotAvailable => format!(
            "serve healthz on {addr}: this machine does not have that address; \
             choose another with --healthz-bind-address"
        ),
        _ => format!("serve healthz on {addr}; see --healthz-bind-address and --healthz-port"),
    }
}

/// Looks at one thing; an error says what is wrong. Must not block.
pub type Check = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;
/// Says what is worth knowing of one thing; `None` when nothing is. Must not block.
pub type Note = Arc<dyn Fn() -> Option<String> + Send + Sync>;
/// Looks at one thing at a given time. Must not block.
pub type TimedCheck = Arc<dyn Fn(Stamp) -> Result<(), String> + Send + Sync>;

/// Health checks, supplied by the composition root. Cheap to clone.
#[derive(Clone)]
pub struct HealthChecks {
    /// Time for the sync loop's check.
    pub clock: Arc<dyn Clock>,
    /// Fails when the sync loop is stuck; see [`sync_loop_check`]. Part of healthz and livez.
    pub sync_loop: TimedCheck,
    /// Checks of readyz, by name: `restored`, `runtime`, `store`, …
    pub ready: Vec<(&'static str, Check)>,
    /// Notes that readyz lists with `?verbose`, by name. A note never fails the check: pods run without its subject.
    pub notes: Vec<(&'static str, Note)>,
}

impl std::fmt::Debug for HealthChecks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ready: Vec<_> = self.ready.iter().map(|(name, _)| name).collect();
        f.debug_struct("HealthChecks")
            .field("ready", &ready)
            .finish_non_exhaustive()
    }
}

/// The sync loop's check: fails once its newest monitor stamp is older than
/// max(2 × `sync_frequency`, 5 minutes). A loop that has not stamped yet is healthy.
pub fn sync_loop_check(
    monitor: impl Fn() -> Option<Stamp> + Send + Sync + 'static,
    sync_frequency: Duration,
) -> TimedCheck {
    let patience = sync_frequency.saturating_mul(2).max(MIN_SYNC_LOOP_PATIENCE);
    Arc::new(move |now| match monitor() {
        Some(stamp) if now.since(stamp) > patience => Err(format!(
            "the sync loop last moved {} s ago, more than {} s",
            now.since(stamp).as_secs(),
            patience.as_secs()
        )),
        _ => Ok(()),
    })
}

/// Serves healthz on this address, until `stop` is cancelled. Binds the port before it returns the server, if that is
/// possible then; otherwise the server logs why not and tries again.
///
/// # Errors
/// [`ServerError::Kubelet`].
pub async fn open(
    address: SocketAddr,
    health: HealthChecks,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<impl Future<Output = ()> + Send + 'static, ServerError> {
    let clock = Arc::clone(&health.clock);
    let door = Door::open(address, Service::Health, &*clock).await?;
    Ok(async move {
        if let Some(listener) = door.listener(&*clock, &stop).await {
            serve(listener, health, metrics, stop).await;
        }
    })
}

/// Serves until `stop` is cancelled, then lets requests in flight finish (at most 2 s).
pub async fn serve(
    listener: TcpListener,
    health: HealthChecks,
    metrics: Metrics,
    stop: CancellationToken,
) {
    accept(listener, routes(health, metrics), READER_PATIENCE, stop).await;
}

async fn accept(
    listener: TcpListener,
    routes: Router,
    reader_patience: Duration,
    stop: CancellationToken,
) {
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
                let stream = conn::Impatient::new(stream, reader_patience);
                let connection = conn::serve_connection(stream, routes.clone(), stop.clone());
                tasks.spawn(async move {
                    connection.await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the health server");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    tasks.close();
    tasks.wait().await;
}

#[derive(Clone)]
struct Shared {
    health: HealthChecks,
    metrics: Metrics,
}

fn routes(health: HealthChecks, metrics: Metrics) -> Router {
    let clock = Arc::clone(&health.clock);
    Router::new()
        .route("/metrics", get(encode_metrics))
        .route("/metrics/probes", get(encode_probes))
        .route("/metrics/slis", get(encode_slis))
        .with_state(Measured {
            metrics: metrics.clone(),
            clock,
        })
        .merge(health_routes(health, metrics))
}

/// healthz, livez and readyz.
fn health_routes(health: HealthChecks, metrics: Metrics) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/healthz/ping", get(ping))
        .route("/healthz/log", get(ping))
        .route("/healthz/syncloop", get(healthz_sync_loop))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(Shared { health, metrics })
}

async fn ping() -> &'static str {
    "ok"
}

async fn healthz(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    report(&shared, "healthz", &alive(&shared), &[], query.as_deref())
}

async fn livez(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    report(&shared, "livez", &alive(&shared), &[], query.as_deref())
}

async fn healthz_sync_loop(State(shared): State<Shared>) -> Response {
    let result = (shared.health.sync_loop)(shared.health.clock.now());
    match result {
        Ok(()) => "ok".into_response(),
        Err(reason) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{reason}\n")).into_response(),
    }
}

async fn readyz(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let mut results = vec![("ping", Ok(()))];
    results.extend((shared.health.ready.iter()).map(|(name, check)| (*name, check())));
    let notes = shared.health.notes.iter();
    let notes: Vec<_> = notes.map(|(name, note)| (*name, note())).collect();
    report(&shared, "readyz", &results, &notes, query.as_deref())
}

fn alive(shared: &Shared) -> Vec<(&'static str, Result<(), String>)> {
    let sync_loop = (shared.health.sync_loop)(shared.health.clock.now());
    vec![("ping", Ok(())), ("log", Ok(())), ("syncloop", sync_loop)]
}

/// The API machinery's format: `ok`, or one line per check; `?verbose` always lists, `?exclude=` leaves out. Checks that
/// are not left out are counted. Upstream: `handleRootHealth`.
fn report(
    shared: &Shared,
    what: &str,
    results: &[(&'static str, Result<(), String>)],
    notes: &[(&'static str, Option<String>)],
    query: Option<&str>,
) -> Response {
    let query: Vec<_> = form_urlencoded::parse(query.unwrap_or_default().as_bytes()).collect();
    let verbose = query.iter().any(|(key, _)| key == "verbose");
    let excluded =
        |name: &str| (query.iter()).any(|(key, value)| key == "exclude" && value == name);
    let mut text = String::new();
    let mut failed = false;
    for (name, result) in results {
        if !excluded(name) {
            count(&shared.metrics, name, what, result.is_ok());
        }
        let written = match result {
            _ if excluded(name) => writeln!(text, "[+]{name} excluded: ok"),
            Ok(()) => writeln!(text, "[+]{name} ok"),
            Err(reason) => {
                failed = true;
                writeln!(text, "[-]{name} failed: {reason}")
            }
        };
        if written.is_err() {
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
    }
    for (name, note) in notes {
        let note = note.as_ref().map(|note| format!(", but {note}"));
        text.push_str(&format!("[+]{name} ok{}\n", note.unwrap_or_default()));
    }
    if failed {
        let body = format!("{text}{what} check failed\n");
        return (StatusCode::INTERNAL_SERVER_ERROR, body).into_response();
    }
    match verbose {
        true => format!("{text}{what} check passed\n").into_response(),
        false => "ok".into_response(),
    }
}

/// Notes what a check said to who asked for `what`. Upstream: `ObserveHealthcheck`.
fn count(metrics: &Metrics, check: &str, what: &str, is_healthy: bool) {
    let newest = HealthcheckLabel {
        name: check.to_owned(),
        r#type: what.to_owned(),
    };
    metrics
        .healthcheck
        .get_or_create(&newest)
        .set(i64::from(is_healthy));
    let result = HealthcheckResultLabel {
        name: check.to_owned(),
        status: if is_healthy { "success" } else { "error" }.to_owned(),
        r#type: what.to_owned(),
    };
    metrics.healthchecks.get_or_create(&result).inc();
}

/// Source of `/metrics`.
#[derive(Clone)]
struct Measured {
    metrics: Metrics,
    clock: Arc<dyn Clock>,
}

async fn encode_metrics(State(of): State<Measured>, headers: HeaderMap) -> Response {
    let now = of.clock.now();
    scrape::answer(&headers, move || own::encode(&of.metrics, now)).await
}

async fn encode_probes(State(of): State<Measured>, headers: HeaderMap) -> Response {
    scrape::answer(&headers, move || of.metrics.encode_probes()).await
}

async fn encode_slis(State(of): State<Measured>, headers: HeaderMap) -> Response {
    scrape::answer(&headers, move || of.metrics.encode_slis()).await
}

#[cfg(test)]
mod tests;

//! Layer that every request passes: the rate limit, the deadline, the report of the server's reachability, and the
//! connections of the current credentials, which can be exchanged while requests run.

use std::error::Error as StdError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use futures::future::BoxFuture;
use hyper::body::{Body as HttpBody, Bytes};
use hyper::http::header::{CONTENT_TYPE, DATE, RETRY_AFTER};
use hyper::http::{HeaderValue, Request, Response, StatusCode};
use kube::client::Body;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::{BoxError, Service};

use super::connector::{self, Bearer};
use super::kubeconfig::{Life, Loaded, date};
use super::limit::Limiter;
use super::refusals::{Asked, Refusals, Report};
use super::{Connection, Reachability};
use crate::core::credentials::MAX_SKEW;
use crate::types::metrics::{Metrics, RequestLabel, RequestTimeLabel};
use crate::types::time::{Clock, Stamp};

/// Deadline for the head of the server's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Reason why a request did not reach the server.
#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error("the node has no credentials yet")]
    NoCredentials,
    #[error("the API server did not answer within {ANSWER_TIMEOUT:?}")]
    Timeout,
}

/// The connections of one set of credentials.
struct Generation {
    client: kube::Client,
    origin: Origin,
    bearer: Bearer,
    // What is in flight fails when this goes.
    _open: DropGuard,
}

/// Origin of credentials, and the server that they are for.
#[derive(Clone)]
struct Origin {
    names: String,
    host: String,
    life: Option<Life>,
}

/// States that were already logged, so that they are not logged with every request.
#[derive(Default)]
struct Told {
    unauthorized: bool,
    skewed: bool,
    refusals: Refusals,
}

/// See the module.
pub(super) struct Transport {
    current: ArcSwapOption<Generation>,
    limiter: Limiter,
    connection: Connection,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    told: Mutex<Told>,
    /// Time of the server's clock in its newest answer, in seconds since 1970, and the arrival of that answer.
    server_time: Mutex<Option<(i64, Stamp)>>,
    /// Counts credentials; that of the current ones.
    serial: AtomicU64,
    /// The newest credentials that were refused.
    refused: watch::Sender<u64>,
}

impl Transport {
    pub(super) fn new(
        limiter: Limiter,
        connection: Connection,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Arc<Self> {
        Arc::new(Self {
            current: ArcSwapOption::empty(),
            limiter,
            connection,
            clock,
            metrics,
            told: Mutex::default(),
            server_time: Mutex::default(),
            serial: AtomicU64::new(0),
            refused: watch::Sender::new(0),
        })
    }

    /// A client that sends through here.
    pub(super) fn client(self: &Arc<Self>) -> kube::Client {
        kube::Client::new(Front(self.clone()), "default")
    }

    /// Uses these credentials from now on. What is in flight with the ones before fails. May block: certificates are
    /// read. Needs an async runtime around it.
    ///
    /// # Errors
    /// When no client can be made of them; the ones before stay.
    pub(super) fn install(&self, loaded: &Loaded) -> Result<(), kube::Error> {
        let open = CancellationToken::new();
        let bearer = Bearer::default();
        bearer.store(loaded.bearer.clone().map(Arc::new));
        let client = connector::build(loaded, &bearer, &open)?;
        let host = loaded.config.cluster_url.authority();
        let origin = Origin {
            names: loaded.names.clone(),
            host: host.map(ToString::to_string).unwrap_or_default(),
            life: loaded.life,
        };
        let until = origin.life.map_or(0, |life| life.until);
        self.metrics.client_certificate_expiry.set(until);
        self.adopt(client, origin, bearer, open);
        let mut told = self.told();
        told.unauthorized = false;
        told.refusals.clear();
        Ok(())
    }

    /// Sends another token from now on. What is in flight goes on, and what was told is not told again: a server that
    /// refuses one token after the other is told of once.
    pub(super) fn exchange(&self, bearer: Option<HeaderValue>) {
        if let Some(generation) = self.current.load_full() {
            generation.bearer.store(bearer.map(Arc::new));
        }
        self.serial.fetch_add(1, Ordering::SeqCst);
    }

    /// Sends through `service` from now on.
    pub(super) fn install_service<S, B>(&self, service: S)
    where
        S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        let open = CancellationToken::new();
        let client = connector::over(service, &open);
        let origin = Origin {
            names: "of a service".to_owned(),
            host: String::new(),
            life: None,
        };
        self.adopt(client, origin, Bearer::default(), open);
    }

    fn adopt(&self, client: kube::Client, origin: Origin, bearer: Bearer, open: CancellationToken) {
        self.current.store(Some(Arc::new(Generation {
            client,
            origin,
            bearer,
            _open: open.drop_guard(),
        })));
        self.serial.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts a renewal of the client certificate that failed.
    pub(super) fn renewal_failed(&self) {
        self.metrics.client_certificate_renew_errors.inc();
    }

    /// Waits until the server has refused the credentials of the moment. Cancel-safe.
    pub(super) async fn refused(&self) {
        let mut refused = self.refused.subscribe();
        let current = |refused: &u64| *refused != 0 && *refused == self.serial();
        // The sender lives as long as `self`.
        drop(refused.wait_for(current).await);
    }

    /// Returns the number of the current credentials. Each set of credentials has its own number.
    pub(super) fn serial(&self) -> u64 {
        self.serial.load(Ordering::SeqCst)
    }

    /// Returns whether there are credentials to send requests with.
    pub(super) fn has_credentials(&self) -> bool {
        self.current.load().is_some()
    }

    /// Returns the outcome of the newest request.
    pub(super) fn reachability(&self) -> Reachability {
        self.connection.now()
    }

    /// Returns what the server's clock says now, in seconds since 1970: what it said with its last answer, and the time
    /// that has passed since by the boot-time clock. `None` before the first answer of this boot.
    pub(super) fn server_now(&self) -> Option<i64> {
        let now = self.clock.now();
        let (said, at) = (*self.server_time()).filter(|(_, at)| at.boot == now.boot)?;
        let passed = i64::try_from(now.since(at).as_secs()).unwrap_or(i64::MAX);
        Some(said.saturating_add(passed))
    }

    fn server_time(&self) -> MutexGuard<'_, Option<(i64, Stamp)>> {
        self.server_time
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> i64 {
        self.clock.now().wall_ms.div_euclid(1000)
    }

    async fn send(&self, request: Request<Body>) -> Result<Response<Body>, BoxError> {
        let path = request.uri().path().to_owned();
        let method = request.method().clone();
        let asked = Asked::new(method.as_str(), request.uri());
        // A lease that is late costs the node its pods: it never waits behind others.
        let waited = if path.starts_with("/apis/coordination.k8s.io/") {
            None
        } else {
            let begun = Instant::now();
            self.limiter.turn().await;
            Some(begun.elapsed())
        };
        let begun = Instant::now();
        let (sent, origin, serial) = {
            // Read before the credentials: those that come meanwhile are not taken for refused.
            let serial = self.serial();
            let Some(generation) = self.current.load_full() else {
                return Err(SendError::NoCredentials.into());
            };
            // Not held while the request runs: exchanged credentials must let go of their connections.
            let (client, origin) = (generation.client.clone(), generation.origin.clone());
            drop(generation);
            let sent = async move { client.send(request).await };
            let sent = tokio::time::timeout(ANSWER_TIMEOUT, sent).await;
            (sent, origin, serial)
        };
        let code = match &sent {
            Ok(Ok(response)) => response.status().as_str().to_owned(),
            _ => "<error>".to_owned(),
        };
        self.metrics
            .rest_client_requests
            .get_or_create(&RequestLabel {
                code,
                host: origin.host.clone(),
                method: method.to_string(),
            })
            .inc();
        let label = RequestTimeLabel {
            verb: method.to_string(),
            host: origin.host.clone(),
        };
        self.metrics
            .rest_client_request_duration
            .get_or_create(&label)
            .observe(begun.elapsed().as_secs_f64());
        if let Some(waited) = waited {
            self.metrics
                .rest_client_rate_limiter_duration
                .get_or_create(&label)
                .observe(waited.as_secs_f64());
        }
        let response = match sent {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                self.connection
                    .failed(&explain(&error, &origin.names, self.now()));
                return Err(Box::new(error));
            }
            Err(_) => {
                self.connection.failed(&SendError::Timeout.to_string());
                return Err(SendError::Timeout.into());
            }
        };
        let what = format!("{method} {}", resource(&path));
        self.observe(&response, &what, asked, &origin, serial);
        Ok(with_retry_after(response))
    }

    fn observe(
        &self,
        response: &Response<Body>,
        what: &str,
        asked: Asked,
        origin: &Origin,
        serial: u64,
    ) {
        let status = response.status();
        if matches!(status.as_u16(), 502..=504) {
            // A load balancer without a server behind it, or a server that is not ready.
            self.connection
                .failed(&format!("answered with status {status}"));
            return;
        }
        self.connection.answered();
        self.check_clock(response);
        let mut told = self.told();
        if status != StatusCode::FORBIDDEN {
            told.refusals.answered(&asked);
        }
        match status {
            StatusCode::UNAUTHORIZED => {
                if !told.unauthorized {
                    told.unauthorized = true;
                    let life = origin.life.and_then(|life| life.complaint(self.now()));
                    tracing::error!(
                        kubeconfig = origin.names,
                        certificate = life,
                        "the API server rejects the node's credentials (401): check that the certificate or token of \
                         the kubeconfig is valid and from this cluster"
                    );
                }
                drop(told);
                self.refused.send_if_modified(|refused| {
                    let newer = serial > *refused;
                    *refused = serial.max(*refused);
                    newer
                });
            }
            StatusCode::FORBIDDEN => match told.refusals.refused(what, asked, self.clock.now()) {
                Report::Error => tracing::error!(
                    request = what,
                    kubeconfig = origin.names,
                    "the API server refuses this request (403): the user must be system:node:<node name> in the \
                     group system:nodes, with the name that the agent was started with"
                ),
                Report::Early => tracing::info!(
                    request = what,
                    "the API server refuses access to this object for now (403); it allows it once it has seen the \
                     pod that refers to it"
                ),
                Report::Nothing => {}
            },
            status if status.as_u16() < 400 => told.unauthorized = false,
            _ => {}
        }
    }

    /// Notes the server's clock, and logs once when the clocks are apart: certificates and tokens stop working then.
    pub(super) fn check_clock(&self, response: &Response<Body>) {
        let server = response
            .headers()
            .get(DATE)
            .and_then(|date| date.to_str().ok())
            .and_then(|date| jiff::fmt::rfc2822::parse(date).ok());
        let Some(server) = server else { return };
        let server = server.timestamp().as_second();
        let stamp = self.clock.now();
        *self.server_time() = Some((server, stamp));
        let now = stamp.wall_ms.div_euclid(1000);
        let skewed = (server - now).abs() > MAX_SKEW;
        let mut told = self.told();
        if skewed && !told.skewed {
            tracing::warn!(
                server = date(server),
                node = date(now),
                "the clocks of the API server and of this node differ: correct the wrong one, or certificates and \
                 tokens stop working"
            );
        }
        told.skewed = skewed;
    }
}

/// `path` without names: `pods/status`.
fn resource(path: &str) -> String {
    let mut parts = path.trim_matches('/').split('/').peekable();
    // api/v1 or apis/<group>/<version>.
    let skip = if parts.peek() == Some(&"apis") { 3 } else { 2 };
    let rest: Vec<_> = parts.skip(skip).collect();
    let rest = match rest.as_slice() {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        rest => rest,
    };
    match rest {
        [] => path.to_owned(),
        [kind] | [kind, _] => (*kind).to_owned(),
        [kind, _, subresource, ..] => format!("{kind}/{subresource}"),
    }
}

/// The error with its causes, and what to do about it where that can be known.
pub(super) fn explain(error: &(dyn StdError + 'static), names: &str, now: i64) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    // As rustls words its errors; some of them with the cause, some with their name.
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let hint = if says(&["UnknownIssuer", "BadSignature"]) {
        "the server's certificate is not signed by the certificate-authority of the kubeconfig; take the one of this cluster"
    } else if says(&["NotValidForName", "certificate not valid for name"]) {
        "the server's certificate is not for this address; use another server: or give tls-server-name"
    } else if says(&[
        "NotValidYet",
        "certificate not valid yet",
        "Expired",
        "certificate expired",
    ]) {
        "a certificate is out of its time; renew it, or set this machine's clock"
    } else if says(&["AlertReceived", "received fatal alert"]) {
        "the server does not accept the node's certificate; is it from this cluster and still good?"
    } else {
        return text;
    };
    format!("{text} ({hint}; kubeconfig {names}; now {})", date(now))
}

/// An answer with `Retry-After` and no `Status`, as the server's own overload protection gives it, gets one: the
/// callers see only that.
fn with_retry_after(response: Response<Body>) -> Response<Body> {
    let status = response.status();
    let json = |value: &HeaderValue| value.as_bytes().starts_with(b"application/json");
    let busy = matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    let headers = response.headers();
    if !busy || headers.get(CONTENT_TYPE).is_some_and(json) {
        return response;
    }
    let seconds = headers
        .get(RETRY_AFTER)
        .and_then(|after| after.to_str().ok())
        .and_then(|after| after.parse::<u32>().ok());
    let Some(seconds) = seconds else {
        return response;
    };
    let body = serde_json::json!({
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": status.as_u16(),
        "reason": if status == StatusCode::TOO_MANY_REQUESTS { "TooManyRequests" } else { "ServiceUnavailable" },
        "message": "the server is busy",
        "details": { "retryAfterSeconds": seconds },
    });
    let mut replaced = Response::new(Body::from(body.to_string().into_bytes()));
    *replaced.status_mut() = status;
    replaced
}

/// The service behind the shared client.
struct Front(Arc<Transport>);

impl Service<Request<Body>> for Front {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let transport = self.0.clone();
        Box::pin(async move { transport.send(request).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_named_by_their_resource() {
        for (path, name) in [
            ("/api/v1/nodes/n1", "nodes"),
            ("/api/v1/namespaces/a/pods/b/status", "pods/status"),
            ("/api/v1/namespaces/a/events", "events"),
            ("/api/v1/namespaces/a", "namespaces"),
            (
                "/apis/coordination.k8s.io/v1/namespaces/k/leases/n",
                "leases",
            ),
            ("/version", "/version"),
        ] {
            assert_eq!(resource(path), name, "{path}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_certificate_is_told_with_the_way_out() {
        use rustls::pki_types::{ServerName, UnixTime};
        use rustls::{AlertDescription, CertificateError};
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let certificate = rustls::Error::InvalidCertificate;
        for (error, says) in [
            (
                certificate(CertificateError::UnknownIssuer),
                "certificate-authority",
            ),
            (
                certificate(CertificateError::BadSignature),
                "certificate-authority",
            ),
            (
                certificate(CertificateError::NotValidForNameContext {
                    expected: ServerName::try_from("api").unwrap(),
                    presented: Vec::new(),
                }),
                "tls-server-name",
            ),
            (
                certificate(CertificateError::NotValidForName),
                "tls-server-name",
            ),
            (
                certificate(CertificateError::ExpiredContext {
                    time: at(2),
                    not_after: at(1),
                }),
                "this machine's clock",
            ),
            (
                certificate(CertificateError::NotValidYetContext {
                    time: at(1),
                    not_before: at(2),
                }),
                "this machine's clock",
            ),
            (
                rustls::Error::AlertReceived(AlertDescription::CertificateExpired),
                "this machine's clock",
            ),
            (
                rustls::Error::AlertReceived(AlertDescription::UnknownCA),
                "the node's certificate",
            ),
        ] {
            let told = explain(&error, "the-kubeconfig", 0);
            assert!(told.contains(says), "{told}");
            assert!(told.contains("the-kubeconfig; now 1970"), "{told}");
        }
        let other = std::io::Error::other("a cable");
        assert_eq!(explain(&other, "the-kubeconfig", 0), "a cable");
    }

    #[test]
    fn watches_are_told_from_lists_and_do_not_outlast_their_timeout() {
        let seconds = |query| connector::watch_timeout(query).map(|timeout| timeout.as_secs());
        assert_eq!(seconds("watch=true&timeoutSeconds=290"), Some(320));
        assert_eq!(seconds("fieldSelector=a%3Db&watch=1"), Some(630));
        assert_eq!(seconds("watch=false"), None);
        assert_eq!(seconds("limit=500"), None);
    }
}

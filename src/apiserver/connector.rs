//! The connections to the API server: HTTP/2 where the server has it, so that hundreds of watches share a few of
//! them, with pings that notice a peer that is gone.
//!
//! **Invariant:** a watch never keeps another request from going out: watches have connections of their own, each
//! with fewer streams than a server allows.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use futures::future::BoxFuture;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use hyper::http::header::AUTHORIZATION;
use hyper::http::{HeaderValue, Request, Response, Uri};
use hyper::rt::{Read, Write};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::{Connection, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ClientBuilder, ConfigExt};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tower::{BoxError, Service};

use super::kubeconfig::Loaded;
use super::tls;
use super::tunnel::Dialer;

/// Streams of one connection that watches may take; servers allow 100 or more.
const WATCHES_PER_CONNECTION: usize = 80;
/// As client-go: a silent connection is pinged, and given up when the ping is not answered.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(15);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence within a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Duration of a watch if the request names none.
const WATCH_TIMEOUT: Duration = Duration::from_secs(600);

/// The header with the token of the moment, which can be exchanged while requests go on; empty when the credentials
/// are others.
pub(super) type Bearer = Arc<ArcSwapOption<HeaderValue>>;

/// Builds the client for `loaded`, which takes its token from `bearer`. What it has in flight fails when `closed` is
/// cancelled.
///
/// # Errors
/// When the certificates or keys cannot be used.
pub(super) fn build(
    loaded: &Loaded,
    bearer: &Bearer,
    closed: &CancellationToken,
) -> Result<kube::Client, kube::Error> {
    let config = &loaded.config;
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(PING_INTERVAL));
    tcp.set_keepalive_interval(Some(PING_TIMEOUT / 3));
    tcp.set_keepalive_retries(Some(3));
    tcp.set_tcp_user_timeout(Some(PING_INTERVAL + PING_TIMEOUT));
    // As upstream, a proxy is trusted as the server is; its name is its own, whatever tls-server-name says.
    let dialer = Dialer::new(tcp, loaded.proxy.clone(), || tls::client_config(config))?;
    let mut offered = tls::client_config(config)?;
    // The builder writes what it offers here itself.
    offered.alpn_protocols.clear();
    let mut builder = hyper_rustls::HttpsConnectorBuilder::new()
        .with_tls_config(offered)
        .https_or_http();
    if let Some(name) = &config.tls_server_name {
        let name = name.clone().try_into().map_err(|error| {
            let error = format!("tls-server-name {name:?}: {error}");
            kube::Error::Service(error.into())
        })?;
        builder =
            builder.with_server_name_resolver(hyper_rustls::FixedServerNameResolver::new(name));
    }
    let connector = builder.enable_all_versions().wrap_connector(dialer);
    let make = move || {
        HttpClient::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_keep_alive_interval(PING_INTERVAL)
            .http2_keep_alive_timeout(PING_TIMEOUT)
            .http2_keep_alive_while_idle(true)
            .build(connector.clone())
    };
    let lanes = Lanes {
        main: make(),
        watches: Arc::default(),
        make: Arc::new(make),
        bearer: bearer.clone(),
        closed: closed.clone(),
    };
    let stack = ClientBuilder::new(lanes, config.default_namespace.clone())
        .with_layer(&config.base_uri_layer())
        .with_layer(&config.extra_headers_layer()?);
    Ok(match config.auth_layer()? {
        Some(auth) => stack.with_layer(&auth).build(),
        None => stack.build(),
    })
}

/// A client over `service` in place of connections, whose answers may be silent for as long as those of [`build`].
pub(super) fn over<S, B>(service: S, closed: &CancellationToken) -> kube::Client
where
    S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let closed = closed.clone();
    kube::Client::new(Patient { service, closed }, "default")
}

/// See [`over`].
struct Patient<S> {
    service: S,
    closed: CancellationToken,
}

impl<S, B> Service<Request<Body>> for Patient<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: HttpBody<Data = Bytes>,
{
    type Response = Response<Guarded<B>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.service.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let query = request.uri().query().unwrap_or_default();
        let patience = watch_timeout(query).unwrap_or(BODY_TIMEOUT);
        let closed = self.closed.clone();
        let sent = self.service.call(request);
        Box::pin(async move {
            let response = sent.await.map_err(Into::into)?;
            Ok(response.map(|inner| Guarded::new(inner, patience, closed, None)))
        })
    }
}

/// One connection of watches, and a seat per watch beside the first.
type Lane<C> = (HttpClient<C, Body>, Arc<()>);

/// Chooses the connection of a request.
#[derive(Clone)]
struct Lanes<C> {
    main: HttpClient<C, Body>,
    watches: Arc<Mutex<Vec<Lane<C>>>>,
    make: Arc<dyn Fn() -> HttpClient<C, Body> + Send + Sync>,
    bearer: Bearer,
    closed: CancellationToken,
}

impl<C: Clone> Lanes<C> {
    /// A connection with room for one more watch, and the seat that is taken in it.
    fn watch(&self) -> Lane<C> {
        let mut lanes = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        // Seats are given back by dropping them; a lane that nobody sits in goes.
        lanes.retain(|(_, seats)| Arc::strong_count(seats) > 1);
        let free = lanes
            .iter()
            .find(|(_, seats)| Arc::strong_count(seats) <= WATCHES_PER_CONNECTION);
        if let Some((client, seats)) = free {
            return (client.clone(), seats.clone());
        }
        let lane = ((self.make)(), Arc::new(()));
        lanes.push(lane.clone());
        lane
    }
}

impl<C> Service<Request<Body>> for Lanes<C>
where
    C: Service<Uri> + Clone + Send + Sync + 'static,
    C::Response: Connection + Read + Write + Send + Unpin + 'static,
    C::Future: Send + Unpin + 'static,
    C::Error: Into<BoxError>,
{
    type Response = Response<Guarded<Incoming>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(bearer) = self.bearer.load().as_deref() {
            let headers = request.headers_mut();
            headers.insert(AUTHORIZATION, bearer.clone());
        }
        let query = request.uri().query().unwrap_or_default();
        let (client, seat, patience) = match watch_timeout(query) {
            Some(patience) => {
                let (client, seat) = self.watch();
                (client, Some(seat), patience)
            }
            None => (self.main.clone(), None, BODY_TIMEOUT),
        };
        let closed = self.closed.clone();
        Box::pin(async move {
            let response = client.request(request).await?;
            Ok(response.map(|inner| Guarded::new(inner, patience, closed, seat)))
        })
    }
}

/// Returns the longest silence that a watch may have; `None` if `query` does not start a watch.
pub(super) fn watch_timeout(query: &str) -> Option<Duration> {
    let mut watches = false;
    let mut timeout = WATCH_TIMEOUT;
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*key {
            "watch" => watches = matches!(&*value, "true" | "1"),
            "timeoutSeconds" => {
                timeout = value.parse().map_or(timeout, Duration::from_secs);
            }
            _ => {}
        }
    }
    // The server ends it then; when nothing came by then, nobody is there any more.
    watches.then_some(timeout.saturating_add(BODY_TIMEOUT))
}

/// Reason why a response ended early.
#[derive(Debug, thiserror::Error)]
enum BodyError {
    #[error("nothing came from the API server for {0:?}")]
    Silent(Duration),
    #[error("the connection was replaced by one with new credentials")]
    Closed,
}

/// A response that does not wait for ever, and not beyond its credentials.
pub(super) struct Guarded<B> {
    inner: B,
    patience: Duration,
    silent: Pin<Box<Sleep>>,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    _seat: Option<Arc<()>>,
}

impl<B> Guarded<B> {
    fn new(inner: B, patience: Duration, closed: CancellationToken, seat: Option<Arc<()>>) -> Self {
        Self {
            inner,
            patience,
            silent: Box::pin(tokio::time::sleep(patience)),
            closed: Box::pin(closed.cancelled_owned()),
            _seat: seat,
        }
    }
}

impl<B> HttpBody for Guarded<B>
where
    B: HttpBody<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) {
            let next = Instant::now() + self.patience;
            self.silent.as_mut().reset(next);
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        if self.silent.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(BodyError::Silent(self.patience).into())));
        }
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(BodyError::Closed.into())));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

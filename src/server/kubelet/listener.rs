//! Accepts connections and serves the routes on them.
//!
//! Bounds, all in [`Limits`]: connections and how long they may be idle, the handshake, a request's head in time and
//! size, streams of an HTTP/2 connection and how many of them may be reset before they are answered. What a handler
//! does with an authorized request is its own to bound.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::middleware::{from_fn, from_fn_with_state};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::super::ServerError;
use super::super::door::{Door, Service};
use super::auth::Auth;
use super::connections::{Connections, Counted, Slot};
use super::inherited;
use super::requests::{Gate, LogLimit, only_reading, pass};
use super::tls::{self, Keeper, Serving};
use super::{NodeApi, Shared};
use crate::types::metrics::ReasonLabel;

/// The smallest that HTTP/2 allows for a connection.
const WINDOW: u32 = 65_535;
/// Most connections to the read-only port, where nobody is known.
const READ_ONLY_CONNECTIONS: usize = 64;

/// Limits of the node's resources that clients may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections of each port; at most half of the process's open files are taken for them.
    pub connections: usize,
    /// From the connection to the end of the TLS handshake.
    pub handshake: Duration,
    /// From a request's first byte, or the end of the one before, to the end of its head.
    pub header: Duration,
    /// Longest idle time of a connection between requests.
    pub idle: Duration,
    /// Bytes of a request's head.
    pub header_bytes: u32,
    /// Requests in flight on an HTTP/2 connection.
    pub streams: u32,
    /// Streams of HTTP/2 that are reset before the server has read them.
    pub resets: usize,
    /// Poll interval of certificate files.
    pub look: Duration,
    /// Time that requests in flight have to end after the agent was asked to exit.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            handshake: Duration::from_secs(10),
            header: Duration::from_secs(30),
            idle: Duration::from_secs(90),
            // The longest URI that can be parsed (64 KiB), and what comes with it.
            header_bytes: 96 << 10,
            streams: 100,
            resets: 20,
            look: Duration::from_secs(10),
            drain: Duration::from_secs(2),
        }
    }
}

/// Peer that sent a request.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// Its address.
    pub(crate) address: SocketAddr,
    /// Certificates from its handshake, its own first. They are not verified yet.
    pub(crate) certificates: Arc<[CertificateDer<'static>]>,
}

/// The server. Ports that are not free and certificates that do not exist yet are waited for while it runs.
pub struct Server {
    node: Shared,
    limits: Limits,
    secure: Option<Secure>,
    read_only: Option<Door>,
}

struct Secure {
    door: Door,
    tls: TlsAcceptor,
    serving: Serving,
    keeper: Keeper,
    auth: Arc<Auth>,
}

impl Server {
    /// Binds what the configuration says and reads or makes the certificate, as far as that is possible now. `None` when
    /// nothing is to be served.
    ///
    /// # Errors
    /// When the settings of TLS cannot be used together, or a kubelet may have one of the ports.
    pub async fn open(node: NodeApi, limits: Limits) -> Result<Option<Self>, ServerError> {
        Self::open_on(None, node, limits).await
    }

    /// As [`Self::open`], on a socket that listens already, if it serves what the configuration says.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_on(
        listener: Option<std::net::TcpListener>,
        node: NodeApi,
        limits: Limits,
    ) -> Result<Option<Self>, ServerError> {
        let node: Shared = Arc::new(node);
        let config = Arc::clone(&node.config);
        if let (true, Some(reason)) = (config.kubelet.enable_server, config.server_locked()) {
            tracing::info!(
                reason,
                "not serving the kubelet's API, since it could authorize nobody (authorization.mode AlwaysAllow with \
                 authentication.x509.clientCAFile serves it without an API server)"
            );
        }
        let secure = match config.server_address() {
            None => None,
            Some(address) => {
                let port = Service::Api("--port");
                let door = match fitting(listener, address) {
                    Some(listener) => Door::of(listener, address, port),
                    None => Door::open(address, port, &*node.clock).await?,
                };
                let (serving, keeper) = tls::open(&node).await?;
                let tls = tls::server_config(&config.kubelet, serving.clone())?;
                let auth = Arc::new(Auth::open(&node).await);
                Some(Secure {
                    door,
                    tls: TlsAcceptor::from(tls),
                    serving,
                    keeper,
                    auth,
                })
            }
        };
        let read_only = match config.read_only_address() {
            Some(address) => {
                let port = Service::Api("--read-only-port");
                Some(Door::open(address, port, &*node.clock).await?)
            }
            None => None,
        };
        if secure.is_none() && read_only.is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            node,
            limits,
            secure,
            read_only,
        }))
    }

    /// Returns the address of the API; `None` as long as the port is not bound.
    pub fn address(&self) -> Option<SocketAddr> {
        self.secure.as_ref()?.door.local_addr()
    }

    /// Returns the address of the read-only part; `None` as long as the port is not bound.
    pub fn read_only_address(&self) -> Option<SocketAddr> {
        self.read_only.as_ref()?.local_addr()
    }

    /// Serves until [`NodeApi::stop`] is cancelled.
    pub async fn run(self) {
        raise_open_files();
        tracing::info!(
            address = self.address().map(|address| address.to_string()),
            read_only = self.read_only_address().map(|address| address.to_string()),
            "serving the kubelet's API"
        );
        let (node, limits) = (self.node, self.limits);
        let log = Arc::new(LogLimit::default());
        // Streams outlive the requests they began as; they end soon after `stop`.
        let streams = TaskTracker::new();
        let routes = super::routes(Arc::clone(&node)).layer(axum::Extension(streams.clone()));
        let gate = |auth, server_type| Gate {
            auth,
            metrics: node.metrics.clone(),
            log: Arc::clone(&log),
            server_type,
        };
        let port = |listener, tls, routes| Port {
            listener,
            tls,
            routes,
            node: Arc::clone(&node),
            limits: limits.clone(),
            log: Arc::clone(&log),
            connections: Connections::default(),
            shown: AtomicI64::new(0),
        };
        let read_only = async {
            let Some(door) = self.read_only else {
                return;
            };
            if let Some(listener) = door.listener(&*node.clock, &node.stop).await {
                let gate = gate(None, "readonly");
                let routes = (routes.clone())
                    .layer(from_fn(only_reading))
                    .layer(from_fn_with_state(gate, pass));
                let mut open = port(listener, None, routes);
                // An answer stays in memory until its reader has taken it, or has to go.
                open.limits.connections = open.limits.connections.min(READ_ONLY_CONNECTIONS);
                open.run().await;
            }
        };
        let secure = async {
            if let Some(secure) = self.secure {
                let gate = gate(Some(Arc::clone(&secure.auth)), "readwrite");
                let routes = routes.clone().layer(from_fn_with_state(gate, pass));
                let (door, tls) = (secure.door, secure.tls);
                let serve = async {
                    if let Some(listener) = door.listener(&*node.clock, &node.stop).await {
                        port(listener, Some(tls), routes).run().await;
                    }
                };
                let certificate = tls::keep(
                    Arc::clone(&node),
                    secure.serving,
                    secure.keeper,
                    limits.look,
                );
                let cas = node
                    .stop
                    .run_until_cancelled(secure.auth.watch(limits.look));
                tokio::join!(serve, certificate, cas);
            }
        };
        tokio::join!(read_only, secure);
        streams.close();
        streams.wait().await;
    }
}

/// Returns the socket that was handed over, if it serves what the configuration says.
fn fitting(given: Option<std::net::TcpListener>, configured: SocketAddr) -> Option<TcpListener> {
    let given = given?;
    match given.local_addr() {
        Ok(at) if inherited::serves(at, configured) => match TcpListener::from_std(given) {
            Ok(listener) => return Some(listener),
            Err(error) => tracing::warn!(%error, "cannot use the socket from systemd"),
        },
        Ok(at) => tracing::warn!(
            given = %at,
            %configured,
            "the socket from systemd has another address than configured"
        ),
        Err(error) => tracing::warn!(%error, "cannot use the socket from systemd"),
    }
    None
}

/// Lets the process have as many open files as it may.
fn raise_open_files() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}

/// One port.
struct Port {
    listener: TcpListener,
    /// `None`: without TLS.
    tls: Option<TlsAcceptor>,
    routes: Router,
    node: Shared,
    limits: Limits,
    log: Arc<LogLimit>,
    connections: Connections,
    /// Contribution of this port to the metric that both ports share.
    shown: AtomicI64,
}

impl Port {
    async fn run(self) {
        let tasks = TaskTracker::new();
        let most =
            getrlimit(Resource::RLIMIT_NOFILE).map_or(self.limits.connections, |(files, _)| {
                let half = usize::try_from(files / 2).unwrap_or(usize::MAX);
                self.limits.connections.min(half).max(1)
            });
        let stop = self.node.stop.clone();
        let mut sweep =
            tokio::time::interval(self.limits.header.div_f64(8.0).min(Duration::from_secs(5)));
        sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // Cancel-safe all three.
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                // With none open there is nothing to sweep, and nothing to wake up for.
                _ = sweep.tick(), if self.connections.count() > 0 => {
                    self.sweep();
                    continue;
                }
                () = stop.cancelled() => break,
            };
            match accepted {
                Ok((stream, peer)) => {
                    // A port for both families shows IPv4 addresses within IPv6.
                    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                    if let Some(slot) = self.slot(peer, most) {
                        tasks.spawn(self.connection(stream, peer, slot));
                    }
                }
                Err(error) => {
                    // Out of files, most likely: an idle one gives its own back.
                    self.connections.evict();
                    if let Some(left_out) = self.log.turn() {
                        tracing::warn!(%error, left_out, "cannot accept a connection to the kubelet's API");
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            }
            self.show();
        }
        tasks.close();
        // Each ends by itself when its time to finish is over.
        tasks.wait().await;
    }

    fn show(&self) {
        let count = i64::try_from(self.connections.count()).unwrap_or(i64::MAX);
        let before = self.shown.swap(count, Relaxed);
        self.node.metrics.http_connections.inc_by(count - before);
    }

    fn sweep(&self) {
        let (silent, idle) = self.connections.sweep(self.limits.header, self.limits.idle);
        self.closed("idle", silent + idle);
        if silent > 0
            && let Some(left_out) = self.log.turn()
        {
            tracing::warn!(
                connections = silent,
                left_out,
                "closing connections to the kubelet's API whose first request did not come in time"
            );
        }
        self.show();
    }

    fn closed(&self, reason: &str, count: usize) {
        let reason = reason.to_owned();
        self.node
            .metrics
            .http_connections_closed
            .get_or_create(&ReasonLabel { reason })
            .inc_by(u64::try_from(count).unwrap_or(u64::MAX));
    }

    /// A place for a connection; `None` when all are busy.
    fn slot(&self, peer: SocketAddr, most: usize) -> Option<Slot> {
        if self.connections.count() >= most {
            let made_room = self.connections.evict();
            let (reason, what) = match made_room {
                true => ("crowded", "an idle one was closed for it"),
                false => ("full", "all are busy, it was refused"),
            };
            self.closed(reason, 1);
            if let Some(left_out) = self.log.turn() {
                tracing::warn!(
                    peer = %peer,
                    connections = most,
                    left_out,
                    what,
                    "too many connections to the kubelet's API"
                );
            }
            if !made_room {
                return None;
            }
        }
        Some(self.connections.open(peer))
    }

    /// One connection from its first byte to its last.
    fn connection(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        slot: Slot,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (tls, limits) = (self.tls.clone(), self.limits.clone());
        let (routes, node) = (self.routes.clone(), Arc::clone(&self.node));
        let log = Arc::clone(&self.log);
        async move {
            let close = slot.close();
            let served = async {
                if let Err(error) = prepare(&stream) {
                    tracing::debug!(%peer, %error, "cannot set options of a connection");
                }
                let socket = Counted::new(stream, slot.clone());
                let Some(tls) = tls else {
                    let peer = Peer {
                        address: peer,
                        certificates: Arc::new([]),
                    };
                    let client = Client {
                        peer: peer.clone(),
                        slot,
                        routes,
                    };
                    let ended = serve(socket, false, client, &limits, &node).await;
                    return tell(&peer, ended, &log);
                };
                let handshake = timeout(limits.handshake, tls.accept(socket));
                let Some(shaken) = node.stop.run_until_cancelled(handshake).await else {
                    return;
                };
                let socket = match shaken {
                    Ok(Ok(socket)) => socket,
                    Ok(Err(error)) => {
                        tracing::debug!(%peer, %error, "TLS handshake failed");
                        return;
                    }
                    Err(_) => {
                        tracing::debug!(%peer, "TLS handshake took too long");
                        return;
                    }
                };
                let (_, session) = socket.get_ref();
                let two = session.alpn_protocol() == Some(b"h2");
                let chain = session.peer_certificates().unwrap_or_default();
                let peer = Peer {
                    address: peer,
                    certificates: chain.iter().map(|one| one.clone().into_owned()).collect(),
                };
                let client = Client {
                    peer: peer.clone(),
                    slot,
                    routes,
                };
                let ended = serve(socket, two, client, &limits, &node).await;
                tell(&peer, ended, &log);
            };
            tokio::select! {
                () = served => {}
                () = close.now.cancelled() => {}
            }
        }
    }
}

/// Finds peers that are gone, and sends small answers at once.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let fd = stream.as_fd();
    setsockopt(&fd, sockopt::KeepAlive, &true)?;
    setsockopt(&fd, sockopt::TcpKeepIdle, &60)?;
    setsockopt(&fd, sockopt::TcpKeepInterval, &15)?;
    setsockopt(&fd, sockopt::TcpKeepCount, &4)?;
    Ok(())
}

/// Tells of a connection that its peer ended in a way it should not.
fn tell(peer: &Peer, ended: Result<(), hyper::Error>, log: &LogLimit) {
    use std::error::Error;
    let Err(error) = ended else {
        return;
    };
    let mut broken = false;
    let mut source: Option<&(dyn Error + 'static)> = error.source();
    while let Some(inner) = source {
        broken |= inner.is::<std::io::Error>();
        source = inner.source();
    }
    let left = error.is_incomplete_message()
        || error.is_body_write_aborted()
        || error.is_canceled()
        || broken;
    let text = match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    if left {
        tracing::debug!(peer = %peer.address, error = text, "connection to the kubelet's API ended early");
    } else if let Some(left_out) = log.turn() {
        tracing::warn!(
            peer = %peer.address,
            error = text,
            left_out,
            "closed a connection to the kubelet's API that violated HTTP or the limits of the server"
        );
    }
}

/// The client of a connection, and what answers its requests.
struct Client {
    peer: Peer,
    slot: Slot,
    routes: Router,
}

/// Serves requests on a connection until either side ends it. What is upgraded goes on without it.
///
/// # Errors
/// When it did not end in order.
async fn serve<I>(
    socket: I,
    two: bool,
    client: Client,
    limits: &Limits,
    node: &Shared,
) -> Result<(), hyper::Error>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Client { peer, slot, routes } = client;
    let close = slot.close();
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(peer.clone());
        request.extensions_mut().insert(slot.clone());
        routes.clone().oneshot(request)
    });
    let io = TokioIo::new(socket);
    let header_bytes = usize::try_from(limits.header_bytes).unwrap_or(usize::MAX);
    let ending = async {
        tokio::select! {
            () = close.politely.cancelled() => {}
            () = node.stop.cancelled() => {}
        }
    };
    if two {
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(limits.streams)
            .max_pending_accept_reset_streams(limits.resets)
            .max_local_error_reset_streams(1024)
            .max_header_list_size(limits.header_bytes)
            // What a peer can have buffered here; the same for a connection as for one of its streams.
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_send_buf_size(64 << 10)
            .keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(15))
            .serve_connection(io, service);
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => ended,
            () = ending => {
                connection.as_mut().graceful_shutdown();
                // What is still busy then is dropped.
                timeout(limits.drain, connection).await.unwrap_or(Ok(()))
            }
        }
    } else {
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header.max(limits.idle))
            .max_buf_size(header_bytes.max(8192))
            .serve_connection(io, service)
            .with_upgrades();
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => ended,
            () = ending => {
                connection.as_mut().graceful_shutdown();
                // What is still busy then is dropped.
                timeout(limits.drain, connection).await.unwrap_or(Ok(()))
            }
        }
    }
}

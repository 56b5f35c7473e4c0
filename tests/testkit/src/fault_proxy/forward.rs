//! The connections of a proxy: accepting them, handing requests on and answers back.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::{HeaderValue, Request, Response, Uri, Version, header};
use bytes::Bytes;
use futures::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket};
use tokio_rustls::TlsAcceptor;

use super::{ApiRequest, Fault, ProxyConfig, Shared};
use crate::envtest::Identity;

type Upstream = Client<HttpsConnector<HttpConnector>, Incoming>;
type Body = UnsyncBoxBody<Bytes, io::Error>;

/// How long a connection upstream may take, and TLS with a client.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A pause in which a connection sends what it has.
const FLUSH: Duration = Duration::from_millis(10);

struct Proxy {
    shared: Arc<Shared>,
    client: Upstream,
    /// Scheme and authority.
    upstream: String,
}

/// Serves on the current runtime.
pub(super) fn serve(config: ProxyConfig, shared: Arc<Shared>) -> io::Result<SocketAddr> {
    let acceptor = config.serve.as_ref().map(acceptor).transpose()?;
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(HANDSHAKE));
    let https = HttpsConnectorBuilder::new()
        .with_tls_config(client_config(&config)?)
        .https_or_http()
        // One connection per request in flight: a watch that is stalled must not hold up others.
        .enable_http1()
        .wrap_connector(http);
    let proxy = Arc::new(Proxy {
        shared,
        client: Client::builder(TokioExecutor::new()).build(https),
        upstream: config.upstream.trim_end_matches('/').to_owned(),
    });
    let socket = bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let address = socket.local_addr()?;
    let listener = socket.listen(1024)?;
    tokio::spawn(accept(proxy, listener, address, acceptor));
    Ok(address)
}

/// Bound and not listening, a socket keeps its port and refuses connections.
fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

async fn accept(
    proxy: Arc<Proxy>,
    mut listener: TcpListener,
    address: SocketAddr,
    acceptor: Option<TlsAcceptor>,
) {
    let mut cut = proxy.shared.cut.subscribe();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => Some(accepted),
            // The sender lives as long as the proxy.
            _ = cut.wait_for(|cut| *cut) => None,
        };
        match accepted {
            Some(Ok((stream, _))) => {
                drop(stream.set_nodelay(true));
                proxy.shared.connections.fetch_add(1, Ordering::AcqRel);
                tokio::spawn(connection(Arc::clone(&proxy), stream, acceptor.clone()));
            }
            Some(Err(error)) => eprintln!("fault proxy: accept: {error}"),
            None => {
                drop(listener);
                let socket = retry(|| bind(address)).await;
                proxy.shared.listening.store(false, Ordering::Release);
                drop(cut.wait_for(|cut| !*cut).await);
                listener = socket.listen(1024).expect("listen on the port we hold");
                proxy.shared.listening.store(true, Ordering::Release);
            }
        }
    }
}

/// Somebody may have the port for a moment.
async fn retry(mut bind: impl FnMut() -> io::Result<TcpSocket>) -> TcpSocket {
    loop {
        match bind() {
            Ok(socket) => return socket,
            Err(error) => eprintln!("fault proxy: bind: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn connection(proxy: Arc<Proxy>, stream: tokio::net::TcpStream, tls: Option<TlsAcceptor>) {
    let counted = Counted(Arc::clone(&proxy.shared));
    let mut cut = proxy.shared.cut.subscribe();
    let serving = async move {
        match tls {
            None => serve_http(proxy, stream).await,
            Some(acceptor) => {
                // Clients that do not trust us end here.
                if let Ok(Ok(stream)) =
                    tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await
                {
                    serve_http(proxy, stream).await;
                }
            }
        }
    };
    tokio::select! {
        () = serving => {}
        // Drops the connection with all that it waits for.
        _ = cut.wait_for(|cut| *cut) => {}
    }
    drop(counted);
}

/// A connection that is open.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn serve_http(
    proxy: Arc<Proxy>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) {
    let service = service_fn(move |request| {
        let proxy = Arc::clone(&proxy);
        async move { proxy.handle(request).await }
    });
    // An error is a client that went away, or a fault that was asked for.
    drop(
        Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await,
    );
}

impl Proxy {
    /// An error breaks the connection off.
    async fn handle(&self, request: Request<Incoming>) -> Result<Response<Body>, io::Error> {
        let uri = request.uri();
        let api_request = ApiRequest::new(
            request.method(),
            uri.path(),
            uri.query().unwrap_or_default(),
        );
        let (fault, delay) = self.shared.begin(&api_request);
        tokio::time::sleep(delay).await;
        let mut truncate = None;
        match fault {
            None => {}
            Some(Fault::Status {
                code,
                reason,
                retry_after,
            }) => return status(code, reason, retry_after),
            Some(Fault::WatchExpired) => return watch_expired(),
            Some(Fault::Delay(delay)) => tokio::time::sleep(delay).await,
            Some(Fault::Refuse) => return Err(io::Error::other("refused")),
            Some(Fault::LoseAnswer) => {
                let answer = self.forward(request).await?;
                drop(answer);
                return Err(io::Error::other("answer lost"));
            }
            Some(Fault::Truncate(after)) => truncate = Some(after),
        }
        self.not_stalled(None).await;
        let answer = self.forward(request).await?;
        self.not_stalled(None).await;
        let (mut parts, body) = answer.into_parts();
        // Of the connection upstream.
        parts.headers.remove(header::CONNECTION);
        parts.headers.remove(header::TRANSFER_ENCODING);
        parts.version = Version::default();
        let watch = (api_request.verb == "WATCH")
            .then(|| OpenWatch::new(Arc::clone(&self.shared), api_request.resource));
        let relay = Relay {
            shared: Arc::clone(&self.shared),
            body,
            watch,
            left: truncate,
        };
        let frames = stream::unfold(Some(relay), |relay| async {
            let mut relay = relay?;
            let frame = relay.next().await?;
            let more = frame.is_ok().then_some(relay);
            Some((frame, more))
        });
        Ok(Response::from_parts(
            parts,
            BodyExt::boxed_unsync(StreamBody::new(frames)),
        ))
    }

    async fn forward(&self, request: Request<Incoming>) -> Result<Response<Incoming>, io::Error> {
        let (mut parts, body) = request.into_parts();
        let target = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        parts.uri = format!("{}{target}", self.upstream)
            .parse::<Uri>()
            .map_err(io::Error::other)?;
        parts.version = Version::HTTP_11;
        parts.headers.remove(header::HOST);
        parts.headers.remove(header::CONNECTION);
        let answer = self.client.request(Request::from_parts(parts, body)).await;
        answer.map_err(io::Error::other)
    }

    async fn not_stalled(&self, watch: Option<u64>) {
        not_stalled(&self.shared, watch).await;
    }
}

/// Waits while everything is stalled, or the watch with this serial number.
async fn not_stalled(shared: &Shared, watch: Option<u64>) {
    let mut stall = shared.stall.subscribe();
    let free = stall
        .wait_for(|stall| !stall.everything && watch.is_none_or(|serial| serial > stall.watches));
    // The sender lives as long as `shared`.
    drop(free.await);
}

/// An answer's body on its way.
struct Relay {
    shared: Arc<Shared>,
    body: Incoming,
    watch: Option<OpenWatch>,
    /// Bytes until it breaks off.
    left: Option<usize>,
}

impl Relay {
    async fn next(&mut self) -> Option<Result<Frame<Bytes>, io::Error>> {
        if self.left == Some(0) {
            // What was handed on is sent while its connection has nothing else to do.
            tokio::time::sleep(FLUSH).await;
            return Some(Err(io::Error::other("truncated")));
        }
        let frame = self.body.frame().await;
        // Also its end is not heard of.
        let serial = self.watch.as_ref().map(|watch| watch.serial);
        not_stalled(&self.shared, serial).await;
        let frame = match frame? {
            Ok(frame) => frame,
            Err(error) => return Some(Err(io::Error::other(error))),
        };
        let Ok(data) = frame.into_data() else {
            // Trailers; an API server sends none.
            return None;
        };
        let data = match &mut self.left {
            Some(left) => {
                let part = data.slice(..data.len().min(*left));
                *left -= part.len();
                part
            }
            None => data,
        };
        let sent = u64::try_from(data.len()).unwrap_or(u64::MAX);
        self.shared.state().bytes_sent += sent;
        Some(Ok(Frame::data(data)))
    }
}

struct OpenWatch {
    shared: Arc<Shared>,
    serial: u64,
}

impl OpenWatch {
    fn new(shared: Arc<Shared>, resource: String) -> Self {
        let mut state = shared.state();
        state.watches_begun += 1;
        let serial = state.watches_begun;
        state.watches_open.insert(serial, resource);
        drop(state);
        Self { shared, serial }
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.shared.state().watches_open.remove(&self.serial);
    }
}

fn status(code: u16, reason: &str, retry_after: Option<u32>) -> Result<Response<Body>, io::Error> {
    let reason = match (reason, code) {
        ("", 401) => "Unauthorized",
        ("", 403) => "Forbidden",
        ("", 404) => "NotFound",
        ("", 409) => "Conflict",
        ("", 410) => "Expired",
        ("", 429) => "TooManyRequests",
        ("", 500) => "InternalError",
        ("", 503) => "ServiceUnavailable",
        ("", 504) => "Timeout",
        (reason, _) => reason,
    };
    let mut status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": format!("injected: {reason}"),
        "reason": reason,
        "code": code,
    });
    if let Some(seconds) = retry_after {
        status["details"] = json!({ "retryAfterSeconds": seconds });
    }
    let mut response = json_response(code, status.to_string())?;
    if let Some(seconds) = retry_after {
        let value = HeaderValue::from(seconds);
        response.headers_mut().insert(header::RETRY_AFTER, value);
    }
    Ok(response)
}

fn watch_expired() -> Result<Response<Body>, io::Error> {
    let event = json!({ "type": "ERROR", "object": {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "too old resource version: injected",
        "reason": "Expired",
        "code": 410,
    } });
    json_response(200, format!("{event}\n"))
}

fn json_response(code: u16, body: String) -> Result<Response<Body>, io::Error> {
    let body = Full::new(Bytes::from(body)).map_err(|never| match never {});
    Response::builder()
        .status(code)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.boxed_unsync())
        .map_err(io::Error::other)
}

fn certificates(pem: &str) -> io::Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(io::Error::other)
}

fn key(pem: &str) -> io::Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(io::Error::other)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn acceptor(identity: &Identity) -> io::Result<TlsAcceptor> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(certificates(&identity.cert_pem)?, key(&identity.key_pem)?)
        .map_err(io::Error::other)?;
    // As an API server offers.
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn client_config(config: &ProxyConfig) -> io::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(config.ca_pem.as_deref().unwrap_or_default())? {
        roots.add(certificate).map_err(io::Error::other)?;
    }
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots);
    match &config.client {
        None => Ok(builder.with_no_client_auth()),
        Some(identity) => builder
            .with_client_auth_cert(certificates(&identity.cert_pem)?, key(&identity.key_pem)?)
            .map_err(io::Error::other),
    }
}

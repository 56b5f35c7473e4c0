//! The runtime's streaming server.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, Request, Response, StatusCode, Uri};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::error::StreamError;
use super::runtime_io::RuntimeIo;

/// Deadline for connecting and for the answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest refusal that is passed on.
const MAX_REFUSAL: usize = 64 * 1024;

/// The versions a client offers, and the one the server chose.
pub(super) const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");

/// A connection to the runtime after its upgrade.
pub(super) struct RuntimeStream {
    /// The bytes.
    pub(super) io: RuntimeIo<TokioIo<Upgraded>>,
    /// The head of the runtime's answer.
    pub(super) headers: HeaderMap,
}

/// Answer of the runtime.
pub(super) enum Dialled {
    /// It upgraded.
    Upgraded(RuntimeStream),
    /// It refused, in its own words.
    Refused(Response<Body>),
}

/// Connects to the URL the runtime gave and asks for the upgrade in `headers`.
///
/// # Errors
/// When nobody answers, or with something that is neither an upgrade nor an error.
pub(super) async fn dial(
    url: &str,
    method: Method,
    headers: HeaderMap,
) -> Result<Dialled, StreamError> {
    let failed = |what: String| {
        StreamError::Runtime(format!(
            "the container runtime's streaming server does not answer: {what}"
        ))
    };
    match tokio::time::timeout(PATIENCE, upgrade(url, method, headers)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(what)) => Err(failed(what)),
        Err(_) => Err(failed(format!("no answer within {} s", PATIENCE.as_secs()))),
    }
}

async fn upgrade(url: &str, method: Method, headers: HeaderMap) -> Result<Dialled, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let uri: Uri = url.parse().map_err(|e| format!("{url}: {e}"))?;
    if uri.scheme_str() != Some("http") {
        return Err(format!(
            "{url} is not an http URL; turn TLS of the runtime's streaming server off: it listens on this machine only"
        ));
    }
    let authority = uri.authority().ok_or(format!("{url} names no host"))?;
    let address = match authority.port_u16() {
        Some(_) => authority.as_str().to_owned(),
        None => format!("{authority}:80"),
    };
    let stream = TcpStream::connect(&address)
        .await
        .map_err(|error| format!("connect to {address}: {error}"))?;
    stream.set_nodelay(true).map_err(|e| text(&e))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| text(&e))?;
    // Ends with the upgrade, or with the answer.
    tokio::spawn(connection.with_upgrades());
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, authority.as_str())
        .body(Body::empty())
        .map_err(|e| text(&e))?;
    request.headers_mut().extend(headers);
    let mut response = sender.send_request(request).await.map_err(|e| text(&e))?;
    let status = response.status();
    if status == StatusCode::SWITCHING_PROTOCOLS {
        let upgraded = hyper::upgrade::on(&mut response)
            .await
            .map_err(|e| text(&e))?;
        return Ok(Dialled::Upgraded(RuntimeStream {
            io: RuntimeIo::new(TokioIo::new(upgraded)),
            headers: std::mem::take(response.headers_mut()),
        }));
    }
    if !status.is_client_error() && !status.is_server_error() {
        return Err(format!(
            "invalid upgrade response: status code {}",
            status.as_u16()
        ));
    }
    let kind = response.headers().get(header::CONTENT_TYPE).cloned();
    let body = to_bytes(Body::new(response.into_body()), MAX_REFUSAL)
        .await
        .map_err(|e| text(&e))?;
    let mut refusal = Response::new(Body::from(body));
    *refusal.status_mut() = status;
    let kind = kind.unwrap_or(HeaderValue::from_static("text/plain; charset=utf-8"));
    refusal.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(Dialled::Refused(refusal))
}

/// The head of an upgrade to SPDY that offers one version.
pub(super) fn spdy_headers(version: &'static str) -> HeaderMap {
    HeaderMap::from_iter([
        (header::CONNECTION, HeaderValue::from_static("Upgrade")),
        (header::UPGRADE, HeaderValue::from_static("SPDY/3.1")),
        (STREAM_PROTOCOL, HeaderValue::from_static(version)),
    ])
}

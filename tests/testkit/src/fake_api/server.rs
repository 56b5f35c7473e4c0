//! The way in: a tower service in this process, or plain HTTP over TCP.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use http::StatusCode;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::BoxError;

use super::auth::{self, Identity};
use super::failure::Failure;
use super::request::{NO_RESOURCE, Request};
use super::resource::RESOURCES;
use super::watch::Watch;
use super::{Fault, Shared, reviews, verbs};

/// Body of an answer.
pub type ApiBody = UnsyncBoxBody<Bytes, BoxError>;

/// The server as a service, for one identity. `kube::Client::new` takes it, with any layers around it.
#[derive(Clone)]
pub struct ApiService {
    pub(super) shared: Arc<Shared>,
    /// `None`: by the Authorization header.
    pub(super) identity: Option<Identity>,
}

impl<B> tower::Service<http::Request<B>> for ApiService
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = http::Response<ApiBody>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let (shared, identity) = (Arc::clone(&self.shared), self.identity.clone());
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map_err(Into::into)?.to_bytes();
            handle(&shared, identity, &parts, &body).await
        })
    }
}

async fn handle(
    shared: &Arc<Shared>,
    identity: Option<Identity>,
    parts: &http::request::Parts,
    body: &[u8],
) -> Result<http::Response<ApiBody>, BoxError> {
    let (latency, hook) = {
        let mut inner = shared.inner();
        if let Some(error) = inner.down.clone() {
            inner.refused += 1;
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, error).into());
        }
        (inner.latency, Arc::clone(&inner.on_request))
    };
    let identity = match identity.map_or_else(|| shared.inner().identify(parts), Ok) {
        Ok(identity) => identity,
        Err(failure) => return Ok(refused(&failure)),
    };
    let mut request = match Request::parse(parts, body, identity) {
        Ok(request) => request,
        Err(failure) => return Ok(refused(&failure)),
    };
    request.number = shared.inner().log(&request);
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
    let fault = hook(&request).or_else(|| shared.inner().fault_for(&request));
    match &fault {
        Some(Fault::Status(code)) => {
            shared.inner().logged(request.number, *code);
            return Ok(refused(&Failure::injected(*code)));
        }
        Some(Fault::Error(error)) => {
            return Err(io::Error::new(io::ErrorKind::ConnectionReset, error.clone()).into());
        }
        Some(Fault::Hang) => std::future::pending::<()>().await,
        Some(Fault::Delay(by)) => tokio::time::sleep(*by).await,
        Some(Fault::LoseReply | Fault::HangAfterEffect) | None => {}
    }
    let response = serve(shared, &request);
    shared
        .inner()
        .logged(request.number, response.status().as_u16());
    match fault {
        Some(Fault::LoseReply) => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
        Some(Fault::HangAfterEffect) => std::future::pending().await,
        _ => Ok(response),
    }
}

fn serve(shared: &Arc<Shared>, request: &Request) -> http::Response<ApiBody> {
    let now = shared.now();
    let mut inner = shared.inner();
    if request.verb == "watch" && request.resource != NO_RESOURCE {
        let begun = verbs::selector(request).and_then(|selector| {
            let resource = &RESOURCES[request.resource];
            auth::authorize(&inner.state, request, resource, &selector)?;
            Watch::begin(shared, &mut inner, request, selector)
        });
        return match begun {
            Ok(watch) => {
                let frames = watch
                    .into_stream()
                    .map(|item| item.map(Frame::data).map_err(BoxError::from));
                response(200, StreamBody::new(frames).boxed_unsync())
            }
            Err(failure) => refused(&failure),
        };
    }
    let before = inner.state.rv;
    let answer = if request.resource == NO_RESOURCE {
        reviews::other(&inner.state, request, now)
    } else {
        verbs::answer(&mut inner.state, request, now)
    };
    let rv = inner.state.rv;
    if let Err(failure) = &answer {
        inner.invalid.record(&request.line(), &failure.violations());
    }
    drop(inner);
    if rv != before {
        shared.tell();
    }
    match answer {
        Ok((code, Value::String(text))) => response(code, full(text)),
        Ok((code, body)) => response(code, full(body.to_string())),
        Err(failure) => refused(&failure),
    }
}

fn refused(failure: &Failure) -> http::Response<ApiBody> {
    let mut response = response(failure.code, full(failure.status().to_string()));
    if failure.code == 429 {
        let after = http::HeaderValue::from_static("1");
        response
            .headers_mut()
            .insert(http::header::RETRY_AFTER, after);
    }
    response
}

fn full(text: String) -> ApiBody {
    Full::new(Bytes::from(text))
        .map_err(|never| match never {})
        .boxed_unsync()
}

fn response(code: u16, body: ApiBody) -> http::Response<ApiBody> {
    let mut response = http::Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::OK);
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static("application/json"),
    );
    response
}

/// A server on a TCP port. Stops, and breaks its connections, when dropped.
#[derive(Debug)]
pub struct Served {
    /// Where it listens.
    pub addr: SocketAddr,
    _stop: DropGuard,
}

impl Served {
    /// For a kubeconfig.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

pub(super) async fn listen(service: ApiService, addr: SocketAddr) -> io::Result<Served> {
    let listener = TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopped.cancelled() => return,
            };
            let Ok((stream, _)) = accepted else { continue };
            let (service, stopped) = (service.clone(), stopped.clone());
            tokio::spawn(async move {
                let service = hyper_util::service::TowerToHyperService::new(service);
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    // A connection that broke has no one to tell.
                    ended = connection => drop(ended),
                    () = stopped.cancelled() => {}
                }
            });
        }
    });
    Ok(Served {
        addr,
        _stop: stop.drop_guard(),
    })
}

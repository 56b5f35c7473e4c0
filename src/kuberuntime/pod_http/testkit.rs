//! TLS servers on the loopback device that speak one version of HTTP.

use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::LOCATION;
use hyper::http::request::Parts;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

/// A server that knows one ALPN name, and speaks what that means.
pub(crate) struct TlsServer {
    pub(crate) port: u16,
    requests: Arc<Mutex<Vec<Parts>>>,
    /// One for each connection that was closed.
    closed: Arc<Semaphore>,
}

impl TlsServer {
    pub(crate) async fn start(alpn: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let acceptor = acceptor(alpn);
        let requests = Arc::new(Mutex::new(Vec::new()));
        let closed = Arc::new(Semaphore::new(0));
        let (seen, ended) = (Arc::clone(&requests), Arc::clone(&closed));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, seen, ended) =
                    (acceptor.clone(), Arc::clone(&seen), Arc::clone(&ended));
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else {
                        return;
                    };
                    let service = service_fn(|request: Request<Incoming>| {
                        let (head, _) = request.into_parts();
                        let path = head.uri.path().to_owned();
                        seen.lock().unwrap().push(head);
                        answer(path)
                    });
                    let stream = TokioIo::new(stream);
                    if alpn == "h2" {
                        let server = http2::Builder::new(TokioExecutor::new());
                        drop(server.serve_connection(stream, service).await);
                    } else {
                        let server = http1::Builder::new();
                        drop(server.serve_connection(stream, service).await);
                    }
                    ended.add_permits(1);
                });
            }
        });
        Self {
            port,
            requests,
            closed,
        }
    }

    /// The requests since the last call, after the connection of each was closed.
    pub(crate) async fn requests(&self) -> Vec<Parts> {
        let requests = std::mem::take(&mut *self.requests.lock().unwrap());
        let closed = self.closed.acquire_many(requests.len().try_into().unwrap());
        let closed = tokio::time::timeout(Duration::from_secs(10), closed).await;
        closed.expect("a connection stays open").unwrap().forget();
        requests
    }
}

/// Makes TLS servers with a certificate that nobody trusts.
pub(crate) fn acceptor(alpn: &str) -> TlsAcceptor {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["pod".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

async fn answer(path: String) -> Result<Response<Body>, Infallible> {
    let answer = Response::builder();
    let answer = match path.as_str() {
        "/no-headers" => pending().await,
        "/no-body" => answer.body(Body::from_stream(futures::stream::pending::<
            Result<Bytes, Infallible>,
        >())),
        "/here" => answer
            .status(302)
            .header(LOCATION, "/ok")
            .body(Body::empty()),
        "/away" => answer
            .status(302)
            .header(LOCATION, "https://elsewhere.invalid/")
            .body(Body::from("move")),
        "/500" => answer.status(500).body(Body::from("broken")),
        "/big" => answer.body(Body::from(vec![b'x'; 1_000_000])),
        _ => answer.body(Body::from("ok")),
    };
    Ok(answer.unwrap())
}

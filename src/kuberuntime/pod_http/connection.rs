//! A connection for one request: TCP, TLS without a look at the certificate, and the version of HTTP that the server picks.

use std::future::Future;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::rt::Executor;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::errors::{GetError, dial_error, exchange_error, handshake_error};
use super::{Target, host_port};

/// ALPN names, the preferred one first.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";
/// Bytes that an HTTP/2 server may send before they are read: the smallest window of a connection that the protocol
/// allows.
const WINDOW: u32 = 65_535;
/// Most headers of an answer. Go's client limits their bytes alone; room for them is taken with each answer.
const MAX_HEADERS: usize = 2048;
/// Longest wait for a finished connection to close.
const GOODBYE: Duration = Duration::from_millis(100);

/// Returns the TLS configuration of all requests to pods. It resumes no session.
///
/// # Errors
/// The cryptography has no version of TLS.
pub(super) fn tls_config() -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Unverified))
        .with_no_client_auth();
    config.alpn_protocols = vec![HTTP2.to_vec(), HTTP1.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// An open connection. Dropping it closes the socket, whatever is under way.
pub(super) struct Connection {
    /// `host:port` of the server.
    pub(super) address: String,
    sender: Sender,
    running: Running,
}

enum Sender {
    Http1(http1::SendRequest<String>),
    Http2(http2::SendRequest<String>),
}

impl Connection {
    /// Connects to the server of a target.
    pub(super) async fn open(tls: &Arc<ClientConfig>, target: &Target) -> Result<Self, GetError> {
        let secure = match target.scheme() {
            "http" => false,
            "https" => true,
            other => {
                let why = format!("unsupported protocol scheme {other:?}");
                return Err(GetError::Failed(why));
            }
        };
        let (host, port) = (target.host(), target.port());
        let address = host_port(host, port);
        let dial = |error| GetError::Failed(dial_error(&address, &error));
        let stream = TcpStream::connect((host, port)).await.map_err(dial)?;
        stream.set_nodelay(true).map_err(dial)?;
        let running = Running::default();
        let opened = if secure {
            let name = ServerName::try_from(host.to_owned())
                .map_err(|error| GetError::Failed(format!("tls: {host:?}: {error}")))?;
            let stream = TlsConnector::from(Arc::clone(tls))
                .connect(name, stream)
                .await
                .map_err(|error| handshake_error(&address, &error))?;
            let picked = stream.get_ref().1.alpn_protocol();
            let http2 = picked == Some(HTTP2);
            begin(stream, http2, &running.0).await
        } else {
            begin(stream, false, &running.0).await
        };
        let sender = opened.map_err(|error| exchange_error(&address, &error, "EOF"))?;
        Ok(Self {
            address,
            sender,
            running,
        })
    }

    /// Speaks HTTP/1 on a stream.
    #[cfg(test)]
    pub(super) async fn over<S>(stream: S, address: &str) -> hyper::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let running = Running::default();
        Ok(Self {
            address: address.to_owned(),
            sender: begin(stream, false, &running.0).await?,
            running,
        })
    }

    pub(super) fn is_http2(&self) -> bool {
        matches!(self.sender, Sender::Http2(_))
    }

    /// Sends a request and waits for the headers of its answer.
    pub(super) async fn send(
        &mut self,
        request: Request<String>,
    ) -> Result<Response<Incoming>, GetError> {
        let answer = match &mut self.sender {
            Sender::Http1(sender) => sender.send_request(request).await,
            Sender::Http2(sender) => sender.send_request(request).await,
        };
        answer.map_err(|error| exchange_error(&self.address, &error, "EOF"))
    }

    /// Closes in order a connection whose answer was read and dropped.
    pub(super) async fn close(self) {
        drop(self.sender);
        let mut tasks = mem::take(&mut *self.running.0.lock());
        let ended = async move { while tasks.join_next().await.is_some() {} };
        // Nobody waits for it: the answer is complete. A connection that takes longer is cut off with its tasks.
        tokio::spawn(async move { drop(tokio::time::timeout(GOODBYE, ended).await) });
    }
}

/// Begins to speak HTTP on a stream. Takes from a server of HTTP/1 the odd headers that Go's client takes.
async fn begin<S>(stream: S, http2: bool, tasks: &Tasks) -> hyper::Result<Sender>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stream = TokioIo::new(stream);
    if http2 {
        let (sender, connection) = http2::Builder::new(tasks.clone())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .handshake(stream)
            .await?;
        tasks.execute(connection);
        return Ok(Sender::Http2(sender));
    }
    let (sender, connection) = http1::Builder::new()
        .allow_spaces_after_header_name_in_responses(true)
        .allow_obsolete_multiline_headers_in_responses(true)
        .max_headers(MAX_HEADERS)
        .handshake(stream)
        .await?;
    tasks.execute(connection);
    Ok(Sender::Http1(sender))
}

/// Tasks that serve a connection beside the requester. Their errors reach the requester as well.
#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F> Executor<F> for Tasks
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, task: F) {
        self.lock().spawn(async move { drop(task.await) });
    }
}

/// Ends the tasks of a connection, which hold each other, and with them the connection.
#[derive(Default)]
struct Running(Tasks);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.lock().abort_all();
    }
}

/// Takes every certificate: a pod may have made its own.
#[derive(Debug)]
struct Unverified;

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![
            SignatureScheme::RSA_PKCS1_SHA1,
            SignatureScheme::ECDSA_SHA1_Legacy,
            SignatureScheme::RSA_PKCS1_SHA256,
            SignatureScheme::ECDSA_NISTP256_SHA256,
            SignatureScheme::RSA_PKCS1_SHA384,
            SignatureScheme::ECDSA_NISTP384_SHA384,
            SignatureScheme::RSA_PKCS1_SHA512,
            SignatureScheme::ECDSA_NISTP521_SHA512,
            SignatureScheme::RSA_PSS_SHA256,
            SignatureScheme::RSA_PSS_SHA384,
            SignatureScheme::RSA_PSS_SHA512,
            SignatureScheme::ED25519,
            SignatureScheme::ED448,
        ]
    }
}

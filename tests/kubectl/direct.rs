//! Clients of our own, straight on the node's port: HTTP and WebSocket over TLS, as whoever.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures::{SinkExt, StreamExt};
use holdfast_testkit::envtest::Identity;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

/// How long an answer may take.
const SOON: Duration = Duration::from_secs(60);

/// Takes every certificate: most are the agent's own.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
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
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Who comes.
#[derive(Clone)]
pub enum User {
    Nobody,
    Certificate(Identity),
    Token(String),
}

/// A way to a node for one user.
#[derive(Clone)]
pub struct Direct {
    address: String,
    token: Option<String>,
    tls: TlsConnector,
}

/// An answer: status and body.
pub type Answer = (u16, String);

impl Direct {
    /// To a node's address and port.
    pub fn to(address: String, user: User) -> Self {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("TLS")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anybody(provider)));
        let config = match &user {
            User::Certificate(identity) => {
                let cert = CertificateDer::from_pem_slice(identity.cert_pem.as_bytes());
                let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes());
                builder
                    .with_client_auth_cert(vec![cert.expect("a certificate")], key.expect("a key"))
                    .expect("a client's certificate")
            }
            User::Nobody | User::Token(_) => builder.with_no_client_auth(),
        };
        Self {
            address,
            token: match user {
                User::Token(token) => Some(token),
                User::Nobody | User::Certificate(_) => None,
            },
            tls: TlsConnector::from(Arc::new(config)),
        }
    }

    pub async fn connect(&self) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(&self.address).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::try_from("node").expect("a name");
        self.tls.connect(name, stream).await
    }

    /// Sends a request on a connection of its own and gives the answer as it comes.
    pub async fn send(
        &self,
        method: &str,
        path: &str,
    ) -> Result<hyper::Response<Incoming>, String> {
        let asking = async {
            let stream = self.connect().await.map_err(|e| format!("connect: {e}"))?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream))
                    .await
                    .map_err(|e| format!("begin: {e:?}"))?;
            tokio::spawn(connection);
            let mut request = hyper::Request::builder()
                .method(method)
                .uri(path)
                .header("Host", &self.address);
            if let Some(token) = &self.token {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let request = request.body(Body::empty()).expect("a request");
            let answer = sender.send_request(request).await;
            answer.map_err(|e| format!("{method} {path}: {e:?}"))
        };
        let answer = tokio::time::timeout(SOON, asking).await;
        answer.map_err(|_| format!("{method} {path}: no answer in {SOON:?}"))?
    }

    /// As [`Self::send`], with the whole body.
    pub async fn ask(&self, method: &str, path: &str) -> Result<Answer, String> {
        let answer = self.send(method, path).await?;
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(Body::new(answer.into_body()), usize::MAX);
        let body = tokio::time::timeout(SOON, body).await;
        let body = body.map_err(|_| format!("{method} {path}: no end in {SOON:?}"))?;
        let body = body.map_err(|e| format!("{method} {path}: {e}"))?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }

    /// Opens a WebSocket with a subprotocol; the status when that is refused.
    pub async fn websocket(&self, path: &str, protocol: &str) -> Result<Socket, u16> {
        let stream = self.connect().await.expect("connect to the node");
        let url = format!("wss://{}{path}", self.address);
        let mut request = url.into_client_request().expect("a URL");
        let headers = request.headers_mut();
        headers.insert(
            "Sec-WebSocket-Protocol",
            protocol.parse().expect("a header"),
        );
        if let Some(token) = &self.token {
            let value = format!("Bearer {token}").parse().expect("a header");
            headers.insert("Authorization", value);
        }
        let opening = tokio_tungstenite::client_async(request, stream);
        match tokio::time::timeout(SOON, opening)
            .await
            .expect("an answer")
        {
            Ok((socket, answer)) => {
                let chosen = answer.headers().get("Sec-WebSocket-Protocol");
                let chosen = chosen.map(|value| value.to_str().expect("ASCII"));
                assert_eq!(chosen, Some(protocol));
                Ok(Socket { socket })
            }
            Err(tokio_tungstenite::tungstenite::Error::Http(answer)) => {
                Err(answer.status().as_u16())
            }
            Err(error) => panic!("open {path}: {error}"),
        }
    }
}

/// Channels of `v4.channel.k8s.io` and `v5.channel.k8s.io`.
pub const STDIN: u8 = 0;
pub const STDOUT: u8 = 1;
pub const STDERR: u8 = 2;
pub const ERROR: u8 = 3;
pub const RESIZE: u8 = 4;
pub const CLOSE: u8 = 255;

/// A WebSocket with channels.
pub struct Socket {
    socket: WebSocketStream<TlsStream<TcpStream>>,
}

impl Socket {
    pub async fn send(&mut self, channel: u8, bytes: &[u8]) {
        let message = [&[channel], bytes].concat();
        let sent = self.socket.send(Message::binary(message)).await;
        sent.expect("send to the node");
    }

    /// The next message: channel and bytes; `None` at the end.
    pub async fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            let message = tokio::time::timeout(SOON, self.socket.next()).await;
            match message.expect("a message in time") {
                Some(Ok(Message::Binary(bytes))) => {
                    let (channel, rest) = bytes.split_first().expect("a channel");
                    return Some((*channel, rest.to_vec()));
                }
                Some(Ok(Message::Text(text))) => panic!("text {text}"),
                Some(Ok(Message::Close(_)) | Err(_)) | None => return None,
                Some(Ok(_)) => {}
            }
        }
    }

    /// The next bytes that are some, on one channel.
    pub async fn next_on(&mut self, channel: u8) -> Vec<u8> {
        loop {
            match self.next().await.expect("not the end") {
                (from, bytes) if from == channel && !bytes.is_empty() => return bytes,
                (ERROR, bytes) => panic!("{}", String::from_utf8_lossy(&bytes)),
                _ => {}
            }
        }
    }

    /// Everything up to the end: bytes of stdout and of stderr, and the status.
    pub async fn rest(&mut self) -> (Vec<u8>, Vec<u8>, serde_json::Value) {
        let (mut out, mut err, mut status) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((channel, bytes)) = self.next().await {
            match channel {
                STDOUT => out.extend(bytes),
                STDERR => err.extend(bytes),
                ERROR => status.extend(bytes),
                other => panic!("channel {other}"),
            }
        }
        let status = serde_json::from_slice(&status)
            .unwrap_or_else(|e| panic!("a status: {e}: {:?}", String::from_utf8_lossy(&status)));
        (out, err, status)
    }

    /// Splits it to be written and read at the same time.
    pub fn into_inner(self) -> WebSocketStream<TlsStream<TcpStream>> {
        self.socket
    }
}

/// `command=…` for each word of a command, for the query of an exec.
pub fn command(words: &[&str]) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    for word in words {
        query.append_pair("command", word);
    }
    query.finish()
}

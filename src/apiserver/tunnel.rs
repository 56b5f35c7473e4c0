//! A connection to the API server's address, straight or through a proxy. TLS to the server itself comes on top.
//!
//! In: the address, and a [`Proxy`]. Out: a stream, or an error that names the proxy and what it said. A proxy
//! that accepts a connection and says nothing is given up before the request that waits for it is.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use futures::future::BoxFuture;
use hyper::http::Uri;
use hyper::rt::{Read, Write};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::SocksV5;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::{BoxError, Service, ServiceExt};

use super::proxy::{Kind, Proxy};

/// Deadline of a proxy, from the first byte to the connection. Shorter than that of a request.
const TUNNEL_TIMEOUT: Duration = Duration::from_secs(20);
/// Most of a proxy's answer that is read.
const LONGEST_HEAD: usize = 16 * 1024;
/// Most of it that is shown.
const TOLD: usize = 120;

/// Reason why the proxy gives no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum TunnelError {
    #[error("reach the proxy {proxy}")]
    Unreachable {
        proxy: String,
        #[source]
        source: BoxError,
    },
    #[error(
        "the proxy {proxy} refuses the user or password of its URL, or wants them there (407); give http://user:password@host:port"
    )]
    Unauthorized { proxy: String },
    #[error("the proxy {proxy} does not connect to {target}: it says {answer:?}")]
    Refused {
        proxy: String,
        target: String,
        answer: String,
    },
    #[error("the proxy {proxy} breaks off while it connects to {target}")]
    Broken {
        proxy: String,
        target: String,
        #[source]
        source: BoxError,
    },
    #[error("connect to {target} through the proxy {proxy}")]
    Socks {
        proxy: String,
        target: String,
        #[source]
        source: BoxError,
    },
    #[error("the proxy {proxy} did not connect to {target} within {TUNNEL_TIMEOUT:?}")]
    Silent { proxy: String, target: String },
}

/// Makes connections. Cheap to clone.
#[derive(Clone)]
pub(super) struct Dialer {
    tcp: HttpConnector,
    through: Option<Arc<Through>>,
}

struct Through {
    proxy: Proxy,
    /// For a proxy that is spoken to within TLS.
    tls: Option<HttpsConnector<HttpConnector>>,
}

impl Dialer {
    /// Connections of `tcp`, through `proxy` when there is one, which is spoken to with `tls` when that is its kind.
    pub(super) fn new(
        tcp: HttpConnector,
        proxy: Option<Proxy>,
        tls: impl FnOnce() -> Result<rustls::ClientConfig, kube::Error>,
    ) -> Result<Self, kube::Error> {
        let Some(proxy) = proxy else {
            return Ok(Self { tcp, through: None });
        };
        let tls = match proxy.kind {
            Kind::Https => {
                let mut tls = tls()?;
                // `CONNECT` is HTTP/1.1.
                tls.alpn_protocols.clear();
                let builder = hyper_rustls::HttpsConnectorBuilder::new()
                    .with_tls_config(tls)
                    .https_only();
                Some(builder.enable_http1().wrap_connector(tcp.clone()))
            }
            Kind::Http | Kind::Socks5 => None,
        };
        let through = Some(Arc::new(Through { proxy, tls }));
        Ok(Self { tcp, through })
    }
}

type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

impl Service<Uri> for Dialer {
    type Response = Stream;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Stream, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, target: Uri) -> Self::Future {
        let tcp = self.tcp.clone();
        let Some(through) = self.through.clone() else {
            return Box::pin(async move { Ok(MaybeHttpsStream::Http(tcp.oneshot(target).await?)) });
        };
        Box::pin(async move {
            let connecting = through.connect(tcp, &target);
            match tokio::time::timeout(TUNNEL_TIMEOUT, connecting).await {
                Ok(connected) => Ok(connected?),
                Err(_) => Err(TunnelError::Silent {
                    proxy: through.proxy.to_string(),
                    target: address_of(&target),
                }
                .into()),
            }
        })
    }
}

impl Through {
    async fn connect(&self, tcp: HttpConnector, target: &Uri) -> Result<Stream, TunnelError> {
        let proxy = &self.proxy;
        let address = proxy.address.clone();
        let unreachable = |source: BoxError| TunnelError::Unreachable {
            proxy: proxy.to_string(),
            source,
        };
        let stream = match (&self.tls, proxy.kind) {
            (Some(tls), _) => tls.clone().oneshot(address).await.map_err(unreachable)?,
            (None, Kind::Socks5) => {
                let socks = SocksV5::new(address, tcp);
                let socks = match proxy.user.clone() {
                    Some((name, password)) => socks.with_auth(name, password),
                    None => socks,
                };
                // It wants the port, too.
                let target = match format!("https://{}/", address_of(target)).parse() {
                    Ok(target) => target,
                    Err(_) => target.clone(),
                };
                let connected = socks.oneshot(target.clone()).await;
                let stream = connected.map_err(|error| TunnelError::Socks {
                    proxy: proxy.to_string(),
                    target: address_of(&target),
                    source: error.into(),
                })?;
                return Ok(MaybeHttpsStream::Http(stream));
            }
            (None, Kind::Http | Kind::Https) => {
                let connected = tcp.oneshot(address).await;
                MaybeHttpsStream::Http(connected.map_err(|error| unreachable(error.into()))?)
            }
        };
        ask(stream, proxy, &address_of(target)).await
    }
}

/// Host and port.
fn address_of(target: &Uri) -> String {
    let port = target.port_u16().unwrap_or(match target.scheme_str() {
        Some("http") => 80,
        _ => 443,
    });
    format!("{}:{port}", target.host().unwrap_or_default())
}

/// Has the proxy behind `stream` connect to `target`.
async fn ask<T>(stream: T, proxy: &Proxy, target: &str) -> Result<T, TunnelError>
where
    T: Read + Write + Unpin,
{
    let broken = |source: BoxError| TunnelError::Broken {
        proxy: proxy.to_string(),
        target: target.to_owned(),
        source,
    };
    let mut request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n");
    if let Some((name, password)) = &proxy.user {
        let plain = format!("{name}:{password}");
        let encoded = base64::engine::general_purpose::STANDARD.encode(plain);
        request.push_str(&format!("Proxy-Authorization: Basic {encoded}\r\n"));
    }
    request.push_str("\r\n");
    let mut stream = TokioIo::new(stream);
    let asked = stream.write_all(request.as_bytes()).await;
    asked.map_err(|error| broken(error.into()))?;
    stream.flush().await.map_err(|error| broken(error.into()))?;
    let mut head = Vec::new();
    // Nothing beyond the head is taken: what follows is the server's.
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == LONGEST_HEAD {
            return Err(broken("its answer does not end".into()));
        }
        let byte = stream.read_u8().await;
        head.push(byte.map_err(|error| broken(error.into()))?);
    }
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    let http = words.next().is_some_and(|word| word.starts_with("HTTP/1."));
    match words.next() {
        Some("200") if http => Ok(stream.into_inner()),
        Some("407") if http => Err(TunnelError::Unauthorized {
            proxy: proxy.to_string(),
        }),
        _ => Err(TunnelError::Refused {
            proxy: proxy.to_string(),
            target: target.to_owned(),
            answer: line.chars().take(TOLD).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::proxy;
    use super::*;

    fn proxy_at(url: &str) -> Proxy {
        let server = "https://api.test".parse().unwrap();
        proxy::choose(Some(url), &server, |_| None)
            .unwrap()
            .unwrap()
    }

    /// Returns the results for a proxy that answers with `bytes`.
    async fn answered(bytes: &[u8]) -> (Result<(), String>, String) {
        let (near, mut far) = tokio::io::duplex(64 * 1024);
        far.write_all(bytes).await.unwrap();
        far.shutdown().await.unwrap();
        let proxy = proxy_at("http://me:secret@proxy:3128");
        let result = ask(TokioIo::new(near), &proxy, "api.test:6443").await;
        let result = result.map(drop).map_err(|error| error.to_string());
        let mut asked = String::new();
        far.read_to_string(&mut asked).await.unwrap();
        (result, asked)
    }

    #[tokio::test]
    async fn a_proxy_is_asked_once_and_its_no_is_told() {
        let endless = vec![b'x'; LONGEST_HEAD + 1];
        for (answer, says) in [
            (
                &b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n"[..],
                "",
            ),
            (b"HTTP/1.0 200\r\n\r\n", ""),
            (
                b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
                "(407)",
            ),
            (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "502 Bad Gateway"),
            (b"HTTP/1.1 403 Forbidden\r\n\r\n", "403 Forbidden"),
            (b"SSH-2.0-OpenSSH\r\n\r\n", "SSH-2.0"),
            (b"HTTP/1.1 200 OK\r\n", "breaks off"),
            (b"", "breaks off"),
            (&endless, "breaks off"),
        ] {
            let (result, asked) = answered(answer).await;
            match (&result, says) {
                (Ok(()), "") => {}
                (Err(told), says) if !says.is_empty() => {
                    assert!(
                        told.contains(says) && told.contains("http://proxy:3128"),
                        "{told}"
                    );
                    assert!(!told.contains("secret"), "{told}");
                }
                _ => panic!("{says:?}: {result:?}"),
            }
            let head = "CONNECT api.test:6443 HTTP/1.1\r\nHost: api.test:6443\r\n";
            // me:secret
            let user = "Proxy-Authorization: Basic bWU6c2VjcmV0\r\n\r\n";
            assert_eq!(asked, format!("{head}{user}"));
        }
    }

    #[tokio::test]
    async fn what_follows_the_proxys_answer_is_left_for_the_server() {
        let (near, mut far) = tokio::io::duplex(1024);
        far.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello")
            .await
            .unwrap();
        let proxy = proxy_at("http://proxy");
        let stream = ask(TokioIo::new(near), &proxy, "api.test:443").await;
        let mut stream = stream.unwrap().into_inner();
        let mut rest = [0; 5];
        stream.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"hello");
    }

    #[tokio::test(start_paused = true)]
    async fn a_proxy_that_says_nothing_is_given_up() {
        for scheme in ["http", "https", "socks5"] {
            // Its backlog accepts, and nobody else does.
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("{scheme}://{}", listener.local_addr().unwrap());
            let mut tcp = HttpConnector::new();
            tcp.enforce_http(false);
            let tls = || {
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                Ok(rustls::ClientConfig::builder_with_provider(provider)
                    .with_safe_default_protocol_versions()
                    .unwrap()
                    .with_root_certificates(rustls::RootCertStore::empty())
                    .with_no_client_auth())
            };
            let dialer = Dialer::new(tcp, Some(proxy_at(&url)), tls).unwrap();
            let begun = tokio::time::Instant::now();
            let silent = dialer.oneshot("https://api.test:6443".parse().unwrap());
            let told = silent.await.err().unwrap().to_string();
            assert!(told.contains("did not connect to api.test:6443"), "{told}");
            assert_eq!(begun.elapsed().as_secs(), TUNNEL_TIMEOUT.as_secs());
        }
    }
}

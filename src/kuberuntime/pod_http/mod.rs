//! One GET to a pod, for probes and lifecycle hooks: on a connection of its own, without a proxy, with certificates
//! unverified, and over HTTP/2 where a TLS server picks it. Upstream: the transports of `pkg/probe/http` and of
//! `lifecycle.NewHandlerRunner`.
//!
//! Nothing here has a time limit of its own, but for the end of a connection: whoever asks drops the future when the
//! time is up, which closes the connection.

mod connection;
mod errors;
mod target;
#[cfg(test)]
pub(crate) mod testkit;

use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use hyper::body::{Body as _, Incoming};
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, HOST, HeaderMap, HeaderValue, LOCATION,
    PROXY_AUTHORIZATION, TRANSFER_ENCODING,
};
use hyper::http::uri::Authority;
use hyper::{Request, StatusCode, Uri, Version};
use rustls::ClientConfig;

use self::connection::Connection;
pub use self::errors::{GetError, dial_error, io_error, read_error, root_cause};
use self::errors::{exchange_error, is_eof};
pub use self::target::Target;

/// Upstream: `httpprobe.RedirectChecker`.
const REDIRECTS: usize = 10;

/// HTTP client for requests to pods.
pub struct Client {
    tls: Arc<ClientConfig>,
}

impl Client {
    /// Prepares TLS.
    ///
    /// # Errors
    /// There is no TLS to be had.
    pub fn new() -> Result<Self, GetError> {
        let tls = connection::tls_config()
            .map_err(|error| GetError::Request(format!("no TLS for requests to pods: {error}")))?;
        Ok(Self { tls })
    }

    /// Sends a GET, and waits for the headers of the answer. Follows redirects to the same host; a redirect to
    /// another one is the answer. A `Host` among the headers takes the place of the target's.
    ///
    /// # Errors
    /// See [`GetError`]. A server's answer is none, whatever its code.
    pub async fn get(&self, target: &Target, mut headers: HeaderMap) -> Result<Answer, GetError> {
        let mut at = target.clone();
        let mut asked = 0;
        loop {
            // It is large, and so would be every future that waits for it.
            let answer = Box::pin(self.once(&at, &headers)).await?;
            let next = match answer.redirect(&at) {
                Some(next) if next.host() == target.host() => next,
                _ => return Ok(answer),
            };
            asked += 1;
            if asked >= REDIRECTS {
                let why = format!("stopped after {REDIRECTS} redirects");
                return Err(GetError::Failed(why));
            }
            if next.scheme() != at.scheme() || next.port() != at.port() {
                for secret in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION] {
                    headers.remove(secret);
                }
            }
            at = next;
        }
    }

    async fn once(&self, target: &Target, headers: &HeaderMap) -> Result<Answer, GetError> {
        let mut connection = Connection::open(&self.tls, target).await?;
        let request = request(target, headers.clone(), connection.is_http2())?;
        let (head, body) = connection.send(request).await?.into_parts();
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body,
            connection,
        })
    }
}

/// An answer whose headers have arrived. Dropping it closes its connection.
pub struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Incoming,
    connection: Connection,
}

impl Answer {
    /// Returns the status code.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Reads the body, up to `limit` bytes, and closes the connection.
    ///
    /// # Errors
    /// The body did not arrive as a whole.
    pub async fn read(mut self, limit: usize) -> Result<Vec<u8>, GetError> {
        let mut bytes = Vec::new();
        while bytes.len() < limit {
            match poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        bytes.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) if self.ends_with_connection() && is_eof(&error) => break,
                Some(Err(error)) => {
                    let address = &self.connection.address;
                    return Err(exchange_error(address, &error, "unexpected EOF"));
                }
                None => {
                    drop(self.body);
                    self.connection.close().await;
                    break;
                }
            }
        }
        bytes.truncate(limit);
        Ok(bytes)
    }

    /// Returns whether the end of the connection ends the body. TLS servers often end both without announcing it.
    fn ends_with_connection(&self) -> bool {
        !self.connection.is_http2()
            && !self.headers.contains_key(CONTENT_LENGTH)
            && !self.headers.contains_key(TRANSFER_ENCODING)
    }

    /// Returns the target of a redirect that answers a request to `target`.
    fn redirect(&self, target: &Target) -> Option<Target> {
        if !matches!(self.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
            return None;
        }
        let location = self.headers.get(LOCATION)?.to_str().ok()?;
        target.join(location)
    }
}

/// Makes the request. HTTP/2 has the host in the pseudo-header `:authority`, and no `Connection`.
fn request(
    target: &Target,
    mut headers: HeaderMap,
    http2: bool,
) -> Result<Request<String>, GetError> {
    let bad = |error: &dyn std::fmt::Display| GetError::Request(format!("{target}: {error}"));
    let path = target.path();
    let host = match headers.remove(HOST).filter(|host| !host.is_empty()) {
        Some(host) => host,
        None => HeaderValue::from_str(target.authority()).map_err(|error| bad(&error))?,
    };
    let mut request = Request::new(String::new());
    if http2 {
        let authority = Authority::try_from(host.as_bytes())
            .map_err(|error| GetError::Request(format!("http: invalid Host header: {error}")))?;
        *request.uri_mut() = Uri::builder()
            .scheme(target.scheme())
            .authority(authority)
            .path_and_query(path)
            .build()
            .map_err(|error| bad(&error))?;
        *request.version_mut() = Version::HTTP_2;
        headers.remove(CONNECTION);
    } else {
        *request.uri_mut() = path.parse().map_err(|error| bad(&error))?;
        headers.insert(HOST, host);
        headers
            .entry(CONNECTION)
            .or_insert(HeaderValue::from_static("close"));
    }
    *request.headers_mut() = headers;
    Ok(request)
}

/// Returns `host:port`, with brackets where they belong.
pub fn host_port(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V6(_)) => format!("[{host}]:{port}"),
        _ => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// Returns the bytes that a server on this port receives for a path.
    async fn received(port: u16, path: &str) -> String {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let mut connection = Connection::over(ours, "there").await.unwrap();
        let target = Target::new("http", "10.0.0.1", port, path).unwrap();
        let request = request(&target, HeaderMap::new(), false).unwrap();
        let asked = tokio::spawn(async move { connection.send(request).await.map(drop) });
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            bytes.push(theirs.read_u8().await.unwrap());
        }
        asked.abort();
        String::from_utf8(bytes).unwrap().to_lowercase()
    }

    #[tokio::test]
    async fn the_host_names_the_port_that_is_the_default_as_well() {
        for port in [80, 443, 8080] {
            let bytes = received(port, "/").await;
            let host = format!("\r\nhost: 10.0.0.1:{port}\r\n");
            assert!(bytes.contains(&host), "{bytes}");
        }
    }

    #[tokio::test]
    async fn the_path_reaches_the_server_as_it_is_given() {
        for path in ["/a/../b", "/%2e%2e/a", "/./a//b", "/a?x=../%2e"] {
            let bytes = received(80, path).await;
            let line = format!("get {path} http/1.1\r\n");
            assert!(bytes.starts_with(&line), "{bytes}");
        }
    }
}

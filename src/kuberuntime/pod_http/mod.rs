//! One GET to a pod, for probes and lifecycle hooks: on a connection of its own, without a proxy, with certificates
//! unverified, and over HTTP/2 where a TLS server picks it. Upstream: the transports of `pkg/probe/http` and of
//! `lifecycle.NewHandlerRunner`.
//!
//! Nothing here has a time limit of its own, but for the end of a connection: whoever asks drops the future when the
//! time is up, which closes the connection.

mod connection;
mod errors;
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
use reqwest::Url;
use rustls::ClientConfig;

use self::connection::Connection;
pub use self::errors::{GetError, dial_error, io_error, read_error, root_cause};
use self::errors::{exchange_error, is_eof};

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
    /// another one is the answer. A `Host` among the headers takes the place of the URL's.
    ///
    /// # Errors
    /// See [`GetError`]. A server's answer is none, whatever its code.
    pub async fn get(&self, url: &Url, mut headers: HeaderMap) -> Result<Answer, GetError> {
        let mut at = url.clone();
        let mut asked = 0;
        loop {
            // It is large, and so would be every future that waits for it.
            let answer = Box::pin(self.once(&at, &headers)).await?;
            let next = match answer.redirect(&at) {
                Some(next) if next.host_str() == url.host_str() => next,
                _ => return Ok(answer),
            };
            asked += 1;
            if asked >= REDIRECTS {
                let why = format!("stopped after {REDIRECTS} redirects");
                return Err(GetError::Failed(why));
            }
            if next.scheme() != at.scheme()
                || next.port_or_known_default() != at.port_or_known_default()
            {
                for secret in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION] {
                    headers.remove(secret);
                }
            }
            at = next;
        }
    }

    async fn once(&self, url: &Url, headers: &HeaderMap) -> Result<Answer, GetError> {
        let mut connection = Connection::open(&self.tls, url).await?;
        let request = request(url, headers.clone(), connection.is_http2())?;
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

    /// Returns the target of a redirect that answers a request to `url`.
    fn redirect(&self, url: &Url) -> Option<Url> {
        if !matches!(self.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
            return None;
        }
        let location = self.headers.get(LOCATION)?.to_str().ok()?;
        url.join(location).ok()
    }
}

/// Makes the request. HTTP/2 has the host in the pseudo-header `:authority`, and no `Connection`.
fn request(url: &Url, mut headers: HeaderMap, http2: bool) -> Result<Request<String>, GetError> {
    let bad = |error: &dyn std::fmt::Display| GetError::Request(format!("{url}: {error}"));
    let path = match url.query() {
        Some(query) => format!("{}?{query}", url.path()),
        None => url.path().to_owned(),
    };
    let host = match headers.remove(HOST).filter(|host| !host.is_empty()) {
        Some(host) => host,
        None => HeaderValue::from_str(&authority(url)).map_err(|error| bad(&error))?,
    };
    let mut request = Request::new(String::new());
    if http2 {
        let authority = Authority::try_from(host.as_bytes())
            .map_err(|error| GetError::Request(format!("http: invalid Host header: {error}")))?;
        *request.uri_mut() = Uri::builder()
            .scheme(url.scheme())
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

/// Host and port of a URL; without the port that its scheme has anyway.
fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}

/// Returns `host:port`, with brackets where they belong.
pub fn host_port(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V6(_)) => format!("[{host}]:{port}"),
        _ => format!("{host}:{port}"),
    }
}

//! Upgrades to WebSocket: which subprotocol, and the answer to the handshake.

use axum::body::Body;
use axum::http::header::{self, HeaderMap, HeaderValue};
use axum::http::{Method, Response, StatusCode};
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use super::channels::Encoding;
use super::error::StreamError;

/// SPDY within WebSocket, for port-forward.
const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";

/// Channel protocols of exec and attach: name, how messages are written, version of the SPDY streams, whether a
/// client can end its input.
const CHANNELS: [(&str, Channels); 7] = [
    (
        "v5.channel.k8s.io",
        Channels::new(Encoding::Binary, V4, true),
    ),
    (
        "v4.channel.k8s.io",
        Channels::new(Encoding::Binary, V4, false),
    ),
    (
        "v4.base64.channel.k8s.io",
        Channels::new(Encoding::Base64, V4, false),
    ),
    (
        "v3.channel.k8s.io",
        Channels::new(Encoding::Binary, V3, false),
    ),
    (
        "v2.channel.k8s.io",
        Channels::new(Encoding::Binary, V2, false),
    ),
    ("channel.k8s.io", Channels::new(Encoding::Binary, V3, false)),
    (
        "base64.channel.k8s.io",
        Channels::new(Encoding::Base64, V3, false),
    ),
];
const CHANNEL_NAMES: &[&str] = &[
    "",
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
];
const FORWARD_NAMES: &[&str] = &[
    "",
    TUNNEL,
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "portforward.k8s.io",
];

const V2: &str = "v2.channel.k8s.io";
const V3: &str = "v3.channel.k8s.io";
const V4: &str = "v4.channel.k8s.io";
/// The only version of port-forward over SPDY.
pub(super) const PORT_FORWARD: &str = "portforward.k8s.io";

/// Mapping of a client's channels to streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channels {
    /// Encoding of messages.
    pub(super) encoding: Encoding,
    /// Version of the streams towards the runtime.
    pub(super) streams: &'static str,
    /// A client can end its input.
    pub(super) half_close: bool,
}

impl Channels {
    const fn new(encoding: Encoding, streams: &'static str, half_close: bool) -> Self {
        Self {
            encoding,
            streams,
            half_close,
        }
    }

    /// Returns whether the protocol can carry the window's size.
    pub(super) fn resizes(&self) -> bool {
        self.streams != V2
    }

    /// Returns whether the end is reported as a `Status`, not as text.
    pub(super) fn has_status(&self) -> bool {
        self.streams == V4
    }
}

/// Protocol that both sides agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agreed {
    /// Channels.
    Channels(Channels),
    /// The bytes of a SPDY connection.
    Tunnel,
}

/// Returns whether the client requests an upgrade to `protocol`.
pub(super) fn wants(headers: &HeaderMap, protocol: &str) -> bool {
    is_upgrade(headers)
        && tokens(headers, header::UPGRADE).any(|t| t.eq_ignore_ascii_case(protocol))
}

/// Returns whether the client requests any upgrade.
pub(super) fn is_upgrade(headers: &HeaderMap) -> bool {
    headers.contains_key(header::UPGRADE)
        && tokens(headers, header::CONNECTION).any(|t| t.eq_ignore_ascii_case("upgrade"))
}

/// Returns whether the client uses WebSocket without a SPDY tunnel. Such a client names its ports in the query.
pub(super) fn is_channels(headers: &HeaderMap) -> bool {
    wants(headers, "websocket")
        && !tokens(headers, header::SEC_WEBSOCKET_PROTOCOL).any(|t| t == TUNNEL)
}

/// Takes the first protocol of the client's that is known; exec and attach.
///
/// # Errors
/// When it offers none of them.
pub(super) fn channels(headers: &HeaderMap) -> Result<(Option<String>, Agreed), StreamError> {
    agree(
        headers,
        CHANNEL_NAMES,
        Channels::new(Encoding::Binary, V3, false),
    )
}

/// The same for port-forward.
///
/// # Errors
/// When it offers none of them.
pub(super) fn forward(headers: &HeaderMap) -> Result<(Option<String>, Agreed), StreamError> {
    let default = Channels::new(Encoding::Binary, PORT_FORWARD, false);
    let (name, agreed) = agree(headers, FORWARD_NAMES, default)?;
    let agreed = match agreed {
        _ if name.as_deref() == Some(TUNNEL) => Agreed::Tunnel,
        Agreed::Channels(channels) => Agreed::Channels(Channels {
            streams: PORT_FORWARD,
            ..channels
        }),
        Agreed::Tunnel => Agreed::Tunnel,
    };
    Ok((name, agreed))
}

fn agree(
    headers: &HeaderMap,
    known: &'static [&'static str],
    default: Channels,
) -> Result<(Option<String>, Agreed), StreamError> {
    let offered: Vec<String> = tokens(headers, header::SEC_WEBSOCKET_PROTOCOL)
        .map(str::to_owned)
        .collect();
    if offered.is_empty() {
        return Ok((None, Agreed::Channels(default)));
    }
    let Some(name) = offered.iter().find(|name| known.contains(&name.as_str())) else {
        return Err(StreamError::Protocols(offered, known));
    };
    let channels = CHANNELS.iter().find(|(n, _)| n == name);
    let channels = channels.map_or(default, |(_, channels)| *channels);
    Ok((Some(name.clone()), Agreed::Channels(channels)))
}

/// The answer that upgrades.
///
/// # Errors
/// When the request is not a WebSocket handshake.
pub(super) fn accept(
    method: &Method,
    headers: &HeaderMap,
    protocol: Option<&str>,
) -> Result<Response<Body>, StreamError> {
    let bad = |text: &str| StreamError::BadRequest(text.to_owned());
    if method != Method::GET {
        return Err(bad("a WebSocket handshake is a GET"));
    }
    if headers
        .get(header::SEC_WEBSOCKET_VERSION)
        .map(HeaderValue::as_bytes)
        != Some(b"13")
    {
        return Err(bad("Sec-WebSocket-Version must be 13"));
    }
    let key = headers
        .get(header::SEC_WEBSOCKET_KEY)
        .ok_or_else(|| bad("Sec-WebSocket-Key is missing"))?;
    let accept = HeaderValue::try_from(derive_accept_key(key.as_bytes()))
        .map_err(|_| bad("Sec-WebSocket-Key is not a key"))?;
    let mut response = switching();
    let to = response.headers_mut();
    to.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    to.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    to.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    if let Some(protocol) = protocol {
        let protocol = HeaderValue::try_from(protocol)
            .map_err(|_| bad("Sec-WebSocket-Protocol is not a protocol"))?;
        to.insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
    }
    Ok(response)
}

/// An answer that switches protocols.
pub(super) fn switching() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response
}

fn tokens(headers: &HeaderMap, name: header::HeaderName) -> impl Iterator<Item = &str> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|token| !token.is_empty())
}

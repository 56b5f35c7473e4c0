//! Network errors, in the words that users know from Go's libraries.

use std::error::Error;
use std::io;

use rustls::InvalidMessage;

/// Reason why a pod gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// The request cannot be made at all.
    #[error("{0}")]
    Request(String),
    /// The server does not speak TLS.
    #[error("tls: first record does not look like a TLS handshake")]
    NotTls,
    /// The request failed on the way.
    #[error("{0}")]
    Failed(String),
}

/// Returns why no connection could be made.
pub fn dial_error(address: &str, error: &io::Error) -> String {
    let why = match error.kind() {
        io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
        io::ErrorKind::ConnectionReset => "connect: connection reset by peer".to_owned(),
        io::ErrorKind::HostUnreachable => "connect: no route to host".to_owned(),
        io::ErrorKind::NetworkUnreachable => "connect: network is unreachable".to_owned(),
        io::ErrorKind::TimedOut => "connect: connection timed out".to_owned(),
        _ => error.to_string(),
    };
    format!("dial tcp {address}: {why}")
}

/// Returns why a connection broke. `eof` is the word for one that the server closed.
pub fn read_error(address: &str, error: &io::Error, eof: &str) -> String {
    if let Some(error) = tls_cause(error) {
        return tls_text(error);
    }
    match error.kind() {
        // TLS streams and HTTP/2 connections report a close that was not announced as one of these.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => eof.to_owned(),
        io::ErrorKind::ConnectionReset => {
            format!("read tcp {address}: read: connection reset by peer")
        }
        _ => format!("read tcp {address}: {error}"),
    }
}

/// Returns why a TLS handshake failed.
pub(super) fn handshake_error(address: &str, error: &io::Error) -> GetError {
    match tls_cause(error) {
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)) => GetError::NotTls,
        _ => GetError::Failed(read_error(address, error, "EOF")),
    }
}

/// Returns why an exchange over HTTP failed.
pub(super) fn exchange_error(address: &str, error: &hyper::Error, eof: &str) -> GetError {
    let why = if let Some(io) = io_error(error) {
        read_error(address, io, eof)
    } else if error.is_incomplete_message()
        || error.is_closed()
        || error.is_canceled()
        || error.is_user()
    {
        // The last three: the connection ended before it had taken the request. No request is wrong in itself.
        eof.to_owned()
    } else if error.is_parse() {
        format!("malformed HTTP response: {error}")
    } else {
        format!("http2: {}", root_cause(error))
    };
    GetError::Failed(why)
}

/// Reports whether the server closed the connection in the middle of something.
pub(super) fn is_eof(error: &hyper::Error) -> bool {
    error.is_incomplete_message()
        || io_error(error).is_some_and(|io| io.kind() == io::ErrorKind::UnexpectedEof)
}

/// Returns the I/O error among the causes of an error.
pub fn io_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return Some(io);
        }
        cause = error.source();
    }
    None
}

/// Returns the innermost cause of an error.
pub fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

fn tls_cause(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

fn tls_text(error: &rustls::Error) -> String {
    match error {
        rustls::Error::AlertReceived(alert) => {
            format!("remote error: tls: {}", words(&format!("{alert:?}")))
        }
        other => format!("tls: {other}"),
    }
}

/// `HandshakeFailure` as `handshake failure`.
fn words(name: &str) -> String {
    let mut text = String::with_capacity(name.len() + 3);
    let mut after_lowercase = false;
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && after_lowercase {
            text.push(' ');
        }
        after_lowercase = letter.is_ascii_lowercase();
        text.push(letter.to_ascii_lowercase());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_connections_are_told_in_the_words_of_go() {
        let alert = rustls::Error::AlertReceived(rustls::AlertDescription::CertificateRequired);
        let unannounced = "peer closed connection: https://docs.rs/rustls";
        for (error, want) in [
            (
                io::Error::new(io::ErrorKind::InvalidData, alert),
                "remote error: tls: certificate required",
            ),
            (
                io::Error::new(io::ErrorKind::UnexpectedEof, unannounced),
                "EOF",
            ),
            (
                io::ErrorKind::ConnectionReset.into(),
                "read tcp 10.0.0.1:80: read: connection reset by peer",
            ),
        ] {
            assert_eq!(read_error("10.0.0.1:80", &error, "EOF"), want);
        }
    }
}

//! The parameters of requests, by the names the API server gives them.

use super::error::StreamError;
use crate::kuberuntime::cri::Streams;

/// Ports of one WebSocket connection: each has two channels.
const MAX_PORTS: usize = 32;

/// Channels of no port.
pub(super) const NO_PORT: &str = "query parameter \"port\" is required";

/// Every value of a parameter, in order.
pub(super) fn all(query: &str, name: &str) -> Vec<String> {
    form_urlencoded::parse(query.as_bytes())
        .filter(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
        .collect()
}

/// `input`, `output`, `error` and `tty`; upstream's `remotecommand.NewOptions`.
///
/// # Errors
/// When no stream is asked for.
pub(super) fn streams(query: &str) -> Result<Streams, StreamError> {
    let set = |name| all(query, name).first().is_some_and(|value| value == "1");
    let tty = set("tty");
    let streams = Streams {
        stdin: set("input"),
        stdout: set("output"),
        // A terminal has one stream of output.
        stderr: set("error") && !tty,
        tty,
    };
    if !streams.stdin && !streams.stdout && !streams.stderr {
        let text = "you must specify at least 1 of stdin, stdout, stderr";
        return Err(StreamError::BadRequest(text.to_owned()));
    }
    Ok(streams)
}

/// `port` (or `ports`): numbers, several times or with commas; upstream's `portforward.NewV4Options`.
///
/// # Errors
/// When there is none, or one is not a port.
pub(super) fn ports(query: &str) -> Result<Vec<u16>, StreamError> {
    let bad = |text: String| Err(StreamError::BadRequest(text));
    let mut values = all(query, "port");
    values.extend(all(query, "ports"));
    if values.is_empty() {
        return bad(NO_PORT.to_owned());
    }
    let mut ports = Vec::new();
    for value in &values {
        if value.is_empty() {
            return bad("query parameter \"port\" cannot be empty".to_owned());
        }
        for port in value.split(',') {
            match port.parse::<u16>() {
                Ok(0) => return bad(format!("port {value:?} must be > 0")),
                Ok(port) => ports.push(port),
                Err(error) => {
                    return bad(format!("unable to parse {value:?} as a port: {error}"));
                }
            }
        }
    }
    if ports.len() > MAX_PORTS {
        return bad(format!(
            "{} ports are too many for one connection; at most {MAX_PORTS}",
            ports.len()
        ));
    }
    Ok(ports)
}

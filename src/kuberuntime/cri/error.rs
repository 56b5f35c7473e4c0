//! Errors of calls to the runtime. Their texts name the remedy.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use tonic::{Code, Status};

/// A call to the runtime that failed.
#[derive(Debug, thiserror::Error)]
#[error("{operation}{}: {message}", object_suffix(.object))]
pub struct CriError {
    /// Operation, by upstream's metric label (`run_podsandbox`, `create_container`, …).
    pub operation: &'static str,
    /// ID, name or image that the call concerned; empty if there is none.
    pub object: String,
    /// Kind of failure.
    pub kind: CriErrorKind,
    /// The runtime's own words, or what to do about it.
    pub message: String,
    /// The wire error, for failures of the connection.
    #[source]
    pub source: Option<Box<Status>>,
}

/// Kinds of failure that callers distinguish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CriErrorKind {
    /// Nobody answers on the socket, or the connection broke during the call (the outcome is unknown).
    Unavailable {
        /// The endpoint.
        socket: String,
    },
    /// No answer in time; the effect may still happen.
    DeadlineExceeded,
    /// The runtime does not know the object.
    NotFound,
    /// The runtime has such an object already.
    AlreadyExists,
    /// The runtime does not offer this call.
    Unimplemented,
    /// The runtime has too many such requests open.
    ResourceExhausted,
    /// A message is larger than the runtime or this side allows.
    TooLarge,
    /// Anything else the runtime says.
    Other,
}

impl CriError {
    /// Returns whether the runtime does not know the object.
    pub fn is_not_found(&self) -> bool {
        self.kind == CriErrorKind::NotFound
    }

    /// Returns whether the runtime did not answer, or the connection broke during the call.
    pub fn is_unavailable(&self) -> bool {
        matches!(self.kind, CriErrorKind::Unavailable { .. })
    }

    /// Returns whether the runtime does not offer this call.
    pub fn is_unimplemented(&self) -> bool {
        self.kind == CriErrorKind::Unimplemented
    }

    /// Returns whether a message was larger than the runtime or the agent allows.
    pub fn is_too_large(&self) -> bool {
        self.kind == CriErrorKind::TooLarge
    }

    /// Returns whether the failed call may have had its effect.
    pub fn outcome_unknown(&self) -> bool {
        matches!(
            self.kind,
            CriErrorKind::Unavailable { .. } | CriErrorKind::DeadlineExceeded
        )
    }

    pub(super) fn new(
        operation: &'static str,
        object: &str,
        kind: CriErrorKind,
        message: impl Into<String>,
    ) -> Self {
        Self {
            operation,
            object: object.to_owned(),
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// No answer came within `after`; `configured` is `runtimeRequestTimeout`, of which some calls get more.
    pub(super) fn deadline(
        operation: &'static str,
        object: &str,
        socket: &str,
        after: Duration,
        configured: Duration,
    ) -> Self {
        let limit = if after == configured {
            "the limit is runtimeRequestTimeout".to_owned()
        } else {
            let configured = humantime::format_duration(configured);
            format!("runtimeRequestTimeout is {configured}, this call has its own limit")
        };
        Self::new(
            operation,
            object,
            CriErrorKind::DeadlineExceeded,
            format!(
                "the container runtime on {socket} did not answer within {}; it may still be at work \
                 (is it hung? {limit})",
                humantime::format_duration(after)
            ),
        )
    }

    pub(super) fn from_status(
        operation: &'static str,
        object: &str,
        socket: &str,
        status: Status,
    ) -> Self {
        if is_transport(&status) {
            let message = transport_message(socket, &status);
            let kind = CriErrorKind::Unavailable {
                socket: socket.to_owned(),
            };
            let mut error = Self::new(operation, object, kind, message);
            error.source = Some(Box::new(status));
            return error;
        }
        // containerd's words while it reads its state back in, under a code that says nothing.
        let starting = status.message().contains("server is not initialized yet");
        let kind = match status.code() {
            _ if is_too_large(&status) => CriErrorKind::TooLarge,
            _ if starting => CriErrorKind::Unavailable {
                socket: socket.to_owned(),
            },
            Code::Unavailable => CriErrorKind::Unavailable {
                socket: socket.to_owned(),
            },
            Code::DeadlineExceeded => CriErrorKind::DeadlineExceeded,
            Code::NotFound => CriErrorKind::NotFound,
            Code::AlreadyExists => CriErrorKind::AlreadyExists,
            Code::Unimplemented => CriErrorKind::Unimplemented,
            Code::ResourceExhausted => CriErrorKind::ResourceExhausted,
            _ => CriErrorKind::Other,
        };
        let message = if starting {
            format!("the container runtime on {socket} is still starting")
        } else if lacks_cri(&status) {
            format!(
                "{} (the container runtime on {socket} does not offer CRI v1: its CRI plugin is off by disabled_plugins in \
                 /etc/containerd/config.toml, as in packages for Docker, or could not be loaded, as its log says)",
                status.message()
            )
        } else if wants_systemd(&status) {
            format!(
                "{} (the container runtime on {socket} leaves cgroups to systemd: set cgroupDriver: systemd)",
                status.message()
            )
        } else if status.message().is_empty() {
            format!("the container runtime says {}", status.code())
        } else {
            status.message().to_owned()
        };
        Self::new(operation, object, kind, message)
    }
}

fn object_suffix(object: &str) -> String {
    if object.is_empty() {
        String::new()
    } else {
        format!(" {object}")
    }
}

/// Returns whether the one who answers has none of the calls of CRI, by the words of grpc-go. A single call that it lacks is another
/// `Unimplemented`.
fn lacks_cri(status: &Status) -> bool {
    status.code() == Code::Unimplemented && status.message().contains("unknown service runtime.v1.")
}

/// Returns whether the runtime has systemd make its cgroups and was given a path of the other kind, by the words of runc and
/// CRI-O.
fn wants_systemd(status: &Status) -> bool {
    let words = [
        "expected cgroupsPath to be of format",
        "did not receive systemd slice as cgroup parent",
    ];
    words.iter().any(|words| status.message().contains(words))
}

/// By the words of grpc-go (containerd, CRI-O) for what it sends and receives, and of tonic for what this side does.
fn is_too_large(status: &Status) -> bool {
    matches!(status.code(), Code::ResourceExhausted | Code::OutOfRange)
        && ["message larger than max", "message length too large"]
            .iter()
            .any(|words| status.message().contains(words))
}

/// A status made on this side carries its cause; one the runtime sent does not.
fn is_transport(status: &Status) -> bool {
    status.source().is_some()
        && matches!(
            status.code(),
            Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled
        )
}

fn transport_message(socket: &str, status: &Status) -> String {
    match io_kind(status) {
        Some(io::ErrorKind::NotFound) => format!(
            "no container runtime answers on {socket}: the socket does not exist; is containerd running? \
             (--container-runtime-endpoint names the socket)"
        ),
        Some(io::ErrorKind::ConnectionRefused) => format!(
            "no container runtime answers on {socket}: the socket exists but nothing listens; is containerd \
             running? (--container-runtime-endpoint names the socket)"
        ),
        Some(io::ErrorKind::PermissionDenied) => format!(
            "the container runtime's socket {socket} may not be opened; the agent has to run as root"
        ),
        _ => format!(
            "the connection to the container runtime on {socket} broke during the call; was the runtime \
             restarted? its outcome is not known"
        ),
    }
}

fn io_kind(status: &Status) -> Option<io::ErrorKind> {
    let mut cause = status.source();
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_is_too_large_is_told_from_an_exhausted_runtime() {
        let kind = |code, message: &str| {
            CriError::from_status(
                "list_podsandbox",
                "",
                "unix:///x",
                Status::new(code, message),
            )
            .kind
        };
        for (code, message) in [
            (
                Code::ResourceExhausted,
                "grpc: trying to send message larger than max (16910240 vs. 16777216)",
            ),
            (
                Code::ResourceExhausted,
                "grpc: received message larger than max (16910240 vs. 16777216)",
            ),
            (
                Code::OutOfRange,
                "Error, decoded message length too large: found 16910240 bytes, the limit is: 16777216 bytes",
            ),
        ] {
            assert_eq!(kind(code, message), CriErrorKind::TooLarge, "{message}");
        }
        let busy = kind(Code::ResourceExhausted, "too many streams");
        assert_eq!(busy, CriErrorKind::ResourceExhausted);
    }

    #[test]
    fn a_runtime_without_cri_is_told_with_what_to_do() {
        let of = |message: &str| {
            let status = Status::new(Code::Unimplemented, message);
            CriError::from_status("version", "", "/run/c.sock", status)
        };
        let none = of("unknown service runtime.v1.RuntimeService");
        assert_eq!(none.kind, CriErrorKind::Unimplemented);
        assert!(none.message.contains("disabled_plugins"), "{none}");
        let one = of("unknown method CheckpointContainer for service runtime.v1.RuntimeService");
        assert_eq!(one.kind, CriErrorKind::Unimplemented);
        assert!(!one.message.contains("disabled_plugins"), "{one}");
    }

    #[test]
    fn a_runtime_with_another_cgroup_driver_is_told_with_what_to_do() {
        for words in [
            "runc create failed: expected cgroupsPath to be of format \"slice:prefix:name\" for systemd cgroups, got \"/kubepods/x\" instead",
            "cri-o configured with systemd cgroup manager, but did not receive systemd slice as cgroup parent: /kubepods/x",
        ] {
            let status = Status::new(Code::Unknown, words);
            let error = CriError::from_status("run_podsandbox", "p", "/run/c.sock", status);
            assert!(error.message.starts_with(words), "{error}");
            assert!(error.message.contains("cgroupDriver: systemd"), "{error}");
        }
    }
}

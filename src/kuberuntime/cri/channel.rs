//! A lazily connecting channel over a unix socket.

use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use super::error::{CriError, CriErrorKind};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens no connection yet: the first call does, and each call after a broken connection does again.
/// Must be called inside a tokio runtime.
pub(super) fn lazy(endpoint: &str) -> Result<Channel, CriError> {
    let path = socket_path(endpoint)?;
    // The URI names nobody; gRPC over a unix socket wants an authority all the same.
    let channel = Endpoint::from_static("http://localhost")
        .connect_timeout(CONNECT_TIMEOUT)
        .connect_with_connector_lazy(service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }));
    Ok(channel)
}

/// `unix:///run/x.sock` or `/run/x.sock`.
fn socket_path(endpoint: &str) -> Result<PathBuf, CriError> {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    if path.starts_with('/') {
        return Ok(PathBuf::from(path));
    }
    Err(CriError::new(
        "connect",
        endpoint,
        CriErrorKind::Other,
        "not a runtime endpoint: give an absolute socket path such as \
         unix:///run/containerd/containerd.sock (--container-runtime-endpoint)",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_absolute_socket_paths() {
        let path = PathBuf::from("/run/x.sock");
        assert_eq!(socket_path("unix:///run/x.sock").unwrap(), path);
        assert_eq!(socket_path("/run/x.sock").unwrap(), path);
        for bad in ["", "run/x.sock", "unix://run/x.sock", "tcp://127.0.0.1:1"] {
            let error = socket_path(bad).unwrap_err().to_string();
            assert!(error.contains("--container-runtime-endpoint"), "{error}");
        }
    }
}

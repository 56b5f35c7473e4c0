//! One HTTP/1 connection with bounded patience; shared by the health server and the admin socket.

use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

/// How long a peer may take to send a request's head, also the first one of an idle connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long requests in flight may go on after `stop`.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves `routes` on `io` until the peer leaves, is too slow, or `stop` is cancelled and what was being
/// answered is finished (at most two seconds later).
pub(crate) async fn serve_connection<I>(io: I, routes: Router, stop: CancellationToken)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(io), TowerToHyperService::new(routes));
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => Ok(result),
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(DRAIN_TIMEOUT, connection).await
        }
    };
    match result {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "connection ended early"),
        Err(_) => tracing::debug!("connection dropped: still busy after shutdown"),
    }
}

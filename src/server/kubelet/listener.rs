//! Accepts connections and serves the routes on them.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use super::super::{ServerError, conn};
use super::NodeApi;

/// Binds the address of the kubelet's API.
///
/// # Errors
/// [`ServerError::Bind`], which names the port and the flag.
pub async fn bind(addr: SocketAddr) -> Result<TcpListener, ServerError> {
    TcpListener::bind(addr)
        .await
        .map_err(|source| ServerError::BindApi {
            addr,
            flag: "--port",
            source,
        })
}

/// Serves until [`NodeApi::stop`] is cancelled.
pub async fn serve(listener: TcpListener, node: NodeApi) {
    let node = Arc::new(node);
    let routes = super::routes(Arc::clone(&node));
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = node.stop.cancelled() => break,
        };
        if let Ok((stream, _)) = accepted {
            tasks.spawn(conn::serve_connection(
                stream,
                routes.clone(),
                node.stop.clone(),
            ));
        }
    }
    tasks.close();
    tasks.wait().await;
}

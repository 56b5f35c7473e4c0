//! Layer 4: this node's object, as the API server last showed it, or as it is recorded.
//!
//! Written by whoever reads or writes the node in the API server, read by admission and by the builders of
//! containers.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

/// Shared handle.
#[derive(Clone, Debug)]
pub struct NodeObject(Arc<watch::Sender<Option<Arc<Node>>>>);

impl Default for NodeObject {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl NodeObject {
    /// A newer version of the node. Tells whoever waits, if it differs.
    pub fn set(&self, node: Arc<Node>) {
        self.0.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&node);
            *known = Some(node);
            changed
        });
    }

    /// The newest version; `None` before the first.
    pub fn get(&self) -> Option<Arc<Node>> {
        self.0.borrow().clone()
    }

    /// Waits until there is one. Cancel-safe.
    pub async fn known(&self) -> Arc<Node> {
        let mut node = self.0.subscribe();
        loop {
            if let Some(node) = node.borrow_and_update().clone() {
                return node;
            }
            if node.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// For whoever wants every change.
    pub fn subscribe(&self) -> watch::Receiver<Option<Arc<Node>>> {
        self.0.subscribe()
    }
}

//! Layer 4: this node's object, as the API server last showed it, or as it is recorded.
//!
//! Written by whoever reads or writes the node in the API server, read by admission and by the builders of
//! containers.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio::time::Instant;

/// Longest wait for a read of the node.
const PATIENCE: Duration = Duration::from_secs(1);
/// After a read, none is made for so long: what has changed since comes with the watch.
const PAUSE: Duration = Duration::from_secs(1);
/// After a read that failed, none is made for so long.
const PAUSE_FAILED: Duration = Duration::from_secs(10);

/// Reads the node from the API server and shows it. Returns whether it was read.
pub type ReadNode = Box<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

/// Shared handle.
#[derive(Clone, Debug)]
pub struct NodeObject(Arc<Shared>);

/// A handle that does not keep the object, for what the object itself holds.
#[derive(Clone, Debug)]
pub struct WeakNodeObject(Weak<Shared>);

impl WeakNodeObject {
    /// The object, if there is still one.
    pub fn upgrade(&self) -> Option<NodeObject> {
        self.0.upgrade().map(NodeObject)
    }
}

struct Shared {
    node: watch::Sender<Option<Arc<Node>>>,
    read: OnceLock<ReadNode>,
    /// From when on the next read may be made.
    next: Mutex<Option<Instant>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.node.fmt(f)
    }
}

impl Default for NodeObject {
    fn default() -> Self {
        Self(Arc::new(Shared {
            node: watch::Sender::new(None),
            read: OnceLock::new(),
            next: Mutex::default(),
        }))
    }
}

impl NodeObject {
    /// A newer version of the node. Tells whoever waits, if it differs.
    pub fn set(&self, node: Arc<Node>) {
        self.0.node.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&node);
            *known = Some(node);
            changed
        });
    }

    /// A handle that does not keep the object.
    pub fn downgrade(&self) -> WeakNodeObject {
        WeakNodeObject(Arc::downgrade(&self.0))
    }

    /// Sets how the node is read. The first one counts.
    pub fn read_by(&self, read: ReadNode) {
        drop(self.0.read.set(read));
    }

    /// Reads the node from the API server, for a decision that would otherwise be for good. Gives up after a second, and then
    /// does nothing for ten: nobody waits for a server that is away. Reads at most once a second. Cancel-safe.
    pub async fn read_again(&self) {
        let Some(read) = self.0.read.get() else {
            return;
        };
        let next = || self.0.next.lock().unwrap_or_else(PoisonError::into_inner);
        if next().is_some_and(|next| Instant::now() < next) {
            return;
        }
        let is_read = tokio::time::timeout(PATIENCE, read())
            .await
            .unwrap_or(false);
        let pause = if is_read { PAUSE } else { PAUSE_FAILED };
        *next() = Some(Instant::now() + pause);
    }

    /// The newest version; `None` before the first.
    pub fn get(&self) -> Option<Arc<Node>> {
        self.0.node.borrow().clone()
    }

    /// Waits until there is one. Cancel-safe.
    pub async fn known(&self) -> Arc<Node> {
        let mut node = self.0.node.subscribe();
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
        self.0.node.subscribe()
    }
}

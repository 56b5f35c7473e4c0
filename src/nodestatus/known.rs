//! The newest version of the node that this agent has seen.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};
use tokio::sync::Notify;
use tracing::debug;

use super::checkpoint::Checkpoint;
use crate::apiserver::Connection;
use crate::node_object::NodeObject;

/// Origin of a version of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A quorum read: it is the node, whatever was known before.
    Read,
    /// A watch, or the answer to a write: one may overtake the other.
    Change,
}

/// Shared handle.
#[derive(Clone)]
pub(super) struct Known {
    api: Api<Node>,
    name: String,
    node: NodeObject,
    checkpoint: Checkpoint,
    gone: Arc<AtomicBool>,
    changed: Arc<Notify>,
}

impl Known {
    pub(super) fn new(
        api: Api<Node>,
        name: &str,
        node: NodeObject,
        checkpoint: Checkpoint,
    ) -> Self {
        if let Some(recorded) = checkpoint.node() {
            node.set(Arc::new(recorded));
        }
        let (gone, changed) = (Arc::default(), Arc::default());
        let (weak, reader) = (node.downgrade(), (api.clone(), name.to_owned()));
        let (saves, is_gone, has_changed) =
            (checkpoint.clone(), Arc::clone(&gone), Arc::clone(&changed));
        node.read_by(Box::new(move || {
            let known = weak.upgrade().map(|node| Self {
                api: reader.0.clone(),
                name: reader.1.clone(),
                node,
                checkpoint: saves.clone(),
                gone: Arc::clone(&is_gone),
                changed: Arc::clone(&has_changed),
            });
            Box::pin(async move {
                match known {
                    Some(known) => known.read().await,
                    None => false,
                }
            })
        }));
        Self {
            api,
            name: name.to_owned(),
            node,
            checkpoint,
            gone,
            changed,
        }
    }

    /// Reads the node, beside those who write and watch it. Returns whether that worked.
    async fn read(&self) -> bool {
        match self.api.get(&self.name).await {
            Ok(node) => {
                // One that is gone is registered anew, whatever it was before.
                if !self.gone.load(Ordering::Relaxed) {
                    self.observe(node, Origin::Change);
                }
                true
            }
            Err(error) => {
                debug!(%error, "cannot read the node");
                false
            }
        }
    }

    pub(super) fn api(&self) -> &Api<Node> {
        &self.api
    }

    pub(super) fn get(&self) -> Option<Arc<Node>> {
        self.node.get()
    }

    /// Takes a version of the node, unless a newer one is known.
    pub(super) fn observe(&self, mut node: Node, from: Origin) {
        node.metadata.managed_fields = None;
        self.gone.store(false, Ordering::Relaxed);
        let version = |node: &Node| {
            let version = node.metadata.resource_version.as_ref();
            version.and_then(|v| v.parse::<u64>().ok())
        };
        let older = from == Origin::Change
            && self.node.get().is_some_and(|known| {
                let pair = (version(&node), version(&known));
                known.metadata.uid == node.metadata.uid
                    && matches!(pair, (Some(new), Some(known)) if new < known)
            });
        if older {
            return;
        }
        self.checkpoint.save_node(&node);
        self.node.set(Arc::new(node));
        self.changed.notify_one();
    }

    /// The record is what is known, even if the store could not take it before.
    pub(super) fn save(&self) {
        if let Some(node) = self.get() {
            self.checkpoint.save_node(&node);
        }
    }

    /// Returns whether the watch reported that the node does not exist, and clears that report.
    pub(super) fn take_gone(&self) -> bool {
        self.gone.swap(false, Ordering::Relaxed)
    }

    /// Waits for the next change. Cancel-safe.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Watches the node, for ever.
    pub(super) async fn watch(&self, connection: &Connection) {
        let mut set_back = connection.set_back();
        loop {
            let stream = watcher::watch_object(self.api.clone(), &self.name).default_backoff();
            let mut stream = std::pin::pin!(stream);
            let mut failing = false;
            loop {
                let event = tokio::select! {
                    // Both are cancel-safe. A watch that waits for its next try need not do so any more.
                    event = stream.next() => event,
                    () = super::came_up(connection), if failing => break,
                    _ = set_back.changed() => break,
                };
                match event {
                    Some(Ok(Some(node))) => self.observe(node, Origin::Change),
                    Some(Ok(None)) => {
                        self.gone.store(true, Ordering::Relaxed);
                        self.changed.notify_one();
                    }
                    Some(Err(error)) => {
                        debug!(%error, "watch of the node interrupted");
                        failing = true;
                        continue;
                    }
                    None => break,
                }
                failing = false;
            }
        }
    }
}

//! Records of the node that survive restarts; see the module above for keys and format.
//!
//! Records are relaxed, and no task waits for them. The next poll of the node submits a record again that the store did
//! not accept, since it compares the wanted content with the stored one.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, NodeCondition};
use serde::{Deserialize, Serialize};

use crate::core::node_status::Memory;
use crate::core::state::Transaction;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::store::Store;
use crate::types::{Clock, Stamp};

/// The record `nodestatus//<name>`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Report {
    /// True once the node was reported; the record's time is that of the report.
    pub(super) reported: bool,
    /// The conditions that were reported last.
    pub(super) conditions: Vec<NodeCondition>,
    /// State that is kept beside the node.
    pub(super) memory: Memory,
}

impl Kind for Report {
    const DECLARED: Declared = kinds::NODE_STATUS;
}

#[derive(Clone)]
pub(super) struct Checkpoint {
    store: Store,
    clock: Arc<dyn Clock>,
    node_key: Key<Node>,
    report_key: Key<Report>,
}

impl Checkpoint {
    pub(super) fn new(store: Store, clock: Arc<dyn Clock>, name: &str) -> Self {
        Self {
            store,
            clock,
            node_key: Key::new("", name),
            report_key: Key::new("", name),
        }
    }

    pub(super) fn node(&self) -> Option<Node> {
        self.read(&self.node_key).map(|(node, _)| node)
    }

    pub(super) fn report(&self) -> Option<(Report, Stamp)> {
        self.read(&self.report_key)
    }

    /// Reads a record. One that cannot be read counts as absent, since the API server sends the node again.
    fn read<K: Kind>(&self, key: &Key<K>) -> Option<(K, Stamp)> {
        let state = self.store.snapshot();
        let record = state.stored(key)?;
        match record.read() {
            Ok(value) => Some((value, record.at())),
            Err(error) => {
                let error = error.source;
                tracing::warn!(%key, %error, "cannot read a record of the node, fetching it again");
                None
            }
        }
    }

    pub(super) fn save_node(&self, node: &Node) {
        let version = node.metadata.resource_version.clone().unwrap_or_default();
        let state = self.store.snapshot();
        let held = state.stored(&self.node_key);
        if held.is_some_and(|held| held.mark() == version && !version.is_empty()) {
            return;
        }
        self.submit(&self.node_key, version, node, self.clock.now());
    }

    pub(super) fn save_report(&self, report: &Report, at: Stamp) {
        let held = self.report();
        if held.is_some_and(|(held, when)| held == *report && when == at) {
            return;
        }
        self.submit(&self.report_key, String::new(), report, at);
    }

    fn submit<K: Kind>(&self, key: &Key<K>, version: String, value: &K, at: Stamp) {
        match Transaction::new().try_put_object(key, version, value, at) {
            // Not waited for, see the module; a store that fails tells so through its health.
            Ok(transaction) => drop(self.store.submit(transaction)),
            Err(error) => {
                tracing::warn!(%key, %error, "cannot write a record of the node");
            }
        }
    }
}

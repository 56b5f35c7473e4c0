//! What is remembered of the node across restarts; see the module above for keys and format.
//!
//! Records are relaxed and nobody waits for them. One that the store could not take is submitted again with the next
//! look at the node: what is wanted is compared with what the store holds.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, NodeCondition};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::core::node_status::Memory;
use crate::core::state::{ObjectRecord, Transaction};
use crate::store::Store;
use crate::types::{Clock, Stamp};

/// The record `nodestatus//<name>`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Report {
    /// Whether anything was reported yet; the record's time is that of the report then.
    pub(super) reported: bool,
    /// The conditions that were reported last.
    pub(super) conditions: Vec<NodeCondition>,
    /// What is known beside the node.
    pub(super) memory: Memory,
}

#[derive(Clone)]
pub(super) struct Checkpoint {
    store: Store,
    clock: Arc<dyn Clock>,
    node_key: String,
    report_key: String,
}

impl Checkpoint {
    pub(super) fn new(store: Store, clock: Arc<dyn Clock>, name: &str) -> Self {
        Self {
            store,
            clock,
            node_key: format!("nodes//{name}"),
            report_key: format!("nodestatus//{name}"),
        }
    }

    pub(super) fn node(&self) -> Option<Node> {
        self.read(&self.node_key).map(|(node, _)| node)
    }

    pub(super) fn report(&self) -> Option<(Report, Stamp)> {
        self.read(&self.report_key)
    }

    /// What cannot be read is not there: the API server tells it again.
    fn read<T: DeserializeOwned>(&self, key: &str) -> Option<(T, Stamp)> {
        let state = self.store.snapshot();
        let record = state.record::<ObjectRecord>(key)?;
        match serde_json::from_slice(&record.data) {
            Ok(value) => Some((value, record.at)),
            Err(error) => {
                tracing::warn!(key, %error, "a record of the node cannot be read, it is fetched again");
                None
            }
        }
    }

    pub(super) fn save_node(&self, node: &Node) {
        let version = node.metadata.resource_version.clone().unwrap_or_default();
        let state = self.store.snapshot();
        let held = state.record::<ObjectRecord>(&self.node_key);
        if held.is_some_and(|held| held.resource_version == version && !version.is_empty()) {
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

    fn submit<T: Serialize>(&self, key: &str, resource_version: String, value: &T, at: Stamp) {
        let data = match serde_json::to_vec(value) {
            Ok(data) => data,
            Err(error) => {
                tracing::warn!(key, %error, "a record of the node cannot be written");
                return;
            }
        };
        let record = ObjectRecord {
            resource_version,
            encrypted: false,
            data,
            at,
        };
        // Not waited for, see the module; a store that fails tells so through its health.
        drop(self.store.submit(Transaction::new().put(key, record)));
    }
}

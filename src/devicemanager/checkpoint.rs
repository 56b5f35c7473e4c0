//! Devices that a kubelet has given to pods that still run, read from its checkpoint. Upstream:
//! `devicemanager/checkpoint`.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use serde::Deserialize;

use super::DeviceManager;
use super::client::granted;
use super::proto::ContainerAllocateResponse;
use crate::core::devices::{
    self, Allocation, PluginRecord, PodDevices, allocations_key_of, plugin_key, taken,
};
use crate::core::state::{State, Transaction};
use crate::store::CommitError;
use crate::types::{PodUid, Stamp};

/// File name of the checkpoint, in the directory `device-plugins`.
pub const FILE: &str = "kubelet_internal_checkpoint";

/// Contents of the checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KubeletCheckpoint {
    /// Devices of pods.
    pods: BTreeMap<PodUid, PodDevices>,
    /// Resources whose plugins had registered.
    resources: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct File {
    data: Data,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Data {
    pod_device_entries: Option<Vec<Entry>>,
    registered_devices: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    /// By NUMA node; -1 stands for none.
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<BTreeMap<i64, Option<Vec<String>>>>,
    /// The plugin's answer, in base64.
    alloc_resp: Option<String>,
}

impl Entry {
    /// Returns the devices. Without a readable answer the plugin is asked again for the same devices when the container
    /// starts again.
    fn allocation(&self) -> Allocation {
        let mut ids: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for (node, of_node) in self.device_ids.iter().flatten() {
            for id in of_node.iter().flatten() {
                let nodes = ids.entry(id.clone()).or_default();
                nodes.extend(Some(*node).filter(|node| *node >= 0));
            }
        }
        let answer = self.alloc_resp.as_ref();
        let answer = answer.and_then(|text| STANDARD.decode(text).ok());
        let answer =
            answer.and_then(|bytes| ContainerAllocateResponse::decode(bytes.as_slice()).ok());
        Allocation {
            ids,
            granted: answer.map(granted),
            outdated: None,
        }
    }
}

impl KubeletCheckpoint {
    /// Reads the checkpoint. Its checksum is over Go's form of the data and is not checked.
    ///
    /// # Errors
    /// When it is no checkpoint.
    pub fn parse(data: &[u8]) -> Result<Self, serde_json::Error> {
        let file: File = serde_json::from_slice(data)?;
        let mut checkpoint = Self::default();
        for entry in file.data.pod_device_entries.into_iter().flatten() {
            let allocation = entry.allocation();
            if allocation.ids.is_empty() || !devices::is_extended(&entry.resource_name) {
                continue;
            }
            let pod = checkpoint.pods.entry(PodUid::new(&entry.pod_uid));
            let of_container = pod.or_default().containers.entry(entry.container_name);
            let of_container = of_container.or_default();
            of_container.insert(entry.resource_name, allocation);
        }
        let resources = file.data.registered_devices.unwrap_or_default().into_keys();
        checkpoint.resources = resources.filter(|r| devices::is_extended(r)).collect();
        Ok(checkpoint)
    }

    /// Returns the records of the pods in `running` (UID and namespace) that have none, and of the resources that are not
    /// known. Devices that another pod has on record are left out.
    fn unrecorded(
        &self,
        state: &State,
        running: &[(PodUid, String)],
        now: Stamp,
    ) -> (Transaction, Vec<PodUid>) {
        let mut transaction = Transaction::new();
        let mut adopted = Vec::new();
        for (uid, namespace) in running {
            let key = allocations_key_of(namespace, uid);
            let Some(devices) = self.pods.get(uid) else {
                continue;
            };
            if state.stored(&key).is_some() {
                continue;
            }
            let mut devices = devices.clone();
            for of_container in devices.containers.values_mut() {
                of_container.retain(|resource, allocation| is_free(state, resource, allocation));
            }
            devices.containers.retain(|_, of| !of.is_empty());
            if devices.containers.is_empty() {
                continue;
            }
            let names: Vec<&str> = devices.containers.keys().map(String::as_str).collect();
            let text = format!("of containers {}, from a kubelet", names.join(", "));
            transaction = transaction
                .expect_object(state, &key)
                .put_object(&key, &devices, now)
                .journal(Some(uid), "devices taken over", text);
            adopted.push(uid.clone());
        }
        let plugin = PluginRecord {
            lost: Some(now),
            ..PluginRecord::default()
        };
        for resource in &self.resources {
            let key = plugin_key(resource);
            if state.stored(&key).is_none() {
                transaction = transaction
                    .expect_object(state, &key)
                    .put_object(&key, &plugin, now);
            }
        }
        (transaction, adopted)
    }
}

/// Returns whether no pod has any of these devices; if that cannot be known they are left to the pod that runs with them.
fn is_free(state: &State, resource: &str, allocation: &Allocation) -> bool {
    let taken = taken(state, resource).unwrap_or_default();
    !allocation.ids.keys().any(|id| taken.contains(id))
}

impl DeviceManager {
    /// Records the devices that a kubelet has given to the pods in `running` (UID and namespace), unless they have a
    /// record. Returns the pods whose devices are taken over. Running containers are not touched and no plugin is asked.
    ///
    /// # Errors
    /// When the store takes no commit.
    pub async fn take_over(
        &self,
        checkpoint: &KubeletCheckpoint,
        running: &[(PodUid, String)],
    ) -> Result<Vec<PodUid>, CommitError> {
        let (state, now) = (self.store().snapshot(), self.now());
        let (transaction, adopted) = checkpoint.unrecorded(&state, running, now);
        if !transaction.is_empty() {
            self.store().commit_or_hold(transaction).await?;
        }
        let mut shared = self.shared();
        for resource in &checkpoint.resources {
            if !shared.inventory.knows(resource) {
                let empty = PluginRecord::default();
                shared.inventory.remember(resource, &empty, now);
            }
        }
        drop(shared);
        self.show_amounts();
        Ok(adopted)
    }
}

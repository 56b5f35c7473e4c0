//! Stored records of devices: JSON in table `objects`.
//!
//! `deviceallocations/<namespace>/<pod UID>`: the devices of each container. Written, and on the disk, before a plugin is
//! asked to allocate them, and again with its answer before a container starts.
//! `deviceplugins/<domain>/<name>`: a resource whose plugin has registered.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::{Devices, Granted, PluginOptions};
use crate::core::state::kinds::{self, Declared, Key, Kind, Stored};
use crate::core::state::{State, WorkerPhase, WorkerRecord};
use crate::types::{ContainerId, PodExt, PodUid, Stamp};

/// Key of a pod's [`PodDevices`].
pub fn allocations_key(pod: &Pod) -> Key<PodDevices> {
    allocations_key_of(pod.namespace(), &pod.uid())
}

/// Key of the [`PodDevices`] of a pod of which namespace and UID are known.
pub fn allocations_key_of(namespace: &str, uid: &PodUid) -> Key<PodDevices> {
    Key::new(namespace, uid.as_str())
}

/// Key of a resource's [`PluginRecord`].
pub fn plugin_key(resource: &str) -> Key<PluginRecord> {
    let (domain, name) = resource.split_once('/').unwrap_or((resource, ""));
    Key::new(domain, name)
}

/// The devices of a pod are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the record of the devices of pod {pod} cannot be read; no other devices are given until that pod is gone"
)]
pub struct Unreadable {
    /// UID.
    pub pod: PodUid,
}

/// The devices of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodDevices {
    /// By container, by resource.
    pub containers: BTreeMap<String, BTreeMap<String, Allocation>>,
}

impl Kind for PodDevices {
    const DECLARED: Declared = kinds::DEVICE_ALLOCATIONS;
}

/// Devices of a resource that a container has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Allocation {
    /// NUMA nodes by ID of the device.
    pub ids: BTreeMap<String, Vec<i64>>,
    /// The plugin's answer; `None` while the request runs, also across a crash: then the same devices are requested
    /// again.
    pub granted: Option<Granted>,
    /// The container that was made with an earlier answer of the plugin: it is to be restarted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outdated: Option<ContainerId>,
}

/// A plugin that has registered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PluginRecord {
    /// Its socket.
    pub socket: String,
    /// Its options.
    pub options: PluginOptions,
    /// Its newest list.
    pub devices: Devices,
    /// Time at which its stream ended, or the agent started without it; `None` while it is registered.
    pub lost: Option<Stamp>,
    /// Devices of containers that came back into the list, or to health: the plugin is to be asked whether it gives
    /// something else with them now.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub returned: BTreeSet<String>,
}

impl Kind for PluginRecord {
    const DECLARED: Declared = kinds::DEVICE_PLUGINS;
}

impl PodDevices {
    /// The record of a pod; `None` when it has no devices.
    ///
    /// # Errors
    /// When it has a record that cannot be read.
    pub fn of(state: &State, pod: &Pod) -> Result<Option<Self>, Unreadable> {
        let key = allocations_key(pod);
        let record = state.stored(&key);
        record.map(|record| of_pod(&record)).transpose()
    }

    /// The devices of a resource that a container has.
    pub fn ids(&self, container: &str, resource: &str) -> impl Iterator<Item = &String> + Clone {
        let of_container = self.containers.get(container);
        let allocation = of_container.and_then(|resources| resources.get(resource));
        allocation.into_iter().flat_map(|a| a.ids.keys())
    }

    /// Devices of one resource that a container has.
    pub fn allocation(&self, container: &str, resource: &str) -> Option<&Allocation> {
        self.containers.get(container)?.get(resource)
    }

    /// Returns whether a plugin has granted a container its devices of a resource.
    pub fn is_granted(&self, container: &str, resource: &str) -> bool {
        let allocation = self.allocation(container, resource);
        allocation.is_some_and(|a| a.granted.is_some())
    }

    /// Returns the containers with a granted device of `returned`, by resource.
    pub fn with_returned<'a>(
        &'a self,
        resource: &'a str,
        returned: &'a BTreeSet<String>,
    ) -> impl Iterator<Item = (&'a String, &'a Allocation)> {
        let containers = self.containers.iter();
        let of = containers.filter_map(move |(name, of)| Some((name, of.get(resource)?)));
        of.filter(|(_, allocation)| {
            let mut ids = allocation.ids.keys();
            allocation.granted.is_some() && ids.any(|id| returned.contains(id))
        })
    }

    /// Returns the containers that run with an earlier answer of a plugin.
    pub fn outdated(&self) -> BTreeSet<&ContainerId> {
        let allocations = self.containers.values().flat_map(BTreeMap::values);
        allocations.filter_map(|a| a.outdated.as_ref()).collect()
    }

    /// Replaces what a container has of a resource.
    #[must_use]
    pub fn with(mut self, container: &str, resource: &str, allocation: Allocation) -> Self {
        let of_container = self.containers.entry(container.to_owned()).or_default();
        of_container.insert(resource.to_owned(), allocation);
        self
    }

    /// Returns whether any container has devices of one of the resources.
    pub fn has_any(&self, resources: &BTreeSet<String>) -> bool {
        let mut names = self.containers.values().flat_map(|of| of.keys());
        names.any(|name| resources.contains(name))
    }
}

impl PluginRecord {
    /// All of them, by resource. One that cannot be read is empty: the resource is a plugin's all the same, which registers
    /// again.
    pub fn all(state: &State) -> impl Iterator<Item = (&str, Self)> {
        let records = state.all_stored::<Self>();
        records.map(|record| (record.rest(), record.content().unwrap_or_default()))
    }
}

impl PodDevices {
    /// All of them with the UIDs of their pods, but those of pods whose worker has finished: theirs are free.
    ///
    /// # Errors
    /// In place of each record that cannot be read.
    pub fn all(state: &State) -> impl Iterator<Item = Result<(PodUid, Self), Unreadable>> {
        let records = state.all_stored::<Self>();
        records.filter_map(|record| {
            let (_, uid) = record.place();
            let worker = state.record::<WorkerRecord>(uid);
            let is_over = worker.is_some_and(|w| matches!(w.phase, WorkerPhase::Finished { .. }));
            if is_over {
                return None;
            }
            Some(of_pod(&record).map(|devices| (PodUid::new(uid), devices)))
        })
    }
}

/// Returns the devices of a resource that pods have.
///
/// # Errors
/// When the record of a pod cannot be read, which may have any of them.
pub fn taken(state: &State, resource: &str) -> Result<BTreeSet<String>, Unreadable> {
    let mut taken = BTreeSet::new();
    for pod in PodDevices::all(state) {
        let (_, pod) = pod?;
        for container in pod.containers.keys() {
            taken.extend(pod.ids(container, resource).cloned());
        }
    }
    Ok(taken)
}

fn of_pod(record: &Stored<'_, PodDevices>) -> Result<PodDevices, Unreadable> {
    let (_, pod) = record.place();
    record.read().map_err(|_| Unreadable {
        pod: PodUid::new(pod),
    })
}

//! Devices of device plugins: the node's devices, the choice for a container, the settings that a container gets with
//! them, and the records. Upstream: `devicemanager.ManagerImpl`, its decisions.
//!
//! In: lists of plugins, records, requests of pods. Out: amounts for the node's status, a choice, or the reason why there
//! is none. Pure; all choices are sorted, so that the same input gives the same devices.
//!
//! **Invariant:** a device that a record gives to a pod whose worker has not finished is given to no other pod.

mod choice;
mod grant;
mod inventory;
mod record;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

pub use choice::{Hint, Request, Shortage, TopologyHint, choose, hint_of, topology_hints};
pub use grant::{Granted, GrantedDevice, GrantedMount, merge};
pub use inventory::{Amount, Amounts, Health, Instance, Inventory, Unusable};
pub use record::{
    Allocation, PluginRecord, PodDevices, Unreadable, allocations_key, allocations_key_of,
    plugin_key, taken,
};

use super::resources::{NANOS, container_limits, is_by_claim};
use crate::types::ContainerKind;
use crate::types::containers::containers_of;

/// One device as its plugin lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// The plugin calls it `Healthy`.
    pub healthy: bool,
    /// NUMA nodes that it is near to; empty when the plugin names none.
    pub numa: Vec<i64>,
}

/// Devices by ID.
pub type Devices = BTreeMap<String, Device>;

/// Options of a plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PluginOptions {
    /// It wants `PreStartContainer` before each start.
    pub pre_start: bool,
    /// It has `GetPreferredAllocation`.
    pub preferred: bool,
}

/// Devices that a container of a pod asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Name of the container.
    pub container: String,
    /// Its kind.
    pub kind: ContainerKind,
    /// Number of devices by resource; never 0.
    pub counts: BTreeMap<String, usize>,
}

/// Returns whether a resource has the name of an extended one; upstream's `IsExtendedResourceName`.
pub fn is_extended(resource: &str) -> bool {
    let Some((domain, name)) = resource.split_once('/') else {
        return false;
    };
    let is_part = |text: &str, more: &[char]| {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let inner = |c: char| c.is_ascii_alphanumeric() || more.contains(&c);
        edge(text.chars().next()) && edge(text.chars().next_back()) && text.chars().all(inner)
    };
    let is_native = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    !is_native
        && !domain.starts_with("requests.")
        && domain.len() <= 253
        && name.len() <= 63
        && is_part(domain, &['-', '.'])
        && is_part(name, &['-', '.', '_'])
}

/// Returns whether a container of the pod may request devices: it limits an extended resource. Costs less than [`wanted`].
pub fn may_want(pod: &Pod) -> bool {
    containers_of(pod).any(|spec| {
        let resources = spec.container.resources.as_ref();
        let limits = resources.and_then(|r| r.limits.as_ref());
        limits.is_some_and(|limits| limits.keys().any(|name| is_extended(name)))
    })
}

/// Returns the containers that ask for devices of the resources that `is_known` names, init containers first. Ephemeral
/// containers get none. Devices of a ResourceClaim are not those of a plugin.
pub fn wanted(pod: &Pod, is_known: impl Fn(&str) -> bool) -> Vec<Wanted> {
    let specs = containers_of(pod).filter(|spec| spec.kind != ContainerKind::Ephemeral);
    let of_container = |spec: crate::types::ContainerSpec<'_>| {
        let limits = container_limits(&spec.container).into_iter();
        let known = limits.filter(|(name, _)| is_extended(name) && is_known(name));
        let known = known.filter(|(name, _)| !is_by_claim(pod, Some(&spec.container.name), name));
        let counts: BTreeMap<_, _> = known
            .map(|(name, amount)| (name, usize::try_from(amount / NANOS).unwrap_or(0)))
            .filter(|(_, count)| *count > 0)
            .collect();
        (!counts.is_empty()).then(|| Wanted {
            container: spec.container.name.clone(),
            kind: spec.kind,
            counts,
        })
    };
    specs.filter_map(of_container).collect()
}

/// Returns the number of devices that the containers of a pod need at a time: init containers run one after the other, beside
/// the sidecars before them. Upstream: `getPodDeviceRequest`.
pub fn wanted_by_pod(wanted: &[Wanted]) -> BTreeMap<String, usize> {
    let mut lasting: BTreeMap<String, usize> = BTreeMap::new();
    let mut most: BTreeMap<String, usize> = BTreeMap::new();
    for of in wanted {
        for (resource, count) in &of.counts {
            let running = lasting.entry(resource.clone()).or_default();
            let now = *running + count;
            if of.kind != ContainerKind::Init {
                *running = now;
            }
            let known = most.entry(resource.clone()).or_default();
            *known = now.max(*known);
        }
    }
    most
}

/// Returns the devices of a resource that a container may take over from init containers before it: plain ones give theirs
/// on, since they have ended by then; sidecars and main containers keep theirs. Upstream: `devicesToReuse`.
pub fn reusable(
    wanted: &[Wanted],
    held: &PodDevices,
    container: &str,
    resource: &str,
) -> BTreeSet<String> {
    let mut pool = BTreeSet::new();
    for before in wanted.iter().take_while(|w| w.container != container) {
        let ids = held.ids(&before.container, resource);
        match before.kind {
            ContainerKind::Init => pool.extend(ids.cloned()),
            _ => pool.retain(|id| !ids.clone().any(|kept| kept == id)),
        }
    }
    pool
}

#[cfg(test)]
mod tests;

//! Answers of plugins to `Allocate`: what they add to a container with its devices. Upstream: `deviceRunContainerOptions`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Allocation;

/// A plugin's additions to a container with devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Granted {
    /// Environment; variables of the pod win.
    pub envs: BTreeMap<String, String>,
    /// Mounts.
    pub mounts: Vec<GrantedMount>,
    /// Device nodes.
    pub devices: Vec<GrantedDevice>,
    /// Annotations of the container; those of the agent win.
    pub annotations: BTreeMap<String, String>,
    /// Qualified names of CDI devices.
    pub cdi: Vec<String>,
}

/// A mount that a plugin asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GrantedMount {
    /// Path in the container.
    pub container_path: String,
    /// Path on the node.
    pub host_path: String,
    /// The container cannot write to it.
    pub read_only: bool,
}

/// A device node that a plugin asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GrantedDevice {
    /// Path in the container.
    pub container_path: String,
    /// Path on the node.
    pub host_path: String,
    /// Some of `r`, `w`, `m`.
    pub permissions: String,
}

/// Merges what the plugins of a container's resources gave it. Of two that give the same variable, annotation or path in the
/// container, the resource with the smaller name wins.
pub fn merge(allocations: &BTreeMap<String, Allocation>) -> Granted {
    let mut all = Granted::default();
    for granted in allocations.values().filter_map(|a| a.granted.as_ref()) {
        for (name, value) in &granted.envs {
            let entry = all.envs.entry(name.clone());
            entry.or_insert_with(|| value.clone());
        }
        for (name, value) in &granted.annotations {
            let entry = all.annotations.entry(name.clone());
            entry.or_insert_with(|| value.clone());
        }
        for mount in &granted.mounts {
            let path = &mount.container_path;
            if !all.mounts.iter().any(|m| m.container_path == *path) {
                all.mounts.push(mount.clone());
            }
        }
        for device in &granted.devices {
            let path = &device.container_path;
            if !all.devices.iter().any(|d| d.container_path == *path) {
                all.devices.push(device.clone());
            }
        }
        for name in &granted.cdi {
            if !all.cdi.contains(name) {
                all.cdi.push(name.clone());
            }
        }
    }
    all
}

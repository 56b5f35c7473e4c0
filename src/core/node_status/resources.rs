//! Capacity and allocatable.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{Machine, NodeSettings};
use crate::core::devices::{Amount, Amounts, is_extended};
use crate::types::quantity::nanos;

const NANOS: i128 = 1_000_000_000;
const HUGEPAGES: &str = "hugepages-";

pub(super) type ResourceList = BTreeMap<String, Quantity>;

/// Returns whether two quantities are the same amount, however they are written.
pub(super) fn same(a: &Quantity, b: &Quantity) -> bool {
    a == b || matches!((nanos(&a.0), nanos(&b.0)), (Ok(a), Ok(b)) if a == b)
}

/// Returns how many pods a node with so many processors may run: `maxPods`, or fewer where `podsPerCore` is not 0.
pub fn pod_capacity(max_pods: u32, pods_per_core: u32, cpus: u64) -> u64 {
    match pods_per_core {
        0 => max_pods.into(),
        of_one => cpus.saturating_mul(of_one.into()).min(max_pods.into()),
    }
}

/// Returns the capacity of the machine; resources that others advertise are kept, huge pages of a size that is gone are
/// not.
pub(super) fn capacity(
    known: Option<&ResourceList>,
    settings: &NodeSettings,
    machine: &Machine,
) -> ResourceList {
    let mut capacity = known.cloned().unwrap_or_default();
    capacity.retain(|name, _| !name.starts_with(HUGEPAGES));
    let mut set = |name: String, quantity| drop(capacity.insert(name, quantity));
    set("cpu".to_owned(), Quantity(machine.cpus.to_string()));
    if let Some(bytes) = machine.memory {
        set("memory".to_owned(), binary(bytes.into()));
    }
    for (size, bytes) in &machine.hugepages {
        let size = binary(i128::from(*size)).0;
        set(format!("{HUGEPAGES}{size}"), binary(i128::from(*bytes)));
    }
    if let Some(bytes) = machine.ephemeral_storage.filter(|_| settings.local_storage) {
        set("ephemeral-storage".to_owned(), binary(bytes.into()));
    }
    let pods = pod_capacity(settings.max_pods, settings.pods_per_core, machine.cpus);
    set("pods".to_owned(), Quantity(pods.to_string()));
    if !settings.local_storage {
        capacity.remove("ephemeral-storage");
    }
    capacity
}

/// Returns the part that pods may use: the capacity without the reservations, never below zero. Memory in huge pages is
/// no memory.
pub(super) fn allocatable(
    capacity: &ResourceList,
    settings: &NodeSettings,
    machine: &Machine,
) -> ResourceList {
    let in_pages: u64 = machine.hugepages.values().sum();
    let left = |(name, quantity): (&String, &Quantity)| {
        let reserved = |from: &BTreeMap<String, i128>| from.get(name).copied().unwrap_or(0);
        let mut taken = reserved(&settings.system_reserved) + reserved(&settings.kube_reserved);
        match name.as_str() {
            "memory" => {
                let shown = nanos(&quantity.0).map_or(0, |all| all / NANOS);
                let eviction = settings
                    .eviction_memory
                    .of(u64::try_from(shown).unwrap_or(0));
                taken += i128::from(eviction.saturating_add(in_pages)) * NANOS;
            }
            "ephemeral-storage" => {
                let size = machine.ephemeral_storage.unwrap_or(0);
                taken += i128::from(settings.eviction_nodefs.of(size)) * NANOS;
            }
            _ => {}
        }
        let rest = match nanos(&quantity.0) {
            Ok(all) if taken != 0 => {
                let rest = (all - taken).max(0);
                if name == "cpu" {
                    cpu(rest)
                } else {
                    binary(rest / NANOS)
                }
            }
            _ => quantity.clone(),
        };
        (name.clone(), rest)
    };
    capacity.iter().map(left).collect()
}

/// Replaces the amounts of devices in capacity and allocatable.
pub(super) fn with_devices(
    mut capacity: ResourceList,
    mut allocatable: ResourceList,
    devices: &Amounts,
) -> (ResourceList, ResourceList) {
    for (resource, amount) in devices {
        capacity.insert(resource.clone(), Quantity(amount.capacity.to_string()));
        allocatable.insert(resource.clone(), Quantity(amount.allocatable.to_string()));
    }
    (capacity, allocatable)
}

/// Returns the node of another machine with 0 of each extended resource that no device plugin of this machine has. Upstream
/// does so when it finds no checkpoint of its devices: `reconcileExtendedResource`.
pub fn without_other_devices(mut node: Node, devices: &Amounts) -> Node {
    let status = node.status.get_or_insert_default();
    for list in [&mut status.capacity, &mut status.allocatable] {
        for (name, quantity) in list.iter_mut().flatten() {
            if is_extended(name) && !devices.contains_key(name) {
                "0".clone_into(&mut quantity.0);
            }
        }
    }
    node
}

/// Returns whether a node shows other amounts of devices than exist.
pub fn devices_differ(node: &Node, devices: &Amounts) -> bool {
    let status = node.status.as_ref();
    let shows = |list: Option<&ResourceList>, resource: &str, count: usize| {
        let shown = list.and_then(|list| list.get(resource));
        shown.is_some_and(|shown| same(shown, &Quantity(count.to_string())))
    };
    let is_shown = |(resource, amount): (&String, &Amount)| {
        let capacity = status.and_then(|s| s.capacity.as_ref());
        let allocatable = status.and_then(|s| s.allocatable.as_ref());
        shows(capacity, resource, amount.capacity)
            && shows(allocatable, resource, amount.allocatable)
    };
    !devices.iter().all(is_shown)
}

/// Cores, to the thousandth.
fn cpu(nanos: i128) -> Quantity {
    let milli = nanos / 1_000_000;
    Quantity(if milli % 1000 == 0 {
        (milli / 1000).to_string()
    } else {
        format!("{milli}m")
    })
}

/// Bytes with the largest suffix that leaves a whole number, as the API server writes them.
fn binary(mut bytes: i128) -> Quantity {
    const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut suffix = 0;
    while bytes != 0 && bytes % 1024 == 0 && suffix + 1 < SUFFIXES.len() {
        bytes /= 1024;
        suffix += 1;
    }
    Quantity(format!("{bytes}{}", SUFFIXES[suffix]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_written_as_the_api_server_writes_them() {
        for (milli, want) in [
            (0, "0"),
            (2000, "2"),
            (1500, "1500m"),
            (999, "999m"),
            (64_000, "64"),
        ] {
            assert_eq!(cpu(milli * 1_000_000).0, want);
        }
        for (bytes, want) in [
            (0, "0"),
            (1000, "1000"),
            (1024, "1Ki"),
            (1536, "1536"),
            (3 << 20, "3Mi"),
            (5 << 30, "5Gi"),
            (1 << 60, "1Ei"),
            (1 << 70, "1024Ei"),
        ] {
            assert_eq!(binary(bytes).0, want);
        }
    }
}

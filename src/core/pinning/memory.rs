//! The memory manager's static policy: on which NUMA nodes a container has its memory and huge pages. Pure.
//! Upstream: `pkg/kubelet/cm/memorymanager/policy_static.go`.
//!
//! A node that is used alone joins no group of nodes, and groups do not overlap.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::Refusal;
use super::hints::{Hint, NodeMask, masks};
use super::machine::Machine;
use crate::core::pod_status::{QosClass, qos_class};
use crate::core::resources::{Amounts, NANOS, aggregate, container_requests, has_pod_level};
use crate::core::state::{MemoryBlock, MemoryRecord};
use crate::types::quantity::nanos;

/// Bytes by `memory` and `hugepages-<size>`.
pub type Bytes = BTreeMap<String, u64>;

/// The static policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticMemory {
    /// `reservedMemory`: bytes that no container gets, by NUMA node.
    pub reserved: BTreeMap<u32, Bytes>,
}

/// Reusable memory of plain init containers: bytes by nodes and resource.
pub(super) type Reusable = BTreeMap<(NodeMask, String), u64>;

/// Memory that containers have, and what is left of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table {
    nodes: BTreeMap<u32, Node>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    allocatable: Bytes,
    free: Bytes,
    assignments: usize,
    group: NodeMask,
}

/// The name of huge pages of a size, as Kubernetes writes it.
pub(super) fn huge_page_resource(size: u64) -> String {
    let units = [(1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")];
    let unit = units
        .into_iter()
        .find(|(unit, _)| size.is_multiple_of(*unit));
    match unit {
        Some((unit, name)) => format!("hugepages-{}{name}", size / unit),
        None => format!("hugepages-{size}"),
    }
}

/// Returns the resource as the tables name it, or `None` when it is no memory.
pub fn memory_resource(name: &str) -> Option<String> {
    if name == "memory" {
        return Some(name.to_owned());
    }
    let size = nanos(name.strip_prefix("hugepages-")?).ok()? / NANOS;
    Some(huge_page_resource(u64::try_from(size).ok()?))
}

fn bytes_of(amounts: &Amounts) -> Bytes {
    let bytes = amounts.iter().filter_map(|(name, amount)| {
        let bytes = u64::try_from(amount / NANOS).ok()?;
        Some((memory_resource(name)?, bytes)).filter(|(_, bytes)| *bytes > 0)
    });
    bytes.collect()
}

fn is_pinned(pod: &Pod) -> bool {
    !has_pod_level(pod) && qos_class(pod) == QosClass::Guaranteed
}

/// Returns the memory that a container gets on nodes of its own; nothing unless its pod is Guaranteed by the resources of its
/// containers. Upstream: `getRequestedResources`.
pub fn pinned_memory(pod: &Pod, container: &Container) -> Bytes {
    if !is_pinned(pod) {
        return Bytes::new();
    }
    bytes_of(&container_requests(container))
}

/// Returns what a pod needs at a time. Upstream: `getPodRequestedResources`.
pub(super) fn pinned_memory_of_pod(pod: &Pod) -> Bytes {
    if !is_pinned(pod) {
        return Bytes::new();
    }
    bytes_of(&aggregate(pod, container_requests))
}

impl StaticMemory {
    /// Returns what containers can get, by node: what there is without what is reserved, and memory without huge pages.
    /// Upstream: `getDefaultMachineState`.
    pub fn allocatable(&self, machine: &Machine) -> BTreeMap<u32, Bytes> {
        let mut all = BTreeMap::new();
        for (number, node) in &machine.nodes {
            let reserved = |resource: &str| {
                let of = self.reserved.get(number);
                of.and_then(|of| of.get(resource)).copied().unwrap_or(0)
            };
            let mut bytes = Bytes::new();
            for (size, total) in &node.huge_pages {
                let name = huge_page_resource(*size);
                let left = total.saturating_sub(reserved(&name));
                bytes.insert(name, left);
            }
            let huge: u64 = node.huge_pages.values().sum();
            let left = node.memory.saturating_sub(reserved("memory"));
            bytes.insert("memory".to_owned(), left.saturating_sub(huge));
            all.insert(*number, bytes);
        }
        all
    }

    /// Returns the table of a machine on which containers have these blocks.
    pub(super) fn table<'a>(
        &self,
        machine: &Machine,
        records: impl IntoIterator<Item = &'a MemoryRecord>,
    ) -> Table {
        let node = |(number, allocatable): (u32, Bytes)| {
            let node = Node {
                free: allocatable.clone(),
                allocatable,
                assignments: 0,
                group: NodeMask::from_iter([number]),
            };
            (number, node)
        };
        let nodes = self.allocatable(machine).into_iter().map(node);
        let mut table = Table {
            nodes: nodes.collect(),
        };
        for record in records {
            for block in record.containers.values().flatten() {
                table.take(block, block.bytes);
            }
        }
        table
    }
}

impl Table {
    /// Takes `bytes` from the nodes of a block, the lowest first. Upstream: `updateMachineState`.
    fn take(&mut self, block: &MemoryBlock, mut bytes: u64) {
        let group: NodeMask = block.nodes.iter().copied().collect();
        for number in &block.nodes {
            let Some(node) = self.nodes.get_mut(number) else {
                continue;
            };
            node.assignments += 1;
            node.group = group;
            let free = node.free.entry(block.resource.clone()).or_default();
            let part = bytes.min(*free);
            *free -= part;
            bytes -= part;
        }
    }

    fn sum(&self, mask: NodeMask, of: impl Fn(&Node) -> u64) -> u64 {
        let nodes = self
            .nodes
            .iter()
            .filter(|(number, _)| mask.contains(**number));
        nodes.map(|(_, node)| of(node)).sum()
    }

    fn free(&self, mask: NodeMask, resource: &str) -> u64 {
        self.sum(mask, |node| node.free.get(resource).copied().unwrap_or(0))
    }

    fn allocatable(&self, mask: NodeMask, resource: &str) -> u64 {
        self.sum(mask, |node| {
            node.allocatable.get(resource).copied().unwrap_or(0)
        })
    }

    /// Returns whether the nodes may be used together beside existing assignments.
    fn may_group(&self, mask: NodeMask) -> bool {
        let mut used = (self.nodes.iter())
            .filter(|(number, node)| mask.contains(**number) && node.assignments > 0);
        used.all(|(_, node)| node.group == mask)
    }

    /// Returns the combinations of nodes that have enough of every requested kind. Upstream: `calculateHints`.
    pub(super) fn hints(&self, wanted: &Bytes, reusable: &Reusable) -> Vec<Hint> {
        let ids: Vec<u32> = self.nodes.keys().copied().collect();
        let mut least = ids.len();
        let mut found: Vec<NodeMask> = Vec::new();
        for mask in masks(&ids) {
            if (wanted.iter()).any(|(name, bytes)| self.allocatable(mask, name) < *bytes) {
                continue;
            }
            least = least.min(mask.count());
            let reused = |name: &String| reusable.get(&(mask, name.clone())).copied();
            let suffices = |(name, bytes): (&String, &u64)| {
                self.free(mask, name)
                    .saturating_add(reused(name).unwrap_or(0))
                    >= *bytes
            };
            if self.may_group(mask) && wanted.iter().all(suffices) {
                found.push(mask);
            }
        }
        let hint = |mask: NodeMask| Hint {
            nodes: Some(mask),
            preferred: mask.count() == least,
        };
        found.into_iter().map(hint).collect()
    }

    /// Chooses the nodes of one container and takes its memory. Upstream: `staticPolicy.Allocate`.
    ///
    /// # Errors
    /// When no nodes have enough, or only by breaking up what others have.
    pub(super) fn allocate(
        &mut self,
        wanted: &Bytes,
        reusable: &Reusable,
        affinity: Hint,
    ) -> Result<Vec<MemoryBlock>, Refusal> {
        let failed = |what: &str| Refusal::unexpected(&format!("[memorymanager] {what}"));
        let hints = || self.hints(wanted, reusable);
        let mut chosen = match affinity.nodes {
            Some(_) => affinity,
            None => {
                let found = best(hints()).ok_or_else(|| {
                    failed("failed to get the default NUMA affinity, no NUMA nodes with enough memory is available")
                })?;
                if !found.preferred && affinity.preferred {
                    return Err(failed("failed to find the default preferred hint"));
                }
                found
            }
        };
        let has_enough =
            |mask: NodeMask| (wanted.iter()).all(|(name, bytes)| self.free(mask, name) >= *bytes);
        let mask = chosen.nodes.unwrap_or_default();
        if !has_enough(mask) {
            let wider = hints().into_iter();
            let wider = wider.filter(|hint| hint.nodes.is_some_and(|nodes| nodes.includes(mask)));
            let found = best(wider.collect()).ok_or_else(|| {
                failed("failed to find NUMA nodes to extend the current topology hint")
            })?;
            if !found.preferred && chosen.preferred {
                return Err(failed("failed to find the extended preferred hint"));
            }
            chosen = found;
        }
        let mask = chosen.nodes.unwrap_or_default();
        if !self.may_group(mask) {
            return Err(failed("preferred hint violates NUMA node allocation"));
        }
        let mut blocks = Vec::new();
        for (resource, bytes) in wanted {
            let block = MemoryBlock {
                resource: resource.clone(),
                nodes: mask.nodes(),
                bytes: *bytes,
            };
            let reused = reusable.get(&(mask, resource.clone())).copied();
            self.take(&block, bytes.saturating_sub(reused.unwrap_or(0)));
            blocks.push(block);
        }
        Ok(blocks)
    }
}

/// The preferred hint with the fewest nodes. Upstream: `findBestHint`.
fn best(hints: Vec<Hint>) -> Option<Hint> {
    hints.into_iter().reduce(|best, hint| {
        let is_narrower = match (hint.nodes, best.nodes) {
            (Some(new), Some(old)) => new.is_narrower_than(old),
            _ => false,
        };
        if (hint.preferred && !best.preferred) || (hint.preferred == best.preferred && is_narrower)
        {
            hint
        } else {
            best
        }
    })
}

/// Takes what a container reuses off the blocks of init containers, so that the blocks of a pod come to what it has. Upstream:
/// `updateInitContainersMemoryBlocks` and `updatePodReusableMemory`.
pub(super) fn reuse(
    record: &mut MemoryRecord,
    init: &[String],
    blocks: &[MemoryBlock],
    reusable: &mut Reusable,
) {
    for block in blocks {
        let mask: NodeMask = block.nodes.iter().copied().collect();
        if let Some(left) = reusable.get_mut(&(mask, block.resource.clone())) {
            *left = left.saturating_sub(block.bytes);
        }
        let mut bytes = block.bytes;
        for name in init {
            let of = record.containers.get_mut(name).into_iter().flatten();
            for other in of.filter(|b| b.resource == block.resource && b.nodes == block.nodes) {
                let part = bytes.min(other.bytes);
                other.bytes -= part;
                bytes -= part;
            }
        }
    }
}

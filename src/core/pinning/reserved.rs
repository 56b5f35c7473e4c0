//! Fits `reservedMemory` to the NUMA nodes that a machine has. Pure.

use std::collections::BTreeMap;

use super::machine::{Machine, NumaNode};
use super::memory::{Bytes, huge_page_resource};

/// Memory that no container gets, by NUMA node, on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fitted {
    /// Bytes by node and resource.
    pub reserved: BTreeMap<u32, Bytes>,
    /// Differences from the configuration, for people.
    pub changes: Vec<String>,
}

/// Fits reservations to a machine that may have other NUMA nodes than when they were configured. Those of nodes that are gone
/// move to the others. `memory` is the sum that all nodes have to reserve, in bytes, where that depends on the machine's size.
/// Upstream refuses to start instead (`validateReservedMemory`).
pub fn fit(configured: &BTreeMap<u32, Bytes>, machine: &Machine, memory: Option<u64>) -> Fitted {
    let mut fitted = Fitted::default();
    let mut moved = Bytes::new();
    for (number, bytes) in configured {
        if machine.nodes.contains_key(number) {
            fitted.reserved.insert(*number, bytes.clone());
            continue;
        }
        for (name, amount) in bytes.iter().filter(|(_, amount)| **amount > 0) {
            *moved.entry(name.clone()).or_default() += amount;
            fitted.changes.push(format!(
                "the machine has no NUMA node {number}, whose {amount} bytes of {name} are reserved on its other nodes"
            ));
        }
    }
    for (name, amount) in moved {
        fitted.add(machine, &name, amount);
    }
    if let Some(wanted) = memory {
        let sum = fitted.sum("memory");
        if sum < wanted {
            fitted.add(machine, "memory", wanted - sum);
        } else {
            fitted.remove("memory", sum - wanted);
        }
        if sum != wanted {
            fitted.changes.push(format!(
                "evictionHard keeps a part of the machine's memory, so that {wanted} bytes are reserved on all NUMA nodes together \
                 instead of {sum}"
            ));
        }
    }
    fitted
}

/// Bytes of a resource that a node has.
fn has(node: &NumaNode, resource: &str) -> u64 {
    if resource == "memory" {
        return node.memory;
    }
    let mut pages = node.huge_pages.iter();
    let found = pages.find(|(size, _)| huge_page_resource(**size) == resource);
    found.map_or(0, |(_, bytes)| *bytes)
}

impl Fitted {
    fn sum(&self, resource: &str) -> u64 {
        let all = self.reserved.values();
        all.filter_map(|bytes| bytes.get(resource)).sum()
    }

    /// Reserves more: on the lowest nodes that have room, what is left on the lowest of all.
    fn add(&mut self, machine: &Machine, resource: &str, mut bytes: u64) {
        for (number, node) in &machine.nodes {
            let of = self.reserved.entry(*number).or_default();
            let reserved = of.get(resource).copied().unwrap_or(0);
            let part = bytes.min(has(node, resource).saturating_sub(reserved));
            if part > 0 {
                of.insert(resource.to_owned(), reserved + part);
                bytes -= part;
            }
        }
        if let Some(lowest) = machine.nodes.keys().next().filter(|_| bytes > 0) {
            let of = self.reserved.entry(*lowest).or_default();
            let all = of.entry(resource.to_owned()).or_default();
            *all = all.saturating_add(bytes);
        }
        self.reserved.retain(|_, bytes| !bytes.is_empty());
    }

    /// Reserves less: on the highest nodes.
    fn remove(&mut self, resource: &str, mut bytes: u64) {
        for of in self.reserved.values_mut().rev() {
            if let Some(reserved) = of.get_mut(resource) {
                let part = bytes.min(*reserved);
                *reserved -= part;
                bytes -= part;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::machine::testkit::machine;
    use super::*;

    #[test]
    fn reservations_fit_the_nodes_and_the_memory_of_the_machine() {
        const GI: u64 = 1 << 30;
        let memory = |amounts: &[(u32, u64)]| -> BTreeMap<u32, Bytes> {
            let of = amounts.iter().map(|(node, gib)| {
                let bytes = Bytes::from([("memory".to_owned(), gib * GI)]);
                (*node, bytes)
            });
            of.collect()
        };
        // Each node has 10 GiB. Reserved by node in GiB, the sum that is wanted, the result, how many changes.
        for (what, nodes, configured, wanted, fitted, changes) in [
            (
                "as configured",
                2,
                vec![(0, 1), (1, 2)],
                None,
                vec![(0, 1), (1, 2)],
                0,
            ),
            (
                "the same sum",
                2,
                vec![(0, 1), (1, 2)],
                Some(3),
                vec![(0, 1), (1, 2)],
                0,
            ),
            (
                "a node is gone",
                1,
                vec![(0, 1), (1, 2)],
                None,
                vec![(0, 3)],
                1,
            ),
            (
                "all are others",
                1,
                vec![(4, 1), (5, 2)],
                Some(3),
                vec![(0, 3)],
                2,
            ),
            (
                "more memory",
                2,
                vec![(1, 2)],
                Some(5),
                vec![(0, 3), (1, 2)],
                1,
            ),
            (
                "more than the first has",
                2,
                vec![(0, 8)],
                Some(12),
                vec![(0, 10), (1, 2)],
                1,
            ),
            (
                "less memory",
                2,
                vec![(0, 3), (1, 2)],
                Some(2),
                vec![(0, 2), (1, 0)],
                1,
            ),
            (
                "more than there is",
                1,
                vec![(0, 8), (1, 8)],
                None,
                vec![(0, 16)],
                1,
            ),
        ] {
            let machine = machine(1, nodes, 1, 1, 1);
            let got = fit(
                &memory(&configured),
                &machine,
                wanted.map(|gib: u64| gib * GI),
            );
            assert_eq!(got.reserved, memory(&fitted), "{what}");
            assert_eq!(got.changes.len(), changes, "{what}: {:?}", got.changes);
        }
        let none = fit(&memory(&[(0, 1)]), &Machine::default(), None);
        assert!(
            none.reserved.is_empty() && none.changes.len() == 1,
            "{none:?}"
        );
    }
}

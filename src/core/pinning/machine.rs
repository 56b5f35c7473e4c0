//! The topology of a machine as a value: sockets, NUMA nodes, L3 groups, cores, threads, memory.

use std::collections::{BTreeMap, BTreeSet};

use crate::types::cpu_set::CpuSet;

/// Place of a logical CPU in the topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Socket, numbered as the kernel does.
    pub socket: u32,
    /// NUMA node.
    pub node: u32,
    /// CPUs that share a last-level cache have one number; the lowest CPU of the group.
    pub cache: u32,
    /// CPUs of one core have one number, different from that of every other core; the lowest CPU of the core.
    pub core: u32,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes in huge pages, by page size in bytes.
    pub huge_pages: BTreeMap<u64, u64>,
    /// Distance to each node.
    pub distances: BTreeMap<u32, u64>,
}

/// CPUs and memory that the machine has online. Mirrors upstream's `CPUTopology` and `MachineInfo.Topology`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// CPUs by number.
    pub cpus: BTreeMap<u32, Cpu>,
    /// NUMA nodes by number.
    pub nodes: BTreeMap<u32, NumaNode>,
}

impl Machine {
    /// Returns the CPUs that are online.
    pub fn online(&self) -> CpuSet {
        self.cpus.keys().copied().collect()
    }

    /// Returns the numbers of the NUMA nodes with a CPU or memory, at least one.
    pub fn node_ids(&self) -> Vec<u32> {
        let mut ids: BTreeSet<u32> = self.nodes.keys().copied().collect();
        ids.extend(self.cpus.values().map(|cpu| cpu.node));
        if ids.is_empty() {
            ids.insert(0);
        }
        ids.into_iter().collect()
    }

    /// Returns the CPUs of `among` for which `of` is `number`.
    pub fn cpus_with(&self, among: &CpuSet, of: impl Fn(&Cpu) -> u32, number: u32) -> CpuSet {
        among
            .iter()
            .filter(|cpu| self.cpus.get(cpu).is_some_and(|c| of(c) == number))
            .collect()
    }

    /// Returns the numbers that the CPUs of `among` have for `of`, sorted.
    pub fn numbers(&self, among: &CpuSet, of: impl Fn(&Cpu) -> u32) -> Vec<u32> {
        let numbers: BTreeSet<u32> = among
            .iter()
            .filter_map(|cpu| self.cpus.get(&cpu).map(&of))
            .collect();
        numbers.into_iter().collect()
    }

    /// Returns how many threads a core has: CPUs by cores, at least 1. Upstream: `CPUsPerCore`.
    pub fn threads_per_core(&self) -> usize {
        let online = self.online();
        let cores = self.numbers(&online, |cpu| cpu.core).len();
        (online.len() / cores.max(1)).max(1)
    }

    /// Returns how many CPUs share a last-level cache; at least 1. Upstream: `CPUsPerUncore`.
    pub fn cpus_per_cache(&self) -> usize {
        let online = self.online();
        let caches = self.numbers(&online, |cpu| cpu.cache).len();
        (online.len() / caches.max(1)).max(1)
    }

    /// Returns how many sockets have CPUs.
    pub fn sockets(&self) -> usize {
        self.numbers(&self.online(), |cpu| cpu.socket).len()
    }
}

#[cfg(test)]
pub(crate) mod testkit {
    use super::*;

    /// A machine of equal sockets, nodes, cores and threads, numbered as Linux does on x86: the first threads of all cores,
    /// then the second ones. A last-level cache spans `cores_of_cache` cores. Each node has 10 GiB.
    pub(crate) fn machine(
        sockets: u32,
        nodes_of_socket: u32,
        cores_of_node: u32,
        threads: u32,
        cores_of_cache: u32,
    ) -> Machine {
        let cores = sockets * nodes_of_socket * cores_of_node;
        let mut machine = Machine::default();
        for thread in 0..threads {
            for core in 0..cores {
                let node = core / cores_of_node;
                let cpu = Cpu {
                    socket: node / nodes_of_socket,
                    node,
                    cache: core / cores_of_cache * cores_of_cache,
                    core,
                };
                machine.cpus.insert(thread * cores + core, cpu);
            }
        }
        let nodes = sockets * nodes_of_socket;
        for node in 0..nodes {
            let distance = |other: u32| match other {
                _ if other == node => 10,
                _ if other / nodes_of_socket == node / nodes_of_socket => 12,
                _ => 21,
            };
            let node_of = NumaNode {
                memory: 10 << 30,
                huge_pages: BTreeMap::new(),
                distances: (0..nodes).map(|other| (other, distance(other))).collect(),
            };
            machine.nodes.insert(node, node_of);
        }
        machine
    }
}

//! Reads the topology of the machine from `/sys/devices/system`: sockets, cores, threads, last-level caches, NUMA nodes with
//! their memory, huge pages and distances. Blocking, shortly.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::core::pinning::machine::{Cpu, Machine, NumaNode};
use crate::types::cpu_set::CpuSet;

/// Level of the cache that groups CPUs.
const LAST_LEVEL: u64 = 3;

/// A file of sysfs cannot be read or understood.
#[derive(Debug, thiserror::Error)]
#[error("read {}: {source}", path.display())]
pub struct TopologyError {
    /// The file that could not be read.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Reads the machine below `system`, which is `/sys/devices/system`. `memory` is what a machine without NUMA has, in bytes. Of
/// the CPUs those alone count that pods may use, which are all unless `for_pods` says so.
///
/// # Errors
/// When the CPUs that are online cannot be read. What else is missing is taken to be as on a small machine: one socket, one
/// node, cores of one thread, one cache.
pub fn machine(
    system: &Path,
    memory: u64,
    for_pods: Option<&CpuSet>,
) -> Result<Machine, TopologyError> {
    let online = system.join("cpu/online");
    let failed = |source| TopologyError {
        path: online.clone(),
        source,
    };
    let text = fs::read_to_string(&online).map_err(failed)?;
    let cpus: CpuSet = text
        .parse()
        .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    let usable = for_pods.map(|of_pods| cpus.common(of_pods));
    let cpus = usable.filter(|usable| !usable.is_empty()).unwrap_or(cpus);
    let nodes = nodes(&system.join("node"), memory);
    let node_of = |cpu: u32| {
        let mut found = nodes.iter().filter(|(_, (_, cpus))| cpus.contains(cpu));
        found.next().map_or(0, |(number, _)| *number)
    };
    let mut machine = Machine::default();
    for cpu in cpus.iter() {
        let dir = system.join(format!("cpu/cpu{cpu}"));
        let siblings = set(&dir.join("topology/core_cpus_list"))
            .or_else(|| set(&dir.join("topology/thread_siblings_list")));
        let lowest =
            |group: Option<CpuSet>| group.and_then(|group| group.common(&cpus).iter().next());
        let socket = number(&dir.join("topology/physical_package_id"));
        let of = Cpu {
            // The kernel has -1 where it does not know.
            socket: socket.and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            node: node_of(cpu),
            cache: lowest(last_level_cache(&dir.join("cache"))).unwrap_or(0),
            core: lowest(siblings).unwrap_or(cpu),
        };
        machine.cpus.insert(cpu, of);
    }
    machine.nodes = nodes
        .into_iter()
        .map(|(number, (node, _))| (number, node))
        .collect();
    Ok(machine)
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn number(path: &Path) -> Option<i64> {
    text(path)?.trim().parse().ok()
}

fn set(path: &Path) -> Option<CpuSet> {
    text(path)?.parse().ok()
}

/// The CPUs that share the last-level cache.
fn last_level_cache(caches: &Path) -> Option<CpuSet> {
    let entries = fs::read_dir(caches).ok()?.flatten();
    let mut indices = entries.map(|entry| entry.path());
    let last = indices.find(|index| {
        number(&index.join("level")).is_some_and(|level| u64::try_from(level) == Ok(LAST_LEVEL))
    });
    set(&last?.join("shared_cpu_list"))
}

/// Nodes by number, with their CPUs.
fn nodes(dir: &Path, memory: u64) -> BTreeMap<u32, (NumaNode, CpuSet)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("node")?.parse().ok()
        })
        .collect();
    numbers.sort_unstable();
    let node = |number: u32| {
        let dir = dir.join(format!("node{number}"));
        let cpus = set(&dir.join("cpulist")).unwrap_or_default();
        let distances = text(&dir.join("distance")).unwrap_or_default();
        let distances = distances.split_whitespace().map(str::parse);
        let node = NumaNode {
            memory: memory_of(&dir).unwrap_or(0),
            huge_pages: huge_pages(&dir.join("hugepages")),
            distances: numbers.iter().copied().zip(distances.flatten()).collect(),
        };
        (number, (node, cpus))
    };
    let found: BTreeMap<_, _> = numbers.iter().copied().map(node).collect();
    if found.is_empty() {
        let only = NumaNode {
            memory,
            huge_pages: huge_pages(Path::new("/sys/kernel/mm/hugepages")),
            distances: BTreeMap::from([(0, 10)]),
        };
        return BTreeMap::from([(0, (only, CpuSet::new()))]);
    }
    found
}

/// `MemTotal` of a node in bytes: `Node 0 MemTotal: 16384 kB`.
fn memory_of(dir: &Path) -> Option<u64> {
    let text = text(&dir.join("meminfo"))?;
    let line = text.lines().find(|line| line.contains("MemTotal:"))?;
    let kib = line.split_whitespace().rev().nth(1)?;
    kib.parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes in huge pages by page size.
fn huge_pages(dir: &Path) -> BTreeMap<u64, u64> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let pages = entries.filter_map(|entry| {
        let name = entry.file_name();
        let kib = name
            .to_str()?
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?;
        let size = kib.parse::<u64>().ok()?.checked_mul(1024)?;
        let count = number(&entry.path().join("nr_hugepages"))?;
        Some((size, u64::try_from(count).ok()?.checked_mul(size)?))
    });
    pages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_machine_is_read_as_the_kernel_shows_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(root, "cpu/online", "0-3,6-7\n");
        for cpu in [0, 1, 2, 3, 6, 7] {
            let (socket, core, cache) = match cpu {
                0 | 2 => (0, "0,2", "0-3"),
                1 | 3 => (0, "1,3", "0-3"),
                // Its sibling 4 is offline.
                6 => (1, "4,6", "4-7"),
                _ => (1, "5,7", "4-7"),
            };
            let of = |name: &str| format!("cpu/cpu{cpu}/{name}");
            write(
                root,
                &of("topology/physical_package_id"),
                &format!("{socket}\n"),
            );
            write(root, &of("topology/core_cpus_list"), core);
            write(root, &of("cache/index0/level"), "1\n");
            write(root, &of("cache/index0/shared_cpu_list"), core);
            write(root, &of("cache/index3/level"), "3\n");
            write(root, &of("cache/index3/shared_cpu_list"), cache);
        }
        for (node, cpus, distance) in [(0, "0-3\n", "10 21\n"), (1, "4-7\n", "21 10\n")] {
            write(root, &format!("node/node{node}/cpulist"), cpus);
            write(root, &format!("node/node{node}/distance"), distance);
            let total = format!("Node {node} MemTotal:       2048 kB\nNode {node} MemFree: 1 kB\n");
            write(root, &format!("node/node{node}/meminfo"), &total);
            let pages = format!("node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
            write(root, &pages, "3\n");
        }
        let machine = machine(root, 1, None).unwrap();
        assert_eq!(machine.online().to_string(), "0-3,6-7");
        let shown = |cpu: u32| {
            let of = machine.cpus[&cpu];
            (of.socket, of.node, of.cache, of.core)
        };
        assert_eq!(shown(2), (0, 0, 0, 0));
        assert_eq!(shown(3), (0, 0, 0, 1));
        assert_eq!(shown(6), (1, 1, 6, 6));
        let node = &machine.nodes[&1];
        assert_eq!((node.memory, node.distances[&0]), (2 << 20, 21));
        assert_eq!(node.huge_pages[&(2 << 20)], 6 << 20);
    }

    #[test]
    fn a_machine_without_numa_has_one_node_with_all_memory() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cpu/online", "0-1\n");
        let found = machine(dir.path(), 4096, None).unwrap();
        assert_eq!(found.node_ids(), [0]);
        assert_eq!(found.nodes[&0].memory, 4096);
        assert_eq!(found.threads_per_core(), 1);
        assert!(machine(&dir.path().join("none"), 1, None).is_err());
    }

    #[test]
    fn cpus_that_pods_may_not_use_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cpu/online", "0-3\n");
        let online = |for_pods: &str| {
            let for_pods: CpuSet = for_pods.parse().unwrap();
            let found = machine(dir.path(), 1, Some(&for_pods)).unwrap();
            found.online().to_string()
        };
        assert_eq!(online("1-2,9"), "1-2");
        assert_eq!(online("9"), "0-3", "rather than none");
    }
}

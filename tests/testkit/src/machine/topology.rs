//! Processors, memory and NUMA nodes of a machine, as arguments of QEMU.

use super::Spec;

/// Returns the arguments. Each NUMA node is a socket; what cannot be divided evenly goes to the last one.
pub(super) fn arguments(spec: &Spec) -> Vec<String> {
    let mut arguments = vec!["-m".to_owned(), spec.memory_mib.to_string()];
    let nodes = spec.numa_nodes.max(1);
    let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    if nodes == 1 {
        add("-smp", spec.cpus.to_string());
        return arguments;
    }
    add("-smp", format!("{},sockets={nodes}", spec.cpus));
    let (cpus, memory) = (spec.cpus / nodes, spec.memory_mib / nodes);
    for node in 0..nodes {
        let is_last = node + 1 == nodes;
        let first = node * cpus;
        let last = if is_last { spec.cpus } else { first + cpus } - 1;
        let size = if is_last {
            spec.memory_mib - node * memory
        } else {
            memory
        };
        add(
            "-object",
            format!("memory-backend-ram,id=ram{node},size={size}M"),
        );
        add(
            "-numa",
            format!("node,nodeid={node},cpus={first}-{last},memdev=ram{node}"),
        );
    }
    arguments
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::Disk;
    use super::*;

    #[test]
    fn a_numa_node_has_its_share_of_processors_and_memory() {
        let mut spec = Spec::new(Disk::raw(PathBuf::from("/disk")));
        assert_eq!(arguments(&spec), ["-m", "1024", "-smp", "2"]);
        (spec.cpus, spec.numa_nodes) = (8, 2);
        assert_eq!(
            arguments(&spec).join(" "),
            "-m 1024 -smp 8,sockets=2 \
             -object memory-backend-ram,id=ram0,size=512M -numa node,nodeid=0,cpus=0-3,memdev=ram0 \
             -object memory-backend-ram,id=ram1,size=512M -numa node,nodeid=1,cpus=4-7,memdev=ram1"
        );
    }
}

//! Makes the CPU, memory and topology managers of the settings and the machine, and mends what is on record.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tracing::{info, warn};

use super::AgentError;
use super::node::memory_capacity;
use super::start::Base;
use crate::cm::pinning::Pinning;
use crate::cm::{CgroupManager, sysfs};
use crate::core::pinning::cpus::{StaticCpus, reserved};
use crate::core::pinning::machine::Machine;
use crate::core::pinning::memory::{Bytes, StaticMemory, memory_resource};
use crate::core::pinning::{Settings, is_telling, mend};
use crate::core::state::{PodRecord, State};
use crate::kubeletconfig::{
    AgentConfig, CpuManagerPolicy, KubeletConfiguration, MemoryManagerPolicy, TopologyPolicy,
};
use crate::types::{Event, EventRecorder, EventType, blocking, causes};

const SYSTEM: &str = "/sys/devices/system";
const BILLION: i128 = 1_000_000_000;

/// Makes the managers. What is on record and does not fit the machine is mended, with an event for each pod.
///
/// # Errors
/// When a setting cannot be used on this machine, or the store refuses a commit.
pub(super) async fn managers(
    config: &AgentConfig,
    base: &Base,
    cgroups: &CgroupManager,
) -> Result<Pinning, AgentError> {
    let memory = memory_capacity();
    let state = base.store.snapshot();
    let machine = match &base.machine {
        Some(machine) => machine.clone(),
        None if needs_machine(&config.kubelet, &state) => read_machine(memory, cgroups).await,
        None => Machine::default(),
    };
    let settings = settings(&config.kubelet, machine, memory)?;
    let (transaction, mended) = mend(&state, &settings);
    if !transaction.is_empty() {
        base.store.commit_or_hold(transaction).await?;
    }
    for one in mended {
        info!(pod = %one.pod, what = one.message, "assignment of CPUs and memory changed");
        if let Some(record) = state.record::<PodRecord>(one.pod.as_str()) {
            let reason = "ResourceAssignmentChanged";
            let event = Event::pod(EventType::Warning, &record.pod, reason, one.message);
            base.recorder.record(event);
        }
    }
    Ok(Pinning::new(
        settings,
        base.store.clone(),
        base.metrics.clone(),
    ))
}

/// Returns whether anything is decided by the topology of the machine: by a policy, or by what an earlier one told containers,
/// which is taken back.
fn needs_machine(kubelet: &KubeletConfiguration, state: &State) -> bool {
    kubelet.cpu_manager_policy != CpuManagerPolicy::None
        || kubelet.memory_manager_policy != MemoryManagerPolicy::None
        || kubelet.topology_manager_policy != TopologyPolicy::None
        || is_telling(state, &Settings::default())
}

/// Reads the topology of the machine. One that cannot be read has no CPUs to give.
async fn read_machine(memory: u64, cgroups: &CgroupManager) -> Machine {
    let cgroups = cgroups.clone();
    let read = blocking::run(move || {
        let for_pods = cgroups.cpus_for_pods();
        sysfs::machine(Path::new(SYSTEM), memory, for_pods.as_ref())
    });
    let error = match read.await {
        Ok(Ok(machine)) => return machine,
        Ok(Err(error)) => causes(&error),
        Err(error) => causes(&error),
    };
    warn!(error, "cannot read the topology of the machine");
    Machine::default()
}

fn settings(
    kubelet: &KubeletConfiguration,
    machine: Machine,
    capacity: u64,
) -> Result<Settings, AgentError> {
    let topology = kubelet.topology_options();
    let nodes = machine.node_ids().len();
    if let Some(field) = combining_nodes(kubelet).filter(|_| nodes > topology.max_nodes) {
        return Err(AgentError::Setting {
            field,
            why: format!(
                "the machine has {nodes} NUMA nodes, more than max-allowable-numa-nodes, which is {}; raise that in \
                 topologyManagerPolicyOptions, or set the policy to none",
                topology.max_nodes
            ),
        });
    }
    let is_static = kubelet.cpu_manager_policy == CpuManagerPolicy::Static;
    if is_static && machine.cpus.is_empty() {
        return Err(AgentError::Setting {
            field: "cpuManagerPolicy",
            why: "static needs the topology of the machine, and /sys/devices/system/cpu cannot be read; set it to none"
                .to_owned(),
        });
    }
    let cpus = is_static.then(|| StaticCpus {
        options: kubelet.cpu_options(),
        reserved: reserved(
            &machine,
            &kubelet.reserved_system_cpus,
            kubelet.reserved_cpus(),
        ),
    });
    if let Some(cpus) = &cpus {
        let lost = kubelet.reserved_system_cpus.without(&machine.online());
        if !lost.is_empty() {
            warn!(%lost, reserved = %cpus.reserved, "reservedSystemCPUs names CPUs that are not online");
        }
        info!(reserved = %cpus.reserved, online = %machine.online(), "CPU manager gives CPUs to containers of Guaranteed pods");
    }
    let memory = (kubelet.memory_manager_policy == MemoryManagerPolicy::Static)
        .then(|| static_memory(kubelet, &machine, capacity))
        .transpose()?;
    Ok(Settings {
        machine,
        cpus,
        memory,
        topology: kubelet.topology_manager_policy,
        scope: kubelet.topology_manager_scope,
        closest: topology.closest,
    })
}

/// Returns the policy that goes through every combination of NUMA nodes, of which there are too many on a large machine.
fn combining_nodes(kubelet: &KubeletConfiguration) -> Option<&'static str> {
    if kubelet.topology_manager_policy != TopologyPolicy::None {
        return Some("topologyManagerPolicy");
    }
    (kubelet.memory_manager_policy == MemoryManagerPolicy::Static).then_some("memoryManagerPolicy")
}

/// Upstream: `getSystemReservedMemory` and `validateReservedMemory`.
fn static_memory(
    kubelet: &KubeletConfiguration,
    machine: &Machine,
    capacity: u64,
) -> Result<StaticMemory, AgentError> {
    let refuse = |why: String| AgentError::Setting {
        field: "reservedMemory",
        why,
    };
    let mut reserved: BTreeMap<u32, Bytes> = BTreeMap::new();
    let mut sums = Bytes::new();
    for entry in &kubelet.reserved_memory {
        if !machine.nodes.contains_key(&entry.node) {
            return Err(refuse(format!(
                "the machine has no NUMA node {}; it has {:?}",
                entry.node,
                machine.node_ids()
            )));
        }
        for (name, bytes) in &entry.limits {
            let name = memory_resource(name).unwrap_or_else(|| name.clone());
            *sums.entry(name.clone()).or_default() += bytes;
            reserved.entry(entry.node).or_default().insert(name, *bytes);
        }
    }
    let wanted = kept_from_pods(kubelet, capacity);
    let names: BTreeSet<&String> = sums.keys().chain(wanted.keys()).collect();
    for name in names {
        let of = |bytes: &Bytes| bytes.get(name).copied().unwrap_or(0);
        if of(&sums) != of(&wanted) {
            return Err(refuse(format!(
                "{} bytes of {name} are reserved on all NUMA nodes together, but systemReserved, kubeReserved and evictionHard \
                 come to {}; make them equal",
                of(&sums),
                of(&wanted)
            )));
        }
    }
    Ok(StaticMemory { reserved })
}

/// Memory and huge pages that are kept from pods: both reservations and the hard threshold of eviction.
fn kept_from_pods(kubelet: &KubeletConfiguration, capacity: u64) -> Bytes {
    let mut kept = Bytes::new();
    for (name, amount) in kubelet.system_reserved.iter().chain(&kubelet.kube_reserved) {
        if let (Some(name), Ok(bytes)) = (memory_resource(name), u64::try_from(amount / BILLION)) {
            *kept.entry(name).or_default() += bytes;
        }
    }
    if let Some(threshold) = kubelet.eviction_hard.get("memory.available") {
        *kept.entry("memory".to_owned()).or_default() += threshold.of(capacity);
    }
    kept.retain(|_, bytes| *bytes > 0);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::pinning::machine::testkit::machine;
    use crate::core::state::{CpusetRecord, Transaction};
    use crate::types::ContainerId;

    fn told(cpus: &str, nodes: &str) -> State {
        let record = CpusetRecord {
            container_id: ContainerId::new("c"),
            cpus: cpus.parse().unwrap(),
            nodes: nodes.parse().unwrap(),
        };
        let mut state = State::default();
        for mutation in &Transaction::new().put("u/a", record).mutations {
            state.apply(mutation, 1);
        }
        state
    }

    #[test]
    fn the_machine_is_read_only_where_something_follows_from_it() {
        let mut kubelet = KubeletConfiguration::default();
        assert!(!needs_machine(&kubelet, &State::default()));
        assert!(!needs_machine(&kubelet, &told("", "0")));
        assert!(needs_machine(&kubelet, &told("0-1", "")), "is widened");
        kubelet.topology_manager_policy = TopologyPolicy::BestEffort;
        assert!(needs_machine(&kubelet, &State::default()));
    }

    #[test]
    fn combinations_of_numa_nodes_are_bounded_whatever_policy_goes_through_them() {
        let large = machine(9, 1, 1, 1, 1);
        let mut kubelet = KubeletConfiguration::default();
        let refused = |kubelet: &KubeletConfiguration| match settings(kubelet, large.clone(), 0) {
            Err(AgentError::Setting { field, .. }) => Some(field),
            _ => None,
        };
        assert_eq!(refused(&kubelet), None);
        kubelet.memory_manager_policy = MemoryManagerPolicy::Static;
        assert_eq!(refused(&kubelet), Some("memoryManagerPolicy"));
        let options = [("max-allowable-numa-nodes".to_owned(), "9".to_owned())];
        kubelet.topology_manager_policy_options = options.into();
        assert_ne!(refused(&kubelet), Some("memoryManagerPolicy"));
        kubelet.topology_manager_policy = TopologyPolicy::Restricted;
        kubelet.topology_manager_policy_options.clear();
        assert_eq!(refused(&kubelet), Some("topologyManagerPolicy"));
    }
}

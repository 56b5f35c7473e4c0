//! Makes the CPU, memory and topology managers of the settings and the machine, and mends what is on record.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tracing::{info, warn};

use super::AgentError;
use super::node::memory_capacity;
use super::start::Base;
use crate::cm::pinning::Pinning;
use crate::cm::sysfs;
use crate::core::pinning::cpus::{StaticCpus, reserved};
use crate::core::pinning::machine::Machine;
use crate::core::pinning::memory::{Bytes, StaticMemory, memory_resource};
use crate::core::pinning::{Settings, mend};
use crate::core::state::PodRecord;
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
pub(super) async fn managers(config: &AgentConfig, base: &Base) -> Result<Pinning, AgentError> {
    let memory = memory_capacity();
    let machine = match &base.machine {
        Some(machine) => machine.clone(),
        None => read_machine(memory).await,
    };
    let settings = settings(&config.kubelet, machine, memory)?;
    let state = base.store.snapshot();
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

/// Reads the topology of the machine. One that cannot be read has no CPUs to give.
async fn read_machine(memory: u64) -> Machine {
    let read = blocking::run(move || sysfs::machine(Path::new(SYSTEM), memory)).await;
    let error = match read {
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
    let is_aligned = kubelet.topology_manager_policy != TopologyPolicy::None;
    let nodes = machine.node_ids().len();
    if is_aligned && nodes > topology.max_nodes {
        return Err(AgentError::Setting {
            field: "topologyManagerPolicy",
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

//! Makes the CPU, memory and topology managers of the settings and the machine, and corrects the records.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tracing::{info, warn};

use super::AgentError;
use super::base::Base;
use crate::cm::pinning::Pinning;
use crate::cm::{CgroupManager, sysfs};
use crate::core::pinning::cpus::{StaticCpus, reserved};
use crate::core::pinning::machine::Machine;
use crate::core::pinning::memory::{Bytes, StaticMemory, memory_resource};
use crate::core::pinning::reserved::{Fitted, fit};
use crate::core::pinning::{Settings, is_telling, mend};
use crate::core::state::{PodRecord, State};
use crate::kubeletconfig::{
    AgentConfig, CpuManagerPolicy, EvictionThreshold, KubeletConfiguration, MemoryManagerPolicy,
    TopologyPolicy,
};
use crate::types::{Event, EventRecorder, EventType, blocking, causes};

const SYSTEM: &str = "/sys/devices/system";
const BILLION: i128 = 1_000_000_000;
/// Reason of events about what does not fit the machine any more.
const CHANGED: &str = "ResourceAssignmentChanged";

/// Makes the managers. `memory` is what the machine has, in bytes, if that is known. What is recorded and does not fit
/// the machine is corrected, with an event for each pod.
///
/// # Errors
/// When a setting cannot be used on this machine, or the store refuses a commit.
pub(super) async fn managers(
    config: &AgentConfig,
    base: &Base,
    cgroups: &CgroupManager,
    memory: Option<u64>,
) -> Result<Pinning, AgentError> {
    let state = base.store.snapshot();
    let machine = match &base.machine {
        Some(machine) => machine.clone(),
        None if needs_machine(&config.kubelet, &state) => {
            read_machine(memory.unwrap_or(0), cgroups).await
        }
        None => Machine::default(),
    };
    let (settings, changes) = settings(&config.kubelet, machine, memory)?;
    if !changes.is_empty() {
        let text = format!(
            "reservedMemory does not fit the machine: {}; change the setting",
            changes.join("; ")
        );
        warn!(text, "reserved memory of NUMA nodes was changed");
        base.recorder
            .record(Event::node(EventType::Warning, CHANGED, text));
    }
    let (transaction, mended) = mend(&state, &settings);
    if !transaction.is_empty() {
        base.store.commit_or_hold(transaction).await?;
    }
    for one in mended {
        info!(pod = %one.pod, what = one.message, "assignment of CPUs and memory changed");
        if let Some(record) = state.record::<PodRecord>(one.pod.as_str()) {
            let event = Event::pod(EventType::Warning, &record.pod, CHANGED, one.message);
            base.recorder.record(event);
        }
    }
    let devices = base.devices.clone();
    Ok(Pinning::new(
        settings,
        base.store.clone(),
        base.metrics.clone(),
        Box::new(move |pod, container| vec![devices.hints(pod, container)]),
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

/// Returns the managers as they are set, and the changes to settings that do not fit the machine. `capacity` is its memory in
/// bytes, if that is known.
fn settings(
    kubelet: &KubeletConfiguration,
    machine: Machine,
    capacity: Option<u64>,
) -> Result<(Settings, Vec<String>), AgentError> {
    let topology = kubelet.topology_options();
    let nodes = machine.node_ids().len();
    if kubelet.topology_manager_policy != TopologyPolicy::None && nodes > topology.max_nodes {
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
    let fitted = (kubelet.memory_manager_policy == MemoryManagerPolicy::Static)
        .then(|| reserved_memory(kubelet, &machine, capacity))
        .transpose()?;
    let (memory, changes) = fitted
        .map(|Fitted { reserved, changes }| (StaticMemory { reserved }, changes))
        .unzip();
    let settings = Settings {
        machine,
        cpus,
        memory,
        topology: kubelet.topology_manager_policy,
        scope: kubelet.topology_manager_scope,
        closest: topology.closest,
    };
    Ok((settings, changes.unwrap_or_default()))
}

/// Returns the memory that is reserved on each NUMA node. A sum that the configuration alone makes wrong is refused; what the
/// machine has made wrong is corrected. Upstream: `getSystemReservedMemory` and `validateReservedMemory`.
fn reserved_memory(
    kubelet: &KubeletConfiguration,
    machine: &Machine,
    capacity: Option<u64>,
) -> Result<Fitted, AgentError> {
    if machine.nodes.is_empty() {
        return Err(AgentError::Setting {
            field: "memoryManagerPolicy",
            why: "Static needs the topology of the machine, and /sys/devices/system/cpu cannot be read; set it to None"
                .to_owned(),
        });
    }
    let mut configured: BTreeMap<u32, Bytes> = BTreeMap::new();
    let mut sums = Bytes::new();
    for entry in &kubelet.reserved_memory {
        for (name, bytes) in &entry.limits {
            let name = memory_resource(name).unwrap_or_else(|| name.clone());
            *sums.entry(name.clone()).or_default() += bytes;
            let of_node = configured.entry(entry.node).or_default();
            of_node.insert(name, *bytes);
        }
    }
    let (kept, follows_machine) = kept_from_pods(kubelet, capacity);
    let of = |bytes: &Bytes, name: &str| bytes.get(name).copied().unwrap_or(0);
    let names: BTreeSet<&String> = sums.keys().chain(kept.keys()).collect();
    for name in names {
        let is_fixed = name != "memory" || !follows_machine;
        if is_fixed && of(&sums, name) != of(&kept, name) {
            return Err(AgentError::Setting {
                field: "reservedMemory",
                why: format!(
                    "{} bytes of {name} are reserved on all NUMA nodes together, but systemReserved, kubeReserved and \
                     evictionHard come to {}; make them equal",
                    of(&sums, name),
                    of(&kept, name)
                ),
            });
        }
    }
    let memory = (follows_machine && capacity.is_some()).then(|| of(&kept, "memory"));
    Ok(fit(&configured, machine, memory))
}

/// Returns memory and huge pages that are kept from pods, by both reservations and the hard threshold of eviction, and whether
/// the machine's memory decides about it.
fn kept_from_pods(kubelet: &KubeletConfiguration, capacity: Option<u64>) -> (Bytes, bool) {
    let mut kept = Bytes::new();
    for (name, amount) in kubelet.system_reserved.iter().chain(&kubelet.kube_reserved) {
        if let (Some(name), Ok(bytes)) = (memory_resource(name), u64::try_from(amount / BILLION)) {
            *kept.entry(name).or_default() += bytes;
        }
    }
    let threshold = kubelet.eviction_hard.get("memory.available");
    if let Some(threshold) = threshold {
        *kept.entry("memory".to_owned()).or_default() += threshold.of(capacity.unwrap_or(0));
    }
    kept.retain(|_, bytes| *bytes > 0);
    (
        kept,
        matches!(threshold, Some(EvictionThreshold::Fraction(_))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::pinning::machine::testkit::machine;
    use crate::core::state::{CpusetRecord, Transaction};
    use crate::kubeletconfig::ReservedMemory;
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
    fn only_a_topology_policy_needs_a_machine_of_few_numa_nodes() {
        let large = machine(9, 1, 1, 1, 1);
        let mut kubelet = KubeletConfiguration::default();
        let refused =
            |kubelet: &KubeletConfiguration| match settings(kubelet, large.clone(), Some(0)) {
                Err(AgentError::Setting { field, .. }) => Some(field),
                _ => None,
            };
        assert_eq!(refused(&kubelet), None);
        kubelet.memory_manager_policy = MemoryManagerPolicy::Static;
        kubelet.eviction_hard.clear();
        assert_eq!(refused(&kubelet), None);
        kubelet.topology_manager_policy = TopologyPolicy::Restricted;
        assert_eq!(refused(&kubelet), Some("topologyManagerPolicy"));
        let options = [("max-allowable-numa-nodes".to_owned(), "9".to_owned())];
        kubelet.topology_manager_policy_options = options.into();
        assert_eq!(refused(&kubelet), None);
    }

    #[test]
    fn an_agent_whose_machine_has_other_memory_or_nodes_starts_with_reservations_that_fit() {
        let reserve = |node: u32, mib: u64| ReservedMemory {
            node,
            limits: [("memory".to_owned(), mib << 20)].into(),
        };
        let (mib, gib) = (1_u64 << 20, 1_u64 << 30);
        let mut kubelet = KubeletConfiguration {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![reserve(0, 512), reserve(1, 512)],
            ..KubeletConfiguration::default()
        };
        let fraction = EvictionThreshold::Fraction(0.25);
        kubelet.eviction_hard = [("memory.available".to_owned(), fraction)].into();
        let two = machine(1, 2, 1, 1, 1);
        let one = machine(1, 1, 1, 1, 1);
        for (what, machine, capacity, reserved, changes) in [
            (
                "as it was",
                &two,
                Some(4 * gib),
                vec![(0, 512), (1, 512)],
                0,
            ),
            (
                "more memory",
                &two,
                Some(8 * gib),
                vec![(0, 1536), (1, 512)],
                1,
            ),
            ("no node 1", &one, Some(4 * gib), vec![(0, 1024)], 1),
            ("unknown size", &two, None, vec![(0, 512), (1, 512)], 0),
        ] {
            let (settings, told) = settings(&kubelet, machine.clone(), capacity).unwrap();
            let wanted = reserved
                .into_iter()
                .map(|(node, amount)| (node, Bytes::from([("memory".to_owned(), amount * mib)])));
            assert_eq!(
                settings.memory.unwrap().reserved,
                wanted.collect(),
                "{what}"
            );
            assert_eq!(told.len(), changes, "{what}: {told:?}");
        }
        // What no machine would make right is still refused.
        kubelet.eviction_hard = [(
            "memory.available".to_owned(),
            EvictionThreshold::Quantity(1),
        )]
        .into();
        assert!(settings(&kubelet, two, Some(4 * gib)).is_err());
    }
}

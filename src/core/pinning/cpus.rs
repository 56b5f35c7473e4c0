//! The CPU manager's static policy: which containers get CPUs of their own, and which ones. Pure.
//! Upstream: `pkg/kubelet/cm/cpumanager/policy_static.go`.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::Refusal;
use super::assign::{self, Strategy};
use super::hints::{Hint, NodeMask, masks};
use super::machine::Machine;
use crate::core::pod_status::{QosClass, qos_class};
use crate::core::resources::{NANOS, container_requests, has_pod_level};
use crate::kubeletconfig::CpuOptions;
use crate::types::PodExt;
use crate::types::containers::is_sidecar;
use crate::types::cpu_set::CpuSet;

/// Reason of a pod whose CPUs do not come to whole cores.
const SMT_ALIGNMENT: &str = "SMTAlignmentError";

/// The static policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticCpus {
    /// `cpuManagerPolicyOptions`.
    pub options: CpuOptions,
    /// CPUs that no container gets for itself.
    pub reserved: CpuSet,
}

/// Returns how many CPUs a container gets for itself: its request, if that is a whole number and the pod is Guaranteed by the
/// resources of its containers; else 0. Upstream: `guaranteedCPUs`.
pub fn exclusive_cpus(pod: &Pod, container: &Container) -> usize {
    if has_pod_level(pod) || qos_class(pod) != QosClass::Guaranteed {
        return 0;
    }
    let requests = container_requests(container);
    let cpu = requests.get("cpu").copied().unwrap_or(0);
    if cpu % NANOS != 0 {
        return 0;
    }
    usize::try_from(cpu / NANOS).unwrap_or(0)
}

/// Returns whether a container of the pod gets exclusive CPUs under the static policy. Upstream: `PodHasExclusiveCPUs`.
pub fn has_exclusive_cpus(pod: &Pod) -> bool {
    let mut all = pod.init_containers().iter().chain(pod.containers());
    all.any(|container| exclusive_cpus(pod, container) > 0)
}

/// Returns how many CPUs a pod needs for itself at a time. Upstream: `podGuaranteedCPUs`.
pub(super) fn exclusive_cpus_of_pod(pod: &Pod) -> usize {
    let (mut sidecars, mut at_start) = (0, 0);
    for container in pod.init_containers() {
        let cpus = exclusive_cpus(pod, container);
        if is_sidecar(container) {
            sidecars += cpus;
        } else {
            at_start = at_start.max(sidecars + cpus);
        }
    }
    let main = pod.containers().iter().map(|c| exclusive_cpus(pod, c));
    at_start.max(sidecars + main.sum::<usize>())
}

/// Chooses the CPUs that no container gets for itself: those of `wanted` that are online, or `count` of the lowest. At least
/// one of an online machine. Upstream: `NewStaticPolicy`.
pub fn reserved(machine: &Machine, wanted: &CpuSet, count: usize) -> CpuSet {
    let online = machine.online();
    let named = online.common(wanted);
    if !named.is_empty() {
        return named;
    }
    let count = count.clamp(1, online.len().max(1));
    let packed = Strategy::default();
    assign::take(machine, &online, count, packed).unwrap_or(online)
}

impl StaticCpus {
    /// Returns the CPUs of containers without CPUs of their own, where `exclusive` are those of the others. Never empty on a
    /// machine with a reserved CPU.
    pub fn shared(&self, machine: &Machine, exclusive: &CpuSet) -> CpuSet {
        let left = machine.online().without(exclusive);
        if !self.options.strict_reservation {
            return left;
        }
        let unreserved = left.without(&self.reserved);
        if unreserved.is_empty() {
            left
        } else {
            unreserved
        }
    }

    /// Returns the CPUs that can be given to a container, where `exclusive` are given already.
    pub(super) fn free(&self, machine: &Machine, exclusive: &CpuSet) -> CpuSet {
        machine.online().without(exclusive).without(&self.reserved)
    }

    fn strategy(&self, machine: &Machine) -> Strategy {
        let options = self.options;
        let unit = if options.full_cores {
            machine.threads_per_core()
        } else {
            1
        };
        Strategy {
            across_nodes_by: options.across_nodes.then_some(unit),
            across_cores: options.across_cores,
            align_by_cache: options.align_by_cache,
        }
    }

    /// Chooses CPUs for one container, those of `nodes` first. `reusable` are those of init containers that have ended by
    /// then. Upstream: `staticPolicy.Allocate`.
    ///
    /// # Errors
    /// `SMTAlignmentError`, or an unexpected error when there are too few.
    pub(super) fn allocate(
        &self,
        machine: &Machine,
        (free, reusable): (&CpuSet, &CpuSet),
        count: usize,
        nodes: Option<NodeMask>,
    ) -> Result<CpuSet, Refusal> {
        let mut available = free.union(reusable);
        if self.options.full_cores {
            let threads = machine.threads_per_core();
            if !count.is_multiple_of(threads) {
                return Err(smt(format!(
                    "requested {count} cpus not multiple cpus per core = {threads}"
                )));
            }
            available = whole_cores(machine, &available);
            if count > available.len() {
                return Err(smt(format!(
                    "not enough free physical CPUs: available physical CPUs = {}, requested CPUs = {count}, CPUs per core = {threads}",
                    available.len()
                )));
            }
        }
        let strategy = self.strategy(machine);
        let lacking = || Refusal::unexpected("not enough cpus available to satisfy request");
        let mut taken = CpuSet::new();
        if let Some(nodes) = nodes {
            let aligned = self.aligned(machine, &available, nodes);
            let number = count.min(aligned.len());
            taken = assign::take(machine, &aligned, number, strategy).ok_or_else(lacking)?;
        }
        let (rest, number) = (available.without(&taken), count - taken.len());
        let more = assign::take(machine, &rest, number, strategy).ok_or_else(lacking)?;
        Ok(taken.union(&more))
    }

    /// The CPUs of these nodes, or of their sockets. Upstream: `getAlignedCPUs`.
    fn aligned(&self, machine: &Machine, available: &CpuSet, nodes: NodeMask) -> CpuSet {
        let of = |wanted: &dyn Fn(u32) -> bool| -> CpuSet {
            let cpus = available.iter();
            cpus.filter(|cpu| wanted(*cpu)).collect()
        };
        let node = |cpu: u32| machine.cpus.get(&cpu).map(|c| c.node);
        if !self.options.align_by_socket {
            return of(&|cpu| node(cpu).is_some_and(|node| nodes.contains(node)));
        }
        let sockets = sockets_of(machine, nodes);
        let socket = |cpu: u32| machine.cpus.get(&cpu).map(|c| c.socket);
        of(&|cpu| socket(cpu).is_some_and(|socket| sockets.contains(&socket)))
    }

    /// Returns the combinations of nodes that have enough CPUs. Upstream: `generateCPUTopologyHints`.
    pub(super) fn hints(
        &self,
        machine: &Machine,
        (free, reusable): (&CpuSet, &CpuSet),
        count: usize,
    ) -> Vec<Hint> {
        let ids = machine.numbers(&machine.online(), |cpu| cpu.node);
        let in_mask = |cpus: &CpuSet, mask: NodeMask| {
            let nodes = cpus.iter().filter_map(|cpu| machine.cpus.get(&cpu));
            nodes.filter(|cpu| mask.contains(cpu.node)).count()
        };
        let online = machine.online();
        let mut least = ids.len();
        let mut found: Vec<NodeMask> = Vec::new();
        for mask in masks(&ids) {
            if in_mask(&online, mask) >= count {
                least = least.min(mask.count());
            }
            let reused = in_mask(reusable, mask);
            let others = free.without(reusable);
            // What can be reused is, so the nodes have to have all of it.
            if reused == reusable.len() && reused + in_mask(&others, mask) >= count {
                found.push(mask);
            }
        }
        let is_preferred = |mask: NodeMask| {
            if self.options.align_by_socket {
                let per_socket = ids.len() / machine.sockets().max(1);
                per_socket > 0 && sockets_of(machine, mask).len() == least.div_ceil(per_socket)
            } else {
                mask.count() == least
            }
        };
        let hint = |mask: NodeMask| Hint {
            nodes: Some(mask),
            preferred: is_preferred(mask),
        };
        found.into_iter().map(hint).collect()
    }
}

fn smt(why: String) -> Refusal {
    Refusal {
        reason: SMT_ALIGNMENT,
        message: format!("SMT Alignment Error: {why}"),
    }
}

/// The CPUs of cores all of whose threads are in `cpus`.
fn whole_cores(machine: &Machine, cpus: &CpuSet) -> CpuSet {
    let online = machine.online();
    let mut whole = CpuSet::new();
    for core in machine.numbers(cpus, |cpu| cpu.core) {
        let all = machine.cpus_with(&online, |cpu| cpu.core, core);
        if all.without(cpus).is_empty() {
            whole = whole.union(&all);
        }
    }
    whole
}

fn sockets_of(machine: &Machine, nodes: NodeMask) -> Vec<u32> {
    let cpus = machine
        .cpus
        .iter()
        .filter(|(_, cpu)| nodes.contains(cpu.node));
    let cpus: CpuSet = cpus.map(|(number, _)| *number).collect();
    machine.numbers(&cpus, |cpu| cpu.socket)
}

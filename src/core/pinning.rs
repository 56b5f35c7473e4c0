//! Assignment of exclusive CPUs and NUMA memory to containers. Upstream: the CPU, memory and topology managers.
//!
//! In: the machine as a value, the settings, what is assigned already, a pod. Out: the assignments of its containers or why
//! the pod is refused; the CPUs of each container; what has to change where assignments no longer fit the machine.
//! Pure: the same for the same input.
//!
//! Assignments alone are stored (`cpus`, `memory`). The CPUs that all others share are derived from them.
//!
//! **Invariant:** no CPU is assigned to containers of two pods, and none to two containers of a pod, that run at a time.
//!
//! **Invariant:** what a container has is taken from it only where the machine does not have it any more.

mod assign;
pub mod cpus;
pub mod hints;
pub mod machine;
pub mod memory;
mod mend;
pub mod reserved;
mod told;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

pub use mend::{Mended, mend};
pub use told::{Confirmed, Update, allowed, is_telling, updates};

use self::cpus::{StaticCpus, exclusive_cpus, exclusive_cpus_of_pod};
use self::hints::{Hint, Hints, Merging, NodeMask, merge};
use self::machine::Machine;
use self::memory::{Bytes, Reusable, StaticMemory, Table, pinned_memory, pinned_memory_of_pod};
use crate::core::state::{CpusRecord, MemoryRecord, PodRecord, State};
use crate::kubeletconfig::{TopologyPolicy, TopologyScope};
use crate::types::containers::is_sidecar;
use crate::types::cpu_set::CpuSet;
use crate::types::{PodExt, PodUid};

/// Reason of a pod whose resources cannot be aligned.
/// The reason of a pod whose resources cannot be aligned.
pub const TOPOLOGY_AFFINITY: &str = "TopologyAffinityError";
/// The reason of a pod that a manager cannot serve for another cause than a lack.
pub const UNEXPECTED: &str = "UnexpectedAdmissionError";

/// Reason why a pod is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// CamelCase reason.
    pub reason: &'static str,
    /// For a human.
    pub message: String,
}

impl Refusal {
    /// Upstream: `unexpectedAdmissionError`.
    fn unexpected(why: &str) -> Self {
        Self {
            reason: UNEXPECTED,
            message: format!("Allocate failed due to {why}, which is unexpected"),
        }
    }
}

/// The managers as they are set, on the machine as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The machine.
    pub machine: Machine,
    /// CPU manager; `None` for the policy `none`.
    pub cpus: Option<StaticCpus>,
    /// Memory manager; `None` for the policy `None`.
    pub memory: Option<StaticMemory>,
    /// `topologyManagerPolicy`.
    pub topology: TopologyPolicy,
    /// `topologyManagerScope`.
    pub scope: TopologyScope,
    /// `prefer-closest-numa-nodes`.
    pub closest: bool,
}

impl Settings {
    /// Returns whether no manager assigns anything.
    pub fn is_idle(&self) -> bool {
        self.cpus.is_none() && self.memory.is_none()
    }
}

/// Assignments of containers, by pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assigned {
    /// CPUs.
    pub cpus: BTreeMap<PodUid, CpusRecord>,
    /// Memory.
    pub memory: BTreeMap<PodUid, MemoryRecord>,
}

impl Assigned {
    /// Returns the stored assignments.
    pub fn of(state: &State) -> Self {
        let cpus = state.cpus.iter();
        let memory = state.memory.iter();
        Self {
            cpus: cpus
                .map(|(uid, v)| (PodUid::new(&**uid), v.record.clone()))
                .collect(),
            memory: memory
                .map(|(uid, v)| (PodUid::new(&**uid), v.record.clone()))
                .collect(),
        }
    }

    /// Adds what a pod got.
    pub fn add(&mut self, uid: &PodUid, placement: &Placement) {
        if !placement.cpus.containers.is_empty() {
            self.cpus.insert(uid.clone(), placement.cpus.clone());
        }
        if !placement.memory.containers.is_empty() {
            self.memory.insert(uid.clone(), placement.memory.clone());
        }
    }

    /// Leaves out what static pods of this pod's name have: they take turns, and this one starts when they have ended.
    pub fn leave_out_predecessors(&mut self, state: &State, pod: &Pod) {
        if !pod.is_static() {
            return;
        }
        let turn = turn_of(state, &pod.uid(), Some(pod));
        let is_other = |uid: &PodUid| turn_of(state, uid, None) != turn;
        self.cpus.retain(|uid, _| is_other(uid));
        self.memory.retain(|uid, _| is_other(uid));
    }

    /// Returns every CPU that a container has for itself.
    pub fn exclusive(&self) -> CpuSet {
        let records = self.cpus.values();
        union_of(records.flat_map(|record| record.containers.values()))
    }
}

fn union_of<'a>(sets: impl Iterator<Item = &'a CpuSet>) -> CpuSet {
    sets.flat_map(CpuSet::iter).collect()
}

/// Returns the identity of pods that do not run at the same time as this one: of a static pod its full name, else its
/// UID. `pod` is one that may not be recorded.
fn turn_of(state: &State, uid: &PodUid, pod: Option<&Pod>) -> String {
    if let Some(pod) = pod.filter(|pod| pod.is_static()) {
        return pod.full_name().as_str().to_owned();
    }
    let record = state.record::<PodRecord>(uid.as_str());
    match record.filter(|record| record.source.is_static()) {
        Some(record) => record.pod.full_name().as_str().to_owned(),
        None => uid.to_string(),
    }
}

/// Assignments of the containers of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// CPUs, of those that have some for themselves.
    pub cpus: CpusRecord,
    /// Memory.
    pub memory: MemoryRecord,
    /// The NUMA nodes that the topology manager chose, by container; for other providers.
    pub nodes: BTreeMap<String, Option<NodeMask>>,
}

impl Placement {
    /// Returns whether no container got anything.
    pub fn is_empty(&self) -> bool {
        self.cpus.containers.is_empty() && self.memory.containers.is_empty()
    }
}

/// Hints of other providers, like device plugins: for one container, or for the pod as a whole.
pub type MoreHints<'a> = &'a dyn Fn(Option<&Container>) -> Vec<Hints>;

/// Assigns CPUs and memory to the containers of a pod, aligned as the topology manager's policy says. `taken` is what others
/// have. Upstream: the topology manager's `Admit`.
///
/// # Errors
/// The reason why the pod is rejected.
pub fn place(
    pod: &Pod,
    settings: &Settings,
    taken: &Assigned,
    more: MoreHints<'_>,
) -> Result<Placement, Refusal> {
    place_rest(pod, settings, taken, &Placement::default(), more)
}

/// Returns the NUMA nodes by container that the topology manager chooses for devices of a pod whose CPUs and memory are
/// assigned already (`own`, not in `taken`): with the same policy, and on the nodes of what each container has. `None` stands
/// for any node.
///
/// # Errors
/// When the policy refuses what is left of the devices.
pub fn nodes_of(
    pod: &Pod,
    settings: &Settings,
    taken: &Assigned,
    own: &Placement,
    more: MoreHints<'_>,
) -> Result<BTreeMap<String, Option<NodeMask>>, Refusal> {
    let with_own = |container: Option<&Container>| {
        let mut all = more(container);
        all.push(hints_of_assigned(settings, own, container));
        all
    };
    let placed = place_rest(pod, settings, taken, own, &with_own)?;
    Ok(placed.nodes)
}

/// Returns the nodes of the CPUs and the memory that a container has, as the only way; with `None` those of all containers.
fn hints_of_assigned(settings: &Settings, own: &Placement, container: Option<&Container>) -> Hints {
    let is_meant = |name: &String| container.is_none_or(|c| c.name == *name);
    let cpus = own.cpus.containers.iter();
    let cpus = union_of(
        cpus.filter(|(name, _)| is_meant(name))
            .map(|(_, cpus)| cpus),
    );
    let blocks = own.memory.containers.iter();
    let blocks = blocks
        .filter(|(name, _)| is_meant(name))
        .flat_map(|(_, blocks)| blocks);
    let nodes = settings.machine.numbers(&cpus, |cpu| cpu.node).into_iter();
    let nodes: NodeMask = nodes
        .chain(blocks.flat_map(|block| block.nodes.iter().copied()))
        .collect();
    if nodes.count() == 0 {
        return Hints::new();
    }
    let only = Hint {
        nodes: Some(nodes),
        preferred: true,
    };
    Hints::from([("assigned".to_owned(), Some(vec![only]))])
}

/// Assigns CPUs and memory to those containers of a pod that have none. The others keep what they have by `own`, which is not
/// in `taken`.
///
/// # Errors
/// As [`place`].
fn place_rest(
    pod: &Pod,
    settings: &Settings,
    taken: &Assigned,
    own: &Placement,
    more: MoreHints<'_>,
) -> Result<Placement, Refusal> {
    let mut placing = Placing::new(pod, settings, taken, own);
    let containers = || pod.init_containers().iter().chain(pod.containers());
    let for_pod = match (settings.topology, settings.scope) {
        (TopologyPolicy::None, _) => Some(placing.merged(&[])?),
        (_, TopologyScope::Pod) => {
            let mut hints = placing.hints_of_pod();
            hints.extend(more(None));
            Some(placing.merged(&hints)?)
        }
        (_, TopologyScope::Container) => None,
    };
    for container in containers() {
        let hint = match for_pod {
            Some(hint) => hint,
            None => {
                let mut hints = placing.hints_of(container);
                hints.extend(more(Some(container)));
                placing.merged(&hints)?
            }
        };
        placing.allocate(container, hint)?;
    }
    Ok(placing.placement)
}

struct Placing<'a> {
    pod: &'a Pod,
    settings: &'a Settings,
    /// Assignments that containers have already.
    own: &'a Placement,
    free: CpuSet,
    reusable: CpuSet,
    table: Table,
    reusable_memory: Reusable,
    placement: Placement,
}

impl<'a> Placing<'a> {
    fn new(pod: &'a Pod, settings: &'a Settings, taken: &Assigned, own: &'a Placement) -> Self {
        let machine = &settings.machine;
        let cpus = settings.cpus.as_ref();
        let memory = settings.memory.as_ref();
        let exclusive = taken
            .exclusive()
            .union(&union_of(own.cpus.containers.values()));
        let records = taken.memory.values().chain([&own.memory]);
        Self {
            pod,
            settings,
            own,
            free: cpus
                .map(|cpus| cpus.free(machine, &exclusive))
                .unwrap_or_default(),
            reusable: CpuSet::new(),
            table: memory
                .map(|memory| memory.table(machine, records))
                .unwrap_or_default(),
            reusable_memory: Reusable::new(),
            placement: Placement::default(),
        }
    }

    fn merged(&self, hints: &[Hints]) -> Result<Hint, Refusal> {
        let merging = Merging {
            policy: self.settings.topology,
            closest: self.settings.closest,
            machine: &self.settings.machine,
        };
        let (hint, is_admitted) = merge(hints, merging);
        if !is_admitted {
            return Err(Refusal {
                reason: TOPOLOGY_AFFINITY,
                message: "Resources cannot be allocated with Topology locality".to_owned(),
            });
        }
        Ok(hint)
    }

    fn hints(&self, (cpus, reusable): (usize, &CpuSet), memory: &Bytes) -> Vec<Hints> {
        let mut all = Vec::new();
        if let Some(policy) = &self.settings.cpus {
            let mut hints = Hints::new();
            if cpus > 0 {
                let available = (&self.free, reusable);
                let found = policy.hints(&self.settings.machine, available, cpus);
                hints.insert("cpu".to_owned(), Some(found));
            }
            all.push(hints);
        }
        if self.settings.memory.is_some() {
            let mut hints = Hints::new();
            if !memory.is_empty() {
                let found = self.table.hints(memory, &self.reusable_memory);
                if !found.is_empty() {
                    // All types of memory are on the same nodes.
                    let of = memory
                        .keys()
                        .map(|name| (name.clone(), Some(found.clone())));
                    hints.extend(of);
                }
            }
            all.push(hints);
        }
        all
    }

    fn hints_of(&self, container: &Container) -> Vec<Hints> {
        let memory = match self.own.memory.containers.get(&container.name) {
            Some(_) => Bytes::new(),
            None => pinned_memory(self.pod, container),
        };
        let cpus = match self.own.cpus.containers.get(&container.name) {
            Some(_) => 0,
            None => exclusive_cpus(self.pod, container),
        };
        self.hints((cpus, &self.reusable), &memory)
    }

    fn hints_of_pod(&self) -> Vec<Hints> {
        let memory = match self.own.memory.containers.is_empty() {
            true => pinned_memory_of_pod(self.pod),
            // Where some of it is already decides nothing for the rest.
            false => Bytes::new(),
        };
        // The pod's CPUs are those that it has and more.
        let had = union_of(self.own.cpus.containers.values());
        self.hints((exclusive_cpus_of_pod(self.pod), &had), &memory)
    }

    fn is_plain_init(&self, container: &Container) -> bool {
        self.has_ended_by_then(&container.name)
    }

    /// Returns whether the container of this name is an init container that has ended when main containers run.
    fn has_ended_by_then(&self, name: &str) -> bool {
        let mut init = self.pod.init_containers().iter();
        init.any(|c| c.name == name && !is_sidecar(c))
    }

    fn allocate(&mut self, container: &Container, hint: Hint) -> Result<(), Refusal> {
        let nodes = &mut self.placement.nodes;
        nodes.insert(container.name.clone(), hint.nodes);
        self.allocate_cpus(container, hint)?;
        self.allocate_memory(container, hint)
    }

    fn allocate_cpus(&mut self, container: &Container, hint: Hint) -> Result<(), Refusal> {
        let name = &container.name;
        let count = exclusive_cpus(self.pod, container);
        let Some(policy) = &self.settings.cpus else {
            return Ok(());
        };
        let cpus = match self.own.cpus.containers.get(name) {
            Some(cpus) => cpus.clone(),
            None if count == 0 => return Ok(()),
            None => {
                let available = (&self.free, &self.reusable);
                policy.allocate(&self.settings.machine, available, count, hint.nodes)?
            }
        };
        self.free = self.free.without(&cpus);
        self.reusable = if self.is_plain_init(container) {
            // What a container has already that runs later is not for others.
            let own = self.own.cpus.containers.iter();
            let later = own.filter(|(other, _)| !self.has_ended_by_then(other));
            let later = union_of(later.map(|(_, cpus)| cpus));
            self.reusable.union(&cpus.without(&later))
        } else {
            self.reusable.without(&cpus)
        };
        self.placement.cpus.containers.insert(name.clone(), cpus);
        Ok(())
    }

    fn allocate_memory(&mut self, container: &Container, hint: Hint) -> Result<(), Refusal> {
        let name = &container.name;
        if let Some(blocks) = self.own.memory.containers.get(name) {
            let record = &mut self.placement.memory.containers;
            record.insert(name.clone(), blocks.clone());
            return Ok(());
        }
        let wanted = pinned_memory(self.pod, container);
        if self.settings.memory.is_some() && !wanted.is_empty() {
            let blocks = self.table.allocate(&wanted, &self.reusable_memory, hint)?;
            let before: Vec<String> = self
                .pod
                .init_containers()
                .iter()
                .take_while(|c| c.name != *name)
                .filter(|c| !is_sidecar(c))
                .map(|c| c.name.clone())
                .collect();
            let is_plain_init = self.is_plain_init(container);
            let record = &mut self.placement.memory;
            if is_plain_init {
                for block in &blocks {
                    let mask: NodeMask = block.nodes.iter().copied().collect();
                    let key = (mask, block.resource.clone());
                    let known = self.reusable_memory.entry(key).or_default();
                    *known = block.bytes.max(*known);
                }
                memory::reuse(record, &before, &blocks, &mut Reusable::new());
            } else {
                memory::reuse(record, &before, &blocks, &mut self.reusable_memory);
            }
            record.containers.insert(name.clone(), blocks);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

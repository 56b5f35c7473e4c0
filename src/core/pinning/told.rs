//! CPUs and NUMA nodes that are applied to containers. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{Assigned, Settings};
use crate::core::state::{CpusetRecord, PlegRecord, State, child_key};
use crate::types::cpu_set::CpuSet;
use crate::types::runtime::ContainerState;
use crate::types::{ContainerId, PodUid};

/// CPUs that the runtime has confirmed since the agent's start, by container.
pub type Confirmed = BTreeMap<ContainerId, CpuSet>;

/// A running container whose CPUs have to be sent to the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Its pod.
    pub pod: PodUid,
    /// Its name.
    pub container: String,
    /// Its ID.
    pub id: ContainerId,
    /// The CPUs; with the policy `none` all of the machine.
    pub cpus: CpuSet,
    /// All CPUs that it may use until the runtime has answered: those that it had and those that it gets.
    pub may_use: CpuSet,
    /// True if no other container uses them.
    pub is_exclusive: bool,
}

impl Update {
    /// Returns whether the container loses none of the CPUs that it may use.
    pub fn only_grows(&self) -> bool {
        self.cpus == self.may_use
    }
}

/// Returns the CPUs and NUMA nodes of a container; an empty set is not sent. CPUs are those of its own, or those that
/// all others share; empty with the policy `none`. Upstream: `GetCPUAffinity` and `GetMemoryNUMANodes`.
pub fn allowed(
    settings: &Settings,
    assigned: &Assigned,
    pod: &PodUid,
    container: &str,
) -> (CpuSet, CpuSet) {
    let own = assigned.cpus.get(pod);
    let own = own.and_then(|record| record.containers.get(container));
    let cpus = settings.cpus.as_ref().map(|policy| match own {
        Some(cpus) => cpus.clone(),
        None => policy.shared(&settings.machine, &assigned.exclusive()),
    });
    let blocks = settings.memory.as_ref().and(assigned.memory.get(pod));
    let blocks = blocks.and_then(|record| record.containers.get(container));
    let nodes = blocks.into_iter().flatten().flat_map(|block| &block.nodes);
    (cpus.unwrap_or_default(), nodes.copied().collect())
}

/// Returns the running containers whose CPUs have to be sent: those that have others than assigned, and those of which
/// the runtime has not confirmed them since the agent's start. Those that lose CPUs come first, so that no two
/// containers have one at a time for long. Upstream: `reconcileState`.
pub fn updates(
    state: &State,
    settings: &Settings,
    assigned: &Assigned,
    confirmed: &Confirmed,
) -> Vec<Update> {
    let running = running(state);
    let online = settings.machine.online();
    let mut found: Vec<Update> = Vec::new();
    for ((pod, container), id) in &running {
        let told = state.record::<CpusetRecord>(&child_key(pod, container));
        let told = told.filter(|record| record.container_id == *id);
        let told = told.map(|record| &record.cpus);
        let Some(wanted) = wanted(settings, assigned, (pod, container), told) else {
            continue;
        };
        let is_known = told == Some(&wanted) && confirmed.get(id) == Some(&wanted);
        if wanted.is_empty() || is_known {
            continue;
        }
        let own = assigned.cpus.get(pod).filter(|_| settings.cpus.is_some());
        // One that was told no CPUs may use all of them.
        let had = told.filter(|cpus| !cpus.is_empty()).unwrap_or(&online);
        found.push(Update {
            pod: pod.clone(),
            container: container.clone(),
            id: id.clone(),
            may_use: had.union(&wanted),
            cpus: wanted,
            is_exclusive: own.is_some_and(|record| record.containers.contains_key(container)),
        });
    }
    found.sort_by_key(Update::only_grows);
    found
}

fn wanted(
    settings: &Settings,
    assigned: &Assigned,
    (pod, container): (&PodUid, &str),
    told: Option<&CpuSet>,
) -> Option<CpuSet> {
    if settings.cpus.is_some() {
        return Some(allowed(settings, assigned, pod, container).0);
    }
    // What an earlier policy has narrowed is widened again; one that was told NUMA nodes alone has all CPUs.
    told.filter(|cpus| !cpus.is_empty())
        .map(|_| settings.machine.online())
}

/// Returns whether CPUs may have to be sent to running containers: always with the policy `static`, and with `none`
/// while one has those of an earlier policy.
pub fn is_telling(state: &State, settings: &Settings) -> bool {
    let mut records = state.cpusets.iter();
    settings.cpus.is_some() || records.any(|(_, told)| !told.record.cpus.is_empty())
}

/// Returns containers that run or were started, by the records of their CPUs and by the runtime's last view.
fn running(state: &State) -> BTreeMap<(PodUid, String), ContainerId> {
    let mut ended: BTreeSet<ContainerId> = BTreeSet::new();
    let mut running = BTreeMap::new();
    for (uid, seen) in &state.pleg {
        let PlegRecord { status } = &seen.record;
        for container in &status.containers {
            match container.state {
                ContainerState::Running => {
                    let key = (PodUid::new(&**uid), container.name.clone());
                    running.insert(key, container.id.clone());
                }
                ContainerState::Exited => {
                    ended.insert(container.id.clone());
                }
                _ => {}
            }
        }
    }
    // One that was just started may not have been listed yet.
    for (key, told) in &state.cpusets {
        let record = &told.record;
        if ended.contains(&record.container_id) {
            continue;
        }
        if let Some((uid, name)) = key.split_once('/') {
            let key = (PodUid::new(uid), name.to_owned());
            running.insert(key, record.container_id.clone());
        }
    }
    running
}

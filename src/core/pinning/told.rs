//! CPUs and NUMA nodes that are applied to containers. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{Assigned, Settings};
use crate::core::state::{CpusetRecord, PlegRecord, State, child_key};
use crate::types::cpu_set::CpuSet;
use crate::types::runtime::ContainerState;
use crate::types::{ContainerId, PodUid};

/// A running container that is to be told other CPUs than it was.
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
    /// True if no other container uses them.
    pub is_exclusive: bool,
}

/// Returns the CPUs and NUMA nodes of a container; what is empty is not told. CPUs are those of its own, or those that all
/// others share; empty with the policy `none`. Upstream: `GetCPUAffinity` and `GetMemoryNUMANodes`.
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

/// Returns the running containers that were told otherwise than `assigned` says: those that lose CPUs first, so that no two
/// containers have one at a time for long. With `only`, those alone that were told one of these CPUs, or of which it is not
/// known. Upstream: `reconcileState`.
pub fn updates(
    state: &State,
    settings: &Settings,
    assigned: &Assigned,
    only: Option<&CpuSet>,
) -> Vec<Update> {
    let running = running(state);
    let mut found: Vec<(bool, Update)> = Vec::new();
    for ((pod, container), id) in &running {
        let told = state.record::<CpusetRecord>(&child_key(pod, container));
        let told = told.filter(|record| record.container_id == *id);
        let Some(wanted) = wanted(settings, assigned, (pod, container), told.is_some()) else {
            continue;
        };
        let is_same = told.is_some_and(|record| record.cpus == wanted);
        let concerns = |cpus: &CpuSet| told.is_none_or(|record| record.cpus.overlaps(cpus));
        if wanted.is_empty() || is_same || !only.is_none_or(concerns) {
            continue;
        }
        let grows = told.is_some_and(|record| record.cpus.without(&wanted).is_empty());
        let own = assigned.cpus.get(pod);
        let update = Update {
            pod: pod.clone(),
            container: container.clone(),
            id: id.clone(),
            cpus: wanted,
            is_exclusive: own.is_some_and(|record| record.containers.contains_key(container)),
        };
        found.push((grows, update));
    }
    found.sort_by_key(|(grows, _)| *grows);
    found.into_iter().map(|(_, update)| update).collect()
}

fn wanted(
    settings: &Settings,
    assigned: &Assigned,
    (pod, container): (&PodUid, &str),
    was_told: bool,
) -> Option<CpuSet> {
    if settings.cpus.is_some() {
        return Some(allowed(settings, assigned, pod, container).0);
    }
    // What an earlier policy has narrowed is widened again.
    was_told.then(|| settings.machine.online())
}

/// Containers that run or were started, by what was told to them and by what the runtime showed last.
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

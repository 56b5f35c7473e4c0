//! Brings stored assignments in line with the machine and the settings at the agent's start. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::cpus::exclusive_cpus;
use super::{Assigned, Placement, Settings, place_rest, turn_of};
use crate::core::pinning::memory::pinned_memory;
use crate::core::state::{
    AdmissionDecision, AdmissionRecord, CpusRecord, MemoryRecord, PodRecord, State, Transaction,
    WorkerPhase, WorkerRecord,
};
use crate::types::cpu_set::CpuSet;
use crate::types::{PodExt, PodUid};

/// Changes that a start has made to the containers of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mended {
    /// The pod.
    pub pod: PodUid,
    /// Description of the change, for its event.
    pub message: String,
}

/// Returns the records to change, and the changes to report. A container keeps the rest of its CPUs and nodes; one that
/// has none left, and a pod that is to run and has none, gets others if there are some. Assignments of no pod that may
/// run are freed. Upstream refuses to start instead (`validateState`).
pub fn mend(state: &State, settings: &Settings) -> (Transaction, Vec<Mended>) {
    let recorded = Assigned::of(state);
    let mut mending = Mending {
        settings,
        kept: Assigned::default(),
        seen: Vec::new(),
        told: BTreeMap::new(),
    };
    for (uid, record) in &recorded.cpus {
        if holds(state, uid) && settings.cpus.is_some() {
            mending.keep_cpus(uid, &turn_of(state, uid, None), record);
        }
    }
    for (uid, record) in &recorded.memory {
        if holds(state, uid) && settings.memory.is_some() {
            mending.keep_memory(uid, record);
        }
    }
    for (uid, record) in state.pods.iter() {
        let uid = PodUid::new(&**uid);
        if is_to_run(state, &uid) {
            mending.complete(state, &uid, &record.record.pod);
        }
    }
    let Mending { kept, told, .. } = mending;
    let mut transaction = Transaction::new();
    for (uid, record) in &kept.cpus {
        if recorded.cpus.get(uid) != Some(record) {
            transaction = transaction.put(uid.as_str(), record.clone());
        }
    }
    for (uid, record) in &kept.memory {
        if recorded.memory.get(uid) != Some(record) {
            transaction = transaction.put(uid.as_str(), record.clone());
        }
    }
    for uid in (recorded.cpus.keys()).filter(|uid| !kept.cpus.contains_key(*uid)) {
        transaction = transaction.delete::<CpusRecord>(uid.as_str());
    }
    for uid in (recorded.memory.keys()).filter(|uid| !kept.memory.contains_key(*uid)) {
        transaction = transaction.delete::<MemoryRecord>(uid.as_str());
    }
    for (uid, messages) in &told {
        let why = messages.join("; ");
        transaction = transaction.journal(Some(uid), "assignment mended", why);
    }
    let told = told.into_iter().map(|(pod, messages)| Mended {
        pod,
        message: messages.join("; "),
    });
    (transaction, told.collect())
}

/// Returns whether something of the pod may run.
fn holds(state: &State, uid: &PodUid) -> bool {
    let worker = state.record::<WorkerRecord>(uid.as_str());
    worker.is_some_and(|worker| {
        matches!(
            worker.phase,
            WorkerPhase::Sync | WorkerPhase::Terminating { .. }
        )
    })
}

fn is_to_run(state: &State, uid: &PodUid) -> bool {
    let worker = state.record::<WorkerRecord>(uid.as_str());
    let admission = state.record::<AdmissionRecord>(uid.as_str());
    worker.is_some_and(|worker| worker.phase == WorkerPhase::Sync)
        && admission.is_some_and(|a| a.decision == AdmissionDecision::Admitted)
        && state.record::<PodRecord>(uid.as_str()).is_some()
}

struct Mending<'a> {
    settings: &'a Settings,
    kept: Assigned,
    /// CPUs that were kept, by the pods that take turns with them.
    seen: Vec<(String, CpuSet)>,
    told: BTreeMap<PodUid, Vec<String>>,
}

impl Mending<'_> {
    fn tell(&mut self, uid: &PodUid, message: String) {
        self.told.entry(uid.clone()).or_default().push(message);
    }

    fn keep_cpus(&mut self, uid: &PodUid, turn: &str, record: &CpusRecord) {
        let mut usable = self.settings.machine.online();
        for (_, cpus) in self.seen.iter().filter(|(other, _)| other != turn) {
            usable = usable.without(cpus);
        }
        let mut kept = CpusRecord::default();
        for (container, cpus) in &record.containers {
            let left = cpus.common(&usable);
            if left != *cpus {
                let lost = cpus.without(&left);
                let rest = if left.is_empty() {
                    "it shares those of the others unless it gets some anew".to_owned()
                } else {
                    format!("it keeps {left}")
                };
                let message = format!(
                    "container {container} lost CPUs {lost}, which the node does not have for it; {rest}"
                );
                self.tell(uid, message);
            }
            if !left.is_empty() {
                kept.containers.insert(container.clone(), left);
            }
        }
        let all = kept.containers.values().flat_map(CpuSet::iter).collect();
        self.seen.push((turn.to_owned(), all));
        if !kept.containers.is_empty() {
            self.kept.cpus.insert(uid.clone(), kept);
        }
    }

    fn keep_memory(&mut self, uid: &PodUid, record: &MemoryRecord) {
        let nodes = &self.settings.machine.nodes;
        let mut kept = record.clone();
        let mut lost: Vec<String> = Vec::new();
        for (container, blocks) in &mut kept.containers {
            let before = blocks.clone();
            for block in blocks.iter_mut() {
                block.nodes.retain(|node| nodes.contains_key(node));
            }
            blocks.retain(|block| !block.nodes.is_empty());
            if *blocks != before {
                lost.push(format!(
                    "container {container} lost NUMA nodes, which the node does not have any more"
                ));
            }
        }
        kept.containers.retain(|_, blocks| !blocks.is_empty());
        for message in lost {
            self.tell(uid, message);
        }
        if !kept.containers.is_empty() {
            self.kept.memory.insert(uid.clone(), kept);
        }
    }

    /// Assigns to containers of a pod what they should have and have nothing of. What the pod itself has is not taken from it,
    /// nor is what static pods have that it takes turns with.
    fn complete(&mut self, state: &State, uid: &PodUid, pod: &Pod) {
        let own = Placement {
            cpus: self.kept.cpus.get(uid).cloned().unwrap_or_default(),
            memory: self.kept.memory.get(uid).cloned().unwrap_or_default(),
            ..Placement::default()
        };
        let (has_cpus, has_memory) = (&own.cpus.containers, &own.memory.containers);
        let all = || pod.init_containers().iter().chain(pod.containers());
        let lacks_cpus = self.settings.cpus.is_some()
            && all().any(|c| exclusive_cpus(pod, c) > 0 && !has_cpus.contains_key(&c.name));
        let lacks_memory = self.settings.memory.is_some()
            && all()
                .any(|c| !pinned_memory(pod, c).is_empty() && !has_memory.contains_key(&c.name));
        if !lacks_cpus && !lacks_memory {
            return;
        }
        let mut taken = self.kept.clone();
        taken.cpus.remove(uid);
        taken.memory.remove(uid);
        taken.leave_out_predecessors(state, pod);
        match place_rest(pod, self.settings, &taken, &own, &|_| Vec::new()) {
            Ok(placement) => {
                let of = placement.cpus.containers.iter();
                let new = of.filter(|(container, _)| !has_cpus.contains_key(*container));
                let mut got: Vec<String> = new
                    .map(|(container, cpus)| format!("container {container} got CPUs {cpus}"))
                    .collect();
                if lacks_memory {
                    got.push("its memory is assigned to NUMA nodes".to_owned());
                }
                self.kept.add(uid, &placement);
                self.tell(uid, got.join(", "));
            }
            Err(refusal) => {
                let message = format!(
                    "nothing more could be assigned to the pod, which runs beside the others: {}",
                    refusal.message
                );
                self.tell(uid, message);
            }
        }
    }
}

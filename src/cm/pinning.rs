//! The CPU, memory and topology managers at work: who has which CPUs and NUMA nodes, on record and on its way there.
//!
//! In: pods at their admission. Out: assignments that are committed with the admission, and the CPUs that containers
//! get. [`crate::core::pinning`] decides.
//!
//! **Invariant:** what was reserved for a pod is nobody else's until it is recorded or its worker is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::Instant;

use crate::core::pinning::cpus::has_exclusive_cpus;
use crate::core::pinning::hints::Hints;
use crate::core::pinning::memory::pinned_memory;
use crate::core::pinning::{self, Assigned, Confirmed, Placement, Refusal, Settings};
use crate::core::state::{CpusRecord, MemoryRecord, State, Transaction};
use crate::kubeletconfig::{TopologyPolicy, TopologyScope};
use crate::store::Store;
use crate::types::cpu_set::CpuSet;
use crate::types::metrics::{AlignmentLabel, Metrics, NumaNodeLabel};
use crate::types::{ContainerId, PodExt, PodUid};

/// The managers. Cheap to clone.
#[derive(Clone)]
pub struct Pinning(Arc<Inner>);

/// Hints of the devices that a container wants, or with `None` all containers of the pod.
pub type DeviceHints = Box<dyn Fn(&Pod, Option<&Container>) -> Vec<Hints> + Send + Sync>;

struct Inner {
    settings: Settings,
    devices: DeviceHints,
    store: Store,
    metrics: Metrics,
    /// Of pods whose admission is not recorded yet.
    reserved: Mutex<BTreeMap<PodUid, Placement>>,
    /// Values that containers were created with whose start is not recorded yet.
    created: Mutex<BTreeMap<ContainerId, (CpuSet, CpuSet)>>,
    /// CPUs that the runtime has confirmed since the agent's start.
    confirmed: Mutex<Confirmed>,
    /// Turns of containers that get CPUs: a later decision is applied later.
    turns: Mutex<BTreeMap<ContainerId, Turn>>,
}

/// Held while one container gets its CPUs; others do not wait for it.
pub type Turn = Arc<tokio::sync::Mutex<()>>;

impl fmt::Debug for Pinning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinning").finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pinning {
    /// Managers with these settings over what is recorded. `devices` takes part in the alignment of CPUs and memory.
    pub fn new(settings: Settings, store: Store, metrics: Metrics, devices: DeviceHints) -> Self {
        let pinning = Self(Arc::new(Inner {
            settings,
            devices,
            store,
            metrics,
            reserved: Mutex::default(),
            created: Mutex::default(),
            confirmed: Mutex::default(),
            turns: Mutex::default(),
        }));
        pinning.measure();
        pinning
    }

    /// Returns the settings that CPUs and memory are assigned by.
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// Returns the turn of a container; its holder sets the container's CPUs.
    pub fn turn(&self, id: &ContainerId) -> Turn {
        let mut turns = locked(&self.0.turns);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry(id.clone()).or_default())
    }

    /// Returns the CPUs that the runtime has confirmed since the agent's start.
    pub fn confirmed(&self) -> Confirmed {
        locked(&self.0.confirmed).clone()
    }

    /// Notes which CPUs of a container the runtime has confirmed; `None` when it is not known any more.
    pub fn set_confirmed(&self, id: &ContainerId, cpus: Option<CpuSet>) {
        let mut confirmed = locked(&self.0.confirmed);
        match cpus {
            Some(cpus) => confirmed.insert(id.clone(), cpus),
            None => confirmed.remove(id),
        };
    }

    /// Forgets what was confirmed of containers that have no record any more.
    pub fn forget_confirmed(&self, state: &State) {
        let known: BTreeSet<&ContainerId> = (state.cpusets.iter())
            .map(|(_, told)| &told.record.container_id)
            .collect();
        locked(&self.0.confirmed).retain(|id, _| known.contains(id));
    }

    /// Returns what is recorded now, and what containers have for themselves by it and by what is reserved.
    pub fn current(&self) -> (Arc<State>, Assigned) {
        // In this order: what is not reserved any more is on record.
        let reserved = locked(&self.0.reserved).clone();
        let state = self.0.store.snapshot();
        let mut assigned = Assigned::of(&state);
        for (uid, placement) in &reserved {
            assigned.add(uid, placement);
        }
        (state, assigned)
    }

    /// Returns whether a container has CPUs for itself, by what is assigned; with `None` any container of the pod.
    pub fn has_cpus(&self, uid: &PodUid, container: Option<&str>) -> bool {
        if self.0.settings.cpus.is_none() {
            return false;
        }
        let (_, assigned) = self.current();
        let own = assigned.cpus.get(uid);
        own.is_some_and(|record| match container {
            Some(container) => record.containers.contains_key(container),
            None => !record.containers.is_empty(),
        })
    }

    /// Decides what a new pod gets. `holds` says whether a pod still holds resources of the node. Upstream: the admit handlers
    /// `resourceAllocator` and the topology manager's `Admit`.
    ///
    /// # Errors
    /// The reason why the pod is rejected.
    pub fn place(&self, pod: &Pod, holds: impl Fn(&PodUid) -> bool) -> Result<Placement, Refusal> {
        let inner = &self.0;
        let is_aligned = inner.settings.topology != TopologyPolicy::None;
        if inner.settings.is_idle() && !is_aligned {
            return Ok(Placement::default());
        }
        let wants_cpus = inner.settings.cpus.is_some() && has_exclusive_cpus(pod);
        let mut all = pod.init_containers().iter().chain(pod.containers());
        let wants_memory =
            inner.settings.memory.is_some() && all.any(|c| !pinned_memory(pod, c).is_empty());
        let begun = Instant::now();
        let placed = self.search(pod, holds);
        let metrics = &inner.metrics;
        let failed = placed.is_err();
        if wants_cpus {
            metrics.cpu_manager_pinning_requests.inc();
            metrics.cpu_manager_pinning_errors.inc_by(u64::from(failed));
        }
        if wants_memory {
            metrics.memory_manager_pinning_requests.inc();
            metrics
                .memory_manager_pinning_errors
                .inc_by(u64::from(failed));
        }
        self.count_aligned(pod, &placed);
        if is_aligned {
            metrics.topology_manager_admission_requests.inc();
            metrics
                .topology_manager_admission_errors
                .inc_by(u64::from(failed));
            let took = begun.elapsed().as_secs_f64() * 1000.0;
            metrics.topology_manager_admission_duration.observe(took);
        }
        placed
    }

    /// Returns whether a pod would get what it needs, without counting the decision.
    pub fn fits(&self, pod: &Pod, holds: impl Fn(&PodUid) -> bool) -> bool {
        let settings = &self.0.settings;
        let is_idle = settings.is_idle() && settings.topology == TopologyPolicy::None;
        is_idle || self.search(pod, holds).is_ok()
    }

    fn search(&self, pod: &Pod, holds: impl Fn(&PodUid) -> bool) -> Result<Placement, Refusal> {
        let inner = &self.0;
        locked(&inner.reserved).retain(|uid, _| holds(uid));
        let (state, mut taken) = self.current();
        // It never competes with itself.
        taken.cpus.remove(&pod.uid());
        taken.memory.remove(&pod.uid());
        taken.leave_out_predecessors(&state, pod);
        pinning::place(pod, &inner.settings, &taken, &|container| {
            (inner.devices)(pod, container)
        })
    }

    /// Counts what is aligned for certain, and what was refused for it. Upstream counts whole cores by container, and NUMA nodes
    /// by the scope of the topology manager, for the policy that allows one node only.
    fn count_aligned(&self, pod: &Pod, placed: &Result<Placement, Refusal>) {
        let Settings {
            cpus,
            topology,
            scope,
            ..
        } = &self.0.settings;
        let full_cores = cpus.as_ref().is_some_and(|c| c.options.full_cores);
        let mut kinds = Vec::new();
        if full_cores && has_exclusive_cpus(pod) {
            let count = placed.as_ref().map_or(1, |p| p.cpus.containers.len());
            kinds.push(("container", "physical_cpu", count));
        }
        if *topology == TopologyPolicy::SingleNumaNode {
            kinds.push(match scope {
                TopologyScope::Pod => ("pod", "numa_node", 1),
                TopologyScope::Container => {
                    let all = pod.init_containers().len() + pod.containers().len();
                    let count = if placed.is_ok() { all } else { 1 };
                    ("container", "numa_node", count)
                }
            });
        }
        let metrics = &self.0.metrics;
        for (scope, boundary, count) in kinds {
            let family = match placed {
                Ok(_) => &metrics.aligned_resources,
                Err(_) => &metrics.aligned_resources_failure,
            };
            let label = AlignmentLabel {
                scope: scope.to_owned(),
                boundary: boundary.to_owned(),
            };
            let count = u64::try_from(count).unwrap_or(u64::MAX);
            family.get_or_create(&label).inc_by(count);
        }
    }

    /// Returns the NUMA nodes that an admitted pod's container may have devices of; `None` stands for any.
    ///
    /// # Errors
    /// When the devices that are left do not fit the policy.
    pub fn nodes_for_devices(
        &self,
        pod: &Pod,
        container: &str,
    ) -> Result<Option<BTreeSet<i64>>, Refusal> {
        let inner = &self.0;
        if inner.settings.topology == TopologyPolicy::None {
            return Ok(None);
        }
        let (state, mut taken) = self.current();
        let uid = pod.uid();
        let own = Placement {
            cpus: taken.cpus.remove(&uid).unwrap_or_default(),
            memory: taken.memory.remove(&uid).unwrap_or_default(),
            nodes: BTreeMap::new(),
        };
        taken.leave_out_predecessors(&state, pod);
        let more = |container: Option<&Container>| (inner.devices)(pod, container);
        let nodes = pinning::nodes_of(pod, &inner.settings, &taken, &own, &more)?;
        let of_container = nodes.get(container).copied().flatten();
        Ok(of_container.map(|mask| mask.nodes().into_iter().map(i64::from).collect()))
    }

    /// Keeps what a pod got until its admission is recorded.
    pub fn reserve(&self, uid: &PodUid, placement: Placement) {
        if !placement.is_empty() {
            locked(&self.0.reserved).insert(uid.clone(), placement);
        }
    }

    /// To be committed with the admission of a pod.
    pub fn unrecorded(&self, uid: &PodUid) -> Transaction {
        let reserved = locked(&self.0.reserved);
        let mut transaction = Transaction::new();
        let Some(placement) = reserved.get(uid) else {
            return transaction;
        };
        if !placement.cpus.containers.is_empty() {
            let of = placement.cpus.containers.iter();
            let of: Vec<String> = of.map(|(name, cpus)| format!("{name}: {cpus}")).collect();
            transaction = transaction
                .put(uid.as_str(), placement.cpus.clone())
                .journal(Some(uid), "CPUs assigned", of.join("; "));
        }
        if !placement.memory.containers.is_empty() {
            transaction = transaction.put(uid.as_str(), placement.memory.clone());
        }
        transaction
    }

    /// Notes that a pod's assignments are recorded, or that the record that frees them is.
    pub fn settled(&self, uid: &PodUid) {
        locked(&self.0.reserved).remove(uid);
        self.measure();
    }

    /// Remembers with which CPUs and nodes a container was created; nothing if it may use all.
    pub fn created(&self, id: &ContainerId, told: (CpuSet, CpuSet)) {
        if told.0.is_empty() && told.1.is_empty() {
            return;
        }
        locked(&self.0.created).insert(id.clone(), told);
    }

    /// Returns what a container was created with, once.
    pub fn take_created(&self, id: &ContainerId) -> Option<(CpuSet, CpuSet)> {
        locked(&self.0.created).remove(id)
    }

    /// Returns the CPUs and NUMA nodes of a container, see [`pinning::allowed`].
    pub fn allowed(&self, pod: &PodUid, container: &str) -> (CpuSet, CpuSet) {
        let settings = &self.0.settings;
        if settings.is_idle() {
            return Default::default();
        }
        pinning::allowed(settings, &self.current().1, pod, container)
    }

    /// Returns the recorded CPUs of a pod's containers.
    pub fn recorded(&self, uid: &PodUid) -> (Option<CpusRecord>, Option<MemoryRecord>) {
        let state = self.0.store.snapshot();
        (
            state.record::<CpusRecord>(uid.as_str()).cloned(),
            state.record::<MemoryRecord>(uid.as_str()).cloned(),
        )
    }

    fn measure(&self) {
        let Some(policy) = &self.0.settings.cpus else {
            return;
        };
        let exclusive = self.current().1.exclusive();
        let shared = policy.shared(&self.0.settings.machine, &exclusive);
        let count = |set: &CpuSet| i64::try_from(set.len()).unwrap_or(i64::MAX);
        let metrics = &self.0.metrics;
        metrics
            .cpu_manager_exclusive_cpu_allocation
            .set(count(&exclusive));
        metrics
            .cpu_manager_shared_pool_size
            .set(count(&shared).saturating_mul(1000));
        let machine = &self.0.settings.machine;
        for node in machine.node_ids() {
            let label = NumaNodeLabel {
                numa_node: node.to_string(),
            };
            let of_node = machine.cpus_with(&exclusive, |cpu| cpu.node, node);
            metrics
                .cpu_manager_allocation_per_numa
                .get_or_create(&label)
                .set(count(&of_node));
        }
    }
}

#[cfg(test)]
pub(crate) mod testkit {
    use super::*;
    use crate::core::pinning::cpus::StaticCpus;
    use crate::core::pinning::machine::testkit::machine;
    use crate::core::pinning::memory::{Bytes, StaticMemory};
    use crate::store::StoreOptions;
    use crate::store::backend::MemoryBackend;
    use crate::store::codec::Loaded;
    use crate::types::Clock;

    /// Static policies on a machine of two nodes with two CPUs each; CPU 0 and 1 GiB of node 0 are reserved.
    pub(crate) fn pinning(clock: Arc<dyn Clock>) -> (Pinning, Store) {
        let options = StoreOptions {
            inline: true,
            ..StoreOptions::default()
        };
        let backend = Box::new(MemoryBackend::new());
        let loaded = Loaded::default();
        let store = Store::start(backend, loaded, options, clock, Metrics::default()).unwrap();
        let kept = [(0, Bytes::from([("memory".to_owned(), 1 << 30)]))];
        let settings = Settings {
            machine: machine(2, 1, 2, 1, 2),
            cpus: Some(StaticCpus {
                reserved: [0].into_iter().collect(),
                ..StaticCpus::default()
            }),
            memory: Some(StaticMemory {
                reserved: kept.into(),
            }),
            ..Settings::default()
        };
        let no_devices: DeviceHints = Box::new(|_, _| Vec::new());
        let pinning = Pinning::new(settings, store.clone(), Metrics::default(), no_devices);
        (pinning, store)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::types::{BootId, Clock, SystemClock};

    fn pod(uid: &str, cpu: &str) -> Pod {
        let amounts = json!({"cpu": cpu, "memory": "1Gi"});
        serde_json::from_value(json!({
            "metadata": {"name": uid, "namespace": "ns", "uid": uid},
            "spec": {"containers": [{"name": "a", "resources": {"limits": amounts, "requests": amounts}}]},
        }))
        .unwrap()
    }

    #[tokio::test]
    async fn a_container_that_may_use_every_cpu_is_not_remembered() {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
        let (pinning, _store) = testkit::pinning(clock);
        let (all, pinned) = (ContainerId::new("all"), ContainerId::new("pinned"));
        pinning.created(&all, Default::default());
        assert_eq!(pinning.take_created(&all), None);
        let told = (CpuSet::default(), "0".parse().unwrap());
        pinning.created(&pinned, told.clone());
        assert_eq!(pinning.take_created(&pinned), Some(told));
    }

    #[tokio::test]
    async fn what_is_reserved_is_nobody_elses_until_it_is_on_record_or_its_worker_is_gone() {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
        let (pinning, store) = testkit::pinning(clock);
        let (one, two) = (PodUid::new("one"), PodUid::new("two"));
        let placed = pinning.place(&pod("one", "2"), |_| true).unwrap();
        pinning.reserve(&one, placed);
        assert!(pinning.place(&pod("two", "2"), |_| true).is_err());
        store.commit(pinning.unrecorded(&one)).await.unwrap();
        pinning.settled(&one);
        assert!(pinning.unrecorded(&one).is_empty());
        assert!(pinning.place(&pod("two", "2"), |_| true).is_err());
        let (cpus, nodes) = pinning.allowed(&one, "a");
        assert_eq!(cpus.len(), 2);
        assert_eq!(nodes.len(), 1);
        let shared = pinning.allowed(&two, "a").0;
        assert!(!shared.overlaps(&cpus) && shared.len() == 2);
        // One that never comes to be on record.
        let placed = pinning.place(&pod("two", "1"), |_| true).unwrap();
        pinning.reserve(&two, placed);
        assert!(pinning.place(&pod("three", "1"), |_| true).is_err());
        assert!(pinning.place(&pod("three", "1"), |_| false).is_ok());
        let metrics = &pinning.0.metrics;
        assert_eq!(metrics.cpu_manager_pinning_requests.get(), 6);
        assert_eq!(metrics.cpu_manager_pinning_errors.get(), 3);
    }

    #[tokio::test]
    async fn what_is_aligned_for_certain_and_what_each_node_has_given_is_counted() {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
        let (known, store) = testkit::pinning(clock);
        let settings = Settings {
            topology: TopologyPolicy::SingleNumaNode,
            memory: None,
            ..known.settings().clone()
        };
        let no_devices: DeviceHints = Box::new(|_, _| Vec::new());
        let pinning = Pinning::new(settings, store.clone(), Metrics::default(), no_devices);
        let one = PodUid::new("one");
        let placed = pinning.place(&pod("one", "2"), |_| true).unwrap();
        pinning.reserve(&one, placed);
        store.commit(pinning.unrecorded(&one)).await.unwrap();
        pinning.settled(&one);
        assert!(pinning.place(&pod("two", "2"), |_| true).is_err());
        let metrics = &pinning.0.metrics;
        let aligned = AlignmentLabel {
            scope: "container".to_owned(),
            boundary: "numa_node".to_owned(),
        };
        assert_eq!(metrics.aligned_resources.get_or_create(&aligned).get(), 1);
        let failures = &metrics.aligned_resources_failure;
        assert_eq!(failures.get_or_create(&aligned).get(), 1);
        let given = |node: &str| {
            let label = NumaNodeLabel {
                numa_node: node.to_owned(),
            };
            let given = &metrics.cpu_manager_allocation_per_numa;
            given.get_or_create(&label).get()
        };
        let mut all = [given("0"), given("1")];
        all.sort_unstable();
        assert_eq!(all, [0, 2], "both are of one node");
    }
}

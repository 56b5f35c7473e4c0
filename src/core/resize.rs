//! Resources of running containers: allocated, applied and wanted.
//!
//! The input is the desired pod, its allocation at admission or by a later resize, the resources last sent to the
//! runtime, and the other pods of the node. The output is whether the node gives the wanted resources, the request to
//! the runtime, and the resources in the status. Upstream: the allocation manager and `computePodResizeAction`.
//!
//! An allocation is recorded with the admission, per container: each requested resource under its name, and
//! for what can be resized the limit as `limits.cpu` and `limits.memory`, 0 for none. Records that were made
//! without limits are taken to have those that are wanted when they are read first. What the pod as a whole has is
//! recorded under the empty name ([`POD`]), empty where the pod has nothing of its own.
//!
//! **Invariant:** the allocation is used to create containers and to count the node's room, however the spec has
//! changed since.

mod pod_level;
mod record;
mod view;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Node, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub use pod_level::{
    POD, allocation_of_pod, before, is_complete, is_pod_unconfirmed, made_with, pod_changes,
};
pub use record::{PendingRecord, ResizeRecord, pending_key, resize_key, turn_key};
pub use view::{ResizeView, ResourceView, view};

use super::admission::resources::{Taken, insufficient, shown};
use super::pod_status::{QosClass, qos_class};
use super::resources::{amount, pod_requests};
use crate::types::PodExt;
use crate::types::containers::is_sidecar;

/// Reason of a resize that the node has no room for at present.
pub const DEFERRED: &str = "Deferred";
/// Reason of a resize that this node can never give.
pub const INFEASIBLE: &str = "Infeasible";
/// Reason of a resize that was allocated and could not be applied.
pub const ERROR: &str = "Error";

/// Resource to quantity of one container.
pub type Allocation = BTreeMap<String, String>;
/// Allocations of a pod's containers by name.
pub type Allocations = BTreeMap<String, Allocation>;

/// Resources that can be resized, and the keys of their limits.
const RESIZABLE: [(&str, &str); 2] = [("cpu", "limits.cpu"), ("memory", "limits.memory")];

/// Mark of resources for which the runtime may have another value than the recorded one.
const UNCONFIRMED: &str = "unconfirmed";

/// Decision about the resources that a pod wants now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It has it.
    Unchanged,
    /// It gets it; the allocation to record.
    Allocate(Allocations),
    /// Not now, for this reason.
    Deferred(String),
    /// Never, for this reason.
    Infeasible(Cause, String),
}

/// Kinds of reasons why a node can never give a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The pod is static.
    StaticPod,
    /// It would have another QoS class.
    QosClass,
    /// The node has less in all.
    Capacity,
    /// The CPU manager has given it CPUs.
    CpuManager,
    /// The memory manager has given it memory.
    MemoryManager,
}

impl Cause {
    /// Returns the label of `kubelet_pod_infeasible_resizes_total`; that of [`Cause::QosClass`] is ours, since API servers refuse
    /// such a resize.
    pub fn label(self) -> &'static str {
        match self {
            Self::StaticPod => "static_pod",
            Self::QosClass => "qos_class_change",
            Self::Capacity => "insufficient_node_allocatable",
            Self::CpuManager => "guaranteed_pod_cpu_manager_static_policy",
            Self::MemoryManager => "guaranteed_pod_memory_manager_static_policy",
        }
    }
}

/// A change of one request or limit: resource, `requests` or `limits`, and `add`, `remove`, `increase` or `decrease`.
pub type RequestedChange = (&'static str, &'static str, &'static str);

/// Returns what another version of a pod wants changed of its containers' resources. Upstream: `recordResizeOperations`.
pub fn requested_changes(before: &Pod, after: &Pod) -> Vec<RequestedChange> {
    let amount_of = |container: &Container, requirement, resource| {
        let resources = container.resources.as_ref()?;
        let list = match requirement {
            "limits" => resources.limits.as_ref(),
            _ => resources.requests.as_ref(),
        };
        list?.get(resource).map(amount)
    };
    let mut changes = Vec::new();
    for container in resizable(after) {
        let Some(former) = resizable(before).find(|c| c.name == container.name) else {
            continue;
        };
        for (resource, _) in RESIZABLE {
            for requirement in ["requests", "limits"] {
                let from = amount_of(former, requirement, resource);
                let to = amount_of(container, requirement, resource);
                let operation = match (from, to) {
                    (None, Some(_)) => "add",
                    (Some(_), None) => "remove",
                    (Some(from), Some(to)) if from < to => "increase",
                    (Some(from), Some(to)) if from > to => "decrease",
                    _ => continue,
                };
                changes.push((resource, requirement, operation));
            }
        }
    }
    changes
}

/// Returns the containers whose resources can be changed while they run. Upstream: `isResizableContainer`.
pub fn resizable(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.init_containers().iter().chain(pod.containers())
}

/// Returns the resources reserved for one container by its spec.
pub fn allocation_of(container: &Container) -> Allocation {
    of_resources(container.resources.as_ref())
}

fn of_resources(resources: Option<&ResourceRequirements>) -> Allocation {
    let limits = resources.and_then(|r| r.limits.as_ref());
    let requests = resources.and_then(|r| r.requests.as_ref());
    let given = limits.into_iter().flatten();
    let mut of: Allocation = given
        .chain(requests.into_iter().flatten())
        .map(|(name, Quantity(amount))| (name.clone(), amount.clone()))
        .collect();
    for (name, limit_key) in RESIZABLE {
        let limit = limits.and_then(|l| l.get(name));
        let limit = limit.map_or_else(|| "0".to_owned(), |q| q.0.clone());
        of.insert(limit_key.to_owned(), limit);
    }
    of
}

/// Returns the allocation of each resizable container and of the pod as a whole ([`POD`]), in the form of
/// [`allocation_of`], reduced to the resources that can be resized.
pub fn allocated(pod: &Pod, record: &Allocations) -> Allocations {
    let containers = resizable(pod);
    let mut all: Allocations = containers
        .map(|container| {
            let wanted = only_resizable(&allocation_of(container));
            let of = match record.get(&container.name) {
                None => wanted,
                Some(recorded) if recorded.contains_key(RESIZABLE[0].1) => only_resizable(recorded),
                Some(recorded) => {
                    let mut of = wanted;
                    for (name, _) in RESIZABLE {
                        match recorded.get(name) {
                            Some(request) => of.insert(name.to_owned(), request.clone()),
                            None => of.remove(name),
                        };
                    }
                    of
                }
            };
            (container.name.clone(), of)
        })
        .collect();
    let of_pod = match record.get(POD) {
        Some(recorded) => only_resizable(recorded),
        None => only_resizable(&allocation_of_pod(pod)),
    };
    all.insert(POD.to_owned(), of_pod);
    all
}

fn only_resizable(of: &Allocation) -> Allocation {
    let keys = RESIZABLE.iter().flat_map(|(name, limit)| [*name, *limit]);
    keys.filter_map(|key| Some((key.to_owned(), of.get(key)?.clone())))
        .collect()
}

fn quantity(of: &Allocation, key: &str) -> i128 {
    of.get(key)
        .map_or(0, |text| amount(&Quantity(text.clone())))
}

/// The limit that holds: its own, or the pod's that it was made with.
fn limit_of(of: &Allocation, key: &str) -> i128 {
    match quantity(of, key) {
        0 => quantity(of, pod_level::inherited(key)),
        own => own,
    }
}

fn differs(a: &Allocation, b: &Allocation, (name, limit): (&str, &str)) -> bool {
    quantity(a, name) != quantity(b, name) || limit_of(a, limit) != limit_of(b, limit)
}

fn same(a: &Allocation, b: &Allocation) -> bool {
    is_unconfirmed(a) == is_unconfirmed(b) && !RESIZABLE.iter().any(|r| differs(a, b, *r))
}

fn is_unconfirmed(of: &Allocation) -> bool {
    of.contains_key(UNCONFIRMED)
}

/// The pod with the resources of these allocations; `None` when it has them. Upstream:
/// `UpdatePodFromAllocation`.
pub fn with_allocation(pod: &Pod, allocations: &Allocations) -> Option<Pod> {
    let differ = |container: &Container| {
        let of = allocations.get(&container.name);
        of.is_some_and(|of| !same(of, &allocation_of(container)))
    };
    let pod_differs = pod_changes(pod, allocations);
    if !pod_differs && !resizable(pod).any(differ) {
        return None;
    }
    let mut pod = pod.clone();
    let spec = pod.spec.as_mut()?;
    let init = spec.init_containers.iter_mut().flatten();
    for container in init.chain(&mut spec.containers) {
        let of = allocations.get(&container.name);
        if let Some(of) = of.filter(|of| !same(of, &allocation_of(container))) {
            set_resizable(container.resources.get_or_insert_default(), of);
        }
    }
    if let Some(of) = allocations.get(POD).filter(|_| pod_differs) {
        pod_level::set(spec, of);
    }
    Some(pod)
}

fn set_resizable(resources: &mut ResourceRequirements, of: &Allocation) {
    for (name, limit_key) in RESIZABLE {
        set(&mut resources.requests, name, of.get(name));
        let limit = Some(limit_key).filter(|key| quantity(of, key) != 0);
        set(&mut resources.limits, name, limit.and_then(|k| of.get(k)));
    }
}

fn set(list: &mut Option<BTreeMap<String, Quantity>>, name: &str, value: Option<&String>) {
    match value {
        Some(value) => {
            let list = list.get_or_insert_default();
            list.insert(name.to_owned(), Quantity(value.clone()));
        }
        None => {
            if let Some(list) = list {
                list.remove(name);
            }
        }
    }
}

/// Returns whether the resources that a pod wants differ from its allocation.
pub fn is_wanted(pod: &Pod, record: &Allocations) -> bool {
    with_allocation(pod, &allocated(pod, record)).is_some()
}

/// Returns why a pod cannot be resized whose containers have CPUs or memory for themselves: with the static policy of the CPU
/// manager (`cpus`) or of the memory manager (`memory`). `None` when it can, or wants nothing else there. Upstream:
/// `canResizePod`.
pub fn of_pinned(
    pod: &Pod,
    record: &Allocations,
    cpus: bool,
    memory: bool,
) -> Option<(Cause, String)> {
    let allocations = allocated(pod, record);
    let before = with_allocation(pod, &allocations)?;
    if qos_class(&before) != QosClass::Guaranteed {
        return None;
    }
    let changes = |resource: (&str, &str)| {
        let containers = resizable(pod).map(|c| (c.name.as_str(), allocation_of(c)));
        let mut all = containers.chain([(POD, allocation_of_pod(pod))]);
        all.any(|(name, wanted)| {
            let of = allocations.get(name);
            of.is_some_and(|of| differs(of, &wanted, resource))
        })
    };
    let managers = [
        ("CPU", cpus, Cause::CpuManager),
        ("Memory", memory, Cause::MemoryManager),
    ];
    let mut refused = RESIZABLE.into_iter().zip(managers);
    let ((name, _), (manager, _, cause)) =
        refused.find(|(resource, (_, is_static, _))| *is_static && changes(*resource))?;
    let why = format!(
        "Resize of {name} is infeasible for Guaranteed Pods alongside {manager} Manager static policy"
    );
    Some((cause, why))
}

/// Decides on a resize. `others` are the other pods that take part of the node, with the resources
/// allocated to them. Upstream: `canResizePod`.
pub fn decide(pod: &Pod, record: &Allocations, others: &[&Pod], node: &Node) -> Decision {
    let Some(before) = with_allocation(pod, &allocated(pod, record)) else {
        return Decision::Unchanged;
    };
    if pod.is_static() {
        let why = "In-place resize of static-pods is not supported";
        return Decision::Infeasible(Cause::StaticPod, why.to_owned());
    }
    let class = |pod: &Pod| {
        let mut pod = pod.clone();
        pod.status = None;
        qos_class(&pod)
    };
    if class(pod) != class(&before) {
        let why = "Pod QOS Class may not change as a result of resizing";
        return Decision::Infeasible(Cause::QosClass, why.to_owned());
    }
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
    if let Some(allocatable) = allocatable.filter(|a| !a.is_empty()) {
        let wanted = pod_requests(pod);
        for (name, _) in RESIZABLE {
            let wanted = wanted.get(name).copied().unwrap_or(0);
            let Some(capacity) = allocatable.get(name).map(amount) else {
                if wanted == 0 {
                    continue;
                }
                let why = format!("Node's capacity of {name} is not known");
                return Decision::Deferred(why);
            };
            if wanted > capacity {
                let why = format!(
                    "Node didn't have enough capacity: {name}, requested: {}, capacity: {}",
                    shown(name, wanted),
                    shown(name, capacity)
                );
                return Decision::Infeasible(Cause::Capacity, why);
            }
        }
    }
    let lacking = insufficient(pod, &Taken::by(others), node, usize::MAX);
    let grows = |resource: &str| {
        pod_requests(pod).get(resource).copied().unwrap_or(0)
            > pod_requests(&before).get(resource).copied().unwrap_or(0)
    };
    if let Some(lack) = lacking.iter().find(|l| grows(&l.resource)) {
        return Decision::Deferred(lack.to_string());
    }
    let mut allocations = record.clone();
    let containers = resizable(pod).map(|c| (c.name.as_str(), allocation_of(c)));
    for (name, wanted) in containers.chain([(POD, allocation_of_pod(pod))]) {
        let of = allocations.entry(name.to_owned()).or_default();
        let wanted = only_resizable(&wanted);
        for (name, limit_key) in RESIZABLE {
            for key in [name, limit_key] {
                match wanted.get(key) {
                    Some(value) => of.insert(key.to_owned(), value.clone()),
                    None => of.remove(key),
                };
            }
        }
    }
    Decision::Allocate(allocations)
}

/// Resize of one running container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its name.
    pub name: String,
    /// Resources before.
    pub from: Allocation,
    /// Resources after.
    pub to: Allocation,
    /// Its `resizePolicy` asks for a restart.
    pub restart: bool,
}

impl Change {
    /// Bytes that the memory limit shrinks to, if it does.
    pub fn memory_shrinks_to(&self) -> Option<u64> {
        let (from, to) = (
            limit_of(&self.from, "limits.memory"),
            limit_of(&self.to, "limits.memory"),
        );
        let shrinks = to > 0 && (from == 0 || to < from || self.is_unconfirmed());
        shrinks.then(|| u64::try_from(shown("memory", to)).unwrap_or(0))
    }

    /// Limits that were there and are none any more: of CPU, of memory.
    pub fn lifted(&self) -> (bool, bool) {
        let had = |key| limit_of(&self.from, key) > 0 || self.is_unconfirmed();
        let lifted = |key| had(key) && limit_of(&self.to, key) == 0;
        (lifted("limits.cpu"), lifted("limits.memory"))
    }

    /// Returns whether something else than `from` may be in force: an agent died, or was overtaken by another allocation,
    /// before it recorded what it did.
    pub fn is_unconfirmed(&self) -> bool {
        is_unconfirmed(&self.from)
    }
}

/// Returns the changes that give the running containers of a pod their allocated resources. `actuated` has the
/// resources last sent to the runtime; a container that it does not name has the allocated ones. A container without a
/// limit of its own has its pod's limit, and changes with it. Upstream: `computePodResizeAction`.
pub fn changes(allocated_pod: &Pod, actuated: &Allocations, running: &[&str]) -> Vec<Change> {
    let knows_pod = actuated.contains_key(POD);
    resizable(allocated_pod)
        .filter(|c| running.contains(&c.name.as_str()))
        .filter_map(|container| {
            let from = actuated.get(&container.name)?;
            let from = match knows_pod {
                true => from.clone(),
                // Recorded before pods could be resized as a whole.
                false => pod_level::as_made(from, &allocation_of_pod(allocated_pod)),
            };
            let to = made_with(allocated_pod, container);
            let changed = |r: &(&str, &str)| differs(&from, &to, *r);
            let restart = RESIZABLE
                .iter()
                .filter(|r| changed(r))
                .any(|(name, _)| restarts_for(allocated_pod, container, name));
            let is_changed = is_unconfirmed(&from) || RESIZABLE.iter().any(changed);
            is_changed.then(|| Change {
                name: container.name.clone(),
                from,
                to,
                restart,
            })
        })
        .collect()
}

/// Returns whether an allocated resize is not in force: an agent died before the runtime had all of it, or the runtime
/// refused it. `record` is what the runtime was told, `allocation` the record of the admission.
pub fn is_unfinished(
    pod: &Pod,
    allocation: &Allocations,
    record: &ResizeRecord,
    running: &[&str],
) -> bool {
    let allocated = with_allocation(pod, &allocated(pod, allocation));
    let pod = allocated.as_ref().unwrap_or(pod);
    record.started
        || pod_changes(pod, &record.actuated)
        || !changes(pod, &record.actuated, running).is_empty()
}

/// Returns whether `resizePolicy` asks for a restart when this resource changes. An init container that runs to its end
/// has no policy: an API server takes none.
fn restarts_for(pod: &Pod, container: &Container, resource: &str) -> bool {
    let mut init = pod.init_containers().iter();
    if init.any(|c| c.name == container.name && !is_sidecar(c)) {
        return false;
    }
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|p| p.resource_name == resource && p.restart_policy == "RestartContainer")
}

#[cfg(test)]
mod tests;

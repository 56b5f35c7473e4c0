//! Resources of running containers: what was allocated, what is in force, what is wanted.
//!
//! In: the desired pod, what was allocated at admission or by a resize since, what the runtime was told
//! last, and what else runs on the node. Out: whether the node gives what is wanted, what has to be told to
//! the runtime, and what a status says of it. Upstream: the allocation manager and `computePodResizeAction`.
//!
//! An allocation is recorded with the admission, per container: each requested resource under its name, and
//! for what can be resized the limit as `limits.cpu` and `limits.memory`, 0 for none. Records that were made
//! without limits are taken to have those that are wanted when they are read first.
//!
//! **Invariant:** what was allocated is what containers are created with and what the node's room is counted
//! by, however the spec has changed since.

mod record;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Node, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub use record::{PendingRecord, ResizeRecord, pending_key, resize_key, turn_key};

use super::admission::resources::{Taken, insufficient, shown};
use super::pod_status::{QosClass, qos_class};
use super::resources::{amount, pod_requests};
use crate::types::PodExt;
use crate::types::containers::is_sidecar;

/// Reason of a resize that the node has no room for at present.
pub const DEFERRED: &str = "Deferred";
/// Reason of a resize that this node can never give.
pub const INFEASIBLE: &str = "Infeasible";
/// Reason of a resize that was allocated and could not be put in force.
pub const ERROR: &str = "Error";

/// Resource to quantity of one container.
pub type Allocation = BTreeMap<String, String>;
/// Allocations of a pod's containers by name.
pub type Allocations = BTreeMap<String, Allocation>;

/// What can be resized, and the key of its limit.
const RESIZABLE: [(&str, &str); 2] = [("cpu", "limits.cpu"), ("memory", "limits.memory")];

/// Resources of one container, for its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResourceView {
    /// Requests that the node has set aside; `status.containerStatuses[].allocatedResources`.
    pub allocated: Option<BTreeMap<String, Quantity>>,
    /// Requests and limits in force; `status.containerStatuses[].resources`.
    pub actual: Option<ResourceRequirements>,
}

/// Resizing of one pod, for its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResizeView {
    /// Resources of containers by name.
    pub containers: BTreeMap<String, ResourceView>,
    /// Reason and message of condition `PodResizePending`, when it holds.
    pub pending: Option<(String, String)>,
    /// Reason and message of condition `PodResizeInProgress`, when it holds.
    pub in_progress: Option<(String, String)>,
}

/// Whether the node gives a pod what it wants now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It has it.
    Unchanged,
    /// It gets it; the allocation to record.
    Allocate(Allocations),
    /// Not now, for this reason.
    Deferred(String),
    /// Never, for this reason.
    Infeasible(String),
}

/// Containers whose resources can be changed while they run.
pub fn resizable(pod: &Pod) -> impl Iterator<Item = &Container> {
    let sidecars = pod.init_containers().iter().filter(|c| is_sidecar(c));
    sidecars.chain(pod.containers())
}

/// What is set aside for one container by its spec.
pub fn allocation_of(container: &Container) -> Allocation {
    let resources = container.resources.as_ref();
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

/// What was allocated to each resizable container, in the form of [`allocation_of`], reduced to what can be
/// resized.
pub fn allocated(pod: &Pod, record: &Allocations) -> Allocations {
    resizable(pod)
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
        .collect()
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

fn differs(a: &Allocation, b: &Allocation, (name, limit): (&str, &str)) -> bool {
    quantity(a, name) != quantity(b, name) || quantity(a, limit) != quantity(b, limit)
}

fn same(a: &Allocation, b: &Allocation) -> bool {
    !RESIZABLE.iter().any(|r| differs(a, b, *r))
}

/// The pod with the resources of these allocations; `None` when it has them. Upstream:
/// `UpdatePodFromAllocation`.
pub fn with_allocation(pod: &Pod, allocations: &Allocations) -> Option<Pod> {
    let differ = |container: &Container| {
        let of = allocations.get(&container.name);
        of.is_some_and(|of| !same(of, &allocation_of(container)))
    };
    if !resizable(pod).any(differ) {
        return None;
    }
    let mut pod = pod.clone();
    let spec = pod.spec.as_mut()?;
    let sidecars = spec.init_containers.iter_mut().flatten();
    let sidecars = sidecars.filter(|c| is_sidecar(c));
    for container in sidecars.chain(&mut spec.containers) {
        let Some(of) = allocations.get(&container.name) else {
            continue;
        };
        let resources = container.resources.get_or_insert_default();
        for (name, limit_key) in RESIZABLE {
            set(&mut resources.requests, name, of.get(name));
            let limit = Some(limit_key).filter(|key| quantity(of, key) != 0);
            set(&mut resources.limits, name, limit.and_then(|k| of.get(k)));
        }
    }
    Some(pod)
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

/// Whether what a pod wants differs from what was allocated to it.
pub fn is_wanted(pod: &Pod, record: &Allocations) -> bool {
    with_allocation(pod, &allocated(pod, record)).is_some()
}

/// Returns why a pod cannot be resized whose containers have CPUs or memory for themselves: with the static policy of the CPU
/// manager (`cpus`) or of the memory manager (`memory`). `None` when it can, or wants nothing else there. Upstream:
/// `canResizePod`.
pub fn of_pinned(pod: &Pod, record: &Allocations, cpus: bool, memory: bool) -> Option<String> {
    let allocations = allocated(pod, record);
    let before = with_allocation(pod, &allocations)?;
    if qos_class(&before) != QosClass::Guaranteed {
        return None;
    }
    let changes = |resource: (&str, &str)| {
        resizable(pod).any(|container| {
            let of = allocations.get(&container.name);
            of.is_some_and(|of| differs(of, &allocation_of(container), resource))
        })
    };
    let managers = [("CPU", cpus), ("Memory", memory)];
    let mut refused = RESIZABLE.into_iter().zip(managers);
    let ((name, _), (manager, _)) =
        refused.find(|(resource, (_, is_static))| *is_static && changes(*resource))?;
    Some(format!(
        "Resize of {name} is infeasible for Guaranteed Pods alongside {manager} Manager static policy"
    ))
}

/// Decides on a resize. `others` are the other pods that take part of the node, with the resources
/// allocated to them. Upstream: `canResizePod`.
pub fn decide(pod: &Pod, record: &Allocations, others: &[&Pod], node: &Node) -> Decision {
    let Some(before) = with_allocation(pod, &allocated(pod, record)) else {
        return Decision::Unchanged;
    };
    if pod.is_static() {
        return Decision::Infeasible("In-place resize of static-pods is not supported".to_owned());
    }
    let class = |pod: &Pod| {
        let mut pod = pod.clone();
        pod.status = None;
        qos_class(&pod)
    };
    if class(pod) != class(&before) {
        return Decision::Infeasible(
            "Pod QOS Class may not change as a result of resizing".to_owned(),
        );
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
                return Decision::Infeasible(format!(
                    "Node didn't have enough capacity: {name}, requested: {}, capacity: {}",
                    shown(name, wanted),
                    shown(name, capacity)
                ));
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
    for container in resizable(pod) {
        let of = allocations.entry(container.name.clone()).or_default();
        let wanted = only_resizable(&allocation_of(container));
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

/// What has to be done to one running container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its name.
    pub name: String,
    /// What was in force.
    pub from: Allocation,
    /// What is to be.
    pub to: Allocation,
    /// Its `resizePolicy` asks for a restart.
    pub restart: bool,
}

impl Change {
    /// Bytes that the memory limit shrinks to, if it does.
    pub fn memory_shrinks_to(&self) -> Option<u64> {
        let (from, to) = (
            quantity(&self.from, "limits.memory"),
            quantity(&self.to, "limits.memory"),
        );
        let shrinks = to > 0 && (from == 0 || to < from);
        shrinks.then(|| u64::try_from(shown("memory", to)).unwrap_or(0))
    }

    /// Limits that were there and are none any more: of CPU, of memory.
    pub fn lifted(&self) -> (bool, bool) {
        let lifted = |key| quantity(&self.from, key) > 0 && quantity(&self.to, key) == 0;
        (lifted("limits.cpu"), lifted("limits.memory"))
    }
}

/// What has to change for the running containers of a pod to have what was allocated. `actuated` is what
/// they had when the runtime was told last; a container that it does not name has what was allocated.
/// Upstream: `computePodResizeAction`.
pub fn changes(allocated_pod: &Pod, actuated: &Allocations, running: &[&str]) -> Vec<Change> {
    resizable(allocated_pod)
        .filter(|c| running.contains(&c.name.as_str()))
        .filter_map(|container| {
            let from = actuated.get(&container.name)?;
            let to = only_resizable(&allocation_of(container));
            let changed = |r: &(&str, &str)| differs(from, &to, *r);
            let restart = RESIZABLE
                .iter()
                .filter(|r| changed(r))
                .any(|(name, _)| restarts_for(container, name));
            RESIZABLE.iter().any(changed).then(|| Change {
                name: container.name.clone(),
                from: from.clone(),
                to,
                restart,
            })
        })
        .collect()
}

/// Whether `resizePolicy` asks for a restart when this resource changes.
fn restarts_for(container: &Container, resource: &str) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|p| p.resource_name == resource && p.restart_policy == "RestartContainer")
}

/// What a status says. `admitted` is the allocation on record.
pub fn view(
    pod: &Pod,
    admitted: &Allocations,
    record: Option<&ResizeRecord>,
    pending: Option<&PendingRecord>,
    running: &[&str],
) -> ResizeView {
    let allocations = allocated(pod, admitted);
    let actuated = record.map(|r| &r.actuated);
    let mut view = ResizeView {
        pending: pending.map(|p| (p.reason.clone(), p.message.clone())),
        ..ResizeView::default()
    };
    let mut in_progress = false;
    for container in resizable(pod) {
        let Some(of) = allocations.get(&container.name) else {
            continue;
        };
        let actual = actuated.and_then(|a| a.get(&container.name)).unwrap_or(of);
        in_progress |= running.contains(&container.name.as_str()) && !same(of, actual);
        view.containers
            .insert(container.name.clone(), of_container(container, of, actual));
    }
    if in_progress {
        let error = record.and_then(|r| r.error.clone());
        view.in_progress = Some(match error {
            Some(message) => (ERROR.to_owned(), message),
            None => (String::new(), String::new()),
        });
    }
    view
}

fn of_container(container: &Container, of: &Allocation, actual: &Allocation) -> ResourceView {
    let mut resources = container.resources.clone().unwrap_or_default();
    resources.claims = None;
    for (name, limit_key) in RESIZABLE {
        set(&mut resources.requests, name, actual.get(name));
        let limit = Some(limit_key).filter(|key| quantity(actual, key) != 0);
        set(
            &mut resources.limits,
            name,
            limit.and_then(|k| actual.get(k)),
        );
    }
    resources.requests = resources.requests.filter(|r| !r.is_empty());
    resources.limits = resources.limits.filter(|l| !l.is_empty());
    let mut allocated = container
        .resources
        .as_ref()
        .and_then(|r| r.requests.clone());
    for (name, _) in RESIZABLE {
        set(&mut allocated, name, of.get(name));
    }
    ResourceView {
        allocated: allocated.filter(|a| !a.is_empty()),
        actual: (resources != ResourceRequirements::default()).then_some(resources),
    }
}

#[cfg(test)]
mod tests;

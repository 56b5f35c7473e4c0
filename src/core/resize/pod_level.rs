//! Resources of a pod as a whole: `spec.resources`. Upstream: `InPlacePodLevelResourcesVerticalScaling`.
//!
//! A container without a limit of its own is made with its pod's. What the runtime was told of such a container is
//! recorded with that limit under keys of its own, so that a resize of the pod finds which containers still have the
//! previous one.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};

use super::{
    Allocation, Allocations, RESIZABLE, allocated, allocation_of, is_unconfirmed, of_resources,
    only_resizable, quantity, resizable, same, set_resizable,
};
use crate::core::resources::has_pod_level;
use crate::types::PodExt;

/// Name under which an allocation has the pod as a whole; no container has it.
pub const POD: &str = "";

/// Returns the key under which a container without a limit of its own has its pod's.
pub(super) fn inherited(limit_key: &str) -> &'static str {
    match limit_key {
        "limits.cpu" => "pod.limits.cpu",
        _ => "pod.limits.memory",
    }
}

/// Returns the resources to allocate to the pod as a whole by its spec; empty when it says nothing that counts.
pub fn allocation_of_pod(pod: &Pod) -> Allocation {
    match has_pod_level(pod) {
        true => of_resources(pod.spec_ref().resources.as_ref()),
        false => Allocation::new(),
    }
}

/// Returns whether a pod as a whole wants or has something else than it has in these allocations. What they do not
/// name does not differ.
pub fn pod_changes(pod: &Pod, allocations: &Allocations) -> bool {
    let of = allocations.get(POD);
    of.is_some_and(|of| !same(of, &allocation_of_pod(pod)))
}

/// Returns whether the pod's cgroup may have other limits than those that are recorded.
pub fn is_pod_unconfirmed(actuated: &Allocations) -> bool {
    actuated.get(POD).is_some_and(is_unconfirmed)
}

/// Returns whether an admission records what the pod as a whole has. Those that were made before pods could be resized
/// as a whole do not.
pub fn is_complete(record: &Allocations) -> bool {
    record.contains_key(POD)
}

/// Adds to an own allocation the limits of the pod where the container has none.
pub(super) fn as_made(own: &Allocation, of_pod: &Allocation) -> Allocation {
    let mut made = only_resizable(own);
    for (_, key) in RESIZABLE {
        let limit = of_pod.get(key).filter(|_| quantity(of_pod, key) != 0);
        if let Some(limit) = limit.filter(|_| quantity(own, key) == 0) {
            made.insert(inherited(key).to_owned(), limit.clone());
        }
    }
    made
}

/// Returns what a container of this pod is made with.
pub fn made_with(pod: &Pod, container: &Container) -> Allocation {
    as_made(&allocation_of(container), &allocation_of_pod(pod))
}

/// Returns what runs with these allocations has been told, for the record that a first resize makes.
pub fn before(pod: &Pod, record: &Allocations) -> Allocations {
    let mut all = allocated(pod, record);
    let of_pod = all.get(POD).cloned().unwrap_or_default();
    for container in resizable(pod) {
        if let Some(of) = all.get_mut(&container.name) {
            *of = as_made(of, &of_pod);
        }
    }
    all
}

/// Gives a pod as a whole what is allocated to it.
pub(super) fn set(spec: &mut PodSpec, of: &Allocation) {
    let resources = spec.resources.get_or_insert_default();
    set_resizable(resources, of);
    resources.requests = resources.requests.take().filter(|r| !r.is_empty());
    resources.limits = resources.limits.take().filter(|l| !l.is_empty());
    if *resources == ResourceRequirements::default() {
        spec.resources = None;
    }
}

#[cfg(test)]
mod tests;

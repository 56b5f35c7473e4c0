//! Sum of the resources that the containers of a pod ask for, and of their limits; upstream's `PodRequests` and
//! `PodLimits` of `component-helpers/resource`.
//!
//! The input is a pod spec. The output is amounts in billionths by resource. A quantity that the API server accepted
//! parses; one that does not parse counts as no request.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::types::quantity::nanos;
use crate::types::{PodExt, containers};

/// Billionths in a unit.
pub const NANOS: i128 = 1_000_000_000;

#[cfg(test)]
thread_local! {
    /// Number of times that this thread has summed up the requests of a pod.
    pub(crate) static SUMS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Billionths by resource.
pub type Amounts = BTreeMap<String, i128>;

/// Returns whether a pod as a whole may ask for it; upstream's `IsSupportedPodLevelResource`.
pub fn is_pod_level(name: &str) -> bool {
    ["cpu", "memory"].contains(&name) || is_huge_page(name)
}

/// Returns whether it is `hugepages-<size>`.
pub fn is_huge_page(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// Returns whether the name stands for a device class without an extended resource; upstream's `ResourceDeviceClassPrefix`.
pub fn is_device_class(name: &str) -> bool {
    name.starts_with("deviceclass.resource.kubernetes.io/")
}

/// Returns whether a container (`None`: any) has an extended resource by the ResourceClaim that the scheduler made for the pod.
/// Then no device plugin gets a request for it, and the node need not show it. Upstream: `isDRAExtendedResource`.
pub fn is_by_claim(pod: &Pod, container: Option<&str>, resource: &str) -> bool {
    let status = pod.status.as_ref();
    let claim = status.and_then(|s| s.extended_resource_claim_status.as_ref());
    let mut mappings = claim.into_iter().flat_map(|of| &of.request_mappings);
    mappings.any(|of| {
        of.resource_name == resource && container.is_none_or(|name| of.container_name == name)
    })
}

/// Requests, and limits where no request is given.
pub fn requests(resources: &ResourceRequirements) -> Amounts {
    let limits = resources.limits.iter().flatten();
    let requests = resources.requests.iter().flatten();
    limits
        .chain(requests)
        .map(|(name, quantity)| (name.clone(), amount(quantity)))
        .collect()
}

/// Limits as they are given.
pub fn limits(resources: &ResourceRequirements) -> Amounts {
    let limits = resources.limits.iter().flatten();
    limits.map(|(name, q)| (name.clone(), amount(q))).collect()
}

/// [`requests`] of a container.
pub fn container_requests(container: &Container) -> Amounts {
    let resources = container.resources.as_ref();
    resources.map(requests).unwrap_or_default()
}

/// [`limits`] of a container.
pub fn container_limits(container: &Container) -> Amounts {
    container.resources.as_ref().map(limits).unwrap_or_default()
}

/// Returns whether `spec.resources` has anything that counts; upstream's `IsPodLevelResourcesSet`.
pub fn has_pod_level(pod: &Pod) -> bool {
    pod.spec_ref().resources.as_ref().is_some_and(|r| {
        let mut names = r.limits.iter().flatten().chain(r.requests.iter().flatten());
        names.any(|(name, _)| is_pod_level(name))
    })
}

/// Requests of the pod as a whole with what upstream's `defaultPodRequests` adds: where only a limit is
/// given, what the containers ask for together, else the limit.
pub fn pod_level_requests(pod: &Pod) -> Amounts {
    let Some(resources) = &pod.spec_ref().resources else {
        return Amounts::new();
    };
    let given = resources.requests.iter().flatten();
    let mut requests: Amounts = given
        .filter(|(name, _)| is_pod_level(name))
        .map(|(name, q)| (name.clone(), amount(q)))
        .collect();
    let limits = pod_level_limits(pod);
    if limits.is_empty() {
        return requests;
    }
    for (name, sum) in aggregate(pod, container_requests) {
        if ["cpu", "memory"].contains(&name.as_str()) {
            requests.entry(name).or_insert(sum);
        }
    }
    for (name, limit) in limits {
        requests.entry(name).or_insert(limit);
    }
    requests
}

/// Limits of the pod as a whole.
pub fn pod_level_limits(pod: &Pod) -> Amounts {
    let resources = pod.spec_ref().resources.as_ref();
    let mut found = resources.map(limits).unwrap_or_default();
    found.retain(|name, _| is_pod_level(name));
    found
}

/// Returns the requests of a pod: the larger of its containers together and of each init container with the sidecars
/// that run by then, plus its overhead. Requests of the pod as a whole replace those of its containers. Upstream:
/// `resource.PodRequests`.
pub fn pod_requests(pod: &Pod) -> Amounts {
    #[cfg(test)]
    SUMS.set(SUMS.get() + 1);
    let mut total = requests_without_overhead(pod);
    add(&mut total, &overhead(pod));
    total
}

/// [`pod_requests`] without `spec.overhead`.
pub fn requests_without_overhead(pod: &Pod) -> Amounts {
    let mut total = aggregate(pod, container_requests);
    total.extend(pod_level_requests(pod));
    total
}

/// Returns the limits of a pod, by the rule of [`pod_requests`]; overhead is added to existing limits. A resource that
/// one container does not limit is missing, unless the pod as a whole limits it. Upstream: `resource.PodLimits` as
/// `ResourceConfigForPod` uses it.
pub fn pod_limits(pod: &Pod) -> Amounts {
    let mut total = limits_without_overhead(pod);
    for (name, more) in overhead(pod) {
        if let Some(limit) = total.get_mut(&name).filter(|l| **l > 0) {
            *limit += more;
        }
    }
    total
}

/// [`pod_limits`] without `spec.overhead`.
pub fn limits_without_overhead(pod: &Pod) -> Amounts {
    let mut total = aggregate(pod, container_limits);
    let all = || pod.init_containers().iter().chain(pod.containers());
    total.retain(|name, _| {
        all().all(|c| {
            container_limits(c)
                .get(name)
                .is_some_and(|limit| *limit > 0)
        })
    });
    total.extend(pod_level_limits(pod));
    total
}

/// Sum of the `ephemeral-storage` limits of all containers, for the eviction of a pod that uses more; `None`
/// when none has one. Upstream: `resource.PodLimits` as `podEphemeralStorageLimitEviction` uses it.
pub fn ephemeral_storage_limit(pod: &Pod) -> Option<i128> {
    let total = aggregate(pod, container_limits);
    let mut limit = total.get("ephemeral-storage").copied().unwrap_or(0);
    if limit <= 0 {
        return None;
    }
    limit += overhead(pod).get("ephemeral-storage").unwrap_or(&0);
    Some(limit)
}

/// `spec.overhead`.
pub fn overhead(pod: &Pod) -> Amounts {
    let overhead = pod.spec_ref().overhead.iter().flatten();
    overhead.map(|(k, q)| (k.clone(), amount(q))).collect()
}

/// The larger of main containers with sidecars and of each init container with the sidecars before it.
pub fn aggregate(pod: &Pod, of: impl Fn(&Container) -> Amounts) -> Amounts {
    let mut total = Amounts::new();
    for container in pod.containers() {
        add(&mut total, &of(container));
    }
    let mut sidecars = Amounts::new();
    let mut at_start = Amounts::new();
    for container in pod.init_containers() {
        let mut here = of(container);
        if containers::is_sidecar(container) {
            add(&mut sidecars, &here);
            raise(&mut at_start, &sidecars);
        } else {
            add(&mut here, &sidecars);
            raise(&mut at_start, &here);
        }
    }
    add(&mut total, &sidecars);
    raise(&mut total, &at_start);
    total
}

/// Billionths; zero of what does not parse.
pub fn amount(Quantity(text): &Quantity) -> i128 {
    nanos(text).unwrap_or(0)
}

/// Adds amounts by resource.
pub fn add(to: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let entry = to.entry(name.clone()).or_default();
        *entry = entry.saturating_add(*amount);
    }
}

/// Takes amounts back by resource.
pub fn subtract(from: &mut Amounts, less: &Amounts) {
    for (name, amount) in less {
        let entry = from.entry(name.clone()).or_default();
        *entry = entry.saturating_sub(*amount);
    }
}

fn raise(to: &mut Amounts, floor: &Amounts) {
    for (name, amount) in floor {
        let entry = to.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

#[cfg(test)]
mod tests;

//! What pods ask for and what the node has left; upstream's `resource.PodRequests` and `noderesources.Fits`.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::{Container, Node, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::types::PodExt;
use crate::types::quantity::nanos;

const NANOS: i128 = 1_000_000_000;
/// The resource that every pod asks one of.
pub(super) const PODS: &str = "pods";
/// Resources of every node, in the order in which a lack of them is reported.
const NATIVE: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// Billionths by resource.
pub(super) type Amounts = BTreeMap<String, i128>;

/// A resource of which the node has too little left. Amounts are in billionths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Insufficient {
    pub(super) resource: String,
    pub(super) requested: i128,
    pub(super) used: i128,
    pub(super) capacity: i128,
}

impl Insufficient {
    pub(super) fn reason(&self) -> String {
        format!("OutOf{}", self.resource)
    }

    /// How much is missing; upstream's `GetInsufficientAmount`.
    pub(super) fn missing(&self) -> i128 {
        self.requested - (self.capacity - self.used)
    }
}

impl fmt::Display for Insufficient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |amount| shown(&self.resource, amount);
        write!(
            f,
            "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
            self.resource,
            shown(self.requested),
            shown(self.used),
            shown(self.capacity)
        )
    }
}

/// An amount as upstream's messages have it: CPU in thousandths, the rest in whole units, rounded up.
pub(super) fn shown(resource: &str, amount: i128) -> i128 {
    let unit = if resource == "cpu" {
        NANOS / 1000
    } else {
        NANOS
    };
    amount.div_euclid(unit) + i128::from(amount.rem_euclid(unit) != 0)
}

/// What the node lacks for `pod` beside `others`, the number of pods first. A resource that the node does
/// not have and that is none of its own is not checked: upstream's `removeMissingExtendedResources`.
pub(super) fn insufficient(
    pod: &Pod,
    others: &[&Pod],
    node: &Node,
    max_pods: usize,
) -> Vec<Insufficient> {
    let mut lacking = Vec::new();
    if others.len() >= max_pods {
        let count = |n: usize| i128::try_from(n).unwrap_or(i128::MAX / NANOS) * NANOS;
        lacking.push(Insufficient {
            resource: PODS.to_owned(),
            requested: NANOS,
            used: count(others.len()),
            capacity: count(max_pods),
        });
    }
    let Some(allocatable) = node
        .status
        .as_ref()
        .and_then(|s| s.allocatable.as_ref())
        .filter(|a| !a.is_empty())
    else {
        return lacking;
    };
    let requests = pod_requests(pod);
    let wanted: Vec<(&String, i128)> = in_order(&requests)
        .filter(|(name, amount)| *amount > 0 && name.as_str() != PODS)
        .filter(|(name, _)| allocatable.contains_key(*name) || is_native(name))
        .collect();
    if wanted.is_empty() {
        return lacking;
    }
    let mut used = Amounts::new();
    for other in others {
        add(&mut used, &pod_requests(other));
    }
    for (name, requested) in wanted {
        let capacity = allocatable.get(name).map_or(0, amount);
        let used = used.get(name).copied().unwrap_or(0);
        if requested > capacity - used {
            lacking.push(Insufficient {
                resource: name.clone(),
                requested,
                used,
                capacity,
            });
        }
    }
    lacking
}

/// What a pod asks for: the larger of its containers together and of each init container with the sidecars
/// that run by then, plus its overhead. Requests of the pod as a whole replace those of its containers.
/// Upstream: `resource.PodRequests`.
pub(super) fn pod_requests(pod: &Pod) -> Amounts {
    let spec = pod.spec_ref();
    let mut total = Amounts::new();
    for container in pod.containers() {
        add(&mut total, &container_requests(container));
    }
    let mut sidecars = Amounts::new();
    let mut at_start = Amounts::new();
    for container in spec.init_containers.iter().flatten() {
        let mut here = container_requests(container);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut sidecars, &here);
            raise(&mut at_start, &sidecars);
        } else {
            add(&mut here, &sidecars);
            raise(&mut at_start, &here);
        }
    }
    add(&mut total, &sidecars);
    raise(&mut total, &at_start);
    if let Some(resources) = &spec.resources {
        for (name, amount) in requests(resources) {
            if ["cpu", "memory"].contains(&name.as_str()) || name.starts_with("hugepages-") {
                total.insert(name, amount);
            }
        }
    }
    if let Some(overhead) = &spec.overhead {
        let overhead = overhead.iter().map(|(k, v)| (k.clone(), amount(v)));
        add(&mut total, &overhead.collect());
    }
    total
}

fn container_requests(container: &Container) -> Amounts {
    container
        .resources
        .as_ref()
        .map(requests)
        .unwrap_or_default()
}

/// Requests, and limits where no request is given.
fn requests(resources: &ResourceRequirements) -> Amounts {
    let limits = resources.limits.iter().flatten();
    let requests = resources.requests.iter().flatten();
    limits
        .chain(requests)
        .map(|(name, quantity)| (name.clone(), amount(quantity)))
        .collect()
}

/// What the API server accepted parses; what does not asks for nothing.
fn amount(Quantity(text): &Quantity) -> i128 {
    nanos(text).unwrap_or(0)
}

fn add(to: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *to.entry(name.clone()).or_default() += amount;
    }
}

fn raise(to: &mut Amounts, floor: &Amounts) {
    for (name, amount) in floor {
        let entry = to.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

fn is_native(name: &str) -> bool {
    NATIVE.contains(&name) || name.starts_with("hugepages-")
}

fn in_order(amounts: &Amounts) -> impl Iterator<Item = (&String, i128)> {
    let native = NATIVE.iter().filter_map(|n| amounts.get_key_value(*n));
    let rest = amounts
        .iter()
        .filter(|(name, _)| !NATIVE.contains(&name.as_str()));
    native.chain(rest).map(|(name, amount)| (name, *amount))
}

//! Resources of a pod and their resizing, as its status shows them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    Allocation, Allocations, ERROR, POD, PendingRecord, RESIZABLE, ResizeRecord, allocated,
    made_with, only_resizable, pod_changes, resizable, same, set, set_resizable, with_allocation,
};
use crate::core::resources::{self, Amounts, NANOS, is_pod_level};
use crate::types::quantity::of_bytes;

/// Resources of one container or of the pod as a whole, for the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResourceView {
    /// Requests that the node has allocated: `allocatedResources`.
    pub allocated: Option<BTreeMap<String, Quantity>>,
    /// Actuated requests and limits: `resources`.
    pub actual: Option<ResourceRequirements>,
}

/// Resizing of one pod, for its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResizeView {
    /// Resources of containers by name.
    pub containers: BTreeMap<String, ResourceView>,
    /// Resources of the pod as a whole: its own, or those of its containers together.
    pub pod: ResourceView,
    /// Reason and message of condition `PodResizePending`, when it holds.
    pub pending: Option<(String, String)>,
    /// Reason and message of condition `PodResizeInProgress`, when it holds.
    pub in_progress: Option<(String, String)>,
}

/// Returns what a status shows. `admitted` is the stored allocation.
pub fn view(
    pod: &Pod,
    admitted: &Allocations,
    record: Option<&ResizeRecord>,
    pending: Option<&PendingRecord>,
    running: &[&str],
) -> ResizeView {
    let allocations = allocated(pod, admitted);
    let given = with_allocation(pod, &allocations);
    let given = given.as_ref().unwrap_or(pod);
    let actuated = record.map(|r| &r.actuated);
    let knows_pod = actuated.is_some_and(|a| a.contains_key(POD));
    let mut in_progress = actuated.is_some_and(|a| pod_changes(given, a));
    let mut view = ResizeView {
        pending: pending.map(|p| (p.reason.clone(), p.message.clone())),
        ..ResizeView::default()
    };
    let mut in_force = allocations.clone();
    if let Some(of) = actuated.and_then(|a| a.get(POD)) {
        in_force.insert(POD.to_owned(), of.clone());
    }
    for (container, made) in resizable(pod).zip(resizable(given)) {
        let Some(of) = allocations.get(&container.name) else {
            continue;
        };
        let told = actuated.and_then(|a| a.get(&container.name));
        let actual = told.unwrap_or(of);
        if running.contains(&container.name.as_str()) {
            // What was recorded before pods could be resized as a whole has a limit of the pod only where the container
            // was started since.
            in_progress |= match told {
                Some(told) if knows_pod => !same(&made_with(given, made), told),
                _ => !same(of, &only_resizable(actual)),
            };
            in_force.insert(container.name.clone(), only_resizable(actual));
        }
        view.containers
            .insert(container.name.clone(), of_container(container, of, actual));
    }
    view.pod = of_pod(pod, given, &in_force);
    if in_progress {
        let error = record.and_then(|r| r.error.clone());
        view.in_progress = Some(match error {
            Some(message) => (ERROR.to_owned(), message),
            None => (String::new(), String::new()),
        });
    }
    view
}

/// A limit that is the pod's is not shown with the container.
fn of_container(container: &Container, of: &Allocation, actual: &Allocation) -> ResourceView {
    let mut resources = container.resources.clone().unwrap_or_default();
    resources.claims = None;
    set_resizable(&mut resources, actual);
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

/// Returns the sums of the pod. Upstream: `convertToAPIPodLevelResourcesStatus`, which reads cgroups instead.
fn of_pod(pod: &Pod, given: &Pod, in_force: &Allocations) -> ResourceView {
    let changed = with_allocation(pod, in_force);
    let actual = changed.as_ref().unwrap_or(pod);
    let resources = ResourceRequirements {
        requests: quantities(&resources::pod_requests(actual)),
        limits: quantities(&resources::pod_limits(actual)),
        claims: None,
    };
    ResourceView {
        allocated: quantities(&resources::pod_requests(given)),
        actual: (resources != ResourceRequirements::default()).then_some(resources),
    }
}

fn quantities(amounts: &Amounts) -> Option<BTreeMap<String, Quantity>> {
    let counted = amounts
        .iter()
        .filter(|(name, amount)| is_pod_level(name) && **amount > 0);
    let shown: BTreeMap<_, _> = counted
        .map(|(name, amount)| (name.clone(), Quantity(text(name, *amount))))
        .collect();
    Some(shown).filter(|shown| !shown.is_empty())
}

/// Writes an amount as the API server does: CPU in whole cores or thousandths, the rest in bytes.
fn text(name: &str, nanos: i128) -> String {
    let up = |unit: i128| nanos.div_euclid(unit) + i128::from(nanos.rem_euclid(unit) != 0);
    match name {
        "cpu" if nanos.rem_euclid(NANOS) == 0 => (nanos / NANOS).to_string(),
        "cpu" => format!("{}m", up(NANOS / 1000)),
        _ => of_bytes(u64::try_from(up(NANOS)).unwrap_or(u64::MAX)),
    }
}

//! Requests and limits of pods and containers.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::super::Problems;
use super::names::{is_qualified_name, one_of};
use crate::types::quantity::nanos;

const OF_CONTAINERS: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
const OF_PODS: [&str; 2] = ["cpu", "memory"];
const HUGE: &str = "hugepages-";
const ONE: i128 = 1_000_000_000;

type Amounts = BTreeMap<String, i128>;

/// `spec.resources`, and what containers have beside it.
pub(super) fn pod(spec: &PodSpec, problems: &mut Problems<'_>) {
    let Some(resources) = &spec.resources else {
        return;
    };
    let path = "spec.resources";
    let (requests, limits) = amounts(resources, path, &OF_PODS, problems);
    let mut sums = Amounts::new();
    for (index, container) in spec.containers.iter().enumerate() {
        let Some(own) = &container.resources else {
            continue;
        };
        for (name, amount) in own.requests.iter().flatten() {
            let sum = sums.entry(name.clone()).or_default();
            *sum = sum.saturating_add(nanos(&amount.0).unwrap_or(0));
        }
        for (name, amount) in own.limits.iter().flatten() {
            let own = nanos(&amount.0).unwrap_or(0);
            if limits.get(name).is_some_and(|limit| own > *limit) {
                problems.add(
                    format!("spec.containers[{index}].resources.limits[{name}]"),
                    format!("{} is more than the pod's {path}.limits[{name}]", amount.0),
                );
            }
        }
    }
    for (name, request) in &requests {
        if sums.get(name).is_some_and(|sum| sum > request) {
            problems.add(
                format!("{path}.requests[{name}]"),
                "is less than what the containers request together; raise it or lower theirs",
            );
        }
    }
}

/// `resources` and `resizePolicy` of a container.
pub(super) fn container(container: &Container, path: &str, problems: &mut Problems<'_>) {
    if let Some(resources) = &container.resources {
        let path = format!("{path}.resources");
        amounts(resources, &path, &OF_CONTAINERS, problems);
    }
    let mut seen = BTreeSet::new();
    for (index, policy) in container.resize_policy.iter().flatten().enumerate() {
        let path = format!("{path}.resizePolicy[{index}]");
        let resource = policy.resource_name.as_str();
        one_of(
            &format!("{path}.resourceName"),
            Some(resource),
            &["cpu", "memory"],
            problems,
        );
        one_of(
            &format!("{path}.restartPolicy"),
            Some(&policy.restart_policy),
            &["NotRequired", "RestartContainer"],
            problems,
        );
        if !seen.insert(resource) {
            problems.add(
                format!("{path}.resourceName"),
                format!("{resource:?} is used twice; a resource has one resize policy"),
            );
        }
    }
}

/// Requests and limits, checked one by one and against each other.
fn amounts(
    resources: &ResourceRequirements,
    path: &str,
    standard: &[&str],
    problems: &mut Problems<'_>,
) -> (Amounts, Amounts) {
    let limits = read(
        resources.limits.as_ref(),
        &format!("{path}.limits"),
        standard,
        problems,
    );
    let requests = read(
        resources.requests.as_ref(),
        &format!("{path}.requests"),
        standard,
        problems,
    );
    for (name, request) in &requests {
        let field = format!("{path}.requests[{name}]");
        match limits.get(name) {
            Some(limit) if request > limit => problems.add(field, "is larger than the limit"),
            Some(limit) if !is_standard(name) && request < limit => {
                problems.add(field, "has to equal the limit; it cannot be shared");
            }
            None if !is_standard(name) => problems.add(
                field,
                format!("has no limit; set {path}.limits[{name}] to the same amount"),
            ),
            _ => {}
        }
    }
    let names = || limits.keys().chain(requests.keys());
    let huge = names().find(|name| name.starts_with(HUGE));
    if let Some(huge) = huge
        && !names().any(|name| name == "cpu" || name == "memory")
        && standard == OF_CONTAINERS
    {
        problems.add(
            format!("{path}.limits[{huge}]"),
            "needs a request or limit of cpu or memory beside it",
        );
    }
    (requests, limits)
}

/// Those that a limit may exceed the request of.
fn is_standard(name: &str) -> bool {
    OF_CONTAINERS.contains(&name)
}

fn read(
    set: Option<&BTreeMap<String, Quantity>>,
    path: &str,
    standard: &[&str],
    problems: &mut Problems<'_>,
) -> Amounts {
    let mut amounts = Amounts::new();
    for (name, amount) in set.into_iter().flatten() {
        let field = format!("{path}[{name}]");
        let Some(nanos) = quantity(&amount.0, &field, problems) else {
            continue;
        };
        if let Some(size) = name.strip_prefix(HUGE) {
            huge_pages(size, nanos, &field, problems);
        } else if !standard.contains(&name.as_str()) {
            let extended = name.contains('/') && is_qualified_name(name);
            if !extended || standard != OF_CONTAINERS {
                problems.add(
                    &field,
                    format!(
                        "is not a resource here; there are {}, hugepages-<size>",
                        standard.join(", ")
                    ),
                );
                continue;
            }
            if nanos % ONE != 0 {
                problems.add(&field, "has to be a whole number");
            }
        }
        amounts.insert(name.clone(), nanos);
    }
    amounts
}

fn huge_pages(size: &str, amount: i128, field: &str, problems: &mut Problems<'_>) {
    match crate::types::quantity::nanos(size) {
        Ok(page) if page > 0 => {
            if amount % page != 0 {
                problems.add(
                    field,
                    format!("has to be a multiple of the page size {size}"),
                );
            }
        }
        _ => problems.add(
            field,
            format!("{size:?} is not a page size; write hugepages-2Mi or hugepages-1Gi"),
        ),
    }
}

pub(super) fn quantity(text: &str, path: &str, problems: &mut Problems<'_>) -> Option<i128> {
    match nanos(text).ok() {
        Some(amount) if amount < 0 => {
            problems.add(path, format!("{text:?} is negative"));
            None
        }
        None => {
            problems.add(
                path,
                format!("{text:?} is not a quantity; write a number with an optional suffix, like 100m, 64Mi, 2G"),
            );
            None
        }
        amount => amount,
    }
}

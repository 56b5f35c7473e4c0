//! Nodes. Upstream: `ValidateNode` and `ValidateNodeUpdate`, by `nodeStrategy` and `nodeStatusStrategy`.

use std::collections::BTreeSet;

use serde_json::Value;

use super::formats::{
    cidr, dns_subdomain, entries, is_dual_stack, is_set, is_whole, items, label_value,
    qualified_name, quantity, text,
};
use super::metadata;
use super::violation::Violations;

/// A node that registers. Its status is looked at, too.
pub(super) fn create(node: &Value, found: &mut Violations) {
    metadata::create(node, false, dns_subdomain, found);
    whole(node, found);
}

/// A write of the main resource, which looks at the status that is there: what was taken with the status may be refused
/// here.
pub(super) fn update(old: &Value, new: &Value, found: &mut Violations) {
    metadata::update(old, new, found);
    whole(new, found);
    change(old, new, found);
}

/// A write of the status. The swap is not looked at.
pub(super) fn status(old: &Value, new: &Value, found: &mut Violations) {
    metadata::update(old, new, found);
    taints(&new["spec"]["taints"], found);
    resources(&new["status"], found);
    declared_features(&new["status"]["declaredFeatures"], found);
    change(old, new, found);
}

fn whole(node: &Value, found: &mut Violations) {
    taints(&node["spec"]["taints"], found);
    resources(&node["status"], found);
    swap(&node["status"]["nodeInfo"]["swap"], found);
    declared_features(&node["status"]["declaredFeatures"], found);
    pod_cidrs(&node["spec"]["podCIDRs"], found);
}

fn change(old: &Value, new: &Value, found: &mut Violations) {
    let addresses = items(&new["status"]["addresses"]);
    for (index, address) in addresses.iter().enumerate() {
        if addresses[..index].contains(address) {
            found.duplicate(format!("status.addresses[{index}]"), address);
        }
    }
    for (name, why) in [
        (
            "podCIDRs",
            "node updates may not change podCIDR except from \"\" to valid",
        ),
        (
            "providerID",
            "node updates may not change providerID except from \"\" to valid",
        ),
    ] {
        let (had, has) = (&old["spec"][name], &new["spec"][name]);
        if is_set(had) && had != has {
            found.forbidden(format!("spec.{name}"), why);
        }
    }
    if text(&old["spec"]["externalID"]) != text(&new["spec"]["externalID"]) {
        found.forbidden("spec.externalID", "may not be updated");
    }
}

/// `validateNodeTaints`.
fn taints(taints: &Value, found: &mut Violations) {
    let mut known = BTreeSet::new();
    for (index, taint) in items(taints).iter().enumerate() {
        let field = format!("metadata.taints[{index}]");
        let (key, effect) = (text(&taint["key"]), text(&taint["effect"]));
        found.format(&format!("{field}.key"), &taint["key"], qualified_name(key));
        let says = label_value(text(&taint["value"]));
        found.format(&format!("{field}.value"), &taint["value"], says);
        const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
        if effect.is_empty() {
            found.required(format!("{field}.effect"), "");
        } else if !EFFECTS.contains(&effect) {
            found.not_supported(format!("{field}.effect"), &taint["effect"], &EFFECTS);
        }
        if !known.insert((key, effect)) {
            found.duplicate(field, taint);
        }
    }
}

/// `ValidateNodeResources`.
fn resources(status: &Value, found: &mut Violations) {
    for list in ["capacity", "allocatable"] {
        for (name, value) in entries(&status[list]) {
            let field = format!("status.{list}.{name}");
            let Some(nanos) = quantity(text(value)) else {
                found.invalid(field, value, "quantities must match the regular expression");
                continue;
            };
            if nanos < 0 {
                found.invalid(&field, value, "must be greater than or equal to 0");
            }
            if is_integer(name) && !is_whole(nanos) {
                found.invalid(field, value, "must be an integer");
            }
        }
    }
}

/// `IsIntegerResourceName`: `pods`, the counts of quotas, and extended resources.
fn is_integer(name: &str) -> bool {
    const COUNTS: [&str; 9] = [
        "pods",
        "services",
        "replicationcontrollers",
        "resourcequotas",
        "secrets",
        "configmaps",
        "persistentvolumeclaims",
        "services.nodeports",
        "services.loadbalancers",
    ];
    let native = !name.contains('/') || name.contains("kubernetes.io/");
    COUNTS.contains(&name) || !native && !name.starts_with("requests.")
}

/// `validateNodeSwapStatus`, whose path upstream has wrong.
fn swap(swap: &Value, found: &mut Violations) {
    let capacity = &swap["capacity"];
    if capacity.as_i64().is_some_and(|bytes| bytes <= 0) {
        let field = "metadata.nodeSwapStatus.capacity";
        found.invalid(field, capacity, "must be greater than zero");
    }
}

/// `validateNodeDeclaredFeatures`: names in ascending order, each once.
fn declared_features(features: &Value, found: &mut Violations) {
    const FIELD: &str = "status.declaredFeatures";
    let features = items(features);
    for (index, feature) in features.iter().enumerate() {
        let name = text(feature);
        let is_part = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphabetic())
                && part.chars().all(|c| c.is_ascii_alphanumeric())
        };
        let is_name = name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.split('/').all(is_part)
            && name.len() <= 253;
        if !is_name {
            let why = "must start with an UpperCamelCase segment, with subsequent segments separated by '/', and contain \
                       only alphanumeric characters and slashes";
            found.invalid(format!("{FIELD}[{index}]"), feature, why);
        }
        let Some(before) = index.checked_sub(1).map(|before| text(&features[before])) else {
            continue;
        };
        if before == name {
            found.duplicate(format!("{FIELD}[{index}]"), feature);
        } else if before > name {
            let why = "list must be sorted alphabetically";
            found.invalid(format!("{FIELD}[{index}]"), feature, why);
        }
    }
}

fn pod_cidrs(cidrs: &Value, found: &mut Violations) {
    let all = items(cidrs);
    for (index, value) in all.iter().enumerate() {
        let says = cidr(text(value));
        found.format(&format!("spec.podCIDRs[{index}]"), value, says);
    }
    if !is_dual_stack(all.iter().map(text)) {
        let why = "may specify no more than one CIDR for each IP family";
        found.invalid("spec.podCIDRs", cidrs, why);
    }
}

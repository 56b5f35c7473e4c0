//! The status of claims. Upstream: `ValidatePersistentVolumeClaimStatusUpdate`.

use serde_json::Value;

use super::formats::{entries, is_set, qualified_name, quantity, text};
use super::metadata;
use super::violation::Violations;

/// Where a resize stands.
const RESIZES: [&str; 5] = [
    "ControllerResizeInProgress",
    "ControllerResizeInfeasible",
    "NodeResizeInProgress",
    "NodeResizeInfeasible",
    "NodeResizePending",
];

/// A status that is written over another one.
pub(super) fn status(old: &Value, new: &Value, found: &mut Violations) {
    metadata::update(old, new, found);
    if !is_set(&new["spec"]["accessModes"]) {
        found.required("Spec.accessModes", "");
    }
    let status = &new["status"];
    for (name, value) in entries(&status["capacity"]) {
        amount(&format!("status.capacity[{name}]"), value, found);
    }
    for (name, value) in entries(&status["allocatedResourceStatuses"]) {
        const FIELD: &str = "status.allocatedResourceStatuses";
        key(FIELD, name, found);
        if !RESIZES.contains(&text(value)) {
            found.not_supported(FIELD, value, &RESIZES);
        }
    }
    for (name, value) in entries(&status["allocatedResources"]) {
        key("status.allocatedResources", name, found);
        let field = format!("status.allocatedResources[{name}]");
        amount(&field, value, found);
    }
}

/// `validatePersistentVolumeClaimResourceKey`.
fn key(field: &str, name: &str, found: &mut Violations) {
    let shown = Value::String(name.to_owned());
    if let Some(why) = qualified_name(name) {
        found.invalid(field, &shown, why);
    } else if name != "storage" && (!name.contains('/') || name.contains("kubernetes.io/")) {
        found.not_supported(field, &shown, &["storage"]);
    }
}

/// `validateBasicResource`.
fn amount(field: &str, value: &Value, found: &mut Violations) {
    match quantity(text(value)) {
        None => found.invalid(field, value, "quantities must match the regular expression"),
        Some(amount) if amount < 0 => {
            found.invalid(field, value, "must be a valid resource quantity");
        }
        Some(_) => {}
    }
}

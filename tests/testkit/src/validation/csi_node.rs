//! CSINodes. Upstream: `ValidateCSINode`, `ValidateCSINodeUpdate`.

use std::collections::BTreeSet;

use serde_json::Value;

use super::formats::{dns_subdomain, items, qualified_name, text};
use super::metadata;
use super::violation::Violations;

/// Most bytes of `nodeID`.
const NODE_ID: usize = 256;

/// A CSINode that is created.
pub(super) fn create(object: &Value, found: &mut Violations) {
    metadata::create(object, false, dns_subdomain, found);
    drivers(&object["spec"]["drivers"], found);
}

/// A CSINode that is written again. What a driver says may not change, but for its count of volumes.
pub(super) fn update(old: &Value, new: &Value, found: &mut Violations) {
    create(new, found);
    let fixed = |driver: &Value| {
        let mut driver = driver.clone();
        if let Value::Object(fields) = &mut driver {
            fields.shift_remove("allocatable");
        }
        driver
    };
    for before in items(&old["spec"]["drivers"]) {
        let drivers = items(&new["spec"]["drivers"]).iter();
        for now in drivers.filter(|now| now["name"] == before["name"]) {
            found.immutable("spec.drivers", &fixed(before), &fixed(now));
        }
    }
}

fn drivers(drivers: &Value, found: &mut Violations) {
    let mut names = BTreeSet::new();
    for (index, driver) in items(drivers).iter().enumerate() {
        let field = format!("spec.drivers[{index}]");
        let name = text(&driver["name"]);
        found.format(
            &format!("{field}.name"),
            &driver["name"],
            dns_subdomain(name),
        );
        if !names.insert(name) {
            found.duplicate(format!("{field}.name"), &driver["name"]);
        }
        let id = text(&driver["nodeID"]);
        if id.is_empty() {
            found.required(format!("{field}.nodeID"), "");
        } else if id.len() > NODE_ID {
            let why = format!("must be {NODE_ID} characters or less");
            found.invalid(format!("{field}.nodeID"), &driver["nodeID"], why);
        }
        let count = &driver["allocatable"]["count"];
        if count.as_i64().is_some_and(|count| count < 0) {
            let why = "must be greater than or equal to 0";
            found.invalid(format!("{field}.allocatable.count"), count, why);
        }
        let mut keys = BTreeSet::new();
        for key in items(&driver["topologyKeys"]) {
            if text(key).is_empty() {
                found.required(&field, "");
            }
            if !keys.insert(text(key)) {
                found.duplicate(&field, key);
            }
            found.format(&field, key, qualified_name(text(key)));
        }
    }
}

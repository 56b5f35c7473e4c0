//! Metadata of every object. Upstream: `ValidateObjectMetaAccessor` and its like for updates.

use serde_json::Value;

use super::formats::{dns_label, entries, is_set, items, label_value, qualified_name, text};
use super::violation::Violations;

/// Most bytes of all annotations together.
const ANNOTATIONS: usize = 256 * 1024;

/// What is wrong with a name, if anything.
pub(super) type NameRule = fn(&str) -> Option<String>;

/// `ValidateObjectMeta`: the metadata of an object that is created, named by the rule of its resource.
pub(super) fn create(object: &Value, namespaced: bool, name: NameRule, found: &mut Violations) {
    let metadata = &object["metadata"];
    match text(&metadata["name"]) {
        "" => found.required("metadata.name", "name or generateName is required"),
        own => found.format("metadata.name", &metadata["name"], name(own)),
    }
    let namespace = &metadata["namespace"];
    match (namespaced, is_set(namespace)) {
        (true, false) => found.required("metadata.namespace", ""),
        (true, true) => {
            found.format("metadata.namespace", namespace, dns_label(text(namespace)));
        }
        (false, true) => found.forbidden("metadata.namespace", "not allowed on this type"),
        (false, false) => {}
    }
    common(metadata, found);
    for finalizer in items(&metadata["finalizers"]) {
        let says = qualified_name(text(finalizer));
        found.format("metadata.finalizers", finalizer, says);
    }
}

/// `ValidateObjectMetaUpdate`. The server has kept name, namespace, UID and times itself.
pub(super) fn update(old: &Value, new: &Value, found: &mut Violations) {
    let (old, new) = (&old["metadata"], &new["metadata"]);
    if is_set(&old["deletionTimestamp"]) {
        let (had, has) = (items(&old["finalizers"]), items(&new["finalizers"]));
        if has.iter().any(|finalizer| !had.contains(finalizer)) {
            let why = "no new finalizers can be added if the object is being deleted";
            found.forbidden("metadata.finalizers", why);
        }
    }
    common(new, found);
}

fn common(metadata: &Value, found: &mut Violations) {
    labels("metadata.labels", &metadata["labels"], found);
    let mut size = 0;
    for (key, value) in entries(&metadata["annotations"]) {
        // Case does not matter here.
        let says = qualified_name(&key.to_lowercase());
        let shown = Value::String(key.clone());
        found.format("metadata.annotations", &shown, says);
        size += key.len() + text(value).len();
    }
    if size > ANNOTATIONS {
        found.too_long("metadata.annotations", ANNOTATIONS);
    }
    owners(&metadata["ownerReferences"], found);
}

/// `ValidateLabels`.
pub(super) fn labels(field: &str, labels: &Value, found: &mut Violations) {
    for (key, value) in entries(labels) {
        let shown = Value::String(key.clone());
        found.format(field, &shown, qualified_name(key));
        found.format(field, value, label_value(text(value)));
    }
}

/// `ValidateOwnerReferences`.
fn owners(owners: &Value, found: &mut Violations) {
    const FIELD: &str = "metadata.ownerReferences";
    let mut controllers = 0;
    for owner in items(owners) {
        let version = text(&owner["apiVersion"]);
        if version.is_empty() || version.ends_with('/') {
            let why = "version must not be empty";
            found.invalid(format!("{FIELD}.apiVersion"), &owner["apiVersion"], why);
        }
        for name in ["kind", "name", "uid"] {
            if text(&owner[name]).is_empty() {
                found.invalid(format!("{FIELD}.{name}"), &owner[name], "must not be empty");
            }
        }
        if version == "v1" && owner["kind"] == "Event" {
            found.invalid(FIELD, owner, "is disallowed from being an owner");
        }
        controllers += i32::from(owner["controller"] == true);
    }
    if controllers > 1 {
        let why = "Only one reference can have Controller set to true";
        found.invalid(FIELD, owners, why);
    }
}

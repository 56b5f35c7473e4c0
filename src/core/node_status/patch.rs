//! Changes written to the API server, and their times.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeCondition, NodeStatus};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::conditions::OWN;
use super::resources::{ResourceList, same};
use crate::types::Stamp;

/// The difference between the node as the API server shows it and as it should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Differences apart from times of heartbeats; `Null` when there are none.
    pub substance: Value,
    /// Strategic merge patch of the status subresource, with fresh heartbeats.
    pub body: Value,
}

/// Decision on writing the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// No.
    Not,
    /// Something changed.
    Changed,
    /// Nothing changed for as long as that may be.
    Report,
}

/// Decides whether `change` has to be written at `now`. `residue` is the part of the last patch that the API server did
/// not keep; `interval` is the longest time without a write. Upstream: `tryUpdateNodeStatus`.
pub fn needs_update(
    change: &Change,
    residue: &Value,
    last_report: Option<Stamp>,
    now: Stamp,
    interval: Duration,
) -> Due {
    if !change.substance.is_null() && change.substance != *residue {
        return Due::Changed;
    }
    match last_report {
        Some(at) if now.since(at) < interval => Due::Not,
        _ => Due::Report,
    }
}

/// Compares two nodes: labels, annotations and status; the spec is not the node's to write. Lists are compared as
/// values and encoded only when they differ.
pub fn change(base: &Node, new: &Node) -> Change {
    let mut metadata = Map::new();
    let (old_meta, new_meta) = (&base.metadata, &new.metadata);
    put_map(
        &mut metadata,
        "labels",
        old_meta.labels.as_ref(),
        new_meta.labels.as_ref(),
        |a, b| a == b,
    );
    put_map(
        &mut metadata,
        "annotations",
        old_meta.annotations.as_ref(),
        new_meta.annotations.as_ref(),
        |a, b| a == b,
    );

    let empty = NodeStatus::default();
    let old = base.status.as_ref().unwrap_or(&empty);
    let new = new.status.as_ref().unwrap_or(&empty);
    let mut status = Map::new();
    let resources = |list: &Option<ResourceList>| list.clone().unwrap_or_default();
    for (name, old, new) in [
        ("capacity", &old.capacity, &new.capacity),
        ("allocatable", &old.allocatable, &new.allocatable),
    ] {
        put_map(
            &mut status,
            name,
            Some(&resources(old)),
            Some(&resources(new)),
            same,
        );
    }
    put_list(&mut status, "images", &old.images, &new.images);
    put_list(
        &mut status,
        "volumesInUse",
        &old.volumes_in_use,
        &new.volumes_in_use,
    );
    put_list(
        &mut status,
        "runtimeHandlers",
        &old.runtime_handlers,
        &new.runtime_handlers,
    );
    put_list(
        &mut status,
        "declaredFeatures",
        &old.declared_features,
        &new.declared_features,
    );
    put_object(&mut status, "nodeInfo", &old.node_info, &new.node_info);
    put_object(
        &mut status,
        "daemonEndpoints",
        &old.daemon_endpoints,
        &new.daemon_endpoints,
    );
    put_object(&mut status, "features", &old.features, &new.features);
    put_list(&mut status, "addresses", &old.addresses, &new.addresses);

    let none = Vec::new();
    let old_conditions = old.conditions.as_ref().unwrap_or(&none);
    let new_conditions = new.conditions.as_ref().unwrap_or(&none);
    let mut body = status.clone();
    if let Some(Value::Array(addresses)) = body.get_mut("addresses") {
        // The key by which the API server merges addresses is not unique.
        addresses.push(json!({"$patch": "replace"}));
    }
    let own: Vec<_> = (new_conditions.iter())
        .filter(|c| OWN.contains(&c.type_.as_str()))
        .collect();
    let changed: Vec<_> = (own.iter())
        .filter(|c| !shows(old_conditions, c))
        .map(|c| without_heartbeat(c))
        .collect();
    if !changed.is_empty() {
        status.insert("conditions".to_owned(), value(&changed));
    }
    if !own.is_empty() {
        let order: Vec<_> = (new_conditions.iter())
            .map(|c| json!({"type": c.type_}))
            .collect();
        body.insert(
            "$setElementOrder/conditions".to_owned(),
            Value::Array(order),
        );
        body.insert("conditions".to_owned(), value(&own));
    }
    Change {
        substance: whole(metadata.clone(), status).unwrap_or(Value::Null),
        body: whole(metadata, body).unwrap_or_else(|| json!({})),
    }
}

fn whole(metadata: Map<String, Value>, status: Map<String, Value>) -> Option<Value> {
    let mut all = Map::new();
    for (name, part) in [("metadata", metadata), ("status", status)] {
        if !part.is_empty() {
            all.insert(name.to_owned(), Value::Object(part));
        }
    }
    (!all.is_empty()).then_some(Value::Object(all))
}

fn without_heartbeat(condition: &NodeCondition) -> NodeCondition {
    NodeCondition {
        last_heartbeat_time: None,
        ..condition.clone()
    }
}

fn shows(conditions: &[NodeCondition], wanted: &NodeCondition) -> bool {
    let shown = conditions.iter().find(|c| c.type_ == wanted.type_);
    shown.is_some_and(|c| without_heartbeat(c) == without_heartbeat(wanted))
}

/// API types have no map keys that are not text: they always encode.
fn value<T: Serialize>(of: &T) -> Value {
    serde_json::to_value(of).unwrap_or(Value::Null)
}

/// Entries that differ; `null` removes one.
fn put_map<V: Serialize>(
    into: &mut Map<String, Value>,
    name: &str,
    old: Option<&BTreeMap<String, V>>,
    new: Option<&BTreeMap<String, V>>,
    same: impl Fn(&V, &V) -> bool,
) {
    let keys: BTreeSet<&String> = [old, new]
        .into_iter()
        .flatten()
        .flat_map(BTreeMap::keys)
        .collect();
    let mut entries = Map::new();
    for key in keys {
        match (old.and_then(|m| m.get(key)), new.and_then(|m| m.get(key))) {
            (Some(a), Some(b)) if same(a, b) => {}
            (_, b) => drop(entries.insert(key.clone(), b.map_or(Value::Null, value))),
        }
    }
    if !entries.is_empty() {
        into.insert(name.to_owned(), Value::Object(entries));
    }
}

/// A list that is replaced as a whole. An empty one is as good as none.
fn put_list<T: Serialize + PartialEq>(
    into: &mut Map<String, Value>,
    name: &str,
    old: &Option<Vec<T>>,
    new: &Option<Vec<T>>,
) {
    let (old, new) = (old.as_deref().unwrap_or(&[]), new.as_deref().unwrap_or(&[]));
    if old != new {
        let list = if new.is_empty() {
            Value::Null
        } else {
            value(&new)
        };
        into.insert(name.to_owned(), list);
    }
}

/// An object that is merged field by field.
fn put_object<T: Serialize + PartialEq>(
    into: &mut Map<String, Value>,
    name: &str,
    old: &Option<T>,
    new: &Option<T>,
) {
    if old == new {
        return;
    }
    let Some(new) = new else {
        into.insert(name.to_owned(), Value::Null);
        return;
    };
    let differs = match (old.as_ref().map(value), value(new)) {
        (Some(Value::Object(old)), Value::Object(new)) => {
            let mut fields = Map::new();
            for key in old.keys().filter(|key| !new.contains_key(*key)) {
                fields.insert(key.clone(), Value::Null);
            }
            for (key, field) in new {
                if old.get(&key) != Some(&field) {
                    fields.insert(key, field);
                }
            }
            Value::Object(fields)
        }
        (_, new) => new,
    };
    into.insert(name.to_owned(), differs);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_merged_field_by_field() {
        let patched = |old: Value, new: Value| {
            let mut into = Map::new();
            let of = |value: Value| (!value.is_null()).then_some(value);
            put_object(&mut into, "x", &of(old), &of(new));
            Value::Object(into)
        };
        for (old, new, want) in [
            (json!({"a": 1}), json!({"a": 1}), json!({})),
            (json!(null), json!({"a": 1}), json!({"x": {"a": 1}})),
            (json!({"a": 1}), json!(null), json!({"x": null})),
            (
                json!({"a": 1, "b": 2, "c": 3}),
                json!({"a": 1, "b": 5, "d": 4}),
                json!({"x": {"b": 5, "c": null, "d": 4}}),
            ),
        ] {
            assert_eq!(patched(old.clone(), new.clone()), want, "{old} to {new}");
        }
    }
}

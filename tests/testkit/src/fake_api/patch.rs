//! The three kinds of patch.

use serde_json::{Map, Value};

use super::failure::Failure;

/// Media types of patches.
pub(super) const MERGE: &str = "application/merge-patch+json";
pub(super) const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(super) const JSON: &str = "application/json-patch+json";

/// `object` with `patch` applied.
pub(super) fn apply(content_type: &str, object: &Value, patch: &Value) -> Result<Value, Failure> {
    let mut object = object.clone();
    match content_type {
        MERGE => json_patch::merge(&mut object, patch),
        STRATEGIC => {
            let Value::Object(patch) = patch else {
                return Err(Failure::bad_request("a strategic merge patch is an object"));
            };
            merge_map(&mut object, patch)?;
        }
        JSON => {
            let patch: json_patch::Patch = serde_json::from_value(patch.clone())
                .map_err(|error| Failure::bad_request(error.to_string()))?;
            json_patch::patch(&mut object, &patch)
                .map_err(|error| Failure::new(422, "Invalid", error.to_string()))?;
        }
        _ => {
            return Err(Failure::new(
                415,
                "UnsupportedMediaType",
                "415: Unsupported Media Type",
            ));
        }
    }
    Ok(object)
}

/// How a list is merged, by the name of its field: upstream's `patchMergeKey`s are unambiguous but for
/// `ports`.
enum List {
    Atomic,
    /// Of strings, a set.
    Set,
    /// By the first of these keys that the items have.
    By(&'static [&'static str]),
}

fn list(field: &str) -> List {
    List::By(match field {
        "conditions" | "addresses" => &["type"],
        "podIPs" | "hostIPs" | "hostAliases" => &["ip"],
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "env"
        | "volumes"
        | "imagePullSecrets"
        | "secrets"
        | "resourceClaims"
        | "resourceClaimStatuses"
        | "schedulingGates" => &["name"],
        "ports" => &["containerPort", "port"],
        "volumeMounts" => &["mountPath"],
        "volumeDevices" => &["devicePath"],
        "topologySpreadConstraints" => &["topologyKey"],
        "ownerReferences" => &["uid"],
        "finalizers" | "podCIDRs" => return List::Set,
        _ => return List::Atomic,
    })
}

fn merge_map(target: &mut Value, patch: &Map<String, Value>) -> Result<(), Failure> {
    match patch.get("$patch").and_then(Value::as_str) {
        Some("replace") => {
            let mut replacement = patch.clone();
            replacement.shift_remove("$patch");
            *target = Value::Object(replacement);
            return Ok(());
        }
        Some("delete") => {
            *target = Value::Object(Map::new());
            return Ok(());
        }
        _ => {}
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else {
        return Ok(());
    };
    for (field, value) in patch {
        if let Some(set) = field.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(have)), Value::Array(remove)) = (fields.get_mut(set), value) {
                have.retain(|item| !remove.contains(item));
            }
            continue;
        }
        if field.starts_with('$') {
            continue;
        }
        match value {
            Value::Null => {
                fields.shift_remove(field);
            }
            Value::Object(inner) => {
                let slot = fields.entry(field.clone()).or_insert(Value::Null);
                merge_map(slot, inner)?;
            }
            Value::Array(items) => {
                let have = match fields.shift_remove(field) {
                    Some(Value::Array(have)) => have,
                    _ => Vec::new(),
                };
                let order = patch.get(&format!("$setElementOrder/{field}"));
                let order = order.and_then(Value::as_array).map(Vec::as_slice);
                let merged = merge_list(&list(field), have, items, order)?;
                fields.insert(field.clone(), Value::Array(merged));
            }
            scalar => {
                fields.insert(field.clone(), scalar.clone());
            }
        }
    }
    // The order alone may be what changes.
    for (field, order) in patch {
        let Some(field) = field.strip_prefix("$setElementOrder/") else {
            continue;
        };
        if let (false, Some(Value::Array(have)), Some(order)) = (
            patch.contains_key(field),
            fields.get_mut(field),
            order.as_array(),
        ) {
            *have = merge_list(&list(field), std::mem::take(have), &[], Some(order))?;
        }
    }
    if let Some(Value::Array(keys)) = patch.get("$retainKeys") {
        fields.retain(|field, _| keys.iter().any(|key| key == field));
    }
    Ok(())
}

fn merge_list(
    how: &List,
    have: Vec<Value>,
    items: &[Value],
    order: Option<&[Value]>,
) -> Result<Vec<Value>, Failure> {
    let keys = match how {
        List::Atomic => return Ok(items.to_vec()),
        List::Set => {
            let mut merged = have;
            for item in items {
                if !merged.contains(item) {
                    merged.push(item.clone());
                }
            }
            return Ok(merged);
        }
        List::By(keys) => keys,
    };
    if items
        .iter()
        .any(|item| item["$patch"] == "replace" && keys.iter().all(|key| item.get(key).is_none()))
    {
        return Ok(items
            .iter()
            .filter(|item| item.get("$patch").is_none())
            .cloned()
            .collect());
    }
    let key_of = |item: &Value| -> Result<Value, Failure> {
        keys.iter()
            .find_map(|key| item.get(key))
            .cloned()
            .ok_or_else(|| {
                let message = format!(
                    "map: {item} does not contain declared merge key: {}",
                    keys[0]
                );
                Failure::new(500, "", message)
            })
    };
    // Order is by what the server has.
    let server: Vec<Value> = have.iter().map(key_of).collect::<Result<_, _>>()?;
    let was_empty = server.is_empty();
    let mut merged = have;
    for item in items {
        let key = key_of(item)?;
        let at = merged
            .iter()
            .position(|known| key_of(known).is_ok_and(|known| known == key));
        let patch = match item {
            Value::Object(patch) => patch,
            _ => return Err(Failure::bad_request("a merged list has objects only")),
        };
        match (at, patch.get("$patch").and_then(Value::as_str)) {
            (Some(at), Some("delete")) => drop(merged.remove(at)),
            (None, Some("delete")) => {}
            (Some(at), _) if !was_empty => merge_map(&mut merged[at], patch)?,
            _ => {
                let mut new = Value::Null;
                merge_map(&mut new, patch)?;
                merged.push(new);
            }
        }
    }
    let Some(order) = order else {
        return Ok(merged);
    };
    let order: Vec<Value> = order.iter().map(key_of).collect::<Result<_, _>>()?;
    check_order(&order, items, &key_of)?;
    let rank = |item: &Value| key_of(item).ok();
    let at_server = |item: &Value| {
        let key = rank(item);
        server.iter().position(|known| Some(known) == key.as_ref())
    };
    let (mut ordered, others): (Vec<_>, Vec<_>) = merged
        .into_iter()
        .partition(|item| rank(item).is_some_and(|key| order.contains(&key)));
    ordered.sort_by_key(|item| {
        let key = rank(item);
        order.iter().position(|known| Some(known) == key.as_ref())
    });
    // What the patch does not order keeps its place before what was behind it.
    let mut others = others.into_iter().peekable();
    let mut result = Vec::new();
    for item in ordered {
        while let (Some(place), Some(other)) = (at_server(&item), others.peek()) {
            if at_server(other).is_some_and(|other| other < place) {
                result.extend(others.next());
            } else {
                break;
            }
        }
        result.push(item);
    }
    result.extend(others);
    Ok(result)
}

/// The items of a patch come in the order that the patch says.
fn check_order(
    order: &[Value],
    items: &[Value],
    key_of: &dyn Fn(&Value) -> Result<Value, Failure>,
) -> Result<(), Failure> {
    let mut at = 0;
    for item in items {
        if item["$patch"] == "delete" {
            continue;
        }
        let key = key_of(item)?;
        match order.iter().skip(at).position(|known| *known == key) {
            Some(step) => at += step,
            None => {
                let message = "The order in patch list doesn't match $setElementOrder list";
                return Err(Failure::new(500, "", message));
            }
        }
    }
    Ok(())
}

//! Fields that nothing acts on: whether a value says anything, and what was given, for `/configz`.

use serde_json::{Map, Value as Json};

use super::duration::{format_duration, parse_duration};
use super::fields::{Field, Kind, Support};
use super::yaml::{Entry, Node, Value};
use crate::types::quantity::nanos;

/// Returns whether `value` is the same as leaving `field` unset: it is upstream's default, or a zero value that stands
/// for it. kubeadm writes many of these.
pub(super) fn is_unset(field: &Field, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::List(items) => items.is_empty(),
        Value::Map(entries) => entries.is_empty(),
        value => field.unset.iter().any(|text| says(field.kind, text, value)),
    }
}

/// Returns whether the scalar `value` equals `text`.
fn says(kind: Kind, text: &str, value: &Value) -> bool {
    let duration = || parse_duration(text).ok();
    match (kind, value) {
        (Kind::Duration | Kind::DurationOrNanos, Value::String(given)) => {
            parse_duration(given).is_ok_and(|given| Some(given) == duration())
        }
        (Kind::DurationOrNanos, Value::Int(given)) => {
            duration().is_some_and(|wanted| i128::try_from(wanted.as_nanos()) == Ok(*given))
        }
        (Kind::Quantity, value) => {
            nanos(&plain(value)).is_ok_and(|given| nanos(text).is_ok_and(|wanted| given == wanted))
        }
        (_, value) => plain(value) == text,
    }
}

/// The text of a scalar; empty for other values.
fn plain(value: &Value) -> String {
    match value {
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Float(value) => value.to_string(),
        Value::String(value) => value.clone(),
        Value::Null | Value::List(_) | Value::Map(_) => String::new(),
    }
}

/// Lays what `entries` say of `fields` without effect over `into`, as a drop-in is merged: values and lists
/// replace, maps merge, `null` takes away. A value that stands for the default is kept as the default.
///
/// Fields that this version does not know are left out: the answer stays one that upstream's schema describes.
pub(super) fn record<'e>(
    into: &mut Map<String, Json>,
    fields: &'static [Field],
    entries: impl IntoIterator<Item = &'e Entry>,
) {
    for entry in entries {
        let Some(field) = fields.iter().find(|field| field.name == entry.key) else {
            continue;
        };
        match (field.kind, &entry.node.value) {
            (_, Value::Null) => {
                into.remove(&entry.key);
            }
            (Kind::Object(inner), Value::Map(entries)) => {
                let mut object = object_of(into, &entry.key);
                record(&mut object, inner, entries);
                if field.support == Support::NotYet || !object.is_empty() {
                    into.insert(entry.key.clone(), Json::Object(object));
                }
            }
            _ if field.support == Support::Supported => {}
            (Kind::StringMap | Kind::BoolMap | Kind::QuantityMap, Value::Map(entries)) => {
                let mut object = object_of(into, &entry.key);
                for entry in entries {
                    match &entry.node.value {
                        Value::Null => object.remove(&entry.key),
                        value => object.insert(entry.key.clone(), json(Kind::String, value)),
                    };
                }
                into.insert(entry.key.clone(), Json::Object(object));
            }
            (kind, value) => {
                into.insert(entry.key.clone(), in_force(field, kind, value));
            }
        }
    }
}

fn object_of(parent: &mut Map<String, Json>, key: &str) -> Map<String, Json> {
    match parent.remove(key) {
        Some(Json::Object(object)) => object,
        _ => Map::new(),
    }
}

/// `value`, or the default that it stands for.
fn in_force(field: &Field, kind: Kind, value: &Value) -> Json {
    let default = field.unset.first().filter(|_| is_unset(field, value));
    match (default, kind) {
        (None, _) => json(kind, value),
        (Some(text), Kind::Duration | Kind::DurationOrNanos) => {
            json(Kind::Duration, &Value::String((*text).to_owned()))
        }
        (Some(text), Kind::String | Kind::Quantity) => Json::from(*text),
        // Numbers and booleans are written as JSON has them.
        (Some(text), _) => serde_json::from_str(text).unwrap_or_else(|_| json(kind, value)),
    }
}

/// `value` as upstream writes one of this kind.
fn json(kind: Kind, value: &Value) -> Json {
    match (kind, value) {
        (Kind::Duration | Kind::DurationOrNanos, Value::String(text)) => match parse_duration(text)
        {
            Ok(duration) => Json::from(format_duration(duration)),
            Err(_) => Json::from(text.as_str()),
        },
        (Kind::Quantity, value) => Json::from(plain(value)),
        (_, Value::Null) => Json::Null,
        (_, Value::Bool(value)) => Json::from(*value),
        (_, Value::Int(value)) => i64::try_from(*value).map_or(Json::Null, Json::from),
        (_, Value::Float(value)) => Json::from(*value),
        (_, Value::String(text)) => Json::from(text.as_str()),
        (Kind::Objects(fields), Value::List(items)) => {
            items.iter().map(|item| object(fields, item)).collect()
        }
        (_, Value::List(items)) => items
            .iter()
            .map(|item| json(Kind::String, &item.value))
            .collect(),
        (_, Value::Map(entries)) => {
            let pairs = entries.iter();
            let pairs =
                pairs.map(|entry| (entry.key.clone(), json(Kind::String, &entry.node.value)));
            Json::Object(pairs.collect())
        }
    }
}

/// One object of a list, with the fields that are known.
fn object(fields: &'static [Field], item: &Node) -> Json {
    let Value::Map(entries) = &item.value else {
        return Json::Null;
    };
    let known = entries.iter().filter_map(|entry| {
        let field = fields.iter().find(|field| field.name == entry.key)?;
        let value = match (field.kind, &entry.node.value) {
            (Kind::QuantityMap, Value::Map(entries)) => {
                let pairs = entries.iter();
                let pairs =
                    pairs.map(|entry| (entry.key.clone(), json(Kind::Quantity, &entry.node.value)));
                Json::Object(pairs.collect())
            }
            (kind, value) => json(kind, value),
        };
        Some((entry.key.clone(), value))
    });
    Json::Object(known.collect())
}

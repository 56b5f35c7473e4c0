//! Requests of a pod that this version supports.
//!
//! The input is a pod. The output is every field that asks for something the agent does not do. The pod's JSON is
//! checked against the rules of `fields`, so a field without a rule is refused, never ignored. A decoded pod lacks the
//! fields that this version does not know: the receiver of its JSON finds them with [`unknown`], and keeps them with
//! the pod.

mod fields;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use super::{devices, resources};
use crate::types::pod::UNKNOWN_FIELDS;
use crate::types::{PodExt, PodSource};

/// Phase reason and event reason of a pod with unsupported fields.
pub const UNSUPPORTED_FIELD: &str = "UnsupportedField";

/// A field that is not supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its path, like `spec.containers[0].livenessProbe`.
    pub field: String,
    /// Supported alternative.
    pub why: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

/// All unsupported fields of a pod, in the order of its JSON; empty when the pod can run.
pub fn refused(pod: &Pod) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    match serde_json::to_value(pod) {
        Ok(value) => walk(&value, "", "", &mut refusals),
        Err(error) => refusals.push(Refusal {
            field: "spec".to_owned(),
            why: format!("cannot be examined: {error}"),
        }),
    }
    if let Some(unknown) = pod.annotation(UNKNOWN_FIELDS)
        && pod.source() == PodSource::Api
    {
        refusals.extend(unknown.split(SEPARATOR).map(|field| Refusal {
            field: field.to_owned(),
            why: "is not known to this version".to_owned(),
        }));
    }
    refusals
}

/// Fields of `spec` in a pod's JSON that ask for something and that this version does not know, in the order of the JSON. An API
/// server may add fields with their defaults to every pod: `false` and 0 ask for nothing, unless a pod may demand its isolation
/// by them (`isolates`). Who has set a field cannot be seen: `managedFields` attributes defaults to whoever created the pod,
/// and what a mutating webhook has added to nobody.
pub fn unknown(pod: &Value) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(spec) = pod.get("spec") {
        find_unknown(spec, "spec", "spec", &mut found);
    }
    found
}

/// The value of the annotation that keeps unknown fields with their pod.
pub fn shown_unknown(fields: &[String]) -> String {
    let shown = &fields[..fields.len().min(UNKNOWN_SHOWN)];
    shown.join(SEPARATOR)
}

fn find_unknown(value: &Value, pattern: &str, field: &str, found: &mut Vec<String>) {
    let mut visit = |member: &Value, pattern: String, field: String| {
        if let Some(rule) = rules().get(&pattern) {
            if *rule == Inside {
                find_unknown(member, &pattern, &field, found);
            }
            return;
        }
        if SCHEDULERS.contains(&pattern.as_str()) {
            return;
        }
        let parent = pattern.rsplit_once('.');
        let counts_when_empty = parent.is_some_and(|(parent, _)| counts_when_empty(parent));
        if counts_when_empty || !(asks_for_nothing(member) || is_zero(member, &pattern)) {
            found.push(field);
        }
    };
    match value {
        Value::Object(members) => members
            .iter()
            .for_each(|(key, member)| visit(member, join(pattern, key), join(field, key))),
        Value::Array(items) => items.iter().enumerate().for_each(|(index, item)| {
            visit(item, format!("{pattern}[]"), format!("{field}[{index}]"));
        }),
        _ => {}
    }
}

/// One line for the pod's message and its event.
pub fn summary(refusals: &[Refusal]) -> String {
    let list: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
    format!("not supported by this version: {}", list.join("; "))
}

/// Rule of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Anything: a single value, or a list or mapping of such.
    Any,
    /// Anything, with all that is below it: the node never acts on what is in there.
    Tree,
    /// A mapping or list whose members have rules of their own.
    Inside,
    /// One of these strings; one that ends with `-` allows all that begin so.
    Text(&'static [&'static str]),
    /// A mapping of resources, of these names; one that ends with `-` allows all that begin so, `EXTENDED` all of that form.
    Amounts(&'static [&'static str]),
    /// Refused, and why.
    No(&'static str),
}

use Rule::{Amounts, Any, Inside, No, Text};

/// Fields that only earlier or later releases of the API have, and that are the scheduler's or a controller's. None of them asks
/// anything of the node: `workloadRef` (1.35) has become `schedulingGroup`; `evictionResponders` is of 1.37.
const SCHEDULERS: [&str; 2] = ["spec.evictionResponders", "spec.workloadRef"];
/// Between the fields in the annotation [`UNKNOWN_FIELDS`].
const SEPARATOR: &str = ", ";
/// Unknown fields of a pod that are named.
const UNKNOWN_SHOWN: usize = 20;
/// Stands for extended resources among the names of [`Rule::Amounts`].
const EXTENDED: &str = "<domain>/<name>";

/// All rules, with `[]` for list members, in the order of their paths.
pub fn rules() -> &'static BTreeMap<String, Rule> {
    static RULES: LazyLock<BTreeMap<String, Rule>> = LazyLock::new(fields::all);
    &RULES
}

/// Mappings whose members are refused even when they are empty: an empty volume source is a wish.
fn counts_when_empty(parent: &str) -> bool {
    matches!(
        parent,
        "spec.volumes[]" | "spec.volumes[].projected.sources[]"
    ) || parent.ends_with(".env[].valueFrom")
}

fn walk(value: &Value, pattern: &str, field: &str, refusals: &mut Vec<Refusal>) {
    match value {
        Value::Object(members) => {
            for (key, member) in members {
                let pattern = join(pattern, key);
                visit(member, &pattern, &join(field, key), refusals);
            }
        }
        Value::Array(items) => {
            let pattern = format!("{pattern}[]");
            for (index, item) in items.iter().enumerate() {
                visit(item, &pattern, &format!("{field}[{index}]"), refusals);
            }
        }
        _ => {}
    }
}

fn visit(value: &Value, pattern: &str, field: &str, refusals: &mut Vec<Refusal>) {
    let parent_counts = pattern
        .rsplit_once('.')
        .is_some_and(|(parent, _)| counts_when_empty(parent));
    let asks = !asks_for_nothing(value);
    let why = match rules().get(pattern).copied() {
        Some(Any | Rule::Tree) => return,
        Some(Inside) => return walk(value, pattern, field, refusals),
        Some(Text(allowed)) => match value.as_str() {
            Some("") | None if !asks => return,
            Some(text) if is_one_of(text, allowed) => return,
            _ => format!("{value} is not supported, only {}", shown(allowed)),
        },
        Some(Amounts(allowed)) => return amounts(value, allowed, field, refusals),
        Some(No(_)) | None if !asks && !parent_counts => return,
        Some(No(why)) => format!("is not supported: {why}"),
        None => "is not supported".to_owned(),
    };
    refusals.push(Refusal {
        field: field.to_owned(),
        why,
    });
}

fn amounts(value: &Value, allowed: &[&str], field: &str, refusals: &mut Vec<Refusal>) {
    let names = value.as_object().into_iter().flat_map(|m| m.keys());
    let is_extended = |name: &str| {
        let is_device = devices::is_extended(name) || resources::is_device_class(name);
        allowed.contains(&EXTENDED) && is_device
    };
    for name in names.filter(|name| !is_one_of(name, allowed) && !is_extended(name)) {
        refusals.push(Refusal {
            field: join(field, name),
            why: format!("is not supported, only {}", shown(allowed)),
        });
    }
}

/// The list for users.
fn shown(allowed: &[&str]) -> String {
    let size = |name: &&str| match name.strip_suffix('-') {
        Some(_) => format!("{name}<size>"),
        None => (*name).to_owned(),
    };
    allowed.iter().map(size).collect::<Vec<_>>().join(", ")
}

fn is_one_of(name: &str, allowed: &[&str]) -> bool {
    allowed.iter().any(|a| match a.strip_suffix('-') {
        Some(_) => name.len() > a.len() && name.starts_with(a),
        None => *a == name,
    })
}

/// Null, empty strings, and lists and mappings of nothing else.
fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.values().all(asks_for_nothing),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Returns whether an unknown field and all that is in it have the zero values of their types, and none demands isolation.
fn is_zero(value: &Value, pattern: &str) -> bool {
    match value {
        Value::Bool(value) => !value && !isolates(pattern),
        Value::Number(number) => number.as_i64() == Some(0) && !isolates(pattern),
        Value::Object(members) => members
            .iter()
            .all(|(key, member)| is_zero(member, &join(pattern, key))),
        _ => asks_for_nothing(value),
    }
}

/// Returns whether `false` or 0 in an unknown field may restrict a pod, as in `hostUsers`, in `runAsUser` of a security context,
/// and in a limit.
fn isolates(pattern: &str) -> bool {
    let is_strict = |part: &str| {
        let part = part.to_ascii_lowercase();
        [
            "host",
            "security",
            "limit",
            "max",
            "allow",
            "privileg",
            "automount",
        ]
        .iter()
        .any(|word| part.contains(word))
    };
    pattern.split('.').any(is_strict)
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

#[cfg(test)]
mod tests;

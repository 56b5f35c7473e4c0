//! The rules, each with a case that is taken and one that is refused.

mod certificate_request;
mod claim;
mod csi_node;
mod event;
mod formats;
mod invalid_writes;
mod lease;
mod metadata;
mod node;
mod pod;
mod pod_certificate_request;
mod pod_status;
mod reviews;

use serde_json::{Value, json};

use super::{Write, unknown_fields, violations};

/// What a table is about: `group/resource/subresource`, with what is there already and what is written, both without fault.
struct Table {
    path: &'static str,
    old: Option<Value>,
    new: Value,
}

/// A change of the object that is written, or of `old`: a JSON pointer and what is put there. Null takes it away.
type Change = (&'static str, Value);

impl Table {
    /// Fails unless each row breaks the rules that it names, as `field Kind`, and no others.
    #[track_caller]
    fn holds(&self, rows: &[(&str, &[Change], &[&str])]) {
        assert_eq!(self.found(&[]), [""; 0], "what the table begins with");
        for (what, changes, expected) in rows {
            assert_eq!(self.found(changes), *expected, "{what}");
        }
    }

    fn found(&self, changes: &[Change]) -> Vec<String> {
        let (mut old, mut new) = (self.old.clone(), self.new.clone());
        for (pointer, value) in changes {
            match pointer.strip_prefix("old") {
                Some(pointer) => put(old.get_or_insert_default(), pointer, value.clone()),
                None => put(&mut new, pointer, value.clone()),
            }
        }
        let mut path = self.path.split(' ');
        let mut next = || path.next().unwrap_or_default();
        let (group, resource, subresource) = (next(), next(), next());
        let write = Write {
            group: group.trim_start_matches("v1"),
            resource,
            subresource,
            namespace: "default",
            name: "web",
            old: old.as_ref(),
            new: &new,
        };
        let found = violations(&write);
        (found.iter().map(|v| format!("{} {:?}", v.field, v.kind))).collect()
    }
}

/// Puts a value where a pointer points to, and makes what leads there.
fn put(object: &mut Value, pointer: &str, value: Value) {
    let (path, last) = pointer.rsplit_once('/').unwrap();
    let mut at = object;
    for step in path.split('/').skip(1) {
        let name = unescaped(step);
        at = match (&mut *at, step.parse::<usize>()) {
            (Value::Array(items), Ok(index)) => &mut items[index],
            (at, _) => &mut at[name],
        };
    }
    match (at, last.parse::<usize>()) {
        (Value::Array(items), Ok(index)) if index < items.len() => items[index] = value,
        (Value::Array(items), _) => items.push(value),
        (Value::Object(fields), _) if value.is_null() => {
            fields.shift_remove(&unescaped(last));
        }
        (at, _) => at[unescaped(last)] = value,
    }
}

fn unescaped(step: &str) -> String {
    step.replace("~1", "/").replace("~0", "~")
}

#[test]
fn a_violation_reads_as_the_cause_of_a_status() {
    let swap =
        json!({"metadata": {"name": "n"}, "status": {"nodeInfo": {"swap": {"capacity": 0}}}});
    let found = violations(&Write {
        group: "",
        resource: "nodes",
        subresource: "",
        namespace: "",
        name: "",
        old: None,
        new: &swap,
    });
    assert_eq!(
        found[0].to_string(),
        "metadata.nodeSwapStatus.capacity: Invalid value: 0: must be greater than zero"
    );
    assert_eq!(
        found[0].cause(),
        json!({
            "reason": "FieldValueInvalid",
            "message": "Invalid value: 0: must be greater than zero",
            "field": "metadata.nodeSwapStatus.capacity",
        })
    );
}

#[test]
fn a_field_that_the_type_lacks_is_found_and_one_that_says_nothing_is_not() {
    let known = json!({"a": {"b": 1}, "list": [{"c": 1}]});
    let unknown = |sent: Value| -> Vec<String> {
        let found = unknown_fields(&sent, &known);
        found.into_iter().map(|v| v.field).collect()
    };
    assert_eq!(unknown(known.clone()), [""; 0]);
    assert_eq!(
        unknown(json!({"a": {"b": 1, "x": 2}, "y": 3})),
        ["a.x", "y"]
    );
    assert_eq!(
        unknown(json!({"list": [{"c": 1, "z": true}]})),
        ["list[0].z"]
    );
    assert_eq!(
        unknown(json!({"empty": [], "none": null, "off": false})),
        [""; 0]
    );
}

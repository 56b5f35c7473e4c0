//! Fields that a type does not have. A server that is asked to validate fields strictly refuses them, every other one
//! drops them. Upstream: the strict decoder of `fieldValidation=Strict`.

use serde_json::Value;

use super::formats::is_set;
use super::violation::Violations;

/// Finds what is in `sent` and not in `known`, which is `sent` read as its type and written again.
pub(super) fn unknown(sent: &Value, known: &Value, found: &mut Violations) {
    below("", sent, known, found);
}

fn below(path: &str, sent: &Value, known: &Value, found: &mut Violations) {
    match sent {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = match path {
                    "" => name.clone(),
                    path => format!("{path}.{name}"),
                };
                match known.get(name) {
                    Some(known) => below(&path, value, known, found),
                    // What says nothing may be left out.
                    None if !is_set(value) => {}
                    None => found.unknown(&path),
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                if let Some(known) = known.get(index) {
                    below(&format!("{path}[{index}]"), item, known, found);
                }
            }
        }
        _ => {}
    }
}

//! Tables that are read off others: the node object, and the events out of the journal.

use serde_json::{Value, json};

use super::{PodIndex, Row, rows};
use crate::core::state::{ObjectRecord, State, Table};

/// How the journal names an event.
const EVENT: &str = "event ";

/// The node as the API server last showed it, and what was last reported of its status.
pub(super) fn node(state: &State, index: &PodIndex) -> Vec<Row> {
    let name = super::node_name(state);
    let key = format!("nodes//{name}");
    let reported = state.record::<ObjectRecord>(&format!("nodestatus//{name}"));
    let reported = reported.and_then(|r| serde_json::from_slice::<Value>(&r.data).ok());
    let Some(mut row) = rows::one(state, index, Table::Objects, &key) else {
        return Vec::new();
    };
    row.remove("encrypted");
    row.remove("objectKind");
    row.insert("reported".to_owned(), reported.unwrap_or(Value::Null));
    vec![row]
}

/// The events among the lines of the journal, oldest first.
pub(super) fn events(state: &State, index: &PodIndex) -> Vec<Row> {
    let lines = state.journal.iter();
    lines
        .filter_map(|(key, line)| Some((key, &line.record, line.record.what.strip_prefix(EVENT)?)))
        .map(|(key, line, reason)| {
            let mut row = rows::journal(index, key, line);
            row.remove("what");
            row.remove("why");
            let told = Told::read(&line.why);
            for (field, value) in [
                ("type", json!(told.kind)),
                ("reason", json!(reason)),
                ("container", json!(told.container)),
                ("message", json!(told.message)),
                ("count", json!(told.count)),
            ] {
                row.insert(field.to_owned(), value);
            }
            row
        })
        .collect()
}

/// The text the recorder writes: `Warning web: message (x4)`.
#[derive(Debug, PartialEq)]
struct Told<'a> {
    kind: &'a str,
    container: Option<&'a str>,
    message: &'a str,
    count: u64,
}

impl<'a> Told<'a> {
    fn read(text: &'a str) -> Self {
        let (head, message) = text.split_once(": ").unwrap_or(("", text));
        let (kind, container) = match head.split_once(' ') {
            Some((kind, container)) => (kind, Some(container)),
            None => (head, None),
        };
        let counted = message.strip_suffix(')').and_then(|m| m.rsplit_once(" (x"));
        let (message, count) = match counted.and_then(|(m, n)| Some((m, n.parse().ok()?))) {
            Some(counted) => counted,
            None => (message, 1),
        };
        Self {
            kind,
            container,
            message,
            count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_read_as_the_recorder_wrote_it() {
        for (text, kind, container, message, count) in [
            ("Normal: Pulled: image", "Normal", None, "Pulled: image", 1),
            (
                "Warning web: it: died (x4)",
                "Warning",
                Some("web"),
                "it: died",
                4,
            ),
            (
                "Warning web: it died (xa)",
                "Warning",
                Some("web"),
                "it died (xa)",
                1,
            ),
            ("no head", "", None, "no head", 1),
        ] {
            let told = Told {
                kind,
                container,
                message,
                count,
            };
            assert_eq!(Told::read(text), told, "{text}");
        }
    }
}

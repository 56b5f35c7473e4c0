//! Tables that are read off others: the node object, the events out of the journal, with what the API server knows
//! of them, the devices of containers, and resource claims.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{PodIndex, Row, rows};
use crate::core::claims::{ClaimRecord, claim_key};
use crate::core::devices::{PluginRecord, PodDevices};
use crate::core::state::{FactRecord, State, Table, kinds};
use crate::events::{KeptEvent, kept_events};
use crate::types::{Event, EventType, PodUid};

/// Prefix of events in the journal.
const EVENT: &str = "event ";

/// The node as the API server last showed it, and what was last reported of its status.
pub(super) fn node(state: &State, index: &PodIndex) -> Vec<Row> {
    let name = super::node_name(state);
    let key = kinds::NODES.key("", &name);
    let reported = state.record::<FactRecord>(&kinds::NODE_STATUS.key("", &name));
    let reported = reported.and_then(|r| serde_json::from_slice::<Value>(&r.data).ok());
    let Some(mut row) = rows::one(state, index, Table::Objects, &key) else {
        return Vec::new();
    };
    row.remove("encrypted");
    row.remove("objectKind");
    row.insert("reported".to_owned(), reported.unwrap_or(Value::Null));
    vec![row]
}

/// The events among the lines of the journal, oldest first. The newest line of an event has what is recorded of its
/// object in the API server; what is recorded and in no line follows.
pub(super) fn events(state: &State, index: &PodIndex) -> Vec<Row> {
    let kept = kept_events(state);
    let mut objects: HashMap<_, &KeptEvent> = HashMap::new();
    for one in &kept {
        objects.entry(identity(&one.event)).or_insert(one);
    }
    let lines = state.journal.iter().rev();
    let mut rows: Vec<Row> = lines
        .filter_map(|(key, line)| Some((key, &line.record, line.record.what.strip_prefix(EVENT)?)))
        .map(|(key, line, reason)| {
            let mut row = rows::journal(index, key, line);
            row.remove("what");
            row.remove("why");
            let told = Told::read(&line.why);
            let uid = line.pod.as_ref().map(PodUid::as_str);
            let own = objects.remove(&(uid, told.kind, told.container, reason, told.message));
            fill(&mut row, &told, reason, own.map(object));
            row
        })
        .collect();
    rows.reverse();
    let mut unlisted: Vec<_> = objects.into_values().collect();
    unlisted.sort_by_key(|kept| (kept.last.wall_ms, &kept.key));
    rows.extend(unlisted.into_iter().map(unlisted_row));
    rows
}

/// Fields of [`devices`], beside the key.
const DEVICE_FIELDS: [&str; 12] = [
    "uid",
    "namespace",
    "name",
    "container",
    "resource",
    "state",
    "ids",
    "numa",
    "granted",
    "devices",
    "socket",
    "lost",
];

/// The devices of each container, by pod, container and resource, then the device plugins. What pods have that are finished is
/// free, and not shown.
pub(super) fn devices(state: &State, index: &PodIndex) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |mut row: Row, fields: Value| {
        for field in DEVICE_FIELDS {
            let value = fields.get(field).cloned().unwrap_or(Value::Null);
            row.entry(field).or_insert(value);
        }
        rows.push(row);
    };
    for (uid, held) in PodDevices::all(state).flatten() {
        for (container, resources) in &held.containers {
            for (resource, allocation) in resources {
                let key = format!("{uid}/{container}/{resource}");
                let is_granted = allocation.granted.is_some();
                let fields = json!({
                    "container": container,
                    "resource": resource,
                    "state": if is_granted { "Granted" } else { "Asked" },
                    "ids": allocation.ids.keys().collect::<Vec<_>>(),
                    "numa": allocation.ids,
                    "granted": allocation.granted,
                });
                add(rows::about(index, &key, uid.as_str()), fields);
            }
        }
    }
    for (resource, plugin) in PluginRecord::all(state) {
        let is_lost = plugin.lost.is_some();
        let fields = json!({
            "resource": resource,
            "state": if is_lost { "Lost" } else { "Registered" },
            "ids": plugin.devices.keys().collect::<Vec<_>>(),
            "devices": plugin.devices,
            "socket": plugin.socket,
            "lost": plugin.lost.map_or(Value::Null, rows::time),
        });
        let key = ("key".to_owned(), json!(resource));
        add(Row::from_iter([key]), fields);
    }
    rows
}

/// The claims that pods use or that are not unprepared yet: a row for each claim, pod and driver. A record that cannot be read is shown by table `objects`.
pub(super) fn claims(state: &State, index: &PodIndex) -> Vec<Row> {
    let mut rows = Vec::new();
    for (id, claim) in ClaimRecord::all(state).flatten() {
        for (uid, references) in &claim.pods {
            for (driver, of) in &claim.drivers {
                let claim_name = claim_key(&id);
                let key = format!("{claim_name}/{uid}/{driver}");
                let mut row = rows::about(index, &key, uid.as_str());
                let devices = of.devices.iter();
                let devices = devices.map(|d| format!("{}/{}", d.pool, d.device));
                let cdi = of.devices.iter().flat_map(|d| &d.cdi);
                for (field, value) in [
                    ("claim", json!(id.name)),
                    ("claimUid", json!(claim.uid)),
                    ("references", json!(references)),
                    ("driver", json!(driver)),
                    (
                        "state",
                        json!(if of.prepared.is_some() {
                            "Prepared"
                        } else {
                            "Asked"
                        }),
                    ),
                    (
                        "boot",
                        json!(of.prepared.map(|boot| format!("{:016x}", boot.0))),
                    ),
                    ("devices", json!(devices.collect::<Vec<_>>())),
                    ("cdi", json!(cdi.collect::<Vec<_>>())),
                    ("prepared", json!(of.devices)),
                ] {
                    row.insert(field.to_owned(), value);
                }
                rows.push(row);
            }
        }
    }
    rows
}

/// Fields that identify a journal line and an Event object as the same event: pod, type, container, reason, message.
type Identity<'a> = (Option<&'a str>, &'a str, Option<&'a str>, &'a str, &'a str);

fn identity(event: &Event) -> Identity<'_> {
    (
        event.pod.as_ref().map(|pod| pod.uid.as_str()),
        kind_name(event.kind),
        event.container.as_deref(),
        &event.reason,
        &event.message,
    )
}

/// The fields of an event after those that say where it is from.
fn fill(row: &mut Row, told: &Told<'_>, reason: &str, api_server: Option<Value>) {
    for (field, value) in [
        ("type", json!(told.kind)),
        ("reason", json!(reason)),
        ("container", json!(told.container)),
        ("message", json!(told.message)),
        ("count", json!(told.count)),
        ("apiServer", json!(api_server)),
    ] {
        row.insert(field.to_owned(), value);
    }
}

/// Returns the stored state of an Event object.
fn object(kept: &KeptEvent) -> Value {
    json!({
        "state": if kept.waiting { "Waiting" } else { "Told" },
        "namespace": kept.namespace,
        "name": kept.name,
        "count": kept.count,
        "first": rows::time(kept.first),
        "last": rows::time(kept.last),
    })
}

/// The row of an event that is in no line of the journal (any more).
fn unlisted_row(kept: &KeptEvent) -> Row {
    let mut row = Row::new();
    let (event, pod) = (&kept.event, kept.event.pod.as_ref());
    for (field, value) in [
        ("key", json!(kept.key)),
        ("uid", json!(pod.map(|pod| &pod.uid))),
        ("namespace", json!(pod.map(|pod| &pod.namespace))),
        ("name", json!(pod.map(|pod| &pod.name))),
        ("sequence", Value::Null),
        ("at", rows::time(kept.last)),
        ("generation", Value::Null),
    ] {
        row.insert(field.to_owned(), value);
    }
    let told = Told {
        kind: kind_name(event.kind),
        container: event.container.as_deref(),
        message: &event.message,
        count: kept.count.into(),
    };
    fill(&mut row, &told, &event.reason, Some(object(kept)));
    row
}

fn kind_name(kind: EventType) -> &'static str {
    match kind {
        EventType::Normal => "Normal",
        EventType::Warning => "Warning",
    }
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

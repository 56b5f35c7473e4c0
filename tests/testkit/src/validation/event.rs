//! Events of both APIs, as they are stored: with the fields of `v1`. Upstream: `ValidateEventCreate`,
//! `ValidateEventUpdate`.

use serde_json::Value;

use super::formats::{dns_subdomain, is_set, path_segment, qualified_name, text};
use super::metadata;
use super::violation::Violations;

/// Most bytes of `reportingInstance`, `action` and `reason`.
const SHORT: usize = 128;
/// Most bytes of the message.
const NOTE: usize = 1024;

/// The API that the event is written through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    /// `v1`, which is lenient with events that have no `eventTime`.
    Core,
    /// `events.k8s.io/v1`.
    Events,
}

/// An event that is created.
pub(super) fn create(event: &Value, api: Api, found: &mut Violations) {
    any(event, api, found);
    match api {
        // What the server asks of all objects.
        Api::Core => metadata::create(event, true, path_segment, found),
        Api::Events => {
            metadata::create(event, true, dns_subdomain, found);
            new(event, found);
        }
    }
}

/// An event that is counted up.
pub(super) fn update(old: &Value, event: &Value, api: Api, found: &mut Violations) {
    any(event, api, found);
    metadata::update(old, event, found);
    if api == Api::Core {
        return;
    }
    if old["series"] != event["series"] {
        series(&event["series"], found);
    }
    for field in [
        "involvedObject",
        "reason",
        "message",
        "source",
        "firstTimestamp",
        "lastTimestamp",
        "count",
        "type",
        "eventTime",
        "action",
        "related",
        "reportingComponent",
        "reportingInstance",
    ] {
        let shown = match field {
            "reportingComponent" => "reportingController",
            field => field,
        };
        found.immutable(shown, &old[field], &event[field]);
    }
}

/// `legacyValidateEvent`.
fn any(event: &Value, api: Api, found: &mut Violations) {
    let namespace = text(&event["metadata"]["namespace"]);
    let involved = &event["involvedObject"]["namespace"];
    let mismatch = |found: &mut Violations| {
        let why = "does not match event.namespace";
        found.invalid("involvedObject.namespace", involved, why);
    };
    if !is_set(&event["eventTime"]) {
        let matches = match text(involved) {
            "" => namespace.is_empty() || namespace == "default",
            involved => involved == namespace,
        };
        if !matches {
            mismatch(found);
        }
    } else {
        if text(involved).is_empty() && !["default", "kube-system"].contains(&namespace) {
            mismatch(found);
        }
        let controller = match api {
            Api::Core => "reportingComponent",
            Api::Events => "reportingController",
        };
        let reporting = &event["reportingComponent"];
        if !is_set(reporting) {
            found.required(controller, "");
        }
        found.format(controller, reporting, qualified_name(text(reporting)));
        for field in ["reportingInstance", "action", "reason"] {
            if !is_set(&event[field]) {
                found.required(field, "");
            }
            at_most(event, field, SHORT, found);
        }
        at_most(event, "message", NOTE, found);
    }
    if let Some(why) = dns_subdomain(namespace) {
        found.invalid("namespace", &event["metadata"]["namespace"], why);
    }
}

fn at_most(event: &Value, field: &str, most: usize, found: &mut Violations) {
    if text(&event[field]).len() > most {
        let why = format!("can have at most {most} characters");
        found.invalid(field, &Value::String(String::new()), why);
    }
}

/// What `events.k8s.io/v1` asks of new events beside.
fn new(event: &Value, found: &mut Violations) {
    series(&event["series"], found);
    if !is_set(&event["eventTime"]) {
        found.required("eventTime", "");
    }
    if !["Normal", "Warning"].contains(&text(&event["type"])) {
        found.invalid("type", &event["type"], "has invalid value");
    }
    for field in ["firstTimestamp", "lastTimestamp", "count"] {
        if is_set(&event[field]) {
            found.invalid(field, &event[field], "needs to be unset");
        }
    }
    let source = &event["source"];
    if is_set(&source["component"]) || is_set(&source["host"]) {
        found.invalid("source", source, "needs to be unset");
    }
}

/// `validateV1EventSeries`.
fn series(series: &Value, found: &mut Violations) {
    if series.is_null() {
        return;
    }
    if series["count"].as_i64().unwrap_or(0) < 2 {
        found.invalid("series.count", &series["count"], "should be at least 2");
    }
    if !is_set(&series["lastObservedTime"]) {
        found.required("series.lastObservedTime", "");
    }
}

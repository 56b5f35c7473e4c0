use serde_json::{Value, json};

use super::Table;

/// As node agents write events.
fn event() -> Value {
    json!({
        "metadata": {"name": "web.17979cfe36", "namespace": "shop"},
        "involvedObject": {"kind": "Pod", "namespace": "shop", "name": "web"},
        "reason": "Started", "message": "x".repeat(5000), "type": "Normal", "count": 3,
        "source": {"component": "kubelet", "host": "n1"}, "reportingComponent": "kubelet", "reportingInstance": "n1",
        "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z",
    })
}

/// As the newer API has them, in the fields of the older.
fn strict() -> Value {
    json!({
        "metadata": {"name": "web.17979cfe36", "namespace": "shop"},
        "involvedObject": {"kind": "Pod", "namespace": "shop", "name": "web"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "reason": "Started", "message": "started", "type": "Normal",
        "action": "Starting", "reportingComponent": "kubelet", "reportingInstance": "n1",
    })
}

#[test]
fn an_event_by_the_older_api() {
    for old in [None, Some(event())] {
        let table = Table {
            path: "v1 events",
            old,
            new: event(),
        };
        table.holds(&[
            (
                "in another namespace than what it is about",
                &[("/involvedObject/namespace", json!("other"))],
                &["involvedObject.namespace Invalid"],
            ),
            (
                "of the node, in the namespace of its own",
                &[
                    ("/involvedObject/namespace", json!(null)),
                    ("/metadata/namespace", json!("default")),
                ],
                &[],
            ),
            (
                "of the node, elsewhere",
                &[("/involvedObject/namespace", json!(null))],
                &["involvedObject.namespace Invalid"],
            ),
            (
                "with a time and without an action",
                &[
                    ("/eventTime", json!("2026-01-01T00:00:00.000000Z")),
                    ("/message", json!("x")),
                ],
                &["action Required"],
            ),
        ]);
    }
}

#[test]
fn the_name_of_an_event() {
    let table = Table {
        path: "v1 events",
        old: None,
        new: event(),
    };
    table.holds(&[
        // Longer than names of other objects may be.
        (
            "a long name",
            &[("/metadata/name", json!(format!("{}.1", "a".repeat(300))))],
            &[],
        ),
        (
            "a path",
            &[("/metadata/name", json!("a/b"))],
            &["metadata.name Invalid"],
        ),
    ]);
}

#[test]
fn an_event_by_the_newer_api() {
    let table = Table {
        path: "events.k8s.io events",
        old: None,
        new: strict(),
    };
    let long = |length: usize| json!("a".repeat(length));
    table.holds(&[
        (
            "no time",
            &[("/eventTime", json!(null))],
            &["eventTime Required"],
        ),
        (
            "no controller",
            &[("/reportingComponent", json!(null))],
            &[
                "reportingController Required",
                "reportingController Invalid",
            ],
        ),
        (
            "a bad controller",
            &[("/reportingComponent", json!("a b"))],
            &["reportingController Invalid"],
        ),
        (
            "no instance",
            &[("/reportingInstance", json!(null))],
            &["reportingInstance Required"],
        ),
        ("an instance", &[("/reportingInstance", long(128))], &[]),
        (
            "a long instance",
            &[("/reportingInstance", long(129))],
            &["reportingInstance Invalid"],
        ),
        (
            "no action",
            &[("/action", json!(null))],
            &["action Required"],
        ),
        (
            "a long action",
            &[("/action", long(129))],
            &["action Invalid"],
        ),
        (
            "no reason",
            &[("/reason", json!(null))],
            &["reason Required"],
        ),
        (
            "a long reason",
            &[("/reason", long(129))],
            &["reason Invalid"],
        ),
        ("a note", &[("/message", long(1024))], &[]),
        (
            "a long note",
            &[("/message", long(1025))],
            &["message Invalid"],
        ),
        (
            "another type",
            &[("/type", json!("Bad"))],
            &["type Invalid"],
        ),
        ("a count", &[("/count", json!(1))], &["count Invalid"]),
        (
            "a source",
            &[("/source", json!({"component": "kubelet"}))],
            &["source Invalid"],
        ),
        (
            "a first time",
            &[("/firstTimestamp", json!("2026-01-01T00:00:00Z"))],
            &["firstTimestamp Invalid"],
        ),
        (
            "a series",
            &[(
                "/series",
                json!({"count": 2, "lastObservedTime": "2026-01-01T00:00:00.000000Z"}),
            )],
            &[],
        ),
        (
            "a series of one",
            &[("/series", json!({"count": 1}))],
            &["series.count Invalid", "series.lastObservedTime Required"],
        ),
        (
            "a bad name",
            &[("/metadata/name", json!("A"))],
            &["metadata.name Invalid"],
        ),
    ]);
    let counted = Table {
        path: "events.k8s.io events",
        old: Some(strict()),
        new: strict(),
    };
    counted.holds(&[
        (
            "counted up",
            &[(
                "/series",
                json!({"count": 2, "lastObservedTime": "2026-01-01T00:00:00.000000Z"}),
            )],
            &[],
        ),
        (
            "another note",
            &[("/message", json!("other"))],
            &["message Invalid"],
        ),
        (
            "another action",
            &[("/action", json!("Stopping"))],
            &["action Invalid"],
        ),
    ]);
}

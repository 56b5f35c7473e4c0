//! Probes of all kinds.

use std::fs;

use crate::seen::{Feature, condition, container, event, marks, restarts, status};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("liveness", liveness),
    ("readiness", readiness),
    ("http-probe", http_probe),
    ("tcp-probe", tcp_probe),
    ("startup-probe", startup_probe),
];

fn liveness(world: &World) {
    event(world, "liveness", "Unhealthy", "Liveness probe failed");
    event(
        world,
        "liveness",
        "Killing",
        "failed liveness probe, will be restarted",
    );
    let again = status(world, "liveness", "runs again", |s| {
        restarts(s, "main") == 1 && container(s, "main")["state"]["running"].is_object()
    });
    let last = &container(&again, "main")["lastState"]["terminated"];
    assert!(last["exitCode"].is_number(), "{again}");
    marks(world, "liveness", &["run", "run"]);
}

/// Not ready, ready once the file is there.
fn opens(world: &World, pod: &str) {
    let closed = status(world, pod, "runs", |s| {
        container(s, "main")["state"]["running"].is_object()
    });
    assert_eq!(container(&closed, "main")["ready"], false, "{closed}");
    assert_eq!(condition(&closed, "Ready"), "False", "{closed}");
    event(world, pod, "Unhealthy", "Readiness probe");
    fs::write(world.starts().join(format!("{pod}.ready")), "").expect("make it ready");
    let open = status(world, pod, "gets ready", |s| {
        condition(s, "Ready") == "True"
    });
    assert_eq!(container(&open, "main")["ready"], true, "{open}");
    assert_eq!(restarts(&open, "main"), 0, "{open}");
}

fn readiness(world: &World) {
    opens(world, "readiness");
    fs::remove_file(world.starts().join("readiness.ready")).expect("end it");
    let closed = status(world, "readiness", "is no more ready", |s| {
        condition(s, "Ready") == "False"
    });
    assert_eq!(restarts(&closed, "main"), 0, "{closed}");
    marks(world, "readiness", &["up"]);
}

fn http_probe(world: &World) {
    opens(world, "http-probe");
    event(world, "http-probe", "Unhealthy", "404");
}

fn tcp_probe(world: &World) {
    opens(world, "tcp-probe");
}

fn startup_probe(world: &World) {
    let started = status(world, "startup-probe", "has started", |s| {
        container(s, "main")["started"] == true && container(s, "main")["ready"] == true
    });
    assert_eq!(restarts(&started, "main"), 0, "{started}");
    marks(world, "startup-probe", &["run"]);
}

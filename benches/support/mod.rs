//! What the benchmarks share: which figures are wanted, how one is told, and a pod of an ordinary size.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "benchmarks; each uses its part of this"
)]

use std::fmt::Display;
use std::time::Duration;

use serde_json::json;

/// Whether the figures called `name` were asked for: `cargo bench` without words wants all of them, with words
/// those whose name contains one. `cargo test --benches` wants none: it only looks whether benchmarks work.
pub fn wanted(name: &str) -> bool {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut words = arguments.iter().filter(|a| !a.starts_with('-')).peekable();
    arguments.iter().any(|a| a == "--bench")
        && !arguments.iter().any(|a| a == "--list" || a == "--test")
        && (words.peek().is_none() || words.any(|word| name.contains(word.as_str())))
}

/// Prints a figure beside its limit. A figure over its limit is told, it fails nothing: machines differ.
pub fn figure(what: &str, measured: f64, limit: f64, unit: impl Display) {
    let verdict = if measured <= limit { "within" } else { "OVER" };
    println!(
        "{what}: {measured:.2} {unit} (limit {limit} {unit}, {:.2} of it) {verdict}",
        measured / limit
    );
}

/// Smallest, middle and largest of some durations, in milliseconds.
pub fn spread(samples: &mut [Duration]) -> (f64, f64, f64) {
    assert!(!samples.is_empty(), "nothing was measured");
    samples.sort_unstable();
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    (
        ms(samples[0]),
        ms(samples[samples.len() / 2]),
        ms(samples[samples.len() - 1]),
    )
}

/// A pod as people write them: three containers with an environment, mounts, resources and volumes.
pub fn manifest(name: &str) -> serde_json::Value {
    let container = |role: &str| {
        json!({
            "name": role,
            "image": format!("registry.example/shop/{role}:1.4.2"),
            "imagePullPolicy": "IfNotPresent",
            "command": ["sleep", "100000"],
            "env": [
                {"name": "LOG_LEVEL", "value": "info"},
                {"name": "LISTEN", "value": "0.0.0.0:8080"},
                {"name": "DATABASE_URL", "value": "postgres://shop@database.example:5432/shop?sslmode=require"},
                {"name": "TRACE_ENDPOINT", "value": "http://traces.example:4317"},
            ],
            "ports": [{"name": role, "containerPort": 8080, "protocol": "TCP"}],
            "resources": {
                "requests": {"cpu": "1m", "memory": "1Mi"},
                "limits": {"cpu": "500m", "memory": "256Mi"},
            },
            "volumeMounts": [
                {"name": "cache", "mountPath": "/var/cache/shop"},
                {"name": "zone", "mountPath": "/etc/zone", "readOnly": true},
            ],
            "securityContext": {"privileged": false},
        })
    };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": {"app": "shop", "tier": "backend", "release": "2026-11"},
            "annotations": {"example.com/owner": "team-shop", "example.com/runbook": "https://wiki.example/shop"},
        },
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "containers": [container("web"), container("worker"), container("proxy")],
            "volumes": [
                {"name": "cache", "emptyDir": {}},
                {"name": "zone", "hostPath": {"path": "/etc", "type": "Directory"}},
            ],
        },
    })
}

/// Names of [`manifest`]'s containers.
pub const CONTAINERS: [&str; 3] = ["web", "worker", "proxy"];

/// Images of [`manifest`]'s containers.
pub fn images() -> Vec<String> {
    CONTAINERS
        .iter()
        .map(|role| format!("registry.example/shop/{role}:1.4.2"))
        .collect()
}

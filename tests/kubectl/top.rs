//! What `kubectl top` would show: computed from `/metrics/resource` as metrics-server does, and compared with what
//! the containers do.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::agent_process::{eventually, within};
use crate::node::{Node, shared};
use crate::setup::{FOREVER, script};

/// Values with their times in seconds, by series.
fn scrape(node: &Node) -> BTreeMap<String, (f64, f64)> {
    let text = node.raw("metrics/resource");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (series, rest) = match line.split_once("} ") {
                Some((series, rest)) => (format!("{series}}}"), rest),
                None => line
                    .split_once(' ')
                    .map(|(name, rest)| (name.to_owned(), rest))
                    .expect("a value"),
            };
            let mut rest = rest.split(' ');
            let value = rest.next().expect("a value").parse().expect("a number");
            let time: f64 = rest.next().map_or(0.0, |t| t.parse().expect("a time"));
            (series, (value, time / 1000.0))
        })
        .collect()
}

/// The series of a container, whatever the order of its labels.
fn of(
    all: &BTreeMap<String, (f64, f64)>,
    name: &str,
    namespace: &str,
    pod: &str,
) -> Option<(f64, f64)> {
    let labels = [
        "container=\"main\"".to_owned(),
        format!("namespace=\"{namespace}\""),
        format!("pod=\"{pod}\""),
    ];
    let mut found = all.iter().filter(|(series, _)| {
        series.starts_with(&format!("{name}{{"))
            && labels.iter().all(|label| series.contains(label))
    });
    let first = found.next().map(|(_, value)| *value);
    assert_eq!(found.next(), None, "{name} of {pod} is there twice");
    first
}

fn limited(script_text: &str) -> Value {
    let mut spec = script("Always", script_text);
    spec["containers"][0]["resources"] = json!({"limits": {"cpu": "200m", "memory": "200Mi"}});
    spec
}

#[test]
fn use_of_processor_and_memory_is_what_the_containers_use() {
    what_is_used(&shared());
}

pub fn what_is_used(node: &Node) {
    node.create_pod("burns", limited("while :; do :; done"));
    node.create_pod(
        "holds",
        limited(&format!(
            "x=$(head -c 30000000 /dev/zero | tr '\\0' x); {FOREVER}"
        )),
    );
    node.wait_running("burns");
    node.wait_running("holds");
    let cpu = |all: &_, pod: &str| {
        of(
            all,
            "container_cpu_usage_seconds_total",
            &node.namespace,
            pod,
        )
    };
    let memory = |all: &_, pod: &str| {
        of(
            all,
            "container_memory_working_set_bytes",
            &node.namespace,
            pod,
        )
    };
    eventually("memory is held", || {
        let all = scrape(node);
        match memory(&all, "holds") {
            Some((bytes, _)) if bytes > 30e6 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    let before = scrape(node);
    let (used_before, at_before) = cpu(&before, "burns").expect("a counter");
    assert!(at_before > 1.7e9, "samples carry their time: {at_before}");
    // A rate needs two samples that lie apart.
    let after = within(Duration::from_secs(60), "another sample, 4 s later", || {
        let all = scrape(node);
        match cpu(&all, "burns") {
            Some((_, at)) if at > at_before + 4.0 => Ok(all),
            other => Err(format!("{other:?} after {at_before}")),
        }
    });
    let (used, at) = cpu(&after, "burns").expect("a counter");
    let cores = (used - used_before) / (at - at_before);
    assert!(
        (0.1..0.3).contains(&cores),
        "a container limited to 200m uses {cores}"
    );
    let (idle_before, idle) = (
        cpu(&before, "holds").expect("a counter"),
        cpu(&after, "holds").expect("a counter"),
    );
    let idle = (idle.0 - idle_before.0) / (idle.1 - idle_before.1).max(1.0);
    assert!(idle < 0.1, "a container at rest uses {idle}");
    let (started, _) = of(
        &after,
        "container_start_time_seconds",
        &node.namespace,
        "burns",
    )
    .expect("a time");
    assert!((at - started) < 600.0, "started at {started}, it is {at}");

    // metrics-server takes nothing else of the node; and it is what the summary says.
    let node_cpu =
        after["node_cpu_usage_seconds_total"].0 - before["node_cpu_usage_seconds_total"].0;
    assert!(
        node_cpu > used - used_before - 0.5,
        "the node uses what its containers use"
    );
    let bytes = after["node_memory_working_set_bytes"].0;
    let summary: Value = serde_json::from_str(&node.raw("stats/summary")).expect("JSON");
    let told = summary["node"]["memory"]["workingSetBytes"]
        .as_f64()
        .expect("bytes");
    assert!((bytes - told).abs() / told < 0.3, "{bytes} and {told}");
    let pods = summary["pods"].as_array().expect("pods");
    let holds = pods
        .iter()
        .find(|pod| {
            pod["podRef"]["name"] == "holds"
                && pod["podRef"]["namespace"] == node.namespace.as_str()
        })
        .expect("stats of the pod");
    let container = &holds["containers"][0];
    assert!(
        container["memory"]["workingSetBytes"].as_f64() > Some(30e6),
        "{container}"
    );
    assert!(
        holds["memory"]["workingSetBytes"].as_f64() > Some(30e6),
        "{holds}"
    );
    assert_eq!(
        after
            .get("resource_scrape_error")
            .or(after.get("scrape_error"))
            .map(|v| v.0),
        Some(0.0)
    );
}

//! Limits and what a pod says as a whole; requests are in the tests of admission.

use serde_json::{Value, json};

use super::*;

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap()
}

fn limited(limits: Value) -> Value {
    json!({"name": "c", "resources": {"limits": limits}})
}

/// Returns the amounts as a user would write them.
fn written(amounts: &Amounts) -> Vec<(&str, i128)> {
    let whole = |amount: &i128| amount / 1_000_000_000;
    amounts
        .iter()
        .map(|(k, v)| (k.as_str(), whole(v)))
        .collect()
}

#[test]
fn a_resource_is_limited_when_every_container_limits_it() {
    for (name, containers, want) in [
        (
            "both",
            json!([limited(json!({"cpu": "1"})), limited(json!({"cpu": "2"}))]),
            vec![("cpu", 3)],
        ),
        (
            "one has none",
            json!([
                limited(json!({"cpu": "1", "memory": "5"})),
                limited(json!({"memory": "6"}))
            ]),
            vec![("memory", 11)],
        ),
        (
            "nothing is no limit",
            json!([limited(json!({"cpu": "1"})), limited(json!({"cpu": "0"}))]),
            vec![],
        ),
    ] {
        let pod = pod(json!({"containers": containers}));
        assert_eq!(written(&limits_without_overhead(&pod)), want, "{name}");
        assert_eq!(pod_limits(&pod), limits_without_overhead(&pod), "{name}");
    }
    let init = pod(json!({
        "initContainers": [{"name": "i"}], "containers": [limited(json!({"cpu": "1"}))],
    }));
    assert!(pod_limits(&init).is_empty(), "of the init containers too");
}

#[test]
fn overhead_is_added_to_limits_that_there_are() {
    let overhead = json!({"cpu": "3", "memory": "7"});
    let limited = pod(json!({
        "overhead": overhead, "containers": [limited(json!({"cpu": "1"}))],
    }));
    assert_eq!(written(&pod_limits(&limited)), [("cpu", 4)]);
    let none = pod(json!({
        "overhead": overhead, "resources": {"limits": {"cpu": "0", "memory": "5"}},
        "containers": [{"name": "c"}],
    }));
    assert_eq!(
        written(&pod_limits(&none)),
        [("cpu", 0), ("memory", 12)],
        "zero is no limit"
    );
}

#[test]
fn a_pod_says_something_as_a_whole_when_it_names_what_counts() {
    for (resources, want) in [
        (json!(null), false),
        (json!({}), false),
        (json!({"limits": {"cpu": "1"}}), true),
        (json!({"requests": {"memory": "1"}}), true),
        (json!({"requests": {"hugepages-2Mi": "2Mi"}}), true),
        (json!({"limits": {"example.com/gpu": "1"}}), false),
    ] {
        let pod = pod(json!({"containers": [], "resources": resources.clone()}));
        assert_eq!(has_pod_level(&pod), want, "{resources}");
    }
}

#[test]
fn the_limit_of_local_storage_is_the_sum_of_those_that_there_are() {
    let of = |containers: Value, overhead: Value| {
        let pod = pod(json!({"containers": containers, "overhead": overhead}));
        ephemeral_storage_limit(&pod).map(|limit| limit / 1_000_000_000)
    };
    let storage = |amount: &str| limited(json!({"ephemeral-storage": amount}));
    let overhead = json!({"ephemeral-storage": "5"});
    assert_eq!(of(json!([storage("2"), {"name": "d"}]), json!({})), Some(2));
    assert_eq!(
        of(json!([storage("2"), storage("3")]), overhead.clone()),
        Some(10)
    );
    assert_eq!(of(json!([storage("0")]), overhead.clone()), None);
    assert_eq!(of(json!([{"name": "d"}]), overhead), None);
}

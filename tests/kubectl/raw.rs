//! `kubectl get --raw`: everything that is read through the API server's proxy.

use serde_json::{Value, json};

use crate::agent_process::eventually;
use crate::metrics_tools;
use crate::node::shared;
use crate::setup::{FOREVER, script};

#[test]
fn every_page_of_the_node_is_there() {
    let node = shared();
    let mut spec = script("Always", FOREVER);
    spec["containers"][0]["livenessProbe"] =
        json!({"exec": {"command": ["true"]}, "periodSeconds": 1});
    let uid = node.create_pod("page-pod", spec);
    node.wait_running("page-pod");
    let parse = |path: &str| -> Value {
        let text = node.raw(path);
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}: {text}"))
    };

    for path in ["healthz", "healthz/ping", "healthz/log", "healthz/syncloop"] {
        assert_eq!(node.raw(path).trim(), "ok", "{path}");
    }
    let config = parse("configz");
    assert_eq!(config["kubeletconfig"]["port"], node.port, "{config}");
    assert_eq!(
        config["kubeletconfig"]["authorization"]["mode"], "Webhook",
        "{config}"
    );

    let pods = parse("pods");
    assert_eq!(pods["kind"], "PodList");
    let of = |pods: &Value| {
        let items = pods["items"].as_array().cloned().expect("items");
        items
            .into_iter()
            .find(|pod| pod["metadata"]["uid"] == uid.as_str())
    };
    let pod = of(&pods).expect("the pod");
    assert_eq!(pod["metadata"]["name"], "page-pod");
    assert_eq!(pod["status"]["phase"], "Running", "{pod}");
    let running = parse("runningpods/");
    assert_eq!(running["kind"], "PodList");
    let pod = of(&running).expect("the pod, running");
    assert_eq!(pod["spec"]["containers"][0]["name"], "main", "{pod}");

    let stats = parse("stats/summary");
    assert_eq!(stats["node"]["nodeName"], node.node.as_str());
    assert!(
        stats["node"]["memory"]["workingSetBytes"].as_u64() > Some(0),
        "{stats}"
    );
    let pods = stats["pods"].as_array().expect("pods");
    let pod = pods.iter().find(|pod| pod["podRef"]["uid"] == uid.as_str());
    let pod = pod.unwrap_or_else(|| panic!("no stats of the pod: {stats}"));
    assert_eq!(pod["containers"][0]["name"], "main", "{pod}");

    let names = |path: &str, names: &[&str]| {
        let text = node.raw(path);
        for name in names {
            assert!(
                text.lines().any(|l| l.starts_with(name)),
                "{path} has no {name}: {text}"
            );
        }
        text
    };
    names(
        "metrics",
        &[
            "kubelet_running_pods",
            "kubelet_node_name{",
            "kubelet_pod_worker_duration_seconds_bucket{",
            "kubelet_runtime_operations_total{",
            "kubelet_http_requests_total{",
            "holdfast_store_",
            "holdfast_restore_",
        ],
    );
    let text = names(
        "metrics/cadvisor",
        &[
            "container_cpu_usage_seconds_total{",
            "container_memory_working_set_bytes{",
            "machine_memory_bytes",
        ],
    );
    assert!(text.contains("pod=\"page-pod\""), "{text}");
    names(
        "metrics/resource",
        &[
            "node_cpu_usage_seconds_total",
            "container_cpu_usage_seconds_total{",
            "pod_memory_working_set_bytes{",
        ],
    );
    // What a real node with real pods says is well-formed, too.
    for path in [
        "metrics",
        "metrics/cadvisor",
        "metrics/resource",
        "metrics/probes",
        "metrics/slis",
    ] {
        let text = node.raw(path);
        let said = metrics_tools::run("promtool", &["check", "metrics"], &text);
        let said = said.unwrap_or_else(|said| said);
        // Names of cAdvisor and of the kubelet, by which dashboards know them.
        let known = [
            "cadvisor_version_info label names should be",
            "kubelet_cpu_manager_exclusive_cpu_allocation_count non-histogram",
            "kubelet_topology_manager_admission_duration_ms metric names should not contain abbreviated units",
        ];
        let complaints: Vec<&str> = (said.lines())
            .filter(|line| !known.iter().any(|known| line.starts_with(known)))
            .collect();
        assert!(complaints.is_empty(), "{path}: {complaints:#?}\n{text}");
    }
    eventually("probes are counted", || {
        let text = node.raw("metrics/probes");
        let found = text.lines().any(|l| {
            l.starts_with("prober_probe_total{")
                && l.contains("pod=\"page-pod\"")
                && l.contains("probe_type=\"Liveness\"")
        });
        if found { Ok(()) } else { Err(text) }
    });

    // The host's logs, and the pod's as a file among them; nothing beside them.
    let listing = node.raw("logs/");
    assert!(listing.contains("<pre>"), "{listing}");
    for name in ["../etc/passwd", "..%2fetc/passwd", "%2e%2e/etc/passwd"] {
        let path = format!("/api/v1/nodes/{}/proxy/logs/{name}", node.node);
        let outcome = node.run_kubectl(&["get", "--raw", &path]);
        assert!(!outcome.stdout().contains("root:"), "{name}: {outcome:?}");
    }
    let path = format!("containerLogs/{}/page-pod/main", node.namespace);
    assert_eq!(node.raw(&path), "");
}

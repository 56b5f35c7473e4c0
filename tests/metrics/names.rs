//! Names: what dashboards rely on is there, and what is there is documented.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use holdfast::types::metrics::Metrics;

use crate::families::{Family, families, samples};
use crate::filled::Filled;
use crate::tools::root;

/// What dashboards of kubelets ask for, below `kubelet_`.
const KUBELET: &[&str] = &[
    "node_name",
    "running_pods",
    "running_containers",
    "desired_pods",
    "active_pods",
    "mirror_pods",
    "working_pods",
    "orphaned_runtime_pods_total",
    "restarted_pods_total",
    "pod_start_duration_seconds",
    "pod_start_sli_duration_seconds",
    "pod_start_total_duration_seconds",
    "cgroup_manager_duration_seconds",
    "containers_per_pod_count",
    "pod_worker_duration_seconds",
    "pod_worker_start_duration_seconds",
    "pod_status_sync_duration_seconds",
    "pleg_relist_duration_seconds",
    "pleg_relist_interval_seconds",
    "pleg_last_seen_seconds",
    "pleg_discard_events",
    "runtime_operations_total",
    "runtime_operations_duration_seconds",
    "runtime_operations_errors_total",
    "run_podsandbox_duration_seconds",
    "started_pods_total",
    "started_pods_errors_total",
    "started_containers_total",
    "started_containers_errors_total",
    "image_pull_duration_seconds",
    "image_garbage_collected_total",
    "evictions",
    "eviction_stats_age_seconds",
    "preemptions",
    "pod_resources_endpoint_requests_total",
    "pod_resources_endpoint_requests_list",
    "pod_resources_endpoint_requests_get",
    "pod_resources_endpoint_requests_get_allocatable",
    "pod_resources_endpoint_errors_list",
    "pod_resources_endpoint_errors_get",
    "pod_resources_endpoint_errors_get_allocatable",
    "admission_rejections_total",
    "device_plugin_registration_total",
    "device_plugin_alloc_duration_seconds",
    "volume_stats_used_bytes",
    "volume_stats_capacity_bytes",
    "volume_stats_available_bytes",
    "volume_stats_inodes",
    "volume_stats_inodes_free",
    "volume_stats_inodes_used",
    "volume_stats_health_status_abnormal",
    "http_requests_total",
    "http_requests_duration_seconds",
    "managed_ephemeral_containers",
    "pod_pending_resizes",
    "pod_in_progress_resizes",
    "pod_infeasible_resizes_total",
    "pod_deferred_accepted_resizes_total",
    "pod_resize_duration_milliseconds",
    "container_requested_resizes_total",
    "image_manager_ensure_image_requests_total",
    "credential_provider_plugin_duration",
    "credential_provider_plugin_errors_total",
    "cgroup_version",
    "evented_pleg_connection_error_count",
    "evented_pleg_connection_success_count",
    "cpu_manager_allocation_per_numa",
    "container_aligned_compute_resources_count",
    "container_aligned_compute_resources_failure_count",
];

/// The same without the prefix.
const OTHERS: &[&str] = &[
    "prober_probe_total",
    "prober_probe_duration_seconds",
    "storage_operation_duration_seconds",
    "volume_operation_total_seconds",
    "csi_operations_seconds",
    "dra_operations_duration_seconds",
    "dra_grpc_operations_duration_seconds",
    "dra_resource_claims_in_use",
    "volume_manager_total_volumes",
    "node_cpu_usage_seconds_total",
    "node_memory_working_set_bytes",
    "node_swap_usage_bytes",
    "pod_cpu_usage_seconds_total",
    "pod_memory_working_set_bytes",
    "pod_swap_usage_bytes",
    "container_cpu_usage_seconds_total",
    "container_cpu_cfs_periods_total",
    "container_cpu_cfs_throttled_periods_total",
    "container_memory_working_set_bytes",
    "container_memory_rss",
    "container_memory_cache",
    "container_memory_usage_bytes",
    "container_network_receive_bytes_total",
    "container_network_transmit_bytes_total",
    "container_fs_usage_bytes",
    "container_fs_limit_bytes",
    "container_fs_reads_total",
    "container_fs_reads_bytes_total",
    "container_fs_writes_total",
    "container_fs_writes_bytes_total",
    "container_file_descriptors",
    "container_sockets",
    "container_tasks_state",
    "container_processes",
    "container_spec_cpu_quota",
    "container_spec_memory_limit_bytes",
    "container_start_time_seconds",
    "container_last_seen",
    "container_oom_events_total",
    "container_swap_usage_bytes",
    "machine_cpu_cores",
    "machine_memory_bytes",
    "cadvisor_version_info",
    "resource_scrape_error",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_start_time_seconds",
    "kubernetes_build_info",
    "kubernetes_feature_enabled",
    "kubernetes_healthcheck",
    "kubernetes_healthchecks_total",
    "rest_client_requests_total",
    "rest_client_request_duration_seconds",
    "kubelet_certificate_manager_client_ttl_seconds",
];

/// Not there, since what they count does not happen: images are not collected.
const ABSENT: &[&str] = &[];

#[tokio::test]
async fn the_names_that_dashboards_rely_on_are_there() {
    let filled = Filled::new().await;
    let texts = filled.as_text();
    let texts: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).collect();
    let known = samples(&texts);
    let there = |name: &str| known.contains(name) || known.contains(&format!("{name}_count"));
    for name in KUBELET {
        let full = format!("kubelet_{name}");
        let absent = ABSENT.iter().any(|prefix| name.starts_with(prefix));
        assert_eq!(there(&full), !absent, "{full}");
    }
    for name in OTHERS {
        assert!(there(name), "{name}");
    }
}

/// Labels of every series of a cgroup.
const OF_CGROUPS: [&str; 6] = ["container", "id", "image", "name", "namespace", "pod"];
const DEFAULT_BUCKETS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
const STORAGE_BUCKETS: &[f64] = &[
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0,
];
const POD_START_BUCKETS: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0,
    300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];

/// Families that a kubelet has as well: endpoint, name, type, labels, and the buckets of histograms.
type Shape = (
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static [f64],
);
const SHAPES: &[Shape] = &[
    (
        "/metrics",
        "kubelet_pod_start_total_duration_seconds",
        "histogram",
        &[],
        POD_START_BUCKETS,
    ),
    (
        "/metrics",
        "kubelet_cgroup_manager_duration_seconds",
        "histogram",
        &["operation_type"],
        DEFAULT_BUCKETS,
    ),
    (
        "/metrics",
        "kubelet_containers_per_pod_count",
        "histogram",
        &[],
        &[1.0, 2.0, 4.0, 8.0, 16.0],
    ),
    (
        "/metrics",
        "volume_operation_total_seconds",
        "histogram",
        &["operation_name", "plugin_name"],
        STORAGE_BUCKETS,
    ),
    (
        "/metrics",
        "storage_operation_duration_seconds",
        "histogram",
        &["migrated", "operation_name", "status", "volume_plugin"],
        STORAGE_BUCKETS,
    ),
    (
        "/metrics",
        "kubernetes_feature_enabled",
        "gauge",
        &["name", "stage"],
        &[],
    ),
    (
        "/metrics/slis",
        "kubernetes_healthcheck",
        "gauge",
        &["name", "type"],
        &[],
    ),
    (
        "/metrics/slis",
        "kubernetes_healthchecks_total",
        "counter",
        &["name", "status", "type"],
        &[],
    ),
];
/// Families of cgroups: name, type, and the label that is their own.
const CGROUP_SHAPES: [(&str, &str, &str); 7] = [
    ("container_fs_reads_total", "counter", "device"),
    ("container_fs_reads_bytes_total", "counter", "device"),
    ("container_fs_writes_total", "counter", "device"),
    ("container_fs_writes_bytes_total", "counter", "device"),
    ("container_file_descriptors", "gauge", ""),
    ("container_sockets", "gauge", ""),
    ("container_tasks_state", "gauge", "state"),
];

#[tokio::test]
async fn families_of_a_kubelet_have_its_types_labels_and_buckets() {
    let filled = Filled::new().await;
    let texts: BTreeMap<_, _> = filled.as_text().into_iter().collect();
    let of = |endpoint: &str, name: &str| {
        let mut all = families(&texts[endpoint]);
        let family = all.remove(name);
        family.unwrap_or_else(|| panic!("{endpoint} has no {name}"))
    };
    let set = |labels: &[&str]| -> BTreeSet<String> {
        let labels = labels.iter().filter(|label| !label.is_empty());
        labels.map(|label| (*label).to_owned()).collect()
    };
    for (endpoint, name, kind, labels, buckets) in SHAPES {
        let family = of(endpoint, name);
        assert_eq!(family.kind, *kind, "{name}");
        assert_eq!(family.labels, set(labels), "{name}");
        let bounds = family.buckets.iter().map(|b| b.parse::<f64>().unwrap());
        let finite: Vec<f64> = bounds.filter(|bound| bound.is_finite()).collect();
        assert_eq!(finite, *buckets, "{name}");
    }
    for (name, kind, own) in CGROUP_SHAPES {
        let family = of("/metrics/cadvisor", name);
        assert_eq!(family.kind, kind, "{name}");
        let labels = [&OF_CGROUPS[..], &[own]].concat();
        assert_eq!(family.labels, set(&labels), "{name}");
    }
    assert!(!filled.agent.contains("kubernetes_healthcheck"));
    assert!(filled.cadvisor.contains("device=\"/dev/vda\""));
}

#[tokio::test]
async fn probes_have_an_endpoint_of_their_own() {
    let filled = Filled::new().await;
    assert!(filled.probes.contains("prober_probe_total{"));
    assert!(!filled.agent.contains("prober_"));
    // One series per container is for them alone.
    assert!(!filled.agent.contains("pod_uid"));
}

#[tokio::test]
async fn every_registered_metric_is_among_those_that_are_judged() {
    let filled = Filled::new().await;
    let text = format!("{}{}{}", filled.agent, filled.probes, filled.slis);
    let heads: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    let texts = filled.as_text();
    let texts: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).collect();
    let known = samples(&texts);
    for name in Metrics::NAMES {
        let units = ["", "_seconds", "_bytes"].map(|unit| format!("{name}{unit}"));
        assert!(
            heads.iter().any(|h| units.iter().any(|u| u == h)),
            "{name} is not shown"
        );
        let shown = known.iter().any(|sample| {
            let rest = units
                .iter()
                .filter_map(|unit| sample.strip_prefix(unit.as_str()));
            rest.into_iter()
                .any(|rest| ["", "_total", "_count"].contains(&rest))
        });
        assert!(shown, "{name} has no series: give it one in `filled.rs`");
    }
}

/// A table per endpoint.
fn tables(texts: &[(&'static str, String)]) -> String {
    let mut page = String::new();
    for (endpoint, text) in texts {
        writeln!(
            page,
            "### `{endpoint}`\n\n| name | type | labels | what |\n|---|---|---|---|"
        )
        .unwrap();
        let families: BTreeMap<String, Family> = families(text);
        for (name, family) in families {
            let labels: Vec<String> = family.labels.iter().map(|l| format!("`{l}`")).collect();
            let kind = match family.kind.as_str() {
                "untyped" => "counter",
                kind => kind,
            };
            let help = family.help.replace('|', "\\|");
            writeln!(
                page,
                "| `{name}` | {kind} | {} | {help} |",
                labels.join(" ")
            )
            .unwrap();
        }
        page.push('\n');
    }
    page
}

#[tokio::test]
async fn every_metric_is_documented() {
    const BEGIN: &str = "<!-- begin of the tables -->\n";
    const END: &str = "<!-- end of the tables -->\n";
    let filled = Filled::new().await;
    let tables = tables(&filled.as_text());
    let path = root().join("docs/metrics.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(BEGIN).unwrap();
    let (documented, tail) = rest.split_once(END).unwrap();
    if std::env::var_os("HOLDFAST_UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{BEGIN}\n{tables}{END}{tail}")).unwrap();
        return;
    }
    let lines = |text: &str| -> BTreeSet<String> {
        text.lines()
            .filter(|l| l.starts_with("| `"))
            .map(str::to_owned)
            .collect()
    };
    let (written, shown) = (lines(documented), lines(&tables));
    let missing: Vec<_> = shown.difference(&written).collect();
    let stale: Vec<_> = written.difference(&shown).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "docs/metrics.md lacks {missing:#?} and has too much {stale:#?}; \
         HOLDFAST_UPDATE_DOCS=1 cargo test --test metrics writes it anew"
    );
}

//! `/flagz`: the active flags. Those that the configuration file can say too have its value.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Value, json};

use super::super::Shared;
use super::zpage;
use crate::kubeletconfig::{
    AgentConfig, BackOffEarlyEnd, DeviceReadiness, OfflineStart, PullFallback, encode,
    format_duration,
};

/// Flags, and the field of the configuration that each of them overrides.
const FIELDS: &[(&str, &str)] = &[
    ("cgroup-driver", "/cgroupDriver"),
    ("cgroup-root", "/cgroupRoot"),
    ("cgroups-per-qos", "/cgroupsPerQOS"),
    ("cluster-dns", "/clusterDNS"),
    ("cluster-domain", "/clusterDomain"),
    ("container-log-max-files", "/containerLogMaxFiles"),
    ("container-log-max-size", "/containerLogMaxSize"),
    ("cpu-cfs-quota", "/cpuCFSQuota"),
    ("cpu-cfs-quota-period", "/cpuCFSQuotaPeriod"),
    ("cpu-manager-policy", "/cpuManagerPolicy"),
    ("cpu-manager-policy-options", "/cpuManagerPolicyOptions"),
    ("cpu-manager-reconcile-period", "/cpuManagerReconcilePeriod"),
    (
        "enable-controller-attach-detach",
        "/enableControllerAttachDetach",
    ),
    ("event-burst", "/eventBurst"),
    ("event-qps", "/eventRecordQPS"),
    ("eviction-hard", "/evictionHard"),
    (
        "eviction-max-pod-grace-period",
        "/evictionMaxPodGracePeriod",
    ),
    ("eviction-minimum-reclaim", "/evictionMinimumReclaim"),
    (
        "eviction-pressure-transition-period",
        "/evictionPressureTransitionPeriod",
    ),
    ("eviction-soft", "/evictionSoft"),
    ("eviction-soft-grace-period", "/evictionSoftGracePeriod"),
    ("fail-swap-on", "/failSwapOn"),
    ("file-check-frequency", "/fileCheckFrequency"),
    ("healthz-bind-address", "/healthzBindAddress"),
    ("healthz-port", "/healthzPort"),
    ("http-check-frequency", "/httpCheckFrequency"),
    ("image-gc-high-threshold", "/imageGCHighThresholdPercent"),
    ("image-gc-low-threshold", "/imageGCLowThresholdPercent"),
    ("kernel-memcg-notification", "/kernelMemcgNotification"),
    ("kube-api-burst", "/kubeAPIBurst"),
    ("kube-api-qps", "/kubeAPIQPS"),
    ("kube-reserved", "/kubeReserved"),
    ("kube-reserved-cgroup", "/kubeReservedCgroup"),
    ("kubelet-cgroups", "/kubeletCgroups"),
    ("logging-format", "/logging/format"),
    ("make-iptables-util-chains", "/makeIPTablesUtilChains"),
    ("manifest-url", "/staticPodURL"),
    ("max-pods", "/maxPods"),
    ("memory-manager-policy", "/memoryManagerPolicy"),
    ("pods-per-core", "/podsPerCore"),
    ("minimum-image-ttl-duration", "/imageMinimumGCAge"),
    ("node-status-update-frequency", "/nodeStatusUpdateFrequency"),
    ("oom-score-adj", "/oomScoreAdj"),
    ("pod-manifest-path", "/staticPodPath"),
    ("pod-max-pids", "/podPidsLimit"),
    ("port", "/port"),
    ("protect-kernel-defaults", "/protectKernelDefaults"),
    ("provider-id", "/providerID"),
    ("qos-reserved", "/qosReserved"),
    ("register-node", "/registerNode"),
    ("reserved-cpus", "/reservedSystemCPUs"),
    ("reserved-memory", "/reservedMemory"),
    ("resolv-conf", "/resolvConf"),
    ("rotate-certificates", "/rotateCertificates"),
    ("runtime-request-timeout", "/runtimeRequestTimeout"),
    ("seccomp-default", "/seccompDefault"),
    ("serialize-image-pulls", "/serializeImagePulls"),
    ("sync-frequency", "/syncFrequency"),
    ("system-cgroups", "/systemCgroups"),
    ("system-reserved", "/systemReserved"),
    ("system-reserved-cgroup", "/systemReservedCgroup"),
    ("topology-manager-policy", "/topologyManagerPolicy"),
    (
        "topology-manager-policy-options",
        "/topologyManagerPolicyOptions",
    ),
    ("topology-manager-scope", "/topologyManagerScope"),
    ("v", "/logging/verbosity"),
];

pub(super) async fn flagz(State(node): State<Shared>, headers: HeaderMap) -> Response {
    let flags = flags(&node.config);
    zpage::answer(
        &headers,
        "Flagz",
        || {
            let mut text = String::new();
            for (name, value) in &flags {
                writeln!(text, "{name}={value}").unwrap_or_default();
            }
            text
        },
        || json!({"flags": flags}),
    )
}

fn flags(config: &AgentConfig) -> BTreeMap<&'static str, String> {
    let encoded = encode(&config.kubelet);
    let mut flags: BTreeMap<&'static str, String> = FIELDS
        .iter()
        .map(|(flag, field)| (*flag, encoded.pointer(field).map(text).unwrap_or_default()))
        .collect();
    let path = |path: &Path| path.display().to_string();
    let optional = |given: &Option<std::path::PathBuf>| given.as_deref().map(path);
    let optional = |given| optional(given).unwrap_or_default();
    let providers = config.image_credential_providers.clone().unzip();
    let gc = &config.container_gc;
    let limit = |limit: Option<u32>| limit.map_or_else(|| "-1".to_owned(), |n| n.to_string());
    let labels = config.node_labels.iter();
    let labels: Vec<String> = labels
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let ips: Vec<String> = config.node_ips.iter().map(ToString::to_string).collect();
    flags.extend([
        (
            "bootstrap-kubeconfig",
            optional(&config.bootstrap_kubeconfig),
        ),
        (
            "back-off-early-end",
            match config.back_off_early_end {
                BackOffEarlyEnd::Enabled => "Enabled",
                BackOffEarlyEnd::Disabled => "Disabled",
            }
            .to_owned(),
        ),
        ("cert-dir", path(&config.cert_dir)),
        (
            "cloud-provider",
            if config.external_cloud_provider {
                "external".to_owned()
            } else {
                String::new()
            },
        ),
        ("container-logs-dir", path(&config.container_logs_dir)),
        (
            "container-runtime-endpoint",
            config.runtime_endpoint.to_string(),
        ),
        (
            "device-readiness",
            match config.device_readiness {
                DeviceReadiness::Fail => "Fail",
                DeviceReadiness::Wait => "Wait",
            }
            .to_owned(),
        ),
        ("hostname-override", config.node_name.clone()),
        ("image-credential-provider-bin-dir", optional(&providers.1)),
        ("image-credential-provider-config", optional(&providers.0)),
        (
            "image-pull-policy-fallback",
            match config.image_pull_policy_fallback {
                PullFallback::Never => "Never",
                PullFallback::Offline => "Offline",
            }
            .to_owned(),
        ),
        ("image-service-endpoint", config.image_endpoint.to_string()),
        ("kubeconfig", optional(&config.kubeconfig)),
        ("lifeline-kubeconfig", optional(&config.lifeline_kubeconfig)),
        ("log-file", optional(&config.log_file)),
        ("maximum-dead-containers", limit(gc.max_total)),
        (
            "maximum-dead-containers-per-container",
            limit(gc.max_per_container),
        ),
        (
            "minimum-container-ttl-duration",
            format_duration(gc.min_age),
        ),
        ("node-ip", ips.join(",")),
        ("node-labels", labels.join(",")),
        (
            "offline-start",
            match config.offline_start {
                OfflineStart::All => "All",
                OfflineStart::Safe => "Safe",
                OfflineStart::None => "None",
            }
            .to_owned(),
        ),
        ("root-dir", path(&config.root_dir)),
        ("runonce", config.run_once.to_string()),
        ("secrets-key-file", optional(&config.secrets_key_file)),
        ("state-dir", path(&config.state_dir)),
        (
            "streaming-requires-create",
            config.streaming_requires_create.to_string(),
        ),
    ]);
    flags
}

/// A value as a flag would have it: lists and maps with commas.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        Value::Object(map) => {
            let pairs = map
                .iter()
                .map(|(key, value)| format!("{key}={}", text(value)));
            pairs.collect::<Vec<_>>().join(",")
        }
        other => other.to_string(),
    }
}

//! The configuration in force, written as the file that says the same.
//!
//! What is secret is left out: the values of `staticPodURLHeader`, and a user with a password in `staticPodURL`.
//! Everything else reads back as it was.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::duration::format_duration;
use super::pinning::ReservedMemory;
use super::reserves::{Reserves, factor_of};
use super::server::{Authentication, Authorization};
use super::types::{
    EvictionThreshold, KubeletConfiguration, LogFormat, NEVER_ROTATE, PriorityPeriod, Taint,
};
use super::{API_VERSION, KIND};
use crate::types::quantity::of_bytes;

/// What stands for a secret.
const REDACTED: &str = "<redacted>";
/// Billionths.
const BILLION: i128 = 1_000_000_000;

/// Returns `config` as a `KubeletConfiguration` object (v1beta1): the fields this version acts on, defaults included,
/// and those without effect that were given.
pub fn encode(config: &KubeletConfiguration) -> Value {
    let c = config;
    let mut out = Map::new();
    let mut put = |name: &str, value: Value| {
        if !value.is_null() {
            out.insert(name.to_owned(), value);
        }
    };
    let time = |duration| Value::from(format_duration(duration));
    put("kind", json!(KIND));
    put("apiVersion", json!(API_VERSION));
    put("staticPodPath", path(c.static_pod_path.as_deref()));
    put("podLogsDir", path(Some(&c.pod_logs_dir)));
    put("syncFrequency", time(c.sync_frequency));
    put("fileCheckFrequency", time(c.file_check_frequency));
    put("httpCheckFrequency", time(c.http_check_frequency));
    put(
        "staticPodURL",
        json!(c.static_pod_url.as_deref().map(without_user)),
    );
    put("staticPodURLHeader", headers(&c.static_pod_url_header));
    put("enableServer", json!(c.enable_server));
    put("address", json!(c.address.to_string()));
    put("port", json!(c.port));
    put("readOnlyPort", json!(c.read_only_port));
    put("tlsCertFile", path(c.tls_cert_file.as_deref()));
    put("tlsPrivateKeyFile", path(c.tls_private_key_file.as_deref()));
    put("tlsCipherSuites", json!(c.tls_cipher_suites));
    put("tlsCurvePreferences", json!(c.tls_curve_preferences));
    put("tlsMinVersion", json!(c.tls_min_version.to_string()));
    put("serverTLSBootstrap", json!(c.server_tls_bootstrap));
    put("authentication", authentication(&c.authentication));
    put("authorization", authorization(&c.authorization));
    put(
        "streamingConnectionIdleTimeout",
        time(c.streaming_connection_idle_timeout),
    );
    put(
        "enableDebuggingHandlers",
        json!(c.enable_debugging_handlers),
    );
    put("enableProfilingHandler", json!(c.enable_profiling_handler));
    put(
        "enableDebugFlagsHandler",
        json!(c.enable_debug_flags_handler),
    );
    put("enableSystemLogHandler", json!(c.enable_system_log_handler));
    put("enableSystemLogQuery", json!(c.enable_system_log_query));
    put("rotateCertificates", json!(c.rotate_certificates));
    put(
        "imagePullCredentialsVerificationPolicy",
        json!(c.image_pull_credentials_verification_policy.to_string()),
    );
    put(
        "preloadedImagesVerificationAllowlist",
        json!(c.preloaded_images_verification_allowlist),
    );
    put("eventRecordQPS", json!(c.event_record_qps));
    put("eventBurst", json!(c.event_burst));
    put("healthzPort", json!(c.healthz_port));
    put(
        "healthzBindAddress",
        json!(c.healthz_bind_address.to_string()),
    );
    put("clusterDomain", json!(c.cluster_domain));
    let servers: Vec<String> = c.cluster_dns.iter().map(ToString::to_string).collect();
    put("clusterDNS", json!(servers));
    put(
        "nodeStatusUpdateFrequency",
        time(c.node_status_update_frequency),
    );
    put(
        "nodeStatusReportFrequency",
        time(c.node_status_report_frequency),
    );
    put(
        "nodeLeaseDurationSeconds",
        json!(c.node_lease_duration_seconds),
    );
    put("cgroupRoot", json!(c.cgroup_root));
    put("cgroupsPerQOS", json!(c.cgroups_per_qos));
    put("cgroupDriver", json!(c.cgroup_driver.to_string()));
    put("runtimeRequestTimeout", time(c.runtime_request_timeout));
    put("oomScoreAdj", json!(c.oom_score_adj));
    put("maxPods", json!(c.max_pods));
    put("podsPerCore", json!(c.pods_per_core));
    if let Some(one) = c.single_process_oom_kill {
        put("singleProcessOOMKill", json!(one));
    }
    put(
        "podPidsLimit",
        c.pod_pids_limit.map_or(json!(-1), |limit| json!(limit)),
    );
    put(
        "resolvConf",
        c.resolv_conf
            .as_deref()
            .map_or(json!(""), |p| path(Some(p))),
    );
    put("cpuCFSQuota", json!(c.cpu_cfs_quota));
    put("cpuCFSQuotaPeriod", time(c.cpu_cfs_quota_period));
    put(
        "nodeStatusMaxImages",
        c.node_status_max_images.map_or(json!(-1), |n| json!(n)),
    );
    put("contentType", json!(c.content_type));
    put("kubeAPIQPS", json!(c.kube_api_qps));
    put("kubeAPIBurst", json!(c.kube_api_burst));
    put("serializeImagePulls", json!(c.serialize_image_pulls));
    put("imageMinimumGCAge", time(c.image_minimum_gc_age));
    put("imageMaximumGCAge", time(c.image_maximum_gc_age));
    put(
        "imageGCHighThresholdPercent",
        json!(c.image_gc_high_threshold_percent),
    );
    put(
        "imageGCLowThresholdPercent",
        json!(c.image_gc_low_threshold_percent),
    );
    put("maxParallelImagePulls", json!(c.max_parallel_image_pulls));
    put("evictionHard", map(&c.eviction_hard, |t| threshold(*t)));
    put("evictionSoft", map(&c.eviction_soft, |t| threshold(*t)));
    put(
        "evictionSoftGracePeriod",
        map(&c.eviction_soft_grace_period, |d| format_duration(*d)),
    );
    put(
        "evictionPressureTransitionPeriod",
        time(c.eviction_pressure_transition_period),
    );
    put(
        "evictionMaxPodGracePeriod",
        json!(c.eviction_max_pod_grace_period),
    );
    put(
        "evictionMinimumReclaim",
        map(&c.eviction_minimum_reclaim, |t| threshold(*t)),
    );
    put(
        "mergeDefaultEvictionSettings",
        json!(c.merge_default_eviction_settings),
    );
    put(
        "containerLogMaxSize",
        match c.container_log_max_size {
            NEVER_ROTATE => json!("-1"),
            size => json!(of_bytes(size)),
        },
    );
    put("containerLogMaxFiles", json!(c.container_log_max_files));
    put("containerLogMaxWorkers", json!(c.container_log_max_workers));
    put(
        "containerLogMonitorInterval",
        time(c.container_log_monitor_interval),
    );
    put(
        "configMapAndSecretChangeDetectionStrategy",
        json!(c.config_map_and_secret_change_detection_strategy),
    );
    put("systemReserved", map(&c.system_reserved, |n| quantity(*n)));
    put("kubeReserved", map(&c.kube_reserved, |n| quantity(*n)));
    put("cpuManagerPolicy", json!(c.cpu_manager_policy.to_string()));
    if !c.cpu_manager_policy_options.is_empty() {
        let options = &c.cpu_manager_policy_options;
        put("cpuManagerPolicyOptions", json!(options));
    }
    put(
        "cpuManagerReconcilePeriod",
        time(c.cpu_manager_reconcile_period),
    );
    put(
        "memoryManagerPolicy",
        json!(c.memory_manager_policy.to_string()),
    );
    put(
        "topologyManagerPolicy",
        json!(c.topology_manager_policy.to_string()),
    );
    put(
        "topologyManagerScope",
        json!(c.topology_manager_scope.to_string()),
    );
    if !c.topology_manager_policy_options.is_empty() {
        let options = &c.topology_manager_policy_options;
        put("topologyManagerPolicyOptions", json!(options));
    }
    if !c.reserved_system_cpus.is_empty() {
        let cpus = c.reserved_system_cpus.to_string();
        put("reservedSystemCPUs", json!(cpus));
    }
    if !c.reserved_memory.is_empty() {
        let memory = c.reserved_memory.iter().map(reserved_memory);
        put("reservedMemory", memory.collect());
    }
    put("enforceNodeAllocatable", json!(c.enforce_node_allocatable));
    reserves(&c.reserves, &mut put);
    put("allowedUnsafeSysctls", json!(c.allowed_unsafe_sysctls));
    put("providerID", json!(c.provider_id));
    let format = match c.logging.format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    put(
        "logging",
        json!({"format": format, "verbosity": c.logging.verbosity}),
    );
    put(
        "crashLoopBackOff",
        json!({"maxContainerRestartPeriod": format_duration(c.max_container_restart_period)}),
    );
    put("seccompDefault", json!(c.seccomp_default));
    put(
        "registerWithTaints",
        c.register_with_taints.iter().map(taint).collect(),
    );
    put("registerNode", json!(c.register_node));
    put("shutdownGracePeriod", time(c.shutdown_grace_period));
    put(
        "shutdownGracePeriodCriticalPods",
        time(c.shutdown_grace_period_critical_pods),
    );
    put(
        "shutdownGracePeriodByPodPriority",
        c.shutdown_grace_period_by_pod_priority
            .iter()
            .map(priority_period)
            .collect(),
    );
    if let Some(tracing) = &c.tracing {
        put(
            "tracing",
            json!({
                "endpoint": tracing.endpoint,
                "samplingRatePerMillion": tracing.sampling_rate_per_million,
            }),
        );
    }
    put(
        "containerRuntimeEndpoint",
        json!(c.container_runtime_endpoint),
    );
    put("imageServiceEndpoint", json!(c.image_service_endpoint));
    put("failCgroupV1", json!(c.fail_cgroup_v1));
    merge(&mut out, &c.without_effect);
    Value::Object(out)
}

fn reserves(c: &Reserves, put: &mut impl FnMut(&str, Value)) {
    put("systemReservedCgroup", json!(c.system_cgroup));
    put("kubeReservedCgroup", json!(c.kube_cgroup));
    put("kubeletCgroups", json!(c.kubelet_cgroups));
    put("systemCgroups", json!(c.system_cgroups));
    if let Some(percent) = c.qos_memory {
        put("qosReserved", json!({"memory": format!("{percent}%")}));
    }
    put("protectKernelDefaults", json!(c.protect_kernel_defaults));
    put("failSwapOn", json!(c.fail_swap_on));
    put("makeIPTablesUtilChains", json!(c.make_iptables_util_chains));
    put(
        "enableControllerAttachDetach",
        json!(c.controller_attach_detach),
    );
    put("memorySwap", json!({"swapBehavior": c.swap.to_string()}));
    put(
        "memoryThrottlingFactor",
        json!(c.memory_throttling.map(factor_of)),
    );
    put(
        "memoryReservationPolicy",
        json!(c.memory_reservation.to_string()),
    );
}

/// Adds what `more` has to `out`, object by object.
fn merge(out: &mut Map<String, Value>, more: &Map<String, Value>) {
    for (name, value) in more {
        match (out.get_mut(name), value) {
            (Some(Value::Object(inner)), Value::Object(more)) => merge(inner, more),
            _ => {
                out.insert(name.clone(), value.clone());
            }
        }
    }
}

fn reserved_memory(reserved: &ReservedMemory) -> Value {
    let limits = reserved.limits.iter();
    let limits: BTreeMap<&String, String> = limits
        .map(|(name, bytes)| (name, of_bytes(*bytes)))
        .collect();
    json!({"numaNode": reserved.node, "limits": limits})
}

fn authentication(authentication: &Authentication) -> Value {
    let mut x509 = Map::new();
    if let Some(file) = &authentication.client_ca_file {
        x509.insert("clientCAFile".to_owned(), path(Some(file)));
    }
    json!({
        "x509": x509,
        "webhook": {
            "enabled": authentication.webhook,
            "cacheTTL": format_duration(authentication.webhook_cache_ttl),
        },
        "anonymous": {"enabled": authentication.anonymous},
    })
}

fn authorization(authorization: &Authorization) -> Value {
    json!({
        "mode": authorization.mode.to_string(),
        "webhook": {
            "cacheAuthorizedTTL": format_duration(authorization.cache_authorized_ttl),
            "cacheUnauthorizedTTL": format_duration(authorization.cache_unauthorized_ttl),
        },
    })
}

fn path(path: Option<&Path>) -> Value {
    json!(path.map(Path::to_string_lossy))
}

fn map<T>(from: &BTreeMap<String, T>, value: impl Fn(&T) -> String) -> Value {
    from.iter()
        .map(|(key, item)| (key.clone(), Value::from(value(item))))
        .collect::<Map<_, _>>()
        .into()
}

fn headers(headers: &BTreeMap<String, Vec<String>>) -> Value {
    let hidden = |values: &Vec<String>| json!(vec![REDACTED; values.len()]);
    if headers.is_empty() {
        return Value::Null;
    }
    headers
        .iter()
        .map(|(name, values)| (name.clone(), hidden(values)))
        .collect::<Map<_, _>>()
        .into()
}

/// A URL whose user and password, if it has them, are left out.
fn without_user(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    match authority.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://{REDACTED}@{host}{tail}"),
        None => url.to_owned(),
    }
}

fn priority_period(group: &PriorityPeriod) -> Value {
    json!({"priority": group.priority, "shutdownGracePeriodSeconds": group.seconds})
}

fn taint(taint: &Taint) -> Value {
    json!({"key": taint.key, "value": taint.value, "effect": taint.effect})
}

/// A quantity of so many billionths.
fn quantity(nanos: i128) -> String {
    let whole = nanos / BILLION;
    if nanos % BILLION != 0 {
        let units = [("m", 1_000_000), ("u", 1_000), ("n", 1)];
        let unit = units.into_iter().find(|(_, scale)| nanos % scale == 0);
        let (unit, scale) = unit.unwrap_or(("n", 1));
        return format!("{}{unit}", nanos / scale);
    }
    u64::try_from(whole).map_or_else(|_| whole.to_string(), of_bytes)
}

fn threshold(threshold: EvictionThreshold) -> String {
    match threshold {
        EvictionThreshold::Quantity(0) => "0%".to_owned(),
        EvictionThreshold::Quantity(amount) => of_bytes(amount),
        EvictionThreshold::Fraction(fraction) => percent(fraction),
    }
}

impl fmt::Display for EvictionThreshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&threshold(*self))
    }
}

/// The shortest percentage that reads back as `fraction`.
fn percent(fraction: f32) -> String {
    let percent = f64::from(fraction) * 100.0;
    (0..=12)
        .map(|digits| format!("{percent:.digits$}"))
        .find(|text| {
            text.parse::<f32>()
                .is_ok_and(|percent| percent / 100.0 == fraction)
        })
        .map_or_else(|| format!("{percent}%"), |text| format!("{text}%"))
}

#[cfg(test)]
mod tests;

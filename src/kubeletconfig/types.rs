//! `KubeletConfiguration`, the fields this version acts on, with upstream's defaults.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::pinning::{
    CpuManagerPolicy, MemoryManagerPolicy, ReservedMemory, TopologyPolicy, TopologyScope,
};
use super::reserves::Reserves;
use super::server::{Authentication, Authorization, TlsVersion};
use crate::types::cpu_set::CpuSet;

/// Who owns the cgroup tree. Must be the driver the container runtime uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CgroupDriver {
    /// Directories are made in cgroupfs directly.
    #[default]
    Cgroupfs,
    /// Slices are asked of systemd.
    Systemd,
}

impl fmt::Display for CgroupDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
        })
    }
}

impl FromStr for CgroupDriver {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cgroupfs" => Ok(Self::Cgroupfs),
            "systemd" => Ok(Self::Systemd),
            other => Err(format!("{other:?} is neither \"cgroupfs\" nor \"systemd\"")),
        }
    }
}

/// `imagePullCredentialsVerificationPolicy`: for which images on the node a pod must show that it may have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageVerification {
    /// None.
    NeverVerify,
    /// Those that the agent pulled.
    #[default]
    NeverVerifyPreloadedImages,
    /// Those that are not on the allowlist.
    NeverVerifyAllowlistedImages,
    /// All.
    AlwaysVerify,
}

impl fmt::Display for ImageVerification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverVerify => "NeverVerify",
            Self::NeverVerifyPreloadedImages => "NeverVerifyPreloadedImages",
            Self::NeverVerifyAllowlistedImages => "NeverVerifyAllowlistedImages",
            Self::AlwaysVerify => "AlwaysVerify",
        })
    }
}

impl FromStr for ImageVerification {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [
            Self::NeverVerify,
            Self::NeverVerifyPreloadedImages,
            Self::NeverVerifyAllowlistedImages,
            Self::AlwaysVerify,
        ]
        .into_iter()
        .find(|policy| policy.to_string() == text)
        .ok_or_else(|| {
            format!(
                "{text:?} is none of \"NeverVerify\", \"NeverVerifyPreloadedImages\", \
                 \"NeverVerifyAllowlistedImages\" and \"AlwaysVerify\""
            )
        })
    }
}

/// `containerLogMaxSize` of logs that are not rotated.
pub const NEVER_ROTATE: u64 = u64::MAX;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("{other:?} is neither \"text\" nor \"json\"")),
        }
    }
}

/// Which pods of the API server are started after a reboot while it cannot be reached. An agent's
/// restart without a reboot resumes all pods whatever this says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OfflineStart {
    /// Every pod the store holds as admitted.
    All,
    /// Those that cannot do harm by running twice.
    #[default]
    Safe,
    /// None until the API server has answered.
    None,
}

impl FromStr for OfflineStart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "All" => Ok(Self::All),
            "Safe" => Ok(Self::Safe),
            "None" => Ok(Self::None),
            other => Err(format!("{other:?} is none of \"All\", \"Safe\", \"None\"")),
        }
    }
}

/// Whether a container of policy Always may start from the image it ran with before, while its registry does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullFallback {
    /// It waits for the registry, as upstream.
    #[default]
    Never,
    /// It may.
    Offline,
}

impl FromStr for PullFallback {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "Never" => Ok(Self::Never),
            "Offline" => Ok(Self::Offline),
            other => Err(format!("{other:?} is neither \"Never\" nor \"Offline\"")),
        }
    }
}

/// Policy for back-offs whose likely cause is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackOffEarlyEnd {
    /// They end early.
    #[default]
    Enabled,
    /// They run their time, as upstream.
    Disabled,
}

impl FromStr for BackOffEarlyEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "Enabled" => Ok(Self::Enabled),
            "Disabled" => Ok(Self::Disabled),
            other => Err(format!("{other:?} is neither \"Enabled\" nor \"Disabled\"")),
        }
    }
}

/// Reaction to a pod that has to start containers again after a start of the agent, while its devices are away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceReadiness {
    /// It fails, as upstream.
    #[default]
    Fail,
    /// It stays Pending until they are back.
    Wait,
}

impl FromStr for DeviceReadiness {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "Fail" => Ok(Self::Fail),
            "Wait" => Ok(Self::Wait),
            other => Err(format!("{other:?} is neither \"Fail\" nor \"Wait\"")),
        }
    }
}

/// A taint the node registers with, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taint {
    /// A qualified name.
    pub key: String,
    /// A label value, often empty.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// How long pods of a priority have when the node shuts down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityPeriod {
    /// The lowest priority of the group.
    pub priority: i32,
    /// Seconds for the whole group, not negative.
    pub seconds: i64,
}

/// How much of a resource must be left before pods are evicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EvictionThreshold {
    /// An amount: bytes, inodes or processes.
    Quantity(u64),
    /// A part of the capacity, above 0 and below 1; single precision, as upstream keeps it.
    Fraction(f32),
}

// A fraction is never NaN: the parser refuses it.
impl Eq for EvictionThreshold {}

impl EvictionThreshold {
    /// The amount that must be left of `capacity`, as upstream's `GetThresholdQuantity`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "the arithmetic is upstream's, so that allocatable comes out the same"
    )]
    pub fn of(self, capacity: u64) -> u64 {
        match self {
            Self::Quantity(amount) => amount,
            Self::Fraction(fraction) => (capacity as f64 * f64::from(fraction)) as u64,
        }
    }
}

/// Upstream's `evictionHard` when none is given.
pub(super) fn default_eviction_hard() -> BTreeMap<String, EvictionThreshold> {
    let percent = |percent: f32| EvictionThreshold::Fraction(percent / 100.0);
    [
        ("memory.available", EvictionThreshold::Quantity(100 << 20)),
        ("nodefs.available", percent(10.0)),
        ("nodefs.inodesFree", percent(5.0)),
        ("imagefs.available", percent(15.0)),
        ("imagefs.inodesFree", percent(5.0)),
    ]
    .into_iter()
    .map(|(signal, threshold)| (signal.to_owned(), threshold))
    .collect()
}

/// The `logging` section.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logging {
    /// `format`.
    pub format: LogFormat,
    /// `verbosity`, as klog's `-v`.
    pub verbosity: u32,
}

/// The `tracing` section: where spans are sent to, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracing {
    /// `endpoint`: the collector (OTLP over gRPC, without TLS), as `host:port` or `unix:///path`.
    pub endpoint: String,
    /// `samplingRatePerMillion`: of a million traces that begin here so many are sent; 0 for none.
    pub sampling_rate_per_million: u32,
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            endpoint: "localhost:4317".to_owned(),
            sampling_rate_per_million: 0,
        }
    }
}

/// The typed part of upstream's `KubeletConfiguration` (v1beta1). Field comments name the upstream
/// field where the name differs; units are in the types. [`Default`] gives upstream's defaults except
/// for `fail_cgroup_v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletConfiguration {
    /// Directory of static pods, or one manifest file.
    pub static_pod_path: Option<PathBuf>,
    /// How often a running pod is synced at the latest.
    pub sync_frequency: Duration,
    /// How often the manifest directory is listed, beside change notifications.
    pub file_check_frequency: Duration,
    /// How often the manifest URL is fetched.
    pub http_check_frequency: Duration,
    /// `staticPodURL`.
    pub static_pod_url: Option<String>,
    /// `staticPodURLHeader`: header values by name, in the order given.
    pub static_pod_url_header: BTreeMap<String, Vec<String>>,
    /// Port of `/healthz`; 0 turns the endpoint off.
    pub healthz_port: u16,
    /// Address of `/healthz`.
    pub healthz_bind_address: IpAddr,
    /// `cgroupsPerQOS`: whether pods live below QoS cgroups.
    pub cgroups_per_qos: bool,
    /// The cgroup below which pods live; `/` when unset.
    pub cgroup_root: String,
    /// Who owns the cgroup tree.
    pub cgroup_driver: CgroupDriver,
    /// Where the runtime writes container logs.
    pub pod_logs_dir: PathBuf,
    /// Size in bytes at which a container log is rotated; [`NEVER_ROTATE`] for never.
    pub container_log_max_size: u64,
    /// How many log files are kept per container.
    pub container_log_max_files: u32,
    /// How many container logs are rotated at once.
    pub container_log_max_workers: u32,
    /// How often the sizes of container logs are looked at.
    pub container_log_monitor_interval: Duration,
    /// How old an image must be before it is removed to free space.
    pub image_minimum_gc_age: Duration,
    /// After how long an image that nobody uses is removed; zero for never.
    pub image_maximum_gc_age: Duration,
    /// Percentage of the images' disk at which unused images are removed; 100 for never.
    pub image_gc_high_threshold_percent: u8,
    /// Percentage down to which they are removed.
    pub image_gc_low_threshold_percent: u8,
    /// Whether images are pulled one at a time.
    pub serialize_image_pulls: bool,
    /// How many images are pulled at once; no limit when unset and pulls are not serialised.
    pub max_parallel_image_pulls: Option<u32>,
    /// For which images on the node a pod must show that it may have them.
    pub image_pull_credentials_verification_policy: ImageVerification,
    /// `preloadedImagesVerificationAllowlist`: repositories with their registry and without tag, or what ends in
    /// `/*`.
    pub preloaded_images_verification_allowlist: Vec<String>,
    /// How many pods may run on the node.
    pub max_pods: u32,
    /// `podsPerCore`: how many of them for each processor; 0 for no such limit.
    pub pods_per_core: u32,
    /// `singleProcessOOMKill`; `None` for upstream's default: on with cgroup v1, off with v2.
    pub single_process_oom_kill: Option<bool>,
    /// `oomScoreAdj`: how likely the kernel kills the agent when memory is out, from -1000 (never) to 1000.
    pub oom_score_adj: i32,
    /// Process limit of one pod; `None` for no limit (upstream's -1).
    pub pod_pids_limit: Option<u64>,
    /// `cpuCFSQuota`: whether CPU limits are enforced by CFS quota.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod`.
    pub cpu_cfs_quota_period: Duration,
    /// `resolvConf`; `None` when set to the empty string: pods get no host resolver configuration.
    pub resolv_conf: Option<PathBuf>,
    /// `clusterDNS`.
    pub cluster_dns: Vec<IpAddr>,
    /// DNS domain of the cluster; empty for none.
    pub cluster_domain: String,
    /// CRI runtime endpoint as written; the resolved one is in `AgentConfig`.
    pub container_runtime_endpoint: String,
    /// CRI image endpoint as written; empty means the runtime's.
    pub image_service_endpoint: String,
    /// Deadline of a runtime call that is not long-running.
    pub runtime_request_timeout: Duration,
    /// Whether to refuse to run on cgroup v1.
    pub fail_cgroup_v1: bool,
    /// Whether containers that say nothing have the runtime's seccomp profile instead of none.
    pub seccomp_default: bool,
    /// The `logging` section.
    pub logging: Logging,
    /// The `tracing` section; `None` when there is none.
    pub tracing: Option<Tracing>,
    /// Events recorded per second; 0 for no limit.
    pub event_record_qps: u32,
    /// Burst of events above the rate.
    pub event_burst: u32,
    /// `crashLoopBackOff.maxContainerRestartPeriod`: longest delay between restarts of a container.
    pub max_container_restart_period: Duration,
    /// Whether the kubelet's API is served.
    pub enable_server: bool,
    /// Address of the kubelet's API.
    pub address: IpAddr,
    /// Port of the kubelet's API, which the node's status names.
    pub port: u16,
    /// Port of the part of the API that is served without TLS and to everybody; 0 for none.
    pub read_only_port: u16,
    /// Certificate and further ones up to the CA; with `tls_private_key_file`.
    pub tls_cert_file: Option<PathBuf>,
    /// Key of `tls_cert_file`.
    pub tls_private_key_file: Option<PathBuf>,
    /// `tlsMinVersion`.
    pub tls_min_version: TlsVersion,
    /// `tlsCipherSuites`: Go's names of those of TLS 1.2 that may be used; empty for all.
    pub tls_cipher_suites: Vec<String>,
    /// `tlsCurvePreferences`: the numbers of the groups that keys may be exchanged in; empty for all.
    pub tls_curve_preferences: Vec<i32>,
    /// `serverTLSBootstrap`: the serving certificate is asked of the API server and renewed.
    pub server_tls_bootstrap: bool,
    /// How users of the kubelet's API prove who they are.
    pub authentication: Authentication,
    /// How it is decided what they may do.
    pub authorization: Authorization,
    /// How long a stream (exec, attach, port-forward) may be silent; zero for no limit.
    pub streaming_connection_idle_timeout: Duration,
    /// Whether the API has logs, exec, attach, port-forward, run and the like.
    pub enable_debugging_handlers: bool,
    /// Whether it has `/debug/pprof`.
    pub enable_profiling_handler: bool,
    /// Whether it has `/debug/flags`.
    pub enable_debug_flags_handler: bool,
    /// Whether it has `/logs/`.
    pub enable_system_log_handler: bool,
    /// Whether `/logs/` answers queries of the journal.
    pub enable_system_log_query: bool,
    /// Whether the client certificate is renewed through the API server before it expires.
    pub rotate_certificates: bool,
    /// How often the node's status is computed.
    pub node_status_update_frequency: Duration,
    /// How often the node's status is written when nothing changed.
    pub node_status_report_frequency: Duration,
    /// How long the node's lease is good for; it is renewed four times in that time.
    pub node_lease_duration_seconds: i32,
    /// How many images the node's status lists; `None` for all.
    pub node_status_max_images: Option<u32>,
    /// `kubeAPIQPS`: requests to the API server per second; never 0.
    pub kube_api_qps: u32,
    /// `kubeAPIBurst`: requests above the rate after a quiet time; never 0.
    pub kube_api_burst: u32,
    /// `contentType`: how bodies are encoded. JSON is spoken whatever this says.
    pub content_type: String,
    /// How changes of configMaps and secrets are noticed. They are watched whatever this says.
    pub config_map_and_secret_change_detection_strategy: String,
    /// Least amounts that must be left on the node, by eviction signal such as `memory.available`; 0 for none.
    pub eviction_hard: BTreeMap<String, EvictionThreshold>,
    /// As `eviction_hard`, of thresholds that have to be met for a grace period before pods are evicted.
    pub eviction_soft: BTreeMap<String, EvictionThreshold>,
    /// These grace periods, by signal.
    pub eviction_soft_grace_period: BTreeMap<String, Duration>,
    /// How long a condition of pressure outlives its last observation.
    pub eviction_pressure_transition_period: Duration,
    /// Longest grace period in seconds of a pod that is evicted for a soft threshold; less than 1 counts as 1.
    pub eviction_max_pod_grace_period: i32,
    /// What has to be freed beyond a threshold once it was met, by signal.
    pub eviction_minimum_reclaim: BTreeMap<String, EvictionThreshold>,
    /// Whether signals that `eviction_hard` does not name keep their defaults. Has been applied to
    /// `eviction_hard` already.
    pub merge_default_eviction_settings: bool,
    /// What is kept from pods for the system, by resource name (`cpu`, `memory`, `ephemeral-storage`, `pid`), in
    /// billionths of a core, byte or process.
    pub system_reserved: BTreeMap<String, i128>,
    /// What is kept from pods for Kubernetes itself; as `system_reserved`.
    pub kube_reserved: BTreeMap<String, i128>,
    /// Policy of the CPU manager.
    pub cpu_manager_policy: CpuManagerPolicy,
    /// Options of that policy, see [`KubeletConfiguration::cpu_options`].
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// Interval at which the CPUs of running containers are compared with those last applied.
    pub cpu_manager_reconcile_period: Duration,
    /// Policy of the memory manager.
    pub memory_manager_policy: MemoryManagerPolicy,
    /// Policy of the topology manager.
    pub topology_manager_policy: TopologyPolicy,
    /// Unit that is aligned: a container or a pod.
    pub topology_manager_scope: TopologyScope,
    /// Options of the topology manager, see [`KubeletConfiguration::topology_options`].
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// CPUs that no container gets for itself; empty for the lowest. Has been applied to `system_reserved` and
    /// `kube_reserved` already.
    pub reserved_system_cpus: CpuSet,
    /// Memory that is kept from pods, by NUMA node.
    pub reserved_memory: Vec<ReservedMemory>,
    /// Groups limited to their share of the node: `pods`, `system-reserved`, `kube-reserved`, and of the latter two
    /// `…-compressible`; empty or `none` for nothing.
    pub enforce_node_allocatable: Vec<String>,
    /// Other settings that share the node between pods and everything else.
    pub reserves: Reserves,
    /// Sysctls, or prefixes ending in `*`, that pods may set although they are not known as safe.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// `providerID`: the instance's name at the cloud provider.
    pub provider_id: Option<String>,
    /// Taints the node registers with.
    pub register_with_taints: Vec<Taint>,
    /// Whether the node's object is created when there is none.
    pub register_node: bool,
    /// How long all pods together have when the node shuts down; zero = the shutdown is not delayed.
    pub shutdown_grace_period: Duration,
    /// The part of it that is kept for critical pods, which are stopped last.
    pub shutdown_grace_period_critical_pods: Duration,
    /// The same by priority, instead of those two.
    pub shutdown_grace_period_by_pod_priority: Vec<PriorityPeriod>,
    /// Fields that were given and that nothing acts on, by their names in the file. For `/configz` alone.
    pub without_effect: serde_json::Map<String, serde_json::Value>,
}

impl Default for KubeletConfiguration {
    fn default() -> Self {
        Self {
            static_pod_path: None,
            sync_frequency: Duration::from_secs(60),
            file_check_frequency: Duration::from_secs(20),
            http_check_frequency: Duration::from_secs(20),
            static_pod_url: None,
            static_pod_url_header: BTreeMap::new(),
            healthz_port: 10248,
            healthz_bind_address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            cgroups_per_qos: true,
            cgroup_root: String::new(),
            cgroup_driver: CgroupDriver::default(),
            pod_logs_dir: PathBuf::from("/var/log/pods"),
            container_log_max_size: 10 << 20,
            container_log_max_files: 5,
            container_log_max_workers: 1,
            container_log_monitor_interval: Duration::from_secs(10),
            image_minimum_gc_age: Duration::from_secs(120),
            image_maximum_gc_age: Duration::ZERO,
            image_gc_high_threshold_percent: 85,
            image_gc_low_threshold_percent: 80,
            serialize_image_pulls: true,
            max_parallel_image_pulls: None,
            image_pull_credentials_verification_policy: ImageVerification::default(),
            preloaded_images_verification_allowlist: Vec::new(),
            max_pods: 110,
            pods_per_core: 0,
            single_process_oom_kill: None,
            oom_score_adj: -999,
            pod_pids_limit: None,
            cpu_cfs_quota: true,
            cpu_cfs_quota_period: Duration::from_millis(100),
            resolv_conf: Some(PathBuf::from("/etc/resolv.conf")),
            cluster_dns: Vec::new(),
            cluster_domain: String::new(),
            container_runtime_endpoint: "unix:///run/containerd/containerd.sock".to_owned(),
            image_service_endpoint: String::new(),
            runtime_request_timeout: Duration::from_secs(120),
            fail_cgroup_v1: false,
            seccomp_default: false,
            logging: Logging::default(),
            tracing: None,
            event_record_qps: 50,
            event_burst: 100,
            max_container_restart_period: Duration::from_secs(300),
            enable_server: true,
            address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            port: 10250,
            read_only_port: 0,
            tls_cert_file: None,
            tls_private_key_file: None,
            tls_min_version: TlsVersion::default(),
            tls_cipher_suites: Vec::new(),
            tls_curve_preferences: Vec::new(),
            server_tls_bootstrap: false,
            authentication: Authentication::default(),
            authorization: Authorization::default(),
            streaming_connection_idle_timeout: Duration::from_secs(4 * 3600),
            enable_debugging_handlers: true,
            enable_profiling_handler: true,
            enable_debug_flags_handler: true,
            enable_system_log_handler: true,
            enable_system_log_query: false,
            rotate_certificates: false,
            node_status_update_frequency: Duration::from_secs(10),
            node_status_report_frequency: Duration::from_secs(300),
            node_lease_duration_seconds: 40,
            node_status_max_images: Some(50),
            kube_api_qps: 50,
            kube_api_burst: 100,
            content_type: "application/vnd.kubernetes.protobuf".to_owned(),
            config_map_and_secret_change_detection_strategy: "Watch".to_owned(),
            eviction_hard: default_eviction_hard(),
            eviction_soft: BTreeMap::new(),
            eviction_soft_grace_period: BTreeMap::new(),
            eviction_pressure_transition_period: Duration::from_secs(300),
            eviction_max_pod_grace_period: 0,
            eviction_minimum_reclaim: BTreeMap::new(),
            merge_default_eviction_settings: false,
            system_reserved: BTreeMap::new(),
            kube_reserved: BTreeMap::new(),
            cpu_manager_policy: CpuManagerPolicy::default(),
            cpu_manager_policy_options: BTreeMap::new(),
            cpu_manager_reconcile_period: Duration::from_secs(10),
            memory_manager_policy: MemoryManagerPolicy::default(),
            topology_manager_policy: TopologyPolicy::default(),
            topology_manager_scope: TopologyScope::default(),
            topology_manager_policy_options: BTreeMap::new(),
            reserved_system_cpus: CpuSet::new(),
            reserved_memory: Vec::new(),
            enforce_node_allocatable: vec!["pods".to_owned()],
            reserves: Reserves::default(),
            allowed_unsafe_sysctls: Vec::new(),
            provider_id: None,
            register_with_taints: Vec::new(),
            register_node: true,
            shutdown_grace_period: Duration::ZERO,
            shutdown_grace_period_critical_pods: Duration::ZERO,
            shutdown_grace_period_by_pod_priority: Vec::new(),
            without_effect: serde_json::Map::new(),
        }
    }
}

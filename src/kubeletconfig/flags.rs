//! The command line of `holdfast run`: the kubelet's own flag names, and a few of our own.
//!
//! Every flag is an `Option`: `None` means it was not given, so that the file decides. Syntax is
//! pflag's: `--flag value`, `--flag=value`, and for booleans `--flag` or `--flag=false`. Given twice, the
//! last one wins, except that lists and maps that "may be repeated" add up.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::cluster;
use super::decode::parse_ip;
use super::duration::parse_duration;
use super::eviction;
use super::pinning::{
    self, CpuManagerPolicy, MemoryManagerPolicy, ReservedMemory, TopologyPolicy, TopologyScope,
};
use super::quantity::parse_log_size;
use super::reserves;
use super::server::ServerFlags;
use super::types::{
    BackOffEarlyEnd, CgroupDriver, DeviceReadiness, EvictionThreshold, LogFormat, OfflineStart,
    PullFallback, Taint,
};
use super::unsupported::UnsupportedFlags;
use crate::types::cpu_set::CpuSet;

/// Flags of `holdfast run`.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(args_override_self = true)]
pub struct KubeletFlags {
    /// Directory for pod volumes and other files of the node [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub root_dir: Option<PathBuf>,

    /// Directory of the store; one agent per directory [default: /var/lib/holdfast]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// KubeletConfiguration file; flags win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Directory of drop-ins (*.conf), which win over --config and lose against flags
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,

    /// Node name to use instead of the host name
    #[arg(long, value_name = "NAME")]
    pub hostname_override: Option<String>,

    /// CRI runtime socket; one agent per runtime [default: unix:///run/containerd/containerd.sock]
    #[arg(long, value_name = "ENDPOINT")]
    pub container_runtime_endpoint: Option<String>,

    /// CRI image socket [default: that of the runtime]
    #[arg(long, value_name = "ENDPOINT")]
    pub image_service_endpoint: Option<String>,

    /// Directory of static pod manifests, or one manifest file
    #[arg(long, value_name = "PATH")]
    pub pod_manifest_path: Option<PathBuf>,

    /// URL of further static pod manifests
    #[arg(long, value_name = "URL")]
    pub manifest_url: Option<String>,

    /// Headers for --manifest-url, such as 'a:hello,b:again'; may be repeated
    #[arg(long, value_name = "NAME:VALUE,…", value_parser = parse_headers, action = clap::ArgAction::Append)]
    pub manifest_url_header: Vec<Headers>,

    /// How often the manifest directory is listed [default: 20s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub file_check_frequency: Option<Duration>,

    /// How often the manifest URL is fetched [default: 20s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub http_check_frequency: Option<Duration>,

    /// How often a running pod is synced at the latest [default: 1m]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub sync_frequency: Option<Duration>,

    /// Start the pods of the manifests, wait until they run, exit
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub runonce: Option<bool>,

    /// Log verbosity, as klog's: 0 to 3 info, 4 and 5 debug, from 6 trace
    #[arg(short = 'v', long = "v", value_name = "LEVEL")]
    pub v: Option<u32>,

    /// Log format: text or json [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = str::parse::<LogFormat>)]
    pub logging_format: Option<LogFormat>,

    /// Write logs to this file instead of standard error; SIGHUP reopens it
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Port of /healthz, /readyz and /metrics; 0 turns them off [default: 10248]
    #[arg(long, value_name = "PORT")]
    pub healthz_port: Option<u16>,

    /// Address of /healthz [default: 127.0.0.1]
    #[arg(long, value_name = "IP", value_parser = parse_ip)]
    pub healthz_bind_address: Option<IpAddr>,

    /// Who owns the cgroup tree: cgroupfs or systemd; must match the runtime [default: cgroupfs]
    #[arg(long, value_name = "DRIVER", value_parser = str::parse::<CgroupDriver>)]
    pub cgroup_driver: Option<CgroupDriver>,

    /// Cgroup below which pods live [default: /]
    #[arg(long, value_name = "CGROUP")]
    pub cgroup_root: Option<String>,

    /// Whether pods live below QoS cgroups [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub cgroups_per_qos: Option<bool>,

    /// Refuse to run on cgroup v1 [default: false]
    #[arg(long = "fail-cgroupv1", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub fail_cgroup_v1: Option<bool>,

    /// Give containers that name no seccomp profile the runtime's instead of none [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub seccomp_default: Option<bool>,

    /// IP address of the node, or two of different families separated by a comma
    #[arg(long, value_name = "IP[,IP]")]
    pub node_ip: Option<String>,

    /// Labels the node registers with, key=value separated by commas; may be repeated
    #[arg(long, value_name = "LABELS", value_parser = parse_labels, action = clap::ArgAction::Append)]
    pub node_labels: Vec<Labels>,

    /// How many pods may run [default: 110]
    #[arg(long, value_name = "COUNT")]
    pub max_pods: Option<u32>,

    /// How many pods may run for each processor; 0 for no such limit [default: 0]
    #[arg(long, value_name = "COUNT")]
    pub pods_per_core: Option<u32>,

    /// How likely the kernel kills the agent when memory is out, from -1000 (never) to 1000 [default: -999]
    #[arg(long, value_name = "SCORE", allow_negative_numbers = true)]
    pub oom_score_adj: Option<i32>,

    /// Process limit of one pod; -1 for no limit [default: -1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    pub pod_max_pids: Option<i64>,

    /// Deadline of runtime calls that are not long-running [default: 2m]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub runtime_request_timeout: Option<Duration>,

    /// Pull images one at a time [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub serialize_image_pulls: Option<bool>,

    /// Enforce CPU limits by CFS quota [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub cpu_cfs_quota: Option<bool>,

    /// CFS quota period [default: 100ms]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub cpu_cfs_quota_period: Option<Duration>,

    /// Resolver configuration handed to pods; empty for none [default: /etc/resolv.conf]
    #[arg(long, value_name = "FILE")]
    pub resolv_conf: Option<PathBuf>,

    /// Addresses of the cluster's DNS servers, separated by commas; may be repeated
    #[arg(long, value_name = "IP,…", value_parser = parse_ips, action = clap::ArgAction::Append)]
    pub cluster_dns: Vec<Addresses>,

    /// DNS domain of the cluster
    #[arg(long, value_name = "DOMAIN")]
    pub cluster_domain: Option<String>,

    /// Events recorded per second; 0 for no limit [default: 50]
    #[arg(long, value_name = "RATE")]
    pub event_qps: Option<u32>,

    /// Events recorded at once, while --event-qps is not 0 [default: 100]
    #[arg(long, value_name = "COUNT")]
    pub event_burst: Option<u32>,

    /// Size at which a container log is rotated; a negative one for never [default: 10Mi]
    #[arg(long, value_name = "SIZE", value_parser = parse_log_size, allow_negative_numbers = true)]
    pub container_log_max_size: Option<u64>,

    /// Log files kept per container [default: 5]
    #[arg(long, value_name = "COUNT")]
    pub container_log_max_files: Option<u32>,

    /// Percentage of the images' disk at which unused images are removed; 100 for never [default: 85]
    #[arg(long, value_name = "PERCENT")]
    pub image_gc_high_threshold: Option<u8>,

    /// Percentage down to which they are removed [default: 80]
    #[arg(long, value_name = "PERCENT")]
    pub image_gc_low_threshold: Option<u8>,

    /// Age an image must have before it is removed to free space [default: 2m]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub minimum_image_ttl_duration: Option<Duration>,

    /// Directory of the links to container logs [default: /var/log/containers]
    #[arg(long, value_name = "DIR")]
    pub container_logs_dir: Option<PathBuf>,

    /// Age a dead container has before it may be removed [default: 0s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub minimum_container_ttl_duration: Option<Duration>,

    /// Dead instances kept per container [default: 1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    pub maximum_dead_containers_per_container: Option<i32>,

    /// Dead instances kept on the node; negative for no limit [default: -1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    pub maximum_dead_containers: Option<i32>,

    /// Which API pods start after a reboot while the API server is out of reach: All, Safe or None [default: Safe]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<OfflineStart>)]
    pub offline_start: Option<OfflineStart>,

    /// Whether a container of policy Always starts from the image it ran with before, once its registry has not answered for 10 s: Never or Offline [default: Never]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<PullFallback>)]
    pub image_pull_policy_fallback: Option<PullFallback>,

    /// End back-offs of containers, image pulls and mounts early once their likely cause is gone: Enabled or Disabled [default: Enabled]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<BackOffEarlyEnd>)]
    pub back_off_early_end: Option<BackOffEarlyEnd>,

    /// Reaction to a pod that has to start again before its device plugin is back: Fail or Wait [default: Fail]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<DeviceReadiness>)]
    pub device_readiness: Option<DeviceReadiness>,

    /// Kubeconfig of the API server to join; without one, static pods only
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Kubeconfig with which a client certificate is asked for while --kubeconfig does not exist or has expired
    #[arg(long, value_name = "FILE")]
    pub bootstrap_kubeconfig: Option<PathBuf>,

    /// Kubeconfig with which a client certificate is asked for when the node's has expired and the bootstrap gives none;
    /// the systemd credential holdfast.lifeline wins
    #[arg(long, value_name = "FILE")]
    pub lifeline_kubeconfig: Option<PathBuf>,

    /// Directory of certificates that were asked for or made [default: pki in the root directory]
    #[arg(long, value_name = "DIR")]
    pub cert_dir: Option<PathBuf>,

    /// Renew the client certificate through the API server before it expires [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub rotate_certificates: Option<bool>,

    /// Key that secrets on disk are encrypted with; the systemd credential holdfast.secrets-key wins
    #[arg(long, value_name = "FILE")]
    pub secrets_key_file: Option<PathBuf>,

    /// CredentialProviderConfig file: programs that are asked for credentials of registries
    #[arg(long, value_name = "FILE")]
    pub image_credential_provider_config: Option<PathBuf>,

    /// Directory of these programs
    #[arg(long, value_name = "DIR")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,

    /// Requests to the API server per second [default: 50]
    #[arg(long, value_name = "RATE")]
    pub kube_api_qps: Option<u32>,

    /// Requests to the API server at once after a quiet time [default: 100]
    #[arg(long, value_name = "COUNT")]
    pub kube_api_burst: Option<u32>,

    /// Encoding of bodies; JSON is spoken whatever this says
    #[arg(long, value_name = "TYPE")]
    pub kube_api_content_type: Option<String>,

    /// Create the node's object when there is none [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub register_node: Option<bool>,

    /// Taints the node registers with, key=value:effect separated by commas
    #[arg(long, value_name = "TAINTS", value_parser = parse_taints)]
    pub register_with_taints: Option<Taints>,

    /// The instance's name at the cloud provider
    #[arg(long, value_name = "ID")]
    pub provider_id: Option<String>,

    /// Who initialises the node: empty for nobody, external for a cloud controller manager
    #[arg(long, value_name = "PROVIDER")]
    pub cloud_provider: Option<String>,

    /// Port of the kubelet's API, which the node's status names [default: 10250]
    #[arg(long, value_name = "PORT")]
    pub port: Option<u16>,

    /// How often the node's status is computed [default: 10s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub node_status_update_frequency: Option<Duration>,

    /// How many images the node's status lists; -1 for all [default: 50]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    pub node_status_max_images: Option<i32>,

    /// Kept from pods for the system, such as cpu=200m,memory=500Mi; may be repeated
    #[arg(long, value_name = "RESOURCES", value_parser = parse_reserved, action = clap::ArgAction::Append)]
    pub system_reserved: Vec<Reserved>,

    /// Kept from pods for Kubernetes itself, such as cpu=200m,memory=500Mi; may be repeated
    #[arg(long, value_name = "RESOURCES", value_parser = parse_reserved, action = clap::ArgAction::Append)]
    pub kube_reserved: Vec<Reserved>,

    /// Groups limited to their share of the node: pods, system-reserved, kube-reserved, system-reserved-compressible, kube-reserved-compressible, or none [default: pods]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub enforce_node_allocatable: Option<Vec<String>>,

    /// Sysctls, or prefixes ending in '*', that pods may set although they are not known as safe; may be repeated
    #[arg(long, value_name = "SYSCTLS", value_delimiter = ',', action = clap::ArgAction::Append)]
    pub allowed_unsafe_sysctls: Vec<String>,

    /// Flags of how the node is shared.
    #[command(flatten)]
    pub reserves: ReserveFlags,

    /// Flags of eviction.
    #[command(flatten)]
    pub eviction: EvictionFlags,

    /// Flags of the CPU, memory and topology managers.
    #[command(flatten)]
    pub pinning: PinningFlags,

    /// Flags of the kubelet's API.
    #[command(flatten)]
    pub server: ServerFlags,

    /// Flags the kubelet knows and this version does not act on.
    #[command(flatten)]
    pub unsupported: UnsupportedFlags,
}

/// Flags of how the node is shared between pods and everything else.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ReserveFlags {
    /// Cgroup limited to --system-reserved, if --enforce-node-allocatable has system-reserved
    #[arg(long, value_name = "CGROUP")]
    pub system_reserved_cgroup: Option<String>,

    /// Cgroup limited to --kube-reserved, if --enforce-node-allocatable has kube-reserved
    #[arg(long, value_name = "CGROUP")]
    pub kube_reserved_cgroup: Option<String>,

    /// Cgroup that the agent moves itself into
    #[arg(long, value_name = "CGROUP")]
    pub kubelet_cgroups: Option<String>,

    /// Cgroup for processes of the root cgroup
    #[arg(long, value_name = "CGROUP")]
    pub system_cgroups: Option<String>,

    /// Share of memory requests that pods of lower classes cannot use, such as memory=50%
    #[arg(long, value_name = "SHARES", value_parser = parse_qos_reserved)]
    pub qos_reserved: Option<QosShares>,

    /// Leave kernel settings unchanged and report those that differ from Kubernetes' [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub protect_kernel_defaults: Option<bool>,

    /// Report swap that is on [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub fail_swap_on: Option<bool>,

    /// Maintain the iptables chains by which other programs find the kubelet's rules [default: true]
    #[arg(long = "make-iptables-util-chains", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub make_iptables_util_chains: Option<bool>,

    /// Let the controller manager attach volumes to this node [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub enable_controller_attach_detach: Option<bool>,
}

/// Percentages of `--qos-reserved` by resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QosShares(pub BTreeMap<String, u8>);

/// Flags of eviction.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct EvictionFlags {
    /// What must be left on the node, such as 'memory.available<1Gi,nodefs.available<10%', or pods are evicted at once; may be repeated
    #[arg(long, value_name = "THRESHOLDS", value_parser = parse_thresholds, action = clap::ArgAction::Append)]
    pub eviction_hard: Vec<Thresholds>,

    /// What must be left on the node, or pods are evicted after a grace period; may be repeated
    #[arg(long, value_name = "THRESHOLDS", value_parser = parse_thresholds, action = clap::ArgAction::Append)]
    pub eviction_soft: Vec<Thresholds>,

    /// Grace periods of --eviction-soft, such as memory.available=90s; may be repeated
    #[arg(long, value_name = "PERIODS", value_parser = parse_graces, action = clap::ArgAction::Append)]
    pub eviction_soft_grace_period: Vec<Periods>,

    /// What is freed beyond a threshold, such as memory.available=100Mi,nodefs.available=5%; may be repeated
    #[arg(long, value_name = "AMOUNTS", value_parser = parse_reclaims, action = clap::ArgAction::Append)]
    pub eviction_minimum_reclaim: Vec<Reclaims>,

    /// How long the node reports pressure after it was last seen [default: 5m]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub eviction_pressure_transition_period: Option<Duration>,

    /// Longest grace period in seconds of a pod that is evicted for a soft threshold; less than 1 counts as 1 [default: 0]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub eviction_max_pod_grace_period: Option<i32>,
}

/// Flags of the CPU, memory and topology managers.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct PinningFlags {
    /// CPU manager: none, or static, which gives CPUs to containers of Guaranteed pods for themselves [default: none]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<CpuManagerPolicy>)]
    pub cpu_manager_policy: Option<CpuManagerPolicy>,

    /// Options of the CPU manager's policy, such as full-pcpus-only=true; may be repeated
    #[arg(long, value_name = "OPTIONS", value_parser = parse_options, action = clap::ArgAction::Append)]
    pub cpu_manager_policy_options: Vec<Options>,

    /// Interval at which the CPUs of running containers are corrected [default: 10s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub cpu_manager_reconcile_period: Option<Duration>,

    /// Memory manager: None, or Static, which binds containers of Guaranteed pods to NUMA nodes [default: None]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<MemoryManagerPolicy>)]
    pub memory_manager_policy: Option<MemoryManagerPolicy>,

    /// Memory kept from pods by NUMA node, such as '0:memory=1Gi,hugepages-1Gi=2Gi;1:memory=2Gi'; may be repeated
    #[arg(long, value_name = "MEMORY", value_parser = parse_reserved_memory, action = clap::ArgAction::Append)]
    pub reserved_memory: Vec<NodeMemory>,

    /// CPUs that no container gets for itself, such as 0-1,4; replaces cpu of --system-reserved and --kube-reserved
    #[arg(long, value_name = "CPUS", value_parser = pinning::parse_cpus)]
    pub reserved_cpus: Option<CpuSet>,

    /// Topology manager: none, best-effort, restricted or single-numa-node [default: none]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<TopologyPolicy>)]
    pub topology_manager_policy: Option<TopologyPolicy>,

    /// Unit that the topology manager aligns: container or pod [default: container]
    #[arg(long, value_name = "SCOPE", value_parser = str::parse::<TopologyScope>)]
    pub topology_manager_scope: Option<TopologyScope>,

    /// Options of the topology manager, such as prefer-closest-numa-nodes=true; may be repeated
    #[arg(long, value_name = "OPTIONS", value_parser = parse_options, action = clap::ArgAction::Append)]
    pub topology_manager_policy_options: Vec<Options>,
}

/// Headers of one `--manifest-url-header`, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headers(pub Vec<(String, String)>);

/// Addresses of one `--cluster-dns`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses(pub Vec<IpAddr>);

/// Labels of one `--node-labels`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels(pub BTreeMap<String, String>);

/// Taints of `--register-with-taints`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taints(pub Vec<Taint>);

/// Resources of one `--system-reserved` or `--kube-reserved`, in billionths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved(pub BTreeMap<String, i128>);

/// Thresholds of one `--eviction-hard` or `--eviction-soft`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thresholds(pub BTreeMap<String, EvictionThreshold>);

/// Amounts of one `--eviction-minimum-reclaim`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaims(pub BTreeMap<String, EvictionThreshold>);

/// Periods of one `--eviction-soft-grace-period`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Periods(pub BTreeMap<String, Duration>);

/// Options of one `--cpu-manager-policy-options` or `--topology-manager-policy-options`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options(pub BTreeMap<String, String>);

/// Memory of one `--reserved-memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeMemory(pub Vec<ReservedMemory>);

/// Reads a boolean as pflag does.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        other => Err(format!("{other:?} is neither \"true\" nor \"false\"")),
    }
}

fn parse_headers(text: &str) -> Result<Headers, String> {
    text.split(',')
        .filter(|pair| !pair.trim().is_empty())
        .map(|pair| {
            let (name, value) = pair
                .split_once(':')
                .ok_or("expected NAME:VALUE pairs separated by commas")?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        })
        .collect::<Result<_, &str>>()
        .map(Headers)
        .map_err(str::to_owned)
}

/// A key without `=` is a label with an empty value, as upstream reads it.
fn parse_labels(text: &str) -> Result<Labels, String> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match key.trim() {
                "" => Err(format!(
                    "{pair:?} is not a label; write it like \"key=value\""
                )),
                key => Ok((key.to_owned(), value.trim().to_owned())),
            }
        })
        .collect::<Result<_, _>>()
        .map(Labels)
}

fn parse_ips(text: &str) -> Result<Addresses, String> {
    text.split(',')
        .filter(|part| !part.trim().is_empty())
        .map(|part| parse_ip(part.trim()))
        .collect::<Result<_, _>>()
        .map(Addresses)
}

fn parse_taints(text: &str) -> Result<Taints, String> {
    let taints = text.split(',').filter(|part| !part.trim().is_empty());
    taints
        .map(cluster::parse_taint)
        .collect::<Result<_, _>>()
        .map(Taints)
}

/// `KEY<separator>VALUE` pairs separated by commas.
pub(super) fn parse_pairs<T>(
    text: &str,
    separator: char,
    parse: impl Fn(&str, &str) -> Result<T, String>,
) -> Result<BTreeMap<String, T>, String> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair
                .split_once(separator)
                .ok_or_else(|| format!("{pair:?} is not of the form \"key{separator}value\""))?;
            let (key, value) = (key.trim(), value.trim());
            Ok((key.to_owned(), parse(key, value)?))
        })
        .collect()
}

fn parse_reserved(text: &str) -> Result<Reserved, String> {
    parse_pairs(text, '=', cluster::parse_reserved).map(Reserved)
}

fn parse_qos_reserved(text: &str) -> Result<QosShares, String> {
    parse_pairs(text, '=', reserves::parse_qos_reserved).map(QosShares)
}

fn parse_options(text: &str) -> Result<Options, String> {
    parse_pairs(text, '=', |_, text| Ok(text.to_owned())).map(Options)
}

fn parse_reserved_memory(text: &str) -> Result<NodeMemory, String> {
    pinning::parse_reserved_memory(text).map(NodeMemory)
}

fn parse_thresholds(text: &str) -> Result<Thresholds, String> {
    parse_pairs(text, '<', eviction::parse_threshold).map(Thresholds)
}

fn parse_reclaims(text: &str) -> Result<Reclaims, String> {
    parse_pairs(text, '=', eviction::parse_reclaim).map(Reclaims)
}

fn parse_graces(text: &str) -> Result<Periods, String> {
    parse_pairs(text, '=', eviction::parse_grace).map(Periods)
}

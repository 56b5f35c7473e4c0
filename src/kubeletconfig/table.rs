//! The declaration of every configuration field, in upstream's order. [`KubeletConfiguration`], its defaults, the
//! fields a file may have, flags, reading, `/configz` and their documentation come from these rows.
//!
//! A row of a field that the agent acts on declares its member with type and default, and has in brackets: the
//! field's name, the type of its value in the file, its [`Codec`], the notes for the documentation, its flag and
//! what is allowed. A field of
//! a section names its member in front: `logging.format as "logging.format"`. A row of a field without effect is
//! `later`, with the values that say what it is without being set, upstream's default first.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use super::cluster::{MAX_IMAGES, RESERVED, TAINTS};
use super::codec::{
    ABSOLUTE_PATH, ADDRESSES, BOOL, Codec, ENDPOINT, FILE, FILE_OR_NONE, FILLED, HEADERS, INTS, IP,
    Int, LOG_SIZE, NONZERO_PERIOD, Nonzero, OPTIONAL_BOOL, OPTIONAL_INT, OPTIONAL_TEXT, PERIOD,
    PIDS_LIMIT, STRINGS, TEXT, TIME, TRACING_ENDPOINT, TRACING_RATE, URL, ZeroAs, arg_of, lay,
    names, take,
};
use super::eviction::{GRACES, RECLAIMS, THRESHOLDS};
use super::fields::{
    Field, Kind, LOGGING_OPTIONS, PRIORITY_PERIOD, RESERVED_MEMORY, Setting, Support, TAINT,
    VMODULE, last, later,
};
use super::pinning::{
    CPUS, CpuManagerPolicy, MEMORY_OF_NODES, MemoryManagerPolicy, OPTIONS, ReservedMemory,
    TopologyPolicy, TopologyScope,
};
use super::reserves::{FACTOR, QOS_MEMORY, Reserves};
use super::server::{Authentication, Authorization, TlsVersion};
use super::shutdown::PRIORITY_PERIODS;
use super::types::{
    CgroupDriver, EvictionThreshold, ImageVerification, Logging, PriorityPeriod, Taint, Tracing,
    default_eviction_hard,
};
use super::validate::{DAY, at_most_a_day, unless};
use crate::types::cpu_set::CpuSet;

/// Allowed values of `userNamespaces.idsPerPod`. Neither the first nor the last 65536 IDs of a node are given to pods.
const IDS_PER_POD: &str = "a multiple of 65536 from 65536 to 4294836224";

fn has_ids_per_pod(ids: u32) -> bool {
    ids.is_multiple_of(65_536) && (65_536..=4_294_836_224).contains(&ids)
}

/// Declares one [`Field`] from what a row has in brackets.
macro_rules! field {
    (later $name:literal: $kind:ident $(($inner:ident))? = [$($unset:literal),*], $notes:literal) => {
        later($name, Kind::$kind $(($inner))?, &[$($unset),*], $notes)
    };
    (section $name:literal { $([$($row:tt)*])* }) => {
        Field {
            name: $name,
            kind: Kind::Object(&[$(field!($($row)*)),*]),
            support: Support::Supported,
            unset: &[],
            notes: "",
            setting: None,
        }
    };
    ($member:ident as section $($section:tt)*) => {
        field!(section $($section)*)
    };
    ($($member:ident).+ as $name:literal: $kind:ident $(($inner:ident))? = $codec:expr, $notes:literal
        $(; $($options:tt)+)?) => {
        Field {
            name: last($name),
            kind: Kind::$kind $(($inner))?,
            support: Support::Supported,
            unset: &[],
            notes: $notes,
            setting: Some(Setting {
                name: $name,
                read: |r, c, d| take(&$codec, r, &mut c.$($member).+, &d.$($member).+),
                write: |c| Codec::write(&$codec, &c.$($member).+),
                lay: |flag, c| lay(&$codec, flag, &mut c.$($member).+),
                arg: |arg| arg_of(&$codec, arg, |c| &c.$($member).+),
                flag: None,
                within: None,
                check: None,
                default: None,
            }$($($options)+)?),
        }
    };
}

/// Declares [`KubeletConfiguration`] and [`FIELDS`] from the rows.
macro_rules! fields {
    ($($($(#[$doc:meta])* $member:ident: $type:ty = $default:expr,)? [$($row:tt)*])*) => {
        /// The typed part of upstream's `KubeletConfiguration` (v1beta1). Field comments name the upstream
        /// field where the name differs; units are in the types. [`Default`] gives upstream's defaults except
        /// for `fail_cgroup_v1`.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct KubeletConfiguration {
            $($($(#[$doc])* pub $member: $type,)?)*
            /// Other settings that share the node between pods and everything else.
            pub reserves: Reserves,
            /// Fields that were given and that nothing acts on, by their names in the file. For `/configz` alone.
            pub without_effect: serde_json::Map<String, serde_json::Value>,
        }

        impl Default for KubeletConfiguration {
            fn default() -> Self {
                Self {
                    $($($member: $default,)?)*
                    reserves: Reserves::default(),
                    without_effect: serde_json::Map::new(),
                }
            }
        }

        /// The fields of the document, `apiVersion` and `kind` apart, in upstream's order.
        pub static FIELDS: &[Field] = &[$(field!($($member as)? $($row)*)),*];
    };
}

fields! {
    /// True if the kubelet's API is served.
    enable_server: bool = true,
    ["enableServer": Bool = BOOL, "Serve [the kubelet's API](kubelet-api.md).";
        .flag("enable-server", "BOOL", "Serve the kubelet's API [default: true]")]
    /// Directory of static pods, or one manifest file.
    static_pod_path: Option<PathBuf> = None,
    ["staticPodPath": String = FILE,
        "Directory of static pod manifests, or one file. Relative to the file it is written in.";
        .flag("pod-manifest-path", "PATH", "Directory of static pod manifests, or one manifest file")]
    /// Directory in which the runtime writes container logs.
    pod_logs_dir: PathBuf = PathBuf::from("/var/log/pods"),
    ["podLogsDir": String = ABSOLUTE_PATH,
        "ASCII, without `.` and `..`. A relative one is relative to the file it is written in."]
    /// Longest interval between syncs of a running pod.
    sync_frequency: Duration = Duration::from_secs(60),
    ["syncFrequency": Duration = PERIOD, "100ms to 24h.";
        .flag("sync-frequency", "DURATION", "How often a running pod is synced at the latest [default: 1m]")
        .within(|c| c.sync_frequency, Duration::from_millis(100), DAY)]
    /// Interval at which the manifest directory is listed, beside change notifications.
    file_check_frequency: Duration = Duration::from_secs(20),
    ["fileCheckFrequency": Duration = PERIOD, "10ms to 24h. Changes are also noticed at once by file notification.";
        .flag("file-check-frequency", "DURATION", "How often the manifest directory is listed [default: 20s]")
        .within(|c| c.file_check_frequency, Duration::from_millis(10), DAY)]
    /// Interval at which the manifest URL is fetched.
    http_check_frequency: Duration = Duration::from_secs(20),
    ["httpCheckFrequency": Duration = PERIOD, "10ms to 24h.";
        .flag("http-check-frequency", "DURATION", "How often the manifest URL is fetched [default: 20s]")
        .within(|c| c.http_check_frequency, Duration::from_millis(10), DAY)]
    /// `staticPodURL`.
    static_pod_url: Option<String> = None,
    ["staticPodURL": String = URL, "`http://` or `https://`.";
        .flag("manifest-url", "URL", "URL of further static pod manifests")]
    /// `staticPodURLHeader`: header values by name, in the order given.
    static_pod_url_header: BTreeMap<String, Vec<String>> = BTreeMap::new(),
    ["staticPodURLHeader": StringsMap = HEADERS, "Header name to list of values.";
        .flag("manifest-url-header", "NAME:VALUE,…", "Headers for --manifest-url, such as 'a:hello,b:again'; may be repeated")]
    /// Address of the kubelet's API.
    address: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    ["address": String = IP, "An IP address; `0.0.0.0` and `::` are all of both families.";
        .flag("address", "IP", "Address of the kubelet's API; 0.0.0.0 or :: for all [default: 0.0.0.0]")]
    /// Port of the kubelet's API, which the node's status names.
    port: u16 = 10250,
    ["port": Int32 = Nonzero("a port from 1 to 65535, or 0 for the default", "a port from 1 to 65535"),
        "Port of the kubelet's API, which the node's status names. 0 is the default.";
        .flag("port", "PORT", "Port of the kubelet's API, which the node's status names [default: 10250]")]
    /// Port of the part of the API that is served without TLS and to everybody; 0 for none.
    read_only_port: u16 = 0,
    ["readOnlyPort": Int32 = Int("a port from 1 to 65535, or 0 for none"),
        "Pods, statistics and metrics for everybody, without TLS; 0 is none.";
        .flag("read-only-port", "PORT", "Port of pods, statistics and metrics for everybody, without TLS; 0 for none [default: 0]")]
    /// Certificate and further ones up to the CA; with `tls_private_key_file`.
    tls_cert_file: Option<PathBuf> = None,
    ["tlsCertFile": String = FILE,
        "Serving certificate with those up to the CA; needs `tlsPrivateKeyFile`. Without both one is made: [certificates](kubelet-api.md#the-serving-certificate).";
        .flag("tls-cert-file", "FILE", "Serving certificate, with those up to the CA; without one, one is made [default: kubelet.crt in --cert-dir]")]
    /// Key of `tls_cert_file`.
    tls_private_key_file: Option<PathBuf> = None,
    ["tlsPrivateKeyFile": String = FILE, "Its key.";
        .flag("tls-private-key-file", "FILE", "Key of --tls-cert-file")]
    /// `tlsCipherSuites`: Go's names of those of TLS 1.2 that may be used; empty for all.
    tls_cipher_suites: Vec<String> = Vec::new(),
    ["tlsCipherSuites": Strings = STRINGS,
        "Go's names. Those of TLS 1.3 are always on; weak ones are accepted with a warning and left out.";
        .flag("tls-cipher-suites", "NAMES", "Cipher suites of TLS 1.2, by Go's names, separated by commas; may be repeated [default: all]")
        .default("all")]
    /// `tlsCurvePreferences`: the numbers of the groups that keys may be exchanged in; empty for all.
    tls_curve_preferences: Vec<i32> = Vec::new(),
    ["tlsCurvePreferences": Ints = INTS,
        "Groups that keys may be exchanged in, by their numbers in TLS: 23 (P-256), 24 (P-384), 29 (X25519). Go's others are accepted with a warning and left out. The order says nothing, as upstream.";
        .flag("tls-curve-preferences", "NUMBERS", "Groups that keys may be exchanged in, by their numbers in TLS: 23 (P-256), 24 (P-384), 29 (X25519), separated by commas; may be repeated [default: all]")
        .default("all")]
    /// `tlsMinVersion`.
    tls_min_version: TlsVersion = TlsVersion::default(),
    ["tlsMinVersion": String = names(),
        "`VersionTLS12` or `VersionTLS13`; older ones are accepted with a warning and mean 1.2.";
        .flag("tls-min-version", "VERSION", "Oldest version of TLS: VersionTLS12 or VersionTLS13 [default: VersionTLS12]")]
    /// True if the client certificate is renewed through the API server before it expires.
    rotate_certificates: bool = false,
    ["rotateCertificates": Bool = BOOL,
        "Renew the client certificate through the API server at 70 to 90 % of its life. See [Joining a cluster](#joining-a-cluster).";
        .flag("rotate-certificates", "BOOL", "Renew the client certificate through the API server before it expires [default: false]")]
    /// `serverTLSBootstrap`: the serving certificate is asked of the API server and renewed.
    server_tls_bootstrap: bool = false,
    ["serverTLSBootstrap": Bool = BOOL, "Ask the API server for the serving certificate and renew it.";
        .flag("rotate-server-certificates", "BOOL", "Ask the API server for the serving certificate and renew it [default: false]")]
    /// Authentication of users of the kubelet's API.
    authentication: Authentication = Authentication::default(),
    [section "authentication" {
        [section "x509" {
            [authentication.client_ca_file as "authentication.x509.clientCAFile": String = FILE,
                "Clients with a certificate signed by one of these are known.";
                .flag("client-ca-file", "FILE", "Certificates of the CAs that sign those of the API's clients")]
        }]
        [section "webhook" {
            [authentication.webhook as "authentication.webhook.enabled": Bool = BOOL,
                "Ask the API server about bearer tokens. Needs a kubeconfig.";
                .flag("authentication-token-webhook", "BOOL", "Ask the API server about bearer tokens [default: true]")]
            [authentication.webhook_cache_ttl as "authentication.webhook.cacheTTL": Duration = PERIOD,
                "At most 24h.";
                .flag("authentication-token-webhook-cache-ttl", "DURATION", "How long its answer about a token counts [default: 2m]")
                .check(|c| at_most_a_day(c.authentication.webhook_cache_ttl))]
        }]
        [section "anonymous" {
            [authentication.anonymous as "authentication.anonymous.enabled": Bool = BOOL,
                "Requests that show nothing are `system:anonymous`.";
                .flag("anonymous-auth", "BOOL", "Let requests that show nothing through as system:anonymous, for authorization to decide [default: false]")]
        }]
    }]
    /// Authorization of these users.
    authorization: Authorization = Authorization::default(),
    [section "authorization" {
        [authorization.mode as "authorization.mode": String = names(),
            "`Webhook` (the API server decides; needs a kubeconfig) or `AlwaysAllow`.";
            .flag("authorization-mode", "MODE", "Who decides what a user of the API may do: AlwaysAllow or Webhook [default: Webhook]")]
        [section "webhook" {
            [authorization.cache_authorized_ttl as "authorization.webhook.cacheAuthorizedTTL": Duration = PERIOD,
                "At most 24h.";
                .flag("authorization-webhook-cache-authorized-ttl", "DURATION", "How long a yes of the API server counts [default: 5m]")
                .check(|c| at_most_a_day(c.authorization.cache_authorized_ttl))]
            [authorization.cache_unauthorized_ttl as "authorization.webhook.cacheUnauthorizedTTL": Duration = PERIOD,
                "At most 24h.";
                .flag("authorization-webhook-cache-unauthorized-ttl", "DURATION", "How long a no of the API server counts [default: 30s]")
                .check(|c| at_most_a_day(c.authorization.cache_unauthorized_ttl))]
        }]
    }]
    [later "registryPullQPS": Int32 = ["5"], "Pulls are limited by how many run at a time, so that a pod whose pulls fail holds up no other."]
    [later "registryBurst": Int32 = ["10", "0"], "As `registryPullQPS`."]
    /// For which images on the node a pod must show that it may have them.
    image_pull_credentials_verification_policy: ImageVerification = ImageVerification::default(),
    ["imagePullCredentialsVerificationPolicy": String = names(),
        "For which images on the node a pod must have the credentials they were pulled with: `NeverVerify` none, `NeverVerifyPreloadedImages` those this agent pulled, `NeverVerifyAllowlistedImages` all but those of the allowlist, `AlwaysVerify` all. A pod without them pulls, with its own."]
    /// `preloadedImagesVerificationAllowlist`: repositories with their registry and without tag, or what ends in
    /// `/*`.
    preloaded_images_verification_allowlist: Vec<String> = Vec::new(),
    ["preloadedImagesVerificationAllowlist": Strings = STRINGS,
        "Repositories like `registry.example.com/team/app`, or all below one with `registry.example.com/team/*`. Needs `NeverVerifyAllowlistedImages`."]
    /// Events recorded per second; 0 for no limit.
    event_record_qps: u32 = 50,
    ["eventRecordQPS": Int32 = Int("a number from 0 (no limit)"),
        "Events told per second, in log and journal, and requests about events to the API server; 0 is no limit. In log and journal repetitions are told at the 1st, 2nd, 4th, … time and count only then.";
        .flag("event-qps", "RATE", "Events recorded per second; 0 for no limit [default: 50]")]
    /// Burst of events above the rate.
    event_burst: u32 = 100,
    ["eventBurst": Int32 = ZeroAs(100, "a number from 0 (which means 100)"),
        "Events told at once after a quiet time; 0 is the default. Means nothing while `eventRecordQPS` is 0.";
        .flag("event-burst", "COUNT", "Events recorded at once, while --event-qps is not 0 [default: 100]")]
    /// True if the API has logs, exec, attach, port-forward, run and the like.
    enable_debugging_handlers: bool = true,
    ["enableDebuggingHandlers": Bool = BOOL, "Serve logs, exec, attach, port-forward, run and the like.";
        .flag("enable-debugging-handlers", "BOOL", "Serve logs, exec, attach, port-forward, run and the like [default: true]")]
    [later "enableContentionProfiling": Bool = ["false"], "It profiles locks of Go."]
    /// Port of `/healthz`; 0 turns the endpoint off.
    healthz_port: u16 = 10248,
    ["healthzPort": Int32 = Int("a port from 1 to 65535, or 0 to turn it off"), "0 turns the endpoint off.";
        .flag("healthz-port", "PORT", "Port of /healthz, /readyz and /metrics; 0 turns them off [default: 10248]")]
    /// Address of `/healthz`.
    healthz_bind_address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST),
    ["healthzBindAddress": String = IP, "";
        .flag("healthz-bind-address", "IP", "Address of /healthz [default: 127.0.0.1]")]
    /// `oomScoreAdj`: how likely the kernel kills the agent when memory is out, from -1000 (never) to 1000.
    oom_score_adj: i32 = -999,
    ["oomScoreAdj": Int32 = Int("a number from -1000 to 1000"),
        "-1000 to 1000: how likely the kernel kills the agent when memory is out; -1000 is never. Set at the start. An agent that may not lower it logs a warning and goes on.";
        .flag("oom-score-adj", "SCORE", "How likely the kernel kills the agent when memory is out, from -1000 (never) to 1000 [default: -999]")
        .check(|c| unless((-1000..=1000).contains(&c.oom_score_adj), c.oom_score_adj, "a number from -1000 to 1000"))]
    /// DNS domain of the cluster; empty for none.
    cluster_domain: String = String::new(),
    ["clusterDomain": String = TEXT, "A DNS name.";
        .flag("cluster-domain", "DOMAIN", "DNS domain of the cluster")]
    /// `clusterDNS`.
    cluster_dns: Vec<IpAddr> = Vec::new(),
    ["clusterDNS": Strings = ADDRESSES, "IP addresses.";
        .flag("cluster-dns", "IP,…", "Addresses of the cluster's DNS servers, separated by commas; may be repeated")]
    /// Time that a stream (exec, attach, port-forward) may be silent; zero for no limit.
    streaming_connection_idle_timeout: Duration = Duration::from_secs(4 * 3600),
    ["streamingConnectionIdleTimeout": Duration = PERIOD, "How long exec, attach and port-forward may be silent.";
        .flag("streaming-connection-idle-timeout", "DURATION", "How long a stream (exec, attach, port-forward) may be silent; 0 for no limit [default: 4h]")]
    /// Interval at which the node's status is computed.
    node_status_update_frequency: Duration = Duration::from_secs(10),
    ["nodeStatusUpdateFrequency": Duration = PERIOD, "100ms to 24h. How often the node's status is computed.";
        .flag("node-status-update-frequency", "DURATION", "How often the node's status is computed [default: 10s]")
        .within(|c| c.node_status_update_frequency, Duration::from_millis(100), DAY)]
    /// Interval at which the node's status is written when nothing changed.
    node_status_report_frequency: Duration = Duration::from_secs(300),
    ["nodeStatusReportFrequency": Duration = PERIOD,
        "100ms to 24h. How often it is written when nothing changed. A file that sets only `nodeStatusUpdateFrequency` sets this one too, as upstream.";
        .within(|c| c.node_status_report_frequency, Duration::from_millis(100), DAY)]
    /// Duration of the node's lease; it is renewed four times in that time.
    node_lease_duration_seconds: i32 = 40,
    ["nodeLeaseDurationSeconds": Int32 = Nonzero("a number from 0 (which means 40)", "a number from 1"),
        "0 is the default.";
        .check(|c| unless(c.node_lease_duration_seconds >= 1, c.node_lease_duration_seconds, "a number of seconds from 1"))]
    /// Age of an image before it is removed to free space.
    image_minimum_gc_age: Duration = Duration::from_secs(120),
    ["imageMinimumGCAge": Duration = PERIOD,
        "Age an image must have before it is [removed](images.md#unused-images) to free space; `0s` is the default.";
        .flag("minimum-image-ttl-duration", "DURATION", "Age an image must have before it is removed to free space [default: 2m]")]
    /// After how long an image that nobody uses is removed; zero for never.
    image_maximum_gc_age: Duration = Duration::ZERO,
    ["imageMaximumGCAge": Duration = PERIOD,
        "Unused for longer, an image is removed; `0s` turns that off. More than `imageMinimumGCAge`."]
    /// Percentage of the images' disk at which unused images are removed; 100 for never.
    image_gc_high_threshold_percent: u8 = 85,
    ["imageGCHighThresholdPercent": Int32 = Int("a percentage from 0 to 100; 100 turns it off"),
        "Percentage of the images' disk at which unused images are removed; 100 turns that off.";
        .flag("image-gc-high-threshold", "PERCENT", "Percentage of the images' disk at which unused images are removed; 100 for never [default: 85]")
        .check(|c| unless(c.image_gc_high_threshold_percent <= 100, c.image_gc_high_threshold_percent, "a percentage from 0 to 100; 100 turns it off"))]
    /// Percentage down to which they are removed.
    image_gc_low_threshold_percent: u8 = 80,
    ["imageGCLowThresholdPercent": Int32 = Int("a percentage from 0 to 100, less than imageGCHighThresholdPercent"),
        "Percentage down to which they are removed; less than the high one.";
        .flag("image-gc-low-threshold", "PERCENT", "Percentage down to which they are removed [default: 80]")]
    [later "volumeStatsAggPeriod": Duration = ["1m", "0s"], "Volumes are measured on request, once a minute at most."]
    [reserves.kubelet_cgroups as "kubeletCgroups": String = OPTIONAL_TEXT,
        "The cgroup that the agent moves itself into. With the driver `cgroupfs` the agent creates it.";
        .flag("kubelet-cgroups", "CGROUP", "Cgroup that the agent moves itself into")]
    [reserves.system_cgroups as "systemCgroups": String = OPTIONAL_TEXT,
        "The agent moves processes of the root cgroup into this cgroup, except PID 1 and kernel threads. With the driver `cgroupfs` it creates the cgroup.";
        .flag("system-cgroups", "CGROUP", "Cgroup for processes of the root cgroup")]
    /// The cgroup below which pods live; `/` when unset.
    cgroup_root: String = String::new(),
    ["cgroupRoot": String = TEXT, "Absolute cgroup name.";
        .flag("cgroup-root", "CGROUP", "Cgroup below which pods live [default: /]")
        .default("`/`")]
    /// `cgroupsPerQOS`: whether pods live below QoS cgroups.
    cgroups_per_qos: bool = true,
    ["cgroupsPerQOS": Bool = BOOL, "";
        .flag("cgroups-per-qos", "BOOL", "Whether pods live below QoS cgroups [default: true]")]
    /// Owner of the cgroup tree.
    cgroup_driver: CgroupDriver = CgroupDriver::default(),
    ["cgroupDriver": String = names(),
        "`cgroupfs` or `systemd`; must be what the runtime uses. A runtime that reports what it uses (containerd 2.0, CRI-O 1.28) wins over it, as with the kubelet. With `systemd`, slices of pods are units whose limits are set over D-Bus, and systemd has to be PID 1: elsewhere they are directories with the names of slices. Whatever else changes their limits is corrected within a minute, with the event `CgroupLimitsCorrected`.";
        .flag("cgroup-driver", "DRIVER", "Who owns the cgroup tree: cgroupfs or systemd; must match the runtime [default: cgroupfs]")]
    /// Policy of the CPU manager.
    cpu_manager_policy: CpuManagerPolicy = CpuManagerPolicy::default(),
    ["cpuManagerPolicy": String = names(),
        "`none` or `static`. With `static`, containers of Guaranteed pods that request whole CPUs get exclusive ones. `static` needs CPUs that are kept from pods. See [cpus.md](cpus.md).";
        .flag("cpu-manager-policy", "POLICY", "CPU manager: none, or static, which gives CPUs to containers of Guaranteed pods for themselves [default: none]")]
    /// `singleProcessOOMKill`; `None` for upstream's default: on with cgroup v1, off with v2.
    single_process_oom_kill: Option<bool> = None,
    ["singleProcessOOMKill": Bool = OPTIONAL_BOOL,
        "Whether the kernel ends one process when a container is out of memory, or all of them. Unset is false with cgroup v2. With cgroup v1 only one is ended, and false is refused.";
        .default("unset")]
    /// Options of that policy, see [`KubeletConfiguration::cpu_options`].
    cpu_manager_policy_options: BTreeMap<String, String> = BTreeMap::new(),
    ["cpuManagerPolicyOptions": StringMap = OPTIONS,
        "`true` or `false` by option of the policy `static`: [cpus.md](cpus.md#options).";
        .flag("cpu-manager-policy-options", "OPTIONS", "Options of the CPU manager's policy, such as full-pcpus-only=true; may be repeated")]
    /// Interval at which the CPUs of running containers are compared with those last applied.
    cpu_manager_reconcile_period: Duration = Duration::from_secs(10),
    ["cpuManagerReconcilePeriod": Duration = NONZERO_PERIOD,
        "Interval at which the CPUs of running containers are compared with those last applied.";
        .flag("cpu-manager-reconcile-period", "DURATION", "Interval at which the CPUs of running containers are corrected [default: 10s]")]
    /// Policy of the memory manager.
    memory_manager_policy: MemoryManagerPolicy = MemoryManagerPolicy::default(),
    ["memoryManagerPolicy": String = names(),
        "`None` or `Static`. With `Static`, containers of Guaranteed pods have their memory on chosen NUMA nodes. `Static` needs `reservedMemory`.";
        .flag("memory-manager-policy", "POLICY", "Memory manager: None, or Static, which binds containers of Guaranteed pods to NUMA nodes [default: None]")]
    /// Policy of the topology manager.
    topology_manager_policy: TopologyPolicy = TopologyPolicy::default(),
    ["topologyManagerPolicy": String = names(),
        "`none`, `best-effort`, `restricted` or `single-numa-node`: whether CPUs and memory of a container have to be on the same NUMA nodes.";
        .flag("topology-manager-policy", "POLICY", "Topology manager: none, best-effort, restricted or single-numa-node [default: none]")]
    /// Unit that is aligned: a container or a pod.
    topology_manager_scope: TopologyScope = TopologyScope::default(),
    ["topologyManagerScope": String = names(), "`container` or `pod`: the unit that is aligned.";
        .flag("topology-manager-scope", "SCOPE", "Unit that the topology manager aligns: container or pod [default: container]")]
    /// Options of the topology manager, see [`KubeletConfiguration::topology_options`].
    topology_manager_policy_options: BTreeMap<String, String> = BTreeMap::new(),
    ["topologyManagerPolicyOptions": StringMap = OPTIONS,
        "`prefer-closest-numa-nodes` (`true` or `false`), `max-allowable-numa-nodes` (at least 8, the default).";
        .flag("topology-manager-policy-options", "OPTIONS", "Options of the topology manager, such as prefer-closest-numa-nodes=true; may be repeated")]
    [reserves.qos_memory as "qosReserved": StringMap = QOS_MEMORY,
        "`memory: 50%`: other pods cannot use this share of the memory that Guaranteed pods request. BestEffort pods cannot use this share of what Burstable pods request.";
        .flag("qos-reserved", "SHARES", "Share of memory requests that pods of lower classes cannot use, such as memory=50%")]
    /// Deadline of a runtime call that is not long-running.
    runtime_request_timeout: Duration = Duration::from_secs(120),
    ["runtimeRequestTimeout": Duration = PERIOD, "1ms to 24h.";
        .flag("runtime-request-timeout", "DURATION", "Deadline of runtime calls that are not long-running [default: 2m]")
        .within(|c| c.runtime_request_timeout, Duration::from_millis(1), DAY)]
    [later "hairpinMode": String = ["promiscuous-bridge", ""], "The network is the container runtime's; the kubelet does nothing with it either."]
    /// Number of pods that may run on the node.
    max_pods: u32 = 110,
    ["maxPods": Int32 = Nonzero("a number from 0 (which means 110)", "a number from 1"), "0 is the default.";
        .flag("max-pods", "COUNT", "How many pods may run [default: 110]")]
    /// `podCIDR`: addresses of pods where there is no API server.
    pod_cidr: Option<String> = None,
    ["podCIDR": String = OPTIONAL_TEXT,
        "Without an API server, the addresses of pods that the agent passes to the container runtime at its start. With one it passes those of the node's object.";
        .flag("pod-cidr", "CIDR", "Addresses of pods that are passed to the container runtime; only without an API server")]
    /// Process limit of one pod; `None` for no limit (upstream's -1).
    pod_pids_limit: Option<u64> = None,
    ["podPidsLimit": Int64 = PIDS_LIMIT,
        "Processes and threads of a pod with all its containers; below 1 is no limit. Set on the pod's cgroup, so it needs `cgroupsPerQOS` and the pids controller.";
        .flag("pod-max-pids", "COUNT", "Process limit of one pod; -1 for no limit [default: -1]")]
    /// `resolvConf`; `None` when set to the empty string: pods get no host resolver configuration.
    resolv_conf: Option<PathBuf> = Some(PathBuf::from("/etc/resolv.conf")),
    ["resolvConf": String = FILE_OR_NONE,
        "Empty: no resolver configuration of the host. Relative to the file it is written in. Read for each new sandbox. Pods with their own network cannot reach nameservers on loopback or link-local addresses (`127.0.0.1`, `fe80::1%eth0`): they get the others, with an event. If systemd-resolved (`127.0.0.53`) is the only one, they get those of `/run/systemd/resolve/resolv.conf`. While it is missing, pods that need it wait. While it names no nameserver in the first two minutes after the boot and has changed since that, or no longer names one, they wait for 60 s at most, then start without one, as upstream.";
        .flag("resolv-conf", "FILE", "Resolver configuration handed to pods; empty for none [default: /etc/resolv.conf]")]
    [later "runOnce": Bool = ["false"], "The flag `--runonce` has an effect."]
    /// `cpuCFSQuota`: whether CPU limits are enforced by CFS quota.
    cpu_cfs_quota: bool = true,
    ["cpuCFSQuota": Bool = BOOL, "";
        .flag("cpu-cfs-quota", "BOOL", "Enforce CPU limits by CFS quota [default: true]")]
    /// `cpuCFSQuotaPeriod`.
    cpu_cfs_quota_period: Duration = Duration::from_millis(100),
    ["cpuCFSQuotaPeriod": Duration = PERIOD, "1ms to 1s. Needs no feature gate.";
        .flag("cpu-cfs-quota-period", "DURATION", "CFS quota period [default: 100ms]")
        .within(|c| c.cpu_cfs_quota_period, Duration::from_millis(1), Duration::from_secs(1))]
    /// Number of images that the node's status lists; `None` for all.
    node_status_max_images: Option<u32> = Some(50),
    ["nodeStatusMaxImages": Int32 = MAX_IMAGES, "-1 lists all.";
        .flag("node-status-max-images", "COUNT", "How many images the node's status lists; -1 for all [default: 50]")]
    /// `maxOpenFiles`: files that the agent may have open.
    max_open_files: u64 = 1_000_000,
    ["maxOpenFiles": Int64 = ZeroAs(1_000_000, "a number from 0 (which means 1000000)"),
        "Files, sockets and connections that the agent may have open; 0 is the default. An agent that may not raise its limit so far logs a warning and has as many as it may.";
        .flag("max-open-files", "COUNT", "How many files the agent may have open [default: 1000000]")]
    /// `contentType`: how bodies are encoded. JSON is spoken whatever this says.
    content_type: String = "application/vnd.kubernetes.protobuf".to_owned(),
    ["contentType": String = FILLED,
        "JSON is spoken whatever this says; a warning says so if it is set to anything but JSON and the default.";
        .flag("kube-api-content-type", "TYPE", "Encoding of bodies; JSON is spoken whatever this says")]
    /// `kubeAPIQPS`: requests to the API server per second; never 0.
    kube_api_qps: u32 = 50,
    ["kubeAPIQPS": Int32 = ZeroAs(5, "a number from 0 (which means 5)"),
        "Requests to the API server per second; leases do not count. 0 means 5, as for client-go.";
        .flag("kube-api-qps", "RATE", "Requests to the API server per second [default: 50]")]
    /// `kubeAPIBurst`: requests above the rate after a quiet time; never 0.
    kube_api_burst: u32 = 100,
    ["kubeAPIBurst": Int32 = ZeroAs(10, "a number from 0 (which means 10)"), "0 means 10, as for client-go.";
        .flag("kube-api-burst", "COUNT", "Requests to the API server at once after a quiet time [default: 100]")]
    /// True if images are pulled one at a time.
    serialize_image_pulls: bool = true,
    ["serializeImagePulls": Bool = BOOL, "Default false when `maxParallelImagePulls` is above 1.";
        .flag("serialize-image-pulls", "BOOL", "Pull images one at a time [default: true]")]
    /// Number of images that are pulled at once; no limit when unset and pulls are not serialised.
    max_parallel_image_pulls: Option<u32> = None,
    ["maxParallelImagePulls": Int32 = OPTIONAL_INT,
        "At least 1. Above 1 only when pulls are not serialised.";
        .check(|c| unless(c.max_parallel_image_pulls != Some(0), 0, "a number from 1"))]
    /// Least amounts that must be left on the node, by eviction signal such as `memory.available`; 0 for none.
    eviction_hard: BTreeMap<String, EvictionThreshold> = default_eviction_hard(),
    ["evictionHard": StringMap = THRESHOLDS,
        "Quantities or percentages; 0% and 100% are none. Signals it does not name have none. Counts for allocatable. See [eviction.md](eviction.md).";
        .flag("eviction-hard", "THRESHOLDS", "What must be left on the node, such as 'memory.available<1Gi,nodefs.available<10%', or pods are evicted at once; may be repeated")]
    /// As `eviction_hard`, of thresholds that have to be met for a grace period before pods are evicted.
    eviction_soft: BTreeMap<String, EvictionThreshold> = BTreeMap::new(),
    ["evictionSoft": StringMap = THRESHOLDS,
        "As `evictionHard`, for evictions after a grace period: each signal needs one.";
        .flag("eviction-soft", "THRESHOLDS", "What must be left on the node, or pods are evicted after a grace period; may be repeated")]
    /// These grace periods, by signal.
    eviction_soft_grace_period: BTreeMap<String, Duration> = BTreeMap::new(),
    ["evictionSoftGracePeriod": StringMap = GRACES, "Durations by signal.";
        .flag("eviction-soft-grace-period", "PERIODS", "Grace periods of --eviction-soft, such as memory.available=90s; may be repeated")]
    /// Time for which a condition of pressure outlives its last observation.
    eviction_pressure_transition_period: Duration = Duration::from_secs(300),
    ["evictionPressureTransitionPeriod": Duration = NONZERO_PERIOD,
        "How long a condition of pressure outlives its last observation.";
        .flag("eviction-pressure-transition-period", "DURATION", "How long the node reports pressure after it was last seen [default: 5m]")]
    /// Longest grace period in seconds of a pod that is evicted for a soft threshold; less than 1 counts as 1.
    eviction_max_pod_grace_period: i32 = 0,
    ["evictionMaxPodGracePeriod": Int32 = Int("a number of seconds"),
        "Longest grace period in seconds of a pod that is evicted for a soft threshold. Less than 1 counts as 1, as upstream.";
        .flag("eviction-max-pod-grace-period", "SECONDS", "Longest grace period in seconds of a pod that is evicted for a soft threshold; less than 1 counts as 1 [default: 0]")]
    /// Amount that has to be freed beyond a threshold once it was met, by signal.
    eviction_minimum_reclaim: BTreeMap<String, EvictionThreshold> = BTreeMap::new(),
    ["evictionMinimumReclaim": StringMap = RECLAIMS,
        "Quantities or percentages by signal: what is freed beyond a threshold.";
        .flag("eviction-minimum-reclaim", "AMOUNTS", "What is freed beyond a threshold, such as memory.available=100Mi,nodefs.available=5%; may be repeated")]
    /// True if signals that `eviction_hard` does not name keep their defaults. Has been applied to
    /// `eviction_hard` already.
    merge_default_eviction_settings: bool = false,
    ["mergeDefaultEvictionSettings": Bool = BOOL, "Signals that `evictionHard` does not name keep their defaults."]
    /// `podsPerCore`: how many of them for each processor; 0 for no such limit.
    pods_per_core: u32 = 0,
    ["podsPerCore": Int32 = Int("a number from 0 (which means no limit)"),
        "Pods for each processor, 0 for no such limit. `maxPods` still holds.";
        .flag("pods-per-core", "COUNT", "How many pods may run for each processor; 0 for no such limit [default: 0]")]
    [reserves.controller_attach_detach as "enableControllerAttachDetach": Bool = BOOL,
        "Sets the node's annotation `volumes.kubernetes.io/controller-managed-attach-detach`. False logs a warning: the agent attaches no volumes itself.";
        .flag("enable-controller-attach-detach", "BOOL", "Let the controller manager attach volumes to this node [default: true]")]
    [reserves.protect_kernel_defaults as "protectKernelDefaults": Bool = BOOL,
        "See [Kernel settings](#kernel-settings).";
        .flag("protect-kernel-defaults", "BOOL", "Leave kernel settings unchanged and report those that differ from Kubernetes' [default: false]")]
    [reserves.make_iptables_util_chains as "makeIPTablesUtilChains": Bool = BOOL, "See [iptables](#iptables).";
        .flag("make-iptables-util-chains", "BOOL", "Maintain the iptables chains by which other programs find the kubelet's rules [default: true]")]
    [later "iptablesMasqueradeBit": Int32 = ["14"], "The kubelet does nothing with it since 1.28 either."]
    [later "iptablesDropBit": Int32 = ["15"], "As `iptablesMasqueradeBit`."]
    [later "featureGates": BoolMap = [], "What this version has is on."]
    [reserves.fail_swap_on as "failSwapOn": Bool = BOOL,
        "If the node has swap on at the start of the agent, true logs a warning and emits the event `SwapOn`. Pods run anyway.";
        .flag("fail-swap-on", "BOOL", "Report swap that is on [default: false]")]
    [section "memorySwap" {
        [reserves.swap as "memorySwap.swapBehavior": String = names(),
            "`LimitedSwap` gives containers of Burstable pods a share of the node's swap, equal to the share of their memory request in the node's memory. Needs cgroup v2: on cgroup v1, and where the kernel cannot limit swap, a warning says that it has no effect. Critical pods get none, and neither do containers whose request equals their limit."]
    }]
    /// Size in bytes at which a container log is rotated; [`NEVER_ROTATE`](super::types::NEVER_ROTATE) for never.
    container_log_max_size: u64 = 10 << 20,
    ["containerLogMaxSize": String = LOG_SIZE, "A negative size turns [rotation](logs.md#rotation) off.";
        .flag("container-log-max-size", "SIZE", "Size at which a container log is rotated; a negative one for never [default: 10Mi]")
        .check(|c| unless(c.container_log_max_size != 0, 0, "at least 1 byte"))]
    /// Number of log files that are kept per container.
    container_log_max_files: u32 = 5,
    ["containerLogMaxFiles": Int32 = Int("a number of files, at least 2"),
        "At least 2; the file that is written counts.";
        .flag("container-log-max-files", "COUNT", "Log files kept per container [default: 5]")
        .check(|c| unless(c.container_log_max_files >= 2, c.container_log_max_files, "a number of files, at least 2"))]
    /// Number of container logs that are rotated at once.
    container_log_max_workers: u32 = 1,
    ["containerLogMaxWorkers": Int32 = Int("a number of rotations at once, at least 1"), "At least 1.";
        .check(|c| unless(c.container_log_max_workers != 0, 0, "a number from 1"))]
    /// Interval at which the sizes of container logs are read.
    container_log_monitor_interval: Duration = Duration::from_secs(10),
    ["containerLogMonitorInterval": Duration = PERIOD, "3s to 24h.";
        .within(|c| c.container_log_monitor_interval, Duration::from_secs(3), DAY)]
    /// Detection of changes of configMaps and secrets. They are watched whatever this says.
    config_map_and_secret_change_detection_strategy: String = "Watch".to_owned(),
    ["configMapAndSecretChangeDetectionStrategy": String = FILLED,
        "They are watched; `Cache` and `Get` are accepted with a warning."]
    /// Amounts kept from pods for the system, by resource name (`cpu`, `memory`, `ephemeral-storage`, `pid`), in
    /// billionths of a core, byte or process.
    system_reserved: BTreeMap<String, i128> = BTreeMap::new(),
    ["systemReserved": StringMap = RESERVED, "`cpu`, `memory`, `ephemeral-storage`, `pid`: kept from allocatable.";
        .flag("system-reserved", "RESOURCES", "Kept from pods for the system, such as cpu=200m,memory=500Mi; may be repeated")]
    /// Amounts kept from pods for Kubernetes itself; as `system_reserved`.
    kube_reserved: BTreeMap<String, i128> = BTreeMap::new(),
    ["kubeReserved": StringMap = RESERVED, "As `systemReserved`.";
        .flag("kube-reserved", "RESOURCES", "Kept from pods for Kubernetes itself, such as cpu=200m,memory=500Mi; may be repeated")]
    /// CPUs that no container gets for itself; empty for the lowest. Has been applied to `system_reserved` and
    /// `kube_reserved` already.
    reserved_system_cpus: CpuSet = CpuSet::new(),
    ["reservedSystemCPUs": String = CPUS,
        "CPUs that no container gets exclusively, such as `0-1,4`. Replaces `cpu` of `systemReserved` and `kubeReserved`.";
        .flag("reserved-cpus", "CPUS", "CPUs that no container gets for itself, such as 0-1,4; replaces cpu of --system-reserved and --kube-reserved")]
    [later "showHiddenMetricsForVersion": String = [""], "No metric is hidden."]
    [reserves.system_cgroup as "systemReservedCgroup": String = OPTIONAL_TEXT,
        "The cgroup that is limited to `systemReserved`, like `/system.slice`. It must exist.";
        .flag("system-reserved-cgroup", "CGROUP", "Cgroup limited to --system-reserved, if --enforce-node-allocatable has system-reserved")]
    [reserves.kube_cgroup as "kubeReservedCgroup": String = OPTIONAL_TEXT,
        "The cgroup that is limited to `kubeReserved`. It must exist.";
        .flag("kube-reserved-cgroup", "CGROUP", "Cgroup limited to --kube-reserved, if --enforce-node-allocatable has kube-reserved")]
    /// Groups limited to their share of the node: `pods`, `system-reserved`, `kube-reserved`, and of the latter two
    /// `…-compressible`; empty or `none` for nothing.
    enforce_node_allocatable: Vec<String> = vec!["pods".to_owned()],
    ["enforceNodeAllocatable": Strings = STRINGS,
        "`pods`, `system-reserved`, `kube-reserved`, `system-reserved-compressible`, `kube-reserved-compressible`; `none` or empty for nothing. See [Reserves](#reserves).";
        .flag("enforce-node-allocatable", "NAMES", "Groups limited to their share of the node: pods, system-reserved, kube-reserved, system-reserved-compressible, kube-reserved-compressible, or none [default: pods]")]
    /// Sysctls, or prefixes ending in `*`, that pods may set although they are not known as safe.
    allowed_unsafe_sysctls: Vec<String> = Vec::new(),
    ["allowedUnsafeSysctls": Strings = STRINGS,
        "Names, or prefixes ending in `*`, of `kernel.shm*`, `kernel.msg*`, `kernel.sem`, `fs.mqueue.*`, `net.*`.";
        .flag("allowed-unsafe-sysctls", "SYSCTLS", "Sysctls, or prefixes ending in '*', that pods may set although they are not known as safe; may be repeated")]
    [later "volumePluginDir": String = ["/usr/libexec/kubernetes/kubelet-plugins/volume/exec/", ""], "Directory of FlexVolume drivers, which are not supported."]
    /// `providerID`: the instance's name at the cloud provider.
    provider_id: Option<String> = None,
    ["providerID": String = OPTIONAL_TEXT, "The instance's name at the cloud provider.";
        .flag("provider-id", "ID", "The instance's name at the cloud provider")]
    /// `kernelMemcgNotification`: cgroup v1 notifies of memory thresholds.
    kernel_memcg_notification: bool = false,
    ["kernelMemcgNotification": Bool = BOOL,
        "With cgroup v1 the kernel notifies of memory use that crosses an eviction threshold, see [eviction.md](eviction.md#a-round). No effect with cgroup v2; pressure stall information is always used.";
        .flag("kernel-memcg-notification", "BOOL", "Have cgroup v1 notify of memory use that crosses an eviction threshold [default: false]")]
    /// The `logging` section.
    logging: Logging = Logging::default(),
    [section "logging" {
        [logging.format as "logging.format": String = names(), "`text` or `json`.";
            .flag("logging-format", "FORMAT", "Log format: text or json [default: text]")]
        [later "flushFrequency": DurationOrNanos = ["5s", "0s"], "Each line is written at once."]
        [logging.verbosity as "logging.verbosity": Uint32 = Int("a number from 0"),
            "0 to 2147483647; 0–3 info, 4–5 debug, from 6 trace.";
            .flag("v", "LEVEL", "Log verbosity, as klog's: 0 to 3 info, 4 and 5 debug, from 6 trace")]
        [later "vmodule": Objects(VMODULE) = [], "`filePattern`, `verbosity`. `RUST_LOG` sets levels by module."]
        [later "options": Object(LOGGING_OPTIONS) = [], ""]
    }]
    /// True if it has `/logs/`.
    enable_system_log_handler: bool = true,
    ["enableSystemLogHandler": Bool = BOOL, "Serve `/logs/`."]
    /// True if `/logs/` answers queries of the journal.
    enable_system_log_query: bool = false,
    ["enableSystemLogQuery": Bool = BOOL,
        "Let `/logs/` answer queries of the journal. Needs `enableSystemLogHandler`."]
    /// Time for all pods together when the node shuts down; zero = the shutdown is not delayed.
    shutdown_grace_period: Duration = Duration::ZERO,
    ["shutdownGracePeriod": Duration = TIME,
        "How long pods have when the machine shuts down; see [shutdown.md](shutdown.md). 0s or at least 1s; whole seconds count."]
    /// The part of it that is kept for critical pods, which are stopped last.
    shutdown_grace_period_critical_pods: Duration = Duration::ZERO,
    ["shutdownGracePeriodCriticalPods": Duration = TIME,
        "The part of it that is kept for critical pods, which are stopped last."]
    /// The same by priority, instead of those two.
    shutdown_grace_period_by_pod_priority: Vec<PriorityPeriod> = Vec::new(),
    ["shutdownGracePeriodByPodPriority": Objects(PRIORITY_PERIOD) = PRIORITY_PERIODS,
        "`priority`, `shutdownGracePeriodSeconds`: groups by priority, instead of the two above."]
    /// `crashLoopBackOff.maxContainerRestartPeriod`: longest delay between restarts of a container.
    max_container_restart_period: Duration = Duration::from_secs(300),
    [section "crashLoopBackOff" {
        [max_container_restart_period as "crashLoopBackOff.maxContainerRestartPeriod": Duration = TIME,
            "1s to 5m. Needs no feature gate.";
            .within(|c| c.max_container_restart_period, Duration::from_secs(1), Duration::from_secs(300))]
    }]
    /// Memory that is kept from pods, by NUMA node.
    reserved_memory: Vec<ReservedMemory> = Vec::new(),
    ["reservedMemory": Objects(RESERVED_MEMORY) = MEMORY_OF_NODES,
        "`numaNode`, `limits`: memory and huge pages that no container gets, by NUMA node. The sums must equal what `systemReserved`, `kubeReserved` and `evictionHard` keep. What no longer fits the machine [is changed](cpus.md#restarts).";
        .flag("reserved-memory", "MEMORY", "Memory kept from pods by NUMA node, such as '0:memory=1Gi,hugepages-1Gi=2Gi;1:memory=2Gi'; may be repeated")]
    /// True if it has `/debug/pprof`.
    enable_profiling_handler: bool = true,
    ["enableProfilingHandler": Bool = BOOL, "Serve `/debug/pprof`."]
    /// True if it has `/debug/flags`.
    enable_debug_flags_handler: bool = true,
    ["enableDebugFlagsHandler": Bool = BOOL, "Serve `/debug/flags`."]
    /// True if containers that say nothing have the runtime's seccomp profile instead of none.
    seccomp_default: bool = false,
    ["seccompDefault": Bool = BOOL,
        "Containers that name no seccomp profile have the runtime's instead of none; privileged ones have none.";
        .flag("seccomp-default", "BOOL", "Give containers that name no seccomp profile the runtime's instead of none [default: false]")]
    [reserves.memory_throttling as "memoryThrottlingFactor": Number = FACTOR,
        "More than 0, at most 1. See [Memory of pods](#memory-of-pods)."]
    [reserves.memory_reservation as "memoryReservationPolicy": String = names(),
        "`None` or `TieredReservation`. See [Memory of pods](#memory-of-pods)."]
    /// Taints the node registers with.
    register_with_taints: Vec<Taint> = Vec::new(),
    ["registerWithTaints": Objects(TAINT) = TAINTS, "`key`, `value`, `effect`; `timeAdded` must be left out.";
        .flag("register-with-taints", "TAINTS", "Taints the node registers with, key=value:effect separated by commas")]
    /// True if the node's object is created when there is none.
    register_node: bool = true,
    ["registerNode": Bool = BOOL, "Create the node's object when there is none.";
        .flag("register-node", "BOOL", "Create the node's object when there is none [default: true]")]
    /// The `tracing` section; `None` when there is none.
    tracing: Option<Tracing> = None,
    [section "tracing" {
        [tracing as "tracing.endpoint": String = TRACING_ENDPOINT,
            "Collector of traces, OTLP over gRPC without TLS: `host:port` or `unix:///path`.";
            .default("`localhost:4317`")]
        [tracing as "tracing.samplingRatePerMillion": Int32 = TRACING_RATE,
            "0 to 1000000; of a million traces so many are sent, 0 for none. See [debugging.md](debugging.md#traces).";
            .default("0")]
    }]
    /// `localStorageCapacityIsolation`: local storage is counted and limited.
    local_storage_capacity_isolation: bool = true,
    ["localStorageCapacityIsolation": Bool = BOOL,
        "False where file systems cannot be measured: the node has no `ephemeral-storage`, and no pod is evicted for its [limits of local storage](lifecycle.md#limits-of-local-storage).";
        .flag("local-storage-capacity-isolation", "BOOL", "Count local storage and enforce its limits [default: true]")]
    /// CRI runtime endpoint as written; the resolved one is in `AgentConfig`.
    container_runtime_endpoint: String = "unix:///run/containerd/containerd.sock".to_owned(),
    ["containerRuntimeEndpoint": String = ENDPOINT, "Unix socket, as a URL or an absolute path.";
        .flag("container-runtime-endpoint", "ENDPOINT", "CRI runtime socket; one agent per runtime [default: unix:///run/containerd/containerd.sock]")]
    /// CRI image endpoint as written; empty means the runtime's.
    image_service_endpoint: String = String::new(),
    ["imageServiceEndpoint": String = TEXT, "Unix socket, as a URL or an absolute path.";
        .flag("image-service-endpoint", "ENDPOINT", "CRI image socket [default: that of the runtime]")
        .default("the runtime's")]
    /// True if the agent refuses to run on cgroup v1.
    fail_cgroup_v1: bool = false,
    ["failCgroupV1": Bool = BOOL, "Upstream: true. See deviations.";
        .flag("fail-cgroupv1", "BOOL", "Refuse to run on cgroup v1 [default: false]")]
    /// `userNamespaces.idsPerPod`: users and groups of the node that a pod with `hostUsers: false` has for itself.
    user_ids_per_pod: u32 = 65_536,
    [section "userNamespaces" {
        [user_ids_per_pod as "userNamespaces.idsPerPod": Int64 = Int(IDS_PER_POD),
            "Users and groups of a pod with `hostUsers: false`: a multiple of 65536, at most 4294836224. Pods keep what they have when it changes.";
            .check(|c| unless(has_ids_per_pod(c.user_ids_per_pod), c.user_ids_per_pod, IDS_PER_POD))]
    }]
}

//! Facts of the node and settings that the builders of CRI messages need. Filled once at start
//! by the composition root, read everywhere; what changes meanwhile is read through handles.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::dns::DnsConfigurer;
use super::resources::MemoryRules;
use super::userns;
use crate::types::PodUid;
use crate::types::host_addresses::HostAddresses;

/// Memory and swap of the machine in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySize {
    /// Memory.
    pub memory: u64,
    /// Swap.
    pub swap: u64,
}

/// Facts about the machine that change while it runs: memory, swap and processors can be added and taken away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// Memory and swap; `None` until they could be read.
    pub size: Option<MemorySize>,
    /// Rules for memory of containers beside their limits.
    pub rules: MemoryRules,
    /// Paths in `/sys` of this very machine that containers may not see, beside those that no container sees.
    pub masked_paths: Vec<String>,
}

impl MachineFacts {
    /// Returns the memory in bytes, if it is known; it scales `oom_score_adj`.
    pub fn memory(&self) -> Option<u64> {
        self.size.map(|size| size.memory)
    }
}

/// The newest [`MachineFacts`]. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SharedFacts(Arc<ArcSwap<MachineFacts>>);

impl SharedFacts {
    /// Returns the newest facts.
    pub fn get(&self) -> Arc<MachineFacts> {
        self.0.load_full()
    }

    /// Publishes newer facts.
    pub fn set(&self, facts: MachineFacts) {
        self.0.store(Arc::new(facts));
    }
}

/// Inputs of a pod's configuration other than the pod.
#[derive(Clone, Debug)]
pub struct NodeContext {
    /// Name of the node.
    pub node_name: String,
    /// `--root-dir`; pod directories are below `<root_dir>/pods`.
    pub root_dir: PathBuf,
    /// Root of the pods' log directories, `/var/log/pods`.
    pub pod_log_root: PathBuf,
    /// Directory of the links that log collectors read, `/var/log/containers`.
    pub container_log_root: PathBuf,
    /// The node's own hosts file, copied for pods on the host network.
    pub node_hosts_file: PathBuf,
    /// `clusterDomain`, empty when there is none.
    pub cluster_domain: String,
    /// DNS settings.
    pub dns: DnsConfigurer,
    /// The unified cgroup hierarchy is in use.
    pub cgroup_v2: bool,
    /// True if this kernel can limit swap.
    pub swap_controller: bool,
    /// `cpuCFSQuota`: enforce CPU limits.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod` in microseconds.
    pub cfs_period_us: u64,
    /// Facts about the machine that change while it runs.
    pub machine: SharedFacts,
    /// `seccompDefault`: RuntimeDefault instead of Unconfined where a container does not say.
    pub seccomp_default: bool,
    /// AppArmor is enabled in the kernel.
    pub apparmor: bool,
    /// SELinux is enabled in the kernel: what the agent makes for a container needs its label.
    pub selinux: bool,
    /// SELinux label that the policy has for files of containers, such as `system_u:object_r:container_file_t:s0`.
    pub selinux_file_context: Option<String>,
    /// `singleProcessOOMKill`: kill one process instead of the whole container (cgroup v2).
    pub single_process_oom_kill: bool,
    /// `userNamespaces.idsPerPod`: users that a pod with `hostUsers: false` has for itself.
    pub user_ids_per_pod: u32,
    /// Users that pods with `hostUsers: false` may have; or why none can be given.
    pub user_ids: Result<userns::Pool, String>,
    /// Sizes of huge pages that the kernel has, in bytes.
    pub hugepage_sizes: Vec<u64>,
    /// The node's addresses.
    pub addresses: HostAddresses,
}

impl NodeContext {
    /// A context with upstream's defaults.
    pub fn new(node_name: impl Into<String>, root_dir: impl Into<PathBuf>) -> Self {
        Self {
            node_name: node_name.into(),
            root_dir: root_dir.into(),
            pod_log_root: PathBuf::from("/var/log/pods"),
            container_log_root: PathBuf::from("/var/log/containers"),
            node_hosts_file: PathBuf::from("/etc/hosts"),
            cluster_domain: String::new(),
            dns: DnsConfigurer::default(),
            cgroup_v2: false,
            swap_controller: false,
            cpu_cfs_quota: true,
            cfs_period_us: 100_000,
            machine: SharedFacts::default(),
            seccomp_default: false,
            apparmor: false,
            selinux: false,
            selinux_file_context: None,
            single_process_oom_kill: false,
            user_ids_per_pod: userns::LENGTH,
            user_ids: Ok(userns::Pool::default()),
            hugepage_sizes: Vec::new(),
            addresses: HostAddresses::fixed(Vec::new()),
        }
    }

    /// `<root>/pods/<uid>`; upstream's `getPodDir`.
    pub fn pod_dir(&self, uid: &PodUid) -> PathBuf {
        self.root_dir.join("pods").join(uid.as_str())
    }

    /// `<pod_log_root>/<namespace>_<name>_<uid>`; upstream's `BuildPodLogsDirectory`.
    pub fn pod_log_dir(&self, namespace: &str, name: &str, uid: &PodUid) -> PathBuf {
        self.pod_log_root.join(format!("{namespace}_{name}_{uid}"))
    }

    /// `<root>/seccomp`, where Localhost profiles are looked for.
    pub fn seccomp_root(&self) -> PathBuf {
        self.root_dir.join("seccomp")
    }

    /// `<root>/pods`.
    pub fn pods_dir(&self) -> PathBuf {
        self.root_dir.join("pods")
    }

    /// `<podDir>/etc-hosts`, which the pod's containers may write.
    pub fn hosts_file(&self, uid: &PodUid) -> PathBuf {
        self.pod_dir(uid).join("etc-hosts")
    }

    /// `<podDir>/containers/<name>`, where termination messages are; upstream's `getPodContainerDir`.
    pub fn container_dir(&self, uid: &PodUid, container: &str) -> PathBuf {
        self.pod_dir(uid).join("containers").join(container)
    }
}

/// Returns whether `name` can be one component of a path below a directory of the agent.
pub(crate) fn is_path_component(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.contains(['/', '\0'])
        && Path::new(name).file_name().is_some_and(|f| f == name)
}

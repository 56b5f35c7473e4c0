//! Facts of this node that pods' configurations depend on.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::Node;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::api::{ReadNode, node_reader};
use super::base::Base;
use super::reserves::Reports;
use super::started::Started;
use super::{AgentError, Tasks, swap};
use crate::cm::systemd::Systemd;
use crate::cm::{CgroupConfig, CgroupDriver, CgroupError, CgroupManager, CgroupVersion};
use crate::core::pinning::memory::memory_resource;
use crate::kubeletconfig::{
    self, AgentConfig, KubeletConfiguration, MemoryReservation, SwapBehavior,
};
use crate::kuberuntime::dns::{DnsConfigurer, Unfilled};
use crate::kuberuntime::node_context::{MachineFacts, MemorySize, NodeContext, SharedFacts};
use crate::kuberuntime::resources::MemoryRules;
use crate::kuberuntime::{selinux, userns};
use crate::nodestatus::{cpus, huge_pages, memory_size, read_memory};
use crate::types::host_addresses::HostAddresses;
use crate::types::metrics::Metrics;
use crate::types::mountinfo;
use crate::types::{Event, EventRecorder, EventType, Pace, Stamp, blocking, causes};

/// Directory in which the kernel lists processors.
const CPUS: &str = "/sys/devices/system/cpu";
/// Interval between readings of the machine's size, as for the node's status.
const SIZE_LOOK: Duration = Duration::from_secs(10);
/// Interval after which the limits of all pods together are set again.
const SIZE_KEEP: Duration = Duration::from_secs(60);
/// Longest pause before limits are set again that the kernel has refused.
const SIZE_RETRY: Duration = Duration::from_secs(300);
/// Texts of the events about these limits.
const LIMITED: &str = "Updated Node Allocatable limit across pods";
const NOT_LIMITED: &str = "Failed to update Node Allocatable Limits";

/// Sizes of huge pages that the kernel has, in bytes; none when it has none.
fn hugepage_sizes() -> Vec<u64> {
    let entries = std::fs::read_dir("/sys/kernel/mm/hugepages");
    let mut sizes: Vec<u64> = entries
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            kib.parse::<u64>().ok()?.checked_mul(1024)
        })
        .collect();
    sizes.sort_unstable();
    sizes
}

/// Billionths of a thousandth.
const MILLI: i128 = 1_000_000;
/// Billionths of a unit.
const UNIT: i128 = 1_000_000_000;

/// Returns the amount of a resource that all pods together may use, in `unit`: the capacity, minus the reservations if
/// `enforceNodeAllocatable` includes pods. `None` if nothing remains. Upstream: `getNodeAllocatableAbsolute`, in which
/// the eviction thresholds do not count.
fn for_pods(kubelet: &KubeletConfiguration, name: &str, capacity: u64, unit: i128) -> Option<u64> {
    let mut left = i128::from(capacity) * UNIT;
    if kubelet.enforce_node_allocatable.iter().any(|e| e == "pods") {
        let reserved = [&kubelet.system_reserved, &kubelet.kube_reserved];
        left -= reserved.iter().filter_map(|r| r.get(name)).sum::<i128>();
    }
    u64::try_from(left / unit).ok().filter(|left| *left > 0)
}

/// Processes and threads of all pods together; `None` when none are reserved, since the kernel's own limit holds then.
fn pids_for_pods(kubelet: &KubeletConfiguration) -> Option<u64> {
    let number = |file: &str| -> Option<u64> {
        let text = std::fs::read_to_string(file).ok()?;
        text.trim().parse().ok()
    };
    let limits = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"];
    let capacity = limits.iter().filter_map(|file| number(file)).min()?;
    let left = for_pods(kubelet, "pid", capacity, UNIT)?;
    (left < capacity).then_some(left)
}

/// Bytes in huge pages that all pods together may use, by the size of a page: of sizes of which some are reserved, where
/// `enforceNodeAllocatable` says so. Others need no limit, since there are no more pages than the machine's.
fn huge_pages_for_pods(
    kubelet: &KubeletConfiguration,
    huge_pages: &BTreeMap<u64, u64>,
) -> BTreeMap<u64, u64> {
    if !kubelet.enforce_node_allocatable.iter().any(|e| e == "pods") {
        return BTreeMap::new();
    }
    let left = |(size, bytes): (&u64, &u64)| {
        let resource = memory_resource(&format!("hugepages-{size}"))?;
        let all = kubelet.system_reserved.iter().chain(&kubelet.kube_reserved);
        let of_size = all.filter(|(name, _)| memory_resource(name).as_ref() == Some(&resource));
        let reserved: i128 = of_size.map(|(_, amount)| amount / UNIT).sum();
        let left = i128::from(*bytes) - reserved;
        let left = u64::try_from(left.max(0)).unwrap_or(u64::MAX);
        (reserved > 0 && *size > 0).then(|| (*size, left / size * size))
    };
    huge_pages.iter().filter_map(left).collect()
}

fn is_tiered(kubelet: &KubeletConfiguration) -> bool {
    kubelet.reserves.memory_reservation == MemoryReservation::Tiered
}

/// Returns the rules for memory of containers beside their limits. While the size of the machine is not known, containers
/// without a limit are not throttled, and none gets swap.
fn memory_rules(kubelet: &KubeletConfiguration, seen: &Seen) -> MemoryRules {
    let reserves = &kubelet.reserves;
    let memory = seen.ordinary_memory().unwrap_or(0);
    let swap = seen.memory.map_or(0, |size| size.swap);
    MemoryRules {
        throttling: reserves.memory_throttling,
        tiered: is_tiered(kubelet),
        for_pods: for_pods(kubelet, "memory", memory, UNIT).unwrap_or(memory),
        page: procfs::page_size(),
        swap: (reserves.swap == SwapBehavior::LimitedSwap).then_some(swap),
    }
}

/// Sizes of the machine, which are read again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    cpus: u64,
    memory: Option<MemorySize>,
    huge_pages: BTreeMap<u64, u64>,
    /// True if memory limits count huge pages too.
    charges_huge_pages: bool,
}

impl Seen {
    /// Returns the memory that memory limits are about: without huge pages, which are set apart when they are allocated.
    fn ordinary_memory(&self) -> Option<u64> {
        let huge_pages = self
            .huge_pages
            .values()
            .copied()
            .fold(0, u64::saturating_add);
        let apart = if self.charges_huge_pages {
            0
        } else {
            huge_pages
        };
        self.memory.map(|size| size.memory.saturating_sub(apart))
    }

    /// Reads the sizes; `known` is the memory as it was last read. Blocking, shortly.
    fn read(known: Option<MemorySize>) -> Self {
        Self {
            cpus: cpus(),
            memory: memory_size(known),
            huge_pages: huge_pages(),
            charges_huge_pages: charges_huge_pages(),
        }
    }
}

/// Returns whether memory limits count huge pages, as they do where cgroup2 is mounted so. Blocking, shortly.
fn charges_huge_pages() -> bool {
    let table = std::fs::read(mountinfo::TABLE).unwrap_or_default();
    let mut mounts = mountinfo::lines(&table);
    mounts.any(|mount| {
        let mut options = mount.super_options.split(|byte| *byte == b',');
        mount.fstype == b"cgroup2" && options.any(|o| o == b"memory_hugetlb_accounting")
    })
}

/// Publishes the sizes of the machine for those who use them: containers, admission and volumes.
struct Publisher {
    kubelet: KubeletConfiguration,
    machine: SharedFacts,
    local_node: Arc<ArcSwap<Node>>,
    read_node: ReadNode,
    seen: Mutex<Option<Seen>>,
}

impl Publisher {
    fn publish(&self, seen: Seen, masked_paths: Vec<String>) {
        let facts = MachineFacts {
            size: seen.memory,
            rules: memory_rules(&self.kubelet, &seen),
            masked_paths,
        };
        if *self.machine.get() != facts {
            self.machine.set(facts);
        }
        let mut last = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref() != Some(&seen) {
            self.local_node
                .store(Arc::new((self.read_node)(seen.memory)));
            *last = Some(seen);
        }
    }
}

/// The highest number that a processor may get while the machine runs, those included that are added later; `None` where
/// the kernel does not report it.
fn last_cpu(cpus: &Path) -> Option<u32> {
    // Ranges: `0-3,5`.
    let possible = std::fs::read_to_string(cpus.join("possible")).ok()?;
    let last = possible.trim().rsplit([',', '-']).next()?;
    last.parse().ok()
}

/// Resources that all pods together may use.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Size {
    /// Thousandths of a processor.
    cpu_milli: Option<u64>,
    /// Bytes of memory.
    memory: Option<u64>,
    /// Bytes in huge pages, by the size of a page; those that are limited.
    huge_pages: BTreeMap<u64, u64>,
}

impl Size {
    fn of(kubelet: &KubeletConfiguration, seen: &Seen) -> Self {
        let memory = seen.ordinary_memory();
        Self {
            cpu_milli: for_pods(kubelet, "cpu", seen.cpus, MILLI),
            memory: memory.and_then(|memory| for_pods(kubelet, "memory", memory, UNIT)),
            huge_pages: huge_pages_for_pods(kubelet, &seen.huge_pages),
        }
    }
}

/// Publishes the size of the machine, to which processors and memory can be added while it runs. Keeps the limits of all pods
/// together: follows that size, and restores what others have changed.
pub(super) fn follow_size(
    config: &AgentConfig,
    base: &Base,
    started: &Started,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let cgroups = Arc::clone(&started.workers.context().resources.cgroups);
    let publisher = Arc::new(Publisher {
        kubelet: config.kubelet.clone(),
        machine: started.workers.context().node.machine.clone(),
        local_node: Arc::clone(&started.local_node),
        read_node: node_reader(config, base),
        seen: Mutex::default(),
    });
    let token = token.clone();
    let recorder: Arc<dyn EventRecorder> = Arc::clone(&base.recorder) as _;
    let clock = Arc::clone(&base.clock);
    tasks.add("size of the machine", async move {
        let (pace, mut kept, mut reports) = (Pace::default(), None, Reports::default());
        let mut refused: Option<Refused> = None;
        let mut look = tokio::time::interval(SIZE_LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = look.tick() => {}
                () = token.cancelled() => return,
            }
            let (publisher, now) = (Arc::clone(&publisher), clock.now());
            let cgroups = Arc::clone(&cgroups);
            let (last, refusal) = (kept.clone(), refused.clone());
            let follow = move || {
                let seen = Seen::read(publisher.machine.get().size);
                let size = Size::of(&publisher.kubelet, &seen);
                let is_early = refusal.is_some_and(|refusal| refusal.holds(&size, now));
                let kept = (seen.memory.is_some() && !is_early).then(|| {
                    let kept = keep(&cgroups, last, size.clone(), now);
                    kept.map_err(|error| (size, error))
                });
                publisher.publish(seen, thermal_throttle(Path::new(CPUS)));
                (kept, read_memory().err().map(|error| error.to_string()))
            };
            let Ok((done, unreadable)) = blocking::run(follow).await else {
                continue;
            };
            report_unreadable(unreadable, &pace, now);
            let error = match done {
                Some(Ok(now)) => {
                    pace.over("size");
                    (kept, refused) = (Some(now), None);
                    None
                }
                Some(Err((size, error))) => {
                    refused = Refused::after(refused, size, &error, now);
                    Some(causes(&error))
                }
                None => continue,
            };
            if let Some(error) = &error {
                if !pace.is_due("size", error, now) {
                    continue;
                }
                warn!(
                    error,
                    "cannot limit pods to the node's allocatable resources, retrying"
                );
            }
            let texts = (LIMITED.to_owned(), NOT_LIMITED.to_owned());
            if let Some(event) = reports.event("pods", Some(texts), error) {
                recorder.record(event);
            }
        }
    });
}

/// Logs that the size of the memory cannot be read, which matters only once it changes.
fn report_unreadable(error: Option<String>, pace: &Pace, now: Stamp) {
    match error {
        Some(error) if pace.is_due("memory", &error, now) => warn!(
            error,
            "cannot read the size of the memory from /proc/meminfo, keeping the last one, retrying every 10 s"
        ),
        Some(_) => {}
        None => pace.over("memory"),
    }
}

/// Limits of all pods together, and when they were last set.
type Kept = (Size, Stamp);

/// Limits that the kernel has refused, such as one of huge pages below what is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Refused {
    size: Size,
    pause: Duration,
    again: Stamp,
}

impl Refused {
    /// Returns what follows from an error: a pause that is twice as long as the one before, if that was for the same limits.
    /// Memory that is in use is no refusal: the kernel was not asked, and pods may use less any moment.
    fn after(before: Option<Self>, size: Size, error: &CgroupError, now: Stamp) -> Option<Self> {
        if matches!(error, CgroupError::AboveLimit { .. }) {
            return None;
        }
        let before = before.filter(|before| before.size == size);
        let pause = before.map_or(SIZE_LOOK, |before| before.pause.saturating_mul(2));
        let pause = pause.min(SIZE_RETRY);
        Some(Self {
            size,
            pause,
            again: now.plus(pause),
        })
    }

    /// Returns whether these limits are not to be set yet.
    fn holds(&self, size: &Size, now: Stamp) -> bool {
        self.size == *size && !self.again.reached(now)
    }
}

/// Brings the cgroup of all pods to `size` if that is due. At first it is done in any case: the machine may have changed while
/// the runtime was waited for, and the kernel may have refused the limit.
fn keep(
    cgroups: &CgroupManager,
    kept: Option<Kept>,
    size: Size,
    now: Stamp,
) -> Result<Kept, CgroupError> {
    if let Some((known, _)) = &kept
        && *known != size
    {
        info!(
            now = ?size,
            "CPUs or memory of the machine changed, updating the limits of all pods together"
        );
    }
    match kept.filter(|kept| !is_due(kept, &size, now)) {
        Some(kept) => Ok(kept),
        None => {
            cgroups.resize_all(size.cpu_milli, size.memory, &size.huge_pages)?;
            Ok((size, now))
        }
    }
}

/// Returns whether limits have to be set: others are needed, or they were set a minute ago and may have been changed since.
fn is_due((known, at): &Kept, size: &Size, now: Stamp) -> bool {
    known != size || now.since(*at) >= SIZE_KEEP
}

/// The event that pods are not held to their share of the node.
fn not_enforced(error: &str) -> Event {
    let text = format!("{NOT_LIMITED}: {error}");
    let reason = "FailedNodeAllocatableEnforcement";
    Event::node(EventType::Warning, reason, text)
}

/// Detects the cgroups of the machine and makes those of all pods. Emits an event when the kernel refuses to hold pods to their
/// share of the node.
///
/// # Errors
/// When the machine has no cgroups that will do, or they cannot be made.
pub(super) async fn cgroups(
    config: &AgentConfig,
    base: &Base,
) -> Result<CgroupManager, AgentError> {
    let (cgroups, limited) = detect_cgroups(config, &base.metrics).await?;
    let version = match cgroups.version() {
        CgroupVersion::V1 { .. } => 1,
        CgroupVersion::V2 => 2,
    };
    base.metrics.cgroup_version.set(version);
    if let Err(error) = limited {
        let error = causes(&error);
        warn!(error, "cannot enforce node allocatable");
        base.recorder.record(not_enforced(&error));
    }
    Ok(cgroups)
}

/// Returns the users that pods may have for themselves, from the files of subordinate IDs. A file that is missing has none.
fn subordinate_ids(ids_per_pod: u32, max_pods: u32) -> Result<userns::Pool, String> {
    let read = |path: &str| match std::fs::read(path) {
        Ok(content) => Ok(content),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(format!("read {path}: {error}")),
    };
    let pool = read("/etc/subuid").and_then(|users| {
        let groups = read("/etc/subgid")?;
        userns::Pool::of_kubelet(&users, &groups, ids_per_pod, max_pods)
    });
    if let Err(error) = &pool {
        warn!(error, "pods with hostUsers: false cannot start");
    }
    pool
}

/// Detects cgroups and makes those of all pods. The second result says whether pods are held to their share of the node, which
/// the kernel may refuse.
async fn detect_cgroups(
    config: &AgentConfig,
    metrics: &Metrics,
) -> Result<(CgroupManager, Result<(), CgroupError>), AgentError> {
    let (config, runtime) = (config.clone(), Handle::current());
    let metrics = metrics.clone();
    let made = blocking::run(move || {
        let manager = make_cgroups(&config.kubelet, runtime, metrics)?;
        let limited = manager.limit_all();
        Ok::<_, CgroupError>((manager, limited))
    })
    .await;
    match made {
        Ok(result) => Ok(result?),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that is shutting down cancels blocking work.
            Err(_) => std::future::pending().await,
        },
    }
}

fn make_cgroups(
    kubelet: &KubeletConfiguration,
    runtime: Handle,
    metrics: Metrics,
) -> Result<CgroupManager, CgroupError> {
    let size = Size::of(kubelet, &Seen::read(None));
    let manager = CgroupManager::detect(CgroupConfig {
        driver: match kubelet.cgroup_driver {
            kubeletconfig::CgroupDriver::Cgroupfs => CgroupDriver::Cgroupfs,
            kubeletconfig::CgroupDriver::Systemd => CgroupDriver::Systemd,
        },
        root: kubelet.cgroup_root.clone(),
        per_qos: kubelet.cgroups_per_qos,
        fail_v1: kubelet.fail_cgroup_v1,
        cpu_cfs_quota: kubelet.cpu_cfs_quota,
        cfs_period_us: micros(kubelet.cpu_cfs_quota_period),
        pod_pids_limit: kubelet.pod_pids_limit,
        hugepage_sizes: hugepage_sizes(),
        allocatable_cpu_milli: size.cpu_milli,
        allocatable_memory: size.memory,
        allocatable_pids: pids_for_pods(kubelet),
        allocatable_huge_pages: size.huge_pages,
        qos_reserved_memory: kubelet.reserves.qos_memory,
        tiered: is_tiered(kubelet),
        cpus: last_cpu(Path::new(CPUS)).map(|last| last + 1),
        ..CgroupConfig::default()
    })?
    .with_systemd(Systemd::of_this_machine(runtime))
    .measured(metrics);
    manager.setup()?;
    Ok(manager)
}

/// Reads the resolver configuration of the host, and emits events about limits that it exceeds. Blocking.
pub(super) fn check_resolver(base: &Base, node: &NodeContext) {
    match node.dns.read_host() {
        Ok(host) => {
            for event in node.dns.check_limits(&host) {
                base.recorder.record(event);
            }
        }
        // It may come later. Sandboxes that need it wait until then.
        Err(error) => warn!(%error, "pods that use the node's resolver cannot start yet"),
    }
}

/// Puts the facts together. Blocking.
pub(super) fn context(
    config: &AgentConfig,
    cgroups: &CgroupManager,
    addresses: HostAddresses,
) -> Result<NodeContext, AgentError> {
    let kubelet = &config.kubelet;
    let servers = kubelet.cluster_dns.iter().map(ToString::to_string);
    let dns = DnsConfigurer {
        cluster_dns: servers.collect(),
        cluster_domain: kubelet.cluster_domain.clone(),
        resolv_conf: (kubelet.resolv_conf.clone()).filter(|path| !path.as_os_str().is_empty()),
        unfilled: Unfilled::default(),
    };
    let mut context = NodeContext::new(config.node_name.clone(), config.root_dir.clone());
    context.pod_log_root = config.pod_logs_dir().to_path_buf();
    context.container_log_root = config.container_logs_dir.clone();
    context.cluster_domain = kubelet.cluster_domain.clone();
    context.dns = dns;
    context.cgroup_v2 = matches!(cgroups.version(), CgroupVersion::V2);
    if !context.cgroup_v2 && kubelet.single_process_oom_kill == Some(false) {
        return Err(AgentError::Setting {
            field: "singleProcessOOMKill",
            why: "false needs cgroup v2, and this machine has v1; set it to true or leave it out"
                .to_owned(),
        });
    }
    context.single_process_oom_kill = kubelet.single_process_oom_kill.unwrap_or(false);
    context.user_ids_per_pod = kubelet.user_ids_per_pod;
    context.user_ids = subordinate_ids(kubelet.user_ids_per_pod, kubelet.max_pods);
    context.swap_controller = cgroups.has_swap_controller();
    let behavior = kubelet.reserves.swap;
    if let Some(why) = swap::without_effect(behavior, context.cgroup_v2, context.swap_controller) {
        warn!("memorySwap.swapBehavior: LimitedSwap has no effect: {why}");
    }
    context.cpu_cfs_quota = kubelet.cpu_cfs_quota;
    context.cfs_period_us = micros(kubelet.cpu_cfs_quota_period);
    let seen = Seen::read(None);
    let size = seen.memory;
    if size.is_none() {
        warn!("the size of the machine's memory is unknown, retrying every 10 s");
    }
    context.machine.set(MachineFacts {
        size,
        rules: memory_rules(kubelet, &seen),
        masked_paths: thermal_throttle(Path::new(CPUS)),
    });
    if cgroups.has_hugetlb_controller() {
        context.hugepage_sizes = hugepage_sizes();
    }
    context.addresses = addresses;
    context.apparmor = has_apparmor();
    context.selinux = std::path::Path::new("/sys/fs/selinux/enforce").exists();
    if context.selinux {
        context.selinux_file_context = selinux_file_context();
    }
    context.seccomp_default = kubelet.seccomp_default;
    Ok(context)
}

/// Counters of the processors' thermal throttling, from which a container could tell what others compute. Upstream:
/// `defaultMaskedPaths`. One directory per processor, on some machines.
fn thermal_throttle(cpus: &std::path::Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(cpus) else {
        return Vec::new();
    };
    let mut numbers: Vec<u32> = entries
        .flatten()
        .filter_map(|entry| {
            entry
                .file_name()
                .to_str()?
                .strip_prefix("cpu")?
                .parse()
                .ok()
        })
        .collect();
    numbers.sort_unstable();
    let paths = numbers
        .into_iter()
        .map(|number| cpus.join(format!("cpu{number}/thermal_throttle")));
    paths
        .filter(|path| path.exists())
        .map(|path| path.to_string_lossy().into_owned())
        .collect()
}

/// Returns the label that the node's SELinux policy has for files of containers.
fn selinux_file_context() -> Option<String> {
    let etc = std::path::Path::new("/etc/selinux");
    // Comments need not be UTF-8.
    let read = |path: std::path::PathBuf| {
        let bytes = std::fs::read(path).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    let policy = selinux::policy_name(&read(etc.join("config"))?)?;
    let contexts = etc.join(policy).join(selinux::CONTEXTS_FILE);
    selinux::file_context(&read(contexts)?)
}

/// Returns whether AppArmor is enabled in this kernel.
fn has_apparmor() -> bool {
    std::fs::read_to_string("/sys/module/apparmor/parameters/enabled")
        .is_ok_and(|text| text.starts_with('Y'))
}

fn micros(period: std::time::Duration) -> u64 {
    u64::try_from(period.as_micros()).unwrap_or(100_000)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

    use super::*;
    use crate::agent::volumes;
    use crate::types::BootId;

    fn at(seconds: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: 0,
        }
    }

    #[test]
    fn limits_of_all_pods_are_set_for_another_size_and_each_minute() {
        let size = |memory| Size {
            cpu_milli: Some(1000),
            memory,
            huge_pages: BTreeMap::new(),
        };
        let kept = (size(Some(1)), at(100));
        assert!(!is_due(&kept, &size(Some(1)), at(159)));
        assert!(is_due(&kept, &size(Some(1)), at(160)));
        assert!(is_due(&kept, &size(Some(2)), at(101)));
        assert!(is_due(&kept, &size(None), at(101)));
    }

    #[test]
    fn limits_that_the_kernel_refuses_are_set_again_ever_more_seldom() {
        let size = |memory| Size {
            cpu_milli: Some(2000),
            memory: Some(memory),
            huge_pages: BTreeMap::from([(2 << 20, 4 << 20)]),
        };
        let busy = CgroupError::Io {
            verb: "write",
            path: "/sys/fs/cgroup/kubepods/hugetlb.2MB.max".into(),
            source: std::io::ErrorKind::ResourceBusy.into(),
        };
        let (mut refused, mut tried) = (None::<Refused>, Vec::new());
        for second in (0..1300).step_by(10) {
            if refused
                .as_ref()
                .is_some_and(|r| r.holds(&size(1), at(second)))
            {
                continue;
            }
            tried.push(second);
            refused = Refused::after(refused, size(1), &busy, at(second));
        }
        assert_eq!(tried, [0, 10, 30, 70, 150, 310, 610, 910, 1210]);
        let refused = refused.unwrap();
        assert!(!refused.holds(&size(2), at(1220)), "others are set at once");
        let other = Refused::after(Some(refused.clone()), size(2), &busy, at(1220)).unwrap();
        assert_eq!(other.pause, SIZE_LOOK);
        let used = CgroupError::AboveLimit {
            path: "/kubepods".to_owned(),
            used: 2,
            limit: 1,
        };
        assert_eq!(
            Refused::after(Some(refused), size(1), &used, at(1220)),
            None
        );
    }

    #[test]
    fn a_size_that_changes_reaches_containers_admission_and_volumes() {
        let mut kubelet = KubeletConfiguration::default();
        kubelet.reserves.swap = SwapBehavior::LimitedSwap;
        // The node as admission sees it, without all that is not read here.
        let read_node: ReadNode = Arc::new(|size: Option<MemorySize>| {
            let memory = size.map(|size| size.memory.to_string());
            let allocatable = memory.map(|memory| ("memory".to_owned(), Quantity(memory)));
            let mut node = Node::default();
            let status = node.status.get_or_insert_default();
            status.allocatable = Some(allocatable.into_iter().collect());
            node
        });
        let publisher = Publisher {
            kubelet,
            machine: SharedFacts::default(),
            local_node: Arc::default(),
            read_node,
            seen: Mutex::default(),
        };
        let of_volumes = volumes::following(&publisher.local_node, &publisher.machine);
        assert_eq!(of_volumes(), None);
        // Each is what was published before: a container that is made later has another clone of it.
        let of_containers = publisher.machine.clone();
        for gib in [4_u64, 8, 2] {
            let (memory, swap) = (gib << 30, gib << 20);
            let seen = Seen {
                cpus: 2,
                memory: Some(MemorySize { memory, swap }),
                huge_pages: BTreeMap::new(),
                charges_huge_pages: false,
            };
            publisher.publish(seen, vec![gib.to_string()]);
            let facts = of_containers.get();
            assert_eq!(facts.memory(), Some(memory));
            assert_eq!(
                (facts.rules.for_pods, facts.rules.swap),
                (memory, Some(swap))
            );
            assert_eq!(facts.masked_paths, [gib.to_string()]);
            assert_eq!(of_volumes(), Some(memory));
            let node = publisher.local_node.load();
            let allocatable = node.status.as_ref().unwrap().allocatable.as_ref();
            assert_eq!(allocatable.unwrap()["memory"].0, memory.to_string());
        }
    }

    #[test]
    fn counters_of_thermal_throttling_are_found_where_there_are_some() {
        let dir = tempfile::tempdir().unwrap();
        for path in [
            "cpu10/thermal_throttle",
            "cpu9/thermal_throttle",
            "cpu11/topology",
            "cpuidle/thermal_throttle",
            "power",
        ] {
            std::fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let wanted =
            ["cpu9", "cpu10"].map(|cpu| format!("{}/{cpu}/thermal_throttle", dir.path().display()));
        assert_eq!(thermal_throttle(dir.path()), wanted);
        assert_eq!(thermal_throttle(&dir.path().join("none")), [""; 0]);
    }

    #[test]
    fn processors_that_may_be_added_later_count() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(last_cpu(dir.path()), None);
        for (file, text) in [("online", "0-1\n"), ("possible", "0-3,8-11\n")] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        assert_eq!(last_cpu(dir.path()), Some(11));
    }

    #[test]
    fn huge_pages_are_limited_where_some_are_reserved() {
        let (two, gib) = (2_u64 << 20, 1_u64 << 30);
        let machine = BTreeMap::from([(two, 10 * two), (gib, 4 * gib)]);
        let reserved = |name: &str, bytes: u64| {
            std::iter::once((name.to_owned(), i128::from(bytes) * UNIT)).collect()
        };
        let mut kubelet = KubeletConfiguration::default();
        assert_eq!(huge_pages_for_pods(&kubelet, &machine), BTreeMap::new());
        kubelet.system_reserved = reserved("hugepages-2Mi", 3 * two);
        // The same size in other words, and not whole pages.
        kubelet.kube_reserved = reserved("hugepages-2048Ki", two / 2);
        let limits = huge_pages_for_pods(&kubelet, &machine);
        assert_eq!(limits, BTreeMap::from([(two, 6 * two)]));
        kubelet.system_reserved = reserved("hugepages-1Gi", 5 * gib);
        kubelet.kube_reserved.clear();
        let limits = huge_pages_for_pods(&kubelet, &machine);
        assert_eq!(limits, BTreeMap::from([(gib, 0)]), "more than there are");
        kubelet.enforce_node_allocatable.clear();
        assert_eq!(huge_pages_for_pods(&kubelet, &machine), BTreeMap::new());
    }

    #[test]
    fn memory_in_huge_pages_is_not_for_pods_to_share() {
        let kubelet = KubeletConfiguration {
            system_reserved: [("memory".to_owned(), 2 * (1 << 30) * UNIT)].into(),
            ..KubeletConfiguration::default()
        };
        let size = MemorySize {
            memory: 64 << 30,
            swap: 0,
        };
        let mut seen = Seen {
            cpus: 2,
            memory: Some(size),
            huge_pages: [(2 << 20, 24 << 30), (1 << 30, 8 << 30)].into(),
            charges_huge_pages: false,
        };
        assert_eq!(Size::of(&kubelet, &seen).memory, Some(30 << 30));
        assert_eq!(memory_rules(&kubelet, &seen).for_pods, 30 << 30);
        seen.charges_huge_pages = true;
        assert_eq!(Size::of(&kubelet, &seen).memory, Some(62 << 30));
        seen.memory = None;
        assert_eq!(Size::of(&kubelet, &seen).memory, None);
    }

    #[test]
    fn pods_together_get_what_is_not_reserved() {
        let mut kubelet = KubeletConfiguration::default();
        let reserved = |cpu: i128, memory: i128| {
            [
                ("cpu".to_owned(), cpu * MILLI),
                ("memory".to_owned(), memory * UNIT),
            ]
            .into()
        };
        kubelet.system_reserved = reserved(500, 1000);
        kubelet.kube_reserved = reserved(250, 24);
        let both = |kubelet: &KubeletConfiguration| {
            (
                for_pods(kubelet, "cpu", 2, MILLI),
                for_pods(kubelet, "memory", 4096, UNIT),
            )
        };
        assert_eq!(both(&kubelet), (Some(1250), Some(3072)));
        kubelet.enforce_node_allocatable = vec!["none".to_owned()];
        assert_eq!(both(&kubelet), (Some(2000), Some(4096)));
        kubelet.enforce_node_allocatable = vec!["pods".to_owned()];
        kubelet.system_reserved = reserved(2000, 5000);
        assert_eq!(
            both(&kubelet),
            (None, None),
            "no limit rather than none left"
        );
    }
}

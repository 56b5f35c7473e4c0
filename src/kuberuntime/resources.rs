//! Arithmetic of resources: quantities, QoS classes, CPU shares and quotas, OOM scores.
//!
//! Comes in: a pod spec. Goes out: numbers for CRI messages and cgroups. Pure. A quantity that does not
//! parse is an error that names it, never zero.

use std::collections::BTreeMap;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::node_context::{MachineFacts, NodeContext};
pub use crate::core::pod_status::{QosClass, qos_class};
use crate::core::resources as core;
use crate::types::PodExt;
use crate::types::containers::is_sidecar;
use crate::types::quantity;
pub use crate::types::quantity::QuantityError;

/// Least CPU shares (`cpu.shares`) a cgroup gets.
pub const MIN_SHARES: u64 = 2;
/// Most CPU shares a cgroup gets.
pub const MAX_SHARES: u64 = 262_144;
/// Least CFS quota, in microseconds.
pub const MIN_QUOTA_US: i64 = 1_000;
/// The longest quota that the kernel takes: its `MAX_BW`.
pub const MAX_QUOTA_US: i64 = (1 << 44) - 1;

const GUARANTEED_OOM_ADJ: i64 = -997;
const BEST_EFFORT_OOM_ADJ: i64 = 1_000;
const NODE_CRITICAL: &str = "system-node-critical";

const NANO: i128 = 1_000_000_000;

fn to_i64(nano: i128, unit: i128) -> i64 {
    let value = nano / unit + (nano % unit).signum();
    i64::try_from(value).unwrap_or(if value > 0 { i64::MAX } else { i64::MIN })
}

/// Whole units, rounded away from zero; upstream's `Quantity.Value`.
///
/// # Errors
/// When it is not a quantity.
pub fn value(quantity: &Quantity) -> Result<i64, QuantityError> {
    quantity::nanos(&quantity.0).map(|nano| to_i64(nano, NANO))
}

/// Thousandths, rounded away from zero; upstream's `Quantity.MilliValue`.
///
/// # Errors
/// When it is not a quantity.
pub fn milli_value(quantity: &Quantity) -> Result<i64, QuantityError> {
    quantity::nanos(&quantity.0).map(|nano| to_i64(nano, NANO / 1_000))
}

/// CPU and memory of a container or pod; `None` = not said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuMemory {
    /// Requested CPU in thousandths of a core.
    pub cpu_request: Option<i64>,
    /// CPU limit in thousandths of a core.
    pub cpu_limit: Option<i64>,
    /// Requested memory in bytes.
    pub memory_request: Option<i64>,
    /// Memory limit in bytes.
    pub memory_limit: Option<i64>,
}

impl CpuMemory {
    fn of(requests: &core::Amounts, limits: &core::Amounts) -> Self {
        let milli = |from: &core::Amounts| from.get("cpu").map(|n| to_i64(*n, NANO / 1_000));
        let bytes = |from: &core::Amounts| from.get("memory").map(|n| to_i64(*n, NANO));
        Self {
            cpu_request: milli(requests),
            cpu_limit: milli(limits),
            memory_request: bytes(requests),
            memory_limit: bytes(limits),
        }
    }
}

/// CPU and memory of one container; a request that is not said is the limit.
///
/// # Errors
/// When a quantity does not parse.
pub fn container_resources(container: &Container) -> Result<CpuMemory, QuantityError> {
    let resources = container.resources.as_ref();
    let requests = resources.and_then(|r| r.requests.as_ref());
    let limits = resources.and_then(|r| r.limits.as_ref());
    let of = |map: Option<&BTreeMap<String, Quantity>>, name: &str, milli: bool| {
        map.and_then(|m| m.get(name))
            .map(|q| if milli { milli_value(q) } else { value(q) })
            .transpose()
    };
    let cpu_limit = of(limits, "cpu", true)?;
    let memory_limit = of(limits, "memory", false)?;
    Ok(CpuMemory {
        cpu_request: of(requests, "cpu", true)?.or(cpu_limit),
        cpu_limit,
        memory_request: of(requests, "memory", false)?.or(memory_limit),
        memory_limit,
    })
}

/// CPU and memory of a pod without its overhead: over main containers, sidecars and init containers, or
/// what the pod as a whole asks for. A limit is there only if every container has one or the pod itself
/// does; upstream's `ResourceConfigForPod`.
///
/// # Errors
/// When a quantity does not parse.
pub fn pod_resources(pod: &Pod) -> Result<CpuMemory, QuantityError> {
    check(pod)?;
    Ok(CpuMemory::of(
        &core::requests_without_overhead(pod),
        &core::limits_without_overhead(pod),
    ))
}

/// [`pod_resources`] and `spec.overhead`: added to the requests, and to limits that are there.
///
/// # Errors
/// When a quantity does not parse.
pub fn pod_resources_with_overhead(pod: &Pod) -> Result<CpuMemory, QuantityError> {
    check(pod)?;
    Ok(CpuMemory::of(
        &core::pod_requests(pod),
        &core::pod_limits(pod),
    ))
}

/// Huge pages of a pod: page size and bytes; upstream's `HugePageLimits`.
///
/// # Errors
/// When a quantity does not parse.
pub fn pod_huge_pages(pod: &Pod) -> Result<BTreeMap<u64, u64>, QuantityError> {
    check(pod)?;
    Ok(huge_pages(&core::pod_requests(pod)))
}

/// Page size and bytes of each `hugepages-<size>`.
fn huge_pages(amounts: &core::Amounts) -> BTreeMap<u64, u64> {
    let bytes = |nano: i128| u64::try_from(to_i64(nano, NANO)).ok();
    let pages = amounts.iter().filter_map(|(name, nano)| {
        let size = quantity::nanos(name.strip_prefix("hugepages-")?).ok()?;
        Some((bytes(size)?, bytes(*nano)?))
    });
    pages.collect()
}

/// A page size as the kernel names its files, `2MB` or `1GB`; upstream's `HugePageUnitSizeFromByteSize`.
pub fn huge_page_name(bytes: u64) -> String {
    let mut size = bytes;
    let mut unit = 0;
    let units = ["B", "KB", "MB", "GB", "TB", "PB"];
    while size >= 1024 && unit + 1 < units.len() {
        size /= 1024;
        unit += 1;
    }
    format!("{size}{}", units[unit])
}

/// Every quantity of the pod parses; what sums them up takes that for granted.
fn check(pod: &Pod) -> Result<(), QuantityError> {
    let spec = pod.spec_ref();
    let containers = pod.init_containers().iter().chain(pod.containers());
    let resources = containers
        .filter_map(|c| c.resources.as_ref())
        .chain(&spec.resources);
    let lists = resources.flat_map(|r| r.limits.iter().chain(&r.requests));
    for quantity in lists.chain(&spec.overhead).flat_map(BTreeMap::values) {
        quantity::nanos(&quantity.0)?;
    }
    Ok(())
}

/// CPU shares of thousandths of a core; upstream's `MilliCPUToShares`.
pub fn milli_cpu_to_shares(milli: i64) -> u64 {
    let milli = u64::try_from(milli).unwrap_or(0);
    (milli.saturating_mul(1024) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// CFS quota in microseconds of thousandths of a core; 0 = unlimited. Upstream's `MilliCPUToQuota`.
pub fn milli_cpu_to_quota(milli: i64, period_us: u64) -> i64 {
    if milli <= 0 {
        return 0;
    }
    let period = i64::try_from(period_us).unwrap_or(i64::MAX);
    (milli.saturating_mul(period) / 1000).clamp(MIN_QUOTA_US, MAX_QUOTA_US)
}

/// `cpu.weight` (1–10000) of `cpu.shares`.
pub fn shares_to_weight(shares: u64) -> u64 {
    1 + (shares.clamp(MIN_SHARES, MAX_SHARES) - MIN_SHARES) * 9_999 / (MAX_SHARES - MIN_SHARES)
}

/// Returns the `oom_score_adj` of a container, the kernel's preference for killing it when memory runs out; upstream's
/// `GetContainerOOMScoreAdjust`. While the machine's memory is not known, no request is a part of it.
///
/// # Errors
/// When a quantity does not parse.
pub fn oom_score_adj(
    pod: &Pod,
    container: &Container,
    memory_capacity: Option<u64>,
) -> Result<i64, QuantityError> {
    let spec = pod.spec_ref();
    let critical = pod.is_static() || spec.priority.is_some_and(|p| p >= 2_000_000_000);
    if critical && spec.priority_class_name.as_deref() == Some(NODE_CRITICAL) {
        return Ok(GUARANTEED_OOM_ADJ);
    }
    Ok(match qos_class(pod) {
        QosClass::Guaranteed => GUARANTEED_OOM_ADJ,
        QosClass::BestEffort => BEST_EFFORT_OOM_ADJ,
        QosClass::Burstable => {
            let spare = spare_memory_of_each(pod)?;
            let score = |request: i64| {
                let request = i128::from(request.max(0)) + i128::from(spare);
                1_000 - 1_000 * request / i128::from(memory_capacity.unwrap_or(u64::MAX).max(1))
            };
            let request = container_resources(container)?.memory_request.unwrap_or(0);
            let mut adj = score(request);
            if is_sidecar_of(pod, container) {
                // Main containers cannot do without it: it is not killed before the one that asks least.
                let mut least = i64::MAX;
                for main in pod.containers() {
                    least = least.min(container_resources(main)?.memory_request.unwrap_or(0));
                }
                adj = adj.min(score(least));
            }
            i64::try_from(adj.clamp(3, 999)).unwrap_or(999)
        }
    })
}

fn is_sidecar_of(pod: &Pod, container: &Container) -> bool {
    let mut init = pod.init_containers().iter();
    init.any(|c| c.name == container.name && is_sidecar(c))
}

/// Returns each container's share of the memory that the pod requests beyond the requests of its containers; upstream's
/// `remainingPodMemReqPerContainer`.
fn spare_memory_of_each(pod: &Pod) -> Result<i64, QuantityError> {
    check(pod)?;
    let Some(whole) = core::pod_level_requests(pod).get("memory").copied() else {
        return Ok(0);
    };
    let own = core::aggregate(pod, core::container_requests);
    let own = to_i64(own.get("memory").copied().unwrap_or(0), NANO);
    let spare = to_i64(whole, NANO).saturating_sub(own).max(0);
    let count = pod.containers().len() + pod.init_containers().len();
    Ok(spare / i64::try_from(count.max(1)).unwrap_or(1))
}

/// The CRI message for CPU and memory; upstream's `calculateLinuxResources`.
pub fn linux_resources(of: CpuMemory, ctx: &NodeContext) -> v1::LinuxContainerResources {
    let shares = milli_cpu_to_shares(of.cpu_request.or(of.cpu_limit).unwrap_or(0));
    let mut resources = v1::LinuxContainerResources {
        cpu_shares: i64::try_from(shares).unwrap_or(i64::MAX),
        memory_limit_in_bytes: of.memory_limit.unwrap_or(0).max(0),
        ..Default::default()
    };
    if ctx.cpu_cfs_quota {
        resources.cpu_quota = milli_cpu_to_quota(of.cpu_limit.unwrap_or(0), ctx.cfs_period_us);
        resources.cpu_period = i64::try_from(ctx.cfs_period_us).unwrap_or(100_000);
    }
    resources
}

/// Takes the CFS quota off: CPUs that nobody else uses need none. Upstream: `DisableCPUQuotaWithExclusiveCPUs`.
pub fn lift_quota(resources: &mut v1::LinuxContainerResources) {
    if resources.cpu_period != 0 {
        resources.cpu_quota = -1;
    }
}

/// CPU, memory, swap and OOM settings of one container; upstream's
/// `generateLinuxContainerResources`.
///
/// # Errors
/// When a quantity does not parse.
pub fn container_linux_resources(
    pod: &Pod,
    container: &Container,
    ctx: &NodeContext,
) -> Result<v1::LinuxContainerResources, QuantityError> {
    let mut of = container_resources(container)?;
    let machine = ctx.machine.get();
    let swap = swap_limit(pod, of, &machine);
    // A container without a limit of its own is told its pod's.
    let whole = CpuMemory::of(&core::Amounts::new(), &core::pod_level_limits(pod));
    of.cpu_limit = of.cpu_limit.filter(|l| *l != 0).or(whole.cpu_limit);
    of.memory_limit = of.memory_limit.filter(|l| *l != 0).or(whole.memory_limit);
    let mut resources = linux_resources(of, ctx);
    resources.hugepage_limits = hugepage_limits(container, ctx);
    resources.oom_score_adj = oom_score_adj(pod, container, machine.memory())?;
    if ctx.cgroup_v2 {
        if !ctx.single_process_oom_kill {
            resources
                .unified
                .insert("memory.oom.group".to_owned(), "1".to_owned());
        }
        if ctx.swap_controller {
            resources
                .unified
                .insert("memory.swap.max".to_owned(), swap.to_string());
        }
        let bytes = |amount: Option<i64>| amount.and_then(|bytes| u64::try_from(bytes).ok());
        let request = bytes(of.memory_request).unwrap_or(0);
        let limit = bytes(of.memory_limit);
        let unified = memory_qos(qos_class(pod), request, limit, &machine.rules);
        resources.unified.extend(unified);
    } else if ctx.swap_controller {
        resources.memory_swap_limit_in_bytes = resources.memory_limit_in_bytes;
    }
    Ok(resources)
}

/// A limit for every page size the machine has, 0 where none is asked for; upstream's
/// `GetHugepageLimitsFromResources`.
fn hugepage_limits(container: &Container, ctx: &NodeContext) -> Vec<v1::HugepageLimit> {
    let wanted = huge_pages(&core::container_limits(container));
    let sizes = ctx.hugepage_sizes.iter();
    sizes
        .map(|size| v1::HugepageLimit {
            page_size: huge_page_name(*size),
            limit: wanted.get(size).copied().unwrap_or(0),
        })
        .collect()
}

/// Rules for memory of containers beside their limits, on cgroup v2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryRules {
    /// `memoryThrottlingFactor` in millionths; `None` for no throttling.
    pub throttling: Option<u32>,
    /// `memoryReservationPolicy: TieredReservation`.
    pub tiered: bool,
    /// Memory of all pods together in bytes.
    pub for_pods: u64,
    /// Size of a page in bytes.
    pub page: u64,
    /// Swap of the machine in bytes, when pods get a share of it: `LimitedSwap`.
    pub swap: Option<u64>,
}

/// `memory.min`, `memory.low` and `memory.high` of a container on cgroup v2, by upstream's MemoryQoS: requests of Guaranteed
/// and Burstable pods are protected, and a container that is not Guaranteed is throttled before it reaches its limit (without
/// one, what all pods may have). Amounts in bytes.
pub fn memory_qos(
    class: QosClass,
    request: u64,
    limit: Option<u64>,
    rules: &MemoryRules,
) -> BTreeMap<String, String> {
    let mut unified = BTreeMap::new();
    if rules.tiered && request > 0 {
        let file = match class {
            QosClass::Guaranteed => "memory.min",
            QosClass::Burstable | QosClass::BestEffort => "memory.low",
        };
        unified.insert(file.to_owned(), request.to_string());
    }
    let top = limit.filter(|l| *l > 0).unwrap_or(rules.for_pods);
    if let Some(millionths) = rules.throttling
        && class != QosClass::Guaranteed
        && limit != Some(request)
        && top > request
    {
        let spread = u128::from(top - request) * u128::from(millionths) / 1_000_000;
        let high = request.saturating_add(u64::try_from(spread).unwrap_or(u64::MAX));
        let page = rules.page.max(1);
        let high = high / page * page;
        if high > request {
            unified.insert("memory.high".to_owned(), high.to_string());
        }
    }
    unified
}

/// Bytes of swap that a container may use: the share of the machine's swap that its request is of the machine's memory.
/// Nothing unless its pod is Burstable and not critical, and its request differs from its limit. Upstream:
/// `calcSwapForBurstablePods` and `configureSwap`.
fn swap_limit(pod: &Pod, of: CpuMemory, machine: &MachineFacts) -> u64 {
    let (Some(swap), Some(memory)) = (machine.rules.swap, machine.memory()) else {
        return 0;
    };
    let is_critical =
        pod.is_static() || pod.spec_ref().priority.is_some_and(|p| p >= 2_000_000_000);
    if is_critical
        || qos_class(pod) != QosClass::Burstable
        || of.memory_request == of.memory_limit
        || memory == 0
    {
        return 0;
    }
    let request = of
        .memory_request
        .and_then(|bytes| u64::try_from(bytes).ok());
    let share = u128::from(request.unwrap_or(0)) * u128::from(swap) / u128::from(memory);
    u64::try_from(share).unwrap_or(swap).min(swap)
}

#[cfg(test)]
#[path = "resources_tests.rs"]
mod tests;

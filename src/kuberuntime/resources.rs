//! Arithmetic of resources: quantities, QoS classes, CPU shares and quotas, OOM scores.
//!
//! Comes in: a pod spec. Goes out: numbers for CRI messages and cgroups. Pure. A quantity that does not
//! parse is an error that names it, never zero.

use std::collections::BTreeMap;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::node_context::NodeContext;
pub use crate::core::pod_status::{QosClass, qos_class};
use crate::types::PodExt;
use crate::types::quantity;
pub use crate::types::quantity::QuantityError;

/// Least CPU shares (`cpu.shares`) a cgroup gets.
pub const MIN_SHARES: u64 = 2;
/// Most CPU shares a cgroup gets.
pub const MAX_SHARES: u64 = 262_144;
/// Least CFS quota, in microseconds.
pub const MIN_QUOTA_US: i64 = 1_000;

const GUARANTEED_OOM_ADJ: i64 = -997;
const BEST_EFFORT_OOM_ADJ: i64 = 1_000;
const NODE_CRITICAL: &str = "system-node-critical";

const NANO: i128 = 1_000_000_000;

fn ceil_to_i64(nano: i128, unit: i128) -> i64 {
    let value = nano.div_euclid(unit) + i128::from(nano.rem_euclid(unit) != 0);
    i64::try_from(value).unwrap_or(if value > 0 { i64::MAX } else { i64::MIN })
}

/// Whole units, rounded up; upstream's `Quantity.Value`.
///
/// # Errors
/// When it is not a quantity.
pub fn value(quantity: &Quantity) -> Result<i64, QuantityError> {
    quantity::nanos(&quantity.0).map(|nano| ceil_to_i64(nano, NANO))
}

/// Thousandths, rounded up; upstream's `Quantity.MilliValue`.
///
/// # Errors
/// When it is not a quantity.
pub fn milli_value(quantity: &Quantity) -> Result<i64, QuantityError> {
    quantity::nanos(&quantity.0).map(|nano| ceil_to_i64(nano, NANO / 1_000))
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

/// CPU and memory of a pod: the sums over its main containers. A limit is there only if every container
/// has one; upstream's `ResourceConfigForPod`.
///
/// # Errors
/// When a quantity does not parse.
pub fn pod_resources(pod: &Pod) -> Result<CpuMemory, QuantityError> {
    let mut sum = CpuMemory::default();
    let mut cpu_limited = true;
    let mut memory_limited = true;
    let add = |into: &mut Option<i64>, value: Option<i64>| {
        if let Some(value) = value {
            *into = Some(into.unwrap_or(0).saturating_add(value));
        }
    };
    for container in pod.containers() {
        let of = container_resources(container)?;
        add(&mut sum.cpu_request, of.cpu_request);
        add(&mut sum.memory_request, of.memory_request);
        add(&mut sum.cpu_limit, of.cpu_limit);
        add(&mut sum.memory_limit, of.memory_limit);
        cpu_limited &= of.cpu_limit.is_some_and(|l| l > 0);
        memory_limited &= of.memory_limit.is_some_and(|l| l > 0);
    }
    if !cpu_limited {
        sum.cpu_limit = None;
    }
    if !memory_limited {
        sum.memory_limit = None;
    }
    Ok(sum)
}

/// [`pod_resources`] and `spec.overhead`: added to the requests, and to limits that are there.
///
/// # Errors
/// When a quantity does not parse.
pub fn pod_resources_with_overhead(pod: &Pod) -> Result<CpuMemory, QuantityError> {
    let mut sum = pod_resources(pod)?;
    let Some(overhead) = &pod.spec_ref().overhead else {
        return Ok(sum);
    };
    if let Some(cpu) = overhead.get("cpu").map(milli_value).transpose()? {
        sum.cpu_request = Some(sum.cpu_request.unwrap_or(0).saturating_add(cpu));
        sum.cpu_limit = sum.cpu_limit.map(|limit| limit.saturating_add(cpu));
    }
    if let Some(memory) = overhead.get("memory").map(value).transpose()? {
        sum.memory_request = Some(sum.memory_request.unwrap_or(0).saturating_add(memory));
        sum.memory_limit = sum.memory_limit.map(|limit| limit.saturating_add(memory));
    }
    Ok(sum)
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
    (milli.saturating_mul(period) / 1000).max(MIN_QUOTA_US)
}

/// `cpu.weight` (1–10000) of `cpu.shares`.
pub fn shares_to_weight(shares: u64) -> u64 {
    1 + (shares.clamp(MIN_SHARES, MAX_SHARES) - MIN_SHARES) * 9_999 / (MAX_SHARES - MIN_SHARES)
}

/// How eagerly the kernel kills the container when memory runs out; upstream's
/// `GetContainerOOMScoreAdjust`.
///
/// # Errors
/// When a quantity does not parse.
pub fn oom_score_adj(
    pod: &Pod,
    container: &Container,
    memory_capacity: u64,
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
            let request = container_resources(container)?.memory_request.unwrap_or(0);
            let request = i128::from(request.max(0));
            let capacity = i128::from(memory_capacity.max(1));
            let adj = 1_000 - 1_000 * request / capacity;
            i64::try_from(adj.clamp(3, 999)).unwrap_or(999)
        }
    })
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

/// CPU, memory, swap and OOM settings of one container; upstream's
/// `generateLinuxContainerResources`. Swap is never given to containers (`NoSwap`).
///
/// # Errors
/// When a quantity does not parse.
pub fn container_linux_resources(
    pod: &Pod,
    container: &Container,
    ctx: &NodeContext,
) -> Result<v1::LinuxContainerResources, QuantityError> {
    let mut resources = linux_resources(container_resources(container)?, ctx);
    resources.oom_score_adj = oom_score_adj(pod, container, ctx.memory_capacity)?;
    if ctx.cgroup_v2 {
        if !ctx.single_process_oom_kill {
            resources
                .unified
                .insert("memory.oom.group".to_owned(), "1".to_owned());
        }
        if ctx.swap_controller {
            resources
                .unified
                .insert("memory.swap.max".to_owned(), "0".to_owned());
        }
    } else if ctx.swap_controller {
        resources.memory_swap_limit_in_bytes = resources.memory_limit_in_bytes;
    }
    Ok(resources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn q(text: &str) -> Quantity {
        Quantity(text.to_owned())
    }

    fn pod(containers: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "uid": "u"},
            "spec": {"containers": containers},
        }))
        .unwrap()
    }

    #[test]
    fn quantities_parse_like_the_api_servers() {
        for (text, milli) in [
            ("1", 1_000),
            ("100m", 100),
            ("0.5", 500),
            (".5", 500),
            ("1.", 1_000),
            ("1e3", 1_000_000),
            ("2E2", 200_000),
            ("1k", 1_000_000),
            ("1Ki", 1_024_000),
            ("1.5Gi", 1_610_612_736_000),
            ("100n", 1),
            ("-1", -1_000),
            ("12E", i64::MAX),
        ] {
            assert_eq!(milli_value(&q(text)), Ok(milli), "{text}");
        }
        assert_eq!(value(&q("100m")), Ok(1));
        assert_eq!(value(&q("64Mi")), Ok(67_108_864));
        for text in [
            "",
            "m",
            "1.2.3",
            "1x",
            "1e99",
            "0x10",
            "1 Gi",
            "999999999999999999999",
        ] {
            assert!(milli_value(&q(text)).is_err(), "{text} is accepted");
        }
    }

    #[test]
    fn shares_and_quota_stay_in_their_ranges() {
        assert_eq!(milli_cpu_to_shares(0), 2);
        assert_eq!(milli_cpu_to_shares(1), 2);
        assert_eq!(milli_cpu_to_shares(500), 512);
        assert_eq!(milli_cpu_to_shares(1_000_000_000), 262_144);
        assert_eq!(milli_cpu_to_quota(0, 100_000), 0);
        assert_eq!(milli_cpu_to_quota(1, 100_000), 1_000);
        assert_eq!(milli_cpu_to_quota(250, 100_000), 25_000);
        assert_eq!(shares_to_weight(2), 1);
        assert_eq!(shares_to_weight(1024), 39);
        assert_eq!(shares_to_weight(262_144), 10_000);
    }

    #[test]
    fn qos_class_follows_cpu_and_memory_of_every_container() {
        let full = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
        let same = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}});
        let less = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}});
        let other = json!({"limits": {"example.com/gpu": "1"}});
        let zero = json!({"requests": {"cpu": "0"}});
        let c =
            |name: &str, r: &serde_json::Value| json!({"name": name, "image": "i", "resources": r});
        for (containers, class) in [
            (json!([{"name": "a"}]), QosClass::BestEffort),
            (json!([c("a", &full)]), QosClass::Guaranteed),
            (json!([c("a", &full), c("b", &same)]), QosClass::Guaranteed),
            (json!([c("a", &full), {"name": "b"}]), QosClass::Burstable),
            (json!([c("a", &less)]), QosClass::Burstable),
            (json!([c("a", &other)]), QosClass::BestEffort),
            (json!([c("a", &zero)]), QosClass::BestEffort),
        ] {
            assert_eq!(qos_class(&pod(containers.clone())), class, "{containers}");
        }
    }

    #[test]
    fn oom_score_of_a_burstable_container_shrinks_with_its_request() {
        let gib = 1_u64 << 30;
        let with = |memory: &str| {
            pod(json!([{"name": "a", "resources": {"requests": {"memory": memory}}}]))
        };
        for (memory, adj) in [("1Gi", 900), ("1", 999), ("10Gi", 3), ("5Gi", 500)] {
            let pod = with(memory);
            assert_eq!(
                oom_score_adj(&pod, &pod.containers()[0], 10 * gib),
                Ok(adj),
                "{memory}"
            );
        }
        let none = pod(json!([{"name": "a"}]));
        assert_eq!(oom_score_adj(&none, &none.containers()[0], gib), Ok(1_000));
        let mut critical = none.clone();
        if let Some(spec) = critical.spec.as_mut() {
            spec.priority_class_name = Some("system-node-critical".to_owned());
            spec.priority = Some(2_000_001_000);
        }
        assert_eq!(
            oom_score_adj(&critical, &critical.containers()[0], gib),
            Ok(-997)
        );
    }

    #[test]
    fn pod_limits_count_only_when_every_container_has_one() {
        let p = pod(json!([
            {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}},
            {"name": "b", "resources": {"limits": {"memory": "2Mi"}, "requests": {"cpu": "100m"}}},
        ]));
        assert_eq!(
            pod_resources(&p),
            Ok(CpuMemory {
                cpu_request: Some(1_100),
                cpu_limit: None,
                memory_request: Some(3 << 20),
                memory_limit: Some(3 << 20),
            })
        );
    }

    #[test]
    fn overhead_adds_to_requests_and_to_limits_that_are_there() {
        let mut p = pod(json!([{"name": "a", "resources": {"limits": {"memory": "1Mi"}}}]));
        if let Some(spec) = p.spec.as_mut() {
            spec.overhead =
                serde_json::from_value(json!({"cpu": "100m", "memory": "1Mi"})).unwrap();
        }
        assert_eq!(
            pod_resources_with_overhead(&p),
            Ok(CpuMemory {
                cpu_request: Some(100),
                cpu_limit: None,
                memory_request: Some(2 << 20),
                memory_limit: Some(2 << 20),
            })
        );
        assert_eq!(pod_resources(&p).map(|r| r.memory_limit), Ok(Some(1 << 20)));
    }

    #[test]
    fn container_resources_become_a_cri_message() {
        let p =
            pod(json!([{"name": "a", "resources": {"limits": {"cpu": "250m", "memory": "64Mi"}}}]));
        let mut ctx = NodeContext::new("n", "/r");
        ctx.swap_controller = true;
        let r = container_linux_resources(&p, &p.containers()[0], &ctx).unwrap();
        assert_eq!(
            (r.cpu_shares, r.cpu_quota, r.cpu_period),
            (256, 25_000, 100_000)
        );
        assert_eq!(
            (r.memory_limit_in_bytes, r.memory_swap_limit_in_bytes),
            (64 << 20, 64 << 20)
        );
        assert_eq!(r.oom_score_adj, -997);
        assert!(r.unified.is_empty());
        ctx.cgroup_v2 = true;
        ctx.cpu_cfs_quota = false;
        let r = container_linux_resources(&p, &p.containers()[0], &ctx).unwrap();
        assert_eq!(
            (r.cpu_quota, r.cpu_period, r.memory_swap_limit_in_bytes),
            (0, 0, 0)
        );
        assert_eq!(
            r.unified.get("memory.oom.group").map(String::as_str),
            Some("1")
        );
        assert_eq!(
            r.unified.get("memory.swap.max").map(String::as_str),
            Some("0")
        );
    }
}

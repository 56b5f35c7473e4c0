//! Limits as files of cgroupfs: what a class gets, and how each version of cgroups spells it.

use std::collections::BTreeMap;

use super::{CgroupConfig, CgroupVersion, Limits, NO_MEMORY_LIMIT};
use crate::kuberuntime::resources::{self, QosClass};

/// What a pod's cgroup gets by its class; upstream's `ResourceConfigForPod`.
pub(super) fn pod_limits(
    class: QosClass,
    sum: resources::CpuMemory,
    config: &CgroupConfig,
) -> Limits {
    let shares = resources::milli_cpu_to_shares(sum.cpu_request.unwrap_or(0));
    let memory = sum.memory_limit.and_then(|m| u64::try_from(m).ok());
    let quota = sum.cpu_limit.map(|milli| {
        let quota = if config.cpu_cfs_quota {
            resources::milli_cpu_to_quota(milli, config.cfs_period_us)
        } else {
            -1
        };
        (quota, config.cfs_period_us)
    });
    match class {
        QosClass::BestEffort => Limits {
            shares: Some(resources::MIN_SHARES),
            ..Limits::default()
        },
        QosClass::Guaranteed | QosClass::Burstable => Limits {
            shares: Some(shares),
            quota,
            memory,
        },
    }
}

/// The most tasks a 64-bit Linux has; the kernel takes no greater number as a limit.
pub(super) const MAX_PIDS: u64 = 4_194_304;

/// The value of `pids.max`, which both versions have.
pub(super) fn pids_max(limit: Option<u64>) -> String {
    match limit {
        Some(limit) if limit <= MAX_PIDS => limit.to_string(),
        _ => "max".to_owned(),
    }
}

fn memory_value(memory: u64, unlimited: &str) -> String {
    if memory == NO_MEMORY_LIMIT {
        unlimited.to_owned()
    } else {
        memory.to_string()
    }
}

/// File and value for each size of huge pages.
pub(super) fn huge_page_settings(
    version: CgroupVersion,
    config: &CgroupConfig,
    pages: &BTreeMap<u64, u64>,
) -> Vec<(String, String)> {
    let end = match version {
        CgroupVersion::V1 { .. } => "limit_in_bytes",
        CgroupVersion::V2 => "max",
    };
    let sizes = config.hugepage_sizes.iter();
    sizes
        .map(|size| {
            let limit = pages.get(size).copied().unwrap_or(0);
            let name = resources::huge_page_name(*size);
            (format!("hugetlb.{name}.{end}"), limit.to_string())
        })
        .collect()
}

/// Controller, file and value of each limit.
pub(super) fn settings(
    version: CgroupVersion,
    limits: Limits,
) -> Vec<(&'static str, &'static str, String)> {
    let mut all = Vec::new();
    match version {
        CgroupVersion::V1 { .. } => {
            if let Some(shares) = limits.shares {
                all.push(("cpu", "cpu.shares", shares.to_string()));
            }
            if let Some((quota, period)) = limits.quota {
                all.push(("cpu", "cpu.cfs_period_us", period.to_string()));
                all.push(("cpu", "cpu.cfs_quota_us", quota.to_string()));
            }
            if let Some(memory) = limits.memory {
                let value = memory_value(memory, "-1");
                all.push(("memory", "memory.limit_in_bytes", value));
            }
        }
        CgroupVersion::V2 => {
            if let Some(shares) = limits.shares {
                let weight = resources::shares_to_weight(shares);
                all.push(("cpu", "cpu.weight", weight.to_string()));
            }
            if let Some((quota, period)) = limits.quota {
                let value = if quota < 0 {
                    format!("max {period}")
                } else {
                    format!("{quota} {period}")
                };
                all.push(("cpu", "cpu.max", value));
            }
            if let Some(memory) = limits.memory {
                all.push(("memory", "memory.max", memory_value(memory, "max")));
            }
        }
    }
    all
}

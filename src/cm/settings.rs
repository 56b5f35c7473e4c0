//! Limits as files of cgroupfs: what a class gets, and how each version of cgroups spells it.

use std::collections::BTreeMap;

use super::reserves::Protection;
use super::{CgroupConfig, CgroupVersion, Limits, NO_MEMORY_LIMIT, systemd};
use crate::kuberuntime::resources::{self, QosClass};

/// All that the agent wants of one cgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Whole {
    pub(super) limits: Limits,
    /// Processes and threads; the inner `None` lifts a limit, the outer one leaves it as it is.
    pub(super) pids: Option<Option<u64>>,
    /// Files and values for each size of huge pages.
    pub(super) huge_pages: Vec<(String, String)>,
    /// Memory that is kept from reclaim; `None` leaves it as it is.
    pub(super) protection: Option<Protection>,
    /// Names the first so many processors, so that systemd keeps the controller cpuset enabled.
    pub(super) cpus: Option<u32>,
}

/// One file of a cgroup as it is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) controller: &'static str,
    pub(super) file: String,
    pub(super) value: String,
    /// A kernel or a cgroup without this file has nothing to limit.
    pub(super) optional: bool,
}

impl Whole {
    /// Changes what `limits` names and leaves the rest.
    pub(super) fn merge(&mut self, limits: Limits) {
        let now = &mut self.limits;
        now.shares = limits.shares.or(now.shares);
        now.quota = limits.quota.or(now.quota);
        now.memory = limits.memory.or(now.memory);
    }

    /// The files that it comes to.
    pub(super) fn settings(&self, version: CgroupVersion) -> Vec<Setting> {
        let mut all: Vec<Setting> = settings(version, self.limits)
            .into_iter()
            .map(|(controller, file, value)| Setting {
                controller,
                file: file.to_owned(),
                value,
                optional: false,
            })
            .collect();
        if let Some(limit) = self.pids {
            all.push(Setting {
                controller: "pids",
                file: "pids.max".to_owned(),
                value: pids_max(limit),
                // Without a limit it does not matter whether the controller is enabled here.
                optional: limit.is_none(),
            });
        }
        if let (CgroupVersion::V2, Some(protection)) = (version, self.protection) {
            for (file, bytes) in [
                ("memory.min", protection.min),
                ("memory.low", protection.low),
            ] {
                all.push(Setting {
                    controller: "memory",
                    file: file.to_owned(),
                    value: bytes.to_string(),
                    optional: bytes == 0,
                });
            }
        }
        all.extend(self.huge_pages.iter().map(|(file, value)| Setting {
            controller: "hugetlb",
            file: file.clone(),
            value: value.clone(),
            optional: true,
        }));
        all
    }
}

/// Comparison of a file's value with the wanted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The kernel shows what was written, in its own words.
    Same,
    /// A quota as systemd can keep it: in whole percents of a processor.
    Rounded,
    /// Somebody else wrote it.
    Other,
}

/// Compares. `page` is the size of a page in bytes. The kernel rounds memory down to pages, and takes all from its greatest
/// number of pages on for no limit; version 1 shows that as this number.
pub(super) fn compare(file: &str, found: &str, wanted: &str, page: u64) -> Comparison {
    if found == wanted {
        return Comparison::Same;
    }
    let unit = match file {
        "memory.max" | "memory.min" | "memory.low" | "memory.limit_in_bytes" => Some(page),
        other => huge_page_size(other),
    };
    let is_same = unit.is_some_and(|unit| {
        let pages = |text: &str| pages(text, unit);
        pages(found).is_some() && pages(found) == pages(wanted)
    });
    if is_same {
        return Comparison::Same;
    }
    if file == "cpu.max" && quota(found).is_some() && quota(found) == quota(wanted).map(rounded) {
        return Comparison::Rounded;
    }
    Comparison::Other
}

/// Returns the size of the huge pages that a file limits: 2 MiB of `hugetlb.2MB.max`.
fn huge_page_size(file: &str) -> Option<u64> {
    let name = file.strip_prefix("hugetlb.")?.split('.').next()?;
    let digits = name.trim_end_matches(|c: char| c.is_ascii_uppercase());
    let shift = match &name[digits.len()..] {
        "KB" => 10,
        "MB" => 20,
        "GB" => 30,
        _ => return None,
    };
    let size: u64 = digits.parse().ok()?;
    size.checked_shl(shift).filter(|size| *size > 0)
}

/// Pages that the kernel counts for an amount of memory. Its greatest number is `PAGE_COUNTER_MAX`.
fn pages(text: &str, page: u64) -> Option<u64> {
    let most = i64::MAX.cast_unsigned() / page.max(1);
    match text {
        "max" | "-1" => Some(most),
        bytes => Some((bytes.parse::<u64>().ok()? / page.max(1)).min(most)),
    }
}

fn quota(text: &str) -> Option<(u64, u64)> {
    let (quota, period) = text.split_once(' ')?;
    Some((quota.parse().ok()?, period.parse().ok()?))
}

fn rounded((quota, period): (u64, u64)) -> (u64, u64) {
    let per_second = systemd::quota_per_second(i64::try_from(quota).unwrap_or(i64::MAX), period);
    (per_second.saturating_mul(period) / 1_000_000, period)
}

/// Returns the limits for a pod's cgroup by the pod's class; upstream's `ResourceConfigForPod`.
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

/// File and value for each size of huge pages of a pod: sizes that it asks nothing of are limited to 0.
pub(super) fn huge_page_settings(
    version: CgroupVersion,
    config: &CgroupConfig,
    pages: &BTreeMap<u64, u64>,
) -> Vec<(String, String)> {
    huge_page_files(version, config, |size| {
        Some(pages.get(&size).copied().unwrap_or(0))
    })
}

/// File and value for each size of huge pages of several pods: sizes without a limit are not limited.
pub(super) fn shared_huge_page_settings(
    version: CgroupVersion,
    config: &CgroupConfig,
    limits: &BTreeMap<u64, u64>,
) -> Vec<(String, String)> {
    huge_page_files(version, config, |size| limits.get(&size).copied())
}

fn huge_page_files(
    version: CgroupVersion,
    config: &CgroupConfig,
    limit_of: impl Fn(u64) -> Option<u64>,
) -> Vec<(String, String)> {
    let (end, unlimited) = match version {
        CgroupVersion::V1 { .. } => ("limit_in_bytes", "-1"),
        CgroupVersion::V2 => ("max", "max"),
    };
    let sizes = config.hugepage_sizes.iter();
    sizes
        .map(|size| {
            let limit = limit_of(*size).map(|limit| limit.to_string());
            let name = resources::huge_page_name(*size);
            let value = limit.unwrap_or_else(|| unlimited.to_owned());
            (format!("hugetlb.{name}.{end}"), value)
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

//! Figures of one cgroup, of either version.

mod disks;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::model::{Cpu, DiskIo, Memory, Pressure, Psi, PsiLine, Swap, Throttling, Usage};
use super::proc::ticks_to_ns;

/// The cgroup below that of a container in which crun puts its processes. Upstream: `run.oci.systemd.subgroup` of crun.
const OF_CRUN: &str = "container";
/// cgroup v1 says "no limit" with the greatest multiple of the page size.
const V1_UNLIMITED: u64 = 1 << 62;

/// Mount points of the hierarchies.
#[derive(Clone, Debug, Default)]
pub struct Hierarchies {
    /// The unified hierarchy is the only one.
    pub v2: bool,
    /// Mount points with their controllers.
    pub mounts: Vec<(PathBuf, BTreeSet<String>)>,
}

impl Hierarchies {
    /// The directory of `cgroup` where `controller` keeps its files.
    pub fn dir(&self, controller: &str, cgroup: &str) -> Option<PathBuf> {
        let (mount, _) =
            (self.mounts.iter()).find(|(_, has)| self.v2 || has.contains(controller))?;
        Some(mount.join(cgroup.trim_start_matches('/')))
    }

    /// Names of the cgroups in `cgroup`; none when it is not there.
    pub fn children(&self, cgroup: &str) -> Vec<String> {
        let Some(entries) = (self.dir("memory", cgroup)).and_then(|dir| fs::read_dir(dir).ok())
        else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    }

    /// Processes in `cgroup` itself, where crun puts those of a container one level deeper.
    pub fn processes(&self, cgroup: &str) -> Vec<u32> {
        let text = (self.dir("memory", cgroup)).and_then(|dir| processes_in(&dir));
        let text = text.unwrap_or_default();
        // 0 is a process of another PID namespace.
        text.lines()
            .filter_map(|line| line.trim().parse().ok())
            .filter(|pid| *pid != 0)
            .collect()
    }

    /// Returns the usage of `cgroup`; `None` when it does not exist. `full` reads more than CPU, memory and swap.
    /// Blocking, for some system calls.
    pub fn read(&self, cgroup: &str, at_ms: i64, full: bool) -> Option<Usage> {
        let mut usage = if self.v2 {
            self.read_v2(cgroup, full)
        } else {
            self.read_v1(cgroup, full)
        };
        if usage.cpu.is_none() && usage.memory.is_none() {
            return None;
        }
        usage.at_ms = at_ms;
        Some(usage)
    }

    /// Swap in bytes that the root cgroup of version 1 is charged for; `None` on version 2, which charges nothing to
    /// it, and without a memory controller. Blocking, for two system calls. Upstream: `setMemoryStats` of cAdvisor.
    pub fn swap_of_root(&self) -> Option<u64> {
        if self.v2 {
            return None;
        }
        let dir = self.dir("memory", "/")?;
        let stat = Flat::read(&dir, "memory.stat")?;
        let of_all = number(&dir, "memory.use_hierarchy") == Some(1);
        let key = if of_all { "total_swap" } else { "swap" };
        // A kernel that does not account swap has neither.
        Some(stat.get(key).unwrap_or(0))
    }

    /// Returns the reads and writes of `cgroup` and those below it, by disk; empty when the kernel keeps no account.
    /// Blocking, for some system calls. Upstream: `statIo` and `BlkioGroup.GetStats` of the library that cAdvisor reads
    /// cgroups with.
    pub(super) fn disks(&self, cgroup: &str) -> Vec<DiskIo> {
        let Some(dir) = self.dir("blkio", cgroup) else {
            return Vec::new();
        };
        if self.v2 {
            text(&dir, "io.stat").map_or_else(Vec::new, |text| disks::io_stat(&text))
        } else {
            disks::blkio(|file| text(&dir, file))
        }
    }

    fn read_v1(&self, cgroup: &str, full: bool) -> Usage {
        let mut usage = Usage::default();
        if let Some(dir) = self.dir("cpuacct", cgroup)
            && let Some(total_ns) = number(&dir, "cpuacct.usage")
        {
            let mut cpu = Cpu {
                total_ns,
                ..Cpu::default()
            };
            if full && let Some(stat) = Flat::read(&dir, "cpuacct.stat") {
                cpu.user_ns = stat.get("user").map(ticks_to_ns);
                cpu.system_ns = stat.get("system").map(ticks_to_ns);
            }
            usage.cpu = Some(cpu);
        }
        if let Some(dir) = self.dir("memory", cgroup) {
            self.memory_v1(&dir, full, &mut usage);
        }
        if !full {
            return usage;
        }
        if let Some(dir) = self.dir("cpu", cgroup) {
            usage.limits.cpu_shares = number(&dir, "cpu.shares");
            usage.limits.cpu_period_us = number(&dir, "cpu.cfs_period_us");
            // Below zero for no quota.
            usage.limits.cpu_quota_us = number(&dir, "cpu.cfs_quota_us");
            let stat = Flat::read(&dir, "cpu.stat").unwrap_or_default();
            if let (Some(cpu), Some(_)) = (&mut usage.cpu, usage.limits.cpu_quota_us) {
                cpu.throttling = Some(Throttling {
                    periods: stat.get("nr_periods").unwrap_or(0),
                    throttled: stat.get("nr_throttled").unwrap_or(0),
                    throttled_ns: stat.get("throttled_time").unwrap_or(0),
                });
            }
        }
        self.pids(cgroup, &mut usage);
        usage.disks = self.disks(cgroup);
        usage
    }

    fn memory_v1(&self, dir: &Path, full: bool, usage: &mut Usage) {
        let Some(bytes) = number(dir, "memory.usage_in_bytes") else {
            return;
        };
        let stat = Flat::read(dir, "memory.stat").unwrap_or_default();
        let inactive = stat.get("total_inactive_file").unwrap_or(0);
        let limit = number(dir, "memory.limit_in_bytes").filter(|limit| *limit < V1_UNLIMITED);
        let mut memory = Memory {
            usage: Some(bytes),
            working_set: Some(bytes.saturating_sub(inactive)),
            rss: stat.get("total_rss"),
            page_faults: stat.get("total_pgfault"),
            major_page_faults: stat.get("total_pgmajfault"),
            ..Memory::default()
        };
        usage.limits.memory = limit;
        if let Some(swap) = stat.get("total_swap") {
            let both = number(dir, "memory.memsw.limit_in_bytes");
            let both = both.filter(|limit| *limit < V1_UNLIMITED);
            usage.swap = Some(Swap {
                usage: swap,
                limit: both.map(|both| both.saturating_sub(limit.unwrap_or(0))),
            });
        }
        if full {
            memory.cache = stat.get("total_cache");
            memory.mapped_file = stat.get("total_mapped_file");
            memory.kernel = number(dir, "memory.kmem.usage_in_bytes");
            memory.max_usage = number(dir, "memory.max_usage_in_bytes");
            memory.failcnt = number(dir, "memory.failcnt");
            memory.oom_kills =
                Flat::read(dir, "memory.oom_control").and_then(|f| f.get("oom_kill"));
        }
        usage.memory = Some(memory);
    }

    fn read_v2(&self, cgroup: &str, full: bool) -> Usage {
        let mut usage = Usage::default();
        let Some(dir) = self.dir("memory", cgroup) else {
            return usage;
        };
        if let Some(stat) = Flat::read(&dir, "cpu.stat")
            && let Some(total) = stat.get("usage_usec")
        {
            let ns = |us: u64| us.saturating_mul(1000);
            usage.cpu = Some(Cpu {
                total_ns: ns(total),
                user_ns: stat.get("user_usec").map(ns),
                system_ns: stat.get("system_usec").map(ns),
                nano_cores: None,
                throttling: None,
            });
            if full {
                self.cpu_limits_v2(&dir, &stat, &mut usage);
            }
        }
        memory_v2(&dir, full, &mut usage);
        if full {
            usage.pressure = Pressure {
                cpu: text(&dir, "cpu.pressure").and_then(|t| psi(&t)),
                memory: text(&dir, "memory.pressure").and_then(|t| psi(&t)),
                io: text(&dir, "io.pressure").and_then(|t| psi(&t)),
            };
            self.pids(cgroup, &mut usage);
            usage.disks = self.disks(cgroup);
        }
        usage
    }

    fn cpu_limits_v2(&self, dir: &Path, stat: &Flat, usage: &mut Usage) {
        usage.limits.cpu_shares = number(dir, "cpu.weight").map(weight_to_shares);
        let Some(max) = text(dir, "cpu.max") else {
            return;
        };
        let mut words = max.split_whitespace();
        usage.limits.cpu_quota_us = words.next().and_then(|word| word.parse().ok());
        usage.limits.cpu_period_us = words.next().and_then(|word| word.parse().ok());
        if let (Some(cpu), Some(_)) = (&mut usage.cpu, usage.limits.cpu_quota_us) {
            cpu.throttling = Some(Throttling {
                periods: stat.get("nr_periods").unwrap_or(0),
                throttled: stat.get("nr_throttled").unwrap_or(0),
                throttled_ns: stat.get("throttled_usec").unwrap_or(0).saturating_mul(1000),
            });
        }
    }

    fn pids(&self, cgroup: &str, usage: &mut Usage) {
        if let Some(dir) = self.dir("pids", cgroup) {
            usage.threads = number(&dir, "pids.current");
            usage.threads_max = number(&dir, "pids.max");
            let text = processes_in(&dir);
            usage.processes = text.and_then(|t| u64::try_from(t.lines().count()).ok());
        }
    }
}

/// Returns the lines of `cgroup.procs` of a cgroup, with those that crun has put below it. `None` when there is no such file.
fn processes_in(dir: &Path) -> Option<String> {
    let mut own = text(dir, "cgroup.procs")?;
    if own.trim().is_empty() {
        own.push_str(&text(&dir.join(OF_CRUN), "cgroup.procs").unwrap_or_default());
    }
    Some(own)
}

fn memory_v2(dir: &Path, full: bool, usage: &mut Usage) {
    let Some(bytes) = number(dir, "memory.current") else {
        return;
    };
    let stat = Flat::read(dir, "memory.stat").unwrap_or_default();
    let inactive = stat.get("inactive_file").unwrap_or(0);
    let mut memory = Memory {
        usage: Some(bytes),
        working_set: Some(bytes.saturating_sub(inactive)),
        rss: stat.get("anon"),
        page_faults: stat.get("pgfault"),
        major_page_faults: stat.get("pgmajfault"),
        ..Memory::default()
    };
    usage.limits.memory = number(dir, "memory.max");
    if let Some(swap) = number(dir, "memory.swap.current") {
        usage.swap = Some(Swap {
            usage: swap,
            limit: number(dir, "memory.swap.max"),
        });
    }
    if full {
        memory.cache = stat.get("file");
        memory.mapped_file = stat.get("file_mapped");
        memory.kernel = stat.get("kernel");
        memory.max_usage = number(dir, "memory.peak");
        if let Some(events) = Flat::read(dir, "memory.events") {
            memory.failcnt = events.get("max");
            memory.oom_kills = events.get("oom_kill");
        }
    }
    usage.memory = Some(memory);
}

/// The shares that runtimes turn into this weight.
fn weight_to_shares(weight: u64) -> u64 {
    2 + weight.saturating_sub(1).saturating_mul(262_142) / 9999
}

fn text(dir: &Path, file: &str) -> Option<String> {
    fs::read_to_string(dir.join(file)).ok()
}

/// A file that holds one number; `None` for `max` as well.
fn number(dir: &Path, file: &str) -> Option<u64> {
    text(dir, file)?.trim().parse().ok()
}

/// A file of lines `key value`.
#[derive(Clone, Debug, Default)]
struct Flat(String);

impl Flat {
    fn read(dir: &Path, file: &str) -> Option<Self> {
        text(dir, file).map(Self)
    }

    fn get(&self, key: &str) -> Option<u64> {
        self.0.lines().find_map(|line| {
            let value = line.strip_prefix(key)?.strip_prefix(' ')?;
            value.trim().parse().ok()
        })
    }
}

/// A pressure file; `None` when the kernel does not keep account.
pub(super) fn psi(text: &str) -> Option<Psi> {
    let line = |kind: &str| -> Option<PsiLine> {
        let line = text.lines().find_map(|l| l.strip_prefix(kind))?;
        let mut read = PsiLine::default();
        for pair in line.split_whitespace() {
            let (key, value) = pair.split_once('=')?;
            match key {
                "avg10" => read.avg10 = value.parse().ok()?,
                "avg60" => read.avg60 = value.parse().ok()?,
                "avg300" => read.avg300 = value.parse().ok()?,
                "total" => read.total_us = value.parse().ok()?,
                _ => {}
            }
        }
        Some(read)
    };
    Some(Psi {
        some: line("some ")?,
        // Old kernels have no such line for processors.
        full: line("full ").unwrap_or_default(),
    })
}

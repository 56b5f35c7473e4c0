//! Limits beside the pods' own: the cgroups of the system's and of Kubernetes' own processes, amounts that each class
//! of pods keeps from the others, and memory that is kept from reclaim.

use std::fs;
use std::path::{Path, PathBuf};

use super::fs::{self as cgroupfs, Hierarchy};
use super::settings::{Comparison, Whole, compare};
use super::systemd::{self, Property};
use super::{
    CLASSES, CgroupDriver, CgroupError, CgroupManager, CgroupName, CgroupVersion, Limits,
    NO_MEMORY_LIMIT,
};
use crate::kuberuntime::resources::{self, CpuMemory, QosClass};

/// Memory in bytes that is kept from reclaim (cgroup v2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protection {
    /// `memory.min`: never taken.
    pub min: u64,
    /// `memory.low`: taken last.
    pub low: u64,
}

/// A cgroup that is not the pods', and what it is held to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// The field that names the cgroup.
    pub field: &'static str,
    /// The cgroup, as given.
    pub cgroup: String,
    /// Of CPU and memory.
    pub limits: Limits,
    /// Of processes and threads; `None` leaves it as it is.
    pub pids: Option<u64>,
}

/// Memory requests of pods by class, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Requests {
    pub(super) guaranteed: u64,
    pub(super) burstable: u64,
}

impl Requests {
    pub(super) fn add(&mut self, class: QosClass, sum: CpuMemory) {
        let bytes = sum.memory_request.and_then(|m| u64::try_from(m).ok());
        let bytes = bytes.unwrap_or(0);
        match class {
            QosClass::Guaranteed => self.guaranteed = self.guaranteed.saturating_add(bytes),
            QosClass::Burstable => self.burstable = self.burstable.saturating_add(bytes),
            QosClass::BestEffort => {}
        }
    }

    /// Memory limits of the classes Burstable and BestEffort, when `percent` of what better classes request is kept from
    /// each. Upstream: `setMemoryReserve`.
    pub(super) fn memory_limits(self, for_pods: u64, percent: u8) -> (u64, u64) {
        let share = |bytes: u64| {
            let share = u128::from(bytes) * u128::from(percent) / 100;
            u64::try_from(share).unwrap_or(u64::MAX)
        };
        let burstable = for_pods.saturating_sub(share(self.guaranteed));
        (burstable, burstable.saturating_sub(share(self.burstable)))
    }

    /// Protection of all pods together, and of the class Burstable: what is below is protected only as far as what is above.
    pub(super) fn protection(self) -> (Protection, Protection) {
        let low = self.burstable;
        let all = Protection {
            min: self.guaranteed,
            low,
        };
        (all, Protection { min: 0, low })
    }
}

/// Protection of one pod: its request.
pub(super) fn pod_protection(class: QosClass, sum: CpuMemory) -> Protection {
    let request = sum.memory_request.and_then(|m| u64::try_from(m).ok());
    let request = request.unwrap_or(0);
    match class {
        QosClass::Guaranteed => Protection {
            min: request,
            low: 0,
        },
        QosClass::Burstable => Protection {
            min: 0,
            low: request,
        },
        QosClass::BestEffort => Protection::default(),
    }
}

/// A cgroup that a setting names: its path below each mount point and, with the systemd driver, its unit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Named {
    path: String,
    unit: Option<String>,
}

/// Finds the path of a cgroup that a setting names. With the systemd driver the last part counts, as upstream: a unit, or
/// the name of a slice without its ending. A service that is named without its slice is in `system.slice`.
fn named(driver: CgroupDriver, given: &str) -> Named {
    let parsed = CgroupName::parse(given);
    if driver == CgroupDriver::Cgroupfs {
        return Named {
            path: parsed.cgroupfs(),
            unit: None,
        };
    }
    let path = parsed.cgroupfs();
    let last = path.rsplit('/').next().unwrap_or_default().to_owned();
    if let Some(stem) = last.strip_suffix(".slice") {
        let levels = stem
            .split('-')
            .fold(CgroupName::parse("/"), |name, level| name.child(level));
        return Named {
            path: levels.systemd(),
            unit: Some(last),
        };
    }
    if last.ends_with(".service") || last.ends_with(".scope") {
        let is_bare = !path.trim_start_matches('/').contains('/');
        return Named {
            path: if is_bare {
                format!("/system.slice/{last}")
            } else {
                path
            },
            unit: Some(last),
        };
    }
    Named {
        path: parsed.systemd(),
        unit: Some(parsed.slice()),
    }
}

/// The properties of a unit that these limits come to; nothing that is not limited.
fn some_properties(version: CgroupVersion, whole: &Whole) -> Vec<(&'static str, Property)> {
    let limits = whole.limits;
    let wanted = |name: &str| match name {
        "CPUWeight" | "CPUShares" => limits.shares.is_some(),
        "MemoryMax" | "MemoryLimit" => limits.memory.is_some(),
        "TasksMax" => whole.pids.is_some(),
        "MemoryMin" | "MemoryLow" => whole.protection.is_some(),
        _ => false,
    };
    let mut all = systemd::properties(version, whole);
    all.retain(|(name, _)| wanted(name));
    all
}

impl CgroupManager {
    /// Holds a cgroup that is not the pods' to what is reserved for it. Upstream: `enforceExistingCgroup`.
    ///
    /// # Errors
    /// `Missing` when it does not exist, `OfPods` when the pods are in it or it is one of theirs, `AboveLimit` when it uses more memory than it is to have, else what the kernel or
    /// systemd refuses.
    pub fn enforce(&self, reserve: &Reserve) -> Result<(), CgroupError> {
        let named = named(self.config.driver, &reserve.cgroup);
        let pods = self.pods_path();
        if lies_in(&pods, &named.path) || lies_in(&named.path, &pods) {
            return Err(of_pods(reserve.field, named.path));
        }
        let whole = Whole {
            limits: reserve.limits,
            pids: reserve.pids.map(Some),
            ..Whole::default()
        };
        let settings = whole.settings(self.version);
        let concerned: Vec<&Hierarchy> = self
            .managed()
            .filter(|h| settings.iter().any(|s| h.has(s.controller)))
            .collect();
        for hierarchy in &concerned {
            if !below(hierarchy, &named.path).is_dir() {
                return Err(missing(reserve.field, &named.path));
            }
        }
        if let Some(limit) = reserve.limits.memory {
            let used = self.memory_used(&named.path).unwrap_or(0);
            if used > limit {
                return Err(CgroupError::AboveLimit {
                    path: named.path,
                    used,
                    limit,
                });
            }
        }
        if let (Some(systemd), Some(unit)) = (&self.systemd, &named.unit)
            && !self.has_all(&concerned, &named.path, &whole)
        {
            systemd
                .set_some(unit, &some_properties(self.version, &whole))
                .map_err(|source| CgroupError::Systemd {
                    path: named.path.clone(),
                    source: Box::new(source),
                })?;
        }
        for hierarchy in concerned {
            let dir = below(hierarchy, &named.path);
            let of_it = || settings.iter().filter(|s| hierarchy.has(s.controller));
            // Controllers of others are enabled only where one is needed.
            if of_it().any(|setting| !dir.join(&setting.file).exists()) {
                cgroupfs::make(&hierarchy.path, &dir, self.version)?;
            }
            for setting in of_it() {
                cgroupfs::set(&dir.join(&setting.file), &setting.value)?;
            }
        }
        Ok(())
    }

    fn has_all(&self, hierarchies: &[&Hierarchy], path: &str, whole: &Whole) -> bool {
        let settings = whole.settings(self.version);
        hierarchies.iter().all(|hierarchy| {
            let mut of = settings.iter().filter(|s| hierarchy.has(s.controller));
            of.all(|setting| {
                let file = below(hierarchy, path).join(&setting.file);
                fs::read_to_string(file).is_ok_and(|found| {
                    compare(
                        &setting.file,
                        found.trim(),
                        &setting.value,
                        procfs::page_size(),
                    ) == Comparison::Same
                })
            })
        })
    }

    /// Moves processes into a cgroup that a setting names, except those that are in it already or have ended. With the driver
    /// cgroupfs it is made. Returns how many were moved.
    ///
    /// # Errors
    /// `Missing` when systemd has to make it, `OfPods` when it is one of the pods', else what the kernel refuses.
    pub fn move_into(
        &self,
        field: &'static str,
        cgroup: &str,
        pids: &[i32],
    ) -> Result<usize, CgroupError> {
        let path = named(self.config.driver, cgroup).path;
        if lies_in(&path, &self.pods_path()) {
            return Err(of_pods(field, path));
        }
        let mut moved = 0;
        for hierarchy in self.managed() {
            let dir = below(hierarchy, &path);
            match self.config.driver {
                _ if dir.is_dir() => {}
                CgroupDriver::Cgroupfs => cgroupfs::make(&hierarchy.path, &dir, self.version)?,
                CgroupDriver::Systemd => return Err(missing(field, &path)),
            }
            let file = dir.join("cgroup.procs");
            let inside =
                fs::read_to_string(&file).map_err(CgroupError::io("read processes of", &dir))?;
            let is_inside = |pid: &i32| inside.lines().any(|line| line.trim() == pid.to_string());
            for pid in pids.iter().filter(|pid| !is_inside(pid)) {
                let written =
                    fs::OpenOptions::new()
                        .write(true)
                        .open(&file)
                        .and_then(|mut file| {
                            std::io::Write::write_all(&mut file, pid.to_string().as_bytes())
                        });
                match written {
                    Ok(()) => moved += 1,
                    // It has ended.
                    Err(e) if e.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32) => {}
                    Err(e) => return Err(CgroupError::io("move a process into", &dir)(e)),
                }
            }
        }
        Ok(moved)
    }

    /// The processes in the root cgroup: all but PID 1 and those of the kernel.
    ///
    /// # Errors
    /// When the root cgroup cannot be read.
    pub fn root_processes(&self) -> Result<Vec<i32>, CgroupError> {
        let Some(hierarchy) = self.managed().next() else {
            return Ok(Vec::new());
        };
        let file = hierarchy.path.join("cgroup.procs");
        let text = fs::read_to_string(&file)
            .map_err(CgroupError::io("read processes of", &hierarchy.path))?;
        let pids = text.lines().filter_map(|line| line.trim().parse().ok());
        // Threads of the kernel run no program.
        let runs = |pid: &i32| fs::read_link(format!("/proc/{pid}/exe")).is_ok();
        Ok(pids.filter(|pid| *pid > 1).filter(runs).collect())
    }

    /// Memory that the cgroup at a path uses, in bytes, without files that the kernel forgets at once when it is short.
    pub(super) fn memory_used(&self, path: &str) -> Option<u64> {
        let memory = self.hierarchies.iter().find(|h| h.has("memory"))?;
        let (file, inactive) = match self.version {
            CgroupVersion::V1 { .. } => ("memory.usage_in_bytes", "total_inactive_file "),
            CgroupVersion::V2 => ("memory.current", "inactive_file "),
        };
        let dir = below(memory, path);
        let used: u64 = fs::read_to_string(dir.join(file))
            .ok()?
            .trim()
            .parse()
            .ok()?;
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let files = stat.lines().find_map(|line| line.strip_prefix(inactive));
        let files = files
            .and_then(|bytes| bytes.trim().parse().ok())
            .unwrap_or(0);
        Some(used.saturating_sub(files))
    }

    /// Sets what the classes of pods get of memory by the requests of all: limits by `qosReserved`, protection by
    /// `memoryReservationPolicy`.
    pub(super) fn share_memory(&self, requests: Requests) -> Result<(), CgroupError> {
        if self.config.tiered {
            let (all, burstable) = requests.protection();
            self.make(&self.top, |whole| whole.protection = Some(all))?;
            self.make(&self.qos(QosClass::Burstable), |whole| {
                whole.protection = Some(burstable);
            })?;
        }
        let (Some(percent), Some(for_pods)) =
            (self.config.qos_reserved_memory, self.memory_for_pods())
        else {
            return Ok(());
        };
        let (burstable, best_effort) = requests.memory_limits(for_pods, percent);
        for (class, limit) in [
            (QosClass::Burstable, burstable),
            (QosClass::BestEffort, best_effort),
        ] {
            let name = self.qos(class);
            // A limit below what is used would have the kernel end containers.
            let used = self.memory_used(&self.path(&name)).unwrap_or(0);
            let limits = Limits {
                memory: Some(limit.max(used)),
                ..Limits::default()
            };
            self.make(&name, |whole| whole.merge(limits))?;
        }
        Ok(())
    }

    /// Takes back what an earlier configuration had set of memory: protection of pods and classes, and limits of classes.
    pub(super) fn unshare_memory(&self) -> Result<(), CgroupError> {
        let Some(memory) = self.hierarchies.iter().find(|h| h.has("memory")) else {
            return Ok(());
        };
        if !self.config.tiered && self.version == CgroupVersion::V2 {
            let mut names = vec![self.top.clone()];
            names.extend([QosClass::Burstable, QosClass::BestEffort].map(|class| self.qos(class)));
            for class in CLASSES {
                let parent = self.qos(class);
                for child in cgroupfs::children(&self.dir(memory, &parent))? {
                    let child = child.to_string_lossy();
                    if let Some(uid) = parent.pod_of_child(&child, self.config.driver) {
                        names.push(parent.child(&format!("pod{uid}")));
                    }
                }
            }
            for name in names {
                self.unprotect(&self.dir(memory, &name), &name)?;
            }
        }
        if self.config.qos_reserved_memory.is_none() {
            self.lift_limits(memory)?;
        }
        Ok(())
    }

    fn unprotect(&self, dir: &Path, name: &CgroupName) -> Result<(), CgroupError> {
        let files = ["memory.min", "memory.low"].map(|file| dir.join(file));
        let is_set = |file: &PathBuf| fs::read_to_string(file).is_ok_and(|v| v.trim() != "0");
        if !files.iter().any(is_set) {
            return Ok(());
        }
        let none = Whole {
            protection: Some(Protection::default()),
            ..Whole::default()
        };
        if let Some(systemd) = &self.systemd {
            systemd
                .set_some(&name.slice(), &some_properties(self.version, &none))
                .map_err(self.of_systemd(name))?;
        }
        files.iter().try_for_each(|file| cgroupfs::set(file, "0"))
    }

    fn lift_limits(&self, memory: &Hierarchy) -> Result<(), CgroupError> {
        let unlimited = Limits {
            memory: Some(NO_MEMORY_LIMIT),
            ..Limits::default()
        };
        let whole = Whole {
            limits: unlimited,
            ..Whole::default()
        };
        for name in [QosClass::Burstable, QosClass::BestEffort].map(|class| self.qos(class)) {
            let dir = self.dir(memory, &name);
            let is_limited = whole.settings(self.version).iter().any(|setting| {
                fs::read_to_string(dir.join(&setting.file)).is_ok_and(|found| {
                    let found = found.trim();
                    !found.is_empty()
                        && compare(&setting.file, found, &setting.value, procfs::page_size())
                            != Comparison::Same
                })
            });
            if is_limited {
                self.make(&name, |whole| whole.merge(unlimited))?;
            }
        }
        Ok(())
    }
}

/// The directory of a cgroup by its path.
fn below(hierarchy: &Hierarchy, path: &str) -> PathBuf {
    hierarchy.path.join(path.trim_start_matches('/'))
}

/// Returns true if the cgroup at `path` is the one at `top` or below it.
fn lies_in(path: &str, top: &str) -> bool {
    Path::new(path).starts_with(top)
}

fn of_pods(field: &'static str, path: String) -> CgroupError {
    CgroupError::OfPods { field, path }
}

fn missing(field: &'static str, path: &str) -> CgroupError {
    CgroupError::Missing {
        field,
        path: path.to_owned(),
    }
}

/// Shares of CPU and limits of memory and processes that a reservation comes to; of CPU alone when `is_compressible`.
/// Amounts are thousandths of a core, bytes and processes. Upstream: `getCgroupConfig`.
pub fn reserved_limits(
    cpu_milli: Option<u64>,
    memory: Option<u64>,
    pids: Option<u64>,
    is_compressible: bool,
) -> (Limits, Option<u64>) {
    let milli = cpu_milli.map(|milli| i64::try_from(milli).unwrap_or(i64::MAX));
    let limits = Limits {
        shares: milli.map(resources::milli_cpu_to_shares),
        quota: None,
        memory: memory.filter(|_| !is_compressible),
    };
    (limits, pids.filter(|_| !is_compressible))
}

#[cfg(test)]
mod tests;

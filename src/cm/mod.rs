//! Layer 4: the cgroups above containers, `kubepods[/burstable|/besteffort]/pod<UID>`; upstream's container
//! manager as far as it concerns CPU, memory and the number of processes.
//!
//! Comes in: pods. Goes out: directories below the cgroup root with shares, quotas and limits, and the
//! parent the runtime is told. With the systemd driver they are slices: each is made, limited and removed as a unit of
//! systemd ([`systemd`]), and then written to cgroupfs like all others, since a unit does not know every limit.
//!
//! The manager remembers what it wants of each cgroup. [`CgroupManager::mend`] compares and puts back what somebody else
//! has changed.
//!
//! **Invariant:** nothing outside `<root>/kubepods` is written, except to the cgroups that settings name ([`reserves`]), and only
//! directories named for a pod are removed. Every call may be repeated. Calls block for some system calls; none waits for a container,
//! except [`CgroupManager::destroy`], which gives killed processes up to a second to go.

mod change;
mod error;
mod fs;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod mend;
mod name;
pub mod pinning;
pub mod reserves;
mod settings;
mod shared;
pub mod sysfs;
pub mod systemd;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

pub use error::CgroupError;
pub use fs::CgroupVersion;
pub use mend::{Mended, Mending};
pub use name::{CgroupDriver, CgroupName};

use crate::kuberuntime::resources::{self, QosClass};
use crate::types::cpu_set::CpuSet;
use crate::types::metrics::Metrics;
use crate::types::{PodExt, PodUid};
use fs::Hierarchy;
use pinning::Pinning;
use settings::{Comparison, Whole, huge_page_settings, pod_limits};
use systemd::Systemd;

/// Settings of the cgroups.
#[derive(Clone, Debug)]
pub struct CgroupConfig {
    /// `cgroupDriver`; must be the runtime's.
    pub driver: CgroupDriver,
    /// `cgroupRoot`: below which `kubepods` is made, `/` for the top.
    pub root: String,
    /// Mount point of the hierarchies.
    pub mount: PathBuf,
    /// `cgroupsPerQOS`; without it pods are left to the runtime's default parent.
    pub per_qos: bool,
    /// `failCgroupV1`: refuse to run on the legacy hierarchies.
    pub fail_v1: bool,
    /// `cpuCFSQuota`.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod` in microseconds.
    pub cfs_period_us: u64,
    /// CPU of all pods together in thousandths of a core; sets the shares of `kubepods`.
    pub allocatable_cpu_milli: Option<u64>,
    /// Memory of all pods together in bytes; the limit of `kubepods`, see [`CgroupManager::limit_all`].
    pub allocatable_memory: Option<u64>,
    /// `podPidsLimit`: processes and threads of one pod; `None` for no limit.
    pub pod_pids_limit: Option<u64>,
    /// Processes and threads of all pods together; `None` for no limit.
    pub allocatable_pids: Option<u64>,
    /// `qosReserved.memory` in percent.
    pub qos_reserved_memory: Option<u8>,
    /// `memoryReservationPolicy: TieredReservation`.
    pub tiered: bool,
    /// Sizes of huge pages that the kernel has, in bytes.
    pub hugepage_sizes: Vec<u64>,
    /// Bytes in huge pages of all pods together, by size; sizes that are missing are not limited.
    pub allocatable_huge_pages: BTreeMap<u64, u64>,
    /// Processors of the machine. With the systemd driver on v2 they are named in the slice of all pods, or systemd
    /// would disable the controller cpuset below it.
    pub cpus: Option<u32>,
}

impl Default for CgroupConfig {
    fn default() -> Self {
        Self {
            driver: CgroupDriver::Cgroupfs,
            root: "/".to_owned(),
            mount: PathBuf::from("/sys/fs/cgroup"),
            per_qos: true,
            fail_v1: false,
            cpu_cfs_quota: true,
            cfs_period_us: 100_000,
            allocatable_cpu_milli: None,
            allocatable_memory: None,
            pod_pids_limit: None,
            allocatable_pids: None,
            qos_reserved_memory: None,
            tiered: false,
            hugepage_sizes: Vec::new(),
            allocatable_huge_pages: BTreeMap::new(),
            cpus: None,
        }
    }
}

/// Limits of one cgroup; what is `None` is left as the kernel made it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// `cpu.shares`.
    pub shares: Option<u64>,
    /// CFS quota and period in microseconds; a quota below zero = no limit.
    pub quota: Option<(i64, u64)>,
    /// Memory in bytes; [`NO_MEMORY_LIMIT`] = no limit.
    pub memory: Option<u64>,
}

/// Takes a memory limit away.
pub const NO_MEMORY_LIMIT: u64 = u64::MAX;

/// Wanted limits of a cgroup, and those that this agent has sent to systemd.
#[derive(Clone, Debug, Default)]
struct Wanted {
    whole: Whole,
    told: Option<Told>,
    /// Calls that are making it so: its files may not say it yet.
    in_progress: u32,
}

/// Limits that systemd has of a slice, and the cgroup that it had then. A unit that was stopped leaves neither: what comes after
/// it under that name is another cgroup, of which systemd knows no limits.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    whole: Whole,
    cgroup: Option<u64>,
}

/// Makes and removes the cgroups of pods. Clones share what they remember.
#[derive(Clone, Debug)]
pub struct CgroupManager {
    config: CgroupConfig,
    version: CgroupVersion,
    hierarchies: Vec<Hierarchy>,
    top: CgroupName,
    systemd: Option<Arc<Systemd>>,
    wanted: Arc<Mutex<BTreeMap<CgroupName, Wanted>>>,
    /// Bytes that all pods together may use since the machine's size changed; 0 before.
    resized_memory: Arc<AtomicU64>,
    /// Bytes in huge pages that all pods together may use since the machine's size changed; `None` before.
    resized_huge_pages: Arc<Mutex<Option<BTreeMap<u64, u64>>>>,
    metrics: Option<Metrics>,
    /// The managers by whose assignments a pod has no CPU quota.
    pinning: Option<Pinning>,
}

impl CgroupManager {
    /// Finds out what the machine has. Changes nothing.
    ///
    /// # Errors
    /// `NotMounted`, `V1Refused`; unless `per_qos` is off, `MissingControllers` (cpu and memory are needed)
    /// and, with a limit of processes, `NoPidsController`.
    pub fn detect(config: CgroupConfig) -> Result<Self, CgroupError> {
        let (version, hierarchies) = fs::discover(&config.mount)?;
        if config.fail_v1 && version != CgroupVersion::V2 {
            return Err(CgroupError::V1Refused);
        }
        let missing: Vec<String> = ["cpu", "memory"]
            .into_iter()
            .filter(|c| !hierarchies.iter().any(|h| h.has(c)))
            .map(str::to_owned)
            .collect();
        if config.per_qos && !missing.is_empty() {
            return Err(CgroupError::MissingControllers {
                mount: config.mount,
                missing,
            });
        }
        let manager = Self {
            top: CgroupName::parse(&config.root).child("kubepods"),
            config,
            version,
            hierarchies,
            systemd: None,
            wanted: Arc::default(),
            resized_memory: Arc::default(),
            resized_huge_pages: Arc::default(),
            metrics: None,
            pinning: None,
        };
        manager.check_pids_controller()?;
        Ok(manager)
    }

    /// Has this systemd keep the cgroups, when the driver is systemd's. Without it they are directories with the names
    /// of slices.
    #[must_use]
    pub fn with_systemd(mut self, systemd: Option<Systemd>) -> Self {
        self.systemd = systemd
            .filter(|_| self.config.driver == CgroupDriver::Systemd && self.config.per_qos)
            .map(Arc::new);
        self
    }

    /// Measures in `metrics` how long changes take.
    #[must_use]
    pub fn measured(mut self, metrics: Metrics) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// Takes the CFS quota off pods that have CPUs for themselves by these assignments.
    #[must_use]
    pub fn with_pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = Some(pinning);
        self
    }

    /// Returns the CPUs that pods may use, as far as the kernel shows it: those of the cgroup of all pods, or of the nearest one
    /// above it that has some. Blocking, shortly.
    pub fn cpus_for_pods(&self) -> Option<CpuSet> {
        let cpusets = self.hierarchies.iter().find(|h| h.has("cpuset"))?;
        let file = match self.version {
            CgroupVersion::V1 { .. } => "cpuset.effective_cpus",
            CgroupVersion::V2 => "cpuset.cpus.effective",
        };
        let top = self.dir(cpusets, &self.top);
        let mut dirs = top
            .ancestors()
            .take_while(|dir| dir.starts_with(&cpusets.path));
        dirs.find_map(|dir| {
            let text = std::fs::read_to_string(dir.join(file)).ok()?;
            let cpus: CpuSet = text.parse().ok()?;
            (!cpus.is_empty()).then_some(cpus)
        })
    }

    /// Better no agent than pods without the limit that they were to have.
    fn check_pids_controller(&self) -> Result<(), CgroupError> {
        let config = &self.config;
        let wanted = config.per_qos && config.pod_pids_limit.is_some();
        if wanted && !self.hierarchies.iter().any(|h| h.has("pids")) {
            let mount = config.mount.clone();
            return Err(CgroupError::NoPidsController { mount });
        }
        Ok(())
    }

    /// Returns the version of the machine's cgroups.
    pub fn version(&self) -> CgroupVersion {
        self.version
    }

    /// Returns whether swap can be limited; upstream's `swapControllerAvailable`. On v2, call it after [`Self::setup`]:
    /// the top cgroup does not show it.
    pub fn has_swap_controller(&self) -> bool {
        let Some(memory) = self.hierarchies.iter().find(|h| h.has("memory")) else {
            return false;
        };
        match self.version {
            CgroupVersion::V1 { .. } => memory.path.join("memory.memsw.limit_in_bytes").exists(),
            CgroupVersion::V2 => self.dir(memory, &self.top).join("memory.swap.max").exists(),
        }
    }

    /// Returns whether huge pages can be limited. Without the controller some runtimes refuse a container with such
    /// limits. On v2 call it after [`Self::setup`].
    pub fn has_hugetlb_controller(&self) -> bool {
        match self.version {
            CgroupVersion::V1 { .. } => self.hierarchies.iter().any(|h| h.has("hugetlb")),
            CgroupVersion::V2 => self.hierarchies.iter().any(|h| {
                let file = self.dir(h, &self.top).join("cgroup.controllers");
                std::fs::read_to_string(file)
                    .is_ok_and(|text| text.split_whitespace().any(|c| c == "hugetlb"))
            }),
        }
    }

    /// The cgroup of a pod; upstream's `GetPodContainerName`.
    ///
    /// # Errors
    /// When its resources do not parse or its UID cannot name a directory.
    pub fn pod_cgroup(&self, pod: &Pod) -> Result<CgroupName, CgroupError> {
        let uid = pod.uid();
        let class = resources::qos_class(pod);
        Ok(self.qos(class).child(&pod_component(&uid)?))
    }

    /// The pod in whose cgroup, or below it, the cgroup at `path` is. The path may begin above the root that this process
    /// sees, as paths in the kernel's log do for an agent in a container.
    pub fn pod_at(&self, path: &str) -> Option<PodUid> {
        let classes = [
            QosClass::Guaranteed,
            QosClass::Burstable,
            QosClass::BestEffort,
        ];
        let found = classes.into_iter().filter_map(|class| {
            let parent = self.qos(class);
            let above = format!("{}/", self.path(&parent));
            // The outermost one: what is below a container is named by the container.
            let begin = path.find(&above)? + above.len();
            let entry = path.get(begin..)?.split('/').next()?;
            let uid = parent.pod_of_child(entry, self.config.driver)?;
            Some((begin, uid))
        });
        found.min_by_key(|(begin, _)| *begin).map(|(_, uid)| uid)
    }

    /// The memory limit of the cgroup at `path` in bytes; `None` when it has none, or is not there.
    pub fn memory_limit_at(&self, path: &str) -> Option<u64> {
        let memory = self.hierarchies.iter().find(|h| h.has("memory"))?;
        let file = match self.version {
            CgroupVersion::V1 { .. } => "memory.limit_in_bytes",
            CgroupVersion::V2 => "memory.max",
        };
        // Without parts that lead upwards.
        let name = CgroupName::parse(path).cgroupfs();
        let dir = memory.path.join(name.trim_start_matches('/'));
        let limit: u64 = std::fs::read_to_string(dir.join(file))
            .ok()?
            .trim()
            .parse()
            .ok()?;
        // v1 has a number for no limit: all pages there can be.
        (limit < u64::MAX / 4).then_some(limit)
    }

    /// Returns the cgroup that the runtime gets as the sandbox's parent; empty without `per_qos`. For the systemd
    /// driver the slice alone, as upstream sends it.
    ///
    /// # Errors
    /// See [`Self::pod_cgroup`].
    pub fn pod_cgroup_parent(&self, pod: &Pod) -> Result<String, CgroupError> {
        if !self.config.per_qos {
            return Ok(String::new());
        }
        let name = self.pod_cgroup(pod)?;
        Ok(match self.config.driver {
            CgroupDriver::Cgroupfs => name.cgroupfs(),
            CgroupDriver::Systemd => name.slice(),
        })
    }

    /// Makes the cgroup of a pod with its limits, or brings an existing one to them; upstream's
    /// `EnsureExists`.
    ///
    /// # Errors
    /// When cgroupfs cannot be written.
    pub fn ensure(&self, pod: &Pod) -> Result<(), CgroupError> {
        if !self.config.per_qos {
            return Ok(());
        }
        let whole = self.whole(pod)?;
        self.make(&self.pod_cgroup(pod)?, |now| *now = whole)
    }

    /// Takes the cgroup of a pod over as it is to be, when nothing is remembered of it: [`Self::mend`] compares it from now
    /// on. Writes nothing.
    ///
    /// # Errors
    /// When the pod's resources do not parse or its UID cannot name a directory.
    pub fn adopt(&self, pod: &Pod) -> Result<(), CgroupError> {
        if !self.config.per_qos {
            return Ok(());
        }
        let name = self.pod_cgroup(pod)?;
        if self.remembered().contains_key(&name) {
            return Ok(());
        }
        let whole = self.whole(pod)?;
        self.remembered().entry(name).or_insert(Wanted {
            whole,
            ..Wanted::default()
        });
        Ok(())
    }

    /// Returns the limits for the cgroup of a pod, overhead included; upstream's `ResourceConfigForPod`.
    ///
    /// # Errors
    /// When a quantity does not parse.
    pub fn limits_of(&self, pod: &Pod) -> Result<Limits, CgroupError> {
        self.pod_limits(pod)
    }

    /// Sets some limits of the cgroup of a pod and leaves the others; upstream's `SetPodCgroupConfig`. A
    /// cgroup that is not there is made.
    ///
    /// # Errors
    /// When cgroupfs cannot be written; the kernel refuses a memory limit that it cannot reclaim down to.
    pub fn set_limits(&self, pod: &Pod, limits: Limits) -> Result<(), CgroupError> {
        // A request may change that no limit follows from, but the memory that is protected does.
        let is_empty = limits == Limits::default() && !self.config.tiered;
        if !self.config.per_qos || is_empty {
            return Ok(());
        }
        let protection = self.pod_protection(pod)?;
        self.make(&self.pod_cgroup(pod)?, |whole| {
            whole.merge(limits);
            whole.protection = protection;
        })
    }

    /// Memory the cgroup of a pod uses, in bytes; `None` when there is none to ask. Upstream's
    /// `GetPodCgroupMemoryUsage`.
    pub fn memory_usage(&self, pod: &Pod) -> Option<u64> {
        let name = self.pod_cgroup(pod).ok()?;
        let memory = self.hierarchies.iter().find(|h| h.has("memory"))?;
        let file = match self.version {
            CgroupVersion::V1 { .. } => "memory.usage_in_bytes",
            CgroupVersion::V2 => "memory.current",
        };
        let text = std::fs::read_to_string(self.dir(memory, &name).join(file)).ok()?;
        text.trim().parse().ok()
    }

    /// Brings the process limit of an existing cgroup of a pod to `podPidsLimit`, also when that was another
    /// one as the cgroup was made. A cgroup that is not there is not made.
    ///
    /// # Errors
    /// When cgroupfs cannot be written or systemd refuses.
    pub fn limit_pids(&self, pod: &Pod) -> Result<(), CgroupError> {
        if !self.config.per_qos {
            return Ok(());
        }
        let name = self.pod_cgroup(pod)?;
        let only = Whole {
            pids: Some(self.config.pod_pids_limit),
            ..Whole::default()
        };
        for setting in only.settings(self.version) {
            for hierarchy in self.hierarchies.iter().filter(|h| h.has("pids")) {
                if self.comparison(hierarchy, &name, &setting).1 == Comparison::Same {
                    continue;
                }
                let wanted = self.remembered().get(&name).map(|w| w.whole.clone());
                if let Some(whole) = wanted.filter(|_| self.exists(pod)) {
                    self.tell_systemd(&name, &whole, false)?;
                }
                let dir = self.dir(hierarchy, &name);
                if let Err(error) = fs::set(&dir.join(&setting.file), &setting.value)
                    && dir.is_dir()
                {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Returns whether the cgroup of a pod exists in every hierarchy that has limits.
    pub fn exists(&self, pod: &Pod) -> bool {
        let Ok(name) = self.pod_cgroup(pod) else {
            return false;
        };
        !self.config.per_qos
            || self
                .managed()
                .all(|hierarchy| self.dir(hierarchy, &name).is_dir())
    }

    /// Kills what is left in a pod's cgroups and removes them, in every hierarchy and QoS class; upstream's
    /// `podContainerManager.Destroy`. None there is no error.
    ///
    /// # Errors
    /// `Busy` when processes do not end within a second; else what the kernel refuses.
    pub fn destroy(&self, uid: &PodUid) -> Result<(), CgroupError> {
        if !self.config.per_qos {
            return Ok(());
        }
        let component = pod_component(uid)?;
        for class in CLASSES {
            let name = self.qos(class).child(&component);
            let begun = Instant::now();
            let was_there = self.is_anywhere(&name);
            let removed = self.remove(&name, was_there);
            if was_there {
                self.observe("destroy", begun);
            }
            removed?;
        }
        Ok(())
    }

    fn remove(&self, name: &CgroupName, was_there: bool) -> Result<(), CgroupError> {
        for hierarchy in &self.hierarchies {
            fs::remove_tree(&self.dir(hierarchy, name))?;
        }
        let was_known = self.remembered().remove(name).is_some();
        match &self.systemd {
            Some(systemd) if was_there || was_known => {
                systemd.remove(name).map_err(self.of_systemd(name))
            }
            _ => Ok(()),
        }
    }

    /// Returns the processes in the cgroups of a pod and below, in any hierarchy, sorted; 0 stands for those of another
    /// PID namespace. None without `per_qos`, which leaves it to the runtime where they are.
    ///
    /// # Errors
    /// When a directory cannot be read.
    pub fn processes(&self, uid: &PodUid) -> Result<Vec<i32>, CgroupError> {
        if !self.config.per_qos {
            return Ok(Vec::new());
        }
        let component = pod_component(uid)?;
        let mut pids = BTreeSet::new();
        for class in CLASSES {
            let name = self.qos(class).child(&component);
            for hierarchy in &self.hierarchies {
                pids.extend(fs::processes(&self.dir(hierarchy, &name))?);
            }
        }
        Ok(pids.into_iter().collect())
    }

    /// Removes cgroups of pods other than those to `keep`, if there is such a list, and sets the limits of QoS classes and of
    /// the processes of pods, which may have been resumed with other settings. One that fails keeps none of the others.
    /// Returns what failed.
    pub fn sweep(&self, keep: Option<&BTreeSet<PodUid>>, active: &[Arc<Pod>]) -> Vec<CgroupError> {
        let mut errors = Vec::new();
        match keep.map(|keep| (keep, self.list_pods())) {
            None => {}
            Some((keep, Ok(found))) => {
                for uid in found.difference(keep) {
                    tracing::info!(pod = %uid, "removing orphan cgroup");
                    errors.extend(self.destroy(uid).err());
                }
            }
            Some((_, Err(error))) => errors.push(error),
        }
        errors.extend(self.refresh_qos(active).err());
        let limited = active.iter().filter_map(|pod| self.limit_pids(pod).err());
        errors.extend(limited);
        errors
    }

    /// Pods that have a cgroup, in any hierarchy; for removing what nobody knows any more.
    ///
    /// # Errors
    /// When a directory cannot be read.
    pub fn list_pods(&self) -> Result<BTreeSet<PodUid>, CgroupError> {
        let mut pods = BTreeSet::new();
        if !self.config.per_qos {
            return Ok(pods);
        }
        for class in CLASSES {
            let parent = self.qos(class);
            for hierarchy in &self.hierarchies {
                let children = fs::children(&self.dir(hierarchy, &parent))?;
                pods.extend(
                    children
                        .iter()
                        .filter_map(|child| child.to_str())
                        .filter_map(|child| parent.pod_of_child(child, self.config.driver)),
                );
            }
        }
        Ok(pods)
    }

    /// All that a pod's cgroup is to have.
    fn whole(&self, pod: &Pod) -> Result<Whole, CgroupError> {
        let pages = resources::pod_huge_pages(pod).map_err(|source| CgroupError::Quantity {
            pod: pod.uid(),
            source,
        })?;
        Ok(Whole {
            limits: self.pod_limits(pod)?,
            pids: Some(self.config.pod_pids_limit),
            protection: self.pod_protection(pod)?,
            // Sizes that it asks nothing of are limited to 0.
            huge_pages: huge_page_settings(self.version, &self.config, &pages),
            cpus: None,
        })
    }

    fn pod_limits(&self, pod: &Pod) -> Result<Limits, CgroupError> {
        let of = |source| CgroupError::Quantity {
            pod: pod.uid(),
            source,
        };
        let class = resources::qos_class(pod);
        let sum = resources::pod_resources_with_overhead(pod).map_err(of)?;
        let mut limits = pod_limits(class, sum, &self.config);
        if let Some((quota, _)) = &mut limits.quota
            && let Some(pinning) = &self.pinning
            && pinning.has_cpus(&pod.uid(), None)
        {
            *quota = -1;
        }
        Ok(limits)
    }

    /// The memory of a pod that is kept from reclaim; `None` when none ever is.
    fn pod_protection(&self, pod: &Pod) -> Result<Option<reserves::Protection>, CgroupError> {
        if !self.config.tiered {
            return Ok(None);
        }
        let sum = resources::pod_resources_with_overhead(pod).map_err(|source| {
            CgroupError::Quantity {
                pod: pod.uid(),
                source,
            }
        })?;
        let class = resources::qos_class(pod);
        Ok(Some(reserves::pod_protection(class, sum)))
    }

    fn qos(&self, class: QosClass) -> CgroupName {
        match class {
            QosClass::Guaranteed => self.top.clone(),
            QosClass::Burstable => self.top.child("burstable"),
            QosClass::BestEffort => self.top.child("besteffort"),
        }
    }

    /// Returns whether the cgroup is that of all pods or of a class.
    fn is_common(&self, name: &CgroupName) -> bool {
        CLASSES.into_iter().any(|class| self.qos(class) == *name)
    }

    /// Hierarchies in which limits are set. The runtime makes its directories in the others.
    fn managed(&self) -> impl Iterator<Item = &Hierarchy> {
        self.hierarchies.iter().filter(|h| {
            ["cpu", "memory", "pids", "hugetlb"]
                .iter()
                .any(|c| h.has(c))
        })
    }

    fn dir(&self, hierarchy: &Hierarchy, name: &CgroupName) -> PathBuf {
        let path = self.path(name);
        hierarchy.path.join(path.trim_start_matches('/'))
    }

    fn path(&self, name: &CgroupName) -> String {
        match self.config.driver {
            CgroupDriver::Cgroupfs => name.cgroupfs(),
            CgroupDriver::Systemd => name.systemd(),
        }
    }
}

const CLASSES: [QosClass; 3] = [
    QosClass::Guaranteed,
    QosClass::Burstable,
    QosClass::BestEffort,
];

fn pod_component(uid: &PodUid) -> Result<String, CgroupError> {
    if uid.as_str().is_empty() || uid.as_str().contains(['/', '\0']) {
        return Err(CgroupError::Uid { pod: uid.clone() });
    }
    Ok(format!("pod{uid}"))
}

/// Controllers by mount point, for `holdfast version` and logs; paths, for those who read them.
impl CgroupManager {
    /// The cgroup of all pods, as a path below each mount point.
    pub fn pods_path(&self) -> String {
        self.path(&self.top)
    }

    /// The cgroup of a pod, as a path below each mount point; `None` when its pods have none of their own.
    pub fn pod_path(&self, pod: &Pod) -> Option<String> {
        let name = self.pod_cgroup(pod).ok()?;
        self.config.per_qos.then(|| self.path(&name))
    }

    /// Mount points and their controllers.
    pub fn describe(&self) -> BTreeMap<PathBuf, Vec<String>> {
        self.hierarchies
            .iter()
            .map(|h| (h.path.clone(), h.controllers.iter().cloned().collect()))
            .collect()
    }
}

#[cfg(test)]
mod tests;

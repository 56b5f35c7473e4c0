//! Measurements, before they take the shape of an endpoint. Counters are since the creation of the cgroup, process or
//! interface; times are milliseconds since the Unix epoch.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::claims::RemoteUsage;
use super::storage::Storage;
use crate::types::{ContainerId, PodUid};

/// Extent of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// CPU, memory and swap.
    CpuAndMemory,
    /// Everything that the cgroups of pods show, with processes: nothing that measures disks or asks the runtime for more.
    Cgroups,
    /// All there is, with network and disks.
    Full,
}

/// One measurement of the node with everything on it.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Time of the sample.
    pub at_ms: i64,
    /// The node.
    pub node: NodeUsage,
    /// Pods of which something runs.
    pub pods: Vec<PodUsage>,
    /// Disks; `None` unless requested, and as long as they have not been measured for the first time.
    pub storage: Option<Arc<Storage>>,
    /// Remote volumes.
    pub remotes: Vec<RemoteUsage>,
    /// Names of block devices; empty unless requested.
    pub devices: BTreeMap<DeviceNumber, String>,
    /// Something that should be there could not be read.
    pub failed: bool,
}

impl Snapshot {
    /// The same without what [`Depth::CpuAndMemory`] leaves out.
    #[must_use]
    pub fn cpu_and_memory(&self) -> Self {
        let shallow = |usage: &mut Usage| {
            usage.pressure = Pressure::default();
            usage.processes = None;
            usage.threads = None;
            usage.threads_max = None;
            usage.disks.clear();
            usage.descriptors = None;
        };
        let mut snapshot = Self {
            storage: None,
            remotes: Vec::new(),
            devices: BTreeMap::new(),
            ..self.clone()
        };
        let node = &mut snapshot.node;
        node.network.clear();
        node.fs = None;
        node.processes = None;
        shallow(&mut node.usage);
        for part in &mut node.system {
            shallow(&mut part.usage);
        }
        for pod in &mut snapshot.pods {
            pod.network.clear();
            shallow(&mut pod.usage);
            for container in &mut pod.containers {
                shallow(&mut container.usage);
            }
        }
        snapshot
    }
}

/// The node itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeUsage {
    /// Its name.
    pub name: String,
    /// Boot time of the machine.
    pub boot_ms: i64,
    /// The machine as a whole.
    pub usage: Usage,
    /// Memory of the machine in bytes.
    pub memory_capacity: u64,
    /// Swap of the machine in bytes.
    pub swap_capacity: u64,
    /// Cores.
    pub cpus: u64,
    /// Interfaces of the machine.
    pub network: Vec<Interface>,
    /// The interface that leads to other networks.
    pub default_interface: Option<String>,
    /// The most processes and threads there may be, and how many there are.
    pub processes: Option<(u64, u64)>,
    /// The file system of the agent's root directory.
    pub fs: Option<Fs>,
    /// Parts of the system: `kubelet`, `runtime`, `pods`.
    pub system: Vec<SystemUsage>,
}

/// A part of the system.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SystemUsage {
    /// `kubelet`, `runtime` or `pods`.
    pub name: &'static str,
    /// Start time.
    pub start_ms: i64,
    /// Its cgroup; empty when it has none of its own.
    pub cgroup: String,
    /// Its usage.
    pub usage: Usage,
}

/// A pod.
#[derive(Clone, Debug)]
pub struct PodUsage {
    /// UID; that of the file for a static pod.
    pub uid: PodUid,
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// The pod, when a source wants it.
    pub pod: Option<Arc<Pod>>,
    /// Creation time of its sandbox.
    pub start_ms: i64,
    /// Its cgroup; empty when it has none of its own.
    pub cgroup: String,
    /// Its sandbox.
    pub sandbox: Option<ContainerId>,
    /// It has the node's network, whose traffic is not its own.
    pub host_network: bool,
    /// All of it together.
    pub usage: Usage,
    /// Interfaces in its network namespace.
    pub network: Vec<Interface>,
    /// Containers that run.
    pub containers: Vec<ContainerUsage>,
}

/// A container.
#[derive(Clone, Debug)]
pub struct ContainerUsage {
    /// The runtime's ID.
    pub id: ContainerId,
    /// Name in the pod.
    pub name: String,
    /// Image as the pod names it.
    pub image: String,
    /// Start time.
    pub start_ms: i64,
    /// Its cgroup; empty when it was not found.
    pub cgroup: String,
    /// Its usage.
    pub usage: Usage,
}

/// Usage of a group of processes. A field is `None` if the kernel does not report it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// Time of the reading.
    pub at_ms: i64,
    /// Processor time.
    pub cpu: Option<Cpu>,
    /// Memory.
    pub memory: Option<Memory>,
    /// Swap.
    pub swap: Option<Swap>,
    /// Time that was waited for.
    pub pressure: Pressure,
    /// Processes.
    pub processes: Option<u64>,
    /// Threads.
    pub threads: Option<u64>,
    /// The most threads there may be.
    pub threads_max: Option<u64>,
    /// Reads and writes of disks.
    pub disks: Vec<DiskIo>,
    /// Open files; up to a minute old.
    pub descriptors: Option<Descriptors>,
    /// Applied limits.
    pub limits: Limits,
}

/// Processor time in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cpu {
    /// In all.
    pub total_ns: u64,
    /// In user space.
    pub user_ns: Option<u64>,
    /// In the kernel.
    pub system_ns: Option<u64>,
    /// Growth between the last two measurements, in billionths of a core.
    pub nano_cores: Option<u64>,
    /// The CFS quota at work.
    pub throttling: Option<Throttling>,
}

/// The CFS quota at work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Periods in which there was something to do.
    pub periods: u64,
    /// Those in which the quota did not suffice.
    pub throttled: u64,
    /// Time stood still for that, in nanoseconds.
    pub throttled_ns: u64,
}

/// Memory in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// In all, with caches.
    pub usage: Option<u64>,
    /// Memory that cannot be given back at once.
    pub working_set: Option<u64>,
    /// Anonymous memory.
    pub rss: Option<u64>,
    /// Page cache.
    pub cache: Option<u64>,
    /// Mapped files.
    pub mapped_file: Option<u64>,
    /// Memory of the kernel.
    pub kernel: Option<u64>,
    /// The most that was in use.
    pub max_usage: Option<u64>,
    /// Times the limit was hit.
    pub failcnt: Option<u64>,
    /// Page faults.
    pub page_faults: Option<u64>,
    /// Page faults that needed a disk.
    pub major_page_faults: Option<u64>,
    /// Processes killed for want of memory.
    pub oom_kills: Option<u64>,
}

/// Swap in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swap {
    /// In use.
    pub usage: u64,
    /// The most there may be; `None` for no limit.
    pub limit: Option<u64>,
}

/// Major and minor number of a block device.
pub type DeviceNumber = (u32, u32);

/// Reads and writes of a cgroup and those below it on one disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskIo {
    /// The disk.
    pub device: DeviceNumber,
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// Files that processes hold open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// All of them.
    pub open: u64,
    /// Those that are sockets; `None` if the agent may not see what they lead to.
    pub sockets: Option<u64>,
}

impl Descriptors {
    /// Those of no process.
    pub fn none() -> Self {
        Self {
            open: 0,
            sockets: Some(0),
        }
    }
}

/// Pressure stall information.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// On processors.
    pub cpu: Option<Psi>,
    /// On memory.
    pub memory: Option<Psi>,
    /// On disks.
    pub io: Option<Psi>,
}

/// One resource's pressure.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Psi {
    /// Some processes waited.
    pub some: PsiLine,
    /// All of them did.
    pub full: PsiLine,
}

/// Shares of time in percent, and the time in all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PsiLine {
    /// Of the last 10 seconds.
    pub avg10: f64,
    /// Of the last minute.
    pub avg60: f64,
    /// Of the last 5 minutes.
    pub avg300: f64,
    /// In microseconds.
    pub total_us: u64,
}

/// Limits of a cgroup; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// `cpu.shares`, or what `cpu.weight` stands for.
    pub cpu_shares: Option<u64>,
    /// Quota in microseconds per period.
    pub cpu_quota_us: Option<u64>,
    /// Period in microseconds.
    pub cpu_period_us: Option<u64>,
    /// Memory in bytes.
    pub memory: Option<u64>,
}

/// Traffic of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Received.
    pub rx: Traffic,
    /// Sent.
    pub tx: Traffic,
}

/// One direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Packets that were bad.
    pub errors: u64,
    /// Packets that were dropped.
    pub dropped: u64,
}

/// A file system, or a part of one: `used` is that part's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fs {
    /// Time of the measurement.
    pub at_ms: i64,
    /// The device it is on; empty when unknown.
    pub device: String,
    /// Bytes free.
    pub available: Option<u64>,
    /// Bytes in all.
    pub capacity: Option<u64>,
    /// Bytes in use.
    pub used: Option<u64>,
    /// Inodes free.
    pub inodes_free: Option<u64>,
    /// Inodes in all.
    pub inodes: Option<u64>,
    /// Inodes in use.
    pub inodes_used: Option<u64>,
}

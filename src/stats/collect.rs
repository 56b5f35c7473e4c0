//! Reading cgroups and `/proc`. All of it blocks, for some system calls per cgroup.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};

use super::StatsOptions;
use super::cgroup::Hierarchies;
use super::descriptors::Counts;
use super::model::{ContainerUsage, Depth, NodeUsage, PodUsage, Snapshot, SystemUsage, Usage};
use super::storage::fs_of;
use crate::cm::CgroupManager;
use crate::nodestatus::cpus;
use crate::types::runtime::{ContainerStatus, SandboxStatus};
use crate::types::{ContainerId, PodExt, PodUid};

/// The process whose namespaces are the machine's.
const INIT: u32 = 1;

/// Sources of the usage.
pub(super) struct Sources {
    pub(super) hierarchies: Hierarchies,
    pub(super) manager: Option<CgroupManager>,
    pub(super) options: StatsOptions,
    pub(super) descriptors: Counts,
}

/// A pod to be read.
pub(super) struct Subject {
    pub(super) uid: PodUid,
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) sandbox: Option<SandboxStatus>,
    pub(super) running: Vec<ContainerStatus>,
}

impl Sources {
    pub(super) fn read(&self, subjects: Vec<Subject>, at_ms: i64, depth: Depth) -> Snapshot {
        let full = depth == Depth::Full;
        let pods = subjects.into_iter();
        let mut pods: Vec<PodUsage> = pods
            .map(|subject| self.pod(subject, at_ms, depth))
            .collect();
        let mut node = self.node(at_ms, full);
        let proc = &self.options.proc;
        let mut devices = BTreeMap::new();
        if full {
            self.descriptors
                .fill(&mut pods, &mut node.system, &self.hierarchies, proc);
            devices = proc.block_devices();
        }
        Snapshot {
            at_ms,
            failed: node.usage.cpu.is_none(),
            node,
            pods,
            storage: None,
            remotes: Vec::new(),
            devices,
        }
    }

    fn node(&self, at_ms: i64, full: bool) -> NodeUsage {
        let proc = &self.options.proc;
        let mut machine = proc.machine(at_ms, full).unwrap_or_default();
        if let (Some(swap), Some(charged)) =
            (&mut machine.usage.swap, self.hierarchies.swap_of_root())
        {
            swap.usage = charged;
        }
        if full {
            machine.usage.disks = self.hierarchies.disks("/");
        }
        let mut node = NodeUsage {
            name: self.options.node_name.clone(),
            boot_ms: machine.boot_ms,
            usage: machine.usage,
            memory_capacity: machine.memory_capacity,
            swap_capacity: machine.swap_capacity,
            processes: machine.processes,
            cpus: cpus(),
            ..NodeUsage::default()
        };
        let runtime = runtime_pid(&self.options.runtime_socket);
        node.system
            .extend(self.process("kubelet", Some(std::process::id()), at_ms));
        node.system.extend(self.process("runtime", runtime, at_ms));
        if let Some(manager) = &self.manager {
            let cgroup = manager.pods_path();
            if let Some(usage) = self.hierarchies.read(&cgroup, at_ms, full) {
                node.system.push(SystemUsage {
                    name: "pods",
                    start_ms: machine.boot_ms,
                    cgroup,
                    usage,
                });
            }
        }
        if full {
            node.network = proc.network(INIT).unwrap_or_default();
            node.default_interface = proc.default_interface(INIT);
            node.fs = fs_of(&self.options.root_dir, at_ms);
        }
        node
    }

    /// A part of the system by one of its processes: its cgroup, or the process where that is the machine's.
    fn process(&self, name: &'static str, pid: Option<u32>, at_ms: i64) -> Option<SystemUsage> {
        let proc = &self.options.proc;
        let pid = pid?;
        let process = proc.process(pid)?;
        let controllers: &[Option<&str>] = if self.hierarchies.v2 {
            &[None]
        } else {
            &[Some("cpuacct"), Some("memory")]
        };
        let mut cgroups = controllers.iter().map(|c| proc.cgroup(pid, *c));
        let first = cgroups.next().flatten().filter(|path| path != "/");
        // On v1 a process may be in one place for CPU and in another for memory.
        let own = first.filter(|path| cgroups.all(|other| other.as_ref() == Some(path)));
        let read = own
            .as_ref()
            .and_then(|path| self.hierarchies.read(path, at_ms, false));
        Some(SystemUsage {
            name,
            start_ms: process.start_ms,
            cgroup: read.as_ref().and(own).unwrap_or_default(),
            usage: read.unwrap_or_else(|| process.usage(at_ms)),
        })
    }

    fn pod(&self, subject: Subject, at_ms: i64, depth: Depth) -> PodUsage {
        let whole = depth >= Depth::Cgroups;
        let manager = self.manager.as_ref();
        let cgroup = (subject.pod.as_ref()).and_then(|pod| manager?.pod_path(pod));
        let cgroup = cgroup.unwrap_or_default();
        let usage = match cgroup.as_str() {
            "" => None,
            path => self.hierarchies.read(path, at_ms, whole),
        };
        let children = match cgroup.as_str() {
            "" => Vec::new(),
            path => self.hierarchies.children(path),
        };
        let below = |id: &ContainerId| -> Option<String> {
            // CRI-O may keep a container's monitor beside it: crio-conmon-<id>.
            let of = |name: &&String| name.contains(id.as_str()) && !name.contains("conmon");
            let child = children.iter().find(of)?;
            Some(format!("{cgroup}/{child}"))
        };
        let containers: Vec<ContainerUsage> = subject
            .running
            .iter()
            .map(|status| self.container(status, below(&status.id), at_ms, whole))
            .collect();
        let by_spec = subject.pod.as_ref().and_then(|p| p.spec_ref().host_network);
        let host_network = by_spec
            .or_else(|| subject.sandbox.as_ref()?.host_network)
            .unwrap_or(false);
        let mut network = Vec::new();
        if depth == Depth::Full && !host_network {
            // Any process of the pod has its network; the sandbox's lives as long as the network does.
            let cgroups = subject.sandbox.iter().filter_map(|s| below(&s.id));
            let cgroups = cgroups.chain(containers.iter().map(|c| c.cgroup.clone()));
            let pids = cgroups
                .filter(|cgroup| !cgroup.is_empty())
                .filter_map(|cgroup| self.hierarchies.processes(&cgroup).into_iter().next());
            let proc = &self.options.proc;
            network = pids
                .filter_map(|pid| proc.network(pid))
                .next()
                .unwrap_or_default();
        }
        let created = subject.sandbox.as_ref().map(|s| s.created_at_ns);
        let created = created.or_else(|| subject.running.iter().map(|c| c.created_at_ns).min());
        PodUsage {
            uid: subject.uid,
            name: subject.name,
            namespace: subject.namespace,
            pod: subject.pod,
            start_ms: created.unwrap_or(0) / 1_000_000,
            cgroup,
            sandbox: subject.sandbox.map(|s| s.id),
            host_network,
            usage: usage.unwrap_or_default(),
            network,
            containers,
        }
    }

    fn container(
        &self,
        status: &ContainerStatus,
        cgroup: Option<String>,
        at_ms: i64,
        full: bool,
    ) -> ContainerUsage {
        let usage = cgroup
            .as_ref()
            .and_then(|path| self.hierarchies.read(path, at_ms, full));
        let started = match status.started_at_ns {
            0 => status.created_at_ns,
            at => at,
        };
        ContainerUsage {
            id: status.id.clone(),
            name: status.name.clone(),
            image: status.image.clone(),
            start_ms: started / 1_000_000,
            cgroup: cgroup.unwrap_or_default(),
            usage: usage.unwrap_or_else(|| Usage {
                at_ms,
                ..Usage::default()
            }),
        }
    }
}

/// The process that listens on the runtime's socket. A runtime that accepts nothing is not waited for.
fn runtime_pid(path: &std::path::Path) -> Option<u32> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None).ok()?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path).ok()?).ok()?;
    let peer = getsockopt(&stream, PeerCredentials).ok()?;
    u32::try_from(peer.pid()).ok().filter(|pid| *pid != 0)
}

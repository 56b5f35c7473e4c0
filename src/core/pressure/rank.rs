//! The order in which pods are evicted; upstream's `rankMemoryPressure`, `rankPIDPressure` and `rankDiskPressureFunc`.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::{Disks, Signal};
use crate::core::admission::{is_critical, priority};
use crate::core::resources::{NANOS, pod_requests};
use crate::types::PodExt;

/// A part of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

impl Space {
    fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            inodes: self.inodes.saturating_add(other.inodes),
        }
    }
}

/// Usage of a container. What is not known is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerUse {
    /// Working set in bytes.
    pub memory: Option<u64>,
    /// Its writable layer.
    pub rootfs: Option<Space>,
    /// Its logs.
    pub logs: Option<Space>,
}

/// Usage of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodUse {
    /// Working set in bytes.
    pub memory: Option<u64>,
    /// Processes.
    pub processes: Option<u64>,
    /// Containers by name.
    pub containers: BTreeMap<String, ContainerUse>,
    /// Volumes on the node's disk together.
    pub volumes: Space,
}

impl PodUse {
    /// Returns the usage that counts for a signal; `None` when it is unknown.
    fn of(&self, signal: Signal, disks: Disks) -> Option<u64> {
        match signal {
            Signal::Memory | Signal::AllocatableMemory => self.memory,
            Signal::Pid => self.processes,
            _ => Some(self.disk(signal, disks)),
        }
    }

    /// Returns the usage that counts for a file system: all of it if there is one, else the part on that file system.
    /// Upstream: `buildSignalToRankFunc`.
    fn disk(&self, signal: Signal, disks: Disks) -> u64 {
        let on_images = signal.has_layers(disks);
        let on_node = disks == Disks::One || !signal.is_of_images();
        let mut used = Space::default();
        for container in self.containers.values() {
            let rootfs = container.rootfs.filter(|_| on_images);
            let logs = container.logs.filter(|_| on_node);
            used = used.and(rootfs.unwrap_or_default());
            used = used.and(logs.unwrap_or_default());
        }
        if on_node {
            used = used.and(self.volumes);
        }
        if signal.is_of_inodes() {
            used.inodes
        } else {
            used.bytes
        }
    }
}

/// A pod that may be evicted.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its usage.
    pub usage: &'a PodUse,
}

/// Ascending: who comes first is evicted first.
type Key = (bool, i32, Reverse<i128>, String);

/// Returns the place of a pod in the order; `None` if what counts of it is unknown.
fn key(candidate: &Candidate<'_>, signal: Signal, disks: Disks) -> Option<Key> {
    let Candidate { pod, usage } = *candidate;
    let (used, uid) = (usage.of(signal, disks)?, pod.uid().to_string());
    if signal == Signal::Pid {
        return Some((false, priority(pod), Reverse(i128::from(used)), uid));
    }
    let requests = pod_requests(pod);
    let request = requests.get(signal.resource()).copied().unwrap_or(0);
    let excess = i128::from(used).saturating_mul(NANOS) - request;
    Some((excess <= 0, priority(pod), Reverse(excess), uid))
}

/// Returns the pods in the order in which they are evicted for a signal. Pods of equal rank go by UID. Pods whose usage is
/// unknown are left out: upstream evicts them first, but nothing may run of them.
pub fn ranked<'a>(
    signal: Signal,
    disks: Disks,
    pods: impl IntoIterator<Item = Candidate<'a>>,
) -> Vec<Candidate<'a>> {
    let with_key = |candidate: Candidate<'a>| Some((key(&candidate, signal, disks)?, candidate));
    let mut pods: Vec<(Key, Candidate<'a>)> = pods.into_iter().filter_map(with_key).collect();
    pods.sort_by(|(a, _), (b, _)| a.cmp(b));
    pods.into_iter().map(|(_, candidate)| candidate).collect()
}

/// The figures that gave a pod its place among those that may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Number of the pods that could have been chosen.
    pub candidates: usize,
    /// Its usage that counts: bytes, inodes or processes.
    pub used: u64,
    /// Its request of that; `None` where requests do not count.
    pub request: Option<u64>,
    /// Its priority.
    pub priority: i32,
}

/// Returns the figures by which `chosen` came first among `pods`; `None` if what counts of it is unknown.
pub fn standing<'a>(
    signal: Signal,
    disks: Disks,
    chosen: &Candidate<'_>,
    pods: impl IntoIterator<Item = Candidate<'a>>,
) -> Option<Standing> {
    let counts = |c: &Candidate<'_>| may_go(c) && c.usage.of(signal, disks).is_some();
    let request = || {
        let requests = pod_requests(chosen.pod);
        let request = requests.get(signal.resource()).copied().unwrap_or(0);
        u64::try_from(request / NANOS).unwrap_or(0)
    };
    Some(Standing {
        candidates: pods.into_iter().filter(counts).count(),
        used: chosen.usage.of(signal, disks)?,
        request: (signal != Signal::Pid).then(request),
        priority: priority(chosen.pod),
    })
}

fn may_go(candidate: &Candidate<'_>) -> bool {
    !is_critical(candidate.pod)
}

/// Returns the pod to evict: the first in rank that is neither static, mirror nor critical.
pub fn victim<'a>(
    signal: Signal,
    disks: Disks,
    pods: impl IntoIterator<Item = Candidate<'a>>,
) -> Option<Candidate<'a>> {
    let pods = pods.into_iter().filter(may_go);
    ranked(signal, disks, pods).into_iter().next()
}

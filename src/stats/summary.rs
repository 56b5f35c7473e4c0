//! `/stats/summary`: upstream's `stats/v1alpha1` `Summary`.

use serde::Serialize;

use super::claims::RemoteUsage;
use super::model::{Fs, Interface, NodeUsage, PodUsage, Psi, Snapshot, SystemUsage, Usage};
use super::storage::{ContainerStorage, Storage, VolumeUsage};

/// The answer.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    node: NodeStats,
    pods: Vec<PodStats>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeStats {
    node_name: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    system_containers: Vec<ContainerStats>,
    start_time: String,
    #[serde(flatten)]
    usage: UsageStats,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetworkStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fs: Option<FsStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime: Option<RuntimeStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rlimit: Option<RlimitStats>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RuntimeStats {
    #[serde(skip_serializing_if = "Option::is_none")]
    image_fs: Option<FsStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container_fs: Option<FsStats>,
}

#[derive(Clone, Debug, Serialize)]
struct RlimitStats {
    time: String,
    maxpid: u64,
    curproc: u64,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodStats {
    pod_ref: PodReference,
    start_time: String,
    containers: Vec<ContainerStats>,
    #[serde(flatten)]
    usage: UsageStats,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetworkStats>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    volume: Vec<VolumeStats>,
    #[serde(rename = "ephemeral-storage", skip_serializing_if = "Option::is_none")]
    ephemeral_storage: Option<FsStats>,
    #[serde(rename = "process_stats", skip_serializing_if = "Option::is_none")]
    process_stats: Option<ProcessStats>,
}

#[derive(Clone, Debug, Serialize)]
struct PodReference {
    name: String,
    namespace: String,
    uid: String,
}

#[derive(Clone, Debug, Serialize)]
struct ProcessStats {
    process_count: u64,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStats {
    name: String,
    start_time: String,
    #[serde(flatten)]
    usage: UsageStats,
    #[serde(skip_serializing_if = "Option::is_none")]
    rootfs: Option<FsStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logs: Option<FsStats>,
}

/// Common usage of node, pods and containers.
#[derive(Clone, Debug, Serialize)]
struct UsageStats {
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<CpuStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<MemoryStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    io: Option<IoStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<SwapStats>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CpuStats {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage_nano_cores: Option<u64>,
    usage_core_nano_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    psi: Option<PsiStats>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MemoryStats {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    available_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    working_set_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rss_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    major_page_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    psi: Option<PsiStats>,
}

#[derive(Clone, Debug, Serialize)]
struct IoStats {
    time: String,
    psi: PsiStats,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SwapStats {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap_available_bytes: Option<u64>,
    swap_usage_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct PsiStats {
    full: PsiData,
    some: PsiData,
}

/// `total` in nanoseconds.
#[derive(Clone, Debug, Serialize)]
struct PsiData {
    total: u64,
    avg10: f64,
    avg60: f64,
    avg300: f64,
}

/// The default interface twice: by itself, and among all.
#[derive(Clone, Debug, Serialize)]
struct NetworkStats {
    time: String,
    #[serde(flatten)]
    default: InterfaceStats,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<InterfaceStats>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct InterfaceStats {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rx_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rx_errors: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tx_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tx_errors: Option<u64>,
}

#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct FsStats {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    available_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes_free: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes_used: Option<u64>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct VolumeStats {
    #[serde(flatten)]
    fs: FsStats,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pvc_ref: Option<PvcReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume_health_stats: Option<VolumeHealthStats>,
}

#[derive(Clone, Debug, Serialize)]
struct PvcReference {
    name: String,
    namespace: String,
}

#[derive(Clone, Debug, Serialize)]
struct VolumeHealthStats {
    abnormal: bool,
}

impl Summary {
    /// The node and all pods of a snapshot, as deep as that goes.
    pub fn of(snapshot: &Snapshot) -> Self {
        let storage = snapshot.storage.as_deref();
        let node_fs = snapshot.node.fs.as_ref();
        Self {
            node: node(&snapshot.node, storage),
            pods: (snapshot.pods.iter())
                .map(|pod| of_pod(pod, storage, node_fs, &snapshot.remotes))
                .collect(),
        }
    }
}

/// As upstream writes times.
fn time(ms: i64) -> String {
    let at = jiff::Timestamp::from_second(ms.div_euclid(1000));
    at.map_or_else(|_| String::new(), |at| at.to_string())
}

fn node(node: &NodeUsage, storage: Option<&Storage>) -> NodeStats {
    let at_ms = node.usage.at_ms;
    let images = storage.and_then(|s| s.images.as_ref());
    let layers = storage.and_then(|s| s.containers_fs.as_ref()).or(images);
    NodeStats {
        node_name: node.name.clone(),
        system_containers: node.system.iter().map(system).collect(),
        start_time: time(node.boot_ms),
        usage: usage(&node.usage, Some(node.memory_capacity)),
        network: network(&node.network, node.default_interface.as_deref(), at_ms),
        fs: node.fs.as_ref().map(fs),
        runtime: images.map(|images| RuntimeStats {
            image_fs: Some(fs(images)),
            container_fs: layers.map(fs),
        }),
        rlimit: node.processes.map(|(maxpid, curproc)| RlimitStats {
            time: time(at_ms),
            maxpid,
            curproc,
        }),
    }
}

fn system(part: &SystemUsage) -> ContainerStats {
    ContainerStats {
        name: part.name.to_owned(),
        start_time: time(part.start_ms),
        usage: usage(&part.usage, part.usage.limits.memory),
        rootfs: None,
        logs: None,
    }
}

fn of_pod(
    pod: &PodUsage,
    storage: Option<&Storage>,
    node_fs: Option<&Fs>,
    remotes: &[RemoteUsage],
) -> PodStats {
    let volumes = storage.and_then(|s| s.volumes.get(&pod.uid));
    let volumes = volumes.map_or(&[] as &[VolumeUsage], |v| v);
    let layers = storage.and_then(|s| s.containers_fs.as_ref().or(s.images.as_ref()));
    let mut parts = Vec::new();
    let containers = pod.containers.iter().map(|container| {
        let of = storage.and_then(|s| s.containers.get(&container.id));
        parts.extend(of.copied());
        ContainerStats {
            name: container.name.clone(),
            start_time: time(container.start_ms),
            usage: usage(&container.usage, container.usage.limits.memory),
            rootfs: of.and_then(|of| {
                let (bytes, inodes) = of.rootfs?;
                layers.map(|fs| part(fs, Some(bytes), inodes))
            }),
            logs: of.and_then(|of| {
                let (bytes, inodes) = of.logs?;
                node_fs.map(|fs| part(fs, Some(bytes), Some(inodes)))
            }),
        }
    });
    let containers: Vec<_> = containers.collect();
    PodStats {
        pod_ref: PodReference {
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            uid: pod.uid.to_string(),
        },
        start_time: time(pod.start_ms),
        containers,
        usage: usage(&pod.usage, pod.usage.limits.memory),
        network: network(&pod.network, Some("eth0"), pod.usage.at_ms),
        volume: volumes
            .iter()
            .chain(
                remotes
                    .iter()
                    .filter(|r| r.pod == pod.uid)
                    .map(|r| &r.volume),
            )
            .map(volume)
            .collect(),
        ephemeral_storage: node_fs
            .filter(|_| storage.is_some())
            .map(|fs| ephemeral(fs, &parts, volumes)),
        process_stats: pod
            .usage
            .threads
            .map(|process_count| ProcessStats { process_count }),
    }
}

fn volume(of: &VolumeUsage) -> VolumeStats {
    VolumeStats {
        fs: fs(&of.fs),
        name: of.name.clone(),
        pvc_ref: of.claim.as_ref().map(|(namespace, name)| PvcReference {
            name: name.clone(),
            namespace: namespace.clone(),
        }),
        volume_health_stats: of.abnormal.map(|abnormal| VolumeHealthStats { abnormal }),
    }
}

/// Everything of the pod that lies on the node's disk.
fn ephemeral(node_fs: &Fs, containers: &[ContainerStorage], volumes: &[VolumeUsage]) -> FsStats {
    let layers = containers.iter().filter_map(|c| c.rootfs);
    let layers = layers.map(|(bytes, inodes)| (bytes, inodes.unwrap_or(0)));
    let logs = containers.iter().filter_map(|c| c.logs);
    let on_disk = volumes.iter().filter(|v| !v.memory).map(|v| {
        let used = v.fs.used.unwrap_or(0);
        (used, v.fs.inodes_used.unwrap_or(0))
    });
    let (bytes, inodes) = layers
        .chain(logs)
        .chain(on_disk)
        .fold((0_u64, 0_u64), |sum, part| {
            (sum.0.saturating_add(part.0), sum.1.saturating_add(part.1))
        });
    part(node_fs, Some(bytes), Some(inodes))
}

fn usage(of: &Usage, memory_limit: Option<u64>) -> UsageStats {
    let at = || time(of.at_ms);
    UsageStats {
        cpu: of.cpu.as_ref().map(|cpu| CpuStats {
            time: at(),
            usage_nano_cores: cpu.nano_cores,
            usage_core_nano_seconds: cpu.total_ns,
            psi: of.pressure.cpu.map(psi),
        }),
        memory: of.memory.as_ref().map(|memory| MemoryStats {
            time: at(),
            available_bytes: memory_limit
                .zip(memory.working_set)
                .map(|(limit, used)| limit.saturating_sub(used)),
            usage_bytes: memory.usage,
            working_set_bytes: memory.working_set,
            rss_bytes: memory.rss,
            page_faults: memory.page_faults,
            major_page_faults: memory.major_page_faults,
            psi: of.pressure.memory.map(psi),
        }),
        io: of.pressure.io.map(|io| IoStats {
            time: at(),
            psi: psi(io),
        }),
        swap: of.swap.map(|swap| SwapStats {
            time: at(),
            swap_available_bytes: swap.limit.map(|limit| limit.saturating_sub(swap.usage)),
            swap_usage_bytes: swap.usage,
        }),
    }
}

fn psi(of: Psi) -> PsiStats {
    let data = |line: super::model::PsiLine| PsiData {
        total: line.total_us.saturating_mul(1000),
        avg10: line.avg10,
        avg60: line.avg60,
        avg300: line.avg300,
    };
    PsiStats {
        full: data(of.full),
        some: data(of.some),
    }
}

fn network(interfaces: &[Interface], default: Option<&str>, at_ms: i64) -> Option<NetworkStats> {
    let stats = |of: &Interface| InterfaceStats {
        name: of.name.clone(),
        rx_bytes: Some(of.rx.bytes),
        rx_errors: Some(of.rx.errors),
        tx_bytes: Some(of.tx.bytes),
        tx_errors: Some(of.tx.errors),
    };
    let chosen = interfaces.iter().find(|i| Some(i.name.as_str()) == default);
    let chosen = chosen.or(interfaces.first())?;
    Some(NetworkStats {
        time: time(at_ms),
        default: stats(chosen),
        interfaces: interfaces.iter().map(stats).collect(),
    })
}

fn fs(of: &Fs) -> FsStats {
    part(of, of.used, of.inodes_used)
}

/// A part of a file system: its own use of the whole's space.
fn part(of: &Fs, used: Option<u64>, inodes_used: Option<u64>) -> FsStats {
    FsStats {
        time: time(of.at_ms),
        available_bytes: of.available,
        capacity_bytes: of.capacity,
        used_bytes: used,
        inodes_free: of.inodes_free,
        inodes: of.inodes,
        inodes_used,
    }
}

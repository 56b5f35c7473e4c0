//! Object of this node: its registration, and its status computed from facts.
//!
//! The input is the settings, facts about machine and runtime, pressure, the node as the API server last showed it. The
//! output is the desired node, its events, and the strategic merge patch between the two. Upstream: `initialNode`,
//! `setNodeStatus` with its setters, `reconcile…`, `nodeStatusHasChanged`, `PatchNodeStatus`.
//!
//! **Invariant:** the status starts as a copy of the API server's. Values of other components (conditions, attached
//! volumes, extended resources) stay, and values that are not known now are left as they are.
//!
//! **Invariant:** a transition has one time and one event, however long it takes until the API server hears of it
//! ([`Memory::pending`]).

mod conditions;
mod patch;
mod resources;

use ::core::net::IpAddr;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints,
    NodeFeatures, NodeRuntimeHandler, NodeSpec, NodeSwapStatus, NodeSystemInfo, Taint,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use conditions::{Pressure, Readiness};
pub use patch::{Change, Due, change, needs_update};
pub use resources::{devices_differ, pod_capacity, without_other_devices};

use crate::core::devices::Amounts;
use crate::core::volumes::known::InUse;
use crate::kubeletconfig::EvictionThreshold;
use crate::types::{Event, EventType, Stamp};

/// Version that the node reports: the Kubernetes release whose behaviour it has, and the agent's own version.
pub const KUBELET_VERSION: &str = concat!("v1.36.0-holdfast.", env!("CARGO_PKG_VERSION"));

/// Most bytes of a label's value.
const LABEL_VALUE: usize = 63;

/// Most names of one image that are listed.
const MAX_IMAGE_NAMES: usize = 5;

/// `status.declaredFeatures`: features that schedulers and API servers use on nodes that declare them only. Upstream:
/// `nodedeclaredfeatures`.
const DECLARED_FEATURES: &[&str] = &[
    "ExtendWebSocketsToKubelet",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];

/// The one that depends on a setting: the CPU of a Guaranteed pod cannot be resized where it has CPUs for itself.
const GUARANTEED_CPU_RESIZE: &str = "GuaranteedQoSPodCPUResize";

/// Returns what the node declares, sorted, as the API demands; the same as long as the agent runs.
fn declared_features(settings: &NodeSettings) -> Vec<String> {
    let fixed = DECLARED_FEATURES.iter().copied();
    let by_setting = Some(GUARANTEED_CPU_RESIZE).filter(|_| !settings.static_cpus);
    let mut declared: Vec<String> = fixed.chain(by_setting).map(str::to_owned).collect();
    declared.sort_unstable();
    declared
}

const LABEL_HOSTNAME: &str = "kubernetes.io/hostname";
const LABEL_OS: &str = "kubernetes.io/os";
const LABEL_ARCH: &str = "kubernetes.io/arch";
const LABEL_BETA_OS: &str = "beta.kubernetes.io/os";
const LABEL_BETA_ARCH: &str = "beta.kubernetes.io/arch";
const ATTACH_DETACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
const PROVIDED_IP: &str = "alpha.kubernetes.io/provided-node-ip";
const TAINT_UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
const TAINT_CLOUD: &str = "node.cloudprovider.kubernetes.io/uninitialized";

/// Labels that an existing node gets from this one.
const DEFAULT_LABELS: &[&str] = &[
    LABEL_HOSTNAME,
    LABEL_OS,
    LABEL_ARCH,
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    LABEL_BETA_OS,
    LABEL_BETA_ARCH,
];

/// Labels that are the agent's own: it knows better than anybody else what they have to be.
const OWN_LABELS: &[&str] = &[
    LABEL_HOSTNAME,
    LABEL_OS,
    LABEL_ARCH,
    LABEL_BETA_OS,
    LABEL_BETA_ARCH,
];

/// Settings of the node from the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSettings {
    /// Name of the object.
    pub name: String,
    /// Label and address `Hostname`.
    pub hostname: String,
    /// `registerNode`: whether the object is created when there is none.
    pub register: bool,
    /// `--node-labels`: given at creation only.
    pub labels: BTreeMap<String, String>,
    /// `registerWithTaints`: given at creation only.
    pub taints: Vec<Taint>,
    /// `registerSchedulable`.
    pub schedulable: bool,
    /// `providerID`.
    pub provider_id: Option<String>,
    /// `--cloud-provider=external`: addresses come from there, and pods wait until it has seen the node.
    pub external_cloud_provider: bool,
    /// `enableControllerAttachDetach`.
    pub controller_attach_detach: bool,
    /// `--node-ip`; an unspecified address only names the family that is preferred.
    pub node_ips: Vec<IpAddr>,
    /// Port of the kubelet's API; 0 for none.
    pub kubelet_port: u16,
    /// `maxPods`.
    pub max_pods: u32,
    /// `podsPerCore`; 0 for no limit.
    pub pods_per_core: u32,
    /// `systemReserved`, by resource name, in billionths.
    pub system_reserved: BTreeMap<String, i128>,
    /// `kubeReserved`, by resource name, in billionths.
    pub kube_reserved: BTreeMap<String, i128>,
    /// Hard eviction threshold of `memory.available`.
    pub eviction_memory: EvictionThreshold,
    /// Hard eviction threshold of `nodefs.available`.
    pub eviction_nodefs: EvictionThreshold,
    /// `nodeStatusMaxImages`; `None` for all.
    pub max_images: Option<usize>,
    /// `enforceNodeAllocatable` has `pods`: said once in an event.
    pub enforce_allocatable: bool,
    /// `nodeStatusUpdateFrequency`: how often the status is computed.
    pub update_frequency: Duration,
    /// `nodeStatusReportFrequency`: how often it is written when nothing changed.
    pub report_frequency: Duration,
    /// `nodeLeaseDurationSeconds`.
    pub lease_duration: Duration,
    /// `cpuManagerPolicy: static`: containers of Guaranteed pods may have CPUs for themselves.
    pub static_cpus: bool,
    /// `localStorageCapacityIsolation`: the node has an amount of `ephemeral-storage`.
    pub local_storage: bool,
}

impl NodeSettings {
    /// Upstream's defaults for a node of this name.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        Self {
            hostname: name.clone(),
            name,
            register: true,
            labels: BTreeMap::new(),
            taints: Vec::new(),
            schedulable: true,
            provider_id: None,
            external_cloud_provider: false,
            controller_attach_detach: true,
            node_ips: Vec::new(),
            kubelet_port: 10250,
            max_pods: 110,
            pods_per_core: 0,
            system_reserved: BTreeMap::new(),
            kube_reserved: BTreeMap::new(),
            eviction_memory: EvictionThreshold::Quantity(100 << 20),
            eviction_nodefs: EvictionThreshold::Fraction(0.1),
            max_images: Some(50),
            enforce_allocatable: true,
            update_frequency: Duration::from_secs(10),
            report_frequency: Duration::from_secs(300),
            lease_duration: Duration::from_secs(40),
            static_cpus: false,
            local_storage: true,
        }
    }
}

/// Facts about the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Logical processors.
    pub cpus: u64,
    /// Memory in bytes; `None` when it is not known.
    pub memory: Option<u64>,
    /// Swap in bytes; `None` when it is not known.
    pub swap: Option<u64>,
    /// Bytes reserved in huge pages, by the size of a page in bytes.
    pub hugepages: BTreeMap<u64, u64>,
    /// Size in bytes of the file system of the root directory; `None` when it is not known.
    pub ephemeral_storage: Option<u64>,
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// Identity the firmware gives.
    pub system_uuid: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// Release of the kernel.
    pub kernel_version: String,
    /// Name of the distribution.
    pub os_image: String,
}

/// Facts about the runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuntimeFacts {
    /// `containerd://1.6.20`.
    pub version: String,
    /// Handlers; empty when the runtime reports none.
    pub handlers: Vec<NodeRuntimeHandler>,
    /// Features; `None` when the runtime reports none.
    pub features: Option<NodeFeatures>,
}

/// An image as the runtime lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Names with digests.
    pub digests: Vec<String>,
    /// Names with tags.
    pub tags: Vec<String>,
    /// Bytes.
    pub size: u64,
}

/// Everything the status is computed from. What is not known now is `None`, and the status keeps what it says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The machine.
    pub machine: Machine,
    /// The runtime.
    pub runtime: Option<RuntimeFacts>,
    /// Its images, see [`image_list`].
    pub images: Option<Arc<Vec<ContainerImage>>>,
    /// The node's addresses, the main one first; empty when they are not known.
    pub addresses: Vec<IpAddr>,
    /// Volumes that are in use.
    pub volumes_in_use: Option<InUse>,
    /// Devices of device plugins; a resource that none has ever registered stays as others wrote it.
    pub devices: Amounts,
}

/// Facts remembered beside the node itself, also across restarts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Conditions whose status the API server does not show yet, with the time of their transition.
    pub pending: Vec<NodeCondition>,
    /// The boot whose event was recorded.
    pub boot_told: String,
    /// `spec.unschedulable` whose event was recorded.
    pub unschedulable: bool,
    /// Fields of the last patch that the API server did not keep: an old one drops fields it does not know.
    pub residue: Value,
}

/// Result of [`compute`].
#[derive(Clone, Debug)]
pub struct Computed {
    /// The node as it should be.
    pub node: Node,
    /// Events to emit.
    pub events: Vec<Event>,
    /// The new memory.
    pub memory: Memory,
}

/// The images for the node's status: the largest first. Upstream: `Images` and `sliceutils.byImageSize`.
pub fn image_list(mut images: Vec<Image>, max: Option<usize>) -> Vec<ContainerImage> {
    images.sort_by(|a, b| {
        (b.size.cmp(&a.size)).then_with(|| (&a.digests, &a.tags).cmp(&(&b.digests, &b.tags)))
    });
    images.truncate(max.unwrap_or(usize::MAX));
    let listed = images.into_iter().map(|image| {
        let names = image.digests.into_iter().chain(image.tags);
        ContainerImage {
            names: Some(names.take(MAX_IMAGE_NAMES).collect()),
            size_bytes: i64::try_from(image.size).ok(),
        }
    });
    listed.collect()
}

/// Returns whether a host name fits into a label. A node with a longer one goes without the label: servers refuse the whole
/// node otherwise, which is what becomes of it upstream.
pub fn has_hostname_label(hostname: &str) -> bool {
    hostname.len() <= LABEL_VALUE
}

/// The node as it is registered, without its status. Upstream: the first half of `initialNode`.
pub fn initial_node(settings: &NodeSettings) -> Node {
    let mut labels = BTreeMap::from([
        (LABEL_OS.to_owned(), "linux".to_owned()),
        (LABEL_ARCH.to_owned(), architecture().to_owned()),
    ]);
    if has_hostname_label(&settings.hostname) {
        labels.insert(LABEL_HOSTNAME.to_owned(), settings.hostname.clone());
    }
    labels.extend(settings.labels.clone());
    let mut taints = settings.taints.clone();
    let mut taint = |key: &str, value: Option<&str>| {
        if !taints
            .iter()
            .any(|t| t.key == key && t.effect == "NoSchedule")
        {
            taints.push(Taint {
                key: key.to_owned(),
                value: value.map(str::to_owned),
                effect: "NoSchedule".to_owned(),
                time_added: None,
            });
        }
    };
    if !settings.schedulable {
        taint(TAINT_UNSCHEDULABLE, None);
    }
    if settings.external_cloud_provider {
        taint(TAINT_CLOUD, Some("true"));
    }
    let mut annotations = BTreeMap::new();
    if settings.controller_attach_detach {
        annotations.insert(ATTACH_DETACH.to_owned(), "true".to_owned());
    }
    Node {
        metadata: ObjectMeta {
            name: Some(settings.name.clone()),
            labels: Some(labels),
            annotations: (!annotations.is_empty()).then_some(annotations),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: settings.provider_id.clone(),
            unschedulable: (!settings.schedulable).then_some(true),
            taints: (!taints.is_empty()).then_some(taints),
            ..NodeSpec::default()
        }),
        status: None,
    }
}

/// Returns an existing node with the parts of this one's registration that it takes over: the default labels and the
/// attach-detach annotation. All else is its owner's. Upstream: `tryRegisterWithAPIServer`; huge pages follow from
/// [`compute`].
pub fn reconcile(settings: &NodeSettings, existing: &Node) -> Node {
    let desired = initial_node(settings).metadata;
    let mut node = existing.clone();
    let wanted = desired.labels.unwrap_or_default();
    let labels = node.metadata.labels.get_or_insert_default();
    for label in DEFAULT_LABELS {
        match wanted.get(*label) {
            Some(value) if value.is_empty() => drop(labels.remove(*label)),
            Some(value) => drop(labels.insert((*label).to_owned(), value.clone())),
            None => {}
        }
    }
    let annotations = node.metadata.annotations.get_or_insert_default();
    match desired
        .annotations
        .as_ref()
        .and_then(|a| a.get(ATTACH_DETACH))
    {
        Some(value) => drop(annotations.insert(ATTACH_DETACH.to_owned(), value.clone())),
        None => drop(annotations.remove(ATTACH_DETACH)),
    }
    node
}

/// A label of the agent's own that another client has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorrectedLabel {
    /// The label.
    pub name: String,
    /// Value on the API server; `None` when it is gone.
    pub shown: Option<String>,
    /// Desired value.
    pub wanted: String,
}

/// Gives `node` back the labels that are the agent's own, and returns those that were not as they have to be: system,
/// architecture and host name; their beta names only where `--node-labels` gives them. Upstream does this when the node
/// registers only ([`reconcile`]), as this agent does with all other labels.
pub fn correct_labels(settings: &NodeSettings, node: &mut Node) -> Vec<CorrectedLabel> {
    let desired = initial_node(settings).metadata.labels.unwrap_or_default();
    let labels = node.metadata.labels.get_or_insert_default();
    let mut corrected = Vec::new();
    for name in OWN_LABELS {
        let Some(wanted) = desired.get(*name).filter(|wanted| !wanted.is_empty()) else {
            continue;
        };
        let shown = labels.insert((*name).to_owned(), wanted.clone());
        if shown.as_ref() != Some(wanted) {
            corrected.push(CorrectedLabel {
                name: (*name).to_owned(),
                shown,
                wanted: wanted.clone(),
            });
        }
    }
    corrected
}

/// The node with the status it should have, from the node as it is. Upstream: `setNodeStatus`.
pub fn compute(
    base: &Node,
    settings: &NodeSettings,
    facts: &Facts,
    pressure: Pressure,
    readiness: &Readiness,
    memory: &Memory,
    now: Stamp,
) -> Computed {
    let mut node = base.clone();
    let mut memory = memory.clone();
    let mut events = Vec::new();
    set_addresses(&mut node, settings, facts);
    let status = node.status.get_or_insert_default();

    let capacity = resources::capacity(status.capacity.as_ref(), settings, &facts.machine);
    let allocatable = resources::allocatable(&capacity, settings, &facts.machine);
    let (capacity, allocatable) = resources::with_devices(capacity, allocatable, &facts.devices);
    status.allocatable = Some(allocatable);
    status.capacity = Some(capacity);

    let known = status.node_info.clone().unwrap_or_default();
    if let Some(event) = rebooted(&settings.name, &known, facts, &mut memory) {
        events.push(event);
    }
    status.node_info = Some(node_info(known, facts));
    if let Some(runtime) = &facts.runtime {
        status.runtime_handlers = filled(runtime.handlers.clone());
        status.features.clone_from(&runtime.features);
    }
    if let Some(images) = &facts.images {
        status.images = filled(Vec::clone(images));
    }
    status.declared_features = filled(declared_features(settings));
    status.daemon_endpoints = Some(NodeDaemonEndpoints {
        kubelet_endpoint: Some(DaemonEndpoint {
            port: i32::from(settings.kubelet_port),
        }),
    });
    if let Some(in_use) = &facts.volumes_in_use {
        status.volumes_in_use = filled(in_use.shown(status.volumes_in_use.as_deref()));
    }

    let told = conditions::set(
        status,
        settings.local_storage,
        pressure,
        readiness,
        &memory.pending,
        time(now),
    );
    memory.pending = told.pending;
    let changed = told
        .events
        .into_iter()
        .map(|reason| status_event(&settings.name, reason));
    events.extend(changed);
    events.extend(schedulable(&node, settings, &mut memory));
    Computed {
        node,
        events,
        memory,
    }
}

/// The event about a cordon or its end; at most one per change.
fn schedulable(node: &Node, settings: &NodeSettings, memory: &mut Memory) -> Option<Event> {
    let now = (node.spec.as_ref()).is_some_and(|spec| spec.unschedulable == Some(true));
    if now == memory.unschedulable {
        return None;
    }
    memory.unschedulable = now;
    let reason = if now {
        "NodeNotSchedulable"
    } else {
        "NodeSchedulable"
    };
    Some(status_event(&settings.name, reason))
}

/// Upstream: `recordNodeStatusEvent`.
fn status_event(name: &str, reason: &str) -> Event {
    Event::node(
        EventType::Normal,
        reason,
        format!("Node {name} status is now: {reason}"),
    )
}

fn rebooted(
    name: &str,
    known: &NodeSystemInfo,
    facts: &Facts,
    memory: &mut Memory,
) -> Option<Event> {
    let boot = &facts.machine.boot_id;
    let differs = !known.boot_id.is_empty() && known.boot_id != *boot;
    if !differs || memory.boot_told == *boot {
        return None;
    }
    memory.boot_told.clone_from(boot);
    Some(Event::node(
        EventType::Warning,
        "Rebooted",
        format!("Node {name} has been rebooted, boot id: {boot}"),
    ))
}

fn node_info(known: NodeSystemInfo, facts: &Facts) -> NodeSystemInfo {
    let machine = &facts.machine;
    NodeSystemInfo {
        machine_id: machine.machine_id.clone(),
        system_uuid: machine.system_uuid.clone(),
        boot_id: machine.boot_id.clone(),
        kernel_version: machine.kernel_version.clone(),
        os_image: machine.os_image.clone(),
        container_runtime_version: match &facts.runtime {
            Some(runtime) => runtime.version.clone(),
            None => known.container_runtime_version,
        },
        kubelet_version: KUBELET_VERSION.to_owned(),
        // Upstream has stopped to guess it.
        kube_proxy_version: String::new(),
        operating_system: "linux".to_owned(),
        architecture: architecture().to_owned(),
        swap: swap_status(machine.swap, known.swap),
    }
}

/// Returns the swap of the node, or what is `known` of it while `total` (bytes) cannot be read. A machine without swap has
/// none: servers refuse a capacity that is not positive. Upstream: `MachineInfo`, which never takes it back.
fn swap_status(total: Option<u64>, known: Option<NodeSwapStatus>) -> Option<NodeSwapStatus> {
    let capacity = match total {
        Some(bytes) => i64::try_from(bytes).ok(),
        None => known.and_then(|swap| swap.capacity),
    };
    capacity
        .filter(|bytes| *bytes > 0)
        .map(|bytes| NodeSwapStatus {
            capacity: Some(bytes),
        })
}

/// Upstream: `NodeAddress` without a cloud provider of its own.
fn set_addresses(node: &mut Node, settings: &NodeSettings, facts: &Facts) {
    let given = settings.node_ips.iter().filter(|ip| !ip.is_unspecified());
    let given: Vec<String> = given.map(ToString::to_string).collect();
    if settings.external_cloud_provider && !given.is_empty() {
        let annotations = node.metadata.annotations.get_or_insert_default();
        annotations.insert(PROVIDED_IP.to_owned(), given.join(","));
    } else if let Some(annotations) = &mut node.metadata.annotations {
        // The provider would go on looking for an address that is not asked for any more.
        annotations.remove(PROVIDED_IP);
    }
    let status = node.status.get_or_insert_default();
    let has_some = status.addresses.as_ref().is_some_and(|a| !a.is_empty());
    if has_some && (settings.external_cloud_provider || facts.addresses.is_empty()) {
        return;
    }
    let address = |type_: &str, address: String| NodeAddress {
        type_: type_.to_owned(),
        address,
    };
    // What the agent would guess may be another address than the provider's, and both would be used for a while.
    let is_known = !settings.external_cloud_provider || !settings.node_ips.is_empty();
    let ips = facts.addresses.iter().filter(|_| is_known);
    let ips = ips.map(ToString::to_string);
    let mut addresses: Vec<_> = ips.map(|ip| address("InternalIP", ip)).collect();
    addresses.push(address("Hostname", settings.hostname.clone()));
    status.addresses = Some(addresses);
}

/// The architecture of this machine by Go's name.
pub fn architecture() -> &'static str {
    if cfg!(target_arch = "x86_64") {
        "amd64"
    } else if cfg!(target_arch = "aarch64") {
        "arm64"
    } else if cfg!(target_arch = "arm") {
        "arm"
    } else if cfg!(target_arch = "riscv64") {
        "riscv64"
    } else if cfg!(target_arch = "s390x") {
        "s390x"
    } else if cfg!(all(target_arch = "powerpc64", target_endian = "little")) {
        "ppc64le"
    } else {
        "386"
    }
}

fn filled<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

/// The wall clock to the second, as the API server keeps it.
fn time(now: Stamp) -> Time {
    let second = now.wall_ms.div_euclid(1000);
    Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap_or_default())
}

#[cfg(test)]
mod tests;

//! The messages of `k8s.io/kubelet/pkg/apis/podresources`, v1 and v1alpha1: field numbers and types are the protocol.
//! v1alpha1 is a subset of v1, so its answers are reduced ones of v1.

use prost::Message;

/// `AllocatableResourcesRequest`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AllocatableResourcesRequest {}

/// `AllocatableResourcesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct AllocatableResourcesResponse {
    /// Devices that can be given to containers.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<ContainerDevices>,
    /// CPUs that can be given to one container alone.
    #[prost(int64, repeated, tag = "2")]
    pub cpu_ids: Vec<i64>,
    /// Memory that can be given to one container alone.
    #[prost(message, repeated, tag = "3")]
    pub memory: Vec<ContainerMemory>,
}

/// `ListPodResourcesRequest`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListPodResourcesRequest {}

/// `ListPodResourcesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ListPodResourcesResponse {
    /// The active pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<PodResources>,
}

/// `GetPodResourcesRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct GetPodResourcesRequest {
    /// `metadata.name`.
    #[prost(string, tag = "1")]
    pub pod_name: String,
    /// `metadata.namespace`.
    #[prost(string, tag = "2")]
    pub pod_namespace: String,
}

/// `GetPodResourcesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct GetPodResourcesResponse {
    /// The pod.
    #[prost(message, optional, tag = "1")]
    pub pod_resources: Option<PodResources>,
}

/// `PodResources`.
#[derive(Clone, PartialEq, Message)]
pub struct PodResources {
    /// `metadata.name`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// `metadata.namespace`.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// Sidecars and main containers.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// `ContainerResources`.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerResources {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Devices given to it.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
    /// CPUs it has for itself.
    #[prost(int64, repeated, tag = "3")]
    pub cpu_ids: Vec<i64>,
    /// Memory it has for itself.
    #[prost(message, repeated, tag = "4")]
    pub memory: Vec<ContainerMemory>,
    /// Resources of its claims.
    #[prost(message, repeated, tag = "5")]
    pub dynamic_resources: Vec<DynamicResource>,
}

/// `ContainerMemory`.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerMemory {
    /// `memory` or `hugepages-<size>`.
    #[prost(string, tag = "1")]
    pub memory_type: String,
    /// Bytes.
    #[prost(uint64, tag = "2")]
    pub size: u64,
    /// NUMA nodes of the memory.
    #[prost(message, optional, tag = "3")]
    pub topology: Option<TopologyInfo>,
}

/// `ContainerDevices`.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerDevices {
    /// The resource, like `example.com/gpu`.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// The devices.
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
    /// NUMA nodes of the devices; not in v1alpha1.
    #[prost(message, optional, tag = "3")]
    pub topology: Option<TopologyInfo>,
}

/// `TopologyInfo`.
#[derive(Clone, PartialEq, Message)]
pub struct TopologyInfo {
    /// The nodes.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NumaNode>,
}

/// `NUMANode`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NumaNode {
    /// Its number.
    #[prost(int64, tag = "1")]
    pub id: i64,
}

/// `DynamicResource`.
#[derive(Clone, PartialEq, Message)]
pub struct DynamicResource {
    /// Name of the claim.
    #[prost(string, tag = "2")]
    pub claim_name: String,
    /// Namespace of the claim.
    #[prost(string, tag = "3")]
    pub claim_namespace: String,
    /// Resources of the claim.
    #[prost(message, repeated, tag = "4")]
    pub claim_resources: Vec<ClaimResource>,
}

/// `ClaimResource`.
#[derive(Clone, PartialEq, Message)]
pub struct ClaimResource {
    /// CDI devices.
    #[prost(message, repeated, tag = "1")]
    pub cdi_devices: Vec<CdiDevice>,
    /// The driver.
    #[prost(string, tag = "2")]
    pub driver_name: String,
    /// The pool.
    #[prost(string, tag = "3")]
    pub pool_name: String,
    /// The device in the pool.
    #[prost(string, tag = "4")]
    pub device_name: String,
}

/// `CDIDevice`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CdiDevice {
    /// Its qualified name, like `vendor.com/gpu=0`.
    #[prost(string, tag = "1")]
    pub name: String,
}

//! The messages of `k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1`: field numbers and types are the protocol.

use std::collections::BTreeMap;

use prost::Message;

/// The only version that is spoken.
pub const VERSION: &str = "v1beta1";
/// Health of a device that can be used.
pub const HEALTHY: &str = "Healthy";

/// Methods of `v1beta1.DevicePlugin`.
pub mod method {
    /// `GetDevicePluginOptions`.
    pub const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
    /// `ListAndWatch`.
    pub const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
    /// `GetPreferredAllocation`.
    pub const PREFERRED: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
    /// `Allocate`.
    pub const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";
    /// `PreStartContainer`.
    pub const PRE_START: &str = "/v1beta1.DevicePlugin/PreStartContainer";
}

/// `Empty`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Empty {}

/// `DevicePluginOptions`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct DevicePluginOptions {
    /// It wants to be called before each start.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// It may be asked which devices it prefers.
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// `RegisterRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegisterRequest {
    /// Version of the API.
    #[prost(string, tag = "1")]
    pub version: String,
    /// File name of the plugin's socket.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// The resource.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// Ignored: the plugin is asked.
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// `ListAndWatchResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ListAndWatchResponse {
    /// All devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
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

/// `Device`.
#[derive(Clone, PartialEq, Message)]
pub struct Device {
    /// Its ID.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`] or something else.
    #[prost(string, tag = "2")]
    pub health: String,
    /// NUMA nodes of the device.
    #[prost(message, optional, tag = "3")]
    pub topology: Option<TopologyInfo>,
}

/// `PreStartContainerRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreStartContainerRequest {
    /// The container's devices.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// `PreferredAllocationRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct PreferredAllocationRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerPreferredAllocationRequest>,
}

/// `ContainerPreferredAllocationRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerPreferredAllocationRequest {
    /// Devices to choose from.
    #[prost(string, repeated, tag = "1")]
    pub available_device_ids: Vec<String>,
    /// Those of them that it gets in any case.
    #[prost(string, repeated, tag = "2")]
    pub must_include_device_ids: Vec<String>,
    /// Number of devices that the container gets.
    #[prost(int32, tag = "3")]
    pub allocation_size: i32,
}

/// `PreferredAllocationResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct PreferredAllocationResponse {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerPreferredAllocationResponse>,
}

/// `ContainerPreferredAllocationResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerPreferredAllocationResponse {
    /// The devices.
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// `AllocateRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// `ContainerAllocateRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerAllocateRequest {
    /// The devices.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// `AllocateResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateResponse {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// `ContainerAllocateResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocateResponse {
    /// Environment.
    #[prost(btree_map = "string, string", tag = "1")]
    pub envs: BTreeMap<String, String>,
    /// Mounts.
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
    /// Device nodes.
    #[prost(message, repeated, tag = "3")]
    pub devices: Vec<DeviceSpec>,
    /// Annotations.
    #[prost(btree_map = "string, string", tag = "4")]
    pub annotations: BTreeMap<String, String>,
    /// CDI devices.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// `CDIDevice`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CdiDevice {
    /// Its qualified name.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// `Mount`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Mount {
    /// Path in the container.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Path on the node.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// Read-only.
    #[prost(bool, tag = "3")]
    pub read_only: bool,
}

/// `DeviceSpec`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceSpec {
    /// Path in the container.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Path on the node.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// Some of `r`, `w`, `m`.
    #[prost(string, tag = "3")]
    pub permissions: String,
}

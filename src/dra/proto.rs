//! The messages of `k8s.io/kubelet/pkg/apis/dra`, v1 and v1beta1: field numbers and types are the protocol. Both versions have
//! the same messages, but for the share of a device.

use std::collections::BTreeMap;

use prost::Message;

/// The services that are spoken, as a plugin lists them among its versions, and how their methods begin.
pub const SERVICES: [(&str, &str); 2] = [
    ("v1.DRAPlugin", "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"),
    (
        "v1beta1.DRAPlugin",
        "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/",
    ),
];

/// The services that report the health of devices, likewise.
pub const HEALTH_SERVICES: [(&str, &str); 2] = [
    (
        "v1.DRAResourceHealth",
        "/v1.DRAResourceHealth/NodeWatchResources",
    ),
    (
        "v1alpha1.DRAResourceHealth",
        "/v1alpha1.DRAResourceHealth/NodeWatchResources",
    ),
];

/// Values of `HealthStatus`.
pub mod health {
    /// `HEALTHY`.
    pub const HEALTHY: i32 = 1;
    /// `UNHEALTHY`.
    pub const UNHEALTHY: i32 = 2;
}

/// Methods of a service.
pub mod method {
    /// `NodePrepareResources`.
    pub const PREPARE: &str = "NodePrepareResources";
    /// `NodeUnprepareResources`.
    pub const UNPREPARE: &str = "NodeUnprepareResources";
}

/// `Claim`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Claim {
    /// Namespace.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// UID.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// Name.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// `NodePrepareResourcesRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct NodePrepareResourcesRequest {
    /// The claims.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// `NodePrepareResourcesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct NodePrepareResourcesResponse {
    /// Answers by UID of the claim.
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, NodePrepareResourceResponse>,
}

/// `NodePrepareResourceResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct NodePrepareResourceResponse {
    /// Devices of the claim.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    /// The error; empty for success.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// `Device`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Device {
    /// Requests of the claim; none stands for all.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    /// Pool.
    #[prost(string, tag = "2")]
    pub pool_name: String,
    /// Name in the pool.
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// Qualified names of CDI devices.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
    /// Share of the device; not in v1beta1.
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

/// `NodeUnprepareResourcesRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct NodeUnprepareResourcesRequest {
    /// The claims.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// `NodeUnprepareResourcesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct NodeUnprepareResourcesResponse {
    /// Answers by UID of the claim.
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, NodeUnprepareResourceResponse>,
}

/// `NodeUnprepareResourceResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeUnprepareResourceResponse {
    /// The error; empty for success.
    #[prost(string, tag = "1")]
    pub error: String,
}

/// `NodeWatchResourcesRequest`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NodeWatchResourcesRequest {}

/// `NodeWatchResourcesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct NodeWatchResourcesResponse {
    /// All devices of the driver.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<DeviceHealth>,
}

/// `DeviceIdentifier`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceIdentifier {
    /// Pool.
    #[prost(string, tag = "1")]
    pub pool_name: String,
    /// Name in the pool.
    #[prost(string, tag = "2")]
    pub device_name: String,
}

/// `DeviceHealth`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceHealth {
    /// The device.
    #[prost(message, optional, tag = "1")]
    pub device: Option<DeviceIdentifier>,
    /// See [`health`]; anything else stands for unknown.
    #[prost(int32, tag = "2")]
    pub health: i32,
    /// Unix time of the check.
    #[prost(int64, tag = "3")]
    pub last_updated_time: i64,
    /// Seconds until it is unknown again; not in v1alpha1.
    #[prost(int64, tag = "4")]
    pub health_check_timeout_seconds: i64,
    /// More about it; not in v1alpha1.
    #[prost(string, tag = "5")]
    pub message: String,
}

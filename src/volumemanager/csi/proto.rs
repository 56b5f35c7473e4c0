//! The messages of CSI v1 (`csi.v1`: Identity and Node) and of plugin registration (`pluginregistration`), as a
//! node needs them: field numbers and types are the protocol.
//!
//! **Invariant:** no `Debug` output has secrets, mount flags, or the values of contexts, which may hold tokens.

use std::collections::BTreeMap;
use std::fmt;

use prost::Message;

/// Full names of the methods: paths of the calls, and label `method_name` of the metrics.
pub mod method {
    /// Returns the identity of a plugin.
    pub const GET_PLUGIN_INFO: &str = "/csi.v1.Identity/GetPluginInfo";
    /// Returns the services of a plugin beside the node service.
    pub const GET_PLUGIN_CAPABILITIES: &str = "/csi.v1.Identity/GetPluginCapabilities";
    /// Returns whether a plugin is ready.
    pub const PROBE: &str = "/csi.v1.Identity/Probe";
    /// Makes a volume reachable on the node.
    pub const NODE_STAGE_VOLUME: &str = "/csi.v1.Node/NodeStageVolume";
    /// Undoes it.
    pub const NODE_UNSTAGE_VOLUME: &str = "/csi.v1.Node/NodeUnstageVolume";
    /// Mounts a volume for a pod.
    pub const NODE_PUBLISH_VOLUME: &str = "/csi.v1.Node/NodePublishVolume";
    /// Undoes it.
    pub const NODE_UNPUBLISH_VOLUME: &str = "/csi.v1.Node/NodeUnpublishVolume";
    /// Returns capacity and usage of a volume.
    pub const NODE_GET_VOLUME_STATS: &str = "/csi.v1.Node/NodeGetVolumeStats";
    /// Grows the file system of a volume.
    pub const NODE_EXPAND_VOLUME: &str = "/csi.v1.Node/NodeExpandVolume";
    /// Returns the capabilities of the node service.
    pub const NODE_GET_CAPABILITIES: &str = "/csi.v1.Node/NodeGetCapabilities";
    /// Returns the driver's ID of this node.
    pub const NODE_GET_INFO: &str = "/csi.v1.Node/NodeGetInfo";
    /// Returns the kind of plugin on a registration socket.
    pub const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
    /// Notifies a plugin whether it was registered.
    pub const NOTIFY_REGISTRATION_STATUS: &str =
        "/pluginregistration.Registration/NotifyRegistrationStatus";
}

/// A message without fields.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Empty {}

/// `GetPluginInfoResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct GetPluginInfoResponse {
    /// The driver's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its version, in its own words.
    #[prost(string, tag = "2")]
    pub vendor_version: String,
    /// Further information about the driver.
    #[prost(btree_map = "string, string", tag = "3")]
    pub manifest: BTreeMap<String, String>,
}

/// `GetPluginCapabilitiesResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct GetPluginCapabilitiesResponse {
    /// Its services.
    #[prost(message, repeated, tag = "1")]
    pub capabilities: Vec<PluginCapability>,
}

/// `PluginCapability`: one of its fields is set.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct PluginCapability {
    /// `Service`: 1 controller, 2 accessibility constraints, 3 group controller, 4 snapshot metadata.
    #[prost(message, optional, tag = "1")]
    pub service: Option<TypeOnly>,
    /// `VolumeExpansion`: 1 online, 2 offline.
    #[prost(message, optional, tag = "2")]
    pub volume_expansion: Option<TypeOnly>,
}

/// A message that wraps a number out of an enumeration.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct TypeOnly {
    /// The number.
    #[prost(int32, tag = "1")]
    pub r#type: i32,
}

/// `ProbeResponse`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ProbeResponse {
    /// True if it is ready; ready when unset.
    #[prost(message, optional, tag = "1")]
    pub ready: Option<bool>,
}

/// `VolumeCapability`: `block` or `mount`, and `access_mode`.
#[derive(Clone, PartialEq, Message)]
pub struct VolumeCapability {
    /// Files or a device.
    #[prost(oneof = "AccessType", tags = "1, 2")]
    pub access_type: Option<AccessType>,
    /// Access mode of the volume.
    #[prost(message, optional, tag = "3")]
    pub access_mode: Option<AccessMode>,
}

/// Kind of access to a volume.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum AccessType {
    /// As a device.
    #[prost(message, tag = "1")]
    Block(Empty),
    /// As files.
    #[prost(message, tag = "2")]
    Mount(MountVolume),
}

/// `VolumeCapability.MountVolume`.
#[derive(Clone, PartialEq, Eq, Message)]
#[prost(skip_debug)]
pub struct MountVolume {
    /// File system; the driver's choice when empty.
    #[prost(string, tag = "1")]
    pub fs_type: String,
    /// Options for mounting it.
    #[prost(string, repeated, tag = "2")]
    pub mount_flags: Vec<String>,
    /// Group that is to have access, a decimal number; only with `VOLUME_MOUNT_GROUP`.
    #[prost(string, tag = "3")]
    pub volume_mount_group: String,
}

impl fmt::Debug for MountVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MountVolume")
            .field("fs_type", &self.fs_type)
            .field("mount_flags", &Hidden(self.mount_flags.len()))
            .field("volume_mount_group", &self.volume_mount_group)
            .finish()
    }
}

/// `VolumeCapability.AccessMode`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AccessMode {
    /// The mode.
    #[prost(enumeration = "Mode", tag = "1")]
    pub mode: i32,
}

/// `VolumeCapability.AccessMode.Mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Mode {
    /// None.
    Unknown = 0,
    /// One node, read and written there.
    SingleNodeWriter = 1,
    /// One node, only read.
    SingleNodeReaderOnly = 2,
    /// Many nodes, only read.
    MultiNodeReaderOnly = 3,
    /// Many nodes, written on one.
    MultiNodeSingleWriter = 4,
    /// Many nodes, written on all.
    MultiNodeMultiWriter = 5,
    /// One pod of one node; only with `SINGLE_NODE_MULTI_WRITER`.
    SingleNodeSingleWriter = 6,
    /// Many pods of one node; only with `SINGLE_NODE_MULTI_WRITER`.
    SingleNodeMultiWriter = 7,
}

/// `CapacityRange`, in bytes; 0 is no bound.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct CapacityRange {
    /// At least.
    #[prost(int64, tag = "1")]
    pub required_bytes: i64,
    /// At most.
    #[prost(int64, tag = "2")]
    pub limit_bytes: i64,
}

/// `NodeStageVolumeRequest`.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct NodeStageVolumeRequest {
    /// The volume's handle.
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// Result of attaching the volume.
    #[prost(btree_map = "string, string", tag = "2")]
    pub publish_context: BTreeMap<String, String>,
    /// Absolute path.
    #[prost(string, tag = "3")]
    pub staging_target_path: String,
    /// Intended use of the volume.
    #[prost(message, optional, tag = "4")]
    pub volume_capability: Option<VolumeCapability>,
    /// Content of the secret that the volume names.
    #[prost(btree_map = "string, string", tag = "5")]
    pub secrets: BTreeMap<String, String>,
    /// Attributes of the volume.
    #[prost(btree_map = "string, string", tag = "6")]
    pub volume_context: BTreeMap<String, String>,
}

impl fmt::Debug for NodeStageVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeStageVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("publish_context", &Keys(&self.publish_context))
            .field("staging_target_path", &self.staging_target_path)
            .field("volume_capability", &self.volume_capability)
            .field("secrets", &Hidden(self.secrets.len()))
            .field("volume_context", &Keys(&self.volume_context))
            .finish()
    }
}

/// `NodeUnstageVolumeRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeUnstageVolumeRequest {
    /// The volume's handle.
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// Path where it was staged.
    #[prost(string, tag = "2")]
    pub staging_target_path: String,
}

/// `NodePublishVolumeRequest`.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct NodePublishVolumeRequest {
    /// The volume's handle.
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// Result of attaching the volume.
    #[prost(btree_map = "string, string", tag = "2")]
    pub publish_context: BTreeMap<String, String>,
    /// Path where it was staged; empty if the driver does not stage.
    #[prost(string, tag = "3")]
    pub staging_target_path: String,
    /// Path to publish at. The driver makes it; its parent exists.
    #[prost(string, tag = "4")]
    pub target_path: String,
    /// Intended use of the volume.
    #[prost(message, optional, tag = "5")]
    pub volume_capability: Option<VolumeCapability>,
    /// True if this mount must be read-only.
    #[prost(bool, tag = "6")]
    pub readonly: bool,
    /// Content of the secret that the volume names.
    #[prost(btree_map = "string, string", tag = "7")]
    pub secrets: BTreeMap<String, String>,
    /// Attributes of the volume, and what is told of the pod.
    #[prost(btree_map = "string, string", tag = "8")]
    pub volume_context: BTreeMap<String, String>,
}

impl fmt::Debug for NodePublishVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodePublishVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("publish_context", &Keys(&self.publish_context))
            .field("staging_target_path", &self.staging_target_path)
            .field("target_path", &self.target_path)
            .field("volume_capability", &self.volume_capability)
            .field("readonly", &self.readonly)
            .field("secrets", &Hidden(self.secrets.len()))
            .field("volume_context", &Keys(&self.volume_context))
            .finish()
    }
}

/// `NodeUnpublishVolumeRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeUnpublishVolumeRequest {
    /// The volume's handle.
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// Path where it was published.
    #[prost(string, tag = "2")]
    pub target_path: String,
}

/// `NodeGetVolumeStatsRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeGetVolumeStatsRequest {
    /// The volume's handle.
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// Path where it was published.
    #[prost(string, tag = "2")]
    pub volume_path: String,
    /// Path where it was staged; empty if the driver does not stage.
    #[prost(string, tag = "3")]
    pub staging_target_path: String,
}

/// `NodeGetVolumeStatsResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeGetVolumeStatsResponse {
    /// Bytes, inodes, or both.
    #[prost(message, repeated, tag = "1")]
    pub usage: Vec<VolumeUsage>,
    /// Condition of the volume; only with `VOLUME_CONDITION`.
    #[prost(message, optional, tag = "2")]
    pub volume_condition: Option<VolumeCondition>,
}

/// `VolumeUsage`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct VolumeUsage {
    /// Left.
    #[prost(int64, tag = "1")]
    pub available: i64,
    /// All in all.
    #[prost(int64, tag = "2")]
    pub total: i64,
    /// In use.
    #[prost(int64, tag = "3")]
    pub used: i64,
    /// Of what.
    #[prost(enumeration = "UsageUnit", tag = "4")]
    pub unit: i32,
}

/// `VolumeUsage.Unit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum UsageUnit {
    /// None.
    Unknown = 0,
    /// Bytes.
    Bytes = 1,
    /// Inodes.
    Inodes = 2,
}

/// `VolumeCondition`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct VolumeCondition {
    /// True if the volume has a problem.
    #[prost(bool, tag = "1")]
    pub abnormal: bool,
    /// What, for people.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// `NodeExpandVolumeRequest`.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct NodeExpandVolumeRequest {
    /// The volume's handle.
    #[prost(string, tag = "1")]
    pub volume_id: String,
    /// Path where it is published.
    #[prost(string, tag = "2")]
    pub volume_path: String,
    /// The size it is to have.
    #[prost(message, optional, tag = "3")]
    pub capacity_range: Option<CapacityRange>,
    /// Path where it is staged; empty if the driver does not stage.
    #[prost(string, tag = "4")]
    pub staging_target_path: String,
    /// Use of the volume.
    #[prost(message, optional, tag = "5")]
    pub volume_capability: Option<VolumeCapability>,
    /// Content of the secret that the volume names.
    #[prost(btree_map = "string, string", tag = "6")]
    pub secrets: BTreeMap<String, String>,
}

impl fmt::Debug for NodeExpandVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeExpandVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("volume_path", &self.volume_path)
            .field("capacity_range", &self.capacity_range)
            .field("staging_target_path", &self.staging_target_path)
            .field("volume_capability", &self.volume_capability)
            .field("secrets", &Hidden(self.secrets.len()))
            .finish()
    }
}

/// `NodeExpandVolumeResponse`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NodeExpandVolumeResponse {
    /// The size it has now in bytes; 0 when the driver does not say.
    #[prost(int64, tag = "1")]
    pub capacity_bytes: i64,
}

/// `NodeGetCapabilitiesResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NodeGetCapabilitiesResponse {
    /// Capabilities of the node service.
    #[prost(message, repeated, tag = "1")]
    pub capabilities: Vec<NodeServiceCapability>,
}

/// `NodeServiceCapability`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NodeServiceCapability {
    /// `RPC`, whose type is a [`NodeRpc`].
    #[prost(message, optional, tag = "1")]
    pub rpc: Option<TypeOnly>,
}

/// `NodeServiceCapability.RPC.Type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum NodeRpc {
    /// None.
    Unknown = 0,
    /// Volumes are staged before they are published.
    StageUnstageVolume = 1,
    /// Tells what volumes have and use.
    GetVolumeStats = 2,
    /// Grows file systems.
    ExpandVolume = 3,
    /// Tells how volumes are.
    VolumeCondition = 4,
    /// Knows the access modes for one and for many pods of a node.
    SingleNodeMultiWriter = 5,
    /// Gives files to a group when it mounts.
    VolumeMountGroup = 6,
}

/// `NodeGetInfoResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct NodeGetInfoResponse {
    /// ID of this node, as the driver has it.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Number of volumes that can be attached to it; 0 is no limit.
    #[prost(int64, tag = "2")]
    pub max_volumes_per_node: i64,
    /// Topology of the node.
    #[prost(message, optional, tag = "3")]
    pub accessible_topology: Option<Topology>,
}

/// `Topology`.
#[derive(Clone, PartialEq, Message)]
pub struct Topology {
    /// Labels.
    #[prost(btree_map = "string, string", tag = "1")]
    pub segments: BTreeMap<String, String>,
}

/// `PluginInfo`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PluginInfo {
    /// `CSIPlugin`, `DevicePlugin` or `DRAPlugin`.
    #[prost(string, tag = "1")]
    pub r#type: String,
    /// Its name among those of its type.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Socket of its own service; the one it registers by when empty.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// Versions of its service.
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// `RegistrationStatus`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatus {
    /// True if the plugin was registered.
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    /// Reason for the refusal.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// Something that is not shown, and how much of it there is.
struct Hidden(usize);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} hidden>", self.0)
    }
}

/// The keys of a map whose values are not shown.
struct Keys<'a>(&'a BTreeMap<String, String>);

impl fmt::Debug for Keys<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

//! A CSI driver's services, one method per call.
//!
//! In: requests. Out: answers that are what the protocol demands, or a [`CsiError`] that names the driver and the
//! call, and tells whether it may have taken effect. Each call counts in `csi_operations_seconds`.
//!
//! Each call has a connection of its own, so that a driver that restarted is found again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::time::Instant;
use tonic::Code;

use super::proto::{
    Empty, GetPluginCapabilitiesResponse, GetPluginInfoResponse, NodeExpandVolumeRequest,
    NodeExpandVolumeResponse, NodeGetCapabilitiesResponse, NodeGetInfoResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodeRpc,
    NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, ProbeResponse,
    UsageUnit, method,
};
use super::rpc::{Failure, Socket};
use crate::types::metrics::{CsiLabel, Metrics};
use crate::volumemanager::remote::{RemoteError, Usage};

/// Deadline of a driver's call; upstream's `csiTimeout`.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A driver on its socket. Cheap to clone.
#[derive(Clone)]
pub struct CsiClient {
    driver: Arc<str>,
    socket: Socket,
    deadline: Duration,
    metrics: Metrics,
}

impl std::fmt::Debug for CsiClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CsiClient")
            .field("driver", &self.driver)
            .field("socket", &self.socket.path())
            .finish_non_exhaustive()
    }
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CSI driver {driver}: {call}: {message}")]
pub struct CsiError {
    /// The driver.
    pub driver: String,
    /// The call, as `NodeStageVolume`.
    pub call: &'static str,
    /// The driver's code, or the one that a gRPC client gives to such a failure.
    pub code: Code,
    /// The driver's own words, or what is wrong with its answer.
    pub message: String,
    effect: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    NotSent,
    None,
    Unknown,
}

impl CsiError {
    /// Returns whether the call certainly took no effect and is not in progress; upstream's `isFinalError`.
    pub fn is_final(&self) -> bool {
        self.effect != Effect::Unknown
    }

    /// Returns whether nothing listens on the driver's socket: the call was not sent.
    pub fn is_unreachable(&self) -> bool {
        self.effect == Effect::NotSent
    }
}

/// `Waiting` while nobody listens, `Failed` for final codes, `Uncertain` for all others.
impl From<CsiError> for RemoteError {
    fn from(error: CsiError) -> Self {
        let text = error.to_string();
        match error.effect {
            Effect::NotSent => Self::Waiting(text),
            Effect::None => Self::Failed(text),
            Effect::Unknown => Self::Uncertain(text),
        }
    }
}

/// Capabilities of a driver's node service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCapabilities {
    /// `STAGE_UNSTAGE_VOLUME`.
    pub stage: bool,
    /// `GET_VOLUME_STATS`.
    pub stats: bool,
    /// `EXPAND_VOLUME`.
    pub expand: bool,
    /// `VOLUME_CONDITION`.
    pub condition: bool,
    /// `SINGLE_NODE_MULTI_WRITER`.
    pub single_node_multi_writer: bool,
    /// `VOLUME_MOUNT_GROUP`.
    pub mount_group: bool,
}

/// The usage and condition of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// As [`RemotePlugin::usage`](crate::volumemanager::remote::RemotePlugin::usage) gives it.
    pub usage: Usage,
    /// Condition of the volume, as the driver reports it.
    pub condition: String,
}

impl NodeCapabilities {
    pub(super) fn of(answer: &NodeGetCapabilitiesResponse) -> Self {
        let has = |rpc: NodeRpc| {
            let mut types = answer.capabilities.iter().filter_map(|c| c.rpc);
            types.any(|of| of.r#type == rpc as i32)
        };
        Self {
            stage: has(NodeRpc::StageUnstageVolume),
            stats: has(NodeRpc::GetVolumeStats),
            expand: has(NodeRpc::ExpandVolume),
            condition: has(NodeRpc::VolumeCondition),
            single_node_multi_writer: has(NodeRpc::SingleNodeMultiWriter),
            mount_group: has(NodeRpc::VolumeMountGroup),
        }
    }
}

impl VolumeStats {
    pub(super) fn of(answer: NodeGetVolumeStatsResponse) -> Result<Self, String> {
        if answer.usage.is_empty() && answer.volume_condition.is_none() {
            return Err("it has no usage".to_owned());
        }
        let mut stats = Self::default();
        for usage in &answer.usage {
            let number = |n: i64| u64::try_from(n).map_err(|_| format!("a usage is negative: {n}"));
            let (available, total, used) = (
                Some(number(usage.available)?),
                Some(number(usage.total)?),
                Some(number(usage.used)?),
            );
            match usage.unit() {
                UsageUnit::Bytes => {
                    stats.usage.available = available;
                    stats.usage.capacity = total;
                    stats.usage.used = used;
                }
                UsageUnit::Inodes => {
                    stats.usage.inodes_free = available;
                    stats.usage.inodes = total;
                    stats.usage.inodes_used = used;
                }
                UsageUnit::Unknown => {}
            }
        }
        if let Some(condition) = answer.volume_condition {
            stats.usage.abnormal = condition.abnormal;
            stats.condition = condition.message;
        }
        Ok(stats)
    }
}

/// The size of an expanded volume, if the driver says it.
pub(super) fn expanded(answer: &NodeExpandVolumeResponse) -> Result<Option<u64>, &'static str> {
    match u64::try_from(answer.capacity_bytes) {
        Ok(0) => Ok(None),
        Ok(bytes) => Ok(Some(bytes)),
        Err(_) => Err("the size is negative"),
    }
}

/// Checks the answer about a node. A negative number of volumes is none, as upstream has it: drivers have computed one on
/// nodes that are full.
pub(super) fn checked_info(
    mut answer: NodeGetInfoResponse,
) -> Result<NodeGetInfoResponse, &'static str> {
    if answer.node_id.is_empty() {
        return Err("it has no node id");
    }
    let limit = answer.max_volumes_per_node;
    if limit < 0 {
        tracing::warn!(
            limit,
            "CSI driver reports a negative limit of volumes, using none"
        );
        answer.max_volumes_per_node = 0;
    }
    Ok(answer)
}

impl CsiClient {
    /// A client of the driver that listens on `socket`. Connects with each call.
    pub fn new(driver: &str, socket: impl Into<PathBuf>, metrics: Metrics) -> Self {
        Self {
            driver: Arc::from(driver),
            socket: Socket::new(&socket.into()),
            deadline: DEADLINE,
            metrics,
        }
    }

    /// Waits at most `deadline` for each answer.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The driver's name.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> &Path {
        self.socket.path()
    }

    /// `NodeStageVolume`.
    ///
    /// # Errors
    /// See [`CsiError`]; also when the handle or the path is empty. When dropped, it may have taken effect.
    pub async fn node_stage_volume(&self, request: NodeStageVolumeRequest) -> Result<(), CsiError> {
        let of = method::NODE_STAGE_VOLUME;
        self.check(of, "volume id", &request.volume_id)?;
        self.check(of, "staging target path", &request.staging_target_path)?;
        self.call::<_, Empty>(of, &request).await.map(drop)
    }

    /// `NodeUnstageVolume`.
    ///
    /// # Errors
    /// As [`Self::node_stage_volume`].
    pub async fn node_unstage_volume(
        &self,
        volume_id: &str,
        staging_target_path: &str,
    ) -> Result<(), CsiError> {
        let of = method::NODE_UNSTAGE_VOLUME;
        self.check(of, "volume id", volume_id)?;
        self.check(of, "staging target path", staging_target_path)?;
        let request = NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: staging_target_path.to_owned(),
        };
        self.call::<_, Empty>(of, &request).await.map(drop)
    }

    /// `NodePublishVolume`.
    ///
    /// # Errors
    /// As [`Self::node_stage_volume`].
    pub async fn node_publish_volume(
        &self,
        request: NodePublishVolumeRequest,
    ) -> Result<(), CsiError> {
        let of = method::NODE_PUBLISH_VOLUME;
        self.check(of, "volume id", &request.volume_id)?;
        self.check(of, "target path", &request.target_path)?;
        self.call::<_, Empty>(of, &request).await.map(drop)
    }

    /// `NodeUnpublishVolume`.
    ///
    /// # Errors
    /// As [`Self::node_stage_volume`].
    pub async fn node_unpublish_volume(
        &self,
        volume_id: &str,
        target_path: &str,
    ) -> Result<(), CsiError> {
        let of = method::NODE_UNPUBLISH_VOLUME;
        self.check(of, "volume id", volume_id)?;
        self.check(of, "target path", target_path)?;
        let request = NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: target_path.to_owned(),
        };
        self.call::<_, Empty>(of, &request).await.map(drop)
    }

    /// `NodeGetVolumeStats`. Units that are not known are left out.
    ///
    /// # Errors
    /// As [`Self::node_stage_volume`]; also when the answer has no usage, or a negative one.
    pub async fn node_get_volume_stats(
        &self,
        volume_id: &str,
        volume_path: &str,
        staging_target_path: &str,
    ) -> Result<VolumeStats, CsiError> {
        let of = method::NODE_GET_VOLUME_STATS;
        self.check(of, "volume id", volume_id)?;
        self.check(of, "volume path", volume_path)?;
        let request = NodeGetVolumeStatsRequest {
            volume_id: volume_id.to_owned(),
            volume_path: volume_path.to_owned(),
            staging_target_path: staging_target_path.to_owned(),
        };
        let answer: NodeGetVolumeStatsResponse = self.call(of, &request).await?;
        VolumeStats::of(answer).map_err(|what| self.garbage(of, &what))
    }

    /// `NodeExpandVolume`. Gives the size that the volume has now in bytes, if the driver says so.
    ///
    /// # Errors
    /// As [`Self::node_stage_volume`]; also when the answer has a negative size.
    pub async fn node_expand_volume(
        &self,
        request: NodeExpandVolumeRequest,
    ) -> Result<Option<u64>, CsiError> {
        let of = method::NODE_EXPAND_VOLUME;
        self.check(of, "volume id", &request.volume_id)?;
        self.check(of, "volume path", &request.volume_path)?;
        let answer: NodeExpandVolumeResponse = self.call(of, &request).await?;
        expanded(&answer).map_err(|what| self.garbage(of, what))
    }

    /// `NodeGetCapabilities`. Those that are not known are left out.
    ///
    /// # Errors
    /// See [`CsiError`].
    pub async fn node_get_capabilities(&self) -> Result<NodeCapabilities, CsiError> {
        let of = method::NODE_GET_CAPABILITIES;
        let answer: NodeGetCapabilitiesResponse = self.call(of, &Empty {}).await?;
        Ok(NodeCapabilities::of(&answer))
    }

    /// `NodeGetInfo`.
    ///
    /// # Errors
    /// See [`CsiError`]; also when the answer has no node id, or a negative limit.
    pub async fn node_get_info(&self) -> Result<NodeGetInfoResponse, CsiError> {
        let of = method::NODE_GET_INFO;
        let answer: NodeGetInfoResponse = self.call(of, &Empty {}).await?;
        checked_info(answer).map_err(|what| self.garbage(of, what))
    }

    /// `GetPluginInfo`.
    ///
    /// # Errors
    /// See [`CsiError`].
    pub async fn get_plugin_info(&self) -> Result<GetPluginInfoResponse, CsiError> {
        self.call(method::GET_PLUGIN_INFO, &Empty {}).await
    }

    /// `GetPluginCapabilities`.
    ///
    /// # Errors
    /// See [`CsiError`].
    pub async fn get_plugin_capabilities(&self) -> Result<GetPluginCapabilitiesResponse, CsiError> {
        self.call(method::GET_PLUGIN_CAPABILITIES, &Empty {}).await
    }

    /// `Probe`: whether the driver is ready.
    ///
    /// # Errors
    /// See [`CsiError`].
    pub async fn probe(&self) -> Result<bool, CsiError> {
        let answer: ProbeResponse = self.call(method::PROBE, &Empty {}).await?;
        Ok(answer.ready.unwrap_or(true))
    }

    async fn call<Req, Res>(&self, of: &'static str, request: &Req) -> Result<Res, CsiError>
    where
        Req: Message,
        Res: Message + Default,
    {
        let begun = Instant::now();
        let answer = self.socket.call(of, request, self.deadline).await;
        let answer = answer.map_err(|failure| self.error(of, failure));
        let code = answer
            .as_ref()
            .map_or_else(|error| error.code, |_| Code::Ok);
        let label = CsiLabel {
            driver_name: self.driver.to_string(),
            method_name: of.to_owned(),
            grpc_status_code: code_name(code).to_owned(),
            migrated: "false".to_owned(),
        };
        self.metrics
            .csi_operations
            .get_or_create(&label)
            .observe(begun.elapsed().as_secs_f64());
        if let Err(error) = &answer {
            tracing::debug!(driver = %self.driver, call = error.call, %error, "call to a CSI driver failed");
        }
        answer
    }

    fn check(&self, of: &'static str, what: &str, value: &str) -> Result<(), CsiError> {
        if !value.is_empty() {
            return Ok(());
        }
        let message = format!("not called, for it has no {what}");
        Err(self.make(of, Code::InvalidArgument, Effect::None, message))
    }

    fn garbage(&self, of: &'static str, what: &str) -> CsiError {
        self.error(of, Failure::Garbage(what.to_owned()))
    }

    fn error(&self, of: &'static str, failure: Failure) -> CsiError {
        match failure {
            Failure::Unreachable(why) => self.make(of, Code::Unavailable, Effect::NotSent, why),
            Failure::Broken(why) => {
                let text = format!(
                    "the connection broke, so that it is not known whether it was done: {why}"
                );
                self.make(of, Code::Unavailable, Effect::Unknown, text)
            }
            Failure::Late(after) => {
                let text = format!(
                    "no answer within {}; the driver may still be at work",
                    humantime::format_duration(after)
                );
                self.make(of, Code::DeadlineExceeded, Effect::Unknown, text)
            }
            Failure::Garbage(what) => {
                let text = format!("the answer cannot be used: {what}");
                self.make(of, Code::Internal, Effect::Unknown, text)
            }
            Failure::Status(code, message) => {
                let effect = match code {
                    Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::Unavailable
                    | Code::ResourceExhausted
                    | Code::Aborted => Effect::Unknown,
                    _ => Effect::None,
                };
                let text = match (code_name(code), message.as_str()) {
                    (name, "") => name.to_owned(),
                    (name, message) => format!("{name}: {message}"),
                };
                self.make(of, code, effect, text)
            }
        }
    }

    fn make(&self, of: &'static str, code: Code, effect: Effect, message: String) -> CsiError {
        CsiError {
            driver: self.driver.to_string(),
            call: of.rsplit('/').next().unwrap_or(of),
            code,
            message,
            effect,
        }
    }
}

/// A code's name as Go's gRPC has it, and with that upstream's metrics and messages.
pub(super) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

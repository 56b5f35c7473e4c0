//! The request that notifies a runtime of a resized pod.
//!
//! The call came with CRI 1.33. The generated types do not have it.

use k8s_cri::v1;
use prost::Message;
use tonic::client::Grpc;
use tonic::{Response, Status};

use super::operation::unary;
use super::trace::TracedChannel;
use crate::types::ContainerId;

/// `runtime.v1.UpdatePodSandboxResourcesRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    overhead: Option<v1::LinuxContainerResources>,
    #[prost(message, optional, tag = "3")]
    resources: Option<v1::LinuxContainerResources>,
}

/// `runtime.v1.UpdatePodSandboxResourcesResponse`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct UpdatePodSandboxResourcesResponse {}

impl UpdatePodSandboxResourcesRequest {
    pub(super) fn new(
        sandbox_id: &ContainerId,
        overhead: v1::LinuxContainerResources,
        resources: v1::LinuxContainerResources,
    ) -> Self {
        Self {
            pod_sandbox_id: sandbox_id.to_string(),
            overhead: Some(overhead),
            resources: Some(resources),
        }
    }
}

/// Sends the request.
///
/// # Errors
/// The runtime's error, or that it is unreachable.
pub(super) async fn send(
    runtime: Grpc<TracedChannel>,
    request: UpdatePodSandboxResourcesRequest,
) -> Result<Response<UpdatePodSandboxResourcesResponse>, Status> {
    unary(
        runtime,
        "/runtime.v1.RuntimeService/UpdatePodSandboxResources",
        request,
    )
    .await
}

//! The request that notifies a runtime of a resized pod.
//!
//! The call came with CRI 1.33. The generated types do not have it.

mod message;

use k8s_cri::v1;
use tonic::client::Grpc;
use tonic::{Response, Status};

pub(super) use self::message::{
    UpdatePodSandboxResourcesRequest, UpdatePodSandboxResourcesResponse,
};
use super::operation::unary;
use super::trace::TracedChannel;
use crate::types::ContainerId;

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

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// The fake runtime has the same messages, so it would not notice another number.
    #[test]
    fn the_message_has_the_numbers_of_the_interface() {
        let of = |cpu_shares| v1::LinuxContainerResources {
            cpu_shares,
            ..Default::default()
        };
        let request = UpdatePodSandboxResourcesRequest::new(&ContainerId::new("ab"), of(2), of(3));
        let bytes = [0x0a, 2, b'a', b'b', 0x12, 2, 0x18, 2, 0x1a, 2, 0x18, 3];
        assert_eq!(request.encode_to_vec(), bytes);
    }
}

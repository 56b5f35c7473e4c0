//! Messages of the call that resizes a sandbox, which the generated types do not have. The fake runtime of the tests uses this
//! file as well.

use k8s_cri::v1;
use prost::Message;

/// `runtime.v1.UpdatePodSandboxResourcesRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pub(crate) pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) overhead: Option<v1::LinuxContainerResources>,
    #[prost(message, optional, tag = "3")]
    pub(crate) resources: Option<v1::LinuxContainerResources>,
}

/// `runtime.v1.UpdatePodSandboxResourcesResponse`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct UpdatePodSandboxResourcesResponse {}

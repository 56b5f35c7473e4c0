//! The list of sandboxes without their annotations.
//!
//! Runtimes list a sandbox with all annotations of its pod, up to 256 KiB of them, every second. Nobody here reads them
//! from a list. They are skipped where they lie in the answer: copied, they would double what a list takes.

use std::collections::HashMap;

use k8s_cri::v1;
use tonic::client::Grpc;
use tonic::{Response, Status};

use super::operation::unary;
use super::trace::TracedChannel;

/// `runtime.v1.ListPodSandboxResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SandboxList {
    #[prost(message, repeated, tag = "1")]
    items: Vec<ListedSandbox>,
}

/// `runtime.v1.PodSandbox` without field 6, the annotations.
#[derive(Clone, PartialEq, prost::Message)]
struct ListedSandbox {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "2")]
    metadata: Option<v1::PodSandboxMetadata>,
    #[prost(enumeration = "v1::PodSandboxState", tag = "3")]
    state: i32,
    #[prost(int64, tag = "4")]
    created_at: i64,
    #[prost(map = "string, string", tag = "5")]
    labels: HashMap<String, String>,
    #[prost(string, tag = "7")]
    runtime_handler: String,
}

impl From<ListedSandbox> for v1::PodSandbox {
    fn from(listed: ListedSandbox) -> Self {
        Self {
            id: listed.id,
            metadata: listed.metadata,
            state: listed.state,
            created_at: listed.created_at,
            labels: listed.labels,
            annotations: HashMap::new(),
            runtime_handler: listed.runtime_handler,
        }
    }
}

impl SandboxList {
    pub(super) fn sandboxes(self) -> Vec<v1::PodSandbox> {
        self.items.into_iter().map(Into::into).collect()
    }
}

/// Asks for the sandboxes.
///
/// # Errors
/// The runtime's error, or that it is unreachable.
pub(super) async fn list(
    runtime: Grpc<TracedChannel>,
    request: v1::ListPodSandboxRequest,
) -> Result<Response<SandboxList>, Status> {
    unary(
        runtime,
        "/runtime.v1.RuntimeService/ListPodSandbox",
        request,
    )
    .await
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may panic")]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn a_listed_sandbox_has_everything_but_its_annotations() {
        let of = |key: &str| HashMap::from([(key.to_owned(), "value".to_owned())]);
        let mut sandbox = v1::PodSandbox {
            id: "id".to_owned(),
            metadata: Some(v1::PodSandboxMetadata {
                name: "name".to_owned(),
                uid: "uid".to_owned(),
                namespace: "namespace".to_owned(),
                attempt: 3,
            }),
            state: v1::PodSandboxState::SandboxNotready.into(),
            created_at: 7,
            labels: of("label"),
            annotations: of("annotation"),
            runtime_handler: "handler".to_owned(),
        };
        let answer = v1::ListPodSandboxResponse {
            items: vec![sandbox.clone()],
        };
        let bytes = answer.encode_to_vec();
        let list = SandboxList::decode(bytes.as_slice()).unwrap();
        sandbox.annotations.clear();
        assert_eq!(list.sandboxes(), [sandbox]);
    }
}

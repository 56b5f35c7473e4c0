//! The call that makes a container. The values of its variables are bytes, as in CRI 1.34; in the generated types they
//! are text. And the call that resizes a sandbox, which the generated types do not have.

/// The agent's own, which the generated types do not have.
#[path = "../../../../src/kuberuntime/cri/resize/message.rs"]
mod message;

use std::convert::Infallible;
use std::task::{Context, Poll};

use k8s_cri::v1;
use k8s_cri::v1::runtime_service_server::RuntimeServiceServer;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use prost::{DecodeError, Message};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service as HttpService, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

pub(super) use self::message::{
    UpdatePodSandboxResourcesRequest, UpdatePodSandboxResourcesResponse,
};
use super::Service;

/// Largest request.
const MAX_MESSAGE: usize = 16 << 20;

/// Names and values of variables.
pub(super) type Environment = Vec<(String, Vec<u8>)>;

/// `runtime.v1.CreateContainerRequest` with its config left encoded.
#[derive(Clone, PartialEq, Message)]
struct CreateContainer {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(bytes = "vec", tag = "2")]
    config: Vec<u8>,
}

/// The variables of `runtime.v1.ContainerConfig`.
#[derive(Clone, PartialEq, Message)]
struct Envs {
    #[prost(message, repeated, tag = "6")]
    envs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// Decodes a config. What is no text in its variables is replaced there; the variables themselves come beside it.
fn decode(encoded: &[u8]) -> Result<(v1::ContainerConfig, Environment), DecodeError> {
    let (mut left, mut others) = (encoded, Vec::new());
    while !left.is_empty() {
        let field = left;
        let (tag, wire_type) = decode_key(&mut left)?;
        skip_field(wire_type, tag, &mut left, DecodeContext::default())?;
        if tag != 6 {
            others.extend_from_slice(&field[..field.len() - left.len()]);
        }
    }
    let mut config = v1::ContainerConfig::decode(others.as_slice())?;
    let envs = Envs::decode(encoded)?.envs;
    config.envs = envs
        .iter()
        .map(|var| v1::KeyValue {
            key: var.key.clone(),
            value: String::from_utf8_lossy(&var.value).into_owned(),
        })
        .collect();
    let environment = envs.into_iter().map(|var| (var.key, var.value)).collect();
    Ok((config, environment))
}

impl UnaryService<CreateContainer> for Service {
    type Response = v1::CreateContainerResponse;
    type Future = BoxFuture<Response<Self::Response>, Status>;

    fn call(&mut self, request: Request<CreateContainer>) -> Self::Future {
        let (service, request) = (self.clone(), request.into_inner());
        Box::pin(async move {
            let (config, environment) =
                decode(&request.config).map_err(|error| Status::internal(error.to_string()))?;
            service
                .create(request.pod_sandbox_id, config, environment)
                .await
        })
    }
}

impl UnaryService<UpdatePodSandboxResourcesRequest> for Service {
    type Response = UpdatePodSandboxResourcesResponse;
    type Future = BoxFuture<Response<Self::Response>, Status>;

    fn call(&mut self, request: Request<UpdatePodSandboxResourcesRequest>) -> Self::Future {
        let (service, request) = (self.clone(), request.into_inner());
        Box::pin(async move {
            let resources = request.resources.unwrap_or_default();
            service
                .resize_sandbox(request.pod_sandbox_id, resources)
                .await
        })
    }
}

/// The runtime service as it is served.
#[derive(Clone)]
pub(super) struct Runtime {
    service: Service,
    generated: RuntimeServiceServer<Service>,
}

impl Runtime {
    pub(super) fn new(service: Service) -> Self {
        Self {
            generated: RuntimeServiceServer::new(service.clone())
                .max_decoding_message_size(MAX_MESSAGE),
            service,
        }
    }
}

impl NamedService for Runtime {
    const NAME: &'static str = <RuntimeServiceServer<Service> as NamedService>::NAME;
}

impl HttpService<http::Request<Body>> for Runtime {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().map(str::to_owned);
        let service = self.service.clone();
        if method.as_deref() == Some("UpdatePodSandboxResources") {
            return Box::pin(async move {
                let codec = ProstCodec::<
                    UpdatePodSandboxResourcesResponse,
                    UpdatePodSandboxResourcesRequest,
                >::default();
                Ok(Grpc::new(codec).unary(service, request).await)
            });
        }
        if method.as_deref() != Some("CreateContainer") {
            return self.generated.call(request);
        }
        Box::pin(async move {
            let codec = ProstCodec::<v1::CreateContainerResponse, CreateContainer>::default();
            let mut grpc = Grpc::new(codec).apply_max_message_size_config(Some(MAX_MESSAGE), None);
            Ok(grpc.unary(service, request).await)
        })
    }
}

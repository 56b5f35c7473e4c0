//! The gRPC service: methods by name.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, ServerStreamingService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::PodsApi;
use super::proto::{
    GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent,
    WatchPodsRequest,
};
use super::watch::{self, Events};

/// `v1alpha1.Pods`.
#[derive(Clone)]
pub(super) struct PodsService(PodsApi);

impl PodsService {
    pub(super) fn new(api: PodsApi) -> Self {
        Self(api)
    }
}

impl NamedService for PodsService {
    const NAME: &'static str = "v1alpha1.Pods";
}

impl Service<http::Request<Body>> for PodsService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let api = self.0.clone();
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default();
            Ok(match method.to_owned().as_str() {
                "ListPods" => {
                    let codec = ProstCodec::<ListPodsResponse, ListPodsRequest>::default();
                    let method = Method(api, PodsApi::list);
                    Grpc::new(codec).unary(method, request).await
                }
                "GetPod" => {
                    let codec = ProstCodec::<GetPodResponse, GetPodRequest>::default();
                    let method = Method(api, PodsApi::get);
                    Grpc::new(codec).unary(method, request).await
                }
                "WatchPods" => {
                    let codec = ProstCodec::<WatchPodsEvent, WatchPodsRequest>::default();
                    let mut server = Grpc::new(codec);
                    server.server_streaming(Watching(api), request).await
                }
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

fn within_rate(api: &PodsApi) -> Result<(), Status> {
    match api.limiter.allow() {
        true => Ok(()),
        false => Err(Status::resource_exhausted("rejected by rate limit")),
    }
}

struct Method<Req, Res>(PodsApi, fn(&PodsApi, Req) -> Result<Res, Status>);

impl<Req, Res> UnaryService<Req> for Method<Req, Res> {
    type Response = Res;
    type Future = Ready<Result<Response<Res>, Status>>;

    fn call(&mut self, request: Request<Req>) -> Self::Future {
        let answer = within_rate(&self.0).and_then(|()| (self.1)(&self.0, request.into_inner()));
        ready(answer.map(Response::new))
    }
}

struct Watching(PodsApi);

impl ServerStreamingService<WatchPodsRequest> for Watching {
    type Response = WatchPodsEvent;
    type ResponseStream = Events;
    type Future = Ready<Result<Response<Events>, Status>>;

    fn call(&mut self, _: Request<WatchPodsRequest>) -> Self::Future {
        let started = within_rate(&self.0).and_then(|()| watch::start(self.0.clone()));
        ready(started.map(Response::new))
    }
}

//! The gRPC services: which method is which, one message in, one message out.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::marker::PhantomData;
use std::task::{Context, Poll};

use prost::Message;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::PodResources;

/// A version of the API.
pub(super) trait Version: Clone + Send + Sync + 'static {
    /// Name of the service.
    const NAME: &'static str;
    /// Whether it has more than List.
    const WHOLE: bool;
}

#[derive(Clone, Copy)]
pub(super) struct V1;

impl Version for V1 {
    const NAME: &'static str = "v1.PodResourcesLister";
    const WHOLE: bool = true;
}

#[derive(Clone, Copy)]
pub(super) struct V1Alpha1;

impl Version for V1Alpha1 {
    const NAME: &'static str = "v1alpha1.PodResourcesLister";
    const WHOLE: bool = false;
}

/// `PodResourcesLister` of a version.
#[derive(Clone)]
pub(super) struct Lister<V> {
    pods: PodResources,
    version: PhantomData<V>,
}

impl<V> Lister<V> {
    pub(super) fn new(pods: PodResources) -> Self {
        Self {
            pods,
            version: PhantomData,
        }
    }
}

impl<V: Version> NamedService for Lister<V> {
    const NAME: &'static str = V::NAME;
}

impl<V: Version> Service<http::Request<Body>> for Lister<V> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let pods = self.pods.clone();
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default();
            Ok(match (method.to_owned().as_str(), V::WHOLE) {
                ("List", true) => unary(pods, request, PodResources::list).await,
                ("List", false) => unary(pods, request, PodResources::list_alpha).await,
                ("GetAllocatableResources", true) => {
                    unary(pods, request, PodResources::allocatable).await
                }
                ("Get", true) => unary(pods, request, PodResources::get).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

type Answer<Req, Res> = fn(&PodResources, Req) -> Result<Res, Status>;

struct Method<Req, Res> {
    pods: PodResources,
    answer: Answer<Req, Res>,
}

impl<Req, Res> UnaryService<Req> for Method<Req, Res> {
    type Response = Res;
    type Future = Ready<Result<Response<Res>, Status>>;

    fn call(&mut self, request: Request<Req>) -> Self::Future {
        if !self.pods.limiter.allow() {
            return ready(Err(Status::resource_exhausted("rejected by rate limit")));
        }
        ready((self.answer)(&self.pods, request.into_inner()).map(Response::new))
    }
}

async fn unary<Req, Res>(
    pods: PodResources,
    request: http::Request<Body>,
    answer: Answer<Req, Res>,
) -> http::Response<Body>
where
    Req: Message + Default + Send + 'static,
    Res: Message + Send + 'static,
{
    Grpc::new(ProstCodec::<Res, Req>::default())
        .unary(Method { pods, answer }, request)
        .await
}

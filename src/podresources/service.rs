//! The gRPC services: which method is which, one message in, one message out.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::marker::PhantomData;
use std::task::{Context, Poll};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prost::Message;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::PodResources;
use crate::types::metrics::{ServerApiVersionLabel, Tally};

/// A version of the API.
pub(super) trait Version: Clone + Send + Sync + 'static {
    /// Name of the service.
    const NAME: &'static str;
    /// True if it has more calls than List.
    const WHOLE: bool;
    /// Value of the label of metrics.
    const LABEL: &'static str;
}

#[derive(Clone, Copy)]
pub(super) struct V1;

impl Version for V1 {
    const NAME: &'static str = "v1.PodResourcesLister";
    const WHOLE: bool = true;
    const LABEL: &'static str = "v1";
}

#[derive(Clone, Copy)]
pub(super) struct V1Alpha1;

impl Version for V1Alpha1 {
    const NAME: &'static str = "v1alpha1.PodResourcesLister";
    const WHOLE: bool = false;
    const LABEL: &'static str = "v1alpha1";
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
            let metrics = pods.metrics.clone();
            let counted = |requests, errors| Counters {
                version: V::LABEL,
                all: metrics.pod_resources_requests.clone(),
                of_method: Some((requests, errors)),
            };
            Ok(match (method.to_owned().as_str(), V::WHOLE) {
                ("List", true) => {
                    let counters = counted(
                        metrics.pod_resources_requests_list.clone(),
                        metrics.pod_resources_errors_list.clone(),
                    );
                    unary(pods, request, PodResources::list, counters).await
                }
                ("List", false) => {
                    // Upstream counts it among all requests only.
                    let counters = Counters {
                        version: V::LABEL,
                        all: metrics.pod_resources_requests.clone(),
                        of_method: None,
                    };
                    unary(pods, request, PodResources::list_alpha, counters).await
                }
                ("GetAllocatableResources", true) => {
                    let counters = counted(
                        metrics.pod_resources_requests_get_allocatable.clone(),
                        metrics.pod_resources_errors_get_allocatable.clone(),
                    );
                    unary(pods, request, PodResources::allocatable, counters).await
                }
                ("Get", true) => {
                    let counters = counted(
                        metrics.pod_resources_requests_get.clone(),
                        metrics.pod_resources_errors_get.clone(),
                    );
                    unary(pods, request, PodResources::get, counters).await
                }
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

type Answer<Req, Res> = fn(&PodResources, Req) -> Result<Res, Status>;

type ByVersion<C> = Family<ServerApiVersionLabel, C>;

/// Counters of a method's requests, and of those that failed. A request that the rate limit refuses is not counted, as
/// upstream.
struct Counters {
    version: &'static str,
    all: ByVersion<Counter>,
    of_method: Option<(ByVersion<Tally>, ByVersion<Tally>)>,
}

impl Counters {
    fn count(&self, failed: bool) {
        let label = ServerApiVersionLabel {
            server_api_version: self.version.to_owned(),
        };
        self.all.get_or_create(&label).inc();
        if let Some((requests, errors)) = &self.of_method {
            requests.get_or_create(&label).inc();
            if failed {
                errors.get_or_create(&label).inc();
            }
        }
    }
}

struct Method<Req, Res> {
    pods: PodResources,
    answer: Answer<Req, Res>,
    counters: Counters,
}

impl<Req, Res> UnaryService<Req> for Method<Req, Res> {
    type Response = Res;
    type Future = Ready<Result<Response<Res>, Status>>;

    fn call(&mut self, request: Request<Req>) -> Self::Future {
        if !self.pods.limiter.allow() {
            return ready(Err(Status::resource_exhausted("rejected by rate limit")));
        }
        let answer = (self.answer)(&self.pods, request.into_inner());
        self.counters.count(answer.is_err());
        ready(answer.map(Response::new))
    }
}

async fn unary<Req, Res>(
    pods: PodResources,
    request: http::Request<Body>,
    answer: Answer<Req, Res>,
    counters: Counters,
) -> http::Response<Body>
where
    Req: Message + Default + Send + 'static,
    Res: Message + Send + 'static,
{
    let method = Method {
        pods,
        answer,
        counters,
    };
    Grpc::new(ProstCodec::<Res, Req>::default())
        .unary(method, request)
        .await
}

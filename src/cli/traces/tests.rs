//! Spans on their way to a collector, which is a gRPC server of its own.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tracing::{Instrument, info_span};

use super::super::logging::LogOptions;
use super::*;
use crate::kuberuntime::cri::{CriClient, CriTimeouts};
use crate::types::metrics::Metrics;

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(self.clone());
        let server = Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        address.to_string()
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.0.lock().unwrap();
        let resources = requests.iter().flat_map(|r| &r.resource_spans);
        resources
            .flat_map(|r| &r.scope_spans)
            .flat_map(|s| s.spans.clone())
            .collect()
    }
}

/// A runtime that refuses everything and keeps the trace each call belongs to.
#[derive(Clone, Default)]
struct Runtime(Arc<Mutex<Vec<Option<String>>>>);

impl NamedService for Runtime {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl Service<http::Request<Body>> for Runtime {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let trace = request.headers().get("traceparent");
        let trace = trace.map(|value| value.to_str().unwrap().to_owned());
        self.0.lock().unwrap().push(trace);
        Box::pin(async { Ok(Status::internal("broken").into_http()) })
    }
}

impl Runtime {
    async fn client(&self) -> CriClient {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::builder()
            .add_service(self.clone())
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let timeouts = CriTimeouts::default();
        CriClient::over(
            endpoint.connect_lazy(),
            "test",
            timeouts,
            Metrics::default(),
        )
    }
}

fn options(endpoint: String, rate: u32) -> TraceOptions {
    TraceOptions {
        tracing: Tracing {
            endpoint,
            sampling_rate_per_million: rate,
        },
        node_name: "node-1".to_owned(),
    }
}

/// A pod sync with one call to the runtime.
async fn sync(cri: &CriClient) {
    let span = info_span!("sync_pod", pod = "u1", name = "web", namespace = "ns");
    async {
        cri.version().await.unwrap_err();
    }
    .instrument(span)
    .await;
}

fn attribute(span: &Span, key: &str) -> Option<String> {
    use opentelemetry_proto::tonic::common::v1::any_value::Value;
    let found = span.attributes.iter().find(|a| a.key == key)?;
    match found.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        other => Some(format!("{other:?}")),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_sync_and_its_calls_to_the_runtime_are_one_trace() {
    let (collector, runtime) = (Collector::default(), Runtime::default());
    let log = tempfile::tempdir().unwrap();
    let log_options = LogOptions {
        file: Some(log.path().join("log")),
        traces: Some(options(collector.serve().await, 1_000_000)),
        ..LogOptions::default()
    };
    // However little is logged.
    let (subscriber, handle) =
        super::super::logging::subscriber(&log_options, Some("error")).unwrap();
    let cri = runtime.client().await;
    {
        let _guard = tracing::subscriber::set_default(subscriber);
        sync(&cri).await;
    }
    tokio::task::spawn_blocking(move || handle.end())
        .await
        .unwrap();
    let spans = collector.spans();
    let find = |name: &str| {
        let names: Vec<_> = spans.iter().map(|s| &s.name).collect();
        (spans.iter().find(|s| s.name == name)).unwrap_or_else(|| panic!("{name} not in {names:?}"))
    };
    let (sync, call) = (find("syncPod"), find("runtime.v1.RuntimeService/Version"));
    assert_eq!(attribute(sync, "k8s.pod.uid").as_deref(), Some("u1"));
    assert_eq!(attribute(sync, "k8s.pod.name").as_deref(), Some("web"));
    assert_eq!(attribute(sync, "k8s.namespace.name").as_deref(), Some("ns"));
    assert_eq!(call.parent_span_id, sync.span_id);
    assert_eq!(call.trace_id, sync.trace_id);
    assert_eq!(attribute(call, "rpc.method").as_deref(), Some("Version"));
    let status = call.status.as_ref().unwrap();
    assert_eq!(status.code, 2, "the call failed");
    assert!(status.message.contains("broken"), "{}", status.message);
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let parent = format!("00-{}-{}-01", hex(&call.trace_id), hex(&call.span_id));
    assert_eq!(*runtime.0.lock().unwrap(), [Some(parent)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_sampled_is_neither_sent_nor_told_to_the_runtime() {
    let (collector, runtime) = (Collector::default(), Runtime::default());
    let provider = provider(&options(collector.serve().await, 0)).unwrap();
    let cri = runtime.client().await;
    {
        use tracing_subscriber::layer::SubscriberExt;
        let subscriber = tracing_subscriber::registry().with(layer(&provider));
        let _guard = tracing::subscriber::set_default(subscriber);
        sync(&cri).await;
    }
    // Nor without any export at all.
    sync(&cri).await;
    tokio::task::spawn_blocking(move || end(&provider))
        .await
        .unwrap();
    assert!(collector.spans().is_empty());
    assert_eq!(*runtime.0.lock().unwrap(), [None, None]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_holds_up_nobody() {
    use tracing_subscriber::layer::SubscriberExt;
    // A port that was free a moment ago.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let provider = provider(&options(address, 1_000_000)).unwrap();
    let subscriber = tracing_subscriber::registry().with(layer(&provider));
    let begun = tokio::time::Instant::now();
    tracing::subscriber::with_default(subscriber, || {
        for _ in 0..(QUEUE * 10) {
            drop(info_span!("sync_pod", pod = "u1").entered());
        }
    });
    let made = begun.elapsed();
    tokio::task::spawn_blocking(move || end(&provider))
        .await
        .unwrap();
    let ended = begun.elapsed();
    assert!(made < Duration::from_secs(5), "spans took {made:?}");
    assert!(ended < made + FAREWELL * 2, "the end took {ended:?}");
}

#[tokio::test]
async fn collectors_are_found_by_address_and_by_path() {
    for good in [
        "localhost:4317",
        "dns:///collector.example.com:4317",
        "[::1]:4317",
        "unix:///run/otel.sock",
    ] {
        channel(good).unwrap();
    }
    channel("not an address").unwrap_err();
}

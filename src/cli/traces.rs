//! The export of traces: spans of pod syncs and of calls to the runtime, by OTLP over gRPC, off by default.
//!
//! In: `tracing.endpoint` and `tracing.samplingRatePerMillion`. Out: a provider whose spans are sent in batches by a
//! thread of its own. Upstream: `tracing.NewProvider`; spans have the names upstream gives them, where it has them.
//!
//! **Invariant:** nothing waits for a collector. At most [`QUEUE`] spans wait; what is more is dropped, and so is a
//! batch that could not be sent.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Key, KeyValue};
use opentelemetry_otlp::{SpanExporter as OtlpExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, SpanData, SpanExporter,
};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tracing::{Level, Metadata, Subscriber, info, warn};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;

use crate::kubeletconfig::Tracing;
use crate::kuberuntime::cri::TRACE_TARGET;

/// Spans that wait to be sent.
pub(super) const QUEUE: usize = 2048;
/// Spans that are sent at once.
const BATCH: usize = 512;
/// Spans are sent after this time at the latest.
const DELAY: Duration = Duration::from_secs(5);
/// A collector that takes longer is taken for dead.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the last spans at the end.
const FAREWELL: Duration = Duration::from_secs(2);

/// Settings of the export of spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// Endpoint and sampling rate.
    pub tracing: Tracing,
    /// Name of the node.
    pub node_name: String,
}

/// The provider that exports as `options` say. Connects when there is something to send. Must be called inside a
/// tokio runtime.
pub(super) fn provider(options: &TraceOptions) -> Result<SdkTracerProvider, String> {
    let exporter = OtlpExporter::builder()
        .with_tonic()
        .with_channel(channel(&options.tracing.endpoint)?)
        .with_timeout(TIMEOUT)
        .build()
        .map_err(|error| error.to_string())?;
    let batches = BatchSpanProcessor::builder(Renaming::new(exporter))
        .with_batch_config(
            BatchConfigBuilder::default()
                .with_max_queue_size(QUEUE)
                .with_max_export_batch_size(BATCH)
                .with_scheduled_delay(DELAY)
                .build(),
        )
        .build();
    let rate = f64::from(options.tracing.sampling_rate_per_million) / 1e6;
    Ok(SdkTracerProvider::builder()
        .with_span_processor(batches)
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(
            rate,
        ))))
        .with_resource(
            Resource::builder_empty()
                .with_attributes([
                    KeyValue::new("service.name", "kubelet"),
                    KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
                    KeyValue::new("host.name", options.node_name.clone()),
                ])
                .build(),
        )
        .build())
}

fn channel(endpoint: &str) -> Result<Channel, String> {
    if let Some(path) = endpoint.strip_prefix("unix://") {
        let path = path.to_owned();
        return Ok(Endpoint::from_static("http://localhost")
            .connect_timeout(TIMEOUT)
            .timeout(TIMEOUT)
            .connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            })));
    }
    let address = endpoint.strip_prefix("dns:///").unwrap_or(endpoint);
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| format!("{endpoint:?} is not an address: {error}"))?;
    Ok(endpoint
        .connect_timeout(TIMEOUT)
        .timeout(TIMEOUT)
        .connect_lazy())
}

/// The layer that makes spans of `provider`: of ours alone, or sending spans would make spans.
pub(super) fn layer<S>(provider: &SdkTracerProvider) -> impl Layer<S> + Send + Sync + use<S>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let ours = |of: &Metadata<'_>| {
        let target = of.target();
        of.is_span()
            && *of.level() <= Level::INFO
            && (target == TRACE_TARGET || target == "holdfast" || target.starts_with("holdfast::"))
    };
    tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("holdfast"))
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_level(false)
        .with_tracked_inactivity(false)
        .with_filter(filter_fn(ours))
}

/// Sends what is left, for two seconds at most. Blocking.
pub(super) fn end(provider: &SdkTracerProvider) {
    if let Err(error) = provider.shutdown_with_timeout(FAREWELL) {
        tracing::debug!(%error, "the last spans were not sent");
    }
}

/// Gives spans and their attributes the names upstream has for them, and logs once when they cannot be sent.
struct Renaming<E> {
    inner: E,
    failing: AtomicBool,
}

impl<E> Renaming<E> {
    fn new(inner: E) -> Self {
        Self {
            inner,
            failing: AtomicBool::new(false),
        }
    }
}

impl<E: fmt::Debug> fmt::Debug for Renaming<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<E: SpanExporter> SpanExporter for Renaming<E> {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        batch.iter_mut().for_each(rename);
        let result = self.inner.export(batch).await;
        let failed_before = self.failing.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !failed_before => {
                warn!(%error, "cannot export traces; spans are dropped until the collector answers");
            }
            Ok(()) if failed_before => info!("traces are exported again"),
            _ => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Our name of an attribute, and the name it is exported with.
type Attributes = &'static [(&'static str, &'static str)];

/// Our name of a span, the name it is exported with, and the same of its attributes.
const NAMES: &[(&str, &str, Attributes)] = &[
    (
        "sync_pod",
        "syncPod",
        &[
            ("pod", "k8s.pod.uid"),
            ("name", "k8s.pod.name"),
            ("namespace", "k8s.namespace.name"),
        ],
    ),
    (
        "start_container",
        "startContainer",
        &[("container", "k8s.container.name")],
    ),
    (
        "kill_container",
        "killContainer",
        &[
            ("pod", "k8s.pod.uid"),
            ("container", "k8s.container.name"),
            ("id", "container.id"),
        ],
    ),
];

fn rename(span: &mut SpanData) {
    let Some((_, name, attributes)) = NAMES.iter().find(|(ours, ..)| span.name == *ours) else {
        return;
    };
    span.name = (*name).into();
    for attribute in &mut span.attributes {
        let known = (attributes.iter()).find(|(ours, _)| attribute.key.as_str() == *ours);
        if let Some((_, theirs)) = known {
            attribute.key = Key::from_static_str(theirs);
        }
    }
}

#[cfg(test)]
mod tests;

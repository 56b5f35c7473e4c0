//! Spans of calls to the runtime, for the export of traces. Upstream: `otelgrpc` on the client of the runtime.
//!
//! **Invariant:** while no traces are exported a call costs one look at a flag: the logs never take these spans.

use opentelemetry::trace::TraceContextExt;
use tonic::metadata::MetadataValue;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tracing::{Span, field, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Target of these spans. The filter of the logs turns it off, the export of traces takes it.
pub const TRACE_TARGET: &str = "holdfast_cri";

type AddContext = fn(Request<()>) -> Result<Request<()>, Status>;

/// A channel that passes the trace of a call to the runtime.
pub(super) type TracedChannel = InterceptedService<Channel, AddContext>;

pub(super) fn traced(channel: Channel) -> TracedChannel {
    InterceptedService::new(channel, add_context)
}

/// The span of one call, named as gRPC's instrumentation names it.
pub(super) fn call_span(operation: &'static str, object: &str) -> Span {
    info_span!(
        target: TRACE_TARGET,
        "runtime_call",
        otel.name = format!("runtime.v1.{}", method(operation)),
        otel.kind = "client",
        otel.status_code = field::Empty,
        otel.status_description = field::Empty,
        rpc.system = "grpc",
        rpc.service = method(operation).split('/').next().map(|s| format!("runtime.v1.{s}")),
        rpc.method = method(operation).split('/').nth(1),
        cri.object = object,
    )
}

/// Notes that the call of `span` failed.
pub(super) fn failed(span: &Span, error: &super::CriError) {
    if !span.is_disabled() {
        span.record("otel.status_code", "ERROR");
        span.record("otel.status_description", field::display(error));
    }
}

/// Service and method of an operation, by upstream's label.
fn method(operation: &str) -> &'static str {
    match operation {
        "version" => "RuntimeService/Version",
        "status" => "RuntimeService/Status",
        "runtime_config" => "RuntimeService/RuntimeConfig",
        "update_runtime_config" => "RuntimeService/UpdateRuntimeConfig",
        "run_podsandbox" => "RuntimeService/RunPodSandbox",
        "stop_podsandbox" => "RuntimeService/StopPodSandbox",
        "remove_podsandbox" => "RuntimeService/RemovePodSandbox",
        "podsandbox_status" => "RuntimeService/PodSandboxStatus",
        "list_podsandbox" => "RuntimeService/ListPodSandbox",
        "update_podsandbox_resources" => "RuntimeService/UpdatePodSandboxResources",
        "list_podsandbox_stats" => "RuntimeService/ListPodSandboxStats",
        "podsandbox_stats" => "RuntimeService/PodSandboxStats",
        "create_container" => "RuntimeService/CreateContainer",
        "start_container" => "RuntimeService/StartContainer",
        "stop_container" => "RuntimeService/StopContainer",
        "remove_container" => "RuntimeService/RemoveContainer",
        "list_containers" => "RuntimeService/ListContainers",
        "container_status" => "RuntimeService/ContainerStatus",
        "update_container" => "RuntimeService/UpdateContainerResources",
        "reopen_container_log" => "RuntimeService/ReopenContainerLog",
        "exec_sync" => "RuntimeService/ExecSync",
        "exec" => "RuntimeService/Exec",
        "attach" => "RuntimeService/Attach",
        "port_forward" => "RuntimeService/PortForward",
        "container_stats" => "RuntimeService/ContainerStats",
        "list_container_stats" => "RuntimeService/ListContainerStats",
        "checkpoint_container" => "RuntimeService/CheckpointContainer",
        "list_images" => "ImageService/ListImages",
        "image_status" => "ImageService/ImageStatus",
        "pull_image" => "ImageService/PullImage",
        "remove_image" => "ImageService/RemoveImage",
        "image_fs_info" => "ImageService/ImageFsInfo",
        _ => "RuntimeService/Other",
    }
}

/// Puts the W3C trace context of a sampled call into its metadata.
fn add_context(mut request: Request<()>) -> Result<Request<()>, Status> {
    let span = Span::current();
    if span.metadata().is_none_or(|of| of.target() != TRACE_TARGET) {
        return Ok(request);
    }
    let context = span.context();
    let context = context.span().span_context().clone();
    if context.is_valid() && context.is_sampled() {
        let text = format!("00-{}-{}-01", context.trace_id(), context.span_id());
        if let Ok(value) = MetadataValue::try_from(text) {
            request.metadata_mut().insert("traceparent", value);
        }
    }
    Ok(request)
}

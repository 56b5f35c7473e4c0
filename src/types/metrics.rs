//! The metrics of the agent, by upstream's names where upstream has them.
//!
//! One value, cloned freely. Names are registered without the suffixes
//! that the text format adds (`_total` for counters). What upstream counts under a name without that suffix is a
//! [`Tally`], so that the name stays upstream's.
//!
//! Probes have a registry of their own: they have a series per container, and an endpoint of their own. So have health
//! checks, whose endpoint is read more often than others.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};

/// One label, whose name depends on the family.
macro_rules! label {
    ($(#[$meta:meta])* $name:ident { $($field:ident),+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
        pub struct $name {
            $(
                #[doc = concat!("Label `", stringify!($field), "`.")]
                pub $field: String,
            )+
        }
    };
}

label! {
    /// A CRI call, or a change of a cgroup: `create`, `update` or `destroy`.
    OperationLabel { operation_type }
}
label! {
    /// Operation of a worker.
    WorkLabel { operation_type }
}
label! {
    /// A worker: `desired`, `orphan` or `runtime_only`; its phase; whether its pod is static.
    WorkingPodLabel { config, lifecycle, r#static }
}
label! {
    /// State of a container.
    ContainerStateLabel { container_state }
}
label! {
    /// Static or not.
    StaticLabel { r#static }
}
impl StaticLabel {
    /// Of static pods, or of others. Upstream: `stringIfTrue`.
    pub fn of(is_static: bool) -> Self {
        Self {
            r#static: static_value(is_static).to_owned(),
        }
    }
}

/// Returns the value of a label `static`: `true`, or empty for pods of the API server, as upstream has it.
pub fn static_value(is_static: bool) -> &'static str {
    if is_static { "true" } else { "" }
}

label! {
    /// Version of the pod-resources API.
    ServerApiVersionLabel { server_api_version }
}
label! {
    /// A resource of a device plugin.
    ResourceNameLabel { resource_name }
}
label! {
    /// Preparing or unpreparing all claims of a pod: `PrepareResources` or `UnprepareResources`; whether it failed.
    DraOperationLabel { operation_name, is_error }
}
label! {
    /// A call to a DRA driver, and the status that it ended with.
    DraGrpcLabel { driver_name, method_name, grpc_status_code }
}
label! {
    /// A DRA driver; `<any>` stands for all.
    DriverNameLabel { driver_name }
}
label! {
    /// Reason of a pending resize in lower case: `deferred` or `infeasible`.
    ResizeReasonLabel { reason }
}
label! {
    /// Cause of a resize that the node can never give.
    ResizeCauseLabel { reason_detail }
}
label! {
    /// Occasion of another decision about a resize.
    RetryTriggerLabel { retry_trigger }
}
label! {
    /// Success: `true` or `false`.
    SuccessLabel { success }
}
label! {
    /// A change that a container's resources are to have: `cpu` or `memory`; `requests` or `limits`; `add`, `remove`,
    /// `increase` or `decrease`.
    ResizeLabel { resource, requirement, operation }
}
label! {
    /// A request for an image: whether it was on the node, its pull policy in lower case, and whether it was to be pulled.
    EnsureImageLabel { present_locally, pull_policy, pull_required }
}
label! {
    /// A program that gives credentials.
    PluginNameLabel { plugin_name }
}
label! {
    /// Alignment of resources: `container` or `pod`, and `numa_node` or `physical_cpu`.
    AlignmentLabel { scope, boundary }
}
label! {
    /// A NUMA node.
    NumaNodeLabel { numa_node }
}
label! {
    /// Table of the store.
    TableLabel { table }
}
label! {
    /// Outcome of a pod's restoration at the start.
    OutcomeLabel { outcome }
}
label! {
    /// Reason of a refusal or failure.
    ReasonLabel { reason }
}
label! {
    /// A request to the API server: its HTTP status or `<error>`, whom it went to, and its HTTP method.
    RequestLabel { code, host, method }
}
label! {
    /// A kind of request to the API server and whom it goes to.
    RequestTimeLabel { verb, host }
}
label! {
    /// Name of the node.
    NodeLabel { node }
}
label! {
    /// Handler of a sandbox; empty for the runtime's own.
    RuntimeHandlerLabel { runtime_handler }
}
label! {
    /// `container`, `init_container` or `ephemeral_container`.
    ContainerTypeLabel { container_type }
}
label! {
    /// A container that could not be started, and the reason of its Waiting state.
    ContainerErrorLabel { container_type, code }
}
label! {
    /// Size of an image by upstream's steps, such as `10MB-100MB`.
    ImageSizeLabel { image_size_in_bytes }
}
label! {
    /// Resource signal that caused an eviction.
    EvictionLabel { eviction_signal }
}
label! {
    /// Scope of an out-of-memory kill: `node`, `pod` or `other`.
    ScopeLabel { scope }
}
label! {
    /// Resource that a critical pod needed.
    PreemptionLabel { preemption_signal }
}
label! {
    /// Work on a volume: `volume_mount` or `volume_unmount`, and `success` or `fail-unknown`.
    StorageLabel { migrated, operation_name, status, volume_plugin }
}
label! {
    /// Work on a volume, from when a pod asked for it: `overall_volume_mount`.
    VolumeOperationLabel { operation_name, plugin_name }
}
label! {
    /// A call to a CSI driver.
    CsiLabel { driver_name, grpc_status_code, method_name, migrated }
}
label! {
    /// Volumes of a plugin: `actual_state_of_world` or `desired_state_of_world`.
    VolumeStateLabel { plugin_name, state }
}
label! {
    /// A probe of a container by its result: `successful`, `failed` or `unknown`.
    ProbeLabel { probe_type, result, container, pod, namespace, pod_uid }
}
label! {
    /// A probe of a container.
    ProbeTimeLabel { probe_type, container, pod, namespace }
}

label! {
    /// A health check: its name, and `healthz`, `livez` or `readyz`.
    HealthcheckLabel { name, r#type }
}
label! {
    /// A health check by its result: `success` or `error`.
    HealthcheckResultLabel { name, status, r#type }
}

label! {
    /// A request to the kubelet's API, as upstream labels it.
    HttpRequestLabel { method, path, server_type, long_running }
}

/// A counter by a name that does not end in `_total`. OpenMetrics has no such counters: its type is `unknown`.
#[derive(Clone, Debug, Default)]
pub struct Tally(Counter);

impl Tally {
    /// So many more.
    pub fn inc_by(&self, count: u64) {
        self.0.inc_by(count);
    }

    /// One more.
    pub fn inc(&self) {
        self.0.inc();
    }

    /// Returns the count so far.
    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

impl TypedMetric for Tally {
    const TYPE: MetricType = MetricType::Unknown;
}

impl EncodeMetric for Tally {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.encode_gauge(&self.0.get())
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

type HistogramFamily<L> = Family<L, Histogram, fn() -> Histogram>;

fn seconds_histogram() -> Histogram {
    // 1 ms … 262 s
    Histogram::new(exponential_buckets(0.001, 4.0, 10))
}

fn fine_histogram() -> Histogram {
    // 50 µs … 13 s
    Histogram::new(exponential_buckets(0.000_05, 4.0, 10))
}

/// Prometheus' own buckets, 5 ms … 10 s.
fn default_histogram() -> Histogram {
    Histogram::new([
        0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    ])
}

fn pod_start_histogram() -> Histogram {
    Histogram::new([
        0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0,
        300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
    ])
}

fn image_pull_histogram() -> Histogram {
    Histogram::new([
        1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 180.0, 300.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0,
        3600.0,
    ])
}

/// 10 ms … 82 s, in milliseconds.
fn milliseconds_histogram() -> Histogram {
    Histogram::new(exponential_buckets(10.0, 2.0, 14))
}

/// Upstream's buckets in milliseconds.
fn admission_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.05, 2.0, 15))
}

fn request_histogram() -> Histogram {
    Histogram::new([
        0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0,
    ])
}

fn storage_histogram() -> Histogram {
    Histogram::new([
        0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0,
    ])
}

macro_rules! metrics {
    ($( $field:ident : $type:ty = $init:expr, $name:literal, $help:literal $(, $unit:expr)? $(=> $to:ident)? ; )+) => {
        /// Shared content of [`Metrics`].
        pub struct Series {
            registry: Registry,
            probe_registry: Registry,
            sli_registry: Registry,
            counting: Mutex<Option<Weak<Count>>>,
            $(
                #[doc = $help]
                pub $field: $type,
            )+
        }

        impl Metrics {
            /// Every registered name, without the suffixes of units and types.
            pub const NAMES: &'static [&'static str] = &[$($name),+];
        }

        impl Default for Metrics {
            fn default() -> Self {
                let mut registry = Registry::default();
                let mut probe_registry = Registry::default();
                let mut sli_registry = Registry::default();
                $(
                    let $field: $type = $init;
                    let target = metrics!(@registry registry probe_registry sli_registry $($to)?);
                    metrics!(@register target, $name, $help, $field $(, $unit)?);
                )+
                Self(Arc::new(Series {
                    registry,
                    probe_registry,
                    sli_registry,
                    counting: Mutex::default(),
                    $( $field, )+
                }))
            }
        }
    };
    (@registry $main:ident $probes:ident $slis:ident) => {
        &mut $main
    };
    (@registry $main:ident $probes:ident $slis:ident probes) => {
        &mut $probes
    };
    (@registry $main:ident $probes:ident $slis:ident slis) => {
        &mut $slis
    };
    (@register $registry:ident, $name:literal, $help:literal, $field:ident) => {
        $registry.register($name, $help, $field.clone())
    };
    (@register $registry:ident, $name:literal, $help:literal, $field:ident, $unit:expr) => {
        $registry.register_with_unit($name, $help, $unit, $field.clone())
    };
}

metrics! {
    node_name: Family<NodeLabel, Gauge> = Family::default(), "kubelet_node_name", "The node's name";
    running_pods: Gauge = Gauge::default(), "kubelet_running_pods", "Pods with a running sandbox";
    running_containers: Family<ContainerStateLabel, Gauge> = Family::default(), "kubelet_running_containers", "Containers by state";
    desired_pods: Family<StaticLabel, Gauge> = Family::default(), "kubelet_desired_pods", "Pods the sources want";
    active_pods: Family<StaticLabel, Gauge> = Family::default(), "kubelet_active_pods", "Pods that are admitted and not finished";
    mirror_pods: Gauge = Gauge::default(), "kubelet_mirror_pods", "Mirror pods of static pods in the API server";
    working_pods: Family<WorkingPodLabel, Gauge> = Family::default(), "kubelet_working_pods", "Pods that have a worker, by its phase and by who wants them";
    graceful_shutdown_start_time: Gauge<f64, AtomicU64> = Gauge::default(), "kubelet_graceful_shutdown_start_time", "When the last graceful shutdown began, Unix time", Unit::Seconds;
    graceful_shutdown_end_time: Gauge<f64, AtomicU64> = Gauge::default(), "kubelet_graceful_shutdown_end_time", "When the last graceful shutdown had stopped all pods, Unix time; 0 while it is in progress", Unit::Seconds;
    orphaned_runtime_pods: Counter = Counter::default(), "kubelet_orphaned_runtime_pods", "Pods found in the runtime that no source wants";
    restarted_pods: Family<StaticLabel, Counter> = Family::default(), "kubelet_restarted_pods", "Pods deleted and created again with the same UID";
    pod_start_duration: Histogram = pod_start_histogram(), "kubelet_pod_start_duration", "From first sight of a pod to its containers running", Unit::Seconds;
    pod_start_sli_duration: Histogram = pod_start_histogram(), "kubelet_pod_start_sli_duration", "From a pod's creation to its containers running, without pulls of images and init containers", Unit::Seconds;
    pod_start_total_duration: Histogram = pod_start_histogram(), "kubelet_pod_start_total_duration", "From the creation of a pod of the API server to its containers running, with everything in between", Unit::Seconds;
    containers_per_pod: Histogram = Histogram::new(exponential_buckets(1.0, 2.0, 5)), "kubelet_containers_per_pod_count", "Main containers of each pod that got a worker";
    cgroup_manager_duration: HistogramFamily<OperationLabel> = Family::new_with_constructor(default_histogram), "kubelet_cgroup_manager_duration", "Duration of making, changing and removing cgroups of pods", Unit::Seconds;
    cpu_manager_pinning_requests: Counter = Counter::default(), "kubelet_cpu_manager_pinning_requests", "Pods that requested CPUs of their own";
    cpu_manager_pinning_errors: Counter = Counter::default(), "kubelet_cpu_manager_pinning_errors", "Pods that requested CPUs of their own and were refused";
    cpu_manager_shared_pool_size: Gauge = Gauge::default(), "kubelet_cpu_manager_shared_pool_size_millicores", "CPUs that containers share, in thousandths";
    cpu_manager_exclusive_cpu_allocation: Gauge = Gauge::default(), "kubelet_cpu_manager_exclusive_cpu_allocation_count", "CPUs that containers have for themselves";
    cpu_manager_allocation_per_numa: Family<NumaNodeLabel, Gauge> = Family::default(), "kubelet_cpu_manager_allocation_per_numa", "CPUs that containers have for themselves, by NUMA node";
    aligned_resources: Family<AlignmentLabel, Tally> = Family::default(), "kubelet_container_aligned_compute_resources_count", "Containers or pods whose resources are aligned for certain";
    aligned_resources_failure: Family<AlignmentLabel, Tally> = Family::default(), "kubelet_container_aligned_compute_resources_failure_count", "Containers or pods that were refused since their resources could not be aligned";
    memory_manager_pinning_requests: Counter = Counter::default(), "kubelet_memory_manager_pinning_requests", "Pods that requested memory on NUMA nodes";
    memory_manager_pinning_errors: Counter = Counter::default(), "kubelet_memory_manager_pinning_errors", "Pods that requested memory on NUMA nodes and were refused";
    topology_manager_admission_requests: Counter = Counter::default(), "kubelet_topology_manager_admission_requests", "Pods that the topology manager decided on";
    topology_manager_admission_errors: Counter = Counter::default(), "kubelet_topology_manager_admission_errors", "Pods whose resources could not be aligned or assigned";
    topology_manager_admission_duration: Histogram = admission_histogram(), "kubelet_topology_manager_admission_duration_ms", "Duration of a decision of the topology manager in milliseconds";
    pod_worker_duration: HistogramFamily<WorkLabel> = Family::new_with_constructor(seconds_histogram), "kubelet_pod_worker_duration", "Duration of one sync", Unit::Seconds;
    pod_worker_start_duration: Histogram = seconds_histogram(), "kubelet_pod_worker_start_duration", "From first sight of a pod to its worker starting", Unit::Seconds;
    managed_ephemeral_containers: Gauge = Gauge::default(), "kubelet_managed_ephemeral_containers", "Ephemeral containers of the pods that the sources want";
    pod_pending_resizes: Family<ResizeReasonLabel, Gauge> = Family::default(), "kubelet_pod_pending_resizes", "Pods whose resize was not allocated, by why";
    pod_in_progress_resizes: Gauge = Gauge::default(), "kubelet_pod_in_progress_resizes", "Pods whose resize was allocated and is not applied yet";
    pod_infeasible_resizes: Family<ResizeCauseLabel, Counter> = Family::default(), "kubelet_pod_infeasible_resizes", "Resizes that the node can never give, by why";
    pod_deferred_accepted_resizes: Family<RetryTriggerLabel, Counter> = Family::default(), "kubelet_pod_deferred_accepted_resizes", "Resizes that were deferred and later allocated, by what occasioned the decision";
    pod_resize_duration: HistogramFamily<SuccessLabel> = Family::new_with_constructor(milliseconds_histogram), "kubelet_pod_resize_duration_milliseconds", "Duration of applying a resize in milliseconds";
    container_requested_resizes: Family<ResizeLabel, Counter> = Family::default(), "kubelet_container_requested_resizes", "Changes of requests and limits that pods asked for, by container and resource";
    cgroup_version: Gauge = Gauge::default(), "kubelet_cgroup_version", "Version of cgroups on the node: 1 or 2";
    pleg_relist_duration: Histogram = fine_histogram(), "kubelet_pleg_relist_duration", "Duration of a relist", Unit::Seconds;
    pleg_relist_interval: Histogram = seconds_histogram(), "kubelet_pleg_relist_interval", "Time between relists", Unit::Seconds;
    pleg_last_seen: Gauge<f64, AtomicU64> = Gauge::default(), "kubelet_pleg_last_seen", "When the last relist finished, Unix time", Unit::Seconds;
    pleg_discard_events: Tally = Tally::default(), "kubelet_pleg_discard_events", "PLEG events dropped because the sync loop had ended";
    evented_pleg_connection_error: Tally = Tally::default(), "kubelet_evented_pleg_connection_error_count", "Times the container event stream broke";
    evented_pleg_connection_success: Tally = Tally::default(), "kubelet_evented_pleg_connection_success_count", "Times the container event stream was opened";
    runtime_operations: Family<OperationLabel, Counter> = Family::default(), "kubelet_runtime_operations", "CRI calls";
    runtime_operations_errors: Family<OperationLabel, Counter> = Family::default(), "kubelet_runtime_operations_errors", "CRI calls that failed";
    runtime_operations_duration: HistogramFamily<OperationLabel> = Family::new_with_constructor(fine_histogram), "kubelet_runtime_operations_duration", "Duration of CRI calls", Unit::Seconds;
    run_podsandbox_duration: HistogramFamily<RuntimeHandlerLabel> = Family::new_with_constructor(fine_histogram), "kubelet_run_podsandbox_duration", "Duration of making a sandbox", Unit::Seconds;
    run_podsandbox_errors: Family<RuntimeHandlerLabel, Counter> = Family::default(), "kubelet_run_podsandbox_errors", "Sandboxes that the runtime could not make";
    started_pods: Counter = Counter::default(), "kubelet_started_pods", "Sandboxes started";
    started_pods_errors: Counter = Counter::default(), "kubelet_started_pods_errors", "Sandboxes that could not be started";
    started_containers: Family<ContainerTypeLabel, Counter> = Family::default(), "kubelet_started_containers", "Containers started";
    started_containers_errors: Family<ContainerErrorLabel, Counter> = Family::default(), "kubelet_started_containers_errors", "Containers that could not be started";
    image_pull_duration: HistogramFamily<ImageSizeLabel> = Family::new_with_constructor(image_pull_histogram), "kubelet_image_pull_duration", "Duration of image pulls", Unit::Seconds;
    ensured_images: Family<EnsureImageLabel, Counter> = Family::default(), "kubelet_image_manager_ensure_image_requests", "Requests of containers and volumes for their images";
    credential_provider_duration: HistogramFamily<PluginNameLabel> = Family::new_with_constructor(default_histogram), "kubelet_credential_provider_plugin_duration", "Duration of the programs that give credentials for pulls, in seconds";
    credential_provider_errors: Family<PluginNameLabel, Counter> = Family::default(), "kubelet_credential_provider_plugin_errors", "Programs that give credentials for pulls and failed";
    images_collected: Family<ReasonLabel, Counter> = Family::default(), "kubelet_image_garbage_collected", "Images that were removed since nothing needed them: for their age, or for space";
    image_suspects: Counter = Counter::default(), "holdfast_image_suspects", "Images whose files could not be believed any more";
    image_repairs: Counter = Counter::default(), "holdfast_image_repairs", "Suspect images that were removed and pulled or imported again";
    events_discarded: Counter = Counter::default(), "holdfast_events_discarded", "Events left out because there were too many at once";
    events_unsent: Family<ReasonLabel, Counter> = Family::default(), "holdfast_events_unsent", "Events that were not sent to the API server, by reason";
    pod_status_sync_duration: Histogram = seconds_histogram(), "kubelet_pod_status_sync_duration", "From a change of a pod's status to the API server's answer", Unit::Seconds;
    rest_client_requests: Family<RequestLabel, Counter> = Family::default(), "rest_client_requests", "Requests to the API server by status, host and method";
    rest_client_request_duration: HistogramFamily<RequestTimeLabel> = Family::new_with_constructor(request_histogram), "rest_client_request_duration", "Duration of requests to the API server", Unit::Seconds;
    rest_client_rate_limiter_duration: HistogramFamily<RequestTimeLabel> = Family::new_with_constructor(request_histogram), "rest_client_rate_limiter_duration", "How long requests to the API server waited for the rate limit", Unit::Seconds;
    client_certificate_expiry: Gauge = Gauge::default(), "holdfast_client_certificate_expiry_timestamp", "When the client certificate of the node expires, Unix time; 0 without one", Unit::Seconds;
    client_certificate_renew_errors: Tally = Tally::default(), "kubelet_certificate_manager_client_expiration_renew_errors", "Renewals of the client certificate that failed";
    evictions: Family<EvictionLabel, Tally> = Family::default(), "kubelet_evictions", "Pods evicted, by what there was too little of";
    eviction_stats_age: HistogramFamily<EvictionLabel> = Family::new_with_constructor(default_histogram), "kubelet_eviction_stats_age", "Age of the observation for which a pod was evicted, by what there was too little of", Unit::Seconds;
    oom_kills: Family<ScopeLabel, Counter> = Family::default(), "holdfast_oom_kills", "Times the kernel killed for want of memory, by whose memory ran out";
    preemptions: Family<PreemptionLabel, Tally> = Family::default(), "kubelet_preemptions", "Pods stopped for a critical pod, by what that needed";
    volume_content_writes: Counter = Counter::default(), "holdfast_volume_content_writes", "Times the files of a configMap, secret, downwardAPI or projected volume were written";
    storage_operation_duration: HistogramFamily<StorageLabel> = Family::new_with_constructor(storage_histogram), "storage_operation_duration", "Duration of mounting and unmounting volumes", Unit::Seconds;
    volume_operation_total: HistogramFamily<VolumeOperationLabel> = Family::new_with_constructor(storage_histogram), "volume_operation_total", "How long pods waited for a volume, from their first request until it was mounted", Unit::Seconds;
    pod_resources_requests: Family<ServerApiVersionLabel, Counter> = Family::default(), "kubelet_pod_resources_endpoint_requests", "Requests to the pod-resources API";
    pod_resources_requests_list: Family<ServerApiVersionLabel, Tally> = Family::default(), "kubelet_pod_resources_endpoint_requests_list", "Requests to List of the pod-resources API";
    pod_resources_requests_get: Family<ServerApiVersionLabel, Tally> = Family::default(), "kubelet_pod_resources_endpoint_requests_get", "Requests to Get of the pod-resources API";
    pod_resources_requests_get_allocatable: Family<ServerApiVersionLabel, Tally> = Family::default(), "kubelet_pod_resources_endpoint_requests_get_allocatable", "Requests to GetAllocatableResources of the pod-resources API";
    pod_resources_errors_list: Family<ServerApiVersionLabel, Tally> = Family::default(), "kubelet_pod_resources_endpoint_errors_list", "Requests to List of the pod-resources API that failed";
    pod_resources_errors_get: Family<ServerApiVersionLabel, Tally> = Family::default(), "kubelet_pod_resources_endpoint_errors_get", "Requests to Get of the pod-resources API that failed";
    pod_resources_errors_get_allocatable: Family<ServerApiVersionLabel, Tally> = Family::default(), "kubelet_pod_resources_endpoint_errors_get_allocatable", "Requests to GetAllocatableResources of the pod-resources API that failed";
    device_plugin_registrations: Family<ResourceNameLabel, Counter> = Family::default(), "kubelet_device_plugin_registration", "Registrations of device plugins";
    device_plugin_alloc_duration: HistogramFamily<ResourceNameLabel> = Family::new_with_constructor(default_histogram), "kubelet_device_plugin_alloc_duration", "Duration of Allocate of device plugins", Unit::Seconds;
    dra_operations: HistogramFamily<DraOperationLabel> = Family::new_with_constructor(default_histogram), "dra_operations_duration", "Duration of preparing or unpreparing all claims of a pod", Unit::Seconds;
    dra_grpc_operations: HistogramFamily<DraGrpcLabel> = Family::new_with_constructor(default_histogram), "dra_grpc_operations_duration", "Duration of calls to DRA drivers", Unit::Seconds;
    dra_resource_claims_in_use: Family<DriverNameLabel, Gauge> = Family::default(), "dra_resource_claims_in_use", "Claims that pods use or that are not unprepared yet, by driver";
    csi_operations: HistogramFamily<CsiLabel> = Family::new_with_constructor(storage_histogram), "csi_operations", "Duration of calls to CSI drivers, by how they ended", Unit::Seconds;
    volume_manager_total_volumes: Family<VolumeStateLabel, Gauge> = Family::default(), "volume_manager_total_volumes", "Volumes by plugin, as they are and as pods want them";
    admission_rejections: Family<ReasonLabel, Counter> = Family::default(), "kubelet_admission_rejections", "Pods refused at first sight";
    probes: Family<ProbeLabel, Counter> = Family::default(), "prober_probe", "Probes of containers by result" => probes;
    probe_duration: HistogramFamily<ProbeTimeLabel> = Family::new_with_constructor(seconds_histogram), "prober_probe_duration", "Duration of a probe", Unit::Seconds => probes;
    healthcheck: Family<HealthcheckLabel, Gauge> = Family::default(), "kubernetes_healthcheck", "What a health check said when it was last asked: 1 for success, 0 for an error" => slis;
    healthchecks: Family<HealthcheckResultLabel, Counter> = Family::default(), "kubernetes_healthchecks", "Answers of health checks by result" => slis;
    http_requests: Family<HttpRequestLabel, Counter> = Family::default(), "kubelet_http_requests", "Requests to the kubelet's API";
    http_requests_duration: HistogramFamily<HttpRequestLabel> = Family::new_with_constructor(seconds_histogram), "kubelet_http_requests_duration", "Duration of requests to the kubelet's API", Unit::Seconds;
    http_inflight_requests: Family<HttpRequestLabel, Gauge> = Family::default(), "kubelet_http_inflight_requests", "Requests to the kubelet's API that are being answered";
    http_connections: Gauge = Gauge::default(), "holdfast_http_connections", "Connections to the kubelet's API";
    http_connections_closed: Family<ReasonLabel, Counter> = Family::default(), "holdfast_http_connections_closed", "Connections to the kubelet's API that were closed to save resources, by why";
    http_refused: Family<ReasonLabel, Counter> = Family::default(), "holdfast_http_requests_refused", "Requests to the kubelet's API that were refused, by why";
    server_certificate_ttl: Gauge<f64, AtomicU64> = Gauge::default(), "kubelet_certificate_manager_server_ttl", "Time until the serving certificate expires; negative when it has", Unit::Seconds;
    server_certificate_rotation: Histogram = Histogram::new(exponential_buckets(3600.0, 2.0, 14)), "kubelet_certificate_manager_server_rotation", "How long the serving certificate before was in use", Unit::Seconds;
    server_certificate_errors: Tally = Tally::default(), "kubelet_server_expiration_renew_errors", "Times the serving certificate could not be renewed";
    store_commit_duration: Histogram = fine_histogram(), "holdfast_store_commit_duration", "From a durable commit's arrival at the writer to its answer", Unit::Seconds;
    store_batch_size: Histogram = Histogram::new(exponential_buckets(1.0, 2.0, 12)), "holdfast_store_batch_transactions", "Transactions written in one batch";
    store_commits: Counter = Counter::default(), "holdfast_store_commits", "Transactions committed";
    store_commit_errors: Counter = Counter::default(), "holdfast_store_commit_errors", "Transactions that could not be committed";
    store_stale: Counter = Counter::default(), "holdfast_store_stale_decisions", "Transactions refused because they were decided on an old record";
    store_records: Family<TableLabel, Gauge> = Family::default(), "holdfast_store_records", "Live records";
    store_quarantined: Gauge = Gauge::default(), "holdfast_store_quarantined_records", "Records that were moved to quarantine because they cannot be read";
    store_size: Gauge = Gauge::default(), "holdfast_store_size", "Size of the store on disk", Unit::Bytes;
    store_degraded: Gauge = Gauge::default(), "holdfast_store_degraded", "1 while the store takes no commits";
    store_queue: Gauge = Gauge::default(), "holdfast_store_queue", "Transactions that wait for the writer", Unit::Bytes;
    store_held: Gauge = Gauge::default(), "holdfast_store_held_transactions", "Transactions held in memory until the store recovers";
    store_recoveries: Counter = Counter::default(), "holdfast_store_recoveries", "Times the store recovered without a restart";
    backups: Counter = Counter::default(), "holdfast_backups", "Automatic backups written";
    backup_errors: Counter = Counter::default(), "holdfast_backup_errors", "Automatic backups that failed";
    secrets_unreadable: Gauge = Gauge::default(), "holdfast_secrets_unreadable_records", "Recorded secrets and tokens that cannot be decrypted";
    restore_pods: Family<OutcomeLabel, Gauge> = Family::default(), "holdfast_restore_pods", "Pods by how they were brought back at start";
    restore_duration: Gauge<f64, AtomicU64> = Gauge::default(), "holdfast_restore_duration", "From process start to all pods resumed", Unit::Seconds;
    epoch: Gauge = Gauge::default(), "holdfast_store_epoch", "Epoch of the store; a new one begins after a restore or a rebuild";
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// Counts what is only counted when somebody asks.
pub type Count = dyn Fn() + Send + Sync;

/// Every metric of the agent; cheap to clone, and clones count together.
#[derive(Clone)]
pub struct Metrics(Arc<Series>);

impl Deref for Metrics {
    type Target = Series;

    fn deref(&self) -> &Series {
        &self.0
    }
}

impl Metrics {
    /// Has `count` called before each [`Metrics::encode`], for as long as somebody holds it.
    pub fn counting(&self, count: &Arc<Count>) {
        let mut counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        *counting = Some(Arc::downgrade(count));
    }

    /// Everything but probes and health checks in the OpenMetrics text format.
    ///
    /// # Errors
    /// Only when formatting into a string fails.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let count = {
            let counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
            counting.as_ref().and_then(Weak::upgrade)
        };
        if let Some(count) = count {
            count();
        }
        encode(&self.registry)
    }

    /// The probes in the OpenMetrics text format.
    ///
    /// # Errors
    /// Only when formatting into a string fails.
    pub fn encode_probes(&self) -> Result<String, fmt::Error> {
        encode(&self.probe_registry)
    }

    /// The health checks in the OpenMetrics text format.
    ///
    /// # Errors
    /// Only when formatting into a string fails.
    pub fn encode_slis(&self) -> Result<String, fmt::Error> {
        encode(&self.sli_registry)
    }
}

fn encode(registry: &Registry) -> Result<String, fmt::Error> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_the_api_server_have_an_empty_label_static_as_upstream() {
        let metrics = Metrics::default();
        for (is_static, count) in [(true, 2), (false, 3)] {
            let label = StaticLabel::of(is_static);
            metrics.desired_pods.get_or_create(&label).set(count);
        }
        let text = metrics.encode().unwrap();
        for line in [
            "kubelet_desired_pods{static=\"true\"} 2",
            "kubelet_desired_pods{static=\"\"} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}: {text}");
        }
    }
}

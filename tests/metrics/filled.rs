//! What every endpoint shows when all there is to show is there.

use holdfast::stats::cadvisor::{self, MachineFacts};
use holdfast::stats::exposition::Format;
use holdfast::stats::model::Fs;
use holdfast::stats::{Depth, RemoteUsage, VolumeUsage, own, resource};
use holdfast::types::metrics::*;
use prometheus_client::metrics::family::MetricConstructor;

use crate::world::World;

/// The texts in OpenMetrics, by endpoint.
pub struct Filled {
    pub agent: String,
    pub resource: String,
    pub cadvisor: String,
    pub probes: String,
    pub slis: String,
}

/// A volume of which everything is known.
fn claimed() -> RemoteUsage {
    let n = Some(1);
    RemoteUsage {
        pod: "poduid-1".into(),
        volume: VolumeUsage {
            name: "data".to_owned(),
            memory: false,
            fs: Fs {
                available: n,
                capacity: n,
                used: n,
                inodes_free: n,
                inodes: n,
                inodes_used: n,
                ..Fs::default()
            },
            claim: Some(("ns".to_owned(), "claim".to_owned())),
            abnormal: Some(false),
        },
    }
}

impl Filled {
    pub async fn new() -> Self {
        let world = World::new();
        let (sandbox, container) = world.run_pod(1).await;
        let stats = world.stats(world.cgroups(1, &sandbox, &container));
        let snapshot = stats.snapshot(Depth::Full).await;
        // The fake runtime tells nothing of writable layers; a real one does.
        let mut snapshot = (*snapshot).clone();
        let mut storage = snapshot.storage.as_deref().cloned().unwrap_or_default();
        let of = storage
            .containers
            .entry(container.as_str().into())
            .or_default();
        of.rootfs = Some((4096, Some(3)));
        storage.images.get_or_insert_default().capacity = Some(1 << 30);
        snapshot.storage = Some(std::sync::Arc::new(storage));
        touch(&world.metrics);
        Self {
            agent: own::encode_with(&world.metrics, world.clock.now(), &[claimed()]).unwrap(),
            resource: resource::encode(&snapshot),
            cadvisor: cadvisor::encode(&snapshot, &MachineFacts::read()),
            probes: world.metrics.encode_probes().unwrap(),
            slis: world.metrics.encode_slis().unwrap(),
        }
    }

    /// Endpoints with their texts.
    pub fn all(&self) -> [(&'static str, &str); 5] {
        [
            ("/metrics", &self.agent),
            ("/metrics/resource", &self.resource),
            ("/metrics/cadvisor", &self.cadvisor),
            ("/metrics/probes", &self.probes),
            ("/metrics/slis", &self.slis),
        ]
    }

    /// The same in the text format.
    pub fn as_text(&self) -> Vec<(&'static str, String)> {
        let all = self.all().into_iter();
        all.map(|(endpoint, text)| (endpoint, Format::Text.of(text.to_owned())))
            .collect()
    }
}

/// A series of a family, with the same value for each label.
fn one<L, M, C>(family: &prometheus_client::metrics::family::Family<L, M, C>, label: L)
where
    L: Clone + std::hash::Hash + Eq,
    M: Clone,
    C: MetricConstructor<M>,
{
    drop(family.get_or_create_owned(&label));
}

macro_rules! label {
    ($name:ident { $($field:ident),+ }) => {
        $name { $($field: "x \"quoted\\ \n".to_owned()),+ }
    };
}

/// Makes a series of each family with labels. Labels hold what has to be escaped.
fn touch(m: &Metrics) {
    one(&m.node_name, label!(NodeLabel { node }));
    one(
        &m.running_containers,
        label!(ContainerStateLabel { container_state }),
    );
    one(&m.desired_pods, label!(StaticLabel { r#static }));
    one(&m.active_pods, label!(StaticLabel { r#static }));
    one(
        &m.working_pods,
        label!(WorkingPodLabel {
            config,
            lifecycle,
            r#static
        }),
    );
    one(&m.restarted_pods, label!(StaticLabel { r#static }));
    one(
        &m.cgroup_manager_duration,
        label!(OperationLabel { operation_type }),
    );
    one(&m.pod_pending_resizes, label!(ResizeReasonLabel { reason }));
    one(
        &m.pod_infeasible_resizes,
        label!(ResizeCauseLabel { reason_detail }),
    );
    one(
        &m.pod_deferred_accepted_resizes,
        label!(RetryTriggerLabel { retry_trigger }),
    );
    one(&m.pod_resize_duration, label!(SuccessLabel { success }));
    one(
        &m.container_requested_resizes,
        label!(ResizeLabel {
            resource,
            requirement,
            operation
        }),
    );
    one(
        &m.ensured_images,
        label!(EnsureImageLabel {
            present_locally,
            pull_policy,
            pull_required
        }),
    );
    one(
        &m.credential_provider_duration,
        label!(PluginNameLabel { plugin_name }),
    );
    one(
        &m.credential_provider_errors,
        label!(PluginNameLabel { plugin_name }),
    );
    one(
        &m.cpu_manager_allocation_per_numa,
        label!(NumaNodeLabel { numa_node }),
    );
    for family in [&m.aligned_resources, &m.aligned_resources_failure] {
        one(family, label!(AlignmentLabel { scope, boundary }));
    }
    one(&m.pod_worker_duration, label!(WorkLabel { operation_type }));
    one(
        &m.runtime_operations,
        label!(OperationLabel { operation_type }),
    );
    one(
        &m.runtime_operations_errors,
        label!(OperationLabel { operation_type }),
    );
    one(
        &m.runtime_operations_duration,
        label!(OperationLabel { operation_type }),
    );
    one(
        &m.run_podsandbox_duration,
        label!(RuntimeHandlerLabel { runtime_handler }),
    );
    one(
        &m.run_podsandbox_errors,
        label!(RuntimeHandlerLabel { runtime_handler }),
    );
    one(
        &m.started_containers,
        label!(ContainerTypeLabel { container_type }),
    );
    one(
        &m.started_containers_errors,
        label!(ContainerErrorLabel {
            container_type,
            code
        }),
    );
    one(
        &m.image_pull_duration,
        label!(ImageSizeLabel {
            image_size_in_bytes
        }),
    );
    one(&m.events_unsent, label!(ReasonLabel { reason }));
    one(&m.images_collected, label!(ReasonLabel { reason }));
    one(
        &m.rest_client_requests,
        label!(RequestLabel { code, host, method }),
    );
    one(
        &m.rest_client_request_duration,
        label!(RequestTimeLabel { verb, host }),
    );
    one(
        &m.rest_client_rate_limiter_duration,
        label!(RequestTimeLabel { verb, host }),
    );
    for family in [
        &m.pod_resources_requests_list,
        &m.pod_resources_requests_get,
        &m.pod_resources_requests_get_allocatable,
        &m.pod_resources_errors_list,
        &m.pod_resources_errors_get,
        &m.pod_resources_errors_get_allocatable,
    ] {
        one(family, label!(ServerApiVersionLabel { server_api_version }));
    }
    one(
        &m.pod_resources_requests,
        label!(ServerApiVersionLabel { server_api_version }),
    );
    one(
        &m.device_plugin_registrations,
        label!(ResourceNameLabel { resource_name }),
    );
    one(
        &m.device_plugin_alloc_duration,
        label!(ResourceNameLabel { resource_name }),
    );
    one(
        &m.dra_operations,
        label!(DraOperationLabel {
            operation_name,
            is_error
        }),
    );
    one(
        &m.dra_grpc_operations,
        label!(DraGrpcLabel {
            driver_name,
            method_name,
            grpc_status_code
        }),
    );
    one(
        &m.dra_resource_claims_in_use,
        label!(DriverNameLabel { driver_name }),
    );
    one(&m.evictions, label!(EvictionLabel { eviction_signal }));
    one(
        &m.eviction_stats_age,
        label!(EvictionLabel { eviction_signal }),
    );
    one(&m.oom_kills, label!(ScopeLabel { scope }));
    one(
        &m.preemptions,
        label!(PreemptionLabel { preemption_signal }),
    );
    one(
        &m.storage_operation_duration,
        label!(StorageLabel {
            migrated,
            operation_name,
            status,
            volume_plugin
        }),
    );
    one(
        &m.volume_operation_total,
        label!(VolumeOperationLabel {
            operation_name,
            plugin_name
        }),
    );
    one(
        &m.csi_operations,
        label!(CsiLabel {
            driver_name,
            grpc_status_code,
            method_name,
            migrated
        }),
    );
    one(
        &m.volume_manager_total_volumes,
        label!(VolumeStateLabel { plugin_name, state }),
    );
    one(&m.admission_rejections, label!(ReasonLabel { reason }));
    one(
        &m.probes,
        label!(ProbeLabel {
            probe_type,
            result,
            container,
            pod,
            namespace,
            pod_uid
        }),
    );
    one(
        &m.probe_duration,
        label!(ProbeTimeLabel {
            probe_type,
            container,
            pod,
            namespace
        }),
    );
    one(&m.healthcheck, label!(HealthcheckLabel { name, r#type }));
    one(
        &m.healthchecks,
        label!(HealthcheckResultLabel {
            name,
            status,
            r#type
        }),
    );
    let request = || {
        label!(HttpRequestLabel {
            method,
            path,
            server_type,
            long_running
        })
    };
    one(&m.http_requests, request());
    one(&m.http_requests_duration, request());
    one(&m.http_inflight_requests, request());
    one(&m.http_connections_closed, label!(ReasonLabel { reason }));
    one(&m.http_refused, label!(ReasonLabel { reason }));
    one(&m.store_records, label!(TableLabel { table }));
    one(&m.restore_pods, label!(OutcomeLabel { outcome }));
}

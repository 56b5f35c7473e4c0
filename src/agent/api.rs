//! Parts of an agent that only exist with an API server: the node's object, statuses, mirror pods, events, and objects
//! of pods.

use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Taint};
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::base::Base;
use super::cluster::recorded_server;
use super::root_dir::has_pods;
use super::{AgentError, Tasks};
use crate::apiserver::{self, ApiClient, Credentials, Lifeline};
use crate::config::{self, SourcesReady};
use crate::core::node_status::has_hostname_label;
use crate::core::volumes::known::InUse;
use crate::events::{self, EventRate, api_events};
use crate::images::{CredentialProviders, CredentialSettings};
use crate::kubeletconfig::{AgentConfig, CpuManagerPolicy, EvictionThreshold};
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::node_context::MemorySize;
use crate::node_object::NodeObject;
use crate::nodestatus::{self, NodeSettings, NodeStatus, NodeStatusHandle, NodeStatusOptions};
use crate::objects::Objects;
use crate::objects::keyring::KeyFile;
use crate::objects::vault::Vault;
use crate::pod_workers::PodWorkers;
use crate::status::{Spoken, StatusManager};
use crate::store::layout::Layout;
use crate::types::metrics::Metrics;
use crate::types::{Clock, PodSource, blocking};
use crate::volumemanager::VolumeManager;

/// Environment variable with the directory of systemd's credentials.
const CREDENTIALS_DIRECTORY: &str = "CREDENTIALS_DIRECTORY";

/// The client of the configured API server, and what keeps its credentials good; `None` without `--kubeconfig`.
/// Does not wait for the server.
///
/// # Errors
/// When what the kubeconfig names cannot be used, on a node that never ran.
pub(super) async fn connect(
    config: &AgentConfig,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
) -> Result<Option<(ApiClient, Credentials)>, AgentError> {
    let mut settings = apiserver::ApiSettings::from(config);
    settings.waits_for_files = was_used(config).await;
    let credentials = std::env::var_os(CREDENTIALS_DIRECTORY);
    if let Some(lifeline) = Lifeline::credential(credentials.as_deref().map(Path::new)) {
        settings.lifeline = Some(lifeline);
    }
    Ok(apiserver::connect(&settings, clock, metrics).await?)
}

/// Returns whether an earlier run of the agent left a store or pods: they count for more than a kubeconfig that cannot be
/// used. On a node that never ran, such a kubeconfig is a mistake, and ends the agent.
async fn was_used(config: &AgentConfig) -> bool {
    let (layout, root_dir) = (Layout::new(&config.state_dir), config.root_dir.clone());
    let found = blocking::run(move || {
        layout.db().exists() || layout.mark().exists() || has_pods(&root_dir).unwrap_or(false)
    });
    found.await.unwrap_or(true)
}

/// The objects that pods refer to, over the keys of this node.
pub(super) async fn objects(config: &AgentConfig, base: &Base) -> Objects {
    let credentials = std::env::var_os(CREDENTIALS_DIRECTORY);
    let file = KeyFile::locate(
        &config.state_dir,
        config.secrets_key_file.as_deref(),
        credentials.as_deref().map(Path::new),
    );
    let now = base.clock.now();
    let vault = match blocking::spawn(move || Vault::open(file, now)).await {
        Ok(vault) => vault,
        Err(error) => {
            warn!(%error, "secrets are not stored on disk");
            Vault::without_keys()
        }
    };
    Objects::with_vault(
        base.store.clone(),
        Arc::clone(&base.clock),
        base.api.clone(),
        Arc::new(vault),
        base.metrics.clone(),
        Some(Arc::clone(&base.recorder) as _),
    )
}

/// Programs that are asked for credentials of registries.
pub(super) fn credential_providers(
    config: &AgentConfig,
    clock: &Arc<dyn Clock>,
    objects: &Objects,
    metrics: &Metrics,
) -> Option<Arc<CredentialProviders>> {
    let (file, bin_dir) = config.image_credential_providers.as_ref()?;
    let settings = CredentialSettings {
        config: file.clone(),
        bin_dir: bin_dir.clone(),
    };
    let providers = CredentialProviders::load(&settings, Arc::clone(clock));
    let providers = providers.with_accounts(Arc::new(objects.clone()));
    Some(Arc::new(providers.with_metrics(metrics.clone())))
}

/// Returns the settings for the node's registration and reports.
pub(super) fn node_settings(config: &AgentConfig) -> NodeSettings {
    let kubelet = &config.kubelet;
    let mut settings = NodeSettings::new(config.node_name.clone());
    settings.register = kubelet.register_node;
    settings.labels = config.node_labels.clone();
    settings.taints = kubelet
        .register_with_taints
        .iter()
        .map(|taint| Taint {
            key: taint.key.clone(),
            value: Some(taint.value.clone()),
            effect: taint.effect.clone(),
            time_added: None,
        })
        .collect();
    settings.provider_id = kubelet.provider_id.clone();
    settings.external_cloud_provider = config.external_cloud_provider;
    settings.node_ips = config.node_ips.clone();
    settings.kubelet_port = kubelet.port;
    settings.max_pods = kubelet.max_pods;
    settings.static_cpus = kubelet.cpu_manager_policy == CpuManagerPolicy::Static;
    settings.local_storage = kubelet.local_storage_capacity_isolation;
    settings.pods_per_core = kubelet.pods_per_core;
    settings.controller_attach_detach = kubelet.reserves.controller_attach_detach;
    settings.system_reserved = kubelet.system_reserved.clone();
    settings.kube_reserved = kubelet.kube_reserved.clone();
    settings.eviction_memory = threshold(config, "memory.available");
    settings.eviction_nodefs = threshold(config, "nodefs.available");
    settings.max_images = kubelet
        .node_status_max_images
        .and_then(|n| usize::try_from(n).ok());
    settings.enforce_allocatable = kubelet.enforce_node_allocatable.iter().any(|e| e == "pods");
    settings.update_frequency = kubelet.node_status_update_frequency;
    settings.report_frequency = kubelet.node_status_report_frequency;
    let seconds = u64::try_from(kubelet.node_lease_duration_seconds).unwrap_or(40);
    settings.lease_duration = std::time::Duration::from_secs(seconds);
    settings
}

fn threshold(config: &AgentConfig, signal: &str) -> EvictionThreshold {
    let given = config.kubelet.eviction_hard.get(signal);
    given.copied().unwrap_or(EvictionThreshold::Quantity(0))
}

/// Reads the node as the agent itself sees it, with a known size of the memory. Blocking.
pub(super) type ReadNode = Arc<dyn Fn(Option<MemorySize>) -> Node + Send + Sync>;

/// Returns what reads this node.
pub(super) fn node_reader(config: &AgentConfig, base: &Base) -> ReadNode {
    let (settings, root_dir) = (node_settings(config), config.root_dir.clone());
    let addresses = base.addresses.clone();
    let (boot_id, clock) = (base.boot.kernel_boot_id.clone(), Arc::clone(&base.clock));
    Arc::new(move |known| {
        nodestatus::local_node(&settings, &addresses, &root_dir, &boot_id, known, &*clock)
    })
}

/// This node as the agent itself sees it: what admission goes by until the API server has shown it.
pub(super) async fn local_node(config: &AgentConfig, base: &Base) -> Arc<Node> {
    let read = node_reader(config, base);
    match blocking::spawn(move || read(None)).await {
        Ok(node) => Arc::new(node),
        Err(error) => {
            warn!(%error, "the node's capacity is unknown");
            let mut node = Node::default();
            node.metadata.name = Some(config.node_name.clone());
            Arc::new(node)
        }
    }
}

/// Sends events to the API server and keeps the node there, if there is a server. Returns the handle by which the node's
/// status is changed.
pub(super) fn report_node(
    config: &AgentConfig,
    base: &Base,
    cri: &CriClient,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Option<NodeStatusHandle> {
    let api = base.api.clone()?;
    forward_events(config, base, api.clone(), tasks);
    let handle = node_status(config, base, api, cri.clone(), tasks, token);
    Some(handle)
}

/// Registers the node and keeps its object, its status and its lease.
fn node_status(
    config: &AgentConfig,
    base: &Base,
    api: ApiClient,
    cri: CriClient,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> NodeStatusHandle {
    let settings = node_settings(config);
    if !has_hostname_label(&settings.hostname) {
        warn!(
            node = settings.name,
            "the node's name is too long for a label, leaving out the label kubernetes.io/hostname"
        );
    }
    let (status, handle) = NodeStatus::new(NodeStatusOptions {
        settings,
        addresses: base.addresses.clone(),
        root_dir: config.root_dir.clone(),
        boot_id: base.boot.kernel_boot_id.clone(),
        api,
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        cri,
        runtime_state: base.runtime_state.clone(),
        node_object: base.node.clone(),
        recorder: Arc::clone(&base.recorder) as _,
        pressure: base.pressure.subscribe(),
        volumes_in_use: base.volumes_in_use.subscribe(),
        devices: base.devices.amounts(),
    });
    tasks.add("node status", status.run(token.clone()));
    handle
}

/// Has the node report which volumes are in use.
pub(super) async fn tell_volumes_in_use(
    volumes: VolumeManager,
    told: watch::Sender<Option<InUse>>,
    token: CancellationToken,
) {
    let mut in_use = volumes.volumes_in_use();
    loop {
        let known = in_use.borrow_and_update().clone();
        told.send_replace(Some(known));
        tokio::select! {
            () = token.cancelled() => return,
            changed = in_use.changed() => if changed.is_err() {
                return token.cancelled().await;
            },
        }
    }
}

/// Forgets the events that wait for an API server, when there is none any more.
pub(super) async fn forget_events(base: &Base) {
    if base.api.is_none()
        && let Err(error) = events::forget_waiting(&base.store).await
    {
        warn!(%error, "cannot forget events for the API server, they stay stored until the next start");
    }
}

/// Events go to the API server too.
fn forward_events(config: &AgentConfig, base: &Base, api: ApiClient, tasks: &mut Tasks) {
    let rate = EventRate {
        qps: config.kubelet.event_record_qps,
        burst: config.kubelet.event_burst,
    };
    let (events, sink) = api_events(
        api,
        config.node_name.clone(),
        rate,
        base.store.clone(),
        Arc::clone(&base.clock),
        base.metrics.clone(),
    );
    base.recorder.forward(events);
    // What the others tell until they have ended is told, or kept.
    tasks.add_last("events", |token| sink.run(token));
}

/// Returns the name of the API server for records and messages: its URL from the kubeconfig, or else from the store's
/// record, or else the path of the kubeconfig. Blocking.
pub(super) fn server_name(config: &AgentConfig) -> String {
    let Some(path) = &config.kubeconfig else {
        return String::new();
    };
    apiserver::server_of(path)
        .or_else(|| recorded_server(&config.state_dir))
        .unwrap_or_else(|| path.display().to_string())
}

/// The source of pods. It begins once there is a node to admit them by, which a checkpoint may tell.
pub(super) fn source(
    api: ApiClient,
    server: String,
    node_object: NodeObject,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> config::ApiSettings {
    let (known, registered) = watch::channel(false);
    let token = token.clone();
    tasks.add("node known", async move {
        tokio::select! {
            () = token.cancelled() => return,
            _ = node_object.known() => known.send_replace(true),
        };
        token.cancelled().await;
    });
    config::ApiSettings::new(api, server, registered)
}

/// Statuses and mirror pods, when there is an API server.
pub(super) fn statuses(
    base: &Base,
    status: &StatusManager,
    ready: SourcesReady,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let Some(api) = &base.api else {
        return;
    };
    let pods = base.pods.clone();
    let syncer = status.syncer(api.clone(), pods.clone(), base.metrics.clone());
    tasks.add("status manager", syncer.run(token.clone()));
    let spoken = move || Spoken {
        api: ready.ready(PodSource::Api),
        all: ready.all_ready(),
    };
    let mirrors = status.mirrors(api.clone(), pods, base.node.clone(), spoken);
    tasks.add("mirror pods", mirrors.run(token.clone()));
}

/// Wakes the pods that refer to an object when it changes, and forgets what nobody refers to any more.
pub(super) async fn follow_objects(
    objects: Objects,
    workers: PodWorkers,
    ready: SourcesReady,
    token: CancellationToken,
) {
    let mut changes = objects.changes();
    let mut swept = false;
    let mut look = tokio::time::interval(std::time::Duration::from_secs(30));
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            change = changes.recv() => match change {
                Ok(change) => workers.object_changed(Some(&change)),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    debug!(missed, "changes of objects came too fast, syncing every pod");
                    workers.object_changed(None);
                }
                Err(broadcast::error::RecvError::Closed) => return token.cancelled().await,
            },
            _ = look.tick(), if !swept => if ready.complete() {
                objects.sweep();
                swept = true;
            },
        }
    }
}

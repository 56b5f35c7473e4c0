//! Start-up, from the open store (`opening`) to open sources: the runtime is reached and listed, the plan made and
//! committed, what was there goes on (`resume`), then the sources are opened.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::Node;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::directories::Served;
use super::known_pods::known_pods;
use super::resume::{plan, reported_reasons, resume, tell_what_was_restored};
use super::{
    AgentError, Tasks, api, devices, directories, dra, early_ends, eviction, node, pinning,
    shutdown, tasks, volumes,
};
use crate::admin::{AdminInfo, StoreHooks};
use crate::apiserver::ApiClient;
use crate::config::{
    FileSettings, HttpSettings, PodConfig, RunningStatic, SourceSettings, SourcesReady,
    Surroundings,
};
use crate::container_logs::{LogRotator, RotationPolicy};
use crate::core::cluster::Cluster;
use crate::core::image_gc;
use crate::core::node_status::{Pressure, pod_capacity};
use crate::core::pinning::machine::Machine;
use crate::core::pressure::{self, Signals};
use crate::core::state::{MetaRecord, SourceRecord};
use crate::core::volumes::known::InUse;
use crate::devicemanager::DeviceManager;
use crate::dra::DraManager;
use crate::events::{self, EventRate, JournalRecorder};
use crate::eviction::{Figures, LocalStorage};
use crate::images::{
    Collection, ImageConfig, ImageDisk, ImageManager, NodeLogins, RuntimeTool, VerificationPolicy,
    images_named,
};
use crate::kubeletconfig::{AgentConfig, KubeletConfiguration, NEVER_ROTATE};
use crate::kuberuntime::cri::{CriClient, CriTimeouts};
use crate::kuberuntime::gc::GcPolicy;
use crate::node_object::NodeObject;
use crate::nodeshutdown::{Link, LocalDrain};
use crate::nodestatus::{NodeStatusHandle, cpus};
use crate::pleg::{Pleg, PlegOptions};
use crate::pod_manager::PodManager;
use crate::pod_workers::pinning::reconcile;
use crate::pod_workers::take_over::take_over;
use crate::pod_workers::{PodWorkers, StartGate, WorkQueue, WorkerContext};
use crate::podresources::{self, PodResources};
use crate::podsapi::{self, PodsApi, ShownPod};
use crate::prober::{Prober, ProberContext};
use crate::runtime_state::RuntimeState;
use crate::server::kubelet::{DebugHooks, NodeApi, SetVerbosity};
use crate::server::{HealthChecks, TimedCheck, sync_loop_check};
use crate::stats::VolumesSlot;
use crate::status::StatusManager;
use crate::store::layout::Layout;
use crate::store::mounts::{Directory, Mount};
use crate::store::{Store, StoreHealth};
use crate::sync_loop::{Inputs, Janitor, LoopContext, MaxPods, Monitor, SyncLoop};
use crate::types::host_addresses::HostAddresses;
use crate::types::metrics::{Count, Metrics, NodeLabel};
use crate::types::{BootIdentity, Clock, EventRecorder, PodExt, PodSource, Stamp, causes, probe};

/// Pods that are started at a time, for each processor; the runtime itself is no faster with more.
const STARTS_OF_CORE: usize = 2;
/// And however few processors there are: a start waits for the disk and the network, too.
const LEAST_STARTS: usize = 4;
const JANITOR_CAPACITY: usize = 50;
const HTTP_SOURCE_TIMEOUT: Duration = Duration::from_secs(10);

fn starts_at_once(cpus: u64) -> usize {
    let cpus = usize::try_from(cpus).unwrap_or(usize::MAX);
    cpus.saturating_mul(STARTS_OF_CORE).max(LEAST_STARTS)
}

/// Returns how many pods the node may run. `cpus` counts the processors, of which some may be added while the agent runs; it is
/// asked each time that they matter.
fn max_pods(
    kubelet: &KubeletConfiguration,
    cpus: impl Fn() -> u64 + Send + Sync + 'static,
) -> MaxPods {
    let (most, of_core) = (kubelet.max_pods, kubelet.pods_per_core);
    Arc::new(move || {
        let cpus = if of_core == 0 { 0 } else { cpus() };
        usize::try_from(pod_capacity(most, of_core, cpus)).unwrap_or(usize::MAX)
    })
}

/// Parts of an agent that differ between a process and a simulation.
pub struct Parts {
    /// Running store.
    pub store: Store,
    /// Meta record that the store was opened with.
    pub meta: MetaRecord,
    /// Clock of the whole agent.
    pub clock: Arc<dyn Clock>,
    /// Metrics, the same as the store's.
    pub metrics: Metrics,
    /// Identity of this boot of the machine.
    pub boot: BootIdentity,
    /// The API server; `None` for static pods only.
    pub api: Option<ApiClient>,
    /// Announcer of shutdowns of the machine; `None` for the machine's `logind`.
    pub shutdown: Option<Link>,
    /// Set when the API server may belong to another cluster than the store: then no pod of it starts before it has
    /// answered.
    pub cluster_doubted: bool,
    /// Figures of the node for evictions; `None` for the machine's.
    pub figures: Option<Arc<dyn Figures>>,
    /// Topology of the machine; `None` to read it.
    pub machine: Option<Machine>,
    /// Addresses of the machine; `None` to ask the kernel and to look up the node's name.
    pub addresses: Option<HostAddresses>,
    /// File systems of images; `None` for the machine's.
    pub image_disk: Option<Arc<dyn ImageDisk>>,
}

/// Parts that exist before the runtime has answered.
pub(super) struct Base {
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) metrics: Metrics,
    pub(super) recorder: Arc<JournalRecorder>,
    pub(super) api: Option<ApiClient>,
    pub(super) boot: BootIdentity,
    /// The meta record the store was opened with.
    pub(super) meta: MetaRecord,
    pub(super) runtime_state: RuntimeState,
    /// The pods that are wanted.
    pub(super) pods: PodManager,
    /// The node as the API server has it.
    pub(super) node: NodeObject,
    /// The addresses of this machine.
    pub(super) addresses: HostAddresses,
    /// Announcer of shutdowns, where that is not `logind`.
    pub(super) shutdown: Option<Link>,
    /// Orders of `holdfast drain-local`.
    pub(super) local_drain: LocalDrain,
    /// The cluster that the kubeconfig named when the store was opened.
    pub(super) cluster: Option<Cluster>,
    /// See [`Parts::cluster_doubted`].
    pub(super) cluster_doubted: bool,
    /// See [`Parts::figures`].
    pub(super) figures: Option<Arc<dyn Figures>>,
    /// See [`Parts::machine`].
    pub(super) machine: Option<Machine>,
    /// See [`Parts::image_disk`].
    pub(super) image_disk: Option<Arc<dyn ImageDisk>>,
    /// Shortages of the node; the stored ones until the node was observed.
    pub(super) pressure: watch::Sender<Pressure>,
    /// Devices of device plugins.
    pub(super) devices: DeviceManager,
    /// Resource claims of pods.
    pub(super) dra: DraManager,
    monitor: Monitor,
    pub(super) restored: Arc<AtomicBool>,
    /// Serves the usage of volumes, once there is a volume manager.
    volumes: VolumesSlot,
    started: Stamp,
    sync_frequency: Duration,
    /// Counts volumes when metrics are read.
    _count: Arc<Count>,
    /// Volumes that the node reports as in use; `None` until the stored ones are known.
    pub(super) volumes_in_use: watch::Sender<Option<InUse>>,
}

/// Handles of the running agent.
pub(super) struct Started {
    pub(super) config: PodConfig,
    pub(super) workers: PodWorkers,
    pub(super) pods: PodManager,
    pub(super) ready: SourcesReady,
    /// See [`LoopContext::local_node`].
    pub(super) local_node: Arc<ArcSwap<Node>>,
}

impl Base {
    pub(super) fn new(config: &AgentConfig, parts: Parts) -> Self {
        let recorder: Arc<JournalRecorder> = Arc::new(JournalRecorder::new(
            parts.store.clone(),
            Arc::clone(&parts.clock),
            parts.metrics.clone(),
        ));
        let label = NodeLabel {
            node: config.node_name.clone(),
        };
        parts.metrics.node_name.get_or_create(&label).set(1);
        recorder.limit(EventRate {
            qps: config.kubelet.event_record_qps,
            burst: config.kubelet.event_burst,
        });
        let pods = PodManager::default();
        let count = volumes::counting(&parts, pods.clone());
        let devices = devices::manager(config, &parts);
        let node = NodeObject::default();
        let dra = dra::manager(config, &parts, &node);
        let known = signals(config, &parts.store, &parts.meta, &*parts.clock);
        Self {
            pressure: watch::Sender::new(pressure::pressure_of(&known)),
            figures: parts.figures,
            machine: parts.machine,
            image_disk: parts.image_disk,
            _count: count,
            volumes_in_use: watch::Sender::new(None),
            recorder,
            api: parts.api,
            addresses: parts
                .addresses
                .unwrap_or_else(|| HostAddresses::of_machine(config.node_ips.clone())),
            shutdown: parts.shutdown,
            local_drain: LocalDrain::default(),
            boot: parts.boot,
            meta: parts.meta,
            runtime_state: RuntimeState::default(),
            pods,
            devices,
            dra,
            node,
            cluster: None,
            cluster_doubted: parts.cluster_doubted,
            monitor: Monitor::default(),
            restored: Arc::new(AtomicBool::new(false)),
            volumes: VolumesSlot::default(),
            started: parts.clock.now(),
            sync_frequency: config.kubelet.sync_frequency,
            store: parts.store,
            clock: parts.clock,
            metrics: parts.metrics,
        }
    }

    /// Returns the stored eviction signals, moved to this boot.
    pub(super) fn signals(&self, config: &AgentConfig) -> Signals {
        signals(config, &self.store, &self.meta, &*self.clock)
    }

    /// Returns the check whether the sync loop moves.
    pub(super) fn sync_loop_check(&self) -> TimedCheck {
        let (monitor, clock) = (self.monitor.clone(), Arc::clone(&self.clock));
        sync_loop_check(
            move || {
                let now = clock.now();
                monitor.age(now).map(|age| now.minus(age))
            },
            self.sync_frequency,
        )
    }

    /// Returns the checks of healthz and readyz.
    pub(super) fn health(&self) -> HealthChecks {
        let restored = Arc::clone(&self.restored);
        let (state, clock) = (self.runtime_state.clone(), Arc::clone(&self.clock));
        let (store, api) = (self.store.clone(), self.api.clone());
        let listing = self.runtime_state.clone();
        let health = store.health();
        HealthChecks {
            clock: Arc::clone(&self.clock),
            sync_loop: self.sync_loop_check(),
            notes: vec![
                (
                    "credentials",
                    Arc::new(move || api.as_ref().and_then(|api| api.standing().trouble())),
                ),
                ("runtime listing", Arc::new(move || listing.not_listed())),
            ],
            ready: vec![
                (
                    "restored",
                    Arc::new(move || {
                        if restored.load(Ordering::Relaxed) {
                            Ok(())
                        } else {
                            Err("pods are not resumed yet".to_owned())
                        }
                    }),
                ),
                (
                    "runtime",
                    Arc::new(move || {
                        let errors = state.errors(clock.now());
                        if errors.is_empty() {
                            Ok(())
                        } else {
                            Err(errors.join("; "))
                        }
                    }),
                ),
                (
                    "store",
                    Arc::new(move || {
                        store.check_disk();
                        match &*health.borrow() {
                            StoreHealth::Ok => Ok(()),
                            StoreHealth::Degraded { reason, .. } => {
                                Err(format!("the store takes no commits: {reason}"))
                            }
                        }
                    }),
                ),
            ],
        }
    }

    /// Returns what the kubelet's API serves from.
    pub(super) fn node_api(
        &self,
        config: &AgentConfig,
        cri: CriClient,
        set_verbosity: SetVerbosity,
        stop: CancellationToken,
    ) -> NodeApi {
        NodeApi {
            store: self.store.clone(),
            pods: self.pods.clone(),
            cri,
            clock: Arc::clone(&self.clock),
            metrics: self.metrics.clone(),
            config: Arc::new(config.clone()),
            addresses: self.addresses.clone(),
            node: self.node.clone(),
            health: self.health(),
            recorder: Arc::clone(&self.recorder) as _,
            api: self.api.clone(),
            restored: Arc::clone(&self.restored),
            volumes: Arc::clone(&self.volumes),
            stop,
            debug: DebugHooks {
                started: Some(self.started),
                set_verbosity: Some(set_verbosity),
            },
        }
    }

    /// Returns what the admin socket answers with.
    pub(super) fn admin_info(&self, config: &AgentConfig) -> AdminInfo {
        AdminInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: self.started,
            credentials: self.api.as_ref().map(|api| api.standing().clone()),
            hooks: Arc::new(StoreHooks::new(
                self.store.clone(),
                Arc::clone(&self.clock),
                Layout::new(&config.state_dir),
            )),
            drain: self.local_drain.clone(),
        }
    }
}

fn signals(config: &AgentConfig, store: &Store, meta: &MetaRecord, clock: &dyn Clock) -> Signals {
    let transition = config.kubelet.eviction_pressure_transition_period;
    pressure::at_start(&store.snapshot(), transition, meta.heartbeat, clock.now())
}

/// Returns the client of the configured runtime.
pub(super) fn runtime_client(config: &AgentConfig, base: &Base) -> Result<CriClient, AgentError> {
    Ok(CriClient::new(
        &config.runtime_endpoint.to_string(),
        Some(&config.image_endpoint.to_string()),
        CriTimeouts::from_request(config.kubelet.runtime_request_timeout),
        base.metrics.clone(),
    )?)
}

/// Restores and starts everything that needs the runtime.
pub(super) async fn start(
    config: &AgentConfig,
    base: &Base,
    cri: CriClient,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Result<Started, AgentError> {
    let late = directories::make(config)?;
    if !late.is_empty() {
        let clock = Arc::clone(&base.clock);
        tasks.add(
            "late directories",
            directories::make_late(late, clock, token.clone()),
        );
    }
    devices::serve(config, base, tasks, token);
    let cri = cri.knowing_pods(known_pods(config, base.store.clone()));
    let node_object = base.node.clone();
    // The node lives on in the API server while the runtime is away.
    let node_status = base.api.clone().map(|api| {
        api::forward_events(config, base, api.clone(), tasks);
        api::node_status(
            config,
            base,
            api,
            cri.clone(),
            node_object.clone(),
            tasks,
            token,
        )
    });
    if let Some(known) = node_object.get() {
        base.addresses.remember(reported_addresses(&known));
    }
    node::follow_name(config, base, tasks, token);
    if let Err(error) = base.addresses.find() {
        warn!(
            error,
            "the node has no address yet; pods report the last one"
        );
    }
    if base.api.is_none()
        && let Err(error) = events::forget_waiting(&base.store).await
    {
        warn!(%error, "events of the time with an API server stay on record until the next start");
    }
    let (cgroups, limited) = node::cgroups(config, &base.metrics).await?;
    if let Err(error) = limited {
        let error = causes(&error);
        warn!(error, "pods may use what is reserved");
        base.recorder.record(node::not_enforced(&error));
    }
    let remedies = eviction::watch(config, base, cri.clone(), tasks, token);
    let node = node::context(config, &cgroups, base.addresses.clone())?;
    match node.dns.read_host() {
        Ok(host) => {
            for event in node.dns.check_limits(&host) {
                base.recorder.record(event);
            }
        }
        // It may come later. Sandboxes that need it wait until then.
        Err(error) => warn!(%error, "pods that use the node's resolver cannot start yet"),
    }
    let local_node = Arc::new(ArcSwap::new(api::local_node(config, base).await));
    let objects = api::objects(config, base).await;
    let status = StatusManager::new(base.store.clone(), Arc::clone(&base.clock));
    let Some(runtime_name) = tasks::wait_for_runtime(&cri, &base.runtime_state, token).await else {
        return Err(AgentError::Ended {
            part: "waiting for the container runtime".to_owned(),
        });
    };
    tokio::join!(
        tasks::update_runtime_up(&cri, &base.runtime_state, &*base.clock),
        tasks::check_cgroup_driver(&cri, config.kubelet.cgroup_driver, &*base.recorder),
    );

    let (plan, statics, as_of) = plan(config, base, &cri).await;
    // A degraded store holds this: a full disk must not keep pods from being looked after.
    base.store.commit_or_hold(plan.transaction.clone()).await?;

    devices::resume(config, &base.devices, &plan.current).await?;
    let memory = node.machine.get().memory();
    let pinning = pinning::managers(config, base, &cgroups, memory).await?;

    let (pleg, pleg_handle, pleg_events) = Pleg::new(
        PlegOptions {
            cri: cri.clone(),
            store: base.store.clone(),
            runtime_state: base.runtime_state.clone(),
            metrics: base.metrics.clone(),
            evented: true,
        },
        Arc::clone(&base.clock),
        plan.current.iter().cloned(),
        as_of,
    );
    let queue = WorkQueue::new(base.store.clone());
    let drivers = volumes::csi_drivers(config, base);
    devices::take_from(&drivers, base.devices.clone());
    dra::take_from(&drivers, base, tasks, token);
    tasks.add("csi drivers", drivers.clone().run(token.clone()));
    let memory = volumes::following(&local_node, &node.machine);
    let volumes = volumes::volume_manager(config, base, drivers.clone(), memory);
    if let Err(error) = volumes.reconcile().await {
        warn!(
            error = causes(&error),
            "volumes are not as recorded, their pods wait"
        );
    }
    tasks.add(
        "volumes in use",
        api::tell_volumes_in_use(volumes.clone(), base.volumes_in_use.clone(), token.clone()),
    );
    // Nobody else sets it.
    drop(base.volumes.set(volumes.clone()));
    let (results, probe_results) = probe::channels();
    let prober = Prober::new(ProberContext {
        store: base.store.clone(),
        clock: Arc::clone(&base.clock),
        cri: cri.clone(),
        recorder: Arc::clone(&base.recorder) as _,
        metrics: base.metrics.clone(),
        results,
        addresses: base.addresses.clone(),
    });
    let (image_changed, image_changes) = early_ends::image_changes();
    let images = images(config, base, &runtime_name, node_status).announcing(image_changed);
    let images = Arc::new(images);
    let workers = PodWorkers::new(
        WorkerContext {
            store: base.store.clone(),
            clock: Arc::clone(&base.clock),
            cri: cri.clone(),
            pleg: pleg_handle,
            status: status.clone(),
            images: Arc::clone(&images),
            volumes,
            devices: base.devices.clone(),
            claims: base.dra.clone(),
            objects: objects.clone(),
            node_object: node_object.clone(),
            cgroups: Arc::new(cgroups.with_pinning(pinning.clone())),
            pinning,
            node,
            recorder: Arc::clone(&base.recorder) as _,
            reasons: reported_reasons(&base.store.snapshot()),
            causes: early_ends::causes(config),
            volume_images: Default::default(),
            runtime_state: base.runtime_state.clone(),
            queue: queue.clone(),
            metrics: base.metrics.clone(),
            runtime_name,
            resync: config.kubelet.sync_frequency,
            backoff_max: config.kubelet.max_container_restart_period,
            starts: StartGate::new(starts_at_once(cpus())),
            prober: prober.clone(),
            epoch: plan.epoch.clone(),
        },
        token.child_token(),
    );
    let signals = early_ends::Signals {
        images: image_changes,
        drivers,
    };
    early_ends::watch(config, base, &workers, signals, tasks, token);
    let pods = base.pods.clone();
    let seeds = resume(&plan, &workers, &pods, &queue, &objects);
    tell_what_was_restored(base, &plan);

    let unrecorded: Arc<[RunningStatic]> = statics.clone().into();
    let mut settings = source_settings(config, statics);
    if let Some(api) = base.api.clone() {
        let server = api::server_name(config);
        settings.api = Some(api::source(api, server, node_object.clone(), tasks, token));
    }
    let (source, updates) = PodConfig::start(
        settings,
        seeds,
        &Surroundings {
            store: base.store.clone(),
            recorder: Arc::clone(&base.recorder) as _,
            clock: Arc::clone(&base.clock),
        },
        token,
    )?;
    api::statuses(
        base,
        &status,
        &pods,
        node_object.clone(),
        source.ready(),
        tasks,
        token,
    );
    tasks.add(
        "changed devices",
        devices::follow(base.devices.clone(), workers.clone(), token.clone()),
    );
    tasks.add(
        "outdated statuses",
        tasks::compute_outdated(status.clone(), workers.clone(), token.clone()),
    );
    tasks.add(
        "changed claims",
        dra::follow(base.dra.clone(), workers.clone(), token.clone()),
    );
    tasks.add(
        "resource claims",
        dra::reconcile(
            base.dra.clone(),
            workers.clone(),
            pods.clone(),
            source.ready(),
            token.clone(),
        ),
    );
    tasks.add(
        "volumes without a record",
        take_over(workers.clone(), source.ready(), token.clone()),
    );
    tasks.add(
        "objects",
        api::follow_objects(
            objects.clone(),
            workers.clone(),
            source.ready(),
            token.clone(),
        ),
    );
    tasks.add("object records", objects.run(token.clone()));
    shutdown::watch(config, base, &workers, tasks, token);
    let (janitor_tx, janitor_rx) = mpsc::channel(JANITOR_CAPACITY);
    let policy = container_policy(config);
    let janitor = Janitor::new(workers.clone(), policy, janitor_rx);
    let sync_loop = SyncLoop::new(
        LoopContext {
            pods: pods.clone(),
            workers: workers.clone(),
            ready: source.ready(),
            origins: source.origins(),
            unrecorded,
            store: base.store.clone(),
            runtime_state: base.runtime_state.clone(),
            clock: Arc::clone(&base.clock),
            recorder: Arc::clone(&base.recorder) as _,
            metrics: base.metrics.clone(),
            node_name: config.node_name.clone(),
            node: node_object,
            local_node: Arc::clone(&local_node),
            max_pods: max_pods(&config.kubelet, cpus),
            unsafe_sysctls: config.kubelet.allowed_unsafe_sysctls.clone().into(),
            pressure: base.pressure.subscribe(),
            observed: Arc::new(move |seen| status.observed(seen)),
            janitor: janitor_tx,
        },
        base.monitor.clone(),
    );
    #[cfg(feature = "failpoints")]
    tasks.add(
        "drill",
        super::drill::evictions(workers.clone(), pods.clone(), token.clone()),
    );
    let storage = LocalStorage::new(
        Arc::new(workers.clone()),
        cri.clone(),
        workers.context().node.clone(),
        base.metrics.clone(),
    );
    let rotator = LogRotator::new(
        base.store.clone(),
        cri.clone(),
        Arc::clone(&base.clock),
        rotation_policy(config),
        config.pod_logs_dir().to_owned(),
    );
    tasks.add("log rotation", rotator.run(token.clone()));
    tasks.add("local storage", storage.run(token.clone()));
    let garbage = eviction::NodeGarbage {
        workers: workers.clone(),
        policy,
        images: Arc::clone(&images),
        collection: image_collection(config, base, source.ready()),
        cri: cri.clone(),
    };
    // Nobody else sets it.
    drop(remedies.set(eviction::remedies(garbage)));
    tasks.add("pleg", pleg.run(token.clone()));
    tasks.add(
        "image garbage collection",
        Arc::clone(&images).run_collection(
            image_collection(config, base, source.ready()),
            cri.clone(),
            token.clone(),
        ),
    );
    tasks.add(
        "images",
        images.run(
            cri.clone(),
            base.store.clone(),
            Arc::clone(&base.recorder) as _,
            token.clone(),
        ),
    );
    tasks.add("janitor", janitor.run(token.clone()));
    tasks.add(
        "runtime health",
        tasks::runtime_up(
            cri,
            base.runtime_state.clone(),
            Arc::clone(&base.clock),
            token.clone(),
        ),
    );
    tasks.add(
        "sync loop",
        sync_loop.run(
            Inputs::new(updates, pleg_events, probe_results, workers.forgot()),
            token.clone(),
        ),
    );
    tasks.add("prober", prober.run(token.clone()));
    let period = config.kubelet.cpu_manager_reconcile_period;
    tasks.add(
        "CPU manager",
        reconcile(workers.clone(), period, token.clone()),
    );
    pod_resources(config, base, &workers, tasks, token);
    pods_api(config, base, tasks, token);
    Ok(Started {
        ready: source.ready(),
        config: source,
        workers,
        pods,
        local_node,
    })
}

/// Returns the rules by which unused images are removed.
fn image_collection(config: &AgentConfig, base: &Base, ready: SourcesReady) -> Collection {
    let (pods, store) = (base.pods.clone(), base.store.clone());
    Collection {
        policy: gc_policy(&config.kubelet),
        wanted: Arc::new(move || images_named(pods.all().iter().map(|pod| &**pod))),
        // What the API server wanted is on record, unless the store was lost.
        knows_pods: Arc::new(move || {
            let api = PodSource::Api.as_str();
            let is_on_record = store.snapshot().record::<SourceRecord>(api).is_some();
            ready.all_ready() || (ready.static_ready() && is_on_record)
        }),
        recorder: Arc::clone(&base.recorder) as _,
        store: base.store.clone(),
    }
}

fn container_policy(config: &AgentConfig) -> GcPolicy {
    let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let gc = &config.container_gc;
    GcPolicy {
        max_per_container: gc.max_per_container.map_or(usize::MAX, count).max(1),
        max_total: gc.max_total.map(count),
        min_age: gc.min_age,
    }
}

fn gc_policy(kubelet: &KubeletConfiguration) -> image_gc::Policy {
    image_gc::Policy {
        minimum_age: kubelet.image_minimum_gc_age,
        maximum_age: kubelet.image_maximum_gc_age,
        high: kubelet.image_gc_high_threshold_percent,
        low: kubelet.image_gc_low_threshold_percent,
    }
}

/// Returns the addresses that the node's object last reported.
fn reported_addresses(node: &Node) -> Vec<IpAddr> {
    let status = node.status.as_ref();
    let addresses = status.and_then(|status| status.addresses.as_ref());
    let internal = addresses
        .into_iter()
        .flatten()
        .filter(|a| a.type_ == "InternalIP");
    internal.filter_map(|a| a.address.parse().ok()).collect()
}

fn rotation_policy(config: &AgentConfig) -> RotationPolicy {
    let kubelet = &config.kubelet;
    let size = kubelet.container_log_max_size;
    RotationPolicy {
        max_size: (size != NEVER_ROTATE).then_some(size),
        max_files: kubelet.container_log_max_files,
        workers: usize::try_from(kubelet.container_log_max_workers).unwrap_or(usize::MAX),
        interval: kubelet.container_log_monitor_interval,
    }
}

/// Serves the socket that answers monitoring agents which pods have which devices. Pods do not need it.
fn pod_resources(
    config: &AgentConfig,
    base: &Base,
    workers: &PodWorkers,
    tasks: &mut Tasks,
    token: &CancellationToken,
) {
    let workers = workers.clone();
    let pinning = workers.context().pinning.clone();
    let pods = PodResources::new(
        Arc::new(move || workers.counted_by_admission()),
        Arc::clone(&base.clock),
        base.metrics.clone(),
    )
    .with_devices(base.devices.clone())
    .with_claims(base.dra.clone())
    .telling_assignments(pinning);
    let (root_dir, stop) = (config.root_dir.clone(), token.clone());
    let served = Served {
        name: "pod resources",
        without: "nobody can ask for the resources of pods",
        bind: move || podresources::bind(&root_dir),
        serve: move |socket| podresources::serve(socket, pods, stop),
    };
    served.start(Arc::clone(&base.clock), tasks, token);
}

/// Starts the Pods API. Pods do not need it.
fn pods_api(config: &AgentConfig, base: &Base, tasks: &mut Tasks, token: &CancellationToken) {
    let (pods, store) = (base.pods.clone(), base.store.clone());
    let wanted = move || -> Vec<ShownPod> {
        let state = store.snapshot();
        let shown = pods.all().into_iter().map(|pod| ShownPod {
            status: state.statuses.get(pod.uid().as_str()).cloned(),
            pod,
        });
        shown.collect()
    };
    let api = PodsApi::new(Arc::new(wanted), Arc::clone(&base.clock), token.clone());
    let root_dir = config.root_dir.clone();
    let served = Served {
        name: "pods API",
        without: "the Pods API is not served",
        bind: move || podsapi::bind(&root_dir),
        serve: move |socket| podsapi::serve(socket, api),
    };
    served.start(Arc::clone(&base.clock), tasks, token);
}

fn images(
    config: &AgentConfig,
    base: &Base,
    runtime_name: &str,
    node_status: Option<NodeStatusHandle>,
) -> ImageManager {
    let settings = ImageConfig {
        serialize_pulls: config.kubelet.serialize_image_pulls,
        max_parallel: config
            .kubelet
            .max_parallel_image_pulls
            .and_then(|n| usize::try_from(n).ok()),
    };
    let verification = VerificationPolicy {
        policy: config.kubelet.image_pull_credentials_verification_policy,
        allowlist: config
            .kubelet
            .preloaded_images_verification_allowlist
            .clone(),
    };
    let mut images = ImageManager::new(settings, Arc::clone(&base.clock), base.metrics.clone())
        .verifying(verification)
        .falling_back(config.image_pull_policy_fallback)
        .with_node_logins(NodeLogins::new(
            &config.root_dir,
            &std::env::current_dir().unwrap_or_default(),
            std::env::home_dir().as_deref(),
        ))
        .preloading(
            Layout::new(&config.state_dir).images(),
            Arc::new(RuntimeTool::new(runtime_name, config.image_endpoint.path())),
        )
        .preloading_when_mounted(Mount::new(
            Directory::Preload,
            &Layout::new(&config.state_dir).images(),
            &config.state_dir,
        ));
    if let Some(node) = node_status {
        // The node tells which images it has.
        images = images.telling(Arc::new(move || node.images_changed()));
    }
    if let Some(disk) = &base.image_disk {
        images = images.syncing(Arc::clone(disk));
    }
    match api::credential_providers(config, &base.clock) {
        Some(providers) => images.with_credential_providers(providers),
        None => images,
    }
}

fn source_settings(config: &AgentConfig, running: Vec<RunningStatic>) -> SourceSettings {
    let kubelet = &config.kubelet;
    SourceSettings {
        node_name: config.node_name.clone(),
        file: kubelet.static_pod_path.clone().map(|path| FileSettings {
            mount: Some(Arc::new(Mount::new(
                Directory::Manifests,
                &path,
                &config.state_dir,
            ))),
            path,
            check_frequency: kubelet.file_check_frequency,
        }),
        http: kubelet.static_pod_url.clone().map(|url| HttpSettings {
            url,
            headers: kubelet
                .static_pod_url_header
                .iter()
                .flat_map(|(name, values)| values.iter().map(|v| (name.clone(), v.clone())))
                .collect(),
            check_frequency: kubelet.http_check_frequency,
            timeout: HTTP_SOURCE_TIMEOUT,
        }),
        api: None,
        running,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_more_processors_start_more_pods_at_a_time() {
        let starts = [1, 2, 3, 8, u64::MAX].map(starts_at_once);
        assert_eq!(starts, [4, 4, 6, 16, usize::MAX]);
    }

    #[test]
    fn a_processor_that_is_added_brings_its_pods() {
        let kubelet = KubeletConfiguration {
            max_pods: 50,
            pods_per_core: 10,
            ..KubeletConfiguration::default()
        };
        let online = Arc::new(std::sync::atomic::AtomicU64::new(2));
        let of = Arc::clone(&online);
        let most = max_pods(&kubelet, move || {
            of.load(std::sync::atomic::Ordering::Relaxed)
        });
        assert_eq!(most(), 20);
        for (cpus, pods) in [(4, 40), (8, 50)] {
            online.store(cpus, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(most(), pods);
        }
    }
}

//! Parts that exist before the runtime has answered: store, clock, and the handles that others read from the start.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{devices, dra, volumes};
use crate::admin::{AdminInfo, StoreHooks};
use crate::apiserver::ApiClient;
use crate::core::cluster::Cluster;
use crate::core::node_status::Pressure;
use crate::core::pinning::machine::Machine;
use crate::core::pressure::{self, Signals};
use crate::core::state::MetaRecord;
use crate::core::volumes::known::InUse;
use crate::devicemanager::DeviceManager;
use crate::dra::DraManager;
use crate::events::{EventRate, JournalRecorder};
use crate::eviction::Figures;
use crate::images::ImageDisk;
use crate::kubeletconfig::{AgentConfig, CgroupDriver};
use crate::kuberuntime::cri::CriClient;
use crate::node_object::NodeObject;
use crate::nodeshutdown::{Link, LocalDrain};
use crate::pod_manager::PodManager;
use crate::runtime_state::RuntimeState;
use crate::server::kubelet::{DebugHooks, NodeApi, SetVerbosity};
use crate::server::{HealthChecks, TimedCheck, sync_loop_check};
use crate::stats::VolumesSlot;
use crate::store::layout::Layout;
use crate::store::{Store, StoreHealth};
use crate::sync_loop::Monitor;
use crate::types::host_addresses::HostAddresses;
use crate::types::metrics::{Count, Metrics, NodeLabel};
use crate::types::{BootIdentity, Clock, Stamp};

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
    pub(super) monitor: Monitor,
    /// The configured cgroup driver; the one in use may be the runtime's.
    pub(super) configured_driver: OnceLock<CgroupDriver>,
    pub(super) restored: Arc<AtomicBool>,
    /// Serves the usage of volumes, once there is a volume manager.
    pub(super) volumes: VolumesSlot,
    started: Stamp,
    sync_frequency: Duration,
    /// Counts volumes when metrics are read.
    _count: Arc<Count>,
    /// Volumes that the node reports as in use; `None` until the stored ones are known.
    pub(super) volumes_in_use: watch::Sender<Option<InUse>>,
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
            configured_driver: OnceLock::new(),
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

//! Layer 4: this node in the API server: registration, status, lease.
//!
//! In: settings, facts about machine and runtime, pressure, the runtime's state. Out: the node object and its lease
//! in the API server, [`NodeObject`] for everybody else, events about the node, and two records in the table
//! `objects`: `nodes//<name>`, the node as the API server last showed it (JSON), and `nodestatus//<name>`, what was
//! reported and when (JSON of `checkpoint::Report`; its `at` is the time of the last report).
//!
//! Four loops that do not wait for each other: `facts` (what the machine and the runtime are), `status` (registers,
//! writes what changed), `lease` (renews), and a watch of the own node, so that a cordon, a taint or a deletion is
//! known at once: a kubelet has an informer for the same.
//!
//! The node is never fetched before it is written: the newest version from the watch or from an own answer is the
//! base of the patch. An idle minute costs six renewals of the lease, and one patch and one watch every five minutes.
//!
//! **Invariant:** a start writes nothing that did not change. Conditions go on from the checkpoint, with their times,
//! and nothing about the runtime is concluded in the first 30 s except that it is ready.
//!
//! Labels that are the agent's own (system, architecture, host name) are corrected with the status: at most one patch
//! each period, and none while the API server takes such a patch and keeps its own value.
//!
//! **Invariant:** the lease waits for neither the store nor the runtime.
//!
//! A node name that another machine uses as well is told (event `NodeNameConflict`, at most once a minute) and not
//! resolved: like a kubelet this node goes on, for the API server cannot say who is right, and a machine that was
//! replaced under its name must be able to take over.

mod checkpoint;
mod error;
mod facts;
mod known;
mod lease;
mod register;
mod status;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use rand::Rng;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use facts::{Identity, cpus, huge_pages, identity, memory_size, read_memory};

pub use crate::core::node_status::{KUBELET_VERSION, NodeSettings, Pressure, initial_node};

use crate::apiserver::{ApiClient, Connection, Reachability};
use crate::core::devices::Amounts;
use crate::core::node_status::{self, Facts, Memory, Readiness};
use crate::core::volumes::known::InUse;
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::node_context::MemorySize;
use crate::node_object::NodeObject;
use crate::runtime_state::RuntimeState;
use crate::store::Store;
use crate::types::host_addresses::HostAddresses;
use crate::types::{Clock, Event, EventRecorder, EventType};
use facts::FactsTask;
use known::Known;
use lease::LeaseTask;
use status::StatusTask;

/// A request that takes longer is given up.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Sources of the node's status.
pub struct NodeStatusOptions {
    /// From the configuration.
    pub settings: NodeSettings,
    /// The addresses of the machine.
    pub addresses: HostAddresses,
    /// The root directory: its file system is the node's ephemeral storage.
    pub root_dir: PathBuf,
    /// The boot id to report, `BootIdentity::kernel_boot_id`.
    pub boot_id: String,
    /// The API server.
    pub api: ApiClient,
    /// For the checkpoint.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// The runtime: version, handlers, images.
    pub cri: CriClient,
    /// Ability of the node to run pods.
    pub runtime_state: RuntimeState,
    /// Kept up to date.
    pub node_object: NodeObject,
    /// For events about the node.
    pub recorder: Arc<dyn EventRecorder>,
    /// Conditions of resource pressure.
    pub pressure: watch::Receiver<Pressure>,
    /// Volumes in use; `None` while that is not known: the API server's list stays.
    pub volumes_in_use: watch::Receiver<Option<InUse>>,
    /// Number of the node's devices by resource.
    pub devices: watch::Receiver<Amounts>,
}

/// Tells the node's status that something changed. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct NodeStatusHandle {
    images: Arc<tokio::sync::Notify>,
}

impl NodeStatusHandle {
    /// An image was pulled or removed: the list is read again with the next status. Never waits.
    pub fn images_changed(&self) {
        self.images.notify_one();
    }
}

/// The node in the API server; see the module.
pub struct NodeStatus {
    facts: FactsTask,
    status: StatusTask,
    lease: LeaseTask,
    known: Known,
    connection: Connection,
    recorder: Arc<dyn EventRecorder>,
    enforced: bool,
}

impl NodeStatus {
    /// Reads the checkpoint and shows the recorded node in `node_object`. Nothing is sent before [`Self::run`].
    pub fn new(options: NodeStatusOptions) -> (Self, NodeStatusHandle) {
        let handle = NodeStatusHandle::default();
        let (send, facts) = watch::channel(None);
        let task = FactsTask {
            settings: options.settings.clone(),
            addresses: options.addresses,
            root_dir: options.root_dir,
            boot_id: options.boot_id,
            cri: options.cri,
            recorder: Arc::clone(&options.recorder),
            images: Arc::clone(&handle.images),
            volumes_in_use: options.volumes_in_use,
            devices: options.devices,
            facts: send,
        };
        let parts = Parts {
            settings: options.settings,
            api: options.api,
            store: options.store,
            clock: options.clock,
            runtime_state: options.runtime_state,
            node_object: options.node_object,
            recorder: options.recorder,
            pressure: options.pressure,
        };
        (Self::assemble(parts, task, facts), handle)
    }

    fn assemble(parts: Parts, facts: FactsTask, seen: watch::Receiver<Option<Facts>>) -> Self {
        let connection = parts.api.connection().clone();
        let recorder = Arc::clone(&parts.recorder);
        let enforced = parts.settings.enforce_allocatable;
        let (status, lease, known) = parts.tasks(seen);
        Self {
            facts,
            status,
            lease,
            known,
            connection,
            recorder,
            enforced,
        }
    }

    /// Runs until `token` is cancelled. Nothing is written at the end: the node goes on. Not to be dropped and run
    /// again; dropping it loses nothing that is not done again.
    pub async fn run(self, token: CancellationToken) {
        self.recorder.record(Event::node(
            EventType::Normal,
            "Starting",
            "Starting kubelet.",
        ));
        if self.enforced {
            self.recorder.record(Event::node(
                EventType::Normal,
                "NodeAllocatableEnforced",
                "Updated Node Allocatable limit across pods",
            ));
        }
        let all = async {
            tokio::join!(
                self.facts.run(),
                self.status.run(),
                self.lease.run(),
                self.known.watch(&self.connection),
            );
        };
        tokio::select! {
            () = token.cancelled() => {}
            () = all => {}
        }
    }
}

/// The fields of [`NodeStatusOptions`] that are not sources of facts.
struct Parts {
    settings: NodeSettings,
    api: ApiClient,
    store: Store,
    clock: Arc<dyn Clock>,
    runtime_state: RuntimeState,
    node_object: NodeObject,
    recorder: Arc<dyn EventRecorder>,
    pressure: watch::Receiver<Pressure>,
}

impl Parts {
    fn tasks(self, facts: watch::Receiver<Option<Facts>>) -> (StatusTask, LeaseTask, Known) {
        let checkpoint = checkpoint::Checkpoint::new(
            self.store.clone(),
            Arc::clone(&self.clock),
            &self.settings.name,
        );
        let known = Known::new(
            Api::all(self.api.kube()),
            &self.settings.name,
            self.node_object.clone(),
            checkpoint.clone(),
        );
        let lease = LeaseTask::new(
            Api::namespaced(self.api.kube(), "kube-node-lease"),
            &self.settings,
            self.node_object.clone(),
            Arc::clone(&self.recorder),
            Arc::clone(&self.clock),
        );
        let status = StatusTask::new(self, known.clone(), checkpoint, facts);
        (status, lease, known)
    }
}

/// The node as it would be registered, with facts about the machine: for an agent without an API server. `known` is the size of
/// the memory as it was last read. Blocking.
pub fn local_node(
    settings: &NodeSettings,
    addresses: &HostAddresses,
    root_dir: &std::path::Path,
    boot_id: &str,
    known: Option<MemorySize>,
    clock: &dyn Clock,
) -> Node {
    let facts = Facts {
        machine: facts::machine(root_dir, boot_id, known),
        addresses: addresses.find().unwrap_or_default(),
        ..Facts::default()
    };
    let computed = node_status::compute(
        &initial_node(settings),
        settings,
        &facts,
        Pressure::default(),
        &Readiness::default(),
        &Memory::default(),
        clock.now(),
    );
    computed.node
}

/// Pauses after failures: doubling, with jitter.
#[derive(Debug)]
struct Backoff {
    first: Duration,
    next: Duration,
}

impl Backoff {
    /// The longest pause.
    const MAX: Duration = Duration::from_secs(7);

    fn new(first: Duration) -> Self {
        Self { first, next: first }
    }

    fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(Self::MAX);
        pause.mul_f64(rand::rng().random_range(0.8..1.0))
    }

    fn reset(&mut self) {
        self.next = self.first;
    }
}

/// `period` and up to `part` of it more.
fn jitter(period: Duration, part: f64) -> Duration {
    period.mul_f64(1.0 + rand::rng().random_range(0.0..part))
}

/// Waits until the API server answers again. Cancel-safe.
async fn came_up(connection: &Connection) {
    loop {
        connection.changed().await;
        if connection.now() == Reachability::Up {
            return;
        }
    }
}

#[cfg(test)]
mod tests;

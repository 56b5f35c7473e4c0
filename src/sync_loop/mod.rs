//! Layer 6: the main loop. Selects an event (`event.rs`), dispatches it to a
//! handler, never waits for the disk or the runtime. Upstream: `syncLoop`, `syncLoopIteration`.
//!
//! The input is config updates, PLEG events, ticks and probe results; the output is updates for the pod workers.
//! Admission is decided here, one pod after the other, on the pods that the workers hold: a decision sees those before
//! it even if they are not on disk yet.

mod cleanups;
mod event;
mod handlers;
mod resizes;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

pub use cleanups::{Janitor, JanitorOrder, collect_unused};
pub use event::{Inputs, LoopEvent};

use crate::cm::pinning::Pinning;
use crate::config::{Origins, RunningStatic, SourcesReady};
use crate::core::node_status::Pressure;
use crate::core::pleg_diff::{PodLifecycleEvent, PodLifecycleEventKind};
use crate::devicemanager::DeviceManager;
use crate::node_object::NodeObject;
use crate::pleg::PlegHandle;
use crate::pod_manager::PodManager;
use crate::pod_workers::{PodWorkers, WorkQueue};
use crate::runtime_state::RuntimeState;
pub use crate::status::Observed;
use crate::store::Store;
use crate::types::metrics::Metrics;
use crate::types::{Clock, EventRecorder, Moment, PodOp, PodSource, PodUpdate, ProbeKind, Stamp};

const ERROR_BACKOFF: Duration = Duration::from_millis(100);
const ERROR_BACKOFF_MAX: Duration = Duration::from_secs(5);
const HOUSEKEEPING_WARNING: Duration = Duration::from_secs(1);
/// Housekeeping runs at least this often, whether or not anything changed.
const HOUSEKEEPING_PERIOD: Duration = Duration::from_secs(60);
/// Interval between looks at static pods that were refused.
const REFUSED_PERIOD: Duration = Duration::from_secs(10);

/// Hook that is called with every pod of the API server that was added, changed or removed. The loop calls it: it must
/// not wait.
pub type ObservedHook = Arc<dyn Fn(Observed) + Send + Sync>;

/// Returns how many pods the node may run now.
pub type MaxPods = Arc<dyn Fn() -> usize + Send + Sync>;

/// Dependencies of the loop.
#[derive(Clone)]
pub struct LoopContext {
    /// Desired pods.
    pub pods: PodManager,
    /// Workers.
    pub workers: PodWorkers,
    /// Pods as the runtime shows them.
    pub pleg: PlegHandle,
    /// Due times of pods.
    pub queue: WorkQueue,
    /// CPUs and NUMA nodes that containers have for themselves.
    pub pinning: Pinning,
    /// Devices of device plugins.
    pub devices: DeviceManager,
    /// True if this node has AppArmor.
    pub apparmor: bool,
    /// Sources that have synced.
    pub ready: SourcesReady,
    /// Origins of the pods.
    pub origins: Origins,
    /// Static pods that ran at the start and are not recorded.
    pub unrecorded: Arc<[RunningStatic]>,
    /// Store, for decisions of previous runs.
    pub store: Store,
    /// State of the runtime.
    pub runtime_state: RuntimeState,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Events.
    pub recorder: Arc<dyn EventRecorder>,
    /// Metrics.
    pub metrics: Metrics,
    /// This node.
    pub node_name: String,
    /// This node's object, for admission.
    pub node: NodeObject,
    /// Substitute for the object until it is known: this node as the agent sees it.
    pub local_node: Arc<ArcSwap<Node>>,
    /// `maxPods` and `podsPerCore`.
    pub max_pods: MaxPods,
    /// `allowedUnsafeSysctls`.
    pub unsafe_sysctls: Arc<[String]>,
    /// Resources that the node is short of.
    pub pressure: watch::Receiver<Pressure>,
    /// Hook that is called with the pods of the API server.
    pub observed: ObservedHook,
    /// Orders for the janitor.
    pub janitor: mpsc::Sender<JanitorOrder>,
}

/// The monitor stamp: when the loop last began or ended an iteration. Upstream: `syncLoopMonitor`.
#[derive(Clone, Debug, Default)]
pub struct Monitor(Arc<ArcSwapOption<Moment>>);

impl Monitor {
    fn stamp(&self, now: Stamp) {
        self.0.store(Some(Arc::new(Moment::of(now))));
    }

    /// Time since the last stamp; `None` before the first one.
    pub fn age(&self, now: Stamp) -> Option<Duration> {
        self.0.load().as_deref().map(|last| last.age(now))
    }
}

/// The loop.
pub struct SyncLoop {
    context: LoopContext,
    monitor: Monitor,
    /// Something changed since the last housekeeping.
    dirty: bool,
    /// True if pods that were admitted in a previous run and never started were checked again.
    reconsidered: bool,
    last_housekeeping: Option<Stamp>,
    /// Time at which refused static pods were last considered.
    refused_at: Option<Stamp>,
}

impl SyncLoop {
    /// A loop that has not begun.
    pub fn new(context: LoopContext, monitor: Monitor) -> Self {
        Self {
            context,
            monitor,
            dirty: true,
            reconsidered: false,
            last_housekeeping: None,
            refused_at: None,
        }
    }

    /// Runs until `token` is cancelled. Upstream: `syncLoop`.
    pub async fn run(mut self, mut inputs: Inputs, token: CancellationToken) {
        info!("starting sync loop");
        let mut backoff = ERROR_BACKOFF;
        loop {
            let now = self.context.clock.now();
            let errors = self.context.runtime_state.errors(now);
            if !errors.is_empty() {
                warn!(errors = errors.join("; "), "skipping pod synchronization");
                self.monitor.stamp(now);
                tokio::select! {
                    () = token.cancelled() => return,
                    () = tokio::time::sleep(backoff) => {}
                }
                backoff = (backoff * 2).min(ERROR_BACKOFF_MAX);
                continue;
            }
            backoff = ERROR_BACKOFF;
            self.monitor.stamp(now);
            let event = tokio::select! {
                () = token.cancelled() => return,
                event = inputs.next() => event,
            };
            if matches!(event, LoopEvent::Closed) {
                return;
            }
            match &event {
                LoopEvent::Config(update) if update.op == PodOp::Add => {
                    handlers::see_node_for(&self.context, &update.pods).await;
                }
                LoopEvent::Housekeeping if self.may_reconsider() => {
                    self.context.node.read_again().await;
                }
                _ => {}
            }
            self.dispatch(event);
            self.monitor.stamp(self.context.clock.now());
        }
    }

    /// Handles one event. Upstream: the second half of `syncLoopIteration`.
    fn dispatch(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::Config(update) => {
                self.dirty = true;
                self.config(update);
            }
            LoopEvent::Pleg(event) => {
                self.dirty = true;
                self.pleg(&event);
            }
            LoopEvent::SyncTick => handlers::due(&self.context),
            LoopEvent::Probe(kind, result) => {
                debug!(?kind, pod = %result.pod, success = result.success, "probe result");
                match (kind, result.success) {
                    (ProbeKind::Liveness, true) => {}
                    (ProbeKind::Liveness | ProbeKind::Startup, false) => {
                        self.context.workers.probe_failed(&result.pod);
                    }
                    (ProbeKind::Startup | ProbeKind::Readiness, _) => {
                        self.context.workers.sync(&result.pod);
                    }
                }
            }
            LoopEvent::Forgotten => cleanups::recreate_forgotten(&self.context),
            LoopEvent::Housekeeping => self.housekeeping(),
            LoopEvent::Closed => {}
        }
    }

    fn config(&self, update: PodUpdate) {
        let PodUpdate { op, source, pods } = update;
        if !pods.is_empty() {
            info!(?op, %source, pods = pods.len(), "config update");
        }
        match op {
            PodOp::Add => handlers::additions(&self.context, pods),
            PodOp::Update | PodOp::Delete => handlers::updates(&self.context, pods),
            PodOp::Remove => handlers::removes(&self.context, pods),
            PodOp::Reconcile => handlers::reconcile(&self.context, pods),
        }
        self.context.ready.mark_handled(source);
    }

    fn pleg(&self, event: &PodLifecycleEvent) {
        if event.kind.wants_sync() {
            debug!(pod = %event.pod, kind = ?event.kind, id = %event.id, "runtime event");
            self.context.workers.sync(&event.pod);
        }
        use PodLifecycleEventKind::{ContainerDied, ContainerRemoved};
        if matches!(event.kind, ContainerDied | ContainerRemoved) {
            self.order(JanitorOrder::DeadContainers(event.pod.clone()));
        }
    }

    /// Returns whether pods of the last run that were not started can be decided on again, once in each run.
    fn may_reconsider(&self) -> bool {
        !self.reconsidered
            && self.context.ready.any_static_ready()
            && self.context.node.get().is_some()
            && self.context.ready.source_complete(PodSource::Api)
            && self.context.pleg.cache().is_listed()
    }

    fn housekeeping(&mut self) {
        let now = self.context.clock.now();
        if !self.context.ready.any_static_ready() {
            debug!("housekeeping waits for the sources");
            return;
        }
        if self.may_reconsider() {
            self.reconsidered = true;
            handlers::reconsider_unstarted(&self.context);
        }
        if (self.refused_at).is_none_or(|last| now.since(last) >= REFUSED_PERIOD)
            && handlers::knows_what_runs(&self.context)
        {
            self.refused_at = Some(now);
            handlers::reconsider_refused(&self.context);
        }
        let overdue = self
            .last_housekeeping
            .is_none_or(|last| now.since(last) >= HOUSEKEEPING_PERIOD);
        let moved = self.context.workers.take_moved();
        if !std::mem::take(&mut self.dirty) && !moved && !overdue {
            return;
        }
        self.last_housekeeping = Some(now);
        let again = cleanups::pod_cleanups(&self.context);
        self.dirty |= again;
        self.order(JanitorOrder::Sweep {
            complete: self.context.ready.complete(),
        });
        let took = self.context.clock.now().since(now);
        if took > HOUSEKEEPING_WARNING {
            warn!(?took, "housekeeping took longer than expected");
        }
    }

    fn order(&self, order: JanitorOrder) {
        if self.context.janitor.try_send(order).is_err() {
            debug!("janitor is busy, the next sweep covers it");
        }
    }
}

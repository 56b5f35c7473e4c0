//! Layer 5: one task per pod, which drives its pod through Sync → Terminating → Terminated → Finished.
//! Upstream: `podWorkers`.
//!
//! Input: updates from the sync loop ([`PodWorkers::update`]), which never waits. Output: effects on the runtime,
//! statuses, and due times in the work queue. A newer update replaces one that
//! is still pending.
//!
//! **Invariant:** a worker acts on a phase only after the record that says so is committed; a phase that
//! stops the pod may be held in memory while the store is degraded.
//! **Invariant:** a future of a worker may be dropped at any await: whatever it had done is found again by
//! the next look at the runtime and the records, exactly as after a crash.

pub mod causes;
mod claims;
mod container_start;
mod devices;
mod evict;
mod execute;
mod failures;
mod gate;
mod grow;
mod image_volumes;
mod isolation;
pub mod mounts;
pub mod pinning;
mod preempt;
mod purge;
pub mod queue;
pub mod reason_cache;
mod remotes;
mod resize;
mod resolve;
mod restart_all;
mod sandbox;
mod shutdown;
mod start;
mod stop;
mod stop_signal;
mod sync_pod;
pub mod take_over;
mod terminate;
mod worker;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info};

pub use causes::Causes;
pub use gate::StartGate;
pub use queue::WorkQueue;
pub use reason_cache::{ReasonCache, StartFailure};

use crate::cm::pinning::Pinning;
use crate::cm::{CgroupError, CgroupManager};
pub use crate::core::pod_worker::UpdateOptions;
use crate::core::pod_worker::{self, KnownPod, Worker};
use crate::core::state::{EpochRecord, State, WorkerPhase, WorkerRecord};
use crate::devicemanager::DeviceManager;
use crate::dra::DraManager;
use crate::images::ImageManager;
use crate::kuberuntime::cri::CriClient;
use crate::kuberuntime::gc::Remover;
use crate::kuberuntime::node_context::NodeContext;
use crate::kuberuntime::sources::References;
use crate::node_object::NodeObject;
use crate::objects::{ObjectChange, Objects};
use crate::pleg::PlegHandle;
use crate::prober::Prober;
use crate::runtime_state::RuntimeState;
use crate::status::StatusManager;
use crate::store::Store;
use crate::types::metrics::{Metrics, WorkingPodLabel, static_value};
use crate::types::runtime::PodStatus;
use crate::types::{Clock, EventRecorder, PodExt, PodSource, PodSyncType, PodUid, blocking};
use crate::volumemanager::VolumeManager;

/// Everything a worker needs to act: what every step needs, and in groups what some need.
pub struct WorkerContext {
    /// The store.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Recorder of events.
    pub recorder: Arc<dyn EventRecorder>,
    /// Metrics.
    pub metrics: Metrics,
    /// The runtime.
    pub cri: CriClient,
    /// Facts of the node that container configurations depend on.
    pub node: NodeContext,
    /// Pod cache and relist requests.
    pub pleg: PlegHandle,
    /// Network readiness.
    pub runtime_state: RuntimeState,
    /// For steps that prepare a pod and create its containers.
    pub content: Content,
    /// For steps that give a pod its share of the node, or take it back.
    pub resources: Resources,
    /// For steps that report the status of a pod.
    pub reports: Reports,
    /// For the choice of the next step.
    pub schedule: Schedule,
}

/// Content of containers: images, volumes, and the objects that pods refer to.
pub struct Content {
    /// Images.
    pub images: Arc<ImageManager>,
    /// Volumes.
    pub volumes: VolumeManager,
    /// API objects that pods refer to.
    pub objects: Objects,
    /// This node's object.
    pub node_object: NodeObject,
    /// Images that volumes of kind `image` refer to, and their mounts.
    pub volume_images: mounts::VolumeImages,
}

/// Resources of the node that pods have for themselves.
pub struct Resources {
    /// Cgroups.
    pub cgroups: Arc<CgroupManager>,
    /// CPUs and NUMA nodes that containers have for themselves.
    pub pinning: Pinning,
    /// Devices of device plugins.
    pub devices: DeviceManager,
    /// Resource claims.
    pub claims: DraManager,
}

/// Sources of a pod's status, and its destination.
pub struct Reports {
    /// Statuses.
    pub status: StatusManager,
    /// Reasons why containers are not running.
    pub reasons: ReasonCache,
    /// Probes.
    pub prober: Prober,
    /// The runtime's name, prefix of container IDs in statuses.
    pub runtime_name: String,
    /// Longest crash back-off.
    pub backoff_max: Duration,
}

/// Times and turns of workers.
pub struct Schedule {
    /// Due times.
    pub queue: WorkQueue,
    /// Limits how many pods start at a time.
    pub starts: StartGate,
    /// Events that may end back-offs early.
    pub causes: Causes,
    /// Longest time between two syncs of a pod, before jitter: `syncFrequency`.
    pub resync: Duration,
    /// The store's epoch; pods it has not confirmed do not start.
    pub epoch: EpochRecord,
}

impl WorkerContext {
    /// Does something with cgroups off the async threads: the kernel may take its time.
    pub(crate) async fn with_cgroups<T: Send + 'static>(
        &self,
        work: impl FnOnce(&CgroupManager) -> Result<T, CgroupError> + Send + 'static,
    ) -> Result<T, CgroupError> {
        let cgroups = Arc::clone(&self.resources.cgroups);
        match blocking::run(move || work(&cgroups)).await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Only a runtime that is shutting down cancels blocking work.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// Returns the remover of dead containers, which records their exits first.
    pub fn remover(&self) -> Remover<'_> {
        Remover {
            cri: &self.cri,
            store: &self.store,
            clock: &*self.clock,
            ctx: &self.node,
        }
    }
}

/// A worker as the others see it.
struct Handle {
    /// The job of a step that begins now.
    job: Job,
    notify: Arc<Notify>,
}

impl Handle {
    fn new(worker: Worker, acted: Option<Instant>) -> Self {
        Self {
            job: Job {
                worker,
                cancel: CancellationToken::new(),
                interrupt: CancellationToken::new(),
                stopping: Arc::default(),
                acted,
                seen: Instant::now(),
            },
            notify: Arc::new(Notify::new()),
        }
    }

    /// Begins a step, which can be cancelled and interrupted by itself.
    fn begin(&mut self) -> Job {
        self.job.cancel = CancellationToken::new();
        self.job.interrupt = CancellationToken::new();
        self.job.stopping = Arc::default();
        self.job.clone()
    }
}

impl Deref for Handle {
    type Target = Job;

    fn deref(&self) -> &Job {
        &self.job
    }
}

impl DerefMut for Handle {
    fn deref_mut(&mut self) -> &mut Job {
        &mut self.job
    }
}

/// Input of one step.
#[derive(Clone)]
struct Job {
    worker: Worker,
    /// Cancels the step in flight.
    cancel: CancellationToken,
    /// Cancels the step in flight unless it stops something already.
    interrupt: CancellationToken,
    /// Held while something of the pod is stopped.
    stopping: Arc<tokio::sync::Mutex<()>>,
    /// End of the last step that changed the runtime: a look at it must be younger.
    acted: Option<Instant>,
    /// First sight, for the start latency.
    seen: Instant,
}

impl Deref for Job {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        &self.worker
    }
}

struct Inner {
    context: WorkerContext,
    handles: Mutex<HashMap<PodUid, Handle>>,
    tasks: TaskTracker,
    stop: CancellationToken,
    abort: CancellationToken,
    /// A worker came to another phase, or went away, since this was last taken.
    moved: AtomicBool,
    /// Pods whose workers went away since this was last taken.
    forgotten: Mutex<Vec<PodUid>>,
    /// Something was added to `forgotten`.
    forgot: Arc<Notify>,
}

/// The workers. Cheap to clone.
#[derive(Clone)]
pub struct PodWorkers(Arc<Inner>);

impl PodWorkers {
    /// No workers yet. `stop` makes every worker end after its step in flight.
    pub fn new(context: WorkerContext, stop: CancellationToken) -> Self {
        Self(Arc::new(Inner {
            context,
            handles: Mutex::default(),
            tasks: TaskTracker::new(),
            stop,
            abort: CancellationToken::new(),
            moved: AtomicBool::new(true),
            forgotten: Mutex::default(),
            forgot: Arc::default(),
        }))
    }

    /// Returns the dependencies that the workers share.
    pub fn context(&self) -> &WorkerContext {
        &self.0.context
    }

    fn handles(&self) -> MutexGuard<'_, HashMap<PodUid, Handle>> {
        self.0
            .handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells a worker something; creates it at first sight. Never waits. Upstream: `UpdatePod`.
    pub fn update(&self, options: UpdateOptions) {
        let uid = options.pod.uid();
        let now = self.0.context.clock.now();
        let cache = self.0.context.pleg.cache();
        let cached = cache.known(&uid).filter(|_| cache.contains(&uid));
        // A record without a worker: its pod could not be read at start and is back from its source.
        let left = self
            .0
            .context
            .store
            .snapshot()
            .record::<WorkerRecord>(uid.as_str())
            .filter(|r| !r.runtime_only)
            .cloned();
        let shown = cached.as_deref();
        let mut handles = self.handles();
        match handles.get_mut(&uid) {
            Some(handle) => {
                self.pod_changed(&handle.pod, &options.pod, now);
                if handle.worker.update(options, shown, now) {
                    handle.cancel.cancel();
                }
                if handle.pending {
                    handle.notify.notify_one();
                }
            }
            None => {
                if !options.runtime_only {
                    self.count_containers(&options.pod);
                }
                // What was seen last of a pod without records may be what was just removed of its former life.
                let is_left = |status: &PodStatus| {
                    !(status.containers.is_empty() && status.sandboxes.is_empty())
                };
                let acted = (left.is_none() && shown.is_some_and(is_left)).then(Instant::now);
                let worker = Worker::first(options, left.as_ref(), shown, now);
                self.spawn(&mut handles, uid, Handle::new(worker, acted));
            }
        }
    }

    /// Brings a worker back as the store remembers it.
    pub fn resume(&self, worker: Worker) {
        let uid = worker.uid.clone();
        if !worker.record.runtime_only {
            self.count_containers(&worker.pod);
        }
        let mut handles = self.handles();
        self.spawn(&mut handles, uid, Handle::new(worker, None));
    }

    /// A kubelet that restarts sees every pod as new, so pods that were resumed count as well.
    fn count_containers(&self, pod: &Pod) {
        let containers = u32::try_from(pod.spec_ref().containers.len());
        let metrics = &self.0.context.metrics;
        metrics
            .containers_per_pod
            .observe(f64::from(containers.unwrap_or(u32::MAX)));
    }

    /// Wakes a pod's worker to look again. Nothing happens for unknown pods, nor for finished ones unless
    /// they are to be forgotten and that has not succeeded yet.
    pub fn sync(&self, uid: &PodUid) {
        let mut handles = self.handles();
        if let Some(handle) = handles.get_mut(uid)
            && handle.worker.wake()
        {
            handle.notify.notify_one();
        }
    }

    /// Wakes a pod's worker to stop a container whose probe says so. A step in flight is given up for that, whatever it waits
    /// for, unless it stops something itself. Never waits.
    pub fn probe_failed(&self, uid: &PodUid) {
        let mut handles = self.handles();
        if let Some(handle) = handles.get_mut(uid)
            && handle.worker.wake()
        {
            if handle.record.phase == WorkerPhase::Sync {
                handle.interrupt.cancel();
            }
            handle.notify.notify_one();
        }
    }

    /// Wakes the pods that refer to an object that has changed; all that may refer to one when it is not
    /// known which (`None`). Never waits.
    pub fn object_changed(&self, change: Option<&ObjectChange>) {
        // What volumes lead to is in no pod's spec.
        let led: HashSet<PodUid> = change.map_or_else(HashSet::new, |change| {
            let pods = self.0.context.content.objects.pods_referring(change);
            pods.into_iter().collect()
        });
        let cause = self.configuration(change);
        let mut handles = self.handles();
        for (uid, handle) in handles.iter_mut() {
            let wake = handle.record.phase == WorkerPhase::Sync
                && !handle.pod.is_static()
                && change.is_none_or(|change| {
                    concerns(change, &handle.pod) || (change.kind != "Service" && led.contains(uid))
                });
            if wake {
                if let Some(cause) = &cause {
                    self.0
                        .context
                        .schedule
                        .causes
                        .happened_to(uid, cause.clone());
                }
                handle.worker.pending = true;
                handle.notify.notify_one();
            }
        }
    }

    /// The source has spoken for these pods in this epoch.
    pub fn confirm<'a>(&self, uids: impl Iterator<Item = &'a PodUid>) {
        let mut handles = self.handles();
        for uid in uids {
            if let Some(handle) = handles.get_mut(uid)
                && !handle.confirmed
            {
                handle.worker.confirmed = true;
                handle.worker.pending = true;
                handle.notify.notify_one();
            }
        }
    }

    /// Returns whether a worker changed its phase or ended since the previous call. If so, there may be something to
    /// clean up.
    pub fn take_moved(&self) -> bool {
        self.0.moved.swap(false, Ordering::Relaxed)
    }

    fn mark_moved(&self) {
        self.0.moved.store(true, Ordering::Relaxed);
    }

    /// Tells when [`PodWorkers::take_forgotten`] has something.
    pub fn forgot(&self) -> Arc<Notify> {
        Arc::clone(&self.0.forgot)
    }

    /// The pods whose workers went away since this was asked last: one that its source wants is to get another.
    pub fn take_forgotten(&self) -> Vec<PodUid> {
        let forgotten = self.0.forgotten.lock();
        std::mem::take(&mut *forgotten.unwrap_or_else(PoisonError::into_inner))
    }

    /// A pod is finished, on record: whoever waits for that goes on. That is its own next life, static pods of its name
    /// and the mirror pod of the one that comes next.
    fn pod_finished(&self, uid: &PodUid) {
        let mut handles = self.handles();
        let Some(handle) = handles.get_mut(uid) else {
            return;
        };
        if handle.worker.forget_for_next_life() {
            handle.notify.notify_one();
        }
        let (full_name, is_static) = (handle.record.full_name.clone(), handle.source.is_static());
        wake_name(&mut handles, &full_name);
        drop(handles);
        if is_static {
            self.0.context.reports.status.wake_mirrors();
        }
    }

    /// Removes the worker of a pod that is forgotten, and wakes the waiters for that.
    fn remove(&self, uid: &PodUid) {
        let mut handles = self.handles();
        let removed = handles.remove(uid);
        if let Some(handle) = &removed {
            wake_name(&mut handles, &handle.record.full_name);
        }
        drop(handles);
        self.0.context.reports.status.forget(uid);
        self.mark_moved();
        let forgotten = self.0.forgotten.lock();
        forgotten
            .unwrap_or_else(PoisonError::into_inner)
            .push(uid.clone());
        self.0.forgot.notify_one();
        if removed.is_some_and(|handle| handle.source.is_static()) {
            self.0.context.reports.status.wake_mirrors();
        }
    }

    /// Has the pods stopped that are finished and of which the runtime shows something running. Never waits.
    pub fn stop_finished(&self, shown: &[Arc<PodStatus>]) {
        let mut handles = self.handles();
        for status in shown {
            if let Some(handle) = handles.get_mut(&status.uid)
                && !handle.forget
                && pod_worker::is_left_running(&handle.record, status)
            {
                handle.worker.pending = true;
                handle.notify.notify_one();
            }
        }
    }

    /// Returns whether the pod has a worker, in any phase.
    pub fn knows(&self, uid: &PodUid) -> bool {
        self.handles().contains_key(uid)
    }

    /// Every known pod with whether it is finished on this node.
    pub fn known(&self) -> HashMap<PodUid, bool> {
        self.handles()
            .iter()
            .map(|(uid, h)| {
                let finished = matches!(h.record.phase, WorkerPhase::Finished { .. });
                (uid.clone(), finished)
            })
            .collect()
    }

    /// A pod that has a worker; `None` for one that only the runtime knows.
    fn pod_of(&self, uid: &PodUid) -> Option<Arc<Pod>> {
        let handles = self.handles();
        let handle = handles.get(uid).filter(|h| !h.record.runtime_only);
        handle.map(|h| Arc::clone(&h.pod))
    }

    /// Forgets a static pod that admission refused, once it is finished, so that it is decided on again. Returns whether it
    /// is forgotten now.
    pub fn admit_again(&self, uid: &PodUid) -> bool {
        let state = self.0.context.store.snapshot();
        let mut handles = self.handles();
        let Some(handle) = handles.get_mut(uid) else {
            return false;
        };
        let is_forgotten = handle.worker.forget_refusal(&state);
        if is_forgotten {
            handle.notify.notify_one();
        }
        is_forgotten
    }

    /// Returns the pods that hold resources of this node, see [`Worker::is_counted_by_admission`]. Upstream: `GetActivePods`.
    pub fn counted_by_admission(&self) -> Vec<Arc<Pod>> {
        let state = self.0.context.store.snapshot();
        let handles = self.handles();
        let counted = handles
            .iter()
            .filter(|(_, handle)| self.is_counted(handle, &state));
        counted.map(|(_, handle)| Arc::clone(&handle.pod)).collect()
    }

    /// Returns a pod if it is one of [`Self::counted_by_admission`], without a look at the others.
    pub fn if_counted_by_admission(&self, uid: &PodUid) -> Option<Arc<Pod>> {
        let state = self.0.context.store.snapshot();
        let handles = self.handles();
        let handle = handles.get(uid)?;
        self.is_counted(handle, &state)
            .then(|| Arc::clone(&handle.pod))
    }

    fn is_counted(&self, worker: &Worker, state: &State) -> bool {
        worker.is_counted_by_admission(state, || {
            let cache = self.0.context.pleg.cache();
            match cache.known(&worker.uid) {
                Some(status) => !status.any_running() && status.ready_sandbox().is_none(),
                // One that has just come may not have been listed yet; one that cannot be inspected is there.
                None => !cache.contains(&worker.uid),
            }
        })
    }

    /// Compares all workers with the UIDs the sources want: stops what is gone, forgets what is finished.
    /// `source_ready` says whether a source has spoken; pods of others are left alone.
    /// Upstream: `SyncKnownPods`.
    pub fn sync_known_pods(
        &self,
        desired: &HashSet<PodUid>,
        source_ready: impl Fn(PodSource) -> bool,
    ) {
        let mut stop = Vec::new();
        {
            let mut handles = self.handles();
            for (uid, handle) in handles.iter_mut() {
                let wanted = desired.contains(uid);
                if !wanted && !handle.record.runtime_only && !source_ready(handle.source) {
                    continue;
                }
                match pod_worker::sync_known(&handle.record, wanted) {
                    KnownPod::Keep => {}
                    KnownPod::Stop => stop.push(Arc::clone(&handle.pod)),
                    KnownPod::Drop | KnownPod::Forget => {
                        if handle.worker.begin_forgetting() {
                            debug!(pod = %uid, "forgetting pod");
                            handle.notify.notify_one();
                        }
                    }
                }
            }
        }
        for pod in stop {
            info!(pod = %pod.uid(), "pod is gone from its source");
            self.update(UpdateOptions::new(pod, PodSyncType::Kill));
        }
        self.count();
    }

    /// Ends every worker after its step in flight, at the latest when `deadline` has passed.
    pub async fn drain(&self, deadline: Duration) {
        self.0.stop.cancel();
        self.0.tasks.close();
        if tokio::time::timeout(deadline, self.0.tasks.wait())
            .await
            .is_err()
        {
            info!(
                left = self.0.tasks.len(),
                "some workers are still busy, the next start resumes their pods"
            );
            self.abort();
        }
    }

    /// Drops every worker where it is, as the end of the process would.
    pub fn abort(&self) {
        self.0.abort.cancel();
    }

    fn count(&self) {
        // Who wants them, and whether they are static; what only the runtime knows may be either.
        let kinds = [
            ("desired", static_value(true)),
            ("desired", static_value(false)),
            ("orphan", static_value(true)),
            ("orphan", static_value(false)),
            ("runtime_only", "unknown"),
        ];
        let mut counts: BTreeMap<(&str, (&str, &str)), i64> = BTreeMap::new();
        for lifecycle in ["sync", "terminating", "terminated"] {
            counts.extend(kinds.map(|kind| ((lifecycle, kind), 0)));
        }
        for handle in self.handles().values() {
            let lifecycle = match handle.record.phase {
                WorkerPhase::Sync => "sync",
                WorkerPhase::Terminating { .. } => "terminating",
                WorkerPhase::Terminated { .. } => "terminated",
                WorkerPhase::Finished { .. } => continue,
            };
            let is_static = static_value(handle.source.is_static());
            let kind = match (handle.record.runtime_only, handle.record.deleted) {
                (true, _) => ("runtime_only", "unknown"),
                (false, true) => ("orphan", is_static),
                (false, false) => ("desired", is_static),
            };
            *counts.entry((lifecycle, kind)).or_default() += 1;
        }
        for ((lifecycle, (config, is_static)), n) in counts {
            let label = WorkingPodLabel {
                config: config.to_owned(),
                lifecycle: lifecycle.to_owned(),
                r#static: is_static.to_owned(),
            };
            self.0
                .context
                .metrics
                .working_pods
                .get_or_create(&label)
                .set(n);
        }
    }

    fn spawn(&self, handles: &mut HashMap<PodUid, Handle>, uid: PodUid, handle: Handle) {
        if handle.pending {
            handle.notify.notify_one();
        }
        let notify = Arc::clone(&handle.notify);
        handles.insert(uid.clone(), handle);
        let workers = self.clone();
        let abort = self.0.abort.clone();
        self.0.tasks.spawn(async move {
            // Dropped wherever it is: see the invariant above.
            abort
                .run_until_cancelled(worker::run(workers, uid, notify))
                .await
        });
    }
}

/// Wakes the workers of static pods of this name that have not started: it may be their turn.
fn wake_name(handles: &mut HashMap<PodUid, Handle>, full_name: &str) {
    for handle in handles.values_mut() {
        if handle.waits_for_its_name() && handle.record.full_name == full_name {
            handle.worker.pending = true;
            handle.notify.notify_one();
        }
    }
}

/// Returns whether a changed object requires another sync of a pod. Services do not: a container reads them once, when
/// it starts.
fn concerns(change: &ObjectChange, pod: &Pod) -> bool {
    if change.kind == "RuntimeClass" {
        return pod.spec_ref().runtime_class_name.as_deref() == Some(&change.name);
    }
    if change.kind == "ClusterTrustBundle" {
        return References::pod_uses(pod, change.kind, "");
    }
    if matches!(change.kind, "Token" | "PodCertificate") {
        return pod.uid().as_str() == change.name;
    }
    change.namespace == pod.namespace() && References::pod_uses(pod, change.kind, &change.name)
}

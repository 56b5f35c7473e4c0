//! Clean-up of left-overs. Upstream: `HandlePodCleanups`, and the garbage collectors.
//!
//! The comparison of workers, sources and runtime is done in the loop, on values in memory. What needs the
//! runtime or the file system (dead containers, orphan directories, cgroups, records) is done by the
//! [`Janitor`], a task of its own, so that neither can hold up the loop.
//!
//! **Invariant:** a running pod is killed as an orphan, and cgroups, directories and logs of unknown pods are removed,
//! only when every source has synced and could be read completely. A source that cannot be read is not an empty source.
//! For a static pod whose sandbox names its source, that source alone decides about the kill (`core::orphans`). Nothing
//! is removed while the runtime may have something of the pod: it was not listed yet, or the pod cannot be inspected.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::handlers::Admissions;
use super::{LoopContext, resizes};
use crate::cm::Mended;
use crate::core::container_history::Records;
use crate::core::orphans;
use crate::core::state::{
    AdmissionRecord, ContainerRecord, PlegRecord, ProbeRecord, QueueRecord, State, StatusRecord,
    Transaction, WorkerRecord, kinds,
};
use crate::kuberuntime::attempt_files::{self, Extent, PodFiles};
use crate::kuberuntime::node_context::NodeContext;
use crate::kuberuntime::{gc, logs};
use crate::pod_workers::{PodWorkers, UpdateOptions, WorkerContext};
use crate::store::StopDecision;
use crate::types::metrics::StaticLabel;
use crate::types::runtime::PodStatus;
use crate::types::{Event, EventType, Pace, PodExt, PodSource, PodSyncType, PodUid, Stamp, causes};

/// Interval of container collection even if no container ended.
const GC_PERIOD: Duration = Duration::from_secs(60);
/// Name of a sweep's errors in the log.
const GARBAGE: &str = "container garbage";
/// The limits of cgroups are compared this often.
const MEND_PERIOD: Duration = Duration::from_secs(30);

/// Compares sources, workers and runtime. Returns whether it changed something and should run again soon.
pub(super) fn pod_cleanups(context: &LoopContext) -> bool {
    let desired_pods = context.pods.all();
    let desired: HashSet<PodUid> = desired_pods.iter().map(|p| p.uid()).collect();
    let workers = &context.workers;
    workers.sync_known_pods(&desired, |source| context.ready.ready(source));
    let mut changed = false;
    let mut admissions = Admissions::new(context);
    for pod in &desired_pods {
        changed |= recreate(context, &mut admissions, pod);
    }
    let confirmed: Vec<PodUid> = desired_pods
        .iter()
        .filter(|pod| context.ready.source_complete(pod.source()))
        .map(|pod| pod.uid())
        .collect();
    workers.confirm(confirmed.iter());
    workers.stop_finished(&context.pleg.cache().all());
    for pod in &desired_pods {
        resizes::consider(context, pod, resizes::PERIODIC);
    }
    resizes::measure(context, &desired_pods);
    let ephemeral = desired_pods
        .iter()
        .map(|pod| pod.ephemeral_containers().len());
    let ephemeral = i64::try_from(ephemeral.sum::<usize>()).unwrap_or(i64::MAX);
    context.metrics.managed_ephemeral_containers.set(ephemeral);
    changed |= kill_orphans(context, &desired);
    let (statics, others, mirrors) = context.pods.counts();
    let mirrors = i64::try_from(mirrors).unwrap_or(i64::MAX);
    context.metrics.mirror_pods.set(mirrors);
    set_by_kind(&context.metrics.desired_pods, statics, others);
    let (statics, others) = active_by_kind(&workers.counted_by_admission(), &desired);
    set_by_kind(&context.metrics.active_pods, statics, others);
    changed
}

/// Counts the active static pods and the active others: wanted, admitted and not finished. A static pod whose manifest is
/// gone is not, while it still ends. Upstream: `filterOutInactivePods` of the pod manager's pods.
fn active_by_kind(counted: &[Arc<Pod>], desired: &HashSet<PodUid>) -> (usize, usize) {
    let active = counted.iter().filter(|pod| desired.contains(&pod.uid()));
    let (statics, others): (Vec<_>, Vec<_>) = active.partition(|pod| pod.is_static());
    (statics.len(), others.len())
}

/// Gives pods that their sources want a new worker if their previous one is gone, without waiting for the next
/// housekeeping: the new worker starts as soon as nothing is left of the previous one.
pub(super) fn recreate_forgotten(context: &LoopContext) {
    let mut admissions = Admissions::new(context);
    for uid in context.workers.take_forgotten() {
        if let Some(pod) = context.pods.get(&uid) {
            recreate(context, &mut admissions, &pod);
        }
    }
}

/// Gives a wanted pod a worker if it has none. Returns whether it had none.
fn recreate(context: &LoopContext, admissions: &mut Admissions<'_>, pod: &Arc<Pod>) -> bool {
    if context.workers.knows(&pod.uid()) {
        return false;
    }
    debug!(pod = %pod.uid(), "re-creating the worker of a wanted pod");
    let label = StaticLabel::of(pod.is_static());
    context.metrics.restarted_pods.get_or_create(&label).inc();
    admissions.add(Arc::clone(pod));
    true
}

/// Sets a metric of static pods and of others.
fn set_by_kind(metric: &Family<StaticLabel, Gauge>, statics: usize, others: usize) {
    for (is_static, count) in [(true, statics), (false, others)] {
        let label = StaticLabel::of(is_static);
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        metric.get_or_create(&label).set(count);
    }
}

/// Stops pods that run in the runtime, that have no worker, and that no source can want any more.
fn kill_orphans(context: &LoopContext, desired: &HashSet<PodUid>) -> bool {
    let mut found = false;
    let all_complete = context.ready.complete();
    for status in context.pleg.cache().all() {
        if !runs(&status) || desired.contains(&status.uid) || context.workers.knows(&status.uid) {
            continue;
        }
        let mut statics = context.unrecorded.iter();
        let named = statics.find(|known| known.uid == status.uid);
        let named = named.map(|known| known.source);
        let is_complete = |source| context.ready.source_complete(source);
        if orphans::may_stop(named, is_complete, all_complete) {
            let pod = pod_from_runtime(&status.uid, &status.name, &status.namespace);
            stop_orphan(context, pod, named);
            found = true;
        }
    }
    found
}

/// Stops the static pod without a record whose place a wanted pod takes. The worker of the wanted one waits for its end.
pub(super) fn stop_replaced(context: &LoopContext, wanted: &Pod) {
    for old in context.unrecorded.iter() {
        if orphans::is_replaced(&old.uid, &old.full_name(), old.source, wanted)
            && context.pods.get(&old.uid).is_none()
            && !context.workers.knows(&old.uid)
            && may_run(context, &old.uid)
        {
            let pod = pod_from_runtime(&old.uid, &old.name, &old.namespace);
            stop_orphan(context, pod, Some(old.source));
        }
    }
}

fn runs(status: &PodStatus) -> bool {
    status.any_running() || status.ready_sandbox().is_some()
}

/// Returns whether the runtime shows that a pod runs, or has not shown yet whether it does.
fn may_run(context: &LoopContext, uid: &PodUid) -> bool {
    let cache = context.pleg.cache();
    match cache.known(uid) {
        Some(status) => runs(&status),
        None => cache.present().is_none_or(|present| present.contains(uid)),
    }
}

/// Has a worker stop a pod that is known from the runtime only. `source` is the one that its sandbox names.
fn stop_orphan(context: &LoopContext, pod: Pod, source: Option<PodSource>) {
    warn!(
        pod = %pod.uid(),
        name = pod.name(),
        namespace = pod.namespace(),
        source = source.map(PodSource::as_str),
        "stopping a running pod that no source wants"
    );
    if let Some(source) = source {
        let text = format!(
            "Stopping the pod: it is not recorded, and its source ({source}) no longer wants it"
        );
        let event = Event::pod(EventType::Warning, &pod, "UnrecordedPodStopped", text);
        context.recorder.record(event);
    }
    context.metrics.orphaned_runtime_pods.inc();
    let mut options = UpdateOptions::new(Arc::new(pod), PodSyncType::Kill);
    options.runtime_only = true;
    context.workers.update(options);
}

/// Makes a pod from the runtime's labels alone. Upstream: `RunningPod.ToAPIPod`.
fn pod_from_runtime(uid: &PodUid, name: &str, namespace: &str) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.uid = Some(uid.to_string());
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.namespace = Some(namespace.to_owned());
    pod.spec = Some(PodSpec::default());
    pod
}

/// Logs and emits what another program had changed, once.
fn report_mended(context: &WorkerContext, mended: &[Mended]) {
    let what = mended.first();
    let reason = what.map(|first| format!("{}/{}", first.path, first.file));
    let reasons: Vec<&str> = reason.iter().map(String::as_str).collect();
    let pace = context.content.volumes.pace();
    let due = pace.due("cgroup limits", &reasons, context.clock.now());
    let (Some(first), Some(reason), [true]) = (what, &reason, due.as_slice()) else {
        return;
    };
    let found = first.found.as_deref().unwrap_or("missing");
    let text = format!(
        "{} cgroups had other limits than their pods ask for and were corrected; {reason} was {found}, is {} now",
        mended.len(),
        first.wanted
    );
    warn!(cgroups = mended.len(), file = %reason, found, wanted = %first.wanted, "another program changed cgroup limits, correcting them");
    let event = Event::node(EventType::Warning, "CgroupLimitsCorrected", text);
    context.recorder.record(event);
}

/// Returns those of `reasons` that something is wrong with `of` that are to be logged now.
fn due<'a>(pace: &Pace, of: &str, reasons: &'a [String], now: Stamp) -> Vec<&'a str> {
    let reasons: Vec<&str> = reasons.iter().map(String::as_str).collect();
    let due = pace.due(of, &reasons, now);
    let due = reasons.into_iter().zip(due);
    due.filter(|(_, due)| *due)
        .map(|(reason, _)| reason)
        .collect()
}

/// Order for the janitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JanitorOrder {
    /// A container of this pod died, so that older dead ones may go, or was removed, so that its files may.
    DeadContainers(PodUid),
    /// Check the limits of cgroups, which another program may have changed.
    MendCgroups,
    /// Everything but the limits of cgroups.
    Sweep {
        /// True if every source has synced and could be read completely.
        complete: bool,
    },
}

/// Removes dead containers and sandboxes, orphan directories, cgroups, logs and records, and keeps the files of attempts.
pub struct Janitor {
    workers: PodWorkers,
    orders: mpsc::Receiver<JanitorOrder>,
    policy: gc::GcPolicy,
    files: FilesSeen,
}

/// Containers to remove of the pods that have ended for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// As of all others.
    AsPolicy,
    /// Every container and sandbox.
    Everything,
}

/// Removes the dead containers and sandboxes that may go, and all of pods that have ended: the disk is full. Upstream:
/// `DeleteAllUnusedContainers`.
pub async fn collect_unused(workers: &PodWorkers, policy: gc::GcPolicy) {
    let pods = workers.context().pleg.cache().all();
    let stayed = collect(workers, policy, &pods, Ended::Everything).await;
    report_garbage(
        workers.context(),
        "container garbage under pressure",
        &stayed,
    );
}

/// Logs what garbage could not be removed and emits an event about it, as often as `of` is due. Upstream: `StartGarbageCollection`.
fn report_garbage(context: &WorkerContext, of: &str, stayed: &[String]) {
    let pace = context.content.volumes.pace();
    let (due, event) = garbage_report(pace, of, stayed, context.clock.now());
    for error in due {
        warn!(error, "cannot remove leftovers of containers");
    }
    if let Some(event) = event {
        context.recorder.record(event);
    }
}

/// Returns the errors that are due to be logged, and the event about them.
fn garbage_report<'a>(
    pace: &Pace,
    of: &str,
    stayed: &'a [String],
    now: Stamp,
) -> (Vec<&'a str>, Option<Event>) {
    let reasons: Vec<&str> = stayed.iter().map(String::as_str).collect();
    let due = pace.due(of, &reasons, now);
    let due: Vec<&str> = reasons
        .into_iter()
        .zip(due)
        .filter_map(|(reason, is_due)| is_due.then_some(reason))
        .collect();
    let event = due.first().map(|first| {
        let text = match due.len() {
            1 => (*first).to_owned(),
            count => format!("{first}; and {} more", count - 1),
        };
        Event::node(EventType::Warning, "ContainerGCFailed", text)
    });
    (due, event)
}

/// Removes dead containers and sandboxes, after their ends are recorded. Returns what stayed although it was to go.
async fn collect(
    workers: &PodWorkers,
    policy: gc::GcPolicy,
    pods: &[Arc<PodStatus>],
    ended: Ended,
) -> Vec<String> {
    let context = workers.context();
    let known = workers.known();
    let is_gone = |uid: &PodUid| match known.get(uid) {
        None => true,
        Some(is_finished) => *is_finished && ended == Ended::Everything,
    };
    let gone: BTreeSet<PodUid> = pods
        .iter()
        .filter(|p| is_gone(&p.uid) && !p.any_running())
        .filter(|p| p.ready_sandbox().is_none())
        .map(|p| p.uid.clone())
        .collect();
    let statuses: Vec<PodStatus> = pods.iter().map(|p| (**p).clone()).collect();
    if gc::evictable_containers(&statuses, policy, &gone, i64::MAX).is_empty()
        && gc::evictable_sandboxes(&statuses, &gone).is_empty()
    {
        return Vec::new();
    }
    let decision = StopDecision::unrecorded_leftovers();
    let permit = match context.store.commit_stop(decision).await {
        Ok(permit) => permit,
        Err(error) => {
            // The store reports itself.
            warn!(%error, "cannot remove dead containers before the store records their exits");
            return Vec::new();
        }
    };
    let report = context
        .remover()
        .collect(&statuses, policy, &gone, &permit)
        .await;
    if report.containers > 0 || report.sandboxes > 0 {
        debug!(
            containers = report.containers,
            sandboxes = report.sandboxes,
            "collected dead containers and sandboxes"
        );
        for pod in pods {
            context.pleg.request(&pod.uid);
        }
    }
    report.errors.iter().map(|error| causes(error)).collect()
}

/// State of the files of attempts as the janitor last saw it, so that it checks only those that may have changed.
#[derive(Default)]
struct FilesSeen {
    /// The files of all pods were compared since the agent was started.
    all: bool,
    /// Time of the last change of the directory of links.
    links: Option<SystemTime>,
    /// Pods that are checked again in the next sweep: a start of theirs had neither a container nor an end.
    unsettled: BTreeSet<PodUid>,
    /// Time of the last comparison of the links with their logs.
    dead_links: Option<tokio::time::Instant>,
}

impl Janitor {
    /// A janitor and where to send its orders (capacity 50).
    pub fn new(
        workers: PodWorkers,
        policy: gc::GcPolicy,
        orders: mpsc::Receiver<JanitorOrder>,
    ) -> Self {
        Self {
            workers,
            orders,
            policy,
            files: FilesSeen::default(),
        }
    }

    /// Runs until `token` is cancelled.
    pub async fn run(mut self, token: CancellationToken) {
        let mut swept = tokio::time::Instant::now();
        let mut mended = swept;
        loop {
            // Cancel-safe: receiving and sleeping lose nothing.
            let order = tokio::select! {
                () = token.cancelled() => return,
                order = self.orders.recv() => match order {
                    Some(order) => order,
                    None => return,
                },
                () = tokio::time::sleep_until(swept + GC_PERIOD) => JanitorOrder::Sweep { complete: false },
                () = tokio::time::sleep_until(mended + MEND_PERIOD) => JanitorOrder::MendCgroups,
            };
            match order {
                JanitorOrder::DeadContainers(uid) => {
                    let status = self.workers.context().pleg.cache().get(&uid);
                    for error in self.collect(std::slice::from_ref(&status)).await {
                        warn!(pod = %uid, error, "cannot remove leftovers of containers");
                    }
                    self.tidy(&[status], Extent::Everything).await;
                    // Its end may not be on record yet: what that makes superfluous goes with the next sweep.
                    self.files.unsettled.insert(uid);
                }
                JanitorOrder::MendCgroups => {
                    mended = tokio::time::Instant::now();
                    self.mend_cgroups().await;
                }
                JanitorOrder::Sweep { complete } => {
                    swept = tokio::time::Instant::now();
                    self.sweep(complete).await;
                }
            }
        }
    }

    async fn sweep(&mut self, complete: bool) {
        let pods = self.workers.context().pleg.cache().all();
        let mut stayed = self.collect(&pods).await;
        // Before the runtime was listed, nothing is known to be left over.
        let Some(mut keep) = self.workers.context().pleg.cache().present() else {
            report_garbage(self.workers.context(), GARBAGE, &stayed);
            return;
        };
        self.tidy_what_changed(&pods).await;
        let context = self.workers.context();
        keep.extend(self.workers.known().into_keys());
        if complete {
            // The data of a pod that only a source out of reach knows is not its to lose.
            let errors = context.content.volumes.cleanup_orphan_dirs(&keep).await;
            let texts: Vec<String> = errors.iter().map(|error| causes(error)).collect();
            let reasons: Vec<&str> = texts.iter().map(String::as_str).collect();
            let pace = context.content.volumes.pace();
            let due = pace.due("orphan directories", &reasons, context.clock.now());
            for (error, _) in texts.iter().zip(due).filter(|(_, is_due)| *is_due) {
                warn!(error, "cannot remove an orphan pod directory");
            }
        }
        let (kept, active) = (keep.clone(), self.workers.counted_by_admission());
        // Whatever runs in an orphan would be killed: a pod that only a source out of reach knows is none.
        let kept = complete.then_some(kept);
        let cgroups = context
            .with_cgroups(move |cgroups| Ok(cgroups.sweep(kept.as_ref(), &active)))
            .await;
        match cgroups {
            Ok(errors) => {
                let texts: Vec<String> = errors.iter().map(|error| causes(error)).collect();
                let reasons: Vec<&str> = texts.iter().map(String::as_str).collect();
                let pace = context.content.volumes.pace();
                let due = pace.due("cgroups", &reasons, context.clock.now());
                for (error, _) in texts.iter().zip(due).filter(|(_, is_due)| *is_due) {
                    warn!(error, "cannot update cgroups");
                }
            }
            Err(error) => warn!(error = causes(&error), "cannot update cgroups"),
        }
        stayed.extend(self.remove_logs(&keep, complete).await);
        report_garbage(self.workers.context(), GARBAGE, &stayed);
        self.drop_records(&keep, complete);
    }

    /// Removes the log directories of pods that neither `keep` nor a record names, when every source is `complete`, and links
    /// whose logs are gone. Returns what stayed although it was to go. Upstream: `evictPodLogsDirectories`.
    async fn remove_logs(&mut self, keep: &BTreeSet<PodUid>, complete: bool) -> Vec<String> {
        let context = self.workers.context();
        let mut stayed = Vec::new();
        let mut removed = 0;
        if complete {
            let (kept, recorded) = (keep.clone(), context.store.snapshot());
            let orphans = logs::beside(&context.node, move |node| {
                let is_known =
                    |uid: &PodUid| kept.contains(uid) || recorded.pods.contains_key(uid.as_str());
                logs::remove_orphan_pod_logs(node, &is_known)
            });
            match orphans.await {
                Ok((count, errors)) => {
                    removed = count;
                    stayed.extend(errors.iter().map(|error| causes(error)));
                }
                Err(error) => stayed.push(causes(&error)),
            }
        }
        let looked = self.files.dead_links;
        if removed > 0 || looked.is_none_or(|at| at.elapsed() >= GC_PERIOD) {
            self.files.dead_links = Some(tokio::time::Instant::now());
            if let Err(error) = logs::beside(&context.node, attempt_files::remove_dead_links).await
            {
                stayed.push(causes(&error));
            }
        }
        stayed
    }

    /// Restores the limits of cgroups that another program has changed. The kernel does not report such a change: a few
    /// small files of each pod are read.
    async fn mend_cgroups(&self) {
        let context = self.workers.context();
        let done = context.with_cgroups(|cgroups| Ok(cgroups.mend())).await;
        let (removed, failed) = match done {
            Ok(done) => {
                report_mended(context, &done.mended);
                (done.removed, done.failed)
            }
            Err(error) => (Vec::new(), vec![error]),
        };
        let failed: Vec<String> = failed.iter().map(|error| causes(error)).collect();
        let (pace, now) = (context.content.volumes.pace(), context.clock.now());
        for path in due(pace, "removed cgroups", &removed, now) {
            warn!(
                path,
                "a cgroup of all pods was removed by another program; making it again"
            );
        }
        for error in due(pace, "limits of cgroups", &failed, now) {
            warn!(error, "cannot restore limits of cgroups");
        }
    }

    /// Removes dead containers and sandboxes as the policy says. Returns what stayed although it was to go.
    async fn collect(&self, pods: &[Arc<PodStatus>]) -> Vec<String> {
        collect(&self.workers, self.policy, pods, Ended::AsPolicy).await
    }

    /// Compares the files of all pods after a start of the agent. Later, the links when their directory has changed, and the
    /// files of pods that were not settled.
    async fn tidy_what_changed(&mut self, pods: &[Arc<PodStatus>]) {
        let node = &self.workers.context().node;
        let changed = match logs::beside(node, attempt_files::links_changed).await {
            Ok(changed) => changed,
            Err(error) => {
                warn!(%error, "cannot check whether links to logs are missing");
                self.files.links
            }
        };
        let is_first = !std::mem::replace(&mut self.files.all, true);
        let moved = std::mem::replace(&mut self.files.links, changed) != changed;
        let unsettled = std::mem::take(&mut self.files.unsettled);
        if is_first {
            return self.tidy(pods, Extent::Everything).await;
        }
        if moved {
            self.tidy(pods, Extent::Links).await;
        }
        let again: Vec<_> = pods
            .iter()
            .filter(|pod| unsettled.contains(&pod.uid))
            .cloned()
            .collect();
        if !again.is_empty() {
            self.tidy(&again, Extent::Everything).await;
        }
    }

    /// Restores links to logs, and removes files of attempts that are gone.
    async fn tidy(&mut self, pods: &[Arc<PodStatus>], extent: Extent) {
        let context = self.workers.context();
        let seen = context.store.snapshot();
        let files: Vec<PodFiles> = pods
            .iter()
            .filter_map(|pod| PodFiles::of(&context.node, pod, &Records::of(&seen, &pod.uid)))
            .collect();
        let unsettled = files.iter().filter(|pod| !pod.is_settled());
        self.files
            .unsettled
            .extend(unsettled.map(|pod| pod.uid().clone()));
        let work = move |node: &NodeContext| Ok(attempt_files::tidy(node, &files, extent));
        match logs::beside(&context.node, work).await {
            Ok(tidied) => {
                for error in &tidied.errors {
                    warn!(%error, "cannot correct files of containers");
                }
                if tidied.restored + tidied.removed > 0 {
                    let (restored, removed) = (tidied.restored, tidied.removed);
                    info!(
                        restored,
                        removed, "restored and removed files of containers"
                    );
                }
            }
            Err(error) => warn!(%error, "cannot correct files of containers"),
        }
    }

    fn drop_records(&self, keep: &BTreeSet<PodUid>, complete: bool) {
        let store = &self.workers.context().store;
        let transaction = left_over(&store.snapshot(), keep, complete);
        if !transaction.is_empty() {
            // Relaxed or not, nobody acts on these deletes; a degraded store reports itself.
            drop(store.submit(transaction));
        }
    }
}

/// The end of records of pods that neither a worker nor the runtime knows and that are not recorded as wanted.
fn left_over(state: &State, keep: &BTreeSet<PodUid>, complete: bool) -> Transaction {
    let mut transaction = Transaction::new();
    let orphan = |key: &str| {
        let uid = key.split('/').next().unwrap_or(key);
        !keep.contains(&PodUid::new(uid)) && !state.pods.contains_key(uid)
    };
    for key in state.queue.keys().filter(|k| orphan(k)) {
        transaction = transaction.delete::<QueueRecord>(key);
    }
    for key in state.statuses.keys().filter(|k| orphan(k)) {
        transaction = transaction.delete::<StatusRecord>(key);
    }
    for key in state.pleg.keys().filter(|k| orphan(k)) {
        transaction = transaction.delete::<PlegRecord>(key);
    }
    for key in state.probes.keys().filter(|k| orphan(k)) {
        transaction = transaction.delete::<ProbeRecord>(key);
    }
    if !complete {
        return transaction;
    }
    transaction = transaction.and(kinds::left_over(state, orphan));
    // Decisions about a pod go last: until then its source may bring it back.
    for key in state.workers.keys().filter(|k| orphan(k)) {
        transaction = transaction.delete::<WorkerRecord>(key);
    }
    for key in state.admissions.keys().filter(|k| orphan(k)) {
        transaction = transaction.delete::<AdmissionRecord>(key);
    }
    for key in state.containers.keys().filter(|k| orphan(k)) {
        transaction = transaction.delete::<ContainerRecord>(key);
    }
    transaction
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::core::state::{FactRecord, Mutation, VolumePhase, VolumeRecord};
    use crate::types::BootId;

    #[test]
    fn garbage_that_stays_is_reported_as_often_as_it_is_due() {
        let at = |boottime_ms| Stamp {
            boot: BootId(1),
            boottime_ms,
            wall_ms: 1,
        };
        let pace = Pace::default();
        let report = |stayed: &[&str], ms| {
            let stayed: Vec<String> = stayed.iter().map(|s| (*s).to_owned()).collect();
            let (due, event) = garbage_report(&pace, GARBAGE, &stayed, at(ms));
            (due.len(), event.map(|e| (e.reason.to_string(), e.message)))
        };
        let event = |text: &str| Some(("ContainerGCFailed".to_owned(), text.to_owned()));
        assert_eq!(report(&[], 1), (0, None));
        assert_eq!(report(&["a", "b"], 2), (2, event("a; and 1 more")));
        assert_eq!(report(&["a", "b"], 3), (0, None));
        assert_eq!(report(&["a", "c"], 4), (1, event("c")));
        assert_eq!(report(&["a"], 70_000), (1, event("a")));
    }

    #[test]
    fn what_stays_wrong_with_cgroups_is_not_logged_each_minute() {
        let at = |minute: i64| Stamp {
            boot: BootId(1),
            boottime_ms: minute * 60_000,
            wall_ms: 1,
        };
        let pace = Pace::default();
        let removed = ["/kubepods/burstable".to_owned()];
        let logged: Vec<i64> = (0..10)
            .filter(|minute| !due(&pace, "removed cgroups", &removed, at(*minute)).is_empty())
            .collect();
        assert_eq!(logged, [0, 1, 3, 7]);
        assert!(due(&pace, "removed cgroups", &[], at(10)).is_empty());
        let again = due(&pace, "removed cgroups", &removed, at(11));
        assert_eq!(again, ["/kubepods/burstable"], "it was there meanwhile");
    }

    #[test]
    fn a_static_pod_that_nobody_wants_any_more_is_not_active() {
        let pod = |uid: &str, source: Option<&str>| {
            let mut pod = pod_from_runtime(&PodUid::new(uid), uid, "ns");
            pod.metadata.annotations = source.map(|source| {
                BTreeMap::from([("kubernetes.io/config.source".to_owned(), source.to_owned())])
            });
            Arc::new(pod)
        };
        let counted = [
            pod("a", Some("file")),
            pod("b", Some("file")),
            pod("c", None),
            pod("d", Some("api")),
        ];
        let desired = |uids: &[&str]| uids.iter().map(|uid| PodUid::new(*uid)).collect();
        for (uids, expected) in [
            (&["a", "b", "c", "d"][..], (2, 2)),
            (&["a", "c", "d"], (1, 2)),
            (&["d", "other"], (0, 1)),
            (&[], (0, 0)),
        ] {
            assert_eq!(
                active_by_kind(&counted, &desired(uids)),
                expected,
                "{uids:?}"
            );
        }
    }

    #[test]
    fn what_is_kept_of_a_pod_goes_with_it_and_what_is_of_no_pod_stays() {
        let at = Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        };
        let object = FactRecord {
            mark: String::new(),
            layout: 1,
            data: b"{}".to_vec(),
            at,
        };
        let probe = ProbeRecord {
            container_id: "c".into(),
            result: "Success".to_owned(),
            last: "Success".to_owned(),
            consecutive: 1,
            at,
        };
        let volume = VolumeRecord {
            plugin: "kubernetes.io/nfs".to_owned(),
            path: "/x".to_owned(),
            phase: VolumePhase::Mounted,
            at,
        };
        let mut state = State::default();
        for uid in ["gone", "here"] {
            let puts = Transaction::new()
                .put(format!("{uid}/main/Liveness"), probe.clone())
                .put(format!("resizes/ns/{uid}"), object.clone())
                .put(format!("resizepending/ns/{uid}"), object.clone())
                .put(format!("userns/ns/{uid}"), object.clone())
                .put(format!("volumes/{uid}/forgotten"), object.clone())
                .put(format!("volumes/{uid}/mounted"), object.clone())
                .put(format!("{uid}/mounted"), volume.clone())
                .put("devices//0", object.clone())
                .put("device/0", volume.clone())
                .put(format!("imagepullerrors/{uid}/abc"), object.clone())
                .put(format!("backoffends/{uid}/main"), object.clone())
                .put(format!("restarts/{uid}/all"), object.clone())
                .put("resizes//turn", object.clone())
                .put(format!("secrets/ns/{uid}"), object.clone());
            for mutation in &puts.mutations {
                state.apply(mutation, 1);
            }
        }
        let keep = BTreeSet::from([PodUid::new("here")]);
        let deletes = |complete| -> Vec<String> {
            let left = left_over(&state, &keep, complete).mutations;
            let keys = left.into_iter().map(|m| match m {
                Mutation::Delete { key, .. } => key.to_string(),
                Mutation::Put { key, .. } => panic!("{key} is put"),
            });
            keys.collect()
        };
        assert_eq!(deletes(false), ["gone/main/Liveness"]);
        assert_eq!(
            deletes(true),
            [
                "gone/main/Liveness",
                "resizes/ns/gone",
                "resizepending/ns/gone",
                "userns/ns/gone",
                "imagepullerrors/gone/abc",
                "backoffends/gone/main",
                "restarts/gone/all",
                "volumes/gone/forgotten",
            ]
        );
    }
}

//! Evicts pods while the node is short of memory, disk or process ids; upstream's `managerImpl`.
//!
//! In: [`Figures`] of the node and its pods, the records of table `signals`. Out: the node's conditions, evictions
//! through [`ActivePods::evict`], removed garbage. `core::pressure` decides.
//!
//! **Invariant:** conditions are recorded before they are reported, unless the disk of the store hangs, and those of
//! the record hold until the node was observed. A restart under pressure neither flips a condition nor restarts a grace
//! period.
//!
//! **Invariant:** one pod at a time: nobody is evicted while another pod that was evicted, before a restart too, is
//! neither finished nor overdue. The pods are measured after the last one has ended.
//!
//! **Invariant:** a figure that cannot be read concerns its signal alone, and without the usage of pods nobody is evicted.
//! Nothing holds up the observation: garbage is removed beside it, disks are measured beside it, and a store that does not
//! answer records beside it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{ActivePods, Evicting, Eviction, Stopping};
use crate::core::node_status::Pressure;
use crate::core::pressure::report::{Reclaim, Report, Victim};
use crate::core::pressure::{
    self, Assessment, Candidate, Disks, Observations, PERIOD, PodUse, Rules, Signal, Signals,
    Threshold, Waste,
};
use crate::core::state::Transaction;
use crate::store::{CommitError, Store};
use crate::types::metrics::{EvictionLabel, Metrics};
use crate::types::{Clock, Event, EventRecorder, EventType, PodExt, PodUid, Stamp};

/// Pause between two observations while something is about to happen.
const MOMENT: Duration = Duration::from_secs(1);
/// Longest wait of a round for the store.
const STORE_PATIENCE: Duration = Duration::from_secs(2);
/// The containers of an evicted pod have at least this long to end.
const LEAST_PATIENCE: Duration = Duration::from_secs(10);
/// And this long to be cleaned up; upstream's `podCleanupTimeout`.
const CLEANUP_PATIENCE: Duration = Duration::from_secs(30);

/// The choice of a pod, in the journal.
const CHOSEN: &str = "chosen for eviction";

/// Asks for the usage of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageQuery {
    /// The signal for which one of them is to be evicted.
    pub signal: Signal,
    /// See [`Observations::disks`].
    pub disks: Disks,
    /// A measurement of disks that began longer ago does not count.
    pub max_age: Duration,
}

/// Measures the node and its pods.
pub trait Figures: Send + Sync {
    /// Returns what can be read of the node now. Takes a moment at most.
    fn observe(&self) -> BoxFuture<'_, Observations>;
    /// Returns the usage of the pods that were measured; `None` while too little is known of it. Takes a moment at
    /// most: a measurement that takes longer goes on, and serves a later query.
    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Option<BTreeMap<PodUid, PodUse>>>;
    /// Waits until the kernel reports that processes wait for memory, or that they use as much as a threshold allows; for ever
    /// where it does neither.
    fn alarm(&self) -> BoxFuture<'_, ()>;
}

/// Frees space on disks without harm to pods.
pub trait Garbage: Send + Sync {
    /// Removes dead containers and sandboxes, then images that nothing needs, as `waste` says. Removes what it can. Returns
    /// false, and removes nothing, while it is unknown which pods are wanted.
    fn remove(&self, waste: Waste) -> BoxFuture<'_, bool>;
}

/// Means to free resources of the node.
#[derive(Clone)]
pub struct Remedies {
    /// Candidates.
    pub pods: Arc<dyn ActivePods>,
    /// Frees disks.
    pub garbage: Arc<dyn Garbage>,
}

/// Dependencies of the manager.
pub struct PressureOptions {
    /// Set once the pods are known; the node is only observed before.
    pub remedies: Arc<OnceLock<Remedies>>,
    /// Measures.
    pub figures: Arc<dyn Figures>,
    /// The configuration.
    pub rules: Rules,
    /// The records to go on from, moved to this boot; see [`pressure::at_start`].
    pub signals: Signals,
    /// Records.
    pub store: Store,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Events about the node.
    pub recorder: Arc<dyn EventRecorder>,
    /// Metrics.
    pub metrics: Metrics,
    /// The node's conditions.
    pub pressure: watch::Sender<Pressure>,
}

/// Watches the node.
pub struct NodePressure {
    options: PressureOptions,
    signals: Signals,
    /// The record for operators.
    report: Report,
    /// Time of the last attempt for each signal that ended without an eviction.
    acted: HashMap<Signal, Stamp>,
    /// Time of the last event for each threshold.
    told: HashMap<Signal, Stamp>,
    /// The removal of garbage that is under way.
    removal: Option<(Waste, JoinSet<bool>)>,
    /// The records that are under way; one of the signals at most.
    recording: JoinSet<Result<(), CommitError>>,
    /// The evictions that were under way in the last round.
    evicting: Vec<Evicting>,
    /// The last eviction, until its pod is on its way out.
    ordered: Option<(PodUid, Evicting)>,
    /// Time at which the last eviction was found to have ended.
    settled: Option<Stamp>,
}

/// One observation with what it means.
struct Look {
    observed: Observations,
    assessment: Assessment,
    at: Stamp,
}

/// Outcome of an attempt to relieve a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A pod is being evicted for it.
    Evicted,
    /// Something has to end first.
    Waits,
    /// Nothing can be done for now.
    Nothing,
}

impl NodePressure {
    /// A manager that goes on from the records.
    pub fn new(mut options: PressureOptions) -> Self {
        let signals = std::mem::take(&mut options.signals);
        let report = Report::of(&options.store.snapshot());
        Self {
            options,
            signals,
            report,
            acted: HashMap::new(),
            told: HashMap::new(),
            removal: None,
            recording: JoinSet::new(),
            evicting: Vec::new(),
            ordered: None,
            settled: None,
        }
    }

    /// Observes every ten seconds, every second while memory is nearly short, garbage is removed or a pod is being
    /// evicted, and when the kernel reports stalls, until `token` is cancelled. May be dropped at any time.
    pub async fn run(mut self, token: CancellationToken) {
        loop {
            let pause = tokio::select! {
                () = token.cancelled() => return,
                pause = self.round() => pause,
            };
            let alarm = async {
                tokio::time::sleep(MOMENT).await;
                self.options.figures.alarm().await;
            };
            tokio::select! {
                () = token.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                () = alarm => {}
            }
        }
    }

    /// One round. Returns the pause until the next. Upstream: `synchronize`.
    async fn round(&mut self) -> Duration {
        let removed = self.removed();
        let look = self.look().await;
        let is_close = self.options.rules.is_close(&look.observed);
        let mut pause = if is_close { MOMENT } else { PERIOD };
        if look.assessment.acting.is_empty() {
            return pause;
        }
        let Some(remedies) = self.options.remedies.get().cloned() else {
            return MOMENT;
        };
        self.follow(&*remedies.pods);
        for threshold in &look.assessment.acting {
            match self.act(&remedies, threshold, &look, removed).await {
                Step::Evicted => return MOMENT,
                Step::Waits => pause = MOMENT,
                Step::Nothing => {}
            }
        }
        pause
    }

    /// Returns what the removal of garbage came to that has ended since the last round; `None` if none has.
    fn removed(&mut self) -> Option<(Waste, bool)> {
        let (waste, removal) = self.removal.as_mut()?;
        let (waste, ended) = (*waste, removal.try_join_next()?);
        self.removal = None;
        let removed = ended.unwrap_or_else(|error| {
            warn!(%error, "the removal of garbage was interrupted");
            false
        });
        if let Some(reclaim) = &mut self.report.last_reclaim {
            reclaim.ended = Some(self.options.clock.now());
            reclaim.removed = Some(removed);
        }
        Some((waste, removed))
    }

    /// Observes the node, records the result and then publishes the conditions.
    async fn look(&mut self) -> Look {
        let options = &self.options;
        let observed = options.figures.observe().await;
        let now = options.clock.now();
        let assessment = pressure::assess(&options.rules, &self.signals, &observed, now);
        self.signals.clone_from(&assessment.signals);
        self.report.observe(&options.rules, &observed, now);
        let is_urgent = !assessment.signals.is_empty() || options.rules.is_close(&observed);
        self.record(now, is_urgent).await;
        self.options.pressure.send_if_modified(|known| {
            let is_changed = *known != assessment.pressure;
            if is_changed {
                info!(before = ?known, now = ?assessment.pressure, "the pressure of the node has changed");
            }
            *known = assessment.pressure;
            is_changed
        });
        Look {
            observed,
            assessment,
            at: now,
        }
    }

    /// Records the signals, and what was observed; more often while that `is_urgent`. While an earlier record is still under
    /// way, the store gets no other one.
    async fn record(&mut self, now: Stamp, is_urgent: bool) {
        self.recorded(Duration::ZERO).await;
        if !self.recording.is_empty() {
            return;
        }
        let options = &self.options;
        let stored = options.store.snapshot();
        let changes = pressure::changes(&options.rules, &stored, &self.signals, now)
            .and(self.report.changes(&stored, is_urgent, now));
        if changes.is_empty() {
            return;
        }
        self.submit(changes);
        self.recorded(STORE_PATIENCE).await;
    }

    fn submit(&mut self, transaction: Transaction) {
        let pending = self.options.store.submit(transaction);
        self.recording
            .spawn(async move { pending.wait().await.map(drop) });
    }

    /// Waits for the record that is under way, if there is one, for so long at most.
    async fn recorded(&mut self, patience: Duration) {
        match tokio::time::timeout(patience, self.recording.join_next()).await {
            Ok(Some(Ok(Ok(()))) | None) => {}
            Ok(Some(Ok(Err(error)))) => debug!(%error, "cannot record eviction signals"),
            Ok(Some(Err(error))) => warn!(%error, "recording the eviction signals was interrupted"),
            // It was logged when it began.
            Err(_) if patience.is_zero() => {}
            Err(_) => warn!(
                seconds = patience.as_secs(),
                "cannot record eviction signals while the store waits for its disk; observation and evictions continue"
            ),
        }
    }

    /// Notes which evictions are under way, and when one of the last round has ended.
    fn follow(&mut self, pods: &dyn ActivePods) {
        let mut evicting = pods.evicting();
        // Its decision may take a while to be on record.
        let (running, stopping) = (pods.running(), pods.stopping());
        let stopping = stopping.iter().map(|s| &s.pod);
        let known: HashSet<PodUid> = running.iter().chain(stopping).map(|p| p.uid()).collect();
        self.ordered = self.ordered.take().filter(|(uid, _)| known.contains(uid));
        evicting.extend(self.ordered.iter().map(|(_, order)| *order));
        if self.evicting.iter().any(|pod| !evicting.contains(pod)) {
            self.settled = Some(self.options.clock.now());
        }
        self.evicting = evicting;
    }

    /// Returns whether an evicted pod has to end before another one is evicted for a threshold. A pod with a longer
    /// grace period does not delay a hard threshold.
    fn is_busy(&self, threshold: &Threshold, now: Stamp) -> bool {
        let is_hard = threshold.grace.is_none();
        self.evicting
            .iter()
            .any(|pod| now.since(pod.since) < patience(pod) && !(is_hard && pod.grace_seconds > 1))
    }

    /// Removes garbage if the signal needs that, and evicts a pod if that was not enough. `removed` is what a removal
    /// came to that ended before `look`.
    async fn act(
        &mut self,
        remedies: &Remedies,
        threshold: &Threshold,
        look: &Look,
        removed: Option<(Waste, bool)>,
    ) -> Step {
        let (signal, now) = (threshold.signal, look.at);
        if self.is_busy(threshold, now) {
            return Step::Waits;
        }
        let is_recent = |at: &Stamp| now.since(*at) < PERIOD;
        if self.acted.get(&signal).is_some_and(is_recent) {
            return Step::Nothing;
        }
        let mut may_evict = true;
        if let Some(waste) = signal.garbage(look.observed.disks) {
            match removed.filter(|(removed, _)| removed.covers(waste)) {
                Some((_, is_tried)) => may_evict = is_tried,
                None => {
                    self.begin_removal((&remedies.garbage, waste), threshold, now);
                    return Step::Waits;
                }
            }
        }
        self.tell(threshold, now);
        if may_evict && self.relieve(&*remedies.pods, threshold, look).await {
            self.acted.remove(&signal);
            return Step::Evicted;
        }
        self.acted.insert(signal, now);
        Step::Nothing
    }

    /// Starts to remove garbage, unless that is under way.
    fn begin_removal(
        &mut self,
        (garbage, waste): (&Arc<dyn Garbage>, Waste),
        threshold: &Threshold,
        now: Stamp,
    ) {
        if self.removal.is_some() {
            return;
        }
        self.tell(threshold, now);
        self.report.last_reclaim = Some(Reclaim {
            threshold: threshold.key(),
            began: now,
            ended: None,
            removed: None,
        });
        let garbage = Arc::clone(garbage);
        let mut removal = JoinSet::new();
        removal.spawn(async move { garbage.remove(waste).await });
        self.removal = Some((waste, removal));
    }

    fn tell(&mut self, threshold: &Threshold, now: Stamp) {
        let signal = threshold.signal;
        let is_recent = |at: &Stamp| now.since(*at) < PERIOD;
        if self.told.get(&signal).is_some_and(is_recent) {
            return;
        }
        self.told.insert(signal, now);
        let text = pressure::attempting(signal);
        warn!(
            signal = signal.name(),
            resource = signal.resource(),
            "an eviction threshold is met"
        );
        let event = Event::node(EventType::Warning, "EvictionThresholdMet", text);
        self.options.recorder.record(event);
    }

    /// Evicts the pod that is first in rank. Returns whether there was one.
    async fn relieve(&mut self, pods: &dyn ActivePods, threshold: &Threshold, look: &Look) -> bool {
        let (options, signal) = (&self.options, threshold.signal);
        let disks = look.observed.disks;
        let Some(figure) = look.observed.figures.get(&signal).copied() else {
            return false;
        };
        let since = |at: Stamp| options.clock.now().since(at);
        let query = UsageQuery {
            signal,
            disks,
            max_age: self.settled.map_or(Duration::MAX, since),
        };
        let Some(usage) = options.figures.usage(query).await else {
            warn!(
                signal = signal.name(),
                "cannot measure pods yet, evicting none"
            );
            return false;
        };
        let grace_of = |pod: &Pod| {
            let own = pod.spec_ref().termination_grace_period_seconds;
            threshold.pod_grace(options.rules.max_pod_grace, own)
        };
        let mut running = pods.running();
        running.retain(|pod| !pod.is_deleting());
        // A pod that leaks may have hours to end: before others go, it ends as fast as they would.
        let now = options.clock.now();
        let is_slow = |s: &Stopping| {
            let grace = u64::try_from(grace_of(&s.pod)).unwrap_or(0);
            s.deadline.until(now) > Duration::from_secs(grace)
        };
        let stopping = pods.stopping().into_iter().filter(is_slow);
        running.extend(stopping.map(|s| s.pod));
        let candidates: Vec<Candidate<'_>> = running
            .iter()
            .filter_map(|pod| {
                let usage = usage.get(&pod.uid())?;
                Some(Candidate { pod, usage })
            })
            .collect();
        let victim = pressure::victim(signal, disks, candidates.iter().copied());
        let with_standing = victim.and_then(|chosen| {
            let standing = pressure::standing(signal, disks, &chosen, candidates);
            Some((chosen, standing?))
        });
        let Some((chosen, standing)) = with_standing else {
            warn!(signal = signal.name(), "no pod may be evicted");
            return false;
        };
        let is_chosen = |pod: &&Arc<Pod>| std::ptr::eq(&***pod, chosen.pod);
        let Some(pod) = running.iter().find(is_chosen) else {
            return false;
        };
        let message = pressure::message(threshold, figure, &chosen);
        let grace = grace_of(pod);
        let label = EvictionLabel {
            eviction_signal: signal.name().to_owned(),
        };
        let now = options.clock.now();
        let age = now.since(look.at).as_secs_f64();
        options.metrics.evictions.get_or_create(&label).inc();
        let ages = &options.metrics.eviction_stats_age;
        ages.get_or_create(&label).observe(age);
        let victim = Victim::new(threshold, figure, &chosen, &standing, (now, grace));
        info!(pod = %pod.uid(), name = pod.name(), message, grace, why = victim.why, "evicting pod");
        let eviction = Eviction {
            message,
            annotations: pressure::annotations(signal, &chosen),
            grace_seconds: grace,
        };
        // Before the eviction, whose record comes after it in the queue of the store.
        let line = Transaction::new().journal(Some(&victim.uid), CHOSEN, victim.why.clone());
        self.report.last_victim = Some(victim);
        let known = self.options.store.snapshot();
        self.submit(line.and(self.report.changes(&known, true, now)));
        pods.evict(pod, eviction);
        let order = Evicting {
            since: now,
            grace_seconds: grace,
        };
        self.ordered = Some((pod.uid(), order));
        self.evicting.push(order);
        true
    }
}

/// Returns the time that an eviction may take before the next one begins.
fn patience(pod: &Evicting) -> Duration {
    let seconds = u64::try_from(pod.grace_seconds).unwrap_or(0);
    let killing = Duration::from_millis(seconds.saturating_mul(1500));
    killing.max(LEAST_PATIENCE).saturating_add(CLEANUP_PATIENCE)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
mod tests;

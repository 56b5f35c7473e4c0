//! Selecting: what may happen next. Dispatching is in `mod.rs`.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};

use crate::core::pleg_diff::PodLifecycleEvent;
use crate::types::{ContainerId, PodUid, PodUpdate};

/// Capacity of each channel of probe results.
pub const PROBE_CAPACITY: usize = 20;

const SYNC_TICK: Duration = Duration::from_secs(1);
const HOUSEKEEPING_TICK: Duration = Duration::from_secs(2);

/// What kind of probe had a new result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProbeKind {
    /// Failure restarts the container.
    Liveness,
    /// Decides whether the container is ready.
    Readiness,
    /// Gates the other two.
    Startup,
}

/// A new result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeUpdate {
    /// The pod.
    pub pod: PodUid,
    /// The container.
    pub container: ContainerId,
    /// Whether it succeeded.
    pub success: bool,
}

/// One event of the loop; upstream's arms of `syncLoopIteration`.
#[derive(Debug)]
pub enum LoopEvent {
    /// The sources want something else.
    Config(PodUpdate),
    /// The runtime shows something else.
    Pleg(PodLifecycleEvent),
    /// Pods may be due.
    SyncTick,
    /// A probe has a new result.
    Probe(ProbeKind, ProbeUpdate),
    /// Time to look for what is left over.
    Housekeeping,
    /// The config channel is closed: the agent ends.
    Closed,
}

/// Receiving ends of the loop's channels.
#[derive(Debug)]
pub struct Inputs {
    updates: mpsc::Receiver<PodUpdate>,
    pleg: mpsc::Receiver<PodLifecycleEvent>,
    liveness: mpsc::Receiver<ProbeUpdate>,
    readiness: mpsc::Receiver<ProbeUpdate>,
    startup: mpsc::Receiver<ProbeUpdate>,
    sync_tick: Interval,
    housekeeping_tick: Interval,
    probes: ProbeSenders,
}

/// Sending ends for probe results.
#[derive(Clone, Debug)]
pub struct ProbeSenders {
    /// Liveness results.
    pub liveness: mpsc::Sender<ProbeUpdate>,
    /// Readiness results.
    pub readiness: mpsc::Sender<ProbeUpdate>,
    /// Startup results.
    pub startup: mpsc::Sender<ProbeUpdate>,
}

impl Inputs {
    /// Over the given channels; makes the probe channels itself.
    pub fn new(
        updates: mpsc::Receiver<PodUpdate>,
        pleg: mpsc::Receiver<PodLifecycleEvent>,
    ) -> Self {
        let (liveness_tx, liveness) = mpsc::channel(PROBE_CAPACITY);
        let (readiness_tx, readiness) = mpsc::channel(PROBE_CAPACITY);
        let (startup_tx, startup) = mpsc::channel(PROBE_CAPACITY);
        let ticks = |period| {
            let mut interval = tokio::time::interval(period);
            interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
            interval
        };
        Self {
            updates,
            pleg,
            liveness,
            readiness,
            startup,
            sync_tick: ticks(SYNC_TICK),
            housekeeping_tick: ticks(HOUSEKEEPING_TICK),
            probes: ProbeSenders {
                liveness: liveness_tx,
                readiness: readiness_tx,
                startup: startup_tx,
            },
        }
    }

    /// Where probe results go.
    pub fn probes(&self) -> ProbeSenders {
        self.probes.clone()
    }

    /// Waits for the next event. Cancel-safe: every arm receives from a channel or an interval, which lose
    /// nothing when another arm wins or the future is dropped. Events of several channels that are ready
    /// at once are taken in no order, as upstream.
    pub async fn next(&mut self) -> LoopEvent {
        tokio::select! {
            update = self.updates.recv() => match update {
                Some(update) => LoopEvent::Config(update),
                None => LoopEvent::Closed,
            },
            Some(event) = self.pleg.recv() => LoopEvent::Pleg(event),
            _ = self.sync_tick.tick() => LoopEvent::SyncTick,
            Some(result) = self.liveness.recv() => LoopEvent::Probe(ProbeKind::Liveness, result),
            Some(result) = self.readiness.recv() => LoopEvent::Probe(ProbeKind::Readiness, result),
            Some(result) = self.startup.recv() => LoopEvent::Probe(ProbeKind::Startup, result),
            _ = self.housekeeping_tick.tick() => LoopEvent::Housekeeping,
        }
    }
}

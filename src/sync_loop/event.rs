//! Selecting: what may happen next. Dispatching is in `mod.rs`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::{Interval, MissedTickBehavior};

use crate::core::pleg_diff::PodLifecycleEvent;
use crate::types::probe::ProbeReceivers;
use crate::types::{PodUpdate, ProbeKind, ProbeUpdate};

const SYNC_TICK: Duration = Duration::from_secs(1);
const HOUSEKEEPING_TICK: Duration = Duration::from_secs(2);

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
    /// Workers went away: a pod that is wanted again gets another.
    Forgotten,
    /// Time for the housekeeping.
    Housekeeping,
    /// The config channel is closed: the agent ends.
    Closed,
}

/// Receiving ends of the loop's channels.
#[derive(Debug)]
pub struct Inputs {
    updates: mpsc::Receiver<PodUpdate>,
    pleg: mpsc::Receiver<PodLifecycleEvent>,
    probes: ProbeReceivers,
    forgot: Arc<Notify>,
    sync_tick: Interval,
    housekeeping_tick: Interval,
}

impl Inputs {
    /// Over the given channels; `forgot` is that of the pod workers.
    pub fn new(
        updates: mpsc::Receiver<PodUpdate>,
        pleg: mpsc::Receiver<PodLifecycleEvent>,
        probes: ProbeReceivers,
        forgot: Arc<Notify>,
    ) -> Self {
        let ticks = |period| {
            let mut interval = tokio::time::interval(period);
            interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
            interval
        };
        Self {
            updates,
            pleg,
            probes,
            forgot,
            sync_tick: ticks(SYNC_TICK),
            housekeeping_tick: ticks(HOUSEKEEPING_TICK),
        }
    }

    /// Waits for the next event. Cancel-safe: every arm receives from a channel, a notification or an interval, which
    /// lose nothing when another arm wins or the future is dropped. Events of several channels that are ready
    /// at once are taken in no order, as upstream.
    pub async fn next(&mut self) -> LoopEvent {
        tokio::select! {
            update = self.updates.recv() => match update {
                Some(update) => LoopEvent::Config(update),
                None => LoopEvent::Closed,
            },
            Some(event) = self.pleg.recv() => LoopEvent::Pleg(event),
            _ = self.sync_tick.tick() => LoopEvent::SyncTick,
            Some(result) = self.probes.liveness.recv() => LoopEvent::Probe(ProbeKind::Liveness, result),
            Some(result) = self.probes.readiness.recv() => LoopEvent::Probe(ProbeKind::Readiness, result),
            Some(result) = self.probes.startup.recv() => LoopEvent::Probe(ProbeKind::Startup, result),
            () = self.forgot.notified() => LoopEvent::Forgotten,
            _ = self.housekeeping_tick.tick() => LoopEvent::Housekeeping,
        }
    }
}

//! Queue of the pods that the [`super::Syncer`] handles: changed pods at once, failed ones after a pause, those that
//! wait for something else at the next catch-up.
//!
//! Pure but for the time and the log. While the connection is down one pod at a time is tried, with a pause that all
//! share: an outage costs as much with a hundred pods as with one.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use super::syncer::{Next, SyncError};
use crate::apiserver::{Failure, Reachability, pause};
use crate::types::PodUid;

/// Most pods whose status is sent at once.
const IN_FLIGHT: usize = 8;
/// Time to wait for a phase that is held back, or for a pod that was not observed yet.
const HOLD: Duration = Duration::from_secs(1);
/// Longest pause after a failure of the connection or the server.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// First and longest pause after the server refused a status.
const REFUSED: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));

/// Pods to handle, with their times.
#[derive(Default)]
pub(super) struct Queue {
    waiting: HashMap<PodUid, Waiting>,
    /// Pods that are being handled, with whether they changed meanwhile.
    busy: HashMap<PodUid, Busy>,
    down: bool,
    /// Failures in a row of the connection, and when it is tried again.
    outage: u32,
    paused_until: Option<Instant>,
}

struct Waiting {
    /// `None`: until it is woken or the next catch-up.
    due: Option<Instant>,
    failures: u32,
    /// End of the wait for it, see [`HOLD`].
    held: Option<Instant>,
    /// A change is no reason to try sooner: the server has trouble.
    backing_off: bool,
}

struct Busy {
    failures: u32,
    held: Option<Instant>,
    again: bool,
}

impl Queue {
    /// A pod changed.
    pub(super) fn add(&mut self, uid: PodUid) {
        if let Some(busy) = self.busy.get_mut(&uid) {
            busy.again = true;
            return;
        }
        let now = Instant::now();
        let waiting = self.waiting.entry(uid).or_insert(Waiting {
            due: None,
            failures: 0,
            held: None,
            backing_off: false,
        });
        if !(waiting.backing_off && waiting.due.is_some()) {
            waiting.due = Some(waiting.due.map_or(now, |due| due.min(now)));
        }
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        self.waiting.remove(uid);
        if let Some(busy) = self.busy.get_mut(uid) {
            busy.again = false;
        }
    }

    pub(super) fn connection(&mut self, now: &Reachability) {
        let was_down = std::mem::replace(&mut self.down, matches!(now, Reachability::Down(_)));
        if was_down && !self.down {
            self.outage = 0;
            self.paused_until = None;
            let now = Instant::now();
            for waiting in self.waiting.values_mut().filter(|w| w.backing_off) {
                waiting.due = Some(now);
            }
        }
    }

    /// Returns the next pod to handle, and whether it was waited for already.
    pub(super) fn start(&mut self, now: Instant) -> Option<(PodUid, bool)> {
        let limit = if self.down { 1 } else { IN_FLIGHT };
        if self.busy.len() >= limit || self.paused_until.is_some_and(|until| until > now) {
            return None;
        }
        let due = self
            .waiting
            .iter()
            .filter_map(|(uid, w)| Some((w.due?, uid)));
        let (_, uid) = due.filter(|(due, _)| *due <= now).min()?;
        let uid = uid.clone();
        let waiting = self.waiting.remove(&uid)?;
        let busy = Busy {
            failures: waiting.failures,
            held: waiting.held,
            again: false,
        };
        self.busy.insert(uid.clone(), busy);
        Some((uid, waiting.held.is_some_and(|until| until <= now)))
    }

    pub(super) fn finish(&mut self, uid: &PodUid, next: Next) {
        let Some(busy) = self.busy.remove(uid) else {
            return;
        };
        let now = Instant::now();
        let mut waiting = Waiting {
            due: Some(now),
            failures: 0,
            held: busy.held,
            backing_off: false,
        };
        if !matches!(next, Next::Failed(_)) {
            self.outage = 0;
        }
        match next {
            Next::Done if !busy.again => return,
            Next::Done => waiting.held = None,
            Next::Hold => {
                let until = *waiting.held.get_or_insert(now + HOLD);
                waiting.due = Some(if busy.again { now } else { until });
            }
            Next::Park => waiting.due = busy.again.then_some(now),
            Next::Failed(error) => self.failed(uid, &error, &busy, &mut waiting, now),
        }
        self.waiting.insert(uid.clone(), waiting);
    }

    fn failed(
        &mut self,
        uid: &PodUid,
        error: &SyncError,
        busy: &Busy,
        waiting: &mut Waiting,
        now: Instant,
    ) {
        waiting.failures = busy.failures.saturating_add(1);
        let first = Duration::from_secs(1);
        let why = error as &dyn std::error::Error;
        if error.failure() == Failure::Transient {
            waiting.backing_off = true;
            if self.down {
                // The connection says so itself.
                debug!(pod = %uid, error = why, "cannot send a pod status");
                self.outage = self.outage.saturating_add(1);
                self.paused_until = Some(now + pause(self.outage, first, LONGEST_PAUSE));
                return;
            }
            waiting.due = Some(now + pause(waiting.failures, first, LONGEST_PAUSE));
        } else {
            waiting.due = Some(match busy.again {
                true => now + first,
                false => now + pause(waiting.failures, REFUSED.0, REFUSED.1),
            });
        }
        if waiting.failures == 1 {
            warn!(pod = %uid, error = why, "cannot send a pod status, retrying");
        } else {
            debug!(pod = %uid, error = why, failures = waiting.failures, "cannot send a pod status");
        }
    }

    /// Returns the time at which [`Queue::start`] has something to do next, if nothing happens before.
    pub(super) fn next_due(&self) -> Option<Instant> {
        if self.busy.len() >= if self.down { 1 } else { IN_FLIGHT } {
            return None;
        }
        let due = self.waiting.values().filter_map(|w| w.due).min()?;
        Some(self.paused_until.map_or(due, |until| until.max(due)))
    }

    /// Makes the pods that wait for something else due again.
    pub(super) fn unpark(&mut self) {
        let now = Instant::now();
        for waiting in self.waiting.values_mut() {
            waiting.due.get_or_insert(now);
        }
    }
}

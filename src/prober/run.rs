//! The task: due times, what waits for its turn, what is under way, results that wait for room.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::handlers::{Handlers, Raw};
use super::table::{Command, Job, ProbeId};
use super::{Inner, ProberContext};
use crate::store::CommitError;
use crate::types::{Event, EventType, PodExt, ProbeKind, ProbeUpdate, Stamp};

/// Connections of probes at once.
pub(super) const NET_LIMIT: usize = 64;
/// Commands of probes at once; each costs the runtime a process or two.
pub(super) const EXEC_LIMIT: usize = 16;
/// A further run of a probe may be this much too early when the task is awake anyway: with hundreds of probes that is
/// most of its wake-ups. Never the first run of a container, which has its initial delay.
const EARLY: Duration = Duration::from_millis(50);
/// Longest message of an event that the API server takes.
const MESSAGE_LIMIT: usize = 1024;

/// A run that is over.
struct Landed {
    job: Job,
    /// When it began, on the agent's clocks.
    at: Stamp,
    /// When it was due.
    due: Instant,
    took: Duration,
    outcome: Result<Raw, String>,
}

/// Runs that compete for the same turns.
#[derive(Default)]
struct Lane {
    waiting: VecDeque<(ProbeId, Instant)>,
    running: usize,
}

/// When a probe is to be run.
#[derive(Clone, Copy)]
struct Due {
    at: Instant,
    /// After another run.
    again: bool,
}

struct Task<'a> {
    inner: &'a Inner,
    handlers: Arc<Handlers>,
    schedule: BTreeSet<(Instant, ProbeId)>,
    due: HashMap<ProbeId, Due>,
    net: Lane,
    exec: Lane,
    /// Probes that wait for a turn or are under way.
    busy: HashSet<ProbeId>,
    /// Of those, the ones that became due again: their container is another one.
    again: HashSet<ProbeId>,
    flights: FuturesUnordered<BoxFuture<'static, Landed>>,
    commits: FuturesUnordered<BoxFuture<'static, (ProbeId, Result<(), CommitError>)>>,
    /// Results that found no room, the newest of each probe.
    outbox: BTreeMap<(ProbeKind, ProbeId), ProbeUpdate>,
}

pub(super) async fn run(inner: &Inner, token: CancellationToken) {
    let mut task = Task {
        inner,
        handlers: Arc::new(Handlers::new(inner.context.cri.clone())),
        schedule: BTreeSet::new(),
        due: HashMap::new(),
        net: Lane::default(),
        exec: Lane::default(),
        busy: HashSet::new(),
        again: HashSet::new(),
        flights: FuturesUnordered::new(),
        commits: FuturesUnordered::new(),
        outbox: BTreeMap::new(),
    };
    let results = &inner.context.results;
    loop {
        task.obey();
        task.enqueue_due();
        task.take_off();
        task.flush();
        let next = task.schedule.first().map(|(at, _)| *at);
        let waits = |kind| task.outbox.keys().any(|(k, _)| *k == kind);
        let liveness = waits(ProbeKind::Liveness);
        let readiness = waits(ProbeKind::Readiness);
        let startup = waits(ProbeKind::Startup);
        // Every arm is cancel-safe: waiting for a notification, a time or room loses nothing when another
        // arm wins, and what a set of futures has not returned stays in it. A closed channel takes nothing
        // any more: `flush` has dropped what was for it.
        tokio::select! {
            () = token.cancelled() => return,
            () = inner.changed.notified() => {}
            Some(landed) = task.flights.next() => task.land(landed),
            Some((id, answer)) = task.commits.next() => task.committed(id, answer),
            () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            room = results.liveness.reserve(), if liveness => drop(room),
            room = results.readiness.reserve(), if readiness => drop(room),
            room = results.startup.reserve(), if startup => drop(room),
        }
    }
}

impl Task<'_> {
    fn context(&self) -> &ProberContext {
        &self.inner.context
    }

    fn lane(&mut self, exec: bool) -> &mut Lane {
        if exec { &mut self.exec } else { &mut self.net }
    }

    fn obey(&mut self) {
        let commands = self.inner.table().take_commands();
        for command in commands {
            match command {
                Command::Schedule(id, wait) => {
                    self.schedule_at(id, Instant::now() + wait, false);
                }
                Command::Cancel(id) => self.cancel(id),
                Command::Send(kind, id, update) => {
                    self.outbox.insert((kind, id), update);
                }
            }
        }
    }

    fn schedule_at(&mut self, id: ProbeId, at: Instant, again: bool) {
        self.cancel(id);
        self.schedule.insert((at, id));
        self.due.insert(id, Due { at, again });
    }

    fn cancel(&mut self, id: ProbeId) {
        if let Some(due) = self.due.remove(&id) {
            self.schedule.remove(&(due.at, id));
        }
        self.again.remove(&id);
    }

    /// Moves what is due to the queues, and with it what soon will be.
    fn enqueue_due(&mut self) {
        let now = Instant::now();
        if self.schedule.first().is_none_or(|(at, _)| *at > now) {
            return;
        }
        let is_soon = |id: &ProbeId| self.due.get(id).is_some_and(|due| due.again);
        let near = self
            .schedule
            .iter()
            .take_while(|(at, _)| *at <= now + EARLY);
        let due: Vec<_> = near
            .filter(|(at, id)| *at <= now || is_soon(id))
            .copied()
            .collect();
        for (at, id) in due {
            self.schedule.remove(&(at, id));
            self.due.remove(&id);
            self.enqueue(id, at);
        }
    }

    fn enqueue(&mut self, id: ProbeId, due: Instant) {
        if self.busy.contains(&id) {
            self.again.insert(id);
            return;
        }
        let Some(exec) = self.inner.table().job(id).map(|job| is_exec(&job)) else {
            return;
        };
        self.busy.insert(id);
        self.lane(exec).waiting.push_back((id, due));
    }

    /// Starts what has a turn.
    fn take_off(&mut self) {
        for (exec, limit) in [(false, NET_LIMIT), (true, EXEC_LIMIT)] {
            while self.lane(exec).running < limit
                && let Some((id, due)) = self.lane(exec).waiting.pop_front()
            {
                let job = self.inner.table().job(id);
                let Some(job) = job else {
                    self.idle(id);
                    continue;
                };
                self.lane(exec).running += 1;
                let at = self.context().clock.now();
                let handlers = Arc::clone(&self.handlers);
                let flight = async move {
                    let start = Instant::now();
                    let outcome = handlers.probe(&job).await;
                    Landed {
                        at,
                        due,
                        took: start.elapsed(),
                        outcome,
                        job,
                    }
                };
                self.flights.push(flight.boxed());
            }
        }
    }

    fn land(&mut self, landed: Landed) {
        let Landed {
            job,
            at,
            due,
            took,
            outcome,
        } = landed;
        self.lane(is_exec(&job)).running -= 1;
        let success = outcome.as_ref().ok().map(Raw::success);
        let applied = {
            let mut table = self.inner.table();
            table.apply(&job, success, at, took, self.context())
        };
        if let Some(mut applied) = applied {
            self.tell(&job, &outcome);
            if let Some(commit) = applied.commit.take() {
                let id = job.id;
                let answer = async move { (id, commit.wait().await.map(drop)) };
                self.commits.push(answer.boxed());
            }
            if applied.goes_on && !self.due.contains_key(&job.id) {
                // On the phase of the series: what was missed meanwhile is not made up for.
                let now = Instant::now().max(due);
                let rest = job.target.spec.rest_of_period(now - due);
                self.schedule_at(job.id, now + rest, true);
            }
        }
        self.idle(job.id);
    }

    /// A probe is neither waiting nor under way any more.
    fn idle(&mut self, id: ProbeId) {
        self.busy.remove(&id);
        if self.again.remove(&id) {
            self.enqueue(id, Instant::now());
        }
    }

    fn committed(&mut self, id: ProbeId, answer: Result<(), CommitError>) {
        if let Err(error) = answer {
            debug!(%error, "the result of a probe is not recorded yet, its next one is");
            self.inner.table().not_recorded(id);
        }
    }

    /// Sends what there is room for.
    fn flush(&mut self) {
        let results = &self.inner.context.results;
        self.outbox.retain(|(kind, _), update| {
            let sender = match kind {
                ProbeKind::Liveness => &results.liveness,
                ProbeKind::Readiness => &results.readiness,
                ProbeKind::Startup => &results.startup,
            };
            // To a closed channel nothing is owed: the agent ends.
            let answer = sender.try_send(update.clone());
            matches!(answer, Err(mpsc::error::TrySendError::Full(_)))
        });
    }

    /// Events, by upstream's reasons and texts.
    fn tell(&self, job: &Job, outcome: &Result<Raw, String>) {
        let kind = job.target.kind.as_str();
        let container = &job.target.container.name;
        let (reason, text) = match outcome {
            Ok(Raw::Success) => return,
            Ok(Raw::Warning(output)) => ("ProbeWarning", format!("{kind} probe warning: {output}")),
            Ok(Raw::Failure(output)) => ("Unhealthy", format!("{kind} probe failed: {output}")),
            Err(error) => ("Unhealthy", format!("{kind} probe errored: {error}")),
        };
        debug!(
            pod = %job.target.pod.uid(),
            container,
            kind,
            reason,
            "probe did not succeed"
        );
        let event = Event::pod(
            EventType::Warning,
            &job.target.pod,
            reason,
            truncated(text, MESSAGE_LIMIT),
        );
        let event = event.container_of(&job.target.pod, container);
        self.context().recorder.record(event);
    }
}

fn is_exec(job: &Job) -> bool {
    job.target.probe.exec.is_some()
}

/// The text, cut to at most `limit` bytes.
pub(super) fn truncated(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = (0..=limit).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

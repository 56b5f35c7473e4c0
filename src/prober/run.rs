//! The task: due times, what waits for its turn, what is under way, results that wait for room.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{AbortHandle, Abortable, BoxFuture};
use futures::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::handlers::{Handlers, Raw};
use super::table::{Command, Job, ProbeId};
use super::{Inner, ProberContext};
use crate::core::turns::Turns;
use crate::store::CommitError;
use crate::types::{Event, EventType, PodExt, PodUid, ProbeKind, ProbeUpdate, Stamp};

/// Connections of probes at once, without slow ones.
const NET_LIMIT: usize = 64;
/// Slow connections at once of one pod; each costs a descriptor.
const NET_SHARE: usize = 8;
/// Commands of probes at once, without slow ones; each costs the runtime a process or two.
pub(super) const EXEC_LIMIT: usize = 16;
/// Slow commands at once of one pod. As a node has at most `maxPods` pods of the API server, the runtime has no more
/// than 16 and four for each of them: 456 on a node of 110 pods, if every pod wants it so. Their processes count
/// within the limits of their own pods.
pub(super) const EXEC_SHARE: usize = 4;
/// A probe that takes longer than this is slow. Two hundred pods that have a slow one each at the same moment keep a
/// command of another pod waiting for 6.25 s the first time, and not at all from then on.
const PATIENCE: Duration = Duration::from_millis(500);
/// A further run of a probe may be this much too early when the task is awake anyway: with hundreds of probes that is
/// most of its wake-ups. Never the first run of a container, which has its initial delay.
const EARLY: Duration = Duration::from_millis(50);
/// Longest message of an event that the API server takes.
const MESSAGE_LIMIT: usize = 1024;

/// A run that is over.
struct Landed {
    job: Job,
    /// Start of the run, on the agent's clocks.
    at: Stamp,
    /// Due time of the run.
    due: Instant,
    took: Duration,
    outcome: Result<Raw, String>,
}

/// Kind of resource that probes compete for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// Connections.
    Net,
    /// Commands.
    Exec,
}

/// A probe that waits for a turn or is under way.
struct Busy {
    lane: Lane,
    pod: PodUid,
    due: Instant,
    /// Of a run that is under way.
    flight: Option<Flight>,
}

struct Flight {
    began: Instant,
    call_off: AbortHandle,
    /// The probe is not to be run any more.
    withdrawn: bool,
}

/// Due time of a probe.
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
    net: Turns<PodUid, ProbeId>,
    exec: Turns<PodUid, ProbeId>,
    busy: HashMap<ProbeId, Busy>,
    /// Runs in the order in which they began, as long as they were not checked for being slow.
    young: VecDeque<(Instant, ProbeId)>,
    /// Of those, the ones that became due again: their container is another one.
    again: HashSet<ProbeId>,
    /// `None` of a run that was called off.
    flights: FuturesUnordered<BoxFuture<'static, (ProbeId, Option<Landed>)>>,
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
        net: Turns::new(NET_LIMIT, NET_SHARE),
        exec: Turns::new(EXEC_LIMIT, EXEC_SHARE),
        busy: HashMap::new(),
        young: VecDeque::new(),
        again: HashSet::new(),
        flights: FuturesUnordered::new(),
        commits: FuturesUnordered::new(),
        outbox: BTreeMap::new(),
    };
    let results = &inner.context.results;
    loop {
        task.obey();
        task.enqueue_due();
        task.part_with_the_slow();
        task.take_off();
        task.flush();
        let next = task.schedule.first().map(|(at, _)| *at);
        let next = next.into_iter().chain(task.slow_at()).min();
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
            Some((id, landed)) = task.flights.next() => task.land(id, landed),
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

    fn turns(&mut self, lane: Lane) -> &mut Turns<PodUid, ProbeId> {
        match lane {
            Lane::Net => &mut self.net,
            Lane::Exec => &mut self.exec,
        }
    }

    fn obey(&mut self) {
        let commands = self.inner.table().take_commands();
        for command in commands {
            match command {
                Command::Schedule(id, wait) => {
                    self.schedule_at(id, Instant::now() + wait, false);
                }
                Command::Cancel(id) => {
                    self.cancel(id);
                    self.withdraw(id);
                }
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

    /// A probe is not to be run any more: it gives up its turn, or its place among those that wait.
    fn withdraw(&mut self, id: ProbeId) {
        self.net.forget(id);
        self.exec.forget(id);
        let Some(busy) = self.busy.get_mut(&id) else {
            return;
        };
        let (lane, pod) = (busy.lane, busy.pod.clone());
        match &mut busy.flight {
            Some(flight) => {
                flight.withdrawn = true;
                flight.call_off.abort();
            }
            None => {
                self.busy.remove(&id);
            }
        }
        self.turns(lane).withdraw(&pod, id);
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
        if self.busy.contains_key(&id) {
            self.again.insert(id);
            return;
        }
        let Some(job) = self.inner.table().job(id, &self.inner.context.addresses) else {
            return;
        };
        let (lane, pod) = (lane_of(&job), job.target.pod.uid());
        let busy = Busy {
            lane,
            pod: pod.clone(),
            due,
            flight: None,
        };
        self.busy.insert(id, busy);
        self.turns(lane).wait(pod, id);
    }

    /// Returns the time at which the oldest run that is not slow yet becomes slow. Forgets those that have ended.
    fn slow_at(&mut self) -> Option<Instant> {
        while let Some((began, id)) = self.young.front().copied() {
            let flight = self.busy.get(&id).and_then(|busy| busy.flight.as_ref());
            if flight.is_some_and(|flight| flight.began == began) {
                return Some(began + PATIENCE);
            }
            self.young.pop_front();
        }
        None
    }

    /// Takes their common turns from runs that have become slow.
    fn part_with_the_slow(&mut self) {
        let now = Instant::now();
        while self.slow_at().is_some_and(|at| at <= now)
            && let Some((_, id)) = self.young.pop_front()
        {
            let Some(lane) = self.busy.get(&id).map(|busy| busy.lane) else {
                continue;
            };
            if !self.turns(lane).overstay(id)
                && let Some(flight) = self.busy.get(&id).and_then(|busy| busy.flight.as_ref())
            {
                flight.call_off.abort();
            }
        }
    }

    /// Starts what has a turn.
    fn take_off(&mut self) {
        for lane in [Lane::Net, Lane::Exec] {
            while let Some(id) = self.turns(lane).next_turn() {
                let job = self.inner.table().job(id, &self.inner.context.addresses);
                let (Some(job), Some(busy)) = (job, self.busy.get_mut(&id)) else {
                    self.turns(lane).end(id, true);
                    self.idle(id);
                    continue;
                };
                let (began, due) = (Instant::now(), busy.due);
                let (call_off, registration) = AbortHandle::new_pair();
                busy.flight = Some(Flight {
                    began,
                    call_off,
                    withdrawn: false,
                });
                self.young.push_back((began, id));
                let at = self.context().clock.now();
                let handlers = Arc::clone(&self.handlers);
                let flight = async move {
                    let outcome = handlers.probe(&job).await;
                    Landed {
                        at,
                        due,
                        took: began.elapsed(),
                        outcome,
                        job,
                    }
                };
                let flight = Abortable::new(flight, registration);
                self.flights
                    .push(flight.map(move |landed| (id, landed.ok())).boxed());
            }
        }
    }

    fn land(&mut self, id: ProbeId, landed: Option<Landed>) {
        let Some(busy) = self.busy.get_mut(&id) else {
            return;
        };
        let (lane, pod) = (busy.lane, busy.pod.clone());
        let withdrawn = busy.flight.take().is_some_and(|flight| flight.withdrawn);
        let Some(Landed {
            job,
            at,
            due,
            took,
            outcome,
        }) = landed
        else {
            self.turns(lane).end(id, false);
            if withdrawn {
                self.idle(id);
            } else {
                // It has said nothing, and is run again when its pod's other slow ones leave room.
                self.turns(lane).wait(pod, id);
            }
            return;
        };
        self.turns(lane).end(id, took <= PATIENCE);
        let success = outcome.as_ref().ok().map(Raw::success);
        let applied = {
            let mut table = self.inner.table();
            table.apply(&job, success, at, took, self.context())
        };
        if let Some(mut applied) = applied {
            self.tell(&job, &outcome);
            if let Some(commit) = applied.commit.take() {
                let answer = async move { (id, commit.wait().await.map(drop)) };
                self.commits.push(answer.boxed());
            }
            if applied.goes_on && !self.due.contains_key(&id) {
                // On the phase of the series: what was missed meanwhile is not made up for.
                let now = Instant::now().max(due);
                let rest = job.target.spec.rest_of_period(now - due);
                self.schedule_at(id, now + rest, true);
            }
        } else {
            self.turns(lane).forget(id);
        }
        self.idle(id);
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
            debug!(%error, "cannot record the result of a probe, recording it with the next one");
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

fn lane_of(job: &Job) -> Lane {
    match job.target.probe.exec {
        Some(_) => Lane::Exec,
        None => Lane::Net,
    }
}

/// The text, cut to at most `limit` bytes.
pub(super) fn truncated(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = (0..=limit).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

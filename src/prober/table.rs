//! Table of all probes. Owns the [`ProbeState`]s, their records and metric series; sends scheduling to the task as
//! [`Command`]s.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, ContainerStatus as ApiContainerStatus, Pod, PodStatus as ApiPodStatus, Probe,
};

use super::ProberContext;
use crate::core::pod_status;
use crate::core::probe_result::{ProbeResult, ProbeSpec, ProbeState};
use crate::core::state::{ContainerRecord, ProbeRecord, Transaction, child_key};
use crate::store::PendingCommit;
use crate::types::containers::is_sidecar;
use crate::types::host_addresses::HostAddresses;
use crate::types::metrics::{Metrics, ProbeLabel, ProbeTimeLabel};
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use crate::types::{
    ContainerId, PodExt, PodUid, ProbeFailure, ProbeKind, ProbeUpdate, ProbeView, Stamp,
};

/// Names one probe of one container spec for as long as its pod is known.
pub(super) type ProbeId = u64;

/// Startup first: it gates the others.
const ORDER: [ProbeKind; 3] = [
    ProbeKind::Startup,
    ProbeKind::Liveness,
    ProbeKind::Readiness,
];

/// Instruction for the task.
#[derive(Debug)]
pub(super) enum Command {
    /// Run a probe after a while, and periodically from then on.
    Schedule(ProbeId, Duration),
    /// Do not run it any more.
    Cancel(ProbeId),
    /// Send a result.
    Send(ProbeKind, ProbeId, ProbeUpdate),
}

/// Input of an observer.
pub(super) struct Seen<'a> {
    pub(super) pod: &'a Arc<Pod>,
    pub(super) status: &'a PodStatus,
    pub(super) told: Option<&'a ApiPodStatus>,
    pub(super) context: &'a ProberContext,
    pub(super) began: Stamp,
}

impl<'a> Seen<'a> {
    /// The address of the pod that its status has first.
    fn address(&self) -> Option<&'a String> {
        match self.status.ips.as_slice() {
            [] | [_] => self.status.ips.first(),
            ips => pod_status::first_of(ips, &self.context.addresses.reported()),
        }
    }
}

/// Target and settings of one probe of a container spec.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) pod: Arc<Pod>,
    pub(super) container: Container,
    pub(super) probe: Probe,
    pub(super) spec: ProbeSpec,
    pub(super) kind: ProbeKind,
    /// Labels of the metrics, by result.
    labels: [ProbeLabel; 3],
    time_label: ProbeTimeLabel,
}

/// One run of a probe.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) id: ProbeId,
    pub(super) target: Arc<Target>,
    pub(super) container_id: ContainerId,
    /// Address of the pod; empty while it has none.
    pub(super) ip: String,
}

/// Effect of a run that counted.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// True if there will be further runs.
    pub(super) goes_on: bool,
    /// A record on its way to the disk.
    pub(super) commit: Option<PendingCommit>,
}

struct Entry {
    pod: PodUid,
    container: Arc<str>,
    kind: ProbeKind,
    target: Arc<Target>,
    state: Option<ProbeState>,
    running: bool,
    started: Stamp,
    /// The record of `state` may not have reached the store.
    unrecorded: bool,
}

struct PodEntry {
    pod: Arc<Pod>,
    /// Its own address; empty while it has none.
    ip: String,
    /// It terminates.
    ending: bool,
    probes: Vec<(Arc<str>, ProbeKind, ProbeId)>,
}

impl PodEntry {
    fn find(&self, container: &str, kind: ProbeKind) -> Option<ProbeId> {
        let found = self
            .probes
            .iter()
            .find(|(name, k, _)| **name == *container && *k == kind);
        found.map(|(_, _, id)| *id)
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Table {
    pods: HashMap<PodUid, PodEntry>,
    probes: HashMap<ProbeId, Entry>,
    next_id: ProbeId,
    commands: Vec<Command>,
}

/// Containers that may have probes.
fn probed(pod: &Pod) -> impl Iterator<Item = &Container> {
    let sidecars = pod.init_containers().iter().filter(|c| is_sidecar(c));
    sidecars.chain(pod.containers())
}

fn probe_of(container: &Container, kind: ProbeKind) -> Option<&Probe> {
    match kind {
        ProbeKind::Liveness => container.liveness_probe.as_ref(),
        ProbeKind::Readiness => container.readiness_probe.as_ref(),
        ProbeKind::Startup => container.startup_probe.as_ref(),
    }
}

/// Returns whether any container of a pod has a probe.
pub(super) fn has_probes(pod: &Pod) -> bool {
    probed(pod).any(|c| ORDER.iter().any(|kind| probe_of(c, *kind).is_some()))
}

fn running<'a>(status: &'a PodStatus, container: &str) -> Option<&'a ContainerStatus> {
    let newest = status.container(container);
    newest.filter(|c| c.state == ContainerState::Running)
}

impl Table {
    /// Returns whether there are commands for the task.
    pub(super) fn has_commands(&self) -> bool {
        !self.commands.is_empty()
    }

    /// Returns and removes the commands for the task, in order.
    pub(super) fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    pub(super) fn observe(&mut self, seen: &Seen<'_>) {
        let uid = seen.pod.uid();
        let entry = self.pods.entry(uid.clone()).or_insert_with(|| PodEntry {
            pod: Arc::clone(seen.pod),
            ip: String::new(),
            ending: false,
            probes: Vec::new(),
        });
        if let Some(ip) = seen.address()
            && entry.ip != *ip
        {
            entry.ip.clone_from(ip);
        }
        if entry.probes.is_empty() || !Arc::ptr_eq(&entry.pod, seen.pod) {
            self.respec(&uid, seen);
        }
        for container in probed(seen.pod) {
            for kind in ORDER {
                let Some(id) = self.find(&uid, &container.name, kind) else {
                    continue;
                };
                self.observe_probe(id, running(seen.status, &container.name), seen);
            }
        }
    }

    fn find(&self, pod: &PodUid, container: &str, kind: ProbeKind) -> Option<ProbeId> {
        self.pods.get(pod)?.find(container, kind)
    }

    /// Brings the probes of a pod in line with its spec.
    fn respec(&mut self, uid: &PodUid, seen: &Seen<'_>) {
        let Some(mut entry) = self.pods.remove(uid) else {
            return;
        };
        entry.pod = Arc::clone(seen.pod);
        let before = std::mem::take(&mut entry.probes);
        for container in probed(seen.pod) {
            for kind in ORDER {
                let Some(probe) = probe_of(container, kind) else {
                    continue;
                };
                let target = Arc::new(Target::new(seen.pod, container, probe, kind));
                let old = before
                    .iter()
                    .find(|(name, k, _)| **name == *container.name && *k == kind);
                let (name, id) = match old {
                    Some((name, _, id)) => (Arc::clone(name), *id),
                    None => {
                        self.next_id += 1;
                        (Arc::from(container.name.as_str()), self.next_id)
                    }
                };
                match self.probes.get_mut(&id) {
                    Some(known) => known.target = target,
                    None => {
                        let entry = Entry {
                            pod: uid.clone(),
                            container: Arc::clone(&name),
                            kind,
                            target,
                            state: None,
                            running: false,
                            started: seen.began,
                            unrecorded: true,
                        };
                        self.probes.insert(id, entry);
                    }
                }
                entry.probes.push((name, kind, id));
            }
        }
        let mut gone = Transaction::new();
        for (_, _, id) in before {
            if !entry.probes.iter().any(|(_, _, kept)| *kept == id) {
                gone = self.forget(id, gone, &seen.context.metrics);
            }
        }
        self.pods.insert(uid.clone(), entry);
        submit_deletes(seen.context, gone);
    }

    fn observe_probe(&mut self, id: ProbeId, container: Option<&ContainerStatus>, seen: &Seen<'_>) {
        let Some(entry) = self.probes.get_mut(&id) else {
            return;
        };
        let Some(container) = container else {
            if std::mem::take(&mut entry.running) {
                self.commands.push(Command::Cancel(id));
            }
            return;
        };
        let same = (entry.state.as_ref()).is_some_and(|s| *s.container_id() == container.id);
        if entry.running && same {
            return;
        }
        if !same {
            let key = entry.key();
            let now = seen.context.clock.now();
            let snapshot = seen.context.store.snapshot();
            let record = snapshot.record::<ProbeRecord>(&key);
            let resumed = record.and_then(|record| {
                let spec = &entry.target.spec;
                ProbeState::resume(entry.kind, spec, record, &container.id, now)
            });
            entry.unrecorded = resumed.is_none();
            entry.state = Some(resumed.unwrap_or_else(|| {
                // A record of another container says that this one is newer than what was told.
                let told = told_of(seen.told, &container.name).filter(|_| record.is_none());
                ProbeState::inferred(entry.kind, container.id.clone(), told)
            }));
            let intent = snapshot
                .record::<ContainerRecord>(&child_key(&entry.pod, &entry.container))
                .and_then(|record| record.intent.as_ref())
                .filter(|intent| intent.container_id == container.id);
            entry.started = match intent {
                Some(intent) if intent.at.boot == now.boot => intent.at,
                _ => by_wall_clock(container.started_at_ns, now),
            };
        }
        entry.running = true;
        self.begin(id, seen);
    }

    /// A container runs, or runs again: what becomes of its probe.
    fn begin(&mut self, id: ProbeId, seen: &Seen<'_>) {
        let Some(entry) = self.probes.get(&id) else {
            return;
        };
        if let Some(update) = entry.failure_update() {
            // Decided already, and perhaps by an agent that did not live to act on it.
            self.commands.push(Command::Send(entry.kind, id, update));
        }
        if !self.is_active(entry) {
            self.commands.push(Command::Cancel(id));
            return;
        }
        let now = seen.context.clock.now();
        let spec = &entry.target.spec;
        let first = spec.first_wait(entry.started, now);
        let wait = match entry.state.as_ref().and_then(ProbeState::at) {
            Some(at) => spec.wait_in_phase(at, now).max(first),
            None if seen.began.reached(entry.started) => first,
            // It has been running since before this life of the agent, like many others perhaps.
            None => spec.spread(&entry.key()).max(first),
        };
        self.commands.push(Command::Schedule(id, wait));
    }

    /// Returns whether a probe should run, given the current state of its container.
    fn is_active(&self, entry: &Entry) -> bool {
        let Some(state) = &entry.state else {
            return false;
        };
        let Some(pod) = self.pods.get(&entry.pod) else {
            return false;
        };
        if !entry.running || state.on_hold() || (pod.ending && entry.kind != ProbeKind::Readiness) {
            return false;
        }
        if entry.kind == ProbeKind::Startup {
            return true;
        }
        let Some(startup) = pod.find(&entry.container, ProbeKind::Startup) else {
            return true;
        };
        let startup = self.probes.get(&startup).and_then(|s| s.state.as_ref());
        startup.is_some_and(|s| {
            s.container_id() == state.container_id() && s.result() == ProbeResult::Success
        })
    }

    /// Returns the job of a probe that is due; `None` when it should not run any more. Reads `node` for each run of a
    /// pod on the host network: the node's address may change while the pod runs.
    pub(super) fn job(&self, id: ProbeId, node: &HostAddresses) -> Option<Job> {
        let entry = self.probes.get(&id)?;
        if !self.is_active(entry) {
            return None;
        }
        let pod = self.pods.get(&entry.pod)?;
        let ip = if pod.pod.host_network() {
            node.reachable().to_string()
        } else {
            pod.ip.clone()
        };
        Some(Job {
            id,
            target: Arc::clone(&entry.target),
            container_id: entry.state.as_ref()?.container_id().clone(),
            ip,
        })
    }

    /// Counts what a run came to; `success` is `None` when it could not be made. `None` when the probe was
    /// ended meanwhile, or its container is another one: then nothing counts.
    pub(super) fn apply(
        &mut self,
        job: &Job,
        success: Option<bool>,
        at: Stamp,
        took: Duration,
        context: &ProberContext,
    ) -> Option<Applied> {
        let entry = self.probes.get(&job.id)?;
        let current = (entry.state.as_ref()).is_some_and(|s| *s.container_id() == job.container_id);
        if !current || !self.is_active(entry) {
            return None;
        }
        let entry = self.probes.get_mut(&job.id)?;
        entry.target.count(success, took, &context.metrics);
        let Some(success) = success else {
            return Some(Applied {
                goes_on: true,
                commit: None,
            });
        };
        let spec = entry.target.spec;
        let state = entry.state.as_mut()?;
        let change = state.apply(&spec, success, at);
        let mut applied = Applied {
            goes_on: !state.on_hold(),
            commit: None,
        };
        if (change.record || entry.unrecorded)
            && let Some(record) = state.record()
        {
            // Relaxed, and under the table's lock, so that a record never follows its deletion.
            let put = Transaction::new().put(entry.key(), record);
            applied.commit = Some(context.store.submit(put));
            entry.unrecorded = false;
        }
        if change.result {
            let update = entry.update(success);
            let (kind, pod) = (entry.kind, entry.pod.clone());
            let container = Arc::clone(&entry.container);
            self.commands.push(Command::Send(kind, job.id, update));
            if kind == ProbeKind::Startup && success {
                self.open_gate(&pod, &container, context.clock.now());
            }
        }
        Some(applied)
    }

    /// The container has started: its other probes begin.
    fn open_gate(&mut self, pod: &PodUid, container: &str, now: Stamp) {
        for kind in [ProbeKind::Liveness, ProbeKind::Readiness] {
            let Some(id) = self.find(pod, container, kind) else {
                continue;
            };
            if let Some(entry) = self.probes.get(&id)
                && self.is_active(entry)
            {
                let wait = entry.target.spec.first_wait(entry.started, now);
                self.commands.push(Command::Schedule(id, wait));
            }
        }
    }

    /// A record did not reach the store: the next result writes it again.
    pub(super) fn not_recorded(&mut self, id: ProbeId) {
        if let Some(entry) = self.probes.get_mut(&id) {
            entry.unrecorded = true;
        }
    }

    pub(super) fn stop_liveness_and_startup(&mut self, pod: &PodUid) {
        let Some(entry) = self.pods.get_mut(pod) else {
            return;
        };
        if std::mem::replace(&mut entry.ending, true) {
            return;
        }
        let stopped = entry
            .probes
            .iter()
            .filter(|(_, kind, _)| *kind != ProbeKind::Readiness);
        let stopped = stopped.map(|(_, _, id)| Command::Cancel(*id));
        self.commands.extend(stopped);
    }

    pub(super) fn remove_pod(&mut self, pod: &PodUid, context: &ProberContext) {
        let Some(entry) = self.pods.remove(pod) else {
            return;
        };
        let mut gone = Transaction::new();
        for (_, _, id) in entry.probes {
            gone = self.forget(id, gone, &context.metrics);
        }
        submit_deletes(context, gone);
    }

    fn forget(&mut self, id: ProbeId, gone: Transaction, metrics: &Metrics) -> Transaction {
        let Some(entry) = self.probes.remove(&id) else {
            return gone;
        };
        self.commands.push(Command::Cancel(id));
        entry.target.remove_series(metrics);
        gone.delete::<ProbeRecord>(entry.key())
    }

    pub(super) fn views(&self, pod: &PodUid, status: &PodStatus) -> BTreeMap<String, ProbeView> {
        let mut views: BTreeMap<String, ProbeView> = BTreeMap::new();
        self.each_running(pod, status, |name, state, kind| {
            let success = state.result() == ProbeResult::Success;
            let view = views.entry(name.to_owned()).or_default();
            match kind {
                ProbeKind::Readiness => view.ready = Some(success),
                ProbeKind::Startup if state.result() != ProbeResult::Unknown => {
                    view.started = Some(success);
                }
                ProbeKind::Startup | ProbeKind::Liveness => {}
            }
        });
        views
    }

    pub(super) fn failures(
        &self,
        pod: &PodUid,
        status: &PodStatus,
    ) -> BTreeMap<String, ProbeFailure> {
        let mut failures = BTreeMap::new();
        if self.pods.get(pod).is_none_or(|entry| entry.ending) {
            return failures;
        }
        self.each_running(pod, status, |name, state, _| {
            if let Some(failure) = state.failure() {
                failures.insert(name.to_owned(), failure);
            }
        });
        failures
    }

    fn each_running(
        &self,
        pod: &PodUid,
        status: &PodStatus,
        mut each: impl FnMut(&str, &ProbeState, ProbeKind),
    ) {
        let Some(entry) = self.pods.get(pod) else {
            return;
        };
        for (name, kind, id) in &entry.probes {
            let state = self.probes.get(id).and_then(|probe| probe.state.as_ref());
            if let (Some(state), Some(container)) = (state, running(status, name))
                && *state.container_id() == container.id
            {
                each(name, state, *kind);
            }
        }
    }
}

impl Entry {
    fn key(&self) -> String {
        format!("{}/{}/{}", self.pod, self.container, self.kind.as_str())
    }

    fn update(&self, success: bool) -> ProbeUpdate {
        let container = self.state.as_ref().map(|s| s.container_id().clone());
        ProbeUpdate {
            pod: self.pod.clone(),
            container: container.unwrap_or_else(|| ContainerId::new("")),
            success,
        }
    }

    fn failure_update(&self) -> Option<ProbeUpdate> {
        self.state.as_ref()?.failure()?;
        Some(self.update(false))
    }
}

impl Target {
    pub(super) fn new(
        pod: &Arc<Pod>,
        container: &Container,
        probe: &Probe,
        kind: ProbeKind,
    ) -> Self {
        let label = |result: &str| ProbeLabel {
            probe_type: kind.as_str().to_owned(),
            result: result.to_owned(),
            container: container.name.clone(),
            pod: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            pod_uid: pod.uid().to_string(),
        };
        Self {
            labels: [label("successful"), label("failed"), label("unknown")],
            time_label: ProbeTimeLabel {
                probe_type: kind.as_str().to_owned(),
                container: container.name.clone(),
                pod: pod.name().to_owned(),
                namespace: pod.namespace().to_owned(),
            },
            pod: Arc::clone(pod),
            container: container.clone(),
            probe: probe.clone(),
            spec: ProbeSpec::of(probe),
            kind,
        }
    }

    fn count(&self, success: Option<bool>, took: Duration, metrics: &Metrics) {
        let [successful, failed, unknown] = &self.labels;
        let label = match success {
            Some(true) => successful,
            Some(false) => failed,
            None => unknown,
        };
        metrics.probes.get_or_create(label).inc();
        metrics
            .probe_duration
            .get_or_create(&self.time_label)
            .observe(took.as_secs_f64());
    }

    fn remove_series(&self, metrics: &Metrics) {
        for label in &self.labels {
            metrics.probes.remove(label);
        }
        metrics.probe_duration.remove(&self.time_label);
    }
}

/// Relaxed: a record that is left over is about a container that is gone, and is purged with its pod.
fn submit_deletes(context: &ProberContext, gone: Transaction) {
    if !gone.is_empty() {
        drop(context.store.submit(gone));
    }
}

fn told_of<'a>(told: Option<&'a ApiPodStatus>, name: &str) -> Option<&'a ApiContainerStatus> {
    let told = told?;
    let main = told.container_statuses.iter().flatten();
    let init = told.init_container_statuses.iter().flatten();
    main.chain(init).find(|c| c.name == name)
}

/// A time of the runtime on the agent's clocks; a time of the future is now.
fn by_wall_clock(at_ns: i64, now: Stamp) -> Stamp {
    if at_ns <= 0 {
        return now;
    }
    let ago = now.wall_ms.saturating_sub(at_ns / 1_000_000);
    now.minus(Duration::from_millis(u64::try_from(ago).unwrap_or(0)))
}

//! The step of a worker: it takes what is pending, decides what to commit, and acts when that is on record.

use std::collections::BTreeMap;
use std::sync::Arc;

use holdfast::core::container_history::{Records, observe_exits, record_end, record_start};
use holdfast::core::pod_actions::{self, PodActionInput};
use holdfast::core::pod_status::{self, Stage, StatusInput};
use holdfast::core::pod_worker::{self, StepRecord, Worker, before_step};
use holdfast::core::resize::ResizeView;
use holdfast::core::state::{
    AdmissionDecision, AdmissionRecord, IntentRecord, State, StatusRecord, TerminationCause,
    Transaction, WorkerPhase,
};
use holdfast::types::Json;
use holdfast::types::runtime::{ContainerState, PodStatus, SandboxState, SandboxStatus};
use k8s_openapi::api::core::v1 as api;

use super::judge;
use super::node::{BACKOFF_MAX, CONTAINER, EPOCH, NOW, NOW_NS, Node, Step, Which, World};

impl Node {
    pub(super) fn take(&self, world: &mut World, which: Which) -> Result<(), String> {
        let state = world.state.clone();
        let task = world.task(which);
        task.worker().adopt_recorded_end(&state);
        if task.worker.forget {
            judge::forget(world, which)?;
            let forget = pod_worker::forget(&state, &which.uid());
            world.runtime[which as usize] = Arc::new(PodStatus::empty(which.uid()));
            world.agent.tasks[which as usize] = None;
            return self.commit(world, &forget);
        }
        task.worker().begin_step(NOW);
        task.is_cancelled = false;
        task.step = Step::Taken(Arc::clone(&task.worker));
        if self.takes_late {
            return Ok(());
        }
        self.decide_step(world, which)
    }

    pub(super) fn decide_step(&self, world: &mut World, which: Which) -> Result<(), String> {
        let Step::Taken(job) = &world.task(which).step else {
            unreachable!("nothing was taken");
        };
        let job = Arc::clone(job);
        let agent = &world.agent;
        let tasks = agent.tasks.iter().flatten();
        let others = tasks.map(|task| &*task.worker);
        let record = before_step(&job, &world.state, EPOCH, NOW, others);
        let task = world.task(which);
        let transaction = match record {
            StepRecord::Ended => {
                task.worker().wake();
                task.step = Step::Idle;
                return Ok(());
            }
            StepRecord::Stop(transaction) | StepRecord::Keep(transaction) => transaction,
        };
        if transaction.is_empty() {
            task.step = Step::Committed(job);
            return self.act(world, which);
        }
        let has_stopped = !matches!(
            job.record.phase,
            WorkerPhase::Sync | WorkerPhase::Terminating { .. }
        );
        task.step = Step::Committing(job, Arc::new(transaction));
        if has_stopped {
            self.commit_step(world, which)?;
            self.act(world, which)?;
        }
        Ok(())
    }

    pub(super) fn commit_step(&self, world: &mut World, which: Which) -> Result<(), String> {
        let Step::Committing(job, transaction) = world.task(which).step.clone() else {
            unreachable!("nothing to commit");
        };
        if transaction.stale_on(&world.state).is_some() {
            let task = world.task(which);
            task.worker().wake();
            task.step = Step::Idle;
            return Ok(());
        }
        let crosses =
            job.record.phase != WorkerPhase::Sync || rejection(&world.state, &job).is_none();
        world.task(which).step = Step::Committed(job);
        self.commit(world, &transaction)?;
        if crosses {
            return Ok(());
        }
        self.act(world, which)
    }

    pub(super) fn act(&self, world: &mut World, which: Which) -> Result<(), String> {
        let Step::Committed(job) = world.task(which).step.clone() else {
            unreachable!("nothing was committed");
        };
        if job.record.phase == WorkerPhase::Sync
            && let Some(preemption) = &job.preemption
        {
            let state = world.state.clone();
            for victim in Which::ALL {
                if preemption.victims.contains(&victim.uid())
                    && let Some(task) = &mut world.agent.tasks[victim as usize]
                    && task.worker().adopt_recorded_end(&state).is_some()
                {
                    task.is_cancelled = true;
                    task.worker().pending = true;
                }
            }
            world.task(which).worker().preemption = None;
        }
        world.task(which).step = Step::Idle;
        if matches!(job.record.phase, WorkerPhase::Finished { .. }) {
            world.task(which).worker().forget_for_next_life();
            return Ok(());
        }
        if world.task(which).is_cancelled {
            return Ok(());
        }
        let is_done = match &job.record.phase {
            WorkerPhase::Sync => self.sync_pod(world, which, &job)?,
            WorkerPhase::Terminating { .. } => {
                if world.running(which).is_some() {
                    judge::stop(world, which)?;
                    world.end_containers(which, 143);
                }
                self.record_exits(world, which)?;
                if rejection(&world.state, &job).is_none() {
                    self.report(world, which, &job, Stage::Terminated, false)?;
                }
                true
            }
            WorkerPhase::Terminated { .. } | WorkerPhase::Finished { .. } => {
                let known = world.state.record::<StatusRecord>(job.uid.as_str());
                match (rejection(&world.state, &job), known) {
                    (Some(_), Some(known)) => {
                        let status = (*known.status).clone();
                        self.set_status(world, &job, status, true)?;
                    }
                    _ => {
                        self.report(world, which, &job, Stage::Terminated, true)?;
                    }
                }
                true
            }
        };
        if is_done {
            world.task(which).worker().advance(&job, NOW);
        }
        // What has stopped, and what was refused, comes to its end without a word to other pods.
        match &job.record.phase {
            WorkerPhase::Terminated { .. } => self.take(world, which),
            WorkerPhase::Terminating { .. } if rejection(&world.state, &job).is_some() => {
                self.take(world, which)
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the pod is finished.
    fn sync_pod(&self, world: &mut World, which: Which, job: &Worker) -> Result<bool, String> {
        if let Some((reason, message)) = rejection(&world.state, job) {
            let known = world.state.record::<StatusRecord>(job.uid.as_str());
            let known = known.map(|r| &*r.status);
            let status = pod_status::rejected(&job.pod, known, &reason, &message, NOW);
            self.set_status(world, job, status, false)?;
            return Ok(true);
        }
        self.record_exits(world, which)?;
        if self.report(world, which, job, Stage::Syncing, false)? {
            return Ok(true);
        }
        let (uid, status) = (which.uid(), Arc::clone(&world.runtime[which as usize]));
        let actions = pod_actions::compute(&PodActionInput {
            pod: &job.pod,
            status: &status,
            records: &Records::of(&world.state, &uid),
            probe_failures: &BTreeMap::new(),
            probes: &BTreeMap::new(),
            listed_at: NOW,
            now: NOW,
            backoff_max: BACKOFF_MAX,
        });
        assert!(actions.kill_pod.is_none() && actions.kill.is_empty());
        for id in &actions.remove_created {
            let end = record_end(&world.state, &uid, &status, id, NOW);
            self.commit(world, &end)?;
            world.runtime(which).containers.retain(|c| c.id != *id);
        }
        if let Some(attempt) = actions.create_sandbox {
            world.runtime(which).sandboxes.push(SandboxStatus {
                id: "sandbox".into(),
                attempt,
                state: SandboxState::Ready,
                created_at_ns: NOW_NS,
                ips: vec!["10.0.0.1".to_owned()],
                host_network: Some(false),
                runtime_handler: String::new(),
            });
        }
        if let Some(start) = actions.start.first() {
            let id = match &start.adopt {
                Some(id) => id.clone(),
                None => world.create(which, start.attempt, &start.hash),
            };
            let intent = IntentRecord {
                container_id: id.clone(),
                attempt: start.attempt,
                hash: start.hash.clone(),
                at: NOW,
            };
            let record = record_start(&world.state, &uid, CONTAINER, intent, start.backoff);
            match record {
                Some(record) => world.task(which).step = Step::Starting(id, Arc::new(record)),
                None => {
                    world.task(which).worker().wake();
                }
            }
        } else if actions.look_again {
            world.task(which).worker().wake();
        }
        Ok(false)
    }

    pub(super) fn commit_start(&self, world: &mut World, which: Which) -> Result<(), String> {
        let task = world.task(which);
        let Step::Starting(id, transaction) = task.step.clone() else {
            unreachable!("nothing is started");
        };
        let is_cancelled = task.is_cancelled;
        if transaction.stale_on(&world.state).is_some() {
            let task = world.task(which);
            task.worker().wake();
            task.step = Step::Idle;
            return Ok(());
        }
        world.task(which).step = if is_cancelled {
            Step::Idle
        } else {
            Step::Intended(id)
        };
        self.commit(world, &transaction)
    }

    pub(super) fn start(&self, world: &mut World, which: Which) -> Result<(), String> {
        let task = world.task(which);
        let Step::Intended(id) = std::mem::replace(&mut task.step, Step::Idle) else {
            unreachable!("no start is on record");
        };
        if task.is_cancelled {
            return Ok(());
        }
        task.worker().wake();
        let containers = world.runtime(which).containers.iter_mut();
        let started = containers.filter(|c| c.id == id && c.state == ContainerState::Created);
        for container in started {
            container.state = ContainerState::Running;
            container.started_at_ns = NOW_NS;
        }
        judge::start(self, world, which, &id)
    }

    fn record_exits(&self, world: &mut World, which: Which) -> Result<(), String> {
        let status = &world.runtime[which as usize];
        let exits = observe_exits(&world.state, &which.uid(), status, NOW, NOW);
        if exits.is_empty() {
            return Ok(());
        }
        self.commit(world, &exits)
    }

    /// Puts the pod's status on record. Returns whether it says that the pod is over.
    fn report(
        &self,
        world: &mut World,
        which: Which,
        job: &Worker,
        stage: Stage,
        is_finished: bool,
    ) -> Result<bool, String> {
        let records = Records::of(&world.state, &job.uid);
        let previous = world.state.record::<StatusRecord>(job.uid.as_str());
        let evicted = match &job.record.phase {
            WorkerPhase::Terminating { cause, .. } | WorkerPhase::Terminated { cause, .. } => {
                match cause {
                    TerminationCause::Evicted { reason, message } => {
                        Some((reason.as_str(), message.as_str()))
                    }
                    _ => None,
                }
            }
            _ => None,
        };
        let status = pod_status::generate(&StatusInput {
            pod: &job.pod,
            status: &world.runtime[which as usize],
            records: &records,
            previous: previous.map(|r| &*r.status),
            reasons: &BTreeMap::new(),
            probes: &BTreeMap::new(),
            resize: &ResizeView::default(),
            recursive_read_only: None,
            volume_images: &BTreeMap::new(),
            host_ips: &[],
            runtime_name: "model",
            stage,
            evicted,
            deadline_exceeded: false,
            listed_at: NOW,
            now: NOW,
            backoff_max: BACKOFF_MAX,
        });
        let is_over = pod_status::is_terminal(&status);
        self.set_status(world, job, status, is_finished)?;
        Ok(is_over)
    }

    fn set_status(
        &self,
        world: &mut World,
        job: &Worker,
        status: api::PodStatus,
        finished: bool,
    ) -> Result<(), String> {
        let record = StatusRecord {
            name: job.uid.to_string(),
            namespace: "default".to_owned(),
            status: Json::new(status),
            version: 1,
            acknowledged: 1,
            at: NOW,
            finished,
        };
        let known = world.state.record::<StatusRecord>(job.uid.as_str());
        if known == Some(&record) {
            return Ok(());
        }
        self.commit(world, &Transaction::new().put(job.uid.as_str(), record))
    }
}

fn rejection(state: &State, job: &Worker) -> Option<(String, String)> {
    let recorded = state.record::<AdmissionRecord>(job.uid.as_str());
    match &recorded.or(job.admission.as_ref())?.decision {
        AdmissionDecision::Admitted => None,
        AdmissionDecision::Rejected { reason, message } => Some((reason.clone(), message.clone())),
    }
}

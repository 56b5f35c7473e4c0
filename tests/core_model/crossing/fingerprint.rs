//! A hash of everything that decides what can happen next. Left out are versions (whether a transaction is outdated is
//! hashed instead), messages for humans, and the time, which stands still.

use std::hash::{DefaultHasher, Hash, Hasher};

use holdfast::core::pod_worker::Worker;
use holdfast::core::state::{
    AdmissionDecision, AdmissionRecord, AnyRecord, ContainerRecord, Mutation, PodRecord, State,
    StatusRecord, TerminationCause, Transaction, WorkerPhase, WorkerRecord,
};
use holdfast::types::runtime::PodStatus;

use super::node::{Agent, Node, Step, Task, Which, World};

pub(super) fn of(node: &Node, world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    (world.wishes, world.chances).hash(&mut hasher);
    for which in Which::ALL {
        on_record(node, &world.state, which, &mut hasher);
        runtime(&world.runtime[which as usize], &mut hasher);
    }
    for which in Which::ALL {
        memory(node, &world.state, &world.agent, which, &mut hasher);
    }
    hasher.finish()
}

fn on_record(node: &Node, state: &State, which: Which, hasher: &mut impl Hasher) {
    let name = which.name();
    let pod = state.record::<PodRecord>(name);
    pod.map(|record| node.face(which, &record.pod.0))
        .hash(hasher);
    admission(state.record::<AdmissionRecord>(name), hasher);
    worker(state.record::<WorkerRecord>(name), hasher);
    container(state.record::<ContainerRecord>(which.container()), hasher);
    status(state.record::<StatusRecord>(name), hasher);
}

fn admission(record: Option<&AdmissionRecord>, hasher: &mut impl Hasher) {
    let decision = record.map(|record| match &record.decision {
        AdmissionDecision::Admitted => "",
        AdmissionDecision::Rejected { reason, .. } => reason,
    });
    decision.hash(hasher);
}

fn worker(record: Option<&WorkerRecord>, hasher: &mut impl Hasher) {
    let Some(record) = record else {
        0_u8.hash(hasher);
        return;
    };
    let (rank, grace, cause) = match &record.phase {
        WorkerPhase::Sync => (1_u8, 0, None),
        WorkerPhase::Terminating {
            grace_seconds,
            cause,
            ..
        } => (2, *grace_seconds, Some(cause)),
        WorkerPhase::Terminated { cause, .. } => (3, 0, Some(cause)),
        WorkerPhase::Finished { cause, .. } => (4, 0, Some(cause)),
    };
    let cause = cause.map(|cause| match cause {
        TerminationCause::Deleted => "deleted",
        TerminationCause::Completed => "completed",
        TerminationCause::Orphan => "orphan",
        TerminationCause::Evicted { reason, .. } => reason,
    });
    (rank, grace, cause).hash(hasher);
    (
        record.started.is_some(),
        record.deleted,
        record.restart_requested,
        record.runtime_only,
    )
        .hash(hasher);
}

fn container(record: Option<&ContainerRecord>, hasher: &mut impl Hasher) {
    let facts = record.map(|record| {
        let intent = record.intent.as_ref();
        let exit = record.last_exit.as_ref();
        (
            record.restart_count,
            intent.map(|intent| (intent.container_id.as_str(), intent.attempt)),
            exit.map(|exit| (exit.container_id.as_str(), exit.exit_code, exit.inferred)),
            record.backoff.is_some(),
        )
    });
    facts.hash(hasher);
}

fn status(record: Option<&StatusRecord>, hasher: &mut impl Hasher) {
    let Some(record) = record else {
        0_u8.hash(hasher);
        return;
    };
    let status = &record.status;
    (&status.phase, &status.reason, record.finished).hash(hasher);
    for shown in status.container_statuses.iter().flatten() {
        let state = shown.state.as_ref();
        let ended = state.and_then(|state| state.terminated.as_ref());
        (
            &shown.container_id,
            shown.restart_count,
            ended.map(|ended| (ended.exit_code, &ended.reason)),
            state.is_some_and(|state| state.running.is_some()),
            state
                .and_then(|state| state.waiting.as_ref())
                .map(|w| &w.reason),
        )
            .hash(hasher);
    }
}

fn runtime(status: &PodStatus, hasher: &mut impl Hasher) {
    status.sandboxes.len().hash(hasher);
    for container in &status.containers {
        let state = container.state as u8;
        (container.attempt, state, container.exit_code).hash(hasher);
    }
}

fn memory(node: &Node, state: &State, agent: &Agent, which: Which, hasher: &mut impl Hasher) {
    let known = agent.known[which as usize].as_ref();
    known.map(|pod| node.face(which, pod)).hash(hasher);
    let Some(task) = &agent.tasks[which as usize] else {
        0_u8.hash(hasher);
        return;
    };
    known_worker(node, which, &task.worker, hasher);
    // What is cancelled counts while there is a step.
    (task.is_cancelled && !matches!(task.step, Step::Idle)).hash(hasher);
    step(node, state, which, task, hasher);
}

fn known_worker(node: &Node, which: Which, of: &Worker, hasher: &mut impl Hasher) {
    worker(Some(&of.record), hasher);
    admission(of.admission.as_ref(), hasher);
    node.face(which, &of.pod).hash(hasher);
    let victims = of.preemption.as_ref().map(|preemption| &preemption.victims);
    (victims, of.pending, of.forget, of.confirmed).hash(hasher);
}

fn step(node: &Node, state: &State, which: Which, task: &Task, hasher: &mut impl Hasher) {
    match &task.step {
        Step::Idle => 1_u8.hash(hasher),
        Step::Taken(job) => {
            2_u8.hash(hasher);
            known_worker(node, which, job, hasher);
        }
        Step::Committing(job, wanted) => {
            3_u8.hash(hasher);
            known_worker(node, which, job, hasher);
            transaction(node, state, wanted, hasher);
        }
        Step::Committed(job) => {
            4_u8.hash(hasher);
            known_worker(node, which, job, hasher);
        }
        Step::Starting(id, wanted) => {
            5_u8.hash(hasher);
            id.as_str().hash(hasher);
            transaction(node, state, wanted, hasher);
        }
        Step::Intended(id) => {
            6_u8.hash(hasher);
            id.as_str().hash(hasher);
        }
    }
}

fn transaction(node: &Node, state: &State, of: &Transaction, hasher: &mut impl Hasher) {
    of.stale_on(state).is_some().hash(hasher);
    for expectation in &of.expectations {
        (&expectation.table, &expectation.key).hash(hasher);
    }
    for mutation in &of.mutations {
        let Mutation::Put { key, record } = mutation else {
            continue;
        };
        key.hash(hasher);
        match record {
            AnyRecord::Pods(record) => {
                let which = Which::ALL.into_iter().find(|w| w.name() == &**key);
                node.face(which.expect("one of them"), &record.pod.0)
                    .hash(hasher);
            }
            AnyRecord::Admissions(record) => admission(Some(record), hasher),
            AnyRecord::Workers(record) => worker(Some(record), hasher),
            AnyRecord::Containers(record) => container(Some(record), hasher),
            _ => panic!("no other record is in flight"),
        }
    }
}

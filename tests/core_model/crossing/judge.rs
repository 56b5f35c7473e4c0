//! What must hold whatever happens, from the records as they are and from what the runtime does. Shares no code with
//! what it judges.

use holdfast::core::admission::Verdict;
use holdfast::core::pod_status::PREEMPTING;
use holdfast::core::state::{
    AdmissionDecision, AdmissionRecord, ContainerRecord, PodRecord, State, StatusRecord,
    TerminationCause, WorkerPhase, WorkerRecord,
};
use holdfast::types::ContainerId;
use holdfast::types::runtime::ContainerState;

use super::node::{Node, Which, Wish, World};

type Judgement = Result<(), String>;

fn require(holds: bool, property: impl FnOnce() -> String) -> Judgement {
    if holds { Ok(()) } else { Err(property()) }
}

/// What is on record of a pod that crosses others.
#[derive(Clone, Copy)]
struct Recorded<'a> {
    decision: Option<&'a AdmissionDecision>,
    phase: Option<&'a WorkerPhase>,
}

impl<'a> Recorded<'a> {
    fn of(state: &'a State, which: Which) -> Self {
        let admission = state.record::<AdmissionRecord>(which.name());
        let worker = state.record::<WorkerRecord>(which.name());
        Self {
            decision: admission.map(|record| &record.decision),
            phase: worker.map(|record| &record.phase),
        }
    }

    fn is_admitted(self) -> bool {
        self.decision == Some(&AdmissionDecision::Admitted)
    }

    fn is_refused(self) -> bool {
        matches!(self.decision, Some(AdmissionDecision::Rejected { .. }))
    }

    fn is_preempted(self) -> bool {
        let cause = self.phase.and_then(cause);
        matches!(cause, Some(TerminationCause::Evicted { reason, .. }) if reason == PREEMPTING)
    }

    /// Admitted, and its end is not on record.
    fn holds_resources(self) -> bool {
        self.is_admitted() && self.phase.is_none_or(|phase| *phase == WorkerPhase::Sync)
    }
}

fn cause(phase: &WorkerPhase) -> Option<&TerminationCause> {
    match phase {
        WorkerPhase::Sync => None,
        WorkerPhase::Terminating { cause, .. }
        | WorkerPhase::Terminated { cause, .. }
        | WorkerPhase::Finished { cause, .. } => Some(cause),
    }
}

fn rank(phase: &WorkerPhase) -> u8 {
    match phase {
        WorkerPhase::Sync => 0,
        WorkerPhase::Terminating { .. } => 1,
        WorkerPhase::Terminated { .. } => 2,
        WorkerPhase::Finished { .. } => 3,
    }
}

/// Pods that fit beside each other: by CPUs, and by ports of the host.
fn fit(node: &Node, pods: &[Which]) -> Judgement {
    let asks = |which: &Which| node.asks[*which as usize];
    let cpus: u32 = pods.iter().map(|which| asks(which).cpus).sum();
    require(cpus <= node.cpus, || {
        format!("{pods:?} take {cpus} of {} CPUs", node.cpus)
    })?;
    let clashes = clash(node, pods);
    require(!clashes, || format!("{pods:?} have a host port twice"))
}

fn clash(node: &Node, pods: &[Which]) -> bool {
    let ports: Vec<i32> = pods
        .iter()
        .filter_map(|which| node.asks[*which as usize].port)
        .collect();
    (1..ports.len()).any(|i| ports[..i].contains(&ports[i]))
}

/// Judges the records after a commit. What its source has let go of holds nothing: another pod may take its place before
/// it has stopped.
pub(super) fn commit(node: &Node, world: &World, before: &State) -> Judgement {
    let after = &world.state;
    for which in Which::ALL {
        let (old, new) = (Recorded::of(before, which), Recorded::of(after, which));
        if let (Some(old), Some(new)) = (old.decision, new.decision) {
            require(
                std::mem::discriminant(old) == std::mem::discriminant(new),
                || format!("the decision on {which:?} changed from {old:?} to {new:?}"),
            )?;
        }
        if let (Some(old), Some(new)) = (old.phase, new.phase) {
            require(rank(old) <= rank(new), || {
                format!("the phase of {which:?} went back from {old:?} to {new:?}")
            })?;
        }
        let has_pod = after.record::<PodRecord>(which.name()).is_some();
        require(
            has_pod == new.phase.is_some() && has_pod == new.decision.is_some(),
            || format!("{which:?} is on record in part"),
        )?;
        let intends = intent(after, which);
        require(
            intends.is_none()
                || intends == intent(before, which)
                || new.phase == Some(&WorkerPhase::Sync),
            || {
                format!(
                    "a start of {which:?} is decided with {:?} on record",
                    new.phase
                )
            },
        )?;
        if new.is_preempted() && !old.is_preempted() {
            preempted(before, after, which)?;
        }
    }
    let holders: Vec<Which> = Which::ALL
        .into_iter()
        .filter(|which| world.wishes[*which as usize] != Wish::Gone)
        .filter(|which| Recorded::of(after, *which).holds_resources())
        .collect();
    fit(node, &holders).map_err(|why| format!("on record, {why}"))
}

/// The container whose start is on record.
fn intent(state: &State, which: Which) -> Option<&ContainerId> {
    let record = state.record::<ContainerRecord>(which.container())?;
    Some(&record.intent.as_ref()?.container_id)
}

/// Judges that a pod ends for a critical one.
fn preempted(before: &State, after: &State, victim: Which) -> Judgement {
    let is_refused = Recorded::of(after, victim).is_refused();
    require(!is_refused, || {
        format!("{victim:?} was refused and is preempted")
    })?;
    let mut others = Which::ALL.into_iter().filter(|other| *other != victim);
    let is_for_another = others.any(|other| {
        Recorded::of(before, other).decision.is_none()
            && Recorded::of(after, other).holds_resources()
    });
    require(is_for_another, || {
        format!("{victim:?} ends for an admission that is not on record with it")
    })
}

/// Judges a decision by what is in the agent's memory.
pub(super) fn verdict(node: &Node, world: &World, pod: Which, verdict: &Verdict) -> Judgement {
    let agent = &world.agent;
    let holds = |which: &Which| {
        let Some(task) = &agent.tasks[*which as usize] else {
            return false;
        };
        let decided = task
            .worker
            .admission
            .as_ref()
            .map(|record| &record.decision);
        let decision = Recorded::of(&world.state, *which).decision.or(decided);
        let is_wanted = agent.known[*which as usize].is_some();
        is_wanted && rank(&task.worker.record.phase) < 2 && {
            decision.is_none_or(|decision| *decision == AdmissionDecision::Admitted)
        }
    };
    let others = Which::ALL.into_iter().filter(|which| *which != pod);
    let mut beside: Vec<Which> = others.filter(holds).collect();
    beside.push(pod);
    let is_clash = clash(node, &beside);
    let fits = fit(node, &beside);
    match &verdict.decision {
        AdmissionDecision::Admitted if verdict.preempt.is_empty() => {
            fits.map_err(|why| format!("{pod:?} is admitted, but {why}"))
        }
        AdmissionDecision::Admitted => {
            require(fits.is_err(), || format!("{pod:?} needs no room"))?;
            let victims = |which: &Which| verdict.preempt.contains(&which.uid());
            let wrong = Which::ALL
                .into_iter()
                .filter(victims)
                .find(|which| node.asks[*which as usize].is_critical || !beside.contains(which));
            require(wrong.is_none(), || {
                format!("{wrong:?} is no pod to preempt for {pod:?}")
            })?;
            beside.retain(|which| !victims(which));
            fit(node, &beside).map_err(|why| format!("{pod:?} preempts too little, {why}"))
        }
        AdmissionDecision::Rejected { reason, .. } if reason == "NodePorts" => {
            require(is_clash, || format!("{pod:?} is refused for free ports"))
        }
        AdmissionDecision::Rejected { reason, .. } => {
            require(!node.asks[pod as usize].is_critical, || {
                format!("critical {pod:?} is refused: {reason}")
            })?;
            require(fits.is_err(), || {
                format!("{pod:?} is refused beside {beside:?}: {reason}")
            })
        }
    }
}

/// Judges the start of a container, after it. The end of the pod may have got on record after the start did, and the
/// request was under way.
pub(super) fn start(node: &Node, world: &World, which: Which, id: &ContainerId) -> Judgement {
    let recorded = Recorded::of(&world.state, which);
    let may_start = recorded.phase == Some(&WorkerPhase::Sync)
        || recorded.is_preempted() && recorded.phase.is_some_and(|phase| rank(phase) == 1);
    require(may_start, || {
        format!("{which:?} starts with {:?} on record", recorded.phase)
    })?;
    require(recorded.is_admitted(), || {
        format!("{which:?} starts with {:?} on record", recorded.decision)
    })?;
    require(intent(&world.state, which) == Some(id), || {
        format!("{id} starts without an intent")
    })?;
    let ran = |state: &ContainerState| *state != ContainerState::Created;
    let containers = &world.runtime[which as usize].containers;
    let runs = containers.iter().filter(|c| ran(&c.state)).count();
    require(
        runs < 2 || node.asks[which as usize].policy == "Always",
        || format!("{which:?} runs again in spite of its policy"),
    )?;
    let running = containers
        .iter()
        .filter(|c| c.state == ContainerState::Running);
    require(running.count() == 1, || format!("{which:?} runs twice"))?;
    let running: Vec<Which> = Which::ALL
        .into_iter()
        .filter(|which| world.wishes[*which as usize] != Wish::Gone)
        .filter(|which| world.running(*which).is_some())
        .collect();
    require(!clash(node, &running), || {
        format!("{running:?} run with one host port")
    })
}

/// Judges that containers of a pod are stopped.
pub(super) fn stop(world: &World, which: Which) -> Judgement {
    let phase = Recorded::of(&world.state, which).phase;
    require(phase.is_some_and(|phase| rank(phase) > 0), || {
        format!("{which:?} is stopped with {phase:?} on record")
    })
}

/// Judges that nothing of a pod is remembered any more.
pub(super) fn forget(world: &World, which: Which) -> Judgement {
    require(world.running(which).is_none(), || {
        format!("{which:?} runs and is forgotten")
    })?;
    let phase = Recorded::of(&world.state, which).phase;
    require(phase.is_some_and(|phase| rank(phase) == 3), || {
        format!("{which:?} is forgotten with {phase:?} on record")
    })
}

/// Judges a state in which nothing happens any more: every wanted pod runs, or was refused, or has ended.
pub(super) fn at_rest(node: &Node, world: &World) -> Judgement {
    for which in Which::ALL {
        let recorded = Recorded::of(&world.state, which);
        let runs = world.running(which).is_some();
        match world.wishes[which as usize] {
            Wish::Absent | Wish::Gone => {
                let is_gone = recorded.phase.is_none()
                    && recorded.decision.is_none()
                    && world.runtime[which as usize].containers.is_empty()
                    && world.agent.tasks[which as usize].is_none();
                require(is_gone, || format!("something of {which:?} is left"))?;
            }
            Wish::Deleting => return Err(format!("{which:?} is being deleted for ever")),
            Wish::Wanted | Wish::Changed => {
                let status = world.state.record::<StatusRecord>(which.name());
                let shown = status.and_then(|record| record.status.phase.as_deref());
                let is_over = matches!(recorded.phase, Some(WorkerPhase::Finished { .. })) && !runs;
                let cause = recorded.phase.and_then(cause);
                let ended = is_over
                    && match cause {
                        Some(TerminationCause::Completed) if recorded.is_refused() => {
                            shown == Some("Failed")
                        }
                        Some(TerminationCause::Completed) => {
                            node.asks[which as usize].policy == "Never"
                                && shown == Some("Succeeded")
                        }
                        Some(TerminationCause::Evicted { .. }) => {
                            recorded.is_admitted() && matches!(shown, Some("Failed" | "Succeeded"))
                        }
                        _ => false,
                    };
                let is_well =
                    runs && shown == Some("Running") && recorded.holds_resources() || ended;
                require(is_well, || {
                    format!(
                        "{which:?} is wanted and comes to nothing: {:?}, {:?}, shown {shown:?}, runs: {runs}",
                        recorded.decision, recorded.phase
                    )
                })?;
            }
        }
    }
    let running: Vec<Which> = Which::ALL
        .into_iter()
        .filter(|which| world.running(*which).is_some())
        .collect();
    fit(node, &running).map_err(|why| format!("at rest, {why}"))
}

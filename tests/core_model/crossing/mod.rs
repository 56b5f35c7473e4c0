//! What crosses pods: admission, preemption, eviction and the death of the agent, in every order.
//!
//! The transitions are the decisions of `core`. Around them is a naive node: sources that want pods, a sync loop, workers
//! whose steps take turns at every commit and every effect, a store that refuses outdated decisions, a runtime. What is on
//! record and what the runtime does is judged after each transition. `explore` goes through all that can happen.

mod explore;
mod fingerprint;
mod judge;
mod node;
mod steps;

use holdfast::core::pod_worker::{self, KnownPod};
use holdfast::core::state::{StatusRecord, WorkerPhase};

use self::explore::{Model, explore};
use self::node::{Action, Asks, Chances, Node, Step, Which, Wish, World};

impl Model for Node {
    type State = World;
    type Action = Action;

    fn initial(&self) -> World {
        let mut world = self.empty();
        for which in self.settled {
            let mut next = Some(Action::Want(*which));
            while let Some(action) = next {
                world = self.next(&world, &action).expect("nothing else happens");
                let actions = self.actions(&world).into_iter();
                next = actions.rev().find(|action| self.is_certain(action));
            }
        }
        world
    }

    fn actions(&self, world: &World) -> Vec<Action> {
        let mut actions = Vec::new();
        let chances = &world.chances;
        for which in Which::ALL {
            let asks = &self.asks[which as usize];
            match world.wishes[which as usize] {
                Wish::Absent => actions.push(Action::Want(which)),
                Wish::Gone if asks.is_static && chances.comebacks > 0 => {
                    actions.push(Action::Want(which));
                }
                Wish::Gone => {}
                wish => {
                    let is_new = wish == Wish::Wanted;
                    if is_new && chances.changes > 0 && which == Which::Web {
                        actions.push(Action::Change(which));
                    }
                    if wish != Wish::Deleting && chances.deletions > 0 && !asks.is_static {
                        actions.push(Action::Delete(which));
                    }
                    let may_go = if asks.is_static {
                        chances.removals
                    } else {
                        chances.forced
                    };
                    if may_go > 0 {
                        actions.push(Action::Remove(which));
                    }
                }
            }
            if chances.exits > 0 && asks.policy != "Always" && world.running(which).is_some() {
                actions.push(Action::Exit(which));
            }
        }
        let agent = &world.agent;
        if chances.crashes > 0 {
            actions.push(Action::Crash);
        }
        // The store's queue is fair: what a forgotten pod leaves goes after what was decided while it was there.
        let is_committing = (agent.tasks.iter().flatten())
            .any(|task| matches!(task.step, Step::Committing(..) | Step::Starting(..)));
        let mut is_untidy = false;
        for which in Which::ALL {
            if !self.has_heard(world, which) {
                actions.push(Action::Hear(which));
            }
            let is_known = agent.known[which as usize].is_some();
            let Some(task) = &agent.tasks[which as usize] else {
                is_untidy |= is_known;
                continue;
            };
            let record = &task.worker.record;
            is_untidy |= match pod_worker::sync_known(record, is_known) {
                KnownPod::Keep => false,
                KnownPod::Stop => true,
                KnownPod::Drop | KnownPod::Forget => !task.worker.forget,
            };
            let is_running = world.running(which).is_some();
            if chances.evictions > 0 && record.phase == WorkerPhase::Sync && is_running {
                actions.push(Action::Evict(which));
            }
            let is_over = world
                .state
                .record::<StatusRecord>(task.worker.uid.as_str())
                .is_some_and(|record| record.finished);
            if is_over && world.wishes[which as usize] == Wish::Deleting {
                actions.push(Action::Finalize(which));
            }
            match &task.step {
                Step::Idle if task.worker.forget && is_committing => {}
                Step::Idle if task.worker.pending => actions.push(Action::Take(which)),
                Step::Idle => {}
                Step::Taken(_) => actions.push(Action::Decide(which)),
                Step::Committing(..) => actions.push(Action::Commit(which)),
                Step::Committed(_) => actions.push(Action::Act(which)),
                Step::Starting(..) => actions.push(Action::CommitStart(which)),
                Step::Intended(_) => actions.push(Action::Start(which)),
            }
        }
        if is_untidy {
            actions.push(Action::Housekeeping);
        }
        actions
    }

    fn next(&self, world: &World, action: &Action) -> Result<World, String> {
        let mut world = world.clone();
        self.apply(&mut world, *action)?;
        Ok(world)
    }

    fn fingerprint(&self, world: &World) -> u64 {
        fingerprint::of(self, world)
    }

    fn is_certain(&self, action: &Action) -> bool {
        match action {
            Action::Want(_)
            | Action::Change(_)
            | Action::Delete(_)
            | Action::Remove(_)
            | Action::Evict(_)
            | Action::Exit(_)
            | Action::Crash => false,
            Action::Hear(_)
            | Action::Finalize(_)
            | Action::Housekeeping
            | Action::Take(_)
            | Action::Decide(_)
            | Action::Commit(_)
            | Action::Act(_)
            | Action::CommitStart(_)
            | Action::Start(_) => true,
        }
    }

    fn at_rest(&self, world: &World) -> Result<(), String> {
        judge::at_rest(self, world)
    }
}

/// A pod of the API server that asks for so many CPUs.
fn asks(cpus: u32) -> Asks {
    Asks {
        cpus,
        port: None,
        policy: "Always",
        is_critical: false,
        is_static: false,
    }
}

fn critical(cpus: u32) -> Asks {
    Asks {
        is_critical: true,
        ..asks(cpus)
    }
}

/// Explores a node, and fails with the shortest way to a broken property. `least` is what it has to come to: a model that
/// explores nothing proves nothing.
fn explored(node: &Node, least: usize) {
    match explore(node) {
        Ok(explored) => {
            println!("{explored:?}");
            assert!(explored.states >= least, "{explored:?}");
            assert!(explored.at_rest > 1 && explored.depth > 10, "{explored:?}");
        }
        Err(found) => panic!(
            "{}\nafter {} actions, {:?}:\n{}",
            found.property,
            found.actions.len(),
            found.explored,
            found.actions.join("\n")
        ),
    }
}

/// Whether everything is to be explored, which takes many minutes.
fn is_whole() -> bool {
    std::env::var("HOLDFAST_MODEL").is_ok_and(|what| what == "whole")
}

fn never(cpus: u32) -> Asks {
    Asks {
        policy: "Never",
        ..asks(cpus)
    }
}

const CRASHES: Chances = Chances {
    crashes: 2,
    evictions: 0,
    exits: 0,
    changes: 0,
    deletions: 0,
    forced: 0,
    removals: 0,
    comebacks: 0,
};

/// A node that two pods fill, and all of which the critical one needs.
fn full_node(usual: Chances, whole: Chances) -> Node {
    let chances = if is_whole() { whole } else { usual };
    Node::new(2, [asks(1), never(1), critical(2)], chances)
}

#[test]
fn a_critical_pod_takes_the_room_of_two_wherever_the_agent_dies_twice() {
    let whole = Chances {
        evictions: 1,
        exits: 1,
        ..CRASHES
    };
    let mut node = full_node(CRASHES, whole);
    node.takes_late = is_whole();
    explored(&node, 50_000);
}

#[test]
fn pods_that_end_while_a_critical_one_comes_stay_so() {
    let usual = Chances {
        crashes: 1,
        evictions: 1,
        exits: 1,
        ..CRASHES
    };
    let whole = Chances {
        crashes: 2,
        changes: 1,
        deletions: 1,
        ..usual
    };
    let mut node = full_node(usual, whole);
    node.settled = &[Which::Web, Which::Batch];
    node.takes_late = true;
    explored(&node, 10_000);
}

#[test]
fn pods_that_are_deleted_and_changed_while_a_critical_one_comes_go_as_wanted() {
    let usual = Chances {
        crashes: 1,
        changes: 1,
        deletions: 1,
        ..CRASHES
    };
    let whole = Chances {
        crashes: 2,
        forced: 1,
        ..usual
    };
    let mut node = full_node(usual, whole);
    node.settled = &[Which::Web, Which::Batch];
    explored(&node, 20_000);
}

#[test]
fn a_refused_pod_makes_no_room_and_the_next_takes_that_of_one_that_is_gone() {
    let chances = Chances {
        removals: 1,
        comebacks: 1,
        ..CRASHES
    };
    let on_port = |asks| Asks {
        port: Some(80),
        ..asks
    };
    let manifest = Asks {
        is_static: true,
        ..critical(2)
    };
    let pods = [on_port(asks(1)), on_port(never(1)), manifest];
    let mut node = Node::new(2, pods, chances);
    // The second one is refused.
    node.settled = match is_whole() {
        true => &[Which::System],
        false => &[Which::System, Which::Batch],
    };
    explored(&node, 2_000);
}

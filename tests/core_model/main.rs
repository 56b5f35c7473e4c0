//! Drives the decisions of `core` against a naive model of a runtime, with a crash before every effect.
//!
//! The model keeps the truth (every run of every container) and judges each start; it shares no code with
//! what it judges.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test"
)]

mod case;
mod crossing;
mod judge;
mod sync;
mod world;

use holdfast_testkit::exploration::stride;
use proptest::prelude::*;

use crate::case::{Case, Event, Kind, Spec, case, rich_case};
use crate::world::World;

/// Of so many cases in a whole run.
fn cases(whole: u32) -> u32 {
    whole.div_ceil(u32::try_from(stride()).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(3000), rng_seed: proptest::test_runner::RngSeed::Fixed(36), failure_persistence: None, ..ProptestConfig::default() })]

    // Invariant POD-3.
    #[test]
    fn decisions_survive_crashes_and_never_break_the_restart_policy(case in case()) {
        let mut world = World::new(&case);
        for (event, crash) in &case.steps {
            world.budget = *crash;
            let crashed = world.sync().is_err();
            prop_assert!(!crashed || crash.is_some());
            world.budget = None;
            world.happen(event);
        }
        world.settle();
    }
}

#[test]
fn every_single_crash_point_of_a_restart_is_survived() {
    for policy in ["Always", "OnFailure", "Never"] {
        for code in [0, 1] {
            for first in 0..10 {
                for second in 0..10 {
                    let case = Case {
                        policy,
                        containers: Spec::mains(2),
                        steps: vec![
                            (Event::Pass(1), Some(first)),
                            (Event::Exit(0, code), None),
                            (Event::Forget(0), Some(second)),
                            (Event::Pass(20), Some(second)),
                        ],
                    };
                    drive(&case);
                }
            }
        }
    }
}

fn drive(case: &Case) {
    run(&mut World::new(case), case);
}

fn run(world: &mut World, case: &Case) {
    for (event, crash) in &case.steps {
        world.budget = *crash;
        assert!(world.sync().is_ok() || crash.is_some());
        world.budget = None;
        world.happen(event);
    }
    world.settle();
}

// Invariant POD-1.
#[test]
fn a_start_that_was_decided_and_not_made_is_made_whatever_is_crashed_into() {
    for event in [Event::SandboxDies, Event::NewImage(0), Event::Pass(1)] {
        for first in 0..8 {
            for second in 0..12 {
                drive(&Case {
                    policy: "Never",
                    containers: Spec::mains(1),
                    steps: vec![(event.clone(), Some(first)), (Event::Pass(1), Some(second))],
                });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(5000), rng_seed: proptest::test_runner::RngSeed::Fixed(38), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_kinds_of_containers_survive_crashes_in_order_and_as_their_policies_say(case in rich_case()) {
        drive(&case);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(3000), rng_seed: proptest::test_runner::RngSeed::Fixed(39), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn actions_alone_bring_a_pod_to_rest_when_no_status_says_that_it_is_finished(case in rich_case()) {
        let mut world = World::new(&case);
        world.told = false;
        run(&mut world, &case);
    }
}

/// Three init containers with a sidecar between them, and a main container with a hook.
fn in_order(policy: &'static str, steps: Vec<(Event, Option<u8>)>) -> Case {
    let with_hook = |kind| Spec {
        hook: true,
        ..Spec::of(kind)
    };
    Case {
        policy,
        containers: vec![
            Spec::of(Kind::Init),
            with_hook(Kind::Sidecar),
            Spec::of(Kind::Init),
            Spec::of(Kind::Init),
            with_hook(Kind::Main),
        ],
        steps,
    }
}

/// How often each container runs when the pod is started, goes through `steps`, and the agent dies before
/// effect `crash` of a sync.
fn runs(policy: &'static str, event: Option<Event>, crash: Option<(usize, u8)>) -> Vec<usize> {
    let mut world = World::new(&in_order(policy, Vec::new()));
    for step in 0..16 {
        world.boottime_ms += 10_000;
        world.complete_init();
        world.budget = crash
            .filter(|(at, _)| *at == step)
            .map(|(_, budget)| budget);
        assert!(world.sync().is_ok() || crash.is_some());
        world.budget = None;
        if step == 7
            && let Some(event) = &event
        {
            world.happen(event);
        }
    }
    world.settle();
    world.truth.values().map(Vec::len).collect()
}

#[test]
fn init_containers_run_as_often_as_without_a_crash() {
    for policy in ["Always", "OnFailure", "Never"] {
        assert_eq!(runs(policy, None, None), [1, 1, 1, 1, 1]);
        for step in 0..7 {
            for budget in 0..12 {
                let crashed = runs(policy, None, Some((step, budget)));
                assert_eq!(crashed, [1, 1, 1, 1, 1], "{policy}: crash {step}/{budget}");
            }
        }
    }
}

// Invariant POD-2.
#[test]
fn init_containers_run_once_for_each_sandbox() {
    for event in [Event::SandboxDies, Event::Wipe] {
        for policy in ["Always", "OnFailure"] {
            let undisturbed = runs(policy, Some(event.clone()), None);
            assert_eq!(undisturbed, [2, 2, 2, 2, 2], "{policy}: {event:?}");
            for step in 8..14 {
                for budget in 0..24 {
                    let crashed = runs(policy, Some(event.clone()), Some((step, budget)));
                    assert_eq!(
                        crashed, undisturbed,
                        "{policy}: {event:?}, crash {step}/{budget}"
                    );
                }
            }
        }
        let once = runs("Never", Some(event.clone()), None);
        assert_eq!(once, [1, 1, 1, 1, 1], "{event:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, rng_seed: proptest::test_runner::RngSeed::Fixed(37), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn crash_back_off_is_what_a_naive_count_makes_it(
        runs in prop::collection::vec((prop_oneof![0..30_i64, 500..700_i64], 0..400_i64, 0..2_i32), 1..12)
    ) {
        // Runs for a while, ends, and is looked at again early (twice) and late.
        let mut steps = vec![(Event::Pass(1), None)];
        for (ran, wait, code) in runs {
            steps.push((Event::Pass(ran), None));
            steps.push((Event::Exit(0, code), None));
            steps.push((Event::Pass(wait / 2), None));
            steps.push((Event::Pass(wait - wait / 2), None));
        }
        let case = Case { policy: "Always", containers: Spec::mains(1), steps };
        prop_assert!(World::new(&case).plain);
        drive(&case);
    }
}

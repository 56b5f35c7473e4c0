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
mod sync;
mod world;

use proptest::prelude::*;

use crate::case::{Case, Event, case};
use crate::world::World;

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, rng_seed: proptest::test_runner::RngSeed::Fixed(36), failure_persistence: None, ..ProptestConfig::default() })]

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
                        containers: 2,
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
    let mut world = World::new(case);
    for (event, crash) in &case.steps {
        world.budget = *crash;
        assert!(world.sync().is_ok() || crash.is_some());
        world.budget = None;
        world.happen(event);
    }
    world.settle();
}

#[test]
fn a_start_that_was_decided_and_not_made_is_made_whatever_is_crashed_into() {
    for event in [Event::SandboxDies, Event::NewImage(0), Event::Pass(1)] {
        for first in 0..8 {
            for second in 0..12 {
                drive(&Case {
                    policy: "Never",
                    containers: 1,
                    steps: vec![(event.clone(), Some(first)), (Event::Pass(1), Some(second))],
                });
            }
        }
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
        let case = Case { policy: "Always", containers: 1, steps };
        prop_assert!(World::new(&case).plain);
        drive(&case);
    }
}

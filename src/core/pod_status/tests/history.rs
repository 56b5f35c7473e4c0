//! Facts that must not go back, for every kind of container: R5, R6, R11.

use super::super::*;
use super::support::*;

#[test]
fn counts_ends_and_last_states_survive_the_loss_of_the_runtimes_records() {
    let mut setup = Setup::all_kinds(
        "Always",
        vec![
            exited("i", 0, 0),
            running("s", 7),
            exited("s", 6, 2),
            running("m", 4),
            exited("m", 3, 9),
        ],
    );
    let before = setup.generate();
    assert_eq!(
        words(&before),
        "Running i=0/-/0+ s=running/2/7*+ m=running/9/4*+"
    );
    setup.previous = Some(before);
    setup.owned = [
        ("i", ended("i", 0, 0)),
        ("s", started("s", 7)),
        ("m", started("m", 4)),
    ]
    .into();
    setup.status = wiped();
    let want = "Running i=0/-/0+ s=137/2/7 m=137/9/4";
    assert_eq!(words(&setup.generate()), want);
    setup.previous = Some(setup.generate());
    assert_eq!(words(&setup.generate()), want, "the same again");
}

#[test]
fn without_records_what_was_told_of_each_kind_still_counts() {
    for (policy, want) in [
        ("Always", "Running i=0/-/0+ s=init/137/1 m=init/137/1"),
        ("Never", "Failed i=0/-/0+ s=init/137/1 m=137/-/0"),
    ] {
        let mut setup = Setup::all_kinds(
            policy,
            vec![exited("i", 0, 0), running("s", 0), running("m", 0)],
        );
        setup.previous = Some(setup.generate());
        setup.status = wiped();
        let next = setup.generate();
        assert_eq!(words(&next), want, "{policy}");
        setup.previous = Some(next);
        assert_eq!(words(&setup.generate()), want, "{policy}, the same again");
    }
}

#[test]
fn an_ephemeral_container_that_vanished_has_failed_for_good() {
    let mut setup = Setup::of(
        pod("Always", &["a"]),
        runtime(vec![running("a", 0), running("e", 0)]),
    );
    let debug = serde_json::json!([{"name": "e", "image": "img:1"}]);
    setup.pod.spec.as_mut().unwrap().ephemeral_containers = serde_json::from_value(debug).ok();
    setup.previous = Some(setup.generate());
    setup.status = runtime(vec![running("a", 0)]);
    let want = "Running a=running/-/0*+ e=137/-/0";
    assert_eq!(words(&setup.generate()), want, "told before");
    setup.owned = [("e", started("e", 0))].into();
    assert_eq!(words(&setup.generate()), want, "on record");
}

#[test]
fn merge_table_of_all_kinds() {
    let before = |policy: &str, containers| Setup::all_kinds(policy, containers).generate();
    let done = || exited("i", 0, 0);
    for (name, policy, old, new, allowed) in [
        (
            "init runs again in a new sandbox",
            "Always",
            vec![done()],
            vec![running("i", 1)],
            true,
        ),
        (
            "the same, OnFailure",
            "OnFailure",
            vec![done()],
            vec![running("i", 1)],
            true,
        ),
        (
            "the same, Never",
            "Never",
            vec![done()],
            vec![running("i", 1)],
            false,
        ),
        (
            "failed init runs again",
            "OnFailure",
            vec![exited("i", 0, 1)],
            vec![running("i", 1)],
            true,
        ),
        (
            "failed init, Never",
            "Never",
            vec![exited("i", 0, 1)],
            vec![running("i", 1)],
            false,
        ),
        (
            "sidecar runs again, Never",
            "Never",
            vec![done(), exited("s", 0, 0)],
            vec![done(), running("s", 1)],
            true,
        ),
        (
            "main runs again, Never",
            "Never",
            vec![done(), exited("m", 0, 0)],
            vec![done(), running("m", 1)],
            false,
        ),
        (
            "main runs again, OnFailure",
            "OnFailure",
            vec![done(), exited("m", 0, 1)],
            vec![done(), running("m", 1)],
            true,
        ),
    ] {
        let (old, new) = (before(policy, old), before(policy, new));
        let merged = merge_for_update(&all_kinds(policy), Some(&old), new);
        assert_eq!(merged.is_ok(), allowed, "{name}: {merged:?}");
    }
    let mut pod = pod("Always", &["a"]);
    let debug = serde_json::json!([{"name": "e", "image": "img:1"}]);
    pod.spec.as_mut().unwrap().ephemeral_containers = serde_json::from_value(debug).ok();
    let old = Setup::of(pod.clone(), runtime(vec![exited("e", 0, 0)])).generate();
    let new = Setup::of(pod.clone(), runtime(vec![running("e", 1)])).generate();
    let refused = merge_for_update(&pod, Some(&old), new).unwrap_err();
    assert_eq!(
        refused,
        IllegalTransition {
            container: "e".into(),
            exit_code: 0
        }
    );
}

#[test]
fn merged_restart_counts_of_all_kinds_never_go_back() {
    let old = Setup::all_kinds(
        "Always",
        vec![running("i", 2), running("s", 3), running("m", 4)],
    )
    .generate();
    let new = Setup::all_kinds(
        "Always",
        vec![running("i", 0), running("s", 0), exited("m", 0, 1)],
    )
    .generate();
    let merged = merge_for_update(&all_kinds("Always"), Some(&old), new)
        .unwrap()
        .unwrap();
    let counts: Vec<_> = all_statuses(&merged).map(|s| s.restart_count).collect();
    assert_eq!(counts, [2, 3, 4]);
}

#[test]
fn crash_loops_of_all_kinds_are_new_once() {
    let mut setup = Setup::all_kinds("Always", vec![exited("i", 1, 2)]);
    setup.owned = [("i", with_backoff(ended("i", 1, 2), 40))].into();
    let first = setup.generate();
    assert_eq!(new_crash_loops(None, &first), ["i"]);
    assert!(new_crash_loops(Some(&first), &first).is_empty());
    setup.status = runtime(vec![exited("i", 1, 0), exited("s", 1, 2), running("m", 0)]);
    setup.owned = [
        ("i", ended("i", 1, 0)),
        ("s", with_backoff(ended("s", 1, 2), 40)),
    ]
    .into();
    assert_eq!(new_crash_loops(Some(&first), &setup.generate()), ["s"]);
}

#[test]
fn an_end_that_was_told_and_is_final_is_not_covered_by_a_failed_start() {
    for (policy, stage, want) in [
        ("Never", Stage::Syncing, "m=3/-/0"),
        ("Always", Stage::Terminating, "m=3/-/0"),
        ("Always", Stage::Syncing, "m=ErrImagePull/"),
    ] {
        let mut setup = Setup::all_kinds(
            policy,
            vec![exited("i", 0, 0), running("s", 0), exited("m", 0, 3)],
        );
        setup.previous = Some(setup.generate());
        setup.status = wiped();
        let failed = ("ErrImagePull".to_owned(), "no such image".to_owned());
        setup.reasons = [("m".to_owned(), failed)].into();
        setup.stage = stage;
        let words = words(&setup.generate());
        assert!(words.contains(want), "{policy} {stage:?}: {words}");
    }
}

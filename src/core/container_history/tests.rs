use super::*;
use crate::core::state::{Mutation, TerminationCause};
use crate::core::testkit::*;

fn state_with(owned: &Owned) -> State {
    let mut state = State::default();
    for (name, record) in owned {
        let put = Transaction::new().put(child_key(&"u1".into(), name), record.clone());
        state.apply(&put.mutations[0], 1);
    }
    state
}

fn apply(state: &State, transaction: &Transaction) -> State {
    let mut next = state.clone();
    for mutation in &transaction.mutations {
        next.apply(mutation, 2);
    }
    next
}

fn record<'a>(state: &'a State, name: &str) -> &'a ContainerRecord {
    state.record(&child_key(&"u1".into(), name)).unwrap()
}

#[test]
fn an_end_is_recorded_once_and_kept_when_the_runtime_forgets_it() {
    let state = state_with(&[("a", started("a", 2))].into());
    let status = runtime(vec![exited("a", 2, 3)]);
    let first = observe_exits(&state, &"u1".into(), &status, at(70), at(70));
    let state = apply(&state, &first);
    let exit = record(&state, "a").last_exit.clone().unwrap();
    assert_eq!(
        (exit.exit_code, exit.attempt, exit.finished),
        (3, 2, at(60))
    );
    assert_eq!(first.expectations.len(), 1);
    for status in [status, runtime(vec![])] {
        let again = observe_exits(&state, &"u1".into(), &status, at(80), at(80));
        assert!(again.is_empty());
    }
}

#[test]
fn an_end_without_a_record_makes_one_with_its_restart_count() {
    let state = State::default();
    let status = runtime(vec![exited("a", 5, 1), exited("a", 4, 1)]);
    let state = apply(
        &state,
        &observe_exits(&state, &"u1".into(), &status, at(70), at(70)),
    );
    assert_eq!(record(&state, "a").restart_count, 5);
    assert_eq!(record(&state, "a").last_exit.as_ref().unwrap().attempt, 5);
}

#[test]
fn a_vanished_intent_is_concluded_to_have_ended_with_137() {
    let state = state_with(&[("a", started("a", 0))].into());
    let now = observe_exits(&state, &"u1".into(), &runtime(vec![]), at(70), at(70));
    let exit = record(&apply(&state, &now), "a").last_exit.clone().unwrap();
    assert_eq!(
        (exit.exit_code, exit.reason.as_str()),
        (137, STATUS_UNKNOWN)
    );
    assert!(exit.inferred);
    assert_eq!(exit.finished, at(70));
}

#[test]
fn a_listing_older_than_the_intent_concludes_nothing() {
    let state = state_with(&[("a", started("a", 0))].into());
    assert!(observe_exits(&state, &"u1".into(), &runtime(vec![]), at(50), at(70)).is_empty());
}

#[test]
fn what_the_runtime_says_replaces_a_conclusion() {
    let mut owned = Owned::from([("a", ended("a", 0, 137))]);
    owned
        .get_mut("a")
        .unwrap()
        .last_exit
        .as_mut()
        .unwrap()
        .inferred = true;
    let state = state_with(&owned);
    let status = runtime(vec![exited("a", 0, 0)]);
    let state = apply(
        &state,
        &observe_exits(&state, &"u1".into(), &status, at(70), at(70)),
    );
    let exit = record(&state, "a").last_exit.as_ref().unwrap();
    assert_eq!((exit.exit_code, exit.inferred), (0, false));
}

#[test]
fn the_end_is_put_between_start_and_now_however_the_wall_clock_jumped() {
    let ns = |seconds: i64| (EPOCH + seconds) * 1_000_000_000;
    for (name, finished, start, now, want) in [
        ("as it was", 60, Some(50), 70, 60),
        (
            "the wall clock went back: not after now",
            9_000,
            Some(50),
            70,
            70,
        ),
        (
            "the wall clock went ahead: not before the start",
            -9_000,
            Some(50),
            70,
            50,
        ),
        ("start unknown", 10, None, 70, 10),
    ] {
        let got = exit_stamp(ns(finished), start.map(at), at(now));
        assert_eq!(got.boottime_ms, want * 1000, "{name}");
    }
    assert_eq!(exit_stamp(0, Some(at(50)), at(70)), at(70), "time unknown");
}

#[test]
fn before_a_removal_its_end_is_recorded_and_a_useless_intent_dropped() {
    let uid = PodUid::new("u1");
    let state = state_with(&[("a", started("a", 1))].into());
    let end = |state: &State, status: &PodStatus, id: &str| {
        record_end(state, &uid, status, &id.into(), at(70))
    };
    let created_one = runtime(vec![created("a", 1)]);
    let after = apply(&state, &end(&state, &created_one, "a-1"));
    assert_eq!(record(&after, "a").intent, None);
    assert_eq!(
        record(&after, "a").restart_count,
        1,
        "counts do not go back"
    );
    assert!(end(&after, &created_one, "a-1").is_empty());

    let exited_one = runtime(vec![exited("a", 1, 9)]);
    let after = apply(&state, &end(&state, &exited_one, "a-1"));
    assert_eq!(record(&after, "a").last_exit.as_ref().unwrap().exit_code, 9);
    assert!(
        end(&after, &exited_one, "a-1").is_empty(),
        "recorded already"
    );
    let older = runtime(vec![exited("a", 0, 4)]);
    assert!(
        end(&after, &older, "a-0").is_empty(),
        "a newer end is on record"
    );
    assert!(end(&state, &runtime(vec![running("a", 1)]), "a-1").is_empty());
    assert!(end(&state, &older, "nobody").is_empty());

    // What was concluded gives way to what the runtime says.
    let mut concluded = ended("a", 1, 137);
    concluded.last_exit.as_mut().unwrap().inferred = true;
    let state = state_with(&[("a", concluded)].into());
    let after = apply(&state, &end(&state, &exited_one, "a-1"));
    let exit = record(&after, "a").last_exit.as_ref().unwrap();
    assert_eq!((exit.exit_code, exit.inferred), (9, false));
}

#[test]
fn a_container_that_never_ran_takes_no_number() {
    let uid = PodUid::new("u1");
    // Attempt 0 ended, the start of attempt 1 is on record and its container was created.
    let decided = start_record(
        Some(&ended("a", 0, 1)),
        started("a", 1).intent.unwrap(),
        None,
    );
    let state = state_with(&[("a", decided)].into());
    let next = |state: &State, status: &PodStatus| {
        let history = History::of("a", status, Some(record(state, "a")), at(70), at(70));
        (history.next_attempt, history.restart_count)
    };
    let both = runtime(vec![created("a", 1), exited("a", 0, 1)]);
    assert_eq!(next(&state, &both), (1, 1), "if it is removed for another");

    // It goes unstarted: its number is free, with it there or gone, and the end before it as well.
    let dropped = apply(
        &state,
        &record_end(&state, &uid, &both, &"a-1".into(), at(70)),
    );
    for status in [both, runtime(vec![exited("a", 0, 1)]), runtime(vec![])] {
        assert_eq!(next(&dropped, &status), (1, 1), "{status:?}");
    }
    let again = start_record(
        Some(record(&dropped, "a")),
        started("a", 1).intent.unwrap(),
        None,
    );
    assert_eq!(again.restart_count, 1, "no number is left out");

    // Gone without a word it may have run, and so may one whose number has an end.
    assert_eq!(next(&state, &runtime(vec![])), (2, 1));
    let ran = runtime(vec![exited("a", 1, 1)]);
    assert_eq!(next(&dropped, &ran), (2, 1));
}

#[test]
fn what_ended_is_not_started_though_the_runtime_shows_it_as_created() {
    let uid = PodUid::new("u1");
    let status = runtime(vec![created("a", 1), exited("a", 0, 1)]);
    let mut cut_off = started("a", 1);
    let mut now = at(70);
    now.boot = crate::types::BootId(2);
    let end = end_before_reboot(&cut_off, &status, now).unwrap();
    assert_eq!(
        (end.exit_code, end.reason.as_str(), end.inferred),
        (137, STATUS_UNKNOWN, true)
    );
    assert_eq!(
        end_before_reboot(&cut_off, &status, at(70)),
        None,
        "same boot"
    );
    cut_off.last_exit = Some(end);
    for record in [cut_off, ended("a", 1, 0)] {
        assert_eq!(
            end_before_reboot(&record, &status, now),
            None,
            "it is known"
        );
        let history = History::of("a", &status, Some(&record), at(70), at(70));
        let Latest::Exited(exit) = &history.latest else {
            panic!("{:?}", history.latest);
        };
        assert_eq!(Some(exit), record.last_exit.as_ref());
        assert_eq!(history.previous_exit.as_ref().map(|e| e.attempt), Some(0));
        assert_eq!((history.created.len(), history.stale.len()), (0, 1));
        assert_eq!((history.restart_count, history.next_attempt), (1, 2));

        // It is recorded once, and stays on record when the container is removed.
        let state = state_with(&[("a", record)].into());
        assert!(observe_exits(&state, &uid, &status, at(70), at(70)).is_empty());
        assert!(record_end(&state, &uid, &status, &"a-1".into(), at(70)).is_empty());
    }
}

#[test]
fn a_container_that_cannot_be_removed_keeps_its_number_and_is_left_alone() {
    let stuck = ContainerStatus {
        reason: "StartError".to_owned(),
        message:
            "failed to create containerd task: failed to get task pid: context canceled: unknown"
                .to_owned(),
        hash: String::new(),
        ..created("a", 0)
    };
    let of = |status: &PodStatus, record: Option<&ContainerRecord>| {
        let history = History::of("a", status, record, at(70), at(70));
        let latest = history.latest == Latest::NeverRan;
        (history.created.len(), history.next_attempt, latest)
    };
    let alone = runtime(vec![stuck.clone()]);
    assert_eq!(of(&alone, None), (0, 1, true));
    assert_eq!(
        of(&alone, Some(&started("a", 0))),
        (0, 1, true),
        "its start is on record"
    );
    let beside = runtime(vec![created("a", 1), stuck]);
    assert_eq!(of(&beside, None), (1, 1, true));
}

#[test]
fn a_start_keeps_the_last_end_and_never_lowers_the_count() {
    let old = ended("a", 7, 1);
    let intent = |attempt| IntentRecord {
        attempt,
        ..started("a", attempt).intent.unwrap()
    };
    let next = start_record(Some(&old), intent(8), None);
    assert_eq!(
        (next.restart_count, next.last_exit),
        (8, old.last_exit.clone())
    );
    assert_eq!(start_record(Some(&old), intent(3), None).restart_count, 7);
}

#[test]
fn records_of_a_pod_are_found_by_its_prefix_alone() {
    let mut state = state_with(&[("a", started("a", 0)), ("b", started("b", 0))].into());
    let other = Mutation::Put {
        key: child_key(&"u11".into(), "c").into(),
        record: crate::core::state::Record::into_any(ContainerRecord::new()),
    };
    state.apply(&other, 3);
    let uid = PodUid::new("u1");
    let names: Vec<_> = Records::of(&state, &uid)
        .names()
        .map(str::to_owned)
        .collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn a_forgotten_init_container_did_not_run_in_this_sandbox_and_keeps_its_count_and_end() {
    let uid = PodUid::new("u1");
    let names = ["i", "j", "k", "nobody"].map(str::to_owned);
    let state = state_with(&[("i", ended("i", 2, 0)), ("j", started("j", 4))].into());
    let forget = forget_init(&state, &uid, &names);
    assert_eq!(forget.expectations.len(), 2);
    let state = apply(&state, &forget);

    let i = record(&state, "i");
    assert_eq!((i.restart_count, &i.intent), (2, &None));
    assert_eq!(i.last_exit, ended("i", 2, 0).last_exit);
    // Nobody knows how this one ended, which must not make its number free.
    let j = record(&state, "j");
    let end = j.last_exit.as_ref().unwrap();
    assert_eq!(
        (end.exit_code, end.attempt, end.inferred, end.finished),
        (STATUS_UNKNOWN_EXIT_CODE, 4, true, at(50))
    );
    let empty = runtime(vec![]);
    for (name, next) in [("i", 3), ("j", 5)] {
        let record = Some(record(&state, name));
        let history = History::of(name, &empty, record, at(70), at(70));
        assert_eq!(history.next_attempt, next, "{name}");
        assert!(!history.is_of_sandbox(&"s0".into(), &empty, record));
        assert!(history.may_have_run());
    }
    assert!(forget_init(&state, &uid, &names).is_empty(), "twice");

    // As long as the runtime has it, the true end replaces the concluded one.
    let left = runtime(vec![exited("j", 4, 7)]);
    let state = apply(&state, &observe_exits(&state, &uid, &left, at(70), at(70)));
    let end = record(&state, "j").last_exit.as_ref().unwrap();
    assert_eq!((end.exit_code, end.inferred), (7, false));
}

#[test]
fn an_end_belongs_to_the_sandbox_it_was_decided_or_seen_in() {
    let sandbox = ContainerId::from("s0");
    let elsewhere = |mut c: ContainerStatus| {
        c.sandbox_id = "s9".into();
        c
    };
    let no_intent = ContainerRecord {
        intent: None,
        ..ended("i", 0, 0)
    };
    let newer = ContainerRecord {
        intent: started("i", 1).intent,
        ..ended("i", 0, 0)
    };
    let rows = [
        ("nothing", vec![], None, false),
        ("runs", vec![running("i", 0)], None, true),
        (
            "runs elsewhere",
            vec![elsewhere(running("i", 0))],
            None,
            false,
        ),
        ("unknown", vec![unknown("i", 0)], None, true),
        ("ended", vec![exited("i", 0, 0)], None, true),
        (
            "ended elsewhere",
            vec![elsewhere(exited("i", 0, 0))],
            None,
            false,
        ),
        ("created", vec![created("i", 0)], None, false),
        ("on record", vec![], Some(ended("i", 0, 0)), true),
        ("vanished", vec![], Some(started("i", 0)), true),
        ("forgotten", vec![], Some(no_intent.clone()), false),
        (
            "forgotten and there",
            vec![exited("i", 0, 0)],
            Some(no_intent),
            true,
        ),
        (
            "the next one is created",
            vec![created("i", 1)],
            Some(newer),
            false,
        ),
    ];
    for (name, containers, record, want) in rows {
        let status = runtime(containers);
        let history = History::of("i", &status, record.as_ref(), at(70), at(70));
        let is = history.is_of_sandbox(&sandbox, &status, record.as_ref());
        assert_eq!(is, want, "{name}");
    }
}

#[test]
fn the_newest_that_is_known_has_the_say() {
    let of = |containers: Vec<ContainerStatus>, record: Option<ContainerRecord>, listed: i64| {
        let status = runtime(containers);
        let history = History::of("a", &status, record.as_ref(), at(listed), at(70));
        let latest = match &history.latest {
            Latest::NeverRan => "never ran".to_owned(),
            Latest::Starting => "starting".to_owned(),
            Latest::Running(c) => format!("running {}", c.attempt),
            Latest::Unknown(c) => format!("unknown {}", c.attempt),
            Latest::Exited(e) => format!("exited {}", e.attempt),
        };
        let previous = history.previous_exit.as_ref().map(|e| e.attempt);
        (
            latest,
            previous,
            history.duplicates.len(),
            history.next_attempt,
        )
    };
    let counted = ContainerRecord {
        restart_count: 3,
        ..ContainerRecord::new()
    };
    let rows = [
        (
            vec![unknown("a", 1), exited("a", 2, 0)],
            None,
            60,
            "exited 2",
            None,
            0,
            3,
        ),
        (
            vec![unknown("a", 2), exited("a", 1, 0)],
            None,
            60,
            "unknown 2",
            Some(1),
            0,
            3,
        ),
        (
            vec![unknown("a", 1), exited("a", 1, 0)],
            None,
            60,
            "unknown 1",
            Some(1),
            0,
            2,
        ),
        (
            vec![exited("a", 1, 0), exited("a", 3, 0)],
            None,
            60,
            "exited 3",
            Some(1),
            0,
            4,
        ),
        (
            vec![running("a", 1), running("a", 2)],
            None,
            60,
            "running 2",
            None,
            1,
            3,
        ),
        (
            vec![running("a", 2), exited("a", 1, 0)],
            None,
            60,
            "running 2",
            Some(1),
            0,
            3,
        ),
        (vec![], Some(started("a", 0)), 50, "starting", None, 0, 1),
        (vec![], Some(started("a", 0)), 60, "exited 0", None, 0, 1),
        (vec![], Some(counted), 60, "never ran", None, 0, 4),
        (vec![created("a", 0)], None, 60, "never ran", None, 0, 0),
    ];
    for (containers, record, listed, latest, previous, duplicates, next) in rows {
        let name = format!("{containers:?} {record:?}");
        let want = (latest.to_owned(), previous, duplicates, next);
        assert_eq!(of(containers, record, listed), want, "{name}");
    }
}

#[test]
fn a_start_keeps_completed_hooks_of_its_own_container_alone() {
    let mut old = ended("a", 0, 1);
    old.hooks_done = vec!["a-0/postStart".into(), "a-1/postStart".into()];
    let next = start_record(Some(&old), started("a", 1).intent.unwrap(), None);
    assert_eq!(next.hooks_done, ["a-1/postStart"]);
}

#[test]
fn an_end_of_a_clock_that_went_back_is_after_the_start_of_its_own_container_alone() {
    let mut status = exited("a", 0, 1);
    // Long before it was decided to start it.
    status.finished_at_ns = (EPOCH - 9_000) * 1_000_000_000;
    let own = started("a", 0);
    let intended = own.intent.as_ref().unwrap().at;
    assert_eq!(observed(&status, Some(&own), at(70)).finished, intended);
    let other = started("a", 1);
    assert!(observed(&status, Some(&other), at(70)).finished.boottime_ms < intended.boottime_ms);
}

#[test]
fn a_later_end_than_the_start_stands_for_it() {
    let mut record = started("i", 2);
    for (attempt, want) in [(1, 2), (2, 2), (3, 3)] {
        let mut exit = ended("i", attempt, 0).last_exit.unwrap();
        exit.container_id = "of another".into();
        record.last_exit = Some(exit);
        let state = state_with(&[("i", record.clone())].into());
        let state = apply(
            &state,
            &forget_init(&state, &"u1".into(), &["i".to_owned()]),
        );
        let exit = self::record(&state, "i").last_exit.as_ref().unwrap();
        assert_eq!(
            (exit.attempt, exit.inferred),
            (want, attempt < 2),
            "{attempt}"
        );
    }
}

#[test]
fn no_start_gets_on_record_after_the_end_of_its_pod() {
    let uid = PodUid::new("u1");
    let worker = |phase| WorkerRecord {
        full_name: "p_ns".to_owned(),
        queued: at(1),
        started: Some(at(1)),
        phase,
        deleted: false,
        restart_requested: false,
        runtime_only: false,
    };
    let put = |state: &State, phase| apply(state, &Transaction::new().put("u1", worker(phase)));
    let start = |seen: &State| {
        let intent = started("a", 0).intent.unwrap();
        record_start(seen, &uid, "a", intent, None)
    };
    let runs = put(&State::default(), WorkerPhase::Sync);
    let ended = put(
        &runs,
        WorkerPhase::Terminated {
            since: at(2),
            cause: TerminationCause::Completed,
        },
    );
    assert_eq!(start(&ended), None);

    // The end gets on record between the decision and its commit.
    let decided = start(&runs).unwrap();
    assert_eq!(decided.stale_on(&runs), None);
    let mut ended = runs.clone();
    let end = worker(WorkerPhase::Finished {
        since: at(2),
        cause: TerminationCause::Completed,
    });
    ended.apply(&Transaction::new().put("u1", end).mutations[0], 3);
    assert!(decided.stale_on(&ended).is_some());
}

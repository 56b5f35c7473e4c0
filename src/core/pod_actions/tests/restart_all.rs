//! A restart of all containers of a pod.

use super::*;
use crate::core::restart_all::Restart;
use serde_json::json;

const ALL: &[(&str, u32)] = &[("a", 0), ("b", 0), ("i", 0), ("s", 0)];

fn decided(pod: &Pod, status: &PodStatus, owned: &Owned, restart: Option<Restart>) -> PodActions {
    compute(&PodActionInput {
        pod,
        status,
        records: &borrowed(owned).with_restart(restart),
        probe_failures: &BTreeMap::new(),
        probes: &BTreeMap::new(),
        listed_at: at(70),
        now: at(70),
        backoff_max: crash::DEFAULT_MAX,
    })
}

fn up_to(b: ContainerStatus) -> Vec<ContainerStatus> {
    vec![exited("i", 0, 0), running("s", 0), running("a", 0), b]
}

fn all_ended() -> Vec<ContainerStatus> {
    let (i, s) = (exited("i", 0, 0), exited("s", 0, 137));
    vec![i, s, exited("a", 0, 137), exited("b", 0, 88)]
}

/// All have ended, and these have been started since.
fn since(newer: &[ContainerStatus]) -> Vec<ContainerStatus> {
    [all_ended(), newer.to_vec()].concat()
}

#[test]
fn everything_is_stopped_and_runs_again_in_order_whatever_its_policy() {
    let stopping = || Some(restart_by_b(0, None));
    let done = || Some(restart_by_b(0, Some(ALL)));
    let caused = || -> Owned { [("b", ended("b", 0, 88))].into() };
    let (i, s) = (exited("i", 1, 0), running("s", 1));
    let mut with_created = up_to(exited("b", 0, 88));
    with_created.push(created("a", 1));
    let gone = with(vec![sandbox(0, NotReady)], all_ended());
    let table = [
        (
            "not on record yet: nothing is done",
            runtime(up_to(exited("b", 0, 88))),
            none(),
            None,
            "keep a, keep b",
        ),
        (
            "what runs is stopped",
            runtime(up_to(exited("b", 0, 88))),
            caused(),
            stopping(),
            "kill s-0, kill a-0, keep a, keep b",
        ),
        (
            "what was created is removed",
            runtime(with_created),
            caused(),
            stopping(),
            "kill s-0, kill a-0, remove a-1, keep a, keep b",
        ),
        (
            "nothing starts before the second step",
            runtime(all_ended()),
            caused(),
            stopping(),
            "keep a, keep b",
        ),
        (
            "nor is a sandbox made",
            gone.clone(),
            caused(),
            stopping(),
            "keep a, keep b",
        ),
        (
            "init containers first",
            runtime(all_ended()),
            caused(),
            done(),
            "start i#1",
        ),
        (
            "then sidecars",
            runtime(since(std::slice::from_ref(&i))),
            caused(),
            done(),
            "start s#1",
        ),
        (
            "then the others",
            runtime(since(&[i.clone(), s.clone()])),
            caused(),
            done(),
            "start a#1, start b#1, keep s",
        ),
        (
            "one whose start failed is started as well",
            runtime(since(&[i.clone(), s.clone(), running("b", 1)])),
            [("b", started("b", 1))].into(),
            done(),
            "start a#1, keep s, keep b",
        ),
        (
            "once: what ends after it is up to its policy",
            runtime(since(&[i.clone(), s, exited("a", 1, 0), running("b", 1)])),
            [("b", started("b", 1))].into(),
            done(),
            "keep s, keep b",
        ),
        (
            "an init container that fails after it fails the pod",
            runtime(since(&[exited("i", 1, 1)])),
            caused(),
            done(),
            "kill-pod",
        ),
        (
            "a sandbox that is gone is replaced, even in a pod that runs once",
            gone,
            caused(),
            done(),
            "kill-pod, forget i, forget s, sandbox 1, start i#1",
        ),
    ];
    let pod = pod_that_restarts("Never");
    for (what, status, owned, restart, want) in table {
        let mut actions = decided(&pod, &status, &owned, restart);
        assert_eq!(brief(&actions, at(70)), want, "{what}");
        actions.kill.retain(|k| k.reason == KillReason::RestartAll);
        for kill in &actions.kill {
            assert_eq!(kill.grace, Some(Duration::ZERO), "{what}");
            assert!(kill.message.contains("b exited with 88"), "{what}");
        }
        assert_eq!(actions.look_again, actions.restart_all, "{what}");
    }
}

#[test]
fn the_back_off_of_the_cause_holds_back_all_and_that_of_others_none() {
    let pod = pod_that_restarts("Never");
    let ended_at: &[(&str, u32)] = &[("a", 0), ("b", 1), ("i", 0), ("s", 0)];
    let restart = || Some(restart_by_b(1, Some(ended_at)));
    let mut status = all_ended();
    status[3] = exited("b", 1, 88);
    let owned = |seconds| -> Owned {
        [
            ("a", with_backoff(ended("a", 0, 137), 300)),
            ("b", with_backoff(ended("b", 1, 88), seconds)),
        ]
        .into()
    };
    let held = decided(&pod, &runtime(status.clone()), &owned(40), restart());
    assert_eq!(brief(&held, at(70)), "wait b 30");
    assert_eq!(held.waiting[0].reason, CRASH_LOOP_BACK_OFF);
    assert_eq!(held.next_due, Some(at(100)));

    status.extend([exited("i", 1, 0), running("s", 1)]);
    let free = decided(&pod, &runtime(status), &owned(5), restart());
    assert_eq!(brief(&free, at(70)), "start a#1, start b#2, keep s");
    let backoff = |at: usize| free.start[at].backoff.unwrap().duration_ms;
    assert_eq!(backoff(0), 300_000, "it did not crash");
    assert_eq!(backoff(1), 10_000, "twice as long as before");
}

#[test]
fn an_init_container_that_restarts_all_by_completing_has_a_back_off() {
    let mut pod = pod_that_restarts("Never");
    let spec = pod.spec.as_mut().unwrap();
    let init = &mut spec.init_containers.as_mut().unwrap()[0];
    init.restart_policy = Some("Never".to_owned());
    init.restart_policy_rules = serde_json::from_value(json!([
        {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [0]}},
    ]))
    .unwrap();
    let restart = Restart {
        trigger: "i".to_owned(),
        container_id: "i-0".to_owned(),
        exit_code: 0,
        ended: Some([("i".to_owned(), 0)].into()),
    };
    let status = runtime(vec![exited("i", 0, 0)]);
    let next = |record| {
        let owned: Owned = [("i", record)].into();
        decided(&pod, &status, &owned, Some(restart.clone()))
    };
    let first = next(ended("i", 0, 0));
    assert_eq!(brief(&first, at(70)), "start i#1");
    assert_eq!(first.start[0].backoff.unwrap().duration_ms, 10_000);
    let held = next(with_backoff(ended("i", 0, 0), 40));
    assert_eq!(brief(&held, at(70)), "wait i 30");
}

#[test]
fn ephemeral_containers_stay_and_are_not_run_again() {
    let mut pod = pod_that_restarts("Never");
    pod.spec.as_mut().unwrap().ephemeral_containers =
        serde_json::from_value(json!([{"name": "e", "image": "img:1"}])).unwrap();
    let mut containers = up_to(exited("b", 0, 88));
    containers.push(running("e", 0));
    let stopping = decided(
        &pod,
        &runtime(containers),
        &none(),
        Some(restart_by_b(0, None)),
    );
    let want = "kill s-0, kill a-0, keep a, keep b";
    assert_eq!(brief(&stopping, at(70)), want);
    let ended = since(&[exited("e", 0, 0)]);
    let done = Some(restart_by_b(0, Some(ALL)));
    let again = decided(&pod, &runtime(ended), &none(), done);
    assert_eq!(brief(&again, at(70)), "start i#1");
}

#[test]
fn a_container_that_may_restart_all_is_not_started_before_its_exit_code_is_known() {
    let mut pod = pod("Always", &["a", "b"]);
    let b = &mut pod.spec.as_mut().unwrap().containers[1];
    b.restart_policy = Some("Always".to_owned());
    b.restart_policy_rules = serde_json::from_value(json!([
        {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": [0]}},
    ]))
    .unwrap();
    let status = runtime(vec![running("a", 0), running("b", 0)]);
    let killed = |failing: &str| {
        let failures = [(failing.to_owned(), ProbeFailure::Liveness)].into();
        let actions = compute(&PodActionInput {
            probe_failures: &failures,
            pod: &pod,
            status: &status,
            records: &Records::default(),
            probes: &BTreeMap::new(),
            listed_at: at(70),
            now: at(70),
            backoff_max: crash::DEFAULT_MAX,
        });
        brief(&actions, at(70))
    };
    assert_eq!(killed("b"), "kill b-0, keep a");
    assert_eq!(killed("a"), "kill a-0, start a#1, keep b");
    let unclear = runtime(vec![running("a", 0), unknown("b", 0)]);
    let actions = decided(&pod, &unclear, &none(), None);
    assert_eq!(brief(&actions, at(70)), "kill b-0, keep a");
}

#[test]
fn a_pod_that_its_source_has_not_confirmed_is_not_restarted() {
    let pod = pod_that_restarts("Never");
    let status = runtime(up_to(exited("b", 0, 88)));
    for restart in [None, Some(restart_by_b(0, None))] {
        let actions = decided(&pod, &status, &none(), restart).unconfirmed();
        assert_eq!(brief(&actions, at(70)), "keep a, keep b");
        assert!(!actions.look_again && !actions.is_done());
    }
}

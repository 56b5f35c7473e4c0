mod kinds;
mod policies;
mod restart_all;

use super::*;
use crate::core::backoff::early;
use crate::core::state::{ContainerRecord, State, Transaction};
use crate::core::testkit::*;
use crate::types::runtime::ContainerStatus;
use crate::types::runtime::SandboxState::{NotReady, Ready};

/// Actions in one line: `kill-pod`, `sandbox 1`, `kill a-0`, `remove a-1`, `forget i`, `hook a-0`,
/// `start a#1`, `adopt a-1#1`, `keep a`, `wait a 40`.
fn brief(actions: &PodActions, now: Stamp) -> String {
    let mut parts = Vec::new();
    parts.extend(actions.kill_pod.iter().map(|_| "kill-pod".to_owned()));
    parts.extend(actions.kill.iter().map(|k| format!("kill {}", k.id)));
    parts.extend(
        actions
            .remove_created
            .iter()
            .map(|id| format!("remove {id}")),
    );
    parts.extend(actions.forget_init.iter().map(|n| format!("forget {n}")));
    parts.extend(actions.post_start.iter().map(|p| format!("hook {}", p.id)));
    parts.extend(actions.create_sandbox.map(|n| format!("sandbox {n}")));
    parts.extend(actions.start.iter().map(|s| match &s.adopt {
        None => format!("start {}#{}", s.name, s.attempt),
        Some(id) => format!("adopt {id}#{}", s.attempt),
    }));
    parts.extend(actions.keep.iter().map(|name| format!("keep {name}")));
    let wait = |w: &Waiting| format!("wait {} {}", w.name, w.until.until(now).as_secs());
    parts.extend(actions.waiting.iter().map(wait));
    parts.join(", ")
}

fn decide(pod: &Pod, status: &PodStatus, owned: &Owned, now: i64) -> PodActions {
    compute(&PodActionInput {
        pod,
        status,
        records: &borrowed(owned),
        probe_failures: &BTreeMap::new(),
        probes: &BTreeMap::new(),
        listed_at: at(now),
        now: at(now),
        backoff_max: crash::DEFAULT_MAX,
    })
}

fn check(table: Vec<(&str, Pod, PodStatus, Owned, &str)>) {
    for (name, pod, status, owned, want) in table {
        let actions = decide(&pod, &status, &owned, 70);
        assert_eq!(brief(&actions, at(70)), want, "{name}");
    }
}

#[test]
fn an_end_by_a_shutdown_of_the_machine_is_a_failure() {
    let stopped = |container: ContainerStatus| ContainerStatus {
        reason: "NodeShutdown".to_owned(),
        ..container
    };
    let by_machine = || runtime(vec![stopped(exited("a", 0, 0))]);
    check(vec![
        (
            "OnFailure",
            pod("OnFailure", &["a"]),
            by_machine(),
            none(),
            "start a#1",
        ),
        (
            "Never",
            pod("Never", &["a"]),
            by_machine(),
            none(),
            "kill-pod",
        ),
        (
            "OnFailure, of itself",
            pod("OnFailure", &["a"]),
            runtime(vec![exited("a", 0, 0)]),
            none(),
            "kill-pod",
        ),
    ]);
}

fn none() -> Owned {
    Owned::new()
}

fn with(
    sandboxes: Vec<crate::types::runtime::SandboxStatus>,
    containers: Vec<ContainerStatus>,
) -> PodStatus {
    let mut status = runtime(containers);
    status.sandboxes = sandboxes;
    status.sort();
    status
}

fn other_hash(mut container: ContainerStatus) -> ContainerStatus {
    container.hash = "other".into();
    container
}

fn in_sandbox(mut container: ContainerStatus, id: &str) -> ContainerStatus {
    container.sandbox_id = id.into();
    container
}

#[test]
fn sandbox_table() {
    let a = || pod("Always", &["a"]);
    let never = || pod("Never", &["a"]);
    let on_failure = || pod("OnFailure", &["a", "b"]);
    let mut host = a();
    host.spec.as_mut().unwrap().host_network = Some(true);
    let mut deleting = a();
    deleting.metadata.deletion_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH),
    );
    let mut no_ip = sandbox(0, Ready);
    no_ip.ips.clear();
    let mut uninspected = no_ip.clone();
    uninspected.host_network = None;
    let dead = || vec![sandbox(0, NotReady)];
    check(vec![
        (
            "nothing yet",
            a(),
            with(vec![], vec![]),
            none(),
            "sandbox 0, start a#0",
        ),
        (
            "a ready one is used",
            a(),
            runtime(vec![]),
            none(),
            "start a#0",
        ),
        (
            "not ready",
            a(),
            with(dead(), vec![]),
            none(),
            "kill-pod, sandbox 1, start a#0",
        ),
        (
            "two ready",
            a(),
            with(vec![sandbox(0, Ready), sandbox(1, Ready)], vec![]),
            none(),
            "kill-pod, sandbox 2, start a#0",
        ),
        (
            "an old dead one does not matter",
            a(),
            with(vec![sandbox(1, Ready), sandbox(0, NotReady)], vec![]),
            none(),
            "start a#0",
        ),
        (
            "newest dead, older ready",
            a(),
            with(vec![sandbox(1, NotReady), sandbox(0, Ready)], vec![]),
            none(),
            "kill-pod, sandbox 2, start a#0",
        ),
        (
            "no IP",
            a(),
            with(vec![no_ip.clone()], vec![]),
            none(),
            "kill-pod, sandbox 1, start a#0",
        ),
        (
            "not inspected",
            a(),
            with(vec![uninspected], vec![]),
            none(),
            "start a#0",
        ),
        (
            "network mode changed",
            host,
            runtime(vec![]),
            none(),
            "kill-pod, sandbox 1, start a#0",
        ),
        (
            "running in a dead sandbox",
            a(),
            with(dead(), vec![running("a", 3)]),
            none(),
            "kill-pod, sandbox 1, start a#4",
        ),
        (
            "Never: not again",
            never(),
            with(dead(), vec![running("a", 0)]),
            none(),
            "kill-pod",
        ),
        (
            "Never: ended, sandbox stopped: at rest",
            never(),
            with(dead(), vec![exited("a", 0, 1)]),
            none(),
            "",
        ),
        (
            "Never: all wiped, on record",
            never(),
            with(vec![], vec![]),
            [("a", started("a", 0))].into(),
            "",
        ),
        (
            "Never: recorded end, all wiped",
            never(),
            with(vec![], vec![]),
            [("a", ended("a", 0, 0))].into(),
            "",
        ),
        (
            "Never: created only, never ran",
            never(),
            with(dead(), vec![created("a", 0)]),
            none(),
            "kill-pod, remove a-0, sandbox 1, start a#0",
        ),
        (
            "Never: nothing ever",
            never(),
            with(vec![], vec![]),
            none(),
            "sandbox 0, start a#0",
        ),
        (
            "OnFailure: without the succeeded",
            on_failure(),
            with(dead(), vec![exited("a", 0, 0), exited("b", 0, 1)]),
            none(),
            "kill-pod, sandbox 1, start b#1",
        ),
        (
            "OnFailure: succeeded on record only",
            on_failure(),
            with(vec![], vec![]),
            [("a", ended("a", 0, 0)), ("b", ended("b", 0, 0))].into(),
            "",
        ),
        (
            "OnFailure: all succeeded",
            on_failure(),
            with(dead(), vec![exited("a", 0, 0), exited("b", 0, 0)]),
            none(),
            "",
        ),
        (
            "OnFailure: ready but to be replaced, nothing left",
            on_failure(),
            with(vec![no_ip], vec![exited("a", 0, 0), exited("b", 0, 0)]),
            none(),
            "kill-pod",
        ),
        ("deleting", deleting, with(vec![], vec![]), none(), ""),
        (
            "wiped while in back-off",
            a(),
            with(vec![], vec![]),
            [("a", with_backoff(ended("a", 7, 1), 40))].into(),
            "sandbox 0, wait a 30",
        ),
    ]);
}

#[test]
fn main_container_table() {
    let a = |policy| pod(policy, &["a"]);
    let now_running = || running("a", 0);
    check(vec![
        (
            "keep",
            a("Always"),
            runtime(vec![now_running()]),
            none(),
            "keep a",
        ),
        (
            "keep one, start the other",
            pod("Never", &["a", "b"]),
            runtime(vec![now_running()]),
            none(),
            "start b#0, keep a",
        ),
        (
            "Always after 0",
            a("Always"),
            runtime(vec![exited("a", 0, 0)]),
            none(),
            "start a#1",
        ),
        (
            "Always after 1",
            a("Always"),
            runtime(vec![exited("a", 4, 1)]),
            none(),
            "start a#5",
        ),
        (
            "OnFailure after 1",
            a("OnFailure"),
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "start a#1",
        ),
        (
            "OnFailure after 0: done",
            a("OnFailure"),
            runtime(vec![exited("a", 0, 0)]),
            none(),
            "kill-pod",
        ),
        (
            "Never after 1: done",
            a("Never"),
            runtime(vec![exited("a", 0, 1)]),
            none(),
            "kill-pod",
        ),
        (
            "Never: one ended, one runs",
            pod("Never", &["a", "b"]),
            runtime(vec![exited("a", 0, 0), running("b", 0)]),
            none(),
            "keep b",
        ),
        (
            "hash changed: Never restarts too",
            a("Never"),
            runtime(vec![other_hash(now_running())]),
            none(),
            "kill a-0, start a#1",
        ),
        (
            "hash unknown: kept",
            a("Always"),
            runtime(vec![{
                let mut c = now_running();
                c.hash.clear();
                c
            }]),
            none(),
            "keep a",
        ),
        (
            "Unknown: killed, then started",
            a("Always"),
            runtime(vec![unknown("a", 0)]),
            none(),
            "kill a-0, start a#1",
        ),
        (
            "Unknown, OnFailure",
            a("OnFailure"),
            runtime(vec![unknown("a", 2)]),
            none(),
            "kill a-2, start a#3",
        ),
        (
            "Unknown, Never: may have run",
            a("Never"),
            runtime(vec![unknown("a", 0)]),
            none(),
            "kill-pod",
        ),
        (
            "two run",
            a("Always"),
            runtime(vec![running("a", 1), running("a", 0)]),
            none(),
            "kill a-0, keep a",
        ),
        (
            "created, never started",
            a("Always"),
            runtime(vec![created("a", 0)]),
            none(),
            "adopt a-0#0",
        ),
        (
            "created after an end",
            a("Always"),
            runtime(vec![exited("a", 0, 1), created("a", 1)]),
            none(),
            "adopt a-1#1",
        ),
        (
            "created with intent",
            a("Always"),
            runtime(vec![created("a", 1), exited("a", 0, 1)]),
            [(
                "a",
                with_backoff(
                    ContainerRecord {
                        intent: started("a", 1).intent,
                        restart_count: 1,
                        ..ended("a", 0, 1)
                    },
                    10,
                ),
            )]
            .into(),
            "adopt a-1#1",
        ),
        (
            "created, other hash",
            a("Always"),
            runtime(vec![other_hash(created("a", 0))]),
            none(),
            "remove a-0, start a#0",
        ),
        (
            "created, other sandbox",
            a("Always"),
            runtime(vec![in_sandbox(created("a", 0), "s9")]),
            none(),
            "remove a-0, start a#0",
        ),
        (
            "created twice: one is adopted",
            a("Always"),
            runtime(vec![created("a", 0), {
                let mut c = created("a", 1);
                c.created_at_ns = 9;
                c
            }]),
            none(),
            "remove a-0, adopt a-1#1",
        ),
        (
            "created, count on record is higher",
            a("Always"),
            runtime(vec![created("a", 2)]),
            [("a", ended("a", 7, 0))].into(),
            "remove a-2, start a#8",
        ),
        (
            "created, may not run any more",
            a("Never"),
            runtime(vec![exited("a", 0, 0), created("a", 1)]),
            none(),
            "kill-pod, remove a-1",
        ),
        (
            "created beside a running one",
            a("Always"),
            runtime(vec![now_running(), created("a", 1)]),
            none(),
            "remove a-1, keep a",
        ),
        (
            "vanished, Always",
            a("Always"),
            runtime(vec![]),
            [("a", started("a", 7))].into(),
            "start a#8",
        ),
        (
            "vanished, OnFailure: 137",
            a("OnFailure"),
            runtime(vec![]),
            [("a", started("a", 0))].into(),
            "start a#1",
        ),
        (
            "vanished, Never",
            a("Never"),
            runtime(vec![]),
            [("a", started("a", 0))].into(),
            "kill-pod",
        ),
        (
            "end on record, gone, Never",
            a("Never"),
            runtime(vec![]),
            [("a", ended("a", 0, 0))].into(),
            "kill-pod",
        ),
        (
            "end on record beats an older one in the runtime",
            a("OnFailure"),
            runtime(vec![exited("a", 0, 1)]),
            [("a", ended("a", 1, 0))].into(),
            "kill-pod",
        ),
        (
            "the runtime beats an older record",
            a("OnFailure"),
            runtime(vec![exited("a", 2, 0)]),
            [("a", ended("a", 1, 1))].into(),
            "kill-pod",
        ),
        (
            "in back-off",
            a("Always"),
            runtime(vec![exited("a", 1, 1)]),
            [("a", with_backoff(ended("a", 1, 1), 40))].into(),
            "wait a 30",
        ),
        (
            "one in back-off, one runs",
            pod("Always", &["a", "b"]),
            runtime(vec![exited("a", 1, 1), running("b", 0)]),
            [("a", with_backoff(ended("a", 1, 1), 40))].into(),
            "keep b, wait a 30",
        ),
        (
            "back-off over",
            a("Always"),
            runtime(vec![exited("a", 1, 1)]),
            [("a", with_backoff(ended("a", 1, 1), 10))].into(),
            "start a#2",
        ),
        (
            "another image has no back-off",
            {
                let mut p = a("Always");
                p.spec.as_mut().unwrap().containers[0].image = Some("img:2".into());
                p
            },
            runtime(vec![exited("a", 1, 1)]),
            [("a", with_backoff(ended("a", 1, 1), 40))].into(),
            "start a#2",
        ),
        (
            "containers that are not in the spec do not matter",
            a("Always"),
            runtime(vec![now_running(), exited("x", 0, 1)]),
            none(),
            "keep a",
        ),
    ]);
}

#[test]
fn probe_failures_restart_unless_the_policy_is_never() {
    for (policy, failure, want, reason) in [
        (
            "Always",
            ProbeFailure::Liveness,
            "kill a-0, start a#1",
            KillReason::LivenessProbe,
        ),
        (
            "OnFailure",
            ProbeFailure::Startup,
            "kill a-0, start a#1",
            KillReason::StartupProbe,
        ),
    ] {
        let actions = probe(policy, failure);
        assert_eq!(brief(&actions, at(70)), want);
        assert_eq!(actions.kill[0].reason, reason);
        assert!(
            actions.kill[0]
                .message
                .ends_with("probe, will be restarted")
        );
    }
    // Nothing is kept and nothing starts: the pod as a whole is stopped.
    assert_eq!(
        brief(&probe("Never", ProbeFailure::Liveness), at(70)),
        "kill-pod"
    );
}

fn probe(policy: &str, failure: ProbeFailure) -> PodActions {
    compute(&PodActionInput {
        pod: &pod(policy, &["a"]),
        status: &runtime(vec![running("a", 0)]),
        records: &Records::default(),
        probe_failures: &BTreeMap::from([("a".to_owned(), failure)]),
        probes: &BTreeMap::new(),
        listed_at: at(70),
        now: at(70),
        backoff_max: crash::DEFAULT_MAX,
    })
}

#[test]
fn a_listing_older_than_the_start_says_nothing_about_it() {
    let owned = Owned::from([("a", started("a", 0))]);
    let empty = PodStatus::empty("u1".into());
    for (status, listed, want) in [
        (runtime(vec![]), 49, "keep a"),
        (runtime(vec![]), 50, "keep a"),
        (runtime(vec![]), 51, "start a#1"),
        (empty, 49, "keep a"),
    ] {
        let actions = compute(&PodActionInput {
            pod: &pod("Always", &["a"]),
            status: &status,
            records: &borrowed(&owned),
            probe_failures: &BTreeMap::new(),
            probes: &BTreeMap::new(),
            listed_at: at(listed),
            now: at(70),
            backoff_max: crash::DEFAULT_MAX,
        });
        assert_eq!(brief(&actions, at(70)), want, "listed at {listed}");
    }
}

#[test]
fn restart_continues_the_crash_loop_where_it_was() {
    // 300 s of back-off, the agent comes back 30 s into it.
    let owned = Owned::from([("a", with_backoff(ended("a", 7, 1), 300))]);
    let actions = decide(&pod("Always", &["a"]), &runtime(vec![]), &owned, 90);
    assert_eq!(brief(&actions, at(90)), "wait a 270");
    assert_eq!(actions.next_due, Some(at(360)));
    assert_eq!(
        actions.waiting[0].message,
        "back-off 5m0s restarting failed container=a pod=web_ns(u1)"
    );
    let actions = decide(&pod("Always", &["a"]), &runtime(vec![]), &owned, 360);
    assert_eq!(brief(&actions, at(360)), "start a#8");
    assert_eq!(actions.start[0].backoff.unwrap().duration_ms, 300_000);
}

#[test]
fn an_adopted_start_keeps_the_back_off_that_was_decided_with_it() {
    let mut record = with_backoff(ended("a", 0, 1), 10);
    record.intent = started("a", 1).intent;
    record.restart_count = 1;
    let before = record.backoff;
    let status = runtime(vec![exited("a", 0, 1), created("a", 1)]);
    let actions = decide(&pod("Always", &["a"]), &status, &[("a", record)].into(), 61);
    assert_eq!(actions.start[0].backoff, before);
}

#[test]
fn a_status_that_may_be_older_than_a_start_is_asked_for_again() {
    let pod = pod("Always", &["a", "b"]);
    let owned: Owned = [("a", started("a", 0))].into();
    for status in [runtime(vec![]), with(vec![], vec![])] {
        let early = decide(&pod, &status, &owned, 50);
        assert!(early.look_again, "{early:?}");
        assert!(!early.start.iter().any(|s| s.name == "a"), "{early:?}");
        let later = decide(&pod, &status, &owned, 60);
        assert!(!later.look_again && !later.is_empty(), "{later:?}");
    }
}

#[test]
fn each_thing_to_do_counts_alone() {
    let nothing = PodActions::default();
    assert!(nothing.is_empty() && nothing.is_done());
    let fresh = decide(&pod("Always", &["a"]), &runtime(vec![]), &none(), 70);
    let start = fresh.start.clone();
    let to_do: [(&str, PodActions, bool, bool); 8] = [
        (
            "sandbox",
            PodActions {
                create_sandbox: Some(0),
                ..PodActions::default()
            },
            false,
            true,
        ),
        (
            "remove",
            PodActions {
                remove_created: vec!["a-0".into()],
                ..PodActions::default()
            },
            false,
            true,
        ),
        (
            "forget",
            PodActions {
                forget_init: vec!["i".into()],
                ..PodActions::default()
            },
            false,
            true,
        ),
        (
            "start",
            PodActions {
                start,
                ..PodActions::default()
            },
            false,
            false,
        ),
        (
            "hook",
            PodActions {
                post_start: vec![PostStart {
                    id: "a-0".into(),
                    name: "a".into(),
                }],
                ..PodActions::default()
            },
            false,
            true,
        ),
        (
            "keep",
            PodActions {
                keep: vec!["a".into()],
                ..PodActions::default()
            },
            true,
            false,
        ),
        (
            "wait",
            PodActions {
                waiting: vec![Waiting {
                    name: "a".into(),
                    reason: String::new(),
                    message: String::new(),
                    until: at(80),
                }],
                ..PodActions::default()
            },
            true,
            false,
        ),
        (
            "where",
            PodActions {
                sandbox_id: Some("s0".into()),
                ..PodActions::default()
            },
            true,
            true,
        ),
    ];
    for (name, actions, is_empty, is_done) in to_do {
        assert_eq!(
            (actions.is_empty(), actions.is_done()),
            (is_empty, is_done),
            "{name}"
        );
    }
}

#[test]
fn why_a_container_is_started_again_is_said() {
    let exit = ended("a", 0, 3).last_exit.unwrap();
    let again = decide(
        &pod("Always", &["a"]),
        &runtime(vec![exited("a", 0, 3)]),
        &Owned::from([("a", ended("a", 0, 3))]),
        10_000,
    );
    assert_eq!(
        again.start[0].why,
        format!("ended with 3 ({})", exit.reason)
    );
}

#[test]
fn what_never_ran_is_not_started_in_a_pod_that_goes() {
    let mut leaving = pod("Always", &["a", "b"]);
    let now = serde_json::from_value(serde_json::json!("2026-01-01T00:00:00Z")).unwrap();
    leaving.metadata.deletion_timestamp = Some(now);
    let owned = Owned::from([("a", started("a", 0))]);
    let actions = decide(&leaving, &runtime(vec![running("a", 0)]), &owned, 70);
    assert!(actions.start.is_empty(), "{}", brief(&actions, at(70)));
}

#[test]
fn a_pod_that_is_done_still_has_its_sandbox() {
    let owned = Owned::from([("a", ended("a", 0, 0))]);
    let done = decide(
        &pod("Never", &["a"]),
        &runtime(vec![exited("a", 0, 0)]),
        &owned,
        70,
    );
    assert!(done.is_done());
    assert_eq!(done.sandbox_id, Some("s0".into()));
}

// Invariant BOOT-2.
#[test]
fn nothing_starts_in_a_pod_that_its_source_has_not_confirmed() {
    let two = || pod("Always", &["a", "b"]);
    let dead = || vec![sandbox(0, NotReady)];
    for (name, status, want) in [
        (
            "one runs, one has ended",
            runtime(vec![running("a", 0), exited("b", 0, 1)]),
            "keep a",
        ),
        (
            "one runs, one was made",
            runtime(vec![running("a", 0), created("b", 0)]),
            "keep a",
        ),
        (
            "one has another spec",
            runtime(vec![other_hash(running("a", 0)), running("b", 0)]),
            "keep b",
        ),
        (
            "both run, the sandbox is gone",
            with(dead(), vec![running("a", 0), running("b", 0)]),
            "",
        ),
        (
            "two attempts of one run",
            runtime(vec![running("a", 0), running("a", 1), running("b", 0)]),
            "kill a-0, keep a, keep b",
        ),
    ] {
        let all = decide(&two(), &status, &none(), 70);
        let actions = all.unconfirmed();
        assert_eq!(brief(&actions, at(70)), want, "{name}");
        assert_eq!(!actions.is_empty(), want.contains("kill"), "{name}");
    }
    // What is over for good is stopped.
    let status = with(dead(), vec![running("a", 0)]);
    let actions = decide(&pod("Never", &["a"]), &status, &none(), 70).unconfirmed();
    assert_eq!(brief(&actions, at(70)), "kill-pod");
}

#[test]
fn a_back_off_that_ended_early_holds_nothing_back_and_grows_with_the_start() {
    let pod = pod("Always", &["a"]);
    let status = runtime(vec![exited("a", 1, 1)]);
    let applied = |mut state: State, transaction: Transaction| {
        for mutation in &transaction.mutations {
            state.apply(mutation, 1);
        }
        state
    };
    let on_record = Transaction::new().put("u1/a", with_backoff(ended("a", 1, 1), 40));
    let before = applied(State::default(), on_record);
    let uid = pod.uid();
    let decide = |state: &State| {
        let records = Records::of(state, &uid);
        let none = BTreeMap::new();
        let actions = compute(&PodActionInput {
            pod: &pod,
            status: &status,
            records: &records,
            probe_failures: &BTreeMap::new(),
            probes: &none,
            listed_at: at(70),
            now: at(70),
            backoff_max: crash::DEFAULT_MAX,
        });
        let exit = ended("a", 1, 1).last_exit.unwrap();
        let container = &pod.containers()[0];
        let shown = crash_wait(&pod, container, &records, &exit, at(70), crash::DEFAULT_MAX);
        (actions, shown.is_some())
    };
    let (actions, is_shown) = decide(&before);
    assert!(is_shown && actions.start.is_empty() && actions.waiting.len() == 1);
    let text = "it is back".to_owned();
    let cause = early::Cause::at(early::Subject::Network, "network", text, at(69));
    let (transaction, _) = early::end(&before, &uid, &["a"], &[cause], at(70));
    let (actions, is_shown) = decide(&applied(before, transaction));
    assert!(!is_shown && actions.waiting.is_empty());
    let next = actions.start[0].backoff.unwrap();
    assert_eq!((next.duration_ms, next.since), (80_000, at(70)));
}

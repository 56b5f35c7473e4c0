//! Statuses of a pod whose containers all restart.

use super::super::*;
use super::support::*;
use crate::core::restart_all::{CONDITION, RESTARTING, Restart};

const ALL: &[(&str, u32)] = &[("a", 0), ("b", 0), ("i", 0), ("s", 0)];

fn of(containers: Vec<ContainerStatus>, restart: Option<Restart>) -> Setup {
    Setup {
        restart,
        ..Setup::of(pod_that_restarts("Never"), runtime(containers))
    }
}

fn all_ended() -> Vec<ContainerStatus> {
    let (i, s) = (exited("i", 0, 0), exited("s", 0, 137));
    vec![i, s, exited("a", 0, 137), exited("b", 0, 88)]
}

fn since(newer: &[ContainerStatus]) -> Vec<ContainerStatus> {
    [all_ended(), newer.to_vec()].concat()
}

/// The phase, and each container with its state.
fn brief(status: &api::PodStatus) -> String {
    let state = |s: &api::ContainerStatus| {
        let state = s.state.clone().unwrap_or_default();
        let running = state.running.map(|_| "running".to_owned());
        let ended = state.terminated.map(|t| t.exit_code.to_string());
        let waiting = state.waiting.and_then(|w| w.reason);
        let word = running.or(ended).or(waiting).unwrap_or_default();
        let last = s.last_state.as_ref().and_then(|l| l.terminated.as_ref());
        let last = last.map_or(String::new(), |t| format!("<{}", t.exit_code));
        format!("{} {word}{last}", s.name)
    };
    let containers: Vec<String> = all_statuses(status).map(state).collect();
    let phase = status.phase.as_deref().unwrap_or_default();
    format!("{phase}: {}", containers.join(", "))
}

fn condition(status: &api::PodStatus, name: &str) -> String {
    let all = status.conditions.iter().flatten();
    let mut found = all.filter(|c| c.type_ == name);
    found.next().map_or("none".to_owned(), |c| {
        let (reason, message) = (c.reason.as_deref(), c.message.as_deref());
        let parts = [Some(c.status.as_str()), reason, message];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    })
}

#[test]
fn containers_that_restart_with_all_others_wait_and_their_ends_are_not_final() {
    let stopping = || Some(restart_by_b(0, None));
    let done = || Some(restart_by_b(0, Some(ALL)));
    let (i, s) = (exited("i", 1, 0), running("s", 1));
    let table = [
        (
            "stopping",
            vec![
                exited("i", 0, 0),
                running("s", 0),
                running("a", 0),
                exited("b", 0, 88),
            ],
            stopping(),
            "Pending: i RESTARTING<0, s running, a running, b RESTARTING<88",
            "True RestartAllContainersStarted container b exited with 88, all containers restart",
        ),
        (
            "stopped",
            all_ended(),
            done(),
            "Pending: i RESTARTING<0, s RESTARTING<137, a RESTARTING<137, b RESTARTING<88",
            "False",
        ),
        (
            "init containers are done",
            since(&[i.clone(), s.clone()]),
            done(),
            "Running: i 0<0, s running<137, a RESTARTING<137, b RESTARTING<88",
            "False",
        ),
        (
            "one has ended again, another has not started yet",
            since(&[i.clone(), exited("s", 1, 0), exited("b", 1, 0)]),
            done(),
            "Running: i 0<0, s 0<137, a RESTARTING<137, b 0<88",
            "False",
        ),
        (
            "all have ended again",
            since(&[i, exited("s", 1, 0), exited("a", 1, 0), exited("b", 1, 0)]),
            done(),
            "Succeeded: i 0<0, s 0<137, a 0<137, b 0<88",
            "False PodCompleted",
        ),
    ];
    for (what, containers, restart, want, verdict) in table {
        let status = of(containers, restart).generate();
        let got = brief(&status).replace(RESTARTING, "RESTARTING");
        assert_eq!(got, want, "{what}");
        assert_eq!(condition(&status, CONDITION), verdict, "{what}");
        assert!(
            condition(&status, "Initialized").starts_with("True"),
            "{what}"
        );
    }
}

#[test]
fn a_pod_has_not_ended_while_a_restart_is_not_on_record_yet() {
    let mut pod = pod_that_restarts("Never");
    let spec = pod.spec.as_mut().unwrap();
    let rules = spec.containers[1].restart_policy_rules.take();
    spec.init_containers.as_mut().unwrap()[1].restart_policy_rules = rules;
    let (i, s) = (exited("i", 0, 0), exited("s", 0, 88));
    let containers = vec![i, s, exited("a", 0, 137), exited("b", 0, 0)];
    let status = Setup::of(pod, runtime(containers)).generate();
    let got = brief(&status).replace(RESTARTING, "RESTARTING");
    let want = "Pending: i RESTARTING<0, s RESTARTING<88, a RESTARTING<137, b RESTARTING<0";
    assert_eq!(got, want);
}

#[test]
fn a_pod_that_is_stopped_while_its_containers_restart_has_ended() {
    let setup = Setup {
        stage: Stage::Terminated,
        ..of(all_ended(), Some(restart_by_b(0, None)))
    };
    let status = setup.generate();
    assert_eq!(brief(&status), "Failed: i 0, s 137, a 137, b 88");
    assert_eq!(condition(&status, CONDITION), "False PodFailed");
}

#[test]
fn only_a_pod_that_may_restart_all_has_the_condition_and_takes_back_final_ends() {
    let old = of(vec![exited("a", 0, 0), running("b", 0)], None).generate();
    assert_eq!(condition(&old, CONDITION), "False");
    let new = of(all_ended(), Some(restart_by_b(0, Some(ALL)))).generate();
    let pod = pod_that_restarts("Never");
    let merged = merge_for_update(&pod, Some(&old), new.clone());
    assert!(merged.unwrap().is_some(), "a waits again");

    let mut other = pod_that_restarts("Never");
    for container in &mut other.spec.as_mut().unwrap().containers {
        container.restart_policy_rules = None;
    }
    let without = Setup::of(other.clone(), runtime(all_ended())).generate();
    assert_eq!(condition(&without, CONDITION), "none");
    assert!(merge_for_update(&other, Some(&old), new).is_err());
}

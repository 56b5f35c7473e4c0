//! Reported states of containers when nothing of the pod runs any more.

use serde_json::{Value, json};

use super::super::containers::Statuses;
use super::super::*;
use crate::core::testkit::pod;

fn waiting() -> Value {
    json!({"name": "x", "ready": false, "restartCount": 0, "image": "", "imageID": "",
        "state": {"waiting": {"reason": "ContainerCreating"}}})
}

fn with(fields: Value) -> Value {
    let mut status = waiting();
    for (key, value) in fields.as_object().unwrap() {
        status[key] = value.clone();
    }
    status
}

fn running() -> Value {
    with(json!({"state": {"running": {}}, "containerID": "c://1", "started": true}))
}

fn ended(code: i32) -> Value {
    with(json!({"state": {"terminated": {"exitCode": code}}, "containerID": "c://1"}))
}

/// Waits after an end.
fn ended_before(code: i32) -> Value {
    with(json!({"lastState": {"terminated": {"exitCode": code}}}))
}

fn statuses(init: &[Value], main: &[Value]) -> Statuses {
    let of = |all: &[Value]| {
        let all = all.iter().cloned();
        all.map(|s| serde_json::from_value(s).unwrap()).collect()
    };
    Statuses {
        init: of(init),
        main: of(main),
        ..Statuses::default()
    }
}

/// Exit codes, `-` of those that have not ended.
fn codes(all: &[api::ContainerStatus]) -> String {
    let code = |s: &api::ContainerStatus| {
        let end = s.state.as_ref().and_then(|s| s.terminated.as_ref());
        end.map_or("-".to_owned(), |end| end.exit_code.to_string())
    };
    all.iter().map(code).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_was_tried_has_ended_when_the_pod_has() {
    for (name, init, main, want) in [
        ("no init container", vec![], vec![waiting()], ("", "137")),
        (
            "the first counts as tried",
            vec![waiting(), waiting()],
            vec![waiting()],
            ("137 -", "-"),
        ),
        (
            "up to the last that was tried",
            vec![ended(0), running(), waiting()],
            vec![waiting()],
            ("0 137 -", "-"),
        ),
        (
            "tried once",
            vec![ended(0), ended_before(1), waiting()],
            vec![waiting()],
            ("0 137 -", "-"),
        ),
        (
            "tried: it has an id",
            vec![ended(0), with(json!({"containerID": "c://1"})), waiting()],
            vec![waiting()],
            ("0 137 -", "-"),
        ),
        (
            "the last has succeeded",
            vec![ended(0), ended(0)],
            vec![waiting()],
            ("0 0", "137"),
        ),
        (
            "the last has failed",
            vec![ended(0), ended(1)],
            vec![waiting()],
            ("0 1", "-"),
        ),
        (
            "it had succeeded",
            vec![ended_before(0)],
            vec![waiting()],
            ("137", "137"),
        ),
        (
            "it had failed",
            vec![ended_before(1)],
            vec![waiting()],
            ("137", "-"),
        ),
        (
            "a main container was tried",
            vec![ended(1)],
            vec![ended(3), waiting()],
            ("1", "3 137"),
        ),
        (
            "what has ended keeps its code",
            vec![],
            vec![ended(3), running()],
            ("", "3 137"),
        ),
    ] {
        let mut statuses = statuses(&init, &main);
        statuses.finish(&init_pod(init.len(), false));
        assert_eq!(
            (
                codes(&statuses.init).as_str(),
                codes(&statuses.main).as_str()
            ),
            want,
            "{name}"
        );
        let all = statuses.init.iter().chain(&statuses.main);
        assert!(all.into_iter().all(|s| s.started != Some(true)), "{name}");
    }
}

#[test]
fn a_pod_whose_last_init_container_is_a_sidecar_got_further_when_that_had_started() {
    let starting = with(json!({"state": {"running": {}}, "started": false}));
    for (sidecar, want) in [
        (running(), "137"),
        (starting, "-"),
        (ended(0), "-"),
        (with(json!({"started": true})), "-"),
    ] {
        let mut statuses = statuses(std::slice::from_ref(&sidecar), &[waiting()]);
        statuses.finish(&init_pod(1, true));
        assert_eq!(codes(&statuses.main), want, "{sidecar}");
    }
}

#[test]
fn a_pod_runs_while_any_of_its_containers_does() {
    for (init, main, want) in [
        (vec![], vec![], false),
        (vec![ended(0)], vec![waiting(), ended(1)], false),
        (vec![running()], vec![waiting()], true),
        (vec![], vec![ended(0), running()], true),
    ] {
        assert_eq!(
            statuses(&init, &main).any_running(),
            want,
            "{init:?} {main:?}"
        );
    }
}

/// A pod with so many init containers.
fn init_pod(count: usize, sidecar: bool) -> Pod {
    let mut pod = pod("Always", &["x"]);
    let init = json!({"name": "i", "restartPolicy": sidecar.then_some("Always")});
    let init = serde_json::from_value(init).unwrap();
    pod.spec.as_mut().unwrap().init_containers = Some(vec![init; count]);
    pod
}

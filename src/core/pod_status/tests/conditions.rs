//! Conditions with init containers, sidecars and resizes.

use super::super::*;
use super::support::*;

#[test]
fn initialized_table() {
    let incomplete = |names: &str| {
        format!("False ContainersNotInitialized: containers with incomplete status: [{names}]")
    };
    let done = || exited("i", 0, 0);
    for (name, policy, status, want) in [
        ("nothing yet", "Always", wiped(), incomplete("i s")),
        (
            "init runs",
            "Always",
            runtime(vec![running("i", 0)]),
            incomplete("i s"),
        ),
        (
            "init failed",
            "Always",
            runtime(vec![exited("i", 0, 1)]),
            incomplete("i s"),
        ),
        (
            "init failed for good",
            "Never",
            runtime(vec![exited("i", 0, 1)]),
            incomplete("i s"),
        ),
        (
            "init done",
            "Always",
            runtime(vec![done()]),
            incomplete("s"),
        ),
        (
            "sidecar started",
            "Always",
            runtime(vec![done(), running("s", 0)]),
            "True".into(),
        ),
        (
            "sidecar ended before main",
            "Always",
            runtime(vec![done(), exited("s", 0, 1)]),
            incomplete("s"),
        ),
        (
            "main runs",
            "Always",
            runtime(vec![done(), running("s", 0), running("m", 0)]),
            "True".into(),
        ),
        (
            "sidecar restarts",
            "Always",
            runtime(vec![done(), exited("s", 0, 1), running("m", 0)]),
            "True".into(),
        ),
        (
            "main ended, inits gone",
            "Always",
            runtime(vec![exited("m", 0, 1)]),
            "True".into(),
        ),
        (
            "succeeded",
            "Never",
            runtime(vec![done(), exited("s", 0, 0), exited("m", 0, 0)]),
            "True PodCompleted".into(),
        ),
        (
            "failed",
            "Never",
            runtime(vec![done(), exited("s", 0, 0), exited("m", 0, 1)]),
            "True".into(),
        ),
    ] {
        let status = Setup::of(all_kinds(policy), status).generate();
        assert_eq!(verdict(&status, "Initialized"), want, "{name}");
    }
}

#[test]
fn a_pod_whose_main_container_waits_after_a_run_stays_initialized() {
    let mut setup = Setup::all_kinds("Always", vec![exited("m", 1, 3)]);
    setup.owned = [
        ("i", forgotten("i", 0)),
        ("m", with_backoff(ended("m", 1, 3), 40)),
    ]
    .into();
    let status = setup.generate();
    assert_eq!(
        words(&status),
        "Pending i=init/0/0 s=init/-/0 m=CrashLoopBackOff/3/1"
    );
    assert_eq!(verdict(&status, "Initialized"), "True");
}

#[test]
fn containers_ready_counts_sidecars_first() {
    let unready = |names: &str| {
        format!("False ContainersNotReady: containers with unready status: [{names}]")
    };
    let done = || exited("i", 0, 0);
    for (name, policy, containers, want) in [
        ("nothing", "Always", vec![], unready("s m")),
        (
            "sidecar only",
            "Always",
            vec![done(), running("s", 0)],
            unready("m"),
        ),
        (
            "main only",
            "Always",
            vec![done(), exited("s", 0, 1), running("m", 0)],
            unready("s"),
        ),
        (
            "both",
            "Always",
            vec![done(), running("s", 0), running("m", 0)],
            "True".into(),
        ),
        (
            "succeeded",
            "Never",
            vec![done(), exited("s", 0, 0), exited("m", 0, 0)],
            "False PodCompleted".into(),
        ),
        (
            "failed",
            "Never",
            vec![exited("i", 0, 1)],
            "False PodFailed".into(),
        ),
    ] {
        let status = Setup::all_kinds(policy, containers).generate();
        assert_eq!(verdict(&status, "ContainersReady"), want, "{name}");
        assert_eq!(verdict(&status, "Ready"), want, "{name}");
    }
}

#[test]
fn a_sidecar_is_ready_by_its_own_probes() {
    let mut setup = Setup::all_kinds(
        "Always",
        vec![exited("i", 0, 0), running("s", 0), running("m", 0)],
    );
    let inits = setup
        .pod
        .spec
        .as_mut()
        .unwrap()
        .init_containers
        .as_mut()
        .unwrap();
    inits[1].readiness_probe = Some(Default::default());
    let want = "False ContainersNotReady: containers with unready status: [s]";
    assert_eq!(verdict(&setup.generate(), "Ready"), want);
    for (ready, want) in [(Some(false), want), (Some(true), "True")] {
        setup.probes.insert(
            "s".into(),
            ProbeView {
                ready,
                started: None,
            },
        );
        assert_eq!(verdict(&setup.generate(), "Ready"), want);
    }
}

#[test]
fn gates_speak_in_the_order_of_the_spec() {
    let mut setup = Setup::of(pod("Always", &["a"]), runtime(vec![running("a", 0)]));
    let gates = serde_json::json!([{"conditionType": "z"}, {"conditionType": "b"}]);
    setup.pod.spec.as_mut().unwrap().readiness_gates = serde_json::from_value(gates).ok();
    let conditions = serde_json::json!({"conditions": [{"type": "b", "status": "False"}]});
    setup.pod.status = serde_json::from_value(conditions).ok();
    let want = "False ReadinessGatesNotReady: corresponding condition of pod readiness gate \"z\" does not exist., \
                the status of pod readiness gate \"b\" is not \"True\", but False";
    assert_eq!(verdict(&setup.generate(), "Ready"), want);
}

#[test]
fn resizes_are_told_while_the_pod_lives() {
    let types = |s: &api::PodStatus| -> Vec<String> {
        s.conditions
            .iter()
            .flatten()
            .map(|c| c.type_.clone())
            .collect()
    };
    let mut setup = Setup::of(pod("Never", &["a"]), runtime(vec![running("a", 0)]));
    setup.resize.pending = Some(("Deferred".into(), "Node didn't have enough cpu".into()));
    setup.resize.in_progress = Some((String::new(), String::new()));
    let status = setup.generate();
    let want = "True Deferred: Node didn't have enough cpu";
    assert_eq!(verdict(&status, "PodResizePending"), want);
    assert_eq!(verdict(&status, "PodResizeInProgress"), "True");
    assert_eq!(
        types(&status),
        [
            "PodResizePending",
            "PodResizeInProgress",
            "PodReadyToStartContainers",
            "Initialized",
            "Ready",
            "ContainersReady",
            "PodScheduled"
        ]
    );
    // They are this agent's own: what the API server still shows of them is not kept.
    setup.pod.status = Some(status.clone());
    setup.previous = Some(status);
    setup.resize = ResizeView::default();
    assert_eq!(types(&setup.generate()).len(), 5);
    setup.resize.pending = Some(("Deferred".into(), "later".into()));
    setup.status = runtime(vec![exited("a", 0, 0)]);
    assert_eq!(types(&setup.generate()).len(), 5, "an end settles a resize");
}

#[test]
fn a_condition_keeps_its_transition_time_while_only_its_text_changes() {
    let mut setup = Setup::all_kinds("Always", vec![]);
    setup.previous = Some(setup.generate());
    setup.now = 100;
    setup.status = runtime(vec![exited("i", 0, 0)]);
    let next = setup.generate();
    let initialized = condition(&next, "Initialized");
    assert_eq!(
        initialized.message.as_deref(),
        Some("containers with incomplete status: [s]")
    );
    assert_eq!(initialized.last_transition_time, Some(states::time(at(70))));
}
